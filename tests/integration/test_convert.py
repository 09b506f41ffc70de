"""Every row of a DataFrame arrives exactly once, in order, with its exact value."""

from __future__ import annotations

import html
import logging
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from converter import DatasetConverter, SourceError, make_spark_converter
from tests.folders import files_below
from tests.processes import run_python
from tests.rows import assert_same, concatenate, known_rows, known_valid, known_values
from tests.waiting import ReadStderr, rows_that_wait, wait_until

pytestmark = pytest.mark.short


def read(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    with converter.make_batch_reader(**{"batch_size": 64, "ragged": "nested"} | options) as reader:
        batches = list(reader)
        assert len(batches) == len(reader)
    return concatenate(batches)


def convert_and_read(df: DataFrame, cache_dir: Path, *, read_options: Any = None, **options: Any) -> dict[str, Any]:
    with make_spark_converter(df, cache_dir=cache_dir, **options) as converter:
        return read(converter, **read_options or {})


def parquet_files(converter: DatasetConverter) -> list[pq.ParquetFile]:
    folder = Path(converter.url.removeprefix("file://"))
    return [pq.ParquetFile(path) for path in sorted(folder.glob("data-*/*.parquet"))]


@pytest.mark.parametrize("float_dtype", ["float32", "float64"])
def test_every_row_arrives_once_with_its_value(spark: SparkSession, cache_dir: Path, float_dtype: Any) -> None:
    found = convert_and_read(known_rows(spark, 500), cache_dir, float_dtype=float_dtype)
    assert_same(found, known_values(np.arange(500), float_dtype=float_dtype))


def test_without_a_float_dtype_doubles_stay_and_decimals_become_float64(spark: SparkSession, cache_dir: Path) -> None:
    found = convert_and_read(known_rows(spark, 100), cache_dir, float_dtype=None)
    assert_same(found, known_values(np.arange(100), float_dtype="float64"))


def test_each_narrowed_column_is_logged_once(
    spark: SparkSession, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    df = known_rows(spark, 10).select("double", "decimal", "float", "long", "array<double>", "vector", "struct")
    with caplog.at_level(logging.INFO, logger="converter"):
        make_spark_converter(df, cache_dir=cache_dir).delete()
    narrowed = [record.getMessage() for record in caplog.records if "becomes float32" in record.getMessage()]
    assert narrowed == [
        "Column 'double': double becomes float32.",
        "Column 'decimal': decimal(20,2) becomes float32.",
        "Column 'array<double>': double becomes float32.",
        "Column 'vector': double becomes float32.",
        "Column 'struct.dot.ted': double becomes float32.",
    ]


def test_nulls_are_masked_in_every_type(spark: SparkSession, cache_dir: Path) -> None:
    found = convert_and_read(known_rows(spark, 500, nulls=True), cache_dir, read_options={"nulls": "mask"})
    masks = {name: found.pop(f"{name}__valid") for name in list(found) if f"{name}__valid" in found}
    assert_same(found, known_values(np.arange(500), nulls=True))
    assert_same(masks, known_valid(np.arange(500)))


def test_nulls_are_filled_in_every_type(spark: SparkSession, cache_dir: Path) -> None:
    expected, valid = known_values(np.arange(300), nulls=True), known_valid(np.arange(300))
    kinds = {name: values.dtype.kind for name, values in expected.items() if name != "id"}
    fills: dict[str, Any] = {name: {"b": True, "i": -1, "f": -0.5}.get(kind, 0) for name, kind in kinds.items()}
    fills |= {"string": "none ∅", "binary": b"\x00none", "array<float>": np.arange(8.0)}
    del fills["ragged"]
    found = convert_and_read(
        known_rows(spark, 300, nulls=True).drop("ragged"), cache_dir, read_options={"nulls": fills}
    )
    for name, fill in fills.items():
        values = expected[name]
        values[~valid[name]] = np.array(0, values.dtype) if values.dtype.kind == "M" else fill
    assert_same(found, {name: values for name, values in expected.items() if name != "ragged"})


def test_values_are_those_that_collect_and_to_arrow_give(spark: SparkSession, cache_dir: Path) -> None:
    df = known_rows(spark, 200)
    found = convert_and_read(df, cache_dir, float_dtype=None)
    # Times in `collect` are local ones of the machine; Arrow's carry their instant.
    collected = df.drop("timestamp").collect()
    arrow = df.drop("vector").toArrow()
    for name in df.columns:
        if name == "struct":
            continue
        kind = found[name].dtype.kind
        if name != "vector":
            column = arrow[name].combine_chunks()
            times = {"timestamp": "us", "timestamp_ntz": "us", "date": "D"}
            if name in times:
                column = column.cast("int32" if name == "date" else "int64")
                np.testing.assert_array_equal(found[name].astype("i8"), column.to_numpy(), err_msg=name)
            elif kind == "O" and name == "ragged":
                assert [row.tolist() for row in found[name]] == column.to_pylist()
            else:
                values = [float(value) for value in column.to_pylist()] if name == "decimal" else column.to_pylist()
                assert found[name].tolist() == values, name
        if name == "timestamp":
            continue
        rows = [row[name] for row in collected]
        if name == "vector":
            rows = [row.toArray().tolist() for row in rows]
        if name == "decimal":
            rows = [float(row) for row in rows]
        assert [row.tolist() if hasattr(row, "tolist") else row for row in found[name].tolist()] == rows, name
    members = [row["struct"] for row in collected]
    assert found["struct.dot.ted"].tolist() == [row["dot.ted"] for row in members]
    assert found["struct.array"].tolist() == [row["array"] for row in members]
    assert found["struct.inner.long"].tolist() == [row["inner"]["long"] for row in members]


def test_a_sorted_dataframe_is_read_sorted(spark: SparkSession, cache_dir: Path) -> None:
    df = known_rows(spark, 400).repartition(5, "long").orderBy(F.desc("long"))
    ids = np.argsort(-known_values(np.arange(400))["long"])
    assert_same(convert_and_read(df, cache_dir), known_values(ids))


@pytest.mark.parametrize("partitions", [1, 2, 7])
def test_rows_keep_the_order_of_partitions(spark: SparkSession, cache_dir: Path, partitions: int) -> None:
    df = known_rows(spark, 123, partitions=partitions).select("id", "string", "array<float>")
    expected = known_values(np.arange(123))
    assert_same(convert_and_read(df, cache_dir), {name: expected[name] for name in df.columns})


def test_more_than_ten_partitions_stay_in_numeric_order(spark: SparkSession, cache_dir: Path) -> None:
    found = convert_and_read(spark.range(0, 1200, 1, 120), cache_dir)
    assert found["id"].tolist() == list(range(1200))


def test_empty_and_skewed_partitions_lose_nothing(spark: SparkSession, cache_dir: Path) -> None:
    df = known_rows(spark, 1000, partitions=10).where("id = 101 or id between 200 and 299 or id in (699, 700)")
    assert_same(convert_and_read(df, cache_dir), known_values([101, *range(200, 300), 699, 700]))


def test_one_row_is_enough(spark: SparkSession, cache_dir: Path) -> None:
    assert_same(convert_and_read(known_rows(spark, 1).drop("ragged"), cache_dir),
                {name: values for name, values in known_values([0]).items() if name != "ragged"})  # fmt: skip


def test_a_partition_of_many_arrow_batches_arrives_in_order(spark: SparkSession, cache_dir: Path) -> None:
    found = convert_and_read(spark.range(0, 35_000, 1, 1), cache_dir, read_options={"batch_size": 1000})
    np.testing.assert_array_equal(found["id"], np.arange(35_000))


def test_a_partition_of_nulls_alone_has_the_shape_of_the_others(spark: SparkSession, cache_dir: Path) -> None:
    df = spark.range(0, 40, 1, 4).select("id", F.when(F.col("id") > 25, F.array(F.col("id"), F.lit(7))).alias("pair"))
    found = convert_and_read(df, cache_dir, read_options={"nulls": "mask"})
    assert found["pair__valid"].tolist() == [row > 25 for row in range(40)]
    assert found["pair"].tolist() == [[row, 7] if row > 25 else [0, 0] for row in range(40)]


def test_a_column_that_begins_with_nulls_keeps_its_shape(spark: SparkSession, cache_dir: Path) -> None:
    # The first Arrow batches of the partition, and the first row groups, hold nothing but nulls.
    rows = F.when(F.col("id") >= 25_000, F.array(F.col("id"), -F.col("id"))).alias("pair")
    df = spark.range(0, 30_000, 1, 1).select("id", rows)
    with make_spark_converter(df, cache_dir=cache_dir, row_group_bytes=65_536) as converter:
        assert converter.schema["pair"].shape == (2,)
        found = read(converter, batch_size=999, nulls="mask")
    valid = found["id"] >= 25_000
    np.testing.assert_array_equal(found["pair__valid"], valid)
    np.testing.assert_array_equal(found["pair"], np.stack([found["id"], -found["id"]], 1) * valid[:, None])


def test_a_column_whose_length_changes_late_becomes_ragged_and_keeps_its_values(
    spark: SparkSession, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = F.when(F.col("id") < 15_000, F.array("id", "id")).otherwise(F.array("id")).alias("numbers")
    df = spark.range(0, 20_000, 1, 1).select("id", pair)
    found = convert_and_read(df, cache_dir, read_options={"batch_size": 4096}, row_group_bytes=65_536)
    lengths = [len(row) for row in found["numbers"]]
    assert lengths == [2] * 15_000 + [1] * 5_000
    np.testing.assert_array_equal(np.concatenate(found["numbers"]), np.repeat(np.arange(20_000), lengths))
    assert "Column 'numbers' becomes ragged" in caplog.text
    assert "row 15000 of partition 0" in caplog.text


def test_shapes_give_a_flat_array_its_shape(spark: SparkSession, cache_dir: Path) -> None:
    df = known_rows(spark, 90).select("id", "array<float>", "vector", "ragged")
    with make_spark_converter(df, cache_dir=cache_dir, shapes={"array<float>": (2, 4), "vector": [3, 2]}) as converter:
        assert converter.schema["array<float>"].shape == (2, 4)
        found = read(converter)
    expected = {name: known_values(np.arange(90))[name] for name in df.columns}
    expected["array<float>"] = expected["array<float>"].reshape(-1, 2, 4)
    expected["vector"] = expected["vector"].reshape(-1, 3, 2)
    assert_same(found, expected)


def test_a_row_that_does_not_fit_its_declared_shape_is_named(spark: SparkSession, cache_dir: Path) -> None:
    values = F.when(F.col("id") == 17, F.array(F.lit(1.0))).otherwise(F.array(F.lit(1.0), F.lit(2.0)))
    df = spark.range(0, 30, 1, 1).select("id", values.alias("pair"))
    match = r"Column 'pair' has a row of 1 numbers, but shapes= declares 2 numbers \(row 17 "
    with pytest.raises(SourceError, match=match):
        make_spark_converter(df, cache_dir=cache_dir, shapes={"pair": (2,)})
    assert files_below(cache_dir) == ["converter-v1/.owner"]


def test_row_groups_have_the_asked_size(spark: SparkSession, cache_dir: Path) -> None:
    df = spark.range(0, 40_000, 1, 1).select("id", (F.col("id") * 2).alias("twice"))
    with make_spark_converter(df, cache_dir=cache_dir, row_group_bytes=16_000) as converter:
        sizes = [
            file.metadata.row_group(index).num_rows * 16
            for file in parquet_files(converter)
            for index in range(file.metadata.num_row_groups)
        ]
        found = read(converter, batch_size=777)
    assert sum(sizes) == 640_000
    assert all(8_000 <= size <= 24_000 for size in sizes)
    np.testing.assert_array_equal(found["id"], np.arange(40_000))
    np.testing.assert_array_equal(found["twice"], 2 * np.arange(40_000))


@pytest.mark.parametrize(
    ("compression", "stored"),
    [("auto", "UNCOMPRESSED"), ("none", "UNCOMPRESSED"), ("lz4", "LZ4"), ("zstd", "ZSTD"), ("snappy", "SNAPPY")],
)
def test_each_compression_keeps_every_value(
    spark: SparkSession, cache_dir: Path, compression: str, stored: str
) -> None:
    df = known_rows(spark, 100, nulls=True).select("id", "string", "array<float>", "ragged", "boolean")
    with make_spark_converter(df, cache_dir=cache_dir, compression=compression) as converter:
        groups = [file.metadata.row_group(0) for file in parquet_files(converter)]
        assert {group.column(index).compression for group in groups for index in range(5)} == {stored}
        found = read(converter, nulls="mask")
    expected = known_values(np.arange(100), nulls=True)
    assert_same({name: found[name] for name in df.columns}, {name: expected[name] for name in df.columns})


def test_every_file_is_read_with_its_nulls(spark: SparkSession, cache_dir: Path) -> None:
    # Only one of four partitions has a null, yet the keys of all batches are the same.
    df = spark.range(0, 40, 1, 4).select("id", F.when(F.col("id") != 33, F.col("id")).alias("but_33"))
    with (
        make_spark_converter(df, cache_dir=cache_dir) as converter,
        converter.make_batch_reader(batch_size=5, nulls="mask") as reader,
    ):
        batches = list(reader)
    assert {tuple(batch) for batch in batches} == {("id", "but_33", "but_33__valid")}
    assert np.concatenate([batch["but_33__valid"] for batch in batches]).tolist() == [row != 33 for row in range(40)]


@pytest.mark.parametrize(("writer", "categories"), [("executors", None), ("executors", ["id"]), ("spark", ["id"])])
def test_only_one_job_is_run_and_it_is_named(
    spark: SparkSession, cache_dir: Path, writer: str, categories: Any
) -> None:
    df = known_rows(spark, 50).select("id", "double")
    context, tracker = spark.sparkContext, spark.sparkContext.statusTracker()
    try:
        context.setJobGroup("before", "before")
        spark.range(1).collect()
        wait_until(lambda: tracker.getJobIdsForGroup("before"))
        last_job = max(tracker.getJobIdsForGroup("before"))
        context.setJobGroup("conversion", "the user's own words")
        converter = make_spark_converter(df, cache_dir=cache_dir, writer=writer, categories=categories)
        assert context.getLocalProperty("spark.job.description") == "the user's own words"
        assert context.getLocalProperty("spark.jobGroup.id") == "conversion"
        with converter, converter.make_batch_reader(ragged="pad") as reader:
            list(reader)
        # Jobs are listed in the order they ran: once this one is, so are all before it.
        context.setJobGroup("afterwards", "afterwards")
        spark.range(1).collect()
        wait_until(lambda: tracker.getJobIdsForGroup("afterwards"))
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            context.setLocalProperty(name, None)  # type: ignore[arg-type]
    store = context._jsc.sc().statusStore()
    jobs = [store.job(job) for job in range(last_job + 1, next(iter(tracker.getJobIdsForGroup("afterwards"))))]
    assert [job.description().get() for job in jobs] == ["converter: write the cache"]
    assert jobs[0].jobGroup().get().startswith("converter-data-")


def test_the_session_is_as_before(spark: SparkSession, cache_dir: Path) -> None:
    def state() -> Any:
        confs = {row["key"]: row["value"] for row in spark.sql("SET").collect()}
        names = ("spark.job.description", "spark.jobGroup.id", "spark.sql.execution.id")
        local = {name: spark.sparkContext.getLocalProperty(name) for name in names}
        return confs, local, cloudpickle.list_registry_pickle_by_value(), sorted(spark.catalog.listTables())

    before = state()
    assert before[0]["spark.sql.session.timeZone"] == "America/New_York"
    df = known_rows(spark, 20)
    with make_spark_converter(df, cache_dir=cache_dir) as converter:
        read(converter)
        assert state() == before
    bad = df.select(F.raise_error(F.lit("on purpose")).cast("int").alias("x"))
    with pytest.raises(Exception, match="on purpose"):
        make_spark_converter(bad, cache_dir=cache_dir)
    assert state() == before


def test_the_fingerprint_is_of_the_rows(spark: SparkSession, cache_dir: Path) -> None:
    df = known_rows(spark, 300, nulls=True)

    def fingerprint(rows: DataFrame) -> str:
        with make_spark_converter(rows, cache_dir=cache_dir) as converter:
            return converter.fingerprint

    first = fingerprint(df)
    assert fingerprint(known_rows(spark, 300, nulls=True)) == first
    others = {
        "one value": df.withColumn("long", F.when(F.col("id") == 299, F.lit(1)).otherwise(F.col("long"))),
        "one null": df.withColumn("byte", F.when(F.col("id") != 7, F.coalesce("byte", F.lit(0).cast("byte")))),
        "a name": df.withColumnRenamed("long", "longer"),
        "a row less": df.where("id != 150"),
        "another order": df.orderBy(F.desc("id")),
    }
    found = {what: fingerprint(rows) for what, rows in others.items()}
    assert len({first, *found.values()}) == 1 + len(others), found


def test_repr_says_what_there_is_and_html_is_escaped(spark: SparkSession, tmp_path: Path) -> None:
    df = known_rows(spark, 1234).select("id", "`<b>`", "`žluťoučký 🐟`", "ragged")
    converter = make_spark_converter(df, cache_dir=tmp_path / "<i>&amp;")
    text = repr(converter)
    assert text.startswith("DatasetConverter(1,234 rows × 4 columns, 0.")
    assert text.endswith(f" MB in 3 files, {converter.url})")
    page = converter._repr_html_()
    assert "<td>&lt;b&gt;</td>" in page
    assert html.escape(text) in page
    assert "<b>" not in page
    assert "<i>" not in page
    assert "<td>žluťoučký 🐟</td><td>int64</td><td>()</td>" in page
    assert "<td>ragged</td><td>int64</td><td>ragged</td>" in page
    converter.delete()
    assert repr(converter) == text.removesuffix(")") + ", deleted)"


def test_the_schema_is_known_before_reading(spark: SparkSession, cache_dir: Path) -> None:
    with make_spark_converter(known_rows(spark, 100, nulls=True), cache_dir=cache_dir) as converter:
        assert len(converter) == 100
        expected = known_values(np.arange(100))
        assert converter.schema.names == tuple(expected)
        for field in converter.schema:
            assert field.has_nulls == (field.name != "id"), field
            if field.name == "ragged":
                assert (field.dtype, field.shape) == ("int64", None)
            elif not field.is_object:
                assert np.dtype(field.dtype) == expected[field.name].dtype, field
                assert field.shape == expected[field.name].shape[1:], field


def read_pickled(path: str) -> list[int]:
    converter = pickle.loads(Path(path).read_bytes())
    ids = read(converter)["id"].tolist()
    converter.delete()
    return ids


@pytest.mark.parametrize("name", ["with space", "ünï 🐟", "per%20cent", "hash#1", "what?", "a::b", "~", "[a]*"])
def test_a_cache_directory_may_have_any_name(spark: SparkSession, tmp_path: Path, name: str) -> None:
    with make_spark_converter(spark.range(0, 9, 1, 2), cache_dir=tmp_path / name) as converter:
        assert read(converter)["id"].tolist() == list(range(9))
        assert len(files_below(tmp_path / name)) > 3
        copy = pickle.loads(pickle.dumps(converter))
        assert read(copy)["id"].tolist() == list(range(9))


def test_a_pickled_copy_reads_elsewhere_and_deletes_nothing(spark: SparkSession, tmp_path: Path) -> None:
    with make_spark_converter(spark.range(0, 9, 1, 2), cache_dir=tmp_path / "cache") as converter:
        (tmp_path / "converter.pickle").write_bytes(pickle.dumps(converter))
        assert run_python(read_pickled, str(tmp_path / "converter.pickle")) == list(range(9))
        assert read(converter)["id"].tolist() == list(range(9))


def test_the_bar_counts_the_tasks_of_the_write(
    spark: SparkSession, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = ReadStderr(tmp_path / "seen")
    monkeypatch.setattr(sys, "stderr", stderr)
    with make_spark_converter(rows_that_wait(spark, stderr.flag), cache_dir=cache_dir, progress=True) as converter:
        assert len(converter) == 6
    assert stderr.flag.exists()
    assert re.search(r"\rWriting the cache: 0 of 2 tasks \[\d\d:\d\d\]", stderr.getvalue())
    assert "0 of 0" not in stderr.getvalue()
