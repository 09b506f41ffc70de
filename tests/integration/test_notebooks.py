"""Every notebook runs from a clean start, shows what it claims and what is stored, and leaves nothing behind."""

from __future__ import annotations

import ast
import copy
import json
import re
import socket
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

import converter
from tests.notebooks.runs import Run, run_notebook
from tests.notebooks.stored import PICTURE, Names, as_stored, compared
from tests.notebooks.workspaces import (
    CACHE,
    DATABRICKS,
    DELTA,
    DIGITS,
    IN_ACCOUNT,
    LAUNCHED,
    MIXING,
    MOVING,
    NOTEBOOKS,
    PLATFORMS,
    RANKS,
    SEEN,
    SERIES,
    STORES,
    SYNAPSE,
    TYPES,
    VALUES,
    WORKSPACES,
    is_cloud,
    is_installation,
    python_of,
)
from tests.processes import run_python

pytestmark = pytest.mark.timeout(
    900
)  # The first test of a notebook runs it: some 30 s on a machine without other work.

MOST_CELLS = 16
MOST_PICTURE_BYTES = 60_000
OLD_NAMES = ("converter.petastorm", "converter.deltatorch")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def named(*names: str) -> list[Any]:
    """Notebooks as parameters. The first one shows the whole, from Spark to torch, so it runs in the short lane."""
    marks = {DIGITS[0]: [pytest.mark.short]}
    return [
        pytest.param(path, marks=marks.get(path.stem, ()), id=path.stem) for path in NOTEBOOKS if path.stem in names
    ]


ALL = named(*(path.stem for path in NOTEBOOKS))


