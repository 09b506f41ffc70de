"""The parent's side of actors: they are started, told, waited for, stopped and killed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

from tests.faults.campaign.cases import require
from tests.faults.campaign.kill_actors import KEYS, Actor, Pipes
from tests.faults.campaign.kill_disk import World

_ANSWER_SECONDS = 30.0
"""What takes longer hangs. Actors wait for nothing longer than a second; the rest is for a busy machine."""


class Child:
    """An actor, as its parent sees it."""

    def __init__(self, pid: int, pipes: Pipes) -> None:
        self.pid, self._pipes = pid, pipes
        self.stopped: list[int] = []
        """Which of its processes are stopped: the actor itself, or its executor."""

        self._death = os.pidfd_open(pid)
        self._waiting = b""

    def tell(self, command: dict[str, Any]) -> None:
        """Give it something to do."""
        os.write(self._pipes.requests, json.dumps(command).encode() + b"\n")

    def wait(self, fate: dict[str, Any]) -> Any:
        """Its answer, or "dead", or "stopped"; after so many microseconds it is killed or stopped from here."""
        if "after_us" in fate:
            answer = self._read(fate["after_us"] / 1e6)
            if answer is not None:
                return answer
            if fate["how"] == "kill":
                self.kill()
                return "dead"
            os.kill(self.pid, signal.SIGSTOP)
            os.waitpid(self.pid, os.WUNTRACED)
            self.stopped = [self.pid]
            return "stopped"
        answer = self._read(_ANSWER_SECONDS)
        require(answer is not None, "nobody hangs", "no answer")
        return answer

    def _read(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._waiting:
            left = max(0.0, deadline - time.monotonic())
            ready = select.select([self._pipes.answers, self._death], [], [], left)[0]
            if not ready:
                return None
            data = os.read(self._pipes.answers, 1 << 16) if self._pipes.answers in ready else b""
            if not data:
                self.kill()
                return "dead"
            self._waiting += data
        line, _, self._waiting = self._waiting.partition(b"\n")
        answer = json.loads(line)
        if "stops" in answer:
            self._await_stop(answer["stops"])
            return "stopped"
        return answer

    def _await_stop(self, pid: int) -> None:
        if pid == self.pid:
            os.waitpid(pid, os.WUNTRACED)
        else:
            # An executor is its driver's child.
            while (state := _state_of(pid)) not in ("T", ""):
                require(state != "Z", "nobody hangs", "an executor ended instead of stopping")
                time.sleep(0.0005)
        self.stopped = [pid]

    def go_on(self) -> None:
        """Continue what is stopped."""
        for pid in self.stopped:
            os.kill(pid, signal.SIGCONT)
        self.stopped = []

    def can_beat(self) -> bool:
        """Whether the actor itself runs."""
        return self.pid not in self.stopped

    def beat(self) -> None:
        """Let it renew its leases, and return when it has."""
        os.write(self._pipes.beats, b".")
        ready = select.select([self._pipes.beaten], [], [], _ANSWER_SECONDS)[0]
        require(bool(ready), "nobody hangs", "the heartbeat does not end")
        os.read(self._pipes.beaten, 1)

    def kill(self) -> None:
        """End the actor, not its executor."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def close(self) -> None:
        """Close the pipes."""
        for end in (self._pipes.requests, self._pipes.answers, self._pipes.beats, self._pipes.beaten, self._death):
            os.close(end)


class Family:
    """All processes of a case."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self._spared = 0
        """A child of this process that is none of the family."""

    def start(self, folder: str, cache: str, world: World, traits: dict[str, Any]) -> Child:
        """Fork an actor."""
        requests, answers, beats, beaten = (os.pipe() for _ in range(4))
        pid = os.fork()
        if not pid:
            # What others have of these pipes keeps nobody from seeing their end.
            for child in self._children:
                child.close()
            for end in (requests[1], answers[0], beats[1], beaten[0]):
                os.close(end)
            try:
                Actor(folder, cache, world, Pipes(requests[0], answers[1], beats[0], beaten[1]), traits).live()
            finally:
                os._exit(1)
        for end in (requests[0], answers[1], beats[0], beaten[1]):
            os.close(end)
        child = Child(pid, Pipes(requests[1], answers[0], beats[1], beaten[0]))
        self._children.append(child)
        return child

    def spare(self, pid: int) -> None:
        """Let this child of ours live."""
        self._spared = pid

    def kill_all(self) -> None:
        """End every process, and those that they left behind."""
        for child in self._children:
            child.kill()
            child.close()
        self._children = []
        # Executors whose drivers died have become children of this process.
        while orphans := set(_children_of(os.getpid())) - {self._spared}:
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def close(self) -> None:
        """End every process."""
        self.kill_all()


def make_template(cache: Path, folder: str, world: World) -> None:
    """An entry of each key, that no process holds."""
    actor = Actor(folder, str(cache), world, Pipes(*(os.open(os.devnull, os.O_RDWR) for _ in range(4))), {})
    for key in KEYS:
        actor.write(key)
    actor.release()


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


with contextlib.suppress(ImportError):
    # pyarrow imports it when it is first used, which takes a second: here once, and not in each child.
    import pandas as pd  # noqa: F401
    import pyarrow.pandas_compat  # noqa: F401
gc.freeze()
