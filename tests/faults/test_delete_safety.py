"""Nothing is ever removed that this package did not write: links, foreign files, forged names, odd directories."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from converter import open_converter, sweep
from converter.cache import entries, roots
from converter.errors import CacheCorruptError, CacheError, CacheNotOwnedError, ConverterError
from tests.faults.small_entries import (
    KEY,
    OTHER_KEY,
    commit_entry,
    ids_of,
    leave_entry,
    make_converter,
    make_old,
    tree,
    write_data,
)
from tests.processes import run_python

ROOT = roots.DIRECTORY
HEX = "0123456789abcdef0123456789abcdef"
DATA_NAME = "part-00000-00000000-0000.parquet"


def _delete(cache_dir: Path) -> None:
    open_converter(f"{cache_dir}/{ROOT}/{KEY}").delete()


def _let_go(cache_dir: Path) -> None:
    with open_converter(f"{cache_dir}/{ROOT}/{KEY}"):
        pass


def _sweep(cache_dir: Path) -> None:
    sweep(cache_dir)


def _abandon(cache_dir: Path) -> None:
    root = roots.open_root(str(cache_dir))
    attempt = entries.begin(root, KEY, application_id="app-1")
    write_data(root, attempt)
    entries.abandon(root, attempt)


Removal = Callable[[Path], None]
REMOVALS: list[Removal] = [_delete, _let_go, _sweep, _abandon]


def _perform(removal: Removal, cache_dir: Path) -> None:
    """A removal that may refuse by name, and may not fail in another way."""
    try:
        removal(cache_dir)
    except ConverterError:
        return


def _users_folder(parent: Path) -> Path:
    """A folder of the user's with files of our own names."""
    folder = parent / "users"
    folder.mkdir()
    for name in (DATA_NAME, "part-00001-00000001-0000.parquet", "_SUCCESS", "probe", "notes.txt"):
        (folder / name).write_bytes(b"mine")
    return folder


def _data_folder(entry: Path) -> Path:
    return next(path for path in entry.glob("data-*") if path.is_dir())


# Links --------------------------------------------------------------------------


@pytest.mark.parametrize("removal", [_delete, _let_go, _sweep])
@pytest.mark.parametrize("has_same_files", [False, True], ids=["other-files", "the-very-files"])
def test_a_data_folder_that_is_a_link_keeps_what_stands_behind_it(
    removal: Removal, has_same_files: bool, tmp_path: Path, cache_dir: Path
) -> None:
    leave_entry(cache_dir)
    data = _data_folder(cache_dir / ROOT / KEY)
    users = _users_folder(tmp_path)
    if has_same_files:
        shutil.copytree(data, users, dirs_exist_ok=True)
    shutil.rmtree(data)
    data.symlink_to(users)
    before = tree(users)
    _perform(removal, cache_dir)
    assert tree(users) == before


@pytest.mark.parametrize("removal", [_delete, _let_go, _sweep])
def test_what_a_task_that_lost_made_after_the_commit_goes_with_the_entry(removal: Removal, cache_dir: Path) -> None:
    # Spark ends the other attempt of a task after the job: that one may make the committer's folders anew.
    leave_entry(cache_dir)
    staging = _data_folder(cache_dir / ROOT / KEY) / "_temporary" / "0" / "_temporary"
    (staging / "attempt_1").mkdir(parents=True)
    (staging / "attempt_1" / DATA_NAME).write_bytes(b"half")
    removal(cache_dir)
    if removal is _let_go:
        sweep(cache_dir)
    assert [path.name for path in (cache_dir / ROOT).iterdir()] == [".owner"]


