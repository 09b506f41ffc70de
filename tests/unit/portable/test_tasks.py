"""What a task of Spark writes: every value, in row groups of the asked size, or one finding and no file."""

from __future__ import annotations

import base64
import datetime as dt
import gc
import json
import threading
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from pyspark import TaskContext

from converter.portable import deadlines, filesystems, parquet_file, tasks
from converter.portable.moments import from_json, mean_of
from converter.reading.decode import decode
from converter.reading.ragged import ragged_values
from converter.schema import Field
from converter.sources.spark.schema import SparkColumn
from tests.known_rows import wait_until
from tests.unit.known_tables import ALL, ID, RAGGED, SCALARS, TENSORS, Column, make_spec, record_batch, write

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


@pytest.fixture
def every_batch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch is small enough to be put together with the next one."""
    monkeypatch.setattr(tasks, "_COALESCE_ROWS", 1)


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
    return found


# Round trips


@pytest.mark.parametrize("nullable", [False, True])
def test_every_row_of_every_column_is_written_once(tmp_path: Path, nullable: bool) -> None:
    columns = [ID, *(Column(name=c.name, dtype=c.dtype, shape=c.shape, nullable=nullable) for c in ALL[1:])]
    plans = [column.plan() for column in columns]
    batches = [record_batch(columns, ids) for ids in (range(300), range(300, 301), range(301, 1000))]
    (report,) = write(batches, tmp_path, plans)
    assert files(tmp_path) == [report["name"]]
    assert sum(report["rows"]) == 1000
    assert report["bytes"] == (tmp_path / report["name"]).stat().st_size
    table = pq.read_table(tmp_path / report["name"])
    assert table.column_names == [column.name for column in columns]
    for column in columns:
        valid = column.valid(range(1000))
        assert report["nulls"][column.name] == 1000 - valid.sum()
        expected = column.values(list(range(1000)))
        if column.ndim:
            expected = [row.ravel().tolist() if ok else None for row, ok in zip(expected, valid, strict=True)]
            assert read(tmp_path, report, column) == expected
            assert report["shapes"][column.name] == (None if column.shape is None else list(column.shape))
            continue
        stored = table[column.name]
        if column.dtype.startswith("datetime64"):
            stored = stored.cast(pa.int32() if column.dtype == "datetime64[D]" else pa.int64())
            expected = expected.astype("int64")
        listed = expected if isinstance(expected, list) else expected.tolist()
        assert stored.to_pylist() == [value if ok else None for value, ok in zip(listed, valid, strict=True)]


INF, NAN = float("inf"), float("nan")
EXTREMES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "bool": (pa.bool_(), [True, False, None]),
    "int8": (pa.int8(), [-(2**7), 2**7 - 1, 0, None]),
    "int16": (pa.int16(), [-(2**15), 2**15 - 1, 0, None]),
    "int32": (pa.int32(), [-(2**31), 2**31 - 1, 0, None]),
    "int64": (pa.int64(), [-(2**63), 2**63 - 1, 2**53 + 1, None]),
    "float32": (pa.float32(), [float(np.finfo("f4").max), float(np.finfo("f4").tiny), NAN, INF, -INF, -0.0, None]),
    "float64": (pa.float64(), [float(np.finfo("f8").max), 5e-324, NAN, INF, -INF, -0.0, None]),
    "datetime64[D]": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), dt.date(1970, 1, 1), None]),
    "datetime64[us]": (
        pa.timestamp("us", tz="UTC"),
        [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999), None],  # noqa: DTZ001
    ),
    "str": (pa.string(), ["", "žluťoučký 🐟\n\x00", "a" * 10_000, None]),
    "bytes": (pa.binary(), [b"", b"\x00\xff", b"a" * 10_000, None]),
}


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", EXTREMES)
def test_extreme_values_of_scalars_are_written_exactly(tmp_path: Path, dtype: str) -> None:
    arrow_type, values = EXTREMES[dtype]
    (report,) = write_one(tmp_path, plan("scalar", dtype, 0), pa.array(values, arrow_type))
    found = pq.read_table(tmp_path / report["name"])["x"].to_pylist()
    if dtype == "datetime64[us]":
        found = [None if value is None else value.replace(tzinfo=None) for value in found]
    assert repr(found) == repr(values)
    assert report["nulls"] == {"x": 1}


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [name for name in EXTREMES if name not in ("str", "bytes") and "date" not in name])
@pytest.mark.parametrize("form", ["fixed", "ragged", "nested"])
def test_extreme_values_of_tensors_are_written_exactly(tmp_path: Path, dtype: str, form: str) -> None:
    arrow_type, values = EXTREMES[dtype]
    values = values[:-1]
    rows: list[Any] = [values, values[::-1], None]
    kind = pa.list_(arrow_type)
    if form == "ragged":
        rows += [[], values[:1]]
    if form == "nested":
        rows, kind = [None if row is None else [row, row[::-1]] for row in rows], pa.list_(kind)
    column = plan("tensor", dtype, 2 if form == "nested" else 1)
    (report,) = write_one(tmp_path, column, pa.array(rows, kind))
    assert repr(read(tmp_path, report, column)) == repr(
        [None if row is None else np.array(row, dtype).ravel().tolist() for row in rows]
    )
    shapes = {"fixed": [len(values)], "ragged": None, "nested": [2, len(values)]}
    assert report["shapes"] == {"x": shapes[form]}


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_doubles_become_what_the_column_says(tmp_path: Path) -> None:
    values = [0.1, 1e300, -1e300, 1 / 3]
    with np.errstate(over="ignore"):
        expected = np.array(values, "f4").tolist()
    (report,) = write_one(tmp_path, plan("scalar", "float32", 0), pa.array(values))
    assert read(tmp_path, report, plan("scalar", "float32", 0)) == expected


# Row groups and files


WIDE = plan("tensor", "float64", 1)
ROW_BYTES = 8 * 16


def wide_batch(rows: range) -> pa.Array:
    numbers = np.arange(rows.start * 16, rows.stop * 16, dtype=np.float64)
    return pa.FixedSizeListArray.from_arrays(pa.array(numbers), 16).cast(pa.list_(pa.float64()))


def assert_row_groups(directory: Path, reports: list[dict[str, Any]], num_rows: int, row_group_bytes: int) -> None:
    counts = [count for report in reports for count in report["rows"]]
    sizes = [size for report in reports for size in report["row_group_bytes"]]
    assert sum(counts) == num_rows
    assert sizes == [count * ROW_BYTES for count in counts]
    assert all(0.5 * row_group_bytes <= size <= 1.5 * row_group_bytes for size in sizes), sizes
    for report in reports:
        footer = pq.read_metadata(directory / report["name"])
        assert [footer.row_group(index).num_rows for index in range(footer.num_row_groups)] == report["rows"]
    found = np.array(read_all(directory, reports, WIDE)).ravel()
    np.testing.assert_array_equal(found, np.arange(num_rows * 16))


@pytest.mark.parametrize("num_rows", [10_000, 10_240, 12_799, 12_801, 15_000])
@pytest.mark.parametrize("batch_rows", [20_000, 4096, 700, 33])
def test_row_groups_have_about_the_asked_size(tmp_path: Path, num_rows: int, batch_rows: int) -> None:
    row_group_bytes = 2560 * ROW_BYTES
    cuts = [range(start, min(start + batch_rows, num_rows)) for start in range(0, num_rows, batch_rows)]
    reports = write_one(tmp_path, WIDE, *map(wide_batch, cuts), row_group_bytes=row_group_bytes)
    assert len(reports) == 1
    assert_row_groups(tmp_path, reports, num_rows, row_group_bytes)


def test_a_row_larger_than_a_row_group_is_one_of_its_own(tmp_path: Path) -> None:
    (report,) = write_one(tmp_path, WIDE, wide_batch(range(5)), row_group_bytes=16)
    assert report["rows"] == [1] * 5
    assert np.array(read(tmp_path, report, WIDE)).ravel().tolist() == list(range(80))


@pytest.mark.parametrize("batch_rows", [20_000, 512])
def test_a_partition_beyond_the_size_of_a_file_is_cut_into_several(tmp_path: Path, batch_rows: int) -> None:
    row_group_bytes, file_bytes, num_rows = 512 * ROW_BYTES, 2048 * ROW_BYTES, 10_000
    cuts = [range(start, min(start + batch_rows, num_rows)) for start in range(0, num_rows, batch_rows)]
    reports = write_one(
        tmp_path, WIDE, *map(wide_batch, cuts), row_group_bytes=row_group_bytes, file_bytes=file_bytes, partition=7
    )
    assert len(reports) == 5
    assert [report["name"] for report in reports] == [f"part-00007-00000001-{index:04d}.parquet" for index in range(5)]
    assert files(tmp_path) == [report["name"] for report in reports]
    assert all(report["bytes"] < file_bytes + 1.6 * row_group_bytes for report in reports)
    assert_row_groups(tmp_path, reports, num_rows, row_group_bytes)


def test_no_rows_make_no_file_and_no_folder(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    assert write([], directory, [WIDE]) == []
    assert write_one(directory, WIDE, wide_batch(range(0))) == []
    assert not directory.exists()


def test_empty_batches_between_others_change_nothing(tmp_path: Path) -> None:
    with_empty = write_one(
        tmp_path / "a", WIDE, *(wide_batch(range(a, b)) for a, b in [(0, 0), (0, 9), (9, 9), (9, 20)])
    )
    without = write_one(tmp_path / "b", WIDE, wide_batch(range(20)))
    assert with_empty == without


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "snappy"])
def test_files_are_compressed_as_asked_and_have_page_checksums(tmp_path: Path, compression: str) -> None:
    (report,) = write_one(tmp_path, WIDE, wide_batch(range(100)), compression=compression)
    footer = pq.read_metadata(tmp_path / report["name"])
    expected = "UNCOMPRESSED" if compression == "none" else compression.upper()
    assert footer.row_group(0).column(0).compression == expected
    with pq.ParquetFile(tmp_path / report["name"], page_checksum_verification=True) as file:
        assert file.read().num_rows == 100
    # One bit of the data, in the middle of the column's only page.
    data = bytearray((tmp_path / report["name"]).read_bytes())
    data[len(data) // 4] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    with (
        pq.ParquetFile(tmp_path / "flipped", page_checksum_verification=True) as file,
        pytest.raises(OSError, match=r"CRC checksum verification failed|[Cc]orrupt"),
    ):
        file.read()


# Layouts: a shape once one is known, ragged for ever after a second one


PAIR, TRIPLE = [1.0, 2.0], [3.0, 4.0, 5.0]
LAYOUTS: dict[str, tuple[list[list[Any]], list[Any]]] = {
    "one shape": ([[PAIR], [PAIR]], [[2]]),
    "fixed, then ragged": ([[PAIR, PAIR], [PAIR, TRIPLE]], [[2], None]),
    "fixed, then another": ([[PAIR], [TRIPLE]], [[2], None]),
    "ragged, then fixed": ([[PAIR, TRIPLE], [PAIR]], [None]),
    "fixed, ragged, fixed": ([[PAIR], [TRIPLE], [PAIR]], [[2], None]),
    "nulls first": ([[None, None], [PAIR, None]], [[2]]),
    "nulls first, then ragged": ([[None], [PAIR, TRIPLE]], [None]),
    "nulls last": ([[PAIR], [None]], [[2]]),
    "nulls, fixed, ragged": ([[None], [PAIR], [TRIPLE, None]], [[2], None]),
    "ragged, then nulls": ([[PAIR, TRIPLE], [None]], [None]),
    "nulls alone": ([[None], [None, None]], ["unknown"]),
    "nulls inside": ([[PAIR, None, PAIR], [None, PAIR]], [[2]]),
    "nulls inside ragged": ([[PAIR, None, TRIPLE, None, []]], [None]),
    "empty arrays alone": ([[[], []]], [None]),
    "empty arrays and nulls": ([[[], None]], [None]),
    "empty, then fixed": ([[[]], [PAIR]], [None]),
    "fixed, then empty": ([[PAIR], [[]]], [[2], None]),
    "empty among fixed": ([[PAIR, [], PAIR]], [None]),
}


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("coalesced", [False, True])
def test_a_file_has_one_layout_and_all_its_rows(
    tmp_path: Path, kind: str, coalesced: bool, request: pytest.FixtureRequest
) -> None:
    batches, layouts = LAYOUTS[kind]
    if not coalesced:
        request.getfixturevalue("every_batch_counts")
    arrays = [pa.array(batch, pa.list_(pa.float32())) for batch in batches]
    reports = write_one(tmp_path, plan(), *arrays)
    assert read_all(tmp_path, reports, plan()) == [row for batch in batches for row in batch]
    assert files(tmp_path) == sorted(report["name"] for report in reports)
    if coalesced:
        assert len(reports) == 1
    else:
        assert [report["shapes"].get("x", "unknown") for report in reports] == layouts
    for report in reports:
        stored = pq.read_schema(tmp_path / report["name"]).field("x").type
        shape = report["shapes"].get("x")
        assert stored == (pa.binary() if shape is None else pa.binary(4 * shape[0]))


@pytest.mark.usefixtures("every_batch_counts")
def test_nulls_that_fill_a_row_group_before_the_first_shape_lose_nothing(tmp_path: Path) -> None:
    nulls, rows = pa.nulls(50, pa.list_(pa.float64())), wide_batch(range(50))
    # A second column makes the rows of nulls large enough to be written before a shape is known.
    batches = [
        pa.RecordBatch.from_arrays([tensor, wide_batch(range(start, start + 50))], names=["c0", "c1"])
        for start, tensor in [(0, nulls), (50, nulls), (100, rows), (150, nulls)]
    ]
    other = plan(dtype="float64", name="y")
    reports = write(batches, tmp_path, [plan(dtype="float64"), other], row_group_bytes=20 * ROW_BYTES)
    assert sum(len(report["rows"]) for report in reports) >= 8
    expected = [*[None] * 100, *(np.arange(i * 16, i * 16 + 16.0).tolist() for i in range(50)), *[None] * 50]
    assert read_all(tmp_path, reports, plan(dtype="float64")) == expected
    assert np.array(read_all(tmp_path, reports, other)).ravel().tolist() == list(range(3200))


@pytest.mark.usefixtures("every_batch_counts")
def test_the_first_row_that_differs_is_counted_from_the_partitions_beginning(tmp_path: Path) -> None:
    rows = [[PAIR] * 5, [PAIR, None, TRIPLE, PAIR], [[]]]
    reports = write_one(tmp_path, plan(), *(pa.array(batch, pa.list_(pa.float32())) for batch in rows))
    assert {json.dumps(report["odd_rows"]) for report in reports} == {'{"x": 7}'}
    nulls_first = pa.array([None, PAIR, PAIR, TRIPLE], pa.list_(pa.float32()))
    (report,) = write_one(tmp_path / "b", plan(), nulls_first)
    assert report["odd_rows"] == {"x": 3}


@pytest.mark.parametrize("column", [*TENSORS, RAGGED], ids=lambda column: column.name)
@pytest.mark.parametrize("nullable", [False, True])
def test_slices_of_larger_batches_are_written_as_they_are(tmp_path: Path, column: Column, nullable: bool) -> None:
    known = Column(name=column.name, dtype=column.dtype, shape=column.shape, nullable=nullable)
    whole = known.arrow(list(range(100)))
    parts = [whole.slice(3, 20), whole.slice(23, 1), whole.slice(24, 70)]
    reports = write_one(tmp_path, known.plan(), *parts)
    straight = write_one(tmp_path / "b", known.plan(), known.arrow(list(range(3, 94))))
    assert read_all(tmp_path, reports, known) == read_all(tmp_path / "b", straight, known)
    # A single batch comes without being put together with others.
    single = write_one(tmp_path / "c", known.plan(), whole.slice(3, 91))
    assert single == straight


# Vectors and matrices


def vector(values: Sequence[float], *, sparse: bool = False) -> dict[str, Any]:
    if not sparse:
        return {"type": 1, "size": None, "indices": None, "values": list(values)}
    places = [index for index, value in enumerate(values) if value]
    return {"type": 0, "size": len(values), "indices": places, "values": [values[place] for place in places]}


def known_vector(row: int, size: int = 5) -> list[float]:
    return [float((row * 7 + index) % 11) if (row >> index) & 1 else 0.0 for index in range(size)]


VECTORS = {
    "dense": [vector(known_vector(row)) for row in range(40)],
    "sparse": [vector(known_vector(row), sparse=True) for row in range(40)],
    "mixed": [vector(known_vector(row), sparse=row % 3 == 1) for row in range(40)],
    "null": [None if row % 4 == 0 else vector(known_vector(row), sparse=row % 3 == 1) for row in range(40)],
}


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("sliced", [False, True])
def test_vectors_are_written_dense(tmp_path: Path, kind: str, sliced: bool) -> None:
    rows = VECTORS[kind]
    array = pa.array(rows, VECTOR_TYPE)
    array = array.slice(3, 30) if sliced else array
    (report,) = write_one(tmp_path, VECTOR, array)
    known = [None if row is None else known_vector(index) for index, row in enumerate(rows)]
    assert read(tmp_path, report, VECTOR) == (known[3:33] if sliced else known)
    assert report["shapes"] == {"x": [5]}


def test_sparse_vectors_without_a_value_are_zeros(tmp_path: Path) -> None:
    rows = [vector([0.0] * 3, sparse=True), vector([0.0, 2.0, 0.0], sparse=True), vector([0.0] * 3, sparse=True)]
    (report,) = write_one(tmp_path, VECTOR, pa.array(rows, VECTOR_TYPE))
    assert read(tmp_path, report, VECTOR) == [[0.0] * 3, [0.0, 2.0, 0.0], [0.0] * 3]


def test_vectors_of_different_sizes_are_ragged(tmp_path: Path) -> None:
    sizes = [3, 0, 5, 1]
    rows = [vector(known_vector(row + 9, size), sparse=row % 2 == 0) for row, size in enumerate(sizes)]
    (report,) = write_one(tmp_path, VECTOR, pa.array(rows, VECTOR_TYPE))
    assert read(tmp_path, report, VECTOR) == [known_vector(row + 9, size) for row, size in enumerate(sizes)]
    assert report["shapes"] == {"x": None}
    assert report["lengths"] == {"x": [0, 5]}


def test_vectors_that_are_all_null_have_no_shape(tmp_path: Path) -> None:
    (report,) = write_one(tmp_path, VECTOR, pa.nulls(3, VECTOR_TYPE))
    assert read(tmp_path, report, VECTOR) == [None] * 3
    assert report["shapes"] == {}


def matrix(values: np.ndarray, *, sparse: bool = False, transposed: bool = False) -> dict[str, Any]:
    """As Spark's MatrixUDT stores it: by columns, or by rows where it is transposed."""
    by_outer = values if transposed else values.T
    height, width = values.shape
    row = {"type": 1, "numRows": height, "numCols": width, "isTransposed": transposed}
    if not sparse:
        return row | {"colPtrs": None, "rowIndices": None, "values": by_outer.ravel().tolist()}
    places = [np.flatnonzero(line) for line in by_outer]
    return row | {
        "type": 0,
        "colPtrs": np.cumsum([0, *map(len, places)]).tolist(),
        "rowIndices": np.concatenate(places).tolist(),
        "values": [by_outer[line, place] for line, found in enumerate(places) for place in found.tolist()],
    }


