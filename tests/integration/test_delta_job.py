"""The Delta job runs as a Python program and under spark-submit, on a table that the real Delta makes and changes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from converter import DatasetConverter, make_delta_converter
from tests.folders import files_below
from tests.integration.test_jobs import ROOT, SPARK_SUBMIT, Finished, clean_environment, run
from tests.parity.golden_tables import PACKAGE

JOB = ROOT / "spark_jobs" / "train_digits_delta.py"
HELD_OUT, EARLY, ALL = 360, 800, 1437
"""Of 1,797 digits: what is held out, what version 0 has of the others, and how many others there are."""
BLANK = 180


def test_the_job_runs_as_a_python_program_and_leaves_nothing(tmp_path: Path) -> None:
    work, temporary = tmp_path / "work", tmp_path / "tmp"
    work.mkdir()
    temporary.mkdir()
    done = run([sys.executable, JOB], work, clean_environment() | {"TMPDIR": str(temporary)})
    check_result(done)
    assert files_below(tmp_path) == []


def test_the_job_runs_under_spark_submit_and_keeps_a_table_that_has_a_place(tmp_path: Path) -> None:
    submit = [SPARK_SUBMIT, "--master", "local[2]", "--packages", PACKAGE]
    done = run([*submit, JOB, "--table", tmp_path / "digits"], tmp_path)
    last = check_result(done)
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]
    check_table(tmp_path / "digits", fingerprint=last["fingerprint"])


def check_result(done: Finished) -> dict[str, Any]:
    """Version 0 gave the same batches after the changes as before, and the last version better ones: the last run."""
    result = done.result()
    assert result["job"] == "train_digits_delta"
    assert result["operations"] == ["WRITE", "WRITE", "DELETE", "UPDATE"]
    assert result["deletion_vectors"] > 0
    first, again, last = result["runs"]
    assert [one["version"] for one in result["runs"]] == [0, 0, 3]
    assert [one["rows"] for one in result["runs"]] == [HELD_OUT + EARLY] * 2 + [HELD_OUT + ALL - BLANK]
    assert result["version_0_gave_the_same_batches"] is True
    assert (first["fingerprint"], first["batches"]) == (again["fingerprint"], again["batches"])
    assert first["fingerprint"] != last["fingerprint"]
    assert first["batches"] != last["batches"]
    # One third of the labels of version 0 is wrong.
    assert max(first["accuracy"], again["accuracy"]) < 0.9 < last["accuracy"]
    assert not re.findall(r"^.*\b\w+Warning: .*$", done.output, re.MULTILINE)
    return dict(last)


def check_table(table: Path, *, fingerprint: str) -> None:
    """The rows are those that the statements leave, and some of them are left out by deletion vectors."""
    assert [name for name in files_below(table) if name.startswith("deletion_vector_")]
    with make_delta_converter(table) as latest, make_delta_converter(table, version=0) as oldest:
        assert latest.fingerprint == fingerprint
        labels, old_labels = read_labels(latest), read_labels(oldest)
    blank = set(range(3, 1797, 10))
    assert set(labels) == set(range(1797)) - blank
    corrected = {number for number in labels.keys() & old_labels if labels[number] != old_labels[number]}
    assert corrected == {number for number in range(1, 1000, 3) if number % 5} - blank


def read_labels(converter: DatasetConverter) -> dict[int, int]:
    """The label of each digit, by its number; each comes once."""
    with converter.make_batch_reader(batch_size=500, columns=["number", "label"]) as reader:
        batches = list(reader)
    numbers, labels = (np.concatenate([batch[name] for batch in batches]).tolist() for name in ("number", "label"))
    assert len(set(numbers)) == len(numbers)
    return dict(zip(numbers, labels, strict=True))


def test_help_says_what_the_job_does_and_how_to_submit_it(tmp_path: Path) -> None:
    done = run([sys.executable, JOB, "--help"], tmp_path)
    assert done.status == 0, done.output
    assert "Train a PyTorch model on images in a Delta table" in done.stdout
    assert f"spark-submit --packages {PACKAGE} spark_jobs/train_digits_delta.py" in done.stdout
    for option in ("--table", "--epochs", "--batch-size", "--seed"):
        assert option in done.stdout
