"""Trainers that are killed at random moments and go on with other ranks: in the end every row was read as promised.

    python -m tests.faults.elastic --kills 500 > tests/faults/ELASTIC.md     # half an hour on two cores
    python -m tests.faults.elastic --seeds 17:18                             # one case again, from its seed alone

A case is a training of two epochs: a loop by hand, Lightning, or Keras. Its ranks, which talk over gloo, note every row
that they are handed, and rank 0 saves the loader's state every few steps, by a rename. A rank is killed (SIGKILL) at a
random moment, and the others end as under a launcher. Then it goes on from the last state with another number of ranks
(1 to 6), another batch size and another number of worker processes; a few times in a case. What is trained on, and how
ranks are started, is drawn too.

Checked, for each epoch: the rows that count (those until the state from which the next ranks went on) are the rows
that one process reads without a crash, each as often. With `uneven="drop"` so many are missing as could not be shared
out: fewer than there are ranks, each time that their number changes; with `"pad"` rows whose `__valid` is False do not
count. Unless `uneven` is "keep", all ranks take equally many steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from tests.faults.elastic_cases import Forkserver, be_rank, draw, run_case, write_rows


def run_seeds(seeds: Iterator[int], is_enough: Callable[[Counter[str]], bool]) -> tuple[dict[str, Counter[str]], int]:
    """Run cases until it is enough; what was done in each view and launcher, and how many cases failed."""
    tables: dict[str, Counter[str]] = {}
    failures = 0
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder, forkserver = Path(temporary), Forkserver()
        url = write_rows(folder)
        for seed in seeds:
            case = draw(seed)
            try:
                done = run_case(case, folder, url, forkserver)
            except Exception as error:  # noqa: BLE001 (it is a finding)
                failures += 1
                done = Counter(cases=1, violations=1)
                print(f"FAILED. Again: python -m tests.faults.elastic --seeds {seed}:{seed + 1}", file=sys.stderr)
                print(f"{json.dumps(asdict(case))}\n{error}", file=sys.stderr, flush=True)
            total += done
            if sys.stderr.isatty():
                print(f"\r{total['cases']} cases, {total['kills']} kills, {failures} failed", end="", file=sys.stderr)
            for name in (
                case.view,
                f"uneven={case.uneven!r}",
                f"started by {case.launcher}",
                f"trained by {case.trainer}",
                "all",
            ):
                tables[name] = tables.get(name, Counter()) + done
            if is_enough(total):
                break
    return tables, failures


def main() -> None:
    """Run, print a table, exit 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="run cases until this many ranks were killed")
    parser.add_argument("--seeds", help="FIRST:STOP, these cases instead")
    parser.add_argument("--rank", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        folder, url, number, seed = options.rank
        be_rank({}, folder, url, number, draw(seed))
        return
    start = time.monotonic()
    if options.seeds:
        first, _, stop = options.seeds.partition(":")
        tables, failures = run_seeds(iter(range(int(first), int(stop))), lambda _: False)
    else:
        tables, failures = run_seeds(itertools.count(), lambda done: done["kills"] >= options.kills)
    print(heading(options, time.monotonic() - start))
    print("| | cases | kills | resumes | rows that counted | violations |\n| --- | --- | --- | --- | --- | --- |")
    names = ("cases", "kills", "resumes", "rows", "violations")
    for name in sorted(tables, key=lambda name: (name == "all", "=" in name, "ed by" in name, name)):
        print(f"| {name} | " + " | ".join(f"{tables[name][number]:,}" for number in names) + " |")
    sys.exit(bool(failures))


def heading(options: argparse.Namespace, seconds: float) -> str:
    """What was run, on what, when."""
    import torch

    command = f"--seeds {options.seeds}" if options.seeds else f"--kills {options.kills}"
    return (
        f"# Trainers that are killed\n\n`python -m tests.faults.elastic {command}`, {time.strftime('%Y-%m-%d')}: "
        f"{seconds:,.0f} s, {os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}.\n"
    )


if __name__ == "__main__":
    main()