def test_files_that_a_task_makes_while_its_folder_is_removed_keep_no_other(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_entry(cache_dir)
    data = _data_folder(cache_dir / ROOT / KEY)
    late = data / "_temporary" / "0" / DATA_NAME
    late.parent.mkdir(parents=True)
    rmdir = os.rmdir

    def make_then_remove(path: str, *, dir_fd: int | None = None) -> None:
        if path == "_temporary":
            late.parent.mkdir(exist_ok=True)
            late.write_bytes(b"late")
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", make_then_remove)
    _delete(cache_dir)
    assert tree(data).keys() == {"_temporary", "_temporary/0", f"_temporary/0/{DATA_NAME}"}
    monkeypatch.undo()
    sweep(cache_dir)
    assert [path.name for path in (cache_dir / ROOT).iterdir()] == [".owner"]


def test_an_attempts_folder_that_became_a_link_keeps_what_stands_behind_it(tmp_path: Path, cache_dir: Path) -> None:
    root = roots.open_root(str(cache_dir))
    attempt = entries.begin(root, KEY, application_id="app-1")
    users = _users_folder(tmp_path)
    (cache_dir / ROOT / KEY / attempt.data_directory).symlink_to(users)
    before = tree(users)
    entries.abandon(root, attempt)
    assert tree(users) == before


def test_tidying_before_a_commit_does_not_reach_through_a_link(tmp_path: Path, cache_dir: Path) -> None:
    root = roots.open_root(str(cache_dir))
    attempt = entries.begin(root, KEY, application_id="app-1")
    manifest = write_data(root, attempt)
    data = cache_dir / ROOT / KEY / attempt.data_directory
    users = _users_folder(tmp_path)
    shutil.copytree(data, users, dirs_exist_ok=True)
    (users / "part-00009-00000009-0000.parquet").write_bytes(b"mine")
    shutil.rmtree(data)
    data.symlink_to(users)
    before = tree(users)
    entries.delete_unlisted(root, attempt, manifest)
    entries.abandon(root, attempt)
    assert tree(users) == before


@pytest.mark.parametrize("removal", REMOVALS)
def test_an_entry_that_is_a_link_keeps_what_stands_behind_it(removal: Removal, tmp_path: Path, cache_dir: Path) -> None:
    leave_entry(cache_dir)
    entry = cache_dir / ROOT / KEY
    users = tmp_path / "users"
    entry.rename(users)
    (users / "notes.txt").write_bytes(b"mine")
    entry.symlink_to(users)
    before = tree(users)
    _perform(removal, cache_dir)
    assert tree(users) == before
    assert entry.is_symlink()


@pytest.mark.parametrize("is_empty", [False, True], ids=["files-behind-it", "empty-behind-it"])
def test_a_root_that_is_a_link_to_a_users_folder_keeps_what_stands_behind_it(
    is_empty: bool, tmp_path: Path, cache_dir: Path
) -> None:
    users = tmp_path / "users" if is_empty else _users_folder(tmp_path)
    users.mkdir(exist_ok=True)
    before = tree(users)
    cache_dir.mkdir()
    (cache_dir / ROOT).symlink_to(users)
    if is_empty:
        sweep(cache_dir)
    else:
        with pytest.raises(CacheNotOwnedError, match=r"holds files but not the marker \.owner"):
            sweep(cache_dir)
    assert {name: content for name, content in tree(users).items() if name != ".owner"} == before


def test_a_cache_dir_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    with make_converter(str(tmp_path / "cache")) as converter:
        assert len(ids_of(converter)) == len(converter)
    assert set(tree(tmp_path / "disk")) == {ROOT, f"{ROOT}/.owner"}
    leave_entry(tmp_path / "cache")
    assert sweep(tmp_path / "cache").num_entries == 1
    assert set(tree(tmp_path / "disk")) == {ROOT, f"{ROOT}/.owner"}
    assert (tmp_path / "cache").is_symlink()


def test_links_among_the_data_files_are_removed_themselves_and_not_what_they_name(
    tmp_path: Path, cache_dir: Path
) -> None:
    leave_entry(cache_dir)
    data = _data_folder(cache_dir / ROOT / KEY)
    users = _users_folder(tmp_path)
    (data / "part-00008-00000008-0000.parquet").symlink_to(users / DATA_NAME)
    (data / "part-00009-00000009-0000.parquet").symlink_to(users)
    before = tree(users)
    sweep(cache_dir)
    assert tree(users) == before


@pytest.mark.parametrize("name", ["manifest.json", f"lease-{HEX}.json", f"data-{HEX}.intent"])
def test_small_files_that_are_links_do_not_lead_away(name: str, tmp_path: Path, cache_dir: Path) -> None:
    leave_entry(cache_dir)
    entry = cache_dir / ROOT / KEY
    target = tmp_path / "mine.json"
    target.write_bytes((entry / "manifest.json").read_bytes())
    (entry / name).unlink(missing_ok=True)
    (entry / name).symlink_to(target)
    before = target.read_bytes()
    _perform(_delete, cache_dir)
    _perform(_sweep, cache_dir)
    assert target.read_bytes() == before


# Forged names ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../users/" + DATA_NAME,
        f"data-{HEX}/../../../users/{DATA_NAME}",
        f"data-{HEX}/../{DATA_NAME}",
        f"/data-{HEX}/{DATA_NAME}",
        "/etc/passwd",
        f"data-{HEX}/sub/{DATA_NAME}",
        f"data-{HEX}//{DATA_NAME}",
        f"data-{HEX}/{DATA_NAME}\n",
        f"data-{HEX}\n/{DATA_NAME}",
        f"data-{HEX}/{DATA_NAME}\x00",
        f"data-{HEX.upper()}/{DATA_NAME}",
        f"data-{HEX}/notes.txt",
        DATA_NAME,
        ".",
        "",
    ],
)
def test_names_that_our_writer_cannot_have_given_are_refused_and_nothing_is_removed(
    name: str, tmp_path: Path, cache_dir: Path
) -> None:
    leave_entry(cache_dir)
    entry = cache_dir / ROOT / KEY
    users = _users_folder(tmp_path)
    shutil.copytree(users, entry / "users")
    (entry / DATA_NAME).write_bytes(b"mine")
    document = json.loads((entry / "manifest.json").read_bytes())
    document["files"]["name"][0] = name
    (entry / "manifest.json").write_text(json.dumps(document))
    before = tree(users), tree(entry / "users")
    with pytest.raises(CacheCorruptError, match="is not a manifest that this package wrote"):
        open_converter(str(entry))
    sweep(cache_dir)
    assert (tree(users), tree(entry / "users")) == before
    assert (entry / DATA_NAME).read_bytes() == b"mine"


