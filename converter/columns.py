"""Arrow → NumPy: types, nulls, stacks; pure functions on one window's columns.

A column is decoded without a copy where Arrow's memory already is what NumPy
wants, and copied exactly once: gathered, in the order of the plan, into memory
that belongs to the caller from then on. No Python loop runs over rows.

Strings, bytes and rows of varying length stay Arrow arrays until a batch is cut
from them: Arrow gathers them outside the GIL, and objects are made for the rows
of one batch only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.errors import NullValueError
from converter.schema import Field

Array = npt.NDArray[Any]
Nulls = Literal["raise", "mask"] | Mapping[str, Any]
Ragged = Literal["raise", "pad", "nested"]

# Blocks that stay in the second-level cache while columns are written into rows: 18 ms for 262,144 rows of 40
# columns, where one pass a column takes 41 (DESIGN.md section 5).
_BLOCK_ROWS = 4096


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


def decode(column: pa.ChunkedArray, field: Field, *, fill: Any) -> Decoded:
    """A row group's column as numbers (or, for objects and ragged rows, as Arrow), nulls replaced by `fill`.

    The numbers may be a read-only view of Arrow's memory.
    """
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    valid = None if not array.null_count else np.asarray(pc.is_valid(array))
    if field.is_object or field.shape is None:
        return Decoded(values=_decode_variable(array, field, fill), valid=valid)
    values = _numbers(array, field)
    if valid is not None:
        values = values.copy() if not values.flags.writeable else values
        values[~valid] = fill
    return Decoded(values=values, valid=valid)


def _decode_variable(array: pa.Array, field: Field, fill: Any) -> pa.Array:
    if field.is_object:
        empty: Any = "" if field.dtype == "str" else b""
        return array if not array.null_count else pc.fill_null(array, fill or empty)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return _packed_list(array, field)
    # Files whose rows agreed are stored with a fixed width; beside others they are rows like any.
    array = pc.cast(array, pa.large_binary())
    return array if not array.null_count else pc.fill_null(array, b"")


def _numbers(array: pa.Array, field: Field) -> Array:
    """The numbers of an Arrow array without a copy, whatever stands in the places of nulls."""
    shape = field.shape or ()
    if pa.types.is_fixed_size_binary(array.type):
        width, data = array.type.byte_width, array.buffers()[1]
        raw = np.frombuffer(data, np.uint8, count=len(array) * width, offset=array.offset * width)
        rows: Array = raw.view(field.stored_dtype.newbyteorder("<")).reshape(len(array), *shape)
        return rows
    if shape:
        return _variable_rows(array, field)
    if pa.types.is_boolean(array.type):
        return np.asarray(pc.cast(pc.fill_null(array, False), pa.uint8())).view(np.bool_)
    stored = field.stored_dtype
    numbers: Array = np.frombuffer(array.buffers()[1], stored, len(array), array.offset * stored.itemsize)
    return numbers


def _packed_list(array: pa.Array, field: Field) -> pa.Array:
    """A list of numbers for each row as its bytes."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    numbers = _flat_numbers(array.flatten(), field)
    offsets = np.concatenate(([0], np.cumsum(lengths))) * numbers.dtype.itemsize
    return pa.Array.from_buffers(
        pa.large_binary(), len(array), [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(numbers))]
    )


def _flat_numbers(array: pa.Array, field: Field) -> Array:
    """The numbers of a flat array in the field's dtype."""
    if pa.types.is_boolean(array.type):
        return np.asarray(pc.cast(array, pa.uint8())).view(np.bool_)
    numbers: Array = np.asarray(array.to_numpy(zero_copy_only=False)).astype(field.stored_dtype, copy=False)
    return numbers


def _variable_rows(array: pa.Array, field: Field) -> Array:
    """Rows of one shape that are stored as BINARY or lists; a null row takes its place as zeros."""
    shape = field.shape or ()
    row_numbers = int(np.prod(shape))
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        packed = array.drop_null() if array.null_count else array
        present, _ = ragged_values(pc.cast(packed, pa.large_binary()), field)
    else:
        level = array
        while pa.types.is_list(level.type) or pa.types.is_large_list(level.type):
            level = level.flatten()
        present = _flat_numbers(level, field)
    num_present = len(array) - array.null_count
    if present.size != num_present * row_numbers:
        raise pa.ArrowInvalid(f"column {field.name!r} has rows of another shape than {shape}")
    tensors: Array = present.reshape(num_present, *shape)
    if not array.null_count:
        return tensors
    rows: Array = np.zeros((len(array), *shape), field.stored_dtype)
    rows[np.asarray(pc.is_valid(array))] = tensors
    return rows


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
    if field.shape is None:
        raise ValueError(f"nulls: column {field.name!r} has rows of different lengths; say nulls='mask' for it.")
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
        np.broadcast_to(cast, field.shape)
    except (OverflowError, TypeError, ValueError) as error:
        raise wrong from error
    return cast


