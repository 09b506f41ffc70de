"""Many requests at once: in order, in turn, and given up together."""

from __future__ import annotations

import signal
import threading

import pytest

from converter.pool import Threads
from converter.storage.at_once import Turn, at_once


def test_a_store_that_is_away_is_asked_once_by_each_thread() -> None:
    asked, all_ask = [], threading.Barrier(8, timeout=60)

    def ask(number: int) -> None:
        asked.append(number)
        all_ask.wait()
        raise TimeoutError(number) from ConnectionError("reset")

    with pytest.raises(TimeoutError) as caught:
        at_once(ask, range(100), threads_count=8)
    assert len(asked) == 8
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_at_once_keeps_the_order_and_raises_the_first_error() -> None:
    barrier = threading.Barrier(4, timeout=10)

    def work(number: int) -> int:
        barrier.wait()
        if number == 2:
            raise ValueError("two")
        return number * 10

    with pytest.raises(ValueError, match="two"):
        at_once(work, range(4))
    assert at_once(lambda number: number * 10, [3, 1, 2]) == [30, 10, 20]
    assert at_once(lambda number: number, [7]) == [7]
    assert at_once(lambda number: number, []) == []


def test_who_comes_later_asks_later() -> None:
    first, asked = Turn(), []
    second = Turn(first)
    with Threads(1, "converter-test") as pool:
        later = threading.Thread(target=at_once, args=(asked.append, [3, 4]), kwargs={"turn": second, "pool": pool})
        later.start()
        assert not second.is_over.wait(0.1)
        at_once(asked.append, [1, 2], turn=first, pool=pool)
        later.join(10)
        assert asked == [1, 2, 3, 4]
        assert at_once(lambda number: number, [5], turn=Turn(second), pool=pool) == [5]


def test_who_fails_does_not_wait_for_what_others_began_in_the_same_threads() -> None:
    held = threading.Event()

    def work(number: int) -> None:
        if number:
            raise ValueError("one")
        held.wait(60)

    with Threads(2, "converter-test") as pool:
        with pytest.raises(ValueError, match="one"):
            at_once(work, [1, 0], pool=pool)
        held.set()


def test_nobody_waits_for_a_turn_that_is_not_wanted() -> None:
    given_up = threading.Event()
    given_up.set()
    turn = Turn(Turn())
    assert at_once(lambda number: number, [1, 2], given_up=given_up, turn=turn) == [1, 2]
    assert turn.is_over.is_set()


def test_a_time_limit_of_the_users_ends_the_wait() -> None:
    """Its signal handler raises TimeoutError, as the wait's own end does."""

    def stop(*_: object) -> None:
        raise TimeoutError("the user's limit")

    held = threading.Event()
    before = signal.signal(signal.SIGALRM, stop)
    try:
        with Threads(1, "converter-test") as pool:
            answer = pool.submit(held.wait, 60)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                with pytest.raises(TimeoutError, match="the user's limit"):
                    answer.result()
            finally:
                held.set()
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_error_of_the_call_is_no_end_of_the_wait() -> None:
    def fail() -> None:
        raise TimeoutError("the store's")

    with Threads(1, "converter-test") as pool, pytest.raises(TimeoutError, match="the store's"):
        pool.submit(fail).result()
