"""Spark and Delta make the golden tables in a folder, with the rows that Spark reads of each version.

Spark runs in the time zone that shows confusions of time zones, and leaves plain files behind: `tables/<folder>`,
`rows/<name>/<version>.parquet` and `index.json`, which says what is known of each table and version. By hand:

    python -m tests.parity.golden_making FOLDER [NAME …]

With `CONVERTER_GOLDEN_TABLES=FOLDER` the tests then read this folder instead of the files that are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

from tests.parity.golden_statements import Step, Table
from tests.parity.golden_tables import CONF, PACKAGE, TABLES
from tests.parity.rows import flatten, rows_by_sparks_rule

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INDEX = "index.json"
_THREADS = 2


class KnownVersion(TypedDict):
    """What is known of a version that Spark can read."""

    milliseconds: int
    """When it was committed, as Spark says: since 1970, in UTC."""

    num_rows: int

    num_matching: int | None
    """How many rows the table's filters leave; None if it has none, or this version lacks their columns."""


class Index(TypedDict):
    """What is known of the tables in a folder."""

    package: str
    """The Delta that made them."""

    root: str
    """The folder in which they were made: logs with absolute paths name it."""

    seconds: float
    """How long it took."""

    tables: dict[str, dict[str, KnownVersion]]
    """For each table the versions that are not lost, by their numbers."""

    recipes: dict[str, str]
    """For each table a digest of what it is made from."""

    failures: dict[str, str]
    """The tables that could not be made, and why."""


def folder_of(root: str | Path, name: str) -> Path:
    """Where a table stands."""
    return Path(root) / "tables" / (TABLES[name].folder or name)


def rows_of(root: str | Path, name: str, version: int) -> Path:
    """Where the rows of a version stand, as Spark reads them."""
    return Path(root) / "rows" / name / f"{version}.parquet"


def expected_rows(root: str | Path, name: str, version: int) -> pa.Table:
    """What Spark reads of a version, with a column for each member of a struct."""
    return flatten(pq.read_table(rows_of(root, name, version)))


def matching(table: pa.Table, filters: Sequence[tuple[str, str, Any]]) -> pa.Table | None:
    """The rows for which the filters hold; None where a column of theirs is not there, or of another kind."""
    if filters and all(name in table.column_names for name, _, _ in filters):
        with contextlib.suppress(pa.ArrowNotImplementedError):
            return rows_by_sparks_rule(table, filters)
    return None


def recipe_of(name: str) -> str:
    """A digest of a table's statements: other ones need other files. Steps in Python are not told apart."""
    table = TABLES[name]
    steps = [step if isinstance(step, str) else "" for step in table.steps]
    recipe = (steps, sorted(table.conf.items()), table.folder, list(table.lost), table.refused, table.filters)
    return hashlib.sha256(repr(recipe).encode()).hexdigest()[:12]


def make_tables(root: str, names: list[str] | None = None) -> Index:
    """Make the tables and their rows; the index is written beside them, and returned."""
    from converter import start_local_spark

    started = time.monotonic()
    warehouse = {"spark.sql.warehouse.dir": str(Path(root) / "warehouse")}
    spark = start_local_spark("golden tables", master="local[2]", conf=CONF | warehouse)
    _say(f"Spark has started ({time.monotonic() - started:.1f} s)")
    index = Index(package=PACKAGE, root=str(Path(root).absolute()), seconds=0, tables={}, recipes={}, failures={})
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            wanted = list(TABLES if names is None else names)
            for name, made in zip(wanted, pool.map(lambda name: _make_table(spark, root, name), wanted), strict=True):
                if isinstance(made, str):
                    index["failures"][name] = made
                else:
                    index["tables"][name], index["recipes"][name] = made, recipe_of(name)
    finally:
        spark.stop()
    index["seconds"] = round(time.monotonic() - started, 1)
    (Path(root) / INDEX).write_text(json.dumps(index, indent=1))
    return index


