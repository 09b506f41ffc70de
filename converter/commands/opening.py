"""What a URL in a shell names: a cache entry, a Delta table, or Parquet files."""

from __future__ import annotations

import json
import os
from typing import Any

from converter.cache.finding import names_entry
from converter.dataset import DatasetConverter
from converter.make import make_delta_converter, make_parquet_converter, open_converter
from converter.storage.opening import open_storage

TIMEOUT_SECONDS = 20.0
"""How long a store may be unreachable: somebody waits at a terminal."""

OPTIONS_VARIABLE = "CONVERTER_STORAGE_OPTIONS"
"""Where a shell says what `storage_options` say elsewhere: an argument would be seen by every user of the machine."""


def storage_options() -> dict[str, Any] | None:
    """The options of the environment; None if there are none.

    Raises:
        ValueError: they are no JSON object. The message does not show them.
    """
    text = os.environ.get(OPTIONS_VARIABLE)
    if not text:
        return None
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ValueError(  # noqa: TRY004 (it is a text, which is wrong)
            f'{OPTIONS_VARIABLE} in the environment must be a JSON object, such as {{"anon": true}}.'
        )
    return options


def kind_of(url: str, version: int | None = None, cache_key: str | None = None) -> str:
    """`cache`, `delta` or `parquet`."""
    if cache_key is not None or names_entry(url):
        return "cache"
    if version is not None or open_storage(url, storage_options(), TIMEOUT_SECONDS).below("_delta_log").exists:
        return "delta"
    return "parquet"


def open_rows(url: str, *, version: int | None = None, cache_key: str | None = None) -> DatasetConverter:
    """The converter of what a URL names; its end removes nothing."""
    options: dict[str, Any] = {"storage_options": storage_options(), "timeout_seconds": TIMEOUT_SECONDS}
    kind = kind_of(url, version, cache_key)
    if kind == "cache" and version is not None:
        raise ValueError("--version is for Delta tables, and this is a cache entry. Leave it out.")
    if kind == "cache":
        return open_converter(url, cache_key=cache_key, **options)
    if kind == "delta":
        return make_delta_converter(url, version=version, **options)
    return make_parquet_converter(url, **options)
