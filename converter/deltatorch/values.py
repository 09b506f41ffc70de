"""Columns as arrays of numbers, and as the Python objects that a user's functions get: those that Arrow would make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.deltatorch.rows import Part, equal_length
from converter.errors import NullValueError, SourceError, UnsupportedTypeError
from converter.places import innermost
from converter.reading.ragged import ragged_values
from converter.reading.runs import VALID_SUFFIX
from converter.reading.source import ELEMENT_VALID_SUFFIX, BatchSource
from converter.schema import Field

Array = npt.NDArray[Any]

_EXACT_DIGITS = 15
"""Decimals arrive as float64, which holds that many digits."""


class WrongBytesError(SourceError, ValueError):
    """The bytes of a row do not fit the shape that its field gives them; `.column` names the column."""


class Values:
    """Gives the values of a source's columns."""

    def __init__(self, source: BatchSource) -> None:
        self._fields = {field.name: field for field in source.fields}
        self._masks = {name: source.field_of(name + ELEMENT_VALID_SUFFIX) for name in self._fields}
        columns = source.manifest.source_columns or {}
        self._types = {name: innermost(column.arrow_type) for name, column in columns.items()}

    def field(self, name: str) -> Field:
        """What a column holds."""
        return self._fields[name]

    def numbers(self, part: Part, name: str, shape: tuple[int, ...]) -> Array | list[Array]:
        """The bytes of a column as uint8 numbers, one array `(rows, *shape)`; as a list if rows differ in length.

        Raises:
            NullValueError: a row is null.
            WrongBytesError: a row's bytes do not fit the shape.
        """
        self.check_no_nulls(part, name)
        field = self._fields[name]
        values: Any = part.columns[name]
        if field.dtype != "bytes" or field.shape is None:
            raise UnsupportedTypeError(
                f"FieldSpec({name!r}): decode_numpy_and_apply_shape needs a column of bytes; {name!r} holds "
                f"{field.shown_dtype} of shape {field.shown_shape}. Leave it out there.",
                column=name,
            )
        length = equal_length(values)
        if length is None:
            return [_reshaped(np.frombuffer(row, np.uint8).copy(), name, shape) for row in values.to_pylist()]
        if pa.types.is_fixed_size_binary(values.type):
            data, first = values.buffers()[1], values.offset * length
        else:
            _, offsets, data = values.buffers()
            first = int(np.frombuffer(offsets, np.int64, 1, values.offset * 8)[0])
        # An array of no bytes may have no buffer.
        flat = np.frombuffer(data or b"", np.uint8, length * len(values), first)
        rows = flat.reshape(len(values), length)
        example = _reshaped(rows[0], name, shape)
        return np.require(rows.reshape(len(values), *example.shape), requirements=["C", "W"])

    def check_no_nulls(self, part: Part, name: str) -> None:
        """Raise NullValueError if a row of a column is null."""
        mask = part.columns.get(name + VALID_SUFFIX) if name + VALID_SUFFIX not in self._fields else None
        if mask is not None and not mask.all():
            raise NullValueError(
                f"Column {name!r} has a null, which has no tensor form. Give its FieldSpec a transform that takes "
                "None, or leave such rows out of the table.",
                column=name,
            )

    def objects(self, part: Part, name: str) -> list[Any]:
        """A column as Python objects: numbers, texts, bytes, lists, dates, times, decimals, and None for null."""
        field, values = self._fields[name], part.columns[name]
        found = self._objects(field, values)
        element_mask = part.columns.get(name + ELEMENT_VALID_SUFFIX) if self._masks[name] is not None else None
        if element_mask is not None:
            mask_field = self._masks[name]
            assert mask_field is not None
            found = _with_none(found, self._lists(mask_field, element_mask))
        mask = part.columns.get(name + VALID_SUFFIX) if name + VALID_SUFFIX not in self._fields else None
        if mask is not None and not mask.all():
            found = [value if is_valid else None for value, is_valid in zip(found, mask.tolist(), strict=True)]
        return found

    def _objects(self, field: Field, values: Any) -> list[Any]:
        if field.shape == ():
            return self._scalars(field, values)
        return self._lists(field, values)

    def _lists(self, field: Field, values: Any) -> list[Any]:
        if isinstance(values, np.ndarray):
            flat = np.empty(values.size, object)
            flat[:] = self._scalars(field, values.reshape(-1))
            nested: list[Any] = flat.reshape(values.shape).tolist()
            return nested
        if field.is_object:
            listed: list[Any] = values.to_pylist()
            return listed
        rows = ragged_values(values, field)
        flat = np.empty(len(rows.values), object)
        flat[:] = self._scalars(field, rows.values)
        return replace(rows, values=flat).to_lists()

    def _scalars(self, field: Field, values: Any) -> list[Any]:
        if isinstance(values, pa.Array):
            listed: list[Any] = values.to_pylist()
            return listed
        arrow_type = self._types.get(field.name)
        if field.dtype == "datetime64[D]":
            values = pa.array(values, pa.int32()).cast(pa.date32())
        elif field.dtype == "datetime64[us]":
            zone = arrow_type.tz if arrow_type is not None and pa.types.is_timestamp(arrow_type) else None
            values = pa.array(values, pa.int64()).cast(pa.timestamp("us", zone))
        elif field.dtype == "float64" and arrow_type is not None and pa.types.is_decimal(arrow_type):
            if arrow_type.precision > _EXACT_DIGITS:
                raise UnsupportedTypeError(
                    f"Column {field.name!r} is {arrow_type}, whose numbers are too long for float64 to hold them "
                    f"exactly. Cast it to one of up to {_EXACT_DIGITS} digits, or to double, before writing.",
                    column=field.name,
                )
            values = pa.array(values).cast(pa.decimal128(arrow_type.precision, arrow_type.scale))
        else:
            numbers: list[Any] = values.tolist()
            return numbers
        return self._scalars(field, values)


def _reshaped(row: Array, name: str, shape: tuple[int, ...]) -> Array:
    try:
        return row.reshape(shape)
    except ValueError:
        raise WrongBytesError(
            f"Column {name!r} has a row of {row.size} bytes, which does not fit decode_numpy_and_apply_shape={shape} "
            "of its FieldSpec. Pass another shape, one with -1 for a size that differs, or none to get the bytes.",
            column=name,
        ) from None


def _with_none(value: Any, is_valid: Any) -> Any:
    """Nested lists with None where the nested lists of their mask have False."""
    if isinstance(is_valid, list):
        return [_with_none(*pair) for pair in zip(value, is_valid, strict=True)]
    return value if is_valid else None
