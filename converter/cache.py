"""The hashed cache directory: begin, commit, load, delete.

    <cache_dir>/converter-v1/.owner                       ownership marker
    <cache_dir>/converter-v1/<key>/data-<attempt>/        one attempt's Parquet files, private by its uuid
    <cache_dir>/converter-v1/<key>/data-<attempt>.intent  written before the job starts
    <cache_dir>/converter-v1/<key>/manifest.json          the commit

Two laws. A directory without a manifest does not exist for readers, so a driver
that dies leaves nothing that anyone takes for a cache. And only what our manifest
lists, or what bears our own pattern of names inside our own `data-<attempt>`
folders, is ever deleted.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
import uuid
from dataclasses import dataclass

import platformdirs

from converter.errors import CacheCorruptError, CacheError, CacheNotConfiguredError, CacheNotOwnedError
from converter.manifest import Manifest
from converter.storage import Storage, StorageOptions, open_storage

logger = logging.getLogger(__name__)

DIRECTORY = "converter-v1"
MANIFEST = "manifest.json"
ENVIRONMENT_VARIABLE = "CONVERTER_CACHE_DIR"
SPARK_CONF = "converter.cacheDir"

_OWNER = ".owner"
_OWNER_BYTES = b'{"package": "spark-tensor-converter", "format_version": 1}\n'
_DATA_FILE = re.compile(r"part-[0-9]{5,}-[0-9a-f]{8,}-[0-9]{4,}\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try at writing an entry; its uuid makes its folder private."""

    key: str
    attempt_id: str

    @property
    def data_directory(self) -> str:
        """The folder of its Parquet files, below the entry."""
        return f"data-{self.attempt_id}"

    @property
    def intent_name(self) -> str:
        """The file that says who is writing."""
        return f"{self.data_directory}.intent"


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


def open_root(cache_dir: str, storage_options: StorageOptions | None = None) -> Storage:
    """Our own subdirectory of the user's cache directory, made and marked where it is missing.

    Raises:
        CacheError: the directory is a file, or cannot be written.
        CacheNotOwnedError: the subdirectory exists, holds something and was not made by us.
    """
    parent = open_storage(cache_dir, storage_options)
    if not parent.is_local:
        raise CacheError(
            f"cache_dir={parent.url!r} is not a local directory. This version caches on disks that the driver and "
            "the executors see as files: give a path or a file: URL.",
            path=parent.url,
        )
    root = parent.below(DIRECTORY)
    try:
        root.make_directory()
        if root.size(_OWNER) is None:
            if root.list():
                raise CacheNotOwnedError(
                    f"{root.url} holds files but not the marker {_OWNER} of this package, so it is left alone. "
                    "Choose another cache_dir, or empty that folder.",
                    path=root.url,
                )
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


def begin(root: Storage, key: str, *, application_id: str) -> Attempt:
    """Announce an attempt before its first byte is written, so that what a dead driver leaves has a name."""
    attempt = Attempt(key=key, attempt_id=uuid.uuid4().hex)
    entry = root.below(key)
    entry.make_directory()
    intent = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "application_id": application_id,
        "created": time.time(),
    }
    entry.put_if_absent(attempt.intent_name, json.dumps(intent).encode())
    return attempt


def commit(root: Storage, attempt: Attempt, manifest: Manifest) -> Manifest:
    """Make the attempt the entry's content; where another came first, remove this one and return the other's.

    Raises:
        CacheError: a file that the executors reported is not there at its size, as seen from here.
    """
    entry = root.below(attempt.key)
    seen = {info.name: info.num_bytes for info in entry.below(attempt.data_directory).list()}
    for name, num_bytes in zip(manifest.file_names, manifest.file_bytes.tolist(), strict=True):
        found = seen.get(name.rpartition("/")[2])
        if found != num_bytes:
            what = "is not there" if found is None else f"has {found} bytes instead of {num_bytes}"
            raise CacheError(
                f"Spark's executors reported {len(manifest.file_names)} files, but {entry.url}/{name} {what} as seen "
                "by the driver. Is the cache directory on a disk of its own on each machine? Choose a cache_dir that "
                "the driver and every executor share.",
                path=f"{entry.url}/{name}",
            )
    # Put last: a directory without a manifest does not exist for readers.
    if entry.put_if_absent(MANIFEST, manifest.to_json()):
        return manifest
    abandon(root, attempt)
    return load(root, attempt.key)


def load(root: Storage, key: str) -> Manifest:
    """The committed manifest of an entry.

    Raises:
        CacheError: there is no such entry.
        CacheCorruptError: its manifest is not one of ours.
    """
    entry = root.below(key)
    path = f"{entry.url}/{MANIFEST}"
    try:
        data = entry.read(MANIFEST)
    except FileNotFoundError as error:
        raise CacheError(f"There is no committed cache entry at {entry.url}.", path=entry.url) from error
    manifest = Manifest.from_json(data, path=path)
    if len({name.partition("/")[0] for name in manifest.file_names}) > 1:
        raise CacheCorruptError(f"{path} lists files of several attempts; one was committed.", path=path)
    return manifest


def abandon(root: Storage, attempt: Attempt) -> None:
    """Remove what an attempt wrote: its data files, its folder, its intent."""
    entry = root.below(attempt.key)
    _delete_data(entry.below(attempt.data_directory))
    entry.delete_file(attempt.intent_name)
    entry.delete_directory_if_empty()


def delete(root: Storage, key: str, manifest: Manifest) -> None:
    """Remove a committed entry: the manifest first, so that nobody opens it half-deleted."""
    entry = root.below(key)
    entry.delete_file(MANIFEST)
    for directory in sorted({name.partition("/")[0] for name in manifest.file_names}):
        _delete_data(entry.below(directory))
        entry.delete_file(f"{directory}.intent")
    entry.delete_directory_if_empty()


def _delete_data(directory: Storage) -> None:
    """Remove our data files of one attempt, and its folder if nothing else stands there."""
    foreign = []
    for info in directory.list():
        if _DATA_FILE.fullmatch(info.name) and not info.is_directory:
            directory.delete_file(info.name)
        else:
            foreign.append(info.name)
    if foreign:
        logger.warning(
            "Left %d files in %s that this package did not write: %s", len(foreign), directory.url, foreign[:3]
        )
        return
    directory.delete_directory_if_empty()
