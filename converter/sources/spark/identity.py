"""Proofs that two DataFrames have the same rows: keys and plans; `write` decides by them, and by `delta_version`.

The proof is one of three: the same `cache_key`; the same columns and filters of the
same version of a Delta table; or, in one process, the same plan, session confs and
input files as when the entry was written, with nothing in the plan that may give
other rows the second time. Any doubt writes afresh; doubt is never an error.

Why not Spark's own `semanticHash`: it differs from process to process for Parquet,
forgets column names, and never looks at the files (all tried, Spark 3.5 to 4.3).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from converter.sources.spark.confs import users_confs
from converter.sources.spark.input_files import IN_PLAN, Inputs, Listing, are_listed, listings_of, look_at
from converter.sources.spark.session import (
    after_interrupt,
    count_local_lists,
    defaults_of_java,
    ends_all,
    is_spark_away,
    java_frame,
    listed,
    or_doubt,
)

logger = logging.getLogger(__name__)

_FORMAT = 1

RACY_SECONDS = 2.0
"""A file that was changed less than this before it was looked at may change again unseen: stores keep whole seconds."""

_NODES = IN_PLAN | {
    "Aggregate", "Expand", "Filter", "Generate", "Join", "LogicalRelation", "Project", "RebalancePartitions",
    "Repartition", "RepartitionByExpression", "Sort", "Union", "Window",
}  # fmt: skip
"""Steps of an optimized plan that give the same rows whenever they run."""

_AGGREGATES = frozenset({
    "AggregateExpression", "Average", "BitAndAgg", "BitOrAgg", "BitXorAgg", "Complete$", "Corr", "Count",
    "CovPopulation", "CovSample", "HyperLogLogPlusPlus", "Kurtosis", "Max", "Min", "Skewness", "StddevPop",
    "StddevSamp", "Sum", "VariancePop", "VarianceSamp",
})  # fmt: skip
"""Those for which it does not matter in which order rows arrive."""

_OWN_CODE = re.compile("UDF|UDAF|UDTF|UserDefined|Reflection|ApplyFunction")
"""Expressions that run code which is not Spark's own."""

_OF_NOW = re.compile("^(Now|LocalTimestamp.*|Current(?!Row).*|VariableReference|AesEncrypt)$")
"""Expressions that ask for the time, for what the session is set to, or for a random number without saying so."""

_MOMENTS = re.compile(r'"value":"(\s|\\[a-z]|\\u00[01].)*(now|today|tomorrow|yesterday)\b', re.IGNORECASE)
"""Texts that mean a time of now if they are cast to one, in JSON."""

_HIDDEN = '"projections":null'
"""What a plan's JSON says of an Expand with expressions that it leaves out."""

_OTHER_CONFS = ("converter.", "petastorm.", "spark.databricks.delta.lastCommit")
"""What begins the names of confs that say where entries lie or what Delta committed last, not how files are read."""

_SKIPPING = ("spark.sql.files.ignoreCorruptFiles", "spark.sql.files.ignoreMissingFiles")
"""Confs that let a job leave out rows because a store does not answer."""

_INNER_PLANS = re.compile("Subquery|^Exists|ListQuery|DynamicPruning")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What must be equal for two conversions to have the same rows."""

    plan: str
    """A digest of the optimized plan, its values, what it lists of files, and its schema."""

    semantic_hash: int
    """Spark's hash of the analyzed plan: it covers what the optimized one hides, e.g. the rows of a local frame."""

    confs: tuple[tuple[str, str], ...]
    inputs: Inputs

    paths: tuple[str, ...]
    """The URLs of the files that are read, as Spark tells them; characters that a URL lacks are encoded."""

    roots: tuple[str, ...]
    """What the user named: folders, or files."""

    is_racy: bool
    """Whether a file was changed so recently that it may change again unseen."""

    is_listed: bool
    """Whether the files are surely as long as the frame takes them to be."""


