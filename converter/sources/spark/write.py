"""A Spark DataFrame becomes a manifest: its executors write the cache, the driver commits it.

Works on classic Spark and on Spark Connect, because it uses `mapInArrow`, which
both have, and nothing of the JVM. One pass over the data: no counting job, no
sampling job, no `df.cache()`.

The executors need pyarrow and numpy, not this package: the write function
travels by value. Columns travel under names of ours (`c0`, `c1`, …), because
`mapInArrow` refuses names with dots (tried on Spark 4.2), and keep their true
names in the files.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import getpass
import hashlib
import json
import logging
import math
import os
import posixpath
import socket
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from converter.cache import entries
from converter.errors import (
    CacheCorruptError,
    CacheError,
    ConverterError,
    NullValueError,
    SourceError,
    UnsupportedTypeError,
)
from converter.manifest import MAX_END_BYTES, FileEnd, Manifest, Origin, fingerprint_of
from converter.portable import moments, tasks
from converter.schema import DeclaredShape, Field, Schema
from converter.sources.spark import identity
from converter.sources.spark.schema import SparkColumn, plan_columns
from converter.sources.spark.session import (
    changed_confs,
    check_progress,
    collect_reports,
    count_scan_partitions,
    finding_in,
    has_adaptive_plan,
    progress_bar,
    short_cause,
    stream_reports,
    travels_by_value,
    write_job,
)
from converter.sources.spark.with_spark import WRITE_CONFS, write_with_spark
from converter.statistics import ColumnStatistics
from converter.storage.directory import Storage, StorageOptions

logger = logging.getLogger(__name__)

FILE_BYTES = 512 << 20
"""A data file is closed once it is this large, so that a huge partition makes several files."""

DEFAULT_ROW_GROUP_BYTES = 8 << 20
"""Small enough that a window of some 48 MB mixes several places of the dataset, large enough that
decoding, not opening, is what costs: a guess, to be replaced by a measurement."""

_BATCH_BYTES = 4 << 20
_MAX_BATCH_BYTES = 64 << 20
_MAX_UNFOLDED_MOMENTS = 64

_SCAN_CONFS = ("spark.sql.parquet.columnarReaderBatchSize", "spark.sql.orc.columnarReaderBatchSize")
_SCAN_ROWS = 64
"""How many rows Spark's readers decode at once where rows may be wide. Of 4,096 rows of 10 kB each array is 40 MB, made
anew and cleared, and the JVM collects garbage all the time: 20,000 such rows to HDFS take 1.7, 1.31, 1.29 and 1.24 s at
4,096, 1,024, 256 and 64. Of short texts it makes no difference (2.2, 2.35, 2.39, 2.04 s); 41 numbers want 4,096."""

LEAST_PYARROW = 13
"""The oldest pyarrow that executors may have: it is the first that can write page checksums."""

Writer = Literal["executors", "spark", "lists"]
WRITERS = ("auto", "executors", "spark")
COMPRESSIONS = ("auto", "none", "lz4", "zstd", "snappy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A committed entry that this process uses."""

    root: Storage
    key: str
    manifest: Manifest
    lease: entries.Lease | None
    """None where the entry was found, and none can be written there."""


