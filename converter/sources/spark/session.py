"""What surrounds a Spark job: confs, description, progress, the cause of a failure; all of it given back afterwards."""

from __future__ import annotations

import contextlib
import contextvars
import importlib.util
import io
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import pyarrow as pa

from converter.errors import MissingDependencyError
from converter.portable import moments, redaction, tasks

logger = logging.getLogger(__name__)

_CANCEL_SECONDS = 30.0
"""How long a cancelled job may take to let go of its tasks."""

_SHOW_SECONDS = 0.5
"""Between two looks at a job's tasks: a terminal and a notebook both follow that."""

_MAX_CAUSE = 400
_MAX_COMMAND_BYTES = 4096
"""What classic Spark runs for a list's rows are 1.4 kB of pickled functions, all its own."""


@contextlib.contextmanager
def changed_confs(session: Any, wanted: Mapping[str, str]) -> Iterator[None]:
    """Session confs changed for a while; one that the platform refuses stays as it is."""
    before: dict[str, str | None] = {}
    try:
        for name, value in wanted.items():
            try:
                explicit = session.conf.get(name, None)
                session.conf.set(name, value)
            except Exception as error:  # noqa: BLE001 (each platform refuses with an error of its own)
                logger.debug("Spark keeps %s as it is: %s", name, error)
                continue
            before[name] = explicit
        yield
    finally:
        for name, explicit in before.items():
            try:
                if explicit is None:
                    session.conf.unset(name)
                else:
                    session.conf.set(name, explicit)
            except Exception as error:  # noqa: BLE001 (the others are still to be given back)
                logger.warning("Could not give the conf %s back as it was: %s", name, error)


def has_adaptive_plan(df: Any) -> bool:
    """Whether Spark would change the plan while it runs, as it does where rows are exchanged between executors."""
    return "AdaptiveSparkPlan" in explain(df, "simple")


def count_scan_partitions(df: Any) -> int | None:
    """How many tasks will run a classic DataFrame that exchanges no rows; None where only running it would tell."""
    if not hasattr(df, "_jdf") or "Exchange" in explain(df, "simple"):
        return None
    try:
        return int(df._jdf.queryExecution().toRdd().getNumPartitions())  # noqa: SLF001 (`df.rdd` starts Python's side)
    except Exception as error:  # noqa: BLE001 (a shared cluster refuses; what is wrong with the plan the job will say)
        logger.debug("Could not count the partitions beforehand: %s", error)
        return None


def collect_reports(job: Any) -> Generator[tuple[int, str], None, None]:
    """What the tasks of a job say, once all of them have ended."""
    for row in job.collect():
        yield int(row["partition"]), row["report"]


def stream_reports(job: Any) -> Generator[tuple[int, str], None, None]:
    """What each task of a job on classic Spark says, as soon as it arrives, so that it need not be kept.

    `collect` holds all of it, and `toLocalIterator` runs one task after the other. What `toPandas` does within can do
    both: its JVM sends the batches of each task when it has ended, in 3.5 to 4.3 alike.
    """
    from pyspark import java_gateway, util
    from pyspark.errors.exceptions.captured import unwrap_spark_exception

    port, secret, server = job._jdf.collectAsArrowToPython()  # noqa: SLF001 (there is no public way)
    # Spark 3.5 has it in the second place.
    place: Any = util if hasattr(util, "local_connect_and_auth") else java_gateway
    file, connection = place.local_connect_and_auth(port, secret)
    # A write takes as long as it takes.
    connection.settimeout(None)
    with contextlib.closing(connection), contextlib.closing(file), pa.ipc.open_stream(file) as batches:
        for batch in batches:
            yield from zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
        with unwrap_spark_exception():
            # Why there are no more: raises what ended the job, if that was an error.
            server.getResult()


