#!/usr/bin/env python3
"""What must hold on every Spark, as cases that each compare real values; `matrix.py` runs them in its environments.

    python tests/compat/cases.py --session classic        # or connect: a local server, in a process of its own

Prints one JSON line for each case: `{case, ok, seconds, detail}`. The package is the installed one, not the checkout's,
and every case must leave its cache empty.
"""

from __future__ import annotations

import argparse
import datetime as dt
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from pyspark.ml.linalg import SparseVector, Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from converter import DatasetConverter, make_spark_converter
from converter.decoders import NumPy
from converter.sources.spark.local import find_java_home, start_local_spark

REPOSITORY = Path(__file__).resolve().parents[2]
# Put last: the installed package is what is tried, and only the known rows come from the checkout.
sys.path.append(str(REPOSITORY))
from tests.folders import files_below  # noqa: E402
from tests.processes import error_of  # noqa: E402
from tests.rows import assert_same, concatenate, known_rows, known_valid, known_values  # noqa: E402

if pyspark.__version__ < "4":
    # Spark 3.5 takes a number alone, and the known rows repeat as often as a column says; drop with 3.5 support.
    F.repeat = lambda value, count: F.call_function("repeat", value, count)

LONG_AGO = 1_600_000_000 * 10**9
WRITERS = ("executors", "spark")
INF, NAN = float("inf"), float("nan")


def read(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    """All rows, from batches that no partition or row group is a multiple of."""
    with converter.make_batch_reader(**{"batch_size": 61, "ragged": "nested"} | options) as reader:
        return concatenate(list(reader))


def as_lists(row: Any) -> Any:
    """Nested arrays as nested lists."""
    return [as_lists(one) for one in row] if isinstance(row, (list, np.ndarray)) else int(row)


def must_fail(kind: str, match: str, df: DataFrame, cache_dir: Path, **options: Any) -> None:
    """The conversion must raise this very error with this text."""
    found, text = error_of(lambda: make_spark_converter(df, cache_dir=cache_dir, **options))
    assert found == kind, f"wanted {kind}, got {found or 'rows'}: {text}"
    assert re.search(match, text, re.DOTALL), f"wanted {match!r}, got {text!r}"


def settings(spark: SparkSession) -> list[tuple[str, str]]:
    return sorted((row[0], row[1]) for row in spark.sql("SET").collect())


def check_table(spark: SparkSession, cache_dir: Path, columns: dict[str, tuple[list[str], Any]]) -> None:
    """Columns of `{type: (SQL of each row, values)}`, where `#2` tells two of a type apart; a row of nulls below."""
    sql = []
    for name, (rows, _) in columns.items():
        arms = (f"WHEN {row} THEN CAST({value} AS {name.partition('#')[0]})" for row, value in enumerate(rows))
        sql.append(f"CASE id {' '.join(arms)} END AS `{name}`")
    num_rows = len(rows)
    df = spark.range(0, num_rows + 1, 1, 1).selectExpr(*sql)
    with make_spark_converter(df, cache_dir=cache_dir, float_dtype=None) as converter:
        found = read(converter, nulls="mask")
    assert list(found) == [key for name in columns for key in (name, f"{name}__valid")]
    for name, (_, values) in columns.items():
        column = found[name][:-1]
        np.testing.assert_array_equal(column, values, err_msg=name, strict=True)
        if values.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(column), np.signbit(values), err_msg=name)
        assert found[f"{name}__valid"].tolist() == [True] * num_rows + [False], name


