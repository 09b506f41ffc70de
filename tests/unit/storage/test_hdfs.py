"""HDFS: a cluster that is away, or is not configured, is named with what to do."""

from __future__ import annotations

import pytest

from converter import (
    CacheError,
    SourceError,
    make_delta_converter,
    make_parquet_converter,
    open_converter,
    sweep,
)
from converter.cache import roots
from converter.storage.hdfs import HdfsStore
from converter.storage.opening import open_storage


def test_who_refuses_to_be_called_is_named() -> None:
    store = HdfsStore({"host": "127.0.0.1", "port": 1}, protocol="hdfs")
    assert store._why_silent() == ": 127.0.0.1:1 answers Connection refused"


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
