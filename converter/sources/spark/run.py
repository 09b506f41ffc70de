"""The Spark job that writes the cache: its confs, its partitions, and the reports of its tasks."""

from __future__ import annotations

import contextlib
import json
import posixpath
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from converter.errors import CacheError, ConverterError
from converter.portable import moments
from converter.portable.tasks import REPORT_SCHEMA, add_moments, fold_reports, make_write_partition
from converter.signals import is_of_handler
from converter.sources.spark.choose import choose_writer, has_python, place_of, probed
from converter.sources.spark.confs import changed_confs
from converter.sources.spark.jobs import finding_in, how_spark_ended, short_cause, write_job
from converter.sources.spark.progress import Written, progress_bar
from converter.sources.spark.reports import error_of, in_order
from converter.sources.spark.schema import SparkColumn
from converter.sources.spark.session import (
    collect_reports,
    count_scan_partitions,
    explain,
    interrupts_first,
    on_its_own,
    stream_reports,
    travels_by_value,
)
from converter.sources.spark.with_spark import WRITE_CONFS, write_with_spark
from converter.storage.directory import Storage

if TYPE_CHECKING:
    from converter.portable.records import WriteSpec

_BATCH_BYTES = 4 << 20
_MAX_BATCH_BYTES = 64 << 20
_MAX_UNFOLDED_MOMENTS = 64

_SCAN_CONFS = ("spark.sql.parquet.columnarReaderBatchSize", "spark.sql.orc.columnarReaderBatchSize")
_SCAN_ROWS = 64
"""How many rows Spark's readers decode at once if rows may be wide: large arrays keep the JVM collecting garbage.

20,000 rows of 10 kB to HDFS take 1.7, 1.31, 1.29 and 1.24 s at 4,096 (Spark's default), 1,024, 256 and 64.
Short texts do not care (2.2, 2.35, 2.39, 2.04 s); 41 numbers are best at 4,096."""


def run_write(
    df: Any,
    columns: Sequence[SparkColumn],
    spec: WriteSpec,
    *,
    directory: Storage,
    session: Any,
    is_connect: bool,
    shuffle_rows_seed: int | None,
    writer: str,
    progress: bool | None,
) -> list[tuple[int, dict[str, Any]]]:
    """Run the write job and return the reports of all files, in the order of partitions."""
    name = f"converter-{posixpath.basename(directory.url)}"
    try:
        texts = [column.select(f"c{index}") for index, column in enumerate(columns)]
        names = _name_confs(texts)
        confs = _batch_confs(columns, _version(session)) | (names if is_connect else {}) | WRITE_CONFS
        with (
            interrupts_first(),
            travels_by_value(),
            changed_confs(session, confs),
            write_job(session, is_connect, name),
            progress_bar(session, is_connect, name, progress, Written(directory)),
        ):
            # Texts are read here; over Connect each time that the server looks at the plan.
            with changed_confs(session, names):
                selected = on_its_own(df).selectExpr(*texts)
            if shuffle_rows_seed is not None:
                selected = _shuffled(selected, columns, shuffle_rows_seed)
            chosen = choose_writer(writer, directory=directory, session=session, is_connect=is_connect)
            if chosen == "executors":
                reports = _write_with_executors(selected, columns, spec, session)
            else:
                packed = chosen == "spark" and (
                    any(column.kind != "scalar" or column.decoder is not None for column in columns)
                    or (
                        any(column.categories is not None for column in columns)
                        and has_python(session, is_connect=is_connect)
                    )
                )
                if is_connect and _version(session) < (4, 1):
                    # Its server answers only the outer one of two observations, and nested lists need both.
                    packed = packed and not any(column.kind == "tensor" and column.ndim > 1 for column in columns)
                reports = write_with_spark(selected, columns, spec, directory=directory, packed=packed)
    except ConverterError:
        raise
    except Exception as error:
        if is_of_handler(error):
            raise
        finding = finding_in(error)
        if finding is None:
            raise _write_error(error, directory, spec["directory"], session, writer) from directory.harmless(error)
        reports = [(0, {"finding": finding})]
    for _, report in reports:
        if "finding" in report:
            raise error_of(report["finding"], columns)
    return in_order(reports)


def _write_error(error: Exception, directory: Storage, local_path: str, session: Any, writer: str) -> CacheError:
    """Why Spark failed to write; if it was the second choice, also why the executors could not, and the remedy."""
    path = local_path if directory.is_local else directory.url
    if _is_stopped(session):
        return CacheError(
            f"Spark could not write the cache into {path}: the DataFrame's session was stopped. Make the DataFrame "
            "again in a new session.",
            path=path,
        )
    ended = how_spark_ended(error)
    if ended is not None:
        return CacheError(
            f"Spark could not write the cache into {path}: {directory.without_secrets(ended)}.", path=path
        )
    cause = directory.without_secrets(short_cause(error)).rstrip(".")
    message = f"Spark could not write the cache into {path}: {cause}."
    _, reason = probed.get(place_of(directory, session), ("", "")) if writer == "auto" else ("", "")
    if reason:
        # The suggested remedy is the one for the executors, because it needs no administrator.
        package = {"abfs": "adlfs", "hdfs": "hdfs-native"}.get(directory.store["protocol"] if directory.store else "")
        is_missing = package is not None and any(name in reason for name in ("ImportError", "ModuleNotFoundError"))
        remedy = f"Install {package} there" if is_missing else "Pass storage_options= that may write there"
        message += f" Spark's own writer was used because {reason}. {remedy}: executors get storage_options."
    return CacheError(message, path=path)


