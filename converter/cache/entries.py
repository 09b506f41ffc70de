"""The protocol of one cache entry: begin, commit, adopt, release, delete.

A directory without a manifest does not exist for readers. Nothing is renamed and nothing is locked: each step is one
small file that appears or disappears, and each process looks again after its own step. So of two processes that
interfere, at least one notices:

- **adopt** puts a lease, then reads the manifest again; if it is gone, the lease is released;
- **delete** removes the manifest, then lists the leases, and removes the data only if there is none: the last
  process to release its lease removes the data;
- **sweep** removes a dead attempt's intent, then reads the manifest and the leases again;
- **commit** puts a lease, looks for its intent, puts the manifest, and looks for its intent again; if that is gone,
  the entry is deleted.

On some stores a file is seen before its content, so a manifest that cannot be read may be one that a commit is about to
fill: it is removed only while no other process writes there.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from dataclasses import dataclass, replace

from converter.cache.host_leases import HostLease, is_shared
from converter.cache.leases import HURRY_SECONDS, Lease, held_now, put_intent, put_lease, release
from converter.cache.owners import check_owner
from converter.cache.removal import abort_uploads, delete_data, is_link, is_ours
from converter.cache.roots import ATTEMPT_PATTERN, MANIFEST, named_errors, naming_errors
from converter.errors import CacheCorruptError, CacheError
from converter.manifest import Manifest
from converter.storage.directory import Storage

logger = logging.getLogger(__name__)
_MAX_TRIES = 100
"""How often a step is repeated because another process interfered; a guess."""

_ABANDON_LOOKS = 10
_ABANDON_SECONDS = 2.0

_FILL_LOOKS = 10
_FILL_SECONDS = 2.0
"""How often and how long a commit looks whether another process fills a manifest that it has created; guesses."""

_KEPT_SIGN = b'"is_kept":true'


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldEntry:
    """A committed entry that this process uses, until `release` or `delete`."""

    root: Storage
    key: str
    manifest: Manifest
    lease: Lease | HostLease | None
    """None if this process may not write there: then a deletion does not wait for it."""

    damage: CacheCorruptError | None = None
    """Which file is not as the manifest says, if there is one."""

    @property
    def folder(self) -> Storage:
        """The entry's own directory."""
        return self.root.below(self.key)

    def release(self) -> None:
        """End the use; the last process to release a deleted entry removes its data."""
        with naming_errors(self.root, "release"):
            self._release(if_corrupt=True)

    def delete(self) -> None:
        """Remove the entry: first the manifest, so that no process begins to use it; the data once no lease is left."""
        with naming_errors(self.root, "delete"):
            self.withdraw(is_own=True)

    def delete_if_damaged(self) -> None:
        """`delete` if a second look finds damage as well, because one listing may be wrong; else `release`."""
        is_damaged = False
        with contextlib.suppress(OSError):
            is_damaged = find_damage(self.folder, self.manifest) is not None
        if is_damaged:
            self.delete()
        else:
            self.release()

    def withdraw(self, *, is_own: bool) -> None:
        """`delete`, with the store's own errors; a corrupt manifest goes with it only if the entry `is_own`."""
        try:
            is_linked = is_link(self.root, self.key)
        except BaseException:
            with self.root.hurried(HURRY_SECONDS):
                self.release_lease()
            raise
        if is_linked:
            logger.warning("Left %s alone: it is a link, which this package does not make.", self.folder.url)
            self.release_lease()
            return
        try:
            self._delete_manifest(if_corrupt=is_own)
        except BaseException:
            with self.root.hurried(HURRY_SECONDS):
                self._release(if_corrupt=is_own)
            raise
        self._release(if_corrupt=is_own)

    def _delete_manifest(self, *, if_corrupt: bool) -> None:
        try:
            committed = load_manifest(self.root, self.key)
        except CacheCorruptError:
            if if_corrupt:
                delete_corrupt(self.root, self.key)
            return
        if committed is not None and attempt_of(committed) == attempt_of(self.manifest):
            self.folder.delete_file(MANIFEST)

    def _release(self, *, if_corrupt: bool) -> None:
        if self.release_lease():
            # Who releases it later looks whether the entry was deleted.
            return
        attempt_id = attempt_of(self.manifest)
        if is_in_use(self.root, self.key, attempt_id, if_corrupt=if_corrupt):
            return
        delete_data(self.folder, f"data-{attempt_id}")
        self.folder.delete_file(f"data-{attempt_id}.intent")
        self.folder.delete_directory_if_empty()

    def release_lease(self) -> bool:
        """End the use, and leave the entry as it is; whether another process of this host goes on holding the lease."""
        if isinstance(self.lease, HostLease):
            return self.lease.release()
        if self.lease is not None:
            release(self.lease)
        return False


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