def write_dataframe(
    df: Any,
    *,
    cache_dir: str | None,
    cache_key: str | None,
    float_dtype: str | None,
    shapes: Mapping[str, DeclaredShape] | None,
    row_group_bytes: int,
    compression: str,
    shuffle_rows_seed: int | None,
    writer: str,
    storage_options: StorageOptions | None,
    timeout_seconds: float,
    is_kept: bool,
    progress: bool | None,
) -> Entry:
    """The entry of `df`: one that provably holds its rows, else a new one, written once."""
    _check_dataframe(df)
    check_progress(progress)
    session = df.sparkSession
    is_case_sensitive = session.conf.get("spark.sql.caseSensitive", None) == "true"
    columns = plan_columns(
        df.schema.jsonValue(), float_dtype=float_dtype, shapes=shapes or {}, is_case_sensitive=is_case_sensitive
    )
    is_connect = type(session).__module__.startswith("pyspark.sql.connect")
    chosen = entries.choose_cache_dir(
        cache_dir,
        spark_conf=session.conf.get(entries.SPARK_CONF, None),
        master=session.conf.get("spark.master", None) or "unknown",
        is_connect=is_connect,
    )
    if writer == "spark":
        named = entries.open_parent(chosen, storage_options, timeout_seconds)
        other = _find_other_user(named, session)
        if other is not None:
            raise ValueError(
                f"writer='spark' writes to {named.url} as {other!r}, the user of Spark's JVM, where cache_dir or "
                f"storage_options name {named.user!r}. Say writer='executors', who are handed that name, or let the "
                f"environment say HADOOP_USER_NAME={named.user} before Spark starts."
            )
    root = entries.open_root(chosen, storage_options, timeout_seconds)
    write_options = {
        "float_dtype": float_dtype,
        "shapes": {name: list(shape or ()) for name, shape in (shapes or {}).items()},
        "row_group_bytes": row_group_bytes,
        "compression": compression,
        "shuffle_rows_seed": shuffle_rows_seed,
        "writer": writer,
    }

    def find_or_write(pinned: identity.DeltaVersion | None) -> Entry:
        named = None if cache_key is None else identity.named(cache_key)
        if pinned is not None:
            named = pinned.identity
        schema = df.schema.json()
        # What is to be kept is never shared with converters that delete at their end; those may read what is kept.
        kept_key, passing_key = (
            identity.entry_key(named, schema=schema, write_options=write_options | kept)
            for kept in ({"is_kept": True}, {})
        )
        key = kept_key if is_kept else passing_key
        evidence, bucket = None, f"{root.url}/{key.partition('-')[2]}"
        if named is not None:
            candidates = [kept_key] if is_kept else [kept_key, passing_key]
        else:
            evidence = None if is_kept else identity.gather_evidence(df)
            candidates = identity.recall(bucket, df, evidence)
        for candidate in candidates:
            # What is kept is not this converter's to remove, also where it is damaged.
            adopted = _adopt(root, candidate, may_remove=is_kept or candidate != kept_key)
            if adopted is not None:
                kept = " It was written with delete_on_exit=False, so delete() alone removes it."
                logger.info(
                    "Reuse %s: it holds the same rows.%s",
                    root.below(candidate).url,
                    kept if adopted[0].is_kept and not is_kept else "",
                )
                return Entry(root=root, key=candidate, manifest=adopted[0], lease=adopted[1])
        if cache_key is not None:
            _log_other_entries(root, (kept_key, passing_key), cache_key)
        for column in columns:
            if column.narrowed_from:
                logger.info("Column %r: %s becomes %s.", column.name, column.narrowed_from, column.dtype)
        application_id = session.conf.get("spark.app.id", None) or "unknown"
        version = pinned
        if cache_key is not None and (said := identity.find_delta_version(df)) is not None and said.is_fixed:
            version = said
        origin = Origin(
            cache_key=cache_key,
            created=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
            host=socket.gethostname(),
            application_id=application_id,
            user=_own_user(),
            source="DataFrame" if version is None else version.source,
        )
        attempt = entries.begin(root, key, application_id=application_id)
        spec = {
            "directory": root.below(key).path(attempt.data_directory),
            "store": root.store,
            "columns": [column.spec() for column in columns],
            "row_group_bytes": row_group_bytes,
            "file_bytes": FILE_BYTES,
            "compression": "none" if compression == "auto" and root.is_local else compression,
            # On a local disk a footer costs nothing to read.
            "end_bytes": 0 if root.is_local else MAX_END_BYTES,
        }
        directory = root.below(key).below(attempt.data_directory)
        try:
            reports = _run_write(
                df,
                columns,
                spec,
                directory=directory,
                session=session,
                is_connect=is_connect,
                shuffle_rows_seed=shuffle_rows_seed,
                writer=writer,
                progress=progress,
            )
            manifest = _manifest_from(
                reports, columns, directory=attempt.data_directory, is_kept=is_kept, float_dtype=float_dtype
            )
            manifest = replace(manifest, origin=origin)
            if pinned is not None and not pinned.is_fixed and identity.find_delta_version(df) != pinned:
                raise _TableChangedError
            entries.delete_unlisted(root, attempt, manifest)
            manifest, lease = entries.commit(root, attempt, manifest)
        except BaseException:
            # Also on Ctrl-C: what was written has no manifest, and must not stay either.
            try:
                entries.abandon(root, attempt)
            except (CacheError, OSError) as left:
                # What failed first is what the user must hear.
                logger.warning("Left for a later sweep: %s", left)
            raise
        identity.remember(bucket, df, evidence, key)
        return Entry(root=root, key=key, manifest=manifest, lease=lease)

    pinned = None if cache_key is not None else identity.find_delta_version(df)
    try:
        return find_or_write(pinned)
    except _TableChangedError:
        logger.info("The Delta table had a new version while it was written, so it is written once more.")
        return find_or_write(None)


