"""Converts dates of old calendars to today's calendar, nanoseconds and times of day to microseconds."""

from __future__ import annotations

import datetime as dt
import functools

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter.errors import SourceError
from converter.places import Place, innermost, is_list
from converter.reading.lists import map_chunks, map_values

_DATETIME_NOTE, _INT96_NOTE = b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96"
_SPARK_VERSION = b"org.apache.spark.version"
_FIRST_SAME_TIME = dt.datetime(1900, 1, 1)  # noqa: DTZ001 (of UTC, as Arrow counts)
"""Both calendars, and the offsets of all time zones, agree from here on."""


def is_julian(metadata: pq.FileMetaData, place: Place) -> bool:
    """Whether a file counts a column's old dates or times by the Julian calendar, as Spark 2 and its LEGACY mode do.

    The marks in the footer are those of `datetimeRebaseSpec` and `int96RebaseSpec` in Spark's `DataSourceUtils`.
    """
    kind, stored = innermost(place.field.type), metadata.schema.column(place.leaf)
    is_int96 = stored.physical_type == "INT96"
    if not (pa.types.is_date32(kind) or (pa.types.is_timestamp(kind) and (kind.tz or is_int96))):
        return False
    notes = metadata.metadata or {}
    version = notes.get(_SPARK_VERSION, b"")
    if is_int96:
        return _INT96_NOTE in notes or version.startswith((b"2.", b"3.0."))
    return _DATETIME_NOTE in notes or version.startswith(b"2.")


def in_todays_calendar(column: pa.ChunkedArray, metadata: pq.FileMetaData, place: Place) -> pa.ChunkedArray:
    """The column with old dates counted by today's calendar, where its file counts them by the Julian one."""
    if not is_julian(metadata, place):
        return column
    if not is_list(column.type):
        return _in_todays_calendar(column, place)

    def convert(values: pa.Array) -> pa.Array:
        return _in_todays_calendar(pa.chunked_array([values]), place).chunk(0)

    return map_chunks(column, functools.partial(map_values, function=convert))


def _in_todays_calendar(column: pa.ChunkedArray, place: Place) -> pa.ChunkedArray:
    if pa.types.is_date(column.type):
        return gregorian_days(column)
    # The offsets of time zones differ, too, before they were agreed on.
    if pc.any(pc.less(floor_times(column).cast(pa.timestamp("us")), pa.scalar(_FIRST_SAME_TIME))).as_py():
        name = place.field.name
        raise SourceError(
            f"Column {name!r} has times before 1900 in the calendar of Spark's LEGACY mode, which cannot be read here. "
            "Leave it out with columns=…, or read it with Spark and convert the DataFrame.",
            column=name,
        )
    return column


_JULIAN_DAY_OF_1970 = 2_440_588
_FIRST_GREGORIAN_DAY = -141_427
"""1582-10-15, in days since 1970."""


def gregorian_days(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dates counted by the Julian calendar before 1582-10-15, as the same year, month and day of today's calendar.

    A 29th of February that today's calendar lacks becomes the next day. By E. G. Richards, "Calendars" (2012), in the
    Explanatory Supplement to the Astronomical Almanac.
    """
    chunks = []
    for chunk in column.chunks:
        days = np.asarray(pc.fill_null(chunk.view(pa.int32()), 0)).astype(np.int64)
        four_times = 4 * (days + _JULIAN_DAY_OF_1970 + 32082) + 3
        of_year = four_times % 1461 // 4
        month = (5 * of_year + 2) // 153
        day = of_year - (153 * month + 2) // 5
        months = 12 * (four_times // 1461 - 4800 - 1970) + month + 2
        rebased = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) + day
        numbers = np.where(days < _FIRST_GREGORIAN_DAY, rebased, days).astype(np.int32)
        chunks.append(pa.array(numbers, mask=np.asarray(pc.is_null(chunk))).view(pa.date32()))
    return pa.chunked_array(chunks, pa.date32())


def floor_times(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Times in nanoseconds as the microseconds of a batch, nulls kept; any other column unchanged."""
    if not pa.types.is_timestamp(column.type) or column.type.unit != "ns":
        return column
    kind = pa.timestamp("us", column.type.tz)
    # Arrow's own cast refuses to round.
    numbers = [np.asarray(pc.fill_null(chunk.view(pa.int64()), 0)) // 1000 for chunk in column.chunks]
    masks = [np.asarray(pc.is_null(chunk)) for chunk in column.chunks]
    floored = [pa.array(chunk, mask=mask).view(kind) for chunk, mask in zip(numbers, masks, strict=True)]
    return pa.chunked_array(floored, kind)


def count_microseconds(array: pa.Array) -> pa.Array:
    """Times of day and durations as whole microseconds, finer ones rounded down; any other array unchanged.

    Raises:
        pyarrow.ArrowInvalid: there are more of them than an int64 holds.
    """
    kind = array.type
    if not (pa.types.is_time(kind) or pa.types.is_duration(kind)):
        return array
    if kind.unit == "ns":
        numbers = np.asarray(pc.fill_null(array.view(pa.int64()), 0)) // 1000
        return pa.array(numbers, mask=np.asarray(pc.is_null(array)))
    return pc.cast(array, pa.time64("us") if pa.types.is_time(kind) else pa.duration("us")).view(pa.int64())
