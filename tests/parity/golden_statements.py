"""What a golden table is made from: statements in SQL, and steps that SQL cannot say.

In a statement `$table` is the table, and `$path` its folder; a step in Python is a function of the session and the
folder. `evidence` are patterns that must be found in the log (in its JSON files, or among the names of all files), so
that a table that no longer shows its feature fails when it is made, and not by passing everywhere.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Step = str | Callable[["SparkSession", Path], None]


@dataclass(frozen=True, kw_only=True)
class Table:
    """How a table comes to be, and what is known of it."""

    steps: tuple[Step, ...]
    """Statements, in this order."""

    versions: int
    """How many versions there are at the end, the lost ones included."""

    conf: Mapping[str, str] = field(default_factory=dict)
    """What the session is told before the first step."""

    folder: str = ""
    """The folder's name, if it is not the table's."""

    lost: Collection[int] = ()
    """Versions that nobody can read any more: their files, or their log, are gone."""

    refused: tuple[str, ...] = ()
    """Columns whose rows are not kept beside the table: most have no tensor form."""

    unreadable: Mapping[int, str] = field(default_factory=dict)
    """Versions that deltalake cannot open, or whose vectors it cannot read, and what the error must say of why."""

    filters: tuple[tuple[str, str, Any], ...] = ()
    """A condition that leaves some of the rows of most versions."""

    evidence: tuple[str, ...] = ()
    """Regular expressions that are found in the log."""


# Rows --------------------------------------------------------------------------


def numbers(start: int, stop: int, *, files: int = 1, columns: str = "id * 10 AS x, concat('row ', id) AS s") -> str:
    return f"SELECT id, {columns} FROM range({start}, {stop}, 1, {files})"


def _some(expression: str, name: str, *, missing: int = 2) -> str:
    """A column that is null in one of five rows."""
    return f"IF(id % 5 = {missing}, NULL, {expression}) AS `{name}`"


FAR_TIMES = """
    IF(id % 3 = 1, TIMESTAMP'9999-12-31 00:00:00', timestamp_seconds(1577836800 + id * 8640000)) AS valid_to,
    IF(id % 3 = 2, TIMESTAMP'1500-01-01 00:00:00', TIMESTAMP'2000-01-01 00:00:00') AS began, struct(valid_to) AS time
