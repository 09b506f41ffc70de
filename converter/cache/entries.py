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
import functools
import json
import logging
import os
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import platformdirs

from converter.errors import CacheCorruptError, CacheError, CacheNotConfiguredError, CacheNotOwnedError
from converter.manifest import DATA_FILE, Manifest
from converter.storage.directory import FileInfo, Storage, StorageOptions, open_storage
from converter.storage.store import TIMEOUT_SECONDS, shown_url

logger = logging.getLogger(__name__)

DIRECTORY = "converter-v1"
MANIFEST = "manifest.json"
ENVIRONMENT_VARIABLE = "CONVERTER_CACHE_DIR"
SPARK_CONF = "converter.cacheDir"

RENEW_SECONDS = 60.0
"""How often a lease is renewed; after three missed renewals it is dead."""

_SPARK_STAGING = "_temporary"
_MAX_TRIES = 100
"""How often a step is begun again because another process was in between; a store that always says so is broken."""

_MAX_NAMES_READ = 20
_ABANDON_LOOKS = 10
_ABANDON_SECONDS = 2.0
HURRY_SECONDS = 5.0
"""How long a store is waited for once something has gone wrong, or somebody was interrupted."""

_LAST_RENEWAL_SECONDS = 5.0
"""How long a renewal under way is waited for by who gives the lease back; guessed. One that takes longer hangs."""

