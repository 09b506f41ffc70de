"""Processes are killed, stopped, or out of disk at any moment; what survives, and what comes later, keeps the laws.

Drivers with executors, readers, trainers and sweepers on one cache directory. Each dies or stops at a call that
reaches the store, or at some microsecond; meanwhile clocks jump or stand still, and the disk is full or read-only.

The clock that counts is the store's, which shows in the times of its files: a lease is silent for as long as that
clock says. If it jumps forward, every lease counts as dead until it is renewed, so what it held may be gone. The clocks
of the processes count for nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.cache import leases, roots
from tests.faults.campaign.cases import Campaign, Step, require
from tests.faults.campaign.kill_actors import GROUP_SILENT_SECONDS, KEYS, NUM_EPOCHS, NUM_ROWS, rows_of
from tests.faults.campaign.kill_disk import FINE, Disk, World, may_mount, open_disk
from tests.faults.campaign.kill_family import Child, Family, make_template
from tests.faults.campaign.kill_loader import Loaders
from tests.faults.campaign.kill_steps import DAY_SECONDS, draw_steps
from tests.faults.small_entries import make_old

_SILENT_SECONDS = 3 * leases.RENEW_SECONDS
_MARGIN_SECONDS = 1.0
_NOTICE_SECONDS = 0.3
_PR_SET_CHILD_SUBREAPER = 36

# What is known of it -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Holding:
    """An entry that an actor was told it may read."""

    key: str
    files: dict[str, int]
    is_void: bool
    """Its lease was silent for too long by the store's clock, or could not be put: it may be gone."""


