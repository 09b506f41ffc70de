"""Opens the directory and the store that a URL names; the only module that knows all kinds of store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import fsspec

from converter.errors import MissingDependencyError
from converter.storage.azure import open_azure
from converter.storage.databricks import check_mount, is_on_databricks, python_path_of
from converter.storage.directory import Storage, StorageOptions
from converter.storage.hdfs import HdfsStore
from converter.storage.http import HttpStore
from converter.storage.local import LocalStorage
from converter.storage.objects import ObjectStore
from converter.storage.remote import RemoteStorage
from converter.storage.store import PACKAGES, TIMEOUT_SECONDS, Store, require_package
from converter.storage.urls import (
    AZURE_SCHEMES,
    HTTP_SCHEMES,
    OBJECT_SCHEMES,
    check_names,
    check_signs,
    shown_url,
    split_url,
)

_AZURE_HOST = re.compile(r"[a-z0-9-]+\.(dfs|blob)\.(core\.windows\.net|fabric\.microsoft\.com|core\.[a-z.]+)")


def open_storage(
    url: str | os.PathLike[str],
    storage_options: StorageOptions | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Storage:
    """The directory that `url` (or a plain local path) names; it need not exist.

    >>> open_storage("/data/cache/").url, open_storage("file:/data/cache").url
    ('file:///data/cache', 'file:///data/cache')

    >>> storage = open_storage("memory://doc-example")
    >>> storage.put_if_absent("a.json", b"{}"), storage.put_if_absent("a.json", b"[]")
    (True, False)
    >>> storage.read("a.json")
    b'{}'
    """
    text = os.fspath(url)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"A storage URL must be a non-empty str or path, got {url!r:.80}.")
    if storage_options is not None and not isinstance(storage_options, Mapping):
        # The type alone: the content may be a secret.
        raise TypeError(f"storage_options must be a dict of keyword arguments, got a {type(storage_options).__name__}.")
    if re.search(r"^[A-Za-z][A-Za-z0-9+.-]*::.*://|://.*::[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise ValueError(
            f"{shown_url(text)} is a chain of filesystems, which is not supported. Name one of them alone."
        )
    # Schemes have no case.
    text = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]+:(?=/)", lambda scheme: scheme[0].lower(), text)
    if text.startswith("dbfs:"):
        path = python_path_of(text)
    elif text.startswith("file:"):
        path = unquote(re.sub(r"^file:(//[^/]*)?", "", text))
        if not path:
            raise ValueError(f"{shown_url(text)!r} names no folder: write file:///…, or a path.")
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        store, root, shown = open_store(text, dict(storage_options or {}), timeout_seconds)
        return RemoteStorage(store, root, shown)
    else:
        path = os.path.expanduser(text)
    try:
        root = os.path.abspath(path)
    except FileNotFoundError:
        raise ValueError(
            f"{text!r} is a relative path, but the working directory of this process was removed. Give a whole path."
        ) from None
    try:
        root.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{text!r} is a path whose name is no UTF-8. Rename the folder.") from None
    if is_on_databricks(root):
        check_mount(text, root)
    return LocalStorage(root)


def open_store(url: str, options: Mapping[str, Any], timeout_seconds: float) -> tuple[Store, str, str]:
    """The store that a URL names, the path in it, and the URL as it may be shown."""
    # Hadoop takes hdfs:/path as well as hdfs:///path.
    url = re.sub(r"^(hdfs|viewfs):/(?=[^/])", r"\1:///", url)
    shown = shown_url(url).rstrip("/")
    if "://" not in url:
        raise ValueError(f"{shown!r} is no URL that this version knows: write scheme://…, file:… or a local path.")
    check_signs(url, shown)
    scheme, netloc, path = split_url(url)
    if scheme in AZURE_SCHEMES or (scheme == "https" and _AZURE_HOST.fullmatch(netloc)):
        return open_azure(url, options, timeout_seconds)
    if scheme in ("hdfs", "viewfs"):
        if re.search(r"[?#]", path):
            # The client would open the folder that is named before the sign.
            raise ValueError(f"{shown} has a ? or # in its path, which hdfs-native cannot read. Rename the folder.")
        require_package("hdfs_native", "'spark-tensor-converter[hdfs]'", shown)
        # As Hadoop does.
        path = re.sub("/{2,}", "/", path)
        shown = f"{scheme}://{netloc.rpartition('@')[2]}{path}".rstrip("/")
        place = urlsplit(f"//{netloc}")
        hdfs_options = {"host": place.hostname, "port": place.port} | dict(options)
        if place.username:
            hdfs_options.setdefault("user", place.username)
        return HdfsStore(hdfs_options, protocol=scheme, timeout_seconds=timeout_seconds), path.rstrip("/") or "/", shown
    check_names(path, shown)
    if "::" in path:
        raise ValueError(f"{shown} has a :: in it, which fsspec takes for a chain of filesystems. Rename the folder.")
    named = unquote(path) if scheme in HTTP_SCHEMES else path
    if scheme in (*OBJECT_SCHEMES, *HTTP_SCHEMES) and re.search(r"[?#]", named):
        # fsspec's filesystems disagree on what such a sign means, and the URL that we show must be the true one.
        raise ValueError(f"{shown} is followed by a ? or #, which is not supported here. Rename the folder.")
    if scheme in PACKAGES:
        require_package(*PACKAGES[scheme], shown)
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise MissingDependencyError(
            f"{shown} needs a filesystem that is not installed: {str(error).rstrip('.')}."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{shown} names no filesystem that fsspec knows ({error}). Check the part before ://."
        ) from error
    if scheme in HTTP_SCHEMES and "@" in netloc:
        raise ValueError(
            f"{shown} has a user's name or password in it, which errors would show. Give them as "
            'storage_options={"client_kwargs": {"auth": aiohttp.BasicAuth(…)}}.'
        )
    if scheme in HTTP_SCHEMES:
        web = HttpStore(options, host=netloc, protocol=scheme, timeout_seconds=timeout_seconds)
        # Names are appended to this URL as they are.
        return web, named.strip("/"), unquote(shown)
    if scheme in OBJECT_SCHEMES and "@" in netloc:
        raise ValueError(
            f"{shown} has a user's name or key in it, which errors would show. Give them as storage_options, such as "
            '{"key": …, "secret": …}, or in the environment.'
        )
    filesystem, root = fsspec.core.url_to_fs(url, **options)
    kind = ObjectStore if scheme in OBJECT_SCHEMES else Store
    store = kind(dict(filesystem.storage_options), protocol=scheme, timeout_seconds=timeout_seconds)
    return store, root.rstrip("/") or "/", shown
