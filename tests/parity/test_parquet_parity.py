"""Parquet by every writer: whatever its types and layout, the rows are those that the writer's own reader gives."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from converter import (
    NullValueError,
    SourceChangedError,
    SourceError,
    UnsupportedTypeError,
    make_parquet_converter,
)
from tests.parity.rows import (
    DTYPES,
    assert_reads,
    assert_same_rows,
    cells_of,
    expected_cells,
    flatten,
    in_order,
    is_list,
    open_files,
    plain,
    read,
    rows_by_sparks_rule,
)
from tests.parity.spark_files import FRAME, OLD_FILES, OLD_WAYS, WAYS
from tests.processes import run_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.short

NUM_ROWS = 60
MICROSECONDS = [-62_135_596_800_000_000, -1_000_001, -1, 0, 1, 1_700_000_000_123_456, 253_402_300_799_999_999]
"""Years 1 and 9999, before and after 1970."""

NANOSECONDS = [-(2**63) + 1, -1_000_000_001, -1001, -1, 0, 999, 1001, 2**63 - 1]
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
DAYS = [-719_162, -1, 0, 1, 20_778, 2_932_896]
TEXTS = ["", "a", "žluťoučký 🐟", "x" * 300, "a\x00b"]
BYTES = [b"", b"\x00\xff", b"x" * 300, b"PAR1"]
FLOATS = [0.0, -0.0, 1.5, -2.25, float("nan"), float("inf"), float("-inf")]


def repeat(values: Sequence[Any], kind: pa.DataType, *, nulls: bool = True, num_rows: int = NUM_ROWS) -> pa.Array:
    """The values over and over, with nulls now and then."""
    return pa.array([None if nulls and row % 11 == 4 else values[row % len(values)] for row in range(num_rows)], kind)


def bounds(kind: pa.DataType) -> list[int]:
    """The least and largest whole numbers of a type, and some between."""
    known = np.iinfo(kind.to_pandas_dtype())
    return [int(known.min), int(known.max), 0, 1, 100, int(known.max) - 1]


def decimals(precision: int, scale: int) -> list[str]:
    """The least and largest numbers of a decimal type, and some between."""
    largest = 10**precision - 1
    digits = [(f"{number:0{scale + 1}d}", sign) for number in (0, 1, 12, largest) for sign in "+-"]
    return [f"{sign}{text[: len(text) - scale]}.{text[len(text) - scale :]}".rstrip(".") for text, sign in digits]


def numbers(*, nulls: bool = True) -> dict[str, pa.Array]:
    """Every kind of number, alone."""
    integers = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
    found = {name: repeat(bounds(getattr(pa, name)()), getattr(pa, name)(), nulls=nulls) for name in integers}
    found["bool"] = repeat([True, False, False], pa.bool_(), nulls=nulls)
    found["float16"] = repeat([np.float16(value) for value in [*FLOATS, 65504.0, 6e-8]], pa.float16(), nulls=nulls)
    found["float32"] = repeat([*FLOATS, float(np.float32(3.4e38)), float(np.float32(1e-45))], pa.float32(), nulls=nulls)
    found["float64"] = repeat([*FLOATS, 1.7e308, 5e-324, 0.1], pa.float64(), nulls=nulls)
    return found


def times(*, nulls: bool = True) -> dict[str, pa.Array]:
    found = {"date32": repeat(DAYS, pa.int32(), nulls=nulls).cast(pa.date32())}
    found["date64"] = repeat([day * 86_400_000 for day in DAYS], pa.int64(), nulls=nulls).cast(pa.date64())
    per = {"s": 1_000_000, "ms": 1000, "us": 1}
    for unit in ("s", "ms", "us", "ns"):
        values = NANOSECONDS if unit == "ns" else [value // per[unit] for value in MICROSECONDS]
        for zone in (None, "UTC", "Europe/Prague"):
            whole = repeat(values, pa.int64(), nulls=nulls)
            found[f"{unit} {zone}"] = whole.cast(pa.timestamp(unit, zone))
    return found


def texts(*, nulls: bool = True) -> dict[str, pa.Array]:
    found = {str(kind): repeat(TEXTS, kind, nulls=nulls) for kind in (pa.string(), pa.large_string(), pa.string_view())}
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        found[str(kind)] = repeat(BYTES, kind, nulls=nulls)
    found["dictionary"] = found["string"].dictionary_encode()
    found["large dictionary"] = found["large_string"].dictionary_encode()
    found["dictionary of bytes"] = found["binary"].dictionary_encode()
    found["dictionary of numbers"] = repeat([2**40, -1], pa.int64(), nulls=nulls).dictionary_encode()
    return found


def some_decimals(*, nulls: bool = True) -> dict[str, pa.Array]:
    sizes = {pa.decimal32: 9, pa.decimal64: 18, pa.decimal128: 38, pa.decimal256: 76}
    found = {}
    for make, precision in sizes.items():
        for kind in (make(precision, 2), make(precision, precision - 1), make(5, 0)):
            said = repeat(decimals(kind.precision, kind.scale), pa.string(), nulls=nulls)
            found[str(kind)] = said.cast(pa.decimal256(kind.precision, kind.scale)).cast(kind)
    return found


def lists(*, nulls: bool = True) -> dict[str, pa.Array]:
    flat: list[list[Any]] = [[1, 2, 3], [], [4], [5, 6]]
    found = {name: repeat(flat, kind, nulls=nulls)
             for name, kind in (("list", pa.list_(pa.int32())), ("large", pa.large_list(pa.int32())),
                                ("view", pa.list_view(pa.int32())), ("large view", pa.large_list_view(pa.int64())),
             )}  # fmt: skip
    found["fixed"] = repeat([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2), nulls=nulls)
    for kind in ("int8", "int64", "uint8", "uint16", "uint32", "float16", "float32", "float64", "bool"):
        arrow = pa.bool_() if kind == "bool" else getattr(pa, kind)()
        values = [[True, False], [], [True]] if kind == "bool" else [[1, 2, 100], [], [3]]
        if "float" in kind:
            values = [[np.dtype(kind).type(value) for value in FLOATS], [], [np.dtype(kind).type(1)]]
        found[f"list of {kind}"] = repeat(values, pa.list_(arrow), nulls=nulls)
    amounts = [[decimal.Decimal("0.10"), decimal.Decimal(-3)], []]
    found["list of decimal"] = repeat(amounts, pa.list_(pa.decimal128(20, 2)), nulls=nulls)
    nested: list[Any] = [[[1, 2], [3, 4]], [[5], [6], [7]], [[8, 9, 10]]]
    found["nested"] = repeat(nested, pa.list_(pa.list_(pa.int16())), nulls=nulls)
    found["nested large"] = repeat(nested, pa.large_list(pa.list_(pa.float64())), nulls=nulls)
    found["nested views"] = repeat(nested, pa.list_view(pa.large_list_view(pa.float64())), nulls=nulls)
    found["nested fixed"] = repeat([[[1, 2]], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.int32(), 2)), nulls=nulls)
    found["deep"] = repeat([[[[1, 2]], [[3, 4]]], [[[5]]]], pa.list_(pa.list_(pa.list_(pa.float32()))), nulls=nulls)
    return found


def structs(*, nulls: bool = True) -> dict[str, pa.Array]:
    kind = pa.struct({
        "number": pa.int32(), "text": pa.large_string(), "list": pa.list_(pa.int64()),
        "inner": pa.struct({"day": pa.date32(), "time": pa.timestamp("ns"), "flag": pa.bool_(), "some": pa.float64()}),
        "category": pa.string(), "u8": pa.uint8(), "decimal": pa.decimal128(12, 3),
    })  # fmt: skip
    inner = {
        "day": dt.date(1, 1, 1),
        "time": dt.datetime.fromisoformat("1969-12-31T23:59:59.999999"),
        "flag": True,
        "some": 0.1,
    }
    whole = {"number": 1, "text": "x", "list": [1, 2], "inner": inner, "category": "c", "u8": 255, "decimal": 1}
    values = [whole, whole | {"inner": None}, dict.fromkeys(whole), whole | {"list": [], "text": ""}]
    return {"s": repeat(values if nulls else [whole], kind, nulls=nulls), "after": repeat([1, 2, 3], pa.int64())}


KINDS: dict[str, Callable[..., dict[str, pa.Array]]] = {
    "numbers": numbers, "times": times, "texts": texts, "decimals": some_decimals, "lists": lists, "structs": structs,
}  # fmt: skip


def every_type() -> pa.Table:
    """All kinds of columns side by side."""
    return pa.table({f"{kind}: {name}": column for kind, make in KINDS.items() for name, column in make().items()})


# ---------------------------------------------------------------------------------------------------------- pyarrow

LAYOUTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "zstd": {"compression": "zstd"},
    "lz4": {"compression": "lz4"},
    "gzip": {"compression": "gzip"},
    "brotli": {"compression": "brotli"},
    "none": {"compression": "none"},
    "no dictionary": {"use_dictionary": False, "compression": "none"},
    "small row groups": {"row_group_size": 7},
    "one row each": {"row_group_size": 1, "use_dictionary": False},
    "small pages": {"data_page_size": 16, "write_batch_size": 3, "use_dictionary": False},
    "small dictionaries": {"dictionary_pagesize_limit": 20, "data_page_size": 16, "write_batch_size": 3},
    "second page version": {"data_page_version": "2.0", "compression": "snappy"},
    "second page version, none": {"data_page_version": "2.0", "compression": "none", "use_dictionary": False},
    "first version": {"version": "1.0"},
    "version 2.4": {"version": "2.4"},
    "other list layout": {"use_compliant_nested_type": False},
    "page index and checksums": {"write_page_index": True, "write_page_checksum": True},
    "no statistics": {"write_statistics": False},
    "no schema of Arrow": {"store_schema": False},
    "decimals as integers": {"store_decimal_as_integer": True, "use_dictionary": False},
    "sorted": {"sorting_columns": [pq.SortingColumn(0)]},
}


@pytest.mark.parametrize("nulls", [True, False], ids=["nulls", "no nulls"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_arrow(tmp_path: Path, kind: str, nulls: bool) -> None:
    table = pa.table(KINDS[kind](nulls=nulls))
    pq.write_table(table, tmp_path / "x.parquet")
    assert_reads(tmp_path, pq.read_table(tmp_path / "x.parquet"))
    assert_reads(tmp_path, table)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_arrow(tmp_path: Path, layout: str) -> None:
    table, options = every_type(), LAYOUTS[layout]
    if "version" in options:
        # It has none.
        table = table.drop_columns([name for name in table.column_names if name.startswith("times: ns")])
    pq.write_table(table, tmp_path / "x.parquet", **options)
    assert_reads(tmp_path, pq.read_table(tmp_path / "x.parquet", arrow_extensions_enabled=False))


@pytest.mark.parametrize("kind", ["DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT", "DELTA_BYTE_ARRAY", "RLE"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_every_encoding(tmp_path: Path, kind: str, version: str) -> None:
    fits = {
        "DELTA_BINARY_PACKED": {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "us UTC", "date32"},
        "BYTE_STREAM_SPLIT": {"float16", "float32", "float64", "int32", "int64", "us None", "decimal128(38, 2)"},
        "DELTA_BYTE_ARRAY": {"string", "binary", "large_string", "string_view"},
        "RLE": {"bool"},
    }[kind]
    every = numbers() | times() | texts() | some_decimals()
    table = pa.table({name: every[name] for name in sorted(fits)} | {
        f"{name}, no nulls": (numbers(nulls=False) | times(nulls=False) | texts(nulls=False)
                              | some_decimals(nulls=False))[name] for name in sorted(fits)
    })  # fmt: skip
    pq.write_table(
        table, tmp_path / "x.parquet", use_dictionary=False, data_page_version=version, row_group_size=25,
        column_encoding=dict.fromkeys(table.column_names, kind),
    )  # fmt: skip
    group = pq.ParquetFile(tmp_path / "x.parquet").metadata.row_group(0)
    assert all(kind in group.column(leaf).encodings for leaf in range(group.num_columns))
    assert_reads(tmp_path, table)


def test_strings_by_their_lengths(tmp_path: Path) -> None:
    table = pa.table({name: column for name, column in texts().items() if "dict" not in name})
    encodings = dict.fromkeys(table.column_names, "DELTA_LENGTH_BYTE_ARRAY")
    pq.write_table(table, tmp_path / "x.parquet", use_dictionary=False, column_encoding=encodings)
    assert_reads(tmp_path, table)


def test_row_groups_of_other_sizes_and_of_none(tmp_path: Path) -> None:
    table = every_type()
    with pq.ParquetWriter(tmp_path / "x.parquet", table.schema) as writer:
        for start, stop in ((0, 0), (0, 1), (1, 18), (18, 18), (18, 21), (21, 60), (60, 60)):
            writer.write_table(table.slice(start, stop - start), row_group_size=20)
    assert_reads(tmp_path, pq.read_table(tmp_path / "x.parquet"))
    with open_files(tmp_path, table) as converter:
        rows = read(converter, shuffle=True, seed=3, columns=["numbers: int64", "texts: string"])
        found = zip(cells_of(rows, "numbers: int64"), cells_of(rows, "texts: string"), strict=True)
        expected = zip(*(expected_cells(table, name) for name in ("numbers: int64", "texts: string")), strict=True)
        assert sorted(found, key=repr) == sorted(expected, key=repr)


def test_old_times_of_96_bits(tmp_path: Path) -> None:
    columns = {name: column for name, column in times().items() if "us" in name or "ns" in name}
    plain = {"plain": repeat(MICROSECONDS, pa.timestamp("us"), nulls=False)}
    pq.write_table(pa.table(columns | plain), tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    expected = pq.read_table(tmp_path / "x.parquet", coerce_int96_timestamp_unit="us")
    assert_reads(tmp_path, expected)
    assert expected_cells(expected, "plain") == expected_cells(pa.table(plain), "plain")


@pytest.mark.parametrize("size", [1, 2, 5, 300])
@pytest.mark.parametrize("layout", ["as it is", "none", "no dictionary", "small pages", "second page version"])
def test_lists_of_one_length_are_rows_of_tensors(tmp_path: Path, size: int, layout: str) -> None:
    rows = np.arange(NUM_ROWS * size).reshape(NUM_ROWS, size)
    columns = {str(kind): pa.array(list(rows % 100), pa.list_(kind))
               for kind in (pa.int8(), pa.int32(), pa.uint16(), pa.float16(), pa.float64())}  # fmt: skip
    columns["fixed"] = pa.array(list(rows % 100), pa.list_(pa.float32(), size))
    columns["large"] = pa.array(list(rows), pa.large_list(pa.int64()))
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "x.parquet", **LAYOUTS[layout])
    for shapes in ({}, dict.fromkeys(columns, (size,))):
        with open_files(tmp_path, table, shapes=shapes) as converter:
            assert {field.shape for field in converter.schema} == {(size,)}
            assert_same_rows(converter, table)


BINARY_TYPES = {
    "binary": pa.binary(),
    "large": pa.large_binary(),
    "view": pa.binary_view(),
    "one length": pa.binary(48),
    "dictionary": pa.dictionary(pa.int32(), pa.binary()),
}


@pytest.mark.parametrize("layout", ["as it is", "none", "no dictionary", "small pages", "second page version"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "float64"])
@pytest.mark.parametrize("kind", BINARY_TYPES)
def test_bytes_are_the_tensors_that_are_declared(tmp_path: Path, kind: str, dtype: str, layout: str) -> None:
    width = 48 // np.dtype(dtype).itemsize
    numbers = np.arange(NUM_ROWS * width).reshape(NUM_ROWS, width).astype(f"<{np.dtype(dtype).str[1:]}")
    cells: list[bytes | None] = [row.tobytes() for row in numbers]
    some = [None if row % 7 == 3 else cell for row, cell in enumerate(cells)]
    made = pa.binary() if kind == "dictionary" else BINARY_TYPES[kind]
    columns = {"flat": cells, "square": cells, "some": some, "raw": cells}
    table = pa.table(
        {"id": range(NUM_ROWS)}
        | {name: pa.array(rows, made).cast(BINARY_TYPES[kind]) for name, rows in columns.items()}
    )
    if kind == "one length":
        table = table.drop_columns("raw")
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=NUM_ROWS // 3, **LAYOUTS[layout])
    shapes: dict[str, Any] = {"flat": (dtype, (width,)), "square": (dtype, (2, width // 2)), "some": (dtype, (width,))}
    if dtype == "uint8":
        shapes |= {"flat": (width,), "square": (2, width // 2)}
    for options in ({}, {"shuffle": True}):
        with (
            make_parquet_converter(tmp_path, shapes=shapes) as converter,
            converter.make_batch_reader(batch_size=NUM_ROWS, nulls={"some": 1}, **options) as reader,
        ):
            assert [(converter.schema[name].dtype, converter.schema[name].shape) for name in ("flat", "square")] == [
                (dtype, (width,)), (dtype, (2, width // 2))
            ]  # fmt: skip
            (batch,) = reader
            order = batch["id"]
            assert batch["flat"].dtype == batch["square"].dtype == np.dtype(dtype)
            np.testing.assert_array_equal(batch["flat"], numbers[order])
            np.testing.assert_array_equal(batch["square"].reshape(NUM_ROWS, width), numbers[order])
            expected = numbers.copy()
            expected[3::7] = 1
            np.testing.assert_array_equal(batch["some"], expected[order])
            if kind != "one length":
                assert list(batch["raw"]) == [cells[row] for row in order]


def test_bytes_that_do_not_fit_their_shape_are_named(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"image": [b"12345678", b"1234567"], "y": [1, 2], "fixed": pa.array([b"1234"] * 2, pa.binary(4))}),
        tmp_path / "x.parquet",
    )
    with (
        make_parquet_converter(tmp_path, shapes={"image": (2, 4)}, columns=["image", "y"]) as converter,
        converter.make_batch_reader() as reader,
        pytest.raises(SourceError, match=r"'image' has a row of 7 bytes, expected 8 for uint8 of shape \(2, 4\)"),
    ):
        list(reader)
    for shapes, text in (
        ({"image": ("complex64", (1,))}, "'image' has the dtype 'complex64'; bytes can be uint8, int8"),
        ({"image": None}, "the bytes of 'image' need a shape"),
        ({"image": 6}, "'image' needs a shape such as"),
        ({"fixed": (5,)}, "rows of 'fixed' have 4 bytes, and uint8 of shape .5,. takes 5"),
        ({"y": (1,)}, "'y', which is no array"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            make_parquet_converter(tmp_path, shapes=shapes)  # type: ignore[arg-type]


@pytest.mark.parametrize("lengths", [[14, 6], [14, 14], [6, 2]])
def test_bytes_that_look_like_ours_are_not_taken_for_them(tmp_path: Path, lengths: list[int]) -> None:
    rows = [np.array([2, 3, 0, 0], "<i4").tobytes()[:length] for length in lengths]
    pq.write_table(pa.table({"v": rows}), tmp_path / "x.parquet")
    with (
        make_parquet_converter(tmp_path, shapes={"v": (2, 3)}) as converter,
        converter.make_batch_reader() as reader,
        pytest.raises(SourceError, match=r"'v' has a row of (14|2) bytes"),
    ):
        list(reader)


def test_a_delta_table_below_a_folder_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
    (tmp_path / "lake" / "table" / "_delta_log").mkdir(parents=True)
    pq.write_table(pa.table({"a": [2]}), tmp_path / "lake" / "table" / "y.parquet")
    for place in (tmp_path, tmp_path / "lake", f"{tmp_path}/lake/*"):
        with pytest.raises(SourceError, match="lake/table is a Delta table"):
            make_parquet_converter(place)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_columns_that_only_their_notes_tell_apart_disagree(tmp_path: Path, is_reversed: bool) -> None:
    said = {
        "type": "struct",
        "fields": [{"name": "x", "type": "interval day to second", "nullable": True, "metadata": {}}],
    }
    noted = {"org.apache.spark.sql.parquet.row.metadata": json.dumps(said)}
    tables = [pa.table({"x": [1]}), pa.table({"x": [1]}).replace_schema_metadata(noted)]
    for number, table in enumerate(reversed(tables) if is_reversed else tables):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    with pytest.raises((SourceError, UnsupportedTypeError), match="interval day to second"):
        make_parquet_converter(tmp_path)


REFUSED: dict[str, Callable[[], pa.Array]] = {
    "void": lambda: pa.nulls(2),
    "list of voids": lambda: pa.array([[None], []]),
    "bytes of one length": lambda: pa.array([b"abc", b"def"], pa.binary(3)),
    "uuid": lambda: pa.array([b"0123456789abcdef"] * 2, pa.uuid()),
    "member": lambda: pa.array([{"good": 1, "bad": b"abc"}] * 2,
                               pa.struct({"good": pa.int8(), "bad": pa.binary(3)})),
}  # fmt: skip


def test_what_has_no_tensor_form_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    table = pa.table({name: make() for name, make in REFUSED.items()} | {"last": [1, 2]})
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(UnsupportedTypeError, match=f"{len(REFUSED)} columns cannot become tensors") as caught:
        make_parquet_converter(tmp_path)
    assert all(f"'{name}' has type" in str(caught.value) for name in REFUSED if name != "member")
    assert "'member.bad' has type" in str(caught.value)
    assert_reads(tmp_path, flatten(table).select(["last", "member.good"]), columns=["last", "member.good"])


# ---------------------------------------------------------------------------------------------------------- pandas


def some_frame() -> pd.DataFrame:
    """What pandas has that Arrow writes in some way of its own."""
    times = pd.Series(np.array(MICROSECONDS[1:6], "datetime64[us]").astype("datetime64[ns]"))
    return pd.DataFrame({
        "int": np.arange(5, dtype="int32"),
        "float": [1.5, np.nan, None, np.inf, -0.0],
        "Int64": pd.array([1, None, 2**62, -1, 0], "Int64"),
        "UInt8": pd.array([1, None, 255, 0, 0], "UInt8"),
        "Float32": pd.array([1.5, None, 2, -1, 0], "Float32"),
        "boolean": pd.array([True, None, False, True, None], "boolean"),
        "text": ["a", None, "", "é", "x"],
        "string": pd.array(["a", None, "", "é", "x"], "string"),
        "category": pd.Categorical(["b", None, "a", "b", "b"], categories=["c", "b", "a"], ordered=True),
        "category of ints": pd.Categorical([3, 1, 3, 3, 1]),
        "bytes": [b"", b"\x00", None, b"x", b"y"],
        "time": times,
        "no time": times.where(times.index != 2),
        "zone": times.dt.tz_localize("UTC").dt.tz_convert("America/New_York"),
        "date": [dt.date(1, 1, 1), None, dt.date(9999, 12, 31), dt.date(1970, 1, 1), dt.date(2026, 11, 21)],
        "decimal": [decimal.Decimal("1.10"), None, decimal.Decimal("-99999.99"), decimal.Decimal(0), None],
        "list": [[1, 2], [], None, [3], [4, 5, 6]],
        "array": list(np.arange(10, dtype="float32").reshape(5, 2)),
        "struct": [{"a": 1, "b": "x"}, None, {"a": None, "b": ""}, {"a": 2, "b": None}, {"a": 3, "b": "y"}],
    })  # fmt: skip


@pytest.mark.parametrize("index", [None, "named", "text", "several"])
@pytest.mark.parametrize("compression", ["snappy", "zstd", None])
def test_frames_of_pandas(tmp_path: Path, index: str | None, compression: Any) -> None:
    frame = some_frame()
    if index == "named":
        frame.index = pd.Index([5, 4, 3, 2, 1], name="number")
    elif index == "text":
        frame.index = pd.Index(list("abcde"))
    elif index == "several":
        frame.index = pd.MultiIndex.from_product([["x"], range(5)], names=["one", "two"])
    frame.to_parquet(tmp_path / "x.parquet", compression=compression)
    found = pd.read_parquet(tmp_path / "x.parquet", dtype_backend="pyarrow")
    expected = pa.Table.from_pandas(found, preserve_index=index is not None)
    assert expected.num_columns > 18
    assert_reads(tmp_path, expected)


# ---------------------------------------------------------------------------------------------------------- Polars


def polars_frame() -> pl.DataFrame:
    integers = {str(kind): pl.Series([kind.min().pipe(pl.select).item(), None, 0, 1, kind.max().pipe(pl.select).item()],
                                     dtype=kind)
                for kind in (pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.UInt8, pl.UInt16, pl.UInt32)}  # fmt: skip
    whole = [*MICROSECONDS[:4], None]
    milliseconds = [None if one is None else one // 1000 for one in whole]
    return pl.DataFrame(integers | {
        "bool": [True, None, False, True, True],
        "f32": pl.Series([1.5, None, float("nan"), float("inf"), -0.0], dtype=pl.Float32),
        "f64": [0.1, None, float("nan"), float("-inf"), -0.0],
        "text": [*TEXTS[:4], None],
        "bytes": [*BYTES, None],
        "category": pl.Series(["a", None, "b", "", "a"], dtype=pl.Categorical),
        "enum": pl.Series(["a", None, "b", "b", "a"], dtype=pl.Enum(["b", "a"])),
        "date": pl.Series([*DAYS[:2], None, *DAYS[4:]], dtype=pl.Int32).cast(pl.Date),
        "ms": pl.Series(milliseconds, dtype=pl.Int64).cast(pl.Datetime("ms")),
        "us": pl.Series(whole, dtype=pl.Int64).cast(pl.Datetime("us")),
        "ns": pl.Series([*NANOSECONDS[1:5], None], dtype=pl.Int64).cast(pl.Datetime("ns")),
        "zone": pl.Series(whole, dtype=pl.Int64).cast(pl.Datetime("us", "Asia/Kathmandu")),
        "decimal": pl.Series(["1.50", None, "-0.01", "99999999.99", "0"]).cast(pl.Decimal(10, 2)),
        "wide decimal": pl.Series(["1.5", None, "-" + "9" * 30, "0", "1"]).cast(pl.Decimal(38, 5)),
        "list": [[1, 2], None, [], [3], [4, 5, 6]],
        "nested": [[[1, 2], [3, 4]], None, [[5]], [[6], [7]], [[8, 9]]],
        "array": pl.Series([[1.0, 2], None, [3, 4], [5, 6], [7, 8]], dtype=pl.Array(pl.Float32, 2)),
        "full array": pl.Series([[1, 2], [0, 0], [3, 4], [5, 6], [7, 8]], dtype=pl.Array(pl.Int16, 2)),
        "struct": [{"a": 1, "b": {"c": "x"}}, None, {"a": None, "b": None}, {"a": 2, "b": {"c": None}},
                   {"a": 3, "b": {"c": ""}}],
        "all null": pl.Series([None] * 5, dtype=pl.String),
    })  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{}, {"compression": "snappy"}, {"compression": "gzip"}, {"compression": "brotli"}, {"compression": "lz4"},
     {"compression": "uncompressed", "row_group_size": 2}, {"data_page_size": 8}, {"statistics": False},
     {"statistics": "full"}, {"use_pyarrow": True}],
    ids=str,
)  # fmt: skip
def test_frames_of_polars(tmp_path: Path, options: dict[str, Any]) -> None:
    polars_frame().write_parquet(tmp_path / "x.parquet", **options)
    assert_reads(tmp_path, pl.read_parquet(tmp_path / "x.parquet").to_arrow())


def test_a_sink_of_polars(tmp_path: Path) -> None:
    polars_frame().lazy().sink_parquet(tmp_path / "x.parquet")
    assert_reads(tmp_path, pl.read_parquet(tmp_path / "x.parquet").to_arrow())


# ---------------------------------------------------------------------------------------------------------- DuckDB

DUCKDB = """
SELECT i::INTEGER AS id, i % 2 = 0 AS "bool", (i - 128)::TINYINT AS i8, (-i * 100)::SMALLINT AS i16,
  i * 1000000000 - 9223372036854775807 AS i64, (i % 256)::UTINYINT AS u8, (i * 250)::USMALLINT AS u16,
  (i * 16000000)::UINTEGER AS u32, i::HUGEINT AS huge, i::FLOAT / 7 AS "float",
  CASE i % 5 WHEN 0 THEN 'nan' WHEN 1 THEN 'inf' WHEN 2 THEN '-inf' ELSE i / 7 END::DOUBLE AS "double",
  (i / 7)::DECIMAL(4, 1) AS d4, (-i / 7)::DECIMAL(9, 3) AS d9, (i / 7)::DECIMAL(18, 4) AS d18,
  (i / 7)::DECIMAL(38, 10) AS d38, DATE '0001-01-01' + i::INTEGER * 14000 AS "date",
  TIMESTAMP '0001-01-01' + INTERVAL (i * 3600) HOUR + INTERVAL 1 MICROSECOND AS us,
  (TIMESTAMP '1969-12-31 23:59:59.999' + INTERVAL (i - 100) SECOND)::TIMESTAMP_MS AS ms,
  (TIMESTAMP '1969-12-31 23:59:59' + INTERVAL (i - 100) SECOND)::TIMESTAMP_S AS s,
  make_timestamp_ns(i * 1001 - 100000) AS ns, TIMESTAMPTZ '1969-12-31 23:59:59+00' + INTERVAL (i) DAY AS tz,
  CASE WHEN i % 7 = 0 THEN '' WHEN i % 3 = 0 THEN NULL ELSE repeat('ž', i::INTEGER % 20) END AS text,
  CASE WHEN i % 5 = 0 THEN NULL ELSE encode(i::VARCHAR) END AS bytes,
  CASE WHEN i % 5 > 0 THEN range(i % 4) END AS list, [i, i + 1]::INTEGER[2] AS "array",
  [[i, 1], [2, 3]] AS nested, CASE WHEN i % 6 > 0 THEN {'a': nullif(i, 2), 'b': {'c': i::VARCHAR}} END AS struct,
  CASE WHEN i % 4 > 0 THEN i END AS some