class _TableChangedError(Exception):
    """The rows that were written may be those of two versions."""


def _own_user() -> str:
    """As whom this process runs; empty where the machine has no name for it."""
    with contextlib.suppress(KeyError, OSError, ImportError):
        return getpass.getuser()
    return ""


def _adopt(root: Storage, key: str, *, may_remove: bool = True) -> tuple[Manifest, entries.Lease | None] | None:
    """A committed entry whose files are all there; a damaged one is removed, so that it is written again."""
    left = "" if may_remove else " The damaged entry is kept (delete_on_exit=False) and stays."
    try:
        adopted = entries.adopt(root, key)
    except CacheCorruptError as error:
        logger.warning("Write again what is damaged: %s%s", error, left)
        if may_remove:
            entries.discard(root, key)
        return None
    if adopted is None:
        return None
    if adopted.damage is not None:
        logger.warning("Write again what is damaged: %s%s", adopted.damage, left)
        if may_remove:
            entries.delete(root, key, adopted.manifest, adopted.lease)
        else:
            entries.let_go(root, key, adopted.manifest, adopted.lease)
        return None
    return adopted.manifest, adopted.lease


def _log_other_entries(root: Storage, keys: Sequence[str], cache_key: str) -> None:
    """Say so when the key is known, but with another schema or other write options."""
    named = keys[0].partition("-")[0]
    found = [info.name for info in entries.list_entries(root, named)]
    others = [name for name in found if name not in keys]
    if others:
        logger.info(
            "cache_key=%r is known with another schema or other write options (%d other entr%s); write a new one.",
            cache_key,
            len(others),
            "y" if len(others) == 1 else "ies",
        )
    elif found:
        logger.info("cache_key=%r is known, but not kept at the end of its converter; write one that is.", cache_key)


def _check_dataframe(df: Any) -> None:
    if all(hasattr(df, name) for name in ("mapInArrow", "sparkSession", "isStreaming")):
        if df.isStreaming:
            raise SourceError(
                "A streaming DataFrame has no end, so it cannot be converted. Convert a batch of it, "
                "e.g. in foreachBatch."
            )
        return
    kind = f"{type(df).__module__}.{type(df).__qualname__}"
    hint = "Pass what spark.read or spark.sql returns."
    if isinstance(df, (str, os.PathLike)):
        hint = (
            "It does not read a path: call make_parquet_converter(…) for Parquet files or make_delta_converter(…) for "
            "a Delta table, both without a copy, or pass spark.read.parquet(…) or spark.table(…)."
        )
        if os.path.isdir(os.path.join(os.fspath(df), "_delta_log")):
            hint = (
                "That path is a Delta table: call make_delta_converter(…), or pass spark.read.format('delta').load(…)."
            )
    elif kind.startswith("pandas."):
        hint = "Pass spark.createDataFrame(…) of it."
    raise TypeError(f"make_spark_converter needs a Spark DataFrame, got {kind}. {hint}")


