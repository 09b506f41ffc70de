"""What the processes of a case do, and where they die, stop or meet an error.

An actor is forked from a process that has everything imported. It takes one command after the other, as lines of JSON.
A thread renews its leases when it is told to, as the heartbeat does each minute.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from converter import open_converter, sweep
from converter.cache import entries, host_leases, leases, roots, sweeps
from converter.dataset import DatasetConverter
from converter.errors import CacheError, ConverterError
from converter.make import hold_entry
from converter.portable import filesystems
from converter.sources.spark import write as spark_write
from converter.storage import directory, local
from tests.faults.campaign.kill_disk import FULL, READ_ONLY, World
from tests.faults.small_entries import KEY, OTHER_KEY, ids_of, manifest_of, plan_write, write_task

KEYS = {"kept": KEY, "passing": OTHER_KEY}
FIRST = {"kept": 0, "passing": 1000}
NUM_ROWS, NUM_FILES, NUM_EPOCHS = 48, 4, 2
OPTIONS: dict[str, Any] = {"shuffle": True, "seed": 4, "shuffle_window_rows": 20, "uneven": "pad", "columns": ["id"]}

GROUP_SILENT_SECONDS = 1.0
"""After which those who count on the lease of their host miss its renewals, instead of two minutes."""

_MOST_TASKS = 4
"""How often a task is tried, as in Spark."""

_HANDLES = {"os.link": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.utime": 3, "os.rename": 2}
"""Which argument of an event is the directory in which the name is, if it is one."""

_CHANGES = ("os.link", "os.remove", "os.rmdir", "os.mkdir", "os.utime", "os.rename")
_LOOKS = ("os.listdir", "os.scandir")


def rows_of(name: str) -> list[int]:
    """The ids of an entry."""
    return list(range(FIRST[name], FIRST[name] + NUM_ROWS))


@dataclass(slots=True)
class Pipes:
    """How an actor hears of commands, answers, and hears that a minute has passed."""

    requests: int
    answers: int
    beats: int
    beaten: int


class Faults:
    """Counts the calls of this process that reach the store, and does at one of them what it was told to.

    Each call is counted before its effect. To die after the n-th is to die before the next one.
    """

    def __init__(self, folder: str, cache: str, world: World, tell: Callable[[dict[str, Any]], None]) -> None:
        self._folder, self._cache, self._world, self._tell = folder, cache, world, tell
        self._fate: dict[str, Any] = {}
        self.num_calls = self.num_failed = 0
        self.ignored_thread: int | None = None

    def arm(self, fate: dict[str, Any] | None) -> None:
        """From now on count for this fate."""
        self._fate, self.num_calls, self.num_failed = fate or {}, 0, 0
        quota = self._fate["bytes"] if self._fate.get("how") == "quota" else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (quota, resource.RLIM_INFINITY))

    def forget(self) -> None:
        """Go on without the fate of the process that this one was forked from; its quota stays."""
        self._fate = {}

    def call(self, path: Any, *, is_change: bool, is_growth: bool, is_write: bool = False) -> bool:
        """Before a call; whether it must be torn: half of it done, and then death."""
        if not isinstance(path, str) or not path.startswith((self._folder, self._cache)):
            return False
        if threading.get_ident() == self.ignored_thread:
            self._fail_as_the_disk(path, is_change=is_change, is_growth=is_growth)
            return False
        how = self._fate.get("how")
        if how != "torn" or is_write:
            self.num_calls += 1
        is_now = self.num_calls == self._fate.get("at")
        if is_now and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_now and how == "torn":
            return True
        if is_now and how == "pause":
            self._fate = {}
            self._tell({"stops": os.getpid()})
            os.kill(os.getpid(), signal.SIGSTOP)
        if how in ("ENOSPC", "EROFS", "EIO") and path.startswith(self._cache):
            is_due = is_now or (self._fate["lasts"] and self.num_calls > self._fate["at"])
            if is_due and {"ENOSPC": is_growth, "EROFS": is_change, "EIO": True}[how]:
                self.num_failed += 1
                raise _error(how, path)
        self._fail_as_the_disk(path, is_change=is_change, is_growth=is_growth)
        return False

    def _fail_as_the_disk(self, path: str, *, is_change: bool, is_growth: bool) -> None:
        if not path.startswith(self._cache):
            return
        if is_growth and self._world.disk == FULL:
            raise _error("ENOSPC", path)
        if is_change and self._world.disk == READ_ONLY:
            raise _error("EROFS", path)

    def install(self) -> None:
        """Be asked before each call of this process."""
        sys.addaudithook(self._hear)
        os_stat, os_fsync, opened = os.stat, os.fsync, local.LocalStorage.open_parquet

        def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            self.call(path, is_change=False, is_growth=False)
            return os_stat(path, *arguments, **options)

        def fsync(file: int) -> None:
            self.call(self._cache, is_change=True, is_growth=True)
            os_fsync(file)

        def open_parquet(storage: Any, name: str, *arguments: Any, **options: Any) -> Any:
            # Arrow maps the file without Python.
            self.call(storage.path(name), is_change=False, is_growth=False)
            return opened(storage, name, *arguments, **options)

        os.stat, os.fsync = stat, fsync  # type: ignore[assignment]
        local.LocalStorage.open_parquet = open_parquet  # type: ignore[method-assign]
        for module in (filesystems, local):
            vars(module)["open"] = self._open

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _HANDLES and arguments[_HANDLES[event]] >= 0:
            # A name in an open directory.
            folder = os.readlink(f"/proc/self/fd/{arguments[_HANDLES[event]]}")
            arguments = (f"{folder}/{arguments[0]}", *arguments[1:])
        if event == "open":
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            is_change = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            self.call(arguments[0], is_change=is_change, is_growth=is_change)
        elif event in _CHANGES:
            self.call(arguments[0], is_change=True, is_growth=event in ("os.link", "os.mkdir"))
        elif event in _LOOKS:
            self.call(arguments[0], is_change=False, is_growth=False)

    def _open(self, path: str, mode: str = "r", **options: Any) -> Any:
        if "b" not in mode or "r" in mode:
            return builtins.open(path, mode, **options)
        raw = _TornFile(path, mode.replace("b", ""), self, options.get("opener"))
        return raw if options.get("buffering") == 0 else io.BufferedWriter(raw)


class _TornFile(io.FileIO):
    """A file of which a write may be the last thing that its process did, half of it."""

    def __init__(self, path: str, mode: str, faults: Faults, opener: Any) -> None:
        super().__init__(path, mode, opener=opener)
        # What was opened may be a name in an open directory.
        self._faults, self._path = faults, os.readlink(f"/proc/self/fd/{self.fileno()}")

    def write(self, data: Any) -> int:
        if self._faults.call(self._path, is_change=True, is_growth=True, is_write=True):
            super().write(memoryview(data).cast("B")[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(data)


def _error(name: str, path: str) -> OSError:
    code = getattr(errno, name)
    return OSError(code, os.strerror(code), path)


class Actor:
    """The child's side of an actor."""

    def __init__(self, folder: str, cache: str, world: World, pipes: Pipes, traits: dict[str, Any]) -> None:
        self._folder, self._cache, self._world, self._pipes = folder, cache, world, pipes
        self._held: list[tuple[str, DatasetConverter]] = []
        self._executor_fate: dict[str, Any] | None = None
        self._faults = Faults(folder, cache, world, self._tell)
        self._done: Counter[str] = Counter()
        self._set_clocks(traits)
        if traits.get("host"):
            leases.this_host = lambda: traits["host"]  # type: ignore[assignment]
        if traits.get("group"):
            os.environ["LOCAL_WORLD_SIZE"] = "4"
        # No task is late here; a process that is stopped shall not keep others waiting for a minute.
        entries._ABANDON_SECONDS = 0.0
        host_leases._JOIN_SECONDS, host_leases.HURRY_SECONDS = 0.3, 2.0
        host_leases._SILENT_SECONDS = GROUP_SILENT_SECONDS
        logging.getLogger("converter").addHandler(logging.NullHandler())
        self._faults.install()
        beating = threading.Thread(target=self._beat, daemon=True)
        beating.start()
        self._faults.ignored_thread = beating.ident

    def _set_clocks(self, traits: dict[str, Any]) -> None:
        modified, right = directory.modified, time.time
        # This process's own clock, which no decision may depend on.
        self._jump_seconds, self._stands_at = float(traits.get("clock", 0)), None
        directory.modified = lambda info: self._world.at(modified(info))
        time.time = lambda: right() + self._jump_seconds if self._stands_at is None else self._stands_at

    def _beat(self) -> None:
        while os.read(self._pipes.beats, 1):
            leases.heartbeat.renew()
            os.write(self._pipes.beaten, b".")

    def _tell(self, answer: dict[str, Any]) -> None:
        os.write(self._pipes.answers, json.dumps(answer).encode() + b"\n")

    def live(self) -> None:
        """Take commands until there are no more."""
        with open(self._pipes.requests) as requests:
            for line in requests:
                self._tell(self._answer(json.loads(line)))

    def _answer(self, command: dict[str, Any]) -> dict[str, Any]:
        fate = command.pop("fate", None) or {}
        self._executor_fate = fate if fate.get("of") == "executor" else None
        self._done = Counter()
        answer: dict[str, Any] = {}
        try:
            self._faults.arm(None if self._executor_fate else fate)
            try:
                answer = {"result": getattr(self, command.pop("do"))(**command)}
            finally:
                num_calls, num_failed = self._faults.num_calls, self._faults.num_failed
                self._faults.arm(None)
        except Exception as error:  # noqa: BLE001 (judged by the parent)
            answer = {
                "error": f"{type(error).__name__}: {error}",
                "is_named": isinstance(error, ConverterError) and self._cache in str(error),
                "trace": "".join(traceback.format_exception(error))[-3500:],
            }
        held = [self._described(name, converter) for name, converter in self._held]
        return {**answer, "held": held, "failed": num_failed, "calls": num_calls, "done": self._done}

    @staticmethod
    def _described(name: str, converter: DatasetConverter) -> dict[str, Any]:
        entry = converter._holding.entry
        assert entry is not None
        sizes = zip(entry.manifest.file_names, entry.manifest.file_bytes.tolist(), strict=True)
        folder = entry.folder
        return {
            "number": id(converter),
            "key": name,
            "files": {folder.path(file): size for file, size in sizes},
            "is_leased": entry.lease is not None,
        }

    # Commands -------------------------------------------------------------------------

    def write(self, key: str) -> None:
        """What `make_spark_converter` does: use the entry, or write it, and hold it."""
        self._held.append((key, self._made(key)))

    def open(self, key: str) -> None:
        """Hold an entry that is there."""
        self._held.append((key, open_converter(f"{self._cache}/{roots.DIRECTORY}/{KEYS[key]}")))

    def read(self) -> list[list[int]]:
        """The rows of all that is held."""
        found = [ids_of(converter) for _, converter in self._held]
        self._done["rows compared"] += sum(map(len, found))
        return found

    def release(self) -> None:
        """End the use of what is held."""
        while self._held:
            self._held.pop()[1].__exit__(None, None, None)

    def delete(self) -> None:
        """Delete what is held."""
        while self._held:
            self._held.pop()[1].delete()

    def sweep(self, kept: bool) -> int:
        """Remove what no process holds."""
        report = sweep(self._cache, kept=kept)
        self._done["files swept"] += report.num_files
        return report.num_files

    def jump(self, seconds: float | None) -> None:
        """Let the clock of this process jump, or stand still."""
        self._stands_at = time.time() if seconds is None else None
        self._jump_seconds += seconds or 0.0

    def train(self, key: str, batch_size: int, shards: int, save_every: int) -> None:
        """Read all epochs from where the last trainer saved its state, all shards side by side."""
        view = self._made(key)
        try:
            self._read_on(view, f"{self._folder}/{key}.state", batch_size, shards, save_every)
        finally:
            view.__exit__(None, None, None)

    def _read_on(self, view: DatasetConverter, file: str, batch_size: int, shards: int, save_every: int) -> None:
        record = json.loads(Path(file).read_text()) if os.path.exists(file) else {"epochs": [[]], "state": None}
        epochs = record["epochs"]
        readers = [
            view.make_batch_reader(batch_size=batch_size, cur_shard=shard, shard_count=shards, **OPTIONS)
            for shard in range(shards)
        ]
        for reader in readers if record["state"] is not None else ():
            reader.load_state_dict(record["state"])
            self._done["states resumed"] += 1

        def save() -> None:
            record["state"] = readers[0].state_dict()
            # Another trainer of the same rows may save at the same time.
            new = Path(f"{file}.{os.getpid()}.new")
            new.write_text(json.dumps(record))
            new.replace(file)

        while len(epochs) <= NUM_EPOCHS:
            for number, batches in enumerate(zip(*readers, strict=True), 1):
                for batch in batches:
                    epochs[-1] += batch["id"][batch["__valid"]].tolist()
                if number % save_every == 0:
                    save()
            epochs.append([])
            save()

    def _made(self, key: str) -> DatasetConverter:
        root = roots.open_root(self._cache)
        entry = spark_write._adopt(root, KEYS[key])
        if entry is None:
            attempt = entries.begin(root, KEYS[key], application_id="app-1")
            try:
                columns, spec = plan_write(root, attempt)
                manifest = manifest_of(self._run_tasks(spec, key), columns, attempt, is_kept=key == "kept")
                entries.delete_unlisted(root, attempt, manifest)
                entry = entries.commit(root, attempt, manifest)
            except BaseException:
                try:
                    entries.abandon(root, attempt)
                except (CacheError, OSError):
                    self._done["writes not removed"] += 1
                raise
            self._done["commits"] += 1
        converter = hold_entry(entry, delete_on_exit=False)
        sweeps.sweep_after_write(root)
        return converter

    def _run_tasks(self, spec: dict[str, Any], key: str) -> list[tuple[int, dict[str, Any]]]:
        """What Spark does: tasks in another process, which is started again if it dies."""
        parts = dict(enumerate(np.array_split(np.array(rows_of(key)), NUM_FILES)))
        reports: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for attempt in range(_MOST_TASKS):
            left = {partition: ids for partition, ids in parts.items() if partition not in reports}
            if not left:
                break
            reading, writing = os.pipe()
            executor = os.fork()
            if not executor:
                self._execute(writing, spec, left, attempt * NUM_FILES)
            os.close(writing)
            with open(reading) as told:
                reports |= {partition: report for line in told for partition, report in [json.loads(line)]}
            os.waitpid(executor, 0)
            self._executor_fate = None
            self._done["executors"] += 1
        if len(reports) < NUM_FILES:
            raise CacheError(f"The Spark job that writes {self._cache} failed.")
        return [(partition, report) for partition in sorted(reports) for _, report in reports[partition]]

    def _execute(self, told: int, spec: dict[str, Any], parts: dict[int, Any], first_attempt: int) -> None:
        """The executor: reports each task that it has done, and ends."""
        try:
            # The fate of the driver is not its own.
            if self._executor_fate is not None:
                self._faults.arm(self._executor_fate)
            else:
                self._faults.forget()
            for partition, ids in parts.items():
                report = write_task(spec, ids, partition=partition, task_attempt=first_attempt + partition)
                os.write(told, json.dumps([partition, report]).encode() + b"\n")
        finally:
            os._exit(0)
