"""One column as a task of Spark gets and writes it, and what its files hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from converter.reading.decode import decode
from converter.reading.ragged import ragged_values
from converter.schema import Field
from converter.sources.spark.schema import SparkColumn
from tests.columns import Column
from tests.entries import write

VECTOR_TYPE = pa.struct(
    [("type", pa.int8()), ("size", pa.int32()), ("indices", pa.list_(pa.int32())), ("values", pa.list_(pa.float64()))]
)

MATRIX_TYPE = pa.struct(
    [
        ("type", pa.int8()),
        ("numRows", pa.int32()),
        ("numCols", pa.int32()),
        ("colPtrs", pa.list_(pa.int32())),
        ("rowIndices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
        ("isTransposed", pa.bool_()),
    ]
)


def plan(
    kind: str = "tensor", dtype: str = "float32", ndim: int = 1, shape: tuple[int, ...] | None = None, name: str = "x"
) -> SparkColumn:
    return SparkColumn(name=name, path=(name,), kind=kind, dtype=dtype, ndim=ndim, shape=shape, narrowed_from=None)


VECTOR = plan("vector", "float64")

MATRIX = plan("matrix", "float64", 2)


def batches_of(*arrays: pa.Array) -> list[pa.RecordBatch]:
    return [pa.RecordBatch.from_arrays([array], names=["c0"]) for array in arrays]


def write_one(directory: Path, column: SparkColumn, *arrays: pa.Array, **options: Any) -> list[dict[str, Any]]:
    """The reports of one column that came in these batches, each one a batch of its own to the writer."""
    return write(batches_of(*arrays), directory, [column], **options)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def read(directory: Path, report: dict[str, Any], column: SparkColumn | Column) -> list[Any]:
    """A column of one file: per row its numbers (flat, for tensors), or None."""
    table = pq.read_table(directory / report["name"])
    assert table.num_rows == sum(report["rows"])
    stored = table[column.name].to_pylist()
    if column.ndim == 0:
        return stored
    return [None if row is None else np.frombuffer(row, column.dtype).tolist() for row in stored]


def read_all(directory: Path, reports: Sequence[dict[str, Any]], column: SparkColumn | Column) -> list[Any]:
    return [row for report in reports for row in read(directory, report, column)]


def shaped(directory: Path, reports: Sequence[dict[str, Any]], column: SparkColumn) -> list[Any]:
    """A ragged column of all files, as our reader gives it."""
    field = Field(name=column.name, dtype=column.dtype, shape=None, ragged_ndim=column.ndim)
    rows: list[Any] = []
    for report in reports:
        table = pq.read_table(directory / report["name"])
        decoded = decode(table[column.name], field, fill=0, stored=table.schema.field(column.name))
        found = [row.tolist() for row in ragged_values(decoded.values, field).split()]
        valid = [True] * len(found) if decoded.valid is None else decoded.valid.tolist()
        rows += [row if is_valid else None for row, is_valid in zip(found, valid, strict=True)]
    return rows


def flat(rows: Sequence[Any]) -> list[Any]:
    return [None if row is None else np.asarray(row).ravel().tolist() for row in rows]


def finding_of(reports: list[dict[str, Any]]) -> dict[str, Any]:
    assert len(reports) == 1
    assert list(reports[0]) == ["finding"]
    found: dict[str, Any] = reports[0]["finding"]
    assert found.pop("partition") >= 0
    return found


INF, NAN = float("inf"), float("nan")

WIDE = plan("tensor", "float64", 1)

ROW_BYTES = 8 * 16


def wide_batch(rows: range) -> pa.Array:
    numbers = np.arange(rows.start * 16, rows.stop * 16, dtype=np.float64)
    return pa.FixedSizeListArray.from_arrays(pa.array(numbers), 16).cast(pa.list_(pa.float64()))


PAIR, TRIPLE = [1.0, 2.0], [3.0, 4.0, 5.0]

NESTED = {1: pa.list_(pa.int64()), 2: pa.list_(pa.list_(pa.int64())), 3: pa.list_(pa.list_(pa.list_(pa.int64())))}