def known_matrix(row: int) -> np.ndarray:
    values = (np.arange(6).reshape(2, 3) + row * 3) % 7
    return np.where((row >> np.arange(6).reshape(2, 3)) & 1, values, 0).astype(float)


MATRICES: dict[str, Any] = {
    "dense": lambda row: matrix(known_matrix(row)),
    "dense transposed": lambda row: matrix(known_matrix(row), transposed=True),
    "sparse": lambda row: matrix(known_matrix(row), sparse=True),
    "sparse transposed": lambda row: matrix(known_matrix(row), sparse=True, transposed=True),
    "mixed": lambda row: matrix(known_matrix(row), sparse=bool(row & 1), transposed=bool(row & 2)),
    "null": lambda row: None if row % 3 == 0 else matrix(known_matrix(row), sparse=bool(row & 1), transposed=row > 30),
}


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("sliced", [False, True])
def test_matrices_are_written_row_by_row(tmp_path: Path, kind: str, sliced: bool) -> None:
    rows = [MATRICES[kind](row) for row in range(64)]
    array = pa.array(rows, MATRIX_TYPE)
    (report,) = write_one(tmp_path, MATRIX, array.slice(5, 50) if sliced else array)
    known = [None if row is None else known_matrix(index).ravel().tolist() for index, row in enumerate(rows)]
    assert read(tmp_path, report, MATRIX) == (known[5:55] if sliced else known)
    assert report["shapes"] == {"x": [2, 3]}


