"""Where a Parquet file holds a column, whoever wrote it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from converter.errors import SourceError
from converter.parsed_footer import ParsedFooter

_FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceColumn:
    """Where files that somebody else wrote hold a column, each perhaps in its own way.

    Where the path leads nowhere a file was written before the column was added, and it is null there; as it is where
    the file has no type for it.
    """

    arrow_type: pa.DataType
    """What its values are; a file may hold a narrower type."""

    path: tuple[str, ...] = ()
    """The column's name in the files; of a struct's member those of the structs around it first."""

    field_ids: tuple[int, ...] = ()
    """The same as the numbers that the files give their columns, where a table goes by those; else empty."""

    ignores_case: bool = False
    """Whether a file may write the names in other cases."""

    values: pa.DictionaryArray | None = None
    """The one value that it has in each file, where that is said elsewhere: in a file's name, or in a log."""

    least: pa.Array | None = None
    """For each file a value that no value in it is below; null where that is not known, None where it never is."""

    most: pa.Array | None = None
    """The same from above."""

    null_counts: pa.Array | None = None
    """For each file how many nulls it has."""

    def find(self, level: Level) -> Place | None:
        """Where a file whose columns these are holds the column, or None."""
        leaf, members, top = 0, [], -1
        keys: Sequence[str | int] = self.field_ids or self.path
        for depth, key in enumerate(keys):
            number = level.number_of(key, by_id=bool(self.field_ids), ignores_case=self.ignores_case)
            if number is None:
                return None
            leaf += level.leaves[number]
            found = level.fields[number]
            if depth:
                members.append(found.name)
            else:
                top = number
            if depth + 1 == len(keys):
                # A type of nulls alone is what pandas gives a column of a file in which it has no value.
                return None if pa.types.is_null(found.type) else Place(leaf, top, tuple(members), found)
            if not pa.types.is_struct(found.type):
                return None
            level = level.below(number)
        return None


class Level:
    """The columns of a file, or the members of a struct in it: looked at once, however many are looked for.

    >>> level = Level(pa.schema({"a": pa.struct({"b": pa.int32(), "c": pa.int32()}), "d": pa.int64()}))
    >>> SourceColumn(arrow_type=pa.int64(), path=("d",)).find(level).leaf
    2
    """

    def __init__(self, fields: Iterable[pa.Field]) -> None:
        self.fields = list(fields)
        self.leaves = [0, *itertools.accumulate(count_leaves(one.type) for one in self.fields)]
        """How many columns of values there are before each, and in all."""
        self._below: dict[int, Level] = {}

    def below(self, number: int) -> Level:
        """The members of one that is a struct."""
        if number not in self._below:
            kind = self.fields[number].type
            self._below[number] = Level(kind.field(index) for index in range(kind.num_fields))
        return self._below[number]

    def number_of(self, key: str | int, *, by_id: bool, ignores_case: bool) -> int | None:
        """The one of this name, or of this number that the file gives it; None if there is none, or none is meant."""
        if by_id:
            return self._ids.get(key)
        found = self._names.get(str(key))
        if found is not None or not ignores_case:
            return found
        alike = self._folded.get(str(key).casefold(), [])
        return alike[0] if len(alike) == 1 else None

    # Of equal ones the first is meant.
    @functools.cached_property
    def _names(self) -> dict[str, int]:
        return {one.name: number for number, one in reversed([*enumerate(self.fields)])}

    @functools.cached_property
    def _ids(self) -> dict[Any, int]:
        return {_field_id(one): number for number, one in reversed([*enumerate(self.fields)])}

    @functools.cached_property
    def _folded(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, one in enumerate(self.fields):
            found.setdefault(one.name.casefold(), []).append(number)
        return found


class Place(NamedTuple):
    """A column in one file."""

    leaf: int
    """The number of the first column of values that it is made of."""

    top: int
    """The number of the column that it is, or that it is a member of."""

    members: tuple[str, ...]
    """From there on the names of the members that lead to it."""

    field: pa.Field
    """As the file describes it."""

    @property
    def leaves(self) -> range:
        """The columns of values that it is made of."""
        return range(self.leaf, self.leaf + count_leaves(self.field.type))


def count_leaves(kind: pa.DataType) -> int:
    """How many columns of values a Parquet file has for a type.

    >>> count_leaves(pa.struct({"a": pa.int32(), "b": pa.list_(pa.float32())}))
    2
    """
    if isinstance(kind, pa.BaseExtensionType):
        return count_leaves(kind.storage_type)
    return sum(count_leaves(kind.field(index).type) for index in range(kind.num_fields)) if kind.num_fields else 1


def _field_id(field: pa.Field) -> int | None:
    said = (field.metadata or {}).get(_FIELD_ID)
    return None if said is None else int(said)


def refuse_encrypted(path: str, footer: ParsedFooter) -> None:
    """Raise SourceError if columns are encrypted behind a footer that is not."""
    if footer.is_encrypted:
        raise SourceError(
            f"{path} has encrypted columns, which cannot be read. Read it with Spark, which has the keys, and convert "
            "the DataFrame.",
            path=path,
        )
