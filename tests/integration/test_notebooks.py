"""Every notebook runs from a clean start in a kernel of its own, shows what it claims, and leaves nothing behind."""

from __future__ import annotations

import ast
import base64
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

import converter
from converter.sources.spark.local import find_java_home
from tests.known_rows import files_below, only_connect_server, run_python
from tests.servers.azurite import SecureAzurite, start_secure_azurite

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
DIGITS = ["01_digits_in_torch", "02_digits_in_keras"]
SYNAPSE = "03_synapse_and_fabric"
DATABRICKS = "04_databricks"
PLATFORMS = [SYNAPSE, DATABRICKS]
DELTA = "05_images_in_delta"
MOST_CELLS = 12
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
CLOUD = "cloud"
"""The tag of cells that need a platform."""

IN_ACCOUNT = "abfss:"
"""What begins the names of files that are in a storage account, where others are on a volume."""

STAND_IN_TOKENS = '''
"""Tokens of the form that Entra ID gives, and a file that says who asked for them."""

import base64
import json
import os
import time


def _part(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def give(*asked_by):
    with open(os.environ["STAND_IN_ASKED"], "a") as asked:
        asked.write(json.dumps([os.getpid(), *asked_by]) + "\\n")
    now = int(time.time())
    claims = {"aud": "https://storage.azure.com", "iss": "https://sts.windows.net/tests/"}
    claims |= {"iat": now, "nbf": now - 5, "exp": now + 3600}
    return ".".join([_part({"alg": "none"}), _part(claims), "signed-by-nobody"]), now + 3600
'''

NOTEBOOKUTILS = '''
"""Stands in for the module of Synapse and Fabric: its names."""

import os

from stand_in_tokens import give


class credentials:
    def getToken(audience):
        assert audience == "storage"
        return give()[0]

    def getConnectionStringOrCreds(linkedService):
        assert linkedService == "lake"
        return os.environ["STAND_IN_SAS"]
'''

DATABRICKS_RUNTIME = '''
"""Stands in for what Databricks has in the notebook's process: it cannot be used or sent elsewhere."""

from itertools import count

from azure.core.credentials import AccessToken
from pyspark import TaskContext
from stand_in_tokens import give


class _Bound:
    def __reduce__(self):
        raise TypeError("You cannot use dbutils within a spark job or otherwise pickle it.")


class _Provider(_Bound):
    numbers = count(1)

    def __init__(self, name):
        self.name, self.number = name, next(self.numbers)

    def get_token(self, *scopes, **_):
        assert scopes == ("https://storage.azure.com/.default",)
        return AccessToken(*give("notebook", self.name, self.number))


class _Credentials(_Bound):
    def getServiceCredentialsProvider(self, name):
        assert TaskContext.get() is None
        return _Provider(name)


class _Utilities(_Bound):
    credentials = _Credentials()


dbutils = _Utilities()
'''

DATABRICKS_SERVICE_CREDENTIALS = '''
"""Stands in for what Databricks has on executors, and nowhere else."""

from azure.core.credentials import AccessToken
from pyspark import TaskContext
from stand_in_tokens import give


class _Provider:
    def __init__(self, name):
        self.name = name

    def get_token(self, *scopes, **_):
        assert scopes == ("https://storage.azure.com/.default",)
        return AccessToken(*give("executor", self.name))


def getServiceCredentialsProvider(name):
    assert TaskContext.get() is not None
    return _Provider(name)
'''

CONNECT = """
from pyspark.sql import SparkSession

builder = SparkSession.builder.remote("local[2]")
builder.config("spark.sql.execution.arrow.pythonUDF.columnarInput.enabled", "false").getOrCreate()
"""

DBUTILS = """
# Databricks' notebooks have the name without an import.
from databricks.sdk.runtime import dbutils
"""

