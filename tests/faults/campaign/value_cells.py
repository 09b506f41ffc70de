"""Batches of NumPy, torch and TensorFlow as plain cells, and whether a cell is what Spark says."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np

_DAY, _MICROSECOND = dt.timedelta(days=1), dt.timedelta(microseconds=1)
_EPOCH = dt.datetime.fromisoformat("1970-01-01")


def plain_column(column: Any) -> list[Any]:
    """A column of a batch as Python's lists, numbers, texts and bytes; days and times as counts since 1970."""
    if hasattr(column, "to_list"):
        # A ragged tensor of TensorFlow.
        return list(column.to_list())
    if getattr(column, "is_nested", False):
        return [_plain(row.numpy()) for row in column.unbind()]
    if isinstance(column, list):
        return column
    return list(_plain(column.numpy() if hasattr(column, "numpy") else column))


def _plain(array: Any) -> Any:
    if array.dtype == object:
        return [_plain(row) if isinstance(row, np.ndarray) else row for row in array]
    return (array.view(np.int64) if array.dtype.kind == "M" else array).tolist()


def cut(batch: Mapping[str, Any], name: str, cells: list[Any]) -> list[Any]:
    """The cells without what pads them."""
    if f"{name}__length" not in batch:
        return cells
    lengths = plain_column(batch[f"{name}__length"])
    inner = plain_column(batch[f"{name}__inner_length"]) if f"{name}__inner_length" in batch else None
    found = []
    for number, (cell, length) in enumerate(zip(cells, lengths, strict=True)):
        if inner is not None:
            first = length[0] if isinstance(length, list) else length
            found.append([row[:size] for row, size in zip(cell[:first], inner[number], strict=False)])
        elif isinstance(length, list):
            found.append([row[: length[1]] for row in cell[: length[0]]])
        else:
            found.append(cell[:length])
    return found


def is_same(found: Any, expected: Any, dtype: str, *, valid: Any = None) -> bool:
    """Whether a cell is what Spark has there; `valid` says which of its elements are present, if some may be null."""
    if isinstance(expected, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(expected):
            # A row of no lists, or of empty ones, is empty.
            return not _flat(found) and not _flat(expected)
        flags = [None] * len(found) if valid is None else valid
        return all(is_same(*cells, dtype, valid=flag) for *cells, flag in zip(found, expected, flags, strict=True))
    if expected is None:
        # A null element.
        return valid is not None and not valid
    if valid is not None and not valid:
        return False
    if isinstance(expected, Decimal):
        wanted = np.dtype(dtype).type(float(expected))
        return bool(abs(np.float64(found) - np.float64(wanted)) <= np.spacing(abs(wanted)))
    if isinstance(expected, float):
        with np.errstate(over="ignore"):
            wanted = float(np.dtype(dtype).type(expected))
        if math.isnan(wanted):
            return math.isnan(found)
        return bool(found == wanted) and math.copysign(1, found) == math.copysign(1, wanted)
    if isinstance(expected, str):
        return bool((found.decode() if isinstance(found, bytes) else found) == expected)
    if isinstance(expected, (bytes, bytearray)):
        return bool(found == bytes(expected))
    return bool(found == as_count(expected))


def _flat(cell: Any) -> list[Any]:
    return [leaf for part in cell for leaf in _flat(part)] if isinstance(cell, (list, tuple)) else [cell]


def as_count(value: Any) -> Any:
    """A day, a time or a span of time as the number that a tensor holds."""
    if isinstance(value, dt.datetime):
        return (value.replace(tzinfo=None) - _EPOCH) // _MICROSECOND
    if isinstance(value, dt.date):
        return (value - _EPOCH.date()) // _DAY
    if isinstance(value, dt.timedelta):
        return value // _MICROSECOND
    return value
