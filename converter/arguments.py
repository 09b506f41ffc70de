"""Checks of single arguments, which raise an error that names the argument."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from converter.decoders.decoder import row_bytes
from converter.manifest import Manifest
from converter.plan import default_window_rows
from converter.positions import Shard
from converter.shards import find_shard, warn_of_other_shard


def check_shard(cur_shard: Any, shard_count: Any) -> Shard:
    """The shard that a user passed, or the one that the environment names."""
    if (cur_shard is None) != (shard_count is None):
        raise ValueError(
            f"cur_shard and shard_count go together, got cur_shard={cur_shard} and shard_count={shard_count}."
        )
    if cur_shard is None:
        return find_shard()
    shard = Shard(
        index=check_integer("cur_shard", cur_shard, least=0), count=check_integer("shard_count", shard_count, least=1)
    )
    warn_of_other_shard(shard)
    return shard


def check_window(window_rows: Any, manifest: Manifest) -> int:
    """How many live rows are mixed together; None for the default, `"all"` for all."""
    if window_rows is None:
        # Row groups without live rows are not read, so their bytes do not count.
        num_bytes = int(manifest.row_group_bytes[manifest.live_rows > 0].sum())
        if manifest.sequences is not None:
            # Sequences share rows, so a window of them is decoded as a whole.
            num_bytes += manifest.of_rows.num_live_rows * sum(map(row_bytes, manifest.decoders.values()))
        num_rows = default_window_rows(manifest.num_live_rows, num_bytes)
    elif window_rows == "all":
        num_rows = manifest.num_live_rows
    elif isinstance(window_rows, str):
        raise ValueError(f"shuffle_window_rows must be a number of rows, 'all' or None, got {window_rows!r:.80}.")
    else:
        num_rows = check_integer("shuffle_window_rows", window_rows, least=1)
    return max(1, min(num_rows, manifest.num_live_rows))


def check_fractions(fractions: Any) -> list[float]:
    """The cumulative fractions at which the parts end."""
    expected = (
        "fractions must be a dict of name to a number above 0, together at most 1, e.g. {'train': 0.9, 'val': 0.1}"
    )
    if not isinstance(fractions, Mapping) or not fractions:
        raise TypeError(f"{expected}; got {fractions!r:.80}.")
    values = list(fractions.values())
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
        raise TypeError(f"{expected}; got {fractions!r:.80}.")
    if not all(value > 0 for value in values):
        raise ValueError(f"{expected}; got {fractions!r:.80}.")
    # Without rounding errors: three thirds are 1.
    bounds = [math.fsum(values[: count + 1]) for count in range(len(values))]
    if bounds[-1] > 1 + 1e-9:
        raise ValueError(f"{expected}; got {fractions!r:.80}, together {bounds[-1]}.")
    return [1.0 if abs(bound - 1) < 1e-9 else bound for bound in bounds]


def check_cache_key(cache_key: Any) -> None:
    """Raise TypeError or ValueError unless a cache key is None or a text that is not blank."""
    if cache_key is None:
        return
    if not isinstance(cache_key, str):
        raise TypeError(f"cache_key must be a str, e.g. 'flights-2026-11-20', got {cache_key!r:.80}.")
    if not cache_key.strip():
        raise ValueError(f"cache_key must name the rows, e.g. 'flights-2026-11-20', got {cache_key!r:.80}.")


def check_flag(name: str, flag: Any) -> None:
    """Raise TypeError unless an option is True or False."""
    if not isinstance(flag, bool):
        raise TypeError(f"{name} must be True or False, got {flag!r:.80}.")


def check_epochs(num_epochs: int | None) -> int | None:
    """The number of epochs of an iteration; None for no end."""
    return None if num_epochs is None else check_integer("num_epochs", num_epochs, least=1)


def check_integer(name: str, value: Any, *, least: int) -> int:
    """The value of an argument that must be an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r:.80}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")
    return int(value)


def check_timestamp(timestamp: Any) -> dt.datetime | None:
    """A time with a zone, from what a user gave."""
    if timestamp is None:
        return None
    if isinstance(timestamp, dt.datetime):
        parsed = timestamp
    elif isinstance(timestamp, str):
        try:
            # Python 3.10 does not parse a Z.
            parsed = dt.datetime.fromisoformat(re.sub("[zZ]$", "+00:00", timestamp))
        except ValueError as error:
            raise ValueError(
                f"timestamp must have a form such as '2026-11-21T12:00:00', got {timestamp!r:.80}."
            ) from error
    else:
        raise TypeError(
            f"timestamp must be a datetime, or a string such as '2026-11-21T12:00:00', got {timestamp!r:.80}."
        )
    return parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=dt.timezone.utc)
