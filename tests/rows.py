"""Known rows: every value follows from the row's id and the column's name.

A wrong row, two swapped columns or a buffer that two batches share then shows in the values. Both sides stand here:
the Spark expression that makes a column, and the NumPy values that a reader must return. `tests/columns.py` does the
same without Spark.

Both sides start from `_key`: an integer that no two ids of a column share, and that differs between columns.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]

_PRIME = 2**31 - 1
_DAY_MICROSECONDS = 86_400_000_000
ODD_NAMES = (
    "with space", "dot.ted.name", 'double"quote', "single'quote", "back`tick", "a=b", "comma, semicolon;", "<b>",
    "curly{brace}", "per%cent", "žluťoučký 🐟", "select",
)  # fmt: skip
_VECTOR_SIZE = 6


def known_rows(spark: SparkSession, num_rows: int, *, nulls: bool = False, partitions: int = 3) -> DataFrame:
    """The rows of ids `0 … num_rows - 1`, in their order, in `partitions` partitions."""
    return spark.range(0, num_rows, 1, partitions).select("id", *_columns_of(spark, nulls))


@functools.lru_cache(maxsize=4)
def _columns_of(spark: SparkSession, nulls: bool) -> list[Column]:
    """Made once per session: classic Spark is asked 7,000 times for them, which takes as long as to convert them."""
    return [_null_where(name, column, nulls).alias(name) for name, column in _spark_columns()]


def known_values(ids: Sequence[int] | Ids, *, nulls: bool = False, float_dtype: str = "float32") -> dict[str, Array]:
    """What a reader returns for these ids: a zero, an empty string or an empty row where `known_valid` is False."""
    rows = np.asarray(ids, np.int64)
    values = {"id": rows} | {name: make(rows, float_dtype) for name, make in _numpy_columns().items()}
    if nulls:
        for name, valid in known_valid(rows).items():
            if values[name].dtype == object:
                empty = np.empty(1, object)
                empty[0] = type(values[name][0])() if name != "ragged" else np.empty(0, np.int64)
                values[name] = np.where(valid, values[name], empty)
            else:
                values[name] = values[name].copy()
                values[name][~valid] = np.zeros((), values[name].dtype)
    return values


def known_valid(ids: Sequence[int] | Ids) -> dict[str, npt.NDArray[np.bool_]]:
    """Where the values of `known_rows(nulls=True)` are present; `id` always is."""
    rows = np.asarray(ids, np.int64)
    valid = {}
    for name in _numpy_columns():
        # A member of a struct is missing together with it.
        column = "struct" if name.startswith("struct.") else name
        valid[name] = _key(rows, column + "?") % 5 != 2
    return valid


def assert_same(actual: dict[str, Array], expected: dict[str, Array]) -> None:
    """The same columns in the same order, with the same dtypes, shapes and values."""
    assert list(actual) == list(expected)
    for name, values in expected.items():
        assert actual[name].dtype == values.dtype, name
        assert actual[name].shape == values.shape, name
        if values.dtype == object and len(values) and isinstance(values[0], np.ndarray):
            for actual_row, row in zip(actual[name], values, strict=True):
                np.testing.assert_array_equal(actual_row, row, err_msg=name, strict=True)
        else:
            np.testing.assert_array_equal(actual[name], values, err_msg=name, strict=True)


def concatenate(batches: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """All rows of the batches, column by column."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _salt(name: str) -> int:
    return zlib.crc32(name.encode())


def _key(ids: Ids, name: str) -> Ids:
    """An integer in `[0, 2**31 - 1)`, another one for each id."""
    return (ids * 1_000_003 + _salt(name)) % _PRIME


def _spark_key(name: str) -> Column:
    from pyspark.sql import functions as F

    return F.pmod(F.col("id") * 1_000_003 + F.lit(_salt(name)), F.lit(_PRIME))


def _null_where(name: str, column: Column, nulls: bool) -> Column:
    from pyspark.sql import functions as F

    return F.when(F.pmod(_spark_key(name + "?"), F.lit(5)) != 2, column) if nulls else column


