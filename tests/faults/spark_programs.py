"""Drivers that run in a Python of their own, and what goes wrong in their tasks.

Each program returns what it found as JSON values; the tests say what it must be. What a task does goes wrong once:
the first to make a marker file is the one that fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import pyspark
import pytest
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from converter import CacheError, DatasetConverter, make_spark_converter, start_local_spark, sweep
from converter.sources.spark import run, write
from converter.sources.spark.local import find_java_home
from tests.folders import files_below, paths_below
from tests.rows import concatenate
from tests.waiting import wait_for_file, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_OF_A_PARTITION = 50_000
PARTITIONS = 4
KINDS = 7
SMALL_FILE_BYTES = 200_000
SMALL_ROW_GROUP_BYTES = 64 << 10
SPARK_HOME = Path(pyspark.__file__).parent

_COLUMNS = (
    "id",
    "cast(id % 65536 / 2 as float) AS half",
    "concat('row ', id) AS text",
    "array(id, -id) AS pair",
    # Each partition has values of its own, of which the first come last in the order of texts.
    f"concat('kind ', 9 - id div {ROWS_OF_A_PARTITION}, ' ', 9 - id % {KINDS}) AS kind",
)


# What every program looks at ---------------------------------------------------


def is_right(converter: DatasetConverter, num_rows: int) -> bool:
    """Whether the rows of `_COLUMNS` arrive, every one once, in order and with their values."""
    with converter.make_batch_reader(batch_size=10_000) as reader:
        found = concatenate(list(reader))
    ids = np.arange(num_rows)
    kinds = [f"kind {9 - row // ROWS_OF_A_PARTITION} {9 - row % KINDS}" for row in range(num_rows)]
    categories = converter.schema["kind"].categories
    found_kinds = found["kind"].tolist()
    return (
        len(converter) == num_rows
        and (found_kinds if categories is None else [categories[code] for code in found_kinds]) == kinds
        and np.array_equal(found["id"], ids)
        and np.array_equal(found["half"], (ids % 65536 / 2).astype("f4"))
        and found["text"].tolist() == [f"row {row}" for row in range(num_rows)]
        and np.array_equal(found["pair"], np.stack([ids, -ids], 1))
    )


def listed(converter: DatasetConverter) -> list[str]:
    """The files that the manifest names, below the entry."""
    manifest = json.loads((folder_of(converter) / "manifest.json").read_bytes())
    return sorted(name for name in _strings(manifest) if re.fullmatch(r"data-[0-9a-f]{32}/[^/]+", name))


def stored(converter: DatasetConverter) -> list[str]:
    """The files that stand in the entry's data folders."""
    return [name for name in files_below(folder_of(converter)) if name.startswith("data-") and "/" in name]


