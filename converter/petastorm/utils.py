"""Decoding of single rows, and helpers that programs import from Petastorm's module of this name."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping
from typing import Any

from converter.petastorm.columns import convert_scalar
from converter.petastorm.errors import DecodeFieldError
from converter.petastorm.unischema import Unischema

__all__ = ["DecodeFieldError", "decode_row", "run_in_subprocess"]


def decode_row(row: Mapping[str, Any], schema: Unischema) -> dict[str, Any]:
    """The stored values of a row as their fields' codecs and dtypes have them; values without a field are left out.

    Raises:
        DecodeFieldError: a value cannot be decoded; the message names the field.
    """
    return {name: _decoded(schema.fields[name], value) for name, value in row.items() if name in schema.fields}


def _decoded(field: Any, value: Any) -> Any:
    if value is None:
        return None
    try:
        if field.codec:
            return field.codec.decode(field, value)
        return convert_scalar(field.numpy_dtype, value)
    except ImportError:
        raise
    except Exception as error:  # a user's codec may raise anything
        raise DecodeFieldError(f'Decoding field "{field.name}" failed: {error}') from error


def run_in_subprocess(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function returns that is called in a process of its own, which ends with it.

    The function must be one of a module's top level, because the process finds it by its name.
    """
    with multiprocessing.Pool(1) as pool:
        return pool.apply(func, args, kwargs)
