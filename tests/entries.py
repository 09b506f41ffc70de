"""Committed entries without Spark: the steps of `make_spark_converter`, with the tasks run in this process."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from converter import DatasetConverter
from converter.cache import entries, leases, roots
from converter.make import hold_entry
from converter.manifest import Origin
from converter.portable import tasks
from converter.sources.spark import reports as spark_reports
from converter.sources.spark.schema import SparkColumn
from tests.columns import Column, record_batch

KEY = "0123456789abcdef-fedcba9876543210"
ROW_GROUP_BYTES = 1 << 20
FILE_BYTES = 1 << 30


def make_spec(
    directory: str | os.PathLike[str],
    columns: Sequence[SparkColumn],
    *,
    row_group_bytes: int = ROW_GROUP_BYTES,
    file_bytes: int = FILE_BYTES,
    compression: str = "none",
    end_bytes: int = 0,
) -> dict[str, Any]:
    """What the driver tells the executors."""
    return {
        "directory": os.fspath(directory),
        "intent": None,
        "store": None,
        "columns": [column.spec() for column in columns],
        "row_group_bytes": row_group_bytes,
        "file_bytes": file_bytes,
        "compression": compression,
        "end_bytes": end_bytes,
    }


def write(
    batches: Iterable[pa.RecordBatch],
    directory: str | os.PathLike[str],
    columns: Sequence[SparkColumn],
    *,
    partition: int = 0,
    attempt: int = 1,
    **options: Any,
) -> list[dict[str, Any]]:
    """What one task reports, as it travels through Spark: as JSON."""
    spec = make_spec(directory, columns, **options)
    reports = tasks._write(iter(batches), spec, partition=partition, attempt=attempt)
    received: list[dict[str, Any]] = json.loads(json.dumps(reports))
    return received


def write_converter(
    cache_dir: str | os.PathLike[str],
    columns: Sequence[Column],
    partitions: Sequence[Sequence[Iterable[int]]],
    *,
    shapes: dict[str, tuple[int, ...]] | None = None,
    float_dtype: str = "float32",
    delete_on_exit: bool = True,
    origin: Origin | None = None,
    **options: Any,
) -> DatasetConverter:
    """A committed entry whose partitions are lists of batches of row ids; `options` are those of `make_spec`."""
    batches = [[record_batch(columns, ids) for ids in partition] for partition in partitions]
    plans = [column.plan((shapes or {}).get(column.name)) for column in columns]
    return write_batches(
        cache_dir, plans, batches, float_dtype=float_dtype, delete_on_exit=delete_on_exit, origin=origin, **options
    )


def write_batches(
    cache_dir: str | os.PathLike[str],
    plans: Sequence[SparkColumn],
    partitions: Sequence[Iterable[pa.RecordBatch]],
    *,
    float_dtype: str = "float32",
    delete_on_exit: bool = True,
    scales: dict[str, Any] | None = None,
    origin: Origin | None = None,
    **options: Any,
) -> DatasetConverter:
    """A committed entry whose partitions are Arrow batches of the columns in `plans`."""
    root = roots.open_root(os.fspath(cache_dir))
    attempt = entries.begin(root, KEY, application_id="none")
    directory = root.below(KEY).path(attempt.data_directory)
    try:
        reports = [
            (index, report)
            for index, partition in enumerate(partitions)
            for report in write(partition, directory, plans, partition=index, attempt=index + 1, **options)
        ]
        for _, report in reports:
            if "finding" in report:
                raise spark_reports.error_of(report["finding"], plans)
        manifest = spark_reports.manifest_from(
            reports, plans, directory=attempt.data_directory, is_kept=False, float_dtype=float_dtype
        )
        entry = entries.commit(root, attempt, dataclasses.replace(manifest, scales=scales or {}, origin=origin))
    except BaseException:
        leases.release(attempt.intent)
        raise
    return hold_entry(entry, delete_on_exit=delete_on_exit)
