"""What a release promises and says of itself: public names stay, one place has the version, the pages are shipped."""

from __future__ import annotations

import json
import re
from importlib.metadata import metadata
from pathlib import Path

import pytest

import converter
from tests.compat.keep import public_signatures
from tests.compat.kept import RELEASES, Kept

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "converter"
PAGES = ("CHANGELOG.md", "COMPATIBILITY.md", "SECURITY.md")


def read_workflow(name: str) -> str:
    return (REPOSITORY / ".github" / "workflows" / name).read_text()


@pytest.mark.parametrize("release", RELEASES, ids=[each.folder.name for each in RELEASES])
def test_a_public_name_that_was_released_takes_what_it_took(release: Kept) -> None:
    now = public_signatures()
    for name, before in json.loads((release.folder / "names.json").read_text()).items():
        assert name in now, f"{name} is gone"
        found = now[name]
        if before is None or found is None:
            assert before is found
            continue
        positional = [each for each in before if each[0] == "positional"]
        assert found[: len(positional)] == positional, name
        by_name = {each[1]: each for each in found}
        for parameter in before:
            assert by_name.get(parameter[1]) == parameter, f"{name}({parameter[1]})"
        required = {each[1] for each in found if each[2] is None} - {each[1] for each in before}
        assert not required, f"{name} asks for {required}, which older programs do not give"


def test_every_public_name_is_kept() -> None:
    kept = json.loads((RELEASES[-1].folder / "names.json").read_text())
    assert {name for name in converter.__all__ if name != "__version__"} <= set(kept)


def test_the_version_is_in_one_place() -> None:
    (version,) = re.findall(r'^version = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert converter.__version__ == version == metadata("spark-tensor-converter")["Version"]
    code = [path for path in PACKAGE.rglob("*.py") if re.search(rf'= "{re.escape(version)}"', path.read_text())]
    assert code == []


def test_the_changelog_has_this_version_on_top_and_the_older_ones_below() -> None:
    headings = re.findall(
        r"^## (\d+\.\d+\.\d+) \((20\d\d-\d\d-\d\d|not released yet)\)$",
        (PACKAGE / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    versions = [version for version, _ in headings]
    assert versions[0] == converter.__version__
    assert versions[-1] == "0.1.0"
    assert all(date != "not released yet" for _, date in headings[1:])


@pytest.mark.parametrize("name", PAGES)
def test_a_page_links_to_files_that_are_there(name: str) -> None:
    text = (PACKAGE / name).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        local = target.partition("/blob/main/")[2]
        assert (REPOSITORY / local if local else PACKAGE / target).exists(), target
    for path in re.findall(r"`((?:tests|converter)/[\w./-]+)`", text):
        assert (REPOSITORY / path).exists(), path


def test_the_project_names_its_pages() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    for name in PAGES:
        assert f"/blob/main/converter/{name}" in project


def test_the_page_of_promises_names_the_formats_that_are_read() -> None:
    from converter import manifest, state

    text = (PACKAGE / "COMPATIBILITY.md").read_text()
    assert f"(format versions 1 and {manifest.FORMAT_VERSION}, " in text
    assert f"(version {state.STATE_VERSION})" in text


def test_only_the_job_that_publishes_may_ask_for_an_identity_and_no_secret_is_used() -> None:
    text = read_workflow("publish.yml")
    jobs = dict(re.findall(r"^  (\w+):\n((?:    .*\n)+)", text.partition("\njobs:\n")[2], re.MULTILINE))
    assert list(jobs) == ["gate", "build", "publish"]
    assert [name for name, job in jobs.items() if "id-token: write" in job] == ["publish"]
    assert "environment:\n      name: pypi" in jobs["publish"]
    assert "needs: build" in jobs["publish"]
    assert "needs: gate" in jobs["build"]
    assert 'bash .ci/build dist "$GITHUB_REF_NAME"' in jobs["build"]
    assert 'tags: ["v*"]' in text
    assert "workflow_call:" in read_workflow("ci.yml")
    for name in ("publish.yml", "ci.yml"):
        assert not re.search(r"secrets\.|password|write-all|pull_request_target", read_workflow(name))
        assert "\npermissions:\n  contents: read\n" in read_workflow(name)
