"""Arrow to NumPy: a column of a row group becomes numbers, its nulls are filled or masked, its lists become tensors.

Pure functions. Numbers are views of Arrow's memory where possible; `gather` copies them once. Strings, bytes and
ragged rows stay Arrow arrays until a batch is cut from them: Arrow gathers them outside the GIL.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.errors import SourceError
from converter.places import innermost, is_bytes_type, is_list
from converter.portable.tensors import DTYPE_METADATA, SHAPE_METADATA, as_binary
from converter.reading.gather import Array, new_array
from converter.reading.lists import flatten_lists, map_values
from converter.reading.objects import decode_lists, decode_text
from converter.reading.ragged import RaggedRows, find_rows, ragged_values, row_sizes
from converter.schema import Field

_DECIMAL_BITS = 128
_EXACT_NUMBER, _EXACT_POWER = 2**53, 22
"""Whole numbers and powers of ten up to these are exact as doubles."""


@dataclass(slots=True, kw_only=True)
class Decoded:
    """One column of one row group: numbers `(rows, *shape)` or an Arrow array, and where it is not null."""

    values: Array | pa.Array
    valid: npt.NDArray[np.bool_] | None
    """Which rows are not null; None if no row is null."""

    element_valid: npt.NDArray[np.bool_] | None = None
    """Which elements are not null: `(rows, *shape)`, or flat for ragged rows. None if no element is null."""

    row_sizes: npt.NDArray[np.int64] | None = None
    """How many elements each row has, for ragged rows with null elements."""

    def rows_with_null_elements(self) -> npt.NDArray[np.bool_] | None:
        """Which rows are not null but have a null element; None if there is no null element."""
        if self.element_valid is None:
            return None
        if self.row_sizes is None:
            has_null = ~self.element_valid.reshape(len(self.values), -1).all(axis=1)
        else:
            owner = np.repeat(np.arange(len(self.row_sizes)), self.row_sizes)
            has_null = np.bincount(owner[~self.element_valid], minlength=len(self.row_sizes)) > 0
        return np.asarray(has_null if self.valid is None else has_null & self.valid)

    def element_mask(self, field: Field) -> Array | pa.Array:
        """Where elements are not null: `(rows, *shape)`, or an Arrow array for ragged rows."""
        if field.shape is None:
            if field.is_object:
                level, lengths = flatten_lists(self.values, field)
                rows = RaggedRows.of_lists(np.ones(len(level), np.bool_), lengths)
            else:
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
    """A row group's column as numbers (as Arrow for objects and ragged rows), nulls replaced by `fill`.

    The numbers may be a read-only view of Arrow's memory. With `fill=None` nulls among objects stay. `stored` is the
    column's field in the file. In foreign files bytes hold the numbers alone, unless the field's metadata says
    otherwise.
    """
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if is_list(array.type) and pa.types.is_dictionary(innermost(array.type)):
        array = map_values(array, pa.DictionaryArray.dictionary_decode)
    array = _typed(array, field)
    metadata = (stored.metadata if stored is not None else None) or {}
    dtype = metadata.get(DTYPE_METADATA.encode(), field.dtype.encode()).decode()
    if dtype != field.dtype:
        raise pa.ArrowInvalid(f"column {field.name!r} holds numbers of {dtype}, expected {field.dtype}")
    valid = None if not array.null_count else np.asarray(pc.is_valid(array))
    if field.is_object and field.shape == ():
        return Decoded(values=decode_text(array, field, fill), valid=valid)
    if field.shape is None:
        if is_list(array.type):
            return _decode_ragged_lists(array, field, fill, valid)
        return Decoded(values=_decode_ragged_bytes(array, field, stored), valid=valid)
    if is_list(array.type) and (element_valid := _valid_elements(array, field)) is not None:
        values = np.zeros((len(array), *field.shape), field.stored_dtype)
        values[element_valid] = _flat_numbers(_flat_list(array, field).drop_null(), field)
        np.copyto(values, np.asarray(fill, values.dtype), where=~element_valid)
        return Decoded(values=values, valid=valid, element_valid=element_valid)
    is_raw = is_foreign and DTYPE_METADATA.encode() not in metadata
    values = _numbers(array, field, is_raw=is_raw)
    if valid is not None:
        values = values.copy() if not values.flags.writeable else values
        values[~valid] = fill
    return Decoded(values=values, valid=valid)


def _typed(array: pa.Array, field: Field) -> pa.Array:
    """The array, after a check of its type; lists of nulls alone, as pandas writes empty lists, as lists of numbers.

    Raises:
        pyarrow.ArrowInvalid: the values are of another kind than the field's. Arrow itself would cast text to numbers.
    """
    types, kind = pa.types, array.type
    inner, depth = kind, 0
    while is_list(inner):
        inner, depth = inner.value_type, depth + 1
    if depth and types.is_null(inner):
        empty = pa.string() if field.is_object else pa.from_numpy_dtype(field.stored_dtype)
        for _ in range(max(depth, field.ndim)):
            empty = pa.list_(empty)
        return pc.cast(array, empty)
    is_bytes = is_bytes_type(kind)
    if field.dtype.startswith("datetime64"):
        is_right = types.is_date32(inner) or (field.dtype == "datetime64[us]" and types.is_timestamp(inner))
    elif field.dtype == "bool":
        is_right = types.is_boolean(inner)
    else:
        is_right = types.is_integer(inner) or types.is_floating(inner) or types.is_decimal(inner)
    if field.is_object:
        label = inner.storage_type if isinstance(inner, pa.BaseExtensionType) else inner
        is_right = (is_bytes_type(label) or is_text(label)) and depth == field.ndim
    elif field.ndim and not is_bytes:
        # One list of all numbers gets the declared shape.
        is_right = is_right and depth in ({1, field.ndim} if field.shape is not None else {field.ndim})
    elif field.ndim:
        is_right = True
    else:
        is_right = is_right and not depth
    if not is_right:
        shape = (
            "" if field.shape == () else " of rows that differ" if field.shape is None else f" of shape {field.shape}"
        )
        raise pa.ArrowInvalid(f"column {field.name!r} holds {kind}, expected {field.dtype}{shape}")
    return array


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _decode_ragged_bytes(array: pa.Array, field: Field, stored: pa.Field | None) -> pa.Array:
    # Files whose rows all have one shape store them with a fixed width, and the shape in the metadata.
    has_one_shape = pa.types.is_fixed_size_binary(array.type) and field.ragged_ndim > 1
    rows = pc.cast(_with_shapes(array, field, stored) if has_one_shape else array, pa.large_binary())
    rows = pc.fill_null(rows, b"") if rows.null_count else rows
    # Checked here, because later the file is no longer known.
    find_rows(rows, field)
    return rows


def _decode_ragged_lists(array: pa.Array, field: Field, fill: Any, valid: npt.NDArray[np.bool_] | None) -> Decoded:
    """Ragged lists as Arrow's large lists (`is_jagged`), or as bytes, which are gathered faster."""
    level, lengths = flatten_lists(array, field)
    element_valid = None if not level.null_count else np.asarray(pc.is_valid(level))
    if field.is_object:
        rows_of_text = decode_lists(level, lengths, field, fill)
        sizes = None if element_valid is None else row_sizes(lengths)
        return Decoded(values=rows_of_text, valid=valid, element_valid=element_valid, row_sizes=sizes)
    if element_valid is not None:
        values = np.full(len(level), fill, field.stored_dtype)
        values[element_valid] = _flat_numbers(level.drop_null(), field)
    else:
        values = _flat_numbers(level, field)
    rows = RaggedRows.of_lists(values, lengths)
    if field.ragged_ndim > 1 and not field.is_jagged and not rows.is_block.all():
        raise SourceError(
            f"Column {field.name!r} has a row whose inner lists differ in length, which the file's footer excludes. "
            "Write the file again, or leave the column out with columns=….",
            column=field.name,
        )
    return Decoded(
        values=rows.to_arrow(is_jagged=field.is_jagged),
        valid=valid,
        element_valid=element_valid,
        row_sizes=None if element_valid is None else np.diff(rows.offsets),
    )


