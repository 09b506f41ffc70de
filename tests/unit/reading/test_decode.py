"""Arrow becomes NumPy: every dtype in every way it is stored, nulls replaced."""

from __future__ import annotations

import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from converter.reading.decode import decode
from converter.reading.ragged import ragged_values
from converter.schema import Field
from tests.columns import TENSORS, Column
from tests.unit.reading.forms import IDS, NUMBERS, OBJECTS, as_stored, assert_same, chunked, nullable, stored

# Decoding


@pytest.mark.parametrize("form", ["whole", "offset", "chunks"])
@pytest.mark.parametrize("column", NUMBERS, ids=lambda column: column.dtype)
def test_single_numbers_are_decoded(column: Column, form: str) -> None:
    decoded = decode(chunked(column.arrow(IDS), form), column.field, fill=0)
    assert decoded.valid is None
    assert_same(decoded.values, as_stored(column.values(IDS)))


@pytest.mark.parametrize("form", ["whole", "offset", "chunks"])
@pytest.mark.parametrize("fill", [0, 1])
@pytest.mark.parametrize("column", NUMBERS[1:], ids=lambda column: column.dtype)
def test_nulls_of_single_numbers_are_filled_and_told(column: Column, form: str, fill: int) -> None:
    known = nullable(column)
    array = known.arrow(IDS)
    before = array.to_pylist()
    decoded = decode(chunked(array, form), known.field, fill=fill)
    assert_same(decoded.valid, known.valid(IDS))
    assert_same(decoded.values, as_stored(known.values(IDS, fill=fill)))
    assert array.to_pylist() == before


@pytest.mark.parametrize("form", ["whole", "offset", "chunks"])
@pytest.mark.parametrize("way", ["fixed", "binary", "large", "list"])
@pytest.mark.parametrize("column", TENSORS, ids=lambda column: column.name)
def test_tensors_are_decoded_from_every_way_to_store_them(column: Column, way: str, form: str) -> None:
    decoded = decode(chunked(stored(column, way), form), column.field, fill=0)
    assert decoded.valid is None
    assert_same(decoded.values, column.values(IDS))


@pytest.mark.parametrize("form", ["whole", "offset", "chunks"])
@pytest.mark.parametrize("way", ["fixed", "binary", "large", "list"])
@pytest.mark.parametrize("column", TENSORS, ids=lambda column: column.name)
def test_null_tensors_are_filled_in_every_way_to_store_them(column: Column, way: str, form: str) -> None:
    known = nullable(column)
    fill = np.arange(np.prod(column.shape)).reshape(column.shape).astype(column.dtype)
    array = stored(known, way)
    before = array.to_pylist()
    decoded = decode(chunked(array, form), known.field, fill=fill)
    assert_same(decoded.valid, known.valid(IDS))
    assert_same(decoded.values, known.values(IDS, fill=fill))
    assert array.to_pylist() == before


def test_nested_lists_are_decoded() -> None:
    column = TENSORS[2]
    assert column.shape == (2, 3)
    assert_same(decode(chunked(column.arrow(IDS), "offset"), column.field, fill=0).values, column.values(IDS))


@pytest.mark.parametrize("form", ["whole", "offset", "chunks"])
@pytest.mark.parametrize("column", OBJECTS, ids=lambda column: column.dtype)
def test_texts_and_bytes_stay_arrow_and_nulls_are_filled(column: Column, form: str) -> None:
    known = nullable(column)
    fill = "none" if column.dtype == "str" else b"none"
    for value, expected in ((0, known.values(IDS)), (fill, known.values(IDS, fill=fill))):
        decoded = decode(chunked(known.arrow(IDS), form), known.field, fill=value)
        assert_same(decoded.valid, known.valid(IDS))
        assert decoded.values.to_pylist() == expected


@pytest.mark.parametrize("form", ["whole", "offset", "chunks"])
@pytest.mark.parametrize("way", ["binary", "large", "list"])
@pytest.mark.parametrize("is_nullable", [False, True])
@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "float64"])
def test_rows_of_different_lengths_are_decoded(dtype: str, way: str, form: str, is_nullable: bool) -> None:
    column = Column(name="words", dtype=dtype, shape=None, nullable=is_nullable)
    decoded = decode(chunked(stored(column, way), form), column.field, fill=0)
    found = ragged_values(decoded.values, column.field)
    rows = column.values(IDS)
    assert_same(found.values, np.concatenate(rows).astype(column.dtype))
    assert_same(found.offsets, np.cumsum([0, *map(len, rows)]))
    if is_nullable:
        assert_same(decoded.valid, column.valid(IDS))


def test_a_file_of_one_width_is_read_beside_ragged_ones() -> None:
    field = Field(name="x", dtype="int16", shape=None)
    fixed = pa.array([np.arange(3, dtype="<i2").tobytes(), None], pa.binary(6))
    decoded = decode(pa.chunked_array([fixed]), field, fill=0)
    found = ragged_values(decoded.values, field)
    assert (found.values.tolist(), found.offsets.tolist()) == ([0, 1, 2], [0, 3, 3])


def test_a_file_whose_rows_have_another_shape_than_the_schema_is_not_believed() -> None:
    field = Field(name="x", dtype="int16", shape=(2,))
    array = pa.array([np.arange(3, dtype="<i2").tobytes()])
    with pytest.raises(pa.ArrowInvalid, match=r"column 'x' has rows of another shape than \(2,\)"):
        decode(pa.chunked_array([array]), field, fill=0)


def test_numbers_without_nulls_are_not_copied() -> None:
    numbers = pa.array(np.arange(5))
    decoded = decode(pa.chunked_array([numbers]), Field(name="x", dtype="int64"), fill=0)
    assert np.shares_memory(decoded.values, numbers.to_numpy())


def test_no_rows_are_decoded_to_no_rows() -> None:
    for column in (*NUMBERS, *TENSORS):
        array = stored(column, "fixed", []) if column.ndim else column.arrow([])
        decoded = decode(pa.chunked_array([array]), column.field, fill=0)
        assert decoded.values.shape == (0, *(column.shape or ()))


@pytest.mark.parametrize(
    ("kind", "digits", "scale"),
    [
        (kind, digits, scale)
        for kind, most in ((pa.decimal32, 9), (pa.decimal64, 18), (pa.decimal128, 38), (pa.decimal256, 76))
        for digits, scale in (
            (1, 1),
            (9, 2),
            (15, 15),
            (16, 3),
            (18, 4),
            (20, 3),
            (38, 0),
            (38, 10),
            (38, 38),
            (76, 20),
        )
        if digits <= most
    ],
)
def test_decimals_become_the_doubles_next_to_them(kind: Any, digits: int, scale: int) -> None:
    random = np.random.default_rng(digits)
    lengths = random.integers(1, digits + 1, 300)
    texts = ["".join(map(str, random.integers(0, 10, length))) for length in lengths]
    signs = random.choice(["", "-"], 300)
    values = [decimal.Decimal(f"{sign}{text}e-{scale}") for sign, text in zip(signs, texts, strict=True)]
    array = pa.array([*values[:200], None, *values[200:]], kind(digits, scale))
    field = Field(name="x", dtype="float64", shape=(), has_nulls=True)
    found = decode(pa.chunked_array([array.slice(3)]), field, fill=-1.0).values
    assert found.tolist() == [-1.0 if one is None else float(one) for one in [*values[3:200], None, *values[200:]]]
