"""Which entry a URL or a `cache_key` names.

Nothing is written here, and an entry is not held yet: `entries.adopt` does that.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import socket

from converter.cache.entries import load
from converter.cache.host_leases import is_held_here
from converter.cache.owners import check_owner
from converter.cache.roots import DIRECTORY, KEY_PATTERN, OWNER_FILE, find_root, named_errors
from converter.errors import CacheCorruptError, CacheError, CacheNotOwnedError
from converter.manifest import Manifest
from converter.storage.directory import FileInfo, Storage, StorageOptions
from converter.storage.opening import open_storage
from converter.storage.store import TIMEOUT_SECONDS
from converter.storage.urls import shown_url

logger = logging.getLogger(__name__)

_MAX_NAMES_READ = 20
"""Manifests that are read to list the `cache_key`s in an error."""


def names_entry(url: str) -> bool:
    """Whether a URL ends as `DatasetConverter.url` of an entry does."""
    return bool(KEY_PATTERN.fullmatch(url.rstrip("/").rpartition("/")[2]))


def open_entry(
    url: str, storage_options: StorageOptions | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> tuple[Storage, str, Manifest | None]:
    """The root, the key and the manifest of the entry whose `DatasetConverter.url` this is.

    Raises:
        CacheNotOwnedError: this package did not make the folder, or another user may have planted it.
        CacheCorruptError, CacheError: as `load`.
    """
    root_url, _, key = url.rstrip("/").rpartition("/")
    root = open_storage(root_url or "/", storage_options, timeout_seconds)
    if root.is_local:
        # From the cache directory, as writers open it: from there on no link is followed when files are removed.
        cache_dir, name = posixpath.split(root.path())
        root = root.at(cache_dir).below(name)
    if KEY_PATTERN.fullmatch(key):
        committed = root.meanwhile(lambda: load(root, key))
        if is_held_here(root.below(key)):
            return root, key, committed()
        if root.size(OWNER_FILE) is not None:
            check_owner(root, OWNER_FILE)
            return root, key, committed()
    shown = shown_url(url)
    if KEY_PATTERN.fullmatch(key) and root.is_local and not root.exists:
        raise CacheNotOwnedError(
            f"{shown} is not a cache entry: there is no folder {shown_url(root_url)} on this machine "
            f"({socket.gethostname()}). If another machine wrote the entry, choose a cache_dir that all of them share.",
            path=shown,
        )
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
    """Whether a folder's name is an entry's key, and begins with `name_hash` if that is given."""
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

    Kept entries win over those that their converters delete.

    Raises:
        CacheError: there is none, or there are several.
        CacheCorruptError: the only one has a manifest that cannot be read.
    """
    shown = shown_url(cache_dir)
    root = find_root(cache_dir, storage_options, timeout_seconds)
    if root is None:
        raise _no_entry(shown, cache_key, "it holds no entries")
    manifests: dict[str, Manifest] = {}
    corrupt: CacheCorruptError | None = None
    for info in list_entries(root, name_hash):
        try:
            manifest = load(root, info.name)
        except CacheCorruptError as error:
            logger.warning("An entry of cache_key=%r cannot be read: %s", cache_key, error)
            corrupt = error
            continue
        if manifest is not None:
            manifests[info.name] = manifest
    manifests = {key: manifest for key, manifest in manifests.items() if manifest.is_kept} or manifests
    if len(manifests) == 1:
        return root, *next(iter(manifests.items()))
    if manifests:
        lines = "".join(f"\n  {root.below(key).url} ({_described(manifest)})" for key, manifest in manifests.items())
        raise CacheError(
            f"{shown} has {len(manifests)} entries of cache_key={cache_key!r}, with different schemas or write "
            f"options. Open one of them by its URL:{lines}",
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
    """How an entry differs from others of its name."""
    written = "" if manifest.origin is None else f"written {manifest.origin.created}, "
    return f"{written}{manifest.num_rows:,} rows, {len(manifest.schema)} columns"


def _names_in(root: Storage) -> str:
    """The `cache_key`s in a cache, of its newest entries."""
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
