"""An entry is found by its URL or its name."""

from __future__ import annotations

import pickle
import socket
from pathlib import Path
from typing import Any

import pytest

from converter import open_converter
from converter import sweep as sweep_cache
from converter.cache import finding
from converter.errors import CacheCorruptError, CacheError, CacheNotOwnedError
from converter.storage.directory import Storage
from tests.faults.small_entries import NUM_ROWS, ids_of
from tests.folders import paths_below
from tests.unit.cache.written import KEY, commit, name_entry


def test_an_entry_is_opened_by_its_url(root: Storage) -> None:
    commit(root)
    found, key, manifest = finding.open_entry(root.below(KEY).url + "/")
    assert (found.url, key) == (root.url, KEY)
    assert manifest is not None


@pytest.mark.parametrize("name", ["manifest.json", "0" * 33, KEY + "0", "data-" + "0" * 32, ""])
def test_a_url_that_names_no_entry_is_refused(root: Storage, name: str) -> None:
    with pytest.raises(CacheNotOwnedError, match=r"is not a cache entry: expected <cache_dir>/converter-v1/<key>"):
        finding.open_entry(f"{root.url}/{name}")


def test_a_folder_below_somebody_elses_is_no_entry(tmp_path: Path) -> None:
    (tmp_path / KEY).mkdir()
    with pytest.raises(CacheNotOwnedError, match="is not a cache entry"):
        finding.open_entry(str(tmp_path / KEY))
    assert paths_below(tmp_path) == [KEY]


def test_an_entry_is_opened_by_its_name(tmp_path: Path) -> None:
    url = name_entry(tmp_path, "flights-2026-11-20")
    name_entry(tmp_path, "flights-2026-11-21")
    with open_converter(tmp_path, cache_key="flights-2026-11-20") as converter:
        assert converter.url == url
        assert converter.cache_key == "flights-2026-11-20"
        assert ids_of(converter) == list(range(NUM_ROWS))
        html = "cache_key &#x27;flights-2026-11-20&#x27;, written 2026-11-20T01:02:03+00:00 of DataFrame by u on h (a)"
        assert html in converter._repr_html_()
        assert "\n" not in repr(converter)
        assert pickle.loads(pickle.dumps(converter)).cache_key == "flights-2026-11-20"
    with open_converter(url, cache_key="flights-2026-11-20") as converter:
        assert converter.url == url
    with pytest.raises(CacheError, match=r"was not written with cache_key='flights-2026-11-21'"):
        open_converter(url, cache_key="flights-2026-11-21")


def test_opening_by_name_reads_no_other_manifest(tmp_path: Path) -> None:
    for number in range(3):
        Path(name_entry(tmp_path, f"other-{number}").removeprefix("file://"), "manifest.json").write_bytes(b"{")
    name_entry(tmp_path, "mine")
    with open_converter(tmp_path, cache_key="mine") as converter:
        assert len(converter) == NUM_ROWS


def test_a_name_of_several_entries_lists_them(tmp_path: Path) -> None:
    urls = [name_entry(tmp_path, "flights", schema=schema) for schema in ("{}", "[]")]
    said = r"2 entries of cache_key='flights', with different schemas or write options\. Open one of them by its URL:"
    with pytest.raises(CacheError, match=said) as raised:
        open_converter(tmp_path, cache_key="flights")
    for url in urls:
        assert f"\n  {url} (written 2026-11-20T01:02:03+00:00, 24 rows, 2 columns)" in str(raised.value)


def test_of_a_name_the_entry_that_is_kept_is_opened(tmp_path: Path) -> None:
    name_entry(tmp_path, "flights", is_kept=False)
    with open_converter(tmp_path, cache_key="flights") as converter:
        assert not converter._manifest.is_kept
    url = name_entry(tmp_path, "flights", is_kept=True)
    with open_converter(tmp_path, cache_key="flights") as converter:
        assert converter.url == url


def test_a_name_that_is_not_there_says_which_ones_are(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"has no entry of cache_key='flights': it holds no entries\. Write it with"):
        open_converter(tmp_path, cache_key="flights")
    for number in range(3):
        name_entry(tmp_path, f"day-{number}")
    with pytest.raises(
        CacheError, match=r"its 3 entries have 'day-0', 'day-1', 'day-2'\. Write it with make_spark_con"
    ):
        open_converter(tmp_path, cache_key="flights")
    for number in range(3, 23):
        name_entry(tmp_path, f"day-{number}")
    with pytest.raises(CacheError, match=r"the 20 newest of its 23 entries have 'day-\d+', ") as raised:
        open_converter(tmp_path, cache_key="flights")
    assert str(raised.value).count("'day-") == 20
    with pytest.raises(CacheNotOwnedError, match=r"or a cache_dir together with cache_key=…"):
        open_converter(tmp_path)


def test_a_named_entry_that_is_corrupt_says_so(tmp_path: Path) -> None:
    Path(name_entry(tmp_path, "flights").removeprefix("file://"), "manifest.json").write_bytes(b"{")
    with pytest.raises(CacheCorruptError, match="is not a manifest that this package wrote"):
        open_converter(tmp_path, cache_key="flights")


@pytest.mark.parametrize(("cache_key", "error"), [(7, TypeError), (" ", ValueError)])
def test_a_name_that_is_none_is_refused(tmp_path: Path, cache_key: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="cache_key must"):
        open_converter(tmp_path, cache_key=cache_key)
    with pytest.raises(error, match="cache_key must"):
        sweep_cache(tmp_path, cache_key=cache_key)


def test_a_folder_that_another_machine_wrote_is_named(cache_dir: Path) -> None:
    url = f"file://{cache_dir}/elsewhere/converter-v1/{KEY}"
    said = f"there is no folder .*/converter-v1 on this machine .{socket.gethostname()}.*that all of them share"
    with pytest.raises(CacheNotOwnedError, match=said):
        finding.open_entry(url)
