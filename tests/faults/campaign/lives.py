"""Loaders that live and end in every way, in one process and one after the other: nothing of them may be left.

A step makes a loader (NumPy, torch with and without worker processes, tf.data; over a cache entry, Parquet files, or
a store with a local cache), takes some batches, and ends it: by `break`, an error, the collector, `close` from another
thread, a deletion, a fork, Ctrl-C at any moment, the interpreter's end. What a case leaves is compared with what there
was before: threads, processes, descriptors, mappings, files, leases, shared memory, objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from converter import ConverterError, DatasetConverter
from tests.faults.campaign.cases import Campaign, Step, ViolationError, require
from tests.faults.campaign.exits import ENDINGS, Exits
from tests.faults.campaign.left_behind import (
    Hooks,
    files_in,
    leases_in,
    look,
    name_semaphores,
    open_in,
    require_as_before,
    resident_bytes,
)
from tests.faults.campaign.life_parts import (
    NUM_ROWS,
    SOURCES,
    Rows,
    TransformError,
    check_batch,
    copy_entry,
    import_tensorflow,
    in_memory,
    make_loader,
    temporary_files_in,
    write_rows,
)

_QUICK_ENDS = (
    "whole", "whole", "break", "error", "forget", "cycle", "close iterator", "block", "close elsewhere",
    "close elsewhere", "delete", "keep", "keep", "fork", "interrupt", "interrupt", "interrupt",
)  # fmt: skip
_ENDS_OF_WORKERS = ("whole", "break", "error", "close iterator", "block", "delete", "interrupt", "kill worker")
_ENDS_OF_TENSORFLOW = (
    "whole", "break", "error", "forget", "cycle", "cycle", "block", "close elsewhere", "delete", "interrupt",
)  # fmt: skip

_GROWTH_BYTES = 200 << 20
"""How much a process may grow after its first cases. Its allocator's fragments come to less."""

_FIRST_CASES = 50
_CHILD_SECONDS = 20.0
_SECONDS_AFTER_INTERRUPTS = 10.0


# The cases ---------------------------------------------------------------------------------------


def _draw(chance: random.Random) -> list[Step]:
    kind = chance.choices(["quick", "exit", "workers", "tf"], [88, 7, 3, 2])[0]
    if kind == "quick":
        return [_quick(chance) for _ in range(chance.randint(2, 8))]
    if kind == "exit":
        return [_exit(chance), *(_quick(chance) for _ in range(chance.randint(0, 2)))]
    if kind == "workers":
        return [_with_workers(chance), *(_quick(chance) for _ in range(chance.randint(0, 2)))]
    return [_tensorflow(chance) for _ in range(chance.randint(2, 4))]


def _life(chance: random.Random, kind: str, end: str, *, sources: Sequence[str] = SOURCES) -> Step:
    """A loader, what it does, and how it ends."""
    return {
        "do": "live",
        "kind": kind,
        "end": end,
        "source": "entry" if end == "delete" else chance.choice(sources),
        "seed": chance.choice([None, 2, 2, 5]),
        "epoch": chance.randrange(3),
        "batch_size": chance.choice([7, 20, 20, 64, 300]),
        "num_columns": chance.choice([1, 3, 3]),
        "threads": chance.choice([None, 1, 2, 3]),
        "prefetch": chance.choice([None, None, 1, 4]),
        "transform": chance.choice(["none", "none", "double", "slow", "fail"]),
        "fail_at": chance.randrange(NUM_ROWS),
        "local_cache": chance.random() < 0.3,
        "batches": chance.choice([0, 1, 2, 3, 5, 8, 13, 40]),
        "after_us": round(10 ** chance.uniform(1, 4.6)),
        "in_thread": chance.random() < 0.15,
        "device": chance.choice([None, None, "cpu"]),
        "num_workers": 0,
        "tf_prefetch": chance.choice([None, 1, 2]),
        "collects_after": chance.choice([None, None, None, 20, 200]),
    }


