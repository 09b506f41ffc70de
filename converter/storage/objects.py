"""S3 and Google's storage: objects that look like files in folders."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from converter.portable.deadlines import Result
from converter.storage.requests import aws_code, status_of
from converter.storage.store import Store
from converter.storage.urls import GOOGLE_SCHEMES, S3_SCHEMES, split_url

logger = logging.getLogger(__name__)

_GOOGLE_NAMES = {"token": "google_service_account", "endpoint_url": "google_base_url"}
"""deltalake's names for gcsfs's options."""

_S3_NAMES = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token",
             "endpoint_url": "aws_endpoint_url", "region_name": "aws_region"}  # fmt: skip
"""deltalake's names for s3fs's options."""


class ObjectStore(Store):
    """S3 and its like: a folder exists while it has an object, and the user creates buckets."""

    def ask(self, request: Callable[[Any], Result], *, path: str, **waiting: Any) -> Result:
        """As every store's; a bucket that is missing is named."""
        try:
            return super().ask(request, path=path, **waiting)
        except FileNotFoundError as error:
            if aws_code(error) != "NoSuchBucket":
                raise
            raise self._no_bucket(path) from self.harmless(error)

    def _no_bucket(self, path: str) -> OSError:
        bucket = path.strip("/").partition("/")[0]
        return OSError(f"there is no bucket {bucket!r}; check its name, or create it")

    def create(self, path: str, data: bytes) -> bool:
        """As every store's; only a bucket can be missing then."""
        try:
            return super().create(path, data)
        except FileNotFoundError as error:
            raise self._no_bucket(path) from self.harmless(error)

    def delta_options(self) -> dict[str, str]:
        """The options by deltalake's names, which differ between clouds."""
        is_google = self.protocol in GOOGLE_SCHEMES
        names = _GOOGLE_NAMES if is_google else _S3_NAMES
        options = {**self.options, **dict(self.options.get("client_kwargs") or {})}
        renamed = {names.get(name, name): value for name, value in options.items() if isinstance(value, str)}
        if renamed.get("google_service_account") == "anon":
            del renamed["google_service_account"]
        if options.get("anon") is True or (is_google and options.get("token") == "anon"):
            renamed["google_skip_signature" if is_google else "aws_skip_signature"] = "true"
        if any(value.startswith("http://") for value in renamed.values()):
            renamed["allow_http"] = "true"
        return renamed

    def path_of(self, url: str) -> str | None:
        """The path of a URL on this filesystem, with the bucket; a store's schemes are equal (s3 and s3a)."""
        scheme, bucket, path = split_url(url)
        own_schemes = GOOGLE_SCHEMES if self.protocol in GOOGLE_SCHEMES else S3_SCHEMES
        return f"{bucket}{path}" if scheme in own_schemes else None

    def makedirs(self, path: str, exist_ok: bool = True) -> None:
        """Do nothing; s3fs would create a bucket, or fail if it may not."""

    def uploads(self, path: str) -> Sequence[tuple[str, str]]:
        """As every store's. S3 keeps begun uploads until somebody ends them: they cost, and no listing shows them.

        They stay where the user may not list uploads, and in stores like S3 that cannot. Google's go after a week.
        """
        if self.protocol in GOOGLE_SCHEMES:
            return ()
        bucket, _, folder = path.strip("/").partition("/")
        prefix = f"{folder}/"

        def uploads(filesystem: Any) -> list[tuple[str, str]]:
            # At most 1,000, and each task of Spark has one at a time.
            found = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            return [(upload["Key"].removeprefix(prefix), upload["UploadId"]) for upload in found.get("Uploads", [])]

        try:
            return self.ask(uploads, path=path)
        except TimeoutError:
            raise
        except OSError as error:
            logger.debug("Could not look for uploads below %s: %s", path, error)
            return ()

    def abort_upload(self, path: str, number: str) -> None:
        """As every store's."""
        bucket, _, key = path.strip("/").partition("/")
        with contextlib.suppress(FileNotFoundError):
            self.ask(lambda filesystem: filesystem.abort_mpu(bucket, key, number), path=path)

    def rmdir(self, path: str) -> None:
        """Delete the object that marks a folder, if Spark's client made one and nothing else is there; never a bucket.

        That is its name with a slash at the end. What may not be deleted stays, as in other stores.
        """
        bucket, _, folder = path.strip("/").partition("/")
        self.invalidate_cache(path)
        if [(info["name"], info["size"]) for info in self.ls(path)] != [(f"{bucket}/{folder}/", 0)] or not folder:
            return
        with contextlib.suppress(OSError):
            if self.protocol in GOOGLE_SCHEMES:
                self.rm_file(f"{bucket}/{folder}/")
            else:
                self.ask(lambda client: client.call_s3("delete_object", Bucket=bucket, Key=f"{folder}/"), path=path)

    def renew(self, path: str, given_up: threading.Event | None = None, within: float = math.inf) -> None:
        """Write the object's metadata again, which fails if it is gone."""

        def renew(filesystem: Any) -> None:
            if hasattr(filesystem, "setxattr"):
                filesystem.setxattr(path, renewed="true")
            else:
                filesystem.setxattrs(path, renewed="true")

        self.ask(renew, path=path, given_up=given_up, within=within)

    def _named(self, error: Exception, path: str) -> OSError:
        named = super()._named(error, path)
        if str(error).startswith("Forbidden: "):
            # gcsfs gives no status then.
            return PermissionError(str(named))
        if (
            self.protocol not in GOOGLE_SCHEMES
            and status_of(error) == 400
            and not isinstance(named, (PermissionError, FileNotFoundError))
        ):
            return OSError(f"{named} (S3 also answers so to credentials that have expired)")
        return named
