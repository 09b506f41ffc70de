"""Ranks share rows and steps; workers share the batches of a rank."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import booleans, integers

from converter.deltatorch.ranks import (
    batches_of_worker,
    find_rank,
    plan_steps,
    rows_between,
    rows_of_rank,
)
from converter.errors import ConverterWarning, EmptyShardError
from converter.manifest import Manifest
from converter.schema import Field, Schema
from converter.selection import select

RANKS = integers(1, 9)


def manifest_of(row_groups: list[int], masks: list[list[bool]] | None = None) -> Manifest:
    rows = np.array(row_groups, np.int64)
    return Manifest(
        schema=Schema((Field(name="x", dtype="int64"),)),
        file_names=("x.parquet",),
        file_bytes=np.array([1], np.int64),
        row_group_file=np.zeros(len(rows), np.int64),
        row_group_rows=rows,
        row_group_bytes=rows * 8,
        fingerprint="x",
        num_rows=int(rows.sum()),
        float_dtype="float64",
        statistics={},
        selection=None if masks is None else select([np.array(mask) for mask in masks]),
    )


def live_rows(manifest: Manifest) -> list[int]:
    """The numbers of live rows among all."""
    found, start = [], 0
    for group, num_rows in enumerate(manifest.row_group_rows.tolist()):
        mask = np.ones(num_rows, bool) if manifest.selection is None else manifest.selection.mask(group, num_rows)
        found += (start + np.flatnonzero(mask)).tolist()
        start += num_rows
    return found


@given(num_rows=integers(9, 500), num_ranks=RANKS)
def test_ranks_cover_every_row_once_and_differ_by_one_row(num_rows: int, num_ranks: int) -> None:
    parts = [rows_of_rank(num_rows, rank, num_ranks) for rank in range(num_ranks)]
    assert parts[0].start == 0
    assert parts[-1].stop == num_rows
    assert all(left.stop == right.start for left, right in pairwise(parts))
    assert len(parts[0]) - len(parts[-1]) in (0, 1)


@given(num_rows=integers(9, 500), num_ranks=RANKS, batch_size=integers(2, 50), drop_last=booleans())
def test_all_ranks_take_equally_many_steps(num_rows: int, num_ranks: int, batch_size: int, drop_last: bool) -> None:
    plans = [
        plan_steps(num_rows, rank, num_ranks, batch_size=batch_size, drop_last=drop_last) for rank in range(num_ranks)
    ]
    assert len({plan.count for plan in plans}) == 1
    for rank, plan in enumerate(plans):
        sizes = plan.sizes(range(plan.num_batches))
        assert len(sizes) == plan.count
        assert all(0 < size <= batch_size for size in sizes)
        assert sum(sizes) == plan.num_rows
        # In any ranges, the same batches.
        assert [size for batch in range(plan.num_batches) for size in plan.sizes(range(batch, batch + 1))] == sizes
        if drop_last:
            assert set(sizes) <= {batch_size}
        else:
            assert sum(sizes) == len(rows_of_rank(num_rows, rank, num_ranks))


def test_fewer_rows_than_ranks_are_an_error() -> None:
    with pytest.raises(EmptyShardError, match="2 rows cannot be divided among 3 ranks"):
        rows_of_rank(2, 0, 3)


def test_with_a_batch_size_of_one_a_smaller_rank_has_one_batch_less() -> None:
    assert [plan_steps(5, rank, 2, batch_size=1, drop_last=False).count for rank in range(2)] == [3, 2]


@given(
    num_batches=integers(0, 60), worker_count=integers(1, 5), most=integers(1, 7), is_free=booleans(),
    run=integers(1, 9),
)  # fmt: skip
def test_workers_cover_every_batch_once(
    num_batches: int, worker_count: int, most: int, is_free: bool, run: int
) -> None:
    every = range(num_batches)
    runs = [every[start : start + run] for start in range(0, num_batches, run)]
    parts = [
        batches_of_worker(runs, worker, worker_count, most=most, is_free=is_free) for worker in range(worker_count)
    ]
    assert sorted(batch for part in parts for batches in part for batch in batches) == list(every)
    assert all(1 <= len(batches) <= most for part in parts for batches in part)
    if not is_free:
        # Taken in turns, as a DataLoader takes items of its workers, they are in order.
        turns = [part[turn] for turn in range(len(parts[0])) for part in parts if turn < len(part)]
        assert [batch for batches in turns for batch in batches] == list(every)


def test_in_a_free_order_each_run_of_many_has_one_worker() -> None:
    runs = [range(start, start + 6) for start in range(0, 48, 6)]
    for worker in range(2):
        own = batches_of_worker(runs, worker, 2, most=4, is_free=True)
        assert {batches.start // 6 for batches in own} == set(range(worker, 8, 2))


@pytest.mark.parametrize("masks", [None, [[True, False, True, True], [False] * 3, [True] * 5]])
def test_rows_between_are_the_live_rows_of_these_numbers(masks: list[list[bool]] | None) -> None:
    manifest = manifest_of([4, 3, 5], masks)
    every = live_rows(manifest)
    for start in range(len(every)):
        for stop in range(start + 1, len(every) + 1):
            part = rows_between(manifest, range(start, stop))
            assert live_rows(part) == every[start:stop]
            assert part.num_live_rows == stop - start


@pytest.mark.parametrize(
    ("rank", "num_ranks", "message"),
    [
        (None, None, "needs rank and num_ranks, got rank=None and num_ranks=None"),
        (0, None, "needs rank and num_ranks"),
        (None, 2, "needs rank and num_ranks"),
        (2, 2, "rank must be below num_ranks, got rank=2 and num_ranks=2"),
        (-1, 2, "rank must be at least 0"),
        (0, 0, "num_ranks must be at least 1"),
    ],
)
def test_wrong_pairs_of_ranks_are_errors(rank: int | None, num_ranks: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_rank(use_fixed_rank=True, rank=rank, num_ranks=num_ranks)


def test_ranks_without_use_fixed_rank_warn_and_are_not_used() -> None:
    with pytest.warns(
        ConverterWarning, match="rank=1 and num_ranks=2 are not used without use_fixed_rank=True"
    ) as caught:
        assert find_rank(use_fixed_rank=False, rank=1, num_ranks=2) == (0, 1)
    assert caught[0].filename == __file__
