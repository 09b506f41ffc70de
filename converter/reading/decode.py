"""Arrow → NumPy: types, nulls, stacks; pure functions on one window's columns.

A column is decoded without a copy where Arrow's memory already is what NumPy
wants, and copied exactly once: gathered, in the order of the plan, into memory
that belongs to the caller from then on. No Python loop runs over rows.

Strings, bytes and rows of varying length stay Arrow arrays until a batch is cut
from them: Arrow gathers them outside the GIL, and objects are made for the rows
of one batch only.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter import memory
from converter.errors import NullValueError, SourceError
from converter.portable import tasks
from converter.schema import Field

Array = npt.NDArray[Any]
Nulls = Literal["raise", "mask"] | Mapping[str, Any]
Ragged = Literal["raise", "pad", "nested"]

# What is transposed at once when columns become rows: 2.5 MB of floats, and as much for where each goes.
_DECIMAL_BITS = 128
_EXACT_NUMBER, _EXACT_POWER = 2**53, 22
"""Whole numbers, and powers of ten, up to these are doubles."""

_BLOCK_NUMBERS = 640_000
_FEW = 4

WIDE_BYTES = 256
_WIDE_STEP_BYTES = 120_000
"""Below 128 kB malloc keeps memory. TensorFlow makes it forget all larger pieces at once, in the whole process: at
256 kB a step 1.6 M rows of 2 kB a second instead of 3.1."""

_POOLED_BYTES = 1 << 16
_JULIAN_DAY_OF_1970 = 2_440_588
_FIRST_GREGORIAN_DAY = -141_427
"""1582-10-15, in days since 1970."""

_UNSIGNED = {1: pa.uint8(), 2: pa.uint16(), 4: pa.uint32(), 8: pa.uint64()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Scalar columns that arrive as one `(rows, k)` array."""

    name: str
    columns: tuple[str, ...]
    dtype: str


@dataclass(slots=True, kw_only=True)
class Decoded:
    """One column of one row group: numbers of shape `(rows, *shape)`, or an Arrow array; and where it is not null."""

    values: Array | pa.Array
    valid: npt.NDArray[np.bool_] | None
    """Which rows are not null; None where all of them are not."""

    element_valid: npt.NDArray[np.bool_] | None = None
    """Which elements are not null: `(rows, *shape)`, or of ragged rows one after the other. None where none is."""

    row_sizes: npt.NDArray[np.int64] | None = None
    """Of ragged rows with null elements how many elements each has."""

    def rows_with_null_elements(self) -> npt.NDArray[np.bool_] | None:
        """For each row that is not null whether an element of it is; None where there is no such element."""
        if self.element_valid is None:
            return None
        if self.row_sizes is None:
            found = ~self.element_valid.reshape(len(self.values), -1).all(axis=1)
        else:
            owner = np.repeat(np.arange(len(self.row_sizes)), self.row_sizes)
            found = np.bincount(owner[~self.element_valid], minlength=len(self.row_sizes)) > 0
        return np.asarray(found if self.valid is None else found & self.valid)

    def element_mask(self, field: Field) -> Array | pa.Array:
        """Where elements are not null, like the values: `(rows, *shape)`, or of ragged rows an Arrow array."""
        if field.shape is None:
            rows = ragged_values(self.values, field)
            is_there = np.ones(len(rows.values), np.bool_) if self.element_valid is None else self.element_valid
            return replace(rows, values=is_there).to_arrow(is_jagged=field.is_jagged)
        if self.element_valid is not None:
            return self.element_valid
        whole = new_array((len(self.values), *field.shape), np.bool_)
        whole[...] = True if self.valid is None else self.valid.reshape(-1, *(1,) * len(field.shape))
        return whole


def decode(
    column: pa.ChunkedArray, field: Field, *, fill: Any, stored: pa.Field | None = None, is_foreign: bool = False
) -> Decoded:
    """A row group's column as numbers (or, for objects and ragged rows, as Arrow), nulls replaced by `fill`.

    The numbers may be a read-only view of Arrow's memory. `stored` is how the file itself describes the column. Where
    somebody else wrote it, bytes are the numbers alone, unless the file notes otherwise.
    """
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    array = _typed(array, field)
    noted = (stored.metadata if stored is not None else None) or {}
    dtype = noted.get(tasks.DTYPE_METADATA.encode(), field.dtype.encode()).decode()
    if dtype != field.dtype:
        raise pa.ArrowInvalid(f"column {field.name!r} holds numbers of {dtype} where {field.dtype} was expected")
    valid = None if not array.null_count else np.asarray(pc.is_valid(array))
    if field.is_object:
        return Decoded(values=_decode_objects(array, field, fill), valid=valid)
    if field.shape is None:
        if _is_list(array.type):
            return _decode_ragged_lists(array, field, fill, valid)
        return Decoded(values=_decode_ragged_bytes(array, field, stored), valid=valid)
    if _is_list(array.type) and (element_valid := _valid_elements(array, field)) is not None:
        values = np.zeros((len(array), *field.shape), field.stored_dtype)
        values[element_valid] = _flat_numbers(_flat_list(array, field).drop_null(), field)
        np.copyto(values, np.asarray(fill, values.dtype), where=~element_valid)
        return Decoded(values=values, valid=valid, element_valid=element_valid)
    is_raw = is_foreign and tasks.DTYPE_METADATA.encode() not in noted
    values = _numbers(array, field, is_raw=is_raw)
    if valid is not None:
        values = values.copy() if not values.flags.writeable else values
        values[~valid] = fill
    return Decoded(values=values, valid=valid)