_OWNER = ".owner"
_OWNER_BYTES = b'{"package": "spark-tensor-converter", "format_version": 1}\n'
_KEY = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_KEPT_SIGN = b'"is_kept":true'
_ATTEMPT = re.compile(r"data-([0-9a-f]{32})(\.intent)?")
_LEASE = re.compile(r"lease-[0-9a-f]{32}\.json")
_PASSING = re.compile(
    r"(\.owner|manifest\.json|data-[0-9a-f]{32}\.intent|lease-[0-9a-f]{32}\.json|\.clock-[0-9a-f]{32})"
    r"\.[0-9a-f]{32}\.tmp|\.clock-[0-9a-f]{32}"
)
_SIDE_FILE = re.compile(r"probe|_SUCCESS|\._SUCCESS\.crc|\.part-[0-9]{5,}-[0-9a-f-]{36}-c[0-9]{3,}[0-9a-z_.]*\.crc")


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """A sign of life in an entry: a reader's lease or a writer's intent."""

    entry: Storage
    name: str
    content: bytes
    lost: bool = False
    """Somebody took it for dead and swept it."""

    given_up: threading.Event = field(default_factory=threading.Event)
    """Set once it is given back: a renewal that is still under way is not wanted any more."""

    @property
    def place(self) -> str:
        """The cache directory that it is in, by its URL."""
        return self.entry.url.rpartition("/")[0]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What a sweep removed, or with `dry_run` would remove."""

    num_entries: int = 0
    """Committed entries."""

    num_attempts: int = 0
    """Writes that never committed."""

    num_files: int = 0
    num_bytes: int = 0
    urls: tuple[str, ...] = field(default=())
    """The folders concerned."""

    num_kept: int = 0
    """Entries that were left because they are kept with `delete_on_exit=False`."""

    def __add__(self, other: SweepReport) -> SweepReport:
        return SweepReport(
            num_entries=self.num_entries + other.num_entries,
            num_attempts=self.num_attempts + other.num_attempts,
            num_files=self.num_files + other.num_files,
            num_bytes=self.num_bytes + other.num_bytes,
            urls=self.urls + other.urls,
            num_kept=self.num_kept + other.num_kept,
        )


_READING_STEPS = ("load", "adopt", "list_entries")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _named_errors(
    step: Callable[Concatenate[Storage, Arguments], Result],
) -> Callable[Concatenate[Storage, Arguments], Result]:
    """Let an error of the store arrive as a CacheError that names the place and the step."""

    @functools.wraps(step)
    def named(root: Storage, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        try:
            return step(root, *arguments, **options)
        except OSError as error:
            left = "" if step.__name__ in _READING_STEPS else " What is left there is removed by a later sweep."
            raise CacheError(
                f"The cache at {root.url} failed to {step.__name__.replace('_', ' ')}: {error}.{left}", path=root.url
            ) from error

    return named  # type: ignore[return-value]  # mypy minds the first argument's name.


# Where -----------------------------------------------------------------------


def choose_cache_dir(
    argument: str | os.PathLike[str] | None, *, spark_conf: str | None, master: str, is_connect: bool
) -> str:
    """Where the cache goes: the argument, the environment, Spark's conf, or a folder of the user in local mode.

    >>> choose_cache_dir("/data/cache", spark_conf=None, master="yarn", is_connect=False)
    '/data/cache'
    """
    if argument is not None:
        return os.fspath(argument)
    configured = os.environ.get(ENVIRONMENT_VARIABLE) or spark_conf
    if configured:
        return configured
    is_local_mode = re.fullmatch(r"local(\[.*\])?", master) is not None
    if is_local_mode and not is_connect:
        return platformdirs.user_cache_dir("spark-tensor-converter")
    where = "Spark Connect, whose local disk is the server's" if is_connect else f"the cluster {master!r}"
    raise CacheNotConfiguredError(
        f"Nobody said where the cache goes, and Spark runs on {where}. Name a directory that the driver and every "
        f"executor see: cache_dir=…, the environment variable {ENVIRONMENT_VARIABLE}, or the Spark conf {SPARK_CONF}."
    )


def open_parent(
    cache_dir: str, storage_options: StorageOptions | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Storage:
    """The user's cache directory as it is named: nothing is asked of it, and nothing made.

    Raises:
        CacheError: its name is none, or what reaches it is not installed.
    """
    try:
        parent = open_storage(cache_dir, storage_options, timeout_seconds)
    except ImportError as error:
        shown = shown_url(cache_dir)
        raise CacheError(f"cache_dir={shown!r} cannot be used: {error}", path=shown) from error
    except ValueError as error:
        if not cache_dir.strip():
            raise
        shown = shown_url(cache_dir)
        raise CacheError(f"cache_dir={shown!r} cannot be used: {error}", path=shown) from error
    if parent.url.startswith("memory:"):
        raise CacheError(
            f"cache_dir={parent.url!r} is in this process's memory, which no executor sees. Give a path or a URL that "
            "the driver and the executors share.",
            path=parent.url,
        )
    return parent


def open_root(
    cache_dir: str, storage_options: StorageOptions | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Storage:
    """Our own subdirectory of the user's cache directory, made and marked where it is missing.

    Raises:
        CacheError: the directory is a file, or cannot be written.
        CacheNotOwnedError: the subdirectory exists, holds something and was not made by us.
    """
    parent = open_parent(cache_dir, storage_options, timeout_seconds)
    root = parent.below(DIRECTORY)
    try:
        root.make_directory()
        if root.size(_OWNER) is None:
            strangers = [info for info in root.list() if not _PASSING.fullmatch(info.name)]
            # Looked at again: another process may have made the root, marker first, in between.
            if strangers and root.size(_OWNER) is None:
                raise _not_owned(root)
            root.put_if_absent(_OWNER, _OWNER_BYTES)
    except CacheError:
        raise
    except OSError as error:
        raise CacheError(
            f"The cache directory {parent.url} cannot be written: {error.strerror or error}. "
            "Choose a cache_dir that this process may create files in.",
            path=parent.url,
        ) from error
    return root


def find_root(
    cache_dir: str, storage_options: StorageOptions | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Storage | None:
    """Our own subdirectory of a cache directory if there is one; makes nothing.

    Raises:
        CacheNotOwnedError: it exists, holds something and was not made by us.
    """
    root = open_storage(cache_dir, storage_options, timeout_seconds).below(DIRECTORY)
    if root.size(_OWNER) is not None:
        return root
    if root.is_at_a_file:
        shown = shown_url(cache_dir)
        raise CacheError(f"{shown} is a file, where a directory was expected.", path=shown)
    if any(not _PASSING.fullmatch(info.name) for info in root.list()) and root.size(_OWNER) is None:
        raise _not_owned(root)
    return None


def names_entry(url: str) -> bool:
    """Whether a URL ends as `DatasetConverter.url` of an entry does."""
    return bool(_KEY.fullmatch(url.rstrip("/").rpartition("/")[2]))


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
    if _KEY.fullmatch(key):
        committed = root.meanwhile(lambda: load(root, key))
        if root.size(_OWNER) is not None:
            return root, key, committed()
    shown = shown_url(url)
    raise CacheNotOwnedError(
        f"{shown} is not a cache entry: expected <cache_dir>/{DIRECTORY}/<key>, as converter.url names it, or a "
        "cache_dir together with cache_key=….",
        path=shown,
    )


@_named_errors
def list_entries(root: Storage, name_hash: str | None = None) -> list[FileInfo]:
    """The entries' folders, committed or not; with `name_hash` those whose key begins with it."""
    return [info for info in root.list() if _is_entry(info, name_hash)]