def count_local_lists(df: Any) -> int:
    """How many inputs of a classic DataFrame are lists that `createDataFrame` sent to Spark.

    Such a list lies in the driver's JVM for good, as an RDD. So does whatever else came as an RDD, whose rows may be
    made anew, and otherwise, in each job: a list is told from it by the one function that Python runs on it, Spark's
    own that changes nothing. That needs a look into fields that are not promised; any surprise counts as no list.
    """
    leaves = df._jdf.queryExecution().optimizedPlan().collectLeaves()  # noqa: SLF001 (there is no public way)
    found = [leaves.apply(index) for index in range(leaves.size())]
    return sum(_is_local_list(leaf.rdd(), df) for leaf in found if leaf.nodeName() == "LogicalRDD")


def _is_local_list(rdd: Any, df: Any) -> bool:
    from pyspark import serializers

    names, python = [], None
    while True:
        names.append(rdd.getClass().getSimpleName())
        if names[-1] == "PythonRDD":
            python = rdd
        if rdd.dependencies().size() != 1:
            break
        rdd = rdd.dependencies().apply(0).rdd()
    if python is None or names != [*["MapPartitionsRDD"] * (len(names) - 2), "PythonRDD", "ParallelCollectionRDD"]:
        return False
    field = next(field for field in python.getClass().getDeclaredFields() if field.getName().endswith("func"))
    field.setAccessible(True)
    command = field.get(python).command()
    if command.size() > _MAX_COMMAND_BYTES:
        return False
    # Pickled a moment ago by this very process, never read from storage.
    bytes_of = df.sparkSession._jvm.scala.reflect.ClassTag.Byte()  # noqa: SLF001 (the same)
    pickle: Any = serializers.CPickleSerializer()
    function, *_ = pickle.loads(bytes(command.toArray(bytes_of)))
    (inner,) = [cell.cell_contents for cell in function.__closure__]
    return all(
        one.__qualname__ == name and one.__module__.startswith("pyspark.")
        for one, name in ((function, "RDD.map.<locals>.func"), (inner, "RDD._reserialize.<locals>.<lambda>"))
    )


def explain(df: Any, mode: str) -> str:
    """What `df.explain(mode=…)` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        df.explain(mode=mode)
    return text.getvalue()


def finding_in(error: Exception) -> dict[str, Any] | None:
    """What an executor found in the data, if that is what Spark's error carries."""
    _, marker, rest = str(error).partition(tasks.FINDING)
    if not marker:
        return None
    finding: dict[str, Any] = json.JSONDecoder().raw_decode(rest)[0]
    return finding


def short_cause(error: Exception) -> str:
    """The line of a Spark error that says why; the whole stays reachable as `__cause__`.

    Spark's texts hold a Python traceback of the worker, or an error class in brackets, or a Java cause, between
    hundreds of lines of stack.
    """
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    lines = [line.removeprefix(": ") for line in lines if "An error occurred while calling" not in line]
    traceback = next((index for index, line in enumerate(lines) if "Traceback (most recent" in line), None)
    if traceback is not None:
        # The traceback's last line is the first one after it that is not indented.
        ends = [
            line
            for line in lines[traceback + 1 :]
            if not line.startswith((" ", "\t", "Traceback", "During", "The above"))
        ]
        if ends:
            return ends[0][:_MAX_CAUSE]
    # That a task failed to write is known; why it did stands further down.
    telling = [line for line in lines if "[TASK_WRITE_FAILED]" not in line]
    classed = [line.strip() for line in telling if re.search(r"\[[A-Z][A-Z0-9_.]+\] ", line)]
    causes = [line.strip() for line in telling if line.strip().startswith("Caused by: ")]
    if not classed and not causes:
        # Not in the text, perhaps among the JVM's exceptions behind it.
        causes = [text.strip().splitlines()[0] for text in _causes_of(error) if text.strip()]
        causes = [line for line in causes if "[TASK_WRITE_FAILED]" not in line]
    whole = [line.strip() for line in lines if not line.startswith(("\t", "    at"))]
    found = classed[:1] or causes[-1:] or whole[:1]
    return (found[0].removeprefix("Caused by: ") if found else type(error).__name__)[:_MAX_CAUSE]


