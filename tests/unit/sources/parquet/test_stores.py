"""Files in stores that hang, change or share a line, and local copies of them."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import (
    ReadError,
    SourceChangedError,
    make_parquet_converter,
)
from converter.cache import leases
from converter.reading import gather, windows
from converter.storage.store import Store
from tests.processes import run_python
from tests.unit.sources.parquet.known_files import (
    Hanging,
    put,
    read,
    write,
)


def test_what_a_host_keeps_is_of_the_file_that_was_looked_at(tmp_path: Path) -> None:
    put("memory://kept/day=1/a.parquet", [1, 2, 5])
    with make_parquet_converter("memory://kept") as before:
        assert read(before, local_cache_dir=tmp_path)["id"].tolist() == [1, 2, 5]
        put("memory://kept/day=1/a.parquet", [1, 4, 5])
        with make_parquet_converter("memory://kept") as after:
            assert read(after, local_cache_dir=tmp_path)["id"].tolist() == [1, 4, 5]
            assert read(after)["id"].tolist() == [1, 4, 5]
        assert read(before, local_cache_dir=tmp_path)["id"].tolist() == [1, 2, 5]
        with pytest.raises(SourceChangedError, match=r"a\.parquet was written again after the converter was made"):
            read(before)


@pytest.mark.parametrize("num_rows", [2, 5000])
def test_a_remote_file_of_another_size_is_no_damaged_one(tmp_path: Path, num_rows: int) -> None:
    put(f"memory://size{num_rows}/a.parquet", list(range(3000)))
    with make_parquet_converter(f"memory://size{num_rows}") as converter:
        put(f"memory://size{num_rows}/a.parquet", list(range(num_rows)))
        for look in (read, lambda one: read(one, local_cache_dir=tmp_path), lambda one: one.statistics):
            with pytest.raises(SourceChangedError, match=r"a\.parquet "):
                look(converter)


@pytest.mark.parametrize(("num_workers", "processes_count"), [(0, 3), (2, 6)])
def test_ranks_and_their_workers_share_a_line(
    num_workers: int, processes_count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "said"

    def share_line(_: Store, count: int) -> None:
        # In a file, as worker processes say it too.
        with said.open("a") as file:
            file.write(f"{count}\n")

    monkeypatch.setattr(Store, "share_line", share_line)
    put("memory://shared/f0.parquet", list(range(12)))
    with (
        make_parquet_converter("memory://shared") as converter,
        converter.make_torch_dataloader(
            batch_size=2,
            cur_shard=1,
            shard_count=3,
            num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
        ) as loader,
    ):
        assert len(list(loader)) == 2
    assert set(said.read_text().split()) == {str(processes_count)}


def test_what_a_line_does_not_take_at_once_is_asked_for_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        put(f"memory://windows/f{number:02d}.parquet", list(range(5 * number, 5 * number + 5)))
    with make_parquet_converter("memory://windows") as converter:
        monkeypatch.setattr("converter.storage.requests.SLOW_BYTES_PER_SECOND", 1e-9)
        monkeypatch.setattr("converter.storage.requests._TIME_USED", 0)
        read_range, asked = Store.read_range, []

        def read_slowly(store: Store, path: str, start: int, *arguments: Any) -> Any:
            # Not the footers, which begin with the file where it is this small.
            if start:
                asked.append(int(path[-10:-8]) // 5)
            return read_range(store, path, start, *arguments)

        monkeypatch.setattr(Store, "read_range", read_slowly)
        with converter.make_torch_dataloader(batch_size=25, shuffle_window_rows=25, prefetch_batches=6) as batches:
            assert [batch["id"].tolist() for batch in batches] == [list(range(at, at + 25)) for at in range(0, 150, 25)]
    assert len(asked) == 30
    # Threads that began one after the other may arrive the other way round, but never far from it.
    assert all(window <= number // 5 + 1 for number, window in enumerate(asked)), asked


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    found = Hanging(monkeypatch)
    yield found
    found.is_over.set()


def test_a_footer_is_asked_for_once_also_where_more_files_are_on_their_way_than_are_kept_open(
    monkeypatch: pytest.MonkeyPatch, hanging: Hanging
) -> None:
    for number in range(60):
        put(f"memory://many/f{number:02d}.parquet", [number])
    with make_parquet_converter("memory://many") as converter:
        monkeypatch.setattr("converter.reading.data_files.MAX_OPEN_FILES", 5)
        hanging.asked.clear()
        ids = read(converter, shuffle_window_rows=10, prefetch_batches=8, workers_count=4)["id"]
        assert ids.tolist() == list(range(60))
    assert sorted(hanging.asked) == sorted((f"/many/f{n:02d}.parquet", start) for n in range(60) for start in (0, 4))


def test_who_waits_for_a_file_that_cannot_be_opened_does_not_try_again(hanging: Hanging) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"id": range(60)}), content, row_group_size=1)
    fsspec.filesystem("memory").pipe_file("/one/a.parquet", content.getvalue())
    with make_parquet_converter("memory://one", timeout_seconds=0.5) as converter:
        hanging.asked.clear()
        hanging.has_begun.set()
        with pytest.raises(ReadError, match=r"a\.parquet could not be reached for 0\.5 seconds"):
            read(converter, batch_size=1, shuffle_window_rows=1, prefetch_batches=8, workers_count=4)
    # Who comes later than that asks once more.
    assert len(hanging.asked) <= 3


def test_a_store_that_is_away_costs_no_copy(tmp_path: Path, hanging: Hanging) -> None:
    for number in range(20):
        put(f"memory://copied/f{number:02d}.parquet", [number])
    with make_parquet_converter("memory://copied", timeout_seconds=0.3) as converter:
        read(converter, local_cache_dir=tmp_path)
        copies = sorted(tmp_path.glob("*/*/rows-*"))
        assert len(copies) == 20
        copies.pop().unlink()
        hanging.asked.clear()
        hanging.has_begun.set()
        with pytest.raises(ReadError, match=r"\.parquet cannot be fetched: .*could not be reached for 0\.3 seconds"):
            read(converter, local_cache_dir=tmp_path)
    assert sorted(tmp_path.glob("*/*/rows-*")) == copies
    assert len(hanging.asked) == 1


@pytest.mark.parametrize("instead", ["nothing", "a file"])
def test_a_local_cache_that_somebody_removes_costs_no_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, instead: str
) -> None:
    kept = tmp_path / "kept"
    for number in range(20):
        put(f"memory://removed/f{number:02d}.parquet", [number])
    with (
        make_parquet_converter("memory://removed") as converter,
        converter.make_batch_reader(batch_size=1, shuffle_window_rows=1, local_cache_dir=kept) as reader,
    ):
        found = []
        for batch in reader:
            if not found:
                # Not file by file, as new ones appear meanwhile.
                kept.rename(tmp_path / "elsewhere")
                if instead == "a file":
                    kept.touch()
            found += batch["id"].tolist()
        assert found == list(range(20))
    assert "what does not fit is fetched each time" in caplog.text


def leave_an_iterator_unfinished() -> None:
    """In a process of its own, whose end follows."""
    for number in range(300):
        put(f"memory://left/f{number:03d}.parquet", [number])
    hanging = Hanging(pytest.MonkeyPatch())
    converter = make_parquet_converter("memory://left", timeout_seconds=600)
    reader = converter.make_batch_reader(batch_size=4, shuffle_window_rows=8, prefetch_batches=16)
    globals()["kept"] = iterator = iter(reader)
    next(iterator)
    hanging.has_begun.set()


@pytest.mark.long("starts a Python")
def test_the_interpreters_end_does_not_wait_for_a_store_that_hangs() -> None:
    run_python(leave_an_iterator_unfinished)


def test_a_file_that_was_written_again_is_noticed_though_its_footer_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "a.parquet", {"id": [1, 2, 5]})
    converter = make_parquet_converter(tmp_path)
    pickled = pickle.dumps(converter)
    before, content_before = file.stat(), file.read_bytes()
    write(tmp_path, "a.parquet", {"id": [1, 4, 5]})
    assert len(file.read_bytes()) == len(content_before)
    for look in (read, lambda one: one.where([("id", ">", 0)]), lambda one: one.statistics):
        for one in (converter, pickle.loads(pickled)):
            with pytest.raises(SourceChangedError, match=r"a\.parquet was written again after the converter was made"):
                look(one)
    file.write_bytes(content_before)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read(converter)["id"].tolist() == [1, 2, 5]
    # Elsewhere the same files may have been written at another time.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    monkeypatch.setattr(leases, "this_host", lambda: "another")
    assert read(pickle.loads(pickled))["id"].tolist() == [1, 2, 5]


def test_rows_of_a_file_that_is_written_into_meanwhile_are_not_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"id": range(1000)}), tmp_path / "a.parquet")
    content, gathered = (tmp_path / "a.parquet").read_bytes(), gather.gather

    def gather_and_write(*arguments: Any) -> Any:
        found = gathered(*arguments)
        with open(tmp_path / "a.parquet", "r+b") as file:
            file.write(content)
        return found

    with (
        make_parquet_converter(tmp_path) as converter,
        converter.make_batch_reader(batch_size=10) as reader,
    ):
        monkeypatch.setattr(windows, "gather", gather_and_write)
        with pytest.raises(SourceChangedError, match=r"a\.parquet was written again"):
            next(iter(reader))
