"""What is known against the code and its dependencies: bandit, pip-audit, and the licence of each dependency.

    python -m tests.release.audit            # prints the report, and exits 1 if there is a finding
    python -m tests.release.audit --write    # writes tests/release/AUDIT.md too

bandit and pip-audit run in an environment of their own, in a temporary folder that is used again. The dependencies are
those of the environment that runs this: all that `pip install 'spark-tensor-converter[all]'` asks for there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("AUDIT.md")
NAME = "spark-tensor-converter"
TOOLS = ("bandit[toml]>=1.8", "pip-audit>=2.9")

FREE = re.compile(
    r"(apache|asl|mit|bsd|isc|psf|python software|zlib|unlicense|0bsd|hpnd|cc0|public domain|boost|bsl)", re.IGNORECASE
)
"""Licences that ask for no more than a notice."""

REVIEWED = {
    "certifi": "MPL-2.0 holds for its own files, which are installed as they are.",
    "tqdm": "MPL-2.0 holds for its own files, which are installed as they are; the rest is MIT.",
    "pathspec": "MPL-2.0 holds for its own files, which are installed as they are.",
    "orjson": "MPL-2.0 holds for its own files, which are installed as they are; the rest is MIT or Apache-2.0.",
    "nvidia-*": "NVIDIA's terms; PyTorch asks for it where it has CUDA, and pip fetches it from NVIDIA's own project.",
    "cuda-toolkit": "Names the packages of NVIDIA that PyTorch asks for, and has no files of its own.",
    "hdfs-native": "Its metadata names none; its source is under Apache-2.0.",
    "namex": "Its metadata names none; its source is under Apache-2.0. Keras asks for it.",
}
"""Dependencies with another licence, and why they may be asked for; a name may end with `*`."""

STANDS_FOR = {"tensorflow": ("tensorflow", "tensorflow-cpu")}
"""What may be installed in the place of a dependency."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found."""

    licences: dict[str, tuple[str, str]]
    """The version and the licence of each dependency."""

    missing: list[str]
    """Dependencies that are not installed here."""

    findings: list[str] = field(default_factory=list)
    """What must be looked at."""

    notes: list[str] = field(default_factory=list)
    """What was looked at, and what could not be."""


def dependencies(name: str, extras: Iterable[str]) -> tuple[dict[str, Distribution], list[str]]:
    """All that a package with these extras asks for here, and the names of what is not installed."""
    installed: dict[str, Distribution] = {}
    missing: set[str] = set()
    seen: set[tuple[str, str]] = set()
    wanted = [(name, extra) for extra in ("", *extras)]
    while wanted:
        package, extra = wanted.pop()
        if (package, extra) in seen:
            continue
        seen.add((package, extra))
        found = _installed(package)
        if found is None:
            missing.add(package)
            continue
        installed[package] = found
        for line in found.requires or []:
            requirement = Requirement(line)
            environment = {**default_environment(), "extra": extra}
            if requirement.marker is None or requirement.marker.evaluate(environment):
                wanted += [(canonicalize_name(requirement.name), each) for each in ("", *requirement.extras)]
    del installed[name]
    return installed, sorted(missing)


def _installed(package: str) -> Distribution | None:
    for name in STANDS_FOR.get(package, (package,)):
        try:
            return distribution(name)
        except PackageNotFoundError:
            continue
    return None


def licence_of(metadata: Mapping[str, str], classifiers: Iterable[str]) -> str:
    """The licence that a package's metadata names: an expression, a classifier, or the first line of a text.

    >>> licence_of({"License-Expression": "MIT"}, [])
    'MIT'
    >>> licence_of({"License": "Copyright someone"}, ["License :: OSI Approved :: Apache Software License"])
    'Apache Software License'
    >>> licence_of({}, [])
    'not named'
    """
    if expression := metadata.get("License-Expression"):
        return expression
    named = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: ")]
    named = [name for name in named if name != "OSI Approved"]
    text = (metadata.get("License") or "").strip().splitlines()
    return ", ".join(named) or (text[0][:60] if text else "not named")


def is_free(licence: str) -> bool:
    """Whether all of a licence asks for no more than a notice.

    >>> is_free("Apache-2.0 OR BSD-3-Clause"), is_free("MPL-2.0 AND MIT"), is_free("not named")
    (True, False, False)
    """
    parts = re.split(r"\bAND\b|, |;", licence)
    return all(any(FREE.search(choice) for choice in re.split(r"\bOR\b|/", part)) for part in parts)


