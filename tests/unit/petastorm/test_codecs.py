"""Codecs give back what they stored, one value or a whole column, and refuse what is none of theirs."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyspark.sql.types as sql_types
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from converter.petastorm.codecs import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    DataframeColumnCodec,
    NamedSparkType,
    NdarrayCodec,
    ScalarCodec,
)
from converter.petastorm.unischema import UnischemaField, decode_column

NDARRAY_CODECS = [NdarrayCodec(), CompressedNdarrayCodec()]


def field_of(numpy_dtype: Any, shape: tuple[int | None, ...], codec: Any) -> UnischemaField:
    return UnischemaField("x", numpy_dtype, shape, codec)


def stored(codec: Any, values: list[Any], numpy_dtype: Any, shape: tuple[int | None, ...]) -> pa.Array:
    field = field_of(numpy_dtype, shape, codec)
    return pa.array([None if value is None else bytes(codec.encode(field, value)) for value in values], pa.binary())


@pytest.mark.parametrize("codec", NDARRAY_CODECS)
@given(
    array=arrays_of.arrays(
        st.sampled_from(["bool", "uint8", "int16", "uint64", "float16", "float32", "float64"]),
        st.sampled_from([(), (3,), (2, 3), (0, 2)]),
    )
)
def test_an_array_comes_back(codec: Any, array: Any) -> None:
    field = field_of(array.dtype.type, array.shape, codec)
    decoded = codec.decode(field, codec.encode(field, array))
    assert decoded.dtype == array.dtype
    np.testing.assert_array_equal(decoded, array)


@pytest.mark.parametrize("codec", NDARRAY_CODECS)
def test_arrays_of_one_shape_are_one_array_that_may_be_written_to(codec: Any) -> None:
    values = [np.full((2, 3), number, np.float32) for number in range(5)]
    column = codec.decode_column(field_of(np.float32, (2, 3), codec), stored(codec, values, np.float32, (2, 3))[1:])
    np.testing.assert_array_equal(column, np.stack(values[1:]))
    assert column.dtype == np.float32
    column[0] = 0


@pytest.mark.parametrize("codec", NDARRAY_CODECS)
@pytest.mark.parametrize("shapes", [[(2,), (3,), (0,)], [(2, 3), (3, 2)], [(1,), (1, 1)]])
def test_arrays_of_several_shapes_are_objects(codec: Any, shapes: list[tuple[int, ...]]) -> None:
    values = [np.arange(np.prod(shape), dtype=np.int32).reshape(shape) for shape in shapes] * 2
    encoded = pa.array(
        [bytes(codec.encode(field_of(np.int32, (None,) * value.ndim, codec), value)) for value in values]
    )
    column = codec.decode_column(field_of(np.int32, (None,), codec), encoded)
    assert column.dtype == object
    for decoded, value in zip(column, values, strict=True):
        np.testing.assert_array_equal(decoded, value)
        assert decoded.flags.writeable


@pytest.mark.parametrize("codec", NDARRAY_CODECS)
def test_a_null_is_none(codec: Any) -> None:
    column = codec.decode_column(
        field_of(np.int8, (2,), codec), stored(codec, [np.ones(2, np.int8), None], np.int8, (2,))
    )
    assert column[1] is None
    assert column[0].tolist() == [1, 1]


@pytest.mark.parametrize("codec", NDARRAY_CODECS)
def test_arrays_of_texts_and_in_fortran_order_come_back(codec: Any) -> None:
    texts = [np.array(["a", "bcd"]), np.array(["", "e"], "<U3")]
    column = codec.decode_column(field_of(np.str_, (2,), codec), stored(codec, texts, np.str_, (2,)))
    assert column.tolist() == [["a", "bcd"], ["", "e"]]
    fortran = [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(6.0).reshape(2, 3)]
    column = codec.decode_column(field_of(np.float64, (2, 3), codec), stored(codec, fortran, np.float64, (2, 3)))
    np.testing.assert_array_equal(column, np.stack(fortran))


def test_compressed_bytes_of_other_writers_are_read_too() -> None:
    plain, several = io.BytesIO(), io.BytesIO()
    np.savez(plain, arr=np.arange(3))
    np.savez_compressed(several, other=np.zeros(2), arr=np.arange(3))
    column = CompressedNdarrayCodec().decode_column(None, pa.array([plain.getvalue(), several.getvalue()]))
    assert column.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("codec", NDARRAY_CODECS)
def test_python_objects_are_neither_stored_nor_unpickled(codec: Any) -> None:
    with pytest.raises(ValueError, match="Python objects"):
        codec.encode(field_of(np.object_, (1,), codec), np.array([print], object))
    sink = io.BytesIO()
    save = np.save if isinstance(codec, NdarrayCodec) else lambda file, array: np.savez_compressed(file, arr=array)
    save(sink, np.array([print, print], object))
    for rows in ([sink.getvalue()], [sink.getvalue()] * 2, [sink.getvalue(), None]):
        with pytest.raises(ValueError, match=r"allow_pickle|unpickl"):
            codec.decode_column(None, pa.array(rows, pa.binary()))


@pytest.mark.parametrize("codec", NDARRAY_CODECS)
@pytest.mark.parametrize("raw", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\x76\x00{'descr'", b"PK\x03\x04", b"bogus" * 20])
def test_other_bytes_are_no_array(codec: Any, raw: bytes) -> None:
    for rows in ([raw], [raw, raw], [raw, None]):
        with pytest.raises(RuntimeError, match='Decoding field "x" failed'):
            decode_column(field_of(np.int8, (None,), codec), pa.array(rows, pa.binary()))


@pytest.mark.parametrize("codec", NDARRAY_CODECS)
@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.zeros((2, 3), np.float64), "Unexpected type of x feature"),
        (np.zeros((2, 4), np.float32), "Unexpected dimensions of x feature"),
        (np.zeros(2, np.float32), "Unexpected dimensions of x feature"),
        ([[1, 2, 3]], "Expected ndarray"),
    ],
)
def test_an_array_of_another_dtype_or_shape_is_refused(codec: Any, value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        codec.encode(field_of(np.float32, (None, 3), codec), value)


SCALARS = [
    (sql_types.ByteType, np.int8), (sql_types.ByteType, np.uint8), (sql_types.ShortType, np.int16),
    (sql_types.IntegerType, np.int32), (sql_types.LongType, np.int64),
]  # fmt: skip


@pytest.mark.parametrize(("spark_type", "numpy_dtype"), SCALARS)
def test_the_least_and_the_greatest_number_come_back(spark_type: Any, numpy_dtype: Any) -> None:
    codec = ScalarCodec(spark_type())
    field = field_of(numpy_dtype, (), codec)
    for value in (np.iinfo(numpy_dtype).min, np.iinfo(numpy_dtype).max):
        encoded = codec.encode(field, numpy_dtype(value))
        assert type(encoded) is int
        assert codec.decode(field, encoded) == value


@pytest.mark.parametrize(
    ("spark_type", "numpy_dtype", "value", "encoded"),
    [
        (sql_types.FloatType(), np.float32, np.float64(0.5), 0.5),
        (sql_types.DoubleType(), np.float64, np.array(0.5), 0.5),
        (sql_types.BooleanType(), np.bool_, np.True_, True),
        (sql_types.StringType(), np.str_, np.str_("a"), "a"),
        (sql_types.DecimalType(4, 3), Decimal, Decimal("1.234"), Decimal("1.234")),
        (NamedSparkType("LongType"), np.int64, np.int64(7), 7),
    ],
)
def test_a_scalar_is_stored_as_python_has_it(spark_type: Any, numpy_dtype: Any, value: Any, encoded: Any) -> None:
    codec = ScalarCodec(spark_type)
    field = field_of(numpy_dtype, (), codec)
    stored_value = codec.encode(field, value)
    assert type(stored_value) is type(encoded)
    assert stored_value == encoded
    assert codec.decode(field, stored_value) == value


@pytest.mark.parametrize("value", [[1.2], np.array([3.4]), (1,), b"a"])
def test_a_list_is_no_scalar(value: Any) -> None:
    with pytest.raises(TypeError, match="Expected a scalar as a value for field 'x'"):
        ScalarCodec(sql_types.FloatType()).encode(field_of(np.float32, (), None), value)


def test_a_scalar_field_has_no_shape_and_a_text_is_a_text() -> None:
    with pytest.raises(ValueError, match="must be an empty tuple"):
        ScalarCodec(sql_types.IntegerType()).encode(field_of(np.int32, (1,), None), np.int32(1))
    with pytest.raises(ValueError, match="Expected a string value for field x"):
        ScalarCodec(sql_types.StringType()).encode(field_of(np.str_, (), None), 5)


@pytest.mark.parametrize(
    "spark_type",
    [sql_types.LongType(), sql_types.DecimalType(10, 2), sql_types.VarcharType(7), sql_types.TimestampNTZType()],
)
def test_a_spark_type_is_the_same_after_its_name_alone_was_kept(spark_type: Any) -> None:
    name = pickle.loads(pickle.dumps(ScalarCodec(spark_type).spark_type))
    assert ScalarCodec(name).spark_dtype() == spark_type
    assert str(ScalarCodec(name)) == str(ScalarCodec(spark_type))


def test_an_array_of_sparks_is_named_by_what_it_holds() -> None:
    array = sql_types.ArrayType(sql_types.FloatType(), False)
    assert ScalarCodec(array).spark_type == NamedSparkType("ArrayType", (NamedSparkType("FloatType"), False))
    assert NamedSparkType.of(array).to_spark() == array


@pytest.mark.parametrize(
    "make",
    [
        lambda: NamedSparkType("StructType"),
        lambda: NamedSparkType("LongType", (1,)),
        lambda: NamedSparkType.of(sql_types.StructType([])),
        lambda: NamedSparkType.of(5),
    ],
)
def test_what_is_no_type_of_a_column_has_no_name(make: Any) -> None:
    with pytest.raises(ValueError, match=r"no type of a column|takes 0 arguments"):
        make()


def test_numbers_are_decoded_where_pyspark_cannot_be_imported() -> None:
    program = """
