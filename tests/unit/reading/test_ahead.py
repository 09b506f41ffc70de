"""Threads work ahead of who reads, in order, and learn that nobody waits."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import fsspec.asyn
import pytest

from converter import garbage
from converter.errors import ConverterError
from converter.garbage import keep_garbage_of_parents, may_wait, watch_collector
from converter.reading.ahead import close_generator, read_ahead
from tests.processes import run_python


def test_results_come_in_order_and_the_end_is_told() -> None:
    given_up = threading.Event()
    results = read_ahead(lambda item: item * 2, iter(range(9)), workers_count=3, ahead=4, given_up=[given_up])
    assert next(results) == 0
    assert not given_up.is_set()
    results.close()
    assert given_up.is_set()
    assert list(read_ahead(lambda item: item * 2, iter(range(9)), workers_count=3, ahead=4)) == list(range(0, 18, 2))


class RunsNoMore:
    """A generator that another thread runs, and has let go of when somebody looks whether it does."""

    def __init__(self, generator: Generator[int, None, None], let_go: Callable[[], None]) -> None:
        self._generator, self._let_go, self._num_closes = generator, let_go, 0

    @property
    def close(self) -> Callable[[], None]:
        self._num_closes += 1
        if self._num_closes > 1:
            self._let_go()
        return self._generator.close

    @property
    def gi_running(self) -> bool:
        self._let_go()
        return self._generator.gi_running


def test_a_generator_is_closed_that_another_thread_has_just_let_go_of() -> None:
    is_inside, may_go_on = threading.Event(), threading.Event()

    def numbers() -> Generator[int, None, None]:
        is_inside.set()
        may_go_on.wait()
        yield 1
        yield 2

    generator = numbers()
    thread = threading.Thread(target=next, args=(generator,))
    thread.start()
    is_inside.wait()

    def let_go() -> None:
        may_go_on.set()
        thread.join()

    close_generator(RunsNoMore(generator, let_go))
    assert list(generator) == []


def test_what_a_generator_raises_while_it_is_closed_is_raised() -> None:
    def numbers() -> Generator[int, None, None]:
        try:
            yield 1
        finally:
            raise ValueError("of the generator")

    generator = numbers()
    next(generator)
    with pytest.raises(ValueError, match="of the generator"):
        close_generator(generator)


class Lost:
    """What only the garbage collector frees."""

    def __init__(self, held: object) -> None:
        self.held, self.itself = held, self


def living(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def require_quick_end(collecting: threading.Thread, may_go_on: threading.Event) -> None:
    """Require that a thread ends before `may_go_on` is set."""
    collecting.start()
    collecting.join(30)
    try:
        assert not collecting.is_alive()
    finally:
        may_go_on.set()


def require_ends_of_readers() -> None:
    for thread in living("converter-read"):
        thread.join(60)
    assert not living("converter-read")


def test_the_collector_frees_a_reader_in_the_readers_own_thread() -> None:
    """It cannot wait for itself: Python would say so on stderr, and the other threads would not be told."""
    may_collect, is_collected = threading.Event(), threading.Event()

    def read(item: int) -> int:
        if item == 5:
            may_collect.wait(60)
            gc.collect()
            is_collected.set()
        return item

    given_up = threading.Event()
    results = read_ahead(read, iter(range(9)), workers_count=2, ahead=6, given_up=[given_up])
    assert next(results) == 0
    Lost(results)
    del results
    may_collect.set()
    assert is_collected.wait(60)
    assert given_up.is_set()
    require_ends_of_readers()


def test_what_the_collector_frees_in_the_main_thread_has_ended_after_it() -> None:
    results = read_ahead(lambda item: time.sleep(0.05) or item, iter(range(9)), workers_count=2, ahead=4)
    assert next(results) == 0
    Lost(results)
    del results
    gc.collect()
    assert not living("converter-read")


def test_the_collector_does_not_wait_for_threads_that_wait_for_the_thread_in_which_it_runs() -> None:
    is_reading, may_go_on = threading.Event(), threading.Event()

    def read(item: int) -> int:
        if item:
            is_reading.set()
            may_go_on.wait()
        return item

    results = read_ahead(read, iter(range(9)), workers_count=1, ahead=2)
    assert next(results) == 0
    assert is_reading.wait(60)
    Lost(results)
    del results
    collecting = threading.Thread(target=lambda: (gc.collect(), may_go_on.set()), daemon=True)
    require_quick_end(collecting, may_go_on)
    require_ends_of_readers()


def test_a_reader_that_fsspecs_thread_drops_does_not_wait_there_for_requests_which_wait_for_that_thread() -> None:
    loop, dropped = fsspec.asyn.get_loop(), threading.Event()
    is_reading, may_ask = threading.Event(), threading.Event()

    async def answer(item: int) -> int:
        return item

    def read(item: int) -> int:
        if item:
            is_reading.set()
            may_ask.wait(60)
        # The others are nobody's; they end if they stand still, and so does this test.
        return fsspec.asyn.sync(loop, answer, item, timeout=1 if item else 60)

    results = read_ahead(read, iter(range(9)), workers_count=1, ahead=2)
    assert next(results) == 0
    assert is_reading.wait(60)
    held = [results]
    del results
    loop.call_soon_threadsafe(held.clear)
    loop.call_soon_threadsafe(dropped.set)
    try:
        assert dropped.wait(30)
    finally:
        may_ask.set()
    require_ends_of_readers()


def test_the_collector_leaves_a_generator_that_a_thread_runs_to_that_thread() -> None:
    is_inside, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def numbers() -> Generator[int, None, None]:
        try:
            is_inside.set()
            may_go_on.wait()
            yield 1
        finally:
            ended.set()

    class Closes:
        def __init__(self, generator: Generator[int, None, None]) -> None:
            self.generator, self.itself = generator, self

        def __del__(self) -> None:
            close_generator(self.generator)

    watch_collector()
    lost = Closes(numbers())
    thread = threading.Thread(target=next, args=(lost.generator,))
    thread.start()
    assert is_inside.wait(60)
    del lost
    collecting = threading.Thread(target=gc.collect, daemon=True)
    require_quick_end(collecting, may_go_on)
    thread.join()
    assert ended.wait(60)


def test_a_collector_of_the_parent_does_not_run_in_a_forked_child() -> None:
    watch_collector()

    def note(phase: str, info: dict[str, Any]) -> None:
        for callback in gc.callbacks:
            callback(phase, info)

    before = gc.isenabled()
    gc.disable()
    try:
        note("start", {})
        assert not may_wait()
        if not (pid := os.fork()):
            os._exit(0 if may_wait() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        note("stop", {})
        if before:
            gc.enable()
    assert may_wait()


def interrupt_while_garbage_is_collected() -> int:
    """How many of 200 interrupts are lost in a loop that makes garbage, once the collector is watched."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    sys.unraisablehook = lambda _: None
    watch_collector()
    num_lost = 0
    for _ in range(200):
        sent = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            while time.monotonic() < sent + 0.05:
                [{} for _ in range(1000)]
        except KeyboardInterrupt:
            continue
        num_lost += 1
    return num_lost


