"""Files and folders of a cache have the modes that the umask leaves: neither wider nor narrower."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from converter import sweep
from converter.cache import entries, roots
from converter.reading.local_cache import LocalCache
from tests.faults.small_entries import KEY, commit_entry, write_data


@pytest.fixture(params=[0o077, 0o027, 0o022, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(directory: Path) -> dict[str, str]:
    """The mode of each path below a directory, as `ls` shows it."""
    return {str(path.relative_to(directory)): stat.filemode(path.stat().st_mode) for path in directory.rglob("*")}


def expected(directory: Path, umask: int) -> dict[str, str]:
    folder, file = stat.S_IFDIR | 0o777 & ~umask, stat.S_IFREG | 0o666 & ~umask
    return {
        str(path.relative_to(directory)): stat.filemode(folder if path.is_dir() else file)
        for path in directory.rglob("*")
    }


def test_an_entry_that_is_held_and_one_that_is_written(cache_dir: Path, umask: int) -> None:
    root = roots.open_root(str(cache_dir))
    held = commit_entry(root, KEY)
    attempt = entries.begin(root, "f" * 16 + "-" + "0" * 16, application_id="app-1")
    write_data(root, attempt)
    found = modes(cache_dir)
    # The marker, two entries with a folder of two files each, and a manifest, a lease and an intent.
    assert len(found) == 1 + 1 + 2 * 4 + 3
    assert found == expected(cache_dir, umask)
    held.delete()
    entries.abandon(root, attempt)
    assert sweep(cache_dir).num_files == 0


def test_rows_on_this_hosts_disk(tmp_path: Path, umask: int) -> None:
    local = tmp_path / "local"
    kept = LocalCache(str(local), "rows", None)
    kept.get("rows-0-0000000000000000", [4], lambda: [b"rows"])
    found = modes(local)
    # The root, its marker and counter, a folder with the rows and two locks.
    assert len(found) == 7
    assert found == expected(local, umask)
