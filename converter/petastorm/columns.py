"""Columns of Arrow as NumPy arrays of the dtype that a field declares, with the values that Petastorm's rows have."""

from __future__ import annotations

import datetime as dt
import functools
import itertools
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Array = npt.NDArray[Any]

_MICROSECONDS = np.dtype("datetime64[us]")


def scalar_type(numpy_dtype: Any) -> Any:
    """The class of a field's values: `np.int32` for `np.int32` and for `np.dtype("int32")`."""
    return numpy_dtype.type if isinstance(numpy_dtype, np.dtype) else numpy_dtype


def convert_scalar(numpy_dtype: Any, value: Any) -> Any:
    """A stored value as the declared type has it; as it is if that is neither NumPy's nor Decimal.

    A list becomes an array.

    Raises:
        ValueError, TypeError: the value cannot be converted.
    """
    kind = scalar_type(numpy_dtype)
    if not _is_converted(kind):
        return value
    if isinstance(value, (list, np.ndarray)):
        return _convert_items(kind, value)
    if kind is np.str_ and isinstance(value, (bytes, bytearray)):
        return _text(kind, bytes(value).decode())
    if kind is np.bool_ and isinstance(value, str):
        return kind(boolean_of(value))
    if kind in (np.str_, np.bytes_):
        return _text(kind, value)
    if kind is np.datetime64 and getattr(value, "tzinfo", None) is not None:
        return moment_of(value)
    try:
        converted = kind(value)
    except OverflowError:
        raise ValueError(_beyond(kind, value)) from None
    is_whole = isinstance(value, (int, np.integer))
    if is_whole and issubclass(kind, (np.integer, np.floating)) and not _is_equal(converted, int(value)):
        raise ValueError(_beyond(kind, value))
    if isinstance(value, (float, np.floating, Decimal)) and issubclass(kind, np.integer) and int(converted) != value:
        raise ValueError(_beyond(kind, value))
    return converted


def _is_equal(converted: Any, whole: int) -> bool:
    """Whether a number of NumPy's is a whole number of Python's, which NumPy would round to compare them."""
    return bool(np.isfinite(converted)) and int(converted) == whole


def boolean_of(text: str) -> bool:
    """The boolean that a text, such as a folder's name, stands for; Python takes each text for true.

    Raises:
        ValueError: it stands for none.
    """
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{text!r} is neither 'true' nor 'false'")
    return text.lower() == "true"


def moment_of(value: dt.date) -> Any:
    """A date or a time of Python or pandas as NumPy's, which has no zone: as that of UTC."""
    if getattr(value, "tzinfo", None) is not None:
        value = value.astimezone(dt.timezone.utc).replace(tzinfo=None)  # type: ignore[attr-defined]
    # pandas' times know nanoseconds.
    return value.to_datetime64() if hasattr(value, "to_datetime64") else np.datetime64(value)


def _convert_items(kind: Any, values: Any) -> Array:
    if issubclass(kind, (np.number, np.bool_)):
        numbers = np.asarray(values)
        _check_whole(kind, numbers)
        return numbers.astype(kind)
    if kind is np.datetime64:
        return np.array([convert_scalar(kind, value) for value in values], _MICROSECONDS)
    return to_objects(values)


def convert_column(numpy_dtype: Any, values: pa.Array) -> Array:
    """A column of numbers, texts, times or lists of them, as the declared type has them.

    Numbers without nulls are an array of this dtype, times datetime64[us] ([ns] if they are stored so), dates
    datetime64[D], and lists of one length a matrix. Everything else is an array of objects, with None where there are
    nulls. Nulls among floating numbers are NaN.

    Raises:
        ValueError, TypeError: a value cannot be converted.
    """
    array = _unpacked(values)
    kind = scalar_type(numpy_dtype)
    if _is_list(array.type):
        return _lists(kind, array)
    return _scalars(kind, array)


