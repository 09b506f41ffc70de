"""Whatever stands in a footer: rows, or an error that names the file. Never the end of the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults import footer_fuzz
from tests.repository import REPOSITORY

_CASES = 1_600
_CASES_OF_A_CHILD = 800


@pytest.mark.parametrize("first", range(0, _CASES, _CASES_OF_A_CHILD))
def test_a_mutated_footer_ends_no_process(first: int) -> None:
    """A child runs the cases, because a footer that ends it would end the tests as well; some 10 s each."""
    command = [sys.executable, "-m", footer_fuzz.__name__, str(first), str(_CASES_OF_A_CHILD)]
    child = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=250, check=False)
    lines = child.stdout.splitlines()
    begun = [line for line in lines if line.startswith("case ") and line.split()[-1].isdigit()]
    assert child.returncode == 0, f"{begun[-1:]} ended the process: {child.stderr[-2000:]}"
    assert begun[-1] == f"case {first + _CASES_OF_A_CHILD - 1}"
    assert [line for line in lines if line not in set(begun)] == []
