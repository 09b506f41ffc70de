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

import contextlib
import datetime as dt
import getpass
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from converter.cache import entries, finding, roots
from converter.cache.entries import HeldEntry
from converter.errors import CacheCorruptError, CacheError, SourceError
from converter.manifest import MAX_END_BYTES, Origin
from converter.schema import DeclaredShape
from converter.sources.spark import identity
from converter.sources.spark.choose import find_other_user
from converter.sources.spark.progress import check_progress
from converter.sources.spark.reports import manifest_from
from converter.sources.spark.run import run_write
from converter.sources.spark.schema import plan_columns
from converter.storage.directory import Storage, StorageOptions

if TYPE_CHECKING:
    from converter.portable.records import WriteSpec

logger = logging.getLogger(__name__)

FILE_BYTES = 512 << 20
"""A data file is closed once it is this large, so that a huge partition makes several files."""


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
) -> HeldEntry:
    """The entry of `df`: one that provably holds its rows, else a new one, written once."""
    _check_dataframe(df)
    check_progress(progress)
    session = df.sparkSession
    is_case_sensitive = session.conf.get("spark.sql.caseSensitive", None) == "true"
    columns = plan_columns(
        df.schema.jsonValue(), float_dtype=float_dtype, shapes=shapes or {}, is_case_sensitive=is_case_sensitive
    )
    is_connect = type(session).__module__.startswith("pyspark.sql.connect")
    chosen = roots.choose_cache_dir(
        cache_dir,
        spark_conf=session.conf.get(roots.SPARK_CONF, None),
        master=session.conf.get("spark.master", None) or "unknown",
        is_connect=is_connect,
    )
    if writer == "spark":
        named = roots.open_parent(chosen, storage_options, timeout_seconds)
        other = find_other_user(named, session)
        if other is not None:
            raise ValueError(
                f"writer='spark' writes to {named.url} as {other!r}, the user of Spark's JVM, where cache_dir or "
                f"storage_options name {named.user!r}. Say writer='executors', who are handed that name, or let the "
                f"environment say HADOOP_USER_NAME={named.user} before Spark starts."
            )
    root = roots.open_root(chosen, storage_options, timeout_seconds)
    write_options = {
        "float_dtype": float_dtype,
        "shapes": {name: list(shape or ()) for name, shape in (shapes or {}).items()},
        "row_group_bytes": row_group_bytes,
        "compression": compression,
        "shuffle_rows_seed": shuffle_rows_seed,
        "writer": writer,
    }

    def find_or_write(pinned: identity.DeltaVersion | None) -> HeldEntry:
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
                    kept if adopted.manifest.is_kept and not is_kept else "",
                )
                return adopted
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
        spec: WriteSpec = {
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
            reports = run_write(
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
            manifest = manifest_from(
                reports, columns, directory=attempt.data_directory, is_kept=is_kept, float_dtype=float_dtype
            )
            manifest = replace(manifest, origin=origin)
            if pinned is not None and not pinned.is_fixed and identity.find_delta_version(df) != pinned:
                raise _TableChangedError
            entries.delete_unlisted(root, attempt, manifest)
            entry = entries.commit(root, attempt, manifest)
        except BaseException:
            # Also on Ctrl-C: what was written has no manifest, and must not stay either.
            try:
                entries.abandon(root, attempt)
            except (CacheError, OSError) as left:
                # What failed first is what the user must hear.
                logger.warning("Left for a later sweep: %s", left)
            raise
        identity.remember(bucket, df, evidence, key)
        return entry

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


def _adopt(root: Storage, key: str, *, may_remove: bool = True) -> HeldEntry | None:
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
            adopted.delete()
        else:
            adopted.release()
        return None
    return adopted


def _log_other_entries(root: Storage, keys: Sequence[str], cache_key: str) -> None:
    """Say so when the key is known, but with another schema or other write options."""
    named = keys[0].partition("-")[0]
    found = [info.name for info in finding.list_entries(root, named)]
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
