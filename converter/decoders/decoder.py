"""What a decoder is: a dtype, a shape, and one method for a whole column of bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.decoders.npy import is_settled, undisturbed

Array = npt.NDArray[Any]

DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64",
)  # fmt: skip
"""Dtypes that a decoder can have."""


_MAX_NDIM = 31
"""As in `schema`: a batch adds one to NumPy's 32."""

_RAGGED_ROW_BYTES = 64 << 10
"""What a row counts as if rows differ in shape: nobody knows their sizes before they are decoded."""


class Decoder(Protocol):
    """Turns a column of bytes into tensors, in the reader threads. Any object with these parts is one.

    ```python
    import numpy as np

    class Features:
        dtype, shape = "float32", (4,)

        def decode(self, values):  # pyarrow.LargeBinaryArray without nulls
            return np.stack([np.frombuffer(value.as_buffer(), "<f4") for value in values])

    converter = make_parquet_converter("/data/features", decode={"features": Features()})
    print(converter.head(2)["features"])
    ```

    One with a shape may also have a method `decode_into(values, out)`, which fills an array `(len(values), *shape)`: it
    saves a copy, and is then called instead.

    It must release the GIL to run in several threads at once. One that does not is faster in worker processes
    (`num_workers`); then it must be picklable.
    """

    @property
    def dtype(self) -> str:
        """The name of a NumPy dtype."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one row; None if rows differ. Then an attribute `ndim` says how many dimensions they have."""

    def decode(self, values: pa.LargeBinaryArray) -> Array | Sequence[Array]:
        """The rows `values`, none of which is null, as one array `(len(values), *shape)`; if rows differ, as a list.

        An exception means that a row cannot be decoded: rows are then tried one by one to name it.
        """


class WrongDecoderError(TypeError):
    """A decoder returned something else than it promised: its rows are not to blame."""


@dataclass(frozen=True, slots=True)
class NamedDecoder:
    """Stands for a user's decoder in a manifest that was read from storage: no code is stored."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    ndim: int = 1

    def decode(self, values: pa.LargeBinaryArray) -> Array:
        """Decodes nothing; whoever opens the cache entry must pass the decoder again."""
        raise NotImplementedError(f"pass {self.name} again")


def ndim_of(decoder: Decoder) -> int:
    """Dimensions of a row."""
    return len(decoder.shape) if decoder.shape is not None else int(getattr(decoder, "ndim", 1))


def row_bytes(decoder: Decoder) -> int:
    """Bytes of one decoded row; a guess if rows differ in shape."""
    if decoder.shape is None:
        return _RAGGED_ROW_BYTES
    return max(1, math.prod(decoder.shape) * np.dtype(decoder.dtype).itemsize)


def skips_errors(decoder: Decoder) -> bool:
    """Whether rows that cannot be decoded are left out of the dataset, instead of being an error."""
    return getattr(decoder, "on_error", "raise") == "skip"


def check_decoder(name: str, decoder: Any) -> None:
    """Refuse what is no decoder; one that is settled by the first row is checked then.

    Raises:
        TypeError: a part is missing or has another type; the message names the column and the part.
        ValueError: no tensor has its dtype or shape.
    """
    shown = f"decode: {decoder!r} of column {name!r}"
    missing = [part for part in ("dtype", "shape", "decode") if not hasattr(decoder, part)]
    if missing or isinstance(decoder, type) or not callable(decoder.decode):
        what = "is a class; pass an object of it" if isinstance(decoder, type) else "has no " + ", no ".join(missing)
        raise TypeError(f"{shown} {what}. A decoder is Image(), NumPy(), or an object with dtype, shape and decode().")
    if getattr(decoder, "on_error", "raise") not in ("raise", "skip"):
        raise ValueError(f"{shown} has on_error={decoder.on_error!r}; it can be 'raise' or 'skip'.")
    if not is_settled(decoder):
        return
    if decoder.dtype not in DTYPES:
        raise ValueError(f"{shown} has the dtype {decoder.dtype!r}; it can be {', '.join(DTYPES)}.")
    shape = decoder.shape
    is_shape = isinstance(shape, tuple) and all(isinstance(size, int) and size > 0 for size in shape)
    ndim = getattr(decoder, "ndim", 1)
    if shape is None and not (type(ndim) is int and 1 <= ndim <= _MAX_NDIM):
        raise ValueError(f"{shown} has ndim={ndim!r}; rows that differ have 1 to {_MAX_NDIM} dimensions.")
    if shape is not None and not is_shape:
        raise ValueError(f"{shown} has the shape {shape!r}; it needs a tuple of sizes above 0, or None if rows differ.")


def check_decode(decode: Any, dtypes: Mapping[str, str]) -> Mapping[str, Decoder]:
    """The decoders that a user gave, checked; `dtypes` are those of all columns, `"array"` of arrays.

    Raises:
        TypeError: it is no dict of decoders.
        ValueError: a column does not exist, or holds no bytes.
    """
    if decode is None:
        return {}
    if not isinstance(decode, Mapping) or not all(isinstance(name, str) for name in decode):
        raise TypeError(
            f"decode must be a dict of column name to decoder, e.g. {{'image': Image()}}, got {decode!r:.80}."
        )
    for name, decoder in decode.items():
        if name not in dtypes:
            names = ", ".join(map(repr, list(dtypes)[:20]))
            raise ValueError(f"decode names the column {name!r}, which does not exist. The columns are {names}.")
        if dtypes[name] != "bytes":
            raise ValueError(f"decode: column {name!r} has the type {dtypes[name]}; only binary columns are decoded.")
        check_decoder(name, decoder)
    return dict(decode)


class ColumnDecoder:
    """Decodes a whole column for a task that writes the tensors; travels to executors with its decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __call__(self, values: pa.LargeBinaryArray) -> tuple[Array, npt.NDArray[np.int64]]:
        """The numbers of rows that are not null, one after the other, and each row's shape, `(rows, ndim)`."""
        decoder, num_rows = self._decoder, len(values)
        dtype = np.dtype(decoder.dtype)
        if decoder.shape is not None:
            out = np.empty((num_rows, *decoder.shape), dtype)
            decode_rows(decoder, values, out)
            shapes = np.broadcast_to(np.array(decoder.shape, np.int64), (num_rows, len(decoder.shape)))
            return out.reshape(-1), shapes
        rows = decode_rows(decoder, values, None) or ()
        shapes = np.array([row.shape for row in rows], np.int64).reshape(num_rows, ndim_of(decoder))
        return (np.concatenate([row.reshape(-1) for row in rows]) if rows else np.empty(0, dtype)), shapes


