"""A lease is renewed while its process lives, and no longer."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from converter.cache import entries, leases
from converter.storage.directory import Storage
from tests.unit.cache.written import KEY, commit, signs, silence, write_attempt


def test_the_heartbeat_lives_exactly_while_there_is_a_lease(root: Storage) -> None:
    def beating() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "converter-heartbeat"]

    assert beating() == []
    held = commit(root)
    adopted = entries.adopt(root, KEY)
    assert adopted is not None
    assert beating() == ["converter-heartbeat"]
    held.release()
    assert beating() == ["converter-heartbeat"]
    adopted.release()
    assert beating() == []


@pytest.mark.parametrize(("error", "num_left"), [(KeyboardInterrupt, 0), (OSError, 1)])
def test_a_lease_that_was_interrupted_does_not_stay(
    root: Storage, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], num_left: int
) -> None:
    """An error of the store is not followed by another request: it may be away."""
    put = type(root).put_if_absent

    def put_and_fail(storage: Storage, name: str, data: bytes) -> bool:
        put(storage, name, data)
        raise error

    monkeypatch.setattr(type(root), "put_if_absent", put_and_fail)
    with pytest.raises(error):
        leases.put_lease(root, "attempt")
    assert sum(info.name.startswith("lease-") for info in root.list()) == num_left


def test_a_ctrl_c_while_a_condition_takes_its_lock_leaves_the_heartbeat_free(
    root: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Condition.__enter__` is Python: a signal comes between the lock and the block that would give it back."""
    enter = threading.Condition.__enter__

    def enter_and_fail(condition: threading.Condition) -> bool:
        entered = enter(condition)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return entered

    held: list[bool] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Condition, "__enter__", enter_and_fail)
        with contextlib.suppress(KeyboardInterrupt):
            leases.heartbeat.renew()

    def take() -> None:
        held.append(leases.heartbeat._condition.acquire(timeout=0.1))
        if held[0]:
            leases.heartbeat._condition.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    assert held == [True]


def test_a_renewal_is_a_new_sign_of_life(root: Storage, ours: Path) -> None:
    attempt, _ = write_attempt(root)
    held = commit(root, mark="b")
    for name in (attempt.intent.name, held.lease.name):
        silence(ours / KEY / name)
        before = (ours / KEY / name).stat().st_mtime
        content = (ours / KEY / name).read_bytes()
        leases.heartbeat.renew()
        assert (ours / KEY / name).stat().st_mtime - before > 3 * leases.RENEW_SECONDS
        assert (ours / KEY / name).read_bytes() == content


def test_a_lease_that_was_swept_knows_it_is_lost_and_does_not_come_back(
    root: Storage, ours: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = commit(root)
    (ours / KEY / held.lease.name).unlink()
    with caplog.at_level(logging.WARNING, logger="converter.cache"):
        leases.heartbeat.renew()
        leases.heartbeat.renew()
    assert held.lease.lost
    assert signs(ours) == []
    assert caplog.text.count("was taken for dead and swept") == 1


def test_many_leases_are_renewed_at_once(root: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other they would be renewed too late on a slow store."""
    held = [leases.put_lease(root, "attempt") for _ in range(40)]
    names, meeting = [], threading.Barrier(4, timeout=20)

    def touch(storage: Storage, name: str, *arguments: object) -> None:
        names.append(name)
        if len(names) <= 4:
            meeting.wait()

    monkeypatch.setattr(type(root), "touch", touch)
    assert leases.heartbeat.renew()
    assert sorted(names) == sorted(lease.name for lease in held)
    monkeypatch.undo()
    for lease in held:
        leases.release(lease)


def test_a_renewal_that_fails_in_any_way_is_said_once(
    root: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = commit(root)

    def touch(*arguments: object) -> None:
        raise RuntimeError("the client panicked")

    with caplog.at_level(logging.WARNING, logger="converter.cache"):
        monkeypatch.setattr(type(root), "touch", touch)
        assert [leases.heartbeat.renew() for _ in range(3)] == [False] * 3
        monkeypatch.undo()
    assert leases.heartbeat.renew()
    assert caplog.text.count("Could not renew") == caplog.text.count("the client panicked") == 1
    held.release()


HIDDEN = FileNotFoundError(errno.ENOENT, "No such file")


@pytest.mark.parametrize(
    ("error", "kills", "is_gone"),
    [
        (OSError(errno.EMFILE, "Too many open files"), None, False),
        # Mounted with hidepid=1, or 2: processes of other users are hidden.
        (PermissionError(errno.EACCES, "Permission denied"), None, False),
        (HIDDEN, PermissionError(errno.EPERM, "Not permitted"), False),
        (HIDDEN, None, False),
        (HIDDEN, ProcessLookupError(errno.ESRCH, "No such process"), True),
    ],
)
def test_a_process_that_cannot_be_seen_is_not_taken_for_dead(
    root: Storage, monkeypatch: pytest.MonkeyPatch, error: OSError, kills: OSError | None, is_gone: bool
) -> None:
    """A sweep removed what a live process held."""
    held = commit(root)
    cannot_see_itself(monkeypatch, error, kills)
    assert (leases.held_now(root.below(KEY)) == set()) is is_gone
    silence_all(root)
    assert leases.held_now(root.below(KEY)) == set()
    held.release()


def test_a_process_that_could_not_see_itself_is_not_taken_for_dead(
    root: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        cannot_see_itself(patch, OSError(errno.EMFILE, "Too many open files"))
        held = commit(root)
    assert leases.held_now(root.below(KEY)) == {entries.attempt_of(held.manifest)}
    silence_all(root)
    assert leases.held_now(root.below(KEY)) == set()
    held.release()


def cannot_see_itself(patch: pytest.MonkeyPatch, error: OSError, kills: OSError | None = None) -> None:
    """Let this process fail to look itself up in /proc, and maybe to send itself signal 0."""

    def open_file(path: str, *arguments: Any, **options: Any) -> Any:
        if path == f"/proc/{os.getpid()}/stat":
            raise error
        return open(path, *arguments, **options)

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), 0)
        if kills is not None:
            raise kills

    patch.setattr(leases, "open", open_file, raising=False)
    patch.setattr(leases.os, "kill", kill)


def silence_all(root: Storage) -> None:
    """No lease was renewed for long."""
    folder = Path(root.below(KEY).path())
    for path in folder.glob("lease-*.json"):
        silence(path)
