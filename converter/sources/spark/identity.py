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
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from converter.sources.spark.confs import changed_confs, users_confs
from converter.sources.spark.session import (
    after_interrupt,
    count_local_lists,
    ends_all,
    explain,
    is_spark_away,
    java_frame,
    listed,
    or_doubt,
)

logger = logging.getLogger(__name__)

_FORMAT = 1

_WHOLE_PLANS = {"spark.sql.debug.maxToStringFields": "100000", "spark.sql.maxMetadataStringLength": "1000000"}
"""Confs with which Spark prints plans whole."""

RACY_SECONDS = 2.0
"""A file that was changed less than this before it was looked at may change again unseen: stores keep whole seconds."""

_FILE_STATUS = re.compile(r"^\w+\{path=(.*?); isDirectory=false; length=(\d+);", re.MULTILINE)

_LEAVES = re.compile(
    r"(Scan (parquet|orc|csv|json|text)\b.*|LocalTableScan|Range|Scan OneRowRelation|Scan ExistingRDD)"
)
_EXISTING_RDD = "Scan ExistingRDD"
_INNER = re.compile(
    r"(Project|Filter|ColumnarToRow|WholeStageCodegen|HashAggregate|ObjectHashAggregate|SortAggregate|Sort|Union"
    r"|Exchange|BroadcastExchange|ShuffleQueryStage|BroadcastQueryStage|AQEShuffleRead|AdaptiveSparkPlan"
    r"|BroadcastHashJoin|SortMergeJoin|ShuffledHashJoin|Expand|Generate|Coalesce|EmptyRelation|ResultQueryStage|Window)\b.*"
)
_IN_PLAN = frozenset({"EmptyRelation", "LocalRelation", "LogicalRDD", "OneRowRelation", "Range"})
"""Leaves of analyzed plans that read no files; an RDD may, so local lists are counted."""

