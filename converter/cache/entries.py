"""The hashed cache directory: begin, commit, adopt, delete, sweep.

    <cache_dir>/converter-v1/.owner                       ownership marker
    <cache_dir>/converter-v1/<key>/data-<attempt>/        one attempt's Parquet files, private by its uuid
    <cache_dir>/converter-v1/<key>/data-<attempt>.intent  written before the job starts, renewed while it runs
    <cache_dir>/converter-v1/<key>/manifest.json          the commit
    <cache_dir>/converter-v1/<key>/lease-<uuid>.json      one for each user of the entry, renewed while it lives

The laws. A directory without a manifest does not exist for readers. Nothing is
renamed, nothing is locked: each step is one small file that appears or
disappears, and each party looks again after its own step, so that of two that
meet at least one sees the other:

- who **adopts** puts a lease, then reads the manifest again: gone means let go;
- who **deletes** removes the manifest, then lists the leases, and removes the data
  only if there is none: whoever lets go last removes the data;
- who **sweeps** a dead attempt removes its intent, then reads the manifest and the leases again;
  who **commits** puts a lease, looks for its intent, puts the manifest, and looks for its intent
  again: gone means withdraw, the way one deletes.

Only what our manifest lists, or what bears our pattern of names inside our own
`data-<attempt>` folders, is ever removed; what lies behind a link never is.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from dataclasses import dataclass
from typing import NamedTuple

from converter.cache.leases import (
    HURRY_SECONDS,
    Lease,
    heartbeat,
    held_now,
    put_lease,
    put_sign,
    release,
    release_if_any,
    sign_of_life,
)
from converter.cache.removal import delete_data, delete_uncommitted, is_ours, leads_elsewhere
from converter.cache.roots import DIRECTORY, KEY_PATTERN, MANIFEST, OWNER_FILE, find_root, named_errors
from converter.errors import CacheCorruptError, CacheError, CacheNotOwnedError
from converter.manifest import Manifest
from converter.storage.directory import FileInfo, Storage, StorageOptions
from converter.storage.opening import open_storage
from converter.storage.store import TIMEOUT_SECONDS
from converter.storage.urls import shown_url

logger = logging.getLogger(__name__)
_MAX_TRIES = 100
"""How often a step is begun again because another process was in between; a store that always says so is broken."""

_MAX_NAMES_READ = 20
_ABANDON_LOOKS = 10
_ABANDON_SECONDS = 2.0
_KEPT_SIGN = b'"is_kept":true'


class Adopted(NamedTuple):
    """An entry that another conversion wrote, and that this process uses."""

    manifest: Manifest
    lease: Lease | None
    """None where none can be written: then nobody waits for this reader."""

    damage: CacheCorruptError | None
    """What to say of a file that is not as the manifest says, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at writing an entry; its uuid makes its folder private."""

    key: str
    attempt_id: str
    intent: Lease

    @property
    def data_directory(self) -> str:
        """The folder of its Parquet files, below the entry."""
        return f"data-{self.attempt_id}"


def names_entry(url: str) -> bool:
    """Whether a URL ends as `DatasetConverter.url` of an entry does."""
    return bool(KEY_PATTERN.fullmatch(url.rstrip("/").rpartition("/")[2]))


def open_entry(
    url: str, storage_options: StorageOptions | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> tuple[Storage, str, Manifest | None]:
    """The root, the key and the manifest of an entry's folder, as `DatasetConverter.url` names it.

    Raises:
        CacheNotOwnedError: it is no folder that this package made.
        CacheCorruptError, CacheError: as `load`.
    """
    entry_url, _, key = url.rstrip("/").rpartition("/")
    root = open_storage(entry_url or "/", storage_options, timeout_seconds)
    if KEY_PATTERN.fullmatch(key):
        committed = root.meanwhile(lambda: load(root, key))
        if root.size(OWNER_FILE) is not None:
            return root, key, committed()
    shown = shown_url(url)
    raise CacheNotOwnedError(
        f"{shown} is not a cache entry: expected <cache_dir>/{DIRECTORY}/<key>, as converter.url names it, or a "
        "cache_dir together with cache_key=….",
        path=shown,
    )


@named_errors
def list_entries(root: Storage, name_hash: str | None = None) -> list[FileInfo]:
    """The entries' folders, committed or not; with `name_hash` those whose key begins with it."""
    return [info for info in root.list() if is_entry(info, name_hash)]


def is_entry(info: FileInfo, name_hash: str | None) -> bool:
    """Whether a folder has the name of an entry, of the rows that `name_hash` stands for where that is given."""
    is_folder = info.is_directory and not info.is_link and KEY_PATTERN.fullmatch(info.name) is not None
    return is_folder and (name_hash is None or info.name.startswith(f"{name_hash}-"))


