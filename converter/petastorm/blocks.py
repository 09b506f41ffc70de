"""Columns of one row group as NumPy arrays, with the dtypes that Petastorm's readers give them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.petastorm.columns import has_final_zero
from converter.petastorm.unischema import Unischema, UnischemaField
from converter.reading.objects import to_numpy

if TYPE_CHECKING:
    import pandas as pd

Array = npt.NDArray[Any]
Block = dict[str, Array]
"""Columns by name; the first axis of each is the rows."""

_MAX_SHOWN_LENGTHS = 20


class TransformMismatchError(ValueError, TypeError):
    """What a transform returned is not what its `TransformSpec` declares."""


def num_rows_of(block: Mapping[Any, Array]) -> int:
    """The rows of a block."""
    return len(next(iter(block.values()))) if block else 0


def take_rows(block: Mapping[Any, Array], rows: Any) -> dict[Any, Array]:
    """The chosen rows of each column."""
    return {name: column[rows] for name, column in block.items()}


def to_batch(table: pa.Table, schema: Unischema) -> Block:
    """The columns as `make_batch_reader` hands them out.

    Strings are `<U` arrays (objects if there is a null, which is None, or a zero at an end), lists of one length
    matrices, integers with nulls float64 with NaN (objects if doubles would round one), booleans with nulls objects,
    dates and decimals objects, times datetime64[ns].

    Raises:
        RuntimeError: the lists of a column differ in length.
    """
    return {name: _batch_column(name, table.column(name), _shape_of(schema, name)) for name in table.column_names}


def _shape_of(schema: Unischema, name: str) -> tuple[int | None, ...]:
    field = schema.fields.get(name)
    return () if field is None else tuple(field.shape)


def _batch_column(name: str, column: pa.ChunkedArray, shape: tuple[int | None, ...]) -> Array:
    array = in_one(column)
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        values: Array = to_numpy(array)
        return values if array.null_count or has_final_zero(array) else values.astype(np.str_)
    if is_list(kind):
        matrix = _matrix_of(name, array)
        return matrix.reshape(len(array), *shape) if len(shape) > 1 else matrix
    return plain_values(array)


def in_one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The chunks as one array."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def is_list(kind: pa.DataType) -> bool:
    """Whether rows are lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _matrix_of(name: str, array: pa.Array) -> Array:
    """Lists of one length as rows of a matrix."""
    lengths = pc.list_value_length(array)
    bounds = pc.min_max(lengths)
    least, most = bounds["min"].as_py(), bounds["max"].as_py()
    if array.null_count or least != most:
        shown = [str(length) for length in pc.unique(lengths).to_pylist()[:_MAX_SHOWN_LENGTHS]]
        raise RuntimeError(
            f"Length of all values in column '{name}' are expected to be the same length. Got the following set of "
            f"lengths: '{', '.join(shown)}'. Pad them in a TransformSpec, or read them natively with ragged='pad'."
        )
    return plain_values(array.flatten()).reshape(len(array), most or 0)


def plain_values(array: pa.Array) -> Array:
    """Values that are neither text nor lists, as pandas has them. What shares memory with Arrow is copied."""
    kind = array.type
    if pa.types.is_timestamp(kind):
        return _times(array)
    if pa.types.is_decimal(kind) or pa.types.is_date(kind) or pa.types.is_time(kind) or pa.types.is_null(kind):
        return _objects(array.to_pylist())
    if pa.types.is_integer(kind) and array.null_count:
        try:
            return np.asarray(to_numpy(array.cast(pa.float64())))
        except pa.ArrowInvalid:
            # Doubles round whole numbers beyond 2**53, some of which they hold.
            doubles = np.asarray(to_numpy(array.cast(pa.float64(), safe=False)))
            is_same = pc.equal(pa.array(doubles, mask=np.isnan(doubles)).cast(kind, safe=False), array)
            return doubles if pc.all(is_same).as_py() else _objects(array.to_pylist())
    values: Array = to_numpy(array)
    return values if values.flags.writeable else values.copy()


