"""The README is short, its links lead somewhere, its figure is the program's, and its commands are those that run.

Its Python blocks run in tests/integration/test_documented_code.py, the `start_local_spark` one in test_local_spark.py.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
MAX_LINES = 150


def command_under(heading: str) -> str:
    """The one command below a heading."""
    match = re.search(rf"^## {heading}\n.*?^```\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert match is not None
    (command,) = match[1].splitlines()
    return command


def extras_in(command: str) -> set[str]:
    return {name for names in re.findall(r"'[^']*\[([\w,]+)\]'", command) for name in names.split(",")}


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(TEXT.splitlines()) <= MAX_LINES


def test_every_link_leads_to_a_file() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(targets) > 10
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_the_figure_is_what_its_program_draws() -> None:
    spec: Any = importlib.util.spec_from_file_location("figure", ROOT / "notebooks" / "figure.py")
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    assert figure.FIGURE.read_text() == figure.draw()


@pytest.mark.parametrize("heading", ["Run it", "Test it"])
def test_a_command_asks_for_extras_that_exist(heading: str) -> None:
    extras = extras_in(command_under(heading))
    assert extras
    assert extras <= set(metadata("spark-tensor-converter").get_all("Provides-Extra") or [])


def test_the_command_to_run_starts_the_job_that_the_tests_run() -> None:
    from tests.integration import test_jobs

    *_, python, job = shlex.split(command_under("Run it"))
    assert python == ".venv/bin/python"
    assert ROOT / job == test_jobs.JOB


def test_the_gate_runs_the_command_to_test() -> None:
    gate = (ROOT / ".ci" / "run").read_text()
    (extract,) = re.findall(r"^command=\$\((.*)\)$", gate, re.MULTILINE)
    done = subprocess.run(["bash", "-c", extract], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == command_under("Test it")
    assert 'bash -euo pipefail -c "$command"' in gate


def test_no_block_of_commands_is_left_untested() -> None:
    """Beside the two commands there are the wheel's, which test_wheel.py runs, and what the job printed."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fenced if not language]
    known = [command_under("Run it"), command_under("Test it"), "pip wheel", "Predicting the mean"]
    assert len(blocks) == len(known)
    assert all(any(text in block for block in blocks) for text in known)
