"""The columns of Parquet files that may disagree: one type for each, wide enough for all files.

A column may be missing in some files, stand in another place, or be a narrower
number. A partition value of a folder's name (`day=2026-11-21`) is a column with one
value in each file.

Footers do not show whether all lists of a column have one length: it is concluded
from the count of numbers in each row group. Reading checks it, and a row of another
length is an error that names the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.errors import SourceError
from converter.places import Level, SourceColumn, innermost, is_list, members_of
from converter.portable.tensors import DTYPE_METADATA, NDIM_METADATA, SHAPE_METADATA
from converter.sources.parquet.footers import INT96, SPARK_TYPE, Footer

MAX_DIGITS = 38
"""Of decimals, in Spark and in Arrow's 128 bits."""

_WIDER = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(), pa.string_view(): pa.string(), pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}  # fmt: skip
"""Arrow types that Spark does not have, and the types that Spark reads them as."""

_SPARK_UNITS = {"interval year": "months", "interval month": "months", "interval day": "µs", "interval hour": "µs",
                "interval minute": "µs", "interval second": "µs", "time(": "µs"}  # fmt: skip
"""What the integers count that Spark writes for a type, by the beginning of its name."""

_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


@dataclass(slots=True, kw_only=True)
class Column:
    """A column as several files hold it."""

    name: str
    source: SourceColumn
    null_count: int | None = None
    """None if unknown."""

    lengths: set[tuple[int, int]] = field(default_factory=set)
    """As in `Footer.list_lengths`, from all footers that were read."""

    has_null_elements: bool = False
    """Whether lists may have null elements, by the footers that were read."""

    list_size: int | None = None
    """The length of a fixed-size list type, if all files agree."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """What this package noted beside a column that it packed."""

    num_bytes: int | None = None

    type_name: str = ""
    """The table's or Spark's name of a type that Arrow does not have, or of one that becomes whole numbers."""

    unit: str = ""
    """As in `Field.unit`."""

    is_twice: bool = False
    """Whether a file has several columns of this name."""

    is_in_lists: bool = False
    """Whether it is a member of structs in lists, or of a map."""

    is_int96: bool = False
    """Whether all files hold times as INT96: points in time, unless other files say that these have no zone."""

    disagreement: SourceError | None = None
    """The error if the column is wanted, because no type is wide enough for all files."""


def merge_columns(url: str, files: Sequence[Footer]) -> dict[str, Column]:
    """The columns of all files, each at its place in the first file that has it and wide enough for all."""
    kinds = count_kinds(files)
    columns: dict[str, Column] = {}
    first_files: dict[str, Footer] = {}

    def disagree(column: Column, file: Footer, subject: str, here: object, there: object) -> None:
        if column.disagreement is None:
            path, first_name = f"{url}/{file.name}", first_files[column.name].name
            column.disagreement = SourceError(
                f"{path} has other columns than {url}/{first_name}: {subject!r} is {here}, and {there} there. Name "
                "files that agree, leave the column out with columns=…, or convert a DataFrame of the files.",
                path=path,
                column=column.name,
            )

    for kind in kinds:
        flat = list(_flatten(kind.first.schema))
        counts = Counter(name for name, _, _, _ in flat)
        for name, path, part, is_in_lists in flat:
            added, before = _column_of(name, path, part), columns.get(name)
            added.is_in_lists = is_in_lists
            added.is_twice = counts[name] > 1 or (before is not None and before.is_twice)
            if before is None or _is_untyped(before):
                columns[name], first_files[name] = added, kind.first
                continue
            before.is_twice = added.is_twice
            if before.is_twice or _is_untyped(added):
                continue
            if path != before.source.path:
                here, there = (".".join(f"[{step}]" for step in steps) for steps in (path, before.source.path))
                disagree(before, kind.first, name, here, there)
                continue
            wider = _wider(before.source.arrow_type, added.source.arrow_type)
            if wider is None and (added.is_int96 or before.is_int96):
                wider = _wider(_without_zone(before.source.arrow_type), _without_zone(added.source.arrow_type))
            here, there = (str(column.type_name or column.source.arrow_type) for column in (added, before))
            if added.type_name != before.type_name:
                wider = None
            packed_here, packed_there = (_packed(column) for column in (added, before))
            if packed_here != packed_there:
                wider, here, there = None, f"{here} of {packed_here}", f"{there} of {packed_there}"
            if wider is None:
                disagree(before, kind.first, name, here, there)
                continue
            before.source = SourceColumn(arrow_type=wider, path=path)
            before.is_in_lists |= added.is_in_lists
            before.is_int96 &= added.is_int96
            before.list_size = before.list_size if before.list_size == added.list_size else None
    for kind in kinds:
        # A column may be a struct in some files and none in others.
        types = {path: part.type for _, path, part, _ in _flatten(kind.first.schema) if not pa.types.is_null(part.type)}
        structs = {path[:depth] for path in types for depth in range(1, len(path))}
        for name, column in list(columns.items()):
            path = column.source.path
            if path in structs and _is_untyped(column):
                del columns[name]
                continue
            cut = next((path[:depth] for depth in range(1, len(path)) if path[:depth] in types), None)
            if cut is not None:
                disagree(column, kind.first, ".".join(cut), types[cut], "struct")
            elif path in structs:
                disagree(column, kind.first, ".".join(path), "struct", column.source.arrow_type)
    for column in columns.values():
        count_in(column, kinds)
    return columns


def _column_of(name: str, path: tuple[str, ...], part: pa.Field) -> Column:
    """A column as one file has it."""
    metadata = {key.decode(): value.decode() for key, value in (part.metadata or {}).items()}
    type_name = metadata.get(SPARK_TYPE.decode(), "")
    unit = next((unit for prefix, unit in _SPARK_UNITS.items() if type_name.startswith(prefix)), "")
    arrow_type = pa.null() if type_name and not unit else canonical(part.type)
    if not type_name and (pa.types.is_time(innermost(part.type)) or pa.types.is_duration(innermost(part.type))):
        unit, type_name = "µs", "time" if pa.types.is_time(innermost(part.type)) else "duration"
    return Column(
        name=name,
        source=SourceColumn(arrow_type=arrow_type, path=path),
        metadata=metadata,
        list_size=part.type.list_size if pa.types.is_fixed_size_list(part.type) else None,
        type_name=type_name,
        unit=unit,
        is_int96=_is_int96(part),
    )


def _is_int96(part: pa.Field) -> bool:
    while is_list(part.type):
        part = part.type.value_field
    return INT96 in (part.metadata or {})


def _without_zone(kind: pa.DataType) -> pa.DataType:
    if is_list(kind):
        return pa.list_(_without_zone(kind.value_type))
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind


def _packed(column: Column) -> str | None:
    """What the bytes of a tensor that this package packed stand for; None if it is none."""
    dtype = column.metadata.get(DTYPE_METADATA)
    if dtype is None:
        return None
    ndim, shape = column.metadata.get(NDIM_METADATA), column.metadata.get(SHAPE_METADATA)
    return f"{dtype} of {ndim} dimensions" if shape is None else f"{dtype} of shape {shape}"


def _is_untyped(column: Column) -> bool:
    """Whether no type is known: pandas gives none to a column without values."""
    return pa.types.is_null(column.source.arrow_type) and not column.type_name


class Counts(NamedTuple):
    """The sums over the footers of files with one schema."""

    first: Footer
    level: Level
    num_rows: int
    leaf_nulls: npt.NDArray[np.int64]
    leaf_bytes: npt.NDArray[np.int64]
    list_lengths: Mapping[int, set[tuple[int, int]]]


def count_kinds(files: Sequence[Footer]) -> list[Counts]:
    """The sums of footers, for each schema that the files have."""
    by_object: dict[int, list[Footer]] = {}
    for file in files:
        # Most files share one schema object, which need not be compared.
        by_object.setdefault(id(file.schema), []).append(file)
    by_schema: dict[bytes, list[Footer]] = {}
    for alike in by_object.values():
        # Serialized, because schemas do not compare the metadata of columns.
        by_schema.setdefault(alike[0].schema.serialize().to_pybytes(), []).extend(alike)
    return [_count(alike) for alike in by_schema.values()]


def _count(files: Sequence[Footer]) -> Counts:
    nulls = np.stack([file.leaf_nulls for file in files])
    lengths: dict[int, set[tuple[int, int]]] = {}
    for file in files:
        for leaf, file_lengths in file.list_lengths.items():
            lengths.setdefault(leaf, set()).update(file_lengths)
    return Counts(
        first=files[0],
        level=Level(files[0].schema),
        num_rows=sum(file.num_rows for file in files),
        leaf_nulls=np.where((nulls < 0).any(axis=0), -1, nulls.sum(axis=0)),
        leaf_bytes=np.stack([file.leaf_bytes for file in files]).sum(axis=0),
        list_lengths=lengths,
    )


def count_in(column: Column, counts: Sequence[Counts]) -> None:
    """Set a column's nulls and bytes, and add the lengths of its lists, from footers."""
    nulls: int | None = 0
    num_bytes = 0
    for kind in counts:
        place = column.source.find(kind.level)
        if place is None:
            outline = column.source.find_lists(kind.level)
            nulls = None if nulls is None or outline is not None else nulls + kind.num_rows
            if outline is not None:
                column.has_null_elements = True
                column.lengths |= kind.list_lengths.get(outline.place.leaf, set())
            continue
        count = int(kind.leaf_nulls[place.leaf])
        if place.members and pa.types.is_dictionary(innermost(place.field.type)):
            # pyarrow does not count the nulls of a struct among those of a dictionary in it (up to 26.0.1 at least).
            count = -1
        nulls = None if nulls is None or count < 0 else nulls + count
        column.has_null_elements |= count != 0 and _may_hold_null(place.field.type)
        num_bytes += int(kind.leaf_bytes[place.leaves.start : place.leaves.stop].sum())
        column.lengths |= kind.list_lengths.get(place.leaf, set())
    column.null_count, column.num_bytes = nulls, num_bytes


