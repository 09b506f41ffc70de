"""Every Spark type: its extremes, its nulls, and what to write where it has no tensor form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyspark
import pytest
from pyspark.ml.linalg import DenseMatrix, Matrices, MatrixUDT, SparseMatrix, SparseVector, Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DoubleType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    UserDefinedType,
)

from converter import NullValueError, SourceError, UnsupportedTypeError, make_spark_converter
from tests.folders import files_below

pytestmark = pytest.mark.short

INFINITY = float("inf")
YEAR_1 = np.datetime64("0001-01-01T00:00:00", "us")
YEAR_9999 = np.datetime64("9999-12-31T23:59:59.999999", "us")
NINES = "9" * 38


class PointUDT(UserDefinedType):
    """A user's type that is stored as an array of doubles."""

    @classmethod
    def sqlType(cls) -> ArrayType:  # noqa: N802 (PySpark's name)
        return ArrayType(DoubleType(), False)

    @classmethod
    def module(cls) -> str:
        return __name__

    def serialize(self, obj: Any) -> list[float]:
        return [obj.x, obj.y]

    def deserialize(self, datum: Any) -> Point:
        return Point(*datum)


@dataclass
class Point:
    x: float
    y: float
    __UDT__ = PointUDT()


class PersonUDT(UserDefinedType):
    """A user's type that is stored as a struct: it is no number."""

    @classmethod
    def sqlType(cls) -> StructType:  # noqa: N802 (PySpark's name)
        return StructType([StructField("name", StringType()), StructField("age", IntegerType())])

    @classmethod
    def module(cls) -> str:
        return __name__

    def serialize(self, obj: Any) -> tuple[str, int]:
        return (obj.name, obj.age)

    def deserialize(self, datum: Any) -> Person:
        return Person(*datum)


@dataclass
class Person:
    name: str
    age: int
    __UDT__ = PersonUDT()


def read_column(df: DataFrame, cache_dir: Path, *, float_dtype: Any = None, ragged: Any = "raise") -> Any:
    """The values of column `x` in one batch, and where they are present (None: everywhere)."""
    with (
        make_spark_converter(df, cache_dir=cache_dir, float_dtype=float_dtype) as converter,
        converter.make_batch_reader(batch_size=1000, nulls="mask", ragged=ragged) as reader,
    ):
        (batch,) = list(reader)
    return batch["x"], batch.get("x__valid")


def rows_of(spark: SparkSession, spark_type: str, values: list[str]) -> DataFrame:
    """One column `x` of these SQL expressions, in this order."""
    rows = " UNION ALL ".join(
        f"SELECT {index} i, CAST({value} AS {spark_type}) x" for index, value in enumerate(values)
    )
    return spark.sql(rows).orderBy("i").select("x")


@pytest.mark.parametrize("writer", ["executors", "spark"])
def test_dates_and_times_that_python_does_not_have_arrive_exactly(
    spark: SparkSession, cache_dir: Path, writer: str
) -> None:
    df = spark.sql(
        "SELECT make_date(12345, 1, 1) day, timestamp_micros(4611686018427387904) time UNION ALL "
        "SELECT date_add(date'0001-01-01', -1000000), timestamp_micros(-4611686018427387904) UNION ALL "
        "SELECT date_add(date'1970-01-01', 2147483647), timestamp'1970-01-01 00:00:00Z' UNION ALL SELECT NULL, NULL"
    )
    days, micros = [3_789_391, -1_719_162, 2**31 - 1], [2**62, -(2**62), 0]
    with make_spark_converter(df, cache_dir=cache_dir, writer=writer) as converter:
        with converter.make_batch_reader(batch_size=9, nulls="mask") as reader:
            (batch,) = reader
        assert sorted(batch["day"][batch["day__valid"]].astype(np.int64).tolist()) == sorted(days)
        assert sorted(batch["time"][batch["time__valid"]].astype(np.int64).tolist()) == sorted(micros)
        day, time = converter.statistics["day"], converter.statistics["time"]
        # Where Python has no such date, the number that is stored.
        assert (day.min, day.max) == (min(days), max(days))
        assert (time.min, time.max) == (min(micros), max(micros))
        assert f"max={2**31 - 1}" in repr(day)
        assert len(converter.where([("day", ">", np.datetime64("9999-12-31"))])) == 2


