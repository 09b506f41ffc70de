"""Options of a store by deltalake's names, which DeltaTorch takes, as those of fsspec's filesystems."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_S3 = {
    "access_key_id": "key",
    "secret_access_key": "secret",
    "session_token": "token",
    "token": "token",
    "region": "region_name",
    "default_region": "region_name",
    "endpoint_url": "endpoint_url",
    "endpoint": "endpoint_url",
}
_AZURE = {
    "account_name": "account_name",
    "account_key": "account_key",
    "access_key": "account_key",
    "master_key": "account_key",
    "sas_token": "sas_token",
    "sas_key": "sas_token",
    "client_id": "client_id",
    "client_secret": "client_secret",
    "tenant_id": "tenant_id",
    "authority_id": "tenant_id",
}
_GOOGLE = {
    "service_account": "token",
    "service_account_path": "token",
    "service_account_key": "token",
    "application_credentials": "token",
}
_STORES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    **dict.fromkeys(("s3", "s3a"), (("aws_",), _S3)),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), (("azure_storage_", "azure_"), _AZURE)),
    **dict.fromkeys(("gs", "gcs"), (("google_",), _GOOGLE)),
}
"""By scheme: what deltalake's names may begin with, and fsspec's names for the rest of them."""

_NOT_NEEDED = frozenset({"allow_http", "s3_allow_unsafe_rename", "s3_locking_provider", "conditional_put", "timeout"})


def fsspec_options(path: Any, options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The same options by fsspec's names; those that are no name of deltalake's stay as they are.

    >>> fsspec_options("s3://bucket/t", {"AWS_ACCESS_KEY_ID": "me", "AWS_REGION": "eu-west-1"})
    {'key': 'me', 'client_kwargs': {'region_name': 'eu-west-1'}}
    """
    if options is None or not isinstance(options, Mapping):
        return options
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
    scheme, is_url, _ = str(text).partition("://")
    if not is_url or scheme.lower() not in _STORES:
        return dict(options)
    prefixes, names = _STORES[scheme.lower()]
    renamed: dict[str, Any] = {}
    for given, value in options.items():
        short = str(given).lower()
        for prefix in prefixes:
            short = short.removeprefix(prefix)
        if short in _NOT_NEEDED:
            continue
        if short == "skip_signature":
            renamed["anon"] = str(value).lower() == "true"
        elif names.get(short) == "region_name":
            renamed.setdefault("client_kwargs", {})["region_name"] = value
        else:
            renamed[names.get(short, given)] = value
    return renamed
