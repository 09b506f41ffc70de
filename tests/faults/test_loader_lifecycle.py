"""However an iteration ends, nothing of it is left, nothing hangs, and no row is wrong or silently missing.

Left would be: a thread of ours, a child process, an open or mapped data file, a temporary file, a lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.abc
import itertools
import json
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.resource_sharer
import multiprocessing.util
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from converter import ConverterError, DatasetConverter, ReadError, SourceChangedError, open_converter
from converter.petastorm import make_batch_reader
from tests.columns import ID, Column, assert_batch
from tests.entries import write_converter
from tests.faults.small_entries import tree
from tests.processes import error_of, finish, run_python, start_python
from tests.servers.process import server_pids
from tests.waiting import wait_until

TEXT = Column(name="text", dtype="str")
VECTOR = Column(name="vector", dtype="float32", shape=(3,))
COLUMNS = (ID, TEXT, VECTOR)
NUM_ROWS = 1200
PARTITIONS = [[range(first, first + 400)] for first in range(0, NUM_ROWS, 400)]
BATCH_SIZE = 20
OPTIONS: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": 2, "shuffle_window_rows": 60}

KINDS: dict[str, dict[str, Any] | None] = {
    "numpy": None,
    "torch": {},
    "processes": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}
kept: list[Any] = []

pytestmark = pytest.mark.timeout(100)


def write(cache_dir: str | Path) -> DatasetConverter:
    """Three files of several row groups, of which a window takes a few."""
    return write_converter(cache_dir, COLUMNS, PARTITIONS, row_group_bytes=1500)


def make(converter: DatasetConverter, kind: str, **options: Any) -> Any:
    framework = KINDS[kind]
    if framework is None:
        return converter.make_batch_reader(**{**OPTIONS, **options})
    return converter.make_torch_dataloader(**{**OPTIONS, **framework, **options})


def ids_of(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["id"].tolist()]


def epochs_of(converter: DatasetConverter, count: int) -> list[list[int]]:
    with converter.make_batch_reader(columns=["id"], **OPTIONS) as reader:
        return [ids_of(reader) for _ in range(count)]


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "double": batch["id"] * 2}


class FailAt:
    """A transform with an error in the batch of one row."""

    def __init__(self, row: int) -> None:
        self.row = row

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self.row in batch["id"]:
            raise ZeroDivisionError(f"of row {self.row}")
        return batch


# What could be left --------------------------------------------------------------------------


_NOT_OURS = ("resource_tracker", "forkserver", "org.apache.spark")


def child_processes() -> list[str]:
    """Command lines of the children, zombies too; without what multiprocessing keeps, Spark, and the tests' servers."""
    found, servers = [], server_pids()
    for listed in Path("/proc/self/task").glob("*/children"):
        pids: list[str] = []
        with contextlib.suppress(OSError):  # a thread that has ended since
            pids = listed.read_text().split()
        for pid in pids:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                if int(pid) not in servers and not any(kept in line for kept in _NOT_OURS):
                    found.append(f"{pid} {line}")
    return found


def open_data_files(cache_dir: str | Path) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return [line for line in found if str(cache_dir) in line and ".parquet" in line]


def mapped_data_files(cache_dir: str | Path) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if str(cache_dir) in line and ".parquet" in line]


def running_of(cache_dir: str | Path) -> list[str]:
    """What an iteration has and must end with it: threads, processes, open files."""
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("converter-read")]
    return threads + child_processes() + open_data_files(cache_dir)


def left_of(cache_dir: str | Path) -> list[str]:
    """What must be gone once the loader is closed: that, and the mappings that it keeps from epoch to epoch."""
    return running_of(cache_dir) + mapped_data_files(cache_dir)


