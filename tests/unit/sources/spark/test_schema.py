"""Which columns a Spark schema becomes, and how Spark selects them."""

from __future__ import annotations

from typing import Any

import pytest

from converter.errors import SourceError, UnsupportedTypeError
from converter.sources.spark.run import _batch_confs
from converter.sources.spark.schema import SparkColumn, batch_schema_of, decoded_columns, plan_columns

Json = dict[str, Any]


def array(element: Any) -> Json:
    return {"type": "array", "elementType": element, "containsNull": True}


def mapping(key: Any, value: Any) -> Json:
    return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}


def struct(**members: Any) -> Json:
    return {"type": "struct", "fields": [{"name": name, "type": kind} for name, kind in members.items()]}


def plan(shapes: Json | None = None, **columns: Any) -> dict[str, SparkColumn]:
    planned = plan_columns(struct(**columns), float_dtype="float32", shapes=shapes or {})
    return {column.name: column for column in planned}


SECONDS = "CAST(CAST(CAST({} AS INTERVAL DAY TO SECOND) AS DECIMAL(19, 6)) * 1000000 AS BIGINT)"

SELECTED: list[tuple[Any, dict[str, str]]] = [
    ("long", {"x": "`x`"}),
    (array("string"), {"x": "`x`"}),
    (array("decimal(9,2)"), {"x": "CAST(`x` AS array<double>)"}),
    (array(struct(a="long", b="string")), {"x.a": "`x`.`a`", "x.b": "`x`.`b`"}),
    (array(struct(s=struct(a="long"))), {"x.s.a": "`x`.`s`.`a`"}),
    (array(struct(a=array("long"))), {"x.a": "`x`.`a`"}),
    (array(struct(d="decimal(9,2)")), {"x.d": "transform(`x`, x0 -> CAST(x0.`d` AS double))"}),
    (array(array(struct(a="long"))), {"x.a": "transform(`x`, x0 -> x0.`a`)"}),
    (array(struct(a=array(struct(b="long")))), {"x.a.b": "transform(`x`, x0 -> x0.`a`.`b`)"}),
    (mapping("string", "long"), {"x.key": "map_keys(`x`)", "x.value": "map_values(`x`)"}),
    (
        mapping("string", array(struct(v="long"))),
        {"x.key": "map_keys(`x`)", "x.value.v": "transform(map_values(`x`), x0 -> x0.`v`)"},
    ),
    (
        array(mapping("string", "date")),
        {"x.key": "transform(`x`, x0 -> map_keys(x0))", "x.value": "transform(`x`, x0 -> map_values(x0))"},
    ),
    (struct(m=mapping("string", "long")), {"x.m.key": "map_keys(`x`.`m`)", "x.m.value": "map_values(`x`.`m`)"}),
    (struct(**{"odd.`name": array(struct(a="integer"))}), {"x.odd.`name.a": "`x`.`odd.``name`.`a`"}),
    ("interval year", {"x": "CAST(CAST(`x` AS INTERVAL MONTH) AS INT)"}),
    ("interval day to second", {"x": SECONDS.format("`x`")}),
    (array("interval hour"), {"x": f"transform(`x`, x0 -> {SECONDS.format('x0')})"}),
    (struct(t="time(6)"), {"x.t": "time_diff('MICROSECOND', time'00:00:00', `x`.`t`)"}),
]


@pytest.mark.parametrize(("kind", "selected"), SELECTED)
def test_each_column_is_selected_by_plain_sql(kind: Any, selected: dict[str, str]) -> None:
    columns = plan(x=kind)
    assert {name: column.select("c0").removesuffix(" AS c0") for name, column in columns.items()} == selected


