"""Finds text that is no UTF-8: Spark and Parquet store it without a word, and Python has no string for it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def find_bad_text(array: pa.Array) -> tuple[int, bytes] | None:
    """The first text that is no UTF-8: its place and its first bytes. None if all are, or the array holds no text."""
    if not (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)) or _is_ascii(array):
        return None
    start, stop = 0, len(array)
    if _is_valid(array):
        return None
    while stop - start > 1:
        middle = (start + stop) // 2
        start, stop = (middle, stop) if _is_valid(array.slice(start, middle - start)) else (start, middle)
    return start, bytes(array[start].as_buffer())[:40]


def _is_ascii(array: pa.Array) -> bool:
    """Whether each byte is ASCII, as in most text, valid however it is cut: a tenth of validating each text."""
    if not len(array):
        return True
    _, offsets, data = array.buffers()
    kind = np.dtype(np.int64 if pa.types.is_large_string(array.type) else np.int32)
    start, stop = np.frombuffer(offsets, kind, len(array) + 1, array.offset * kind.itemsize)[[0, -1]].tolist()
    if data is None or not 0 <= start < stop <= data.size:
        return bool(start == stop)
    raw = np.frombuffer(data, np.uint8, stop - start, start)
    whole = raw[: len(raw) // 8 * 8].view(np.uint64)
    highest = int(np.bitwise_or.reduce(whole)) if len(whole) else 0
    return not highest & 0x8080808080808080 and not (raw[len(whole) * 8 :] & 0x80).any()


def _is_valid(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
