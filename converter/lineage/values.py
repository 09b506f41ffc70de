"""The arguments of converters and views as JSON, and back: nothing of it is code, and each value keeps its type."""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_VALUES = 100_000
"""Values of one list: a longer one, such as the keys of an `in`, is too large to be kept beside each run."""

_MAX_DEPTH = 20


class NotStorableError(Exception):
    """A value has no JSON form; the text says which one, for the middle of a sentence."""


def to_json(value: Any) -> Any:
    """A value as JSON; what JSON does not have is an object with one name that says what it is.

    >>> to_json([("day", ">=", dt.date(2026, 11, 21)), ("x", "<=", math.inf)])
    [{'tuple': ['day', '>=', {'date': '2026-11-21'}]}, {'tuple': ['x', '<=', {'float': 'inf'}]}]

    Raises:
        NotStorableError: a value has another type, or a list is too long.
    """
    if isinstance(value, pa.Scalar) and not pa.types.is_temporal(value.type):
        return to_json(value.as_py())
    if isinstance(value, np.generic) and not isinstance(value, (np.datetime64, np.timedelta64)):
        # A longdouble's item is one again.
        return to_json(float(value) if isinstance(value, np.floating) else value.item())
    if isinstance(value, (list, tuple, set, frozenset, np.ndarray, Mapping)) and len(value) > MAX_VALUES:
        raise NotStorableError(f"a list of {len(value):,} values, and at most {MAX_VALUES:,} are kept")
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, tuple):
        return {"tuple": list(map(to_json, value))}
    if isinstance(value, (list, set, frozenset, np.ndarray)):
        return list(map(to_json, value))
    if isinstance(value, Mapping):
        return {"dict": [[to_json(key), to_json(member)] for key, member in value.items()]}
    return _tagged(value)


def _tagged(value: Any) -> dict[str, Any]:
    """A value of a type that JSON does not have."""
    if isinstance(value, pc.Expression):
        raise NotStorableError("an expression of pyarrow; tuples (column, operator, value) can be kept")
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    # pandas' times are datetimes, too; a finer one than µs, or its NaT, is none that this can keep.
    if isinstance(value, dt.datetime) and value == value and not getattr(value, "nanosecond", 0):  # noqa: PLR0124
        return {"datetime": value.isoformat()}
    if type(value) is dt.date:
        return {"date": value.isoformat()}
    if type(value) is dt.timedelta:
        return {"microseconds": value // dt.timedelta(microseconds=1)}
    if isinstance(value, np.datetime64) and not np.isnat(value):
        unit, step = np.datetime_data(value.dtype)
        if step == 1:
            return {"datetime64": [int(value.astype(np.int64)), unit]}
    raise NotStorableError(f"a {type(value).__module__}.{type(value).__qualname__}, which has no JSON form")


def from_json(value: Any, depth: int = 0) -> Any:
    """The inverse of `to_json`; checks every value.

    >>> from_json(to_json({"max_gap": dt.timedelta(hours=2), "weights": {0: 1.5, "a": 2}}))
    {'max_gap': datetime.timedelta(seconds=7200), 'weights': {0: 1.5, 'a': 2}}

    Raises:
        ValueError, TypeError: it is nothing that `to_json` returns.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"values are nested more than {_MAX_DEPTH} times")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [from_json(member, depth + 1) for member in value]
    if not isinstance(value, dict) or len(value) != 1:
        raise ValueError(f"{value!r:.80} is no value")
    ((tag, content),) = value.items()
    if tag == "tuple" and isinstance(content, list):
        return tuple(from_json(member, depth + 1) for member in content)
    if tag == "dict" and isinstance(content, list):
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
            raise ValueError(f"{content!r:.80} are no pairs")
        # A key that cannot be hashed is a TypeError.
        return {from_json(key, depth + 1): from_json(member, depth + 1) for key, member in content}
    return _untagged(tag, content)


def _untagged(tag: Any, content: Any) -> Any:
    """The inverse of `_tagged`, and of a float that JSON does not have."""
    if tag == "float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if tag == "bytes" and isinstance(content, str):
        return base64.b64decode(content, validate=True)
    if tag == "decimal" and isinstance(content, str):
        try:
            return Decimal(content)
        except ArithmeticError as error:
            raise ValueError(f"{content!r:.80} is no decimal") from error
    if tag == "datetime" and isinstance(content, str):
        return dt.datetime.fromisoformat(content)
    if tag == "date" and isinstance(content, str):
        return dt.date.fromisoformat(content)
    if tag == "microseconds" and type(content) is int and abs(content) < 1 << 62:
        return dt.timedelta(microseconds=content)
    if tag == "datetime64" and isinstance(content, list) and len(content) == 2 and type(content[0]) is int:
        number, unit = content
        if abs(number) < 1 << 62 and unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns"):
            return np.datetime64(number, unit)
    raise ValueError(f"{tag!r:.80} of {content!r:.80} is no value")
