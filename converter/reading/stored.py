"""Where a file holds the wanted columns, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter.errors import SourceChangedError
from converter.manifest import Manifest
from converter.parsed_footer import ParsedFooter
from converter.places import Level, Place
from converter.reading.calendars import in_todays_calendar
from converter.storage.ranges import Data, Fetched, PartialFile, Range


def find_ranges(
    manifest: Manifest, file: int, footer: ParsedFooter, indices: Sequence[int], leaves: Sequence[int]
) -> list[Range]:
    """Where columns of row groups lie in a file. Raises ValueError where its footer says that they lie elsewhere."""
    num_bytes, found = int(manifest.file_bytes[file]), []
    for index in indices:
        for leaf in leaves:
            chunk = footer.chunk(index, leaf)
            start = chunk.data_page_offset
            if chunk.dictionary_page_offset:
                start = min(start, chunk.dictionary_page_offset)
            end = start + chunk.stored_bytes
            if not 0 <= start <= end <= num_bytes:
                raise ValueError(f"a column is said to lie from byte {start} to {end} of {num_bytes}")
            found.append((start, end))
    return found


def find_places(manifest: Manifest, names: Sequence[str], schema: pa.Schema) -> dict[str, Place | None]:
    """Where a file of this schema holds the columns; None for those that it does not hold."""
    if manifest.source_columns is not None:
        level = Level(schema)
        return {name: manifest.source_columns[name].find(level) for name in names}
    numbers = {name: number for number, name in enumerate(manifest.schema.names)}
    return {name: Place(numbers[name], numbers[name], (), schema.field(numbers[name])) for name in names}


def read_places(parquet: pq.ParquetFile, indices: Sequence[int], places: Sequence[Place]) -> list[pa.ChunkedArray]:
    """Columns of row groups of an open file."""
    if not places:
        return []
    leaves = list(dict.fromkeys(leaf for place in places for leaf in place.leaves))
    table = parquet.reader.read_row_groups(indices, column_indices=leaves, use_threads=False)
    # The columns come in the order in which a leaf of theirs was first asked for.
    numbers = {top: number for number, top in enumerate(dict.fromkeys(place.top for place in places))}
    found = []
    for place in places:
        column = table.column(numbers[place.top])
        for member in place.members:
            # With the nulls of the struct around it.
            column = pc.struct_field(column, [column.type.get_field_index(member)])
        if isinstance(column.type, pa.BaseExtensionType):
            # Text that is said to be JSON; others are not read.
            column = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
        if column.chunks and (pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type)):
            column = pa.chunked_array([_without_views(chunk) for chunk in column.chunks])
        found.append(in_todays_calendar(column, parquet.metadata, place))
    return found


def _without_views(array: pa.Array) -> pa.Array:
    """Views of lists as lists, whose values lie side by side; Arrow's own cast loses values where there are nulls."""
    is_large = pa.types.is_large_list_view(array.type)
    if not is_large and not pa.types.is_list_view(array.type):
        return array
    values = _without_views(array.flatten())
    sizes = np.asarray(pc.fill_null(pc.list_value_length(array), 0))
    ends = np.cumsum(sizes, dtype=np.int64)
    offsets = pa.array(np.concatenate([[0], ends]), pa.int64() if is_large else pa.int32())
    kind = pa.LargeListArray if is_large else pa.ListArray
    return kind.from_arrays(offsets, values, mask=pc.is_null(array) if array.null_count else None)


def constant_column(manifest: Manifest, name: str, file: int, num_rows: int) -> pa.ChunkedArray:
    """A column that a file does not hold: the one value that is said of it elsewhere, or null."""
    assert manifest.source_columns is not None
    column = manifest.source_columns[name]
    if column.values is None:
        if column.null_counts is not None and column.null_counts[file].as_py() == 0:
            raise SourceChangedError(
                f"{manifest.file_names[file]} has no column {name!r}, of which the table's log says that it holds no "
                f"null there. {manifest.remedy}",
                path=manifest.file_names[file],
            )
        return pa.chunked_array([pa.nulls(num_rows, column.arrow_type)])
    return pa.chunked_array([pa.repeat(column.values[file].value.cast(column.arrow_type), num_rows)])


def open_partial(
    manifest: Manifest, file: int, read: Callable[[Range], Data], fetched: Fetched | None = None
) -> pa.NativeFile:
    """A Parquet file as pyarrow reads it, of which only parts are fetched."""
    num_bytes = int(manifest.file_bytes[file])
    return pa.PythonFile(PartialFile(num_bytes, lambda start, end: read((start, end)), fetched), mode="r")
