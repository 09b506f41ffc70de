"""A Parquet file's rows as pyarrow, DuckDB, Polars and a converter read them: cells that can be compared bit by bit.

A cell is a whole number (a float is its bits; a day, a time and a span of time are counts since 1970 or midnight, in
microseconds that are rounded down), text, bytes, a Decimal, a list of cells, or None for a null. A member of a struct,
and the keys and the values of a map, are columns of their own, as they are in a converter.
"""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter import DatasetConverter
from tests.parity.rows import is_list
from tests.rows import concatenate

Cells = dict[str, list[Any]]
"""The cells of each column."""


class Leaf(NamedTuple):
    """A column of cells as a file has it."""

    type: pa.DataType
    """Of the scalars."""

    depth: int
    """How many lists they are in."""

    column: str
    """The column of the file that it is, or is a member of."""


_PER_MICROSECOND = {"s": (1_000_000, 1), "ms": (1000, 1), "us": (1, 1), "ns": (1, 1000)}
_WORDS = {16: pa.uint32(), 32: pa.uint32(), 64: pa.uint64()}


def read_with_pyarrow(path: Path) -> pa.Table:
    """What pyarrow reads. Times of 96 bits as microseconds: nanoseconds cannot hold most years."""
    return pq.read_table(path, coerce_int96_timestamp_unit="us")


def read_with_duckdb(path: Path, columns: list[str]) -> pa.Table:
    """What DuckDB reads."""
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        return connection.read_parquet(str(path)).to_arrow_table().select(columns)


def read_with_polars(path: Path, columns: list[str]) -> pa.Table:
    """What Polars reads."""
    return pl.read_parquet(path, columns=columns).to_arrow()


def leaves_of(schema: pa.Schema) -> dict[str, Leaf]:
    """The columns of cells that a table of this schema has."""

    def below(name: str, kind: pa.DataType, depth: int, column: str) -> Iterator[tuple[str, Leaf]]:
        if pa.types.is_struct(kind):
            for member in kind:
                yield from below(f"{name}.{member.name}", member.type, depth, column)
        elif pa.types.is_map(kind):
            yield from below(f"{name}.key", kind.key_type, depth + 1, column)
            yield from below(f"{name}.value", kind.item_type, depth + 1, column)
        elif is_list(kind):
            yield from below(name, kind.value_type, depth + 1, column)
        elif pa.types.is_dictionary(kind):
            yield from below(name, kind.value_type, depth, column)
        else:
            yield name, Leaf(kind, depth, column)

    return dict(leaf for field in schema for leaf in below(field.name, field.type, 0, field.name))


def cells_of_table(table: pa.Table) -> Cells:
    """The cells of an Arrow table."""
    found: Cells = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        whole = column.combine_chunks()
        if isinstance(whole, pa.ChunkedArray):
            whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], whole.type)
        for path, cells in _spread(whole):
            found[".".join((name, *path))] = cells
    return found


def _spread(array: pa.Array) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """The cells of each leaf of a column, with its path below the column."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        yield from _spread(array.storage)
    elif pa.types.is_struct(kind):
        for member, inner in zip(kind, array.flatten(), strict=True):
            for path, cells in _spread(inner):
                yield (member.name, *path), cells
    elif pa.types.is_map(kind) or is_list(kind):
        if pa.types.is_map(kind):
            array = array.cast(
                pa.list_(pa.struct([kind.key_field.with_name("key"), kind.item_field.with_name("value")]))
            )
        lengths = pc.list_value_length(array)
        # A fixed-size list that is null has a length all the same.
        counts = [length if there else None for length, there in
                  zip(lengths.to_pylist(), array.is_valid().to_pylist(), strict=True)]  # fmt: skip
        for path, cells in _spread(array.flatten()):
            each = iter(cells)
            yield path, [None if count is None else [next(each) for _ in range(count)] for count in counts]
    else:
        yield (), _scalars(array)


def _scalars(array: pa.Array) -> list[Any]:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _scalars(array.dictionary_decode())
    if pa.types.is_floating(kind):
        wide = array.cast(pa.float32()) if kind.bit_width == 16 else array
        return list(wide.view(_WORDS[kind.bit_width]).to_pylist())
    if pa.types.is_date64(kind):
        return _scalars(array.cast(pa.date32()))
    if pa.types.is_date32(kind):
        return list(array.view(pa.int32()).to_pylist())
    if pa.types.is_timestamp(kind) or pa.types.is_time(kind) or pa.types.is_duration(kind):
        times, per = _PER_MICROSECOND[kind.unit]
        counts = array.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()
        return [None if count is None else count * times // per for count in counts]
    return list(array.to_pylist())


def cells_of_batches(batches: list[dict[str, Any]]) -> Cells:
    """The cells of a converter's batches, whose nulls stand beside masks."""
    batch = concatenate(batches)
    names = [name for name in batch if not name.endswith(("__valid", "__element_valid"))]
    return {name: _cells_of_column(batch, name) for name in names}


