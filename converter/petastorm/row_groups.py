"""Which row groups a reader reads, and in which order: by predicate, selector, filters, shard and seed."""

from __future__ import annotations

import datetime as dt
import itertools
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter.errors import ConverterWarning
from converter.petastorm import stored_schema
from converter.petastorm.columns import boolean_of, convert_scalar, scalar_type
from converter.petastorm.errors import DecodeFieldError, NoDataAvailableError
from converter.petastorm.predicates import PredicateBase
from converter.petastorm.selectors import RowGroupSelectorBase
from converter.petastorm.store import RowGroup, Store
from converter.petastorm.unischema import Unischema

Filters = Any
"""A list of tuples `(column, operator, value)`, a list of such lists, or a `pyarrow.compute` expression."""


class Item(NamedTuple):
    """One reading of a row group, or of one of the parts that `shuffle_row_drop_partitions` makes of it."""

    row_group: RowGroup
    part: int
    num_parts: int
    epoch: int
    number: int
    """Its place among the items of an epoch before they are shuffled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Which of several readers this one is."""

    cur_shard: int | None
    shard_count: int | None
    seed: int | None

    def of(self, chosen: list[int], num_row_groups: int) -> list[int]:
        """This reader's part of the chosen row groups. Each belongs to one part; sizes differ by at most one.

        Raises:
            ValueError: only one of both numbers was given, or one is no number.
            NoDataAvailableError: there are fewer row groups than parts.
        """
        if self.cur_shard is None and self.shard_count is None:
            return chosen
        if (
            not isinstance(self.cur_shard, int)
            or not isinstance(self.shard_count, int)
            or not 0 <= self.cur_shard < self.shard_count
        ):
            raise ValueError(
                "partition and num_partitions must be ints and both specified to use partitioning: cur_shard="
                f"{self.cur_shard!r} must be in the range of shard_count={self.shard_count!r}."
            )
        if num_row_groups < self.shard_count or 0 < len(chosen) < self.shard_count:
            raise NoDataAvailableError(
                "Number of row-groups in the dataset must be greater or equal to the number of requested shards. "
                f"Otherwise, some of the shards will end up being empty. There are {num_row_groups} row groups, "
                f"{len(chosen)} of them chosen, and {self.shard_count} shards. The native loaders share out rows, not "
                "row groups."
            )
        if self.seed is not None:
            chosen = [chosen[number] for number in generator_of(self.seed).permutation(len(chosen))]
        return sorted(chosen[self.cur_shard :: self.shard_count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The row groups that a reader reads."""

    row_groups: tuple[RowGroup, ...]
    predicate: PredicateBase | None
    """The predicate, unless partition values alone decided it."""


def choose(
    store: Store,
    schema: Unischema,
    *,
    predicate: PredicateBase | None,
    selector: RowGroupSelectorBase | None,
    filters: Filters,
    shares: Shares,
) -> Choice:
    """The row groups of one reader. Warns if there are none.

    Raises:
        ValueError: filters name a column that is in no file; or the predicate or the selector is none, or names an
            index that is not stored or is of other files.
        NoDataAvailableError: there are fewer row groups than shards.
    """
    _check_names(store, filters)
    row_groups = store.row_groups()
    chosen = _where_filters_may_pass(store, row_groups, filters)
    if predicate is not None:
        if not isinstance(predicate, PredicateBase):
            raise ValueError("predicate parameter is expected to be derived from PredicateBase")
        fields = set(predicate.get_fields())
        if fields and fields <= set(store.partition_names):
            passing = _files_that_pass(store, schema, predicate, sorted(fields))
            chosen = [number for number in chosen if row_groups[number].file in passing]
            predicate = None
    if selector is not None:
        chosen = _selected(store, selector, chosen)
    chosen = shares.of(chosen, len(row_groups))
    if not chosen:
        warnings.warn(
            "No matching data is available for loading after rowgroup selector were applied and the data was sharded.",
            ConverterWarning,
            stacklevel=4,
        )
    return Choice(row_groups=tuple(row_groups[number] for number in chosen), predicate=predicate)


def _selected(store: Store, selector: RowGroupSelectorBase, chosen: Sequence[int]) -> list[int]:
    if not isinstance(selector, RowGroupSelectorBase):
        raise ValueError("rowgroup_selector parameter is expected to be derived from RowGroupSelectorBase")
    indexes = stored_schema.read_indexes(store.metadata)
    required = list(selector.get_index_names())
    if not set(required) <= set(indexes):
        raise ValueError(f"Some of required indexes {required} are not available in {list(indexes)}")
    selected = set(selector.select_row_groups(indexes))
    counts = stored_schema.row_groups_per_file(store.metadata)
    if counts is None:
        return [number for number in chosen if number in selected]
    # An index numbers the row groups of the files that were there when it was built.
    if unknown := set(store.names) - counts.keys():
        raise ValueError(
            f"rowgroup_selector cannot be used: the index of row groups at {store.storage.url} does not know the file "
            f"{min(unknown)}, which was added later. Build it again with build_rowgroup_index."
        )
    indexed = [(name, number) for name in sorted(counts) for number in range(counts[name])]
    places = {indexed[number] for number in selected if 0 <= number < len(indexed)}
    row_groups = store.row_groups()
    return [one for one in chosen if (store.names[row_groups[one].file], row_groups[one].number) in places]


def _files_that_pass(store: Store, schema: Unischema, predicate: PredicateBase, names: Sequence[str]) -> set[int]:
    """The files whose partition values the predicate includes; it is asked once for each combination."""
    answers: dict[tuple[str | None, ...], bool] = {}
    passing = set()
    for file, partition in enumerate(store.partitions):
        key = tuple(partition[name] for name in names)
        if key not in answers:
            values = {name: partition_value(schema, name, partition[name]) for name in names}
            answers[key] = bool(predicate.do_include(values))
        if answers[key]:
            passing.add(file)
    return passing


def partition_value(schema: Unischema, name: str, text: str | None) -> Any:
    """A folder's value as its field has it.

    Raises:
        DecodeFieldError: it is none of the field's type.
    """
    if text is None or name not in schema.fields:
        return text
    try:
        return _of_type(scalar_type(schema.fields[name].numpy_dtype), text)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise DecodeFieldError(f'Decoding field "{name}" failed: its folder says {text!r}: {error}') from error


def _of_type(kind: Any, text: str) -> Any:
    """A folder's value as a type has it."""
    if issubclass(kind, np.generic):
        return convert_scalar(kind, text)
    if issubclass(kind, bool):
        return boolean_of(text)
    return kind.fromisoformat(text) if issubclass(kind, (dt.date, dt.time)) else kind(text)


def names_in(filters: Filters) -> list[str]:
    """The columns that filters compare, unless they are an expression."""
    if isinstance(filters, pc.Expression) or not filters:
        return []
    any_of = filters if isinstance(filters[0], list) else [filters]
    return list(dict.fromkeys(term[0] for terms in any_of for term in terms))


def _check_names(store: Store, filters: Filters) -> None:
    """Raise ValueError if filters name what is no column: all its values would be null, and no row would pass."""
    unknown = set(names_in(filters)) - {*store.partition_names}
    if not unknown:
        return
    known = {*store.partition_names, *store.arrow_schema.names}
    unknown -= known
    # Later files may have columns of their own.
    for file in range(1, len(store.names) if unknown else 1):
        unknown -= set(store.footer(file).schema.to_arrow_schema().names)
        if not unknown:
            return
    if unknown:
        raise ValueError(
            f"filters names {', '.join(map(repr, sorted(unknown)))}, which no file has as a column. There are "
            f"{', '.join(sorted(known))}."
        )


def _where_filters_may_pass(store: Store, row_groups: Sequence[RowGroup], filters: Filters) -> list[int]:
    """The row groups whose partition values do not exclude them."""
    numbers = list(range(len(row_groups)))
    if isinstance(filters, pc.Expression) or not filters or not store.partition_names:
        return numbers
    any_of = filters if isinstance(filters[0], list) else [filters]
    answers: dict[tuple[str | None, ...], bool] = {}

    def may_pass(file: int) -> bool:
        partition = store.partitions[file]
        key = tuple(partition.values())
        if key not in answers:
            answers[key] = any(
                all(_holds(partition, term) for term in terms if term[0] in partition) for terms in any_of
            )
        return answers[key]

    return [number for number in numbers if may_pass(row_groups[number].file)]


def _holds(partition: Mapping[str, str | None], term: tuple[Any, ...]) -> bool:
    name, _, value = term
    values = pa.array([partition_like(name, partition[name], value)])
    return bool(pa.table({name: values}).filter(pq.filters_to_expression([[term]])).num_rows)


def partition_like(name: str, text: str | None, value: Any) -> Any:
    """A partition's text with the type of the value that a filter compares it with.

    Raises:
        ValueError: it is none of that type.
    """
    if text is None:
        return None
    sample = next(iter(value), "") if isinstance(value, (list, tuple, set, frozenset)) else value
    try:
        return text if isinstance(sample, str) else _of_type(type(sample), text)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ValueError(
            f"filters compares the partition column {name!r} with {sample!r}, but a folder says {text!r}: {error}. "
            "Compare it with a text."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of the items in each epoch: a function of seed and epoch."""

    row_groups: tuple[RowGroup, ...]
    num_parts: int
    is_shuffled: bool
    seed: int

    def epochs(self, num_epochs: int | None, first: int) -> Iterator[Item]:
        """The items of so many epochs, without end if None, beginning with the epoch `first`."""
        if not self.row_groups:
            return
        for epoch in itertools.count(first) if num_epochs is None else range(first, first + num_epochs):
            yield from self.epoch(epoch)

    def epoch(self, epoch: int) -> Iterator[Item]:
        """The items of one epoch."""
        count = len(self.row_groups) * self.num_parts
        numbers = generator_of(self.seed, epoch).permutation(count) if self.is_shuffled else np.arange(count)
        for number in numbers.tolist():
            row_group, part = divmod(number, self.num_parts)
            yield Item(self.row_groups[row_group], part, self.num_parts, epoch, number)


class EmptyEpochs:
    """Notices that epochs without end hand out no row, which would be waited for without end.

    Each epoch has its `num_items` items in an order of its own, so only twice as many in a row surely hold them all.
    """

    def __init__(self, num_epochs: int | None, num_items: int) -> None:
        self._most = 2 * num_items if num_epochs is None else sys.maxsize
        self._in_a_row = 0

    def note(self, num_rows: int) -> None:
        """Note what an item gave.

        Raises:
            NoDataAvailableError: it was the last of two epochs without a row.
        """
        self._in_a_row = 0 if num_rows else self._in_a_row + 1
        if self._in_a_row >= self._most:
            raise NoDataAvailableError(
                "num_epochs=None reads the rows again and again, but two epochs gave none: predicate, filters, "
                "transform or windows leave no row of the row groups. Choose others, or pass a number as num_epochs."
            )


def generator_of(seed: int, *place: int) -> np.random.Generator:
    """The random generator of one place in the order."""
    return np.random.default_rng([seed % (1 << 64), *place])