def test_a_manifest_that_names_another_attempts_folder_removes_no_file_of_a_live_one(cache_dir: Path) -> None:
    with make_converter(str(cache_dir)) as live:
        entry = cache_dir / ROOT / KEY
        url = leave_entry(cache_dir, OTHER_KEY)
        forged = cache_dir / ROOT / OTHER_KEY / "manifest.json"
        forged.write_bytes((entry / "manifest.json").read_bytes())
        with pytest.raises(CacheCorruptError, match="is damaged"):
            open_converter(url)
        sweep(cache_dir)
        assert ids_of(live) == list(range(len(live)))


# Foreign files beside ours --------------------------------------------------------


FOREIGN = [
    "notes.txt",
    f"{ROOT}/notes.txt",
    f"{ROOT}/{KEY}.txt",
    f"{ROOT}/{KEY}/notes.txt",
    f"{ROOT}/{KEY}/{DATA_NAME}",
    f"{ROOT}/{KEY}/lease-mine.json",
    f"{ROOT}/{KEY}/lease-{HEX}.json.bak",
    f"{ROOT}/{KEY}/data-mine.intent",
    f"{ROOT}/{KEY}/notes.{HEX}.tmp",
    f"{ROOT}/{KEY}/data-mine/{DATA_NAME}",
    f"{ROOT}/{KEY}/data-{HEX}.old/{DATA_NAME}",
    f"{ROOT}/{KEY}/DATA/notes.txt",
    f"{ROOT}/{KEY}/DATA/part-0.parquet",
    f"{ROOT}/{KEY}/DATA/{DATA_NAME}.bak",
    f"{ROOT}/{KEY}/DATA/x{DATA_NAME}",
    f"{ROOT}/{KEY}/DATA/.hidden",
    f"{ROOT}/{KEY}/DATA/sub/{DATA_NAME}",
    f"{ROOT}/{KEY}/DATA/part-00007-00000007-0000.parquet/notes.txt",
    f"{ROOT}/mine/data-{HEX}/{DATA_NAME}",
    f"{ROOT}/{KEY.upper()}/data-{HEX}/{DATA_NAME}",
    f"{ROOT}/x{KEY}/data-{HEX}/{DATA_NAME}",
    f"converter-v2/{KEY}/data-{HEX}/{DATA_NAME}",
    f"{KEY}/data-{HEX}/{DATA_NAME}",
]