# Write -----------------------------------------------------------------------


@named_errors
def begin(root: Storage, key: str, *, application_id: str) -> Attempt:
    """Announce an attempt before its first byte is written, so that a sweep can tell whether its driver is alive."""
    attempt_id = uuid.uuid4().hex
    entry = root.below(key)
    tries_left = _MAX_TRIES
    while True:
        entry.make_directory()
        try:
            return Attempt(key=key, attempt_id=attempt_id, intent=put_intent(entry, attempt_id, application_id))
        except FileNotFoundError:
            # Another process removed the last entry of this key, and its empty folder, in between.
            tries_left -= 1
            if not tries_left:
                raise


@named_errors
def commit(root: Storage, attempt: Attempt, manifest: Manifest) -> HeldEntry:
    """Make the attempt the entry's content; if another process came first, remove the attempt and adopt that entry.

    Raises:
        CacheError: the driver does not see a reported file at its size; or a sweep took this driver for dead and
            removed the attempt.
    """
    entry = root.below(attempt.key)
    missing = _missing_file(entry, manifest)
    if missing is not None:
        if entry.size(attempt.intent.name) is None:
            # Then the tasks have removed their files, too.
            raise _swept(entry)
        raise not_shared(missing[0], f"it {missing[1]}")
    try:
        lease = put_lease(entry, attempt.attempt_id)
    except FileNotFoundError as error:
        raise _swept(entry) from error
    held = HeldEntry(root=root, key=attempt.key, manifest=manifest, lease=lease)
    adopted = None
    try:
        # After the lease: a sweep that removes the intent from now on sees the lease.
        if entry.size(attempt.intent.name) is None:
            raise _swept(entry)
        # Put last: a directory without a manifest does not exist for readers.
        tries_left = _MAX_TRIES
        while adopted is None and not entry.put_if_absent(MANIFEST, manifest.to_json()):
            adopted = _adopt_filled(root, attempt)
            tries_left -= 1
            if adopted is None and not tries_left:
                raise FileExistsError(f"{MANIFEST} can neither be created nor read")
        if adopted is None:
            if entry.size(attempt.intent.name) is None:
                raise _swept(entry)
            release(attempt.intent)
            return held
    except BaseException as error:
        # On any error: a manifest that was put must not outlive the data, which are about to be removed.
        held.withdraw(is_own=False)
        if isinstance(error, FileNotFoundError):
            raise _swept(entry) from error
        raise
    try:
        release(lease)
        abandon(root, attempt)
    except BaseException:
        adopted.release()
        raise
    return adopted


def _adopt_filled(root: Storage, attempt: Attempt) -> HeldEntry | None:
    """`adopt`, of a manifest that another process may be about to fill; one that nobody fills goes.

    So does a damaged entry, which a first look may have taken for none.
    """
    looks_left = _FILL_LOOKS
    while True:
        try:
            adopted = adopt(root, attempt.key)
            break
        except CacheCorruptError:
            looks_left -= 1
            if not looks_left:
                if not delete_corrupt(root, attempt.key, own_attempt=attempt.attempt_id):
                    raise
                return None
            time.sleep(_FILL_SECONDS / _FILL_LOOKS)
    if adopted is not None and adopted.damage is not None:
        adopted.delete_if_damaged()
        return None
    return adopted


def _swept(entry: Storage) -> CacheError:
    return CacheError(
        f"The driver stopped renewing its lease in {entry.url} (was it suspended, or the folder removed?), so the "
        "unfinished write was removed. Convert again.",
        path=entry.url,
    )


def find_damage(entry: Storage, manifest: Manifest) -> CacheCorruptError | None:
    """The error to raise if a file of the manifest is missing or has another size, as seen from here."""
    missing = _missing_file(entry, manifest)
    if missing is None:
        return None
    path, what = missing
    return CacheCorruptError(
        f"The cache entry {entry.url} is damaged: {path} {what}. Delete the entry, or convert again.", path=path
    )