def scalars(spark: SparkSession, cache_dir: Path) -> str:
    """First and last value, one between that is easily lost, and null, of every scalar type."""
    whole = {"tinyint": "i1", "smallint": "i2", "int": "i4", "bigint": "i8"}
    numbers = {
        name: np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, -1], dtype) for name, dtype in whole.items()
    } | {
        "float": np.array([-3.4028234663852886e38, 1.401298464324817e-45, NAN], "f4"),
        "float#2": np.array([-0.0, INF, -INF], "f4"),
        "double": np.array([-1.7976931348623157e308, 5e-324, NAN]),
        "double#2": np.array([-0.0, INF, -INF]),
        "decimal(18,2)": np.array([-9999999999999999.99, 0.01, -0.5]),
    }
    digits = ["'-9999999999999999.99'", "'0.01'", "'-0.5'"]
    columns = {name: ([f"'{value!r}'" for value in values.tolist()], values) for name, values in numbers.items()}
    columns["decimal(18,2)"] = (digits, numbers["decimal(18,2)"])
    columns["decimal(38,0)"] = ([f"'-{'9' * 38}'", f"'{'9' * 38}'", "0"], np.array([-1e38, 1e38, 0]))
    columns["boolean"] = (["false", "true", "false"], np.array([False, True, False]))
    days, times = (
        ["0001-01-01", "9999-12-31", "1582-10-15"],
        ["0001-01-01", "9999-12-31 23:59:59.999999", "2026-03-08 02:30"],
    )
    columns["date"] = ([f"'{day}'" for day in days], np.array(days, "M8[D]"))
    # The last time does not exist on New York's clocks.
    instants = np.array([time.replace(" ", "T") for time in times], "M8[us]")
    columns["timestamp"] = ([f"'{instant}Z'" for instant in instants], instants)
    columns["timestamp_ntz"] = ([f"'{instant}'" for instant in instants], instants)
    columns["string"] = (["''", "'žluťoučký 🐟'", r"'a\tb\0c'"], np.array(["", "žluťoučký 🐟", "a\tb\0c"], object))
    columns["binary"] = (["X''", "X'00FF'", "X'00'"], np.array([b"", b"\x00\xff", b"\x00"], object))
    check_table(spark, cache_dir, columns)
    return f"{len(columns)} columns"


def arrays(spark: SparkSession, cache_dir: Path) -> str:
    """Arrays of one length and of several, nested ones, and vectors dense and sparse."""
    cubes = ["array(array(array(1, 2), array(3, 4)))", "array(array(array(5, 6), array(7, 8)))"]
    columns = {
        "array<boolean>": (["array(true, false)", "array(false, false)"], np.array([[1, 0], [0, 0]], bool)),
        "array<tinyint>": (["array(-128, 127)", "array(0, 1)"], np.array([[-128, 127], [0, 1]], "i1")),
        "array<bigint>": (["array('-9223372036854775808')", "array(1)"], np.array([[-(2**63)], [1]])),
        "array<float>": (["array('NaN', '-0.0')", "array('-Infinity', '1')"], np.array([[NAN, -0.0], [-INF, 1]], "f4")),
        "array<double>": (["array('NaN', 4.9E-324D)", "array(0.1D, 2)"], np.array([[NAN, 5e-324], [0.1, 2]])),
        "array<array<array<smallint>>>": (cubes, np.arange(1, 9, dtype="i2").reshape(2, 1, 2, 2)),
    }
    check_table(spark, cache_dir, columns)
    expected = [[], [1.0, 0.0, NAN], [2.5], []]
    cases = "WHEN 1 THEN array(1D, 0D, double('NaN')) WHEN 2 THEN array(2.5D) ELSE array()"
    df = spark.sql(f"SELECT CASE id {cases} END AS x FROM range(0, 4, 1, 2)")
    with make_spark_converter(df, cache_dir=cache_dir) as converter:
        assert converter.schema["x"].shape is None
        for row, values in zip(read(converter)["x"], expected, strict=True):
            np.testing.assert_array_equal(row, np.array(values, "f4"), strict=True)
        padded = read(converter, ragged="pad", batch_size=4)
    np.testing.assert_array_equal(padded["x"], np.array([[0, 0, 0], [1, 0, NAN], [2.5, 0, 0], [0, 0, 0]], "f4"))
    assert padded["x__length"].tolist() == [0, 3, 1, 0]
    vectors = [Vectors.dense([1.0, -INF, 0.1]), SparseVector(3, {1: 5e-324}), None, SparseVector(3, {})]
    df = spark.createDataFrame([(one,) for one in vectors], StructType([StructField("x", VectorUDT())])).coalesce(1)
    for writer in WRITERS:
        with make_spark_converter(df, cache_dir=cache_dir, float_dtype="float64", writer=writer) as converter:
            found = read(converter, nulls="mask")
        np.testing.assert_array_equal(found["x"], [[1, -INF, 0.1], [0, 5e-324, 0], [0, 0, 0], [0, 0, 0]])
        assert found["x__valid"].tolist() == [True, True, False, True]
    return f"{len(columns)} columns, ragged rows, vectors"


