"""What a URL names on each kind of store, and what is refused by name."""

from __future__ import annotations

import os
import pickle
import re
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

from converter import (
    CacheError,
    MissingDependencyError,
    make_parquet_converter,
)
from converter.cache import finding, roots
from converter.storage.hdfs import HdfsStore
from converter.storage.opening import open_storage, open_store

ACCOUNT = {"account_key": "c2VjcmV0LWtleQ=="}

LAKE = "data@lake.dfs.core.windows.net"


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


def test_hadoops_short_form_is_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    _, root, shown = open_store("hdfs:/a/b", {}, 1)
    assert (root, shown) == ("/a/b", "hdfs:///a/b")


def test_a_url_of_hdfs_has_a_host_or_none() -> None:
    for url, host, port, root in (("hdfs://name:8020/a/b/", "name", 8020, "/a/b"), ("hdfs:///a", None, None, "/a")):
        store, found, shown = open_store(url, {}, 5)
        assert isinstance(store, HdfsStore)
        assert (store.options, found, shown) == ({"host": host, "port": port}, root, url.rstrip("/"))


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/a?b=c/d", "https://host/a%23b", "gs://bucket/a#b", "s3://bucket/a::b", "simplecache::memory://a"],
)
def test_a_name_that_would_be_another_place_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"Rename the folder|is a chain of filesystems"):
        open_storage(url)


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


def test_a_relative_path_needs_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ValueError, match=r"'cache' is a relative path, but the working directory .* was removed"):
        open_storage("cache")
    assert open_storage(str(tmp_path)).url == f"file://{tmp_path}"


def test_a_path_that_is_no_utf_8_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'/data/n\\udcff' is a path whose name is no UTF-8. Rename the folder"):
        open_storage(os.fsdecode(b"/data/n\xff"))
