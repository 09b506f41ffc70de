"""Lists of text, structs in lists and maps in a Delta table, by name and by field id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, UnsupportedTypeError, make_delta_converter
from tests.unit.sources.delta.known_delta import append, change_commit, write_log


def rows_of(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"batch_size": 100, "nulls": "mask", "ragged": "nested"} | options
    with converter.make_batch_reader(**arguments) as reader:
        [batch] = list(reader)
    return {name: [row.tolist() if hasattr(row, "tolist") else row for row in column] for name, column in batch.items()}


def test_nested_columns_arrive(tmp_path: Path) -> None:
    rows = {
        "id": [0, 1, 2],
        "tags": pa.array([["a", None], None, []]),
        "items": pa.array([[{"n": 1, "s": "x"}, None], None, []]),
        "m": pa.array([[("a", None), ("b", 2)], None, []], pa.map_(pa.string(), pa.int16())),
        "deep": pa.array([[("k", [{"v": [1, 2]}])], [], None],
                         pa.map_(pa.string(), pa.list_(pa.struct({"v": pa.list_(pa.int32())})))),
    }  # fmt: skip
    append(tmp_path / "t", rows)
    append(
        tmp_path / "t", {**{name: pa.array(values)[:0] for name, values in rows.items()}, "id": pa.array([], "int64")}
    )
    converter = make_delta_converter(tmp_path / "t")
    assert converter.columns == ("id", "tags", "items.n", "items.s", "m.key", "m.value", "deep.key", "deep.value.v")
    assert converter.schema["deep.value.v"].ragged_ndim == 3
    found = rows_of(converter, columns=[name for name in converter.columns if name != "deep.value.v"])
    assert found["tags"] == [["a", ""], [], []]
    assert found["tags__element_valid"] == [[True, False], [], []]
    assert found["items.n"] == [[1, 0], [], []]
    assert found["items.s"] == [["x", ""], [], []]
    assert found["items.s__valid"] == [True, False, True]
    assert (found["m.key"], found["m.value"]) == ([["a", "b"], [], []], [[0, 2], [], []])
    assert rows_of(converter, columns=["deep.value.v"], ragged="pad")["deep.value.v"][0] == [[[1, 2]]]
    assert rows_of(converter.where([("id", "<", 1)]), columns=["items.s"])["items.s"] == [["x", ""]]
    assert converter.statistics["tags"].null_count == 1


def test_names_of_members_may_differ_in_case(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"ITEMS": pa.array([[{"Price": 1}]])}), tmp_path / "t" / "a.parquet")
    items: Any = {
        "type": "array",
        "containsNull": True,
        "elementType": {
            "type": "struct",
            "fields": [{"name": "price", "type": "long", "nullable": True, "metadata": {}}],
        },
    }
    path = write_log(tmp_path / "t", {"items": items}, [{"path": "a.parquet", "stats": {"numRecords": 1}}])
    assert rows_of(make_delta_converter(path))["items.price"] == [[1]]


@pytest.mark.parametrize("mode", ["name", "id"])
def test_column_mapping_reaches_into_lists_and_maps(tmp_path: Path, mode: str) -> None:
    """The file has its own names; by id even those may be wrong."""

    def field(name: str, kind: pa.DataType, number: int) -> pa.Field:
        return pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})

    def described(name: str, kind: Any, number: int) -> dict[str, Any]:
        mapping = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
        return {"name": name, "type": kind, "nullable": True, "metadata": mapping}

    prefix = "col-" if mode == "name" else "other-"
    struct = pa.struct([field(f"{prefix}3", pa.int32(), 3), field(f"{prefix}2", pa.string(), 2)])
    schema = pa.schema(
        [
            field(f"{prefix}4", pa.map_(pa.string(), pa.struct([field(f"{prefix}5", pa.int64(), 5)])), 4),
            field(f"{prefix}1", pa.list_(struct), 1),
        ]
    )
    table = pa.table(
        [
            pa.array([[("k", {f"{prefix}5": 7})]], schema.field(0).type),
            pa.array([[{f"{prefix}3": 1, f"{prefix}2": "x"}]], schema.field(1).type),
        ],
        schema=schema,
    )
    (tmp_path / "t").mkdir()
    pq.write_table(table, tmp_path / "t" / "a.parquet")
    path = write_log(tmp_path / "t", {}, [{"path": "a.parquet", "stats": {"numRecords": 1}}])
    inner = {"type": "struct", "fields": [described("sku", "string", 2), described("price", "integer", 3)]}
    value = {"type": "struct", "fields": [described("n", "long", 5)]}
    fields = [
        described("items", {"type": "array", "containsNull": True, "elementType": inner}, 1),
        described("m", {"type": "map", "keyType": "string", "valueType": value, "valueContainsNull": True}, 4),
    ]

    def change(action: dict[str, Any]) -> None:
        if "metaData" in action:
            action["metaData"]["schemaString"] = json.dumps({"type": "struct", "fields": fields})
            action["metaData"]["configuration"] = {"delta.columnMapping.mode": mode}
        if "protocol" in action:
            action["protocol"] |= {"minReaderVersion": 2, "minWriterVersion": 5}

    change_commit(path, 0, change)
    found = rows_of(make_delta_converter(path))
    assert [found[name] for name in ("items.sku", "items.price", "m.key", "m.value.n")] == [
        [["x"]],
        [[1]],
        [["k"]],
        [[7]],
    ]


def test_members_without_tensor_form_are_named(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"x": pa.array([[{"n": 1}]])}), tmp_path / "t" / "a.parquet")
    kind: Any = {
        "type": "array",
        "containsNull": True,
        "elementType": {"type": "struct", "fields": [{"name": "n", "type": "void", "nullable": True, "metadata": {}}]},
    }
    path = write_log(tmp_path / "t", {"x": kind}, [{"path": "a.parquet", "stats": {"numRecords": 1}}])
    with pytest.raises(UnsupportedTypeError, match=r"'x\.n' has type void"):
        make_delta_converter(path)