def _overrides_decode(kind: type) -> bool:
    """Whether a class has a `decode` of its own, and `decode_into` from one that it derives from."""
    first = next((each for each in kind.__mro__ if {"decode", "decode_into"} & vars(each).keys()), kind)
    return "decode_into" not in vars(first)


def decode_rows(decoder: Decoder, values: pa.LargeBinaryArray, out: Array | None) -> Sequence[Array] | None:
    """Decode rows that are not null into `out`, `(len(values), *shape)`; without `out` return them as a list.

    Raises:
        WrongDecoderError: the decoder returned something else than it promised.
    """
    if not len(values):
        return [] if out is None else None
    decode_into = getattr(decoder, "decode_into", None)
    if out is not None and decode_into is not None and not _overrides_decode(type(decoder)):
        undisturbed(lambda: decode_into(values, out))
        return None
    decoded: Any = undisturbed(lambda: decoder.decode(values))
    if not hasattr(decoded, "__len__") or len(decoded) != len(values):
        found = f"{len(decoded)} rows" if hasattr(decoded, "__len__") else type(decoded).__name__
        raise WrongDecoderError(f"decode() returned {found}, expected {len(values)} rows")
    if out is not None:
        array = np.asarray(decoded)
        if array.dtype != out.dtype or array.shape != out.shape:
            raise WrongDecoderError(
                f"decode() returned {array.dtype} of shape {array.shape}, expected {out.dtype} of shape {out.shape}"
            )
        out[...] = array
        return None
    rows = [np.asarray(row) for row in decoded]
    ndim, dtype = ndim_of(decoder), np.dtype(decoder.dtype)
    odd = next((row for row in rows if row.dtype != dtype or row.ndim != ndim), None)
    if odd is not None:
        raise WrongDecoderError(
            f"decode() returned a row of {odd.dtype} with {odd.ndim} dimensions, expected {dtype} with {ndim}"
        )
    return rows
