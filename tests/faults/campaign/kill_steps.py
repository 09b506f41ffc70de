"""What the cases of `kill` do: drawn by chance, and any part of it can be done alone."""

from __future__ import annotations

import random
from typing import Any

from tests.faults.campaign.cases import Step
from tests.faults.campaign.kill_actors import KEYS

DAY_SECONDS = 86_400.0


def _draw_fate(chance: random.Random, command: str) -> dict[str, Any] | None:
    if chance.random() < 0.25:
        return None
    # So many calls reach the store if nothing is in the way.
    most = {"write": 62, "train": 118, "open": 12, "read": 7, "release": 6, "delete": 19, "sweep": 34}[command]
    kinds = {"at a call": 55, "at a moment": 15, "error": 16, "torn": 9, "quota": 5}
    if command == "train":
        # Its own file would be too large for it.
        del kinds["quota"]
    kind = chance.choices([*kinds], [*kinds.values()])[0]
    of = "executor" if command in ("write", "train") and chance.random() < 0.3 else "actor"
    at = chance.randint(1, chance.choice([min(12, most), 40 if of == "executor" else most]))
    if kind == "at a call":
        return {"how": chance.choice(["kill", "pause"]), "at": at, "of": of}
    if kind == "at a moment":
        return {"how": chance.choice(["kill", "pause"]), "after_us": int(10 ** chance.uniform(2, 4.7))}
    if kind == "torn":
        return {"how": "torn", "at": chance.randint(1, 40 if of == "executor" else 4), "of": of}
    if kind == "quota":
        return {"how": "quota", "bytes": int(10 ** chance.uniform(0.5, 3.8))}
    how = chance.choice(["ENOSPC", "EROFS", "EIO"])
    return {"how": how, "at": at, "lasts": chance.random() < 0.5, "of": of}


def _draw_command(chance: random.Random) -> Step:
    command = chance.choices(
        ["write", "open", "read", "release", "delete", "sweep", "train"], [24, 16, 14, 8, 20, 20, 14]
    )[0]
    step: Step = {"do": command}
    if command in ("write", "open", "train"):
        step["key"] = chance.choice(["kept", "passing"])
    if command == "sweep":
        step["kept"] = chance.random() < 0.3
    if command == "train":
        step |= {"batch_size": chance.choice([5, 7, 16]), "shards": chance.choice([1, 2]), "save_every": 2}
    return step | {"fate": _draw_fate(chance, command)}


def _draw_change(chance: random.Random) -> Step:
    """A step that no command of an actor is."""
    # A loader with worker processes takes a second.
    changes = {"pass time": 40, "store clock": 12, "disk": 24, "leave": 14, "foreign": 10, "load": 1.5}
    change = chance.choices([*changes], [*changes.values()])[0]
    if change == "pass time":
        return {"do": change, "seconds": chance.choice([50, 100, 240, 240, 240])}
    if change == "store clock":
        how = chance.choice([{"jump_seconds": DAY_SECONDS}, {"jump_seconds": -DAY_SECONDS}, {"rate": 0}])
        return {"do": change, **how}
    if change == "disk":
        kind = chance.choices(["pages", "inodes", "read-only", "fine"], [35, 15, 30, 20])[0]
        return {"do": change, "how": kind, "left": chance.randint(0, 9)}
    if change == "leave":
        return {"do": change, "key": chance.choice(["kept", "passing"])}
    if change == "load":
        options = {"workers": chance.choice([1, 2]), "batch_size": chance.choice([3, 8]), "which": chance.randint(0, 1)}
        return {"do": change, "key": chance.choice([*KEYS]), **options, "kill_at": chance.randint(1, 7)}
    return {"do": change, "where": chance.choice(["beside", "root", "entry", "data"]), "key": chance.choice([*KEYS])}


def draw_steps(chance: random.Random) -> list[Step]:
    """Commands of four actors, and what happens to them, their clocks and their disk."""
    day = DAY_SECONDS
    traits = [
        {
            "clock": chance.choices([0, day, -day], [70, 15, 15])[0],
            "host": chance.choices([None, "another/host"], [80, 20])[0],
        }
        for _ in range(4)
    ]
    if chance.random() < 0.1:
        for one in traits[:3]:
            one |= {"group": True, "host": None}
    steps: list[Step] = []
    if chance.random() < 0.4:
        steps.append({"do": "leave", "key": chance.choice(["kept", "passing"])})
    for _ in range(chance.randint(4, 10)):
        number = chance.randrange(4)
        who = {"actor": number, "traits": traits[number]}
        kind = chance.choices(["command", "continue", "kill", "jump", "change"], [58, 9, 5, 4, 24])[0]
        if kind == "command":
            steps.append(_draw_command(chance) | who | {"waits": chance.random() < 0.85})
        elif kind == "change":
            steps.append(_draw_change(chance))
        elif kind == "jump":
            steps.append({"do": "jump", "seconds": chance.choice([day, -day, None]), **who})
        else:
            steps.append({"do": kind, "actor": number})
    return steps
