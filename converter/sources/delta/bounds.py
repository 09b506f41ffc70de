"""The log's bounds of each file's values: widened or dropped if writers or deltalake make them too narrow."""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter.sources.delta.log import LOG_FOLDER, checkpoints_of
from converter.storage.directory import FileInfo, Storage

_SIDECARS = "_sidecars"
_TIME_BOUND = re.compile(r"add\.stats_parsed\.(?:min|max)Values\.(.*)")
_MOST_US = 2**63 // 1000
"""The last microsecond whose nanoseconds fit into 64 bits: in the year 2262, and back to 1677."""

_MINUTE_US = 60_000_000
_LAST_ODD_OFFSET_US = 3 * 365 * 86_400_000_000
"""Until January 1972 Liberia was 44 minutes and 30 seconds behind UTC, the last offset with seconds (tz database)."""

_EXACT_DIGITS = 15
"""A decimal of so many digits survives as a double."""


def wrapped_bounds(storage: Storage, log: Mapping[str, FileInfo], versions: range) -> set[str] | None:
    """The columns whose bounds in checkpoints of these versions deltalake reads wrongly; None if one cannot be read.

    Spark writes bounds of times there as INT96, which deltalake reads as nanoseconds: the year 9999 becomes 1816.
    """
    names = [name for found in checkpoints_of(log, versions).values() for name in found]
    folder = storage.below(LOG_FOLDER)
    wrapped: set[str] = set()
    try:
        for name in names:
            if name.endswith(".json"):
                lines = [json.loads(line) for line in folder.read(name).splitlines() if line.strip()]
                sidecars = [line["sidecar"]["path"] for line in lines if line.get("sidecar")]
            else:
                sidecars = _add_wrapped(folder, name, wrapped)
            for sidecar in sidecars:
                _add_wrapped(folder.below(_SIDECARS), posixpath.basename(unquote(sidecar)), wrapped)
    except Exception:  # noqa: BLE001 (no bound is believed then; deltalake raises if it cannot read the checkpoint)
        return None
    return wrapped


def _add_wrapped(folder: Storage, name: str, wrapped: set[str]) -> list[str]:
    """Add the columns with bounds beyond 64 bits of nanoseconds; return the sidecar files that a checkpoint names."""
    with contextlib.closing(folder.open_parquet(name)) as source:
        checkpoint = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
        leaves = [checkpoint.schema.column(index) for index in range(len(checkpoint.schema))]
        times = [leaf.path for leaf in leaves if leaf.physical_type == "INT96" and _TIME_BOUND.fullmatch(leaf.path)]
        for path, values in _leaves_of(checkpoint.read(columns=times)) if times else ():
            micros = pc.abs(pc.cast(values, pa.int64()))
            match = _TIME_BOUND.fullmatch(path)
            if match and (pc.max(micros).as_py() or 0) >= _MOST_US:
                wrapped.add(match[1])
        if "sidecar" not in checkpoint.schema_arrow.names:
            return []
        sidecars = checkpoint.read(columns=["sidecar.path"])["sidecar"]
        return [sidecar["path"] for sidecar in pc.drop_null(sidecars).to_pylist() if sidecar["path"] is not None]


def _leaves_of(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """The columns by their dotted names, a struct as its members."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_struct(column.type):
            members = {field.name: pc.struct_field(column, index) for index, field in enumerate(column.type)}
            yield from ((f"{name}.{below}", values) for below, values in _leaves_of(pa.table(members)))
        else:
            yield name, column


def bounds_array(actions: pa.Table, name: str) -> Any:
    """A column of the log's statistics, or None."""
    if actions.column_names.count(name) != 1:
        return None
    column = actions[name]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def typed_bound(actions: pa.Table, name: str, arrow_type: pa.DataType) -> Any:
    """For each file a bound of its values that is safe to compare with; None if there is none."""
    raw = bounds_array(actions, name)
    if raw is None:
        return None
    try:
        bounds = pc.cast(raw, arrow_type)
    except pa.ArrowException:
        # From before the column's type was widened.
        return None
    if pa.types.is_floating(arrow_type):
        # deltalake writes NaN as the maximum.
        return pc.if_else(pc.is_finite(bounds), bounds, None)
    if pa.types.is_decimal(arrow_type) and arrow_type.precision > _EXACT_DIGITS:
        # deltalake writes them as doubles, so that a bound may lie within the values.
        number = pc.cast(bounds, pa.float64())
        if arrow_type.scale == 0:
            # Numbers beyond 64 bits it writes as the largest of 64 bits.
            number = pc.if_else(pc.less(pc.abs(number), 0.999 * 2.0**63), number, None)
        slack = pc.add(pc.multiply(pc.abs(number), 2.0**-50), 10.0**-arrow_type.scale)
        moved = pc.subtract(number, slack) if name.startswith("min.") else pc.add(number, slack)
        with contextlib.suppress(pa.ArrowException):
            return pc.cast(moved, arrow_type)
        return None
    if pa.types.is_timestamp(arrow_type):
        micros, is_least = pc.cast(bounds, pa.int64()), name.startswith("min.")
        if arrow_type.tz is not None:
            # Some writers cut the seconds off a zone's historical offset.
            slack = pc.if_else(pc.less(micros, _LAST_ODD_OFFSET_US), -_MINUTE_US if is_least else _MINUTE_US, 0)
            micros = pc.add(micros, slack)
        # Logs cut times to milliseconds.
        return pc.cast(micros if is_least else pc.add(micros, 999), arrow_type)
    return bounds
