"""Columns are read by their places in a file, whatever their names."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter.places import Place
from converter.reading.stored import read_places


class WithoutReader:
    """A Parquet file of a pyarrow whose files have no `reader`."""

    def __init__(self, parquet: pq.ParquetFile) -> None:
        self.metadata, self.read_row_groups = parquet.metadata, parquet.read_row_groups


@pytest.mark.parametrize("wrap", [lambda parquet: parquet, WithoutReader], ids=["reader", "no reader"])
def test_columns_are_read_by_their_places(wrap: Any) -> None:
    content = io.BytesIO()
    pairs = pa.array([{"a": 1, "b": None}, None, {"a": 3, "b": 4}])
    table = pa.table([pa.array([7, 8, 9]), pairs, pa.array(["x", "y", "z"])], names=["n", "s", "t"])
    pq.write_table(table, content, row_group_size=2)
    parquet = pq.ParquetFile(io.BytesIO(content.getvalue()))
    fields = parquet.schema_arrow
    member = Place(2, 1, ("b",), fields.field(1).type.field(1))
    places = [Place(3, 2, (), fields.field(2)), member, Place(0, 0, (), fields.field(0))]
    texts, members, numbers = read_places(wrap(parquet), [0, 1], places)
    assert texts.to_pylist() == ["x", "y", "z"]
    assert members.to_pylist() == [None, None, 4]
    assert numbers.to_pylist() == [7, 8, 9]
    for most_rows in (1, 2, 5):
        first = read_places(wrap(parquet), [0], places, most_rows)
        assert [column.to_pylist() for column in first] == [
            ["x", "y"][:most_rows],
            [None] * min(most_rows, 2),
            [7, 8][:most_rows],
        ]
