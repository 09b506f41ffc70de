"""Parquet files whose footers were mutated, read in every way in which a footer is read.

    python -m tests.faults.footer_fuzz FIRST COUNT

Each case is made from its number alone. The number is printed before the case runs, so that a parent knows which
one ended the process. A case ends with rows or with a ConverterError that names a file; anything else is printed
as a violation.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from converter import ConverterError, DatasetConverter, make_delta_converter, make_parquet_converter
from converter.chunk_layout import chunk_pattern
from converter.dataset import borrow_files
from converter.manifest import FileEnd, Manifest
from converter.parsed_footer import parse_end
from converter.portable import footers
from converter.storage.opening import open_storage
from tests.columns import Column
from tests.entries import write_converter

_MAX_MEMORY_BYTES = 12 << 30
_MAX_SECONDS = 60
_NUM_ROWS = 60


def _tables() -> dict[str, tuple[pa.Table, dict[str, Any]]]:
    ids = np.arange(_NUM_ROWS)
    scalars: dict[str, Any] = {
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
    }
    nested = {
        "id": ids,
        "vector": pa.array([[one, one + 1.0, 2.0] for one in ids.tolist()], pa.list_(pa.float32())),
        "ragged": [list(range(one % 4)) for one in ids.tolist()],
        "point": [{"a": one, "b": f"{one}"} for one in ids.tolist()],
        "old": pa.array([dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)] * _NUM_ROWS, pa.timestamp("us", "UTC")),
    }
    plain = {"compression": "none", "use_dictionary": False, "row_group_size": 20}
    return {
        "scalars": (pa.table(scalars), {"row_group_size": 20}),
        "nested": (pa.table(nested), {"row_group_size": 30, "use_deprecated_int96_timestamps": True}),
        "plain": (pa.table({name: scalars[name] for name in ("id", "x", "half", "day")}), plain),
        "pages": (pa.table(scalars), {"data_page_version": "2.0", "compression": "zstd", "write_page_index": True}),
    }


def mutate(footer: bytes, chance: random.Random) -> bytes:
    """Some bytes of a footer changed, moved, left out or put in."""
    data = bytearray(footer)
    found = [match.span() for match in chunk_pattern().finditer(footer)]
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        place = chance.randrange(len(data))
        if found and chance.random() < 0.8:
            # What describes a column chunk: of other bytes the schema or Arrow's own copy of it is damaged.
            place = min(chance.randrange(*chance.choice(found)), len(data) - 1)
        kind = chance.randrange(7) if chance.random() < 0.5 else chance.choice((0, 1, 6))
        if kind == 0:
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[place] = chance.randrange(256)
        elif kind == 2:
            # A number of a few bytes becomes one of many.
            data[place : place + 1] = bytes([chance.randrange(128, 256)] * chance.randrange(1, 9))
        elif kind == 3:
            del data[place : place + chance.randrange(1, 9)]
        elif kind == 4:
            data[place:place] = chance.randbytes(chance.randrange(1, 9))
        elif kind == 5:
            other, size = chance.randrange(len(data)), chance.randrange(1, 40)
            data[place : place + size] = data[other : other + size]
        else:
            # What is counted in 32 bits, or not at all.
            data[place] = chance.choice((0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF))
        data = data or bytearray(b"\0")
    return bytes(data)


def mutated_file(whole: bytes, chance: random.Random) -> bytes:
    """A Parquet file with another footer, whose length is told rightly most of the time."""
    size = int.from_bytes(whole[-8:-4], "little")
    body, footer = whole[: -8 - size], mutate(whole[-8 - size : -8], chance)
    told = len(footer) if chance.random() < 0.97 else chance.choice((0, 1, len(footer) // 2, 2**31 - 1, 2**32 - 1))
    return body + footer + told.to_bytes(4, "little") + b"PAR1"


def read_all(converter: DatasetConverter, **options: Any) -> None:
    """Every column of every row, a filter, and a split by a key."""
    with converter.make_batch_reader(batch_size=16, nulls="mask", ragged="pad", workers_count=1, **options) as reader:
        for batch in reader:
            assert len({len(column) for column in batch.values()}) == 1
    if "id" in converter.schema.names and converter.schema["id"].dtype.startswith("int"):
        with contextlib.suppress(ConverterError):
            read_filtered(converter)


def read_filtered(converter: DatasetConverter) -> None:
    len(converter.where([("id", ">", 30)]))
    converter.split({"a": 0.5, "b": 0.5}, by="id")


class Bases:
    """The files before they are mutated."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, bytes] = {}
        for name, (table, options) in _tables().items():
            pq.write_table(table, folder / f"{name}.parquet", **options)
            self.files[name] = (folder / f"{name}.parquet").read_bytes()
        columns = [Column(name="id", dtype="int64"), Column(name="x", dtype="float32", shape=(4,))]
        own = folder / "own"
        self.own = write_converter(own, columns, [[range(_NUM_ROWS)]], row_group_bytes=500)
        self.own_manifest = self.own._manifest
        self.own_file = self.own_manifest.file_names[0]
        self.own_bytes = (Path(self.own._storage.path()) / self.own_file).read_bytes()

        footer = parse_end(self.own_bytes[-8 - int.from_bytes(self.own_bytes[-8:-4], "little") :])
        chunks = [footer.chunk(group, leaf) for group in range(len(footer.row_group_rows)) for leaf in range(2)]
        places = [footers.head_of(chunk.data_page_offset, chunk.stored_bytes) for chunk in chunks]
        crcs = [zlib.crc32(self.own_bytes[start : start + num_bytes]) for start, num_bytes in places]
        self.heads = np.array(crcs, "<u4").tobytes()

    def own_changed(self, whole: bytes, manifest: Manifest) -> Manifest:
        size = int.from_bytes(self.own_bytes[-8:-4], "little")
        start = len(self.own_bytes) - 8 - size
        return replace(
            manifest,
            file_bytes=np.array([len(whole)], np.int64),
            file_footers=np.array([zlib.crc32(whole[start:])], np.int64),
        )


