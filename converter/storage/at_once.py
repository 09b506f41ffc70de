"""Sends many requests at once, after those of earlier callers; the first error cancels all of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import TypeVar

from converter.pool import Threads

Item = TypeVar("Item")
Output = TypeVar("Output")

MAX_REQUESTS_AT_ONCE = 16
_LOOK_SECONDS = 0.5


class LinkedEvent(threading.Event):
    """An event that counts as set while another one is, too, for who looks at it. Nobody can wait for it.

    So it needs no lock, which what a signal's handler raises would leave held: the main thread sets it.
    """

    def __init__(self, other: threading.Event | None) -> None:
        super().__init__()
        self._other, self._is_own = other, False

    def is_set(self) -> bool:
        """Whether this event or the other one is set."""
        return self._is_own or (self._other is not None and self._other.is_set())

    def set(self) -> None:
        """Set this one."""
        self._is_own = True

    def wait(self, timeout: float | None = None) -> bool:
        """Raise NotImplementedError."""
        raise NotImplementedError


class Turn:
    """A place in a queue: the requests of the turn before are sent first."""

    def __init__(self, before: Turn | None = None) -> None:
        self._before = None if before is None else before.is_over
        self.is_over: threading.Event = threading.Event()

    def wait(self, given_up: threading.Event | None = None) -> None:
        """Return once the turn before is over, or `given_up` is set."""
        while self._before is not None and not self._before.wait(_LOOK_SECONDS):
            if given_up is not None and given_up.is_set():
                return

    def end(self) -> None:
        """Let the next turn begin; may be called again."""
        self.is_over.set()


def at_once(
    function: Callable[[Item], Output],
    items: Sequence[Item],
    *,
    threads_count: int = MAX_REQUESTS_AT_ONCE,
    given_up: threading.Event | None = None,
    turn: Turn | None = None,
    pool: Threads | None = None,
) -> list[Output]:
    """The results of `function` in order, from threads; the first error, or Ctrl-C, ends it and sets `given_up`.

    With a `turn` no call begins before the turn has come; it ends once all calls are queued for a thread. The threads
    of a `pool` serve all its users in the order of arrival, and an error does not wait for calls that have begun.
    """
    if turn is not None:
        turn.wait(given_up)
    if pool is None and len(items) == 1:
        return [function(items[0])]
    errors: list[BaseException] = []

    def call(item: Item) -> Output:
        if errors:
            # Else each thread would wait once more for a store that is away, before the error arrives.
            raise CancelledError
        try:
            return function(item)
        except BaseException as error:
            errors.append(error)
            raise

    with contextlib.ExitStack() as stack:
        if pool is None:
            threads_count = max(1, min(len(items), threads_count))
            pool = stack.enter_context(Threads(threads_count, "converter-fetch"))
        pending = [pool.submit(call, item) for item in items]
        if turn is not None:
            turn.end()
        try:
            try:
                return [answer.result() for answer in pending]
            except CancelledError:
                if not errors:
                    raise
            raise errors[0]
        except BaseException:
            # Before the pool waits for calls that still wait for a store.
            if given_up is not None:
                given_up.set()
            raise
        finally:
            for answer in pending:
                answer.cancel()
