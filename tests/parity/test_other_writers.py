"""Parquet and Delta that others than Spark wrote: a converter has the cells that each of their readers has, bit by bit.

`other_writers.py` and `other_tables.py` say what is drawn, and go on by hand.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import duckdb
import pytest

from converter import ReadError, make_parquet_converter
from tests.parity import other_writers

_SEED, _CASES, _CASES_OF_A_TEST = 7, 80, 20


@pytest.mark.parametrize("first", range(0, _CASES, _CASES_OF_A_TEST))
def test_random_files_have_the_same_cells_in_four_readers(tmp_path: Path, first: int) -> None:
    done: Counter[str] = Counter()
    for number in range(first, first + _CASES_OF_A_TEST):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert other_writers.run_case(_SEED, number, folder, done) == [], f"case {_SEED}:{number}"
    # Something was compared.
    assert done["cells"] > 2000
    assert done["filters that leave some rows"] > _CASES_OF_A_TEST // 2


@pytest.mark.parametrize("kind", ["INTEGER", "VARCHAR", "DECIMAL(38, 10)"])
def test_a_null_array_of_duckdb_is_refused(tmp_path: Path, kind: str) -> None:
    """DuckDB 2.0.1 writes it as several values of one list, where Parquet has one for a list that is null."""
    path = tmp_path / "x.parquet"
    query = f"SELECT i, CASE WHEN i % 3 > 0 THEN [i, i + 1]::{kind}[2] END AS pair FROM range(8) t(i)"
    with duckdb.connect() as connection:
        connection.execute(f"COPY ({query}) TO '{path}' (FORMAT parquet)")
    with (
        make_parquet_converter(path, shapes={"pair": None} if kind == "INTEGER" else {}) as converter,
        converter.make_batch_reader(nulls="mask", ragged="nested") as reader,
        pytest.raises(ReadError, match=r"x\.parquet cannot be decoded"),
    ):
        list(reader)
