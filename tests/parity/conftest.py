"""The golden tables: those that are kept, and some that are made afresh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.parity.golden_files import unpack
from tests.parity.golden_making import make_tables
from tests.processes import finish, start_python

FRESH = (
    "mapped, checkpointed, with vectors",
    "widened, mapped, partitioned, with vectors",
    "checkpoints of the second kind, in JSON",
    "times within the commits",
    "shallow clone",
)
"""Few tables with many features: 27 versions of 263."""

FRESH_SECONDS = 600


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the golden tables: those that are kept, or the folder that CONVERTER_GOLDEN_TABLES names."""
    if ready := os.environ.get("CONVERTER_GOLDEN_TABLES"):
        return Path(ready)
    folder = tmp_path_factory.mktemp("golden")
    unpack(folder)
    return folder


@pytest.fixture(scope="session")
def fresh_golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of some golden tables that Delta has just made, in a process and a Spark of its own."""
    folder = tmp_path_factory.mktemp("fresh golden")
    with start_python(make_tables, str(folder), list(FRESH)) as process:
        finish(process, seconds=FRESH_SECONDS)
    return folder
