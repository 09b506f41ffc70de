"""The filesystem and the path that a dataset's URL names, as users of Petastorm ask for them.

What comes out are filesystems of fsspec, opened as the native readers open them: the same schemes, credentials and
names. `hdfs://` needs no Java (`connector` and `hdfs_driver` are accepted and do nothing).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn
from urllib.parse import ParseResult, urlparse

import fsspec

from converter.garbage import keep_garbage_of_parents
from converter.petastorm import places
from converter.portable.filesystems import open_filesystem
from converter.storage.databricks import python_path_of
from converter.storage.opening import open_storage
from converter.storage.urls import HTTP_SCHEMES, shown_url

logger = logging.getLogger(__name__)

_WITHOUT_BUCKET = ("file", "hdfs", "viewfs", "dbfs", "memory")
_DEFAULT_FILESYSTEM = "fs.defaultFS"


def get_dataset_path(parsed_url: ParseResult) -> str:
    """The path of a URL on its filesystem: with the bucket or the container if it has one.

    >>> get_dataset_path(urlparse("s3://bucket/a/b")), get_dataset_path(urlparse("file:///a/b"))
    ('bucket/a/b', '/a/b')
    """
    scheme = parsed_url.scheme.lower()
    if scheme in ("file", "hdfs", "viewfs"):
        return parsed_url.path
    if scheme == "dbfs":
        return python_path_of(parsed_url.geturl())
    return str(fsspec.core.strip_protocol(parsed_url.geturl()))


class FilesystemResolver:
    """The filesystem of a dataset's URL, and the dataset's path on it.

    Raises:
        ValueError: the URL has no scheme, one that is not known, or no bucket where there must be one.
        RuntimeError: an `hdfs:///` URL with a Hadoop configuration that names no default filesystem.

    >>> resolver = FilesystemResolver("file:///data/rides")
    >>> type(resolver.filesystem()).__name__, resolver.get_dataset_path()
    ('LocalFileSystem', '/data/rides')
    """

    def __init__(
        self,
        dataset_url: str | ParseResult,
        hadoop_configuration: Any = None,
        connector: Any = None,
        hdfs_driver: str = "libhdfs3",
        user: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        del connector
        places.note_driver(hdfs_driver)
        parsed = urlparse(dataset_url) if isinstance(dataset_url, str) else dataset_url
        if not parsed.scheme:
            raise ValueError(
                f"ERROR! A scheme-less dataset url ({parsed.geturl()}) is no longer supported. Please prepend "
                '"file://" for local filesystem.'
            )
        options = dict(storage_options or {})
        if parsed.scheme == "hdfs":
            keep_garbage_of_parents()
            parsed = _with_default_cluster(parsed, hadoop_configuration)
            if user is not None:
                options.setdefault("user", user)
        elif not parsed.netloc and parsed.scheme not in (*_WITHOUT_BUCKET, *HTTP_SCHEMES):
            raise ValueError(
                f"URLs must be of the form {parsed.scheme}://bucket/path, got {shown_url(parsed.geturl())}."
            )
        self._parsed = parsed
        store = open_storage(parsed.geturl(), options).store
        self._factory: Callable[[], Any] = (
            functools.partial(fsspec.filesystem, "file") if store is None else functools.partial(open_filesystem, store)
        )
        self._filesystem: Any = None

    def parsed_dataset_url(self) -> ParseResult:
        """The URL in its parts."""
        return self._parsed

    def get_dataset_path(self) -> str:
        """The dataset's path on its filesystem."""
        return get_dataset_path(self._parsed)

    def filesystem(self) -> Any:
        """The filesystem, an fsspec one; opened when it is first asked for."""
        if self._filesystem is None:
            self._filesystem = self._factory()
        return self._filesystem

    def filesystem_factory(self) -> Callable[[], Any]:
        """A function that opens the filesystem in another process. It can be pickled, and holds the credentials."""
        return self._factory

    def __getstate__(self) -> NoReturn:
        raise RuntimeError(
            "Pickling FilesystemResolver is not supported, as an opened filesystem may not be picklable. Send "
            "filesystem_factory() instead."
        )


def get_filesystem_and_path_or_paths(
    url_or_urls: str | Sequence[str],
    hdfs_driver: str = "libhdfs3",
    storage_options: Mapping[str, Any] | None = None,
    filesystem: Any = None,
) -> tuple[Any, str | list[str]]:
    """The filesystem of one URL or of several, and the path of each; a list of paths for a list of URLs.

    Raises:
        ValueError: the URLs do not lie on one filesystem, or `FilesystemResolver` does not know it.
    """
    urls = [url_or_urls] if isinstance(url_or_urls, str) else list(url_or_urls)
    parsed = [urlparse(url) for url in urls]
    if len({(url.scheme, url.netloc) for url in parsed}) != 1:
        raise ValueError("The dataset url list must contain url with the same scheme and netloc.")
    resolver_of = functools.partial(FilesystemResolver, hdfs_driver=hdfs_driver, storage_options=storage_options)
    opened = filesystem or resolver_of(urls[0]).filesystem()
    paths = [get_dataset_path(url) for url in parsed]
    return opened, paths[0] if isinstance(url_or_urls, str) else paths


def normalize_dir_url(dataset_url: Any) -> str:
    """A folder's URL without the slash at its end.

    Raises:
        ValueError: it is no text.
    """
    if not isinstance(dataset_url, str) or not dataset_url:
        raise ValueError("directory url must be a string")
    return dataset_url.removesuffix("/")


def normalize_dataset_url_or_urls(dataset_url_or_urls: Any) -> str | list[str]:
    """A URL, or each URL of a list, without the slash at its end.

    Raises:
        ValueError: it is neither, or the list is empty.
    """
    if isinstance(dataset_url_or_urls, list):
        if not dataset_url_or_urls:
            raise ValueError("dataset url list must be non-empty.")
        return [normalize_dir_url(url) for url in dataset_url_or_urls]
    return normalize_dir_url(dataset_url_or_urls)


def _with_default_cluster(parsed: ParseResult, hadoop_configuration: Any) -> ParseResult:
    """An `hdfs:///` URL with the cluster that the session's Hadoop configuration names; without one, as it is.

    hdfs-native then takes the cluster from the files that HADOOP_CONF_DIR names.
    """
    if parsed.netloc or hadoop_configuration is None:
        return parsed
    default = hadoop_configuration.get(_DEFAULT_FILESYSTEM)
    if not default:
        raise RuntimeError(
            f"{parsed.geturl()} names no cluster, and the Hadoop configuration has no {_DEFAULT_FILESYSTEM}. Write "
            "hdfs://host:port/…."
        )
    cluster = urlparse(str(default))
    return parsed if cluster.scheme != "hdfs" else parsed._replace(netloc=cluster.netloc)
