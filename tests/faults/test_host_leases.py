"""Processes that a launcher has started on one host share a lease, which is there as long as one of them reads."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from converter import CacheCorruptError, DatasetConverter, open_converter, sweep
from converter.cache import entries, host_leases, leases, roots
from converter.cache.host_leases import HostLease
from converter.storage.local import LocalStorage
from tests.faults.small_entries import KEY, NUM_ROWS, commit_entry, ids_of, leave_entry, make_old
from tests.processes import start_python
from tests.waiting import wait_until


def hold(folder: str, url: str, name: str) -> list[int]:
    """Open an entry as one of several processes of this host, and read it when told to end."""
    with open_converter(url) as converter:
        Path(folder, f"{name}.open").write_text(str(os.getpid()))
        wait_until(lambda: Path(folder, f"{name}.end").exists())
        return ids_of(converter)


class Trainer:
    """A process that holds an entry."""

    def __init__(self, folder: Path, name: str, process: Any) -> None:
        self._folder, self._name, self._process = folder, name, process
        wait_until(lambda: (folder / f"{name}.open").exists() or process.poll() is not None)

    @property
    def pid(self) -> int:
        return int((self._folder / f"{self._name}.open").read_text())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> list[int]:
        """Let it read and close the entry; return what it has read."""
        (self._folder / f"{self._name}.end").touch()
        output, errors = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, errors
        found: list[int] = json.loads(output.splitlines()[-1])
        return found


@contextlib.contextmanager
def trainers(folder: Path, url: str, names: str) -> Iterator[list[Trainer]]:
    """A trainer for each letter of `names`, all started at once."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                start_python(hold, str(folder), url, name, environment={"LOCAL_WORLD_SIZE": str(len(names))})
            )
            for name in names
        ]
        yield [Trainer(folder, name, process) for name, process in zip(names, processes, strict=True)]


def leases_of(cache_dir: Path) -> dict[str, int]:
    """The leases of the entry, each with its owner."""
    found = {}
    for path in sorted((cache_dir / roots.DIRECTORY / KEY).glob("lease-*.json")):
        with contextlib.suppress(FileNotFoundError, ValueError):
            found[path.name] = json.loads(path.read_bytes())["pid"]
    return found


@pytest.fixture
def in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


def test_one_of_them_holds_the_lease_and_others_follow_it(cache_dir: Path, tmp_path: Path) -> None:
    url = leave_entry(cache_dir, is_kept=True)
    with trainers(tmp_path, url, "abcd") as started:
        by_pid = {trainer.pid: trainer for trainer in started}
        for is_killed in (True, False, True):
            (owner,) = leases_of(cache_dir).values()
            holder = by_pid.pop(owner)
            if is_killed:
                holder.kill()
                # Not after a minute: the others notice at once.
                wait_until(lambda owner=owner: set(leases_of(cache_dir).values()) - {owner} != set(), seconds=10)
                (left,) = (name for name, pid in leases_of(cache_dir).items() if pid == owner)
                make_old(cache_dir / roots.DIRECTORY / KEY / left, 1.5 * leases.RENEW_SECONDS)
                sweep(cache_dir)
            else:
                assert holder.end() == list(range(NUM_ROWS))
            assert len(leases_of(cache_dir)) == 1
        (last,) = by_pid.values()
        assert last.end() == list(range(NUM_ROWS))
    assert leases_of(cache_dir) == {}


def test_an_entry_is_held_at_every_moment_and_removed_with_the_last_reader(cache_dir: Path, tmp_path: Path) -> None:
    url = leave_entry(cache_dir)
    with trainers(tmp_path, url, "abc") as started:
        with open_converter(url) as converter:
            converter.delete()
        root = roots.open_root(str(cache_dir))
        unheld: list[float] = []
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                if not leases.held_now(root.below(KEY)):
                    unheld.append(time.monotonic())

        watcher = threading.Thread(target=look)
        watcher.start()
        by_pid = {trainer.pid: trainer for trainer in started}
        for _ in range(2):
            (owner,) = leases_of(cache_dir).values()
            assert by_pid.pop(owner).end() == list(range(NUM_ROWS))
        stop.set()
        watcher.join()
        assert not unheld
        (last,) = by_pid.values()
        assert last.end() == list(range(NUM_ROWS))
    assert not (cache_dir / roots.DIRECTORY / KEY).exists()


