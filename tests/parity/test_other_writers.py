"""Parquet and Delta that others than Spark wrote: a converter has the cells that each of their readers has, bit by bit.

`other_writers.py` and `other_tables.py` say what is drawn, and go on by hand.
"""

from __future__ import annotations

import json
import math
import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from converter import ReadError, make_parquet_converter
from tests.parity import other_tables, other_writers
from tests.parity.fastparquet_files import CELLS, KEPT, SECOND_PAGES, WAYS
from tests.parity.other_readers import difference, read_in_order

_SEED, _CASES, _CASES_OF_A_TEST, _TABLES = 7, 60, 20, 10


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


@pytest.fixture(scope="module")
def of_fastparquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the files that a real fastparquet wrote."""
    folder = tmp_path_factory.mktemp("fastparquet")
    with tarfile.open(KEPT) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("name", [*WAYS, *(f"{way}, second pages" for way in SECOND_PAGES)])
def test_files_of_fastparquet_have_the_same_cells_in_five_readers(of_fastparquet: Path, name: str) -> None:
    path = of_fastparquet / f"{name}.parquet"
    found = other_writers.check_file(path, random.Random(name), Counter())
    # fastparquet puts eight bytes behind the values of each page, and Polars expects a multiple of twelve.
    assert [what for what in found if name != "INT96" or "Polars" not in what] == []

    read = json.loads((of_fastparquet / CELLS).read_text())[name]
    with make_parquet_converter(path, float_dtype=None) as converter:
        ours = read_in_order(converter)
        dtypes = {field.name: field.dtype for field in converter.schema}
    assert difference(ours, {name: [_cell(cell, dtypes[name]) for cell in read[name]] for name in read}) is None


def _cell(cell: Any, dtype: str) -> Any:
    """A cell of fastparquet's. It writes NaN as a null, and reads a null as NaN."""
    if dtype == "bytes" and cell is not None:
        return bytes.fromhex(cell)
    words = {"float32": np.uint32, "float64": np.uint64}
    if dtype in words and cell is not None and math.isnan(words[dtype](cell).view(dtype)):
        return None
    return cell


def test_random_tables_of_delta_rs_have_the_same_cells_in_three_readers(tmp_path: Path) -> None:
    done: Counter[str] = Counter()
    for number in range(_TABLES):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert other_tables.run_case(_SEED, number, folder, done) == [], f"case {_SEED}:{number}"
    assert done["versions"] > 3 * _TABLES