FROM range(200) t(i)
"""


@pytest.mark.parametrize(
    "options",
    ["", "COMPRESSION zstd", "COMPRESSION gzip", "COMPRESSION lz4_raw", "COMPRESSION brotli",
     "COMPRESSION uncompressed", "PARQUET_VERSION v2", "PARQUET_VERSION v2, COMPRESSION uncompressed",
     "ROW_GROUP_SIZE 100, DICTIONARY_SIZE_LIMIT 1"],
)  # fmt: skip
def test_tables_of_duckdb(tmp_path: Path, options: str) -> None:
    path = tmp_path / "x.parquet"
    with duckdb.connect() as connection:
        connection.execute(f"COPY ({DUCKDB}) TO '{path}' (FORMAT parquet{options and ', ' + options})")
        expected = connection.read_parquet(str(path)).to_arrow_table()
    assert expected.num_rows == 200
    assert_reads(path, expected)


def test_what_duckdb_has_and_tensors_have_not_is_named(tmp_path: Path) -> None:
    query = (
        "SELECT 1 AS id, 1::UBIGINT AS u64, TIME '01:02:03' AS t, INTERVAL 1 DAY AS iv, MAP {'a': 1} AS m, uuid() AS u"
    )
    with duckdb.connect() as connection:
        connection.execute(f"COPY ({query}) TO '{tmp_path / 'x.parquet'}' (FORMAT parquet)")
    with pytest.raises(UnsupportedTypeError, match="2 columns cannot become tensors") as caught:
        make_parquet_converter(tmp_path)
    assert all(f"'{name}' has type" in str(caught.value) for name in ("iv", "u"))
    rows = make_parquet_converter(tmp_path, columns=["t", "m.key", "m.value"]).head(1)
    assert rows["t"].tolist() == [3_723_000_000]
    assert (rows["m.key"][0].tolist(), rows["m.value"][0].tolist()) == (["a"], [1])


def test_enums_of_duckdb_are_text(tmp_path: Path) -> None:
    with duckdb.connect() as connection:
        connection.execute("CREATE TYPE colour AS ENUM ('red', 'blue')")
        connection.execute(
            f"COPY (SELECT ['red', 'blue', NULL][i + 1]::colour AS x FROM range(3) t(i)) TO '{tmp_path / 'x.parquet'}'"
        )
    assert_reads(tmp_path, pa.table({"x": ["red", "blue", None]}))


# ---------------------------------------------------------------------------------------------------------- Spark


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    """Every type of Spark that has a tensor form, with nulls, in the order of `id`."""
    return spark.sql(FRAME)


def rows_of_spark(spark: SparkSession, path: Path, *, root: Path | None = None) -> pa.Table:
    """What Spark reads, in the order of the files' names below `root`, with columns for the members of structs."""
    table = spark.read.parquet(str(path)).select("*", "_metadata.file_path", "_metadata.row_index").toArrow()
    places = [unquote(urlsplit(place).path) for place in table["file_path"].to_pylist()]
    names = [os.path.relpath(place, root or path) for place in places]
    order = sorted(range(table.num_rows), key=lambda row: (names[row], table["row_index"][row].as_py()))
    return flatten(table.drop_columns(["file_path", "row_index"]).take(order))