@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_users_file_at_any_level_stays(name: str, removal: Removal, cache_dir: Path) -> None:
    leave_entry(cache_dir)
    path = cache_dir / name.replace("DATA", _data_folder(cache_dir / ROOT / KEY).name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"mine")
    # What was left in passing is removed once it is old.
    make_old(path, 10_000)
    removal(cache_dir)
    assert path.read_bytes() == b"mine"
    sweep(cache_dir)
    assert path.read_bytes() == b"mine"


def test_ours_go_where_a_users_file_stays(cache_dir: Path) -> None:
    leave_entry(cache_dir)
    data = _data_folder(cache_dir / ROOT / KEY)
    (data / "notes.txt").write_bytes(b"mine")
    sweep(cache_dir)
    assert [name for name, content in tree(cache_dir).items() if content is not None] == [
        f"{ROOT}/.owner",
        str((data / "notes.txt").relative_to(cache_dir)),
    ]


@pytest.mark.parametrize("name", [f"lease-{HEX}.json", f"data-{HEX}.intent", "manifest.json"])
@pytest.mark.parametrize("is_old", [False, True], ids=["new", "old"])
def test_a_users_folder_that_bears_the_name_of_a_small_file_stays(name: str, is_old: bool, cache_dir: Path) -> None:
    (cache_dir / ROOT / KEY / name).mkdir(parents=True)
    (cache_dir / ROOT / ".owner").write_bytes(roots._OWNER_BYTES)
    notes = cache_dir / ROOT / KEY / name / "notes.txt"
    notes.write_bytes(b"mine")
    if is_old:
        make_old(notes.parent, 10_000)
    sweep(cache_dir)
    assert notes.read_bytes() == b"mine"


def test_a_sweep_of_one_root_leaves_another_one_inside_it_alone(cache_dir: Path) -> None:
    leave_entry(cache_dir)
    data = _data_folder(cache_dir / ROOT / KEY)
    for inner in (cache_dir / ROOT, cache_dir / ROOT / KEY, data):
        leave_entry(inner)
        before = tree(inner / ROOT)
        sweep(cache_dir)
        assert tree(inner / ROOT) == before
        assert sweep(inner).num_entries == 1


# Odd directories --------------------------------------------------------------------


def test_a_root_that_somebody_else_made_is_refused(cache_dir: Path) -> None:
    (cache_dir / ROOT / KEY / f"data-{HEX}").mkdir(parents=True)
    (cache_dir / ROOT / KEY / f"data-{HEX}" / DATA_NAME).write_bytes(b"mine")
    before = tree(cache_dir)
    with pytest.raises(CacheNotOwnedError, match=r"holds files but not the marker \.owner"):
        sweep(cache_dir)
    with pytest.raises(CacheNotOwnedError, match="is not a cache entry"):
        open_converter(str(cache_dir / ROOT / KEY))
    assert tree(cache_dir) == before


def test_a_marker_that_is_a_folder_is_no_marker(cache_dir: Path) -> None:
    (cache_dir / ROOT / ".owner").mkdir(parents=True)
    with pytest.raises(CacheNotOwnedError, match=r"holds files but not the marker \.owner"):
        sweep(cache_dir)


def test_a_file_is_no_cache_dir(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ROOT).write_bytes(b"mine")
    before = tree(tmp_path)
    for cache_dir in ("file", "file/below", "cache"):
        with pytest.raises(CacheError, match="is a file, where a directory was expected"):
            sweep(tmp_path / cache_dir)
        with pytest.raises(CacheNotOwnedError, match="is not a cache entry"):
            open_converter(str(tmp_path / cache_dir))
    assert tree(tmp_path) == before