_UNSTABLE = re.compile(
    r"\b(rand|randn|random|randstr|uniform|uuid|shuffle|sample|monotonically_increasing_id|spark_partition_id"
    r"|input_file_\w+|current_\w+|now|localtimestamp|unix_timestamp|first|last|first_value|last_value|any_value"
    r"|collect_\w+|listagg|string_agg|mode|max_by|min_by|java_method|reflect|try_reflect|read_files)\(",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What must be equal for two conversions to have the same rows."""

    plan: str
    semantic_hash: int
    """Spark's hash of the plan: it covers what the text hides, e.g. rows of a local frame and read options."""

    confs: tuple[tuple[str, str], ...]
    inputs: tuple[tuple[str, int, int, int], ...]
    """(path, size, modification time, change time) of every input file; times in nanoseconds."""

    paths: tuple[str, ...]
    """The URLs of the files that are read, as Spark tells them; characters that a URL lacks are encoded."""

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
def settled(df: Any) -> Iterator[tuple[Any, bool]]:
    """The frame with names and files looked up once, as a classic one has them, and whether that could be.

    Spark Connect looks up in each job anew what a name of a view or a table stands for, and which files a folder has,
    but keeps the schema that a frame was asked for first. A temporary view keeps the plan.
    """
    if java_frame(df) is not None:
        # A Ctrl-C of the call before may have broken the connection.
        after_interrupt(lambda: df.sparkSession.conf.get("spark.app.id", None))
        yield df, True
        return
    name, session = f"converter_{uuid.uuid4().hex}", df.sparkSession
    # At least its schema is that of now.
    frame, is_settled, is_there = df.select("*"), False, True
    try:
        try:
            df.createTempView(name)
            frame, is_settled = session.table(name), True
        except Exception as error:
            if ends_all(error):
                raise
            # Doubt is never an error.
            logger.debug("Could not settle what the DataFrame's names stand for: %s", error)
            is_there = not is_spark_away(error)
        yield frame, is_settled
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
    """What the rows of `df` depend on now; None if that cannot be told."""
    session = df.sparkSession
    # A fresh frame: an old one keeps its plan with the time it was made, and on Connect its answers.
    fresh = df.select("*")
    with changed_confs(session, _WHOLE_PLANS):
        extended = explain(fresh, "extended")
        formatted = explain(fresh, "formatted")
    _, header, optimized = extended.partition("== Optimized Logical Plan ==")
    optimized = optimized.partition("== Physical Plan ==")[0]
    nodes = re.findall(r"^\(\d+\) (.+?)(?: \[codegen id.*\])?\s*$", formatted, re.MULTILINE)
    if not header or not nodes or _UNSTABLE.search(optimized) or "more fields" in extended:
        return None
    if not _reads_listed_files_alone(fresh, extended):
        return None
    if "subquery" in optimized.lower():
        # Its inputs are not among `inputFiles`.
        return None
    leaves = [node for node in nodes if _LEAVES.fullmatch(node)]
    if not leaves or not all(_LEAVES.fullmatch(node) or _INNER.fullmatch(node) for node in nodes):
        return None
    if leaves.count(_EXISTING_RDD) and leaves.count(_EXISTING_RDD) != count_local_lists(fresh):
        return None
    scans = [leaf for leaf in leaves if leaf.startswith("Scan ") and leaf not in (_EXISTING_RDD, "Scan OneRowRelation")]
    locations = re.findall(r"^Location: (\w+)", formatted, re.MULTILINE)
    if len(locations) != len(scans) or set(locations) - {"InMemoryFileIndex"}:
        return None
    paths = sorted(set(fresh.inputFiles())) if scans else []
    if bool(scans) != bool(paths):
        return None
    inputs = _look_at(paths, session)
    newest = max((modified for _, _, modified, _ in inputs), default=0)
    return Evidence(
        plan=_renumbered(optimized) + "\n" + df.schema.json(),
        semantic_hash=int(fresh.semanticHash()),
        confs=_confs_of(session),
        inputs=inputs,
        paths=tuple(paths),
        is_racy=time.time() - newest / 1e9 < RACY_SECONDS,
        is_listed=not paths or _is_listed(fresh, inputs),
    )


def _reads_listed_files_alone(df: Any, extended: str) -> bool:
    """Whether each file that a frame reads is one that its physical plan scans, as far as Spark knows.

    Delta answers questions for a count or a maximum from its log, which leaves a list of values of the table.

    Reaches into: Catalyst's plans, InMemoryFileIndex.rootPaths (Spark 3.5 to 4.3).
    Without it: doubt, so frames without a cache_key are written afresh.
    """
    if java_frame(df) is None:
        # Over Connect no frame that reads files is found again.
        analyzed = extended.partition("== Analyzed Logical Plan ==")[2].partition("== Optimized Logical Plan ==")[0]
        return bool(analyzed) and not re.search("(?<!Local)(?<!OneRow)Relation", analyzed)
    execution = java_frame(df).queryExecution()
    read, scanned = (
        [
            _roots_of(leaf)
            # What subqueries read is not among the leaves, until a join takes their place.
            for part in [plan, *listed(plan.subqueriesAll())]
            for leaf in listed(part.collectLeaves())
            if leaf.getClass().getSimpleName() not in _IN_PLAN
        ]
        for plan in (execution.withCachedData(), execution.optimizedPlan())
    )
    if None in read:
        return False
    # Partitions of a table in a catalog may be scanned instead of its folder.
    roots = {path for paths in scanned if paths is not None for path in paths}
    missing = {path for paths in read for path in paths or ()} - roots
    return all(any(root.startswith(f"{path.rstrip('/')}/") for root in roots) for path in missing)


def _roots_of(leaf: Any) -> list[str] | None:
    """The folders and files of a leaf of a plan; None if it is of another kind than files that Spark has listed."""
    if leaf.getClass().getSimpleName() != "LogicalRelation":
        return None
    location = leaf.relation().location()
    is_listed = location.getClass().getSimpleName() in ("CatalogFileIndex", "InMemoryFileIndex")
    return str(location.rootPaths().mkString("\n")).splitlines() if is_listed else None


def _is_listed(df: Any, inputs: Sequence[tuple[str, int, int, int]]) -> bool:
    """Whether files are as long as Spark noted them when the frame was made: it reads each to that length.

    Files change in place: a log grows, a table is written anew under the same names. Over Connect no length is told.

    Reaches into: Catalyst's plans, InMemoryFileIndex.allFiles (Spark 3.5 to 4.3).
    Without it: doubt, so frames without a cache_key are written afresh.
    """
    frame = java_frame(df)
    if frame is None:
        return False
    lengths: dict[str, set[int]] = {}
    for leaf in listed(frame.queryExecution().optimizedPlan().collectLeaves()):
        if leaf.getClass().getSimpleName() != "LogicalRelation":
            continue
        location = leaf.relation().location()
        if location.getClass().getSimpleName() == "InMemoryFileIndex":
            # As text, in one call; two relations may know one file from different times.
            for path, num_bytes in _FILE_STATUS.findall(location.allFiles().mkString("\n")):
                lengths.setdefault(_plain(path), set()).add(int(num_bytes))
    return lengths == {_plain(unquote(path)): {num_bytes} for path, num_bytes, _, _ in inputs}


@or_doubt("what the DataFrame reads")
def inputs_of(df: Any) -> tuple[Any, ...] | None:
    """The files and the versions of Delta tables that a frame reads now; None if there may be more, or over Connect.

    This is less than `Evidence`: nothing is said of what the frame makes of them.

    Reaches into: Catalyst's plans, InMemoryFileIndex, Delta's TahoeFileIndex (Spark 4.2, Delta 4.4).
    Without it: None, so Petastorm's frames that no evidence is known of are written afresh.
    """
    fresh = df.select("*")
    execution = java_frame(fresh).queryExecution()
    # Makes Delta look for the newest version. The plan from before it names all tables; some are lists of values here.
    optimized = execution.optimizedPlan()
    plan = execution.withCachedData()
    if plan.subqueriesAll().size():
        # Their inputs are not among the leaves.
        return None
    paths, versions = set[str](), []
    for leaf in listed(plan.collectLeaves()):
        if leaf.getClass().getSimpleName() in _IN_PLAN:
            continue
        # Rows that are cached have no location.
        location = leaf.relation().location()
        if location.getClass().getSimpleName() == "InMemoryFileIndex":
            paths.update(location.inputFiles())
        else:
            now = location.getSnapshot()
            versions.append((location.path().toString(), now.metadata().id(), now.version(), now.timestamp()))
    num_rdds = sum(leaf.nodeName() == "LogicalRDD" for leaf in listed(optimized.collectLeaves()))
    if num_rdds and num_rdds != count_local_lists(fresh):
        # Any other RDD may read whatever it likes.
        return None
    inputs = _look_at(sorted(paths), df.sparkSession)
    return (inputs, tuple(versions)) if not paths or _is_listed(fresh, inputs) else None


def _plain(path: str) -> str:
    return re.sub("^file:/+", "/", path)


def _confs_of(session: Any) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(users_confs(session).items()))


