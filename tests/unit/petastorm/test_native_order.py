"""The native engine gives the row groups of a batch reader: the same columns in the same order, or none at all."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter.petastorm import TransformSpec, make_batch_reader, make_reader
from converter.petastorm.predicates import in_lambda
from converter.petastorm.pytorch import BatchedDataLoader, DataLoader
from converter.petastorm.reader_impl import native_order
from converter.petastorm.reader_impl.native_order import native_blocks
from tests.unit.petastorm.conftest import Stored

FIELDS = ["id", "speed", "pair"]


def blocks_of(reader: Any) -> list[dict[str, Any]]:
    blocks = []
    while True:
        try:
            blocks.append(reader.next_block())
        except StopIteration:
            return blocks


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle_row_groups": False},
        {"seed": 0},
        {"seed": 3, "num_epochs": 3},
        {"seed": 3, "cur_shard": 1, "shard_count": 4},
        {"seed": 5, "schema_fields": ["speed"]},
        {"seed": 5, "transform_spec": TransformSpec(removed_fields=["pair"])},
    ],
    ids=" ".join,
)
def test_row_groups_are_those_of_the_reader_in_its_order(plain: Stored, options: dict[str, Any]) -> None:
    arguments = {"schema_fields": FIELDS} | options
    with make_batch_reader(plain.url, **arguments) as reader, make_batch_reader(plain.url, **arguments) as other:
        native = native_blocks(other.work, threading.Event())
        assert native is not None
        expected, actual = blocks_of(reader), list(native)
    assert len(expected) == len(actual) > 3
    for block, columns in zip(expected, actual, strict=True):
        assert list(block) == list(columns)
        for name, column in block.items():
            assert (columns[name].dtype, columns[name].shape) == (column.dtype, column.shape)
            np.testing.assert_array_equal(columns[name], column)
            assert columns[name].flags.writeable


def test_an_endless_reader_goes_on_with_the_next_epoch(plain: Stored) -> None:
    with make_batch_reader(plain.url, schema_fields=["id"], num_epochs=None) as reader:
        native = native_blocks(reader.work, threading.Event())
        assert native is not None
        ids = np.concatenate([block["id"] for block in itertools.islice(native, 45)])
        native.close()
    assert len(ids) > 120
    assert sorted(ids[:60]) == sorted(ids[60:120]) == list(range(60))


def test_a_file_without_rows_is_passed_over(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(5)}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "b.parquet")
    with make_batch_reader(tmp_path.as_uri()) as reader:
        native = native_blocks(reader.work, threading.Event())
        assert native is not None
        assert [block["id"].tolist() for block in native] == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle_rows": True},
        {"shuffle_row_drop_partitions": 2},
        {"transform_spec": TransformSpec(lambda frame: frame)},
        {"predicate": in_lambda(["id"], lambda number: number > 5)},
        {"filters": [("id", ">", 5)]},
        {"schema_fields": ["id", "group"]},
    ],
    ids=" ".join,
)
def test_what_the_engine_cannot_read_alike_is_left_to_the_reader(plain: Stored, options: dict[str, Any]) -> None:
    with make_batch_reader(plain.url, **{"schema_fields": FIELDS} | options) as reader:
        assert native_blocks(reader.work, threading.Event()) is None


@pytest.mark.parametrize("loader", [None, DataLoader, BatchedDataLoader])
def test_unsigned_numbers_keep_their_types(loader: Any, tmp_path: Path) -> None:
    kinds = [pa.uint8(), pa.list_(pa.uint8())]
    cells = [[1, 2], [3, 250]]
    table = {
        f"c{number}": pa.array(cells if pa.types.is_list(kind) else [1, 250], kind) for number, kind in enumerate(kinds)
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    reader = make_batch_reader(tmp_path.as_uri(), num_epochs=1)
    with reader if loader is None else loader(reader, batch_size=2, shuffling_queue_capacity=9) as batches:
        batch = next(iter(batches))
    for number, kind in enumerate(kinds):
        column = getattr(batch, f"c{number}") if loader is None else batch[f"c{number}"].numpy()
        assert column.dtype == (kind.value_type if pa.types.is_list(kind) else kind).to_pandas_dtype()
        assert sorted(column.tolist()) == (cells if pa.types.is_list(kind) else [1, 250])


def test_rows_that_codecs_decode_are_left_to_the_reader(stored: Stored) -> None:
    with make_reader(stored.url) as reader:
        assert native_blocks(reader.work, threading.Event()) is None


def test_many_files_are_left_to_the_reader(plain: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_order, "_MOST_FILES", 5)
    with make_batch_reader(plain.url, schema_fields=FIELDS) as reader:
        assert native_blocks(reader.work, threading.Event()) is None
