"""Columns as a file stores them: finds them in the file, and reads them as Arrow arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter.manifest import Manifest
from converter.places import Level, Outline, Place, innermost, is_list
from converter.reading.calendars import count_microseconds, in_todays_calendar
from converter.reading.checks import DataFile
from converter.reading.lists import around, map_chunks, map_values, member_of, without_views


def find_places(manifest: Manifest, names: Sequence[str], schema: pa.Schema) -> dict[str, Place | None]:
    """Where a file of this schema holds the columns; None for a column that it does not hold."""
    if manifest.source_columns is not None:
        level = Level(schema)
        return {name: manifest.source_columns[name].find(level) for name in names}
    numbers = {name: number for number, name in enumerate(manifest.schema.names)}
    return {name: Place(numbers[name], numbers[name], (), schema.field(numbers[name])) for name in names}


def find_outlines(manifest: Manifest, places: Mapping[str, Place | None], schema: pa.Schema) -> dict[str, Outline]:
    """For columns that a file of this schema does not hold: where lists are that tell how many nulls they are there."""
    absent = [name for name, place in places.items() if place is None]
    if manifest.source_columns is None or not absent:
        return {}
    level = Level(schema)
    found = {name: manifest.source_columns[name].find_lists(level) for name in absent}
    return {name: outline for name, outline in found.items() if outline is not None}


def nulls_in(column: pa.ChunkedArray, outline: Outline, manifest: Manifest, name: str) -> pa.ChunkedArray:
    """Lists of nulls for a column that a file does not hold, as long as those of another member."""
    assert manifest.source_columns is not None
    kind = manifest.source_columns[name].arrow_type
    for _ in range(outline.list_depth):
        kind = kind.value_type

    def nulls_of(array: pa.Array, depth: int) -> pa.Array:
        return around(array, nulls_of(array.values, depth - 1)) if depth else pa.nulls(len(array), kind)

    return map_chunks(column, functools.partial(nulls_of, depth=outline.list_depth))


def read_places(
    parquet: pq.ParquetFile, indices: Sequence[int], places: Sequence[Place], most_rows: int | None = None
) -> list[pa.ChunkedArray]:
    """Columns of row groups of an open file; with `most_rows` of no more than the first rows."""
    if not places:
        return []
    tops = _read_tops(parquet, indices, places, most_rows)
    columns = []
    for place in places:
        column = tops[place.top]
        for member in place.members:
            column = map_chunks(column, functools.partial(member_of, member=member))
        if isinstance(column.type, pa.BaseExtensionType):
            # JSON is text with a label; no other extension type is read.
            column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        if column.chunks and (pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type)):
            column = pa.chunked_array([without_views(chunk) for chunk in column.chunks])
        column = in_todays_calendar(column, parquet.metadata, place)
        kind = innermost(column.type)
        if is_list(column.type) and (pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)):
            # As delta-rs declares them. Arrow can neither take nor filter lists of views.
            column = _cast_values(column, pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary())
        if column.num_chunks > 1 and (pa.types.is_string(kind) or pa.types.is_binary(kind)):
            # More than 2 GiB, maybe, which together need larger offsets.
            column = _cast_values(column, pa.large_string() if pa.types.is_string(kind) else pa.large_binary())
        if pa.types.is_time(kind) or pa.types.is_duration(kind):
            column = map_chunks(column, functools.partial(map_values, function=count_microseconds))
        columns.append(column)
    return columns


def _cast_values(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """A column, or the innermost values of its lists, in another type."""
    return map_chunks(column, functools.partial(map_values, function=functools.partial(pc.cast, target_type=kind)))


def _read_tops(
    parquet: pq.ParquetFile, indices: Sequence[int], places: Sequence[Place], most_rows: int | None
) -> dict[int, pa.ChunkedArray]:
    """The top-level columns of places, by their numbers in the file; names may be ambiguous, numbers are not.

    Reaches into: pyarrow.parquet.ParquetFile.reader (pyarrow 26).
    Without it: all columns of the row groups are decoded, which is slower.
    """
    numbers = list(dict.fromkeys(place.top for place in places))
    reader = getattr(parquet, "reader", None)
    if reader is None:
        table = parquet.read_row_groups(indices, use_threads=False).slice(0, most_rows)
        return {number: table.column(number) for number in numbers}
    leaves = list(dict.fromkeys(leaf for place in places for leaf in place.leaves))
    if most_rows is None:
        table = reader.read_row_groups(indices, column_indices=leaves, use_threads=False)
    else:
        # Decodes no page behind these rows.
        batches = reader.iter_batches(most_rows, row_groups=indices, column_indices=leaves, use_threads=False)
        table = pa.Table.from_batches([next(batches)])
    # Columns come in the order in which a leaf of theirs is first asked for.
    return dict(zip(numbers, table.columns, strict=True))


def constant_column(file: DataFile, name: str, num_rows: int) -> pa.ChunkedArray:
    """A column that the file does not hold: the one value that the dataset gives it there, or null."""
    assert file.manifest.source_columns is not None
    column = file.manifest.source_columns[name]
    if column.values is not None:
        return pa.chunked_array([pa.repeat(column.values[file.number].value.cast(column.arrow_type), num_rows)])
    if column.null_counts is not None and column.null_counts[file.number].as_py() == 0:
        raise file.changed(f"has no column {name!r}, although the table's log says that it holds no null there")
    return pa.chunked_array([pa.nulls(num_rows, column.arrow_type)])