def _causes_of(error: Any) -> Iterator[str]:
    """What the JVM's exceptions behind a Spark error say, where the session is a classic one, which has them."""
    java, behind = getattr(error, "java_exception", None), getattr(error, "cause", None)
    for _ in range(20):
        if java is not None:
            yield str(java.toString())
            java = java.getCause()
        elif isinstance(behind, Exception):
            yield str(behind)
            behind = getattr(behind, "cause", None)


_TRAVELLING = (tasks, moments, redaction)
_by_value_lock = threading.Lock()
_by_value_users = 0


@contextlib.contextmanager
def travels_by_value() -> Iterator[None]:
    """Let the executor's module be pickled by value, for the time of one call: registering is process-global."""
    global _by_value_users
    from pyspark import cloudpickle as untyped_cloudpickle

    cloudpickle: Any = untyped_cloudpickle

    with _by_value_lock:
        if _by_value_users == 0:
            for module in _TRAVELLING:
                cloudpickle.register_pickle_by_value(module)
        _by_value_users += 1
    try:
        yield
    finally:
        with _by_value_lock:
            _by_value_users -= 1
            if _by_value_users == 0:
                for module in _TRAVELLING:
                    cloudpickle.unregister_pickle_by_value(module)


@contextlib.contextmanager
def write_job(session: Any, is_connect: bool, name: str) -> Iterator[None]:
    """Name the jobs in Spark's UI; whatever ends this early also ends them, and waits until their tasks are gone.

    The user's own description and group are given back. PySpark's own handling of Ctrl-C does not stop a job that it
    waits for (seen with 4.2: its call to cancel is refused as reentrant), and a job that fails leaves tasks running.
    """
    if is_connect:
        session.addTag(name)
        try:
            yield
        except BaseException:
            session.interruptTag(name)
            raise
        finally:
            session.removeTag(name)
        return
    context = session.sparkContext
    # Tasks are not interrupted: that can end a Python worker which already serves somebody else's task (seen with 4.2).
    wanted = {
        "spark.jobGroup.id": name,
        "spark.job.description": "converter: write the cache",
        "spark.job.interruptOnCancel": "false",
    }
    before = {key: context.getLocalProperty(key) for key in wanted}
    for key, value in wanted.items():
        context.setLocalProperty(key, value)
    try:
        yield
    except BaseException:
        context.cancelJobGroup(name)
        _wait_for_tasks(context.statusTracker(), name)
        raise
    finally:
        for key, value in before.items():
            context.setLocalProperty(key, value)


def _wait_for_tasks(tracker: Any, group: str) -> None:
    """Return when no task of the group's jobs is running any more, or after `_CANCEL_SECONDS`."""
    deadline = time.monotonic() + _CANCEL_SECONDS
    while time.monotonic() < deadline:
        if not any(info.numActiveTasks for info in _stages(tracker, group)):
            return
        time.sleep(0.05)
    logger.warning("Spark did not stop the tasks of %s within %.0f seconds.", group, _CANCEL_SECONDS)


def _stages(tracker: Any, group: str) -> list[Any]:
    """What Spark says of the stages of a group's jobs."""
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return [info for info in stages if info is not None]


def check_progress(progress: bool | None) -> None:
    """Raise MissingDependencyError if a bar is asked for and tqdm is not installed."""
    if progress and importlib.util.find_spec("tqdm") is None:
        raise MissingDependencyError(
            "progress=True needs tqdm, which is not installed: pip install tqdm, or 'spark-tensor-converter[spark]'."
        )