def to_objects(values: Iterable[Any]) -> Array:
    """The values as an array of objects, arrays among them; NumPy itself would join arrays of one shape."""
    return np.fromiter(values, object)


def to_column(values: Sequence[Any]) -> Array:
    """Decoded values as one array if all are arrays, or NumPy's numbers, of one dtype and shape; else as objects."""
    first = values[0] if len(values) else None
    if not isinstance(first, (np.ndarray, np.generic)):
        return to_objects(values)
    dtype, shape = first.dtype, first.shape
    if dtype.kind not in ("biufcmMUS" if shape else "biufcmM"):
        return to_objects(values)
    for value in values:
        if not isinstance(value, (np.ndarray, np.generic)) or value.dtype != dtype or value.shape != shape:
            return to_objects(values)
    return np.stack(values) if shape else np.array(values, dtype)


def in_one_array(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The chunks as one array."""
    if isinstance(values, pa.ChunkedArray):
        return values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
    return values


def buffers_of(values: pa.Array) -> list[memoryview | None]:
    """The bytes of each row where they are, and None for a null."""
    return [memoryview(value.as_buffer()).cast("B") if value.is_valid else None for value in values]


def stored_values(values: pa.Array) -> list[Any]:
    """The values as Python has them, lists as arrays: what a user's codec decodes."""
    array = _unpacked(values)
    if not _is_list(array.type):
        return list(array.to_pylist())
    return list(_lists(None, array))


def _is_converted(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, (np.generic, Decimal))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def _unpacked(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    array = in_one_array(values)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _scalars(kind: Any, array: pa.Array) -> Array:
    if not _is_converted(kind):
        return to_objects(_present_or_nan(array))
    if issubclass(kind, (np.number, np.bool_)) and _is_number(array.type):
        return _numbers(kind, array)
    if kind is np.datetime64 and (pa.types.is_timestamp(array.type) or pa.types.is_date(array.type)):
        return _with_nulls(array, _times(array.drop_null() if array.null_count else array))
    if kind is Decimal and pa.types.is_decimal(array.type):
        return to_objects(array.to_pylist())
    if (kind is np.str_ and _is_text(array.type)) or (kind is np.bytes_ and _is_bytes(array.type)):
        present = array.drop_null() if array.null_count else array
        convert = functools.partial(_text, kind) if has_final_zero(present) else kind
        return _with_nulls(array, to_objects(map(convert, present.to_pylist())))
    return to_objects(None if value is None else convert_scalar(kind, value) for value in _present_or_nan(array))


def has_final_zero(array: pa.Array) -> bool:
    """Whether one of some texts or bytes ends with a zero, which NumPy takes for a filler."""
    wide = array.cast(pa.large_string() if _is_text(array.type) else pa.large_binary())
    return bool(pc.any(pc.ends_with(wide, "\0")).as_py())


def _text(kind: Any, value: Any) -> Any:
    """A text or bytes as NumPy's; as Python's if there are zeros at the end, which NumPy's loses in pickles."""
    text = kind(value)
    return text[:] if text.endswith("\0" if kind is np.str_ else b"\0") else text


def _present_or_nan(array: pa.Array) -> list[Any]:
    """The values as Python has them; nulls among floating numbers are NaN, as pandas has them."""
    if pa.types.is_floating(array.type) and array.null_count:
        array = pc.fill_null(array, float("nan"))
    return list(array.to_pylist())


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _numbers(kind: Any, array: pa.Array) -> Array:
    is_floating = pa.types.is_floating(array.type)
    present = array.drop_null() if array.null_count and not is_floating else array
    numbers = present.to_numpy(zero_copy_only=False)
    _check_whole(kind, numbers)
    return _with_nulls(array, np.asarray(numbers.astype(kind)))


def _check_whole(kind: Any, numbers: Array) -> None:
    """Raise ValueError if this type cannot hold these: a cast would wrap whole numbers around, cut or round them."""
    if numbers.dtype.kind == "O" and issubclass(kind, np.number):
        # Decimals: a few, as lists hold them.
        for number in numbers.flat:
            convert_scalar(kind, number)
        return
    if issubclass(kind, np.floating) and numbers.dtype.kind in "iu":
        _check_exact(kind, numbers)
    if not issubclass(kind, np.integer) or numbers.dtype.kind not in "iuf" or np.can_cast(numbers.dtype, kind):
        return
    if numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
        raise ValueError(f"a null, NaN or infinity cannot become {kind.__name__}")
    limits = np.iinfo(kind)
    for number in (numbers.min(), numbers.max()) if numbers.size else ():
        if not limits.min <= int(number) <= limits.max:
            raise ValueError(_beyond(kind, number))
    if numbers.dtype.kind == "f" and len(cut := numbers[numbers != np.trunc(numbers)]):
        raise ValueError(_beyond(kind, cut[0]))


def _check_exact(kind: Any, whole: Array) -> None:
    """Raise ValueError if a floating type would round one of these whole numbers."""
    with np.errstate(invalid="ignore", over="ignore"):
        floating = whole.astype(kind)
        is_other = (floating.astype(whole.dtype) != whole) | (floating >= 2.0 ** np.iinfo(whole.dtype).bits)
        if whole.dtype.kind == "i":
            is_other |= floating >= 2.0 ** (np.iinfo(whole.dtype).bits - 1)
    if is_other.any():
        raise ValueError(_beyond(kind, whole[is_other][0]))


def _beyond(kind: Any, number: Any) -> str:
    return f"the number {number} is none of {kind.__name__}; the store's schema needs a wider type"


def _times(present: pa.Array) -> Array:
    if pa.types.is_date(present.type):
        return np.array(present.cast(pa.date32()).cast(pa.int32()).to_numpy().astype("datetime64[D]"))
    ticks = present.cast(pa.int64()).to_numpy()
    times: Array = ticks.view(f"datetime64[{present.type.unit}]")
    # By the type, not by the values: a time must not change its dtype because of other rows.
    return times.copy() if present.type.unit == "ns" else times.astype(_MICROSECONDS)


def _with_nulls(array: pa.Array, present: Array) -> Array:
    """The values that are present at their places, as objects, and None at the others."""
    if len(present) == len(array):
        return present
    objects = np.empty(len(array), object)
    objects[np.asarray(array.is_valid().to_numpy(zero_copy_only=False))] = to_objects(present)
    return objects


def _lists(kind: Any, array: pa.Array) -> Array:
    """Lists as rows of a matrix, if all have one length; else as an array of arrays."""
    items = array.flatten()
    flat = _items(kind, items)
    present = array.drop_null() if array.null_count else array
    lengths = pc.list_value_length(present).to_numpy(zero_copy_only=False)
    if not array.null_count and len(lengths) and (lengths == lengths[0]).all():
        matrix: Array = flat.reshape(len(array), int(lengths[0]))
        return matrix
    edges = [0, *np.cumsum(lengths).tolist()]
    return _with_nulls(array, to_objects(flat[start:stop] for start, stop in itertools.pairwise(edges)))


def _items(kind: Any, items: pa.Array) -> Array:
    """The values in all lists."""
    if kind is None or kind is object:
        return _plain_items(items)
    if items.null_count and not pa.types.is_floating(items.type) and _is_number(items.type):
        raise ValueError("a list holds a null, which has no form among numbers")
    if kind in (np.str_, np.bytes_):
        return to_objects(items.to_pylist())
    return _scalars(kind, items)


def _plain_items(items: pa.Array) -> Array:
    if _is_number(items.type) and not (items.null_count and not pa.types.is_floating(items.type)):
        return np.array(items.to_numpy(zero_copy_only=False))
    return to_objects(items.to_pylist())
