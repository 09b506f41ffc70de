"""Pickles of schemas and indexes are read as data, in every form that Petastorm wrote, and nothing in them runs."""

from __future__ import annotations

import decimal
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.petastorm.codecs import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    NamedSparkType,
    NdarrayCodec,
    ScalarCodec,
)
from converter.petastorm.etl.rowgroup_indexers import FieldNotNullIndexer, SingleFieldIndexer
from converter.petastorm.pickle_records import KNOWN_NAMES, OldText, PetastormMetadataError
from converter.petastorm.pickle_writing import write_pickle
from converter.petastorm.pickled_schema import (
    indexes_of_pickle,
    pickle_of_indexes,
    pickle_of_schema,
    schema_of_pickle,
)
from converter.petastorm.pickles import MAX_STEPS, read_pickle
from converter.petastorm.unischema import Unischema, UnischemaField
from tests.petastorm_pickles import FAKES, PROTOCOLS, dumps, fake_indexes, fake_schema

REAL_FORMS = [(protocol, in_python) for protocol in PROTOCOLS for in_python in (False, True)]

# What Petastorm 0.7 on Python 2 wrote where PySpark had been imported before: named tuples by PySpark's function.
PYTHON_2_WITH_PYSPARK = rb"""ccopy_reg
_reconstructor
p1
(cpetastorm.unischema
Unischema
p2
c__builtin__
object
p3
NtR(dp5
S'matrix'
p6
cpyspark.serializers
_restore
p7
(S'UnischemaField'
p8
(S'name'
S'numpy_dtype'
S'shape'
S'codec'
S'nullable'
tp14
(g6
cnumpy
unicode_
p15
(I32
L16L
tNI01
ttRp19
sS'_fields'
ccollections
OrderedDict
((l(lg6
ag19
aatRsS'_name'
S'Caf\xc3\xa9'
sb."""


def restored(made: bytes) -> list[tuple[Any, ...]]:
    """The fields that a pickle's schema has, with their codecs as texts."""
    return [(*field[:3], str(field.codec), field.nullable) for field in schema_of_pickle(made).fields.values()]


@pytest.mark.parametrize(("protocol", "in_python"), REAL_FORMS)
def test_a_schema_is_read_from_every_protocol(protocol: int, in_python: bool) -> None:
    schema = schema_of_pickle(dumps(fake_schema(), protocol, in_python=in_python))
    assert schema.__name__ == "Fake"
    assert [(*field[:3], str(field.codec), field.nullable) for field in schema.fields.values()] == [
        ("id", np.int64, (), "ScalarCodec(LongType())", False),
        ("name", np.str_, (), "None", True),
        ("flag", np.bool_, (), "None", True),
        ("price", decimal.Decimal, (), "ScalarCodec(DecimalType())", False),
        ("ragged", np.int32, (None,), "ScalarCodec(ArrayType())", True),
        ("photo", np.uint8, (None, 300, 3), "CompressedImageCodec('jpeg', 90)", False),
        ("matrix", np.float32, (2, 70_000), "NdarrayCodec()", False),
        ("small", np.dtype("<f2"), (), "CompressedNdarrayCodec()", False),
        ("at", np.datetime64, (), "ScalarCodec(TimestampType())", True),
        ("raw", bytes, (), "None", True),
    ]
    assert schema.price.codec.spark_type == NamedSparkType("DecimalType", (12, 3))
    assert schema.ragged.codec.spark_type == NamedSparkType("ArrayType", (NamedSparkType("IntegerType"), False))


@pytest.mark.parametrize(("protocol", "in_python"), REAL_FORMS)
def test_indexes_are_read_from_every_protocol(protocol: int, in_python: bool) -> None:
    indexes = indexes_of_pickle(dumps(fake_indexes(), protocol, in_python=in_python))
    days = {np.datetime64("2026-11-25"), np.datetime64("2026-11-25T12:00", "25us")}
    assert {name: set(index.indexed_values) for name, index in indexes.items()} == {
        "numbers": {3, 200, -7, 1 << 40},
        "texts": {"a", "bü", b"c\xff"},
        "reals": {2.5, 0.5},
        "exact": {decimal.Decimal("1.50")},
        "days": days,
        "flags": {True, False},
        "filled": {"Field is Not Null"},
    }
    assert indexes["numbers"].get_row_group_indexes(200) == {1, 300, 70_000}
    assert indexes["filled"].get_row_group_indexes(None) == {0, 5}
    assert isinstance(indexes["filled"], FieldNotNullIndexer)
    assert indexes["days"].column_names == ["days_column"]


