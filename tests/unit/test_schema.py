"""A column as a tensor: the table of types, shapes, and what is said of a column that is not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.errors import UnsupportedTypeError
from converter.schema import Field, Schema, dtype_of, raise_unsupported

DTYPES = ["bool", "int8", "int16", "int32", "int64", "float32", "float64", "datetime64[D]", "datetime64[us]", "str"]
DTYPES += ["bytes"]

fields = st.builds(
    Field,
    name=st.text(max_size=8),
    dtype=st.sampled_from(DTYPES),
    shape=st.none() | st.lists(st.integers(0, 9), max_size=3).map(tuple),
    has_nulls=st.booleans(),
)
schemas = st.lists(fields, max_size=5, unique_by=lambda field: field.name).map(lambda found: Schema(tuple(found)))


@given(schemas)
def test_a_schema_survives_json(schema: Schema) -> None:
    assert Schema.from_json(schema.to_json()) == schema


@pytest.mark.parametrize(
    ("arrow_type", "dtype"),
    [
        (pa.bool_(), "bool"),
        (pa.int8(), "int8"),
        (pa.int16(), "int16"),
        (pa.int32(), "int32"),
        (pa.int64(), "int64"),
        (pa.float32(), "float32"),
        (pa.float64(), "float64"),
        (pa.decimal128(38, 10), "float64"),
        (pa.date32(), "datetime64[D]"),
        (pa.timestamp("us"), "datetime64[us]"),
        (pa.timestamp("us", tz="America/New_York"), "datetime64[us]"),
        (pa.string(), "str"),
        (pa.large_string(), "str"),
        (pa.binary(), "bytes"),
        (pa.large_binary(), "bytes"),
        (pa.null(), None),
        (pa.map_(pa.string(), pa.int32()), None),
        (pa.struct([("a", pa.int32())]), None),
        (pa.duration("us"), None),
        (pa.time64("us"), None),
        (pa.month_day_nano_interval(), None),
    ],
    ids=str,
)
def test_the_table_of_types(arrow_type: pa.DataType, dtype: str | None) -> None:
    assert dtype_of(arrow_type) == dtype


@pytest.mark.parametrize(
    ("dtype", "stored"), [("datetime64[D]", np.int32), ("datetime64[us]", np.int64), ("float32", np.float32)]
)
def test_dates_and_times_are_stored_as_integers(dtype: str, stored: type) -> None:
    assert Field(name="x", dtype=dtype).stored_dtype == np.dtype(stored)


def test_only_single_numbers_can_be_stacked() -> None:
    assert Field(name="x", dtype="bool").is_scalar_number
    assert Field(name="x", dtype="float64").is_scalar_number
    assert not Field(name="x", dtype="float64", shape=(1,)).is_scalar_number
    assert not Field(name="x", dtype="float64", shape=None).is_scalar_number
    assert not Field(name="x", dtype="str").is_scalar_number
    assert not Field(name="x", dtype="datetime64[us]").is_scalar_number


@pytest.mark.parametrize("dtype", ["garbage", "object", "int32,int32", "uint32", "float128", ""])
def test_a_field_refuses_a_dtype_that_no_column_has(dtype: str) -> None:
    with pytest.raises(
        ValueError, match=rf"Field 'x' has dtype '{dtype}'; expected one of bool, bytes, .*, str, uint16, uint8\."
    ):
        Field(name="x", dtype=dtype)


def test_a_field_refuses_a_negative_size_and_says_whose() -> None:
    with pytest.raises(ValueError, match=r"Field 'x' needs a shape of sizes >= 0, got \(2, -1\)"):
        Field(name="x", dtype="int8", shape=(2, -1))


def test_a_field_says_of_its_elements_what_there_is_to_say_and_nothing_else() -> None:
    plain, full = (
        Field(name="x", dtype="int8", shape=None, ragged_ndim=2),
        Field(name="x", dtype="int8", shape=None, ragged_ndim=2, has_null_elements=True, is_jagged=True),
    )
    assert set(full.to_json()) - set(plain.to_json()) == {"has_null_elements", "is_jagged"}
    assert [Field.from_json(one.to_json()) for one in (plain, full)] == [plain, full]


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"dtype": "int8", "has_null_elements": True}, "is a single value, which has no elements"),
        ({"dtype": "int8", "shape": None, "ragged_ndim": 10**9}, "has 1000000000 dimensions; NumPy"),
    ],
)
def test_a_field_refuses_what_no_column_is(said: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"Field 'x' {match}"):
        Field(name="x", **said)


def test_a_field_from_json_must_be_complete() -> None:
    whole = Field(name="x", dtype="int8").to_json()
    for name in whole:
        partial = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(KeyError, match=name):
            Field.from_json(partial)


def test_a_schema_is_looked_up_by_name_and_kept_in_order() -> None:
    schema = Schema((Field(name="b", dtype="int8"), Field(name="a", dtype="str")))
    assert schema.names == ("b", "a")
    assert [field.dtype for field in schema] == ["int8", "str"]
    assert len(schema) == 2
    assert "a" in schema
    assert "c" not in schema
    assert schema["a"].dtype == "str"
    assert schema.get("c") is None


def test_a_missing_column_is_explained_with_the_nearest_name() -> None:
    schema = Schema((Field(name="distance", dtype="int8"), Field(name="delay", dtype="int8")))
    with pytest.raises(KeyError, match=r"There is no column 'distanec'\. Did you mean 'distance'"):
        schema["distanec"]
    assert "Did you mean" not in schema.explain_missing("zzz")
    assert "'distance', 'delay'" in schema.explain_missing("zzz")


def test_a_missing_column_of_a_wide_table_does_not_list_them_all() -> None:
    schema = Schema(tuple(Field(name=f"c{index}", dtype="int8") for index in range(21)))
    assert "'c19', …" in schema.explain_missing("zzz")
    assert "'c20'" not in schema.explain_missing("zzz")


def test_one_error_names_all_columns_without_a_tensor_form() -> None:
    raise_unsupported({})
    with pytest.raises(UnsupportedTypeError, match="1 column cannot") as one:
        raise_unsupported({"m": ("map<string,int>", "take its keys")})
    assert one.value.column == "m"
    with pytest.raises(
        UnsupportedTypeError, match=r"(?s)2 columns cannot.*'m' has type map: .*'v' has type void"
    ) as two:
        raise_unsupported({"m": ("map", "take its keys"), "v": ("void", "drop it")})
    assert two.value.column == "m"


def test_a_schema_is_shown_as_a_table() -> None:
    schema = Schema(
        (
            Field(name="id", dtype="int64"),
            Field(name="a longer name", dtype="datetime64[us]", has_nulls=True),
            Field(name="image", dtype="float32", shape=(3, 32, 32)),
            Field(name="words", dtype="int32", shape=None),
            Field(name="boxes\n", dtype="float32", shape=None, ragged_ndim=2),
        )
    )
    assert repr(schema).splitlines() == [
        "Schema(5 columns)",
        "name           dtype           shape                 nulls",
        "id             int64           ()                    no",
        "a longer name  datetime64[us]  ()                    yes",
        "image          float32         (3, 32, 32)           no",
        "words          int32           ragged                no",
        "'boxes\\n'      float32         ragged, 2 dimensions  no",
    ]
    assert repr(Schema(())).splitlines() == ["Schema(0 columns)", "name  dtype  shape  nulls"]


def test_a_wide_schema_shows_its_first_columns_and_how_many_more() -> None:
    schema = Schema(tuple(Field(name=f"c{index}", dtype="int8") for index in range(1041)))
    lines = repr(schema).splitlines()
    assert len(lines) == 43
    assert lines[0] == "Schema(1,041 columns)"
    assert lines[-2].startswith("c39 ")
    assert lines[-1] == "… and 1,001 columns more"
    assert "<td>c39</td>" in schema._repr_html_()
    assert "<td>c40</td>" not in schema._repr_html_()
    assert schema._repr_html_().endswith("</table><p>… and 1,001 columns more</p>")
    assert "more" not in repr(Schema(schema.fields[:40]))


def test_a_schema_in_a_notebook_is_a_table_with_its_names_escaped() -> None:
    page = Schema((Field(name="<b>", dtype="str", has_nulls=True),))._repr_html_()
    assert page == (
        "<table><tr><th>name</th><th>dtype</th><th>shape</th><th>nulls</th></tr>"
        "<tr><td>&lt;b&gt;</td><td>str</td><td>()</td><td>yes</td></tr></table>"
    )