def _spark_columns() -> list[tuple[str, Column]]:
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import functions as F

    key = _spark_key

    def numbers(name: str, count: int, spark_type: str, divisor: int) -> list[Column]:
        return [(F.pmod(key(name) + 7919 * index, F.lit(2**20)) / divisor).cast(spark_type) for index in range(count)]

    def sparse(row: Any, values: Any) -> Any:
        # The places that are left out count as zeros.
        return Vectors.sparse(_VECTOR_SIZE, {index: value for index, value in enumerate(values) if (row >> index) & 2})

    # No annotations: PySpark would look for a kind of pandas UDF in them, and warn.
    vector = F.udf(lambda row, values: Vectors.dense(values) if row % 2 else sparse(row, values), VectorUDT())
    days = key("date") % 3_652_059 - 719_162
    micros = key("timestamp_ntz") * 2_999_999 - 2**51
    day = F.floor(micros / _DAY_MICROSECONDS).cast("int")
    second = ((micros - day.cast("long") * _DAY_MICROSECONDS).cast("decimal(18,0)") / 1_000_000).cast("decimal(18,6)")
    words = F.concat(F.lit("žluťoučký 🐟\n"), key("string").cast("string"))
    nested = numbers("nested", 6, "int", 1)
    return [
        ("boolean", key("boolean") % 2 == 0),
        ("byte", (key("byte") % 256 - 128).cast("byte")),
        ("short", (key("short") % 65536 - 32768).cast("short")),
        ("int", (key("int") * 2 - 2**31).cast("int")),
        ("long", key("long") * 4_294_967_291 - 2**62),
        ("float", ((key("float") % 2**24) / 256 - 32768).cast("float")),
        ("double", key("double") / 1024 - 1_000_000),
        ("decimal", ((key("decimal") % 2**24 - 2**23).cast("decimal(18,0)") / 4).cast("decimal(20,2)")),
        ("date", F.date_add(F.lit("1970-01-01").cast("date"), days.cast("int"))),
        ("timestamp", F.timestamp_micros(key("timestamp") * 2_999_999 - 2**51)),
        ("timestamp_ntz", F.expr("timestamp_ntz'1970-01-01 00:00:00'") + F.make_dt_interval(day, secs=second)),
        ("string", F.when(key("string") % 7 == 0, "").otherwise(words)),
        (
            "binary",
            F.unhex(F.call_function("repeat", F.lpad(F.hex(key("binary")), 8, "0"), (key("binary") % 3).cast("int"))),
        ),
        ("array<float>", F.array(*numbers("array<float>", 8, "float", 16))),
        ("array<double>", F.array(*numbers("array<double>", 3, "double", 1000))),
        ("nested", F.array(F.array(*nested[:3]), F.array(*nested[3:]))),
        ("flags", F.array(*(F.pmod(key("flags") + index, F.lit(3)) == 0 for index in range(5)))),
        ("ragged", F.slice(F.array(*numbers("ragged", 4, "long", 1)), 1, (key("ragged") % 5).cast("int"))),
        ("vector", vector(F.col("id"), F.array(*numbers("vector", _VECTOR_SIZE, "double", 16)))),
        (
            "struct",
            F.struct(
                (key("struct.dot.ted") / 1024).alias("dot.ted"),
                F.array(*numbers("struct.array", 2, "float", 16)).alias("array"),
                F.struct(key("struct.inner.long").alias("long")).alias("inner"),
            ),
        ),
        *((name, key(name)) for name in ODD_NAMES),
    ]


def _numpy_columns() -> dict[str, Callable[[Ids, str], Array]]:
    def numbers(name: str, count: int, divisor: int) -> Callable[[Ids], Array]:
        return lambda ids: ((_key(ids, name)[:, None] + 7919 * np.arange(count)) % 2**20) / divisor

    def string(ids: Ids, _: str) -> Array:
        return _objects("" if key % 7 == 0 else f"žluťoučký 🐟\n{key}" for key in _key(ids, "string").tolist())

    def binary(ids: Ids, _: str) -> Array:
        return _objects(key.to_bytes(4, "big") * (key % 3) for key in _key(ids, "binary").tolist())

    def ragged(ids: Ids, _: str) -> Array:
        rows = numbers("ragged", 4, 1)(ids).astype("i8")
        return _objects(row[: key % 5] for row, key in zip(rows, _key(ids, "ragged").tolist(), strict=True))

    def vector(ids: Ids, dtype: str) -> Array:
        present = (ids[:, None] % 2 == 1) | ((ids[:, None] >> np.arange(_VECTOR_SIZE)) & 2 > 0)
        return np.where(present, numbers("vector", _VECTOR_SIZE, 16)(ids), 0).astype(dtype)

    def micros(name: str) -> Callable[[Ids, str], Array]:
        return lambda ids, _: (_key(ids, name) * 2_999_999 - 2**51).view("M8[us]")

    return {
        "boolean": lambda ids, _: _key(ids, "boolean") % 2 == 0,
        "byte": lambda ids, _: (_key(ids, "byte") % 256 - 128).astype("i1"),
        "short": lambda ids, _: (_key(ids, "short") % 65536 - 32768).astype("i2"),
        "int": lambda ids, _: (_key(ids, "int") * 2 - 2**31).astype("i4"),
        "long": lambda ids, _: _key(ids, "long") * 4_294_967_291 - 2**62,
        "float": lambda ids, _: ((_key(ids, "float") % 2**24) / 256 - 32768).astype("f4"),
        "double": lambda ids, dtype: (_key(ids, "double") / 1024 - 1_000_000).astype(dtype),
        "decimal": lambda ids, dtype: ((_key(ids, "decimal") % 2**24 - 2**23) / 4).astype(dtype),
        "date": lambda ids, _: (_key(ids, "date") % 3_652_059 - 719_162).view("M8[D]"),
        "timestamp": micros("timestamp"),
        "timestamp_ntz": micros("timestamp_ntz"),
        "string": string,
        "binary": binary,
        "array<float>": lambda ids, _: numbers("array<float>", 8, 16)(ids).astype("f4"),
        "array<double>": lambda ids, dtype: numbers("array<double>", 3, 1000)(ids).astype(dtype),
        "nested": lambda ids, _: numbers("nested", 6, 1)(ids).astype("i4").reshape(-1, 2, 3),
        "flags": lambda ids, _: (_key(ids, "flags")[:, None] + np.arange(5)) % 3 == 0,
        "ragged": ragged,
        "vector": vector,
        "struct.dot.ted": lambda ids, dtype: (_key(ids, "struct.dot.ted") / 1024).astype(dtype),
        "struct.array": lambda ids, _: numbers("struct.array", 2, 16)(ids).astype("f4"),
        "struct.inner.long": lambda ids, _: _key(ids, "struct.inner.long"),
        **{name: _odd_name(name) for name in ODD_NAMES},
    }


def _odd_name(name: str) -> Callable[[Ids, str], Array]:
    return lambda ids, _: _key(ids, name)


def _objects(values: Any) -> Array:
    rows = list(values)
    array = np.empty(len(rows), object)
    array[:] = rows
    return array
