"""Sweeps: after each write and by `sweep`, what killed processes left is removed once their leases are dead."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace

from converter.cache.entries import attempt_of, delete_corrupt, is_in_use, load_manifest, says_it_is_kept
from converter.cache.finding import is_entry
from converter.cache.leases import RENEW_SECONDS, held_attempts, held_now, is_dead
from converter.cache.removal import SweepReport, abort_orphaned, delete_data, is_link, is_ours
from converter.cache.roots import ATTEMPT_PATTERN, LEASE_PATTERN, MANIFEST, PASSING_PATTERN, named_errors
from converter.errors import CacheCorruptError, CacheError
from converter.manifest import Manifest
from converter.storage.directory import FileInfo, Storage

logger = logging.getLogger(__name__)

_MAX_SWEPT = 64
"""Entries that `sweep_after_write` looks at: each costs a listing. A guess."""


def sweep_after_write(root: Storage) -> None:
    """Sweep a bounded part of a cache; errors are logged, because the caller's own work is done already."""
    try:
        report = sweep_root(root, older_than_seconds=0, max_entries=_MAX_SWEPT)
    except (OSError, CacheError) as error:
        logger.info("Did not sweep %s: %s", root.url, error)
        return
    if report.num_files:
        logger.info(
            "Swept %d files (%d bytes) that dead owners left in %s", report.num_files, report.num_bytes, root.url
        )


@named_errors
def sweep_root(
    root: Storage,
    *,
    older_than_seconds: float,
    kept: bool = False,
    name_hash: str | None = None,
    dry_run: bool = False,
    max_entries: int | None = None,
) -> SweepReport:
    """Remove what dead owners left below `root`; nothing that a live lease holds.

    Removes committed entries that were idle for `older_than_seconds`, and unfinished writes whose writer is dead.
    Kept entries are removed only with `kept`, or with `name_hash`, which restricts the sweep to the keys that begin
    with it.
    """
    # Before the listing: whoever begins an upload has put an intent by then.
    uploads = [] if dry_run or name_hash is not None else root.uploads()
    infos = root.list()
    keys = {info.name for info in infos}
    abort_orphaned(root, uploads, lambda key, _: key in keys)
    entries = [info for info in infos if is_entry(info, name_hash)]
    passing = [] if name_hash is not None else [info for info in infos if PASSING_PATTERN.fullmatch(info.name)]
    if not entries and not passing:
        return SweepReport()
    now = root.now()
    for info in passing:
        if now - info.modified > 3 * RENEW_SECONDS and not dry_run:
            root.delete_file(info.name)
    takes_kept = kept or name_hash is not None
    report = SweepReport()
    first_error: Exception | None = None
    # A random sample, so that repeated bounded sweeps reach every entry.
    sample = random.sample(entries, min(len(entries), max_entries or len(entries)))  # nosec B311
    for info in sample:
        try:
            own = [upload for upload in uploads if upload[0].startswith(f"{info.name}/")]
            report += _sweep_entry(root, info, now, older_than_seconds, own, takes_kept=takes_kept, dry_run=dry_run)
        except TimeoutError:
            # The store is away: each of the others would wait as long.
            raise
        except (OSError, CacheError) as error:
            # An entry that cannot be read, perhaps another user's, must not stop the sweep of the others.
            first_error = first_error or error
    if first_error is not None:
        raise CacheError(
            f"An entry below {root.url} could not be swept, the others were ({str(first_error).rstrip('.')}). Sweep "
            "again later, or as the user who wrote it.",
            path=root.url,
        ) from first_error
    return replace(report, urls=tuple(sorted(report.urls)))


def _sweep_entry(
    root: Storage,
    folder: FileInfo,
    now: float,
    older_than: float,
    uploads: Sequence[tuple[str, str]],
    *,
    takes_kept: bool,
    dry_run: bool,
) -> SweepReport:
    key = folder.name
    entry = root.below(key)
    infos = [info for info in entry.list() if not (info.is_directory and not ATTEMPT_PATTERN.fullmatch(info.name))]
    infos = [info for info in infos if not (info.is_directory and info.name.endswith(".intent"))]
    manifest, is_corrupt = None, False
    try:
        manifest = load_manifest(root, key)
    except CacheCorruptError as error:
        is_corrupt = True
        if not takes_kept and says_it_is_kept(entry):
            logger.warning("Left a kept entry that cannot be read: %s", error)
            return SweepReport(num_kept=1)
    except CacheError as error:
        # Written by a newer version, or a folder of the user's in the manifest's place.
        logger.info("Left %s alone: %s", entry.url, error)
        return SweepReport()
    held = held_attempts(entry, infos, now=now)
    committed = None if manifest is None else attempt_of(manifest)
    report = SweepReport()
    if manifest is not None and committed not in held:
        # The folder's own time changes when a lease appears or disappears, so it shows the last use.
        idle = now - max([folder.modified, *(info.modified for info in infos)])
        if idle >= older_than and manifest.is_kept and not takes_kept:
            report += SweepReport(num_kept=1)
        elif idle >= older_than and (dry_run or committed not in held_now(entry)):
            # Listed twice: a lease may be new, or the first listing an old one.
            report += SweepReport(num_entries=1, urls=(entry.url,))
            if not dry_run:
                entry.delete_file(MANIFEST)
            committed = None
    attempts = {match[1] for info in infos if (match := ATTEMPT_PATTERN.fullmatch(info.name))}
    # No listing shows an attempt that has only them. And what is committed is whole without them.
    writing = {f"data-{attempt_id}" for attempt_id in attempts - {committed}}
    abort_orphaned(root, uploads, lambda _, data_folder: data_folder in writing)
    for attempt_id in sorted(attempts - held - {committed or ""}):
        report += _sweep_attempt(root, key, attempt_id, manifest, is_corrupt=is_corrupt, dry_run=dry_run)
    if not dry_run:
        if is_corrupt and not held:
            delete_corrupt(root, key)
        for info in infos:
            is_dead_lease = LEASE_PATTERN.fullmatch(info.name) and is_dead(entry, info, now=now)
            is_leftover = PASSING_PATTERN.fullmatch(info.name) and now - info.modified > 3 * RENEW_SECONDS
            if is_dead_lease or is_leftover:
                entry.delete_file(info.name)
        entry.delete_directory_if_empty()
    return report


def _sweep_attempt(
    root: Storage, key: str, attempt_id: str, manifest: Manifest | None, *, is_corrupt: bool, dry_run: bool
) -> SweepReport:
    """Remove a dead attempt; `manifest` and `is_corrupt` are as they were when the leases were listed."""
    entry = root.below(key)
    was_committed = manifest is not None and attempt_of(manifest) == attempt_id
    counted = SweepReport() if was_committed else SweepReport(num_attempts=1, urls=(entry.url,))
    directory_name = f"data-{attempt_id}"
    if dry_run:
        if is_link(entry, directory_name):
            return counted
        files = [info for info in entry.below(directory_name).list() if is_ours(info)]
        return counted + SweepReport(num_files=len(files), num_bytes=sum(info.num_bytes for info in files))
    # First the intent, then the manifest again: a writer that commits now sees that its intent is gone.
    entry.delete_file(f"{directory_name}.intent")
    # A manifest that became corrupt meanwhile may name this attempt.
    if is_in_use(root, key, attempt_id, if_corrupt=not is_corrupt):
        return SweepReport()
    return counted + delete_data(entry, directory_name)