def assert_only_the_marker_is_left(cache_dir: str | Path) -> None:
    assert set(tree(Path(cache_dir))) == {"converter-v1", "converter-v1/.owner"}


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """pytest-timeout does not get through to a call that never returns to Python."""
    faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files would be; the name is short, since sockets are among them."""
    # Its socket lives as long as this process.
    multiprocessing.forkserver.ensure_running()
    # Where multiprocessing found one already, it would stay there, and so would its children.
    monkeypatch.delitem(multiprocessing.current_process()._config, "tempdir", raising=False)
    directory = tmp_path_factory.mktemp("t")
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def converter(cache_dir: Path, temporary: Path) -> Iterator[DatasetConverter]:
    """One that a test may harm; whatever it does, nothing is left in the end."""
    with write(cache_dir) as found:
        assert found._manifest.num_row_groups > 12
        yield found
        assert left_of(cache_dir) == []
    assert_only_the_marker_is_left(cache_dir)
    assert [path for path in temporary.rglob("*") if not path.is_dir()] == []
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("converter-")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """One that no test harms."""
    with write(tmp_path_factory.mktemp("whole")) as found:
        yield found


# Endings -------------------------------------------------------------------------------------


def end_by_break(loader: Any) -> None:
    for _ in loader:
        break


def end_late_by_break(loader: Any) -> None:
    for index, _ in enumerate(loader):
        if index == len(loader) - 1:
            break


def end_by_an_error_of_the_consumer(loader: Any) -> None:
    def consume() -> None:
        for _ in loader:
            raise KeyError("of the consumer")

    with pytest.raises(KeyError, match="of the consumer"):
        consume()


def end_by_forgetting_the_iterator(loader: Any) -> None:
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    del iterator


def end_before_the_first_batch(loader: Any) -> None:
    iterator = iter(loader)
    del iterator


def end_by_closing_the_iterator(loader: Any) -> None:
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    assert list(iterator) == []


def end_in_a_cycle(loader: Any) -> None:
    """Only the garbage collector sees that nobody holds it."""
    holder: dict[str, Any] = {"iterator": iter(loader)}
    holder["self"] = holder
    next(holder["iterator"])


ENDINGS = [
    end_by_break, end_late_by_break, end_by_an_error_of_the_consumer, end_by_forgetting_the_iterator,
    end_before_the_first_batch, end_by_closing_the_iterator, end_in_a_cycle,
]  # fmt: skip


# torch itself takes five seconds for each worker of an iterator that only the collector finds.
ENDED = [
    (kind, how, end)
    for kind, how, end in itertools.product(KINDS, ("plain", "transformed"), ENDINGS)
    if kind in ("numpy", "torch") or (how == "transformed" and end is not end_in_a_cycle)
]


@pytest.mark.parametrize(("kind", "how", "end"), ENDED, ids=lambda value: getattr(value, "__name__", value))
def test_nothing_is_left_of_an_iteration_that_ends_early(
    converter: DatasetConverter, cache_dir: Path, kind: str, how: str, end: Callable[[Any], None]
) -> None:
    transform = double if how == "transformed" else None
    with make(converter, kind, transform=transform) as loader:
        end(loader)
        gc.collect()
        if kind != "persistent":
            assert running_of(cache_dir) == []
        # The next one is whole, and of the same epoch.
        batches = list(loader)
        assert ids_of(batches) == epochs_of(converter, 1)[0]
        for batch in batches:
            if transform is not None:
                assert batch.pop("double").tolist() == [2 * row for row in batch["id"].tolist()]
            assert_batch(batch, COLUMNS, batch["id"].tolist())
        if kind != "persistent":
            assert running_of(cache_dir) == []
    assert left_of(cache_dir) == []


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_an_iteration_that_its_block_ends(
    converter: DatasetConverter, cache_dir: Path, kind: str
) -> None:
    with make(converter, kind) as loader:
        iterator = iter(loader)
        first = next(iterator)
        assert left_of(cache_dir) != []
    assert left_of(cache_dir) == []
    with pytest.raises(ConverterError, match="This loader was closed: its `with` block has ended"):
        next(iterator)
    with pytest.raises(ConverterError, match="This loader was closed: its `with` block has ended"):
        iter(loader)
    # What was handed over stays.
    assert_batch(first, COLUMNS, first["id"].tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_a_transform_arrives_after_right_rows(
    converter: DatasetConverter, cache_dir: Path, kind: str
) -> None:
    expected = epochs_of(converter, 1)[0]
    # torch itself waits five seconds for each worker that raised, so there is one.
    options = {"num_workers": 1} if "num_workers" in (KINDS[kind] or {}) else {}
    with make(converter, kind, transform=FailAt(expected[610]), **options) as loader:
        for _ in range(2 if kind != "processes" else 1):
            rows: list[int] = []
            error = error_of(lambda rows=rows, loader=loader: rows.extend(collect(loader, rows)))  # type: ignore[misc]
            assert error[0] == "ZeroDivisionError"
            assert f"of row {expected[610]}" in error[1]
            assert rows == expected[: len(rows)]
            assert 500 <= len(rows) <= 600
    assert left_of(cache_dir) == []


def collect(loader: Any, rows: list[int]) -> list[int]:
    for batch in loader:
        rows += batch["id"].tolist()
    return []


def test_a_transform_that_cannot_travel_is_refused_by_name(whole: DatasetConverter) -> None:
    for method in ("spawn", "forkserver", multiprocessing.get_context("spawn")):
        with pytest.raises(TypeError, match=r"transform cannot be sent to worker processes \((spawn|forkserver)\)"):
            make(whole, "processes", transform=lambda batch: batch, multiprocessing_context=method)


# Ctrl-C and the interpreter's end ------------------------------------------------------------


def be_interrupted(cache_dir: str, ready: str, rounds: int) -> list[list[Any]]:
    """Read without an end, time and again, each time until the signal comes."""
    told = []
    with write(cache_dir) as converter:
        expected = epochs_of(converter, 1)[0]
        for name in interrupted_names(rounds):
            _, kind, how = name.split("-")
            transform = double if how == "transformed" else None
            interrupted = False
            try:
                with make(converter, kind, num_epochs=None, transform=transform) as loader:
                    for index, _ in enumerate(loader):
                        if index == 3:
                            Path(ready, name).touch()
            except KeyboardInterrupt:
                interrupted = True
            # An interrupt in the very start of a pool leaves a thread to end by itself.
            deadline = time.monotonic() + 5
            while (left := left_of(cache_dir)) and time.monotonic() < deadline:
                time.sleep(0.01)
            with make(converter, kind, transform=transform) as loader:
                again = ids_of(loader) == expected
            told.append([name, interrupted, left, again])
    return told


def interrupt_a_fork(cache_dir: str, persistent: bool) -> dict[str, Any]:
    """Receive an interrupt in the midst of each fork, where Python ignores what a handler raises."""
    is_armed = False

    def interrupt() -> None:
        if is_armed:
            signal.raise_signal(signal.SIGINT)

    os.register_at_fork(after_in_parent=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    options: dict[str, Any] = {"multiprocessing_context": "fork", "persistent_workers": persistent}
    with (
        write(cache_dir) as converter,
        converter.make_torch_dataloader(num_workers=2, columns=["id"], **OPTIONS, **options) as loader,
    ):
        is_armed = True
        try:
            next(iter(loader))
            found = "no interrupt"
        except KeyboardInterrupt:
            found = "interrupt"
        is_armed = False
        left = len(multiprocessing.active_children())
        rows = len(ids_of(loader))
        handler = signal.signal(signal.SIGINT, before) is signal.default_int_handler
    return {"found": found, "left": left, "rows": rows, "handler": handler}


@pytest.mark.parametrize("persistent", [False, True])
def test_an_interrupt_in_the_midst_of_a_fork_is_not_lost(cache_dir: Path, persistent: bool) -> None:
    found = run_python(interrupt_a_fork, str(cache_dir), persistent)
    assert found == {"found": "interrupt", "left": 0, "rows": NUM_ROWS, "handler": True}


def wait_a_little(batch: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.01)
    return batch


def iterate_in_two_threads(cache_dir: str) -> list[str]:
    """How the two ended in each of some tries; the second begins while the first waits for a batch."""
    found = []
    options: dict[str, Any] = {"persistent_workers": True, "num_workers": 2, "num_epochs": None, "batch_size": 5}
    with write(cache_dir) as converter:
        for number in range(6):
            ends = ["waits", "waits"]
            loader = converter.make_torch_dataloader(columns=["id"], transform=wait_a_little, **options)

            def read(place: int, loader: Any = loader, ends: list[str] = ends) -> None:
                try:
                    ends[place] = str(len(ids_of(itertools.islice(loader, 100))))
                except ConverterError as error:
                    ends[place] = str(error)

            threads = [threading.Thread(target=read, args=(place,), daemon=True) for place in range(2)]
            for thread in threads:
                thread.start()
                time.sleep(0.1 + 0.05 * number)
            for thread in threads:
                thread.join(10)
            found += ends
            if "waits" in ends:
                break
            loader.close()
    return found


def test_threads_that_iterate_one_loader_with_persistent_workers_do_not_wait_for_each_other(cache_dir: Path) -> None:
    found = run_python(iterate_in_two_threads, str(cache_dir))
    assert [end for end in found if end != "500" and "has taken its persistent workers" not in end] == []


def signal_a_fork(cache_dir: str) -> int:
    """How often asyncio calls the handler of one signal, which comes while workers are forked."""
    called: list[int] = []
    sent: list[int] = []

    def send() -> None:
        if not sent:
            sent.append(1)
            signal.raise_signal(signal.SIGUSR1)

    async def read() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: called.append(1))
        with write(cache_dir) as converter:
            os.register_at_fork(before=send)
            assert len(ids_of(make(converter, "processes", multiprocessing_context="fork"))) == NUM_ROWS
        # What the signal wrote to the loop's socket is read in its next turns.
        for _ in range(20):
            await asyncio.sleep(0.01)

    asyncio.run(read())
    return len(called)


def test_asyncio_is_told_once_of_a_signal_that_comes_while_workers_start(cache_dir: Path) -> None:
    assert run_python(signal_a_fork, str(cache_dir)) == 1


def interrupted_names(rounds: int) -> list[str]:
    return [f"{turn}-{kind}-{how}" for turn in range(rounds) for kind in KINDS for how in ("plain", "transformed")]


def test_an_interrupt_ends_everything(cache_dir: Path, tmp_path: Path) -> None:
    rounds = 2
    with start_python(be_interrupted, str(cache_dir), str(tmp_path), rounds) as process:
        for name in interrupted_names(rounds):
            wait_until(lambda name=name: process.poll() is not None or (tmp_path / name).exists(), seconds=40)  # type: ignore[misc]
            assert process.poll() is None, process.communicate()[1]
            # A terminal's Ctrl-C goes to the worker processes, too.
            os.killpg(process.pid, signal.SIGINT)
        told = finish(process, seconds=40)
    assert told == [[name, True, [], True] for name in interrupted_names(rounds)]
    assert_only_the_marker_is_left(cache_dir)


def leave_unfinished(cache_dir: str, kind: str, how: str) -> None:
    """End the interpreter while a module still holds an iterator."""
    converter = write(cache_dir)
    loader = make(converter, kind, num_epochs=None, transform=double)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    kept.append((converter, loader, iterator))
    if how == "raise":
        raise LookupError("of the program")


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, int, str]]:
    """Of programs that end with an iterator in their hands: the cache, the exit status, what they said."""
    cases = [*((kind, "return") for kind in KINDS), ("torch", "raise"), ("persistent", "raise")]
    found = {}
    for some in (cases[:4], cases[4:]):
        with contextlib.ExitStack() as stack:
            running = {}
            for kind, how in some:
                cache_dir = tmp_path_factory.mktemp("unfinished")
                (cache_dir.parent / f"t-{kind}-{how}").mkdir()
                environment = {"TMPDIR": str(cache_dir.parent / f"t-{kind}-{how}")}
                started = start_python(leave_unfinished, str(cache_dir), kind, how, environment=environment)
                running[kind, how] = (cache_dir, stack.enter_context(started))
            for case, (cache_dir, process) in running.items():
                _, said = process.communicate(timeout=60)
                found[case] = (cache_dir, process.returncode, said)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_interpreters_end_is_quick_and_quiet(unfinished: dict[Any, Any], kind: str) -> None:
    cache_dir, status, said = unfinished[kind, "return"]
    assert (status, said) == (0, "")
    assert_only_the_marker_is_left(cache_dir)


@pytest.mark.parametrize("how", ["return", "raise"])
def test_no_temporary_file_is_left_at_the_interpreters_end(unfinished: dict[Any, Any], how: str) -> None:
    """python -m tests.faults.campaign lives --case 1:174 --steps 0"""
    cache_dir, _, _ = unfinished["persistent", how]
    left = cache_dir.parent / f"t-persistent-{how}"
    assert [path for path in left.rglob("*") if not path.is_dir()] == []


@pytest.mark.parametrize("kind", ["torch", "persistent"])
def test_a_program_that_fails_says_that_and_no_more(unfinished: dict[Any, Any], kind: str) -> None:
    cache_dir, status, said = unfinished[kind, "raise"]
    assert status == 1
    assert said.endswith("LookupError: of the program\n")
    assert said.count("Traceback") == 1
    assert_only_the_marker_is_left(cache_dir)


# Other processes -----------------------------------------------------------------------------


def in_a_child(function: Callable[[], Any], *, seconds: float = 20, ends_as_programs_do: bool = True) -> Any:
    """What `function` returns in a child that was forked here and now; "hangs" if it does not end in time."""
    receive, send = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        try:
            send.send(function())
        except BaseException as error:  # noqa: BLE001 (told to the parent)
            send.send([type(error).__name__, str(error)])
        if not ends_as_programs_do:
            os._exit(0)
        # What is to be done at exit is done.
        raise SystemExit(0)
    if not receive.poll(seconds):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "hangs"
    found: Any = receive.recv()
    deadline = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"{found}, and does not end"
        time.sleep(0.01)
    return found


def read_in_process(queue: Any, converter: DatasetConverter, kind: str) -> None:
    with make(converter, kind) as loader:
        queue.put(ids_of(loader))


def fork_after_use(cache_dir: str, kind: str) -> dict[str, Any]:
    """A parent that has used its loader, and is using it, forks."""
    found: dict[str, Any] = {}
    # At its end, Python itself would end the parent's workers from a child that it did not fork.
    child = functools.partial(in_a_child, ends_as_programs_do=kind != "processes")
    with write(cache_dir) as converter:
        expected = epochs_of(converter, 3)
        with make(converter, kind, transform=double) as loader:
            used = ids_of(loader) == expected[0]
            # An iteration of the parent is under way, with its threads, when the child appears.
            with make(converter, kind) as other:
                held = iter(other)
                head = ids_of(itertools.islice(held, 3))
                found["the parent's loader"] = child(lambda: ids_of(loader)) == expected[1]
                found["its other loader anew"] = child(lambda: ids_of(other)) == expected[0]
                found["a new loader"] = child(lambda: ids_of(make(converter, kind))) == expected[0]
                found["a deletion"] = child(converter.delete) is None
                found["the parent goes on"] = head + ids_of(held) == expected[0]
            found["and on"] = used and ids_of(loader) == expected[1]
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=read_in_process, args=(queue, converter, kind))
        process.start()
        found["a multiprocessing child"] = queue.get(timeout=20) == expected[0]
        process.join(20)
        found["its exit status"] = process.exitcode == 0
        found["the files are still there"] = epochs_of(converter, 1)[0] == expected[0]
        found["nothing is left"] = left_of(cache_dir) == []
    return found


@pytest.mark.parametrize("kind", ["torch", "processes"])
def test_a_child_that_is_forked_after_use_reads_and_harms_nothing(cache_dir: Path, kind: str) -> None:
    with start_python(fork_after_use, str(cache_dir), kind) as process:
        found = finish(process, seconds=80)
    assert found == dict.fromkeys(found, True)
    assert_only_the_marker_is_left(cache_dir)


def go_on_in_a_child(cache_dir: str) -> dict[str, Any]:
    """A child asks for the next batch of an iteration whose threads stayed in the parent."""
    found: dict[str, Any] = {}
    with write(cache_dir) as converter:
        expected = epochs_of(converter, 1)[0]
        for kind, transform in (("numpy", None), ("torch", double)):
            with make(converter, kind, transform=transform) as loader:
                held = iter(loader)
                head = ids_of(itertools.islice(held, 3))
                tail = in_a_child(lambda held=held: ids_of(held), seconds=5)  # type: ignore[misc]
                is_right = tail == expected[len(head) :]
                found[f"{kind}, {'plain' if transform is None else 'transformed'}"] = "right" if is_right else tail
                assert head + ids_of(held) == expected
    return found


def test_a_child_that_goes_on_with_its_parents_iteration_is_told_or_right(cache_dir: Path) -> None:
    with start_python(go_on_in_a_child, str(cache_dir)) as process:
        found = finish(process, seconds=80)
    assert {name: what for name, what in found.items() if what != "right" and what[0] != "ConverterError"} == {}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("spawn", {"transform": double}),
        ("forkserver", {"transform": FailAt(-1), "persistent_workers": True}),
        ("fork", {}),
    ],
    ids=["spawn", "forkserver", "fork"],
)
def test_workers_of_every_start_method_read_the_same_rows(
    converter: DatasetConverter, cache_dir: Path, method: str, options: dict[str, Any]
) -> None:
    context = multiprocessing.get_context(method) if method == "spawn" else method
    with make(converter, "processes", multiprocessing_context=context, **options) as loader:
        found = [ids_of(loader) for _ in range(2 if "persistent_workers" in options else 1)]
        if "persistent_workers" in options:
            loader.set_epoch(0)
            end_by_break(loader)
            found.append(ids_of(loader))
            assert found.pop() == found[0]
    assert found == epochs_of(converter, len(found))
    assert left_of(cache_dir) == []


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_converter_that_is_sent_to_another_process_reads_there(converter: DatasetConverter, method: str) -> None:
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=read_in_process, args=(queue, converter, "torch"))
    process.start()
    expected = epochs_of(converter, 1)[0]
    assert queue.get(timeout=40) == expected
    process.join(20)
    assert process.exitcode == 0
    process.close()
    queue.close()
    queue.join_thread()
    assert epochs_of(converter, 1)[0] == expected


def lose_a_worker(cache_dir: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with write(cache_dir) as converter:
        expected = epochs_of(converter, 1)[0]
        with make(converter, kind) as loader:
            iterator = iter(loader)
            rows = next(iterator)["id"].tolist()
            os.kill(int(child_processes()[0].split()[0]), signal.SIGKILL)
            found["error"] = error_of(functools.partial(collect, iterator, rows))
            found["right rows"] = rows == expected[: len(rows)]
            del iterator
            # And once more: all rows, or an error again.
            rows = []
            error = error_of(functools.partial(collect, loader, rows))
            found["right rows again"] = rows == expected[: len(rows)] and (bool(error[0]) or rows == expected)
        found["left"] = left_of(cache_dir)
    return found


class _InterruptedStart(multiprocessing.context.ForkContext):
    """Ctrl-C comes right after the second worker process was started."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        outer = self

        class Process(multiprocessing.context.ForkProcess):
            def start(self) -> None:
                super().start()
                outer.started.append(self)
                if len(outer.started) == 2:
                    raise KeyboardInterrupt

        self.Process = Process  # type: ignore[misc,assignment]


