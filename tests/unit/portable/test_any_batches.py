"""Whatever batches tasks get, and wherever files and row groups end, readers give the rows that came."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from converter import open_converter
from converter.portable.records import CategoriesSpec
from converter.schema import Field
from tests.entries import write_batches
from tests.properties import examples
from tests.unit.portable.one_column import plan

# Rows of a stretch are alike: a column may be null, of one shape, of another one, or of any lengths for a while.
STRETCHES = st.lists(
    st.tuples(
        st.integers(1, 9),
        st.sampled_from(["null", "pair", "triple", "empty", "any"]),
        st.sampled_from(["null", "2x1", "1x2", "any"]),
        st.sampled_from(["", "ab", "ba", "dcba", "é"]),
        st.integers(0, 2**32 - 1),
    ),
    max_size=6,
)

TYPES = {
    "id": pa.int64(),
    "kind": pa.string(),
    "code": pa.int64(),
    "tags": pa.list_(pa.string()),
    "x": pa.list_(pa.float32()),
    "y": pa.list_(pa.list_(pa.int64())),
}


def categories(kind: str) -> CategoriesSpec:
    return CategoriesSpec(kind=kind, values=None, unseen="raise", most=1000)


PLANS = [
    plan("scalar", "int64", 0, name="id"),
    replace(plan("scalar", "str", 0, name="kind"), categories=categories("str")),
    replace(plan("scalar", "int64", 0, name="code"), categories=categories("int64")),
    replace(plan("lists", "str", 1, name="tags"), categories=categories("str")),
    plan("tensor", "float32", 1, name="x"),
    plan("tensor", "int64", 2, name="y"),
]


def rows_of(stretches: list[tuple[Any, ...]], ids: Iterator[int]) -> list[dict[str, Any]]:
    rows = []
    for length, x_kind, y_kind, letters, seed in stretches:
        chance = np.random.default_rng(seed)
        for row_id in itertools.islice(ids, length):
            row: dict[str, Any] = {"id": row_id, "kind": None, "code": None, "tags": None}
            if letters:
                row["kind"] = letters[chance.integers(len(letters))]
                row["code"] = int(chance.choice([7, -1, 10**12, 3]))
                row["tags"] = [letters[at] for at in chance.integers(len(letters), size=chance.integers(3))]
            sizes = {"pair": 2, "triple": 3, "empty": 0, "any": int(chance.integers(4))}
            row["x"] = None if x_kind == "null" else chance.integers(100, size=sizes[x_kind]).tolist()
            shapes = {"2x1": (2, 1), "1x2": (1, 2), "any": tuple(chance.integers(3, size=2).tolist())}
            row["y"] = None if y_kind == "null" else chance.integers(100, size=shapes[y_kind]).tolist()
            rows.append(row)
    return rows


def plain(batch: dict[str, Any], field: Field) -> list[Any]:
    """A column of a batch as plain values, None where it is null."""
    values = [value.tolist() for value in batch[field.name]]
    if field.categories is not None:
        values = [named(value, field.categories) for value in values]
    valid = batch.get(f"{field.name}__valid", itertools.repeat(True))
    return [value if is_valid else None for value, is_valid in zip(values, valid, strict=False)]


def named(codes: Any, categories: Any) -> Any:
    return [named(code, categories) for code in codes] if isinstance(codes, list) else categories[codes]


@pytest.mark.usefixtures("every_batch_counts")
@given(
    partitions=st.lists(STRETCHES, min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    row_group_bytes=st.sampled_from([1, 60, 400, 1 << 20]),
    file_bytes=st.sampled_from([1, 300, 2000, 1 << 30]),
)
@examples(60)
def test_rows_are_those_that_came(
    partitions: list[list[tuple[Any, ...]]], cuts: list[int], row_group_bytes: int, file_bytes: int
) -> None:
    ids = itertools.count()
    parts = [rows_of(stretches, ids) for stretches in partitions]
    expected = [row for part in parts for row in part]
    # Categories need a value.
    assume(any(row["tags"] for row in expected))
    batches = []
    for rows in parts:
        batches.append([])
        left, lengths = rows, itertools.cycle(cuts)
        while left:
            length = next(lengths)
            arrays = [pa.array([row[name] for row in left[:length]], kind) for name, kind in TYPES.items()]
            batches[-1].append(pa.RecordBatch.from_arrays(arrays, [f"c{index}" for index in range(len(arrays))]))
            left = left[length:]
    with (
        tempfile.TemporaryDirectory() as cache_dir,
        write_batches(cache_dir, PLANS, batches, row_group_bytes=row_group_bytes, file_bytes=file_bytes) as converter,
        converter.make_batch_reader(batch_size=7, ragged="nested", nulls="mask") as reader,
    ):
        fields = [converter.schema[name] for name in TYPES]
        found = [
            dict(zip(TYPES, row, strict=True))
            for batch in reader
            for row in zip(*(plain(batch, field) for field in fields), strict=True)
        ]
    assert found == expected


def test_row_groups_of_very_large_ranges_can_be_opened_again(tmp_path: Path) -> None:
    numbers = pa.array(np.tile([0.0, 1e308], 2000))
    batches = [[pa.RecordBatch.from_arrays([numbers], names=["c0"])]] * 2
    column = plan("scalar", "float64", 0, name="x")
    options: dict[str, Any] = {"float_dtype": "float64", "row_group_bytes": 1 << 12}
    with write_batches(tmp_path, [column], batches, **options) as made, open_converter(made.url) as again:
        assert (again.statistics["x"].min, again.statistics["x"].max) == (0, 1e308)
