"""The audit of a release: licences are judged by their names, and every suppression of a tool has a reason."""

from __future__ import annotations

import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

from tests.release.audit import NAME, PAGE, dependencies, is_free, licence_of, review_of

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("Apache-2.0", True),
        ("Apache-2.0 OR GPL-3.0", True),
        ("Apache-2.0 AND GPL-3.0", False),
        ("BSD License, Apache Software License", True),
        ("GPL-3.0-or-later", False),
        ("not named", False),
        ("MPL-2.0 AND MIT", False),
    ],
)
def test_a_licence_asks_for_a_notice_or_is_looked_at(licence: str, expected: bool) -> None:
    assert is_free(licence) is expected


def test_an_expression_wins_over_a_classifier_and_that_over_a_text() -> None:
    classifiers = ["Programming Language :: Python", "License :: OSI Approved :: MIT License"]
    assert licence_of({"License-Expression": "ISC", "License": "BSD"}, classifiers) == "ISC"
    assert licence_of({"License": "BSD"}, classifiers) == "MIT License"
    assert licence_of({"License": "BSD\nCopyright"}, ["License :: OSI Approved"]) == "BSD"


def test_dependencies_are_those_of_the_extras_and_theirs() -> None:
    core, _ = dependencies(NAME, ())
    assert {"numpy", "pyarrow", "fsspec", "platformdirs"} <= set(core)
    assert "pyspark" not in core
    everything, _ = dependencies(NAME, ("all",))
    assert set(core) | {"pyspark", "py4j", "torch", "aiohttp"} <= set(everything)
    assert NAME not in everything


def test_the_page_names_the_licence_of_each_direct_dependency() -> None:
    """If it does not: python -m tests.release.audit --write."""
    text = PAGE.read_text()
    lines = metadata(NAME).get_all("Requires-Dist") or []
    direct = {re.split(r"[><=!~; \[]", line)[0].lower() for line in lines if "extra ==" not in line}
    assert [name for name in direct if f"| {name} |" not in text] == []
    unfree = [row.split(" | ") for row in text.splitlines() if row.startswith("| ") and " | " in row]
    assert [row[0] for row in unfree[1:] if not is_free(row[2]) and not review_of(row[0].removeprefix("| "))] == []


def test_what_a_tool_must_not_say_has_a_reason_beside_it() -> None:
    for path in [*(REPOSITORY / "converter").rglob("*.py"), *(REPOSITORY / "spark_jobs").glob("*.py")]:
        lines = path.read_text().splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if "# nosec" in line:
                assert before.strip().startswith("#") or re.search(r"# noqa: S\d+ \(.+\)", line), f"{path}: {line}"
    configured = (REPOSITORY / "pyproject.toml").read_text().partition("[tool.bandit]")[2].partition("\n]")[0]
    for line in configured.partition("skips = [")[2].strip().splitlines():
        assert re.search(r'"B\d+",\s+# \w', line), line
