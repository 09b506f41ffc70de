"""How a converter was made, as plain JSON: what it reads, with which options, and which views were taken of it.

A recipe is written down where the arguments are known, in `make`, `mixed` and the scans behind each view. It travels in
the manifest, so views and pickled copies have it, too. What has no JSON form makes a recipe that says why it is not
complete: other rows than the right ones are never made of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from converter import decoders
from converter.errors import SourceError
from converter.lineage.values import NotStorableError, from_json, to_json
from converter.schema import checked

if TYPE_CHECKING:
    from converter.categories import Categories
    from converter.decoders.decoder import Decoder
    from converter.manifest import Manifest
    from converter.mixing import Mixing

_OF_COLUMNS = frozenset({"columns", "float_dtype", "shapes", "decode", "categories", "unseen", "standardize"})

OPTIONS: Mapping[str, frozenset[str]] = {
    "cache": frozenset({"decode"}),
    "parquet": _OF_COLUMNS,
    "delta": _OF_COLUMNS | {"filters"},
    "mix": frozenset({"weights", "stop", "source", "seed", "later_weights"}),
}
"""The kinds of converters, and what a recipe may say of each."""

VIEWS: Mapping[str, frozenset[str]] = {
    "where": frozenset({"filters"}),
    "split": frozenset({"fractions", "by", "seed", "part"}),
    "sequences": frozenset({"length", "by", "order_by", "stride", "max_gap", "partial", "steps"}),
    "balance": frozenset({"by", "weights", "num_rows", "seed"}),
    "sample": frozenset({"weights", "by", "num_rows", "replacement", "seed"}),
}
"""The methods that return a converter of some of the rows, and their arguments; `part` is a split's result."""

_MAX_SHOWN = 3
"""URLs that errors list."""

MAX_BYTES = 1 << 20
"""Bytes of a recipe as text; a larger one is not kept in every pickled copy of a converter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What makes the same converter again, or why nothing does; holds no secret."""

    kind: str
    """One of `OPTIONS`."""

    place: Mapping[str, Any]
    """Where the rows are: `url`, with `version`, or with `cache_key` and `kept`; `urls`; or `parts`, their recipes."""

    options: Mapping[str, Any]
    """Arguments of the function that made the converter, as JSON."""

    fingerprint: str
    """That of the converter before views were taken of it; empty for a mixture, whose parts have theirs."""

    views: tuple[Mapping[str, Any], ...] = ()
    """Each view's `name` and `arguments`, as JSON, in order."""

    missing: str = ""
    """Why it is not complete; empty if it is."""

    @property
    def shown_places(self) -> str:
        """What it reads, for people."""
        if self.kind == "mix":
            return ", ".join(f"{name}: {part.shown_places}" for name, part in self.place["parts"].items())
        if self.kind == "parquet":
            urls = self.place["urls"]
            more = f" and {len(urls) - _MAX_SHOWN:,} more" if len(urls) > _MAX_SHOWN else ""
            return ", ".join(urls[:_MAX_SHOWN]) + more
        version = f", version {self.place['version']}" if self.kind == "delta" else ""
        return f"{self.place['url']}{version}"

    @property
    def is_kept(self) -> bool:
        """Whether what it reads stays when the converter that wrote it ends."""
        parts = self.place.get("parts", {}).values()
        return bool(self.place.get("kept", True)) and all(part.is_kept for part in parts)

    def named_decoders(self) -> Iterator[tuple[str, Decoder]]:
        """The columns that need decoders of a user's own, and what is known of those: all but their code."""
        for name, decoder in from_json(self.options.get("decode", {"dict": []})).items():
            if not decoder["kind"]:
                yield name, decoders.from_json(decoder)
        for part in self.place.get("parts", {}).values():
            yield from part.named_decoders()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        place = dict(self.place)
        if self.kind == "mix":
            place["parts"] = [[name, part.to_json()] for name, part in place["parts"].items()]
        document = {"kind": self.kind, **place, "options": dict(self.options), "views": list(self.views)}
        document |= {"files_fingerprint": self.fingerprint} if self.fingerprint else {}
        return document | ({"missing": self.missing} if self.missing else {})

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Recipe:
        """The inverse of `to_json`; checks every value.

        Raises:
            KeyError, ValueError, TypeError: it is nothing that `to_json` returns.
        """
        kind = checked(document["kind"], str)
        options, views = checked(document["options"], dict), checked(document["views"], list)
        _check_names(f"options of {kind}", options, OPTIONS[kind])
        for value in options.values():
            from_json(value)
        for view in views:
            _check_names("parts of a view", checked(view, dict), frozenset({"name", "arguments"}))
            name = checked(view["name"], str)
            _check_names(f"arguments of {name}", checked(view["arguments"], dict), VIEWS[name])
            arguments = {key: from_json(value) for key, value in view["arguments"].items()}
            if name == "split" and arguments["part"] not in checked(arguments["fractions"], dict):
                raise ValueError(f"a split has no part {arguments['part']!r:.80}")
        recipe = cls(
            kind=kind,
            place=_place_from(kind, document),
            options=options,
            fingerprint="" if kind == "mix" else checked(document["files_fingerprint"], str),
            views=tuple(views),
            missing=checked(document.get("missing", ""), str),
        )
        for decoder in from_json(options.get("decode", {"dict": []})).values():
            decoders.from_json(checked(decoder, dict))
        return recipe