def nested(spark: SparkSession, cache_dir: Path) -> str:
    """Lists of text, members of structs in arrays, maps and intervals, with null elements."""
    df = spark.range(0, 6, 1, 2).selectExpr(
        "IF(id = 1, NULL, array('a', IF(id = 2, NULL, string(id)))) AS tags",
        "IF(id = 3, NULL, array(named_struct('n', id, 'd', CAST(id AS decimal(9,2))), NULL)) AS items",
        "map('k', array(id, NULL)) AS m",
        "array(date'1969-12-31') AS days",
        "interval '-1 02:03:04.000005' day to second AS span",
        "interval '-1-2' year to month AS months",
        "id + 100 AS n",
    )
    # So that Spark takes `items.n` for the column `n`.
    df = df.alias("items")
    rows = range(6)
    expected = {
        "tags": [[] if row == 1 else ["a", "" if row == 2 else str(row)] for row in rows],
        "tags__valid": [row != 1 for row in rows],
        "tags__element_valid": [[] if row == 1 else [True, row != 2] for row in rows],
        "items.n": [[] if row == 3 else [row, 0] for row in rows],
        "items.d": [[] if row == 3 else [float(row), 0.0] for row in rows],
        "m.key": [["k"]] * 6,
        "m.value": [[[row, 0]] for row in rows],
        "span": [-93_784_000_005] * 6,
        "months": [-14] * 6,
        "n": [row + 100 for row in rows],
    }
    for writer in WRITERS:
        with make_spark_converter(df, cache_dir=cache_dir, writer=writer) as converter:
            found = read(converter, nulls="mask")
        for name, values in expected.items():
            arrived = [row.tolist() if isinstance(row, np.ndarray) else row for row in found[name]]
            assert arrived == values, f"{writer}, {name}: {arrived}"
        assert (found["days"] == np.datetime64("1969-12-31")).all()
    return "lists, members, maps and intervals, both writers"


def decoded(spark: SparkSession, cache_dir: Path) -> str:
    """Executors decode bytes, and leave out what cannot be decoded; with either writer."""
    stream = io.BytesIO()
    np.save(stream, np.array([1.5, -2.0], "f4"))
    texts = ", ".join(f"X'{data.hex()}'" for data in (stream.getvalue(), b"no array"))
    df = spark.range(0, 40, 1, 2).selectExpr("id", f"IF(id % 5 = 4, NULL, array({texts})[INT(id = 7)]) AS x")
    options: dict[str, Any] = {"decode": {"x": NumPy("float32", (2,), on_error="skip")}}
    for writer in WRITERS:
        for decode_at in ("write", "read"):
            with make_spark_converter(
                df, cache_dir=cache_dir, writer=writer, decode_at=decode_at, **options
            ) as converter:
                found = read(converter, nulls="mask")
            assert found["id"].tolist() == [row for row in range(40) if row != 7]
            assert found["x__valid"].tolist() == [row % 5 != 4 for row in found["id"]]
            assert (found["x"][found["x__valid"]] == [1.5, -2.0]).all()
    return "arrays of NumPy, both writers, written and read"


def empty_lists(spark: SparkSession, cache_dir: Path) -> str:
    """Lists within lists that are all empty, or all null, in the rows of a task: old Sparks leave offsets out."""
    df = spark.range(0, 6, 1, 2).selectExpr(
        "id",
        "IF(id < 3, array(), array(array(id, 2), array(3, id))) AS deep",
        "IF(id < 3, NULL, array(array(array(id)))) AS deeper",
        "IF(id < 3, array(), array(named_struct('v', array(id)))) AS items",
    )
    for writer in WRITERS:
        with make_spark_converter(df, cache_dir=cache_dir, writer=writer) as converter:
            found = read(converter, nulls="mask")
        assert found["id"].tolist() == list(range(6))
        expected = {"deep": "[[{0}, 2], [3, {0}]]", "deeper": "[[[{0}]]]", "items.v": "[[{0}]]"}
        for name, text in expected.items():
            # Of three rows of one shape the others are null, and full of zeros.
            wanted = [
                text.format(row) if row >= 3 else text.format(0) if name == "deeper" else "[]" for row in range(6)
            ]
            assert [str(as_lists(row)) for row in found[name]] == wanted, f"{writer}, {name}: {found[name]}"
        assert found["deeper__valid"].tolist() == [row >= 3 for row in range(6)]
    return "3 columns, both writers"


