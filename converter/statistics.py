"""Statistics of each column, taken while it is written: nulls, range, mean, spread.

Moments are stored, and mean and spread are derived from them: so parts of a dataset can be merged exactly.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.errors import SourceError
from converter.portable import moments
from converter.schema import Field, Schema, checked, checked_count


class StatisticsByColumn(dict[str, "ColumnStatistics"]):
    """The statistics of all columns; the KeyError for an unknown name suggests the nearest one."""

    def __init__(
        self, statistics: Mapping[str, ColumnStatistics], unknown: Mapping[str, SourceError] | None = None
    ) -> None:
        super().__init__(statistics)
        self._unknown = unknown or {}
        """Why columns have none."""

    def __missing__(self, name: str) -> ColumnStatistics:
        if name in self._unknown:
            raise self._unknown[name]
        raise KeyError(Schema(tuple(column.field for column in self.values())).explain_missing(name))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnStatistics:
    """Exact statistics of one column over the whole dataset; nulls and NaNs are counted and left out.

    To normalise a tensor column:

        statistics = converter.statistics["image"]
        mean, std = statistics.element_mean, statistics.element_std      # Both have the tensor's shape.
        batch["image"] = (batch["image"] - mean) / np.maximum(std, 1e-6)

    >>> ColumnStatistics(field=Field(name="x", dtype="float32"), null_count=2)
    ColumnStatistics(null_count=2, nan_count=0)
    """

    field: Field
    """The column."""

    null_count: int
    """Rows that are null."""

    shortest: int | None = None
    longest: int | None = None
    """For arrays, the fewest and the most elements in a row that is not null."""

    row_group_span: float | None = None
    """For single numbers, the fraction of the column's range that a row group covers on average: near 1 if rows are
    mixed, near 0 if they are sorted by this column; None if unknown."""

    num_bytes: int | None = None
    """Bytes of the column in memory; None if unknown."""

    counts: npt.NDArray[np.int64] | None = None
    """For categories, how many rows have each of `field.categories`: what class weights are made of."""

    closed: Mapping[str, Any] | None = None
    """The moments as `portable.moments` closes them; None for strings and bytes."""

    @property
    def nan_count(self) -> int:
        """How many numbers are NaN, over all elements."""
        return 0 if self.closed is None else int(self.closed["nans"])

    @property
    def min(self) -> Any:
        """The smallest number; None if there is none.

        For dates a `date`, for times a `datetime` in UTC. Python's years are 1 to 9999: outside them it is the stored
        integer, days or microseconds since 1970.
        """
        return self._typed("min")

    @property
    def max(self) -> Any:
        """The largest number, like `min`."""
        return self._typed("max")

    @property
    def mean(self) -> float | None:
        """The mean of all numbers; None for dates, times, strings and bytes, and if there are no numbers."""
        whole = self._whole()
        with np.errstate(all="ignore"):
            return None if whole is None else float(moments.mean_of(dict(whole))[0])

    @property
    def std(self) -> float | None:
        """The standard deviation of all numbers, like `mean`; divides by their count, as NumPy does."""
        whole = self._whole()
        return None if whole is None else float(np.sqrt(whole["m2"][0] / whole["count"][0]))

    @property
    def element_mean(self) -> npt.NDArray[np.float64] | None:
        """The mean of each element, in the tensor's shape; None above 4,096 elements, or if shapes differ."""
        with np.errstate(all="ignore"):
            return None if self._elements is None else self._shaped(moments.mean_of(dict(self._elements)))

    @property
    def element_std(self) -> npt.NDArray[np.float64] | None:
        """The standard deviation of each element, like `element_mean`."""
        if self._elements is None:
            return None
        return self._shaped(np.sqrt(self._elements["m2"] / np.maximum(self._elements["count"], 1)))

    def _shaped(self, values: Any) -> npt.NDArray[np.float64]:
        shaped: npt.NDArray[np.float64] = values.reshape(self.field.shape)
        return shaped

    @property
    def _elements(self) -> Mapping[str, Any] | None:
        shape = self.field.shape
        if self.closed is None or not shape or len(self.closed["count"]) != int(np.prod(shape)):
            return None
        return self.closed

    def _whole(self) -> Mapping[str, Any] | None:
        if self.closed is None or self.field.dtype.startswith("datetime64"):
            return None
        whole = moments.over_all_elements(dict(self.closed))
        return whole if whole["count"][0] else None

    def _typed(self, name: str) -> Any:
        value = None if self.closed is None else self.closed[name]
        if value is None:
            return None
        if self.field.dtype == "bool":
            return bool(value)
        try:
            if self.field.dtype == "datetime64[D]":
                return dt.date(1970, 1, 1) + dt.timedelta(days=value)
            if self.field.dtype == "datetime64[us]":
                return dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(microseconds=value)
        except OverflowError:
            # Spark has years that Python has not.
            pass
        return value

    def __repr__(self) -> str:
        names = ("null_count", "nan_count", "min", "max", "mean", "std", "shortest", "longest")
        shown = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None]
        return f"ColumnStatistics({', '.join(shown)})"

    def to_json(self) -> dict[str, Any]:
        """These statistics as plain JSON values, without the field."""
        return {
            "null_count": self.null_count,
            "shortest": self.shortest,
            "longest": self.longest,
            "row_group_span": self.row_group_span,
            "num_bytes": self.num_bytes,
            "moments": None if self.closed is None else moments.to_json(dict(self.closed)),
        } | ({} if self.counts is None else {"counts": self.counts.tolist()})

    @classmethod
    def from_json(cls, field: Field, value: Mapping[str, Any]) -> ColumnStatistics:
        """Read statistics from the JSON values that `to_json` returned; every value is checked here.

        Raises:
            KeyError: a value is missing.
            TypeError: a value has another type than `to_json` gives it.
            ValueError: a value is impossible for this column, for example a negative count.
        """
        closed = None if value["moments"] is None else moments.from_json(value["moments"])
        if closed is not None:
            _check_moments(field, closed)
        counts = {
            name: None if value[name] is None else checked_count(value[name])
            for name in ("shortest", "longest", "num_bytes")
        }
        span = value["row_group_span"]
        if span is not None and not 0 <= checked(span, float) < np.inf:
            raise ValueError(f"column {field.name!r} has the row group span {span}")
        null_count = checked_count(value["null_count"])
        rows = None
        if "counts" in value:
            rows = np.array([checked_count(count) for count in checked(value["counts"], list)], np.int64)
        return cls(field=field, null_count=null_count, row_group_span=span, closed=closed, counts=rows, **counts)


