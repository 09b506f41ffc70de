"""Processes of a crowd: each takes its steps in turn, and may be killed or stopped at any moment of them.

    python -m tests.faults.campaign.crowd_parties [MODULE …]     # one JSON object a line on stdin and stdout

All are forks of one process that has imported everything, these modules too. After a death another process goes on
with the steps.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converter import ConverterError, DatasetConverter, open_converter, sweep
from converter.cache import entries, roots, sweeps
from converter.make import hold_entry
from converter.sources.spark import write as spark_write
from tests.faults.campaign.cases import Step
from tests.faults.small_entries import NUM_ROWS, write_data

KEYS = tuple(f"{number:016x}-{number:016x}" for number in range(1, 4))

LONG_SECONDS = 20.0
"""A step that takes longer waits for something that it should name."""

_DELETED = "Was the converter deleted"
_NOT_THERE = ("There is no committed cache entry", "was deleted by another process just now")


@dataclass(slots=True, kw_only=True)
class _Party:
    """One process: the converters that it holds, and the loops that it is in."""

    cache_dir: str
    folder: Path
    held: list[DatasetConverter] = field(default_factory=list)
    gone: list[DatasetConverter] = field(default_factory=list)
    """Deleted or closed by this process."""

    loops: list[tuple[DatasetConverter, Any, list[int]]] = field(default_factory=list)

    def convert(self, step: Step) -> str:
        """What `make_spark_converter` does around the job of the executors."""
        root, key = roots.open_root(self.cache_dir), KEYS[step["key"]]
        entry = spark_write._adopt(root, key)
        told = "adopted" if entry is not None else "written"
        if entry is None:
            attempt = entries.begin(root, key, application_id="app-1")
            try:
                entry = entries.commit(root, attempt, write_data(root, attempt, num_files=step["num_files"]))
            except BaseException:
                entries.abandon(root, attempt)
                raise
        self.held.append(hold_entry(entry, delete_on_exit=step["deletes"]))
        if told == "written":
            sweeps.sweep_after_write(root)
        return told

    def open(self, step: Step) -> str:
        """Another process's entry."""
        try:
            url = f"{self.cache_dir}/{roots.DIRECTORY}/{KEYS[step['key']]}"
            self.held.append(open_converter(url))
        except ConverterError as error:
            if not any(text in str(error) for text in _NOT_THERE):
                raise
            return "not there"
        return "opened"

    def read(self, step: Step) -> str:
        """All rows of an entry that this process holds."""
        converter = self._held(step)
        if converter is None:
            return "nothing held"
        with converter.make_batch_reader(batch_size=7, columns=["id", "x"]) as reader:
            ids = [row for batch in reader for row in _rows_of(batch)]
        _check(ids == list(range(NUM_ROWS)), f"read {ids}")
        return "read"

    def begin(self, step: Step) -> str:
        """A loop that goes on later."""
        converter = self._held(step)
        if converter is None:
            return "nothing held"
        iterator = iter(converter.make_batch_reader(batch_size=5, columns=["id", "x"], shuffle=False))
        self.loops.append((converter, iterator, _rows_of(next(iterator))))
        return "begun"

    def go_on(self, step: Step) -> str:
        """The rest of a loop; if this process let the entry go meanwhile, it may say so instead."""
        if not self.loops:
            return "no loop"
        converter, iterator, ids = self.loops.pop(step["which"] % len(self.loops))
        try:
            for batch in iterator:
                ids += _rows_of(batch)
        except ConverterError as error:
            if converter not in self.gone or _DELETED not in str(error):
                raise
            _check(ids == list(range(len(ids))), f"read {ids}")
            return "told of a deletion"
        _check(ids == list(range(NUM_ROWS)), f"read {ids}")
        return "read"

    def close(self, step: Step) -> str:
        """The end of a `with` block."""
        return self._let_go(step, lambda converter: converter.__exit__(None, None, None), "closed")

    def delete(self, step: Step) -> str:
        """The entry, for everybody."""
        return self._let_go(step, lambda converter: converter.delete(), "deleted")

    def sweep(self, step: Step) -> str:
        """What nobody holds."""
        report = sweep(self.cache_dir, kept=True)
        return "swept something" if report.num_files else "swept nothing"

    def pickle(self, step: Step) -> str:
        """A converter, for other processes."""
        converter = self._held(step)
        if converter is None:
            return "nothing held"
        path = self.folder / f"pickled-{step['key']}"
        path.with_suffix(f".{os.getpid()}").write_bytes(pickle.dumps(converter))
        path.with_suffix(f".{os.getpid()}").replace(path)
        return "pickled"

    def unpickle(self, step: Step) -> str:
        """It holds nothing, so it reads the rows or says that they are gone."""
        path = self.folder / f"pickled-{step['key']}"
        if not path.exists():
            return "nothing pickled"
        converter: DatasetConverter = pickle.loads(path.read_bytes())
        ids: list[int] = []
        try:
            with converter.make_batch_reader(batch_size=7, columns=["id", "x"]) as reader:
                for batch in reader:
                    ids += _rows_of(batch)
        except ConverterError as error:
            if _DELETED not in str(error):
                raise
            _check(ids == list(range(len(ids))), f"read {ids}")
            return "told of a deletion"
        _check(ids == list(range(NUM_ROWS)), f"read {ids}")
        return "read"

    def _held(self, step: Step) -> DatasetConverter | None:
        return self.held[step["which"] % len(self.held)] if self.held else None

    def _let_go(self, step: Step, call: Callable[[DatasetConverter], None], told: str) -> str:
        converter = self._held(step)
        if converter is None:
            return "nothing held"
        self.held.remove(converter)
        self.gone.append(converter)
        call(converter)
        return told


