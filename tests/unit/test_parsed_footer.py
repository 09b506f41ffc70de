"""Footers of any writer say what Arrow reads in them; whatever other bytes are, they are a ValueError."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import io
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import parsed_footer
from converter.chunk_bounds import bound
from converter.parsed_footer import ColumnChunk, ParsedFooter, parse_end
from converter.thrift import read_struct
from tests.encrypted import write_encrypted
from tests.faults.footer_fuzz import mutate
from tests.properties import examples

IDS = np.arange(100)
SCALARS: dict[str, pa.Array] = {
    "int8": pa.array(IDS - 50, pa.int8()),
    "int16": pa.array(IDS - 50, pa.int16()),
    "int32": pa.array(IDS - 50, pa.int32()),
    "int64": pa.array(IDS - 2**40, pa.int64()),
    "uint8": pa.array(IDS + 150, pa.uint8()),
    "uint16": pa.array(IDS + 2**15, pa.uint16()),
    "uint32": pa.array(IDS + 2**31, pa.uint32()),
    "uint64": pa.array(IDS.astype(np.uint64) + np.uint64(2**63), pa.uint64()),
    "float32": pa.array(IDS / 8, pa.float32()),
    "float64": pa.array(IDS / -8, pa.float64()),
    "bool": pa.array(IDS % 2 == 0),
    "string": pa.array([f"grün {one}" if one % 9 else None for one in IDS]),
    "long string": pa.array(["x" * 300 + str(one) for one in IDS]),
    "binary": pa.array([bytes([one]) for one in IDS.tolist()]),
    "fixed": pa.array([bytes([one, 255]) for one in IDS.tolist()], pa.binary(2)),
    "date": pa.array(IDS.astype(np.int32) - 9, pa.date32()),
    "timestamp[us]": pa.array(IDS - 9, pa.timestamp("us", "UTC")),
    "timestamp[ms]": pa.array(IDS - 9, pa.timestamp("ms")),
    "decimal": pa.array([decimal.Decimal(one - 50) / 4 for one in IDS.tolist()], pa.decimal128(10, 2)),
    "wide decimal": pa.array([decimal.Decimal(one - 50) * 10**25 for one in IDS.tolist()], pa.decimal128(38, 2)),
    "null": pa.array([None] * 100, pa.int64()),
}
NESTED: dict[str, Any] = {
    "list": [[one] * (one % 3) for one in IDS.tolist()],
    "struct": [{"a": one, "b": None if one % 2 else str(one)} for one in IDS.tolist()],
    "map": pa.array([[("k", one)] for one in IDS.tolist()], pa.map_(pa.string(), pa.int64())),
}


def end_of(data: bytes) -> bytes:
    return data[-8 - int.from_bytes(data[-8:-4], "little") :]


def with_arrow(columns: dict[str, Any] = SCALARS, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, **{"row_group_size": 30, **options})
    return sink.getvalue()


def with_polars() -> bytes:
    sink = io.BytesIO()
    columns = {name: one for name, one in SCALARS.items() if name not in ("fixed", "null")}
    pl.from_arrow(pa.table(columns)).write_parquet(sink, row_group_size=30)  # type: ignore[union-attr]
    return sink.getvalue()


def with_duckdb(tmp_path: Path) -> bytes:
    rows = pa.table({name: one for name, one in SCALARS.items() if name not in ("fixed", "uint64", "wide decimal")})
    path = tmp_path / "duckdb.parquet"
    with duckdb.connect() as connection:
        connection.register("rows_of_arrow", rows)
        connection.sql(f"COPY (SELECT * FROM rows_of_arrow) TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE 2048)")
    return path.read_bytes()


WRITERS: dict[str, Callable[[Path], bytes]] = {
    "arrow": lambda _: with_arrow(),
    "arrow, nested": lambda _: with_arrow(NESTED),
    "arrow, plain": lambda _: with_arrow(use_dictionary=False, compression="none"),
    "arrow, indexes": lambda _: with_arrow(write_page_index=True, compression="zstd", data_page_version="2.0"),
    "arrow, no statistics": lambda _: with_arrow(write_statistics=False),
    "arrow, one row group": lambda _: with_arrow(row_group_size=1000),
    "arrow, no rows": lambda _: with_arrow({"x": pa.array([], pa.int64())}),
    "arrow, 40 row groups": lambda _: with_arrow(row_group_size=2),
    "polars": lambda _: with_polars(),
    "duckdb": with_duckdb,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_a_footer_says_is_what_arrow_reads_in_it(write: Callable[[Path], bytes], tmp_path: Path) -> None:
    data = write(tmp_path)
    footer, metadata = parse_end(end_of(data)), pq.read_metadata(io.BytesIO(data))
    schema, has_nested = (
        metadata.schema.to_arrow_schema(),
        metadata.num_columns != len(metadata.schema.to_arrow_schema()),
    )
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    assert footer.row_group_rows == tuple(group.num_rows for group in groups)
    assert footer.row_group_bytes == tuple(group.total_byte_size for group in groups)
    assert footer.num_rows == metadata.num_rows
    assert not footer.is_encrypted
    columns = [groups[0].column(leaf) for leaf in range(metadata.num_columns)] if groups else []
    # The first row group stands for the others, which a writer may have stored in other ways.
    assert footer.formats() == ({column.compression for column in columns}, {e for c in columns for e in c.encodings})
    for index, group in enumerate(groups):
        for leaf in range(metadata.num_columns):
            found, expected = footer.chunk(index, leaf), group.column(leaf)
            assert found.physical_type == expected.physical_type
            # To Arrow both ways to write LZ4 are one.
            assert found.codec == expected.compression
            assert found.num_values == expected.num_values
            assert found.raw_bytes == expected.total_uncompressed_size
            assert found.stored_bytes == expected.total_compressed_size
            assert found.data_page_offset == expected.data_page_offset
            assert found.dictionary_page_offset == expected.dictionary_page_offset
            assert len(found.encodings) == len(set(expected.encodings))
            statistics = expected.statistics
            assert found.null_count == (statistics.null_count if statistics and statistics.has_null_count else None)
            assert footer.counts(leaf)[index] == (found.num_values, found.raw_bytes, found.null_count)
            if has_nested:
                continue
            bounds = footer.bounds(index, leaf, schema.field(leaf).type)
            if bounds is not None:
                assert statistics is not None
                assert statistics.has_min_max
                assert [one.as_py() for one in bounds] == [statistics.min, statistics.max]
            else:
                # A column of nulls has none, and Arrow does not name the order of what it reads from DuckDB.
                assert statistics is None or not statistics.has_min_max, schema.field(leaf)


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_field_by_field_a_footer_says_the_same(
    write: Callable[[Path], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = end_of(write(tmp_path))
    fast = parse_end(end)
    monkeypatch.setattr(parsed_footer, "chunk_pattern", lambda: re.compile(b"(?!)"))
    slow = parse_end(end)
    assert not any(isinstance(chunk, re.Match) for group in slow._groups for chunk in group)
    for index in range(len(fast.row_group_rows)):
        for leaf in range(len(fast.leaf_types)):
            assert fast.chunk(index, leaf) == slow.chunk(index, leaf)
    for leaf in range(len(fast.leaf_types)):
        assert fast.counts(leaf) == slow.counts(leaf)
        assert fast.decoded_bytes(leaf, None) == slow.decoded_bytes(leaf, None)
        assert fast.list_bytes(leaf, 2) == slow.list_bytes(leaf, 2)
    assert fast.formats() == slow.formats()


@pytest.mark.parametrize("name", ["arrow", "arrow, plain", "arrow, indexes", "polars", "duckdb"])
def test_the_layouts_of_common_writers_are_known(name: str, tmp_path: Path) -> None:
    """All but the column of long texts, whose bounds are longer than what the expression takes."""
    footer = parse_end(end_of(WRITERS[name](tmp_path)))
    slow = [leaf for group in footer._groups for leaf, chunk in enumerate(group) if isinstance(chunk, dict)]
    assert len(set(slow)) <= 1


def test_only_the_wanted_columns_are_kept() -> None:
    footer = parse_end(end_of(with_arrow()))
    expected = footer.chunk(1, 3)
    footer.keep([3, 3])
    assert footer.chunk(1, 3) == expected
    with pytest.raises(KeyError):
        footer.chunk(1, 2)


def test_bounds_of_an_order_that_is_not_known_are_not_used() -> None:
    end = end_of(with_arrow({"id": pa.array([3, 5])}))
    assert parse_end(end).bounds(0, 0, pa.int64()) == (pa.scalar(3), pa.scalar(5))
    # The list of column orders: one union, whose member 1 is the order of the type. Member 2 does not exist yet.
    assert end.count(b"\x1c\x1c\x00\x00") == 1
    other = end.replace(b"\x1c\x1c\x00\x00", b"\x1c\x2c\x00\x00")
    assert parse_end(other).bounds(0, 0, pa.int64()) is None


def test_a_row_group_that_does_not_exist_is_named() -> None:
    footer = parse_end(end_of(with_arrow()))
    for index in (4, -1):
        with pytest.raises(ValueError, match=rf"it has no row group {index}, its footer describes 4"):
            footer.chunk(index, 0)
        with pytest.raises(ValueError, match=rf"it has no row group {index}, its footer describes 4"):
            footer.rows_of([0, index])
    assert footer.rows_of([0, 3]) == 40


def test_encrypted_columns_are_seen_behind_a_plain_footer(tmp_path: Path) -> None:
    for is_plain in (True, False):
        path = tmp_path / f"{is_plain}.parquet"
        write_encrypted(path, {"a": [1], "b": [2]}, plaintext_footer=is_plain)
        if is_plain:
            assert parse_end(end_of(path.read_bytes())).is_encrypted
        else:
            with pytest.raises(ValueError, match=r"its footer is encrypted; read it with Spark"):
                parse_end(end_of(path.read_bytes()))


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (b"", "does not end as a Parquet file does"),
        (b"PAR1", "does not end as a Parquet file does"),
        (b"\0" * 8, "does not end as a Parquet file does"),
        (b"\xff\xff\xff\x7fPAR1", "its footer has 0 bytes, expected 2147483647"),
        (b"\0\0\0\0PAR1", "ends too early"),
        (b"\0\1\0\0\0PAR1", "has no schema"),
        (b"\x1c" * 9000 + (9000).to_bytes(4, "little") + b"PAR1", "structs are nested too deeply"),
        (b"\x19\xf9" * 9000 + (18000).to_bytes(4, "little") + b"PAR1", "damaged"),
        (b"\x16" + b"\xff" * 99 + (100).to_bytes(4, "little") + b"PAR1", "a number has too many bytes"),
    ],
)
def test_what_is_no_footer_is_said(end: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_end(end)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_struct_or_an_error(data: bytes) -> None:
    try:
        _, place = read_struct(data, 0)
    except (IndexError, ValueError):
        return
    assert place <= len(data)


@examples(300)
@given(st.integers(0, 2**32))
def test_a_mutated_footer_gives_values_or_a_value_error(seed: int) -> None:
    end = end_of(with_arrow(row_group_size=50))
    footer = mutate(end[:-8], random.Random(seed))
    with contextlib.suppress(ValueError):
        parsed = ParsedFooter(footer)
        for leaf, kind in zip(range(len(parsed.leaf_types)), SCALARS.values(), strict=False):
            for index in range(len(parsed.row_group_rows)):
                parsed.bounds(index, leaf, kind.type)
            parsed.counts(leaf)


@pytest.mark.parametrize(
    ("physical", "kind", "raw"),
    [
        ("INT32", pa.int32(), b"\0" * 3),
        ("INT32", pa.int32(), b""),
        ("INT32", pa.int64(), b"\0" * 8),
        ("INT96", pa.timestamp("us"), b"\0" * 12),
        ("BOOLEAN", pa.bool_(), b""),
        ("BYTE_ARRAY", pa.string(), b"\xff"),
        ("BYTE_ARRAY", pa.decimal128(4, 2), b""),
        ("INT64", pa.decimal128(4, 2), b"\xff" * 4),
        ("INT32", pa.decimal128(4, 2), b"\xff\xff\xff\x7f"),
        ("FIXED_LEN_BYTE_ARRAY", pa.binary(4), b"abc"),
        ("FIXED_LEN_BYTE_ARRAY", pa.float16(), b"ab"),
        ("DOUBLE", pa.float32(), b"\0" * 8),
        ("INT64", pa.time64("us"), b"\0" * 8),
    ],
)
def test_a_bound_that_is_no_value_of_the_type_is_not_known(physical: str, kind: pa.DataType, raw: bytes) -> None:
    chunk = ColumnChunk(physical, "SNAPPY", frozenset(), 1, 1, 1, 4, None, 0, raw, raw)
    assert bound(raw, chunk.physical_type, kind) is None


def test_days_and_times_beyond_pythons_are_bounds_as_well() -> None:
    days = pa.array([4_000_000], pa.int32()).view(pa.date32())
    times = pa.array([2**62], pa.int64()).view(pa.timestamp("us"))
    footer = parse_end(end_of(with_arrow({"day": days, "time": times})))
    assert [one.value for one in footer.bounds(0, 0, days.type) or ()] == [4_000_000] * 2
    assert [one.value for one in footer.bounds(0, 1, times.type) or ()] == [2**62] * 2
    assert dt.date.max.toordinal() - 719_163 < 4_000_000


@pytest.mark.parametrize("levels", [[], [2**62] * 3, [4, -4, 10], [4, 2, 3], [4, 2**70, 0], ["4", "2", "4"]])
def test_numbers_of_lists_that_cannot_be_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, levels: list[Any]
) -> None:
    pq.write_table(pa.table({"x": [[[1], [2, 3]], [[]], [[4, 5, 6, 7]], [[8], [9]]]}), tmp_path / "a.parquet")
    monkeypatch.setattr(parsed_footer, "chunk_pattern", lambda: re.compile(b"(?!)"))
    footer = parse_end(end_of((tmp_path / "a.parquet").read_bytes()))
    chunk: Any = footer._groups[0][0]
    assert chunk[3][16][2] == [4, 2, 4]
    assert footer.list_bytes(0, 2) == [4 * (4 + 6)]
    chunk[3][16][2] = levels
    assert footer.list_bytes(0, 2) == [4 * (4 + 10)]