def order(spark: SparkSession, cache_dir: Path) -> str:
    """Sorted rows are read sorted; shuffled ones arrive once each, and in the same order for the same seed."""
    key = F.col("id") * 1_000_003 % (2**31 - 1)
    df = spark.range(0, 20_000, 1, 5).select("id", key.alias("key"))
    df = df.repartitionByRange(7, "key").sortWithinPartitions("key")
    assert df.select(F.spark_partition_id()).distinct().count() == 7
    ids = np.arange(20_000)
    keys = ids * 1_000_003 % (2**31 - 1)
    expected = {"id": ids[np.argsort(keys)], "key": np.sort(keys)}
    with make_spark_converter(df, cache_dir=cache_dir, row_group_bytes=1 << 14) as converter:
        assert_same(read(converter), expected)
        options = {"shuffle": True, "shuffle_window_rows": 3000}
        one, again = read(converter, seed=1, **options), read(converter, seed=1, workers_count=1, **options)
        other = read(converter, seed=2, **options)
    assert_same(again, one)
    for shuffled in (one, other):
        assert (shuffled["key"] != expected["key"]).mean() > 0.99
        place = np.argsort(shuffled["key"])
        assert_same({name: values[place] for name, values in shuffled.items()}, expected)
    assert (one["key"] != other["key"]).mean() > 0.99
    return "20,000 rows in 7 partitions"


def writers(spark: SparkSession, cache_dir: Path) -> str:
    """Both give every known row, whole and with nulls, with one schema, also where partitions are empty."""
    for nulls in (False, True):
        schemas = []
        for writer in WRITERS:
            df = known_rows(spark, 600, nulls=nulls, partitions=6).where("id < 300")
            with make_spark_converter(df, cache_dir=cache_dir, writer=writer) as converter:
                schemas.append(converter.schema.to_json())
                found = read(converter, nulls="mask")
            masks = {name: found.pop(name) for name in list(found) if name.endswith("__valid")}
            assert_same(found, known_values(np.arange(300), nulls=nulls))
            valid = known_valid(np.arange(300)) if nulls else {}
            assert_same(masks, {f"{name}__valid": where for name, where in valid.items()})
        assert schemas[0] == schemas[1]
    return f"{len(schemas[0])} columns"


def categories(spark: SparkSession, cache_dir: Path) -> str:
    """Text becomes codes, with either writer, though each task meets other values."""
    text = "IF(id % 7 = 0, NULL, concat('value ', 9 - id div 50, ' ', id % 3))"
    df = spark.range(0, 300, 1, 6).where("id < 150 OR id > 200").selectExpr("id", f"{text} AS text")
    stored = []
    for writer in WRITERS:
        with make_spark_converter(df, cache_dir=cache_dir, writer=writer, categories=["text"]) as converter:
            values = converter.schema["text"].categories
            assert values is not None
            assert list(values) == sorted(values)
            found = read(converter, nulls="mask")
            path = next(Path(converter.url.removeprefix("file://")).glob("data-*/*.parquet"))
            stored.append(str(pq.read_schema(path).field("text").type))
        for row, code, valid in zip(found["id"], found["text"], found["text__valid"], strict=True):
            assert valid == (row % 7 != 0)
            assert not valid or values[code] == f"value {9 - row // 50} {row % 3}"
    assert stored == ["int32", "int32"]
    # Beside nested arrays, which keep Connect before 4.1 from packing.
    nested = df.selectExpr("id", "text", "date_add(date'1969-12-01', int(id % 40)) AS day", "array(array(id)) AS deep")
    with make_spark_converter(nested, cache_dir=cache_dir, writer="spark", categories=["text", "day"]) as converter:
        assert converter.schema["text"].categories == values
        days = converter.schema["day"].categories
        assert days is not None
        found = read(converter, nulls="mask")
    assert len(days) == 40
    for row, code in zip(found["id"].tolist(), found["day"], strict=True):
        assert days[code] == dt.date(1969, 12, 1) + dt.timedelta(row % 40)
    return f"{len(values)} values, both writers"


