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
import functools
import importlib.util
import os
import random
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from converter.errors import MissingDependencyError
from converter.portable.filesystems import open_filesystem
from converter.portable.redaction import errors_behind, hide_secrets, is_secret, shows_secrets
from converter.storage.ranges import Data
from converter.storage.requests import (
    BEYOND_THE_END_STATUS,
    REFUSED_STATUS,
    TELLING_BYTES,
    GivenUpError,
    NoAnswerError,
    Request,
    RequestLine,
    Result,
    aws_code,
    status_of,
)
from converter.storage.urls import GOOGLE_SCHEMES, HTTP_SCHEMES, S3_SCHEMES, split_url

TIMEOUT_SECONDS = 120.0
"""How long a store may be out of reach before that is an error."""

_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 5.0

_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504}
_FIRST_BAD_STATUS = 400
"""Below, what went wrong is the body, which may be cut."""

_PASSING_CODES = {"SlowDown", "RequestTimeout", "ConditionalRequestConflict", "OperationAborted"}
"""Of S3; the last two mean that somebody else is changing the same object."""
_PASSING_KINDS = {"ServiceRequestError", "ServiceResponseError", "IncompleteReadError", "ClientConnectionError",
                  "ClientPayloadError"}  # fmt: skip
"""Of azure-core and aiohttp, which need not be there."""
_MAX_TEXT = 300
PACKAGES = (
    dict.fromkeys(S3_SCHEMES, ("s3fs", "'spark-tensor-converter[s3]'"))
    | dict.fromkeys(GOOGLE_SCHEMES, ("gcsfs", "gcsfs"))
    | dict.fromkeys(HTTP_SCHEMES, ("aiohttp", "aiohttp"))
)
"""The module that fsspec needs for a scheme, and what pip installs for it."""


class NotOpenedError(OSError):
    """There is no client to ask: what the URL names must be configured first."""


class Store:
    """An fsspec filesystem that is asked with patience; the names of methods are fsspec's.

    One class, because every call of it goes through the same patience, `ask`.
    """

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
        self._line: tuple[int, RequestLine] | None = None
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
        scheme, netloc, path = split_url(url)
        return f"/{netloc}{path}" if scheme == self.protocol else None

    def _open(self) -> Any:
        return open_filesystem({"protocol": self.protocol, "options": self.options}, skip_instance_cache=True)

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
            except NoAnswerError:
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
        except NoAnswerError:
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
        if (code := aws_code(error)) is not None and code in _PASSING_CODES:
            return True
        status = status_of(error)
        if status is not None and status >= _FIRST_BAD_STATUS:
            return status in _PASSING_STATUS
        return any(kind.__name__ in _PASSING_KINDS for kind in type(error).__mro__)

    def _named(self, error: Exception, path: str) -> OSError:
        text = f"{self.without_secrets(path)}: {self._text(error)}"
        status = status_of(error)
        if isinstance(error, PermissionError) or status in REFUSED_STATUS:
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
                if status_of(error) == BEYOND_THE_END_STATUS:
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
                if error.__cause__ is not None or num_bytes < TELLING_BYTES:
                    raise
                slow = f"; {num_bytes / 1e6:,.1f} MB were asked for, for which a slow line needs more seconds"
                raise TimeoutError(f"{error}{slow}") from None

    def share_line(self, processes_count: int) -> None:
        """Count with so many processes, this one among them, that read at the same time."""
        self._own_line().processes_count = processes_count

    def _own_line(self) -> RequestLine:
        pid = os.getpid()
        if self._line is None or self._line[0] != pid:
            self._line = pid, RequestLine()
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


_in_process = threading.Lock()


def check_timeout(timeout_seconds: Any) -> float:
    """The seconds as a number above 0."""
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, (int, float)):
        raise TypeError(f"timeout_seconds must be a number of seconds, got {timeout_seconds!r}.")
    if not 0 < timeout_seconds < float("inf"):
        raise ValueError(f"timeout_seconds must be above 0, got {timeout_seconds}.")
    return float(timeout_seconds)


def require_package(module: str, requirement: str, url: str) -> None:
    """Raise MissingDependencyError, with what pip is to install, if there is no such module."""
    if importlib.util.find_spec(module) is None:
        raise MissingDependencyError(
            f"{url} needs {module.replace('_', '-')}, which is not installed: pip install {requirement}."
        )