import sys
sys.modules["pyspark"] = None
import numpy as np, pyarrow as pa
from converter.petastorm.codecs import NamedSparkType, NdarrayCodec, ScalarCodec
from converter.petastorm.unischema import Unischema, UnischemaField, decode_column
from converter.petastorm.utils import decode_row
field = UnischemaField("x", np.int32, (), ScalarCodec(NamedSparkType("IntegerType")))
assert decode_column(field, pa.array([1, 2])).dtype == np.int32
assert decode_row({"x": 5}, Unischema("S", [field])) == {"x": 5}
assert field.codec.encode(field, np.int64(5)) == 5
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_codecs_say_how_they_are_made() -> None:
    codecs = [
        ScalarCodec(sql_types.FloatType()),
        NdarrayCodec(),
        CompressedNdarrayCodec(),
        CompressedImageCodec("png", 80),
    ]
    assert [str(codec) for codec in codecs] == [
        "ScalarCodec(FloatType())", "NdarrayCodec()", "CompressedNdarrayCodec()", "CompressedImageCodec('png', 80)"
    ]  # fmt: skip


@pytest.mark.parametrize("codec", [NdarrayCodec(), CompressedNdarrayCodec(), CompressedImageCodec()])
def test_bytes_are_sparks_binary(codec: Any) -> None:
    assert codec.spark_dtype() == sql_types.BinaryType()


