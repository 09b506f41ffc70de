"""Which version pickled a converter, or its rows' places for executors: read first, before any class of it."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from converter.errors import CacheError

FORMAT = 5
"""Counts up whenever a class of which a pickled converter consists gets, loses or renames a field."""


class Stamp:
    """The version of this process; reading it elsewhere refuses another one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return check_stamp, (FORMAT, own_version())


def check_stamp(pickled_format: int, version: str) -> Stamp:
    """Raise CacheError if another version's converters cannot be read here."""
    if pickled_format == FORMAT:
        return Stamp()
    raise CacheError(
        f"This converter was pickled by spark-tensor-converter {version} (format {pickled_format}), and this process "
        f"has {own_version()} (format {FORMAT}), which cannot read it. Install the same version in both environments, "
        "or send a URL instead of a converter, and make the converter there."
    )


def own_version() -> str:
    """The version of this package."""
    try:
        return importlib.metadata.version("spark-tensor-converter")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown number"
