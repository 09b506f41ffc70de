"""Living objects are found, once each; the freed are forgotten, and nothing of Python runs where they are freed."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from converter.living import Living
from converter.pool import Threads
from tests.waiting import wait_until


class One:
    pass


def test_the_living_are_there_once_and_can_be_removed() -> None:
    first, second, third = One(), One(), One()
    living = Living([first, second, first])
    living.add(second)
    assert list(living) == [first, second]
    assert first in living
    assert third not in living
    del second
    assert list(living) == [first]
    living.discard(first)
    living.discard(third)
    assert list(living) == []
    living.add(third)
    living.clear()
    assert list(living) == []


def test_what_was_freed_takes_no_room() -> None:
    living: Living[One] = Living()
    kept = [One() for _ in range(50)]
    for one in kept:
        living.add(one)
        for _ in range(100):
            living.add(One())
    assert list(living) == kept
    assert len(living._references) < 200


def calls_while_freed(items: list[Any]) -> list[str]:
    """The functions of Python that are called while the last reference to an object goes."""
    called: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    items.clear()
    sys.setprofile(None)
    return called


def test_no_function_of_python_is_called_where_something_is_freed() -> None:
    living: Living[One] = Living()
    items = [One()]
    living.add(items[0])
    assert calls_while_freed(items) == []
    assert list(living) == []
    # A pool that had no thread: threads have such functions of their own.
    assert calls_while_freed([Threads(1, "converter-freed")]) == []


def test_the_threads_of_a_pool_that_is_freed_end() -> None:
    pool = Threads(2, "converter-freed")
    answers = [pool.submit(int) for _ in range(5)]
    threads = list(pool._threads)
    del pool
    assert [answer.result() for answer in answers] == [0] * 5
    wait_until(lambda: not any(thread.is_alive() for thread in threads), seconds=20)