def _place_from(kind: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a place that a kind has."""
    if kind == "parquet":
        urls = [checked(url, str) for url in checked(document["urls"], list)]
        if not urls:
            raise ValueError("urls are empty")
        return {"urls": urls}
    if kind == "mix":
        parts = {checked(name, str): Recipe.from_json(checked(part, dict)) for name, part in document["parts"]}
        if not parts or any(part.kind == "mix" for part in parts.values()):
            raise ValueError("the parts of a mixture are no converters of files")
        return {"parts": parts}
    url = checked(document["url"], str)
    if kind == "cache":
        key = document.get("cache_key")
        kept = checked(document["kept"], bool)
        return {"url": url, "cache_key": None if key is None else checked(key, str), "kept": kept}
    version = checked(document["version"], int)
    if version < 0:
        raise ValueError(f"version {version} is none")
    return {"url": url, "version": version}


def _check_names(what: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{unknown[0]!r:.80} is none of the {what}")


def with_recipe(manifest: Manifest, kind: str, place: Mapping[str, Any], options: Mapping[str, Any]) -> Manifest:
    """The manifest of a new converter with the arguments that it was made with.

    Categories that the user gave, and the decoders and scales as they were found, are added from the manifest. So means
    and deviations are those of the run, and only values of categories are looked for again.
    """
    own: dict[str, Any] = dict(options)
    if kind != "cache":
        own["categories"] = {name: _given_values(values) for name, values in manifest.categories.items()}
        own["standardize"] = {name: scale and list(scale) for name, scale in manifest.scales.items()}
        own["decode"] = _described(manifest.decoders)
    made, missing = _as_json({name: value for name, value in own.items() if not _is_default(name, value)}, "")
    recipe = Recipe(kind=kind, place=dict(place), options=made, fingerprint=manifest.live_fingerprint, missing=missing)
    return replace(manifest, recipe=recipe)


def with_entrys_recipe(manifest: Manifest, url: str, decode: Mapping[str, Decoder] | None) -> Manifest:
    """The manifest of a cache entry, with where the entry is; `decode` is what the user gave beside it."""
    own = {name: manifest.decoders[name] for name in decode or {}}
    key = None if manifest.origin is None else manifest.origin.cache_key
    place = {"url": url, "cache_key": key, "kept": manifest.is_kept}
    return with_recipe(manifest, "cache", place, {"decode": _described(own)})


def recipe_of_mixture(parts: Mapping[str, Manifest], mixing: Mixing, source: str | None) -> Recipe:
    """The recipe of several converters that are read as one."""
    recipes = {name: part.recipe for name, part in parts.items()}
    known = {name: recipe for name, recipe in recipes.items() if recipe is not None}
    missing = next((f"{name!r}: {recipe.missing}" for name, recipe in known.items() if recipe.missing), "")
    if len(known) < len(recipes):
        missing = "one of the mixed converters does not know how it was made"
    first, *later = sorted(mixing.weights.items())
    # Numbers of rows are the default, and not divided by the largest.
    is_by_size = first[1] == tuple(map(float, mixing.sizes))
    options = {
        "weights": None if is_by_size else dict(zip(mixing.names, first[1], strict=True)),
        "stop": mixing.num_rows,
        "source": source,
        "seed": mixing.seed,
        "later_weights": [[epoch, dict(zip(mixing.names, shares, strict=True))] for epoch, shares in later],
    }
    made, too_large = _as_json(options, "")
    return Recipe(kind="mix", place={"parts": known}, options=made, fingerprint="", missing=missing or too_large)


def viewed(recipe: Recipe | None, name: str, **arguments: Any) -> Recipe | None:
    """The recipe of a view; an argument that is None has its default."""
    if recipe is None:
        return None
    made, missing = _as_json({key: value for key, value in arguments.items() if value is not None}, f"{name}(): ")
    view = {"name": name, "arguments": made}
    return replace(recipe, views=(*recipe.views, view), missing=recipe.missing or missing)


def _given_values(values: Categories) -> list[Any] | None:
    """The values of categories that the user gave; None for those of the data, which the same data have again."""
    return values.values.to_pylist() if values.are_given else None


def _is_default(option: str, value: Any) -> bool:
    """Whether an option says nothing; doubles are narrowed unless `float_dtype` is None."""
    return (value is None and option != "float_dtype") or (isinstance(value, Mapping) and not value)


def _described(columns: Mapping[str, Decoder]) -> dict[str, Any]:
    return {name: decoders.to_json(decoder) for name, decoder in columns.items()}


def _as_json(arguments: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """Arguments as JSON, without those that cannot be; and the reason, for the first of them."""
    made: dict[str, Any] = {}
    missing = ""
    for name, value in arguments.items():
        try:
            document = to_json(value)
            if (num_bytes := len(json.dumps(document))) > MAX_BYTES:
                raise NotStorableError(f"{num_bytes / 1e6:.1f} MB of values, and at most 1 MB is kept")
        except NotStorableError as error:
            missing = missing or f"{where}{name}= has {error}"
        else:
            made[name] = document
    return made, missing


def read_recipe(document: Mapping[str, Any], where: str) -> Recipe:
    """A recipe that another program kept; `where` names it for errors.

    Raises:
        SourceError: it is none.
    """
    try:
        return Recipe.from_json(document)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SourceError(
            f"{where} does not describe a converter ({type(error).__name__}: {error}). It was changed, or a newer "
            "version of spark-tensor-converter wrote it: install that one."
        ) from error
