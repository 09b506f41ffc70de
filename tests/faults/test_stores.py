"""HDFS and Azure's blobs go away, come back, stay away, and drivers die: every row once, or an error that says why."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
from pyspark.sql import SparkSession

import converter
from converter import CacheError, DatasetConverter, ReadError, make_spark_converter
from converter.cache import entries, leases, roots
from converter.cache.removal import SweepReport
from converter.portable import deadlines, filesystems
from converter.portable.deadlines import REQUEST_THREAD
from converter.storage import hdfs as hdfs_store
from converter.storage.directory import Storage
from converter.storage.opening import open_storage
from converter.storage.store import TIMEOUT_SECONDS
from tests.faults.small_entries import NUM_ROWS as NUM_SMALL_ROWS
from tests.faults.small_entries import ids_of, plan_write, write_data, write_task
from tests.processes import finish, run_python, start_python
from tests.servers.hdfs import SMALL_BLOCK_BYTES
from tests.waiting import meet, wait_for_file, wait_until

if TYPE_CHECKING:
    from tests.servers.azurite import Azurite, SlowAzurite
    from tests.servers.hdfs import Hdfs
    from tests.servers.s3 import S3

KINDS = ("hdfs", "azure")
NUM_ROWS = 400_000
KEY = "0123456789abcdef-0123456789abcdef"


PAUSE_SECONDS = 20


@pytest.fixture
def place(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A new cache directory on a store, and its options."""
    if request.param == "azure":
        azurite: Azurite = request.getfixturevalue("azurite")
        return f"{azurite.url(azurite.new_container())}/cache", {"connection_string": azurite.connection_string}
    if request.param == "s3":
        s3: S3 = request.getfixturevalue("s3")
        return f"{s3.url(s3.new_bucket())}/cache", s3.options
    return f"{request.getfixturevalue('hdfs').url}/faults/{abs(hash(request.node.name))}", {}


def convert(spark: SparkSession, place: tuple[str, dict[str, Any]], **options: Any) -> DatasetConverter:
    url, storage_options = place
    df = spark.range(0, NUM_ROWS, 1, 2)
    return make_spark_converter(df, cache_dir=url, storage_options=storage_options, row_group_bytes=1 << 16, **options)


def read(made: DatasetConverter, at_batch: int = -1, event: Callable[[], None] = lambda: None) -> list[int]:
    """All ids in order; `event` comes in the middle."""
    found = []
    with made.make_batch_reader(batch_size=1000, shuffle_window_rows=16_000) as reader:
        for number, batch in enumerate(reader):
            if number == at_batch:
                event()
            found.append(batch["id"])
    return np.concatenate(found).tolist()


def left(place: tuple[str, dict[str, Any]]) -> list[str]:
    root = open_storage(place[0], place[1]).below(roots.DIRECTORY)
    return [info.name for info in root.list()]


