"""A lease is renewed while its process lives, and no longer."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

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
