"""How fast the rows of a data set are read here, with which options."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from converter.dataset import DatasetConverter
from converter.errors import SourceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was read in some seconds."""

    workers_count: int | None
    """Reader threads; None for the default."""

    batch_size: int
    rows: int
    """After the first batch."""

    seconds: float
    start_seconds: float
    """Until the first batch: files and threads are opened, and a first window is read."""

    @property
    def rows_per_second(self) -> float:
        """How many rows a second brings."""
        return self.rows / self.seconds

    def seconds_for(self, num_rows: int) -> float:
        """How long an epoch of so many rows takes, from its start."""
        return self.start_seconds + max(0, num_rows - self.batch_size) / self.rows_per_second


def measure(
    rows: DatasetConverter, *, batch_size: int, workers_count: int | None, shuffle: bool, seconds: float
) -> Measured:
    """Read for so many seconds after the first batch, again from the start if the rows are few.

    Raises:
        SourceError: there is no row.
    """
    # pyarrow imports pandas when it first takes an array of NumPy's: up to seconds, but once a process, not an epoch.
    pa.array(np.zeros(1))
    num_rows, opened = 0, time.perf_counter()
    with rows.make_batch_reader(
        batch_size=min(batch_size, max(1, len(rows))), shuffle=shuffle, workers_count=workers_count, num_epochs=None,
        nulls="mask", ragged="nested", cur_shard=0, shard_count=1,
    ) as reader:  # fmt: skip
        batches = iter(reader)
        first = next(batches, None)
        if first is None:
            raise SourceError(f"{rows.url} has no rows.")
        begin = now = time.perf_counter()
        while now - begin < seconds:
            num_rows += len(next(iter(next(batches).values())))
            now = time.perf_counter()
    return Measured(
        workers_count=workers_count,
        batch_size=batch_size,
        rows=num_rows,
        seconds=now - begin,
        start_seconds=begin - opened,
    )


def measure_all(
    rows: DatasetConverter, *, threads: Sequence[int], batch_sizes: Sequence[int], shuffle: bool, seconds: float
) -> list[Measured]:
    """Each number of threads with each batch size."""
    return [
        measure(rows, batch_size=batch_size, workers_count=count, shuffle=shuffle, seconds=seconds)
        for count in threads
        for batch_size in batch_sizes
    ]
