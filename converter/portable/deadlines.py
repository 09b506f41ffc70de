"""A request that may hang is given up after its time."""

from __future__ import annotations

import atexit
import math
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


CLOSING_THREAD, WRITING_THREAD = "converter-close", "converter-write"
REQUEST_THREAD, TOKEN_THREAD = "converter-request", "converter-token"

_SLOW_BYTES_PER_SECOND = 500_000
"""What a request may send takes longer by this, because its progress cannot be seen; of a line this slow. A guess."""

LAST_WAIT_SECONDS = 5.0


def start_beside(call: Callable[[], None], name: str) -> None:
    """Start a thread that may hang in hdfs-native. Nobody waits for it but the interpreter's end, for some seconds.

    Not for ever, because the NameNode may not come back; but a thread that comes back from there while the
    interpreter ends takes the process down (Python unwinds it through Rust, which aborts).
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
"""When the interpreter's end has waited long enough, once it waits."""


def seconds_for(store: dict[str, Any] | None, num_bytes: int = 0) -> float:
    """How long a request that sends so many bytes may take; local disks are waited for."""
    return math.inf if store is None else float(store["timeout_seconds"] + num_bytes / _SLOW_BYTES_PER_SECOND)


def answer_in(seconds: float, request: Callable[[], Any], path: str) -> Any:
    """What a request to a store returns; one that takes longer is left behind in its thread."""
    if seconds == math.inf:
        return request()
    found: list[Any] = []
    failed: list[BaseException] = []
    is_done = threading.Event()

    def run() -> None:
        try:
            found.append(request())
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
            failed.append(error)
        finally:
            is_done.set()

    start_beside(run, REQUEST_THREAD)
    if not is_done.wait(seconds):
        raise out_of_reach(path, seconds)
    if failed:
        raise failed[0]
    return found[0]


def out_of_reach(path: str, seconds: float) -> TimeoutError:
    """The error of a store that made no progress."""
    # The path last, because Spark's errors are cut.
    return TimeoutError(f"the store made no progress for {round(seconds, 1):g} seconds (timeout_seconds) at {path}")
