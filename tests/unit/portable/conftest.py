"""What several tests of tasks ask for."""

from __future__ import annotations

import pytest

from converter.portable import tasks


@pytest.fixture
def every_batch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is small enough to be put together with the next one."""
    monkeypatch.setattr(tasks, "_COALESCE_ROWS", 1)