def _with_shapes(array: pa.Array, field: Field, stored: pa.Field | None) -> pa.Array:
    """Rows of the one shape that the file's metadata names, as bytes that each begin with their shape."""
    stored_shape = (stored.metadata or {}).get(SHAPE_METADATA.encode()) if stored is not None else None
    shape = tuple(json.loads(stored_shape)) if stored_shape is not None else ()
    present = array.drop_null() if array.null_count else array
    row_numbers = int(np.prod(shape))
    if len(shape) != field.ragged_ndim or row_numbers * field.stored_dtype.itemsize != array.type.byte_width:
        raise pa.ArrowInvalid(f"column {field.name!r} has rows whose shape is not in its metadata")
    valid = None if not array.null_count else np.asarray(pc.is_valid(array))
    values = _fixed_width_bytes(present).view(field.stored_dtype.newbyteorder("<"))
    sizes = np.full(len(array), row_numbers) if valid is None else valid * row_numbers
    encoded = {"values": values, "sizes": sizes, "valid": valid, "shape": shape, "shapes": None}
    return as_binary(encoded, fixed=None)


def _fixed_width_bytes(array: pa.Array) -> Array:
    width = array.type.byte_width
    return np.frombuffer(array.buffers()[1], np.uint8, count=len(array) * width, offset=array.offset * width)


def _numbers(array: pa.Array, field: Field, *, is_raw: bool) -> Array:
    """The numbers of an Arrow array without a copy; nulls are arbitrary numbers."""
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
    cast = _cast(array, field)
    if not len(cast):
        return np.empty(0, stored)
    numbers: Array = np.frombuffer(cast.buffers()[1], stored, len(cast), cast.offset * stored.itemsize)
    return numbers