def as_found(bases: Bases, folder: Path, chance: random.Random) -> None:
    """A file that somebody else left."""
    (folder / "x.parquet").write_bytes(mutated_file(bases.files[chance.choice(sorted(bases.files))], chance))
    read_all(make_parquet_converter(folder))


def as_replaced(bases: Bases, folder: Path, chance: random.Random) -> None:
    """A file of which nothing is known but its size, as of a Delta table."""
    whole = bases.files[chance.choice(sorted(bases.files))]
    (folder / "x.parquet").write_bytes(whole)
    found = make_parquet_converter(folder)
    harmed = mutated_file(whole, chance)
    (folder / "x.parquet").write_bytes(harmed)
    manifest = replace(
        found._manifest, file_stamps=None, file_footers=None, file_bytes=np.array([len(harmed)], np.int64)
    )
    read_all(borrow_files(found._storage, manifest))


def as_delta(bases: Bases, folder: Path, chance: random.Random) -> None:
    """A data file of a Delta table."""
    table = _tables()["plain"][0]
    harmed = mutated_file(bases.files["plain"], chance)
    (folder / "x.parquet").write_bytes(harmed)
    kinds = {"int64": "long", "double": "double", "float": "float", "date32[day]": "date"}
    fields = [
        {"name": one.name, "type": kinds[str(one.type)], "nullable": True, "metadata": {}} for one in table.schema
    ]
    statistics = {"numRecords": _NUM_ROWS, "minValues": {"id": 0}, "maxValues": {"id": _NUM_ROWS - 1}}
    actions: list[dict[str, Any]] = [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {"metaData": {
            "id": "0", "format": {"provider": "parquet", "options": {}}, "partitionColumns": [], "configuration": {},
            "schemaString": json.dumps({"type": "struct", "fields": fields}), "createdTime": 0,
        }},
        {"add": {
            "path": "x.parquet", "size": len(harmed), "partitionValues": {}, "modificationTime": 0, "dataChange": True,
            "stats": json.dumps(statistics),
        }},
    ]  # fmt: skip
    (folder / "_delta_log").mkdir()
    (folder / "_delta_log" / f"{0:020}.json").write_text("\n".join(map(json.dumps, actions)))
    read_all(make_delta_converter(folder))


def as_own(bases: Bases, folder: Path, chance: random.Random) -> None:
    """A file of a cache on a local disk, whose manifest agrees with it."""
    harmed = mutated_file(bases.own_bytes, chance)
    path = folder / bases.own_file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(harmed)
    read_all(borrow_files(open_storage(str(folder)), bases.own_changed(harmed, bases.own_manifest)))


def as_own_away(bases: Bases, folder: Path, chance: random.Random) -> None:
    """A file of a cache behind a network, whose footer the manifest holds; kept on this host's disk as well."""
    harmed = mutated_file(bases.own_bytes, chance)
    url = f"memory://{folder.name}"
    with fsspec.open(f"{url}/{bases.own_file}", "wb") as file:
        file.write(harmed)
    manifest = bases.own_changed(harmed, bases.own_manifest)
    size = int.from_bytes(bases.own_bytes[-8:-4], "little")
    end = FileEnd(harmed[len(bases.own_bytes) - 8 - size :], bases.heads)
    if chance.random() < 0.5:
        manifest = replace(manifest, file_ends=(end,))
    read_all(
        borrow_files(open_storage(url), manifest), **({"local_cache_dir": folder} if chance.random() < 0.5 else {})
    )


WAYS: tuple[Callable[[Bases, Path, random.Random], None], ...] = (
    as_found, as_replaced, as_delta, as_own, as_own_away
)  # fmt: skip


@contextlib.contextmanager
def _no_longer_than(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_cases(first: int, count: int) -> list[str]:
    """The violations of some cases."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    violations = []
    with tempfile.TemporaryDirectory() as top:
        bases = Bases(Path(top))
        for number in range(first, first + count):
            os.write(1, f"case {number}\n".encode())
            chance = random.Random(number)
            way = WAYS[number % len(WAYS)]
            folder = Path(top) / f"case-{number}"
            folder.mkdir()
            try:
                with _no_longer_than(_MAX_SECONDS):
                    way(bases, folder, chance)
            except ConverterError as error:
                if ".parquet" not in str(error) and "manifest" not in str(error):
                    violations.append(f"case {number} ({way.__name__}) names no file: {error!r}")
            except BaseException as error:  # noqa: BLE001 (all others are violations)
                where = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__}: {error!s:.200} at {where.filename}:{where.lineno}"
                violations.append(f"case {number} ({way.__name__}): {what}")
            shutil.rmtree(folder)
    bases.own.delete()
    return violations


if __name__ == "__main__":
    for violation in run_cases(int(sys.argv[1]), int(sys.argv[2])):
        print(violation)
