"""Bytes of NumPy's own formats: `.npy`, and one array of an `.npz`."""

from __future__ import annotations

import contextlib
import io
import math
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[Any]
Result = TypeVar("Result")

_MAGIC = b"\x93NUMPY"
_MOST_HEADER_BYTES = 1 << 16
"""NumPy refuses headers of more than 10,000."""

_NDIM = 1
"""What `NumPy` has if nothing is said."""

_MOST_HEADERS = 1000
"""Headers that are kept."""

_MOST_DISTURBANCES = 10
"""Two of 100 passes over 400 rows were disturbed once, with two busy cores."""


# Without slots: their state could not be set where Spark 3.5's cloudpickle has sent the class.
@dataclass(frozen=True)
class NumPy:
    """Decodes `.npy` bytes, as `numpy.save` writes them; objects are refused, because nothing is unpickled.

    >>> NumPy("float32", (28, 28)).shape
    (28, 28)

    Args:
        dtype: the dtype of every row; None takes the first row's when the converter is made. Byte order does not
            matter, nor whether a row is in C or Fortran order.
        shape: the shape of every row; None if rows differ; `"first"` takes the first row's when the converter is made.
        ndim: dimensions of a row, if `shape` is None; with `dtype=None`, 1 takes the first row's.
        key: the name of an array in `.npz` bytes, as `numpy.savez` writes them; None for `.npy`.
        on_error: `"skip"` leaves rows that cannot be decoded out of the dataset, at the cost of a pass when the
            converter is made.
    """

    dtype: Any = None
    shape: Any = "first"
    ndim: int = _NDIM
    key: str | None = None
    on_error: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        # By its name, as a manifest has it: a dtype is also given as `np.float32`, `np.dtype("float32")` or `">f4"`.
        with contextlib.suppress(TypeError):
            if self.dtype is not None and (found := np.dtype(self.dtype)).kind in "biuf":
                object.__setattr__(self, "dtype", found.name)

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
        for row, value in enumerate(values):
            array = self._row(value.as_buffer())
            if array.shape != self.shape:
                raise ValueError(f"an array of shape {array.shape}, expected {self.shape}")
            out[row] = array

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
        most_bytes = None if self.shape is None else math.prod(self.shape) * np.dtype(self.dtype).itemsize
        array = _read(data, self.key, most_bytes)
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
        ValueError: they are no array, or one of another dtype or of other dimensions than the user said.
    """
    array = _read(first, decoder.key)
    if decoder.dtype is not None and array.dtype.newbyteorder("=") != np.dtype(decoder.dtype):
        raise ValueError(f"an array of {array.dtype}, expected {decoder.dtype}")
    if decoder.shape is None and decoder.ndim not in (_NDIM, array.ndim):
        raise ValueError(f"an array of {array.ndim} dimensions, expected {decoder.ndim}")
    shape = array.shape if decoder.shape == "first" else decoder.shape
    return NumPy(
        dtype=decoder.dtype or array.dtype.newbyteorder("=").name,
        shape=shape,
        ndim=array.ndim if shape is None else decoder.ndim,
        key=decoder.key,
        on_error=decoder.on_error,
    )


def _read(data: Any, key: str | None, most_bytes: int | None = None) -> Array:
    """The array in `.npy` bytes, or the one called `key` in `.npz` bytes, which may have up to `most_bytes`."""
    if key is None:
        return _read_npy(data)
    stream = io.BytesIO(data)
    wrong = ValueError(f"the bytes are no .npz file with an array {key!r}")
    if not zipfile.is_zipfile(stream):
        raise wrong
    with zipfile.ZipFile(stream) as members:
        name = next((name for name in (f"{key}.npy", key) if name in members.namelist()), None)
        if name is None:
            raise wrong
        # What it says of its size is all that is unpacked of it: a small file may hold gigabytes of zeros.
        num_bytes = members.getinfo(name).file_size
        if most_bytes is not None and num_bytes > most_bytes + _MOST_HEADER_BYTES:
            raise ValueError(f"an array of {num_bytes:,} bytes, expected {most_bytes:,}")
        return _read_npy(members.read(name))


def _read_npy(data: Any) -> Array:
    """The array in `.npy` bytes, as a view of them."""
    raw = memoryview(data).cast("B")
    start = bytes(raw[: len(_MAGIC) + 6])
    if not start.startswith(_MAGIC):
        instead = "; these are .npz bytes, which need key=…" if zipfile.is_zipfile(io.BytesIO(data)) else ""
        raise ValueError(f"the bytes are no .npy file (as numpy.save writes it){instead}")
    dtype, shape, order, num_bytes = read_header(bytes(raw[: _header_bytes(start)]))
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which would have to be unpickled; that is never done")
    count, found = math.prod(shape), raw.nbytes - num_bytes
    if found != count * dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{found:,} bytes follow the header, and an array of {dtype} {shape} was promised")
    array: Array = np.frombuffer(data, dtype, count, num_bytes)
    return array.reshape(shape, order=order)


def _header_bytes(start: bytes) -> int:
    """How long the header is, by the first bytes of `.npy` bytes; never much longer than NumPy allows."""
    first = len(_MAGIC) + 2
    # The length of the rest, which has two bytes in version 1 and four since.
    stop = first + (2 if start[len(_MAGIC) : first] == b"\x01\x00" else 4)
    return min(stop + int.from_bytes(start[first:stop], "little"), _MOST_HEADER_BYTES)


class Header(NamedTuple):
    """What `.npy` bytes begin with."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    num_bytes: int


class _Headers(dict[bytes, Header]):
    """Headers that were read. They stay here when this module travels to executors."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Headers, ()


_known = _Headers()


def read_header(text: bytes) -> Header:
    """A header, given its bytes; those that were read are kept, because that takes longer than copying a small row.

    Raises:
        ValueError: NumPy cannot read it.
    """
    known = _known.get(text)
    if known is None:
        shape, is_fortran, dtype = undisturbed(lambda: _read_parts(io.BytesIO(text)))
        known = Header(dtype, shape, "F" if is_fortran else "C", len(text))
        if len(_known) >= _MOST_HEADERS:
            _known.clear()
        _known[text] = known
    return known


def _read_parts(stream: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"an .npy file of version {version[0]}.{version[1]}, which NumPy does not know")
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    # Version 3 is version 2 for names that are not ASCII, which arrays of numbers do not have.
    return np.lib.format.read_array_header_2_0(stream)


def undisturbed(decode: Callable[[], Result]) -> Result:
    """What `decode` returns, which is called again if another thread disturbed it.

    NumPy evaluates the headers of arrays as literals, and others do so with what they read. CPython 3.11 counts in one
    number how deep all threads are in theirs: a thread whose count is wrong in the end gets a SystemError, as if its
    bytes could not be read (https://github.com/python/cpython/issues/106905).
    """
    for _ in range(_MOST_DISTURBANCES):
        try:
            return decode()
        except SystemError:
            pass
    return decode()
