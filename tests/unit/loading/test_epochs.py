"""A state is taken at every step and loaded elsewhere: the very next row comes, whoever reads and however many."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converter import DatasetConverter
from converter.errors import StateMismatchError
from tests.columns import ID, TENSORS
from tests.entries import write_converter
from tests.processes import run_python
from tests.properties import examples

NUM_ROWS = 101
ROWS = list(range(NUM_ROWS))
WINDOW = 20
BATCH = 13
STEPS = 8
FRAMEWORKS = ("numpy", "torch")
ALL_FRAMEWORKS = (*FRAMEWORKS, "processes")
PROCESSES_LATER = (*FRAMEWORKS, pytest.param("processes", marks=pytest.mark.long("it starts processes many times")))


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Two files of uneven row groups."""
    partitions = [[range(60)], [range(60, NUM_ROWS)]]
    with write_converter(tmp_path_factory.mktemp("rows"), (ID, TENSORS[0]), partitions, row_group_bytes=120) as found:
        assert found._manifest.num_row_groups > 12
        yield found


@pytest.fixture(scope="module")
def other_rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """As many rows, but not the same ones."""
    partitions = [[range(1, 61)], [range(61, NUM_ROWS + 1)]]
    with write_converter(tmp_path_factory.mktemp("other"), (ID, TENSORS[0]), partitions, row_group_bytes=120) as found:
        yield found


def make(converter: DatasetConverter, framework: str = "numpy", **options: Any) -> Any:
    known: dict[str, Any] = {"columns": ["id"], "batch_size": BATCH, "shuffle_window_rows": WINDOW} | options
    if framework == "numpy":
        return converter.make_batch_reader(**known)
    return converter.make_torch_dataloader(**{"num_workers": 2 if framework == "processes" else 0} | known)


def travelled(converter: DatasetConverter) -> DatasetConverter:
    """The converter as another process gets it."""
    return pickle.loads(pickle.dumps(converter))


def saved(loader: Any, batches: int | None = None) -> dict[str, Any]:
    """The state as a checkpoint keeps it: small, and plain JSON."""
    state = loader.state_dict() if batches is None else loader.state_dict(batches=batches)
    text = json.dumps(state)
    assert len(text) < 1000
    assert json.loads(text) == state
    return json.loads(text)


