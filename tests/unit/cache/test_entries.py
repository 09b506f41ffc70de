"""The hashed directory: nothing is read that was not committed, nothing is removed that is not ours."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest
from fsspec.implementations.local import LocalFileSystem

from converter import open_converter
from converter import sweep as sweep_cache
from converter.cache import entries, leases, removal, roots, sweeps
from converter.errors import CacheCorruptError, CacheError, CacheNotConfiguredError, CacheNotOwnedError
from converter.manifest import Manifest, Origin
from converter.schema import Field, Schema
from converter.sources.spark import identity
from converter.storage.directory import Storage
from converter.storage.local import LocalStorage
from tests.faults.small_entries import NUM_ROWS, ids_of, write_data

KEY = "0123456789abcdef-fedcba9876543210"
OTHER_KEY = "f" * 16 + "-" + "0" * 16


@pytest.fixture
def root(cache_dir: Path) -> Iterator[Storage]:
    root = roots.open_root(str(cache_dir))
    yield root
    # Tests end with signs of life that nobody gives back, as a process that is killed does.
    for lease in list(leases.heartbeat._leases):
        if lease.entry.url.startswith(root.url):
            leases.heartbeat.remove(lease)


def commit(root: Storage, **options: Any) -> tuple[entries.Attempt, Manifest, leases.Lease]:
    """A committed entry, and the lease of its maker."""
    attempt, manifest = write_attempt(root, **options)
    committed, lease = entries.commit(root, attempt, manifest)
    assert committed is manifest
    return attempt, manifest, lease


def signs(ours: Path) -> list[str]:
    """The leases and intents that stand in the entry."""
    return [path.name for path in (ours / KEY).iterdir() if path.name.startswith("lease-") or ".intent" in path.name]


def silence(path: Path, seconds: float = 1e6) -> None:
    """As if its owner had been silent for so long."""
    moment = path.stat().st_mtime - seconds
    os.utime(path, (moment, moment))


@pytest.fixture
def ours(cache_dir: Path) -> Path:
    """Our subdirectory of the user's cache directory, as a path."""
    return cache_dir / "converter-v1"


def write_attempt(root: Storage, *, files: int = 2, mark: str = "a") -> tuple[entries.Attempt, Manifest]:
    """An attempt whose executors are done: its files, and the manifest that the driver would commit."""
    attempt = entries.begin(root, KEY, application_id="app-1")
    data = root.below(KEY, attempt.data_directory)
    data.make_directory()
    names = [f"part-{number:05d}-{number + 10:08x}-0000.parquet" for number in range(files)]
    for number, name in enumerate(names):
        assert data.put_if_absent(name, mark.encode() * (100 + number))
    manifest = Manifest(
        schema=Schema((Field(name="x", dtype="float32"),)),
        file_names=tuple(f"{attempt.data_directory}/{name}" for name in names),
        file_bytes=np.arange(files, dtype=np.int64) + 100,
        row_group_file=np.arange(files, dtype=np.int64),
        row_group_rows=np.full(files, 5, np.int64),
        row_group_bytes=np.full(files, 20, np.int64),
        fingerprint=mark * 32,
        num_rows=5 * files,
        statistics={},
    )
    return attempt, manifest


