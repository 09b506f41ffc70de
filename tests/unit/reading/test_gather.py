"""Gathered rows are the wanted rows, in the plan's order, in memory of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.reading.decode import decode
from converter.reading.gather import gather, gather_pages, gather_stack, take_columns
from converter.reading.ragged import ragged_values
from tests.columns import RAGGED, TENSORS, Column
from tests.properties import examples
from tests.unit.reading.forms import NUMBERS, OBJECTS, as_stored, assert_same, stored

# Gathering


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[list[int]], Any]:
    """Row ids of several parts, and which of their rows are wanted: a slice, or a permutation of them or of a few."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
    stops = np.cumsum(sizes)
    parts = [list(range(stop - size, stop)) for size, stop in zip(sizes, stops.tolist(), strict=True)]
    total = sum(sizes)
    if draw(st.booleans()):
        start = draw(st.integers(0, total - 1))
        return parts, slice(start, draw(st.integers(start + 1, total)))
    rows = draw(st.permutations(range(total)))
    return parts, np.array(rows[: draw(st.integers(1, total))], np.int64)


def wanted(parts: list[list[int]], rows: Any) -> list[int]:
    return np.array([row for part in parts for row in part])[rows].tolist()


@given(windows(), st.sampled_from([*NUMBERS, *TENSORS]))
@examples(150)
def test_gathered_numbers_are_the_wanted_rows_in_memory_of_their_own(window: Any, column: Column) -> None:
    parts, rows = window
    values = [as_stored(column.values(part)) for part in parts]
    found = gather(values, rows)
    assert_same(found, as_stored(column.values(wanted(parts, rows))))
    assert found.flags.writeable
    assert not any(np.shares_memory(found, part) for part in values)


@given(windows(), st.lists(st.sampled_from([*NUMBERS, *TENSORS]), min_size=1, max_size=4))
@examples(100)
def test_columns_are_taken_together_as_each_alone(window: Any, columns: list[Column]) -> None:
    parts, rows = window
    if isinstance(rows, slice):
        rows = np.arange(rows.start, rows.stop)
    values = {str(place): [as_stored(column.values(part)) for part in parts] for place, column in enumerate(columns)}
    found = take_columns(values, rows.astype(np.int32))
    assert list(found) == list(values)
    for name, column in zip(found, columns, strict=True):
        assert_same(found[name], as_stored(column.values(wanted(parts, rows))))
        assert found[name].flags.writeable
        assert not any(np.shares_memory(found[name], part) for part in values[name])
    assert take_columns({}, rows) == {}
    assert all(len(taken) == 0 for taken in take_columns(values, rows[:0]).values())


@given(windows(), st.sampled_from([*OBJECTS, RAGGED]))
@examples(100)
def test_gathered_objects_and_ragged_rows_are_the_wanted_ones(window: Any, column: Column) -> None:
    parts, rows = window
    if column is RAGGED:
        arrays = [
            decode(pa.chunked_array([stored(column, "binary", part)]), column.field, fill=0).values for part in parts
        ]
        found = ragged_values(gather(arrays, rows), column.field)
        expected = column.values(wanted(parts, rows))
        assert_same(found.values, np.concatenate(expected).astype(column.dtype))
        assert_same(np.diff(found.offsets), np.array([len(row) for row in expected]))
        return
    found = gather([column.arrow(part) for part in parts], rows)
    assert isinstance(found, pa.Array)
    assert found.to_pylist() == column.values(wanted(parts, rows))


@given(windows(), st.lists(st.sampled_from(NUMBERS[:8]), min_size=1, max_size=6), st.sampled_from(["f4", "f8"]))
@examples(100)
def test_a_gathered_stack_is_numpys_stack_of_the_wanted_rows(window: Any, columns: list[Column], dtype: str) -> None:
    parts, rows = window
    groups = [[column.values(part) for column in columns] for part in parts]
    found = gather_stack(iter(groups), sum(map(len, parts)), rows, len(columns), dtype)
    ids = wanted(parts, rows)
    assert_same(found, np.stack([column.values(ids).astype(dtype) for column in columns], axis=1))
    assert found.flags.writeable