def rows_of(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def flat(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["id"].tolist()]


def history(
    converter: DatasetConverter, framework: str, most: int, **options: Any
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """The first batches of an uninterrupted run, and the state before them and after each."""
    with make(converter, framework, **options) as loader:
        batches, states = [], [saved(loader)]
        for batch in itertools.islice(loader, most):
            batches.append(batch["id"].tolist())
            states.append(saved(loader))
    return batches, states


# Every step


@pytest.mark.one_in(5)
@pytest.mark.parametrize("num_epochs", [1, 3, None])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_after_every_step_a_fresh_copy_continues_with_the_very_next_row(
    converter: DatasetConverter, framework: str, shuffle: bool, num_epochs: int | None
) -> None:
    steps = 5
    most = steps * (num_epochs or 2)
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 3, "num_epochs": num_epochs, "batch_size": 21}
    batches, states = history(converter, framework, most, **options)
    assert len(batches) == most
    assert (sorted(itertools.chain(*batches[:steps])), batches[0] == list(range(21))) == (ROWS, not shuffle)
    for step, state in enumerate(states):
        with make(travelled(converter), framework, **options) as fresh:
            fresh.load_state_dict(state)
            assert saved(fresh) == state
            if num_epochs is None:
                assert rows_of(itertools.islice(fresh, most - step)) == batches[step:], step
                continue
            assert len(fresh) == most
            assert rows_of(fresh) == batches[step:], step
            assert len(fresh) == most


@pytest.mark.parametrize("num_epochs", [2, None])
def test_processes_are_resumed_at_any_step(converter: DatasetConverter, num_epochs: int | None) -> None:
    options: dict[str, Any] = {"shuffle": True, "num_epochs": num_epochs}
    most = 2 * STEPS
    batches, states = history(converter, "processes", most, **options)
    assert (batches, states) == history(converter, "numpy", most, **options)
    for step in (3, STEPS, STEPS + 5):
        with make(travelled(converter), "processes", **options) as fresh:
            fresh.load_state_dict(states[step])
            assert rows_of(itertools.islice(fresh, most - step)) == batches[step:], step
            if num_epochs:
                assert len(fresh) == most


@pytest.mark.parametrize("framework", PROCESSES_LATER)
def test_a_loader_can_load_again_and_again(converter: DatasetConverter, framework: str) -> None:
    options: dict[str, Any] = {"shuffle": True, "num_epochs": 2}
    batches, states = history(converter, "numpy", 2 * STEPS, **options)
    if framework == "processes":
        options["persistent_workers"] = True
    with make(converter, framework, **options) as loader:
        for step in (5, 2, 11, 11, 0):
            loader.load_state_dict(states[step])
            assert rows_of(loader) == batches[step:], step
        following = rows_of(loader)
    assert len(following) == 2 * STEPS
    assert following[:STEPS] not in (batches[:STEPS], batches[STEPS:])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("num_epochs", [1, 3, None])
def test_the_state_after_k_batches_is_known_before_they_are_read(
    converter: DatasetConverter, framework: str, num_epochs: int | None
) -> None:
    most = STEPS * (num_epochs or 2)
    options: dict[str, Any] = {"shuffle": True, "num_epochs": num_epochs}
    _, states = history(converter, framework, most, **options)
    with make(converter, framework, **options) as loader:
        assert [saved(loader, step) for step in range(most + 1)] == states
        # Also of an iteration that is under way: those who count batches count from its beginning.
        iterator = iter(loader)
        for step in range(1, most + 1):
            next(iterator)
            assert saved(loader, step) == states[step]
            assert saved(loader, 2) == states[2]
        if num_epochs is not None:
            with pytest.raises(ValueError, match=rf"one iteration has {most} batches, got "):
                loader.state_dict(batches=most + 1)
        for step in (3, most // 2, most):
            loader.load_state_dict(states[step])
            assert [saved(loader, more) for more in range(most - step + 1)] == states[step:]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("num_ahead", [1, 3])
def test_code_that_reads_ahead_of_the_end_still_counts_from_the_beginning(
    converter: DatasetConverter, framework: str, num_ahead: int
) -> None:
    with make(converter, framework, shuffle=True) as loader, make(converter, framework, shuffle=True) as other:
        for epoch in range(2):
            other.set_epoch(epoch)
            states = [saved(other, step) for step in range(STEPS + 1)]
            for step, _ in enumerate(loader, 1):
                assert saved(loader, max(0, step - num_ahead)) == states[max(0, step - num_ahead)]
            # The end was seen before the last ones are used.
            assert [saved(loader, step) for step in range(STEPS - num_ahead, STEPS + 1)] == states[STEPS - num_ahead :]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_iteration_that_was_asked_for_counts_before_its_first_batch(
    converter: DatasetConverter, framework: str
) -> None:
    with make(converter, framework, shuffle=True) as loader, make(converter, framework, shuffle=True) as other:
        for _ in loader:
            pass
        other.set_epoch(1)
        iterator = iter(loader)
        assert [saved(loader, step) for step in (0, STEPS)] == [saved(other, step) for step in (0, STEPS)]
        assert saved(loader, 0) == saved(loader)
        next(iterator)
        assert saved(loader, 0) == saved(other, 0)


@pytest.mark.parametrize(("batches", "kind"), [(-1, ValueError), (1.5, TypeError), ("3", TypeError)])
def test_a_bad_number_of_batches_names_itself(converter: DatasetConverter, batches: Any, kind: Any) -> None:
    for framework in FRAMEWORKS:
        with make(converter, framework) as loader, pytest.raises(kind, match="batches must be"):
            loader.state_dict(batches=batches)


def test_what_is_on_its_way_to_a_device_does_not_count(converter: DatasetConverter) -> None:
    _, states = history(converter, "numpy", STEPS)
    with make(converter, "torch", device="meta") as loader:
        found = [saved(loader)]
        for batch in loader:
            assert batch["id"].is_meta
            found.append(saved(loader))
    assert found == states


# However it ends


@pytest.mark.parametrize("framework", ALL_FRAMEWORKS)
def test_after_the_last_batch_the_rest_is_empty_and_then_comes_the_next_epoch(
    converter: DatasetConverter, framework: str
) -> None:
    with make(converter, shuffle=True) as whole:
        epochs = [flat(whole) for _ in range(2)]
    with make(converter, framework, shuffle=True) as loader:
        iterator = iter(loader)
        for _ in range(STEPS):
            next(iterator)
        after_the_last = saved(loader)
        assert list(iterator) == []
        after_the_end = saved(loader)
    assert after_the_last["epoch"] == 0
    assert after_the_end["epoch"] == 1
    with make(travelled(converter), framework, shuffle=True) as fresh:
        fresh.load_state_dict(after_the_last)
        assert list(fresh) == []
        assert flat(fresh) == epochs[1]
        fresh.load_state_dict(after_the_end)
        assert flat(fresh) == epochs[1]
        assert len(fresh) == STEPS


@pytest.mark.parametrize("framework", ALL_FRAMEWORKS)
def test_an_iteration_that_is_broken_off_is_repeated_unless_its_state_is_loaded(
    converter: DatasetConverter, framework: str
) -> None:
    expected, states = history(converter, "numpy", STEPS, shuffle=True)
    with make(converter, framework, shuffle=True) as loader:
        for step, batch in enumerate(loader):
            assert batch["id"].tolist() == expected[step]
            if step == 4:
                break
        state = saved(loader)
        assert state == states[5]
        assert rows_of(itertools.islice(loader, 3)) == expected[:3]
        assert saved(loader) == states[3]
        loader.load_state_dict(state)
        assert rows_of(itertools.islice(loader, 2)) == expected[5:7]
        # Left early again: where the state was loaded is where the next one begins.
        assert saved(loader) == states[7]
        assert rows_of(loader) == expected[5:]


@pytest.mark.parametrize("framework", PROCESSES_LATER)
def test_the_same_epoch_keeps_a_loaded_state_and_another_one_drops_it(
    converter: DatasetConverter, framework: str
) -> None:
    with make(converter, shuffle=True) as whole:
        epochs = [rows_of(whole) for _ in range(4)]
    with make(converter, framework, shuffle=True) as loader:
        loader.set_epoch(2)
        for _ in itertools.islice(loader, 5):
            pass
        state = saved(loader)
    with make(converter, framework, shuffle=True) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(2)
        assert rows_of(loader) == epochs[2][5:]
        loader.set_epoch(3)
        assert rows_of(loader) == epochs[3]
        loader.load_state_dict(state)
        loader.set_epoch(3)
        assert rows_of(loader) == epochs[3]
        loader.load_state_dict(state)
        loader.set_epoch(1)
        loader.set_epoch(2)
        assert rows_of(loader) == epochs[2]


@pytest.mark.parametrize("framework", PROCESSES_LATER)
def test_what_is_set_while_an_iteration_is_under_way_is_for_the_next_one(
    converter: DatasetConverter, framework: str
) -> None:
    with make(converter, shuffle=True) as whole:
        epochs = [rows_of(whole) for _ in range(4)]
    _, states = history(converter, "numpy", STEPS, shuffle=True)
    with make(converter, framework, shuffle=True) as loader:
        iterator = iter(loader)
        # It begins with its first batch: Lightning says the epoch after it has made the iterator.
        loader.set_epoch(2)
        begun = rows_of(itertools.islice(iterator, 1))
        loader.set_epoch(3)
        assert begun + rows_of(iterator) == epochs[2]
        assert rows_of(loader) == epochs[3]
        loader.set_epoch(1)
        iterator = iter(loader)
        begun = rows_of(itertools.islice(iterator, 3))
        loader.load_state_dict(states[6])
        assert begun + rows_of(iterator) == epochs[1]
        assert rows_of(loader) == epochs[0][6:]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loader_of_other_epochs_reads_the_rest_of_this_one(converter: DatasetConverter, framework: str) -> None:
    batches, states = history(converter, framework, 3 * STEPS, shuffle=True, num_epochs=3)
    with make(converter, framework, shuffle=True, num_epochs=1) as shorter:
        shorter.load_state_dict(states[STEPS + 3])
        assert rows_of(shorter) == batches[STEPS + 3 : 2 * STEPS]
        assert rows_of(shorter) == batches[2 * STEPS :]
    with make(converter, framework, shuffle=True, num_epochs=5) as longer:
        longer.load_state_dict(states[STEPS + 3])
        assert len(rows_of(longer)) == 5 * STEPS - STEPS - 3


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_dropped_last_batch_is_not_what_is_left(converter: DatasetConverter, framework: str) -> None:
    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "num_epochs": 2, "batch_size": 30}
    batches, states = history(converter, framework, 6, **options)
    assert list(map(len, batches)) == [30] * 6
    for step, state in enumerate(states):
        with make(converter, framework, **options) as fresh:
            fresh.load_state_dict(state)
            assert rows_of(fresh) == batches[step:], step


def test_a_refused_state_leaves_the_loader_where_it_was(converter: DatasetConverter) -> None:
    batches, states = history(converter, "numpy", STEPS, shuffle=True)
    with make(converter, shuffle=True) as loader:
        loader.load_state_dict(states[4])
        with pytest.raises(StateMismatchError):
            loader.load_state_dict(states[2] | {"seed": 9})
        assert rows_of(loader) == batches[4:]


# Another number of shards


def own_rows(batches: Any) -> list[int]:
    """The rows of batches but those that only make the steps even."""
    return [
        row
        for batch in batches
        for row, valid in zip(batch["id"].tolist(), batch.get("__valid", np.ones(len(batch["id"]), bool)), strict=True)
        if valid
    ]


def read_in_stretches(
    converter: DatasetConverter, stretches: list[tuple[int, int, int]], *, epoch: int = 0, **options: Any
) -> tuple[list[int], list[list[Any]]]:
    """What all ranks of all stretches (shards, batch size, steps) but the last one read, and each rank of the last."""
    state: dict[str, Any] | None = None
    before: list[int] = []
    for number, (count, batch_size, steps) in enumerate(stretches):
        read: list[list[Any]] = []
        for index in range(count):
            with make(converter, cur_shard=index, shard_count=count, batch_size=batch_size, **options) as loader:
                loader.set_epoch(epoch)
                if state is not None:
                    loader.load_state_dict(state)
                read.append(list(loader))
        if number == len(stretches) - 1:
            return before, read
        taken = min(steps, *map(len, read)) if count > 1 else min(steps, len(read[0]))
        states = []
        for index in range(count):
            with make(converter, cur_shard=index, shard_count=count, batch_size=batch_size, **options) as loader:
                loader.set_epoch(epoch)
                if state is not None:
                    loader.load_state_dict(state)
                again = list(itertools.islice(loader, taken))
                assert rows_of(again) == rows_of(read[index][:taken])
                before += own_rows(again)
                states.append(saved(loader))
        # One rank may save it for all.
        assert all(one == states[0] for one in states)
        state = states[0]
    raise AssertionError("no stretch")


def check_policy(before: list[int], last: list[list[Any]], uneven: str, *, most_dropped: int) -> None:
    after = [row for rank in last for row in own_rows(rank)]
    times = Counter(before + after)
    assert max(times.values()) == 1
    if uneven == "drop":
        assert NUM_ROWS - len(times) <= most_dropped
    else:
        assert sorted(times) == ROWS
    if uneven != "keep":
        assert len({tuple(map(len, rows_of(rank))) for rank in last}) == 1


@pytest.mark.one_in(4)
@pytest.mark.parametrize("uneven", ["keep", "drop", "pad"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "stretches",
    [
        [(1, 13, 3), (4, 5, 0)],
        [(24, 1, 2), (1, 10, 0)],
        [(8, 2, 2), (3, 5, 3), (4, 3, 0)],
    ],
    ids=["1→4", "24→1", "8→3→4"],
)
def test_another_number_of_shards_reads_what_is_left(
    converter: DatasetConverter, stretches: Any, shuffle: bool, uneven: str
) -> None:
    before, last = read_in_stretches(converter, stretches, shuffle=shuffle, uneven=uneven)
    assert 0 < len(before) < NUM_ROWS
    check_policy(before, last, uneven, most_dropped=sum(count - 1 for count, _, _ in stretches))


@examples(15)
@given(
    stretches=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 20), st.integers(0, 6)), min_size=2, max_size=3),
    uneven=st.sampled_from(["keep", "drop", "pad"]),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_after_any_change_of_shards_each_row_comes_as_the_policy_says(
    converter: DatasetConverter, stretches: Any, uneven: str, shuffle: bool, epoch: int
) -> None:
    before, last = read_in_stretches(converter, stretches, epoch=epoch, shuffle=shuffle, uneven=uneven)
    check_policy(before, last, uneven, most_dropped=sum(count - 1 for count, _, _ in stretches))


