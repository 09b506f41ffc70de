"""Checks fill values, and raises the errors for nulls that no policy covers; `decode` fills nulls and makes masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from converter.errors import NullValueError
from converter.schema import Field

Nulls = Literal["raise", "mask"] | Mapping[str, Any]


def null_element_error(field: Field, *, is_masked: bool) -> NullValueError:
    """The error for arrays with null elements that no policy covers."""
    why = ", although the footers that were read did not show any" if is_masked else ", and nulls='raise'"
    or_mask = "" if is_masked else f"nulls='mask' (adds {field.name + '__element_valid'!r}) or "
    fill = _example_fill(field)
    return NullValueError(
        f"Column {field.name!r} has arrays with null elements{why}. Replace them in Spark, leave the column out with "
        f"columns=…, or pass {or_mask}nulls={{{field.name!r}: {fill!r}}}.",
        column=field.name,
    )


def check_fill(field: Field, value: Any) -> Any:
    """The fill value for nulls of a column, in the column's own dtype.

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
        # Ragged rows take one number, for each null element.
        np.broadcast_to(cast, field.shape or ())
    except (OverflowError, TypeError, ValueError) as error:
        raise wrong from error
    return cast


def has_fill(nulls: Nulls, field: Field) -> bool:
    """Whether a policy fills null rows of a column: a null ragged row has no length to fill."""
    return fills_elements(nulls, field) and field.shape is not None


def fills_elements(nulls: Nulls, field: Field) -> bool:
    """Whether a policy fills null elements of a column."""
    return not isinstance(nulls, str) and field.name in nulls


def null_error(field: Field, *, count: int | None = None, nulls: Nulls = "raise") -> NullValueError:
    """The error for null rows that no policy covers."""
    name, nulls_held = field.name, "nulls" if count is None else f"{count} null{'s' if count > 1 else ''}"
    fill = _example_fill(field)
    or_fill = "" if field.shape is None else f" or nulls={{{name!r}: {fill!r}}}"
    why = (
        "which no value can fill, as its rows differ in length" if fills_elements(nulls, field) else "and nulls='raise'"
    )
    return NullValueError(
        f"Column {name!r} holds {nulls_held}, {why}. Fill or drop them in Spark, leave the column out with "
        f"columns=…, or pass nulls='mask' (adds {name + '__valid'!r}){or_fill}.",
        column=name,
    )


def _example_fill(field: Field) -> Any:
    """A value that can stand for nulls of a column, for messages."""
    return {"str": "", "bytes": b""}.get(field.dtype, "1970-01-01" if field.dtype.startswith("datetime64") else 0)
