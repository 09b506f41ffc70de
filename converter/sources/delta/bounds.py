"""What the log says of a file's values, made safe."""

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

from converter.sources.delta.log import CHECKPOINT_PATTERN, LOG_FOLDER, first_replayed
from converter.storage.directory import FileInfo, Storage

_SIDECARS = "_sidecars"
_TIME_BOUND = re.compile(r"add\.stats_parsed\.(?:min|max)Values\.(.*)")
_MOST_US = 2**63 // 1000
"""What 64 bits hold of nanoseconds: to the year 2262, and back to 1677."""

_MINUTE_US = 60_000_000
_LAST_ODD_OFFSET_US = 3 * 365 * 86_400_000_000
"""Liberia's clocks were 44 minutes and 30 seconds behind until January 1972, the last with seconds (tz database)."""

_EXACT_DIGITS = 15
"""A decimal of so many digits is the same after it was a double."""


def wrapped_bounds(storage: Storage, log: Mapping[str, FileInfo], version: int) -> set[str] | None:
    """The columns of which deltalake's bounds are others than the checkpoint's; None: it cannot be read.

    Spark writes bounds of times there as INT96, which deltalake reads as nanoseconds: the year 9999 becomes 1816.
    """
    newest = first_replayed(log, version) - 1
    names = [name for name in log if CHECKPOINT_PATTERN.match(name) and int(name[:20]) == newest]
    folder = storage.below(LOG_FOLDER)
    found: set[str] = set()
    try:
        for name in names:
            if name.endswith(".json"):
                lines = [json.loads(line) for line in folder.read(name).splitlines() if line.strip()]
                sidecars = [line["sidecar"]["path"] for line in lines if line.get("sidecar")]
            else:
                sidecars = _look_for_wrapped(folder, name, found)
            for one in sidecars:
                _look_for_wrapped(folder.below(_SIDECARS), posixpath.basename(unquote(one)), found)
    except Exception:  # noqa: BLE001 (then nothing is known of them; whether it can be read is deltalake's to say)
        return None
    return found


def _look_for_wrapped(folder: Storage, name: str, found: set[str]) -> list[str]:
    """Add the columns whose bounds of times 64 bits do not hold; the other files that a checkpoint names."""
    with contextlib.closing(folder.open_parquet(name)) as source:
        checkpoint = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
        leaves = [checkpoint.schema.column(place) for place in range(len(checkpoint.schema))]
        times = [one.path for one in leaves if one.physical_type == "INT96" and _TIME_BOUND.fullmatch(one.path)]
        for path, values in _leaves_of(checkpoint.read(columns=times)) if times else ():
            micros = pc.abs(pc.cast(values, pa.int64()))
            known = _TIME_BOUND.fullmatch(path)
            if known and (pc.max(micros).as_py() or 0) >= _MOST_US:
                found.add(known[1])
        if "sidecar" not in checkpoint.schema_arrow.names:
            return []
        sidecars = checkpoint.read(columns=["sidecar.path"])["sidecar"]
        return [one["path"] for one in pc.drop_null(sidecars).to_pylist() if one["path"] is not None]


def _leaves_of(table: pa.Table) -> Iterator[tuple[str, pa.ChunkedArray]]:
    """The columns with the members of structs in the struct's place."""
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_struct(column.type):
            members = {field.name: pc.struct_field(column, place) for place, field in enumerate(column.type)}
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
    """For each file a bound of its values, or None; times are cut to milliseconds there."""
    found = bounds_array(actions, name)
    if found is None:
        return None
    try:
        found = pc.cast(found, arrow_type)
    except pa.ArrowException:
        # Of before the column's type was widened.
        return None
    if pa.types.is_floating(arrow_type):
        # NaN is taken for the largest number.
        return pc.if_else(pc.is_finite(found), found, None)
    if pa.types.is_decimal(arrow_type) and arrow_type.precision > _EXACT_DIGITS:
        # deltalake writes them as doubles, so that a bound may lie within the values.
        number = pc.cast(found, pa.float64())
        if arrow_type.scale == 0:
            # Of what 64 bits do not hold it writes the largest number that they do.
            number = pc.if_else(pc.less(pc.abs(number), 0.999 * 2.0**63), number, None)
        slack = pc.add(pc.multiply(pc.abs(number), 2.0**-50), 10.0**-arrow_type.scale)
        moved = pc.subtract(number, slack) if name.startswith("min.") else pc.add(number, slack)
        with contextlib.suppress(pa.ArrowException):
            return pc.cast(moved, arrow_type)
        return None
    if pa.types.is_timestamp(arrow_type):
        micros, is_least = pc.cast(found, pa.int64()), name.startswith("min.")
        if arrow_type.tz is not None:
            # Some writers cut the seconds off the offset of a zone, which had some before its clocks were agreed on.
            slack = pc.if_else(pc.less(micros, _LAST_ODD_OFFSET_US), -_MINUTE_US if is_least else _MINUTE_US, 0)
            micros = pc.add(micros, slack)
        return pc.cast(micros if is_least else pc.add(micros, 999), arrow_type)
    return found