def test_an_interrupt_while_workers_start_ends_those_that_have_started(whole: DatasetConverter) -> None:
    """torch leaves them. First seen in `python -m tests.faults.campaign lives --case 45:232`."""
    context = _InterruptedStart()
    with whole.make_torch_dataloader(**OPTIONS, num_workers=2, multiprocessing_context=context) as loader:
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        assert [process.is_alive() for process in context.started] == [False, False]
    assert not multiprocessing.active_children()
    # What torch prints when it frees what it has begun would be a warning here.
    gc.collect()


@pytest.mark.parametrize("kind", ["processes", "persistent"])
def test_a_worker_that_is_killed_is_an_error_and_no_hang(cache_dir: Path, kind: str) -> None:
    with start_python(lose_a_worker, str(cache_dir), kind) as process:
        found = finish(process, seconds=60)
    assert found.pop("error")[0]
    assert found == {"right rows": True, "right rows again": True, "left": []}
    assert_only_the_marker_is_left(cache_dir)


def leave_workers_in_forks(cache_dir: str, kind: str) -> list[Any]:
    """What forked children say that leave a loader in each way, and whether the parent still gets its rows."""
    found: list[Any] = []
    said = Path(cache_dir).with_name("said")
    with write(cache_dir) as converter:
        expected = epochs_of(converter, 2)
        for leaves, is_inside in itertools.product(("closes", "reads", "frees", "ends"), (False, True)):
            loader = make(converter, kind, multiprocessing_context="fork")
            iterator = iter(loader)
            rows = next(iterator)["id"].tolist() if is_inside else ids_of(iterator)
            if not (pid := os.fork()):
                try:
                    if leaves == "closes":
                        loader.close()
                    elif leaves == "reads":
                        loader.set_epoch(0)
                        assert ids_of(loader) == expected[0]
                    elif leaves == "ends":
                        # What sys.exit() runs.
                        multiprocessing.util._exit_function()
                    del loader, iterator
                    gc.collect()
                    said.write_text("nothing")
                except BaseException as error:  # noqa: BLE001 (told to the parent)
                    said.write_text(repr(error))
                os._exit(0)
            os.waitpid(pid, 0)
            rows += ids_of(iterator)
            found.append([said.read_text(), rows == expected[0], ids_of(loader) == expected[1]])
            loader.close()
    return found


