"""Runs each request to a store in a thread of its own, and gives it up at its deadline if it hangs."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from converter.portable.records import StoreSpec

Result = TypeVar("Result")

CLOSING_THREAD, WRITING_THREAD = "converter-close", "converter-write"
REQUEST_THREAD, TOKEN_THREAD = "converter-request", "converter-token"

SLOW_BYTES_PER_SECOND = 500_000
"""The slowest line that must work, while nothing is known of its speed; a guess. Writers wait that long for what they
send, because its progress cannot be seen; readers ask for no more at once than it brings in time."""

LAST_WAIT_SECONDS = 5.0
"""How long the interpreter's end, or a discarded file, waits for a thread that hangs."""


class Request(Generic[Result]):
    """A call in a thread of its own, which is left behind if it hangs.

    `is_native` is for calls into hdfs-native, for which the interpreter's end must wait (see `start_beside`).
    """

    def __init__(self, call: Callable[[], Result], *, is_native: bool) -> None:
        self._done = threading.Event()
        self._answers: list[Result] = []
        self._errors: list[BaseException] = []

        def run() -> None:
            try:
                self._answers.append(call())
            except BaseException as error:  # noqa: BLE001 (raised by `answer`)
                self._errors.append(error)
            finally:
                self._done.set()

        if is_native:
            start_beside(run, REQUEST_THREAD)
        else:
            threading.Thread(target=run, name=REQUEST_THREAD, daemon=True).start()

    def is_answered(self, wait_seconds: float) -> bool:
        """Whether the call has ended, after waiting for it that long."""
        return self._done.wait(wait_seconds)

    def answer(self) -> Result:
        """What the call returned or raised."""
        if self._errors:
            raise self._errors[0]
        return self._answers[0]


def start_beside(call: Callable[[], None], name: str) -> None:
    """Start a thread that may hang in hdfs-native. Only the interpreter's end waits for it, for some seconds.

    The wait ends, because the NameNode may not come back. It is needed, because a thread that returns from hdfs-native
    while the interpreter ends aborts the process: Python unwinds it through Rust.
    """

    def run() -> None:
        try:
            call()
        finally:
            atexit.unregister(wait)

    def wait() -> None:
        _ends.append(time.monotonic() + LAST_WAIT_SECONDS)
        thread.join(max(0.0, _ends[0] - time.monotonic()))

    thread = threading.Thread(target=run, name=name, daemon=True)
    atexit.register(wait)
    thread.start()


_ends: list[float] = []
"""When the interpreter's end has waited long enough, for all threads together."""


def seconds_for(store: StoreSpec | None, num_bytes: int = 0) -> float:
    """How long a request that sends so many bytes may take; without end on local disks."""
    return math.inf if store is None else float(store["timeout_seconds"] + num_bytes / SLOW_BYTES_PER_SECOND)


def answer_in(seconds: float, call: Callable[[], Result], path: str) -> Result:
    """What a request to a store returns.

    Raises:
        TimeoutError: it took longer, and was left behind in its thread.
    """
    if seconds == math.inf:
        return call()
    request = Request(call, is_native=True)
    if not request.is_answered(seconds):
        raise out_of_reach(path, seconds)
    return request.answer()


def out_of_reach(path: str, seconds: float) -> TimeoutError:
    """The error of a store that made no progress."""
    # The path comes last, because Spark cuts long errors.
    return TimeoutError(f"the store made no progress for {round(seconds, 1):g} seconds (timeout_seconds) at {path}")