def describe_column(field: Field, statistics: ColumnStatistics | None) -> dict[str, Any]:
    """A column, and its statistics if there are any, as values that JSON can hold.

    >>> describe_column(Field(name="image", dtype="float32", shape=(8, 8)), None)
    {'name': 'image', 'dtype': 'float32', 'shape': [8, 8], 'categories': None}
    """
    told: dict[str, Any] = {
        "name": field.name,
        "dtype": field.dtype,
        "shape": None if field.shape is None else list(field.shape),
        "categories": None if field.categories is None else len(field.categories),
    }
    if statistics is not None:
        bounds = {"min": statistics.min, "max": statistics.max, "mean": statistics.mean}
        told |= {"nulls": statistics.null_count, **{name: _for_json(value) for name, value in bounds.items()}}
    return told


def _for_json(value: Any) -> Any:
    """Dates, times and numbers that are not finite as texts."""
    if value is None or isinstance(value, (bool, int)):
        return value
    return value if isinstance(value, float) and np.isfinite(value) else str(value)


def _check_moments(field: Field, closed: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError unless these can be the moments of a column."""
    lengths = {len(closed[name]) for name in moments.ARRAYS}
    if len(lengths) > 1 or 0 in lengths:
        raise ValueError(f"the moments of column {field.name!r} do not agree in length")
    if field.is_object:
        raise ValueError(f"column {field.name!r} of {field.dtype} has moments")
    # Means and spreads may be NaN or infinite, as those of infinities are.
    if not ((closed["count"] >= 0) & (closed["count"] <= 2**62)).all() or (closed["m2"] < 0).any():
        raise ValueError(f"the moments of column {field.name!r} are none")
    checked_count(closed["nans"])
    least, most = closed["min"], closed["max"]
    if least is None and most is None:
        return
    dtype = field.stored_dtype
    if dtype.kind == "f":
        is_held = checked(least, float) <= checked(most, float)
    elif dtype.kind == "b":
        # Executors write 0 and 1; a NumPy array of booleans gives false and true.
        is_held = all(type(bound) in (bool, int) and bound in (0, 1) for bound in (least, most)) and least <= most
    else:
        limits = np.iinfo(dtype)
        is_held = limits.min <= checked(least, int) <= checked(most, int) <= limits.max
    if not is_held:
        raise ValueError(f"column {field.name!r} of {field.dtype} has values from {least} to {most}")
