"""What a URL names, how long a store is waited for, and what is said of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime as dt
import functools
import json
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import azure.identity
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from azure.core.credentials import AccessToken, AzureNamedKeyCredential, AzureSasCredential
from azure.core.pipeline import PipelineContext, PipelineRequest, PipelineResponse
from azure.core.pipeline.policies import AsyncBearerTokenCredentialPolicy
from azure.core.rest import HttpRequest
from fsspec.implementations.memory import MemoryFileSystem

from converter import (
    CacheError,
    DatasetConverter,
    MissingDependencyError,
    SourceChangedError,
    SourceError,
    make_delta_converter,
    make_parquet_converter,
    open_converter,
    sweep,
)
from converter.cache import finding, roots
from converter.portable import credentials
from converter.sources.delta import log
from converter.sources.parquet.footers import look_at
from converter.storage.at_once import at_once
from converter.storage.azure import AzureStore, parse_azure_url
from converter.storage.hdfs import HdfsStore
from converter.storage.objects import ObjectStore
from converter.storage.opening import open_storage, open_store
from converter.storage.requests import GivenUpError, RequestLine
from converter.storage.store import Store, check_timeout
from tests.known_rows import error_of, run_python

ACCOUNT = {"account_key": "c2VjcmV0LWtleQ=="}


LAKE = "data@lake.dfs.core.windows.net"


@pytest.mark.parametrize(
    ("url", "container", "path", "account", "shown"),
    [
        ("abfss://data@lake.dfs.core.windows.net/a/b", "data", "a/b", "lake", f"abfss://{LAKE}/a/b"),
        ("abfs://data@lake.dfs.core.windows.net", "data", "", "lake", "abfs://data@lake.dfs.core.windows.net"),
        ("abfss://data@lake.blob.core.windows.net/a/", "data", "a", "lake", "abfss://data@lake.dfs.core.windows.net/a"),
        ("https://lake.dfs.core.windows.net/data/a/b", "data", "a/b", "lake", f"abfss://{LAKE}/a/b"),
        ("https://lake.blob.core.windows.net/data/a%20b", "data", "a b", "lake", f"abfss://{LAKE}/a b"),
        ("az://data/a", "data", "a", None, "abfs://data@lake.dfs.core.windows.net/a"),
        ("abfs://data/a", "data", "a", None, "abfs://data@lake.dfs.core.windows.net/a"),
        (
            "abfss://space@onelake.dfs.fabric.microsoft.com/house.Lakehouse/Files",
            "space",
            "house.Lakehouse/Files",
            "onelake",
            "abfss://space@onelake.dfs.fabric.microsoft.com/house.Lakehouse/Files",
        ),
        (
            "https://onelake.blob.fabric.microsoft.com/space/house.Lakehouse/Files",
            "space",
            "house.Lakehouse/Files",
            "onelake",
            "abfss://space@onelake.dfs.fabric.microsoft.com/house.Lakehouse/Files",
        ),
        (
            "https://lake.blob.core.chinacloudapi.cn/data/a",
            "data",
            "a",
            "lake",
            "abfss://data@lake.dfs.core.chinacloudapi.cn/a",
        ),
        ("abfss://data@lake.dfs.core.usgovcloudapi.net/a", "data", "a", "lake",
         "abfss://data@lake.dfs.core.usgovcloudapi.net/a"),
    ],
)  # fmt: skip
def test_a_url_of_azures_in_every_form(url: str, container: str, path: str, account: str | None, shown: str) -> None:
    place = parse_azure_url(url)
    assert (place.container, place.path, place.account) == (container, path, account)
    store, root, found = open_store(url, ACCOUNT | ({} if account else {"account_name": "lake"}), 5)
    assert isinstance(store, AzureStore)
    assert (root, found) == (f"{container}/{path}".rstrip("/"), shown)
    assert store.options["account_name"] == (account or "lake")
    # Whom adlfs asks: by itself it knows the first cloud alone.
    host = found.partition("@")[2].partition("/")[0].replace(".dfs.", ".blob.")
    expected = None if host == "lake.blob.core.windows.net" else host
    assert (place.account_host, store.options.get("account_host")) == (expected, expected)
    # OneLake takes tokens alone.
    by_token = {"credential": lambda: "token", "account_name": account or "lake"}
    assert open_store(url, by_token, 5)[0].filesystem().service_client.url.rstrip("/") == f"https://{host}"
    # One that is given is asked instead.
    elsewhere = ACCOUNT | {"account_name": account or "lake", "account_host": "proxy.example.com"}
    assert open_store(url, elsewhere, 5)[0].options["account_host"] == "proxy.example.com"
    assert open_storage(found, ACCOUNT).url == found


def test_a_url_without_an_account_says_where_one_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ValueError, match=r"abfs://data/a names no account.*account_name.*AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("abfs://data/a", {}, 5)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "lake")
    assert open_store("abfs://data/a", {}, 5)[2] == "abfs://data@lake.dfs.core.windows.net/a"


@pytest.mark.parametrize("url", ["abfs://@lake.dfs.core.windows.net/a", "abfss://data@lake.example.com/a"])
def test_a_url_that_is_none_of_azures_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"names no container|is no host of Azure"):
        open_store(url, ACCOUNT, 5)


@pytest.mark.parametrize("url", [
    "https://lake.blob.core.windows.net/data/a?sp=rl&sig=hidden", f"abfss://{LAKE}/a?sig=hidden", f"abfss://{LAKE}/a#b",
    "hdfs://host:1/a#b", "hdfs://host:1/a?sig=hidden",
])  # fmt: skip
def test_a_sign_that_would_cut_a_path_is_refused(url: str) -> None:
    """`/a#b` is another folder than `/a`, and to sweep the one is not to sweep the other."""
    with pytest.raises(ValueError, match=r"a \? or #") as caught:
        open_store(url, {}, 1)
    assert "hidden" not in str(caught.value).replace("sig=hidden has a", "")


@pytest.mark.parametrize("url", [
    f"abfss://{LAKE}/a\tb", f"abfss://{LAKE}/a\n", "https://lake.blob.core.windows.net/data/a%09b",
    "abfs://da\rta@lake.dfs.core.windows.net/a", "memory://a\tb", "hdfs://host:1/a\nb", "s3://bucket/a\tb",
])  # fmt: skip
def test_a_sign_that_would_be_dropped_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"\\[tnr].* has a tab, a line break or the like in it"):
        open_store(url, ACCOUNT, 5)
    with pytest.raises(CacheError, match="has a tab, a line break or the like in it"):
        roots.open_root(url, ACCOUNT)


@pytest.mark.parametrize("url", [
    "https://lake.blob.core.windows.net/data/a?sp=rl&sig=hidden", "s3x://key:hidden@bucket/a", "hdfs://u:hidden@host:no/x",
    "nothing-like-it:/x/hidden@y", "s3://bucket/a?sig=hid\nhidden",
])  # fmt: skip
def test_what_a_url_hides_is_in_no_error(url: str) -> None:
    for call in (lambda: roots.open_root(url, {}), lambda: finding.open_entry(f"{url}/{'0' * 16}-{'0' * 16}")):
        with pytest.raises((CacheError, ValueError)) as caught:
            call()
        error: BaseException | None = caught.value
        while error is not None and "://" in url:
            assert "hidden" not in f"{error} {error.args} {getattr(error, 'path', '')}"
            error = error.__cause__ or error.__context__


def test_what_a_library_says_of_a_url_is_told_without_its_secrets() -> None:
    store = Store({}, protocol="https")
    said = "https://user:hidden@host/a?sig=hidden&b=1 and abfs://data@lake/a, 'http://host/b?hidden'"
    assert store.without_secrets(said) == "https://***@host/a?*** and abfs://data@lake/a, 'http://host/b?***'"


@pytest.mark.parametrize("credential", [AzureSasCredential("sig=hid%2Bden"), AzureNamedKeyCredential("lake", "hidden")])
def test_what_holds_a_key_is_no_provider(credential: Any) -> None:
    storage = open_storage(f"abfss://{LAKE}/a", {"credential": credential})
    assert b"hid" not in pickle.dumps(storage)
    assert "hid" not in storage.without_secrets("hid%2Bden hid+den" if "Sas" in str(type(credential)) else "hidden")


@pytest.mark.parametrize("option", ["connection_string", "account_key"])
@pytest.mark.parametrize("value", ["garbage", b"garbage", "x"])
def test_a_credential_that_is_none_is_named(option: str, value: Any) -> None:
    storage = open_storage(f"abfss://{LAKE}/a", {option: value}, 1)
    with pytest.raises(OSError, match=rf"storage_options \({option}\) cannot be used") as caught:
        storage.size("a")
    assert "garbage" not in str(caught.value)


def test_who_refuses_to_be_called_is_named() -> None:
    store = HdfsStore({"host": "127.0.0.1", "port": 1}, protocol="hdfs")
    assert store._why_silent() == ": 127.0.0.1:1 says Connection refused"


def test_hadoops_short_form_is_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    _, root, shown = open_store("hdfs:/a/b", {}, 1)
    assert (root, shown) == ("/a/b", "hdfs:///a/b")


def test_a_url_of_hdfs_has_a_host_or_none() -> None:
    for url, host, port, root in (("hdfs://name:8020/a/b/", "name", 8020, "/a/b"), ("hdfs:///a", None, None, "/a")):
        store, found, shown = open_store(url, {}, 5)
        assert isinstance(store, HdfsStore)
        assert (store.options, found, shown) == ({"host": host, "port": port}, root, url.rstrip("/"))


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_timeout_is_above_0(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_seconds must be above 0"):
        check_timeout(seconds)


@pytest.mark.parametrize("seconds", ["10", None, True])
def test_a_timeout_is_a_number(seconds: Any) -> None:
    with pytest.raises(TypeError, match="timeout_seconds must be a number of seconds"):
        check_timeout(seconds)


# Patience


class StatusError(Exception):
    """As azure-core's errors say it."""

    def __init__(self, status_code: int, text: str = "no") -> None:
        super().__init__(text)
        self.status_code = status_code