"""
_SPECIAL = "CASE id % 7 WHEN 3 THEN 'NaN' WHEN 4 THEN '-Infinity' WHEN 5 THEN '-0.0' ELSE id / 7 END"
_EVERY_TYPE = ",\n".join(
    (
        _some("id % 2 = 0", "boolean"),
        _some("CAST(id % 256 - 128 AS TINYINT)", "byte", missing=1),
        _some("CAST(id % 65536 - 32768 AS SMALLINT)", "short"),
        _some("CAST(id - 2147483648 AS INT)", "int", missing=3),
        _some("id - 9223372036854775807", "long"),
        _some(f"CAST({_SPECIAL} AS FLOAT)", "float"),
        _some(f"CAST({_SPECIAL} AS DOUBLE)", "double", missing=0),
        _some("CAST(id / 4 AS DECIMAL(9, 2))", "decimal"),
        _some("CAST(id * 1234567 + 0.01 AS DECIMAL(18, 4))", "middle_decimal"),
        _some("CAST(CAST(id AS DECIMAL(38, 10)) * -98765432101234.5 AS DECIMAL(38, 10))", "large_decimal", missing=4),
        _some("date_add(DATE'0001-01-01', CAST(id * 100003 % 3652059 AS INT))", "date"),
        _some("timestamp_micros(id * 86400000001 - 1)", "timestamp", missing=1),
        _some("timestampadd(MICROSECOND, id * 7919, TIMESTAMP_NTZ'2026-03-08 02:30:00')", "timestamp_ntz"),
        _some("IF(id % 7 = 0, '', concat('žluťoučký 🐟', id))", "string"),
        _some("IF(id % 7 = 0, X'', unhex(hex(id)))", "binary", missing=0),
        _some("array(CAST(id AS FLOAT), CAST(id AS FLOAT) / 2)", "pair"),
        _some("slice(array(id, id + 1, id + 2), 1, CAST(id % 4 AS INT))", "ragged"),
        _some("array(array(CAST(id AS DOUBLE), 1D), array(2D, 3D))", "matrix", missing=4),
        _some(
            f"named_struct('number', {_SPECIAL.replace(' END', '')} END, 'inner', {{inner}})".replace(
                "{inner}", "IF(id % 3 = 0, NULL, named_struct('text', CAST(id AS STRING), 'pair', array(id, -id)))"
            ),
            "struct",
        ),
    )
)


def every_type(start: int, stop: int, *, files: int = 1) -> str:
    return f"SELECT id, {_EVERY_TYPE} FROM range({start}, {stop}, 1, {files})"


def old_types(start: int, stop: int) -> str:
    """What needs no table feature, so that the protocol is a mere number."""
    return f"SELECT * EXCEPT (timestamp_ntz) FROM ({every_type(start, stop)})"


def create(rows: str, *, partitioned: str = "", properties: str = "", clustered: str = "") -> str:
    """`CREATE TABLE … AS` with these rows."""
    parts = [
        "CREATE TABLE $table USING delta",
        f"PARTITIONED BY ({partitioned})" if partitioned else "",
        f"CLUSTER BY ({clustered})" if clustered else "",
        f"TBLPROPERTIES ({properties})" if properties else "",
        f"AS {rows}",
    ]
    return "\n".join(part for part in parts if part)


def insert(rows: str) -> str:
    return f"INSERT INTO $table {rows}"


def set_properties(properties: str) -> str:
    return f"ALTER TABLE $table SET TBLPROPERTIES ({properties})"


# Steps that SQL cannot say -----------------------------------------------------


def write(rows: str, mode: str, *, partition_by: tuple[str, ...] = (), **options: str) -> Step:
    def append_or_overwrite(spark: SparkSession, path: Path) -> None:
        writer = spark.sql(rows).write.format("delta").mode(mode).options(**options)
        (writer.partitionBy(*partition_by) if partition_by else writer).save(str(path))

    return append_or_overwrite


def create_with_builder(make: Callable[[Any], Any]) -> Step:
    """A table whose columns only Delta's own builder can declare."""

    def create_table(spark: SparkSession, path: Path) -> None:
        from delta.tables import DeltaTable

        make(DeltaTable.create(spark).location(str(path))).execute()

    return create_table


def age_the_log(spark: SparkSession, path: Path) -> None:
    """All that is in the log seems to be months old, each commit a minute younger than the one before."""
    for file in (path / "_delta_log").rglob("*"):
        if file.is_file():
            number = re.match(r"\.?0*(\d+)\.", file.name)
            moment = time.time() - 100 * 86_400 + 60 * int(number[1] if number else 0)
            os.utime(file, (moment, moment))


def shuffle_the_ages(spark: SparkSession, path: Path) -> None:
    """The log's files say that the last commit was the first, as after a copy of the folder."""
    for file in (path / "_delta_log").glob("*.json"):
        moment = time.time() - 3600 * int(file.stem)
        os.utime(file, (moment, moment))


def parquet_with_odd_names(spark: SparkSession, path: Path) -> None:
    """A folder of Parquet files of other makers, whose names nobody chose well."""
    for number, name in enumerate(("with space", "50%", "a%20b", "žluť 🐟", "a+b&c=d", "semi;colon#hash")):
        folder = path / f"p={number % 2}"
        spark.sql(numbers(number * 10, number * 10 + 5)).coalesce(1).write.parquet(str(path / "_aside" / str(number)))
        folder.mkdir(exist_ok=True)
        (file,) = (path / "_aside" / str(number)).glob("*.parquet")
        file.rename(folder / f"{name}.parquet")


def identity() -> Any:
    from delta.tables import IdentityGenerator

    return IdentityGenerator(start=100, step=-3)
