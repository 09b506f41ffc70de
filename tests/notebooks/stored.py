"""What of a run stands in the repository: its outputs, without what another run or another machine shows otherwise.

    python -m tests.notebooks.stored [NAME …]

runs the notebooks (all of them, or those of which a name is a part) and stores them with their outputs.

The rules, so that a second run stores the same text:
- Nothing of stderr is stored, nor a bar of progress. Counts of executions and times of cells are left out.
- Folders of the run get the names that a reader's own have. Temporary folders end with `…`.
- Hexadecimal numbers (keys of the cache, fingerprints, uuids) become others of the same form; equal ones stay equal.
- Versions lose what follows the first number: `4.x`. Ports, addresses of objects and times become `…`.
- What several ranks say comes in the order of the alphabet.
- Who wrote an entry, where and when, becomes `written … of … by you (…)`.

Stored as they are, and not compared:
- results of a training: numbers with a decimal point after "loss", "accuracy", "recall" or "precision";
- sizes in MB: another version of Arrow writes other files; percentages; the width of tables;
- pictures: only that there is one is compared.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
from PIL import Image

from tests.notebooks.runs import Run, run_notebook
from tests.notebooks.workspaces import NOTEBOOKS

PICTURE = "image/png"
COLOURS = 64
PROGRESS = re.compile(r"Wrote the cache|.*\d%\|")
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
HEXADECIMAL = rf"\b({UUID}|(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{{8,64}})\b|(?<=fingerprint )[0-9a-f]{{8,64}}"
COMMON_DIGITS = 8
"""Digits by which a number is known again where only its beginning is shown."""

REPLACED = (
    (re.compile(r"/tmp/tmp\w{8}"), "/tmp/tmp…"),
    (re.compile(r"(?<=127\.0\.0\.1:)\d+"), "…"),
    (re.compile(r"\b0x[0-9a-f]{6,}"), "0x…"),
    (re.compile(r"(?<![\d.])(\d+)\.\d+\.\d+\b(?!\.)"), r"\1.x"),
    (re.compile(r"\bwritten .+? of (.+?) by .+? \([^)]*\)"), r"written … of \1 by you (…)"),
    (re.compile(r"\b[\w.-]+:\d+ \((?=reads|writes)"), "this-machine:… ("),
    (re.compile(r"\b[\d.,]+ (?:ns|µs|ms|s|seconds|rows/s|MB/s)(?![\w/])"), "…"),
)
OF_RANKS = re.compile(r"(?:^(?:Reading shard|Each epoch drops) .*\n){2,}", re.MULTILINE)
NOT_COMPARED = (
    (re.compile(r"(\b(?:loss|accuracy|recall|precision)\b[^\n.]*?)\d+\.\d+"), r"\1…"),
    (re.compile(r"\b[\d.,]+ MB\b"), "… MB"),
    (re.compile(r"\b[\d.,]+%"), "…%"),
    # As many as there are cores.
    (re.compile(r"num_workers=\d+(?= would)"), "num_workers=…"),
    # A table is as wide as its numbers.
    (re.compile(r"[ ─━┏┓┳┃│└┘┴┌┐┬├┤┼╇┡┩]+"), " "),
)


class Names:
    """Texts of one run in the words of every run."""

    def __init__(self, replaced: Sequence[tuple[str, str]]) -> None:
        self._replaced = replaced
        self._numbers: dict[str, int] = {}

    def stable(self, text: str) -> str:
        """The text as each run would have shown it."""
        for here, name in self._replaced:
            text = text.replace(here, name)
        text = re.sub(HEXADECIMAL, self._renumber, text)
        for pattern, replacement in REPLACED:
            text = pattern.sub(replacement, text)
        return OF_RANKS.sub(lambda lines: "".join(sorted(lines[0].splitlines(keepends=True))), text)

    def _renumber(self, match: re.Match[str]) -> str:
        number = self._numbers.setdefault(match[0][:COMMON_DIGITS], len(self._numbers))
        digits = iter(hashlib.sha512(str(number).encode()).hexdigest())
        return "".join("-" if character == "-" else next(digits) for character in match[0])


def stored_outputs(outputs: Sequence[Any], names: Names) -> list[Any]:
    """A cell's outputs as they are stored."""
    kept: list[Any] = []
    for output in outputs:
        if output.output_type == "stream":
            if output.name != "stdout":
                continue
            if kept and kept[-1].output_type == "stream":
                kept[-1].text += output.text
            else:
                kept.append(nbformat.v4.new_output("stream", name="stdout", text=output.text))
        elif not PROGRESS.match(output.data.get("text/plain", "")):
            kept.append(nbformat.v4.new_output(output.output_type, data=dict(output.data)))
    for output in kept:
        if output.output_type == "stream":
            output.text = names.stable(output.text)
        else:
            output.data = {
                kind: small_picture(content) if kind == PICTURE else names.stable(content)
                for kind, content in output.data.items()
            }
    return kept


def small_picture(picture: str) -> str:
    """A PNG, in base 64, with no more colours than a drawing needs."""
    drawn = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(picture))) as image:
        image.convert("RGB").quantize(COLOURS).save(drawn, "PNG", optimize=True)
    return base64.b64encode(drawn.getvalue()).decode()


def names_of(run: Run) -> Names:
    """A run's folders, by the names that a reader's own have; a stand-in by the name of what it stands for."""
    return Names(
        [
            (str(run.temporary), "/tmp"),
            *((here, text) for text, here in run.workspace.replaced.items()),
            (str(run.cache_dir), "/home/you/.cache/spark-tensor-converter"),
            (str(run.folder), "/home/you/notebooks"),
            (str(run.root), "/home/you"),
        ]
    )


def as_stored(content: Any, run: Run) -> Any:
    """The notebook with the outputs of a run."""
    names = names_of(run)
    for cell in content.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = stored_outputs(run.outputs_of.get(cell.id, []), names)
    return content


def compared(content: Any) -> list[tuple[str, list[Any]]]:
    """What must be equal in a stored notebook and in a run: for each code cell the kinds and texts of its outputs."""
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    return [(cell.id, [_compared_output(output) for output in cell.outputs]) for cell in code]


def _compared_output(output: Any) -> dict[str, str]:
    texts = {"stdout": output.text} if output.output_type == "stream" else output.data
    # The text beside a picture is the size of the figure.
    return {PICTURE: ""} if PICTURE in texts else {kind: _without_results(text) for kind, text in texts.items()}


def _without_results(text: str) -> str:
    for pattern, replacement in NOT_COMPARED:
        text = pattern.sub(replacement, text)
    return text


def main(parts_of_names: Sequence[str]) -> None:
    for path in NOTEBOOKS:
        if parts_of_names and not any(part in path.stem for part in parts_of_names):
            continue
        content = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder, run_notebook(path, Path(folder)) as run:
            content = as_stored(content, run)
        nbformat.write(content, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
