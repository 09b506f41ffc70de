"""An entry appears whole or not at all, and goes only when no process uses it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from converter.cache import entries, leases
from converter.cache.roots import MANIFEST
from converter.errors import CacheCorruptError, CacheError
from converter.storage.directory import FileInfo, Storage
from converter.storage.local import LocalStorage
from tests.folders import paths_below
from tests.unit.cache.written import KEY, OTHER_KEY, commit, signs, silence, write_attempt


class FailsAt(LocalStorage):
    """A local directory where the n-th removal of a file fails; it notes the names that were removed before."""

    failing_call: int
    removed: list[str]

    def below(self, *names: str) -> Storage:
        return type(self)(self.path(*names), base=self._base)

    def delete_file(self, name: str) -> None:
        if len(self.removed) == self.failing_call:
            raise OSError(5, "Input/output error", self.path(name))
        super().delete_file(name)
        self.removed.append(name)


class SeesNoFolder(LocalStorage):
    """The local store, that answers the first listing of an entry as if the folder were not there."""

    denied: list[str]

    def below(self, *names: str) -> Storage:
        return type(self)(self.path(*names), base=self._base)

    def list(self) -> list[FileInfo]:
        if self.url.endswith(KEY) and not self.denied:
            self.denied.append(self.url)
            return []
        return super().list()


class DeniesOnce(LocalFileSystem):
    """The local filesystem, which says once of a file that is there that it is not."""

    cachable = False

    def __init__(self, ending: str) -> None:
        super().__init__()
        self._ending = ending
        self.num_denied = 0

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
        if path.endswith(self._ending) and not self.num_denied:
            self.num_denied += 1
            raise FileNotFoundError(path)
        return bytes(super().cat_file(path, *arguments, **options))


def failing(root: Storage, failing_call: int) -> tuple[Storage, list[str]]:
    removed: list[str] = []
    here = type("FailsHere", (FailsAt,), {"failing_call": failing_call, "removed": removed})
    return here(root.path()), removed


def test_an_attempt_is_announced_before_it_writes_and_is_no_entry(root: Storage, ours: Path) -> None:
    attempt = entries.begin(root, KEY, application_id="app-7")
    assert paths_below(ours / KEY) == [f"data-{attempt.attempt_id}.intent"]
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
    held = entries.commit(root, attempt, manifest)
    assert held.manifest is manifest
    assert entries.load(root, KEY).to_json() == manifest.to_json()
    assert signs(ours) == [held.lease.name]


def test_an_entry_that_is_not_there_is_none_and_not_an_error(root: Storage, ours: Path) -> None:
    assert entries.load(root, KEY) is None
    assert entries.adopt(root, KEY) is None
    assert paths_below(ours) == [".owner"]


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
    with pytest.raises(CacheCorruptError, match="lists files of several writes"):
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
    won = entries.commit(root, first, manifest)
    adopted = entries.commit(root, second, other)
    assert adopted.manifest.fingerprint == "a" * 32
    assert adopted.manifest.file_names == manifest.file_names
    assert not [name for name in paths_below(ours) if second.attempt_id in name]
    assert all((ours / KEY / name).exists() for name in manifest.file_names)
    assert sorted(signs(ours)) == sorted([won.lease.name, adopted.lease.name])


def test_a_commit_does_not_adopt_a_damaged_entry(root: Storage, ours: Path) -> None:
    """First seen in `python -m tests.faults.campaign store --case 62:78 --steps 0,1,2,3,5,7,8`."""
    before = commit(root, mark="a")
    before.release()
    (ours / KEY / before.manifest.file_names[0]).unlink()
    attempt, manifest = write_attempt(root, mark="b")
    held = entries.commit(root, attempt, manifest)
    assert held.manifest is manifest
    assert entries.load(root, KEY).fingerprint == "b" * 32
    assert not [name for name in paths_below(ours) if entries.attempt_of(before.manifest) in name]


def test_a_commit_whose_attempt_was_swept_withdraws(root: Storage, ours: Path) -> None:
    attempt, manifest = write_attempt(root)
    (ours / KEY / attempt.intent.name).unlink()
    with pytest.raises(CacheError, match=r"stopped renewing its lease in .* was removed\. Convert again"):
        entries.commit(root, attempt, manifest)
    assert paths_below(ours) == [".owner"]


def test_an_abandoned_attempt_leaves_nothing(root: Storage, ours: Path) -> None:
    attempt, _ = write_attempt(root)
    entries.abandon(root, attempt)
    assert paths_below(ours) == [".owner"]


def test_abandoning_before_the_first_file_leaves_nothing(root: Storage, ours: Path) -> None:
    entries.abandon(root, entries.begin(root, KEY, application_id="a"))
    assert paths_below(ours) == [".owner"]


def test_abandoning_one_attempt_leaves_the_others(root: Storage, ours: Path) -> None:
    attempt, manifest = write_attempt(root, mark="a")
    other, _ = write_attempt(root, mark="b")
    entries.abandon(root, other)
    assert entries.commit(root, attempt, manifest).manifest is manifest
    assert not [name for name in paths_below(ours) if other.attempt_id in name]


def test_a_deleted_entry_leaves_only_the_marker(root: Storage, ours: Path) -> None:
    held = commit(root)
    held.delete()
    assert paths_below(ours) == [".owner"]


def test_deleting_twice_does_nothing_more(root: Storage, ours: Path) -> None:
    held = commit(root)
    held.delete()
    held.delete()
    assert paths_below(ours) == [".owner"]


def test_deleting_leaves_another_entry_alone(root: Storage, ours: Path) -> None:
    held = commit(root)
    (ours / OTHER_KEY).mkdir()
    (ours / OTHER_KEY / "manifest.json").write_bytes(b"{}")
    held.delete()
    assert paths_below(ours) == [".owner", OTHER_KEY, f"{OTHER_KEY}/manifest.json"]


@pytest.mark.parametrize("name", ["notes.txt", "part-0.parquet", "part-00000-0000000a-0000.parquet.bak", "probes"])
def test_a_foreign_file_among_ours_stays_and_is_named(
    root: Storage, ours: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    held = commit(root)
    data_directory = f"data-{entries.attempt_of(held.manifest)}"
    (ours / KEY / data_directory / name).write_bytes(b"precious")
    with caplog.at_level(logging.WARNING, logger="converter.cache"):
        held.delete()
    assert paths_below(ours) == [
        ".owner",
        KEY,
        f"{KEY}/{data_directory}",
        f"{KEY}/{data_directory}/{name}",
    ]
    assert "Left 1 files" in caplog.text
    assert name in caplog.text


def test_a_folder_that_bears_our_pattern_is_no_file_of_ours(root: Storage, ours: Path) -> None:
    held = commit(root)
    data_directory = f"data-{entries.attempt_of(held.manifest)}"
    folder = ours / KEY / data_directory / "part-00009-0000000a-0000.parquet"
    folder.mkdir()
    (folder / "precious").write_bytes(b"x")
    held.delete()
    assert (folder / "precious").exists()


def test_a_foreign_file_beside_the_manifest_stays(root: Storage, ours: Path) -> None:
    held = commit(root)
    (ours / KEY / "notes.txt").write_bytes(b"precious")
    held.delete()
    assert paths_below(ours) == [".owner", KEY, f"{KEY}/notes.txt"]


@pytest.mark.parametrize("failing_call", range(4))
def test_the_manifest_goes_first_wherever_a_removal_fails(root: Storage, ours: Path, failing_call: int) -> None:
    held = commit(root, files=2)
    broken, removed = failing(root, failing_call)
    with pytest.raises(CacheError, match=r"failed to .*Input/output error"):
        dataclasses.replace(held, root=broken).delete()
    # Readers find a whole entry, or none.
    if failing_call == 0:
        assert entries.load(root, KEY).to_json() == held.manifest.to_json()
        assert all((ours / KEY / name).exists() for name in held.manifest.file_names)
        return
    assert removed[0] == "manifest.json"
    assert entries.load(root, KEY) is None
    # And whoever tries again finishes.
    held.delete()
    assert paths_below(ours) == [".owner"]


def test_an_entry_that_others_hold_is_deleted_when_the_last_lets_go(root: Storage, ours: Path) -> None:
    held = commit(root)
    others = [entries.adopt(root, KEY), entries.adopt(root, KEY)]
    held.delete()
    assert entries.load(root, KEY) is None
    assert entries.adopt(root, KEY) is None
    for adopted in others:
        assert all((ours / KEY / name).exists() for name in held.manifest.file_names)
        assert adopted is not None
        adopted.release()
    assert paths_below(ours) == [".owner"]


def test_letting_go_of_an_entry_that_nobody_deleted_keeps_it(root: Storage, ours: Path) -> None:
    held = commit(root)
    held.release()
    assert signs(ours) == []
    assert entries.load(root, KEY).to_json() == held.manifest.to_json()


def test_a_store_that_denies_the_manifest_once_does_not_cost_the_data(root: Storage, ours: Path) -> None:
    # Found by python -m tests.faults.campaign store.
    entry = commit(root)
    filesystem = DeniesOnce(MANIFEST)
    dataclasses.replace(entry, root=LocalStorage(root.path(), filesystem)).release()
    assert filesystem.num_denied == 1
    adopted = entries.adopt(root, KEY)
    assert adopted is not None
    assert adopted.damage is None


def test_one_listing_that_shows_no_folder_does_not_cost_the_data_that_another_process_reads(
    root: Storage, ours: Path
) -> None:
    # python -m tests.faults.campaign store --case 63:210 --steps 1,2,5,6
    entry = commit(root)
    reader = entries.adopt(root, KEY)
    assert reader is not None
    denied: list[str] = []
    denying = type("SeesNoFolderOnce", (SeesNoFolder,), {"denied": denied})(root.path())
    dataclasses.replace(entry, root=denying).delete()
    assert len(denied) == 1
    assert entries.find_damage(reader.folder, reader.manifest) is None
    reader.release()
    assert paths_below(ours) == [".owner"]


@pytest.mark.parametrize("is_released", [False, True])
def test_a_store_that_denies_a_lease_once_does_not_cost_the_entry_in_use(
    root: Storage, ours: Path, monkeypatch: pytest.MonkeyPatch, is_released: bool
) -> None:
    # Found by python -m tests.faults.campaign store.
    held = commit(root)
    entry = root.below(KEY)
    infos, now = entry.list(), entry.now()
    if is_released:
        held.release()
    filesystem = DeniesOnce(".json")
    denying = LocalStorage(entry.path(), filesystem)
    # Its owner is not looked for, so that only what it holds is read.
    monkeypatch.setattr(leases, "is_dead", lambda *arguments, **options: False)
    assert leases.held_attempts(denying, infos, now=now) == (
        set() if is_released else {entries.attempt_of(held.manifest)}
    )
    assert filesystem.num_denied == 1


def test_a_manifest_that_can_be_read_at_a_second_look_is_not_discarded(root: Storage, ours: Path) -> None:
    # Found by python -m tests.faults.campaign store.
    commit(root)
    entries.discard(root, KEY)
    assert entries.load(root, KEY) is not None
    (ours / KEY / MANIFEST).write_bytes(b"{")
    entries.discard(root, KEY)
    assert entries.load(root, KEY) is None


def test_a_manifest_that_another_process_is_about_to_fill_stays(root: Storage, ours: Path) -> None:
    # python -m tests.faults.campaign store --case 41:2778 --steps 3,6,7
    held = commit(root)
    held.delete()
    _, manifest = write_attempt(root)
    # As stores show it on which a file is seen before its content.
    (ours / KEY / MANIFEST).touch()
    entries.discard(root, KEY)
    dataclasses.replace(held, lease=None).delete()
    assert (ours / KEY / MANIFEST).exists()

    (ours / KEY / MANIFEST).write_bytes(manifest.to_json())
    entries.discard(root, KEY)
    assert entries.load(root, KEY).to_json() == manifest.to_json()


def test_a_manifest_whose_writer_is_dead_goes_and_the_writer_sees_it_if_it_wakes_up(root: Storage, ours: Path) -> None:
    attempt, manifest = write_attempt(root)
    (ours / KEY / MANIFEST).touch()
    silence(ours / KEY / attempt.intent.name)
    entries.discard(root, KEY)
    assert not (ours / KEY / MANIFEST).exists()
    with pytest.raises(CacheError, match="stopped renewing its lease"):
        entries.commit(root, attempt, manifest)


def test_a_commit_waits_for_the_process_that_fills_the_manifest(
    root: Storage, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_FILL_SECONDS", 0.01)
    first, manifest = write_attempt(root, mark="a")
    second, other = write_attempt(root, mark="b")
    (ours / KEY / MANIFEST).touch()

    class FilledAtThirdLook(LocalFileSystem):
        cachable = False
        num_looks = 0

        def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
            self.num_looks += 1
            if self.num_looks == 3:
                (ours / KEY / MANIFEST).write_bytes(manifest.to_json())
            return bytes(super().cat_file(path, *arguments, **options))

    adopted = entries.commit(LocalStorage(root.path(), FilledAtThirdLook()), second, other)
    assert adopted.manifest.fingerprint == "a" * 32
    entries.abandon(root, first)
    assert all((ours / KEY / name).exists() for name in manifest.file_names)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_commit_puts_its_manifest_in_place_of_one_that_nobody_fills(
    root: Storage, ours: Path, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    monkeypatch.setattr(entries, "_FILL_SECONDS", 0.01)
    attempt, manifest = write_attempt(root)
    if not is_alone:
        write_attempt(root)
    # Its own request was cut, or another process died.
    (ours / KEY / MANIFEST).write_bytes(manifest.to_json()[:-40])
    if is_alone:
        assert entries.commit(root, attempt, manifest).manifest is manifest
        assert entries.load(root, KEY).to_json() == manifest.to_json()
    else:
        with pytest.raises(CacheCorruptError, match="is not a manifest"):
            entries.commit(root, attempt, manifest)
        assert (ours / KEY / MANIFEST).exists()


@pytest.mark.parametrize("is_damaged", [True, False])
def test_an_entry_is_deleted_as_damaged_only_if_a_second_look_finds_that_too(
    root: Storage, ours: Path, is_damaged: bool
) -> None:
    commit(root)
    held = entries.adopt(root, KEY)
    assert held is not None
    if is_damaged:
        (ours / KEY / held.manifest.file_names[0]).unlink()
    held.delete_if_damaged()
    assert (entries.load(root, KEY) is None) == is_damaged
    assert len(signs(ours)) == 1


def test_deleting_an_old_entry_leaves_the_one_that_was_written_after_it(root: Storage, ours: Path) -> None:
    held = commit(root, mark="a")
    held.delete()
    again = commit(root, mark="b").manifest
    dataclasses.replace(held, lease=None).delete()
    assert entries.load(root, KEY).fingerprint == "b" * 32
    assert all((ours / KEY / name).exists() for name in again.file_names)


def test_an_entry_that_was_written_anew_in_between_is_not_adopted(root: Storage, ours: Path) -> None:
    first = commit(root)
    known = first.manifest
    first.delete()
    second = commit(root)
    # Whoever still knows the first manifest would hold files that are gone, under a lease on them.
    assert entries.adopt(root, KEY, known) is None
    assert len(signs(ours)) == 1
    second.delete()


def test_an_entry_of_a_store_that_goes_away_meanwhile_is_released_in_a_hurry(root: Storage) -> None:
    # Found by python -m tests.faults.campaign store.
    class Away(LocalFileSystem):
        cachable = False
        num_reads = 0
        hurry: float | None = None

        def __init__(self) -> None:
            super().__init__()
            self.removed_within: list[float | None] = []

        def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
            self.num_reads += 1
            if self.num_reads > 1:
                raise TimeoutError("no answer")
            return bytes(super().cat_file(path, *arguments, **options))

    class Hurried(LocalStorage):
        def below(self, *names: str) -> Storage:
            return Hurried(self.path(*names), self._filesystem, base=self._base)

        def delete_file(self, name: str) -> None:
            filesystem.removed_within.append(filesystem.hurry)
            super().delete_file(name)

        @contextlib.contextmanager
        def hurried(self, timeout_seconds: float) -> Iterator[None]:
            filesystem.hurry = timeout_seconds
            yield
            filesystem.hurry = None

    commit(root)
    filesystem = Away()
    with pytest.raises(CacheError, match="no answer"):
        entries.adopt(Hurried(root.path(), filesystem), KEY)
    assert filesystem.removed_within == [leases.HURRY_SECONDS]
