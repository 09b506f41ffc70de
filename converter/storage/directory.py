"""One directory on one filesystem, and the few things a cache asks of it.

Everything above speaks of names below a root; this module alone knows URLs and
filesystems. The one operation that matters is `put_if_absent`: a small file that
appears whole or not at all, and only if no such name exists. It is the commit.

Why no rename of directories: it means four different things on four kinds of
store (POSIX refuses, HDFS moves inside, flat blobs copy and delete, OneLake
forbids), while an exclusive create of a small file can be had on all of them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import posixpath
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from converter.errors import CacheError
from converter.storage.databricks import (
    check_mount,
    create_on_databricks,
    is_on_databricks,
    python_path_of,
    spark_url_of,
)
from converter.storage.opening import open_store
from converter.storage.ranges import Data, PartialFile
from converter.storage.requests import Request
from converter.storage.store import TIMEOUT_SECONDS, NotOpenedError
from converter.storage.urls import shown_url

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


class Storage:
    """A directory: `url` names it for people and programs, without any secret.

    Pickling keeps the URL and no secret: whoever unpickles brings credentials of
    their own, or a provider of them travels along.

    >>> storage = open_storage("memory://doc-example")
    >>> storage.put_if_absent("a.json", b"{}"), storage.put_if_absent("a.json", b"[]")
    (True, False)
    >>> storage.read("a.json")
    b'{}'
    """

    def __init__(self, filesystem: Any, root: str, url: str) -> None:
        self._filesystem = filesystem
        self._root = root
        self.url = url

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    @property
    def is_local(self) -> bool:
        """Whether files are ordinary ones on this machine, so that they can be mapped into memory."""
        return isinstance(self._filesystem, LocalFileSystem)

    def is_beside(self, other: Storage) -> bool:
        """Whether another directory is on the same filesystem."""
        if self.is_local or other.is_local:
            return self.is_local and other.is_local
        mine, theirs = self._filesystem, other._filesystem
        return bool((mine.protocol, mine.options, mine.host) == (theirs.protocol, theirs.options, theirs.host))

    @property
    def store(self) -> dict[str, Any] | None:
        """What an executor needs to open the same filesystem, its secrets included; None for local disks."""
        if self.is_local:
            return None
        found = self._filesystem
        return {"protocol": found.protocol, "options": found.options, "timeout_seconds": found.timeout_seconds}

    @property
    def options(self) -> dict[str, Any]:
        """The filesystem's options, secrets included: for a process of our own that is to read the same place."""
        return {} if self.is_local else dict(self._filesystem.options)

    @property
    def user(self) -> str | None:
        """As whom files are written here, where cache_dir or storage_options name somebody."""
        return None if self.is_local else self._filesystem.user

    def delta_place(self) -> tuple[str, dict[str, str]]:
        """What deltalake calls this directory, and how it is told the credentials, secrets included."""
        if self.is_local:
            # As a URL: of a plain path it takes what looks encoded for encoded.
            return "file://" + quote(self.path()), {}
        options: dict[str, str] = self._filesystem.delta_options()
        return self._filesystem.delta_url(self.url), options

    def wait_for(self, call: Callable[[], Result]) -> Result:
        """What another client says of this directory, waited for as its own. Raises TimeoutError."""
        if self.is_local:
            return call()
        found: Result = self._filesystem.wait_for(call, path=self.url)
        return found

    def path_of(self, url: str) -> str | None:
        """The path of an encoded URL, or of an absolute path, on this filesystem; None where it is on another one."""
        if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", url):
            # Without a scheme it is in the same container or bucket.
            own = self._root.partition("/")[0]
            return unquote(url) if not own else f"{own}{unquote(url)}"
        if self.is_local:
            return unquote(re.sub(r"^file:(//[^/]*)?", "", url)) if url.startswith("file:") else None
        # Hadoop takes both forms.
        found: str | None = self._filesystem.path_of(re.sub(r"^([^/:]+):/(?=[^/])", r"\1:///", unquote(url)))
        return found

    def lend(self, options: StorageOptions) -> None:
        """Give a copy that came without its secrets the options that it lacks."""
        if not self.is_local:
            self._filesystem.options = dict(options)

    @property
    def survives_fork(self) -> bool:
        """Whether a forked child can read here."""
        return self.is_local or bool(self._filesystem.survives_fork)

    def without_secrets(self, text: str) -> str:
        """A text in which nothing of the options is shown that nobody may see."""
        return text if self.is_local else str(self._filesystem.without_secrets(text))

    def harmless(self, error: BaseException) -> BaseException:
        """An error as a cause that may be shown."""
        found = error if self.is_local else self._filesystem.harmless(error)
        return found if isinstance(found, BaseException) else error

    @property
    def has_folders(self) -> bool:
        """Whether it can be listed; of a web server only files are known that are named."""
        return self.is_local or bool(self._filesystem.has_folders)

    @property
    def exists(self) -> bool:
        """Whether this directory is there; in a store of objects, whether anything lies below it."""
        if not self.is_local and self._filesystem.has_containers and "/" not in self._root:
            # A missing container fails its listing, and a token for what is in it may not ask for it.
            return True
        try:
            self._filesystem.info(self._root)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    @property
    def is_at_a_file(self) -> bool:
        """Whether a file stands where this directory, or one above it, would be."""
        path = self._root
        while path and path != posixpath.dirname(path):
            if not posixpath.dirname(path) and not self.is_local and self._filesystem.has_containers:
                # A container or a bucket, of which a token for what is in it may not even ask.
                return False
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                info = self._filesystem.info(path)
                # Stores of objects may have an empty one that stands for a folder.
                is_empty = info["type"] == "file" and not self.is_local and not info["size"]
                return bool(info["type"] == "file") and not (is_empty and self.at(path).list())
            if not self.has_folders:
                return False
            path = posixpath.dirname(path)
        return False

    @property
    def spark_url(self) -> str:
        """The directory as Spark takes it: Hadoop's paths are not percent-encoded."""
        return spark_url_of(self._root) if self.is_local else self.url

    def below(self, *names: str) -> Storage:
        """The directory `names` below this one."""
        url = posixpath.join(self.url, *(quote(name) for name in names) if self.is_local else names)
        return Storage(self._filesystem, self.path(*names), url)

    def at(self, path: str) -> Storage:
        """The directory at `path`, as the filesystem knows it."""
        if self.is_local:
            return Storage(self._filesystem, path, "file://" + quote(path))
        if f"{self._root}/".startswith(posixpath.join(path, "")):
            url = self.url.removesuffix(self._root.removeprefix(path))
        elif self._root.startswith("/"):
            url = self.url.removesuffix(self._root) + path
        else:
            # In front stands the container's or the bucket's name, here and in the URL.
            own, _, below_own = self._root.partition("/")
            other, _, below = path.partition("/")
            first = self.url.removesuffix(below_own).rstrip("/").replace(f"://{own}", f"://{other}", 1)
            url = f"{first}/{below}" if below else first
        return Storage(self._filesystem, path, url)

    def path(self, *names: str) -> str:
        """The path of a name, as the filesystem knows it."""
        return posixpath.join(self._root, *names)

    @contextlib.contextmanager
    def hurried(self, timeout_seconds: float) -> Iterator[None]:
        """Wait no longer than this for a remote store meanwhile."""
        with contextlib.nullcontext() if self.is_local else self._filesystem.hurried(timeout_seconds):
            yield

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
            if self.is_local and os.path.isdir(self._root):
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
                modified=_modified(info),
            )
            for info in found
        ]
        return sorted(infos, key=lambda info: info.name)

    def leads_to_folder(self, info: FileInfo) -> bool:
        """Whether one of those that are listed here is a folder, or a link to one."""
        return info.is_directory or (info.is_link and self.is_local and os.path.isdir(self.path(info.name)))

    def real_path(self) -> str:
        """The path of this directory without links; of remote ones as it is."""
        return os.path.realpath(self._root) if self.is_local else self._root

    def size(self, name: str, given_up: threading.Event | None = None) -> int | None:
        """Bytes of a file now, or None if there is none."""
        # Of the file's own folder: a client may answer from what it has listed there.
        self._filesystem.invalidate_cache(posixpath.dirname(self.path(name)))
        waiting = {} if self.is_local else {"given_up": given_up}
        try:
            info = self._filesystem.info(self.path(name), **waiting)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def read(self, name: str) -> bytes:
        """A whole small file. Raises FileNotFoundError."""
        return bytes(self._filesystem.cat_file(self.path(name)))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a small file with all of `data`, or return False because the name is taken."""
        path = self.path(name)
        if not self.is_local:
            return bool(self._filesystem.create(path, data))
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
        """Ask a store something while it is asked something else; a disk only when the answer is wanted."""
        return call if self.is_local else Request(call).answer

    def touch(self, name: str, given_up: threading.Event | None = None) -> None:
        """Renew a file's time without creating it: raises FileNotFoundError where it is gone."""
        if self.is_local:
            os.utime(self.path(name))
        else:
            self._filesystem.renew(self.path(name), given_up)

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

    def identity(self, name: str) -> tuple[int, ...] | None:
        """What another file of this name would have otherwise (size, number, time); None where only opening can tell.

        Raises FileNotFoundError.
        """
        if not self.is_local:
            return None
        found = os.stat(self.path(name))
        return found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns

    def look(self, name: str, given_up: threading.Event | None = None) -> tuple[int, int | None]:
        """A file's size, and its stamp: a number that is another one once the file is written again.

        Of a local file its time in ns, else what the store says of the content (ETag) or of the time; None where it
        says neither. Raises FileNotFoundError.
        """
        if self.is_local:
            found = os.stat(self.path(name))
            return found.st_size, found.st_mtime_ns
        self._filesystem.invalidate_cache(posixpath.dirname(self.path(name)))
        info = self._filesystem.info(self.path(name), given_up=given_up)
        etag = next((str(info[key]) for key in ("etag", "ETag", "Last-Modified") if info.get(key)), "")
        # Stores quote it in one answer and not in another.
        said = etag.removeprefix("W/").strip('"') or _modified(info)
        digest = hashlib.sha256(str(said).encode()).digest()
        return int(info["size"]), int.from_bytes(digest[:8], "big", signed=True) if said else None

    def read_part(self, name: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """Some bytes of a remote file, in one request. Raises FileNotFoundError, and OSError as `Store.ask`."""
        found: Data = self._filesystem.read_in_turn(self.path(name), start, end, given_up)
        return found

    def share_line(self, processes_count: int) -> None:
        """Say how many processes, this one among them, read from a remote store at the same time."""
        if not self.is_local:
            self._filesystem.share_line(processes_count)

    def open_parquet(
        self, name: str, num_bytes: int | None = None, given_up: threading.Event | None = None
    ) -> pa.NativeFile:
        """A random-access source for `pyarrow.parquet.ParquetFile`; the caller closes it. Raises FileNotFoundError.

        Local files are mapped into memory: the page cache is the buffer, and nothing is copied
        before it is decoded. Of remote ones only what is read is fetched, and the footer in one request where
        the file's size is said.
        """
        if self.is_local:
            return pa.memory_map(self.path(name))
        if num_bytes is None:
            num_bytes = self.size(name, given_up)
            if num_bytes is None:
                raise FileNotFoundError(self.path(name))
        fetch = functools.partial(self.read_part, name, given_up=given_up)
        return pa.PythonFile(PartialFile(num_bytes, fetch), mode="r")


def open_storage(
    url: str | os.PathLike[str],
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Storage:
    """The directory that `url` (or a plain local path) names; it need not exist.

    >>> open_storage("/data/cache/").url, open_storage("file:/data/cache").url
    ('file:///data/cache', 'file:///data/cache')
    """
    text = os.fspath(url)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"A storage URL must be a non-empty str or path, got {url!r}.")
    if storage_options is not None and not isinstance(storage_options, Mapping):
        # Its kind alone is said: its content may be a secret.
        raise TypeError(f"storage_options must be a dict of keyword arguments, got a {type(storage_options).__name__}.")
    if re.search(r"^[A-Za-z][A-Za-z0-9+.-]*::.*://|://.*::[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ValueError(
            f"{shown_url(text)} is a chain of filesystems, which is not supported. Name one of them alone."
        )
    # Schemes have no case.
    text = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]+:(?=/)", lambda found: found[0].lower(), text)
    if text.startswith("dbfs:"):
        path = python_path_of(text)
    elif text.startswith("file:"):
        path = unquote(re.sub(r"^file:(//[^/]*)?", "", text))
        if not path:
            raise ValueError(f"{text!r} names no folder: write file:///…, or a path.")
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        store, root, shown = open_store(text, dict(storage_options or {}), timeout_seconds)
        return Storage(store, root, shown)
    else:
        path = os.path.expanduser(text)
    # Made by hand: fsspec would take `::` in a path for a chain of filesystems, urllib `#` and `?` for ends of it.
    root = os.path.abspath(path)
    if is_on_databricks(root):
        check_mount(text, root)
    return Storage(LocalFileSystem(), root, "file://" + quote(root))


def _modified(info: Mapping[str, Any]) -> float:
    """When a file was written last; each filesystem of fsspec has its own word for it."""
    names = ("mtime", "last_modified", "LastModified", "modified", "created")
    value = next((info[name] for name in names if info.get(name)), 0.0)
    return float(value.timestamp() if hasattr(value, "timestamp") else value)
