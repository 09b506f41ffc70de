"""Filters, parts, heads and stacks over existing files."""

from __future__ import annotations

import datetime as dt
import decimal
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from converter import (
    CacheError,
    ReadError,
    SourceError,
    make_parquet_converter,
)
from converter.parsed_footer import ParsedFooter
from converter.reading.checks import DataFile
from tests.unit.sources.parquet.known_files import (
    read,
    write,
)


def test_a_copy_reads_the_same_rows(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet", {"id": np.arange(50)}, row_group_size=10)
    converter = make_parquet_converter(tmp_path)
    copy = pickle.loads(pickle.dumps(converter.where([("id", ">", 24)])))
    assert read(copy)["id"].tolist() == list(range(25, 50))
    parts = converter.split({"train": 0.8, "val": 0.2})
    assert sorted([*read(parts["train"])["id"], *read(parts["val"])["id"]]) == list(range(50))
    assert len(parts["val"]) == 10


def test_filters_compare_as_the_column_is(tmp_path: Path) -> None:
    numbers = np.arange(20_000_000, 20_000_200)
    columns = {
        "double": np.arange(200) / 10, "long": numbers, "int": numbers.astype("int32"),
        "zero": np.where(np.arange(200) % 2, 0.0, -0.0).astype("float32"),
        "some": pa.array([None if row % 4 == 0 else row for row in range(200)]),
    }  # fmt: skip
    write(tmp_path, "x.parquet", columns, row_group_size=50)
    converter = make_parquet_converter(tmp_path)
    for filters, expected in (
        ([("double", "=", 0.1)], 1), ([("double", ">", 0.1)], 198), ([("double", "<=", 0.1)], 2),
        ([("double", "in", [0.1, 0.3, 7])], 3), ([("long", "<", 2.00001e7)], 100), ([("int", "<", 2.00001e7)], 100),
        ([("long", "<", np.float64(20_000_100))], 100), ([("long", "<", 20_000_000.5)], 1), ([("int", "=", 2e7)], 1),
        ([("zero", "=", 0.0)], 200), ([("zero", "in", [0.0])], 200), ([("some", "in", [None, 3, 5])], 2),
        ([("some", "not in", [3])], 149), ([("long", "<", float("inf"))], 200),
    ):  # fmt: skip
        assert len(converter.where(filters)) == expected, filters
    for nothing in ([("zero", "not in", [0.0])], [("some", "not in", [None, 3])], [("some", "=", None)]):
        with pytest.raises(SourceError, match="No row of"):
            converter.where(nothing)


def test_a_footer_is_read_once_where_a_filter_looks_at_its_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.parquet", {"id": range(300), "x": [1, 2, 3] * 100}, row_group_size=3)
    looked_at: list[int] = []

    check = DataFile.check

    def check_and_count(file: DataFile, opened: pa.NativeFile) -> ParsedFooter:
        looked_at.append(file.number)
        return check(file, opened)

    monkeypatch.setattr(DataFile, "check", check_and_count)
    with make_parquet_converter(tmp_path) as converter:
        assert len(converter.where([("x", "=", 2)])) == 100
        assert looked_at == [0]


def test_a_list_that_holds_nan_finds_it_though_no_footer_does(tmp_path: Path) -> None:
    x = np.arange(100.0)
    x[[5, 77]] = np.nan
    write(tmp_path, "x.parquet", {"x": x}, row_group_size=10)
    with make_parquet_converter(tmp_path, float_dtype=None) as converter:
        for listed, left in (([np.nan], [5, 77]), ([30.0, float("nan")], [5, 30, 77]), ([30.0], [30])):
            part = converter.where([("x", "in", listed)])
            np.testing.assert_array_equal(read(part)["x"], x[left])
        assert len(converter.where([("x", "not in", [30.0])])) == 99


def test_what_is_added_takes_nobodys_name_and_no_batch_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "x.parquet", {"x": pa.array([1, None]), "__valid": [1, 2]})
    converter = make_parquet_converter(tmp_path)
    with pytest.raises(ValueError, match="'__valid' is a column already, and would be added by uneven='pad'"):
        converter.make_batch_reader(uneven="pad", nulls="mask")
    with pytest.raises(ValueError, match="with_row_index: 'x__valid' is a column already"):
        converter.make_batch_reader(columns=["x"], nulls="mask", with_row_index="x__valid")
    with pytest.raises(ValueError, match="so an epoch has no batch, for ever with num_epochs=None"):
        converter.make_batch_reader(nulls="mask", batch_size=3, drop_last=True, num_epochs=None)
    converter.make_batch_reader(nulls="mask", batch_size=3, drop_last=True)
    assert "so an epoch has no batch" in caplog.text


