#!/usr/bin/env python3
"""What `loader.stats()` says of slow loops whose reason is known, and what counting costs the fastest loop.

    python tests/bench/verdicts.py                  # three minutes on two cores
    python tests/bench/verdicts.py --only "one core" "images" --without-store

The store is Azurite behind a proxy that delays each request; it needs Node.js.

The cost is counted, as half a percent is less than what one run differs from the next: how often an epoch of the
fastest loop (2 M rows of 41 float32 as one tensor, shuffled) reads a clock or asks whether to, times what that takes.

Prints Markdown.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from read import print_table, say

from converter import make_parquet_converter
from converter.loading.stats import LoaderStats
from converter.reading.meter import Every

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.situations import SITUATIONS, slow_store

ROWS, COLUMNS, BATCH_SIZE = 2_000_000, 41, 1024


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of situations")
    parser.add_argument("--without-store", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print_verdicts(Path(folder), arguments.only, has_store=not arguments.without_store)
        if not arguments.only:
            print_cost(Path(folder))


def print_verdicts(folder: Path, only: list[str] | None, *, has_store: bool) -> None:
    """What is said of each situation."""
    rows = []
    for number, (name, (situation, right)) in enumerate(SITUATIONS.items()):
        if not only or name in only:
            say(name)
            rows.append(_row(name, situation(folder / str(number)), right))
    if has_store and not only:
        from tests.servers.azurite import SlowAzurite, start_azurite
        from tests.servers.proxy import Proxy

        (folder / "azurite").mkdir()
        with start_azurite(folder / "azurite") as azurite, Proxy(azurite.port) as proxy:
            slow = SlowAzurite(proxy)
            say("slow store")
            rows.append(_row("slow store", slow_store(slow, folder / "store"), {"store"}))
            cold = slow_store(slow, folder / "cold", local_cache_dir=folder / "copies")
            rows.append(_row("cold `local_cache_dir`", cold, {"cold cache"}))
    num_right = sum(row[2] == "yes" for row in rows)
    print_table(("situation", "limit", "right", "what is said"), rows)
    print(f"\n{num_right} of {len(rows)} are right.\n")


def _row(name: str, stats: LoaderStats, right: set[str]) -> tuple[str, ...]:
    return name, stats.limit, "yes" if stats.limit in right else "**no**", stats.verdict


def print_cost(folder: Path) -> None:
    """What counting costs the fastest loop."""
    (folder / "fast").mkdir()
    numbers = np.random.default_rng(0).random((ROWS, COLUMNS), np.float32)
    table = pa.table({f"c{number}": numbers[:, number] for number in range(COLUMNS)})
    pq.write_table(table, folder / "fast/0.parquet", row_group_size=100_000, use_dictionary=False, compression="none")
    made = make_parquet_converter((folder / "fast").as_uri())
    names = tuple(made.schema.names)
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            counts[name] += 1
            return function(*values)

        return call

    seconds = []
    with made.make_torch_dataloader(batch_size=BATCH_SIZE, shuffle=True, stack={"x": names}) as loader:
        for _ in range(9):
            begun = time.perf_counter()
            for _ in loader:
                pass
            seconds.append(time.perf_counter() - begun)
        owners = {"perf_counter": time, "thread_time": time, "process_time": time, "getrusage": resource}
        kept = {name: getattr(owner, name) for name, owner in owners.items()}
        for name, owner in owners.items():
            setattr(owner, name, counted(name, kept[name]))
        kept_next = Every.is_next
        Every.is_next = counted("is_next", kept_next)  # type: ignore[method-assign]
        for _ in loader:
            pass
        Every.is_next = kept_next  # type: ignore[method-assign]
        for name, owner in owners.items():
            setattr(owner, name, kept[name])
    every = Every()
    every.took(0.0)
    every._left = 1 << 40
    calls: dict[str, Callable[[], Any]] = {
        **{name: kept[name] for name in ("perf_counter", "thread_time", "process_time")},
        "getrusage": lambda: kept["getrusage"](resource.RUSAGE_THREAD),
        "is_next": every.is_next,
    }
    epoch, rows, total = statistics.median(seconds), [], 0.0
    for name, count in sorted(counts.items()):
        each = _seconds_of(calls[name])
        total += count * each
        rows.append((name, f"{count:,}", f"{each * 1e9:,.0f} ns", f"{count * each / epoch:.2%}"))
    print_table(("what", "times in an epoch", "each", "of the epoch"), rows)
    print(f"\nOf an epoch of {epoch * 1e3:,.0f} ms in {-(-ROWS // BATCH_SIZE):,} batches: {total / epoch:.2%}.")


def _seconds_of(call: Callable[[], Any], times: int = 100_000) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begun) / times


if __name__ == "__main__":
    main()
