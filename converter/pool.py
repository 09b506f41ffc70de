"""Threads that compute what is asked of them, in order of asking; the main thread uses no lock of Python's own for it.

What a signal's handler raises, such as the interrupt of a Ctrl-C, may be raised anywhere in Python code of the main
thread. In `threading.Condition`, of which the futures, pools, events and starts of the standard library are made, it
leaves a lock held for ever: a thread of the pool would wait for it, and the main thread for that thread (2 of 2 loops
in 100 seconds, with 80 handlers a second that raised in short epochs). Queues in C are not left so.
"""

from __future__ import annotations

import _thread
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from converter.exits import register_before_thread_pools
from converter.garbage import may_wait, watch_collector
from converter.living import Living

Output = TypeVar("Output")

_LOOK_SECONDS, _MOMENT_SECONDS, _PAUSE_SECONDS = 0.5, 1.0, 0.001

_pools: Living[Threads] = Living()
_has_end_begun = False


class Answer(Generic[Output]):
    """What a thread is asked for, and its result."""

    def __init__(self, call: Callable[[], Output]) -> None:
        self._call: Callable[[], Output] | None = call
        self._outcome: list[tuple[Output | None, BaseException | None]] = []
        self._came: SimpleQueue[None] = SimpleQueue()
        """Wakes who waits. What is taken from it may be lost by what a handler raises, so it holds nothing."""

    @property
    def is_there(self) -> bool:
        """Whether `result` returns, or raises, at once."""
        return bool(self._outcome)

    def cancel(self) -> None:
        """Do not begin: `result` raises CancelledError then. What has begun goes on."""
        self._call = None

    def make(self) -> None:
        """Compute the result, in the thread that calls this."""
        outcome, came, call, self._call = self._outcome, self._came, self._call, None
        try:
            outcome.append((None, CancelledError()) if call is None else (call(), None))
        except BaseException as error:  # noqa: BLE001 (raised by `result`)
            outcome.append((None, error))
        finally:
            came.put(None)
            # The error's traceback holds this frame, which would hold the error.
            del outcome, call, self

    def result(self, waited: Callable[[float], None] | None = None) -> Output:
        """What the call returns or raises; Ctrl-C ends the waiting. `waited` is told now and then for how many seconds.

        No wait is long: a signal that comes just before one begins, or once Polars has answered a query (it handles
        SIGINT with SA_RESTART), would be handled at its end. And another thread may have been woken instead.
        """
        begun = time.monotonic()
        while not self._outcome:
            try:
                self._came.get(timeout=_LOOK_SECONDS)
            except Empty:
                if waited is not None:
                    waited(time.monotonic() - begun)
        output, error = self._outcome[0]
        if error is None:
            return output  # type: ignore[return-value]  # Only an error's is None.
        try:
            raise error
        finally:
            # The error's traceback holds this frame, which would hold the error.
            del error, self


class Threads:
    """Threads that end with their `with` block, which waits for them if it may, and else for a moment at most.

    The collector runs in any thread: in one of these, which cannot wait for itself, or in one that they wait for. For
    the main thread they may wait only if the collector came while it held a lock: there they get a moment.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name, self._pid = most, name, os.getpid()
        self._numbers = itertools.count()
        self._asked: SimpleQueue[Any] = SimpleQueue()
        """Answers, and whatever else for the end."""

        self._idle: SimpleQueue[None] = SimpleQueue()
        self._threads: list[_Thread] = []
        self._wanted = [True]
        """Emptied if what has not begun is not wanted any more; its threads share it."""

        self._is_over = False
        # If it is freed, its threads end as after a shutdown. In C: what a signal's handler raises in there is dropped.
        self._freed = weakref.ref(self, self._asked.put)
        _pools.add(self)
        watch_collector()

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, *error: object) -> None:
        if may_wait():
            self.shutdown()
            return
        self.shutdown(wait=False)
        if threading.get_ident() == threading.main_thread().ident:
            self._join(_MOMENT_SECONDS)

    def submit(self, function: Callable[..., Output], *arguments: Any) -> Answer[Output]:
        """Ask a thread for `function` of these arguments; another one is started if none is idle.

        Raises:
            RuntimeError: no thread can be started, or the pool or the interpreter ends.
        """
        self._check_open()
        answer = Answer(partial(function, *arguments))
        self._asked.put(answer)
        # Once more: if another thread has ended the pool before that, nobody may look into the queue again.
        self._check_open()
        try:
            self._idle.get_nowait()
        except Empty:
            number = next(self._numbers)
            if number < self._most:
                self._start(f"{self._name}_{number}")
        return answer

    def _check_open(self) -> None:
        if _has_end_begun:
            raise RuntimeError("No thread of a pool is asked after interpreter shutdown has begun.")
        if self._is_over:
            raise RuntimeError("This pool of threads has ended.")

    def _start(self, name: str) -> None:
        thread = _Thread(name, self._asked, self._idle, self._wanted, self._freed)
        # First, so that the end waits for it also if a signal's handler raises below.
        self._threads.append(thread)
        try:
            # A start waits for an event, so that is another thread's matter.
            _thread.start_new_thread(thread.begin, ())
        except RuntimeError:
            self._threads.remove(thread)
            raise
        thread.wait_for_start()

    def shutdown(self, *, wait: bool = True, cancel: bool = False) -> None:
        """Let the threads end with what they were asked for, or with what they have begun."""
        self._is_over = True
        if cancel:
            self._wanted.clear()
        self._asked.put(None)
        if wait:
            self._join()

    def _join(self, seconds: float | None = None) -> None:
        if self._pid != os.getpid():
            # They are the parent's.
            return
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            left = None if end is None else max(0.0, end - time.monotonic())
            # Not if what a handler raised came before its start.
            if thread.has_begun(_MOMENT_SECONDS if left is None else left):
                thread.join(left)


class _Thread(threading.Thread):
    """A thread of a pool; it knows nothing of the pool, which may be freed."""

    def __init__(
        self,
        name: str,
        asked: SimpleQueue[Any],
        idle: SimpleQueue[None],
        wanted: list[bool],
        freed: weakref.ref[Threads],
    ) -> None:
        # Not a daemon, though the one that starts it is: the interpreter's end waits for it.
        super().__init__(name=name, daemon=False)
        self._asked, self._idle, self._wanted = asked, idle, wanted
        # Else it would be freed with the pool, and not called.
        self._freed = freed
        self._beginning: Answer[None] = Answer(self.start)

    def begin(self) -> None:
        """Start it, in the thread that calls this."""
        self._beginning.make()

    def wait_for_start(self) -> None:
        """Return once it has begun. Raises RuntimeError: it could not."""
        self._beginning.result()

    def has_begun(self, wait_seconds: float) -> bool:
        """Whether it has begun, after waiting for that so long."""
        end = time.monotonic() + wait_seconds
        while not self._beginning.is_there and time.monotonic() < end:
            time.sleep(_PAUSE_SECONDS)
        return self._beginning.is_there and self.ident is not None

    def run(self) -> None:
        while True:
            try:
                answer = self._asked.get_nowait()
            except Empty:
                self._idle.put(None)
                answer = self._asked.get()
            if not isinstance(answer, Answer):
                # For the next one.
                self._asked.put(answer)
                return
            if not self._wanted:
                answer.cancel()
            answer.make()
            # Else its result would live until the next one is asked for.
            del answer


def _end_all() -> None:
    """At the interpreter's end: its threads end with what they were asked for."""
    global _has_end_begun
    _has_end_begun = True
    for pool in _pools:
        pool.shutdown(wait=False)


register_before_thread_pools(_end_all)
