"""The write job: confs, partitions, reports."""

from __future__ import annotations

import contextlib
import json
import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from converter.errors import CacheError, ConverterError
from converter.portable import moments
from converter.portable.tasks import REPORT_SCHEMA, add_moments, fold_reports, make_write_partition
from converter.sources.spark.choose import choose_writer, place_of, probed
from converter.sources.spark.jobs import finding_in, short_cause, write_job
from converter.sources.spark.progress import progress_bar
from converter.sources.spark.reports import error_of
from converter.sources.spark.schema import SparkColumn
from converter.sources.spark.session import (
    changed_confs,
    collect_reports,
    count_scan_partitions,
    has_adaptive_plan,
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
"""How many rows Spark's readers decode at once where rows may be wide. Of 4,096 rows of 10 kB each array is 40 MB, made
anew and cleared, and the JVM collects garbage all the time: 20,000 such rows to HDFS take 1.7, 1.31, 1.29 and 1.24 s at
4,096, 1,024, 256 and 64. Of short texts it makes no difference (2.2, 2.35, 2.39, 2.04 s); 41 numbers want 4,096."""


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
    """Run the write job; the reports of all files, in the order of partitions."""
    selected = df.selectExpr(*(column.select(f"c{index}") for index, column in enumerate(columns)))
    if shuffle_rows_seed is not None:
        selected = _shuffled(selected, shuffle_rows_seed)
    confs = _batch_confs(columns, _version(session)) | WRITE_CONFS
    name = f"converter-{posixpath.basename(directory.url)}"
    try:
        with (
            travels_by_value(),
            changed_confs(session, confs),
            write_job(session, is_connect, name),
            progress_bar(session, is_connect, name, progress),
        ):
            way = choose_writer(writer, directory=directory, session=session, is_connect=is_connect)
            if way == "executors":
                reports = _write_with_executors(selected, columns, spec, session)
            else:
                packed = way == "spark" and any(column.kind != "scalar" for column in columns)
                if is_connect and _version(session) < (4, 1):
                    # Of two observations its server answers the outer one alone, and nested lists need both.
                    packed = packed and not any(column.kind == "tensor" and column.ndim > 1 for column in columns)
                reports = write_with_spark(selected, columns, spec, directory=directory, packed=packed)
    except ConverterError:
        raise
    except Exception as error:  # noqa: BLE001 (named below)
        finding = finding_in(error)
        if finding is None:
            place = spec["directory"] if directory.is_local else directory.url
            said = f"Spark could not write the cache into {place}: {directory.without_secrets(short_cause(error))}"
            _, reason = probed.get(place_of(directory, session), ("", "")) if writer == "auto" else ("", "")
            if reason:
                # Neither side can: what to do is said of the one that needs no administrator.
                package = {"abfs": "adlfs", "hdfs": "hdfs-native"}.get(
                    directory.store["protocol"] if directory.store else ""
                )
                is_missing = package is not None and any(
                    sign in reason for sign in ("ImportError", "ModuleNotFoundError")
                )
                remedy = f"Install {package} there" if is_missing else "Give storage_options= that may write there"
                said += f". It was asked because {reason}. {remedy}: the executors are handed storage_options."
            raise CacheError(said, path=place) from directory.harmless(error)
        reports = [(0, {"finding": finding})]
    for _, report in reports:
        if "finding" in report:
            raise error_of(report["finding"], columns)
    return sorted(reports, key=lambda item: (item[0], item[1].get("name", "")))


def _write_with_executors(
    selected: Any, columns: Sequence[SparkColumn], spec: WriteSpec, session: Any
) -> list[tuple[int, dict[str, Any]]]:
    """Let the tasks write; a tensor's moments, up to 100 kB a task and column, are merged before the driver holds them.

    Those of few tasks are merged one after the other as they arrive here. Those of many would still lie in the JVM
    together, so that a stage of Spark's merges them, which takes 0.1 s.
    """
    job = selected.mapInArrow(make_write_partition(spec), REPORT_SCHEMA)
    confs, arrive = {}, collect_reports
    num_tensors = sum(column.kind != "scalar" for column in columns)
    if num_tensors:
        is_adaptive = has_adaptive_plan(selected)
        num_tasks = None if is_adaptive else count_scan_partitions(selected)
        if num_tasks is not None and num_tasks * num_tensors <= _MAX_UNFOLDED_MOMENTS:
            arrive = stream_reports
        else:
            job = job.repartition(1).mapInArrow(fold_reports, REPORT_SCHEMA)
            if not is_adaptive:
                # For our exchange alone Spark would plan and submit each stage as a job of its own, some 70 ms.
                confs = {"spark.sql.adaptive.enabled": "false"}
    totals: dict[str, Any] = {}
    reports = []
    with changed_confs(session, confs), contextlib.closing(arrive(job)) as arrivals:
        for partition, text in arrivals:
            report = json.loads(text)
            totals = add_moments(totals, report.pop("moments", {}))
            reports.append((partition, report))
    return [*reports, (-1, {"moments": {name: moments.to_json(closed) for name, closed in totals.items()}})]


def _shuffled(df: Any, seed: int) -> Any:
    """The rows in a random order, the same for the same seed where the input's partitions and their order are the same.

    Rows are spread over partitions by a random number and sorted by it there: together a uniform permutation,
    without the sampling job that a global sort would run first.
    """
    from pyspark.sql import functions as F

    keys = {"_random_0": F.rand(seed), "_random_1": F.rand(seed + 1)}
    spread = df.withColumns(keys).repartition(*map(F.col, keys)).sortWithinPartitions(*keys)
    return spread.drop(*keys)


def _version(session: Any) -> tuple[int, ...]:
    """Major and minor version of Spark."""
    return tuple(int(part) for part in str(session.version).split(".")[:2])


def _batch_confs(columns: Sequence[SparkColumn], version: tuple[int, ...]) -> dict[str, str]:
    """How much Spark may hand to Python at once: by default 10,000 rows, which for rows of 2 MB is 20 GB.

    Spark 4.2 can bound the bytes, but then it adds up the size of every column at each row: of 41 numbers that is
    half the time of the whole write (2.5 s against 1.5 s for 2 M rows). Where the width of a row is known the rows
    are bounded instead. Batches of 4 MB are the fastest for 41 columns (1.8, 1.5, 1.4, 1.4, 1.4 s at 1, 1.7, 5.5, 8
    and 17 MB), and of a thousand columns a batch must still have thousands of rows.
    """
    records, num_bytes = "spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.arrow.maxBytesPerBatch"
    widths = [column.fixed_bytes for column in columns]
    if None not in widths:
        width = sum(width for width in widths if width is not None)
        rows = min(max(10_000, _BATCH_BYTES // width), _MAX_BATCH_BYTES // width)
        return {records: str(max(1, rows)), num_bytes: str(2**31 - 1)}
    confs = dict.fromkeys(_SCAN_CONFS, str(_SCAN_ROWS))
    if version >= (4, 2):
        # 2 kB rows: 1.29, 1.27, 1.18 and 1.23 s at 0.5, 1, 2 and 4 MB.
        return confs | {num_bytes: str(_BATCH_BYTES // 2)}
    # Older versions bound rows alone; the executor puts small batches together again.
    is_narrow = all(column.kind == "scalar" and column.dtype != "bytes" for column in columns)
    return confs | {records: "256" if is_narrow else "64"}
