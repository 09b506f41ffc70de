"""Bytes of NumPy's own formats: `.npy`, and one array of an `.npz`."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]

_MAGIC = b"\x93NUMPY"


@dataclass(frozen=True, slots=True)
class NumPy:
    """Decodes `.npy` bytes, as `numpy.save` writes them; objects are refused, because nothing is unpickled.

    >>> NumPy("float32", (28, 28)).shape
    (28, 28)

    Args:
        dtype: the dtype of every row; None takes the first row's when the converter is made. Byte order does not
            matter, nor whether a row is in C or Fortran order.
        shape: the shape of every row; None if rows differ; `"first"` takes the first row's when the converter is made.
        ndim: dimensions of a row, if `shape` is None.
        key: the name of an array in `.npz` bytes, as `numpy.savez` writes them; None for `.npy`.
        on_error: `"skip"` leaves rows that cannot be decoded out of the dataset, at the cost of a pass when the
            converter is made.
    """

    dtype: Any = None
    shape: Any = "first"
    ndim: int = 1
    key: str | None = None
    on_error: Literal["raise", "skip"] = "raise"

    def decode(self, values: pa.LargeBinaryArray) -> Array | Sequence[Array]:
        """The rows as one array `(len(values), *shape)`; if they differ in shape, as a list.

        Raises:
            ValueError: the bytes are no array, or one of another dtype or shape.
        """
        if self.shape is None:
            return [self._row(value.as_buffer()) for value in values]
        out = np.empty((len(values), *self.shape), self.dtype)
        self.decode_into(values, out)
        return out

    def decode_into(self, values: pa.LargeBinaryArray, out: Array) -> None:
        """Decode rows of one shape into an array `(len(values), *shape)`: at once where their headers are equal.

        Raises:
            ValueError: as `decode`.
        """
        if self.key is None and self._copy_alike(values, out):
            return
        for value, row in zip(values, out, strict=True):
            array = self._row(value.as_buffer())
            if array.shape != self.shape:
                raise ValueError(f"an array of shape {array.shape}, expected {self.shape}")
            row[...] = array

    def _copy_alike(self, values: pa.LargeBinaryArray, out: Array) -> bool:
        """Copy all rows, if all have the first row's header and that is the right one; else return False."""
        _, offsets, data = values.buffers()
        edges = np.frombuffer(offsets, np.int64, len(values) + 1, values.offset * 8)
        sizes = np.diff(edges)
        if (sizes != sizes[0]).any() or sizes[0] < len(_MAGIC) + 4:
            return False
        rows = np.frombuffer(data, np.uint8, int(edges[-1] - edges[0]), int(edges[0])).reshape(len(values), -1)
        first = _read(rows[0].tobytes(), None)
        header = rows.shape[1] - first.nbytes
        is_right = first.shape == self.shape and first.dtype.newbyteorder("=") == np.dtype(self.dtype)
        if not is_right or not first.nbytes or _differ(rows[:, :header]):
            return False
        is_fortran = first.flags.f_contiguous and not first.flags.c_contiguous
        if first.dtype == out.dtype and not is_fortran and out.flags.c_contiguous:
            # As bytes: a row need not begin where numbers may.
            out.reshape(len(values), -1).view(np.uint8)[...] = rows[:, header:]
            return True
        numbers = np.ascontiguousarray(rows[:, header:]).view(first.dtype)
        if is_fortran:
            numbers = numbers.reshape(len(values), *first.shape[::-1]).transpose(0, *range(first.ndim, 0, -1))
        out[...] = numbers.reshape(out.shape)
        return True

    def _row(self, data: Any) -> Array:
        array = _read(data, self.key)
        if array.dtype.newbyteorder("=") != np.dtype(self.dtype):
            raise ValueError(f"an array of {array.dtype}, expected {self.dtype}")
        if self.shape is None and array.ndim != self.ndim:
            raise ValueError(f"an array of {array.ndim} dimensions, expected {self.ndim}")
        return array.astype(self.dtype, copy=False)


def _differ(headers: Array) -> bool:
    """Whether a header is another one than the first; compared eight bytes at a time if possible."""
    if headers.shape[1] % 8 == 0:
        headers = np.ascontiguousarray(headers).view(np.uint64)
    return bool((headers != headers[0]).any())


def is_settled(decoder: object) -> bool:
    """Whether a decoder's dtype and shape are known before the first row is looked at."""
    return not isinstance(decoder, NumPy) or (decoder.dtype is not None and decoder.shape != "first")


def settled(decoder: NumPy, first: Any) -> NumPy:
    """The decoder with what it lacks taken from the bytes of the first row.

    Raises:
        ValueError: they are no array.
    """
    array = _read(first, decoder.key)
    shape = array.shape if decoder.shape == "first" else decoder.shape
    return NumPy(
        dtype=decoder.dtype or array.dtype.newbyteorder("=").name,
        shape=shape,
        ndim=array.ndim if shape is None else decoder.ndim,
        key=decoder.key,
        on_error=decoder.on_error,
    )


def _read(data: Any, key: str | None) -> Array:
    """The array in `.npy` bytes, or the one called `key` in `.npz` bytes."""
    stream = io.BytesIO(data)
    if key is None:
        if stream.read(len(_MAGIC)) != _MAGIC:
            instead = "; these are .npz bytes, which need key=…" if zipfile.is_zipfile(stream) else ""
            raise ValueError(f"the bytes are no .npy file (as numpy.save writes it){instead}")
        stream.seek(0)
        array: Array = np.lib.format.read_array(stream, allow_pickle=False)
        if stream.read(1):
            raise ValueError("more bytes follow the array of the .npy file")
        return array
    wrong = ValueError(f"the bytes are no .npz file with an array {key!r}")
    if not zipfile.is_zipfile(stream):
        raise wrong
    stream.seek(0)
    with np.load(stream, allow_pickle=False) as arrays:
        if key not in arrays:
            raise wrong
        member: Array = arrays[key]
        return member
