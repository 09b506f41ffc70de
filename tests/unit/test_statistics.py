"""Statistics of a column are NumPy's of its numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import make_parquet_converter


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [1.0, 1.0, 4.0, -7.5]], ids=len)
def test_mean_and_spread_are_those_of_numpy(tmp_path: Path, values: list[float]) -> None:
    pq.write_table(pa.table({"x": values}), tmp_path / "x.parquet")
    with make_parquet_converter(tmp_path, float_dtype=None) as converter:
        statistics = converter.statistics["x"]
    assert (statistics.min, statistics.max) == (min(values), max(values))
    assert statistics.mean == pytest.approx(np.mean(values))
    assert statistics.std == pytest.approx(np.std(values))


def test_rows_that_are_all_null_have_no_statistics_and_are_no_error(tmp_path: Path) -> None:
    lists = pa.array([[1, None], [3, 4], None, None], pa.list_(pa.int32()))
    pq.write_table(pa.table({"id": range(4), "x": lists}), tmp_path / "x.parquet")
    converter = make_parquet_converter(tmp_path, shapes={"x": (2,)})
    found = converter.statistics["x"]
    assert (found.null_count, found.min, found.max, found.mean) == (2, 1, 4, pytest.approx(8 / 3))
    nulls = converter.where([("id", ">", 1)]).statistics
    assert (nulls["x"].null_count, nulls["x"].min, nulls["x"].mean) == (2, None, None)
    assert (nulls["id"].min, nulls["id"].max) == (2, 3)
