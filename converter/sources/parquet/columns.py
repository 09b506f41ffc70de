"""Parquet files as they stand become a manifest: their footers are read, their rows are not, and nothing is written.

Files may disagree: a column may be missing in some, stand in another place, or be a narrower number. What a folder's
name says (`day=2026-11-21`) is a column like any other, with one value in each file.

What a footer cannot say is found out while reading, and checked there: that all
lists of a column have one length is concluded from how many numbers a row group
has, and a row of another length is an error that names the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.errors import SourceError
from converter.places import Level, SourceColumn
from converter.portable.tensors import DTYPE_METADATA
from converter.sources.parquet.footers import SPARK_TYPE, Footer

_WIDER = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(), pa.string_view(): pa.string(), pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}  # fmt: skip
"""Types of Arrow that Spark does not have, as what Spark reads them."""

_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


@dataclass(slots=True, kw_only=True)
class Column:
    """A column as several files hold it."""

    name: str
    source: SourceColumn
    null_count: int | None = None
    """None where that is not known."""

    lengths: set[tuple[int, int]] = field(default_factory=set)
    """As in `Footer.list_lengths`, of all files that were looked at."""

    has_null_elements: bool = False
    """Whether lists may have null elements, by the files that were looked at."""

    list_size: int | None = None
    """The length that the type itself says, in every file alike."""

    said: Mapping[str, str] = field(default_factory=dict)
    """What this package noted beside a column that it packed."""

    num_bytes: int | None = None

    type_name: str = ""
    """What the table calls its type, where Arrow has none."""

    is_twice: bool = False
    """Whether a file has several columns of this name."""

    disagreement: SourceError | None = None
    """What to say of files that hold it as types of which none is wide enough for all."""


def merge_columns(url: str, files: Sequence[Footer]) -> dict[str, Column]:
    """The columns of all files: each where the first file with it has it, wide enough for all."""
    kinds = count_kinds(files)
    found: dict[str, Column] = {}
    first_file: dict[str, Footer] = {}
    for those in kinds:
        flat = list(_flatten(those.first.schema))
        counts = Counter(name for name, _, _ in flat)
        for name, path, one in flat:
            spark_type = ((one.metadata or {}).get(SPARK_TYPE) or b"").decode()
            kind, column = canonical(one.type) if not spark_type else pa.null(), found.get(name)
            said = {key.decode(): value.decode() for key, value in (one.metadata or {}).items()}
            if column is None or _is_untyped(column):
                source, size = SourceColumn(arrow_type=kind, path=path), _list_size(one.type)
                is_twice = counts[name] > 1 or (column is not None and column.is_twice)
                found[name] = Column(
                    name=name, source=source, said=said, list_size=size, is_twice=is_twice, type_name=spark_type
                )
                first_file[name] = those.first
                continue
            column.is_twice = column.is_twice or counts[name] > 1
            if column.is_twice or (pa.types.is_null(kind) and not spark_type):
                continue
            if path != column.source.path:
                one_of, other_of = (".".join(f"[{part}]" for part in each) for each in (path, column.source.path))
                said_there = f"{name!r} is {one_of}, and {other_of} there"
                column.disagreement = column.disagreement or _disagree(
                    url, those.first, first_file[name], name, said_there
                )
                continue
            wider = _wider(column.source.arrow_type, kind)
            here, there = ((spark_type or kind), (column.type_name or column.source.arrow_type))
            if spark_type != column.type_name:
                wider = None
            packed = (said.get(DTYPE_METADATA), column.said.get(DTYPE_METADATA))
            if packed[0] != packed[1]:
                wider, (here, there) = None, (f"{here} of {packed[0]}", f"{there} of {packed[1]}")
            if wider is None:
                said_there = f"{name!r} is {here}, and {there} there"
                column.disagreement = column.disagreement or _disagree(
                    url, those.first, first_file[name], name, said_there
                )
                continue
            column.source = SourceColumn(arrow_type=wider, path=path)
            column.list_size = column.list_size if column.list_size == _list_size(one.type) else None
    for those in kinds:
        # A struct in one file, and none in another.
        types = {path: one.type for _, path, one in _flatten(those.first.schema) if not pa.types.is_null(one.type)}
        structs = {path[:depth] for path in types for depth in range(1, len(path))}
        for name, column in list(found.items()):
            path = column.source.path
            if path in structs and _is_untyped(column):
                del found[name]
                continue
            cut = next((path[:depth] for depth in range(1, len(path)) if path[:depth] in types), None)
            if column.disagreement is None and (cut is not None or path in structs):
                here, there = ("struct", column.source.arrow_type) if cut is None else (types[cut], "struct")
                said_there = f"{'.'.join(cut or path)!r} is {here}, and {there} there"
                column.disagreement = _disagree(url, those.first, first_file[name], name, said_there)
    for column in found.values():
        count_in(column, kinds)
    return found


def _is_untyped(column: Column) -> bool:
    """Whether files have no type for it: what pandas gives a column without any value."""
    return pa.types.is_null(column.source.arrow_type) and not column.type_name


def _disagree(url: str, file: Footer, first: Footer, name: str, said: str) -> SourceError:
    return SourceError(
        f"{url}/{file.name} has other columns than {url}/{first.name}: {said}. Give the files that agree, leave it out "
        "with columns=…, or read them with Spark and convert the DataFrame.",
        path=f"{url}/{file.name}",
        column=name,
    )


class Counts(NamedTuple):
    """What the footers of files of one schema say together."""

    first: Footer
    level: Level
    num_rows: int
    leaf_nulls: npt.NDArray[np.int64]
    leaf_bytes: npt.NDArray[np.int64]
    list_lengths: Mapping[int, set[tuple[int, int]]]


def count_kinds(files: Sequence[Footer]) -> list[Counts]:
    """What files say, together for all that have the same schema."""
    kinds: dict[int, list[Footer]] = {}
    for file in files:
        # Most of them hold the very same one: that need not be looked at.
        kinds.setdefault(id(file.schema), []).append(file)
    alike: dict[bytes, list[Footer]] = {}
    for those in kinds.values():
        # With what is noted beside the columns, which schemas do not compare.
        alike.setdefault(those[0].schema.serialize().to_pybytes(), []).extend(those)
    return [_count(those) for those in alike.values()]


def _count(files: Sequence[Footer]) -> Counts:
    nulls = np.stack([file.leaf_nulls for file in files])
    lengths: dict[int, set[tuple[int, int]]] = {}
    for file in files:
        for leaf, found in file.list_lengths.items():
            lengths.setdefault(leaf, set()).update(found)
    return Counts(
        first=files[0],
        level=Level(files[0].schema),
        num_rows=sum(file.num_rows for file in files),
        leaf_nulls=np.where((nulls < 0).any(axis=0), -1, nulls.sum(axis=0)),
        leaf_bytes=np.stack([file.leaf_bytes for file in files]).sum(axis=0),
        list_lengths=lengths,
    )


def count_in(column: Column, counts: Sequence[Counts]) -> None:
    """Add what footers say of a column: nulls, bytes, the lengths of lists."""
    nulls: int | None = 0
    num_bytes = 0
    for found in counts:
        place = column.source.find(found.level)
        if place is None:
            nulls = None if nulls is None else nulls + found.num_rows
            continue
        count = int(found.leaf_nulls[place.leaf])
        nulls = None if nulls is None or count < 0 else nulls + count
        column.has_null_elements |= count != 0 and _may_hold_null(place.field.type)
        num_bytes += int(found.leaf_bytes[place.leaves.start : place.leaves.stop].sum())
        column.lengths |= found.list_lengths.get(place.leaf, set())
    column.null_count, column.num_bytes = nulls, num_bytes


def _may_hold_null(kind: pa.DataType) -> bool:
    """Whether a type's lists may have null elements."""
    return is_list(kind) and (kind.value_field.nullable or _may_hold_null(kind.value_type))