@pytest.mark.parametrize("inner", ["a look at the first batch", "a whole iteration"])
@pytest.mark.parametrize("framework", [*FRAMEWORKS, "processes"])
def test_another_iteration_in_between_leaves_the_state_that_of_the_last_batch(
    converter: DatasetConverter, framework: str, inner: str
) -> None:
    loader = make(converter, framework)
    rows = []
    for step, batch in enumerate(loader, 1):
        rows += batch["id"].tolist()
        if step == 2:
            if inner == "a whole iteration":
                assert sum(len(batch["id"]) for batch in loader) == NUM_ROWS
            else:
                next(iter(loader))
        if step == 4:
            state = saved(loader)
            assert saved(loader, batches=4) == state
            break
    again = make(converter, framework)
    again.load_state_dict(state)
    assert rows + [number for batch in again for number in batch["id"].tolist()] == ROWS
    # Lightning says the epoch again before it validates: with the training's own loader that is in the midst of it.
    first = iter(loader)
    next(first)
    loader.set_epoch(7)
    assert saved(loader)["epoch"] == 7
    next(first)
    assert (saved(loader)["epoch"], saved(loader)["past"]) != (7, [])
    assert saved(loader, batches=2) == saved(loader)
    # A loaded state stays, whatever a running iteration still gives, of this epoch or the next one.
    loader = make(converter, framework, num_epochs=2)
    first = iter(loader)
    next(first)
    loader.load_state_dict(state)
    for _ in range(STEPS + 1):
        next(first)
        assert saved(loader) == state


