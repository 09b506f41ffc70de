"""Files with one thing wrong, over which readers of Parquet once fell: their rows, or an error that names the file."""

from __future__ import annotations

import subprocess
import sys

from tests.faults import bad_parquet
from tests.repository import REPOSITORY


def test_a_file_with_one_thing_wrong_is_refused_or_read_rightly() -> None:
    """A child runs the cases, because a file that ends it would end the tests as well."""
    command = [sys.executable, "-m", bad_parquet.__name__]
    child = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=250, check=False)
    lines = child.stdout.splitlines()
    begun = [line for line in lines if line.startswith("case ")]
    assert child.returncode == 0, f"{begun[-1:]} ended the process: {child.stderr[-2000:]}"
    (refused,) = [line for line in lines if line.startswith("refused ")]
    assert len(begun) > 900
    assert int(refused.split()[1]) > 700
    assert [line for line in lines if line != refused and line not in set(begun)] == []