def test_a_stack_says_which_integers_may_be_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "x.parquet", {"i": [1, 2], "wide": [2**60, 1], "y": np.array([0.5, 1], "float32")})
    converter = make_parquet_converter(tmp_path)
    with caplog.at_level("INFO", logger="converter"):
        converter.make_batch_reader(stack={"s": ["i", "wide", "y"]})
    assert "Stack 's' makes float32 of columns whose integers may be beyond 16777216" in caplog.text
    for stack in ({3: ["i"]}, {"s": [1]}, {"": ["i"]}):
        with pytest.raises(TypeError, match="stack: "):
            converter.make_batch_reader(stack=stack)


def test_filters_of_kinds_that_arrow_does_not_compare(tmp_path: Path) -> None:
    columns = {
        "id": [0, 1, 2],
        "price": pa.array([decimal.Decimal("1.50"), decimal.Decimal("2.00"), decimal.Decimal("3.25")]),
        "day": [dt.date(2020, 1, 1), dt.date(2020, 1, 2), dt.date(2020, 1, 3)],
        "text": ["日本" * 20, "ü" * 65, "z"],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    noon = dt.datetime(2020, 1, 2, 12, tzinfo=dt.timezone.utc)
    with make_parquet_converter(tmp_path) as converter:
        for filters, expected in (
            ([("price", ">", 1)], [0, 1, 2]),
            ([("price", "==", 2)], [1]),
            ([("price", "<=", 2)], [0, 1]),
            ([("day", "in", [noon, dt.date(2020, 1, 3)])], [2]),
            ([("day", "in", [noon.replace(hour=0)])], [1]),
            ([("day", "not in", [noon])], [0, 1, 2]),
            ([("text", "in", ["日本" * 20])], [0]),
            ([("text", "not in", ["日本" * 20, "ü" * 65])], [2]),
            (pc.field("text").isin(["ü" * 65]), [1]),
        ):
            assert read(converter.where(filters))["id"].tolist() == expected, filters
        with pytest.raises(SourceError, match=r"No row of .* passes the filters given"):
            converter.where(pc.field("text").isin(["本" * 90]))


def test_head_is_the_first_rows_whatever_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {
        "id": np.arange(10),
        "text": ["a", None] * 5,
        "count": pa.array([None, *range(9)], pa.int32()),
        "rows": [[1.0], [2.0, 3.0]] * 5,
        "day": pa.array([dt.date(2026, 1, 1)] * 10),
    }
    converter = make_parquet_converter(write(tmp_path, "x.parquet", columns, row_group_size=2))
    # Whatever shard this process is, and however the rows are divided elsewhere.
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    found = converter.head(3)
    assert list(found) == ["id", "text", "text__valid", "count", "count__valid", "rows", "day"]
    assert found["id"].tolist() == [0, 1, 2]
    assert found["text"][[0, 2]].tolist() == ["a", "a"]
    assert found["text__valid"].tolist() == [True, False, True]
    assert found["count"].tolist() == [0, 0, 1]
    assert found["count__valid"].tolist() == [False, True, True]
    assert [row.tolist() for row in found["rows"]] == [[1.0], [2.0, 3.0], [1.0]]
    assert found["day"].dtype == "datetime64[D]"
    assert len(converter.head()["id"]) == 5
    assert converter.head(10**12)["id"].tolist() == list(range(10))


def test_head_of_a_part_is_its_own_first_rows(tmp_path: Path) -> None:
    converter = make_parquet_converter(write(tmp_path, "x.parquet", {"id": np.arange(100)}, row_group_size=10))
    assert converter.where([("id", ">=", 37), ("id", "!=", 39)]).head(3)["id"].tolist() == [37, 38, 40]
    for part in converter.split({"train": 0.8, "val": 0.2}).values():
        assert part.head(4)["id"].tolist() == read(part)["id"].tolist()[:4]


def test_head_reads_no_row_group_that_it_does_not_need(tmp_path: Path) -> None:
    path = write(tmp_path, "x.parquet", {"id": np.arange(40)}, row_group_size=10, compression="zstd")
    row_group = pq.read_metadata(path).row_group(1).column(0)
    damaged = bytearray(path.read_bytes())
    start = row_group.dictionary_page_offset or row_group.data_page_offset
    damaged[start : start + row_group.total_compressed_size] = b"\xff" * row_group.total_compressed_size
    path.write_bytes(damaged)
    converter = make_parquet_converter(path)
    assert converter.head(10)["id"].tolist() == list(range(10))
    with pytest.raises(ReadError, match=r"x\.parquet"):
        converter.head(11)


def test_head_checks_its_argument_and_whether_there_are_rows(tmp_path: Path) -> None:
    converter = make_parquet_converter(write(tmp_path, "x.parquet", {"id": [1]}))
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        converter.head(0)
    with pytest.raises(TypeError, match=r"n must be an integer, got 2\.5"):
        converter.head(2.5)
    converter.delete()
    with pytest.raises(CacheError, match="was closed, so it has no rows any more"):
        converter.head()