KILLED_WHILE_SAVING = """
import os
import signal

import torch


def _dying(save, most):
    def saved(*arguments):
        nonlocal most
        most -= 1
        if most < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        save(*arguments)

    return saved


torch.save = _dying(torch.save, most=2)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Where a notebook runs: what we put in the place of what only a platform has."""

    files: Callable[[], list[str]]
    """What stands where the cache goes, or the notebook's own table."""

    data_requests: Callable[[], int] = lambda: 0
    """How many requests for rows the store has answered."""

    environment: Mapping[str, str] = field(default_factory=dict)

    replaced: Mapping[str, str] = field(default_factory=dict)
    """Texts of the cloud cells that stand for something of the user's, and what they are here."""

    before: str = ""
    """A cell that runs first."""

    after_cloud: str = ""
    """A cell that runs after the last cloud cell."""

    killed_by: str = ""
    """A cell in front of a first run that this kills; the notebook is then run again."""

    def cells(self, content: Any, first: str = "") -> list[Any]:
        """The notebook's cells without the installation, among ours."""
        cells = [cell for cell in content.cells if not is_installation(cell)]
        for cell in cells:
            for text, here in self.replaced.items() if is_cloud(cell) else ():
                assert text in cell.source
                cell.source = cell.source.replace(text, here)
        if self.after_cloud:
            last = max(index for index, cell in enumerate(cells) if is_cloud(cell))
            cells.insert(last + 1, nbformat.v4.new_code_cell(self.after_cloud))
        return [nbformat.v4.new_code_cell(source) for source in (self.before, first) if source] + cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a notebook showed, and what it left."""

    outputs: list[Any]
    folder: Path
    cache_dir: Path
    temporary: Path
    workspace: Workspace
    files_after: dict[str, list[str]]
    """What stood there when a cell, by its id, was done."""

    requests_after: dict[str, int]
    """How many requests for rows there were by then."""

    files_when_killed: list[str]

    def text(self, stream: str) -> str:
        return "".join(output.text for output in self.outputs if output.get("name") == stream)

    def shown(self) -> str:
        return "".join(str(output.data) for output in self.outputs if output.output_type == "execute_result")

    def pictures(self) -> list[bytes]:
        shown = [output.data for output in self.outputs if "data" in output]
        return [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]


def is_cloud(cell: Any) -> bool:
    return CLOUD in cell.metadata.get("tags", ())


def is_installation(cell: Any) -> bool:
    return is_cloud(cell) and "%pip install" in cell.source


def python_of(cell: Any) -> str:
    """A cell's code with its magics as the calls that they are."""
    return TransformerManager().transform_cell(cell.source)


# Where they run ----------------------------------------------------------------------


@contextlib.contextmanager
def on_this_machine(folder: Path) -> Iterator[Workspace]:
    yield Workspace(files=lambda: files_below(folder / "cache"))


@contextlib.contextmanager
def with_an_account(folder: Path, modules: Mapping[str, str]) -> Iterator[tuple[SecureAzurite, str, dict[str, str]]]:
    """Blobs over TLS that take tokens, a container, and an environment where a platform's modules give them."""
    with start_secure_azurite(folder / "azurite") as account:
        platform = folder / "platform"
        for name, source in {"stand_in_tokens": STAND_IN_TOKENS, **modules}.items():
            path = platform / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(platform), os.environ.get("PYTHONPATH")])),
            "SSL_CERT_FILE": str(account.certificate),
            "STAND_IN_ASKED": str(platform / "asked"),
        }
        yield account, account.new_container(), environment


@contextlib.contextmanager
def as_on_databricks(folder: Path) -> Iterator[Workspace]:
    """Spark Connect, blobs over TLS, and a folder for the volume: what a volume's mount does otherwise is not seen."""
    volume = folder / "cache"
    volume.mkdir()
    modules = {
        "databricks.sdk.runtime": DATABRICKS_RUNTIME,
        "databricks.service_credentials": DATABRICKS_SERVICE_CREDENTIALS,
    }
    with only_connect_server(), with_an_account(folder, modules) as (account, container, environment):
        yield Workspace(
            files=lambda: [*files_below(volume), *(f"{IN_ACCOUNT}{name}" for name in account.files(container))],
            data_requests=account.data_requests,
            environment={
                **environment,
                "SPARK_LOCAL_IP": "127.0.0.1",
                "JAVA_HOME": str(find_java_home()),
                "PYSPARK_PYTHON": sys.executable,
            },
            before=CONNECT + DBUTILS,
            replaced={
                "/Volumes/main/default/volume": str(volume),
                "container@account.": f"{container}@{account.account}.",
            },
            # The emulator has all accounts on one host.
            after_cloud=f"to_read['account_host'] = to_write['account_host'] = '{account.host}'",
            killed_by=KILLED_WHILE_SAVING,
        )


