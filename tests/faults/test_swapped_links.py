"""A link that is put in a folder's place at any moment of a removal leads nowhere: what is behind it stays as it was.

Python tells an audit hook of each file that is opened, listed, linked or removed right before it happens. There, before
the n-th such step, another process that may write to the cache moves a folder of it away, and puts a link to a folder
of the user's with files of the very same names in its place.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from converter import sweep
from converter.cache import entries, finding, leases, roots
from converter.errors import CacheError
from converter.reading import local_cache
from tests.faults.small_entries import KEY, leave_entry, tree, write_data

STEPS = {"open", "os.listdir", "os.scandir", "os.remove", "os.rmdir", "os.link", "os.utime", "os.fwalk"}
ROOT = roots.DIRECTORY


class Swap:
    """Puts the link in the place of a folder before the n-th step below the cache."""

    def __init__(self, folder: Path, users: Path, at_step: int) -> None:
        self._folder, self._users, self._at_step = folder, users, at_step
        self.num_steps = 0

    def __call__(self, event: str) -> None:
        self.num_steps += 1
        if self.num_steps == self._at_step and self._folder.is_dir() and not self._folder.is_symlink():
            self._folder.rename(self._folder.with_name("moved-away"))
            self._folder.symlink_to(self._users)


_current: list[Swap] = []


@functools.cache
def listen() -> None:
    """Hooks cannot be removed: this one does nothing while there is no swap."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if _current and event in STEPS:
            swap = _current.pop()
            try:
                swap(event)
            finally:
                _current.append(swap)

    sys.addaudithook(hook)


def delete(cache_dir: Path) -> Callable[[], Any]:
    leave_entry(cache_dir)
    root, key, manifest = finding.open_entry(f"{cache_dir}/{ROOT}/{KEY}")
    held = entries.adopt(root, key, manifest)
    assert held is not None
    return held.delete


def let_go(cache_dir: Path) -> Callable[[], Any]:
    leave_entry(cache_dir)
    held = entries.adopt(roots.open_root(str(cache_dir)), KEY)
    assert held is not None
    (cache_dir / ROOT / KEY / "manifest.json").unlink()
    return held.release


def sweep_all(cache_dir: Path) -> Callable[[], Any]:
    leave_entry(cache_dir)
    return lambda: sweep(cache_dir)


def abandon(cache_dir: Path) -> Callable[[], Any]:
    root = roots.open_root(str(cache_dir))
    attempt = entries.begin(root, KEY, application_id="app-1")
    write_data(root, attempt)
    staging = cache_dir / ROOT / KEY / attempt.data_directory / "_temporary" / "0"
    staging.mkdir(parents=True)
    (staging / "part-1.parquet").write_bytes(b"unfinished")
    return lambda: entries.abandon(root, attempt)


def tidy(cache_dir: Path) -> Callable[[], Any]:
    root = roots.open_root(str(cache_dir))
    attempt = entries.begin(root, KEY, application_id="app-1")
    manifest = write_data(root, attempt)
    (cache_dir / ROOT / KEY / attempt.data_directory / "part-00009-00000009-0000.parquet").write_bytes(b"superseded")
    return lambda: entries.delete_unlisted(root, attempt, manifest)


def data_folder(cache_dir: Path) -> Path:
    return next(path for path in (cache_dir / ROOT / KEY).iterdir() if path.is_dir())


@pytest.mark.parametrize("which", ["root", "entry", "data"])
@pytest.mark.parametrize("removal", [delete, let_go, sweep_all, abandon, tidy])
def test_nothing_behind_a_link_is_removed_whenever_it_is_swapped_in(
    removal: Callable[[Path], Callable[[], Any]], which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries.time, "sleep", lambda _: None)
    listen()
    at_step = num_steps = num_swapped = 0
    while at_step <= num_steps:
        cache_dir, users = tmp_path / f"cache-{at_step}", tmp_path / f"users-{at_step}"
        call = removal(cache_dir)
        folder = {"root": cache_dir / ROOT, "entry": cache_dir / ROOT / KEY, "data": data_folder(cache_dir)}[which]
        shutil.copytree(folder, users)
        (users / "notes.txt").write_bytes(b"mine")
        before = tree(users)
        swap = Swap(folder, users, at_step)
        _current.append(swap)
        try:
            # It may refuse by name, but not where nothing is swapped.
            with contextlib.suppress(*[CacheError] * bool(at_step)):
                call()
        finally:
            _current.clear()
            for lease in list(leases.heartbeat._leases):
                leases.heartbeat.remove(lease)
        after = tree(users)
        assert {name: after.get(name, "removed") for name in before} == before, f"{which} at step {at_step}"
        # The first time nothing is swapped, and the steps are counted.
        num_steps = num_steps or swap.num_steps
        num_swapped += folder.is_symlink()
        at_step += 1
    assert num_swapped > num_steps // 2


def test_rows_on_this_hosts_disk_behind_a_swapped_link_stay(tmp_path: Path) -> None:
    listen()
    num_swapped = 0
    for at_step in range(1, 12):
        root = Path(local_cache.open_local_root(str(tmp_path / f"cache-{at_step}")))
        folder, users = root / ("0" * 32), tmp_path / f"users-{at_step}"
        for place in (folder, users):
            place.mkdir()
            for name in (".held", f"rows-1-{'0' * 16}", f"rows-2-{'0' * 16}"):
                (place / name).write_bytes(b"rows")
        before = tree(users)
        _current.append(Swap(folder, users, at_step))
        try:
            local_cache.remove_unheld(str(root))
        finally:
            _current.clear()
        assert tree(users) == before
        num_swapped += folder.is_symlink()
    assert num_swapped > 3
