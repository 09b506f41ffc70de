"""What a column's numbers are like: any split into parts, merged in any order, is NumPy's answer on the whole."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.portable.moments import (
    ARRAYS,
    MAX_ELEMENTS,
    add_values,
    close_moments,
    flatten_moments,
    from_json,
    mean_of,
    merge_moments,
    new_moments,
    new_scratch,
    over_all_elements,
    to_json,
)
from tests.properties import examples

Array = np.ndarray[Any, Any]

INTEGERS = ("int8", "int16", "int32", "int64")
MANY_ROWS = 40_000  # More than a block, which is 32,768 numbers.


def closed_of(values: Array) -> dict[str, Any]:
    opened = new_moments(values.shape[1])
    add_values(opened, values, new_scratch())
    return close_moments(opened)


def merged(values: Array, cuts: list[int], order: list[int]) -> dict[str, Any]:
    """The moments of the parts between `cuts`, each one counted in by itself, merged in this order."""
    parts = [closed_of(part) for part in np.split(values, sorted(cut % (len(values) + 1) for cut in cuts))]
    ranked = sorted(range(len(parts)), key=lambda index: (order[index % len(order)], index))
    found = parts[ranked[0]]
    for index in ranked[1:]:
        found = merge_moments(found, parts[index])
    return found


def assert_moments(found: dict[str, Any], values: Array, *, scale: float | None = None) -> None:
    """Exact counts, minimum and maximum; mean and standard deviation to 1e-9 of the numbers' spread."""
    wide = values.astype(np.longdouble)
    absent = np.isnan(wide)
    count = (~absent).sum(axis=0)
    assert found["nans"] == absent.sum()
    np.testing.assert_array_equal(found["count"], count)
    present = values[~np.isnan(values)] if values.dtype.kind == "f" else values.ravel()
    assert found["min"] == (present.min().item() if present.size else None)
    assert found["max"] == (present.max().item() if present.size else None)
    with np.errstate(all="ignore"):
        mean = np.where(count > 0, np.nansum(wide, axis=0) / np.maximum(count, 1), 0)
        spread = np.where(absent, 0, wide - mean)
        std = np.sqrt((spread**2).sum(axis=0) / np.maximum(count, 1))
    tolerance = 1e-9 * np.maximum(std if scale is None else scale, np.abs(mean) * 1e-6 + 1e-300).astype(float)
    # Neither can be truer than the numbers themselves: a float64 near 1e9 is a multiple of 1e-7.
    tolerance += 4 * np.spacing(np.abs(mean).astype(float))
    assert (np.abs(mean_of(found) - mean) <= tolerance).all(), (mean_of(found), mean)
    deviation = np.sqrt(found["m2"] / np.maximum(count, 1))
    assert (np.abs(deviation - std) <= tolerance).all(), (deviation, std)


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    cuts = draw(st.lists(st.integers(0, 10**6), max_size=6))
    return cuts, draw(st.lists(st.integers(0, 9), min_size=1, max_size=7))


