"""Whoever writes, the same rows arrive: the executors, Spark's own writer, and Spark's without Python on the way."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.ml.functions import array_to_vector
from pyspark.ml.linalg import Matrices, MatrixUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from converter import (
    CacheError,
    DatasetConverter,
    NullValueError,
    SourceError,
    UnsupportedTypeError,
    make_spark_converter,
    start_local_spark,
)
from converter.portable import tasks
from converter.sources.spark import choose, run, with_spark
from converter.sources.spark.confs import changed_confs
from converter.sources.spark.local import find_java_home
from converter.sources.spark.session import count_scan_partitions, stream_reports
from converter.statistics import ColumnStatistics
from tests.folders import files_below
from tests.processes import run_python
from tests.rows import assert_same, concatenate, known_rows, known_valid, known_values

MARKER = "converter-v1/.owner"
WAYS = ("executors", "spark", "lists")
NUM_ROWS = 300


def convert(df: DataFrame, way: str, cache_dir: Path, **options: Any) -> DatasetConverter:
    """A converter that was written in this way; `lists` is what Spark's writer does where executors have no pyarrow."""
    with pytest.MonkeyPatch.context() as patched:
        if way == "lists":
            patched.setattr(run, "choose_writer", lambda *_, **__: "lists")
        writer = "spark" if way == "lists" else way
        return make_spark_converter(df, cache_dir=cache_dir, writer=writer, **options)