def _flatten(schema: pa.Schema) -> Iterator[tuple[str, tuple[str, ...], pa.Field]]:
    """The columns with the members of structs in the struct's place: name, path, field."""

    def below(one: pa.Field, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], pa.Field]]:
        if pa.types.is_struct(one.type) and SPARK_TYPE not in (one.metadata or {}):
            for index in range(one.type.num_fields):
                member = one.type.field(index)
                yield from below(member, (*path, member.name))
        else:
            yield ".".join(path), path, one

    for one in schema:
        yield from below(one, (one.name,))


def canonical(kind: pa.DataType) -> pa.DataType:
    """A type as Spark has it, whatever physical form a writer chose."""
    if pa.types.is_dictionary(kind):
        return canonical(kind.value_type)
    if is_list(kind):
        return pa.list_(canonical(kind.value_type))
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz and "UTC")
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json":
        return canonical(kind.storage_type)
    # What somebody registered with Arrow need not have a hash.
    return kind if isinstance(kind, pa.BaseExtensionType) else _WIDER.get(kind, kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list in any of its forms."""
    types = pa.types
    return bool(
        types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        or types.is_list_view(kind) or types.is_large_list_view(kind)
    )  # fmt: skip


def _list_size(kind: pa.DataType) -> int | None:
    return kind.list_size if pa.types.is_fixed_size_list(kind) else None


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the numbers of both exactly; None where there is none."""
    if one == other or pa.types.is_null(other):  # Of lists none of which holds anything.
        return one
    if pa.types.is_null(one):
        return other
    if is_list(one) and is_list(other):
        inner = _wider(one.value_type, other.value_type)
        return None if inner is None else pa.list_(inner)
    numbers = {one, other}
    if numbers <= set(_INTEGERS):
        return max(numbers, key=_INTEGERS.index)
    if numbers <= {*_INTEGERS[:3], pa.float32(), pa.float64()}:
        small = numbers - {pa.float32(), pa.float64()}
        return pa.float64() if pa.float64() in numbers or pa.int32() in small else pa.float32()
    return None
