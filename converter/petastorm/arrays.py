"""Arrays in the bytes of `numpy.save` and `numpy.savez_compressed`: whole columns of them, and nothing is unpickled."""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.decoders import NumPy
from converter.decoders.npy import read_header, undisturbed
from converter.petastorm.columns import buffers_of, to_column

Array = npt.NDArray[Any]

_NPY_1 = b"\x93NUMPY\x01\x00"
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
    loaded: Array = undisturbed(lambda: np.load(io.BytesIO(raw), allow_pickle=False))
    return loaded


def load_npz(raw: Any) -> Array:
    """The array called `arr` in `.npz` bytes.

    Raises:
        ValueError, KeyError, EOFError, zipfile.BadZipFile: the bytes hold no such array, or one of Python objects.
    """

    def load() -> Array:
        loaded = np.load(io.BytesIO(raw), allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise ValueError("the bytes are no .npz file, but an .npy file, which NdarrayCodec reads")
        with loaded:
            array: Array = loaded["arr"]
            return array

    return undisturbed(load)


def npy_column(values: pa.Array) -> Array:
    """Arrays in `.npy` bytes as one array if all have one shape and dtype and none is null; else as objects.

    Raises:
        ValueError, EOFError: as `load_npy`.
    """
    column = values.cast(pa.large_binary())
    return _alike(column) if _may_be_alike(column) else _rows(column, _load)


def npz_column(values: pa.Array) -> Array:
    """Arrays in `.npz` bytes as one array if all have one shape and dtype and none is null; else as objects.

    Raises:
        ValueError, KeyError, EOFError, zipfile.BadZipFile: as `load_npz`.
    """

    def load(raw: memoryview) -> Array:
        unpacked = _unpacked_member(raw)
        return load_npz(raw) if unpacked is None else _load(memoryview(unpacked))

    return _rows(values, load)


def _may_be_alike(column: pa.Array) -> bool:
    """Whether all rows have one size."""
    if not len(column) or column.null_count:
        return False
    sizes = pc.min_max(pc.binary_length(column))
    return bool(sizes["min"].as_py() == sizes["max"].as_py())


def _alike(column: pa.Array) -> Array:
    """Rows of one size, copied at once if their headers are equal."""
    first = _load(memoryview(column[0].as_buffer()).cast("B"))
    try:
        # A dtype, not its name, which says nothing of a text's length.
        decoded: Any = NumPy(first.dtype.newbyteorder("="), first.shape).decode(column)
    except ValueError:
        return _rows(column, _load)
    array: Array = decoded
    return array


def _rows(column: pa.Array, load: Callable[[memoryview], Array]) -> Array:
    return to_column([None if raw is None else load(raw) for raw in buffers_of(column)])


def _load(raw: memoryview) -> Array:
    """As `load_npy`; headers that were seen before are not read again."""
    if raw[:8] != _NPY_1:
        return load_npy(raw)
    stop = 10 + int.from_bytes(raw[8:10], "little")
    dtype, shape, order, num_bytes = read_header(raw[:stop].tobytes())
    if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype} {shape}, which cannot be read without unpickling")
    count = math.prod(shape)
    array = np.frombuffer(raw, dtype, count, num_bytes) if count else np.empty(0, dtype)
    return np.array(array.reshape(shape, order=order))


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
