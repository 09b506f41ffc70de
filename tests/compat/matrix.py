#!/usr/bin/env python3
"""Which versions the package works with, tried: an environment for each, and `cases.py` run by its Python.

    python tests/compat/matrix.py                                # all Sparks, 6 to 13 minutes on two cores
    python tests/compat/matrix.py --versions 3.5.9 --python PYTHON
    python tests/compat/matrix.py --reading --pythons 3.10 3.13  # `reading_cases.py`: no Spark, but each framework

`--reading` makes an environment with the newest libraries for each Python, and one with the lowest that pyproject.toml
allows for the first; uv finds the Pythons. One that cannot be had is a column that says so.

Classic Spark and Spark Connect (from 4.0) have a process each, one after the other. Prints Markdown; exits 1 where a
case failed. An environment takes some 800 MB, and is used again the next time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CASES = Path(__file__).with_name("cases.py")
READING_CASES = CASES.with_name("reading_cases.py")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
READERS = ("fsspec", "numpy", "platformdirs", "pyarrow", "pandas", "tqdm", "torch", "tensorflow-cpu", "deltalake")
"""What has a part in reading, and lower bounds in pyproject.toml."""
LIBRARIES = ("numpy", "pyarrow", "fsspec", "pandas", "torch", "tensorflow-cpu", "deltalake")
"""Whose versions the table has."""

VERSIONS = ("3.5.9", "4.0.5", "4.1.4", "4.2.0", "4.3.0")
TIMEOUT_SECONDS = 600.0
# What a user's shell or platform may say about another Spark, another Python or another cache.
_SCRUBBED = (
    "CONVERTER_CACHE_DIR", "JAVA_TOOL_OPTIONS", "PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON", "PYSPARK_SUBMIT_ARGS",
    "PYTHONHOME", "PYTHONPATH", "SPARK_CONF_DIR", "SPARK_HOME", "SPARK_REMOTE", "VIRTUAL_ENV",
)  # fmt: skip

Result = dict[str, Any]


def clean_environment() -> dict[str, str]:
    """This process's environment, without what would reach into another one's."""
    return {name: value for name, value in os.environ.items() if name not in _SCRUBBED}


def make_environment(python: str, version: str, envs: Path) -> Path:
    """The Python of an environment with this Spark and the package as it stands in the checkout now."""
    code = "import sys; print('{}.{}'.format(*sys.version_info))"
    known = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=clean_environment())
    folder = envs / f"spark-{version}-python{known.stdout.strip()}"
    own = folder / "bin" / "python"
    if not own.exists():
        install([python, "-m", "venv", str(folder)])
    pip = [str(own), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    spark = "pyspark[connect]" if has_connect(version) else "pyspark"
    # Both at once, so that pip sees all bounds; the package a second time, because its version says nothing about its
    # files.
    install([*pip, f"{spark}=={version}", f"{REPOSITORY}[spark]"])
    install([*pip, "--force-reinstall", "--no-deps", str(REPOSITORY)])
    return own


def has_connect(version: str) -> bool:
    """Whether a Connect server is part of this pyspark."""
    return int(version.partition(".")[0]) >= 4


def install(command: list[str]) -> None:
    """Run a command that must succeed; its error's last line is what it says."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environment())
    if done.returncode:
        raise RuntimeError(last_line(done.stderr) or f"{command[0]} ended with {done.returncode}")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def lowest_of(name: str) -> str:
    """A requirement of the lowest version of a library that pyproject.toml allows."""
    (bound, *_) = re.findall(rf'"{name}>=([\d.]+)', (REPOSITORY / "pyproject.toml").read_text())
    return f"{name}=={bound}"


def make_reading_environment(version: str, envs: Path, *, is_lowest: bool) -> Path:
    """The Python of an environment with the frameworks and the package, without Spark."""
    uv = str(Path(sys.executable).with_name("uv"))
    folder = envs / f"reading-{version}-{'lowest' if is_lowest else 'newest'}"
    own = folder / "bin" / "python"
    if not own.exists():
        install([uv, "venv", "--quiet", "--python", version, str(folder)])
    pip = [uv, "pip", "install", "--quiet", "--python", str(own)]
    # pandas as the extras bound it.
    libraries = ["pandas>=2.2,<3" if name == "pandas" and not is_lowest else name for name in READERS]
    install([*pip, *(map(lowest_of, READERS) if is_lowest else libraries), str(REPOSITORY)])
    install([*pip, "--reinstall-package", "spark-tensor-converter", "--no-deps", str(REPOSITORY)])
    return own


