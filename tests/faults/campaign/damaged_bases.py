"""The data sets that are damaged: a cache's entries, Parquet files of others, Delta tables. Small, and made once.

Their bytes are the same in every process, so that a step of a case is the same damage each time.
"""

from __future__ import annotations

import base64
import decimal
import io
import json
import re
import tarfile
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from converter.cache import roots
from converter.categories import Categories
from converter.manifest import Manifest
from converter.portable.footers import end_of
from converter.schema import Scale
from tests.columns import Column
from tests.entries import KEY, write_converter
from tests.parity.golden_files import KEPT

NUM_ROWS = 60
OTHER_KEY = "fedcba9876543210-0123456789abcdef"
ATTEMPT, OTHER_ATTEMPT = "0" * 31 + "1", "0" * 31 + "2"
LEASE = f"lease-{'0' * 31}3.json"
ENTRY = f"{roots.DIRECTORY}/{KEY}"

ENTRIES = ("plain, held", "zstd, kept", "categories, loose")
"""Held by a process of another host; written with `delete_on_exit=False`; neither."""

FILES = ("v1, dictionaries", "v2, zstd", "plain, checksums", "nested", "delta encodings", "folders")
TABLES = (
    "by hand", "small row groups", "partitioned", "vectors", "vectors in a checkpoint", "vectors and partitions",
    "mapped by name", "checkpoints", "checkpoints in parts, log cleaned", "checkpoints of the second kind",
    "checkpoints of the second kind, in JSON", "columns added", "widened",
)  # fmt: skip
"""Tables of Delta's own; "by hand" has no sums of what a commit holds."""

_FOREIGN = {f"{ENTRY}/README": b"not ours", f"{ENTRY}/data-{ATTEMPT}/notes.parquet": b"not ours either"}


@dataclass(slots=True, kw_only=True)
class Base:
    """The files of a data set, by their names below a folder."""

    name: str
    files: dict[str, bytes]
    times: dict[str, float] = field(default_factory=dict)
    """When a file was written, if that matters."""

    foreign: tuple[str, ...] = ()
    """Files that are neither part of it nor ours."""