@pytest.mark.usefixtures("every_batch_counts")
@pytest.mark.parametrize("batches", [[[(2, 3), (3, 2), (1, 1)]], [[(2, 3)], [(3, 2)]]], ids=["inside one", "between"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_different_shapes_keep_them(
    tmp_path: Path, batches: list[list[tuple[int, int]]], sparse: bool, transposed: bool
) -> None:
    known = [[np.arange(1.0, 7.0)[: shape[0] * shape[1]].reshape(shape) for shape in batch] for batch in batches]
    arrays = [
        pa.array([matrix(one, sparse=sparse, transposed=transposed) for one in batch], MATRIX_TYPE) for batch in known
    ]
    reports = write_one(tmp_path, MATRIX, *arrays)
    assert shaped(tmp_path, reports, MATRIX) == [one.tolist() for batch in known for one in batch]
    assert reports[-1]["shapes"] == {"x": None}
    assert reports[-1]["odd_rows"] == {"x": 1}


# Findings


NESTED = {1: pa.list_(pa.int64()), 2: pa.list_(pa.list_(pa.int64())), 3: pa.list_(pa.list_(pa.list_(pa.int64())))}


@pytest.mark.parametrize(
    ("ndim", "row"),
    [(1, [1, None]), (2, [[1, 2], None]), (2, [[1, None]]), (3, [[[1], None]]), (3, [None, [[1]]]), (3, [[[None]]])],
)
def test_a_null_inside_an_array_is_a_finding(tmp_path: Path, ndim: int, row: Any) -> None:
    array = pa.array([None, row], NESTED[ndim])
    found = finding_of(write_one(tmp_path, plan("tensor", "int64", ndim), array))
    assert found == {"kind": "null_element", "column": "x"}
    assert files(tmp_path) == []


@pytest.mark.usefixtures("every_batch_counts")
@pytest.mark.parametrize(
    ("ndim", "odd", "batches"),
    [
        (2, 1, [[[[1, 2]], [[1], [2]]]]),
        (2, 1, [[[[1, 2]]], [[[1], [2]]]]),
        (2, 2, [[None], [[[1, 2]]], [[[1, 2, 3]]], [None, [[1, 2]]]]),
        (3, 1, [[[[[1], [2]]], [[[1]], [[2]]]]]),
        (3, 1, [[[[[1, 2]]]], [[[[1]], [[2]]]]]),
    ],
    ids=["inside", "between", "after nulls", "3-d inside", "3-d between"],
)
def test_nested_arrays_of_different_shapes_keep_them(tmp_path: Path, ndim: int, odd: int, batches: list[Any]) -> None:
    arrays = [pa.array(batch, NESTED[ndim]) for batch in batches]
    column = plan("tensor", "int64", ndim)
    reports = write_one(tmp_path, column, *arrays)
    assert shaped(tmp_path, reports, column) == [row for batch in batches for row in batch]
    assert reports[-1]["shapes"] == {"x": None}
    assert reports[-1]["odd_rows"] == {"x": odd}


@pytest.mark.parametrize(("ndim", "row"), [(2, [[1, 2], [3]]), (3, [[[1], [2]], [[3]]]), (3, [[[1, 2], [3]]])])
def test_inner_arrays_of_different_lengths_are_a_finding(tmp_path: Path, ndim: int, row: Any) -> None:
    found = finding_of(write_one(tmp_path, plan("tensor", "int64", ndim), pa.array([None, row], NESTED[ndim])))
    assert found == {"kind": "jagged", "column": "x"}
    assert files(tmp_path) == []


@pytest.mark.parametrize("row", [[[1, 2], [3, 4], [5, 6]], [[1, 2, 3], [4, 5, 6]], [[1, 2]], [[]], []])
def test_a_nested_row_that_contradicts_its_declared_shape_is_a_finding(tmp_path: Path, row: Any) -> None:
    array = pa.array([None, [[1, 2], [3, 4]], row], NESTED[2])
    found = finding_of(write_one(tmp_path, plan("tensor", "int64", 2, (2, 2)), array))
    shape = (len(row), len(row[0]) if row else 0)
    assert found == {"kind": "shape", "column": "x", "row": 2, "found": f"shape {shape}", "expected": "shape (2, 2)"}


@pytest.mark.usefixtures("every_batch_counts")
@pytest.mark.parametrize("ndim", [2, 3])
def test_nested_arrays_of_one_shape_are_written_in_the_order_of_c(tmp_path: Path, ndim: int) -> None:
    shape = (2, 3) if ndim == 2 else (2, 1, 3)
    rows = [(np.arange(6) + 10 * row).reshape(shape).tolist() for row in range(6)]
    arrays = [pa.array([None, *rows[:3]], NESTED[ndim]), pa.array(rows[3:], NESTED[ndim])]
    column = plan("tensor", "int64", ndim)
    (report,) = write_one(tmp_path, column, *arrays)
    assert read(tmp_path, report, column) == [None, *flat(rows)]
    assert report["shapes"] == {"x": list(shape)}


@pytest.mark.usefixtures("every_batch_counts")
def test_a_row_that_contradicts_its_declared_shape_is_a_finding_with_its_number(tmp_path: Path) -> None:
    column = plan(shape=(2, 2))
    good, bad = [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0]
    arrays = [pa.array(rows, pa.list_(pa.float32())) for rows in ([good] * 5, [None, good, bad, bad])]
    found = finding_of(write_one(tmp_path, column, *arrays))
    assert found == {"kind": "shape", "column": "x", "row": 7, "found": "3 numbers", "expected": "4 numbers"}
    assert files(tmp_path) == []
    (report,) = write_one(tmp_path, column, arrays[0])
    assert report["shapes"] == {"x": [2, 2]}


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_task_leaves_no_writer_in_memory(tmp_path: Path, is_bad: bool) -> None:
    rows = [[1.0, 2.0]] * 10_000 + [[1.0, None]] * is_bad
    for _ in range(3):
        write_one(tmp_path, plan(dtype="float64"), pa.array(rows, pa.list_(pa.float64())), row_group_bytes=1024)
    gc.collect()
    assert [one for one in gc.get_objects() if type(one) is pq.ParquetWriter] == []


def test_a_finding_after_files_were_closed_leaves_none_of_them(tmp_path: Path) -> None:
    good = [wide_batch(range(start, start + 5000)) for start in (0, 5000, 10_000)]
    bad = pa.array([[1.0, None]], pa.list_(pa.float64()))
    seen: list[list[str]] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in batches_of(*good, bad):
            seen.append(files(tmp_path))
            yield batch

    reports = write(batches(), tmp_path, [WIDE], row_group_bytes=64 << 10, file_bytes=256 << 10)
    assert finding_of(reports)["kind"] == "null_element"
    assert len(seen[-1]) > 2
    assert files(tmp_path) == []


class TaskKilled(BaseException):
    """What ends a task from outside is no Exception."""


@pytest.mark.parametrize("kind", [ValueError, TaskKilled, KeyboardInterrupt])
@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_an_error_in_the_middle_passes_and_leaves_no_file(
    tmp_path: Path, kind: type[BaseException], num_batches: int
) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from batches_of(*(wide_batch(range(start * 5000, start * 5000 + 5000)) for start in range(num_batches)))
        assert bool(files(tmp_path)) == bool(num_batches)
        raise kind("the rows before failed")

    with pytest.raises(kind, match="the rows before failed"):
        write(batches(), tmp_path, [WIDE], row_group_bytes=64 << 10, file_bytes=256 << 10)
    assert files(tmp_path) == []


def test_a_disk_that_refuses_a_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = open

    class FullDisk:
        """A file that takes so many bytes and no more."""

        def __init__(self, file: Any) -> None:
            self.file, self.left = file, 100_000

        def write(self, data: memoryview) -> int:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(28, "No space left on device")
            return int(self.file.write(data))

        def close(self) -> None:
            self.file.close()

    monkeypatch.setattr(
        filesystems, "open", lambda path, mode, buffering: FullDisk(real(path, mode, buffering)), raising=False
    )
    with pytest.raises(OSError, match="No space left on device"):
        write_one(tmp_path, WIDE, wide_batch(range(10_000)), row_group_bytes=64 << 10)
    assert files(tmp_path) == []

    def refuse(*_: Any) -> None:
        raise PermissionError("and nothing can be removed")

    # The first error is the one to be seen.
    monkeypatch.setattr(parquet_file, "remove_file", refuse)
    with pytest.raises(OSError, match="No space left on device"):
        write_one(tmp_path, WIDE, wide_batch(range(10_000)), row_group_bytes=64 << 10)


class Slow:
    """A remote file that takes its time, fails from so many bytes on, or hangs."""

    def __init__(self, *, fails_at: int = 1 << 60, hangs: bool = False, seconds: float = 0.001) -> None:
        self.fails_at, self.hangs, self.seconds, self.taken = fails_at, hangs, seconds, bytearray()
        self.is_released = threading.Event()

    def write(self, piece: bytes) -> int:
        time.sleep(self.seconds)
        if self.hangs:
            self.is_released.wait()
        if len(self.taken) + len(piece) > self.fails_at:
            raise OSError(28, "No space left on device")
        self.taken += piece
        return len(piece)


def write_behind(raw: Slow, timeout_seconds: float = 60) -> Any:
    return parquet_file._write_behind(raw, {"timeout_seconds": timeout_seconds}, "/cache/part")


@pytest.mark.parametrize("waiting_bytes", [1, 1000, 1 << 20])
def test_what_is_written_behind_arrives_in_its_order(monkeypatch: pytest.MonkeyPatch, waiting_bytes: int) -> None:
    monkeypatch.setattr(parquet_file, "_WAITING_BYTES", waiting_bytes)
    parts = [bytes([number]) * (number * 7 % 50) for number in range(60)]
    raw = Slow()
    write, finish, _ = write_behind(raw)
    for part in parts:
        write(pa.py_buffer(part) if len(part) % 2 else part)
    finish()
    assert raw.taken == b"".join(parts)


def test_a_store_that_is_slower_than_the_encoder_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "_WAITING_BYTES", 6)
    raw = Slow(hangs=True)
    write, finish, _ = write_behind(raw)
    written: list[bytes] = []

    def write_all() -> None:
        for number in range(9):
            write(bytes([number]) * 3)
            written.append(b"")
        finish()

    encoder = threading.Thread(target=write_all)
    encoder.start()
    wait_until(lambda: len(written) == 2)
    encoder.join(0.05)
    assert len(written) == 2
    raw.is_released.set()
    encoder.join(60)
    assert raw.taken == b"".join(bytes([number]) * 3 for number in range(9))


def test_what_fails_behind_is_raised_before() -> None:
    raw = Slow(fails_at=5)
    write, finish, _ = write_behind(raw)

    def write_on() -> None:
        while True:
            write(b"abc")

    with pytest.raises(OSError, match="No space left on device"):
        write_on()
    with pytest.raises(OSError, match="No space left on device"):
        finish()
    assert raw.taken == b"abc"


def test_who_gives_up_waits_for_no_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LAST_WAIT_SECONDS", 0.1)
    monkeypatch.setattr(parquet_file, "LAST_WAIT_SECONDS", 0.1)
    raw = Slow(hangs=True)
    write, _, stop = write_behind(raw)
    for _ in range(8):
        write(b"abc")
    stop()
    raw.is_released.set()
    # What waited is dropped, and the thread ends.
    wait_until(lambda: deadlines.WRITING_THREAD not in [thread.name for thread in threading.enumerate()])
    assert raw.taken in (b"", b"abc")


@pytest.mark.parametrize("is_full", [False, True])
def test_a_store_that_hangs_is_given_up_behind(monkeypatch: pytest.MonkeyPatch, is_full: bool) -> None:
    monkeypatch.setattr(parquet_file, "_WAITING_BYTES", 3 if is_full else 1 << 20)
    raw = Slow(hangs=True)
    write, finish, stop = write_behind(raw, timeout_seconds=0.2)
    write(b"abc")
    with pytest.raises(TimeoutError, match=r"made no progress for 0\.2 seconds \(timeout_seconds\) at /cache/part"):
        write(b"abc") if is_full else finish()
    raw.is_released.set()
    stop()


def test_a_store_that_is_slow_and_goes_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "_WAITING_BYTES", 6)
    raw = Slow(seconds=0.1)
    write, finish, _ = write_behind(raw, timeout_seconds=2)
    begin = time.monotonic()
    for _ in range(25):
        write(b"abc")
    finish()
    assert time.monotonic() - begin > 2
    assert len(raw.taken) == 75


