#!/usr/bin/env python3
"""Petastorm 0.13.1 reads what `converter.petastorm` wrote, as it reads what it wrote itself; by hand.

    python -m tests.parity.petastorm_both_ways --petastorm-python PYTHON [--keep FOLDER]

writes every store of `petastorm_stores.py` with our `materialize_dataset` and this environment's Spark, lets the real
Petastorm read each in every way of `petastorm_reads.py`, and prints as Markdown how that compares with what it reads of
its own store of the same rows, and with what we read of ours. PYTHON is that of an environment with Petastorm 0.13.1,
OpenCV and torch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.parity.petastorm_making import expected, read_all, write
from tests.parity.test_petastorm_parity import outcome_difference, wanted_of
from tests.repository import REPOSITORY

OURS, THEIRS = "converter.petastorm", "0.13.1"


def read_by_petastorm(python: str, root: Path) -> dict[str, Any]:
    """What the real Petastorm reads of the stores that we wrote."""
    command = [python, "-W", "ignore", "-m", "tests.parity.petastorm_making", "read", str(root), OURS]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=sys.stderr)
    return {path.stem: json.loads(path.read_text()) for path in sorted((root / OURS).glob("*.json"))}


def without_bytes(known: Any) -> Any:
    """JSON without the bytes of pictures and arrays: other encoders make other bytes of the same values."""
    if isinstance(known, list):
        return [without_bytes(item) for item in known]
    if isinstance(known, dict):
        return {key: "" if key == "bytes" else without_bytes(item) for key, item in known.items()}
    return known


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    pairs = [(way, without_bytes(found[way]), without_bytes(wanted[way])) for way in found]
    return [f"{way} {text}" for way, one, other in pairs if (text := outcome_difference(one, other))]


def verdict(differences: list[str]) -> str:
    return f"**{len(differences)} differ**, {differences[0]}" if differences else "equal"


def main() -> None:
    """Write, read on both sides, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--petastorm-python", required=True)
    parser.add_argument("--keep", help="the folder for the stores (default: one that is removed)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(options.keep or temporary).absolute()
        write(root, OURS)
        by_petastorm = read_by_petastorm(options.petastorm_python, root)
        by_us = read_all(root, OURS, OURS)
        print(
            "| store that we wrote | ways | read by Petastorm, beside its own store | read by us, beside Petastorm's |"
        )
        print("| --- | --- | --- | --- |")
        for name, found in by_petastorm.items():
            theirs = differences(found, expected(THEIRS, name))
            ours = differences(by_us[name], {way: wanted_of(THEIRS, name, way) for way in found})
            print(f"| {name} | {len(found)} | {verdict(theirs)} | {verdict(ours)} |", flush=True)


if __name__ == "__main__":
    main()
