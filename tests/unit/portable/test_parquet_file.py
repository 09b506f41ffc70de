"""One file: compressed as asked, digested as it passes, written in time, or gone."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter.portable import deadlines, parquet_file
from converter.portable.filesystems import open_new
from tests.columns import ALL, SCALARS, record_batch
from tests.entries import write
from tests.unit.portable.one_column import (
    ROW_BYTES,
    WIDE,
    files,
    plan,
    wide_batch,
    write_one,
)
from tests.waiting import wait_until


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "snappy"])
def test_files_are_compressed_as_asked_and_have_page_checksums(tmp_path: Path, compression: str) -> None:
    (report,) = write_one(tmp_path, WIDE, wide_batch(range(100)), compression=compression)
    footer = pq.read_metadata(tmp_path / report["name"])
    expected = "UNCOMPRESSED" if compression == "none" else compression.upper()
    assert footer.row_group(0).column(0).compression == expected
    with pq.ParquetFile(tmp_path / report["name"], page_checksum_verification=True) as file:
        assert file.read().num_rows == 100
    # One bit of the data, in the middle of the column's only page.
    data = bytearray((tmp_path / report["name"]).read_bytes())
    data[len(data) // 4] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    with (
        pq.ParquetFile(tmp_path / "flipped", page_checksum_verification=True) as file,
        pytest.raises(OSError, match=r"CRC checksum verification failed|[Cc]orrupt"),
    ):
        file.read()


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_task_leaves_no_writer_in_memory(tmp_path: Path, is_bad: bool) -> None:
    rows = [[1.0, 2.0]] * 10_000 + [[1.0, None]] * is_bad
    for _ in range(3):
        write_one(tmp_path, plan(dtype="float64"), pa.array(rows, pa.list_(pa.float64())), row_group_bytes=1024)
    gc.collect()
    assert [one for one in gc.get_objects() if type(one) is pq.ParquetWriter] == []


def test_a_disk_that_refuses_a_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        """A file that takes so many bytes and no more."""

        def __init__(self, file: Any) -> None:
            self.file, self.left = file, 100_000

        def write(self, data: memoryview) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(28, "No space left on device")
            return int(self.file.write(data))

        def close(self) -> None:
            self.file.close()

    monkeypatch.setattr(parquet_file, "open_new", lambda *names, **size: FullDisk(open_new(*names, **size)))
    with pytest.raises(OSError, match="No space left on device"):
        write_one(tmp_path, WIDE, wide_batch(range(10_000)), row_group_bytes=64 << 10)
    assert files(tmp_path) == []

    def refuse(*_: Any) -> None:
        raise PermissionError("and nothing can be removed")

    # The first error is the one to be seen.
    monkeypatch.setattr(parquet_file, "remove_file", refuse)
    with pytest.raises(OSError, match="No space left on device"):
        write_one(tmp_path, WIDE, wide_batch(range(10_000)), row_group_bytes=64 << 10)


class Slow:
    """A remote file that takes a second for each write, fails from so many bytes on, or hangs."""

    def __init__(self, *, fails_at: int = 1 << 60, hangs: bool = False) -> None:
        self.fails_at, self.hangs, self.taken, self.now = fails_at, hangs, bytearray(), 0.0
        self.is_released = threading.Event()

    def write(self, piece: bytes) -> int:
        self.now += 1
        if self.hangs:
            self.is_released.wait()
        if len(self.taken) + len(piece) > self.fails_at:
            raise OSError(28, "No space left on device")
        self.taken += piece
        return len(piece)

    def monotonic(self) -> float:
        """The time by a clock that these writes move."""
        return self.now


def write_behind(raw: Slow, timeout_seconds: float = 60) -> Any:
    return parquet_file._write_behind(raw, {"timeout_seconds": timeout_seconds}, "/cache/part")


@pytest.mark.parametrize("waiting_bytes", [1, 1000, 1 << 20])
def test_what_is_written_behind_arrives_in_its_order(monkeypatch: pytest.MonkeyPatch, waiting_bytes: int) -> None:
    monkeypatch.setattr(parquet_file, "_WAITING_BYTES", waiting_bytes)
    parts = [bytes([number]) * (number * 7 % 50) for number in range(60)]
    raw = Slow()
    write, finish, _ = write_behind(raw)
    for part in parts:
        write(pa.py_buffer(part) if len(part) % 2 else part)
    finish()
    assert raw.taken == b"".join(parts)


def test_a_store_that_is_slower_than_the_encoder_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "_WAITING_BYTES", 6)
    raw = Slow(hangs=True)
    write, finish, _ = write_behind(raw)
    written: list[bytes] = []

    def write_all() -> None:
        for number in range(9):
            write(bytes([number]) * 3)
            written.append(b"")
        finish()

    encoder = threading.Thread(target=write_all)
    encoder.start()
    wait_until(lambda: len(written) == 2)
    encoder.join(0.05)
    assert len(written) == 2
    raw.is_released.set()
    encoder.join(60)
    assert raw.taken == b"".join(bytes([number]) * 3 for number in range(9))


def test_what_fails_behind_is_raised_before() -> None:
    raw = Slow(fails_at=5)
    write, finish, _ = write_behind(raw)

    def write_on() -> None:
        while True:
            write(b"abc")

    with pytest.raises(OSError, match="No space left on device"):
        write_on()
    with pytest.raises(OSError, match="No space left on device"):
        finish()
    assert raw.taken == b"abc"


def test_who_gives_up_waits_for_no_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LAST_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(parquet_file, "LAST_WAIT_SECONDS", 0.1)
    raw = Slow(hangs=True)
    write, _, stop = write_behind(raw)
    for _ in range(8):
        write(b"abc")
    stop()
    raw.is_released.set()
    # What waited is dropped, and the thread ends.
    wait_until(lambda: deadlines.WRITING_THREAD not in [thread.name for thread in threading.enumerate()])
    assert raw.taken in (b"", b"abc")


@pytest.mark.parametrize("is_full", [False, True])
def test_a_store_that_hangs_is_given_up_behind(monkeypatch: pytest.MonkeyPatch, is_full: bool) -> None:
    monkeypatch.setattr(parquet_file, "_WAITING_BYTES", 3 if is_full else 1 << 20)
    raw = Slow(hangs=True)
    write, finish, stop = write_behind(raw, timeout_seconds=0.2)
    write(b"abc")
    with pytest.raises(TimeoutError, match=r"made no progress for 0\.2 seconds \(timeout_seconds\) at /cache/part"):
        write(b"abc") if is_full else finish()
    raw.is_released.set()
    stop()


def test_a_store_that_is_slow_and_goes_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "_WAITING_BYTES", 6)
    raw = Slow()
    monkeypatch.setattr(parquet_file, "time", raw)
    write, finish, _ = write_behind(raw, timeout_seconds=2)
    for _ in range(25):
        write(b"abc")
    finish()
    assert raw.now > 2
    assert len(raw.taken) == 75


def test_what_is_written_at_once_is_handed_over_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "_STEP_BYTES", 4)
    raw = Slow()
    write = parquet_file._write_blocks(raw, {"timeout_seconds": 60}, "/cache/part")
    sizes: list[int] = []
    monkeypatch.setattr(raw, "write", lambda piece: (sizes.append(len(piece)), raw.taken.extend(piece)))
    write(pa.py_buffer(b"0123456789"))
    write(b"")
    assert (sizes, raw.taken) == ([4, 4, 2], b"0123456789")


def test_a_disk_that_takes_a_write_in_parts_gets_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (straight,) = write_one(tmp_path / "a", WIDE, wide_batch(range(1000)))

    class Reluctant:
        """A file that takes at most a thousand bytes at once, as an unbuffered one may."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: memoryview) -> int:
            return int(self.file.write(data[:1000]))

        def close(self) -> None:
            self.file.close()

    monkeypatch.setattr(parquet_file, "open_new", lambda *names, **size: Reluctant(open_new(*names, **size)))
    (report,) = write_one(tmp_path / "b", WIDE, wide_batch(range(1000)))
    assert report == straight
    assert (tmp_path / "b" / report["name"]).read_bytes() == (tmp_path / "a" / report["name"]).read_bytes()


