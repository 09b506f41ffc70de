"""An fsspec filesystem with retries, time limits, and errors without secrets.

Every request runs in a thread of its own, so that one which hangs can be given up: by Ctrl-C, by closing a loader, or
because `timeout_seconds` are over. Transient failures (throttling, a reset connection, a restarting node) are retried,
with longer and longer pauses. Others (no permission, no such file) are errors at once. Errors arrive as OSError.

Each process opens its own client: clients do not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import os
import random
import ssl
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from converter.errors import MissingDependencyError
from converter.living import Living
from converter.portable.deadlines import Request, Result
from converter.portable.filesystems import open_filesystem
from converter.portable.redaction import errors_behind, hide_secrets, is_secret, shows_secrets
from converter.storage.ranges import Data
from converter.storage.requests import (
    BEYOND_THE_END_STATUS,
    REFUSED_STATUS,
    TELLING_BYTES,
    GivenUpError,
    RequestLine,
    aws_code,
    is_answered,
    status_of,
)
from converter.storage.urls import GOOGLE_SCHEMES, HTTP_SCHEMES, S3_SCHEMES, split_url

if TYPE_CHECKING:
    from converter.portable.records import StoreSpec

TIMEOUT_SECONDS = 120.0
"""How long a store may be out of reach before that is an error."""

_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 5.0
_LOOK_SECONDS = 0.05
"""How often a pause looks whether anybody still waits."""

_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
_FIRST_BAD_STATUS = 400
"""With a lower status the answer's body failed, which may be cut."""

_TRANSIENT_CODES = {"SlowDown", "RequestTimeout", "ConditionalRequestConflict", "OperationAborted"}
"""S3's codes; the last two mean that another client is changing the same object."""

_TRANSIENT_ERRORS = {"ServiceRequestError", "ServiceResponseError", "IncompleteReadError", "ClientConnectionError",
                     "ClientPayloadError", "EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError",
                     "HTTPClientError"}  # fmt: skip
"""Errors of azure-core, aiohttp and botocore, by name: the packages may not be installed."""

_MAX_TEXT = 300

PACKAGES = (
    dict.fromkeys(S3_SCHEMES, ("s3fs", "'spark-tensor-converter[s3]'"))
    | dict.fromkeys(GOOGLE_SCHEMES, ("gcsfs", "gcsfs"))
    | dict.fromkeys(HTTP_SCHEMES, ("aiohttp", "aiohttp"))
)
"""The module that fsspec needs for a scheme, and what pip installs for it."""


_with_clients: Living[Store] = Living()
"""Stores that have opened a client in this process."""


class NotOpenedError(OSError):
    """The client cannot be made: its cluster or its credentials must be configured first."""


