"""Rows of Parquet files as another reader gives them, beside those of a converter, in order and with their dtypes."""

from __future__ import annotations

import decimal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from converter import DatasetConverter, make_parquet_converter
from tests.rows import concatenate

DTYPES = {
    pa.bool_(): "bool",
    pa.int8(): "int8",
    pa.uint8(): "int16",
    pa.int16(): "int16",
    pa.uint16(): "int32",
    pa.int32(): "int32",
    pa.uint32(): "int64",
    pa.int64(): "int64",
    pa.float16(): "float32",
    pa.float32(): "float32",
    pa.float64(): "float64",
    pa.date32(): "datetime64[D]",
    pa.date64(): "datetime64[D]",
    pa.string(): "str",
    pa.large_string(): "str",
    pa.string_view(): "str",
    pa.binary(): "bytes",
    pa.large_binary(): "bytes",
    pa.binary_view(): "bytes",
}
"""The dtype in which a column arrives that another reader gives this type; whole numbers without a sign as in Spark."""


def rows_by_sparks_rule(table: pa.Table, filters: Sequence[tuple[str, str, Any]]) -> pa.Table:
    """The rows for which all filters hold: as Arrow compares, but NaN is greater than any number."""
    kept = pc.scalar(True)
    for name, sign, value in filters:
        one = pq.filters_to_expression([(name, sign, value)])
        if sign in (">", ">=") and pa.types.is_floating(table.schema.field(name).type):
            one |= pc.is_nan(pc.field(name))
        kept &= one
    return table.filter(kept)


_MICROSECONDS = {"s": (1_000_000, 1), "ms": (1000, 1), "us": (1, 1), "ns": (1, 1000)}


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list, in whichever form."""
    return "list" in str(kind).split("<", 1)[0]


def is_decimal(kind: pa.DataType) -> bool:
    """Whether its numbers are decimals: they arrive as the nearest double, but for its last digit."""
    while is_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_decimal(kind))


def dtype_of(kind: pa.DataType) -> str:
    """The dtype in which a column of this type arrives."""
    while is_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_timestamp(kind):
        return "datetime64[us]"
    return "float64" if pa.types.is_decimal(kind) else DTYPES[kind]


def flatten(table: pa.Table) -> pa.Table:
    """With a column `a.b` for each member of a struct."""
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return table


def open_files(path: Any, expected: pa.Table, **arguments: Any) -> DatasetConverter:
    """A converter in the files' own types; the lists of a row may have any length."""
    shapes = {field.name: None for field in flatten(expected).schema if is_list(field.type)}
    return make_parquet_converter(path, **{"float_dtype": None, "shapes": shapes} | arguments)


def assert_reads(path: Any, expected: pa.Table, **arguments: Any) -> None:
    """A converter of `path` has the columns and rows of `expected`, in that order."""
    with open_files(path, expected, **arguments) as converter:
        assert_same_rows(converter, expected)


def assert_same_rows(converter: DatasetConverter, expected: pa.Table, **options: Any) -> None:
    """The same columns in the same order and of the same dtypes, and the same rows in the same order."""
    expected = flatten(expected)
    assert list(converter.schema.names) == expected.column_names
    for field in expected.schema:
        assert converter.schema[field.name].dtype == dtype_of(field.type), field.name
    assert len(converter) == expected.num_rows
    found = read(converter, **options)
    for name in expected.column_names:
        places = 14 if is_decimal(expected.schema.field(name).type) else None
        assert cells_of(found, name, places) == expected_cells(expected, name, places), name


def read(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    """All rows; nulls beside a mask, lists as they are."""
    known = {"batch_size": 7, "nulls": "mask", "ragged": "nested", "cur_shard": 0, "shard_count": 1}
    with converter.make_batch_reader(**known | options) as reader:
        return concatenate(list(reader))


def cells_of(batch: Mapping[str, Any], name: str, places: int | None = None) -> list[Any]:
    """A column of a converter's rows."""
    values = batch[name]
    if values.dtype.kind == "M":
        values = values.astype(np.int64)
    valid = batch.get(f"{name}__valid", np.ones(len(values), bool)).tolist()
    return [plain(cell, places) if there else None for cell, there in zip(values.tolist(), valid, strict=True)]


def expected_cells(table: pa.Table, name: str, places: int | None = None) -> list[Any]:
    """The same column as another reader gives it: days, and microseconds that are rounded down, as whole numbers."""
    column = table[name]
    if pa.types.is_timestamp(column.type):
        times, per = _MICROSECONDS[column.type.unit]
        return [None if value is None else value * times // per for value in column.cast(pa.int64()).to_pylist()]
    if pa.types.is_date(column.type):
        column = column.cast(pa.date32()).cast(pa.int32())
    return [plain(value, places) for value in column.to_pylist()]


def plain(value: Any, places: int | None = None) -> Any:
    """A value that is equal to itself, NaN as well, and to no other one, minus zero as well; or to so many places."""
    if isinstance(value, (list, np.ndarray)):
        return [plain(item, places) for item in value]
    if isinstance(value, (float, decimal.Decimal, np.floating)):
        return float(value).hex() if places is None else f"{float(value):.{places}e}"
    return value


def in_order(paths: Iterable[Path], root: Path) -> list[Path]:
    """Files in the order in which a converter reads them: that of their names below the folder."""
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())