def test_a_schema_of_python_2_is_read() -> None:
    assert restored(PYTHON_2_WITH_PYSPARK) == [("matrix", np.str_, (32, 16), "None", True)]
    assert schema_of_pickle(PYTHON_2_WITH_PYSPARK).__name__ == "Café"


@pytest.mark.parametrize(
    "package", ["dataset_toolkit", "av.ml.dataset_toolkit", "av.experimental.deepdrive.dataset_toolkit"]
)
def test_what_petastorm_was_called_before_is_known(package: str) -> None:
    made = dumps(fake_schema(), 2).replace(b"cpetastorm.", f"c{package}.".encode())
    assert package.encode() in made
    assert restored(made) == restored(dumps(fake_schema(), 2))


def test_fields_keep_the_order_in_which_they_are_stored() -> None:
    schema = Unischema("Order", [UnischemaField(name, np.int8, ()) for name in ("b", "c", "a")])
    assert list(schema_of_pickle(pickle_of_schema(schema)).fields) == ["b", "c", "a"]


def test_what_is_written_is_read_again_and_by_pythons_own_pickle() -> None:
    schema = schema_of_pickle(dumps(fake_schema(), 4))
    written = pickle_of_schema(schema)
    assert restored(written) == restored(dumps(fake_schema(), 4))
    names = {op.name for op, _, _ in pickletools.genops(written)}
    assert names <= {
        "PROTO", "GLOBAL", "LONG_BINPUT", "LONG_BINGET", "EMPTY_TUPLE", "NEWOBJ", "EMPTY_DICT", "MARK", "BINUNICODE",
        "REDUCE", "TUPLE", "NONE", "NEWFALSE", "NEWTRUE", "BININT", "BININT1", "SETITEMS", "BUILD", "STOP",
    }  # fmt: skip
    indexes = indexes_of_pickle(dumps(fake_indexes(), 4))
    again = indexes_of_pickle(pickle_of_indexes(list(indexes.values())))
    assert {name: contents(index) for name, index in again.items()} == {
        name: contents(index) for name, index in indexes.items()
    }


def contents(index: Any) -> dict[Any, set[int]]:
    return {value: index.get_row_group_indexes(value) for value in index.indexed_values}


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)


@given(plain)
def test_plain_values_are_read_as_python_pickles_them_and_written_as_it_reads_them(value: Any) -> None:
    for protocol in PROTOCOLS:
        assert read_pickle(pickle.dumps(value, protocol), "it")[0] == value
    assert pickle.loads(write_pickle(value)) == value


