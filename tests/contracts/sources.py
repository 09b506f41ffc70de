"""What every source must do. A new source passes these tests with the rows of `TABLE`, and is complete."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, ReadError, SourceChangedError
from converter.dataset import borrow_files
from converter.manifest import Manifest
from converter.storage.directory import Storage

NUM_ROWS = 1000
TABLE = pa.table(
    {
        "id": pa.array(range(NUM_ROWS), pa.int64()),
        "x": pa.array([None if number % 97 == 0 else number / 2 for number in range(NUM_ROWS)], pa.float32()),
        "text": [f"row {number}" for number in range(NUM_ROWS)],
        "vector": pa.array([[number, -number] for number in range(NUM_ROWS)], pa.list_(pa.float32())),
        "tags": [[f"tag {number + place}" for place in range(number % 3)] for number in range(NUM_ROWS)],
    }
)


def write_files(folder: Path, *, rows_per_file: int = 250, row_group_rows: int = 100) -> list[Path]:
    """The table in several files of several row groups, for a source of existing Parquet files."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for start in range(0, NUM_ROWS, rows_per_file):
        paths.append(folder / f"part-{start:04d}.parquet")
        pq.write_table(TABLE.slice(start, rows_per_file), paths[-1], row_group_size=row_group_rows)
    return paths


class SourceContract:
    """Subclasses define `write`, which writes the rows into a folder, and `find`, which calls the source."""

    def write(self, folder: Path) -> None:
        """Write `TABLE` into a folder as the source expects it, in more than one file."""
        raise NotImplementedError

    def find(self, folder: Path) -> tuple[Storage, Manifest]:
        """Call the source: its storage and its manifest."""
        raise NotImplementedError

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """The folder that holds the rows."""
        self.write(tmp_path / "source")
        return tmp_path / "source"

    @pytest.fixture
    def converter(self, folder: Path) -> DatasetConverter:
        """A converter of the rows."""
        return borrow_files(*self.find(folder))

    def ids(self, converter: DatasetConverter, **options: Any) -> list[int]:
        """The ids of the rows that a reader yields, in their order."""
        arguments: dict[str, Any] = {"batch_size": 64, "columns": ["id"], "cur_shard": 0, "shard_count": 1} | options
        with converter.make_batch_reader(**arguments) as reader:
            return [int(row) for batch in reader for row in batch["id"]]

    def test_every_row_comes_once_and_whole(self, converter: DatasetConverter) -> None:
        with converter.make_batch_reader(batch_size=NUM_ROWS, nulls="mask") as reader:
            [batch] = list(reader)
        order = np.argsort(batch["id"])
        batch = {name: values[order] for name, values in batch.items()}
        np.testing.assert_array_equal(batch["id"], np.arange(NUM_ROWS))
        is_null = np.arange(NUM_ROWS) % 97 == 0
        np.testing.assert_array_equal(batch["x__valid"], ~is_null)
        np.testing.assert_array_equal(batch["x"], np.where(is_null, 0, np.arange(NUM_ROWS) / 2).astype(np.float32))
        assert batch["text"].tolist() == TABLE["text"].to_pylist()
        np.testing.assert_array_equal(batch["vector"], np.stack([np.arange(NUM_ROWS), -np.arange(NUM_ROWS)], axis=1))
        assert [tags.tolist() for tags in batch["tags"]] == TABLE["tags"].to_pylist()

    def test_the_schema_says_what_arrives(self, converter: DatasetConverter) -> None:
        assert converter.columns == ("id", "x", "text", "vector", "tags")
        assert (len(converter), converter.schema["vector"].shape, converter.schema["x"].has_nulls) == (1000, (2,), True)

    def test_each_seed_has_its_own_order(self, converter: DatasetConverter) -> None:
        once, again = (self.ids(converter, shuffle=True, seed=1) for _ in range(2))
        assert once == again != self.ids(converter, shuffle=True, seed=2)
        assert sorted(once) == list(range(NUM_ROWS))
        assert once != self.ids(converter)

    def test_shards_are_disjoint_and_leave_nothing_out(self, converter: DatasetConverter) -> None:
        parts = [self.ids(converter, cur_shard=shard, shard_count=3, uneven="keep") for shard in range(3)]
        assert sorted(row for part in parts for row in part) == list(range(NUM_ROWS))

    def test_filters_and_splits_choose_rows(self, converter: DatasetConverter) -> None:
        assert sorted(self.ids(converter, filters=[("id", ">=", 300), ("id", "<", 600)])) == list(range(300, 600))
        assert self.ids(converter, filters=[("tags", "contains", "tag 300")]) == [299]
        parts = converter.split({"train": 0.9, "val": 0.1})
        ids = {name: self.ids(part) for name, part in parts.items()}
        assert [len(ids["train"]), len(ids["val"])] == [900, 100]
        assert sorted(ids["train"] + ids["val"]) == list(range(NUM_ROWS))

    def test_statistics_are_exact(self, converter: DatasetConverter) -> None:
        statistics = converter.statistics
        assert (statistics["id"].min, statistics["id"].max, statistics["x"].null_count) == (0, NUM_ROWS - 1, 11)

    def test_a_copy_reads_the_same(self, converter: DatasetConverter) -> None:
        copy = pickle.loads(pickle.dumps(converter))
        assert (copy.fingerprint, self.ids(copy)) == (converter.fingerprint, self.ids(converter))

    def test_the_same_rows_have_the_same_fingerprint(self, folder: Path) -> None:
        assert self.find(folder)[1].fingerprint == self.find(folder)[1].fingerprint

    def test_a_resumed_run_continues_with_the_next_row(self, converter: DatasetConverter) -> None:
        options: dict[str, Any] = {"batch_size": 50, "shuffle": True, "columns": ["id"]}
        with converter.make_batch_reader(**options) as reader:
            before = [batch["id"].tolist() for _, batch in zip(range(7), reader, strict=False)]
            state = reader.state_dict()
        with converter.make_batch_reader(**options) as reader:
            reader.load_state_dict(state)
            after = [batch["id"].tolist() for batch in reader]
        assert [row for batch in before + after for row in batch] == self.ids(converter, shuffle=True)

    def test_a_file_that_is_missing_or_replaced_is_named(self, folder: Path) -> None:
        storage, manifest = self.find(folder)
        path = Path(storage.path(manifest.file_names[-1]))
        pq.write_table(TABLE.slice(0, 10), path)
        with pytest.raises((SourceChangedError, ReadError), match=path.name):
            self.ids(borrow_files(storage, manifest))
        path.unlink()
        with pytest.raises((SourceChangedError, ReadError), match=path.name):
            self.ids(borrow_files(storage, manifest))