def review_of(name: str) -> str:
    """Why a dependency with another licence may be asked for; empty if nobody has said so.

    >>> review_of("nvidia-nccl-cu13")[:14], review_of("numpy")
    ("NVIDIA's terms", '')
    """
    return next((reason for pattern, reason in REVIEWED.items() if fnmatch(name, pattern)), "")


def audit(extras: Iterable[str] = ("all",)) -> Audit:
    """Everything: the licences, bandit and pip-audit."""
    found, missing = dependencies(NAME, extras)
    licences = {
        name: (each.version, licence_of(each.metadata, each.metadata.get_all("Classifier") or []))  # type: ignore[arg-type]
        for name, each in sorted(found.items())
    }
    report = Audit(licences, missing)
    for name, (version, licence) in licences.items():
        if not is_free(licence) and not review_of(name):
            report.findings.append(f"licence of {name} {version}: {licence}")
    bin_folder = _tools()
    _run_bandit(bin_folder, report)
    _run_pip_audit(bin_folder, report)
    return report


def _tools() -> Path:
    folder = Path(tempfile.gettempdir()) / "converter-audit"
    if not (folder / "bin" / "pip-audit").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", *TOOLS], check=True)
    return folder / "bin"


def _run_bandit(bin_folder: Path, report: Audit) -> None:
    command = [bin_folder / "bandit", "-q", "-r", "converter", "spark_jobs", "-c", "pyproject.toml", "-f", "json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    report.findings.extend(f"bandit: {error['filename']}: {error['reason']}" for error in said["errors"])
    report.findings.extend(
        f"bandit {each['test_id']} at {each['filename']}:{each['line_number']}: {each['issue_text']}"
        for each in said["results"]
    )
    totals = said["metrics"]["_totals"]
    report.notes.append(
        f"bandit read {totals['loc']:,} lines and has {len(said['results'])} findings; {totals['skipped_tests']} lines "
        f"are marked `# nosec`, and `[tool.bandit]` in pyproject.toml leaves out five tests, each with its reason."
    )


def _run_pip_audit(bin_folder: Path, report: Audit) -> None:
    pinned = "".join(f"{name}=={version.partition('+')[0]}\n" for name, (version, _) in report.licences.items())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "requirements.txt")
        file.write_text(pinned)
        command = [bin_folder / "pip-audit", "-r", file, "--no-deps", "--disable-pip", "-f", "json"]
        command.append("--progress-spinner=off")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        cause = done.stderr.strip().splitlines()[-1:] or ["no answer"]
        report.notes.append(f"pip-audit could not ask the service for vulnerabilities: {cause[0][:200]}")
        return
    answers = json.loads(done.stdout)["dependencies"]
    skipped = [each["name"] for each in answers if "skip_reason" in each]
    asked = [each for each in answers if "skip_reason" not in each]
    report.findings.extend(
        f"pip-audit {vulnerability['id']}: {each['name']} {each['version']}"
        for each in asked
        for vulnerability in each["vulns"]
    )
    report.notes.append(f"pip-audit had an answer for {len(asked)} packages.")
    if skipped:
        report.notes.append(
            f"For {len(skipped)} packages pip-audit had no answer: the index here does not serve the vulnerabilities "
            "of PyPI, so **nothing is known about them**; run this where PyPI can be reached."
        )


def page(report: Audit) -> str:
    """The report as Markdown."""
    lines = ["# Audit", "", "Written by `python -m tests.release.audit --write`.", ""]
    lines += [f"{time.strftime('%Y-%m-%d')}, Python {sys.version.split()[0]}, {sys.platform}.", ""]
    lines += ["## Findings", "", *(f"- {each}" for each in report.findings or ["none"]), ""]
    lines += ["## What was looked at", "", *(f"- {each}" for each in report.notes)]
    if report.missing:
        lines.append(f"- Not installed here, so not looked at: {', '.join(report.missing)}.")
    lines += ["", f"## Licences of {len(report.licences)} dependencies", "", "| package | version | licence | |"]
    lines.append("|---|---|---|---|")
    for name, (version, licence) in report.licences.items():
        lines.append(f"| {name} | {version} | {licence} | {'' if is_free(licence) else review_of(name)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Look, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} too")
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    report = audit()
    text = page(report)
    print(text)
    if options.write:
        PAGE.write_text(text)
    sys.exit(bool(report.findings))


if __name__ == "__main__":
    main()
