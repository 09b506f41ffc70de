"""Which part of a training a process is: what the user says, else torch or JAX, else whoever started it."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from converter import DatasetConverter, shards
from converter.errors import ConverterError, EmptyShardError
from converter.positions import Shard
from converter.shards import count_processes_of_host, find_shard
from tests.columns import ID, Column
from tests.entries import write_converter
from tests.repository import REPOSITORY

NUM_ROWS = 103
PAIRS = (
    ("RANK", "WORLD_SIZE", "torchrun"),
    ("HOROVOD_RANK", "HOROVOD_SIZE", "Horovod"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI"),
    ("PMI_RANK", "PMI_SIZE", "MPI"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "Slurm"),
)
NAMES = (*itertools.chain(*(pair[:2] for pair in PAIRS)), "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_LOCALID", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def nobody_says_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program that a user starts by hand."""
    assert not torch.distributed.is_initialized()
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    columns = (ID, Column(name="x", dtype="int32"))
    partitions = [[range(50)], [range(50, NUM_ROWS)]]
    with write_converter(tmp_path_factory.mktemp("rows"), columns, partitions, row_group_bytes=120) as found:
        yield found


def say(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], index: Any, count: Any) -> None:
    monkeypatch.setenv(names[0], str(index))
    monkeypatch.setenv(names[1], str(count))


def ids_of(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["id"].tolist()]


def shard_of(converter: DatasetConverter, **options: Any) -> tuple[int, int]:
    """What a plan and both loaders take for this process's part; all must agree."""
    plan = converter.plan(**options)
    readers = (converter.make_batch_reader(**options), converter.make_torch_dataloader(**options))
    expected = ids_of(
        converter.make_batch_reader(**options | {"cur_shard": plan.cur_shard, "shard_count": plan.shard_count})
    )
    for reader in readers:
        assert ids_of(reader) == expected
    assert len(expected) == len(Shard(index=plan.cur_shard, count=plan.shard_count).rows(NUM_ROWS))
    return plan.cur_shard, plan.shard_count


@contextlib.contextmanager
def distributed() -> Iterator[None]:
    """A real process group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# Who is asked first


def test_where_nobody_says_anything_a_process_reads_all(
    converter: DatasetConverter, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="converter.shards"):
        assert shard_of(converter) == (0, 1)
    assert find_shard() == Shard()
    assert not [record for record in caplog.records if record.name == "converter.shards"]


@pytest.mark.parametrize("first", range(len(PAIRS)), ids=[pair[2] for pair in PAIRS])
def test_the_first_who_says_it_is_believed(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    for number, pair in enumerate(PAIRS):
        if number >= first:
            say(monkeypatch, pair, number + 1, number + 3)
    assert shard_of(converter) == (first + 1, first + 3)
    # And the user before all of them.
    assert shard_of(converter, cur_shard=1, shard_count=2) == (1, 2)
    assert shard_of(converter, cur_shard=0, shard_count=1) == (0, 1)


def test_an_environment_that_says_two_ranks_of_as_many_is_refused(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, PAIRS[0], 1, 4)
    say(monkeypatch, PAIRS[4], 3, 4)
    said = r"two ranks of 4: 1 by .*torchrun \(RANK\), and 3 by .*Slurm \(SLURM_PROCID\)\. Remove .* or pass cur_shard"
    with pytest.raises(ValueError, match=said):
        converter.make_batch_reader()
    assert shard_of(converter, cur_shard=1, shard_count=4) == (1, 4)
    with distributed():
        assert shard_of(converter) == (0, 1)
    # The same said twice, and Slurm's one torchrun on each of two machines.
    for rank, count in ((1, 4), (0, 2), ("none", 4)):
        say(monkeypatch, PAIRS[4], rank, count)
        assert shard_of(converter) == (1, 4)


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x125)"}, 8),
        ({"LOCAL_WORLD_SIZE": "none", "HOROVOD_LOCAL_SIZE": "2"}, 2),
        ({"LOCAL_WORLD_SIZE": "0"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_launchers_say_how_many_processes_a_host_has(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], count: int | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert count_processes_of_host() == count


def test_an_initialised_torch_is_believed_before_the_environment(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, PAIRS[0], 1, 3)
    assert shard_of(converter) == (1, 3)
    with distributed():
        assert shard_of(converter) == (0, 1)
        assert shard_of(converter, cur_shard=1, shard_count=2) == (1, 2)
    assert shard_of(converter) == (1, 3)


def test_where_torch_was_not_imported_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, PAIRS[0], 1, 3)
    monkeypatch.delitem(sys.modules, "torch")
    assert find_shard() == Shard(index=1, count=3)


def test_an_initialised_jax_is_believed_before_the_environment_and_after_torch(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Processes of the real one: tests/integration/test_other_launchers.py."""

    def start_devices() -> int:
        assert is_initialized, "initialize() would then be an error"
        return 2

    is_initialized = False
    jax = SimpleNamespace(
        distributed=SimpleNamespace(is_initialized=lambda: is_initialized),
        process_index=start_devices,
        process_count=lambda: 5,
    )
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert shard_of(converter) == (0, 1)
    say(monkeypatch, PAIRS[0], 1, 3)
    assert shard_of(converter) == (1, 3)
    is_initialized = True
    with caplog.at_level(logging.INFO, logger="converter.shards"):
        assert find_shard() == Shard(index=2, count=5)
    assert "Reading shard 2 of 5, as found in jax.distributed." in caplog.text
    assert shard_of(converter) == (2, 5)
    assert shard_of(converter, cur_shard=0, shard_count=1) == (0, 1)
    with distributed():
        assert shard_of(converter) == (0, 1)
    del jax.distributed.is_initialized  # As before 0.5.1.
    assert shard_of(converter) == (1, 3)
    del jax.distributed  # As while it is being imported.
    assert shard_of(converter) == (1, 3)


