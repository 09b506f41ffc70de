"""Handlers of signals that ask a loader for its state or its stats, wherever the main thread is, or that raise."""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import make_parquet_converter
from tests.processes import run_python

pytestmark = pytest.mark.timeout(100)


def write(folder: Path) -> str:
    pq.write_table(pa.table({"id": np.arange(4000)}), os.path.join(folder, "a.parquet"), row_group_size=100)
    return str(folder)


def make(converter: Any, kind: str) -> Any:
    if kind == "tensorflow":
        # Imported before TensorFlow, or its own import fails.
        import torch  # noqa: F401

    methods = {"numpy": "make_batch_reader", "torch": "make_torch_dataloader", "tensorflow": "make_tf_dataset"}
    return getattr(converter, methods[kind])(batch_size=50, shuffle=True, cur_shard=0, shard_count=1)


def ask_in_a_handler(folder: str, kind: str) -> list[bool]:
    """Whether states and stats were asked for by some hundred handlers, and all rows came."""
    chance, num_asked, is_right = random.Random(0), 0, True
    with make_parquet_converter(folder) as converter, make(converter, kind) as loader:

        def ask(*_: object) -> None:
            nonlocal num_asked
            loader.state_dict()
            loader.stats()
            repr(loader)
            num_asked += 1
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + chance.random() * 0.002)

        faulthandler.dump_traceback_later(80, exit=True)
        signal.signal(signal.SIGALRM, ask)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        end = time.monotonic() + 2
        while time.monotonic() < end:
            rows: list[int] = []
            for number, batch in enumerate(loader):
                rows += np.asarray(batch["id"]).tolist()
                if number % 8 == 0:
                    loader.state_dict()
                    loader.stats()
            is_right &= sorted(rows) == list(range(4000))
        signal.setitimer(signal.ITIMER_REAL, 0)
    return [num_asked > 20, is_right]


@pytest.mark.parametrize("kind", ["numpy", "torch", "tensorflow"])
def test_a_handler_may_ask_for_state_and_stats_at_any_moment(tmp_path: Path, kind: str) -> None:
    assert run_python(ask_in_a_handler, write(tmp_path), kind) == [True, True]


class PreemptedError(Exception):
    """What a handler raises."""


def raise_in_a_handler(folder: str, kind: str) -> list[str]:
    """The kinds of errors that arrive in the loop."""
    chance, arrived = random.Random(0), set()

    def preempt(*_: object) -> None:
        raise PreemptedError

    faulthandler.dump_traceback_later(80, exit=True)
    signal.signal(signal.SIGALRM, preempt)
    with make_parquet_converter(folder) as converter:
        # Most moments are those in which threads begin and end.
        num_times, most_seconds = (30, 0.02) if kind == "tensorflow" else (600, 0.004)
        for _ in range(num_times):
            with make(converter, kind) as loader:
                try:
                    signal.setitimer(signal.ITIMER_REAL, most_seconds * (0.1 + chance.random()))
                    for _ in range(100):
                        for _ in loader:
                            pass
                except Exception as error:  # noqa: BLE001 (its kind is what is asked for)
                    # Thread.start of CPython fails where it cleans up after what a handler raises in it.
                    arrived.add(type(error.__context__ if isinstance(error, KeyError) else error).__name__)
    return sorted(arrived)


@pytest.mark.parametrize("kind", ["numpy", "torch", "tensorflow"])
def test_what_a_handler_raises_arrives_as_it_is(tmp_path: Path, kind: str) -> None:
    assert run_python(raise_in_a_handler, write(tmp_path), kind) == ["PreemptedError"]