@pytest.mark.parametrize("kind", ["processes", "persistent"])
def test_a_forked_child_leaves_the_worker_processes_of_its_parent_alone(cache_dir: Path, kind: str) -> None:
    with start_python(leave_workers_in_forks, str(cache_dir), kind) as process:
        assert finish(process, seconds=90) == [["nothing", True, True]] * 8


def lose_workers_between_epochs(cache_dir: str) -> list[Any]:
    """What epochs give before which persistent workers are killed; a loader then stands where another one stood."""
    found: list[Any] = []
    with write(cache_dir) as converter:
        expected = epochs_of(converter, 3)
        for _ in range(5):
            with make(converter, "persistent", multiprocessing_context="fork") as loader:
                for epoch in range(3):
                    loader.set_epoch(epoch)
                    try:
                        found.append(ids_of(loader) == expected[epoch])
                    except RuntimeError as error:
                        # torch tells of a killed worker wherever this process is.
                        found.append(str(error))
                    for worker in multiprocessing.active_children():
                        os.kill(worker.pid or 0, signal.SIGKILL)
                    with contextlib.suppress(RuntimeError):
                        wait_until(lambda: not multiprocessing.active_children())
    return found


def test_persistent_workers_that_were_killed_between_epochs_are_started_again(cache_dir: Path) -> None:
    assert run_python(lose_workers_between_epochs, str(cache_dir)) == [True] * 15


