"""What the threads of a reader do with a row group: choose its rows, decode them, and apply the user's transform."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter.petastorm.blocks import (
    Block,
    TransformMismatchError,
    collect,
    from_frame,
    num_rows_of,
    to_batch,
)
from converter.petastorm.columns import to_objects
from converter.petastorm.ngram import NGram
from converter.petastorm.predicates import PredicateBase
from converter.petastorm.row_groups import Filters, Item, generator_of, names_in, partition_like, partition_value
from converter.petastorm.store import Store
from converter.petastorm.transform import TransformSpec
from converter.petastorm.unischema import Unischema, decode_column

Rows = npt.NDArray[np.int64]

_PIECE_BYTES = 16 << 20
"""Decoded rows that are made at once. Larger pieces hold more memory and start later; a guess."""

_MOST_ROWS, _LEAST_ROWS = 65_536, 16
_UNKNOWN_ROW_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows that a thread has finished: as columns, or as the dicts that a user's function of rows returned."""

    columns: Block | None = None
    rows: Sequence[Mapping[str, Any]] | None = None

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return num_rows_of(self.columns or {}) if self.rows is None else len(self.rows)

    def block(self, schema: Unischema) -> Block:
        """The rows as columns."""
        if self.rows is None:
            return self.columns or {}
        return {name: collect(field, [row[name] for row in self.rows]) for name, field in schema.fields.items()}

    def values(self, name: str) -> list[Any]:
        """A column's values, one for each row."""
        if self.rows is not None:
            return [row[name] for row in self.rows]
        return list((self.columns or {})[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How row groups become pieces; threads share it."""

    store: Store
    stored: Unischema
    """The fields that are read."""

    schema: Unischema
    """The fields that are handed out."""

    is_batched: bool
    ngram: NGram | None
    predicate: PredicateBase | None
    transform: TransformSpec | None
    apply: Callable[[Any], Any] | None
    """The transform's function of a frame, or of a list of rows as dicts; None if there is none."""

    filters: Filters
    shuffle_rows: bool
    seed: int

    def read(self, item: Item, given_up: threading.Event) -> pa.Table:
        """The stored columns of the rows that are wanted, in their order. Requests end once `given_up` is set.

        Raises:
            ReadError: the row group cannot be read.
            ValueError: the predicate names no field, or one that is not read.
        """
        names = list(self.stored.fields)
        asked = self._asked_names()
        if not asked:
            table = self.store.read(item.row_group, names, given_up)
            if not self.shuffle_rows and item.num_parts == 1:
                return table
            return table.take(self._part_of(item, self._order_of(item, table.num_rows)))
        # Opened once: the file may be replaced while the predicate runs.
        read = self.store.open_row_group(item.row_group, given_up)
        early = read(asked)
        rows = self._order_of(item, early.num_rows)
        # A part's last windows end in rows of the next part, which must be rows that are chosen.
        is_cut_later = self.ngram is not None
        if not is_cut_later:
            rows = self._part_of(item, rows)
        if self.filters is not None:
            rows = rows[self._passing(item, early)[rows]]
        if self.predicate is not None and len(rows):
            rows = rows[self._included(early.take(rows))]
        if is_cut_later:
            rows = self._part_of(item, rows)
        if not len(rows):
            return pa.table({name: pa.array([], pa.null()) for name in names})
        late = [name for name in names if name not in asked]
        table = read(late)
        columns = dict(zip(early.column_names, early.columns, strict=True))
        columns |= dict(zip(table.column_names, table.columns, strict=True))
        return pa.table({name: columns[name] for name in names}).take(rows)

    def _asked_names(self) -> list[str]:
        """The columns by which rows are chosen, before others are read."""
        names: list[str] = []
        if self.predicate is not None:
            names = list(self.predicate.get_fields())
            if not names:
                raise ValueError("At least one field name must be returned by predicate's get_field() method")
            unknown = [name for name in names if name not in self.stored.fields]
            if unknown:
                raise ValueError(
                    f"At least some column names requested by the predicate ({', '.join(unknown)}) are not valid "
                    f"schema names: ({', '.join(self.stored.fields)})"
                )
        if isinstance(self.filters, pc.Expression):
            names += [*self.store.arrow_schema.names, *self.store.partition_names]
        else:
            names += names_in(self.filters)
        return list(dict.fromkeys(names))

    def _order_of(self, item: Item, num_rows: int) -> Rows:
        """The rows of an item's row group in order."""
        if not self.shuffle_rows:
            return np.arange(num_rows)
        # The parts of one row group share its order, so that together they have each row once.
        number = item.number // item.num_parts
        return generator_of(self.seed, item.epoch, number).permutation(num_rows)

    def _part_of(self, item: Item, order: Rows) -> Rows:
        """The rows of an item, of those of its row group in order."""
        if item.num_parts == 1:
            return order
        num_rows = len(order)
        num_parts = max(1, min(num_rows, item.num_parts))
        parts = np.arange(num_rows) * num_parts // max(1, num_rows)
        stop = int(np.searchsorted(parts, item.part, side="right"))
        start = int(np.searchsorted(parts, item.part))
        if self.ngram is not None and stop > start:
            # A window that begins in this part may end in the next.
            stop = min(num_rows, stop + self.ngram.length - 1)
        return order[start:stop]

    def _passing(self, item: Item, table: pa.Table) -> npt.NDArray[np.bool_]:
        """Which rows pass the filters."""
        filters = self.filters
        if not isinstance(filters, pc.Expression):
            any_of = filters if isinstance(filters[0], list) else [filters]
            partition = self.store.partitions[item.row_group.file]
            for terms in any_of:
                for name, _, value in terms:
                    if name in partition:
                        at = table.column_names.index(name)
                        constant = pa.scalar(partition_like(name, partition[name], value))
                        table = table.set_column(at, name, pa.repeat(constant, table.num_rows))
            filters = pq.filters_to_expression(any_of)
            return _rows_that_pass(filters, table)
        try:
            return _rows_that_pass(filters, self._with_partition_values(table))
        except pa.ArrowNotImplementedError:
            # It compares partition columns with texts.
            return _rows_that_pass(filters, table)

    def _included(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        """Which rows the predicate includes."""
        assert self.predicate is not None
        table = table.select(list(self.predicate.get_fields()))
        if not self.is_batched:
            return np.asarray(self.predicate.do_include_columns(self._decode(table)), np.bool_)
        table = self._with_partition_values(table)
        frame = functools.cache(table.to_pandas)

        def mask_of(predicate: PredicateBase) -> npt.NDArray[np.bool_]:
            if predicate.works_on_columns:
                columns = self._comparable(table.select(list(predicate.get_fields())))
                return np.asarray(predicate.do_include_columns(columns), np.bool_)
            parts = predicate.mask_of_parts(mask_of)
            return _mask_of_frame(predicate, predicate.do_include(frame()), table.num_rows) if parts is None else parts

        return mask_of(self.predicate)

    def _comparable(self, table: pa.Table) -> Block:
        """A batch whose whole numbers stay so beside nulls: as doubles they would be rounded, and other texts."""
        columns = to_batch(table, self.stored)
        for name, column in zip(table.column_names, table.columns, strict=True):
            if pa.types.is_integer(column.type) and column.null_count:
                columns[name] = to_objects(column.to_pylist())
        return columns

    def pieces(self, table: pa.Table) -> Iterator[pa.Table]:
        """The table in parts that are decoded one by one; all of it if batches or windows need the whole."""
        if not table.num_rows:
            return
        num_rows = table.num_rows if self.is_batched or self.ngram is not None else self._piece_rows
        for start in range(0, table.num_rows, num_rows):
            yield table.slice(start, num_rows)

    @property
    def _piece_rows(self) -> int:
        row_bytes = 0
        for field in self.stored.fields.values():
            sizes = [size for size in field.shape if size is not None]
            row_bytes += _UNKNOWN_ROW_BYTES if len(sizes) < len(field.shape) else 8 * math.prod(sizes)
        return max(_LEAST_ROWS, min(_MOST_ROWS, _PIECE_BYTES // max(1, row_bytes)))

    def make(self, table: pa.Table) -> Piece:
        """Decode rows, and apply the user's transform.

        Raises:
            DecodeFieldError: a value cannot be decoded.
            ValueError, TypeError: the transform returned what it did not declare.
        """
        if self.is_batched:
            return Piece(columns=self._make_batch(table))
        columns = self._decode(table)
        if self.transform is None:
            return Piece(columns=columns)
        if self.apply is None:
            self._require_all(columns)
            return Piece(columns={name: columns[name] for name in self.schema.fields})
        return Piece(rows=self._transform_rows(columns, self.apply))

    def _require_all(self, columns: Block) -> None:
        if not self.schema.fields.keys() <= columns.keys():
            raise TransformMismatchError(
                f"Transformed result columns ({','.join(columns)}) do not match required schema columns"
                f"({','.join(self.schema.fields)}): a TransformSpec without func adds no column."
            )

    def _make_batch(self, table: pa.Table) -> Block:
        table = self._with_partition_values(table)
        if self.transform is None or self.apply is None:
            block = to_batch(
                table.select([name for name in self.schema.fields if name in table.column_names]), self.schema
            )
            self._require_all(block)
            return block
        frame = self.apply(table.to_pandas())
        removed = [name for name in self.transform.removed_fields or () if name in frame.columns]
        return from_frame(frame.drop(columns=removed) if removed else frame, self.schema)

    def _transform_rows(self, columns: Block, apply: Callable[[Any], Any]) -> list[Mapping[str, Any]]:
        """The rows that the user's function of a row makes."""
        assert self.transform is not None
        names = list(columns)
        made: list[Mapping[str, Any]] = apply(
            [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        )
        wanted, removed = self.schema.fields.keys(), set(self.transform.removed_fields or ())
        for row in made:
            if row.keys() - removed != wanted:
                raise TransformMismatchError(
                    f"The transform returned a row with the fields {', '.join(row)}, expected "
                    f"{', '.join(wanted)}. Declare new fields in edit_fields, and others in removed_fields."
                )
        return made

    def _decode(self, table: pa.Table) -> Block:
        fields = self.stored.fields
        columns: Block = {}
        for name in table.column_names:
            column = table.column(name)
            if name in self.store.partition_names:
                columns[name] = self._partition_column(name, column)
            else:
                columns[name] = decode_column(fields[name], column)
        return columns

    def _partition_column(self, name: str, column: pa.ChunkedArray) -> npt.NDArray[Any]:
        """A partition column with its field's type; all rows of a row group have one value."""
        value = partition_value(self.stored, name, column[0].as_py()) if len(column) else None
        if isinstance(value, (np.number, np.bool_)):
            return np.full(len(column), value)
        values = np.empty(len(column), object)
        values[:] = [value] * len(column)
        return values

    def _with_partition_values(self, table: pa.Table) -> pa.Table:
        """The table with partition columns as text or int64, whatever their fields say: as batches have them."""
        for name in self.store.partition_names:
            if name in table.column_names:
                at, kind = table.column_names.index(name), self.store.partition_types[name]
                table = table.set_column(at, name, table.column(name).cast(kind))
        return table


def _mask_of_frame(predicate: PredicateBase, answer: Any, num_rows: int) -> npt.NDArray[np.bool_]:
    mask = np.asarray(answer, np.bool_)
    if mask.shape != (num_rows,):
        raise ValueError(
            f"A predicate of the fields {', '.join(sorted(predicate.get_fields()))} gave {answer!r}, expected a "
            f"boolean for each of {num_rows} rows: with make_batch_reader it gets pandas series and returns one."
        )
    return mask


def _rows_that_pass(filters: pc.Expression, table: pa.Table) -> npt.NDArray[np.bool_]:
    # Longer than the name of any column, so that it is none of them.
    numbers = "#" + max(table.column_names, key=len)
    numbered = table.append_column(numbers, pa.array(np.arange(table.num_rows)))
    passing = np.zeros(table.num_rows, np.bool_)
    passing[numbered.filter(filters).column(numbers).to_numpy()] = True
    return passing


class EachRow:
    """A user's function of a row as a function of many: the one loop over rows, because the function takes rows."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[Any]:
        """What the function makes of each row."""
        return [self._function(row) for row in rows]