def test_texts_of_python_2_stay_bytes_until_it_is_known_what_they_are() -> None:
    for made in (b"S'a\\xff\\n\\\\\\''\n.", b"U\x05a\xff\n\\'.", b"T\x05\0\0\0a\xff\n\\'."):
        assert read_pickle(made, "it")[0] == OldText(b"a\xff\n\\'")


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "'os.system'"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "'builtins.eval'"),
        (b"c__builtin__\n__import__\n.", "'__builtin__.__import__'"),
        (b"\x80\x04\x8c\x08builtins\x8c\x07getattr\x93.", "'builtins.getattr'"),
        (b"cmy.package\nMyCodec\n.", "'my.package.MyCodec'"),
        (b"cpetastorm.codecs\nSomeCodec\n.", "'petastorm.codecs.SomeCodec'"),
        (b"cpetastorm.codecs\nnp.load\n.", "'petastorm.codecs.np.load'"),
        (b"(ios\nsystem\n.", "opcode INST"),
        (b"(cnumpy\nint8\no.", "opcode OBJ"),
        (b"P1\n.", "opcode PERSID"),
        (b"\x82\x01.", "opcode EXT1"),
        (b"\x80\x04)}\x92.", "opcode NEWOBJ_EX"),
        (b"\x80\x05\x96.", "opcode BYTEARRAY8"),
        (b"N2.", "opcode DUP"),
        (b"\xff.", "opcode 0xff"),
    ],
)
def test_what_is_not_known_is_named_and_not_run(made: bytes, named: str) -> None:
    with pytest.raises(PetastormMetadataError, match="Nothing in it was run") as caught:
        schema_of_pickle(made)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (b"", "cut off"),
        (b"N", "cut off"),
        (b"X\xff\xff\xff\x7fabc.", "cut off"),
        (b"S'abc", "cut off"),
        (b"Sabc\n.", "without quotes"),
        (b"X\x01\0\0\0\xff.", "no text|not utf-8"),
        (b"I1_0\n.", "whole number"),
        (b"Fx\n.", "number that is none"),
        (b"\x8b\xff\xff\xff\x7f.", "2,147,483,647 bytes"),
        (b"NN.", "2 values instead of one"),
        (b"(N.", "2 values|1 values"),
        (b"0", "opcode POP"),
        (b"t.", "mark that is not there"),
        (b"(\x85.", "value that is not there"),
        (b"Na.", "value that is not there"),
        (b"}Na.", "appends to a record of dict"),
        (b"](Nu.", "key without a value"),
        (b"](NNu.", "adds to a list"),
        (b"g1\n.", "never had"),
        (b"gx\n.", "no number"),
        (b"\x80\x09N.", "protocol 9"),
        (b"N)R.", "calls a NoneType"),
        (b"Nnb.".replace(b"n", b"N"), "gives a state"),
        (b"NN\x93.", "no texts"),
        (b"c_codecs\nencode\n(Vx\nVutf8\ntR.", "bytes that are none"),
        (b"ccopyreg\n_reconstructor\n(NNNtR.", "no class"),
        (b"cpyspark.serializers\n_restore\n(VPoint\n)(K\x01ttR.", "no UnischemaField"),
        (b"(" * 2_000 + b".", "too deeply"),
        (b"]" * 200_000 + b".", "too deeply"),
        (b"N\x85" * MAX_STEPS + b".", "too deeply|more than"),
    ],
)
def test_what_is_no_pickle_says_why(made: bytes, cause: str) -> None:
    with pytest.raises(PetastormMetadataError, match=cause):
        read_pickle(made, "the schema")


def test_the_steps_of_a_pickle_are_bounded() -> None:
    with pytest.raises(PetastormMetadataError, match="more than 10 opcodes"):
        read_pickle(b"N\x85" + b"\x85" * 20 + b".", "it", max_steps=10)


FIELD = FAKES.field("a", np.int8, (), None, False)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: 5, "a int stands where a Unischema"),
        (FAKES.unischema, "NoneType stands where a dictionary"),
        (lambda: FAKES.unischema(_name="x"), "NoneType stands where a dictionary"),
        (lambda: FAKES.unischema(_name=3, _fields={"a": FIELD}), "a int stands where a text"),
        (lambda: FAKES.unischema(_name="x", _fields={"a": 5}), "a int stands where a UnischemaField"),
        (lambda: FAKES.unischema(_name="x", _fields={"a": FIELD, "b": FIELD}), "two of its fields have one name"),
        (lambda: _with(name=5), "a int stands where a text"),
        (lambda: _with(numpy_dtype=5), "values are of a int"),
        (lambda: _with(numpy_dtype=set), "values are of the name builtins.set"),
        (lambda: _with(numpy_dtype=np.dtype(object)), "no dtype 'O8'"),
        (lambda: _with(numpy_dtype=np.dtype([("x", "i4")])), "no dtype"),
        (lambda: _with(shape=7), "shape is a int"),
        (lambda: _with(shape=(-1,)), "size that is no number"),
        (lambda: _with(shape=(True,)), "size that is no number"),
        (lambda: _with(shape=(1,) * 65), "shape is a tuple"),
        (lambda: _with(nullable="yes"), "nullable by a str"),
        (lambda: _with(codec=5), "codec is a int"),
        (lambda: _with(codec=FAKES.codecs["NdarrayCodec"]), "codec is the name"),
        (lambda: _with(codec=FAKES.spark_types["IntegerType"]()), "codec is a record of IntegerType"),
        (lambda: _with(codec=FAKES.codecs["ScalarCodec"](_spark_type=None)), "Spark type is a NoneType"),
        (lambda: _with(codec=FAKES.codecs["CompressedImageCodec"](_image_codec=".png", _quality=1000)), "quality"),
        (lambda: _with(codec=_decimal_of("many")), "DecimalType has no sizes"),
    ],
)
def test_a_schema_that_is_none_says_why(make: Callable[[], Any], cause: str) -> None:
    with pytest.raises(PetastormMetadataError, match=cause):
        schema_of_pickle(dumps(make(), 2))


