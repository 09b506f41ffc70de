"""Columns of categories: whoever wrote them, codes stand for the values, in sorted or given order."""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from converter import (
    DatasetConverter,
    NullValueError,
    SourceError,
    make_delta_converter,
    make_parquet_converter,
    open_converter,
)
from converter.sources.spark.schema import plan_columns, with_categories
from tests.entries import write_batches
from tests.properties import examples

SOURCES = ("cache", "parquet", "delta")
TYPES: dict[str, tuple[pa.DataType, str, Any]] = {
    "text": (pa.string(), "string", st.sampled_from(["", "a", "B", "é", "e\u0301", "zz", "\U0001f600"])),
    "number": (pa.int16(), "short", st.integers(-3, 300)),
    "long": (pa.int64(), "long", st.sampled_from([-(1 << 63), -1, 0, (1 << 63) - 1])),
    "flag": (pa.bool_(), "boolean", st.booleans()),
    "day": (pa.date32(), "date", st.dates(dt.date(1500, 1, 1), dt.date(2100, 1, 1))),
}


def convert(
    source: str, folder: Path, tables: list[pa.Table], categories: Any, unseen: str = "raise", **options: Any
) -> DatasetConverter:
    """A converter of the rows of all tables: each is a file, or a partition that is written in batches of 7 rows."""
    if source == "cache":
        spark_types = {arrow_type: spark_type for arrow_type, spark_type, _ in TYPES.values()}
        fields = [
            {"name": field.name, "type": spark_types.get(field.type, "long"), "nullable": True, "metadata": {}}
            for field in tables[0].schema
        ]
        plans = plan_columns({"type": "struct", "fields": fields}, float_dtype="float32", shapes={})
        batches = [table.to_batches(max_chunksize=7) for table in tables]
        return write_batches(folder, with_categories(plans, categories, unseen), batches, **options)
    folder.mkdir(parents=True, exist_ok=True)
    if source == "delta":
        for table in tables:
            write_deltalake(folder, table, mode="append")
        return make_delta_converter(folder, categories=categories, unseen=unseen)  # type: ignore[arg-type]
    for number, table in enumerate(tables):
        pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=16)
    return make_parquet_converter(folder, categories=categories, unseen=unseen)  # type: ignore[arg-type]


def tables_of(values: list[list[Any]], arrow_type: pa.DataType) -> list[pa.Table]:
    """Tables of a column of these values, and of the number of each row."""
    tables, start = [], 0
    for part in values:
        ids = range(start, start + len(part))
        tables.append(pa.table({"c": pa.array(part, arrow_type), "id": pa.array(ids, pa.int64())}))
        start += len(part)
    return tables


def read(converter: DatasetConverter, **options: Any) -> dict[int, int | None]:
    """The code of each row; None where it is masked."""
    with converter.make_batch_reader(batch_size=9, nulls="mask", cur_shard=0, shard_count=1, **options) as reader:
        codes: dict[int, int | None] = {}
        for batch in reader:
            valid = batch.get("c__valid", np.ones(len(batch["id"]), bool))
            assert batch["c"].dtype == np.int32
            for id_, code, is_there in zip(batch["id"].tolist(), batch["c"].tolist(), valid.tolist(), strict=True):
                codes[id_] = code if is_there else None
    return codes


@st.composite
def columns(draw: Any) -> tuple[str, list[list[Any]]]:
    """The values of a column in one to three files, with at least one that is not null."""
    name = draw(st.sampled_from(sorted(TYPES)))
    value = TYPES[name][2]
    parts = draw(st.lists(st.lists(st.one_of(st.none(), value), min_size=1, max_size=40), min_size=1, max_size=3))
    return name, [[*parts[0], draw(value)], *parts[1:]]


