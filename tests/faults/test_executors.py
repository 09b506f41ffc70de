"""Tasks fail, run twice, are killed, are too big: every row arrives once, and nothing else stays on disk.

All of it is real: executors and drivers are processes, and what ends them is a signal.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from converter import CacheError, make_spark_converter, sweep
from converter.sources.spark import write
from tests.faults.spark_programs import (
    PARTITIONS,
    big_on_one_executor,
    describe_error,
    faults_on_a_cluster,
    folder_of,
    interrupt_the_planning,
    kill_with_children,
    listed,
    lose_permission,
    one_of_two_drivers,
    stored,
)
from tests.folders import paths_below
from tests.processes import run_python, start_python
from tests.rows import concatenate
from tests.waiting import slow_rows, wait_until

MARKER_ALONE = ["converter-v1", "converter-v1/.owner"]
FAULTS = ("fails at once", "fails late", "slow", "killed")
WRITERS = ("executors", "spark")
Results = dict[str, dict[str, Any]]


@pytest.fixture(autouse=True)
def nobody_waits_for_late_tasks() -> None:
    """Here executors do run, so that abandoning waits for them as it does for users."""


def succeeded(results: Results, name: str) -> dict[str, Any]:
    result = results[name]
    assert "failure" not in result, result["failure"]
    return result


# Tasks that fail, run twice, or lose their executor ------------------------------


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Results:
    results: Results = run_cluster_program(faults_on_a_cluster, tmp_path_factory, list(FAULTS), list(WRITERS))
    return results


def run_cluster_program(program: Any, tmp_path_factory: pytest.TempPathFactory, *arguments: Any) -> Any:
    folder = tmp_path_factory.mktemp(program.__name__)
    environment = {"SPARK_WORKER_DIR": str(folder / "worker")}
    with start_python(program, str(folder), *arguments, environment=environment) as process:
        output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors[-5000:]
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_row_arrives_once_whatever_becomes_of_a_task(faults: Results, fault: str, writer: str) -> None:
    result = succeeded(faults, f"{fault}, {writer}")
    assert result["attempts"]["2"] >= 2, "the fault never happened"
    assert result["is_right"]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_only_the_files_of_the_winning_attempts_stay(faults: Results, fault: str, writer: str) -> None:
    result = succeeded(faults, f"{fault}, {writer}")
    assert len(result["listed"]) >= PARTITIONS
    assert result["at_commit"] == result["listed"]
    assert result["stored"] == result["listed"]
    assert result["written_left"] == []
    if writer == "executors" and fault != "fails at once":
        assert result["written"] >= 1, "the attempt had written nothing when it met its end"
    assert result["left"] == MARKER_ALONE


def test_reports_that_died_with_their_executor_are_written_again(faults: Results) -> None:
    # What an executor keeps of finished tasks (the reports on their way to the last stage) goes with it.
    attempts = succeeded(faults, "killed, executors")["attempts"]
    assert sum(attempts.values()) > PARTITIONS + 1, attempts


# Partitions and rows that are bigger than memory ---------------------------------


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Results:
    results: Results = run_cluster_program(big_on_one_executor, tmp_path_factory)
    return results


def assert_big_rows_are_right(result: dict[str, Any], *, value_bytes: int) -> None:
    assert result["ids_are_right"]
    assert result["wrong_values"] == 0
    assert result["value_bytes"] == value_bytes
    assert result["stored"] == result["listed"]
    assert result["left"] == MARKER_ALONE


def test_a_partition_of_two_gigabytes_needs_little_memory(big: Results) -> None:
    result = succeeded(big, "two_gigabytes")
    assert_big_rows_are_right(result, value_bytes=1_000_000 * 512 * 4)
    assert result["peak_mb"], "no Python worker was seen"
    assert max(result["peak_mb"].values()) < 400
    # One partition makes files of half a GB, and not one of two.
    assert len(result["file_bytes"]) == 4
    assert max(result["file_bytes"]) < write.FILE_BYTES + 16 * 2**20


@pytest.mark.parametrize(
    ("name", "value_bytes"),
    [("wide_arrays", 300 * 2_000_000), ("wide_texts", 100 * 2_000_000), ("wide_bytes", 100 * 2_000_000)],
)
def test_rows_of_two_megabytes_pass_through_a_small_executor(big: Results, name: str, value_bytes: int) -> None:
    assert_big_rows_are_right(succeeded(big, name), value_bytes=value_bytes)


# Two drivers -------------------------------------------------------------------


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two drivers with one cache found; the second was killed in its second write, the first in its third."""
    folder = tmp_path_factory.mktemp("drivers")
    marks, cache_dir = folder / "marks", folder / "cache"
    marks.mkdir()

    def num_writing() -> int:
        return len({path.parent for path in cache_dir.glob("converter-v1/*/data-*/part-*-0001.parquet")})

    with (
        start_python(one_of_two_drivers, "first", str(folder)) as first,
        start_python(one_of_two_drivers, "second", str(folder)) as second,
    ):

        def wait(claim: Any) -> None:
            wait_until(lambda: claim() or first.poll() is not None)
            assert first.poll() is None, first.communicate()[1][-5000:]

        wait(lambda: num_writing() == 2)
        both_writing = num_writing()
        (marks / "both live").touch()
        wait((marks / "second has deleted").exists)
        wait(lambda: num_writing() == 2)
        kill_with_children(second.pid)
        dead = [str(path) for path in cache_dir.glob("converter-v1/*/*.intent") if pid_of(path) == second.pid]
        (marks / "the second is dead").touch()
        wait((marks / "first has survived").exists)
        wait(lambda: num_writing() == 1 and list(cache_dir.glob("converter-v1/*/data-*/_temporary")))
        kill_with_children(first.pid)
    left_by_both = paths_below(cache_dir)
    report = sweep(cache_dir)
    return {
        "both_writing": both_writing,
        "first": json.loads((marks / "first has survived").read_text()),
        "second": json.loads((marks / "second has deleted").read_text()),
        "dead": dead,
        "left_by_both": left_by_both,
        "swept": [report.num_entries, report.num_attempts, report.num_files],
        "left": paths_below(cache_dir),
    }


