"""Conditions on rows, as Petastorm's readers take them: `predicate=in_set({"NYC"}, "city")`.

A predicate is asked in one of three ways. `do_include` takes one row as a dict, which is what a program's own
predicates are written for; with `make_batch_reader` it takes a pandas frame instead and returns a boolean series.
`do_include_columns` takes a row group as NumPy columns. A reader calls the last one if `works_on_columns`, or if it
hands out rows; for batches and a function of the user's it must make a frame.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import itertools
import sys
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from converter.petastorm.columns import moment_of

Columns = Mapping[str, npt.NDArray[Any]]
Mask = npt.NDArray[np.bool_]


class PredicateBase(metaclass=ABCMeta):
    """A condition on the values of some fields. Derive from it for one of your own.

    ```python
    from converter.petastorm.predicates import PredicateBase

    class IsLong(PredicateBase):
        def get_fields(self):
            return {"distance"}

        def do_include(self, values):
            return values["distance"] > 10
    ```
    """

    @abstractmethod
    def get_fields(self) -> Collection[str]:
        """The names of the fields that the condition needs."""

    @abstractmethod
    def do_include(self, values: Any) -> Any:
        """Whether a row, given as a dict, is to be read; of a pandas frame a boolean for each row."""

    @property
    def works_on_columns(self) -> bool:
        """Whether `do_include_columns` needs no call of the user's for each row."""
        return False

    def do_include_columns(self, columns: Columns) -> Mask:
        """Which rows are to be read, from columns with one value for each row."""
        names = list(columns)
        rows = zip(*columns.values(), strict=True)
        return np.array([bool(self.do_include(dict(zip(names, row, strict=True)))) for row in rows], np.bool_)

    def mask_of_parts(self, mask_of: Callable[[PredicateBase], Mask]) -> Mask | None:  # noqa: ARG002 (it has none)
        """Which rows are to be read, by the answers of the predicates that it is made of; None if there are none."""
        return None


class _FieldPredicate(PredicateBase):
    """A condition on the value of one field."""

    def __init__(self, field: str) -> None:
        self._predicate_field = field

    def get_fields(self) -> set[str]:
        """The name of the field."""
        return {self._predicate_field}

    def do_include(self, values: Any) -> Any:
        """Whether a row, given as a dict, is to be read; of a pandas frame a boolean series."""
        value = self._value_in(values)
        return _series_of(value, self._mask(value.to_numpy())) if _is_series(value) else self._includes(value)

    @property
    def works_on_columns(self) -> bool:
        """True, unless a derived class has a `do_include` of its own."""
        return type(self).do_include is _FieldPredicate.do_include

    def do_include_columns(self, columns: Columns) -> Mask:
        """Which rows are to be read."""
        if not self.works_on_columns:
            return super().do_include_columns(columns)
        return self._mask(self._value_in(columns))

    def _value_in(self, values: Any) -> Any:
        return values[self._predicate_field]

    @abstractmethod
    def _includes(self, value: Any) -> bool:
        """Whether a row with this value is to be read."""

    @abstractmethod
    def _mask(self, column: npt.NDArray[Any]) -> Mask:
        """`_includes` of each value."""


