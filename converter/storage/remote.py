"""A directory in a store behind a network."""

from __future__ import annotations

import functools
import hashlib
import posixpath
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from converter.storage.directory import FileInfo, Result, Storage, StorageOptions, modified
from converter.storage.ranges import Data, PartialFile
from converter.storage.requests import Request


class RemoteStorage(Storage):
    """A directory of a `Store`, which is asked with patience and gives no secret away."""

    is_local = False

    @property
    def store(self) -> dict[str, Any] | None:
        """What an executor needs to open the same filesystem, its secrets included."""
        found = self._filesystem
        return {"protocol": found.protocol, "options": found.options, "timeout_seconds": found.timeout_seconds}

    @property
    def options(self) -> dict[str, Any]:
        """The filesystem's options, secrets included."""
        return dict(self._filesystem.options)

    @property
    def user(self) -> str | None:
        """As whom files are written here, where cache_dir or storage_options name somebody."""
        user: str | None = self._filesystem.user
        return user

    @property
    def survives_fork(self) -> bool:
        """Whether a forked child can read here."""
        return bool(self._filesystem.survives_fork)

    @property
    def has_folders(self) -> bool:
        """Whether it can be listed; of a web server only files are known that are named."""
        return bool(self._filesystem.has_folders)

    @property
    def has_containers(self) -> bool:
        """Whether the first name of a path is a container's or a bucket's."""
        return bool(self._filesystem.has_containers)

    @property
    def _place(self) -> tuple[Any, ...]:
        return self._filesystem.protocol, self._filesystem.options, self._filesystem.host

    @property
    def spark_url(self) -> str:
        """The directory as Spark takes it."""
        return self.url

    def is_beside(self, other: Storage) -> bool:
        """Whether another directory is in the same store, asked with the same credentials."""
        if not isinstance(other, RemoteStorage):
            return False
        return self._place == other._place  # noqa: SLF001 (of its own kind)

    def delta_place(self) -> tuple[str, dict[str, str]]:
        """What deltalake calls this directory, and how it is told the credentials, secrets included."""
        options: dict[str, str] = self._filesystem.delta_options()
        return self._filesystem.delta_url(self.url), options

    def wait_for(self, call: Callable[[], Result]) -> Result:
        """What another client says of this directory, waited for as its own. Raises TimeoutError."""
        found: Result = self._filesystem.wait_for(call, path=self.url)
        return found

    def path_of(self, url: str) -> str | None:
        """The path of an encoded URL, or of an absolute path, in this store; None where it is in another one."""
        if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", url):
            # Without a scheme it is in the same container or bucket.
            own = self._root.partition("/")[0]
            return unquote(url) if not own else f"{own}{unquote(url)}"
        # Hadoop takes both forms.
        found: str | None = self._filesystem.path_of(re.sub(r"^([^/:]+):/(?=[^/])", r"\1:///", unquote(url)))
        return found

    def lend(self, options: StorageOptions) -> None:
        """Give a copy that came without its secrets the options that it lacks."""
        self._filesystem.options = dict(options)

    def without_secrets(self, text: str) -> str:
        """A text in which nothing of the options is shown that nobody may see."""
        return str(self._filesystem.without_secrets(text))

    def harmless(self, error: BaseException) -> BaseException:
        """An error as a cause that may be shown."""
        found = self._filesystem.harmless(error)
        return found if isinstance(found, BaseException) else error

    def below(self, *names: str) -> Storage:
        """The directory `names` below this one."""
        return RemoteStorage(self._filesystem, self.path(*names), posixpath.join(self.url, *names))

    def at(self, path: str) -> Storage:
        """The directory at `path`, as the filesystem knows it."""
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
        return RemoteStorage(self._filesystem, path, url)

    def hurried(self, timeout_seconds: float) -> AbstractContextManager[None]:
        """Wait no longer than this for the store meanwhile."""
        hurry: AbstractContextManager[None] = self._filesystem.hurried(timeout_seconds)
        return hurry

    def leads_to_folder(self, info: FileInfo) -> bool:
        """Whether one of those that are listed here is a folder."""
        return info.is_directory

    def real_path(self) -> str:
        """The path of this directory."""
        return self._root

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a small file with all of `data`, or return False because the name is taken."""
        return bool(self._filesystem.create(self.path(name), data))

    def meanwhile(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """Ask the store something while it is asked something else."""
        return Request(call).answer

    def touch(self, name: str, given_up: threading.Event | None = None) -> None:
        """Renew a file's time without creating it: raises FileNotFoundError where it is gone."""
        self._filesystem.renew(self.path(name), given_up)

    def identity(self, name: str) -> tuple[int, ...] | None:  # noqa: ARG002 (only opening can tell)
        """None: only opening can tell."""
        return None

    def look(self, name: str, given_up: threading.Event | None = None) -> tuple[int, int | None]:
        """A file's size, and its stamp: a number that is another one once the file is written again.

        Of a local file its time in ns, else what the store says of the content (ETag) or of the time; None where it
        says neither. Raises FileNotFoundError.
        """
        self._filesystem.invalidate_cache(posixpath.dirname(self.path(name)))
        info = self._info(self.path(name), given_up)
        etag = next((str(info[key]) for key in ("etag", "ETag", "Last-Modified") if info.get(key)), "")
        # Stores quote it in one answer and not in another.
        said = etag.removeprefix("W/").strip('"') or modified(info)
        digest = hashlib.sha256(str(said).encode()).digest()
        return int(info["size"]), int.from_bytes(digest[:8], "big", signed=True) if said else None

    def read_part(self, name: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """Some bytes of a remote file, in one request. Raises FileNotFoundError, and OSError as `Store.ask`."""
        found: Data = self._filesystem.read_in_turn(self.path(name), start, end, given_up)
        return found

    def share_line(self, processes_count: int) -> None:
        """Say how many processes, this one among them, read from the store at the same time."""
        self._filesystem.share_line(processes_count)

    def open_parquet(
        self, name: str, num_bytes: int | None = None, given_up: threading.Event | None = None
    ) -> pa.NativeFile:
        """A random-access source for `pyarrow.parquet.ParquetFile`; the caller closes it. Raises FileNotFoundError.

        Local files are mapped into memory: the page cache is the buffer, and nothing is copied
        before it is decoded. Of remote ones only what is read is fetched, and the footer in one request where
        the file's size is said.
        """
        if num_bytes is None:
            num_bytes = self.size(name, given_up)
            if num_bytes is None:
                raise FileNotFoundError(self.path(name))
        fetch = functools.partial(self.read_part, name, given_up=given_up)
        return pa.PythonFile(PartialFile(num_bytes, fetch), mode="r")

    def _info(self, path: str, given_up: threading.Event | None = None) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._filesystem.info(path, given_up=given_up)
        return found