@contextlib.contextmanager
def as_in_synapse(folder: Path) -> Iterator[Workspace]:
    """Classic Spark, a module that gives tokens, and blobs over TLS that take them."""
    with with_an_account(folder, {"notebookutils": NOTEBOOKUTILS}) as (account, container, environment):
        yield Workspace(
            files=lambda: account.files(container),
            data_requests=account.data_requests,
            environment={**environment, "STAND_IN_SAS": account.sas(container)},
            before="from converter import start_local_spark\n\nstart_local_spark('synapse', master='local[2]')",
            replaced={"container@account.": f"{container}@{account.account}."},
            # The emulator has all accounts on one host.
            after_cloud=f"storage_options['account_host'] = '{account.host}'",
        )


@contextlib.contextmanager
def beside_a_table(folder: Path) -> Iterator[Workspace]:
    """The notebook makes a table of its own among temporary files, and no cache."""
    yield Workspace(files=lambda: files_below(folder / "tmp"))


WORKSPACES = {SYNAPSE: as_in_synapse, DATABRICKS: as_on_databricks, DELTA: beside_a_table}


# Running -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def run(notebook: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The notebook after one execution from top to bottom; a cell that raises fails here."""
    folder = tmp_path_factory.mktemp(notebook.stem)
    jupyter, work, cache_dir, temporary = (folder / name for name in ("jupyter", "work", "cache", "tmp"))
    write_kernel_spec(jupyter / "kernels" / "python3")
    work.mkdir()
    temporary.mkdir()
    files_after, requests_after, files_when_killed = {}, {}, []

    def execute(first: str = "") -> list[Any]:
        content = nbformat.read(notebook, as_version=4)
        own = {cell.id for cell in content.cells}
        content.cells = workspace.cells(content, first)

        def look(cell: Any, cell_index: int, execute_reply: Any) -> None:
            files_after[cell.id], requests_after[cell.id] = workspace.files(), workspace.data_requests()

        client = NotebookClient(content, kernel_name="python3", timeout=240, resources={"metadata": {"path": work}})
        client.on_cell_executed = look
        client.execute()
        return [output for cell in content.cells if cell.id in own for output in cell.get("outputs", [])]

    with WORKSPACES.get(notebook.stem, on_this_machine)(folder) as workspace:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("SPARK", "PYSPARK", "PYTHONWARNINGS"))]:
                patch.delenv(name)
            patch.setenv("JUPYTER_DATA_DIR", str(jupyter))
            patch.setenv("IPYTHONDIR", str(folder / "ipython"))
            patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
            patch.setenv("CONVERTER_CACHE_DIR", str(cache_dir))
            patch.setenv("TMPDIR", str(temporary))
            for name, value in workspace.environment.items():
                patch.setenv(name, value)
            if workspace.killed_by:
                with pytest.raises(DeadKernelError):
                    execute(workspace.killed_by)
                files_when_killed = workspace.files()
            outputs = execute()
        yield Run(
            outputs=outputs,
            folder=work,
            cache_dir=cache_dir,
            temporary=temporary,
            workspace=workspace,
            files_after=files_after,
            requests_after=requests_after,
            files_when_killed=files_when_killed,
        )


def test_there_are_notebooks() -> None:
    assert {*DIGITS, *WORKSPACES} == {path.stem for path in NOTEBOOKS}


def test_a_notebook_is_short_valid_and_committed_without_outputs(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=nbformat.NO_CONVERT)
    nbformat.validate(content)
    assert content.nbformat == 4
    assert content.metadata.kernelspec.name == "python3"
    assert len(content.cells) <= MOST_CELLS
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert code
    assert [cell.outputs for cell in code] == [[]] * len(code)
    assert [cell.execution_count for cell in code] == [None] * len(code)


def test_a_notebook_imports_public_names_only(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    source = "\n".join(python_of(cell) for cell in content.cells if cell.cell_type == "code")
    ours = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.split(".")[0] == "converter"]
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "converter":
            assert node.module == "converter"
            ours += [alias.name for alias in node.names]
    assert ours
    assert set(ours) <= set(converter.__all__)


def test_a_notebook_draws_pictures(run: Run) -> None:
    pictures = run.pictures()
    assert pictures
    assert all(picture.startswith(PNG_SIGNATURE) for picture in pictures)


def test_a_notebook_shows_no_python_warning(run: Run) -> None:
    # Spark's JVM logs a few lines of its own before its log level is set; Python's warnings are ours to avoid.
    assert not re.findall(r"^.*\b\w+Warning: .*$", run.text("stderr"), re.MULTILINE)


