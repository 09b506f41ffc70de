"""Filters of lists: which rows have an element that equals a value, whoever wrote them and however they are stored."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import DatasetConverter, make_delta_converter, make_parquet_converter
from converter.sources.spark.schema import plan_columns
from tests.entries import write_batches
from tests.properties import examples
from tests.unit.sources.delta.known_delta import append

NAN = float("nan")
DAY, TIME = dt.date(2026, 11, 25), dt.datetime(2026, 11, 25, 1)  # noqa: DTZ001 (as NumPy has it)

TABLE = pa.table(
    {
        "id": pa.array(range(6), pa.int64()),
        "tags": pa.array([["red", "green"], ["blue"], None, [], [None, "red"], ["reddish"]]),
        "raw": pa.array([[b"\x00"], [], [b"\x00", b"\x01"], None, [b"\x02"], []]),
        "words": pa.array([[["red"], []], [["blue", "red"]], None, [], [[]], [["x"]]]),
        "numbers": pa.array([[1, 2], [3, 4], [5, 1], [7, 8], [9, 9], [0, 0]], pa.list_(pa.int32())),
        "ragged": pa.array([[1.5], [NAN, 2.5], [], None, [1.5, 0.0], [-0.0]], pa.list_(pa.float32())),
        "days": pa.array([[DAY], [], [DAY, dt.date(1970, 1, 1)], None, [], []]),
        "times": pa.array([[TIME], [TIME], [dt.datetime(1969, 1, 1)]] * 2),  # noqa: DTZ001
        "flags": pa.array([[True], [False, True], [], [False], None, []]),
        "items": pa.array([[{"sku": "a", "n": 1}], [], [{"sku": "b", "n": 2}, None], None, [{"sku": "a", "n": 3}], []]),
    }
)

CASES: list[tuple[Any, list[int]]] = [
    (("tags", "contains", "red"), [0, 4]),
    (("tags", "contains", "no"), []),
    (("tags", "contains any", ["blue", "reddish"]), [1, 5]),
    (("tags", "contains any", []), []),
    (("tags", "contains", None), []),
    (("raw", "contains", b"\x01"), [2]),
    (("words", "contains", "red"), [0, 1]),
    (("numbers", "contains", 1), [0, 2]),
    (("numbers", "contains", np.int64(9)), [4]),
    (("numbers", "contains", 2.5), []),
    (("numbers", "contains any", [3, 8]), [1, 3]),
    (("ragged", "contains", 1.5), [0, 4]),
    (("ragged", "contains", 0), [4, 5]),
    (("ragged", "contains", NAN), [1]),
    (("ragged", "contains any", [NAN, -0.0]), [1, 4, 5]),
    (("days", "contains", DAY), [0, 2]),
    (("days", "contains", "1970-01-01"), None),
    (("times", "contains", TIME), [0, 1, 3, 4]),
    (("times", "contains", np.datetime64("1969-01-01")), [2, 5]),
    (("flags", "contains", True), [0, 1]),
    (("items.sku", "contains", "a"), [0, 4]),
    (("items.n", "contains any", [2, 3]), [2, 4]),
]  # fmt: skip


def written(folder: Path) -> DatasetConverter:
    """A cache of the table, as the executors write it: numbers are packed."""
    fields: list[Any] = [{"name": "id", "type": "long"}]
    kinds = {"tags": "string", "raw": "binary", "numbers": "integer", "ragged": "float", "days": "date",
             "times": "timestamp_ntz", "flags": "boolean"}  # fmt: skip
    fields += [{"name": name, "type": {"type": "array", "elementType": kind}} for name, kind in kinds.items()]
    nested = {"type": "array", "elementType": {"type": "array", "elementType": "string"}}
    struct = {"type": "struct", "fields": [{"name": "sku", "type": "string"}, {"name": "n", "type": "long"}]}
    fields += [{"name": "words", "type": nested}, {"name": "items", "type": {"type": "array", "elementType": struct}}]
    plans = plan_columns({"fields": fields}, float_dtype="float32", shapes={})
    values = TABLE["items"].combine_chunks()
    members = {
        f"items.{name}": pa.ListArray.from_arrays(
            values.offsets, pc.struct_field(values.values, [name]), mask=pc.is_null(values)
        )
        for name in ("sku", "n")
    }
    columns = [members.get(plan.name, TABLE[plan.path[0]].combine_chunks()) for plan in plans]
    names = [f"c{index}" for index in range(len(plans))]
    whole = pa.RecordBatch.from_arrays(columns, names=names)
    return write_batches(folder, plans, [[whole.slice(0, 4)], [whole.slice(4)]])


def found(folder: Path, source: str) -> DatasetConverter:
    if source == "cache":
        return written(folder)
    if source == "delta":
        append(folder / "t", {name: TABLE[name] for name in TABLE.column_names})
        return make_delta_converter(folder / "t")
    pq.write_table(TABLE, folder / "x.parquet", row_group_size=2)
    return make_parquet_converter(folder / "x.parquet", shapes={"numbers": (2,)})


def ids_of(converter: DatasetConverter, filters: Any) -> list[int]:
    with converter.make_batch_reader(batch_size=9, columns=["id"], filters=filters) as reader:
        return [row for batch in reader for row in batch["id"].tolist()]


@pytest.mark.parametrize("source", ["cache", "parquet", "delta"])
def test_rows_with_an_equal_element_pass(tmp_path: Path, source: str) -> None:
    with found(tmp_path, source) as converter:
        for condition, rows in CASES:
            assert_passes(converter, condition, rows)


def assert_passes(converter: DatasetConverter, condition: Any, rows: list[int] | None) -> None:
    name, sign, value = condition
    listed = iter(value) if sign == "contains any" else value
    if rows is None:
        with pytest.raises(ValueError, match=rf"column '{name}' \(date32\[day\]\) cannot be compared with =="):
            ids_of(converter, [condition])
    elif rows:
        assert ids_of(converter, [(name, sign, listed)]) == rows, condition
    else:
        assert len(converter.where([[(name, sign, listed)], [("id", "=", 0)]])) == 1, condition


@pytest.mark.parametrize("source", ["cache", "parquet", "delta"])
def test_conditions_on_lists_and_on_single_values_combine(tmp_path: Path, source: str) -> None:
    blue, red = ("tags", "contains", "blue"), ("tags", "contains", "red")
    with found(tmp_path, source) as converter:
        assert ids_of(converter, [red, ("id", ">", 1)]) == [4]
        assert ids_of(converter, [[blue, ("id", "<", 3)], [red, ("numbers", "contains", 9)]]) == [1, 4]
        part = converter.where([("tags", "contains any", ["red", "blue"])])
        assert ids_of(part, [("id", ">=", 1)]) == [1, 4]
        assert sorted(len(half) for half in part.split({"a": 0.5, "b": 0.5}).values()) == [1, 2]


def test_numbers_in_a_users_bytes_are_compared_whatever_else_is_noted_of_them(tmp_path: Path) -> None:
    rows = [np.arange(first, first + 4, dtype="<f4").tobytes() for first in (0, 4)]
    schema = pa.schema([pa.field("m", pa.binary(), metadata={"comment": "mine"})])
    pq.write_table(pa.table({"m": rows}, schema=schema), tmp_path / "rows.parquet")
    converter = make_parquet_converter(tmp_path, shapes={"m": ("float32", (2, 2))})
    part = converter.where([("m", "contains", 6.0)])
    assert part.head(2)["m"].tolist() == [[[4, 5], [6, 7]]]


def test_other_comparisons_of_lists_are_refused_by_name(tmp_path: Path) -> None:
    converter = found(tmp_path, "parquet")
    for sign, value in (("=", "red"), ("in", ["red"]), (">", "a")):
        with pytest.raises(
            ValueError, match=r"'tags' is a tensor; only columns of single .*\('tags', 'contains', value"
        ):
            converter.where([("tags", sign, value)])
    with pytest.raises(ValueError, match="'id' has single values, and 'contains' is for lists; use '=' or 'in'"):
        converter.where([("id", "contains", 1)])
    with pytest.raises(TypeError, match=r"'tags' contains needs one value, got .*; use 'contains any'"):
        converter.where([("tags", "contains", ["red"])])
    with pytest.raises(TypeError, match="'tags' contains any needs a list of values, got 'red'"):
        converter.where([("tags", "contains any", "red")])
    with pytest.raises(ValueError, match=r"'tags' \(string\) cannot be compared with == 5: its values are texts\."):
        converter.where([("tags", "contains", 5)])
    with pytest.raises(ValueError, match="'tags' is a tensor"):
        converter.where(pc.field("tags").is_valid())


@given(
    rows=st.lists(st.none() | st.lists(st.none() | st.sampled_from("abc"), max_size=3), min_size=1, max_size=9),
    value=st.sampled_from("abcd"),
    size=st.integers(1, 4),
)
@examples(60)
def test_any_rows_pass_as_python_says(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], value: str, size: int
) -> None:
    path = tmp_path_factory.mktemp("rows") / "x.parquet"
    pq.write_table(pa.table({"id": range(len(rows)), "x": pa.array(rows, pa.list_(pa.string()))}), path, size)
    converter = make_parquet_converter(path)
    expected = [row for row, elements in enumerate(rows) if value in (elements or [])]
    # An epoch of no rows would be refused.
    assert ids_of(converter, [[("x", "contains", value)], [("id", "=", 0)]]) == sorted({0, *expected})
