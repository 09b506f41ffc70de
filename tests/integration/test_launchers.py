"""Ranks as launchers start them: every row once, after a crash too, and on another number of ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.compat.launchers import (
    CASES,
    LAUNCHERS,
    Cluster,
    Launcher,
    environment_of_ranks,
    read_notes,
    run,
    start_cluster,
    torchrun,
)
from tests.integration.test_jobs import FLIGHTS_THAT_ARRIVED, SPARK_SUBMIT

JOB = Path(__file__).parents[2] / "spark_jobs" / "train_flights_distributed.py"

# Those that differ most. `python -m tests.compat.launchers` tries all.
TRIED = [LAUNCHERS[number] for number in (2, 6, 7)]


@pytest.fixture(scope="module")
def start_cluster_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Cluster]]:
    """A function that returns the cluster, which is started when it is first asked for."""
    clusters: list[Cluster] = []
    with ExitStack() as stack:

        def cluster() -> Cluster:
            if not clusters:
                clusters.append(stack.enter_context(start_cluster(tmp_path_factory.mktemp("cluster"))))
            return clusters[0]

        yield cluster


@pytest.mark.parametrize("launcher", [pytest.param(launcher, id=launcher.name) for launcher in TRIED])
def test_ranks_read_each_row_once_until_a_crash_after_it_and_on_another_number_of_ranks(
    launcher: Launcher, tmp_path: Path, start_cluster_once: Callable[[], Cluster]
) -> None:
    launcher.launch(tmp_path, start_cluster_once)

    notes = read_notes(launcher, tmp_path)
    for check in CASES.values():
        check(notes)


def last_json(output: str) -> dict[str, Any]:
    """The one JSON line that a job prints."""
    (line,) = (line for line in output.splitlines() if line.startswith("{"))
    result: dict[str, Any] = json.loads(line)
    return result


def test_the_job_writes_its_rows_once_and_goes_on_under_another_launcher(
    tmp_path: Path, start_cluster_once: Callable[[], Cluster]
) -> None:
    prepare = [sys.executable, JOB, "--prepare-only", "--cache-dir", tmp_path / "cache"]
    status, output = run(prepare, tmp_path, environment_of_ranks(tmp_path))
    assert status == 0, output[-5000:]
    url = last_json(output)["url"]
    options = ["--url", url, "--checkpoint-dir", str(tmp_path / "checkpoints")]

    (output,) = torchrun(
        [str(JOB), "--launcher", "torchrun", *options, "--epochs", "1"], tmp_path, ranks_per_node=2, max_restarts=1
    )
    first = last_json(output)

    cluster = start_cluster_once()
    command = [SPARK_SUBMIT, "--master", cluster.url, JOB, "--launcher", "spark", *options, "--epochs", "2"]
    status, output = run(command, tmp_path, cluster.environment)
    assert status == 0, output[-5000:]
    second = last_json(output)

    assert (first["world_size"], first["rows"], first["resumed_from"]) == (2, FLIGHTS_THAT_ARRIVED, None)
    assert (second["world_size"], second["resumed_from"], second["epochs"]) == (2, first["steps"], 2)
    assert second["steps"] == 2 * first["steps"]
    assert second["held_out_losses"][0] == first["held_out_losses"][0]
    assert second["held_out_losses"][1] < 0.25 * second["baseline_loss"]
    # Only rank 0 speaks.
    assert output.count("Resumed after step") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--launcher", "torchrun"], "--launcher torchrun needs --url"),
        (["--launcher", "torchrun", "--url", "file:///rows"], "Start this file with torchrun."),
    ],
    ids=["no URL", "no torchrun"],
)
def test_the_job_says_what_torchrun_needs(options: list[str], message: str, tmp_path: Path) -> None:
    status, output = run([sys.executable, JOB, *options], tmp_path, environment_of_ranks(tmp_path))

    assert status == 2
    assert message in output