def _quick(chance: random.Random) -> Step:
    if chance.random() < 0.12:
        return {"do": "go on", "which": chance.randrange(4), "batches": chance.choice([1, 3, 10, 100])}
    return _life(chance, chance.choice(["numpy", "torch"]), chance.choice(_QUICK_ENDS))


def _exit(chance: random.Random) -> Step:
    step = _life(chance, chance.choice(["numpy", "torch", "torch"]), "exit", sources=("entry", "entry", "parquet"))
    if step["transform"] == "fail":
        step["transform"] = "double"
    if step["kind"] == "torch" and chance.random() < 0.3:
        step |= {"num_workers": chance.randint(1, 2), "method": "fork", "is_persistent": chance.random() < 0.5}
    return {**step, "do": "exit", "epoch": 0, "how": chance.choice(ENDINGS), "local_cache": False}


def _with_workers(chance: random.Random) -> Step:
    # A store in memory is not the workers'.
    step = _life(chance, "torch", chance.choice(_ENDS_OF_WORKERS), sources=("entry", "parquet"))
    method = chance.choices(["fork", "spawn", "forkserver"], [6, 1, 1])[0]
    return {**step, "num_workers": chance.randint(1, 2), "method": method, "is_persistent": chance.random() < 0.4}


def _tensorflow(chance: random.Random) -> Step:
    return _life(chance, "tf", chance.choice(_ENDS_OF_TENSORFLOW))


