"""What columns become on their way into a batch: bytes are decoded, values are codes, numbers are standardised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from converter.categories import Categories
from converter.decoders.decoder import Decoder, ndim_of
from converter.schema import Field, Scale, Schema


def schema_of_batches(
    stored: Schema,
    decoders: Mapping[str, Decoder],
    categories: Mapping[str, Categories],
    scales: Mapping[str, Scale | None],
    float_dtype: str,
) -> Schema:
    """The columns as batches have them; `stored` are those of the files.

    Standardised integers and doubles are `float_dtype`.
    """
    if not decoders and not categories and not scales:
        return stored
    fields = []
    for column in stored:
        if column.name in decoders:
            fields.append(_decoded(column, decoders[column.name]))
        elif column.name in categories:
            fields.append(categories[column.name].field_of(column))
        elif column.name in scales:
            dtype = column.dtype if column.dtype in ("float16", "float32") else float_dtype
            fields.append(replace(column, dtype=dtype, scale=scales[column.name]))
        else:
            fields.append(column)
    return Schema(tuple(fields))


def schema_of_values(stored: Schema, categories: Mapping[str, Categories]) -> Schema:
    """The columns as they are compared: codes in the files as the values that they stand for."""
    if not categories:
        return stored
    return Schema(
        tuple(
            categories[column.name].value_field_of(column) if column.name in categories else column for column in stored
        )
    )


def check_declared(
    stored: Schema,
    decoders: Mapping[str, Decoder],
    categories: Mapping[str, Categories],
    scales: Mapping[str, Scale | None],
) -> None:
    """Raise ValueError unless the columns in the files can become that."""
    for name in decoders:
        column = stored.get(name)
        if column is None or column.dtype != "bytes" or column.shape != ():
            raise ValueError(f"column {name!r} is decoded and has no bytes")
    for name, scale in scales.items():
        column = stored.get(name)
        if column is None or column.shape is None or not column.dtype.startswith(("int", "uint", "float")):
            raise ValueError(f"column {name!r} is standardised and has no numbers of one shape")
        if scale is not None and not (math.isfinite(scale.mean) and 0 < scale.std < math.inf):
            raise ValueError(f"column {name!r} is standardised by {tuple(scale)}")
    for name, values in categories.items():
        column, kind = stored.get(name), "int32" if values.are_coded else values.kind
        is_held = column is not None and name not in decoders and _holds(column.dtype, kind)
        if column is None or not is_held or (values.are_coded and column.shape != ()):
            raise ValueError(f"column {name!r} has categories and is none of {kind}")


def _decoded(column: Field, decoder: Decoder) -> Field:
    """A column of bytes as its decoder hands it out."""
    kind = getattr(decoder, "name", type(decoder).__name__).rpartition(".")[2]
    return replace(column, dtype=decoder.dtype, shape=decoder.shape, ragged_ndim=ndim_of(decoder) or 1, decoder=kind)


def _holds(dtype: str, kind: str) -> bool:
    """Whether values of a dtype are categories of a kind; whole numbers of any width are."""
    return dtype == kind or (kind == "int64" and dtype in ("int8", "int16", "int32"))