def ask(store: Store, *errors: Exception | None) -> tuple[Any, int]:
    """What a request gives that fails in these ways first, and how often it was asked."""
    asked = []

    def request(_: Any) -> str:
        asked.append(1)
        error = errors[len(asked) - 1] if len(asked) <= len(errors) else None
        if error is not None:
            raise error
        return "answer"

    try:
        return store.ask(request, path="place"), len(asked)
    except OSError as error:
        return error, len(asked)


@pytest.mark.parametrize("error", [StatusError(503), StatusError(429), TimeoutError(), ConnectionResetError()])
def test_what_passes_is_asked_again(error: Exception) -> None:
    assert ask(Store({}, protocol="memory", timeout_seconds=10), error, error) == ("answer", 3)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StatusError(403), PermissionError),
        (StatusError(401), PermissionError),
        (StatusError(404), FileNotFoundError),
        (StatusError(409), OSError),
        (FileNotFoundError("x"), FileNotFoundError),
        (ValueError("odd"), OSError),
    ],
)
def test_what_does_not_pass_is_an_error_at_once(error: Exception, kind: type[OSError]) -> None:
    found, asked = ask(Store({}, protocol="memory", timeout_seconds=10), error)
    assert (type(found), asked) == (kind, 1)


def test_the_last_words_of_who_never_answers_are_told() -> None:
    found, asked = ask(Store({}, protocol="memory", timeout_seconds=0.5), *[StatusError(503, "busy")] * 50)
    assert isinstance(found, TimeoutError)
    assert str(found) == (
        "place could not be reached for 0.5 seconds (timeout_seconds), and said at last: StatusError: busy"
    )
    assert 2 <= asked < 10


class Line(Store):
    """A store that brings so many bytes a second, to all who ask at once."""

    def __init__(self, bytes_per_second: float, timeout_seconds: float) -> None:
        super().__init__({}, protocol="memory", timeout_seconds=timeout_seconds)
        self.bytes_per_second, self.num_asking, self.most_at_once = bytes_per_second, 0, 0
        self.lock = threading.Lock()

    def read_range(self, path: str, start: int, end: int, given_up: threading.Event | None = None) -> bytes:
        with self.lock:
            self.num_asking += 1
            self.most_at_once = max(self.most_at_once, self.num_asking)
        left, now = float(end - start), time.monotonic()
        deadline = now + self.timeout_seconds
        try:
            while left > 0:
                time.sleep(0.01)
                begun, now = now, time.monotonic()
                left -= (now - begun) * self.bytes_per_second / self.num_asking
                if left > 0 and now > deadline:
                    raise TimeoutError(f"{path} could not be reached")
        finally:
            with self.lock:
                self.num_asking -= 1
        return bytes(end - start)


