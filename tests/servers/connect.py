"""One local server of Spark Connect at a time: all of them listen on port 15002 of this machine."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def only_connect_server() -> Iterator[None]:
    """Hold the lock of that port for a block, against tests in other processes too."""
    with open(Path(tempfile.gettempdir()) / "spark-tensor-converter-tests-connect.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
