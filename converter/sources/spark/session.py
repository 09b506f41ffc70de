"""What surrounds a Spark job: confs, description, progress, the cause of a failure; all of it given back afterwards."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import pyarrow as pa

from converter import portable

logger = logging.getLogger(__name__)
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


_by_value_lock = threading.Lock()
_by_value_users = 0


@contextlib.contextmanager
def travels_by_value() -> Iterator[None]:
    """Let `portable` be pickled by value, for the time of one call: registering is process-global."""
    global _by_value_users
    from pyspark import cloudpickle as untyped_cloudpickle

    cloudpickle: Any = untyped_cloudpickle

    with _by_value_lock:
        if _by_value_users == 0:
            cloudpickle.register_pickle_by_value(portable)
        _by_value_users += 1
    try:
        yield
    finally:
        with _by_value_lock:
            _by_value_users -= 1
            if _by_value_users == 0:
                cloudpickle.unregister_pickle_by_value(portable)
