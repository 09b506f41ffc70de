"""Parquet that a real Spark wrote, read as it stands: the rows are those that Spark reads, whoever decodes them."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from converter import SourceError, make_parquet_converter
from converter.reading import data_files
from tests.rows import concatenate

NUM_ROWS = 3000
LENGTHS = {"pair": 2, "nine": 9, "wide": 300, "bytes": 24, "doubles": 17}
SCALARS = ("long", "int", "short", "byte", "float", "double", "day", "time")

WRITERS: dict[str, dict[str, str]] = {
    "snappy": {"compression": "snappy"},
    "zstd": {"compression": "zstd"},
    "gzip": {"compression": "gzip"},
    "uncompressed": {"compression": "uncompressed"},
    "small pages": {"parquet.page.size": "4096", "parquet.page.row.count.limit": "70"},
    "small row groups": {"parquet.block.size": "200000", "parquet.page.size": "1000"},
    "no dictionary": {"parquet.enable.dictionary": "false"},
    "second version": {"parquet.writer.version": "PARQUET_2_0"},
}


def numbers(spark: SparkSession) -> DataFrame:
    """Every kind of number, alone and in lists of one length each, in the order of `long`."""
    value = (F.xxhash64("id") % 100_000).cast("double") / 7

    def listed(kind: str, length: int) -> Any:
        one = F.transform(F.sequence(F.lit(1), F.lit(length)), lambda i: F.xxhash64(F.col("id"), i) % 850_000 / 7e3)
        return one.cast(f"array<{kind}>")

    return spark.range(NUM_ROWS).coalesce(1).select(
        F.col("id").alias("long"),
        (value % 2**30).cast("int").alias("int"),
        (value % 2**14).cast("short").alias("short"),
        (value % 100).cast("byte").alias("byte"),
        value.cast("float").alias("float"),
        value.alias("double"),
        F.date_add(F.lit("1950-01-01").cast("date"), (F.col("id") * 10).cast("int")).alias("day"),
        F.timestamp_micros(F.xxhash64("id") % 10**15).alias("time"),
        (F.when(F.col("id") % 7 != 0, F.col("id"))).alias("some"),
        listed("float", LENGTHS["pair"]).alias("pair"),
        listed("int", LENGTHS["nine"]).alias("nine"),
        listed("float", LENGTHS["wide"]).alias("wide"),
        listed("tinyint", LENGTHS["bytes"]).alias("bytes"),
        listed("double", LENGTHS["doubles"]).alias("doubles"),
    )  # fmt: skip


def expected(df: DataFrame) -> dict[str, Any]:
    """What Spark reads, in the order of `long`."""
    frame = df.withColumns({"day": F.unix_date("day"), "time": F.unix_micros("time")}).orderBy("long").toPandas()
    found = {name: np.array(frame[name].tolist()) for name in frame.columns if name != "some"}
    return found | {"some": frame["some"].fillna(-1).to_numpy()}


@pytest.mark.parametrize("float_dtype", ["float32", "float64"])
@pytest.mark.parametrize("way", WRITERS)
def test_numbers_are_those_that_spark_reads(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, float_dtype: Any
) -> None:
    path = str(tmp_path / "table")
    with_nulls = numbers(spark)
    with_nulls.write.options(**WRITERS[way]).parquet(path)
    decoded_by_arrow: set[str] = set()
    read = data_files.OpenFile.read

    def watched(self: Any, indices: Any, places: Any, fetched: Any) -> Any:
        decoded_by_arrow.update(place.field.name for place in places)
        return read(self, indices, places, fetched)

    monkeypatch.setattr(data_files.OpenFile, "read", watched)
    wanted = expected(spark.read.parquet(path))
    shapes = {name: (length,) for name, length in LENGTHS.items()}
    with (
        make_parquet_converter(path, shapes=shapes, float_dtype=float_dtype) as converter,
        converter.make_batch_reader(batch_size=64, shuffle=True, nulls={"some": -1}) as reader,
    ):
        found = concatenate(list(reader))
        # What was not plain after all is known by the second epoch.
        again = concatenate(list(reader))
    assert sorted(again["some"].tolist()) == sorted(found["some"].tolist())
    order = np.argsort(found["long"])
    assert order.tolist() != sorted(order.tolist())
    for name, values in wanted.items():
        rows = found[name][order]
        rows = rows.astype(np.int64) if rows.dtype.kind == "M" else rows
        np.testing.assert_array_equal(rows, values.astype(rows.dtype), err_msg=name)
    # Old times are counted from noon in 96 bits, and nulls take no place among values: both are Arrow's.
    arrows_own = {"time", "some"}
    if way in ("second version", "gzip"):
        assert decoded_by_arrow == set(wanted)
    elif way == "no dictionary":
        assert decoded_by_arrow == arrows_own
    else:
        # Spark has a dictionary for whatever has few values.
        assert arrows_own <= decoded_by_arrow <= {*arrows_own, "byte", "short", "bytes", "nine", "day"}


@pytest.mark.parametrize("writer", ["spark", "arrow"])
def test_filters_of_floats_are_those_of_spark(spark: SparkSession, tmp_path: Path, writer: str) -> None:
    """NaN, infinities, both zeros and nulls, in row groups of few kinds of values each; some 15 s."""
    chance = random.Random(3)
    known = [math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, 2.5, -3.0, None]
    groups = [chance.sample(known, chance.randrange(1, 4)) for _ in range(8)]
    rows = [
        (number, chance.choice(group), number % 5) for number, group in enumerate(g for g in groups for _ in range(5))
    ]
    columns = [list(column) for column in zip(*rows, strict=True)]
    table = pa.table({"id": columns[0], "x": pa.array(columns[1], pa.float64()), "n": columns[2]})
    if writer == "arrow":
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    else:
        frame = spark.createDataFrame(rows, "id long, x double, n long")
        frame.repartitionByRange(8, "id").sortWithinPartitions("id").write.mode("append").parquet(str(tmp_path))
    frame = spark.read.parquet(str(tmp_path)).cache()

    def as_sql(value: float) -> str:
        return f"double('{ {math.inf: 'Infinity', -math.inf: '-Infinity'}.get(value, value) }')"

    with make_parquet_converter(tmp_path, float_dtype=None) as converter:
        for _ in range(60):
            conditions, texts = [], []
            for _ in range(chance.choice((1, 2))):
                sign = chance.choice(["=", "!=", "<", "<=", ">", ">=", "in", "not in"])
                name, value = chance.choice((("x", chance.choice(known[:-1])), ("n", chance.choice([0, 3, math.nan]))))
                listed = [value, *chance.sample(known[:-1] if name == "x" else [1, 2], 2)]
                conditions.append((name, sign, listed if "in" in sign else value))
                text = f"({', '.join(map(as_sql, listed))})" if "in" in sign else as_sql(value)
                texts.append(f"{name} {sign} {text}")
            expected_ids = sorted(row["id"] for row in frame.where(" and ".join(texts)).select("id").collect())
            try:
                found = sorted(
                    int(one)
                    for batch in converter.where(conditions).make_batch_reader(columns=["id"])
                    for one in batch["id"]
                )
            except SourceError:
                found = []
            assert found == expected_ids, texts
    frame.unpersist()
