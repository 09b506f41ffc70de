"""Runs that MLflow tracks, in an environment that has it: two minutes, most of it installing and importing."""

from __future__ import annotations

import re
from pathlib import Path

from tests.compat.launchers import environment_of_ranks, make_environment, run
from tests.repository import REPOSITORY

MLFLOW = ("mlflow-skinny>=3.1,<4", "sqlalchemy", "alembic", "graphene")
"""The extra, and what it takes to keep runs in a database and to serve them."""


def test_a_tracked_run_leads_back_to_its_rows(tmp_path: Path) -> None:
    # Installed as users do, because MLflow finds the package by its entry points.
    python = make_environment(tmp_path / "python", str(REPOSITORY), *MLFLOW) / "bin" / "python"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/compat/mlflow_cases.py"]
    # MLflow is about to give up stores of files, in which many runs still are.
    environment = environment_of_ranks(tmp_path) | {"MLFLOW_ALLOW_FILE_STORE": "true"}
    status, output = run(command, REPOSITORY, environment)

    assert status == 0, output[-5000:]
    found = re.search(r"^(\d+) passed", output, re.MULTILINE)
    assert found is not None
    assert int(found[1]) > 40
