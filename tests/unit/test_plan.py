"""Which rows a process reads and in what order: the laws that users resume and divide their work by."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.arguments import check_integer
from converter.errors import EmptyShardError, StateMismatchError
from converter.plan import DEFAULT_WINDOW_BYTES, EpochPlan, Piece, Shuffle, default_window_rows, plan_epoch
from converter.positions import Shard, remaining_positions
from converter.state import State, Uneven

# Row groups may be empty; a dataset is not.
row_groups = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any).map(np.array)
shuffles = st.none() | st.builds(Shuffle, seed=st.integers(0, 2**63), fingerprint=st.text(max_size=4))
window_sizes = st.integers(1, 60)


def rows_of(plan: EpochPlan, row_group_rows: np.ndarray, pieces: Iterable[Piece] | None = None) -> list[int]:
    """The row numbers of a plan's pieces (None: of all of them) in their order, as a reader would find them."""
    first_row = np.concatenate(([0], np.cumsum(row_group_rows)))
    found: list[int] = []
    for piece in plan.pieces() if pieces is None else pieces:
        groups = [np.arange(first_row[group], first_row[group + 1]) for group in piece.row_groups]
        window = np.concatenate(groups)
        assert len(window) == piece.window_rows
        assert all(0 <= span.start < span.stop <= piece.window_rows for span in piece.spans)
        if plan.shuffle is not None:
            window = window[plan.shuffle.permutation(len(window), epoch=plan.epoch, window=piece.window)]
        found += [row for span in piece.spans for row in window[span.start : span.stop].tolist()]
    return found


def order(row_group_rows: np.ndarray, window_rows: int, **options: object) -> list[int]:
    options = {"batch_size": 4, **options}
    return rows_of(plan_epoch(row_group_rows, window_rows=window_rows, **options), row_group_rows)  # type: ignore[arg-type]


# Shards


@given(num_rows=st.integers(0, 10**9), count=st.integers(1, 600))
def test_shards_cover_every_row_exactly_once(num_rows: int, count: int) -> None:
    parts = [Shard(index=index, count=count).rows(num_rows) for index in range(count)]
    assert parts[0].start == 0
    assert parts[-1].stop == num_rows
    assert all(left.stop == right.start for left, right in pairwise(parts))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("index", "count"), [(0, 0), (1, 1), (-1, 2), (2, 2), (0, -1)])
def test_a_shard_outside_its_count_is_refused(index: int, count: int) -> None:
    with pytest.raises(ValueError, match=rf"0 <= cur_shard < shard_count, got cur_shard={index} and"):
        Shard(index=index, count=count)


@given(row_groups, window_sizes, shuffles, st.integers(1, 20), st.integers(0, 5))
def test_kept_shards_one_after_the_other_are_the_order_of_one(
    rows: np.ndarray, window_rows: int, shuffle: Shuffle | None, count: int, epoch: int
) -> None:
    count = min(count, int(rows.sum()))
    parts = [
        order(rows, window_rows, shuffle=shuffle, epoch=epoch, shard=Shard(index=index, count=count), uneven="keep")
        for index in range(count)
    ]
    assert list(chain.from_iterable(parts)) == order(rows, window_rows, shuffle=shuffle, epoch=epoch)