class Remote(MemoryFileSystem):
    """A store whose requests of one kind hang until they are released."""

    protocol = "remote"
    cachable = False
    hangs: ClassVar[str] = ""
    is_released: ClassVar[threading.Event] = threading.Event()

    def _open(self, path: str, *_: Any, **__: Any) -> Any:
        self.ask("create")
        return RemoteFile(self, path, mode="wb", block_size=1 << 16)

    def ask(self, request: str) -> None:
        if self.hangs == request:
            self.is_released.wait()


class RemoteFile(AbstractBufferedFile):
    """Sends whole blocks, as adlfs does."""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.ask("close" if final else "send")
        if final:
            MemoryFileSystem().pipe_file(self.path, b"whole")
        return True


@pytest.mark.parametrize("hangs", ["create", "send", "close"])
def test_a_request_that_hangs_ends_the_task_and_commits_nothing(monkeypatch: pytest.MonkeyPatch, hangs: str) -> None:
    fsspec.register_implementation("remote", Remote, clobber=True)
    monkeypatch.setattr(deadlines, "LAST_WAIT_SECONDS", 1.0)
    monkeypatch.setattr(parquet_file, "LAST_WAIT_SECONDS", 1.0)
    monkeypatch.setattr(Remote, "hangs", hangs)
    monkeypatch.setattr(Remote, "is_released", threading.Event())
    spec = make_spec(f"/given-up/{hangs}", [WIDE], row_group_bytes=64 << 10)
    spec["store"] = {"protocol": "remote", "options": {}, "timeout_seconds": 0.3}
    with pytest.raises(TimeoutError, match=r"made no progress for 0\.[34] seconds \(timeout_seconds\) at /given-up/"):
        tasks._write(iter(batches_of(wide_batch(range(10_000)))), spec, partition=0, attempt=1)
    assert not Remote().find(f"/given-up/{hangs}")
    Remote.is_released.set()


