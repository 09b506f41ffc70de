"""The rows of a converter as a DataFrame: Spark's own values again, with the numbers that loaders give."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType

from converter import (
    DatasetConverter,
    NumPy,
    SourceError,
    make_delta_converter,
    make_parquet_converter,
    make_spark_converter,
    mix,
    pickled,
)
from converter.sources.spark.confs import changed_confs
from tests.rows import known_rows

NUM_ROWS = 997


def numbers_of(converter: DatasetConverter) -> dict[int, int]:
    """The number of each row, by its id, as a loader gives it."""
    with converter.make_batch_reader(batch_size=100, columns=["id"], with_row_index="row") as reader:
        return {int(one): int(row) for batch in reader for one, row in zip(batch["id"], batch["row"], strict=True)}


def plain(value: Any) -> Any:
    """A value of a row, so that those of two rows can be compared."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if hasattr(value, "toArray"):
        # Spark's vectors and matrices; a cache has them as float32.
        return plain(value.toArray().astype("f4").tolist())
    return bytes(value) if isinstance(value, bytearray) else value


def rows_by_id(frame: DataFrame) -> dict[int, dict[str, Any]]:
    return {row["id"]: {name: plain(value) for name, value in row.asDict().items()} for row in frame.collect()}


def leaves_of(struct: StructType, name: str = "", path: str = "") -> list[tuple[str, str, DataType]]:
    """The columns, and the members of structs, each with its path."""
    found: list[tuple[str, str, DataType]] = []
    for field in struct:
        own_name, own_path = name + field.name, f"{path}`{field.name.replace('`', '``')}`"
        if isinstance(field.dataType, StructType):
            found += leaves_of(field.dataType, f"{own_name}.", f"{own_path}.")
        else:
            found.append((own_name, own_path, field.dataType))
    return found


def expected_of(frame: DataFrame) -> dict[int, dict[str, Any]]:
    """The rows as Spark itself has them, members of structs as columns, numbers as narrow as a cache has them."""
    columns = []
    for name, path, kind in leaves_of(frame.schema):
        narrow = re.sub(r"double|decimal\(\d+,\d+\)", "float", kind.simpleString())
        is_narrow = narrow == kind.simpleString()
        columns.append((F.col(path) if is_narrow else F.col(path).cast(narrow)).alias(name))
    return rows_by_id(frame.select(*columns))


@pytest.mark.parametrize("writer", ["executors", "spark"])
@pytest.mark.parametrize("nulls", [False, True])
def test_a_cache_gives_the_rows_that_were_written(
    spark: SparkSession, cache_dir: Path, writer: Any, nulls: bool
) -> None:
    rows = known_rows(spark, NUM_ROWS, nulls=nulls)
    with make_spark_converter(rows, cache_dir=cache_dir, writer=writer, row_group_bytes=1 << 16) as converter:
        found = rows_by_id(converter.to_spark(spark, with_row_index="row"))
        assert {one: row.pop("row") for one, row in found.items()} == numbers_of(converter)
        expected = expected_of(rows)
        assert found.keys() == expected.keys()
        for one, row in expected.items():
            for name, value in row.items():
                assert found[one][name] == value, (one, name)
        part = converter.where([("id", "<", 200)])
        frame = part.to_spark(spark, columns=["id"], with_row_index="n", partitions=3)
        assert frame.columns == ["id", "n"]
        assert {row["id"]: row["n"] for row in frame.collect()} == numbers_of(part)
        assert frame.count() == 200


@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_times_with_and_without_a_zone_are_joined(spark: SparkSession, cache_dir: Path, writer: str) -> None:
    """As another type a time would be equal to the time of another row, in any zone but UTC."""
    hours = F.timestamp_seconds(F.lit(1_700_000_000) + F.col("id") * 3600)
    df = spark.range(48).select("id", hours.alias("point"), hours.cast("timestamp_ntz").alias("local"))
    df = df.withColumn("list", F.array("local"))
    with (
        changed_confs(spark, {"spark.sql.session.timeZone": "Europe/Berlin"}),
        make_spark_converter(df, cache_dir=cache_dir, writer=writer) as converter,
    ):
        again = converter.to_spark(spark)
        assert again.dtypes == df.dtypes
        for name in ("point", "local"):
            found = again.alias("a").join(df.alias("b"), F.col(f"a.{name}") == F.col(f"b.{name}"))
            assert [found.count(), found.where("a.id = b.id").count()] == [48, 48]


def test_times_of_int96_are_points_in_time(spark: SparkSession, cache_dir: Path) -> None:
    hours = spark.range(48).select("id", F.timestamp_seconds(F.lit(1_700_000_000) + F.col("id") * 3600).alias("time"))
    with changed_confs(spark, {"spark.sql.session.timeZone": "Europe/Berlin"}):
        for kind in ("INT96", "TIMESTAMP_MICROS"):
            with changed_confs(spark, {"spark.sql.parquet.outputTimestampType": kind}):
                hours.write.mode("append").parquet(str(cache_dir / "both"))
        again = make_parquet_converter(cache_dir / "both").to_spark(spark)
        assert again.dtypes == hours.dtypes
        assert sorted(again.collect()) == sorted(2 * hours.collect())


