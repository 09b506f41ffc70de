"""What must hold on a store that goes wrong, after each step of a program."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converter.cache import leases, roots
from converter.dataset import DatasetConverter
from converter.errors import ConverterError
from tests.faults.campaign.cases import Step, kind_of, require
from tests.faults.campaign.store_faults import SECRET, Faults
from tests.faults.campaign.store_place import Ids, Place

CACHE, ROOT = "cache", f"cache/{roots.DIRECTORY}"
_END_SECONDS = 10.0
"""How long threads may take to end."""


@dataclass(eq=False, kw_only=True)
class Held:
    """A converter of this process, and the rows that it must have."""

    converter: DatasetConverter
    ids: Ids
    attempt: str = ""
    """The write of the entry; empty for a table of the user's."""

    table: str = ""

    @property
    def lease(self) -> Any:
        entry = self.converter._holding.entry
        return None if entry is None else entry.lease


@dataclass(kw_only=True)
class Written:
    """One write of an entry."""

    key: str
    name: int
    ids: Ids
    is_kept: bool
    begun: float
    """When, by `Place.now`."""

    files: dict[str, int] = field(default_factory=dict)
    """Sizes by name, below the entry."""

    is_promised: bool = False
    """`make_spark_converter` returned it, and nothing that may remove it was asked for since."""

    is_spoiled: bool = False
    """A file of it was damaged."""


class Laws:
    """The store of one case: what was written there and is in use, and whether it is as it must be."""

    def __init__(self, place: Place, faults: Faults, local_dir: Path) -> None:
        self.place, self.faults, self.local_dir = place, faults, local_dir
        self.done: Counter[str] = Counter()
        self.held: list[Held] = []
        self.written: dict[str, Written] = {}
        self.users: dict[str, bytes] = {f"{CACHE}/notes.txt": b"mine"}
        """The content of the user's files."""

        self.is_rewritten = self.is_killed = False
        self._num_open = count_open_files()

    def require(self, holds: bool, law: str, what: str) -> None:
        if not holds:
            require(holds, law, f"{what}\n  " + "\n  ".join(self.faults.told))

    def judge(self, error: Exception, *, is_allowed: bool, step: Step) -> None:
        """An error is one of ours, names what is to blame, and shows no secret."""
        text = "".join(traceback.format_exception(error))
        is_ours = isinstance(error, ConverterError)
        self.require(is_ours, f"each error is one of ours: {kind_of(error)}", f"{step}\n{text}")
        self.require(is_allowed, "without a fault there is no error", f"{step}\n{text}")
        is_named = self.place.url in str(error) or str(self.local_dir) in str(error)
        self.require(is_named, "an error names the cache or the file", f"{step}\n{text}")
        self.require(SECRET not in text, "an error shows no secret", f"{step}\n{text}")
        self.done["errors"] += 1

    def manifest_of(self, attempt: str) -> bytes:
        return self.place.read(f"{ROOT}/{self.written[attempt].key}/{roots.MANIFEST}") or b""

    def has_manifest(self, attempt: str) -> bool:
        return f"data-{attempt}/".encode() in self.manifest_of(attempt)

    def missing(self, attempt: str, present: dict[str, int]) -> list[str]:
        written = self.written[attempt]
        return [name for name, size in written.files.items() if present.get(f"{ROOT}/{written.key}/{name}") != size]

    def is_whole(self, held: Held) -> bool:
        if held.attempt:
            return not self.missing(held.attempt, self.place.files(ROOT))
        return not (self.is_rewritten and held.table == "parquet")

    def withdraw(self, *, takes_kept: bool, older: float, only: int | None) -> None:
        """Promise no more what a sweep may take."""
        in_use = {held.attempt for held in self.held if held.lease is not None}
        for attempt, written in self.written.items():
            is_meant = only in (None, written.name) and older <= self.place.now() - written.begun
            if is_meant and (takes_kept or not written.is_kept) and attempt not in in_use:
                written.is_promised = False

    def keep_leases_young(self) -> None:
        """What the heartbeat does each minute."""
        for held in self.held:
            if held.lease is not None:
                self.place.touch(held.lease.entry.path(held.lease.name))

    def check(self, step: Step) -> None:
        present = self.place.files(ROOT)
        for attempt, written in self.written.items():
            if written.is_promised:
                missing = [] if self.has_manifest(attempt) else [roots.MANIFEST]
                missing += self.missing(attempt, present)
                self.require(not missing, "what is kept stays whole", f"{step}: {written.key} lacks {missing}")
        for held in self.held:
            # A stale listing may have shown a file that was lost, so that a damaged entry is in use.
            is_spoiled = held.attempt in self.written and self.written[held.attempt].is_spoiled
            if held.attempt and not is_spoiled and held.lease is not None and not held.lease.lost:
                missing = self.missing(held.attempt, present)
                self.require(not missing, "what is in use stays", f"{step}: {held.converter.url} lacks {missing}")
        changed = [name for name, data in self.users.items() if self.place.read(name) != data]
        self.require(not changed, "nothing of the user's is touched", f"{step}: {changed}")
        own = {id(held.lease) for held in self.held}
        strange = [lease.name for lease in leases.heartbeat._leases if id(lease) not in own]
        self.require(not strange, "no lease is renewed after its use", f"{step}: {strange}")
        if not self.faults.told and not self.is_killed:
            names = [path.rpartition("/")[2] for path in present]
            signs = [name for name in names if name.startswith("lease-") or name.endswith((".intent", ".tmp"))]
            num_leases = len({id(held.lease) for held in self.held if held.lease is not None})
            self.require(len(signs) == num_leases, "no temporary file is left", f"{step}: {signs} for {num_leases}")
        self.check_threads(step)

    def check_threads(self, step: Step) -> None:
        num_heartbeats = int(bool(leases.heartbeat._leases))
        deadline = time.monotonic() + _END_SECONDS
        while True:
            # A call that was late may make another one, which hangs.
            self.faults.end_step()
            own = [thread for thread in threading.enumerate() if thread.name.startswith("converter-")]
            others = [thread.name for thread in own if thread.name != "converter-heartbeat"]
            if not others and len(own) <= num_heartbeats:
                return
            self.require(time.monotonic() < deadline, "no thread is left", f"{step}: {[thread.name for thread in own]}")
            time.sleep(0.0005)

    def check_open_files(self) -> None:
        if count_open_files() > self._num_open:
            gc.collect()
        # Those of a process that died are its own.
        is_same = self.is_killed or count_open_files() <= self._num_open
        self.require(is_same, "no file is left open", f"{count_open_files()} for {self._num_open}")


def folders_of(path: str) -> list[str]:
    """The folders above a file, as names of their own."""
    parts = path.split("/")[:-1]
    return ["/".join(parts[:stop]) for stop in range(1, len(parts) + 1)]


def count_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
