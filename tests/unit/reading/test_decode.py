"""Arrow becomes NumPy: every dtype in every way it is stored, nulls replaced, rows gathered in the plan's order."""

from __future__ import annotations

import datetime as dt
import decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.errors import NullValueError
from converter.portable import tensors as portable_tensors
from converter.reading.decode import decode
from converter.reading.gather import gather, gather_stack
from converter.reading.nulls import check_fill, null_error
from converter.reading.ragged import ragged_values
from converter.schema import Field
from tests.properties import examples
from tests.unit.known_tables import RAGGED, SCALARS, TENSORS, Column

IDS = list(range(57))
NUMBERS = tuple(column for column in SCALARS if column.dtype not in ("str", "bytes"))
OBJECTS = tuple(column for column in SCALARS if column.dtype in ("str", "bytes"))


def chunked(array: pa.Array, form: str) -> pa.ChunkedArray:
    """The same rows as the reader may meet them: whole, cut out of a larger array, or in several pieces."""
    if form == "offset":
        around = pa.concat_arrays([array.slice(5, 3), array, array.slice(0, 2)])
        return pa.chunked_array([around.slice(3, len(array))])
    if form == "chunks":
        return pa.chunked_array([array.slice(0, 10), array.slice(10, 0), array.slice(10)])
    return pa.chunked_array([array])


def stored(column: Column, way: str, ids: list[int] = IDS) -> pa.Array:
    """A tensor column as it stands in a file: bytes of one width, bytes of any width, or lists."""
    if way == "list":
        # Spark's own writer knows lists of one level.
        return flat(column).arrow(ids)
    shape = column.shape or ()
    # Where the width is not said, a row of several dimensions says its shape: int32, filled up to eights of bytes.
    is_headed = way != "fixed" and len(shape) > 1
    header = np.array([*shape, *[0] * (len(shape) % 2)], "<i4").tobytes() if is_headed else b""
    pairs = zip(column.values(ids), column.valid(ids), strict=True)
    rows = [header + row.tobytes() if ok else None for row, ok in pairs]
    width = int(np.prod(column.shape)) * np.dtype(column.dtype).itemsize if way == "fixed" else -1
    kind = pa.large_binary() if way == "large" else pa.binary(width)
    return pa.array(rows, kind)


def flat(column: Column) -> Column:
    """The same values as a list of one level; the field keeps the shape."""

    class Flat(Column):
        @property
        def ndim(self) -> int:
            return 1

        def values(self, ids: Any, *, fill: Any = 0) -> Any:
            found = super().values(ids, fill=fill)
            return found if isinstance(found, list) else found.reshape(len(ids), -1)

    return Flat(name=column.name, dtype=column.dtype, shape=column.shape, nullable=column.nullable)


def nullable(column: Column) -> Column:
    return Column(name=column.name, dtype=column.dtype, shape=column.shape, nullable=True)


def as_stored(values: np.ndarray) -> np.ndarray:
    """Dates are int32 days, times int64 microseconds."""
    if values.dtype.kind == "M":
        return values.astype("int32" if values.dtype == "datetime64[D]" else "int64")
    return values


def assert_same(found: Any, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected, strict=True)


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


# Fill values


GOOD_FILLS: list[tuple[str, tuple[int, ...] | None, Any, Any]] = [
    ("int8", (), 127, 127),
    ("int8", (), 5.0, 5),
    ("int8", (), True, 1),
    ("int64", (), -(2**63), -(2**63)),
    ("bool", (), True, True),
    ("bool", (), 0, False),
    ("float32", (), 0.1, np.float32(0.1)),
    ("float32", (), float("nan"), np.float32("nan")),
    ("float32", (), 7, 7.0),
    ("float32", (2,), [1, 2], np.array([1, 2], "f4")),
    ("float32", (2, 3), 1, 1.0),
    ("float32", (2, 3), [1, 2, 3], np.array([1, 2, 3], "f4")),
    ("int32", (3,), np.arange(3), np.arange(3, dtype="i4")),
    ("datetime64[D]", (), dt.date(1970, 1, 3), 2),
    ("datetime64[D]", (), np.datetime64("1970-01-03"), 2),
    ("datetime64[us]", (), dt.datetime(1970, 1, 1, 0, 0, 2), 2_000_000),  # noqa: DTZ001
    ("str", (), "unknown", "unknown"),
    ("bytes", (), b"", b""),
]


