"""The version of a Delta table that a DataFrame reads, if it is columns and filters of one: known in any process."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from converter.sources.spark.confs import users_confs
from converter.sources.spark.identity import skips_files
from converter.sources.spark.session import defaults_of_java, java_frame, listed, or_doubt
from converter.storage.urls import shown_url

_PLAIN = {
    "Alias", "AttributeReference", "Literal", "Cast", "And", "Or", "Not", "In", "IsNull", "IsNotNull", "EqualTo",
    "EqualNullSafe", "LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "GetStructField", "StartsWith",
    "EndsWith", "Contains",
}  # fmt: skip
"""Expressions that a key which outlives the session may depend on: their SQL text says all, whatever the confs were.

So there is nothing that computes (the text does not show ANSI mode, which is fixed when a frame is made), no time (its
text depends on the session's zone), and no cast except of a number to a wider one (the text of others is incomplete).
"""

_PLAIN_LITERALS = re.compile(r"boolean|tinyint|smallint|int|bigint|float|double|string|date|decimal\(.*\)")
_WIDENED = ("tinyint", "smallint", "int", "bigint", "float", "double")

_MAX_EXPRESSIONS = 2000


@dataclass(frozen=True, slots=True)
class DeltaVersion:
    """Columns and filters of a version of a Delta table."""

    identity: str
    source: str
    """The table and its version, for people; without secrets of the URL."""

    is_fixed: bool
    """Whether the DataFrame names the version (`versionAsOf`, `timestampAsOf`) instead of reading the newest one."""


@or_doubt("which version of a Delta table the DataFrame reads")
def find_delta_version(df: Any) -> DeltaVersion | None:
    """The version that a DataFrame reads, if it is only columns and filters of one Delta table; in doubt None.

    Reaches into: Catalyst's plans, Delta's TahoeLogFileIndex, DeltaLog.unsafeVolatileSnapshot (Spark 4.2, Delta 4.4).
    Without it: None, so frames of Delta tables without a cache_key are written afresh.
    """
    session = df.sparkSession
    # Connect shows no plan, which is a doubt.
    execution = java_frame(df.select("*")).queryExecution()
    if skips_files(session):
        return None
    plan, above = execution.analyzed(), []
    while (kind := plan.getClass().getSimpleName()) in ("Project", "Filter", "SubqueryAlias"):
        above.append((kind, plan))
        plan = plan.child()
    if kind != "LogicalRelation":
        return None
    location = plan.relation().location()
    # Where a file is cut into blocks depends on the cluster.
    if (
        not location.getClass().getName().endswith(".files.TahoeLogFileIndex")
        or "_metadata" in plan.output().mkString()
    ):
        return None
    steps = []
    for kind, step in above:
        # `SELECT *` is a step that changes nothing.
        output, input_ids = listed(step.output()), [column.exprId().id() for column in listed(step.child().output())]
        if kind == "Filter" or [column.exprId().id() for column in output] != input_ids:
            sql = _plain_sql([step.condition()] if kind == "Filter" else listed(step.projectList()))
            names = [column.name().lower() for column in output]
            if sql is None or len(set(names)) != len(names):
                return None
            steps.append([kind, *sql])
    (leaf,) = listed(execution.optimizedPlan().collectLeaves())
    # The version that will be read; a frame without a version reads the newest. Rows of df.cache() have no location.
    version = int(leaf.relation().location().version())
    table_id = location.snapshotAtAnalysis().metadata().id()
    is_fixed = bool(location.versionToUse().isDefined())
    newest = location.deltaLog().unsafeVolatileSnapshot()
    snapshot = location.snapshotAtAnalysis() if is_fixed else newest
    # Another table may have been created in the same folder.
    if table_id != newest.metadata().id() or snapshot.version() != version or location.partitionFilters().size():
        return None
    confs = [
        pair
        for pair in sorted(users_confs(session).items())
        if pair[0].startswith("spark.sql.") and "warehouse" not in pair[0]
    ]
    zone = session.conf.get("spark.sql.session.timeZone")
    path = location.path().toString()
    # The timestamp, because a restored copy with commits of its own has the same table id and version.
    described = ["delta", path, table_id, version, snapshot.timestamp(), session.version, zone, confs, steps]
    java_zone, _ = defaults_of_java(session)
    if java_zone != zone:
        # By it Spark reads times before 1900 that were written without its own version.
        described.append(java_zone)
    source = f"version {version} of the Delta table {shown_url(path)}"
    return DeltaVersion(identity=json.dumps(described), source=source, is_fixed=is_fixed)


def _plain_sql(expressions: list[Any]) -> list[Any] | None:
    """Expressions as SQL, and their parts; None if that is incomplete or may mean something else another time.

    A column of a table called `t` is written as is a member of a column `t`.
    """
    waiting, parts = list(expressions), list[Any]()
    while waiting:
        expression = waiting.pop()
        kind, type_name = expression.getClass().getSimpleName(), expression.dataType().simpleString()
        parts.append(["column", expression.name()] if kind == "AttributeReference" else kind)
        if len(parts) > _MAX_EXPRESSIONS or kind not in _PLAIN:
            return None
        if kind == "Literal" and not _PLAIN_LITERALS.fullmatch(type_name):
            return None
        if kind == "Cast" and not _is_widened(expression.child().dataType().simpleString(), type_name):
            return None
        waiting += listed(expression.children())
    return [[expression.sql() for expression in expressions], parts]


def _is_widened(before: str, after: str) -> bool:
    return before in _WIDENED and after in _WIDENED and _WIDENED.index(before) < _WIDENED.index(after)