def _is_entry(info: FileInfo, name_hash: str | None) -> bool:
    is_folder = info.is_directory and not info.is_link and _KEY.fullmatch(info.name) is not None
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


def _not_owned(root: Storage) -> CacheNotOwnedError:
    return CacheNotOwnedError(
        f"{root.url} holds files but not the marker {_OWNER} of this package, so it is left alone. "
        "Choose another cache_dir, or empty that folder.",
        path=root.url,
    )


# Write -----------------------------------------------------------------------


@_named_errors
def begin(root: Storage, key: str, *, application_id: str) -> Attempt:
    """Announce an attempt before its first byte is written, so that what a dead driver leaves can be told from life."""
    attempt_id = uuid.uuid4().hex
    entry = root.below(key)
    content = _sign_of_life(attempt_id, application_id)
    intent = Lease(entry=entry, name=f"data-{attempt_id}.intent", content=content)
    for tries_left in reversed(range(_MAX_TRIES)):
        entry.make_directory()
        try:
            _put(intent)
            break
        except FileNotFoundError:
            # Another process removed the last entry of this key, and its empty folder, in between.
            if not tries_left:
                raise
    _heartbeat.add(intent)
    return Attempt(key=key, attempt_id=attempt_id, intent=intent)


@_named_errors
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
        lease = _put_lease(entry, attempt.attempt_id)
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


@_named_errors
def abandon(root: Storage, attempt: Attempt) -> None:
    """Remove what an attempt wrote: its data files, its folder, its intent.

    Something went wrong, perhaps with the store, or somebody was interrupted: so it is not waited for as long.
    """
    with root.hurried(HURRY_SECONDS):
        entry = root.below(attempt.key)
        release(attempt.intent)
        if _is_in_use(root, attempt.key, attempt.attempt_id, if_corrupt=False):
            return
        data = entry.below(attempt.data_directory)
        for _ in range(_ABANDON_LOOKS):
            _delete_uncommitted(entry, attempt.data_directory)
            # A task that is being cancelled may open one more file, and its folder again.
            time.sleep(_ABANDON_SECONDS / _ABANDON_LOOKS)
            if not data.list():
                break
        entry.delete_directory_if_empty()


def _is_in_use(root: Storage, key: str, attempt_id: str, *, if_corrupt: bool) -> bool:
    """Whether the manifest names this attempt, which `if_corrupt` says of a corrupt one, or a live lease holds it."""
    try:
        committed = _load(root, key)
        is_named = committed is not None and _attempt_of(committed) == attempt_id
    except CacheCorruptError:
        is_named = if_corrupt
    return is_named or attempt_id in _held_now(root.below(key))


@_named_errors
def delete_unlisted(root: Storage, attempt: Attempt, manifest: Manifest) -> None:
    """Remove what failed and losing task attempts left: files of our naming that nobody reported."""
    listed = {name.rpartition("/")[2] for name in manifest.file_names}
    directory = root.below(attempt.key).below(attempt.data_directory)
    if _is_linked(root.below(attempt.key), attempt.data_directory):
        return
    for info in directory.list():
        if _is_ours(info) and info.name not in listed:
            directory.delete_file(info.name)


# Use -------------------------------------------------------------------------


@_named_errors
def load(root: Storage, key: str) -> Manifest | None:
    """The committed manifest of an entry, or None where there is none.

    Raises:
        CacheCorruptError: its manifest is not one of ours.
        CacheError: it was written by a newer version of this package, is no file, or the store failed.
    """
    return _load(root, key)


def _load(root: Storage, key: str) -> Manifest | None:
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


