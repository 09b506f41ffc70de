"""A predicate answers alike for a row, for columns and for a frame, and splits rows as Petastorm did."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pandas as pd
import pytest

from converter.petastorm.columns import to_objects
from converter.petastorm.predicates import (
    PredicateBase,
    in_intersection,
    in_lambda,
    in_negate,
    in_pseudorandom_split,
    in_reduce,
    in_set,
)

ROWS = 40
COLUMNS = {
    "whole": np.arange(ROWS, dtype=np.int32),
    "share": np.linspace(-1e7, 1e7, ROWS).astype(np.float32),
    "text": to_objects(np.str_(f"a{number % 7}") for number in range(ROWS)),
    "fixed": np.array([f"a{number % 5}" for number in range(ROWS)]),
    "time": np.arange(ROWS).astype("datetime64[us]"),
    "maybe": to_objects(None if number % 3 else "x" for number in range(ROWS)),
    "matrix": np.arange(3 * ROWS).reshape(ROWS, 3) % 8,
    "lists": to_objects(np.arange(number % 4) for number in range(ROWS)),
}


class IsOdd(PredicateBase):
    """A predicate of the user's."""

    def get_fields(self) -> set[str]:
        return {"whole"}

    def do_include(self, values: Any) -> Any:
        return values["whole"] % 2 == 1


class NotInSet(in_set):
    """One of ours with an answer of the user's."""

    def do_include(self, values: Any) -> Any:
        return not super().do_include(values)


SIMPLE = [
    in_set({1, 5.0, np.int64(7), "a"}, "whole"),
    in_set([0.5, 1e7], "share"),
    in_set({"a1", "a3"}, "text"),
    in_set({"a1"}, "fixed"),
    in_set({np.datetime64(5, "us")}, "time"),
    in_set({None}, "maybe"),
    in_set([], "whole"),
    in_intersection([2, 7], "matrix"),
    in_intersection([2, 7], "lists"),
    *(in_pseudorandom_split([0.3, 0.4, 0.3], 1, name) for name in ("whole", "share", "text", "fixed", "time", "maybe")),
]
PREDICATES = [
    *SIMPLE,
    *(in_negate(predicate) for predicate in SIMPLE),
    in_reduce([SIMPLE[0], SIMPLE[2]], any),
    in_reduce([SIMPLE[2], SIMPLE[3]], all),
    in_reduce([SIMPLE[0], SIMPLE[2], SIMPLE[3]], lambda answers: sum(answers) == 2),
    in_lambda(["whole", "share"], lambda whole, share: (whole > 10) & (share < 1e6)),
    in_reduce([in_lambda(["whole"], lambda whole: whole > 3), in_negate(SIMPLE[2])], all),
    IsOdd(),
    in_negate(IsOdd()),
]


DAYS = to_objects([dt.date(2020, 1, 1), None, dt.date(2020, 1, 2), dt.date(9999, 12, 31)])


def test_a_set_with_none_has_nulls_as_columns_hold_them() -> None:
    for column in (
        np.array([1, np.nan]),
        np.array([1, np.nan], "f4"),
        to_objects([1, None]),
        np.array([1, "NaT"], "M8[ns]"),
    ):
        assert in_set({None}, "x").do_include_columns({"x": column}).tolist() == [False, True]
        assert [in_set({None}, "x").do_include({"x": value}) for value in column] == [False, True]
        assert not in_set({7}, "x").do_include_columns({"x": column}).any()


@pytest.mark.parametrize(
    "column",
    [
        DAYS,
        DAYS.astype("M8[D]"),
        DAYS.astype("M8[us]"),
        DAYS[:3].astype("M8[ns]"),
        to_objects([None if day is None else np.datetime64(day) for day in DAYS]),
        to_objects([pd.Timestamp("2020-01-01"), None, pd.Timestamp("2020-01-02")]),
    ],
    ids=["dates", "days", "microseconds", "nanoseconds", "objects", "pandas"],
)
@pytest.mark.parametrize(
    "value",
    [
        dt.date(2020, 1, 2),
        np.datetime64("2020-01-02"),
        np.datetime64("2020-01-02", "ns"),
        pd.Timestamp("2020-01-02"),
        dt.datetime(2020, 1, 2, 2, tzinfo=dt.timezone(dt.timedelta(hours=2))),
    ],
)
def test_a_set_has_dates_and_times_in_whatever_class(column: Any, value: Any) -> None:
    predicate = in_set({value, dt.date(1960, 1, 1)}, "at")
    assert predicate.do_include_columns({"at": column}).tolist() == [False, False, True, False][: len(column)]
    assert [predicate.do_include({"at": each}) for each in column] == [False, False, True, False][: len(column)]
    with_null = in_set({value, None}, "at").do_include_columns({"at": column})
    assert with_null.tolist() == [False, True, True, False][: len(column)]
    later = in_set({np.datetime64("2020-01-02T00:00:00.000000001")}, "at")
    assert not later.do_include_columns({"at": column}).any()


def by_row(predicate: PredicateBase) -> list[bool]:
    rows = [{name: column[number] for name, column in COLUMNS.items()} for number in range(ROWS)]
    return [bool(predicate.do_include(row)) for row in rows]


@pytest.mark.parametrize("predicate", PREDICATES)
def test_columns_are_answered_as_their_rows(predicate: PredicateBase) -> None:
    mask = predicate.do_include_columns({name: COLUMNS[name] for name in predicate.get_fields()})
    assert mask.dtype == np.bool_
    assert mask.tolist() == by_row(predicate)


