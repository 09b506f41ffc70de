"""Every notebook runs from a clean start in a kernel of its own, shows what it claims, and leaves nothing behind."""

from __future__ import annotations

import ast
import base64
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

import converter

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
DIGITS = ["01_digits_in_torch", "02_digits_in_keras"]
MOST_CELLS = 12
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a notebook showed, and what it left."""

    outputs: list[Any]
    folder: Path
    cache_dir: Path

    def text(self, stream: str) -> str:
        return "".join(output.text for output in self.outputs if output.get("name") == stream)

    def pictures(self) -> list[bytes]:
        shown = [output.data for output in self.outputs if "data" in output]
        return [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def run(notebook: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The notebook after one execution from top to bottom; a cell that raises fails here."""
    folder = tmp_path_factory.mktemp(notebook.stem)
    jupyter, work, cache_dir = folder / "jupyter", folder / "work", folder / "cache"
    write_kernel_spec(jupyter / "kernels" / "python3")
    work.mkdir()
    content = nbformat.read(notebook, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("SPARK", "PYSPARK", "PYTHONWARNINGS"))]:
            patch.delenv(name)
        patch.setenv("JUPYTER_DATA_DIR", str(jupyter))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        patch.setenv("CONVERTER_CACHE_DIR", str(cache_dir))
        NotebookClient(content, kernel_name="python3", timeout=240, resources={"metadata": {"path": work}}).execute()
    outputs = [output for cell in content.cells for output in cell.get("outputs", [])]
    return Run(outputs=outputs, folder=work, cache_dir=cache_dir)


def test_there_are_notebooks() -> None:
    assert set(DIGITS) <= {path.stem for path in NOTEBOOKS}


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
    source = "\n".join(cell.source for cell in content.cells if cell.cell_type == "code")
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
    assert run.cache_dir.is_dir(), "the notebook wrote no cache into CONVERTER_CACHE_DIR"
    assert {path.name for path in run.cache_dir.rglob("*") if path.is_file()} <= {".owner"}
    assert [path.name for path in run.folder.iterdir()] == []


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
        shown = "".join(str(output.data) for output in run.outputs if output.output_type == "execute_result")
        assert "DatasetConverter(1,437 rows × 3 columns" in shown
        assert "(8, 8)" in shown

    def test_the_folders_are_seen_to_go(self, run: Run) -> None:
        assert "before: [True, True]\nafter:  [False, False]\n" in run.text("stdout")
