"""A recipe becomes a converter again, with the same rows, or an error: never with other rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from converter import decoders
from converter.decoders.decoder import Decoder
from converter.errors import SourceChangedError, SourceError
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
        ValueError, TypeError: a decoder of the user's own is needed, or an option is none.
    """
    if recipe.missing:
        raise SourceError(
            f"These rows of {recipe.shown_places} cannot be found again by themselves: {recipe.missing}. Make the "
            f"converter as the run did, and compare converter.fingerprint with {fingerprint!r}."
        )
    needed = [name for name in recipe.named_decoders() if name not in (decode or {})]
    if needed:
        raise ValueError(
            f"Column {needed[0]!r} was read with a decoder of your own, whose code is not stored. Pass it again: "
            f"load(decode={{{needed[0]!r}: …}})."
        )
    converter = _remade(recipe, dict(decode or {}), storage_options)
    if converter.fingerprint != fingerprint:
        raise _changed(recipe, fingerprint, converter.fingerprint)
    return converter


def _remade(recipe: Recipe, decode: Mapping[str, Decoder], storage_options: Any) -> DatasetConverter:
    converter = (
        _mixed(recipe, decode, storage_options) if recipe.kind == "mix" else _opened(recipe, decode, storage_options)
    )
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


def _opened(recipe: Recipe, decode: Mapping[str, Decoder], storage_options: Any) -> DatasetConverter:
    """A converter of files, before views are taken of it."""
    options = {name: from_json(value) for name, value in recipe.options.items()}
    stored = {name: decoders.from_json(decoder) for name, decoder in options.pop("decode", {}).items()}
    own = {name: decoder for name, decoder in decode.items() if name in stored}
    place = recipe.place["urls"] if recipe.kind == "parquet" else recipe.place["url"]
    if recipe.kind == "delta":
        options["version"] = recipe.place["version"]
    try:
        converter: DatasetConverter = openers[recipe.kind](
            place, **options, decode={**stored, **own} or None, storage_options=storage_options
        )
    except ValueError as error:
        if isinstance(error, SourceError):
            raise
        # Such as a column that is there no more.
        raise SourceChangedError(
            f"{recipe.shown_places} cannot be read as it was: {error}", path=recipe.shown_places
        ) from error
    if converter.fingerprint != recipe.fingerprint:
        raise _changed(recipe, recipe.fingerprint, converter.fingerprint)
    return converter


def _mixed(recipe: Recipe, decode: Mapping[str, Decoder], storage_options: Any) -> DatasetConverter:
    options = {name: from_json(value) for name, value in recipe.options.items()}
    later = options.pop("later_weights", [])
    parts = {name: _remade(part, decode, storage_options) for name, part in recipe.place["parts"].items()}
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