@pytest.fixture
def conf(spark: SparkSession) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """Settings of the session for one test."""
    before: dict[str, str | None] = {}

    def change(wanted: Mapping[str, str]) -> None:
        for name, value in wanted.items():
            before.setdefault(name, spark.conf.get(name, None))
            spark.conf.set(name, value)

    yield change
    for name, value in before.items():
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)


FILTERED_WAYS = ("as it is", "INT96", "legacy", "small")
"""Ways that differ in what a footer says of a column's values."""


def assert_filters(path: Path, expected: pa.Table) -> None:
    """Each comparison with a value of a column leaves the rows that it leaves of the table."""
    table = expected.append_column("row", pa.array(range(expected.num_rows)))
    names = [field.name for field in expected.schema if not pa.types.is_nested(field.type)]
    with make_parquet_converter(path, columns=names, float_dtype=None) as converter:
        for name in names:
            present = sorted({one for one in expected[name].to_pylist() if one is not None and one == one})
            for value in (present[len(present) // 2], present[-1]):
                for sign in ("<", ">=", "!="):
                    rows = rows_by_sparks_rule(table, [(name, sign, value)])["row"].to_pylist()
                    if not rows:
                        with pytest.raises(SourceError, match="No row of"):
                            converter.where([(name, sign, value)])
                        continue
                    left = converter.where([(name, sign, value)])
                    assert read(left, with_row_index="row", columns=["id"])["row"].tolist() == rows, (name, sign, value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.long("every way in which Spark writes, 20 s")
def test_frames_of_spark(spark: SparkSession, frame: DataFrame, conf: Any, tmp_path: Path, way: str) -> None:
    confs, options = WAYS[way]
    conf(confs)
    frame.write.options(**options).parquet(str(tmp_path / "x"))
    if "second version" in way:
        # Its fast reader takes decimals of DELTA_BYTE_ARRAY for others.
        conf({"spark.sql.parquet.enableVectorizedReader": "false"})
    expected = rows_of_spark(spark, tmp_path / "x")
    assert expected["id"].to_pylist() == list(range(200))
    assert_reads(tmp_path / "x", expected)
    if way in FILTERED_WAYS:
        assert_filters(tmp_path / "x", expected)
    with open_files(tmp_path / "x", expected) as converter:
        assert len(converter.where([("time", ">", EPOCH), ("d9", "<", decimal.Decimal(20))])) == 39
        assert len(converter.where([("struct.a", ">", 150), ("text", "!=", "")])) == len(
            [row for row in range(151, 200) if row % 6 and row % 7 and row % 3]
        )


@pytest.mark.parametrize("way", OLD_WAYS)
def test_frames_of_spark_3_5(tmp_path: Path, way: str) -> None:
    written = OLD_FILES / f"{way}.parquet"
    with pa.OSFile(str(OLD_FILES / f"{way}.arrow")) as file, pa.ipc.open_file(file) as expected_file:
        expected = expected_file.read_all()
    said = pq.read_schema(written).metadata[b"org.apache.spark.version"].decode()
    assert said == OLD_FILES.name.removeprefix("spark-")
    assert expected.num_rows == 200
    (tmp_path / "x.parquet").symlink_to(written)
    assert_reads(tmp_path / "x.parquet", flatten(expected))
    if way in FILTERED_WAYS:
        assert_filters(tmp_path / "x.parquet", flatten(expected))


@pytest.mark.parametrize("kind", ["INT96", "TIMESTAMP_MICROS", "TIMESTAMP_MILLIS"])
def test_the_first_and_last_times_of_spark(spark: SparkSession, conf: Any, tmp_path: Path, kind: str) -> None:
    conf({"spark.sql.parquet.outputTimestampType": kind, "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
          "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED"})  # fmt: skip
    spark.sql(f"""
        SELECT id, timestamp_micros(element_at(array({", ".join(f"{value}L" for value in MICROSECONDS)}), id + 1)) time,
          CAST(timestamp_micros(element_at(array({", ".join(f"{value}L" for value in MICROSECONDS)}), id + 1))
            AS TIMESTAMP_NTZ) ntz,
          date_from_unix_date(element_at(array({", ".join(map(str, [*DAYS, 5]))}), id + 1)) day
        FROM (SELECT CAST(id AS INT) id FROM range(0, {len(MICROSECONDS)}, 1, 1))
    """).write.parquet(str(tmp_path / "x"))
    assert_reads(tmp_path / "x", rows_of_spark(spark, tmp_path / "x"))


def julian(conf: Any) -> None:
    """Let Spark count dates and times of before 1582 as it did before version 3."""
    conf(dict.fromkeys(("spark.sql.parquet.int96RebaseModeInWrite", "spark.sql.parquet.datetimeRebaseModeInWrite"),
                       "LEGACY"))  # fmt: skip


def test_days_of_the_julian_calendar(spark: SparkSession, conf: Any, tmp_path: Path) -> None:
    julian(conf)
    # Every month and day of before, each day around the calendar's end, and the ends of February in years that differ.
    named = ", ".join(
        f"DATE'{year:04}-0{month}-{day:02}'" for year in (4, 100, 1000, 1500) for month, day in ((2, 28), (3, 1))
    )
    spark.sql(
        f"""SELECT day, named_struct('day', day) AS s FROM (
        SELECT date_add(DATE'0001-01-01', CAST(id * 413 AS INT)) AS day FROM range(1400)
        UNION ALL SELECT date_add(DATE'1582-09-01', CAST(id AS INT)) FROM range(60)
        UNION ALL SELECT explode(array({named}, DATE'9999-12-31', NULL)))"""
    ).write.parquet(str(tmp_path / "x"))
    expected = rows_of_spark(spark, tmp_path / "x")
    assert_reads(tmp_path / "x", expected)
    conf({"spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED"})
    spark.sql("SELECT DATE'1500-02-28' AS day, named_struct('day', DATE'1500-02-28') AS s").write.parquet(
        str(tmp_path / "y")
    )
    with make_parquet_converter([tmp_path / "x", tmp_path / "y"]) as converter:
        wanted, end = dt.date(1500, 2, 28), dt.date(1582, 10, 14)
        assert len(converter.where([("day", "=", wanted)])) == 1 + expected["day"].to_pylist().count(wanted)
        later = pc.sum(pc.greater(expected["day"], pa.scalar(end))).as_py()
        assert len(converter.where([("day", ">", end)])) == later


@pytest.mark.parametrize("kind", ["TIMESTAMP_MICROS", "INT96"])
def test_times_of_the_julian_calendar_are_refused(spark: SparkSession, conf: Any, tmp_path: Path, kind: str) -> None:
    julian(conf)
    conf({"spark.sql.parquet.outputTimestampType": kind})
    for name, years in (("old", (1899, 2026)), ("new", (1901, 2026))):
        times = [f"TIMESTAMP'{year}-06-01 00:00:00'" for year in years]
        spark.sql(f"SELECT explode(array({', '.join(times)}, NULL)) AS time").write.parquet(str(tmp_path / name))
    assert_reads(tmp_path / "new", rows_of_spark(spark, tmp_path / "new"))
    with make_parquet_converter(tmp_path / "old") as converter:
        with pytest.raises(SourceError, match=r"Column 'time' has times before 1900 .* LEGACY mode") as caught:
            converter.where([("time", ">", EPOCH)])
        assert caught.value.column == "time"
        with (
            pytest.raises(SourceError, match="Column 'time' has times before 1900"),
            converter.make_batch_reader(nulls="mask") as reader,
        ):
            list(reader)


JAVA_SCHEMA = """message table { required binary enum (ENUM);
    optional binary decimal (DECIMAL(20, 2)); repeated int32 bare;
    optional group pairs (LIST) { repeated int32 array; } optional int32 d9 (DECIMAL(9, 2)); required binary bytes;
    optional int64 d18 (DECIMAL(18, 2)); optional fixed_len_byte_array(7) d16 (DECIMAL(16, 2));
    optional int32 u8 (INTEGER(8, false)); optional int32 i16 (INTEGER(16, true)); optional int32 old (UINT_16);
    optional int64 ms (TIMESTAMP(MILLIS, false));
    optional group s { required int32 a; optional group t { optional int64 b; } }
}"""


def test_physical_forms_that_only_other_programs_write(spark: SparkSession, tmp_path: Path) -> None:
    write_with_java(spark, tmp_path / "x.parquet")
    assert_reads(tmp_path, rows_of_spark(spark, tmp_path))
    with make_parquet_converter(tmp_path) as converter:
        assert len(converter.where([("enum", "=", "red")])) == 2


def test_types_that_only_spark_knows_are_named(spark: SparkSession, tmp_path: Path) -> None:
    spark.sql("""SELECT parse_json('{"a": 1}') v, INTERVAL '1' YEAR y, INTERVAL '1' DAY d,
        st_geomfromwkb(X'0101000000000000000000F03F0000000000000040') g""").write.parquet(str(tmp_path / "x"))
    with pytest.raises(UnsupportedTypeError, match="2 columns cannot become tensors"):
        make_parquet_converter(tmp_path / "x")
    rows = make_parquet_converter(tmp_path / "x", columns=["y", "d"]).head(1)
    assert (rows["y"].tolist(), rows["d"].tolist()) == ([12], [86_400_000_000])


def write_with_java(spark: SparkSession, path: Path) -> None:
    """A file of parquet-java itself, whose schema is said outright."""
    jvm: Any = spark.sparkContext._jvm
    schema = jvm.org.apache.parquet.schema.MessageTypeParser.parseMessageType(JAVA_SCHEMA)
    factory = jvm.org.apache.parquet.example.data.simple.SimpleGroupFactory(schema)
    place = jvm.org.apache.hadoop.fs.Path(str(path))
    writer = jvm.org.apache.parquet.hadoop.example.ExampleParquetWriter.builder(place).withType(schema).build()
    binary = jvm.org.apache.parquet.io.api.Binary.fromConstantByteArray
    for number in (0, 1, -250, 99_999, -12_345_678):
        row = factory.newGroup()
        row.append("bytes", binary(b"\x00\xff")).append("enum", "red" if number > 0 else "blue")
        for index in range(abs(number) % 3):
            row.append("bare", index)
        if number != 1:
            row.append("decimal", binary(number.to_bytes(1 + abs(number).bit_length() // 8, "big", signed=True)))
            row.append("d9", number).append("d16", binary(number.to_bytes(7, "big", signed=True)))
            # Longs, or it would be taken for an int.
            row.append("d18", number - 2**40).append("ms", number - 2**40)
            row.append("u8", abs(number) % 256).append("i16", number % 1000).append("old", abs(number) % 65536)
            pairs = row.addGroup("pairs")
            for index in range(abs(number) % 4):
                pairs.append("array", index)
            row.addGroup("s").append("a", number).addGroup("t")
        writer.write(row)
    writer.close()


# ---------------------------------------------------------------------------------------------------------- folders

ODD_TEXTS = ["a b", "x/y", "100%", "žluť 🐟", "a=b", ":*?", "%2F", "1,5", "True", "[a]", "c'd\"e", "tail."]


def write(path: Path, columns: Mapping[str, Any] | pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def test_partitions_that_spark_writes(spark: SparkSession, tmp_path: Path) -> None:
    texts = ", ".join("'" + text.replace("'", "\\'") + "'" for text in ODD_TEXTS)
    frame = spark.sql(f"""
        SELECT id, CAST(id * 3 AS STRING) own, IF(id = 5, NULL, DATE'1969-12-31' + CAST(id % 3 AS INT)) day,
          element_at(array({texts}), CAST(id % {len(ODD_TEXTS)} + 1 AS INT)) `text of it`,
          IF(id = 3, NULL, CAST(id - 2 AS INT)) number
        FROM range(0, {2 * len(ODD_TEXTS)}, 1, 1)
    """)
    frame.write.partitionBy("day", "text of it", "number").parquet(str(tmp_path / "x"))
    expected = rows_of_spark(spark, tmp_path / "x")
    assert expected.schema.field("day").type == pa.date32()
    assert expected.schema.field("number").type == pa.int32()
    assert set(expected["text of it"].to_pylist()) == set(ODD_TEXTS)
    assert_reads(tmp_path / "x", expected)
    with open_files(tmp_path / "x", expected) as converter:
        some = expected.filter((pc.field("number") > 3) & (pc.field("day") == dt.date(1970, 1, 1)))
        assert_same_rows(converter.where([("number", ">", 3), ("day", "=", dt.date(1970, 1, 1))]), some)
        assert_same_rows(converter.where([("text of it", "in", ["x/y", "%2F"])]),
                         expected.filter(pc.field("text of it").isin(["x/y", "%2F"])))  # fmt: skip
    one = next((tmp_path / "x").glob("day=1970-01-01/text*"))
    assert_reads(one, rows_of_spark(spark, one))


def test_partitions_have_the_types_that_spark_finds(spark: SparkSession, tmp_path: Path) -> None:
    folders = {
        "int": ["1", "-2", "007"], "edge": ["2147483647", "-2147483648", "0"], "beyond": ["2147483648", "1", "2"],
        "long": ["9223372036854775807", "1700000000123456789", "-9223372036854775808"],
        "float": ["1.5", "-0.25", "1e-3"], "both": ["1", "2.5", "3"], "nan": ["NaN", "1.5", "-Infinity"],
        "some": ["1", "__HIVE_DEFAULT_PARTITION__", "3"], "day": ["2026-11-21", "0001-01-01", "9999-12-31"],
        "some day": ["2026-11-21", "__HIVE_DEFAULT_PARTITION__", "1969-12-31"], "no day": ["2026-02-30", "2026-01-01",
        "2026-01-01"], "week": ["2026-W01-1", "2026-W02-1", "2026-W03-1"],
        "short": ["2026-1-5", "2026-1-6", "2026-1-7"],
        "text": ["a", "1", "2.5"], "flag": ["true", "false", "true"], "day or int": ["2026-01-01", "5", "6"],
        "some text": ["a", "__HIVE_DEFAULT_PARTITION__", "b"], "digits": ["1_0", "2", "3"],
    }  # fmt: skip
    for number in range(3):
        below = "/".join(f"{name}={values[number]}" for name, values in folders.items())
        write(tmp_path / below / "x.parquet", {"id": [number]})
    expected = rows_of_spark(spark, tmp_path)
    assert set(map(str, expected.schema.types)) == {"int32", "int64", "double", "string", "date32[day]"}
    assert_reads(tmp_path, expected)


def test_partitions_of_nothing_but_null_and_of_times_are_text(tmp_path: Path) -> None:
    write(tmp_path / "x=__HIVE_DEFAULT_PARTITION__" / "t=2026-11-21 01%3A02%3A03" / "x.parquet", {"id": [1, 2]})
    text = pa.nulls(2, pa.string())
    assert_reads(tmp_path, pa.table({"id": [1, 2], "x": text, "t": ["2026-11-21 01:02:03"] * 2}))


def partitioned_by_arrow(table: pa.Table, folder: Path) -> None:
    pq.write_to_dataset(table, folder, partition_cols=["part", "number"])


def partitioned_by_pandas(table: pa.Table, folder: Path) -> None:
    table.to_pandas(types_mapper=pd.ArrowDtype).to_parquet(folder, partition_cols=["part", "number"])


def partitioned_by_polars(table: pa.Table, folder: Path) -> None:
    pl.from_arrow(table).write_parquet(pl.PartitionBy(folder, key=["part", "number"]), mkdir=True)  # type: ignore[union-attr]


def partitioned_by_duckdb(table: pa.Table, folder: Path) -> None:
    with duckdb.connect() as connection:
        connection.register("rows", table)
        connection.execute(f"COPY rows TO '{folder}' (FORMAT parquet, PARTITION_BY (part, number))")


@pytest.mark.parametrize(
    "partition", [partitioned_by_arrow, partitioned_by_pandas, partitioned_by_polars, partitioned_by_duckdb]
)
def test_partitions_of_other_writers(tmp_path: Path, partition: Callable[[pa.Table, Path], None]) -> None:
    values = [*ODD_TEXTS, None]
    whole = pa.table({"id": range(26), "part": values * 2, "number": [index % 5 - 1 for index in range(26)]})
    partition(whole, tmp_path / "x")
    with make_parquet_converter(tmp_path / "x", float_dtype=None) as converter:
        assert {field.name: field.dtype for field in converter.schema} == {
            "id": "int64", "part": "str", "number": "int32",
        }  # fmt: skip
        found = read(converter)
    rows = sorted(zip(*(cells_of(found, name) for name in whole.column_names), strict=True))
    assert rows == list(zip(*(whole[name].to_pylist() for name in whole.column_names), strict=True))
    files = in_order((tmp_path / "x").rglob("*.parquet"), tmp_path / "x")
    own = {path: pq.ParquetFile(path).read(["id"])["id"].to_pylist() for path in files}
    assert found["id"].tolist() == [number for path in files for number in own[path]]


def test_globs_and_lists(tmp_path: Path) -> None:
    for day in (1, 2, 10):
        for number in (0, 1):
            write(tmp_path / "t" / f"day={day}" / f"x{number}.parquet", {"id": [day * 10 + number]})
    write(tmp_path / "a b%20é" / "y.parquet", {"id": [7]})

    def found(*urls: Any) -> list[tuple[int, ...]]:
        with make_parquet_converter(urls[0] if len(urls) == 1 else list(urls)) as converter:
            rows = read(converter)
            return list(zip(*(rows[name].tolist() for name in converter.schema.names), strict=True))

    def said_by_duckdb(pattern: str) -> list[tuple[int, ...]]:
        with duckdb.connect() as connection:
            files = f"read_parquet('{tmp_path}/{pattern}', hive_partitioning=true, filename=true)"
            return connection.execute(f"SELECT id, day FROM {files} ORDER BY filename").fetchall()

    assert found(tmp_path / "t") == [(10, 1), (11, 1), (100, 10), (101, 10), (20, 2), (21, 2)]
    for pattern in ("t/day=*/*.parquet", "t/day=*/x0.parquet", "t/day=[12]/*.parquet", "t/day=1?/x1.parquet"):
        assert found(f"{tmp_path}/{pattern}") == said_by_duckdb(pattern)
    assert found(f"{tmp_path}/t/day=*") == found(tmp_path / "t")
    assert found(tmp_path / "t" / "day=2", tmp_path / "t" / "day=1" / "x1.parquet") == [(20,), (21,), (11,)]
    odd = tmp_path / "a b%20é"
    assert found(odd) == found(odd / "y.parquet") == found(odd.as_uri()) == found(f"{tmp_path}/a*/*") == [(7,)]
    assert found(odd, tmp_path / "t" / "day=2" / "x0.parquet", odd) == [(7,), (20,)]
    with pytest.raises(SourceError, match=r"t/day=3\*/\* matches no Parquet files"):
        found(f"{tmp_path}/t/day=3*/*")


def test_what_is_hidden_or_no_data_is_left_out(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", {"id": [1]})
    write(tmp_path / "_k=2" / "x.parquet", {"id": [2]})
    for name in ("_x.parquet", ".x.parquet", "_temporary/0/x.parquet", ".hidden/x.parquet", "_metadata"):
        write(tmp_path / name, {"id": [9]})
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".x.parquet.crc").write_bytes(b"crc")
    with pytest.raises(SourceError, match="is partitioned by"):
        make_parquet_converter(tmp_path)
    (tmp_path / "x.parquet").unlink()
    assert_reads(tmp_path, rows_of_spark(spark, tmp_path))


def test_a_column_that_folders_say_too_is_theirs(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path / "day=2" / "x.parquet", {"id": [1, 2], "day": [7, 7], "last": [3, 4]})
    assert_reads(tmp_path, rows_of_spark(spark, tmp_path))


def test_an_empty_folder_and_a_delta_table_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"empty holds no Parquet files \(names that end with \.parquet\)"):
        make_parquet_converter(tmp_path / "empty")
    write(tmp_path / "rowless" / "x.parquet", {"id": pa.array([], pa.int64())})
    with pytest.raises(SourceError, match=r"rowless.* has no rows"):
        make_parquet_converter(tmp_path / "rowless")
    write(tmp_path / "table" / "x.parquet", {"id": [1]})
    (tmp_path / "table" / "_delta_log").mkdir()
    for path in (tmp_path / "table", tmp_path / "table" / "x.parquet", f"{tmp_path}/table/*.parquet"):
        with pytest.raises(SourceError, match=r"is a Delta table: .* Call make_delta_converter\("):
            make_parquet_converter(path)


@pytest.mark.parametrize("is_longer", [True, False])
def test_a_file_that_changes_is_noticed(tmp_path: Path, is_longer: bool) -> None:
    write(tmp_path / "x.parquet", {"id": [1, 2, 3]})
    path = write(tmp_path / "y.parquet", {"id": [1, 2, 3]})
    before = path.stat().st_size
    with make_parquet_converter(tmp_path) as converter:
        assert read(converter)["id"].tolist() == [1, 2, 3, 1, 2, 3]
        write(path, {"id": range(1000) if is_longer else [1, 2, 4]})
        assert (path.stat().st_size != before) == is_longer
        said = "bytes, expected" if is_longer else "another footer than it was written with"
        for look in (read, lambda one: one.where([("id", ">", 0)]), lambda one: one.split({"a": 1.0}, by="id")):
            with pytest.raises(SourceChangedError, match=rf"y\.parquet has .*{said}.*Make the converter again"):
                look(converter)
        path.unlink()
        with pytest.raises(SourceChangedError, match=r"y\.parquet is not there"):
            read(converter)


# ---------------------------------------------------------------------------------------------- files that disagree


def test_columns_that_are_added_missing_and_reordered(tmp_path: Path) -> None:
    kind = pa.struct({"a": pa.int32(), "b": pa.string()})
    write(tmp_path / "1.parquet", {"id": [1, 2], "x": [0.5, None], "s": pa.array([{"a": 1, "b": "x"}, None], kind)})
    write(tmp_path / "2.parquet", {"new": ["a", None], "x": [1.5, 2.5], "id": [3, 4]})
    reordered = pa.struct({"b": pa.string(), "c": pa.float64(), "a": pa.int32()})
    write(tmp_path / "3.parquet", {"s": pa.array([{"a": 2, "b": "y", "c": 0.5}], reordered), "new": ["c"], "id": [5]})
    expected = pa.table({
        "id": [1, 2, 3, 4, 5], "x": [0.5, None, 1.5, 2.5, None], "s.a": pa.array([1, None, None, None, 2], pa.int32()),
        "s.b": ["x", None, None, None, "y"], "new": [None, None, "a", None, "c"],
        "s.c": [None, None, None, None, 0.5],
    })  # fmt: skip
    assert_reads(tmp_path, expected)
    assert_reads(tmp_path, expected.select(["s.c", "new", "s.a"]), columns=["s.c", "new", "s.a"])
    with open_files(tmp_path, expected) as converter:
        assert converter.statistics["s.b"].null_count == 3
        assert_same_rows(converter.where([("s.a", ">", 0)]), expected.take([0, 4]))
        assert_same_rows(converter.where([("new", "in", ["a", "c"])]), expected.take([2, 4]))
        parts = converter.split({"a": 0.5, "b": 0.5}, by="id")
        assert sorted([*read(parts["a"])["id"], *read(parts["b"])["id"]]) == [1, 2, 3, 4, 5]


NUMBERS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(),
           pa.float16(), pa.float32(), pa.float64()]  # fmt: skip


@pytest.mark.parametrize("other", NUMBERS, ids=str)
@pytest.mark.parametrize("one", NUMBERS, ids=str)
def test_numbers_are_widened_where_nothing_is_lost(tmp_path: Path, one: pa.DataType, other: pa.DataType) -> None:
    def values(kind: pa.DataType) -> list[Any]:
        is_float = pa.types.is_floating(kind)
        return [kind.to_pandas_dtype()(value) for value in FLOATS] if is_float else bounds(kind)

    for name, kind in (("1", one), ("2", other)):
        columns = {"x": pa.array([*values(kind), None], kind), "l": pa.array([values(kind), None], pa.list_(kind))}
        columns["l"] = pa.concat_arrays([columns["l"], pa.nulls(len(columns["x"]) - 2, columns["l"].type)])
        write(tmp_path / f"{name}.parquet", columns)
    has_floats = any(map(pa.types.is_floating, (one, other)))
    if has_floats and {one, other} & {pa.uint32(), pa.int64()}:
        with pytest.raises(SourceError, match=r"2\.parquet has other columns than .*1\.parquet: 'x' is"):
            make_parquet_converter(tmp_path)
        return
    exact = [[plain(float(value) if has_floats else value) for value in values(kind)] for kind in (one, other)]
    with make_parquet_converter(tmp_path, float_dtype=None, shapes={"l": None}) as converter:
        dtype = np.result_type(DTYPES[one], DTYPES[other]).name
        assert {field.name: field.dtype for field in converter.schema} == {"x": dtype, "l": dtype}
        found = read(converter)
        assert cells_of(found, "x") == [*exact[0], None, *exact[1], None]
        assert [cell for cell in cells_of(found, "l") if cell is not None] == exact


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([1]), pa.array(["1"])), (pa.array([True]), pa.array([1])), (pa.array(["1"]), pa.array([b"1"])),
        (pa.array([1.5]), pa.array([decimal.Decimal("1.5")])), (pa.array([1]), pa.array([[1]])),
        (pa.array([dt.date(2026, 1, 1)]), pa.array([0], pa.timestamp("us"))), (pa.array([1]), pa.array([{"a": 1}])),
        (pa.array([{"a": 1}]), pa.array([1])), (pa.array([[1]]), pa.array([[[1]]])), (pa.array([1]), pa.array([1.5])),
        (pa.array([0], pa.timestamp("us")), pa.array([0], pa.timestamp("us", "UTC"))),
        (pa.array([{"a": 1}]), pa.array([{"a": "1"}])), (pa.array([decimal.Decimal("1.5")]),
        pa.array([decimal.Decimal("1.55")])), (pa.array([[1]]), pa.array([{"a": 1}])),
        (pa.array([{"a": {"b": 1}}]), pa.array([{"a": 1}])),
    ],
    ids=lambda array: str(array.type),
)  # fmt: skip
def test_columns_of_other_types_are_refused_with_both_files(tmp_path: Path, one: pa.Array, other: pa.Array) -> None:
    write(tmp_path / "1.parquet", {"id": [1], "x": one})
    write(tmp_path / "2.parquet", {"id": [1], "x": other})
    with pytest.raises(SourceError, match=r"2\.parquet has other columns than .*1\.parquet: 'x(\.a)*(\.b)?' is"):
        make_parquet_converter(tmp_path)
    assert_reads(tmp_path, pa.table({"id": [1, 1]}), columns=["id"])


def test_files_of_several_writers_side_by_side(tmp_path: Path) -> None:
    table = pa.table({
        "id": [1, 2], "text": ["a", None], "bytes": [b"x", None], "list": [[1], []],
        "day": [dt.date(2026, 1, 1), None], "time": pa.array([1, None], pa.timestamp("us")),
    })  # fmt: skip
    write(tmp_path / "1.parquet", table)
    views = {"text": pa.string_view(), "bytes": pa.binary_view(), "list": pa.large_list(pa.int64()),
             "time": pa.timestamp("ns")}  # fmt: skip
    write(tmp_path / "2.parquet", {name: table[name].cast(views.get(name, table.schema.field(name).type))
                                   for name in table.column_names})  # fmt: skip
    large = {"text": pa.large_string(), "bytes": pa.large_binary(), "time": pa.timestamp("ms")}
    write(tmp_path / "3.parquet", {name: table[name].cast(large.get(name, table.schema.field(name).type), safe=False)
                                   for name in table.column_names})  # fmt: skip
    write(tmp_path / "4.parquet", table.set_column(1, "text", table["text"].dictionary_encode()))
    pl.from_arrow(table).write_parquet(tmp_path / "5.parquet")  # type: ignore[union-attr]
    table.to_pandas(types_mapper=pd.ArrowDtype).to_parquet(tmp_path / "6.parquet")
    with duckdb.connect() as connection:
        connection.register("rows", table)
        connection.execute(f"COPY (SELECT * FROM rows) TO '{tmp_path / '7.parquet'}'")
    write(tmp_path / "8.parquet", table, use_deprecated_int96_timestamps=True)
    late = table.set_column(5, "time", pa.array([0, None], pa.timestamp("us")))
    whole = pa.concat_tables([table, table, late, table, table, table, table, table])
    assert_reads(tmp_path, whole)
    with open_files(tmp_path, whole) as converter:
        assert_same_rows(converter.where([("text", "=", "a"), ("time", ">", EPOCH - dt.timedelta(days=365))]),
                         whole.filter(pc.field("text") == "a"))  # fmt: skip
        for by in ("text", "bytes", "day"):
            parts = converter.split({"a": 0.5, "b": 0.5}, by=by, seed=seed_that_divides(converter, by))
            assert [len(part) for part in parts.values()] == [8, 8]


def seed_that_divides(converter: Any, by: str) -> int:
    """The first seed with which neither part is empty."""
    for seed in range(100):
        try:
            converter.split({"a": 0.5, "b": 0.5}, by=by, seed=seed)
        except SourceError:
            continue
        return seed
    raise AssertionError


def test_names_that_differ_in_case_are_columns_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", {"id": [1], "Name": ["a"]})
    write(tmp_path / "2.parquet", {"ID": [2], "name": ["b"]})
    first, second = pq.read_table(tmp_path / "1.parquet"), pq.read_table(tmp_path / "2.parquet")
    assert_reads(tmp_path, pa.concat_tables([first, second], promote_options="default"))
    with pytest.raises(NullValueError, match="Column 'id' holds"), make_parquet_converter(tmp_path) as converter:
        read(converter, nulls="raise")


# --------------------------------------------------------------------------------------------------- parts of rows

FILTERS: list[list[tuple[str, str, Any]]] = [
    [("numbers: int64", ">", 100)], [("numbers: uint32", "=", 2**32 - 1)], [("numbers: uint8", "<", 100)],
    [("numbers: float16", ">", 1.0)], [("numbers: float32", "<=", 0.0)], [("numbers: float64", "!=", 1.5)],
    [("numbers: bool", "=", True)], [("times: date32", "<", dt.date(1970, 1, 1))],
    [("times: us None", ">=", dt.datetime(2020, 1, 1, tzinfo=dt.timezone.utc))], [("times: ms UTC", "<", EPOCH)],
    [("times: s Europe/Prague", "<", EPOCH)], [("texts: string", "=", "")],
    [("texts: large_string", "in", ["a", "x" * 300])], [("texts: string_view", "=", "a")],
    [("texts: binary_view", "=", b"PAR1")], [("texts: dictionary", "!=", "a")],
    [("decimals: decimal128(38, 2)", ">", decimal.Decimal(1))], [("structs: s.number", "=", 1)],
    [("structs: s.text", "=", "x"), ("structs: s.inner.flag", "=", True)], [("structs: s.u8", ">", 254)],
    [("texts: string", "not in", ["a", ""]), ("numbers: int32", ">", 0)],
]  # fmt: skip


@pytest.mark.parametrize("layout", ["as it is", "small row groups", "no statistics"])
def test_filters_leave_the_rows_that_arrow_leaves_and_nan_is_above_all(tmp_path: Path, layout: str) -> None:
    write(tmp_path / "x.parquet", every_type(), **LAYOUTS[layout])
    whole = flatten(every_type())
    with open_files(tmp_path, whole) as converter:
        for filters in FILTERS:
            names = list(dict.fromkeys(name for name, _, _ in filters))
            table = whole.select(names)
            for index, field in enumerate(table.schema):
                if pa.types.is_float16(field.type):
                    table = table.set_column(index, field.name, table[index].cast(pa.float32()))
                elif "view" in str(field.type) or pa.types.is_dictionary(field.type):
                    kind = pa.binary() if "binary" in str(field.type) else pa.string()
                    table = table.set_column(index, field.name, table[index].cast(kind))
            zones = {field.name: getattr(field.type, "tz", None) for field in table.schema}
            fitting = [(name, sign, value.replace(tzinfo=None) if isinstance(value, dt.datetime) and zones[name] is None
                        else value) for name, sign, value in filters]  # fmt: skip
            rows = rows_by_sparks_rule(table.append_column("row", pa.array(range(NUM_ROWS))), fitting)["row"]
            assert 0 < len(rows) < NUM_ROWS, filters
            found = read(converter.where(filters), with_row_index="row", columns=names)
            assert found["row"].tolist() == rows.to_pylist(), filters


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_every_unit_can_be_filters_and_keys(tmp_path: Path, unit: str) -> None:
    times = pa.array([None, -1_000_000_001, -1, 0, 1, 999, 1001, 2_000_000_001], pa.int64()).cast(pa.timestamp(unit))
    table = pa.table({"id": range(8), "time": times})
    write(tmp_path / "x.parquet", table)
    with open_files(tmp_path, table) as converter:
        assert_same_rows(converter.where([("time", "<", EPOCH)]), table.take([1, 2]))
        parts = converter.split({"a": 0.5, "b": 0.5}, by="time")
        assert sorted([*read(parts["a"])["id"], *read(parts["b"])["id"]]) == list(range(8))


def test_statistics_are_those_of_the_rows(tmp_path: Path) -> None:
    write(tmp_path / "day=1" / "x.parquet", every_type(), row_group_size=13)
    write(tmp_path / "day=2" / "x.parquet", every_type().slice(30), row_group_size=13)
    whole = flatten(pa.concat_tables([every_type(), every_type().slice(30)]))
    with open_files(tmp_path, whole) as converter:
        statistics = converter.statistics
        assert (statistics["day"].min, statistics["day"].max, statistics["day"].null_count) == (1, 2, 0)
        assert statistics["day"].mean == pytest.approx(4 / 3)
        for name in whole.column_names:
            column, known = whole[name], statistics[name]
            assert known.null_count == column.null_count, name
            if pa.types.is_timestamp(column.type):
                cells = [cell for cell in expected_cells(whole, name) if cell is not None]
                days = [np.datetime64(cell, "us").item() for cell in (min(cells), max(cells))]
                assert (known.min, known.max) == tuple(day.replace(tzinfo=dt.timezone.utc) for day in days), name
                continue
            cells = [cell for cell in column.to_pylist() if cell is not None]
            if is_list(column.type):
                lengths = [np.array(cell, object).size for cell in cells]
                assert (known.shortest, known.longest) == (min(lengths), max(lengths)), name
            elif known.field.dtype.startswith(("int", "bool")):
                assert (known.min, known.max) == (min(cells), max(cells)), name
            elif known.field.dtype.startswith("float") and not pa.types.is_decimal(column.type):
                numbers = [cell for cell in cells if cell == cell]
                assert known.nan_count == len(cells) - len(numbers), name
                assert (known.min, known.max) == (min(numbers), max(numbers)), name
            elif known.field.dtype == "datetime64[D]":
                assert (known.min, known.max) == (min(cells), max(cells)), name


def test_columns_are_taken_in_the_order_they_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "day=1" / "x.parquet", every_type())
    whole = flatten(every_type()).append_column("day", pa.array([1] * NUM_ROWS, pa.int32()))
    rng = np.random.default_rng(0)
    for _ in range(20):
        chosen = rng.permutation(whole.column_names)[: rng.integers(1, 12)].tolist()
        assert_reads(tmp_path, whole.select(chosen), columns=chosen,
                     shapes={name: None for name in chosen if is_list(whole.schema.field(name).type)})  # fmt: skip
    assert_reads(tmp_path, whole.select(["day"]), columns=["day"])
    for name in ("structs: s.numbre", "dya", "structs: s"):
        with pytest.raises(ValueError, match=f"columns: There is no column '{name}'"):
            make_parquet_converter(tmp_path, columns=[name])


def test_parts_by_row_and_by_key_cover_the_rows_once(tmp_path: Path) -> None:
    write(tmp_path / "day=1" / "x.parquet", every_type(), row_group_size=13)
    write(tmp_path / "day=2" / "x.parquet", every_type())
    whole = flatten(every_type())
    keys = ["numbers: int8", "numbers: uint32", "numbers: bool", "times: date32", "times: ms UTC", "texts: string",
            "texts: large_string", "texts: string_view", "texts: binary", "texts: dictionary", "structs: s.text",
            "structs: s.u8", None]  # fmt: skip
    with open_files(tmp_path, whole) as converter:
        for by in keys:
            seed = 0 if by is None else seed_that_divides(converter, by)
            parts = converter.split({"a": 0.5, "b": 0.5}, by=by, seed=seed).values()
            found = [read(part, with_row_index="row", columns=[by or "day"]) for part in parts]
            assert sorted(row for part in found for row in part["row"].tolist()) == list(range(2 * NUM_ROWS))
            if by is not None:
                one, other = (set(map(repr, cells_of(part, by))) for part in found)
                assert not one & other, by


# ------------------------------------------------------------------------------------------------------- Memory


def memory_of_an_epoch(path: str, shuffle: bool) -> tuple[int, int, int]:
    """Rows, the anonymous memory that reading them took at most, and the bound that was told."""
    import threading

    def anonymous() -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    with make_parquet_converter(path) as converter:
        bound = converter.plan(batch_size=1024, shuffle=shuffle).peak_memory_bytes
        with converter.make_batch_reader(batch_size=1024, shuffle=shuffle) as reader:
            before, peak, is_over = anonymous(), [0], threading.Event()

            def watch() -> None:
                while not is_over.wait(0.002):
                    peak[0] = max(peak[0], anonymous())

            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                num_rows = sum(len(batch["id"]) for batch in reader)
            finally:
                is_over.set()
                watcher.join()
    return num_rows, peak[0] - before, bound


@pytest.mark.parametrize("shuffle", [False, True], ids=["plain", "shuffled"])
@pytest.mark.long("9 s")
def test_a_row_group_that_is_larger_than_a_window_keeps_to_the_bound(tmp_path: Path, shuffle: bool) -> None:
    num_rows, numbers = 1_000_000, np.random.default_rng(0).random(1_000_000, np.float32)
    table = pa.table({"id": range(num_rows)} | {f"x{number}": numbers for number in range(40)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=num_rows, compression="zstd")
    del table
    rows, peak, bound = run_python(memory_of_an_epoch, str(tmp_path), shuffle)
    assert rows == num_rows
    # As large as one of these columns at least, so that the watching is seen to work.
    # The bound is that of many epochs: the last one's rows are in use while the next one's are read.
    assert 50_000_000 < peak < bound < 6 * 168_000_000