def test_a_notebook_leaves_nothing_in_the_cache_or_beside_it(run: Run) -> None:
    written = {name for files in run.files_after.values() for name in files}
    assert [name for name in written if name.endswith(".parquet")], "the notebook wrote no rows where it was told to"
    assert {name.rpartition("/")[2] for name in run.workspace.files()} <= {".owner"}
    assert [path.name for path in run.folder.iterdir()] == []
    assert list(run.temporary.rglob("converter-*")) == []


def test_a_cloud_cell_says_so(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    cells = [cell for cell in content.cells if cell.cell_type == "code"]
    assert [is_cloud(cell) for cell in cells] == [cell.source.startswith("# Cloud only") for cell in cells]
    assert any(map(is_cloud, cells)) == (notebook.stem in PLATFORMS)
    # Whoever reads the page is told what nobody has tried.
    said = "".join(content.cells[0].source.split("\n"))
    assert ("We have run none of" in said) == (notebook.stem in PLATFORMS)


WATCH_A_JOB = """
from converter.sources.spark import progress
from tests.unit.sources.spark.test_session import PLANNED_LATE, ScriptedTracker
from types import SimpleNamespace

progress._SHOW_SECONDS = 0.001
tracker = ScriptedTracker(*PLANNED_LATE * 10)
session = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker))
with progress.progress_bar(session, False, "job", None):
    assert tracker.is_over.wait(60)
"""


def test_a_write_is_followed_in_one_output_of_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without ipywidgets tqdm warns, and leaves an output for each change.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    write_kernel_spec(str(tmp_path / "kernels" / "python3"))
    content = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(WATCH_A_JOB)])
    NotebookClient(content, timeout=120, kernel_name="python3").execute()
    (shown,) = content.cells[0].outputs
    assert shown.output_type == "display_data"
    assert re.fullmatch(r"Wrote the cache \[\d\d:\d\d\]", shown.data["text/plain"])


@pytest.mark.parametrize("notebook", [path for path in NOTEBOOKS if path.stem in DIGITS], indirect=True, ids=str)
class TestDigits:
    def test_the_network_recognises_held_out_digits(self, run: Run) -> None:
        found = re.search(r"^accuracy on (\d+) held-out digits: ([\d.]+)$", run.text("stdout"), re.MULTILINE)
        assert found
        assert int(found[1]) > 300
        assert float(found[2]) > 0.9

    def test_the_grid_of_digits_and_the_result_are_drawn(self, run: Run) -> None:
        assert len(run.pictures()) == 2

    def test_the_converter_shows_its_rows_and_its_image_column(self, run: Run) -> None:
        assert "DatasetConverter(1,437 rows × 3 columns" in run.shown()
        assert "(8, 8)" in run.shown()

    def test_the_folders_are_seen_to_go(self, run: Run) -> None:
        assert "before: [True, True]\nafter:  [False, False]\n" in run.text("stdout")


def cells_of(name: str) -> list[Any]:
    (path,) = [path for path in NOTEBOOKS if path.stem == name]
    return list(nbformat.read(path, as_version=4).cells)


@pytest.mark.parametrize("name", PLATFORMS)
def test_what_is_installed_is_this_package(name: str) -> None:
    (cell,) = [cell for cell in cells_of(name) if is_installation(cell)]
    found = re.search(r"/(\w+)-([\w.]+)-py3-none-any\.whl\[([\w,]+)\]\"", cell.source)
    assert found
    package = metadata("spark-tensor-converter")
    assert found[1] == package["Name"].replace("-", "_")
    assert found[2] == package["Version"]
    assert set(found[3].split(",")) <= set(package.get_all("Provides-Extra"))


def cell_with(name: str, text: str) -> str:
    (cell,) = [cell for cell in cells_of(name) if cell.cell_type == "code" and text in cell.source]
    return str(cell.id)


def asked_for_tokens(run: Run) -> list[list[Any]]:
    """For each token that a stand-in gave the process that asked, and what else the stand-in noted."""
    lines = Path(run.workspace.environment["STAND_IN_ASKED"]).read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("notebook", [path for path in NOTEBOOKS if path.stem == SYNAPSE], indirect=True, ids=str)
