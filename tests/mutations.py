"""Breaks the code on purpose, one line at a time, and says which lane of tests notices: `python -m tests.mutations`.

Each mutation is tried in a copy of the committed tree. First the tests that should notice it run, those of the short
lane; where they pass, the whole short lane; where that passes too, the named files with their long tests as well. So "short"
and "long" mean that a test of that lane failed, and "nothing" that the named long tests passed as well. The table goes
to tests/MUTATIONS.md; an earlier table's rows of mutations that are unchanged are kept, unless `--again`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "MUTATIONS.md"
HEADER = "| module | what is broken | noticed in | by |\n|---|---|---|---|\n"
STEP_SECONDS = 1500


def main() -> None:
    """Try the mutations and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of modules' names; all mutations if none is given")
    parser.add_argument("--at-once", type=int, default=2, help="mutations tried side by side (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="try those again that the table has already")
    options = parser.parse_args()
    for mutation in MUTATIONS:
        mutation.apply_to(ROOT, write=False)
    rows = {} if options.again else read_table()
    wanted = [
        mutation
        for mutation in MUTATIONS
        if mutation.label not in rows and (not options.names or any(name in mutation.module for name in options.names))
    ]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(options.at_once) as pool:
        copies = [clone(Path(folder) / str(index)) for index in range(options.at_once)]
        free = list(copies)

        def attempt(mutation: Mutation) -> tuple[Mutation, str, str]:
            copy = free.pop()
            try:
                return mutation, *try_mutation(mutation, copy)
            finally:
                free.append(copy)

        for mutation, lane, test in pool.map(attempt, wanted):
            rows[mutation.label] = f"| {mutation.module} | {mutation.claim} | {lane} | {test} |"
            print(rows[mutation.label], flush=True)
            write_table(rows)
    print(f"{len(wanted)} mutations tried in {time.monotonic() - start:.0f} s")


def clone(folder: Path) -> Path:
    """A copy of the committed tree."""
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(folder)], check=True)
    return folder


def try_mutation(mutation: Mutation, copy: Path) -> tuple[str, str]:
    """The lane that notices a mutation, and the first test that fails."""
    mutation.apply_to(copy, write=True)
    try:
        for lane, arguments in (
            ("short", ["-m", "short", *mutation.tests]),
            ("short", ["-n", "2", "--dist", "loadfile"]),
            ("long", [*mutation.tests]),
        ):
            failed = first_failure(copy, arguments)
            if failed:
                return lane, failed
        return "**nothing**", ""
    finally:
        subprocess.run(["git", "checkout", "-q", "."], cwd=copy, check=True)


def first_failure(copy: Path, arguments: list[str]) -> str:
    """The first test that fails, "" where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=STEP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a run that did not end within {STEP_SECONDS} s"
    if done.returncode in (0, 5):  # 5: no test of that lane is among them.
        return ""
    match = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", done.stdout, re.MULTILINE)
    if match is None:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return f"`{match[1].removeprefix('tests/')}`"


def read_table() -> dict[str, str]:
    """The rows of the committed table, by the mutation's label."""
    if not TABLE.exists():
        return {}
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ") and "| what is" not in line]
    labels = {f"{mutation.module}: {mutation.claim}" for mutation in MUTATIONS}
    rows = {": ".join(line.strip("| ").split(" | ")[:2]): line for line in lines}
    return {label: line for label, line in rows.items() if label in labels}


def write_table(rows: dict[str, str]) -> None:
    """The table in the order of the list, below the shares that were noticed."""
    ordered = [rows[mutation.label] for mutation in MUTATIONS if mutation.label in rows]
    short = sum("| short |" in row for row in ordered)
    noticed = short + sum("| long |" in row for row in ordered)
    machine = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"
    shares = f"{len(ordered)} mutations: the short lane notices {short / len(ordered):.0%}"
    text = f"# Mutations\n\n{machine}; printed by `python -m tests.mutations`, which says what the columns mean.\n\n"
    text += f"{shares}, both lanes {noticed / len(ordered):.0%}.\n\n{HEADER}" + "\n".join(ordered) + "\n"
    TABLE.write_text(text)


if __name__ == "__main__":
    main()
