"""Threads that compute items ahead of use, in order, and end with their generator."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

from converter.errors import ConverterError
from converter.garbage import may_wait
from converter.pool import Answer, Threads
from converter.reading.meter import Meter

Item = TypeVar("Item")
Output = TypeVar("Output")


READER_THREADS = "converter-read"
"""What the names of reader threads begin with."""

BEGUN_ELSEWHERE = "This iteration was begun in another process. Iterate the loader again in this one."

_PATIENCE_SECONDS, _CLOSE_SECONDS = 5.0, 60.0
"""How long a close lets another thread wait for its batch, and how long it waits in all."""

_LOOK_SECONDS = 0.005


def default_workers_count() -> int:
    """Reader threads: one for each core up to four, beyond which memory is the limit (a guess)."""
    return max(1, min(4, os.cpu_count() or 1))


def read_ahead(
    function: Callable[[Item], Output],
    items: Iterator[Item],
    *,
    workers_count: int,
    ahead: int,
    given_up: Iterable[threading.Event] = (),
    waited: Callable[[float], None] | None = None,
    meter: Meter | None = None,
    pool: str = "",
) -> Generator[Output, None, None]:
    """Yield `function` of each item in order, computed by threads; at most `ahead` of them wait.

    When it ends, for any reason, the events `given_up` are set. While the consumer waits, `waited` is told for how many
    seconds, and the meter notes that it waits for this pool of threads.

    Raises:
        ConverterError: it was begun in another process, which alone has the threads.
    """
    pid = os.getpid()

    def result(answer: Answer[Output]) -> Output:
        if pid != os.getpid():
            raise ConverterError(BEGUN_ELSEWHERE)
        if meter is None or answer.is_there:
            return answer.result(waited)
        with meter.blocking(pool):
            return answer.result(waited)

    with Threads(workers_count, READER_THREADS) as threads:
        pending: deque[Answer[Output]] = deque()
        try:
            for item in items:
                pending.append(threads.submit(function, item))
                if len(pending) >= ahead:
                    yield result(pending.popleft())
            while pending:
                yield result(pending.popleft())
        finally:
            # Also when the consumer breaks, raises or drops the generator: what has not begun never will.
            for answer in pending:
                answer.cancel()
            for event in given_up:
                event.set()


def close_generator(generator: Any, give_up: Callable[[], None] | None = None) -> None:
    """Close a generator; if another thread runs it, once that one has come to its next step.

    A thread that must not wait, such as one where the garbage collector runs, does not. Then, and after some seconds,
    `give_up` is called, to end what the other thread may wait for.

    Raises:
        ValueError: that took more than a minute.
    """
    begun = time.monotonic()
    while True:
        try:
            generator.close()
        except ValueError as error:
            # One from within has the generator's own place. Whether it runs may have changed since.
            is_from_within = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            waited, is_patient = time.monotonic() - begun, may_wait()
            if is_from_within or waited > _CLOSE_SECONDS:
                raise
            if give_up is not None and (waited > _PATIENCE_SECONDS or not is_patient):
                give_up()
            if not is_patient:
                # The thread that runs it may wait for this one; it drops the generator at its next step.
                return
            time.sleep(_LOOK_SECONDS)
        else:
            return


def map_row_groups(function: Callable[[int, threading.Event], Output], row_groups: Iterable[int]) -> Iterator[Output]:
    """Yield `function` of each row group, in order; its event is set once the results are no longer wanted."""
    threads, given_up = default_workers_count(), threading.Event()
    return read_ahead(
        lambda row_group: function(row_group, given_up),
        iter(row_groups),
        workers_count=threads,
        ahead=4 * threads,
        given_up=[given_up],
    )
