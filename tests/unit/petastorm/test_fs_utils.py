"""URLs become filesystems and paths, as users of Petastorm ask for them."""

from __future__ import annotations

import pickle
from typing import Any
from urllib.parse import urlparse

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from converter.petastorm.fs_utils import (
    FilesystemResolver,
    get_dataset_path,
    get_filesystem_and_path_or_paths,
    normalize_dataset_url_or_urls,
    normalize_dir_url,
)


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///some/path", "/some/path"),
        ("hdfs://host:8020/some/path", "/some/path"),
        ("hdfs:///some/path", "/some/path"),
        ("s3://bucket/some/path", "bucket/some/path"),
        ("abfs://container/some/path", "container/some/path"),
        ("dbfs:/some/path", "/dbfs/some/path"),
        ("dbfs:///some/path", "/dbfs/some/path"),
    ],
)
def test_a_path_has_the_bucket_if_there_is_one(url: str, path: str) -> None:
    assert get_dataset_path(urlparse(url)) == path


def test_a_local_url_is_a_local_filesystem_that_other_processes_can_open() -> None:
    resolver = FilesystemResolver("file:///abs/path", {}, connector=object(), hdfs_driver="libhdfs", user="me")
    assert isinstance(resolver.filesystem(), LocalFileSystem)
    assert resolver.filesystem() is resolver.filesystem()
    assert resolver.get_dataset_path() == "/abs/path"
    assert resolver.parsed_dataset_url().netloc == ""
    factory = pickle.loads(pickle.dumps(resolver.filesystem_factory()))
    assert isinstance(factory(), LocalFileSystem)
    with pytest.raises(RuntimeError, match="not supported"):
        pickle.dumps(resolver)


def test_any_filesystem_of_fsspec_is_opened_with_its_options() -> None:
    resolver = FilesystemResolver(urlparse("s3://bucket/abs/path"), storage_options={"anon": True})
    assert resolver.get_dataset_path() == "bucket/abs/path"
    filesystem = resolver.filesystem()
    assert type(filesystem).__name__ == "S3FileSystem"
    assert filesystem.anon
    assert isinstance(FilesystemResolver("memory://folder").filesystem(), MemoryFileSystem)


@pytest.mark.parametrize(
    ("url", "error", "cause"),
    [
        ("/abs/path", ValueError, "scheme-less"),
        ("unknown://foo/bar", ValueError, "no filesystem that fsspec knows"),
        ("s3:///foo/bar", ValueError, "s3://bucket/path"),
        ("gcs:///foo/bar", ValueError, "gcs://bucket/path"),
        ("hdfs:///some/path", RuntimeError, "names no cluster"),
    ],
)
def test_a_url_that_names_no_place_is_refused(url: str, error: type[Exception], cause: str) -> None:
    with pytest.raises(error, match=cause):
        FilesystemResolver(url, {})


@pytest.mark.parametrize(
    ("configuration", "netloc"),
    [({"fs.defaultFS": "hdfs://names"}, "names"), ({"fs.defaultFS": "file:///"}, ""), (None, "")],
)
def test_the_cluster_of_an_hdfs_url_without_one_is_that_of_the_configuration(configuration: Any, netloc: str) -> None:
    resolver = FilesystemResolver("hdfs:///some/path", configuration)
    assert resolver.parsed_dataset_url().netloc == netloc
    assert resolver.get_dataset_path() == "/some/path"


def test_one_url_gives_one_path_and_a_list_a_list() -> None:
    filesystem, path = get_filesystem_and_path_or_paths("file:///some/path")
    assert isinstance(filesystem, LocalFileSystem)
    assert path == "/some/path"
    urls = ["file:///some/01.parquet", "file:///some/02.parquet"]
    assert get_filesystem_and_path_or_paths(urls)[1] == ["/some/01.parquet", "/some/02.parquet"]
    given = MemoryFileSystem()
    assert get_filesystem_and_path_or_paths("file:///some/path", filesystem=given) == (given, "/some/path")
    with pytest.raises(ValueError, match="same scheme and netloc"):
        get_filesystem_and_path_or_paths(["file:///some/01.parquet", "hdfs:///some/02.parquet"])


def test_a_slash_at_the_end_of_a_folder_goes() -> None:
    assert normalize_dir_url("file:///a/") == normalize_dir_url("file:///a") == "file:///a"
    assert normalize_dataset_url_or_urls(["file:///a/", "file:///b"]) == ["file:///a", "file:///b"]
    assert normalize_dataset_url_or_urls("file:///a/") == "file:///a"
    for wrong in (None, 5, ""):
        with pytest.raises(ValueError, match="must be a string"):
            normalize_dir_url(wrong)
    with pytest.raises(ValueError, match="non-empty"):
        normalize_dataset_url_or_urls([])