def _with(**changed: Any) -> Any:
    return FAKES.unischema(_name="x", _fields={"a": FIELD._replace(**changed)})


def _decimal_of(precision: Any) -> Any:
    return FAKES.codecs["ScalarCodec"](_spark_type=FAKES.spark_types["DecimalType"](precision=precision, scale=0))


def _index(**changed: Any) -> Any:
    state = {"_index_name": "n", "_column_name": "c", "_index_data": {"v": {1}}} | changed
    return {"n": FAKES.indexers["SingleFieldIndexer"](**state)}


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (list, "a list stands where a dictionary"),
        (lambda: {"n": 5}, "an index is a int"),
        (lambda: _index(_index_name=5), "a int stands where a text"),
        (lambda: _index(_index_data=[]), "a list stands where a dictionary"),
        (lambda: _index(_index_data={"v": [1]}), "numbers of row groups are a list"),
        (lambda: _index(_index_data={"v": {-1}}), "no number"),
        (lambda: _index(_index_data={"v": {"1"}}), "no number"),
        (lambda: _index(_index_data={(1, 2): {1}}), "a value is a tuple"),
        (lambda: _index(_index_data={None: {1}}), "a value is a NoneType"),
    ],
)
def test_an_index_that_is_none_says_why(make: Callable[[], Any], cause: str) -> None:
    with pytest.raises(PetastormMetadataError, match=cause):
        indexes_of_pickle(dumps(make(), 4))


def test_a_value_whose_bytes_are_no_text_is_refused() -> None:
    made = dumps(_index(_index_data={np.str_("a"): {1}}), 4)
    with pytest.raises(PetastormMetadataError, match="text that is none"):
        indexes_of_pickle(made.replace(b"a\0\0\0", b"\xff\xff\xff\xff"))


def test_one_set_that_many_values_refer_to_is_not_copied_for_each() -> None:
    shared = set(range(5_000))
    with pytest.raises(PetastormMetadataError, match="again and again"):
        indexes_of_pickle(dumps(_index(_index_data=dict.fromkeys(range(5_000), shared)), 4))


def test_there_are_some_sixty_names_and_none_of_them_does_anything() -> None:
    assert sum(map(len, KNOWN_NAMES.values())) < 85
    harmful = {"eval", "exec", "compile", "getattr", "open", "__import__", "load", "loads", "system", "_reconstruct"}
    assert not harmful & {name for names in KNOWN_NAMES.values() for name in names}
    assert {name for names in KNOWN_NAMES.values() for name in names if name.startswith("_")} == {
        "_reconstructor", "__newobj__", "_restore"
    }  # fmt: skip


def test_types_of_other_bytes_order_are_read() -> None:
    schema = schema_of_pickle(dumps(_with(numpy_dtype=np.dtype(">i4")), 2))
    assert schema.a.numpy_dtype == np.dtype(">i4")


@pytest.mark.parametrize(
    "codec",
    [
        None,
        NdarrayCodec(),
        CompressedNdarrayCodec(),
        CompressedImageCodec("jpeg", 70),
        ScalarCodec(NamedSparkType("VarcharType", (7,))),
    ],
)
def test_a_codec_is_written_and_read_again(codec: Any) -> None:
    schema = Unischema("One", [UnischemaField("x", np.uint8, (None, 2), codec, True)])
    again = schema_of_pickle(pickle_of_schema(schema))
    assert str(again) == str(schema)
    assert again.fields == schema.fields


def test_what_petastorm_does_not_know_is_not_written() -> None:
    with pytest.raises(ValueError, match="no values of"):
        pickle_of_schema(Unischema("One", [UnischemaField("x", dict, ())]))
    indexer = SingleFieldIndexer("a", "a")
    indexer.add_row_groups((1, 2), [0])
    with pytest.raises(ValueError, match="tuple cannot be stored"):
        pickle_of_indexes([indexer])