def _typed(array: pa.Array, field: Field) -> pa.Array:
    """The array; lists without any value, for which pandas has a type of their own, as lists of numbers.

    Raises:
        pyarrow.ArrowInvalid: it holds values of another kind than the field's: Arrow would cast text to numbers.
    """
    types, kind = pa.types, array.type
    inner, depth = kind, 0
    while _is_list(inner):
        inner, depth = inner.value_type, depth + 1
    if depth and types.is_null(inner) and not field.is_object:
        empty = pa.from_numpy_dtype(field.stored_dtype)
        for _ in range(max(depth, field.ndim)):
            empty = pa.list_(empty)
        return pc.cast(array, empty)
    is_bytes = (
        types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )  # fmt: skip
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    if field.dtype.startswith("datetime64"):
        is_right = types.is_date32(inner) or (field.dtype == "datetime64[us]" and types.is_timestamp(inner))
    elif field.dtype == "bool":
        is_right = types.is_boolean(inner)
    else:
        is_right = types.is_integer(inner) or types.is_floating(inner) or types.is_decimal(inner)
    if field.is_object:
        is_right = (is_bytes or is_text) and field.shape == ()
    elif field.ndim and not is_bytes:
        # One list of all numbers is given its shape by whoever declared it.
        is_right = is_right and depth in ({1, field.ndim} if field.shape is not None else {field.ndim})
    elif field.ndim:
        is_right = True
    else:
        is_right = is_right and not depth
    if not is_right:
        shape = (
            "" if field.shape == () else " of rows that differ" if field.shape is None else f" of shape {field.shape}"
        )
        raise pa.ArrowInvalid(f"column {field.name!r} holds {kind} where {field.dtype}{shape} was expected")
    return array


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _decode_objects(array: pa.Array, field: Field, fill: Any) -> pa.Array:
    empty: Any = "" if field.dtype == "str" else b""
    # One type for all files of a window, whatever their writers took.
    array = pc.cast(array, pa.large_string() if field.dtype == "str" else pa.large_binary())
    if field.dtype == "str":
        _check_text(array, field)
    return array if not array.null_count else pc.fill_null(array, fill or empty)


