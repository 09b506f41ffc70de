"""Stores written by Spark under `materialize_dataset`, their metadata, copies and RDDs."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, ShortType, TimestampType

from converter.petastorm import make_reader
from converter.petastorm.codecs import NdarrayCodec, ScalarCodec
from converter.petastorm.etl import petastorm_generate_metadata
from converter.petastorm.etl.dataset_metadata import (
    PetastormMetadataGenerationError,
    get_schema_from_dataset_url,
    load_row_groups,
    materialize_dataset,
)
from converter.petastorm.etl.petastorm_generate_metadata import generate_petastorm_metadata
from converter.petastorm.etl.rowgroup_indexers import SingleFieldIndexer
from converter.petastorm.etl.rowgroup_indexing import build_rowgroup_index, get_row_group_indexes
from converter.petastorm.spark_utils import dataset_as_rdd
from converter.petastorm.store import open_store
from converter.petastorm.stored_schema import row_groups_per_file
from converter.petastorm.tools import copy_dataset as copying
from converter.petastorm.tools.copy_dataset import copy_dataset
from converter.petastorm.tools.spark_session_cli import add_configure_spark_arguments, configure_spark
from converter.petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
from converter.sources.spark.local import find_java_home
from tests.processes import run_python
from tests.servers.connect import only_connect_server

pytestmark = pytest.mark.short

SCHEMA = Unischema(
    "Frames",
    [
        UnischemaField("id", np.int64, (), ScalarCodec(LongType())),
        UnischemaField("kind", np.int32, (), ScalarCodec(ShortType())),
        UnischemaField("matrix", np.float32, (10, 100), NdarrayCodec()),
        UnischemaField("maybe", np.int32, (), ScalarCodec(IntegerType()), True),
        UnischemaField("zone", np.str_, ()),
    ],
)
NUM_ROWS = 800
SETTINGS = (
    "parquet.block.size",
    "parquet.summary.metadata.level",
    "parquet.summary.metadata.propagate-errors",
    "parquet.block.size.row.check.min",
    "parquet.row-group.size.row.check.min",
)


def frame(number: int) -> dict[str, Any]:
    return {
        "id": np.int64(number),
        "kind": np.int32(number % 3),
        "matrix": np.random.default_rng(number).random((10, 100), np.float32),
        "maybe": None if number % 4 == 0 else np.int32(number),
        # A number to Spark, and a text to the schema.
        "zone": f"0{number % 2}",
    }


def write_frames(spark: Any, url: str, *, mode: str = "error") -> None:
    rows = [dict_to_spark_row(SCHEMA, frame(number)) for number in range(NUM_ROWS)]
    made = spark.createDataFrame(rows, SCHEMA.as_spark_schema()).coalesce(1).sortWithinPartitions("id")
    made.write.mode(mode).partitionBy("zone").option("compression", "none").parquet(url)


def settings(spark: SparkSession) -> dict[str, Any]:
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    return {name: configuration.get(name) for name in SETTINGS}


@pytest.fixture(scope="module")
def frames(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frames") / "store"
    with materialize_dataset(spark, path.as_uri(), SCHEMA, row_group_size_mb=1):
        write_frames(spark, path.as_uri())
    return path


@pytest.fixture
def unstopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A command stops its session, which here is that of all tests."""
    stops: list[int] = []
    monkeypatch.setattr(SparkSession, "stop", lambda _: stops.append(1))
    yield stops
    assert stops == [1]


def ids_of(store: Path) -> list[int]:
    return sorted(pq.read_table(str(store), columns=["id"])["id"].to_pylist())


def test_row_groups_have_the_size_that_was_asked_for_and_are_counted_from_footers(frames: Path) -> None:
    counts = row_groups_per_file(pq.read_metadata(frames / "_common_metadata").metadata)
    files = {str(path.relative_to(frames)): pq.read_metadata(path) for path in frames.glob("*/*.parquet")}
    assert counts == {name: footer.num_row_groups for name, footer in files.items()}
    assert len(counts) == 2
    assert all(count > 1 for count in counts.values())
    assert not list(frames.glob("_metadata")) + list(frames.glob("._common_metadata.crc"))
    assert len(load_row_groups(open_store([frames.as_uri()]))) == sum(counts.values())
    assert str(get_schema_from_dataset_url(frames.as_uri())) == str(SCHEMA)


