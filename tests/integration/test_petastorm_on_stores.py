"""Petastorm's old names on HDFS, on blobs of Azure and on S3: the rows, metadata and copies of a local store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, LongType

from converter.petastorm import make_batch_reader, make_reader
from converter.petastorm.codecs import CompressedImageCodec, NdarrayCodec, ScalarCodec
from converter.petastorm.etl.dataset_metadata import get_schema_from_dataset_url, materialize_dataset
from converter.petastorm.fs_utils import FilesystemResolver, get_filesystem_and_path_or_paths
from converter.petastorm.predicates import in_set
from converter.petastorm.pytorch import BatchedDataLoader
from converter.petastorm.spark import SparkDatasetConverter, make_spark_converter
from converter.petastorm.tools.copy_dataset import copy_dataset
from converter.petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
from tests.integration.test_stores_end_to_end import KINDS, Place, place  # noqa: F401 (a fixture)

SCHEMA = Unischema(
    "Frames",
    [
        UnischemaField("id", np.int64, (), ScalarCodec(LongType())),
        UnischemaField("kind", np.int32, (), ScalarCodec(IntegerType())),
        UnischemaField("matrix", np.float32, (3, None), NdarrayCodec()),
        UnischemaField("picture", np.uint8, (8, 8, 3), CompressedImageCodec("png")),
        UnischemaField("zone", np.str_, ()),
    ],
)
NUM_ROWS = 120

pytestmark = [
    pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning"),
    # As Petastorm warns of batches from a store of its own.
    pytest.mark.filterwarnings("ignore:Please use make_reader"),
]

everywhere = pytest.mark.parametrize("place", [*KINDS, "s3"], indirect=True)


def frame(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "id": np.int64(number),
        "kind": np.int32(number % 3),
        "matrix": rng.random((3, 1 + number % 4), np.float32),
        "picture": rng.integers(0, 255, (8, 8, 3), np.uint8),
        "zone": f"zone {number % 2}",
    }


@pytest.fixture(scope="module")
def local(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frames") / "store"
    with materialize_dataset(spark, path.as_uri(), SCHEMA):
        rows = [dict_to_spark_row(SCHEMA, frame(number)) for number in range(NUM_ROWS)]
        spark.createDataFrame(rows, SCHEMA.as_spark_schema()).coalesce(3).write.partitionBy("zone").parquet(str(path))
    return path


@pytest.fixture
def url(local: Path, place: Place) -> str:  # noqa: F811
    """The same files on the store."""
    url = f"{place.url}/frames"
    resolver = FilesystemResolver(url, storage_options=place.options)
    resolver.filesystem().put(f"{local}/", resolver.get_dataset_path(), recursive=True)
    return url


def rows_of(reader: Any) -> Iterator[tuple[Any, ...]]:
    with reader:
        for row in reader:
            yield (int(row.id), int(row.kind), row.matrix.tolist(), row.picture.tobytes(), row.zone)


@everywhere
def test_rows_are_those_of_the_local_store(url: str, local: Path, place: Place, tmp_path: Path) -> None:  # noqa: F811
    expected = [
        (number, number % 3, row["matrix"].tolist(), row["picture"].tobytes(), row["zone"])
        for number in range(NUM_ROWS)
        for row in [frame(number)]
    ]
    options: dict[str, Any] = {"storage_options": place.options}
    assert str(get_schema_from_dataset_url(url, storage_options=place.options)) == str(SCHEMA)
    assert sorted(rows_of(make_reader(url, **options))) == expected
    assert list(rows_of(make_reader(url, shuffle_row_groups=False, **options))) == list(
        rows_of(make_reader(local.as_uri(), shuffle_row_groups=False))
    )
    some = rows_of(make_reader(url, predicate=in_set({3, 77}, "id"), **options))
    assert sorted(row[0] for row in some) == [3, 77]
    parts = [
        [row[0] for row in rows_of(make_reader(url, cur_shard=shard, shard_count=2, **options))] for shard in range(2)
    ]
    assert sorted(parts[0] + parts[1]) == list(range(NUM_ROWS))
    # What is kept on this host's disk is read there the second time, because another reader still has it.
    kept: dict[str, Any] = {
        "cache_type": "local-disk", "cache_location": str(tmp_path / "kept"), "cache_size_limit": 1 << 30,
        "cache_row_size_estimate": 1000,
    }  # fmt: skip
    with make_reader(url, **kept, **options):
        for _ in range(2):
            assert sorted(row[0] for row in rows_of(make_reader(url, **kept, **options))) == list(range(NUM_ROWS))
            assert list((tmp_path / "kept").rglob("rows-*"))
    assert not list((tmp_path / "kept").rglob("rows-*"))


@everywhere
def test_batches_and_loaders_are_those_of_the_local_store(url: str, place: Place) -> None:  # noqa: F811
    options: dict[str, Any] = {"storage_options": place.options, "schema_fields": ["id", "kind"]}
    with make_batch_reader(url, **options) as reader:
        assert sorted(int(number) for batch in reader for number in batch.id) == list(range(NUM_ROWS))
    with BatchedDataLoader(make_batch_reader(url, **options), batch_size=50) as loader:
        assert sorted(int(number) for batch in loader for number in batch["id"]) == list(range(NUM_ROWS))


@everywhere
def test_filesystems_are_found_as_users_ask_for_them(url: str, place: Place) -> None:  # noqa: F811
    filesystem, path = get_filesystem_and_path_or_paths(url, storage_options=place.options)
    names = {name.rpartition("/")[2] for name in filesystem.ls(path, detail=False)}
    assert {"_common_metadata", "zone=zone 0", "zone=zone 1"} <= names
    # What a user opened serves as well as options.
    with make_batch_reader(url, filesystem=filesystem, schema_fields=["id"]) as reader:
        assert sum(len(batch.id) for batch in reader) == NUM_ROWS


@pytest.mark.parametrize("place", ["hdfs"], indirect=True)
def test_spark_writes_stores_caches_and_copies_to_hdfs(spark: SparkSession, url: str, place: Place) -> None:  # noqa: F811
    copy_dataset(spark, url, f"{url}-copy", ["id", "picture"], not_null_fields=None, overwrite_output=False,
                 partitions_count=2, row_group_size_mb=None)  # fmt: skip
    with make_reader(f"{url}-copy") as reader:
        assert sorted(int(row.id) for row in reader) == list(range(NUM_ROWS))
    spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, f"{place.url}/old")
    try:
        converter = make_spark_converter(spark.range(0, 50, 1, 2))
        with converter.make_torch_dataloader(batch_size=8, num_epochs=1) as loader:
            assert sorted(int(number) for batch in loader for number in batch["id"]) == list(range(50))
        converter.delete()
    finally:
        spark.conf.unset(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF)
    assert [name for name in place.files() if name.startswith("old/") and name.endswith(".parquet")] == []
