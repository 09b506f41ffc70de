"""Spark's errors in one line, its jobs' progress, and the slower ways where its private parts are missing."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark.cloudpickle
import pyspark.util
import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from converter import MissingDependencyError, SourceError
from converter.sources.spark import choose, jobs, progress, session
from converter.sources.spark.delta_version import find_delta_version
from converter.sources.spark.jobs import finding_in, naming_the_end_of_spark, short_cause
from converter.sources.spark.progress import check_progress, progress_bar
from converter.storage.opening import open_storage

STACK = "".join(f"\tat org.apache.spark.Some.method{number}(Some.scala:{number})\n" for number in range(200))
TRACEBACK = """Traceback (most recent call last):
  File "/x/job.py", line 3, in fail
    raise ValueError(f"no value for {number}")
ValueError: no value for 777
"""


FAILED_WRITE = "org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows to file:/x."
CRASHED = "org.apache.spark.SparkException: Python worker exited unexpectedly"
ANCIENT = "org.apache.spark.SparkUpgradeException: [INCONSISTENT.WRITE_ANCIENT_DATETIME] Writing dates before 1582."


GRPC = (
    "<_InactiveRpcError of RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n"
    '\tdetails = "failed to connect to all addresses"\n\tdebug_error_string = "UNAVAILABLE"\n>'
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"An error occurred while calling o1.collect.\n: {TRACEBACK}{STACK}", "ValueError: no value for 777"),
        # Spark Connect 4.2 begins the traceback in the middle of a line.
        (f"[PYTHON_EXCEPTION] The Python worker said: {TRACEBACK}{STACK}", "ValueError: no value for 777"),
        (f"An error occurred while calling o1.x.\n: {FAILED_WRITE}\n{STACK}Caused by: {ANCIENT}\n{STACK}", ANCIENT),
        (
            f"Job aborted.\n{STACK}Caused by: java.io.IOException: Disk is full\n{STACK}",
            "java.io.IOException: Disk is full",
        ),
        (
            f"{FAILED_WRITE}\n{STACK}Caused by: {FAILED_WRITE}\n{STACK}Caused by: java.io.IOException: Mkdirs\n{STACK}",
            "java.io.IOException: Mkdirs",
        ),
        (f"{FAILED_WRITE}\n{STACK}", FAILED_WRITE),
        (
            f"x\n{STACK}{CRASHED} (crashed). Consider setting 'spark.x'\n{STACK}Caused by: java.io.EOFException\n",
            "Python worker exited unexpectedly",
        ),
        ("plain\nwords", "plain"),
        (
            GRPC,
            "failed to connect to all addresses",
        ),
        ("", "Exception"),
    ],
    ids=[
        "traceback",
        "in a line",
        "task write failed",
        "java",
        "both",
        "task alone",
        "crash",
        "plain",
        "grpc",
        "nothing",
    ],
)
def test_the_cause_of_a_spark_error_is_one_line(text: str, cause: str) -> None:
    assert short_cause(Exception(text)) == cause


def test_a_cause_that_the_text_leaves_out_is_looked_for_behind_the_error() -> None:
    class CapturedError(Exception):
        def __init__(self, text: str, cause: Exception | None = None) -> None:
            super().__init__(text)
            self.cause = cause

    behind = CapturedError(FAILED_WRITE, CapturedError(f"java.io.IOException: Mkdirs failed\n{STACK}"))
    assert short_cause(CapturedError(f"{FAILED_WRITE}\n{STACK}", behind)) == "java.io.IOException: Mkdirs failed"


def test_what_an_executor_found_is_read_from_the_text() -> None:
    text = f'[X] boom: ValueError: converter finding: {{"kind": "jagged", "column": "a \\"b"}}\n{STACK}'
    assert finding_in(Exception(text)) == {"kind": "jagged", "column": 'a "b'}
    assert finding_in(Exception("something else")) is None


class Session:
    """Of Spark's, what tells one from another."""

    def __init__(self, application: str) -> None:
        self.conf = {"spark.app.id": application}