class TestSynapse:
    def test_the_rows_are_in_the_storage_account_and_nowhere_else(self, run: Run) -> None:
        assert "DatasetConverter(100,000 rows × 3 columns" in run.shown()
        written = run.files_after[cell_with(SYNAPSE, "make_spark_converter(")]
        assert all(name.startswith("cache/converter-v1/") for name in written)
        assert any(name.endswith("/manifest.json") for name in written)
        assert not run.cache_dir.exists()

    def test_each_epoch_reads_every_row_and_the_network_learns(self, run: Run) -> None:
        epochs = re.findall(r"^epoch (\d): ([\d,]+) rows, loss ([\d.]+)$", run.text("stdout"), re.MULTILINE)
        assert [(epoch, rows) for epoch, rows, _ in epochs] == [("1", "100,000"), ("2", "100,000")]
        # The noise alone has 0.01.
        assert float(epochs[1][2]) < 0.05

    def test_the_second_epoch_asks_the_store_for_nothing(self, run: Run) -> None:
        cells = [cell.id for cell in cells_of(SYNAPSE) if cell.id in run.requests_after]
        first, second = cell_with(SYNAPSE, "train(0)"), cell_with(SYNAPSE, "train(1)")
        before = cells[cells.index(first) - 1]
        assert run.requests_after[first] > run.requests_after[before]
        assert run.requests_after[second] == run.requests_after[first]

    def test_the_function_is_asked_for_tokens_here_and_on_executors(self, run: Run) -> None:
        assert len({process for process, *_ in asked_for_tokens(run)}) >= 2

    def test_no_token_is_shown(self, run: Run) -> None:
        assert "signed-by-nobody" not in str(run.outputs)

    def test_what_is_removed_is_counted(self, run: Run) -> None:
        said = run.text("stdout")
        assert re.search(r"^removed from this machine: [1-9]\d* files$", said, re.MULTILINE)
        assert "left over in the storage account after delete(): 0 files\n" in said

    def test_a_linked_service_gives_its_sas(self, run: Run) -> None:
        workspace = run.workspace
        (cell,) = [cell for cell in cells_of(SYNAPSE) if is_cloud(cell) and not is_installation(cell)]
        source = cell.source
        for text, here in {"linked_service = None": "linked_service = 'lake'", **workspace.replaced}.items():
            assert text in source
            source = source.replace(text, here)
        environment = dict(workspace.environment)
        found = run_python(convert_as_told_by, f"{source}\n{workspace.after_cloud}", environment=environment)
        assert found == [["account_host", "sas_token"], 1000, 999 * 1000 // 2]
        assert {name.rpartition("/")[2] for name in workspace.files()} == {".owner"}


def convert_as_told_by(source: str) -> list[Any]:
    """What a cell's `storage_options` are, and the rows and their sum that a converter with them holds."""
    spark = converter.start_local_spark("cell", master="local[2]")
    said: dict[str, Any] = {}
    exec(source, said)
    options = said["storage_options"]
    with converter.make_spark_converter(
        spark.range(1000), cache_dir=said["cache_dir"], storage_options=options
    ) as made:
        with made.make_batch_reader(batch_size=100) as reader:
            total = sum(int(batch["id"].sum()) for batch in reader)
        found = [sorted(options), len(made), total]
    spark.stop()
    return found


@pytest.mark.parametrize("notebook", [path for path in NOTEBOOKS if path.stem == DATABRICKS], indirect=True, ids=str)
class TestDatabricks:
    def test_spark_is_reached_over_connect(self, run: Run) -> None:
        assert re.search(r"^Spark [\d.]+, Connect$", run.text("stdout"), re.MULTILINE)

    def test_the_second_run_reads_what_the_first_one_wrote(self, run: Run) -> None:
        assert "DatasetConverter(100,000 rows × 3 columns" in run.shown()
        kept = [name for name in run.files_when_killed if name.endswith((".parquet", "manifest.json"))]
        assert len(kept) >= 2
        again = run.files_after[cell_with(DATABRICKS, "cache_key=")]
        assert [name for name in again if name.endswith((".parquet", "manifest.json"))] == kept

    def test_training_goes_on_after_the_last_checkpoint_and_reads_each_row_once(self, run: Run) -> None:
        said = run.text("stdout")
        # Killed while it saved for the third time, after each twentieth batch.
        assert "go on after 40 of 200 batches\n" in said
        assert "100,000 of 100,000 rows were read once\n" in said
        found = re.search(r"^loss of the last 20 batches: ([\d.]+)$", said, re.MULTILINE)
        assert found
        # The noise alone has 0.01.
        assert float(found[1]) < 0.05

    def test_a_sweep_leaves_what_is_used_and_delete_leaves_nothing(self, run: Run) -> None:
        said = run.text("stdout")
        assert "swept while it is in use: 0 entries\n" in said
        assert "left over after delete(): 0 files\n" in said
        assert "left over in the storage account after delete(): 0 files\n" in said

    def test_the_executors_write_into_the_storage_account(self, run: Run) -> None:
        before, after = (
            run.files_after[cell_with(DATABRICKS, text)] for text in ("times_read[batch", "cache_dir=account_dir")
        )
        written = set(after) - set(before)
        assert {name.partition("/")[0] for name in written} == {f"{IN_ACCOUNT}cache"}
        assert any(name.endswith(".parquet") for name in written)
        assert any(name.endswith("/manifest.json") for name in written)

    def test_the_rows_that_the_network_learned_are_read_from_there(self, run: Run) -> None:
        before, after = (
            run.requests_after[cell_with(DATABRICKS, text)] for text in ("times_read[batch", "cache_dir=account_dir")
        )
        assert before == 0 < after
        found = re.search(
            r"^loss over 100,000 rows from the storage account: ([\d.]+)$", run.text("stdout"), re.MULTILINE
        )
        assert found
        # The noise alone has 0.01.
        assert float(found[1]) < 0.05

    def test_the_service_credential_is_asked_for_tokens_by_its_name_here_and_on_executors(self, run: Run) -> None:
        asked = asked_for_tokens(run)
        here = [line for line in asked if line[1] == "notebook"]
        executors = [line for line in asked if line[1] == "executor"]
        assert here
        assert executors
        assert {name for _, _, name, *_ in asked} == {"lake"}
        assert len({process for process, *_ in here}) == 1
        assert not {process for process, *_ in here} & {process for process, *_ in executors}
        # The first provider of the notebook is the one that is itself the credential of what reads; the others the
        # function asked for.
        numbers = {number for *_, number in here}
        assert 1 in numbers
        assert numbers - {1}

    def test_no_token_is_shown(self, run: Run) -> None:
        assert "signed-by-nobody" not in str(run.outputs)


@pytest.mark.parametrize("notebook", [path for path in NOTEBOOKS if path.stem == DELTA], indirect=True, ids=str)
class TestDelta:
    def test_only_spark_writes_files(self, run: Run) -> None:
        # There is no cache, neither where it would go nor beside the table, and Delta names each file of the table.
        assert not run.cache_dir.exists()
        made = run.files_after[cell_with(DELTA, "def append(")]
        changed = run.files_after[cell_with(DELTA, "changed.delete(")]
        assert run.files_after[cell_with(DELTA, "before = make_delta_converter(")] == made
        assert run.files_after[cell_with(DELTA, "def train(")] == changed
        assert set(made) < set(changed)
        names = [name.partition("/digits/")[2] for name in changed]
        kinds = r"_delta_log/.*|part=\w+/\.?part-.*\.parquet(\.crc)?|\.?deletion_vector_.*\.bin(\.crc)?"
        assert [name for name in names if not re.fullmatch(kinds, name)] == []
        assert [name for name in names if name.startswith("deletion_vector_")]

    def test_version_0_stays_and_the_latest_version_is_told_apart(self, run: Run) -> None:
        said = run.text("stdout")
        assert "['WRITE', 'WRITE', 'DELETE', 'UPDATE']\n" in said
        pattern = r"^(.+): ([\d,]+) rows, fingerprint (\w{8}), same first batch: (\w+)$"
        before, again, after = re.findall(pattern, said, re.MULTILINE)
        assert before == ("version 0, before", "800", before[2], "True")
        assert again == ("version 0, again", "800", before[2], "True")
        assert after == ("latest version", "1,257", after[2], "False")
        assert after[2] != before[2]
        assert "StateMismatchError: " in said

    def test_the_corrected_labels_make_a_better_network(self, run: Run) -> None:
        found = re.findall(r"^.+: accuracy on 360 held-out digits: ([\d.]+)$", run.text("stdout"), re.MULTILINE)
        assert len(found) == 2
        # One third of the labels of version 0 is wrong.
        assert float(found[0]) < 0.9 < float(found[1])

    def test_a_batch_and_the_accuracies_are_drawn(self, run: Run) -> None:
        assert "DatasetConverter(800 of 1,160 rows × 5 columns" in run.shown()
        assert len(run.pictures()) == 2

    def test_delete_leaves_the_table(self, run: Run) -> None:
        found = re.search(
            r"^files of the table before and after delete\(\): \[(\d+), (\d+)\]$", run.text("stdout"), re.MULTILINE
        )
        assert found
        assert found[1] == found[2] != "0"
        assert run.workspace.files() == []
