"""Columns of a reader with the types that TensorFlow has, and rows of different shapes as flat columns."""

from __future__ import annotations

import datetime as dt
import warnings
from calendar import timegm
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from converter.errors import ConverterWarning
from converter.petastorm.columns import moment_of, scalar_type
from converter.petastorm.unischema import UnischemaField

Array = npt.NDArray[Any]

_TYPES: Mapping[Any, Any] = {
    np.int8: tf.int8,
    np.int16: tf.int16,
    np.int32: tf.int32,
    np.int64: tf.int64,
    np.uint8: tf.uint8,
    np.uint16: tf.int32,
    np.uint32: tf.int64,
    np.float16: tf.float16,
    np.float32: tf.float32,
    np.float64: tf.float64,
    np.bool_: tf.bool,
    np.bytes_: tf.string,
    np.str_: tf.string,
    Decimal: tf.string,
    np.datetime64: tf.int64,
}
_NANOSECONDS = np.dtype("datetime64[ns]")
_SECOND = 1_000_000_000
_ALL_DIGITS = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)


class TextAsBytesWarning(ConverterWarning, UnicodeWarning):
    """TensorFlow has no text: a column of text comes as bytes."""


class ShapesDifferError(RuntimeError):
    """Rows of a field with a fixed shape differ in shape."""


def tf_type_of(numpy_dtype: Any) -> Any:
    """The TensorFlow type of a field's values. Warns that TensorFlow has no text, only bytes.

    Raises:
        ValueError: there is none, as of uint64.
    """
    kind = scalar_type(numpy_dtype)
    if kind is np.str_:
        warnings.warn(
            "Tensorflow will convert all unicode strings back to bytes type. You may need to decode values.",
            TextAsBytesWarning,
            stacklevel=3,
        )
    try:
        return _TYPES[kind]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"Unknown mapping of numpy {numpy_dtype} to tensorflow dtype. Leave the field out with schema_fields, or "
            "change its type in a TransformSpec."
        ) from error


def null_error(name: Any) -> RuntimeError:
    """What is raised for a value that is None."""
    return RuntimeError(
        f'Encountered "{name}"=None. Tensorflow does not support None values as a tensor. Consider filtering out these '
        "rows using a predicate."
    )


def nanoseconds_of_date(date: dt.date) -> int:
    """A date or time as nanoseconds since 1970, in whole seconds."""
    return timegm(date.timetuple()) * _SECOND


def tf_value(name: Any, value: Any) -> Any:
    """A value of a row, or an array of a batch, as TensorFlow can take it.

    Raises:
        RuntimeError: it is None.
        ValueError: it is a time beyond the years 1677 to 2262, which has no nanoseconds.
    """
    if value is None:
        raise null_error(name)
    if isinstance(value, Decimal):
        return _text_of_decimal(value)
    if isinstance(value, (np.datetime64, dt.date)):
        return _nanoseconds_of(name, [value])[0]
    if isinstance(value, (np.ndarray, np.uint16, np.uint32)):
        return _tf_array(name, np.asarray(value))
    return value


def _tf_array(name: Any, values: Array) -> Any:
    kind = values.dtype.kind
    if kind == "M":
        return _nanoseconds(name, values)
    if values.dtype == np.uint16:
        return values.astype(np.int32)
    if values.dtype == np.uint32:
        return values.astype(np.int64)
    if kind in "SU" and values.size:
        return values.tolist()
    return _tf_objects(name, values) if kind == "O" else values


def _nanoseconds(name: Any, times: Array) -> Array:
    found = times.astype(_NANOSECONDS)
    is_kept = np.isnat(times) | (found.astype(times.dtype) == times)
    if not is_kept.all():
        shown = times[~is_kept].reshape(-1)[0]
        raise ValueError(
            f"{name!r} has the time {shown}, which is beyond the years 1677 to 2262: TensorFlow gets times as int64 "
            "nanoseconds. Leave such rows out with a predicate, or change the column in a TransformSpec."
        )
    if np.isnat(times).any():
        raise null_error(name)
    return found.astype(np.int64)


def _nanoseconds_of(name: Any, moments: Sequence[Any]) -> Array:
    """Dates and times, of Python, pandas or NumPy, as nanoseconds since 1970."""
    times = [each if isinstance(each, np.datetime64) else moment_of(each) for each in moments]
    if len({time.dtype for time in times}) == 1:
        return _nanoseconds(name, np.array(times))
    # NumPy would take the finest unit for all, in which the year 9999 is none.
    return np.concatenate([_nanoseconds(name, np.array([time])) for time in times])


def _text_of_decimal(value: Decimal) -> str:
    """A decimal as text, without the zeros at the end, as Petastorm has it, but with all other digits."""
    return str(value.normalize(_ALL_DIGITS))


def _tf_objects(name: Any, values: Array) -> Array:
    """Objects of one kind: dates and times as nanoseconds, decimals as texts, others as they are."""
    flat = values.reshape(-1).tolist()
    kinds = set(map(type, flat))
    if type(None) in kinds:
        raise null_error(name)
    if Decimal in kinds:
        return _objects([_text_of_decimal(value) for value in flat], values.shape)
    if kinds == {dt.date}:
        return _nanoseconds(name, np.array(flat, "datetime64[D]")).reshape(values.shape)
    if kinds and all(issubclass(kind, (dt.date, np.datetime64)) for kind in kinds):
        return _nanoseconds_of(name, flat).reshape(values.shape)
    return values


def _objects(values: Sequence[Any], shape: tuple[int, ...]) -> Array:
    objects = np.empty(len(values), object)
    objects[:] = values
    return objects.reshape(shape)