@_named_errors
def adopt(root: Storage, key: str, committed: Manifest | None = None) -> Adopted | None:
    """A committed entry and a lease on it, or None where there is none (any more).

    `committed` is its manifest, where that was read a moment ago.
    """
    manifest = committed or _load(root, key)
    if manifest is None:
        return None
    entry = root.below(key)
    # Files that go after they were seen go with their manifest, which is looked for once more.
    damage = entry.meanwhile(lambda: find_damage(entry, manifest))
    lease = None
    try:
        lease = _put_lease(entry, _attempt_of(manifest))
    except FileNotFoundError:
        return None
    except (OSError, CacheError) as error:
        # A trainer that may only read takes no lease.
        logger.info("Open %s without a lease, because it cannot be written: %s", entry.url, error)
    try:
        again = _load(root, key)
        found = Adopted(manifest, lease, damage())
    except BaseException:
        let_go(root, key, manifest, lease)
        raise
    if again is None or _attempt_of(again) != _attempt_of(manifest):
        # Deleted in between, maybe by one who did not see the lease yet: letting go removes what is left.
        let_go(root, key, manifest, lease)
        return None
    return found


@_named_errors
def delete(root: Storage, key: str, manifest: Manifest, lease: Lease | None) -> None:
    """Remove a committed entry: the manifest first, so that nobody begins to use it; the data when nobody holds it."""
    _withdraw(root, key, manifest, lease, is_own=True)


def _withdraw(root: Storage, key: str, manifest: Manifest, lease: Lease | None, *, is_own: bool) -> None:
    """The same; a corrupt manifest goes with it only where the entry `is_own`."""
    entry = root.below(key)
    try:
        is_linked = _is_linked(root, key)
    except BaseException:
        with root.hurried(HURRY_SECONDS):
            _release_if_any(lease)
        raise
    if is_linked:
        logger.warning("Left %s alone: it is a link, which this package does not make.", entry.url)
        _release_if_any(lease)
        return
    try:
        try:
            committed = _load(root, key)
            is_named = committed is not None and _attempt_of(committed) == _attempt_of(manifest)
        except CacheCorruptError:
            is_named = is_own
        if is_named:
            entry.delete_file(MANIFEST)
    except BaseException:
        with root.hurried(HURRY_SECONDS):
            _let_go(root, key, manifest, lease, if_corrupt=is_own)
        raise
    _let_go(root, key, manifest, lease, if_corrupt=is_own)


@_named_errors
def let_go(root: Storage, key: str, manifest: Manifest, lease: Lease | None) -> None:
    """Give a lease back; of a deleted entry the last process to do so removes its data."""
    _let_go(root, key, manifest, lease, if_corrupt=True)


def _let_go(root: Storage, key: str, manifest: Manifest, lease: Lease | None, *, if_corrupt: bool) -> None:
    _release_if_any(lease)
    entry = root.below(key)
    attempt_id = _attempt_of(manifest)
    if _is_in_use(root, key, attempt_id, if_corrupt=if_corrupt):
        return
    _delete_data(entry, f"data-{attempt_id}")
    entry.delete_file(f"data-{attempt_id}.intent")
    entry.delete_directory_if_empty()


@_named_errors
def discard(root: Storage, key: str) -> None:
    """Remove a manifest that cannot be read, so that the entry can be written again."""
    root.below(key).delete_file(MANIFEST)


def release(lease: Lease) -> None:
    """End a lease or an intent."""
    _heartbeat.remove(lease)
    lease.entry.delete_file(lease.name)


def _release_if_any(lease: Lease | None) -> None:
    if lease is not None:
        release(lease)


def _put_lease(entry: Storage, attempt_id: str) -> Lease:
    content = _sign_of_life(attempt_id, "")
    lease = Lease(entry=entry, name=f"lease-{uuid.uuid4().hex}.json", content=content)
    _put(lease)
    _heartbeat.add(lease)
    return lease


def _put(lease: Lease) -> None:
    """Let a sign of life appear; nobody else has its name."""
    if not lease.entry.put_if_absent(lease.name, lease.content):
        raise FileExistsError(f"{lease.entry.url}/{lease.name} exists already")


def _directories(manifest: Manifest) -> set[str]:
    return {name.partition("/")[0] for name in manifest.file_names}


def _attempt_of(manifest: Manifest) -> str:
    return manifest.file_names[0].partition("/")[0].removeprefix("data-")