def test_settings_are_as_before_also_after_an_error(spark: SparkSession, tmp_path: Path) -> None:
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    configuration.set("parquet.summary.metadata.level", "COMMON_ONLY")
    before = settings(spark)
    seen: list[dict[str, Any]] = []
    try:
        with pytest.raises(ZeroDivisionError), materialize_dataset(spark, tmp_path.as_uri(), SCHEMA, 3):
            seen.append(settings(spark)) or 1 / 0
        assert settings(spark) == before
    finally:
        configuration.unset("parquet.summary.metadata.level")
    assert (seen[0]["parquet.block.size"], seen[0]["parquet.summary.metadata.level"]) == (str(3 << 20), "NONE")
    assert not list(tmp_path.iterdir())


def test_settings_of_blocks_at_once_are_given_back_by_the_last_one(spark: SparkSession, tmp_path: Path) -> None:
    before = settings(spark)
    with contextlib.ExitStack() as first, contextlib.ExitStack() as last:
        for number, block in enumerate((first, last)):
            url = (tmp_path / str(number)).as_uri()
            block.enter_context(materialize_dataset(spark, url, SCHEMA, 7 - number, use_summary_metadata=not number))
            write_frames(spark, url)
        inside = settings(spark)
        first.close()
        after_one = settings(spark)
    assert (inside["parquet.block.size"], after_one["parquet.block.size"]) == (str(6 << 20), str(6 << 20))
    assert settings(spark) == before


def test_a_job_that_writes_nothing_has_no_metadata(spark: SparkSession, tmp_path: Path) -> None:
    with (
        pytest.raises(PetastormMetadataGenerationError, match="does not exist"),
        materialize_dataset(spark, (tmp_path / "gone").as_uri(), SCHEMA),
    ):
        pass


def test_what_cannot_be_stored_is_refused_before_the_job(spark: SparkSession, tmp_path: Path) -> None:
    bad = Unischema("Bad", [UnischemaField("x", dict, ())])
    for schema, error in ((bad, ValueError), ("Frames", TypeError)):
        with pytest.raises(error), materialize_dataset(spark, tmp_path.as_uri(), schema):  # type: ignore[arg-type]
            pytest.fail("the job has begun")


def test_a_filesystem_can_be_given_with_a_path(spark: SparkSession, tmp_path: Path) -> None:
    import pyarrow.fs

    class Unpicklable(pyarrow.fs.LocalFileSystem):
        def __reduce__(self) -> Any:
            raise RuntimeError("this filesystem stays here")

    path = tmp_path / "store"
    with materialize_dataset(spark, str(path), SCHEMA, filesystem_factory=Unpicklable):
        spark.range(3).write.parquet(path.as_uri())
    assert (path / "_common_metadata").exists()