def _may_hold_null(kind: pa.DataType) -> bool:
    """Whether a type's lists may have null elements."""
    return is_list(kind) and (kind.value_field.nullable or _may_hold_null(kind.value_type))


def _flatten(schema: pa.Schema) -> Iterator[tuple[str, tuple[str, ...], pa.Field, bool]]:
    """Name, path and field of each column, and whether it is in lists; structs and maps as their members."""

    def below(part: pa.Field, path: tuple[str, ...], is_in_lists: bool) -> Iterator[Any]:
        members = None if SPARK_TYPE in (part.metadata or {}) else members_of(part.type)
        if members is None:
            yield ".".join(path), path, part, is_in_lists
            return
        for member in members:
            yield from below(member, (*path, member.name), is_in_lists or not pa.types.is_struct(part.type))

    for top in schema:
        yield from below(top, (top.name,), False)


def canonical(kind: pa.DataType) -> pa.DataType:
    """The type that Spark has for it, whatever physical form a writer chose."""
    if pa.types.is_dictionary(kind):
        return canonical(kind.value_type)
    if is_list(kind):
        return pa.list_(canonical(kind.value_type))
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz and "UTC")
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        # As microseconds.
        return pa.int64()
    if pa.types.is_decimal(kind) and kind.precision <= MAX_DIGITS:
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json":
        return canonical(kind.storage_type)
    # A registered extension type need not have a hash.
    return kind if isinstance(kind, pa.BaseExtensionType) else _WIDER.get(kind, kind)


def _wider(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """The type that holds the numbers of both exactly; None if there is none."""
    if left == right or pa.types.is_null(right):  # Null: lists that are all empty.
        return left
    if pa.types.is_null(left):
        return right
    if is_list(left) and is_list(right):
        inner = _wider(left.value_type, right.value_type)
        return None if inner is None else pa.list_(inner)
    numbers = {left, right}
    if numbers <= set(_INTEGERS):
        return max(numbers, key=_INTEGERS.index)
    if numbers <= {*_INTEGERS[:3], pa.float32(), pa.float64()}:
        small = numbers - {pa.float32(), pa.float64()}
        return pa.float64() if pa.float64() in numbers or pa.int32() in small else pa.float32()
    return None