# Given up ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", [*KINDS, "s3"], indirect=True)
def test_a_task_that_ends_after_its_driver_gave_up_leaves_no_file(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A client that an executor shares; here it would travel to the executors of the next tests.
    monkeypatch.setattr(filesystems, "_shared_hdfs", {})
    root = roots.open_root(*place)
    attempt = entries.begin(root, KEY, application_id="app-1")
    _, spec = plan_write(root, attempt)
    ids = np.arange(9)
    # As long as the driver waits, the same call leaves its file.
    (kept,) = write_task(spec, ids, partition=0, task_attempt=0)
    data = root.below(KEY).below(attempt.data_directory)
    assert [info.name for info in data.list()] == [kept[1]["name"]]
    entries.abandon(root, attempt)
    write_task(spec, ids, partition=1, task_attempt=1)
    assert [info.name for info in data.list()] == []


# Away and back -----------------------------------------------------------------------


@pytest.mark.parametrize("place", ["hdfs"], indirect=True)
def test_a_namenode_that_is_paused_delays_writing_and_reading(spark: SparkSession, hdfs: Hdfs, place: Any) -> None:
    def slow(batches: Any) -> Any:
        import time

        for batch in batches:
            time.sleep(0.2)
            yield batch

    url, options = place
    root = open_storage(url, options).below(roots.DIRECTORY)
    convert(spark, place).delete()
    is_paused: list[float] = []

    def pause_when_writing() -> None:
        wait_until(lambda: any(info.is_directory for info in root.list()))
        hdfs.namenode.pause()
        is_paused.append(time.monotonic())
        time.sleep(PAUSE_SECONDS)
        hdfs.namenode.resume()

    pausing = threading.Thread(target=pause_when_writing)
    try:
        pausing.start()
        rows = spark.range(0, NUM_ROWS, 1, 4).mapInArrow(slow, "id long")
        with make_spark_converter(rows, cache_dir=url, row_group_bytes=1 << 16) as made:
            assert time.monotonic() - is_paused[0] > PAUSE_SECONDS - 1
            pausing.join()
            # Where the files lie is asked anew.
            again = converter.open_converter(made.url)
            hdfs.namenode.pause()
            threading.Timer(PAUSE_SECONDS, hdfs.namenode.resume).start()
            begin = time.monotonic()
            assert read(again) == list(range(NUM_ROWS))
            assert time.monotonic() - begin > PAUSE_SECONDS - 1
            with again:
                pass
    finally:
        hdfs.namenode.resume()
        pausing.join()
    assert left(place) == [".owner"]


def create_while_the_namenode_hangs(url: str, namenode: int, failed: str) -> list[str]:
    """In a process of its own: a small file whose closing the NameNode does not answer, and then the file `failed`."""
    store = open_storage(url, timeout_seconds=2)
    store.make_directory()
    close_whole = hdfs_store.close_whole

    def hang_and_close(*arguments: Any) -> None:
        os.kill(namenode, signal.SIGSTOP)
        close_whole(*arguments)

    pytest.MonkeyPatch().setattr(hdfs_store, "close_whole", hang_and_close)
    with pytest.raises(TimeoutError, match="could not be reached for 2 seconds"):
        store.put_if_absent("file", b"content")
    Path(failed).touch()
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("converter-"))


@pytest.mark.parametrize("is_back", [False, True])
@pytest.mark.parametrize("place", ["hdfs"], indirect=True)
def test_an_interpreter_ends_while_the_namenode_hangs_or_comes_back(
    hdfs: Hdfs, place: Any, is_back: bool, tmp_path: Path
) -> None:
    failed = tmp_path / "failed"
    try:
        with start_python(create_while_the_namenode_hangs, place[0], hdfs.namenode.pid, str(failed)) as process:
            if is_back:
                wait_until(failed.exists)
                # While the interpreter's end waits for what is under way.
                time.sleep(1)
                hdfs.namenode.resume()
            assert deadlines.CLOSING_THREAD in finish(process, seconds=60)
    finally:
        hdfs.namenode.resume()
    # Whole or not at all.
    store = open_storage(place[0])
    assert store.size("file") in (None, len(b"content"))


@pytest.mark.parametrize("place", ["hdfs"], indirect=True)
def test_what_ends_a_block_is_seen_though_the_namenode_hangs(spark: SparkSession, hdfs: Hdfs, place: Any) -> None:
    made = convert(spark, place)
    begin = time.monotonic()
    try:
        hdfs.namenode.pause()
        with pytest.raises(KeyboardInterrupt), made:
            raise KeyboardInterrupt
    finally:
        hdfs.namenode.resume()
    assert time.monotonic() - begin < TIMEOUT_SECONDS / 2


@pytest.mark.parametrize("place", ["hdfs"], indirect=True)
def test_a_file_on_hdfs_is_one_block(spark: SparkSession, hdfs: Hdfs, place: Any) -> None:
    with convert(spark, place, writer="executors") as made:
        client = filesystems.open_filesystem(made._storage.store, retries_itself=False).client
        files = [client.get_file_info(made._storage.path(name)) for name in made._manifest.file_names]
    assert len(files) == 2
    for file in files:
        assert file.length <= file.blocksize
        assert file.blocksize > SMALL_BLOCK_BYTES


@pytest.mark.parametrize("place", ["hdfs"], indirect=True)
def test_a_datanode_that_is_killed_and_comes_back_costs_no_row(spark: SparkSession, hdfs: Hdfs, place: Any) -> None:
    back = threading.Timer(3, hdfs.datanode.start)

    def away() -> None:
        hdfs.datanode.kill()
        back.start()

    with convert(spark, place) as made:
        try:
            assert read(made, 50, away) == list(range(NUM_ROWS))
        finally:
            back.join()
            hdfs.wait_until_writable()
    assert left(place) == [".owner"]


