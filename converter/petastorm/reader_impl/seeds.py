"""Where the random order of a loader or a buffer comes from: a seed, or the generators that users seed themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_SEEDS = 1 << 32


def generator_of(reader: Any, pass_number: int, *, fallback: Callable[[], int]) -> np.random.Generator:
    """The generator for one pass over a reader: of the reader's seed and the pass, so that passes differ.

    If the reader has no seed, `fallback()` is one.
    """
    seed = getattr(reader, "seed", None)
    return np.random.default_rng(fallback() if seed is None else [int(seed) % (1 << 64), pass_number])


def global_seed() -> int:
    """A seed that repeats after `np.random.seed`, as the order of Petastorm's buffers does."""
    return int(np.random.randint(_SEEDS, dtype=np.int64))  # noqa: NPY002 (users seed this one)
