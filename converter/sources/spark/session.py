"""Reads a Spark session, lets `portable` travel; most of Spark's private parts.

Each private part of Spark that is used has one function, most of them here.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import pyarrow as pa

from converter import decoders, portable
from converter.signals import is_of_handler

Answer = TypeVar("Answer")

logger = logging.getLogger(__name__)
_MAX_COMMAND_BYTES = 4096
"""Classic Spark's own function over the rows of a list is 1.4 kB of pickle."""


def ends_all(error: BaseException) -> bool:
    """Whether an error says nothing of the call that it comes from, which might go on without an answer."""
    return is_of_handler(error) or is_spark_away(error) or interrupt_behind(error) is not None


def or_doubt(question: str) -> Callable[[Callable[[Any], Answer]], Callable[[Any], Answer | None]]:
    """Let a function of a DataFrame answer None where it fails to look: doubt is never an error."""

    def decorate(look: Callable[[Any], Answer]) -> Callable[[Any], Answer | None]:
        @functools.wraps(look)
        def look_or_doubt(df: Any) -> Answer | None:
            try:
                return look(df)
            except Exception as error:
                if ends_all(error):
                    raise
                logger.debug("Could not tell %s: %s", question, error)
                return None

        return look_or_doubt

    return decorate


def is_spark_away(error: BaseException) -> bool:
    """Whether Spark cannot be reached any more: the server of Spark Connect, or the JVM of a classic session.

    Spark Connect has tried for some ten minutes then; each further call would do so again.
    """
    text = str(error)
    if isinstance(error, ConnectionRefusedError):
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and "py4j" in frames[-1].filename
    # Executors' errors may quote gRPC, too; only its own begin with the name of its class.
    is_of_grpc = text.startswith("<_") and "StatusCode.UNAVAILABLE" in text
    return is_of_grpc or type(error).__name__ in ("Py4JNetworkError", "RetriesExceeded")


def has_broken_off(error: BaseException) -> bool:
    """Whether a connection to a classic session's JVM has broken, which may be alive: a Ctrl-C leaves half an answer.

    If it has ended, the next call is refused a connection.
    """
    return type(error).__name__ == "Py4JNetworkError"


def after_interrupt(call: Callable[[], Answer]) -> Answer:
    """What a call of Spark answers, though a Ctrl-C may have broken the connection that it would take."""
    try:
        return call()
    except Exception as error:
        if not has_broken_off(error):
            raise
    return call()


_handled: contextvars.ContextVar[tuple[BaseException | None] | None] = contextvars.ContextVar("handled", default=None)
"""What the caller handles, if it is in an `except`, while a block of `interrupts_first` runs."""


def interrupt_behind(error: BaseException) -> BaseException | None:
    """The Ctrl-C or exit while which an error arose in a block of `interrupts_first`.

    py4j closes the connection that is interrupted, and both it and pyspark may fail in doing so.
    """
    handled = _handled.get()
    behind = None if handled is None else error.__context__
    while behind is not None and handled is not None and behind is not handled[0]:
        if isinstance(behind, KeyboardInterrupt | SystemExit):
            return behind
        behind = behind.__context__
    return None


@contextlib.contextmanager
def interrupts_first() -> Iterator[None]:
    """Raise a Ctrl-C instead of the errors of what it interrupted."""
    outermost = None if _handled.get() is not None else _handled.set((sys.exc_info()[1],))
    try:
        yield
    except Exception as error:
        behind = interrupt_behind(error)
        if behind is None:
            raise
        raise behind from None
    finally:
        if outermost is not None:
            _handled.reset(outermost)


def java_frame(df: Any) -> Any:
    """The JVM's object behind a classic DataFrame; None on Spark Connect.

    Reaches into: pyspark.sql.DataFrame._jdf (pyspark 3.5 to 4.3).
    Without it: plans cannot be looked at, so frames without a cache_key are written afresh and tasks are not counted.
    """
    return getattr(df, "_jdf", None)


def java_packages(session: Any) -> Any:
    """The JVM's packages by name (`.org.apache.hadoop…`); None on Spark Connect.

    Reaches into: pyspark.sql.SparkSession._jvm (pyspark 4.2).
    Without it: the JVM's user is not compared, so HDFS refuses the write instead, and lists count as no known input.
    """
    return getattr(session, "_jvm", None)


