"""Azure's blobs and data lakes: their URLs, hosts and credentials, and how adlfs is asked."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import importlib.util
import inspect
import math
import os
import re
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from fsspec.asyn import sync

from converter.storage.requests import GONE_STATUS, status_of
from converter.storage.store import Store, detach_finalizers, require_package
from converter.storage.urls import AZURE_SCHEMES, check_names, check_signs, split_url

_AZURE_SCOPE = "https://storage.azure.com/.default"
_AZURE_CREDENTIALS = ("connection_string", "account_key", "sas_token", "credential", "client_secret")
_AZURE_BLOBS = "blob.core.windows.net"
_AZURE_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"
_AZURE_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"
_FSSPEC_OPTIONS = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "loop"}
"""Options of every filesystem of fsspec."""

_CLOSE_SECONDS = 1.0


class AzureStore(Store):
    """Azure's blobs through adlfs, on flat and hierarchical accounts."""

    _seen_container = ""
    """The last container that was seen to exist."""

    def _open(self) -> Any:
        try:
            filesystem = super()._open()
        except (ValueError, TypeError, AttributeError) as error:
            raise self._unusable(error) from None
        # Not a credential of the user's, which may be in use elsewhere.
        names = ("service_client", "credential") if self.options.get("credential") is None else ("service_client",)
        clients = [getattr(filesystem, name, None) for name in names]
        # adlfs's own would hold it until the process ends.
        detach_finalizers(filesystem)
        weakref.finalize(filesystem, _close, os.getpid(), getattr(filesystem, "loop", None), clients)
        return filesystem

    def _unusable(self, error: Exception) -> OSError:
        names = ", ".join(sorted(set(self.options) & set(_AZURE_CREDENTIALS))) or "no credential"
        return OSError(f"storage_options ({names}) cannot be used: {self._text(error)}")

    def delta_options(self) -> dict[str, str]:
        """The credentials by deltalake's names; a token provider is asked for one token."""
        filesystem = self.filesystem()
        connection_string = str(self.options.get("connection_string") or "")
        connection = dict(part.partition("=")[::2] for part in connection_string.split(";") if part)
        account = connection.get("AccountName") or filesystem.account_name or filesystem.service_client.account_name
        # With a connection string adlfs ignores all other credentials.
        credential: Any = None if connection else filesystem.credential
        if connection:
            key, signature = connection.get("AccountKey"), connection.get("SharedAccessSignature")
        else:
            key = getattr(getattr(credential, "named_key", None), "key", filesystem.account_key)
            signature = getattr(credential, "signature", filesystem.sas_token)
        if isinstance(credential, str):
            key, signature = (key, credential) if "sig=" in credential else (credential, signature)
        secrets = {"account_name": account, "account_key": key, "sas_token": signature}
        options = {name: str(value).removeprefix("?") for name, value in secrets.items() if value}
        if hasattr(credential, "get_token"):
            options["bearer_token"] = str(sync(filesystem.loop, credential.get_token, _AZURE_SCOPE).token)
        elif len(options) == 1:
            options["azure_skip_signature"] = "true"
        endpoint = str(filesystem.service_client.url).partition("?")[0].rstrip("/")
        if endpoint != f"https://{account}.{_AZURE_BLOBS}":
            options["azure_endpoint"] = endpoint
        if endpoint.startswith("http://"):
            options["allow_http"] = "true"
        return options

    def delta_url(self, url: str) -> str:
        """The URL with the first cloud's host, which deltalake knows; another cloud's host is passed as an endpoint."""
        return re.sub(r"(://[^/]*\.dfs\.)core\.[^/]+", r"\1core.windows.net", url)

    def path_of(self, url: str) -> str | None:
        """The path of a URL on this account, with the container; `?` and `#` are ordinary signs."""
        scheme, netloc, path = split_url(url)
        container, _, host = netloc.partition("@")
        account = host.partition(".")[0]
        own_account = self.options.get("account_name") or _account_in(self.options.get("connection_string"))
        is_other = scheme not in AZURE_SCHEMES or bool(account and own_account and account != own_account)
        return None if is_other else f"{container}{path}"

    def _named(self, error: Exception, path: str) -> OSError:
        if type(error).__name__ == "AzureSigningError":
            return self._unusable(error)
        named = super()._named(error, path)
        by_connection = "SharedAccessSignature" in str(self.options.get("connection_string"))
        if isinstance(named, PermissionError) and (by_connection or "sas_token" in self.options):
            return PermissionError(
                f"{str(named).rstrip('.')}. A signature for a cache must allow to read, create, write, delete and list "
                "(sp=rcwdl); to read files that are there, to read and list (sp=rl)."
            )
        return named

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        """What a folder holds; a blob that marks a folder is listed as the folder alone."""
        try:
            listed = super().ls(path, detail)
        except FileNotFoundError:
            container = path.strip("/").partition("/")[0]
            if self._lacks(container, path):
                raise OSError(
                    f"there is no container {container!r} in this account; check its name, or create it"
                ) from None
            raise
        if [(info["name"].strip("/"), info["size"]) for info in listed] == [(path.strip("/"), 0)] and self._hides(path):
            raise OSError(f"{path} is an empty blob, which hides the folder of its name from adlfs. Delete the blob.")
        by_name: dict[str, dict[str, Any]] = {}
        for info in listed:
            name = info["name"].rstrip("/")
            if name not in by_name or info["type"] == "directory":
                by_name[name] = info
        return list(by_name.values())

    def _hides(self, path: str) -> bool:
        """Whether a folder with a blob's name holds blobs."""
        container, _, name = path.strip("/").partition("/")

        async def is_any(filesystem: Any) -> bool:
            below = filesystem.service_client.get_container_client(container).list_blobs(name_starts_with=f"{name}/")
            async for _ in below:
                return True
            return False

        return self.ask(lambda filesystem: bool(sync(filesystem.loop, is_any, filesystem)), path=path)

    def _lacks(self, container: str, path: str) -> bool:
        """Whether there is certainly no such container; a signature may not allow to ask."""

        def exists(filesystem: Any) -> bool:
            return bool(sync(filesystem.loop, filesystem.service_client.get_container_client(container).exists))

        if container != self._seen_container:
            with contextlib.suppress(OSError):
                if not self.ask(exists, path=path):
                    return True
                self._seen_container = container
        return False

    def makedirs(self, path: str, exist_ok: bool = True) -> None:
        """Do nothing: a folder exists while it has a blob, and the user creates containers."""

    def _create(self, filesystem: Any, path: str, data: bytes) -> None:
        # If-None-Match: * (adlfs's `mode="create"`).
        filesystem.pipe_file(path, data, mode="create")

    def renew(self, path: str, given_up: threading.Event | None = None, within: float = math.inf) -> None:
        """Write the blob's metadata again."""

        def renew(filesystem: Any) -> None:
            try:
                filesystem.setxattrs(path, is_directory="false")
            except FileNotFoundError as error:
                # adlfs reports any failure so, throttling too.
                cause = error.__cause__
                if not isinstance(cause, Exception) or status_of(cause) in GONE_STATUS:
                    raise
                raise cause from None

        self.ask(renew, path=path, given_up=given_up, within=within)

    def rmdir(self, path: str) -> None:
        """Delete the blob that marks a folder, if Spark's driver made one; never a container."""
        if "/" in path.strip("/") and not self.ls(path):
            with contextlib.suppress(OSError):
                self.rm_file(path)