@pytest.mark.parametrize("predicate", PREDICATES)
def test_a_frame_is_answered_as_its_rows(predicate: PredicateBase) -> None:
    frame = pd.DataFrame({name: list(column) if column.ndim > 1 else column for name, column in COLUMNS.items()})
    frame.index = frame.index[::-1]
    answer = predicate.do_include(frame)
    assert isinstance(answer, pd.Series)
    assert answer.index.equals(frame.index)
    assert answer.tolist() == by_row(predicate)


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_a_time_is_in_one_part_whatever_other_rows_have(unit: str) -> None:
    first = in_pseudorandom_split([0.5, 0.5], 0, "time")
    times = np.arange(ROWS).astype("M8[ms]")
    expected = [first.do_include({"time": time}) for time in times.astype("M8[us]")]
    assert len(set(expected)) == 2
    assert first.do_include_columns({"time": times.astype(f"M8[{unit}]")}).tolist() == expected
    assert (
        first.do_include_columns({"time": np.append(times.astype("M8[ns]"), np.datetime64(1, "ns"))}).tolist()[:ROWS]
        == expected
    )


def test_predicates_know_whether_they_work_on_columns() -> None:
    assert all(predicate.works_on_columns for predicate in SIMPLE)
    assert in_reduce(SIMPLE[:2], sum).works_on_columns
    for predicate in (
        IsOdd(),
        in_negate(IsOdd()),
        in_reduce([SIMPLE[0], IsOdd()], all),
        in_lambda(["whole"], bool),
        NotInSet([1], "whole"),
    ):
        assert not predicate.works_on_columns


def test_the_answer_of_a_derived_predicate_is_used_for_columns_too() -> None:
    assert NotInSet([0, 1], "whole").do_include_columns({"whole": np.arange(3)}).tolist() == [False, False, True]


def test_columns_without_rows_have_no_answers() -> None:
    for predicate in (SIMPLE[0], SIMPLE[9], in_negate(SIMPLE[0]), in_reduce(SIMPLE[:1], max), IsOdd()):
        assert predicate.do_include_columns({"whole": np.zeros(0, np.int32)}).tolist() == []


def test_a_reduction_of_nothing_is_what_its_function_says() -> None:
    assert in_reduce([], all).do_include({}) is True
    assert in_reduce([], any).do_include_columns({"whole": np.arange(2)}).tolist() == [False, False]


# What Petastorm 0.13 answered under NumPy 1.26, for the second of the fractions 0.3, 0.4, 0.3.
SPLIT: list[tuple[Any, bool]] = [
    ("guid_0", True),
    ("guid_1", False),
    ("é中", False),
    ("", False),
    (7, False),
    (np.int64(7), False),
    (np.uint8(200), False),
    (True, False),
    (None, True),
    (0.1, True),
    (1e16, False),
    (-0.0, False),
    (np.float64(1 / 3), True),
    (np.float32(1e6), True),
    (np.float32(16777216), False),
    (np.float16(1e4), False),
    (np.float32(1e-5), False),
    (b"ab\xff", True),
    (np.bytes_(b"abc"), True),
    (dt.date(2020, 1, 1), True),
    (np.datetime64("2020-01-01T01:02:03.456789"), True),
]


@pytest.mark.parametrize(("value", "is_in_part"), SPLIT)
def test_a_value_is_in_the_part_that_petastorm_chose(value: Any, is_in_part: bool) -> None:
    predicate = in_pseudorandom_split([0.3, 0.4, 0.3], 1, "x")
    assert predicate.do_include({"x": value}) is is_in_part
    assert predicate.do_include_columns({"x": to_objects([value])}).tolist() == [is_in_part]


def test_parts_are_disjoint_complete_and_of_about_their_fractions() -> None:
    ids = np.arange(20_000)
    masks = [in_pseudorandom_split([0.5, 0.2, 0.3], part, "id").do_include_columns({"id": ids}) for part in range(3)]
    assert (np.sum(masks, axis=0) == 1).all()
    np.testing.assert_allclose(np.mean(masks, axis=1), [0.5, 0.2, 0.3], rtol=0.05)


def test_a_function_gets_values_in_order_and_a_state_unless_it_is_none() -> None:
    def echo(*arguments: Any) -> Any:
        return arguments

    assert in_lambda(["b", "a"], echo).do_include({"a": 1, "b": 2}) == (2, 1)
    assert in_lambda(["a"], echo, 0).do_include({"a": 1}) == (1, 0)
    assert in_lambda(["b", "a"], echo).get_fields() == {"a", "b"}


def test_combinations_need_all_fields_of_their_parts() -> None:
    assert in_reduce([in_set([1], "a"), in_negate(in_set([1], "b"))], all).get_fields() == {"a", "b"}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: in_lambda("field", print), "Predicate fields should be a list"),
        (lambda: in_negate(print), "Predicate is nor derived from PredicateBase"),
        (lambda: in_reduce([SIMPLE[0], print], all), "Predicate is nor derived from PredicateBase"),
        (lambda: in_pseudorandom_split([0.5, 0.5], 2, "x"), "subset_index is out of range"),
        (lambda: in_pseudorandom_split([0.5], 0, "x").do_include({"y": 1}), "does not have split key: x"),
        (lambda: in_pseudorandom_split([0.5], 0, "x").do_include_columns({"y": ROWS}), "does not have split key: x"),
        (lambda: in_intersection([1], "x").do_include({"x": 3}), "should have iterable type"),
        (lambda: in_intersection([1], "x").do_include_columns({"x": np.arange(3)}), "should have iterable type"),
    ],
)
def test_what_is_no_predicate_is_refused(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