def test_an_interrupt_while_garbage_is_collected_is_not_lost() -> None:
    assert run_python(interrupt_while_garbage_is_collected) == 0


def fork_at_once() -> list[int]:
    """Fork in several threads, and count the children that collect no garbage."""
    keep_garbage_of_parents()
    statuses = []

    def fork() -> None:
        for _ in range(20):
            if not (pid := os.fork()):
                os._exit(0 if gc.isenabled() else 1)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    threads = [threading.Thread(target=fork) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [sum(statuses), len(statuses), int(gc.isenabled())]


def test_children_that_threads_fork_at_once_collect_their_garbage() -> None:
    assert run_python(fork_at_once) == [0, 160, 1]


def test_a_fork_that_begins_while_another_ends_leaves_the_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Collector:
        is_on = True
        meanwhile: Any = staticmethod(lambda: None)

        def isenabled(self) -> bool:
            found = self.is_on
            self.meanwhile()
            return found

        def enable(self) -> None:
            self.is_on = True

        def disable(self) -> None:
            self.is_on = False

    def end_of_the_first() -> None:
        threads.pop()
        garbage._collect_again()
        threads.append(2)

    collector, threads = Collector(), [1]
    monkeypatch.setattr(garbage, "gc", collector)
    monkeypatch.setattr(garbage, "threading", SimpleNamespace(get_ident=lambda: threads[-1]))
    garbage._stop_collecting()
    # Another thread begins: when it has looked, the first one ends.
    threads.append(2)
    collector.meanwhile = end_of_the_first
    garbage._stop_collecting()
    collector.meanwhile = lambda: None
    assert not collector.is_on
    garbage._collect_again()
    assert collector.is_on
    # Nor is it turned on for whoever had it off before.
    collector.is_on = False
    garbage._stop_collecting()
    garbage._collect_again()
    assert not collector.is_on


def fork_and_be_interrupted() -> list[Any]:
    """If a Ctrl-C comes during two forks: how many children collect no garbage, and whether this process does."""
    sys.unraisablehook = lambda _: None
    # It is answered where the next function of Python's begins.
    os.register_at_fork(after_in_parent=_thread.interrupt_main)
    keep_garbage_of_parents()
    found = []
    for _ in range(2):
        if not (pid := os.fork()):
            os._exit(0 if gc.isenabled() else 1)
        found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return [sum(found), gc.isenabled(), len(garbage._forking)]


def test_an_interrupt_during_a_fork_leaves_the_collector_on() -> None:
    assert run_python(fork_and_be_interrupted) == [0, True, 0]


def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    may_go_on = threading.Event()
    results = read_ahead(lambda item: item or may_go_on.wait(), iter(range(-1, 3)), workers_count=1, ahead=2)
    assert next(results) == -1
    if not (pid := os.fork()):
        status = 1
        try:
            next(results)
        except ConverterError as error:
            status = 0 if "was begun in another process" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    may_go_on.set()
    assert list(results) == [True, 1, 2]


class Callbacks(list[Any]):
    """Those of the collector, which runs as soon as the first of them is there."""

    def append(self, callback: Any) -> None:
        self.extend((callback,))

    def extend(self, callbacks: Any) -> None:
        is_first = not self
        super().extend(callbacks)
        for phase in ("start", "stop") if is_first else ():
            for callback in self:
                callback(phase, {})


def test_a_thread_may_wait_though_garbage_is_collected_while_the_collector_begins_to_be_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "_phases", {"stop": None})
    monkeypatch.setattr(garbage, "gc", SimpleNamespace(callbacks=Callbacks()))
    monkeypatch.setattr(garbage.os, "register_at_fork", lambda **_: None)
    garbage.watch_collector.__wrapped__()
    assert list(garbage._phases) == ["start", "stop"]
    assert garbage.may_wait()
