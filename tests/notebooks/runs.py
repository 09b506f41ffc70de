"""One execution of a notebook from top to bottom, in a kernel of its own, and what it showed and left."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from tests.notebooks.workspaces import WORKSPACES, Workspace, on_this_machine

CELL_SECONDS = 240
FOREIGN = ("SPARK", "PYSPARK", "PYTHONWARNINGS", "CONVERTER", "RANK", "WORLD_SIZE", "SLURM", "OMPI", "TF_CONFIG")
"""Beginnings of the environment variables that would change what a notebook shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a notebook showed, and what it left."""

    outputs_of: dict[str, list[Any]]
    """The outputs of each code cell, by the cell's id."""

    root: Path
    """What all folders of this run are below."""

    folder: Path
    cache_dir: Path
    temporary: Path
    workspace: Workspace
    files_after: dict[str, list[str]]
    """What stood there when a cell, by its id, was done."""

    requests_after: dict[str, int]
    """How many requests for rows there were by then."""

    files_when_killed: list[str]

    @property
    def outputs(self) -> list[Any]:
        return [output for outputs in self.outputs_of.values() for output in outputs]

    def text(self, stream: str) -> str:
        return "".join(output.text for output in self.outputs if output.get("name") == stream)

    def shown(self) -> str:
        return "".join(str(output.data) for output in self.outputs if output.output_type == "execute_result")

    def pictures(self) -> list[bytes]:
        shown = [output.data for output in self.outputs if "data" in output]
        return [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]


@contextlib.contextmanager
def run_notebook(notebook: Path, root: Path) -> Iterator[Run]:
    """The notebook after one execution; a cell that raises fails here. Its servers live as long as the block."""
    jupyter, work, cache_dir, temporary = (root / name for name in ("jupyter", "work", "cache", "tmp"))
    write_kernel_spec(jupyter / "kernels" / "python3")
    work.mkdir()
    temporary.mkdir()
    files_after, requests_after, files_when_killed = {}, {}, []

    def execute(first: str = "") -> dict[str, list[Any]]:
        content = nbformat.read(notebook, as_version=4)
        own = {cell.id for cell in content.cells}
        content.cells = workspace.cells(content, first)

        def look(cell: Any, cell_index: int, execute_reply: Any) -> None:
            files_after[cell.id], requests_after[cell.id] = workspace.files(), workspace.data_requests()

        client = NotebookClient(
            content,
            kernel_name="python3",
            timeout=CELL_SECONDS,
            record_timing=False,
            resources={"metadata": {"path": work}},
        )
        client.on_cell_executed = look
        client.execute()
        return {cell.id: cell.outputs for cell in content.cells if cell.id in own and cell.cell_type == "code"}

    with WORKSPACES.get(notebook.stem, on_this_machine)(root) as workspace:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(FOREIGN)]:
                patch.delenv(name)
            patch.setenv("JUPYTER_DATA_DIR", str(jupyter))
            patch.setenv("IPYTHONDIR", str(root / "ipython"))
            patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
            patch.setenv("CONVERTER_CACHE_DIR", str(cache_dir))
            patch.setenv("TMPDIR", str(temporary))
            for name, value in workspace.environment.items():
                patch.setenv(name, value)
            if workspace.killed_by:
                with pytest.raises(DeadKernelError):
                    execute(workspace.killed_by)
                files_when_killed = workspace.files()
            outputs_of = execute()
        yield Run(
            outputs_of=outputs_of,
            root=root,
            folder=work,
            cache_dir=cache_dir,
            temporary=temporary,
            workspace=workspace,
            files_after=files_after,
            requests_after=requests_after,
            files_when_killed=files_when_killed,
        )
