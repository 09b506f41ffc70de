"""Importing the package is cheap, and loads no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import converter


def test_import_loads_no_engine_and_little_else_than_what_the_core_needs() -> None:
    # Seconds depend on the machine; the modules that are loaded do not.
    program = """
import json, sys
import numpy, pyarrow.parquet, pyarrow.compute, fsspec.asyn, platformdirs, importlib.metadata
core = set(sys.modules)
import converter
print(json.dumps([sorted(sys.modules), sorted(set(sys.modules) - core)]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded, added = map(set, json.loads(done.stdout))
    expected = {"converter", "numpy", "fsspec", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in added} <= expected
    assert len({name for name in added if not name.startswith("converter")}) < 40
    assert "pyarrow" in loaded
    assert not loaded & {
        "tensorflow",
        "pyspark",
        "py4j",
        "torch",
        "pandas",
        "tqdm",
        "matplotlib",
        "mlflow",
        "adlfs",
        "aiohttp",
    }


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


def test_the_namespace_shows_what_users_need_and_no_internals() -> None:
    assert dir(converter) == sorted([*converter.__all__, "frameworks", "plot"])
    assert not {"PackageNotFoundError", "version"} & set(vars(converter))
    # Still importable, for tests and readers of the code.
    assert converter.dataset.DatasetConverter is converter.DatasetConverter


@pytest.mark.long("starts IPython")
def test_tab_completion_shows_what_users_need_and_no_internals() -> None:
    program = """
import sys
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import converter")
shown = {}
with provisionalcompleter():
    for shell.Completer.use_jedi in (True, False):
        found = shell.Completer.completions("converter.", len("converter."))
        shown[shell.Completer.use_jedi] = sorted(one.text.lstrip(".") for one in found)
import json
print(json.dumps(list(shown.values())))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    wanted = sorted([*(name for name in converter.__all__ if not name.startswith("_")), "frameworks", "plot"])
    assert json.loads(done.stdout.splitlines()[-1]) == [wanted, wanted]


def test_numbers_are_shuffled_without_pandas(tmp_path: Path) -> None:
    """Its import would take 0.6 s before the first batch."""
    pq.write_table(pa.table({"id": range(100), "x": [0.5] * 100}), tmp_path / "x.parquet")
    code = """
import sys
from converter import make_parquet_converter
with make_parquet_converter(sys.argv[1]).make_batch_reader(shuffle=True) as reader:
    assert sum(len(batch["id"]) for batch in reader) == 100
print("pandas" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