def read_after_the_end(cache_dir: str, kind: str) -> None:
    """Return while a thread reads epochs."""
    folder = Path(cache_dir)
    converter = write(cache_dir)
    main = threading.main_thread()
    rows = folder.with_name("rows.parquet")
    pq.write_table(pa.table({"id": np.arange(100)}), rows, row_group_size=10)
    petastorm_reader = make_batch_reader(rows.as_uri())

    def read() -> None:
        wait_until(lambda: not main.is_alive(), pause_seconds=0.001)
        told = error_of(lambda: list(petastorm_reader) if kind == "petastorm" else ids_of(make(converter, kind)))
        folder.with_name("said").write_text(json.dumps(told))

    threading.Thread(target=read).start()


@pytest.mark.parametrize("kind", ["numpy", "torch", "petastorm"])
def test_a_thread_that_begins_after_the_main_thread_has_ended_is_told(cache_dir: Path, kind: str) -> None:
    with start_python(read_after_the_end, str(cache_dir), kind) as process:
        process.wait(60)
    name, text = json.loads(cache_dir.with_name("said").read_text())
    assert (name, "with thread.join()" in text) == ("ConverterError", True)


def read_until_killed(cache_dir: str, method: str) -> None:
    """Tell the worker processes, then wait in the middle of an epoch."""
    with write(cache_dir) as converter:
        loader = make(converter, "processes", multiprocessing_context=method, batch_size=1)
        next(iterator := iter(loader))
        # By then workers wait until somebody takes what they have made.
        time.sleep(2)
        print(json.dumps([worker.pid for worker in multiprocessing.active_children()]), flush=True)
        time.sleep(300)
        del iterator


