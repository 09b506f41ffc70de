"""Runs a Spark job under a name, cancels its tasks if the driver fails, and says in one line why Spark failed."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import time
from collections.abc import Iterator
from typing import Any

from converter.errors import SourceError
from converter.portable.tasks import FINDING
from converter.signals import is_of_handler
from converter.sources.spark.progress import jobs_of, stages_of
from converter.sources.spark.session import after_interrupt, interrupts_first, is_spark_away

logger = logging.getLogger(__name__)

_CANCEL_SECONDS = 30.0
"""How long to wait until the tasks of a cancelled job have ended."""

_IDLE_SECONDS = 0.3
_RUNNING = "RUNNING"

_MAX_CAUSE = 400
_MAX_CAUSES = 20
_CRASHED = "Python worker exited unexpectedly"


def how_spark_ended(error: BaseException) -> str | None:
    """What to tell and to do if Spark cannot be reached any more, without the last full stop; else None."""
    if not is_spark_away(error):
        return None
    if isinstance(error, OSError) or type(error).__name__ == "Py4JNetworkError":
        return (
            "Spark's JVM has ended, perhaps killed by the system for its memory. Start this program again (in a "
            "notebook, its kernel): pyspark starts no other JVM"
        )
    return (
        f"the server of Spark Connect cannot be reached ({short_cause(error)}). Make the DataFrame again in a new "
        "session once the server is back"
    )


@contextlib.contextmanager
def naming_the_end_of_spark(what: str) -> Iterator[None]:
    """Raise SourceError, which begins with `what`, if Spark cannot be reached any more in the block."""
    try:
        with interrupts_first():
            yield
    except Exception as error:
        ended = how_spark_ended(error)
        if ended is None:
            raise
        raise SourceError(f"{what}: {ended}.") from error


def finding_in(error: Exception) -> dict[str, Any] | None:
    """The finding of an executor in the data, if Spark's error carries one."""
    _, marker, rest = str(error).partition(FINDING)
    if not marker:
        return None
    finding: dict[str, Any] = json.JSONDecoder().raw_decode(rest)[0]
    return finding


def short_cause(error: BaseException) -> str:
    """The line of a Spark error that says why it failed.

    Spark's texts hold a Python traceback of the worker, or an error class in brackets, or a Java cause, between
    hundreds of lines of stack. The caller keeps the whole error as `__cause__`.
    """
    if _CRASHED in str(error) and "Traceback (most recent" not in str(error):
        # What Java says of it is that a stream ended.
        return _CRASHED
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
    # TASK_WRITE_FAILED says nothing new; its cause stands further down.
    telling = [line for line in lines if "[TASK_WRITE_FAILED]" not in line]
    classed = [line.strip() for line in telling if re.search(r"\[[A-Z][A-Z0-9_.]+\] ", line)]
    causes = [line.strip() for line in telling if line.strip().startswith("Caused by: ")]
    if not classed and not causes:
        # The JVM's exceptions behind the error may say more than its text.
        causes = [text.strip().splitlines()[0] for text in _causes_of(error) if text.strip()]
        causes = [line for line in causes if "[TASK_WRITE_FAILED]" not in line]
    whole = [line.strip() for line in lines if not line.startswith(("\t", "    at"))]
    # gRPC's errors begin with the name of a class of its own.
    details = [match[1] for line in lines if (match := re.fullmatch(r'\s*details = "(.+)"', line))]
    best = classed[:1] or causes[-1:] or details or whole[:1]
    return (best[0].removeprefix("Caused by: ") if best else type(error).__name__)[:_MAX_CAUSE]


def _causes_of(error: Any) -> Iterator[str]:
    """The texts of the JVM's exceptions behind an error of classic Spark."""
    java_error, cause = getattr(error, "java_exception", None), getattr(error, "cause", None)
    for _ in range(_MAX_CAUSES):
        if java_error is not None:
            yield str(java_error.toString())
            java_error = java_error.getCause()
        elif isinstance(cause, Exception):
            yield str(cause)
            cause = getattr(cause, "cause", None)


