"""Where a store lies, as Petastorm's arguments say it: URLs, filesystems, and the folder of local copies."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.fs as pafs
from fsspec.implementations.local import LocalFileSystem

from converter.reading.local_cache import LocalCache, open_local_cache, remove_unheld
from converter.storage.directory import Storage
from converter.storage.urls import shown_url

logger = logging.getLogger(__name__)

_noted: set[str] = set()


def note_driver(hdfs_driver: str) -> None:
    """Say once that there is only one way to HDFS."""
    if hdfs_driver != "libhdfs3" and "hdfs_driver" not in _noted:
        _noted.add("hdfs_driver")
        logger.info("hdfs_driver=%r does nothing: HDFS is read by hdfs-native, without Java.", hdfs_driver)


def checked_urls(url_or_urls: Any) -> list[str]:
    """The URLs as a list.

    Raises:
        ValueError: there is none, one is no text, has no scheme, or they lie on several stores.
    """
    is_list = isinstance(url_or_urls, Sequence) and not isinstance(url_or_urls, (str, bytes))
    urls = list(url_or_urls) if is_list else [url_or_urls]
    # Not the others, which may hold secrets.
    wrong = [url for url in urls if not isinstance(url, str) or not url]
    if wrong or not urls:
        raise ValueError(f"dataset_url must be a URL, or a list of URLs that is not empty, got {wrong!r:.80}.")
    for url in urls:
        if ":" not in url.partition("/")[0]:
            raise ValueError(
                f'ERROR! A scheme-less dataset url ({url}) is no longer supported. Please prepend "file://" for local '
                "filesystem."
            )
    places = {(url.partition("://")[0], url.partition("://")[2].partition("/")[0]) for url in urls}
    if len(places) > 1:
        raise ValueError(
            "The dataset url list must contain url with the same scheme and netloc, got "
            f"{', '.join(map(shown_url, urls[:3]))}."
        )
    return urls


def on_filesystem(urls: Sequence[str], filesystem: Any) -> tuple[list[str], Mapping[str, Any] | None]:
    """The same places, on the filesystem of fsspec or pyarrow that a user opened, and its options.

    Raises:
        ValueError: it is a filesystem whose options are not known.
    """
    # A path alone is enough where the filesystem is known.
    paths = [_path_of(url) for url in urls]
    if isinstance(getattr(filesystem, "fs", filesystem), (pafs.LocalFileSystem, LocalFileSystem)):
        return [f"file://{'' if path.startswith('/') else '/'}{path}" for path in paths], None
    if not hasattr(filesystem, "storage_options") or not hasattr(filesystem, "unstrip_protocol"):
        raise ValueError(
            f"filesystem must be one of fsspec's, or a local one, got {type(filesystem).__name__}. Pass the dataset's "
            "URL with storage_options={…} instead."
        )
    return [filesystem.unstrip_protocol(path) for path in paths], filesystem.storage_options


def _path_of(url: str) -> str:
    """A URL without its scheme, and without the host; a bucket or a container is a part of the path."""
    scheme, found, path = url.partition("://")
    if scheme.lower() in ("hdfs", "viewfs"):
        return "/" + path.partition("/")[2]
    return path if found else url.partition(":")[2] or url


class CacheDir:
    """The folder of this host's copies of what was fetched; local stores need none."""

    def __init__(self, location: str | None, max_bytes: int | None) -> None:
        if not location:
            raise ValueError("cache_type='local-disk' needs cache_location, a folder on this host's disk.")
        self._location, self._max_bytes = os.fspath(location), max_bytes
        self._is_made = not os.path.exists(self._location)
        self._cache: LocalCache | None = None

    def open(self, storage: Storage) -> LocalCache | None:
        """The copies of one store; None if it is on this machine's disk."""
        os.makedirs(self._location, exist_ok=True)
        if storage.is_local:
            return None
        self._cache = open_local_cache(self._location, storage.url, self._max_bytes)
        return self._cache

    def remove(self) -> None:
        """Remove the copies that no reader holds, and the folder if it was made here and is empty; never raises."""
        try:
            if self._cache is not None:
                cache, self._cache = self._cache, None
                cache.release()
                remove_unheld(cache.root)
            if not self._is_made:
                return
            with contextlib.suppress(OSError):
                os.rmdir(self._location)
        except OSError as error:
            logger.warning("The copies in %s could not be removed: %s", self._location, error)
