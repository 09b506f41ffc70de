"""The local disk, or a network folder that is mounted as one, of which calls go wrong; and how the package meets it."""

from __future__ import annotations

import builtins
import contextlib
import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.local import LocalFileSystem

from converter.cache import entries, leases
from converter.portable import deadlines, filesystems
from converter.reading import local_cache
from converter.storage import databricks, handles, local, requests, store
from tests.faults.campaign.store_faults import HANG_SECONDS, LOOK_SECONDS, Halved, clock, hanging
from tests.faults.campaign.store_memory import Current, FaultyFileSystem


class Replaced:
    """A module of which some names are replaced, for one other module alone."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_CALLS = {
    "makedirs": "mkdir", "ls": "ls", "info": "info", "cat_file": "cat", "rm_file": "rm", "rmdir": "rmdir",
    "rm": "rmtree", "link": "put", "unlink": "rm", "utime": "touch", "stat": "stat", "fsync": "close", "open": "open",
    "rename": "rename", "replace": "rename", "listdir": "ls", "scandir": "ls", "memory_map": "map",
    "disk_usage": "stat", "flock": "lock", "fwalk": "ls",
}  # fmt: skip


def faulty(step: Callable[..., Any], call: str | None = None) -> Callable[..., Any]:
    """A function of the local disk, of which calls go wrong; what it told before is kept by `LocalPast`."""
    name = call or _CALLS[step.__name__]

    @functools.wraps(step)
    def called(*arguments: Any, **options: Any) -> Any:
        place = arguments[1] if arguments and isinstance(arguments[0], LocalFileSystem) else arguments[:1]
        past = LocalPast.of(step.__name__, str(place)) if name in ("ls", "info", "cat") else None
        return Current.faults.call(name, str(place), lambda: step(*arguments, **options), past, is_disk=True)

    return called


class LocalPast:
    """What the local filesystem told of the running case's folder when its faults were armed."""

    answers: dict[tuple[str, str], Any] | None = None

    @classmethod
    def note(cls, folder: str) -> None:
        """Ask all that may be asked later."""
        filesystem, cls.answers = LocalFileSystem(), {}
        with Current.faults.off():
            for path, _, names in os.walk(folder):
                cls.answers["ls", path] = filesystem.ls(path, detail=True)
                for name in names:
                    full = os.path.join(path, name)
                    cls.answers["info", full] = filesystem.info(full)
                    with builtins.open(full, "rb") as file:
                        cls.answers["cat_file", full] = file.read()

    @classmethod
    def of(cls, step: str, path: str) -> Callable[[int], Any] | None:
        answers = cls.answers
        if answers is None or step not in ("ls", "info", "cat_file"):
            return None

        def told(age: int) -> Any:
            if (step, path) not in answers:
                raise FileNotFoundError(path)
            return answers[step, path]

        return told


class _LocalFile:
    """A local file that an executor, or a commit, writes."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        def write() -> Any:
            start, num_bytes = self._file.tell(), self._file.write(data)
            return Halved(lambda: self._file.truncate(start + num_bytes // 2)) if num_bytes > 1 else None

        Current.faults.call("write", str(self._file.name), write, is_disk=True)
        return len(data)

    def writelines(self, parts: Iterable[Any]) -> None:
        for part in parts:
            self.write(part)

    def __enter__(self) -> _LocalFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _open_local(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    opened = Current.faults.call(
        "open", str(path), functools.partial(builtins.open, path, mode, *arguments, **options), is_disk=True
    )
    return _LocalFile(opened) if set(mode) & {"w", "x"} else opened


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Let the package meet these stores, this disk and this clock."""
    begin = deadlines.Request.__init__

    def begun(self: Any, call: Callable[[], Any], *, is_native: bool) -> None:
        def noted() -> Any:
            self.thread = threading.get_ident()
            return call()

        self.thread = 0
        begin(self, noted, is_native=is_native)

    def is_answered(self: Any, wait_seconds: float) -> bool:
        deadline = clock.monotonic() + wait_seconds
        while not self._done.wait(LOOK_SECONDS):
            if self.thread in hanging:
                clock.sleep(max(wait_seconds, HANG_SECONDS))
            if clock.monotonic() >= deadline:
                return False
        return True

    for protocol in ("faulty", "s3", "s3a", "abfs", "abfss"):
        fsspec.register_implementation(protocol, FaultyFileSystem, clobber=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadlines.Request, "__init__", begun)
        patch.setattr(deadlines.Request, "is_answered", is_answered)
        for module in (entries, requests, store):
            patch.setattr(module, "time", clock)
        patch.setattr(store, "_FIRST_PAUSE_SECONDS", 0.002)
        patch.setattr(leases, "_LAST_RENEWAL_SECONDS", 0.01)
        for name in ("makedirs", "ls", "info", "cat_file", "rm_file", "rmdir", "rm"):
            patch.setattr(LocalFileSystem, name, faulty(getattr(LocalFileSystem, name)))
        for module in (databricks, handles, local, filesystems, local_cache):
            names = ("makedirs", "link", "unlink", "utime", "stat", "fsync", "rename", "replace", "listdir", "scandir",
                     "rmdir", "fwalk")  # fmt: skip
            replaced: dict[str, Any] = {name: faulty(getattr(os, name)) for name in names}
            if module in (handles, local_cache):
                replaced["open"] = faulty(os.open)
            if module is local_cache:
                patch.setattr(module, "shutil", Replaced(shutil, disk_usage=faulty(shutil.disk_usage)))
            patch.setattr(module, "os", Replaced(os, **replaced))
            patch.setattr(module, "open", _open_local, raising=False)
            if hasattr(module, "pa"):
                patch.setattr(module, "pa", Replaced(pa, memory_map=faulty(pa.memory_map, "map")))
        yield