def _look_at(paths: list[str], session: Any) -> tuple[tuple[str, int, int, int], ...]:
    seen, is_connect = [], type(session).__module__.startswith("pyspark.sql.connect")
    if all(urlsplit(path).scheme == "file" for path in paths):
        for path in paths:
            # The files of a Connect server are this machine's only perhaps.
            with contextlib.suppress(FileNotFoundError) if is_connect else contextlib.nullcontext():
                stat = os.stat(unquote(urlsplit(path).path))
                seen.append((path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        if not is_connect:
            return tuple(seen)
    if paths:
        files = session.read.format("binaryFile").load([unquote(path) for path in paths])
        listing = files.select("path", "length", "modificationTime").collect()
        seen += sorted((row[0], int(row[1]), int(row[2].timestamp() * 1e9), 0) for row in listing)
    return tuple(seen)


def _renumbered(plan: str) -> str:
    """The plan with Spark's running expression numbers replaced by their order of appearance."""
    seen: dict[str, str] = {}
    text = re.sub(r"#\d+", lambda match: seen.setdefault(match[0], f"#{len(seen)}"), plan)
    return re.sub(r",? ?\[?plan_id=\d+\]?", "", text)


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
        session = df.sparkSession
        inputs = _look_at(list(evidence.paths), session)
        return inputs == evidence.inputs and _confs_of(session) == evidence.confs
    except Exception as error:
        if ends_all(error):
            raise
        # Doubt is never an error.
        logger.debug("Could not tell whether the DataFrame's inputs changed: %s", error)
        return False


def recall(bucket: str, df: Any, evidence: Evidence | None) -> list[str]:
    """Keys of entries of this process that provably hold the rows of `df`, the newest first."""
    if evidence is None or not evidence.is_listed:
        return []
    keys = []
    for proof in reversed(_proofs.get(bucket, [])):
        with contextlib.suppress(Exception):
            # Equal text does not show all: a literal's type, a local frame's rows, options of a reader.
            if proof.evidence == evidence and proof.frame.sameSemantics(df):
                keys.append(proof.key)
    return keys


def forget(key: str) -> None:
    """Drop the proofs of an entry that was deleted."""
    for proofs in _proofs.values():
        proofs[:] = [proof for proof in proofs if proof.key != key]
