"""Windows of `NGram`: the same as those that a few lines of Python find, one by one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.petastorm.ngram import NGram
from converter.petastorm.unischema import Unischema, UnischemaField

SCHEMA = Unischema("Drive", [UnischemaField("id", np.int64, ()), UnischemaField("speed", np.float32, ())])


def ngram_of(length: int, threshold: Any, *, overlap: bool = True) -> NGram:
    ngram = NGram({offset: ["id"] for offset in range(length)}, threshold, "id", overlap)
    ngram.resolve_regex_field_names(SCHEMA)
    return ngram


def windows_one_by_one(times: list[int], length: int, threshold: int, *, overlap: bool) -> list[int]:
    found: list[int] = []
    last: int | None = None
    for start in range(len(times) - length + 1):
        window = times[start : start + length]
        if not overlap and last is not None and window[0] <= last:
            continue
        if all(after - before <= threshold for before, after in itertools.pairwise(window)):
            found.append(start)
            last = window[-1]
    return found


@given(
    gaps=st.lists(st.integers(0, 6), max_size=60),
    length=st.integers(1, 5),
    threshold=st.integers(0, 6),
    overlap=st.booleans(),
)
def test_windows_are_those_found_one_by_one(gaps: list[int], length: int, threshold: int, overlap: bool) -> None:
    times = np.cumsum([5, *gaps])
    found = ngram_of(length, threshold, overlap=overlap).starts(times)
    assert found.tolist() == windows_one_by_one(times.tolist(), length, threshold, overlap=overlap)


def test_the_windows_of_unsigned_times_and_of_moments_are_those_of_plain_numbers() -> None:
    times = np.array([0, 3, 8, 10, 11, 20, 23])
    expected = ngram_of(2, 4).starts(times).tolist()
    assert expected == [0, 2, 3, 5]
    assert ngram_of(2, 4).starts(times.astype(np.uint8)).tolist() == expected
    moments = np.datetime64("2026-01-01", "s") + times
    assert ngram_of(2, 4).starts(moments).tolist() == expected
    assert ngram_of(2, np.timedelta64(4, "s")).starts(moments).tolist() == expected


@given(times=st.lists(st.integers(0, 9), min_size=1))
@pytest.mark.parametrize("dtype", [np.int64, "M8[s]", object])
def test_single_rows_without_overlap_need_not_be_sorted(times: list[int], dtype: Any) -> None:
    kept: list[int] = []
    for number, time in enumerate(times):
        if not kept or time > times[kept[-1]]:
            kept.append(number)
    assert ngram_of(1, 4, overlap=False).starts(np.array(times).astype(dtype)).tolist() == kept


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, object])
def test_times_that_fall_are_refused_by_the_name_of_their_field(dtype: Any) -> None:
    with pytest.raises(NotImplementedError, match="sorted by id field"):
        ngram_of(2, 4).starts(np.array([1, 2, 1], dtype))


def test_a_window_has_an_element_for_each_offset_and_only_its_fields() -> None:
    ngram = NGram({-1: ["id", "sp.*"], 1: [SCHEMA.id]}, 10, "id")
    ngram.resolve_regex_field_names(SCHEMA)
    rows = [{"id": number, "speed": number / 2} for number in range(4)]
    assert ngram.length == 3
    assert ngram.form_ngram(rows, SCHEMA) == [
        {-1: {"id": 0, "speed": 0.0}, 0: {}, 1: {"id": 2}},
        {-1: {"id": 1, "speed": 0.5}, 0: {}, 1: {"id": 3}},
    ]
    window = ngram.make_namedtuple(SCHEMA, ngram.form_ngram(rows, SCHEMA)[0])
    assert window[-1].speed == 0.0
    assert window[0] == ()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((None, 1, "id"), "must be a dictionary"),
        (({0: "id"}, 1, "id"), "must be a list"),
        (({0: [1]}, 1, "id"), "UnischemaField/regular expression"),
        (({0: ["id"]}, None, "id"), "delta_threshold must be a number"),
        (({0: ["id"]}, 1, None), "timestamp_field must be set"),
        (({0: ["id"]}, 1, "id", None), "timestamp_overlap must be set"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        NGram(*arguments)


def test_a_time_that_several_fields_match_is_refused() -> None:
    with pytest.raises(ValueError, match="more than one"):
        NGram({0: ["id"]}, 1, ".*").resolve_regex_field_names(SCHEMA)


def test_windows_are_equal_if_their_fields_are() -> None:
    assert ngram_of(2, 1) == ngram_of(2, 5)
    assert ngram_of(2, 1) != ngram_of(3, 1)


@pytest.mark.parametrize("unit", ["us", "ns"])
@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(1.2, [0, 3]), (2.5, [0, 1, 3]), (0.4, []), (float("inf"), [0, 1, 2, 3]), (float("-inf"), []), (-0.5, [])],
)
def test_a_threshold_of_times_need_not_be_whole(unit: str, threshold: float, expected: list[int]) -> None:
    # Gaps of 1, 2, 3 and 1 microseconds.
    times = np.array([0, 1, 3, 6, 7], "M8[us]").astype(f"M8[{unit}]")
    assert ngram_of(2, threshold).starts(times).tolist() == expected


def test_a_part_of_a_microsecond_counts_where_times_have_nanoseconds() -> None:
    times = np.array([0, 1200, 2400, 4000], "M8[ns]")
    assert ngram_of(2, 1.5).starts(times).tolist() == [0, 1]
    assert ngram_of(2, 1.001).starts(np.array([0, 1001, 2003], "M8[ns]")).tolist() == [0]


@pytest.mark.parametrize(
    "threshold",
    [
        np.int8(100),
        np.int16(100),
        np.int32(3_000_000),
        np.uint32(4_294_968),
        np.int64(2**62),
        np.float16(100),
        np.float32(9),
    ],
)
def test_a_threshold_may_be_any_of_numpys_numbers(threshold: Any) -> None:
    times = np.array([0, 5_000, 3_600_000_005_000], "M8[ns]")
    assert ngram_of(2, threshold).starts(times).tolist() == ([0, 1] if int(threshold) > 3_600_000_000 else [0])


@pytest.mark.parametrize("finer", [0, 1])
def test_a_threshold_of_times_counts_microseconds_whatever_their_unit(finer: int) -> None:
    times = np.array([0, 1_000_000, 2_000_000 + finer, 9_000_000], "M8[ns]")
    assert ngram_of(2, 1500).starts(times).tolist() == [0, 1]
    assert ngram_of(2, 1500).starts(times.astype("M8[us]")).tolist() == [0, 1]
    assert ngram_of(2, 10**17).starts(times).tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint64"])
def test_times_that_are_further_apart_than_their_dtype_reaches_are_sorted(dtype: str) -> None:
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    times = np.array([least, least + 1, most - 1, most], dtype)
    assert ngram_of(2, 4).starts(times).tolist() == [0, 2]
    with pytest.raises(NotImplementedError, match="sorted by"):
        ngram_of(2, 4).starts(times[::-1])