def _run_write(
    df: Any,
    columns: Sequence[SparkColumn],
    spec: dict[str, Any],
    *,
    directory: Storage,
    session: Any,
    is_connect: bool,
    shuffle_rows_seed: int | None,
    writer: str,
    progress: bool | None,
) -> list[tuple[int, dict[str, Any]]]:
    """Run the write job; the reports of all files, in the order of partitions."""
    selected = df.selectExpr(*(column.select(f"c{index}") for index, column in enumerate(columns)))
    if shuffle_rows_seed is not None:
        selected = _shuffled(selected, shuffle_rows_seed)
    confs = _batch_confs(columns, _version(session)) | WRITE_CONFS
    name = f"converter-{posixpath.basename(directory.url)}"
    try:
        with (
            travels_by_value(),
            changed_confs(session, confs),
            write_job(session, is_connect, name),
            progress_bar(session, is_connect, name, progress),
        ):
            way = _choose_writer(writer, directory=directory, session=session, is_connect=is_connect)
            if way == "executors":
                reports = _write_with_executors(selected, columns, spec, session)
            else:
                packed = way == "spark" and any(column.kind != "scalar" for column in columns)
                if is_connect and _version(session) < (4, 1):
                    # Of two observations its server answers the outer one alone, and nested lists need both.
                    packed = packed and not any(column.kind == "tensor" and column.ndim > 1 for column in columns)
                reports = write_with_spark(selected, columns, spec, directory=directory, packed=packed)
    except ConverterError:
        raise
    except Exception as error:  # noqa: BLE001 (named below)
        finding = finding_in(error)
        if finding is None:
            place = spec["directory"] if directory.is_local else directory.url
            said = f"Spark could not write the cache into {place}: {directory.without_secrets(short_cause(error))}"
            _, reason = _probed.get(_place_of(directory, session), ("", "")) if writer == "auto" else ("", "")
            if reason:
                # Neither side can: what to do is said of the one that needs no administrator.
                package = {"abfs": "adlfs", "hdfs": "hdfs-native"}.get((directory.store or {}).get("protocol", ""))
                is_missing = package is not None and any(
                    sign in reason for sign in ("ImportError", "ModuleNotFoundError")
                )
                remedy = f"Install {package} there" if is_missing else "Give storage_options= that may write there"
                said += f". It was asked because {reason}. {remedy}: the executors are handed storage_options."
            raise CacheError(said, path=place) from directory.harmless(error)
        reports = [(0, {"finding": finding})]
    for _, report in reports:
        if "finding" in report:
            raise _error_of(report["finding"], columns)
    return sorted(reports, key=lambda item: (item[0], item[1].get("name", "")))


def _write_with_executors(
    selected: Any, columns: Sequence[SparkColumn], spec: dict[str, Any], session: Any
) -> list[tuple[int, dict[str, Any]]]:
    """Let the tasks write; a tensor's moments, up to 100 kB a task and column, are merged before the driver holds them.

    Those of few tasks are merged one after the other as they arrive here. Those of many would still lie in the JVM
    together, so that a stage of Spark's merges them, which takes 0.1 s.
    """
    job = selected.mapInArrow(tasks.make_write_partition(spec), tasks.REPORT_SCHEMA)
    confs, arrive = {}, collect_reports
    num_tensors = sum(column.kind != "scalar" for column in columns)
    if num_tensors:
        is_adaptive = has_adaptive_plan(selected)
        num_tasks = None if is_adaptive else count_scan_partitions(selected)
        if num_tasks is not None and num_tasks * num_tensors <= _MAX_UNFOLDED_MOMENTS:
            arrive = stream_reports
        else:
            job = job.repartition(1).mapInArrow(tasks.fold_reports, tasks.REPORT_SCHEMA)
            if not is_adaptive:
                # For our exchange alone Spark would plan and submit each stage as a job of its own, some 70 ms.
                confs = {"spark.sql.adaptive.enabled": "false"}
    totals: dict[str, Any] = {}
    reports = []
    with changed_confs(session, confs), contextlib.closing(arrive(job)) as arrivals:
        for partition, text in arrivals:
            report = json.loads(text)
            totals = tasks.add_moments(totals, report.pop("moments", {}))
            reports.append((partition, report))
    return [*reports, (-1, {"moments": {name: moments.to_json(closed) for name, closed in totals.items()}})]