def defaults_of_java(session: Any) -> tuple[str, str]:
    """The time zone and the language of a classic session's JVM, whatever the session's own zone is."""
    java = java_packages(session).java.util
    return str(java.TimeZone.getDefault().getID()), str(java.Locale.getDefault().toLanguageTag())


def explain(df: Any, mode: str) -> str:
    """What `df.explain(mode=…)` prints. Catching that would take what other threads print, and mix up `sys.stdout`.

    Reaches into: DataFrame._explain_string of Spark Connect, the JVM's PythonSQLUtils (pyspark 3.5 to 4.3).
    Without it: an empty text, so frames without a cache_key are written afresh and tasks are not counted.
    """
    frame = java_frame(df)
    try:
        if frame is None:
            return str(df._explain_string(mode=mode))  # noqa: SLF001
        return str(java_packages(df.sparkSession).PythonSQLUtils.explainString(frame.queryExecution(), mode))
    except (AttributeError, TypeError) as error:
        logger.debug("Spark does not tell its plan: %s", error)
        return ""


def on_its_own(df: Any) -> Any:
    """The same rows under a name that nobody uses, with a step that nobody has cached.

    Spark takes a frame for any cached one that has the same steps, whatever the columns are called. So renamed columns
    are those of `frame.toDF(…).cache()`, with the files, the version or the confs of when that was cached. And in a
    view `customer`, `customer.id` is the column `id`, not the member of a struct.
    """
    # Spark removes the condition when it optimizes, after it has looked into its cache.
    name = uuid.uuid4().hex
    return df.where(f"'{name}' = '{name}'").alias(f"converter_{name}")


def count_scan_partitions(df: Any) -> int | None:
    """How many tasks will run a classic DataFrame that exchanges no rows; None if only running it would tell."""
    frame = java_frame(df)
    plan = "" if frame is None else explain(df, "simple")
    if not plan or "Exchange" in plan:
        return None
    try:
        # Not `df.rdd`, which starts Python's side.
        return int(frame.queryExecution().toRdd().getNumPartitions())
    except Exception as error:
        if ends_all(error):
            raise
        # A shared cluster refuses; the job itself will name what is wrong.
        logger.debug("Could not count the partitions beforehand: %s", error)
        return None


def collect_reports(job: Any) -> Generator[tuple[int, str], None, None]:
    """The reports of a job's tasks, once all tasks have ended."""
    for row in job.collect():
        yield int(row["partition"]), row["report"]


def stream_reports(job: Any) -> Generator[tuple[int, str], None, None]:
    """The reports of each task of a job on classic Spark as soon as the task has ended, so that none need be kept.

    `collect` holds all reports, and `toLocalIterator` runs one task after the other. `toPandas` does better: its JVM
    sends the batches of each task when the task has ended. (Writing float32[512] takes 0.39 of
    `df.write.parquet`'s time with it, 0.46 with `collect`.)
    """
    opened = _open_arrow_stream(job)
    if opened is None:
        yield from collect_reports(job)
        return
    connection, file, server, unwrapped_errors = opened
    # A write takes as long as it takes.
    connection.settimeout(None)
    with contextlib.closing(connection), contextlib.closing(file), pa.ipc.open_stream(file) as batches:
        for batch in batches:
            yield from zip(batch.column(0).to_pylist(), batch.column(1).to_pylist(), strict=True)
        with unwrapped_errors():
            # Raises the error that ended the job, if there was one.
            server.getResult()


def _open_arrow_stream(job: Any) -> tuple[Any, Any, Any, Any] | None:
    """Connection, file, server and error translation of a job whose Arrow batches the JVM sends as tasks end.

    Reaches into: DataFrame._jdf.collectAsArrowToPython, pyspark.util.local_connect_and_auth (pyspark 3.5 to 4.3).
    Without it: None, and reports are collected when all tasks have ended: 0.1 s slower, with more of the JVM's memory.
    """
    from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]

    try:
        from pyspark import java_gateway, util
        from pyspark.errors.exceptions.captured import unwrap_spark_exception

        # Spark 3.5 has it in the second place.
        module: Any = util if hasattr(util, "local_connect_and_auth") else java_gateway
        connect = module.local_connect_and_auth
        # The job starts once its server has been connected to: until then nothing is lost by giving up.
        port, secret, server = job._jdf.collectAsArrowToPython()  # noqa: SLF001
        file, connection = connect(port, secret)
    except (ImportError, AttributeError, TypeError, ValueError, Py4JError) as error:
        if isinstance(error, Py4JJavaError):
            raise
        logger.debug("Spark does not stream what tasks report, so it is collected: %s", error)
        return None
    return connection, file, server, unwrap_spark_exception


