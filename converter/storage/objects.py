"""S3 and Google's storage: objects that only look like files in folders."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from converter.storage.requests import Result, aws_code, status_of
from converter.storage.store import Store
from converter.storage.urls import GOOGLE_SCHEMES, S3_SCHEMES, split_url

_GOOGLE_NAMES = {"token": "google_service_account", "endpoint_url": "google_base_url"}
"""How deltalake calls what gcsfs calls so."""

_S3_NAMES = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token",
             "endpoint_url": "aws_endpoint_url", "region_name": "aws_region"}  # fmt: skip
"""How deltalake calls what s3fs calls so."""


class ObjectStore(Store):
    """S3 and its like: a folder is there when an object is, and a bucket is the user's to create."""

    def ask(self, request: Callable[[Any], Result], *, path: str, given_up: threading.Event | None = None) -> Result:
        """As every store's, but a bucket that is missing is named."""
        try:
            return super().ask(request, path=path, given_up=given_up)
        except FileNotFoundError as error:
            if aws_code(error) != "NoSuchBucket":
                raise
            raise self._no_bucket(path) from self.harmless(error)

    def _no_bucket(self, path: str) -> OSError:
        bucket = path.strip("/").partition("/")[0]
        return OSError(f"there is no bucket {bucket!r}; check its name, or create it")

    def create(self, path: str, data: bytes) -> bool:
        """As every store's; what is not found then is the bucket."""
        try:
            return super().create(path, data)
        except FileNotFoundError as error:
            raise self._no_bucket(path) from self.harmless(error)

    def delta_options(self) -> dict[str, str]:
        """The options by the names that deltalake has for them; to each cloud they are others."""
        is_google = self.protocol in GOOGLE_SCHEMES
        names = _GOOGLE_NAMES if is_google else _S3_NAMES
        said = {**self.options, **dict(self.options.get("client_kwargs") or {})}
        found = {names.get(name, name): value for name, value in said.items() if isinstance(value, str)}
        if found.get("google_service_account") == "anon":
            del found["google_service_account"]
        if said.get("anon") is True or (is_google and said.get("token") == "anon"):
            found["google_skip_signature" if is_google else "aws_skip_signature"] = "true"
        if any(value.startswith("http://") for value in found.values()):
            found["allow_http"] = "true"
        return found

    def path_of(self, url: str) -> str | None:
        """The path of a URL on this filesystem, with the bucket; the protocols of one store are one."""
        scheme, bucket, path = split_url(url)
        known = next(one for one in (GOOGLE_SCHEMES, S3_SCHEMES) if self.protocol in one)
        return f"{bucket}{path}" if scheme in known else None

    def makedirs(self, path: str, exist_ok: bool = True) -> None:
        """Do nothing; s3fs would create a bucket, or fail where it may not."""

    def renew(self, path: str, given_up: threading.Event | None = None) -> None:
        """Write the object's metadata again, which fails where it is gone."""

        def renew(filesystem: Any) -> None:
            if hasattr(filesystem, "setxattr"):
                filesystem.setxattr(path, renewed="true")
            else:
                filesystem.setxattrs(path, renewed="true")

        self.ask(renew, path=path, given_up=given_up)

    def _named(self, error: Exception, path: str) -> OSError:
        found = super()._named(error, path)
        if str(error).startswith("Forbidden: "):
            # gcsfs has no status for it.
            return PermissionError(str(found))
        if (
            self.protocol not in GOOGLE_SCHEMES
            and status_of(error) == 400
            and not isinstance(found, (PermissionError, FileNotFoundError))
        ):
            return OSError(f"{found} (S3 also answers so to credentials that have expired)")
        return found
