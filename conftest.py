"""One local Spark session for all tests that ask for it, and a cache directory for each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Classic Spark on two cores, in the time zone that shows confusions of time zones."""
    from converter import start_local_spark

    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    session = start_local_spark("tests", master="local[2]", conf=conf)
    yield session
    session.stop()


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """A directory for a cache; the test that uses it must leave no data file in it."""
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def no_reader_thread_is_left() -> Iterator[None]:
    """Reader threads end with the iteration that started them, the heartbeat with the last converter."""
    before = set(threading.enumerate())
    yield
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("converter-")]
    assert not left, f"threads left behind: {left}"
