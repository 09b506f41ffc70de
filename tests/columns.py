"""Known columns without Spark: as a task receives them (Arrow), and the values that a batch must hold.

Every value follows from the row's id and the column's name, as in `tests/rows.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from converter.schema import Field
from converter.sources.spark.schema import SparkColumn

ARROW_TYPES = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "datetime64[D]": pa.date32(),
    "datetime64[us]": pa.timestamp("us", tz="UTC"),
    "str": pa.string(),
    "bytes": pa.binary(),
}


def numbers(name: str, ids: Any) -> np.ndarray:
    """One number for each (row id, column name); of the column `id` the row id itself."""
    if name == "id":
        return np.array(ids, np.int64)
    return (np.asarray(ids, np.int64) * 7919 + zlib.crc32(name.encode())) % 1_000_003


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a known table: as Spark would hand it over, and as a batch must hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None = ()
    """None: a row of length `numbers % 4`."""

    nullable: bool = False

    @property
    def ndim(self) -> int:
        return 1 if self.shape is None else len(self.shape)

    @property
    def field(self) -> Field:
        return Field(name=self.name, dtype=self.dtype, shape=self.shape, has_nulls=self.nullable)

    def plan(self, shape: tuple[int, ...] | None = None) -> SparkColumn:
        """The column as the driver describes it to tasks; `shape` is what a user declares."""
        kind = "tensor" if self.ndim else "scalar"
        return SparkColumn(
            name=self.name,
            path=(self.name,),
            kind=kind,
            dtype=self.dtype,
            ndim=self.ndim,
            shape=shape,
            narrowed_from=None,
        )

    def valid(self, ids: Any) -> np.ndarray:
        """Where a value is present; about a fifth is null."""
        return (numbers(self.name, ids) % 5 != 0) if self.nullable else np.ones(len(ids), np.bool_)

    def values(self, ids: Any, *, fill: Any = 0) -> Any:
        """The values of these rows: an array `(rows, *shape)`, or a list of objects or of rows of varying length."""
        number = numbers(self.name, ids)
        valid = self.valid(ids)
        if self.dtype in ("str", "bytes"):
            texts = [f"{self.name}·{value}" if value % 7 else "" for value in number.tolist()]
            values: list[Any] = [text.encode() for text in texts] if self.dtype == "bytes" else texts
            empty = fill or values[0][:0] if values else fill
            return [value if ok else empty for value, ok in zip(values, valid, strict=True)]
        if self.shape is None:
            rows = [_cast(value + np.arange(value % 4), self.dtype) for value in number]
            return [row if ok else row[:0] for row, ok in zip(rows, valid, strict=True)]
        steps = np.arange(int(np.prod(self.shape))).reshape(self.shape)
        array = _cast(number.reshape(-1, *[1] * len(self.shape)) * (1 if self.shape == () else 3) + steps, self.dtype)
        array[~valid] = fill
        return array

    def arrow(self, ids: Any) -> pa.Array:
        """The rows as Spark's Arrow batches hold them: scalars or (nested) lists."""
        values, valid = self.values(ids), self.valid(ids)
        if self.dtype.startswith("datetime64"):
            values = values.astype("int32" if self.dtype == "datetime64[D]" else "int64")
        listed = values if isinstance(values, list) else values.tolist()
        listed = [_plain(value) if ok else None for value, ok in zip(listed, valid, strict=True)]
        return pa.array(listed, self.arrow_type)

    @property
    def arrow_type(self) -> pa.DataType:
        kind = ARROW_TYPES[self.dtype]
        for _ in range(self.ndim):
            kind = pa.list_(kind)
        return kind


def _cast(number: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bool":
        return number % 2 == 1
    if dtype == "int8":
        return (number % 251 - 125).astype(np.int8)
    if dtype == "int16":
        return (number % 60_013 - 30_000).astype(np.int16)
    if dtype.startswith("float"):
        return (number % 262_147 / 4 - 1000).astype(dtype)
    if dtype == "datetime64[us]":
        return (number * 1_000_003 - 10**11).view(dtype)
    if dtype == "datetime64[D]":
        return (number % 50_000 - 20_000).view(dtype)
    return number.astype(dtype)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


ID = Column(name="id", dtype="int64")

SCALARS = (
    ID,
    *(
        Column(name=f"a_{dtype}", dtype=dtype)
        for dtype in ("bool", "int8", "int16", "int32", "int64", "float32", "float64")
    ),
    Column(name="day", dtype="datetime64[D]"),
    Column(name="at", dtype="datetime64[us]"),
    Column(name="text", dtype="str"),
    Column(name="raw", dtype="bytes"),
)
TENSORS = (
    Column(name="vector", dtype="float32", shape=(3,)),
    Column(name="flags", dtype="bool", shape=(2,)),
    Column(name="grid", dtype="int32", shape=(2, 3)),
    Column(name="cube", dtype="float64", shape=(2, 1, 2)),
)
RAGGED = Column(name="words", dtype="int32", shape=None)
ALL = (*SCALARS, *TENSORS, RAGGED)


def record_batch(columns: Sequence[Column], ids: Iterable[int]) -> pa.RecordBatch:
    """One batch as `mapInArrow` hands it to a task: columns travel as c0, c1, …"""
    row_ids = list(ids)
    return pa.RecordBatch.from_arrays(
        [column.arrow(row_ids) for column in columns], names=[f"c{index}" for index in range(len(columns))]
    )


def assert_batch(batch: dict[str, Any], columns: Sequence[Column], ids: Sequence[int]) -> None:
    """Every column of a NumPy or torch batch holds exactly the rows `ids`, in this order, with its own dtype."""
    assert list(batch) == [column.name for column in columns]
    for column in columns:
        assert_column(batch[column.name], column, ids)


def assert_column(actual: Any, column: Column, ids: Sequence[int], *, fill: Any = 0) -> None:
    """The column holds exactly the values of these rows, and `fill` for each null."""
    expected = column.values(list(ids), fill=fill)
    if isinstance(expected, list):
        assert len(actual) == len(expected), column.name
        if column.dtype in ("str", "bytes"):
            assert list(actual) == expected, column.name
            return
        for actual_row, row in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(actual_row), row, err_msg=column.name)
            assert np.asarray(actual_row).dtype == row.dtype
        return
    if isinstance(actual, torch.Tensor):
        if column.dtype.startswith("datetime64"):
            expected = expected.astype("int32" if column.dtype == "datetime64[D]" else "int64")
        actual = actual.numpy()
    assert actual.dtype == expected.dtype, column.name
    assert actual.shape == expected.shape, column.name
    np.testing.assert_array_equal(actual, expected, err_msg=column.name)
