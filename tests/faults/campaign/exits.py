"""Programs that end with loaders open, each a fork of one process that has imported everything, so that it is quick.

python -m tests.faults.campaign.exits FOLDER     # one JSON object a line on stdin and stdout
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from converter.cache import roots, sweeps
from tests.faults.campaign.cases import Step, require
from tests.faults.campaign.left_behind import files_in, leases_in
from tests.faults.campaign.life_parts import Rows, check_batch, copy_entry, make_loader, write_rows
from tests.repository import REPOSITORY

ENDINGS = ("return", "raise", "sigint", "early sigint", "kill")
_MAX_SECONDS = 30.0
_AGAIN_SECONDS = 2.0
_kept: list[Any] = []


def _live(asked: dict[str, Any], rows: Rows, ready: int) -> None:
    """A program: what happens to its loader at its end is not its business."""
    step, folder = asked["step"], Path(asked["folder"])
    order = np.array(asked["order"])
    tempfile.tempdir = str(folder / "tmp")
    converter = rows.open(step["source"], folder / "cache")
    loader = make_loader(converter, step, order, folder)
    iterator, num_rows = iter(loader), 0
    for _ in range(step["batches"]):
        batch = next(iterator, None)
        if batch is not None:
            num_rows += check_batch(rows, batch, order, num_rows, step["transform"])
    _kept.extend((converter, loader, iterator))
    os.write(ready, b"x")
    if step["how"] == "raise":
        raise LookupError("of the program")
    while step["how"] != "return":
        # Until a signal comes.
        loader.set_epoch(0)
        for _ in loader:
            pass


def _await(pid: int, seconds: float) -> int | None:
    """The exit status, or the number of the signal as a negative one; None if the process does not end."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.001)


def _watch(pid: int, step: Step, ready: int) -> dict[str, Any]:
    """Let a child live and end it as the step says."""
    is_ready = step["how"] == "early sigint" or bool(select.select([ready], [], [], _MAX_SECONDS)[0])
    if step["how"] in ("return", "raise") or not is_ready:
        status = _await(pid, _MAX_SECONDS)
    else:
        time.sleep(step["after_us"] / 1e6)
        number = signal.SIGKILL if step["how"] == "kill" else signal.SIGINT
        deadline, status = time.monotonic() + _MAX_SECONDS, None
        while status is None and time.monotonic() < deadline:
            # An interrupt that comes while an object is freed cannot be raised: a user tries again.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
            status = _await(pid, _AGAIN_SECONDS)
    left = _of_session(pid)
    deadline = time.monotonic() + 12
    while left and time.monotonic() < deadline and status is not None:
        time.sleep(0.005)
        left = _of_session(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return {"status": status, "left": left}


def _of_session(pid: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == pid and fields[0] != "Z":
                found.append(f"{path.parent.name} {(path.parent / 'cmdline').read_text()}".replace("\0", " "))
    return found


def main() -> None:
    """Fork a child for each line; a child returns from here, and ends as programs do."""
    import torch  # noqa: F401

    signal.signal(signal.SIGINT, signal.default_int_handler)
    rows = write_rows(Path(sys.argv[1]))
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ready, told = os.pipe()
        pid = os.fork()
        if not pid:
            # As a program's main module would, and nothing else.
            os.close(ready)
            said = os.open(f"{asked['folder']}/said", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)
            os.dup2(said, 2)
            os.close(said)
            # Now it may be interrupted.
            os.setsid()
            _live(asked, rows, told)
            return
        os.close(told)
        with contextlib.suppress(ProcessLookupError):
            while os.getpgid(pid) != pid:
                time.sleep(0.0001)
        print(json.dumps(_watch(pid, asked["step"], ready)), flush=True)
        os.close(ready)


class Exits:
    """The process that forks them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def run(self, step: Step, rows: Rows, folder: Path) -> Counter[str]:
        """Let a program live and end; require that it leaves nothing."""
        (folder / "tmp").mkdir(parents=True)
        copy_entry(rows, folder / "cache")
        order = rows.order(step["source"], step["seed"], 0).tolist()
        told = self._ask({"step": step, "folder": str(folder), "order": order})
        said = (folder / "said").read_text() if (folder / "said").exists() else ""
        how, status = step["how"], told["status"]
        require(status is not None, "a program ends", f"{how}: {said}")
        require(not told["left"], "processes end with their program", f"{how}: {told['left']}")
        if how == "return":
            require((status, said) == (0, ""), "a program ends quietly", f"status {status}: {said}")
        elif how == "raise":
            is_alone = status == 1 and said.count("Traceback") == 1 and said.endswith("LookupError: of the program\n")
            require(is_alone, "a program that fails says that and no more", f"status {status}: {said}")
        elif how != "kill":
            is_alone = status == -signal.SIGINT and said.rstrip().endswith("KeyboardInterrupt")
            require(is_alone, "Ctrl-C ends a program", f"{how}: status {status}: {said}")
        if how in ("return", "raise", "sigint"):
            left = leases_in(folder / "cache")
            require(not left, "leases are released", f"{how}: {left} {said}")
        if how != "kill":
            require(not files_in(folder / "tmp"), "temporary files are removed", f"{how}: {files_in(folder / 'tmp')}")
        sweeps.sweep_root(roots.open_root(str(folder / "cache")), older_than_seconds=0)
        left = [name for name in files_in(folder / "cache") if not name.endswith(roots.OWNER_FILE)]
        require(not left, "a sweep removes what is left", f"{how}: {left}")
        return Counter({f"programs ended by {how}": 1})

    def start(self) -> None:
        """Start it, if it was not yet."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.campaign.exits", str(self._folder)],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._read()

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that forks programs has ended"
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.communicate()


if __name__ == "__main__":
    main()
