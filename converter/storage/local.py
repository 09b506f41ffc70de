"""A directory on this machine's disks, or mounted there; Databricks' paths among them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from converter.errors import CacheError
from converter.storage.databricks import create_on_databricks, is_on_databricks, spark_url_of
from converter.storage.directory import FileInfo, Result, Storage, StorageOptions
from converter.storage.ranges import Data


class LocalStorage(Storage):
    """A directory whose files are ordinary ones; nothing here waits for a network."""

    is_local = True
    store = None
    user = None
    survives_fork = True
    has_folders = True
    has_containers = False

    def __init__(self, path: str, filesystem: Any = None) -> None:
        # Made by hand: fsspec would take `::` in a path for a chain of filesystems, urllib `#` and `?` for ends of it.
        super().__init__(filesystem or LocalFileSystem(), path, "file://" + quote(path))

    @property
    def options(self) -> dict[str, Any]:
        """None."""
        return {}

    @property
    def spark_url(self) -> str:
        """The directory as Spark takes it: Hadoop's paths are not percent-encoded."""
        return spark_url_of(self._root)

    def is_beside(self, other: Storage) -> bool:
        """Whether another directory is on this machine as well."""
        return other.is_local

    def delta_place(self) -> tuple[str, dict[str, str]]:
        """What deltalake calls this directory."""
        # As a URL: of a plain path it takes what looks encoded for encoded.
        return self.url, {}

    def wait_for(self, call: Callable[[], Result]) -> Result:
        """What another client says of this directory."""
        return call()

    def path_of(self, url: str) -> str | None:
        """The path of an encoded URL, or of an absolute path; None where it is on another filesystem."""
        if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", url):
            return unquote(url)
        return unquote(re.sub(r"^file:(//[^/]*)?", "", url)) if url.startswith("file:") else None

    def lend(self, options: StorageOptions) -> None:
        """Nothing: a disk has no options."""

    def without_secrets(self, text: str) -> str:
        """The text: a disk has no secrets."""
        return text

    def harmless(self, error: BaseException) -> BaseException:
        """The error: a disk has no secrets."""
        return error

    def below(self, *names: str) -> Storage:
        """The directory `names` below this one."""
        return LocalStorage(self.path(*names), self._filesystem)

    def at(self, path: str) -> Storage:
        """The directory at `path`."""
        return LocalStorage(path, self._filesystem)

    def hurried(self, timeout_seconds: float) -> AbstractContextManager[None]:  # noqa: ARG002 (a disk's calls end)
        """Nothing: a disk is not waited for."""
        return contextlib.nullcontext()

    def leads_to_folder(self, info: FileInfo) -> bool:
        """Whether one of those that are listed here is a folder, or a link to one."""
        return info.is_directory or (info.is_link and os.path.isdir(self.path(info.name)))

    def real_path(self) -> str:
        """The path of this directory without links."""
        return os.path.realpath(self._root)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a small file with all of `data`, or return False because the name is taken."""
        path = self.path(name)
        if is_on_databricks(path):
            return create_on_databricks(path, data)
        # A hard link appears with its content, and fails where the name exists (also in a race).
        aside = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            with open(aside, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(aside, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
            raise CacheError(
                f"{self.url} cannot create hard links ({error.strerror}), which a commit there needs. "
                "Choose a directory on another disk as cache_dir.",
                path=self.url,
            ) from error
        finally:
            if os.path.exists(aside):
                os.unlink(aside)
        return True

    def meanwhile(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """The call, to be made when its answer is wanted."""
        return call

    def touch(self, name: str, given_up: threading.Event | None = None) -> None:  # noqa: ARG002 (nothing is waited for)
        """Renew a file's time without creating it: raises FileNotFoundError where it is gone."""
        os.utime(self.path(name))

    def identity(self, name: str) -> tuple[int, ...] | None:
        """A file's size, device, number and time in ns. Raises FileNotFoundError."""
        found = os.stat(self.path(name))
        return found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns

    def look(self, name: str, given_up: threading.Event | None = None) -> tuple[int, int | None]:  # noqa: ARG002
        """A file's size and its time in ns. Raises FileNotFoundError."""
        found = os.stat(self.path(name))
        return found.st_size, found.st_mtime_ns

    def read_part(self, name: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """Not asked of a disk: its files are mapped."""
        raise NotImplementedError(f"{self.url}/{name}: local files are mapped, not read in parts")

    def share_line(self, processes_count: int) -> None:
        """Nothing: there is no line."""

    def open_parquet(
        self,
        name: str,
        num_bytes: int | None = None,  # noqa: ARG002 (a mapped file knows its size)
        given_up: threading.Event | None = None,  # noqa: ARG002
    ) -> pa.NativeFile:
        """A file mapped into memory; the caller closes it. Raises FileNotFoundError."""
        return pa.memory_map(self.path(name))

    def _info(self, path: str, given_up: threading.Event | None = None) -> Mapping[str, Any]:  # noqa: ARG002
        found: Mapping[str, Any] = self._filesystem.info(path)
        return found

    def _is_there_after_all(self) -> bool:
        return os.path.isdir(self._root)
