"""Filesystems behind a network: how each is opened, and what it takes to ask them anything.

A `Store` is an fsspec filesystem with patience. Every request runs in a thread of
its own, so that one which hangs can be given up: by Ctrl-C, by who closes a loader,
or because `timeout_seconds` are over. What passes (throttling, a reset connection, a
node that restarts) is asked again, later and later; what does not (no permission, no
such file) is an error at once. Errors arrive as OSError, without any secret.

Each process opens its own: clients do not survive a fork.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import importlib.util
import inspect
import os
import random
import re
import socket
import ssl
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote, unquote, urlsplit

import fsspec
import pyarrow as pa
from fsspec.asyn import sync
from fsspec.implementations.dirfs import DirFileSystem

from converter.errors import MissingDependencyError
from converter.portable import tasks
from converter.portable.redaction import errors_behind, hide_secrets, is_secret, shows_secrets
from converter.storage.ranges import MAX_REQUEST_BYTES, Data

Result = TypeVar("Result")

TIMEOUT_SECONDS = 120.0
"""How long a store may be out of reach before that is an error."""

_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 5.0
_LOOK_SECONDS = 0.05

_SLOW_BYTES_PER_SECOND = 750_000
"""A line this slow is counted with when nothing is known of it; a guess."""

_TELLING_BYTES = 1 << 20
"""What is shorter tells how long a request takes, and not how fast the line is."""

_TIME_USED = 0.25
"""Of the time that an answer may take, where the line is known; a guess."""

_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
_FIRST_BAD_STATUS = 400
"""Below, what went wrong is the body, which may be cut."""

_STATUS_NAMES = {"ClientResponseError": "status", "HttpError": "code"}
"""Where aiohttp and gcsfs say it; all others as `status_code`."""

_PASSING_CODES = {"SlowDown", "RequestTimeout", "ConditionalRequestConflict", "OperationAborted"}
"""Of S3; the last two mean that somebody else is changing the same object."""

_REFUSED_STATUS = {401, 403}
_GONE_STATUS = {404, 410}
_PARTIAL_STATUS = 206
_BEYOND_THE_END_STATUS = 416
"""Of a part that begins where the file has ended already."""
_PASSING_KINDS = {"ServiceRequestError", "ServiceResponseError", "IncompleteReadError", "ClientConnectionError",
                  "ClientPayloadError"}  # fmt: skip
"""Of azure-core and aiohttp, which need not be there."""

_PASSING_SIGNS = ("DataTransferError", "All DataNodes failed", "Connection", "SafeModeException", "StandbyException")
"""In what hdfs-native says; it has no classes for them."""

REQUEST_THREAD = tasks.REQUEST_THREAD
_MAX_KEPT_READERS = 256
_MAX_TEXT = 300
_HTTP_SCHEMES = ("http", "https")
_GOOGLE_SCHEMES = ("gs", "gcs")
_S3_SCHEMES = ("s3", "s3a")
_OBJECT_SCHEMES = (*_S3_SCHEMES, *_GOOGLE_SCHEMES)
_AZURE_SCHEMES = ("abfs", "abfss", "az")
_PACKAGES = (
    dict.fromkeys(_S3_SCHEMES, ("s3fs", "'spark-tensor-converter[s3]'"))
    | dict.fromkeys(_GOOGLE_SCHEMES, ("gcsfs", "gcsfs"))
    | dict.fromkeys(_HTTP_SCHEMES, ("aiohttp", "aiohttp"))
)
"""The module that fsspec needs for a scheme, and what pip installs for it."""

_AZURE_HOST = re.compile(r"[a-z0-9-]+\.(dfs|blob)\.(core\.windows\.net|fabric\.microsoft\.com|core\.[a-z.]+)")
_AZURE_SCOPE = "https://storage.azure.com/.default"
_AZURE_CREDENTIALS = ("connection_string", "account_key", "sas_token", "credential", "client_secret")
_AZURE_BLOBS = "blob.core.windows.net"
_AZURE_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"
_AZURE_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FSSPEC_OPTIONS = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "loop"}
"""What every filesystem of fsspec takes."""


class GivenUpError(OSError):
    """Nobody waits for this answer any more."""


class NotOpenedError(OSError):
    """There is no client to ask: what the URL names must be configured first."""


class Store:
    """An fsspec filesystem that is asked with patience; the names of methods are fsspec's."""

    is_native = False
    """Whether its client waits in code of its own, which must not come back while the interpreter ends."""

    survives_fork = True
    """Whether a forked child may open its own where its parent has one."""

    has_containers = True
    """Whether the first name of a path without a leading slash is a container's or a bucket's."""

    has_folders = True
    """Whether what is in a folder can be asked."""

    host: str | None = None
    """Whose paths these are, where the options do not say it."""

    def __init__(self, options: Mapping[str, Any], *, protocol: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.options, self.protocol, self._timeout_seconds = dict(options), protocol, timeout_seconds
        self._hurries: list[float] = []
        self._opened: tuple[int, Any] | None = None
        self._opening = threading.Lock()
        self._line: tuple[int, _Line] | None = None
        # Of this process's own memory nothing is lost, and threads are kept apart by a lock of ours.
        self._keeps_answers = self._creates_exclusively = protocol == "memory"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.protocol!r})"

    @property
    def user(self) -> str | None:
        """As whom files are written, where that was named and each client must be told."""
        return None

    @property
    def timeout_seconds(self) -> float:
        """How long it may be out of reach."""
        return min([self._timeout_seconds, *self._hurries])

    @contextlib.contextmanager
    def hurried(self, timeout_seconds: float) -> Iterator[None]:
        """Wait no longer than this meanwhile; several may say so, each for its own while."""
        self._hurries.append(timeout_seconds)
        try:
            yield
        finally:
            self._hurries.remove(timeout_seconds)

    def __reduce__(self) -> tuple[Any, ...]:
        # No secret travels, and nothing that is open.
        named: dict[str, Any] = {"protocol": self.protocol, "timeout_seconds": self._timeout_seconds}
        if self.host is not None:
            named["host"] = self.host
        return functools.partial(type(self), **named), (self.open_options,)

    def filesystem(self) -> Any:
        """This process's own filesystem; opening it may ask the network."""
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            if opened is not None:
                # The lock may have been held where this process was forked.
                self._opening = threading.Lock()
            with self._opening:
                opened = self._opened = os.getpid(), self._open()
        return opened[1]

    def delta_options(self) -> dict[str, str]:
        """The options by the names that deltalake has for them; those that are no texts are for fsspec alone."""
        return {name: value for name, value in self.options.items() if isinstance(value, str)}

    def delta_url(self, url: str) -> str:
        """What deltalake calls a directory."""
        return url

    def path_of(self, url: str) -> str | None:
        """The path of a URL on this filesystem; None where it is on another one."""
        scheme, netloc, path = _split_url(url)
        return f"/{netloc}{path}" if scheme == self.protocol else None

    def _open(self) -> Any:
        return tasks.open_filesystem({"protocol": self.protocol, "options": self.options}, skip_instance_cache=True)

    def ask(self, request: Callable[[Any], Result], *, path: str, given_up: threading.Event | None = None) -> Result:
        """What `request` answers, given the filesystem; asked again while that makes sense.

        Raises:
            FileNotFoundError: there is no such file.
            PermissionError: the store refuses these credentials.
            NotOpenedError: its client cannot be made as things are configured.
            TimeoutError: it gave no answer, or none but "later", for `timeout_seconds`.
            OSError: anything else, with the store's own words.
        """
        deadline = time.monotonic() + self.timeout_seconds
        pause = _FIRST_PAUSE_SECONDS
        last: BaseException | None = None
        while True:
            try:
                asked = Request(lambda: request(self.filesystem()), is_native=self.is_native)
                return asked.answer(deadline=deadline, given_up=given_up)
            except (FileNotFoundError, FileExistsError, NotADirectoryError, GivenUpError, NotOpenedError):
                raise
            except PermissionError as error:
                raise self._named(error, path) from self.harmless(error)
            except _NoAnswerError:
                break
            except Exception as error:  # noqa: BLE001 (each client has errors of its own)
                if not self.passes(error):
                    raise self._named(error, path) from self.harmless(error)
                last = error
            wait = pause * random.uniform(0.5, 1.5)  # noqa: S311 (so that many who were throttled do not come back at once)
            left = deadline - time.monotonic()
            if left < _FIRST_PAUSE_SECONDS:
                break
            # So that it is asked until the end, also where the next pause would be behind it.
            wait = min(wait, left / 2)
            if given_up is not None:
                if given_up.wait(wait):
                    raise GivenUpError(f"{path} is not wanted any more")
            else:
                time.sleep(wait)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        raise self._too_late(path, last) from self.harmless(last)

    def wait_for(self, call: Callable[[], Result], *, path: str) -> Result:
        """What another's client answers, which may know no deadline. Raises TimeoutError."""
        try:
            return Request(call, is_native=True).answer(deadline=time.monotonic() + self.timeout_seconds)
        except _NoAnswerError:
            raise self._too_late(path) from None

    def _too_late(self, path: str, last: BaseException | None = None) -> TimeoutError:
        said = self._why_silent() if last is None else f", and said at last: {self._text(last)}"
        waited = f"{self.timeout_seconds:g} seconds (timeout_seconds)"
        return TimeoutError(self.without_secrets(f"{path} could not be reached for {waited}{said}"))

    def _why_silent(self) -> str:
        """What can be said of a store that gave no answer at all."""
        return ""

    def passes(self, error: BaseException) -> bool:
        """Whether the same request may be answered a little later."""
        if isinstance(error, (TimeoutError, ConnectionError)):
            return True
        if any(
            isinstance(one, ssl.SSLCertVerificationError) or "WRONG_VERSION_NUMBER" in str(one)
            for one in errors_behind(error)
        ):
            # Who does not trust the store's certificate now will not trust it later; the other speaks no TLS at all.
            return False
        if (code := _aws_code(error)) is not None and code in _PASSING_CODES:
            return True
        status = _status(error)
        if status is not None and status >= _FIRST_BAD_STATUS:
            return status in _PASSING_STATUS
        return any(kind.__name__ in _PASSING_KINDS for kind in type(error).__mro__)

    def _named(self, error: Exception, path: str) -> OSError:
        text = f"{self.without_secrets(path)}: {self._text(error)}"
        status = _status(error)
        if isinstance(error, PermissionError) or status in _REFUSED_STATUS:
            return PermissionError(text)
        return FileNotFoundError(text) if status == 404 else OSError(text)

    def _text(self, error: BaseException) -> str:
        """An error in a line, without secrets: cut afterwards, because of a part of one nobody knows that it is."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = self.without_secrets(f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": "))
        return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"

    def harmless(self, error: BaseException | None) -> BaseException | None:
        """The error as a cause that may be shown: one whose text holds a secret is replaced."""
        if error is None or not shows_secrets(error, self.options):
            return error
        return OSError(self._text(error))

    @property
    def open_options(self) -> dict[str, Any]:
        """The options without secrets; what gives tokens when asked is none."""
        return {name: value for name, value in self.options.items() if not is_secret(name, value)}

    def without_secrets(self, text: str) -> str:
        """A text in which whatever the options hold that nobody may see is replaced."""
        return hide_secrets(text, self.options)

    # What Storage asks for.

    def invalidate_cache(self, path: str) -> None:
        """Forget listings that the client may hold; opening one is for `ask`, which names what goes wrong."""
        opened = self._opened
        if opened is not None and opened[0] == os.getpid():
            opened[1].invalidate_cache(path)

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        """What stands in a directory."""
        return self.ask(lambda filesystem: list(filesystem.ls(path, detail=detail)), path=path)

    def info(self, path: str, given_up: threading.Event | None = None) -> dict[str, Any]:
        """Size and kind of a file."""
        return self.ask(lambda filesystem: dict(filesystem.info(path)), path=path, given_up=given_up)

    def makedirs(self, path: str, exist_ok: bool = True) -> None:
        """Create a directory and those above it."""
        self.ask(lambda filesystem: filesystem.makedirs(path, exist_ok=exist_ok), path=path)

    def cat_file(self, path: str, given_up: threading.Event | None = None) -> bytes:
        """The bytes of a file."""
        return self.ask(lambda filesystem: bytes(filesystem.cat_file(path)), path=path, given_up=given_up)

    def read_range(self, path: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """A part of a file, in one request; fewer bytes where it ends before."""

        def read(filesystem: Any) -> bytes:
            try:
                return bytes(filesystem.cat_file(path, start=start, end=end))
            except Exception as error:
                if _status(error) == _BEYOND_THE_END_STATUS:
                    return b""
                raise

        return self.ask(read, path=path, given_up=given_up)

    def read_in_turn(self, path: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """The same, once those that are asked for leave room for it on the line."""
        num_bytes = end - start
        with self._own_line().taken(num_bytes, self.timeout_seconds, given_up, lambda: self._too_late(path)):
            try:
                return self.read_range(path, start, end, given_up)
            except TimeoutError as error:
                if error.__cause__ is not None or num_bytes < _TELLING_BYTES:
                    raise
                slow = f"; {num_bytes / 1e6:,.1f} MB were asked for, for which a slow line needs more seconds"
                raise TimeoutError(f"{error}{slow}") from None

    def share_line(self, processes_count: int) -> None:
        """Count with so many processes, this one among them, that read at the same time."""
        self._own_line().processes_count = processes_count

    def _own_line(self) -> _Line:
        pid = os.getpid()
        if self._line is None or self._line[0] != pid:
            self._line = pid, _Line()
        return self._line[1]

    def create(self, path: str, data: bytes) -> bool:
        """Create a small file that appears whole, or return False because the name is taken by another content."""
        try:
            self.ask(lambda filesystem: self._create(filesystem, path, data), path=path)
        except FileExistsError:
            # Of an earlier attempt, ours or the client's own, the answer alone may be lost.
            return not self._keeps_answers and self.cat_file(path) == data
        return True

    def _create(self, filesystem: Any, path: str, data: bytes) -> None:
        # fsspec's memory store looks first and creates then; between threads a lock makes that one step.
        with _in_process if self.protocol == "memory" else contextlib.nullcontext():
            if not self._creates_exclusively:
                self._try_exclusively(filesystem, f"{path}.{uuid.uuid4().hex}.tmp")
            self._create_exclusively(filesystem, path, data)

    def _try_exclusively(self, filesystem: Any, path: str) -> None:
        """Make sure of it once: fsspec takes the mode "x" also for stores that then write over what is there."""
        self._create_exclusively(filesystem, path, b"first")
        is_exclusive = False
        try:
            self._create_exclusively(filesystem, path, b"second")
        except FileExistsError:
            is_exclusive = True
        finally:
            filesystem.rm_file(path)
        if not is_exclusive:
            raise OSError(f"{self.protocol} creates a file also where there is one, so that a commit could be lost")
        self._creates_exclusively = True

    def _create_exclusively(self, filesystem: Any, path: str, data: bytes) -> None:
        try:
            file = filesystem.open(path, "xb")
        except (ValueError, NotImplementedError) as error:
            raise OSError(
                f"{self.protocol} cannot create a file only where there is none ({error}), which a commit needs"
            ) from error
        with file:
            file.write(data)

    def renew(self, path: str, given_up: threading.Event | None = None) -> None:
        """Let a file's time be now, without creating it; raises FileNotFoundError where it is gone.

        Who sets `given_up` may delete the file then, whatever request is still on its way.
        """
        data = self.cat_file(path, given_up)

        def write(filesystem: Any) -> None:
            filesystem.pipe_file(path, data)
            if given_up is not None and given_up.is_set():
                # Of all renewals this one alone creates: what hung until nobody waited came after the deletion.
                filesystem.rm_file(path)

        self.ask(write, path=path, given_up=given_up)

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        self.ask(lambda filesystem: filesystem.rm_file(path), path=path)

    def rm(self, path: str, recursive: bool = True) -> None:
        """Delete a directory with all that stands in it."""
        self.ask(lambda filesystem: filesystem.rm(path, recursive=recursive), path=path)

    def rmdir(self, path: str) -> None:
        """Delete a directory unless something stands in it."""
        if not self.ls(path):
            with contextlib.suppress(OSError):
                self.ask(lambda filesystem: filesystem.rmdir(path), path=path)


_GOOGLE_NAMES = {"token": "google_service_account", "endpoint_url": "google_base_url"}
"""How deltalake calls what gcsfs calls so."""

_S3_NAMES = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token",
             "endpoint_url": "aws_endpoint_url", "region_name": "aws_region"}  # fmt: skip
"""How deltalake calls what s3fs calls so."""


class HdfsStore(Store):
    """HDFS through hdfs-native: no JVM, no libhdfs."""

    survives_fork = False
    is_native = True
    _used_by: int | None = None

    def __init__(self, options: Mapping[str, Any], *, protocol: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        super().__init__(options, protocol=protocol, timeout_seconds=timeout_seconds)
        self._readers: dict[str, Any] = {}

    @property
    def user(self) -> str | None:
        """The one of the options or of the URL; None where the environment says it, as it does to Hadoop's clients."""
        user = self.options.get("user")
        return None if user is None else str(user)

    def passes(self, error: BaseException) -> bool:
        """Also what hdfs-native raises where nodes are away, or where the NameNode is about to begin."""
        return super().passes(error) or (
            isinstance(error, (RuntimeError, OSError)) and any(sign in str(error) for sign in _PASSING_SIGNS)
        )

    def path_of(self, url: str) -> str | None:
        """The path of a URL on this filesystem; without a cluster's name it is this one."""
        scheme, netloc, path = _split_url(url)
        place, host, port = urlsplit(f"//{netloc}"), self.options.get("host"), self.options.get("port")
        # Who says no cluster's name, or no port, means that of Hadoop's configuration.
        is_named = place.hostname is not None and host is not None
        is_other = is_named and (place.hostname != host or (place.port or port) != (port or place.port))
        return None if scheme != self.protocol or is_other else path

    def _why_silent(self) -> str:
        # hdfs-native goes on trying by itself, and does not say why it must.
        host, port = self.options.get("host"), self.options.get("port")
        if host is not None and port is not None:
            try:
                socket.create_connection((str(host), int(port)), timeout=1).close()
            except OSError as error:
                return f": {host}:{port} says {error.strerror or error}"
        return ""

    def _open(self) -> Any:
        # Its threads are the process's, and a forked child that used them would wait for ever.
        if HdfsStore._used_by not in (None, os.getpid()):
            raise OSError(
                "hdfs-native does not work in a process that was forked from one that used it; start processes anew, "
                "e.g. with multiprocessing_context='spawn'"
            )
        if HdfsStore._used_by is None:
            # Nor may it collect the garbage that its parent has left: a reader of hdfs-native's waits for them too.
            os.register_at_fork(after_in_child=gc.freeze)
        HdfsStore._used_by = os.getpid()
        try:
            return super()._open()
        except RuntimeError as error:
            if self.options.get("port") is not None or "InvalidArgument" not in str(error):
                raise
            raise NotOpenedError(f"{self._not_configured()} ({self._text(error)})") from error

    def _not_configured(self) -> str:
        """What to do where hdfs-native finds no cluster; nobody was asked yet."""
        host = self.options.get("host") or ""
        place = f"{self.protocol}://{host or '/'}"
        if self.protocol == "viewfs":
            return f"{place} needs mounts: let HADOOP_CONF_DIR name the folder of the core-site.xml that has them"
        if not host:
            return (
                f"{place} takes the cluster from Hadoop's configuration: let HADOOP_CONF_DIR name the folder of "
                "core-site.xml and hdfs-site.xml, or write hdfs://host:port/…"
            )
        return (
            f"{place} has no port, and is no name service that Hadoop's configuration knows: write the NameNode's, "
            f"as in {place}:8020/…, or let HADOOP_CONF_DIR name the folder of the hdfs-site.xml that has it"
        )

    def _create(self, filesystem: Any, path: str, data: bytes) -> None:
        # A new file is seen before its content; a rename that overwrites nothing is one step of the NameNode.
        from hdfs_native import WriteOptions

        aside = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            file = filesystem.client.create(aside, WriteOptions(overwrite=False))
            if data:
                file.write(data)
            tasks.close_whole(filesystem, file, aside, len(data))
            filesystem.client.rename(aside, path, overwrite=False)
        except BaseException:
            with contextlib.suppress(Exception):
                filesystem.client.delete(aside)
            raise

    def _named(self, error: Exception, path: str) -> OSError:
        found = super()._named(error, path)
        return PermissionError(*found.args) if "AccessControlException" in str(error) else found

    def cat_file(self, path: str, given_up: threading.Event | None = None) -> bytes:
        """The bytes of a file."""

        def read(filesystem: Any) -> bytes:
            reader = filesystem.client.read(path)
            # hdfs-native panics where it is asked for more than there is.
            return bytes(reader.read_range(0, len(reader))) if len(reader) else b""

        return self.ask(read, path=path, given_up=given_up)

    def read_range(self, path: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """A part of a file; fewer bytes where it ends before.

        Piece by piece into memory of Arrow's pool, which is warm: 1.3 GB/s, where what `read_range` hands out has new
        pages each time, 0.9 GB/s. The NameNode is asked once where a file lies, until a part of it cannot be read.
        """

        def read(filesystem: Any) -> pa.Buffer:
            reader = self._readers.get(path)
            try:
                if reader is None:
                    reader = filesystem.client.read(path)
                last = min(end, len(reader))
                found = pa.allocate_buffer(max(0, last - start))
                view, at = memoryview(found).cast("B"), 0
                for piece in reader.read_range_stream(start, found.size) if found.size else ():
                    view[at : at + len(piece)] = piece
                    at += len(piece)
            except BaseException:
                self._readers.pop(path, None)
                raise
            if at != found.size:
                raise ConnectionError(f"{at} bytes came where {found.size} were asked for")
            if len(self._readers) >= _MAX_KEPT_READERS:
                self._readers.clear()
            self._readers[path] = reader
            return found

        return self.ask(read, path=path, given_up=given_up)

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        """What stands in a directory; its times in seconds, as everywhere."""
        return [_with_mtime(info) for info in super().ls(path, detail)]

    def info(self, path: str, given_up: threading.Event | None = None) -> dict[str, Any]:
        """Size, kind and time of a file."""
        return _with_mtime(super().info(path, given_up))

    def renew(self, path: str, given_up: threading.Event | None = None) -> None:
        """Append nothing: the NameNode then notes its own time."""
        self.ask(lambda filesystem: filesystem.client.append(path).close(), path=path, given_up=given_up)


class HttpStore(Store):
    """A web server, of which files are read that are named: paths begin behind its name."""

    has_containers = False
    has_folders = False

    def __init__(self, options: Mapping[str, Any], *, host: str, protocol: str, timeout_seconds: float) -> None:
        super().__init__(options, protocol=protocol, timeout_seconds=timeout_seconds)
        self.host = host

    def _open(self) -> Any:
        return DirFileSystem(path=f"{self.protocol}://{self.host}", fs=super()._open())

    def ask(self, request: Callable[[Any], Result], *, path: str, given_up: threading.Event | None = None) -> Result:
        """As every store's, with errors that name the host."""

        def answer(filesystem: Any) -> Result:
            try:
                return request(filesystem)
            except FileNotFoundError as error:
                # To fsspec's client each file is missing whose size it was not told.
                cause = error.__cause__
                if not isinstance(cause, Exception) or _status(cause) in _GONE_STATUS:
                    raise
                raise cause from None

        return super().ask(answer, path=f"{self.protocol}://{self.host}/{path}", given_up=given_up)

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:  # noqa: ARG002 (the name is fsspec's)
        """Refuse: a page of links need not name each file, and nobody would notice."""
        raise OSError(
            f"{self.protocol}://{self.host}/{path} is on a web server, which has no folders that could be listed; "
            "name each file, in a list"
        )

    def info(self, path: str, given_up: threading.Event | None = None) -> dict[str, Any]:
        """Size of a file."""
        found = super().info(quote(path), given_up)
        if found.get("mimetype") == "text/html" or str(found.get("url", "")).endswith("/"):
            raise FileNotFoundError(f"{self.protocol}://{self.host}/{path} is a page")
        if found.get("size") is None:
            raise OSError(f"{self.protocol}://{self.host}/{path}: the server does not say how long it is")
        return found

    def cat_file(self, path: str, given_up: threading.Event | None = None) -> bytes:
        """The bytes of a file."""
        return super().cat_file(quote(path), given_up)

    def read_range(self, path: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """A part of a file, in one request; what is another part, or the whole file, is not taken for it."""

        async def read(filesystem: Any) -> bytes:
            url, kwargs = f"{self.protocol}://{self.host}/{quote(path)}", dict(filesystem.kwargs)
            kwargs["headers"] = {**kwargs.get("headers", {}), "Range": f"bytes={start}-{end - 1}"}
            session = await filesystem.set_session()
            async with session.get(filesystem.encode_url(url), **kwargs) as response:
                if response.status in _GONE_STATUS:
                    raise FileNotFoundError(url)
                if response.status == _BEYOND_THE_END_STATUS:
                    return b""
                response.raise_for_status()
                if response.status != _PARTIAL_STATUS:
                    raise OSError(
                        f"{self.protocol}://{self.host} answers with whole files where a part is asked for (it ignores "
                        "Range:), which would fetch each file many times. Copy the files to a disk, or choose another "
                        "server."
                    )
                said = response.headers.get("Content-Range", "")
                if not said.replace(" ", "").startswith(f"bytes{start}-"):
                    raise OSError(f"the server was asked for the bytes {start} to {end - 1}, and gave {said or 'some'}")
                return bytes(await response.read())

        if start >= end:
            return b""
        return self.ask(
            lambda filesystem: bytes(sync(filesystem.fs.loop, read, filesystem.fs)), path=path, given_up=given_up
        )


class ObjectStore(Store):
    """S3 and its like: a folder is there when an object is, and a bucket is the user's to create."""

    def ask(self, request: Callable[[Any], Result], *, path: str, given_up: threading.Event | None = None) -> Result:
        """As every store's, but a bucket that is missing is named."""
        try:
            return super().ask(request, path=path, given_up=given_up)
        except FileNotFoundError as error:
            if _aws_code(error) != "NoSuchBucket":
                raise
            raise self._no_bucket(path) from self.harmless(error)

    def _no_bucket(self, path: str) -> OSError:
        bucket = path.strip("/").partition("/")[0]
        return OSError(f"there is no bucket {bucket!r}; check its name, or create it")

    def create(self, path: str, data: bytes) -> bool:
        """As every store's; what is not found then is the bucket."""
        try:
            return super().create(path, data)
        except FileNotFoundError as error:
            raise self._no_bucket(path) from self.harmless(error)

    def delta_options(self) -> dict[str, str]:
        """The options by the names that deltalake has for them; to each cloud they are others."""
        is_google = self.protocol in _GOOGLE_SCHEMES
        names = _GOOGLE_NAMES if is_google else _S3_NAMES
        said = {**self.options, **dict(self.options.get("client_kwargs") or {})}
        found = {names.get(name, name): value for name, value in said.items() if isinstance(value, str)}
        if found.get("google_service_account") == "anon":
            del found["google_service_account"]
        if said.get("anon") is True or (is_google and said.get("token") == "anon"):
            found["google_skip_signature" if is_google else "aws_skip_signature"] = "true"
        if any(value.startswith("http://") for value in found.values()):
            found["allow_http"] = "true"
        return found

    def path_of(self, url: str) -> str | None:
        """The path of a URL on this filesystem, with the bucket; the protocols of one store are one."""
        scheme, bucket, path = _split_url(url)
        known = next(one for one in (_GOOGLE_SCHEMES, _S3_SCHEMES) if self.protocol in one)
        return f"{bucket}{path}" if scheme in known else None

    def makedirs(self, path: str, exist_ok: bool = True) -> None:
        """Do nothing; s3fs would create a bucket, or fail where it may not."""

    def renew(self, path: str, given_up: threading.Event | None = None) -> None:
        """Write the object's metadata again, which fails where it is gone."""

        def renew(filesystem: Any) -> None:
            if hasattr(filesystem, "setxattr"):
                filesystem.setxattr(path, renewed="true")
            else:
                filesystem.setxattrs(path, renewed="true")

        self.ask(renew, path=path, given_up=given_up)

    def _named(self, error: Exception, path: str) -> OSError:
        found = super()._named(error, path)
        if str(error).startswith("Forbidden: "):
            # gcsfs has no status for it.
            return PermissionError(str(found))
        if (
            self.protocol not in _GOOGLE_SCHEMES
            and _status(error) == 400
            and not isinstance(found, (PermissionError, FileNotFoundError))
        ):
            return OSError(f"{found} (S3 also answers so to credentials that have expired)")
        return found


class AzureStore(Store):
    """Azure's blobs through adlfs, on flat and hierarchical accounts."""

    _seen_container = ""
    """The last one that was there."""

    def _open(self) -> Any:
        try:
            filesystem = super()._open()
        except (ValueError, TypeError, AttributeError) as error:
            raise self._unusable(error) from None
        # Azure's own patience begins with 15 seconds, knows no deadline, and hides that a put was tried before.
        policy = getattr(getattr(filesystem.service_client, "_config", None), "retry_policy", None)
        for name in ("total_retries", "connect_retries", "read_retries", "status_retries"):
            if hasattr(policy, name):
                setattr(policy, name, 0)
        return filesystem

    def _unusable(self, error: Exception) -> OSError:
        names = ", ".join(sorted(set(self.options) & set(_AZURE_CREDENTIALS))) or "no credential"
        return OSError(f"storage_options ({names}) cannot be used: {self._text(error)}")

    def delta_options(self) -> dict[str, str]:
        """The credentials by the names that deltalake has for them; of what gives tokens one token."""
        filesystem = self.filesystem()
        connection = str(self.options.get("connection_string") or "")
        said = dict(part.partition("=")[::2] for part in connection.split(";") if part)
        # Of a connection string adlfs takes nothing else.
        credential: Any = None if connection else filesystem.credential
        account = said.get("AccountName") or filesystem.account_name or filesystem.service_client.account_name
        named_key = getattr(credential, "named_key", None)
        wanted = {
            "account_name": account,
            "account_key": said.get("AccountKey") if connection else getattr(named_key, "key", filesystem.account_key),
            "sas_token": said.get("SharedAccessSignature")
            if connection
            else getattr(credential, "signature", filesystem.sas_token),
        }
        if isinstance(credential, str):
            wanted["sas_token" if "sig=" in credential else "account_key"] = credential
        found = {name: str(value).removeprefix("?") for name, value in wanted.items() if value}
        if hasattr(credential, "get_token"):
            found["bearer_token"] = str(sync(filesystem.loop, credential.get_token, _AZURE_SCOPE).token)
        elif len(found) == 1:
            found["azure_skip_signature"] = "true"
        endpoint = str(filesystem.service_client.url).partition("?")[0].rstrip("/")
        if endpoint != f"https://{account}.{_AZURE_BLOBS}":
            found["azure_endpoint"] = endpoint
        if endpoint.startswith("http://"):
            found["allow_http"] = "true"
        return found

    def delta_url(self, url: str) -> str:
        """With the host that it knows: of another cloud's it is told as an endpoint."""
        return re.sub(r"(://[^/]*\.dfs\.)core\.[^/]+", r"\1core.windows.net", url)

    def path_of(self, url: str) -> str | None:
        """The path of a URL on this account, with the container; a `?` or `#` is a sign of a name like any."""
        scheme, netloc, path = _split_url(url)
        container, _, host = netloc.partition("@")
        account, known = host.partition(".")[0], self.options.get("account_name")
        known = known or _account_in(self.options.get("connection_string"))
        is_other = scheme not in _AZURE_SCHEMES or bool(account and known and account != known)
        return None if is_other else f"{container}{path}"

    def _named(self, error: Exception, path: str) -> OSError:
        if type(error).__name__ == "AzureSigningError":
            return self._unusable(error)
        found = super()._named(error, path)
        by_connection = "SharedAccessSignature" in str(self.options.get("connection_string"))
        if isinstance(found, PermissionError) and (by_connection or "sas_token" in self.options):
            said = "A signature for a cache must allow to read, create, write, delete and list (sp=rcwdl)"
            return PermissionError(
                f"{str(found).rstrip('.')}. {said}; to read files that are there, to read and list (sp=rl)"
            )
        return found

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        """What stands in a folder; a blob that stands for a folder is no file beside it."""
        found: dict[str, dict[str, Any]] = {}
        try:
            listed = super().ls(path, detail)
        except FileNotFoundError:
            container = path.strip("/").partition("/")[0]
            if self._lacks(container, path):
                raise OSError(
                    f"there is no container {container!r} in this account; check its name, or create it"
                ) from None
            raise
        if [(info["name"].strip("/"), info["size"]) for info in listed] == [(path.strip("/"), 0)] and self._hides(path):
            raise OSError(f"{path} is an empty blob, which hides the folder of its name from adlfs. Delete the blob.")
        for info in listed:
            name = info["name"].rstrip("/")
            if name not in found or info["type"] == "directory":
                found[name] = info
        return list(found.values())

    def _hides(self, path: str) -> bool:
        """Whether blobs are in the folder of a blob's name."""
        container, _, name = path.strip("/").partition("/")

        async def is_any(filesystem: Any) -> bool:
            below = filesystem.service_client.get_container_client(container).list_blobs(name_starts_with=f"{name}/")
            async for _ in below:
                return True
            return False

        return self.ask(lambda filesystem: bool(sync(filesystem.loop, is_any, filesystem)), path=path)

    def _lacks(self, container: str, path: str) -> bool:
        """Whether there certainly is no such container: a signature may not allow to ask."""

        def exists(filesystem: Any) -> bool:
            return bool(sync(filesystem.loop, filesystem.service_client.get_container_client(container).exists))

        if container != self._seen_container:
            with contextlib.suppress(OSError):
                if not self.ask(exists, path=path):
                    return True
                self._seen_container = container
        return False

    def makedirs(self, path: str, exist_ok: bool = True) -> None:
        """Do nothing: a folder is there when a blob is. A container is the user's to create."""

    def _create(self, filesystem: Any, path: str, data: bytes) -> None:
        # If-None-Match: * (adlfs's `mode="create"`).
        filesystem.pipe_file(path, data, mode="create")

    def renew(self, path: str, given_up: threading.Event | None = None) -> None:
        """Write the blob's metadata again."""

        def renew(filesystem: Any) -> None:
            try:
                filesystem.setxattrs(path, is_directory="false")
            except FileNotFoundError as error:
                # adlfs says that of whatever went wrong: of throttling, too.
                cause = error.__cause__
                if not isinstance(cause, Exception) or _status(cause) in _GONE_STATUS:
                    raise
                raise cause from None

        self.ask(renew, path=path, given_up=given_up)

    def rmdir(self, path: str) -> None:
        """Delete the blob that stands for a folder, if Spark's driver made one; never a container."""
        if "/" in path.strip("/") and not self.ls(path):
            with contextlib.suppress(OSError):
                self.rm_file(path)


_in_process = threading.Lock()


def check_timeout(timeout_seconds: Any) -> float:
    """The seconds as a number above 0."""
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, (int, float)):
        raise TypeError(f"timeout_seconds must be a number of seconds, got {timeout_seconds!r}.")
    if not 0 < timeout_seconds < float("inf"):
        raise ValueError(f"timeout_seconds must be above 0, got {timeout_seconds}.")
    return float(timeout_seconds)


def open_store(url: str, options: Mapping[str, Any], timeout_seconds: float) -> tuple[Store, str, str]:
    """The store that a URL names, the path in it, and the URL as it may be shown."""
    # Hadoop takes both forms.
    url = re.sub(r"^(hdfs|viewfs):/(?=[^/])", r"\1:///", url)
    shown = shown_url(url).rstrip("/")
    if "://" not in url:
        raise ValueError(f"{shown!r} is no URL that this version knows: write scheme://…, file:… or a local path.")
    _check_signs(url, shown)
    scheme, netloc, path = _split_url(url)
    if scheme in _AZURE_SCHEMES or (scheme == "https" and _AZURE_HOST.fullmatch(netloc)):
        return _open_azure(url, options, timeout_seconds)
    if scheme in ("hdfs", "viewfs"):
        if re.search(r"[?#]", path):
            # It would look into the folder that is named before the sign.
            raise ValueError(f"{shown} has a ? or # in its path, which hdfs-native cannot read. Rename the folder.")
        _require("hdfs_native", "'spark-tensor-converter[hdfs]'", shown)
        # As Hadoop does.
        path = re.sub("/{2,}", "/", path)
        shown = f"{scheme}://{netloc.rpartition('@')[2]}{path}".rstrip("/")
        place = urlsplit(f"//{netloc}")
        found = {"host": place.hostname, "port": place.port} | dict(options)
        if place.username:
            found.setdefault("user", place.username)
        return HdfsStore(found, protocol=scheme, timeout_seconds=timeout_seconds), path.rstrip("/") or "/", shown
    _check_names(path, shown)
    if "::" in path:
        raise ValueError(f"{shown} has a :: in it, which fsspec takes for a chain of filesystems. Rename the folder.")
    named = unquote(path) if scheme in _HTTP_SCHEMES else path
    if scheme in (*_OBJECT_SCHEMES, *_HTTP_SCHEMES) and re.search(r"[?#]", named):
        # fsspec's filesystems do not agree on what such a sign means, and what is shown must be where things are.
        raise ValueError(f"{shown} goes on with a ? or #, which is not supported here. Rename the folder.")
    if scheme in _PACKAGES:
        _require(*_PACKAGES[scheme], shown)
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise MissingDependencyError(f"{shown} needs a filesystem that is not installed: {error}") from error
    except ValueError as error:
        raise ValueError(f"{shown} names no filesystem that fsspec knows: {error}") from error
    if scheme in _HTTP_SCHEMES and "@" in netloc:
        raise ValueError(
            f"{shown} has a user's name or password in it, which errors would show. Give them as "
            'storage_options={"client_kwargs": {"auth": aiohttp.BasicAuth(…)}}.'
        )
    if scheme in _HTTP_SCHEMES:
        web = HttpStore(options, host=netloc, protocol=scheme, timeout_seconds=timeout_seconds)
        # Names below are put behind it as they are.
        return web, named.strip("/"), unquote(shown)
    filesystem, root = fsspec.core.url_to_fs(url, **options)
    kind = ObjectStore if scheme in _OBJECT_SCHEMES else Store
    store = kind(dict(filesystem.storage_options), protocol=scheme, timeout_seconds=timeout_seconds)
    return store, root.rstrip("/") or "/", shown


def _split_url(url: str) -> tuple[str, str, str]:
    """Scheme, place and path; to Hadoop and to stores of objects `#` and `?` are signs like any."""
    scheme, _, rest = url.partition("://")
    netloc, sign, path = rest.partition("/")
    return scheme.lower(), netloc, sign + path


def shown_url(url: str) -> str:
    """A URL as it may be shown: user information and queries can be secrets.

    >>> shown_url("s3://key:secret@bucket/a"), shown_url("https://host/c?sig=secret"), shown_url("hdfs://h/a#b")
    ('s3://bucket/a', 'https://host/c', 'hdfs://h/a#b')
    """
    if "://" not in url:
        return url
    scheme, netloc, path = _split_url(url)
    if scheme not in ("hdfs", "viewfs"):
        path = re.sub(r"(?s)\?.*=.*", "", path)
    # Before the sign stands a container of Azure's, elsewhere a user, maybe with a password.
    place = netloc if scheme in _AZURE_SCHEMES else netloc.rpartition("@")[2]
    return f"{scheme}://{place}{path}"


def _check_names(path: str, shown: str) -> None:
    """Refuse what one program takes for one slash, and another for a folder without a name."""
    if "//" in path.rstrip("/"):
        raise ValueError(f"{shown} has a folder without a name (//), which is not supported here. Rename the folder.")


def _check_signs(text: str, shown: str) -> None:
    """Refuse what urllib, and so adlfs and deltalake, drop without a word: they would read another folder."""
    if _CONTROL.search(text):
        raise ValueError(
            f"{shown!r} has a tab, a line break or the like in it, which programs drop from a URL. Rename the folder."
        )


def _open_azure(url: str, options: Mapping[str, Any], timeout_seconds: float) -> tuple[Store, str, str]:
    place = parse_azure_url(url)
    # As where it is not said.
    found = {name: value for name, value in options.items() if (name, value) != ("connection_string", None)}
    said, who = _account_in(found.get("connection_string")), "the connection string"
    if "connection_string" not in found and os.environ.get(_AZURE_CONNECTION):
        # adlfs takes it before all else that it is given.
        said, who = _account_in(os.environ[_AZURE_CONNECTION]), f"the environment variable {_AZURE_CONNECTION}"
    account = place.account or found.get("account_name") or said or os.environ.get(_AZURE_ACCOUNT)
    if account is None:
        default = _default_place_of_spark()
        if default is None or default.account is None:
            raise ValueError(
                f"{url.partition('?')[0]} names no account. Write abfss://container@account.dfs.core.windows.net/path, "
                f"or give storage_options={{'account_name': …}} or the environment variable {_AZURE_ACCOUNT}; a Spark "
                "session whose fs.defaultFS is on Azure says it too."
            )
        place = replace(place, account=default.account, host=default.host, account_host=default.account_host)
        account = default.account
    host = place.host or f"{account}.dfs.core.windows.net"
    shown = f"{place.scheme}://{place.container}@{host}/{place.path}".rstrip("/")
    _check_names(place.path, shown)
    _check_signs(place.path, shown)
    _require("adlfs", "'spark-tensor-converter[azure]'", shown)
    if said not in (None, account):
        raise ValueError(
            f"{shown} is of the account {account!r}, and {who} of {said!r}; give those of one, or unset it."
        )
    if "connection_string" not in found:
        found["account_name"] = account
    if place.account_host is not None:
        found.setdefault("account_host", place.account_host)
    _check_azure_options(found, shown)
    root = f"{place.container}/{place.path}".rstrip("/")
    return AzureStore(found, protocol="abfs", timeout_seconds=timeout_seconds), root, shown


def _check_azure_options(options: Mapping[str, Any], shown: str) -> None:
    """Refuse what adlfs would ignore: a misspelt credential is none."""
    adlfs: Any = importlib.import_module("adlfs")
    known = {*inspect.signature(adlfs.AzureBlobFileSystem.__init__).parameters, *_FSSPEC_OPTIONS} - {"self", "kwargs"}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(sorted(known - _FSSPEC_OPTIONS))}."
            raise ValueError(f"storage_options: adlfs, which reads {shown}, knows no {name!r}; {hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AzurePlace:
    """What a URL of Azure's says."""

    scheme: str
    container: str
    path: str
    account: str | None
    """None where the URL names none: `abfs://container/path`."""

    host: str | None
    """Of Data Lake Storage, as Spark takes it."""

    account_host: str | None = None
    """The blob endpoint where it is not `<account>.blob.core.windows.net`."""


def parse_azure_url(url: str) -> AzurePlace:
    """A URL of Azure's in any of its forms; OneLake's is passed through.

    >>> place = parse_azure_url("https://lake.blob.core.windows.net/data/a/b")
    >>> place.container, place.path, place.account, place.host
    ('data', 'a/b', 'lake', 'lake.dfs.core.windows.net')
    """
    if re.search(r"[?#]", url):
        raise ValueError(
            f"{re.split('[?#]', url)[0]} goes on with a ? or #, which a URL of Azure's does not have here. Give a "
            "signature as storage_options={'sas_token': …}; in the https form write a # of a name as %23."
        )
    parts = urlsplit(url)
    path = unquote(parts.path).strip("/") if parts.scheme == "https" else parts.path.strip("/")
    if parts.scheme == "https":
        container, _, path = path.partition("/")
        scheme, host = "abfss", parts.netloc
    elif "@" in parts.netloc:
        container, _, host = parts.netloc.partition("@")
        scheme = "abfs" if parts.scheme == "az" else parts.scheme
    else:
        container, host, scheme = parts.netloc, "", "abfs" if parts.scheme == "az" else parts.scheme
    if not container:
        raise ValueError(f"{url.partition('?')[0]} names no container: write abfss://container@account…/path.")
    if not host:
        return AzurePlace(scheme=scheme, container=container, path=path, account=None, host=None)
    account, _, domain = host.partition(".")
    kind, _, suffix = domain.partition(".")
    if kind not in ("dfs", "blob"):
        raise ValueError(f"{host} is no host of Azure's storage: expected <account>.dfs.core.windows.net.")
    return AzurePlace(
        scheme=scheme,
        container=container,
        path=path,
        account=account,
        host=f"{account}.dfs.{suffix}",
        account_host=None if suffix == "core.windows.net" else f"{account}.blob.{suffix}",
    )


def _account_in(connection_string: Any) -> str | None:
    """The account that a connection string names."""
    if not isinstance(connection_string, str):
        return None
    found = re.search(r"AccountName=([^;]+)", connection_string)
    # With a signature it may name the account in the endpoint alone.
    found = found or re.search(r"BlobEndpoint=https?://([^./:;]+)\.blob\.", connection_string)
    return None if found is None else found[1]


def _default_place_of_spark() -> AzurePlace | None:
    """Where Spark in this process keeps what has no scheme, if that is on Azure: Synapse and Fabric start it so."""
    spark: Any = sys.modules.get("pyspark")
    # Without a context, or with one that has been stopped, nobody says anything. The context, since a session is
    # active in the thread alone that asked for it.
    with contextlib.suppress(Exception):
        context = spark.SparkContext._active_spark_context  # noqa: SLF001 (there is no other way)
        confs = context._jsc.hadoopConfiguration()  # noqa: SLF001
        return parse_azure_url(str(confs.get("fs.defaultFS")))
    return None


def _require(module: str, requirement: str, url: str) -> None:
    """Raise MissingDependencyError, with what pip is to install, if there is no such module."""
    if importlib.util.find_spec(module) is None:
        raise MissingDependencyError(
            f"{url} needs {module.replace('_', '-')}, which is not installed: pip install {requirement}."
        )


def _status(error: BaseException) -> int | None:
    """What HTTP's status was, where a client tells."""
    for one in errors_behind(error):
        name = _STATUS_NAMES.get(type(one).__name__, "status_code")
        for status in (getattr(one, name, None), _aws_answer(one).get("HTTPStatusCode")):
            if isinstance(status, int):
                return status
    return None


def _aws_code(error: BaseException) -> str | None:
    """S3's own word for what went wrong."""
    for one in errors_behind(error):
        code = _aws_answer(one).get("Code")
        if code is not None:
            return str(code)
    return None


def _aws_answer(error: BaseException) -> Mapping[str, Any]:
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return {}
    return {**response.get("ResponseMetadata", {}), **response.get("Error", {})}


class _Line:
    """How much is asked for at once: what the line brings in time, and a slow one as long as nothing is known of it.

    All that is asked for shares the line. At 1 MB/s, 16 requests of 8 MB would all be on their way for 128 seconds, and
    each too late after 120, while nothing was ever out of reach.
    """

    def __init__(self) -> None:
        self.processes_count = 1
        """Who share it, as far as is known: a share is what is counted with until an answer tells how fast it is."""

        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._num_bytes = self._num_late = 0
        self._bytes_per_second = self._answered = 0.0

    @contextlib.contextmanager
    def taken(
        self,
        num_bytes: int,
        timeout_seconds: float,
        given_up: threading.Event | None,
        too_late: Callable[[], TimeoutError],
    ) -> Iterator[None]:
        """Ask for so many bytes meanwhile, in the order of coming; raises `too_late()` where no answer comes at all."""
        is_counted = is_late = False
        try:
            with self._changed:
                self._wait(num_bytes, timeout_seconds, given_up, too_late)
                is_counted = True
                self._num_bytes += num_bytes
                shared_bytes, begun = self._num_bytes, time.monotonic()
            yield
            self._answered = time.monotonic()
            if num_bytes >= _TELLING_BYTES:
                self._bytes_per_second = shared_bytes / max(self._answered - begun, 1e-6)
        except TimeoutError:
            is_late = is_counted
            raise
        finally:
            with self._changed:
                self._num_bytes -= num_bytes * is_counted
                self._num_late += is_late
                self._changed.notify_all()

    def _wait(
        self,
        num_bytes: int,
        timeout_seconds: float,
        given_up: threading.Event | None,
        too_late: Callable[[], TimeoutError],
    ) -> None:
        turn, begun, num_late = object(), time.monotonic(), self._num_late
        self._waiting.append(turn)
        try:
            while self._waiting[0] is not turn or (
                self._num_bytes and self._num_bytes + num_bytes > self._room_bytes(timeout_seconds)
            ):
                if given_up is not None and given_up.is_set():
                    raise GivenUpError("the answer is not wanted any more")
                self._changed.wait(_LOOK_SECONDS)
                silent_seconds = time.monotonic() - max(begun, self._answered)
                # Who came with those that are late now need not find out for themselves.
                if silent_seconds > timeout_seconds / (2 if self._num_late != num_late else 1):
                    raise too_late()
        finally:
            self._waiting.remove(turn)
            self._changed.notify_all()

    def _room_bytes(self, timeout_seconds: float) -> float:
        slow = timeout_seconds * _SLOW_BYTES_PER_SECOND
        share = max(slow / self.processes_count, min(slow, MAX_REQUEST_BYTES))
        return max(share, timeout_seconds * _TIME_USED * self._bytes_per_second)


class _NoAnswerError(Exception):
    """A request hangs."""


class Request(Generic[Result]):
    """A call in a thread of its own, which is left behind where nobody waits for its answer."""

    def __init__(self, call: Callable[[], Result], *, is_native: bool = False) -> None:
        self._done = threading.Event()
        self._found: list[Result] = []
        self._failed: list[BaseException] = []
        if is_native:
            tasks.start_beside(lambda: self._run(call), REQUEST_THREAD)
        else:
            threading.Thread(target=self._run, args=(call,), name=REQUEST_THREAD, daemon=True).start()

    def _run(self, call: Callable[[], Result]) -> None:
        try:
            self._found.append(call())
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
            self._failed.append(error)
        finally:
            self._done.set()

    def answer(self, *, deadline: float = float("inf"), given_up: threading.Event | None = None) -> Result:
        """What the call returns or raises; Ctrl-C ends the waiting."""
        while not self._done.wait(_LOOK_SECONDS):
            if given_up is not None and given_up.is_set():
                raise GivenUpError("the answer is not wanted any more")
            if time.monotonic() > deadline:
                raise _NoAnswerError
        if self._failed:
            raise self._failed[0]
        return self._found[0]


def _with_mtime(info: dict[str, Any]) -> dict[str, Any]:
    return info | {"mtime": info["modification_time"] / 1000}