def _make_table(spark: SparkSession, root: str, name: str) -> dict[str, KnownVersion] | str:
    """What is known of its versions, or why it could not be made."""
    started = time.monotonic()
    table, path = TABLES[name], folder_of(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    session = spark.newSession()
    for key, value in table.conf.items():
        session.conf.set(key, value)
    step: Step = ""
    try:
        done = 0
        for step in table.steps:
            if callable(step):
                step(session, path)
            else:
                session.sql(Template(step).substitute(table=f"delta.`{path}`", path=path)).collect()
            # A version is read cheapest while it is the newest.
            versions = _count_versions(path)
            for version in range(done, versions):
                _write_rows(session, path, name, version, root)
            done = versions
        step = "its versions"
        assert done == table.versions, f"there are {done} versions, not {table.versions}"
        for version in table.lost:
            _check_lost(session, path, version)
            rows_of(root, name, version).unlink()
        _check_evidence(table, path)
        known = _known_versions(session, root, name)
    except Exception as error:  # noqa: BLE001 (all tables are tried, and the test shows what became of each)
        failure = f"{str(step)[:300]}\n{type(error).__name__}: {str(error)[:3000]}"
        _say(f"{name!r} FAILED after {time.monotonic() - started:.1f} s: {failure}")
        return failure
    _say(f"{name!r} has {table.versions} versions ({time.monotonic() - started:.1f} s)")
    return known


def _count_versions(path: Path) -> int:
    commits = [file.stem for file in (path / "_delta_log").glob("*.json") if file.stem.isdigit()]
    return max(map(int, commits), default=-1) + 1


def _read_version(spark: SparkSession, path: Path, version: int) -> Any:
    return spark.read.format("delta").option("versionAsOf", str(version)).load(str(path))


def _write_rows(spark: SparkSession, path: Path, name: str, version: int, root: str) -> None:
    """Write the rows of a version, with exactly the types that Spark gives them."""
    file = rows_of(root, name, version)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Not compressed: the versions of a table have much in common, which an archive of all of them makes use of.
    rows = _read_version(spark, path, version).drop(*TABLES[name].refused).toArrow()
    pq.write_table(rows, file, compression="none")


def _known_versions(spark: SparkSession, root: str, name: str) -> dict[str, KnownVersion]:
    history = spark.sql(f"DESCRIBE HISTORY delta.`{folder_of(root, name)}`")
    times = history.selectExpr("version", "unix_millis(timestamp) AS milliseconds").collect()
    milliseconds = {row["version"]: row["milliseconds"] for row in times}
    known = {}
    for version in sorted({*range(TABLES[name].versions)} - {*TABLES[name].lost}):
        rows = expected_rows(root, name, version)
        left = matching(rows, TABLES[name].filters)
        known[str(version)] = KnownVersion(
            milliseconds=milliseconds[version],
            num_rows=rows.num_rows,
            num_matching=None if left is None else left.num_rows,
        )
    return known


def _check_lost(spark: SparkSession, path: Path, version: int) -> None:
    try:
        _read_version(spark, path, version).toArrow()
    except Exception as error:  # noqa: BLE001 (Spark has many ways to say so)
        _say(f"version {version} is lost: {str(error)[:100]}")
        return
    raise AssertionError(f"version {version} can still be read")


def _check_evidence(table: Table, path: Path) -> None:
    names = "\n".join(str(file.relative_to(path)) for file in path.rglob("*"))
    log = names + "\n" + "\n".join(file.read_text() for file in sorted((path / "_delta_log").glob("*.json")))
    missing = [pattern for pattern in table.evidence if not re.search(pattern, log)]
    assert not missing, f"nothing in the log is like {missing}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    made = make_tables(sys.argv[1], sys.argv[2:] or None)
    print(f"{len(made['tables'])} tables in {made['seconds']} s; failed: {', '.join(made['failures']) or 'none'}")