class SecondIsLate:
    """A transform that changes nothing; the second process that receives it takes long to begin."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __call__(self, batch: Any) -> Any:
        return batch

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            time.sleep(3)


@pytest.mark.long("it spawns processes")
def test_processes_that_begin_late_read_the_epoch_that_they_were_started_for(
    converter: DatasetConverter, tmp_path: Path
) -> None:
    with make(converter, shuffle=True) as whole:
        epochs = [rows_of(whole) for _ in range(2)]
    options = {"num_workers": 2, "multiprocessing_context": "spawn", "transform": SecondIsLate(str(tmp_path / "first"))}
    with make(converter, "torch", shuffle=True, **options) as loader:
        first = iter(loader)
        begun = rows_of(itertools.islice(first, 1))
        loader.set_epoch(1)
        second = iter(loader)
        later = rows_of(itertools.islice(second, 1))
        assert begun + rows_of(first) == epochs[0]
        assert later + rows_of(second) == epochs[1]


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_loader_that_two_processes_have_tells_each_ones_workers_its_own_epoch(
    converter: DatasetConverter, persistent_workers: bool
) -> None:
    with make(converter, "torch", num_workers=1, persistent_workers=persistent_workers) as loader:
        runs = loader._runs
        runs.begin_at(3, 0, ())
        if not (pid := os.fork()):
            try:
                runs.begin_at(5, 0, ())
                os._exit(0 if [int(number) for number in runs._begin] == [5, 0] else 1)
            finally:
                os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        assert [int(number) for number in runs._begin] == [3, 0]
        # In shared memory alone a worker that was started sees what comes next.
        assert torch.is_tensor(runs._begin) == persistent_workers


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_tells_its_persistent_workers_of_each_epoch(converter: DatasetConverter, travel: Any) -> None:
    with make(converter, shuffle=True) as whole:
        epochs = [rows_of(whole) for _ in range(3)]
    loader = travel(make(converter, "torch", shuffle=True, num_workers=1, persistent_workers=True))
    with loader:
        assert [rows_of(loader) for _ in range(3)] == epochs


def test_a_loader_that_travelled_has_a_state(converter: DatasetConverter) -> None:
    reader = make(travelled(converter), num_epochs=3, cur_shard=0, **UNEQUAL)
    loader = pickle.loads(pickle.dumps(make(converter, "torch", num_epochs=3, cur_shard=0, **UNEQUAL)))
    for made in (reader, loader):
        for _ in itertools.islice(made, 2):
            pass
    assert saved(reader) == saved(loader)


@pytest.mark.parametrize("framework", [*FRAMEWORKS, "processes"])
def test_a_rank_that_is_known_after_the_iterator_was_made_reads_its_part(
    converter: DatasetConverter, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Lightning and others make an iterator before their ranks have joined a group.
    rows = []
    for rank in range(2):
        loader = make(converter, framework, uneven="keep")
        batches = iter(loader)
        with monkeypatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", "2")
            rows += [number for batch in batches for number in batch["id"].tolist()]
    assert rows == ROWS


UNEQUAL: dict[str, Any] = {"batch_size": 25, "uneven": "keep", "shard_count": 4}
"""Of 101 rows in 4 shards, one shard takes 2 batches and the others 1."""


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_shards_of_unequal_batches_come_apart_over_epochs_and_continue_from_their_own_states(
    converter: DatasetConverter, framework: str, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in range(1, 4):
        rows, states = Counter[int](), []
        for index in range(4):
            caplog.clear()
            loader = make(converter, framework, num_epochs=3, cur_shard=index, **UNEQUAL)
            for batch in itertools.islice(loader, steps):
                rows.update(batch["id"].tolist())
            states.append(saved(loader))
            assert saved(loader) == states[-1]
            told = [text for text in caplog.messages if "in different epochs" in text]
            assert len(told) == (steps > 1)
            assert all(f"right for shard {index} of 4 alone" in text for text in told)
        # What the warning is for: after one batch one state is that of all, and then it is not.
        assert (states[0] == states[3]) == (steps == 1)
        for index, state in enumerate(states):
            loader = make(converter, framework, num_epochs=3, cur_shard=index, **UNEQUAL)
            loader.load_state_dict(state)
            for batch in loader:
                rows.update(batch["id"].tolist())
        assert rows == Counter(ROWS * 3)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_shards_of_unequal_batches_that_iterate_epoch_by_epoch_have_one_state(
    converter: DatasetConverter, framework: str, caplog: pytest.LogCaptureFixture
) -> None:
    for steps in (1, 2):
        rows, states = Counter[int](), []
        for index in range(4):
            loader = make(converter, framework, cur_shard=index, **UNEQUAL)
            for epoch in range(2):
                loader.set_epoch(epoch)
                for step, batch in enumerate(loader, 1):
                    rows.update(batch["id"].tolist())
                    if epoch == 1 and step == steps:
                        states.append(saved(loader))
                        break
        for state in states:
            all_rows = Counter(rows)
            for index in range(3):
                loader = make(converter, framework, **UNEQUAL | {"cur_shard": index, "shard_count": 3})
                loader.load_state_dict(state)
                for batch in loader:
                    all_rows.update(batch["id"].tolist())
            assert all_rows == Counter(ROWS * 2)
    assert not [text for text in caplog.messages if "in different epochs" in text]


@pytest.mark.parametrize("uneven", ["drop", "pad"])
def test_torch_with_processes_reads_what_another_number_of_shards_left(
    converter: DatasetConverter, uneven: str
) -> None:
    options: dict[str, Any] = {"shuffle": True, "uneven": uneven, "num_epochs": 2}
    with make(converter, "torch", cur_shard=2, shard_count=3, batch_size=8, **options) as loader:
        next(iter(loader))
        state = saved(loader)
    for index in range(2):
        shard: dict[str, Any] = {"cur_shard": index, "shard_count": 2}
        with (
            make(converter, "processes", **shard, **options) as processes,
            make(converter, "numpy", **shard, **options) as reader,
        ):
            processes.load_state_dict(state)
            reader.load_state_dict(state)
            batches, expected = list(processes), list(reader)
            assert rows_of(batches) == rows_of(expected)
            # The second epoch is whole again.
            assert len(batches) == len(expected) == len(reader) - len(reader) // 2 + -(-(NUM_ROWS - 24) // 2 // BATCH)


# What may differ, and what may not


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("framework", "changes"),
    [
        ("numpy", {"batch_size": 7}),
        ("torch", {"batch_size": 64}),
        ("numpy", {"columns": ["vector", "id"]}),
        ("numpy", {"workers_count": 1}),
        ("torch", {"workers_count": 3, "prefetch_batches": 1}),
        ("numpy", {"prefetch_batches": 40}),
        ("torch", {"num_workers": 1, "batch_size": 10}),
        ("numpy", {"transform": dict}),
        ("torch", {"with_row_index": "row"}),
        ("numpy", {"verify_checksums": True}),
        ("torch", {"stack": {"x": ["id"]}}),
    ],
    ids=str,
)
def test_who_goes_on_may_read_in_another_way(converter: DatasetConverter, framework: str, changes: Any) -> None:
    batches, states = history(converter, "torch", STEPS, shuffle=True)
    expected = list(itertools.chain(*batches))
    for step in (0, 3, STEPS):
        with make(converter, framework, **{"shuffle": True} | changes) as fresh:
            fresh.load_state_dict(states[step])
            assert flat(fresh) == expected[step * BATCH :]


SHUFFLED: dict[str, Any] = {"shuffle": True, "seed": 1}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (SHUFFLED, SHUFFLED | {"seed": 2}, "seed was 1 and is 2"),
        (SHUFFLED, {}, "shuffle was True and is False"),
        ({}, SHUFFLED, "shuffle was False and is True"),
        (SHUFFLED, SHUFFLED | {"shuffle_window_rows": 30}, "shuffle_window_rows was 20 and is 30"),
        (SHUFFLED, SHUFFLED | {"shuffle_window_rows": "all"}, "shuffle_window_rows was 20 and is 101"),
        ({}, {"uneven": "pad"}, "uneven was 'keep' and is 'pad'"),
        ({"uneven": "drop"}, {}, "uneven was 'drop' and is 'keep'"),
        ({}, {"filters": [("id", ">", 5)]}, r"the rows \(fingerprint\) was"),
        ({"filters": [("id", ">", 5)]}, {"filters": [("id", ">", 6)]}, r"the rows \(fingerprint\) was"),
        (SHUFFLED, SHUFFLED | {"seed": 2, "uneven": "pad"}, "uneven was 'drop' and is 'pad'; seed was 1 and is 2"),
    ],
    ids=str,
)
def test_a_state_of_another_order_is_refused_and_says_what_differs(
    converter: DatasetConverter, framework: str, before: Any, now: Any, said: str
) -> None:
    _, states = history(converter, framework, 2, **before)
    with make(converter, framework, **now) as fresh:
        for state in states:
            with pytest.raises(StateMismatchError, match=said):
                fresh.load_state_dict(state)


def test_a_state_of_other_rows_is_refused(converter: DatasetConverter, other_rows: DatasetConverter) -> None:
    _, states = history(other_rows, "numpy", 2)
    with make(converter) as fresh, pytest.raises(StateMismatchError, match=r"the rows \(fingerprint\) was"):
        fresh.load_state_dict(states[1])


def test_what_does_not_change_a_plain_order_may_differ(converter: DatasetConverter) -> None:
    batches, states = history(converter, "numpy", STEPS, seed=1)
    with make(converter, seed=2, shuffle_window_rows=70) as fresh:
        fresh.load_state_dict(states[3])
        assert rows_of(fresh) == batches[3:]


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        [],
        "state",
        {"version": 1},
        {"version": 2},
        {"past": [[0, 5]]},
        {"past": [[2, -5]]},
        {"past": [[2, 0]]},
        {"past": [[2**31, 14]]},
        {"past": [[10**12, 1]]},
        {"past": [[2**62, 2**62]]},
        {"past": [[102, 1]]},
        {"past": [[101, 1]] * 100_000},
        {"past": [[2.0, 5]]},
        {"past": [[float("inf"), 5]]},
        {"past": [[2, float("-inf")]]},
        {"past": [[2, float("nan")]]},
        {"epoch": 2**62},
        {"epochs_done": 10**400},
        {"past": [[2]]},
        {"past": "ab"},
        {"past": None},
        {"epoch": -1},
        {"epoch": 1.0},
        {"epoch": True},
        {"epochs_done": -1},
        {"seed": None},
        {"uneven": 3},
    ],
    ids=lambda state: str(state)[:40],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_no_state_is_refused(converter: DatasetConverter, framework: str, state: Any) -> None:
    with make(converter, framework) as loader:
        good = saved(loader)
        bad = good | state if isinstance(state, dict) and state and state != {"version": 1} else state
        with pytest.raises(
            StateMismatchError,
            match=r"^(This is no state|The state (holds values|has version|has \d+ shards|cuts the epoch))",
        ):
            loader.load_state_dict(bad)
        loader.load_state_dict(good)
        assert flat(loader) == ROWS


# One order for all who read


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_one_for_any_threads_processes_and_frameworks(converter: DatasetConverter, shuffle: bool) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "seed": 11, "num_epochs": 2}
    expected, states = history(converter, "numpy", 2 * STEPS, **options)
    ways: list[tuple[str, dict[str, Any]]] = [
        (framework, {"workers_count": workers_count, "prefetch_batches": prefetch_batches})
        for framework in FRAMEWORKS
        for workers_count in (1, 3)
        for prefetch_batches in (None, 1, 3, 50)
    ]
    ways += [("torch", {"num_workers": num_workers, "prefetch_batches": 2}) for num_workers in (1, 3)]
    for framework, changes in ways:
        found = history(converter, framework, 2 * STEPS, **options, **changes)
        assert found == (expected, states), (framework, changes)


# Uneven shards


@pytest.mark.parametrize(
    ("framework", "count", "batch_size"),
    [
        *(
            (framework, count, batch_size)
            for framework in FRAMEWORKS
            for count, batch_size in ((3, 17), (4, 5), (2, 101))
        ),
        ("processes", 3, 17),
    ],
)
def test_padded_shards_take_equal_steps_and_mark_what_is_not_theirs(
    converter: DatasetConverter, framework: str, count: int, batch_size: int
) -> None:
    own: list[int] = []
    padded = 0
    sizes = set()
    for index in range(count):
        shard: dict[str, Any] = {"cur_shard": index, "shard_count": count, "batch_size": batch_size}
        with make(converter, framework, uneven="pad", shuffle=True, **shard) as loader:
            batches = list(loader)
            assert len(batches) == len(loader)
        assert all(list(batch) == ["id", "__valid"] for batch in batches)
        assert all(np.asarray(batch["__valid"]).dtype == np.bool_ for batch in batches)
        sizes.add(tuple(len(batch["id"]) for batch in batches))
        marks = [valid for batch in batches for valid in batch["__valid"].tolist()]
        # A padded row is the last one.
        assert all(marks[:-1])
        padded += marks.count(False)
        own += own_rows(batches)
    assert len(sizes) == 1
    assert sorted(own) == ROWS
    assert padded == -NUM_ROWS % count


def test_which_row_is_dropped_moves_with_the_epoch(converter: DatasetConverter) -> None:
    dropped = []
    loaders = [make(converter, cur_shard=index, shard_count=3, num_epochs=None, uneven="drop") for index in range(3)]
    iterators = [iter(loader) for loader in loaders]
    for _ in range(68):
        read = [row for iterator in iterators for row in flat(itertools.islice(iterator, 3))]
        assert len(read) == len(set(read)) == NUM_ROWS - NUM_ROWS % 3
        dropped.append(sorted(set(ROWS) - set(read)))
    for loader in loaders:
        loader.__exit__(None, None, None)
    # Each of the two larger shards has 34 rows, and in 34 epochs each of them is left out once.
    left_out = Counter(itertools.chain(*dropped))
    assert dropped[0] != dropped[1]
    assert set(left_out.values()) == {2}
    assert len(left_out) == 68


# All rows mixed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("window", ["all", 6])
def test_all_rows_mixed_are_a_uniform_permutation_and_those_of_a_window_are_not(
    tmp_path_factory: pytest.TempPathFactory, window: Any
) -> None:
    num_rows, num_epochs = 16, 500
    directory = tmp_path_factory.mktemp("mixed")
    with write_converter(directory, (ID,), [[range(11)], [range(11, num_rows)]], row_group_bytes=32) as few:
        assert few._manifest.num_row_groups >= 4
        options: dict[str, Any] = {"shuffle": True, "seed": 5, "batch_size": num_rows, "num_epochs": num_epochs}
        with few.make_batch_reader(shuffle_window_rows=window, **options) as reader:
            orders = np.array(rows_of(reader))
    assert (np.sort(orders, axis=1) == np.arange(num_rows)).all()
    assert len({tuple(order) for order in orders.tolist()}) == num_epochs
    counts = np.zeros((num_rows, num_rows))
    np.add.at(counts, (np.broadcast_to(np.arange(num_rows), orders.shape), orders), 1)
    expected = num_epochs / num_rows
    # Whether a row is as often in each place, and as often behind each other one.
    places = ((counts - expected) ** 2 / expected).sum()
    follows = np.zeros((num_rows, num_rows))
    np.add.at(follows, (orders[:, :-1], orders[:, 1:]), 1)
    pairs = num_epochs / num_rows
    neighbours = ((follows - pairs) ** 2 / pairs)[~np.eye(num_rows, dtype=bool)].sum()
    degrees = (num_rows - 1) ** 2
    limit = degrees + 6 * np.sqrt(2 * degrees)
    if window == "all":
        assert places < limit
        assert neighbours < limit + num_rows
    else:
        assert neighbours > 5 * limit


# How many batches are left, and what a loader says of itself


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_remains_is_what_the_next_iteration_gives(converter: DatasetConverter, framework: str) -> None:
    for num_epochs in (1, 3):
        options: dict[str, Any] = {"shuffle": True, "num_epochs": num_epochs}
        with make(converter, framework, **options) as loader:
            batches = iter(loader)
            for _ in range(3):
                next(batches)
            state, whole = loader.state_dict(), loader.remaining
        assert whole == num_epochs * STEPS
        with make(converter, framework, **options) as fresh:
            fresh.load_state_dict(state)
            assert fresh.remaining == whole - 3
            assert len(list(fresh)) == whole - 3
            assert fresh.remaining == whole
    with make(converter, framework, num_epochs=None) as endless, pytest.raises(TypeError, match="no last batch"):
        assert endless.remaining


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loader_says_in_one_line_what_it_is(converter: DatasetConverter, framework: str) -> None:
    with make(converter, framework, shuffle=True, seed=5, num_epochs=3, cur_shard=1, shard_count=2) as loader:
        said = repr(loader)
        for one in ("50 rows in ", f"batches of {BATCH} × 3 epochs", "columns id", "shard 1 of 2", "seed 5", "epoch 0"):
            assert one in said
        assert "\n" not in said
        assert " at 0x" not in said
        assert "<tr><th>shard</th><td>1 of 2</td></tr>" in loader._repr_html_()
        loader.set_epoch(2)
        assert "epoch 2" in repr(loader)
    assert repr(loader).endswith(", closed)")


# States from elsewhere


STRANGE: list[Any] = [
    0, 1, -1, 2, 7, 100, 101, 102, 2**31, 2**53 + 1, 2**62, 2**63, 10**12, 10**400, 0.0, 2.5, True, False, None, "",
    float("inf"), float("-inf"), float("nan"), "9" * 50, [], [[]], {}, [1, 2, 3], [[2, 3]] * 3000,
    [[101, 1], [100, 1]] * 999,
]  # fmt: skip


def mutated_states(good: dict[str, Any], seed: int, count: int) -> list[Any]:
    """States of which some values were replaced, left out or put into one another."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        state: Any = json.loads(json.dumps(good))
        for _ in range(chance.choice((1, 1, 2))):
            name = chance.choice([*state])
            kind = chance.randrange(6)
            if kind == 0:
                del state[name]
                state = state or dict(good)
            elif kind == 1 and state.get("past"):
                stretch = state["past"] if chance.random() < 0.3 else chance.choice(state["past"])
                if isinstance(stretch, list) and stretch:
                    stretch[chance.randrange(len(stretch))] = chance.choice(STRANGE)
            elif kind == 2 and isinstance(state.get("past"), list):
                state["past"] = state["past"] * chance.choice((2, 50, 4000))
            else:
                state[name] = chance.choice(STRANGE)
        found.append(state)
    return found


