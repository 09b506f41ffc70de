"""Azure's blobs and data lakes: how their URLs, hosts and credentials are understood."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import os
import re
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import unquote, urlsplit

from fsspec.asyn import sync

from converter.storage.requests import GONE_STATUS, status_of
from converter.storage.store import Store, require_package
from converter.storage.urls import AZURE_SCHEMES, check_names, check_signs, split_url

_AZURE_SCOPE = "https://storage.azure.com/.default"
_AZURE_CREDENTIALS = ("connection_string", "account_key", "sas_token", "credential", "client_secret")
_AZURE_BLOBS = "blob.core.windows.net"
_AZURE_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"
_AZURE_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"
_FSSPEC_OPTIONS = {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "loop"}
"""What every filesystem of fsspec takes."""


class AzureStore(Store):
    """Azure's blobs through adlfs, on flat and hierarchical accounts."""

    _seen_container = ""
    """The last one that was there."""

    def _open(self) -> Any:
        try:
            filesystem = super()._open()
        except (ValueError, TypeError, AttributeError) as error:
            raise self._unusable(error) from None
        # Azure's own patience begins with 15 seconds, knows no deadline, and hides that a put was tried before.
        policy = getattr(getattr(filesystem.service_client, "_config", None), "retry_policy", None)
        for name in ("total_retries", "connect_retries", "read_retries", "status_retries"):
            if hasattr(policy, name):
                setattr(policy, name, 0)
        return filesystem

    def _unusable(self, error: Exception) -> OSError:
        names = ", ".join(sorted(set(self.options) & set(_AZURE_CREDENTIALS))) or "no credential"
        return OSError(f"storage_options ({names}) cannot be used: {self._text(error)}")

    def delta_options(self) -> dict[str, str]:
        """The credentials by the names that deltalake has for them; of what gives tokens one token."""
        filesystem = self.filesystem()
        connection = str(self.options.get("connection_string") or "")
        said = dict(part.partition("=")[::2] for part in connection.split(";") if part)
        # Of a connection string adlfs takes nothing else.
        credential: Any = None if connection else filesystem.credential
        account = said.get("AccountName") or filesystem.account_name or filesystem.service_client.account_name
        named_key = getattr(credential, "named_key", None)
        wanted = {
            "account_name": account,
            "account_key": said.get("AccountKey") if connection else getattr(named_key, "key", filesystem.account_key),
            "sas_token": said.get("SharedAccessSignature")
            if connection
            else getattr(credential, "signature", filesystem.sas_token),
        }
        if isinstance(credential, str):
            wanted["sas_token" if "sig=" in credential else "account_key"] = credential
        found = {name: str(value).removeprefix("?") for name, value in wanted.items() if value}
        if hasattr(credential, "get_token"):
            found["bearer_token"] = str(sync(filesystem.loop, credential.get_token, _AZURE_SCOPE).token)
        elif len(found) == 1:
            found["azure_skip_signature"] = "true"
        endpoint = str(filesystem.service_client.url).partition("?")[0].rstrip("/")
        if endpoint != f"https://{account}.{_AZURE_BLOBS}":
            found["azure_endpoint"] = endpoint
        if endpoint.startswith("http://"):
            found["allow_http"] = "true"
        return found

    def delta_url(self, url: str) -> str:
        """With the host that it knows: of another cloud's it is told as an endpoint."""
        return re.sub(r"(://[^/]*\.dfs\.)core\.[^/]+", r"\1core.windows.net", url)

    def path_of(self, url: str) -> str | None:
        """The path of a URL on this account, with the container; a `?` or `#` is a sign of a name like any."""
        scheme, netloc, path = split_url(url)
        container, _, host = netloc.partition("@")
        account, known = host.partition(".")[0], self.options.get("account_name")
        known = known or _account_in(self.options.get("connection_string"))
        is_other = scheme not in AZURE_SCHEMES or bool(account and known and account != known)
        return None if is_other else f"{container}{path}"

    def _named(self, error: Exception, path: str) -> OSError:
        if type(error).__name__ == "AzureSigningError":
            return self._unusable(error)
        found = super()._named(error, path)
        by_connection = "SharedAccessSignature" in str(self.options.get("connection_string"))
        if isinstance(found, PermissionError) and (by_connection or "sas_token" in self.options):
            said = "A signature for a cache must allow to read, create, write, delete and list (sp=rcwdl)"
            return PermissionError(
                f"{str(found).rstrip('.')}. {said}; to read files that are there, to read and list (sp=rl)"
            )
        return found

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        """What stands in a folder; a blob that stands for a folder is no file beside it."""
        found: dict[str, dict[str, Any]] = {}
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
        for info in listed:
            name = info["name"].rstrip("/")
            if name not in found or info["type"] == "directory":
                found[name] = info
        return list(found.values())

    def _hides(self, path: str) -> bool:
        """Whether blobs are in the folder of a blob's name."""
        container, _, name = path.strip("/").partition("/")

        async def is_any(filesystem: Any) -> bool:
            below = filesystem.service_client.get_container_client(container).list_blobs(name_starts_with=f"{name}/")
            async for _ in below:
                return True
            return False

        return self.ask(lambda filesystem: bool(sync(filesystem.loop, is_any, filesystem)), path=path)

    def _lacks(self, container: str, path: str) -> bool:
        """Whether there certainly is no such container: a signature may not allow to ask."""

        def exists(filesystem: Any) -> bool:
            return bool(sync(filesystem.loop, filesystem.service_client.get_container_client(container).exists))

        if container != self._seen_container:
            with contextlib.suppress(OSError):
                if not self.ask(exists, path=path):
                    return True
                self._seen_container = container
        return False

    def makedirs(self, path: str, exist_ok: bool = True) -> None:
        """Do nothing: a folder is there when a blob is. A container is the user's to create."""

    def _create(self, filesystem: Any, path: str, data: bytes) -> None:
        # If-None-Match: * (adlfs's `mode="create"`).
        filesystem.pipe_file(path, data, mode="create")

    def renew(self, path: str, given_up: threading.Event | None = None) -> None:
        """Write the blob's metadata again."""

        def renew(filesystem: Any) -> None:
            try:
                filesystem.setxattrs(path, is_directory="false")
            except FileNotFoundError as error:
                # adlfs says that of whatever went wrong: of throttling, too.
                cause = error.__cause__
                if not isinstance(cause, Exception) or status_of(cause) in GONE_STATUS:
                    raise
                raise cause from None

        self.ask(renew, path=path, given_up=given_up)

    def rmdir(self, path: str) -> None:
        """Delete the blob that stands for a folder, if Spark's driver made one; never a container."""
        if "/" in path.strip("/") and not self.ls(path):
            with contextlib.suppress(OSError):
                self.rm_file(path)