class in_set(_FieldPredicate):  # noqa: N801 (Petastorm's name)
    """Rows whose field has one of some values.

    >>> in_set({"NYC", "Oslo"}, "city").do_include({"city": "Oslo"})
    True
    """

    def __init__(self, inclusion_values: Iterable[Any], predicate_field: str) -> None:
        super().__init__(predicate_field)
        self._inclusion_values = set(inclusion_values)
        moments = map(_nanoseconds_of, self._inclusion_values)
        self._moments = {moment for moment in moments if moment is not None}
        """Dates and times among them: rows have them in other classes and units, which are never equal."""

    def _includes(self, value: Any) -> bool:
        if value in self._inclusion_values or (self._moments and _nanoseconds_of(value) in self._moments):
            return True
        # NaN and NaT are how columns hold a null.
        return (
            None in self._inclusion_values
            and isinstance(value, (float, np.floating, np.datetime64))
            and bool(np.isnan(value))
        )

    def _mask(self, column: npt.NDArray[Any]) -> Mask:
        if column.ndim == 1 and column.dtype.kind == "M" and np.datetime_data(column.dtype)[0] in _NANOSECONDS:
            return self._mask_of_times(column)
        if self._moments and column.ndim == 1 and column.dtype == object:
            return np.fromiter(map(self._includes, column), np.bool_, len(column))
        # Python's own numbers are equal to NumPy's and made faster; its times are not.
        values = column.tolist() if column.ndim == 1 and column.dtype.kind not in "mM" else column
        mask = np.fromiter(map(self._inclusion_values.__contains__, values), np.bool_, len(column))
        return mask | np.isnan(column) if column.dtype.kind == "f" and None in self._inclusion_values else mask

    def _mask_of_times(self, column: npt.NDArray[Any]) -> Mask:
        nanoseconds = _NANOSECONDS[np.datetime_data(column.dtype)[0]]
        wanted = [each // nanoseconds for each in self._moments if each % nanoseconds == 0]
        limits = np.iinfo(np.int64)
        wanted = [each for each in wanted if limits.min < each <= limits.max]
        mask = np.isin(column.view(np.int64), np.array(wanted, np.int64))
        return mask | np.isnat(column) if None in self._inclusion_values else mask


class in_intersection(_FieldPredicate):  # noqa: N801 (Petastorm's name)
    """Rows whose field, a list, has at least one of some values.

    >>> in_intersection([1, 2], "labels").do_include({"labels": np.array([2, 7])})
    True

    Raises:
        ValueError: when it is asked, the field holds no lists.
    """

    def __init__(self, inclusion_values: Iterable[Any], _predicate_field: str) -> None:
        super().__init__(_predicate_field)
        self._inclusion_values = list(inclusion_values)

    def _includes(self, value: Any) -> bool:
        if not isinstance(value, Iterable):
            raise ValueError(
                f"Predicate field should have iterable type; {self._predicate_field!r} has a {type(value).__name__}"
            )
        return bool(np.isin(np.asarray(value), self._inclusion_values).any())

    def _mask(self, column: npt.NDArray[Any]) -> Mask:
        if column.ndim == 1:
            return np.array([self._includes(value) for value in column], np.bool_)
        return np.asarray(np.isin(column, self._inclusion_values).reshape(len(column), -1).any(axis=1))


class in_pseudorandom_split(_FieldPredicate):  # noqa: N801 (Petastorm's name)
    """Rows of one of several parts, which the value of their field alone decides: in each run the same.

    The value's text is hashed to a number from 0 to 1, and part `i` has the numbers that lie in the `i`-th of the
    fractions. So shares are not exact, and rows of one value are never in two parts.

    >>> test = in_pseudorandom_split([0.8, 0.2], 1, "id")
    >>> [row for row in range(20) if test.do_include({"id": row})]
    [2, 7, 8, 9, 11, 17, 18]

    Args:
        fraction_list: the share of each part, from 0 to 1.
        subset_index: which part.
        predicate_field: the field whose values are hashed.

    Raises:
        ValueError: there is no such part; or, when it is asked, no such field.
    """

    def __init__(self, fraction_list: Sequence[float], subset_index: int, predicate_field: str) -> None:
        if subset_index >= len(fraction_list):
            raise ValueError(
                f"subset_index is out of range: there are {len(fraction_list)} fractions, and it is {subset_index}"
            )
        super().__init__(predicate_field)
        # Sums and products as Petastorm has them, to the last bit: they decide to which part a value belongs.
        borders = [sum(fraction_list[: number + 1]) for number in range(len(fraction_list))]
        self._bucket_low = (borders[subset_index - 1] if subset_index else 0) * (sys.maxsize - 1)
        self._bucket_high = borders[subset_index] * (sys.maxsize - 1)

    def _value_in(self, values: Any) -> Any:
        names = list(values.keys())
        if self._predicate_field not in names:
            raise ValueError(
                f"Tested values does not have split key: {self._predicate_field}; they have {', '.join(names)}"
            )
        return values[self._predicate_field]

    def _includes(self, value: Any) -> bool:
        return bool(self._bucket_low <= _string_to_bucket(_text_of(value), sys.maxsize) < self._bucket_high)

    def _mask(self, column: npt.NDArray[Any]) -> Mask:
        texts = list(map(_text_of, column))
        answers = {text: self._includes(text) for text in set(texts)}
        return np.fromiter(map(answers.__getitem__, texts), np.bool_, len(texts))


class in_lambda(PredicateBase):  # noqa: N801 (Petastorm's name)
    """Rows for which a function of the user's returns true.

    The function gets the fields' values in the order of `predicate_fields`, then `state_arg` unless that is None. With
    `make_batch_reader` the values are pandas series, and it returns a boolean series.

    >>> in_lambda(["speed"], lambda speed: speed > 3).do_include({"speed": 5})
    True

    Raises:
        ValueError: `predicate_fields` is no list.
    """

    def __init__(self, predicate_fields: list[str], predicate_func: Callable[..., Any], state_arg: Any = None) -> None:
        if not isinstance(predicate_fields, list):
            raise ValueError(f"Predicate fields should be a list, got a {type(predicate_fields).__name__}")
        self._predicate_fields = predicate_fields
        self._predicate_func = predicate_func
        self._state_arg = state_arg

    def get_fields(self) -> set[str]:
        """The names of the fields that the function gets."""
        return set(self._predicate_fields)

    def do_include(self, values: Any) -> Any:
        """What the function returns."""
        arguments = [values[field] for field in self._predicate_fields]
        if self._state_arg is not None:
            arguments.append(self._state_arg)
        return self._predicate_func(*arguments)


class _Combination(PredicateBase):
    """A condition on the answers of other predicates."""

    def __init__(self, predicates: Sequence[PredicateBase]) -> None:
        for predicate in predicates:
            if not isinstance(predicate, PredicateBase):
                raise ValueError(f"Predicate is nor derived from PredicateBase: {predicate!r}")
        self._predicates = list(predicates)

    def get_fields(self) -> set[str]:
        """The names of all fields that the predicates need."""
        return set(itertools.chain.from_iterable(predicate.get_fields() for predicate in self._predicates))

    def do_include(self, values: Any) -> Any:
        """Whether a row, given as a dict, is to be read; of a pandas frame a boolean series."""
        answers = [predicate.do_include(values) for predicate in self._predicates]
        series = next((answer for answer in answers if _is_series(answer)), None)
        if series is None:
            return self._combined(answers)
        return _series_of(series, self._combined_masks([np.asarray(answer, np.bool_) for answer in answers]))

    @property
    def works_on_columns(self) -> bool:
        """Whether all of the predicates do."""
        is_ours = type(self).do_include is _Combination.do_include
        return is_ours and all(predicate.works_on_columns for predicate in self._predicates)

    def do_include_columns(self, columns: Columns) -> Mask:
        """Which rows are to be read."""
        if type(self).do_include is not _Combination.do_include or not self._predicates:
            return super().do_include_columns(columns)
        return self._combined_masks([predicate.do_include_columns(columns) for predicate in self._predicates])

    def mask_of_parts(self, mask_of: Callable[[PredicateBase], Mask]) -> Mask | None:
        """Which rows are to be read, unless a derived class has a `do_include` of its own."""
        if type(self).do_include is not _Combination.do_include or not self._predicates:
            return None
        return self._combined_masks(list(map(mask_of, self._predicates)))

    @abstractmethod
    def _combined(self, answers: list[Any]) -> Any:
        """The answer for a row, by the predicates' answers."""

    @abstractmethod
    def _combined_masks(self, masks: list[Mask]) -> Mask:
        """`_combined` of each row."""


class in_negate(_Combination):  # noqa: N801 (Petastorm's name)
    """Rows that another predicate leaves out.

    Raises:
        ValueError: `predicate` is none.
    """

    def __init__(self, predicate: PredicateBase) -> None:
        super().__init__([predicate])

    def _combined(self, answers: list[Any]) -> bool:
        return not answers[0]

    def _combined_masks(self, masks: list[Mask]) -> Mask:
        return ~masks[0]


class in_reduce(_Combination):  # noqa: N801 (Petastorm's name)
    """Rows for which a function of other predicates' answers is true, such as `all` or `any`.

    >>> both = in_reduce([in_set({1}, "a"), in_set({2}, "b")], all)
    >>> both.do_include({"a": 1, "b": 3})
    False

    Args:
        predicate_list: the predicates.
        reduce_func: a function of the list of their answers.

    Raises:
        ValueError: one of the list is no predicate.
    """

    def __init__(self, predicate_list: Sequence[PredicateBase], reduce_func: Callable[[list[Any]], Any]) -> None:
        super().__init__(predicate_list)
        self._reduce_func = reduce_func

    def _combined(self, answers: list[Any]) -> Any:
        return self._reduce_func(answers)

    def _combined_masks(self, masks: list[Mask]) -> Mask:
        stacked = np.stack(masks)
        if self._reduce_func is all:
            return np.asarray(stacked.all(axis=0))
        if self._reduce_func is any:
            return np.asarray(stacked.any(axis=0))
        return np.array([bool(self._reduce_func(answers)) for answers in stacked.T.tolist()], np.bool_)


_NANOSECONDS = {"D": 86_400 * 10**9, "h": 3600 * 10**9, "m": 60 * 10**9, "s": 10**9, "ms": 10**6, "us": 1000, "ns": 1}


def _nanoseconds_of(value: Any) -> int | None:
    """A date or a time, of Python, NumPy or pandas, as nanoseconds since 1970, those of UTC; None if it is neither."""
    if isinstance(value, dt.date):
        value = moment_of(value)
    if not isinstance(value, np.datetime64) or np.isnat(value):
        return None
    unit = np.datetime_data(value.dtype)[0]
    if unit not in _NANOSECONDS:
        unit = "D" if unit in ("Y", "M", "W") else "ns"
    return int(value.astype(f"datetime64[{unit}]").astype(np.int64)) * _NANOSECONDS[unit]


def _string_to_bucket(string: str, bucket_num: int) -> int:
    # Not for secrecy: Petastorm's parts are the same as ours.
    return int(hashlib.md5(string.encode(), usedforsecurity=False).hexdigest(), 16) % bucket_num


def _text_of(value: Any) -> str:
    """A value as text, whatever other rows have: times in microseconds, or nanoseconds if it has some.

    Short floating numbers are as NumPy 1 wrote them: NumPy 2 has 1e+06 for 1000000.0.
    """
    if isinstance(value, np.datetime64) and np.datetime_data(value.dtype)[0] in ("s", "ms", "us", "ns"):
        in_microseconds = value.astype("datetime64[us]")
        # A year that microseconds do not reach is another one then.
        return str(in_microseconds if in_microseconds == value else value)
    if isinstance(value, (np.float16, np.float32)) and 1e-4 <= abs(float(value)) < 1e16:
        return np.format_float_positional(value, unique=True, trim="0")
    return str(value)


def _is_series(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "index")


def _series_of(series: Any, mask: Mask) -> Any:
    """A boolean series beside a pandas series."""
    return type(series)(mask, index=series.index)