def test_equal_rows_have_equal_digests_whatever_the_task(tmp_path: Path) -> None:
    columns = [column.plan() for column in ALL]
    one = write([record_batch(ALL, range(500))], tmp_path, columns, partition=0, attempt=1)
    two = write([record_batch(ALL, range(500))], tmp_path, columns, partition=3, attempt=99)
    parts = write([record_batch(ALL, range(200)), record_batch(ALL, range(200, 500))], tmp_path, columns, partition=4)
    assert one[0]["digests"] == two[0]["digests"] == parts[0]["digests"]
    assert one[0]["name"] != two[0]["name"]


@pytest.mark.parametrize("changed", range(len(SCALARS)))
def test_one_other_value_is_another_digest(tmp_path: Path, changed: int) -> None:
    columns = [column.plan() for column in SCALARS]
    batch = record_batch(SCALARS, range(500))
    others = batch.column(changed).to_pylist()
    present = [value for value in others if value != others[250]]
    others[250] = present[0]
    array = pa.array(others, batch.column(changed).type)
    other = batch.set_column(changed, batch.schema.field(changed), array)
    one, two = (write([rows], tmp_path / name, columns) for name, rows in (("a", batch), ("b", other)))
    assert one[0]["digests"] != two[0]["digests"]
    assert one[0]["rows"] == two[0]["rows"]


@pytest.mark.parametrize("compression", ["none", "zstd", "auto"])
@pytest.mark.parametrize("row", [0, 19_999])
def test_one_other_number_in_a_large_page_is_another_digest(tmp_path: Path, row: int, compression: str) -> None:
    rows = wide_batch(range(20_000))
    assert rows.nbytes > 10 * parquet_file._MAX_HEADER_BYTES
    numbers = rows.flatten().to_numpy().copy()
    numbers[row * 16] += 0.5
    other = pa.FixedSizeListArray.from_arrays(pa.array(numbers), 16).cast(rows.type)
    one, same, two = (
        write_one(tmp_path / name, WIDE, array, compression=compression)[0]["digests"]
        for name, array in (("a", rows), ("b", rows), ("c", other))
    )
    assert one == same
    assert one != two


def test_every_row_group_has_its_digest(tmp_path: Path) -> None:
    (report,) = write_one(tmp_path, WIDE, wide_batch(range(10_000)), row_group_bytes=2560 * ROW_BYTES)
    assert len(report["digests"]) == len(report["rows"]) == len(report["row_group_bytes"]) > 3
    assert len(set(report["digests"])) == len(report["digests"])
