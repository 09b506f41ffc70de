"""Importing the package is cheap, and loads no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import converter

PROGRAM = """
import json, sys, time
start = time.process_time()
import converter
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": sorted(name for name in sys.modules if "." not in name)}))
"""


def run_import() -> dict[str, object]:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return json.loads(found.stdout)


def test_import_loads_no_engine() -> None:
    loaded = set(run_import()["modules"])
    assert "pyarrow" in loaded
    assert not loaded & {"pyspark", "py4j", "torch", "tensorflow", "pandas", "tqdm", "matplotlib"}


def test_import_takes_less_than_half_a_second_of_a_processor() -> None:
    seconds = []
    for _ in range(5):
        seconds.append(float(run_import()["seconds"]))
        if seconds[-1] < 0.5:
            return
    pytest.fail(f"import converter took {seconds} seconds of a processor")


def test_the_types_are_for_users_too() -> None:
    assert (Path(converter.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("name", converter.__all__)
def test_every_public_name_exists_and_is_explained(name: str) -> None:
    value = getattr(converter, name)
    if name == "__version__":
        assert isinstance(value, str)
        assert value
        return
    assert value.__doc__
    assert value.__doc__.strip().splitlines()[0].endswith((".", ":", "say"))


def test_the_public_names_are_sorted_and_named_once() -> None:
    assert sorted(set(converter.__all__)) == list(converter.__all__)
