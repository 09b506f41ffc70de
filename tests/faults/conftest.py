"""What the tests of damage and races share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from converter.cache import entries, leases


@pytest.fixture(autouse=True)
def nobody_waits_for_late_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No executor runs here, so none opens one more file after its attempt was abandoned."""
    monkeypatch.setattr(entries, "_ABANDON_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def leases_end_with_their_test() -> Iterator[None]:
    """A test that fails, or that plays a dead process, leaves leases; they are not the next test's."""
    heartbeat = leases.heartbeat
    yield
    if isinstance(heartbeat, leases._Heartbeat):
        for lease in list(heartbeat._leases):
            heartbeat.remove(lease)
