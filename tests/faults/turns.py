"""Several processes on one cache, of which exactly one takes exactly one step at a time.

The real `cache` code runs over real files. Each call that reaches the store waits for its turn, so that a list of
turns decides who moves: the same list, the same run. The clock is the store's own and moves only when told to. A
process that crashes never takes another step (not even one in a `finally`); one that is suspended wakes up after
all its signs of life went stale.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import itertools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from converter.cache import entries, finding, leases, roots, sweeps
from converter.manifest import Manifest
from converter.schema import Field, Schema
from converter.sources.spark import write as spark_write
from converter.statistics import ColumnStatistics
from converter.storage import databricks
from converter.storage import local as storage_local
from converter.storage.directory import FileInfo, Storage
from converter.storage.local import LocalStorage
from tests.faults.small_entries import KEY

SUSPENDED_SECONDS = 4 * leases.RENEW_SECONDS
MAX_STEPS = 2000
NUM_FILES = 2
SCHEMA = Schema((Field(name="id", dtype="int64"),))


class Crash(BaseException):
    """The process is dead: raised at each of its further steps, so that nothing it tries has an effect."""


class TurnLock:
    """A lock whose waiting is a step, so that who holds it can be given a turn."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_held = False

    def __enter__(self) -> None:
        while self._is_held:
            self._world.wait()
        self._is_held = True

    def __exit__(self, *raised: object) -> None:
        self._is_held = False

    def wait_for(self, claim: Callable[[], bool], timeout: float) -> None:
        """Hold it once the claim holds; time does not pass by itself here."""
        while not claim():
            self._is_held = False
            self._world.wait()
            self.__enter__()

    def notify_all(self) -> None:
        """Who waits looks again at each of its turns."""


class Pulse(leases._Heartbeat):
    """The real heartbeat without its thread: renewing is a step that the list of turns decides on."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._lock: Any = TurnLock(world)
        self._condition = self._lock

    def add(self, lease: leases.Lease) -> None:
        with self._lock:
            self._leases.add(lease)


@dataclass(eq=False)
class Process:
    number: int
    host: str
    pulse: Pulse
    is_alive: bool = True
    was_suspended: bool = False


@dataclass(eq=False)
class Holding:
    """An entry that a process was told it may read."""

    process: Process
    entry: entries.HeldEntry
    is_void: bool = False
    """The process missed its renewals, so its lease counts no more."""


@dataclass(eq=False)
class Actor:
    """One thread of a process: a program that moves when it is its turn."""

    name: str
    process: Process
    program: Callable[[Actor], None]
    key: str = KEY
    """The entry that it is about."""

    has_stood_still: bool = False
    """So much time passed within its operation that what it does there may count as a dead process's."""

    num_steps_left: int = 0
    has_ended: bool = False
    error: BaseException | None = None
    outcome: str = ""
    attempt_id: str = ""
    thread: threading.Thread | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class SteppedStorage(LocalStorage):
    """A local directory whose every call is a step; what it tells of time is the world's."""

    world: World

    def below(self, *names: str) -> Storage:
        found = super().below(*names)
        return self.world.at(found.path())

    def make_directory(self) -> None:
        with self.world.change():
            super().make_directory()

    def list(self) -> list[FileInfo]:
        self.world.step()
        times = self.world.times
        return [
            FileInfo(
                name=info.name,
                num_bytes=info.num_bytes,
                is_directory=info.is_directory,
                is_link=info.is_link,
                modified=times.get(self.path(info.name), self.world.start),
            )
            for info in super().list()
        ]

    def size(self, name: str) -> int | None:
        self.world.step()
        return super().size(name)

    def read(self, name: str) -> bytes:
        self.world.step()
        return super().read(name)

    def delete_file(self, name: str) -> None:
        with self.world.change():
            super().delete_file(name)

    def delete_directory_if_empty(self) -> None:
        with self.world.change():
            super().delete_directory_if_empty()

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if self.world.is_fine:
            return super().put_if_absent(name, data)
        with self.world.change():
            return super().put_if_absent(name, data)

    def now(self) -> float:
        if self.world.is_fine:
            return super().now()
        self.world.step()
        if not os.path.isdir(self.path()):
            raise FileNotFoundError(self.path())
        return self.world.clock