def entry_key(identity: str | None, *, schema: str, write_options: Mapping[str, Any]) -> str:
    """The folder's name: a half for the identity (None: a unique one), a half for schema and options.

    `write_options` are those of `WriteOptions.for_key`.

    >>> narrow = entry_key("train-2026", schema="{}", write_options={"float_dtype": "float32"})
    >>> wide = entry_key("train-2026", schema="{}", write_options={"float_dtype": "float64"})
    >>> narrow.split("-")[0] == wide.split("-")[0], narrow == wide
    (True, False)
    """
    owner = uuid.uuid4().hex if identity is None else f"{_FORMAT}:{identity}"
    rest = json.dumps([schema, dict(write_options)], sort_keys=True)
    return "-".join(hashlib.sha256(text.encode()).hexdigest()[:16] for text in (owner, rest))


def named(cache_key: str) -> str:
    """The identity of rows that the user gave a `cache_key`."""
    return f"key:{cache_key}"


def hash_of_name(cache_key: str) -> str:
    """What the folders of all entries of a `cache_key` begin with.

    >>> entry_key(named("train-2026"), schema="{}", write_options={}).startswith(hash_of_name("train-2026"))
    True
    """
    return entry_key(named(cache_key), schema="", write_options={}).partition("-")[0]


@contextlib.contextmanager
def settled(df: Any) -> Iterator[Any]:
    """The frame with names and files looked up once, as a classic one has them; as it is if that cannot be.

    Spark Connect looks up in each job anew what a name of a view or a table stands for, and which files a folder has,
    but keeps the schema that a frame was asked for first. A temporary view keeps the plan.
    """
    if java_frame(df) is not None:
        # A Ctrl-C of the call before may have broken the connection.
        after_interrupt(lambda: df.sparkSession.conf.get("spark.app.id", None))
        yield df
        return
    name, session = f"converter_{uuid.uuid4().hex}", df.sparkSession
    # At least its schema is that of now.
    frame, is_there = df.select("*"), True
    try:
        try:
            df.createTempView(name)
            frame = session.table(name)
        except Exception as error:
            if ends_all(error):
                raise
            # Doubt is never an error.
            logger.debug("Could not settle what the DataFrame's names stand for: %s", error)
            is_there = not is_spark_away(error)
        yield frame
    except Exception as error:
        # What fails has been told by an error of this package by now.
        is_there = not is_spark_away(error) and not is_spark_away(error.__cause__ or error)
        raise
    finally:
        # Also the view that an interrupt kept from being used.
        if is_there:
            try:
                session.catalog.dropTempView(name)
            except Exception as error:
                if ends_all(error):
                    raise
                logger.debug("Could not drop the view %s: %s", name, error)


@or_doubt("what the DataFrame depends on")
def gather_evidence(df: Any) -> Evidence | None:
    """What the rows of `df` depend on now; None if that cannot be told, and over Connect, which shows no plan.

    Reaches into: Catalyst's plans, TreeNode.toJSON, QueryPlan.deterministic (Spark 3.5 to 4.3).
    Without it: doubt, so frames without a cache_key are written afresh.
    """
    if java_frame(df) is None or skips_files(df.sparkSession):
        return None
    # A fresh frame: an old one keeps its plan with the time it was made.
    fresh = df.select("*")
    execution = java_frame(fresh).queryExecution()
    optimized, before = execution.optimizedPlan(), execution.withCachedData()
    parts = [before, *listed(before.subqueriesAll())]
    # Before it optimizes, Spark knows all that it reads. Some is no step of the plan afterwards: Delta answers a
    # question for a count or a maximum from its log, Spark one for partitions from their names.
    listings = [listing for part in parts for listing in listings_of(part, fresh)]
    # As JSON, which is whole whatever the session's confs say, and names the class of each step and expression.
    plan, plan_before = str(optimized.toJSON()), "".join(str(part.toJSON()) for part in parts)
    if not all(map(_is_stable, _classes_in(plan))) or not all(part.deterministic() for part in parts):
        return None
    # What is computed from values alone is no step of the optimized plan either.
    if _asks_for_now(plan_before) or any(map(_OWN_CODE.search, _classes_in(plan_before))):
        return None
    if _HIDDEN in plan or _HIDDEN in plan_before:
        return None
    num_rdds = sum(leaf.nodeName() == "LogicalRDD" for leaf in listed(optimized.collectLeaves()))
    if num_rdds and num_rdds != count_local_lists(fresh):
        return None
    paths = sorted(set(fresh.inputFiles())) if listings else []
    if bool(listings) != bool(paths):
        return None
    roots = sorted({root for listing in listings for root in listing.roots})
    inputs = look_at(paths, roots, df.sparkSession)
    newest = max((modified for _, _, modified, _ in inputs.files), default=0)
    return Evidence(
        plan=_digest(_renumbered(plan), *_values_of(optimized), *map(repr, listings), df.schema.json()),
        semantic_hash=int(fresh.semanticHash()),
        confs=_confs_of(fresh),
        inputs=inputs,
        paths=tuple(paths),
        roots=tuple(roots),
        is_racy=time.time() - newest / 1e9 < RACY_SECONDS,
        is_listed=are_listed(inputs, listings),
    )


