"""Ranks that others than torch start find their parts by themselves: MPI, JAX, Keras, a barrier stage of Spark.

All are real processes, which open the rows by their URL or get a converter. In each of two shuffled epochs every row
comes once, each rank reads in the order that one process gives for its part, and all take equally many steps.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from converter import DatasetConverter, open_converter
from tests.compat.launchers import make_environment
from tests.processes import run_python

NUM_ROWS = 240
NUM_EPOCHS = 2
SHUFFLED: dict[str, Any] = {"batch_size": 10, "shuffle": True, "seed": 3, "shuffle_window_rows": 40}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Two files of several row groups."""
    # These import torch, which takes three seconds: most ranks import this module and need no torch.
    from tests.columns import ID, TENSORS
    from tests.entries import write_converter

    partitions = [[range(100)], [range(100, NUM_ROWS)]]
    with write_converter(tmp_path_factory.mktemp("rows"), (ID, TENSORS[0]), partitions, row_group_bytes=200) as found:
        assert found._manifest.num_row_groups > 8
        yield found


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a Python with JAX is, and mpiexec."""
    return make_environment(tmp_path_factory.mktemp("python"), "jax", "mpich") / "bin"


def steps_of(batches: Iterable[Any]) -> list[list[int]]:
    """The rows of each step."""
    return [batch["id"].tolist() for batch in batches]


def assert_parted(rows: DatasetConverter, parts: Sequence[Any]) -> None:
    """`parts` are what the ranks tell: rank, number of ranks, and the rows of each step in each epoch."""
    expected = []
    for rank in range(len(parts)):
        with rows.make_batch_reader(**SHUFFLED, cur_shard=rank, shard_count=len(parts)) as reader:
            expected.append([rank, len(parts), [steps_of(reader) for _ in range(NUM_EPOCHS)]])
    assert list(parts) == expected
    for epoch in range(NUM_EPOCHS):
        steps = [epochs[epoch] for _, _, epochs in parts]
        assert len(set(map(len, steps))) == 1
        assert sorted(itertools.chain(*itertools.chain(*steps))) == list(range(NUM_ROWS))


# MPI -----------------------------------------------------------------------------------------


def note_steps(url: str, folder: str) -> None:
    """Read two epochs, and leave what this rank tells in `folder`."""
    with open_converter(url) as converter, converter.make_batch_reader(**SHUFFLED) as reader:
        plan = converter.plan(**SHUFFLED)
        told = [plan.cur_shard, plan.shard_count, [steps_of(reader) for _ in range(NUM_EPOCHS)]]
    Path(folder, f"{plan.cur_shard}.json").write_text(json.dumps(told))


def test_ranks_of_mpiexec_read_every_row_once(rows: DatasetConverter, programs: Path, tmp_path: Path) -> None:
    command = [programs / "mpiexec", "-n", "3", programs / "python"]
    run_python(note_steps, rows.url, str(tmp_path), command=command)
    assert_parted(rows, [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())])
