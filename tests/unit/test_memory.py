"""Memory is used again when nobody needs it, and only then; what a plan tells is kept to."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from converter import make_parquet_converter, memory
from converter.memory import LARGE_BYTES, SPARE, Blocks
from converter.reading import data_files
from tests.processes import run_python

INT8 = np.dtype("int8")


def test_memory_is_used_again_when_its_last_view_ends() -> None:
    blocks = Blocks()
    first = blocks.new_array((LARGE_BYTES,), INT8)
    address = first.ctypes.data
    tensor = torch.from_numpy(first)[1000:].view(-1)
    view = first.reshape(2, -1)[1]
    del first
    first_again = blocks.new_array((LARGE_BYTES,), INT8)
    assert first_again.ctypes.data != address
    del view
    assert blocks.new_array((LARGE_BYTES,), INT8).ctypes.data != address
    del tensor
    found = {array.ctypes.data for array in [blocks.new_array((LARGE_BYTES,), INT8) for _ in range(2)]}
    assert address in found


def test_an_array_is_writable_and_has_its_dtype_and_shape() -> None:
    found = Blocks().new_array((1 << 18, 3), np.dtype("float64"))
    found[...] = 1.5
    assert (found.dtype, found.shape, float(found.sum())) == (np.dtype("float64"), (1 << 18, 3), 1.5 * 3 * (1 << 18))


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 5)), max_size=40))
def test_hardly_more_is_held_than_was_lent_at_one_time(steps: list[tuple[int, int]]) -> None:
    blocks, arrays, most = Blocks(), [], 0
    for size, kept in steps:
        arrays.append(blocks.new_array((size << 14,), INT8))
        most = max(most, blocks.num_bytes[0])
        assert blocks.num_bytes[0] >= sum(map(len, arrays))
        assert sum(blocks.num_bytes) <= SPARE * most
        arrays = arrays[-kept:] if kept else []
    arrays.clear()
    assert blocks.num_bytes[0] == 0
    blocks.drop_idle()
    assert blocks.num_bytes == (0, 0)


def write_lists(folder: Path, num_rows: int = 100_000) -> None:
    """Vectors, as Spark and others write them: Arrow must undo a compression."""
    width = 256
    numbers = np.random.default_rng(0).random(num_rows * width, np.float32)
    offsets = np.arange(0, num_rows * width + 1, width, dtype=np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(numbers))
    pq.write_table(pa.table({"id": range(num_rows), "vector": lists}), folder / "x.parquet", row_group_size=8000)


def write_texts(folder: Path) -> None:
    """Texts of 8 to 240 bytes."""
    lengths = np.random.default_rng(0).integers(1, 30, 400_000)
    texts = pa.array([f"abc {row} " * length for row, length in enumerate(lengths.tolist())])
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), folder / "x.parquet", row_group_size=40_000)


def memory_of_epochs(path: str, num_epochs: int) -> list[int]:
    """The anonymous memory that reading took at most, and the bound that was told."""
    with (
        make_parquet_converter(path) as converter,
        converter.make_batch_reader(batch_size=1024, shuffle=True) as reader,
    ):
        told = converter.plan(batch_size=1024, shuffle=True).peak_memory_bytes
        before, peak, is_over = memory.anonymous_bytes(), [0], threading.Event()
        assert before is not None

        def watch() -> None:
            while not is_over.wait(0.002):
                peak[0] = max(peak[0], memory.anonymous_bytes() or 0)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for _ in range(num_epochs):
                for _batch in reader:
                    pass
        finally:
            is_over.set()
            watcher.join()
    return [peak[0] - before, told]


@pytest.mark.long("reads 100 MB again and again in a process of its own")
@pytest.mark.skipif(memory.anonymous_bytes() is None, reason="the system does not say what memory a process has")
@pytest.mark.parametrize("write", [write_lists, write_texts])
def test_epoch_after_epoch_keeps_to_what_the_plan_tells(tmp_path: Path, write: object) -> None:
    assert callable(write)
    write(tmp_path)
    peak, told = run_python(memory_of_epochs, str(tmp_path), 8)
    # So that the watching is seen to work.
    assert 50_000_000 < peak <= told


def test_a_loader_that_is_closed_leaves_no_idle_memory(tmp_path: Path) -> None:
    write_lists(tmp_path, num_rows=20_000)
    with make_parquet_converter(str(tmp_path)) as converter:
        with converter.make_batch_reader(batch_size=1024, shuffle=True) as reader:
            for _batch in reader:
                pass
            assert memory.blocks.num_bytes[1] > LARGE_BYTES
        del _batch
        assert memory.blocks.num_bytes[1] == 0


def test_an_interrupt_while_idle_memory_is_returned_at_the_end_of_a_block_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_closing = False

    def interrupt() -> None:
        if is_closing:
            raise KeyboardInterrupt

    monkeypatch.setattr(data_files, "give_back_idle", interrupt)
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "x.parquet")
    reader = make_parquet_converter(tmp_path).make_batch_reader(batch_size=5)

    def read_and_close() -> None:
        nonlocal is_closing
        with reader:
            assert len(list(reader)) == 2
            is_closing = True

    with pytest.raises(KeyboardInterrupt):
        read_and_close()
    is_closing = False