def _cells_of_column(batch: Mapping[str, Any], name: str) -> list[Any]:
    values, valid = batch[name], batch.get(f"{name}__valid")
    elements = batch.get(f"{name}__element_valid")
    there = [True] * len(values) if valid is None else valid.tolist()
    flags = [None] * len(values) if elements is None else list(elements)
    cells = list(values) if values.dtype == object or values.ndim > 1 else _words(values).tolist()
    return [_cell(cell, flag) if is_there else None for cell, flag, is_there in zip(cells, flags, there, strict=True)]


def _cell(value: Any, valid: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim == 1 and value.dtype != object:
        value = _words(value)
    if valid is None:
        return [_cell(inner, None) for inner in value] if value.ndim > 1 else value.tolist()
    inner = list(value) if value.ndim > 1 else value.tolist()
    return [
        _cell(one, flag) if isinstance(one, np.ndarray) else (one if flag else None)
        for one, flag in zip(inner, valid, strict=True)
    ]


def _words(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "f":
        return values.view(f"u{values.dtype.itemsize}")
    return values.view(np.int64) if values.dtype.kind == "M" else values


def read_in_order(converter: DatasetConverter, **options: Any) -> Cells:
    """All rows of a converter."""
    known: dict[str, Any] = {"nulls": "mask", "ragged": "nested", "cur_shard": 0, "shard_count": 1}
    with converter.make_batch_reader(**known | options) as reader:
        return cells_of_batches(list(reader))


def difference(found: Cells, expected: Cells) -> str | None:
    """The first difference in words; None if there is none."""
    if list(found) != list(expected):
        return f"columns {list(found)} instead of {list(expected)}"
    for name, cells in expected.items():
        if len(found[name]) != len(cells):
            return f"{name!r} has {len(found[name])} rows instead of {len(cells)}"
        for row, (cell, other) in enumerate(zip(found[name], cells, strict=True)):
            if not _is_same(cell, other):
                return f"{name!r} has {cell!r:.200} in row {row} instead of {other!r:.200}"
    return None


def _is_same(cell: Any, expected: Any) -> bool:
    if isinstance(expected, list) and isinstance(cell, list):
        if len(cell) != len(expected):
            # A tensor of no rows has no inner rows: `[[], []]` is one of them.
            return not any(map(_has_leaves, (cell, expected)))
        return all(map(_is_same, cell, expected))
    if isinstance(expected, decimal.Decimal) and type(cell) is int:
        # The bits of a double: the nearest one, but for its last digit.
        number, nearest = float(np.uint64(cell).view(np.float64)), float(expected)
        return abs(number - nearest) <= np.spacing(abs(nearest))
    return type(cell) is type(expected) and bool(cell == expected)


def _has_leaves(cell: Any) -> bool:
    return any(map(_has_leaves, cell)) if isinstance(cell, list) else True


def moment(microseconds: int) -> dt.datetime:
    """A time by its count."""
    return dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(microseconds=microseconds)
