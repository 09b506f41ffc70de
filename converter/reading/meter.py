"""What readers spend their time on: the seconds, processor seconds and bytes of each stage of one iteration.

Reading the clock takes 0.2 µs and a thread's processor time 1.6 µs, so both are read once for each window, and what is
done for each batch is timed for each batch only if it is slow, and else for every sixteenth.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

try:
    import resource
except ImportError:  # pragma: no cover
    # Windows has none.
    resource = None  # type: ignore[assignment]

Stage = Literal["open", "fetch", "decode", "gather", "decode bytes", "transform", "copy"]
"""In the order in which a row passes them."""

EVERY = 16
"""Of quick pieces of work, how many come to one that is timed."""

SLOW_SECONDS = 200e-6
"""Work that takes longer is timed each time: to time it costs less than half a percent."""

_MAX_SPANS = 2048
_BLOCK_BYTES = 512
"""What the kernel counts reads from disks in."""


@dataclass(slots=True, kw_only=True)
class Work:
    """What one stage did; seconds are summed over threads."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of which the processor worked; the rest is waiting: for a store, a disk, Python's lock or a busy core."""

    num_bytes: int = 0
    count: int = 0
    """Windows, batches or pieces of them."""

    def add(self, other: Work) -> None:
        """Add what another process did."""
        self.seconds += other.seconds
        self.cpu_seconds += other.cpu_seconds
        self.num_bytes += other.num_bytes
        self.count += other.count


Span = tuple[str, float, float]
"""A stage, and when a piece of its work began and ended."""


class Meter:
    """Counts the work of an iteration; used by several threads at once."""

    def __init__(self) -> None:
        # A signal's handler may ask for the stats while this thread holds it.
        self._lock = threading.RLock()
        self.restart()

    def restart(self) -> None:
        """Forget everything: another iteration begins."""
        with self._lock:
            self.begun = time.perf_counter()
            self._work: dict[str, Work] = {}
            self.blocked: dict[str, float] = {}
            """Seconds that the loop's own thread waited for the threads of a stage."""

            self.bytes_from_disk = self.bytes_from_copies = 0
            self.spans: deque[Span] = deque(maxlen=_MAX_SPANS)
            self.of_processes: dict[int, Mapping[str, Work]] = {}
            """What worker processes have reported."""

    def add(
        self,
        stage: Stage,
        began: float,
        ended: float,
        *,
        cpu_seconds: float = 0.0,
        num_bytes: int = 0,
        weight: int = 1,
    ) -> None:
        """Note a piece of work that stands for `weight` like it."""
        with self._lock:
            work = self._work.setdefault(stage, Work())
            work.seconds += weight * (ended - began)
            work.cpu_seconds += weight * cpu_seconds
            work.num_bytes += num_bytes
            work.count += weight
            self.spans.append((stage, began, ended))

    @contextlib.contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Around a piece of work that takes long enough to read the clock twice."""
        began, cpu_began = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            cpu_seconds = time.thread_time() - cpu_began
            self.add(stage, began, time.perf_counter(), cpu_seconds=cpu_seconds)

    def add_read(self, from_disk: int) -> None:
        """Note bytes that came from a disk, because they were not in the page cache."""
        with self._lock:
            self.bytes_from_disk += from_disk

    def add_fetched(self, began: float, num_bytes: int, num_bytes_of_copies: int) -> None:
        """Note what was fetched: from a store, and from this host's copies. Those who wait for it note the seconds."""
        with self._lock:
            work = self._work.setdefault("fetch", Work())
            work.num_bytes += num_bytes
            work.count += 1
            self.bytes_from_copies += num_bytes_of_copies
            self.spans.append(("fetch", began, time.perf_counter()))

    def add_waited(self, stage: Stage, seconds: float) -> None:
        """Note that a reader waited for a stage that other threads do."""
        with self._lock:
            self._work.setdefault(stage, Work()).seconds += seconds

    @contextlib.contextmanager
    def blocking(self, pool: str) -> Iterator[None]:
        """Around a wait of the loop's own thread for the threads of a stage."""
        began = time.perf_counter()
        try:
            yield
        finally:
            # One thread alone waits, so there is no lock.
            self.blocked[pool] = self.blocked.get(pool, 0.0) + time.perf_counter() - began

    @property
    def work(self) -> dict[str, Work]:
        """What this process did, by stage."""
        with self._lock:
            return {stage: replace(work) for stage, work in self._work.items()}

    def report(self, worker: int, work: Mapping[str, Work]) -> None:
        """Note what a worker process has done since it began."""
        self.of_processes[worker] = work


class Every:
    """Which of many like pieces of work are timed; threads may share it."""

    def __init__(self) -> None:
        self._left, self.weight = 0, 1

    def is_next(self) -> bool:
        """Whether the next piece is timed."""
        if self._left:
            self._left -= 1
            return False
        return True

    def took(self, seconds: float) -> None:
        """Note how long a timed piece took."""
        self.weight = 1 if seconds > SLOW_SECONDS else EVERY
        self._left = self.weight - 1


def thread_usage() -> tuple[float, int]:
    """The processor seconds of this thread, and the bytes that it has read from disks (0 where nobody counts them)."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return time.thread_time(), 0
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_utime + used.ru_stime, used.ru_inblock * _BLOCK_BYTES


class WindowWork:
    """Times the stages of one window, in the thread that reads it; what none of them took is gathering."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._stage: Stage = "open"
        self._seconds: dict[Stage, float] = {"open": 0.0, "decode": 0.0, "decode bytes": 0.0}
        self._cpu_began, self._disk_began = thread_usage()
        self._began = self._stage_began = time.perf_counter()

    def of(self, stage: Stage) -> WindowWork:
        """Around a part of the work, as a `with` statement has it."""
        self._stage = stage
        return self

    def __enter__(self) -> None:
        self._stage_began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._stage] += time.perf_counter() - self._stage_began

    def done(self, num_bytes: int) -> None:
        """Note the window, which took so many bytes of memory.

        Its processor time is told in proportion, and its stages as if one came after the other.
        """
        began, ended = self._began, time.perf_counter()
        cpu_now, disk_now = thread_usage()
        seconds = ended - began
        stages: dict[Stage, float] = {**self._seconds, "gather": seconds - sum(self._seconds.values())}
        for stage, took in stages.items():
            if took:
                self._meter.add(
                    stage,
                    began,
                    began + took,
                    cpu_seconds=(cpu_now - self._cpu_began) * took / seconds,
                    num_bytes=num_bytes if stage == "gather" else 0,
                )
                began += took
        self._meter.add_read(disk_now - self._disk_began)