def open_azure(url: str, options: Mapping[str, Any], timeout_seconds: float) -> tuple[Store, str, str]:
    """The store, the root and the shown URL of a place in Azure."""
    place = parse_azure_url(url)
    # A connection string of None counts as none.
    given = {name: value for name, value in options.items() if (name, value) != ("connection_string", None)}
    connected, origin = _account_in(given.get("connection_string")), "the connection string"
    if "connection_string" not in given and os.environ.get(_AZURE_CONNECTION):
        # adlfs prefers it to all other options.
        connected, origin = _account_in(os.environ[_AZURE_CONNECTION]), f"the environment variable {_AZURE_CONNECTION}"
    account = place.account or given.get("account_name") or connected or os.environ.get(_AZURE_ACCOUNT)
    if account is None:
        default = _default_place_of_spark()
        if default is None or default.account is None:
            raise ValueError(
                f"{url.partition('?')[0]} names no account. Write abfss://container@account.dfs.core.windows.net/path, "
                f"or give storage_options={{'account_name': …}} or the environment variable {_AZURE_ACCOUNT}. "
                "(A Spark session whose fs.defaultFS is on Azure names it too.)"
            )
        place = replace(place, account=default.account, host=default.host, account_host=default.account_host)
        account = default.account
    host = place.host or f"{account}.dfs.core.windows.net"
    shown = f"{place.scheme}://{place.container}@{host}/{place.path}".rstrip("/")
    check_names(place.path, shown)
    check_signs(place.path, shown)
    require_package("adlfs", "'spark-tensor-converter[azure]'", shown)
    if connected not in (None, account):
        raise ValueError(
            f"{shown} is in the account {account!r}, but {origin} is for {connected!r}. Use the same account in both, "
            f"or unset {origin}."
        )
    if "connection_string" not in given:
        given["account_name"] = account
    if place.account_host is not None:
        given.setdefault("account_host", place.account_host)
    _check_azure_options(given, shown)
    root = f"{place.container}/{place.path}".rstrip("/")
    return AzureStore(given, protocol="abfs", timeout_seconds=timeout_seconds), root, shown