def test_executors_are_asked_again_where_something_else_is_to_be_tried() -> None:
    first: Any = Session("app-1")
    url = "abfss://data@lake.dfs.core.windows.net/cache/converter-v1/key/1"

    def place(options: dict[str, Any], session: Any = first, url: str = url) -> tuple[str, ...]:
        return choose.place_of(open_storage(url, options), session)

    wrong = place({"account_key": "d3Jvbmc="})
    assert place({"account_key": "d3Jvbmc="}) == wrong
    assert place({"account_key": "cmlnaHQ="}) != wrong
    assert place({"account_key": "d3Jvbmc="}, url=url.replace("/key/1", "/other/2")) == wrong
    assert place({"account_key": "d3Jvbmc="}, Session("app-2")) != wrong
    assert place({"credential": open_storage}) == place({"credential": open_storage})
    assert "d3Jvbmc" not in str(wrong)


class ScriptedTracker:
    """What Spark's status tracker says, look after look; the last of it stays."""

    def __init__(self, *looks: list[tuple[int, int, int]]) -> None:
        self.looks, self.at, self.is_over = list(looks), -1, threading.Event()

    def getJobIdsForGroup(self, group: str) -> list[int]:  # noqa: N802 (Spark's name)
        assert group == "job"
        self.at += 1
        if self.at >= len(self.looks):
            self.is_over.set()
        return [0]

    def getJobInfo(self, job: int) -> Any:  # noqa: N802 (Spark's name)
        return SimpleNamespace(stageIds=range(len(self.look)))

    def getStageInfo(self, stage: int) -> Any:  # noqa: N802 (Spark's name)
        tasks, active, done = self.look[stage]
        return SimpleNamespace(numTasks=tasks, numActiveTasks=active, numCompletedTasks=done)

    @property
    def look(self) -> list[tuple[int, int, int]]:
        return self.looks[min(self.at, len(self.looks) - 1)]


class LateTracker:
    """What Spark says of a job that was cancelled as it began: nothing, then that it runs, then of its tasks."""

    def __init__(self, *looks: tuple[str, int]) -> None:
        self.looks = list(looks)

    def getJobIdsForGroup(self, group: str) -> list[int]:  # noqa: N802 (Spark's name)
        if group == "job" and len(self.looks) > 1:
            self.looks.pop(0)
        return [0] if self.looks[0][0] else []

    def getJobInfo(self, job: int) -> Any:  # noqa: N802 (Spark's name)
        return SimpleNamespace(stageIds=[job], status=self.looks[0][0])

    def getStageInfo(self, _: int) -> Any:  # noqa: N802 (Spark's name)
        return SimpleNamespace(numActiveTasks=self.looks[0][1])


def test_tasks_are_waited_for_though_spark_tells_of_their_job_late() -> None:
    tracker = LateTracker(*[("", 0)] * 3, *[("RUNNING", 0)] * 8, *[("FAILED", 2)] * 10, ("FAILED", 0))
    jobs._wait_for_tasks(tracker, "job")
    assert tracker.looks == [("FAILED", 0)]


class Context:
    """Of Spark's, a thread's properties, which a Ctrl-C at the n-th call of `setLocalProperty` makes anew."""

    def __init__(self, interrupted_at: int) -> None:
        self.properties: dict[str, str | None] = {}
        self.calls, self.interrupted_at = 0, interrupted_at

    def getLocalProperty(self, key: str) -> str | None:  # noqa: N802 (Spark's name)
        return self.properties.get(key)

    def setLocalProperty(self, key: str, value: str | None) -> None:  # noqa: N802 (Spark's name)
        self.properties[key] = value
        self.calls += 1
        if self.calls == self.interrupted_at:
            self.properties = {}
            raise KeyboardInterrupt

    def cancelJobGroup(self, group: str) -> None:  # noqa: N802 (Spark's name)
        pass

    def statusTracker(self) -> Any:  # noqa: N802 (Spark's name)
        return SimpleNamespace(getJobIdsForGroup=lambda _: [])