def _cast(array: pa.Array, field: Field) -> pa.Array:
    """The array in the type of the field's dtype; a no-op for files of this package."""
    wanted = pa.from_numpy_dtype(field.stored_dtype)
    if array.type == wanted:
        return array
    if pa.types.is_decimal(array.type):
        return pc.cast(_doubles_of(array), wanted, safe=False)
    if pa.types.is_timestamp(array.type) and array.type.unit == "ns":
        # Arrow's own cast rounds times before 1970 up.
        return pa.array(np.frombuffer(array.buffers()[1], np.int64, len(array), array.offset * 8) // 1000)
    if field.dtype == "datetime64[us]" and pa.types.is_date32(array.type):
        # Files from before the column was widened from days to times.
        return pc.cast(array, pa.timestamp("us")).view(wanted)
    if field.dtype == "datetime64[us]" and pa.types.is_timestamp(array.type) and array.type.unit != "us":
        try:
            return pc.cast(array, pa.timestamp("us", array.type.tz)).view(wanted)
        except pa.ArrowInvalid as error:
            raise SourceError(
                f"Column {field.name!r} has times that microseconds cannot hold ({error}). Leave it out with "
                "columns=…, or replace them with Spark, and convert the DataFrame.",
                column=field.name,
            ) from error
    if pa.types.is_temporal(array.type):
        return array.view(wanted)
    return pc.cast(signed(array, field.name), wanted, safe=False)


def signed(array: Any, name: str) -> Any:
    """Unsigned numbers of 64 bits as int64; any other column unchanged.

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
    """The doubles nearest to decimals, as in Spark; Arrow's own cast is often off by one double."""
    kind = array.type
    if kind.bit_width > _DECIMAL_BITS or not 0 <= kind.scale <= _EXACT_POWER:
        return pc.cast(pc.cast(array, pa.string()), pa.float64())
    decimals = pc.cast(array, pa.decimal128(kind.precision, kind.scale))
    halves = np.frombuffer(decimals.buffers()[1], np.int64)[2 * decimals.offset : 2 * (decimals.offset + len(decimals))]
    lower, upper = halves[::2], halves[1::2]
    # Both the number and the power of ten are exact as doubles, so only the division rounds.
    doubles = lower / 10.0**kind.scale
    is_exact = (upper == lower >> 63) & (np.abs(lower) <= _EXACT_NUMBER)
    if not is_exact.all():
        rest = decimals.filter(pa.array(~is_exact))
        doubles[~is_exact] = pc.fill_null(pc.cast(pc.cast(rest, pa.string()), pa.float64()), 0)
    return pa.array(doubles)


def _flat_numbers(array: pa.Array, field: Field) -> Array:
    """The numbers of a flat array in the field's dtype."""
    if pa.types.is_boolean(array.type):
        return np.asarray(pc.cast(array, pa.uint8())).view(np.bool_)
    numbers: Array = np.asarray(_cast(array, field).to_numpy(zero_copy_only=False))
    return numbers


def _variable_rows(array: pa.Array, field: Field, *, is_raw: bool) -> Array:
    """Rows of one shape that are stored as BINARY or lists; null rows are zeros."""
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
    """The numbers of rows that must all have the field's shape; unless raw, bytes begin with their shape."""
    shape = field.shape or ()
    row_bytes = math.prod(shape) * field.stored_dtype.itemsize
    if is_raw:
        lengths = pc.min_max(pc.binary_length(array)).as_py()
        strange = {lengths["min"], lengths["max"]} - {None, row_bytes}
        if strange:
            raise SourceError(
                f"Column {field.name!r} has a row of {strange.pop()} bytes, expected {row_bytes} for {field.dtype} of "
                f"shape {shape}. Pass another shape or dtype with shapes=…, or leave it out there to get the bytes.",
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
    """The numbers of lists that must all have the field's shape; null lists have none."""
    level = array
    for size in _list_sizes(array.type, field):
        if pa.types.is_fixed_size_list(level.type):
            lengths = {level.type.list_size}
        else:
            lengths = set(pc.min_max(pc.list_value_length(level)).as_py().values()) - {None}
        if lengths - {size}:
            raise SourceError(
                f"Column {field.name!r} has a row of {(lengths - {size}).pop()} values, expected {size}. Pass "
                f"shapes={{{field.name!r}: None}} when the converter is made: its rows may then differ.",
                column=field.name,
            )
        level = level.flatten()
    return level


def _list_sizes(kind: pa.DataType, field: Field) -> tuple[int, ...]:
    """How long the lists of each level must be."""
    shape = field.shape or ()
    # One list of all numbers gets the declared shape.
    return shape if pa.types.is_nested(kind.value_type) else (math.prod(shape),)


def _valid_elements(array: pa.Array, field: Field) -> npt.NDArray[np.bool_] | None:
    """Which elements of lists of the field's shape are not null: `(rows, *shape)`; None if only whole rows are null."""
    levels = [array]
    for _ in _list_sizes(array.type, field):
        levels.append(levels[-1].flatten())
    if not any(level.null_count for level in levels[1:]):
        return None
    _flat_list(array, field)
    present = np.ones(len(array), np.bool_)
    for level, size in zip(levels, (*_list_sizes(array.type, field), 1), strict=True):
        # The elements of a null list are not stored, but have their place in the mask.
        present[present] = np.asarray(pc.is_valid(level))
        present = np.repeat(present, size)
    return present.reshape(len(array), *(field.shape or ()))
