"""A cache in a folder that every user may write to: what a stranger planted there is refused, and risks are named."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from converter import open_converter, sweep
from converter.cache import entries, owners, roots
from converter.cache.roots import DIRECTORY, MANIFEST, OWNER_FILE
from converter.errors import CacheNotOwnedError
from converter.reading.local_cache import open_local_root
from tests.faults.small_entries import KEY, leave_entry

STRANGER = 54_321
"""A user's number that this machine does not have."""

Give = Callable[[Path], None]


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "_warned", set())


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Give:
    """Makes a file or folder a stranger's: root does, for others the module is shown so."""
    given: set[str] = set()

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, STRANGER, -1, follow_symlinks=False)
        given.add(str(path))

    class Shown:
        """`os`, with the owners that root would have set."""

        def _shown(self, path: str, status: os.stat_result) -> os.stat_result:
            fields = list(status)
            fields[4] = STRANGER if path in given else 0
            return os.stat_result(fields)

        def lstat(self, path: str) -> os.stat_result:
            return self._shown(path, os.lstat(path))

        def stat(self, path: str) -> os.stat_result:
            return self._shown(path, os.stat(path))

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    if os.geteuid() != 0:
        monkeypatch.setattr(owners, "os", Shown())
        monkeypatch.setattr(owners, "_uid_in", lambda folder: None)
    return give


@pytest.fixture
def open_to_all(tmp_path: Path) -> Iterator[Path]:
    """A folder as /tmp is: every user may add to it, and replace nothing of others."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    folder.chmod(0o755)


def commit(folder: Path) -> Path:
    """A cache with an entry, and the root's path."""
    leave_entry(folder)
    return folder / DIRECTORY


@pytest.mark.parametrize("name", ["", OWNER_FILE])
def test_a_cache_that_a_stranger_planted_is_refused_by_every_call(
    name: str, open_to_all: Path, give_away: Give
) -> None:
    root = commit(open_to_all)
    if name:
        # Who may write to the root itself can plant a marker in it.
        root.chmod(0o1777)
    give_away(root / name)
    calls: list[Callable[[], Any]] = [
        lambda: roots.open_root(str(open_to_all)),
        lambda: roots.find_root(str(open_to_all)),
        lambda: sweep(open_to_all),
        lambda: open_converter(str(root / KEY)),
    ]
    for call in calls:
        with pytest.raises(CacheNotOwnedError, match=f"belongs to the user with the number {STRANGER}, .* not used"):
            call()
    assert (root / KEY / MANIFEST).exists()


@pytest.mark.parametrize("name", ["", MANIFEST])
def test_an_entry_that_a_stranger_planted_is_not_read(name: str, open_to_all: Path, give_away: Give) -> None:
    root = commit(open_to_all)
    for folder in (root, root / KEY):
        folder.chmod(0o1777)
    give_away(root / KEY / name)
    with pytest.raises(CacheNotOwnedError, match=f"{KEY}.* belongs to .* Choose a cache_dir that only you"):
        entries.adopt(roots.open_root(str(open_to_all)), KEY)


def test_a_cache_that_a_group_shares_is_read_whoever_wrote_it(tmp_path: Path, give_away: Give) -> None:
    """A folder that not every user may write to was opened to others on purpose."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    root = commit(shared)
    for path in (root / KEY / MANIFEST, root / KEY, root / OWNER_FILE, root):
        give_away(path)
    held = entries.adopt(roots.open_root(str(shared)), KEY)
    assert held is not None
    held.release()


def test_a_cache_of_the_owner_of_a_folder_is_read(open_to_all: Path, give_away: Give) -> None:
    root = commit(open_to_all)
    for path in (root / KEY, root / OWNER_FILE, root, open_to_all):
        give_away(path)
    assert roots.find_root(str(open_to_all)) is not None


def test_what_this_user_made_on_a_disk_that_renames_users_is_its_own(
    open_to_all: Path, give_away: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root's files become nobody's on a network disk."""
    root = commit(open_to_all)
    give_away(root)
    give_away(root / OWNER_FILE)
    monkeypatch.setattr(owners, "_uid_in", lambda folder: STRANGER)
    assert roots.open_root(str(open_to_all)).url == f"file://{root}"


def test_the_owner_of_new_files_is_this_user(tmp_path: Path) -> None:
    assert owners._uid_in(str(tmp_path)) == os.geteuid()
    assert owners._uid_in(str(tmp_path / "missing")) is None
    assert list(tmp_path.iterdir()) == []


def warnings_of(caplog: pytest.LogCaptureFixture, call: Callable[[], Any]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "converter.cache.owners"):
        call()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775, 0o2770])
def test_a_folder_of_ones_own_below_one_like_tmp_needs_no_warning(
    mode: int, open_to_all: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = open_to_all / "own"
    own.mkdir()
    own.chmod(mode)
    assert warnings_of(caplog, lambda: roots.open_root(str(own))) == []
    assert warnings_of(caplog, lambda: roots.open_root(str(open_to_all))) == []


@pytest.mark.parametrize("where", ["", "below", DIRECTORY])
def test_a_folder_where_every_user_may_replace_the_cache_is_named_once(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_dir = tmp_path / "cache"
    (cache_dir / where).mkdir(parents=True)
    (cache_dir / (where if where == DIRECTORY else "")).chmod(0o777)
    if where == "below":
        cache_dir = cache_dir / where
    (line,) = warnings_of(caplog, lambda: roots.open_root(str(cache_dir)))
    named = tmp_path / "cache" / (where if where == DIRECTORY else "")
    assert f"every user may write to {named}. Remove that right with chmod o-w {named}, or choose another cache" in line
    assert line.startswith(f"Other users may replace rows in {cache_dir}/{DIRECTORY}: ")
    assert warnings_of(caplog, lambda: roots.open_root(str(cache_dir))) == []


def test_a_folder_that_a_stranger_may_have_made_for_us_is_named(
    open_to_all: Path, give_away: Give, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = open_to_all / "cache"
    theirs.mkdir()
    give_away(theirs)
    (line,) = warnings_of(caplog, lambda: roots.open_root(str(theirs)))
    assert f"{theirs} belongs to the user with the number {STRANGER}, in a folder that every user may write to" in line


def test_the_folder_of_a_local_cache_is_named_as_its_option(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)
    (line,) = warnings_of(caplog, lambda: open_local_root(str(tmp_path)))
    assert "or choose another local_cache_dir" in line
    tmp_path.chmod(0o700)


def test_modes_say_nothing_on_databricks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mount:
        is_local = True

        def path(self, *names: str) -> str:
            return "/".join(("/Volumes/main/ml/cache", *names))

    monkeypatch.setattr(owners, "_stranger_at", lambda path: "a stranger")
    owners.check_owner(Mount())  # type: ignore[arg-type]
    with pytest.raises(CacheNotOwnedError, match="belongs to a stranger"):
        owners.check_owner(roots.open_parent("/tmp"))
    owners.warn_of_writers(Mount())  # type: ignore[arg-type]
    assert owners._warned == set()
