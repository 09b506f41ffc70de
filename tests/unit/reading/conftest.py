"""A dataset that tests of reading share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from converter import DatasetConverter
from tests.unit.known_tables import ID, TENSORS, write_converter


@pytest.fixture
def small(cache_dir: Path) -> Iterator[DatasetConverter]:
    """One that a test may harm."""
    with write_converter(cache_dir, (ID, TENSORS[0]), [[range(100)], [range(100, 200)]], row_group_bytes=1000) as found:
        yield found