@pytest.mark.parametrize("place", ["azure"], indirect=True)
def test_blobs_that_are_away_for_a_while_cost_no_row(spark: SparkSession, azurite: Azurite, place: Any) -> None:
    back = threading.Timer(10, azurite.start)

    def away() -> None:
        azurite.kill()
        back.start()

    with convert(spark, place) as made:
        try:
            assert read(made, 50, away) == list(range(NUM_ROWS))
        finally:
            back.join()
    assert left(place) == [".owner"]


# Not back ----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["hdfs"], indirect=True)
def test_a_datanode_that_stays_away_is_a_named_error_in_time(spark: SparkSession, hdfs: Hdfs, place: Any) -> None:
    with convert(spark, place, timeout_seconds=4) as made:
        try:
            begin = time.monotonic()
            with pytest.raises(ReadError, match=r"hdfs://.*part-.*") as raised:
                read(made, 50, hdfs.datanode.kill)
            assert time.monotonic() - begin < 20
            assert raised.value.path.startswith(made.url)
        finally:
            hdfs.datanode.start()
            hdfs.wait_until_writable()


@pytest.mark.parametrize("place", ["azure"], indirect=True)
def test_blobs_that_stay_away_are_a_named_error_in_time(spark: SparkSession, azurite: Azurite, place: Any) -> None:
    with convert(spark, place, timeout_seconds=4) as made:
        try:
            begin = time.monotonic()
            with pytest.raises(ReadError, match=r"abfs://.*part-.*could not be reached for 4 seconds") as raised:
                read(made, 50, azurite.kill)
            assert time.monotonic() - begin < 20
            assert raised.value.path.startswith(made.url)
        finally:
            azurite.start()


@pytest.mark.parametrize(
    ("place", "part"), [("hdfs", "namenode"), ("hdfs", "datanode"), ("azure", "process")], indirect=["place"]
)
def test_a_server_that_hangs_while_tasks_write_is_a_named_error_in_time(
    request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path, place: Any, part: str
) -> None:
    has_begun, is_paused = str(tmp_path / "begun"), tmp_path / "paused"
    wait = wait_for_file(is_paused)

    def rows(batches: Any) -> Any:
        from pyspark import TaskContext

        # At least one of the first tasks has written its file by then.
        if TaskContext.get().partitionId() > 1:
            open(has_begun, "w").close()
            wait()
        yield from batches

    url, options = place
    server = getattr(request.getfixturevalue("azurite" if part == "process" else "hdfs"), part)
    convert(spark, place).delete()
    is_over = threading.Event()

    def pause_when_writing() -> None:
        wait_until(lambda: os.path.exists(has_begun))
        server.pause()
        is_paused.touch()
        is_over.wait(60)
        server.resume()

    pausing = threading.Thread(target=pause_when_writing)
    df = spark.range(0, NUM_ROWS, 1, 4).mapInArrow(rows, "id long")
    try:
        pausing.start()
        begin = time.monotonic()
        with pytest.raises(CacheError, match=rf"{url}.*made no progress for .* seconds \(timeout_seconds\)"):
            make_spark_converter(df, cache_dir=url, storage_options=options, timeout_seconds=4)
        assert time.monotonic() - begin < 60
    finally:
        is_over.set()
        pausing.join()
        if part != "process":
            request.getfixturevalue("hdfs").wait_until_writable()
    # What was given up may still arrive, and is nobody's.
    wait_until(lambda: converter.sweep(url, storage_options=options) is not None and left(place) == [".owner"])
    with convert(spark, place) as made:
        assert read(made) == list(range(NUM_ROWS))


@pytest.mark.parametrize("path", ["comp=block&", "comp=blocklist"])
def test_tasks_ask_again_what_passes(spark: SparkSession, slow_azurite: SlowAzurite, path: str) -> None:
    url, options = (
        f"{slow_azurite.url(slow_azurite.new_container())}/cache",
        {"connection_string": slow_azurite.connection_string},
    )
    slow_azurite.proxy.forget()
    slow_azurite.proxy.fail_next(2, status=503, path=path)
    with convert(spark, (url, options), writer="executors", timeout_seconds=20) as made:
        assert read(made) == list(range(NUM_ROWS))
    # Both were hit, and no task was run again.
    assert sum(path in request.path for request in slow_azurite.proxy.requests) == 4