@pytest.mark.parametrize("repeat", [1, 30, 100], ids=["few", "many", "many in several blocks"])
def test_a_stack_larger_than_a_block_is_whole(repeat: int) -> None:
    columns = NUMBERS[2:5] * repeat
    parts = [list(range(9000)), list(range(9000, 9001)), list(range(9001, 20_000))]
    groups = [[column.values(part) for column in columns] for part in parts]
    rows = np.random.default_rng(0).permutation(20_000)
    expected = np.stack([column.values(range(20_000)).astype("f8") for column in columns], axis=1)
    assert_same(gather_stack(groups, 20_000, rows, len(columns), "f8"), expected[rows])
    assert_same(gather_stack(groups, 20_000, slice(0, 20_000), len(columns), "f8"), expected)
    assert_same(gather_stack(groups, 20_000, slice(8999, 9002), len(columns), "f8"), expected[8999:9002])


@given(
    sizes=st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any),
    width=st.sampled_from([64, 65, 200]),
    dtype=st.sampled_from(["float32", "int64", "float64"]),
    data=st.data(),
)
def test_wide_rows_are_gathered_from_wherever_they_lie(
    sizes: list[int], width: int, dtype: str, data: st.DataObject
) -> None:
    generator = np.random.default_rng(0)
    parts: list[Any] = []
    for size in sizes:
        # Anywhere in memory, and at any byte: as in a mapped file.
        offset = data.draw(st.integers(0, 9))
        raw = generator.integers(0, 256, offset + size * width * np.dtype(dtype).itemsize, dtype=np.uint8)
        parts.append(raw[offset:].view(dtype).reshape(size, width))
    order = data.draw(st.permutations(range(len(parts))))
    parts = [parts[index] for index in order]
    whole = np.concatenate(parts)
    rows = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=300)), np.int64)
    found = gather(parts, rows)
    assert found.dtype == np.dtype(dtype)
    assert found.flags.writeable
    assert found.view(np.uint8).tobytes() == whole[rows].view(np.uint8).tobytes()
    assert not any(np.shares_memory(found, part) for part in parts)


def test_wide_rows_are_gathered_without_a_view_of_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [np.arange(start, start + 700).reshape(7, 100) for start in (0, 5000)]
    rows = np.array([13, 0, 7, 7])
    expected = np.concatenate(parts)[rows]
    monkeypatch.delattr(np.lib.stride_tricks, "as_strided")
    assert_same(gather(parts, rows), expected)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    shape=st.sampled_from([(70,), (3, 40)]),
    dtype=st.sampled_from(["float32", "float64"]),
    gap=st.sampled_from([0, 4]),
    data=st.data(),
)
def test_wide_rows_that_come_page_by_page_are_the_wanted_ones(
    sizes: list[int], shape: tuple[int, ...], dtype: str, gap: int, data: st.DataObject
) -> None:
    generator = np.random.default_rng(0)
    inner = np.empty(shape, dtype)
    pages = []
    for size in sizes:
        # Before each row there may be its length, after which numbers need not be aligned.
        raw = generator.integers(0, 256, size * (gap + inner.nbytes), dtype=np.uint8)
        strides = (gap + inner.nbytes, *inner.strides)
        pages.append(np.ndarray((size, *shape), dtype, raw.data, gap, strides))
    whole = np.concatenate(pages)
    chosen = st.lists(st.integers(0, len(whole) - 1), max_size=60, unique=True)
    start = data.draw(st.integers(0, len(whole)))
    for rows in (
        np.array(data.draw(chosen), data.draw(st.sampled_from([np.int32, np.int64]))),
        np.array(data.draw(st.permutations(range(len(whole)))), np.int32),
        slice(start, data.draw(st.integers(start, len(whole)))),
    ):
        found = gather_pages(pages, len(whole), rows)
        assert found is not None
        assert (found.dtype, found.shape[1:]) == (np.dtype(dtype), shape)
        assert found.flags.writeable
        assert found.tobytes() == whole[rows].tobytes()


def test_pages_are_left_to_gather_where_one_is_missing_or_a_row_is_wanted_twice() -> None:
    pages = [np.zeros((2, 100)), np.ones((2, 100))]
    assert gather_pages([*pages, None], 6, np.arange(4)) is None
    assert gather_pages([*pages, None], 6, slice(0, 5)) is None
    assert gather_pages(pages, 4, np.array([3, 0, 3])) is None


def test_pages_behind_the_wanted_rows_are_not_asked_for() -> None:
    pages = iter([np.zeros((2, 100)), np.ones((2, 100)), np.ones((2, 100))])
    found = gather_pages(pages, 6, slice(1, 3))
    assert found is not None
    assert found[:, 0].tolist() == [0, 1]
    assert len(list(pages)) == 1