def skips_files(session: Any) -> bool:
    """Whether what a store does not answer, or not whole, is left out without an error."""
    return any(session.conf.get(name, "false") != "false" for name in _SKIPPING)


def _classes_in(plan: str) -> set[str]:
    """The classes of the steps and expressions of a plan's JSON. Those of types are written alike, without children."""
    return set(re.findall('"class":"([^"]+)","num-children"', plan))


def _asks_for_now(plan: str) -> bool:
    """Whether a plan's JSON has an expression whose value is of the moment in which Spark runs it."""
    names = (class_name.rpartition(".")[2] for class_name in _classes_in(plan))
    return _MOMENTS.search(plan) is not None or any(map(_OF_NOW.search, names))


def _is_stable(class_name: str) -> bool:
    """Whether a step of a plan or an expression, by the name of its class, is one of Spark's that always give the same.

    >>> catalyst = "org.apache.spark.sql.catalyst"
    >>> _is_stable(f"{catalyst}.plans.logical.Project"), _is_stable(f"{catalyst}.expressions.Add")
    (True, True)
    >>> _is_stable(f"{catalyst}.expressions.ScalaUDF"), _is_stable(f"{catalyst}.expressions.aggregate.First")
    (False, False)
    """
    package, _, name = class_name.rpartition(".")
    if package == "org.apache.spark.sql.catalyst.expressions":
        return not any(kind.search(name) for kind in (_OWN_CODE, _OF_NOW, _INNER_PLANS))
    if package == "org.apache.spark.sql.catalyst.expressions.aggregate":
        return name in _AGGREGATES
    return name in _NODES and package.startswith("org.apache.spark.sql.")


def _values_of(plan: Any) -> list[str]:
    """A hash for each leaf of a plan that is a list of values: its JSON leaves them out."""
    leaves = listed(plan.collectLeaves())
    return [str(leaf.data().hashCode()) for leaf in leaves if leaf.getClass().getSimpleName() == "LocalRelation"]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


@or_doubt("what the DataFrame reads")
def inputs_of(df: Any) -> tuple[Any, ...] | None:
    """The files and the versions of Delta tables that a frame reads now; None if there may be more, or over Connect.

    This is less than `Evidence`: nothing is said of what the frame makes of them.

    Reaches into: Catalyst's plans, InMemoryFileIndex, Delta's TahoeFileIndex (Spark 4.2, Delta 4.4).
    Without it: None, so Petastorm's frames that no evidence is known of are written afresh.
    """
    if skips_files(df.sparkSession):
        return None
    fresh = df.select("*")
    execution = java_frame(fresh).queryExecution()
    # Makes Delta look for the newest version. The plan from before it names all tables; some are lists of values here.
    optimized = execution.optimizedPlan()
    plan = execution.withCachedData()
    plan_before = str(plan.toJSON())
    if plan.subqueriesAll().size() or _asks_for_now(plan_before) or _HIDDEN in plan_before:
        # The inputs of subqueries are not among the leaves.
        return None
    paths, listings, versions = set[str](), list[Listing](), []
    for leaf in listed(plan.collectLeaves()):
        if leaf.getClass().getSimpleName() in IN_PLAN:
            continue
        # Rows that are cached have no location.
        location = leaf.relation().location()
        if location.getClass().getSimpleName() == "InMemoryFileIndex":
            listings += listings_of(leaf, fresh)
            paths.update(location.inputFiles())
        else:
            now = location.getSnapshot()
            versions.append((location.path().toString(), now.metadata().id(), now.version(), now.timestamp()))
    num_rdds = sum(leaf.nodeName() == "LogicalRDD" for leaf in listed(optimized.collectLeaves()))
    if num_rdds and num_rdds != count_local_lists(fresh):
        # Any other RDD may read whatever it likes.
        return None
    inputs = look_at(sorted(paths), {root for listing in listings for root in listing.roots}, df.sparkSession)
    found = inputs, _confs_of(fresh), tuple(listings), tuple(versions)
    return found if are_listed(inputs, listings) else None


