"""Plain checks of plain arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from converter.manifest import Manifest
from converter.plan import default_window_rows
from converter.positions import Shard
from converter.shards import find_shard


def check_shard(cur_shard: Any, shard_count: Any) -> Shard:
    """The shard that a user named; both numbers or neither."""
    if (cur_shard is None) != (shard_count is None):
        raise ValueError(
            f"cur_shard and shard_count go together, got cur_shard={cur_shard} and shard_count={shard_count}."
        )
    if cur_shard is None:
        return find_shard()
    return Shard(
        index=check_integer("cur_shard", cur_shard, least=0), count=check_integer("shard_count", shard_count, least=1)
    )


def check_window(window_rows: Any, manifest: Manifest) -> int:
    """How many live rows are mixed together; by default those among as many bytes, whatever part of them is live.

    What has no live row is not read, so its bytes do not count: a filter by day would else mix a row group alone.
    """
    if window_rows is None:
        read = manifest.row_group_bytes[manifest.live_rows > 0]
        found = default_window_rows(manifest.num_live_rows, int(read.sum()))
    elif window_rows == "all":
        found = manifest.num_rows
    else:
        if isinstance(window_rows, str):
            raise ValueError(f"shuffle_window_rows must be a number of rows, 'all' or None, got {window_rows!r}.")
        found = check_integer("shuffle_window_rows", window_rows, least=1)
    return max(1, min(found, manifest.num_live_rows))


def check_fractions(fractions: Any) -> list[float]:
    """Where the parts end, as fractions of all rows."""
    what = "fractions must be a dict of name to a number above 0, together at most 1, e.g. {'train': 0.9, 'val': 0.1}"
    if not isinstance(fractions, Mapping) or not fractions:
        raise TypeError(f"{what}; got {fractions!r}.")
    for fraction in fractions.values():
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
            raise TypeError(f"{what}; got {fractions!r}.")
    if not all(fraction > 0 for fraction in fractions.values()):
        raise ValueError(f"{what}; got {fractions!r}.")
    # Summed without rounding: thirds are to be whole.
    bounds = [math.fsum(list(fractions.values())[: count + 1]) for count in range(len(fractions))]
    if bounds[-1] > 1 + 1e-9:
        raise ValueError(f"{what}; got {fractions!r}, together {bounds[-1]}.")
    return [1.0 if abs(bound - 1) < 1e-9 else bound for bound in bounds]


def check_cache_key(cache_key: Any) -> None:
    """Raise TypeError unless a cache key is a text or None."""
    if cache_key is not None and not isinstance(cache_key, str):
        raise TypeError(f"cache_key must be a str, e.g. 'flights-2026-11-20', got {cache_key!r}.")
    if cache_key is not None and not cache_key.strip():
        raise ValueError(f"cache_key must name the rows, e.g. 'flights-2026-11-20', got {cache_key!r}.")


def check_flag(name: str, flag: Any) -> None:
    """Raise TypeError unless an option is True or False."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False, got {flag!r}.")


def check_epochs(num_epochs: int | None) -> int | None:
    """How many epochs a loader goes on; None for ever."""
    return None if num_epochs is None else check_integer("num_epochs", num_epochs, least=1)


def check_integer(name: str, value: Any, *, least: int) -> int:
    """An argument that must be an integer of at least `least`; names it in the error."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")
    return int(value)
