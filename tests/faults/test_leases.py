"""Signs of life: who renews them, who is dead, and what a fork, a pickle, a kill or the interpreter's end does."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from converter import holding, open_converter, sweep
from converter.cache import entries, leases, removal, roots, sweeps
from converter.dataset import DatasetConverter
from converter.errors import CacheError
from converter.make import hold_entry
from converter.portable.deadlines import REQUEST_THREAD
from converter.sources.spark import write
from converter.storage.opening import open_storage
from tests.faults.small_entries import (
    KEY,
    NUM_ROWS,
    OTHER_KEY,
    ids_of,
    leave_entry,
    make_converter,
    make_old,
    manifest_of,
    plan_write,
    tree,
    write_data,
    write_task,
)
from tests.processes import run_python, start_python
from tests.waiting import wait_until

ROOT = roots.DIRECTORY
HEX = "0123456789abcdef0123456789abcdef"
MISSED = 3 * leases.RENEW_SECONDS


def _beating() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "converter-heartbeat"]


def _signs(cache_dir: Path, key: str = KEY) -> list[Path]:
    entry = cache_dir / ROOT / key
    return sorted([*entry.glob("lease-*.json"), *entry.glob("*.intent")])


def _is_empty(cache_dir: Path) -> bool:
    return set(tree(cache_dir)) <= {ROOT, f"{ROOT}/.owner"}


def _rewrite(path: Path, **changes: Any) -> None:
    """Say something else in a sign of life, as if another process had written it, at the same time."""
    status = path.stat()
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


# The heartbeat -------------------------------------------------------------------------


def test_one_thread_renews_all_leases_of_a_process_and_ends_with_the_last(cache_dir: Path) -> None:
    assert not _beating()
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(make_converter(str(cache_dir)))
        for _ in range(5):
            stack.enter_context(open_converter(owner.url))
        other = make_converter(str(cache_dir), key=OTHER_KEY)
        assert len(_beating()) == 1
        other.delete()
        assert len(_beating()) == 1
    assert not _beating()


def test_a_thread_that_cannot_be_started_leaves_no_lease(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = leave_entry(cache_dir)

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "converter-heartbeat":
            raise RuntimeError("can't start new thread")
        start(thread)

    start = threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            open_converter(url)
    assert not _signs(cache_dir)
    with open_converter(url) as converter:
        assert len(_beating()) == 1
        assert ids_of(converter) == list(range(NUM_ROWS))
    assert not _beating()


def test_the_thread_comes_again_after_it_ended(cache_dir: Path) -> None:
    for _ in range(3):
        with make_converter(str(cache_dir)):
            assert len(_beating()) == 1
        assert not _beating()


def test_many_threads_may_come_and_go(cache_dir: Path) -> None:
    url = leave_entry(cache_dir)
    errors: list[BaseException] = []

    def use() -> None:
        try:
            for _ in range(10):
                with open_converter(url):
                    pass
        except BaseException as error:  # noqa: BLE001 (shown below)
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert not _beating()
    assert not _signs(cache_dir)
    with open_converter(url) as converter:
        assert ids_of(converter) == list(range(NUM_ROWS))


def test_a_renewal_changes_the_time_and_not_the_content(cache_dir: Path) -> None:
    root = roots.open_root(str(cache_dir))
    attempt = entries.begin(root, OTHER_KEY, application_id="app-1")
    with make_converter(str(cache_dir)):
        paths = [*_signs(cache_dir), *_signs(cache_dir, OTHER_KEY)]
        assert len(paths) == 2
        before = {path: path.read_bytes() for path in paths}
        for path in paths:
            make_old(path, 1000)
        times = {path: path.stat().st_mtime for path in paths}
        leases.heartbeat.renew()
        for path in paths:
            assert path.stat().st_mtime > times[path] + 900
            assert path.read_bytes() == before[path]
    entries.abandon(root, attempt)


class BrokenStorage:
    """A store that is out of reach for a while."""

    url = "file:///out-of-reach"

    def __getattr__(self, name: str) -> Any:
        def fail(*arguments: Any) -> None:
            raise OSError(5, "Input/output error")

        return fail


def test_a_renewal_without_an_answer_is_tried_again_before_the_lease_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(leases, "_RENEWAL_SECONDS", 0.3)
    monkeypatch.setattr(leases, "HURRY_SECONDS", 0.05)
    root = open_storage(f"memory://{uuid.uuid4().hex}/cache/{ROOT}")
    root.make_directory()
    attempt = entries.begin(root, OTHER_KEY, application_id="app-1")
    over, renewed = threading.Event(), 0
    write = MemoryFileSystem.pipe_file

    def write_later(self: Any, path: str, *arguments: Any, **options: Any) -> None:
        nonlocal renewed
        if path.endswith(".intent"):
            renewed += 1
            if renewed == 1:
                over.wait(60)
        write(self, path, *arguments, **options)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(MemoryFileSystem, "pipe_file", write_later)
            # The store waits 120 s for the first answer.
            wait_until(lambda: renewed >= 3, seconds=20)
    finally:
        over.set()
    entries.abandon(root, attempt)


def test_whatever_a_renewal_raises_the_other_leases_are_renewed(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As of a client that is written in Rust."""

    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(leases, "HURRY_SECONDS", 0.05)
    root = roots.open_root(str(cache_dir))
    attempts = [entries.begin(root, key, application_id="app-1") for key in (KEY, OTHER_KEY)]
    for broken, other in (attempts, reversed(attempts)):
        with monkeypatch.context() as patched:
            entry = MagicMock(wraps=broken.intent.entry)
            entry.touch.side_effect = Panic
            patched.setattr(broken.intent, "entry", entry)
            path = Path(other.intent.entry.path(other.intent.name))
            make_old(path, 1000)
            old = path.stat().st_mtime

            def is_renewed(path: Path = path, old: float = old, entry: Any = entry) -> bool:
                return path.stat().st_mtime > old + 900 and entry.touch.call_count > 2

            wait_until(is_renewed, seconds=20)
    for attempt in attempts:
        entries.abandon(root, attempt)


