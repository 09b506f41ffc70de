"""Rows of different shapes come back as they were, padded or apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.portable import tensors as portable_tensors
from converter.reading.decode import decode
from converter.reading.ragged import ragged_values
from converter.schema import Field
from tests.properties import examples
from tests.unit.portable.one_column import plan
from tests.unit.reading.forms import assert_same

# Rows of different lengths


@given(st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=12), st.integers(0, 12), st.integers(0, 12))
@examples(100)
def test_padded_rows_are_the_rows_and_zeros_behind(rows: list[list[int]], start: int, stop: int) -> None:
    field = Field(name="x", dtype="int16", shape=None)
    array = pa.array([np.array(row, "<i2").tobytes() for row in rows], pa.large_binary())[start:stop]
    rows = rows[start:stop]
    padded, lengths = ragged_values(array, field).pad()
    longest = max(map(len, rows), default=0)
    assert padded.dtype == np.int16
    assert padded.shape == (len(rows), longest)
    assert padded.tolist() == [row + [0] * (longest - len(row)) for row in rows]
    assert lengths.tolist() == [len(row) for row in rows]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, int, list[Any]]:
    """A dtype, a number of dimensions, and rows of any shapes, some null."""
    dtype, ndim = draw(st.sampled_from(["bool", "int8", "int16", "int32", "float64"])), draw(st.integers(1, 3))
    shapes = draw(st.lists(st.none() | st.tuples(*[st.integers(0, 3)] * ndim), max_size=8))
    rows: list[Any] = []
    for index, shape in enumerate(shapes):
        # An empty list has no inner ones: beyond a size of nothing there is nothing.
        sizes = None if shape is None else tuple(np.where(np.cumprod((1, *shape[:-1])) > 0, shape, 0).tolist())
        rows.append(None if sizes is None else (np.arange(np.prod(sizes)) + index).reshape(sizes).astype(dtype))
    return dtype, ndim, rows


def as_lists(rows: list[Any], dtype: str, ndim: int) -> pa.Array:
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    for _ in range(ndim):
        kind = pa.list_(kind)
    return pa.array([None if row is None else row.tolist() for row in rows], kind)


@given(tensors(), st.sampled_from(["lists", "packed"]), st.integers(0, 3))
@examples(200)
def test_rows_of_different_shapes_come_back_as_they_were(case: Any, way: str, start: int) -> None:
    dtype, ndim, rows = case
    field = Field(name="x", dtype=dtype, shape=None, ragged_ndim=ndim)
    array = as_lists(rows, dtype, ndim)
    if way == "packed":
        encoded = portable_tensors.encode(array, plan("tensor", dtype, ndim).spec())
        array = portable_tensors.as_binary(encoded, fixed=None)
    decoded = decode(pa.chunked_array([array]), field, fill=0)
    found = ragged_values(decoded.values[start:], field)
    rows = rows[start:]
    for row, one in zip(found.split(), rows, strict=True):
        assert_same(row, np.zeros((0,) * ndim, dtype) if one is None else one)
    padded, sizes = found.pad()
    longest = np.max([np.zeros(ndim, int), *(row.shape for row in rows if row is not None)], axis=0)
    expected = np.zeros((len(rows), *longest.tolist()), dtype)
    for place, row in zip(expected, rows, strict=True):
        if row is not None:
            place[tuple(map(slice, row.shape))] = row
    assert_same(padded, expected)
    assert sizes.reshape(len(rows), ndim).tolist() == [[0] * ndim if row is None else list(row.shape) for row in rows]


def jagged(ndim: int) -> st.SearchStrategy[list[Any]]:
    """Rows of lists in lists of any lengths; many have no number at all, and differ all the same."""
    level: st.SearchStrategy[list[Any]] = st.just([]) | st.lists(st.integers(0, 9), max_size=2)
    for _ in range(ndim):
        level = st.lists(level, max_size=3)
    return level


def plain(part: Any) -> Any:
    return [plain(one) for one in part] if part.dtype == object else part.tolist()


@given(st.integers(2, 4).flatmap(lambda ndim: st.tuples(st.just(ndim), jagged(ndim))))
@examples(200)
def test_lists_of_any_lengths_come_back_as_they_were_filled_or_empty(case: tuple[int, list[Any]]) -> None:
    ndim, rows = case
    kind: pa.DataType = pa.int64()
    for _ in range(ndim):
        kind = pa.large_list(kind)
    field = Field(name="x", dtype="int64", shape=None, ragged_ndim=ndim, is_jagged=True)
    found = ragged_values(pa.array(rows, kind), field)
    assert [plain(row) for row in found.split()] == found.to_lists() == rows


@pytest.mark.parametrize("nulls", [False, True])
def test_a_file_of_one_shape_is_read_beside_others(nulls: bool) -> None:
    field = Field(name="x", dtype="int16", shape=None, ragged_ndim=2)
    rows = [np.arange(6, dtype="<i2").reshape(2, 3), np.arange(6, 12, dtype="<i2").reshape(2, 3)]
    packed = pa.array([row.tobytes() for row in rows] + [None] * nulls, pa.binary(12))
    said = pa.field("x", packed.type, metadata={portable_tensors.SHAPE_METADATA: "[2, 3]"})
    found = ragged_values(decode(pa.chunked_array([packed]), field, fill=0, stored=said).values, field)
    assert [row.tolist() for row in found.split()][:2] == [row.tolist() for row in rows]
    for wrong in (None, pa.field("x", packed.type), said.with_metadata({portable_tensors.SHAPE_METADATA: "[2, 2]"})):
        with pytest.raises(pa.ArrowInvalid, match="'x' has rows whose shape is not in its metadata"):
            decode(pa.chunked_array([packed]), field, fill=0, stored=wrong)


@pytest.mark.parametrize("header", [(-1, 3), (2, 2), (2**31 - 1, 2**31 - 1)])
def test_a_shape_that_contradicts_its_row_is_not_believed(header: tuple[int, int]) -> None:
    row = np.array(header, "<i4").tobytes() + np.arange(3, dtype="<i4").tobytes()
    with pytest.raises(ValueError, match="'x' has rows whose shape contradicts their length"):
        ragged_values(pa.array([row], pa.large_binary()), Field(name="x", dtype="int32", shape=None, ragged_ndim=2))


@pytest.mark.parametrize(
    ("ndim", "rows"), [(1, [b"1234", b"123456789012"]), (2, [b"12345678", b"1234"]), (2, [b"1234"])]
)
def test_rows_that_end_within_a_number_or_their_shape_are_not_believed(ndim: int, rows: list[bytes]) -> None:
    field = Field(name="x", dtype="int64", shape=None, ragged_ndim=ndim)
    with pytest.raises(ValueError, match="'x' has rows whose shape contradicts their length"):
        decode(pa.chunked_array([pa.array(rows, pa.binary())]), field, fill=0)