def options_together(spark: SparkSession, cache_dir: Path) -> str:
    """Given and found categories, of lists too, scales, declared bytes and a random order, in one write."""
    df = spark.range(0, 60, 1, 3).selectExpr(
        "id",
        "IF(id % 7 = 3, NULL, double(id) / 4) AS x",
        "string(id % 4) AS word",
        "IF(id % 5 = 0, NULL, array(string(id % 3), 'all')) AS tags",
        "unhex(lpad(hex(id), 4, '0')) AS raw",
    )
    options: dict[str, Any] = {
        "categories": {"word": ["2", "0", "1"], "tags": None}, "unseen": "null", "standardize": ["x"],
        "shapes": {"raw": (2,)}, "shuffle_rows_seed": 3,
    }  # fmt: skip
    ids = np.arange(60)
    numbers = ids[ids % 7 != 3] / 4
    for writer in WRITERS:
        with make_spark_converter(df, cache_dir=cache_dir, writer=writer, **options) as converter:
            found = read(converter, nulls="mask")
            tags = converter.schema["tags"].categories
        order = found["id"].tolist()
        assert sorted(order) == ids.tolist() != order, writer
        assert tags == ("0", "1", "2", "all"), writer
        for row, row_id in enumerate(order):
            cells = {name: column[row] for name, column in found.items()}
            assert cells["x__valid"] == (row_id % 7 != 3), (writer, row_id)
            expected = (row_id / 4 - numbers.mean()) / numbers.std() if cells["x__valid"] else 0
            np.testing.assert_allclose(cells["x"], expected, rtol=1e-5, atol=1e-6)
            assert cells["word__valid"] == (row_id % 4 != 3), (writer, row_id)
            assert not cells["word__valid"] or ("2", "0", "1")[cells["word"]] == str(row_id % 4), (writer, row_id)
            assert cells["tags__valid"] == (row_id % 5 != 0), (writer, row_id)
            named = [tags[code] for code in cells["tags"]] if cells["tags__valid"] else []
            assert named == ([str(row_id % 3), "all"] if row_id % 5 else []), (writer, row_id)
            assert cells["raw"].tolist() == [0, row_id], (writer, row_id)
    return "60 rows in random order, both writers"


def statistics(spark: SparkSession, cache_dir: Path) -> str:
    """What the writers count and add up is what NumPy finds in the rows."""
    names = [
        "id",
        "boolean",
        "byte",
        "long",
        "float",
        "double",
        "decimal",
        "date",
        "timestamp",
        "array<float>",
        "nested",
    ]
    ids = np.arange(500)
    values, valid = known_values(ids, nulls=True), {"id": ids >= 0} | known_valid(ids)
    values["holes"], valid["holes"] = np.where(ids % 7 == 3, np.nan, ids / 4).astype("f4"), ids >= 0
    holes = F.when(F.col("id") % 7 == 3, F.lit(NAN)).otherwise(F.col("id") / 4)
    df = known_rows(spark, 500, nulls=True).select(*names, holes.alias("holes"))
    for writer in WRITERS:
        with make_spark_converter(df, cache_dir=cache_dir, writer=writer) as converter:
            found = dict(converter.statistics)
        assert list(found) == [*names, "holes"]
        for name, known in found.items():
            present = values[name][valid[name]]
            assert known.null_count == (~valid[name]).sum(), name
            if present.dtype.kind == "M":
                # Dates and times have no mean, and their bounds are Python's.
                bounds = [present.min().item(), present.max().item()]
                found_bounds = [known.min, known.max]
                if name == "timestamp":
                    found_bounds = [bound.replace(tzinfo=None) for bound in found_bounds]
                assert found_bounds == bounds, name
                continue
            numbers = present.astype("f8")
            assert known.nan_count == np.isnan(numbers).sum(), name
            assert [known.min, known.max] == [np.nanmin(numbers), np.nanmax(numbers)], name
            np.testing.assert_allclose([known.mean, known.std], [np.nanmean(numbers), np.nanstd(numbers)], rtol=1e-9)
            if present.ndim > 1:
                np.testing.assert_allclose(known.element_mean, numbers.mean(0), rtol=1e-9)
                np.testing.assert_allclose(known.element_std, numbers.std(0), rtol=1e-9)
    return f"{len(found)} columns, both writers"


OWN_DECODER = """
from converter.sources.spark.own_decoders import hashes_of_own
class Own:
    dtype, shape = "float32", (1,)
    def decode(self, values): return values
print(hashes_of_own({"x": Own()}))
"""


