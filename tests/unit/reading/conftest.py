"""A dataset that tests of reading share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from converter import DatasetConverter
from tests.columns import ID, TENSORS
from tests.entries import write_converter


@pytest.fixture
def small(cache_dir: Path) -> Iterator[DatasetConverter]:
    """One that a test may harm."""
    with write_converter(cache_dir, (ID, TENSORS[0]), [[range(100)], [range(100, 200)]], row_group_bytes=1000) as found:
        yield found