_PICKLING_ERRORS = ("PicklingError", "PySparkPicklingError")
"""What pyspark raises, classic and Connect."""

_probed: dict[tuple[str, str, str], tuple[Writer, str]] = {}


def _choose_writer(wanted: str, *, directory: Storage, session: Any, is_connect: bool) -> Writer:
    """Which way the rows are written: `auto` asks an executor, once for each application and cache directory.

    `"lists"` is Spark's writer without Python on the way.
    """
    if wanted != "auto":
        return "spark" if wanted == "spark" else "executors"
    if not is_connect and _executors_are_this_process(session):
        return "executors"
    place = _place_of(directory, session)
    if place not in _probed:
        _probed[place] = _probe(directory, session)
    way, reason = _probed[place]
    if way != "executors":
        other = _find_other_user(directory, session)
        if other is not None:
            raise CacheError(
                f"Nobody writes to {directory.url} as {directory.user!r}, whom cache_dir or storage_options name: "
                f"{reason}, and Spark's own writer writes as {other!r}, the user of its JVM. Let the environment say "
                f"HADOOP_USER_NAME={directory.user} before Spark starts, or let the executors write.",
                path=directory.url,
            )
        logger.info("Spark's own Parquet writer is taken: %s", reason)
    return way


def _find_other_user(directory: Storage, session: Any) -> str | None:
    """Whose name Spark's own writer writes in, where cache_dir or storage_options name somebody else.

    The driver commits and deletes as the one who was named, whom HDFS lets delete nothing in another one's folder.
    """
    if directory.user is None:
        return None
    try:
        # Spark Connect has no JVM here, and a shared cluster of Databricks refuses: what differs there, HDFS will say.
        users = session._jvm.org.apache.hadoop.security.UserGroupInformation  # noqa: SLF001 (there is no other way)
        # With Kerberos both are who the ticket says, whatever they are told.
        own = directory.user if users.isSecurityEnabled() else str(users.getCurrentUser().getShortUserName())
    except Exception as error:  # noqa: BLE001 (each platform refuses with an error of its own)
        logger.debug("Could not ask Spark's JVM for its user: %s", error)
        return None
    return None if own == directory.user else own


def _place_of(directory: Storage, session: Any) -> tuple[str, str, str]:
    """An application, a cache directory, and a digest of what opens it: who gives other credentials asks anew."""
    application = str(session.conf.get("spark.app.id", None) or id(session))
    options = json.dumps(directory.options, sort_keys=True, default=id)
    digest = hashlib.sha256(options.encode()).hexdigest()
    return application, posixpath.dirname(posixpath.dirname(directory.url)), digest


def _executors_are_this_process(session: Any) -> bool:
    """In local mode with this very Python, what the driver can import and reach the executors can."""
    context = session.sparkContext
    is_local = context.master == "local" or context.master.startswith("local[")
    return bool(is_local and context.pythonExec == sys.executable)