def load_mutated_states(directory: str, seed: int, count: int) -> dict[str, int]:
    """What became of states that were mutated; raises what is no answer."""
    outcomes: Counter[str] = Counter()
    with write_converter(directory, (ID,), [[range(NUM_ROWS)]], row_group_bytes=200) as converter:
        for uneven in ("keep", "drop", "pad"):
            options: dict[str, Any] = {"shuffle": True, "uneven": uneven, "num_epochs": 2, "columns": ["id"]}
            with converter.make_batch_reader(batch_size=7, cur_shard=0, shard_count=3, **options) as reader:
                list(itertools.islice(reader, 2))
                good = reader.state_dict()
            with converter.make_batch_reader(batch_size=9, cur_shard=1, shard_count=2, **options) as reader:
                reader.load_state_dict(good)
                list(itertools.islice(reader, 1))
                good = reader.state_dict()
            assert len(good["past"]) == 2
            for state in mutated_states(good, seed, count):
                with converter.make_batch_reader(batch_size=50, cur_shard=1, shard_count=2, **options) as reader:
                    try:
                        reader.load_state_dict(state)
                    except (StateMismatchError, ValueError, TypeError) as error:
                        outcomes[type(error).__name__] += 1
                        continue
                    assert reader.remaining <= len(reader)
                    rows = [row for batch in reader for row in batch["id"].tolist()]
                    assert len(rows) <= 2 * (NUM_ROWS // 2 + 1)
                    assert reader.state_dict()["past"] == []
                    outcomes["rows"] += 1
    return dict(outcomes)


@pytest.mark.timeout(60)
def test_a_state_from_elsewhere_continues_or_is_refused(tmp_path: Path) -> None:
    outcomes = load_mutated_states(str(tmp_path), 1, 40)
    assert sum(outcomes.values()) == 3 * 40
    assert outcomes["rows"] > 3
    assert outcomes["StateMismatchError"] > 40


@pytest.mark.long("1,000 states, in a process that can be ended")
@pytest.mark.timeout(200)
def test_a_state_from_elsewhere_continues_or_is_refused_and_never_hangs(tmp_path: Path) -> None:
    outcomes = run_python(load_mutated_states, str(tmp_path), 0, 350)
    assert sum(outcomes.values()) == 3 * 350
    assert outcomes["rows"] > 30
    assert outcomes["StateMismatchError"] > 300
