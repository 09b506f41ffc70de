"""What a life could leave behind in its process, and in the folders that it used."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.faults.campaign.cases import require

_SETTLE_SECONDS = 8.0
"""What ends by itself has ended by then: torch's watch of a worker's parent looks every five seconds."""

_KEPT_CHILDREN = ("resource_tracker", "forkserver", "tests.faults.campaign")
"""What multiprocessing keeps, and the process that lets others exit."""

SEMAPHORES = f"/lives-{os.getpid()}"


def name_semaphores() -> None:
    """Let the semaphores of this process and its children have a name of their own in /dev/shm."""
    multiprocessing.current_process()._config["semprefix"] = SEMAPHORES  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a process has, in things that a life adds to and must take away again."""

    threads: frozenset[threading.Thread]
    children: Counter[str]
    descriptors: Counter[str]
    objects: Counter[str]
    arrow_bytes: int


def look() -> Seen:
    """What there is now."""
    gc.collect()
    return Seen(
        # TensorFlow's own threads call Python, which then knows them.
        threads=frozenset(thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)),
        children=Counter(_children()),
        descriptors=Counter(_descriptors()),
        objects=Counter(_objects()),
        arrow_bytes=pa.total_allocated_bytes(),
    )


def require_as_before(before: Seen, folder: Path) -> None:
    """Require that nothing was added, once what ends by itself has ended."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while (found := _added(before, folder)) and time.monotonic() < deadline:
        time.sleep(0.002)
    for law, what in found:
        require(False, law, what)


def _added(before: Seen, folder: Path) -> list[tuple[str, str]]:
    now = look()
    found = {
        "threads end": [thread.name for thread in now.threads - before.threads],
        "processes end": list((now.children - before.children).elements()),
        "descriptors are closed": list((now.descriptors - before.descriptors).elements()),
        "mappings end": _mapped(folder),
        "shared memory is removed": _shared_memory(),
        "objects are freed": list((now.objects - before.objects).elements())[:20],
        "Arrow's memory is given back": [now.arrow_bytes - before.arrow_bytes] if now.arrow_bytes > before.arrow_bytes
        else [],
    }  # fmt: skip
    return [(law, f"left: {what}") for law, what in found.items() if what]


def _children() -> Iterator[str]:
    """Command lines of the children, zombies too."""
    for listed in Path("/proc/self/task").glob("*/children"):
        pids: list[str] = []
        with contextlib.suppress(OSError):  # a thread that has ended since
            pids = listed.read_text().split()
        for pid in pids:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                # A forked child has this process's command line.
                is_own = line == Path("/proc/self/cmdline").read_text().replace("\0", " ")
                if is_own or not any(kept in line for kept in _KEPT_CHILDREN):
                    yield f"{pid} {state} {line}"


def _descriptors() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link != f"/proc/{os.getpid()}/fd":
                yield re.sub(r":\[\d+\]", "", link)


def _mapped(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def open_in(folder: Path) -> list[str]:
    """Files below a folder that this process has open or mapped."""
    return [link for link in _descriptors() if str(folder) in link] + _mapped(folder)


def _shared_memory() -> list[str]:
    """Of this process: torch and multiprocessing name theirs after it."""
    own = (f"torch_{os.getpid()}_", f"sem.{SEMAPHORES[1:]}-", f"psm_{os.getpid()}")
    return [name for name in os.listdir("/dev/shm") if name.startswith(own)] if os.path.isdir("/dev/shm") else []


def _objects() -> Iterator[str]:
    for one in gc.get_objects():
        module = getattr(type(one), "__module__", "")
        if isinstance(module, str) and module.startswith("converter."):
            yield f"{module}.{type(one).__qualname__}"


class Hooks:
    """Errors that Python can only print: of threads, and of what is called when objects are freed."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def set(self) -> None:
        """Note them from now on."""
        threading.excepthook = lambda told: self._note(f"thread {told.thread}", told.exc_value)
        sys.unraisablehook = lambda told: self._note(f"{told.err_msg} {told.object!r}", told.exc_value)

    def _note(self, where: str, error: BaseException | None) -> None:
        # An interrupt that comes while an object is freed cannot be raised; one that comes while torch starts worker
        # processes leaves an object without `_shutdown`.
        is_of_torch = isinstance(error, AttributeError) and "_MultiProcessingDataLoaderIter" in str(error)
        if not isinstance(error, KeyboardInterrupt) and not is_of_torch:
            self.told.append(f"{where}: {error!r} {_places(error)}")


def _places(error: BaseException | None) -> list[str]:
    places, trace = [], None if error is None else error.__traceback__
    while trace is not None:
        places.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return places


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def leases_in(cache_dir: Path) -> list[str]:
    """Signs of life in a cache."""
    return [str(path.relative_to(cache_dir)) for path in cache_dir.rglob("*") if is_sign(path.name)]


def is_sign(name: str) -> bool:
    """Whether a file is of a process that was alive."""
    return bool(re.search(r"lease-|\.intent|\.clock-|\.tmp$", name))


def files_in(folder: Path) -> list[Any]:
    """Files, and sockets and the like."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()]