def find_named(
    cache_dir: str,
    cache_key: str,
    name_hash: str,
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> tuple[Storage, str, Manifest]:
    """The root, the key and the manifest of the one entry of a cache directory that was written as `cache_key`.

    A kept entry is taken before those that their makers delete.

    Raises:
        CacheError: there is none, or there are several.
        CacheCorruptError: the only one has a manifest that is none.
    """
    shown = shown_url(cache_dir)
    root = find_root(cache_dir, storage_options, timeout_seconds)
    if root is None:
        raise _no_entry(shown, cache_key, "it holds no entries")
    found: list[tuple[str, Manifest]] = []
    corrupt: CacheCorruptError | None = None
    for info in list_entries(root, name_hash):
        try:
            manifest = load(root, info.name)
        except CacheCorruptError as error:
            logger.warning("An entry of cache_key=%r cannot be read: %s", cache_key, error)
            corrupt = error
            continue
        if manifest is not None:
            found.append((info.name, manifest))
    found = [one for one in found if one[1].is_kept] or found
    if len(found) == 1:
        return root, *found[0]
    if found:
        lines = "".join(f"\n  {root.below(key).url} ({_described(manifest)})" for key, manifest in found)
        raise CacheError(
            f"{shown} has {len(found)} entries of cache_key={cache_key!r}, with different schemas or write options. "
            f"Open one of them by its URL:{lines}",
            path=shown,
        )
    raise corrupt or _no_entry(shown, cache_key, _names_in(root))


def _no_entry(shown: str, cache_key: str, what_is_there: str) -> CacheError:
    return CacheError(
        f"{shown} has no entry of cache_key={cache_key!r}: {what_is_there}. Write it with make_spark_converter(df, "
        f"cache_dir=…, cache_key={cache_key!r}, delete_on_exit=False).",
        path=shown,
    )


def _described(manifest: Manifest) -> str:
    """What tells an entry from others of its name."""
    written = "" if manifest.origin is None else f"written {manifest.origin.created}, "
    return f"{written}{manifest.num_rows:,} rows, {len(manifest.schema)} columns"


def _names_in(root: Storage) -> str:
    """Which names a cache has, of a bounded number of entries."""
    entries = list_entries(root)
    if not entries:
        return "it holds no entries"
    newest = sorted(entries, key=lambda info: info.modified, reverse=True)
    names = set()
    for info in newest[:_MAX_NAMES_READ]:
        with contextlib.suppress(CacheError):
            manifest = load(root, info.name)
            if manifest is not None and manifest.origin is not None and manifest.origin.cache_key is not None:
                names.add(manifest.origin.cache_key)
    looked_at = f"its {len(entries)} entries"
    if len(entries) > _MAX_NAMES_READ:
        looked_at = f"the {_MAX_NAMES_READ} newest of {looked_at}"
    return f"{looked_at} have {', '.join(map(repr, sorted(names))) or 'no cache_key'}"


# Write -----------------------------------------------------------------------


@named_errors
def begin(root: Storage, key: str, *, application_id: str) -> Attempt:
    """Announce an attempt before its first byte is written, so that what a dead driver leaves can be told from life."""
    attempt_id = uuid.uuid4().hex
    entry = root.below(key)
    content = sign_of_life(attempt_id, application_id)
    intent = Lease(entry=entry, name=f"data-{attempt_id}.intent", content=content)
    for tries_left in reversed(range(_MAX_TRIES)):
        entry.make_directory()
        try:
            put_sign(intent)
            break
        except FileNotFoundError:
            # Another process removed the last entry of this key, and its empty folder, in between.
            if not tries_left:
                raise
    heartbeat.add(intent)
    return Attempt(key=key, attempt_id=attempt_id, intent=intent)


@named_errors
def commit(root: Storage, attempt: Attempt, manifest: Manifest) -> tuple[Manifest, Lease | None]:
    """Make the attempt the entry's content; where another came first, remove this one and adopt the other's.

    The lease is None only where the other's entry is adopted and no lease can be written.

    Raises:
        CacheError: a file that the executors reported is not there at its size, as seen from here; or the attempt
            was swept because this driver gave no sign of life for too long.
    """
    entry = root.below(attempt.key)
    missing = _missing_file(entry, manifest)
    if missing is not None:
        raise not_shared(missing[0], f"it {missing[1]}")
    try:
        lease = put_lease(entry, attempt.attempt_id)
    except FileNotFoundError as error:
        raise _swept(entry) from error
    adopted = None
    try:
        # After the lease: who sweeps the intent from now on sees the lease.
        if entry.size(attempt.intent.name) is None:
            raise _swept(entry)
        # Put last: a directory without a manifest does not exist for readers.
        tries_left = _MAX_TRIES
        while adopted is None and not entry.put_if_absent(MANIFEST, manifest.to_json()):
            adopted = adopt(root, attempt.key)
            tries_left -= 1
            if adopted is None and not tries_left:
                raise FileExistsError(f"{MANIFEST} can neither be created nor read")
        if adopted is None:
            if entry.size(attempt.intent.name) is None:
                raise _swept(entry)
            release(attempt.intent)
            return manifest, lease
    except BaseException as error:
        # Whatever ends this early: a manifest that was put must not name data that are about to go.
        _withdraw(root, attempt.key, manifest, lease, is_own=False)
        if isinstance(error, FileNotFoundError):
            raise _swept(entry) from error
        raise
    try:
        release(lease)
        abandon(root, attempt)
    except BaseException:
        let_go(root, attempt.key, adopted.manifest, adopted.lease)
        raise
    return adopted.manifest, adopted.lease


def _swept(entry: Storage) -> CacheError:
    """What a writer is told that was taken for dead."""
    return CacheError(
        f"The write into {entry.url} took longer than its sign of life: this driver was suspended, and what it "
        "wrote was swept. Convert again.",
        path=entry.url,
    )


def find_damage(entry: Storage, manifest: Manifest) -> CacheCorruptError | None:
    """What to say unless every file of the manifest is there at its size, as seen from here."""
    missing = _missing_file(entry, manifest)
    if missing is None:
        return None
    path, what = missing
    return CacheCorruptError(
        f"The cache entry {entry.url} is damaged: {path} {what}. Delete the entry, or convert again.", path=path
    )


def _missing_file(entry: Storage, manifest: Manifest) -> tuple[str, str] | None:
    """The first file that is not as the manifest says, and how it is."""
    seen: dict[str, int] = {}
    for directory in _directories(manifest):
        seen |= {f"{directory}/{info.name}": info.num_bytes for info in entry.below(directory).list()}
    for name, num_bytes in zip(manifest.file_names, manifest.file_bytes.tolist(), strict=True):
        found = seen.get(name)
        if found != num_bytes:
            what = "is not there" if found is None else f"has {found} bytes instead of {num_bytes}"
            return f"{entry.url}/{name}", what
    return None


def not_shared(url: str, what: str) -> CacheError:
    """What to say where the driver does not find what the executors wrote."""
    return CacheError(
        f"Spark's executors wrote {url}, but as seen by the driver {what}. Is the cache directory on a disk of its own "
        "on each machine? Choose a cache_dir that the driver and every executor share.",
        path=url,
    )


@named_errors
def abandon(root: Storage, attempt: Attempt) -> None:
    """Remove what an attempt wrote: its data files, its folder, its intent.

    Something went wrong, perhaps with the store, or somebody was interrupted: so it is not waited for as long.
    """
    with root.hurried(HURRY_SECONDS):
        entry = root.below(attempt.key)
        release(attempt.intent)
        if is_in_use(root, attempt.key, attempt.attempt_id, if_corrupt=False):
            return
        data = entry.below(attempt.data_directory)
        for _ in range(_ABANDON_LOOKS):
            delete_uncommitted(entry, attempt.data_directory)
            # A task that is being cancelled may open one more file, and its folder again.
            time.sleep(_ABANDON_SECONDS / _ABANDON_LOOKS)
            if not data.list():
                break
        entry.delete_directory_if_empty()


def is_in_use(root: Storage, key: str, attempt_id: str, *, if_corrupt: bool) -> bool:
    """Whether the manifest names this attempt, which `if_corrupt` says of a corrupt one, or a live lease holds it."""
    try:
        committed = load_manifest(root, key)
        is_named = committed is not None and attempt_of(committed) == attempt_id
    except CacheCorruptError:
        is_named = if_corrupt
    return is_named or attempt_id in held_now(root.below(key))


@named_errors
def delete_unlisted(root: Storage, attempt: Attempt, manifest: Manifest) -> None:
    """Remove what failed and losing task attempts left: files of our naming that nobody reported."""
    listed = {name.rpartition("/")[2] for name in manifest.file_names}
    directory = root.below(attempt.key).below(attempt.data_directory)
    if leads_elsewhere(root.below(attempt.key), attempt.data_directory):
        return
    for info in directory.list():
        if is_ours(info) and info.name not in listed:
            directory.delete_file(info.name)


# Use -------------------------------------------------------------------------


@named_errors
def load(root: Storage, key: str) -> Manifest | None:
    """The committed manifest of an entry, or None where there is none.

    Raises:
        CacheCorruptError: its manifest is not one of ours.
        CacheError: it was written by a newer version of this package, is no file, or the store failed.
    """
    return load_manifest(root, key)


def load_manifest(root: Storage, key: str) -> Manifest | None:
    """The same, with the store's own errors."""
    entry = root.below(key)
    path = f"{entry.url}/{MANIFEST}"
    try:
        data = entry.read(MANIFEST)
    except FileNotFoundError:
        return None
    except (NotADirectoryError, IsADirectoryError) as error:
        # Neither the same as none, nor as a corrupt one: data are removed for both.
        raise CacheError(f"{path} is no file ({error}). Remove what stands in its place.", path=path) from error
    manifest = Manifest.from_json(data, path=path)
    if len(_directories(manifest)) != 1:
        raise CacheCorruptError(f"{path} lists files of several attempts; one was committed.", path=path)
    return manifest


@named_errors
def adopt(root: Storage, key: str, committed: Manifest | None = None) -> Adopted | None:
    """A committed entry and a lease on it, or None where there is none (any more).

    `committed` is its manifest, where that was read a moment ago.
    """
    manifest = committed or load_manifest(root, key)
    if manifest is None:
        return None
    entry = root.below(key)
    # Files that go after they were seen go with their manifest, which is looked for once more.
    damage = entry.meanwhile(lambda: find_damage(entry, manifest))
    lease = None
    try:
        lease = put_lease(entry, attempt_of(manifest))
    except FileNotFoundError:
        return None
    except (OSError, CacheError) as error:
        # A trainer that may only read takes no lease.
        logger.info("Open %s without a lease, because it cannot be written: %s", entry.url, error)
    try:
        again = load_manifest(root, key)
        found = Adopted(manifest, lease, damage())
    except BaseException:
        let_go(root, key, manifest, lease)
        raise
    if again is None or attempt_of(again) != attempt_of(manifest):
        # Deleted in between, maybe by one who did not see the lease yet: letting go removes what is left.
        let_go(root, key, manifest, lease)
        return None
    return found


@named_errors
def delete(root: Storage, key: str, manifest: Manifest, lease: Lease | None) -> None:
    """Remove a committed entry: the manifest first, so that nobody begins to use it; the data when nobody holds it."""
    _withdraw(root, key, manifest, lease, is_own=True)


def _withdraw(root: Storage, key: str, manifest: Manifest, lease: Lease | None, *, is_own: bool) -> None:
    """The same; a corrupt manifest goes with it only where the entry `is_own`."""
    entry = root.below(key)
    try:
        is_linked = leads_elsewhere(root, key)
    except BaseException:
        with root.hurried(HURRY_SECONDS):
            release_if_any(lease)
        raise
    if is_linked:
        logger.warning("Left %s alone: it is a link, which this package does not make.", entry.url)
        release_if_any(lease)
        return
    try:
        try:
            committed = load_manifest(root, key)
            is_named = committed is not None and attempt_of(committed) == attempt_of(manifest)
        except CacheCorruptError:
            is_named = is_own
        if is_named:
            entry.delete_file(MANIFEST)
    except BaseException:
        with root.hurried(HURRY_SECONDS):
            _let_go(root, key, manifest, lease, if_corrupt=is_own)
        raise
    _let_go(root, key, manifest, lease, if_corrupt=is_own)


@named_errors
def let_go(root: Storage, key: str, manifest: Manifest, lease: Lease | None) -> None:
    """Give a lease back; of a deleted entry the last process to do so removes its data."""
    _let_go(root, key, manifest, lease, if_corrupt=True)


def _let_go(root: Storage, key: str, manifest: Manifest, lease: Lease | None, *, if_corrupt: bool) -> None:
    release_if_any(lease)
    entry = root.below(key)
    attempt_id = attempt_of(manifest)
    if is_in_use(root, key, attempt_id, if_corrupt=if_corrupt):
        return
    delete_data(entry, f"data-{attempt_id}")
    entry.delete_file(f"data-{attempt_id}.intent")
    entry.delete_directory_if_empty()


@named_errors
def discard(root: Storage, key: str) -> None:
    """Remove a manifest that cannot be read, so that the entry can be written again."""
    root.below(key).delete_file(MANIFEST)


def _directories(manifest: Manifest) -> set[str]:
    return {name.partition("/")[0] for name in manifest.file_names}


def attempt_of(manifest: Manifest) -> str:
    """Which attempt wrote the files of an entry."""
    return manifest.file_names[0].partition("/")[0].removeprefix("data-")


def says_it_is_kept(entry: Storage) -> bool:
    """Whether a manifest that cannot be read was written for an entry that is kept."""
    try:
        return _KEPT_SIGN in entry.read(MANIFEST)
    except FileNotFoundError:
        return False
