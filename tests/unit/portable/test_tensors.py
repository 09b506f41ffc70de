"""Every value of every kind of column is stored, in one layout a file; bad data are a finding."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.columns import RAGGED, TENSORS, Column
from tests.entries import write
from tests.unit.portable.one_column import (
    INF,
    MATRIX,
    MATRIX_TYPE,
    NAN,
    NESTED,
    PAIR,
    ROW_BYTES,
    TRIPLE,
    VECTOR,
    VECTOR_TYPE,
    files,
    finding_of,
    flat,
    plan,
    read,
    read_all,
    shaped,
    wide_batch,
    write_one,
)

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