class Store:
    """An fsspec filesystem whose methods keep fsspec's names; every request goes through `ask`.

    A kind of store is a subclass, with the differences of its client. It is long, because all that a directory asks a
    client for stands here once.
    """

    is_native = False
    """Whether its client blocks in native code, for which the interpreter's end must wait."""

    survives_fork = True
    """Whether a forked child may open a client where its parent has one."""

    has_containers = True
    """Whether a path without a leading slash begins with a container or a bucket."""

    has_folders = True
    """Whether a folder can be listed."""

    host: str | None = None
    """The host of all paths, for stores whose options do not name it."""

    def __init__(self, options: Mapping[str, Any], *, protocol: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.options, self.protocol, self._timeout_seconds = dict(options), protocol, timeout_seconds
        self._hurries: list[float] = []
        self._opened: tuple[int, Any] | None = None
        self._opening = os.getpid(), threading.RLock()
        self._line: tuple[int, RequestLine] | None = None
        # A store in this process's memory loses no answer, and our own lock makes a creation exclusive.
        self._keeps_answers = self._creates_exclusively = protocol == "memory"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.protocol!r})"

    @property
    def user(self) -> str | None:
        """The user who owns new files; None for the user of the process."""
        return None

    @property
    def timeout_seconds(self) -> float:
        """How long the store may be out of reach."""
        return min([self._timeout_seconds, *self._hurries])

    @contextlib.contextmanager
    def hurried(self, timeout_seconds: float) -> Iterator[None]:
        """Wait no longer than this inside the `with`; several may overlap."""
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

    @property
    def spec(self) -> StoreSpec:
        """What another process needs to open the same filesystem, secrets included."""
        return {"protocol": self.protocol, "options": self.options, "timeout_seconds": self.timeout_seconds}

    def filesystem(self) -> Any:
        """This process's own filesystem; opening it may ask the network."""
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            if self._opening[0] != os.getpid():
                # Another thread of the parent may have held the lock at the fork.
                self._opening = os.getpid(), threading.RLock()
            with self._opening[1]:
                # Another thread may have opened it meanwhile.
                opened = self._opened
                if opened is None or opened[0] != os.getpid():
                    opened = self._opened = os.getpid(), self._open()
                    _with_clients.add(self)
        return opened[1]

    def leave_client_to_parent(self) -> None:
        """In a forked child: never free the client that the parent has opened.

        Its sockets would be closed here, and with that the loop of the parent would hear of them no more: its epoll is
        shared. Nor may it be closed at the end of this process.
        """
        if self._opened is not None:
            client = self._opened[1]
            for part in (client, getattr(client, "fs", client)):
                detach_finalizers(part)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))

    def delta_options(self) -> dict[str, str]:
        """The options by deltalake's names; values that are no texts are for fsspec alone."""
        return {name: value for name, value in self.options.items() if isinstance(value, str)}

    def delta_url(self, url: str) -> str:
        """The URL by which deltalake knows a directory."""
        return url

    def path_of(self, url: str) -> str | None:
        """The path of a URL on this filesystem; None if it is elsewhere."""
        scheme, netloc, path = split_url(url)
        return f"/{netloc}{path}" if scheme == self.protocol else None

    def _open(self) -> Any:
        return open_filesystem(self.spec, retries_itself=False)

    def ask(
        self,
        request: Callable[[Any], Result],
        *,
        path: str,
        given_up: threading.Event | None = None,
        within: float = math.inf,
    ) -> Result:
        """What `request` returns, given the filesystem; transient failures are retried until the deadline.

        It is after `timeout_seconds`, or `within` so many if they are fewer.

        Raises:
            FileNotFoundError: there is no such file.
            PermissionError: the store refuses these credentials.
            NotOpenedError: the client cannot be made as things are configured.
            TimeoutError: there was no answer but transient failures until then.
            GivenUpError: `given_up` was set.
            OSError: anything else, with the store's own words.
        """
        deadline = time.monotonic() + min(self.timeout_seconds, within)
        pause = _FIRST_PAUSE_SECONDS
        last: BaseException | None = None
        while True:
            try:
                asked = Request(lambda: request(self.filesystem()), is_native=self.is_native)
            except RuntimeError as error:
                # No thread can be started.
                raise self._named(error, path) from error
            # Outside of the block below, which takes errors for those of the store: a signal handler may raise here.
            if not is_answered(asked, deadline=deadline, given_up=given_up):
                break
            try:
                return asked.answer()
            except (FileNotFoundError, FileExistsError, NotADirectoryError, GivenUpError, NotOpenedError):
                raise
            except PermissionError as error:
                raise self._named(error, path) from self.harmless(error)
            except Exception as error:  # noqa: BLE001 (each client has errors of its own)
                if not self.is_transient(error):
                    raise self._named(error, path) from self.harmless(error)
                last = error
            wait = pause * random.uniform(0.5, 1.5)  # noqa: S311 (spreads clients that were throttled together)  # nosec B311
            left = deadline - time.monotonic()
            if left < _FIRST_PAUSE_SECONDS:
                break
            # The pause ends before the deadline, so that requests go on until then.
            wait = min(wait, left / 2)
            end = time.monotonic() + wait
            while (now := time.monotonic()) < end:
                # Not the event's `wait`: the garbage collector may set it in this very thread, which has its lock then.
                if given_up is not None and given_up.is_set():
                    raise GivenUpError(f"the request for {path} was cancelled")
                time.sleep(min(_LOOK_SECONDS, end - now))
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
        raise self._too_late(path, last, within) from self.harmless(last)

    def wait_for(self, call: Callable[[], Result], *, path: str) -> Result:
        """What another client returns, which may know no deadline. Raises TimeoutError."""
        asked = Request(call, is_native=True)
        if not is_answered(asked, deadline=time.monotonic() + self.timeout_seconds):
            raise self._too_late(path)
        return asked.answer()

    def _too_late(self, path: str, last: BaseException | None = None, within: float = math.inf) -> TimeoutError:
        reason = self._why_silent() if last is None else f"; its last answer was {self._text(last)}"
        is_own = within < self.timeout_seconds
        waited = f"{within:g} seconds" if is_own else f"{self.timeout_seconds:g} seconds (timeout_seconds)"
        return TimeoutError(self.without_secrets(f"{path} could not be reached for {waited}{reason}"))

    def _why_silent(self) -> str:
        """Why the store gave no answer at all, as far as that can be found out."""
        return ""

    def is_transient(self, error: BaseException) -> bool:
        """Whether the same request may succeed a little later."""
        if isinstance(error, (TimeoutError, ConnectionError)):
            return True
        if any(
            isinstance(cause, ssl.SSLCertVerificationError) or "WRONG_VERSION_NUMBER" in str(cause)
            for cause in errors_behind(error)
        ):
            # A certificate that is not trusted, or a server that does not speak TLS, stays so.
            return False
        if aws_code(error) in _TRANSIENT_CODES:
            return True
        status = status_of(error)
        if status is not None and status >= _FIRST_BAD_STATUS:
            return status in _TRANSIENT_STATUS
        return any(kind.__name__ in _TRANSIENT_ERRORS for kind in type(error).__mro__)

    def _named(self, error: Exception, path: str) -> OSError:
        text = f"{self.without_secrets(path)}: {self._text(error)}"
        status = status_of(error)
        if isinstance(error, PermissionError) or status in REFUSED_STATUS:
            return PermissionError(text)
        return FileNotFoundError(text) if status == 404 else OSError(text)

    def _text(self, error: BaseException) -> str:
        """An error in a line, without secrets; cut last, because a part of a secret would not be recognised."""
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = self.without_secrets(f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": "))
        return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…"

    def harmless(self, error: BaseException | None) -> BaseException | None:
        """The error as a cause that may be shown: replaced if its text holds a secret."""
        if error is None or not shows_secrets(error, self.options):
            return error
        return OSError(self._text(error))

    @property
    def open_options(self) -> dict[str, Any]:
        """The options without secrets; a token provider is none."""
        return {name: value for name, value in self.options.items() if not is_secret(name, value)}

    def without_secrets(self, text: str) -> str:
        """The text with each secret of the options replaced."""
        return hide_secrets(text, self.options)

    # What a directory asks for.

    def invalidate_cache(self, path: str) -> None:
        """Forget the listings that the client may hold."""
        opened = self._opened
        if opened is not None and opened[0] == os.getpid():
            opened[1].invalidate_cache(path)

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        """What a directory holds."""
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
        """A part of a file, in one request; fewer bytes if the file ends before."""

        def read(filesystem: Any) -> bytes:
            try:
                return bytes(filesystem.cat_file(path, start=start, end=end))
            except Exception as error:
                if status_of(error) == BEYOND_THE_END_STATUS:
                    return b""
                raise

        return self.ask(read, path=path, given_up=given_up)

    def read_in_turn(self, path: str, start: int, end: int, given_up: threading.Event | None = None) -> Data:
        """The same, once the requests under way leave room for it; on a slow line that is shared in several parts."""
        cut = self._own_line().cut(start, end, self.timeout_seconds)
        parts = [self._read_part(path, first, stop, given_up) for first, stop in cut]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_part(self, path: str, start: int, end: int, given_up: threading.Event | None) -> Data:
        num_bytes = end - start
        with self._own_line().taken(num_bytes, self.timeout_seconds, given_up, lambda: self._too_late(path)):
            try:
                return self.read_range(path, start, end, given_up)
            except TimeoutError as error:
                if error.__cause__ is not None or num_bytes < TELLING_BYTES:
                    raise
                slow = f"; it was asked for {num_bytes / 1e6:,.1f} MB, for which a slow line needs more seconds"
                raise TimeoutError(f"{error}{slow}") from None

    def share_line(self, processes_count: int) -> None:
        """Count with so many processes, including this one, that read at the same time."""
        self._own_line().processes_count = processes_count

    def _own_line(self) -> RequestLine:
        pid = os.getpid()
        if self._line is None or self._line[0] != pid:
            self._line = pid, RequestLine()
        return self._line[1]

    def create(self, path: str, data: bytes) -> bool:
        """Create a small file that appears whole; False if the name is taken, by other content."""
        try:
            self.ask(lambda filesystem: self._create(filesystem, path, data), path=path)
        except FileExistsError:
            try:
                # An earlier attempt, ours or the client's own, may have succeeded without an answer.
                return not self._keeps_answers and self.cat_file(path) == data
            except FileNotFoundError:
                return False  # Whoever had the name has removed the file since.
        return True

    def _create(self, filesystem: Any, path: str, data: bytes) -> None:
        # fsspec's memory store looks first and creates then: a lock makes that one step for threads.
        with _in_process if self.protocol == "memory" else contextlib.nullcontext():
            if not self._creates_exclusively:
                _check_exclusive(filesystem, f"{path}.{uuid.uuid4().hex}.tmp")
                self._creates_exclusively = True
            _create_exclusively(filesystem, path, data)

    def renew(self, path: str, given_up: threading.Event | None = None, within: float = math.inf) -> None:
        """Set a file's time to now, without creating it. Raises FileNotFoundError if it is gone.

        Once `given_up` is set the file may be deleted, even if a request is still on its way.
        """
        data = self.ask(lambda filesystem: filesystem.cat_file(path), path=path, given_up=given_up, within=within)

        def write(filesystem: Any) -> None:
            filesystem.pipe_file(path, data)
            if given_up is not None and given_up.is_set():
                # Here a renewal creates the file: one that hung may have come after the deletion.
                filesystem.rm_file(path)

        self.ask(write, path=path, given_up=given_up, within=within)

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        self.ask(lambda filesystem: filesystem.rm_file(path), path=path)

    def rm(self, path: str, recursive: bool = True) -> None:
        """Delete a directory with all that is in it."""
        self.ask(lambda filesystem: filesystem.rm(path, recursive=recursive), path=path)

    def uploads(self, path: str) -> Sequence[tuple[str, str]]:  # noqa: ARG002
        """What was begun to be uploaded below a directory, and has not ended; most stores keep nothing of that."""
        return ()

    def abort_upload(self, path: str, number: str) -> None:
        """Give up an upload; does nothing if it has ended."""

    def rmdir(self, path: str) -> None:
        """Delete a directory if it is empty."""
        if not self.ls(path):
            with contextlib.suppress(OSError):
                self.ask(lambda filesystem: filesystem.rmdir(path), path=path)


