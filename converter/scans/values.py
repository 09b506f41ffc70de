"""A value as a column of a type could hold it."""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Iterable
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
    """The least and the largest decimal to which a double is the nearest; where there is none, the least is larger."""
    exact = Fraction(value)
    below, above = math.nextafter(value, -math.inf), math.nextafter(value, math.inf)
    step_down = exact - Fraction(below) if math.isfinite(below) else Fraction(above) - exact
    step_up = Fraction(above) - exact if math.isfinite(above) else step_down
    unit = Fraction(10) ** scale
    first, last = (exact - step_down / 2) * unit, (exact + step_up / 2) * unit
    least, most = math.ceil(first), math.floor(last)
    if struct.unpack("<q", struct.pack("<d", value))[0] % 2:
        # What lies in the middle of two doubles becomes the even one.
        least, most = least + (least == first), most - (most == last)
    return _decimal(least, scale), _decimal(most, scale)


def _decimal(number: int, scale: int) -> Decimal:
    """So many of the last digit; without the rounding of Decimal's arithmetic."""
    return Decimal((int(number < 0), Decimal(abs(number)).as_tuple().digits, -scale))


def value_of(value: pa.Scalar) -> Any:
    """What an array is made of: nanoseconds are no datetime, days and times may lie beyond Python's."""
    return value.value if pa.types.is_temporal(value.type) else value.as_py()


def plain_value(value: Any) -> Any:
    """A value of Python's where there is one for it; times of NumPy's and Arrow's may be finer, or reach further."""
    if isinstance(value, (np.datetime64, dt.datetime)):
        # Of "not a time", pandas' own among them, nothing is equal to itself.
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
    """The same comparison with values that the column could hold, where there is one."""
    are_numbers = all(isinstance(one, (int, float, Decimal)) and not isinstance(one, bool) for one in values)
    if pa.types.is_integer(kind) and values and are_numbers:
        return _fitting_integers(sign, kind, values)
    if pa.types.is_decimal(kind) and values and are_numbers:
        # Of a number's own type Arrow would take the digits, which may be more than there can be.
        most = 10**kind.precision - 1
        sign, held = _fitting_whole(sign, -most, most, [_scaled(one, kind.scale) for one in values])
        return sign, [pa.scalar(_decimal(one, kind.scale), kind) for one in held]
    if (pa.types.is_timestamp(kind) or pa.types.is_date(kind)) and values and all(map(_is_time, values)):
        is_day = pa.types.is_date(kind)
        unit = _ATTOSECONDS["D" if is_day else kind.unit]
        sign, held = _fitting_integers(
            sign, pa.int32() if is_day else pa.int64(), [_count(one, unit) for one in values]
        )
        return sign, [pa.scalar(one, pa.date32()).cast(kind) if is_day else pa.scalar(one, kind) for one in held]
    return sign, values


def _is_time(value: Any) -> bool:
    if isinstance(value, pa.Scalar):
        return bool(pa.types.is_timestamp(value.type) or pa.types.is_date(value.type))
    return isinstance(value, (dt.date, np.datetime64))


def _count(value: Any, unit: int) -> int | Fraction:
    """How many units of so many attoseconds lie between 1970 and a time."""
    found = _attoseconds_of(value)
    return Fraction(found, unit) if found % unit else found // unit


def _attoseconds_of(value: Any) -> int:
    """The time since 1970, in the finest unit there is; a time without zone is UTC, as in a batch."""
    if isinstance(value, pa.Scalar):
        unit = value.type.unit if pa.types.is_timestamp(value.type) else "D"
        return int((value if unit != "D" else value.cast(pa.date32())).value) * _ATTOSECONDS[unit]
    if isinstance(value, np.datetime64):
        unit, step = np.datetime_data(value)
        if unit not in _ATTOSECONDS:
            value, unit, step = value.astype("datetime64[D]"), "D", 1
        return int(value.astype(np.int64)) * step * _ATTOSECONDS[unit]
    if not isinstance(value, dt.datetime):
        return int((value - _EPOCH.date()).days) * _ATTOSECONDS["D"]
    # Without the arithmetic of pandas, whose times are some that know nanoseconds and do not reach far.
    since = dt.datetime.combine(value.date(), value.time()) - _EPOCH - (value.utcoffset() or dt.timedelta(0))
    microseconds = since // dt.timedelta(microseconds=1)
    return microseconds * _ATTOSECONDS["us"] + int(getattr(value, "nanosecond", 0)) * _ATTOSECONDS["ns"]


def _fitting_integers(sign: str, kind: pa.DataType, values: list[Any]) -> tuple[str, list[Any]]:
    bits = kind.bit_width - pa.types.is_signed_integer(kind)
    return _fitting_whole(sign, -(2**bits) if pa.types.is_signed_integer(kind) else 0, 2**bits - 1, values)


def _fitting_whole(sign: str, least: int, most: int, values: list[Any]) -> tuple[str, list[Any]]:
    """What any numbers mean to whole ones between two: made floats, large ones would be others."""
    held = [int(one) for one in values if _is_finite(one) and int(one) == one and least <= one <= most]
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
    value = value.as_py() if isinstance(value, (pa.FloatScalar, pa.DoubleScalar, pa.HalfFloatScalar)) else value
    return (
        value.is_nan() if isinstance(value, Decimal) else isinstance(value, (float, np.floating)) and math.isnan(value)
    )
