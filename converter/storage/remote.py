"""A directory in a store behind a network."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import posixpath
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from glob import has_magic
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from converter.portable.deadlines import Request, Result
from converter.storage.directory import Storage, StorageOptions, modified
from converter.storage.ranges import Data, PartialFile
from converter.storage.requests import answer_of
from converter.storage.store import Store

if TYPE_CHECKING:
    from converter.portable.records import StoreSpec


class RemoteStorage(Storage):
    """A directory in a `Store`, which retries requests and shows no secret."""

    is_local = False
    _filesystem: Store

    def __init__(self, filesystem: Store, root: str, url: str) -> None:
        super().__init__(filesystem, root, url)
        self.survives_fork, self.has_folders = filesystem.survives_fork, filesystem.has_folders
        self.has_containers = filesystem.has_containers

    @property
    def store(self) -> StoreSpec:
        """What an executor needs to open the same filesystem, secrets included."""
        return self._filesystem.spec

    @property
    def options(self) -> dict[str, Any]:
        """The filesystem's options, secrets included."""
        return dict(self._filesystem.options)

    @property
    def user(self) -> str | None:
        """The user who owns new files, if cache_dir or storage_options name one."""
        return self._filesystem.user

    @property
    def address(self) -> tuple[Any, ...]:
        """The store and the credentials, to be compared with those of another directory."""
        return self._filesystem.protocol, self._filesystem.options, self._filesystem.host

    @property
    def spark_url(self) -> str:
        """The directory as Spark takes it."""
        return self.url

    def is_beside(self, other: Storage) -> bool:
        """Whether another directory is in the same store, with the same credentials."""
        return isinstance(other, RemoteStorage) and self.address == other.address

    def delta_place(self) -> tuple[str, dict[str, str]]:
        """The URL and the options by which deltalake opens this directory, secrets included."""
        return self._filesystem.delta_url(self.url), self._filesystem.delta_options()

    def wait_for(self, call: Callable[[], Result]) -> Result:
        """What another client returns, within this store's time. Raises TimeoutError."""
        return self._filesystem.wait_for(call, path=self.url)

    def path_of(self, url: str) -> str | None:
        """The path of an encoded URL, or of an absolute path, in this store; None if it is elsewhere."""
        if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", url):
            # Without a scheme it is in the same container or bucket.
            return self._root.partition("/")[0] + unquote(url)
        # Hadoop takes hdfs:/path as well as hdfs:///path.
        return self._filesystem.path_of(re.sub(r"^([^/:]+):/(?=[^/])", r"\1:///", unquote(url)))

    def lend(self, options: StorageOptions) -> None:
        """Give a copy that was pickled without its secrets the options that it lacks."""
        self._filesystem.options = dict(options)

    def without_secrets(self, text: str) -> str:
        """The text with each secret of the options replaced."""
        return self._filesystem.without_secrets(text)

    def harmless(self, error: BaseException) -> BaseException:
        """An error as a cause that may be shown."""
        return self._filesystem.harmless(error) or error

    def below(self, *names: str) -> Storage:
        """The directory `names` below this one."""
        return RemoteStorage(self._filesystem, self.path(*names), posixpath.join(self.url, *names))

    def at(self, path: str) -> Storage:
        """The directory at a path of this filesystem."""
        if f"{self._root}/".startswith(posixpath.join(path, "")):
            url = self.url.removesuffix(self._root.removeprefix(path))
        elif self._root.startswith("/"):
            url = self.url.removesuffix(self._root) + path
        else:
            # The path begins with the container's or the bucket's name, which the URL has behind its scheme.
            own, _, below_own = self._root.partition("/")
            other, _, below = path.partition("/")
            first = self.url.removesuffix(below_own).rstrip("/").replace(f"://{own}", f"://{other}", 1)
            url = f"{first}/{below}" if below else first
        return RemoteStorage(self._filesystem, path, url)

    def delete_tree(self) -> None:
        """Remove this directory with all that is in it; only for directories that no other process writes."""
        if not has_magic(self._root):
            super().delete_tree()
            return
        # fsspec takes `*` and `[1]` in a path that it deletes for a pattern.
        store, root = self._filesystem, self._root
        store.invalidate_cache(root)
        with contextlib.suppress(FileNotFoundError):
            found = store.ask(lambda client: client.find(root, withdirs=True, detail=True), path=root)
            for path, info in sorted(found.items(), reverse=True):
                with contextlib.suppress(FileNotFoundError):
                    (store.rmdir if info["type"] == "directory" else store.rm_file)(path)
            store.rmdir(root)

    def hurried(self, timeout_seconds: float) -> AbstractContextManager[None]:
        """Wait no longer than this for the store inside the `with`."""
        return self._filesystem.hurried(timeout_seconds)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create a small file with all of `data`, or return False because the name is taken."""
        return self._filesystem.create(self.path(name), data)

    def meanwhile(self, call: Callable[[], Result]) -> Callable[[], Result]:
        """Begin a question to the store; its answer is returned later."""
        return functools.partial(answer_of, Request(call, is_native=False))

    def touch(self, name: str, given_up: threading.Event | None = None, within: float = math.inf) -> None:
        """Set a file's time to now, without creating it, if the store answers within so many seconds.

        Raises FileNotFoundError, and OSError as `Store.ask`.
        """
        self._filesystem.renew(self.path(name), given_up, within)

    def look(self, name: str, given_up: threading.Event | None = None) -> tuple[int, int | None]:
        """A file's size, and its stamp: a hash of the store's ETag or time. Raises FileNotFoundError."""
        self._filesystem.invalidate_cache(posixpath.dirname(self.path(name)))
        info = self._info(self.path(name), given_up)
        etag = next((str(info[key]) for key in ("etag", "ETag", "Last-Modified") if info.get(key)), "")
        # Stores quote an ETag in one answer and not in another.
        version = etag.removeprefix("W/").strip('"') or modified(info)
        digest = hashlib.sha256(str(version).encode()).digest()
        return int(info["size"]), int.from_bytes(digest[:8], "big", signed=True) if version else None

    def read_part(self, name: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """Some bytes of a file, in one request. Raises FileNotFoundError, and OSError as `Store.ask`."""
        return self._filesystem.read_in_turn(self.path(name), start, end, given_up)

    def share_line(self, processes_count: int) -> None:
        """Count with so many processes, including this one, that read from the store at the same time."""
        self._filesystem.share_line(processes_count)

    def open_parquet(
        self, name: str, num_bytes: int | None = None, given_up: threading.Event | None = None
    ) -> pa.NativeFile:
        """A file of which only what is read is fetched; the caller closes it. Raises FileNotFoundError."""
        if num_bytes is None:
            num_bytes = self.size(name, given_up)
            if num_bytes is None:
                raise FileNotFoundError(self.path(name))
        fetch = functools.partial(self.read_part, name, given_up=given_up)
        return pa.PythonFile(PartialFile(num_bytes, fetch), mode="r")

    def _info(self, path: str, given_up: threading.Event | None = None) -> Mapping[str, Any]:
        return self._filesystem.info(path, given_up=given_up)
