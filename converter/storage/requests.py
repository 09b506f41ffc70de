"""One request in a thread that can be given up, on a line that others share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from converter.portable.deadlines import REQUEST_THREAD, start_beside
from converter.portable.redaction import errors_behind
from converter.storage.ranges import MAX_REQUEST_BYTES

Result = TypeVar("Result")
_LOOK_SECONDS = 0.05

_SLOW_BYTES_PER_SECOND = 750_000
"""A line this slow is counted with when nothing is known of it; a guess."""

TELLING_BYTES = 1 << 20
"""What is shorter tells how long a request takes, and not how fast the line is."""

_TIME_USED = 0.25
"""Of the time that an answer may take, where the line is known; a guess."""

_STATUS_NAMES = {"ClientResponseError": "status", "HttpError": "code"}
"""Where aiohttp and gcsfs say it; all others as `status_code`."""

REFUSED_STATUS = {401, 403}
GONE_STATUS = {404, 410}
PARTIAL_STATUS = 206
BEYOND_THE_END_STATUS = 416
"""Of a part that begins where the file has ended already."""


class GivenUpError(OSError):
    """Nobody waits for this answer any more."""


def status_of(error: BaseException) -> int | None:
    """What HTTP's status was, where a client tells."""
    for one in errors_behind(error):
        name = _STATUS_NAMES.get(type(one).__name__, "status_code")
        for status in (getattr(one, name, None), _aws_answer(one).get("HTTPStatusCode")):
            if isinstance(status, int):
                return status
    return None


def aws_code(error: BaseException) -> str | None:
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


class RequestLine:
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
            if num_bytes >= TELLING_BYTES:
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


class NoAnswerError(Exception):
    """A request hangs."""


class Request(Generic[Result]):
    """A call in a thread of its own, which is left behind where nobody waits for its answer."""

    def __init__(self, call: Callable[[], Result], *, is_native: bool = False) -> None:
        self._done = threading.Event()
        self._found: list[Result] = []
        self._failed: list[BaseException] = []
        if is_native:
            start_beside(lambda: self._run(call), REQUEST_THREAD)
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
                raise NoAnswerError
        if self._failed:
            raise self._failed[0]
        return self._found[0]
