"""Values are used as they lie in the file only where that is proven; then they are the ones that Arrow decodes."""

from __future__ import annotations

import datetime as dt
import decimal
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import make_parquet_converter
from converter.parsed_footer import parse_end
from converter.places import Place
from converter.portable import footers
from converter.reading.pages import Chunk, PlainColumn, _are_all, _is_regular, _read_page_header, find_plain_column
from converter.schema import Field
from tests.properties import examples

RANDOM = np.random.default_rng(0)
ONE_PAGE: Any = {
    "compression": "none", "use_dictionary": False, "data_page_size": 1 << 30, "max_rows_per_page": 1 << 30,
}  # fmt: skip


def views(path: Path, field: Field) -> list[Any]:
    """What is found of the only column in each row group, its pages joined."""
    metadata = pq.read_metadata(path)
    column = find_plain_column(metadata, Place(0, 0, (), metadata.schema.to_arrow_schema().field(0)), field)
    buffer = pa.py_buffer(path.read_bytes())
    groups = range(metadata.num_row_groups)
    chunks = [None if column is None else find_chunk(column, path, group) for group in groups]
    found = [None if chunk is None or column is None else values_of(column, buffer, chunk) for chunk in chunks]
    return [None if pages is None else np.concatenate(pages) for pages in found]


def values_of(column: PlainColumn, buffer: pa.Buffer, chunk: Chunk) -> list[np.ndarray[Any, Any]] | None:
    """A chunk's pages; None if one of them is left to Arrow."""
    pages = list(column.pages(buffer, chunk))
    assert all(page is not None for page in pages[:-1])
    return None if pages[-1] is None else pages


def find_chunk(column: PlainColumn, path: Path, row_group: int = 0) -> Chunk | None:
    """Where the column lies in a row group."""
    with path.open("rb") as file:
        footer = parse_end(footers.end_of(file))
    return column.find_chunk(footer.chunk(row_group, column.leaf), footer.row_group_rows[row_group])


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


@pytest.mark.parametrize("nullable", [True, False])
@pytest.mark.parametrize("compression", ["none", "snappy"])
@pytest.mark.parametrize("shape", [(1,), (3, 4), (1000,)])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64"])
def test_bytes_of_one_length_are_found(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, compression: str, nullable: bool
) -> None:
    values = RANDOM.integers(0, 2, (501, *shape)).astype(dtype)
    array = pa.array([row.tobytes() for row in values], pa.binary())
    path = write(tmp_path / "x", array, nullable=nullable, row_group_size=200, compression=compression,
                 data_page_size=4096)  # fmt: skip
    found = views(path, Field(name="x", dtype=dtype, shape=shape))
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
        (pa.array(RANDOM.integers(0, 2**62, 5000)), LONG, {"compression": "lz4"}),
        (pa.array(RANDOM.integers(0, 9, 5000)), LONG, {"use_dictionary": True}),
        (pa.array(RANDOM.integers(0, 2**62, 5000)), LONG, {"use_dictionary": True, "dictionary_pagesize_limit": 64}),
        (pa.array(RANDOM.integers(0, 9, 5000)), LONG, {"data_page_version": "2.0"}),
        (pa.array(RANDOM.integers(0, 9, 5000)), LONG, {"column_encoding": {"x": "DELTA_BINARY_PACKED"}}),
        (pa.array(RANDOM.integers(0, 9, 5000)), LONG, {"use_byte_stream_split": ["x"]}),
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
        (pa.array([True, False]), Field(name="x", dtype="bool"), {}),
        (pa.array(["a"]), Field(name="x", dtype="str"), {}),
        (pa.array([b"ab", b"cde"], pa.binary()), Field(name="x", dtype="int8", shape=(2,)), {}),
        (pa.array([b"a", b"cde"], pa.binary()), Field(name="x", dtype="int8", shape=(2,)), {}),
        (pa.array([b"ab", None], pa.binary()), Field(name="x", dtype="int8", shape=(2,)), {}),
        (pa.array([b"ab"] * 9, pa.binary()), Field(name="x", dtype="int8", shape=(2,)), {"use_dictionary": True}),
        (pa.array([b"ab", b"cd"], pa.binary(2)), Field(name="x", dtype="int8", shape=(3,)), {}),
        (pa.array([b"ab", None], pa.binary(2)), Field(name="x", dtype="int8", shape=(2,)), {}),
        (pa.array([{"a": 1}], pa.struct([("a", pa.int64())])), LONG, {}),
        (pa.array([1, 2], pa.float16()), Field(name="x", dtype="float32"), {}),
        (pa.array([[1, 2], [3]], pa.list_(pa.int64())), Field(name="x", dtype="int64", shape=(2,)), {}),
        (pa.array([[1, 2], [3], [4, 5, 6]], pa.list_(pa.int64())), Field(name="x", dtype="int64", shape=(2,)), {}),
        (pa.array([[1, 2], None], pa.list_(pa.int64())), Field(name="x", dtype="int64", shape=(2,)), {}),
        (pa.array([[1, 2], []], pa.list_(pa.int64())), Field(name="x", dtype="int64", shape=(2,)), {}),
        (pa.array([[1, None]], pa.list_(pa.int64())), Field(name="x", dtype="int64", shape=(2,)), {}),
        (pa.array([[[1, 2]]], pa.list_(pa.list_(pa.int64()))), Field(name="x", dtype="int64", shape=(1, 2)), {}),
        (pa.array([[], []], pa.list_(pa.int64())), Field(name="x", dtype="int64", shape=(0,)), {}),
        (pa.array([1, 2]), Field(name="x", dtype="int64", shape=(1,)), {}),
        (pa.array([[1], [2]], pa.list_(pa.int64())), LONG, {}),
    ],
    ids=str,
)
def test_what_does_not_lie_there_as_numbers_is_left_to_arrow(
    tmp_path: Path, array: pa.Array, field: Field, options: Any
) -> None:
    assert all(view is None for view in views(write(tmp_path / "x", array, **options), field))