def reuse(spark: SparkSession, cache_dir: Path) -> str:
    """The same file is one entry, a file of other values another one, and a name is a promise."""
    path = cache_dir.parent / "rows.parquet"

    def convert(first: int) -> DatasetConverter:
        # Size and time of the file stay the same: nothing but its rows tells them apart.
        if not path.exists() or pq.read_table(path)["x"][0].as_py() != first:
            pq.write_table(pa.table({"x": np.arange(first, first + 100)}), path)
            os.utime(path, ns=(LONG_AGO, LONG_AGO))
        return make_spark_converter(spark.read.parquet(str(path)).where("x % 2 = 0"), cache_dir=cache_dir)

    def entries() -> int:
        return sum(entry.is_dir() for entry in (cache_dir / "converter-v1").iterdir())

    with convert(1000) as one, convert(1000) as same:
        assert same.url == one.url, "the same file was written twice"
        assert entries() == 1
        assert read(same)["x"].tolist() == list(range(1000, 1100, 2))
        with convert(5000) as other:
            assert other.url != one.url, "a file that was overwritten was not read again"
            assert entries() == 2
            assert read(other)["x"].tolist() == list(range(5000, 5100, 2))
    first = make_spark_converter(spark.range(10), cache_dir=cache_dir, cache_key="rows", delete_on_exit=False)
    with first, make_spark_converter(spark.range(50, 60), cache_dir=cache_dir, cache_key="rows") as named:
        assert named.url == first.url
        assert read(named)["id"].tolist() == list(range(10))
    named = make_spark_converter(spark.range(50, 60), cache_dir=cache_dir, cache_key="rows", delete_on_exit=False)
    assert read(named)["id"].tolist() == list(range(10)), "an entry that is kept was not used again"
    named.delete()
    program = cache_dir.parent / "own_decoder.py"
    program.write_text(OWN_DECODER)
    hashes = {subprocess.run([sys.executable, program], check=True, capture_output=True).stdout for _ in range(2)}
    assert len(hashes) == 1, "a decoder of a script was not the same in another process"
    return "files, cache_key and a decoder of a script"


def user_state(spark: SparkSession, cache_dir: Path) -> str:
    """The user's confs are as before, also after a UDF that fails; that is a CacheError, and leaves no file."""
    records = "spark.sql.execution.arrow.maxRecordsPerBatch"
    spark.conf.set(records, "7")
    spark.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
    is_classic = not type(spark).__module__.startswith("pyspark.sql.connect")
    properties = ("spark.jobGroup.id", "spark.job.description")
    if is_classic:
        spark.sparkContext.setJobGroup("a group", "a description")

    # No annotations: PySpark would look for a kind of pandas UDF in them, and warn.
    def fail(row):  # type: ignore[no-untyped-def]
        if row == 777:
            raise ValueError(f"no value for {row}")
        return row

    before = settings(spark)
    try:
        df = known_rows(spark, 40).select("id", "timestamp", "array<float>")
        failing = spark.range(0, 1000, 1, 4).select("id", F.array(F.udf(fail, "long")("id")).alias("x"))
        for writer in WRITERS:
            with make_spark_converter(df, cache_dir=cache_dir, writer=writer) as converter:
                assert len(converter) == 40
            assert settings(spark) == before, "a conf of the user was changed"
            must_fail("CacheError", "no value for 777", failing, cache_dir, writer=writer)
            assert settings(spark) == before, "a conf of the user was changed by a job that failed"
            assert files_below(cache_dir) == ["converter-v1/.owner"]
        if is_classic:
            kept = [spark.sparkContext.getLocalProperty(name) for name in properties]
            assert kept == ["a group", "a description"], kept
    finally:
        spark.conf.unset(records)
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
        for name in properties if is_classic else ():
            spark.sparkContext.setLocalProperty(name, None)
    return f"{len(before)} confs"


def wide_rows(spark: SparkSession, cache_dir: Path) -> str:
    """40 rows of 2 MB in one partition: more than a driver of 1 GB can hold twenty times."""
    size, places = 500_000, np.arange(500_000)
    places_of = F.sequence(F.lit(0), F.lit(size - 1))
    row = F.transform(places_of, lambda place: ((place + F.col("id") * 7919) % 2**20 / 16).cast("float"))
    df = spark.range(0, 40, 1, 1).select("id", row.alias("x"))
    for writer in WRITERS:
        seen = 0
        with make_spark_converter(df, cache_dir=cache_dir, writer=writer) as converter:
            assert converter.schema["x"].shape == (size,)
            with converter.make_batch_reader(batch_size=7) as reader:
                for batch in reader:
                    ids = np.arange(seen, seen + len(batch["id"]))
                    x = ((places + ids[:, None] * 7919) % 2**20 / 16).astype("f4")
                    assert_same(batch, {"id": ids, "x": x})
                    seen += len(ids)
        assert seen == 40
    return "40 rows of 2 MB, both writers"