@pytest.mark.parametrize("source", SOURCES)
@given(case=columns(), shuffle=st.booleans())
@examples(40)
def test_codes_stand_for_the_values_in_sorted_order(
    source: str, case: tuple[str, list[list[Any]]], shuffle: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name, parts = case
    rows = [value for part in parts for value in part]
    folder = tmp_path_factory.mktemp("rows")
    with (
        convert(source, folder, tables_of(parts, TYPES[name][0]), ["c"], row_group_bytes=64)
        if source == "cache"
        else (convert(source, folder, tables_of(parts, TYPES[name][0]), ["c"])) as converter
    ):
        field = converter.schema["c"]
        expected = sorted({value for value in rows if value is not None})
        assert field.categories == tuple(expected)
        assert (field.dtype, field.shape) == ("int32", ())
        codes = {value: code for code, value in enumerate(expected)} | {None: None}
        assert read(converter, shuffle=shuffle) == {number: codes[value] for number, value in enumerate(rows)}
        statistics = converter.statistics["c"]
        assert statistics.counts is not None
        assert statistics.counts.tolist() == [rows.count(value) for value in expected]
        assert statistics.null_count == rows.count(None)


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


CITIES = [["Rome", "Oslo", None, "Rome"] * 8, ["Bern", "Oslo"] * 10, ["Zug"] * 3 + ["Aosta", "Bern"]]
ROWS = [city for part in CITIES for city in part]


@pytest.fixture
def converter(source: str, tmp_path: Path) -> Iterator[DatasetConverter]:
    with convert(source, tmp_path / "rows", tables_of(CITIES, pa.string()), ["c"]) as converter:
        yield converter


def test_filters_take_the_values(converter: DatasetConverter) -> None:
    for filters, wanted in (
        ([("c", "==", "Oslo")], {"Oslo"}),
        ([("c", "!=", "Oslo")], {"Rome", "Bern", "Zug", "Aosta"}),
        ([("c", "in", ["Zug", "Paris", "Aosta"])], {"Zug", "Aosta"}),
        ([("c", ">=", "Rome"), ("id", ">", 20)], {"Rome", "Zug"}),
    ):
        expected = [id_ for id_, city in enumerate(ROWS) if city in wanted and ("id" not in str(filters) or id_ > 20)]
        part = converter.where(filters)
        assert sorted(read(part)) == expected
        # The codes stay those of the whole.
        assert part.schema["c"].categories == ("Aosta", "Bern", "Oslo", "Rome", "Zug")
    with pytest.raises(SourceError, match="No row"):
        converter.where([("c", "==", "Paris")])


def test_a_key_of_categories_is_split_by_its_value(source: str, converter: DatasetConverter, tmp_path: Path) -> None:
    parts = converter.split({"a": 0.5, "b": 0.5}, by="c", seed=3)
    found = {name: set(read(part)) for name, part in parts.items()}
    assert sorted(found["a"] | found["b"]) == list(range(len(ROWS)))
    assert not {ROWS[id_] for id_ in found["a"]} & {ROWS[id_] for id_ in found["b"]}
    with convert(source, tmp_path / "text", tables_of(CITIES, pa.string()), None) as plain:
        of_text = plain.split({"a": 0.5, "b": 0.5}, by="c", seed=3)
        for name, part in of_text.items():
            with part.make_batch_reader(batch_size=9, nulls="mask") as reader:
                assert {int(id_) for batch in reader for id_ in batch["id"]} == found[name]


def test_given_values_keep_their_order_and_refuse_others(source: str, tmp_path: Path) -> None:
    given_values = {"c": ["Zug", "Rome", "Oslo", "Bern", "Aosta", "Paris"]}
    with convert(source, tmp_path / "a", tables_of(CITIES, pa.string()), given_values) as converter:
        assert converter.schema["c"].categories == tuple(given_values["c"])
        expected = {id_: None if city is None else given_values["c"].index(city) for id_, city in enumerate(ROWS)}
        assert read(converter, shuffle=True) == expected
        assert converter.statistics["c"].counts is not None
        assert converter.statistics["c"].counts.tolist() == [ROWS.count(city) for city in given_values["c"]]
    fewer = {"c": given_values["c"][1:]}
    with (
        pytest.raises(SourceError, match=r"Column 'c' has the value 'Zug' in row \d+ .*, which is none of its"),
        convert(source, tmp_path / "b", tables_of(CITIES, pa.string()), fewer) as converter,
    ):
        read(converter)


@pytest.mark.parametrize("make", [np.array, list, pa.array, pd.Series, pd.Index, lambda values: list(np.array(values))])
def test_values_may_come_as_any_array(tmp_path: Path, make: Any) -> None:
    days = [dt.date(2026, 1, 2), dt.date(1969, 1, 1)]
    columns: dict[str, list[Any]] = {"s": ["b", "a"], "n": [2, 1], "f": [True, False], "d": days}
    pq.write_table(pa.table(columns), tmp_path / "part.parquet")
    given_values = {name: make(values) for name, values in columns.items()}
    for values in (given_values, given_values | {"d": np.array(days, "M8[D]")}):
        converter = make_parquet_converter(tmp_path, categories=values)
        assert {name: list(converter.schema[name].categories or ()) for name in columns} == columns


@pytest.mark.parametrize("make", ["parquet", "delta"])
def test_texts_and_bytes_alone_are_counted_too(tmp_path: Path, make: str) -> None:
    table = pa.table({"label": ["a", "b", "a"], "raw": [b"1", None, b"3"]})
    if make == "delta":
        write_deltalake(tmp_path, table)
        converter = make_delta_converter(tmp_path, categories=["label"])
    else:
        pq.write_table(table, tmp_path / "part.parquet")
        converter = make_parquet_converter(tmp_path, categories=["label"])
    counts = converter.statistics["label"].counts
    assert counts is not None
    assert counts.tolist() == [2, 1]
    assert converter.statistics["raw"].null_count == 1


def test_unseen_values_become_null_if_asked(source: str, tmp_path: Path) -> None:
    options = {"categories": {"c": ("Rome", "Oslo")}, "unseen": "null"}
    with convert(source, tmp_path, tables_of(CITIES, pa.string()), **options) as converter:
        expected = {
            id_: ["Rome", "Oslo"].index(city) if city in ("Rome", "Oslo") else None for id_, city in enumerate(ROWS)
        }
        assert read(converter) == expected
        with converter.make_batch_reader(batch_size=100, nulls={"c": 1}) as reader:
            [batch] = list(reader)
        assert [int(code) for code in batch["c"]] == [
            1 if expected[id_] is None else expected[id_] for id_ in batch["id"]
        ]
        with pytest.raises(NullValueError, match="'c' holds"), converter.make_batch_reader(batch_size=100) as reader:
            list(reader)


def test_the_values_travel(source: str, converter: DatasetConverter) -> None:
    copy = pickle.loads(pickle.dumps(converter))
    assert copy.schema == converter.schema
    assert read(copy) == read(converter)
    if source == "cache":
        with open_converter(converter.url) as opened:
            assert opened.schema == converter.schema
            assert read(opened, shuffle=True) == read(converter)
            assert opened.fingerprint == converter.fingerprint


def test_torch_and_tensorflow_get_the_same_codes(converter: DatasetConverter) -> None:
    expected = read(converter)
    for num_workers in (0, 2):
        with converter.make_torch_dataloader(batch_size=9, nulls="mask", num_workers=num_workers) as loader:
            codes = {
                int(id_): int(code) if valid else None
                for batch in loader
                for id_, code, valid in zip(batch["id"], batch["c"], batch["c__valid"], strict=True)
            }
        assert codes == expected


def test_codes_are_stacked_like_numbers(converter: DatasetConverter) -> None:
    with converter.make_batch_reader(batch_size=100, stack={"x": ["c"]}, nulls="mask") as reader:
        [batch] = list(reader)
    assert batch["x"].dtype == np.int32
    assert batch["x"].shape == (len(ROWS), 1)


def test_a_column_of_nulls_has_no_categories(source: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="Column 'c' has no value but null, so it has no categories"):
        convert(source, tmp_path, tables_of([[None, None]], pa.string()), ["c"])


def test_too_many_values_are_refused(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("converter.categories", "converter.sources.spark.schema", "converter.sources.spark.reports"):
        monkeypatch.setattr(f"{module}.MAX_CATEGORIES", 4)
    with pytest.raises(SourceError, match=r"Column 'c' has .* different values.*Is it a key\?"):
        convert(source, tmp_path, tables_of(CITIES, pa.string()), ["c"])


@pytest.mark.parametrize(
    ("categories", "said"),
    [
        ("c", "categories must be a list of names, or a dict of name to values, got 'c'"),
        (["d"], "names the column 'd', which does not exist. The columns are 'c', 'id'"),
        ({"c": []}, "'c' needs a list of values"),
        ({"c": "Rome"}, "'c' needs a list of values"),
        ({"c": ["Rome", None]}, "None is no value of column 'c', whose values are of str"),
        ({"c": ["Rome", 1]}, "1 is no value of column 'c', whose values are of str"),
        ({"c": ["Rome", "Bern", "Rome"]}, "'Rome' comes twice among the values of column 'c'"),
        ({"id": [1, 1 << 70]}, "a value of column 'id' is too large for 64 bits"),
        ({"id": [1, 2.0]}, "2.0 is no value of column 'id', whose values are of int64"),
        ({"id": [1, True]}, "True is no value of column 'id', whose values are of int64"),
    ],
)
def test_wrong_categories_are_refused_by_name(source: str, tmp_path: Path, categories: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        convert(source, tmp_path, tables_of(CITIES, pa.string()), categories)


def test_unseen_has_two_values(source: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unseen must be 'raise' or 'null', got 'new'"):
        convert(source, tmp_path, tables_of(CITIES, pa.string()), ["c"], "new")


@pytest.mark.parametrize(
    "column",
    [pa.array([1.0]), pa.array([[1.0]]), pa.array([b"x"]), pa.array([0], pa.timestamp("us"))],
    ids=["double", "array of doubles", "bytes", "time"],
)
def test_what_is_no_category_is_refused(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"c": column}), tmp_path / "part.parquet")
    with pytest.raises(
        ValueError, match=r"column 'c' holds .*; categories are strings, whole numbers, booleans or dates"
    ):
        make_parquet_converter(tmp_path, categories=["c"])


def test_a_given_number_that_the_column_cannot_hold_is_no_row_of_it(source: str, tmp_path: Path) -> None:
    # As 16 bits 65,539 would be 3.
    numbers = [[3, 4, 3, None]]
    with convert(source, tmp_path, tables_of(numbers, pa.int16()), {"c": [65_539, 4, 3]}) as converter:
        assert read(converter) == {0: 2, 1: 1, 2: 2, 3: None}


TAGS: list[list[Any]] = [
    [["red", "blue"], [], None, ["red", None, "green"]] * 5,
    [["blue"], ["zinc", "blue", "blue"]] * 4,
]
TAG_ROWS = [tags for part in TAGS for tags in part]


def read_tags(converter: DatasetConverter, **options: Any) -> dict[int, Any]:
    """The codes of each row's tags: None for a null row, and in the place of a null tag."""
    rows: dict[int, Any] = {}
    with converter.make_batch_reader(batch_size=9, nulls="mask", ragged="nested", **options) as reader:
        for batch in reader:
            valid = batch.get("c__valid", np.ones(len(batch["id"]), bool))
            element_valid = batch.get("c__element_valid", [np.ones(len(row), bool) for row in batch["c"]])
            for id_, codes, is_there, are_there in zip(batch["id"], batch["c"], valid, element_valid, strict=True):
                assert codes.dtype == np.int32
                row = [int(code) if here else None for code, here in zip(codes, are_there, strict=True)]
                rows[int(id_)] = row if is_there else None
    return rows


def tag_codes(values: tuple[str, ...]) -> dict[int, Any]:
    codes: dict[Any, Any] = {value: code for code, value in enumerate(values)}
    return {id_: None if tags is None else [codes.get(tag) for tag in tags] for id_, tags in enumerate(TAG_ROWS)}


def convert_tags(source: str, folder: Path, categories: Any, unseen: str = "raise") -> DatasetConverter:
    tables = tables_of(TAGS, pa.list_(pa.string()))
    if source != "cache":
        return convert(source, folder, tables, categories, unseen)
    text = {"type": "array", "elementType": "string", "containsNull": True}
    fields = [
        {"name": "c", "type": text, "nullable": True, "metadata": {}},
        {"name": "id", "type": "long", "nullable": True, "metadata": {}},
    ]
    plans = plan_columns({"type": "struct", "fields": fields}, float_dtype="float32", shapes={})
    batches = [table.to_batches(max_chunksize=3) for table in tables]
    return write_batches(folder, with_categories(plans, categories, unseen), batches)


def test_the_elements_of_arrays_become_codes(source: str, tmp_path: Path) -> None:
    with convert_tags(source, tmp_path, ["c"]) as converter:
        field = converter.schema["c"]
        assert (field.dtype, field.shape, field.categories) == ("int32", None, ("blue", "green", "red", "zinc"))
        expected = tag_codes(("blue", "green", "red", "zinc"))
        assert read_tags(converter) == expected
        assert read_tags(converter, shuffle=True) == expected
        counts = converter.statistics["c"].counts
        assert counts is not None
        flat = [tag for tags in TAG_ROWS if tags is not None for tag in tags]
        assert counts.tolist() == [flat.count(value) for value in ("blue", "green", "red", "zinc")]
        with_green = converter.where([("c", "contains", "green")])
        assert sorted(read_tags(with_green)) == [id_ for id_, tags in enumerate(TAG_ROWS) if tags and "green" in tags]
        assert read_tags(pickle.loads(pickle.dumps(converter))) == expected


def test_given_values_of_elements(source: str, tmp_path: Path) -> None:
    known = ("zinc", "red", "green")
    with convert_tags(source, tmp_path / "a", {"c": known}, "null") as converter:
        assert read_tags(converter) == tag_codes(known)
    with (
        pytest.raises(SourceError, match=r"Column 'c' has the value 'blue'.*, which is none of its"),
        convert_tags(source, tmp_path / "b", {"c": known}) as converter,
    ):
        read_tags(converter)


def test_unseen_values_of_a_column_without_nulls_are_masked(source: str, tmp_path: Path) -> None:
    tables = tables_of([["a", "b", "c", "a"]], pa.string())
    with convert(source, tmp_path, tables, {"c": ["a"]}, "null") as converter:
        assert converter.schema["c"].has_nulls
        assert read(converter) == {0: 0, 1: None, 2: None, 3: 0}


def test_rows_that_are_left_out_may_have_other_values(tmp_path: Path) -> None:
    table = pa.table({"c": ["a", "b", "c", "d"], "tags": [["a"], ["b"], ["c"], []], "id": [0, 1, 2, 3]})
    pq.write_table(table, tmp_path / "part.parquet")
    write_deltalake(tmp_path / "table", table)
    known: Any = {"c": ["a", "b"], "tags": ["a", "b"]}
    some = make_parquet_converter(tmp_path / "part.parquet", categories=known).where([("id", "<", 2)])
    by_filter = make_delta_converter(tmp_path / "table", filters=[("id", "<", 2)], categories=["c", "tags"])
    for converter in (some, by_filter):
        assert converter.schema["c"].categories == ("a", "b")
        for nulls in ("raise", "mask"):
            with converter.make_batch_reader(batch_size=4, nulls=nulls, ragged="pad") as reader:  # type: ignore[arg-type]
                [batch] = list(reader)
            assert batch["c"].tolist() == [0, 1]
            assert batch["tags"].tolist() == [[0], [1]]
        counts = converter.statistics["c"].counts
        assert counts is not None
        assert counts.tolist() == [1, 1]
    rest = make_parquet_converter(tmp_path / "part.parquet", categories=known).where([("id", ">", 0)])
    with pytest.raises(SourceError, match=r"the value 'c' in row 2 \(row 2 of .*\), which is none of its 2"):
        rest.head()


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_texts_that_arrow_cannot_look_up_in_a_dictionary_are_categories_as_well(encoding: str, tmp_path: Path) -> None:
    texts = [None if row % 11 == 0 else f"text {row % 5}" for row in range(200)]
    table = pa.table({"c": texts, "list": [[text or "none"] for text in texts]})
    of = {"c": encoding, "list.list.element": encoding}
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, column_encoding=of, row_group_size=90)
    pq.write_table(table, tmp_path / "b.parquet")
    with make_parquet_converter(tmp_path, categories=["c", "list"]) as converter:
        known = converter.schema["c"].categories
        assert known == tuple(f"text {number}" for number in range(5))
        of_lists = converter.schema["list"].categories
        assert of_lists is not None
        (batch,) = converter.make_batch_reader(batch_size=400, nulls="mask", ragged="nested")
        found = [known[code] if valid else None for code, valid in zip(batch["c"], batch["c__valid"], strict=True)]
        assert found == texts + texts
        assert [of_lists[code] for (code,) in batch["list"]] == [text or "none" for text in texts + texts]
        assert converter.verify(every_row=True) == []
        assert len(converter.where([("c", "==", "text 1")])) == 2 * texts.count("text 1")