def _times(array: pa.Array) -> Array:
    """Times as datetime64[ns]; in their own unit if one of them is beyond the years 1677 to 2262."""
    values = np.asarray(to_numpy(pc.cast(array, pa.timestamp(array.type.unit))))
    if array.type.unit == "ns" or not len(values):
        return values.astype("datetime64[ns]")
    present = values[~np.isnat(values)]
    limit = np.datetime64("1677-09-22"), np.datetime64("2262-04-11")
    is_near = not len(present) or (present.min() > limit[0] and present.max() < limit[1])
    return values.astype("datetime64[ns]") if is_near else values


def _objects(values: Iterable[Any]) -> Array:
    listed = list(values)
    objects = np.empty(len(listed), object)
    objects[:] = listed
    return objects


def collect(field: UnischemaField | None, values: Sequence[Any]) -> Array:
    """The values of one field in rows, as a column: one array if all have one shape, else objects.

    So are numbers of a user's function that the declared whole numbers cannot hold.
    """
    if any(value is None for value in values):
        return _each(values)
    if field is not None and not field.shape and _is_number(field.numpy_dtype):
        if any(np.ndim(value) for value in values):
            return _each(values)
        dtype = np.dtype(field.numpy_dtype)
        if dtype.kind not in "iu":
            return np.array(values, dtype)
        with contextlib.suppress(ValueError, OverflowError), np.errstate(invalid="ignore"):
            numbers = np.array(values, dtype)
            # Compared by Python, which rounds none of them.
            if numbers.tolist() == list(values):
                return numbers
        return _each(values)
    if all(isinstance(value, (np.ndarray, np.generic)) for value in values):
        kinds = {(value.shape, value.dtype) for value in values}
        if len(kinds) == 1 and next(iter(kinds))[1].kind in "biufcMm":
            return np.stack(list(values))
    return _each(values)


def _is_number(numpy_dtype: Any) -> bool:
    return isinstance(numpy_dtype, type) and issubclass(numpy_dtype, (np.number, np.bool_))


def _each(values: Sequence[Any]) -> Array:
    """Values as objects, arrays among them; NumPy would join arrays of one shape."""
    objects = np.empty(len(values), object)
    for number, value in enumerate(values):
        objects[number] = value
    return objects


def from_frame(frame: pd.DataFrame, schema: Unischema) -> Block:
    """The columns of a frame that a user's transform returned.

    Raises:
        ValueError: its columns are not those declared, or an array has not the declared shape.
        RuntimeError: the lists of a column differ in length.
    """
    if set(frame.columns) != set(schema.fields):
        raise TransformMismatchError(
            f"Transformed result columns ({','.join(map(str, frame.columns))}) do not match required schema "
            f"columns({','.join(schema.fields)}). Declare new columns in edit_fields, and others in removed_fields."
        )
    wide = {name: field for name, field in schema.fields.items() if len(field.shape) > 1}
    narrow = pa.Table.from_pandas(frame[[name for name in schema.fields if name not in wide]], preserve_index=False)
    block = to_batch(narrow, schema)
    block |= {name: _stack_checked(frame[name].tolist(), field) for name, field in wide.items()}
    return {name: block[name] for name in schema.fields}


def _stack_checked(values: Sequence[Any], field: UnischemaField) -> Array:
    """Arrays of one declared shape as one array."""
    name = field.name
    shape = tuple(size for size in field.shape if size is not None)
    if len(shape) < len(field.shape):
        raise ValueError(
            f"All dimensions of a shape: {field.shape} in: {name} field must be constant. If a dimension is variable, "
            "we won't be able to coalesce rows when preparing a batch."
        )
    for value in values:
        if not isinstance(value, np.ndarray):
            raise ValueError(f"field {name} must be numpy array type.")
        if value.shape != shape:
            raise ValueError(f"field {name} must be the shape {shape}, got {value.shape}.")
        if not value.flags.c_contiguous:
            raise ValueError(f"field {name} error: only support row major multi-dimensional array.")
    dtype = np.dtype(field.numpy_dtype)
    return np.stack(values) if values else np.zeros((0, *shape), dtype)
