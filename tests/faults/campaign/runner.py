"""Many cases of a campaign in turn; what fails is made smaller and told with the line that replays it."""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.faults.campaign.cases import Campaign, draw
from tests.faults.campaign.processes import Worker

_MOST_TRIES = 200
"""Runs in which a failed case is made smaller."""


@dataclass(slots=True, kw_only=True)
class Result:
    """What came of many cases."""

    num_cases: int = 0
    seconds: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)


def run_cases(campaign: Campaign, seed: int, numbers: Iterable[int], *, num_processes: int = 1) -> Result:
    """Run cases, several at a time; each violation is told on stderr at once."""
    result, waiting, start = Result(), queue.SimpleQueue[int | None](), time.monotonic()
    lock = threading.Lock()
    failures: list[BaseException] = []
    for number in numbers:
        waiting.put(number)
    for _ in range(num_processes):
        waiting.put(None)

    def work() -> None:
        with contextlib.closing(Worker(campaign)) as worker:
            while (number := waiting.get()) is not None and not failures:
                outcome = worker.run(seed, number)
                violation = None
                if outcome.kind is not None:
                    violation = _told(campaign, seed, number, worker, outcome.kind, outcome.what)
                    print(violation, file=sys.stderr, flush=True)
                with lock:
                    result.num_cases += 1
                    result.done += outcome.done
                    result.violations += [violation] if violation else []
                    _show(campaign, result, time.monotonic() - start)

    def noted() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised again below, in the caller's thread)
            failures.append(error)

    threads = [threading.Thread(target=noted, name=f"{campaign.name}-{one}") for one in range(num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    result.seconds = time.monotonic() - start
    return result


def replay(campaign: Campaign, seed: int, number: int, kept: Sequence[int] | None) -> str | None:
    """Run one case again; what was violated."""
    with contextlib.closing(Worker(campaign)) as worker:
        outcome = worker.run(seed, number, kept)
    return None if outcome.kind is None else f"{outcome.kind}\n{outcome.what}"


def _told(campaign: Campaign, seed: int, number: int, worker: Worker, kind: str, what: str) -> str:
    kept = _smallest(campaign, seed, number, worker, kind)
    steps = draw(campaign, seed, number)
    again = f"python -m tests.faults.campaign {campaign.name} --case {seed}:{number}"
    if len(kept) < len(steps):
        again += f" --steps {','.join(map(str, kept))}"
    shown = "\n".join(f"  {one}: {json.dumps(steps[one])}" for one in kept)
    return f"\nVIOLATION: {kind}\nAgain: {again}\n{shown}\n{what}"


def _smallest(campaign: Campaign, seed: int, number: int, worker: Worker, kind: str) -> list[int]:
    """The steps that are needed to fail in the same way: halves are left out, then quarters, then single steps."""
    kept = list(range(len(draw(campaign, seed, number))))
    size, tries = len(kept) // 2, 0
    while size:
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            tries += 1
            if tries > _MOST_TRIES:
                return kept
            if fewer and worker.run(seed, number, fewer).kind == kind:
                kept = fewer
                break
        else:
            size //= 2
        size = min(size, len(kept) // 2) if len(kept) > 1 else 0
    return kept


def _show(campaign: Campaign, result: Result, seconds: float) -> None:
    if sys.stderr.isatty():
        told = f"{result.num_cases:,} cases, {len(result.violations)} violations, {seconds:,.0f} s"
        print(f"\r{campaign.name}: {told} ", end="", file=sys.stderr, flush=True)
