"""One pass over columns of existing files finds the values of their categories."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from converter.categories import Categories, check_categories, check_values, kind_of, sorted_values
from converter.errors import SourceError
from converter.manifest import Manifest
from converter.places import is_list
from converter.portable.texts import find_bad_text
from converter.reading.ahead import map_row_groups
from converter.reading.data_files import DataFiles
from converter.scans.columns import read_live_columns
from converter.storage.directory import Storage


def with_categories(storage: Storage, manifest: Manifest, categories: Any, unseen: Any) -> Manifest:
    """The manifest whose columns of categories arrive as codes; `categories` as `make_parquet_converter` takes them.

    Raises:
        SourceError: a column has too many values, or none.
        TypeError, ValueError: as `check_categories`.
    """
    dtypes = {field.name: field.dtype for field in manifest.schema}
    given = check_categories(categories, dtypes, unseen)
    if not given:
        return manifest
    kinds = {name: kind_of(name, dtypes[name]) for name, values in given.items() if values is None}
    found = _find_values(storage, manifest, kinds) if kinds else {}
    known = {name: found[name] if values is None else values for name, values in given.items()}
    return replace(manifest, categories={**manifest.categories, **known})


def with_other_categories(
    storage: Storage, manifest: Manifest, *, categories: Mapping[str, Any], unseen: Any
) -> Manifest:
    """The manifest of an entry that is not committed yet, with the categories that its writer did not report."""
    others = {name: values for name, values in categories.items() if name not in manifest.categories}
    return with_categories(storage, manifest, others, unseen) if others else manifest


def _unique(column: pa.ChunkedArray) -> pa.Array:
    """The different values of a column, or of the elements of its lists."""
    while is_list(column.type):
        column = pc.list_flatten(column)
    return pc.unique(column)


def _find_values(storage: Storage, manifest: Manifest, kinds: dict[str, str]) -> dict[str, Categories]:
    """The values of columns in the live rows, sorted."""
    files = DataFiles(storage, manifest, [manifest.schema[name] for name in kinds])

    def unique_values(row_group: int, given_up: threading.Event) -> dict[str, pa.Array]:
        table = read_live_columns(files, row_group, given_up)
        found = {name: _unique(table.column(name)) for name in kinds}
        with files.file_of(row_group).named_errors(row_group):
            for name, unique in found.items():
                if (bad := find_bad_text(unique)) is not None:
                    raise SourceError(
                        f"Column {name!r} has text that is no UTF-8: {bad[1]!r}. Mend or drop such rows with Spark, or "
                        "take the column out of categories=.",
                        column=name,
                    )
        return found

    values: dict[str, pa.Array] = {name: pa.array([], pa.null()) for name in kinds}
    wanted = np.flatnonzero(manifest.live_rows > 0).tolist()
    for unique in map_row_groups(unique_values, wanted):
        for name, kind in kinds.items():
            # Merged as they come, so that a key with millions of values is noticed before it fills the memory.
            values[name] = check_values(name, sorted_values([values[name], unique[name]], kind))
    for name, found in values.items():
        if not len(found):
            raise SourceError(
                f"Column {name!r} has no value but null, so it has no categories. Take it out of categories=.",
                column=name,
            )
    return {name: Categories(values=found) for name, found in values.items()}
