"""Values are used as they lie in the file only where that is proven; then they are the ones that Arrow decodes."""

from __future__ import annotations

import datetime as dt
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.pages import _read_page_header, find_plain_column
from converter.schema import Field

RANDOM = np.random.default_rng(0)
ONE_PAGE: Any = {
    "compression": "none", "use_dictionary": False, "data_page_size": 1 << 30, "max_rows_per_page": 1 << 30,
}  # fmt: skip


def views(path: Path, field: Field) -> list[Any]:
    """What is found of the only column in each row group."""
    mapped = np.frombuffer(path.read_bytes(), np.uint8)
    metadata = pq.read_metadata(path)
    column = find_plain_column(metadata, 0, field, metadata.schema.to_arrow_schema().field(0))
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    return [None if column is None else column.values(mapped, group, group.num_rows) for group in groups]


def write(path: Path, array: pa.Array, *, nullable: bool = True, **options: Any) -> Path:
    schema = pa.schema([pa.field("x", array.type, nullable=nullable)])
    pq.write_table(pa.table([array], schema=schema), path, **ONE_PAGE | options)
    return path


def tensor(values: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array([row.tobytes() for row in values], pa.binary(values[0].nbytes))


@pytest.mark.parametrize("nullable", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
def test_numbers_are_found(tmp_path: Path, nullable: bool, checksum: bool, statistics: bool, dtype: str) -> None:
    values = (RANDOM.normal(0, 1e6, 70_000)).astype(dtype)
    path = write(tmp_path / "x", pa.array(values), nullable=nullable, row_group_size=30_000,
                 write_page_checksum=checksum, write_statistics=statistics)  # fmt: skip
    found = views(path, Field(name="x", dtype=dtype))
    assert [len(view) for view in found] == [30_000, 30_000, 10_000]
    np.testing.assert_array_equal(np.concatenate(found), values, strict=True)


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 4), (1000,)])
@pytest.mark.parametrize("dtype", ["int8", "bool", "float32", "float64"])
def test_tensors_are_found(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    values = RANDOM.integers(0, 2, (501, *shape)).astype(dtype)
    path = write(tmp_path / "x", tensor(values), row_group_size=200)
    found = views(path, Field(name="x", dtype=dtype, shape=shape))
    if dtype == "bool":
        assert found == [None] * 3
    else:
        np.testing.assert_array_equal(np.concatenate(found), values, strict=True)


def test_days_and_microseconds_are_found(tmp_path: Path) -> None:
    days = pa.array([dt.date(1, 1, 1), dt.date(9999, 12, 31)])
    (found,) = views(write(tmp_path / "d", days), Field(name="x", dtype="datetime64[D]"))
    assert found.tolist() == days.view(pa.int32()).to_pylist()
    for zone in (None, "UTC"):
        times = pa.array([-1, 2**55], pa.timestamp("us", zone))
        (found,) = views(write(tmp_path / "t", times), Field(name="x", dtype="datetime64[us]"))
        assert found.tolist() == [-1, 2**55]


LONG = Field(name="x", dtype="int64")


@pytest.mark.parametrize(
    ("array", "field", "options"),
    [
        (pa.array(RANDOM.integers(0, 9, 5000)), LONG, {"compression": "snappy"}),
        (pa.array(RANDOM.integers(0, 2**62, 5000)), LONG, {"compression": "zstd"}),
        (pa.array(RANDOM.integers(0, 2**62, 5000)), LONG, {"compression": "lz4"}),
        (pa.array(RANDOM.integers(0, 9, 5000)), LONG, {"use_dictionary": True}),
        (pa.array(RANDOM.integers(0, 2**62, 5000)), LONG, {"use_dictionary": True, "dictionary_pagesize_limit": 64}),
        (pa.array(RANDOM.integers(0, 9, 5000)), LONG, {"data_page_version": "2.0"}),
        (pa.array(RANDOM.integers(0, 9, 5000)), LONG, {"column_encoding": {"x": "DELTA_BINARY_PACKED"}}),
        (pa.array(RANDOM.integers(0, 9, 5000)), LONG, {"use_byte_stream_split": ["x"]}),
        (pa.array(RANDOM.integers(0, 9, 5000)), LONG, {"data_page_size": 100, "write_batch_size": 10}),
        (pa.array(RANDOM.integers(0, 9, 5000)), LONG, {"max_rows_per_page": 4999}),
        (pa.array([1, None, 3]), LONG, {}),
        (pa.array([None] * 3, pa.int64()), LONG, {}),
        (pa.array([None] + [7] * 5000), LONG, {}),
        (pa.array([1, 2], pa.int32()), LONG, {}),
        (pa.array([1.0, 2.0]), LONG, {}),
        (pa.array([1, 2], pa.uint64()), LONG, {}),
        (pa.array([1, 2], pa.timestamp("ms")), Field(name="x", dtype="datetime64[us]"), {}),
        (pa.array([1, 2], pa.time64("us")), Field(name="x", dtype="datetime64[us]"), {}),
        (pa.array([1, 2], pa.int64()), Field(name="x", dtype="datetime64[us]"), {}),
        (pa.array([decimal.Decimal(1)], pa.decimal128(10, 2)), Field(name="x", dtype="float64"), {}),
        (pa.array([1.0, 2.0]), Field(name="x", dtype="float32"), {}),
        (pa.array([1, 2], pa.int16()), Field(name="x", dtype="int16"), {}),
        (pa.array([True, False]), Field(name="x", dtype="bool"), {}),
        (pa.array(["a"]), Field(name="x", dtype="str"), {}),
        (pa.array([b"ab", b"cd"], pa.binary()), Field(name="x", dtype="int8", shape=(2,)), {}),
        (pa.array([b"ab", b"cd"], pa.binary(2)), Field(name="x", dtype="int8", shape=(3,)), {}),
        (pa.array([b"ab", None], pa.binary(2)), Field(name="x", dtype="int8", shape=(2,)), {}),
        (pa.array([[1, 2]], pa.list_(pa.int64())), Field(name="x", dtype="int64", shape=(2,)), {}),
        (pa.array([{"a": 1}], pa.struct([("a", pa.int64())])), LONG, {}),
    ],
    ids=str,
)
def test_what_does_not_lie_there_as_numbers_is_left_to_arrow(
    tmp_path: Path, array: pa.Array, field: Field, options: Any
) -> None:
    assert all(view is None for view in views(write(tmp_path / "x", array, **options), field))


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.none() | st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=200),
    group_rows=st.integers(1, 80),
    page_bytes=st.sampled_from([1, 64, 1 << 30]),
    version=st.sampled_from(["1.0", "2.0"]),
    compression=st.sampled_from(["none", "snappy"]),
    dictionary=st.booleans(),
)
def test_what_is_found_is_what_arrow_decodes(
    tmp_path_factory: pytest.TempPathFactory,
    values: list[int | None],
    group_rows: int,
    page_bytes: int,
    version: str,
    compression: str,
    dictionary: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "property.parquet"
    pages = {"data_page_size": page_bytes, "data_page_version": version, "write_batch_size": 7}
    stored = {"row_group_size": group_rows, "compression": compression, "use_dictionary": dictionary}
    write(path, pa.array(values, pa.int32()), **pages, **stored)
    parquet = pq.ParquetFile(path)
    for index, view in enumerate(views(path, Field(name="x", dtype="int32"))):
        decoded = parquet.read_row_group(index).column("x").to_pylist()
        if view is not None:
            assert view.tolist() == decoded
        elif None not in decoded and page_bytes == 1 << 30 and version == "1.0":
            assert compression != "none" or dictionary


@given(st.binary(max_size=40))
def test_any_bytes_are_a_header_or_none(data: bytes) -> None:
    found = _read_page_header(data)
    assert found is None or isinstance(found, int)


def test_a_chunk_that_ends_behind_the_file_is_left_to_arrow(tmp_path: Path) -> None:
    path = write(tmp_path / "x", pa.array(np.arange(1000)))
    metadata = pq.read_metadata(path)
    column = find_plain_column(metadata, 0, LONG, metadata.schema.to_arrow_schema().field(0))
    assert column is not None
    cut = np.frombuffer(path.read_bytes()[:4000], np.uint8)
    assert column.values(cut, metadata.row_group(0), 1000) is None