def read(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    with converter.make_batch_reader(**{"batch_size": 64, "ragged": "nested"} | options) as reader:
        return concatenate(list(reader))


def convert_and_read(df: DataFrame, way: str, cache_dir: Path, **options: Any) -> dict[str, Any]:
    with convert(df, way, cache_dir, **options) as converter:
        found = read(converter, nulls="mask")
    assert files_below(cache_dir) == [MARKER]
    assert [path.name for path in cache_dir.rglob("*") if path.is_dir()] == ["converter-v1"]
    return found


def settings(spark: SparkSession) -> list[tuple[str, str]]:
    return sorted((row[0], row[1]) for row in spark.sql("SET").collect())


def data_files(converter: DatasetConverter) -> list[Path]:
    return sorted(Path(converter.url.removeprefix("file://")).glob("data-*/*"))


Written = Callable[[str, bool], DatasetConverter]


@pytest.fixture(scope="module")
def written(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    """The known rows, with or without nulls, written once in each way from partitions of which some are empty."""
    made: dict[tuple[str, bool], DatasetConverter] = {}
    # All at once, so that their heartbeats begin and end with no single test.
    for way, nulls in itertools.product(WAYS, (False, True)):
        df = known_rows(spark, 2 * NUM_ROWS, nulls=nulls, partitions=6).where(f"id < {NUM_ROWS}")
        before = settings(spark)
        made[way, nulls] = convert(df, way, tmp_path_factory.mktemp("cache"))
        assert settings(spark) == before
    yield lambda way, nulls: made[way, nulls]
    for converter in made.values():
        converter.delete()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nulls", [False, True], ids=["whole", "nulls"])
def test_every_row_arrives_once_with_its_value(written: Written, way: str, nulls: bool) -> None:
    found = read(written(way, nulls), nulls="mask")
    masks = {name: found.pop(f"{name}__valid") for name in list(found) if f"{name}__valid" in found}
    assert_same(found, known_values(np.arange(NUM_ROWS), nulls=nulls))
    assert_same(masks, known_valid(np.arange(NUM_ROWS)) if nulls else {})


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("nulls", [False, True], ids=["whole", "nulls"])
def test_the_schema_is_the_same(written: Written, way: str, nulls: bool) -> None:
    assert written(way, nulls).schema.to_json() == written("executors", nulls).schema.to_json()
    assert len(written(way, nulls)) == NUM_ROWS


def assert_same_statistics(found: ColumnStatistics, expected: ColumnStatistics) -> None:
    for name in ("null_count", "nan_count", "min", "max", "shortest", "longest"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("mean", "std", "element_mean", "element_std"):
        one, other = getattr(found, name), getattr(expected, name)
        assert (one is None) == (other is None), name
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("nulls", [False, True], ids=["whole", "nulls"])
def test_the_statistics_are_the_same(written: Written, way: str, nulls: bool) -> None:
    statistics, expected = written(way, nulls).statistics, written("executors", nulls).statistics
    assert list(statistics) == list(expected)
    assert expected["array<float>"].element_mean.shape == (8,)
    for name in expected:
        assert_same_statistics(statistics[name], expected[name])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("float_dtype", ["float64", None])
def test_wide_floats_keep_their_digits(spark: SparkSession, cache_dir: Path, way: str, float_dtype: Any) -> None:
    df = known_rows(spark, 50).select("id", "double", "decimal", "float", "array<double>")
    found = convert_and_read(df, way, cache_dir, float_dtype=float_dtype)
    expected = known_values(np.arange(50), float_dtype="float64")
    assert_same(found, {name: expected[name] for name in df.columns})


@pytest.mark.parametrize("way", WAYS)
def test_more_than_ten_partitions_stay_in_order(spark: SparkSession, cache_dir: Path, way: str) -> None:
    df = spark.range(0, 240, 1, 24).select("id", F.array("id", "id").alias("pair")).where("id % 100 > 15")
    found = convert_and_read(df, way, cache_dir)
    expected = [row for row in range(240) if row % 100 > 15]
    assert found["id"].tolist() == expected
    assert found["pair"].tolist() == [[row, row] for row in expected]


def test_a_file_that_vanishes_while_spark_writes_is_told(
    spark: SparkSession, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports_of = with_spark.reports_of_files

    def remove_one(directory: Any, observed: Any) -> Any:
        next(Path(directory.path()).glob("part-*.parquet")).unlink()
        return reports_of(directory, observed)

    monkeypatch.setattr(with_spark, "reports_of_files", remove_one)
    with pytest.raises(CacheError, match=r"Spark wrote 40 rows into .*, but its files have 20: some were removed"):
        make_spark_converter(spark.range(0, 40, 1, 2), cache_dir=cache_dir, writer="spark")
    assert not list(cache_dir.rglob("part-*"))


@pytest.mark.parametrize("num_partitions", [1, 64, 65])
@pytest.mark.parametrize("plan", ["scan", "exchange", "exchange that does not adapt", "cached"])
def test_tensors_have_the_statistics_of_all_partitions(
    spark: SparkSession, cache_dir: Path, plan: str, num_partitions: int
) -> None:
    df = spark.range(0, 200, 1, num_partitions)
    rows = df.select("id", F.array((F.col("id") * F.col("id")).cast("double"), F.sin("id")).alias("pair"))
    confs = {"spark.sql.adaptive.enabled": "false"} if plan.endswith("adapt") else {}
    if plan.startswith("exchange"):
        rows = rows.repartition(num_partitions, "id").sortWithinPartitions("id")
    elif plan == "cached":
        rows = rows.cache()
    with changed_confs(spark, confs):
        counted = count_scan_partitions(rows)
        assert counted == (None if plan.startswith("exchange") else num_partitions)
        with make_spark_converter(rows, cache_dir=str(cache_dir), float_dtype="float64") as converter:
            found = converter.statistics["pair"]
    rows.unpersist()
    numbers = np.arange(200.0)
    pair = np.stack([numbers * numbers, np.sin(numbers)], axis=1)
    np.testing.assert_allclose(found.element_mean, pair.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(found.element_std, pair.std(axis=0), rtol=1e-12)
    assert (found.min, found.max) == (pair.min(), pair.max())


@pytest.mark.parametrize("way", WAYS)
def test_first_and_last_times_and_wide_decimals(spark: SparkSession, cache_dir: Path, way: str) -> None:
    df = spark.sql("""
        SELECT * FROM VALUES
          (timestamp'0001-01-01 00:00:00Z', timestamp_ntz'0001-01-01 00:00:00', date'0001-01-01', -1e-10BD),
          (timestamp'1582-10-10 01:02:03Z', timestamp_ntz'1582-10-10 01:02:03', date'1582-10-10', 0.1BD),
          (timestamp'2026-03-08 06:59:59.999999Z', timestamp_ntz'2026-03-08 02:30:00', date'2026-03-08', 12345678.5BD),
          (NULL, NULL, NULL, NULL),
          (timestamp'9999-12-31 23:59:59.999999Z', timestamp_ntz'9999-12-31 23:59:59.999999', date'9999-12-31', 3BD)
          AS t(zoned, plain, day, number)
    """).select("zoned", "plain", "day", F.col("number").cast("decimal(38,10)").alias("number"))
    found = convert_and_read(df.coalesce(1), way, cache_dir, float_dtype="float64")
    valid = [True, True, True, False, True]
    times = ["0001-01-01", "1582-10-10T01:02:03", "2026-03-08T06:59:59.999999", "1970-01-01",
             "9999-12-31T23:59:59.999999"]  # fmt: skip
    plain = [times[0], times[1], "2026-03-08T02:30:00", *times[3:]]
    expected = {
        "zoned": np.array(times, "M8[us]"), "zoned__valid": np.array(valid),
        "plain": np.array(plain, "M8[us]"), "plain__valid": np.array(valid),
        "day": np.array([time[:10] for time in times], "M8[D]"), "day__valid": np.array(valid),
        "number": np.array([-1e-10, 0.1, 12345678.5, 0, 3]), "number__valid": np.array(valid),
    }  # fmt: skip
    assert_same(found, expected)


@pytest.mark.parametrize("way", WAYS)
def test_floats_that_are_no_numbers_arrive_as_they_are(spark: SparkSession, cache_dir: Path, way: str) -> None:
    df = spark.sql("""
        SELECT x, float(x) AS y, array(x, -0.0D) AS pair FROM VALUES
          (double('NaN')), (double('inf')), (double('-inf')), (-0.0D), (1.7976931348623157E308D), (4.9E-324D) AS t(x)
    """)
    with convert(df, way, cache_dir, float_dtype="float64") as converter:
        found, statistics = read(converter), converter.statistics
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 1.7976931348623157e308, 5e-324])
    with np.errstate(over="ignore"):
        assert_same(found, {"x": x, "y": x.astype("f4"), "pair": np.stack([x, np.full(6, -0.0)], 1)})
    assert np.signbit(found["x"]).tolist() == np.signbit(x).tolist()
    assert statistics["x"].nan_count == statistics["pair"].nan_count == 1


def matrices(spark: SparkSession) -> DataFrame:
    to_matrix = F.udf(lambda row: Matrices.dense(2, 3, [float(row + place) for place in range(6)]), MatrixUDT())
    return spark.range(0, 6, 1, 2).select("id", to_matrix("id").alias("matrix"))


@pytest.mark.parametrize("way", ["executors", "spark"])
def test_matrices_of_one_shape_are_tensors(spark: SparkSession, cache_dir: Path, way: str) -> None:
    # Spark's matrices run along columns.
    expected = [[[row + line + 2 * place for place in range(3)] for line in range(2)] for row in range(6)]
    assert convert_and_read(matrices(spark), way, cache_dir)["matrix"].tolist() == expected
    with convert(matrices(spark), way, cache_dir) as converter:
        # Spark's writer notes no shape beside the bytes.
        assert read(converter.where([("matrix", "contains", 6.0)]))["matrix"].tolist() == expected[1:]


@pytest.mark.parametrize("way", ["executors", "spark"])
def test_matrices_of_several_shapes_are_ragged(spark: SparkSession, cache_dir: Path, way: str) -> None:
    rows = [
        Matrices.dense(2, 3, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        None,
        Matrices.dense(3, 2, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    ]
    df = spark.createDataFrame([(row,) for row in rows], StructType([StructField("x", MatrixUDT())])).coalesce(1)
    with convert(df, way, cache_dir) as converter:
        assert converter.schema["x"].shape is None
        found = read(converter, nulls="mask")
    assert [row.shape for row in found["x"]] == [(2, 3), (0, 0), (3, 2)]
    assert found["x"][0].tolist() == [[1, 3, 5], [2, 4, 6]]
    with convert(df.where("x IS NULL"), way, cache_dir, shapes={"x": (2, 2)}) as converter:
        assert read(converter, nulls="mask")["x__valid"].tolist() == [False]
    with pytest.raises(SourceError, match=r"'x' has a row of shape \(\d, \d\), but shapes= declares shape \(2, 3\)"):
        convert(df, way, cache_dir, shapes={"x": (2, 3)})


def test_matrices_need_python_on_the_executors(spark: SparkSession, cache_dir: Path) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"'matrix' has matrices, .*Install pyarrow there") as refused:
        convert(matrices(spark), "lists", cache_dir)
    assert refused.value.column == "matrix"
    assert files_below(cache_dir) == [MARKER]


@pytest.mark.parametrize("way", WAYS)
def test_vectors_without_nulls_or_of_two_sizes(spark: SparkSession, cache_dir: Path, way: str) -> None:
    numbers = F.when(F.col("id") % 2 == 0, F.array(F.lit(1.0), F.lit(2.0))).otherwise(F.array(F.lit(3.0)))
    df = spark.range(0, 8, 1, 2).select("id", array_to_vector(numbers).alias("vector"))
    with convert(df, way, cache_dir) as converter:
        assert converter.schema["vector"].shape is None
        found = read(converter)
    assert [row.tolist() for row in found["vector"]] == [[1.0, 2.0], [3.0]] * 4


@pytest.mark.parametrize("way", WAYS)
def test_shapes_are_given_to_flat_and_nested_arrays(spark: SparkSession, cache_dir: Path, way: str) -> None:
    df = known_rows(spark, 40, nulls=True).select("id", "array<float>", "nested")
    found = convert_and_read(df, way, cache_dir, shapes={"array<float>": (2, 4), "nested": (2, 3)})
    expected = known_values(np.arange(40), nulls=True)
    np.testing.assert_array_equal(found["array<float>"], expected["array<float>"].reshape(-1, 2, 4), strict=True)
    np.testing.assert_array_equal(found["nested"], expected["nested"], strict=True)


def test_bytes_that_are_declared_otherwise_are_another_entry(spark: SparkSession, cache_dir: Path) -> None:
    df = spark.range(8).selectExpr("unhex(lpad(hex(id), 8, '0')) AS x")
    urls = []
    for shapes in (None, {"x": (4,)}, {"x": ("int16", (2,))}, {"x": ("float32", (1,))}):
        with make_spark_converter(df, cache_dir=cache_dir, cache_key="x", shapes=shapes) as converter:
            urls.append(converter.url)
    assert len(set(urls)) == 4
    for shapes, match in (
        ({"x": (2, 0)}, "must be a tuple of sizes above 0"),
        ({"x": ("float16", (2,))}, "bytes can be"),
    ):
        with pytest.raises(ValueError, match=match):
            make_spark_converter(df, cache_dir=cache_dir, shapes=shapes)
    numbers = spark.range(8).selectExpr("array(id) AS x")
    with pytest.raises(ValueError, match="shapes: the arrays of 'x' are int64; declare only their shape"):
        make_spark_converter(numbers, cache_dir=cache_dir, shapes={"x": ("float32", (1,))})


BYTES: dict[str, Any] = {"flat": (8,), "image": (2, 4), "vector": ("float32", (2,)), "cube": ("int16", (1, 2, 2))}


@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_the_numbers_that_are_declared(spark: SparkSession, cache_dir: Path, way: str) -> None:
    value = "unhex(lpad(hex(id), 16, '0'))"
    columns = [f"{value if name != 'vector' else f'IF(id % 7 = 3, NULL, {value})'} AS {name}" for name in BYTES]
    df = spark.range(0, 40, 1, 3).selectExpr("id", *columns)
    raw = [bytes(4) + int(number).to_bytes(4, "big") for number in range(40)]
    with convert(df, way, cache_dir, shapes=BYTES) as converter:
        found = read(converter, nulls="mask")
        kinds = {pq.read_schema(path).field("image").type for path in data_files(converter)}
        assert kinds == {pa.binary(8) if way == "executors" else pa.binary()}
        assert converter.statistics["image"].max == 39
        assert converter.statistics["vector"].null_count == 6
    assert found["vector__valid"].tolist() == [number % 7 != 3 for number in range(40)]
    for name, declared in BYTES.items():
        dtype, shape = declared if isinstance(declared[0], str) else ("uint8", declared)
        expected = np.frombuffer(b"".join(raw), dtype).reshape(40, *shape).copy()
        if name == "vector":
            expected[3::7] = 0
        np.testing.assert_array_equal(found[name], expected, strict=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("value", "options", "error", "match"),
    [
        ("array(1.0F, IF(id = 17, NULL, 2.0F))", {}, NullValueError, "'bad' has arrays with null elements"),
        ("array(array(1), IF(id = 17, NULL, array(2)))", {}, NullValueError, "'bad' has arrays with null elements"),
        ("array(array(1, 2), array(3, IF(id = 17, NULL, 2)))", {}, NullValueError, "'bad' has arrays with null"),
        ("IF(id = 17, array(1), array(1, 2))", {"shapes": {"bad": (2,)}}, SourceError,
         r"'bad' has a row of 1 numbers, but shapes= declares 2"),
        ("IF(id = 17, array(array(1), array(2, 3)), array(array(1, 2), array(3, 4)))", {}, UnsupportedTypeError,
         "'bad' has a row whose inner arrays differ in length"),
        ("IF(id = 17, array(array(array(1)), array(array(2, 3))), array(array(array(1))))", {}, UnsupportedTypeError,
         "'bad' has a row whose inner arrays differ in length"),
        ("IF(id = 17, X'0102', X'01020304')", {"shapes": {"bad": (2, 2)}}, SourceError,
         "'bad' has a row of 2 bytes, but shapes= declares 4 bytes"),
        ("IF(id = 17, X'0102030405', X'01020304')", {"shapes": {"bad": ("int16", (2,))}}, SourceError,
         "'bad' has a row of 5 bytes, but shapes= declares 4 bytes"),
        ("IF(id = 17, array(array(1), array(2)), array(array(1, 2)))", {"shapes": {"bad": (1, 2)}}, SourceError,
         r"'bad' has a row of shape \(2, [12]\), but shapes= declares shape \(1, 2\)"),
    ],
    ids=["null element", "null row in a row", "nested null element", "shape", "jagged", "jagged 3-d", "bytes",
         "part of a number", "nested shape"],
)  # fmt: skip
def test_bad_data_is_the_same_error(
    spark: SparkSession, cache_dir: Path, way: str, value: str, options: Any, error: Any, match: str
) -> None:
    df = spark.range(0, 40, 1, 3).selectExpr("id", "array(id) AS good", f"{value} AS bad")
    before = settings(spark)
    with pytest.raises(error, match=match) as caught:
        convert(df, way, cache_dir, **options)
    assert type(caught.value) is error
    assert caught.value.column == "bad"
    assert settings(spark) == before
    assert files_below(cache_dir) == [MARKER]
    assert [path.name for path in cache_dir.rglob("*") if path.is_dir()] == ["converter-v1"]


@pytest.mark.parametrize("way", WAYS)
def test_nested_arrays_of_different_shapes_keep_them(spark: SparkSession, cache_dir: Path, way: str) -> None:
    row = (
        "transform(sequence(1, cast(id % 4 + 1 AS int)), i -> transform(sequence(1, cast(id % 3 + 1 AS int)), j -> {}))"
    )
    df = spark.range(0, 40, 1, 3).selectExpr(
        "id",
        f"IF(id = 7, NULL, {row.format('cast(100 * id + 10 * i + j AS int)')}) AS grid",
        f"{row.format('array(cast(i AS double), cast(j AS double))')} AS points",
        "IF(id % 2 = 0, array(array(cast(id AS tinyint))), array()) AS hollow",
    )
    with convert(df, way, cache_dir) as converter:
        found = read(converter, nulls="mask")
        with converter.make_batch_reader(batch_size=40, nulls="mask", ragged="pad") as reader:
            (padded,) = list(reader)
        statistics = converter.statistics["grid"]
        assert converter.schema["grid"].shape is None
    rows = df.orderBy("id").collect()
    for index, row in enumerate(rows):
        assert found["grid"][index].tolist() == (row["grid"] or np.zeros((0, 0)).tolist())
        assert found["points"][index].tolist() == row["points"]
        assert found["points"][index].dtype == np.float32
        assert found["hollow"][index].tolist() == row["hollow"]
        assert found["grid__valid"][index] == (row["grid"] is not None)
        height, width = padded["grid__length"][index].tolist()
        assert (height, width) == ((0, 0) if index == 7 else (index % 4 + 1, index % 3 + 1))
        assert padded["grid"][index, :height, :width].tolist() == (row["grid"] or [])
        assert not padded["grid"][index, height:].any()
        assert not padded["grid"][index, :, width:].any()
    assert padded["grid"].shape == (40, 4, 3)
    assert padded["points"].shape == (40, 4, 3, 2)
    numbers = np.array([number for row in rows for line in row["grid"] or [] for number in line])
    assert (statistics.min, statistics.max) == (numbers.min(), numbers.max())
    np.testing.assert_allclose([statistics.mean, statistics.std], [numbers.mean(), numbers.std()], rtol=1e-12)
    assert (statistics.shortest, statistics.longest) == (1, 12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("odd", ["array(1, 2, 3)", "array(1)"])
@pytest.mark.parametrize("around", ["{}", "array({0}, {0})"], ids=["flat", "nested"])
def test_one_odd_row_is_named_with_its_file(
    spark: SparkSession, cache_dir: Path, caplog: pytest.LogCaptureFixture, way: str, odd: str, around: str
) -> None:
    values = f"IF(id = 17, {around.format(odd)}, IF(id = 3, NULL, {around.format('array(1, 2)')})) AS x"
    df = spark.range(0, 30, 1, 3).selectExpr("id", values)
    with convert(df, way, cache_dir) as converter:
        file = next(path.name for path in data_files(converter) if path.name.startswith("part-00001-"))
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith("Column 'x' becomes ragged: its rows differ in shape")
    assert f"row 7 of partition 1 ({file})" in said
    assert "Declare shapes={'x': …} to refuse such rows." in said


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("empty", ["array()", "array(array(), array())", "array(array())"])
def test_arrays_that_are_all_empty_are_not_said_to_differ(
    spark: SparkSession, cache_dir: Path, caplog: pytest.LogCaptureFixture, way: str, empty: str
) -> None:
    kind = "array<array<int>>" if "(array" in empty else "array<int>"
    df = spark.range(0, 6, 1, 2).selectExpr("id", f"IF(id = 1, NULL, CAST({empty} AS {kind})) AS x")
    with convert(df, way, cache_dir) as converter:
        assert converter.schema["x"].shape is None
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == "Column 'x' becomes ragged: all its arrays are empty. Check where it is filled."


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", ["id * 10", "IF(id = 3, NULL, id * 10)"])
def test_a_column_called_like_a_mask_does_not_spoil_the_statistics(
    spark: SparkSession, cache_dir: Path, way: str, value: str
) -> None:
    df = spark.range(0, 10, 1, 2).selectExpr("0L AS a__valid", f"{value} AS a", "-id AS a__length", "array(id) AS b")
    with convert(df, way, cache_dir) as converter:
        statistics = converter.statistics
    numbers = np.array([row * 10 for row in range(10) if row != 3 or "NULL" not in value])
    assert list(statistics) == ["a__valid", "a", "a__length", "b"]
    assert (statistics["a"].null_count, statistics["a"].min, statistics["a"].max) == (10 - len(numbers), 0, 90)
    np.testing.assert_allclose([statistics["a"].mean, statistics["a"].std], [numbers.mean(), numbers.std()], rtol=1e-12)
    assert (statistics["a__length"].min, statistics["a__valid"].max, statistics["b"].longest) == (-9, 0, 1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_sorted", [True, False])
def test_shuffling_sorted_rows_suggests_to_mix_them(
    spark: SparkSession, cache_dir: Path, caplog: pytest.LogCaptureFixture, way: str, is_sorted: bool
) -> None:
    label = "id div 4000" if is_sorted else "id % 10"
    df = spark.range(0, 40_000, 1, 10).selectExpr(f"cast({label} AS int) AS label", "array(id, id) AS pair")
    with (
        convert(df, way, cache_dir, row_group_bytes=4096) as converter,
        caplog.at_level("INFO", logger="converter"),
        converter.make_batch_reader(shuffle=True, shuffle_window_rows=1000) as reader,
    ):
        assert len(reader) == 1250
    said = [record.getMessage() for record in caplog.records if "shuffle_rows_seed" in record.getMessage()]
    assert len(said) == int(is_sorted)
    assert all("sorted or clustered by 'label'" in text for text in said)


@pytest.mark.parametrize("way", WAYS)
def test_a_failing_job_is_our_error_and_leaves_nothing(spark: SparkSession, cache_dir: Path, way: str) -> None:
    bad = spark.range(0, 20, 1, 2).select(F.when(F.col("id") == 17, F.raise_error(F.lit("on purpose"))).alias("x"))
    before = settings(spark)
    with pytest.raises(CacheError, match=r"Spark could not write the cache into .*on purpose"):
        convert(bad.select(F.col("x").cast("int")), way, cache_dir)
    assert settings(spark) == before
    assert files_below(cache_dir) == [MARKER]


@pytest.mark.parametrize("way", WAYS)
def test_no_rows_are_refused(spark: SparkSession, cache_dir: Path, way: str) -> None:
    df = spark.range(0, 20, 1, 2).where("id < 0").select("id", F.array("id").alias("pair"))
    with pytest.raises(SourceError, match="The DataFrame has no rows"):
        convert(df, way, cache_dir)
    assert files_below(cache_dir) == [MARKER]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_but_data_is_left_beside_the_manifest(written: Written, way: str) -> None:
    names = [path.name for path in data_files(written(way, True))]
    assert names
    assert all(name.startswith("part-") and name.endswith(".parquet") for name in names), names
    assert len(names) == 3


@pytest.mark.parametrize("way", WAYS)
def test_confs_of_the_session_change_neither_names_nor_files(spark: SparkSession, cache_dir: Path, way: str) -> None:
    # Spark would take quoted names for patterns and variables, write `_metadata`, and name files as nobody expects.
    confs = {
        "spark.sql.parser.quotedRegexColumnNames": "true",
        "spark.sql.variable.substitute": "true",
        "parquet.summary.metadata.level": "ALL",
        "mapreduce.output.basename": "rows",
        "spark.sql.parquet.writeLegacyFormat": "true",
    }
    rows = spark.range(3).select(F.col("id").alias("a+"), (F.col("id") * 2).alias("aa"), F.struct("id").alias("b.c"))
    rows = rows.withColumn("lists", F.array(F.array("a+", "aa"))).withColumn("aa${aa}", F.lit(7))
    with changed_confs(spark, confs):
        assert spark.conf.get("parquet.summary.metadata.level") == "ALL"
        read = convert_and_read(rows, way, cache_dir)
    assert [read["a+"].tolist(), read["aa"].tolist(), read["b.c.id"].tolist()] == [[0, 1, 2], [0, 2, 4], [0, 1, 2]]
    assert read["lists"].tolist() == [[[0, 0]], [[1, 2]], [[2, 4]]]
    assert read["aa${aa}"].tolist() == [7, 7, 7]


@pytest.mark.parametrize("way", WAYS)
def test_nulls_and_booleans_count_as_they_are_in_memory(spark: SparkSession, cache_dir: Path, way: str) -> None:
    nothing = F.when(F.col("id") < 0, 1.0).alias("x")
    df = spark.range(0, 100_000, 1, 1).select("id", nothing, (F.col("id") < 0).alias("y"), F.lit("a").alias("text"))
    with convert(df, way, cache_dir) as converter:
        # An executor's table has bits.
        assert int(converter._manifest.row_group_bytes.sum()) > 100_000 * (8 + 4 + 4)
        assert converter.plan(shuffle=True, nulls="mask").window_rows > 10_000


def test_other_threads_queries_keep_their_variables(spark: SparkSession, cache_dir: Path) -> None:
    def last(value):  # type: ignore[no-untyped-def]  # (Spark looks at the types)
        while not (cache_dir / "go").exists():
            time.sleep(0.05)
        return value

    with changed_confs(spark, {"my.day": "5"}), ThreadPoolExecutor() as pool:
        writing = pool.submit(
            convert, spark.range(1).select(F.udf(last, "long")("id").alias("id")), "executors", cache_dir
        )
        try:
            while not spark.sparkContext.statusTracker().getActiveStageIds():
                time.sleep(0.05)
            assert spark.sql("SELECT '${my.day}' AS day").first() == ("5",)
        finally:
            (cache_dir / "go").touch()
        writing.result().delete()


@pytest.mark.parametrize("way", WAYS)
def test_the_fingerprint_is_of_the_rows(spark: SparkSession, cache_dir: Path, way: str) -> None:
    rows = [(1, None, "a"), (None, 2, "b"), (3, 4, "c")] * 5

    def frame(*, swap: bool = False, value: int = 3, order: str = "place") -> DataFrame:
        first, second = ("y", "x") if swap else ("x", "y")
        df = spark.createDataFrame(
            [(place, *row) for place, row in enumerate(rows)], f"place int, {first} int, {second} int, text string"
        )
        x = F.when(F.col("place") == 8, F.lit(value)).otherwise(F.col("x")).alias("x")
        pair = F.array(F.col("place"), F.lit(1)).alias("pair")
        return df.coalesce(1).orderBy(order).select(x, "y", "text", pair)

    def fingerprint(df: DataFrame) -> str:
        with convert(df, way, cache_dir) as converter:
            return converter.fingerprint

    first = fingerprint(frame())
    assert fingerprint(frame()) == first
    others = {
        "a value": frame(value=4),
        "the order": frame(order=F.desc("place")),
        "a name": frame().withColumnRenamed("text", "words"),
        # Nulls that two columns trade, in rows where each has one.
        "nulls": frame().withColumns({
            "x": F.when(F.col("text") == "a", F.col("y")).when(F.col("text") == "b", F.col("y")).otherwise(F.col("x")),
            "y": F.when(F.col("text") == "a", F.col("x")).when(F.col("text") == "b", F.col("x")).otherwise(F.col("y")),
        }),
    }  # fmt: skip
    found = {what: fingerprint(df) for what, df in others.items()}
    assert len({first, *found.values()}) == 1 + len(others), (first, found)


@pytest.mark.parametrize("way", WAYS)
def test_the_fingerprint_knows_where_one_row_of_numbers_ends(spark: SparkSession, cache_dir: Path, way: str) -> None:
    def fingerprint(first: str, second: str) -> str:
        df = spark.range(0, 4, 1, 1).selectExpr(
            f"IF(id = 1, {first}, array(7)) AS a", f"IF(id = 1, {second}, array(8, 9, 10)) AS b"
        )
        with convert(df, way, cache_dir) as converter:
            assert converter.schema["a"].shape is None
            return converter.fingerprint

    assert fingerprint("array(1, 2)", "array(3)") != fingerprint("array(1, 2, 3)", "array()")
    assert fingerprint("array(1, 2, 3)", "array(4)") != fingerprint("array(1, 2)", "array(3, 4)")


@pytest.mark.parametrize("way", WAYS)
def test_a_seed_mixes_the_rows_and_loses_none(spark: SparkSession, cache_dir: Path, way: str) -> None:
    df = spark.range(0, 4000, 1, 4).select("id", F.array("id", -F.col("id")).alias("pair"))

    def order(seed: int) -> Any:
        found = convert_and_read(df, way, cache_dir, shuffle_rows_seed=seed)
        np.testing.assert_array_equal(found["pair"], np.stack([found["id"], -found["id"]], 1))
        return found["id"]

    one = order(7)
    assert sorted(one.tolist()) == list(range(4000))
    np.testing.assert_array_equal(order(7), one)
    other = order(8)
    assert sorted(other.tolist()) == list(range(4000))
    for ids in (one, other):
        # Of 4,000 rows in a random order, five standard deviations are 0.08.
        assert abs(np.corrcoef(ids, np.arange(4000))[0, 1]) < 0.08
        assert abs(np.corrcoef(ids[1:], ids[:-1])[0, 1]) < 0.08
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.08


@pytest.mark.parametrize("way", WAYS)
def test_a_seed_gives_each_row_its_place_whenever_it_arrives(spark: SparkSession, cache_dir: Path, way: str) -> None:
    # After a lost executor Spark computes partitions again, and their rows arrive in another order. Other numbers for
    # them would send some to files that are written already, and others nowhere.
    def order(name: str, ids: str) -> Any:
        df = spark.range(0, 2000, 1, 4).selectExpr(f"{ids} as id", f"cast(({ids}) % 7 as double) as x")
        # The same rows in each partition.
        return convert_and_read(df.repartition(3, "id"), way, cache_dir / name, shuffle_rows_seed=7)["id"]

    upwards = order("upwards", "id")
    assert sorted(upwards.tolist()) == list(range(2000))
    np.testing.assert_array_equal(order("downwards", "1999 - id"), upwards)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # Each two rows have one number of `half`, and what hashes of Spark do not tell apart.
        (("half", "null"), ("null", "half")),
        (("array(half, half)", "array(half)"), ("array(half)", "array(half, half)")),
        (("array(array(1, 2), array(3, 4))", "half"), ("array(array(1, 2, 3, 4))", "half")),
        (("array('a', null)", "half"), ("array(null, 'a')", "half")),
    ],
    ids=["nulls", "lists", "lists of lists", "null elements"],
)
def test_rows_that_only_look_the_same_keep_their_places_too(
    spark: SparkSession, cache_dir: Path, first: tuple[str, str], second: tuple[str, str]
) -> None:
    def order(name: str, ids: str) -> list[Any]:
        rows = spark.range(0, 400, 1, 1).selectExpr(f"{ids} AS id").selectExpr("id % 2 = 0 AS even", "id div 2 AS half")
        df = rows.selectExpr(
            *(f"IF(even, {one}, {other}) AS {c}" for c, one, other in zip("ab", first, second, strict=True))
        )
        with convert(df, "executors", cache_dir / name, shuffle_rows_seed=7) as converter:
            return [str(row) for row in converter.to_spark(spark).collect()]

    upwards = order("upwards", "id")
    assert len(set(upwards)) == 400
    assert order("downwards", "399 - id") == upwards


@pytest.mark.parametrize("seed", [None, 3])
def test_row_groups_are_near_equal_where_partitions_are_not(
    spark: SparkSession, cache_dir: Path, seed: int | None
) -> None:
    # Nine tenths of the rows are in one of eight partitions, and one is empty.
    df = spark.range(0, 80_000, 1, 8).where("id < 10000 or id % 70 = 0").where("id < 40000 or id >= 50000")
    rows = df.select("id", F.array("id", "id", "id").alias("three"))
    asked = 16_000
    with convert(rows, "executors", cache_dir, row_group_bytes=asked, shuffle_rows_seed=seed) as converter:
        sizes = []
        for path in data_files(converter):
            footer = pq.ParquetFile(path).metadata
            groups = [footer.row_group(index).num_rows * 32 for index in range(footer.num_row_groups)]
            # A partition that is smaller than half a row group is one.
            if len(groups) > 1 or groups[0] > asked / 2:
                sizes += groups
        found = read(converter, batch_size=5000)
    assert len(found["id"]) == df.count()
    assert sum(sizes) > 0.8 * 32 * len(found["id"])
    assert min(sizes) >= asked / 2
    assert max(sizes) <= 1.5 * asked


@pytest.mark.parametrize("way", WAYS[1:])
def test_sparks_writer_makes_row_groups_of_the_asked_size(spark: SparkSession, cache_dir: Path, way: str) -> None:
    df = spark.range(0, 60_000, 1, 1).select("id", F.hash("id").alias("x"))
    with convert(df, way, cache_dir, row_group_bytes=64_000) as converter:
        sizes = [
            footer.row_group(index).num_rows * 12
            for footer in (pq.ParquetFile(path).metadata for path in data_files(converter))
            for index in range(footer.num_row_groups)
        ]
        np.testing.assert_array_equal(read(converter, batch_size=5000)["id"], np.arange(60_000))
    assert sum(sizes) == 720_000
    # Spark looks at its memory only now and then.
    assert max(sizes[1:]) <= 2 * 64_000


# Which way `auto` goes --------------------------------------------------------


def read_numbers(folder: str, spark: SparkSession) -> dict[str, Any]:
    """Convert the same rows with `auto` twice; what was written, said and read."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("converter").addHandler(handler)
    logging.getLogger("converter").setLevel(logging.INFO)
    vector = array_to_vector(F.array(F.col("id") / 2, F.lit(1.0))).alias("made")
    df = known_rows(spark, 100, nulls=True).drop("vector").select("*", vector)
    before = settings(spark)
    for _ in range(2):
        with make_spark_converter(df, cache_dir=f"{folder}/cache") as converter:
            found = read(converter, nulls="mask")
            names = [path.name for path in data_files(converter)]
    assert settings(spark) == before
    made = found.pop("made")
    np.testing.assert_array_equal(made, np.stack([np.arange(100) / 2, np.ones(100)], 1).astype("f4"), strict=True)
    masks = {name: found.pop(f"{name}__valid") for name in list(found) if f"{name}__valid" in found}
    expected, valid = known_values(np.arange(100), nulls=True), known_valid(np.arange(100))
    assert_same(found, {name: expected[name] for name in expected if name != "vector"})
    assert_same(masks, {name: valid[name] for name in valid if name != "vector"})
    probed = [list(answer) for answer in choose.probed.values()]
    codes = []
    for is_asked_anew in (False, True):
        if is_asked_anew:
            choose.pythons.clear()
        codes.append([*write_categories(folder, spark), *choose.pythons.values()])
    return {"said": said, "names": names, "probed": probed, "codes": codes, "left": files_below(f"{folder}/cache")}


def write_categories(folder: str, spark: SparkSession) -> list[Any]:
    """How Spark's own writer stored the values of categories, and whether the right ones arrive."""
    df = spark.range(0, 30, 1, 3).selectExpr("id", "string(2 - id div 10) AS text")
    with make_spark_converter(df, cache_dir=f"{folder}/cache", writer="spark", categories=["text"]) as converter:
        (stored,) = {str(pq.read_schema(path).field("text").type) for path in data_files(converter)}
        categories = converter.schema["text"].categories
        assert categories is not None
        texts = [categories[code] for code in converter.head(30)["text"]]
    return [stored, texts == [str(2 - row // 10) for row in range(30)]]


def auto_on_a_cluster(folder: str) -> dict[str, Any]:
    conf = {"spark.sql.session.timeZone": "America/New_York"}
    spark = start_local_spark("cluster", master="local-cluster[1,1,1024]", conf=conf)
    result = read_numbers(folder, spark)
    spark.stop()
    return result


def auto_without_pyarrow(folder: str, python: str) -> dict[str, Any]:
    os.environ |= {
        "JAVA_HOME": str(find_java_home()),
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    builder: Any = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.sql.session.timeZone", "America/New_York").getOrCreate()
    result = read_numbers(folder, spark)
    spark.stop()
    return result


def test_auto_asks_an_executor_once_and_takes_the_executors(tmp_path: Path) -> None:
    result = run_python(auto_on_a_cluster, str(tmp_path), environment={"SPARK_WORKER_DIR": str(tmp_path / "worker")})
    assert result["probed"] == [["executors", ""]]
    assert result["codes"] == [["int32", True, ""]] * 2
    assert not [text for text in result["said"] if "Spark's own Parquet writer" in text]
    # What the executors write is named by partition, attempt and number.
    assert all(name.count("-") == 3 and name.endswith("-0000.parquet") for name in result["names"]), result["names"]
    assert result["left"] == [MARKER]


def test_auto_takes_sparks_writer_where_executors_have_no_pyarrow(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    result = run_python(auto_without_pyarrow, str(tmp_path), str(tmp_path / "bare" / "bin" / "python"))
    (answer,) = result["probed"]
    assert answer[0] == "lists"
    assert answer[1].startswith("the executors cannot run what writes there (")
    assert len(answer[1]) < 600
    assert [text for text in result["said"] if text == f"Using Spark's own Parquet writer: {answer[1]}"]
    for stored, is_right, reason in result["codes"]:
        assert (stored, is_right) == ("string", True)
        assert reason.startswith("the executors cannot run Python (")
    assert all("-c000" in name for name in result["names"]), result["names"]
    assert result["left"] == [MARKER]


def test_what_tasks_report_arrives_while_others_still_run(spark: SparkSession, tmp_path: Path) -> None:
    has_arrived = str(tmp_path / "arrived")
    # The last 8 kB wait in a buffer of Spark's for those of the next task.
    text = "x" * 200_000

    def report(batches: Any) -> Any:
        import os
        import time

        from pyspark import TaskContext

        partition, deadline = TaskContext.get().partitionId(), time.monotonic() + 60
        while partition == 2 and not os.path.exists(has_arrived):
            assert time.monotonic() < deadline, "the report of the other task has not arrived"
            time.sleep(0.02)
        for batch in batches:
            yield pa.record_batch({"partition": [partition] * batch.num_rows, "report": [text] * batch.num_rows})

    job = spark.range(0, 3, 1, 3).mapInArrow(report, tasks.REPORT_SCHEMA)
    arrived = []
    for partition, found in stream_reports(job):
        Path(has_arrived).touch()
        arrived.append((partition, len(found)))
    assert sorted(arrived) == [(0, 200_000), (1, 200_000), (2, 200_000)]


def test_what_ends_a_job_is_raised_where_its_reports_arrive(spark: SparkSession) -> None:
    def fail(batches: Any) -> Any:
        for batch in batches:
            yield pa.record_batch({"partition": [0], "report": [f"{batch.num_rows / 0}"]})

    with pytest.raises(PySparkException, match="division by zero"):
        list(stream_reports(spark.range(4).mapInArrow(fail, tasks.REPORT_SCHEMA)))