def tf_column(field: UnischemaField, column: Array) -> Array:
    """A column as one array of the type that TensorFlow has for the field.

    Raises:
        RuntimeError: a value is None, or rows of a field with a fixed shape differ in shape.
        ValueError: a number is none of the field's.
    """
    wanted = _TYPES[scalar_type(field.numpy_dtype)]
    if column.dtype == object and field.shape and len(column) and _holds_arrays(field.name, column):
        column = _stacked(field, column)
    if wanted == tf.string:
        return _tf_objects(field.name, column) if column.dtype == object else column.astype(object)
    values = np.asarray(_tf_array(field.name, column))
    _check_whole(field.name, values, wanted)
    return values.astype(wanted.as_numpy_dtype, copy=False)


def checked_value(field: UnischemaField, value: Any) -> Any:
    """A value of a row as `tf_value` makes it, if the field's type holds it: TensorFlow itself would round it.

    Raises:
        RuntimeError: it is None.
        ValueError: it is a number that is none of the field's.
    """
    found = tf_value(field.name, value)
    if isinstance(found, (int, float, np.number, np.ndarray)):
        _check_whole(field.name, np.asarray(found), _TYPES[scalar_type(field.numpy_dtype)])
    return found


def _check_whole(name: Any, values: Array, wanted: Any) -> None:
    """Raise if whole numbers, or booleans, of this type cannot hold these: a cast would make others of them."""
    dtype = wanted.as_numpy_dtype
    if not (wanted.is_integer or wanted.is_bool) or values.dtype.kind not in "iufO" or np.can_cast(values.dtype, dtype):
        return
    if values.dtype.kind == "f" and np.isnan(values).any():
        # Nulls among whole numbers; a cast would make numbers of them.
        raise null_error(name)
    least, most = (0, 1) if wanted.is_bool else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    is_whole = values.dtype.kind in "iu"
    if not values.size or (is_whole and least <= int(values.min()) and int(values.max()) <= most):
        return
    is_odd = (values < least) | (values > most if is_whole else (values >= most + 1) | (values % 1 != 0))
    if is_odd.any():
        raise ValueError(
            f"{name!r} has the number {values[is_odd][0]}, which is none of {wanted.name}. Declare another type in "
            "edit_fields of a TransformSpec, or let its function return such numbers."
        )


def _holds_arrays(name: str, column: Array) -> bool:
    kinds = set(map(type, column.reshape(-1).tolist()))
    if type(None) in kinds:
        raise null_error(name)
    return np.ndarray in kinds or list in kinds


def _stacked(field: UnischemaField, column: Array) -> Array:
    rows = [np.asarray(row) for row in column]
    shapes = {row.shape for row in rows}
    if len(shapes) > 1:
        shown = ", ".join(map(str, sorted(shapes)[:5]))
        raise ShapesDifferError(
            f"Field {field.name!r} has rows of the shapes {shown}, but the schema says {field.shape}. Declare a size "
            "that differs as None, or give rows one shape in a TransformSpec."
        )
    if rows[0].dtype.kind in "SU":
        return np.stack([row.astype(object) for row in rows])
    return np.stack(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One field of an element whose rows TensorFlow cuts out of columns.

    Rows of one shape are one column. Rows of different shapes are all their values in one flat column, where each row
    begins and ends in it, and each row's shape.
    """

    key: Any
    """The key of its column in a block."""

    field: UnischemaField

    @property
    def is_varying(self) -> bool:
        """Whether rows may differ in shape."""
        return None in self.field.shape

    @property
    def num_columns(self) -> int:
        """How many columns hold it."""
        return 3 if self.is_varying else 1

    @property
    def dtype(self) -> Any:
        """The TensorFlow type of its values."""
        return _TYPES[scalar_type(self.field.numpy_dtype)]

    @property
    def specs(self) -> list[Any]:
        """The specs of its columns."""
        shape = self.field.shape
        if not self.is_varying:
            return [tf.TensorSpec((None, *shape), self.dtype)]
        bounds, shapes = tf.TensorSpec((None, 2), tf.int64), tf.TensorSpec((None, len(shape)), tf.int64)
        return [tf.TensorSpec((None,), self.dtype), bounds, shapes]

    def columns(self, block: Mapping[Any, Array], start: int, stop: int) -> list[Array]:
        """Its columns of some rows of a block.

        Raises:
            RuntimeError: a value is None.
        """
        column = block[self.key][start:stop]
        if not self.is_varying:
            return [tf_column(self.field, column)]
        rows = [self._flat_row(row) for row in column]
        stops = np.cumsum([len(row) for row in rows])
        bounds = np.stack((stops - [len(row) for row in rows], stops), axis=1)
        shapes = np.array([np.shape(row) for row in column], np.int64)
        return [np.concatenate(rows), bounds, shapes]

    def _flat_row(self, row: Any) -> Array:
        if row is None:
            raise null_error(self.field.name)
        return tf_column(self.field._replace(shape=()), np.asarray(row).reshape(-1))

    def row(self, columns: Sequence[Any], sliced: Sequence[Any]) -> Any:
        """A row's tensor, of its columns and of what TensorFlow has sliced from them."""
        if not self.is_varying:
            return sliced[0]
        (flat, *_), (bounds, shape) = columns, sliced
        row = tf.reshape(flat[bounds[0] : bounds[1]], shape)
        row.set_shape(self.field.shape)
        return row


def without_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for tf.data that AutoGraph does not rewrite: it would warn where it has no source."""
    converted: Callable[..., Any] = tf.autograph.experimental.do_not_convert(function)
    return converted