def entry(name: str, folder: Path) -> Base:
    """A cache with one entry, and beside it what a writer on another host has begun."""
    columns = [
        Column(name="id", dtype="int64"),
        Column(name="x", dtype="float32", shape=(4,)),
        Column(name="y", dtype="float64", nullable=True),
        Column(name="small", dtype="int8"),
        Column(name="flag", dtype="bool"),
        Column(name="day", dtype="datetime64[D]"),
        Column(name="text", dtype="str", nullable=True),
        Column(name="words", dtype="int32", shape=None),
    ]
    compression = "zstd" if "zstd" in name else "none"
    halves = [[range(NUM_ROWS // 2)], [range(NUM_ROWS // 2, NUM_ROWS)]]
    options: dict[str, Any] = {"row_group_bytes": 1200, "compression": compression, "end_bytes": 1 << 20}
    with write_converter(folder, columns, halves, **options) as made:
        manifest = replace(made._manifest, is_kept="kept" in name)
        if "categories" in name:
            texts = pa.array(sorted({text for text in columns[6].values(range(NUM_ROWS)) if text} | {""}))
            manifest = replace(
                manifest,
                categories={"text": Categories(values=texts.cast(pa.large_string()))},
                scales={"x": Scale(1000.0, 2.0), "small": Scale(0.0, 1.0)},
            )
        attempt = made._manifest.file_names[0][5:37]
        document = json.loads(manifest.to_json().replace(attempt.encode(), ATTEMPT.encode()))
        data = [(folder / ENTRY / file).read_bytes() for file in manifest.file_names]
        owner = (folder / roots.DIRECTORY / roots.OWNER_FILE).read_bytes()
    files = {
        f"{roots.DIRECTORY}/{roots.OWNER_FILE}": owner,
        f"{ENTRY}/{roots.MANIFEST}": json.dumps(document, separators=(",", ":")).encode(),
        **{f"{ENTRY}/{file}": content for file, content in zip(document["files"]["name"], data, strict=True)},
    }
    sign = {"attempt": ATTEMPT, "host": "elsewhere/1", "pid": 7, "process_start": "8", "application_id": "",
            "created": 1.0}  # fmt: skip
    if "held" in name:
        files[f"{ENTRY}/{LEASE}"] = json.dumps(sign).encode()
    begun = f"{roots.DIRECTORY}/{OTHER_KEY}/data-{OTHER_ATTEMPT}"
    files[f"{begun}.intent"] = json.dumps(sign | {"attempt": OTHER_ATTEMPT}).encode()
    files[f"{begun}/part-00000-00000001-0000.parquet"] = data[0]
    return Base(name=name, files=files | _FOREIGN, foreign=tuple(_FOREIGN))


def files_of_others(name: str, folder: Path) -> Base:
    """Parquet as other writers leave it."""
    if name == "folders":
        found = {}
        for part in range(3):
            table = _scalars().slice(part * 20, 20)
            found[f"year={2020 + part}/part-{part}.parquet"] = _written(table, compression="lz4", row_group_size=7)
        return Base(name=name, files=found)
    options: dict[str, dict[str, Any]] = {
        "v1, dictionaries": {"compression": "snappy", "row_group_size": 20},
        "v2, zstd": {"data_page_version": "2.0", "compression": "zstd", "write_page_index": True, "row_group_size": 25},
        "plain, checksums": {"compression": "none", "use_dictionary": False, "write_page_checksum": True,
                             "row_group_size": 20},
        "nested": {"compression": "gzip", "row_group_size": 30, "use_deprecated_int96_timestamps": True},
        "delta encodings": {
            "compression": "brotli", "use_dictionary": False, "row_group_size": 30, "data_page_size": 100,
            "column_encoding": {"id": "DELTA_BINARY_PACKED", "x": "BYTE_STREAM_SPLIT", "text": "DELTA_BYTE_ARRAY",
                                "raw": "DELTA_LENGTH_BYTE_ARRAY", "flag": "RLE", "day": "DELTA_BINARY_PACKED"},
        },
    }  # fmt: skip
    table = _nested() if name == "nested" else _scalars()
    halves = (table.slice(0, 35), table.slice(35))
    return Base(
        name=name, files={f"part-{i}.parquet": _written(half, **options[name]) for i, half in enumerate(halves)}
    )


def _written(table: pa.Table, **options: Any) -> bytes:
    file = pa.BufferOutputStream()
    pq.write_table(table, file, **options)
    data: bytes = file.getvalue().to_pybytes()
    return data


def _scalars() -> pa.Table:
    ids = np.arange(NUM_ROWS)
    return pa.table({
        "id": ids,
        "small": pa.array(ids % 100, pa.int8()),
        "large": pa.array(ids, pa.uint32()),
        "x": np.where(ids % 7, ids, np.nan),
        "half": pa.array(ids.astype(np.float32)),
        "flag": ids % 2 == 0,
        "text": [f"row {one}" if one % 5 else None for one in ids],
        "raw": [bytes([one]) * (one % 4) for one in ids.tolist()],
        "day": pa.array(ids.astype(np.int32), pa.date32()),
        "time": pa.array(ids, pa.timestamp("us", "UTC")),
        "exact": [decimal.Decimal(one) / 4 for one in ids.tolist()],
    })  # fmt: skip


def _nested() -> pa.Table:
    ids = range(NUM_ROWS)
    return pa.table({
        "id": np.arange(NUM_ROWS),
        "vector": pa.array([[one, one + 1.0, 2.0] for one in ids], pa.list_(pa.float32())),
        "ragged": pa.array([list(range(one % 4)) if one % 6 else None for one in ids], pa.list_(pa.int32())),
        "grid": pa.array([[[one, 1], [2, 3]] for one in ids], pa.list_(pa.list_(pa.int64()))),
        "words": [[f"{one}", "b"][: one % 3] for one in ids],
        "point": [{"a": one, "b": f"{one}"} for one in ids],
        "items": pa.array([[{"p": float(one)}] * (one % 3) for one in ids], pa.list_(pa.struct({"p": pa.float64()}))),
        "tags": pa.array([[("k", one)] * (one % 2) for one in ids], pa.map_(pa.string(), pa.int32())),
        "old": pa.array([one * 10**9 for one in ids], pa.timestamp("us", "UTC")),
    })  # fmt: skip


def table_of_delta(name: str) -> Base:
    """A Delta table as Spark wrote it, or one by hand."""
    if name == "by hand":
        return _by_hand()
    base = Base(name=name, files={})
    with tarfile.open(KEPT / f"{name}.tar.xz") as archive:
        for member in archive:
            path = member.name.removeprefix(f"tables/{name}/")
            # Not Hadoop's own checksums beside each file, which are never read.
            if member.isfile() and path != member.name and not re.search(r"(^|/)\.[^/]*\.crc$", path):
                file = archive.extractfile(member)
                assert file is not None
                base.files[path], base.times[path] = file.read(), float(member.mtime)
    assert any(path.startswith("_delta_log/") for path in base.files), name
    return base


def _by_hand() -> Base:
    table = _scalars().select(["id", "x", "half", "day", "text"])
    fields = [
        {"name": one, "type": kind, "nullable": True, "metadata": {}}
        for one, kind in {"id": "long", "x": "double", "half": "float", "day": "date", "text": "string"}.items()
    ]
    head: list[dict[str, Any]] = [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"metaData": {
            "id": "0", "format": {"provider": "parquet", "options": {}}, "partitionColumns": [], "configuration": {},
            "schemaString": json.dumps({"type": "struct", "fields": fields}), "createdTime": 0,
        }},
    ]  # fmt: skip
    files: dict[str, bytes] = {}
    for version in range(3):
        rows = table.slice(version * 20, 20)
        data = files[f"part-{version}.parquet"] = _written(rows, row_group_size=8)
        bounds = {"id": version * 20, "day": f"1970-01-{version * 20 % 28 + 1:02}"}
        statistics = {"numRecords": 20, "minValues": {"id": bounds["id"]}, "maxValues": {"id": bounds["id"] + 19},
                      "nullCount": {"id": 0, "text": 4}}  # fmt: skip
        add = {"add": {
            "path": f"part-{version}.parquet", "size": len(data), "partitionValues": {}, "modificationTime": 0,
            "dataChange": True, "stats": json.dumps(statistics),
        }}  # fmt: skip
        lines = [*([] if version else head), {"commitInfo": {"timestamp": version}}, add]
        files[f"_delta_log/{version:020}.json"] = "\n".join(map(json.dumps, lines)).encode()
    return Base(name="by hand", files=files)


def agreeing(manifest: bytes, data: dict[str, bytes]) -> bytes:
    """A manifest that says of each data file what is true of it now, as if the damage had been written so."""
    document = json.loads(manifest)
    files = document["files"]
    files["bytes"] = [len(data[name]) for name in files["name"]]
    files["footer_crc32"] = [_crc_of_end(data[name]) for name in files["name"]]
    files.pop("footers", None)
    files.pop("heads", None)
    made = json.dumps(document, separators=(",", ":")).encode()
    Manifest.from_json(made, path="manifest")
    return made


def contradictions(manifest: bytes) -> list[str]:
    """What in a manifest that was opened says two things of its rows or files, or names a file that is not ours."""
    document = json.loads(manifest)
    files, groups = document["files"], document["row_groups"]
    found = []
    if sum(groups["rows"]) != document["num_rows"]:
        found.append("num_rows")
    if not all(re.fullmatch(r"data-[0-9a-f]{32}/part-[^/]+\.parquet", name) for name in files["name"]):
        found.append("name")
    sums = files["footer_crc32"]
    if sums is not None and len(sums) != len(files["name"]):
        found.append("footer_crc32")
    if "footers" in files:
        content = io.BytesIO(zlib.decompress(base64.b64decode(files["footers"]["zlib"])))
        if [zlib.crc32(content.read(size)) for size in files["footers"]["bytes"]] != sums:
            found.append("footers")
    return found


def _crc_of_end(data: bytes) -> int:
    return zlib.crc32(end_of(io.BytesIO(data)))
