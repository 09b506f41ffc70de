"""A real HDFS on this machine: a NameNode and a DataNode, each in a process of its own.

So either can be paused, killed and started again alone. Permissions are checked, and whoever runs the tests is the
superuser; `HADOOP_USER_NAME` makes a client somebody else.

Why Hadoop's classes directly and not its MiniDFSCluster: that one runs both in one JVM.
"""

from __future__ import annotations

import json
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

from tests.servers.process import Server, fetch, fetched, free_port, get, is_missing, require_program, tail

# Hadoop's logging is the one of pyspark's jars.
_JARS = ("hadoop-client-api", "hadoop-client-runtime", "slf4j-api", "log4j-*", "jcl-over-slf4j")
_JAVA_OPTIONS = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Djava.net.preferIPv4Stack=true")
_LOGGING = """
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
logger.requests.name = http.requests
logger.requests.level = off
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c{1}: %m%n%ex
"""
_WAIT_SECONDS = 60


SMALL_BLOCK_BYTES = 4 << 20
"""So small that a file of a few megabytes has several."""

DEFAULT_BLOCK_BYTES = 128 << 20
"""What Hadoop takes where nothing is said, and what Spark's own client takes whatever the NameNode says."""


class Hdfs:
    """An HDFS of one NameNode and one DataNode."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self.logs = folder
        """Where the logs of both, and all their data, are."""
        port, self._http_port = free_port(), free_port()
        data_http_port = free_port()
        self.url = f"hdfs://127.0.0.1:{port}"
        self._java = _java()
        configuration = {
            "fs.defaultFS": self.url,
            "hadoop.tmp.dir": str(folder / "tmp"),
            # The DataNode starts together with the NameNode, and finds it as soon as it answers.
            "ipc.client.connect.retry.interval": "100",
            "ipc.client.connect.max.retries": "600",
            "dfs.namenode.rpc-address": f"127.0.0.1:{port}",
            "dfs.namenode.http-address": f"127.0.0.1:{self._http_port}",
            "dfs.namenode.name.dir": str(folder / "name"),
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.datanode.address": f"127.0.0.1:{free_port()}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{free_port()}",
            "dfs.datanode.http.address": f"127.0.0.1:{data_http_port}",
            "dfs.datanode.data.dir": str(folder / "data"),
            "dfs.replication": "1",
            "dfs.blocksize": str(block_bytes),
            # A silent DataNode counts as dead after ten heartbeats and two rechecks: 10 s instead of 10 minutes.
            "dfs.heartbeat.interval": "1",
            "dfs.namenode.heartbeat.recheck-interval": "100",
        }
        conf = folder / "conf"
        conf.mkdir()
        (conf / "hdfs-site.xml").write_text(as_xml(configuration))
        (conf / "core-site.xml").write_text(as_xml(configuration))
        (conf / "log4j2.properties").write_text(_LOGGING)
        self._class_path = ":".join([str(conf), *_jars()])
        self.namenode = Server(
            "NameNode",
            self._command("org.apache.hadoop.hdfs.server.namenode.NameNode"),
            log=folder / "namenode.log",
            is_ready=lambda: _jmx(self._http_port, "NameNode", "NameNodeStatus").get("State") == "active",
        )
        self.datanode = Server(
            "DataNode",
            self._command("org.apache.hadoop.hdfs.server.datanode.DataNode"),
            log=folder / "datanode.log",
            is_ready=lambda: _has_reported(data_http_port),
        )

    def start(self) -> None:
        """Make an empty filesystem, and return once it takes data."""
        self.datanode.launch()
        self._admin("org.apache.hadoop.hdfs.server.namenode.NameNode", "-format", "-nonInteractive")
        self.namenode.start()
        self.datanode.wait_until_ready()

    def kill(self) -> None:
        """End both at once."""
        self.datanode.kill()
        self.namenode.kill()

    def num_live_datanodes(self) -> int:
        """As many as the NameNode counts on."""
        return int(self._state()["NumLiveDataNodes"])

    def wait_until_datanode_is_given_up(self) -> None:
        """Return once the NameNode knows that the DataNode is dead: about ten seconds after its last heartbeat."""
        self._wait_until(lambda: self.num_live_datanodes() == 0, "the NameNode still hears of its DataNode")

    def wait_until_writable(self) -> None:
        """Return once the NameNode has its DataNode, knows where the data are, and takes more.

        For after a NameNode that was started again, or a DataNode that was paused until it was given up.
        """
        self._wait_until(
            lambda: self._state().get("FSState") == "Operational" and self.num_live_datanodes() == 1,
            "the NameNode is in safe mode, or has no DataNode",
        )

    def num_operations(self) -> dict[str, int]:
        """How often the NameNode was asked for each operation, by the name that Hadoop gives it."""
        activity = _jmx(self._http_port, "NameNode", f"RpcDetailedActivityForPort{urlsplit(self.url).port}")
        ending = "NumOps"
        return {name.removesuffix(ending): count for name, count in activity.items() if name.endswith(ending)}

    def enter_safe_mode(self) -> None:
        """From now on everything can be read and nothing be changed."""
        self._admin("org.apache.hadoop.hdfs.tools.DFSAdmin", "-safemode", "enter")

    def leave_safe_mode(self) -> None:
        self._admin("org.apache.hadoop.hdfs.tools.DFSAdmin", "-safemode", "leave")

    @contextmanager
    def safe_mode(self) -> Iterator[None]:
        """In this block nothing can be changed."""
        self.enter_safe_mode()
        try:
            yield
        finally:
            self.leave_safe_mode()

    def _command(self, *arguments: str) -> list[str]:
        # Jetty's folders stay where it is killed.
        return [self._java, *_JAVA_OPTIONS, f"-Djava.io.tmpdir={self.logs}", "-cp", self._class_path, *arguments]

    def _admin(self, *arguments: str) -> None:
        """Run one of Hadoop's programs to its end."""
        log = self.logs / "admin.log"
        with open(log, "ab") as output:
            done = subprocess.run(
                self._command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=90,
                check=False,
            )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(arguments)} failed. The end of {log}:\n{tail(log)}")

    def _wait_until(self, claim: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not claim():
            assert time.monotonic() < deadline, f"{otherwise} after {_WAIT_SECONDS} s"
            time.sleep(0.1)

    def _state(self) -> dict[str, Any]:
        return _jmx(self._http_port, "NameNode", "FSNamesystemState")


@contextmanager
def start_hdfs(folder: Path, *, block_bytes: int = SMALL_BLOCK_BYTES) -> Iterator[Hdfs]:
    """An HDFS with nothing in it, which ends with the block."""
    hdfs = Hdfs(folder, block_bytes)
    try:
        hdfs.start()
        yield hdfs
    finally:
        hdfs.kill()


def hadoop_version() -> str:
    """The one of pyspark's jars, so that the servers are what this Spark was made for."""
    (jar,) = _pyspark_jars("hadoop-client-api")
    return jar.stem.rpartition("-")[2]


def _java() -> str:
    from converter.errors import MissingDependencyError
    from converter.sources.spark.local import find_java_home

    try:
        return str(find_java_home() / "bin" / "java")
    except MissingDependencyError as error:
        is_missing(f"HDFS needs Java. {error}")


def _jars() -> list[str]:
    # The servers, in one jar with all that they need besides pyspark's.
    artifact = f"org.apache.hadoop:hadoop-client-minicluster:{hadoop_version()}"

    def fill(folder: Path) -> None:
        maven = require_program("mvn", "install Maven (on Debian and Ubuntu: apt-get install maven), it fetches HDFS")
        copy = [maven, "-q", "-B", "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={folder}"]
        fetch(copy, folder=folder)
        (jar,) = folder.glob("*.jar")
        _inflate(jar)

    servers = fetched(artifact.replace(":", "-"), fill)
    return [str(jar) for jar in [*sorted(servers.glob("*.jar")), *_pyspark_jars(*_JARS)]]


def _inflate(jar: Path) -> None:
    """Store its files as they are: each server reads the whole jar twice when it starts, for 2 s if compressed."""
    compressed = jar.with_suffix(".compressed")
    jar.rename(compressed)
    with zipfile.ZipFile(compressed) as source, zipfile.ZipFile(jar, "w") as target:
        for name in dict.fromkeys(source.namelist()):
            target.writestr(name, source.read(name))
    compressed.unlink()


def _pyspark_jars(*names: str) -> list[Path]:
    import pyspark

    folder = Path(pyspark.__file__).parent / "jars"
    return [jar for name in names for jar in sorted(folder.glob(f"{name}-[0-9]*.jar"))]


def as_xml(configuration: dict[str, str]) -> str:
    properties = (
        f"<property><name>{name}</name><value>{escape(value)}</value></property>"
        for name, value in configuration.items()
    )
    return f"<configuration>{''.join(properties)}</configuration>"


def _jmx(port: int, service: str, bean: str) -> dict[str, Any]:
    """What a server of Hadoop says of itself; empty where it does not answer."""
    answer = get(port, f"/jmx?qry=Hadoop:service={service},name={bean}")
    try:
        beans: list[dict[str, Any]] = json.loads(answer or b"{}").get("beans", [])
    except ValueError:  # The page of an error, while the server starts.
        return {}
    return beans[0] if beans else {}


def _has_reported(port: int) -> bool:
    """Whether the DataNode has told its NameNode which blocks it has."""
    info = _jmx(port, "DataNode", "DataNodeInfo")
    actors = json.loads(info.get("BPServiceActorInfo") or "[]")
    volumes = json.loads(info.get("VolumeInfo") or "{}").values()
    if not any(actor["ActorState"] == "RUNNING" for actor in actors):
        return False
    # A report of no blocks has no size.
    return not any(volume["numBlocks"] for volume in volumes) or actors[0]["maxBlockReportSize"] != "0"