def pid_of(intent: Path) -> int:
    pid: int = json.loads(intent.read_bytes())["pid"]
    return pid


def test_two_drivers_that_write_at_once_make_one_entry(drivers: dict[str, Any]) -> None:
    first, second = drivers["first"], drivers["second"]
    assert drivers["both_writing"] == 2
    assert first["is_right"]
    assert second["is_right"]
    assert first["url"] == second["url"]
    assert first["listed"] == second["listed"]
    # One manifest, the files of one attempt, a lease of each.
    assert first["entry"] == second["entry"]
    assert sum(name.startswith("lease-") for name in first["entry"]) == 2
    others = [name for name in first["entry"] if not name.startswith("lease-")]
    assert others == [*first["listed"], "manifest.json"]


def test_the_second_driver_reads_on_after_the_first_has_deleted(drivers: dict[str, Any]) -> None:
    assert drivers["second"]["is_right_after_delete"]
    assert drivers["second"]["left"] == MARKER_ALONE


def test_a_driver_survives_another_that_is_killed(drivers: dict[str, Any]) -> None:
    survivor = drivers["first"]["survivor"]
    assert len(drivers["dead"]) == 1
    assert survivor["is_right"]
    assert not any(name.endswith(".intent") for name in survivor["swept_entry"])
    assert len({name.partition("/")[0] for name in survivor["swept_entry"] if name.startswith("data-")}) == 1
    assert survivor["left"] == MARKER_ALONE


def test_a_sweep_removes_what_a_killed_driver_left(drivers: dict[str, Any]) -> None:
    assert any(name.endswith(".parquet") for name in drivers["left_by_both"])
    entries, attempts, files = drivers["swept"]
    assert (entries, attempts) == (0, 2)
    assert files >= 2
    assert [
        name for name in drivers["left"] if name.endswith((".parquet", ".intent")) and "_temporary" not in name
    ] == []