# The lives ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _collecting_often(num_objects: int | None) -> Iterator[None]:
    """Let the garbage collector look at what is new after so many objects: it runs in every thread then."""
    if num_objects is None:
        yield
        return
    before = gc.get_threshold()
    # What was there would be looked at each time.
    gc.freeze()
    gc.set_threshold(num_objects, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class _BodyError(Exception):
    """Of the loop's own body."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    """A loader that is open while others live and end."""

    step: Step
    loader: Any
    iterator: Any
    order: np.ndarray
    num_rows: int
    deletions: int
    """How many entries had been deleted when its converter was made."""


@dataclass(slots=True, kw_only=True)
class _Case:
    """The converters and open loaders of one case."""

    rows: Rows
    folder: Path
    done: Counter[str] = field(default_factory=Counter)
    kept: list[_Kept] = field(default_factory=list)
    converters: dict[str, DatasetConverter] = field(default_factory=dict)
    deletions: int = 0

    # What steps do -------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """One step."""
        if step["do"] == "go on":
            self.go_on(step)
            return
        if step["kind"] == "tf":
            import_tensorflow()
        order = self.rows.order(step["source"], step["seed"], step["epoch"])
        converter = self.converter(step["source"])
        self.done[f"{step['kind']}{' with workers' if step['num_workers'] else ''}"] += 1
        self.done[f"ended by {step['end']}"] += 1
        if step["end"] == "interrupt":
            self.interrupted(lambda: self.live(step, converter, order), step["after_us"])
        else:
            with _collecting_often(step.get("collects_after")):
                if step["in_thread"]:
                    _in_thread(lambda: self.live(step, converter, order))
                else:
                    self.live(step, converter, order)

    def converter(self, source: str) -> DatasetConverter:
        """The one converter of each kind, until it is deleted."""
        if source not in self.converters:
            cache_dir = self.folder / f"cache-{self.deletions}"
            if source == "entry":
                copy_entry(self.rows, cache_dir)
            self.converters[source] = self.rows.open(source, cache_dir)
        return self.converters[source]

    def live(self, step: Step, converter: DatasetConverter, order: np.ndarray) -> None:
        """A loader's life: errors that must come are caught here, others are violations."""
        end, deletions = step["end"], self.deletions
        try:
            loader = make_loader(converter, step, order, self.folder)
        except TransformError as error:
            # The dataset transforms a first batch, to know the shapes.
            require((step["kind"], step["transform"]) == ("tf", "fail"), "errors say what happened", f"{error!r}")
            return
        if end == "keep":
            loader.set_epoch(step["epoch"])
            self.kept.append(
                _Kept(step=step, loader=loader, iterator=iter(loader), order=order, num_rows=0, deletions=deletions)
            )
            self.read(self.kept[-1], step["batches"])
            return
        num_rows = 0
        try:
            with loader:
                loader.set_epoch(step["epoch"])
                num_rows = self.loop(step, loader, order, deletions)
        except _BodyError:
            pass
        except TransformError as error:
            require(step["transform"] == "fail", "errors say what happened", f"{error!r}")
            row = order[step["fail_at"] % len(order)]
            # A worker process tells its error with the traceback as text.
            is_told = str(error).rstrip().endswith(f"of row {row}")
            require(is_told, "errors say what happened", f"expected row {row}, was told {error}")
        except RuntimeError as error:
            # torch raises it wherever this process is.
            if end != "kill worker" or not re.search("exited unexpectedly|is killed by signal", str(error)):
                raise
            self.done["told of a killed worker"] += 1
        if end in ("block", "close elsewhere"):
            _require_closed(loader)
            if not self.kept:
                self.require_no_files()
        self.done["rows compared"] += num_rows

    def require_no_files(self) -> None:
        """Require that closed loaders, which are still there, have no files open."""
        gc.unfreeze()
        # A loader that an interrupt broke off as it opened or closed is garbage, and its threads end in their own time.
        deadline = time.monotonic() + (_SECONDS_AFTER_INTERRUPTS if self.done["interrupts"] else 0.0)
        while True:
            gc.collect()
            held = [*open_in(self.folder), *open_in(self.rows.folder)]
            if not held or time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        require(not held, "a closed loader lets go of its files", f"{held}")
        self.done["closed loaders without files"] += 1

    def loop(self, step: Step, loader: Any, order: np.ndarray, deletions: int) -> int:
        """Take the batches, and do what ends the loop."""
        end, num_rows = step["end"], 0
        iterator = iter(loader)
        for _ in range(step["batches"]):
            batch = self.next_of(step, iterator, deletions)
            if batch is None:
                break
            num_rows += check_batch(self.rows, batch, order, num_rows, step["transform"])
        if end == "error":
            raise _BodyError
        if end == "cycle":
            holder: dict[str, Any] = {"iterator": iterator}
            holder["self"] = holder
        elif end == "close iterator":
            iterator.close()
            require(next(iterator, None) is None, "a closed iterator has no batches", "it gave one")
        elif end == "delete":
            self.converters.pop("entry").delete()
            self.deletions += 1
        elif end == "fork":
            self.fork(step, loader, iterator, order)
        elif end == "kill worker":
            for worker in multiprocessing.active_children()[:1]:
                os.kill(worker.pid or 0, signal.SIGKILL)
        closing = None
        if end == "close elsewhere":
            closing = _begin_closing(loader, step["after_us"])
        try:
            if end in ("whole", "interrupt", "close elsewhere", "delete", "fork", "kill worker"):
                while (batch := self.next_of(step, iterator, deletions)) is not None:
                    num_rows += check_batch(self.rows, batch, order, num_rows, step["transform"])
                    if end == "close elsewhere" and step["batches"] % 2:
                        time.sleep(0.0002)
                if end not in ("close elsewhere", "delete", "kill worker"):
                    require(num_rows == NUM_ROWS, "rows come right and in order", f"the epoch ended after {num_rows}")
        finally:
            if closing is not None:
                closing()
        return num_rows

    def next_of(self, step: Step, iterator: Iterator[Any], deletions: int) -> Any:
        """The next batch; None at the end, and where an error must come."""
        try:
            return next(iterator, None)
        except ConverterError as error:
            text = str(error)
            if "Was the converter deleted" in text and self.deletions > deletions:
                self.done["told of a deletion"] += 1
            elif "This loader was closed" in text and step["end"] == "close elsewhere":
                self.done["told of a close"] += 1
            else:
                raise
        except Exception as error:
            if step["kind"] != "tf" or not _is_expected_of_tensorflow(step, error):
                raise
            if step["transform"] == "fail" and "TransformError" in str(error):
                raise TransformError(f"of row {self.rows_fail(step)}") from error
        return None

    def rows_fail(self, step: Step) -> int:
        """The row at which the transform of a step fails."""
        return int(self.rows.order(step["source"], step["seed"], step["epoch"])[step["fail_at"] % NUM_ROWS])

    # Loaders that stay open ----------------------------------------------------------------------

    def go_on(self, step: Step) -> None:
        """Take more batches of a loader that is open."""
        if self.kept:
            self.read(self.kept[step["which"] % len(self.kept)], step["batches"])
            self.done["gone on"] += 1

    def read(self, kept: _Kept, batches: int) -> None:
        """Some batches of an open loader."""
        try:
            for _ in range(batches):
                batch = self.next_of(kept.step, kept.iterator, kept.deletions)
                if batch is None:
                    break
                kept.num_rows += check_batch(self.rows, batch, kept.order, kept.num_rows, kept.step["transform"])
        except TransformError:
            require(kept.step["transform"] == "fail", "errors say what happened", "a transform failed")

    def close(self) -> None:
        """End everything that is open."""
        for kept in self.kept:
            self.done["rows compared"] += kept.num_rows
            kept.loader.__exit__(None, None, None)
            _require_closed(kept.loader)
            try:
                batch = next(kept.iterator, None)
            except ConverterError as error:
                require("This loader was closed" in str(error), "errors say what happened", str(error))
            else:
                raise ViolationError("a closed loader gives no batches", f"{batch}")
        self.kept.clear()
        for converter in self.converters.values():
            converter.__exit__(None, None, None)
        self.converters.clear()

    # Interrupts and forks ------------------------------------------------------------------------

    def interrupted(self, call: Callable[[], None], after_us: int) -> None:
        """Call with a Ctrl-C that comes once, at some moment."""
        sent = threading.Event()

        def send() -> None:
            time.sleep(after_us / 1e6)
            sent.set()
            signal.raise_signal(signal.SIGINT)

        sender = threading.Thread(target=send, name="ctrl-c")
        try:
            sender.start()
            call()
            self.done["interrupts too late"] += 1
            sent.wait()
            # An interrupt that comes while an object is freed is never raised.
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline:
                time.sleep(0.001)
        except KeyboardInterrupt:
            self.done["interrupts"] += 1
        sender.join()

    def fork(self, step: Step, loader: Any, iterator: Iterator[Any], order: np.ndarray) -> None:
        """Fork in the middle of an iteration: the child reads the loader from its beginning, and not its parent's."""
        said = self.folder / "said by a child"
        pid = os.fork()
        if not pid:
            status = 1
            try:
                num_rows = 0
                # The parent's iteration may have come to its end.
                loader.set_epoch(step["epoch"])
                for batch in loader:
                    num_rows += check_batch(self.rows, batch, order, num_rows, step["transform"])
                status = 0 if num_rows == NUM_ROWS and _is_refused(iterator) else 2
            except TransformError:
                status = 0 if step["transform"] == "fail" else 3
            except BaseException:  # noqa: BLE001 (told to the parent)
                said.write_text(traceback.format_exc())
            os._exit(status)
        deadline = time.monotonic() + _CHILD_SECONDS
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGABRT)
                os.waitpid(pid, 0)
                raise ViolationError("a forked child does not hang", f"it did, in {step}")
            time.sleep(0.0005)
        told = said.read_text() if said.exists() else f"status {ended[1]}"
        require(ended[1] == 0, "a forked child reads what its parent reads", told)


