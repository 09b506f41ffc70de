"""Trainers of Hugging Face Transformers, in an environment that has it: a minute, most of it installing and importing.

By hand also with another version: `pip install transformers==…`, then `pytest tests/compat/transformers_cases.py`; with
`USE_TF=0` in the environment for versions before 5, which refuse Keras 3.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.compat.launchers import environment_of_ranks, make_environment, run
from tests.repository import REPOSITORY


def test_a_trainer_reads_each_row_once_until_a_checkpoint_and_after_it(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "python", "transformers>=5.24,<6") / "bin" / "python"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/compat/transformers_cases.py"]
    status, output = run(command, REPOSITORY, environment_of_ranks(tmp_path))

    assert status == 0, output[-5000:]
    found = re.search(r"^(\d+) passed", output, re.MULTILINE)
    assert found is not None
    assert int(found[1]) > 30