def test_a_renewal_that_fails_is_tried_again(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_converter(str(cache_dir)) as converter:
        lease = converter._holding.entry.lease
        assert lease is not None
        entry = lease.entry
        lease.entry = BrokenStorage()  # type: ignore[assignment]
        with caplog.at_level(logging.WARNING):
            leases.heartbeat.renew()
        assert "Could not renew" in caplog.text
        lease.entry = entry
        make_old(_signs(cache_dir)[0], 1000)
        before = _signs(cache_dir)[0].stat().st_mtime
        leases.heartbeat.renew()
        assert _signs(cache_dir)[0].stat().st_mtime > before
        assert not lease.lost


def test_a_lease_that_was_given_back_is_not_written_again(cache_dir: Path) -> None:
    url = leave_entry(cache_dir)
    for _ in range(3):
        stop = threading.Event()

        def renew(stop: threading.Event = stop) -> None:
            while not stop.is_set():
                leases.heartbeat.renew()

        thread = threading.Thread(target=renew)
        thread.start()
        for _ in range(10):
            with open_converter(url):
                pass
        stop.set()
        thread.join()
        assert not _signs(cache_dir)


def test_a_writer_that_was_swept_before_its_tasks_ended_says_so(cache_dir: Path) -> None:
    root = roots.open_root(str(cache_dir))
    attempt = entries.begin(root, KEY, application_id="app-1")
    columns, spec = plan_write(root, attempt)
    _signs(cache_dir)[0].unlink()
    # The task removes its file, but is not the one to say why.
    reports = write_task(spec, np.arange(9), partition=0, task_attempt=0)
    manifest = manifest_of(reports, columns, attempt, is_kept=False)
    with pytest.raises(CacheError, match=r"stopped renewing its lease in .*was removed\. Convert again"):
        entries.commit(root, attempt, manifest)
    entries.abandon(root, attempt)
    assert _is_empty(cache_dir)


def test_a_swept_owner_says_so_by_name(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    converter = make_converter(str(cache_dir))
    _signs(cache_dir)[0].unlink()
    sweep(cache_dir)
    assert _is_empty(cache_dir)
    with caplog.at_level(logging.WARNING):
        leases.heartbeat.renew()
        leases.heartbeat.renew()
    assert caplog.text.count("was taken for dead and swept") == 1
    with pytest.raises(CacheError, match=r"did not renew its lease .* for 180 seconds or longer.*was swept"):
        converter.make_batch_reader()
    assert _is_empty(cache_dir)
    converter.delete()
    assert not _beating()


def test_a_process_that_was_stopped_and_swept_says_so_when_it_goes_on(tmp_path: Path, cache_dir: Path) -> None:
    pipe = tmp_path / "pipe"
    with _told_by(pipe) as tell, start_python(hold_until_told, str(cache_dir), str(pipe)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        sweep(cache_dir)
        assert not _is_empty(cache_dir), "a stopped process is alive until it has missed its renewals"
        for path in _signs(cache_dir):
            make_old(path, MISSED + 10)
        assert sweep(cache_dir).num_entries == 1
        assert _is_empty(cache_dir)
        os.kill(process.pid, signal.SIGCONT)
        tell()
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert "so the entry was swept" in json.loads(output.splitlines()[-1])


@contextlib.contextmanager
def _told_by(pipe: Path) -> Iterator[Callable[[], object]]:
    """What ends the waiting of `_wait_to_be_told`; does not block if nobody waits."""
    os.mkfifo(pipe)
    writing = os.open(pipe, os.O_RDWR)
    try:
        yield lambda: os.write(writing, b"go\n")
    finally:
        os.close(writing)


def _wait_to_be_told(pipe: str) -> None:
    print("ready", flush=True)
    with open(pipe) as reading:
        reading.readline()


def hold_until_told(cache_dir: str, pipe: str) -> str:
    """Own an entry until the pipe says so; what a reader of it then says."""
    converter = make_converter(cache_dir)
    _wait_to_be_told(pipe)
    leases.heartbeat.renew()
    try:
        return f"{len(ids_of(converter))} rows"
    except CacheError as error:
        return str(error)


def hold_an_attempt_until_told(cache_dir: str, pipe: str) -> None:
    """Write without committing, until the pipe says so."""
    root = roots.open_root(cache_dir)
    write_data(root, entries.begin(root, KEY, application_id="app-1"))
    _wait_to_be_told(pipe)


# A store that hangs ---------------------------------------------------------------------


class Gated(MemoryFileSystem):  # type: ignore[misc]
    """A store that hangs where a file is written over, as renewing does there, until its gate is opened."""

    protocol = "gated"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    gate: ClassVar[threading.Event]
    has_arrived: ClassVar[threading.Event]

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        Gated.has_arrived.set()
        Gated.gate.wait()
        super().pipe_file(path, value, **options)


@pytest.fixture
def gated() -> Iterator[str]:
    """The URL of a cache directory on a store whose gate is closed."""
    fsspec.register_implementation("gated", Gated, clobber=True)
    Gated.store.clear()
    Gated.gate, Gated.has_arrived = threading.Event(), threading.Event()
    yield "gated://store/cache"
    Gated.gate.set()


def _in_a_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def _signs_at(url: str) -> list[str]:
    return [info.name for info in open_storage(f"{url}/{ROOT}/{KEY}").list() if info.name.startswith("lease-")]


def test_a_store_that_hangs_keeps_nobody_from_opening_and_closing_at_another(gated: str, cache_dir: Path) -> None:
    hanging, healthy = make_converter(gated), make_converter(str(cache_dir))
    renewing = _in_a_thread(leases.heartbeat.renew)
    assert Gated.has_arrived.wait(60)

    def open_and_delete() -> None:
        open_converter(healthy.url).delete()
        healthy.delete()

    deleting = _in_a_thread(open_and_delete)
    deleting.join(60)
    assert not deleting.is_alive()
    assert _is_empty(cache_dir)
    assert renewing.is_alive()
    Gated.gate.set()
    renewing.join()
    hanging.delete()
    assert not _beating()


def test_a_store_that_hangs_keeps_no_lease_at_another_from_being_renewed(
    gated: str, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(sweeps, "RENEW_SECONDS", 0.01)
    with make_converter(gated), make_converter(str(cache_dir)):
        assert Gated.has_arrived.wait(60)
        [sign] = _signs(cache_dir)
        for _ in range(3):
            make_old(sign, 1000)
            silent = sign.stat().st_mtime
            wait_until(lambda silent=silent: sign.stat().st_mtime > silent + 500, seconds=60)
        Gated.gate.set()
    assert not _beating()


def test_a_renewal_under_way_ends_before_its_lease_is_deleted(gated: str) -> None:
    converter = make_converter(gated)
    renewing = _in_a_thread(leases.heartbeat.renew)
    assert Gated.has_arrived.wait(60)
    deleting = _in_a_thread(converter.delete)
    wait_until(lambda: not leases.heartbeat._leases)
    Gated.gate.set()
    for thread in (renewing, deleting):
        thread.join(60)
        assert not thread.is_alive()
    assert not _signs_at(gated)


def test_a_renewal_that_hangs_until_its_lease_is_deleted_does_not_bring_it_back(
    gated: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "_LAST_RENEWAL_SECONDS", 0.01)
    converter, before = make_converter(gated), set(threading.enumerate())
    renewing = _in_a_thread(leases.heartbeat.renew)
    assert Gated.has_arrived.wait(60)
    with caplog.at_level(logging.WARNING):
        converter.delete()
        renewing.join(60)
    assert not renewing.is_alive()
    assert not _signs_at(gated)
    Gated.gate.set()
    wait_until(lambda: all(thread.name != REQUEST_THREAD for thread in set(threading.enumerate()) - before))
    assert not _signs_at(gated)
    assert not caplog.text, "nobody wants to hear of a lease that was given back"


# Who is dead ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_reaped", [False, True], ids=["zombie", "gone"])
@pytest.mark.parametrize("is_committed", [False, True], ids=["attempt", "entry"])
def test_what_a_killed_process_of_this_host_left_is_removed_at_once(
    is_reaped: bool, is_committed: bool, tmp_path: Path, cache_dir: Path
) -> None:
    hold, pipe = hold_until_told if is_committed else hold_an_attempt_until_told, tmp_path / "pipe"
    with _told_by(pipe), start_python(hold, str(cache_dir), str(pipe)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert sweep(cache_dir) == removal.SweepReport()
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if is_reaped else os.WNOWAIT))
        if is_reaped:
            process.returncode = -signal.SIGKILL
        report = sweep(cache_dir)
        assert (report.num_entries, report.num_attempts, report.num_files) == (is_committed, not is_committed, 2)
        assert _is_empty(cache_dir)


def test_a_number_that_another_process_has_now_is_no_sign_of_life(cache_dir: Path) -> None:
    url = leave_entry(cache_dir)
    with open_converter(url):
        _rewrite(_signs(cache_dir)[0], process_start="1")
        assert sweep(cache_dir).num_entries == 1


@pytest.mark.short
@pytest.mark.parametrize("silent", [0, 0.9 * MISSED, 1.1 * MISSED])
@pytest.mark.parametrize("is_committed", [False, True], ids=["attempt", "entry"])
def test_a_process_of_another_host_is_dead_after_three_missed_renewals(
    is_committed: bool, silent: float, cache_dir: Path
) -> None:
    root = roots.open_root(str(cache_dir))
    attempt = entries.begin(root, KEY, application_id="app-1")
    manifest = write_data(root, attempt)
    lease = entries.commit(root, attempt, manifest).lease if is_committed else attempt.intent
    leases.heartbeat.remove(lease)
    [sign] = _signs(cache_dir)
    # Its number may well be that of a process here.
    _rewrite(sign, host="another/host", pid=os.getpid())
    make_old(sign, silent)
    report = sweep(cache_dir)
    assert (report.num_entries + report.num_attempts == 1) == (silent > MISSED)
    assert _is_empty(cache_dir) == (silent > MISSED)


def test_the_same_host_name_in_another_container_is_another_host(cache_dir: Path) -> None:
    with make_converter(str(cache_dir)) as converter:
        [sign] = _signs(cache_dir)
        host = json.loads(sign.read_bytes())["host"]
        _rewrite(sign, host=host.rpartition("/")[0] + "/pid:[1]", pid=2**22 + 1)
        assert sweep(cache_dir) == removal.SweepReport()
        assert ids_of(converter) == list(range(NUM_ROWS))


def test_a_live_lease_is_never_too_old(cache_dir: Path) -> None:
    with make_converter(str(cache_dir)) as converter:
        for path in (cache_dir / ROOT / KEY).rglob("*"):
            if path.is_file() and path not in _signs(cache_dir):
                make_old(path, 10**8)
        assert sweep(cache_dir, older_than=0) == removal.SweepReport()
        assert ids_of(converter) == list(range(NUM_ROWS))


# Fork, pickle, exit ----------------------------------------------------------------------


def _in_a_fork(act: Callable[[], Any]) -> str:
    """What `act` returns in a forked child that leaves by `os._exit`, as JSON; the child's error as its text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(act())
        except BaseException as error:  # noqa: BLE001 (told to the parent)
            answer = repr(error)
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return answer


def fork_a_child(cache_dir: str) -> dict[str, Any]:
    """What a forked child's copy of a converter does, and what is left then; alone in its process, without threads."""
    converter = make_converter(cache_dir)
    [sign] = _signs(Path(cache_dir))

    def act() -> dict[str, Any]:
        make_old(sign, 1000)
        before = sign.stat().st_mtime
        leases.heartbeat.renew()
        found = {"renewed": sign.stat().st_mtime != before, "threads": len(_beating()), "rows": len(ids_of(converter))}
        holding._close_all()
        converter.delete()
        converter.__exit__(None, None, None)
        with open_converter(f"{cache_dir}/{ROOT}/{KEY}") as own:
            found["own threads"] = len(_beating())
            found["own rows"] = len(ids_of(own))
        found["left"] = len(list(Path(cache_dir).rglob("*.parquet")))
        return found

    found = json.loads(_in_a_fork(act))
    found["rows after"] = len(ids_of(converter))
    found["leases after"] = len(_signs(Path(cache_dir)))
    before = sign.stat().st_mtime
    leases.heartbeat.renew()
    found["renewed after"] = sign.stat().st_mtime != before
    converter.delete()
    found["empty"] = _is_empty(Path(cache_dir))
    return found


def test_a_forked_copy_neither_renews_nor_deletes_and_may_open_on_its_own(cache_dir: Path) -> None:
    assert run_python(fork_a_child, str(cache_dir)) == {
        "renewed": False,
        "threads": 0,
        "rows": NUM_ROWS,
        "own threads": 1,
        "own rows": NUM_ROWS,
        "left": 2,
        "rows after": NUM_ROWS,
        "leases after": 1,
        "renewed after": True,
        "empty": True,
    }


def fork_while_the_lock_is_held(cache_dir: str) -> str:
    """A fork in the midst of a renewal: the child must not wait for a thread that it does not have."""
    with make_converter(cache_dir) as converter, leases.heartbeat._condition:
        url = converter.url

        def act() -> int:
            with open_converter(url) as own:
                return len(ids_of(own))

        return _in_a_fork(act)


def test_a_fork_in_the_midst_of_a_renewal_does_not_hang(cache_dir: Path) -> None:
    assert run_python(fork_while_the_lock_is_held, str(cache_dir)) == str(NUM_ROWS)


def use_a_pickled_converter(text: str) -> int:
    """Read through a copy, and do to it whatever deletes elsewhere; the interpreter's end comes on top."""
    copy: DatasetConverter = pickle.loads(bytes.fromhex(text))
    num_rows = len(ids_of(copy))
    with copy:
        pass
    copy.delete()
    another: DatasetConverter = pickle.loads(bytes.fromhex(text))
    another.delete()
    return num_rows


def test_a_converter_that_was_pickled_to_another_process_never_deletes(cache_dir: Path) -> None:
    with make_converter(str(cache_dir)) as converter:
        before = tree(cache_dir)
        assert run_python(use_a_pickled_converter, pickle.dumps(converter).hex()) == NUM_ROWS
        assert tree(cache_dir) == before
        copy = pickle.loads(pickle.dumps(converter))
        copy.delete()
        assert ids_of(converter) == list(range(NUM_ROWS))
    assert _is_empty(cache_dir)


def own_and_end(cache_dir: str, delete_on_exit: bool, is_dropped: bool) -> int:
    """Own an entry and end without a word; the converter held to the end, or dropped while a reader is kept."""
    converter = make_converter(cache_dir, delete_on_exit=delete_on_exit)
    num_rows = len(ids_of(converter))
    if not is_dropped:
        globals()["held"] = converter
    return num_rows


@pytest.mark.parametrize("is_dropped", [False, True], ids=["held", "dropped"])
@pytest.mark.parametrize("delete_on_exit", [True, False])
def test_the_interpreters_end_deletes_or_keeps_as_was_said(
    delete_on_exit: bool, is_dropped: bool, cache_dir: Path
) -> None:
    assert run_python(own_and_end, str(cache_dir), delete_on_exit, is_dropped) == NUM_ROWS
    assert not _signs(cache_dir)
    if delete_on_exit:
        assert _is_empty(cache_dir)
    else:
        with open_converter(str(cache_dir / ROOT / KEY)) as converter:
            assert ids_of(converter) == list(range(NUM_ROWS))


def open_and_end(url: str) -> int:
    """Open an entry and end without a word."""
    globals()["held"] = open_converter(url)
    return len(globals()["held"])


def test_the_interpreters_end_keeps_what_was_only_opened(cache_dir: Path) -> None:
    url = leave_entry(cache_dir)
    before = tree(cache_dir)
    assert run_python(open_and_end, url) == NUM_ROWS
    assert tree(cache_dir) == before


def end_as_a_child(method: str, cache_dir: str) -> int | None:
    """Own an entry in a process that multiprocessing starts, and that ends without a word."""
    child = multiprocessing.get_context(method).Process(target=own_and_end, args=(cache_dir, True, False))
    child.start()
    child.join()
    return child.exitcode


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_the_end_of_a_process_of_multiprocessing_deletes_what_it_owned(method: str, cache_dir: Path) -> None:
    """Those that were forked end without `atexit` hooks."""
    assert run_python(end_as_a_child, method, str(cache_dir)) == 0
    assert _is_empty(cache_dir)


def raise_within(cache_dir: str) -> None:
    """A program that fails while it owns an entry."""
    globals()["held"] = make_converter(cache_dir)
    raise SystemExit(3)


def test_a_program_that_fails_deletes_what_it_owned(cache_dir: Path) -> None:
    with start_python(raise_within, str(cache_dir)) as process:
        process.communicate(timeout=60)
        assert process.returncode == 3
    assert _is_empty(cache_dir)


def test_who_lets_go_last_of_what_another_deleted_removes_it(tmp_path: Path, cache_dir: Path) -> None:
    owner = make_converter(str(cache_dir))
    pipe = tmp_path / "pipe"
    with _told_by(pipe) as tell, start_python(hold_until_told, str(cache_dir), str(pipe)) as process:
        # It finds the same key committed, and adopts the entry.
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert len(_signs(cache_dir)) == 2
        owner.delete()
        assert not (cache_dir / ROOT / KEY / "manifest.json").exists()
        tell()
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert json.loads(output.splitlines()[-1]) == f"{NUM_ROWS} rows"
    assert _is_empty(cache_dir)


# Sweeping ----------------------------------------------------------------------------------


def _leave_many(cache_dir: Path) -> None:
    """A kept entry, an entry whose owner is dead, one that lives, an attempt of a dead one, an attempt that lives."""
    leave_entry(cache_dir, KEY, is_kept=True)
    leave_entry(cache_dir, OTHER_KEY, is_kept=False)
    root = roots.open_root(str(cache_dir))
    for key in (KEY, OTHER_KEY, "1" * 16 + "-" + "2" * 16):
        attempt = entries.begin(root, key, application_id="app-1")
        write_data(root, attempt, num_files=3)
        leases.heartbeat.remove(attempt.intent)
        make_old(cache_dir / ROOT / key / attempt.intent.name, MISSED + 10)
        entries.begin(root, key, application_id="app-2")


@pytest.mark.parametrize("with_foreign", [False, True])
def test_a_dry_run_counts_what_the_real_one_removes(with_foreign: bool, tmp_path: Path, cache_dir: Path) -> None:
    _leave_many(cache_dir)
    if with_foreign:
        for index, path in enumerate(sorted((cache_dir / ROOT).glob("*/data-*"))):
            if path.is_dir():
                (path / "notes.txt").write_bytes(b"mine")
            if path.is_dir() and index % 2:
                path.rename(tmp_path / path.name)
                path.symlink_to(tmp_path / path.name)
    expected = sweep(cache_dir, kept=True, dry_run=True)
    assert (expected.num_entries, expected.num_attempts) == (2, 3)
    assert sweep(cache_dir, kept=True) == expected


def test_a_sweep_counts_files_and_bytes_and_says_where(cache_dir: Path) -> None:
    url = leave_entry(cache_dir)
    files = list((cache_dir / ROOT).rglob("*.parquet"))
    num_bytes = sum(path.stat().st_size for path in files)
    assert sweep(cache_dir) == removal.SweepReport(num_entries=1, num_files=2, num_bytes=num_bytes, urls=(url,))
    assert sweep(cache_dir) == removal.SweepReport()


@pytest.mark.parametrize("older_than", [3600, 3600.0, dt.timedelta(hours=1)])
def test_an_entry_goes_when_it_was_idle_for_long_enough(older_than: float | dt.timedelta, cache_dir: Path) -> None:
    leave_entry(cache_dir)
    assert sweep(cache_dir, older_than=older_than) == removal.SweepReport()
    for path in [cache_dir / ROOT / KEY, *(cache_dir / ROOT / KEY).rglob("*")]:
        make_old(path, 3700)
    assert sweep(cache_dir, older_than=dt.timedelta(hours=2)) == removal.SweepReport()
    assert sweep(cache_dir, older_than=older_than).num_entries == 1
    assert _is_empty(cache_dir)


@pytest.mark.parametrize("older_than", [-1, -0.5, dt.timedelta(seconds=-1), float("-inf"), float("nan")])
def test_a_negative_time_is_refused(older_than: float | dt.timedelta, cache_dir: Path) -> None:
    leave_entry(cache_dir)
    with pytest.raises(ValueError, match="older_than must be at least 0 seconds, got "):
        sweep(cache_dir, older_than=older_than)
    assert not _is_empty(cache_dir)


@pytest.mark.parametrize("age", [0, 40 * 24 * 3600, 4000 * 24 * 3600])
def test_what_was_kept_goes_only_where_that_is_asked_for(age: float, cache_dir: Path) -> None:
    url = leave_entry(cache_dir, KEY, is_kept=True)
    leave_entry(cache_dir, OTHER_KEY, is_kept=False)
    sweeps.sweep_after_write(roots.open_root(str(cache_dir)))
    assert not (cache_dir / ROOT / OTHER_KEY).exists()
    for path in [cache_dir / ROOT / KEY, *(cache_dir / ROOT / KEY).rglob("*")]:
        make_old(path, age)
    sweeps.sweep_after_write(roots.open_root(str(cache_dir)))
    for older_than in (0, 3600):
        is_old = older_than <= age
        assert sweep(cache_dir, older_than=older_than) == removal.SweepReport(num_kept=int(is_old))
    with open_converter(url) as converter:
        assert ids_of(converter) == list(range(NUM_ROWS))
        # In use, it is nothing to sweep.
        assert sweep(cache_dir, kept=True) == removal.SweepReport()
    assert sweep(cache_dir, kept=True, older_than=1e6) == removal.SweepReport()
    assert sweep(cache_dir, kept=True).num_entries == 1
    assert _is_empty(cache_dir)


@pytest.mark.parametrize("damage", ["cut", "contradicts itself"])
def test_what_was_kept_stays_also_where_its_manifest_is_damaged(
    damage: str, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_entry(cache_dir, KEY, is_kept=True)
    manifest = cache_dir / ROOT / KEY / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:-40] if damage == "cut" else content.replace(b'"num_rows":', b'"num_rows":1'))
    before = tree(cache_dir)
    sweeps.sweep_after_write(roots.open_root(str(cache_dir)))
    assert sweep(cache_dir) == removal.SweepReport(num_kept=1)
    assert tree(cache_dir) == before
    assert "Left a kept entry that cannot be read" in caplog.text
    assert sweep(cache_dir, kept=True).num_files == 2
    assert _is_empty(cache_dir)


def test_a_release_leaves_the_entry_also_where_its_manifest_is_damaged_by_then(cache_dir: Path) -> None:
    url = leave_entry(cache_dir, KEY, is_kept=True)
    manifest = cache_dir / ROOT / KEY / "manifest.json"
    with open_converter(url):
        content = manifest.read_bytes()
        manifest.write_bytes(content[:-40])
    manifest.write_bytes(content)
    with open_converter(url) as converter:
        assert ids_of(converter) == list(range(NUM_ROWS))


def test_a_damaged_kept_entry_is_not_removed_by_converters_that_delete_at_their_end(cache_dir: Path) -> None:
    leave_entry(cache_dir, KEY, is_kept=True)
    root = roots.open_root(str(cache_dir))
    data = next((cache_dir / ROOT / KEY).rglob("part-00001*"))
    content = data.read_bytes()
    for broken in (data, cache_dir / ROOT / KEY / "manifest.json"):
        whole = broken.read_bytes()
        broken.write_bytes(whole[:-40])
        assert write._adopt(root, KEY, may_remove=False) is None
        broken.write_bytes(whole)
    assert data.read_bytes() == content
    adopted = write._adopt(root, KEY, may_remove=False)
    assert adopted is not None
    with hold_entry(adopted, delete_on_exit=False) as converter:
        assert ids_of(converter) == list(range(NUM_ROWS))


def test_automatic_sweeps_reach_every_entry_in_time(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks at a bounded number: those that are kept must not stand in the way of the others for ever."""
    monkeypatch.setattr(sweeps, "_MAX_SWEPT", 2)
    for digit in range(4):
        leave_entry(cache_dir, f"{digit}" * 16 + "-" + "0" * 16, is_kept=True)
    leave_entry(cache_dir, OTHER_KEY, is_kept=False)
    root = roots.open_root(str(cache_dir))
    for _ in range(50):
        sweeps.sweep_after_write(root)
    assert not (cache_dir / ROOT / OTHER_KEY).exists()


def test_an_automatic_sweep_that_fails_fails_nobody(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave_entry(cache_dir, is_kept=False)

    def fail(*arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sweeps, "sweep_root", fail)
    with caplog.at_level(logging.INFO):
        sweeps.sweep_after_write(roots.open_root(str(cache_dir)))
    assert "Did not sweep" in caplog.text
