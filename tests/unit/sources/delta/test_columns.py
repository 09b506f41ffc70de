"""A table's columns: names, types, and those whose bounds tell its files apart."""

from __future__ import annotations

import decimal
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake import Schema as DeltaSchema
from deltalake.schema import PrimitiveType

from converter import (
    DatasetConverter,
    NullValueError,
    ReadError,
    SourceChangedError,
    SourceError,
    UnsupportedTypeError,
    make_delta_converter,
)
from tests.unit.sources.delta.known_delta import (
    append_each,
    assert_filtered,
    change_commit,
    rows_of,
    write_log,
)


def test_names_in_other_cases_are_the_same_column(tmp_path: Path) -> None:
    """As CONVERT TO DELTA takes files whose names differ so."""
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"ID": [1, 2]}), tmp_path / "t" / "a.parquet")
    pq.write_table(pa.table({"iD": [3]}), tmp_path / "t" / "b.parquet")
    said = [({"path": f"{name}.parquet", "stats": {"numRecords": rows, "nullCount": {"ID": 0}}}) for name, rows in
            (("a", 2), ("b", 1))]  # fmt: skip
    path = write_log(tmp_path / "t", {"ID": "long"}, said)
    assert sorted(rows_of(make_delta_converter(path))["ID"]) == [1, 2, 3]
    assert_filtered(path, [("ID", ">=", 2)], [2, 3], column="ID")


@pytest.mark.parametrize("nulls", ["raise", "mask", {"id": 5}])
def test_a_file_without_a_column_that_the_log_counts_no_null_of_is_named(tmp_path: Path, nulls: Any) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"other": [1, 2]}), tmp_path / "t" / "a.parquet")
    stats = {"numRecords": 2, "nullCount": {"id": 0}}
    path = write_log(tmp_path / "t", {"id": "long", "other": "long"}, [{"path": "a.parquet", "stats": stats}])
    with pytest.raises(SourceChangedError, match=r"a\.parquet has no column 'id', although the table's log says"):
        rows_of(make_delta_converter(path), nulls=nulls)


def test_nulls_that_the_log_does_not_count_are_no_zeros(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"id": [1, None]}), tmp_path / "t" / "a.parquet")
    stats = {"numRecords": 2, "nullCount": {"id": 0}}
    path = write_log(tmp_path / "t", {"id": "long"}, [{"path": "a.parquet", "stats": stats}])
    for nulls, kind in (("mask", ReadError), ("raise", NullValueError)):
        with pytest.raises(kind, match="null"):
            rows_of(make_delta_converter(path), nulls=nulls)
    assert rows_of(make_delta_converter(path), nulls={"id": 5})["id"] == [1, 5]


def test_a_column_and_a_member_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"a.b": [1], "a": [{"b": 2}], "id": [3]}), tmp_path / "t" / "a.parquet")
    path = write_log(tmp_path / "t", {"a.b": "long", "id": "long"}, [{"path": "a.parquet"}])
    struct_of = {"type": "struct", "fields": [{"name": "b", "type": "long", "nullable": True, "metadata": {}}]}

    def add_struct(action: dict[str, Any]) -> None:
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            schema["fields"].append({"name": "a", "type": struct_of, "nullable": True, "metadata": {}})
            action["metaData"]["schemaString"] = json.dumps(schema)

    change_commit(path, 0, add_struct)
    with pytest.raises(SourceError, match=r"several columns called 'a\.b'"):
        make_delta_converter(path)
    assert rows_of(make_delta_converter(path, columns=["id"]))["id"] == [3]


def two_of_one_size(path: Path) -> tuple[Path, Path]:
    files = sorted(path.glob("*.parquet"), key=lambda file: (file.stat().st_size, file.name))
    return next(pair for pair in itertools.pairwise(files) if len({one.stat().st_size for one in pair}) == 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "key",
    [
        np.arange(90),
        np.linspace(-3, 7, 90),
        np.linspace(0, 1, 90).astype(np.float32),
        [f"row {number:02}" for number in range(90)],
        [f"{number:02} of a text that is longer than what a log keeps, 日本" for number in range(90)],
        np.arange(90).astype("datetime64[D]"),
        pa.array(range(0, 9 * 10**16, 10**15), pa.timestamp("us", "UTC")),
        pa.array(range(0, 9 * 10**16, 10**15), pa.timestamp("us")),
        pa.array([decimal.Decimal(number) / 4 for number in range(90)], pa.decimal128(9, 2)),
        pa.array([decimal.Decimal(number) / 4 for number in range(90)], pa.decimal128(30, 2)),
    ],
    ids=[
        "integers",
        "doubles",
        "floats",
        "texts",
        "long-texts",
        "days",
        "times",
        "local-times",
        "decimals",
        "long-decimals",
    ],
)
def test_files_that_changed_places_are_noticed_though_they_are_of_one_size(tmp_path: Path, key: Any) -> None:
    path = append_each(
        tmp_path / "table", [{"key": key[10 * one : 10 * one + 10], "x": np.ones(10)} for one in range(9)]
    )
    one, other = two_of_one_size(path)
    reads: list[Callable[[DatasetConverter], Any]] = [
        rows_of, lambda found: rows_of(found, columns=["x"]), lambda found: found.where([("x", ">=", 0.0)]),
    ]  # fmt: skip
    for read in reads:
        read(make_delta_converter(path))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    for read in reads:
        for columns in (None, ["x"]):
            with pytest.raises(SourceChangedError, match=r"has values of 'key' from .* by the table's log") as caught:
                read(make_delta_converter(path, columns=columns))
            assert str(caught.value.path).endswith((one.name, other.name))