@given(row_groups, window_sizes, shuffles, st.integers(1, 20), st.integers(0, 50))
def test_dropped_shards_have_equally_many_rows_and_none_twice(
    rows: np.ndarray, window_rows: int, shuffle: Shuffle | None, count: int, epoch: int
) -> None:
    num_rows = int(rows.sum())
    count = min(count, num_rows)
    options = {"shuffle": shuffle, "epoch": epoch, "uneven": "drop"}
    parts = [order(rows, window_rows, shard=Shard(index=index, count=count), **options) for index in range(count)]
    assert {len(part) for part in parts} == {num_rows // count}
    together = list(chain.from_iterable(parts))
    assert len(set(together)) == len(together)
    assert num_rows - len(together) < count


@given(row_groups, window_sizes, st.integers(1, 20))
def test_over_the_epochs_no_row_is_dropped_for_ever(rows: np.ndarray, window_rows: int, count: int) -> None:
    num_rows = int(rows.sum())
    count = min(count, num_rows)
    seen: set[int] = set()
    # Two epochs are enough: of a larger shard another row is dropped in each, if it has two.
    for epoch in range(2):
        for index in range(count):
            seen |= set(order(rows, window_rows, epoch=epoch, shard=Shard(index=index, count=count)))
    assert seen == set(range(num_rows))


def test_the_dropped_row_takes_every_place_of_its_shard() -> None:
    dropped = [
        set(range(4, 7)) - set(order(np.array([7]), 7, epoch=epoch, shard=Shard(index=1, count=2), uneven="drop"))
        for epoch in range(4)
    ]
    # 7 rows in 2 shards: [0, 3) and [3, 7); one of the second's four is left out.
    kept = [order(np.array([7]), 7, epoch=epoch, shard=Shard(index=1, count=2)) for epoch in range(4)]
    assert kept == [[4, 5, 6], [3, 5, 6], [3, 4, 6], [3, 4, 5]]
    assert dropped == [set(), {4}, {5}, {6}]


@given(row_groups, st.integers(1, 40))
def test_more_shards_than_rows_are_refused(rows: np.ndarray, more: int) -> None:
    num_rows = int(rows.sum())
    for uneven in ("drop", "keep"):
        with pytest.raises(EmptyShardError, match=rf"{num_rows} rows cannot be divided among {num_rows + more} shards"):
            plan_epoch(rows, batch_size=1, window_rows=5, shard=Shard(count=num_rows + more), uneven=uneven)


def test_a_dataset_without_rows_has_no_shard() -> None:
    for rows in ([], [0], [0, 0]):
        with pytest.raises(EmptyShardError, match="0 rows cannot be divided among 1 shards"):
            plan_epoch(np.array(rows, np.int64), batch_size=1, window_rows=5)


def test_one_row_group_makes_work_for_64_shards() -> None:
    rows = np.array([1000])
    shuffle = Shuffle(seed=1, fingerprint="f")
    parts = [
        order(rows, 10, shuffle=shuffle, shard=Shard(index=index, count=64), uneven="keep", batch_size=7)
        for index in range(64)
    ]
    assert sorted(chain.from_iterable(parts)) == list(range(1000))
    assert {len(part) for part in parts} == {15, 16}


# The order


@given(row_groups, window_sizes, shuffles, st.integers(0, 5))
def test_an_epoch_is_a_permutation_of_all_rows(
    rows: np.ndarray, window_rows: int, shuffle: Shuffle | None, epoch: int
) -> None:
    found = order(rows, window_rows, shuffle=shuffle, epoch=epoch)
    assert sorted(found) == list(range(int(rows.sum())))
    if shuffle is None:
        assert found == sorted(found)


@given(row_groups, window_sizes, shuffles, st.integers(1, 70), st.integers(1, 70))
def test_the_order_does_not_depend_on_the_batch_size(
    rows: np.ndarray, window_rows: int, shuffle: Shuffle | None, one: int, other: int
) -> None:
    found = [order(rows, window_rows, shuffle=shuffle, batch_size=size) for size in (one, other)]
    assert found[0] == found[1]


@given(row_groups, st.integers(1, 60))
def test_the_order_without_shuffling_does_not_depend_on_the_window(rows: np.ndarray, window_rows: int) -> None:
    assert order(rows, window_rows) == list(range(int(rows.sum())))


def test_another_seed_epoch_window_or_dataset_gives_another_order() -> None:
    rows = np.full(20, 10)
    found = {
        tuple(order(rows, window_rows, shuffle=Shuffle(seed=seed, fingerprint=fingerprint), epoch=epoch))
        for window_rows, seed, fingerprint, epoch in [
            (40, 0, "f", 0),
            (40, 1, "f", 0),
            (40, 0, "g", 0),
            (40, 0, "f", 1),
            (50, 0, "f", 0),
        ]
    }
    assert len(found) == 5
    # Digits must not run together: seed 1 in epoch 23 is not seed 12 in epoch 3.
    one = Shuffle(seed=1, fingerprint="f").permutation(50, epoch=23, window=None)
    other = Shuffle(seed=12, fingerprint="f").permutation(50, epoch=3, window=None)
    assert one.tolist() != other.tolist()


def test_every_window_has_a_permutation_of_its_own() -> None:
    shuffle = Shuffle(seed=0, fingerprint="f")
    found = [tuple(shuffle.permutation(100, epoch=0, window=window)) for window in (None, *range(20))]
    assert len(set(found)) == 21


@given(st.integers(0, 300), st.integers(0, 2**70), st.integers(0, 100), st.none() | st.integers(0, 10**6))
def test_a_permutation_is_one_and_is_repeated(size: int, seed: int, epoch: int, window: int | None) -> None:
    shuffle = Shuffle(seed=seed, fingerprint="f")
    found = shuffle.permutation(size, epoch=epoch, window=window)
    assert found.dtype == np.int64
    assert sorted(found) == list(range(size))
    again = Shuffle(seed=seed, fingerprint="f").permutation(size, epoch=epoch, window=window)
    assert found.tolist() == again.tolist()


@pytest.mark.parametrize(
    ("seed", "epoch", "window", "numbers"),
    [
        (0, 0, None, [768, 256, 306, 667, 798, 473, 95, 178]),
        (0, 0, 0, [98, 564, 627, 724, 672, 542, 388, 762]),
        (7, 3, None, [528, 419, 186, 547, 77, 381, 464, 757]),
        (7, 3, 41, [168, 504, 436, 788, 90, 942, 923, 248]),
        (2**64, 10**6, 10**5, [416, 396, 729, 97, 543, 4, 938, 193]),
    ],
)
def test_permutations_are_the_ones_that_old_runs_resume_by(
    seed: int, epoch: int, window: int | None, numbers: list[int]
) -> None:
    shuffle = Shuffle(seed=seed, fingerprint="0e5d18c77dd0af4ecc50921120e417ec")
    assert shuffle.permutation(1000, epoch=epoch, window=window)[:8].tolist() == numbers


def test_every_place_is_equally_likely() -> None:
    # 2,000 permutations of 5: each row stands 400 times at each place, give or take six standard deviations.
    counts = np.zeros((5, 5), int)
    for epoch in range(2000):
        found = Shuffle(seed=0, fingerprint="f").permutation(5, epoch=epoch, window=0)
        counts[np.arange(5), found] += 1
    assert abs(counts - 400).max() < 6 * np.sqrt(2000 * 0.2 * 0.8)


# Batches


@given(row_groups, window_sizes, shuffles, st.integers(1, 40), st.booleans(), st.integers(1, 5))
def test_batches_are_counted_exactly(
    rows: np.ndarray, window_rows: int, shuffle: Shuffle | None, batch_size: int, drop_last: bool, count: int
) -> None:
    shard = Shard(index=0, count=min(count, int(rows.sum())))
    plan = plan_epoch(
        rows, batch_size=batch_size, window_rows=window_rows, shuffle=shuffle, drop_last=drop_last, shard=shard
    )
    read = len(rows_of(plan, rows))
    whole, rest = divmod(plan.num_rows, batch_size)
    assert plan.num_batches == whole + (rest > 0 and not drop_last)
    assert read == (whole * batch_size if drop_last else plan.num_rows)


@given(row_groups, window_sizes, shuffles, st.integers(1, 40), st.integers(1, 5), st.integers(0, 4), st.data())
def test_batches_read_in_parts_are_the_batches_read_at_once(
    rows: np.ndarray,
    window_rows: int,
    shuffle: Shuffle | None,
    batch_size: int,
    count: int,
    epoch: int,
    data: st.DataObject,
) -> None:
    # With "drop" a shard is two stretches: the split must hold across the gap too.
    shard = Shard(index=data.draw(st.integers(0, min(count, rows.sum()) - 1)), count=min(count, int(rows.sum())))
    plan = plan_epoch(rows, batch_size=batch_size, window_rows=window_rows, shuffle=shuffle, shard=shard, epoch=epoch)
    whole = rows_of(plan, rows)
    for split in range(plan.num_batches + 1):
        left = rows_of(plan, rows, plan.pieces(0, split))
        right = rows_of(plan, rows, plan.pieces(split))
        assert len(left) == min(split * batch_size, plan.num_rows)
        assert left + right == whole
    assert rows_of(plan, rows, plan.pieces(0, plan.num_batches + 7)) == whole


@given(row_groups, window_sizes, shuffles, st.integers(1, 40), st.booleans(), st.integers(1, 5), st.integers(0, 4))
def test_runs_of_batches_cover_all_batches_in_order(
    rows: np.ndarray,
    window_rows: int,
    shuffle: Shuffle | None,
    batch_size: int,
    drop_last: bool,
    count: int,
    epoch: int,
) -> None:
    count = min(count, int(rows.sum()))
    for index in range(count):
        plan = plan_epoch(
            rows,
            batch_size=batch_size,
            window_rows=window_rows,
            shuffle=shuffle,
            drop_last=drop_last,
            shard=Shard(index=index, count=count),
            epoch=epoch,
        )
        runs = plan.batch_runs()
        assert [batch for run in runs for batch in run] == list(range(plan.num_batches))
        assert all(len(run) for run in runs)
        together = [row for run in runs for row in rows_of(plan, rows, plan.pieces(run.start, run.stop))]
        assert together == rows_of(plan, rows)


def test_an_epoch_of_no_batch_has_no_run() -> None:
    plan = plan_epoch(np.array([3]), batch_size=4, window_rows=3, drop_last=True)
    assert plan.num_batches == 0
    assert list(plan.pieces()) == []
    assert plan.batch_runs() == []


def test_a_run_is_about_one_window() -> None:
    plan = plan_epoch(np.full(100, 10), batch_size=5, window_rows=20)
    assert plan.batch_runs() == [range(first, first + 4) for first in range(0, 200, 4)]


# Windows


@given(row_groups, window_sizes)
def test_windows_are_whole_row_groups_and_as_few_as_the_size_asks(rows: np.ndarray, window_rows: int) -> None:
    plan = plan_epoch(rows, batch_size=1, window_rows=window_rows)
    starts = plan.window_starts.tolist()
    rows = rows[rows > 0]
    assert starts[0] == 0
    assert starts[-1] == len(rows)
    assert starts == sorted(set(starts))
    for start, stop in list(pairwise(starts))[:-1]:
        assert rows[start:stop].sum() >= window_rows
        assert stop - start == 1 or rows[start : stop - 1].sum() < window_rows


def test_a_window_is_sized_by_the_bytes_of_all_columns() -> None:
    assert default_window_rows(1000, 1000 * 100) == DEFAULT_WINDOW_BYTES // 100
    assert default_window_rows(10, 10 * DEFAULT_WINDOW_BYTES * 3) == 1
    assert default_window_rows(0, 0) == 1
    assert default_window_rows(5, 0) >= 5


def test_a_huge_dataset_costs_memory_by_row_group_and_not_by_row() -> None:
    rows = np.full(10**5, 10**5)
    shuffle = Shuffle(seed=0, fingerprint="f")
    plan = plan_epoch(
        rows, batch_size=1024, window_rows=10**6, shuffle=shuffle, shard=Shard(index=511, count=512), uneven="keep"
    )
    assert len(plan.group_order) == 10**5
    assert len(plan.group_starts) == 10**5 + 1
    assert len(plan.window_starts) == 10**4 + 1
    assert plan.num_rows == 10**10 - 10**10 * 511 // 512
    assert plan.num_batches == -(-plan.num_rows // 1024)
    pieces = list(plan.pieces())
    assert sum(piece.num_rows for piece in pieces) == plan.num_rows
    assert len(pieces) == len(plan.batch_runs())
    assert {len(piece.row_groups) for piece in pieces} == {10}
    # A window's row groups are a view of the order, not a copy of it.
    assert all(piece.row_groups.base is not None for piece in pieces)
    [last] = plan.pieces(plan.num_batches - 1)
    assert (last.window, last.spans[-1].stop) == (10**4 - 1, 10**6)


# Arguments


@pytest.mark.parametrize("value", [1.0, 1.5, "1", None, True, False, np.float64(1), np.bool_(True)])
def test_an_argument_that_is_no_integer_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match="batch_size must be an integer, got"):
        check_integer("batch_size", value, least=0)


def test_an_argument_that_is_too_small_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        check_integer("batch_size", 0, least=1)
    assert check_integer("seed", 0, least=0) == 0
    assert type(check_integer("seed", np.int32(3), least=0)) is int


# Resume


worlds = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=4)
policies: Any = st.sampled_from(["drop", "pad", "keep"])


