"""Where a Parquet file holds a column: found by name or field id, in files of any writer."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from converter.errors import SourceError
from converter.parsed_footer import ParsedFooter

_FIELD_ID = b"PARQUET:field_id"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceColumn:
    """How files of other writers hold a column, each perhaps in its own way.

    A file without the column was written before the column was added: it is null there, and a member of structs in
    lists is null in each of them.
    """

    arrow_type: pa.DataType
    """The type of its values; a file may hold a narrower one."""

    path: tuple[str, ...] = ()
    """The column's name in the files; a member has the names of the structs around it first, also if these stand in
    lists. The members of a map are called `key` and `value`."""

    field_ids: tuple[int | str, ...] = ()
    """The path as field ids of the files, if the table goes by those; else empty. A map's members have none."""

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
            number = level.number_of(key, ignores_case=self.ignores_case)
            if number is None:
                return None
            leaf += level.leaves[number]
            field = level.fields[number]
            if depth:
                members.append(number if level.is_map else field.name)
            else:
                top = number
            if depth + 1 == len(keys):
                # pandas writes a column without a value as the type of nulls.
                return None if pa.types.is_null(field.type) else Place(leaf, top, tuple(members), field)
            below = level.below(number)
            if below is None:
                return None
            level = below
        return None

    def find_lists(self, level: Level) -> Outline | None:
        """Where a file has structs in lists without this member: it has as many nulls there as the lists have structs.

        None if the file has no such lists: the column is null in each row.
        """
        leaf, members, top, above = 0, [], -1, pa.null()
        for depth, key in enumerate(self.field_ids or self.path):
            number = level.number_of(key, ignores_case=self.ignores_case)
            if number is None:
                break
            leaf += level.leaves[number]
            above = level.fields[number].type
            if depth:
                members.append(number if level.is_map else level.fields[number].name)
            else:
                top = number
            below = level.below(number)
            if below is None:
                return None
            level = below
        else:
            return None
        list_depth = depth_of(above)
        if not list_depth:
            return None
        while True:
            # Its first member has the same lists.
            members.append(0 if level.is_map else level.fields[0].name)
            below = level.below(0)
            if below is None:
                return Outline(Place(leaf, top, tuple(members), level.fields[0]), list_depth)
            level = below


class Level:
    """The columns of a file, or the members of a struct in it, indexed once for all look-ups.

    >>> level = Level(pa.schema({"a": pa.struct({"b": pa.int32(), "c": pa.int32()}), "d": pa.int64()}))
    >>> SourceColumn(arrow_type=pa.int64(), path=("d",)).find(level).leaf
    2
    """

    def __init__(self, fields: Iterable[pa.Field], *, is_map: bool = False) -> None:
        self.fields, self.is_map = list(fields), is_map
        self.leaves = [0, *itertools.accumulate(count_leaves(field.type) for field in self.fields)]
        """How many columns of values precede each, and how many there are in all."""
        self._below: dict[int, Level | None] = {}

    def below(self, number: int) -> Level | None:
        """The members of a struct or a map, also if these stand in lists; None for other types."""
        if number not in self._below:
            kind = self.fields[number].type
            members = members_of(kind)
            self._below[number] = None if members is None else Level(members, is_map=pa.types.is_map(innermost(kind)))
        return self._below[number]

    def number_of(self, key: str | int, *, ignores_case: bool) -> int | None:
        """The index of the column with this name or field id; None if there is none, or several differ only in case."""
        if isinstance(key, int):
            return self._ids.get(key)
        number = self._names.get(key)
        if number is not None or not ignores_case:
            return number
        alike = self._folded.get(key.lower(), [])
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
            numbers.setdefault(field.name.lower(), []).append(number)
        return numbers


class Place(NamedTuple):
    """A column in one file."""

    leaf: int
    """The index of its first column of values."""

    top: int
    """The index of the top-level column that it is, or is a member of."""

    members: tuple[str | int, ...]
    """The names of the members that lead to it from there; of a map 0 for the keys, 1 for the values."""

    field: pa.Field
    """The column as the file describes it; a member of structs in a list is a list."""

    @property
    def leaves(self) -> range:
        """Its columns of values."""
        return range(self.leaf, self.leaf + count_leaves(self.field.type))