def _probe(directory: Storage, session: Any) -> tuple[Writer, str]:
    """Let an executor write one small file, and see whether the driver finds it."""
    probe = tasks.make_probe(directory.path(), directory.store)
    try:
        # In one partition: Azure refuses one of two that write the same blob at the same time.
        rows = session.range(0, 1, 1, 1).mapInArrow(probe, tasks.REPORT_SCHEMA).collect()
    except Exception as error:  # noqa: BLE001 (whatever it is, executors that fail here would fail later)
        if type(error).__name__ in _PICKLING_ERRORS:
            # As Databricks' own providers of tokens, which stay in the notebook.
            cause = directory.without_secrets(short_cause(error))
            return "spark", f"storage_options cannot be handed to the executors ({cause})"
        return "lists", f"the executors cannot run what writes there ({directory.without_secrets(short_cause(error))})"
    [row] = rows
    answer = json.loads(row["report"])
    if int(answer["pyarrow"].partition(".")[0]) < LEAST_PYARROW:
        return "lists", f"the executors have pyarrow {answer['pyarrow']}, and {LEAST_PYARROW} is needed"
    if "error" in answer:
        return "spark", f"the executors cannot write to {directory.url} ({directory.without_secrets(answer['error'])})"
    if directory.size(tasks.PROBE_NAME) is None:
        raise entries.not_shared(directory.url, "what an executor wrote there is not there")
    directory.delete_file(tasks.PROBE_NAME)
    return "executors", ""


def _shuffled(df: Any, seed: int) -> Any:
    """The rows in a random order, the same for the same seed where the input's partitions and their order are the same.

    Rows are spread over partitions by a random number and sorted by it there: together a uniform permutation,
    without the sampling job that a global sort would run first.
    """
    from pyspark.sql import functions as F

    keys = {"_random_0": F.rand(seed), "_random_1": F.rand(seed + 1)}
    spread = df.withColumns(keys).repartition(*map(F.col, keys)).sortWithinPartitions(*keys)
    return spread.drop(*keys)


def _version(session: Any) -> tuple[int, ...]:
    """Major and minor version of Spark."""
    return tuple(int(part) for part in str(session.version).split(".")[:2])