def _is_ours(info: FileInfo) -> bool:
    """Whether a file in a data folder bears a name that our writer, or Spark's, gives."""
    return not info.is_directory and bool(DATA_FILE.fullmatch(info.name) or _SIDE_FILE.fullmatch(info.name))


def _is_linked(directory: Storage, name: str) -> bool:
    return any(info.name == name and info.is_link for info in directory.list())


def _delete_uncommitted(entry: Storage, directory_name: str) -> SweepReport:
    """Remove the data of an attempt that never was committed, and what Spark's own writer left unfinished."""
    data = entry.below(directory_name)
    if not _is_linked(entry, directory_name) and any(
        info.name == _SPARK_STAGING and not info.is_link for info in data.list()
    ):
        # Spark's committer works there; in our own folder, never committed, it is all ours.
        data.below(_SPARK_STAGING).delete_tree()
    return _delete_data(entry, directory_name)


def _delete_data(entry: Storage, directory_name: str) -> SweepReport:
    """Remove our data files of one attempt, and its folder if nothing else stands there."""
    if _is_linked(entry, directory_name):
        logger.warning("Left %s/%s alone: it is a link, which this package does not make.", entry.url, directory_name)
        return SweepReport()
    directory = entry.below(directory_name)
    foreign, num_files, num_bytes = [], 0, 0
    for info in directory.list():
        if _is_ours(info):
            directory.delete_file(info.name)
            num_files, num_bytes = num_files + 1, num_bytes + info.num_bytes
        else:
            foreign.append(info.name)
    if foreign:
        logger.warning(
            "Left %d files in %s that this package did not write: %s", len(foreign), directory.url, foreign[:3]
        )
    else:
        directory.delete_directory_if_empty()
    return SweepReport(num_files=num_files, num_bytes=num_bytes)


# Life and death --------------------------------------------------------------


@_named_errors
def sweep_root(
    root: Storage,
    *,
    older_than_seconds: float,
    kept: bool = False,
    name_hash: str | None = None,
    dry_run: bool = False,
    max_entries: int | None = None,
) -> SweepReport:
    """Remove what dead owners left below `root`; nothing that holds a live lease.

    Committed entries go when they were idle for `older_than_seconds`, those that were kept on purpose only where
    `kept` says so; attempts that never committed go with their writer. With `name_hash` nothing but the entries whose
    key begins with it is looked at, and kept ones go too.
    """
    infos = root.list()
    entries = [info for info in infos if _is_entry(info, name_hash)]
    passing = [] if name_hash is not None else [info for info in infos if _PASSING.fullmatch(info.name)]
    if not entries and not passing:
        return SweepReport()
    now = root.now()
    for info in passing:
        if now - info.modified > 3 * RENEW_SECONDS and not dry_run:
            root.delete_file(info.name)
    takes_kept = kept or name_hash is not None
    report = SweepReport()
    first_error: Exception | None = None
    # A sample, so that a bounded sweep comes to every entry in time.
    for info in random.sample(entries, min(len(entries), max_entries or len(entries))):
        try:
            report += _sweep_entry(root, info, now, older_than_seconds, takes_kept=takes_kept, dry_run=dry_run)
        except (OSError, CacheError) as error:
            # One entry that cannot be read, another user's perhaps, does not keep the others.
            first_error = first_error or error
    if first_error is not None:
        raise CacheError(f"An entry below {root.url} could not be swept: {first_error}", path=root.url) from first_error
    return replace(report, urls=tuple(sorted(report.urls)))