class _Module:
    """A module of which some names are replaced, for one other module alone."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class World:
    """A cache directory and the processes on it."""

    def __init__(self, directory: Path, *, is_fine: bool, has_foreign: bool = False) -> None:
        self.directory = str(directory)
        self.is_fine = is_fine
        """Whether the steps within one `put_if_absent`, `put` and `now` are steps of their own."""
        self.start = self.clock = 1_000_000.0
        self.times: dict[str, float] = {}
        self.actors: list[Actor] = []
        self.holdings: list[Holding] = []
        self.committed: dict[bytes, tuple[str, Manifest]] = {}
        self.violations: list[str] = []
        self.trace: list[str] = []
        self.num_steps = 0
        self.max_steps = MAX_STEPS
        self.turns: list[tuple[Actor, int]] = []
        self.current: Actor | None = None
        self._given_back = threading.Semaphore(0)
        self._is_atomic = False
        self._numbers = itertools.count()
        self._storage_class = type("SteppedStorageHere", (SteppedStorage,), {"world": self})
        self.filesystem = LocalFileSystem()
        os.makedirs(self.directory)
        self.foreign: dict[str, bytes] = {}
        if has_foreign:
            self.add_foreign("notes.txt", f"{roots.DIRECTORY}/notes.txt", f"{roots.DIRECTORY}/{KEY}/part-1.parquet")
        self.root_path = f"{self.directory}/{roots.DIRECTORY}"

    def prepare(self) -> None:
        """Let the root exist before anybody comes."""
        os.makedirs(self.root_path, exist_ok=True)
        Path(self.root_path, roots.OWNER_FILE).write_bytes(roots._OWNER_BYTES)

    def add_foreign(self, *names: str) -> None:
        for name in names:
            path = Path(self.directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"mine")
            self.foreign[str(path)] = b"mine"

    def at(self, path: str) -> Storage:
        return self._storage_class(path, self.filesystem)

    @property
    def root(self) -> Storage:
        return self.at(self.root_path)

    # Turns -------------------------------------------------------------------

    def process(self, host: str = "one") -> Process:
        return Process(number=1000 + next(self._numbers), host=host, pulse=Pulse(self))

    def actor(self, name: str, program: Callable[[World, Actor], None], process: Process | None = None) -> Actor:
        actor = Actor(name=name, process=process or self.process(), program=lambda own: program(self, own))
        self.actors.append(actor)
        return actor

    def step(self) -> None:
        """Wait for the turn to make one call."""
        actor = self.current
        assert actor is not None
        if self._is_atomic:
            return
        if actor.num_steps_left == 0 and actor.process.is_alive:
            self._given_back.release()
            actor.turn.acquire()
        if not actor.process.is_alive:
            raise Crash
        actor.num_steps_left -= 1
        self.num_steps += 1
        if self.num_steps > self.max_steps:
            self.violations.append(f"no end after {self.max_steps} steps")
            actor.process.is_alive = False
            raise Crash

    def wait(self) -> None:
        """Give the turn back: nothing can be done before somebody else has moved."""
        assert self.current is not None
        self.current.num_steps_left = 0
        self.step()

    @contextlib.contextmanager
    def change(self) -> Iterator[None]:
        """One step that changes the store; what must hold is looked at after it."""
        self.step()
        outer, self._is_atomic = self._is_atomic, True
        try:
            yield
        finally:
            self._is_atomic = outer
            self.check()

    def run(self, actor: Actor, num_steps: int) -> None:
        """Let an actor take so many steps, or fewer if it ends."""
        if actor.has_ended:
            return
        self.current, actor.num_steps_left = actor, num_steps
        before = self.num_steps
        if actor.thread is None:
            actor.thread = threading.Thread(target=self._perform, args=(actor,), daemon=True)
            actor.thread.start()
        else:
            actor.turn.release()
        self._given_back.acquire()
        self.trace.append(f"{actor.name}×{self.num_steps - before}")

    def _perform(self, actor: Actor) -> None:
        try:
            actor.program(actor)
        except BaseException as error:  # noqa: BLE001 (looked at by the test)
            actor.error = error
        actor.has_ended = True
        self._given_back.release()

    def crash(self, process: Process) -> None:
        """End a process where it stands."""
        process.is_alive = False
        self.trace.append(f"crash of {process.number}")
        for actor in self.actors:
            if actor.process is process and actor.thread is not None and not actor.has_ended:
                self.run(actor, 0)

    def suspend(self, process: Process) -> None:
        """Time passes that this process does not notice; the others renew their signs of life meanwhile."""
        self.trace.append(f"suspension of {process.number}")
        process.was_suspended = True
        self.clock += SUSPENDED_SECONDS
        for other in {actor.process for actor in self.actors}:
            if other is not process and other.is_alive:
                for lease in other.pulse._leases:
                    path = lease.entry.path(lease.name)
                    if path in self.times:
                        self.times[path] = self.clock
        for holding in self.holdings:
            holding.is_void = holding.is_void or holding.process is process

    def finish(self) -> None:
        """Take the turns that are planned, then let everybody run to the end, one after another."""
        for actor, num_steps in self.turns:
            if num_steps:
                self.run(actor, num_steps)
        while any(not actor.has_ended for actor in self.actors):
            for actor in self.actors:
                self.run(actor, MAX_STEPS + 1)

    def close(self) -> None:
        for process in {actor.process for actor in self.actors}:
            if any(actor.thread is not None and not actor.has_ended for actor in self.actors):
                self.crash(process)
        for actor in self.actors:
            if actor.thread is not None:
                actor.thread.join()
        shutil.rmtree(self.directory)

    # What must hold ----------------------------------------------------------

    def check(self) -> None:
        """Whoever was told that it may read can read, and a manifest in place names only what is there."""
        for holding in self.holdings:
            if holding.is_void or not holding.process.is_alive:
                continue
            missing = self._missing(holding.entry.key, holding.entry.manifest)
            if missing:
                self._violated(f"process {holding.process.number} holds an entry without {missing}")
            if not os.path.exists(holding.entry.lease.entry.path(holding.entry.lease.name)):
                self._violated(f"the lease of process {holding.process.number} was removed")
        for content, (path, manifest) in self.committed.items():
            missing = self._missing(os.path.basename(os.path.dirname(path)), manifest)
            if missing and _read_or_none(path) == content:
                self._violated(f"a committed manifest names {missing}")

    def _missing(self, key: str, manifest: Manifest) -> list[str]:
        sizes = zip(manifest.file_names, manifest.file_bytes.tolist(), strict=True)
        paths = {name: f"{self.root_path}/{key}/{name}" for name in manifest.file_names}
        return [name for name, size in sizes if not os.path.exists(paths[name]) or os.stat(paths[name]).st_size != size]

    def _violated(self, what: str) -> None:
        actor = self.current.name if self.current else "?"
        self.violations.append(f"{what} (after {', '.join(self.trace)}, then in {actor})")

    def holds(self, actor: Actor, entry: entries.HeldEntry) -> Holding:
        is_void = actor.process.was_suspended or actor.has_stood_still
        holding = Holding(process=actor.process, entry=entry, is_void=is_void)
        self.holdings.append(holding)
        self.check()
        return holding

    def left(self) -> list[str]:
        """What stands in the cache directory besides the marker and what is foreign, once all are dead and swept."""
        for process in {actor.process for actor in self.actors}:
            process.is_alive = False
        self.holdings.clear()
        self.clock += SUSPENDED_SECONDS
        self.num_steps = 0
        janitor = self.actor("janitor", sweep)
        self.run(janitor, MAX_STEPS)
        if janitor.error is not None:
            raise janitor.error
        found = []
        for directory, folders, files in os.walk(self.root_path):
            names = [os.path.join(directory, name) for name in [*folders, *files]]
            found += [os.path.relpath(name, self.root_path) for name in names if not self._is_expected(name)]
        return found

    def _is_expected(self, path: str) -> bool:
        return path == f"{self.root_path}/{roots.OWNER_FILE}" or any(name.startswith(path) for name in self.foreign)

    def data_folders(self) -> list[str]:
        """The attempts whose data are there."""
        entry = f"{self.root_path}/{KEY}"
        names = os.listdir(entry) if os.path.isdir(entry) else []
        return [name for name in names if name.startswith("data-") and os.path.isdir(f"{entry}/{name}")]

    def changed_foreign(self) -> list[str]:
        return [path for path, content in self.foreign.items() if _read_or_none(path) != content]


def _read_or_none(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        return None


# The programs: what converters do, step by step --------------------------------


def write(world: World, actor: Actor) -> entries.HeldEntry:
    """What `write_dataframe` does around the job of the executors."""
    attempt = entries.begin(world.root, actor.key, application_id="app-1")
    actor.attempt_id = attempt.attempt_id
    directory = f"{world.root_path}/{actor.key}/{attempt.data_directory}"
    names = [f"part-{index:05d}-{0:08x}-0000.parquet" for index in range(NUM_FILES)]
    manifest = Manifest(
        schema=SCHEMA,
        statistics={field.name: ColumnStatistics(field=field, null_count=0) for field in SCHEMA},
        file_names=tuple(f"{attempt.data_directory}/{name}" for name in names),
        file_bytes=np.full(NUM_FILES, 4, np.int64),
        row_group_file=np.arange(NUM_FILES),
        row_group_rows=np.ones(NUM_FILES, np.int64),
        row_group_bytes=np.full(NUM_FILES, 4, np.int64),
        fingerprint=attempt.attempt_id,
        num_rows=NUM_FILES,
    )
    try:
        for name in names:
            with world.change():
                # The executors run elsewhere and make the folders they need.
                os.makedirs(directory, exist_ok=True)
                Path(directory, name).write_bytes(b"PAR1")
        if world.foreign:
            world.add_foreign(f"{roots.DIRECTORY}/{actor.key}/{attempt.data_directory}/mine.csv")
        entries.delete_unlisted(world.root, attempt, manifest)
        entry = entries.commit(world.root, attempt, manifest)
    except BaseException:
        entries.abandon(world.root, attempt)
        raise
    actor.outcome = entry.manifest.fingerprint
    if entry.manifest is manifest:
        world.committed[manifest.to_json()] = (f"{world.root_path}/{actor.key}/{roots.MANIFEST}", manifest)
    return entry


def create(world: World, actor: Actor) -> None:
    """Write, and hold."""
    world.holds(actor, write(world, actor))


def create_and_let_go(world: World, actor: Actor) -> None:
    """Write, and keep the entry for others."""
    holding = world.holds(actor, write(world, actor))
    world.holdings.remove(holding)
    holding.entry.release()


def create_and_delete(world: World, actor: Actor) -> None:
    holding = world.holds(actor, write(world, actor))
    world.holdings.remove(holding)
    holding.entry.delete()


def make(world: World, actor: Actor) -> None:
    """Use the entry, or write it where there is none, and hold."""
    adopted = spark_write._adopt(world.root, actor.key)
    if adopted is None:
        adopted = write(world, actor)
    actor.outcome = adopted.manifest.fingerprint
    world.holds(actor, adopted)


def _open(world: World, actor: Actor) -> Holding | None:
    adopted = entries.adopt(world.root, actor.key)
    actor.outcome = "none"
    if adopted is None:
        return None
    if adopted.damage is not None:
        leases.release(adopted.lease)
        raise adopted.damage
    actor.outcome = adopted.manifest.fingerprint
    return world.holds(actor, adopted)


def open_and_hold(world: World, actor: Actor) -> None:
    _open(world, actor)


def open_and_let_go(world: World, actor: Actor) -> None:
    holding = _open(world, actor)
    if holding is not None:
        world.holdings.remove(holding)
        holding.entry.release()


def open_and_delete(world: World, actor: Actor) -> None:
    holding = _open(world, actor)
    if holding is not None:
        world.holdings.remove(holding)
        holding.entry.delete()


def sweep(world: World, actor: Actor) -> None:
    """Remove whatever nobody alive holds."""
    sweeps.sweep_root(world.root, older_than_seconds=0, kept=True)


def renew(world: World, actor: Actor) -> None:
    """What the heartbeat thread of the process does, twice."""
    actor.process.pulse.renew()
    actor.process.pulse.renew()


def open_root(world: World, actor: Actor) -> None:
    roots.open_root(world.directory)


# ---------------------------------------------------------------------------------


def _do_nothing(_: float) -> None:
    """In place of what only takes time."""


@contextlib.contextmanager
def worlds(directory: Path) -> Iterator[Callable[..., World]]:
    """A maker of worlds; while it lasts, the cache's own heartbeat, host, processes and clock are the world's."""
    now: list[World] = []
    numbers = itertools.count()

    def make_world(*, is_fine: bool = False, has_foreign: bool = False, has_root: bool = True) -> World:
        world = World(directory / str(next(numbers)), is_fine=is_fine, has_foreign=has_foreign)
        if has_root:
            world.prepare()
        now[:] = [world]
        return world

    def process() -> Process:
        actor = now[0].current
        assert actor is not None
        return actor.process

    def process_start(number: int) -> str | None:
        alive = {actor.process.number for actor in now[0].actors if actor.process.is_alive}
        return "start" if number in alive else None

    def open_file(path: str, mode: str = "r", **options: Any) -> Any:
        with now[0].change():
            file = builtins.open(path, mode, **options)  # noqa: SIM115 (the caller closes it)
        # Of a name below an open directory this is the path.
        now[0].times[os.readlink(f"/proc/self/fd/{file.fileno()}")] = now[0].clock
        return file

    def link(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        with now[0].change():
            os.link(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            folder = os.readlink(f"/proc/self/fd/{dst_dir_fd}")
            now[0].times[f"{folder}/{target}"] = now[0].clock

    def replace(source: str, target: str) -> None:
        with now[0].change():
            os.replace(source, target)
            now[0].times[target] = now[0].clock

    def utime(path: str, *arguments: Any, **options: Any) -> None:
        with now[0].change():
            os.utime(path, *arguments, **options)
            now[0].times[path] = now[0].clock

    def unlink(path: str, **handle: int) -> None:
        with now[0].change():
            os.unlink(path, **handle)

    class Heartbeat:
        def add(self, lease: leases.Lease) -> None:
            process().pulse.add(lease)

        def remove(self, lease: leases.Lease) -> None:
            process().pulse.remove(lease)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "heartbeat", Heartbeat())
        patch.setattr(leases, "this_host", lambda: process().host)
        patch.setattr(leases, "process_start", process_start)
        patch.setattr(leases, "os", _Module(os, getpid=lambda: process().number))
        patch.setattr(roots, "os", _Module(os, getpid=lambda: process().number))
        patch.setattr(entries, "time", _Module(time, sleep=_do_nothing))
        patch.setattr(leases, "time", _Module(time, sleep=_do_nothing))
        patch.setattr(finding, "open_storage", lambda url, *_: now[0].at(str(url)))
        patch.setattr(roots, "open_storage", lambda url, *_: now[0].at(str(url)))
        stepped = {"link": link, "replace": replace, "unlink": unlink, "utime": utime, "fsync": _do_nothing}
        patch.setattr(databricks, "os", _Module(os, **stepped))
        patch.setattr(storage_local, "os", _Module(os, **stepped))
        for module in (databricks, storage_local):
            # A builtin is no name of the module: that it is used there must be shown before it is replaced.
            assert re.search(r"\bwith open\(", inspect.getsource(module)), f"{module.__name__} opens no file"
            patch.setitem(vars(module), "open", open_file)
        yield make_world


def attempt_in(path: str) -> str:
    """The attempt that a manifest on disk names; "" where there is none."""
    content = _read_or_none(path)
    return "" if content is None else str(json.loads(content)["fingerprint"])
