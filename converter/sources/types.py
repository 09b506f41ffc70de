"""Spark's types as Arrow types, for DataFrames and Delta tables alike: the only such table."""

from __future__ import annotations

import pyarrow as pa

_ARROW_OF_SPARK = {
    "boolean": pa.bool_(), "byte": pa.int8(), "short": pa.int16(), "integer": pa.int32(), "long": pa.int64(),
    "float": pa.float32(), "double": pa.float64(), "date": pa.date32(), "string": pa.string(), "binary": pa.binary(),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp_ntz": pa.timestamp("us"),
}  # fmt: skip


def arrow_type_of(spark_type: str) -> pa.DataType | None:
    """The Arrow type of a type that the JSON of a schema gives by its name; None if it has none here.

    >>> arrow_type_of("long"), arrow_type_of("decimal(9,2)"), arrow_type_of("varchar(3)"), arrow_type_of("variant")
    (DataType(int64), Decimal128Type(decimal128(9, 2)), DataType(string), None)
    """
    if spark_type.startswith("decimal("):
        precision, scale = spark_type.removeprefix("decimal(").removesuffix(")").split(",")
        return pa.decimal128(int(precision), int(scale))
    if spark_type.startswith(("string", "char", "varchar")):
        return pa.string()
    return _ARROW_OF_SPARK.get(spark_type)