def _confs_of(df: Any) -> tuple[tuple[str, str], ...]:
    """What Spark asks when it runs: confs but those of converters, the JVM's defaults, a digest of Hadoop's confs."""
    confs = {name: value for name, value in users_confs(df.sparkSession).items() if not name.startswith(_OTHER_CONFS)}
    # Spark has that zone unless the session has another one, readers of ORC in any case; `upper` asks for the language.
    confs["JVM"] = " ".join(defaults_of_java(df.sparkSession))
    hadoop = java_frame(df).sparkSession().sparkContext().hadoopConfiguration().getPropsWithPrefix("")
    return (*sorted(confs.items()), ("Hadoop", _digest(*sorted(hadoop.toString().split(", ")))))


def _renumbered(plan: str) -> str:
    """A plan's JSON with Spark's running numbers replaced by their order of appearance, and without names of tables.

    >>> _renumbered('[{"name":"x","exprId":{"id":42,"jvmId":"J"},"qualifier":"[t]"}]')
    '[{"name":"x","exprId":{"id":0,"jvmId":"J"}}]'
    """
    seen: dict[str, int] = {}
    text = re.sub(r'"id":(\d+),"jvmId"', lambda match: f'"id":{seen.setdefault(match[1], len(seen))},"jvmId"', plan)
    # `{one}` of `spark.sql` has another name each time.
    return re.sub(r',"qualifier":(\[\]|"(?:[^"\\]|\\.)*")', "", text)


@dataclass(frozen=True, slots=True)
class _Proof:
    """A frame whose rows an entry of this process holds."""

    frame: Any
    evidence: Evidence
    key: str


_MAX_PROOFS = 64
"""For each bucket, because each proof keeps a plan alive; the oldest go."""

_proofs: dict[str, list[_Proof]] = {}


def remember(bucket: str, df: Any, before: Evidence | None, key: str) -> None:
    """Note that the entry `key` holds the rows of `df`, if they provably did not change while they were written."""
    if before is None or before.is_racy or not before.is_listed or not _still_holds(before, df):
        return
    proofs = _proofs.setdefault(bucket, [])
    proofs.append(_Proof(frame=df, evidence=before, key=key))
    del proofs[:-_MAX_PROOFS]


def _still_holds(evidence: Evidence, df: Any) -> bool:
    """Whether inputs and confs are as they were; the plan of a frame that is `settled` cannot change."""
    try:
        inputs = look_at(evidence.paths, evidence.roots, df.sparkSession)
        return inputs == evidence.inputs and _confs_of(df) == evidence.confs
    except Exception as error:
        if ends_all(error):
            raise
        # Doubt is never an error.
        logger.debug("Could not tell whether the DataFrame's inputs changed: %s", error)
        return False


def _has_same_semantics(frame: Any, other: Any) -> bool:
    try:
        return bool(frame.sameSemantics(other))
    except Exception as error:
        if ends_all(error):
            raise
        # Doubt is never an error.
        logger.debug("Could not compare two DataFrames: %s", error)
        return False


def recall(bucket: str, df: Any, evidence: Evidence | None) -> list[str]:
    """Keys of entries of this process that provably hold the rows of `df`, the newest first."""
    if evidence is None or not evidence.is_listed:
        return []
    # An equal plan does not show all: a literal's type, options of a reader.
    return [
        proof.key
        for proof in reversed(_proofs.get(bucket, []))
        if proof.evidence == evidence and _has_same_semantics(proof.frame, df)
    ]


def forget(key: str) -> None:
    """Drop the proofs of an entry that was deleted."""
    for proofs in list(_proofs.values()):
        proofs[:] = [proof for proof in proofs if proof.key != key]
