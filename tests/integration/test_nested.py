"""Lists of text, structs in arrays, maps, days in arrays, intervals: whoever writes, the same values arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession

from converter import (
    DatasetConverter,
    NullValueError,
    SourceError,
    make_delta_converter,
    make_parquet_converter,
    make_spark_converter,
    open_converter,
)
from converter.sources.spark import run

WAYS = ("executors", "spark", "lists")

COLUMNS = {
    "tags": "IF(id = 1, NULL, array('a', IF(id = 2, NULL, 'ž'), string(id)))",
    "raw": "array(X'00ff', X'')",
    "words": "IF(id = 3, NULL, array(array('x'), array(), array(string(id), NULL)))",
    "items": "IF(id = 1, NULL, array(named_struct('price', 1.5D + id, 'sku', string(id), 'dec', CAST(id AS DECIMAL(9)),"
    " 'day', date'1969-12-31', 'at', timestamp'2026-01-01 00:00:00'), NULL))",
    "m": "map('a', id, 'b', NULL)",
    "deep": "map(1, array(named_struct('v', id, 'l', array(id, NULL))))",
    "days": "array(date'2026-01-01', date'1969-12-31')",
    "times": "slice(array(timestamp_ntz'2026-01-01 00:00:00', timestamp_ntz'1969-01-01 00:00:01'), 1, int(id % 2) + 1)",
    "months": "interval '1-2' year to month",
    "years": "interval '-3' year",
    "span": "interval '-1 02:03:04.000005' day to second",
    "hours": "IF(id = 0, NULL, interval '5' hour)",
    "spans": "array(interval '1' day, interval '2' day)",
    "s": "named_struct('in.ner', array(named_struct('a b', interval '1' second)))",
}

NUM_ROWS = 6


def rows(spark: SparkSession) -> DataFrame:
    return spark.range(0, NUM_ROWS, 1, 2).selectExpr("id", *(f"{code} AS {name}" for name, code in COLUMNS.items()))


def expected() -> dict[str, list[Any]]:
    """What arrives, as nested lists; NumPy's days and times as Python's."""
    ids = range(NUM_ROWS)
    day, times = np.datetime64("1969-12-31").item(), ["2026-01-01T00:00:00", "1969-01-01T00:00:01"]
    # The session's time zone is New York's.
    at = np.datetime64("2026-01-01T05:00:00", "us").item()
    hour = 3_600_000_000

    def unless(null: int, make: Callable[[int], Any]) -> list[Any]:
        return [[] if row == null else make(row) for row in ids]

    return {
        "id": list(ids),
        "tags": unless(1, lambda row: ["a", "" if row == 2 else "ž", str(row)]),
        "tags__valid": [row != 1 for row in ids],
        "tags__element_valid": unless(1, lambda row: [True, row != 2, True]),
        "raw": [[b"\x00\xff", b""]] * NUM_ROWS,
        "words": unless(3, lambda row: [["x"], [], [str(row), ""]]),
        "words__valid": [row != 3 for row in ids],
        "words__element_valid": unless(3, lambda _: [[True], [], [True, False]]),
        "items.price": unless(1, lambda row: [1.5 + row, 0.0]),
        "items.sku": unless(1, lambda row: [str(row), ""]),
        "items.dec": unless(1, lambda row: [float(row), 0.0]),
        "items.day": unless(1, lambda _: [day, np.datetime64(0, "D").item()]),
        "items.at": unless(1, lambda _: [at, np.datetime64(0, "us").item()]),
        "items.sku__valid": [row != 1 for row in ids],
        "items.price__element_valid": unless(1, lambda _: [True, False]),
        "m.key": [["a", "b"]] * NUM_ROWS,
        "m.value": [[row, 0] for row in ids],
        "m.value__element_valid": [[True, False]] * NUM_ROWS,
        "deep.key": [[1]] * NUM_ROWS,
        "deep.value.v": [[[row]] for row in ids],
        "deep.value.l": [[[[row, 0]]] for row in ids],
        "days": [[np.datetime64("2026-01-01").item(), day]] * NUM_ROWS,
        "times": [[np.datetime64(time, "us").item() for time in times[: row % 2 + 1]] for row in ids],
        "months": [14] * NUM_ROWS,
        "years": [-36] * NUM_ROWS,
        "span": [-(24 * hour + 2 * hour + 3 * 60_000_000 + 4_000_005)] * NUM_ROWS,
        "hours": [0, *[5 * hour] * (NUM_ROWS - 1)],
        "hours__valid": [row != 0 for row in ids],
        "spans": [[24 * hour, 48 * hour]] * NUM_ROWS,
        "s.in.ner.a b": [[1_000_000]] * NUM_ROWS,
    }


def convert(df: DataFrame, way: str, cache_dir: Path, **options: Any) -> DatasetConverter:
    """A converter that was written in this way; `lists` is what Spark's writer does where executors have no pyarrow."""
    with pytest.MonkeyPatch.context() as patched:
        if way == "lists":
            patched.setattr(run, "choose_writer", lambda *_, **__: "lists")
        return make_spark_converter(df, cache_dir=cache_dir, writer="spark" if way == "lists" else way, **options)


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [plain(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray) else value


def read(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"batch_size": 100, "ragged": "nested", "nulls": "mask"} | options
    with converter.make_batch_reader(**arguments) as reader:
        [batch] = list(reader)
    return {name: plain(column) for name, column in batch.items()}


def assert_expected(found: dict[str, Any]) -> None:
    for name, column in expected().items():
        assert found[name] == column, name


@pytest.mark.short
@pytest.mark.parametrize("way", WAYS)
def test_every_way_writes_the_same_values(spark: SparkSession, cache_dir: Path, way: str) -> None:
    with convert(rows(spark), way, cache_dir) as converter:
        assert_expected(read(converter))
        schema = converter.schema
        assert (schema["span"].unit, schema["months"].unit, schema["months"].dtype) == ("µs", "months", "int32")
        assert (schema["days"].shape, schema["spans"].shape, schema["m.key"].shape) == ((2,), (2,), None)
        assert schema["tags"].has_null_elements
        assert not schema["raw"].has_null_elements
        statistics = converter.statistics
        tags, price, days = statistics["tags"], statistics["items.price"], statistics["days"]
        assert (tags.null_count, tags.shortest, tags.longest) == (1, 3, 3)
        assert (statistics["words"].shortest, statistics["words"].longest) == (3, 3)
        assert (price.null_count, price.min, price.max, price.shortest) == (1, 1.5, 6.5, 2)
        assert days.min == np.datetime64("1969-12-31").item()
        with open_converter(converter.url) as again:
            assert_expected(read(again))
        # The files are plain Parquet for other readers, except for the arrays that are packed.
        plain_files = make_parquet_converter(sorted(Path(converter.url.removeprefix("file://")).glob("data-*/*")))
        found = read(plain_files, columns=["tags", "words", "m.key", "m.value"])
        assert found["tags"] == expected()["tags"]
        assert found["m.value__element_valid"] == expected()["m.value__element_valid"]


@pytest.mark.parametrize("way", WAYS)
def test_torch_and_tensorflow_have_them_too(spark: SparkSession, cache_dir: Path, way: str) -> None:
    names = ["tags", "words", "items.price", "items.sku", "m.key", "m.value"]
    with convert(rows(spark), way, cache_dir) as converter:
        options: dict[str, Any] = {"batch_size": 100, "ragged": "nested", "nulls": "mask", "columns": names}
        with converter.make_torch_dataloader(**options) as loader:
            [batch] = list(loader)
        assert batch["tags"] == expected()["tags"]
        assert batch["words__element_valid"] == expected()["words__element_valid"]
        assert [row.tolist() for row in batch["m.value"].unbind()] == expected()["m.value"]
        with converter.make_tf_dataset(**options) as dataset:
            [element] = list(dataset)
        assert element["words"].to_list() == [
            [[text.encode() for text in part] for part in row] for row in expected()["words"]
        ]
        assert element["items.price"].to_list() == expected()["items.price"]


@pytest.mark.parametrize("way", WAYS)
def test_inner_arrays_that_are_null_are_refused_and_the_remedy_works(
    spark: SparkSession, cache_dir: Path, way: str
) -> None:
    from pyspark.sql import functions as F

    df = spark.range(0, 4, 1, 2).selectExpr("array(array('a'), IF(id = 3, NULL, array('b'))) AS x")
    with pytest.raises(NullValueError, match="'x' has arrays whose inner arrays are null") as raised:
        convert(df, way, cache_dir)
    code = str(raised.value).split("e.g. ")[1].removesuffix(".")
    with convert(df.withColumn("x", eval(code, {"F": F})), way, cache_dir) as converter:
        assert read(converter)["x"] == [[["a"], ["b"]]] * 3 + [[["a"]]]


@pytest.mark.parametrize("way", WAYS)
def test_other_null_elements_are_another_fingerprint(spark: SparkSession, cache_dir: Path, way: str) -> None:
    fingerprints = set()
    for code in ("array(NULL, 'a')", "array('a', NULL)", "array('a', '')", "array('a')", "array('', 'a')"):
        with convert(spark.sql(f"SELECT {code} AS x"), way, cache_dir) as converter:
            fingerprints.add(converter.fingerprint)
    assert len(fingerprints) == 5


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_are_all_null_or_empty_are_written(spark: SparkSession, cache_dir: Path, way: str) -> None:
    df = spark.sql("SELECT CAST(NULL AS ARRAY<STRING>) AS n, CAST(array() AS ARRAY<STRING>) AS e, "
                   "CAST(NULL AS MAP<STRING, INT>) AS m FROM range(3)")  # fmt: skip
    with convert(df, way, cache_dir) as converter:
        found = read(converter)
        assert (found["n"], found["n__valid"], found["e"]) == ([[]] * 3, [False] * 3, [[]] * 3)
        assert (found["m.key"], found["m.value__valid"]) == ([[]] * 3, [False] * 3)
        assert (converter.statistics["n"].longest, converter.statistics["e"].longest) == (None, 0)


@pytest.mark.parametrize("way", WAYS)
def test_members_may_be_declared_to_have_a_shape(spark: SparkSession, cache_dir: Path, way: str) -> None:
    df = spark.range(0, 3, 1, 1).selectExpr("array(named_struct('v', id), named_struct('v', -id)) AS x")
    with convert(df, way, cache_dir, shapes={"x.v": (2,)}) as converter:
        assert converter.schema["x.v"].shape == (2,)
        assert read(converter)["x.v"] == [[0, 0], [1, -1], [2, -2]]
    with pytest.raises(SourceError, match=r"'x\.v' has a row of .*2.*, but shapes= declares .*3"):
        convert(df, way, cache_dir, shapes={"x.v": (3,)})


def test_text_has_no_declared_shape(spark: SparkSession, cache_dir: Path) -> None:
    with pytest.raises(ValueError, match="shapes: the arrays of 'x' are str, and arrays of text have no one shape"):
        make_spark_converter(spark.sql("SELECT array('a') AS x"), cache_dir=cache_dir, shapes={"x": (1,)})


def test_the_longest_intervals_are_exact(spark: SparkSession, cache_dir: Path) -> None:
    df = spark.sql(
        "SELECT interval '-106751991 04:00:54.775808' day to second AS least, "
        "interval '106751991 04:00:54.775807' day to second AS most, "
        "interval '-178956970-8' year to month AS fewest, interval '178956970-7' year to month AS longest"
    )
    with make_spark_converter(df, cache_dir=cache_dir) as converter:
        found = read(converter)
    assert (found["least"], found["most"]) == ([-(2**63)], [2**63 - 1])
    assert (found["fewest"], found["longest"]) == ([-(2**31)], [2**31 - 1])


@pytest.fixture
def time_type(spark: SparkSession) -> Iterator[None]:
    """Times of day are a preview that a user of them has switched on."""
    spark.conf.set("spark.sql.timeType.enabled", "true")
    yield
    spark.conf.unset("spark.sql.timeType.enabled")


@pytest.mark.usefixtures("time_type")
@pytest.mark.parametrize("way", WAYS)
def test_times_of_day_are_microseconds(spark: SparkSession, cache_dir: Path, way: str) -> None:
    if tuple(map(int, spark.version.split(".")[:2])) < (4, 1):
        pytest.skip("this Spark has no type for times of day")
    df = spark.sql("SELECT time'01:02:03.000004' AS x, array(named_struct('t', time'00:00:01'), NULL) AS s")
    with convert(df, way, cache_dir) as converter:
        found = read(converter)
        assert (found["x"], found["s.t"]) == ([3_723_000_004], [[1_000_000, 0]])
        assert converter.schema["x"].unit == "µs"


@pytest.mark.usefixtures("time_type")
def test_the_files_of_spark_itself_are_read_without_a_copy(spark: SparkSession, tmp_path: Path) -> None:
    """`df.write.parquet`: Spark notes intervals beside integers, and names the parts of lists and maps its own way."""
    df = rows(spark).coalesce(1)
    if tuple(map(int, spark.version.split(".")[:2])) >= (4, 1):
        df = df.selectExpr("*", "time'01:02:03.000004' AS clock")
    df.write.parquet(str(tmp_path / "t"))
    converter = make_parquet_converter(tmp_path / "t")
    found = read(converter)
    assert_expected(found | {"spans": plain(np.array(found["spans"])), "s.in.ner.a b": found["s.in.ner.a b"]})
    assert converter.schema["months"].unit == "months"
    assert found.get("clock", [3_723_000_004] * NUM_ROWS) == [3_723_000_004] * NUM_ROWS


def test_a_delta_table_that_spark_types_describe(spark: SparkSession, tmp_path: Path) -> None:
    from deltalake import write_deltalake

    names = [name for name in COLUMNS if name not in ("months", "years", "span", "hours", "spans", "s")]
    table = rows(spark).select("id", *names).toArrow()
    write_deltalake(str(tmp_path / "t"), table)
    found = read(make_delta_converter(tmp_path / "t"))
    for name, column in expected().items():
        if name in found:
            # The files may be in another order.
            assert found[name] == [column[row] for row in found["id"]], name


@pytest.mark.short
@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_members_are_theirs_though_a_view_is_called_like_their_column(
    spark: SparkSession, tmp_path: Path, writer: str
) -> None:
    rows = spark.range(0, 4, 1, 1).selectExpr(
        "id",
        "named_struct('id', id + 1000, 'age', id + 2000) AS customer",
        "array(named_struct('id', id + 3000)) AS items",
    )
    rows.createOrReplaceTempView("customer")
    try:
        for name, df in {
            "view": spark.table("customer"), "customer": rows.alias("customer"), "items": rows.alias("items")
        }.items():  # fmt: skip
            with make_spark_converter(df, cache_dir=tmp_path / name, writer=writer) as converter:
                found = converter.head(4)
            starts = {"id": 0, "customer.id": 1000, "customer.age": 2000, "items.id": 3000}
            for column, start in starts.items():
                assert found[column].ravel().tolist() == list(range(start, start + 4)), (name, column)
    finally:
        spark.catalog.dropTempView("customer")