def test_spark_writes_all_footers_if_asked_to(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with materialize_dataset(spark, path.as_uri(), SCHEMA, use_summary_metadata=True):
        spark.range(3).write.parquet(path.as_uri())
    assert (path / "_metadata").exists()
    assert str(get_schema_from_dataset_url(path.as_uri())) == str(SCHEMA)


def test_metadata_can_be_written_for_files_that_are_there(
    spark: SparkSession, frames: Path, tmp_path: Path, unstopped: list[int]
) -> None:
    path = tmp_path / "copy"
    write_frames(spark, path.as_uri())
    with pytest.raises(ValueError, match="please specify it"):
        generate_petastorm_metadata(spark, path.as_uri())
    with pytest.raises(ValueError, match="not an instance of a Unischema"):
        generate_petastorm_metadata(spark, path.as_uri(), f"{__name__}.NUM_ROWS")
    petastorm_generate_metadata._main(["--dataset_url", path.as_uri(), "--unischema_class", f"{__name__}.SCHEMA"])
    assert str(get_schema_from_dataset_url(path.as_uri())) == str(SCHEMA)


def test_an_index_survives_new_metadata(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with materialize_dataset(spark, path.as_uri(), SCHEMA, 1):
        write_frames(spark, path.as_uri())
    build_rowgroup_index(
        path.as_uri(), spark.sparkContext, [SingleFieldIndexer("id", "id"), SingleFieldIndexer("z", "zone")]
    )
    before = get_row_group_indexes(open_store([path.as_uri()]))
    assert before["id"].get_row_group_indexes(0) == {0}
    assert len(before["z"].get_row_group_indexes("00") | before["z"].get_row_group_indexes("01")) == len(
        load_row_groups(open_store([path.as_uri()]))
    )
    generate_petastorm_metadata(spark, path.as_uri(), use_summary_metadata=True)
    assert (path / "_metadata").exists()
    after = get_row_group_indexes(open_store([path.as_uri()]))
    assert after["id"].get_row_group_indexes(7) == before["id"].get_row_group_indexes(7)


@pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning")
def test_a_dataset_is_copied(spark: SparkSession, frames: Path, tmp_path: Path, unstopped: list[int]) -> None:
    copy = tmp_path / "copy"
    copying._main([frames.as_uri(), copy.as_uri(), "--overwrite-output"])
    assert str(get_schema_from_dataset_url(copy.as_uri())) == str(SCHEMA)
    assert ids_of(copy) == list(range(NUM_ROWS))
    kinds = pq.read_schema(next(copy.glob("part-*")))
    assert (kinds.field("zone").type, kinds.field("kind").type) == (pa.string(), pa.int16())
    with make_reader(copy.as_uri(), schema_fields=["zone"]) as reader:
        assert {row.zone for row in reader} == {"00", "01"}
    with pytest.raises(AnalysisException, match="already exists"):
        copy_dataset(spark, frames.as_uri(), copy.as_uri(), None, None, False, None, None)


def test_a_copy_onto_something_names_the_option(frames: Path, tmp_path: Path, unstopped: list[int]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").touch()
    with pytest.raises(SystemExit, match=r"other exists already\. --overwrite-output replaces it\."):
        copying._main([frames.as_uri(), other.as_uri()])
    assert [path.name for path in other.iterdir() if not path.name.startswith(".")] == ["kept"]


def test_some_columns_and_rows_are_copied(spark: SparkSession, frames: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy_dataset(spark, frames.as_uri(), copy.as_uri(), ["id", "may.*"], ["maybe"], False, 1, None)
    assert list(get_schema_from_dataset_url(copy.as_uri()).fields) == ["id", "maybe"]
    assert ids_of(copy) == [number for number in range(NUM_ROWS) if number % 4]
    assert len(list(copy.glob("part-*"))) == 1
    with pytest.raises(ValueError, match="do not match any fields"):
        copy_dataset(None, frames.as_uri(), "", ["bogus"], [], False, 1, 196)


def test_decoded_rows_come_as_an_rdd(spark: SparkSession, frames: Path) -> None:
    rows = dataset_as_rdd(frames.as_uri(), spark).collect()
    assert sorted(int(row.id) for row in rows) == list(range(NUM_ROWS))
    for row in rows:
        np.testing.assert_equal(row._asdict(), frame(int(row.id)))
        assert type(row.kind) is np.int32
    some = dataset_as_rdd(frames.as_uri(), spark, schema_fields=[SCHEMA.zone, SCHEMA.kind]).first()
    assert some._fields == ("zone", "kind")


def test_a_commands_user_configures_the_session() -> None:
    parser = argparse.ArgumentParser()
    add_configure_spark_arguments(parser)
    given = parser.parse_args(["--master", "local[1]", "--spark-session-config", "a=1", "b=-Dx=y"])
    builder = configure_spark(SparkSession.Builder(), given)
    assert builder._options == {"a": "1", "b": "-Dx=y", "spark.master": "local[1]"}
    assert configure_spark(SparkSession.Builder(), parser.parse_args([]))._options == {}
    with pytest.raises(RuntimeError, match="add_configure_spark_arguments"):
        configure_spark(SparkSession.Builder(), argparse.ArgumentParser().parse_args([]))
    with pytest.raises(ValueError, match="key=value"):
        configure_spark(SparkSession.Builder(), parser.parse_args(["--spark-session-config", "WRONG FORMAT"]))


def materialize_over_connect(folder: str) -> dict[str, Any]:
    os.environ |= {"JAVA_HOME": str(find_java_home()), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    before = spark.conf.get("parquet.block.size", None)
    url = f"file://{folder}/store"
    with materialize_dataset(spark, url, SCHEMA, 1):
        write_frames(spark, url)
    copy_dataset(spark, url, f"file://{folder}/copy", None, None, False, None, None)
    return {
        "zones": sorted(set(pq.read_table(f"{folder}/copy").column("zone").to_pylist())),
        "session": type(spark).__module__,
        "is_restored": spark.conf.get("parquet.block.size", None) == before,
        "has_more_row_groups_than_files": len(load_row_groups(open_store([url]))) > 2,
        "has_schema": str(get_schema_from_dataset_url(url)) == str(SCHEMA),
    }


@pytest.mark.long("6 s")
def test_a_dataset_is_written_over_spark_connect(tmp_path: Path) -> None:
    """A local Connect server refuses to start beside a classic session, so it has a process of its own."""
    with only_connect_server():
        found = run_python(materialize_over_connect, str(tmp_path))
    assert found == {
        "zones": ["00", "01"],
        "session": "pyspark.sql.connect.session",
        "is_restored": True,
        "has_more_row_groups_than_files": True,
        "has_schema": True,
    }


@pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning")
@pytest.mark.parametrize("is_new", [True, False], ids=["of the column", "of another one"])
def test_spark_reads_times_beside_a_column_that_an_append_adds(
    spark: SparkSession, tmp_path: Path, is_new: bool
) -> None:
    time = UnischemaField("time", np.datetime64, (), ScalarCodec(TimestampType()), True)
    number = UnischemaField("number", np.int64, (), ScalarCodec(LongType()), True)
    first, second = (number, time) if is_new else (time, number)
    source, at = (tmp_path / "source").as_uri(), dt.datetime.fromisoformat("2026-01-02T03:00:00")
    values = {"time": at, "number": 7}
    for fields in ([first], [first, second]):
        schema = Unischema("S", fields)
        with materialize_dataset(spark, source, schema):
            # As INT96, Spark's default.
            frame = spark.createDataFrame([tuple(values[name] for name in schema.fields)], schema.as_spark_schema())
            frame.coalesce(1).write.mode("append").parquet(source)
    expected = {(values[first.name], None), (values[first.name], values[second.name])}
    assert {tuple(row) for row in spark.read.parquet(source).collect()} == expected
    assert len(dataset_as_rdd(source, spark).collect()) == 2
    copy_dataset(spark, source, (tmp_path / "copy").as_uri(), None, None, False, None, None)
    assert {tuple(row) for row in spark.read.parquet((tmp_path / "copy").as_uri()).collect()} == expected


@pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning")
@pytest.mark.parametrize("is_listed", [True, False], ids=["by Spark", "by pyarrow"])
def test_an_append_that_adds_a_column_keeps_what_spark_alone_knows_of_the_others(
    spark: SparkSession, tmp_path: Path, is_listed: bool
) -> None:
    fields = [
        UnischemaField("id", np.int64, (), ScalarCodec(LongType())),
        UnischemaField("b", np.int64, (), None, True),
    ]
    source = tmp_path / "source"
    gap = F.expr("interval '3' day").alias("gap")
    with materialize_dataset(spark, source.as_uri(), Unischema("S", fields[:1])):
        spark.range(1).select("id", gap).coalesce(1).write.parquet(source.as_uri())
    with materialize_dataset(spark, source.as_uri(), Unischema("S", fields)):
        if is_listed:
            later = spark.range(1, 2).select("id", gap, F.lit(7).cast("long").alias("b"))
            later.coalesce(1).write.mode("append").parquet(source.as_uri())
        else:
            pq.write_table(pa.table({"id": [1], "gap": [3 * 86_400_000_000], "b": [7]}), source / "later.parquet")
    found = spark.read.parquet(source.as_uri())
    assert {(row.id, row.b) for row in found.select("id", "b").collect()} == {(0, None), (1, 7)}
    # Nobody has told Spark of the added column where pyarrow wrote it, so the columns are those of Parquet.
    assert found.schema["gap"].dataType.simpleString() == ("interval day" if is_listed else "bigint")


@pytest.mark.filterwarnings("ignore::converter.petastorm.PetastormDeprecationWarning")
def test_a_column_that_an_append_adds_is_copied(spark: SparkSession, tmp_path: Path) -> None:
    fields = [
        UnischemaField("id", np.int64, (), ScalarCodec(LongType())),
        UnischemaField("b", np.int64, (), None, True),
    ]
    source = (tmp_path / "source").as_uri()
    for count, row in ((1, {"id": 1}), (2, {"id": 2, "b": 20})):
        schema = Unischema("S", fields[:count])
        with materialize_dataset(spark, source, schema):
            frame = spark.createDataFrame([dict_to_spark_row(schema, row)], schema.as_spark_schema())
            frame.coalesce(1).write.mode("append").parquet(source)
    assert spark.read.parquet(source).columns == ["id", "b"]
    # As Petastorm leaves it.
    pq.write_metadata(
        pa.schema([("id", pa.int64())], metadata=pq.read_schema(tmp_path / "source/_common_metadata").metadata),
        tmp_path / "source/_common_metadata",
    )
    assert {(row.id, row.b) for row in dataset_as_rdd(source, spark).collect()} == {(1, None), (2, 20)}
    copy_dataset(spark, source, (tmp_path / "copy").as_uri(), None, None, False, None, None)
    with make_reader((tmp_path / "copy").as_uri()) as reader:
        assert {(row.id, row.b) for row in reader} == {(1, None), (2, 20)}
