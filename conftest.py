"""Which lane a test is in; one Spark session and one server of each kind for all tests that ask for them.

`pytest` runs the short lane, `pytest --all` every test, `pytest --rest` what the short lane leaves out, and
`pytest tests/unit` the unit tests of the short lane, in three processes, with the long lane in two (or as `-n` says). A
file or a test that is named runs in any case, and in this process.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.servers.azurite import Azurite, SlowAzurite
    from tests.servers.hdfs import Hdfs
    from tests.servers.s3 import S3


SERVERS = frozenset({"hdfs", "azurite", "slow_azurite", "s3"})
"""Fixtures that need more than Python and pip."""


PROCESSES, LONG_PROCESSES = 3, 2
"""For two cores: much of the short lane waits for Spark and for imports (365 s with three processes, 563 with two).
With more than two the long lane's tests with clusters and stores get in each other's way."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanes")
    group.addoption("--all", action="store_true", help="every test, in either lane")
    group.addoption("--rest", action="store_true", help="only the tests that the short lane leaves out")


@pytest.hookimpl(tryfirst=True)  # Before pytest-xdist looks at its options.
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run a lane or a folder in processes, one file after the other in each, unless `-n` or `--pdb` is given."""
    option = config.option
    is_worker = hasattr(config, "workerinput")
    if is_worker or option.numprocesses is not None or option.usepdb or any(map(Path.is_file, named_files(config))):
        return
    option.numprocesses = LONG_PROCESSES if option.rest or option.all else PROCESSES
    option.dist = "loadfile"


def is_short(item: pytest.Item, case: int) -> bool:
    """Whether a test is in the short lane: a server or `one_in` leaves it out, else the nearest marker decides, else
    the folder. `case` counts the cases of one test function."""
    if SERVERS & set(getattr(item, "fixturenames", ())):
        return False
    if (one_in := item.get_closest_marker("one_in")) and case % one_in.args[0]:
        return False
    for marker in item.iter_markers():
        if marker.name in ("short", "long"):
            return marker.name == "short"
    folder = item.path.relative_to(item.config.rootpath).parts[:2]
    return folder[0] == "converter" or folder == ("tests", "unit")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file for the short lane that has no test of it; None lets other plugins decide."""
    if config.option.all or config.option.rest or collection_path in named_files(config):
        return None
    parts = collection_path.relative_to(config.rootpath).parts
    if collection_path.suffix != ".py" or parts[:2] == ("tests", "unit") or parts[0] != "tests":
        return None
    return "mark.short" not in collection_path.read_text() or None


def named_files(config: pytest.Config) -> set[Path]:
    """The files, and those of the tests, that the command line names."""
    return {(config.invocation_params.dir / str(argument).split("::")[0]).resolve() for argument in config.args}


@pytest.hookimpl(tryfirst=True)  # Before `-m` is applied.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of the other lane, and mark the others: `-m "short and not long"` works on a named file."""
    rest, everything = config.option.rest, config.option.all
    named = named_files(config)
    kept, left = [], []
    cases: Counter[str] = Counter()
    for item in items:
        function = item.nodeid.split("[")[0]
        short = is_short(item, cases[function])
        cases[function] += 1
        # A property is in both lanes: the short one tries a fifth of its examples.
        is_property = getattr(getattr(item, "function", None), "is_hypothesis_test", False)
        item.add_marker("short" if short else "long")
        chosen = everything or item.path in named or short != rest or (rest and is_property)
        (kept if chosen else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def pytest_configure(config: pytest.Config) -> None:
    """Let pytest-xdist give out the files in the order of `testpaths`.

    By default it begins with the files that have most tests. But some files with few tests (a job or a cluster each)
    take minutes: if a worker gets one of them last, the other worker is idle.
    """
    config.option.loadscopereorder = False
    # A shell ignores Ctrl-C for what it starts in the background, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    from hypothesis import settings

    settings.register_profile("short", max_examples=20, deadline=None)
    settings.register_profile("all", max_examples=100, deadline=None)
    settings.load_profile("all" if config.option.all or config.option.rest else "short")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make Java start quickly, unless there are only doctests and the tests in `tests/unit`, which start no Java."""
    folders = {item.path.relative_to(session.config.rootpath).parts[:2] for item in session.items}
    if any(folder[0] == "tests" and folder[1] != "unit" for folder in folders):
        from tests.servers.java import make_java_start_quickly

        make_java_start_quickly()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Classic Spark on two cores, in a time zone other than UTC, so that confused time zones show."""
    from converter import start_local_spark

    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "America/New_York",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    session = start_local_spark("tests", master="local[2]", conf=conf)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hdfs]:
    """A real HDFS. A test that pauses or kills a part of it does so in a `with`, which repairs it for the next test."""
    from tests.servers.hdfs import start_hdfs

    with start_hdfs(tmp_path_factory.mktemp("hdfs")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    """A real blob store; each test makes containers of its own."""
    from tests.servers.azurite import start_azurite

    with start_azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A store that speaks S3; each test makes buckets of its own."""
    from tests.servers.s3 import start_s3

    with start_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def slow_azurite(azurite: Azurite) -> Iterator[SlowAzurite]:
    """The same blob store behind the test's own proxy, which can delay, count, fail and hang requests."""
    from tests.servers.azurite import SlowAzurite
    from tests.servers.proxy import Proxy

    with Proxy(azurite.port) as proxy:
        yield SlowAzurite(proxy)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    """A directory for a cache; the test that uses it must leave no data file in it."""
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def user_of_hdfs_is_nobody_else_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that once wrote to HDFS as a user goes on as that user, and so would the next test."""
    monkeypatch.setenv("HADOOP_USER_NAME", "")
    monkeypatch.delenv("HADOOP_USER_NAME")


def join(thread: threading.Thread, seconds: float) -> None:
    """Wait for a thread, which may be about to start."""
    deadline = time.monotonic() + seconds
    while thread.ident is None and time.monotonic() < deadline:
        time.sleep(0.01)
    if thread.ident is not None:
        thread.join(max(0.0, deadline - time.monotonic()))


@pytest.fixture(autouse=True)
def no_reader_thread_is_left() -> Iterator[None]:
    """Reader threads end with the iteration that started them, the heartbeat with the last converter."""
    from converter.portable.deadlines import CLOSING_THREAD, REQUEST_THREAD, TOKEN_THREAD

    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if thread.name in (CLOSING_THREAD, REQUEST_THREAD, TOKEN_THREAD, "converter-tensorflow"):
            # It ends by itself: half a second after it was last needed, or when its store is back.
            join(thread, 5)
        elif thread.name.startswith(("converter-read", "converter-fetch", "converter-take")):
            # It has been told to end, but nobody waits for it while the collector runs in another thread.
            join(thread, 5)
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("converter-")]
    assert not left, f"threads left behind: {left}"