@contextlib.contextmanager
def write_job(session: Any, is_connect: bool, name: str) -> Iterator[None]:
    """Name the block's jobs in Spark's UI. If the block fails, cancel them and wait until their tasks have ended.

    The user's own description and group are restored. PySpark's handling of Ctrl-C does not stop a job that it
    waits for (seen with 4.2: its call to cancel is refused as reentrant), and a job that fails leaves tasks running.
    """
    if is_connect:
        session.addTag(name)
        try:
            yield
        except BaseException as error:
            if not is_spark_away(error):
                _interrupt(session, name)
            raise
        finally:
            session.removeTag(name)
        return
    context = session.sparkContext
    # Tasks are not interrupted: that can end a Python worker which already runs a task of another job (seen with 4.2).
    wanted = {
        "spark.jobGroup.id": name,
        "spark.job.description": "converter: write the cache",
        "spark.job.interruptOnCancel": "false",
    }
    before = {key: context.getLocalProperty(key) for key in wanted}
    try:
        for key, value in wanted.items():
            context.setLocalProperty(key, value)
        yield
    except BaseException:
        _cancel(context, name)
        _wait_for_tasks(after_interrupt(context.statusTracker), name)
        raise
    finally:
        _give_back(context, before)


def _give_back(context: Any, properties: dict[str, str | None]) -> None:
    """Set a thread's properties as they were: with the group of a cancelled job, later jobs would be cancelled, too."""
    interruption: BaseException | None = None
    for _ in range(2):
        try:
            for key, value in properties.items():
                after_interrupt(functools.partial(context.setLocalProperty, key, value))
            break
        except BaseException as error:
            if isinstance(error, Exception) and not is_of_handler(error):
                raise
            # Once more, and all of them: over a new connection Spark takes this for another thread.
            interruption = error
    if interruption is not None:
        raise interruption


def _cancel(context: Any, group: str) -> None:
    """Cancel the group's jobs, and those that the JVM still plans: it goes on after a Ctrl-C.

    Reaches into: SparkContext._jsc.sc().cancelJobGroupAndFutureJobs (Spark 4.0 to 4.3).
    Without it: a job that starts later leaves files in the cache, which a sweep removes.
    """
    try:
        after_interrupt(lambda: context._jsc.sc().cancelJobGroupAndFutureJobs(group))  # noqa: SLF001
    except Exception as error:
        if is_of_handler(error):
            raise
        context.cancelJobGroup(group)


def _interrupt(session: Any, name: str) -> None:
    """Stop the jobs of Spark Connect under a tag; what made them end early is to be told, not that this failed."""
    try:
        session.interruptTag(name)
    except Exception as error:
        if is_of_handler(error):
            raise
        # A server that ends, or whose version knows no tags.
        logger.warning("Could not stop Spark's jobs of %s: %s", name, short_cause(error))


def _wait_for_tasks(tracker: Any, group: str) -> None:
    """Wait until no job or task of the group is running, at most `_CANCEL_SECONDS`.

    Spark's status is late: it may not know a job yet that was cancelled as it began. How many tasks of a stage still
    run it tells rightly once the job has ended.
    """
    deadline = time.monotonic() + _CANCEL_SECONDS
    idle_since = None
    while (now := time.monotonic()) < deadline:
        if any(job.status == _RUNNING for job in jobs_of(tracker, group)) or any(
            stage.numActiveTasks for stage in stages_of(tracker, group)
        ):
            idle_since = None
        elif idle_since is None:
            idle_since = now
        elif now - idle_since >= _IDLE_SECONDS:
            return
        time.sleep(0.05)
    logger.warning("Spark did not stop the tasks of %s within %.0f seconds.", group, _CANCEL_SECONDS)
