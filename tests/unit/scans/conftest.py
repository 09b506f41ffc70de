"""Datasets that tests of passes share; nothing writes to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from converter import DatasetConverter
from tests.columns import Column
from tests.entries import write_batches
from tests.unit.scans.tables import COLUMNS, NAN, write_table


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Three files of several row groups."""
    with write_table(tmp_path_factory.mktemp("known"), COLUMNS, step=50, row_group_bytes=700) as found:
        assert found._manifest.num_row_groups > 8
        yield found


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """A hundred rows of whole numbers in uneven row groups."""
    columns = {"id": ("int64", list(range(100))), "group": ("int32", [row % 10 for row in range(100)])}
    with write_table(tmp_path_factory.mktemp("numbers"), columns, step=37, row_group_bytes=100) as found:
        assert found._manifest.num_row_groups > 8
        yield found


@pytest.fixture(scope="module")
def with_gaps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Six rows in two files, with nulls and a NaN."""
    columns: dict[str, tuple[str, list[Any]]] = {
        "n": ("int64", [1, None, 3, 4, None, 6]),
        "x": ("float32", [1.0, NAN, None, 4.0, 5.0, 6.0]),
        "s": ("str", ["a", None, "", "b", "c", "a"]),
    }
    with write_table(tmp_path_factory.mktemp("gaps"), columns, step=3) as found:
        yield found


@pytest.fixture(scope="module")
def odd_kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Tensors beside single values."""
    shapes: dict[str, tuple[str, tuple[int, ...] | None]] = {
        "id": ("int64", ()), "small": ("int8", ()), "text": ("str", ()), "at": ("datetime64[us]", ()),
        "vector": ("float32", (3,)), "words": ("int32", None),
    }  # fmt: skip
    columns = [Column(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in shapes.items()]
    batch = pa.RecordBatch.from_arrays(
        [column.arrow(range(30)) for column in columns], names=[f"c{index}" for index in range(len(columns))]
    )
    plans = [column.plan() for column in columns]
    with write_batches(tmp_path_factory.mktemp("kinds"), plans, [[batch]]) as found:
        yield found
