"""The sources of a mixture are read side by side and ahead of use, and their threads end with it."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import ConverterError, DatasetConverter, make_parquet_converter, mix
from converter.mixing import CYCLE_ROWS, Mixing
from converter.plan import Shuffle
from converter.reading import mixing as reading
from converter.reading import windows
from converter.reading.gather import take_columns
from converter.reading.windows import _WindowReader
from converter.storage.requests import GivenUpError

OPTIONS: dict[str, Any] = {"batch_size": 10, "shuffle": True, "seed": 1}

pytestmark = pytest.mark.timeout(60)


def write(folder: Path, num_rows: int, *, first: int = 0) -> DatasetConverter:
    folder.mkdir()
    rows = np.arange(first, first + num_rows)
    pq.write_table(pa.table({"n": rows, "x": rows.astype(np.float32)}), folder / "part.parquet", row_group_size=50)
    return make_parquet_converter(folder)


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, DatasetConverter]:
    return {"a": write(tmp_path / "a", 1000), "b": write(tmp_path / "b", 1000, first=5000)}


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("converter-")]


def test_sources_are_read_at_the_same_time(sources: dict[str, DatasetConverter]) -> None:
    together, read, seen = threading.Barrier(2), _WindowReader.read, set[str]()

    def read_together(reader: Any, item: Any) -> Any:
        url = reader.source.storage.url
        if url not in seen:
            seen.add(url)
            # Breaks if the other source is read only after this one.
            together.wait(30)
        return read(reader, item)

    with (
        mock.patch.object(_WindowReader, "read", read_together),
        mix(sources).make_batch_reader(**OPTIONS) as reader,
    ):
        assert len(list(reader)) == 200


def test_a_batch_waits_for_its_own_rows_alone(
    sources: dict[str, DatasetConverter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "mixed_bytes", lambda source: 16 * 80)
    read, is_wanted = _WindowReader.read, threading.Event()

    def read_later(reader: Any, item: Any) -> Any:
        if item[0].window:
            is_wanted.wait(30)
        return read(reader, item)

    options = {**OPTIONS, "shuffle_window_rows": 200}
    with mix(sources).make_batch_reader(**options) as reader:
        expected = list(reader)
    with mock.patch.object(_WindowReader, "read", read_later), mix(sources).make_batch_reader(**options) as reader:
        batches = iter(reader)
        # Of 200 rows of each source.
        found = list(itertools.islice(batches, 20))
        assert not is_wanted.is_set()
        is_wanted.set()
        found += batches
    for batch, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(batch["n"], wanted["n"])


def test_a_source_that_starts_over_is_read_on(sources: dict[str, DatasetConverter], tmp_path: Path) -> None:
    """With its threads, and its next epoch is begun before it is wanted."""
    made: list[Any] = []
    init = _WindowReader.__init__

    def count(reader: Any, *arguments: Any) -> None:
        made.append(reader)
        init(reader, *arguments)

    few = write(tmp_path / "few", 30, first=9000)
    both = mix({"a": sources["a"], "few": few}, {"a": 1, "few": 1}, stop=2000)
    with mock.patch.object(_WindowReader, "__init__", count), both.make_batch_reader(**OPTIONS) as reader:
        numbers = np.concatenate([batch["n"] for batch in reader])
    assert len(made) == 2
    own = numbers[numbers >= 9000]
    epochs = [own[start : start + 30].tolist() for start in range(0, 990, 30)]
    assert all(sorted(epoch) == list(range(9000, 9030)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == len(epochs)


def test_mapped_columns_are_taken_together_as_decompressed_ones_are_alone(tmp_path: Path) -> None:
    numbers = np.arange(3000)
    table = pa.table(
        {
            "n": numbers,
            "x": numbers.astype(np.float32),
            # Whatever is behind it in the file is not aligned.
            "flag": (numbers % 3).astype(np.int8),
            "late": numbers.astype(np.int32),
            "pair": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 2).astype(np.int16)), 2),
            "wide": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, 80).astype(np.float32)), 80),
            "word": [f"w{number}" for number in numbers.tolist()],
            "odd": pa.array([number if number % 2 else None for number in numbers.tolist()]),
        }
    )
    found, taken = {}, []

    def take(columns: Any, rows: Any) -> Any:
        taken.append(len(columns))
        return take_columns(columns, rows)

    for compression in ("none", "snappy"):
        taken.clear()
        folder = tmp_path / compression
        folder.mkdir()
        for name, rows in (("a", table.slice(0, 2000)), ("b", table.slice(2000))):
            pq.write_table(rows, folder / f"{name}.parquet", compression=compression, row_group_size=300,
                           use_dictionary=False, data_page_size=500)  # fmt: skip
        both = mix({name: make_parquet_converter(folder / f"{name}.parquet") for name in ("a", "b")})
        # Its fingerprint, and so its order, is that of other files.
        with (
            mock.patch.object(windows, "take_columns", take),
            both.make_batch_reader(**OPTIONS, shuffle_window_rows=700, nulls="mask") as reader,
        ):
            batches = list(reader)
        # Numbers of fewer than 32 bits are widened in the file, so that they are copies here.
        assert max(taken) == (3 if compression == "none" else 0)
        columns = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        order = np.argsort(columns["n"])
        found[compression] = {name: values[order] for name, values in columns.items()}
    for name, values in found["none"].items():
        np.testing.assert_array_equal(values, found["snappy"][name])
    np.testing.assert_array_equal(found["none"]["x"], numbers)
    np.testing.assert_array_equal(found["none"]["pair"][:, 1], numbers.astype(np.int16))


def test_both_parts_of_a_first_window_have_one_permutation(sources: dict[str, DatasetConverter]) -> None:
    drawn: Counter[tuple[int, int]] = Counter()
    permutation = Shuffle.permutation

    def count(shuffle: Any, size: int, *, epoch: int, window: int | None) -> Any:
        if window is not None:
            drawn[epoch, window] += 1
        return permutation(shuffle, size, epoch=epoch, window=window)

    with (
        mock.patch.object(Shuffle, "permutation", count),
        sources["a"].make_batch_reader(**OPTIONS, shuffle_window_rows=500) as reader,
    ):
        numbers = [np.concatenate([batch["n"] for batch in reader]).tolist() for _ in range(2)]
    assert drawn == dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], 1)
    assert sorted(numbers[0]) == sorted(numbers[1]) == list(range(1000))


def test_sources_keep_to_the_memory_of_the_mixture(sources: dict[str, DatasetConverter]) -> None:
    """What one of them takes is no reason for another one to give its memory back and to take it anew."""
    both = mix(sources)
    with both.make_batch_reader(**OPTIONS) as reader:
        list(reader)
        files = reader._epochs.files
        assert len({id(part.room) for part in files.parts}) == 1
        assert files.room.most_bytes == both.plan(**OPTIONS).peak_memory_bytes


@pytest.mark.parametrize("size", [1, 8, 10, 1000, 1024, 4096])
def test_jobs_are_whole_batches_and_whole_cycles_if_both_can_be(
    sources: dict[str, DatasetConverter], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "mixed_element_bytes", lambda source: 40)
    with mix(sources).make_batch_reader(**{**OPTIONS, "batch_size": size}) as reader:
        source = reader._epochs.source
    jobs = list(reading._cut(range(3_000_000), source))
    assert jobs[0].start == 0
    assert all(job.stop == later.start for job, later in itertools.pairwise(jobs))
    assert jobs[-1].stop == 3_000_000
    assert all(len(job) % size == 0 for job in jobs[:-1])
    first, *others, _ = map(len, jobs)
    assert len(set(others)) == 1
    assert first <= others[0] / 8 + size
    assert others[0] * 40 <= 16 << 20
    assert (others[0] % CYCLE_ROWS == 0) == (size != 1000)


def test_an_order_that_comes_again_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mixing = Mixing(names=("a", "b"), sizes=(9, 9), weights={0: (0.3, 0.7)}, num_rows=10**7, seed=77)
    start = 4096 + 5
    first = mixing.interleave(3, [range(start, start + CYCLE_ROWS)])
    later = mixing.interleave(3, [range(start + 7 * CYCLE_ROWS, start + 8 * CYCLE_ROWS)])
    assert first[1] is later[1]
    assert not first[1].flags.writeable


@pytest.mark.parametrize("rows", [10, 1200])
def test_no_thread_is_left(sources: dict[str, DatasetConverter], rows: int) -> None:
    assert not our_threads()
    with mix(sources).make_batch_reader(**OPTIONS) as reader:
        batches = iter(reader)
        for _ in range(rows // 10):
            next(batches)
        assert our_threads()
        batches.close()
        assert not our_threads()


def test_an_error_of_a_source_is_that_of_the_mixture(sources: dict[str, DatasetConverter], tmp_path: Path) -> None:
    both = mix(sources)
    (tmp_path / "b" / "part.parquet").unlink()
    with both.make_batch_reader(**OPTIONS) as reader, pytest.raises(ConverterError, match=r"b/part\.parquet"):
        list(reader)
    assert not our_threads()


def test_the_end_does_not_wait_for_a_store(
    sources: dict[str, DatasetConverter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "mixed_bytes", lambda source: 16 * 80)
    read = _WindowReader.read

    def read_slowly(reader: Any, item: Any) -> Any:
        if item[0].window and reader.source.storage.url.endswith("/b"):
            # As a request does.
            assert reader.given_up.wait(50)
            raise GivenUpError("The read was cancelled")
        return read(reader, item)

    with (
        mock.patch.object(_WindowReader, "read", read_slowly),
        mix(sources).make_batch_reader(**OPTIONS, shuffle_window_rows=200) as reader,
    ):
        for _ in itertools.islice(reader, 10):
            pass
    assert not our_threads()


def test_an_interrupt_while_wide_rows_are_taken_is_raised_at_once(
    sources: dict[str, DatasetConverter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "is_wide", lambda source: True)
    monkeypatch.setattr(reading, "mixed_bytes", lambda source: 16 * 20)
    take, taken = reading._Stream._take, []

    def interrupt(stream: Any, num_rows: int) -> Any:
        taken.append(threading.current_thread())
        if len(taken) == 40:
            raise KeyboardInterrupt
        return take(stream, num_rows)

    monkeypatch.setattr(reading._Stream, "_take", interrupt)
    with mix(sources).make_batch_reader(**OPTIONS) as reader:
        batches = iter(reader)

        def read_until_it_comes() -> None:
            while len(taken) < 40:
                next(batches)

        with pytest.raises(KeyboardInterrupt):
            read_until_it_comes()
    assert set(taken) == {threading.current_thread()}
    assert not our_threads()