@pytest.fixture
def places() -> Iterator[Path]:
    """A temporary folder whose name is short enough for sockets, which `tmp_path` is not."""
    with tempfile.TemporaryDirectory(prefix="c-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes_end_with_a_trainer_that_is_killed(cache_dir: Path, places: Path, method: str) -> None:
    with start_python(read_until_killed, str(cache_dir), method, environment={"TMPDIR": str(places)}) as process:
        assert process.stdout is not None
        workers = json.loads(process.stdout.readline())
        process.kill()
        # torch's own watch, of workers that are children of the trainer, looks every five seconds.
        wait_until(lambda: not any(is_running(pid) for pid in workers), seconds=60)
    assert len(workers) == 2
    # A fork server's socket is in a folder of the trainer itself, which was killed, and later workers use that, too.
    assert len(list(places.glob("pymp-*"))) <= (method == "forkserver")


def read_in_a_long_folder(cache_dir: str, method: str) -> Any:
    with write(cache_dir) as converter:
        return error_of(lambda: ids_of(make(converter, "processes", multiprocessing_context=method)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_temporary_folder_of_too_long_a_name_is_told(cache_dir: Path, tmp_path: Path, method: str) -> None:
    (folder := tmp_path / ("long" * 25)).mkdir()
    name, text = run_python(read_in_a_long_folder, str(cache_dir), method, environment={"TMPDIR": str(folder)})
    assert name == "ConverterError"
    assert str(folder) in text
    assert "TMPDIR to a shorter one" in text


class ClosesBeforeItEnds:
    """A transform in a worker that closes the sockets of its batches some time before it ends, as a slow end does."""

    def __init__(self, said: str) -> None:
        self.said = said
        self.calls = 0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        if self.calls == 3:
            # The second batch waits in its socket now, as the trainer has only taken the first.
            time.sleep(0.5)
            multiprocessing.resource_sharer.stop(5)
            Path(self.said).touch()
            time.sleep(0.5)
            os._exit(1)
        return batch


def read_of_a_slow_end(cache_dir: str) -> Any:
    said = Path(cache_dir).with_name("said")
    with write(cache_dir) as converter:
        transform = ClosesBeforeItEnds(str(said))
        with make(converter, "torch", num_workers=1, batch_size=400, transform=transform) as loader:
            next(iterator := iter(loader))
            wait_until(said.exists)
            return error_of(lambda: list(iterator))


def test_a_worker_whose_sockets_close_before_it_ends_is_told_as_one_that_was_killed(cache_dir: Path) -> None:
    name, text = run_python(read_of_a_slow_end, str(cache_dir))
    assert (name, "exited unexpectedly" in text) == ("RuntimeError", True)


def fork_while_a_thread_imports(url: str) -> list[bool]:
    """Whether NumPy's random numbers were there before, and whether workers that are forked meanwhile read all rows."""
    importing, forked = threading.Event(), threading.Event()
    os.register_at_fork(after_in_parent=forked.set)

    class Slow(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "numpy.random._pickle":
                importing.set()
                forked.wait(5)

    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    # Shuffled rows would need random numbers in this process, too, which would wait for them here.
    with (
        open_converter(url) as converter,
        converter.make_torch_dataloader(batch_size=20, shuffle=False, **options) as loader,
    ):
        was_there = "numpy.random" in sys.modules
        sys.meta_path.insert(0, Slow())
        thread = threading.Thread(target=lambda: importlib.import_module("numpy.random"))
        thread.start()
        importing.wait(60)
        faulthandler.dump_traceback_later(60, exit=True)
        ids = ids_of(loader)
        faulthandler.cancel_dump_traceback_later()
        thread.join()
        return [was_there, sorted(ids) == list(range(len(converter)))]


def test_workers_that_are_forked_while_a_thread_imports_what_they_need_do_not_wait_for_it(cache_dir: Path) -> None:
    with write(cache_dir) as converter:
        assert run_python(fork_while_a_thread_imports, converter.url) == [False, True]


class KillsItsTrainer:
    """A transform that kills the trainer when it is sent to the second worker, while the first one begins."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.num_sent = 0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch

    def __getstate__(self) -> dict[str, Any]:
        if multiprocessing.context.get_spawning_popen() is not None:
            self.num_sent += 1
            if self.num_sent == 2:
                wait_until(lambda: bool(os.listdir(self.folder)))
                os.kill(os.getpid(), signal.SIGKILL)
        return {"folder": self.folder, "trainer": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.folder = state["folder"]
        begin_without_trainer(self.folder, state["trainer"])


def begin_without_trainer(folder: str, trainer: int) -> None:
    """In a worker that begins: it goes on when its trainer is gone."""
    Path(folder, str(os.getpid())).touch()
    wait_until(lambda: not is_running(trainer))


def begin_to_read(cache_dir: str, method: str, folder: str) -> None:
    """Be killed while the workers begin."""
    with write(cache_dir) as converter:
        trainer = os.getpid()
        transform = None
        if method == "fork":
            os.register_at_fork(
                after_in_child=lambda: begin_without_trainer(folder, trainer),
                after_in_parent=lambda: (
                    wait_until(lambda: bool(os.listdir(folder))),
                    os.kill(trainer, signal.SIGKILL),
                ),
            )
        else:
            transform = KillsItsTrainer(folder)
        next(iter(make(converter, "processes", multiprocessing_context=method, transform=transform)))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_worker_processes_end_if_their_trainer_is_killed_while_they_begin(
    cache_dir: Path, tmp_path: Path, method: str
) -> None:
    (folder := tmp_path / "begun").mkdir()
    with start_python(begin_to_read, str(cache_dir), method, str(folder)) as process:
        process.wait(60)
        assert process.returncode == -signal.SIGKILL
        (begun,) = (int(name) for name in os.listdir(folder))
        wait_until(lambda: not is_running(begun), seconds=60)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# Several at once -----------------------------------------------------------------------------


@pytest.mark.parametrize(("outer", "inner"), [*itertools.product(["numpy", "torch", "processes"], repeat=2)])
def test_a_loader_inside_the_loop_of_another(whole: DatasetConverter, outer: str, inner: str) -> None:
    expected = epochs_of(whole, 7)
    with make(whole, outer, batch_size=300) as outside, make(whole, inner, transform=double) as inside:
        rows = []
        for index, batch in enumerate(outside):
            rows += batch["id"].tolist()
            assert ids_of(inside) == expected[index]
        assert rows == expected[0]


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations_with_replacement(KINDS, 2)])
def test_two_loaders_at_once_on_one_converter(whole: DatasetConverter, one: str, other: str) -> None:
    with make(whole, one) as first, make(whole, other, seed=9, columns=["id"]) as second:
        pairs = list(zip(first, second, strict=True))
    with make(whole, "numpy", seed=9) as reader:
        assert ids_of(batch for _, batch in pairs) == ids_of(reader)
    assert ids_of(batch for batch, _ in pairs) == epochs_of(whole, 1)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_two_iterations_of_one_loader_are_right_or_refused(whole: DatasetConverter, kind: str) -> None:
    """Persistent workers serve one iteration at a time."""
    expected = epochs_of(whole, 1)[0]
    one: list[int] = []
    other: list[int] = []
    with make(whole, kind) as loader:
        first, second = iter(loader), iter(loader)
        try:
            for left, right in zip(first, second, strict=True):
                one += left["id"].tolist()
                other += right["id"].tolist()
        except ConverterError:
            assert one == expected[: len(one)]
            assert other == expected[: len(other)]
            return
    assert one == other == expected


@pytest.mark.parametrize("kind", KINDS)
def test_two_threads_iterate_two_loaders(whole: DatasetConverter, kind: str) -> None:
    expected = epochs_of(whole, 1)[0]
    found: dict[int, list[int]] = {}

    def read(number: int) -> None:
        with make(whole, kind) as loader:
            found[number] = ids_of(loader)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert found == {0: expected, 1: expected}


class Hold:
    """A transform that waits until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.begun.set()
        assert self.released.wait(40)
        return batch


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_loader_may_be_closed_by_another_thread_while_a_batch_is_awaited(whole: DatasetConverter, kind: str) -> None:
    """python -m tests.faults.campaign lives --case 1:1 --steps 2"""
    hold, rows = Hold(), list[int]()
    loader = make(whole, kind, transform=hold)
    errors: list[list[str]] = []
    reader = threading.Thread(target=lambda: errors.append(error_of(lambda: collect(loader, rows))))
    closer = threading.Thread(target=lambda: errors.append(error_of(lambda: loader.__exit__(None, None, None))))
    reader.start()
    assert hold.begun.wait(40)
    closer.start()
    wait_until(lambda: loader._epochs._closed)
    hold.released.set()
    for thread in (reader, closer):
        thread.join(40)
    closed = ["ConverterError", "This loader was closed: its `with` block has ended. Make a new one."]
    assert sorted(errors) == [["", ""], closed]
    assert rows == epochs_of(whole, 1)[0][: len(rows)]
    assert len(rows) < NUM_ROWS
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("converter-read")]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_loader_may_be_closed_by_a_signal_handler_while_a_batch_is_awaited(
    whole: DatasetConverter, kind: str
) -> None:
    hold, rows = Hold(), list[int]()
    loader = make(whole, kind, transform=hold)

    def close(*_: object) -> None:
        loader.__exit__(None, None, None)
        hold.released.set()

    def send() -> None:
        assert hold.begun.wait(40)
        signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, close)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(ConverterError, match="This loader was closed"):
            collect(loader, rows)
    finally:
        signal.signal(signal.SIGUSR2, before)
        sender.join()
    assert rows == epochs_of(whole, 1)[0][: len(rows)]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("converter-read")]


# Persistent workers --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_persistent_workers_do_whatever_threads_do(whole: DatasetConverter, seed: int) -> None:
    """Epochs, breaks, epochs that are set and states that are loaded, in any order."""
    chosen = random.Random(seed)
    before = set(child_processes())
    options: dict[str, Any] = {"num_epochs": 1 + seed % 2, "drop_last": seed == 3, "batch_size": 70}
    trace = []
    with make(whole, "persistent", **options) as loader, make(whole, "torch", **options) as model:
        states = [model.state_dict()]
        for _ in range(14):
            act = chosen.choice(["run", "run", "break", "set", "load"])
            amount = chosen.randrange(5)
            trace.append((act, amount))
            if act == "set":
                for one in (loader, model):
                    one.set_epoch(amount)
            elif act == "load":
                state = chosen.choice(states)
                for one in (loader, model):
                    one.load_state_dict(state)
            elif act == "break":
                found, expected = ([*itertools.islice(one, amount * 4)] for one in (loader, model))
                assert ids_of(found) == ids_of(expected), trace
            else:
                assert ids_of(loader) == ids_of(model), trace
            assert loader.state_dict() == model.state_dict(), trace
            states.append(loader.state_dict())
        assert len({*child_processes()} - before) <= 2
    assert set(child_processes()) <= before


def test_persistent_workers_live_on_from_epoch_to_epoch(whole: DatasetConverter) -> None:
    expected = epochs_of(whole, 4)
    before = set(child_processes())
    with make(whole, "persistent") as loader:
        workers: set[str] = set()
        for epoch in (0, 1):
            assert ids_of(loader) == expected[epoch]
            workers |= set(child_processes())
        end_by_break(loader)
        loader.set_epoch(3)
        assert ids_of(loader) == expected[3]
        workers |= set(child_processes())
        assert len(workers - before) == 2


# Files that change under a reader ------------------------------------------------------------


def data_files(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.rglob("*.parquet"))


def delete(path: Path) -> None:
    path.unlink()


def replace_by_noise(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))
    other.replace(path)


