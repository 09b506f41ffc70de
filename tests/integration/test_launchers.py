"""Ranks as launchers start them: every row once, after a crash too, and on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.compat.launchers import CASES, LAUNCHERS, Cluster, Launcher, read_notes, start_cluster

# Those that differ most. `python -m tests.compat.launchers` tries all.
TRIED = [LAUNCHERS[number] for number in (0, 2, 4, 6)]


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
