"""What a column's numbers are like: count, minimum, maximum, mean, spread; merged exactly across tasks.

Travels by value beside `executor`: imports NumPy alone and speaks in plain dicts.

Sums are taken in float64 of differences to a shift near the mean, block by block
while the block is in the cache, so they cost a fraction of writing the column and
lose no digits where the mean is large against the spread. Two parts are merged by
Chan, Golub and LeVeque's formula, which is exact up to rounding.

NaNs are counted and left out; infinities are numbers and spoil what they touch,
as they do in NumPy.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

MAX_ELEMENTS = 4096
"""Tensors up to this many elements have a mean and a spread for each element."""

ARRAYS = ("count", "shift", "offset", "m2")
"""What closed moments hold for each element."""

_BLOCK_NUMBERS = 1 << 16
"""How many numbers are summed at once: 0.9 ns each in blocks of 32 k to 128 k of them, 1.5 ns in blocks of 8 k."""


def new_moments(num_elements: int) -> dict[str, Any]:
    """Nothing seen yet, for rows of `num_elements` numbers each (1: a scalar, or numbers taken all alike)."""
    zeros = np.zeros(num_elements)
    return {
        "shift": zeros.copy(),
        "has_shift": np.zeros(num_elements, bool),
        "count": zeros,
        "first": zeros.copy(),
        "second": zeros.copy(),
        "nans": 0,
        "min": None,
        "max": None,
    }


def new_scratch() -> dict[str, Any]:
    """Room to work in, for `add_values` again and again: fresh memory would cost more than the sums."""
    return {"numbers": np.empty(_BLOCK_NUMBERS), "ones": np.ones(_BLOCK_NUMBERS)}


def add_values(moments: dict[str, Any], values: np.ndarray[Any, Any], scratch: dict[str, Any]) -> None:
    """Count in numbers of shape `(rows, num_elements)`, none of them null."""
    if values.size:
        # Infinities make NaNs of sums, as they do in NumPy; that is no news to warn of.
        with np.errstate(invalid="ignore", over="ignore"):
            _add_blocks(moments, values, scratch)


def _add_blocks(moments: dict[str, Any], values: np.ndarray[Any, Any], scratch: dict[str, Any]) -> None:
    _add_extremes(moments, values)
    width = values.shape[1]
    block_rows = _BLOCK_NUMBERS // width
    ones = scratch["ones"]
    for start in range(0, len(values), block_rows):
        block = values[start : start + block_rows]
        if not moments["has_shift"].all():
            _choose_shift(moments, block)
        difference = scratch["numbers"][: block.size].reshape(block.shape)
        np.subtract(block, moments["shift"], out=difference)
        first = ones[: len(block)] @ difference
        counted: Any = float(len(block))
        if np.isnan(first).any():
            # Rare: look which numbers are none, and take those out.
            absent = np.isnan(block)
            moments["nans"] += int(absent.sum())
            counted = len(block) - absent.sum(axis=0)
            difference[absent] = 0.0
            first = ones[: len(block)] @ difference
        moments["count"] += counted
        moments["first"] += first
        if width == 1:
            # The same as below, at a third of its cost.
            moments["second"] += np.dot(difference[:, 0], difference[:, 0])
        else:
            moments["second"] += np.einsum("ij,ij->j", difference, difference)


def _choose_shift(moments: dict[str, Any], block: np.ndarray[Any, Any]) -> None:
    """Take the mean of an element's first finite numbers for its shift: without any before, it has no sums either."""
    usable = np.isfinite(block)
    near = np.where(usable, block, 0.0).sum(axis=0, dtype=np.float64) / np.maximum(usable.sum(axis=0), 1)
    moments["shift"] = np.where(moments["has_shift"], moments["shift"], near)
    moments["has_shift"] = moments["has_shift"] | usable.any(axis=0) | (moments["count"] > 0)


def _add_extremes(moments: dict[str, Any], values: np.ndarray[Any, Any]) -> None:
    least, most = values.min(), values.max()
    if values.dtype.kind == "f" and np.isnan(least):
        present = values[~np.isnan(values)]
        if not present.size:
            return
        least, most = present.min(), present.max()
    moments["min"] = least.item() if moments["min"] is None else min(moments["min"], least.item())
    moments["max"] = most.item() if moments["max"] is None else max(moments["max"], most.item())


