"""Moments of a column's numbers: count, minimum, maximum, mean, spread; merged exactly across tasks.

Sums are taken in float64 of differences to a shift near the mean, block by block while the block is in the processor's
cache. So they cost a fraction of writing the column, and keep their digits if the mean is large against the spread.
Two parts are merged by Chan, Golub and LeVeque's formula, which is exact up to rounding.

NaNs are counted and left out. Infinities are numbers and spoil what they touch, as they do in NumPy.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from converter.portable.records import ClosedMoments, Numbers, OpenMoments, Scratch

MAX_ELEMENTS = 4096
"""Tensors up to this many elements have a mean and a spread for each element."""

ARRAYS = ("count", "shift", "offset", "m2")
"""What closed moments hold for each element."""

_BLOCK_NUMBERS = 1 << 16
"""How many numbers are summed at once: 0.9 ns each in blocks of 32 k to 128 k of them, 1.5 ns in blocks of 8 k."""


def new_moments(num_elements: int) -> OpenMoments:
    """Moments of nothing, for rows of `num_elements` numbers each (1: a scalar, or numbers taken all alike)."""
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


def new_scratch() -> Scratch:
    """Memory for `add_values` to work in, again and again: fresh memory would cost more than the sums."""
    return {"numbers": np.empty(_BLOCK_NUMBERS), "ones": np.ones(_BLOCK_NUMBERS)}


def add_values(moments: OpenMoments, values: Numbers, scratch: Scratch) -> None:
    """Count in numbers of shape `(rows, num_elements)`, none of them null."""
    if values.size:
        # Infinities make NaNs of sums, as they do in NumPy, without a warning here.
        with np.errstate(invalid="ignore", over="ignore"):
            _add_blocks(moments, values, scratch)


def _add_blocks(moments: OpenMoments, values: Numbers, scratch: Scratch) -> None:
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
            # Rare: find the NaNs, and take them out.
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


def _choose_shift(moments: OpenMoments, block: Numbers) -> None:
    """Let the shift of each element be the mean of its first finite numbers; elements that have one keep it."""
    usable = np.isfinite(block)
    near = np.where(usable, block, 0.0).sum(axis=0, dtype=np.float64) / np.maximum(usable.sum(axis=0), 1)
    moments["shift"] = np.where(moments["has_shift"], moments["shift"], near)
    moments["has_shift"] = moments["has_shift"] | usable.any(axis=0) | (moments["count"] > 0)


def _add_extremes(moments: OpenMoments, values: Numbers) -> None:
    least, most = values.min(), values.max()
    if values.dtype.kind == "f" and np.isnan(least):
        present = values[~np.isnan(values)]
        if not present.size:
            return
        least, most = present.min(), present.max()
    moments["min"] = least.item() if moments["min"] is None else min(moments["min"], least.item())
    moments["max"] = most.item() if moments["max"] is None else max(moments["max"], most.item())


def close_moments(moments: OpenMoments) -> ClosedMoments:
    """Sums become means and squared deviations, which can be merged.

    `shift` and `offset` stay apart: the sum of numbers near 1e15 that differ by hundreds would lose the digits that a
    merge needs.
    """
    count, first = moments["count"], moments["first"]
    with np.errstate(all="ignore"):
        offset = np.where(count > 0, first / np.maximum(count, 1), 0.0)
        m2 = np.maximum(moments["second"] - first * offset, 0.0)
    m2 = np.where(np.isfinite(moments["second"]), m2, np.nan)
    shift = np.where(count > 0, moments["shift"], 0.0)
    return {
        "count": count, "shift": shift, "offset": offset, "m2": m2,
        "nans": moments["nans"], "min": moments["min"], "max": moments["max"],
    }  # fmt: skip


def mean_of(closed: Mapping[str, Any]) -> Numbers:
    """The mean of each element; 0 where there are no numbers."""
    mean: Numbers = closed["shift"] + closed["offset"]
    return mean


def merge_moments(left: ClosedMoments, right: ClosedMoments) -> ClosedMoments:
    """Two closed parts as one."""
    count = left["count"] + right["count"]
    shift = np.where(left["count"] > 0, left["shift"], right["shift"])
    with np.errstate(all="ignore"):
        share = np.where(count > 0, right["count"] / np.maximum(count, 1), 0.0)
        delta = (right["shift"] - left["shift"]) + (right["offset"] - left["offset"])
        offset = np.where(left["count"] > 0, left["offset"] + delta * share, right["offset"])
        # If a mean is infinite the difference is useless: the sum of both equals NumPy's mean.
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


def over_all_elements(closed: Mapping[str, Any]) -> ClosedMoments:
    """The moments of all elements taken alike, as if a tensor's numbers were one long column."""
    count = closed["count"].sum(keepdims=True)
    shift = closed["shift"][np.argmax(closed["count"] > 0)][np.newaxis]
    with np.errstate(all="ignore"):
        difference = np.where(closed["count"] > 0, (closed["shift"] - shift) + closed["offset"], 0.0)
        offset = (closed["count"] * difference).sum(keepdims=True) / np.maximum(count, 1)
        m2 = closed["m2"].sum(keepdims=True) + (closed["count"] * (difference - offset) ** 2).sum(keepdims=True)
    return {
        "count": count, "shift": shift, "offset": offset, "m2": m2,
        "nans": closed["nans"], "min": closed["min"], "max": closed["max"],
    }  # fmt: skip


def flatten_moments(closed: ClosedMoments) -> ClosedMoments:
    """The moments of all elements as one, because the rows' shapes differ."""
    return closed if len(closed["count"]) == 1 else over_all_elements(closed)


def to_json(closed: Mapping[str, Any]) -> dict[str, Any]:
    """Closed moments as JSON values, exactly: arrays as base64 of little-endian float64."""
    return {name: _packed(value) for name, value in closed.items()}


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return base64.b64encode(value.astype("<f8").tobytes()).decode()
    # JSON has no infinities; as text they keep their meaning.
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value


def from_json(document: dict[str, Any]) -> ClosedMoments:
    """The inverse of `to_json`."""
    count, shift, offset, m2 = (
        np.frombuffer(base64.b64decode(document[name]), "<f8").astype(np.float64) for name in ARRAYS
    )
    least, most = (float(value) if isinstance(value := document[name], str) else value for name in ("min", "max"))
    return {
        "count": count, "shift": shift, "offset": offset, "m2": m2,
        "nans": document["nans"], "min": least, "max": most,
    }  # fmt: skip
