"""A store whose n-th call goes wrong, for programs of convert, read, resume, delete and sweep.

Whatever happens: the right rows, or an error of ours that names the cache; what is kept stays whole, and so do the
user's files; nothing hangs, and nothing is left once all leases are old.

Left out: Spark's job itself. Its tasks are run here, each anew if it fails, as Spark does; `writer="spark"` is not, nor
are HDFS's client and deltalake's requests, which have no fsspec below them.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.campaign.cases import Campaign, Step
from tests.faults.campaign.store_disk import installed
from tests.faults.campaign.store_faults import ERRORS, KINDS
from tests.faults.campaign.store_memory import URLS
from tests.faults.campaign.store_place import NUM_FILES, Tables, write_tables
from tests.faults.campaign.store_world import NAMES, World

STORES = ("local", *URLS)
_WHOLE_CALLS = 150
_CALLS = {"write": 60, "read": 30, "open": 12, "delete": 14, "sweep": 12, "table": 20}
_FEW_CALLS = 10
"""About how many calls a whole program, and a step, make."""


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[Tables]:
    with installed():
        yield write_tables(folder)
        gc.unfreeze()


def _draw(chance: random.Random) -> list[Step]:
    store = chance.choice(STORES)
    begin = {"do": "begin", "store": store, "threads": chance.choice((1, 1, 1, 8))}
    if chance.random() < 0.4:
        program = _whole_program(chance)
        faults = [_fault(chance, store, _WHOLE_CALLS)]
        places = [0]
    else:
        program = [_write(chance, then="hold"), *(_step(chance) for _ in range(chance.randint(1, 5)))]
        if chance.random() < 0.4:
            program.insert(0, {"do": "table", "table": chance.choice(("parquet", "delta"))})
        places = [chance.randrange(len(program)) for _ in range(chance.choice((1, 1, 2, 2, 2)))]
        faults = [_fault(chance, store, _CALLS.get(program[place]["do"], _FEW_CALLS)) for place in places]
    for place, fault in sorted(zip(places, faults, strict=True), key=lambda both: -both[0]):
        program.insert(place, fault)
    for step in program:
        # Drawn last: what is drawn before stays as it was for the same seed.
        if step["do"] == "write":
            step["staging"] = chance.random() < 0.25
    if chance.random() < 0.1:
        spoil = {"do": "spoil", "which": chance.randrange(NUM_FILES), "cut": chance.random() < 0.5}
        again = {"do": "open", "name": chance.randrange(len(NAMES)), "by": chance.choice(("url", "key"))}
        program += [{"do": "close"}, spoil, again if chance.random() < 0.5 else _write(chance)]
    for step in program:
        if step["do"] == "write":
            step["loses"] = chance.random() < 0.04
    if chance.random() < 0.3:
        program += _between_looks(chance, store)
    return [begin, *program]


def _between_looks(chance: random.Random, store: str) -> list[Step]:
    """A kept entry, and a fault at one of the few calls between two looks at it: elsewhere it is seldom there."""
    write = {**_write(chance), "kept": True}
    if store == "folders" and chance.random() < 0.5:
        # While its manifest is seen and not yet filled.
        return [{"do": "fault", "kind": "rival", "at": chance.randrange(23, 29), "rival": "commit"}, write]
    fault: Step = {"do": "fault", "kind": "rival", "at": chance.randrange(12)}
    fault["rival"] = chance.choice(("commit", "delete", "sweep"))
    if chance.random() < 0.5:
        fault = {"do": "fault", "kind": "stale", "at": chance.randrange(5), "age": chance.choice((1, 2, 4, 8))}
    then: Step = chance.choice(
        (
            {"do": "open", "name": write["name"], "by": "url"},
            {"do": "close"},
            {"do": "sweep", "kept": True, "older": 0, "only": None, "dry": chance.random() < 0.3},
        )
    )
    return [write, fault, then, {**_read(chance), "which": -1}]


def _whole_program(chance: random.Random) -> list[Step]:
    """Convert, read, resume, delete, sweep."""
    source: list[Step] = [_write(chance, then="hold")]
    if chance.random() < 0.3:
        source = [{"do": "table", "table": chance.choice(("parquet", "delta"))}]
    name = source[0].get("name", 0)
    ends: list[Step] = [{"do": "close"}, {"do": "delete", "name": name}]
    if chance.random() < 0.3:
        ends = [_write(chance, then="hold"), {"do": "kill"}]
    return [
        *source,
        _read(chance),
        {"do": "open", "name": name, "by": chance.choice(("url", "key"))},
        {**_read(chance), "stop": chance.randint(1, 4)},
        *ends,
        {"do": "sweep", "kept": chance.random() < 0.5, "older": 0, "only": None, "dry": False},
    ]


def _fault(chance: random.Random, store: str, most: int) -> Step:
    place = "local" if store == "local" else "remote"
    kind = chance.choice(KINDS[place])
    fault: Step = {"do": "fault", "kind": kind, "at": chance.randrange(most if kind != "cut" else 1 + most // 4)}
    if kind in ("before", "after"):
        fault["error"] = chance.choice(list(ERRORS[place]))
    if kind == "crash" or (kind in ("before", "hang") and chance.random() < 0.35):
        fault["lasts"] = True
    if kind in ("stale", "late"):
        fault["age"] = chance.choice((1, 2, 4, 8, 100))
    if kind == "rival":
        fault["rival"] = chance.choice(("commit", "delete", "sweep"))
    return fault


def _write(chance: random.Random, then: str | None = None) -> Step:
    return {
        "do": "write",
        "name": chance.randrange(len(NAMES)),
        "kept": chance.random() < 0.6,
        "then": then or chance.choice(("hold", "close")),
    }


def _read(chance: random.Random) -> Step:
    return {
        "do": "read",
        "which": chance.randrange(4),
        "batch_size": chance.choice((5, 7, 16)),
        "shuffle": chance.random() < 0.5,
        "shards": chance.choice((1, 1, 1, 2, 3)),
        "chosen": chance.random() < 0.25,
        "verify": chance.random() < 0.25,
        "local": chance.random() < 0.4,
        "copy": chance.random() < 0.25,
        "stop": chance.choice((None, None, 0, 1, 3)),
    }


def _step(chance: random.Random) -> Step:
    kind = chance.choices(
        ("write", "read", "open", "close", "delete", "sweep", "renew", "kill", "rewrite", "user", "table"),
        (5, 7, 4, 2, 3, 4, 1, 3, 1, 1, 1),
    )[0]
    name = chance.randrange(len(NAMES))
    if kind == "write":
        return _write(chance)
    if kind == "read":
        return _read(chance)
    if kind == "open":
        return {"do": "open", "name": name, "by": chance.choice(("url", "key"))}
    if kind == "delete":
        return {"do": "delete", "name": name}
    if kind == "sweep":
        return {
            "do": "sweep",
            "kept": chance.random() < 0.3,
            "older": chance.choice((0, 0, 100, 10_000)),
            "only": chance.choice((None, None, None, name)),
            "dry": chance.random() < 0.15,
        }
    if kind == "table":
        return {"do": "table", "table": chance.choice(("parquet", "delta"))}
    return {"do": kind}


def _run(steps: Sequence[Step], tables: Tables, folder: Path) -> Counter[str]:
    begin = next((step for step in steps if step["do"] == "begin"), {"store": "folders", "threads": 1})
    with World(begin["store"], folder, tables, threads=begin["threads"]) as world:
        for step in steps:
            if step["do"] == "fault":
                world.arm({name: value for name, value in step.items() if name != "do"})
            elif step["do"] != "begin":
                world.take(step)
        world.end()
    return world.done


CAMPAIGN = Campaign(name="store", draw=_draw, run=_run, shared=_shared, max_seconds=60.0)
