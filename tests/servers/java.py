"""What makes the many short lives of Java in these tests cheap; none of it changes what a program does.

Half of the time that Spark takes to start goes into loading its classes (10.4 s for a session, a file written and
read; 4.9 s with an archive of the classes that are needed for that). The compiler that optimises most does not pay
within a test: with two test processes on two cores the first one alone saves a fifth.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.servers.process import fetched

_VARIABLE = "JDK_JAVA_OPTIONS"
_ARCHIVE = "classes.jsa"
_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
# Java of another version, or with other jars, does without the archive, and need not say so.
_QUIETLY = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"

_USE_SPARK = """
import sys

from pyspark.sql import functions as F

import converter

options = f"{sys.argv[1]} -XX:ArchiveClassesAtExit={sys.argv[2]} -Xlog:cds=off -Xlog:cds+dynamic=off"
spark = converter.start_local_spark("classes", master="local[2]", conf={"spark.driver.extraJavaOptions": options})
path = f"{sys.argv[2]}.parquet"
columns = ("id", "id % 3 AS k", "id / 7 AS x", "concat('s', id) AS s", "array(id) AS a")
rows = spark.range(0, 100, 1, 2).selectExpr(*columns)
rows.write.partitionBy("k").parquet(path)
found = spark.read.parquet(path)
found.groupBy("k").agg(F.max("x"), F.countDistinct("s")).orderBy("k").collect()
found.join(rows.select("id", F.col("x").alias("y")), "id").filter("y > 3").toArrow()
found.mapInArrow(lambda batches: batches, found.schema).collect()
with converter.make_spark_converter(found, cache_dir=f"{sys.argv[2]}.cache") as made:
    len(made)
spark.stop()
"""


def make_java_start_quickly() -> None:
    """Let every Java that this process and its children start be one for a short life, unless the user says how."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = f"{_OPTIONS} {_archive_option()}".strip()


def _archive_option() -> str:
    """The option that names an archive of Spark's classes, made once for this Java and these jars; empty without."""
    try:
        import pyspark

        from converter.sources.spark.local import find_java_home

        java, jars = find_java_home() / "bin" / "java", Path(pyspark.__file__).parent / "jars"
        version = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
        known = f"{_USE_SPARK} {_OPTIONS} {java} {version} {jars} {jars.stat().st_mtime_ns}"
        folder = fetched(f"classes-{hashlib.sha256(known.encode()).hexdigest()[:16]}", _make_archive)
    except Exception as error:  # noqa: BLE001 (the tests can do without)
        # Also subprocess' errors, with what Java said.
        said = (getattr(error, "stderr", None) or str(error))[-500:]
        print(f"Java will start slowly, without an archive of Spark's classes: {said}", file=sys.stderr)
        return ""
    return f"-XX:SharedArchiveFile={folder / _ARCHIVE} {_QUIETLY}"


def _make_archive(folder: Path) -> None:
    archive = folder / _ARCHIVE
    # Java holds the pipe until it has written the archive, and so for longer than Python lives.
    command = [sys.executable, "-c", _USE_SPARK, _OPTIONS, str(archive)]
    subprocess.run(command, capture_output=True, check=True, timeout=300)
    for left in folder.iterdir():
        if left != archive:
            shutil.rmtree(left)
    assert archive.is_file()
