"""A stored column has the values that Petastorm's rows had, made from Arrow at once."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from converter.petastorm.columns import convert_column, convert_scalar, stored_values, to_column, to_objects

NOON = dt.datetime(2026, 1, 2, 12, 0, 0, 5, tzinfo=dt.timezone.utc)
NAIVE_NOON = NOON.replace(tzinfo=None)


@pytest.mark.parametrize(
    ("values", "numpy_dtype", "dtype", "expected"),
    [
        (pa.array([1, 2], pa.int32()), np.int32, "int32", [1, 2]),
        (pa.array([1, 2], pa.int64()), np.float32, "float32", [1, 2]),
        (pa.array([1, 0], pa.int64()), np.bool_, "bool", [True, False]),
        (pa.array([0, 255], pa.int16()), np.uint8, "uint8", [0, 255]),
        (pa.array([2.0, -2.0]), np.int32, "int32", [2, -2]),
        (pa.array([2**64 - 1], pa.uint64()), np.uint64, "uint64", [2**64 - 1]),
        (pa.array([1.5, None, np.nan], pa.float32()), np.float32, "float32", [1.5, np.nan, np.nan]),
        (pa.array([1, 2], pa.int32()), np.dtype("int16"), "int16", [1, 2]),
        (pa.array([3, 4]).dictionary_encode(), np.int64, "int64", [3, 4]),
        (pa.array([0, 5], pa.timestamp("ms")), np.datetime64, "datetime64[us]", [0, 5000]),
        (pa.array([-1, 1999], pa.timestamp("ns")), np.datetime64, "datetime64[ns]", [-1, 1999]),
        (pa.array([-1000, 2000], pa.timestamp("ns")), np.datetime64, "datetime64[ns]", [-1000, 2000]),
        (pa.array([NOON], pa.timestamp("us", "Europe/Oslo")), np.datetime64, "datetime64[us]", [NAIVE_NOON]),
        (pa.array([dt.date(1, 1, 1)]), np.datetime64, "datetime64[D]", ["0001-01-01"]),
        (pa.array([dt.date(2026, 1, 2)], pa.date64()), np.datetime64, "datetime64[D]", ["2026-01-02"]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int64())), np.int32, "int32", [[1, 2], [3, 4]]),
        (pa.array([[1.0, None]]), np.float32, "float32", [[1.0, np.nan]]),
        (pa.array([[], []], pa.list_(pa.int8())), np.int8, "int8", [[], []]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2)), np.int16, "int16", [[1, 2], [3, 4]]),
        (pa.array([], pa.int64()), np.int32, "int32", []),
    ],
)  # fmt: skip
def test_numbers_and_times_are_one_array_of_the_declared_dtype(
    values: pa.Array, numpy_dtype: Any, dtype: str, expected: list[Any]
) -> None:
    column = convert_column(numpy_dtype, values)
    assert column.dtype == dtype
    np.testing.assert_array_equal(column, np.array(expected, dtype))
    column[...] = column[::-1]


@pytest.mark.parametrize(
    ("values", "numpy_dtype", "expected"),
    [
        (pa.array([1, None], pa.int32()), np.int16, [np.int16(1), None]),
        (pa.array([True, None]), np.bool_, [np.True_, None]),
        (pa.array(["a", None, "é\0"]), np.str_, [np.str_("a"), None, "é\0"]),
        (pa.array([b"a"]), np.str_, [np.str_("a")]),
        (pa.array([7]), np.str_, [np.str_("7")]),
        (pa.array([b"\xff\0", None]), np.bytes_, [b"\xff\0", None]),
        (pa.array([b"\0\0", b"ab"], pa.binary(2)), np.bytes_, [b"\0\0", np.bytes_(b"ab")]),
        (pa.array(["a"]), np.bytes_, [np.bytes_(b"a")]),
        (pa.array([Decimal("1.50"), None]), Decimal, [Decimal("1.50"), None]),
        (pa.array(["1.50"]), Decimal, [Decimal("1.50")]),
        (pa.array([None, NAIVE_NOON]), np.datetime64, [None, np.datetime64(NAIVE_NOON)]),
        (pa.array([None, dt.date(2026, 1, 2)]), np.datetime64, [None, np.datetime64("2026-01-02")]),
        (pa.array(["3"]), np.int32, [np.int32(3)]),
        (pa.array([7, None]), None, [7, None]),
        (pa.array([7, None]), object, [7, None]),
        (pa.array([{"a": 1}, None]), object, [{"a": 1}, None]),
    ],
)
def test_texts_decimals_and_columns_with_nulls_are_objects_of_the_declared_type(
    values: pa.Array, numpy_dtype: Any, expected: list[Any]
) -> None:
    column = convert_column(numpy_dtype, values)
    assert column.dtype == object
    assert [(type(value), value) for value in column] == [(type(value), value) for value in expected]


def test_lists_of_several_lengths_are_an_array_of_arrays() -> None:
    column = convert_column(np.int32, pa.array([[1, 2], None, [], [3]], pa.large_list(pa.int64())))
    assert column[1] is None
    assert [(row.tolist(), str(row.dtype)) for row in column[[0, 2, 3]]] == [
        ([1, 2], "int32"),
        ([], "int32"),
        ([3], "int32"),
    ]


def test_lists_of_texts_and_of_times_are_arrays_of_them() -> None:
    assert convert_column(np.str_, pa.array([["a", "bc"], ["d", "e"]])).tolist() == [["a", "bc"], ["d", "e"]]
    times = convert_column(np.datetime64, pa.array([[NAIVE_NOON]]))
    assert times.dtype == "datetime64[us]"
    assert times.shape == (1, 1)


def test_a_sliced_column_is_converted_from_its_own_rows() -> None:
    assert convert_column(np.int64, pa.array([1, 2, 3])[1:]).tolist() == [2, 3]
    assert convert_column(np.int64, pa.array([[1], [2, 2], [3, 3]])[1:]).tolist() == [[2, 2], [3, 3]]
    assert convert_column(np.str_, pa.array(["a", None, "c"])[1:]).tolist() == [None, "c"]


@pytest.mark.parametrize("values", [pa.array([1.0, None]), pa.array([np.nan]), pa.array([np.inf])])
def test_what_is_no_whole_number_does_not_become_one(values: pa.Array) -> None:
    with pytest.raises(ValueError, match="cannot become int32"):
        convert_column(np.int32, values)


@pytest.mark.parametrize("number", [-1, 256, 2**40])
def test_numbers_of_a_wider_type_do_not_wrap_around(number: int) -> None:
    for column in (pa.array([1, None, number]), pa.array([[1, number]]), pa.array([1.0, number], pa.float64())):
        with pytest.raises(ValueError, match=rf"the number {number}.* is none of uint8"):
            convert_column(np.uint8, column)
    for value in (number, np.int64(number), [1, number], float(number)):
        with pytest.raises(ValueError, match=rf"the number {number}.* is none of uint8"):
            convert_scalar(np.uint8, value)


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64()])
def test_whole_numbers_that_half_precision_holds_are_read_without_a_warning(kind: pa.DataType) -> None:
    column = convert_column(np.float16, pa.array([2, -7], kind))
    assert column.tolist() == [2, -7]


def test_nulls_among_whole_numbers_of_a_list_are_refused() -> None:
    with pytest.raises(ValueError, match="a list holds a null"):
        convert_column(np.int32, pa.array([[1, None]]))


@pytest.mark.parametrize(
    ("numpy_dtype", "value", "expected"),
    [
        (np.int32, 5, np.int32(5)),
        (np.uint8, np.int64(255), np.uint8(255)),
        (np.str_, b"ab", np.str_("ab")),
        (np.datetime64, NOON, np.datetime64(NAIVE_NOON)),
        (Decimal, "1.5", Decimal("1.5")),
        (np.bytes_, b"a", np.bytes_(b"a")),
        (np.bytes_, b"a\0", b"a\0"),
        (np.str_, b"a\0", "a\0"),
        (None, [4, 2], [4, 2]),
        (int, 5, 5),
    ],
)
def test_one_value_is_converted_as_a_column_of_it(numpy_dtype: Any, value: Any, expected: Any) -> None:
    converted = convert_scalar(numpy_dtype, value)
    assert type(converted) is type(expected)
    assert converted == expected


def test_a_list_is_converted_to_an_array() -> None:
    assert convert_scalar(np.int16, [1, 2]).dtype == np.int16
    assert convert_scalar(np.str_, ["a", "b"]).tolist() == ["a", "b"]
    assert convert_scalar(np.datetime64, [NAIVE_NOON]).dtype == "datetime64[us]"


def test_a_users_codec_gets_bytes_and_arrays() -> None:
    assert stored_values(pa.array([b"ab", None], pa.large_binary())) == [b"ab", None]
    rows = stored_values(pa.array([[1, 2], [3, 4]], pa.list_(pa.int16())))
    assert [row.tolist() for row in rows] == [[1, 2], [3, 4]]
    assert rows[0].dtype == np.int16


def test_decoded_values_of_one_kind_are_stacked() -> None:
    assert to_column([np.zeros((2, 3)), np.ones((2, 3))]).shape == (2, 2, 3)
    assert to_column([np.float32(1), np.float32(2)]).dtype == np.float32


@pytest.mark.parametrize(
    "values", [[np.zeros(2), np.zeros(3)], [np.zeros(2), np.zeros(2, np.int8)], [np.zeros(2), None], [1, 2], ["a"], []]
)
def test_other_decoded_values_stay_as_they_are(values: list[Any]) -> None:
    column = to_column(values)
    assert column.shape == (len(values),)
    assert all(kept is value for kept, value in zip(column, values, strict=True))


def test_arrays_of_one_shape_can_be_objects() -> None:
    assert to_objects([np.zeros(2), np.zeros(2)]).shape == (2,)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(np.int64, 2.5), (np.int32, Decimal("2.5")), (np.float64, 2**53 + 1), (np.float32, 2**24 + 1)],
)
@pytest.mark.parametrize("is_list", [False, True])
def test_numbers_that_the_declared_type_would_cut_or_round_are_refused(kind: Any, value: Any, is_list: bool) -> None:
    values = pa.array([[value]]) if is_list else pa.array([value])
    match = rf"number {value}(\.0)? is none of {kind.__name__}"
    with pytest.raises(ValueError, match=match):
        convert_column(kind, values)
    with pytest.raises(ValueError, match=match):
        convert_scalar(kind, [value] if is_list else value)


def test_numbers_that_the_declared_type_holds_come_back() -> None:
    assert convert_column(np.int64, pa.array([2.0, -3.0])).tolist() == [2, -3]
    assert convert_column(np.float64, pa.array([2**53, -(2**63)])).tolist() == [2.0**53, -(2.0**63)]
    assert convert_column(np.float32, pa.array([0.1])).tolist() == [np.float32(0.1)]
    assert convert_scalar(np.int64, Decimal(2)) == 2
