"""Our own subdirectory: found, marked, refused if it is not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from converter.cache import roots
from converter.errors import CacheError, CacheNotConfiguredError, CacheNotOwnedError
from converter.storage.local import LocalStorage
from tests.folders import paths_below


def test_a_new_cache_directory_is_made_and_marked(cache_dir: Path, ours: Path) -> None:
    root = roots.open_root(str(cache_dir / "deep" / "down"))
    assert root.url == f"file://{cache_dir}/deep/down/converter-v1"
    marker = json.loads((cache_dir / "deep" / "down" / "converter-v1" / ".owner").read_bytes())
    assert marker["package"] == "spark-tensor-converter"


def test_opening_again_leaves_the_marker_and_everything_else_alone(cache_dir: Path, ours: Path) -> None:
    roots.open_root(str(cache_dir))
    (ours / ".owner").write_bytes(b"as it was")
    (ours / "other").write_bytes(b"x")
    assert roots.open_root(str(cache_dir)).url == f"file://{ours}"
    assert (ours / ".owner").read_bytes() == b"as it was"
    assert paths_below(ours) == [".owner", "other"]


def test_a_disk_that_calls_a_free_name_taken_gets_the_marker_all_the_same(
    cache_dir: Path, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS may, if it repeats a request. First seen in `python -m tests.faults.campaign store --case 62:625`."""
    put, asked = LocalStorage.put_if_absent, []

    def put_at_second_try(storage: LocalStorage, name: str, data: bytes) -> bool:
        asked.append(name)
        return len(asked) > 1 and put(storage, name, data)

    monkeypatch.setattr(LocalStorage, "put_if_absent", put_at_second_try)
    roots.open_root(str(cache_dir))
    assert asked == [".owner", ".owner"]
    assert (ours / ".owner").exists()
    (ours / ".owner").unlink()
    monkeypatch.setattr(LocalStorage, "put_if_absent", lambda *_: False)
    with pytest.raises(CacheError, match=r"cannot be written: \.owner can neither be created nor read"):
        roots.open_root(str(cache_dir))


def test_the_user_may_keep_other_things_in_the_cache_directory(cache_dir: Path, ours: Path) -> None:
    cache_dir.mkdir()
    (cache_dir / "thesis.tex").write_bytes(b"precious")
    roots.open_root(str(cache_dir))
    assert paths_below(cache_dir) == ["converter-v1", "converter-v1/.owner", "thesis.tex"]


def test_an_empty_subdirectory_becomes_ours(cache_dir: Path, ours: Path) -> None:
    ours.mkdir(parents=True)
    roots.open_root(str(cache_dir))
    assert paths_below(ours) == [".owner"]


@pytest.mark.parametrize("name", ["file", "folder/file", ".hidden"])
def test_a_subdirectory_that_somebody_else_made_is_refused_and_left_alone(
    cache_dir: Path, ours: Path, name: str
) -> None:
    (ours / name).parent.mkdir(parents=True)
    (ours / name).write_bytes(b"x")
    before = paths_below(cache_dir)
    with pytest.raises(CacheNotOwnedError, match=r"converter-v1 holds files but not the marker \.owner") as raised:
        roots.open_root(str(cache_dir))
    assert raised.value.path == f"file://{ours}"
    assert paths_below(cache_dir) == before


def test_a_cache_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(CacheError, match="converter-v1 is a file, where a directory was expected"):
        roots.open_root(str(tmp_path / "file"))
    (tmp_path / "converter-v1").write_bytes(b"x")
    with pytest.raises(CacheError, match="converter-v1 is a file, where a directory was expected"):
        roots.open_root(str(tmp_path))


def test_a_cache_directory_that_cannot_be_written_is_explained() -> None:
    # Nobody, root included, makes directories in /proc.
    with pytest.raises(CacheError, match=r"file:///proc/cache cannot be written: No such file or directory") as raised:
        roots.open_root("/proc/cache")
    assert raised.value.path == "file:///proc/cache"
    assert isinstance(raised.value.__cause__, OSError)


def test_a_cache_directory_that_is_not_local_is_refused() -> None:
    with pytest.raises(CacheError, match=r"cache_dir='memory://cache' is in this process's memory"):
        roots.open_root("memory://cache")


def choose(argument: Any = None, conf: str | None = None, master: str = "yarn", is_connect: bool = False) -> str:
    return roots.choose_cache_dir(argument, spark_conf=conf, master=master, is_connect=is_connect)


def test_the_cache_goes_where_the_nearest_word_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERTER_CACHE_DIR", "/environment")
    assert choose("/argument", conf="/conf", master="local[2]") == "/argument"
    assert choose(Path("/argument"), conf="/conf") == "/argument"
    assert choose(conf="/conf", master="local[2]") == "/environment"
    monkeypatch.delenv("CONVERTER_CACHE_DIR")
    assert choose(conf="/conf", master="local[2]") == "/conf"
    assert choose(master="local[2]") == platformdirs.user_cache_dir("spark-tensor-converter")


def test_an_empty_environment_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVERTER_CACHE_DIR", "")
    assert choose(conf="/conf") == "/conf"


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]", "local[4,2]"])
def test_local_mode_needs_no_word(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.delenv("CONVERTER_CACHE_DIR", raising=False)
    assert choose(master=master) == platformdirs.user_cache_dir("spark-tensor-converter")


@pytest.mark.parametrize("master", ["yarn", "spark://local:7077", "k8s://local[2]", "local-cluster[2,1,1024]", ""])
def test_a_cluster_without_a_word_is_asked_for_one(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.delenv("CONVERTER_CACHE_DIR", raising=False)
    said = r"runs on the cluster .*cache_dir=….* CONVERTER_CACHE_DIR, .* converter\.cacheDir"
    with pytest.raises(CacheNotConfiguredError, match=said):
        choose(master=master)


def test_connect_is_never_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONVERTER_CACHE_DIR", raising=False)
    with pytest.raises(CacheNotConfiguredError, match="Spark Connect, whose local disk is the server's"):
        choose(master="local[2]", is_connect=True)
    assert choose("/argument", is_connect=True) == "/argument"
