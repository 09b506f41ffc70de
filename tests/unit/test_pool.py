"""Threads compute in order of asking, end with their block, and take the main thread into no lock of Python's own."""

from __future__ import annotations

import _thread
import contextlib
import gc
import itertools
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import make_parquet_converter
from converter.pool import Threads
from tests.waiting import wait_until

NAME = "converter-pooled"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def fail(text: str) -> None:
    raise ValueError(text)


def test_each_asker_gets_its_own_answer_or_error_as_often_as_it_asks() -> None:
    with Threads(3, NAME) as pool:
        answers = [pool.submit(pow, number, 2) for number in range(100)]
        wrong = pool.submit(fail, "no")
        assert [answer.result() for answer in answers] == [number**2 for number in range(100)]
        for _ in range(2):
            assert answers[7].result() == 49
            with pytest.raises(ValueError, match="no"):
                wrong.result()
    assert wrong.is_there


def test_another_thread_is_started_only_if_none_is_idle() -> None:
    held = threading.Event()
    with Threads(3, NAME) as pool:
        for _ in range(20):
            pool.submit(int).result()
            wait_until(lambda: not pool._idle.empty())
        assert [thread.name for thread in threads()] == [f"{NAME}_0"]
        answers = [pool.submit(held.wait) for _ in range(5)]
        wait_until(lambda: len(threads()) == 3)
        held.set()
        assert all(answer.result() for answer in answers)


def test_the_end_of_the_block_waits_for_what_was_asked_and_takes_no_more() -> None:
    held, done = threading.Event(), []
    with Threads(1, NAME) as pool:
        pool.submit(held.wait)
        for number in range(10):
            pool.submit(done.append, number)
        held.set()
    assert done == list(range(10))
    assert not threads()
    with pytest.raises(RuntimeError, match="has ended"):
        pool.submit(int)


def test_what_has_not_begun_never_does_if_it_is_cancelled() -> None:
    begun, held = threading.Event(), threading.Event()
    with Threads(1, NAME) as pool:
        first = pool.submit(lambda: begun.set() or held.wait())
        one, others = pool.submit(int), [pool.submit(int) for _ in range(3)]
        begun.wait(10)
        one.cancel()
        pool.shutdown(wait=False, cancel=True)
        held.set()
        assert first.result() is True
        for answer in (one, *others):
            with pytest.raises(CancelledError):
                answer.result()
    assert not threads()


def test_who_asks_while_another_thread_ends_the_pool_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Threads(1, NAME)
    queue = pool._asked

    class Late:
        """A queue into which nothing comes before the pool has ended."""

        def put(self, item: Any) -> None:
            if item is not None:
                monkeypatch.setattr(pool, "_asked", queue)
                pool.shutdown()
            queue.put(item)

    monkeypatch.setattr(pool, "_asked", Late())
    with pytest.raises(RuntimeError, match="has ended"):
        pool.submit(int)


def test_threads_end_if_their_pool_is_freed() -> None:
    pool = Threads(2, NAME)
    answer = pool.submit(int)
    del pool
    gc.collect()
    assert answer.result() == 0
    wait_until(lambda: not threads())


def test_an_answer_that_was_taken_is_kept_by_no_thread() -> None:
    class Big:
        pass

    with Threads(1, NAME) as pool:
        assert type(pool.submit(Big).result()) is Big
        wait_until(lambda: not pool._idle.empty())
        assert not [one for one in gc.get_objects() if type(one) is Big]


def test_who_waits_is_told_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("converter.pool._LOOK_SECONDS", 0.01)
    held, told = threading.Event(), list[float]()

    def waited(seconds: float) -> None:
        told.append(seconds)
        if len(told) == 3:
            held.set()

    with Threads(1, NAME) as pool:
        assert pool.submit(held.wait).result(waited) is True
    assert told == sorted(told)
    assert len(told) >= 3


@pytest.mark.parametrize("where", [(threading.Thread, "start"), (_thread, "start_new_thread")], ids=["later", "first"])
def test_where_no_thread_can_be_started_that_is_an_error(monkeypatch: pytest.MonkeyPatch, where: Any) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with Threads(1, NAME) as pool, monkeypatch.context() as patch:
        patch.setattr(*where, refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(int)
    assert not threads()


def test_an_error_and_what_it_holds_is_freed_without_the_collector() -> None:
    class Big:
        pass

    def fail_with(big: Big) -> None:
        raise ValueError(big)

    big = Big()
    known = weakref.ref(big)
    gc.disable()
    try:
        with Threads(1, NAME) as pool:
            answer = pool.submit(fail_with, big)
            del big
            with contextlib.suppress(ValueError):
                answer.result()
            del answer
            wait_until(lambda: not pool._idle.empty())
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("num_batches", [3, 80])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"columns": ["lists"], "ragged": "pad"}], ids=str)
def test_the_main_thread_enters_no_lock_of_pythons_own_while_it_reads(
    tmp_path: Path, options: dict[str, Any], num_batches: int
) -> None:
    """What a handler raises in one would leave it held: a thread would wait for it, and the main thread for that."""
    lists = pa.array([[number] * (number % 3) for number in range(4000)], pa.list_(pa.int64()))
    table = pa.table({"id": np.arange(4000), "lists": lists})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    entered = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename == threading.__file__ and code.co_name in ("__enter__", "wait"):
            entered.append(frame.f_back and frame.f_back.f_code.co_name)

    if "columns" not in options:
        options = {"columns": ["id"], **options}
    with make_parquet_converter(str(tmp_path)) as converter:
        before = sys.getprofile()
        with converter.make_batch_reader(batch_size=50, **options) as reader:
            sys.setprofile(note)
            try:
                num_rows = sum(len(next(iter(batch.values()))) for batch in itertools.islice(reader, num_batches))
            finally:
                sys.setprofile(before)
        assert num_rows == 50 * num_batches
    assert entered == []