def listed(sequence: Any) -> list[Any]:
    """A Scala sequence as a list."""
    return [sequence.apply(index) for index in range(sequence.size())]


def count_local_lists(df: Any) -> int:
    """How many inputs of a classic DataFrame are lists that `createDataFrame` sent to Spark.

    Such a list stays in the driver's JVM as an RDD. Any other RDD may compute new rows in each job. A list is
    recognised by the one Python function that runs on it, which is Spark's own and changes nothing. Anything unexpected
    counts as no list.
    """
    try:
        inputs = listed(java_frame(df).queryExecution().optimizedPlan().collectLeaves())
        return sum(_is_local_list(leaf.rdd(), df) for leaf in inputs if leaf.nodeName() == "LogicalRDD")
    except Exception as error:
        if ends_all(error):
            raise
        # Doubt is never an error.
        logger.debug("Could not tell whether the DataFrame's inputs are lists: %s", error)
        return 0


def _is_local_list(rdd: Any, df: Any) -> bool:
    """Whether an RDD of the JVM is a parallelized list under Spark's own conversion of rows.

    Reaches into: PythonRDD.func by setAccessible, and the names of functions in pyspark.RDD (pyspark 4.2).
    Without it: False, so a DataFrame made from a list is written afresh each time.
    """
    from pyspark import serializers

    names, python_rdd = [], None
    while True:
        names.append(rdd.getClass().getSimpleName())
        if names[-1] == "PythonRDD":
            python_rdd = rdd
        if rdd.dependencies().size() != 1:
            break
        rdd = rdd.dependencies().apply(0).rdd()
    if python_rdd is None or names != [*["MapPartitionsRDD"] * (len(names) - 2), "PythonRDD", "ParallelCollectionRDD"]:
        return False
    fields = [field for field in python_rdd.getClass().getDeclaredFields() if field.getName().endswith("func")]
    if not fields:
        return False
    fields[0].setAccessible(True)
    command = fields[0].get(python_rdd).command()
    if command.size() > _MAX_COMMAND_BYTES:
        return False
    # Pickled a moment ago by this very process, never read from storage.
    byte_tag = java_packages(df.sparkSession).scala.reflect.ClassTag.Byte()
    pickle: Any = serializers.CPickleSerializer()
    # Spark's own pickle of a function that this session made.
    function, *_ = pickle.loads(bytes(command.toArray(byte_tag)))  # nosec B301
    (inner,) = [cell.cell_contents for cell in function.__closure__]
    return all(
        part.__qualname__ == name and part.__module__.startswith("pyspark.")
        for part, name in ((function, "RDD.map.<locals>.func"), (inner, "RDD._reserialize.<locals>.<lambda>"))
    )


_by_value_lock = threading.Lock()
_by_value_users = 0


@contextlib.contextmanager
def travels_by_value() -> Iterator[None]:
    """Let `portable` and `decoders` be pickled by value during the block.

    The registration is process-global, so users are counted.

    Reaches into: pyspark.cloudpickle.register_pickle_by_value (pyspark 3.5 to 4.3).
    Without it: `portable` is pickled by its name, so executors need this package; `auto` else takes Spark's own writer.
    """
    global _by_value_users
    from pyspark import cloudpickle as untyped_cloudpickle

    cloudpickle: Any = untyped_cloudpickle
    register = getattr(cloudpickle, "register_pickle_by_value", lambda _: None)
    unregister = getattr(cloudpickle, "unregister_pickle_by_value", lambda _: None)
    with _by_value_lock:
        if _by_value_users == 0:
            register(portable)
            register(decoders)
        _by_value_users += 1
    try:
        yield
    finally:
        with _by_value_lock:
            _by_value_users -= 1
            if _by_value_users == 0:
                unregister(portable)
                unregister(decoders)
