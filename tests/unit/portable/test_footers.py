"""What a footer says of a file's columns, and the checksums of its pages' heads."""

from __future__ import annotations

import base64
import datetime as dt
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter.portable import tasks
from converter.portable.footers import sum_footer
from tests.columns import ALL, record_batch
from tests.entries import make_spec
from tests.unit.portable.one_column import (
    plan,
    write_one,
)


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


@pytest.mark.parametrize("name", ["list", "a.list.b", "a.list.element", "plain"])
def test_the_bytes_of_lists_are_noted_for_their_column(tmp_path: Path, name: str) -> None:
    table = pa.table({name: [["a"]], f"{name}.deep": [[["b", "c"]]], f"{name}.one": ["d"]})
    pq.write_table(table, tmp_path / "a.parquet")
    _, column_bytes = sum_footer(pq.read_metadata(tmp_path / "a.parquet"))
    assert list(column_bytes) == table.column_names


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