def _is_refused(iterator: Iterator[Any]) -> bool:
    """Whether a forked child is told that an iteration is its parent's."""
    try:
        next(iterator)
    except ConverterError as error:
        return "begun in another process" in str(error)
    return False


def _is_expected_of_tensorflow(step: Step, error: Exception) -> bool:
    text = f"{type(error).__name__} {error}"
    expected = {"delete": "Was the converter deleted", "close elsewhere": "This loader was closed"}.get(step["end"])
    return (expected is not None and expected in text) or (step["transform"] == "fail" and "of row " in text)


def _begin_closing(loader: Any, after_us: int) -> Callable[[], None]:
    """Close a loader from another thread; returns what waits for that."""
    errors: list[BaseException] = []

    def close() -> None:
        time.sleep(after_us / 1e6)
        try:
            loader.__exit__(None, None, None)
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    thread = threading.Thread(target=close, name="closer")
    thread.start()

    def wait() -> None:
        thread.join(_CHILD_SECONDS)
        require(not thread.is_alive(), "close ends from another thread", "it hangs")
        if errors:
            told = "".join(traceback.format_exception(errors[0]))
            raise ViolationError("close works from another thread", told)

    return wait


def _require_closed(loader: Any) -> None:
    try:
        next(iter(loader), None)
    except Exception as error:  # noqa: BLE001 (TensorFlow tells ours in an error of its own)
        require("This loader was closed" in str(error), "errors say what happened", str(error))
        return
    raise ViolationError("a closed loader refuses iterations", repr(loader))


