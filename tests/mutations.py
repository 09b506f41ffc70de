"""Breaks the code on purpose, one line at a time, and says which lane of tests notices: `python -m tests.mutations`.

Each mutation is tried in a copy of the committed tree. First those of the tests named for it run that are in the short
lane; if they pass, all of the named tests. So "short" and "long" mean that a named test of that lane failed, and
"nothing" that all of them passed; tests that are not named may notice it nevertheless. A test that fails without the
mutation too proves nothing. The table goes to tests/MUTATIONS.md. Rows of an earlier table stay, by module and claim;
pass `--again` to try those too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.mutation_list import MUTATIONS, Mutation

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "MUTATIONS.md"
HEADER = "| module | what is broken | noticed in | by |\n|---|---|---|---|\n"
STEP_SECONDS = 3600


def main() -> None:
    """Try the mutations and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of modules' names; all mutations if none is given")
    parser.add_argument("--at-once", type=int, default=2, help="mutations tried side by side (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="try those again that the table has already")
    options = parser.parse_args()
    rows = read_table()
    named = [
        mutation
        for mutation in MUTATIONS
        if not options.names or any(name in mutation.module for name in options.names)
    ]
    wanted = [mutation for mutation in named if options.again or mutation.label not in rows]
    # Every second one first: a run that is stopped early has been in all rooms.
    wanted = wanted[::2] + wanted[1::2]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, ThreadPoolExecutor(options.at_once) as pool:
        copies = [clone(Path(folder) / str(index)) for index in range(options.at_once)]
        check_list(copies[0])
        free = list(copies)

        def attempt(mutation: Mutation) -> tuple[Mutation, str, str]:
            copy = free.pop()
            try:
                return mutation, *try_mutation(mutation, copy)
            finally:
                free.append(copy)

        for done in as_completed([pool.submit(attempt, mutation) for mutation in wanted]):
            mutation, lane, test = done.result()
            rows[mutation.label] = f"| {mutation.module} | {mutation.claim} | {lane} | {test} |"
            print(rows[mutation.label], flush=True)
            write_table(rows)
    print(f"{len(wanted)} mutations tried in {time.monotonic() - start:.0f} s")


def clone(folder: Path) -> Path:
    """A copy of the committed tree."""
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(folder)], check=True)
    return folder


def check_list(copy: Path) -> None:
    """Raise ValueError if a mutation's text or one of its tests is not in the committed tree."""
    for mutation in MUTATIONS:
        mutation.apply_to(copy, write=False)
        for test in mutation.tests:
            if not (copy / test).exists():
                raise ValueError(f"{mutation.label}: {test} does not exist.")


def try_mutation(mutation: Mutation, copy: Path) -> tuple[str, str]:
    """The lane that notices a mutation, and the first test that fails.

    Raises:
        SystemExit: pytest could not run.
    """
    mutation.apply_to(copy, write=True)
    try:
        for lane, arguments in (
            ("short", ["-m", "short and not long", *mutation.tests]),
            ("long", ["--all", *mutation.tests]),  # Of a folder that is named, the short lane alone would run.
        ):
            failed = first_failure(copy, arguments)
            if failed:
                reset(copy)
                if failed not in passing_tests and first_failure(copy, ["--all", failed]):
                    return "**unknown**", f"`{failed.removeprefix('tests/')}` fails without it too"
                passing_tests.add(failed)
                return lane, f"`{failed.removeprefix('tests/')}`"
        return "**nothing**", ""
    finally:
        reset(copy)


def reset(copy: Path) -> None:
    """Make the copy the committed tree again."""
    subprocess.run(["git", "checkout", "-q", "."], cwd=copy, check=True)
    subprocess.run(["git", "clean", "-fdq"], cwd=copy, check=True)


passing_tests: set[str] = set()
"""Tests that were run without a mutation, and passed."""


def first_failure(copy: Path, arguments: list[str]) -> str:
    """The first test that fails, "" if all pass.

    A run that crashes counts as a failure of the first file or folder that it was given. A test that hangs fails by
    its own timeout.

    Raises:
        SystemExit: pytest could not run, or took longer than STEP_SECONDS.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    environment = os.environ | {"PYTHONPATH": str(copy)}
    # To a file: processes that tests leave behind would hold a pipe open. In a session of its own: they end with it.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(STEP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise SystemExit(f"{' '.join(command)} took longer than {STEP_SECONDS} s.") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    if code in (0, 5):  # 5: no test of that lane is among them.
        return ""
    match = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", text, re.MULTILINE)
    if match is not None:
        return match[1]
    if code < 0:
        return next((argument for argument in arguments if argument.startswith("tests/")), "tests/unit")
    raise SystemExit(f"{' '.join(command)} ended with {code}:\n{text[-4000:]}")


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