@pytest.mark.parametrize(("dtype", "shape", "value", "expected"), GOOD_FILLS, ids=str)
def test_a_fill_that_fits_is_taken_in_the_columns_dtype(
    dtype: str, shape: tuple[int, ...] | None, value: Any, expected: Any
) -> None:
    field = Field(name="x", dtype=dtype, shape=shape)
    found = check_fill(field, value)
    np.testing.assert_array_equal(found, expected)
    if not field.is_object:
        assert found.dtype == field.stored_dtype


BAD_FILLS: list[tuple[str, tuple[int, ...] | None, Any]] = [
    ("int8", (), 128),
    ("int8", (), 0.5),
    ("int8", (), float("nan")),
    ("int8", (), "5"),
    ("int8", (), None),
    ("int64", (), 2**63),
    ("bool", (), 2),
    ("float32", (), "0"),
    ("float32", (), 1j),
    ("float32", (), object()),
    ("float32", (2,), [1, 2, 3]),
    ("float32", (), [1, 2]),
    ("float32", (2,), [[1], [2]]),
    ("datetime64[D]", (), "yesterday"),
    ("datetime64[us]", (), 0.5),
    ("datetime64[D]", (), 1.5),
    ("str", (), 0),
    ("str", (), b"bytes"),
    ("str", (), None),
    ("bytes", (), "text"),
]


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Casting complex values to real:numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize(("dtype", "shape", "value"), BAD_FILLS)
def test_a_fill_that_does_not_fit_is_refused_by_name(dtype: str, shape: tuple[int, ...] | None, value: Any) -> None:
    with pytest.raises(ValueError, match=r"nulls: .* cannot stand for a null of column 'x', whose dtype is"):
        check_fill(Field(name="x", dtype=dtype, shape=shape), value)


def test_the_fill_of_a_ragged_column_is_one_number_for_its_null_elements() -> None:
    ragged = Field(name="x", dtype="int8", shape=None)
    assert check_fill(ragged, 3) == 3
    with pytest.raises(ValueError, match=r"nulls: \[1, 2\] cannot stand for a null of column 'x', whose dtype is int8"):
        check_fill(ragged, [1, 2])


X = Field(name="x", dtype="int32", shape=(), has_nulls=True)


def test_a_null_is_refused_with_what_to_do_about_it() -> None:
    with pytest.raises(NullValueError, match=r"'x' holds 3 nulls, .* nulls='mask' \(adds 'x__valid'\)") as raised:
        raise null_error(X, count=3)
    assert raised.value.column == "x"
    assert "holds 1 null," in str(null_error(X, count=1))
    assert "holds nulls," in str(null_error(X))