def test_a_slow_line_is_not_asked_for_more_than_it_brings_in_time() -> None:
    line = Line(bytes_per_second=3e6, timeout_seconds=3.0)
    parts = at_once(lambda number: line.read_in_turn("a", number, number + 900_000), range(8))
    assert [len(part) for part in parts] == [900_000] * 8
    assert line.most_at_once == 2


def test_a_fast_line_is_asked_for_all_once_an_answer_was_fast() -> None:
    line = Line(bytes_per_second=1e9, timeout_seconds=2.0)
    # What is short tells nothing.
    line.read_in_turn("a", 0, 1000)
    at_once(lambda number: line.read_in_turn("a", number, number + 1_600_000), range(2))
    assert line.most_at_once == 1
    assert len(at_once(lambda number: line.read_in_turn("a", number, number + 5_000_000), range(8))) == 8
    assert line.most_at_once > 2


@pytest.mark.parametrize(
    ("processes_count", "timeout_seconds", "room_bytes"),
    [(1, 120, 90_000_000), (4, 120, 22_500_000), (1000, 120, 8 << 20), (4, 16, 8 << 20), (4, 2, 1_500_000)],
)
def test_who_shares_a_line_counts_with_a_share_until_it_is_known(
    processes_count: int, timeout_seconds: float, room_bytes: float
) -> None:
    store = Store({}, protocol="memory")
    store.share_line(processes_count)
    line = store._own_line()
    assert line._room_bytes(timeout_seconds) == room_bytes
    line._bytes_per_second = 100e6
    assert line._room_bytes(timeout_seconds) == timeout_seconds * 25e6


def test_a_shared_line_is_asked_for_less_at_once() -> None:
    line = Line(bytes_per_second=1e9, timeout_seconds=16.0)
    line.share_line(4)
    # Too short to tell how fast the line is; twelve would fit on a line of one's own.
    at_once(lambda number: line.read_in_turn("a", number, number + 1_000_000), range(16))
    assert line.most_at_once <= 8


def test_who_waits_for_a_turn_gives_up_with_those_who_wait_for_an_answer() -> None:
    line = Line(bytes_per_second=1.0, timeout_seconds=1.0)
    begin = time.monotonic()

    def read(number: int) -> str:
        with pytest.raises(TimeoutError) as raised:
            line.read_in_turn("a", 0, 1_200_000 + number)
        return str(raised.value)

    said = at_once(read, range(4))
    # Not one second after the other for each of them.
    assert time.monotonic() - begin < 3.5
    assert sum("1.2 MB were asked for, for which a slow line needs more seconds" in text for text in said) == 1
    assert sum("a could not be reached for 1 seconds (timeout_seconds)" in text for text in said) == 3
    given_up = threading.Event()
    given_up.set()
    with line._line[1].taken(10, 1.0, None, TimeoutError), pytest.raises(GivenUpError):  # type: ignore[index]
        line.read_in_turn("a", 0, 10_000_000, given_up)


def test_a_large_part_has_its_turn_among_small_ones() -> None:
    line = Line(bytes_per_second=3e6, timeout_seconds=3.0)
    is_over = threading.Event()

    def read_small_ones(_: int) -> None:
        while not is_over.is_set():
            line.read_in_turn("small", 0, 300_000)

    threads = [threading.Thread(target=read_small_ones, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    assert len(line.read_in_turn("large", 0, 3_000_000)) == 3_000_000
    is_over.set()
    for thread in threads:
        thread.join()


def test_who_has_hardly_waited_is_not_late_with_others() -> None:
    line = Line(bytes_per_second=1e7, timeout_seconds=4.0)
    counted = line._line = os.getpid(), RequestLine()

    def hang() -> None:
        with contextlib.suppress(TimeoutError), counted[1].taken(2_950_000, 4.0, None, TimeoutError):
            time.sleep(0.5)
            raise TimeoutError

    hanging = threading.Thread(target=hang)
    hanging.start()
    time.sleep(0.3)
    assert len(line.read_in_turn("healthy", 0, 100_000)) == 100_000
    hanging.join()
    assert counted[1]._num_bytes == 0


def test_no_part_of_a_secret_is_left_where_a_text_is_cut() -> None:
    store = Store({"account_key": "K" * 60}, protocol="memory", timeout_seconds=1)
    for length in range(230, 300, 7):
        assert "KKK" not in store._text(OSError("m" * length + "K" * 60 + "n"))


def test_what_hangs_is_left_behind() -> None:
    store, held = Store({}, protocol="memory", timeout_seconds=0.3), threading.Event()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"place could not be reached for 0\.3 seconds"):
        store.ask(lambda _: held.wait(), path="place")
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(GivenUpError):
        store.ask(lambda _: held.wait(), path="place", given_up=given_up)
    assert time.monotonic() - begin < 5
    held.set()
    for thread in threading.enumerate():
        if thread.name == "converter-request":
            thread.join(10)


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

    begin = time.monotonic()
    with pytest.raises(OSError, match="place") as caught:
        ObjectStore({}, protocol="memory", timeout_seconds=0.3).ask(request, path="place")
    assert isinstance(caught.value, TimeoutError) == passes
    assert isinstance(caught.value, PermissionError) == (status == 403)
    assert time.monotonic() - begin < 3


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


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/a?b=c/d", "https://host/a%23b", "gs://bucket/a#b", "s3://bucket/a::b", "simplecache::memory://a"],
)
def test_a_name_that_would_be_another_place_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"Rename the folder|is a chain of filesystems"):
        open_storage(url)


class AsyncCredential:
    """As those of azure.identity.aio."""

    async def get_token(self, *_: str, **__: Any) -> AccessToken:
        await asyncio.sleep(0)
        return AccessToken("an-async-token", 2_000_000_000)


