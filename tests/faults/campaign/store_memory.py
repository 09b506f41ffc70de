"""Stores in memory, each as its fsspec client answers: one with folders (as SFTP or SMB have), S3 and Azure."""

from __future__ import annotations

import copy
import errno
import io
import itertools
import os
import posixpath
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fsspec.spec import AbstractFileSystem

from tests.faults.campaign.store_faults import SECRET, Faults, Halved, clock

URLS = {
    "folders": "faulty://host/work",
    "s3": "s3://bucket/work",
    "azure": "abfss://lake@account.dfs.core.windows.net/work",
}
ROOTS = {"folders": "host/work", "s3": "bucket/work", "azure": "lake/work"}
"""The same places as paths."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A file or an object."""

    data: bytes
    number: int
    """Of the write; its ETag."""

    modified: float


@dataclass
class View:
    """What a store holds at one time."""

    store: str
    blobs: dict[str, Blob] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()

    def _info(self, path: str) -> dict[str, Any]:
        blob = self.blobs[path]
        info: dict[str, Any] = {"name": path, "type": "file", "size": len(blob.data)}
        if self.store == "folders":
            return info | {"mtime": blob.modified}
        if self.store == "s3":
            return info | {"LastModified": blob.modified, "ETag": f'"{blob.number}"'}
        return info | {"last_modified": blob.modified, "etag": f"{blob.number}"}

    def info(self, path: str) -> dict[str, Any]:
        if path in self.blobs:
            return self._info(path)
        if path in self.folders or any(name.startswith(f"{path}/") for name in self.blobs):
            return {"name": path, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def ls(self, path: str) -> list[dict[str, Any]]:
        if path in self.blobs:
            return [self._info(path)]
        below, found = f"{path}/", {}
        for name in [*self.blobs, *self.folders]:
            if name.startswith(below):
                child = below + name[len(below) :].partition("/")[0]
                is_file = child in self.blobs
                found[child] = self._info(child) if is_file else {"name": child, "type": "directory", "size": 0}
        if not found and path not in self.folders:
            raise FileNotFoundError(path)
        return list(found.values())

    def cat(self, path: str) -> bytes:
        try:
            return self.blobs[path].data
        except KeyError:
            raise FileNotFoundError(path) from None


class Disk:
    """A store in memory, and what it held before each of its last changes."""

    def __init__(self, store: str) -> None:
        self.view = View(store)
        self._past: list[View] = []
        self._numbers = itertools.count(1)

    def past(self, age: int) -> View:
        return self._past[-min(age, len(self._past))] if self._past else self.view

    def forget_past(self) -> None:
        """Let what is there have been there for long."""
        self._past = []

    def _change(self) -> View:
        self._past = [*self._past[-15:], copy.copy(self.view)]
        self.view = View(self.view.store, dict(self.view.blobs), self.view.folders)
        return self.view

    def put(self, path: str, data: bytes, *, is_new: bool = False) -> None:
        if is_new and path in self.view.blobs:
            raise FileExistsError(path)
        self.make_folder(posixpath.dirname(path))
        self._change().blobs[path] = Blob(data, next(self._numbers), clock.time())

    def touch(self, path: str) -> None:
        self._change().blobs[path] = Blob(self.view.cat(path), next(self._numbers), clock.time())

    def remove(self, path: str) -> None:
        if path not in self.view.blobs:
            raise FileNotFoundError(path)
        del self._change().blobs[path]

    def remove_tree(self, path: str) -> None:
        self.view.info(path)
        view, below = self._change(), f"{path}/"
        view.blobs = {name: blob for name, blob in view.blobs.items() if name != path and not name.startswith(below)}
        view.folders = frozenset(name for name in view.folders if name != path and not name.startswith(below))

    def make_folder(self, path: str) -> None:
        if self.view.store == "folders" and path not in self.view.folders:
            names = path.split("/")
            above = {"/".join(names[:stop]) for stop in range(1, len(names) + 1)}
            if above & self.view.blobs.keys():
                raise NotADirectoryError(path)
            self._change().folders |= above

    def remove_folder(self, path: str) -> None:
        if path not in self.view.folders:
            raise FileNotFoundError(path)
        if self.view.ls(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        self._change().folders -= {path}


class _NewFile(io.RawIOBase):
    """A file that is being written; where there are folders, it is seen from the start."""

    def __init__(self, disk: Disk, faults: Faults, path: str, *, is_new: bool) -> None:
        super().__init__()
        self._disk, self._faults, self._path, self._is_new = disk, faults, path, is_new
        self._data = io.BytesIO()
        self._has_place = disk.view.store == "folders"
        if self._has_place:
            disk.put(path, b"", is_new=is_new)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._data.write(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._faults.call("put" if self._is_new and not self._has_place else "close", self._path, self._finish)

    def _finish(self) -> Halved:
        data = self._data.getvalue()
        self._disk.put(self._path, data, is_new=self._is_new and not self._has_place)
        return Halved(lambda: self._disk.put(self._path, data[: len(data) // 2]))

    def __del__(self) -> None:
        # A file that was dropped is not finished.
        io.RawIOBase.close(self)


class Current:
    """The store of the running case; clients of earlier cases keep theirs."""

    disk = Disk("folders")
    faults = Faults()


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The client of a store in memory."""

    protocol = ("faulty", "s3", "s3a", "abfs", "abfss")
    cachable = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._disk, self._faults = Current.disk, Current.faults
        # A copy that was pickled has none.
        self._secret = SECRET if SECRET in options.values() else ""

    def _call(self, call: str, path: str, effect: Callable[[], Any], past: Callable[[int], Any] | None = None) -> Any:
        self._faults.own.secret = self._secret
        return self._faults.call(call, path, effect, past)

    def _read(self, call: str, path: str, answer: Callable[[View], Any]) -> Any:
        path = self._strip_protocol(path)
        return self._call(call, path, lambda: answer(self._disk.view), lambda age: answer(self._disk.past(age)))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found: list[Any] = self._read("ls", path, lambda view: view.ls(path))
        return found

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        found: dict[str, Any] = self._read("info", path, lambda view: view.info(path))
        return found

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        data: bytes = self._read("cat", path, lambda view: view.cat(path)[start:end])
        return data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        is_new = mode == "create"
        self._call("put" if is_new else "pipe", path, lambda: self._disk.put(path, bytes(value), is_new=is_new))

    def setxattr(self, path: str, **values: str) -> None:
        self._call("touch", path, lambda: self._disk.touch(path))

    setxattrs = setxattr

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return self._call("open", path, lambda: _NewFile(self._disk, self._faults, path, is_new=mode.startswith("x")))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._call("mkdir", path, lambda: self._disk.make_folder(path))

    def rm_file(self, path: str) -> None:
        self._call("rm", path, lambda: self._disk.remove(path))

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._call("rmtree", path, lambda: self._disk.remove_tree(path))

    def rmdir(self, path: str) -> None:
        self._call("rmdir", path, lambda: self._disk.remove_folder(path))

    def invalidate_cache(self, path: str | None = None) -> None:
        """It has none."""
