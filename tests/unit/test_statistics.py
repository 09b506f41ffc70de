"""Statistics of a column are NumPy's of its numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from converter import make_delta_converter, make_parquet_converter
from tests.entries import write_batches
from tests.unit.portable.one_column import plan


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


def test_nulls_of_a_partition_column_are_its_rows(tmp_path: Path) -> None:
    for folder, values in (("p=a", ["x"]), ("p=__HIVE_DEFAULT_PARTITION__", ["u", "v", "w"])):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({"s": values}), tmp_path / folder / "f.parquet")
    assert make_parquet_converter(tmp_path).statistics["p"].null_count == 3


def test_nulls_of_a_partition_column_of_a_delta_table_are_its_rows(tmp_path: Path) -> None:
    rows = {"p": ["a", None, None, None], "s": ["x", "u", "v", "w"]}
    write_deltalake(tmp_path, pa.table(rows), partition_by=["p"])
    converter = make_delta_converter(tmp_path)
    assert converter.statistics["p"].null_count == 3
    assert {column["name"]: column.get("nulls") for column in converter.describe()["columns"]} == {"p": 3, "s": 0}


def test_tasks_of_nulls_alone_leave_the_elements_of_the_others(tmp_path: Path) -> None:
    nulls, numbers = (
        pa.RecordBatch.from_arrays([pa.array(values, pa.list_(pa.float32()))], ["c0"])
        for values in ([None, None], [[1.0, 2.0], [3.0, 4.0]])
    )
    for number, partitions in enumerate(([[nulls], [numbers]], [[numbers], [nulls]], [[nulls], [numbers], [nulls]])):
        with write_batches(tmp_path / str(number), [plan()], partitions) as converter:
            statistics = converter.statistics["x"]
            assert statistics.element_mean is not None
            assert statistics.element_mean.tolist() == [2, 3]
            assert statistics.null_count == 2 * sum(partition == [nulls] for partition in partitions)
