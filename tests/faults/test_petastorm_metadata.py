"""Whatever stands in a store's metadata: a schema, an index, or a PetastormMetadataError. Nothing in it ever runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults import petastorm_fuzz
from tests.repository import REPOSITORY

_CASES = 20_000


def _violations(*arguments: str) -> list[str]:
    """What a child prints: the hook that hears of imports stays for the life of a process, as does its memory limit."""
    command = [sys.executable, "-m", petastorm_fuzz.__name__, *arguments]
    child = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=250, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout.splitlines()


@pytest.mark.short
def test_a_thousand_mutated_metadata_are_read_or_refused() -> None:
    assert _violations("0", "1000") == []


def test_twenty_thousand_mutated_metadata_are_read_or_refused() -> None:
    assert _violations("0", str(_CASES)) == []


def test_pickles_that_would_grow_without_bounds_are_refused_in_little_time_and_memory() -> None:
    assert _violations("bombs") == []


@pytest.mark.short
def test_a_reader_that_fails_or_starts_something_is_a_violation() -> None:
    """Else the tests above could not fail."""
    failure, start = _violations("wrong")
    assert "KeyError" in failure
    assert "starts: started" in start
    assert "pickle.find_class" in start
