"""A cache of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from converter.cache import leases, roots
from converter.storage.directory import Storage


@pytest.fixture
def root(cache_dir: Path) -> Iterator[Storage]:
    root = roots.open_root(str(cache_dir))
    yield root
    # Tests end with signs of life that nobody gives back, as a process that is killed does.
    for lease in list(leases.heartbeat._leases):
        if lease.entry.url.startswith(root.url):
            leases.heartbeat.remove(lease)


@pytest.fixture
def ours(cache_dir: Path) -> Path:
    """Our subdirectory of the user's cache directory, as a path."""
    return cache_dir / "converter-v1"
