"""What a notebook shows of a converter: rows, size, place, how long it lives, and its columns with small charts.

The charts show a sample, so that a page costs some milliseconds whatever the size of the data. Nothing here raises: of
a store that does not answer soon, or of files that are gone, the rest is shown.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from converter.holding import Holding
from converter.manifest import Manifest
from converter.markup import MAX_NAME_SIGNS, MAX_TEXT_SIGNS, bars, facts, shortened, table, text
from converter.scans.samples import Deadline, SampledColumn, take_sample
from converter.schema import HEADINGS, Field, Schema
from converter.storage.directory import Storage

logger = logging.getLogger(__name__)

Chart = tuple[str, str, str]
"""As HTML: a column's least value, its bars, its greatest value."""

_MAX_COLUMNS = 100
_MAX_BYTES = 80_000
"""Of the table of columns: notebooks keep the page of each cell."""

_SAMPLE_ROWS, _SAMPLE_ROW_GROUPS = 65_536, 4
_LOCAL_PIECES, _LOCAL_ROW_GROUPS = 256, 32
_LOCAL_NUMBERS = 1 << 20
"""On a local disk more row groups and rows of a table with few columns are read: a sorted column would have gaps
otherwise. A million numbers take some 10 ms."""

_SAMPLE_SECONDS = 2.0
"""How long a store is waited for."""

_MAX_BARS = 16
_MAX_VALUE_SIGNS = 24


def page_of(
    shown: str, storage: Storage, manifest: Manifest, schema: Schema, *, lifetime: str, has_files: bool = True
) -> str:
    """The page of a converter; `shown` is its `repr`. Without files to read it has no charts."""
    charts, num_rows = _charts_of(storage, manifest, schema) if has_files else ({}, 0)
    origin = "" if manifest.origin is None else f"<p>{text(manifest.origin.summary)}</p>"
    told = [
        ("rows", f"{manifest.num_live_rows:,}"),
        ("size", f"{manifest.num_bytes / 1e6:,.1f} MB in {manifest.num_row_groups:,} row groups"),
        ("where", place_of(storage, manifest)),
        ("lifetime", lifetime),
    ]
    title = f"<p>{text(shortened(shown, MAX_TEXT_SIGNS))}</p>"
    return "".join((title, origin, facts(told), columns_of(schema, charts), _note(num_rows, manifest)))


def place_of(storage: Storage, manifest: Manifest) -> str:
    """Where the rows are, for people: the folder, or the one Parquet file that was named."""
    recipe = manifest.recipe
    if recipe is not None and recipe.kind == "parquet" and len(manifest.file_names) == 1:
        (name,), urls = manifest.file_names, recipe.place["urls"]
        if len(urls) == 1 and unquote(urls[0]).endswith(f"/{unquote(name)}"):
            return storage.below(name).url
    return storage.url


def columns_of(schema: Schema, charts: Mapping[str, Chart]) -> str:
    """The table of columns, with the charts that there are."""
    headings = (*HEADINGS, "least", "values", "greatest") if charts else HEADINGS
    rows, num_bytes = [], 0
    for field in schema.fields[:_MAX_COLUMNS]:
        cells = [text(shortened(cell, MAX_NAME_SIGNS)) for cell in (field.name, *field.cells)]
        if charts:
            cells += charts.get(field.name, ("", "", ""))
        num_bytes += sum(len(cell.encode()) for cell in cells)
        if num_bytes > _MAX_BYTES:
            break
        rows.append(cells)
    hidden = len(schema) - len(rows)
    more = f"<p>… and {hidden:,} more columns</p>" if hidden else ""
    return table(headings, rows) + more


def lifetime_of(manifest: Manifest, holding: Holding, *, is_owner: bool) -> str:
    """How long the files of a converter stay, in words."""
    if manifest.source_columns is not None:
        return "your own files, which this never removes"
    if holding.entry is None:
        return "as long as the process that wrote it, or until it is deleted"
    if holding.delete_on_exit:
        whose = "its `with` block" if is_owner else "the `with` block of the converter that it is a part of"
        return f"until the end of {whose}, delete(), or the end of this process"
    return "until delete(), or a sweep with kept=True" if manifest.is_kept else "until its owner deletes it"


