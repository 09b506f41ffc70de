"""A schema names fields, shows them as Spark and as namedtuples, and is found in Arrow's."""

from __future__ import annotations

import copy
import pickle
import warnings
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark.sql.types as sql_types
import pytest
from pyspark.sql import Row

from converter.petastorm import unischema
from converter.petastorm.codecs import CompressedImageCodec, NdarrayCodec, ScalarCodec
from converter.petastorm.errors import DecodeFieldError
from converter.petastorm.unischema import (
    Unischema,
    UnischemaField,
    decode_column,
    dict_to_spark_row,
    insert_explicit_nulls,
    match_unischema_fields,
    unischema_of_arrow,
)

ID = UnischemaField("id", np.int32, (), ScalarCodec(sql_types.IntegerType()))
NAME = UnischemaField("name", np.str_, (), ScalarCodec(sql_types.StringType()), True)
MATRIX = UnischemaField("matrix", np.float32, (None, 3), NdarrayCodec(), True)
SCHEMA = Unischema("Rides", [MATRIX, ID, NAME])


def schema_of(column_type: pa.DataType, **options: Any) -> Unischema:
    return unischema_of_arrow(pa.schema([("x", column_type)]), {}, **options)


def test_fields_are_equal_if_all_but_their_codecs_are() -> None:
    assert UnischemaField("id", np.int32, ()) == ID
    assert not UnischemaField("id", np.int32, ()) != ID  # noqa: SIM202 (a tuple has its own)
    assert hash(UnischemaField("id", np.int32, ())) == hash(ID)
    for other in (
        ID._replace(name="ID"),
        ID._replace(numpy_dtype=np.int64),
        ID._replace(shape=(1,)),
        ID._replace(nullable=True),
    ):
        assert other != ID
    for stranger in (("id", np.int32, ()), "id", None):
        assert stranger != ID


def test_fields_are_attributes_and_keep_their_order() -> None:
    assert SCHEMA.matrix is MATRIX
    assert list(SCHEMA.fields) == ["matrix", "id", "name"]
    assert SCHEMA.__name__ == "Rides"
    assert not hasattr(SCHEMA, "other")


def test_fields_can_be_ordered_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unischema, "_UNISCHEMA_FIELD_ORDER", "alphabetical")
    schema = Unischema("Rides", [NAME, ID])
    assert list(schema.fields) == ["id", "name"]
    assert schema.make_namedtuple_tf(1, "a") == schema.make_namedtuple(name="a", id=1)


def test_a_field_that_is_no_attribute_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="Can not create dynamic property fields"):
        schema = Unischema("S", [UnischemaField("fields", np.int32, ())])
    assert list(schema.fields) == ["fields"]


def test_a_schema_shows_its_fields() -> None:
    assert str(SCHEMA) == (
        "Unischema(Rides, [\n"
        "  UnischemaField('matrix', float32, (None, 3), NdarrayCodec(), True),\n"
        "  UnischemaField('id', int32, (), ScalarCodec(IntegerType()), False),\n"
        "  UnischemaField('name', str_, (), ScalarCodec(StringType()), True),\n"
        "])"
    )


def test_a_schema_can_be_copied_and_pickled() -> None:
    for again in (copy.deepcopy(SCHEMA), pickle.loads(pickle.dumps(SCHEMA))):
        assert str(again) == str(SCHEMA)
        assert again.id == ID


def test_a_view_has_the_schemas_own_fields() -> None:
    view = SCHEMA.create_schema_view([UnischemaField("id", np.int64, (9,)), "ma.*"])
    assert list(view.fields.values()) == [ID, MATRIX]
    assert view.id.codec is ID.codec
    assert view.__name__ == "Rides_view"