_in_process = threading.Lock()


def _check_exclusive(filesystem: Any, path: str) -> None:
    """Raise OSError if the store takes fsspec's mode "x" and overwrites a file all the same, as some do."""
    # The client may have tried again when it got no answer: nobody else has this name.
    with contextlib.suppress(FileExistsError):
        _create_exclusively(filesystem, path, b"first")
    try:
        _create_exclusively(filesystem, path, b"second")
    except FileExistsError:
        return
    finally:
        filesystem.rm_file(path)
    raise OSError("the store overwrites files that are to be new, so a commit could be lost. Choose another store.")


def _create_exclusively(filesystem: Any, path: str, data: bytes) -> None:
    try:
        file = filesystem.open(path, "xb")
    except (ValueError, NotImplementedError) as error:
        raise OSError(
            f"the store cannot create a file only if there is none ({error}), which a commit needs. "
            "Choose another store."
        ) from error
    with file:
        file.write(data)


def check_timeout(timeout_seconds: Any) -> float:
    """The seconds as a number above 0."""
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, (int, float)):
        raise TypeError(f"timeout_seconds must be a number of seconds, got {timeout_seconds!r:.80}.")
    if not 0 < timeout_seconds < float("inf"):
        raise ValueError(f"timeout_seconds must be above 0, got {timeout_seconds}.")
    return float(timeout_seconds)


def require_package(module: str, requirement: str, url: str) -> None:
    """Raise MissingDependencyError, with what pip is to install, if there is no such module."""
    if importlib.util.find_spec(module) is None:
        raise MissingDependencyError(
            f"{url} needs {module.replace('_', '-')}, which is not installed: pip install {requirement}."
        )


def detach_finalizers(filesystem: Any) -> None:
    """Let nothing be called for a filesystem when it is freed, or at the end of the process.

    Reaches into: weakref.finalize._registry (CPython 3.10 to 3.13).
    Without it: adlfs 2026.8 holds each of its filesystems for ever, and in forked children fsspec closes the parent's.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        held = finalizer.peek()
        if held is not None and held[0] is filesystem:
            finalizer.detach()


def _leave_clients_to_parent() -> None:
    for store in _with_clients:
        store.leave_client_to_parent()
    _with_clients.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_clients_to_parent)