def _sweep_entry(
    root: Storage, found: FileInfo, now: float, older_than: float, *, takes_kept: bool, dry_run: bool
) -> SweepReport:
    key = found.name
    entry = root.below(key)
    infos = [info for info in entry.list() if not (info.is_directory and not _ATTEMPT.fullmatch(info.name))]
    infos = [info for info in infos if not (info.is_directory and info.name.endswith(".intent"))]
    manifest, is_corrupt = None, False
    try:
        manifest = _load(root, key)
    except CacheCorruptError as error:
        is_corrupt = True
        if not takes_kept and _says_it_is_kept(entry):
            logger.warning("Left a kept entry that cannot be read: %s", error)
            return SweepReport(num_kept=1)
    except CacheError as error:
        # Of a newer version, whose own sweep knows better; or a user's folder.
        logger.info("Left %s alone: %s", entry.url, error)
        return SweepReport()
    held = _held_attempts(entry, infos, now=now)
    committed = None if manifest is None else _attempt_of(manifest)
    report = SweepReport()
    if manifest is not None and committed not in held:
        # The folder's own time moves when a lease comes or goes, so it remembers the last user.
        idle = now - max([found.modified, *(info.modified for info in infos)])
        if idle >= older_than and manifest.is_kept and not takes_kept:
            report += SweepReport(num_kept=1)
        elif idle >= older_than:
            report += SweepReport(num_entries=1, urls=(entry.url,))
            if not dry_run:
                entry.delete_file(MANIFEST)
            committed = None
    attempts = {match[1] for info in infos if (match := _ATTEMPT.fullmatch(info.name))}
    for attempt_id in sorted(attempts - held - {committed or ""}):
        report += _sweep_attempt(root, key, attempt_id, manifest, is_corrupt=is_corrupt, dry_run=dry_run)
    if not dry_run:
        if is_corrupt and not held:
            try:
                _load(root, key)
            except CacheCorruptError as error:
                logger.warning("Removed an entry that cannot be read: %s", error)
                entry.delete_file(MANIFEST)
        for info in infos:
            is_dead_lease = _LEASE.fullmatch(info.name) and _is_dead(entry, info, now=now)
            is_leftover = _PASSING.fullmatch(info.name) and now - info.modified > 3 * RENEW_SECONDS
            if is_dead_lease or is_leftover:
                entry.delete_file(info.name)
        entry.delete_directory_if_empty()
    return report


def _says_it_is_kept(entry: Storage) -> bool:
    """Whether a manifest that cannot be read was written for an entry that is kept."""
    try:
        return _KEPT_SIGN in entry.read(MANIFEST)
    except FileNotFoundError:
        return False


def _sweep_attempt(
    root: Storage, key: str, attempt_id: str, manifest: Manifest | None, *, is_corrupt: bool, dry_run: bool
) -> SweepReport:
    """Remove a dead attempt; `manifest` is what the entry had when its signs of life were listed, if not corrupt."""
    entry = root.below(key)
    was_committed = manifest is not None and _attempt_of(manifest) == attempt_id
    counted = SweepReport() if was_committed else SweepReport(num_attempts=1, urls=(entry.url,))
    directory_name = f"data-{attempt_id}"
    if dry_run:
        if _is_linked(entry, directory_name):
            return counted
        found = [info for info in entry.below(directory_name).list() if _is_ours(info)]
        return counted + SweepReport(num_files=len(found), num_bytes=sum(info.num_bytes for info in found))
    # First the intent, then the manifest again: one who commits now sees that it was taken for dead.
    entry.delete_file(f"{directory_name}.intent")
    # One that became corrupt meanwhile may name this attempt.
    if _is_in_use(root, key, attempt_id, if_corrupt=not is_corrupt):
        return SweepReport()
    # Of an entry that was committed no staging is left.
    return counted + (_delete_data if was_committed else _delete_uncommitted)(entry, directory_name)


def _held_now(entry: Storage) -> set[str]:
    """The attempts that somebody alive uses or writes, looked at now."""
    if not any(_is_sign(info) for info in entry.list()):
        return set()
    try:
        # The time first: who was held up between the two would else take a lease for older than it is.
        now = entry.now()
    except FileNotFoundError:
        # The folder is gone, so nothing in it is held.
        return set()
    return _held_attempts(entry, entry.list(), now=now)


def _held_attempts(entry: Storage, infos: list[FileInfo], *, now: float) -> set[str]:
    """The attempts that somebody alive uses or writes, by a listing that is not older than `now`."""
    held: set[str] = set()
    for info in infos:
        if _is_sign(info) and not _is_dead(entry, info, now=now):
            match = _ATTEMPT.fullmatch(info.name)
            sign = {"attempt": match[1]} if match else _read_sign(entry, info.name)
            if sign is None:
                # Given back in between.
                continue
            if isinstance(sign.get("attempt"), str):
                held.add(sign["attempt"])
            else:
                # Its content is on its way: it may be of any of them.
                held.update(found[1] for found in map(_ATTEMPT.fullmatch, (one.name for one in infos)) if found)
    return held


