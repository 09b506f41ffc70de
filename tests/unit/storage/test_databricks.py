"""What Spark and Python call the same place on Databricks."""

from __future__ import annotations

from pathlib import Path

import pytest

from converter.storage.databricks import python_path_of, spark_url_of
from converter.storage.opening import open_storage


@pytest.mark.parametrize(
    ("url", "path", "spark_url"),
    [
        ("dbfs:/cache", "/dbfs/cache", "dbfs:/cache"),
        ("dbfs:///a/b/", "/dbfs/a/b/", "dbfs:/a/b/"),
        ("dbfs:/Volumes/main/ml/v/cache", "/Volumes/main/ml/v/cache", "dbfs:/Volumes/main/ml/v/cache"),
        ("dbfs:/VolumesOfMine/cache", "/dbfs/VolumesOfMine/cache", "dbfs:/VolumesOfMine/cache"),
        ("dbfs:/a b#c", "/dbfs/a b#c", "dbfs:/a b#c"),
    ],
)
def test_a_place_on_databricks_has_two_names(url: str, path: str, spark_url: str) -> None:
    assert python_path_of(url) == path
    assert spark_url_of(path) == spark_url


@pytest.mark.parametrize("path", ["/data/cache", "/dbfsx/cache", "/home/Volumes/x", "/dbfs", "/Volumes"])
def test_other_places_have_one(path: str) -> None:
    assert spark_url_of(path) == f"file://{path}"


def test_a_place_of_databricks_is_explained_elsewhere() -> None:
    with pytest.raises(ValueError, match=r"dbfs:/cache is reached through /dbfs, which this machine does not have"):
        open_storage("dbfs:/cache")


@pytest.mark.parametrize("url", ["/Volumes/main/ml/cache", "file:/dbfs/cache"])
def test_a_path_of_databricks_makes_no_folder_elsewhere(url: str) -> None:
    with pytest.raises(ValueError, match=r"is reached through /(Volumes|dbfs), which this machine does not have"):
        open_storage(url)


def test_a_file_is_created_once_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("converter.storage.databricks._DATABRICKS_MOUNTS", (f"{tmp_path}/",))
    monkeypatch.delattr("os.link")
    storage = open_storage(tmp_path / "cache")
    storage.make_directory()
    assert storage.put_if_absent("a", b"first")
    assert not storage.put_if_absent("a", b"second")
    assert storage.read("a") == b"first"
    assert [info.name for info in storage.list()] == ["a"]
