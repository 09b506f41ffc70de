"""Cases that fail on purpose, so that the tests see that the runner tells each kind of failure."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.campaign.cases import Campaign, Step, ViolationError

KINDS = ("none", "law", "error", "hang", "death", "memory")
"""How case 0, 1, 2, … fails."""

_MEMORY_BYTES = 4 << 30


@contextlib.contextmanager
def _nothing(folder: Path) -> Iterator[None]:
    yield


def _draw(chance: random.Random) -> list[Step]:
    return [{"value": value} for value in chance.sample(range(20), 20)]


def _run(steps: Sequence[Step], shared: None, folder: Path) -> Counter[str]:
    assert not list(folder.iterdir())
    (folder / "left").touch()
    values = {step["value"] for step in steps}
    # Two of the twenty steps are needed.
    if {3, 7} <= values:
        _fail(KINDS[int(folder.name.split("-")[1])])
    return Counter(steps=len(steps))


def _fail(kind: str) -> None:
    if kind == "law":
        raise ViolationError("nothing is lost", "a row is missing")
    if kind == "error":
        raise ZeroDivisionError
    if kind == "hang":
        time.sleep(3600)
    if kind == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        bytearray(2 * _MEMORY_BYTES)


CAMPAIGN = Campaign(
    name="known_faults",
    draw=_draw,
    run=_run,
    shared=_nothing,
    max_seconds=2.0,
    max_memory_bytes=_MEMORY_BYTES,
)
