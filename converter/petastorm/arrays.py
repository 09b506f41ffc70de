"""Arrays in the bytes of `numpy.save` and `numpy.savez_compressed`: whole columns of them, and nothing is unpickled."""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.decoders import NumPy
from converter.petastorm.columns import buffers_of, to_column

Array = npt.NDArray[Any]

_NPY_1 = b"\x93NUMPY\x01\x00"
_MAX_KEPT_HEADERS = 1000
# Signature, version, flags, method, time, date, CRC, packed and unpacked size, lengths of the name and of extra fields.
_ZIP_HEADER = struct.Struct("<4s5H3I2H")
_ZIP_SIGNATURE = b"PK\x03\x04"
_ZIP64, _ZIP64_SIZES = 1, struct.Struct("<HHQQ")
_DEFLATED = 8
_MEMBER = b"arr.npy"


def load_npy(raw: Any) -> Array:
    """The array in `.npy` bytes.

    Raises:
        ValueError, EOFError: the bytes hold no array, or one of Python objects.
    """
    loaded: Array = np.load(io.BytesIO(raw), allow_pickle=False)
    return loaded


def load_npz(raw: Any) -> Array:
    """The array called `arr` in `.npz` bytes.

    Raises:
        ValueError, KeyError, EOFError, zipfile.BadZipFile: the bytes hold no such array, or one of Python objects.
    """
    loaded = np.load(io.BytesIO(raw), allow_pickle=False)
    if not isinstance(loaded, np.lib.npyio.NpzFile):
        raise ValueError("the bytes are no .npz file, but an .npy file, which NdarrayCodec reads")
    with loaded:
        array: Array = loaded["arr"]
        return array


def npy_column(values: pa.Array) -> Array:
    """Arrays in `.npy` bytes as one array if all have one shape and dtype and none is null; else as objects.

    Raises:
        ValueError, EOFError: as `load_npy`.
    """
    column = values.cast(pa.large_binary())
    return _alike(column) if _may_be_alike(column) else _rows(column, _Headers().load)


def npz_column(values: pa.Array) -> Array:
    """Arrays in `.npz` bytes as one array if all have one shape and dtype and none is null; else as objects.

    Raises:
        ValueError, KeyError, EOFError, zipfile.BadZipFile: as `load_npz`.
    """
    headers = _Headers()

    def load(raw: memoryview) -> Array:
        unpacked = _unpacked_member(raw)
        return load_npz(raw) if unpacked is None else headers.load(memoryview(unpacked))

    return _rows(values, load)


def _may_be_alike(column: pa.Array) -> bool:
    """Whether all rows have one size."""
    if not len(column) or column.null_count:
        return False
    sizes = pc.min_max(pc.binary_length(column))
    return bool(sizes["min"].as_py() == sizes["max"].as_py())


def _alike(column: pa.Array) -> Array:
    """Rows of one size, copied at once if their headers are equal."""
    headers = _Headers()
    first = headers.load(memoryview(column[0].as_buffer()).cast("B"))
    try:
        # A dtype, not its name, which says nothing of a text's length.
        decoded: Any = NumPy(first.dtype.newbyteorder("="), first.shape).decode(column)
    except ValueError:
        return _rows(column, headers.load)
    array: Array = decoded
    return array


def _rows(column: pa.Array, load: Callable[[memoryview], Array]) -> Array:
    return to_column([None if raw is None else load(raw) for raw in buffers_of(column)])


class _Header(NamedTuple):
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Any
    num_bytes: int


class _Headers:
    """Loads arrays whose headers were mostly seen before: reading one takes ten times as long as copying a row."""

    def __init__(self) -> None:
        self._kept: dict[bytes, _Header] = {}

    def load(self, raw: memoryview) -> Array:
        """As `load_npy`."""
        if raw[:8] != _NPY_1:
            return load_npy(raw)
        stop = 10 + int.from_bytes(raw[8:10], "little")
        text = raw[:stop].tobytes()
        header = self._kept.get(text)
        if header is None:
            header = _read_header(text)
            if len(self._kept) < _MAX_KEPT_HEADERS:
                self._kept[text] = header
        count = math.prod(header.shape)
        array = np.frombuffer(raw, header.dtype, count, header.num_bytes) if count else np.empty(0, header.dtype)
        return np.array(array.reshape(header.shape, order=header.order))


def _read_header(text: bytes) -> _Header:
    stream = io.BytesIO(text)
    np.lib.format.read_magic(stream)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype} {shape}, which cannot be read without unpickling")
    return _Header(dtype, shape, "F" if is_fortran else "C", len(text))


def _unpacked_member(raw: memoryview) -> bytes | None:
    """The first file in a ZIP archive if that is `arr.npy`, as `savez_compressed` writes it; else None.

    Python's own reader looks for the archive's table at its end first, which takes longer than to unpack a small array.
    """
    if len(raw) < _ZIP_HEADER.size:
        return None
    signature, _, flags, method, _, _, crc, _, size, name_bytes, extra_bytes = _ZIP_HEADER.unpack_from(raw)
    name_stop = _ZIP_HEADER.size + name_bytes
    is_plain = signature == _ZIP_SIGNATURE and not flags and method == _DEFLATED
    if not is_plain or raw[_ZIP_HEADER.size : name_stop] != _MEMBER:
        return None
    if extra_bytes == _ZIP64_SIZES.size and len(raw) >= name_stop + extra_bytes:
        kind, _, size, _ = _ZIP64_SIZES.unpack_from(raw, name_stop)
        if kind != _ZIP64:
            return None
    unpacked = zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw[name_stop + extra_bytes :], size + 1)
    return unpacked if len(unpacked) == size and zlib.crc32(unpacked) == crc else None