def test_what_a_client_says_leaves_a_task_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark writes a task's error into its logs, with the errors behind it."""
    key = "a-key-that-nobody-may-see"

    def say(text: str, cause: str) -> None:
        def fail(*_: Any, **__: Any) -> None:
            try:
                raise ValueError(cause)
            except ValueError as error:
                raise RuntimeError(text) from error

        monkeypatch.setattr(tasks, "_write", fail)

    context = SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 0)
    monkeypatch.setattr(TaskContext, "get", staticmethod(lambda: context))
    spec = {"store": {"protocol": "abfs", "options": {"account_key": key}, "timeout_seconds": 1}}
    write_partition = tasks.make_write_partition(spec)
    for text, cause in (
        (f"refused: {key}", "x"),
        ("refused", f"{key} is wrong"),
        ("refused: PUT https://host/c/b?comp=block&sig=abcd", "x"),
        ("refused", "Connection timeout to host https://host/c/b?sig=abcd"),
    ):
        say(text, cause)
        with pytest.raises(OSError, match=r"^RuntimeError: refused") as raised:
            next(write_partition(iter(())))
        shown = "".join(traceback.format_exception(raised.value))
        assert key not in shown
        assert "abcd" not in shown
    say("refused", "x")
    with pytest.raises(RuntimeError, match=r"^refused$"):
        next(write_partition(iter(())))


