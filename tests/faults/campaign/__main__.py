"""Programs that draw faults by chance and check that the laws hold whatever happens.

    python -m tests.faults.campaign store --cases 20000 --seed 1     # one line for CAMPAIGNS.md
    python -m tests.faults.campaign store --case 1:417               # one case again, from its seed and number
    python -m tests.faults.campaign store --case 1:417 --steps 0,3   # only these of its steps

A case is a list of steps. One that fails is made smaller, steps left out as long as it goes on to fail in the same
way, and told on stderr with the line that runs it again. The exit status is 1 if a law was violated.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time

from tests.faults.campaign.cases import Campaign
from tests.faults.campaign.processes import serve
from tests.faults.campaign.runner import Result, replay, run_cases

CAMPAIGNS: tuple[str, ...] = (
    "store",
    "lives",
    "crowd_in_turns",
    "crowd",
    "crowd_of_stores",
    "damaged_bytes",
    "values",
    "features",
    "kill",
)
"""Each is a module beside this one with a `CAMPAIGN`."""


def find(name: str) -> Campaign:
    """A campaign by its name."""
    found: Campaign = importlib.import_module(f"tests.faults.campaign.{name}").CAMPAIGN
    return found


def row_of(name: str, seed: int, result: Result) -> str:
    """A line of the table."""
    done = ", ".join(f"{count:,} {what}" for what, count in sorted(result.done.items()))
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}"
    return (
        f"| {name} | {seed} | {result.num_cases:,} | {result.seconds:,.0f} | {len(result.violations)} | {done} | "
        f"{time.strftime('%Y-%m-%d')}, {machine} |"
    )


def main() -> None:
    """Run cases, or one again."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=(*CAMPAIGNS, "known_faults"), metavar="NAME", help=", ".join(CAMPAIGNS))
    parser.add_argument("--cases", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=1, help="cases at a time (default: %(default)s)")
    parser.add_argument("--case", help="SEED:NUMBER, this case instead")
    parser.add_argument("--steps", help="only these steps of the case, such as 0,3")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    campaign = find(options.name)
    if options.serve:
        requests, answers = map(int, options.serve.split(","))
        serve(campaign, requests, answers)
        return
    if options.case:
        seed, number = map(int, options.case.split(":"))
        kept = [int(one) for one in options.steps.split(",")] if options.steps else None
        violation = replay(campaign, seed, number, kept)
        print(violation or "No law was violated.")
        sys.exit(bool(violation))
    numbers = range(options.first, options.first + options.cases)
    result = run_cases(campaign, options.seed, numbers, num_processes=options.processes)
    print(row_of(options.name, options.seed, result))
    sys.exit(bool(result.violations))


if __name__ == "__main__":
    main()
