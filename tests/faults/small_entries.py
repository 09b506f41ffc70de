"""Entries of a few rows, written the way executors write them, and what stands on disk around them. Needs no JVM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from converter.cache import entries, roots
from converter.dataset import DatasetConverter
from converter.make import hold_entry
from converter.manifest import Manifest
from converter.portable import tasks
from converter.sources.spark import reports as spark_reports
from converter.sources.spark.schema import plan_columns
from converter.storage.directory import Storage

KEY = "0123456789abcdef-0123456789abcdef"
OTHER_KEY = "fedcba9876543210-fedcba9876543210"
NUM_ROWS = 24

_SPARK_SCHEMA = {
    "type": "struct",
    "fields": [
        {"name": "id", "type": "long", "nullable": False, "metadata": {}},
        {"name": "x", "type": "float", "nullable": False, "metadata": {}},
    ],
}


def write_data(root: Storage, attempt: entries.Attempt, *, num_files: int = 2, is_kept: bool = False) -> Manifest:
    """What the executors would write for `NUM_ROWS` rows, and the manifest of it, not committed."""
    columns, spec = plan_write(root, attempt)
    reports: list[tuple[int, dict[str, Any]]] = []
    for partition, ids in enumerate(np.array_split(np.arange(NUM_ROWS, dtype=np.int64), num_files)):
        reports += write_task(spec, ids, partition=partition, task_attempt=partition)
    return manifest_of(reports, columns, attempt, is_kept=is_kept)


def plan_write(root: Storage, attempt: entries.Attempt) -> tuple[Any, dict[str, Any]]:
    """The columns, and what the driver sends to each task."""
    columns = plan_columns(_SPARK_SCHEMA, float_dtype="float32", shapes={})
    spec = {
        "directory": root.below(attempt.key).path(attempt.data_directory),
        "intent": root.below(attempt.key).path(attempt.intent.name),
        "store": root.store,
        "columns": [column.spec() for column in columns],
        "row_group_bytes": 1 << 16,
        "file_bytes": 1 << 20,
        "compression": "none",
        "end_bytes": 0,
    }
    return columns, spec


def write_task(
    spec: dict[str, Any], ids: np.ndarray[Any, Any], *, partition: int, task_attempt: int
) -> list[tuple[int, dict[str, Any]]]:
    """Write one partition as a task does; its reports."""
    batch = pa.RecordBatch.from_arrays([pa.array(ids), pa.array(ids.astype(np.float32))], names=["c0", "c1"])
    return [
        (partition, report) for report in tasks._write(iter([batch]), spec, partition=partition, attempt=task_attempt)
    ]


def manifest_of(
    reports: list[tuple[int, dict[str, Any]]], columns: Any, attempt: entries.Attempt, *, is_kept: bool
) -> Manifest:
    """The manifest of what the tasks reported, not committed."""
    return spark_reports.manifest_from(
        reports, columns, directory=attempt.data_directory, is_kept=is_kept, float_dtype="float32"
    )


def commit_entry(root: Storage, key: str = KEY, *, is_kept: bool = False) -> entries.HeldEntry:
    """A committed entry that this process holds."""
    attempt = entries.begin(root, key, application_id="app-1")
    return entries.commit(root, attempt, write_data(root, attempt, is_kept=is_kept))


def leave_entry(cache_dir: Path, key: str = KEY, *, is_kept: bool = False) -> str:
    """The URL of a committed entry that no process holds any more, as an earlier run leaves it."""
    entry = commit_entry(roots.open_root(str(cache_dir)), key, is_kept=is_kept)
    entry.release()
    return entry.folder.url


def make_converter(cache_dir: str, *, delete_on_exit: bool = True, key: str = KEY) -> DatasetConverter:
    """What `make_spark_converter` returns, without Spark."""
    entry = commit_entry(roots.open_root(cache_dir), key, is_kept=not delete_on_exit)
    return hold_entry(entry, delete_on_exit=delete_on_exit)


def ids_of(converter: DatasetConverter) -> list[int]:
    """The column `id` as a reader finds it."""
    with converter.make_batch_reader(batch_size=7, columns=["id"]) as reader:
        return [int(value) for batch in reader for value in batch["id"]]


def tree(directory: Path) -> dict[str, bytes | None]:
    """Every path below a directory with its content; None for a folder, `b"-> …"` for a link, which is not followed."""
    contents: dict[str, bytes | None] = {}
    for path in sorted(directory.rglob("*")) if directory.exists() else []:
        name = str(path.relative_to(directory))
        if path.is_symlink():
            contents[name] = f"-> {os.readlink(path)}".encode()
        else:
            contents[name] = None if path.is_dir() else path.read_bytes()
    return contents


def make_old(path: Path, seconds: float) -> None:
    """Let a file be last written `seconds` ago."""
    written = path.stat().st_mtime - seconds
    os.utime(path, (written, written))