@examples(200)
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
        elif None not in decoded and version == "1.0":
            assert dictionary


COMPRESSIONS = ["none", "snappy", "zstd"]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("pages", [{}, {"data_page_size": 100, "write_batch_size": 10}, {"max_rows_per_page": 499}])
@pytest.mark.parametrize("nullable", [True, False])
def test_pages_of_others_are_found(tmp_path: Path, compression: str, pages: Any, nullable: bool) -> None:
    values = RANDOM.integers(0, 9, 5000)
    path = write(tmp_path / "x", pa.array(values), nullable=nullable, compression=compression, row_group_size=2000,
                 **pages)  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(views(path, LONG)), values, strict=True)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("length", [*range(1, 20), 24, 63, 64, 65, 500, 504, 505, 512, 3000])
def test_lists_of_one_length_are_found(tmp_path: Path, length: int, compression: str) -> None:
    values = RANDOM.normal(size=(max(2, 60_000 // length), length))
    lists = pa.array(list(values), pa.list_(pa.float64()))
    path = write(tmp_path / "x", lists, compression=compression, row_group_size=20_000, data_page_size=1 << 16)
    (found, *more) = views(path, Field(name="x", dtype="float64", shape=(length,)))
    np.testing.assert_array_equal(np.concatenate([found, *more]), values, strict=True)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(pa.float64(), "float32"), (pa.int8(), "int8"), (pa.int16(), "int16"), (pa.float32(), "float32")],
)
@pytest.mark.parametrize("is_list", [False, True])
def test_numbers_of_another_width_are_those_that_arrow_decodes(
    tmp_path: Path, stored: pa.DataType, dtype: str, is_list: bool
) -> None:
    numbers = RANDOM.normal(0, 50, 6000) if pa.types.is_floating(stored) else RANDOM.integers(-128, 128, 6000)
    if stored == pa.float64():
        numbers[:4] = [1e300, -1e300, np.nan, 1e-46]
    array = pa.array(numbers).cast(stored)
    field = Field(name="x", dtype=dtype)
    if is_list:
        array = pa.FixedSizeListArray.from_arrays(array, 6).cast(pa.list_(stored))
        field = Field(name="x", dtype=dtype, shape=(2, 3))
    (found,) = views(write(tmp_path / "x", array, compression="snappy"), field)
    with np.errstate(over="ignore"):
        wanted = numbers.astype(dtype)
    np.testing.assert_array_equal(found, wanted.reshape(found.shape), strict=True)
    assert found.shape[1:] == field.shape


@pytest.mark.parametrize("dtype", ["int16", "float64", "float32"])
def test_numbers_of_another_width_are_not_kept_once_they_were_read(dtype: str, tmp_path: Path) -> None:
    values = np.arange(400_000) % 1000
    write(tmp_path / "x.parquet", pa.array(values.astype(dtype)), nullable=False, row_group_size=20_000)
    held = []
    converter = make_parquet_converter(tmp_path)
    with converter.make_batch_reader(batch_size=1000, shuffle=True, shuffle_window_rows=40_000) as reader:
        tracemalloc.start()
        try:
            for _ in range(2):
                total = 0.0
                for batch in reader:
                    total += float(batch["x"].sum(dtype="float64"))
                del batch
                assert total == values.sum()
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    # In all they are 800 or 1,600 kB.
    assert max(held) < 400_000


@examples(300)
@given(
    rows=st.lists(st.none() | st.lists(st.none() | st.integers(0, 99), max_size=20), min_size=1, max_size=60)
    | st.tuples(st.integers(1, 20), st.integers(1, 300)).map(lambda one: [list(range(one[0]))] * one[1]),
    length=st.integers(1, 20),
    odd=st.none() | st.lists(st.integers(), max_size=21),
    place=st.integers(0, 300),
    page_bytes=st.sampled_from([1, 64, 1 << 30]),
    compression=st.sampled_from(["none", "zstd"]),
)
def test_lists_are_found_only_where_all_have_the_length(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[Any],
    length: int,
    odd: list[int] | None,
    place: int,
    page_bytes: int,
    compression: str,
) -> None:
    length = len(rows[0] or []) or length
    if odd is not None and place < len(rows):
        odd_row = [one % 2**31 for one in odd]
        rows = [*rows[:place], odd_row, *rows[place + 1 :]]
    path = tmp_path_factory.getbasetemp() / "lists.parquet"
    write(path, pa.array(rows, pa.list_(pa.int64())), data_page_size=page_bytes, write_batch_size=7,
          compression=compression)  # fmt: skip
    (found,) = views(path, Field(name="x", dtype="int64", shape=(length,)))
    is_regular = all(row is not None and None not in row and len(row) == length for row in rows)
    assert (found is not None) == is_regular
    if found is not None:
        assert found.tolist() == rows


def encode(levels: list[int], *, packed: bool) -> bytes:
    """Repetition levels as runs, or all as groups of eight bits: two of the ways in which a writer may say them."""
    if packed:
        bits = np.packbits(np.array([*levels, *[0] * (-len(levels) % 8)], np.uint8), bitorder="little").tobytes()
        return varint(len(bits) << 1 | 1) + bits
    cuts = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), len(levels)]
    return b"".join(varint((stop - start) << 1) + bytes([levels[start]]) for start, stop in pairwise(cuts))