@pytest.mark.parametrize(
    ("spark_type", "literals", "expected"),
    [
        ("boolean", ["false", "true"], np.array([False, True])),
        ("tinyint", ["-128", "127"], np.array([-128, 127], "i1")),
        ("smallint", ["-32768", "32767"], np.array([-32768, 32767], "i2")),
        ("int", ["-2147483648", "2147483647"], np.array([-(2**31), 2**31 - 1], "i4")),
        ("bigint", ["'-9223372036854775808'", "9223372036854775807"], np.array([-(2**63), 2**63 - 1], "i8")),
        (
            "float",
            ["-3.4028234663852886E38D", "3.4028234663852886E38D", "1.401298464324817E-45D", "'-0.0'", "'NaN'",
             "'Infinity'", "'-Infinity'"],
            np.array([-3.4028234663852886e38, 3.4028234663852886e38, 1.401298464324817e-45, -0.0, np.nan,
                      INFINITY, -INFINITY], "f4"),
        ),
        (
            "double",
            ["-1.7976931348623157E308D", "1.7976931348623157E308D", "4.9E-324D", "'-0.0'", "'NaN'", "'Infinity'",
             "'-Infinity'"],
            np.array([-1.7976931348623157e308, 1.7976931348623157e308, 4.9e-324, -0.0, np.nan, INFINITY, -INFINITY]),
        ),
        ("decimal(5,0)", ["-99999", "99999"], np.array([-99999.0, 99999.0])),
        ("decimal(18,2)", ["'-9999999999999999.99'", "'0.01'"], np.array([-9999999999999999.99, 0.01])),
        ("decimal(38,0)", [f"'-{NINES}'", f"'{NINES}'", "0"], np.array([-1e38, 1e38, 0.0])),
        ("decimal(38,38)", [f"'-0.{NINES}'", f"'0.{'0' * 37}1'"], np.array([-1.0, 1e-38])),
        ("decimal(38,10)", ["'-1234567890123456789012345678.0123456789'"], np.array([-1234567890123456789012345678.0])),
        (
            "date",
            ["date'0001-01-01'", "date'9999-12-31'", "date'1582-10-15'", "date'1969-12-31'", "date'2000-02-29'"],
            np.array(["0001-01-01", "9999-12-31", "1582-10-15", "1969-12-31", "2000-02-29"], "M8[D]"),
        ),
        (
            # The last two are the same time on New York's clocks.
            "timestamp",
            ["'0001-01-01T00:00:00Z'", "'9999-12-31T23:59:59.999999Z'", "'1969-12-31T23:59:59.999999Z'",
             "'2026-11-01T05:30:00Z'", "'2026-11-01T06:30:00Z'"],
            np.array([YEAR_1, YEAR_9999, "1969-12-31T23:59:59.999999", "2026-11-01T05:30", "2026-11-01T06:30"],
                     "M8[us]"),
        ),
        ("timestamp", ["timestamp'2026-07-01 08:00:00'"], np.array(["2026-07-01T12:00"], "M8[us]")),
        (
            # The last one does not exist on New York's clocks.
            "timestamp_ntz",
            ["timestamp_ntz'0001-01-01 00:00:00'", "timestamp_ntz'9999-12-31 23:59:59.999999'",
             "timestamp_ntz'2026-03-08 02:30:00'"],
            np.array([YEAR_1, YEAR_9999, "2026-03-08T02:30"], "M8[us]"),
        ),
        (
            "string",
            ["''", "'žluťoučký 🐟'", r"'tab\tnull\0end'", "repeat('long ', 20000)"],
            np.array(["", "žluťoučký 🐟", "tab\tnull\0end", "long " * 20000], object),
        ),
        ("varchar(3)", ["'abc'"], np.array(["abc"], object)),
        ("char(3)", ["'a'"], np.array(["a"], object)),
        ("string collate unicode_ci", ["'É'"], np.array(["É"], object)),
        ("binary", ["X''", "X'00FF'", "X'00'"], np.array([b"", b"\x00\xff", b"\x00"], object)),
        ("array<boolean>", ["array(true, false)", "array(false, false)"], np.array([[1, 0], [0, 0]], bool)),
        ("array<tinyint>", ["array(-128, 127)"], np.array([[-128, 127]], "i1")),
        ("array<smallint>", ["array(-32768, 32767)"], np.array([[-32768, 32767]], "i2")),
        ("array<int>", ["array(-2147483648, 2147483647)"], np.array([[-(2**31), 2**31 - 1]], "i4")),
        ("array<bigint>", ["array('-9223372036854775808', '1')"], np.array([[-(2**63), 1]], "i8")),
        (
            "array<float>",
            ["array('NaN', 'Infinity')", "array('-Infinity', '-0.0')", "array(3.4028234663852886E38D, 1.4E-45D)"],
            np.array([[np.nan, INFINITY], [-INFINITY, -0.0], [3.4028234663852886e38, 1.4e-45]], "f4"),
        ),
        (
            "array<double>",
            ["array('NaN', 'Infinity')", "array(-1.7976931348623157E308D, 4.9E-324D)"],
            np.array([[np.nan, INFINITY], [-1.7976931348623157e308, 4.9e-324]]),
        ),
        ("array<decimal(38,0)>", [f"array('{NINES}', '-1')"], np.array([[1e38, -1.0]])),
        ("array<decimal(4,2)>", ["array(12.34, -0.01)"], np.array([[12.34, -0.01]])),
        (
            "array<array<array<smallint>>>",
            ["array(array(array(1, 2), array(3, 4)))", "array(array(array(5, 6), array(7, 8)))"],
            np.arange(1, 9, dtype="i2").reshape(2, 1, 2, 2),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("with_null", [False, True])
@pytest.mark.long("a conversion for each type, 35 s")
def test_extreme_values_arrive_exactly(
    spark: SparkSession, cache_dir: Path, spark_type: str, literals: list[str], expected: Any, with_null: bool
) -> None:
    df = rows_of(spark, spark_type, [*literals, "NULL"] if with_null else literals)
    values, valid = read_column(df, cache_dir)
    assert values.dtype == expected.dtype
    assert values.shape == (len(literals) + with_null, *expected.shape[1:])
    if "decimal" in spark_type:
        np.testing.assert_array_max_ulp(values[: len(literals)], expected, maxulp=1)
    else:
        np.testing.assert_array_equal(values[: len(literals)], expected, strict=True)
    if expected.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(values[: len(literals)]), np.signbit(expected))
    if with_null:
        assert valid.tolist() == [True] * len(literals) + [False]
    else:
        assert valid is None


@pytest.mark.parametrize(
    ("spark_type", "dtype", "shape"),
    [
        ("boolean", "bool", ()),
        ("int", "int32", ()),
        ("double", "float32", ()),
        ("decimal(20,2)", "float32", ()),
        ("date", "datetime64[D]", ()),
        ("timestamp", "datetime64[us]", ()),
        ("string", "str", ()),
        ("binary", "bytes", ()),
        ("array<double>", "float32", None),
        ("array<array<int>>", "int32", None),
    ],
)
def test_a_column_of_nulls_alone_is_read(
    spark: SparkSession, cache_dir: Path, spark_type: str, dtype: str, shape: Any
) -> None:
    df = spark.range(0, 7, 1, 3).select("id", F.lit(None).cast(spark_type).alias("x"))
    with make_spark_converter(df, cache_dir=cache_dir) as converter:
        field = converter.schema["x"]
        assert (field.dtype, field.shape, field.has_nulls) == (dtype, shape, True)
        with converter.make_batch_reader(batch_size=7, nulls="mask", ragged="pad") as reader:
            (batch,) = list(reader)
    assert batch["id"].tolist() == list(range(7))
    assert batch["x__valid"].tolist() == [False] * 7
    assert len(batch["x"]) == 7


def test_a_double_that_float32_cannot_hold_becomes_infinite(spark: SparkSession, cache_dir: Path) -> None:
    df = rows_of(spark, "double", ["1E300D", "-1E300D", "1E-300D", "16777217"])
    values, _ = read_column(df, cache_dir, float_dtype="float32")
    np.testing.assert_array_equal(values, np.array([INFINITY, -INFINITY, 0, 16777216], "f4"), strict=True)


@pytest.mark.parametrize("spark_type", ["array<int>", "array<double>", "array<boolean>"])
def test_rows_of_any_length_arrive_exactly(spark: SparkSession, cache_dir: Path, spark_type: str) -> None:
    df = rows_of(spark, spark_type, ["array()", "array(1, 0, 1)", "NULL", "array(1)", "array()"])
    values, valid = read_column(df, cache_dir, ragged="nested")
    assert [row.tolist() for row in values] == [[], [1, 0, 1], [], [1], []]
    assert {row.dtype for row in values} == {np.dtype({"int": "i4", "dou": "f8", "boo": "?"}[spark_type[6:9]])}
    assert valid.tolist() == [True, True, False, True, True]


def test_arrays_that_are_all_empty_are_ragged(spark: SparkSession, cache_dir: Path) -> None:
    values, valid = read_column(rows_of(spark, "array<float>", ["array()", "array()"]), cache_dir, ragged="pad")
    assert values.shape == (2, 0)
    assert valid is None


def test_vectors_arrive_dense(spark: SparkSession, cache_dir: Path) -> None:
    rows = [
        (Vectors.dense([1.0, -INFINITY, 0.1]),),
        (SparseVector(3, {1: 5e-324}),),
        (None,),
        (SparseVector(3, {}),),
        (Vectors.dense([float("nan"), 0.0, 1.7976931348623157e308]),),
    ]
    df = spark.createDataFrame(rows, StructType([StructField("x", VectorUDT())])).coalesce(1)
    values, valid = read_column(df, cache_dir)
    expected = [[1.0, -INFINITY, 0.1], [0, 5e-324, 0], [0, 0, 0], [0, 0, 0], [np.nan, 0, 1.7976931348623157e308]]
    np.testing.assert_array_equal(values, np.array(expected), strict=True)
    assert valid.tolist() == [True, True, False, True, True]


def test_matrices_arrive_as_rows_and_columns(spark: SparkSession, cache_dir: Path) -> None:
    # Dense and sparse, stored along columns and along rows, and one that is null.
    matrices = [
        Matrices.dense(2, 3, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        DenseMatrix(2, 3, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], isTransposed=True),
        None,
        Matrices.sparse(2, 3, [0, 1, 1, 3], [1, 0, 1], [7.0, 8.0, 9.0]),
        SparseMatrix(2, 3, [0, 1, 3], [2, 0, 1], [7.0, 8.0, 9.0], isTransposed=True),
    ]
    rows = [(matrix,) for matrix in matrices]
    df = spark.createDataFrame(rows, StructType([StructField("x", MatrixUDT())])).coalesce(1)
    values, valid = read_column(df, cache_dir)
    assert values.shape == (5, 2, 3)
    assert valid.tolist() == [matrix is not None for matrix in matrices]
    for value, matrix in zip(values, matrices, strict=True):
        assert value.tolist() == (np.zeros((2, 3)) if matrix is None else matrix.toArray()).tolist()


def test_matrices_of_different_shapes_are_ragged(spark: SparkSession, cache_dir: Path) -> None:
    matrices = [
        Matrices.dense(2, 3, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        Matrices.dense(1, 2, [1.0, 2.0]),
        None,
        Matrices.sparse(3, 2, [0, 1, 3], [2, 0, 1], [7.0, 8.0, 9.0]),
        DenseMatrix(2, 3, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], isTransposed=True),
    ]
    df = spark.createDataFrame([(one,) for one in matrices], StructType([StructField("x", MatrixUDT())])).coalesce(1)
    values, valid = read_column(df, cache_dir, ragged="nested")
    assert valid.tolist() == [one is not None for one in matrices]
    for value, one in zip(values, matrices, strict=True):
        assert value.tolist() == (np.zeros((0, 0)) if one is None else one.toArray()).tolist()


def test_vectors_of_different_sizes_are_ragged(spark: SparkSession, cache_dir: Path) -> None:
    rows = [(Vectors.dense([1.0]),), (SparseVector(4, {3: 2.0}),), (Vectors.dense([]),)]
    df = spark.createDataFrame(rows, StructType([StructField("x", VectorUDT())])).coalesce(1)
    values, _ = read_column(df, cache_dir, ragged="nested")
    assert [row.tolist() for row in values] == [[1.0], [0, 0, 0, 2.0], []]


def test_a_users_type_is_read_as_what_stores_it(spark: SparkSession, cache_dir: Path) -> None:
    df = spark.createDataFrame([(Point(1.0, 2.5),), (Point(-3.0, 1e300),)], StructType([StructField("x", PointUDT())]))
    values, _ = read_column(df.coalesce(1), cache_dir)
    np.testing.assert_array_equal(values, np.array([[1.0, 2.5], [-3.0, 1e300]]), strict=True)


def test_a_null_struct_makes_its_members_null(spark: SparkSession, cache_dir: Path) -> None:
    df = spark.sql(
        "SELECT i, IF(i = 1, NULL, named_struct('a', IF(i = 2, NULL, i), 'b', named_struct('c', array(i, i)))) s "
        "FROM VALUES (0), (1), (2) AS t(i)"
    ).coalesce(1)
    with (
        make_spark_converter(df, cache_dir=cache_dir) as converter,
        converter.make_batch_reader(nulls="mask") as reader,
    ):
        (batch,) = list(reader)
    assert list(batch) == ["i", "s.a", "s.a__valid", "s.b.c", "s.b.c__valid"]
    assert batch["s.a"].tolist() == [0, 0, 0]
    assert batch["s.a__valid"].tolist() == [True, False, False]
    assert batch["s.b.c"].tolist() == [[0, 0], [0, 0], [2, 2]]
    assert batch["s.b.c__valid"].tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("spark_type", "value"),
    [("array<double>", "array(1, NULL)"), ("array<array<int>>", "array(array(1), array(NULL))"),
     ("array<array<int>>", "array(array(1), NULL)")],
)  # fmt: skip
def test_a_null_inside_an_array_is_refused(spark: SparkSession, cache_dir: Path, spark_type: str, value: str) -> None:
    match = r"Column 'x' has arrays with null elements.*F\.transform\(F\.col\('`x`'\), lambda x"
    with pytest.raises(NullValueError, match=match) as raised:
        make_spark_converter(rows_of(spark, spark_type, [value]), cache_dir=cache_dir)
    assert raised.value.column == "x"
    assert files_below(cache_dir) == ["converter-v1/.owner"]


@pytest.mark.parametrize(
    ("spark_type", "value", "expected", "dtype"),
    [
        ("array<double>", "array(1, NULL)", [1, 0], "float64"),
        ("array<float>", "array(NULL, 2)", [0, 2], "float32"),
        ("array<tinyint>", "array(1, NULL)", [1, 0], "int8"),
        ("array<bigint>", "array(9007199254740993, NULL)", [9007199254740993, 0], "int64"),
        ("array<boolean>", "array(true, NULL)", [True, False], "bool"),
        ("array<decimal(38,2)>", "array(1.25, NULL)", [1.25, 0], "float64"),
        ("array<array<smallint>>", "array(array(1, NULL), array(3, 4))", [[1, 0], [3, 4]], "int16"),
        ("array<array<array<float>>>", "array(array(array(1, NULL)), array(array(3, 4)))", [[[1, 0]], [[3, 4]]],
         "float32"),
    ],
)  # fmt: skip
def test_the_remedy_for_a_null_inside_an_array_keeps_the_type(
    spark: SparkSession, cache_dir: Path, spark_type: str, value: str, expected: Any, dtype: str
) -> None:
    df = rows_of(spark, spark_type, [value])
    with pytest.raises(NullValueError, match="null elements") as raised:
        make_spark_converter(df, cache_dir=cache_dir)
    remedy = re.search(r"e\.g\. (.*?)( \(drop rows whose inner array .*\))?\.$", str(raised.value))
    assert remedy is not None
    repaired = df.withColumn("x", evaluate(remedy[1], df))
    assert repaired.schema["x"].dataType.simpleString() == spark_type
    values, _ = read_column(repaired, cache_dir)
    np.testing.assert_array_equal(values, np.array([expected], dtype), strict=True)


def test_inner_arrays_of_different_lengths_are_refused_and_the_remedy_works(
    spark: SparkSession, cache_dir: Path
) -> None:
    df = rows_of(spark, "array<array<int>>", ["array(array(1, 2), array(3))", "array(array(4))"])
    with pytest.raises(UnsupportedTypeError, match="'x' has a row whose inner arrays differ in length") as raised:
        make_spark_converter(df, cache_dir=cache_dir)
    assert files_below(cache_dir) == ["converter-v1/.owner"]
    remedy = re.search(r"e\.g\. (.*)\.$", str(raised.value))
    assert remedy is not None
    values, _ = read_column(df.withColumn("x", evaluate(remedy[1], df)), cache_dir, ragged="nested")
    assert [row.tolist() for row in values] == [[1, 2, 3], [4]]


def unsupported_columns() -> dict[str, str]:
    """A column of every type that has no tensor form and that this version of Spark knows, as SQL."""
    version = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
    columns = {"void": "NULL", "person": "person", "dotted.void": "NULL", "it's void": "NULL"}
    if version >= (4, 0):
        columns["variant"] = "parse_json('{\"field\": 1.5}')"
        columns["variants"] = "array(parse_json('1'))"
    if version >= (4, 2):
        columns["geometry"] = "st_geomfromwkb(X'0101000000000000000000F03F0000000000000040')"
    return columns


def unsupported_rows(spark: SparkSession) -> DataFrame:
    rows = [(row, Person("Ada", 36)) for row in range(3)]
    fields = [StructField("id", LongType()), StructField("person", PersonUDT())]
    df = spark.createDataFrame(rows, StructType(fields)).coalesce(1)
    return df.select("id", *(F.expr(column).alias(name) for name, column in unsupported_columns().items()))


def refusal(df: DataFrame, cache_dir: Path) -> UnsupportedTypeError:
    with pytest.raises(UnsupportedTypeError, match=r"cannot become tensors\. Drop, select or cast") as raised:
        make_spark_converter(df, cache_dir=cache_dir)
    return raised.value


def evaluate(code: str, df: DataFrame) -> Any:
    """What a user gets who copies the code of a message."""
    return eval(code, {"F": F, "df": df})


def test_all_unsupported_columns_are_named_in_one_error(spark: SparkSession, cache_dir: Path) -> None:
    error = refusal(unsupported_rows(spark), cache_dir)
    names = list(unsupported_columns())
    assert error.column == names[0]
    assert str(error).startswith(f"{len(names)} columns cannot become tensors.")
    lines = str(error).splitlines()[1:]
    assert len(lines) == len(names)
    for name, line in zip(names, lines, strict=True):
        assert line.startswith(f"  {name!r} has type "), line
    types = {name: line.split(" has type ")[1].split(": ")[0] for name, line in zip(names, lines, strict=True)}
    assert types["void"] == "void"
    assert types.get("variants", "array<variant>") == "array<variant>"
    assert not cache_dir.exists()


@pytest.mark.parametrize("name", list(unsupported_columns()))
def test_the_remedy_of_the_message_works(spark: SparkSession, cache_dir: Path, name: str) -> None:
    df = unsupported_rows(spark).select("id", f"`{name}`")
    line = str(refusal(df, cache_dir)).splitlines()[1]
    code = re.search(r"e\.g\. (.*?)(, or join them)?$", line)
    assert code is not None, line
    remedy = evaluate(code[1], df)
    mended = remedy if isinstance(remedy, DataFrame) else df.withColumn(name, remedy)
    assert mended.columns == ["id", name]
    with (
        make_spark_converter(mended, cache_dir=cache_dir) as converter,
        converter.make_batch_reader(nulls="mask", ragged="pad") as reader,
    ):
        (batch,) = list(reader)
    assert batch["id"].tolist() == [0, 1, 2]
    assert len(batch) > 1
    assert {len(column) for column in batch.values()} == {3}
    assert all(converter.schema[one].has_nulls == ("void" in name) for one in mended.columns[1:])


def test_a_member_without_tensor_form_is_named_and_can_be_left_out(spark: SparkSession, cache_dir: Path) -> None:
    df = spark.range(0, 3, 1, 1).selectExpr("id", "array(named_struct('a', 1, 'v', NULL)) AS x", "map('k', NULL) AS m")
    lines = str(refusal(df, cache_dir)).splitlines()[1:]
    assert [line.split("'")[1] for line in lines] == ["x.v", "m.value"]
    for line in lines:
        df = evaluate(line.split("e.g. ")[1], df)
    assert df.columns == ["id"]


def test_rows_that_differ_in_their_first_size_are_torchs_jagged_tensors(spark: SparkSession, cache_dir: Path) -> None:
    box = "array(cast(id AS float), cast(i AS float))"
    df = spark.range(0, 10, 1, 1).selectExpr(
        f"transform(sequence(1, cast(id % 3 + 1 AS int)), i -> {box}) AS boxes",
        "transform(sequence(1, 2), i -> transform(sequence(1, cast(id % 3 + 1 AS int)), j -> i * j)) AS grids",
    )
    with make_spark_converter(df, cache_dir=cache_dir) as converter:
        with converter.make_torch_dataloader(batch_size=10, columns=["boxes"], ragged="nested") as loader:
            (batch,) = list(loader)
        with (
            converter.make_torch_dataloader(batch_size=10, columns=["grids"], ragged="nested") as loader,
            pytest.raises(SourceError, match="'grids' has rows that differ in more than their first dimension"),
        ):
            list(loader)
        with converter.make_torch_dataloader(batch_size=10, columns=["grids"], ragged="pad") as loader:
            (padded,) = list(loader)
    rows = [[[float(row), float(i)] for i in range(1, row % 3 + 2)] for row in range(10)]
    assert [one.tolist() for one in batch["boxes"].unbind()] == rows
    assert padded["grids"].shape == (10, 2, 3)
    assert padded["grids__length"].tolist() == [[2, row % 3 + 1] for row in range(10)]
    assert padded["grids"][4].tolist() == [[1, 2, 0], [2, 4, 0]]