def ranks(row_group_rows: np.ndarray, count: int, **options: Any) -> list[EpochPlan]:
    return [plan_epoch(row_group_rows, shard=Shard(index=index, count=count), **options) for index in range(count)]


@given(rows=row_groups, shuffle=shuffles, window=window_sizes, world=worlds, uneven=policies, data=st.data())
def test_after_any_number_of_changes_of_world_size_each_row_comes_as_the_policy_says(
    rows: np.ndarray,
    shuffle: Shuffle | None,
    window: int,
    world: list[tuple[int, int]],
    uneven: Uneven,
    data: st.DataObject,
) -> None:
    num_rows, epoch = int(rows.sum()), data.draw(st.integers(0, 5))
    world = [(min(count, num_rows), done) for count, done in world]
    last = data.draw(st.integers(1, min(8, num_rows)))
    options: Any = {"epoch": epoch, "batch_size": 3, "window_rows": window, "shuffle": shuffle, "uneven": uneven}
    seen: list[int] = []
    past: tuple[tuple[int, int], ...] = ()
    for count, done in world:
        for plan in ranks(rows, count, past=past, **options):
            real = rows_of(plan, rows)[: plan.num_rows - plan.num_padded]
            seen += real[:done]
        past = (*past, (count, done))
    for plan in ranks(rows, last, past=past, **options):
        seen += rows_of(plan, rows)[: plan.num_rows - plan.num_padded]
    assert len(set(seen)) == len(seen)
    if uneven != "drop":
        assert sorted(seen) == list(range(num_rows))
    else:
        # At most one row of each shard but one is left out each time the world changes.
        assert len(seen) >= num_rows - sum(count - 1 for count, _ in [*world, (last, 0)])