def run_reading(version: str, envs: Path, *, is_lowest: bool) -> list[Result]:
    """All results of one Python with the newest or the lowest libraries."""
    try:
        own = make_reading_environment(version, envs, is_lowest=is_lowest)
    except (OSError, RuntimeError) as error:
        return [{"case": "environment", "ok": False, "seconds": 0.0, "detail": str(error)}]
    return run_program([str(own), str(READING_CASES)], own, envs / f"{own.parts[-3]}.log", "reading")


def run_cases(python: Path, session: str, log: Path) -> list[Result]:
    """What the cases with Spark said."""
    return run_program([str(python), str(CASES), "--session", session], python, log, session)


def run_program(command: list[str], python: Path, log: Path, session: str) -> list[Result]:
    """What the cases said; that the process did not start, finish or end well is a failed case of its own."""
    environment = clean_environment() | {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, log.open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment | {"TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
            problem = f"ended with {process.returncode}: {last_line(log.read_text())}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"did not end within {TIMEOUT_SECONDS:.0f} seconds"
        finally:
            # Its JVM too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.returncode is None:
                output, _ = process.communicate()
    # Where it ran says nothing to who reads the table.
    lines = output.replace(folder, "…").splitlines()
    results = [json.loads(line) for line in lines if line.startswith('{"case"')]
    if problem and all(result["ok"] for result in results):
        seconds = round(time.perf_counter() - begin, 2)
        results.append({"case": f"{session}: process", "ok": False, "seconds": seconds, "detail": problem})
    return results


def run_version(python: str, version: str, envs: Path) -> list[Result]:
    """All results of one Spark version."""
    try:
        own = make_environment(python, version, envs)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return [{"case": "environment", "ok": False, "seconds": 0.0, "detail": str(error)}]
    sessions = ["classic", "connect"] if has_connect(version) else ["classic"]
    return [
        result for session in sessions for result in run_cases(own, session, envs / f"{own.parts[-3]}-{session}.log")
    ]


def markdown(results: Mapping[str, list[Result]], heading: str, about: tuple[str, ...]) -> str:
    """A row for each case, a column for each version: its seconds, or that it failed, and below why.

    `about` names what the first case says the version of.
    """
    names = list({one["case"]: None for of in results.values() for one in of})
    # Connect's cases last: the first version may have none.
    names.sort(key=lambda name: name.startswith("connect"))
    rows = [[heading, *results], ["---"] * (len(results) + 1)]
    for what in about:
        said = [re.search(rf"{what} ([^ ,]+)", of[0]["detail"]) for of in results.values()]
        rows.append([what, *("–" if found is None else found[1] for found in said)])
    for name in names:
        found = [next((one for one in of if one["case"] == name), None) for of in results.values()]
        cells = ["–" if one is None else f"{one['seconds']:.1f} s" if one["ok"] else "**failed**" for one in found]
        rows.append([name, *cells])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    failures = [
        f"- {version}, {one['case']}: {one['detail']}" for version, of in results.items() for one in of if not one["ok"]
    ]
    return "\n\n".join([table, "\n".join(failures)]) if failures else table


def main() -> None:
    """Run all versions and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", nargs="+", default=VERSIONS, help="versions of Spark (default: %(default)s)")
    parser.add_argument("--python", default=sys.executable, help="what makes the environments (default: this Python)")
    parser.add_argument(
        "--envs",
        type=Path,
        default=Path(tempfile.gettempdir()) / "converter-compat",
        help="where the environments are kept (default: %(default)s)",
    )
    parser.add_argument("--reading", action="store_true", help="try what reads, in place of Spark's versions")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help="Pythons to read with (default: %(default)s)")
    options = parser.parse_args()
    envs = options.envs.resolve()
    envs.mkdir(parents=True, exist_ok=True)
    results = {}
    if options.reading:
        columns = [(options.pythons[0], True), *((version, False) for version in options.pythons)]
        trials = {
            f"{version}, {'lowest' if is_lowest else 'newest'}": partial(
                run_reading, version, envs, is_lowest=is_lowest
            )
            for version, is_lowest in columns
        }
        heading, about = "Reading with", ("Python", *LIBRARIES)
    else:
        trials = {version: partial(run_version, options.python, version, envs) for version in options.versions}
        heading, about = "Spark", ("Python", "pyarrow", "Java")
    for name, trial in trials.items():
        results[name] = trial()
        num_failed = sum(not one["ok"] for one in results[name])
        print(f"{heading} {name}: {len(results[name])} cases, {num_failed} failed", file=sys.stderr, flush=True)
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores\n\n{markdown(results, heading, about)}")
    sys.exit(any(not one["ok"] for of in results.values() for one in of))


if __name__ == "__main__":
    main()
