"""Some rows of some columns, for pictures: a few row groups spread over the data, and of each its first rows.

Cheap whatever the size of the data: no page behind those rows is decoded. It is no random sample, and what shows it
says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.manifest import Manifest
from converter.reading.data_files import DataFiles
from converter.reading.decode import decode
from converter.reading.gather import Array
from converter.scans.columns import read_columns
from converter.scans.distributions import with_room
from converter.schema import Field
from converter.storage.directory import Storage

_MAX_REMOTE_BYTES = 32 << 20
"""Of a remote store whole columns of row groups are fetched: not more than this of one row group."""

_MAX_READ_ROWS = 1 << 20
"""Rows that are read of a row group to find live ones among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledColumn:
    """What a column holds in some rows: its numbers as they are stored, or its values as Arrow has them."""

    field: Field
    values: Array | pa.Array
    """Without nulls. Dates are days and times microseconds since 1970."""

    num_rows: int
    """Rows, with those that are null."""

    @property
    def null_count(self) -> int:
        """Rows that are null."""
        return self.num_rows - len(self.values)

    def histogram(self, bins: int) -> tuple[npt.NDArray[np.int64], Array] | None:
        """How many numbers are in each of up to `bins` bins, and the bins' edges as doubles.

        None if no number is finite. Whole numbers that lie close have a bin each, and so have False and True.
        """
        values = np.asarray(self.values)
        if values.dtype == np.bool_:
            return np.bincount(values, minlength=2).astype(np.int64), np.array([-0.5, 0.5, 1.5])
        finite = values[np.isfinite(values)]
        if not len(finite):
            return None
        if values.dtype.kind in "iu" and int(finite.max()) - int(finite.min()) < bins:
            first = int(finite.min())
            counts = np.bincount((finite - finite.min()).astype(np.int64))
            return counts.astype(np.int64), first + np.arange(len(counts) + 1) - 0.5
        least, most = with_room(float(finite.min()), float(finite.max()), bins)
        if not np.isfinite(most - least):
            return None
        return np.histogram(finite.astype(np.float64), bins, (least, most))

    def most_common(self) -> tuple[pa.Array, npt.NDArray[np.int64]]:
        """The different values, the most frequent first, and how many rows have each."""
        counted = pc.value_counts(self.values)
        counts = counted.field("counts").to_numpy()
        order = np.argsort(-counts, kind="stable")
        return counted.field("values").take(pa.array(order)), counts[order].astype(np.int64)


class Deadline(threading.Event):
    """An event that is set once its time is over; it needs no thread.

    >>> Deadline(0).is_set(), Deadline(60).is_set()
    (True, False)
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._over = time.monotonic() + seconds

    def is_set(self) -> bool:
        """Whether it was set, or the time is over."""
        return super().is_set() or time.monotonic() >= self._over

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, but no longer than its own time."""
        left = max(0.0, self._over - time.monotonic())
        super().wait(left if timeout is None else min(timeout, left))
        return self.is_set()


def take_sample(
    storage: Storage,
    manifest: Manifest,
    names: Sequence[str],
    *,
    num_rows: int,
    most_row_groups: int,
    given_up: threading.Event | None = None,
) -> dict[str, SampledColumn]:
    """Up to `num_rows` live rows of columns of single values, from row groups spread over the data.

    Of a remote store some of the last columns may be left out, if row groups are large.

    Raises:
        ReadError, SourceChangedError: as `read_columns`.
        GivenUpError: `given_up` was set while a store was waited for.
    """
    live = np.flatnonzero(manifest.live_rows > 0)
    if not len(live) or not names:
        return {}
    places = np.linspace(0, len(live) - 1, min(most_row_groups, len(live))).round().astype(np.int64)
    wanted = live[places].tolist()
    # Of small data all rows, also if its row groups differ in size.
    sizes = manifest.live_rows[wanted]
    rows_of_each = int(sizes.max()) if sizes.sum() <= num_rows else num_rows // len(wanted)
    fields = [manifest.schema[name] for name in names]
    if not storage.is_local:
        row_bytes = np.cumsum([_row_bytes(field) for field in fields])
        most_bytes = _MAX_REMOTE_BYTES // int(manifest.row_group_rows[wanted].max())
        fields = fields[: int(np.searchsorted(row_bytes, most_bytes, side="right"))]
    if not fields:
        return {}
    files = DataFiles(storage, manifest, fields)
    tables = []
    for row_group in wanted:
        if given_up is not None and given_up.is_set():
            break
        tables.append(_first_live_rows(files, row_group, rows_of_each, given_up))
    if not tables:
        return {}
    return {field.name: _sampled(field, [table[field.name] for table in tables], manifest) for field in fields}


def _first_live_rows(
    files: DataFiles, row_group: int, most_rows: int, given_up: threading.Event | None
) -> dict[str, pa.ChunkedArray]:
    selection = files.manifest.selection
    rows = None if selection is None else selection.live_rows(row_group)
    if rows is None:
        table = read_columns(files, row_group, given_up, most_rows)
    else:
        rows = rows[:most_rows]
        rows = rows[rows < _MAX_READ_ROWS]
        table = read_columns(files, row_group, given_up, int(rows[-1]) + 1 if len(rows) else 1)
        table = table.take(pa.array(rows[rows < table.num_rows]))
    return dict(zip(table.column_names, table.columns, strict=True))


def _sampled(field: Field, columns: Sequence[pa.ChunkedArray], manifest: Manifest) -> SampledColumn:
    chunks = [chunk for column in columns for chunk in column.chunks]
    column = pa.chunked_array(chunks, None if chunks else columns[0].type)
    if field.is_object or field.name in manifest.categories:
        return SampledColumn(field=field, values=column.drop_null().combine_chunks(), num_rows=len(column))
    # As its row groups are: a decimal's or a time's unit may differ among the files.
    values, num_rows = [], 0
    for part in columns:
        decoded = decode(part, field, fill=0)
        numbers = np.asarray(decoded.values)
        values.append(numbers if decoded.valid is None else numbers[decoded.valid])
        num_rows += len(numbers)
    return SampledColumn(field=field, values=np.concatenate(values), num_rows=num_rows)


def _row_bytes(field: Field) -> int:
    """About how many bytes a value has in a file."""
    return 16 if field.is_object else field.stored_dtype.itemsize