def _batch_confs(columns: Sequence[SparkColumn], version: tuple[int, ...]) -> dict[str, str]:
    """How much Spark may hand to Python at once: by default 10,000 rows, which for rows of 2 MB is 20 GB.

    Spark 4.2 can bound the bytes, but then it adds up the size of every column at each row: of 41 numbers that is
    half the time of the whole write (2.5 s against 1.5 s for 2 M rows). Where the width of a row is known the rows
    are bounded instead. Batches of 4 MB are the fastest for 41 columns (1.8, 1.5, 1.4, 1.4, 1.4 s at 1, 1.7, 5.5, 8
    and 17 MB), and of a thousand columns a batch must still have thousands of rows.
    """
    records, num_bytes = "spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.arrow.maxBytesPerBatch"
    widths = [column.fixed_bytes for column in columns]
    if None not in widths:
        width = sum(width for width in widths if width is not None)
        rows = min(max(10_000, _BATCH_BYTES // width), _MAX_BATCH_BYTES // width)
        return {records: str(max(1, rows)), num_bytes: str(2**31 - 1)}
    confs = dict.fromkeys(_SCAN_CONFS, str(_SCAN_ROWS))
    if version >= (4, 2):
        # 2 kB rows: 1.29, 1.27, 1.18 and 1.23 s at 0.5, 1, 2 and 4 MB.
        return confs | {num_bytes: str(_BATCH_BYTES // 2)}
    # Older versions bound rows alone; the executor puts small batches together again.
    is_narrow = all(column.kind == "scalar" and column.dtype != "bytes" for column in columns)
    return confs | {records: "256" if is_narrow else "64"}


def _error_of(finding: Mapping[str, Any], columns: Sequence[SparkColumn]) -> ConverterError:
    """What an executor found in the data, as the error it is."""
    name = str(finding["column"])
    quoted = f"`{name}`"
    if finding["kind"] == "null_element":
        column = next(column for column in columns if column.name == name)
        no_size = " (an inner array that is null has no size to fill: drop such rows)" if column.ndim > 1 else ""
        return NullValueError(
            f"Column {name!r} has arrays with null elements, which no tensor can hold. Replace them before converting, "
            f"e.g. {column.without_null_elements()}{no_size}.",
            column=name,
        )
    if finding["kind"] == "shape":
        return SourceError(
            f"Column {name!r} has a row of {finding['found']}, where shapes= declares {finding['expected']}"
            + (f" (row {finding['row']} of its partition)" if "row" in finding else "")
            + ". Correct the shape, or the row.",
            column=name,
        )
    if finding["kind"] == "matrix":
        return UnsupportedTypeError(
            f"Column {name!r} has matrices, whose shape Spark's own writer does not keep. Say writer='executors', or "
            f"writer='spark' and shapes={{{name!r}: (rows, columns)}}.",
            column=name,
        )
    return UnsupportedTypeError(
        f"Column {name!r} has a row whose inner arrays differ in length, which makes no tensor. Pad or cut them to one "
        f"length before converting, or flatten them, e.g. F.flatten(F.col({quoted!r})).",
        column=name,
    )


def _manifest_from(
    reports: Sequence[tuple[int, Mapping[str, Any]]],
    columns: Sequence[SparkColumn],
    *,
    directory: str,
    is_kept: bool,
    float_dtype: str | None,
) -> Manifest:
    """What the executors wrote, as one dataset.

    Raises:
        SourceError: there are no rows.
    """
    totals: dict[str, Any] = {}
    lengths: dict[str, list[int]] = {}
    for _, report in reports:
        totals = tasks.add_moments(totals, report.get("moments", {}))
        for name, (least, most) in report.get("lengths", {}).items():
            before = lengths.get(name, [least, most])
            lengths[name] = [min(before[0], least), max(before[1], most)]
    reports = [(partition, report) for partition, report in reports if "rows" in report]
    files = [report for _, report in reports]
    rows = [report["rows"] for report in files]
    num_rows = sum(map(sum, rows))
    if not num_rows:
        raise SourceError(
            "The DataFrame has no rows, so there is nothing to train on. Check its filters and its source."
        )
    statistics = {}
    for column in columns:
        null_count = sum(report["nulls"].get(column.name, 0) for report in files)
        shape = () if column.kind == "scalar" else _common_shape(column, reports, lengths.get(column.name))
        field = Field(
            name=column.name,
            dtype=column.dtype,
            shape=shape,
            has_nulls=null_count > 0,
            ragged_ndim=column.ndim if shape is None else 1,
        )
        shortest, longest = lengths.get(column.name, (None, None))
        spans = [report["spans"][column.name] for report in files if column.name in report["spans"]]
        statistics[column.name] = ColumnStatistics(
            field=field,
            null_count=null_count,
            shortest=shortest,
            longest=longest,
            row_group_span=_row_group_span(column, spans, num_row_groups=sum(map(len, rows))),
            num_bytes=sum(report["column_bytes"].get(column.name, 0) for report in files),
            closed=totals.get(column.name),
        )
    schema = Schema(tuple(column.field for column in statistics.values()))
    return Manifest(
        schema=schema,
        file_names=tuple(f"{directory}/{report['name']}" for report in files),
        file_bytes=np.array([report["bytes"] for report in files], np.int64),
        file_footers=np.array([report["footer_crc32"] for report in files], np.int64),
        file_ends=_ends_of(files),
        row_group_file=np.repeat(np.arange(len(files)), [len(groups) for groups in rows]).astype(np.int64),
        row_group_rows=np.array([count for groups in rows for count in groups], np.int64),
        row_group_bytes=np.array([size for report in files for size in report["row_group_bytes"]], np.int64),
        fingerprint=fingerprint_of(schema, rows, [report["digests"] for report in files]),
        num_rows=num_rows,
        statistics=statistics,
        is_kept=is_kept,
        float_dtype=float_dtype or "float64",
    )


def _ends_of(files: Sequence[Mapping[str, Any]]) -> tuple[FileEnd, ...] | None:
    """What readers would fetch first, if the writers told it of all files and it is not too many bytes."""
    ends, num_bytes = [], 0
    for report in files:
        if "end" not in report:
            return None
        ends.append(FileEnd(*(zlib.decompress(base64.b64decode(part)) for part in report["end"])))
        num_bytes += sum(map(len, ends[-1]))
        if num_bytes > MAX_END_BYTES:
            return None
    return tuple(ends)


def _row_group_span(column: SparkColumn, spans: Sequence[Sequence[float]], *, num_row_groups: int) -> float | None:
    """The average part of the column's whole range that a row group covers."""
    if column.kind != "scalar" or not spans:
        return None
    sums, least, most = zip(*spans, strict=True)
    whole = max(most) - min(least)
    return sum(sums) / num_row_groups / whole if 0 < whole < math.inf else None


def _common_shape(
    column: SparkColumn, reports: Sequence[tuple[int, Mapping[str, Any]]], lengths: Sequence[int] | None
) -> tuple[int, ...] | None:
    """The one shape of all rows, or None, with a warning that says where they differ."""
    found = [
        (report["shapes"][column.name], partition, report)
        for partition, report in reports
        if column.name in report["shapes"]
    ]
    if not found:
        return column.shape
    first = found[0][0]
    odd = next((item for item in found if item[0] is None or item[0] != first), None)
    if odd is None:
        return tuple(first)
    if lengths is not None and not lengths[1]:
        logger.warning("Column %r becomes ragged: all its arrays are empty. Is it filled?", column.name)
        return None
    logger.warning(
        "Column %r becomes ragged: its rows differ in shape%s. Declare shapes={%r: …} to refuse such rows.",
        column.name,
        _where_rows_differ(column.name, reports, *odd[1:]),
        column.name,
    )
    return None


def _where_rows_differ(
    name: str, reports: Sequence[tuple[int, Mapping[str, Any]]], partition: int, report: Mapping[str, Any]
) -> str:
    if name not in report.get("extreme_rows", {}):
        row = report["odd_rows"].get(name)
        which = f"row {row} of partition {partition}" if row is not None else f"partition {partition}"
        return f", first seen at {which} ({report['name']})"
    least, most = report["extreme_rows"][name]
    if least == most:
        return " with as many numbers each"
    files = {number: found["name"] for number, found in reversed(reports)}
    # Spark numbers rows so: the partition above, the row in the lower 33 bits.
    shortest, longest = (
        f"row {place & (2**33 - 1)} of partition {place >> 33} ({files.get(place >> 33, 'a file')})"
        for place in (least, most)
    )
    return f": the shortest is {shortest}, the longest {longest}"


def check_write_options(*, float_dtype: Any, row_group_bytes: Any, compression: Any, writer: Any, shapes: Any) -> None:
    """Refuse option values before any work is done, naming the option."""
    if shapes is not None and not isinstance(shapes, Mapping):
        raise TypeError(
            f"shapes must be a dict of column name to shape, e.g. {{'image': (3, 32, 32)}}, got {shapes!r}."
        )
    for name, shape in (shapes or {}).items():
        is_shape = isinstance(shape, Sequence) and not isinstance(shape, str) and len(shape) > 0
        if not is_shape or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"shapes[{name!r}] must be a tuple of sizes above 0, e.g. (3, 32, 32), got {shape!r}.")
    if float_dtype not in ("float32", "float64", None):
        raise ValueError(f"float_dtype must be 'float32', 'float64' or None, got {float_dtype!r}.")
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of {', '.join(COMPRESSIONS)}, got {compression!r}.")
    if writer not in WRITERS:
        raise ValueError(f"writer must be one of {', '.join(WRITERS)}, got {writer!r}.")
    if isinstance(row_group_bytes, bool) or not isinstance(row_group_bytes, int):
        raise TypeError(f"row_group_bytes must be an integer, got {row_group_bytes!r}.")
    if row_group_bytes < 1024:
        raise ValueError(f"row_group_bytes must be at least 1024, got {row_group_bytes}.")