def folder_of(converter: DatasetConverter) -> Path:
    return Path(unquote(converter.url.removeprefix("file://")))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _recorded(step: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What a step returns, or how it failed, so that the steps after it run all the same."""
    started = time.monotonic()
    try:
        result = step(*arguments)
    except Exception:  # noqa: BLE001 (the test that asks for this step shows it)
        result = {"failure": traceback.format_exc()}
    return result | {"seconds": round(time.monotonic() - started, 1)}


# Faults of tasks ---------------------------------------------------------------


def faulty_rows(spark: SparkSession, fault: str, *, writer: str, marks: str, cache_dir: str) -> DataFrame:
    """The rows of `is_right` in four partitions, of which one meets with a fault when it is made first.

    `marks` then holds `attempt-<partition>-<task attempt>` for each attempt, and `<fault>` with the files that the
    faulty one had written at that time.
    """
    num_rows = ROWS_OF_A_PARTITION * PARTITIONS

    def written(partition: int, attempt: int) -> list[str]:
        """Files of this package that this attempt has closed."""
        from pathlib import Path

        ours = f"converter-v1/*/data-*/part-{partition:05d}-{attempt:08x}-*.parquet"
        return [str(path) for path in sorted(Path(cache_dir).glob(ours))[:-1]]

    def wait(claim: Any) -> None:
        import time

        deadline = time.monotonic() + 60
        while not claim():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def is_first(content: str) -> bool:
        import os

        try:
            with open(f"{marks}/{fault}", "x", encoding="utf-8") as mark:
                mark.write(content)
                os.fsync(mark.fileno())
        except FileExistsError:
            return False
        return True

    def kill_executor() -> None:
        """The JVM of this executor is what started Spark's daemon, and the daemon started us."""
        import os
        import signal
        import time
        from pathlib import Path

        def parent(pid: int) -> int:
            return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

        jvm = parent(os.getppid())
        assert b"CoarseGrainedExecutorBackend" in Path(f"/proc/{jvm}/cmdline").read_bytes()
        os.kill(jvm, signal.SIGKILL)
        time.sleep(60)

    def pass_on(batches: Any) -> Any:
        import json
        import time
        from pathlib import Path

        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        partition, attempt = context.partitionId(), context.taskAttemptId()
        Path(marks, f"attempt-{partition}-{attempt}").touch()
        if fault == "killed" and partition == 0:
            # Then each executor has one partition done when it comes to the last.
            wait(lambda: list(Path(marks).glob("attempt-1-*")))
        if fault == "fails at once" and partition == 2 and is_first("[]"):
            raise ValueError("on purpose, at once")
        for index, batch in enumerate(batches):
            if index == 3 and partition == 2 and fault not in ("none", "fails at once"):
                # Of Spark's writer nothing can be awaited: it holds rows back as long as more are to come.
                if writer == "executors" and not Path(marks, fault).exists():
                    wait(lambda: written(partition, attempt))
                if is_first(json.dumps(written(partition, attempt))):
                    if fault == "fails late":
                        raise ValueError("on purpose, late")
                    if fault == "killed":
                        kill_executor()
                    # Slow: writes on and on, what nobody asked for, until somebody ends it.
                    for _ in range(600):
                        yield pa.record_batch([pa.array(range(-10_000, 0))], names=["id"])
                        time.sleep(0.1)
            yield batch

    return spark.range(0, num_rows, 1, PARTITIONS).mapInArrow(pass_on, "id long").selectExpr(*_COLUMNS)


def write_with_fault(spark: SparkSession, fault: str, writer: str, folder: Path) -> dict[str, Any]:
    """Convert rows that meet with a fault; what arrived, and what was left on disk."""
    marks, cache_dir = folder / f"marks {fault} {writer}", folder / f"cache {fault} {writer}"
    marks.mkdir()
    # As of many tasks: their reports meet in a last stage of Spark's, and until then an executor keeps them.
    pytest.MonkeyPatch().setattr(run, "_MAX_UNFOLDED_MOMENTS", 0 if fault == "killed" else 64)
    df = faulty_rows(spark, fault, writer=writer, marks=str(marks), cache_dir=str(cache_dir))
    with make_spark_converter(
        df, cache_dir=cache_dir, writer=writer, row_group_bytes=SMALL_ROW_GROUP_BYTES, categories=["kind"]
    ) as converter:
        at_commit = stored(converter)
        # Who lost is being ended, and may still be at work, or about to open its file.
        wait_until(lambda: not num_running_tasks(spark) and not writers_below(cache_dir), seconds=30)
        result = {
            "is_right": is_right(converter, ROWS_OF_A_PARTITION * PARTITIONS),
            "listed": listed(converter),
            "at_commit": at_commit,
            "stored": stored(converter),
        }
    attempts = [tuple(map(int, path.name.split("-")[1:])) for path in marks.glob("attempt-*")]
    written = [Path(name) for name in json.loads((marks / fault).read_text())]
    return result | {
        "attempts": {str(part): sum(found == part for found, _ in attempts) for part in range(PARTITIONS)},
        "written": len(written),
        "written_left": [str(path) for path in written if path.exists()],
        "left": paths_below(cache_dir),
    }


def num_running_tasks(spark: SparkSession) -> int:
    """The tasks that executors have not yet ended, of stages that are over too."""
    executors = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()  # type: ignore[union-attr]
    return sum(executor.numRunningTasks() for executor in executors)


def writers_below(directory: str | Path) -> list[int]:
    """The other processes that have a file below `directory` open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(f"{directory}/"):
                found.add(int(link.parts[2]))
    return sorted(found - {os.getpid()})


def faults_on_a_cluster(folder: str, faults: list[str], writers: list[str]) -> dict[str, dict[str, Any]]:
    """Each fault with each writer, on two executors that Spark takes for two machines."""
    pytest.MonkeyPatch().setattr(write, "FILE_BYTES", SMALL_FILE_BYTES)
    with two_workers(Path(folder)) as url:
        conf = {
            "spark.cores.max": "2",
            "spark.executor.memory": "1g",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.minTaskRuntime": "2s",
        }
        spark = start_local_spark("faults", master=url, conf=conf)
        results = {
            f"{fault}, {writer}": _recorded(write_with_fault, spark, fault, writer, Path(folder))
            for fault in faults
            for writer in writers
        }
        spark.stop()
    return results


@contextmanager
def two_workers(folder: Path) -> Iterator[str]:
    """A master and two workers of one core each; yields the master's URL.

    The workers have two names, because Spark gives a second attempt of a running task to another host alone; those
    of `local-cluster` have one.
    """
    environment = os.environ | {
        "JAVA_HOME": str(find_java_home()),
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
    }
    environment.pop("SPARK_LOCAL_IP", None)

    with ExitStack() as stack:

        def start(name: str, *arguments: str) -> Callable[[str], str]:
            log = folder / f"{name}.log"
            command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{arguments[0]}"]
            with log.open("wb") as output:
                process = subprocess.Popen([*command, *arguments[1:]], env=environment, stdout=output, stderr=output)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)

            def logged(pattern: str) -> str:
                wait_until(lambda: re.search(pattern, log.read_text()) or process.poll() is not None, seconds=60)
                found = re.search(pattern, log.read_text())
                assert found, log.read_text()[-5000:]
                return found[1]

            return logged

        master = start("master", "master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        url = master(r"Starting Spark master at (spark://127\.0\.0\.1:\d+)")
        options = ("--webui-port", "0", "--cores", "1", "--memory", "1g", "--work-dir", str(folder / "work"))
        workers = [
            start(f"worker-{host}", "worker.Worker", "--host", host, *options, url)
            for host in ("127.0.0.1", "127.0.0.2")
        ]
        for worker in workers:
            worker(r"(Successfully registered with master)")
        yield url


# More rows, and wider ones, than an executor has memory --------------------------


def big_on_one_executor(folder: str) -> dict[str, dict[str, Any]]:
    """Big partitions and wide rows through one executor of 1 GB."""
    spark = start_local_spark("big", master="local-cluster[1,1,1024]", conf={"spark.executor.memory": "1g"})
    results = {
        name: _recorded(_write_big, spark, f"{folder}/{name}", num_rows, columns)
        for name, (num_rows, columns) in {
            "two_gigabytes": (1_000_000, ["id", "array_repeat(cast(id % 1024 as float), 512) AS x"]),
            "wide_arrays": (300, ["id", "array_repeat(cast(id as float), 500000) AS x"]),
            "wide_texts": (100, ["id", "repeat(lpad(id, 8, '0'), 250000) AS text"]),
            "wide_bytes": (100, ["id", "cast(repeat(lpad(id, 8, '0'), 250000) as binary) AS bytes"]),
        }.items()
    }
    spark.stop()
    return results


def _write_big(spark: SparkSession, cache_dir: str, num_rows: int, columns: list[str]) -> dict[str, Any]:
    with peak_of_python_workers() as peaks:
        converter = make_spark_converter(spark.range(0, num_rows, 1, 1).selectExpr(*columns), cache_dir=cache_dir)
    ids: list[int] = []
    wrong = num_bytes = 0
    with converter, converter.make_batch_reader(batch_size=16_384 if num_rows > 1000 else 4) as reader:
        for batch in reader:
            ids += batch["id"].tolist()
            if "x" in batch:
                wrong += int((batch["x"] != (batch["id"] % 1024).astype("f4")[:, None]).sum())
                num_bytes += batch["x"].nbytes
            for row, value in zip(batch["id"].tolist(), batch.get("text", batch.get("bytes", ())), strict=False):
                text = f"{row:08d}" * 250_000
                wrong += value != (text if "text" in batch else text.encode())
                num_bytes += len(value)
        files = {"listed": listed(converter), "stored": stored(converter)}
        sizes = sorted(path.stat().st_size for path in folder_of(converter).glob("data-*/*"))
    return files | {
        "ids_are_right": ids == list(range(num_rows)),
        "wrong_values": wrong,
        "value_bytes": num_bytes,
        "file_bytes": sizes,
        "peak_mb": {str(pid): kilobytes // 1024 for pid, kilobytes in peaks.items()},
        "left": paths_below(cache_dir),
    }


@contextmanager
def peak_of_python_workers() -> Iterator[dict[int, int]]:
    """The most memory that each Python of Spark's executors had resident in the block, in kB."""
    peaks: dict[int, int] = {}
    done = threading.Event()

    def look() -> None:
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                if b"pyspark.daemon" in status.with_name("cmdline").read_bytes():
                    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
                    if found and _is_below_us(int(status.parent.name)):
                        peaks[int(status.parent.name)] = int(found[1])

    def watch() -> None:
        while not done.wait(0.1):
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peaks
        look()
    finally:
        done.set()
        watcher.join()


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_below_us(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = _parent(pid)
    return False


def kill_with_children(pid: int) -> None:
    """End a process and all that it started at once, as the kernel does with a container."""
    ours = {pid}
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    while found := {other for other in pids if _parent(other) in ours} - ours:
        ours |= found
    for one in ours:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    wait_until(lambda: not any(_is_running(one) for one in ours), seconds=30)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


# Two drivers -------------------------------------------------------------------


def one_of_two_drivers(name: str, folder: str) -> dict[str, Any]:
    """Three rounds of two drivers with one cache key: both live, the second is killed, the first is killed."""
    pytest.MonkeyPatch().setattr(write, "FILE_BYTES", SMALL_FILE_BYTES)
    marks, cache_dir = Path(folder) / "marks", f"{folder}/cache"
    # One task at a time, and one more for the round in which a driver writes twice.
    spark = start_local_spark(name, master="local[2]")

    def make(round_name: str, release: Path, writer: str = "auto") -> DatasetConverter:
        mark(marks / f"{name} starts {round_name}")
        wait_until((marks / f"first starts {round_name}").exists)
        df = held_rows(spark, release)
        return make_spark_converter(
            df, cache_dir=cache_dir, cache_key=round_name, row_group_bytes=SMALL_ROW_GROUP_BYTES, writer=writer
        )

    # Both are let go at once, in the middle of their writes.
    both = make("both live", marks / "both live")
    result = {"url": both.url, "listed": listed(both), "is_right": is_right(both, HELD_ROWS)}
    mark(marks / f"{name} has read")
    wait_until((marks / "second has read").exists)
    wait_until((marks / "first has read").exists)
    result["entry"] = files_below(folder_of(both))
    mark(marks / f"{name} has looked")
    wait_until((marks / "second has looked").exists)
    if name == "second":
        wait_until((marks / "first has deleted").exists)
        result["is_right_after_delete"] = is_right(both, HELD_ROWS)
    both.delete()
    result["left"] = paths_below(cache_dir)
    mark(marks / f"{name} has deleted").write_text(json.dumps(result))
    wait_until((marks / "second has deleted").exists)
    if name == "second":
        make("one dies", marks / "never")
    survivor = make("one dies", marks / "the second is dead")
    result["survivor"] = {"is_right": is_right(survivor, HELD_ROWS), "entry": files_below(folder_of(survivor))}
    result["swept"] = sweep(cache_dir).num_attempts
    result["survivor"]["swept_entry"] = files_below(folder_of(survivor))
    survivor.delete()
    result["survivor"]["left"] = paths_below(cache_dir)
    mark(marks / "first has survived").write_text(json.dumps(result))
    threading.Thread(target=make, args=("nobody lives", marks / "never", "spark")).start()
    make("nobody lives", marks / "never", "executors")
    return {}


def mark(path: Path) -> Path:
    path.touch()
    return path


HELD_ROWS = 2 * ROWS_OF_A_PARTITION


def held_rows(spark: SparkSession, release: str | Path) -> DataFrame:
    """The rows of `is_right`, the last of them once `release` exists."""
    path = str(release)

    def pass_on(batches: Any) -> Any:
        import os
        import time

        for index, batch in enumerate(batches):
            deadline = time.monotonic() + 90
            while index == 8 and not os.path.exists(path):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield batch

    return spark.range(0, HELD_ROWS, 1, 1).mapInArrow(pass_on, "id long").selectExpr(*_COLUMNS)


# Interrupted before there is a job -----------------------------------------------


def interrupt_the_planning(folder: str) -> dict[str, dict[str, Any]]:
    """Ctrl-C while Spark plans the write of each writer, and what comes of it once Spark may plan on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    spark = start_local_spark("planning", master="local[2]")
    results = {writer: _interrupt_the_planning(spark, Path(folder), writer) for writer in ("executors", "spark")}
    spark.stop()
    return results


def _interrupt_the_planning(spark: SparkSession, folder: Path, writer: str) -> dict[str, Any]:
    cache_dir, begun, release = (folder / f"{name} of {writer}" for name in ("cache", "begun", "release"))
    wait_for_release = wait_for_file(release)
    flag = str(begun)

    class PlannedReader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            import pathlib

            pathlib.Path(flag).touch()
            wait_for_release()
            return [InputPartition(number) for number in range(2)]

        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            yield (partition.value,)

    class PlannedSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return f"planned_for_{writer}"

        def schema(self) -> str:
            return "id long"

        def reader(self, schema: Any) -> DataSourceReader:
            return PlannedReader()

    def interrupt() -> None:
        wait_until(begun.exists)
        os.kill(os.getpid(), signal.SIGINT)

    spark.dataSource.register(PlannedSource)
    store = spark._jsparkSession.sharedState().statusStore()
    num_jobs, num_executions = jobs_count(spark), store.executionsCount()
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    interrupted = False
    try:
        # The key keeps Spark from planning anything but the write.
        make_spark_converter(
            spark.read.format(PlannedSource.name()).load(), cache_dir=cache_dir, cache_key="key", writer=writer
        )
    except KeyboardInterrupt:
        interrupted = True
    interrupter.join()
    jobs_at_once = jobs_count(spark) - num_jobs
    release.touch()

    def has_ended() -> bool:
        executions = store.executionsList()
        found = [executions.apply(number) for number in range(num_executions, executions.size())]
        return bool(found) and all(execution.completionTime().isDefined() for execution in found)

    wait_until(has_ended)
    return {
        "interrupted": interrupted,
        "jobs at once": jobs_at_once,
        "jobs later": jobs_count(spark) - num_jobs,
        "left": paths_below(cache_dir),
    }


def jobs_count(spark: SparkSession) -> int:
    """How many jobs Spark has begun."""
    return int(spark.sparkContext._jsc.sc().statusStore().jobsList(None).size())


# No permission any more ---------------------------------------------------------


def lose_permission(folder: str, is_driver_too: bool) -> dict[str, dict[str, Any]]:
    """The data folder becomes read-only in the middle of the write: for the tasks, or for the driver, too."""
    if os.geteuid() == 0:
        _give_up_the_superusers_right(for_this_process=is_driver_too)
    pytest.MonkeyPatch().setattr(write, "FILE_BYTES", SMALL_FILE_BYTES)
    spark = start_local_spark("permission", master="local[2]")
    results = {
        writer: _recorded(_write_read_only, spark, f"{folder}/{writer}", writer) for writer in ("executors", "spark")
    }
    spark.stop()
    return results


def _write_read_only(spark: SparkSession, cache_dir: str, writer: str) -> dict[str, Any]:
    def pass_on(batches: Any) -> Any:
        import contextlib
        import os
        import time
        from pathlib import Path

        from pyspark import TaskContext

        partition = TaskContext.get().partitionId()
        for index, batch in enumerate(batches):
            deadline = time.monotonic() + 60
            while index == 3 and partition == 0:
                data = next(Path(cache_dir).glob("converter-v1/*/data-*/"), None)
                # The other task renames its folders meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    if data is not None and any(data.rglob("part-00000-*.parquet")):
                        for directory in [data, *(path for path in data.rglob("*") if path.is_dir())]:
                            os.chmod(directory, 0o500)
                        break
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield batch

    df = spark.range(0, 2 * ROWS_OF_A_PARTITION, 1, 2).mapInArrow(pass_on, "id long").selectExpr(*_COLUMNS)
    try:
        make_spark_converter(df, cache_dir=cache_dir, writer=writer, row_group_bytes=SMALL_ROW_GROUP_BYTES)
    except CacheError as error:
        result = describe_error(error)
    else:
        return {"failure": "no error"}
    result["left"] = paths_below(cache_dir)
    for directory in Path(cache_dir).glob("converter-v1/*/data-*/"):
        os.chmod(directory, 0o700)
        for path in directory.rglob("*"):
            if path.is_dir():
                os.chmod(path, 0o700)
    sweep(cache_dir)
    result["left_after_sweep"] = paths_below(cache_dir)
    return result


def describe_error(error: CacheError) -> dict[str, Any]:
    """What is promised of an error, and the errors behind it."""

    def name(found: BaseException | None) -> str:
        return "" if found is None else f"{type(found).__module__}.{type(found).__name__}"

    return {
        "message": str(error),
        "path": error.path,
        "cause": name(error.__cause__),
        "context": [name(error.__context__), str(error.__context__)[:5000]],
    }


def _give_up_the_superusers_right(*, for_this_process: bool) -> None:
    """Let permissions count for what this process starts, and for itself: else root writes where nobody may."""
    libc = ctypes.CDLL(None, use_errno=True)
    drop_from_bounding_set, override, read_search = 24, 1, 2
    for capability in (override, read_search):
        if libc.prctl(drop_from_bounding_set, capability, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
    if for_this_process:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        data = (ctypes.c_uint32 * 6)()
        if libc.capget(header, data):
            raise OSError(ctypes.get_errno(), "capget")
        for word in (0, 1):  # Effective and permitted, of the capabilities below 32.
            data[word] &= ~(1 << override | 1 << read_search)
        if libc.capset(header, data):
            raise OSError(ctypes.get_errno(), "capset")