def _missing_file(entry: Storage, manifest: Manifest) -> tuple[str, str] | None:
    """The first file that is not as the manifest says, and what differs."""
    sizes: dict[str, int] = {}
    for directory in _directories(manifest):
        sizes |= {f"{directory}/{info.name}": info.num_bytes for info in entry.below(directory).list()}
    for name, num_bytes in zip(manifest.file_names, manifest.file_bytes.tolist(), strict=True):
        size = sizes.get(name)
        if size != num_bytes:
            what = "is not there" if size is None else f"has {size} bytes instead of {num_bytes}"
            return f"{entry.url}/{name}", what
    return None


def not_shared(url: str, what: str) -> CacheError:
    """The error to raise if the driver does not see what the executors wrote."""
    return CacheError(
        f"Spark's executors wrote {url}, but as seen by the driver {what}. Is the cache directory on a disk of its own "
        "on each machine? Choose a cache_dir that the driver and every executor share.",
        path=url,
    )


@named_errors
def abandon(root: Storage, attempt: Attempt) -> None:
    """Remove what an attempt wrote: its data files, its folder, its intent.

    Follows an error, perhaps of the store, or an interrupt: so waits for the store only `HURRY_SECONDS`.
    """
    with root.hurried(HURRY_SECONDS):
        entry = root.below(attempt.key)
        release(attempt.intent)
        if is_in_use(root, attempt.key, attempt.attempt_id, if_corrupt=False):
            return
        data = entry.below(attempt.data_directory)
        for _ in range(_ABANDON_LOOKS):
            delete_data(entry, attempt.data_directory)
            # A task that is being cancelled may open one more file, and its folder again.
            time.sleep(_ABANDON_SECONDS / _ABANDON_LOOKS)
            if not data.list():
                break
        entry.delete_directory_if_empty()


def is_in_use(root: Storage, key: str, attempt_id: str, *, if_corrupt: bool) -> bool:
    """Whether the manifest names this attempt (`if_corrupt` answers for a corrupt one), or a live lease holds it."""
    if _is_named(root, key, attempt_id, if_corrupt=if_corrupt):
        return True
    entry = root.below(key)
    infos = entry.list()
    if all(info.name != f"data-{attempt_id}" for info in infos):
        # Either there is nothing to remove, or the listing is wrong: it shows no leases then.
        infos = entry.list()
    if attempt_id in held_now(entry, infos):
        return True
    # Data are removed next, so one wrong answer, that there is no manifest, must not be believed.
    return any(info.name == MANIFEST for info in infos) and _is_named(root, key, attempt_id, if_corrupt=if_corrupt)


def _is_named(root: Storage, key: str, attempt_id: str, *, if_corrupt: bool) -> bool:
    try:
        committed = load_manifest(root, key)
    except CacheCorruptError:
        return if_corrupt
    return committed is not None and attempt_of(committed) == attempt_id


@named_errors
def delete_unlisted(root: Storage, attempt: Attempt, manifest: Manifest) -> None:
    """Remove the files of failed or superseded task attempts: those with our names that the manifest does not list."""
    listed = {name.rpartition("/")[2] for name in manifest.file_names}
    entry = root.below(attempt.key)
    if is_link(entry, attempt.data_directory):
        return
    directory = entry.below(attempt.data_directory)
    # All listed files are whole: what is under way was begun by a task that was killed, or by a slower twin.
    abort_uploads(directory)
    for info in directory.list():
        if is_ours(info) and info.name not in listed:
            directory.delete_file(info.name)


# Use -------------------------------------------------------------------------


@named_errors
def load(root: Storage, key: str) -> Manifest | None:
    """The committed manifest of an entry, or None if there is none.

    Raises:
        CacheCorruptError: the manifest cannot be read.
        CacheError: a newer version of this package wrote it, it is a folder, or the store failed.
    """
    return load_manifest(root, key)


