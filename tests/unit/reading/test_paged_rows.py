"""Wide rows in compressed pages of others' files, in every way in which rows are asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, ReadError, SourceError, make_parquet_converter
from converter.reading import row_groups

NUM_ROWS, WIDTH = 900, 100
VECTORS = np.random.default_rng(3).normal(size=(NUM_ROWS, WIDTH)).astype(np.float32)


def write(path: Path, vectors: Any, **options: Any) -> None:
    table = pa.table({"id": np.arange(len(vectors)), "x": vectors})
    # Six pages in a row group.
    pages = {"data_page_size": 1 << 14, "write_batch_size": 8, "use_dictionary": False}
    pq.write_table(table, path, **{"row_group_size": 300, "compression": "snappy"} | pages | options)


def lists(vectors: np.ndarray[Any, Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), WIDTH).cast(pa.list_(pa.float32()))


@pytest.fixture
def num_paged(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each column that could come page by page did."""
    found: list[bool] = []
    gather_pages = row_groups.gather_pages

    def noted(*arguments: Any) -> Any:
        column = gather_pages(*arguments)
        found.append(column is not None)
        return column

    monkeypatch.setattr(row_groups, "gather_pages", noted)
    return found


def read(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    with converter.make_batch_reader(batch_size=64, **options) as reader:
        batches = list(reader)
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@pytest.mark.parametrize("compression", ["snappy", "zstd"])
@pytest.mark.parametrize("options", [
    {}, {"shuffle": True, "seed": 4}, {"shuffle": True, "seed": 4, "shuffle_window_rows": 500},
    {"shuffle": True, "filters": [("id", "<", 700)]}, {"filters": [("id", ">", 333)]},
    {"shuffle": True, "cur_shard": 1, "shard_count": 3}, {"cur_shard": 1, "shard_count": 3},
    {"verify_checksums": True},
])  # fmt: skip
def test_rows_are_those_of_the_file(
    tmp_path: Path, compression: str, options: dict[str, Any], num_paged: list[bool]
) -> None:
    write(tmp_path / "x.parquet", lists(VECTORS), compression=compression, write_page_checksum=True)
    found = read(make_parquet_converter(tmp_path), **options)
    assert num_paged
    assert all(num_paged)
    assert len(found["id"]) >= 290
    assert np.array_equal(found["x"], VECTORS[found["id"]])


def test_rows_after_a_resume_are_the_very_next_ones(tmp_path: Path, num_paged: list[bool]) -> None:
    write(tmp_path / "x.parquet", lists(VECTORS))
    converter = make_parquet_converter(tmp_path)
    whole = read(converter, shuffle=True)
    with converter.make_batch_reader(batch_size=64, shuffle=True) as reader:
        for _ in zip(range(5), reader, strict=False):
            pass
        state = reader.state_dict()
    with converter.make_batch_reader(batch_size=64, shuffle=True) as reader:
        reader.load_state_dict(state)
        rest = list(reader)
    assert all(num_paged)
    assert np.array_equal(np.concatenate([batch["x"] for batch in rest]), whole["x"][5 * 64 :])


def test_rows_of_bytes_with_lengths_are_those_of_the_file(tmp_path: Path, num_paged: list[bool]) -> None:
    values = VECTORS.view(np.uint8)
    write(tmp_path / "x.parquet", pa.array([row.tobytes() for row in values], pa.binary()))
    found = read(make_parquet_converter(tmp_path, shapes={"x": (4 * WIDTH,)}), shuffle=True)
    assert all(num_paged)
    assert num_paged
    assert np.array_equal(found["x"], values[found["id"]])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_page_with_rows_of_other_lengths_is_left_to_arrow(
    tmp_path: Path, shuffle: bool, num_paged: list[bool]
) -> None:
    vectors = VECTORS.tolist()
    # The footer counts the numbers alone.
    vectors[556].append(vectors[555].pop())
    write(tmp_path / "x.parquet", pa.array(vectors, pa.list_(pa.float32())))
    converter = make_parquet_converter(tmp_path, shapes={"x": (WIDTH,)})
    with pytest.raises(SourceError, match="'x'"):
        read(converter, shuffle=shuffle)
    assert False in num_paged


def test_a_page_that_is_damaged_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write(path, lists(VECTORS), write_page_checksum=True)
    converter = make_parquet_converter(tmp_path)
    chunk = pq.read_metadata(path).row_group(1).column(1)
    data = bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 0xFF
    stamp = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(ReadError, match=r"x\.parquet"):
        read(converter, shuffle=True, verify_checksums=True)