@st.composite
def numbers(draw: st.DrawFn) -> Array:
    """Noise about a mean that may be a billion times as large, with NaNs here and there."""
    rows, width = draw(st.integers(0, 200)), draw(st.sampled_from([1, 2, 5]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    mean, spread = draw(st.sampled_from([0.0, 1.0, -1e6, 1e9])), draw(st.sampled_from([0.0, 1.0, 1e-3, 1e5]))
    values = generator.normal(mean, spread, (rows, width))
    values[generator.random(values.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = np.nan
    return values.astype(draw(st.sampled_from(["float32", "float64"])))


@given(numbers(), splits())
@examples(200)
def test_any_parts_in_any_order_are_the_whole(values: Array, split: tuple[list[int], list[int]]) -> None:
    assert_moments(merged(values, *split), values)


@given(st.data(), st.sampled_from(INTEGERS), splits())
@examples(100)
def test_any_parts_of_integers_are_the_whole(
    data: st.DataObject, dtype: str, split: tuple[list[int], list[int]]
) -> None:
    limits = np.iinfo(dtype)
    found = data.draw(st.lists(st.integers(limits.min, limits.max), max_size=60))
    values = np.array(found, dtype).reshape(-1, 1)
    assert_moments(merged(values, *split), values, scale=float(limits.max))


@given(st.lists(st.booleans(), max_size=60), splits())
@examples(50)
def test_truth_is_counted_as_zeros_and_ones(found: list[bool], split: tuple[list[int], list[int]]) -> None:
    values = np.array(found, np.uint8).reshape(-1, 1)
    assert_moments(merged(values, *split), values)


@given(numbers(), st.lists(st.integers(0, 200), max_size=5))
@examples(100)
def test_batches_of_one_part_are_the_whole(values: Array, cuts: list[int]) -> None:
    opened, scratch = new_moments(values.shape[1]), new_scratch()
    for batch in np.split(values, sorted(cut % (len(values) + 1) for cut in cuts)):
        add_values(opened, batch, scratch)
    assert_moments(close_moments(opened), values)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_extremes_of_every_integer_are_exact(dtype: str) -> None:
    limits = np.iinfo(dtype)
    found = merged(np.array([[limits.max], [limits.min], [0]], dtype), [1, 2], [2, 0, 1])
    assert (found["min"], found["max"]) == (limits.min, limits.max)
    assert type(found["min"]) is int
    again = from_json(json.loads(json.dumps(to_json(found))))
    assert (again["min"], again["max"]) == (limits.min, limits.max)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mean", [0.0, 1e9, -1e9])
def test_a_large_mean_costs_no_digits_of_a_small_spread(dtype: str, mean: float) -> None:
    values = (mean + np.random.default_rng(0).normal(0, 1000, (MANY_ROWS, 2))).astype(dtype)
    assert_moments(closed_of(values), values)
    assert_moments(merged(values, [1, 17, 20_000, 39_999], [3, 1, 4, 0, 2]), values)


@pytest.mark.parametrize("near", [2**50, -(2**50), 1_700_000_000_000_000])
def test_parts_of_large_whole_numbers_keep_a_spread_of_hundreds(near: int) -> None:
    # Times in microseconds, row numbers: means rounded to a float64 would be an eighth or a quarter off.
    values = near + np.random.default_rng(0).integers(0, 1000, (MANY_ROWS, 2))
    for found in (merged(values, list(range(0, MANY_ROWS, 397)), [1, 0, 2]), closed_of(values)):
        std = (values - near).std(axis=0)
        np.testing.assert_allclose(np.sqrt(found["m2"] / found["count"]), std, rtol=1e-12)
        np.testing.assert_allclose((found["shift"] - near) + found["offset"], (values - near).mean(axis=0), rtol=1e-12)
        whole = over_all_elements(found)
        np.testing.assert_allclose(np.sqrt(whole["m2"] / whole["count"]), [(values - near).std()], rtol=1e-12)


def test_numbers_that_begin_far_from_their_mean_lose_few_digits() -> None:
    # The shift comes from the first block: here it is a million away from nearly all of them.
    values = np.concatenate([np.zeros((MANY_ROWS, 1)), 1e6 + np.random.default_rng(0).normal(0, 1, (MANY_ROWS, 1))])
    assert_moments(closed_of(values), values)


def test_a_block_that_is_not_the_first_may_hold_the_only_nan() -> None:
    values = np.random.default_rng(0).normal(5, 1, (MANY_ROWS, 3))
    values[-1, 1] = np.nan
    found = closed_of(values)
    assert found["count"].tolist() == [MANY_ROWS, MANY_ROWS - 1, MANY_ROWS]
    assert_moments(found, values)


def test_a_first_block_of_nans_costs_no_digits() -> None:
    noise = 1e9 + np.random.default_rng(0).normal(0, 1, (MANY_ROWS, 1))
    values = np.concatenate([np.full((MANY_ROWS, 1), np.nan), noise])
    assert_moments(closed_of(values), values)


def test_a_column_of_nans_alone_has_no_extremes() -> None:
    found = closed_of(np.full((5, 2), np.nan))
    assert (found["nans"], found["min"], found["max"]) == (10, None, None)
    assert found["count"].tolist() == [0, 0]
    other = closed_of(np.array([[1.0, 2.0]]))
    for both in (merge_moments(found, other), merge_moments(other, found)):
        assert_moments(both, np.array([[1.0, 2.0], *[[np.nan, np.nan]] * 5]))


def test_nothing_seen_is_neutral() -> None:
    values = np.arange(6.0).reshape(3, 2)
    nothing, some = close_moments(new_moments(2)), closed_of(values)
    assert nothing["count"].tolist() == [0, 0]
    assert (nothing["min"], nothing["max"], nothing["nans"]) == (None, None, 0)
    for both in (merge_moments(nothing, some), merge_moments(some, nothing)):
        assert_moments(both, values)
    opened = new_moments(2)
    add_values(opened, values[:0], new_scratch())
    assert_moments(close_moments(opened), values[:0])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    "values",
    [[np.inf, 1.0], [-np.inf, 1.0, 2.0], [np.inf, np.inf], [1.0, 2.0, np.inf], [np.inf, -np.inf, 3.0]],
    ids=str,
)
@pytest.mark.parametrize("parts", ["one", "two", "reversed"])
def test_infinities_are_numbers_as_numpy_has_them(values: list[float], parts: str) -> None:
    array = np.array(values).reshape(-1, 1)
    found = merged(array, [] if parts == "one" else [1], [1, 0] if parts == "reversed" else [0, 1])
    with np.errstate(all="ignore"):
        mean, std = array.mean(), array.std()
        np.testing.assert_array_equal(mean_of(found), [mean])
        np.testing.assert_array_equal(np.sqrt(found["m2"] / found["count"]), [std])
    assert (found["min"], found["max"]) == (min(values), max(values))
    assert found["nans"] == 0
    assert found["count"].tolist() == [len(values)]


def test_an_infinity_spoils_its_own_element_alone() -> None:
    values = np.random.default_rng(0).normal(3, 1, (MANY_ROWS, 2))
    values[7, 0] = np.inf
    for found in (closed_of(values), merged(values, [100], [0, 1])):
        assert mean_of(found)[0] == np.inf
        assert np.isnan(found["m2"][0])
        assert abs(mean_of(found)[1] - values[:, 1].mean()) < 1e-9
        assert abs(np.sqrt(found["m2"][1] / MANY_ROWS) - values[:, 1].std()) < 1e-9


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e300])
def test_counting_in_any_float_warns_of_nothing(value: float) -> None:
    # Warnings are errors here, and would be noise in an executor's log.
    values = np.array([[value], [-value], [0.0]])
    assert closed_of(values)["max"] == abs(value)
    assert merged(values, [1, 2], [0, 1, 2])["min"] == -abs(value)


@given(numbers(), splits())
@examples(60)
def test_json_keeps_every_bit(values: Array, split: tuple[list[int], list[int]]) -> None:
    closed = merged(values, *split)
    again = from_json(json.loads(json.dumps(to_json(closed), allow_nan=False)))
    assert again.keys() == closed.keys()
    for name in ARRAYS:
        assert again[name].tobytes() == closed[name].tobytes()
        assert again[name].flags.writeable
    assert [again[name] for name in ("nans", "min", "max")] == [closed[name] for name in ("nans", "min", "max")]


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_json_keeps_infinities(value: float) -> None:
    closed = closed_of(np.array([[value]]))
    again = from_json(json.loads(json.dumps(to_json(closed), allow_nan=False)))
    assert (again["min"], again["max"]) == (value, value)
    assert mean_of(again).tolist() == [value]


@given(numbers())
@examples(60)
def test_all_elements_alike_are_one_long_column(values: Array) -> None:
    assert_moments(over_all_elements(closed_of(values)), values.reshape(-1, 1))
    flat = flatten_moments(closed_of(values))
    assert len(flat["count"]) == 1
    assert_moments(flat, values.reshape(-1, 1))


def test_the_largest_tensors_with_elements_are_counted_element_by_element() -> None:
    values = np.random.default_rng(0).normal(0, 1, (5, MAX_ELEMENTS)) + np.arange(MAX_ELEMENTS)
    assert_moments(closed_of(values), values)


def test_parts_are_not_changed_by_what_is_made_of_them() -> None:
    values = np.random.default_rng(0).normal(0, 1, (9, 2))
    left, right = closed_of(values[:4]), closed_of(values[4:])
    before = [json.dumps(to_json(part)) for part in (left, right)]
    merge_moments(left, right)
    over_all_elements(left)
    assert [json.dumps(to_json(part)) for part in (left, right)] == before
    add_values(opened := new_moments(2), values, new_scratch())
    add_values(opened, values, new_scratch())
    assert values.tolist() == np.random.default_rng(0).normal(0, 1, (9, 2)).tolist()
