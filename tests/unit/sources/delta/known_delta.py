"""Delta tables for tests, written by deltalake or with a log by hand."""

from __future__ import annotations

import atexit
import datetime as dt
import functools
import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake

from converter import (
    DatasetConverter,
    make_delta_converter,
)
from tests.rows import concatenate

Rows = dict[str, list[Any]]

FAR = dt.datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=dt.timezone.utc)

BEGINNING = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)

MICROSECOND = dt.timedelta(microseconds=1)


def append(path: Path, columns: Mapping[str, Any], **options: Any) -> None:
    write_deltalake(str(path), pa.table(dict(columns)), mode="append", **options)


def append_each(path: Path, tables: Sequence[Mapping[str, Any]], **options: Any) -> Path:
    """A table of one file for each of these."""
    for one in tables:
        append(path, one, **options)
    return path


@functools.cache
def _five_files_once() -> Path:
    """The table of `five_files`, made once in a process: writing it takes longer than most tests."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return append_each(Path(folder.name) / "table", [{"id": np.arange(10) + 10 * number} for number in range(5)])


def five_files(path: Path) -> Path:
    """The numbers from 0 to 49, ten in each file, and a version for each."""
    return Path(shutil.copytree(_five_files_once(), path))


def rows_of(converter: DatasetConverter, **options: Any) -> Rows:
    with converter.make_batch_reader(**{"batch_size": 7, "nulls": "mask"} | options) as reader:
        return {name: column.tolist() for name, column in concatenate(list(reader)).items()}


def ids_of(path: Path, **options: Any) -> list[int]:
    return sorted(rows_of(make_delta_converter(path, **options), columns=["id"])["id"])


def commit(path: Path, version: int) -> Path:
    return path / "_delta_log" / f"{version:020}.json"


def actions_of(path: Path, version: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in commit(path, version).read_text().splitlines()]


def change_commit(path: Path, version: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite the actions of a commit; `change` does so in place."""
    actions = actions_of(path, version)
    for action in actions:
        change(action)
    commit(path, version).write_text("".join(json.dumps(action) + "\n" for action in actions))


def file_of(path: Path, version: int) -> Path:
    """The only data file that a version added."""
    (added,) = (action["add"]["path"] for action in actions_of(path, version) if "add" in action)
    return path / unquote(added)


def write_log(
    path: Path,
    fields: Mapping[str, str],
    files: Sequence[Mapping[str, Any]],
    *,
    features: Any = (),
    partitioned_by: Sequence[str] = (),
) -> Path:
    """A log of one commit, with what it says of its files: a path, and what differs from the usual."""
    (path / "_delta_log").mkdir(parents=True, exist_ok=True)
    schema = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]
    protocol: dict[str, Any] = {"minReaderVersion": 1, "minWriterVersion": 2}
    if features:
        named = list(features)
        protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": named, "writerFeatures": named}
    metadata = {
        "id": "0f6e073b-58cf-479f-98b5-b669a1503c93", "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": schema}), "partitionColumns": list(partitioned_by),
        "configuration": {}, "createdTime": 0,
    }  # fmt: skip
    actions: list[dict[str, Any]] = [{"protocol": protocol}, {"metaData": metadata}]
    for file in files:
        found = path / unquote(file["path"])
        add = {"partitionValues": {}, "modificationTime": 0, "dataChange": True, "size": found.stat().st_size} | file
        if isinstance(add.get("stats"), dict):
            add["stats"] = json.dumps(add["stats"])
        actions.append({"add": add})
    commit(path, 0).write_text("".join(json.dumps(action) + "\n" for action in actions))
    return path


def write_vector(file: Path, deleted: Sequence[int]) -> dict[str, Any]:
    """A file with one deletion vector, and how a log names it: a roaring bitmap of one array."""
    bitmap = struct.pack("<iqiIIHHI", 1681511377, 1, 0, 12346, 1, 0, len(deleted) - 1, 16)
    data = bitmap + b"".join(struct.pack("<H", row) for row in deleted)
    file.write_bytes(b"\x01" + struct.pack(">i", len(data)) + data + struct.pack(">I", zlib.crc32(data)))
    return {
        "storageType": "p", "pathOrInlineDv": file.as_uri(), "offset": 1, "sizeInBytes": len(data),
        "cardinality": len(deleted),
    }  # fmt: skip


def with_vector(path: Path, deleted: Sequence[int], *, ids: Any = range(10), stats: Any = None) -> Path:
    """A table of one file some of whose rows are deleted."""
    path.mkdir()
    pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), path / "one.parquet")
    vector = write_vector(path / "vector.bin", deleted)
    return write_log(
        path, {"id": "long"},
        [{"path": "one.parquet", "stats": stats or {"numRecords": len(ids)}, "deletionVector": vector}],
        features=["deletionVectors"],
    )  # fmt: skip


def assert_filtered(path: Path, filters: Any, expected: Sequence[Any], *, column: str = "id") -> None:
    """These rows are left, whichever way the filters are said."""
    for options in ({}, {"filters": filters}):
        with make_delta_converter(path, float_dtype=None, **options) as converter:
            part = converter if options else converter.where(filters)
            assert len(part) == len(expected)
            assert sorted(rows_of(part)[column]) == sorted(expected)
