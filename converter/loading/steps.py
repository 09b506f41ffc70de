"""The steps of a loop over a loader: how many, how long, and for how much of that the loop waited for a batch."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Protocol

from converter.plan import EpochPlan
from converter.reading.meter import Every, Meter

_MAX_STEPS = 512
"""How many of the last timed steps are kept, for pictures."""


class Progress(Protocol):
    """Where an iteration stands in an epoch."""

    num_batches: int
    """Batches of this epoch that the loop has received."""


class Steps:
    """Counts the steps of one iteration. Quick ones are timed now and then, so that counting costs next to nothing."""

    def __init__(self, meter: Meter, *, is_coarse: bool = False) -> None:
        self._meter = meter
        self.is_coarse = is_coarse
        """Whether the loop takes many batches at once, so that its steps are not seen."""

        self.num_peeks = 0
        """How many iterations in a row, up to the one before, were left after their first batch."""

        self.every = Every()
        """Which steps are timed."""

        self.begun: float | None = None
        """When the first batch was asked for."""

        self.last = 0.0
        """When the loop was last seen."""

        self.first_waited = 0.0
        """Seconds that the loop waited for its first batch."""

        self._first_blocked = 0.0
        self._handing = 0.0
        self._asked_before = 0.0
        self._blocked_before = 0.0
        self.timed: deque[tuple[float, float]] = deque(maxlen=_MAX_STEPS)
        """When the loop asked for a batch, and when it got it."""

        self._done_batches = self._done_rows = 0
        self._plan: EpochPlan | None = None
        self._progress: Progress | None = None
        self._owner, self._cpu_begun = 0, 0.0
        self._process_begun = 0.0

    def ask(self) -> float:
        """Note that the loop asks for a batch; returns when."""
        asked = time.perf_counter()
        if self.begun is None:
            self._meter.restart()
            self.begun = self._asked_before = self.last = asked
            self._owner, self._cpu_begun, self._process_begun = (
                threading.get_ident(),
                time.thread_time(),
                time.process_time(),
            )
        self._blocked_before = self._blocked()
        return asked

    def receive(self, asked: float) -> None:
        """Note that the batch that was asked for has come."""
        received = time.perf_counter()
        if not self.timed:
            self.first_waited, self._first_blocked = received - asked, self._blocked() - self._blocked_before
        else:
            blocked = self._blocked() - self._blocked_before
            self._handing += self.every.weight * max(0.0, received - asked - blocked)
        # A step is what lies between two questions.
        self.every.took((asked - self._asked_before) / self.every.weight if self.timed else 1.0)
        self._asked_before, self.last = asked, received
        self.timed.append((asked, received))

    def end(self) -> None:
        """Note that the loop has ended."""
        if self.begun is not None:
            self.last = time.perf_counter()

    def note_batch(self) -> None:
        """Count a batch, of a loop whose batches nobody else counts."""
        if self._progress is not None:
            self._progress.num_batches += 1

    def count(self, plan: EpochPlan, progress: Progress) -> None:
        """Count the batches of another epoch, as `progress` does."""
        self._done_batches, self._done_rows = self.batches, self.rows
        self._plan, self._progress = plan, progress

    def follow(self, before: Steps) -> None:
        """Note which iteration came before this one."""
        self.num_peeks = before.num_peeks + 1 if before.is_peek else 0

    @property
    def is_peek(self) -> bool:
        """Whether the loop has received one batch of an epoch that has more."""
        return not self.is_coarse and self.batches == 1 and self._plan is not None and self._plan.num_batches > 1

    @property
    def batches(self) -> int:
        """Batches that the loop has received."""
        return self._done_batches + (0 if self._progress is None else self._progress.num_batches)

    @property
    def rows(self) -> int:
        """Rows of these batches."""
        if self._plan is None or self._progress is None:
            return 0
        return self._done_rows + min(self._progress.num_batches * self._plan.batch_size, self._plan.num_rows)

    @property
    def seconds(self) -> float:
        """From the first question to the last sign of the loop."""
        return 0.0 if self.begun is None else self.last - self.begun

    @property
    def waited_seconds(self) -> float:
        """Seconds in which the loop waited for batches, the first one among them."""
        return min(self.seconds, self.first_waited + self._blocked() - self._first_blocked + self._handing)

    @property
    def handing_seconds(self) -> float:
        """Of which its own thread cut batches and made tensors."""
        return self._handing

    @property
    def cpu_seconds(self) -> float | None:
        """Processor seconds of the loop's own thread; None if asked in another thread."""
        if self.begun is None or threading.get_ident() != self._owner:
            return None
        return time.thread_time() - self._cpu_begun

    @property
    def process_seconds(self) -> float:
        """Processor seconds of the whole process."""
        return 0.0 if self.begun is None else time.process_time() - self._process_begun

    def _blocked(self) -> float:
        return sum(self._meter.blocked.values())