def varint(value: int) -> bytes:
    if value < 128:
        return bytes([value])
    return bytes([value & 127 | 128]) + varint(value >> 7)


@examples(500)
@given(length=st.integers(1, 40), rows=st.integers(1, 40), packed=st.booleans(), flip=st.none() | st.integers(0, 1599))
def test_levels_are_regular_only_if_every_row_begins_in_its_place(
    length: int, rows: int, packed: bool, flip: int | None
) -> None:
    levels = ([0] + [1] * (length - 1)) * rows
    if flip is not None:
        levels[flip % len(levels)] ^= 1
    assert _is_regular(encode(levels, packed=packed), length, len(levels)) == (flip is None)


@examples(500)
@given(st.binary(max_size=60), st.integers(1, 40), st.integers(1, 400))
def test_any_bytes_are_levels_or_not(data: bytes, length: int, rows: int) -> None:
    assert _is_regular(data, length, length * rows) in (True, False)


def pack(levels: list[int], width: int) -> bytes:
    """Levels in one run of groups of eight."""
    padded = np.array([*levels, *[0] * (-len(levels) % 8)], np.uint8)
    bits = np.unpackbits(padded[:, None], axis=1, bitorder="little")[:, :width]
    return varint(len(padded) // 8 << 1 | 1) + np.packbits(bits.ravel(), bitorder="little").tobytes()


@examples(500)
@given(
    most=st.integers(1, 7),
    count=st.integers(1, 300),
    packed=st.integers(0, 300),
    change=st.none() | st.tuples(st.integers(0, 299), st.integers(1, 7)),
)
def test_levels_are_all_present_only_if_each_is_the_greatest(
    most: int, count: int, packed: int, change: tuple[int, int] | None
) -> None:
    levels = [most] * count
    if change is not None:
        levels[change[0] % count] = change[1] % most
    # Some groups of eight, and runs behind them.
    first = min(packed // 8 * 8, count // 8 * 8)
    rest = encode(levels[first:], packed=False) if levels[first:] else b""
    data = (pack(levels[:first], most.bit_length()) if first else b"") + rest
    assert _are_all(data, most, count) == (levels == [most] * count)
    assert _are_all(pack(levels, most.bit_length()), most, count) == (levels == [most] * count)
    assert not _are_all(data, most, count + 1)


@examples(500)
@given(st.binary(max_size=60), st.integers(1, 3), st.integers(1, 400))
def test_any_bytes_are_present_levels_or_not(data: bytes, most: int, count: int) -> None:
    assert _are_all(data, most, count) in (True, False)


@pytest.mark.parametrize(("levels", "num_nulls"), [(0b111111, 0), (0b111011, 1)])
def test_a_null_is_seen_where_as_many_bytes_follow_the_values(levels: int, num_nulls: int) -> None:
    """fastparquet puts eight bytes behind the values of a page: with one null it is as long as a page without."""
    column = PlainColumn(0, np.dtype("float64"), np.dtype("float64"), (), 1, 8, False, 1, False)
    values = np.arange(6.0 - num_nulls)
    page = bytes([2, 0, 0, 0, 3, levels]) + values.tobytes() + bytes(8 * num_nulls)
    header = b"\x15\x00\x15l\x15l,\x15\x0c\x15\x00\x15\x06\x15\x08\x00\x00"
    whole = pa.py_buffer(header + page)
    (found,) = column.pages(whole, Chunk(0, whole.size, 6, None))
    assert (found is None) == bool(num_nulls)
    if found is not None:
        np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("compression", ["snappy", "zstd", "none"])
def test_a_flipped_byte_is_refused_or_left_to_arrow_or_changes_numbers_alone(tmp_path: Path, compression: str) -> None:
    values = RANDOM.normal(size=(64, 6))
    path = write(tmp_path / "x", pa.array(list(values), pa.list_(pa.float64())), compression=compression)
    field, whole = Field(name="x", dtype="float64", shape=(6,)), path.read_bytes()
    metadata = pq.read_metadata(path)
    column = find_plain_column(metadata, Place(0, 0, (), metadata.schema.to_arrow_schema().field(0)), field)
    assert column is not None
    described = find_chunk(column, path)
    assert described is not None
    for place in range(described.start, described.end):
        harmed = bytearray(whole)
        harmed[place] ^= 1 << int(RANDOM.integers(8))
        try:
            found = values_of(column, pa.py_buffer(bytes(harmed)), described)
        except (pa.ArrowException, OSError, ValueError):
            continue
        assert found is None or np.concatenate(found).shape == values.shape


def test_checksums_are_compared_if_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "x", pa.array(np.arange(64.0)), write_page_checksum=True)
    column = find_plain_column(
        pq.read_metadata(path), Place(0, 0, (), pa.field("x", pa.float64())), Field(name="x", dtype="float64", shape=())
    )
    assert column is not None
    described = find_chunk(column, path)
    assert described is not None
    harmed = bytearray(path.read_bytes())
    harmed[described.end - 1] ^= 1
    assert values_of(column, pa.py_buffer(bytes(harmed)), described) is not None
    with pytest.raises(ValueError, match="a page's checksum is not that of its bytes"):
        list(column.pages(pa.py_buffer(bytes(harmed)), described, verify_checksums=True))


def test_structs_without_end_are_no_header() -> None:
    data = b"\x1c" * (1 << 15)
    assert _read_page_header(pa.py_buffer(data), 0, len(data)) is None


@given(st.binary(max_size=40))
def test_any_bytes_are_a_header_or_none(data: bytes) -> None:
    found = _read_page_header(pa.py_buffer(data), 0, len(data))
    assert found is None or found[0] <= len(data)


def test_a_chunk_that_ends_behind_the_file_is_left_to_arrow(tmp_path: Path) -> None:
    path = write(tmp_path / "x", pa.array(np.arange(1000)))
    metadata = pq.read_metadata(path)
    column = find_plain_column(metadata, Place(0, 0, (), metadata.schema.to_arrow_schema().field(0)), LONG)
    assert column is not None
    chunk = find_chunk(column, path)
    assert chunk is not None
    assert values_of(column, pa.py_buffer(path.read_bytes()), chunk) is not None
    assert values_of(column, pa.py_buffer(path.read_bytes()[:4000]), chunk) is None


@pytest.mark.parametrize("options", [{}, {"write_statistics": True}, {"write_page_checksum": True}], ids=str)
def test_a_header_is_the_same_by_its_pattern_and_by_thrift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    values = pa.array(RANDOM.integers(0, 1 << 30, 300), pa.int32())
    path = write(tmp_path / "x", values, **{"write_statistics": False, "data_page_size": 256} | options)
    data = path.read_bytes()
    chunk = find_chunk(PlainColumn(0, np.dtype("int32"), np.dtype("int32"), (), 1, 4, False, 1, False), path)
    assert chunk is not None
    heads = [data[chunk.start : chunk.start + 64]]
    for _ in range(300):
        damaged = bytearray(heads[0])
        damaged[RANDOM.integers(0, 60)] = RANDOM.integers(0, 256)
        heads.append(bytes(damaged))
    by_pattern = [_read_page_header(pa.py_buffer(head), 0, len(head)) for head in heads]
    monkeypatch.setattr("converter.reading.pages._HEADER", lambda _: None)
    by_thrift = [_read_page_header(pa.py_buffer(head), 0, len(head)) for head in heads]
    assert by_pattern[0] is not None
    assert by_pattern == by_thrift


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("shape", [(2,), (40, 30)], ids=["narrow", "wide"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_bytes_of_one_length_arrive_whole(
    tmp_path: Path, shape: tuple[int, ...], num_files: int, shuffle: bool
) -> None:
    values = RANDOM.integers(0, 256, (600, *shape), dtype=np.uint8)
    table = pa.table({"id": range(600), "x": pa.array([row.tobytes() for row in values], pa.binary())})
    for number in range(num_files):
        rows = table.slice(number * 600 // num_files, 600 // num_files)
        pq.write_table(
            rows, tmp_path / f"{number}.parquet", compression="none", row_group_size=170, use_dictionary=["id"]
        )
    with make_parquet_converter(tmp_path, shapes={"x": ("uint8", shape)}) as converter:
        for batch in converter.make_batch_reader(batch_size=64, shuffle=shuffle, shuffle_window_rows=200):
            np.testing.assert_array_equal(batch["x"], values[batch["id"]], strict=True)
        kept = converter.where([("id", ">=", 300)])
        found = np.concatenate([batch["x"] for batch in kept.make_batch_reader()])
        np.testing.assert_array_equal(found, values[300:], strict=True)
