"""What is said of a loop whose figures are given; tests/integration/test_verdicts.py measures real ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, make_parquet_converter
from converter.loading import steps
from converter.loading.verdict import Verdict, judge
from converter.reading.meter import Work


@dataclass(kw_only=True)
class Loop:
    """Ten seconds of a loop in which it waited for eight, after a quick start."""

    batches: int = 1_000
    rows: int = 100_000
    seconds: float = 10.1
    first_waited: float = 0.1
    waited_seconds: float = 8.1
    handing_seconds: float = 0.0
    cpu_seconds: float | None = 0.5
    process_seconds: float = 16.0
    is_coarse: bool = False
    is_peek: bool = False
    num_peeks: int = 0


@dataclass(kw_only=True)
class Figures:
    loop: Loop = field(default_factory=Loop)
    work: dict[str, Work] = field(default_factory=dict)
    blocked: dict[str, float] = field(default_factory=lambda: {"read": 8.0})
    bytes_from_disk: int = 0
    bytes_from_copies: int = 0
    num_workers: int = 0
    has_processes: bool = True
    num_cores: int = 2


def reading(seconds: float, worked: float, num_bytes: int = 4_000_000_000, **others: float) -> dict[str, Work]:
    """Two threads that decode and gather, of which the processor worked for a part."""
    work = {
        stage: Work(seconds=seconds / 2, cpu_seconds=seconds / 2 * worked, count=40, num_bytes=num_bytes)
        for stage in ("decode", "gather")
    }
    return work | {stage: Work(seconds=took, cpu_seconds=0.1 * took, count=40) for stage, took in others.items()}


class Readers:
    """A meter whose figures are given."""

    def __init__(self) -> None:
        self.blocked = {"read": 0.0}

    def restart(self) -> None:
        pass


def test_the_wait_for_the_first_batch_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    times = dict.fromkeys(("thread_time", "process_time"), lambda: 0.0)
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=lambda: clock.now, **times))
    readers: Any = Readers()
    loop = steps.Steps(readers)
    for blocked, worked in ((2.0, 1.0), (1.0, 1.0)):
        asked = loop.ask()
        readers.blocked["read"] += blocked
        clock.now += blocked
        loop.receive(asked)
        clock.now += worked
    loop.end()
    assert (loop.first_waited, loop.waited_seconds, loop.seconds) == (2.0, 3.0, 5.0)


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> DatasetConverter:
    """Row groups of 800 kB."""
    path = tmp_path_factory.mktemp("rows") / "0.parquet"
    pq.write_table(pa.table({"x": np.arange(1_000_000.0)}), path, row_group_size=100_000)
    return make_parquet_converter(path)


CASES: dict[str, tuple[Figures, str, str]] = {
    "nothing read": (Figures(loop=Loop(batches=0, seconds=0.0, first_waited=0.0)), "start", "no batch was read yet"),
    "two batches": (
        Figures(loop=Loop(batches=2, seconds=1.0, first_waited=0.9)),
        "start", "after 0.9 of 1 s, and 2 batches are too few",
    ),
    "a peek before the epoch": (
        Figures(loop=Loop(batches=1, seconds=1.0, first_waited=1.0, is_peek=True, num_peeks=2)),
        "start", "1 batch is too few",
    ),
    "an iteration for each step": (
        Figures(loop=Loop(batches=1, seconds=1.0, first_waited=1.0, is_peek=True, num_peeks=1_234)),
        "restarts", "1,235 iterations in a row ended after their first batch, which took 1 s; next(iter(loader))",
    ),
    "over at once": (Figures(loop=Loop(batches=90, seconds=0.04)), "start", "90 batches are too few"),
    "all at once, after a while": (
        Figures(
            loop=Loop(seconds=8.7, first_waited=8.4, waited_seconds=8.5), blocked={"workers": 8.5}, num_workers=2,
            work={"transform": Work(seconds=16.0, cpu_seconds=15.0, count=600)},
        ),
        "transform", "waited 98% of the time, and a call takes 26.7 ms",
    ),
    "a transform that waits in processes": (
        Figures(
            blocked={"workers": 8.0}, work={"transform": Work(seconds=16.0, cpu_seconds=0.2, count=600)}, num_workers=2,
        ),
        "transform", "threads would do: num_workers=0",
    ),
    "windows of TensorFlow": (
        Figures(loop=Loop(batches=2, is_coarse=True)),
        "start", "only whole windows are seen, and it has used up 2 batches",
    ),
    "little waiting": (
        Figures(loop=Loop(waited_seconds=0.6)), "model", "waited 5.0% of the time for data (0.5 of 10 s)",
    ),
    "busy cores": (
        Figures(work=reading(16.0, 0.95)), "processor", "waited 80% of the time, and the process used 1.6 of 2 cores",
    ),
    "cold files": (
        Figures(work=reading(16.0, 0.2), bytes_from_disk=3_000_000_000), "disk", "3,000 MB came from it at 297 MB/s",
    ),
    "no cores left": (
        Figures(work=reading(16.0, 0.3)), "other programs", "had a processor for only 30% of their 16 s",
    ),
    "more threads than cores": (Figures(work=reading(40.0, 0.4), num_cores=2), "processor", "1.6 of 2 cores"),
    "the loop holds the lock": (
        Figures(loop=Loop(waited_seconds=4.1, cpu_seconds=5.5), work=reading(9.0, 0.4), blocked={"read": 4.0}),
        "lock", "num_workers=1 would read in another process",
    ),
    "the lock, without processes": (
        Figures(
            loop=Loop(waited_seconds=4.1, cpu_seconds=5.5), work=reading(9.0, 0.4), blocked={"read": 4.0},
            has_processes=False,
        ),
        "lock", "call compiled code instead",
    ),
    "a loop of another thread": (
        Figures(
            loop=Loop(waited_seconds=4.1, cpu_seconds=None), work=reading(9.0, 0.4), blocked={"read": 4.0},
        ),
        "other programs", "for only 40%",
    ),
    "a store": (
        Figures(work=reading(1.0, 0.9) | {"fetch": Work(seconds=15.0, num_bytes=10_100_000)}),
        "store", "10 MB came at 1 MB/s; a local_cache_dir would keep them",
    ),
    "opening": (
        Figures(work=reading(4.0, 0.9, open=12.0)), "files", "opening 1 file of about 1,000,000 rows took 12 s",
    ),
    "a transform that computes": (
        Figures(
            blocked={"transform": 7.9, "read": 0.1},
            work={"transform": Work(seconds=16.0, cpu_seconds=8.0, count=1_000)},
        ),
        "transform", "a call takes 16 ms; num_workers=2 would run it in processes",
    ),
    "a transform that waits": (
        Figures(
            blocked={"transform": 8.0}, work={"transform": Work(seconds=16.0, cpu_seconds=0.2, count=1_000)},
        ),
        "transform", "it waits rather than computes, so workers_count=",
    ),
    "a transform without processes": (
        Figures(
            blocked={"transform": 8.0}, work={"transform": Work(seconds=16.0, cpu_seconds=8.0, count=1_000)},
            has_processes=False,
        ),
        "transform", "make it work on whole arrays",
    ),
    "a transform in too few processes": (
        Figures(
            blocked={"workers": 8.0}, work={"transform": Work(seconds=16.0, cpu_seconds=16.0, count=1_000)},
            num_workers=2, num_cores=16,
        ),
        "transform", "num_workers=8 would help if there are cores for them",
    ),
    "images": (
        Figures(blocked={"decode bytes": 8.0}, work={"decode bytes": Work(seconds=16.0, cpu_seconds=15.0)}),
        "decode", "a thread decodes 6,250 rows/s",
    ),
    "a device": (
        Figures(loop=Loop(handing_seconds=7.5), work={"copy": Work(seconds=7.0)}, blocked={}),
        "copy", "7 s of it for copies",
    ),
    "processes that wait": (
        Figures(blocked={"workers": 8.0}, work=reading(2.0, 0.9), num_workers=2),
        "processes", "num_workers=0 is faster",
    ),
    "handing over": (
        Figures(loop=Loop(handing_seconds=7.5, batches=1_000_000), blocked={"read": 0.5}),
        "batches", "each batch of 16 rows takes 7.5 µs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_cause_of_the_largest_wait_is_named(name: str, converter: DatasetConverter) -> None:
    figures, limit, said = CASES[name]
    verdict = judged(converter, figures, batch_size=16)
    assert verdict.limit == limit, verdict
    assert said in verdict.sentence
    assert verdict.sentence.endswith(".")
    assert len(verdict.sentence) < 240


def judged(converter: DatasetConverter, figures: Figures, **options: Any) -> Verdict:
    with converter.make_torch_dataloader(**options) as loader:
        source = loader.source
    loop: Any = figures.loop
    return judge(
        source, loop, figures.work, blocked=figures.blocked, bytes_from_disk=figures.bytes_from_disk,
        bytes_from_copies=figures.bytes_from_copies, num_workers=figures.num_workers,
        has_processes=figures.has_processes, num_cores=figures.num_cores,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "rows", "columns", "row_group_rows", "files", "limit", "said"),
    [
        ({}, 100_000, 2, 500, 1, "row groups", "they have 500 rows (8 kB)"),
        ({"shuffle": True, "shuffle_window_rows": 1_000}, 100_000, 2, 1_000, 1, "windows", "shuffle_window_rows=1,000"),
        ({}, 2_000, 2, 500, 4, "files", "opening 4 files of about 500 rows"),
        ({}, 1_000, 300, 500, 1, "columns", "300 columns of 4 kB"),
    ],
)
@pytest.mark.parametrize("blocked", [{"read": 8.0}, {}])
def test_files_that_are_cut_too_small_are_named(
    tmp_path: Path,
    options: dict[str, Any],
    rows: int,
    columns: int,
    row_group_rows: int,
    files: int,
    limit: str,
    said: str,
    blocked: dict[str, float],
) -> None:
    table = pa.table({f"c{number}": np.arange(rows // files) for number in range(columns)})
    for number in range(files):
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=row_group_rows)
    work = reading(14.0, 0.9, num_bytes=4_000_000)
    figures = Figures(loop=Loop(handing_seconds=0.0 if blocked else 7.0), work=work, blocked=blocked)
    verdict = judged(make_parquet_converter(tmp_path), figures, batch_size=16, **options)
    assert verdict.limit == limit, verdict
    assert said in verdict.sentence
