"""The first cases of `elastic`; all cases by hand."""

from __future__ import annotations

import itertools

import pytest

from tests.faults.elastic import run_seeds

KILLS = 12


@pytest.mark.timeout(900)
def test_what_killed_trainers_read_is_each_row_as_often_as_without_a_crash(capfd: pytest.CaptureFixture[str]) -> None:
    tables, failures = run_seeds(itertools.count(), lambda done: done["kills"] >= KILLS)

    assert failures == 0, capfd.readouterr().err
    assert tables["all"]["kills"] >= KILLS
    assert tables["all"]["resumes"] >= KILLS // 4