def _charts_of(storage: Storage, manifest: Manifest, schema: Schema) -> tuple[Mapping[str, Chart], int]:
    """Charts of the columns that are shown and have single values, and of how many rows; none if they cannot be had."""
    rows = manifest.of_rows
    try:
        names = [field.name for field in schema.fields[:_MAX_COLUMNS] if _is_narrow(rows.schema[field.name], rows)]
        most_row_groups, most_rows = _SAMPLE_ROW_GROUPS, _SAMPLE_ROWS
        if storage.is_local and names:
            most_row_groups = max(_SAMPLE_ROW_GROUPS, min(_LOCAL_PIECES // len(names), _LOCAL_ROW_GROUPS))
            most_rows = max(_SAMPLE_ROWS, _LOCAL_NUMBERS // len(names))
        sample = take_sample(
            storage,
            rows,
            names,
            num_rows=most_rows,
            most_row_groups=most_row_groups,
            given_up=Deadline(_SAMPLE_SECONDS),
        )
        charts = {name: _chart(schema[name], column, _range_of(manifest, name)) for name, column in sample.items()}
    except Exception as error:  # noqa: BLE001 (a picture is worth no error, whatever is wrong with the files)
        logger.debug("No charts of %s: %s", storage.url, error)
        return {}, 0
    return charts, max((column.num_rows for column in sample.values()), default=0)


def _is_narrow(stored: Field, manifest: Manifest) -> bool:
    return stored.shape == () and (not stored.is_object or stored.name in manifest.categories)


def _range_of(manifest: Manifest, name: str) -> tuple[Any, Any] | None:
    """The exact range of a column of numbers, if it was taken when the column was written."""
    known = manifest.statistics.get(name)
    if known is None or manifest.selection is not None or name in manifest.scales:
        return None
    is_number = known.field.shape == () and re.match(r"u?int|float", known.field.dtype) is not None
    return (known.min, known.max) if is_number and known.closed is not None and known.min is not None else None


def _chart(field: Field, column: SampledColumn, exact: tuple[Any, Any] | None) -> Chart:
    """A column's least value, its chart, and its greatest value; of categories the most frequent one."""
    if not len(column.values):
        return "", "nulls only" if column.num_rows else "", ""
    if isinstance(column.values, pa.Array):
        values, counts = column.most_common()
        share = counts[0] / len(column.values)
        most = f"{share:.0%} {shortened(values[0].as_py(), _MAX_VALUE_SIGNS)}"
        label = f"different values in the sample: {len(counts):,}; the most frequent first"
        return "", bars(counts[:_MAX_BARS].tolist(), label), text(most)
    numbers = column.values[np.isfinite(column.values)]
    if not len(numbers):
        return "", "NaN or infinite", ""
    least, most = (_shown_number(number, field.dtype) for number in (numbers.min(), numbers.max()))
    label = f"from {least} to {most} ({len(numbers):,} in the sample)"
    found = column.histogram(_MAX_BARS)
    if exact is not None:
        # The chart is of a sample, these are of all rows.
        least, most = (_shown_number(np.asarray(value)[()], field.dtype) for value in exact)
    return text(least), "" if found is None else bars(found[0].tolist(), label), text(most)


def _shown_number(number: Any, dtype: str) -> str:
    """A number as people write it; dates and times as such."""
    if dtype.startswith("datetime64"):
        return str(number.astype(np.int64).astype(dtype))[:19]
    if isinstance(number, np.bool_):
        return str(number)
    is_rounded = abs(float(number)) >= 1e9 or (abs(float(number)) < 1000 and not isinstance(number, np.integer))
    return f"{number:.4g}" if is_rounded else f"{number:,.0f}"


def _note(num_rows: int, manifest: Manifest) -> str:
    total = manifest.of_rows.num_live_rows
    if not num_rows or num_rows == total:
        return ""
    return f"<p>Charts show a sample: {num_rows:,} of {total:,} rows.</p>"