def test_a_picture_comes_back_through_its_codec() -> None:
    codec = CompressedImageCodec("png")
    values = [np.full((4, 5, 3), number, np.uint16) for number in range(3)]
    field = field_of(np.uint16, (None, 5, 3), codec)
    np.testing.assert_array_equal(decode_column(field, stored(codec, values, np.uint16, field.shape)), np.stack(values))
    np.testing.assert_array_equal(codec.decode(field, codec.encode(field, values[2])), values[2])
    assert codec.image_codec == "png"
    assert CompressedImageCodec("jpeg", quality=33).quality == 33


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (np.zeros((4, 5), np.uint16), "Unexpected type of x feature"),
        (np.zeros((4, 6), np.uint8), "Unexpected dimensions of x feature"),
        (np.zeros((4, 5, 3), np.uint8), "Unexpected dimensions of x feature"),
        ([[1]], "expected ndarray"),
    ],
)
def test_a_picture_of_another_dtype_or_shape_is_refused(value: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CompressedImageCodec().encode(field_of(np.uint8, (4, 5), None), value)


class HalvesCodec(DataframeColumnCodec):
    """Stores numbers doubled."""

    def encode(self, unischema_field: Any, value: Any) -> Any:
        return value * 2

    def decode(self, unischema_field: Any, value: Any) -> Any:
        return np.float32(value / 2)


class ReversedNdarrayCodec(NdarrayCodec):
    """A codec of ours with a decode of the user's."""

    def decode(self, unischema_field: Any, value: Any) -> Any:
        return super().decode(unischema_field, value)[::-1]


class LooseCodec:
    """Derived from nothing."""

    def decode(self, unischema_field: Any, value: Any) -> Any:
        return value.decode()


def test_a_users_codec_decodes_a_column_value_by_value() -> None:
    column = decode_column(field_of(np.float32, (), HalvesCodec()), pa.array([1, 3]))
    assert column.dtype == np.float32
    assert column.tolist() == [0.5, 1.5]
    assert decode_column(field_of(np.float32, (), HalvesCodec()), pa.array([1, None])).tolist() == [0.5, None]


def test_the_decode_of_a_derived_codec_is_used_for_columns_too() -> None:
    codec = ReversedNdarrayCodec()
    column = decode_column(field_of(np.int8, (2,), codec), stored(codec, [np.array([1, 2], np.int8)], np.int8, (2,)))
    assert column.tolist() == [[2, 1]]


def test_a_codec_need_not_be_derived_from_ours() -> None:
    assert decode_column(field_of(np.str_, (), LooseCodec()), pa.array([b"a", None])).tolist() == ["a", None]
