"""Windows over time as Petastorm's readers hand them out: consecutive rows of one row group, by offset."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.petastorm.unischema import Unischema, UnischemaField, match_unischema_fields

Fields = Mapping[int, Sequence[UnischemaField | str]]


class NGram:
    """Consecutive rows, none further from the one before than `delta_threshold`, with the fields of each offset.

    The native form is `converter.sequences(length, by=…, order_by=…, max_gap=…)`, whose windows cross row groups.

    ```python
    from converter.petastorm.ngram import NGram

    ngram = NGram({-1: ["id", "speed"], 0: ["id"]}, delta_threshold=5, timestamp_field="id")
    print(ngram.length)
    ```

    Args:
        fields: for each offset the fields, or regular expressions of their names.
        delta_threshold: the largest difference between the times of two rows that follow one another; a plain number
            counts days of dates and microseconds of times.
        timestamp_field: the field that holds the time, or its name.
        timestamp_overlap: whether a row may be in several windows.

    Raises:
        ValueError: an argument has another type.
    """

    def __init__(
        self,
        fields: Fields,
        delta_threshold: Any,
        timestamp_field: UnischemaField | str,
        timestamp_overlap: bool = True,
    ) -> None:
        if not isinstance(fields, dict):
            raise ValueError("Fields must be set and must be a dictionary.")
        for at_offset in fields.values():
            if not isinstance(at_offset, list):
                raise ValueError("Each field value must be a list of unischema fields/regular expression(s)")
            if not all(isinstance(each, (UnischemaField, str)) for each in at_offset):
                raise ValueError("All field values must be of type UnischemaField/regular expression")
        if not isinstance(delta_threshold, numbers.Number):
            raise ValueError("delta_threshold must be a number.")
        if not isinstance(timestamp_field, (UnischemaField, str)):
            raise ValueError("timestamp_field must be set and must be of type UnischemaField or regular expression")
        if not isinstance(timestamp_overlap, bool):
            raise ValueError("timestamp_overlap must be set and must be of type bool")
        self._fields: dict[int, list[Any]] = dict(fields)
        self._delta_threshold = delta_threshold
        self._timestamp_field: Any = timestamp_field
        self.timestamp_overlap = timestamp_overlap

    @property
    def length(self) -> int:
        """Rows of a window, from the least offset to the greatest."""
        return max(self._fields) - min(self._fields) + 1

    @property
    def fields(self) -> dict[int, list[Any]]:
        """The fields of each offset."""
        return self._fields

    @property
    def delta_threshold(self) -> Any:
        """The largest difference between the times of two rows that follow one another."""
        return self._delta_threshold

    @property
    def timestamp_name(self) -> str:
        """The name of the field that holds the time."""
        field = self._timestamp_field
        return field if isinstance(field, str) else str(field.name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NGram) or self.fields.keys() != other.fields.keys():
            return False
        return all(set(fields) == set(other.fields[offset]) for offset, fields in self.fields.items())

    __hash__ = None  # type: ignore[assignment]

    def resolve_regex_field_names(self, schema: Unischema) -> None:
        """Replace regular expressions by the fields of `schema` that they match.

        Raises:
            ValueError: the time's expression matches several fields, or none.
        """
        self._fields = {offset: self.convert_fields(schema, fields) for offset, fields in self._fields.items()}
        matched = self.convert_fields(schema, [self._timestamp_field])
        if len(matched) != 1:
            raise ValueError(
                "timestamp_field was matched to more than one unischema field"
                if matched
                else f"timestamp_field {self._timestamp_field!r} matches no field of the schema."
            )
        self._timestamp_field = matched[0]

    def convert_fields(self, unischema: Unischema, field_list: Sequence[UnischemaField | str]) -> list[UnischemaField]:
        """The fields of a list in which some are given by regular expressions."""
        patterns = [each for each in field_list if isinstance(each, str)]
        fields = [each for each in field_list if isinstance(each, tuple)]
        if len(fields) + len(patterns) != len(field_list):
            raise ValueError(
                '"Elements of fields"/"timestamp field" must be either a string (regular expressions) or an instance '
                "of UnischemaField class."
            )
        return fields + match_unischema_fields(unischema, patterns)

    def get_field_names_at_timestep(self, timestep: int) -> list[str]:
        """The names of the fields at an offset."""
        return [field.name for field in self._fields.get(timestep, [])]

    def get_field_names_at_all_timesteps(self) -> list[Any]:
        """The fields that at least one offset has."""
        return list(dict.fromkeys(field for fields in self._fields.values() for field in fields))

    def get_schema_at_timestep(self, schema: Unischema, timestep: int) -> Unischema:
        """The part of `schema` that an offset has."""
        names = self.get_field_names_at_timestep(timestep)
        return schema.create_schema_view([field for name, field in schema.fields.items() if name in names])

    def starts(self, times: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The first row of each window, by the rows' times in order.

        Raises:
            NotImplementedError: the times are not sorted.
        """
        length, count = self.length, len(times)
        if count < length:
            return np.zeros(0, np.int64)
        falls: Any
        if times.dtype.kind in "iub":
            # Differences of whole numbers that are sorted fit into 64 bits, if not into their own dtype.
            falls = (times[1:] < times[:-1]).any()
            wide = times if times.dtype == np.uint64 else times.astype(np.int64).view(np.uint64)
            gaps = wide[1:] - wide[:-1]
        else:
            gaps = times[1:] - times[:-1]
            falls = _falls(gaps)
        if length > 1 and falls:
            raise NotImplementedError(
                f"NGram assumes that the data is sorted by {self.timestamp_name} field which is not the case"
            )
        is_wide = np.asarray(gaps > self._threshold_for(gaps), np.bool_)
        wide_before = np.concatenate(([0], np.cumsum(is_wide)))
        starts = np.flatnonzero(wide_before[length - 1 :] == wide_before[: count - length + 1])
        return starts if self.timestamp_overlap else self._without_overlap(starts, times)

    def _threshold_for(self, gaps: npt.NDArray[Any]) -> Any:
        """The threshold as the gaps are counted: of dates in days, of times in microseconds, as Petastorm's were."""
        threshold: Any = self._delta_threshold
        if gaps.dtype.kind != "m" or isinstance(threshold, np.timedelta64):
            return threshold
        unit = np.datetime_data(gaps.dtype)[0]
        most = np.iinfo(np.int64).max
        # NumPy's numbers would wrap around, and 1.001 is meant as it is written.
        threshold = threshold.item() if isinstance(threshold, np.generic) else threshold
        if isinstance(threshold, float):
            threshold = Fraction(repr(threshold)) if math.isfinite(threshold) else (-1 if threshold < 0 else most)
        # Gaps are whole numbers: one above the threshold is above its floor. No gap is longer than 64 bits hold.
        whole = math.floor(threshold * 1000 if unit == "ns" else threshold)
        return np.timedelta64(max(-1, min(whole, most)), unit)  # type: ignore[call-overload]

    def _without_overlap(self, starts: npt.NDArray[np.int64], times: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        if self.length == 1:
            # Times need not be sorted: a row is kept if it is later than those that were kept before.
            latest: Any = np.maximum.accumulate(times)
            return starts[np.concatenate(([True], np.asarray(times[1:] > latest[:-1], np.bool_)))]
        kept: list[int] = []
        at, length = 0, self.length
        while at < len(starts):
            start = int(starts[at])
            kept.append(start)
            # The next one begins after this one's last time; equal times belong to this one.
            after = int(np.searchsorted(times, times[start + length - 1], side="right"))
            at = int(np.searchsorted(starts, max(after, start + 1)))
        return np.array(kept, np.int64)

    def form_ngram(self, data: Sequence[Mapping[str, Any]], schema: Unischema) -> list[dict[int, dict[str, Any]]]:  # noqa: ARG002 (Petastorm's signature)
        """The windows of rows given as dicts, each as `{offset: {name: value}}`."""
        times = np.array([row[self.timestamp_name] for row in data])
        base = min(self._fields)
        names = {base + step: self.get_field_names_at_timestep(base + step) for step in range(self.length)}
        return [
            {
                offset: {name: value for name, value in data[start + offset - base].items() if name in wanted}
                for offset, wanted in names.items()
            }
            for start in self.starts(times).tolist()
        ]

    def make_namedtuple(self, schema: Unischema, ngram_as_dicts: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        """A window of dicts as a window of namedtuples."""
        return {
            offset: self.get_schema_at_timestep(schema, offset).make_namedtuple(**row)
            for offset, row in ngram_as_dicts.items()
        }


def _falls(gaps: npt.NDArray[Any]) -> bool:
    """Whether a difference is below zero."""
    if gaps.dtype == object:
        # Decimals and dates.
        return any(gap < type(gap)(0) for gap in gaps)
    return bool((gaps < gaps.dtype.type(0)).any())
