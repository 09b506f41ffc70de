"""Sweeping removes nothing that lives, and nothing that is not ours."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from converter import make, open_converter
from converter import sweep as sweep_cache
from converter.cache import entries, leases, removal, roots, sweeps
from converter.errors import CacheError
from converter.storage.directory import Storage
from converter.storage.local import LocalStorage
from tests.faults.small_entries import NUM_ROWS, commit_entry, ids_of
from tests.folders import paths_below
from tests.unit.cache.written import KEY, OTHER_KEY, commit, name_entry, silence, write_attempt


def sweep(root: Storage, **options: Any) -> removal.SweepReport:
    return sweeps.sweep_root(root, older_than_seconds=0, kept=True, **options)


def die(ours: Path, name: str) -> None:
    """As if the process behind a sign of life had ended: another one has its number now."""
    sign = json.loads((ours / KEY / name).read_bytes())
    (ours / KEY / name).write_text(json.dumps(sign | {"process_start": "1"}))


def test_what_lives_is_not_swept(root: Storage, ours: Path) -> None:
    commit(root)
    write_attempt(root, mark="b")
    before = paths_below(ours)
    assert sweep(root) == removal.SweepReport()
    assert paths_below(ours) == before


@pytest.mark.parametrize("death", [die, lambda ours, name: silence(ours / KEY / name)], ids=["gone", "silent"])
def test_what_the_dead_left_is_counted_and_swept(root: Storage, ours: Path, death: Any) -> None:
    held = commit(root)
    attempt, _ = write_attempt(root, files=3, mark="b")
    for name in (held.lease.name, attempt.intent.name):
        death(ours, name)
    before = paths_below(ours)
    report = sweep(root, dry_run=True)
    assert (report.num_entries, report.num_attempts, report.num_files) == (1, 1, 5)
    assert report.num_bytes == 100 + 101 + 100 + 101 + 102
    assert set(report.urls) == {root.below(KEY).url}
    assert paths_below(ours) == before
    assert sweep(root) == report
    assert paths_below(ours) == [".owner"]
    assert sweep(root) == removal.SweepReport()


def test_an_entry_is_swept_when_it_was_idle_for_long_enough(root: Storage, ours: Path) -> None:
    held = commit(root)
    held.release()
    assert sweeps.sweep_root(root, older_than_seconds=3600, kept=True).num_files == 0
    for path in (*(ours / KEY).iterdir(), ours / KEY):
        silence(path, 7200)
    assert sweeps.sweep_root(root, older_than_seconds=3600, kept=True).num_files == 2
    assert paths_below(ours) == [".owner"]


def test_an_entry_kept_on_purpose_is_swept_only_where_that_is_asked_for(root: Storage, ours: Path) -> None:
    attempt, manifest = write_attempt(root)
    held = entries.commit(root, attempt, dataclasses.replace(manifest, is_kept=True))
    held.release()
    before = paths_below(ours)
    assert sweeps.sweep_root(root, older_than_seconds=0) == removal.SweepReport(num_kept=1)
    # One that was used just now is not even left: it is too young.
    assert sweeps.sweep_root(root, older_than_seconds=1e9) == removal.SweepReport()
    assert sweeps.sweep_root(root, older_than_seconds=1e9, kept=True) == removal.SweepReport()
    assert sweeps.sweep_root(root, older_than_seconds=0, name_hash=OTHER_KEY[:16]) == removal.SweepReport()
    assert paths_below(ours) == before
    assert sweeps.sweep_root(root, older_than_seconds=0, kept=True, dry_run=True).num_files == 2
    assert sweeps.sweep_root(root, older_than_seconds=0, name_hash=KEY[:16]).num_files == 2


def test_an_entry_whose_manifest_nobody_can_read_is_swept(root: Storage, ours: Path) -> None:
    held = commit(root)
    leases.release(held.lease)
    (ours / KEY / "manifest.json").write_bytes(held.manifest.to_json()[:-40])
    assert sweep(root).num_files == 2
    assert not (ours / KEY / held.manifest.file_names[0]).exists()


def test_an_entry_of_a_newer_version_is_left_to_it(root: Storage, ours: Path) -> None:
    held = commit(root)
    leases.release(held.lease)
    (ours / KEY / "manifest.json").write_text('{"format_version": 99}')
    before = paths_below(ours)
    assert sweep(root) == removal.SweepReport()
    assert paths_below(ours) == before


def test_a_lease_whose_content_is_on_its_way_holds_everything(root: Storage, ours: Path) -> None:
    held = commit(root)
    leases.release(held.lease)
    (ours / KEY / "manifest.json").unlink()
    other = ours / KEY / f"lease-{'0' * 32}.json"
    other.touch()
    sweep(root)
    assert all((ours / KEY / name).exists() for name in held.manifest.file_names)
    other.unlink()
    sweep(root)
    assert not any((ours / KEY / name).exists() for name in held.manifest.file_names)


def test_a_sweep_leaves_what_is_not_ours(root: Storage, ours: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "precious" / f"data-{'0' * 32}"
    elsewhere.mkdir(parents=True)
    (elsewhere / "part-00000-0000000a-0000.parquet").write_bytes(b"x")
    (ours / "notes").mkdir()
    (ours / "notes" / "part-00000-0000000a-0000.parquet").write_bytes(b"x")
    (ours / OTHER_KEY).symlink_to(tmp_path / "precious")
    (ours / KEY).mkdir()
    (ours / KEY / elsewhere.name).symlink_to(elsewhere)
    before = paths_below(tmp_path)
    assert sweep(root).num_files == 0
    assert paths_below(tmp_path) == before


def test_a_bounded_sweep_looks_at_no_more_entries(root: Storage, ours: Path) -> None:
    for number in range(5):
        (ours / f"{number:016x}-{'0' * 16}").mkdir()
    # An empty folder is removed by the look at it.
    sweep(root, max_entries=2)
    assert len([path for path in ours.iterdir() if path.is_dir()]) == 3


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


def test_a_store_that_is_away_is_waited_for_once_and_not_for_each_entry(root: Storage) -> None:
    class Away(LocalFileSystem):
        cachable = False
        num_asked = 0

        def cat_file(self, path: str, *arguments: Any, **options: Any) -> bytes:
            self.num_asked += 1
            raise TimeoutError("no answer for 120 seconds")

    for key in (KEY, OTHER_KEY):
        root.below(key).make_directory()
    filesystem = Away()
    with pytest.raises(CacheError, match="failed to sweep root: no answer for 120 seconds"):
        sweep(LocalStorage(root.path(), filesystem))
    assert filesystem.num_asked == 1


def test_a_lease_that_an_old_listing_lacks_is_seen_at_a_second_look(root: Storage, ours: Path) -> None:
    # Found by python -m tests.faults.campaign store.
    held = commit(root)

    class Stale(LocalFileSystem):
        cachable = False
        num_listings = 0

        def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
            infos = super().ls(path, detail=detail, **options)
            self.num_listings += str(path).endswith(KEY)
            is_old = str(path).endswith(KEY) and self.num_listings == 1
            return [info for info in infos if not (is_old and "lease-" in info["name"])]

    assert sweep(LocalStorage(root.path(), Stale())) == removal.SweepReport()
    assert entries.load(root, KEY) is not None
    held.release()
    assert sweep(root).num_entries == 1


def test_a_manifest_that_a_writer_whom_an_old_listing_lacks_is_about_to_fill_stays(root: Storage, ours: Path) -> None:
    # Beside python -m tests.faults.campaign store --case 41:2778 --steps 3,6,7
    attempt, manifest = write_attempt(root)
    (ours / KEY / roots.MANIFEST).touch()

    class Stale(LocalFileSystem):
        cachable = False
        is_old = True

        def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
            infos = super().ls(path, detail=detail, **options)
            if not str(path).endswith(KEY) or not self.is_old:
                return infos
            self.is_old = False
            return [info for info in infos if attempt.attempt_id not in info["name"]]

    assert sweep(LocalStorage(root.path(), Stale())) == removal.SweepReport()
    assert (ours / KEY / roots.MANIFEST).exists()
    (ours / KEY / roots.MANIFEST).write_bytes(manifest.to_json())
    assert entries.load(root, KEY) is not None


def test_an_entry_that_is_used_without_a_lease_is_not_swept_by_the_converter_that_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found by python -m tests.faults.campaign store.
    entry = commit_entry(roots.open_root(str(tmp_path)))
    entry.release_lease()
    monkeypatch.setattr(make, "write_dataframe", lambda *_, **options: dataclasses.replace(entry, lease=None))
    with make.make_spark_converter(None, cache_dir=tmp_path) as converter:
        assert ids_of(converter) == list(range(NUM_ROWS))