def test_a_sweep_removes_what_sparks_writer_had_begun(drivers: dict[str, Any]) -> None:
    assert any(name.endswith("/_temporary") for name in drivers["left_by_both"])
    assert drivers["left"] == MARKER_ALONE


# Interrupted before there is a job -----------------------------------------------


@pytest.fixture(scope="module")
def planning(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What `interrupt_the_planning` saw."""
    return run_python(interrupt_the_planning, str(tmp_path_factory.mktemp("planning")))


@pytest.mark.parametrize("writer", WRITERS)
def test_a_write_that_is_interrupted_while_spark_plans_it_comes_to_no_job(planning: Results, writer: str) -> None:
    assert planning[writer] == {
        "interrupted": True, "jobs at once": 0, "jobs later": 0, "left": MARKER_ALONE,
    }  # fmt: skip


# No permission, no space ---------------------------------------------------------


# Hadoop does not say why it could not make a folder; a file, where the folder stands already.
NO_PERMISSION = {
    "executors": ["PermissionError: [Errno 13] Permission denied"],
    # Where a task opens a file, and where it has written all of them.
    "spark": ["java.io.IOException: Mkdirs failed", "(Permission denied)", "java.io.IOException: Could not rename"],
}


def assert_is_short_and_names_the_path(result: dict[str, Any], cache_dir: Path, reasons: list[str]) -> None:
    assert f"Spark could not write the cache into {result['path']}: " in result["message"]
    assert any(why in result["message"] for why in reasons), (result["message"], result["context"])
    assert len(result["message"]) < 600
    assert "\n" not in result["message"]
    assert Path(result["path"]).is_relative_to(cache_dir)
    assert result["cause"].startswith(("pyspark.", "py4j."))


@pytest.mark.skipif(os.geteuid() != 0, reason="who is not root loses the permission together with the tasks")
def test_tasks_that_lose_the_permission_to_write_leave_nothing(tmp_path: Path) -> None:
    results: Results = run_python(lose_permission, str(tmp_path), False)
    for writer in WRITERS:
        result = succeeded(results, writer)
        assert_is_short_and_names_the_path(result, tmp_path / writer, NO_PERMISSION[writer])
        assert result["left"] == MARKER_ALONE


@pytest.fixture(scope="module")
def locked_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """Where two drivers, one for each writer, lost the permission to write, and what they found."""
    folder = tmp_path_factory.mktemp("locked_out")
    return folder, run_python(lose_permission, str(folder), True)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_driver_that_loses_the_permission_too_says_what_spark_said(
    locked_out: tuple[Path, Results], writer: str
) -> None:
    folder, results = locked_out
    result = succeeded(results, writer)
    assert_is_short_and_names_the_path(result, folder / writer, NO_PERMISSION[writer])


@pytest.mark.parametrize("writer", WRITERS)
def test_what_a_driver_could_not_remove_is_swept_once_it_can_be(locked_out: tuple[Path, Results], writer: str) -> None:
    result = succeeded(locked_out[1], writer)
    assert any(".parquet" in name for name in result["left"])
    assert result["left_after_sweep"] == MARKER_ALONE


def test_a_file_that_cannot_grow_is_one_short_error_and_leaves_nothing(
    spark: SparkSession, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = str(cache_dir)

    def bound_the_writer(batches: Any) -> Any:
        """Let no file of the process that writes this partition grow any more, as on a full disk."""
        import os
        import resource
        import time
        from pathlib import Path

        from pyspark import TaskContext

        context = TaskContext.get()
        ours = f"/part-{context.partitionId():05d}-{context.taskAttemptId():08x}-"
        deadline, is_bound = time.monotonic() + 60, context.partitionId() == 0
        for index, batch in enumerate(batches):
            while index == 3 and not is_bound:
                for link in Path("/proc").glob("[0-9]*/fd/*"):
                    try:
                        target = os.readlink(link)
                    except OSError:
                        continue
                    if target.startswith(where) and ours in target and os.path.getsize(target):
                        _, hard = resource.prlimit(int(link.parts[2]), resource.RLIMIT_FSIZE)
                        resource.prlimit(int(link.parts[2]), resource.RLIMIT_FSIZE, (os.path.getsize(target), hard))
                        is_bound = True
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield batch

    monkeypatch.setattr(write, "FILE_BYTES", 200_000)
    df = (
        spark.range(0, 200_000, 1, 2).mapInArrow(bound_the_writer, "id long").selectExpr("id", "array(id, -id) AS pair")
    )
    with pytest.raises(CacheError, match=r"Spark could not write the cache into .*File too large") as caught:
        make_spark_converter(df, cache_dir=cache_dir, row_group_bytes=64 << 10)
    assert_is_short_and_names_the_path(describe_error(caught.value), cache_dir, ["OSError: [Errno 27] File too large"])
    assert paths_below(cache_dir) == MARKER_ALONE


# Wide and skewed tables ----------------------------------------------------------

KINDS = {"float": 500, "long": 400, "string": 100}
SIGNS = ("plain", "with space", "dot.ted", 'double"quote', "single'quote", "a=b", "žluť 🐟", "back`tick", "a,b;{c}(d)")


def thousand_names() -> list[tuple[str, str, int]]:
    return [
        (f"{SIGNS[index % len(SIGNS)]} {kind} {index}", kind, index)
        for kind, count in KINDS.items()
        for index in range(count)
    ]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_thousand_columns_keep_their_names_and_values(spark: SparkSession, cache_dir: Path, writer: str) -> None:
    of_kind = {
        "float": "cast(id % 977 + {0} as float)",
        "long": "id * 1000003 + {0}",
        "string": "concat(id, ':', {0})",
    }
    columns = [
        f"{of_kind[kind].format(index)} AS `{name.replace('`', '``')}`" for name, kind, index in thousand_names()
    ]
    df = spark.range(0, 3000, 1, 2).selectExpr("id", *columns)
    with make_spark_converter(df, cache_dir=cache_dir, writer=writer) as converter:
        with converter.make_batch_reader(batch_size=1000) as reader:
            found = concatenate(list(reader))
        assert stored(converter) == listed(converter)
    ids = np.arange(3000)
    assert list(found) == ["id", *(name for name, _, _ in thousand_names())]
    np.testing.assert_array_equal(found["id"], ids)
    for name, kind, index in thousand_names():
        if kind == "string":
            assert found[name].tolist() == [f"{row}:{index}" for row in range(3000)], name
            continue
        expected = (ids % 977 + index).astype("f4") if kind == "float" else ids * 1_000_003 + index
        np.testing.assert_array_equal(found[name], expected, err_msg=name, strict=True)
    assert paths_below(cache_dir) == MARKER_ALONE


def skewed_rows(spark: SparkSession) -> DataFrame:
    """Three partitions of 10, 100,000 and 0 rows, some 130 bytes each."""
    ids = (
        "CASE id WHEN 0 THEN sequence(0L, 9L) WHEN 1 THEN sequence(10L, 100009L) ELSE cast(array() AS array<long>) END"
    )
    columns = ("id", "array_repeat(cast(id as float), 24) AS numbers", "concat('row number ', id) AS text")
    return spark.range(0, 3, 1, 3).selectExpr(f"explode({ids}) AS id").selectExpr(*columns)


def row_groups(path: Path) -> list[int]:
    """The bytes of each row group of a file, by its footer."""
    footer = pq.ParquetFile(path).metadata
    return [footer.row_group(index).total_byte_size for index in range(footer.num_row_groups)]


@pytest.mark.parametrize("file_bytes", [512 << 20, 2 << 20], ids=["one file", "many files"])
def test_row_groups_and_files_are_of_the_stated_size(
    spark: SparkSession, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int
) -> None:
    asked = 64 << 10
    monkeypatch.setattr(write, "FILE_BYTES", file_bytes)
    with make_spark_converter(skewed_rows(spark), cache_dir=cache_dir, row_group_bytes=asked) as converter:
        assert stored(converter) == listed(converter)
        paths = sorted((folder_of(converter) / name for name in listed(converter)), key=lambda path: path.name)
        groups = {path.name: row_groups(path) for path in paths}
        sizes = {path.name: path.stat().st_size for path in paths}
        with converter.make_batch_reader(batch_size=10_000) as reader:
            found = concatenate(list(reader))
    ids = np.arange(100_010)
    np.testing.assert_array_equal(found["id"], ids)
    np.testing.assert_array_equal(found["numbers"], np.repeat(ids.astype("f4")[:, None], 24, axis=1))
    assert found["text"].tolist() == [f"row number {row}" for row in range(100_010)]
    assert paths_below(cache_dir) == MARKER_ALONE

    of_ten_rows, *of_many_rows = groups
    assert len(groups[of_ten_rows]) == 1
    assert groups[of_ten_rows][0] < asked
    together = [size for name in of_many_rows for size in groups[name]]
    assert sum(together) > 12_000_000
    assert len(together) > 150
    last = groups[of_many_rows[-1]]
    for size in together[:-1] if len(last) == 1 else together:
        assert 0.5 * asked <= size <= 1.5 * asked
    if file_bytes > sum(together):
        assert len(of_many_rows) == 1
        return
    assert len(of_many_rows) > 5
    for name in of_many_rows[:-1]:
        # It is closed after the row group that fills it; the footer comes on top.
        footer_bytes = sizes[name] - sum(groups[name])
        assert file_bytes <= sizes[name] - footer_bytes + 4096
        assert sizes[name] < file_bytes + 1.5 * asked + footer_bytes
        assert footer_bytes < 0.05 * file_bytes


# What Spark's UI shows -----------------------------------------------------------


def jobs_of(spark: SparkSession) -> list[dict[str, Any]]:
    """What the store behind Spark's UI knows of every job."""
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    return [
        {
            "id": job.jobId(),
            "group": value_of(job.jobGroup()),
            "description": value_of(job.description()),
            "status": job.status().toString(),
        }
        for job in (jobs.apply(index) for index in range(jobs.size()))
    ]


def value_of(option: Any) -> Any:
    return option.get() if option.isDefined() else None


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("is_named", [True, False], ids=["named by the user", "without a name"])
def test_jobs_are_named_while_writing_and_the_users_own_names_come_back(
    spark: SparkSession, cache_dir: Path, tmp_path: Path, writer: str, is_named: bool
) -> None:
    context = spark.sparkContext
    names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    if is_named:
        context.setJobGroup("the user's", "what the user does", interruptOnCancel=True)
    own = [context.getLocalProperty(name) for name in names]
    known = {job["id"] for job in jobs_of(spark)}
    seen: list[dict[str, Any]] = []
    active: list[list[int]] = []

    def watch() -> None:
        while not seen and not (tmp_path / "release").exists():
            seen.extend(job for job in jobs_of(spark) if job["id"] not in known and job["status"] == "RUNNING")
            time.sleep(0.02)
        active.append([job for one in seen for job in context.statusTracker().getJobIdsForGroup(one["group"])])
        (tmp_path / "release").touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with make_spark_converter(
            slow_rows(spark, tmp_path / "release"), cache_dir=cache_dir, writer=writer
        ) as converter:
            (tmp_path / "release").touch()
            watcher.join()
            (data,) = folder_of(converter).glob("data-*/")
            assert [context.getLocalProperty(name) for name in names] == own
            spark.range(3).count()
            mine = [job for job in jobs_of(spark) if job["id"] not in known]
    finally:
        (tmp_path / "release").touch()
        watcher.join()
        for name in names:
            context.setLocalProperty(name, None)
    expected = {"group": f"converter-{data.name}", "description": "converter: write the cache"}
    assert seen
    for job in seen:
        assert {name: job[name] for name in expected} == expected
    assert active[0]
    written = [job for job in mine if job["group"] == expected["group"]]
    assert {job["description"] for job in written} == {expected["description"]}
    after = max(mine, key=lambda job: job["id"])
    assert after["group"] == ("the user's" if is_named else None)
    if is_named:
        assert after["description"] == "what the user does"
    assert paths_below(cache_dir) == MARKER_ALONE