def replace_by_zeros(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


def overwrite_pages(path: Path) -> None:
    """In place, and the footer stays."""
    data = path.read_bytes()
    footer = int.from_bytes(data[-8:-4], "little") + 8
    with path.open("r+b") as file:
        file.seek(4)
        file.write(bytes(byte ^ 0xA5 for byte in data[4:-footer]))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_a_shorter_one(path: Path) -> None:
    other = path.with_suffix(".new")
    shutil.copy(data_files(path.parent)[0], other)
    os.truncate(other, other.stat().st_size - 1)
    other.replace(path)


HARMS = [delete, replace_by_noise, replace_by_zeros, overwrite_pages, truncate, replace_by_a_shorter_one]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("kind", ["numpy", "torch", "processes"])
def test_a_file_that_is_harmed_under_a_reader_is_named(
    converter: DatasetConverter, cache_dir: Path, kind: str, harm: Callable[[Path], None]
) -> None:
    path = data_files(cache_dir)[-1]
    options = {"num_workers": 1} if kind == "processes" else {}
    rows: list[int] = []
    # Without a shuffle the last file is read last, and nobody reads it yet when it is harmed.
    with make(converter, kind, shuffle=False, workers_count=1, prefetch_batches=1, **options) as loader:
        iterator = iter(loader)
        rows += next(iterator)["id"].tolist()
        harm(path)
        with pytest.raises((SourceChangedError, ReadError)) as raised:
            collect(iterator, rows)
    error = raised.value
    assert path.name in str(error)
    assert 800 - BATCH_SIZE <= len(rows) <= 800
    if kind == "processes":
        # A worker's error is rebuilt from its text, and runs of batches are handed over as a whole.
        assert rows == list(range(len(rows)))
    else:
        assert rows == list(range(800))
        assert error.path == f"file://{path}"
        if isinstance(error, ReadError):
            assert error.row_group is not None
    del iterator, raised, error
    assert left_of(cache_dir) == []


def test_another_file_of_the_same_size_is_not_taken_for_the_one_that_was_written(cache_dir: Path) -> None:
    """Whole, of the same schema and size, and with other rows: as another run of the same job would leave."""
    columns, others = (ID, VECTOR), cache_dir.parent / "other"
    with (
        write_converter(cache_dir, columns, PARTITIONS, row_group_bytes=1500) as converter,
        write_converter(others, columns, [[range(5000, 5400)]], row_group_bytes=1500),
    ):
        path, other = data_files(cache_dir)[-1], data_files(others)[0]
        assert path.stat().st_size == other.stat().st_size
        with make(converter, "numpy", shuffle=False, workers_count=1, prefetch_batches=1) as reader:
            iterator = iter(reader)
            rows = next(iterator)["id"].tolist()
            shutil.copy(other, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
            with pytest.raises((SourceChangedError, ReadError), match=path.name):
                collect(iterator, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_converter_that_is_deleted_under_its_loader_is_named(cache_dir: Path, temporary: Path, kind: str) -> None:
    converter = write(cache_dir)
    options = {"num_workers": 1} if "num_workers" in (KINDS[kind] or {}) else {}
    rows: list[int] = []
    with make(converter, kind, shuffle=False, workers_count=1, prefetch_batches=1, **options) as loader:
        iterator = iter(loader)
        rows += next(iterator)["id"].tolist()
        converter.delete()
        with pytest.raises(ConverterError, match="Was the converter deleted"):
            collect(iterator, rows)
        assert rows == list(range(len(rows)))
        assert len(rows) < NUM_ROWS
        del iterator
    assert left_of(cache_dir) == []
    assert_only_the_marker_is_left(cache_dir)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_loader_that_outlives_its_converters_block_says_so(cache_dir: Path, kind: str) -> None:
    with write(cache_dir) as converter:
        loader = make(converter, kind)
        begun = iter(loader)
    for iterator in (begun, iter(loader)):
        with pytest.raises(ConverterError, match="Was the converter deleted"):
            list(iterator)
    assert left_of(cache_dir) == []
    assert_only_the_marker_is_left(cache_dir)


# Flipped bits --------------------------------------------------------------------------------

FLIPPED = (
    ID,
    Column(name="a_bool", dtype="bool"),
    Column(name="a_int8", dtype="int8"),
    Column(name="a_float64", dtype="float64"),
    Column(name="day", dtype="datetime64[D]"),
    TEXT,
    VECTOR,
    Column(name="words", dtype="int32", shape=None),
    Column(name="x", dtype="int32", nullable=True),
)
NUM_FLIPPED_ROWS = 300
FLIPS_OF_A_COLUMN = 60


def read_flipped(url: str, path: str, verify_checksums: bool) -> dict[str, Any]:
    """What reading gives, for each of many bits of the columns' pages that alone is another one than was written."""
    converter = open_converter(url)
    whole = Path(path).read_bytes()
    metadata = pq.ParquetFile(path).metadata
    physical = set()
    options: dict[str, Any] = {"batch_size": NUM_FLIPPED_ROWS, "nulls": "mask", "ragged": "pad", "workers_count": 1}

    def read() -> bytes:
        (batch,) = converter.make_batch_reader(verify_checksums=verify_checksums, **options)
        return b"".join(
            repr(column.tolist()).encode() if column.dtype == object else column.tobytes() for column in batch.values()
        )

    expected = read()
    found: dict[str, Any] = {"read": 0, "changed": [], "refused": 0, "other": []}
    chosen = random.Random(5)
    for index in range(metadata.num_columns):
        column = metadata.row_group(0).column(index)
        assert column.compression == "UNCOMPRESSED"
        physical.add(column.physical_type)
        start = column.data_page_offset
        if column.dictionary_page_offset:
            start = min(start, column.dictionary_page_offset)
        stop = start + column.total_compressed_size
        # Where a page begins stands its header; the rest is spread evenly, with some at random.
        step = max(1, (stop - start) // FLIPS_OF_A_COLUMN)
        for place in [*range(start, min(start + 20, stop)), *range(start + chosen.randrange(step), stop, step)]:
            bit = chosen.randrange(8)
            with open(path, "r+b") as file:
                file.seek(place)
                file.write(bytes([whole[place] ^ 1 << bit]))
            where = f"{column.path_in_schema}, byte {place - start} of {stop - start}, bit {bit}"
            print(where, file=sys.stderr, flush=True)
            try:
                found["read"] += 1
                if read() != expected:
                    found["changed"].append(where)
            except ReadError as error:
                found["refused"] += 1
                if error.row_group != 0 or error.path != f"file://{path}":
                    found["other"].append(f"{where}: {error.path} {error.row_group}")
            except Exception as error:  # noqa: BLE001 (told to the test)
                found["other"].append(f"{where}: {error!r}")
            with open(path, "r+b") as file:
                file.seek(place)
                file.write(whole[place : place + 1])
    assert read() == expected
    return {**found, "physical": sorted(physical)}


def run_flipped(cache_dir: Path, *, verify_checksums: bool) -> dict[str, Any]:
    """In a process of its own: what is damaged may take the interpreter with it."""
    with write_converter(cache_dir, FLIPPED, [[range(NUM_FLIPPED_ROWS)]]) as converter:
        (path,) = data_files(cache_dir)
        with start_python(read_flipped, converter.url, str(path), verify_checksums) as process:
            output, said = process.communicate(timeout=90)
    assert process.returncode == 0, f"status {process.returncode} after {said[-1500:]}"
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert {"BOOLEAN", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY", "INT64"} <= set(found["physical"])
    assert found["read"] > 400
    return found


def test_checksums_find_every_flipped_bit(cache_dir: Path) -> None:
    found = run_flipped(cache_dir, verify_checksums=True)
    assert found["other"] == []
    assert found["changed"] == []
    assert found["refused"] > found["read"] * 0.9


def test_without_checksums_a_flipped_bit_crashes_nothing(cache_dir: Path) -> None:
    found = run_flipped(cache_dir, verify_checksums=False)
    # Or the checksums would have nothing to find.
    assert found["changed"]


def test_checksums_change_neither_rows_nor_order(whole: DatasetConverter) -> None:
    for kind in KINDS:
        with make(whole, kind, verify_checksums=True) as loader:
            assert ids_of(loader) == epochs_of(whole, 1)[0], kind


# Devices -------------------------------------------------------------------------------------


def tensors_of(batches: Any) -> list[torch.Tensor]:
    return [column for batch in batches for column in batch.values() if isinstance(column, torch.Tensor)]


@pytest.mark.parametrize("transform", [None, double], ids=["plain", "transformed"])
@pytest.mark.parametrize("columns", [["id", "vector"], ["id", "text", "vector"]], ids=str)
@pytest.mark.parametrize("kind", ["torch", "processes"])
@pytest.mark.parametrize("device", ["cpu", torch.device("meta")], ids=str)
def test_every_tensor_arrives_on_its_device(
    whole: DatasetConverter, device: Any, kind: str, columns: list[str], transform: Any
) -> None:
    options: dict[str, Any] = {"columns": columns, "transform": transform}
    with make(whole, kind, device=device, **options) as loader, make(whole, "torch", **options) as plain:
        for _ in range(2):
            batches, expected = list(loader), list(plain)
            assert [list(batch) for batch in batches] == [list(batch) for batch in expected]
            assert {str(tensor.device) for tensor in tensors_of(batches)} == {str(device)}
            for found, known in zip(tensors_of(batches), tensors_of(expected), strict=True):
                assert (found.shape, found.dtype) == (known.shape, known.dtype)
            assert [batch.get("text") for batch in batches] == [batch.get("text") for batch in expected]
            if str(device) == "cpu":
                for found, known in zip(tensors_of(batches), tensors_of(expected), strict=True):
                    assert torch.equal(found, known)


@pytest.mark.parametrize("kind", ["torch", "processes", "persistent"])
@pytest.mark.parametrize("placement", [{"device": "cpu"}, {"device": "meta"}, {"pin_memory": True}], ids=str)
def test_a_state_does_not_depend_on_the_device(whole: DatasetConverter, kind: str, placement: dict[str, Any]) -> None:
    expected = epochs_of(whole, 1)[0]
    for steps in (0, 1, 7, 59, 60) if kind == "torch" else (7, 60):
        with make(whole, kind, **placement) as loader, make(whole, "numpy") as plain, make(whole, "numpy") as rest:
            loaded = list(itertools.islice(loader, steps))
            known = list(itertools.islice(plain, steps))
            assert len(loaded) == len(known) == steps
            assert loader.state_dict() == plain.state_dict()
            rest.load_state_dict(loader.state_dict())
            assert ids_of(rest) == (expected[steps * BATCH_SIZE :])


@pytest.mark.parametrize(
    ("kind", "end"),
    [*(("torch", end) for end in ENDINGS), ("processes", end_by_break), ("processes", end_by_closing_the_iterator)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_nothing_is_left_of_an_iteration_on_a_device(
    converter: DatasetConverter, cache_dir: Path, kind: str, end: Callable[[Any], None]
) -> None:
    with make(converter, kind, device="meta", columns=["id", "vector"]) as loader:
        end(loader)
        assert running_of(cache_dir) == []
        assert sum(len(batch["id"]) for batch in loader) == NUM_ROWS
    assert left_of(cache_dir) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("kind", ["torch", "processes", "persistent"])
@pytest.mark.parametrize("transform", [None, double], ids=["plain", "transformed"])
def test_pinning_without_a_gpu_does_no_harm(whole: DatasetConverter, kind: str, transform: Any) -> None:
    with make(whole, kind, pin_memory=True, device="cpu", transform=transform) as loader:
        assert loader.pin_memory is False
        assert [ids_of(loader) for _ in range(2)] == epochs_of(whole, 2)


@pytest.mark.parametrize(
    "device", ["nonsense", "", "cuda:x", 1.5, object(), ["cpu"]], ids=lambda value: repr(value)[:20]
)
def test_what_is_no_device_is_refused_by_name(whole: DatasetConverter, device: Any) -> None:
    with pytest.raises(ValueError, match=r"device must be a torch device, e\.g\. 'cuda' or 'cpu', got"):
        make(whole, "torch", device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 1)], ids=repr)
def test_a_gpu_that_is_not_there_is_refused_by_name(whole: DatasetConverter, device: Any) -> None:
    with pytest.raises(ValueError, match="this machine has no CUDA device that torch can use"):
        make(whole, "torch", device=device)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"pin_memory": "yes"}, TypeError, "pin_memory must be True or False, got 'yes'"),
        ({"persistent_workers": True}, ValueError, "persistent_workers=True needs num_workers above 0"),
        ({"persistent_workers": 1, "num_workers": 1}, TypeError, "persistent_workers must be True or False, got 1"),
        ({"multiprocessing_context": "thread", "num_workers": 1}, ValueError, "multiprocessing_context"),
        ({"multiprocessing_context": 7, "num_workers": 1}, TypeError, "multiprocessing_context"),
        ({"multiprocessing_context": "spawn"}, ValueError, "num_workers"),
    ],
    ids=str,
)
def test_a_bad_argument_names_itself(
    whole: DatasetConverter, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        make(whole, "torch", **options)