def test_predictions_are_joined_to_the_columns(spark: SparkSession, cache_dir: Path) -> None:
    rows = spark.range(0, 500, 1, 3).select("id", (F.col("id") * 2).cast("float").alias("x"))
    with make_spark_converter(rows, cache_dir=cache_dir) as converter:
        written: list[Any] = []
        # Two ranks, each of which writes its part.
        for rank in range(2):
            with converter.make_torch_dataloader(
                batch_size=64, columns=["x"], with_row_index="row", cur_shard=rank, shard_count=2
            ) as loader:
                written += [(row, x + 1) for batch in loader for row, x in zip(*map(list, _values(batch)), strict=True)]
        predictions = spark.createDataFrame(written, "row long, y double")
        joined = converter.to_spark(spark, with_row_index="row").join(predictions, "row").select("id", "y").collect()
        assert sorted((row["id"], row["y"]) for row in joined) == [(one, 2.0 * one + 1) for one in range(500)]


def _values(batch: Any) -> tuple[list[int], list[float]]:
    return batch["row"].tolist(), batch["x"].tolist()


@pytest.fixture
def tables(tmp_path: Path) -> tuple[Path, Path, pa.Table]:
    table = pa.table(
        {
            "id": pa.array(range(300), pa.int64()),
            "price": pa.array([None if one % 7 == 0 else one / 3 for one in range(300)], pa.float64()),
            "small": pa.array([one % 250 for one in range(300)], pa.uint8()),
            "word": [f"w{one % 5}" for one in range(300)],
            "lists": [[one] * (one % 4) for one in range(300)],
            "raw": [np.full(2, one, "<i4").tobytes() for one in range(300)],
            "time": pa.array([one * 1_000_000 for one in range(300)], pa.timestamp("us", "UTC")),
        }
    )
    folder, delta = tmp_path / "parquet", tmp_path / "delta"
    folder.mkdir()
    for number in range(2):
        pq.write_table(table.slice(150 * number, 150), folder / f"{number}.parquet", row_group_size=40)
    write_deltalake(delta, table.drop_columns(["small"]))
    DeltaTable(delta).delete("id % 3 = 0")
    return folder, delta, table


def test_parquet_and_delta_give_their_own_values(spark: SparkSession, tables: tuple[Path, Path, pa.Table]) -> None:
    folder, delta, table = tables
    plain_parquet = make_parquet_converter(folder, categories=["word"], standardize=["price"])
    decoded = make_parquet_converter(folder, decode={"raw": NumPy("int32", (2,))})
    declared = make_parquet_converter(folder, shapes={"raw": ("int32", (2,))})
    for converter, live in (
        (plain_parquet, range(300)),
        (declared, range(300)),
        (decoded, range(300)),
        (plain_parquet.split({"a": 0.5, "b": 0.5}, seed=1)["b"], None),
        (make_delta_converter(delta), [one for one in range(300) if one % 3]),
    ):
        frame = converter.to_spark(spark, with_row_index="row")
        assert dict(frame.dtypes)["price"] == "double"
        assert dict(frame.dtypes)["time"] == "timestamp"
        found = rows_by_id(frame)
        numbers = numbers_of(converter)
        assert {one: row.pop("row") for one, row in found.items()} == numbers
        assert sorted(found) == list(live if live is not None else sorted(numbers))
        for one, row in found.items():
            want = table.slice(one, 1).to_pylist()[0]
            assert row.pop("time").timestamp() == want["time"].timestamp()
            assert all(row[name] == plain(want[name]) for name in row), row


def test_what_has_no_rows_of_its_own_is_refused(spark: SparkSession, tables: tuple[Path, Path, pa.Table]) -> None:
    converter = make_parquet_converter(tables[0])
    for view in (converter.sequences(3, order_by="id"), converter.balance("word")):
        with pytest.raises(SourceError, match="to_spark: the elements of this converter are sequences, or rows that"):
            view.to_spark(spark)
    with pytest.raises(Exception, match="mix"):
        mix({"a": converter}, None).to_spark(spark)
    for name in ("id", 3):
        with pytest.raises(ValueError, match="with_row_index must be a name that no column has"):
            converter.to_spark(spark, with_row_index=name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing"):
        converter.to_spark(spark, columns=["nothing"])


def test_executors_of_another_version_are_refused_by_name(
    spark: SparkSession, tables: tuple[Path, Path, pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their classes may have other fields: values would be read as others."""
    monkeypatch.setattr(pickled, "FORMAT", pickled.FORMAT + 1)
    monkeypatch.setattr(pickled, "own_version", lambda: "7.8.9")
    frame = make_parquet_converter(tables[0]).to_spark(spark, columns=["id"])
    with pytest.raises(Exception, match=r"pickled by spark-tensor-converter 7\.8\.9 .*this process has"):
        frame.collect()