def _check_text(array: pa.Array, field: Field) -> None:
    """Raise ArrowInvalid where text is no UTF-8: later, when strings are made of it, its file is no longer known."""
    if not len(array):
        return
    _, offsets, data = array.buffers()
    start, stop = np.frombuffer(offsets, np.int64, len(array) + 1, array.offset * 8)[[0, -1]].tolist()
    if data is None or not 0 <= start < stop <= data.size:
        is_ascii = start == stop
    else:
        raw = np.frombuffer(data, np.uint8, stop - start, start)
        whole = raw[: len(raw) // 8 * 8].view(np.uint64)
        # Of ASCII alone every cut is text, and most text is: a tenth of the time that it takes to look at each.
        highest = int(np.bitwise_or.reduce(whole)) if len(whole) else 0
        is_ascii = not highest & 0x8080808080808080 and not (raw[len(whole) * 8 :] & 0x80).any()
    if not is_ascii:
        try:
            array.validate(full=True)
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(f"column {field.name!r} has text that is no UTF-8 ({error})") from error


def _decode_ragged_bytes(array: pa.Array, field: Field, stored: pa.Field | None) -> pa.Array:
    if pa.types.is_fixed_size_binary(array.type) and field.ragged_ndim > 1:
        array = _with_shapes(array, field, stored)
    # Files whose rows agreed are stored with a fixed width; beside others they are rows like any.
    array = pc.cast(array, pa.large_binary())
    array = array if not array.null_count else pc.fill_null(array, b"")
    # When batches are cut from them, their file is no longer known.
    _find_rows(array, field)
    return array


def _decode_ragged_lists(array: pa.Array, field: Field, fill: Any, valid: npt.NDArray[np.bool_] | None) -> Decoded:
    """Lists that differ in length as Arrow's large lists (`is_jagged`), or as bytes, which are gathered faster."""
    level, lengths = array, []
    for depth in range(field.ragged_ndim):
        if depth and level.null_count:
            raise NullValueError(
                f"Column {field.name!r} has arrays whose inner arrays are null, which have no length. Replace them "
                "with Spark and convert the DataFrame, or leave the column out with columns=….",
                column=field.name,
            )
        sizes = pc.list_value_length(level)
        sizes = pc.fill_null(sizes, 0) if sizes.null_count else sizes
        lengths.append(np.asarray(sizes).astype(np.int64))
        level = level.flatten()
    element_valid = None
    if level.null_count:
        element_valid = np.asarray(pc.is_valid(level))
        values = np.full(len(level), fill, field.stored_dtype)
        values[element_valid] = _flat_numbers(level.drop_null(), field)
    else:
        values = _flat_numbers(level, field)
    rows = RaggedRows.of_lists(values, lengths)
    if field.ragged_ndim > 1 and not field.is_jagged and not rows.is_block.all():
        raise SourceError(
            f"Column {field.name!r} has a row whose inner lists differ in length, where none was counted.",
            column=field.name,
        )
    return Decoded(
        values=rows.to_arrow(is_jagged=field.is_jagged),
        valid=valid,
        element_valid=element_valid,
        row_sizes=None if element_valid is None else np.diff(rows.offsets),
    )


def _with_shapes(array: pa.Array, field: Field, stored: pa.Field | None) -> pa.Array:
    """Rows of one file that all have the shape which the file names, as rows that say their own."""
    said = (stored.metadata or {}).get(tasks.SHAPE_METADATA.encode()) if stored is not None else None
    shape = tuple(json.loads(said)) if said is not None else ()
    present = array.drop_null() if array.null_count else array
    row_numbers = int(np.prod(shape))
    if len(shape) != field.ragged_ndim or row_numbers * field.stored_dtype.itemsize != array.type.byte_width:
        raise pa.ArrowInvalid(f"column {field.name!r} has rows whose shape the file does not say")
    valid = None if not array.null_count else np.asarray(pc.is_valid(array))
    values = _fixed_width_bytes(present).view(field.stored_dtype.newbyteorder("<"))
    sizes = np.full(len(array), row_numbers) if valid is None else valid * row_numbers
    encoded = {"values": values, "sizes": sizes, "valid": valid, "shape": shape, "shapes": None}
    return tasks.as_binary(encoded, fixed=None)


def _fixed_width_bytes(array: pa.Array) -> Array:
    width = array.type.byte_width
    return np.frombuffer(array.buffers()[1], np.uint8, count=len(array) * width, offset=array.offset * width)


def _numbers(array: pa.Array, field: Field, *, is_raw: bool) -> Array:
    """The numbers of an Arrow array without a copy, whatever stands in the places of nulls."""
    shape = field.shape or ()
    if pa.types.is_fixed_size_binary(array.type):
        if array.type.byte_width != math.prod(shape) * field.stored_dtype.itemsize:
            raise pa.ArrowInvalid(f"column {field.name!r} has rows of another shape than {shape}")
        raw = _fixed_width_bytes(array)
        rows: Array = raw.view(field.stored_dtype.newbyteorder("<")).reshape(len(array), *shape)
        return rows
    if shape:
        return _variable_rows(array, field, is_raw=is_raw)
    if pa.types.is_boolean(array.type):
        return np.asarray(pc.cast(pc.fill_null(array, False), pa.uint8())).view(np.bool_)
    stored = field.stored_dtype
    array = _cast(array, field)
    if not len(array):
        return np.empty(0, stored)
    numbers: Array = np.frombuffer(array.buffers()[1], stored, len(array), array.offset * stored.itemsize)
    return numbers


def _cast(array: pa.Array, field: Field) -> pa.Array:
    """The array in the type that the field's dtype has; a no-op for what this package wrote."""
    wanted = pa.from_numpy_dtype(field.stored_dtype)
    if array.type == wanted:
        return array
    if pa.types.is_decimal(array.type):
        array = _doubles_of(array)
    if pa.types.is_timestamp(array.type) and array.type.unit == "ns":
        # Arrow's own cast rounds times before 1970 up.
        return pa.array(np.frombuffer(array.buffers()[1], np.int64, len(array), array.offset * 8) // 1000)
    if field.dtype == "datetime64[us]" and pa.types.is_date32(array.type):
        # Days of before the column was widened.
        array = pc.cast(array, pa.timestamp("us"))
    if field.dtype == "datetime64[us]" and pa.types.is_timestamp(array.type) and array.type.unit != "us":
        try:
            array = pc.cast(array, pa.timestamp("us", array.type.tz))
        except pa.ArrowInvalid as error:
            raise SourceError(
                f"Column {field.name!r} has times that microseconds cannot count ({error}). Leave it out with "
                "columns=…, or replace them with Spark, and convert the DataFrame.",
                column=field.name,
            ) from error
    if pa.types.is_temporal(array.type):
        return array.view(wanted)
    return pc.cast(signed(array, field.name), wanted, safe=False)


def signed(array: Any, name: str) -> Any:
    """Unsigned numbers of 64 bits as int64; any other column as it is.

    Raises:
        SourceError: a number is larger than int64 holds.
    """
    if not pa.types.is_uint64(array.type):
        return array
    most = pc.max(array).as_py() or 0
    if most >= 1 << 63:
        raise SourceError(
            f"Column {name!r} has the unsigned number {most}, which int64 cannot hold (at most {(1 << 63) - 1}). Leave "
            "the column out with columns=…, or make a string, a double or a decimal of it.",
            column=name,
        )
    return pc.cast(array, pa.int64())


def _doubles_of(array: pa.Array) -> pa.Array:
    """The doubles nearest to decimals, as Spark takes them; Arrow's own cast often takes the one beside it."""
    kind = array.type
    if kind.bit_width > _DECIMAL_BITS or not 0 <= kind.scale <= _EXACT_POWER:
        return pc.cast(pc.cast(array, pa.string()), pa.float64())
    array = pc.cast(array, pa.decimal128(kind.precision, kind.scale))
    halves = np.frombuffer(array.buffers()[1], np.int64)[2 * array.offset : 2 * (array.offset + len(array))]
    lower, upper = halves[::2], halves[1::2]
    # A whole number that a double holds, by a power of ten that is one: the division rounds, and nothing else does.
    doubles = lower / 10.0**kind.scale
    is_exact = (upper == lower >> 63) & (np.abs(lower) <= _EXACT_NUMBER)
    if not is_exact.all():
        rest = array.filter(pa.array(~is_exact))
        doubles[~is_exact] = pc.fill_null(pc.cast(pc.cast(rest, pa.string()), pa.float64()), 0)
    return pa.array(doubles)


def gregorian_days(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Dates that were counted by the Julian calendar before 1582-10-15, as Spark once did, by the one of today.

    The same year, month and day; a 29th of February that today's calendar does not have is the day behind. By E. G.
    Richards, "Calendars" (2012), in the Explanatory Supplement to the Astronomical Almanac.
    """
    chunks = []
    for chunk in column.chunks:
        days = np.asarray(pc.fill_null(chunk.view(pa.int32()), 0)).astype(np.int64)
        four_times = 4 * (days + _JULIAN_DAY_OF_1970 + 32082) + 3
        of_year = four_times % 1461 // 4
        month = (5 * of_year + 2) // 153
        day = of_year - (153 * month + 2) // 5
        months = 12 * (four_times // 1461 - 4800 - 1970) + month + 2
        rebased = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64) + day
        numbers = np.where(days < _FIRST_GREGORIAN_DAY, rebased, days).astype(np.int32)
        chunks.append(pa.array(numbers, mask=np.asarray(pc.is_null(chunk))).view(pa.date32()))
    return pa.chunked_array(chunks, pa.date32())


def floor_times(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Times of nanoseconds as the microseconds that they arrive as, nulls kept; any other column as it is."""
    if not pa.types.is_timestamp(column.type) or column.type.unit != "ns":
        return column
    kind = pa.timestamp("us", column.type.tz)
    # Arrow's own cast refuses to round.
    numbers = [np.asarray(pc.fill_null(chunk.view(pa.int64()), 0)) // 1000 for chunk in column.chunks]
    masks = [np.asarray(pc.is_null(chunk)) for chunk in column.chunks]
    floored = [pa.array(one, mask=mask).view(kind) for one, mask in zip(numbers, masks, strict=True)]
    return pa.chunked_array(floored, kind)


def _flat_numbers(array: pa.Array, field: Field) -> Array:
    """The numbers of a flat array in the field's dtype."""
    if pa.types.is_boolean(array.type):
        return np.asarray(pc.cast(array, pa.uint8())).view(np.bool_)
    numbers: Array = np.asarray(_cast(array, field).to_numpy(zero_copy_only=False))
    return numbers


def _variable_rows(array: pa.Array, field: Field, *, is_raw: bool) -> Array:
    """Rows of one shape that are stored as BINARY or lists; a null row takes its place as zeros."""
    shape = field.shape or ()
    row_numbers = int(np.prod(shape))
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type) or pa.types.is_binary_view(array.type):
        packed = pc.cast(array, pa.large_binary())
        present = _rows_of_bytes(packed.drop_null() if array.null_count else packed, field, is_raw=is_raw)
    else:
        present = _flat_numbers(_flat_list(array, field), field)
    num_present = len(array) - array.null_count
    if present.size != num_present * row_numbers:
        raise pa.ArrowInvalid(f"column {field.name!r} has rows of another shape than {shape}")
    tensors: Array = present.reshape(num_present, *shape)
    if not array.null_count:
        return tensors
    whole: Array = np.zeros((len(array), *shape), field.stored_dtype)
    whole[np.asarray(pc.is_valid(array))] = tensors
    return whole


def _rows_of_bytes(array: pa.Array, field: Field, *, is_raw: bool) -> Array:
    """The numbers of rows that all have the field's shape: their bytes alone, or behind what says the shape."""
    shape = field.shape or ()
    row_bytes = math.prod(shape) * field.stored_dtype.itemsize
    if is_raw:
        lengths = pc.min_max(pc.binary_length(array)).as_py()
        strange = {lengths["min"], lengths["max"]} - {None, row_bytes}
        if strange:
            raise SourceError(
                f"Column {field.name!r} has a row of {strange.pop()} bytes, where {field.dtype} of shape {shape} takes "
                f"{row_bytes}. Say another shape or dtype with shapes=…, or leave it out there and take its bytes.",
                column=field.name,
            )
        if not len(array) or not row_bytes:
            return np.empty(0, field.stored_dtype)
        _, offsets, data = array.buffers()
        start = int(np.frombuffer(offsets, np.int64, count=1, offset=array.offset * 8)[0])
        raw = np.frombuffer(data, np.uint8, count=len(array) * row_bytes, offset=start)
        return raw.view(field.stored_dtype.newbyteorder("<"))
    rows = ragged_values(array, field)
    if len(shape) > 1 and (rows.shapes != np.array(shape)).any():
        raise pa.ArrowInvalid(f"column {field.name!r} has rows of another shape than {shape}")
    return rows.values


def _flat_list(array: pa.Array, field: Field) -> pa.Array:
    """The numbers of lists that must all have the field's shape, without those of lists that are null."""
    level = array
    for size in _list_sizes(array.type, field):
        if pa.types.is_fixed_size_list(level.type):
            found = {level.type.list_size}
        else:
            lengths = pc.min_max(pc.list_value_length(level)).as_py()
            found = {lengths["min"], lengths["max"]} - {None}
        if found - {size}:
            raise SourceError(
                f"Column {field.name!r} has a row of {(found - {size}).pop()} values where {size} were expected. Say "
                f"shapes={{{field.name!r}: None}} where the converter is made: its rows then may differ.",
                column=field.name,
            )
        level = level.flatten()
    return level


def _list_sizes(kind: pa.DataType, field: Field) -> tuple[int, ...]:
    """How long the lists of each level must be."""
    shape = field.shape or ()
    # One list of all numbers is given its shape by whoever declared it.
    return shape if pa.types.is_nested(kind.value_type) else (math.prod(shape),)


def _valid_elements(array: pa.Array, field: Field) -> npt.NDArray[np.bool_] | None:
    """Which elements of lists of the field's shape are not null: `(rows, *shape)`; None where all are but null rows."""
    levels = [array]
    for _ in _list_sizes(array.type, field):
        levels.append(levels[-1].flatten())
    if not any(level.null_count for level in levels[1:]):
        return None
    _flat_list(array, field)
    present = np.ones(len(array), np.bool_)
    for level, size in zip(levels, (*_list_sizes(array.type, field), 1), strict=True):
        # What is within a list that is null is not there, and takes its place all the same.
        present[present] = np.asarray(pc.is_valid(level))
        present = np.repeat(present, size)
    return present.reshape(len(array), *(field.shape or ()))


def null_element_error(field: Field, *, is_masked: bool) -> NullValueError:
    """What to say of arrays with null elements that no policy covers."""
    said = ", which the footers that were read did not show" if is_masked else ", and nulls='raise'"
    or_mask = "" if is_masked else f"nulls='mask' (adds {field.name + '__element_valid'!r}) or "
    return NullValueError(
        f"Column {field.name!r} has arrays with null elements{said}. Replace them in Spark, leave the column out with "
        f"columns=…, or pass {or_mask}nulls={{{field.name!r}: 0}}.",
        column=field.name,
    )


def check_fill(field: Field, value: Any) -> Any:
    """The value that stands in for a null, in the field's own dtype.

    Raises:
        ValueError: it does not fit the column; the message names both.
    """
    wrong = ValueError(
        f"nulls: {value!r} cannot stand for a null of column {field.name!r}, whose dtype is {field.dtype} and shape "
        f"{'ragged' if field.shape is None else field.shape}."
    )
    if field.is_object:
        if not isinstance(value, str if field.dtype == "str" else bytes):
            raise wrong
        return value
    try:
        given = np.asarray(value)
        if field.dtype.startswith("datetime64"):
            if given.dtype.kind in "bfc":
                raise wrong
            cast = given.astype(field.dtype).astype(field.stored_dtype)
        else:
            cast = given.astype(field.stored_dtype)
            # As Python's numbers: NumPy's own comparison would wrap both sides alike.
            is_same = given.dtype.kind in "biuf" and bool((cast.astype(object) == given.astype(object)).all())
            if given.dtype.kind not in "biuf" or (field.stored_dtype.kind != "f" and not is_same):
                raise wrong
        # Of rows that differ in shape one number for each null element.
        np.broadcast_to(cast, field.shape or ())
    except (OverflowError, TypeError, ValueError) as error:
        raise wrong from error
    return cast


def has_fill(nulls: Nulls, field: Field) -> bool:
    """Whether a policy says what stands for a null row: of rows that differ in shape no number can."""
    return fills_elements(nulls, field) and (field.shape is not None or field.is_object)


def fills_elements(nulls: Nulls, field: Field) -> bool:
    """Whether a policy says what stands for a null element."""
    return not isinstance(nulls, str) and field.name in nulls


def null_error(field: Field, *, count: int | None = None, nulls: Nulls = "raise") -> NullValueError:
    """What to say of null rows that no policy covers."""
    name, found = field.name, "nulls" if count is None else f"{count} null{'s' if count > 1 else ''}"
    fill: Any = {"str": "", "bytes": b""}.get(field.dtype, "1970-01-01" if field.dtype.startswith("datetime64") else 0)
    or_fill = "" if field.shape is None else f" or nulls={{{name!r}: {fill!r}}}"
    why = (
        "for which no number can stand, as its rows differ in length"
        if fills_elements(nulls, field)
        else "and nulls='raise'"
    )
    return NullValueError(
        f"Column {name!r} holds {found}, {why}. Fill or drop them in Spark, leave the column out with "
        f"columns=…, or say nulls='mask' (adds {name + '__valid'!r}){or_fill}.",
        column=name,
    )


def gather(parts: Sequence[Array | pa.Array], rows: npt.NDArray[np.integer[Any]] | slice) -> Array | pa.Array:
    """The wanted rows of a window, whose row groups' columns are `parts`, in memory of their own."""
    if isinstance(parts[0], pa.Array):
        together = pa.chunked_array(parts)
        if isinstance(rows, slice):
            taken = together.slice(rows.start, rows.stop - rows.start)
        else:
            taken = together.take(pa.array(rows))
            if taken.num_chunks == 1:
                return taken.chunk(0)
        # Combining copies, so that no batch holds on to the row groups it was cut from.
        return pa.concat_arrays(taken.chunks) if taken.num_chunks else pa.array([], together.type)
    shape, dtype = parts[0].shape[1:], parts[0].dtype
    if isinstance(rows, slice):
        return np.concatenate(_slices(parts, rows), out=new_array((rows.stop - rows.start, *shape), dtype))
    if len(parts) > 1 and dtype.itemsize * int(np.prod(shape)) >= WIDE_BYTES:
        return _gather_wide(parts, rows)
    # Into memory that is let go of at once, and so is warm the next time: a column of it stays in the cache.
    return _take(joined(parts), rows)


def joined(parts: Sequence[Array]) -> Array:
    """Parts of a column, one after the other, in one array."""
    if len(parts) == 1:
        return parts[0]
    num_rows = sum(map(len, parts))
    return np.concatenate(parts, out=new_array((num_rows, *parts[0].shape[1:]), parts[0].dtype))


def _take(values: Array, rows: npt.NDArray[np.integer[Any]]) -> Array:
    """The wanted rows, which must be within bounds: nobody checks that again.

    Arrow gathers numbers at half of NumPy's cost: 0.42 against 0.83 ns for each of 290,000 floats, 1.1 against 2.1 for
    longs; rows of 160 bytes at 21.3 against 22.6.
    """
    num_bytes = values.dtype.itemsize * math.prod(values.shape[1:])
    if not num_bytes or not len(rows):
        return np.empty((len(rows), *values.shape[1:]), values.dtype)
    if not values.flags.aligned:
        # A view of a mapped file; Arrow expects numbers in their places.
        values = np.concatenate([values], out=new_array(values.shape, values.dtype))
    kind = _UNSIGNED.get(num_bytes) or pa.binary(num_bytes)
    column = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
    taken = pc.take(column, pa.array(rows), boundscheck=False)
    found: Array = np.frombuffer(taken.buffers()[1], values.dtype, count=len(rows) * math.prod(values.shape[1:]))
    return found.reshape(len(rows), *values.shape[1:])


def new_array(shape: tuple[int, ...], dtype: Any) -> Array:
    """An array without content, of the caller's own.

    Large ones are of `memory.blocks`. Others are of Arrow's pool where that is mimalloc (its default): memory that one
    window let go of comes back to the next one still mapped. NumPy's large arrays are mapped anew each time, and the
    first touch of each page costs more than the copy: 275 against 145 ms for a million rows of 2 kB gathered into one,
    176 against 92 for a plain copy.
    """
    dtype = np.dtype(dtype)
    num_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if num_bytes >= memory.LARGE_BYTES and memory.IS_SUPPORTED:
        return memory.blocks.new_array(shape, dtype)
    if num_bytes < _POOLED_BYTES or pa.default_memory_pool().backend_name != "mimalloc":
        return np.empty(shape, dtype)
    return np.frombuffer(pa.allocate_buffer(num_bytes), dtype).reshape(shape)


def _gather_wide(parts: Sequence[Array], rows: npt.NDArray[np.integer[Any]]) -> Array:
    """Copy rows of many bytes from where they lie, in any of several arrays, each once.

    Put together first they would be copied twice (317 against 210 ms for a million rows of 2 kB). NumPy gathers from
    one array only, so all parts are seen as one: rows that begin at every byte from the lowest part's first one up to
    the highest part's last one. Only rows of the parts are ever taken from it, by addresses that are computed here.
    """
    wanted = new_array((len(rows), *parts[0].shape[1:]), parts[0].dtype)
    num_bytes = wanted.dtype.itemsize * math.prod(wanted.shape[1:])
    parts = [part for part in parts if len(part)]
    bases = [part.ctypes.data for part in parts]
    ends = [base + len(part) * num_bytes for base, part in zip(bases, parts, strict=True)]
    lowest = min(zip(bases, range(len(parts)), strict=True))[1]
    places = np.concatenate([base - bases[lowest] + np.arange(len(part)) * num_bytes
                             for base, part in zip(bases, parts, strict=True)])  # fmt: skip
    first = parts[lowest][:1].reshape(-1).view(np.uint8)
    span = max(ends) - bases[lowest] - num_bytes + 1
    # As bytes, of which NumPy gathers without the GIL.
    everywhere = np.lib.stride_tricks.as_strided(first, shape=(span, num_bytes), strides=(1, 1), writeable=False)
    target, taken = wanted.reshape(-1).view(np.uint8).reshape(len(rows), num_bytes), places[rows]
    # In steps that stay in the cache: indexing makes a copy of its own.
    step = max(1, _WIDE_STEP_BYTES // num_bytes)
    for start in range(0, len(rows), step):
        stop = start + step
        target[start:stop] = everywhere[taken[start:stop]]
    return wanted


def gather_stack(
    groups: Iterable[Sequence[Array]],
    num_rows: int,
    rows: npt.NDArray[np.integer[Any]] | slice,
    num_columns: int,
    dtype: str,
) -> Array:
    """Scalar columns as rows: `groups` has for each row group its columns, of `num_rows` rows in all.

    The result is `(rows, num_columns)`. The window is transposed block by block, then whole rows are gathered: a row
    is one run of memory, so one miss of the cache serves all columns.

    To transpose is to gather as well, always in the same order: 0.53 ns for each of 40 columns' numbers, and one long
    call without the GIL, where writing column by column into rows takes 0.84, and 1.1 with another thread beside it.
    """
    wanted = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    if wanted * _FEW < num_rows:
        # The first batches of an epoch should not wait for all of a window.
        groups = [[gather(parts, rows) for parts in zip(*groups, strict=True)]]
        num_rows, rows = wanted, slice(0, wanted)
    window = new_array((num_rows, num_columns), dtype)
    # Odd, or the columns' numbers of a row would fall into few lines of the cache.
    block_rows = (_BLOCK_NUMBERS // num_columns) | 1
    block, order = new_array((num_columns, block_rows), dtype), _row_order(num_columns, block_rows)
    numbers = pa.Array.from_buffers(_UNSIGNED[window.itemsize], block.size, [None, pa.py_buffer(block)])
    offset = 0
    for columns in groups:
        for start in range(0, len(columns[0]), block_rows):
            num = min(block_rows, len(columns[0]) - start)
            for row, column in zip(block, columns, strict=True):
                row[:num] = column[start : start + num]
            taken = pc.take(numbers, order.slice(0, num * num_columns), boundscheck=False)
            transposed = np.frombuffer(taken.buffers()[1], dtype, count=num * num_columns)
            window[offset : offset + num] = transposed.reshape(num, num_columns)
            offset += num
    if isinstance(rows, slice):
        return window if wanted == num_rows else window[rows].copy()
    return _take(window, rows)


@functools.lru_cache(maxsize=4)
def _row_order(num_columns: int, num_rows: int) -> pa.Array:
    """Where the numbers of rows lie in columns of so many rows, row after row."""
    rows, columns = np.arange(num_rows, dtype=np.int32), np.arange(num_columns, dtype=np.int32)
    return pa.array((rows[:, None] + columns * np.int32(num_rows)).reshape(-1))


def _slices(parts: Sequence[Array], rows: slice) -> list[Array]:
    """The stretches of `parts`, one after the other, that make up `rows` of their concatenation."""
    found, offset = [], 0
    for part in parts:
        start, stop = max(rows.start - offset, 0), min(rows.stop - offset, len(part))
        if start < stop:
            found.append(part[start:stop])
        offset += len(part)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedRows:
    """Rows that differ in shape."""

    values: Array
    """All numbers, row after row."""

    offsets: npt.NDArray[np.int64]
    """Where each row's numbers begin, and where the last one's end."""

    shapes: npt.NDArray[np.int64]
    """Each row's shape: `(rows, ndim)`; zeros for a null row. Of lists that differ in length the longest counts."""

    lengths: tuple[npt.NDArray[np.int64], ...] | None = None
    """How long the lists of each level are, of all rows one after the other; None where each row is one block."""

    @classmethod
    def of_lists(cls, values: Array, lengths: Sequence[npt.NDArray[np.int64]]) -> RaggedRows:
        """Rows of nested lists, by the lengths of the lists on each level."""
        num_rows, counts = len(lengths[0]), np.ones(len(lengths[0]), np.int64)
        shapes = np.zeros((num_rows, len(lengths)), np.int64)
        for axis, sizes in enumerate(lengths):
            ends = np.cumsum(counts)
            starts, filled = ends - counts, counts > 0
            if len(sizes):
                shapes[filled, axis] = np.maximum.reduceat(sizes, starts[filled])
            total = _offsets_of(sizes)
            counts = total[ends] - total[starts]
        return cls(values=values, offsets=_offsets_of(counts), shapes=shapes, lengths=tuple(lengths))

    @property
    def is_block(self) -> npt.NDArray[np.bool_]:
        """For each row whether all of its lists of one level have one length, so that it is an array."""
        found: npt.NDArray[np.bool_] = np.diff(self.offsets) == self.shapes.prod(axis=1)
        return found

    def level_lengths(self) -> list[npt.NDArray[np.int64]]:
        """How long the lists of each level are, of all rows one after the other."""
        if self.lengths is not None:
            return list(self.lengths)
        found, repeats = [], np.ones(len(self.shapes), np.int64)
        for sizes in self.shapes.T:
            # A row's size along the axis, as often as the row has such parts.
            found.append(np.repeat(sizes, repeats))
            repeats = repeats * sizes
        return found

    def to_arrow(self, *, is_jagged: bool) -> pa.Array:
        """The rows as they wait to be gathered; `ragged_values` is the inverse."""
        if is_jagged:
            found = pa.array(self.values.view(np.uint8) if self.values.dtype == np.bool_ else self.values)
            for sizes in reversed(self.level_lengths()):
                found = pa.LargeListArray.from_arrays(pa.array(_offsets_of(sizes)), found)
            return found
        sizes = np.diff(self.offsets)
        has_shapes = self.shapes.shape[1] > 1
        values = np.ascontiguousarray(self.values, self.values.dtype.newbyteorder("<"))
        encoded = {"values": values, "sizes": sizes, "valid": None, "shape": None}
        packed = tasks.as_binary(encoded | {"shapes": self.shapes if has_shapes else None}, fixed=None)
        return pc.cast(packed, pa.large_binary())

    def pad(self) -> tuple[Array, npt.NDArray[np.int64]]:
        """The rows as `(rows, *longest)`, zeros where a row has no number; and their sizes.

        Sizes are `(rows,)` where rows have one dimension, else `(rows, ndim)`.

        >>> rows = RaggedRows(values=np.array([1, 2, 3]), offsets=np.array([0, 1, 3]), shapes=np.array([[1], [2]]))
        >>> rows.pad()[0].tolist()
        [[1, 0], [2, 3]]
        """
        num_rows, ndim = self.shapes.shape
        longest = self._longest()
        padded = np.zeros((num_rows, *longest), self.values.dtype)
        if ndim == 1:
            padded[np.arange(longest[0]) < self.shapes] = self.values
            return padded, self.shapes[:, 0]
        if self.lengths is not None:
            padded.reshape(-1)[self._places(ndim)] = self.values
            return padded, self.shapes
        owner = np.repeat(np.arange(num_rows), np.diff(self.offsets))
        left = np.arange(len(owner)) - self.offsets[:-1][owner]
        place, stride = np.zeros(len(owner), np.int64), 1
        for axis in range(ndim - 1, -1, -1):
            left, index = np.divmod(left, self.shapes[:, axis][owner])
            place += index * stride
            stride *= longest[axis]
        padded.reshape(num_rows, stride)[owner, place] = self.values
        return padded, self.shapes

    def pad_inner_lengths(self) -> npt.NDArray[np.int64]:
        """How many numbers each innermost list has: `(rows, *longest[:-1])`, zeros where a row has no list.

        >>> rows = RaggedRows.of_lists(np.array([1, 2, 3]), [np.array([2, 0]), np.array([1, 2])])
        >>> rows.pad()[0].tolist(), rows.pad_inner_lengths().tolist()
        ([[[1, 0], [2, 3]], [[0, 0], [0, 0]]], [[1, 2], [0, 0]])
        """
        num_rows, ndim = self.shapes.shape
        padded = np.zeros((num_rows, *self._longest()[:-1]), np.int64)
        padded.reshape(-1)[self._places(ndim - 1)] = self.level_lengths()[-1]
        return padded

    def _longest(self) -> list[int]:
        num_rows, ndim = self.shapes.shape
        found: list[int] = self.shapes.max(axis=0).tolist() if num_rows else [0] * ndim
        return found

    def _places(self, depth: int) -> npt.NDArray[np.int64]:
        """Where the parts that are so many levels deep stand among the padded ones."""
        places = np.arange(len(self.shapes))
        for sizes, longest in zip(self.level_lengths()[:depth], self._longest(), strict=False):
            within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
            places = np.repeat(places * longest, sizes) + within
        return places

    def split(self) -> npt.NDArray[np.object_]:
        """Each row as an array of its own shape; where its inner lists differ, as an object array of arrays."""
        rows = _objects(self.values, self.offsets)
        if self.shapes.shape[1] == 1:
            return rows
        is_block = self.is_block
        if not is_block.all():
            parts = self.values
            for sizes in reversed(self.level_lengths()):
                parts = _objects(parts, _offsets_of(sizes))
            rows[~is_block] = parts[~is_block]
        for index in np.flatnonzero(is_block).tolist():
            rows[index] = rows[index].reshape(self.shapes[index])
        return rows


def _offsets_of(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


def _objects(values: Array, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.object_]:
    """The stretches of an array, as objects."""
    found = np.empty(len(offsets) - 1, object)
    if len(found):
        found[:] = np.split(values, offsets[1:-1])
    return found


def ragged_values(array: pa.Array, field: Field) -> RaggedRows:
    """Rows that differ in shape, from lists, or from bytes: numbers, and before those of several dimensions the shape.

    Raises:
        ValueError: the bytes are not what their writer would have written.
    """
    if pa.types.is_large_list(array.type):
        return _values_of_lists(array, field)
    offsets, shapes, places, raw = _find_rows(array, field)
    values = raw.view(field.stored_dtype.newbyteorder("<"))
    if places is None:
        return RaggedRows(values=values.astype(field.stored_dtype), offsets=offsets, shapes=shapes)
    is_number = np.ones(len(values), bool)
    is_number[places] = False
    return RaggedRows(
        values=values[is_number].astype(field.stored_dtype, copy=False),
        offsets=_offsets_of(shapes.prod(axis=1)),
        shapes=shapes,
    )


def _values_of_lists(array: pa.Array, field: Field) -> RaggedRows:
    level, lengths = array, []
    for _ in range(field.ndim):
        sizes = pc.list_value_length(level)
        lengths.append(np.asarray(pc.fill_null(sizes, 0) if sizes.null_count else sizes).astype(np.int64))
        level = level.flatten()
    numbers = np.asarray(level.to_numpy(zero_copy_only=False))
    values = numbers.view(np.bool_).copy() if field.dtype == "bool" else numbers.astype(field.stored_dtype)
    return RaggedRows.of_lists(values, lengths)


def _find_rows(
    array: pa.Array, field: Field
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64] | None, Array]:
    """Where the numbers of rows that are bytes begin, their shapes, where what says the shapes stands, and all bytes.

    Raises:
        ValueError: they are not what their writer would have written.
    """
    wrong = ValueError(f"column {field.name!r} has rows whose shape contradicts their length")
    stored = field.stored_dtype.newbyteorder("<")
    _, offsets_buffer, data = array.buffers()
    edges = np.frombuffer(offsets_buffer, np.int64, count=len(array) + 1, offset=array.offset * 8)
    num_bytes = int(edges[-1] - edges[0])
    raw = np.frombuffer(data, np.uint8, count=num_bytes, offset=int(edges[0])) if num_bytes else np.empty(0, np.uint8)
    offsets, rest = np.divmod(edges - edges[0], stored.itemsize)
    if rest.any():
        raise wrong
    sizes = np.diff(offsets)
    if field.ndim == 1:
        return offsets, sizes.reshape(-1, 1), None, raw
    header = tasks.header_bytes(field.ndim) // stored.itemsize
    present = np.flatnonzero(sizes)
    if (sizes[present] < header).any():
        raise wrong
    places = offsets[:-1][present][:, None] + np.arange(header)
    shapes = np.zeros((len(array), field.ndim), np.int64)
    if len(present):
        shapes[present] = np.ascontiguousarray(raw.view(stored)[places]).view("<i4")[:, : field.ndim]
    headers = np.zeros(len(array), np.int64)
    headers[present] = header
    if (shapes < 0).any() or (shapes.prod(axis=1) + headers != sizes).any():
        raise wrong
    return offsets, shapes, places, raw