@pytest.mark.parametrize("interrupted_at", range(1, 8))
def test_a_threads_properties_are_given_back_though_a_ctrl_c_comes_meanwhile(interrupted_at: int) -> None:
    context = Context(interrupted_at)
    own: dict[str, str | None] = {"spark.jobGroup.id": "mine", "spark.job.description": None}
    context.properties = dict(own)
    expected: Any = contextlib.nullcontext() if interrupted_at == 7 else pytest.raises(KeyboardInterrupt)
    with expected, jobs.write_job(SimpleNamespace(sparkContext=context), False, "job"):
        assert context.properties["spark.jobGroup.id"] == "job"
    assert context.properties == {**own, "spark.job.interruptOnCancel": None}


def clean_up_after(first: BaseException, second: type[Exception]) -> None:
    """Fail with `first` in a block, and then with `second` in what cleans up after it."""
    with naming_the_end_of_spark("It failed"):
        try:
            raise first
        finally:
            raise second("Answer from Java side is empty")


@pytest.mark.parametrize("second", [Py4JNetworkError, UnboundLocalError])
def test_a_ctrl_c_is_not_hidden_by_what_it_broke(second: type[Exception]) -> None:
    with pytest.raises(KeyboardInterrupt):
        clean_up_after(KeyboardInterrupt(), second)


def ends_all_behind(first: BaseException) -> bool:
    """What is thought of an error of py4j that comes while `first` is handled, in a block that may be interrupted."""
    with naming_the_end_of_spark("It failed"):
        try:
            raise first
        except BaseException:  # noqa: BLE001 (as in py4j)
            try:
                raise Py4JError("Gateway must be connected to send cancel cmd.")
            except Py4JError as error:
                return session.ends_all(error)
    raise AssertionError


def test_only_a_ctrl_c_of_the_block_is_more_than_a_doubt() -> None:
    assert ends_all_behind(KeyboardInterrupt())
    assert not ends_all_behind(ValueError())
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert not ends_all_behind(ValueError())


def test_other_errors_of_cleaning_up_are_told() -> None:
    with pytest.raises(SourceError):
        clean_up_after(ValueError(), Py4JNetworkError)


def test_a_ctrl_c_that_the_caller_handles_is_not_raised_again() -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(SourceError, match=r"It failed: Spark's JVM has ended"):
            clean_up_after(ValueError(), Py4JNetworkError)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


PLANNED_LATE: list[list[tuple[int, int, int]]] = [
    [],
    [(4, 0, 0)],
    [(4, 2, 0)],
    [(4, 1, 3)],
    [(4, 0, 4), (2000, 2, 0)],
    [(2000, 0, 2000)],
]
"""A job without stages, then two of them, of which the first is forgotten at the end."""


def follow(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, wanted: bool | None) -> str:
    """What stands on stderr while and after a scripted job is followed."""
    monkeypatch.setattr(progress, "_SHOW_SECONDS", 0.001)
    monkeypatch.setattr(sys, "stderr", stderr)
    tracker = ScriptedTracker(*PLANNED_LATE)
    session = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker))
    with progress_bar(session, False, "job", wanted):
        if wanted or stderr.isatty():
            assert tracker.is_over.wait(60)
    return stderr.getvalue()


@pytest.mark.parametrize(("stderr", "wanted"), [(Terminal(), None), (Terminal(), True), (io.StringIO(), True)])
def test_the_bar_says_planning_until_it_knows_the_tasks(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, wanted: bool | None
) -> None:
    text = follow(monkeypatch, stderr, wanted)
    shown = [re.sub(r"\[.*", "", line).strip() for line in text.split("\r") if line.strip()]
    assert list(dict.fromkeys(shown)) == [
        "Writing the cache: planning",
        "Writing the cache: 0 of 4 tasks",
        "Writing the cache: 3 of 4 tasks",
        "Writing the cache: 4 of 2,004 tasks",
        "Writing the cache: 2,000 of 2,004 tasks",
    ]
    if not stderr.isatty():
        # A log has each of them once.
        assert len(shown) == 5
    # Erased at the end.
    assert not text.split("\r")[-2].strip()
    assert text.endswith("\r")