# Gathering


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[list[int]], Any]:
    """Row ids of several parts, and which of their rows are wanted: a slice, or a permutation of them or of a few."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
    stops = np.cumsum(sizes)
    parts = [list(range(stop - size, stop)) for size, stop in zip(sizes, stops.tolist(), strict=True)]
    total = sum(sizes)
    if draw(st.booleans()):
        start = draw(st.integers(0, total - 1))
        return parts, slice(start, draw(st.integers(start + 1, total)))
    rows = draw(st.permutations(range(total)))
    return parts, np.array(rows[: draw(st.integers(1, total))], np.int64)


def wanted(parts: list[list[int]], rows: Any) -> list[int]:
    return np.array([row for part in parts for row in part])[rows].tolist()


@given(windows(), st.sampled_from([*NUMBERS, *TENSORS]))
@examples(150)
def test_gathered_numbers_are_the_wanted_rows_in_memory_of_their_own(window: Any, column: Column) -> None:
    parts, rows = window
    values = [as_stored(column.values(part)) for part in parts]
    found = gather(values, rows)
    assert_same(found, as_stored(column.values(wanted(parts, rows))))
    assert found.flags.writeable
    assert not any(np.shares_memory(found, part) for part in values)


@given(windows(), st.sampled_from([*OBJECTS, RAGGED]))
@examples(100)
def test_gathered_objects_and_ragged_rows_are_the_wanted_ones(window: Any, column: Column) -> None:
    parts, rows = window
    if column is RAGGED:
        arrays = [
            decode(pa.chunked_array([stored(column, "binary", part)]), column.field, fill=0).values for part in parts
        ]
        found = ragged_values(gather(arrays, rows), column.field)
        expected = column.values(wanted(parts, rows))
        assert_same(found.values, np.concatenate(expected).astype(column.dtype))
        assert_same(np.diff(found.offsets), np.array([len(row) for row in expected]))
        return
    found = gather([column.arrow(part) for part in parts], rows)
    assert isinstance(found, pa.Array)
    assert found.to_pylist() == column.values(wanted(parts, rows))


@given(windows(), st.lists(st.sampled_from(NUMBERS[:8]), min_size=1, max_size=6), st.sampled_from(["f4", "f8"]))
@examples(100)
def test_a_gathered_stack_is_numpys_stack_of_the_wanted_rows(window: Any, columns: list[Column], dtype: str) -> None:
    parts, rows = window
    groups = [[column.values(part) for column in columns] for part in parts]
    found = gather_stack(iter(groups), sum(map(len, parts)), rows, len(columns), dtype)
    ids = wanted(parts, rows)
    assert_same(found, np.stack([column.values(ids).astype(dtype) for column in columns], axis=1))
    assert found.flags.writeable


def test_a_stack_larger_than_a_block_is_whole() -> None:
    columns = NUMBERS[2:5]
    parts = [list(range(9000)), list(range(9000, 9001)), list(range(9001, 20_000))]
    groups = [[column.values(part) for column in columns] for part in parts]
    rows = np.random.default_rng(0).permutation(20_000)
    expected = np.stack([column.values(range(20_000)).astype("f8") for column in columns], axis=1)
    assert_same(gather_stack(groups, 20_000, rows, len(columns), "f8"), expected[rows])
    assert_same(gather_stack(groups, 20_000, slice(0, 20_000), len(columns), "f8"), expected)
    assert_same(gather_stack(groups, 20_000, slice(8999, 9002), len(columns), "f8"), expected[8999:9002])


# Rows of different lengths


@given(st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=12), st.integers(0, 12), st.integers(0, 12))
@examples(100)
def test_padded_rows_are_the_rows_and_zeros_behind(rows: list[list[int]], start: int, stop: int) -> None:
    field = Field(name="x", dtype="int16", shape=None)
    array = pa.array([np.array(row, "<i2").tobytes() for row in rows], pa.large_binary())[start:stop]
    rows = rows[start:stop]
    padded, lengths = ragged_values(array, field).pad()
    longest = max(map(len, rows), default=0)
    assert padded.dtype == np.int16
    assert padded.shape == (len(rows), longest)
    assert padded.tolist() == [row + [0] * (longest - len(row)) for row in rows]
    assert lengths.tolist() == [len(row) for row in rows]


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, int, list[Any]]:
    """A dtype, a number of dimensions, and rows of any shapes, some null."""
    dtype, ndim = draw(st.sampled_from(["bool", "int8", "int16", "int32", "float64"])), draw(st.integers(1, 3))
    shapes = draw(st.lists(st.none() | st.tuples(*[st.integers(0, 3)] * ndim), max_size=8))
    rows: list[Any] = []
    for index, shape in enumerate(shapes):
        # An empty list has no inner ones: beyond a size of nothing there is nothing.
        sizes = None if shape is None else tuple(np.where(np.cumprod((1, *shape[:-1])) > 0, shape, 0).tolist())
        rows.append(None if sizes is None else (np.arange(np.prod(sizes)) + index).reshape(sizes).astype(dtype))
    return dtype, ndim, rows


def as_lists(rows: list[Any], dtype: str, ndim: int) -> pa.Array:
    kind = pa.from_numpy_dtype(np.dtype(dtype))
    for _ in range(ndim):
        kind = pa.list_(kind)
    return pa.array([None if row is None else row.tolist() for row in rows], kind)


@given(tensors(), st.sampled_from(["lists", "packed"]), st.integers(0, 3))
@examples(200)
def test_rows_of_different_shapes_come_back_as_they_were(case: Any, way: str, start: int) -> None:
    dtype, ndim, rows = case
    field = Field(name="x", dtype=dtype, shape=None, ragged_ndim=ndim)
    array = as_lists(rows, dtype, ndim)
    if way == "packed":
        encoded = portable_tensors.encode(array, {"kind": "tensor", "dtype": dtype, "ndim": ndim, "shape": None})
        array = portable_tensors.as_binary(encoded, fixed=None)
    decoded = decode(pa.chunked_array([array]), field, fill=0)
    found = ragged_values(decoded.values[start:], field)
    rows = rows[start:]
    for row, one in zip(found.split(), rows, strict=True):
        assert_same(row, np.zeros((0,) * ndim, dtype) if one is None else one)
    padded, sizes = found.pad()
    longest = np.max([np.zeros(ndim, int), *(row.shape for row in rows if row is not None)], axis=0)
    expected = np.zeros((len(rows), *longest.tolist()), dtype)
    for place, row in zip(expected, rows, strict=True):
        if row is not None:
            place[tuple(map(slice, row.shape))] = row
    assert_same(padded, expected)
    assert sizes.reshape(len(rows), ndim).tolist() == [[0] * ndim if row is None else list(row.shape) for row in rows]


@pytest.mark.parametrize("nulls", [False, True])
def test_a_file_of_one_shape_is_read_beside_others(nulls: bool) -> None:
    field = Field(name="x", dtype="int16", shape=None, ragged_ndim=2)
    rows = [np.arange(6, dtype="<i2").reshape(2, 3), np.arange(6, 12, dtype="<i2").reshape(2, 3)]
    packed = pa.array([row.tobytes() for row in rows] + [None] * nulls, pa.binary(12))
    said = pa.field("x", packed.type, metadata={portable_tensors.SHAPE_METADATA: "[2, 3]"})
    found = ragged_values(decode(pa.chunked_array([packed]), field, fill=0, stored=said).values, field)
    assert [row.tolist() for row in found.split()][:2] == [row.tolist() for row in rows]
    for wrong in (None, pa.field("x", packed.type), said.with_metadata({portable_tensors.SHAPE_METADATA: "[2, 2]"})):
        with pytest.raises(pa.ArrowInvalid, match="'x' has rows whose shape is not in its metadata"):
            decode(pa.chunked_array([packed]), field, fill=0, stored=wrong)


@pytest.mark.parametrize("header", [(-1, 3), (2, 2), (2**31 - 1, 2**31 - 1)])
def test_a_shape_that_contradicts_its_row_is_not_believed(header: tuple[int, int]) -> None:
    row = np.array(header, "<i4").tobytes() + np.arange(3, dtype="<i4").tobytes()
    with pytest.raises(ValueError, match="'x' has rows whose shape contradicts their length"):
        ragged_values(pa.array([row], pa.large_binary()), Field(name="x", dtype="int32", shape=None, ragged_ndim=2))


@pytest.mark.parametrize(
    ("ndim", "rows"), [(1, [b"1234", b"123456789012"]), (2, [b"12345678", b"1234"]), (2, [b"1234"])]
)
def test_rows_that_end_within_a_number_or_their_shape_are_not_believed(ndim: int, rows: list[bytes]) -> None:
    field = Field(name="x", dtype="int64", shape=None, ragged_ndim=ndim)
    with pytest.raises(ValueError, match="'x' has rows whose shape contradicts their length"):
        decode(pa.chunked_array([pa.array(rows, pa.binary())]), field, fill=0)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any),
    width=st.sampled_from([64, 65, 200]),
    dtype=st.sampled_from(["float32", "int64", "float64"]),
    data=st.data(),
)
def test_wide_rows_are_gathered_from_wherever_they_lie(
    sizes: list[int], width: int, dtype: str, data: st.DataObject
) -> None:
    generator = np.random.default_rng(0)
    parts: list[Any] = []
    for size in sizes:
        # Anywhere in memory, and at any byte: as in a mapped file.
        offset = data.draw(st.integers(0, 9))
        raw = generator.integers(0, 256, offset + size * width * np.dtype(dtype).itemsize, dtype=np.uint8)
        parts.append(raw[offset:].view(dtype).reshape(size, width))
    order = data.draw(st.permutations(range(len(parts))))
    parts = [parts[index] for index in order]
    whole = np.concatenate(parts)
    rows = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=300)), np.int64)
    found = gather(parts, rows)
    assert found.dtype == np.dtype(dtype)
    assert found.flags.writeable
    assert found.view(np.uint8).tobytes() == whole[rows].view(np.uint8).tobytes()
    assert not any(np.shares_memory(found, part) for part in parts)


DAY = "1970-01-01"


@pytest.mark.parametrize(
    ("dtype", "fill"),
    [("str", ""), ("bytes", b""), ("float32", 0), ("bool", 0), ("datetime64[D]", DAY), ("datetime64[us]", DAY)],
)  # fmt: skip
def test_what_is_said_of_nulls_can_be_done(dtype: str, fill: object) -> None:
    field = Field(name="x", dtype=dtype, shape=(), has_nulls=True)
    assert f"or nulls={{'x': {fill!r}}}." in str(null_error(field))
    check_fill(field, fill)


def test_rows_of_different_lengths_are_not_said_to_take_a_fill() -> None:
    field = Field(name="x", dtype="float32", shape=None, has_nulls=True, ragged_ndim=1)
    assert "nulls={" not in str(null_error(field))


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
