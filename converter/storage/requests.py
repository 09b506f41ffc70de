"""Waits for a request that can be cancelled, shares the network among requests, and finds the status in an error."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from converter.portable.deadlines import SLOW_BYTES_PER_SECOND, Request, Result
from converter.portable.redaction import errors_behind
from converter.storage.ranges import Range

_LOOK_SECONDS = 0.05

TELLING_BYTES = 1 << 20
"""Shorter answers show how long a request takes, but not how fast the line is."""

_TIME_USED = 0.25
"""The part of `timeout_seconds` in which a line of known speed is to bring all that is asked for; a guess."""

_STATUS_NAMES = {"ClientResponseError": "status", "HttpError": "code"}
"""The attribute with HTTP's status in errors of aiohttp and gcsfs; elsewhere it is `status_code`."""

REFUSED_STATUS = {401, 403}
GONE_STATUS = {404, 410}
PARTIAL_STATUS = 206
BEYOND_THE_END_STATUS = 416
"""The answer to a part that begins behind the file's end."""


class GivenUpError(OSError):
    """The caller no longer waits for this answer."""


def is_answered(request: Request[Any], *, deadline: float, given_up: threading.Event | None = None) -> bool:
    """Wait for a request; False if the deadline (of `time.monotonic`) comes first.

    What a signal handler raises ends the waiting, Ctrl-C too. Raises GivenUpError once `given_up` is set.
    """
    while not request.is_answered(_LOOK_SECONDS):
        if given_up is not None and given_up.is_set():
            raise GivenUpError("the request was cancelled")
        if time.monotonic() > deadline:
            return False
    return True


def answer_of(request: Request[Result]) -> Result:
    """What a request returns or raises, however long that takes."""
    is_answered(request, deadline=float("inf"))
    return request.answer()


def status_of(error: BaseException) -> int | None:
    """The HTTP status of an error or of its causes; None if none of them has one."""
    for cause in errors_behind(error):
        name = _STATUS_NAMES.get(type(cause).__name__, "status_code")
        for status in (getattr(cause, name, None), _aws_answer(cause).get("HTTPStatusCode")):
            if isinstance(status, int):
                return status
    return None


def aws_code(error: BaseException) -> str | None:
    """S3's code of an error or of one behind it, such as `SlowDown`."""
    codes = (_aws_answer(cause).get("Code") for cause in errors_behind(error))
    return next((str(code) for code in codes if code is not None), None)


def _aws_answer(error: BaseException) -> Mapping[str, Any]:
    response = getattr(error, "response", None)
    if not isinstance(response, Mapping):
        return {}
    return {**response.get("ResponseMetadata", {}), **response.get("Error", {})}


class RequestLine:
    """Limits the bytes requested at once to what the network delivers in time; assumes a slow one until that is known.

    All requests share the line. At 1 MB/s, 16 requests of 8 MB would all be on their way for 128 seconds, and each
    late after 120, while the store was never out of reach.
    """

    def __init__(self) -> None:
        self.processes_count = 1
        """How many processes share the line: each counts with its part until an answer shows how fast the line is."""

        # Its lock is taken without it: a Ctrl-C inside of Condition.__enter__, which is Python, leaves it held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
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
        """Ask for so many bytes in the `with`, in the order of arrival; raises `too_late()` if nothing is answered."""
        is_counted = is_late = False
        try:
            with self._lock:
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
            with self._lock:
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
                    raise GivenUpError("the request was cancelled")
                self._changed.wait(_LOOK_SECONDS)
                silent_seconds = time.monotonic() - max(begun, self._answered)
                # Once another request was late, half the time is enough: else each would wait the whole time in turn.
                if silent_seconds > timeout_seconds / (2 if self._num_late != num_late else 1):
                    raise too_late()
        finally:
            self._waiting.remove(turn)
            self._changed.notify_all()

    def cut(self, start: int, end: int, timeout_seconds: float) -> Iterator[Range]:
        """The requests for a part, so that all processes that share a slow line get their answers in time.

        Each is cut when it is asked for: by then more may be known of the line.
        """
        while start < end:
            most = max(TELLING_BYTES, int(self._room_bytes(timeout_seconds)))
            # A quarter more saves a request.
            stop = end if end - start <= most + most // 4 else start + most
            yield start, stop
            start = stop

    def _room_bytes(self, timeout_seconds: float) -> float:
        share = timeout_seconds * SLOW_BYTES_PER_SECOND / self.processes_count
        return max(share, timeout_seconds * _TIME_USED * self._bytes_per_second)
