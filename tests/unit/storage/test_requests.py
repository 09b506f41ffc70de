"""A line is asked for no more at once than it brings in time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from converter.storage import requests
from converter.storage.requests import GivenUpError
from converter.storage.store import Store
from tests.waiting import wait_until


class Line(Store):
    """A store that answers when the test lets it, and is late else."""

    def __init__(self, timeout_seconds: float, *, num_allowed: int = 0) -> None:
        super().__init__({}, protocol="memory", timeout_seconds=timeout_seconds)
        self.num_allowed, self.num_asked, self.num_asking, self.most_at_once = num_allowed, 0, 0, 0
        self.changed = threading.Condition()

    def read_range(self, path: str, start: int, end: int, given_up: threading.Event | None = None) -> bytes:
        with self.changed:
            self.num_asked += 1
            self.num_asking += 1
            self.most_at_once = max(self.most_at_once, self.num_asking)
            is_answered = self.changed.wait_for(lambda: self.num_allowed, self.timeout_seconds)
            self.num_allowed -= 1
            self.num_asking -= 1
        if not is_answered:
            raise TimeoutError(f"{path} could not be reached")
        return b""

    def allow(self, count: int) -> None:
        with self.changed:
            self.num_allowed += count
            self.changed.notify_all()

    def is_at(self, num_asking: int, num_waiting: int) -> bool:
        return (self.num_asking, len(self._own_line()._waiting)) == (num_asking, num_waiting)


@contextlib.contextmanager
def asking(line: Line, count: int, num_bytes: int) -> Iterator[list[Future[Any]]]:
    """So many threads that ask for so many bytes each."""
    with ThreadPoolExecutor(count) as pool:
        yield [pool.submit(line.read_in_turn, "a", 0, num_bytes) for _ in range(count)]


def test_a_slow_line_is_not_asked_for_more_than_it_brings_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # However fast an answer comes.
    monkeypatch.setattr(requests, "_TIME_USED", 0)
    line = Line(timeout_seconds=60)
    with asking(line, 8, 14_000_000) as reads:
        wait_until(lambda: line.is_at(2, 6))
        line.allow(8)
    assert [read.result() for read in reads] == [b""] * 8
    assert line.most_at_once == 2


def test_a_fast_line_is_asked_for_all_once_an_answer_was_fast() -> None:
    line = Line(timeout_seconds=60, num_allowed=1)
    # What is short tells nothing.
    line.read_in_turn("a", 0, 1000)
    with asking(line, 2, 16_000_000):
        wait_until(lambda: line.is_at(1, 1))
        line.allow(2)
    assert line.most_at_once == 1
    with asking(line, 8, 14_000_000):
        wait_until(lambda: line.is_at(8, 0))
        line.allow(8)


@pytest.mark.parametrize(
    ("processes_count", "timeout_seconds", "room_bytes"),
    [(1, 120, 60_000_000), (4, 120, 15_000_000), (1000, 120, 60_000), (4, 24, 3_000_000), (4, 2, 250_000)],
)
def test_who_shares_a_line_counts_with_a_share_until_it_is_known(
    processes_count: int, timeout_seconds: float, room_bytes: float
) -> None:
    store = Store({}, protocol="memory")
    store.share_line(processes_count)
    line = store._own_line()
    assert line._room_bytes(timeout_seconds) == room_bytes
    line._bytes_per_second = 100e6
    assert line._room_bytes(timeout_seconds) == timeout_seconds * 25e6


def test_a_large_part_is_several_requests_on_a_line_that_many_share(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def read_range(path: str, start: int, end: int, given_up: threading.Event | None = None) -> bytes:
        asked.append((start, end))
        return bytes(range(start % 7, start % 7 + 1)) * (end - start)

    # However fast the answers come.
    monkeypatch.setattr(requests, "_TIME_USED", 0)
    store = Store({}, protocol="memory", timeout_seconds=20)
    monkeypatch.setattr(store, "read_range", read_range)
    store.share_line(4)
    # 4 × 2.5 MB take 20 seconds at the speed that is taken for slow.
    assert len(store.read_in_turn("a", 100, 8_000_100)) == 8_000_000
    assert asked == [(100, 2_500_100), (2_500_100, 5_000_100), (5_000_100, 8_000_100)]
    asked.clear()
    store.share_line(1)
    store.read_in_turn("a", 100, 8_000_100)
    assert asked == [(100, 8_000_100)]


def test_a_shared_line_is_asked_for_less_at_once() -> None:
    line = Line(timeout_seconds=64)
    line.share_line(4)
    # Too short to tell how fast the line is; all of them would fit on a line of one's own.
    with asking(line, 16, 1_000_000):
        wait_until(lambda: line.is_at(8, 8))
        line.allow(16)
    assert line.most_at_once == 8


def test_who_waits_for_a_turn_gives_up_with_those_who_wait_for_an_answer() -> None:
    line = Line(timeout_seconds=0.3)
    with asking(line, 4, 1_200_000) as reads:
        texts = [str(read.exception()) for read in reads]
    # Not one after the other, each for its whole time.
    assert line.num_asked == 1
    assert sum("it was asked for 1.2 MB, for which a slow line needs more seconds" in text for text in texts) == 1
    assert sum("a could not be reached for 0.3 seconds (timeout_seconds)" in text for text in texts) == 3
    given_up = threading.Event()
    given_up.set()
    with line._own_line().taken(10, 1.0, None, TimeoutError), pytest.raises(GivenUpError):
        line.read_in_turn("a", 0, 10_000_000, given_up)


def test_a_large_part_has_its_turn_among_small_ones() -> None:
    line = Line(timeout_seconds=6, num_allowed=1 << 60)
    is_over = threading.Event()

    def read_small_ones() -> None:
        while not is_over.is_set():
            line.read_in_turn("small", 0, 300_000)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            pool.submit(read_small_ones)
        wait_until(lambda: line.num_asked > 10)
        line.read_in_turn("large", 0, 3_000_000)
        is_over.set()


def test_who_has_hardly_waited_is_not_late_with_others() -> None:
    line = Line(timeout_seconds=60, num_allowed=1)
    is_late = threading.Event()

    def hang() -> None:
        with contextlib.suppress(TimeoutError), line._own_line().taken(29_950_000, 60, None, TimeoutError):
            is_late.wait(60)
            raise TimeoutError

    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(hang)
        wait_until(lambda: line._own_line()._num_bytes > 0)
        with asking(line, 1, 100_000) as (healthy,):
            wait_until(lambda: line.is_at(0, 1))
            is_late.set()
            assert healthy.result() == b""
        hanging.result()
    assert line._own_line()._num_bytes == 0
