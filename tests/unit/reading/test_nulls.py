"""A fill value fits its column or is refused, and errors say what can be done."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pytest

from converter.errors import NullValueError
from converter.reading.nulls import check_fill, null_error
from converter.schema import Field

# Fill values


GOOD_FILLS: list[tuple[str, tuple[int, ...] | None, Any, Any]] = [
    ("int8", (), 127, 127),
    ("int8", (), 5.0, 5),
    ("int8", (), True, 1),
    ("int64", (), -(2**63), -(2**63)),
    ("bool", (), True, True),
    ("bool", (), 0, False),
    ("float32", (), 0.1, np.float32(0.1)),
    ("float32", (), float("nan"), np.float32("nan")),
    ("float32", (), 7, 7.0),
    ("float32", (2,), [1, 2], np.array([1, 2], "f4")),
    ("float32", (2, 3), 1, 1.0),
    ("float32", (2, 3), [1, 2, 3], np.array([1, 2, 3], "f4")),
    ("int32", (3,), np.arange(3), np.arange(3, dtype="i4")),
    ("datetime64[D]", (), dt.date(1970, 1, 3), 2),
    ("datetime64[D]", (), np.datetime64("1970-01-03"), 2),
    ("datetime64[us]", (), dt.datetime(1970, 1, 1, 0, 0, 2), 2_000_000),  # noqa: DTZ001
    ("str", (), "unknown", "unknown"),
    ("bytes", (), b"", b""),
]


@pytest.mark.parametrize(("dtype", "shape", "value", "expected"), GOOD_FILLS, ids=str)
def test_a_fill_that_fits_is_taken_in_the_columns_dtype(
    dtype: str, shape: tuple[int, ...] | None, value: Any, expected: Any
) -> None:
    field = Field(name="x", dtype=dtype, shape=shape)
    found = check_fill(field, value)
    np.testing.assert_array_equal(found, expected)
    if not field.is_object:
        assert found.dtype == field.stored_dtype


BAD_FILLS: list[tuple[str, tuple[int, ...] | None, Any]] = [
    ("int8", (), 128),
    ("int8", (), 0.5),
    ("int8", (), float("nan")),
    ("int8", (), "5"),
    ("int8", (), None),
    ("int64", (), 2**63),
    ("bool", (), 2),
    ("float32", (), "0"),
    ("float32", (), 1j),
    ("float32", (), object()),
    ("float32", (2,), [1, 2, 3]),
    ("float32", (), [1, 2]),
    ("float32", (2,), [[1], [2]]),
    ("datetime64[D]", (), "yesterday"),
    ("datetime64[us]", (), 0.5),
    ("datetime64[D]", (), 1.5),
    ("str", (), 0),
    ("str", (), b"bytes"),
    ("str", (), None),
    ("bytes", (), "text"),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Casting complex values to real:numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize(("dtype", "shape", "value"), BAD_FILLS)
def test_a_fill_that_does_not_fit_is_refused_by_name(dtype: str, shape: tuple[int, ...] | None, value: Any) -> None:
    with pytest.raises(ValueError, match=r"nulls: .* cannot stand for a null of column 'x', whose dtype is"):
        check_fill(Field(name="x", dtype=dtype, shape=shape), value)


def test_the_fill_of_a_ragged_column_is_one_number_for_its_null_elements() -> None:
    ragged = Field(name="x", dtype="int8", shape=None)
    assert check_fill(ragged, 3) == 3
    with pytest.raises(ValueError, match=r"nulls: \[1, 2\] cannot stand for a null of column 'x', whose dtype is int8"):
        check_fill(ragged, [1, 2])


X = Field(name="x", dtype="int32", shape=(), has_nulls=True)


def test_a_null_is_refused_with_what_to_do_about_it() -> None:
    with pytest.raises(NullValueError, match=r"'x' holds 3 nulls, .* nulls='mask' \(adds 'x__valid'\)") as raised:
        raise null_error(X, count=3)
    assert raised.value.column == "x"
    assert "holds 1 null," in str(null_error(X, count=1))
    assert "holds nulls," in str(null_error(X))


DAY = "1970-01-01"


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("str", ""), ("bytes", b""), ("float32", 0), ("bool", 0), ("datetime64[D]", DAY), ("datetime64[us]", DAY)],
)  # fmt: skip
def test_what_is_said_of_nulls_can_be_done(dtype: str, fill: object) -> None:
    field = Field(name="x", dtype=dtype, shape=(), has_nulls=True)
    assert f"or nulls={{'x': {fill!r}}}." in str(null_error(field))
    check_fill(field, fill)


def test_rows_of_different_lengths_are_not_said_to_take_a_fill() -> None:
    field = Field(name="x", dtype="float32", shape=None, has_nulls=True, ragged_ndim=1)
    assert "nulls={" not in str(null_error(field))
