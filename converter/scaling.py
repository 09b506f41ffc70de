"""Columns that arrive standardised, as users name them: checked against the columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from converter.schema import Scale, Schema, by_column

StandardizeOption = Sequence[str] | Mapping[str, tuple[float, float] | None] | None
"""Names of columns; with mean and standard deviation where the data do not decide them."""


def check_standardize(standardize: Any, schema: Schema) -> dict[str, Scale | None]:
    """The columns that a user wants standardised, and the numbers if they were given.

    Args:
        standardize: a list of names, or a dict of name to (mean, std); None there means those of the data.
        schema: the columns as batches have them.

    Raises:
        TypeError: it is neither.
        ValueError: a column does not exist or holds no numbers, or a mean or std is none.
    """
    given = by_column("standardize", standardize, "(mean, std)")
    return {name: _check_scale(name, scale, schema) for name, scale in given.items()}


def standardized_names(standardize: Any) -> frozenset[str]:
    """The names in the option `standardize`; none if it is no list or dict of names, which `check_standardize` says."""
    is_listed = isinstance(standardize, (Mapping, Sequence)) and not isinstance(standardize, str)
    return frozenset(name for name in standardize if isinstance(name, str)) if is_listed else frozenset()


def _check_scale(name: Any, scale: Any, schema: Schema) -> Scale | None:
    field = schema.get(name) if isinstance(name, str) else None
    if field is None:
        raise ValueError(f"standardize: {schema.explain_missing(str(name))}")
    is_number = field.dtype.startswith(("int", "uint", "float")) and field.categories is None
    if not is_number or field.shape is None or field.decoder:
        hint = " Bytes that are decoded have no statistics: divide in transform=." if field.decoder else ""
        raise ValueError(
            f"standardize: column {name!r} is {field.shown_dtype} of shape {field.shown_shape}; only numbers of one "
            f"shape can be standardised.{hint}"
        )
    if scale is None:
        return None
    try:
        mean, std = scale
        if not all(isinstance(number, (int, float, np.number)) and not isinstance(number, bool) for number in scale):
            raise TypeError("no numbers")
        mean, std = float(mean), float(std)
    except (TypeError, ValueError) as error:
        raise ValueError(f"standardize: {name!r} needs (mean, std) or None, got {scale!r:.80}.") from error
    largest = 1e300 if field.dtype == "float64" else 3e38  # Of float32.
    if not (abs(mean) < largest and 1 / largest < std < largest):
        kind = "float64" if field.dtype == "float64" else "float32"
        raise ValueError(
            f"standardize: {name!r} needs a finite mean and a std above 0 that {kind} holds, got {scale!r:.80}."
        )
    return Scale(mean, std)
