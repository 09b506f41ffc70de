"""A recipe becomes a converter again, with the same rows, or an error: never with other rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from converter import decoders
from converter.decoders.decoder import Decoder
from converter.errors import ConverterError, SourceChangedError, SourceError
from converter.lineage.recipe import Recipe
from converter.lineage.values import from_json

if TYPE_CHECKING:
    from converter.dataset import DatasetConverter

openers: dict[str, Callable[..., Any]] = {}
"""The function that makes a converter of each kind, and `"view"`. `make` and `mixed`, which stand above, enter them."""


def remake(
    recipe: Recipe, *, fingerprint: str, decode: Mapping[str, Decoder] | None, storage_options: Any
) -> DatasetConverter:
    """The converter that a recipe describes; its rows have this `fingerprint`.

    Raises:
        CacheError: the cache entry is gone, or cannot be read.
        SourceChangedError: the data have other rows, or other files, than then.
        SourceError: the recipe is not complete, or the data are gone.
        ValueError, TypeError: a decoder of the user's own is missing or another one, or an option is none.
    """
    if recipe.missing:
        raise SourceError(
            f"These rows of {recipe.shown_places} cannot be found again by themselves: {recipe.missing}. Make the "
            f"converter as the run did, and compare converter.fingerprint with {fingerprint!r}."
        )
    own = dict(decode or {})
    _check_own(own, dict(recipe.named_decoders()))
    # After an error, cache entries that were opened are released.
    with contextlib.ExitStack() as opened:
        converter = _remade(recipe, own, storage_options, opened)
        if converter.fingerprint != fingerprint:
            raise _changed(recipe, fingerprint, converter.fingerprint)
        opened.pop_all()
    return converter


def _check_own(own: Mapping[str, Decoder], needed: Mapping[str, Decoder]) -> None:
    """Raise ValueError unless these are the decoders whose code was not written down."""
    for name, then in needed.items():
        if name not in own:
            raise ValueError(
                f"Column {name!r} was read with a decoder of your own, whose code is not stored. Pass it again: "
                f"load(decode={{{name!r}: …}})."
            )
        now = own[name]
        if (now.dtype, now.shape) != (then.dtype, then.shape):
            raise ValueError(
                f"decode: column {name!r} was decoded to {then.dtype} of shape {then.shape}, and {now!r} gives "
                f"{now.dtype} of shape {now.shape}. Pass the decoder of that time."
            )
    if unknown := sorted(set(own) - set(needed)):
        raise ValueError(
            f"decode names the column {unknown[0]!r}, which was not read with a decoder of your own. Leave it out: "
            "other decoders are known."
        )


def _remade(
    recipe: Recipe, own: Mapping[str, Decoder], storage_options: Any, opened: contextlib.ExitStack
) -> DatasetConverter:
    make = _mixed if recipe.kind == "mix" else _opened
    converter = make(recipe, own, storage_options, opened)
    for view in recipe.views:
        arguments = {name: from_json(value) for name, value in view["arguments"].items()}
        part = arguments.pop("part", None)
        made = getattr(converter, view["name"])(**arguments)
        converter = made if part is None else made[part]
    if not recipe.views or recipe.kind == "mix":
        return converter
    # Nothing else holds the converter of all rows, whose end would release a cache entry.
    owner: DatasetConverter = openers["view"](converter)
    return owner


def _opened(
    recipe: Recipe, own: Mapping[str, Decoder], storage_options: Any, opened: contextlib.ExitStack
) -> DatasetConverter:
    """A converter of files, before views are taken of it."""
    options = {name: from_json(value) for name, value in recipe.options.items()}
    decode = {name: decoders.from_json(decoder) for name, decoder in options.pop("decode", {}).items()}
    decode |= {name: decoder for name, decoder in own.items() if name in decode}
    place = recipe.place["urls"] if recipe.kind == "parquet" else recipe.place["url"]
    if recipe.kind == "delta":
        options["version"] = recipe.place["version"]
    try:
        converter: DatasetConverter = openers[recipe.kind](
            place, **options, decode=decode or None, storage_options=storage_options
        )
    except ValueError as error:
        if isinstance(error, ConverterError):
            raise
        # Such as a column that is there no more, or an option that the store does not know.
        raise SourceError(
            f"{recipe.shown_places} cannot be read as it was: {error}", path=recipe.shown_places
        ) from error
    opened.enter_context(converter)
    if converter.fingerprint != recipe.fingerprint:
        raise _changed(recipe, recipe.fingerprint, converter.fingerprint)
    return converter


def _mixed(
    recipe: Recipe, own: Mapping[str, Decoder], storage_options: Any, opened: contextlib.ExitStack
) -> DatasetConverter:
    options = {name: from_json(value) for name, value in recipe.options.items()}
    later = options.pop("later_weights", [])
    parts = {name: _remade(part, own, storage_options, opened) for name, part in recipe.place["parts"].items()}
    mixture = openers["mix"](parts, **options)
    for epoch, weights in later:
        mixture = mixture.with_weights(weights, from_epoch=epoch)
    made: DatasetConverter = mixture
    return made


def _changed(recipe: Recipe, expected: str, actual: str) -> SourceChangedError:
    return SourceChangedError(
        f"{recipe.shown_places} has changed: its rows had the fingerprint {expected}, and now have {actual}. Restore "
        "the files of that time, or make a converter of what is there now, which is other data.",
        path=recipe.shown_places,
    )
