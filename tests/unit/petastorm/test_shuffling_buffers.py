"""The buffers of single rows and of columns: each row once, in order or at random, never more than they should hold."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converter.petastorm.reader_impl.batch_runs import shuffled_runs
from converter.petastorm.reader_impl.column_pool import ColumnPool
from converter.petastorm.reader_impl.columns import join
from converter.petastorm.reader_impl.pytorch_shuffling_buffer import (
    BatchedNoopShufflingBuffer,
    BatchedRandomShufflingBuffer,
    BatchedShufflingBufferBase,
)
from converter.petastorm.reader_impl.shuffling_buffer import (
    NoopShufflingBuffer,
    RandomShufflingBuffer,
    ShufflingBufferBase,
)

RANDOM = (RandomShufflingBuffer, BatchedRandomShufflingBuffer)
NOOP = (NoopShufflingBuffer, BatchedNoopShufflingBuffer)


def add(buffer: Any, rows: Any) -> None:
    buffer.add_many([list(rows)] if isinstance(buffer, BatchedShufflingBufferBase) else list(rows))


def retrieve(buffer: Any) -> list[int]:
    taken = buffer.retrieve()
    return taken[0].tolist() if isinstance(buffer, BatchedShufflingBufferBase) else [taken]


def drain(buffer: Any) -> list[int]:
    buffer.finish()
    rows: list[int] = []
    while buffer.can_retrieve():
        rows += retrieve(buffer)
    return rows


@pytest.mark.parametrize("kind", RANDOM + NOOP)
@given(steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), batch_size=st.integers(1, 5))
def test_every_row_comes_out_once_whatever_the_order_of_calls(
    kind: Any, steps: list[tuple[int, int]], batch_size: int
) -> None:
    options: dict[str, Any] = {"batch_size": batch_size} if issubclass(kind, BatchedShufflingBufferBase) else {}
    buffer = kind(20, 7, **options) if kind in RANDOM else kind(**options)
    num_added, out = 0, []
    for num_new, num_taken in steps:
        if num_new and buffer.can_add():
            add(buffer, range(num_added, num_added + num_new))
            num_added += num_new
        for _ in range(num_taken):
            if buffer.can_retrieve():
                out += retrieve(buffer)
        assert buffer.size == num_added - len(out)
    out += drain(buffer)
    assert buffer.size == 0
    assert sorted(out) == list(range(num_added))
    if kind in NOOP:
        assert out == list(range(num_added))


@pytest.mark.parametrize("kind", RANDOM)
def test_rows_may_be_taken_while_enough_wait_and_added_while_there_is_room(kind: Any) -> None:
    buffer = kind(5, 3)
    for size in range(8):
        assert buffer.size == size
        assert buffer.can_retrieve() == (size >= 3)
        assert buffer.can_add() == (size < 5)
        if size == 4:
            add(buffer, [4, 5, 6, 7])
            break
        add(buffer, [size])
    assert buffer.size == 8
    with pytest.raises(RuntimeError, match="8 wait, and the capacity is 5"):
        add(buffer, [8])
    for size in range(8, 2, -1):
        assert buffer.can_retrieve()
        assert buffer.can_add() == (size < 5)
        retrieve(buffer)
    with pytest.raises(RuntimeError, match="Can not retrieve: 2 rows wait"):
        retrieve(buffer)
    buffer.finish()
    assert not buffer.can_add()
    assert buffer.can_retrieve()
    with pytest.raises(RuntimeError, match="after finish"):
        add(buffer, [9])
    retrieve(buffer)
    retrieve(buffer)
    assert not buffer.can_retrieve()
    with pytest.raises(RuntimeError, match="0 rows wait"):
        retrieve(buffer)


@pytest.mark.parametrize("kind", RANDOM)
def test_an_empty_buffer_without_a_least_number_of_rows_hands_out_none(kind: Any) -> None:
    assert not kind(1, 0).can_retrieve()


def test_a_batch_leaves_the_least_number_of_rows_behind() -> None:
    buffer = BatchedRandomShufflingBuffer(20, 6, batch_size=4)
    add(buffer, range(8))
    assert not buffer.can_retrieve()
    add(buffer, [8])
    assert buffer.can_retrieve()


@pytest.mark.parametrize("kind", RANDOM)
def test_more_rows_than_the_extra_capacity_are_refused(kind: Any) -> None:
    buffer = kind(5, 3, extra_capacity=4)
    with pytest.raises(RuntimeError, match="Current size: 0, new size 10, maximum allowed: 9"):
        add(buffer, range(10))
    add(buffer, range(9))
    assert buffer.size == 9


@pytest.mark.parametrize("kind", RANDOM)
def test_no_memory_is_reserved_for_the_extra_capacity(kind: Any) -> None:
    buffer = kind(10**12, 3, extra_capacity=10**15)
    add(buffer, range(10))
    assert sorted(drain(buffer)) == list(range(10))


@pytest.mark.parametrize("kind", RANDOM)
def test_the_order_is_random_and_repeats_with_a_seed(kind: Any) -> None:
    def order(seed: int) -> list[int]:
        buffer = kind(1000, 3, seed=seed)
        add(buffer, range(100))
        return drain(buffer)

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != list(range(100))


@pytest.mark.parametrize("kind", RANDOM)
def test_without_a_seed_the_order_follows_the_global_generator(kind: Any) -> None:
    def order(seed: int) -> list[int]:
        np.random.seed(seed)  # noqa: NPY002 (the generator that users seed)
        torch.manual_seed(seed)
        buffer = kind(1000, 3)
        add(buffer, range(100))
        return drain(buffer)

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_each_waiting_row_is_as_likely_to_be_next() -> None:
    counts = np.zeros(5)
    generator = np.random.default_rng(0)
    for _ in range(2000):
        pool = ColumnPool(generator)
        pool.add({"id": np.arange(3)})
        pool.draw(1)
        pool.add({"id": np.arange(3, 5)})
        counts[pool.draw(2)["id"]] += 1
    # A row of the first three waits in two of three cases, and two of four are drawn.
    np.testing.assert_allclose(counts, 2000 * np.array([1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2]), rtol=0.1)


def test_columns_keep_their_rows_together_with_type_and_shape() -> None:
    buffer = BatchedRandomShufflingBuffer(100, 0, batch_size=30)
    ids = torch.arange(60, dtype=torch.int16)
    buffer.add_many([ids, ids[:, None, None].expand(60, 2, 3) * 0.5, ids % 2 == 0])
    buffer.finish()
    for _ in range(2):
        numbers, wide, even = buffer.retrieve()
        assert (numbers.dtype, wide.shape, even.dtype) == (torch.int16, (30, 2, 3), torch.bool)
        assert torch.equal(wide[:, 1, 2], numbers * 0.5)
        assert torch.equal(even, numbers % 2 == 0)


def test_batches_in_order_span_what_was_added() -> None:
    buffer = BatchedNoopShufflingBuffer(batch_size=4)
    for start in range(0, 9, 3):
        buffer.add_many([torch.arange(start, start + 3), torch.arange(start, start + 3) * 10])
    buffer.finish()
    batches = [[column.tolist() for column in buffer.retrieve()] for _ in range(3)]
    assert batches == [[[0, 1, 2, 3], [0, 10, 20, 30]], [[4, 5, 6, 7], [40, 50, 60, 70]], [[8], [80]]]


def test_a_pool_holds_columns_of_several_types_of_rows() -> None:
    pool = ColumnPool(np.random.default_rng(0))
    pool.add({"x": np.array([1, 2]), "y": np.zeros((2, 3)), "z": np.array(["a", None], object)})
    pool.add({"x": np.array([0.5, np.nan]), "y": np.ones((2, 4)), "z": np.array([7, 8])})
    drawn = pool.draw(4)
    assert drawn["x"].dtype == np.float64
    assert sorted(map(str, drawn["x"])) == ["0.5", "1.0", "2.0", "nan"]
    assert sorted(row.shape for row in drawn["y"]) == [(3,), (3,), (4,), (4,)]
    assert set(drawn["z"].tolist()) == {"a", None, 7, 8}


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_whole_numbers_are_not_rounded_beside_rows_that_have_a_null(dtype: str, shape: tuple[int, ...]) -> None:
    def column(values: Any) -> Any:
        return np.array(values).reshape(-1, *[1] * len(shape)) * np.ones(shape, np.array(values).dtype)

    large = np.arange(2**60 + 1, 2**60 + 4001, 2, dtype=dtype)
    # As a row group comes that has a null.
    blocks = [large[:100], np.array([7.0, np.nan]), *np.split(large[100:], 19)]
    runs = shuffled_runs(
        [{"x": column(block)} for block in blocks], 4, ColumnPool(np.random.default_rng(0)), min_left=9
    )
    batches = [run.columns["x"][start : start + 4] for run in runs for start in range(0, run.num_rows, 4)]

    others = [batch for batch in batches if batch.dtype != dtype]
    assert 1 <= len(others) <= 2
    assert {batch.dtype.name for batch in others} <= {"object", "float64"}
    numbers = [number for batch in batches for row in batch for number in np.unique(row).tolist()]
    assert len(numbers) == 2002
    assert {number for number in numbers if number > 8} == set(large.tolist())


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([np.array([1, 2]), np.array([0.5, np.nan])], "float64"),
        ([np.array([2**53 + 1]), np.array([0.5])], "object"),
        ([np.array([-(2**63)]), np.array([0.5], "f4")], "object"),
        ([np.array([2**53 + 1]), np.array([3], "u8")], "int64"),
        ([np.array([-1]), np.array([2**64 - 1], "u8")], "object"),
        ([np.array([2**64 - 1], "u8"), np.array([-1], "i4")], "object"),
        ([np.array([2**31 - 1], "i4"), np.array([0.5])], "float64"),
        ([np.array([1], "u1"), np.array([-1], "i2")], "int16"),
    ],
)
@pytest.mark.parametrize("is_pooled", [False, True])
def test_numbers_of_several_types_keep_their_values(is_pooled: bool, parts: list[Any], wanted: str) -> None:
    if is_pooled:
        pool = ColumnPool(np.random.default_rng(0))
        for part in (*parts, parts[0]):
            pool.add({"x": part})
        found = pool.draw(pool.num_rows)["x"]
    else:
        found = join([*parts, parts[0]])
    assert found.dtype == wanted
    given = [number for part in (*parts, parts[0]) for number in part.tolist()]
    assert sorted(map(str, found.tolist())) == sorted(str(float(one) if wanted == "float64" else one) for one in given)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("is_pooled", [False, True])
def test_times_of_any_year_stay_what_they_are_beside_nanoseconds(is_pooled: bool, cut: bool) -> None:
    near = np.array(["2026-01-01T00:00:00.000001", "NaT"], "M8[ns]") + np.timedelta64(1 if cut else 0, "ns")
    far = np.array(["9999-12-31", "0001-01-01"], "M8[us]")
    if is_pooled:
        pool = ColumnPool(np.random.default_rng(0))
        pool.add({"at": near})
        pool.add({"at": far})
        pool.add({"at": near})
        found = pool.draw(6)["at"]
    else:
        found = join([near, far, near])
    assert found.dtype == (object if cut else "M8[us]")
    kept = near if cut else near.astype("M8[us]")
    assert Counter(map(str, found)) == Counter(map(str, [*kept, *far, *kept]))


def test_whole_numbers_among_floats_stay_whole_where_rows_become_objects() -> None:
    pool = ColumnPool(np.random.default_rng(0))
    pool.add({"x": np.array([2**60 + 1])})
    pool.add({"x": np.array([0.5])})
    pool.add({"x": np.array(["text"], object)})
    assert set(pool.draw(3)["x"].tolist()) == {2**60 + 1, 0.5, "text"}


def test_a_pool_lets_drawn_objects_go() -> None:
    class Value:
        pass

    value = Value()
    reference = weakref.ref(value)
    pool = ColumnPool(np.random.default_rng(0))
    pool.add({"x": np.array([value, value], object)})
    drawn = pool.draw(2)
    del value, drawn
    gc.collect()
    assert reference() is None


def test_a_pool_grows_with_the_rows_that_wait_and_not_with_those_that_passed() -> None:
    pool = ColumnPool(np.random.default_rng(0))
    for start in range(0, 10_000, 100):
        pool.add({"id": np.arange(start, start + 100)})
        pool.draw(90 if start else 50)
    assert pool.num_rows < 1100
    assert len(pool._slots) < 2000


@pytest.mark.parametrize("base", [ShufflingBufferBase, BatchedShufflingBufferBase])
def test_a_buffer_must_say_how_rows_come_out(base: Any) -> None:
    with pytest.raises(TypeError, match="abstract"):
        base()