@pytest.mark.parametrize("place", ["azure"], indirect=True)
def test_who_interrupts_a_write_to_a_store_that_hangs_is_not_kept(
    spark: SparkSession, azurite: Azurite, place: Any
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        azurite.process.pause()
        raise KeyboardInterrupt

    begin = time.monotonic()
    try:
        with mock.patch("converter.sources.spark.write.manifest_from", interrupt), pytest.raises(KeyboardInterrupt):
            convert(spark, place)
        assert time.monotonic() - begin < 60
    finally:
        azurite.process.resume()
    wait_until(lambda: converter.sweep(place[0], storage_options=place[1]) is not None and left(place) == [".owner"])


def read_for_ever(url: str, options: dict[str, Any], progress: str, num_workers: int) -> None:
    """Read until a signal comes; say how far at each batch, and at the end which threads and processes still read."""
    waiting = (deadlines.CLOSING_THREAD, REQUEST_THREAD)
    try:
        with (
            converter.open_converter(url, storage_options=options) as made,
            made.make_torch_dataloader(
                batch_size=1000, shuffle=True, shuffle_window_rows=16_000, num_epochs=None, num_workers=num_workers
            ) as loader,
        ):
            for number, _ in enumerate(loader):
                Path(progress).write_text(str(number))
    finally:
        # What waits for the store's answer is alone with it: the interpreter's end leaves it behind.
        names = [thread.name for thread in threading.enumerate()]
        left = [name for name in names if name.startswith("converter-") and name not in waiting]
        print(json.dumps(left + [child.name for child in multiprocessing.active_children()]))


@contextlib.contextmanager
def silent(hdfs: Hdfs) -> Iterator[None]:
    """In this block neither rows come, nor can a lease be given back."""
    try:
        hdfs.datanode.pause()
        hdfs.namenode.pause()
        yield
    finally:
        hdfs.namenode.resume()
        hdfs.datanode.resume()
        hdfs.wait_until_writable()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Where worker processes make sockets, whose paths have at most 107 bytes; those of pytest have more."""
    with tempfile.TemporaryDirectory(prefix="ctrl-c-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_ctrl_c_ends_an_epoch_though_the_store_hangs(
    request: pytest.FixtureRequest,
    spark: SparkSession,
    tmp_path: Path,
    short_folder: Path,
    kind: str,
    num_workers: int,
) -> None:
    if kind == "azure":
        azurite: SlowAzurite = request.getfixturevalue("slow_azurite")
        url, options = azurite.url(azurite.new_container()), {"connection_string": azurite.connection_string}
        hanging = azurite.proxy.hanging
    else:
        hdfs: Hdfs = request.getfixturevalue("hdfs")
        url, options = f"{hdfs.url}/ctrl-c", {}
        hanging = functools.partial(silent, hdfs)
    progress = tmp_path / "progress"

    def is_stuck() -> bool:
        before = progress.read_text()
        time.sleep(1)
        return progress.read_text() == before

    with convert(spark, (url, options)) as made:
        environment = {"TMPDIR": str(short_folder)}
        with start_python(
            read_for_ever, made.url, options, str(progress), num_workers, environment=environment
        ) as process:
            wait_until(lambda: process.poll() is not None or progress.exists())
            assert process.poll() is None, process.communicate()[1]
            with hanging():
                # What was fetched ahead still comes.
                wait_until(is_stuck)
                # A terminal tells all processes, the workers too.
                os.killpg(process.pid, signal.SIGINT)
                # Who waited for the store would hear of it after timeout_seconds, TIMEOUT_SECONDS here. A worker
                # process that lived on would keep the pipes open.
                output, errors = process.communicate(timeout=TIMEOUT_SECONDS / 2)
        assert "\nKeyboardInterrupt\n" in errors
        assert process.returncode == -signal.SIGINT
        assert json.loads(output) == []
        # A worker that torch had to terminate would leave multiprocessing's folder.
        assert list(short_folder.iterdir()) == []
        assert read(made) == list(range(NUM_ROWS))
    # The lease that could not be given back is a dead reader's.
    wait_until(lambda: converter.sweep(url, storage_options=options) is not None and left((url, options)) == [".owner"])


@pytest.mark.parametrize("place", ["hdfs"], indirect=True)
def test_safe_mode_is_named_and_leaves_nothing(spark: SparkSession, hdfs: Hdfs, place: Any) -> None:
    convert(spark, place).delete()
    with hdfs.safe_mode():
        begin = time.monotonic()
        with pytest.raises(CacheError, match=r"(?i)hdfs://.*safe ?mode"):
            convert(spark, place, timeout_seconds=4)
        assert time.monotonic() - begin < 15
    assert left(place) == [".owner"]


# Drivers that die, drivers that race -------------------------------------------------


def convert_for_ever(url: str, options: dict[str, Any], writer: str, confs: dict[str, str]) -> None:
    spark = converter.start_local_spark("dies", master="local[2]", conf=confs)

    def slow(batches: Any) -> Any:
        import time

        for batch in batches:
            time.sleep(0.1)
            yield batch

    # One task is in the middle of its file for ever; beside it others begin and end theirs.
    ids = spark.range(0, 100_000_000, 1, 1).union(spark.range(0, 5000, 1, 5000))
    rows = ids.mapInArrow(slow, "id long")
    make_spark_converter(rows, cache_dir=url, storage_options=options, row_group_bytes=1 << 16, writer=writer)


def data_files(storage: Storage) -> list[str]:
    """The data files there and in all folders below."""
    found = []
    for info in storage.list():
        if info.is_directory:
            found += data_files(storage.below(info.name))
        elif info.name.startswith("part-"):
            found.append(info.name)
    return found


@pytest.mark.parametrize(
    ("place", "writer", "is_alone"),
    [("hdfs", "executors", True), ("hdfs", "spark", False), ("azure", "executors", True), ("azure", "spark", False)],
    indirect=["place"],
)
def test_what_a_killed_driver_leaves_is_swept(
    request: pytest.FixtureRequest, place: Any, writer: str, is_alone: bool
) -> None:
    url, options = place
    confs = {}
    if writer == "spark" and url.startswith("abfs:"):
        confs = request.getfixturevalue("azurite").spark_confs()
    root = open_storage(url, options).below(roots.DIRECTORY)
    with start_python(convert_for_ever, url, options, writer, confs) as process:
        # As two are written at a time, one at least is whole.
        wait_until(lambda: process.poll() is not None or len(data_files(root)) >= 3)
        assert process.poll() is None, process.communicate()[1]
        if is_alone:
            process.send_signal(signal.SIGKILL)
        else:
            # Spark's committer lives in the JVM, and would tidy up if it had the time.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    assert data_files(root)
    reports: list[SweepReport] = []

    def is_swept() -> bool:
        # Tasks whose driver is gone may end their files meanwhile.
        reports.append(converter.sweep(url, storage_options=options))
        return left(place) == [".owner"]

    wait_until(is_swept)
    swept = sum(reports, SweepReport())
    assert swept.num_attempts >= 1
    # What stands in the folder of Spark's committer goes with it, and is not counted.
    assert swept.num_files >= 1 or writer == "spark"
    assert data_files(root) == []


def race(url: str, options: dict[str, Any], index: int, rounds: int, meeting: str) -> list[dict[str, Any]]:
    """Commit an entry in each round at the same time as another process; whose it is, and sometimes its rows."""
    root = roots.open_root(url, options)
    found = []
    for number in range(rounds):
        key = f"{number:016x}-0123456789abcdef"
        attempt = entries.begin(root, key, application_id="race")
        manifest = write_data(root, attempt)
        meet(meeting, number, index, 1 - index)
        held = entries.commit(root, attempt, manifest)
        committed = held.manifest
        assert entries.find_damage(held.folder, committed) is None
        ids = []
        if number % 10 == 0:
            # By a lease of its own: the winner may have released it.
            with converter.open_converter(root.below(key).url, storage_options=options) as made:
                ids = ids_of(made)
        is_own = committed.file_names == manifest.file_names
        found.append({"data": committed.file_names[0], "is_own": is_own, "ids": ids})
        leases.release(held.lease)
    return found


@pytest.mark.parametrize("place", KINDS, indirect=True)
def test_of_two_drivers_with_one_key_one_commits_and_both_are_right(place: Any, tmp_path: Path) -> None:
    url, options = place
    rounds = 40
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(run_python, race, url, options, index, rounds, str(tmp_path)) for index in range(2)]
        one, other = (found.result() for found in both)
    assert [first["data"] for first in one] == [second["data"] for second in other]
    assert [first["is_own"] + second["is_own"] for first, second in zip(one, other, strict=True)] == [1] * rounds
    # Where one were always first, they would not have raced.
    assert all(any(found["is_own"] for found in found_by) for found_by in (one, other))
    assert [found["ids"] for found in (one + other)[::10]] == [list(range(NUM_SMALL_ROWS))] * (rounds // 5)
    assert converter.sweep(url, storage_options=options).num_entries == rounds
    assert left(place) == [".owner"]