@given(rows=row_groups, shuffle=shuffles, window=window_sizes, count=st.integers(1, 8), uneven=policies, data=st.data())
def test_every_step_can_be_resumed_with_the_very_next_row(
    rows: np.ndarray, shuffle: Shuffle | None, window: int, count: int, uneven: Uneven, data: st.DataObject
) -> None:
    count = min(count, int(rows.sum()))
    shard = Shard(index=data.draw(st.integers(0, count - 1)), count=count)
    epoch, batch_size = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 7))
    options: Any = {
        "epoch": epoch, "batch_size": batch_size, "window_rows": window, "shuffle": shuffle, "uneven": uneven,
        "shard": shard,
    }  # fmt: skip
    whole = plan_epoch(rows, **options)
    expected = rows_of(whole, rows)
    for step in range(whole.num_batches + 1):
        rest = plan_epoch(rows, past=((count, step * batch_size),), **options)
        found = rows_of(rest, rows)
        assert found == expected[step * batch_size :]
        assert rest.num_padded == min(whole.num_padded, len(found))
        if found:
            assert rest.first_position(0) == whole.first_position(step)


@given(rows=row_groups, count=st.integers(1, 8), uneven=policies, steps=st.lists(st.integers(1, 6), max_size=4))
def test_two_stretches_of_one_world_are_one(rows: np.ndarray, count: int, uneven: Uneven, steps: list[int]) -> None:
    num_rows = int(rows.sum())
    count = min(count, num_rows)
    state = State(
        fingerprint="x",
        shuffle=False,
        seed=0,
        window_rows=5,
        window_groups=0,
        uneven=uneven,
        epoch=1,
        epochs_done=0,
        past=(),
    )
    apart: tuple[tuple[int, int], ...] = ()
    for wanted in steps:
        # A step that a shard of the least size can still take.
        step = min(wanted, num_rows // count - sum(done for _, done in apart))
        if step:
            state, apart = state.after(count, step), (*apart, (count, step))
    assert len(state.past) <= 1
    options: Any = {"epoch": 1, "uneven": uneven}
    one, many = (remaining_positions(num_rows, past, **options) for past in (state.past, apart))
    assert list(chain(*one)) == list(chain(*many))


@pytest.mark.parametrize("uneven", ["drop", "pad", "keep"])
def test_all_shards_take_as_many_steps_unless_rows_are_kept(uneven: Uneven) -> None:
    plans = ranks(np.array([4, 7]), 3, batch_size=2, window_rows=5, uneven=uneven)
    sizes = [plan.num_rows for plan in plans]
    assert sizes == {"drop": [3, 3, 3], "pad": [4, 4, 4], "keep": [3, 4, 4]}[uneven]
    assert [plan.num_padded for plan in plans] == ([1, 0, 0] if uneven == "pad" else [0, 0, 0])
    assert {plan.num_dropped for plan in plans} == {2 if uneven == "drop" else 0}


def test_a_shard_that_gets_nothing_of_a_rest_is_padded_with_a_row_of_another() -> None:
    plans = ranks(np.array([12]), 8, batch_size=2, window_rows=5, uneven="pad", past=((2, 5),))
    assert [rows_of(plan, np.array([12])) for plan in plans] == [[5], [5], [5], [5], [11], [11], [11], [11]]
    assert sum(plan.num_padded for plan in plans) == 6


@pytest.mark.parametrize("uneven", ["drop", "pad", "keep"])
def test_what_is_left_of_a_finished_epoch_is_empty(uneven: Uneven) -> None:
    for plan in ranks(np.array([9, 8]), 4, batch_size=3, window_rows=5, uneven=uneven, past=((4, 6),)):
        assert (plan.num_rows, plan.num_batches, list(plan.pieces()), plan.batch_runs()) == (0, 0, [], [])


def test_a_window_is_read_once_though_a_row_of_it_is_left_out() -> None:
    # Shard 1 of 2 has one row more than shard 0, and leaves one out in the middle of the only window.
    plan = plan_epoch(np.array([5, 6]), batch_size=2, window_rows=99, epoch=3, shard=Shard(index=1, count=2))
    (piece,) = plan.pieces()
    assert piece.spans == (range(5, 8), range(9, 11))
    assert piece.num_rows == 5


def state(**changes: Any) -> State:
    known: Any = {
        "fingerprint": "f" * 32, "shuffle": True, "seed": 7, "window_rows": 100, "window_groups": 64,
        "uneven": "keep", "epoch": 2, "epochs_done": 0, "past": ((4, 96), (8, 32)),
    }  # fmt: skip
    return State(**known | changes)


def test_a_state_is_a_few_integers_and_survives_json() -> None:
    text = json.dumps(state().to_dict())
    assert len(text) < 1000
    assert State.from_dict(json.loads(text)) == state()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fingerprint": "e" * 32}, "the rows (fingerprint) was"),
        ({"shuffle": False}, "shuffle was False and is True"),
        ({"seed": 8}, "seed was 8 and is 7"),
        ({"window_rows": 50}, "shuffle_window_rows was 50 and is 100"),
        ({"window_groups": 0}, "row groups of a window) was 0 and is 64"),
        ({"uneven": "drop"}, "uneven was 'drop' and is 'keep'"),
    ],
)
def test_a_state_of_another_run_says_what_differs(changes: Any, said: str) -> None:
    with pytest.raises(StateMismatchError, match=re.escape(said)):
        state(**changes).check(state())