@pytest.mark.long("starts two processes that import torch")
def test_the_ranks_of_a_training_find_parts_of_their_own(converter: DatasetConverter, tmp_path: Path) -> None:
    (tmp_path / "converter").write_bytes(pickle.dumps(converter))
    program = f"""
        import datetime, json, pickle, sys
        import torch.distributed as dist
        converter = pickle.load(open({str(tmp_path / "converter")!r}, "rb"))
        rank = int(sys.argv[1])
        before = converter.plan()
        store = dist.FileStore({str(tmp_path / "store")!r}, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=100))
        plan = converter.plan()
        with converter.make_torch_dataloader(batch_size=10, shuffle=True) as loader:
            ids = [row for batch in loader for row in batch["id"].tolist()]
        dist.barrier()
        dist.destroy_process_group()
        print(json.dumps([before.shard_count, plan.cur_shard, plan.shard_count, len(loader), ids]))
    """
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(rank)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    try:
        for rank in ranks:
            said, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors
            found.append(json.loads(said))
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [one[:4] for one in found] == [[1, 0, 2, 6], [1, 1, 2, 6]]
    ids = found[0][4] + found[1][4]
    assert len(ids) == len(set(ids)) == NUM_ROWS - 1
    assert set(ids) < set(range(NUM_ROWS))


@pytest.mark.parametrize("pair", PAIRS, ids=[pair[2] for pair in PAIRS])
def test_half_of_it_is_not_taken(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str, str]
) -> None:
    say(monkeypatch, PAIRS[-1] if pair != PAIRS[-1] else PAIRS[-2], 1, 2)
    for name in pair[:2]:
        with monkeypatch.context() as patch:
            patch.setenv(name, "3")
            assert shard_of(converter) == (1, 2)


@pytest.mark.parametrize(
    "said",
    [
        {"SLURM_NTASKS": "4"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"SLURM_NPROCS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"LOCAL_RANK": "1", "WORLD_SIZE": "4"},
    ],
    ids=str,
)
def test_a_script_that_sbatch_runs_by_itself_reads_all(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert shard_of(converter) == (0, 1)


# What is said of it


@pytest.mark.parametrize("pair", PAIRS, ids=[pair[2] for pair in PAIRS])
@pytest.mark.parametrize("kind", ["make_batch_reader", "make_torch_dataloader", "plan"])
def test_one_line_says_what_was_found_and_where(
    converter: DatasetConverter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    pair: tuple[str, str, str],
) -> None:
    say(monkeypatch, pair, 1, 3)
    monkeypatch.setattr("converter.shards._warned_in", None)
    with caplog.at_level(logging.INFO, logger="converter.shards"):
        getattr(converter, kind)(batch_size=10)
        getattr(converter, kind)(batch_size=10)
    said = f"Reading shard 1 of 3, as found in the environment of {pair[2]} ({pair[0]}). "
    lines = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "converter.shards"]
    # A warning once in a process: whoever evaluates on one rank alone would miss the rows of the others.
    assert lines == [
        (level, said + "To read all rows here, pass cur_shard=0, shard_count=1.") for level in ("WARNING", "INFO")
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="converter.shards"):
        getattr(converter, kind)(cur_shard=1, shard_count=3)
        say(monkeypatch, pair, 0, 1)
        getattr(converter, kind)()
    # What the user says needs no telling, nor does it that there is one process.
    assert not [record for record in caplog.records if record.name == "converter.shards"]


@pytest.mark.parametrize("pair", PAIRS, ids=[pair[2] for pair in PAIRS])
@pytest.mark.parametrize(
    ("index", "count"), [("2", "2"), ("-1", "2"), ("0", "0"), ("one", "2"), ("1", "2.0"), ("", "2")]
)
def test_an_environment_that_contradicts_itself_is_named(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str, str], index: str, count: str
) -> None:
    say(monkeypatch, pair, index, count)
    said = (
        rf"{pair[0]}='{index}' and {pair[1]}='{count}' in the environment name no shard.*Pass cur_shard and shard_count"
    )
    for kind in ("make_batch_reader", "make_torch_dataloader", "plan"):
        with pytest.raises(ValueError, match=said):
            getattr(converter, kind)()
    # That is a way out.
    assert shard_of(converter, cur_shard=1, shard_count=2) == (1, 2)