def refusals(spark: SparkSession, cache_dir: Path) -> str:
    """What cannot be converted is refused by name, before anything is written."""
    must_fail("SourceError", "A streaming DataFrame has no end", spark.readStream.format("rate").load(), cache_dir)
    df = spark.sql("SELECT 1 AS x, map('a', NULL) AS m, NULL AS n")
    named = r"^2 columns cannot.*'m\.value' has type void.*'n' has type void"
    must_fail("UnsupportedTypeError", named, df, cache_dir)
    assert not cache_dir.exists()
    return "a stream, a map of voids, a void"


def start(session: str) -> SparkSession:
    """Spark on two cores, with little memory, in the time zone that shows confusions of time zones."""
    # The server of Connect inherits them, and its Python workers are to be this Python.
    os.environ |= {"JAVA_HOME": str(find_java_home()), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    conf = {"spark.sql.shuffle.partitions": "2", "spark.sql.session.timeZone": "America/New_York"}
    if session == "classic":
        return start_local_spark("compat", master="local[2]", conf=conf | {"spark.driver.memory": "1g"})
    builder: Any = SparkSession.builder.remote("local[2]")
    # pyspark 4.2.0 hangs on a Python UDF over a Parquet scan without this (SPARK-58241); drop with 4.2.0 support.
    for name, value in (conf | {"spark.sql.execution.arrow.pythonUDF.columnarInput.enabled": "false"}).items():
        builder = builder.config(name, value)
    spark: SparkSession = builder.getOrCreate()
    assert type(spark).__module__.startswith("pyspark.sql.connect."), type(spark)
    return spark


def python_of_workers(batches: Any) -> Any:
    for _ in batches:
        yield pa.record_batch([pa.array([sys.executable])], names=["python"])


def started(spark: SparkSession, cache_dir: Path) -> str:
    """This Spark, with workers of this Python, and the package that is installed beside it."""
    import converter

    assert spark.version == pyspark.__version__, spark.version
    assert not Path(converter.__file__).is_relative_to(REPOSITORY / "converter"), converter.__file__
    (row,) = spark.range(1).mapInArrow(python_of_workers, "python string").collect()
    assert row[0] == sys.executable, row[0]
    java = (find_java_home() / "release").read_text()
    found = re.search(r'JAVA_VERSION="([^"]+)"', java)
    assert found is not None, java
    return f"Python {platform.python_version()}, pyarrow {pa.__version__}, Java {found[1]}"


Case = Callable[[SparkSession, Path], str]
CLASSIC: list[Case] = [
    started, scalars, arrays, nested, decoded, empty_lists, order, writers, categories, options_together, statistics,
    reuse, user_state, wide_rows, refusals,
]  # fmt: skip
CASES = {
    "classic": CLASSIC,
    "connect": [case for case in CLASSIC if case not in (statistics, reuse, wide_rows)],
}


def cause_of(error: Exception) -> str:
    """One line: what a case found, and the line of this program that found it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]} [{frames[-1].lineno}: {frames[-1].line}]"


def main() -> None:
    """Run the cases of one kind of session, in turn, each in a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--session", choices=list(CASES), required=True, help="how Spark is reached")
    session = parser.parse_args().session
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        spark = start(session)
        has_failed = False
        for case in CASES[session]:
            cache_dir = Path(folder) / case.__name__ / "cache"
            cache_dir.parent.mkdir()
            result: dict[str, Any] = {"case": f"{session}: {case.__name__}", "ok": True}
            try:
                result["detail"] = case(spark, cache_dir)
                left = files_below(cache_dir)
                assert left in ([], ["converter-v1/.owner"]), f"left behind: {left}"
            except Exception as error:  # noqa: BLE001 (whatever it is, it is this case's result)
                traceback.print_exc()
                result |= {"ok": False, "detail": cause_of(error)}
                has_failed = True
            end = time.perf_counter()
            print(json.dumps(result | {"seconds": round(end - begin, 2)}), flush=True)
            begin = end
        spark.stop()
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