def test_converters_of_one_process_share_it_too(cache_dir: Path, in_a_group: None) -> None:
    url = leave_entry(cache_dir, is_kept=True)
    first, second, third = (open_converter(url) for _ in range(3))
    assert list(leases_of(cache_dir).values()) == [os.getpid()]
    for converter in (first, third, second):
        assert ids_of(converter) == list(range(NUM_ROWS))
        assert len(leases_of(cache_dir)) == 1
        converter.__exit__(None, None, None)
    assert leases_of(cache_dir) == {}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("converter-h")]


def test_who_joins_a_holder_does_not_ask_who_made_the_folder(
    cache_dir: Path, in_a_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = leave_entry(cache_dir, is_kept=True)
    asked: list[str] = []
    size = LocalStorage.size

    def noted(storage: LocalStorage, name: str, *arguments: Any) -> int | None:
        asked.append(name)
        return size(storage, name, *arguments)

    monkeypatch.setattr(LocalStorage, "size", noted)
    with open_converter(url):
        assert asked.count(roots.OWNER_FILE) == 1
        with open_converter(url) as converter:
            assert asked.count(roots.OWNER_FILE) == 1
            assert ids_of(converter) == list(range(NUM_ROWS))
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        with open_converter(url):
            assert asked.count(roots.OWNER_FILE) == 2


def test_alone_on_its_host_a_process_has_no_more_threads_than_before(cache_dir: Path) -> None:
    with open_converter(leave_entry(cache_dir, is_kept=True)):
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("converter-h")] == [
            "converter-heartbeat"
        ]


def test_a_lease_that_was_swept_is_lost_for_all(
    cache_dir: Path, in_a_group: None, caplog: pytest.LogCaptureFixture
) -> None:
    with open_converter(leave_entry(cache_dir, is_kept=True)) as holder, open_converter(holder.url) as other:
        for path in (cache_dir / roots.DIRECTORY / KEY).glob("lease-*.json"):
            path.unlink()
        with caplog.at_level(logging.WARNING):
            leases.heartbeat.renew()
        lease = other._holding.entry
        assert lease is not None
        assert lease.lease is not None
        wait_until(lambda: lease.lease.lost)
        for converter in (holder, other):
            with pytest.raises(Exception, match="so the entry was swept"):
                ids_of(converter)


