"""The first cases of each campaign, and what its runner makes of cases that fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.campaign import (
    crowd,
    crowd_in_turns,
    crowd_of_stores,
    damaged_bytes,
    features,
    kill,
    known_faults,
    lives,
    values,
)
from tests.faults.campaign.__main__ import find
from tests.faults.campaign.runner import Result, run_cases
from tests.repository import REPOSITORY


@pytest.mark.parametrize(("name", "num_cases"), [("store", 200)])
def test_the_first_cases_violate_no_law(name: str, num_cases: int) -> None:
    result = run_cases(find(name), 1, range(num_cases))

    assert not result.violations, "\n".join(result.violations)
    assert result.num_cases == num_cases
    assert result.done["faults"] > num_cases / 2


@pytest.fixture(scope="module")
def known() -> Result:
    # A hang takes seconds each time, so it has a test of its own.
    numbers = [number for number, kind in enumerate(known_faults.KINDS) if kind != "hang"]
    return run_cases(known_faults.CAMPAIGN, 5, numbers, num_processes=2)


def test_each_way_to_fail_is_told_with_the_line_that_runs_it_again(known: Result) -> None:
    told = {violation.splitlines()[1]: violation for violation in known.violations}

    assert sorted(told) == [
        "VIOLATION: MemoryError",
        "VIOLATION: ZeroDivisionError",
        "VIOLATION: ends the process (-9)",
        "VIOLATION: nothing is lost",
    ]
    for number, kind in ((1, "nothing is lost"), (2, "ZeroDivisionError"), (4, "ends the process (-9)")):
        again = f"Again: python -m tests.faults.campaign known_faults --case 5:{number} --steps "
        assert again in told[f"VIOLATION: {kind}"]


def test_a_case_that_fails_is_made_as_small_as_it_can_be(known: Result) -> None:
    for violation in known.violations:
        steps = [line for line in violation.splitlines() if line.startswith("  ") and '"value"' in line]
        assert sorted(int(step.partition('"value": ')[2].rstrip("}")) for step in steps) == [3, 7]


def test_what_was_done_is_counted(known: Result) -> None:
    assert (known.num_cases, known.done["steps"]) == (5, 20)


def test_a_case_that_hangs_is_told_with_where_it_stands_and_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.campaign", "known_faults", "--case", "5:3"]
    child = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)

    assert child.returncode == 1, child.stderr
    assert child.stdout.startswith("hangs\ncase 3:\n")
    assert "known_faults.py" in child.stdout
    assert "in _fail" in child.stdout


def test_nothing_is_left_of_the_first_lives() -> None:
    result = run_cases(lives.CAMPAIGN, 1, range(30))

    assert result.violations == []
    assert result.done["rows compared"] > 10_000
    assert {"numpy", "torch", "tf", "interrupts", "ended by fork", "ended by delete"} <= set(result.done)


def test_the_first_crowds_in_simulated_time_keep_the_laws() -> None:
    result = run_cases(crowd_in_turns.CAMPAIGN, 1, range(150))

    assert result.violations == []
    assert result.done["simulated seconds"] > 200 * 3600
    assert {"make: held", "open: held", "sweep: something", "delete: done", "crashes within an act"} <= set(result.done)


def test_the_first_crowds_of_processes_keep_the_laws() -> None:
    result = run_cases(crowd.CAMPAIGN, 1, range(25))

    assert result.violations == []
    assert {"convert: written", "open: opened", "read: read", "go on: read", "killed"} <= set(result.done)


def test_the_first_crowds_on_stores_keep_the_laws() -> None:
    """Some 40 s of one core, of which the servers start for 15."""
    result = run_cases(crowd_of_stores.CAMPAIGN, 1, range(6))

    assert result.violations == []
    assert {"cases on HDFS", "cases on Azurite", "cases on S3", "convert: written", "read: read"} <= set(result.done)


def test_damaged_bytes_are_rows_or_an_error_by_name() -> None:
    """Some 25 s of one core."""
    result = run_cases(damaged_bytes.CAMPAIGN, 1, range(430))

    assert not result.violations, result.violations[0]
    done = result.done
    assert done["files damaged"] > 400
    assert (
        min(done["errors by name"], done["reads"], done["verifications"], done["states resumed"], done["sweeps"]) > 10
    )


def test_values_and_filters_are_what_spark_says() -> None:
    """Some 40 s of one core, nearly all of them for the session and the frames."""
    result = run_cases(values.CAMPAIGN, 1, range(8))

    assert not result.violations, result.violations[0]
    done = result.done
    assert done["cells compared"] > 1000
    assert min(done["filters that leave some"], done["reads"]) > 5


def test_features_together_give_the_cells_that_are_known() -> None:
    """Some 15 s of one core."""
    result = run_cases(features.CAMPAIGN, 1, range(30))

    assert not result.violations, result.violations[0]
    done = result.done
    assert done["cells compared"] > 20_000
    assert min(done["mixtures"], done["reads"], done["statistics"], done["sequences"]) > 10


def test_whatever_is_killed_stopped_or_out_of_disk_the_laws_hold() -> None:
    result = run_cases(kill.CAMPAIGN, 3, range(60))

    assert not result.violations, result.violations[0]
    # The cases were not empty.
    for what in (
        "killed",
        "stopped",
        "continued",
        "errors met",
        "jumps of the store's clock",
        "commits",
        "files swept",
    ):
        assert result.done[what] >= 5, (what, result.done)
    assert result.done["rows compared"] > 5000