def null_error(name: str, *, count: int | None = None) -> NullValueError:
    """What to say where `nulls="raise"` meets a null."""
    found = "nulls" if count is None else f"{count} null{'s' if count > 1 else ''}"
    return NullValueError(
        f"Column {name!r} holds {found}, and nulls='raise'. Fill or drop them in Spark, leave the column out with "
        f"columns=…, or say nulls='mask' (adds {name + '__valid'!r}) or nulls={{{name!r}: 0}}.",
        column=name,
    )


def gather(parts: Sequence[Array | pa.Array], rows: npt.NDArray[np.int64] | slice) -> Array | pa.Array:
    """The wanted rows of a window, whose row groups' columns are `parts`, in memory of their own."""
    if isinstance(parts[0], pa.Array):
        together = pa.chunked_array(parts)
        if isinstance(rows, slice):
            taken = together.slice(rows.start, rows.stop - rows.start)
        else:
            taken = together.take(pa.array(rows))
        # Combining copies, so that no batch holds on to the row groups it was cut from.
        return pa.concat_arrays(taken.chunks) if taken.num_chunks else pa.array([], together.type)
    if isinstance(rows, slice):
        return np.concatenate(list(_slices(parts, rows)))
    window = parts[0] if len(parts) == 1 else np.concatenate(parts)
    # The plan's indices are within bounds; "raise" would check them again and buffer the output.
    return window.take(rows, axis=0, mode="clip")


def gather_stack(groups: Sequence[Sequence[Array]], rows: npt.NDArray[np.int64] | slice, dtype: str) -> Array:
    """Scalar columns as rows: `groups` has for each row group its columns. The result is `(rows, k)`.

    The window is transposed block by block, then whole rows are gathered: a row is one run of memory,
    so one miss of the cache serves all columns.
    """
    num_rows = sum(len(columns[0]) for columns in groups)
    window = np.empty((num_rows, len(groups[0])), dtype)
    offset = 0
    for columns in groups:
        group_rows = len(columns[0])
        for start in range(0, group_rows, _BLOCK_ROWS):
            stop = min(start + _BLOCK_ROWS, group_rows)
            block = window[offset + start : offset + stop]
            for index, column in enumerate(columns):
                block[:, index] = column[start:stop]
        offset += group_rows
    if isinstance(rows, slice):
        wanted = rows.stop - rows.start
        return window if wanted == num_rows else window[rows].copy()
    return window.take(rows, axis=0, mode="clip")


def _slices(parts: Sequence[Array], rows: slice) -> list[Array]:
    """The stretches of `parts`, one after the other, that make up `rows` of their concatenation."""
    found, offset = [], 0
    for part in parts:
        start, stop = max(rows.start - offset, 0), min(rows.stop - offset, len(part))
        if start < stop:
            found.append(part[start:stop])
        offset += len(part)
    return found


def ragged_values(array: pa.Array, field: Field) -> tuple[Array, npt.NDArray[np.int64]]:
    """Rows of varying length: all numbers one after the other, and where each row begins (and the last ends)."""
    stored = field.stored_dtype.newbyteorder("<")
    _, offsets_buffer, data = array.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int64, count=len(array) + 1, offset=array.offset * 8)
    num_bytes = int(offsets[-1] - offsets[0])
    if not num_bytes:
        return np.empty(0, field.stored_dtype), offsets - offsets[0]
    raw = np.frombuffer(data, np.uint8, count=num_bytes, offset=int(offsets[0]))
    return raw.view(stored).astype(field.stored_dtype), (offsets - offsets[0]) // stored.itemsize


def pad(values: Array, offsets: npt.NDArray[np.int64]) -> tuple[Array, npt.NDArray[np.int64]]:
    """Rows of varying length as `(rows, longest)` with zeros behind, and their lengths.

    >>> pad(np.array([1, 2, 3]), np.array([0, 1, 3]))[0].tolist()
    [[1, 0], [2, 3]]
    """
    lengths = np.diff(offsets)
    longest = int(lengths.max()) if len(lengths) else 0
    padded = np.zeros((len(lengths), longest), values.dtype)
    padded[np.arange(longest) < lengths[:, None]] = values
    return padded, lengths