def _is_sign(info: FileInfo) -> bool:
    return not info.is_directory and bool(_LEASE.fullmatch(info.name) or info.name.endswith(".intent"))


def _is_dead(entry: Storage, info: FileInfo, *, now: float) -> bool:
    """Whether the process behind a sign of life is gone: known on this host, guessed elsewhere from its silence."""
    if now - info.modified > 3 * RENEW_SECONDS:
        return True
    sign = _read_sign(entry, info.name) or {}
    if sign.get("host") != this_host():
        return False
    pid = sign.get("pid")
    return not isinstance(pid, int) or _process_start(pid) != sign.get("process_start")


def _read_sign(entry: Storage, name: str) -> dict[str, Any] | None:
    """What a sign of life says, which may be nothing yet; None where it is gone."""
    try:
        sign = json.loads(entry.read(name))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}
    return sign if isinstance(sign, dict) else {}


def _sign_of_life(attempt_id: str, application_id: str) -> bytes:
    sign = {
        "attempt": attempt_id,
        "host": this_host(),
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "application_id": application_id,
        "created": time.time(),
    }
    return json.dumps(sign).encode()


def this_host() -> str:
    """This machine and process namespace: within one, process numbers can be compared."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts.append(file.read().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def _process_start(pid: int) -> str | None:
    """When a process began, in the kernel's ticks, so that a reused number is told apart; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        if os.path.isdir("/proc/self"):
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return "?"
        return "?"
    return None if fields[0] in ("Z", "X") else fields[19]


class _Heartbeat:
    """One thread for each cache directory, which renews this process's leases there and ends with the last of them.

    No lock is held while a store is asked, so one that hangs keeps nobody waiting but its own thread.
    """

    def __init__(self) -> None:
        self.forget_parent()

    def forget_parent(self) -> None:
        """Begin anew: in a forked child neither the threads nor the leases, nor a lock that was held, are its own."""
        self._condition = threading.Condition()
        self._leases: set[Lease] = set()
        self._renewing: set[Lease] = set()
        self._threads: dict[str, threading.Thread] = {}

    def add(self, lease: Lease) -> None:
        place = lease.place
        with self._condition:
            self._leases.add(lease)
            if place not in self._threads:
                thread = threading.Thread(target=self._run, args=(place,), name="converter-heartbeat", daemon=True)
                thread.start()
                self._threads[place] = thread

    def remove(self, lease: Lease) -> None:
        """Renew it no more; does nothing the second time."""
        place, thread = lease.place, None
        with self._condition:
            self._leases.discard(lease)
            if all(other.place != place for other in self._leases):
                thread = self._threads.pop(place, None)
                self._condition.notify_all()
            # A renewal under way comes first: after the lease is deleted it could bring the file back.
            self._condition.wait_for(lambda: lease not in self._renewing, timeout=_LAST_RENEWAL_SECONDS)
            lease.given_up.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def renew(self, place: str | None = None) -> None:
        """Renew every lease once, or those of one cache directory."""
        with self._condition:
            leases = [lease for lease in self._leases if place in (None, lease.place)]
        for lease in leases:
            with self._condition:
                if lease not in self._leases or lease in self._renewing or lease.lost:
                    continue
                # Said under the lock, so that who gives the lease back either is seen here or sees this.
                self._renewing.add(lease)
            try:
                self._renew(lease)
            finally:
                with self._condition:
                    self._renewing.discard(lease)
                    self._condition.notify_all()

    def _renew(self, lease: Lease) -> None:
        try:
            lease.entry.touch(lease.name, lease.given_up)
        except OSError as error:
            with self._condition:
                if lease not in self._leases:
                    return
                lease.lost = isinstance(error, FileNotFoundError)
            if lease.lost:
                logger.warning("%s/%s was taken for dead and swept.", lease.entry.url, lease.name)
            else:
                logger.warning("Could not renew %s/%s: %s", lease.entry.url, lease.name, error)

    def _run(self, place: str) -> None:
        own = threading.current_thread()
        while True:
            with self._condition:
                if self._condition.wait_for(lambda: self._threads.get(place) is not own, timeout=RENEW_SECONDS):
                    return
            self.renew(place)


_heartbeat = _Heartbeat()
os.register_at_fork(after_in_child=_heartbeat.forget_parent)
