"""A store that hangs ends the task, and nothing is committed."""

from __future__ import annotations

import math
import threading
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from converter.portable import deadlines, parquet_file, tasks
from tests.entries import make_spec
from tests.unit.portable.one_column import (
    WIDE,
    batches_of,
    wide_batch,
)


class Remote(MemoryFileSystem):
    """A store whose requests of one kind hang until they are released."""

    protocol = "remote"
    cachable = False
    hangs: ClassVar[str] = ""
    is_released: ClassVar[threading.Event] = threading.Event()

    def _open(self, path: str, *_: Any, **__: Any) -> Any:
        self.ask("create")
        return RemoteFile(self, path, mode="wb", block_size=1 << 16)

    def ask(self, request: str) -> None:
        if self.hangs == request:
            self.is_released.wait()


class RemoteFile(AbstractBufferedFile):
    """Sends whole blocks, as adlfs does."""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.ask("close" if final else "send")
        if final:
            MemoryFileSystem().pipe_file(self.path, b"whole")
        return True


@pytest.mark.one_in(3)
@pytest.mark.parametrize("hangs", ["create", "send", "close"])
def test_a_request_that_hangs_ends_the_task_and_commits_nothing(monkeypatch: pytest.MonkeyPatch, hangs: str) -> None:
    fsspec.register_implementation("remote", Remote, clobber=True)
    monkeypatch.setattr(deadlines, "LAST_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(parquet_file, "LAST_WAIT_SECONDS", 0.2)
    monkeypatch.setattr(Remote, "hangs", hangs)
    monkeypatch.setattr(Remote, "is_released", threading.Event())
    spec = make_spec(f"/given-up/{hangs}", [WIDE], row_group_bytes=64 << 10)
    spec["store"] = {"protocol": "remote", "options": {}, "timeout_seconds": 0.3}
    with pytest.raises(TimeoutError, match=r"made no progress for 0\.[34] seconds \(timeout_seconds\) at /given-up/"):
        tasks._write(iter(batches_of(wide_batch(range(10_000)))), spec, partition=0, attempt=1)
    assert not Remote().find(f"/given-up/{hangs}")
    Remote.is_released.set()


def test_a_large_request_gets_more_time() -> None:
    store: Any = {"timeout_seconds": 5}
    assert deadlines.seconds_for(None, 1 << 40) == math.inf
    assert deadlines.seconds_for(store) == 5
    assert deadlines.seconds_for(store, 100 * deadlines.SLOW_BYTES_PER_SECOND) == 105