def test_half_of_what_the_user_says_is_not_completed_by_the_environment(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, PAIRS[0], 1, 3)
    for half in ({"cur_shard": 1}, {"shard_count": 3}):
        with pytest.raises(ValueError, match="cur_shard and shard_count go together"):
            converter.make_batch_reader(**half)


def test_more_processes_than_rows_are_refused(converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, PAIRS[0], 1, 200)
    with pytest.raises(EmptyShardError, match="103 rows cannot be divided among 200 shards"):
        converter.make_torch_dataloader()


# What is not divided


def test_our_own_passes_see_all_rows_whatever_shard_this_is(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    say(monkeypatch, PAIRS[0], 1, 4)
    with caplog.at_level(logging.INFO, logger="converter.shards"):
        part = converter.where([("id", ">=", 3)])
        assert len(part) == NUM_ROWS - 3
        statistics = part.statistics["id"]
        assert (statistics.min, statistics.max, statistics.null_count) == (3, NUM_ROWS - 1, 0)
        assert statistics.mean == (3 + NUM_ROWS - 1) / 2
        for by in (None, "id"):
            parts = converter.split({"one": 0.5, "two": 0.5}, by=by)
            assert sum(map(len, parts.values())) == NUM_ROWS
            assert sum(one.statistics["id"].mean * len(one) for one in parts.values()) == sum(range(NUM_ROWS))
        assert len(converter) == NUM_ROWS
    assert not [record for record in caplog.records if record.name == "converter.shards"]
    # A loader's rows are divided after its filter, not before.
    shards = []
    for index in range(4):
        say(monkeypatch, PAIRS[0], index, 4)
        shards.append(ids_of(converter.make_batch_reader(filters=[("id", ">=", 3)])))
    assert [len(shard) for shard in shards] == [25] * 4
    assert sorted(itertools.chain(*shards)) == list(range(3, NUM_ROWS))


def test_a_loader_that_was_made_keeps_its_shard(converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, PAIRS[0], 1, 2)
    with converter.make_torch_dataloader(num_workers=1) as loader:
        say(monkeypatch, PAIRS[0], 0, 2)
        assert ids_of(loader) == ids_of(converter.make_batch_reader(cur_shard=1, shard_count=2))


# What no rank loses, and who is told


@pytest.mark.parametrize("kind", ["make_batch_reader", "make_torch_dataloader"])
def test_ordered_reading_loses_no_row_and_shuffled_takes_equal_steps(converter: DatasetConverter, kind: str) -> None:
    for shuffle, expected in ((False, NUM_ROWS), (True, NUM_ROWS // 4 * 4)):
        shards = [
            ids_of(getattr(converter, kind)(shuffle=shuffle, cur_shard=index, shard_count=4)) for index in range(4)
        ]
        assert len(set(itertools.chain(*shards))) == sum(map(len, shards)) == expected


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        ({"batch_size": 17}, True),  # 25 or 26 rows: two batches each with 17, but not with 25.
        ({"batch_size": 25}, True),
        ({"batch_size": 25, "uneven": "pad"}, False),
        ({"batch_size": 25, "shuffle": True}, False),
        ({"batch_size": 26, "drop_last": True}, True),
        ({"batch_size": 25, "drop_last": True}, False),
        ({"batch_size": 25, "shard_count": 1, "cur_shard": 0}, False),
    ],
    ids=str,
)
def test_ranks_that_would_take_other_numbers_of_steps_are_a_warning(
    converter: DatasetConverter, caplog: pytest.LogCaptureFixture, options: dict[str, Any], is_told: bool
) -> None:
    options = {"cur_shard": 0, "shard_count": 4} | options
    lengths = {
        len(converter.make_batch_reader(**options | {"cur_shard": index})) for index in range(options["shard_count"])
    }
    if options["batch_size"] == 17:
        lengths, is_told = {2}, False
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="converter"):
        converter.make_torch_dataloader(**options)
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING" and "Join" in one.getMessage()]
    assert bool(told) == is_told == (len(lengths) > 1)
    assert all("uneven='pad'" in one and "4 shards" in one for one in told)


