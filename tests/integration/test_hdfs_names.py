"""A cluster that Hadoop's configuration names, of which one NameNode is away."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import converter
from converter import make_parquet_converter, make_spark_converter, open_converter
from converter.storage.opening import open_storage
from tests.processes import run_python
from tests.servers.hdfs import as_xml
from tests.servers.process import free_port

if TYPE_CHECKING:
    from tests.servers.hdfs import Hdfs

NAME_SERVICE = "ns1"
NUM_ROWS = 1000


def configure(folder: Path, hdfs: Hdfs) -> dict[str, str]:
    """The environment of a client of two NameNodes, of which nobody answers for the first."""
    properties = {
        "fs.defaultFS": f"hdfs://{NAME_SERVICE}",
        "dfs.nameservices": NAME_SERVICE,
        f"dfs.ha.namenodes.{NAME_SERVICE}": "nn1,nn2",
        f"dfs.namenode.rpc-address.{NAME_SERVICE}.nn1": f"127.0.0.1:{free_port()}",
        f"dfs.namenode.rpc-address.{NAME_SERVICE}.nn2": hdfs.url.removeprefix("hdfs://"),
        # Hadoop's own client needs it, and so Spark's writer.
        f"dfs.client.failover.proxy.provider.{NAME_SERVICE}": (
            "org.apache.hadoop.hdfs.server.namenode.ha.ConfiguredFailoverProxyProvider"
        ),
    }
    folder.mkdir()
    for name in ("core-site.xml", "hdfs-site.xml"):
        (folder / name).write_text(as_xml(properties))
    return {"HADOOP_CONF_DIR": str(folder)}


def ids_of(made: converter.DatasetConverter) -> list[int]:
    with made.make_batch_reader(batch_size=64) as reader:
        return [int(one) for batch in reader for one in batch["id"]]


def convert_by_name(urls: list[str]) -> list[dict[str, Any]]:
    """Write to each of two URLs that must be the same place, by each writer, and read by the other URL as well."""
    # Its JVM has the same configuration, and takes the cluster for its default filesystem.
    spark = converter.start_local_spark("names", master="local[2]")
    told = []
    for url, other_url in (urls, reversed(urls)):
        for writer in ("executors", "spark"):
            with make_spark_converter(spark.range(0, NUM_ROWS, 1, 2), cache_dir=url, writer=writer) as made:
                elsewhere = made.url.replace(url, other_url)
                folder = f"{elsewhere}/{made._manifest.file_names[0].rpartition('/')[0]}"
                with open_converter(elsewhere) as again, make_parquet_converter(folder) as files:
                    told.append({"urls": [made.url, again.url], "ids": [ids_of(made), ids_of(again), ids_of(files)]})
    return told


def test_a_name_service_is_the_cluster_whose_second_namenode_answers(hdfs: Hdfs, tmp_path: Path) -> None:
    urls = [f"hdfs://{NAME_SERVICE}/names", "hdfs:///names"]
    told = run_python(convert_by_name, urls, environment=configure(tmp_path / "conf", hdfs))
    assert [one["ids"] for one in told] == [[list(range(NUM_ROWS))] * 3] * 4
    for one, (url, other_url) in zip(told, [urls, urls, urls[::-1], urls[::-1]], strict=True):
        assert one["urls"][0].startswith(f"{url}/converter-v1/")
        assert one["urls"][1].startswith(f"{other_url}/converter-v1/")
    # All went to the cluster of the configuration, and nothing is left there.
    root = open_storage(f"{hdfs.url}/names/converter-v1")
    assert [info.name for info in root.list()] == [".owner"]