CHINA = "AccountName=lake;AccountKey=a2V5;EndpointSuffix=core.chinacloudapi.cn"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"account_key": "a2V5"}, {"account_key": "a2V5"}),
        ({"sas_token": "?sv=1&sig=2"}, {"sas_token": "sv=1&sig=2"}),
        ({"credential": "a2V5"}, {"account_key": "a2V5"}),
        ({"credential": "?sv=1&sig=2"}, {"sas_token": "sv=1&sig=2"}),
        ({"credential": AzureNamedKeyCredential("lake", "a2V5")}, {"account_key": "a2V5"}),
        ({"credential": AzureSasCredential("sv=1&sig=2")}, {"sas_token": "sv=1&sig=2"}),
        ({"credential": lambda: "a-token"}, {"bearer_token": "a-token"}),
        ({"credential": AsyncCredential()}, {"bearer_token": "an-async-token"}),
        ({"anon": True}, {"azure_skip_signature": "true"}),
        (
            {"connection_string": f"DefaultEndpointsProtocol=https;{CHINA}"},
            {"account_key": "a2V5", "azure_endpoint": "https://lake.blob.core.chinacloudapi.cn"},
        ),
        (
            {
                "connection_string": "AccountName=lake;SharedAccessSignature=sv=1&sig=2;BlobEndpoint=http://127.0.0.1:1/lake"
            },
            {"sas_token": "sv=1&sig=2", "azure_endpoint": "http://127.0.0.1:1/lake", "allow_http": "true"},
        ),
        (
            {"account_key": "a2V5", "account_host": "lake.blob.core.chinacloudapi.cn"},
            {"account_key": "a2V5", "azure_endpoint": "https://lake.blob.core.chinacloudapi.cn"},
        ),
    ],
)
def test_deltalake_is_told_the_credentials_that_our_client_has(
    options: dict[str, Any], expected: dict[str, str]
) -> None:
    _, found = open_storage("abfs://data@lake.dfs.core.windows.net/table", options).delta_place()
    assert found == {"account_name": "lake"} | expected


@pytest.mark.parametrize(
    ("host", "asked", "endpoint"),
    [
        ("lake.dfs.core.windows.net", "lake.dfs.core.windows.net", None),
        # deltalake takes no URL of these.
        ("lake.dfs.core.chinacloudapi.cn", "lake.dfs.core.windows.net", "https://lake.blob.core.chinacloudapi.cn"),
        ("lake.dfs.core.usgovcloudapi.net", "lake.dfs.core.windows.net", "https://lake.blob.core.usgovcloudapi.net"),
        (
            "onelake.dfs.fabric.microsoft.com",
            "onelake.dfs.fabric.microsoft.com",
            "https://onelake.blob.fabric.microsoft.com",
        ),
    ],
)
def test_deltalake_is_told_a_url_that_it_knows(host: str, asked: str, endpoint: str | None) -> None:
    storage = open_storage(f"abfss://data@{host}/a.dfs.core.b/table", {"credential": lambda: "token"})
    url, options = storage.delta_place()
    assert url == f"abfss://data@{asked}/a.dfs.core.b/table"
    assert options.get("azure_endpoint") == endpoint


@pytest.mark.parametrize("fails", [RuntimeError("no answer"), None], ids=str)
def test_a_provider_that_gives_no_token_to_deltalake_is_an_error_of_the_table(
    fails: Exception | None,
) -> None:
    def give() -> Any:
        if fails is not None:
            raise fails

    storage = open_storage("abfs://data@lake.dfs.core.windows.net/table", {"credential": give}, 10)
    with pytest.raises(
        SourceError, match=r"Delta table abfs://data@lake\..* cannot be opened.*: .*(no answer|gave NoneType)"
    ):
        log.open_table(storage, {}, version=0, timestamp=None)