def _in_thread(call: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    thread = threading.Thread(target=run, name="user")
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()


# The campaign ------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Shared:
    rows: Rows
    exits: Exits
    hooks: Hooks
    num_cases: int = 0
    first_bytes: int | None = None

    def require_no_growth(self) -> None:
        """Require that the process grows no more after its first cases."""
        self.num_cases += 1
        if self.num_cases % _FIRST_CASES:
            return
        pa.default_memory_pool().release_unused()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        now = resident_bytes()
        if self.first_bytes is None:
            self.first_bytes = now
        grown = now - self.first_bytes
        require(grown < _GROWTH_BYTES, "memory does not grow", f"{grown >> 20} MiB in {self.num_cases} cases")


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[_Shared]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name_semaphores()
    from multiprocessing import forkserver, resource_tracker

    # They live as long as this process, as what a module keeps does.
    importlib.import_module("converter.frameworks.torch.workers")
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    hooks = Hooks()
    hooks.set()
    shared = _Shared(rows=write_rows(folder), exits=Exits(folder / "exits"), hooks=hooks)
    # What is made at the first use is there before the first case.
    chance = random.Random(1)
    for kind, source in itertools.product(("numpy", "torch"), SOURCES):
        step = {**_life(chance, kind, "whole"), "source": source, "transform": "double", "local_cache": True}
        with tempfile.TemporaryDirectory() as warm:
            _run([step], shared, Path(warm))
    gc.collect()
    gc.freeze()
    yield shared
    shared.exits.close()


def _run(steps: Sequence[Step], shared: _Shared, folder: Path) -> Counter[str]:
    with tempfile.TemporaryDirectory(prefix="life-", dir=in_memory()) as quick:
        done = _run_in(steps, shared, Path(quick))
    shared.require_no_growth()
    return done


def _run_in(steps: Sequence[Step], shared: _Shared, folder: Path) -> Counter[str]:
    temporary = folder / "t"
    temporary.mkdir()
    case = _Case(rows=shared.rows, folder=folder)
    shared.hooks.told.clear()
    if any(step.get("kind") == "tf" for step in steps):
        import_tensorflow()
        shared.first_bytes = None
    if any(step["do"] == "exit" for step in steps):
        shared.exits.start()
    # What a fork has frozen is garbage as any other here, and can be seen.
    gc.unfreeze()
    before = look()
    with temporary_files_in(temporary):
        try:
            for number, step in enumerate(steps):
                if step["do"] == "exit":
                    case.done += shared.exits.run(step, shared.rows, folder / str(number))
                else:
                    case.take(step)
        finally:
            case.close()
        require_as_before(before, folder)
    require(not shared.hooks.told, "nothing is printed by Python's hooks", "; ".join(shared.hooks.told))
    for cache in folder.glob("cache-*"):
        require(not leases_in(cache), "leases are released", f"{leases_in(cache)}")
    require(not files_in(temporary), "temporary files are removed", f"{files_in(temporary)}")
    shutil.rmtree(folder, ignore_errors=True)
    return case.done


CAMPAIGN = Campaign(name="lives", draw=_draw, run=_run, shared=_shared, max_seconds=90.0)