def _check_azure_options(options: Mapping[str, Any], shown: str) -> None:
    """Refuse options that adlfs would silently ignore, such as a misspelt credential."""
    adlfs: Any = importlib.import_module("adlfs")
    names = {*inspect.signature(adlfs.AzureBlobFileSystem.__init__).parameters, *_FSSPEC_OPTIONS} - {"self", "kwargs"}
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(sorted(names - _FSSPEC_OPTIONS))}."
            raise ValueError(f"storage_options: adlfs, which reads {shown}, knows no {name!r}; {hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AzurePlace:
    """The parts of a URL of Azure's."""

    scheme: str
    container: str
    path: str
    account: str | None
    """None if the URL names none: `abfs://container/path`."""

    host: str | None
    """The host of Data Lake Storage, as Spark takes it."""

    account_host: str | None = None
    """The blob endpoint, if it is not `<account>.blob.core.windows.net`."""


def parse_azure_url(url: str) -> AzurePlace:
    """A URL of Azure's in any of its forms; OneLake's is passed through.

    >>> place = parse_azure_url("https://lake.blob.core.windows.net/data/a/b")
    >>> place.container, place.path, place.account, place.host
    ('data', 'a/b', 'lake', 'lake.dfs.core.windows.net')
    """
    if re.search(r"[?#]", url):
        raise ValueError(
            f"{re.split('[?#]', url)[0]} is followed by a ? or #, which is not supported in Azure URLs. Pass a "
            "signature as storage_options={'sas_token': …}; in an https URL write a # of a name as %23."
        )
    parts = urlsplit(url)
    path = unquote(parts.path).strip("/") if parts.scheme == "https" else parts.path.strip("/")
    if parts.scheme == "https":
        container, _, path = path.partition("/")
        scheme, host = "abfss", parts.netloc
    elif "@" in parts.netloc:
        container, _, host = parts.netloc.partition("@")
        scheme = "abfs" if parts.scheme == "az" else parts.scheme
    else:
        container, host, scheme = parts.netloc, "", "abfs" if parts.scheme == "az" else parts.scheme
    if not container:
        raise ValueError(f"{url.partition('?')[0]} names no container: write abfss://container@account…/path.")
    if not host:
        return AzurePlace(scheme=scheme, container=container, path=path, account=None, host=None)
    account, _, domain = host.partition(".")
    kind, _, suffix = domain.partition(".")
    if kind not in ("dfs", "blob"):
        raise ValueError(f"{host} is not a host of Azure storage: expected <account>.dfs.core.windows.net.")
    return AzurePlace(
        scheme=scheme,
        container=container,
        path=path,
        account=account,
        host=f"{account}.dfs.{suffix}",
        account_host=None if suffix == "core.windows.net" else f"{account}.blob.{suffix}",
    )


def _account_in(connection_string: Any) -> str | None:
    """The account that a connection string names."""
    if not isinstance(connection_string, str):
        return None
    # With a signature it may name the account in the endpoint alone.
    patterns = (r"AccountName=([^;]+)", r"BlobEndpoint=https?://([^./:;]+)\.blob\.")
    matches = (re.search(pattern, connection_string) for pattern in patterns)
    return next((match[1] for match in matches if match is not None), None)


def _close(pid: int, loop: asyncio.AbstractEventLoop | None, clients: list[Any]) -> None:
    if os.getpid() != pid or loop is None:
        # The loop's thread is the parent's.
        return

    async def close() -> None:
        for client in clients:
            with contextlib.suppress(Exception):
                closing = client.close()
                if inspect.isawaitable(closing):
                    await closing

    try:
        sync(loop, close, timeout=_CLOSE_SECONDS)
    except NotImplementedError:
        # The collector runs in the loop's own thread.
        asyncio.run_coroutine_threadsafe(close(), loop)
    except (RuntimeError, asyncio.TimeoutError):
        # The loop has ended, or is busy.
        pass


def _default_place_of_spark() -> AzurePlace | None:
    """The default filesystem of Spark in this process, if it is on Azure: Synapse and Fabric start Spark so.

    Asked of the context, because a session is active only in the thread that made it.

    Reaches into: pyspark.SparkContext._active_spark_context and ._jsc (pyspark 4.2).
    Without it: a URL without an account needs storage_options or the environment to name one.
    """
    spark: Any = sys.modules.get("pyspark")
    # There may be no context, or one that was stopped; the default may be no place of Azure's.
    with contextlib.suppress(Exception):
        confs = spark.SparkContext._active_spark_context._jsc.hadoopConfiguration()  # noqa: SLF001
        return parse_azure_url(str(confs.get("fs.defaultFS")))
    return None