def _is_stopped(session: Any) -> bool:
    """Whether a classic session was stopped.

    Reaches into: pyspark.SparkContext._jsc (pyspark 3.5 to 4.2).
    Without it: the error names what Spark's own objects lack.
    """
    try:
        return bool(session.sparkContext._jsc is None)  # noqa: SLF001
    except Exception:  # noqa: BLE001 (a client of Connect has no context)
        return False


def _write_with_executors(
    selected: Any, columns: Sequence[SparkColumn], spec: WriteSpec, session: Any
) -> list[tuple[int, dict[str, Any]]]:
    """Let the tasks write. The driver never holds the moments of all tasks: up to 100 kB for each task and tensor.

    Moments of few tasks are merged here as they arrive. Those of many tasks would wait in the JVM together, so a
    further stage of Spark merges them, which takes 0.1 s.
    """
    job = selected.mapInArrow(make_write_partition(spec), REPORT_SCHEMA)
    confs, receive = {}, collect_reports
    num_tensors = sum(column.kind != "scalar" for column in columns)
    if num_tensors:
        # Spark changes such a plan while it runs, as it does when executors exchange rows.
        is_adaptive = "AdaptiveSparkPlan" in explain(selected, "simple")
        num_tasks = None if is_adaptive else count_scan_partitions(selected)
        if num_tasks is not None and num_tasks * num_tensors <= _MAX_UNFOLDED_MOMENTS:
            receive = stream_reports
        else:
            job = job.repartition(1).mapInArrow(fold_reports, REPORT_SCHEMA)
            if not is_adaptive:
                # Else Spark would submit each stage as a job of its own because of our exchange: some 70 ms.
                confs = {"spark.sql.adaptive.enabled": "false"}
    totals: dict[str, Any] = {}
    reports = []
    with changed_confs(session, confs), contextlib.closing(receive(job)) as received:
        for partition, text in received:
            report = json.loads(text)
            totals = add_moments(totals, report.pop("moments", {}))
            reports.append((partition, report))
    return [*reports, (-1, {"moments": {name: moments.to_json(closed) for name, closed in totals.items()}})]


def _shuffled(df: Any, columns: Sequence[SparkColumn], seed: int) -> Any:
    """The rows in a random order: the same for one seed as long as the input's partitions have the same rows.

    Rows are spread over partitions by a random number and sorted by another one there: a uniform permutation,
    without the sampling job of a global sort. The numbers come after a sort by what the rows hold, because each row
    must get its own again if Spark computes a partition once more, after a lost executor, and its input arrives in
    another order. Else rows that are still there would be spread by other numbers than those that come again, so some
    would be lost and others repeated (17 of 18 times with Spark 3.5 and 4.1, where an executor was killed).
    """
    from pyspark.sql import functions as F

    # One hash of all would skip nulls, and take (1, null) for (null, 1).
    hash_of_row = F.expr(f"xxhash64({', '.join(f'xxhash64({name})' for name in df.columns)})")
    # Nor does a hash know where inner lists end, and which elements are null. A number alone is sorted fastest.
    lists = [name for name, column in zip(df.columns, columns, strict=True) if column.kind not in ("scalar", "bytes")]
    known = df.withColumn("_hash", hash_of_row).sortWithinPartitions("_hash", *lists)
    keys = {"_random_0": F.rand(seed), "_random_1": F.rand(seed + 1)}
    spread = known.withColumns(keys).repartition(*map(F.col, keys)).sortWithinPartitions(*keys)
    return spread.drop("_hash", *keys)


def _version(session: Any) -> tuple[int, ...]:
    """Major and minor version of Spark."""
    return tuple(int(part) for part in str(session.version).split(".")[:2])


def _name_confs(texts: Iterable[str]) -> dict[str, str]:
    """What makes quoted names names: a session may take `a+` for a pattern, and Spark takes `${b}` for a variable.

    Other threads' queries may hold real variables, and the session is theirs, too. So variables stay what they are,
    unless a name looks like one.
    """
    confs = {"spark.sql.parser.quotedRegexColumnNames": "false"}
    return confs | ({"spark.sql.variable.substitute": "false"} if any("${" in text for text in texts) else {})


def _batch_confs(columns: Sequence[SparkColumn], version: tuple[int, ...]) -> dict[str, str]:
    """How much Spark hands to Python at once; its default of 10,000 rows is 20 GB for rows of 2 MB.

    Rows are bounded if their width is known: to bound bytes, Spark 4.2 adds up each row's columns (for 2 M rows of 41
    numbers 2.5 s against 1.5 s). Batches of at least 4 MB are the fastest for 41 columns (1.8, 1.5, 1.4, 1.4, 1.4 s
    at 1, 1.7, 5.5, 8 and 17 MB), and with a thousand columns a batch must still have thousands of rows.
    """
    records, num_bytes = "spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.arrow.maxBytesPerBatch"
    widths = [column.fixed_bytes for column in columns]
    if None not in widths:
        width = sum(width for width in widths if width is not None)
        rows = min(max(10_000, _BATCH_BYTES // width), _MAX_BATCH_BYTES // width)
        return {records: str(max(1, rows)), num_bytes: str(2**31 - 1)}
    confs = dict.fromkeys(_SCAN_CONFS, str(_SCAN_ROWS))
    if version >= (4, 2):
        # Rows of 2 kB: 1.29, 1.27, 1.18 and 1.23 s at 0.5, 1, 2 and 4 MB.
        return confs | {num_bytes: str(_BATCH_BYTES // 2)}
    # Older versions bound only rows; the executor joins small batches again.
    is_narrow = all(
        column.kind == "scalar" and column.dtype != "bytes" and column.decoder is None for column in columns
    )
    return confs | {records: "256" if is_narrow else "64"}