def test_a_state_in_plain_order_does_not_care_for_the_seed() -> None:
    state(shuffle=False, seed=1, window_rows=3).check(state(shuffle=False))
    state(epoch=9, past=()).check(state())


@pytest.mark.parametrize(
    "value",
    [
        {}, None, [], "state", {"version": 2}, state().to_dict() | {"seed": "7"}, state().to_dict() | {"epoch": -1},
        state().to_dict() | {"past": [[0, 5]]}, state().to_dict() | {"past": [[4, -5]]},
        state().to_dict() | {"past": [[4]]}, state().to_dict() | {"past": None},
        {name: one for name, one in state().to_dict().items() if name != "uneven"},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_state_is_refused(value: Any) -> None:
    with pytest.raises(StateMismatchError, match=r"^(This is no state|The state holds values|The state has version)"):
        State.from_dict(value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"past": [[float("inf"), 1]]}, r"values that no loader wrote: past=\[inf, 1\]"),
        ({"past": [[2, float("-inf")]]}, r"past=\[2, -inf\]"),
        ({"past": [[2, float("nan")]]}, r"past=\[2, nan\]"),
        ({"past": [[2.0, 1]]}, r"past=\[2.0, 1\]"),
        ({"past": [["2", 1]]}, r"past=\['2', 1\]"),
        ({"past": [[True, 1]]}, r"past=\[True, 1\]"),
        ({"past": [[2, 0]]}, r"past=\[2, 0\]"),
        ({"past": [[2, 1, 3]]}, r"past=\[2, 1, 3\]"),
        ({"past": [[1, 2], [-(10**5000), 1]]}, r"past=\[an integer of 16610 bits, 1\]"),
        ({"epoch": 10**5000}, "epoch=an integer of 16610 bits"),
        ({"epochs_done": 1 << 62}, "epochs_done=4611686018427387904"),
        ({"version": 10**5000}, "version an integer of 16610 bits"),
    ],
    ids=range(12),
)  # fmt: skip
def test_numbers_that_no_loader_wrote_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(StateMismatchError, match=said):
        State.from_dict(state().to_dict() | changes)