class RangeHandler(SimpleHTTPRequestHandler):
    """A web server that lists folders, and answers with parts of files."""

    has_ranges: ClassVar[bool] = True
    has_times: ClassVar[bool] = True
    num_off: ClassVar[int] = 0
    num_busy: ClassVar[int] = 0
    num_cut: ClassVar[int] = 0

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Last-Modified" or self.has_times:
            super().send_header(keyword, value)

    def is_busy(self) -> bool:
        """Whether this request is refused for now."""
        if type(self).num_busy:
            type(self).num_busy -= 1
            self.send_error(503)
            return True
        return False

    def do_HEAD(self) -> None:
        if not self.is_busy():
            super().do_HEAD()

    def do_GET(self) -> None:
        path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range", "")
        if self.is_busy():
            return None
        if not path.is_file() or not wanted or not self.has_ranges:
            return super().do_GET()
        first, last = wanted.removeprefix("bytes=").split("-")
        content = path.read_bytes()[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Range", f"bytes {int(first) + self.num_off}-{last}/{path.stat().st_size}")
        self.end_headers()
        if type(self).num_cut:
            type(self).num_cut -= 1
            content = content[: len(content) // 2]
            self.close_connection = True
        self.wfile.write(content)
        return None

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A web server of a folder; its URL."""
    monkeypatch.setattr(RangeHandler, "num_busy", 0)
    monkeypatch.setattr(RangeHandler, "num_cut", 0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(RangeHandler, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def first_batch(converter: DatasetConverter) -> dict[str, Any]:
    with converter.make_batch_reader(batch_size=4) as reader:
        return dict(next(iter(reader)))


def test_files_of_a_web_server_are_read(tmp_path: Path, web: str) -> None:
    urls = []
    for day in (1, 2):
        (tmp_path / f"table/day={day}/at=a%20b").mkdir(parents=True)
        pq.write_table(pa.table({"id": [day, day + 10]}), tmp_path / f"table/day={day}/at=a%20b/ä b.parquet")
        urls.append(f"{web}/table/day={day}/at=a%2520b/%C3%A4%20b.parquet")
    for wanted, folder, rows in ((urls[:1], "/day=1/at=a%20b", [1, 11]), (urls, "", [1, 11, 2, 12])):
        with make_parquet_converter(wanted, timeout_seconds=10) as converter:
            assert converter.url == f"{web}/table{folder}"
            # Another process finds the same place.
            for one in (converter, pickle.loads(pickle.dumps(converter))):
                assert first_batch(one)["id"].tolist() == rows
    with make_parquet_converter(urls, timeout_seconds=10) as converter:
        # Its times have seconds.
        os.utime(tmp_path / "table/day=2/at=a%20b/ä b.parquet", (0, 0))
        with (
            pytest.raises(SourceChangedError, match=rf"{web}/table/day=2/at=a%20b/ä b.parquet was written again"),
            converter.make_batch_reader(batch_size=4) as reader,
        ):
            list(reader)
    for place in ("/table", "/table/", "", "/nowhere.parquet"):
        with pytest.raises(SourceError, match=rf"{web}{place.rstrip('/')} is not there, or is a page.* name each file"):
            make_parquet_converter(web + place, timeout_seconds=10)
    with pytest.raises(CacheError, match=f"{web}/table.* cannot"):
        roots.open_root(f"{web}/table", None, 10)
    with pytest.raises(ValueError, match="has a user's name or password in it") as caught:
        make_parquet_converter(web.replace("//", "//me:hidden@"))
    assert "hidden" not in str(caught.value)


def test_two_web_servers_are_two_stores(tmp_path: Path, web: str) -> None:
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="are on two stores"):
        make_parquet_converter([f"{web}/a.parquet", f"{web.replace('127.0.0.1', 'localhost')}/a.parquet"])
    with make_parquet_converter(f"{web}/a.parquet") as converter:
        assert first_batch(converter)["id"].tolist() == [1, 2]


def test_a_web_server_that_is_busy_is_asked_again(tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"id": [1, 2]}), tmp_path / "a.parquet")
    for num_busy in range(1, 6):
        monkeypatch.setattr(RangeHandler, "num_busy", num_busy)
        with make_parquet_converter(f"{web}/a.parquet", timeout_seconds=30) as converter:
            assert first_batch(converter)["id"].tolist() == [1, 2]
        assert RangeHandler.num_busy == 0
    monkeypatch.setattr(RangeHandler, "num_busy", 10_000)
    with pytest.raises(SourceError, match=r"could not be reached for 0.5 seconds .* 503"):
        make_parquet_converter(f"{web}/a.parquet", timeout_seconds=0.5)


def test_a_server_without_tls_is_not_asked_for_it_again(web: str) -> None:
    begin = time.monotonic()
    with pytest.raises(SourceError, match="WRONG_VERSION_NUMBER"):
        make_parquet_converter(f"{web.replace('http:', 'https:')}/a.parquet", timeout_seconds=60)
    assert time.monotonic() - begin < 30


def test_a_body_that_is_cut_is_asked_for_again(tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"id": range(1000)}), tmp_path / "a.parquet")
    monkeypatch.setattr(RangeHandler, "num_cut", 3)
    with make_parquet_converter(f"{web}/a.parquet", timeout_seconds=30) as converter:
        assert first_batch(converter)["id"].tolist() == [0, 1, 2, 3]
    assert RangeHandler.num_cut == 0


def test_a_web_server_without_ranges_is_refused(tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"id": range(100_000)}), tmp_path / "a.parquet")
    monkeypatch.setattr(RangeHandler, "has_ranges", False)
    with pytest.raises(SourceError, match=r"answers with whole files where a part is asked for"):
        make_parquet_converter(f"{web}/a.parquet", timeout_seconds=10)


def test_another_part_than_was_asked_for_is_not_taken_for_it(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"id": range(1000)}), tmp_path / "a.parquet")
    monkeypatch.setattr(RangeHandler, "num_off", 8)
    with pytest.raises(SourceError, match=r"was asked for the bytes \d+ to \d+, and gave bytes \d+-\d+/\d+"):
        make_parquet_converter(f"{web}/a.parquet", timeout_seconds=10)


def test_what_is_kept_of_one_place_is_not_read_at_another(
    tmp_path: Path, web: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Of plain pages without statistics: the footers, sizes and times are the same.
    for name, ids in (("train", [1, 2]), ("val", [3, 4])):
        (tmp_path / name).mkdir()
        table = pa.table({"id": pa.array(ids, pa.int64())})
        pq.write_table(table, tmp_path / name / "a.parquet", write_statistics=False, use_dictionary=False)
        os.utime(tmp_path / name / "a.parquet", (1_700_000_000, 1_700_000_000))
    kept = tmp_path / "kept"

    def rows_of(name: str) -> list[int]:
        with (
            make_parquet_converter(f"{web}/{name}/a.parquet", timeout_seconds=10) as converter,
            converter.make_batch_reader(batch_size=4, local_cache_dir=kept) as reader,
        ):
            found: list[int] = next(iter(reader))["id"].tolist()
            return found

    assert [rows_of("train"), rows_of("val"), rows_of("train")] == [[1, 2], [3, 4], [1, 2]]
    assert len([file for file in kept.rglob("rows-*") if file.is_file()]) == 2
    # Of a server that does not tell when a file was written nothing is kept.
    monkeypatch.setattr(RangeHandler, "has_times", False)
    assert rows_of("val") == [3, 4]
    assert "local_cache_dir is not used" in caplog.text


def interrupt_footers(url: str, num_files: int, is_masked: bool) -> float:
    """How many seconds after Ctrl-C the reading of footers ends, if it ends with it."""
    storage = open_storage(url, None, 60)
    if is_masked:
        # The signal then goes to another thread, and does not wake who waits: as beside Polars, which handles SIGINT.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Timer(1, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        look_at(storage, [f"{number}.parquet" for number in range(num_files)])
    return time.monotonic() - sent[0]


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("num_files", [1, 40])
def test_an_interrupt_ends_the_reading_of_footers(
    web: str, monkeypatch: pytest.MonkeyPatch, num_files: int, is_masked: bool
) -> None:
    monkeypatch.setattr(RangeHandler, "num_busy", 10_000)
    assert run_python(interrupt_footers, web, num_files, is_masked) < 30


@pytest.mark.parametrize(
    ("url", "options", "asked", "path"),
    [
        ("hdfs://nn:8020/a", {}, "hdfs://nn:8020/b%20c/d", "/b c/d"),
        ("hdfs://nn/a", {}, "hdfs://nn:8020/b", "/b"),
        ("hdfs:///a", {}, "hdfs://nn:8020/b", "/b"),
        ("hdfs://nn:8020/a", {}, "hdfs:/b", "/b"),
        ("hdfs://nn:8020/a", {}, "/b%20c", "/b c"),
        ("hdfs://nn:8020/a", {}, "hdfs://other:8020/b", None),
        ("hdfs://nn:8020/a", {}, "hdfs://nn:9000/b", None),
        ("hdfs://nn:8020/a", {}, "s3://nn/b", None),
        (f"abfss://{LAKE}/a", ACCOUNT, f"abfss://{LAKE}/b%20c/d", "data/b c/d"),
        (f"abfss://{LAKE}/a", ACCOUNT, f"abfs://other@{LAKE.partition('@')[2]}/b", "other/b"),
        (f"abfss://{LAKE}/a", ACCOUNT, "abfss://data@river.dfs.core.windows.net/b", None),
        (f"abfss://{LAKE}/a", ACCOUNT, "s3://data/b", None),
        ("s3://bucket/a", {}, "s3a://bucket/b%20c", "bucket/b c"),
        ("s3://bucket/a", {}, "s3://other/b", "other/b"),
        ("s3://bucket/a", {}, "gs://bucket/b", None),
        ("memory://a", {}, "memory://b/c", "/b/c"),
        ("/a", {}, "file:///b%20c", "/b c"),
        ("/a", {}, "file:/b", "/b"),
        ("/a", {}, "s3://bucket/b", None),
    ],
)
def test_urls_of_other_places_are_told_from_those_of_one(
    url: str, options: dict[str, Any], asked: str, path: str | None
) -> None:
    storage = open_storage(url, options)
    assert storage.path_of(asked) == path
    if path is not None and not storage.is_local:
        # The same place, named in full.
        there = storage.at(path)
        again = open_storage(there.url, options)
        assert (again.path(), again.url) == (path, there.url)


def test_signs_in_names_of_files_in_a_log_are_signs_like_any() -> None:
    for url, options, path in (
        (f"abfss://{LAKE}", ACCOUNT, "data/a?b#c/d"),
        ("s3://bucket", {}, "bucket/a?b#c/d"),
        ("hdfs://nn:8020", {}, "/a?b#c/d"),
    ):
        assert open_storage(f"{url}/a", options).path_of(f"{url}/a%3Fb%23c/d") == path


def test_names_of_options_that_hide_something() -> None:
    hidden = ("auth", "proxy_auth", "X-Auth", "Authorization", "sas", "sas_token", "passphrase", "Cookie", "headers")
    for name in hidden:
        assert name not in open_storage("memory://a", {name: "hidden-text"})._filesystem.open_options, name
    for name in ("hadoop.security.authentication", "authority", "sasl"):
        assert name in open_storage("memory://a", {name: "shown-text"})._filesystem.open_options, name


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("https://account.blob.core.windows.net/c/tr%231", {"account_key": "aGlkZGVuLXRleHQ="}),
        ("https://host/a%2523b/c%20d", {"client_kwargs": {"auth": ("me", "hidden-text")}}),
        ("https://host/a", {"headers": {"Cookie": "hidden-text"}}),
        ("https://host/a", {"headers": [("X-Mine", "hidden-text")]}),
        ("https://host/a", {"client_kwargs": {"headers": {"Authorization": "Bearer hidden-text"}}}),
        ("s3://bucket/a", {"key": "public", "secret": "hidden-text"}),
        ("s3://bucket/a", {"client_kwargs": {"aws_session_token": "hidden-text"}}),
        ("memory://a", {"passphrase": "hidden-text"}),
    ],
)
def test_a_place_travels_without_its_secrets(url: str, options: dict[str, Any]) -> None:
    storage = open_storage(url, {"use_listings_cache": True} | options)
    pickled = pickle.dumps(storage)
    copy = pickle.loads(pickled)
    assert (copy.url, copy.path(), copy.options["use_listings_cache"]) == (storage.url, storage.path(), True)
    secret = options.get("account_key", "hidden-text")
    assert secret.encode() not in pickled
    assert secret not in storage.without_secrets(f"the server said {secret}")


class Careless(MemoryFileSystem):  # type: ignore[misc]
    """A store that takes the mode "x" and does not mind what is there, as fsspec's FTP does."""

    protocol = "careless"
    store: ClassVar[dict[str, Any]] = {}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return super()._open(path, mode.replace("x", "w"), **options)


def test_a_store_that_writes_over_what_is_there_is_refused() -> None:
    fsspec.register_implementation("careless", Careless, clobber=True)
    storage = open_storage("careless://x/cache", timeout_seconds=5)
    for _ in range(2):
        with pytest.raises(OSError, match="careless creates a file also where there is one, so that a commit could be"):
            storage.put_if_absent("a", b"1")
    assert storage.list() == []


def test_a_store_that_is_only_read_is_named() -> None:
    with pytest.raises(OSError, match="https cannot create a file only where there is none"):
        open_storage("https://localhost:1/x", timeout_seconds=5).put_if_absent("a", b"1")


# Secrets

CONNECTION = (
    "DefaultEndpointsProtocol=https;AccountName=lake;AccountKey=a2V5LW9mLXRoZS1sYWtl;EndpointSuffix=core.windows.net"
)
SAS = "?sv=2024-01-01&sp=r&sig=c2lnbmF0dXJl%3D"


@pytest.mark.parametrize(
    ("options", "secrets"),
    [
        ({"account_key": "a2V5LW9m"}, ["a2V5LW9m"]),
        ({"sas_token": SAS}, [SAS, "c2lnbmF0dXJl%3D"]),
        ({"connection_string": CONNECTION}, ["a2V5LW9mLXRoZS1sYWtl"]),
        ({"client_secret": "hunter22", "tenant_id": "t"}, ["hunter22"]),
        ({"client_kwargs": {"aws_secret_access_key": "hunter22"}}, ["hunter22"]),
        ({"params": {"sp": "r", "sig": "c2lnbmF0dXJl"}}, ["c2lnbmF0dXJl"]),
        ({"endpoint_url": "https://user:hunter22@host"}, ["hunter22"]),
        ({"config_kwargs": {"proxies": {"http": "http://user:hunter22@proxy:1"}}}, ["hunter22"]),
    ],
)
def test_no_secret_is_told_or_pickled(options: dict[str, Any], secrets: list[str]) -> None:
    store = Store(options, protocol="memory")
    text = f"GET https://host/x{' '.join(secrets)} failed"
    for secret in secrets:
        assert secret not in store.without_secrets(text)
        assert secret not in repr(store)
        error = store.harmless(ValueError(text))
        assert secret not in repr(error)
        assert secret not in repr(store.open_options)
    plain = ValueError("nothing to hide")
    assert store.harmless(plain) is plain


def jwt(expiry: int) -> str:
    return "head." + base64.urlsafe_b64encode(json.dumps({"exp": expiry}).encode()).decode().rstrip("=") + ".tail"


@pytest.mark.parametrize(("token", "seconds"), [("opaque", 600), ("a.b.c", 600), ("a.e30.c", 600), (jwt(0), None)])
def test_a_tokens_end_is_what_it_says_or_soon(token: str, seconds: int | None) -> None:
    expected = 0 if seconds is None else time.time() + seconds
    assert abs(credentials.token_expiry(token) - expected) < 5


class Identity:
    """As azure-identity's credentials."""

    def __init__(self) -> None:
        self.scopes: list[tuple[str, ...]] = []

    def get_token(self, *scopes: str) -> Any:
        self.scopes.append(scopes)
        return AccessToken(f"token-{len(self.scopes)}", int(time.time()) + (10 if len(self.scopes) == 1 else 3600))


@pytest.mark.parametrize("kind", ["object", "function", "text"])
def test_a_provider_is_asked_again_before_its_token_ends(kind: str) -> None:
    identity = Identity()
    provider: Any = identity
    if kind == "function":
        provider = lambda: tuple(identity.get_token("scope"))  # noqa: E731
    elif kind == "text":
        provider = lambda: jwt(identity.get_token("scope").expires_on)  # noqa: E731
    store, _, _ = open_store("abfss://data@lake.dfs.core.windows.net/a", {"credential": provider}, 5)
    policies = store.filesystem().service_client._pipeline._impl_policies
    (policy,) = [one for one in policies if isinstance(one, AsyncBearerTokenCredentialPolicy)]
    sent = []

    class Server:
        async def send(self, request: Any) -> Any:
            sent.append(request.http_request.headers["Authorization"])
            return PipelineResponse(request.http_request, SimpleNamespace(status_code=200, headers={}), None)

    policy.next = Server()

    async def ask() -> None:
        for _ in range(3):
            request = HttpRequest("GET", "https://lake.blob.core.windows.net/data")
            await policy.send(PipelineRequest(request, PipelineContext(None)))

    asyncio.run(ask())
    # The first one ends in ten seconds, the second in an hour.
    assert len(identity.scopes) == 2
    assert len(set(sent)) == 2
    assert sent[1] == sent[2]


class Signatures:
    """As a linked service that gives signatures, each for some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.num_asked = seconds, 0
        self.is_away = False

    def __call__(self) -> str:
        if self.is_away:
            raise OSError("away")
        self.num_asked += 1
        ends = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=self.seconds)
        return (
            f"?sv=2024-01-01&se={ends.isoformat().replace('+00:00', '0Z').replace(':', '%3A')}&sig=of-{self.num_asked}"
        )


def signature_of(seconds: float) -> tuple[Signatures, Any]:
    provider = Signatures(seconds)
    store, _, _ = open_store("abfss://data@lake.dfs.core.windows.net/a", {"sas_token": provider}, 5)
    return provider, store.filesystem().credential


def test_a_signature_is_asked_for_again_before_it_ends() -> None:
    provider, credential = signature_of(2.0)
    deadline = time.monotonic() + 30
    while provider.num_asked < 3 and time.monotonic() < deadline:
        ends = credentials.signature_expiry(credential.signature)
        assert ends > time.time()
        time.sleep(0.1)
    assert provider.num_asked >= 3
    # After a rest, when the last one has ended, the next request waits for another.
    time.sleep(2.1)
    before = credential.signature
    assert credentials.signature_expiry(before) > time.time()
    assert before.endswith(f"of-{provider.num_asked}")


def test_a_signature_that_lasts_is_asked_for_once() -> None:
    provider, credential = signature_of(3600.0)
    assert {credential.signature for _ in range(10)} == {credential.signature}
    assert provider.num_asked == 1


def test_a_signature_stays_while_no_other_is_given_until_it_ends() -> None:
    provider, credential = signature_of(4.0)
    first, provider.is_away = credential.signature, True
    time.sleep(2.5)
    # Half of its time is over: another was asked for.
    assert [credential.signature, credential.signature] == [first, first]
    time.sleep(1.6)
    with pytest.raises(OSError, match="away"):
        credential.signature  # noqa: B018 (a property that asks)
    # It was away for a while.
    provider.is_away = False
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            assert credential.signature != first
            break
    assert provider.num_asked == 2


def test_a_provider_of_signatures_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    provider, credential = signature_of(0.2)
    is_over, waited = threading.Event(), []
    wait = threading.Event.wait
    monkeypatch.setattr(credentials, "_SIGNATURE_SECONDS", 0.3)
    monkeypatch.setattr(Signatures, "__call__", lambda _: str(is_over.wait()))
    credential._asked.wait = lambda seconds: waited.append(seconds) or wait(credential._asked, seconds)
    time.sleep(0.3)
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"sas_token'\] gives no signature"):
            credential.signature  # noqa: B018 (a property that asks)
    is_over.set()
    assert waited == [0.3]
    assert provider.num_asked == 1


@pytest.mark.parametrize(("given", "kind"), [(None, "NoneType"), ("abc", "a text without sig="), (7, "int")])
def test_a_provider_that_gives_no_signature_is_told_so(given: Any, kind: str) -> None:
    store, _, _ = open_store("abfss://data@lake.dfs.core.windows.net/a", {"sas_token": lambda: given}, 5)
    with pytest.raises(OSError, match=rf"sas_token'\] gave {kind}, where a shared access signature was expected"):
        store.filesystem()


@pytest.mark.parametrize(
    "signature",
    ["sv=1&se=2026-11-20T10%3A30%3A00Z&sig=a", "se=2026-11-20T10:30:00.0000000Z", "se=2026-11-20T11:30:00%2B01:00"],
)
def test_a_signatures_end_is_what_it_says(signature: str) -> None:
    assert (
        credentials.signature_expiry(signature) == dt.datetime(2026, 11, 20, 10, 30, tzinfo=dt.timezone.utc).timestamp()
    )


@pytest.mark.parametrize("signature", ["sig=a", "se=soon", ""])
def test_a_signature_that_says_no_end_is_asked_for_again_soon(signature: str) -> None:
    assert abs(credentials.signature_expiry(signature) - time.time() - 600) < 60


TENANT = "11111111-1111-1111-1111-111111111111"


def credential_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    if kind == "environment":
        environment = {"AZURE_TENANT_ID": TENANT, "AZURE_CLIENT_ID": TENANT, "AZURE_CLIENT_SECRET": "hunter22"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return azure.identity.DefaultAzureCredential()
    own = azure.identity.ClientSecretCredential(TENANT, TENANT, "hunter22")
    return azure.identity.ChainedTokenCredential(azure.identity.AzureCliCredential(), own) if kind == "chain" else own


@pytest.mark.parametrize("kind", ["own", "chain", "environment"])
def test_a_credential_that_holds_a_secret_is_not_pickled(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    credential = credential_of(kind, monkeypatch)
    # Else there were nothing to hold back.
    assert b"hunter22" in pickle.dumps(credential)
    storage = open_storage("abfss://data@lake.dfs.core.windows.net/a", {"credential": credential})
    assert b"hunter22" not in pickle.dumps(storage)
    assert "hunter22" not in storage.without_secrets("it said hunter22")


@pytest.mark.parametrize("kind", ["DefaultAzureCredential", "ManagedIdentityCredential", "AzureCliCredential"])
def test_a_credential_that_holds_none_travels(kind: str) -> None:
    credential = getattr(azure.identity, kind)()
    storage = open_storage("abfss://data@lake.dfs.core.windows.net/a", {"credential": credential})
    there = pickle.loads(pickle.dumps(storage))
    assert type(there.options["credential"]) is type(credential)


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("abfss://data@other.dfs.core.windows.net/a", {}),
        ("abfs://data/a", {"account_name": "other", "account_key": "a2V5"}),
    ],
)
def test_a_connection_string_of_another_account_is_refused(
    url: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "AccountName=lake;AccountKey=a2V5hunter22")
    with pytest.raises(ValueError, match=r"of the account 'other', and .*_CONNECTION_STRING of 'lake'") as caught:
        open_storage(url, options)
    assert "hunter22" not in str(caught.value)
    with pytest.raises(ValueError, match=r"'other', and .* of 'lake'"):
        open_storage(url, options | {"connection_string": None})
    assert open_storage("abfs://data/a").url == "abfs://data@lake.dfs.core.windows.net/a"
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", "BlobEndpoint=https://lake.blob.core.windows.net;SharedAccessSignature=sig=a"
    )
    with pytest.raises(ValueError, match=r"'other', and .* of 'lake'"):
        open_storage(url, options)


@pytest.mark.parametrize(
    ("given", "kind"), [(None, "NoneType"), ("", "an empty text"), (7, "int"), ((None, 1), "tuple")]
)
def test_a_provider_that_gives_no_token_is_told_so(given: Any, kind: str) -> None:
    credential = credentials.async_credential(lambda: given)
    with pytest.raises(TypeError, match=f"credential'] gave {kind}, where a token was expected"):
        asyncio.run(credential.get_token("scope"))


def ask_a_provider_that_hangs() -> list[str]:
    storage = open_storage(f"abfss://{LAKE}/a", {"credential": threading.Event().wait}, 1)
    return error_of(storage.list)


def test_a_provider_that_hangs_does_not_keep_the_interpreter() -> None:
    kind, said = run_python(ask_a_provider_that_hangs)
    assert kind == "TimeoutError"
    assert "could not be reached for 1 second" in said


class Async:
    """As azure-identity's credentials of `azure.identity.aio`."""

    def __init__(self, provider: Any) -> None:
        self.provider = provider

    async def get_token(self, *_: str) -> Any:
        return self.provider()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_provider_that_raises_no_error_ends_no_loop(kind: type[BaseException], is_async: bool) -> None:
    def provider() -> str:
        raise kind("hidden")

    given = Async(provider) if is_async else provider
    storage = open_storage(f"abfss://{LAKE}/a", {"credential": given}, 5)
    for _ in range(2):
        said = rf"storage_options\['credential'\] failed: it raised {kind.__name__}"
        with pytest.raises(OSError, match=said) as raised:
            storage.list()
        assert "hidden" not in str(raised.value)


def test_a_provider_that_raises_what_no_future_holds_is_an_error() -> None:
    credential = credentials.async_credential(lambda: next(iter([])))
    with pytest.raises(RuntimeError, match="credential'] failed: it raised StopIteration"):
        asyncio.run(credential.get_token("scope"))


def test_an_error_of_a_provider_stays_what_it_is() -> None:
    def provider() -> str:
        raise ConnectionResetError("the login is away")

    # Only so it can be told that it may pass.
    with pytest.raises(ConnectionResetError, match="the login is away"):
        asyncio.run(credentials.async_credential(provider).get_token("scope"))


def test_an_option_that_azure_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="knows no 'sas_tokn'; did you mean 'sas_token'"):
        open_store("abfss://data@lake.dfs.core.windows.net/a", {"sas_tokn": "s"}, 5)


def test_hdfs_without_a_host_says_where_one_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OSError, match="HADOOP_CONF_DIR"):
        open_storage("hdfs:///cache", None, 5).list()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("hdfs://127.0.0.1/x", r"as in hdfs://127\.0\.0\.1:8020/….*HADOOP_CONF_DIR"),
        ("hdfs://ns1/x", r"no name service that Hadoop's configuration knows.*HADOOP_CONF_DIR"),
        ("viewfs://mounts/x", "viewfs://mounts needs mounts: let HADOOP_CONF_DIR"),
    ],
)
def test_a_cluster_that_is_not_configured_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    for make in (make_parquet_converter, make_delta_converter):
        with pytest.raises(SourceError, match=f"^{url} cannot be read: .*{said}"):
            make(url)
    with pytest.raises(CacheError, match=f"^{url} cannot be read: .*{said}"):
        sweep(url)
    entry = f"{url}/converter-v1/{'0' * 16}-{'0' * 16}"
    with pytest.raises(CacheError, match=f"^{entry} cannot be read: .*{said}"):
        open_converter(entry)
    with pytest.raises(CacheError, match=f"^{url}/converter-v1 cannot be written: .*{said}") as caught:
        roots.open_root(url)
    assert "may create files in" not in str(caught.value)


