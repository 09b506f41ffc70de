"""A member that was added to structs in lists: in older files it has as many nulls as their lists have structs."""

from __future__ import annotations

import uuid
from collections.abc import Sized
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from converter import DatasetConverter, make_delta_converter, make_parquet_converter
from converter.storage.opening import open_storage

OLD = pa.struct({"q": pa.int32()})
NEW = pa.struct({"q": pa.int32(), "w": pa.int32()})
ROWS: dict[str, tuple[Any, Any, list[Any], list[Any]]] = {
    "list": (pa.list_(OLD), pa.list_(NEW), [[{"q": 1}, {"q": 2}], [], None, [None, {"q": 5}]], [[{"q": 3, "w": 9}]]),
    "lists": (
        pa.list_(pa.list_(OLD)),
        pa.list_(pa.list_(NEW)),
        [[[{"q": 1}], [{"q": 2}, {"q": 3}]], [[]], [], None],
        [[[{"q": 3, "w": 9}, {"q": 3, "w": None}]]],
    ),
    "map": (
        pa.map_(pa.string(), OLD),
        pa.map_(pa.string(), NEW),
        [[("a", {"q": 1}), ("b", {"q": 2})], [], None, [("c", None)]],
        [[("a", {"q": 3, "w": 9})]],
    ),
    "within a struct": (
        pa.list_(pa.struct({"in": pa.struct({"q": pa.int32()}), "z": pa.int32()})),
        pa.list_(pa.struct({"in": pa.struct({"q": pa.int32(), "w": pa.int32()}), "z": pa.int32()})),
        [[{"in": {"q": 1}, "z": 1}, {"in": None, "z": 2}], [], None, [None]],
        [[{"in": {"q": 3, "w": 9}, "z": 3}]],
    ),
    "behind lists": (
        pa.list_(pa.struct({"a": pa.list_(pa.int32()), "q": pa.int32()})),
        pa.list_(pa.struct({"a": pa.list_(pa.int32()), "q": pa.int32(), "w": pa.int32()})),
        [[{"a": [1, 2, 3], "q": 1}, {"a": [], "q": 2}], [{"a": [], "q": 2}], [], None],
        [[{"a": [7], "q": 3, "w": 9}]],
    ),
}


def make(source: str, kind: str) -> DatasetConverter:
    old, new, rows, later = ROWS[kind]
    url = f"memory://{uuid.uuid4().hex}"
    tables = [
        pa.table({"id": list(range(len(rows))), "l": pa.array(rows, old)}),
        pa.table({"id": [len(rows)], "l": pa.array(later, new)}),
    ]
    if source == "parquet":
        storage = open_storage(url)
        for number, table in enumerate(tables):
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink)
            storage.put_if_absent(f"{number}.parquet", sink.getvalue().to_pybytes())
        return make_parquet_converter(url)
    for table in tables:
        write_deltalake(source, table, mode="append", schema_mode="merge")
    return make_delta_converter(source)


def members(rows: Any, name: str) -> Any:
    """What `name` is in each struct of nested lists; None for a null struct."""
    if rows is None or isinstance(rows, int):
        return None
    if isinstance(rows, dict):
        inner = rows.get("in") if "in" in rows else rows
        return None if inner is None else inner.get(name)
    return [members(row[1] if isinstance(row, tuple) else row, name) for row in rows]


def nested(values: Any, valid: Any) -> Any:
    """Lists with None where a flag says so."""
    if not isinstance(values, Sized):
        return values if valid else None
    return [nested(value, flag) for value, flag in zip(values, valid, strict=True)]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("source", ["parquet", "delta"])
def test_older_files_have_as_many_nulls_as_structs(source: str, kind: str, tmp_path: Path) -> None:
    _, _, rows, later = ROWS[kind]
    converter = make("parquet" if source == "parquet" else str(tmp_path / "table"), kind)
    name = next(name for name in converter.schema.names if name.endswith("w"))
    expected = [members(row, "w") for row in rows + later]
    # Without the other members, so that none of them is fetched for itself.
    with converter.make_batch_reader(columns=["id", name], nulls="mask", ragged="nested") as reader:
        found = {
            number: nested(values, flags) if is_valid else None
            for batch in reader
            for number, values, flags, is_valid in zip(
                batch["id"].tolist(),
                batch[name],
                batch[f"{name}__element_valid"],
                batch[f"{name}__valid"],
                strict=True,
            )
        }
    assert [found[number] for number in range(5)] == expected
    assert converter.verify(every_row=True) == []
    assert len(converter.head(9)[name]) == 5
