"""The command line of `other_writers` and `other_tables`: cases that a seed draws, in turn, and one line of a table."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

RunCase = Callable[[int, int, Path, Counter[str]], list[str]]
"""Runs the case of a seed and a number in a folder and counts what it did; what differs, in words."""


def run_program(name: str, description: str | None, run_case: RunCase, *, num_cases: int) -> None:
    """Run cases, or one again; exits 1 if something differed."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.parity.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", type=int, default=num_cases, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--case", help="SEED:NUMBER, this case instead")
    options = parser.parse_args()
    seed, numbers = options.seed, range(options.cases)
    if options.case:
        seed, first = map(int, options.case.split(":"))
        numbers = range(first, first + 1)
    done: Counter[str] = Counter()
    num_failed, started = 0, time.monotonic()
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            try:
                differences = run_case(seed, number, Path(folder), done)
            except Exception as error:  # noqa: BLE001 (the next case goes on)
                differences = [f"raises {error!r:.500}"]
        num_failed += bool(differences)
        for what in differences:
            print(f"case {seed}:{number}: {what}", flush=True)
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(done.items()))
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    seconds, today = f"{time.monotonic() - started:,.0f}", time.strftime("%Y-%m-%d")
    print(f"| {seed} | {len(numbers):,} | {seconds} | {num_failed} | {told} | {today}, {machine} |")
    sys.exit(bool(num_failed))
