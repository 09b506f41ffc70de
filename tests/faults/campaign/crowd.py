"""A crowd of real processes on one cache: they convert, open, read, delete, sweep, pickle, are stopped and killed.

Who holds rows reads exactly them, nobody waits long, and in the end one sweep leaves nothing. In some cases they are
processes of one launcher, which share a lease. The cache is on a disk; `crowd_of_stores` has it elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from converter.cache import roots, sweeps
from converter.storage.directory import FileInfo, Storage
from tests.faults.campaign.cases import Campaign, Step, require
from tests.faults.campaign.crowd_parties import LONG_SECONDS
from tests.faults.campaign.left_behind import is_sign
from tests.faults.campaign.life_parts import in_memory
from tests.faults.small_entries import make_old
from tests.repository import REPOSITORY

MAX_SECONDS = 150.0
_FIRST_ACTS = ("convert", "convert", "convert", "convert", "open", "open", "unpickle", "sweep")
_ACTS = (
    "convert", "open", "open", "read", "read", "read", "begin", "begin", "go on", "go on", "close", "delete", "sweep",
    "pickle", "unpickle", "be killed", "be stopped",
)  # fmt: skip


def draw_steps(chance: random.Random) -> list[Step]:
    num_parties, num_keys = chance.randint(2, 6), chance.choice([1, 1, 2, 3])
    crowd: Step = {
        "processes_of_host": num_parties if chance.random() < 0.5 else 1,
        "stop_ms": chance.choice([1, 10, 100]),
    }
    held = [0] * num_parties
    steps = []
    for _ in range(num_parties * chance.randint(3, 12)):
        party = chance.randrange(num_parties)
        act = chance.choice(_ACTS if held[party] else _FIRST_ACTS)
        held[party] += {"convert": 1, "open": 1, "close": -1, "delete": -1}.get(act, 0)
        if act == "be killed":
            held[party] = 0
        step: Step = {
            "party": party,
            "do": act,
            "key": chance.randrange(num_keys),
            "which": chance.randrange(4),
            "num_files": chance.choice([1, 2, 3]),
            "deletes": chance.random() < 0.5,
            "pause_us": chance.choice([0, 0, 100, 1000, 10000]),
            "after_us": round(10 ** chance.uniform(1, 4.7)),
            **crowd,
        }
        steps.append(step)
    return steps


class Crowds:
    """The process that forks the parties; it imports what they need once."""

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.campaign.crowd_parties", *modules],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """All parties of a case."""
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that forks parties has ended"
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        """End it."""
        self._process.communicate()


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[Crowds]:
    with contextlib.closing(Crowds()) as crowds:
        yield crowds


def _run(steps: Sequence[Step], crowds: Crowds, folder: Path) -> Counter[str]:
    with tempfile.TemporaryDirectory(prefix="crowd-", dir=in_memory()) as quick:
        return run_in(steps, crowds, Path(quick), f"{quick}/cache", {})


def run_in(
    steps: Sequence[Step], crowds: Crowds, folder: Path, cache_dir: str, environment: dict[str, str]
) -> Counter[str]:
    """A case on one cache directory; the folder has what the parties note."""
    root = roots.open_root(cache_dir)
    told = crowds.run(
        {
            "steps": list(steps),
            "folder": str(folder),
            "cache_dir": cache_dir,
            "environment": environment,
            "processes_of_host": steps[0]["processes_of_host"],
            "stop_seconds": steps[0]["stop_ms"] / 1000,
            "max_seconds": MAX_SECONDS,
        }
    )
    done: Counter[str] = Counter(processes=len(told["statuses"]), killed=told["statuses"].count(-signal.SIGALRM))
    if steps[0]["processes_of_host"] > 1:
        done["cases of one launcher"] += 1
    require(not told["hanging"], "nobody hangs", f"{told['hanging']}: {told['stacks']}")
    for party, notes in told["notes"].items():
        for note in notes:
            if "ended" not in note:
                continue
            shown = f"party {party}, step {note['ended']} of its own, {note['do']}"
            require(not note["error"], f"no error: {note['do']}", f"{shown}: {note['error']}")
            what = f"{shown}, took {note['seconds']:.1f} s\n{told['stacks'][party]}"
            require(note["seconds"] < LONG_SECONDS, "nobody waits long without a word", what)
            done[f"{note['do']}: {note['told']}"] += 1
    for party, said in told["said"].items():
        require(not said, "nobody says anything", f"party {party}: {said}")
    others = set(told["statuses"]) - {0, -signal.SIGALRM}
    require(not others, "processes end as they should", f"{told['statuses']}")
    signs = [(folder, info.name) for folder, info in _files_below(root) if is_sign(info.name)]
    for below, name in signs:
        with contextlib.suppress(FileNotFoundError, ValueError):
            owner = json.loads(below.read(name)).get("pid")
            require(owner not in told["ended"], "who ends leaves no lease", f"{name} of {owner}")
    _let_hours_pass(cache_dir, signs)
    sweeps.sweep_root(root, older_than_seconds=0, kept=True)
    left = [name for info in root.list() if (name := info.name) != roots.OWNER_FILE]
    require(not left, "a sweep removes what is left", f"{left}: {[info.name for _, info in _files_below(root)]}")
    return done


def _files_below(storage: Storage) -> Iterator[tuple[Storage, FileInfo]]:
    """Each file, with the folder that it is in."""
    for info in storage.list():
        if info.is_directory:
            yield from _files_below(storage.below(info.name))
        else:
            yield storage, info


def _let_hours_pass(cache_dir: str, signs: Sequence[tuple[Storage, str]]) -> None:
    """Let signs of life be those of long ago. Where times cannot be set, they are as if a sweep had removed them."""
    if "://" not in cache_dir:
        for path in Path(cache_dir).rglob("*"):
            if path.is_file():
                make_old(path, 3600)
        return
    for below, name in signs:
        below.delete_file(name)


CAMPAIGN = Campaign(name="crowd", draw=draw_steps, run=_run, shared=_shared, max_seconds=MAX_SECONDS + 30)
