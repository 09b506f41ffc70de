"""A lease is renewed while its process lives, and no longer."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("error", "reads", "kills", "is_gone"),
    [
        # Too many open files, here or in the process that put the lease.
        (OSError(errno.EMFILE, "Too many open files"), 0, None, False),
        (OSError(errno.EMFILE, "Too many open files"), 1, None, False),
        # Mounted with hidepid=1, or 2: processes of other users are hidden.
        (PermissionError(errno.EACCES, "Permission denied"), 1, None, False),
        (FileNotFoundError(errno.ENOENT, "No such file"), 1, PermissionError(errno.EPERM, "Not permitted"), False),
        (FileNotFoundError(errno.ENOENT, "No such file"), 1, None, False),
        (FileNotFoundError(errno.ENOENT, "No such file"), 1, ProcessLookupError(errno.ESRCH, "No such process"), True),
    ],
)
def test_a_process_that_cannot_be_seen_is_not_taken_for_dead(
    root: Storage,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError,
    reads: int,
    kills: OSError | None,
    is_gone: bool,
) -> None:
    """A sweep removed what a live process held. `reads`: how often its number can be looked up before."""
    left = [reads]

    def open_file(path: str, *arguments: Any, **options: Any) -> Any:
        if path == f"/proc/{os.getpid()}/stat":
            left[0] -= 1
            if left[0] < 0:
                raise error
        return open(path, *arguments, **options)

    def kill(pid: int, number: int) -> None:
        assert (pid, number) == (os.getpid(), 0)
        if kills is not None:
            raise kills

    monkeypatch.setattr(leases, "open", open_file, raising=False)
    monkeypatch.setattr(leases.os, "kill", kill)
    held = commit(root)
    left[0] = max(left[0], 0)
    if not reads:
        # Only the process that put the lease could not see itself.
        monkeypatch.delattr(leases, "open")
    assert (leases.held_now(root.below(KEY)) == set()) is is_gone
    silence_all(root)
    assert leases.held_now(root.below(KEY)) == set()
    held.release()


def silence_all(root: Storage) -> None:
    """No lease was renewed for long."""
    folder = Path(root.below(KEY).path())
    for path in folder.glob("lease-*.json"):
        silence(path)