def test_the_home_directory_may_be_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _users_folder(tmp_path)
    (tmp_path / KEY).mkdir()
    before = tree(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    sweep("~")
    url = leave_entry(Path("~"))
    assert url == f"file://{tmp_path}/{ROOT}/{KEY}"
    assert sweep("~").num_entries == 1
    assert {name: content for name, content in tree(tmp_path).items() if not name.startswith(ROOT)} == before
    with pytest.raises(CacheNotOwnedError, match="is not a cache entry"):
        open_converter("~")


def test_the_root_of_the_disk_is_no_entry(tmp_path: Path) -> None:
    for url in ("/", "file:///", f"/{KEY}", "//", "/.."):
        with pytest.raises(CacheNotOwnedError, match="is not a cache entry"):
            open_converter(url)
    assert run_python(sweep_below_a_root_of_its_own, str(tmp_path)) in (["bin", ROOT], "not permitted")
    assert not os.path.exists(f"/{ROOT}")


def sweep_below_a_root_of_its_own(directory: str) -> list[str] | str:
    """Sweep `/` where `/` is `directory`, for those who may change that; else say so and do nothing."""
    (Path(directory) / "bin").mkdir()
    (Path(directory) / "bin" / DATA_NAME).write_bytes(b"mine")
    # Once before, so that all modules are loaded that will not be found after.
    leave_entry(Path(directory))
    sweep(directory)
    try:
        os.chroot(directory)
        os.chdir("/")
    except PermissionError:
        return "not permitted"
    sweep("/")
    leave_entry(Path("/"))
    assert sweep("/").num_entries == 1
    assert Path("/bin", DATA_NAME).read_bytes() == b"mine"
    return sorted(os.listdir("/"))


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%20b", "a b", "a::b", "ä", "..."])
def test_a_cache_dir_with_signs_of_urls_in_its_name_is_that_directory(name: str, tmp_path: Path) -> None:
    url = leave_entry(tmp_path / name)
    other = leave_entry(tmp_path / "a")
    with open_converter(url) as converter:
        assert converter.url == url
        assert pickle.loads(pickle.dumps(converter)).url == url
        converter.delete()
    assert set(tree(tmp_path / name)) == {ROOT, f"{ROOT}/.owner"}
    with open_converter(other) as converter:
        assert ids_of(converter) == list(range(len(converter)))


def test_a_url_with_dots_reaches_no_folder_without_a_marker(tmp_path: Path, cache_dir: Path) -> None:
    leave_entry(cache_dir)
    users = tmp_path / KEY
    shutil.copytree(cache_dir / ROOT / KEY, users)
    before = tree(users)
    for url in (f"{cache_dir}/{ROOT}/../../{KEY}", f"file://{cache_dir}/../{KEY}", f"{cache_dir}/{ROOT}/{KEY}/.."):
        with pytest.raises(CacheNotOwnedError, match="is not a cache entry"):
            open_converter(url)
    assert tree(users) == before


def test_a_dry_run_changes_nothing_at_all(cache_dir: Path) -> None:
    leave_entry(cache_dir)
    before = tree(cache_dir)
    times = {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*") if path.is_file()}
    assert sweep(cache_dir, dry_run=True).num_entries == 1
    assert tree(cache_dir) == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_dry_run_makes_no_directory(cache_dir: Path) -> None:
    assert sweep(cache_dir, dry_run=True).num_entries == 0
    assert not cache_dir.exists()


def test_two_keys_of_one_root_are_two_entries(cache_dir: Path) -> None:
    root = roots.open_root(str(cache_dir))
    first, other = commit_entry(root, KEY), commit_entry(root, OTHER_KEY)
    first.delete()
    assert not (cache_dir / ROOT / KEY).exists()
    assert entries.find_damage(other.folder, other.manifest) is None
    other.delete()
    assert set(tree(cache_dir)) == {ROOT, f"{ROOT}/.owner"}