def test_a_field_that_is_named_twice_is_in_a_view_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(SCHEMA.create_schema_view([ID, "id", "i.", ID]).fields) == ["id"]
    assert not SCHEMA.create_schema_view(["bogus"]).fields


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ([UnischemaField("other", np.int8, ())], "'other' does not belong to the schema"),
        ([42], "must be either a string"),
    ],
)
def test_a_view_of_other_fields_is_refused(fields: list[Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SCHEMA.create_schema_view(fields)


def test_a_pattern_matches_whole_names_in_the_schemas_order() -> None:
    assert match_unischema_fields(SCHEMA, ["na.e", "id", "i.*"]) == [ID, NAME]
    assert match_unischema_fields(SCHEMA, ["bogus"]) == []
    assert match_unischema_fields(SCHEMA, []) == match_unischema_fields(SCHEMA, None) == []


def test_a_pattern_that_matches_a_beginning_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"schema_fields behavior has changed.*: matrix, name$"):
        assert match_unischema_fields(SCHEMA, ["ma", "n"]) == []


def test_columns_have_types_of_sparks() -> None:
    schema = Unischema(
        "S", [ID, NAME, MATRIX, UnischemaField("plain", np.uint16, ()), UnischemaField("flag", np.dtype(bool), ())]
    )
    assert schema.as_spark_schema() == sql_types.StructType(
        [
            sql_types.StructField("id", sql_types.IntegerType(), False),
            sql_types.StructField("name", sql_types.StringType(), True),
            sql_types.StructField("matrix", sql_types.BinaryType(), True),
            sql_types.StructField("plain", sql_types.IntegerType(), False),
            sql_types.StructField("flag", sql_types.BooleanType(), False),
        ]
    )


@pytest.mark.parametrize(
    ("field", "match"),
    [
        (UnischemaField("x", np.int8, (1,)), "'x' has codec set to None"),
        (UnischemaField("x", object, ()), "Was not able to map type"),
        (UnischemaField("x", Decimal, ()), "Was not able to map type"),
    ],
)
def test_a_field_without_a_type_of_sparks_is_refused(field: UnischemaField, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Unischema("S", [field]).as_spark_schema()


def test_rows_of_one_schema_are_of_one_class() -> None:
    row = SCHEMA.make_namedtuple(id=1, name=None, matrix=2)
    assert row == (2, 1, None)
    assert type(row).__name__ == "Rides_view"
    assert type(row) is type(Unischema("Rides", SCHEMA.fields.values()).make_namedtuple_tf(1, 2, name=3))
    assert type(row) is not type(Unischema("Other", SCHEMA.fields.values()).make_namedtuple_tf(1, 2, 3))


def test_rows_lack_no_field_and_have_no_other() -> None:
    with pytest.raises(TypeError, match="missing 1 required"):
        SCHEMA.make_namedtuple(id=1, name="a")
    with pytest.raises(TypeError, match="unexpected"):
        SCHEMA.make_namedtuple(id=1, name="a", matrix=2, other=3)


def test_rows_travel_to_other_processes() -> None:
    row = SCHEMA.make_namedtuple(id=1, name="a", matrix=2)
    again = pickle.loads(pickle.dumps(row))
    assert again == row
    assert type(again) is type(row)


def test_a_row_may_have_a_thousand_fields() -> None:
    names = [f"f{number}" for number in range(1000)]
    row = Unischema("Wide", [UnischemaField(name, np.int8, ()) for name in names]).make_namedtuple_tf(*range(1000))
    assert row.f764 == 764


def test_a_spark_row_is_encoded_in_the_schemas_order() -> None:
    matrix = np.ones((2, 3), np.float32)
    given = {"name": "a", "id": np.int64(7), "matrix": matrix}
    row = dict_to_spark_row(SCHEMA, given)
    assert isinstance(row, Row)
    assert row.__fields__ == ["matrix", "id", "name"]
    assert (row.id, row.name) == (7, "a")
    np.testing.assert_array_equal(NdarrayCodec().decode(MATRIX, row.matrix), matrix)
    assert dict_to_spark_row(SCHEMA, {"id": 7}).asDict() == {"matrix": None, "id": 7, "name": None}
    plain = Unischema("S", [UnischemaField("x", np.float64, ())])
    assert type(dict_to_spark_row(plain, {"x": np.float32(0.5)}).x) is float


@pytest.mark.parametrize(
    ("row", "error", "match"),
    [
        ({"name": "a"}, ValueError, "Field id is not found in the row_dict"),
        ({"id": None}, ValueError, 'Field id is not "nullable"'),
        ({"id": 1, "other": 2}, ValueError, "do not match schema fields"),
        ({"id": []}, TypeError, "Expected a scalar"),
        ({"id": 1, "matrix": np.ones((2, 2), np.float32)}, ValueError, "Unexpected dimensions of matrix"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(row: dict[str, Any], error: type[Exception], match: str) -> None:
    before = dict(row)
    with pytest.raises(error, match=match):
        dict_to_spark_row(SCHEMA, row)
    assert row == before


def test_missing_nullable_fields_become_none() -> None:
    row: dict[str, Any] = {"id": 1, "name": "a"}
    insert_explicit_nulls(SCHEMA, row)
    assert row == {"id": 1, "name": "a", "matrix": None}
    with pytest.raises(ValueError, match="Field id is not found"):
        insert_explicit_nulls(SCHEMA, {})


@pytest.mark.parametrize(
    ("arrow_type", "numpy_dtype", "shape"),
    [
        (pa.int8(), np.int8, ()),
        (pa.uint8(), np.uint8, ()),
        (pa.int16(), np.int16, ()),
        (pa.int32(), np.int32, ()),
        (pa.int64(), np.int64, ()),
        (pa.float32(), np.float32, ()),
        (pa.float64(), np.float64, ()),
        (pa.bool_(), np.bool_, ()),
        (pa.string(), np.str_, ()),
        (pa.binary(), np.bytes_, ()),
        (pa.binary(10), np.bytes_, ()),
        (pa.decimal128(5, 2), Decimal, ()),
        (pa.date32(), np.datetime64, ()),
        (pa.date64(), np.datetime64, ()),
        (pa.timestamp("s"), np.datetime64, ()),
        (pa.timestamp("ns", "UTC"), np.datetime64, ()),
        (pa.list_(pa.int16()), np.int16, (None,)),
    ],
)
def test_a_column_of_arrows_is_a_field(arrow_type: pa.DataType, numpy_dtype: Any, shape: tuple[Any, ...]) -> None:
    assert schema_of(arrow_type).x == UnischemaField("x", numpy_dtype, shape, None, True)


UNSUPPORTED = [
    pa.float16(), pa.time32("s"), pa.null(), pa.struct([("a", pa.int8())]), pa.map_(pa.string(), pa.int8()),
    pa.list_(pa.float16()), pa.list_(pa.map_(pa.string(), pa.int8())), pa.duration("s"), pa.uint16(), pa.uint32(),
    pa.uint64(), pa.large_string(), pa.string_view(), pa.large_binary(), pa.dictionary(pa.int8(), pa.string()),
    pa.large_list(pa.string()), pa.list_(pa.float32(), 4),
]  # fmt: skip


@pytest.mark.parametrize("arrow_type", UNSUPPORTED)
def test_other_columns_are_left_out_with_a_warning_or_refused(arrow_type: pa.DataType) -> None:
    with pytest.warns(UserWarning, match="Column 'x' has an unsupported field"):
        assert not schema_of(arrow_type).fields
    with pytest.raises(ValueError, match="Cannot auto-create unischema due to unsupported column type"):
        schema_of(arrow_type, omit_unsupported_fields=False)


@pytest.mark.parametrize("omit", [True, False])
@pytest.mark.parametrize("value_type", [pa.list_(pa.int8()), pa.struct([("a", pa.int8())])])
def test_lists_of_lists_and_of_structs_are_left_out(value_type: pa.DataType, omit: bool) -> None:
    with pytest.warns(UserWarning, match=r"\[ARROW-1644\] Ignoring unsupported structure"):
        assert not schema_of(pa.list_(value_type), omit_unsupported_fields=omit).fields


def test_partition_columns_come_first_and_are_texts_or_whole_numbers() -> None:
    arrow = pa.schema([pa.field("x", pa.int8(), nullable=False), ("day", pa.int64())])
    schema = unischema_of_arrow(arrow, {"city": pa.string(), "day": pa.dictionary(pa.int32(), pa.int32())})
    assert list(schema.fields.values()) == [
        UnischemaField("city", np.str_, (), None, False),
        UnischemaField("day", np.int64, (), None, False),
        UnischemaField("x", np.int8, (), None, False),
    ]
    with pytest.raises(RuntimeError, match="Expected partition type to be one of"):
        unischema_of_arrow(arrow, {"share": pa.float64()})


def test_the_schema_of_a_dataset_of_pyarrows_is_found(tmp_path: Any) -> None:
    table = pa.table({"x": pa.array([1, 2], pa.int16()), "city": ["a", "b"], "day": [1, 2]})
    pq.write_to_dataset(table, tmp_path, partition_cols=["city", "day"])
    schema = Unischema.from_arrow_schema(pq.ParquetDataset(tmp_path))
    assert [(name, field.numpy_dtype, field.nullable) for name, field in schema.fields.items()] == [
        ("city", np.str_, False),
        ("day", np.int64, False),
        ("x", np.int16, True),
    ]
    assert schema.__name__ == "inferred_schema"


def test_the_schema_of_a_dataset_as_pyarrow_had_it_is_found() -> None:
    arrow = pa.schema([("x", pa.int8())])
    footer = SimpleNamespace(schema=SimpleNamespace(to_arrow_schema=lambda: arrow))
    partition = SimpleNamespace(name="day", dictionary=pa.array([1, 2]))
    dataset = SimpleNamespace(pieces=[SimpleNamespace(get_metadata=lambda: footer)], partitions=[partition])
    assert list(Unischema.from_arrow_schema(dataset).fields) == ["day", "x"]
    dataset.partitions = None
    assert list(Unischema.from_arrow_schema(dataset).fields) == ["x"]


def test_a_column_is_decoded_by_its_codec_or_by_its_dtype() -> None:
    encoded = [bytes(NdarrayCodec().encode(MATRIX, np.full((2, 3), number, np.float32))) for number in range(2)]
    column = decode_column(MATRIX, pa.chunked_array([[encoded[0]], [encoded[1]]]))
    assert column.shape == (2, 2, 3)
    assert decode_column(ID, pa.array([1, 2], pa.int64())).dtype == np.int32
    assert decode_column(UnischemaField("x", np.int8, ()), pa.array([1])).dtype == np.int8


def test_a_column_without_rows_has_the_fields_shape() -> None:
    field = UnischemaField("x", np.uint8, (4, 5, 3), CompressedImageCodec())
    assert decode_column(field, pa.array([], pa.binary())).shape == (0, 4, 5, 3)
    assert decode_column(MATRIX, pa.array([], pa.binary())).shape == (0,)


def test_an_error_while_decoding_names_the_field() -> None:
    with pytest.raises(DecodeFieldError, match='Decoding field "matrix" failed'):
        decode_column(MATRIX, pa.array([b"bogus"]))
    with pytest.raises(DecodeFieldError, match='Decoding field "id" failed'):
        decode_column(ID, pa.array(["a"]))


@pytest.mark.parametrize("codec", [None, ScalarCodec(sql_types.StringType())])
def test_a_row_for_spark_keeps_zeros_at_the_ends_of_numpys_texts(codec: Any) -> None:
    schema = Unischema("S", [UnischemaField("x", np.str_, (), codec)])
    stored = dict_to_spark_row(schema, {"x": np.str_("a\0")}).x
    assert type(stored) is str
    assert stored == "a\0"


def test_a_row_for_spark_keeps_zeros_at_the_ends_of_numpys_bytes() -> None:
    schema = Unischema("S", [UnischemaField("x", np.bytes_, ())])
    assert dict_to_spark_row(schema, {"x": np.bytes_(b"a\0")}).x == b"a\0"