def test_a_loader_that_was_made_before_the_processes_met_finds_its_part_when_it_begins(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    makes = (
        lambda: converter.make_batch_reader(batch_size=10),
        lambda: converter.make_torch_dataloader(batch_size=10),
        lambda: converter.make_torch_dataloader(batch_size=10, num_workers=1),
    )
    for make in makes:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        early, pickled = make(), pickle.dumps(make())
        assert len(early) == early.remaining == 11
        say(monkeypatch, PAIRS[0], 1, 2)
        expected = ids_of(converter.make_batch_reader(cur_shard=1, shard_count=2))
        for loader in (early, pickle.loads(pickled)):
            assert len(loader) == 6
            assert ids_of(loader) == expected
            assert "shard 1 of 2" in repr(loader)
        # Once an iteration has begun, its rows are settled.
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        late = make()
        assert len(ids_of(late)) == NUM_ROWS
        say(monkeypatch, PAIRS[0], 1, 2)
        with pytest.raises(ConverterError, match="was made or used before this process was one of 2"):
            ids_of(late)


def test_a_loader_of_a_group_that_is_another_one_now_says_so(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the rows of a rank that was lost would never be read."""
    say(monkeypatch, PAIRS[0], 1, 3)
    kinds = (converter.make_batch_reader, converter.make_torch_dataloader)
    loaders = [kind(batch_size=10) for kind in kinds]
    passed = converter.make_batch_reader(batch_size=10, cur_shard=1, shard_count=3)
    expected = ids_of(passed)
    assert [ids_of(loader) for loader in loaders] == [expected] * 2
    with distributed():
        for loader in loaders:
            with pytest.raises(ConverterError, match=r"reads shard 1 of 3.* it is 0 of 1 now \(torch.distributed\)"):
                ids_of(loader)
        assert ids_of(passed) == expected
    # A group that has ended takes no part away.
    assert [ids_of(loader) for loader in loaders] == [expected] * 2


def test_a_part_that_is_found_late_is_checked_as_one_that_was_found_at_once(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """52 rows make no batch of 60, and an endless loader of none would never return."""
    for kind in ("make_batch_reader", "make_torch_dataloader"):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        late = getattr(converter, kind)(batch_size=60, drop_last=True, num_epochs=None)
        say(monkeypatch, PAIRS[0], 1, 2)
        for _ in range(2):
            with pytest.raises(ValueError, match="an epoch has no batch, for ever with num_epochs=None"):
                next(iter(late))


def test_a_state_that_is_taken_before_the_first_iteration_is_of_the_part_that_is_found(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = converter.make_batch_reader(batch_size=10)
    say(monkeypatch, PAIRS[0], 1, 2)
    assert early.state_dict(batches=2)["past"] == [[2, 20]]


def test_a_part_that_is_passed_and_is_anothers_is_told_once(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shards, "_warned_of_other_in", None)
    say(monkeypatch, PAIRS[0], 1, 2)

    def told(index: int, count: int) -> int:
        caplog.clear()
        converter.make_batch_reader(cur_shard=index, shard_count=count)
        return sum("its rows are not read" in one.getMessage() for one in caplog.records)

    # Its own, all rows, and a part of other parts are nobody's mistake.
    assert [told(1, 2), told(0, 1), told(0, 4)] == [0, 0, 0]
    assert [told(0, 2), told(0, 2)] == [1, 0]
    # Who passes a part need not have a right environment.
    monkeypatch.setattr(shards, "_warned_of_other_in", None)
    monkeypatch.setenv("RANK", "seven")
    assert told(0, 2) == 0
