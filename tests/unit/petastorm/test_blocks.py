"""Columns of a batch have the dtypes that pandas and Petastorm give them."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from converter.petastorm.blocks import TransformMismatchError, collect, from_frame, to_batch
from converter.petastorm.unischema import Unischema, UnischemaField, unischema_of_arrow


def batch_of(values: pa.Array) -> np.ndarray[Any, Any]:
    table = pa.table({"x": values})
    return to_batch(table, unischema_of_arrow(table.schema, {}))["x"]


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        (pa.array([1, 2], pa.int8()), "int8", [1, 2]),
        (pa.array([1, None], pa.int32()), "float64", [1.0, np.nan]),
        (pa.array([2**53 + 1, None], pa.int64()), "object", [2**53 + 1, None]),
        (pa.array([2**53, -(2**63), None], pa.int64()), "float64", [2.0**53, -(2.0**63), np.nan]),
        (pa.array([1.5, None], pa.float32()), "float32", [1.5, np.nan]),
        (pa.array([True, False]), "bool", [True, False]),
        (pa.array([True, None]), "object", [True, None]),
        (pa.array(["a", "bcd"]), "<U3", ["a", "bcd"]),
        (pa.array(["a", None]), "object", ["a", None]),
        (pa.array(["a", "a\0"]), "object", ["a", "a\0"]),
        (pa.array([b"a", None]), "object", [b"a", None]),
        (pa.array([dt.date(2026, 1, 2)]), "object", [dt.date(2026, 1, 2)]),
        (pa.array([decimal.Decimal("1.50")]), "object", [decimal.Decimal("1.50")]),
        (pa.array([[1, 2], [3, 4]]), "int64", [[1, 2], [3, 4]]),
        (pa.array([[1.0, None], [3.0, 4.0]]), "float64", [[1.0, np.nan], [3.0, 4.0]]),
        (pa.array([["a", "bc"]]), "object", [["a", "bc"]]),
        (pa.array([[], []], pa.list_(pa.int64())), "int64", [[], []]),
    ],
    ids=str,
)
def test_a_column_has_the_dtype_that_petastorm_gives_it(values: pa.Array, dtype: str, expected: list[Any]) -> None:
    column = batch_of(values)
    assert column.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(column, np.array(expected, dtype))


def test_a_batch_may_be_written_to() -> None:
    values = pa.array([1, 2])
    batch_of(values)[0] = 7
    assert values.to_pylist() == [1, 2]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_are_nanoseconds_and_null_is_no_time(unit: str) -> None:
    column = batch_of(pa.array(np.array(["2026-01-02", "NaT"], f"datetime64[{unit}]")))
    assert column.dtype == np.dtype("datetime64[ns]")
    assert column[0] == np.datetime64("2026-01-02")
    assert np.isnat(column[1])


def test_times_beyond_the_range_of_nanoseconds_keep_their_unit() -> None:
    column = batch_of(pa.array(np.array(["2026-01-02", "9999-01-01"], "datetime64[us]")))
    assert column.dtype == np.dtype("datetime64[us]")
    assert column[1] == np.datetime64("9999-01-01")


@pytest.mark.parametrize("lists", [[[1], [1, 2]], [[1], None]])
def test_lists_of_several_lengths_are_refused_with_their_lengths(lists: list[Any]) -> None:
    with pytest.raises(RuntimeError, match=r"column 'x' are expected to be the same length.*'1, "):
        batch_of(pa.array(lists))


SCHEMA = Unischema("made", [UnischemaField("a", np.int64, ()), UnischemaField("t", np.float32, (2, 3))])


def frame_of(tensors: list[Any], **columns: Any) -> pd.DataFrame:
    frame = pd.DataFrame({"a": np.arange(len(tensors)), **columns})
    frame["t"] = tensors
    return frame


def test_tensors_of_a_frame_come_as_one_array() -> None:
    block = from_frame(frame_of([np.full((2, 3), value, np.float32) for value in (1, 2)]), SCHEMA)
    assert list(block) == ["a", "t"]
    assert block["t"].shape == (2, 2, 3)
    assert block["t"][1, 0, 0] == 2


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        ([[1, 2, 3]] * 2, "must be numpy array type"),
        (np.zeros((3, 2), np.float32), r"must be the shape \(2, 3\)"),
        (np.asfortranarray(np.zeros((2, 3), np.float32)), "only support row major"),
    ],
)
def test_a_tensor_that_is_not_as_declared_is_refused(tensor: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        from_frame(frame_of([tensor]), SCHEMA)


def test_a_declared_shape_must_be_fixed() -> None:
    schema = Unischema("made", [UnischemaField("a", np.int64, ()), UnischemaField("t", np.float32, (None, 3))])
    with pytest.raises(ValueError, match="must be constant"):
        from_frame(frame_of([np.zeros((2, 3), np.float32)]), schema)


def test_columns_that_are_not_declared_are_refused_by_name() -> None:
    tensors = [np.zeros((2, 3), np.float32)]
    with pytest.raises(TransformMismatchError, match=r"columns \(a,b,t\) do not match"):
        from_frame(frame_of(tensors, b=[1]), SCHEMA)
    with pytest.raises(ValueError, match=r"columns \(a\) do not match"):
        from_frame(frame_of(tensors).drop(columns=["t"]), SCHEMA)


def test_values_of_rows_become_one_array_only_if_they_are_alike() -> None:
    field = UnischemaField("t", np.float32, (None,))
    assert collect(field, [np.zeros(2), np.ones(2)]).shape == (2, 2)
    ragged = collect(field, [np.zeros(2), np.ones(3)])
    assert ragged.dtype == object
    assert ragged[1].shape == (3,)
    with_null = collect(field, [np.zeros(2), None])
    assert with_null.dtype == object
    assert with_null[1] is None
    number = UnischemaField("n", np.int16, ())
    assert collect(number, [1, 2]).dtype == collect(number, [1.0, np.int64(2)]).dtype == np.int16
    # As a user's function returned them.
    for values in ([1.5, 2], [np.int64(2**16), 3], [np.nan, 1.0], [-1e300, 1]):
        np.testing.assert_array_equal(collect(number, values).astype("float64"), np.array(values))
    assert collect(UnischemaField("n", np.int64, ()), [2**53 + 1, 1.0]).tolist() == [2**53 + 1, 1]
    assert collect(UnischemaField("f", np.float32, ()), [0.1, np.float64(2)]).dtype == np.float32
    assert collect(UnischemaField("s", np.str_, ()), ["a", "b"]).dtype == object
