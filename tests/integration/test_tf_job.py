"""The Keras job runs as a Python program and under spark-submit, learns, warns of nothing, and leaves no cache."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.integration.test_jobs import JOB as TORCH_JOB
from tests.integration.test_jobs import ROOT, SPARK_SUBMIT, assert_nothing_is_cached, run, write_flights

JOB = ROOT / "spark_jobs" / "train_flights_tf.py"
LAUNCHERS = {"python": [sys.executable, JOB], "spark-submit": [SPARK_SUBMIT, "--master", "local[*]", JOB]}
EPOCHS = 2


@pytest.fixture(scope="module")
def every_sixth_flight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_flights(tmp_path_factory.mktemp("flights"), every=6)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_job_learns_and_leaves_nothing(launcher: str, tmp_path: Path, every_sixth_flight: Path) -> None:
    options = ["--epochs", str(EPOCHS), "--batch-size", "512", "--data-dir", every_sixth_flight]
    done = run([*LAUNCHERS[launcher], *options, "--cache-dir", tmp_path / "cache"], tmp_path)
    result = done.result()
    assert result["job"] == "train_flights_tf"
    assert result["epochs"] == len(result["train_losses"]) == len(result["held_out_losses"]) == EPOCHS
    assert len(result["epoch_seconds"]) == EPOCHS
    assert 50_000 < result["rows"] < 56_130
    # A model that ignores its inputs gets to the baseline; the departure's delay alone explains most of the arrival's.
    assert 0 < result["held_out_losses"][-1] < result["baseline_loss"] / 2
    assert 0 < result["train_losses"][-1] < result["baseline_loss"] / 2
    assert result["train_rows_per_second"] > 0
    assert result["load_rows_per_second"] > 0
    assert not re.findall(r"^.*\b\w+Warning: .*$", done.output, re.MULTILINE)
    assert_nothing_is_cached(tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_help_says_what_the_job_does_and_how_to_submit_it(tmp_path: Path) -> None:
    done = run([sys.executable, JOB, "--help"], tmp_path)
    assert done.status == 0, done.output
    assert "Train a Keras model on the flights that left New York in 2013" in done.stdout
    assert "spark-submit --master spark://host:7077 spark_jobs/train_flights_tf.py" in done.stdout


@pytest.mark.parametrize("name", ["NUMBERS", "CATEGORIES", "LABEL", "FLIGHT", "parse", "unpack_flights", "prepare"])
def test_the_rows_are_those_of_the_torch_job(name: str) -> None:
    assert definition(JOB, name) == definition(TORCH_JOB, name)


def definition(program: Path, name: str) -> str:
    """The text of what a program defines under a name."""
    text = program.read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        is_named = (isinstance(node, ast.FunctionDef) and node.name == name) or (
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
        )
        if is_named:
            return str(ast.get_source_segment(text, node))
    raise AssertionError(f"{program.name} does not define {name}")
