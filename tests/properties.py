"""How many examples a property is tried on: as many as its test names with `--all` or `--rest`, else a fifth."""

from __future__ import annotations

from hypothesis import settings


def examples(num_examples: int) -> settings:
    """The settings of a property test; the lane's profile, which conftest.py loads, says what share of them is run."""
    return settings(max_examples=max(5, num_examples * settings().max_examples // 100))
