"""What a manifest says of files behind a network is held against itself, and against the files, before it is used."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import uuid
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, make_parquet_converter
from converter.cache import leases
from converter.dataset import borrow_files
from converter.errors import CacheCorruptError, NullValueError, ReadError, SourceChangedError, SourceError
from converter.manifest import FileEnd, Manifest
from converter.reading import bounds
from converter.reading.checks import DataFile
from converter.reading.data_files import DataFiles
from converter.reading.open_file import OpenFile
from converter.storage import local
from converter.storage.opening import open_storage
from converter.storage.remote import RemoteStorage
from tests.columns import ID, Column
from tests.entries import write_converter

X, TEXT = Column(name="x", dtype="float32"), Column(name="text", dtype="str")
TEXTS = TEXT.values(range(600))


@pytest.fixture
def away(tmp_path: Path) -> DatasetConverter:
    """Two files of several row groups on a store, whose footers the manifest knows."""
    return write_away(tmp_path, [ID, X])


def write_away(directory: Path, columns: list[Column]) -> DatasetConverter:
    partitions = [[range(start, start + 300)] for start in (0, 300)]
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    with write_converter(directory, columns, partitions, row_group_bytes=1024, end_bytes=1 << 20) as made:
        manifest = Manifest.from_json(made._manifest.to_json(), path="of a test")
        for name in manifest.file_names:
            storage.below(name.partition("/")[0]).make_directory()
            assert storage.put_if_absent(name, Path(made._storage.path(name)).read_bytes())
    assert manifest.file_ends is not None
    return borrow_files(storage, manifest)


def rows_of(converter: DatasetConverter) -> list[int]:
    with converter.make_batch_reader(batch_size=64) as reader:
        return [int(one) for batch in reader for one in batch["id"]]


def test_a_disk_that_fails_after_the_rows_were_copied_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by python -m tests.faults.campaign store.
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "a.parquet")
    converter = make_parquet_converter(tmp_path)
    with converter.make_batch_reader(batch_size=5) as reader:
        open_whole = DataFiles.open

        def open_last(files: DataFiles, file: DataFile, *arguments: Any) -> OpenFile:
            opened = open_whole(files, file, *arguments)
            monkeypatch.setattr(local, "os", SimpleNamespace(stat=fail))
            return opened

        def fail(path: str) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(DataFiles, "open", open_last)
        with pytest.raises(ReadError, match=r"Row group 0 of .*a\.parquet cannot be .*Input/output error"):
            next(iter(reader))


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


def test_a_file_that_is_written_into_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": range(4000)}), path, row_group_size=1000, compression="none", use_dictionary=False)
    converter = make_parquet_converter(path)
    # Each row group is a window, and one thread reads at most two of them ahead.
    with converter.make_batch_reader(batch_size=10, shuffle_window_rows=1000, workers_count=1) as reader:
        batches = iter(reader)
        next(batches)
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(b"other")
        with pytest.raises(SourceChangedError, match="was written again after the converter was made"):
            list(batches)


def test_another_machine_may_have_files_of_another_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": range(40)}), path)
    pickled = pickle.dumps(make_parquet_converter(path))
    assert rows_of(pickle.loads(pickled)) == list(range(40))
    os.utime(path, (1e9, 1e9))
    with pytest.raises(SourceChangedError, match="was written again after the converter was made"):
        rows_of(pickle.loads(pickled))
    monkeypatch.setattr(leases, "this_host", lambda: "another")
    assert rows_of(pickle.loads(pickled)) == list(range(40))


def test_each_column_is_asked_for_once(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": range(4)}), path)
    for columns in ([], ["id", "id"]):
        with pytest.raises(ValueError, match=r"columns must name at least one column, and each once; got \["):
            make_parquet_converter(path).make_batch_reader(columns=columns)


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
        with pytest.raises(ReadError, match=r"its footer places a column at bytes 4 to 17592186044420 of \d+"):
            read(changed)


# What this host keeps of them ----------------------------------------------------------------


def read_kept(converter: DatasetConverter, local_cache_dir: Path, name: str = "id") -> list[object]:
    with converter.make_batch_reader(batch_size=64, local_cache_dir=local_cache_dir) as reader:
        return [one for batch in reader for one in batch[name].tolist()]


def be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> bytes:
        raise TimeoutError("the store is away")

    monkeypatch.setattr(RemoteStorage, "read_part", refuse)


def damage_a_text(kept: Path) -> None:
    """What is kept of a row group has bytes in a text then which are none, without a checksum that says so."""
    path = min(kept.rglob("rows-*"))
    before, sign, after = path.read_bytes().rpartition("·".encode())
    assert sign
    path.write_bytes(before + b"\xff\xfe" + after)


def test_texts_that_were_damaged_on_this_host_are_fetched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    away, kept = write_away(tmp_path, [ID, TEXT]), tmp_path / "kept"
    assert read_kept(away, kept, "text") == TEXTS
    damage_a_text(kept)
    assert read_kept(away, kept, "text") == TEXTS
    assert [message.endswith("was damaged, and is fetched again.") for message in caplog.messages] == [True]
    assert read_kept(away, kept, "text") == TEXTS
    assert len(caplog.messages) == 1


def test_what_is_damaged_is_named_where_the_store_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away, kept = write_away(tmp_path, [ID, TEXT]), tmp_path / "kept"
    assert read_kept(away, kept, "text") == TEXTS
    damage_a_text(kept)
    be_away(monkeypatch)
    with pytest.raises(SourceError, match=r"Column 'text' has text that is no UTF-8 .*file is not damaged") as caught:
        read_kept(away, kept, "text")
    assert str(caught.value.path).endswith(away._manifest.file_names[0])


def test_nulls_that_are_known_of_need_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    put(url, pa.table({"x": [1, None, 3]}))
    with make_parquet_converter(url) as made:
        with made.make_batch_reader(batch_size=2, nulls={"x": 7}, local_cache_dir=tmp_path) as reader:
            assert [batch["x"].tolist() for batch in reader] == [[1, 7], [3]]
        be_away(monkeypatch)
        with pytest.raises(NullValueError, match="'x'"):
            read_kept(made, tmp_path, "x")
    assert caplog.messages == []


def test_lists_that_were_damaged_on_this_host_are_fetched_again(tmp_path: Path) -> None:
    url, table = f"memory://{uuid.uuid4().hex}", pa.table({"x": [[1.0, 2.0, 3.0]] * 100})
    put(url, table)
    with make_parquet_converter(url) as made:
        assert read_kept(made, tmp_path, "x") == table["x"].to_pylist()
        (copy,) = tmp_path.rglob("rows-*")
        whole, num_wrong = copy.read_bytes(), 0
        for place in range(64):
            copy.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert read_kept(made, tmp_path, "x") == table["x"].to_pylist()
            num_wrong += copy.read_bytes() == whole
        assert num_wrong > 10


def test_a_short_answer_of_a_file_that_is_the_same_is_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, read_part = f"memory://{uuid.uuid4().hex}", RemoteStorage.read_part
    put(url, pa.table({"x": np.arange(100_000)}))
    with make_parquet_converter(url) as made, made.make_batch_reader(batch_size=100) as reader:
        monkeypatch.setattr(RemoteStorage, "read_part", lambda *args: read_part(*args)[:-1])
        with pytest.raises(ReadError, match=r"cannot be fetched: \d+ bytes came, expected \d+"):
            list(reader)


@pytest.mark.parametrize("verifies", [False, True])
@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_damage_behind_a_network_is_not_called_a_failure_of_the_store(compression: str, verifies: bool) -> None:
    """Arrow raises the same error for both. Found by `python -m tests.faults.campaign damaged_bytes --case 1:299`."""
    url = f"memory://{uuid.uuid4().hex}"
    put(url, pa.table({"x": np.arange(1000), "text": ["long " * 9] * 1000}), compression=compression, checksum=verifies)
    storage, messages = open_storage(url), []
    whole = storage.read("a.parquet")
    for place in range(4, len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), len(whole) // 150):
        storage.delete_file("a.parquet")
        storage.put_if_absent("a.parquet", whole[:place] + bytes([whole[place] ^ 0x24]) + whole[place + 1 :])
        with make_parquet_converter(url) as made, made.make_batch_reader(verify_checksums=verifies) as reader:
            try:
                list(reader)
            except ReadError as error:
                messages.append(str(error))
    assert len(messages) > 0
    assert [text for text in messages if not re.search(r"cannot be decoded: .* The file is damaged, ", text)] == []


def test_a_file_that_pyarrow_may_not_be_able_to_read_is_not_called_damaged_alone(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(1000)}), tmp_path / "a.parquet", compression="snappy")
    whole = (tmp_path / "a.parquet").read_bytes()
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    # The footer's field "codec", and after it the one of the number of values, 1000.
    snappy, lzo = bytes.fromhex("1502 16d00f"), bytes.fromhex("1506 16d00f")
    assert whole.count(snappy, start) == 1
    (tmp_path / "a.parquet").write_bytes(whole[:start] + whole[start:].replace(snappy, lzo))
    told = r"Row group 0 of .*LZO.*damaged, or pyarrow [0-9.]+ cannot read it\. .* write it again with another writer"
    with (
        make_parquet_converter(str(tmp_path)) as made,
        made.make_batch_reader() as reader,
        pytest.raises(ReadError, match=told),
    ):
        list(reader)


@pytest.mark.long("5 s, and 4.5 GB of memory")
def test_a_row_group_of_more_than_2_gib_of_bytes_is_read(tmp_path: Path) -> None:
    """Arrow gives its rows in several chunks, whose offsets together do not fit into 32 bits."""
    values = pa.array([bytes([97 + number]) * (1 << 20) for number in range(5)])
    column = pa.DictionaryArray.from_arrays(pa.array(np.arange(2100) % 5, pa.int32()), values)
    table = pa.table({"id": np.arange(2100), "s": column})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", store_schema=False)
    with make_parquet_converter(tmp_path) as made:
        rows = made.where([("id", ">=", 2097)]).head(3)
    assert [(int(number), row[:1], len(row)) for number, row in zip(rows["id"], rows["s"], strict=True)] == [
        (2097, b"c", 1 << 20),
        (2098, b"d", 1 << 20),
        (2099, b"e", 1 << 20),
    ]


def put(url: str, table: pa.Table, *, compression: str = "none", checksum: bool = False) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(
        table, sink, compression=compression, use_dictionary=False, write_page_checksum=checksum, data_page_size=1000
    )
    storage = open_storage(url)
    storage.make_directory()
    assert storage.put_if_absent("a.parquet", sink.getvalue().to_pybytes())


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


@pytest.mark.parametrize("place", ["ours away", "theirs away", "here"])
def test_a_footer_that_was_forgotten_is_parsed_anew(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def converter() -> DatasetConverter:
        if place == "ours away":
            return write_away(tmp_path / "cache", [ID, TEXT])
        url = str(tmp_path) if place == "here" else f"memory://{uuid.uuid4().hex}"
        table, storage = pa.table({"id": range(600), TEXT.name: TEXTS}), open_storage(url)
        for number in range(2):
            stream = io.BytesIO()
            pq.write_table(table[number * 300 : number * 300 + 300], stream, row_group_size=40)
            assert storage.put_if_absent(f"{number}.parquet", stream.getvalue())
        return make_parquet_converter(url)

    # Each file has 2 columns, and at least 3 row groups; the first one is kept.
    monkeypatch.setattr(bounds, "_BASE_CHUNKS", 1)
    monkeypatch.setattr(bounds, "_MOST_CHUNKS", 20)
    with converter() as given, given.make_batch_reader(batch_size=64) as reader:
        batches = list(reader)
        opened = list(reader._epochs.files._open.values())
    assert [one.num_metadata_chunks > 0 for one in opened] == [True, False]
    assert [int(one) for batch in batches for one in batch["id"]] == list(range(600))
    assert [str(one) for batch in batches for one in batch[TEXT.name]] == list(map(str, TEXTS))