def test_who_counts_on_a_process_that_renews_its_lease_no_more_puts_one(
    cache_dir: Path, in_a_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be stopped, by a debugger say: after three renewals a sweep would take its lease for dead."""
    monkeypatch.setattr(host_leases, "_SILENT_SECONDS", 0.2)
    holder = open_converter(leave_entry(cache_dir, is_kept=True))
    with open_converter(holder.url) as other:
        wait_until(lambda: len(leases_of(cache_dir)) == 2, seconds=30)
        first, _ = sorted(
            (cache_dir / roots.DIRECTORY / KEY).glob("lease-*.json"), key=lambda path: path.stat().st_mtime
        )
        make_old(first, 4 * leases.RENEW_SECONDS)
        assert sweep(cache_dir, kept=True).num_entries == 0
        assert ids_of(other) == list(range(NUM_ROWS))
        holder.__exit__(None, None, None)
        assert ids_of(other) == list(range(NUM_ROWS))
    assert leases_of(cache_dir) == {}


def test_who_holds_the_lease_says_each_time_that_it_is_renewed(
    cache_dir: Path, in_a_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bytes] = []
    with open_converter(leave_entry(cache_dir, is_kept=True)):
        monkeypatch.setattr(HostLease, "_say", lambda _, what: said.append(what))
        leases.heartbeat.renew()
        leases.heartbeat.renew()
    assert said == [host_leases._RENEWED] * 2


def test_another_attempt_has_a_lease_of_its_own(cache_dir: Path, in_a_group: None) -> None:
    root = roots.open_root(str(cache_dir))
    first = commit_entry(root)
    adopted = entries.adopt(root, KEY)
    assert adopted is not None
    entry, attempt_id = root.below(KEY), "f" * 32
    other = HostLease(entry, attempt_id)
    assert not other.find()
    other.put()
    other.share()
    assert attempt_id in leases.held_now(entry)
    other.release()
    other.release()
    assert attempt_id not in leases.held_now(entry)
    for held in (adopted, first):
        held.release()


def test_a_damaged_entry_is_refused_by_each_of_them(cache_dir: Path, tmp_path: Path, in_a_group: None) -> None:
    url = leave_entry(cache_dir, is_kept=True)
    next((cache_dir / roots.DIRECTORY / KEY).glob("data-*/*")).unlink()
    errors: list[Exception] = []

    def use() -> None:
        with pytest.raises(CacheCorruptError) as raised:
            open_converter(url)
        errors.append(raised.value)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(errors) == 4
    assert leases_of(cache_dir) == {}


def test_a_forked_child_does_not_hold_it(cache_dir: Path, in_a_group: None) -> None:
    url = leave_entry(cache_dir, is_kept=True)
    holder = open_converter(url)
    other = open_converter(url)
    ready, release = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"x")
        os.read(release[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        start = time.monotonic()
        # It waits for `other` alone: the child's copy of the connection is closed.
        other.__exit__(None, None, None)
        holder.__exit__(None, None, None)
        assert time.monotonic() - start < leases.HURRY_SECONDS
        assert leases_of(cache_dir) == {}
        with open_converter(url) as again:
            assert ids_of(again) == list(range(NUM_ROWS))
    finally:
        os.write(release[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *release):
            os.close(end)


def test_who_leaves_while_another_one_holds_the_lease_asks_the_store_for_nothing(
    cache_dir: Path, in_a_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = leave_entry(cache_dir)
    holder, other, deleter = (open_converter(url) for _ in range(3))
    asked: list[str] = []
    is_in_use = entries.is_in_use

    def look(root: Any, key: str, *arguments: Any, **options: Any) -> bool:
        asked.append(key)
        return is_in_use(root, key, *arguments, **options)

    monkeypatch.setattr(entries, "is_in_use", look)
    deleter.delete()
    other.__exit__(None, None, None)
    assert asked == []
    assert (cache_dir / roots.DIRECTORY / KEY).exists()

    holder.__exit__(None, None, None)
    assert asked == [KEY]
    assert not (cache_dir / roots.DIRECTORY / KEY).exists()


# What crowds of processes have shown --------------------------------------------------------------


def hold_until_killed(url: str, ready: str) -> None:
    """Hold an entry as the first process of this host."""
    holder = open_converter(url)
    Path(ready).touch()
    time.sleep(300)
    holder.delete()


@contextlib.contextmanager
def a_follower_that_is_slow_to_take_over(
    cache_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[DatasetConverter, threading.Event]]:
    """A converter of this process, whose holder was killed just now: it puts its lease once the event is set."""
    url = leave_entry(cache_dir)
    with start_python(hold_until_killed, url, str(folder / "ready"), environment={"LOCAL_WORLD_SIZE": "4"}) as process:
        wait_until(lambda: (folder / "ready").exists() or process.poll() is not None)
        with open_converter(url) as follower:
            may_put = threading.Event()

            def put_late(entry: Any, attempt_id: str, **options: Any) -> leases.Lease:
                assert may_put.wait(40)
                return put_lease(entry, attempt_id, **options)

            put_lease = leases.put_lease
            monkeypatch.setattr(host_leases, "put_lease", put_late)
            process.kill()
            process.wait()
            yield follower, may_put


def test_a_sweep_leaves_what_a_killed_holder_held_to_those_that_take_over(
    cache_dir: Path, tmp_path: Path, in_a_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by `python -m tests.faults.campaign crowd --seed 3`, in one of 200 cases: it depends on the moment."""
    with a_follower_that_is_slow_to_take_over(cache_dir, tmp_path, monkeypatch) as (follower, may_put):
        assert sweep(cache_dir).num_files == 0
        may_put.set()
        wait_until(lambda: os.getpid() in leases_of(cache_dir).values(), seconds=20)
        for name, pid in leases_of(cache_dir).items():
            if pid != os.getpid():
                make_old(cache_dir / roots.DIRECTORY / KEY / name, 1.5 * leases.RENEW_SECONDS)
        assert sweep(cache_dir).num_files == 0
        assert list(leases_of(cache_dir).values()) == [os.getpid()]
        assert ids_of(follower) == list(range(NUM_ROWS))


def test_who_can_put_no_lease_keeps_nobody_waiting(
    cache_dir: Path, tmp_path: Path, in_a_group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three readers of a crowd waited a minute each for a process that had tried in vain to take over a lease."""
    with a_follower_that_is_slow_to_take_over(cache_dir, tmp_path, monkeypatch) as (follower, may_put):
        shutil.rmtree(cache_dir / roots.DIRECTORY / KEY)
        may_put.set()
        wait_until(lambda: "This process holds no lease" in caplog.text, seconds=20)
        begun = time.monotonic()
        with open_converter(leave_entry(cache_dir)) as other:
            assert ids_of(other) == list(range(NUM_ROWS))
        # Not after a minute.
        assert time.monotonic() - begun < host_leases._JOIN_SECONDS / 2
        with pytest.raises(Exception, match="Was the converter deleted"):
            ids_of(follower)


def test_a_lease_that_moves_to_another_process_while_leases_are_listed_is_seen(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed is the file of the process that leaves; by the time it is read, another one stands in its place."""
    root = roots.open_root(str(cache_dir))
    held = commit_entry(root)
    entry, attempt_id = root.below(KEY), entries.attempt_of(held.manifest)
    moved: list[leases.Lease] = []
    read_sign = leases.read_sign

    def move_and_read(entry: Any, name: str) -> Any:
        if not moved:
            moved.append(leases.put_lease(entry, attempt_id))
            held.release_lease()
        return read_sign(entry, name)

    monkeypatch.setattr(leases, "read_sign", move_and_read)
    assert leases.held_now(entry) == {attempt_id}
    leases.release(moved[0])
    held.delete()


def test_what_is_held_is_seen_if_a_sweep_removes_the_file_that_shows_the_time(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that stood still while it wrote that file; it took the folder for gone, and removed data in use.

    python -m tests.faults.campaign crowd_in_turns --case 1:1652
    """
    held = commit_entry(roots.open_root(str(cache_dir)))
    now, removed = LocalStorage.now, list[bool]()

    def now_or_removed(self: LocalStorage) -> float:
        if not removed:
            removed.append(True)
            raise FileNotFoundError(self.url)
        return now(self)

    monkeypatch.setattr(LocalStorage, "now", now_or_removed)
    assert leases.held_now(held.folder) == {entries.attempt_of(held.manifest)}
    held.delete()


def test_who_waits_for_another_process_says_so_and_can_be_released(
    cache_dir: Path, in_a_group: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_leases, "_SAY_SECONDS", 0.1)
    leave_entry(cache_dir, is_kept=True)
    entry = roots.open_root(str(cache_dir)).below(KEY)
    # It is opening the entry, and never comes to its end.
    first, second = HostLease(entry, "a" * 32), HostLease(entry, "a" * 32)
    assert not first.find()
    waiting = threading.Thread(target=second.find)
    waiting.start()
    wait_until(lambda: f"Another process of this host is opening {entry.url}" in caplog.text, seconds=20)
    second.release()
    waiting.join(20)
    assert not waiting.is_alive()
    first.release()


@pytest.mark.parametrize("is_released", [False, True])
def test_a_holder_whose_queue_is_full_is_not_waited_for_without_end(
    cache_dir: Path, in_a_group: None, monkeypatch: pytest.MonkeyPatch, is_released: bool
) -> None:
    """Each look of another process stays in the queue of a process that stands still."""
    monkeypatch.setattr(host_leases, "_JOIN_SECONDS", 60.0 if is_released else 0.3)
    entry = LocalStorage(str(cache_dir))
    holder, other = HostLease(entry, "a" * 32), HostLease(entry, "a" * 32)
    assert not holder.find()
    while host_leases.is_held_here(entry):
        pass
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(other.find()))
    thread.start()
    if is_released:
        time.sleep(0.2)
        other.release()
    thread.join(timeout=20)
    assert found == [False]
    holder.release()
    other.release()
