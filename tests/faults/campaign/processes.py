"""Cases in processes of their own, so that one that hangs, dies or takes all memory is a violation and no more."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.campaign.cases import Campaign, Outcome, run_case
from tests.repository import REPOSITORY

_CASES_OF_A_PROCESS = 500
"""A new process then, so that what leaks does not add up (a campaign that looks for leaks counts them itself)."""

_START_SECONDS = 180.0
"""For the imports, and for Spark."""

_STACK_SECONDS = 5.0


def serve(campaign: Campaign, requests_fd: int, answers_fd: int) -> None:
    """Run cases that a parent asks for, one line of JSON each, until it asks no more."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if campaign.max_memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (campaign.max_memory_bytes, campaign.max_memory_bytes))
    with (
        os.fdopen(requests_fd) as requests,
        os.fdopen(answers_fd, "w", buffering=1) as answers,
        tempfile.TemporaryDirectory(prefix=f"{campaign.name}-shared-") as folder,
        campaign.shared(Path(folder)) as shared,
    ):
        print("{}", file=answers)
        for line in requests:
            asked = json.loads(line)
            outcome = run_case(campaign, asked["seed"], asked["number"], asked["kept"], shared)
            told = {"steps": outcome.steps, "done": outcome.done, "kind": outcome.kind, "what": outcome.what}
            print(json.dumps(told), file=answers)


class Worker:
    """A process that runs cases of one campaign. It is started when it is needed, and again after it died."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._child: subprocess.Popen[bytes] | None = None
        self._requests = self._answers = -1
        self._log: Any = None
        self._num_cases = 0
        self._waiting = b""

    def run(self, seed: int, number: int, kept: Sequence[int] | None = None) -> Outcome:
        """Run a case, or some of its steps."""
        if self._num_cases >= _CASES_OF_A_PROCESS:
            self.close()
        if self._child is None:
            self._start()
        self._num_cases += 1
        asked = {"seed": seed, "number": number, "kept": None if kept is None else list(kept)}
        os.write(self._requests, json.dumps(asked).encode() + b"\n")
        line = self._read_line(self._campaign.max_seconds)
        if line:
            told = json.loads(line)
            return Outcome(steps=told["steps"], done=Counter(told["done"]), kind=told["kind"], what=told["what"])
        return self._died(number)

    def close(self) -> None:
        """End the process."""
        if self._child is None:
            return
        self._ask_no_more()
        try:
            self._child.wait(timeout=_START_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        self._forget()

    def _start(self) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `_forget`)
        command = [
            sys.executable,
            "-m",
            "tests.faults.campaign",
            self._campaign.name,
            "--serve",
            f"{requests},{answers}",
        ]
        self._child = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(requests, answers),
            start_new_session=True,
        )
        os.close(requests)
        os.close(answers)
        self._num_cases, self._waiting = 0, b""
        if not self._read_line(_START_SECONDS):
            raise RuntimeError(f"The campaign did not start:\n{self._logged()}")

    def _read_line(self, seconds: float) -> bytes:
        """The next line of the process; empty if it ended, or did not answer in time."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._waiting:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                return b""
            data = os.read(self._answers, 1 << 16)
            if not data:
                return b""
            self._waiting += data
        line, _, self._waiting = self._waiting.partition(b"\n")
        return line

    def _died(self, number: int) -> Outcome:
        assert self._child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=1)
        hangs = self._child.poll() is None
        if hangs:
            with contextlib.suppress(ProcessLookupError):
                # It prints where its threads are.
                os.kill(self._child.pid, signal.SIGUSR1)
            time.sleep(_STACK_SECONDS)
        self._kill()
        kind = "hangs" if hangs else f"ends the process ({self._child.returncode})"
        logged = self._logged()
        self._forget()
        return Outcome(steps=[], kind=kind, what=f"case {number}:\n{logged}")

    def _kill(self) -> None:
        assert self._child is not None
        # And the processes that it started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _logged(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 8000))
        return str(self._log.read().decode(errors="replace"))

    def _ask_no_more(self) -> None:
        # Once: by then its number may be that of another worker's pipe.
        if self._requests != -1:
            os.close(self._requests)
            self._requests = -1

    def _forget(self) -> None:
        self._ask_no_more()
        os.close(self._answers)
        self._log.close()
        self._child = None