def provide() -> str:
    return "token"


def test_a_provider_travels_and_its_token_does_not() -> None:
    storage = open_storage(
        "abfss://data@lake.dfs.core.windows.net/a", {"credential": provide, "account_key": "a2V5LW9m"}, 7
    )
    data = pickle.dumps(storage)
    assert b"a2V5LW9m" not in data
    again = pickle.loads(data)
    assert again.url == storage.url
    assert again.options == {"credential": provide, "account_name": "lake"}
    assert again._filesystem.timeout_seconds == 7
    again.lend(storage.options)
    assert again.options["account_key"] == "a2V5LW9m"


@pytest.mark.parametrize(
    ("url", "module", "remedy"),
    [
        ("s3://bucket/a", "s3fs", "'spark-tensor-converter[s3]'"),
        ("s3a://bucket/a", "s3fs", "'spark-tensor-converter[s3]'"),
        ("abfss://data@account.dfs.core.windows.net/a", "adlfs", "'spark-tensor-converter[azure]'"),
        ("hdfs://host:8020/a", "hdfs_native", "'spark-tensor-converter[hdfs]'"),
        ("gs://bucket/a", "gcsfs", "gcsfs"),
        ("https://host/a.parquet", "aiohttp", "aiohttp"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_pip_installs(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, remedy: str
) -> None:
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, module, None)
    text = f"{url} needs {module.replace('_', '-')}, which is not installed: pip install {remedy}."
    with pytest.raises(MissingDependencyError, match=re.escape(text)):
        make_parquet_converter(url)
    extras = set(metadata("spark-tensor-converter").get_all("Provides-Extra") or ())
    assert set(re.findall(r"\[(\w+)\]", remedy)) <= extras