@contextlib.contextmanager
def progress_bar(session: Any, is_connect: bool, name: str, wanted: bool | None) -> Iterator[None]:
    """Show how many tasks of `write_job` are done: a line on stderr, in a notebook one output that is updated.

    With `wanted=None` only in a terminal or a notebook, and if tqdm is installed.
    """
    is_notebook = _is_notebook()
    is_shown = (is_notebook or sys.stderr.isatty()) if wanted is None else wanted
    if not is_shown or importlib.util.find_spec("tqdm") is None:
        yield
        return
    from tqdm import tqdm

    ended, started = threading.Event(), time.monotonic()

    def text(what: str) -> str:
        return f"{what} [{tqdm.format_interval(time.monotonic() - started)}]"

    def watch() -> None:
        shown = None
        while not ended.wait(_SHOW_SECONDS):
            num_done, num_tasks = count()
            # A line in a log need not say how late it is.
            if is_notebook or sys.stderr.isatty() or shown != (num_done, num_tasks):
                shown = num_done, num_tasks
                tasks = f"{num_done:,} of {num_tasks:,} tasks" if num_tasks else "planning"
                show(text(f"Writing the cache: {tasks}"))

    with _counted_tasks(session, is_connect, name) as count, _NotebookLine() if is_notebook else _TextLine() as show:
        # With the context of this thread, by which a notebook knows the cell that an output belongs to.
        watcher = threading.Thread(
            target=contextvars.copy_context().run, args=(watch,), name="converter-progress", daemon=True
        )
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
        show.end(text("Wrote the cache"))


class _TextLine:
    """A line on stderr that is overwritten, and erased at the end."""

    def __init__(self) -> None:
        from tqdm import tqdm

        # Its text is ours: its own would count tasks before there are any.
        self._bar = tqdm(bar_format="{desc}", leave=False)

    def __call__(self, text: str) -> None:
        self._bar.set_description_str(text)

    def end(self, text: str) -> None:
        """Nothing is left of it."""

    def __enter__(self) -> _TextLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


class _NotebookLine:
    """One output of a cell, changed in place: tqdm without ipywidgets would add an output for each change."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, text: str) -> None:
        from IPython import display as untyped_display

        display: Any = untyped_display
        if self._handle is None:
            self._handle = display.display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)

    def end(self, text: str) -> None:
        """Say how it ended, if anything was said before."""
        if self._handle is not None:
            self(text)

    def __enter__(self) -> _NotebookLine:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _counted_tasks(session: Any, is_connect: bool, name: str) -> Iterator[Callable[[], tuple[int, int]]]:
    """A function that counts the tasks of `write_job`: how many are done, of how many; `(0, 0)` until Spark says."""
    if not is_connect:
        tracker = session.sparkContext.statusTracker()
        most = (0, 0)

        def count() -> tuple[int, int]:
            nonlocal most
            # A stage that an earlier job has done already is listed again, with nothing active and nothing done.
            infos = [info for info in _stages(tracker, name) if info.numActiveTasks or info.numCompletedTasks]
            done, tasks = sum(info.numCompletedTasks for info in infos), sum(info.numTasks for info in infos)
            # Spark forgets old stages.
            most = max(most[0], done), max(most[1], tasks)
            return most

        yield count
        return
    if not hasattr(session, "registerProgressHandler"):
        # Spark 3.5 does not say.
        yield lambda: (0, 0)
        return
    owner, counts = threading.get_ident(), dict[Any, tuple[int, int]]()

    def note(stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:  # noqa: ARG001 (Spark's names)
        # It is told of all that the session does; each thread hears of its own.
        if stages and threading.get_ident() == owner:
            counts[operation_id] = (
                sum(stage.num_completed_tasks for stage in stages),
                sum(stage.num_tasks for stage in stages),
            )

    session.registerProgressHandler(note)
    try:
        yield lambda: (sum(done for done, _ in [*counts.values()]), sum(tasks for _, tasks in [*counts.values()]))
    finally:
        session.removeProgressHandler(note)


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"