class Outline(NamedTuple):
    """Lists of a file that tell how long those of a column are that it does not hold."""

    place: Place
    """Another member of the same structs."""

    list_depth: int
    """How many lists are around the structs."""


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is a list in any of its forms; a map is none."""
    types = pa.types
    return bool(
        types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        or types.is_list_view(kind) or types.is_large_list_view(kind)
    )  # fmt: skip


def is_bytes_type(kind: pa.DataType) -> bool:
    """Whether the values of a type are bytes."""
    variable = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return bool(variable or pa.types.is_fixed_size_binary(kind))


def innermost(kind: pa.DataType) -> pa.DataType:
    """The type of the elements of nested lists; any other type unchanged."""
    while is_list(kind):
        kind = kind.value_type
    return kind


def depth_of(kind: pa.DataType) -> int:
    """How many lists are around the elements of nested lists; a map is a list of its entries.

    >>> depth_of(pa.list_(pa.list_(pa.int8()))), depth_of(pa.int8())
    (2, 0)
    """
    depth = 0
    while is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth + int(pa.types.is_map(kind))


def list_of(kind: pa.DataType, values: pa.Field) -> pa.DataType:
    """The same form of list with other values; a map becomes a list."""
    types = pa.types
    if types.is_fixed_size_list(kind):
        return pa.list_(values, kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(values)
    if types.is_list_view(kind):
        return pa.list_view(values)
    return pa.large_list_view(values) if types.is_large_list_view(kind) else pa.list_(values)


def members_of(kind: pa.DataType) -> list[pa.Field] | None:
    """The members of a struct, or of a map; those of structs or maps in lists as lists. None for other types.

    >>> members_of(pa.list_(pa.struct({"a": pa.int32()})))
    [pyarrow.Field<a: list<item: int32>>]
    >>> members_of(pa.map_(pa.string(), pa.int32()))
    [pyarrow.Field<key: list<key: string not null>>, pyarrow.Field<value: list<value: int32>>]
    """
    if pa.types.is_struct(kind):
        return [kind.field(index) for index in range(kind.num_fields)]
    if pa.types.is_map(kind):
        return [pa.field("key", pa.list_(kind.key_field)), pa.field("value", pa.list_(kind.item_field))]
    members = members_of(kind.value_type) if is_list(kind) else None
    if members is None:
        return None
    values = kind.value_field
    # A null struct is a null element of each member.
    is_struct = pa.types.is_struct(kind.value_type)
    nullable = [values.nullable or (is_struct and member.nullable) for member in members]
    return [
        member.with_type(list_of(kind, values.with_type(member.type).with_nullable(is_nullable)))
        for member, is_nullable in zip(members, nullable, strict=True)
    ]


def value_bytes_of(kind: pa.DataType) -> int | None:
    """The bytes of a value in memory; None if values differ."""
    if pa.types.is_dictionary(kind):
        return value_bytes_of(kind.value_type)
    if pa.types.is_null(kind):
        return 0
    # A boolean becomes a byte.
    with contextlib.suppress(ValueError):
        return -(-int(kind.bit_width) // 8)
    return None


def count_leaves(kind: pa.DataType) -> int:
    """How many columns of values a Parquet file has for a type.

    >>> count_leaves(pa.struct({"a": pa.int32(), "b": pa.list_(pa.float32())}))
    2
    """
    if isinstance(kind, pa.BaseExtensionType):
        return count_leaves(kind.storage_type)
    return sum(count_leaves(kind.field(index).type) for index in range(kind.num_fields)) if kind.num_fields else 1


def leaf_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    """The types of the columns of values, in the order of `count_leaves`.

    >>> list(leaf_types(pa.struct({"a": pa.int32(), "b": pa.list_(pa.float32())})))
    [DataType(int32), DataType(float)]
    """
    if isinstance(kind, pa.BaseExtensionType):
        yield from leaf_types(kind.storage_type)
    elif kind.num_fields:
        for index in range(kind.num_fields):
            yield from leaf_types(kind.field(index).type)
    else:
        yield kind


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
