"""A user's function in processes of its own: results, errors, and the end; by itself, and in readers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter.petastorm import TransformSpec, make_batch_reader, make_reader, processes
from converter.petastorm.processes import Processes, dump_function
from tests.waiting import wait_until


@pytest.fixture
def started() -> Iterator[list[Processes]]:
    made: list[Processes] = []
    yield made
    for group in made:
        group.close()


def start(started: list[Processes], function: Any, count: int = 1) -> Processes:
    dumped = dump_function(function)
    assert dumped is not None
    started.append(Processes(dumped, count))
    return started[-1]


def test_a_function_of_a_script_runs_in_several_other_processes(started: list[Processes]) -> None:
    factor = 3
    processes = start(started, lambda value: (factor * value, os.getpid()), count=2)
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(processes, range(20)))
    assert [result for result, _ in results] == [3 * value for value in range(20)]
    assert os.getpid() not in {pid for _, pid in results}


def test_bytes_and_texts_keep_zeros_at_their_ends(started: list[Processes]) -> None:
    ended = {"b": np.bytes_(b"a\0"), "t": np.str_("a\0")}
    lengths, returned = start(started, lambda values: ([len(value) for value in values.values()], values))(ended)
    assert lengths == [2, 2]
    assert [(type(value), len(value)) for value in returned.values()] == [(np.bytes_, 2), (np.str_, 2)]


def test_what_the_function_raises_is_raised_here(started: list[Processes]) -> None:
    def fail(value: int) -> None:
        raise LookupError(f"no {value}")

    processes = start(started, fail)
    with pytest.raises(LookupError, match="no 5"):
        processes(5)
    with pytest.raises(LookupError, match="no 6"):
        processes(6)


def test_an_error_that_cannot_travel_is_told_as_text(started: list[Processes]) -> None:
    class OddError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fail(value: int) -> None:
        raise OddError(value, value)

    with pytest.raises(RuntimeError, match=r"failed in its process(.|\n)*5 and 5"):
        start(started, fail)(5)


def test_a_process_that_was_killed_is_told_as_that(started: list[Processes]) -> None:
    processes = start(started, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match=r"exit status -9.*reader_pool_type='thread'"):
        processes(1)


@pytest.mark.parametrize("is_program", [True, False], ids=["a program", "a fork"])
def test_what_a_process_has_started_keeps_no_one_waiting(
    started: list[Processes], tmp_path: Path, is_program: bool
) -> None:
    left = tmp_path / "pid"

    def leave(_: Any) -> None:
        if is_program:
            os.system(f"sleep 600 & echo $! > {left}")
        elif (pid := os.fork()) == 0:
            time.sleep(600)
        else:
            left.write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)

    processes = start(started, leave)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"exit status -9"):
            processes(bytes(1 << 20))
    started[0].close()
    # It goes on, and this raises if it has ended.
    os.kill(int(left.read_text()), signal.SIGKILL)


def test_no_process_is_left_after_the_end(started: list[Processes]) -> None:
    pid = start(started, lambda _: os.getpid())(0)
    started[0].close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_function_that_holds_what_cannot_travel_runs_in_threads(caplog: pytest.LogCaptureFixture) -> None:
    lock = threading.Lock()
    with caplog.at_level("WARNING"):
        assert dump_function(lambda value: (value, lock)) is None
    assert "so it runs in threads" in caplog.text


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    pq.write_table(pa.table({"id": range(40), "x": [float(number) for number in range(40)]}), tmp_path / "a.parquet",
                   row_group_size=10)  # fmt: skip
    return tmp_path.as_uri()


@pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning")
def test_a_transform_of_batches_runs_elsewhere_in_the_order_of_row_groups(numbers: str) -> None:
    spec = TransformSpec(
        lambda frame: frame.assign(pid=os.getpid())[frame["id"] % 2 == 0], edit_fields=[("pid", np.int64, (), False)]
    )
    with make_batch_reader(
        numbers, transform_spec=spec, reader_pool_type="process", shuffle_row_groups=False, num_epochs=2
    ) as reader:
        batches = list(reader)
    assert np.concatenate([batch.id for batch in batches]).tolist() == 2 * list(range(0, 40, 2))
    assert os.getpid() not in {pid for batch in batches for pid in batch.pid}


@pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning", "ignore:Currently make_reader")
def test_a_transform_of_rows_runs_elsewhere_and_its_errors_come_here(numbers: str) -> None:
    def halve(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 35:
            raise LookupError("no 35")
        return {"id": row["id"], "x": row["x"] / 2, "pid": os.getpid()}

    spec = TransformSpec(halve, edit_fields=[("pid", np.int64, (), False)])
    rows = []
    with (
        make_reader(numbers, transform_spec=spec, reader_pool_type="process", shuffle_row_groups=False) as reader,
        pytest.raises(LookupError, match="no 35"),
    ):
        rows += reader
    assert all(row.x == row.id / 2 and row.pid != os.getpid() for row in rows)
    before = {int(line) for line in children()}
    assert not before & {row.pid for row in rows}


@pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning", "ignore:Currently make_reader")
def test_rows_of_bytes_travel_with_zeros_at_their_ends(tmp_path: Path) -> None:
    values = [b"\1\0\0\0", b"\0", b"plain"]
    pq.write_table(pa.table({"raw": values}), tmp_path / "a.parquet")
    spec = TransformSpec(lambda row: row)
    with make_reader(tmp_path.as_uri(), transform_spec=spec, reader_pool_type="process") as reader:
        assert [bytes(row.raw) for row in reader] == values


@pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning")
def test_stop_does_not_wait_for_a_transform_that_goes_on(numbers: str, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def wait(frame: Any) -> Any:
        (tmp_path / "pid").write_text(str(os.getpid()))
        (tmp_path / "pid").rename(begun)
        time.sleep(600)
        return frame

    reader = make_batch_reader(numbers, transform_spec=TransformSpec(wait), reader_pool_type="process")
    errors: list[BaseException] = []

    def read() -> None:
        try:
            next(reader)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(begun.exists)
    reader.stop()
    reader.join()
    thread.join(60)
    assert "stopped while a process of it ran the transform" in str(errors[0])
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)


@pytest.mark.parametrize("is_paused", [True, False], ids=["a process that is paused", "a process that ignores it"])
@pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning")
def test_stop_kills_in_the_middle_of_a_call(
    numbers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_paused: bool
) -> None:
    monkeypatch.setattr(processes, "_END_SECONDS", 0.5)
    begun = tmp_path / "begun"

    def go_on(frame: Any) -> Any:
        if not is_paused:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / "pid").write_text(str(os.getpid()))
        (tmp_path / "pid").rename(begun)
        if is_paused:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
        return frame

    reader = make_batch_reader(
        numbers, transform_spec=TransformSpec(go_on), reader_pool_type="process", workers_count=1
    )
    errors: list[BaseException] = []

    def read() -> None:
        try:
            next(reader)
        except RuntimeError as error:
            errors.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    wait_until(begun.exists)
    pid = int(begun.read_text())
    if is_paused:
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    stopping = threading.Thread(target=reader.stop, daemon=True)
    stopping.start()
    stopping.join(30)
    try:
        assert not stopping.is_alive()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    reading.join(60)
    assert "stopped while a process of it ran the transform" in str(errors[0])


@pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning")
def test_a_process_that_does_not_end_when_it_is_told_to_is_killed(
    numbers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_END_SECONDS", 0.2)

    def go_on(frame: Any) -> Any:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / "pid").write_text(str(os.getpid()))
        return frame

    with make_batch_reader(
        numbers, transform_spec=TransformSpec(go_on), reader_pool_type="process", workers_count=1
    ) as reader:
        next(reader)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def children() -> list[str]:
    """The numbers of this process's children."""
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