def test_what_is_written_is_told_from_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = progress.Written(open_storage(f"{tmp_path}"))
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 0.0)
    assert written() == ""
    (tmp_path / "half.parquet").write_bytes(b"PAR1")
    assert re.fullmatch(r", 0 MB \(0 MB/s\)", written())
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(500_000)}), tmp_path / "whole.parquet")
    # Two seconds later the files are listed anew; here at once.
    told = re.fullmatch(r", (\d+) MB \(\d+ MB/s\), about (500,\d\d\d) rows", written())
    assert told is not None
    assert int(told[1]) == round((tmp_path / "whole.parquet").stat().st_size / 1e6)
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 1e6)
    (tmp_path / "whole.parquet").unlink()
    assert written().endswith("rows")


@pytest.mark.parametrize(("stderr", "wanted"), [(io.StringIO(), None), (io.StringIO(), False), (Terminal(), False)])
def test_no_bar_is_shown_where_nobody_looks_or_wants_it(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, wanted: bool | None
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress_bar(None, False, "job", wanted):
        pass
    assert stderr.getvalue() == ""


def test_without_tqdm_a_bar_that_was_asked_for_is_an_error_and_another_one_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(MissingDependencyError, match=r"progress=True needs tqdm, which is not installed: pip install"):
        check_progress(True)
    check_progress(None)
    check_progress(False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress_bar(None, False, "job", None):
        pass
    assert sys.stderr.getvalue() == ""


class JobWithoutPrivateParts:
    """A job of a Spark whose private parts are elsewhere: `_jdf` is not there, or cannot send batches."""

    def __init__(self, frame: Any = None) -> None:
        if frame is not None:
            self._jdf = frame

    def collect(self) -> list[dict[str, Any]]:
        return [{"partition": 0, "report": "a"}, {"partition": 1, "report": "b"}]

    def explain(self, mode: str) -> None:
        print(mode)


class FrameWithoutMethods:
    def collectAsArrowToPython(self) -> Any:  # noqa: N802 (Spark's name)
        raise Py4JError("Method collectAsArrowToPython([]) does not exist")


@pytest.mark.parametrize("frame", [None, object(), FrameWithoutMethods()])
def test_reports_are_collected_where_spark_cannot_stream_them(frame: Any) -> None:
    job = JobWithoutPrivateParts(frame)
    assert list(session.stream_reports(job)) == list(session.collect_reports(job)) == [(0, "a"), (1, "b")]


def test_reports_are_collected_where_pyspark_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect_otherwise(port: int) -> None:
        raise AssertionError(port)

    monkeypatch.setattr(pyspark.util, "local_connect_and_auth", connect_otherwise)
    job = JobWithoutPrivateParts(SimpleNamespace(collectAsArrowToPython=lambda: (1, "secret", None)))
    assert list(session.stream_reports(job)) == [(0, "a"), (1, "b")]


@pytest.mark.parametrize("frame", [None, object(), FrameWithoutMethods()])
def test_what_cannot_be_seen_of_a_plan_is_a_doubt_and_no_error(frame: Any) -> None:
    job = JobWithoutPrivateParts(frame)
    assert session.count_scan_partitions(job) is None
    assert session.count_local_lists(job) == 0
    assert find_delta_version(job) is None


def test_without_registration_by_value_the_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pyspark.cloudpickle, "register_pickle_by_value")
    monkeypatch.delattr(pyspark.cloudpickle, "unregister_pickle_by_value")
    with session.travels_by_value(), session.travels_by_value():
        assert session._by_value_users == 2
    assert session._by_value_users == 0


def test_without_a_jvm_no_other_user_is_named() -> None:
    directory: Any = SimpleNamespace(user="alice")
    assert choose.find_other_user(directory, SimpleNamespace()) is None


def test_a_ctrl_c_while_the_thread_of_the_bar_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_and_fail(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "converter-progress":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_fail)
    with pytest.raises(KeyboardInterrupt):
        follow(monkeypatch, io.StringIO(), True)
    assert not [thread for thread in threading.enumerate() if thread.name == "converter-progress"]
