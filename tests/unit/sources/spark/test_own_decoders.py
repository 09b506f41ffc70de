"""A decoder of a user's own is known by what it holds and by its code, in every process; in doubt it is another one."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converter.sources.spark import own_decoders
from converter.sources.spark.own_decoders import hashes_of_own

pytestmark = pytest.mark.usefixtures("_long_ago")

FACTOR = 1

PROGRAM = """
import sys
import numpy as np
import near
from package.base import Base, named
from converter.sources.spark.own_decoders import hashes_of_own
SCALE, NAMES = int(sys.argv[1]), {"a", "b", "c", "d", "e"}
def helped(values):
    import late
    return near.near(values) * SCALE * late.LATE * ("x" in {"x", "y", "z", "w"}) * ("a" in NAMES)
class Own(Base):
    def __init__(self, held): self.held = held
    def decode(self, values): return helped(values) + self.held
print(hashes_of_own({"x": Own(1)})["x"])
"""

FILES = {
    "near.py": "from farther import far\ndef near(x): return far(x)\n",
    "farther.py": "def far(x): return x\n",
    "late.py": "LATE = 1\n",
    "package/__init__.py": "",
    "package/base.py": "from . import beside\nnamed = 3\nclass Base:\n    dtype, shape = 'float32', (1,)\n",
    "package/beside.py": "BESIDE = 1\n",
    "unused.py": "NOTHING = 1\n",
}


@pytest.fixture
def _long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had begun after the last change of its files."""
    monkeypatch.setattr(own_decoders, "_begun_at", lambda: time.time() + 60)


def hash_of(decoder: Any) -> str:
    return hashes_of_own({"x": decoder})["x"]


class Own:
    dtype, shape, held = "float32", (1,), 1

    def decode(self, values: Any) -> np.ndarray[Any, Any]:
        return np.zeros((len(values), 1), np.float32) + FACTOR


def local(factor: int) -> Any:
    class Local:
        dtype, shape = "float32", (1,)

        def decode(self, values: Any) -> np.ndarray[Any, Any]:
            return np.zeros((len(values), 1), np.float32) + factor * FACTOR

    return Local()


def test_decoders_of_one_process_differ_in_what_they_hold_and_use(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, made = Own(), local(1)
    assert hash_of(decoder) == hash_of(decoder) == hash_of(Own())
    assert hash_of(made) == hash_of(made) != hash_of(local(2))
    before = hash_of(made)
    monkeypatch.setitem(globals(), "FACTOR", 2)
    assert hash_of(made) != before
    monkeypatch.setitem(globals(), "FACTOR", 1)
    assert hash_of(made) == before
    monkeypatch.setattr(type(made), "shape", (2,))
    assert hash_of(made) != before
    first = hash_of(decoder)
    vars(decoder)["held"] = 2
    assert hash_of(decoder) != first


def write_files(folder: Path, *, is_packed: bool) -> None:
    if is_packed:
        with zipfile.ZipFile(folder / "files.zip", "w") as archive:
            for name, text in FILES.items():
                archive.writestr(name, text)
        return
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def run(program: Path, folder: Path, scale: int = 1) -> str:
    # A file that was written in the tick of the kernel's clock in which a program begins is taken for a later one.
    time.sleep(0.05)
    paths = [str(Path(own_decoders.__file__).parents[3]), str(folder / "files.zip"), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(program), str(scale)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_program_has_the_same_hash_wherever_it_lies_and_whatever_else_is_edited(
    tmp_path: Path, is_packed: bool
) -> None:
    write_files(tmp_path, is_packed=is_packed)
    program, moved = tmp_path / "program.py", tmp_path / "elsewhere" / "a_longer_name.py"
    program.write_text(PROGRAM)
    first = run(program, tmp_path)
    assert run(program, tmp_path) == first
    moved.parent.mkdir()
    moved.write_text("# Edited.\n\n" + PROGRAM + "print(end='')\n")
    assert run(moved, tmp_path) == first
    assert run(program, tmp_path, scale=2) != first


@pytest.mark.parametrize("name", [name for name in FILES if name != "unused.py"])
def test_code_that_is_imported_is_part_of_it(tmp_path: Path, name: str) -> None:
    write_files(tmp_path, is_packed=False)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    first = run(program, tmp_path)
    (tmp_path / "unused.py").write_text("NOTHING = 2\n")
    assert run(program, tmp_path) == first
    (tmp_path / name).write_text(FILES[name] + "EDITED = 1\n")
    assert run(program, tmp_path) != first


@pytest.mark.parametrize(
    ("name", "edit"),
    [("touched_later", Path.touch), ("moved_later", lambda path: path.rename(path.with_suffix(".old")))],
)
def test_what_may_have_been_imported_in_another_form_is_another_one_each_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    edit: Callable[[Path], Any],
) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text("class Own:\n    dtype, shape = 'float32', (1,)\n    def decode(self, values): return values\n")
    monkeypatch.syspath_prepend(tmp_path)
    decoder = importlib.import_module(name).Own()
    assert hash_of(decoder) == hash_of(decoder)
    monkeypatch.setattr(own_decoders, "_begun_at", lambda: os.stat(tmp_path).st_mtime)
    edit(path)
    with caplog.at_level(logging.INFO):
        assert hash_of(decoder) != hash_of(decoder)
    assert f"is written for this call alone: the code of the module {name}" in caplog.messages[0]


def test_when_a_process_began_is_known() -> None:
    before = time.time()
    code = "import time; time.sleep(0.2); from converter.sources.spark import own_decoders as o; print(o._begun_at())"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    # The kernel counts in hundredths of a second.
    assert before - 0.02 < float(told.stdout) < before + 0.2
