"""Threads work ahead of who reads, in order, and learn that nobody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator

import pytest

from converter.reading.ahead import close_generator, read_ahead


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
