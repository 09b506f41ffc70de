"""A bound of a column chunk, as Parquet stores a value of the chunk's physical type, as a value of Arrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


def bound(raw: bytes | None, physical: str, kind: pa.DataType) -> pa.Scalar | None:
    """A bound of a column chunk as Arrow's value of type `kind`; None if it is absent, damaged, or of another type.

    `physical` is Parquet's name of the type that it is stored in.

    >>> bound(bytes([1, 0, 0, 0]), "INT32", pa.date32())
    <pyarrow.Date32Scalar: datetime.date(1970, 1, 2)>
    """
    if raw is None:
        return None
    types = pa.types
    if types.is_decimal(kind):
        return _decimal(raw, physical, kind)
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if physical == "BYTE_ARRAY" and (is_text or types.is_binary(kind) or types.is_large_binary(kind)):
        try:
            return pa.scalar(raw.decode() if is_text else raw, kind)
        except UnicodeDecodeError:
            return None
    if physical == "FIXED_LEN_BYTE_ARRAY" and types.is_fixed_size_binary(kind):
        return pa.scalar(raw, kind) if len(raw) == kind.byte_width else None
    if physical == "BOOLEAN" and types.is_boolean(kind):
        return pa.scalar(raw != b"\0", kind) if len(raw) == 1 else None
    stored = _STORED.get(physical)
    if stored is None or len(raw) != stored.itemsize or not _is_stored_as(kind, physical):
        return None
    number = np.frombuffer(raw, stored)
    if types.is_temporal(kind):
        return pa.array(number).view(kind)[0]
    # Narrow and unsigned integers are stored as wider, signed ones.
    return pa.array(number.astype(kind.to_pandas_dtype()), kind)[0]


_STORED: dict[str, np.dtype[Any]] = {
    "INT32": np.dtype("<i4"), "INT64": np.dtype("<i8"), "FLOAT": np.dtype("<f4"), "DOUBLE": np.dtype("<f8"),
}  # fmt: skip


def _is_stored_as(kind: pa.DataType, physical: str) -> bool:
    types = pa.types
    if types.is_date32(kind) or (types.is_integer(kind) and kind.bit_width <= 32):
        return physical == "INT32"
    if types.is_timestamp(kind) or types.is_integer(kind):
        return physical == "INT64"
    return (types.is_float32(kind) and physical == "FLOAT") or (types.is_float64(kind) and physical == "DOUBLE")


def _decimal(raw: bytes, physical: str, kind: pa.DataType) -> pa.Scalar | None:
    is_little = physical in ("INT32", "INT64")
    if (is_little and len(raw) != _STORED[physical].itemsize) or len(raw) > kind.bit_width // 8 or not raw:
        return None
    number = int.from_bytes(raw, "little" if is_little else "big", signed=True)
    if len(str(abs(number))) > kind.precision:
        return None
    size = kind.bit_width // 8
    buffer = pa.py_buffer(number.to_bytes(size, "little", signed=True))
    return pa.Array.from_buffers(kind, 1, [None, buffer])[0]
