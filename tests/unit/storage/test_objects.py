"""S3's and Google's answers are understood, and deltalake is told the same options."""

from __future__ import annotations

from typing import Any

import pytest

from converter.storage.objects import ObjectStore
from converter.storage.opening import open_storage


class ClientError(Exception):
    """As botocore's, which s3fs hides behind an OSError."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


@pytest.mark.parametrize(
    ("status", "code", "passes"),
    [
        (503, "SlowDown", True),
        (500, "InternalError", True),
        (409, "ConditionalRequestConflict", True),
        (409, "BucketNotEmpty", False),
        (403, "AccessDenied", False),
        (400, "Bad Request", False),
    ],
)
def test_what_s3_says_is_known_behind_an_error_of_s3fs(status: int, code: str, passes: bool) -> None:
    def request(_: Any) -> None:
        try:
            raise ClientError(status, code)
        except ClientError as error:
            raise OSError(16, "Service Unavailable") from error

    with pytest.raises(OSError, match="place") as caught:
        ObjectStore({}, protocol="memory", timeout_seconds=0.3).ask(request, path="place")
    assert isinstance(caught.value, TimeoutError) == passes
    assert isinstance(caught.value, PermissionError) == (status == 403)


class HttpError(Exception):
    """As gcsfs has it."""

    def __init__(self, code: int) -> None:
        super().__init__("no")
        self.code = code


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (HttpError(503), TimeoutError),
        (HttpError(429), TimeoutError),
        (HttpError(401), PermissionError),
        (OSError("Forbidden: b/bucket/o/a"), PermissionError),
        (HttpError(404), FileNotFoundError),
        (HttpError(400), OSError),
    ],
)
def test_what_google_says_is_known(error: Exception, kind: type[OSError]) -> None:
    def request(_: Any) -> None:
        raise error

    with pytest.raises(OSError, match="place") as caught:
        ObjectStore({}, protocol="memory", timeout_seconds=0.3).ask(request, path="place")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("protocol", "options", "expected"),
    [
        ("gs", {"token": "/keys/a.json", "project": "p"}, {"google_service_account": "/keys/a.json", "project": "p"}),
        ("gcs", {"token": "anon", "endpoint_url": "http://h"},
         {"google_skip_signature": "true", "google_base_url": "http://h", "allow_http": "true"}),
        ("s3", {"token": "t", "endpoint_url": "https://h"},
         {"aws_session_token": "t", "aws_endpoint_url": "https://h"}),
        ("s3", {"anon": True, "client_kwargs": {"endpoint_url": "http://h", "region_name": "r"}},
         {"aws_endpoint_url": "http://h", "aws_region": "r", "aws_skip_signature": "true", "allow_http": "true"}),
    ],
)  # fmt: skip
def test_deltalake_is_told_the_same(protocol: str, options: dict[str, Any], expected: dict[str, str]) -> None:
    assert ObjectStore(options, protocol=protocol).delta_options() == expected


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_a_key_in_a_url_is_refused_and_not_shown(scheme: str) -> None:
    # botocore's own error has the whole name of the bucket in it.
    with pytest.raises(ValueError, match="has a user's name or key in it, which errors would show") as caught:
        open_storage(f"{scheme}://key:hidden-text@bucket/x")
    assert "hidden" not in str(caught.value)
