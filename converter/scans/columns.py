"""Reads columns of one row group as an Arrow table, for a pass."""

from __future__ import annotations

import threading

import pyarrow as pa

from converter.places import is_list
from converter.reading.calendars import floor_times
from converter.reading.data_files import DataFiles
from converter.reading.decode import signed


def read_live_columns(files: DataFiles, row_group: int, given_up: threading.Event | None = None) -> pa.Table:
    """The live rows of a row group; as `read_columns`."""
    table, selection = read_columns(files, row_group, given_up), files.manifest.selection
    return table if selection is None else table.filter(pa.array(selection.mask(row_group, table.num_rows)))


def read_columns(
    files: DataFiles, row_group: int, given_up: threading.Event | None = None, most_rows: int | None = None
) -> pa.Table:
    """The columns `files.fields` of a row group, in the types that the dataset gives them; codes as their values.

    With `most_rows` of no more than its first rows.

    Raises:
        SourceChangedError: the file is gone, or is not what the manifest says.
        ReadError: they cannot be fetched or decoded.
    """
    manifest, file = files.manifest, files.file_of(row_group)
    fetched = None if files.storage.is_local else files.fetch([row_group], given_up)[row_group]
    with file.named_errors(row_group):
        opened, parts = files.open(file, given_up), None
        if fetched is not None:
            opened, parts = fetched.opened, fetched.parts
            opened.check_heads(row_group, parts)
        stored = {name: place for name, place in opened.places.items() if place is not None}
        indices = opened.row_groups(row_group)
        columns = dict(zip(stored, opened.read(indices, list(stored.values()), parts, most_rows), strict=True))
        num_rows = int(manifest.row_group_rows[row_group])
        if most_rows is not None:
            num_rows = min([most_rows, num_rows, *map(len, columns.values())])
        for name in files.fields:
            if name not in columns:
                columns[name] = opened.read_absent(name, indices, num_rows, parts, most_rows)
            categories = manifest.categories.get(name)
            if categories is not None and categories.are_coded:
                columns[name] = categories.values_of(columns[name], file.number)
            elif pa.types.is_dictionary(columns[name].type):
                columns[name] = columns[name].cast(columns[name].type.value_type)
            if manifest.source_columns is not None and not is_list(columns[name].type):
                columns[name] = signed(floor_times(columns[name]), name).cast(manifest.source_columns[name].arrow_type)
        notes = {name: place.field.metadata for name, place in stored.items()}
        fields = [pa.field(name, columns[name].type, metadata=notes.get(name)) for name in files.fields]
        return pa.table([columns[name] for name in files.fields], schema=pa.schema(fields))