def test_members_of_lists_are_lists_and_arrays_of_numbers_are_packed() -> None:
    columns = plan(
        tags=array("string"), numbers=array("float"), days=array("date"), items=array(struct(n="long", s="string")),
        m=mapping("string", array("double")), span="interval day",
    )  # fmt: skip
    assert {name: (column.kind, column.dtype, column.ndim) for name, column in columns.items()} == {
        "tags": ("lists", "str", 1),
        "numbers": ("tensor", "float32", 1),
        "days": ("tensor", "datetime64[D]", 1),
        "items.n": ("lists", "int64", 1),
        "items.s": ("lists", "str", 1),
        "m.key": ("lists", "str", 1),
        "m.value": ("lists", "float32", 2),
        "span": ("scalar", "int64", 0),
    }
    assert columns["span"].unit == "µs"
    schema = batch_schema_of(list(columns.values()))
    assert [field.shape for field in schema] == [None, (1,), (1,), None, None, None, None, ()]
    declared = plan(shapes={"items.n": (4,)}, items=array(struct(n="long")))["items.n"]
    assert (declared.kind, declared.shape) == ("tensor", (4,))


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(SourceError, match=r"Several columns are called 'm\.key'.*the keys of a map 'map\.key'"):
        plan(**{"m": mapping("string", "long"), "m.key": "long"})


def test_names_are_alike_that_spark_takes_for_alike() -> None:
    def names(*columns: str) -> list[str]:
        planned = plan_columns(
            struct(**dict.fromkeys(columns, "long")), float_dtype=None, shapes={}, is_case_sensitive=False
        )
        return [column.name for column in planned]

    with pytest.raises(SourceError, match="Several columns are called 'STRASSE', 'strasse'"):
        names("strasse", "STRASSE")
    assert names("strasse", "straße") == ["strasse", "straße"]


@pytest.mark.parametrize(("kind", "named"), [
    (array(struct(a="long", v="void")), r"'x\.v' has type void: leave it out .*, e\.g\. df\.drop\('x'\)"),
    (mapping("string", "variant"), r"'x\.value' has type variant"),
    (array("void"), r"'x' has type array<void>: .*e\.g\. F\.transform\(F\.col\('`x`'\), lambda x: x\.cast\('int'\)\)"),
    (array({"type": "udt", "class": "org.apache.spark.ml.linalg.VectorUDT"}),
     r"array<VectorUDT>: .*F\.transform\(F\.col\('`x`'\), lambda x: vector_to_array\(x\)\), after from pyspark\.ml"),
    (struct(), r"'x' has type struct: leave it out, it has no members, e\.g\. df\.drop\('x'\)"),
    (array(struct()), r"'x' has type array<struct>: leave it out"),
    (struct(a="long", s=struct()), r"'x\.s' has type struct: leave it out, it has no members, e\.g\. df\.drop\('x'\)"),
    ("interval", r"'x' has type interval: cast it, e\.g\. F\.col\('`x`'\)\.cast\('string'\)"),
    ("geometry(4326)", r"'x' has type geometry\(4326\): store it as bytes"),
    (array(struct(v={"type": "udt", "class": "org.apache.spark.ml.linalg.VectorUDT"})), r"'x\.v' has type VectorUDT"),
])  # fmt: skip
def test_what_has_no_tensor_form_is_named(kind: Any, named: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=named):
        plan(x=kind)


def test_text_has_no_declared_shape() -> None:
    with pytest.raises(ValueError, match="shapes: the arrays of 'x' are str, and arrays of text have no one shape"):
        plan(shapes={"x": (2,)}, x=array("string"))


@pytest.mark.parametrize("version", [(3, 5), (4, 1), (4, 2)])
def test_rows_with_bytes_come_in_small_batches_though_a_number_is_made_of_them(version: tuple[int, ...]) -> None:
    class Brightness:
        dtype, shape = "float32", ()

        def decode(self, values: Any) -> Any:
            raise NotImplementedError

    document = {"fields": [{"name": "id", "type": "long"}, {"name": "photo", "type": "binary"}]}
    columns = plan_columns(document, float_dtype="float32", shapes={})
    decoded = decoded_columns(columns, {"photo": Brightness()})
    assert _batch_confs(decoded, version) == _batch_confs(columns, version)
    assert _batch_confs(columns, version) != _batch_confs(columns[:1], version)
