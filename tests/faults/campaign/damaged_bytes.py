"""Damaged bytes: rows, or an error of this package that names the file; never another end.

A case takes a data set (a cache's entry on a disk or behind a network, Parquet files of others, a Delta table), damages
one to three of its files, and uses it as a user would, before and after. What a checksum covers is never read wrongly,
counts that are known are kept, and nothing is deleted that we did not write.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.campaign import damaged_bases, damages
from tests.faults.campaign.cases import Campaign, Step
from tests.faults.campaign.damaged_reads import Bases
from tests.faults.campaign.damaged_uses import UsedCase

_KINDS = {
    "entry": damaged_bases.ENTRIES,
    "away": damaged_bases.ENTRIES,
    "files": damaged_bases.FILES,
    "table": damaged_bases.TABLES,
}
_PARTS = {
    "entry": {"manifest": 4, "data": 5, "owner": 1, "sign": 2},
    "away": {"manifest": 2, "data": 3, "local": 5},
    "files": {"data": 1},
    "table": {"commit": 4, "checkpoint": 4, "hint": 1, "totals": 3, "vector": 3, "data": 3},
}
"""Which files are damaged, and how often."""

_HOWS = {
    "manifest": damages.OF_MANIFEST, "sign": damages.OF_SMALL_JSON, "commit": damages.OF_COMMIT,
    "hint": damages.OF_SMALL_JSON, "totals": damages.OF_SMALL_JSON, "checkpoint": damages.OF_CHECKPOINT,
    "data": damages.OF_PARQUET,
}  # fmt: skip
_USES = {
    "entry": {"read": 8, "verify": 2, "choose": 3, "resume": 3, "command": 2, "delete": 2, "sweep": 2, "again": 2},
    "away": {"read": 10, "verify": 1, "choose": 2, "resume": 2, "delete": 1, "sweep": 1},
    "files": {"read": 8, "verify": 2, "choose": 3, "resume": 2, "command": 2},
    "table": {"read": 8, "verify": 1, "choose": 3, "resume": 2, "command": 1},
}
_CHOICES = ("where", "split", "split by", "sequences", "balance", "sample", "statistics", "quantiles", "plan", "head")
_COMMANDS = ("show", "verify", "verify --rows", "head", "plan", "ls", "show --json")


def _one_of(chance: random.Random, weights: dict[str, int]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]


def _draw(chance: random.Random) -> list[Step]:
    kind = _one_of(chance, {"entry": 4, "away": 3, "files": 5, "table": 5})
    # In each step, for any of them may be left out.
    of = {"kind": kind, "of": chance.choice(_KINDS[kind])}
    steps = [of | _draw_use(chance, kind) for _ in range(chance.choice((0, 0, 1)))]
    if chance.random() < 0.35:
        steps.append(of | {"do": "keep"})
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        part = _one_of(chance, _PARTS[kind])
        how = chance.choice(_HOWS.get(part, damages.BYTES))
        steps.append(of | {"do": "damage", "part": part, "how": how, "seed": chance.randrange(2**32)})
        if kind in ("entry", "away") and part == "data" and chance.random() < 0.3:
            steps.append(of | {"do": "agree"})
        if part == "sign" and chance.random() < 0.7:
            # Few others look at it.
            steps.append(of | {"do": chance.choice(("sweep", "delete")), "kept": False})
        elif chance.random() < 0.3:
            steps.append(of | _draw_use(chance, kind))
    steps += [of | _draw_use(chance, kind) for _ in range(chance.choice((1, 2, 3)))]
    return steps


def _draw_use(chance: random.Random, kind: str) -> Step:
    use = _one_of(chance, _USES[kind])
    if use == "read":
        return {
            "do": use,
            "batch_size": chance.choice((1, 7, 16, 1000)),
            "shuffle": chance.random() < 0.4,
            "verifies": chance.random() < 0.4,
            "few": chance.random() < 0.25,
            "torch": chance.random() < 0.15,
            "workers": chance.choice((1, 1, 2)),
            "local": chance.random() < 0.8,
            "ragged": chance.choice(("nested", "nested", "pad")),
        }
    if use == "verify":
        return {"do": use, "every_row": chance.random() < 0.6}
    if use == "choose":
        return {"do": use, "what": chance.choice(_CHOICES)}
    if use == "command":
        return {"do": use, "what": chance.choice(_COMMANDS)}
    if use == "resume":
        return {"do": use, "batches": chance.randrange(1, 6), "shuffle": chance.random() < 0.6,
                "how": chance.choice(("", "", "", "", *damages.OF_JSON)), "seed": chance.randrange(2**32)}  # fmt: skip
    if use == "sweep":
        return {"do": use, "kept": chance.random() < 0.3}
    return {"do": use}


def _run(steps: Sequence[Step], shared: Bases, folder: Path) -> Counter[str]:
    with contextlib.closing(UsedCase(shared, folder, steps[0]["kind"], steps[0]["of"])) as case:
        for step in steps:
            case.take(step)
        case.check_what_is_left()
    return case.done


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[Bases]:
    yield Bases(folder)


CAMPAIGN = Campaign(
    name="damaged_bytes",
    draw=_draw,
    run=_run,
    shared=_shared,
    max_seconds=60.0,
    max_memory_bytes=10 << 30,
)