def load_manifest(root: Storage, key: str) -> Manifest | None:
    """`load`, with the store's own errors."""
    entry = root.below(key)
    path = f"{entry.url}/{MANIFEST}"
    try:
        data = entry.read(MANIFEST)
    except FileNotFoundError:
        return None
    except (NotADirectoryError, IsADirectoryError) as error:
        # Not treated as missing or corrupt: in both cases data are removed.
        raise CacheError(f"{path} is not a file ({error}). Remove it.", path=path) from error
    manifest = Manifest.from_json(data, path=path)
    if len(_directories(manifest)) != 1:
        raise CacheCorruptError(
            f"{path} lists files of several writes, expected those of one. Delete the entry and convert again.",
            path=path,
        )
    return manifest


@named_errors
def adopt(root: Storage, key: str, committed: Manifest | None = None) -> HeldEntry | None:
    """Hold a committed entry, or return None if there is none.

    `committed` is its manifest, if that was just read.

    Raises:
        CacheNotOwnedError: another user may have planted it.
    """
    manifest = committed or load_manifest(root, key)
    if manifest is None:
        return None
    entry = root.below(key)
    check_owner(entry, MANIFEST)
    shared = HostLease(entry, attempt_of(manifest)) if is_shared() else None
    if shared is not None and shared.find():
        # Its holder has seen, under its lease, that the entry is whole.
        return HeldEntry(root=root, key=key, manifest=manifest, lease=shared)
    # Asked before the lease is put: the second look at the manifest also covers files that are removed in between.
    damage = entry.meanwhile(lambda: find_damage(entry, manifest))
    lease: Lease | HostLease | None = shared
    try:
        if shared is None:
            lease = put_lease(entry, attempt_of(manifest))
        else:
            shared.put()
    except FileNotFoundError:
        _end(shared)
        return None
    except (OSError, CacheError) as error:
        # A trainer that may only read takes no lease.
        logger.info("Open %s without a lease, because none can be written there: %s", entry.url, error)
        _end(shared)
        lease = None
    except BaseException:
        _end(shared)
        raise
    held = HeldEntry(root=root, key=key, manifest=manifest, lease=lease)
    try:
        again = load_manifest(root, key)
        held = replace(held, damage=damage())
    except BaseException:
        # The store may be away, and was waited for already.
        with root.hurried(HURRY_SECONDS):
            held.release()
        raise
    if again is None or attempt_of(again) != attempt_of(manifest):
        # Deleted in between, maybe by a process that did not see the lease yet: then `release` removes the data.
        held.release()
        return None
    if shared is not None and lease is not None and held.damage is None:
        shared.share()
    return held


def _end(lease: HostLease | None) -> None:
    if lease is not None:
        lease.release()


@named_errors
def discard(root: Storage, key: str) -> None:
    """`delete_corrupt`, with named errors, so that the entry can be written again; the caller has told why."""
    delete_corrupt(root, key, is_told=True)


def delete_corrupt(root: Storage, key: str, *, own_attempt: str | None = None, is_told: bool = False) -> bool:
    """Remove a manifest that could not be read if it cannot at a second look either, and no other process writes there.

    Whether the entry can be read or written now.
    """
    entry = root.below(key)
    # Listed before the second look: a writer that filled the manifest meanwhile has removed its intent, or shows it.
    matches = (ATTEMPT_PATTERN.fullmatch(info.name) for info in entry.list() if not info.is_directory)
    intents = {match[1] for match in matches if match and match[2]} - {own_attempt}
    is_being_filled = bool(intents) and not intents.isdisjoint(held_now(entry))
    try:
        load_manifest(root, key)
    except CacheCorruptError as error:
        if is_being_filled:
            logger.info("Left a manifest alone that another process may be about to fill: %s", error)
            return False
        logger.log(logging.INFO if is_told else logging.WARNING, "Removed a manifest that cannot be read: %s", error)
        for attempt_id in sorted(intents):
            # First: a writer that was taken for dead sees that it was.
            entry.delete_file(f"data-{attempt_id}.intent")
        entry.delete_file(MANIFEST)
    return True


def _directories(manifest: Manifest) -> set[str]:
    return {name.partition("/")[0] for name in manifest.file_names}


def attempt_of(manifest: Manifest) -> str:
    """Which attempt wrote the files of an entry."""
    return manifest.file_names[0].partition("/")[0].removeprefix("data-")


def says_it_is_kept(entry: Storage) -> bool:
    """Whether a manifest that cannot be read was written with `delete_on_exit=False`."""
    try:
        return _KEPT_SIGN in entry.read(MANIFEST)
    except FileNotFoundError:
        return False
