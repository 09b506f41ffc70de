"""Finds or makes the cache's own directory, and checks that it is ours.

We write only into our own subdirectory of the user's cache directory, and only if it bears our marker:

    <cache_dir>/converter-v1/.owner                       ownership marker
    <cache_dir>/converter-v1/<key>/data-<attempt>/        one attempt's Parquet files, private by its uuid
    <cache_dir>/converter-v1/<key>/data-<attempt>.intent  written before the job starts, renewed while it runs
    <cache_dir>/converter-v1/<key>/manifest.json          the commit
    <cache_dir>/converter-v1/<key>/lease-<uuid>.json      one for each user of the entry, renewed while it lives
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

import platformdirs

from converter.cache.owners import check_owner, warn_of_writers
from converter.errors import CacheError, CacheNotConfiguredError, CacheNotOwnedError
from converter.storage.directory import Storage, StorageOptions
from converter.storage.opening import open_storage
from converter.storage.store import TIMEOUT_SECONDS
from converter.storage.urls import shown_url

DIRECTORY = "converter-v1"
MANIFEST = "manifest.json"
ENVIRONMENT_VARIABLE = "CONVERTER_CACHE_DIR"
SPARK_CONF = "converter.cacheDir"

OWNER_FILE = ".owner"
_OWNER_BYTES = b'{"package": "spark-tensor-converter", "format_version": 1}\n'
KEY_PATTERN = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
ATTEMPT_PATTERN = re.compile(r"data-([0-9a-f]{32})(\.intent)?")
LEASE_PATTERN = re.compile(r"lease-[0-9a-f]{32}\.json")
PASSING_PATTERN = re.compile(
    r"(\.owner|manifest\.json|data-[0-9a-f]{32}\.intent|lease-[0-9a-f]{32}\.json|\.clock-[0-9a-f]{32})"
    r"\.[0-9a-f]{32}\.tmp|\.clock-[0-9a-f]{32}"
)
"""Temporary files: a small file before it gets its name, and the file that shows the store's time."""

_MARK_TRIES = 3
_READING_STEPS = ("load", "adopt", "list entries")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextlib.contextmanager
def naming_errors(root: Storage, step: str) -> Iterator[None]:
    """Raise a store's error as a CacheError that names the cache and the step."""
    try:
        yield
    except OSError as error:
        left = "" if step in _READING_STEPS else " A later sweep removes what is left there."
        raise CacheError(
            f"The cache at {root.url} failed to {step}: {str(error).rstrip('.')}.{left}", path=root.url
        ) from error


def named_errors(
    step: Callable[Concatenate[Storage, Arguments], Result],
) -> Callable[Concatenate[Storage, Arguments], Result]:
    """`naming_errors` for a whole function, whose name is the step's."""

    @functools.wraps(step)
    def named(root: Storage, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        with naming_errors(root, step.__name__.replace("_", " ")):
            return step(root, *arguments, **options)

    return named  # type: ignore[return-value]  # mypy minds the first argument's name.


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
        f"No cache directory is configured, and Spark runs on {where}. Name a directory that the driver and every "
        f"executor see: cache_dir=…, the environment variable {ENVIRONMENT_VARIABLE}, or the Spark conf {SPARK_CONF}."
    )


def open_parent(
    cache_dir: str, storage_options: StorageOptions | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> Storage:
    """The user's cache directory, without a request to its store.

    Raises:
        CacheError: `cache_dir` is not a valid path or URL, or the package for its store is not installed.
    """
    try:
        parent = open_storage(cache_dir, storage_options, timeout_seconds)
    except (ImportError, ValueError) as error:
        if not cache_dir.strip():
            raise
        shown = shown_url(cache_dir)
        raise CacheError(f"cache_dir={shown!r} cannot be used: {str(error).rstrip('.')}.", path=shown) from error
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
    """Our own subdirectory of the user's cache directory, made and marked if it is missing.

    Raises:
        CacheError: the directory is a file, or cannot be written.
        CacheNotOwnedError: the subdirectory is not empty and lacks our marker, or another user may have planted it.
    """
    parent = open_parent(cache_dir, storage_options, timeout_seconds)
    root = parent.below(DIRECTORY)
    try:
        root.make_directory()
        check_owner(root)
        if root.size(OWNER_FILE) is None:
            _check_owned(root)
            _put_marker(root)
        check_owner(root, OWNER_FILE)
        warn_of_writers(root)
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
        CacheError: the directory is a file.
        CacheNotOwnedError: the subdirectory is not empty and lacks our marker, or another user may have planted it.
    """
    root = open_storage(cache_dir, storage_options, timeout_seconds).below(DIRECTORY)
    if root.size(OWNER_FILE) is not None:
        check_owner(root, OWNER_FILE)
        return root
    if root.is_at_a_file:
        shown = shown_url(cache_dir)
        raise CacheError(
            f"{shown} is a file, where a directory was expected. Choose another cache_dir, or remove the file.",
            path=shown,
        )
    _check_owned(root)
    return None


def _put_marker(root: Storage) -> None:
    """Put our marker, or find it put by another process. Raises OSError."""
    for _ in range(_MARK_TRIES):
        # A store or a network disk may call a name taken that is not: without the marker nobody could open the cache.
        if root.put_if_absent(OWNER_FILE, _OWNER_BYTES) or root.size(OWNER_FILE) is not None:
            return
    raise FileExistsError(f"{OWNER_FILE} can neither be created nor read")


def _check_owned(root: Storage) -> None:
    """Raise CacheNotOwnedError if a folder without our marker holds files of others."""
    has_foreign_files = any(not PASSING_PATTERN.fullmatch(info.name) for info in root.list())
    # Checked again: another process may have put the marker, and then files, in between.
    if has_foreign_files and root.size(OWNER_FILE) is None:
        raise CacheNotOwnedError(
            f"{root.url} holds files but not the marker {OWNER_FILE} of this package, so it is left alone. "
            "Choose another cache_dir, or empty that folder.",
            path=root.url,
        )