@dataclass(slots=True, eq=False)
class _Actor:
    """The parent's side of an actor."""

    child: Child
    holdings: dict[int, _Holding]
    is_of_group: bool
    """A launcher has started it with others, and they share a lease."""

    renewed_at: float
    """When, by the store's clock, all its leases were alive."""

    command: dict[str, Any] | None = None
    """What it is at."""

    saw_kept: bool = False
    """The entry `kept` was there when it began."""

    is_void: bool = False
    """It was silent for too long while at this command."""

    has_trouble: bool = False
    """The disk was not fine while it was at this command, or it was told to meet an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """What all cases of a process use."""

    template: Path
    """A cache with an entry of each key."""

    may_mount: bool
    loaders: Loaders


class _Case:
    def __init__(self, family: Family, folder: Path, disk: Disk, world: World, shared: _Shared) -> None:
        self.family, self.folder, self.disk, self.world, self.shared = family, folder, disk, world, shared
        self.cache = disk.folder / "cache"
        self.root = self.cache / roots.DIRECTORY
        self.actors: dict[int, _Actor] = {}
        self.done: Counter[str] = Counter()
        self.foreign: dict[Path, bytes] = {}
        self.is_kept = False
        """A whole entry of the key `kept` was seen, and nobody was told to remove it."""

        self.died_void = False
        """A driver that had been taken for dead was killed, or kept from its store, before it could withdraw."""

    # Steps ------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        step = dict(step)
        kind = step.pop("do")
        if kind in ("pass time", "store clock", "disk", "leave", "foreign", "load"):
            getattr(self, f"_{kind.replace(' ', '_')}")(**step)
        elif kind in ("continue", "kill"):
            actor = self.actors.get(step["actor"])
            if actor is not None and kind == "kill":
                self._kill(step["actor"])
            elif actor is not None and actor.child.stopped:
                self._settle(actor)
        else:
            self._command(kind, step)
        self._look()

    def _command(self, kind: str, step: Step) -> None:
        number, traits, waits = step.pop("actor"), step.pop("traits"), step.pop("waits", True)
        if number not in self.actors:
            child = self.family.start(str(self.folder), str(self.cache), self.world, traits)
            self.actors[number] = _Actor(
                child=child, holdings={}, is_of_group=bool(traits.get("group")), renewed_at=self.world.now()
            )
            self.done["processes"] += 1
        actor = self.actors[number]
        self._finish(actor)
        if number not in self.actors:
            return
        if kind in ("read", "release", "delete") and not actor.holdings:
            return
        self.done[f"{kind}s" if kind != "delete" else "deletions"] += 1
        fate = step.get("fate") or {}
        actor.command = {"do": kind, **step}
        actor.saw_kept = self.is_kept
        actor.is_void = False
        actor.has_trouble = self.disk.how != FINE or fate.get("how") in ("ENOSPC", "EROFS", "EIO", "quota")
        if not actor.holdings:
            actor.renewed_at = self.world.now()
        if (kind == "sweep" and step["kept"]) or kind == "delete":
            self.is_kept = False
        actor.child.tell(actor.command)
        if waits or "after_us" in fate:
            self._settle(actor, fate)

    def _settle(self, actor: _Actor, fate: dict[str, Any] | None = None) -> None:
        """Let an actor go on until it has answered, died or stopped."""
        fate = fate or {}
        if actor.child.stopped:
            actor.child.go_on()
            self.done["continued"] += 1
        answer = actor.child.wait(fate)
        if answer == "dead":
            self.done["killed"] += 1
            self._forget(actor)
        elif answer == "stopped":
            self.done["stopped"] += 1
            self._find_void()
        else:
            self._judge(actor, answer)

    def _await_leases(self) -> None:
        """Those who counted on a process that has ended notice at once, and one of them puts a lease."""
        self._find_void()
        time.sleep(_NOTICE_SECONDS)

    def _finish(self, actor: _Actor) -> None:
        """Let an actor go on, however often it stops, until it has done what it was told, or is dead."""
        while actor.command is not None and actor in self.actors.values():
            self._settle(actor)

    def _kill(self, number: int) -> None:
        self.actors[number].child.kill()
        self.done["killed"] += 1
        self._forget(self.actors[number])

    def _forget(self, actor: _Actor) -> None:
        if actor.is_of_group:
            self._await_leases()
        self.died_void |= actor.is_void
        self.actors = {number: other for number, other in self.actors.items() if other is not actor}

    def _pass_time(self, seconds: float) -> None:
        """All clocks go on; who runs renews its leases each minute meanwhile, and who is stopped does not."""
        for actor in list(self.actors.values()):
            if actor.command is not None and not actor.child.stopped:
                self._settle(actor)
        if not self.world.stands_still:
            self.world.set_clock(jump_seconds=seconds)
        for actor in self.actors.values():
            if actor.child.can_beat():
                actor.child.beat()
                # On a disk that refuses it, a lease is not renewed.
                if self.disk.how == FINE:
                    actor.renewed_at = self.world.now()
                    self.done["renewals"] += 1
        if any(actor.is_of_group and actor.child.stopped for actor in self.actors.values()):
            # Meanwhile those who count on it have noticed.
            time.sleep(1.5 * GROUP_SILENT_SECONDS)
        self._find_void()

    def _store_clock(self, **how: Any) -> None:
        self.world.set_clock(**how)
        self.done["jumps of the store's clock"] += 1
        self._find_void()

    def _find_void(self) -> None:
        now = self.world.now()
        for actor in self.actors.values():
            if actor.is_of_group and not actor.child.can_beat():
                # It cannot put a lease of its own when the process that holds their lease ends.
                actor.renewed_at = -math.inf
            if now - actor.renewed_at > _SILENT_SECONDS - _MARGIN_SECONDS:
                for holding in actor.holdings.values():
                    holding.is_void = True
                if actor.command is not None:
                    actor.is_void = True

    def _disk(self, how: str, left: int) -> None:
        if how == "fine":
            self.disk.mend()
        elif how == "read-only":
            self.done["read-only disks"] += self.disk.refuse_writes()
        else:
            is_pages = how == "pages"
            self.done["full disks"] += self.disk.fill(left if is_pages else None, None if is_pages else left)
        for actor in self.actors.values():
            actor.has_trouble = actor.has_trouble or self.disk.how != FINE

    def _leave(self, key: str) -> None:
        """An entry that an earlier run left."""
        if self.disk.how == FINE and not (self.root / KEYS[key]).exists():
            self.root.mkdir(parents=True, exist_ok=True)
            shutil.copytree(self.shared.template / roots.DIRECTORY / KEYS[key], self.root / KEYS[key])
            shutil.copyfile(self.shared.template / roots.DIRECTORY / roots.OWNER_FILE, self.root / roots.OWNER_FILE)
            self.done["entries left"] += 1

    def _foreign(self, where: str, key: str) -> None:
        """A file of the user's."""
        folders = {
            "beside": [self.cache],
            "root": [self.root] if (self.root / roots.OWNER_FILE).exists() else [],
            "entry": [self.root / KEYS[key]],
            "data": sorted((self.root / KEYS[key]).glob("data-*/")),
        }[where]
        if self.disk.how == FINE:
            for folder in folders[:1]:
                if folder.is_dir():
                    path = folder / "part-1.csv"
                    path.write_bytes(b"mine")
                    self.foreign[path] = b"mine"
                    self.done["files of the user's"] += 1

    def _load(self, key: str, **options: Any) -> None:
        """A loader with worker processes, of which one is killed."""
        answer = self.shared.loaders.run(cache=str(self.cache), key=key, **options)
        self.family.spare(self.shared.loaders.pid)
        self.done["loaders"] += 1
        self.done["workers killed"] += "is_whole" in answer and answer["error"] != ""
        require(answer["is_named"], "an error is one of ours and names the cache", str(answer))
        if "is_whole" in answer:
            law = "a loader whose worker is killed goes on with each row once"
            require(sorted(answer["rows"]) == rows_of(key), law, str(answer))
            self.done["rows compared"] += NUM_ROWS
        else:
            require(key != "kept" or not self.is_kept, "nothing fails without a fault", str(answer))

    # Laws -------------------------------------------------------------------------------

    def _judge(self, actor: _Actor, answer: dict[str, Any]) -> None:
        command, actor.command = actor.command, None
        assert command is not None
        self.died_void |= actor.is_void and actor.has_trouble
        self.done += Counter(answer["done"])
        self.done["calls"] += answer["calls"]
        self.done["errors met"] += answer["failed"]
        was_void = actor.is_void or any(holding.is_void for holding in actor.holdings.values())
        old = actor.holdings
        actor.holdings = {}
        for held in answer["held"]:
            before = old.get(held["number"])
            is_void = actor.is_void or not held["is_leased"] or (before is not None and before.is_void)
            actor.holdings[held["number"]] = before or _Holding(key=held["key"], files=held["files"], is_void=is_void)
            if is_void:
                actor.holdings[held["number"]].is_void = True
        if "error" not in answer:
            if command["do"] == "read":
                wanted = [rows_of(held["key"]) for held in answer["held"]]
                require(answer["result"] == wanted, "who opened rows reads exactly them", str(answer["result"]))
            return
        told = f"{command}: {answer['error']}\n{answer['trace']}"
        self.done["errors raised"] += 1
        require(answer["is_named"], "an error is one of ours and names the cache", told)
        if actor.has_trouble or was_void:
            return
        is_gone = command["do"] == "open" and not (command["key"] == "kept" and actor.saw_kept and self.is_kept)
        require(is_gone, "nothing fails without a fault", told)

    def _look(self) -> None:
        """What must hold at every moment."""
        for number, actor in self.actors.items():
            for holding in actor.holdings.values():
                if not holding.is_void and (actor.command or {}).get("do") not in ("release", "delete"):
                    missing = [path for path, size in holding.files.items() if _size_of(path) != size]
                    require(not missing, "what is held is not deleted", f"actor {number} holds {missing}")
        is_whole = self._is_whole("kept")
        if self.is_kept:
            require(is_whole, "what is kept stays", f"{self._tree()}")
        busy = [actor.command for actor in self.actors.values() if actor.command is not None]
        is_at_risk = any(one["do"] in ("write", "train", "delete") or one.get("kept") for one in busy)
        self.is_kept = is_whole and not is_at_risk
        self._is_whole("passing")
        for path, content in self.foreign.items():
            require(path.exists() and path.read_bytes() == content, "the user's files stay", str(path))

    def _is_whole(self, key: str) -> bool:
        """Whether the entry is there with all its files; a manifest that names what is not there is a violation."""
        manifest = self.root / KEYS[key] / roots.MANIFEST
        while True:
            try:
                content = manifest.read_bytes()
            except OSError:
                return False
            files = json.loads(content)["files"]
            sizes = zip(files["name"], files["bytes"], strict=True)
            missing = [name for name, size in sizes if _size_of(manifest.parent / name) != size]
            with contextlib.suppress(OSError):
                if manifest.read_bytes() != content:
                    continue
            if not missing:
                return True
            # A driver that was stopped for so long that it was swept may commit, look again, and withdraw.
            is_withdrawn = self.died_void or any(actor.is_void for actor in self.actors.values() if actor.command)
            require(is_withdrawn or not manifest.exists(), "a manifest names what is there", f"{missing}")
            return False

    def _tree(self) -> list[str]:
        return sorted(str(path.relative_to(self.cache)) for path in self.cache.rglob("*"))

    # The end ----------------------------------------------------------------------------

    def end(self) -> None:
        """The survivors go on, new processes come; then all die, and one sweep removes what is left."""
        if self.disk.how != FINE:
            self.disk.mend()
        for actor in list(self.actors.values()):
            self._finish(actor)
        self._look()
        for number in list(self.actors):
            for command in ("read", "release"):
                if number in self.actors:
                    self._command(command, {"actor": number, "traits": {}})
        self._look()
        newcomer = {"actor": 9, "traits": {}}
        for key in KEYS:
            if (self.folder / f"{key}.state").exists():
                options = {"batch_size": 6, "shards": 1, "save_every": 50}
                self._command("train", {"key": key, **options, **newcomer})
                self._check_training(key)
        for command in ({"do": "write", "key": "kept"}, {"do": "write", "key": "passing"}, {"do": "read"}):
            self._command(str(command.pop("do")), {**command, **newcomer})
        self._look()
        require(self.is_kept, "a new process can always convert", str(self._tree()))
        self.family.kill_all()
        self.actors.clear()
        # Whatever the clocks were: all is old.
        self.world.set_clock(is_right=True)
        for path in self.cache.rglob("*"):
            make_old(path, 10 * DAY_SECONDS)
        self._command("sweep", {"kept": True, "actor": 10, "traits": {}})
        left = set(self.root.rglob("*")) - {self.root / roots.OWNER_FILE}
        ours = {path for path in left if not any(one == path or path in one.parents for one in self.foreign)}
        require(not ours, "when all is dead and old one sweep leaves nothing", str(sorted(map(str, ours))))
        for path, content in self.foreign.items():
            require(path.exists() and path.read_bytes() == content, "the user's files stay", str(path))

    def _check_training(self, key: str) -> None:
        record = json.loads((self.folder / f"{key}.state").read_text())
        wanted = [sorted(rows_of(key))] * NUM_EPOCHS
        found = [sorted(epoch) for epoch in record["epochs"][:-1]]
        require(found == wanted, "a trainer that goes on has each row as often as without a kill", str(record))
        self.done["trainings ended"] += 1
        self.done["rows compared"] += NUM_EPOCHS * NUM_ROWS


def _size_of(path: str | Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


# Campaign ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[_Shared]:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    is_mounted = may_mount()
    template = folder / "template"
    writer = os.fork()
    if not writer:
        # This process itself must never have threads: it forks.
        make_template(template, str(folder), World())
        os._exit(0)
    os.waitpid(writer, 0)
    with contextlib.closing(Loaders()) as loaders:
        yield _Shared(template=template, may_mount=is_mounted, loaders=loaders)


def _run(steps: Sequence[Step], shared: _Shared, folder: Path) -> Counter[str]:
    world, place = World(), folder / "disk"
    place.mkdir()
    with (
        contextlib.closing(world),
        open_disk(place, world, is_mounted=shared.may_mount) as disk,
        contextlib.closing(Family()) as family,
    ):
        family.spare(shared.loaders.pid)
        case = _Case(family, folder, disk, world, shared)
        case.cache.mkdir()
        for step in steps:
            case.take(step)
        case.end()
        return case.done


CAMPAIGN = Campaign(name="kill", draw=draw_steps, run=_run, shared=_shared)
