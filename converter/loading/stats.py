"""What a loader did, as one record: batches, bytes, the seconds of each stage, and what limits the loop."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from converter.loading.epochs import Epochs
from converter.loading.verdict import Verdict, judge
from converter.reading.bounds import memory_bound
from converter.reading.meter import Span, Work

_STAGES = {
    "open": "open files",
    "fetch": "wait for the store",
    "decode": "decode pages",
    "gather": "gather rows",
    "decode bytes": "decode=",
    "transform": "transform",
    "copy": "copy to device",
}
"""What users call the stages, in the order in which a row passes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """What one stage of reading did; seconds are summed over the threads that did it.

    >>> StageStats(seconds=0.5, cpu_seconds=0.25, num_bytes=0, count=4).seconds
    0.5
    """

    seconds: float
    cpu_seconds: float
    """Of which a processor worked; 0 for waiting."""

    num_bytes: int
    """Bytes that came out of it, where they are counted: of `fetch` and `gather`."""

    count: int
    """Pieces of work: windows of rows, or batches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoaderStats:
    """What a loader did in the iteration that was begun last, until now.

    Printing it says in one sentence what limits the loop, with the figures behind it.

    ```python
    with converter.make_torch_dataloader(batch_size=2) as loader:
        for batch in loader:
            ...
        stats = loader.stats()
    print(stats)
    print(stats.limit, stats.verdict, stats.waited_share, stats.rows_per_second, stats.stages["decode"].seconds)
    ```
    """

    batches: int
    """Batches that the loop received."""

    rows: int
    """Rows of these batches, or sequences."""

    seconds: float
    """From the first batch that was asked for to the end of the loop; while it runs, to its last timed step."""

    waited_seconds: float
    """Seconds of these in which the loop waited for a batch. Of quick steps one in sixteen is timed."""

    first_batch_seconds: float
    """Of which it waited for the first batch: files are opened and a first window is read."""

    stages: Mapping[str, StageStats]
    """By stage, in order: "open" files, "fetch" (readers waited for a store), "decode" pages of Parquet, "gather" rows
    in the order of the batches, "decode bytes" (`decode=`), "transform", "copy" to a device. Of worker processes, too.
    """

    processes: tuple[Mapping[str, StageStats], ...]
    """The same for each worker process, as of the last batches that it sent."""

    room_seconds: float
    """Seconds in which this process's reader threads had nothing to do, as enough windows were waiting for the loop."""

    bytes_fetched: int
    """Bytes that came from the store. Local files are mapped, not fetched."""

    bytes_from_local_cache: int
    """Bytes that came from `local_cache_dir` instead."""

    bytes_from_disk: int
    """Bytes of local files that were not in the page cache."""

    bytes_decoded: int
    """Bytes of the columns, as arrays."""

    memory_bytes: int | None
    """By how much this process has grown since the loader opened its files; None if the system does not tell."""

    told_memory_bytes: int
    """The bound that `plan()` tells, for each reading process."""

    steps: npt.NDArray[np.float64]
    """Shape (n, 2): seconds since the loop began when it asked for a batch and when it got it; the last 512 timed."""

    spans: tuple[Span, ...]
    """The last pieces of reading, at most 2,048: stage, begin and end in the same seconds."""

    _verdict: Verdict = field(repr=False)

    @property
    def limit(self) -> str:
        """What limits the loop, in one or two words: "model", "store", "transform" and so on."""
        return self._verdict.limit

    @property
    def verdict(self) -> str:
        """One sentence: what limits the loop, what shows it, and what would help."""
        return self._verdict.sentence

    @property
    def waited_share(self) -> float:
        """Which part of its time the loop waited for batches, after the first one; from 0 to 1."""
        return share(self.waited_seconds - self.first_batch_seconds, self.seconds - self.first_batch_seconds)

    @property
    def rows_per_second(self) -> float:
        """Rows that the loop received for each second."""
        return self.rows / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        rate = f"{self.rows_per_second:,.0f} rows/s"
        first = f"the first batch after {self.first_batch_seconds:.3g} s"
        lines = [
            self.verdict,
            f"  {self.batches:,} batches, {self.rows:,} rows in {self.seconds:.3g} s ({rate}); {first}",
        ]
        for stage, stats in self.stages.items():
            brought = f", {stats.num_bytes / 1e6:,.1f} MB" if stats.num_bytes else ""
            worked = f", {stats.cpu_seconds:.3g} s of a processor" if stats.cpu_seconds else ""
            lines.append(f"  {_STAGES[stage]:20}{stats.seconds:.3g} s{worked}{brought}")
        if self.memory_bytes is not None:
            lines.append(
                f"  memory              {self.memory_bytes / 1e6:,.0f} MB more than before, "
                f"told {self.told_memory_bytes / 1e6:,.0f} MB"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"LoaderStats({self.batches:,} batches, {self.rows:,} rows, {self.seconds:.3g} s, "
            f"waited {self.waited_share:.1%}, limit {self.limit!r})"
        )


def stats_of(epochs: Epochs, *, num_workers: int = 0, has_processes: bool = False) -> LoaderStats:
    """The record of a loader's last iteration; `has_processes` says whether such a loader may have worker processes."""
    source, steps, meter = epochs.source, epochs.steps, epochs.meter
    begun = steps.begun or 0.0
    work, of_processes = meter.work, [work for _, work in sorted(meter.of_processes.items())]
    window_seconds = sum(work[stage].seconds for stage in ("open", "fetch", "decode", "gather") if stage in work)
    for other in of_processes:
        for stage, done in other.items():
            work.setdefault(stage, Work()).add(done)
    fetched = work["fetch"].num_bytes if "fetch" in work else 0
    timed = np.array(steps.timed, np.float64).reshape(-1, 2)
    judged = judge(
        source,
        steps,
        work,
        blocked=dict(meter.blocked),
        bytes_from_disk=meter.bytes_from_disk,
        bytes_from_copies=meter.bytes_from_copies,
        num_workers=num_workers,
        has_processes=has_processes,
        num_cores=count_cores(),
    )
    return LoaderStats(
        batches=steps.batches,
        rows=steps.rows,
        seconds=steps.seconds,
        waited_seconds=steps.waited_seconds,
        first_batch_seconds=steps.first_waited,
        stages=_in_order(work),
        processes=tuple(map(_in_order, of_processes)),
        room_seconds=0.0 if num_workers else max(0.0, source.workers_count * steps.seconds - window_seconds),
        bytes_fetched=fetched,
        bytes_from_local_cache=meter.bytes_from_copies,
        bytes_from_disk=meter.bytes_from_disk,
        bytes_decoded=work["gather"].num_bytes if "gather" in work else 0,
        memory_bytes=epochs.grown_bytes,
        told_memory_bytes=memory_bound(source, source.plan(epochs.next.epoch)) if source.num_batches() else 0,
        steps=timed - begun,
        spans=tuple((stage, began - begun, ended - begun) for stage, began, ended in list(meter.spans)),
        _verdict=judged,
    )


def count_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share(part: float, whole: float) -> float:
    """A part of a whole, from 0 to 1; 0 of nothing."""
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _in_order(work: Mapping[str, Work]) -> dict[str, StageStats]:
    return {
        stage: StageStats(
            seconds=done.seconds, cpu_seconds=done.cpu_seconds, num_bytes=done.num_bytes, count=done.count
        )
        for stage in _STAGES
        if (done := work.get(stage)) is not None
    }