def test_what_is_written_at_once_is_handed_over_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "_STEP_BYTES", 4)
    raw = Slow()
    write = parquet_file._write_blocks(raw, {"timeout_seconds": 60}, "/cache/part")
    sizes: list[int] = []
    monkeypatch.setattr(raw, "write", lambda piece: (sizes.append(len(piece)), raw.taken.extend(piece)))
    write(pa.py_buffer(b"0123456789"))
    write(b"")
    assert (sizes, raw.taken) == ([4, 4, 2], b"0123456789")


def test_a_disk_that_takes_a_write_in_parts_gets_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (straight,) = write_one(tmp_path / "a", WIDE, wide_batch(range(1000)))
    real = open

    class Reluctant:
        """A file that takes at most a thousand bytes at once, as an unbuffered one may."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: memoryview) -> int:
            return int(self.file.write(data[:1000]))

        def close(self) -> None:
            self.file.close()

    def reluctant(path: Any, mode: str, buffering: int = -1) -> Any:
        return Reluctant(real(path, mode, buffering)) if mode == "wb" else real(path, mode)

    monkeypatch.setattr(filesystems, "open", reluctant, raising=False)
    (report,) = write_one(tmp_path / "b", WIDE, wide_batch(range(1000)))
    assert report == straight
    assert (tmp_path / "b" / report["name"]).read_bytes() == (tmp_path / "a" / report["name"]).read_bytes()


# Reports


def test_equal_rows_have_equal_digests_whatever_the_task(tmp_path: Path) -> None:
    columns = [column.plan() for column in ALL]
    one = write([record_batch(ALL, range(500))], tmp_path, columns, partition=0, attempt=1)
    two = write([record_batch(ALL, range(500))], tmp_path, columns, partition=3, attempt=99)
    parts = write([record_batch(ALL, range(200)), record_batch(ALL, range(200, 500))], tmp_path, columns, partition=4)
    assert one[0]["digests"] == two[0]["digests"] == parts[0]["digests"]
    assert one[0]["name"] != two[0]["name"]


@pytest.mark.parametrize("changed", range(len(SCALARS)))
def test_one_other_value_is_another_digest(tmp_path: Path, changed: int) -> None:
    columns = [column.plan() for column in SCALARS]
    batch = record_batch(SCALARS, range(500))
    others = batch.column(changed).to_pylist()
    present = [value for value in others if value != others[250]]
    others[250] = present[0]
    array = pa.array(others, batch.column(changed).type)
    other = batch.set_column(changed, batch.schema.field(changed), array)
    one, two = (write([rows], tmp_path / name, columns) for name, rows in (("a", batch), ("b", other)))
    assert one[0]["digests"] != two[0]["digests"]
    assert one[0]["rows"] == two[0]["rows"]


@pytest.mark.parametrize("compression", ["none", "zstd", "auto"])
@pytest.mark.parametrize("row", [0, 19_999])
def test_one_other_number_in_a_large_page_is_another_digest(tmp_path: Path, row: int, compression: str) -> None:
    rows = wide_batch(range(20_000))
    assert rows.nbytes > 10 * parquet_file._MAX_HEADER_BYTES
    numbers = rows.flatten().to_numpy().copy()
    numbers[row * 16] += 0.5
    other = pa.FixedSizeListArray.from_arrays(pa.array(numbers), 16).cast(rows.type)
    one, same, two = (
        write_one(tmp_path / name, WIDE, array, compression=compression)[0]["digests"]
        for name, array in (("a", rows), ("b", rows), ("c", other))
    )
    assert one == same
    assert one != two


def test_every_row_group_has_its_digest(tmp_path: Path) -> None:
    (report,) = write_one(tmp_path, WIDE, wide_batch(range(10_000)), row_group_bytes=2560 * ROW_BYTES)
    assert len(report["digests"]) == len(report["rows"]) == len(report["row_group_bytes"]) > 3
    assert len(set(report["digests"])) == len(report["digests"])


def test_spans_are_those_of_the_row_groups(tmp_path: Path) -> None:
    column = plan("scalar", "int64", 0)
    values = np.arange(10_000) ** 2
    (report,) = write_one(tmp_path, column, pa.array(values), row_group_bytes=2000 * 8)
    cuts = np.cumsum([0, *report["rows"]])
    assert len(cuts) > 4
    spans = [values[stop - 1] - values[start] for start, stop in pairwise(cuts)]
    assert report["spans"] == {"x": [float(sum(spans)), 0.0, 9999.0**2]}


@pytest.mark.parametrize("tz", ["UTC", "America/New_York", None])
def test_spans_of_times_do_not_depend_on_the_zone(tmp_path: Path, tz: str | None) -> None:
    # The clocks of New York were set back in between: a span of local times would be an hour less.
    micros = pa.array([1_730_600_000_000_000, 1_730_700_000_000_000], pa.int64()).cast(pa.timestamp("us", tz=tz))
    (report,) = write_one(tmp_path, plan("scalar", "datetime64[us]", 0), micros)
    assert report["spans"] == {"x": [1e11, 1_730_600_000_000_000.0, 1_730_700_000_000_000.0]}


def test_spans_of_dates_are_days(tmp_path: Path) -> None:
    days = pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31)])
    (report,) = write_one(tmp_path, plan("scalar", "datetime64[D]", 0), days)
    assert report["spans"] == {"x": [3_652_058.0, -719_162.0, 2_932_896.0]}


@pytest.mark.parametrize(
    ("dtype", "stored", "kind"),
    [
        ("datetime64[D]", [-(2**31), 3_789_391, 2**31 - 1], pa.date32()),
        ("datetime64[us]", [-(2**62), 2**60, 2**62], pa.timestamp("us", tz="UTC")),
    ],
)
def test_spans_of_dates_and_times_that_python_does_not_have(
    tmp_path: Path, dtype: str, stored: list[int], kind: pa.DataType
) -> None:
    values = pa.array(stored, pa.int32() if dtype == "datetime64[D]" else pa.int64()).cast(kind)
    (report,) = write_one(tmp_path, plan("scalar", dtype, 0), values)
    assert report["spans"] == {"x": [float(stored[2]) - float(stored[0]), float(stored[0]), float(stored[2])]}


@pytest.mark.parametrize(("partition", "is_told"), [(0, True), (1, True), (2, False), (10**6, False)])
def test_the_end_of_a_file_is_told_while_those_of_as_many_files_are_kept(
    tmp_path: Path, partition: int, is_told: bool
) -> None:
    def report(end_bytes: int, attempt: int = 1) -> dict[str, Any]:
        spec = make_spec(tmp_path, [ID.plan()], end_bytes=end_bytes)
        (found,) = tasks._write(iter([record_batch([ID], [1])]), spec, partition=partition, attempt=attempt)
        return found

    before = report(0)
    assert "end" not in before
    data = (tmp_path / before["name"]).read_bytes()
    end = data[-8 - int.from_bytes(data[-8:-4], "little") :]
    # One column, one row group: one head of four bytes.
    found = report(2 * (len(end) + 4), attempt=2)
    assert zlib.crc32(end) == found["footer_crc32"]
    assert ("end" in found) == is_told
    if is_told:
        footer, heads = (zlib.decompress(base64.b64decode(part)) for part in found["end"])
        assert footer == end
        assert heads == zlib.crc32(data[4:24]).to_bytes(4, "little")


def test_the_heads_of_tiny_pages_and_of_large_ones_are_those_of_the_file(tmp_path: Path) -> None:
    columns = list(ALL)
    batches = [record_batch(columns, range(start, start + 50)) for start in range(0, 1000, 50)]
    plans = [column.plan() for column in columns]
    spec = make_spec(tmp_path, plans, row_group_bytes=2048, file_bytes=32 << 10, end_bytes=1 << 20)
    reports = tasks._write(iter(batches), spec, partition=0, attempt=1)
    assert len(reports) > 1
    for report in reports:
        data = (tmp_path / report["name"]).read_bytes()
        footer, heads = (zlib.decompress(base64.b64decode(part)) for part in report["end"])
        assert data.endswith(footer)
        metadata = pq.read_metadata(pa.BufferReader(data))
        starts = [
            metadata.row_group(group).column(column).data_page_offset
            for group in range(metadata.num_row_groups)
            for column in range(metadata.num_columns)
        ]
        assert np.frombuffer(heads, "<u4").tolist() == [zlib.crc32(data[start : start + 20]) for start in starts]


def test_no_row_group_has_more_rows_than_pyarrow_writes_into_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_MAX_ROW_GROUP_ROWS", 100)
    (report,) = write([record_batch([ID], range(start, start + 70)) for start in (0, 70, 140)], tmp_path, [ID.plan()])
    assert report["rows"] == [100, 100, 10]
    assert pq.read_table(tmp_path / report["name"])["id"].to_pylist() == list(range(210))


@pytest.mark.usefixtures("every_batch_counts")
def test_the_reports_hold_each_columns_moments_once(tmp_path: Path) -> None:
    columns = [ID, *TENSORS, RAGGED]
    batches = [record_batch(columns, range(start, start + 100)) for start in range(0, 1000, 100)]
    plans = [column.plan() for column in columns]
    reports = write(batches, tmp_path, plans, row_group_bytes=4096, file_bytes=16 << 10)
    assert len(reports) > 1
    assert [index for index, report in enumerate(reports) if "moments" in report] == [len(reports) - 1]
    for column in columns:
        closed = from_json(reports[-1]["moments"][column.name])
        values = column.values(list(range(1000)))
        numbers = np.concatenate(values) if column.shape is None else np.asarray(values).reshape(1000, -1)
        numbers = numbers.reshape(-1, 1 if column.shape is None else numbers.shape[1]).astype(float)
        assert closed["count"].tolist() == [len(numbers)] * numbers.shape[1]
        np.testing.assert_allclose(mean_of(closed), numbers.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(np.sqrt(closed["m2"] / len(numbers)), numbers.std(axis=0), rtol=1e-9)
        assert (closed["min"], closed["max"]) == (numbers.min(), numbers.max())


@pytest.mark.usefixtures("every_batch_counts")
def test_moments_of_a_column_that_becomes_ragged_are_of_all_its_numbers(tmp_path: Path) -> None:
    rows = [[PAIR, PAIR], [PAIR, TRIPLE], [[7.0]]]
    reports = write_one(tmp_path, plan(), *(pa.array(batch, pa.list_(pa.float32())) for batch in rows))
    numbers = np.array([1, 2, 1, 2, 1, 2, 3, 4, 5, 7.0])
    closed = from_json(reports[-1]["moments"]["x"])
    assert closed["count"].tolist() == [10]
    np.testing.assert_allclose(mean_of(closed), [numbers.mean()], rtol=1e-12)
    np.testing.assert_allclose(closed["m2"], [numbers.var() * 10], rtol=1e-12)
    assert reports[-1]["lengths"] == {"x": [1, 3]}


def test_nulls_are_in_no_moment(tmp_path: Path) -> None:
    column = plan("scalar", "int64", 0)
    (report,) = write_one(tmp_path, column, pa.array([None, 5, None, 7]))
    closed = from_json(report["moments"]["x"])
    assert (closed["count"].tolist(), mean_of(closed).tolist(), closed["min"], closed["max"]) == ([2], [6.0], 5, 7)
    (report,) = write_one(tmp_path / "b", plan(), pa.array([None, PAIR, None], pa.list_(pa.float32())))
    closed = from_json(report["moments"]["x"])
    assert (closed["count"].tolist(), mean_of(closed).tolist()) == ([1, 1], PAIR)
    assert report["lengths"] == {"x": [2, 2]}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("values", [[INF, 1.0], [-INF, NAN], [NAN], [INF, -INF]], ids=str)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_moments_are_json_that_every_parser_reads(tmp_path: Path, dtype: str, values: list[float]) -> None:
    scalar, tensor = plan("scalar", dtype, 0), plan("tensor", dtype, 1, name="y")
    kind = pa.float32() if dtype == "float32" else pa.float64()
    batch = pa.RecordBatch.from_arrays(
        [pa.array(values, kind), pa.array([[value] for value in values], pa.list_(kind))], names=["c0", "c1"]
    )
    (report,) = write([batch], tmp_path, [scalar, tensor])
    assert report["rows"] == [len(values)]
    # What the manifest keeps of them has to be JSON as the standard has it, without NaN and Infinity.
    assert json.loads(json.dumps(report["moments"], allow_nan=False)) == report["moments"]


# Reports of several tasks together


def folded(reports: Sequence[dict[str, Any]], cuts: Sequence[int]) -> list[dict[str, Any]]:
    texts = [json.dumps(report) for report in reports]
    parts = [texts[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(texts)], strict=True)]
    batches = [tasks._report_batch([0] * len(part), part) for part in parts]
    out = list(tasks.fold_reports(iter(batches)))
    return [json.loads(text) for batch in out for text in batch.column("report").to_pylist()]


@pytest.mark.parametrize("cuts", [[], [1], [1, 2], [0, 3]], ids=str)
def test_folding_merges_moments_and_passes_everything_else(tmp_path: Path, cuts: list[int]) -> None:
    column = TENSORS[0]
    parts = [range(100), range(100, 250), range(250, 1000)]
    reports = [
        report
        for index, ids in enumerate(parts)
        for report in write([record_batch([column], ids)], tmp_path, [column.plan()], partition=index)
    ]
    found = folded(reports, cuts)
    assert found[:-1] == [{name: report[name] for name in report if name != "moments"} for report in reports]
    closed = from_json(found[-1]["moments"]["vector"])
    values = column.values(list(range(1000))).astype(float)
    assert closed["count"].tolist() == [1000] * 3
    np.testing.assert_allclose(mean_of(closed), values.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(np.sqrt(closed["m2"] / 1000), values.std(axis=0), rtol=1e-9)


def test_folding_reports_of_different_shapes_takes_all_numbers_alike(tmp_path: Path) -> None:
    rows = [PAIR, TRIPLE]
    reports = [
        report
        for index, row in enumerate(rows)
        for report in write_one(tmp_path, plan(), pa.array([row], pa.list_(pa.float32())), partition=index)
    ]
    closed = from_json(folded(reports, [1])[-1]["moments"]["x"])
    assert closed["count"].tolist() == [5]
    assert mean_of(closed).tolist() == [3.0]


def test_folding_passes_a_finding() -> None:
    finding = {"finding": {"kind": "null_element", "column": "x"}}
    assert folded([finding], []) == [finding, {"moments": {}}]


# The other two functions that travel


def test_packed_batches_are_what_the_executors_would_store(tmp_path: Path) -> None:
    columns = [ID, *TENSORS]
    spec = make_spec(tmp_path, [column.plan() for column in columns])
    batches = [record_batch(columns, range(start, start + 50)) for start in (0, 50)]
    packed = list(tasks.make_pack_batches(spec["columns"])(iter(batches)))
    assert sum(batch.num_rows for batch in packed) == 100
    for index, column in enumerate(columns):
        rows = [row for batch in packed for row in batch.column(index).to_pylist()]
        expected = column.values(list(range(100)))
        if column.ndim:
            shape = np.array([*expected.shape[1:], 0][: len(expected.shape[1:]) + 1 & ~1], "<i4")
            header = shape.tobytes() if column.ndim > 1 else b""
            assert rows == [header + row.tobytes() for row in expected]
        else:
            assert rows == expected.tolist()


@pytest.mark.usefixtures("every_batch_counts")
def test_what_packing_finds_is_raised_with_its_mark(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, [plan("tensor", "int64", 2)])
    batches = batches_of(*(pa.array(rows, NESTED[2]) for rows in ([[[1, 2]]], [[[1], [2, 3]]])))
    with pytest.raises(ValueError, match=r'^converter finding: \{"kind": "jagged", "column": "x"\}$'):
        list(tasks.make_pack_batches(spec["columns"])(iter(batches)))


def test_a_probe_writes_its_file_and_says_which_pyarrow(tmp_path: Path) -> None:
    (answer,) = tasks.make_probe(str(tmp_path / "deep" / "down"), None)(iter(batches_of(pa.array([1]))))
    assert json.loads(answer.column("report")[0].as_py()) == {"pyarrow": pa.__version__}
    assert (tmp_path / "deep" / "down" / tasks.PROBE_NAME).read_bytes() == b"reached"


def test_a_probe_that_cannot_write_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (answer,) = tasks.make_probe(str(tmp_path / "file" / "below"), None)(iter([]))
    assert "NotADirectoryError" in json.loads(answer.column("report")[0].as_py())["error"]
