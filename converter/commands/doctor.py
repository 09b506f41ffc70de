"""What this machine has for the package, and what to do about what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from converter.cache.roots import open_root
from converter.commands.opening import OPTIONS_VARIABLE, TIMEOUT_SECONDS, storage_options
from converter.shards import look_for_shard
from converter.sources.spark.local import find_java_home, start_local_spark

State = Literal["good", "absent", "wrong"]

_CORE = ("numpy", "pyarrow", "fsspec")
_EXTRAS = {
    "pyspark": "spark", "torch": "torch", "tensorflow": "tf", "deltalake": "delta", "adlfs": "azure",
    "hdfs-native": "hdfs", "s3fs": "s3", "simplejpeg": "images", "pillow": "images", "tqdm": "torch",
    "matplotlib": "plot", "typer": "cli", "rich": "cli", "mlflow-skinny": "mlflow",
}  # fmt: skip
"""Packages, and the extra that brings each."""

_OTHER_NAMES = {
    "tensorflow": ("tensorflow-cpu",),
    "mlflow-skinny": ("mlflow",),
    "pyspark": ("pyspark-client", "databricks-connect"),
}

_CREDENTIALS = (
    "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET", "AZURE_TENANT_ID", "IDENTITY_ENDPOINT", "AWS_ACCESS_KEY_ID", "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE", "HADOOP_CONF_DIR", "HADOOP_HOME", "GOOGLE_APPLICATION_CREDENTIALS", OPTIONS_VARIABLE,
)  # fmt: skip
"""Variables that say who one is; only their names are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: State
    """`absent` may be fine, `wrong` is not."""

    told: str
    remedy: str = ""


def examine(cache_dir: str, *, asks_spark: bool) -> Iterator[Finding]:
    """Look at one thing after the other; a local Spark is started only if `asks_spark`."""
    yield Finding(what="Python", state="good", told=f"{platform.python_version()} at {sys.executable}")
    yield Finding(what="machine", state="good", told=f"{platform.platform()}, {os.cpu_count()} cores")
    for name in _CORE:
        yield Finding(what=name, state="good", told=importlib.metadata.version(name))
    for name, extra in _EXTRAS.items():
        yield _package(name, extra)
    yield _tried("Java", lambda: str(find_java_home()), needed=asks_spark)
    found = [name for name in _CREDENTIALS if os.environ.get(name)]
    yield Finding(what="credentials", state="good" if found else "absent", told=", ".join(found) or "none in variables")
    yield _tried("rank", _rank, needed=True)
    yield _tried("cache", lambda: _write_to(cache_dir), needed=True)
    if asks_spark:
        yield _tried("executors", lambda: _convert(cache_dir), needed=True)


def _package(name: str, extra: str) -> Finding:
    for other in (name, *_OTHER_NAMES.get(name, ())):
        try:
            return Finding(what=name, state="good", told=importlib.metadata.version(other))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Finding(
        what=name, state="absent", told="not installed", remedy=f"pip install 'spark-tensor-converter[{extra}]'"
    )


def _tried(what: str, look: Callable[[], str], *, needed: bool) -> Finding:
    try:
        return Finding(what=what, state="good", told=look())
    except Exception as error:  # noqa: BLE001 (a Spark that cannot start raises its own)
        # The messages of this package end with what to do.
        return Finding(what=what, state="wrong" if needed else "absent", told=str(error))


def _rank() -> str:
    shard, source = look_for_shard()
    return f"{shard.index} of {shard.count}, from {source}"


def _write_to(cache_dir: str) -> str:
    """Write a small file into the cache's own directory and remove it."""
    root = open_root(cache_dir, storage_options(), TIMEOUT_SECONDS)
    name = f".clock-{uuid.uuid4().hex}"
    root.put_if_absent(name, b"doctor")
    root.delete_file(name)
    free = f", {shutil.disk_usage(root.path()).free / 1e9:,.0f} GB free" if root.is_local else ""
    return f"{root.url} can be written{free}"


def _convert(cache_dir: str) -> str:
    """Let executors of a local Spark write a row, and read it."""
    from converter.make import make_spark_converter

    spark: Any = start_local_spark("doctor")
    try:
        with make_spark_converter(
            spark.range(0, 1, 1, 1), cache_dir=cache_dir, storage_options=storage_options(),
            timeout_seconds=TIMEOUT_SECONDS, progress=False,
        ) as rows:  # fmt: skip
            rows.head(1)
            return f"Spark {spark.version} has written a row, and it was read"
    finally:
        spark.stop()
