"""A filter's value in the type of its column, so that comparisons are exact, as Spark's are.

Why attoseconds and fractions: NumPy's times are finer than a column's, and a float is no decimal; Arrow would round
or refuse them.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 (UTC, as all of them)
_ATTOSECONDS = {
    "as": 1, "fs": 10**3, "ps": 10**6, "ns": 10**9, "us": 10**12, "ms": 10**15, "s": 10**18, "m": 60 * 10**18,
    "h": 3600 * 10**18, "D": 86400 * 10**18,
}  # fmt: skip
"""NumPy's units of time."""


def is_many(value: Any) -> bool:
    """Whether a value is a list of values."""
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes))


def decimals_of(value: float, scale: int) -> tuple[Decimal, Decimal]:
    """The least and the largest decimal whose nearest double this is; if there is none, the least is larger."""
    exact = Fraction(value)
    below, above = math.nextafter(value, -math.inf), math.nextafter(value, math.inf)
    step_down = exact - Fraction(below) if math.isfinite(below) else Fraction(above) - exact
    step_up = Fraction(above) - exact if math.isfinite(above) else step_down
    unit = Fraction(10) ** scale
    first, last = (exact - step_down / 2) * unit, (exact + step_up / 2) * unit
    least, most = math.ceil(first), math.floor(last)
    if struct.unpack("<q", struct.pack("<d", value))[0] % 2:
        # The middle between two doubles becomes the even one.
        least, most = least + (least == first), most - (most == last)
    return _decimal(least, scale), _decimal(most, scale)


def _decimal(number: int, scale: int) -> Decimal:
    """A decimal by its digits, without the rounding of Decimal's arithmetic."""
    return Decimal((int(number < 0), Decimal(abs(number)).as_tuple().digits, -scale))


def value_of(value: pa.Scalar) -> Any:
    """A value to make an array of; the count for days and times, which may be finer or further than Python's."""
    return value.value if pa.types.is_temporal(value.type) else value.as_py()


def plain_value(value: Any) -> Any:
    """A value of NumPy or Arrow as Python's, None for null; days and times stay, as they may be finer or further."""
    if isinstance(value, (np.datetime64, dt.datetime)):
        # NaT of NumPy and pandas is not equal to itself.
        return value if value == value else None  # noqa: PLR0124
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Decimal) and value.is_nan():
        # Comparing it would raise.
        return math.nan
    if not isinstance(value, pa.Scalar):
        return value
    if not value.is_valid:
        return None
    return value if pa.types.is_temporal(value.type) else value.as_py()


def fitting(sign: str, kind: pa.DataType, values: list[Any]) -> tuple[str, list[Any]]:
    """The same comparison with values that the column can hold; unchanged if the types do not correspond."""
    if pa.types.is_integer(kind) and values and are_numbers(values):
        return _fitting_integers(sign, kind, values)
    if pa.types.is_decimal(kind) and values and are_numbers(values):
        # Arrow would give each number a type of its own digits, which may be too many to compare.
        most = 10**kind.precision - 1
        held_sign, held = _fitting_whole(sign, -most, most, [_scaled(value, kind.scale) for value in values])
        return held_sign, [pa.scalar(_decimal(number, kind.scale), kind) for number in held]
    if (pa.types.is_timestamp(kind) or pa.types.is_date(kind)) and values and all(map(_is_time, values)):
        is_day = pa.types.is_date(kind)
        unit = _ATTOSECONDS["D" if is_day else kind.unit]
        counts = [_count(value, unit) for value in values]
        held_sign, held = _fitting_integers(sign, pa.int32() if is_day else pa.int64(), counts)
        stored = pa.date32() if is_day else kind
        return held_sign, [pa.scalar(count, stored).cast(kind) for count in held]
    return sign, values


def are_numbers(values: Sequence[Any]) -> bool:
    """Whether all values are numbers, booleans not among them."""
    return all(isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) for value in values)


def _is_time(value: Any) -> bool:
    if isinstance(value, pa.Scalar):
        return bool(pa.types.is_timestamp(value.type) or pa.types.is_date(value.type))
    return isinstance(value, (dt.date, np.datetime64))


def _count(value: Any, unit: int) -> int | Fraction:
    """The time since 1970 in units of `unit` attoseconds."""
    since = _attoseconds_of(value)
    return Fraction(since, unit) if since % unit else since // unit


def _attoseconds_of(value: Any) -> int:
    """The time since 1970 in NumPy's finest unit; a time without zone is UTC, as in a batch."""
    if isinstance(value, pa.Scalar):
        unit = value.type.unit if pa.types.is_timestamp(value.type) else "D"
        return int((value if unit != "D" else value.cast(pa.date32())).value) * _ATTOSECONDS[unit]
    if isinstance(value, np.datetime64):
        unit, step = np.datetime_data(value)
        if unit not in _ATTOSECONDS:
            return _attoseconds_of(value.astype("datetime64[D]"))
        return int(value.astype(np.int64)) * step * _ATTOSECONDS[unit]
    if not isinstance(value, dt.datetime):
        return int((value - _EPOCH.date()).days) * _ATTOSECONDS["D"]
    # By Python's arithmetic: pandas' times are datetimes as well, but their differences do not reach far.
    since = dt.datetime.combine(value.date(), value.time()) - _EPOCH - (value.utcoffset() or dt.timedelta(0))
    microseconds = since // dt.timedelta(microseconds=1)
    return microseconds * _ATTOSECONDS["us"] + int(getattr(value, "nanosecond", 0)) * _ATTOSECONDS["ns"]


def _fitting_integers(sign: str, kind: pa.DataType, values: list[Any]) -> tuple[str, list[Any]]:
    bits = kind.bit_width - pa.types.is_signed_integer(kind)
    return _fitting_whole(sign, -(2**bits) if pa.types.is_signed_integer(kind) else 0, 2**bits - 1, values)


def _fitting_whole(sign: str, least: int, most: int, values: list[Any]) -> tuple[str, list[Any]]:
    """A comparison of whole numbers between `least` and `most` with any numbers; as floats large ones would change."""
    held = [int(value) for value in values if _is_finite(value) and int(value) == value and least <= value <= most]
    if sign in ("in", "not in") or held:
        return sign, held
    value = values[0]
    if sign in ("=", "==", "!="):
        return ("not in" if sign == "!=" else "in"), []
    # NaN is above every number.
    if value < least:
        return (">=" if sign[0] == ">" else "<"), [least]
    return (">" if sign[0] == ">" else "<="), [min(math.floor(value), most) if _is_finite(value) else most]


def _is_finite(number: float | Decimal | Fraction) -> bool:
    return isinstance(number, (int, Fraction)) or math.isfinite(number)


def _scaled(number: Any, scale: int) -> Any:
    """A number in units of a decimal's last digit."""
    if not _is_finite(number):
        return number
    exact = Fraction(number) * Fraction(10) ** scale
    return int(exact) if exact.denominator == 1 else exact


def is_nan_value(value: Any) -> bool:
    """Whether a value of Python, NumPy or Arrow is NaN."""
    if isinstance(value, Decimal):
        return value.is_nan()
    number = value.as_py() if isinstance(value, (pa.FloatScalar, pa.DoubleScalar, pa.HalfFloatScalar)) else value
    return isinstance(number, (float, np.floating)) and math.isnan(number)