def tree(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


class FailsAt(LocalFileSystem):
    """The local filesystem, whose n-th removal of a file fails; it notes the names that were removed before."""

    cachable = False

    def __init__(self, failing_call: int) -> None:
        super().__init__()
        self.failing_call = failing_call
        self.removed: list[str] = []

    def rm_file(self, path: str) -> None:
        if len(self.removed) == self.failing_call:
            raise OSError(5, "Input/output error", path)
        super().rm_file(path)
        self.removed.append(path.rpartition("/")[2])


def failing(root: Storage, failing_call: int) -> tuple[Storage, FailsAt]:
    filesystem = FailsAt(failing_call)
    return LocalStorage(root.path(), filesystem), filesystem


# Our own subdirectory


def test_a_new_cache_directory_is_made_and_marked(cache_dir: Path, ours: Path) -> None:
    root = roots.open_root(str(cache_dir / "deep" / "down"))
    assert root.url == f"file://{cache_dir}/deep/down/converter-v1"
    marker = json.loads((cache_dir / "deep" / "down" / "converter-v1" / ".owner").read_bytes())
    assert marker["package"] == "spark-tensor-converter"


def test_opening_again_leaves_the_marker_and_everything_else_alone(cache_dir: Path, ours: Path) -> None:
    roots.open_root(str(cache_dir))
    (ours / ".owner").write_bytes(b"as it was")
    (ours / "other").write_bytes(b"x")
    assert roots.open_root(str(cache_dir)).url == f"file://{ours}"
    assert (ours / ".owner").read_bytes() == b"as it was"
    assert tree(ours) == [".owner", "other"]


def test_the_user_may_keep_other_things_in_the_cache_directory(cache_dir: Path, ours: Path) -> None:
    cache_dir.mkdir()
    (cache_dir / "thesis.tex").write_bytes(b"precious")
    roots.open_root(str(cache_dir))
    assert tree(cache_dir) == ["converter-v1", "converter-v1/.owner", "thesis.tex"]


def test_an_empty_subdirectory_becomes_ours(cache_dir: Path, ours: Path) -> None:
    ours.mkdir(parents=True)
    roots.open_root(str(cache_dir))
    assert tree(ours) == [".owner"]


@pytest.mark.parametrize("name", ["file", "folder/file", ".hidden"])
def test_a_subdirectory_that_somebody_else_made_is_refused_and_left_alone(
    cache_dir: Path, ours: Path, name: str
) -> None:
    (ours / name).parent.mkdir(parents=True)
    (ours / name).write_bytes(b"x")
    before = tree(cache_dir)
    with pytest.raises(CacheNotOwnedError, match=r"converter-v1 holds files but not the marker \.owner") as raised:
        roots.open_root(str(cache_dir))
    assert raised.value.path == f"file://{ours}"
    assert tree(cache_dir) == before


def test_a_cache_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(CacheError, match="converter-v1 is a file, where a directory was expected"):
        roots.open_root(str(tmp_path / "file"))
    (tmp_path / "converter-v1").write_bytes(b"x")
    with pytest.raises(CacheError, match="converter-v1 is a file, where a directory was expected"):
        roots.open_root(str(tmp_path))


def test_a_cache_directory_that_cannot_be_written_is_explained() -> None:
    # Nobody, root included, makes directories in /proc.
    with pytest.raises(CacheError, match=r"file:///proc/cache cannot be written: No such file or directory") as raised:
        roots.open_root("/proc/cache")
    assert raised.value.path == "file:///proc/cache"
    assert isinstance(raised.value.__cause__, OSError)


def test_a_cache_directory_that_is_not_local_is_refused() -> None:
    with pytest.raises(CacheError, match=r"cache_dir='memory://cache' is in this process's memory"):
        roots.open_root("memory://cache")


# Begin, commit, load


def test_an_attempt_is_announced_before_it_writes_and_is_no_entry(root: Storage, ours: Path) -> None:
    attempt = entries.begin(root, KEY, application_id="app-7")
    assert tree(ours / KEY) == [f"data-{attempt.attempt_id}.intent"]
    intent = json.loads((ours / KEY / attempt.intent.name).read_bytes())
    assert intent["application_id"] == "app-7"
    assert intent["pid"] == os.getpid()
    assert {"host", "process_start", "created"} < set(intent)
    assert entries.load(root, KEY) is None
    assert entries.adopt(root, KEY) is None


def test_two_attempts_never_share_a_folder(root: Storage) -> None:
    attempts = [entries.begin(root, KEY, application_id="a") for _ in range(3)]
    assert len({attempt.data_directory for attempt in attempts}) == 3


def test_what_was_committed_is_loaded_and_held_by_its_maker(root: Storage, ours: Path) -> None:
    attempt, manifest = write_attempt(root)
    committed, lease = entries.commit(root, attempt, manifest)
    assert committed is manifest
    assert entries.load(root, KEY).to_json() == manifest.to_json()
    assert signs(ours) == [lease.name]


def test_an_entry_that_is_not_there_is_none_and_not_an_error(root: Storage, ours: Path) -> None:
    assert entries.load(root, KEY) is None
    assert entries.adopt(root, KEY) is None
    assert tree(ours) == [".owner"]


def test_a_committed_file_that_is_no_manifest_is_corrupt(root: Storage, ours: Path) -> None:
    attempt, manifest = write_attempt(root)
    entries.commit(root, attempt, manifest)
    (ours / KEY / "manifest.json").write_bytes(manifest.to_json()[:-40])
    with pytest.raises(CacheCorruptError, match=r"manifest\.json is not a manifest that this package wrote"):
        entries.load(root, KEY)


def test_a_manifest_of_several_attempts_is_corrupt(root: Storage, ours: Path) -> None:
    attempt, manifest = write_attempt(root)
    entries.commit(root, attempt, manifest)
    path = ours / KEY / "manifest.json"
    document = json.loads(path.read_bytes())
    document["files"]["name"][1] = f"data-{'0' * 32}/part-00001-0000000b-0000.parquet"
    path.write_text(json.dumps(document))
    with pytest.raises(CacheCorruptError, match="lists files of several attempts"):
        entries.load(root, KEY)


def test_a_commit_refuses_when_the_driver_does_not_see_a_file(root: Storage, ours: Path) -> None:
    attempt, manifest = write_attempt(root)
    (ours / KEY / manifest.file_names[1]).unlink()
    with pytest.raises(CacheError, match=r"wrote .*part-00001.*, but as seen by the driver it is not there") as raised:
        entries.commit(root, attempt, manifest)
    assert str(raised.value.path).endswith(manifest.file_names[1])
    assert not (ours / KEY / "manifest.json").exists()


def test_a_commit_refuses_when_no_file_is_seen_at_all(root: Storage) -> None:
    attempt, manifest = write_attempt(root)
    for name in manifest.file_names:
        root.below(KEY).delete_file(name)
    root.below(KEY, attempt.data_directory).delete_directory_if_empty()
    with pytest.raises(CacheError, match=r"part-00000.* as seen by the driver it is not there"):
        entries.commit(root, attempt, manifest)


@pytest.mark.parametrize("content", [b"", b"a" * 99, b"a" * 101])
def test_a_commit_refuses_a_file_of_another_size(root: Storage, ours: Path, content: bytes) -> None:
    attempt, manifest = write_attempt(root)
    (ours / KEY / manifest.file_names[0]).write_bytes(content)
    with pytest.raises(CacheError, match=rf"part-00000.* has {len(content)} bytes instead of 100"):
        entries.commit(root, attempt, manifest)
    assert entries.load(root, KEY) is None


def test_the_loser_of_a_race_adopts_the_winner_and_leaves_nothing(root: Storage, ours: Path) -> None:
    first, manifest = write_attempt(root, mark="a")
    second, other = write_attempt(root, mark="b")
    _, first_lease = entries.commit(root, first, manifest)
    adopted, lease = entries.commit(root, second, other)
    assert adopted.fingerprint == "a" * 32
    assert adopted.file_names == manifest.file_names
    assert not [name for name in tree(ours) if second.attempt_id in name]
    assert all((ours / KEY / name).exists() for name in manifest.file_names)
    assert sorted(signs(ours)) == sorted([first_lease.name, lease.name])


# Abandon and delete


def test_an_abandoned_attempt_leaves_nothing(root: Storage, ours: Path) -> None:
    attempt, _ = write_attempt(root)
    entries.abandon(root, attempt)
    assert tree(ours) == [".owner"]


def test_abandoning_before_the_first_file_leaves_nothing(root: Storage, ours: Path) -> None:
    entries.abandon(root, entries.begin(root, KEY, application_id="a"))
    assert tree(ours) == [".owner"]


def test_abandoning_one_attempt_leaves_the_others(root: Storage, ours: Path) -> None:
    attempt, manifest = write_attempt(root, mark="a")
    other, _ = write_attempt(root, mark="b")
    entries.abandon(root, other)
    assert entries.commit(root, attempt, manifest)[0] is manifest
    assert not [name for name in tree(ours) if other.attempt_id in name]


def test_a_deleted_entry_leaves_only_the_marker(root: Storage, ours: Path) -> None:
    _, manifest, lease = commit(root)
    entries.delete(root, KEY, manifest, lease)
    assert tree(ours) == [".owner"]


def test_deleting_twice_does_nothing_more(root: Storage, ours: Path) -> None:
    _, manifest, lease = commit(root)
    entries.delete(root, KEY, manifest, lease)
    entries.delete(root, KEY, manifest, lease)
    assert tree(ours) == [".owner"]


def test_deleting_leaves_another_entry_alone(root: Storage, ours: Path) -> None:
    _, manifest, lease = commit(root)
    (ours / OTHER_KEY).mkdir()
    (ours / OTHER_KEY / "manifest.json").write_bytes(b"{}")
    entries.delete(root, KEY, manifest, lease)
    assert tree(ours) == [".owner", OTHER_KEY, f"{OTHER_KEY}/manifest.json"]


@pytest.mark.parametrize("name", ["notes.txt", "part-0.parquet", "part-00000-0000000a-0000.parquet.bak", "probes"])
def test_a_foreign_file_among_ours_stays_and_is_named(
    root: Storage, ours: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    attempt, manifest, lease = commit(root)
    (ours / KEY / attempt.data_directory / name).write_bytes(b"precious")
    with caplog.at_level(logging.WARNING, logger="converter.cache"):
        entries.delete(root, KEY, manifest, lease)
    assert tree(ours) == [
        ".owner",
        KEY,
        f"{KEY}/{attempt.data_directory}",
        f"{KEY}/{attempt.data_directory}/{name}",
    ]
    assert "Left 1 files" in caplog.text
    assert name in caplog.text


def test_a_folder_that_bears_our_pattern_is_no_file_of_ours(root: Storage, ours: Path) -> None:
    attempt, manifest, lease = commit(root)
    folder = ours / KEY / attempt.data_directory / "part-00009-0000000a-0000.parquet"
    folder.mkdir()
    (folder / "precious").write_bytes(b"x")
    entries.delete(root, KEY, manifest, lease)
    assert (folder / "precious").exists()


def test_a_foreign_file_beside_the_manifest_stays(root: Storage, ours: Path) -> None:
    _, manifest, lease = commit(root)
    (ours / KEY / "notes.txt").write_bytes(b"precious")
    entries.delete(root, KEY, manifest, lease)
    assert tree(ours) == [".owner", KEY, f"{KEY}/notes.txt"]


@pytest.mark.parametrize("failing_call", range(4))
def test_the_manifest_goes_first_wherever_a_removal_fails(root: Storage, ours: Path, failing_call: int) -> None:
    _, manifest, lease = commit(root, files=2)
    broken, filesystem = failing(root, failing_call)
    with pytest.raises(CacheError, match=r"failed to .*Input/output error"):
        entries.delete(broken, KEY, manifest, lease)
    # Readers find a whole entry, or none.
    if failing_call == 0:
        assert entries.load(root, KEY).to_json() == manifest.to_json()
        assert all((ours / KEY / name).exists() for name in manifest.file_names)
        return
    assert filesystem.removed[0] == "manifest.json"
    assert entries.load(root, KEY) is None
    # And whoever tries again finishes.
    entries.delete(root, KEY, manifest, lease)
    assert tree(ours) == [".owner"]


# Leases: who lets go last removes the data


def test_an_entry_that_others_hold_is_deleted_when_the_last_lets_go(root: Storage, ours: Path) -> None:
    _, manifest, lease = commit(root)
    others = [entries.adopt(root, KEY), entries.adopt(root, KEY)]
    entries.delete(root, KEY, manifest, lease)
    assert entries.load(root, KEY) is None
    assert entries.adopt(root, KEY) is None
    for adopted in others:
        assert all((ours / KEY / name).exists() for name in manifest.file_names)
        assert adopted is not None
        entries.let_go(root, KEY, adopted.manifest, adopted.lease)
    assert tree(ours) == [".owner"]


def test_letting_go_of_an_entry_that_nobody_deleted_keeps_it(root: Storage, ours: Path) -> None:
    _, manifest, lease = commit(root)
    entries.let_go(root, KEY, manifest, lease)
    assert signs(ours) == []
    assert entries.load(root, KEY).to_json() == manifest.to_json()


def test_deleting_an_old_entry_leaves_the_one_that_was_written_after_it(root: Storage, ours: Path) -> None:
    _, manifest, lease = commit(root, mark="a")
    entries.delete(root, KEY, manifest, lease)
    _, again, _ = commit(root, mark="b")
    entries.delete(root, KEY, manifest, None)
    assert entries.load(root, KEY).fingerprint == "b" * 32
    assert all((ours / KEY / name).exists() for name in again.file_names)


def test_the_heartbeat_lives_exactly_while_there_is_a_lease(root: Storage) -> None:
    def beating() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "converter-heartbeat"]

    assert beating() == []
    _, manifest, lease = commit(root)
    adopted = entries.adopt(root, KEY)
    assert adopted is not None
    assert beating() == ["converter-heartbeat"]
    entries.let_go(root, KEY, manifest, lease)
    assert beating() == ["converter-heartbeat"]
    entries.let_go(root, KEY, adopted.manifest, adopted.lease)
    assert beating() == []


def test_a_renewal_is_a_new_sign_of_life(root: Storage, ours: Path) -> None:
    attempt, _ = write_attempt(root)
    _, _, lease = commit(root, mark="b")
    for name in (attempt.intent.name, lease.name):
        silence(ours / KEY / name)
        before = (ours / KEY / name).stat().st_mtime
        content = (ours / KEY / name).read_bytes()
        leases.heartbeat.renew()
        assert (ours / KEY / name).stat().st_mtime - before > 3 * leases.RENEW_SECONDS
        assert (ours / KEY / name).read_bytes() == content


def test_a_lease_that_was_swept_knows_it_is_lost_and_does_not_come_back(
    root: Storage, ours: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, _, lease = commit(root)
    (ours / KEY / lease.name).unlink()
    with caplog.at_level(logging.WARNING, logger="converter.cache"):
        leases.heartbeat.renew()
        leases.heartbeat.renew()
    assert lease.lost
    assert signs(ours) == []
    assert caplog.text.count("was taken for dead and swept") == 1


def test_a_commit_whose_attempt_was_swept_withdraws(root: Storage, ours: Path) -> None:
    attempt, manifest = write_attempt(root)
    (ours / KEY / attempt.intent.name).unlink()
    with pytest.raises(CacheError, match=r"took longer than its sign of life: .* Convert again"):
        entries.commit(root, attempt, manifest)
    assert tree(ours) == [".owner"]


# Sweeping: nothing that lives, nothing that is not ours


def sweep(root: Storage, **options: Any) -> removal.SweepReport:
    return sweeps.sweep_root(root, older_than_seconds=0, kept=True, **options)


def die(ours: Path, name: str) -> None:
    """As if the process behind a sign of life had ended: another one has its number now."""
    sign = json.loads((ours / KEY / name).read_bytes())
    (ours / KEY / name).write_text(json.dumps(sign | {"process_start": "1"}))


def test_what_lives_is_not_swept(root: Storage, ours: Path) -> None:
    commit(root)
    write_attempt(root, mark="b")
    before = tree(ours)
    assert sweep(root) == removal.SweepReport()
    assert tree(ours) == before


@pytest.mark.parametrize("death", [die, lambda ours, name: silence(ours / KEY / name)], ids=["gone", "silent"])
def test_what_the_dead_left_is_counted_and_swept(root: Storage, ours: Path, death: Any) -> None:
    _, _, lease = commit(root)
    attempt, _ = write_attempt(root, files=3, mark="b")
    for name in (lease.name, attempt.intent.name):
        death(ours, name)
    before = tree(ours)
    report = sweep(root, dry_run=True)
    assert (report.num_entries, report.num_attempts, report.num_files) == (1, 1, 5)
    assert report.num_bytes == 100 + 101 + 100 + 101 + 102
    assert set(report.urls) == {root.below(KEY).url}
    assert tree(ours) == before
    assert sweep(root) == report
    assert tree(ours) == [".owner"]
    assert sweep(root) == removal.SweepReport()


def test_an_entry_is_swept_when_it_was_idle_for_long_enough(root: Storage, ours: Path) -> None:
    _, manifest, lease = commit(root)
    entries.let_go(root, KEY, manifest, lease)
    assert sweeps.sweep_root(root, older_than_seconds=3600, kept=True).num_files == 0
    for path in (*(ours / KEY).iterdir(), ours / KEY):
        silence(path, 7200)
    assert sweeps.sweep_root(root, older_than_seconds=3600, kept=True).num_files == 2
    assert tree(ours) == [".owner"]


def test_an_entry_kept_on_purpose_is_swept_only_where_that_is_asked_for(root: Storage, ours: Path) -> None:
    attempt, manifest = write_attempt(root)
    manifest, lease = entries.commit(root, attempt, dataclasses.replace(manifest, is_kept=True))
    entries.let_go(root, KEY, manifest, lease)
    before = tree(ours)
    assert sweeps.sweep_root(root, older_than_seconds=0) == removal.SweepReport(num_kept=1)
    # One that was used just now is not even left: it is too young.
    assert sweeps.sweep_root(root, older_than_seconds=1e9) == removal.SweepReport()
    assert sweeps.sweep_root(root, older_than_seconds=1e9, kept=True) == removal.SweepReport()
    assert sweeps.sweep_root(root, older_than_seconds=0, name_hash=OTHER_KEY[:16]) == removal.SweepReport()
    assert tree(ours) == before
    assert sweeps.sweep_root(root, older_than_seconds=0, kept=True, dry_run=True).num_files == 2
    assert sweeps.sweep_root(root, older_than_seconds=0, name_hash=KEY[:16]).num_files == 2


def test_an_entry_whose_manifest_nobody_can_read_is_swept(root: Storage, ours: Path) -> None:
    _, manifest, lease = commit(root)
    leases.release(lease)
    (ours / KEY / "manifest.json").write_bytes(manifest.to_json()[:-40])
    assert sweep(root).num_files == 2
    assert not (ours / KEY / manifest.file_names[0]).exists()


def test_an_entry_of_a_newer_version_is_left_to_it(root: Storage, ours: Path) -> None:
    _, _, lease = commit(root)
    leases.release(lease)
    (ours / KEY / "manifest.json").write_text('{"format_version": 99}')
    before = tree(ours)
    assert sweep(root) == removal.SweepReport()
    assert tree(ours) == before


def test_a_lease_whose_content_is_on_its_way_holds_everything(root: Storage, ours: Path) -> None:
    _, manifest, lease = commit(root)
    leases.release(lease)
    (ours / KEY / "manifest.json").unlink()
    other = ours / KEY / f"lease-{'0' * 32}.json"
    other.touch()
    sweep(root)
    assert all((ours / KEY / name).exists() for name in manifest.file_names)
    other.unlink()
    sweep(root)
    assert not any((ours / KEY / name).exists() for name in manifest.file_names)


def test_a_sweep_leaves_what_is_not_ours(root: Storage, ours: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "precious" / f"data-{'0' * 32}"
    elsewhere.mkdir(parents=True)
    (elsewhere / "part-00000-0000000a-0000.parquet").write_bytes(b"x")
    (ours / "notes").mkdir()
    (ours / "notes" / "part-00000-0000000a-0000.parquet").write_bytes(b"x")
    (ours / OTHER_KEY).symlink_to(tmp_path / "precious")
    (ours / KEY).mkdir()
    (ours / KEY / elsewhere.name).symlink_to(elsewhere)
    before = tree(tmp_path)
    assert sweep(root).num_files == 0
    assert tree(tmp_path) == before


def test_a_bounded_sweep_looks_at_no_more_entries(root: Storage, ours: Path) -> None:
    for number in range(5):
        (ours / f"{number:016x}-{'0' * 16}").mkdir()
    # An empty folder is removed by the look at it.
    sweep(root, max_entries=2)
    assert len([path for path in ours.iterdir() if path.is_dir()]) == 3


# Opening by URL


def test_an_entry_is_opened_by_its_url(root: Storage) -> None:
    commit(root)
    found, key, manifest = entries.open_entry(root.below(KEY).url + "/")
    assert (found.url, key) == (root.url, KEY)
    assert manifest is not None


@pytest.mark.parametrize("name", ["manifest.json", "0" * 33, KEY + "0", "data-" + "0" * 32, ""])
def test_a_url_that_names_no_entry_is_refused(root: Storage, name: str) -> None:
    with pytest.raises(CacheNotOwnedError, match=r"is not a cache entry: expected <cache_dir>/converter-v1/<key>"):
        entries.open_entry(f"{root.url}/{name}")


def test_a_folder_below_somebody_elses_is_no_entry(tmp_path: Path) -> None:
    (tmp_path / KEY).mkdir()
    with pytest.raises(CacheNotOwnedError, match="is not a cache entry"):
        entries.open_entry(str(tmp_path / KEY))
    assert tree(tmp_path) == [KEY]


# Opening by name


def name_entry(cache_dir: Path, cache_key: str, *, schema: str = "{}", is_kept: bool = True) -> str:
    """The URL of an entry that was written as `cache_key` and that nobody holds."""
    root = roots.open_root(str(cache_dir))
    named = identity.named(cache_key)
    key = identity.entry_key(named, schema=schema, write_options={"is_kept": True} if is_kept else {})
    attempt = entries.begin(root, key, application_id="app-1")
    origin = Origin(
        cache_key=cache_key, created="2026-11-20T01:02:03+00:00", host="h", application_id="a", user="u",
        source="DataFrame",
    )  # fmt: skip
    manifest = dataclasses.replace(write_data(root, attempt, is_kept=is_kept), origin=origin)
    entries.let_go(root, key, *entries.commit(root, attempt, manifest))
    return root.below(key).url


def test_an_entry_is_opened_by_its_name(tmp_path: Path) -> None:
    url = name_entry(tmp_path, "flights-2026-11-20")
    name_entry(tmp_path, "flights-2026-11-21")
    with open_converter(tmp_path, cache_key="flights-2026-11-20") as converter:
        assert converter.url == url
        assert converter.cache_key == "flights-2026-11-20"
        assert ids_of(converter) == list(range(NUM_ROWS))
        html = "cache_key &#x27;flights-2026-11-20&#x27;, written 2026-11-20T01:02:03+00:00 of DataFrame by u on h (a)"
        assert html in converter._repr_html_()
        assert "\n" not in repr(converter)
        assert pickle.loads(pickle.dumps(converter)).cache_key == "flights-2026-11-20"
    with open_converter(url, cache_key="flights-2026-11-20") as converter:
        assert converter.url == url
    with pytest.raises(CacheError, match=r"was not written with cache_key='flights-2026-11-21'"):
        open_converter(url, cache_key="flights-2026-11-21")


def test_opening_by_name_reads_no_other_manifest(tmp_path: Path) -> None:
    for number in range(3):
        Path(name_entry(tmp_path, f"other-{number}").removeprefix("file://"), "manifest.json").write_bytes(b"{")
    name_entry(tmp_path, "mine")
    with open_converter(tmp_path, cache_key="mine") as converter:
        assert len(converter) == NUM_ROWS


def test_a_name_of_several_entries_lists_them(tmp_path: Path) -> None:
    urls = [name_entry(tmp_path, "flights", schema=schema) for schema in ("{}", "[]")]
    said = r"2 entries of cache_key='flights', with different schemas or write options\. Open one of them by its URL:"
    with pytest.raises(CacheError, match=said) as raised:
        open_converter(tmp_path, cache_key="flights")
    for url in urls:
        assert f"\n  {url} (written 2026-11-20T01:02:03+00:00, 24 rows, 2 columns)" in str(raised.value)


def test_of_a_name_the_entry_that_is_kept_is_opened(tmp_path: Path) -> None:
    name_entry(tmp_path, "flights", is_kept=False)
    with open_converter(tmp_path, cache_key="flights") as converter:
        assert not converter._manifest.is_kept
    url = name_entry(tmp_path, "flights", is_kept=True)
    with open_converter(tmp_path, cache_key="flights") as converter:
        assert converter.url == url


def test_a_name_that_is_not_there_says_which_ones_are(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"has no entry of cache_key='flights': it holds no entries\. Write it with"):
        open_converter(tmp_path, cache_key="flights")
    for number in range(3):
        name_entry(tmp_path, f"day-{number}")
    with pytest.raises(
        CacheError, match=r"its 3 entries have 'day-0', 'day-1', 'day-2'\. Write it with make_spark_con"
    ):
        open_converter(tmp_path, cache_key="flights")
    for number in range(3, 23):
        name_entry(tmp_path, f"day-{number}")
    with pytest.raises(CacheError, match=r"the 20 newest of its 23 entries have 'day-\d+', ") as raised:
        open_converter(tmp_path, cache_key="flights")
    assert str(raised.value).count("'day-") == 20
    with pytest.raises(CacheNotOwnedError, match=r"or a cache_dir together with cache_key=…"):
        open_converter(tmp_path)


def test_a_named_entry_that_is_corrupt_says_so(tmp_path: Path) -> None:
    Path(name_entry(tmp_path, "flights").removeprefix("file://"), "manifest.json").write_bytes(b"{")
    with pytest.raises(CacheCorruptError, match="is not a manifest that this package wrote"):
        open_converter(tmp_path, cache_key="flights")


@pytest.mark.parametrize(("cache_key", "error"), [(7, TypeError), (" ", ValueError)])
def test_a_name_that_is_none_is_refused(tmp_path: Path, cache_key: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="cache_key must"):
        open_converter(tmp_path, cache_key=cache_key)
    with pytest.raises(error, match="cache_key must"):
        sweep_cache(tmp_path, cache_key=cache_key)


def test_a_sweep_by_name_removes_the_entries_of_that_name_alone(tmp_path: Path) -> None:
    other, passing = name_entry(tmp_path, "other"), name_entry(tmp_path, "passing", is_kept=False)
    urls = [name_entry(tmp_path, "flights", is_kept=is_kept) for is_kept in (True, False)]
    with open_converter(urls[0]) as held:
        report = sweep_cache(tmp_path, cache_key="flights")
        assert (report.num_entries, report.urls) == (1, (urls[1],))
        assert ids_of(held) == list(range(NUM_ROWS))
    assert sweep_cache(tmp_path, cache_key="flights", older_than=3600) == removal.SweepReport()
    assert sweep_cache(tmp_path, cache_key="flights", dry_run=True).urls == (urls[0],)
    assert sweep_cache(tmp_path, cache_key="flights").urls == (urls[0],)
    for url in (other, passing):
        with open_converter(url) as converter:
            assert len(converter) == NUM_ROWS


# Where the cache goes


def choose(argument: Any = None, conf: str | None = None, master: str = "yarn", is_connect: bool = False) -> str:
    return roots.choose_cache_dir(argument, spark_conf=conf, master=master, is_connect=is_connect)


def test_the_cache_goes_where_the_nearest_word_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERTER_CACHE_DIR", "/environment")
    assert choose("/argument", conf="/conf", master="local[2]") == "/argument"
    assert choose(Path("/argument"), conf="/conf") == "/argument"
    assert choose(conf="/conf", master="local[2]") == "/environment"
    monkeypatch.delenv("CONVERTER_CACHE_DIR")
    assert choose(conf="/conf", master="local[2]") == "/conf"
    assert choose(master="local[2]") == platformdirs.user_cache_dir("spark-tensor-converter")


def test_an_empty_environment_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERTER_CACHE_DIR", "")
    assert choose(conf="/conf") == "/conf"


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]", "local[4,2]"])
def test_local_mode_needs_no_word(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.delenv("CONVERTER_CACHE_DIR", raising=False)
    assert choose(master=master) == platformdirs.user_cache_dir("spark-tensor-converter")


@pytest.mark.parametrize("master", ["yarn", "spark://local:7077", "k8s://local[2]", "local-cluster[2,1,1024]", ""])
def test_a_cluster_without_a_word_is_asked_for_one(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.delenv("CONVERTER_CACHE_DIR", raising=False)
    said = r"runs on the cluster .*cache_dir=….* CONVERTER_CACHE_DIR, .* converter\.cacheDir"
    with pytest.raises(CacheNotConfiguredError, match=said):
        choose(master=master)


def test_connect_is_never_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONVERTER_CACHE_DIR", raising=False)
    with pytest.raises(CacheNotConfiguredError, match="Spark Connect, whose local disk is the server's"):
        choose(master="local[2]", is_connect=True)
    assert choose("/argument", is_connect=True) == "/argument"
