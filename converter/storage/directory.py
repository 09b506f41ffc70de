"""One directory on any filesystem, and the few things a cache asks of it.

Everything above speaks of names below a root. The one operation that matters is
`put_if_absent`: a small file that appears whole or not at all, and only if no such
name exists. It is the commit.

Why no rename of directories: it means four different things on four kinds of
store (POSIX refuses, HDFS moves inside, flat blobs copy and delete, OneLake
forbids), while an exclusive create of a small file can be had on all of them.
"""

from __future__ import annotations

import contextlib
import errno
import posixpath
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from converter.errors import CacheError
from converter.storage.ranges import Data
from converter.storage.store import NotOpenedError

Result = TypeVar("Result")

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
    """A symbolic link: what stands behind it may belong to anybody."""

    modified: float
    """Seconds since 1970 by the store's own clock; 0 where it does not say."""


class Storage(ABC):
    """A directory: `url` names it for people and programs, without any secret.

    Pickling keeps the URL and no secret: whoever unpickles brings credentials of
    their own, or a provider of them travels along.
    """

    is_local: bool
    """Whether files are ordinary ones on this machine, so that they can be mapped into memory."""

    def __init__(self, filesystem: Any, root: str, url: str) -> None:
        self._filesystem = filesystem
        self._root = root
        self.url = url

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    # What only the kind of filesystem knows ---------------------------------------

    @property
    @abstractmethod
    def store(self) -> dict[str, Any] | None:
        """What an executor needs to open the same filesystem, its secrets included; None for local disks."""

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The filesystem's options, secrets included: for a process of our own that is to read the same place."""

    @property
    @abstractmethod
    def user(self) -> str | None:
        """As whom files are written here, where cache_dir or storage_options name somebody."""

    @property
    @abstractmethod
    def survives_fork(self) -> bool:
        """Whether a forked child can read here."""

    @property
    @abstractmethod
    def has_folders(self) -> bool:
        """Whether it can be listed; of a web server only files are known that are named."""

    @property
    @abstractmethod
    def has_containers(self) -> bool:
        """Whether the first name of a path is a container's or a bucket's, of which one may not even ask."""

    @property
    @abstractmethod
    def spark_url(self) -> str:
        """The directory as Spark takes it: Hadoop's paths are not percent-encoded."""

    @abstractmethod
    def is_beside(self, other: Storage) -> bool:
        """Whether another directory is on the same filesystem."""

    @abstractmethod
    def delta_place(self) -> tuple[str, dict[str, str]]:
        """What deltalake calls this directory, and how it is told the credentials, secrets included."""

    @abstractmethod
    def wait_for(self, call: Callable[[], Result]) -> Result:
        """What another client says of this directory, waited for as its own. Raises TimeoutError."""

    @abstractmethod
    def path_of(self, url: str) -> str | None:
        """The path of an encoded URL, or of an absolute path, on this filesystem; None where it is on another one."""

    @abstractmethod
    def lend(self, options: StorageOptions) -> None:
        """Give a copy that came without its secrets the options that it lacks."""

    @abstractmethod
    def without_secrets(self, text: str) -> str:
        """A text in which nothing of the options is shown that nobody may see."""

    @abstractmethod
    def harmless(self, error: BaseException) -> BaseException:
        """An error as a cause that may be shown."""

    @abstractmethod
    def below(self, *names: str) -> Storage:
        """The directory `names` below this one."""

    @abstractmethod
    def at(self, path: str) -> Storage:
        """The directory at `path`, as the filesystem knows it."""

    @abstractmethod
    def hurried(self, timeout_seconds: float) -> AbstractContextManager[None]:
        """Wait no longer than this for a remote store meanwhile."""

    @abstractmethod
    def leads_to_folder(self, info: FileInfo) -> bool:
        """Whether one of those that are listed here is a folder, or a link to one."""

    @abstractmethod
    def real_path(self) -> str:
        """The path of this directory without links; of remote ones as it is."""

    @abstractmethod
    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a small file with all of `data`, or return False because the name is taken."""

    @abstractmethod
    def meanwhile(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """Ask a store something while it is asked something else; a disk only when the answer is wanted."""

    @abstractmethod
    def touch(self, name: str, given_up: threading.Event | None = None) -> None:
        """Renew a file's time without creating it: raises FileNotFoundError where it is gone."""

    @abstractmethod
    def identity(self, name: str) -> tuple[int, ...] | None:
        """What another file of this name would have otherwise (size, number, time); None where only opening can tell.

        Raises FileNotFoundError.
        """

    @abstractmethod
    def look(self, name: str, given_up: threading.Event | None = None) -> tuple[int, int | None]:
        """A file's size, and its stamp: a number that is another one once the file is written again.

        Of a local file its time in ns, else what the store says of the content (ETag) or of the time; None where it
        says neither. Raises FileNotFoundError.
        """

    @abstractmethod
    def read_part(self, name: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """Some bytes of a remote file, in one request. Raises FileNotFoundError, and OSError as `Store.ask`."""

    @abstractmethod
    def share_line(self, processes_count: int) -> None:
        """Say how many processes, this one among them, read from a remote store at the same time."""

    @abstractmethod
    def open_parquet(
        self, name: str, num_bytes: int | None = None, given_up: threading.Event | None = None
    ) -> pa.NativeFile:
        """A random-access source for `pyarrow.parquet.ParquetFile`; the caller closes it. Raises FileNotFoundError.

        Local files are mapped into memory: the page cache is the buffer, and nothing is copied
        before it is decoded. Of remote ones only what is read is fetched, and the footer in one request where
        the file's size is said.
        """

    @abstractmethod
    def _info(self, path: str, given_up: threading.Event | None = None) -> Mapping[str, Any]:
        """What fsspec says of a path. Raises FileNotFoundError."""

    # What is the same on all of them ------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether this directory is there; in a store of objects, whether anything lies below it."""
        if self.has_containers and "/" not in self._root:
            # A missing container fails its listing, and a token for what is in it may not ask for it.
            return True
        try:
            self._info(self._root)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    @property
    def is_at_a_file(self) -> bool:
        """Whether a file stands where this directory, or one above it, would be."""
        path = self._root
        while path and path != posixpath.dirname(path):
            if not posixpath.dirname(path) and self.has_containers:
                # A container or a bucket, of which a token for what is in it may not even ask.
                return False
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                info = self._info(path)
                # Stores of objects may have an empty one that stands for a folder.
                is_empty = info["type"] == "file" and not self.is_local and not info["size"]
                return bool(info["type"] == "file") and not (is_empty and self.at(path).list())
            if not self.has_folders:
                return False
            path = posixpath.dirname(path)
        return False

    def path(self, *names: str) -> str:
        """The path of a name, as the filesystem knows it."""
        return posixpath.join(self._root, *names)

    def make_directory(self) -> None:
        """Create this directory and those above it; does nothing where it exists."""
        try:
            self._filesystem.makedirs(self._root, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise CacheError(f"{self.url} is a file, where a directory was expected.", path=self.url) from error
        except NotOpenedError as error:
            # It says what to do, and another directory there would not help.
            raise CacheError(f"{self.url} cannot be written: {error}.", path=self.url) from error

    def list(self) -> list[FileInfo]:
        """What stands directly in this directory, by name; empty where it does not exist."""
        self._filesystem.invalidate_cache(self._root)
        try:
            found = self._filesystem.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            if self._is_there_after_all():
                # The disk's own failure: what is in use must not be taken for gone.
                raise
            return []
        # A file's own name, or an object that stands for this folder.
        found = [info for info in found if str(info["name"]).rstrip("/") != self._root]
        infos = [
            FileInfo(
                name=posixpath.basename(str(info["name"]).rstrip("/")),
                num_bytes=0 if info["type"] == "directory" else int(info["size"] or 0),
                is_directory=info["type"] == "directory",
                is_link=bool(info.get("islink")),
                modified=modified(info),
            )
            for info in found
        ]
        return sorted(infos, key=lambda info: info.name)

    def _is_there_after_all(self) -> bool:
        """Whether a directory that cannot be listed is one all the same."""
        return False

    def size(self, name: str, given_up: threading.Event | None = None) -> int | None:
        """Bytes of a file now, or None if there is none."""
        # Of the file's own folder: a client may answer from what it has listed there.
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
        """The store's own time, seconds since 1970, asked by writing a file: clocks of machines differ."""
        name = f".clock-{uuid.uuid4().hex}"
        self.put_if_absent(name, b"")
        try:
            modified = next((info.modified for info in self.list() if info.name == name), None)
            if modified is None:
                raise OSError(f"{self.url} does not list the file {name} that was put there")
            return modified
        finally:
            self.delete_file(name)

    def delete_file(self, name: str) -> None:
        """Remove a file; does nothing where it is gone already."""
        try:
            self._filesystem.rm_file(self.path(name))
        except FileNotFoundError:
            return

    def delete_tree(self) -> None:
        """Remove this directory with all that stands in it; only for what nobody else can have written."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(self._root, recursive=True)

    def delete_directory_if_empty(self) -> None:
        """Remove this directory unless something stands in it."""
        try:
            self._filesystem.rmdir(self._root)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise


def modified(info: Mapping[str, Any]) -> float:
    """When a file was written last; each filesystem of fsspec has its own word for it."""
    names = ("mtime", "last_modified", "LastModified", "modified", "created")
    value = next((info[name] for name in names if info.get(name)), 0.0)
    return float(value.timestamp() if hasattr(value, "timestamp") else value)
