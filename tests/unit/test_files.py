"""What a manifest says of files behind a network is held against itself, and against the files, before it is used."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter
from converter.dataset import borrow_files
from converter.errors import CacheCorruptError, ReadError, SourceChangedError
from converter.manifest import FileEnd, Manifest
from converter.storage import open_storage
from tests.unit.known_tables import ID, Column, write_converter

X = Column(name="x", dtype="float32")


@pytest.fixture
def away(tmp_path: Path) -> DatasetConverter:
    """Two files of several row groups on a store, whose footers the manifest knows."""
    partitions = [[range(start, start + 300)] for start in (0, 300)]
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    with write_converter(tmp_path, [ID, X], partitions, row_group_bytes=1024, end_bytes=1 << 20) as made:
        manifest = Manifest.from_json(made._manifest.to_json(), path="of a test")
        for name in manifest.file_names:
            storage.below(name.partition("/")[0]).make_directory()
            assert storage.put_if_absent(name, Path(made._storage.path(name)).read_bytes())
    assert manifest.file_ends is not None
    return borrow_files(storage, manifest)


def rows_of(converter: DatasetConverter) -> list[int]:
    with converter.make_batch_reader(batch_size=64) as reader:
        return [int(one) for batch in reader for one in batch["id"]]


def test_what_is_known_is_right(away: DatasetConverter) -> None:
    assert away._manifest.num_row_groups > 4
    assert rows_of(away) == list(range(600))
    assert rows_of(away.where([("id", ">=", 290), ("id", "<", 310)])) == list(range(290, 310))


def with_first_end(away: DatasetConverter, end: FileEnd) -> DatasetConverter:
    """The same files by a manifest that says another end of the first one, and agrees with itself in its digests."""
    manifest = away._manifest
    assert manifest.file_ends is not None
    assert manifest.file_footers is not None
    footers = manifest.file_footers.copy()
    footers[0] = zlib.crc32(end.footer)
    changed = replace(manifest, file_ends=(end, *manifest.file_ends[1:]), file_footers=footers)
    return borrow_files(away._storage, Manifest.from_json(changed.to_json(), path="of a test"))


def footer_of(table: pa.Table, row_group_rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=row_group_rows)
    data = sink.getvalue().to_pybytes()
    return data[-8 - int.from_bytes(data[-8:-4], "little") :]


NUMBERS = pa.table({"c0": np.arange(300), "c1": np.zeros(300, np.float32)})
CONTRADICTIONS: dict[str, Callable[[FileEnd], FileEnd]] = {
    "no heads": lambda end: FileEnd(end.footer, b""),
    "a head less": lambda end: FileEnd(end.footer, end.heads[:-4]),
    "a byte more": lambda end: FileEnd(end.footer, end.heads + b"a"),
    "no footer": lambda end: FileEnd(b"", end.heads),
    "what is no footer": lambda end: FileEnd(b"nonsense" * 9, end.heads),
    "fewer row groups": lambda end: FileEnd(footer_of(NUMBERS, 300), end.heads[:8]),
    "other row groups": lambda end: FileEnd(footer_of(NUMBERS, 299), end.heads[:16]),
    "fewer columns": lambda end: FileEnd(footer_of(NUMBERS.select([0]), 300), end.heads[:4]),
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_manifest_that_contradicts_itself_is_named(
    away: DatasetConverter, change: Callable[[FileEnd], FileEnd]
) -> None:
    assert away._manifest.file_ends is not None
    changed = with_first_end(away, change(away._manifest.file_ends[0]))
    name = away._manifest.file_names[0]
    for read in (rows_of, lambda one: one.where([("id", "<", 10)]), lambda one: one.split({"all": 1.0}, by="id")):
        with pytest.raises(CacheCorruptError, match=rf"does not hold the footer of .*{name} .*Convert again") as caught:
            read(changed)
        assert str(caught.value.path).endswith(name)


def test_other_heads_than_those_of_the_file_are_another_file(away: DatasetConverter) -> None:
    assert away._manifest.file_ends is not None
    end = away._manifest.file_ends[0]
    changed = with_first_end(away, FileEnd(end.footer, bytes(len(end.heads))))
    for read in (rows_of, lambda one: one.where([("x", "<", 10)]), lambda one: one.split({"all": 1.0}, by="id")):
        with pytest.raises(SourceChangedError, match=r"holds other rows than were written there.* Convert again"):
            read(changed)


def test_nothing_is_asked_for_beyond_a_file(away: DatasetConverter) -> None:
    """However much a footer promises: else a small manifest could ask for as many requests as it likes."""
    manifest = away._manifest
    assert manifest.file_ends is not None
    end = manifest.file_ends[0]
    size = pq.read_metadata(pa.BufferReader(end.footer)).row_group(0).column(0).total_compressed_size
    # Twice, as a signed number of Thrift: before it is compressed, and after.
    old, new = (b"\x16" + varint(2 * one) for one in (size, 1 << 44))
    assert end.footer.count(old + old) >= 1
    body = end.footer[:-8].replace(old + old, old + new, 1)
    changed = with_first_end(away, FileEnd(body + len(body).to_bytes(4, "little") + b"PAR1", end.heads))
    for read in (rows_of, lambda one: one.where([("id", "<", 10)])):
        with pytest.raises(ReadError, match=r"a column is said to lie from byte 4 to 17592186044420 of \d+"):
            read(changed)


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
