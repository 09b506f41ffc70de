"""Quantiles and histograms are NumPy's of all rows, whatever the files, the nulls and the part of the rows."""

from __future__ import annotations

import datetime as dt
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import make_parquet_converter
from converter.scans import distributions
from tests.properties import examples

LEVELS = (0, 0.1, 0.5, 0.73, 1)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (pa.float64(), st.floats(-1e9, 1e9) | st.just(float("nan"))),
        (pa.int16(), st.integers(-(1 << 15), (1 << 15) - 1)),
        (pa.float32(), st.floats(-100, 100, width=32)),
    ],
)
@given(data=st.data())
@examples(40)
def test_they_are_numpys(kind: pa.DataType, numbers: Any, data: st.DataObject, tmp_path_factory: Any) -> None:
    values = data.draw(st.lists(st.none() | numbers, min_size=2, max_size=60))
    folder = tmp_path_factory.mktemp("rows")
    table = pa.table({"x": pa.array(values, kind)})
    pq.write_table(table, folder / "part.parquet", row_group_size=7)
    converter = make_parquet_converter(folder, float_dtype=None)
    present = np.array([value for value in values if value is not None and value == value], kind.to_pandas_dtype())
    quantiles = converter.quantiles("x", LEVELS)
    counts, edges = converter.histogram("x", bins=5)
    if not len(present):
        assert np.isnan(quantiles).all()
        assert counts.sum() == 0
        return
    # In double precision: NumPy's differences of small integers wrap around, and those of float32 are rounded.
    exact = present.astype(np.float64)
    np.testing.assert_allclose(quantiles, np.quantile(exact, LEVELS), atol=1e-9)
    expected = np.histogram(exact if present.dtype.kind == "f" else present, 5)
    np.testing.assert_array_equal(counts, expected[0])
    np.testing.assert_allclose(edges, expected[1])


def test_numbers_that_are_not_finite_are_in_no_bin(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, float("inf"), 3.0, float("-inf"), float("nan")]}), tmp_path / "part.parquet")
    counts, edges = make_parquet_converter(tmp_path).histogram("x", bins=2)
    assert (counts.tolist(), edges.tolist()) == ([1, 1], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("number", [1.7e18, -1.7e18, 2.0**62, 5e-324])
def test_numbers_that_hardly_differ_have_bins_too(tmp_path: Path, number: float) -> None:
    pq.write_table(pa.table({"x": [number, number, float(np.nextafter(number, np.inf))]}), tmp_path / "part.parquet")
    counts, edges = make_parquet_converter(tmp_path, float_dtype="float64").histogram("x")
    assert counts.sum() == 3
    assert (np.diff(edges) > 0).all()


def test_a_range_beyond_the_largest_double_has_bins(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [-1.7e308, 1.7e308, 0.0, 1.0, -1e308, math.inf]}), tmp_path / "a.parquet")
    counts, edges = make_parquet_converter(tmp_path, float_dtype=None).histogram("x", bins=4)
    assert counts.tolist() == [2, 0, 2, 1]
    np.testing.assert_allclose(edges, [-1.7e308, -0.85e308, 0, 0.85e308, 1.7e308])


def test_floats_around_a_large_mean_have_bins(tmp_path: Path) -> None:
    numbers = (1e6 + 0.0625 * np.arange(9)).astype(np.float32)
    pq.write_table(pa.table({"x": numbers}), tmp_path / "part.parquet")
    counts, _ = make_parquet_converter(tmp_path).histogram("x", 18)
    assert counts.tolist() == np.histogram(numbers.astype(np.float64), 18)[0].tolist()


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_quantiles_of_whole_numbers_that_are_far_apart_lie_between_them(tmp_path: Path, dtype: str) -> None:
    most = np.iinfo(dtype).max
    values = np.array([-most, most, most], dtype)
    pq.write_table(pa.table({"x": values}), tmp_path / "a.parquet")
    found = make_parquet_converter(tmp_path).quantiles("x", LEVELS)
    np.testing.assert_array_equal(found, np.quantile(values.astype(np.float64), LEVELS))


def test_quantiles_know_infinities(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0, float("inf")]}), tmp_path / "part.parquet")
    assert make_parquet_converter(tmp_path).quantiles("x", [0, 0.34, 1]).tolist() == [1, 2, float("inf")]


def test_dates_and_times_keep_their_dtype(tmp_path: Path) -> None:
    days = [dt.date(2020, 1, 1) + dt.timedelta(days=number) for number in range(11)]
    table = pa.table({"day": days, "time": pa.array(days).cast(pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "part.parquet")
    converter = make_parquet_converter(tmp_path)
    assert converter.quantiles("day", [0, 0.5, 1]).tolist() == [days[0], days[5], days[10]]
    assert converter.quantiles("time", [0.5]).tolist() == [dt.datetime(2020, 1, 6)]  # noqa: DTZ001
    counts, edges = converter.histogram("day", bins=2)
    assert counts.tolist() == [5, 6]
    assert edges.dtype == "datetime64[D]"


def test_a_part_of_the_rows_and_standardised_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(100.0)}), tmp_path / "part.parquet")
    converter = make_parquet_converter(tmp_path, standardize=["x"])
    # As the numbers are stored, like `statistics`.
    assert converter.quantiles("x", [0, 1]).tolist() == [0, 99]
    assert converter.where([("x", ">=", 90)]).quantiles("x", [0, 1]).tolist() == [90, 99]


def test_of_many_rows_a_sample_is_taken_with_the_error_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributions, "SAMPLE_ROWS", 2_000)
    pq.write_table(pa.table({"x": np.arange(50_000)}), tmp_path / "part.parquet", row_group_size=999)
    converter = make_parquet_converter(tmp_path)
    levels = np.linspace(0.01, 0.99, 30)
    found = converter.quantiles("x", levels.tolist())
    bound = np.sqrt(np.log(2 / 0.05) / (2 * 2_000))
    assert 0 < np.abs(found / 50_000 - levels).max() <= bound
    np.testing.assert_array_equal(found, converter.quantiles("x", levels.tolist()))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda rows: rows.quantiles("z"), "There is no column 'z'"),
        (lambda rows: rows.quantiles("text"), "Column 'text' is str of shape"),
        (lambda rows: rows.histogram("flag"), "Column 'flag' is bool"),
        (lambda rows: rows.histogram("raw"), "Column 'raw' is bytes .* Bytes have none, also if they are decoded"),
        (lambda rows: rows.histogram("kind"), r"'kind' is int32 \(2 categories\).*counts counts categories"),
        (lambda rows: rows.quantiles("x", [2]), "levels must be a list of numbers from 0 to 1"),
        (lambda rows: rows.quantiles("x", 0.5), "levels must be a list of numbers from 0 to 1"),
        (lambda rows: rows.histogram("x", bins=65), "bins must be at most 64"),
        (lambda rows: rows.histogram("x", bins=0), "bins must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_by_name(tmp_path: Path, call: Any, said: str) -> None:
    table = pa.table({"x": [1, 2], "text": ["a", "b"], "flag": [True, False], "kind": ["a", "b"], "raw": [b"", b""]})
    pq.write_table(table, tmp_path / "part.parquet")
    with pytest.raises(ValueError, match=said):
        call(make_parquet_converter(tmp_path, categories=["kind"]))
