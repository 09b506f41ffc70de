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
STEPS: set[Any] = set()

PROGRAM = """
import functools, sys
import near
from package.base import Base
from beside import helped
from converter.sources.spark.own_decoders import hashes_of_own
SCALE, NAMES = int(sys.argv[1]), {"a", "b", "c", "d", "e"}
class Own(Base):
    def __init__(self, held): self.held = held
    def decode(self, values):
        return near.near(values) * SCALE * ("x" in {"x", "y", "z", "w"}) * ("a" in NAMES) * helped() + self.held
print(hashes_of_own({"x": Own(1)})["x"])
"""

FILES = {
    "near.py": "def near(x): return x\n",
    "beside.py": "import functools\n@functools.cache\ndef helped(): return 1\n",
    "package/__init__.py": "",
    "package/base.py": "class Base:\n    dtype, shape = 'float32', (1,)\n",
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


class Words(set[str]):
    def __init__(self, weight: int) -> None:
        super().__init__("ab")
        self.weight = weight


def step(factor: int) -> Any:
    class Step:
        def run(self) -> int:
            return factor

    return Step


class InSteps:
    dtype, shape = "float32", (1,)

    def __init__(self) -> None:
        self.call = lambda values: [one().run() for one in STEPS]

    def decode(self, values: Any) -> Any:
        return self.call(values)


def test_what_a_set_holds_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = step(1), step(2)
    assert repr(one) == repr(other)
    hashes = []
    sets = ({one}, {other}, {one}, {"a", "b"}, {"a", "c"}, Words(1), Words(2))
    for held in (*sets, frozenset("ab"), ["'a'", "'b'"], {1, 2}, ["1", "2"]):
        monkeypatch.setitem(globals(), "STEPS", held)
        hashes.append(hash_of(InSteps()))
    assert hashes[0] == hashes[2]
    assert len(set(hashes)) == len(hashes) - 1


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


def run(program: Path | str, folder: Path, scale: int = 1) -> str:
    """What a file, or a module, prints."""
    # A file that was written in the tick of the kernel's clock in which a program begins is taken for a later one.
    time.sleep(0.05)
    paths = [str(Path(own_decoders.__file__).parents[3]), str(folder / "files.zip"), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *(["-m", program] if isinstance(program, str) else [str(program)]), str(scale)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.strip()


@pytest.mark.long("starts a program again and again")
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


@pytest.mark.long("starts a program for each of many files")
def test_the_files_of_what_it_names_are_part_of_it(tmp_path: Path) -> None:
    write_files(tmp_path, is_packed=False)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    hashes = [run(program, tmp_path)]
    for name, text in FILES.items():
        (tmp_path / name).write_text(text + "EDITED = 1\n")
        hashes.append(run(program, tmp_path))
        # Packages are imported for what lies in them, and hold nothing of it.
        assert (hashes[-1] == hashes[-2]) == (name in ("package/__init__.py", "unused.py")), name


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


def test_a_link_that_leads_elsewhere_by_now_is_a_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "released.py").write_text("class Own:\n    dtype, shape = 'float32', (1,)\n")
    link = tmp_path / "current"
    link.symlink_to("one")
    monkeypatch.syspath_prepend(link)
    decoder = importlib.import_module("released").Own()
    time.sleep(0.05)
    begun = time.time()
    monkeypatch.setattr(own_decoders, "_begun_at", lambda: begun)
    assert hash_of(decoder) == hash_of(decoder)
    time.sleep(0.05)
    link.unlink()
    link.symlink_to("two")
    assert hash_of(decoder) != hash_of(decoder)


def test_when_a_process_began_is_known() -> None:
    before = time.time()
    code = (
        "import time; begun = time.time(); from converter.sources.spark import own_decoders as o\n"
        "print(o._begun_at(), begun)"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found, later = map(float, told.stdout.split())
    # The kernel counts in hundredths of a second.
    assert before - 0.02 < found < later