def close_moments(moments: dict[str, Any]) -> dict[str, Any]:
    """Sums become means and squared deviations, which can be merged: `count`, `shift`, `offset`, `m2` (arrays).

    The mean is `shift + offset`. They stay apart: of numbers near 1e15 that differ by hundreds the sum would lose
    the digits that a merge needs.
    """
    count, first = moments["count"], moments["first"]
    with np.errstate(all="ignore"):
        offset = np.where(count > 0, first / np.maximum(count, 1), 0.0)
        m2 = np.maximum(moments["second"] - first * offset, 0.0)
    m2 = np.where(np.isfinite(moments["second"]), m2, np.nan)
    keep = {name: moments[name] for name in ("nans", "min", "max")}
    return {"count": count, "shift": np.where(count > 0, moments["shift"], 0.0), "offset": offset, "m2": m2} | keep


def mean_of(closed: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The mean of each element; 0 where there are no numbers."""
    mean: np.ndarray[Any, Any] = closed["shift"] + closed["offset"]
    return mean


def merge_moments(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Two closed parts as one."""
    count = left["count"] + right["count"]
    shift = np.where(left["count"] > 0, left["shift"], right["shift"])
    with np.errstate(all="ignore"):
        share = np.where(count > 0, right["count"] / np.maximum(count, 1), 0.0)
        delta = (right["shift"] - left["shift"]) + (right["offset"] - left["offset"])
        offset = np.where(left["count"] > 0, left["offset"] + delta * share, right["offset"])
        # Where a mean is infinite the difference says nothing: the sum of both is what NumPy's mean is.
        both = left["offset"] + right["offset"]
        offset = np.where(np.isfinite(both), offset, both)
        m2 = left["m2"] + right["m2"] + np.where((share > 0) & (share < 1), delta * delta * left["count"] * share, 0.0)
    least = [part["min"] for part in (left, right) if part["min"] is not None]
    most = [part["max"] for part in (left, right) if part["max"] is not None]
    return {
        "count": count,
        "shift": shift,
        "offset": offset,
        "m2": m2,
        "nans": left["nans"] + right["nans"],
        "min": min(least) if least else None,
        "max": max(most) if most else None,
    }


def over_all_elements(closed: dict[str, Any]) -> dict[str, Any]:
    """The moments of all elements taken alike, as if a tensor's numbers were one long column."""
    count = closed["count"].sum(keepdims=True)
    shift = closed["shift"][np.argmax(closed["count"] > 0)][np.newaxis]
    with np.errstate(all="ignore"):
        difference = np.where(closed["count"] > 0, (closed["shift"] - shift) + closed["offset"], 0.0)
        offset = (closed["count"] * difference).sum(keepdims=True) / np.maximum(count, 1)
        m2 = closed["m2"].sum(keepdims=True) + (closed["count"] * (difference - offset) ** 2).sum(keepdims=True)
    return closed | {"count": count, "shift": shift, "offset": offset, "m2": m2}


def flatten_moments(closed: dict[str, Any]) -> dict[str, Any]:
    """Elements that are no longer told apart, because the rows' shapes differ."""
    return closed if len(closed["count"]) == 1 else over_all_elements(closed)


def to_json(closed: dict[str, Any]) -> dict[str, Any]:
    """Closed moments as JSON values, exactly: arrays as base64 of little-endian float64."""
    packed = {name: base64.b64encode(closed[name].astype("<f8").tobytes()).decode() for name in ARRAYS}
    return packed | {name: _number(closed[name]) for name in ("nans", "min", "max")}


def from_json(document: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `to_json`."""
    arrays = {name: np.frombuffer(base64.b64decode(document[name]), "<f8").astype(np.float64) for name in ARRAYS}
    return arrays | {
        name: float(value) if isinstance(value := document[name], str) else value for name in ("nans", "min", "max")
    }


def _number(value: Any) -> Any:
    """JSON has no infinities; as text they keep their meaning."""
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
