"""A directory on this machine's disks, or mounted there; Databricks' paths among them.

Files are made and removed by a handle of their folder: below the directory that was opened first no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import posixpath
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from converter.errors import CacheError
from converter.storage.databricks import create_on_databricks, is_on_databricks, spark_url_of
from converter.storage.directory import FileInfo, Storage
from converter.storage.handles import opened, remove_tree


class LocalStorage(Storage):
    """A directory whose files are ordinary ones; a disk has no options, no secrets and no deadline."""

    is_local = True
    survives_fork = True
    has_folders = True
    has_containers = False

    def __init__(self, path: str, filesystem: Any = None, *, base: str | None = None) -> None:
        # Not `fsspec.open`: it takes `::` in a path for a chain of filesystems, and urllib ends a path at `#` or `?`.
        super().__init__(filesystem or LocalFileSystem(), path, "file://" + quote(path))
        self._base = path if base is None else base
        """The directory that this one was reached from by `below`: as its user named it, links included."""

    @property
    def spark_url(self) -> str:
        """The directory as Spark takes it: Hadoop's paths are not percent-encoded."""
        return spark_url_of(self._root)

    def is_beside(self, other: Storage) -> bool:
        """Whether another directory is on this machine as well."""
        return other.is_local

    def delta_place(self) -> tuple[str, dict[str, str]]:
        """The URL by which deltalake opens this directory."""
        # Not as a path, in which deltalake would decode %20.
        return self.url, {}

    def path_of(self, url: str) -> str | None:
        """The path of an encoded URL, or of an absolute path; None if it is elsewhere."""
        if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", url):
            return unquote(url)
        return unquote(re.sub(r"^file:(//[^/]*)?", "", url)) if url.startswith("file:") else None

    def below(self, *names: str) -> Storage:
        """The directory `names` below this one."""
        return LocalStorage(self.path(*names), self._filesystem, base=self._base)

    def at(self, path: str) -> Storage:
        """The directory at `path`."""
        return LocalStorage(path, self._filesystem)

    def leads_to_folder(self, info: FileInfo) -> bool:
        """Whether a file that is listed here is a folder, or a link to one."""
        return info.is_directory or (info.is_link and os.path.isdir(self.path(info.name)))

    def has_folder(self, name: str) -> bool:
        """Whether there is a folder of this name, or a link to one."""
        # Not by a listing, which looks at every file beside it: 10,000 of them take 70 ms.
        return os.path.isdir(self.path(name))

    def real_path(self) -> str:
        """The path of this directory without links."""
        return os.path.realpath(self._root)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a small file with all of `data`, or return False because the name is taken."""
        path = self.path(name)
        if is_on_databricks(path):
            return create_on_databricks(path, data)
        # A hard link appears with its content, and fails if the name exists, also in a race.
        with self._opened_folder_of(name) as (folder, name_there):
            aside = f"{name_there}.{uuid.uuid4().hex}.tmp"
            try:
                # With the mode that the umask leaves, as `open` gives it.
                with open(aside, "xb", opener=lambda new, flags: os.open(new, flags, 0o666, dir_fd=folder)) as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(aside, name_there, src_dir_fd=folder, dst_dir_fd=folder)
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
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(aside, dir_fd=folder)
        return True

    def delete_file(self, name: str) -> None:
        """Remove a file; does nothing if it is gone already. Raises NotADirectoryError if a link leads to it."""
        with contextlib.suppress(FileNotFoundError), self._opened_folder_of(name) as (folder, name_there):
            os.unlink(name_there, dir_fd=folder)

    def delete_tree(self) -> None:
        """Remove this directory with all that is in it; what links lead to stays, and what is made there meanwhile."""
        try:
            with self._opened_folder_of() as (folder, name_there):
                remove_tree(name_there, folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def delete_directory_if_empty(self) -> None:
        """Remove this directory if it is empty."""
        try:
            with self._opened_folder_of() as (folder, name_there):
                os.rmdir(name_there, dir_fd=folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise

    @contextlib.contextmanager
    def _opened_folder_of(self, *names: str) -> Iterator[tuple[int, str]]:
        """A handle of the folder that holds a file or this directory, and the name in it."""
        path = self.path(*names)
        folder, name = posixpath.split(path)
        try:
            with opened(folder, self._base if folder.startswith(self._base) else folder) as handle:
                yield handle, name
        except OSError as error:
            # The name alone would not say where.
            error.filename = path
            raise

    def touch(
        self,
        name: str,
        given_up: threading.Event | None = None,  # noqa: ARG002 (a disk's calls end)
        within: float = math.inf,  # noqa: ARG002
    ) -> None:
        """Set a file's time to now, without creating it. Raises FileNotFoundError."""
        os.utime(self.path(name))

    def identity(self, name: str) -> tuple[int, ...]:
        """A file's size, device, number and time in ns. Raises FileNotFoundError."""
        status = os.stat(self.path(name))
        return status.st_size, status.st_dev, status.st_ino, status.st_mtime_ns

    def look(self, name: str, given_up: threading.Event | None = None) -> tuple[int, int | None]:  # noqa: ARG002
        """A file's size and its time in ns. Raises FileNotFoundError."""
        status = os.stat(self.path(name))
        return status.st_size, status.st_mtime_ns

    def open_parquet(
        self,
        name: str,
        num_bytes: int | None = None,  # noqa: ARG002 (a mapped file knows its size)
        given_up: threading.Event | None = None,  # noqa: ARG002
    ) -> pa.NativeFile:
        """A file mapped into memory; the caller closes it. Raises FileNotFoundError."""
        return pa.memory_map(self.path(name))

    def _info(self, path: str, given_up: threading.Event | None = None) -> Mapping[str, Any]:  # noqa: ARG002
        info: Mapping[str, Any] = self._filesystem.info(path)
        return info

    def _is_there_after_all(self) -> bool:
        return os.path.isdir(self._root)
