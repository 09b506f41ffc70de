"""Tests wait for an event, never for a time: they poll until a deadline, and a Spark job waits for a file.

The tasks' functions are nested: they travel to executors by value, and executors cannot import this module.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def wait_until(claim: Callable[[], Any], *, seconds: float = 240, pause_seconds: float = 0.05) -> None:
    """Return once `claim` holds; fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, f"not within {seconds} s: {claim}"
        time.sleep(pause_seconds)


def meet(folder: str | Path, meeting: object, me: object, other: object) -> None:
    """Return once the process `other` calls this too, for the same meeting, with the two names exchanged."""
    Path(folder, f"{meeting}-{me}").touch()
    # A longer pause would let the process that comes last always go on first.
    wait_until(Path(folder, f"{meeting}-{other}").exists, seconds=60, pause_seconds=0.0005)


def wait_for_file(path: str | Path) -> Callable[[], None]:
    """A function for a Spark task: it returns once the file exists, or after a minute."""
    name = str(path)

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not os.path.exists(name) and time.monotonic() < deadline:
            time.sleep(0.02)

    return wait


def slow_rows(spark: SparkSession, release: str | Path, *, partitions: int = 2) -> DataFrame:
    """Partitions that give enough rows for data files, and the others once the file `release` exists."""
    wait = wait_for_file(release)
    num_rows = 1_200_000  # Two batches of 4 MB that Spark hands on, and a part of the third.

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import numpy as np

        for _ in batches:
            yield pa.record_batch([pa.array(np.arange(num_rows))], names=["id"])
        wait()
        yield pa.record_batch([pa.array(np.arange(10))], names=["id"])

    return spark.range(0, partitions, 1, partitions).mapInArrow(rows, "id long")


def rows_that_wait(spark: SparkSession, flag: str | Path) -> DataFrame:
    """Six rows in two tasks, which do not end before the file `flag` exists."""
    wait = wait_for_file(flag)

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wait()
        yield from batches

    return spark.range(0, 6, 1, 2).mapInArrow(rows, "id long")


@contextlib.contextmanager
def held_elsewhere(lock: Any) -> Iterator[None]:
    """A lock that another thread of this process has."""
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            is_over.wait()

    holding = threading.Thread(target=hold, daemon=True)
    holding.start()
    is_held.wait()
    try:
        yield
    finally:
        is_over.set()
        holding.join()


class ReadStderr(io.StringIO):
    """A stderr that makes the file `flag` once it shows a count of tasks; `rows_that_wait` then go on."""

    def __init__(self, flag: str | Path) -> None:
        super().__init__()
        self.flag = Path(flag)

    def write(self, text: str) -> int:
        # Not "of 2": the job that probes an executor may be counted too.
        if re.search(" of [2-9] tasks", text):
            self.flag.touch()
        return super().write(text)
