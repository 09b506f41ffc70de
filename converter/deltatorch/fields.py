"""`FieldSpec`, which says what becomes of a column, and its checks."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from converter.errors import MissingDependencyError


@dataclass
class FieldSpec:
    """What becomes of a column's value in each row: decoded, then transformed, then put under `target_name`.

    >>> FieldSpec("image", decode_numpy_and_apply_shape=(28, 28), target_name="x").target_name
    'x'
    """

    name: str
    """The column."""

    decode_numpy_and_apply_shape: Sequence[int] | int | None = None
    """The bytes are uint8 numbers of this shape; one size may be -1."""

    load_image_using_pil: bool = False
    """The bytes are a picture: `transform` gets what Pillow opens; without `transform` an array is made of it."""

    transform: Callable[[Any], Any] | None = None
    """Your function of one value."""

    target_name: str | None = None
    """The key in the batch. The value as it is in the table stays under the column's name."""

    load_using_io: bool = False
    """`transform` gets the bytes as a file object, an `io.BytesIO`."""

    full_record_transform: Callable[[dict[str, Any]], Any] | None = None
    """Your function of the whole row, a dict, once all fields are ready; the batch is made of what it returns."""


def check_fields(fields: Any) -> tuple[FieldSpec, ...]:
    """The fields of a loader, checked; the message names the one that is wrong."""
    if isinstance(fields, (str, bytes, Mapping, FieldSpec)) or not isinstance(fields, Sequence) or not fields:
        raise TypeError(f"fields must be a list of FieldSpec, e.g. [FieldSpec('image')], got {fields!r:.80}.")
    for spec in fields:
        if not isinstance(spec, FieldSpec):
            raise TypeError(f"fields must be a list of converter.deltatorch.FieldSpec; one is {spec!r}.")
        if not isinstance(spec.name, str) or not spec.name:
            raise TypeError(f"FieldSpec needs the name of a column, got {spec.name!r:.80}.")
        for option in ("transform", "full_record_transform"):
            function = getattr(spec, option)
            if function is not None and not callable(function):
                raise TypeError(f"FieldSpec({spec.name!r}): {option} must be a function, got {function!r:.80}.")
        if spec.load_image_using_pil and spec.load_using_io:
            raise ValueError(
                f"FieldSpec({spec.name!r}): load_image_using_pil and load_using_io exclude each other: pass one."
            )
        shape_of(spec)
    return tuple(fields)


def shape_of(spec: FieldSpec) -> tuple[int, ...] | None:
    """The shape that a field's bytes are given; None if they are not numbers.

    >>> shape_of(FieldSpec("x", (28, 28))), shape_of(FieldSpec("x", 784)), shape_of(FieldSpec("x"))
    ((28, 28), (784,), None)
    """
    declared = spec.decode_numpy_and_apply_shape
    if not declared:
        return None
    sizes = (declared,) if isinstance(declared, (int, np.integer)) else tuple(declared)
    is_shape = all(isinstance(size, (int, np.integer)) and (size > 0 or size == -1) for size in sizes)
    if not is_shape or sum(size == -1 for size in sizes) > 1:
        raise ValueError(
            f"FieldSpec({spec.name!r}): decode_numpy_and_apply_shape must be a shape such as (28, 28), in which one "
            f"size may be -1, got {declared!r:.80}."
        )
    return tuple(int(size) for size in sizes)


def functions_of(spec: FieldSpec) -> tuple[Callable[[Any], Any], ...]:
    """What is called for each value of a field after its bytes became numbers, one after the other."""
    functions: list[Callable[[Any], Any]] = []
    if spec.load_image_using_pil:
        functions.append(open_picture)
    if spec.load_using_io:
        functions.append(io.BytesIO)
    if spec.transform is not None:
        functions.append(spec.transform)
    return tuple(functions)


def as_numbers(data: Any, shape: tuple[int, ...]) -> Any:
    """Bytes as uint8 numbers, in memory of their own: torch warns of arrays that cannot be written to."""
    return np.frombuffer(bytearray(data), np.uint8).reshape(shape)


def open_picture(data: Any) -> Any:
    """A picture as Pillow opens it: its pixels are not decoded yet."""
    return _pillow().open(io.BytesIO(data))


def check_pillow() -> None:
    """Raise MissingDependencyError unless Pillow is installed."""
    _pillow()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError(
            "load_image_using_pil needs Pillow: pip install 'spark-tensor-converter[images]'."
        ) from error
    return Image


def decode_and_transform_record(item: dict[str, Any], field_specs: Sequence[FieldSpec]) -> Any:
    """A row after its fields were decoded and transformed, in place.

    >>> decode_and_transform_record({"x": bytes(4)}, [FieldSpec("x", (2, 2), transform=lambda x: x.shape)])
    {'x': (2, 2)}
    """
    for spec in field_specs:
        value, shape = item[spec.name], shape_of(spec)
        if shape is not None:
            value = as_numbers(value, shape)
        for function in functions_of(spec):
            value = function(value)
        item[spec.target_name or spec.name] = value
    record: Any = item
    for spec in field_specs:
        if spec.full_record_transform is not None:
            record = spec.full_record_transform(record)
    return record
