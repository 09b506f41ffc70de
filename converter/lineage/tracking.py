"""What a tracking store keeps of a dataset: its source, name, digest and profile, as JSON within the store's limits.

The limits are MLflow's. Nothing here imports it: `mlflow_dataset` does, and is imported where MLflow is certain to
exist.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from converter.errors import MissingDependencyError, SourceError
from converter.lineage.recipe import Recipe, read_recipe
from converter.schema import Schema, checked

if TYPE_CHECKING:
    from converter.lineage.mlflow_dataset import ConverterDataset

MAX_SOURCE = 65_535
"""Characters of a source that MLflow keeps."""

MAX_SCHEMA = 1_048_575
"""Characters of a schema that MLflow keeps."""

_MAX_NAME = 500
"""Characters of a name that MLflow keeps."""

_NUM_SIGNS = 4
"""Signs of a digest that tell two sources of the same rows apart; with a fingerprint's 32 they make the 36 that MLflow
keeps."""

_FORMAT = 1
_MAX_UNPACKED_BYTES = 16 << 20
_NOT_IN_PROFILE = ("columns", "layout", "write_options")
_PACKED = ("urls", "parts", "options", "views")
"""What is compressed if a source is too long."""


def make_mlflow_dataset(
    described: Mapping[str, Any], schema: Schema, recipe: Recipe | None, *, name: str | None
) -> ConverterDataset:
    """The dataset that `mlflow.log_input` takes; `described` is what `DatasetConverter.describe` says.

    Raises:
        MissingDependencyError: MLflow is not installed.
        SourceError: it is not known how the converter was made.
        ValueError, TypeError: the name is none.
    """
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str, e.g. 'rides', got {name!r:.100}.")
    if name is not None and not 0 < len(name) <= _MAX_NAME:
        raise ValueError(f"name must have 1 to {_MAX_NAME} characters, as MLflow keeps them; got {len(name):,}.")
    if recipe is None:
        raise SourceError(
            f"It is not known how this converter of {described['url']} was made, so no source can be logged. Make it "
            "with make_spark_converter, open_converter, make_parquet_converter or make_delta_converter."
        )
    try:
        # First: this loads the entry points, ours among them, which import the next module.
        import mlflow.data  # noqa: F401

        from converter.lineage.mlflow_dataset import ConverterDataset, ConverterSource
    except ImportError as error:
        raise MissingDependencyError(
            "mlflow_dataset needs MLflow, which is not installed: pip install 'spark-tensor-converter[mlflow]' to log "
            "to a server, or mlflow, which also keeps runs on this machine."
        ) from error
    source = ConverterSource(recipe, described["fingerprint"])
    return ConverterDataset(
        source=source,
        columns=schema,
        profile=_profile_of(described, source.recipe),
        name=name or _name_of(described, recipe),
        digest=source.digest,
    )


def source_document(recipe: Recipe, fingerprint: str) -> tuple[Recipe, dict[str, Any]]:
    """The JSON of a source, short enough for MLflow; and the recipe that is left in it.

    >>> recipe = Recipe(kind="delta", place={"url": "file:///t", "version": 3}, options={}, fingerprint="ab")
    >>> _, document = source_document(recipe, "ab")
    >>> document["url"], document["version"], source_from(document) == (recipe, "ab")
    ('file:///t', 3, True)
    """
    document = {"format": _FORMAT, **recipe.to_json(), "fingerprint": fingerprint}
    if _length(document) <= MAX_SOURCE:
        return recipe, document
    short = {name: value for name, value in document.items() if name not in _PACKED}
    long = {name: value for name, value in document.items() if name in _PACKED}
    packed = short | {"zlib": base64.b64encode(zlib.compress(json.dumps(long).encode(), 9)).decode()}
    if _length(packed) <= MAX_SOURCE:
        return recipe, packed
    reason = f"its arguments take {_length(packed):,} characters, and MLflow keeps {MAX_SOURCE:,}"
    cut = _cut(recipe, reason)
    return cut, {"format": _FORMAT, **cut.to_json(), "fingerprint": fingerprint}


def _cut(recipe: Recipe, reason: str) -> Recipe:
    """What is left of a recipe that is too long: the places."""
    place = dict(recipe.place)
    if recipe.kind == "parquet":
        place["urls"] = [_common_url(place["urls"])]
    if recipe.kind == "mix":
        place["parts"] = {name: _cut(part, reason) for name, part in place["parts"].items()}
    return replace(recipe, place=place, options={}, views=(), missing=recipe.missing or reason)


def source_from(document: Any) -> tuple[Recipe, str]:
    """The recipe and the fingerprint in a source that came from a tracking store, where anybody may have changed it.

    Raises:
        SourceError: it is none.
    """
    where = "The source of this dataset in the tracking store"
    try:
        if checked(checked(document, dict).get("format"), int) != _FORMAT:
            raise ValueError(f"format {document['format']!r:.80} is unknown")
        whole = dict(document)
        if "zlib" in whole:
            whole |= checked(json.loads(_unpacked(checked(whole.pop("zlib"), str))), dict)
        fingerprint = checked(whole.get("fingerprint"), str)
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        return read_recipe({"broken": error}, where), ""
    return read_recipe(whole, where), fingerprint


def digest_of(document: Mapping[str, Any], fingerprint: str) -> str:
    """The fingerprint and four signs of the source.

    MLflow keeps one source for a name and a digest in an experiment. Without the signs, a run that read other columns
    of the same rows, or a copy of them, would show the source of an earlier run.
    """
    content = json.dumps(document, sort_keys=True)
    return fingerprint + base64.b32encode(hashlib.sha256(content.encode()).digest()).decode().lower()[:_NUM_SIGNS]


def _unpacked(text: str) -> bytes:
    # At most one byte more than there can be, however large the content is.
    data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED_BYTES + 1)
    if len(data) > _MAX_UNPACKED_BYTES:
        raise ValueError(f"it has more than {_MAX_UNPACKED_BYTES:,} bytes")
    return data


def _length(document: Mapping[str, Any]) -> int:
    return len(json.dumps(document))


def _common_url(urls: list[str]) -> str:
    """The beginning that URLs have in common, up to a slash."""
    low, high = min(urls), max(urls)
    length = next((place for place, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return low[: low.rfind("/", 0, length + 1) + 1] or low


def _name_of(described: Mapping[str, Any], recipe: Recipe) -> str:
    """A name for people: the cache's key, the table and its version, or the folder."""
    if recipe.kind == "mix":
        return "+".join(recipe.place["parts"])[:_MAX_NAME]
    folder = unquote(str(recipe.place.get("url") or described["url"])).rstrip("/").rpartition("/")[2]
    if recipe.kind == "delta":
        folder = f"{folder}@v{recipe.place['version']}"
    return (described["cache_key"] or folder or "dataset")[-_MAX_NAME:]


def _profile_of(described: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """What is known of the rows without reading any; what is not known is left out."""
    profile = {name: value for name, value in described.items() if value is not None and name not in _NOT_IN_PROFILE}
    profile["columns"] = len(described["columns"])
    if recipe.kind == "mix":
        profile["sources"] = {name: part.shown_places for name, part in recipe.place["parts"].items()}
    if recipe.views:
        profile["views"] = [view["name"] for view in recipe.views]
    return profile | {"load": _say_load(recipe)}


def _say_load(recipe: Recipe) -> str:
    """What `load()` of the source will do."""
    if recipe.missing:
        return f"raises an error: {recipe.missing}"
    if columns := dict(recipe.named_decoders()):
        return f"needs decode= with your own decoders of {', '.join(columns)}"
    if not recipe.is_kept:
        return "only until the cache entry is removed: it was written with delete_on_exit=True"
    return "makes a converter of the same rows"
