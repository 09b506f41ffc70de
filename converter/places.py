"""Where a Parquet file holds a column: found by name or field id, in files of any writer."""

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
    """How files of other writers hold a column, each perhaps in its own way.

    A file without the column was written before the column was added: it is null there.
    """

    arrow_type: pa.DataType
    """The type of its values; a file may hold a narrower one."""

    path: tuple[str, ...] = ()
    """The column's name in the files; a struct's member has the names of the structs around it first."""

    field_ids: tuple[int, ...] = ()
    """The path as field ids of the files, if the table goes by those; else empty."""

    ignores_case: bool = False
    """Whether a file may spell the names in other cases."""

    values: pa.DictionaryArray | None = None
    """Its one value in each file, if a file's name or a log gives it."""

    least: pa.Array | None = None
    """A lower bound of its values in each file; null where it is not known, None if it is known nowhere."""

    most: pa.Array | None = None
    """An upper bound."""

    null_counts: pa.Array | None = None
    """How many nulls it has in each file."""

    def find(self, level: Level) -> Place | None:
        """Where a file with these columns holds the column; None if it does not."""
        leaf, members, top = 0, [], -1
        keys: Sequence[str | int] = self.field_ids or self.path
        for depth, key in enumerate(keys):
            number = level.number_of(key, by_id=bool(self.field_ids), ignores_case=self.ignores_case)
            if number is None:
                return None
            leaf += level.leaves[number]
            field = level.fields[number]
            if depth:
                members.append(field.name)
            else:
                top = number
            if depth + 1 == len(keys):
                # pandas writes a column without a value as the type of nulls.
                return None if pa.types.is_null(field.type) else Place(leaf, top, tuple(members), field)
            if not pa.types.is_struct(field.type):
                return None
            level = level.below(number)
        return None


class Level:
    """The columns of a file, or the members of a struct in it, indexed once for all look-ups.

    >>> level = Level(pa.schema({"a": pa.struct({"b": pa.int32(), "c": pa.int32()}), "d": pa.int64()}))
    >>> SourceColumn(arrow_type=pa.int64(), path=("d",)).find(level).leaf
    2
    """

    def __init__(self, fields: Iterable[pa.Field]) -> None:
        self.fields = list(fields)
        self.leaves = [0, *itertools.accumulate(count_leaves(field.type) for field in self.fields)]
        """How many columns of values precede each, and how many there are in all."""
        self._below: dict[int, Level] = {}

    def below(self, number: int) -> Level:
        """The members of a struct."""
        if number not in self._below:
            kind = self.fields[number].type
            self._below[number] = Level(kind.field(index) for index in range(kind.num_fields))
        return self._below[number]

    def number_of(self, key: str | int, *, by_id: bool, ignores_case: bool) -> int | None:
        """The index of the column with this name or field id; None if there is none, or several differ only in case."""
        if by_id:
            return self._ids.get(key)
        number = self._names.get(str(key))
        if number is not None or not ignores_case:
            return number
        alike = self._folded.get(str(key).casefold(), [])
        return alike[0] if len(alike) == 1 else None

    # The first of several equal names or ids is meant.
    @functools.cached_property
    def _names(self) -> dict[str, int]:
        return {field.name: number for number, field in reversed([*enumerate(self.fields)])}

    @functools.cached_property
    def _ids(self) -> dict[Any, int]:
        return {_field_id(field): number for number, field in reversed([*enumerate(self.fields)])}

    @functools.cached_property
    def _folded(self) -> dict[str, list[int]]:
        numbers: dict[str, list[int]] = {}
        for number, field in enumerate(self.fields):
            numbers.setdefault(field.name.casefold(), []).append(number)
        return numbers


class Place(NamedTuple):
    """A column in one file."""

    leaf: int
    """The index of its first column of values."""

    top: int
    """The index of the top-level column that it is, or is a member of."""

    members: tuple[str, ...]
    """The names of the members that lead to it from there."""

    field: pa.Field
    """The column as the file describes it."""

    @property
    def leaves(self) -> range:
        """Its columns of values."""
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
    field_id = (field.metadata or {}).get(_FIELD_ID)
    return None if field_id is None else int(field_id)


def refuse_encrypted(path: str, footer: ParsedFooter) -> None:
    """Raise SourceError if columns are encrypted, behind a plain footer."""
    if footer.is_encrypted:
        raise SourceError(
            f"{path} has encrypted columns, which cannot be read. Read it with Spark, which has the keys, and convert "
            "the DataFrame.",
            path=path,
        )