@pytest.fixture(scope="module", params=ALL)
def notebook(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def run(notebook: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The notebook after one execution from top to bottom; a cell that raises fails here."""
    with run_notebook(notebook, tmp_path_factory.mktemp(notebook.stem)) as done:
        yield done


@pytest.mark.short
def test_there_are_notebooks() -> None:
    assert {*DIGITS, TYPES, VALUES, SERIES, MIXING, MOVING, LAUNCHED, SEEN, *WORKSPACES} == {
        path.stem for path in NOTEBOOKS
    }


@pytest.mark.short
def test_a_notebook_is_short_and_valid(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=nbformat.NO_CONVERT)
    nbformat.validate(content)
    assert content.nbformat == 4
    assert content.metadata.kernelspec.name == "python3"
    assert len(content.cells) <= MOST_CELLS
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert code
    assert [cell.execution_count for cell in code] == [None] * len(code)


@pytest.mark.short
def test_stored_outputs_tell_nothing_of_a_machine(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs, "run python -m tests.notebooks.stored"
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    texts = [output.get("text", "") for output in outputs]
    texts += [text for output in outputs for kind, text in output.get("data", {}).items() if kind != PICTURE]
    folders = {
        path for text in texts for path in re.findall(r"(?<![\w.>:/])/(?:home|root|tmp|work|Users)\b[^\s,)'<]*", text)
    }
    assert all(path.startswith(("/home/you", "/tmp/tmp…")) for path in folders)
    assert socket.gethostname() not in "".join(texts)


@pytest.mark.short
def test_stored_pictures_are_small(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    sizes = [len(output.data[PICTURE]) * 3 // 4 for output in outputs if PICTURE in output.get("data", {})]
    assert sizes
    assert max(sizes) < MOST_PICTURE_BYTES


def test_the_stored_outputs_are_those_of_a_run(notebook: Path, run: Run) -> None:
    stored = nbformat.read(notebook, as_version=4)
    again = as_stored(copy.deepcopy(stored), run)
    assert compared(stored) == compared(again), f"run python -m tests.notebooks.stored {notebook.stem}"


@pytest.mark.short
def test_what_differs_from_run_to_run_is_not_stored(tmp_path: Path) -> None:
    names = Names([(str(tmp_path / "tmp"), "/tmp"), (str(tmp_path), "/home/you")])
    key, other = "4be31a6f50d27c99", "0123456789abcdef"
    first = names.stable(f"file://{tmp_path}/tmp/tmpab12_x9z/{key} {other} {key[:8]} {{'rows': 12345678}}")
    url, second, beginning, rows = first.split(" ", 3)
    assert url.startswith("file:///tmp/tmp…/")
    assert url[-16:-8] == beginning != key[:8]
    assert second not in (url[-16:], other)
    assert rows == "{'rows': 12345678}"
    assert names.stable("Spark 4.2.0 at 127.0.0.1:43211 took 1.25 s") == "Spark 4.x at 127.0.0.1:… took …"
    assert names.stable("<p>written 2026-11-24T20:00:00Z of Spark 4.2.0 by ann on host (local-17)</p>") == (
        "<p>written … of Spark 4.x by you (…)</p>"
    )


@pytest.mark.short
def test_a_notebook_imports_public_names_only(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    source = "\n".join(python_of(cell) for cell in content.cells if cell.cell_type == "code")
    ours = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.split(".")[0] == "converter"]
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "converter":
            if notebook.stem == MOVING and str(node.module).startswith(OLD_NAMES):
                continue
            assert node.module == "converter"
            ours += [alias.name for alias in node.names]
    assert ours
    assert set(ours) <= set(dir(converter))


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


@pytest.mark.short
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


@pytest.mark.parametrize("notebook", named(*DIGITS), indirect=True)
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


@pytest.mark.short
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


@pytest.mark.parametrize("notebook", named(SYNAPSE), indirect=True)
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


@pytest.mark.parametrize("notebook", named(DATABRICKS), indirect=True)
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


@pytest.mark.parametrize("notebook", named(DELTA), indirect=True)
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
        assert "uint8 (Image)" in run.shown()
        assert len(run.pictures()) == 2

    def test_delete_leaves_the_table(self, run: Run) -> None:
        found = re.search(
            r"^files of the table before and after delete\(\): \[(\d+), (\d+)\]$", run.text("stdout"), re.MULTILINE
        )
        assert found
        assert found[1] == found[2] != "0"
        assert run.workspace.files() == []


@pytest.mark.parametrize("notebook", named(CACHE), indirect=True)
class TestCache:
    def test_the_argument_goes_before_the_environment_before_the_conf(self, run: Run) -> None:
        found = re.findall(r"of-the-(\w+) +there: (\w+), after the block: (\w+)\n", run.text("stdout"))
        assert found == [(place, "True", "False") for place in ("conf", "environment", "argument")]

    def test_only_proven_or_named_rows_are_used_again(self, run: Run) -> None:
        shown = run.text("stdout")
        assert "the same DataFrame has the same entry: True\n" in shown
        assert "rows that differ each time have the same entry: False\n" in shown
        assert "the same entry: True; what ten rows of this name give: 200,000 rows\n" in shown

    def test_another_process_reads_without_spark(self, run: Run) -> None:
        assert "200,000 rows, first ids [0, 1, 2], pyspark loaded: False\n" in run.text("stdout")

    def test_a_reader_keeps_its_files(self, run: Run) -> None:
        shown = run.text("stdout")
        assert re.search(r"^deleted, and the reader still reads \[0, 1\]; files: [1-9]\d*$", shown, re.MULTILINE)
        assert "the reader has closed it too; files: 0\n" in shown

    def test_a_killed_run_leaves_what_the_next_conversion_removes(self, run: Run) -> None:
        shown = run.text("stdout")
        assert "killed: True\nrows are left: True; manifests: 0\n" in shown
        assert "a sweep would remove 1 unfinished write and 0 entries\nleft by the killed run: 0\n" in shown

    def test_a_kept_entry_is_swept_by_name_when_nothing_uses_it(self, run: Run) -> None:
        assert "while it is in use: 0\nswept without the name: 0\nswept by name: 1\n" in run.text("stdout")


@pytest.mark.parametrize("notebook", named(RANKS), indirect=True)
class TestRanks:
    def test_ranks_divide_the_rows(self, run: Run) -> None:
        assert re.findall(r"rows, ([\d,]+) of 6,002, none twice$", run.text("stdout"), re.MULTILINE) == [
            "6,002",
            "6,000",
        ]

    def test_another_number_of_ranks_goes_on(self, run: Run) -> None:
        assert "before: 2,400 rows, after: 3,602 rows, each once: True\n" in run.text("stdout")

    def test_a_larger_window_mixes_better(self, run: Run) -> None:
        spreads = [float(spread) for spread in re.findall(r"spread by ([\d.]+)$", run.text("stdout"), re.MULTILINE)]
        assert len(spreads) == 3
        assert spreads[0] > 2 * spreads[1] > 4 * spreads[2]

    def test_the_ranks_and_the_mixing_are_drawn(self, run: Run) -> None:
        assert len(run.pictures()) == 2


@pytest.mark.parametrize("notebook", named(STORES), indirect=True)
class TestStores:
    def test_a_password_is_needed_and_not_shown(self, run: Run) -> None:
        assert "401, message='Unauthorized'" in run.text("stdout")
        assert "the password is in what is shown or pickled: False\n" in run.text("stdout")

    def test_fewer_columns_and_a_local_cache_fetch_less(self, run: Run) -> None:
        fetched = re.findall(r"100,000 rows, ([\d.]+) MB fetched$", run.text("stdout"), re.MULTILINE)
        whole, a_column, first, second = map(float, fetched)
        assert a_column < whole / 3
        assert first == whole
        assert second == 0

    def test_a_busy_server_is_asked_again_until_the_timeout(self, run: Run) -> None:
        assert "busy three times: 100,000 rows\n" in run.text("stdout")
        assert "could not be reached for 1 second" in run.text("stdout")


@pytest.mark.parametrize("notebook", named(TYPES), indirect=True)
class TestTypes:
    def test_the_table_of_types_has_each_column(self, run: Run) -> None:
        (table,) = [output.data["text/markdown"] for output in run.outputs if "text/markdown" in output.get("data", {})]
        assert "| double | `x` | float32 (4,) | float32 (4,) |" in table
        assert "| timestamp | `x` | datetime64[us] (4,) | int64 (4,) |" in table
        assert "| struct<a: int, b: float> | `x.b` | float32 (4,) | float32 (4,) |" in table

    def test_what_is_not_declared_is_refused(self, run: Run) -> None:
        errors = re.findall(r"^(\w+Error): ", run.text("stdout"), re.MULTILINE)
        assert errors == ["NullValueError", "SourceError", "UnsupportedTypeError"]

    def test_nulls_and_lengths_become_what_was_asked_for(self, run: Run) -> None:
        shown = run.text("stdout")
        assert "'age__valid': [True, False, True]" in shown
        assert "'age': [31, -1, 47]" in shown
        assert "pad: {'words': [[1, 2, 3], [4, 0, 0], [5, 6, 0]], 'words__length': [3, 1, 2]}\n" in shown
        assert "nested: [[1, 2, 3], [4], [5, 6]]\n" in shown

    def test_the_order_depends_on_seed_and_epoch(self, run: Run) -> None:
        shown = run.text("stdout")
        assert "batches of 100 or of 77, the same order: True\n" in shown
        assert "the next epoch, the same order: False\n" in shown


@pytest.mark.parametrize("notebook", named(VALUES), indirect=True)
class TestValues:
    def test_the_schema_says_what_columns_become(self, run: Run) -> None:
        (schema,) = [
            output.data["text/plain"]
            for output in run.outputs
            if "Schema(" in output.get("data", {}).get("text/plain", "")
        ]
        for shown in ("uint8 (Image)", "float32 (NumPy)", "int32 (3 categories)", "float32 (standardized)"):
            assert shown in schema

    def test_the_network_learns(self, run: Run) -> None:
        match = re.search(r"right on 240 held-out patches: ([\d.]+)$", run.text("stdout"), re.MULTILINE)
        assert match is not None
        assert float(match[1]) > 0.9

    def test_a_broken_picture_is_named_or_left_out(self, run: Run) -> None:
        assert "ReadError: Column 'picture' cannot be decoded in row 1 " in run.text("stdout")
        assert "1 row of 3\n" in run.text("stdout")


@pytest.mark.parametrize("notebook", named(SERIES), indirect=True)
class TestForecastingASeries:
    def test_sequences_are_counted_before_a_row_is_read(self, run: Run) -> None:
        hours, december, in_new_york = 365 * 24, 31 * 24, 3
        train, held_out = (hours - december - 29) * in_new_york, ((december - 30) // 6 + 1) * in_new_york
        rows = hours * in_new_york
        assert f"{rows:,} rows, {train:,} sequences to train with, {held_out} held out\n" in run.text("stdout")
        assert f"an epoch has {-(-train // 256)} batches of 256 sequences\n" in run.text("stdout")

    def test_columns_arrive_as_the_past_the_future_and_the_steps_that_were_named(self, run: Run) -> None:
        shapes = {"origin": 1, "time_hour": 1, "hour": 6, "weekday": 6, "past": 24, "future": 6}
        assert f"{ {name: (360, length) for name, length in shapes.items()} }\n" in run.text("stdout")

    def test_both_models_beat_the_naive_forecast(self, run: Run) -> None:
        pattern = r"^(\w+)\b.*: loss on held-out hours ([\d.]+) flights$"
        losses = {name: float(loss) for name, loss in re.findall(pattern, run.text("stdout"), re.MULTILINE)}
        assert losses.keys() == {"naive", "torch", "Keras"}
        assert losses["torch"] < 0.95 * losses["naive"]
        assert losses["Keras"] < 0.95 * losses["naive"]

    def test_a_gap_ends_a_sequence_and_short_ones_are_padded(self, run: Run) -> None:
        shown = run.text("stdout")
        night, by_day, days = (
            int(re.search(rf"^{text}: ([\d,]+)", shown, re.MULTILINE)[1].replace(",", ""))
            for text in ("12 hours that may have a night between them", "12 hours without a gap", "days")
        )
        assert night > by_day > days > 3 * 360
        first = re.search(r"the first with (\d+) hours: \[(.+)\]$", shown, re.MULTILINE)
        hours = [int(hour) for hour in first[2].split(", ")]
        length = int(first[1])
        assert hours == [*range(hours[0], hours[0] + length), *[0] * (24 - length)]
        lengths = re.search(r"^hours of four days: \[(.+)\], packed into (\d+) rows$", shown, re.MULTILINE)
        assert sum(map(int, lengths[1].split(", "))) == int(lengths[2])


@pytest.mark.parametrize("notebook", named(MIXING), indirect=True)
class TestMixingAndBuckets:
    def test_classes_come_in_exact_numbers_in_every_epoch(self, run: Run) -> None:
        shown = run.text("stdout")
        found = re.search(r"^([\d,]+) of ([\d,]+) flights to train with are late", shown, re.MULTILINE)
        late, every = (int(number.replace(",", "")) for number in found.groups())
        pattern = r"^(.+): (\[\[.+\]\]) others and late, ([\d,]+) different flights in all$"
        views = {name: (counts, number) for name, counts, number in re.findall(pattern, shown, re.MULTILINE)}
        assert views.keys() == {"as they are", "balance", "short balance", "sample"}
        expected = {
            "as they are": ([every - late, late], every),
            "balance": ([every - every // 2, every // 2], every),
            "short balance": ([late, late], 4 * late),
        }
        for name, (in_an_epoch, number) in expected.items():
            assert views[name] == (str([in_an_epoch] * 3), f"{number:,}")
        first, *others = json.loads(views["sample"][0])
        assert others == [first] * 2
        assert sum(first) == every
        assert first[1] / late == pytest.approx(5 * first[0] / (every - late), rel=1e-4)

    def test_a_balanced_training_finds_late_flights_that_others_do_not(self, run: Run) -> None:
        pattern = r"^(.+): recall ([\d.]+), precision ([\d.]+) on [\d,]+ held-out flights$"
        results = {name: float(recall) for name, recall, _ in re.findall(pattern, run.text("stdout"), re.MULTILINE)}
        assert len(results) == 4
        assert results.pop("as they are") < 0.1
        assert min(results.values()) > 0.4

    def test_a_mixture_has_the_proportions_of_its_weights(self, run: Run) -> None:
        shown = run.text("stdout")
        numbers = re.findall(r"^epoch \d: ([\d,]+) of ([\d,]+) are VX; in a batch", shown, re.MULTILINE)
        assert numbers == [("2,560", "10,240")] * 3
        assert re.findall(r"^epoch \d: (\d+)% are VX$", shown, re.MULTILINE) == ["25", "25", "50", "50"]

    def test_epochs_end_when_a_source_was_read(self, run: Run) -> None:
        shown = run.text("stdout")
        sizes = re.search(r"^\{'VX': '([\d,]+) rows', 'UA': '([\d,]+) rows'\}$", shown, re.MULTILINE)
        small, large = (int(number.replace(",", "")) for number in sizes.groups())
        ends = re.findall(r"^stop=(.+): ([\d,]+) rows in an epoch$", shown, re.MULTILINE)
        rows = {stop: int(number.replace(",", "")) for stop, number in ends}
        assert rows["'first'"] == pytest.approx(small * 4, abs=4)
        assert rows["'all'"] == pytest.approx(large * 4 / 3, abs=4)
        assert rows["10240"] == 10_240

    def test_a_source_has_each_row_once_in_its_own_epoch(self, run: Run) -> None:
        pattern = r"^(VX|UA), its own epochs: \[(.+)\]$"
        epochs = dict(re.findall(pattern, run.text("stdout"), re.MULTILINE))
        assert epochs.keys() == {"VX", "UA"}
        for rows, different in re.findall(r"'([\d,]+) rows, ([\d,]+) different'", " ".join(epochs.values())):
            assert rows == different
        # More rows of the small one are wanted than it has.
        assert epochs["VX"].count("different") == 2

    def test_a_resumed_mixture_goes_on_with_the_same_rows(self, run: Run) -> None:
        shown = run.text("stdout")
        assert "resumed in epoch 2, after 15 batches: 25 batches are left, the same rows: True\n" in shown

    def test_buckets_pad_less_and_keep_each_delay(self, run: Run) -> None:
        pattern = r"^(with|without) buckets: ([\d,]+) delays in [\d,]+ places, (\d+)% of them padding$"
        found = {
            name: (number, int(part)) for name, number, part in re.findall(pattern, run.text("stdout"), re.MULTILINE)
        }
        assert found["with"][0] == found["without"][0] != "0"
        assert found["without"][1] > 70
        assert found["with"][1] < 10