def _rows_of(batch: Any) -> list[int]:
    _check(batch["x"].tolist() == batch["id"].tolist(), f"x is {batch['x']} of {batch['id']}")
    ids: list[int] = batch["id"].tolist()
    return ids


class _WrongRowsError(Exception):
    """Other rows than the entry's."""


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise _WrongRowsError(what)


def _live(asked: dict[str, Any], party: int, first: int) -> None:
    """Take the steps of one party from the `first` on; each is noted when it begins and when it ends."""
    folder = Path(asked["folder"])
    steps = [step for step in asked["steps"] if step["party"] == party]
    os.environ |= asked["environment"]
    if asked["processes_of_host"] > 1:
        os.environ["LOCAL_WORLD_SIZE"] = str(asked["processes_of_host"])
    log = os.open(folder / f"log-{party}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    stacks = open(folder / f"stacks-{party}", "ab")  # noqa: SIM115 (it lives as long as the process)
    own = _Party(cache_dir=asked["cache_dir"], folder=folder)
    for number in range(first, len(steps)):
        step = steps[number]
        time.sleep(step["pause_us"] / 1e6)
        begun = time.monotonic()
        _note(log, {"begun": number})
        if step["do"] == "be killed":
            # By the kernel, and at once: Python runs nothing then.
            signal.setitimer(signal.ITIMER_REAL, step["after_us"] / 1e6)
        elif step["do"] == "be stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            faulthandler.dump_traceback_later(LONG_SECONDS / 2, file=stacks)
            told, error = "", ""
            try:
                told = getattr(own, step["do"].replace(" ", "_"))(step)
            except Exception:  # noqa: BLE001 (told to the campaign)
                error = traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            seconds = time.monotonic() - begun
            _note(log, {"ended": number, "do": step["do"], "told": told, "error": error, "seconds": seconds})
    own.loops.clear()


def _note(log: int, what: dict[str, Any]) -> None:
    os.write(log, json.dumps(what).encode() + b"\n")


def _notes_of(folder: Path, party: int) -> list[dict[str, Any]]:
    path = folder / f"log-{party}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _next_of(folder: Path, party: int) -> int:
    return 1 + max((note["begun"] for note in _notes_of(folder, party) if "begun" in note), default=-1)


def _fork(asked: dict[str, Any], party: int) -> int:
    """A process for the rest of a party's steps; 0 in that process."""
    pid = os.fork()
    if not pid:
        said = os.open(f"{asked['folder']}/said-{party}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.close(said)
        logging.basicConfig(level=logging.ERROR)
        _live(asked, party, _next_of(Path(asked["folder"]), party))
    return pid


def _run(asked: dict[str, Any]) -> dict[str, Any] | None:
    """All parties of a case, until all have ended; None in one of its processes."""
    folder = Path(asked["folder"])
    running: dict[int, int] = {}
    resumes: list[tuple[float, int]] = []
    statuses: list[int] = []
    ended: list[int] = []
    deadline = time.monotonic() + asked["max_seconds"]
    for party in sorted({step["party"] for step in asked["steps"]}):
        pid = _fork(asked, party)
        if not pid:
            return None
        running[pid] = party
    while running and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid and os.WIFSTOPPED(status):
            resumes.append((time.monotonic() + asked["stop_seconds"], pid))
        elif pid:
            party = running.pop(pid)
            statuses.append(os.waitstatus_to_exitcode(status))
            if not statuses[-1]:
                ended.append(pid)
            if statuses[-1] == -signal.SIGALRM:
                # Killed: another process goes on.
                again = _fork(asked, party)
                if not again:
                    return None
                running[again] = party
        for when, stopped in list(resumes):
            if time.monotonic() >= when:
                resumes.remove((when, stopped))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(stopped, signal.SIGCONT)
        if not pid:
            select.select([], [], [], 0.001)
    hanging = sorted(running.values())
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    parties = sorted({step["party"] for step in asked["steps"]})
    return {
        "statuses": statuses,
        "ended": ended,
        "hanging": hanging,
        "notes": {party: _notes_of(folder, party) for party in parties},
        "said": {party: (folder / f"said-{party}").read_text() for party in parties},
        "stacks": {party: _text(folder / f"stacks-{party}") for party in parties},
    }


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def main() -> None:
    """Run a case for each line; a party returns from `_run`, and does what programs do at their end."""
    with tempfile.TemporaryDirectory() as warm:
        # What is imported at the first use is imported once.
        own = _Party(cache_dir=warm, folder=Path(warm))
        step: Step = {"key": 0, "which": 0, "num_files": 2, "deletes": True}
        for act in (own.convert, own.read, own.pickle, own.unpickle, own.sweep, own.delete):
            act(step)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()
    print("{}", flush=True)
    for line in sys.stdin:
        told = _run(json.loads(line))
        if told is None:
            # Without the half second in which the interpreter frees all that was imported.
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            os._exit(0)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