def open_azure(url: str, options: Mapping[str, Any], timeout_seconds: float) -> tuple[Store, str, str]:
    """The store, the root and the shown URL of a place in Azure."""
    place = parse_azure_url(url)
    # As where it is not said.
    found = {name: value for name, value in options.items() if (name, value) != ("connection_string", None)}
    said, who = _account_in(found.get("connection_string")), "the connection string"
    if "connection_string" not in found and os.environ.get(_AZURE_CONNECTION):
        # adlfs takes it before all else that it is given.
        said, who = _account_in(os.environ[_AZURE_CONNECTION]), f"the environment variable {_AZURE_CONNECTION}"
    account = place.account or found.get("account_name") or said or os.environ.get(_AZURE_ACCOUNT)
    if account is None:
        default = _default_place_of_spark()
        if default is None or default.account is None:
            raise ValueError(
                f"{url.partition('?')[0]} names no account. Write abfss://container@account.dfs.core.windows.net/path, "
                f"or give storage_options={{'account_name': …}} or the environment variable {_AZURE_ACCOUNT}; a Spark "
                "session whose fs.defaultFS is on Azure says it too."
            )
        place = replace(place, account=default.account, host=default.host, account_host=default.account_host)
        account = default.account
    host = place.host or f"{account}.dfs.core.windows.net"
    shown = f"{place.scheme}://{place.container}@{host}/{place.path}".rstrip("/")
    check_names(place.path, shown)
    check_signs(place.path, shown)
    require_package("adlfs", "'spark-tensor-converter[azure]'", shown)
    if said not in (None, account):
        raise ValueError(
            f"{shown} is of the account {account!r}, and {who} of {said!r}; give those of one, or unset it."
        )
    if "connection_string" not in found:
        found["account_name"] = account
    if place.account_host is not None:
        found.setdefault("account_host", place.account_host)
    _check_azure_options(found, shown)
    root = f"{place.container}/{place.path}".rstrip("/")
    return AzureStore(found, protocol="abfs", timeout_seconds=timeout_seconds), root, shown


def _check_azure_options(options: Mapping[str, Any], shown: str) -> None:
    """Refuse what adlfs would ignore: a misspelt credential is none."""
    adlfs: Any = importlib.import_module("adlfs")
    known = {*inspect.signature(adlfs.AzureBlobFileSystem.__init__).parameters, *_FSSPEC_OPTIONS} - {"self", "kwargs"}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(sorted(known - _FSSPEC_OPTIONS))}."
            raise ValueError(f"storage_options: adlfs, which reads {shown}, knows no {name!r}; {hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AzurePlace:
    """What a URL of Azure's says."""

    scheme: str
    container: str
    path: str
    account: str | None
    """None where the URL names none: `abfs://container/path`."""

    host: str | None
    """Of Data Lake Storage, as Spark takes it."""

    account_host: str | None = None
    """The blob endpoint where it is not `<account>.blob.core.windows.net`."""


def parse_azure_url(url: str) -> AzurePlace:
    """A URL of Azure's in any of its forms; OneLake's is passed through.

    >>> place = parse_azure_url("https://lake.blob.core.windows.net/data/a/b")
    >>> place.container, place.path, place.account, place.host
    ('data', 'a/b', 'lake', 'lake.dfs.core.windows.net')
    """
    if re.search(r"[?#]", url):
        raise ValueError(
            f"{re.split('[?#]', url)[0]} goes on with a ? or #, which a URL of Azure's does not have here. Give a "
            "signature as storage_options={'sas_token': …}; in the https form write a # of a name as %23."
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
        raise ValueError(f"{host} is no host of Azure's storage: expected <account>.dfs.core.windows.net.")
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
    found = re.search(r"AccountName=([^;]+)", connection_string)
    # With a signature it may name the account in the endpoint alone.
    found = found or re.search(r"BlobEndpoint=https?://([^./:;]+)\.blob\.", connection_string)
    return None if found is None else found[1]


def _default_place_of_spark() -> AzurePlace | None:
    """Where Spark in this process keeps what has no scheme, if that is on Azure: Synapse and Fabric start it so."""
    spark: Any = sys.modules.get("pyspark")
    # Without a context, or with one that has been stopped, nobody says anything. The context, since a session is
    # active in the thread alone that asked for it.
    with contextlib.suppress(Exception):
        context = spark.SparkContext._active_spark_context  # noqa: SLF001 (there is no other way)
        confs = context._jsc.hadoopConfiguration()  # noqa: SLF001
        return parse_azure_url(str(confs.get("fs.defaultFS")))
    return None
