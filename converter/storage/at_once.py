"""Many requests at once, each given up together with the others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import TypeVar

Item = TypeVar("Item")
Output = TypeVar("Output")

MAX_REQUESTS_AT_ONCE = 16
_LOOK_SECONDS = 0.5


class Turn:
    """A place among those who ask one after the other, so that who came first is answered first."""

    def __init__(self, before: Turn | None = None) -> None:
        self._before = None if before is None else before.is_over
        self.is_over: threading.Event = threading.Event()

    def wait(self, given_up: threading.Event | None = None) -> None:
        """Return once the one before has asked, or nobody waits for answers any more."""
        while self._before is not None and not self._before.wait(_LOOK_SECONDS):
            if given_up is not None and given_up.is_set():
                return

    def end(self) -> None:
        """Let the next one ask; may be said again."""
        self.is_over.set()


def at_once(
    function: Callable[[Item], Output],
    items: Sequence[Item],
    *,
    threads_count: int = MAX_REQUESTS_AT_ONCE,
    given_up: threading.Event | None = None,
    turn: Turn | None = None,
    pool: futures.ThreadPoolExecutor | None = None,
) -> list[Output]:
    """`function` of each item, in order, by threads; the first error, also Ctrl-C, ends it and sets `given_up`.

    With a `turn` none begins before it has come, and it ends once all stand in line for a thread. Threads of a `pool`
    take from all who share it what came first, and who fails does not wait for those that have begun.
    """
    if turn is not None:
        turn.wait(given_up)
    if pool is None and len(items) == 1:
        return [function(items[0])]
    errors: list[BaseException] = []

    def call(item: Item) -> Output:
        if errors:
            # Else a store that is away would be waited for once more by each thread, before anybody has heard of it.
            raise futures.CancelledError
        try:
            return function(item)
        except BaseException as error:
            errors.append(error)
            raise

    with contextlib.ExitStack() as stack:
        if pool is None:
            threads_count = max(1, min(len(items), threads_count))
            pool = stack.enter_context(futures.ThreadPoolExecutor(threads_count, thread_name_prefix="converter-fetch"))
        pending = [pool.submit(call, item) for item in items]
        if turn is not None:
            turn.end()
        try:
            try:
                return [result_of(one) for one in pending]
            except futures.CancelledError:
                if not errors:
                    raise
            raise errors[0]
        except BaseException:
            # Before the pool waits for those who still wait for a store.
            if given_up is not None:
                given_up.set()
            raise
        finally:
            for one in pending:
                one.cancel()


def result_of(future: futures.Future[Output]) -> Output:
    """What a future returns or raises; Ctrl-C ends the waiting.

    Python's own wait has no end where a signal does not wake it: one that comes just before it begins, and any once
    Polars has answered a query, which then handles SIGINT with SA_RESTART.
    """
    while not future.done():
        with contextlib.suppress(futures.TimeoutError):
            return future.result(_LOOK_SECONDS)
    return future.result()
