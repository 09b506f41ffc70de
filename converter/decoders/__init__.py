"""How the bytes of a column become tensors: one decoder for each kind, one contract test for all.

A new one is a file here: a frozen dataclass with `dtype`, `shape`, `ndim` and `decode`, entered in `_KINDS` so that a
manifest can name it, and a case in `tests/contracts/decoders.py`. A decoder of a user's own needs neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from converter.decoders.decoder import Decoder, NamedDecoder, check_decoder, ndim_of
from converter.decoders.image import Image
from converter.decoders.npy import NumPy

__all__ = ["Decoder", "Image", "NumPy"]

_KINDS: dict[str, type[Any]] = {"Image": Image, "NumPy": NumPy, "": NamedDecoder}
"""The decoders that a manifest can name; the empty one is a user's own, without its code."""


def is_own(decoder: Decoder) -> bool:
    """Whether it is of a user's own class."""
    return type(decoder) not in _KINDS.values()


def to_json(decoder: Decoder) -> dict[str, Any]:
    """A decoder as plain JSON values; of a user's own only its name, because no code is stored.

    >>> to_json(Image(size=(8, 8)))["size"]
    [8, 8]
    """
    known = next((kind for kind, decoder_class in _KINDS.items() if type(decoder) is decoder_class), None)
    if known is None:
        name = f"{type(decoder).__module__}.{type(decoder).__qualname__}"
        return to_json(NamedDecoder(name, decoder.dtype, decoder.shape, ndim_of(decoder)))
    fields = dataclasses.fields(decoder)  # type: ignore[arg-type]
    options = {field.name: getattr(decoder, field.name) for field in fields}
    return {"kind": known} | {
        name: list(option) if isinstance(option, tuple) else option for name, option in options.items()
    }


def from_json(value: Mapping[str, Any]) -> Decoder:
    """The decoder that `to_json` described; one of a user's own as a `NamedDecoder`, which decodes nothing.

    Raises:
        KeyError, TypeError, ValueError: it is not what `to_json` returns.
    """
    options = {name: tuple(option) if isinstance(option, list) else option for name, option in value.items()}
    decoder: Decoder = _KINDS[str(options.pop("kind"))](**options)
    check_decoder("", decoder)
    return decoder
