"""What a URL names, and how it may be shown."""

from __future__ import annotations

import os
import re

HTTP_SCHEMES = ("http", "https")
GOOGLE_SCHEMES = ("gs", "gcs")
S3_SCHEMES = ("s3", "s3a")
OBJECT_SCHEMES = (*S3_SCHEMES, *GOOGLE_SCHEMES)
AZURE_SCHEMES = ("abfs", "abfss", "az")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def split_url(url: str) -> tuple[str, str, str]:
    """Scheme, host or bucket, and path; `#` and `?` are ordinary signs to Hadoop and to stores of objects."""
    scheme, _, rest = url.partition("://")
    netloc, sign, path = rest.partition("/")
    return scheme.lower(), netloc, sign + path


def shown_url(url: str) -> str:
    """A URL as it may be shown: user information and queries can be secrets.

    >>> shown_url("s3://key:secret@bucket/a"), shown_url("https://host/c?sig=secret"), shown_url("hdfs://h/a#b")
    ('s3://bucket/a', 'https://host/c', 'hdfs://h/a#b')
    """
    if "://" not in url:
        return url
    scheme, netloc, path = split_url(url)
    if scheme not in ("hdfs", "viewfs"):
        path = re.sub(r"(?s)\?.*=.*", "", path)
    return f"{scheme}://{_place_of(scheme, netloc)}{path}"


def stored_url(url: str | os.PathLike[str]) -> str:
    """A URL, path or pattern as another process can use it: absolute, without a user's name or secret.

    >>> stored_url("s3://key:secret@bucket/day=?/x=1"), stored_url("https://host/c?sig=secret")
    ('s3://bucket/day=?/x=1', 'https://host/c')
    """
    text = os.fspath(url)
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        return os.path.abspath(os.path.expanduser(text))
    scheme, netloc, path = split_url(text)
    if "://" not in text or scheme in HTTP_SCHEMES:
        return shown_url(text)
    # Elsewhere a question mark is a wildcard and begins no query.
    return f"{scheme}://{_place_of(scheme, netloc)}{path}"


def _place_of(scheme: str, netloc: str) -> str:
    """Host or bucket; before the @ is a container in Azure's URLs, in others a user, maybe with a password."""
    return netloc if scheme in AZURE_SCHEMES else netloc.rpartition("@")[2]


def check_names(path: str, shown: str) -> None:
    """Refuse `//`, which one program takes for a slash and another for a folder without a name."""
    if "//" in path.rstrip("/"):
        raise ValueError(f"{shown} has a folder without a name (//), which is not supported here. Rename the folder.")


def check_signs(text: str, shown: str) -> None:
    """Refuse signs that urllib, and so adlfs and deltalake, silently drop: they would read another folder."""
    if _CONTROL.search(text):
        raise ValueError(
            f"{shown!r} has a tab, a line break or the like in it, which programs drop from a URL. Rename the folder."
        )


def file_url(url: str, name: str) -> str:
    """The URL of a file below a folder's, which may be the root of a server.

    >>> file_url("http://host/", "a.parquet"), file_url("s3://bucket/rides", "a.parquet")
    ('http://host/a.parquet', 's3://bucket/rides/a.parquet')
    """
    return f"{url.rstrip('/')}/{name}"
