"""A torch loader of which a worker process is killed. It is forked from a process of its own, which has torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Iterator
from typing import Any

from converter import open_converter
from converter.cache import roots
from converter.errors import ConverterError
from tests.faults.campaign.cases import require
from tests.faults.campaign.kill_actors import KEYS

_SECONDS = 45.0
"""What takes longer hangs; torch may look for a worker's end each five seconds only."""


class Loaders:
    """Runs loaders; the process with torch is started when it is needed."""

    def __init__(self) -> None:
        self.pid = 0
        self._requests = self._answers = -1

    def run(self, **options: Any) -> dict[str, Any]:
        """What `load` found."""
        if not self.pid:
            self._start()
        os.write(self._requests, json.dumps(options).encode() + b"\n")
        data = b""
        while not data.endswith(b"\n"):
            is_ready = select.select([self._answers], [], [], _SECONDS)[0]
            require(bool(is_ready), "nobody hangs", "a loader does not end")
            data += os.read(self._answers, 1 << 16)
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _start(self) -> None:
        reading, self._requests = os.pipe()
        self._answers, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._requests)
            os.close(self._answers)
            try:
                _serve(reading, writing)
            finally:
                os._exit(1)
        os.close(reading)
        os.close(writing)

    def close(self) -> None:
        """End the process with torch, and a loader that hangs in it."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self._requests)
            os.close(self._answers)
            self.pid = 0


def _serve(reading: int, writing: int) -> None:
    import torch.utils.data  # noqa: F401

    os.setpgid(0, 0)
    with open(reading) as requests:
        for line in requests:
            if not os.fork():
                answer = _load(**json.loads(line))
                os.write(writing, json.dumps(answer).encode() + b"\n")
                os._exit(0)
            os.wait()


def _load(cache: str, key: str, workers: int, batch_size: int, kill_at: int, which: int) -> dict[str, Any]:
    """Read an epoch; a worker is killed after so many batches, and another loader goes on from the last state."""
    answer: dict[str, Any] = {"rows": [], "error": "", "is_named": True}
    try:
        with open_converter(f"{cache}/{roots.DIRECTORY}/{KEYS[key]}") as converter:
            state, rows = None, answer["rows"]
            options: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers, "columns": ["id"]}
            try:
                with converter.make_torch_dataloader(shuffle=True, shuffle_window_rows=20, **options) as loader:
                    for number, batch in enumerate(loader, 1):
                        rows += batch["id"].tolist()
                        state = loader.state_dict()
                        if number == kill_at:
                            os.kill(_children()[which % workers], signal.SIGKILL)
                answer["is_whole"] = True
            except (RuntimeError, ConnectionError, EOFError) as error:
                # torch's own: that the worker is gone, or cannot hand over a batch that it had made.
                answer["error"] = f"{type(error).__name__}: {error}"
                with converter.make_torch_dataloader(shuffle=True, shuffle_window_rows=20, **options) as loader:
                    if state is not None:
                        loader.load_state_dict(state)
                    for batch in loader:
                        rows += batch["id"].tolist()
                answer["is_whole"] = True
    except Exception as error:  # noqa: BLE001 (judged by the parent)
        answer["error"] = f"{type(error).__name__}: {error}"
        answer["is_named"] = isinstance(error, ConverterError) and cache in str(error)
    return answer


def _children() -> list[int]:
    return sorted(int(one) for one in _lines() if one)


def _lines() -> Iterator[str]:
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            yield from file.read().split()