def test_files_are_told_apart_by_the_columns_that_differ(tmp_path: Path) -> None:
    alike = {f"size{number}": np.full(10, number) for number in range(6)}
    path = append_each(tmp_path / "table", [alike | {"x": np.linspace(one, one + 1, 10)} for one in range(9)])
    one, other = two_of_one_size(path)
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    with pytest.raises(SourceChangedError, match=r"has values of 'x' from"):
        rows_of(make_delta_converter(path))


def test_a_column_of_newer_versions_is_not_there_in_older_ones(tmp_path: Path) -> None:
    path = append_each(tmp_path / "table", [{"id": [1, 2]}, {"id": [3], "y": [1.5]}], schema_mode="merge")
    with pytest.raises(ValueError, match=r"There is no column 'y'.* \(in version 0 of the Delta table"):
        make_delta_converter(path, version=0, columns=["y"])
    with pytest.raises(ValueError, match=r"filters: There is no column 'y'.* \(in version 0 of the Delta table"):
        make_delta_converter(path, version=0, filters=[("y", ">", 1)])
    found = rows_of(make_delta_converter(path))
    assert sorted(zip(found["id"], found["y"], found["y__valid"], strict=True)) == [
        (1, 0, False), (2, 0, False), (3, 1.5, True),
    ]  # fmt: skip
    assert_filtered(path, [("y", ">", 1)], [3])
    assert_filtered(path, pc.field("y").is_null(), [1, 2])


def test_the_order_does_not_depend_on_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Lists, whose footers are looked at in more files, and which take more memory in some of them.
    lists = [pa.array([[float(one)] * (one % 3 * 40)] * 100, pa.list_(pa.float64())) for one in range(30)]
    path = append_each(
        tmp_path / "table", [{"id": np.arange(100) + 100 * n, "list": one} for n, one in enumerate(lists)]
    )
    monkeypatch.setattr("converter.arguments.default_window_rows", lambda _, num_bytes: num_bytes % 997 + 100)
    whole, part = make_delta_converter(path), make_delta_converter(path, columns=["id"])
    assert whole.fingerprint == part.fingerprint
    assert rows_of(whole, columns=["id"], shuffle=True, seed=3) == rows_of(part, shuffle=True, seed=3)


def test_texts_that_delta_rs_stores_as_views_are_categories(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    tags = [["b", "a"], ["c"], None, ["a", None]]
    write_deltalake(path, pa.table({"id": range(8), "tags": tags * 2, "name": ["x", "y", None, "z"] * 2}))
    DeltaTable(path).delete("id >= 6")
    (file,) = DeltaTable(path).file_uris()
    assert pq.read_schema(file).field("tags").type.value_type == pa.string_view()
    converter = make_delta_converter(path, filters=[("id", ">", 0)], categories=["tags", "name"])
    known = converter.schema["tags"].categories
    assert known == ("a", "b", "c")
    rows = converter.head()
    masks = zip(rows["tags"], rows["tags__element_valid"], rows["tags__valid"], strict=True)
    found = [[known[code] if is_there else None for code, is_there in zip(*row, strict=True)] if valid else None
             for *row, valid in masks]  # fmt: skip
    assert found == [["c"], None, ["a", None], ["b", "a"], ["c"]]
    with pytest.raises(SourceError, match=r"Column 'tags' has the value 'c' in row 1 "):
        make_delta_converter(path, categories={"tags": ["a", "b"]}).head()


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("2020-05-16 23:04:05", True),  # as Spark wrote it before Delta 3.3, in the zone of its session
        ("2020-05-16 23:04:05.25", True),
        ("2020-05-16 23:04:05.000000", False),  # as deltalake writes it, in UTC
        ("2020-05-16T23:04:05.000000Z", False),
    ],
)
def test_times_of_partitions_without_a_zone_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, is_told: bool
) -> None:
    folder = f"t={quote(text, safe=' ')}"
    (tmp_path / folder).mkdir()
    pq.write_table(pa.table({"id": [1]}), tmp_path / folder / "a.parquet")
    write_log(
        tmp_path, {"id": "long", "t": "timestamp"},
        [{"path": quote(f"{folder}/a.parquet", safe="/="), "partitionValues": {"t": text}, "stats": {"numRecords": 1}}],
        partitioned_by=["t"],
    )  # fmt: skip
    with make_delta_converter(tmp_path) as converter:
        (time,) = rows_of(converter)["t"]
    assert (time.year, time.day, time.hour) == (2020, 16, 23)
    told = [record.getMessage() for record in caplog.records]
    assert [("partition column 't'" in one and "no zone" in one) for one in told] == [True] * is_told
    with make_delta_converter(tmp_path, columns=["id"]):
        assert len(caplog.records) == len(told)


@pytest.mark.parametrize("partitions", [[], ["p"]])
def test_a_column_that_spark_pads_is_refused_also_as_a_partition(tmp_path: Path, partitions: list[str]) -> None:
    padded = Field("p", PrimitiveType("string"), metadata={"__CHAR_VARCHAR_TYPE_STRING": "char(3)"})
    table = DeltaTable.create(
        str(tmp_path), DeltaSchema([Field("id", PrimitiveType("long")), padded]), partition_by=partitions
    )
    write_deltalake(table, pa.table({"id": [1, 2], "p": ["x  ", "abc"]}), mode="append")
    with pytest.raises(UnsupportedTypeError, match=r"'p' has type char\(3\): leave it out with columns="):
        make_delta_converter(tmp_path)
    with make_delta_converter(tmp_path, columns=["id"]) as converter:
        assert sorted(rows_of(converter)["id"]) == [1, 2]