def naive_rest(num_rows: int, past: Any, *, epoch: int, uneven: Uneven) -> list[int]:
    """The positions that are left, one by one."""
    left = list(range(num_rows))
    for count, done in past:
        after = []
        for index in range(count):
            own = [left[place] for place in Shard(index=index, count=count).rows(len(left))]
            if uneven == "drop" and len(own) > len(left) // count:
                del own[epoch % len(own)]
            after += own[done:]
        left = after
    return left


@given(
    num_rows=st.integers(1, 300),
    past=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), max_size=6),
    epoch=st.integers(0, 50),
    uneven=policies,
)
def test_what_is_left_is_what_no_shard_has_done(num_rows: int, past: Any, epoch: int, uneven: Uneven) -> None:
    past = tuple((min(count, num_rows), done) for count, done in past)
    left = remaining_positions(num_rows, past, epoch=epoch, uneven=uneven)
    assert list(chain(*left)) == naive_rest(num_rows, past, epoch=epoch, uneven=uneven)
    assert all(map(len, left))


@pytest.mark.parametrize(
    ("past", "said"),
    [
        (((1 << 31, 14),), "2147483648 shards of 1000 rows: no loader has more shards than rows"),
        (((1, 1), (1 << 62, 7)), "4611686018427387904 shards of 1000 rows"),
        (((10**5000, 1),), "an integer of 16610 bits shards of 1000 rows"),
        (((1, 1), (2, 1)) * 20_000, "cuts the epoch into more than 524288 pieces: it was read with 40000 values"),
    ],
    ids=["many", "more", "most", "often"],
)  # fmt: skip
def test_a_past_that_would_take_for_ever_is_refused(past: Any, said: str) -> None:
    # Of 40,000 stretches a few thousand are followed before the refusal, which takes its time.
    for uneven in ("drop", "pad", "keep")[: 1 if len(past) > 2 else 3]:
        with pytest.raises(StateMismatchError, match=said):
            remaining_positions(1000, past, epoch=3, uneven=uneven)
    # Any number of rows that were done is arithmetic.
    assert remaining_positions(1000, ((7, 10**5000),), epoch=3, uneven="keep") == []


def test_a_past_of_many_shards_of_many_rows_is_refused_or_bounded() -> None:
    num_rows = 10**12
    with pytest.raises(StateMismatchError, match=r"more than 524288 pieces: .* of shard_count, of up to 10{12}\."):
        remaining_positions(num_rows, ((num_rows, 1),), epoch=0, uneven="keep")
    left = remaining_positions(num_rows, ((10_000, 3), (9_999, 5)), epoch=0, uneven="keep")
    assert sum(map(len, left)) == num_rows - 30_000 - 49_995
    assert len(left) < 20_000
