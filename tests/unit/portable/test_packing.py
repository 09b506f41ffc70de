"""What Spark's own writer gets of a task: bytes for tensors, codes for categories, and in the last row a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from converter.portable import packing
from converter.portable.categories import values_in
from converter.portable.packing import REPORT_COLUMN, make_pack_batches
from converter.portable.records import CategoriesSpec
from tests.columns import ID, TENSORS, record_batch
from tests.entries import make_spec
from tests.unit.portable.one_column import NESTED, batches_of, plan


def coded(
    values: list[Any] | None = None, unseen: Any = "raise", most: int = 1000, kind: str = "str"
) -> dict[str, Any]:
    """What a task is told of a column of categories."""
    categories = CategoriesSpec(kind=kind, values=values, unseen=unseen, most=most)
    return dict(replace(plan("scalar", kind, 0), categories=categories).spec())


def pack(
    columns: Sequence[Any], batches: Sequence[pa.RecordBatch]
) -> tuple[list[pa.RecordBatch], dict[str, Any] | None]:
    """The batches without the column of the report; and the report, which stands in the last row alone."""
    packed = list(make_pack_batches(list(columns))(iter(batches)))
    texts = [text for batch in packed for text in batch.column(REPORT_COLUMN).to_pylist()]
    assert texts[:-1] == [None] * len(texts[:-1])
    return [batch.select(batch.schema.names[:-1]) for batch in packed], json.loads(texts[-1]) if texts else None


def codes_of(packed: Sequence[pa.RecordBatch]) -> list[Any]:
    return [code for batch in packed for code in batch.column(0).to_pylist()]


def known(report: dict[str, Any] | None, kind: str = "str") -> dict[Any, int]:
    """Each value that a task reported, in the order of codes, and how many rows have it."""
    assert report is not None
    found = report["categories"]["x"]
    return dict(zip(values_in(found, kind).to_pylist(), found["counts"], strict=True))


def test_packed_batches_are_what_the_executors_would_store(tmp_path: Path) -> None:
    columns = [ID, *TENSORS]
    spec = make_spec(tmp_path, [column.plan() for column in columns])
    packed, report = pack(spec["columns"], [record_batch(columns, range(start, start + 50)) for start in (0, 50)])
    assert report is not None
    assert (report["rows"], report["nulls"]) == (100, [0] * len(columns))
    assert sum(batch.num_rows for batch in packed) == 100
    for index, column in enumerate(columns):
        rows = [row for batch in packed for row in batch.column(index).to_pylist()]
        expected = column.values(list(range(100)))
        if column.ndim:
            shape = np.array([*expected.shape[1:], 0][: len(expected.shape[1:]) + 1 & ~1], "<i4")
            header = shape.tobytes() if column.ndim > 1 else b""
            assert rows == [header + row.tobytes() for row in expected]
        else:
            assert rows == expected.tolist()


@pytest.mark.usefixtures("every_batch_counts")
def test_what_packing_finds_is_raised_with_its_mark(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, [plan("tensor", "int64", 2)])
    batches = batches_of(*(pa.array(rows, NESTED[2]) for rows in ([[[1, 2]]], [[[1], [2, 3]]])))
    with pytest.raises(ValueError, match=r'^converter finding: \{"kind": "jagged", "column": "x", "partition": 0\}$'):
        list(make_pack_batches(spec["columns"])(iter(batches)))


@pytest.mark.usefixtures("every_batch_counts")
def test_codes_follow_the_sorted_values_of_the_first_rows() -> None:
    batches = batches_of(*map(pa.array, (["c", None, "b"], ["a", "b"], [None, "a"])))
    packed, report = pack([coded()], batches)
    assert [batch.num_rows for batch in packed] == [3, 2, 2]
    assert {batch.column(0).type for batch in packed} == {pa.int32()}
    assert codes_of(packed) == [2, None, 1, 0, 1, None, 0]
    assert known(report) == {"a": 2, "b": 2, "c": 1}
    assert report is not None
    assert (report["partition"], report["rows"], report["nulls"]) == (0, 7, [2])


@pytest.mark.usefixtures("every_batch_counts")
def test_values_that_come_late_get_the_codes_after_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_FIRST_BYTES", 1)
    packed, report = pack([coded()], batches_of(*map(pa.array, (["c", "b"], ["a", "c"], ["A", "b"]))))
    assert codes_of(packed) == [1, 0, 2, 1, 3, 0]
    assert known(report) == {"b": 2, "c": 2, "a": 1, "A": 1}


@pytest.mark.usefixtures("every_batch_counts")
def test_no_more_is_held_back_than_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 0

    def batches() -> Any:
        nonlocal taken
        for _ in range(8):
            taken += 1
            yield from batches_of(pa.array(["a"] * 100))

    monkeypatch.setattr(packing, "_FIRST_BYTES", 1200)
    packed = make_pack_batches([coded()])(batches())
    seen = []
    for batch in packed:
        assert batch.num_rows == 100
        seen.append(taken)
    # Three batches of 400 bytes are collected, then one is held back until the next one comes.
    assert seen == [3, 3, 4, 5, 6, 7, 8, 8]


def test_a_task_without_rows_reports_nothing() -> None:
    assert pack([coded()], []) == ([], None)
    assert pack([coded()], batches_of(pa.array([], pa.string()))) == ([], None)


def test_a_task_of_nulls_alone_knows_no_value() -> None:
    packed, report = pack([coded()], batches_of(pa.array([None, None], pa.string())))
    assert codes_of(packed) == [None, None]
    assert known(report) == {}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("int64", pa.array([7, -1, 7], pa.int16())),
        ("bool", pa.array([True, False, True])),
        ("datetime64[D]", pa.array([7, -1, 7], pa.date32())),
    ],
)
def test_numbers_booleans_and_days_are_coded_too(kind: str, rows: pa.Array) -> None:
    packed, report = pack([coded(kind=kind)], batches_of(rows))
    assert codes_of(packed) == [1, 0, 1]
    assert list(known(report, kind)) == sorted(set(rows.to_pylist()))


def test_a_value_that_was_not_given_is_found_with_its_row() -> None:
    batches = batches_of(pa.array(["b"] * 5000), pa.array(["a", "b", "é", "z"]))
    packed, report = pack([coded(["b", "a"], "null")], batches)
    assert codes_of(packed)[4998:] == [0, 0, 1, 0, None, None]
    assert known(report) == {"b": 5001, "a": 1}
    assert report is not None
    assert report["nulls"] == [2]
    with pytest.raises(ValueError, match=r"^converter finding: ") as caught:
        pack([coded(["b", "a"])], batches)
    found = json.loads(str(caught.value).removeprefix("converter finding: "))
    assert found == {"kind": "unseen", "column": "x", "partition": 0, "row": 5002, "found": "'é'"}


def test_too_many_values_are_found() -> None:
    batches = batches_of(pa.array([str(row) for row in range(11)]))
    assert len(known(pack([coded(most=11)], batches)[1])) == 11
    with pytest.raises(
        ValueError, match=r'^converter finding: \{"kind": "categories", "column": "x", "partition": 0\}$'
    ):
        pack([coded(most=10)], batches)


def test_lists_keep_their_values_which_are_reported() -> None:
    rows = [["b", None], None, [], ["a", "b"]]
    column = coded() | {"kind": "lists", "ndim": 1}
    packed, report = pack([column], batches_of(pa.array(rows, pa.list_(pa.string()))))
    assert codes_of(packed) == rows
    assert set(known(report).items()) == {("a", 1), ("b", 2)}
    assert report is not None
    assert report["nulls"] == [1]


@pytest.mark.usefixtures("every_batch_counts")
def test_the_digest_is_of_what_is_stored() -> None:
    def digest(*rows: list[str | None]) -> Any:
        _, report = pack([coded()], batches_of(*(pa.array(part, pa.string()) for part in rows)))
        assert report is not None
        return report["digest"]

    first = digest(["a", "b"], [None])
    assert digest(["a"], ["b", None]) == first
    assert len({first, digest(["b", "a"], [None]), digest(["a", None], ["b"]), digest(["a", "b"])}) == 4
