"""One directory on any filesystem, with the few operations that a cache needs.

All rooms above speak of names below a root. The operation that matters is `put_if_absent`: a small file that appears
whole or not at all, and only if no such name exists. It is the commit.

Directories are never renamed. A rename means four different things on four kinds of store (POSIX refuses, HDFS moves
inside, flat blobs copy and delete, OneLake forbids), while all of them can create a small file exclusively.
"""

from __future__ import annotations

import contextlib
import errno
import math
import posixpath
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from converter.errors import CacheError
from converter.portable.deadlines import Result
from converter.storage.ranges import Data
from converter.storage.store import NotOpenedError

if TYPE_CHECKING:
    from converter.portable.records import StoreSpec

StorageOptions = Mapping[str, Any]
"""Keyword arguments of the fsspec filesystem: credentials and the like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """One file or directory as the store lists it."""

    name: str
    """The last part of its path."""

    num_bytes: int
    """Size; 0 for a directory."""

    is_directory: bool

    is_link: bool
    """A symbolic link, which may lead to files of others."""

    modified: float
    """Seconds since 1970 by the store's own clock; 0 if the store does not report it."""


class Storage(ABC):
    """A directory: `url` names it for people and programs, without any secret.

    Pickling keeps the URL and no secret. The process that unpickles it brings credentials of its own (`lend`), or a
    token provider travels along.
    """

    is_local: bool
    """Whether files are ordinary ones on this machine, which can be mapped into memory."""

    survives_fork: bool
    """Whether a forked child can read here."""

    has_folders: bool
    """Whether folders can be listed; a web server's cannot."""

    has_containers: bool
    """Whether the first name of a path is a container's or a bucket's, which a token may not be allowed to look at."""

    def __init__(self, filesystem: Any, root: str, url: str) -> None:
        self._filesystem = filesystem
        self._root = root
        self.url = url

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    # What each kind of filesystem does in its own way ------------------------------

    @property
    @abstractmethod
    def spark_url(self) -> str:
        """The directory as Spark takes it: Hadoop's paths are not percent-encoded."""

    @abstractmethod
    def is_beside(self, other: Storage) -> bool:
        """Whether another directory is on the same filesystem, with the same credentials."""

    @abstractmethod
    def delta_place(self) -> tuple[str, dict[str, str]]:
        """The URL and the options by which deltalake opens this directory, secrets included."""

    @abstractmethod
    def path_of(self, url: str) -> str | None:
        """The path of an encoded URL, or of an absolute path, on this filesystem; None if it is elsewhere."""

    @abstractmethod
    def below(self, *names: str) -> Storage:
        """The directory `names` below this one."""

    @abstractmethod
    def at(self, path: str) -> Storage:
        """The directory at a path of this filesystem."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a small file with all of `data`, or return False because the name is taken."""

    @abstractmethod
    def touch(self, name: str, given_up: threading.Event | None = None, within: float = math.inf) -> None:
        """Set a file's time to now, without creating it, if the store answers within so many seconds.

        Raises FileNotFoundError, and OSError as `Store.ask`.
        """

    @abstractmethod
    def look(self, name: str, given_up: threading.Event | None = None) -> tuple[int, int | None]:
        """A file's size, and its stamp: a number that changes when the file is written again.

        The stamp is a local file's time in ns, else a hash of the store's ETag or time; None if the store gives
        neither. Raises FileNotFoundError.
        """

    @abstractmethod
    def open_parquet(
        self, name: str, num_bytes: int | None = None, given_up: threading.Event | None = None
    ) -> pa.NativeFile:
        """A random-access source for `pyarrow.parquet.ParquetFile`; the caller closes it. Raises FileNotFoundError.

        A local file is mapped into memory: nothing is copied before it is decoded. Of a remote file only what is read
        is fetched. Pass `num_bytes`, the file's size, to save a request.
        """

    @abstractmethod
    def _info(self, path: str, given_up: threading.Event | None = None) -> Mapping[str, Any]:
        """What fsspec knows of a path. Raises FileNotFoundError."""

    # What a filesystem without network, secrets and links does ---------------------

    @property
    def store(self) -> StoreSpec | None:
        """What an executor needs to open the same filesystem, secrets included; None for local disks."""
        return None

    @property
    def options(self) -> dict[str, Any]:
        """The filesystem's options, secrets included, for another process of ours that reads the same place."""
        return {}

    @property
    def user(self) -> str | None:
        """The user who owns new files, if cache_dir or storage_options name one."""
        return None

    def wait_for(self, call: Callable[[], Result]) -> Result:
        """What another client returns, within this store's time. Raises TimeoutError."""
        return call()

    def lend(self, options: StorageOptions) -> None:  # noqa: B027 (a disk has no options)
        """Give a copy that was pickled without its secrets the options that it lacks."""

    def without_secrets(self, text: str) -> str:
        """The text with each secret of the options replaced."""
        return text

    def harmless(self, error: BaseException) -> BaseException:
        """An error as a cause that may be shown."""
        return error

    def hurried(self, timeout_seconds: float) -> AbstractContextManager[None]:  # noqa: ARG002 (a disk has no deadline)
        """Wait no longer than this for a remote store inside the `with`."""
        return contextlib.nullcontext()

    def leads_to_folder(self, info: FileInfo) -> bool:
        """Whether a file that is listed here is a folder, or a link to one."""
        return info.is_directory

    def real_path(self) -> str:
        """The path of this directory without links."""
        return self._root

    def meanwhile(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """Begin a question to a remote store; its answer is returned later. A disk is asked only then."""
        return call

    def identity(self, name: str) -> tuple[int, ...] | None:  # noqa: ARG002 (no name tells)
        """Values that change when the file is replaced (size, number, time); None if only opening it can tell.

        Raises FileNotFoundError.
        """
        return None

    def read_part(self, name: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """Some bytes of a remote file, in one request. Raises FileNotFoundError, and OSError as `Store.ask`."""
        raise NotImplementedError(f"{self.url}/{name}: local files are mapped, not read in parts")

    def share_line(self, processes_count: int) -> None:  # noqa: B027 (a disk is no line)
        """Count with so many processes, including this one, that read from a remote store at the same time."""

    # What is the same on all of them ------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether this directory is there; in a store of objects, whether there is anything below it."""
        if self.has_containers and "/" not in self._root:
            # A token for its content may not ask for the container; if it is missing, listing it fails.
            return True
        try:
            self._info(self._root)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    @property
    def is_at_a_file(self) -> bool:
        """Whether this directory, or one above it, is a file."""
        path = self._root
        while path and path != posixpath.dirname(path):
            if not posixpath.dirname(path) and self.has_containers:
                # A token for its content may not ask for the container or the bucket.
                return False
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                info = self._info(path)
                # In a store of objects an empty file may mark a folder.
                is_empty = info["type"] == "file" and not self.is_local and not info["size"]
                return bool(info["type"] == "file") and not (is_empty and self.at(path).list())
            if not self.has_folders:
                return False
            path = posixpath.dirname(path)
        return False

    def path(self, *names: str) -> str:
        """The path of a name on the filesystem."""
        return posixpath.join(self._root, *names)

    def make_directory(self) -> None:
        """Create this directory and those above it; does nothing if it exists."""
        try:
            self._filesystem.makedirs(self._root, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise CacheError(
                f"{self.url} is a file, where a directory was expected. Choose another cache_dir, or remove the file.",
                path=self.url,
            ) from error
        except NotOpenedError as error:
            # The error itself says what to do.
            raise CacheError(f"{self.url} cannot be written: {str(error).rstrip('.')}.", path=self.url) from error

    def list(self) -> list[FileInfo]:
        """The files and folders of this directory, by name; empty if it does not exist."""
        self._filesystem.invalidate_cache(self._root)
        try:
            listed = self._filesystem.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            if self._is_there_after_all():
                # The disk failed: files in use must not count as gone.
                raise
            return []
        infos = [
            FileInfo(
                name=posixpath.basename(str(info["name"]).rstrip("/")),
                num_bytes=0 if info["type"] == "directory" else int(info["size"] or 0),
                is_directory=info["type"] == "directory",
                is_link=bool(info.get("islink")),
                modified=modified(info),
            )
            for info in listed
            # Its own name is a file's, or of an object that marks this folder.
            if str(info["name"]).rstrip("/") != self._root
        ]
        return sorted(infos, key=lambda info: info.name)

    def has_folder(self, name: str) -> bool:
        """Whether there is a folder of this name, or a link to one. Raises PermissionError."""
        return any(info.name == name and self.leads_to_folder(info) for info in self.list())

    def _is_there_after_all(self) -> bool:
        """Whether a directory that cannot be listed is there all the same."""
        return False

    def size(self, name: str, given_up: threading.Event | None = None) -> int | None:
        """The bytes of a file now; None if there is no such file."""
        # A client may answer from a listing of the file's folder.
        self._filesystem.invalidate_cache(posixpath.dirname(self.path(name)))
        try:
            info = self._info(self.path(name), given_up)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def read(self, name: str) -> bytes:
        """A whole small file. Raises FileNotFoundError."""
        return bytes(self._filesystem.cat_file(self.path(name)))

    def now(self) -> float:
        """The store's own time in seconds since 1970, found by writing a file: clocks of machines differ."""
        name = f".clock-{uuid.uuid4().hex}"
        self.put_if_absent(name, b"")
        try:
            for info in self.list():
                if info.name == name:
                    return info.modified
            raise OSError(f"{self.url} does not list the file {name} that was just created there.")
        finally:
            self.delete_file(name)

    def delete_file(self, name: str) -> None:
        """Remove a file; does nothing if it is gone already."""
        try:
            self._filesystem.rm_file(self.path(name))
        except FileNotFoundError:
            return

    def delete_tree(self) -> None:
        """Remove this directory with all that is in it; only for directories that no other process writes."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(self._root, recursive=True)

    def uploads(self) -> Sequence[tuple[str, str]]:
        """What was begun to be uploaded below this directory, and has not ended: each by its name and its number."""
        found: Sequence[tuple[str, str]] = () if self.is_local else self._filesystem.uploads(self._root)
        return found

    def abort_upload(self, name: str, number: str) -> None:
        """Give up one of the `uploads`."""
        self._filesystem.abort_upload(self.path(name), number)

    def delete_directory_if_empty(self) -> None:
        """Remove this directory if it is empty."""
        try:
            self._filesystem.rmdir(self._root)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise


def modified(info: Mapping[str, Any]) -> float:
    """When a file was written last, in seconds since 1970: filesystems of fsspec name it differently."""
    names = ("mtime", "last_modified", "LastModified", "modified", "created")
    value = next((info[name] for name in names if info.get(name)), 0.0)
    return float(value.timestamp() if hasattr(value, "timestamp") else value)
