"""A DataFrame becomes a cache entry: decides whether an entry that holds its rows is reused, or writes one.

Works on classic Spark and on Spark Connect, because it uses `mapInArrow`, which
both have, and needs nothing of the JVM. One pass over the data: no counting job,
no sampling job, no `df.cache()`.

The executors need pyarrow and numpy, not this package: the write function
travels by value. Columns travel under our own names (`c0`, `c1`, …), because
`mapInArrow` refuses names with dots (tried on Spark 4.2), and keep their true
names in the files.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import getpass
import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from converter.cache import entries, finding, roots
from converter.cache.entries import HeldEntry
from converter.cache.leases import HURRY_SECONDS
from converter.categories import Unseen
from converter.decoders import is_own
from converter.decoders.decoder import Decoder, check_decode
from converter.errors import CacheCorruptError, CacheError, SourceError
from converter.manifest import MAX_END_BYTES, Manifest, Origin
from converter.scaling import StandardizeOption, check_standardize, standardized_names
from converter.schema import DeclaredShape
from converter.sources.spark import identity
from converter.sources.spark.choose import find_other_user
from converter.sources.spark.delta_version import DeltaVersion, find_delta_version
from converter.sources.spark.jobs import naming_the_end_of_spark
from converter.sources.spark.options import WriteOptions
from converter.sources.spark.own_decoders import hashes_of_own
from converter.sources.spark.progress import check_progress
from converter.sources.spark.reports import manifest_from
from converter.sources.spark.run import run_write
from converter.sources.spark.schema import SparkColumn, batch_schema_of, decoded_columns, plan_columns, with_categories
from converter.storage.directory import Storage, StorageOptions

if TYPE_CHECKING:
    from converter.portable.records import WriteSpec

logger = logging.getLogger(__name__)

FILE_BYTES = 512 << 20
"""A data file is closed once it is this large, so that a huge partition makes several files."""


Complete = Callable[..., Manifest]
"""Finds the values of categories that the writer does not report: a pass, which only rooms above this one can make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What is to be written, and where: known before any entry is looked at."""

    df: Any
    settled: Any
    """The frame as `identity.settled` gives it, whose rows are written."""

    needs_evidence: bool
    """Whether an entry of this process may be reused if it provably holds the rows."""

    columns: Sequence[SparkColumn]
    root: Storage
    options: WriteOptions
    cache_key: str | None
    is_kept: bool
    progress: bool | None
    complete: Complete

    @property
    def application_id(self) -> str:
        """Spark's name for the running application."""
        return self.df.sparkSession.conf.get("spark.app.id", None) or "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """What proves that an entry holds the rows of a request, and under which keys such an entry stands."""

    version: DeltaVersion | None
    """The version of a Delta table that the DataFrame reads, if that is its identity."""

    evidence: identity.Evidence | None
    bucket: str
    """Under which name `identity` remembers entries of this root, schema and options."""

    kept_key: str
    """The key with `delete_on_exit=False`."""

    passing_key: str
    key: str
    """Which of the two keys a new entry gets."""

    candidates: Sequence[str]
    """Keys of entries that hold the rows, if they exist."""


@naming_the_end_of_spark("The DataFrame cannot be converted")
def write_dataframe(
    df: Any,
    *,
    cache_dir: str | None,
    cache_key: str | None,
    float_dtype: str | None,
    shapes: Mapping[str, DeclaredShape] | None,
    decode: Mapping[str, Decoder] | None,
    decode_at: str,
    categories: Any,
    unseen: Unseen,
    standardize: StandardizeOption,
    row_group_bytes: int,
    compression: str,
    shuffle_rows_seed: int | None,
    writer: str,
    storage_options: StorageOptions | None,
    timeout_seconds: float,
    is_kept: bool,
    progress: bool | None,
    complete: Complete,
) -> HeldEntry:
    """The entry of `df`: one that provably holds its rows, else a new one, written once."""
    _check_dataframe(df)
    check_progress(progress)
    with contextlib.ExitStack() as held, identity.settled(df) as settled:
        columns = plan_columns(
            settled.schema.jsonValue(),
            float_dtype=float_dtype,
            shapes=shapes or {},
            standardized=standardized_names(standardize),
            is_case_sensitive=df.sparkSession.conf.get("spark.sql.caseSensitive", None) == "true",
        )
        check_decode(decode, {column.name: column.dtype if column.kind == "scalar" else "array" for column in columns})
        if decode_at == "write":
            columns = decoded_columns(columns, decode or {})
        columns = with_categories(columns, categories, unseen)
        scales = check_standardize(standardize, batch_schema_of(columns))
        options = WriteOptions(
            float_dtype=float_dtype,
            shapes=shapes or {},
            decode=decode or {},
            decode_at=decode_at,
            categories={column.name: column.categories for column in columns if column.categories is not None},
            scales=scales,
            row_group_bytes=row_group_bytes,
            compression=compression,
            shuffle_rows_seed=shuffle_rows_seed,
            writer=writer,
            own_decoders=_hashes_of_own(decode or {}, cache_key) if decode_at == "write" else {},
        )
        request = _Request(
            df=df,
            settled=settled,
            needs_evidence=cache_key is None and not is_kept and not options.own_decoders,
            columns=columns,
            root=_open_root(df.sparkSession, cache_dir, storage_options, timeout_seconds, writer=writer),
            options=options,
            cache_key=cache_key,
            is_kept=is_kept,
            progress=progress,
            complete=functools.partial(complete, categories=_given(categories, columns), unseen=unseen),
        )
        version = None if cache_key is not None or options.own_decoders else find_delta_version(df)
        try:
            entry = _find_or_write(request, version)
        except _TableChangedError:
            logger.info("The Delta table had a new version while it was written, so it is written once more.")
            entry = _find_or_write(request, None)
        # Outside of `settled`, whose end asks Spark.
        held.enter_context(_let_go_on_error(entry))
        return entry


def _find_or_write(request: _Request, version: DeltaVersion | None) -> HeldEntry:
    identified = _identify(request, version)
    adopted = _reuse(request, identified)
    if adopted is not None:
        return adopted
    entry = _write(request, identified)
    with _let_go_on_error(entry):
        identity.remember(identified.bucket, request.df, identified.evidence, identified.key)
    return entry


@contextlib.contextmanager
def _let_go_on_error(entry: HeldEntry) -> Iterator[None]:
    """If the block fails, end the use of an entry whose converter nobody receives, as the end of its block would."""
    try:
        yield
    except BaseException:
        try:
            with entry.root.hurried(HURRY_SECONDS):
                entry.release() if entry.manifest.is_kept else entry.delete()
        except (CacheError, OSError) as error:
            logger.warning("Could not release the entry that was written; a later sweep removes it: %s", error)
        raise


def _hashes_of_own(decoders: Mapping[str, Decoder], cache_key: str | None) -> dict[str, str]:
    """What keys know of decoders of the user's own. Raises TypeError if one cannot be sent to the executors."""
    from pyspark import cloudpickle

    for name, decoder in decoders.items():
        try:
            cloudpickle.dumps(decoder)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise TypeError(
                f"decode: the decoder of column {name!r} cannot be sent to the executors: {type(error).__name__}: "
                f"{error}. Make what it holds in its decode(), or pass decode_at='read'."
            ) from error
    if cache_key is not None:
        return hashes_of_own(decoders)
    # What code makes is never proven: it may read files, or packages that are installed anew.
    own = [name for name, decoder in decoders.items() if is_own(decoder)]
    if own:
        logger.info(
            "What your own decoders of %s make is written for this call alone. Pass cache_key to find it again.",
            ", ".join(map(repr, own)),
        )
    return {name: uuid.uuid4().hex for name in own}


def _given(categories: Any, columns: Sequence[SparkColumn]) -> dict[str, Any]:
    """For each column of categories the values that the user gave, or None."""
    values = categories if isinstance(categories, Mapping) else {}
    return {column.name: values.get(column.name) for column in columns if column.categories is not None}


def _is_connect(session: Any) -> bool:
    return type(session).__module__.startswith("pyspark.sql.connect")


def _open_root(
    session: Any, cache_dir: str | None, storage_options: StorageOptions | None, timeout_seconds: float, *, writer: str
) -> Storage:
    """The cache's root; refuses `writer="spark"` if the JVM runs as another user than the driver commits as."""
    chosen_dir = roots.choose_cache_dir(
        cache_dir,
        spark_conf=session.conf.get(roots.SPARK_CONF, None),
        master=session.conf.get("spark.master", None) or "unknown",
        is_connect=_is_connect(session),
    )
    if writer == "spark":
        parent = roots.open_parent(chosen_dir, storage_options, timeout_seconds)
        jvm_user = find_other_user(parent, session)
        if jvm_user is not None:
            raise ValueError(
                f"writer='spark' writes to {parent.url} as {jvm_user!r}, the user of Spark's JVM, but cache_dir or "
                f"storage_options name {parent.user!r}. Pass writer='executors', which use that name, or set "
                f"HADOOP_USER_NAME={parent.user} before Spark starts."
            )
    return roots.open_root(chosen_dir, storage_options, timeout_seconds)


def _identify(request: _Request, version: DeltaVersion | None) -> _Identity:
    """What may prove that an entry holds the rows: the user's key, a table's version, else evidence of this process."""
    name = None if request.cache_key is None else identity.named(request.cache_key)
    if version is not None:
        name = version.identity
    schema = request.settled.schema.json()
    # Entries that are kept are never those of converters that delete at their end; these may read what is kept.
    kept_key, passing_key = (
        identity.entry_key(name, schema=schema, write_options=request.options.for_key(is_kept=is_kept))
        for is_kept in (True, False)
    )
    key = kept_key if request.is_kept else passing_key
    bucket = f"{request.root.url}/{key.partition('-')[2]}"
    evidence = None
    if name is not None:
        candidates = [kept_key] if request.is_kept else [kept_key, passing_key]
    else:
        evidence = identity.gather_evidence(request.settled) if request.needs_evidence else None
        candidates = identity.recall(bucket, request.df, evidence)
    return _Identity(
        version=version,
        evidence=evidence,
        bucket=bucket,
        kept_key=kept_key,
        passing_key=passing_key,
        key=key,
        candidates=candidates,
    )


def _reuse(request: _Request, identified: _Identity) -> HeldEntry | None:
    """The first candidate that exists and is whole."""
    root = request.root
    for candidate in identified.candidates:
        # A kept entry is not this converter's to remove, even if it is damaged.
        adopted = _adopt(root, candidate, may_remove=request.is_kept or candidate != identified.kept_key)
        if adopted is not None:
            note = ""
            if adopted.manifest.is_kept and not request.is_kept:
                note = " It was written with delete_on_exit=False, so delete() alone removes it."
            logger.info("Reuse %s: it holds the same rows.%s", root.below(candidate).url, note)
            return adopted
    if request.cache_key is not None:
        _log_other_entries(root, (identified.kept_key, identified.passing_key), request.cache_key)
    return None


def _write(request: _Request, identified: _Identity) -> HeldEntry:
    """Write the rows into a new attempt and commit it."""
    root, options, key = request.root, request.options, identified.key
    for column in request.columns:
        if column.narrowed_from:
            logger.info("Column %r: %s becomes %s.", column.name, column.narrowed_from, column.dtype)
    compression = "none" if options.compression == "auto" and root.is_local else options.compression
    origin = _origin(request, identified, options.as_called(compression=compression, is_kept=request.is_kept))
    attempt = entries.begin(root, key, application_id=request.application_id)
    directory = root.below(key).below(attempt.data_directory)
    spec: WriteSpec = {
        "directory": root.below(key).path(attempt.data_directory),
        "intent": root.below(key).path(attempt.intent.name),
        "store": root.store,
        "columns": [column.spec() for column in request.columns],
        "row_group_bytes": options.row_group_bytes,
        "file_bytes": FILE_BYTES,
        "compression": compression,
        # On a local disk a footer costs nothing to read.
        "end_bytes": 0 if root.is_local else MAX_END_BYTES,
    }
    try:
        reports = run_write(
            request.settled,
            request.columns,
            spec,
            directory=directory,
            session=request.df.sparkSession,
            is_connect=_is_connect(request.df.sparkSession),
            shuffle_rows_seed=options.shuffle_rows_seed,
            writer=options.writer,
            progress=request.progress,
        )
        manifest = manifest_from(
            reports,
            request.columns,
            directory=attempt.data_directory,
            is_kept=request.is_kept,
            float_dtype=options.float_dtype,
        )
        version = identified.version
        if version is not None and not version.is_fixed and find_delta_version(request.df) != version:
            raise _TableChangedError
        entries.delete_unlisted(root, attempt, manifest)
        manifest = request.complete(root.below(key), manifest)
        # Only now is it known which arrays have one shape.
        check_standardize(options.scales, manifest.batch_schema)
        decoders = options.decode if options.decode_at == "read" else {}
        declared = replace(manifest, origin=origin, decoders=decoders, scales=options.scales)
        entry = entries.commit(root, attempt, declared)
    except BaseException:
        # Also on Ctrl-C: files without a manifest must not stay.
        try:
            entries.abandon(root, attempt)
        except (CacheError, OSError) as error:
            # Only logged, because the first failure is what the user must see.
            logger.warning("Could not remove the unfinished write; a later sweep removes it: %s", error)
        raise
    return entry


def _origin(request: _Request, identified: _Identity, options: Mapping[str, Any]) -> Origin:
    """Where the rows come from, for people who look at the manifest."""
    version = identified.version
    if request.cache_key is not None:
        named_version = find_delta_version(request.df)
        # The newest version is not noted: it may be another one when the rows are read.
        version = named_version if named_version is not None and named_version.is_fixed else None
    return Origin(
        cache_key=request.cache_key,
        created=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        application_id=request.application_id,
        user=_own_user(),
        source="DataFrame" if version is None else version.source,
        options=options,
    )


class _TableChangedError(Exception):
    """The rows that were written may be those of two versions."""


def _own_user() -> str:
    """The user of this process; empty if the machine has no name for it."""
    with contextlib.suppress(KeyError, OSError, ImportError):
        return getpass.getuser()
    return ""


def _adopt(root: Storage, key: str, *, may_remove: bool = True) -> HeldEntry | None:
    """A committed entry whose files are all there. A damaged one is removed, so that it is written again."""
    note = "" if may_remove else " The damaged entry is kept (delete_on_exit=False) and stays."
    try:
        adopted = entries.adopt(root, key)
    except CacheCorruptError as error:
        logger.warning("Write a damaged entry again: %s%s", error, note)
        if may_remove:
            entries.discard(root, key)
        return None
    if adopted is None:
        return None
    if adopted.damage is not None:
        logger.warning("Write a damaged entry again: %s%s", adopted.damage, note)
        if may_remove:
            # If it is whole after all, the commit adopts it.
            adopted.delete_if_damaged()
        else:
            adopted.release()
        return None
    return adopted


def _log_other_entries(root: Storage, keys: Sequence[str], cache_key: str) -> None:
    """Log that the user's key has entries, but with another schema or other write options."""
    names = [info.name for info in finding.list_entries(root, keys[0].partition("-")[0])]
    others = [name for name in names if name not in keys]
    if others:
        logger.info(
            "cache_key=%r has entries with another schema or other write options (%d entr%s); write a new one.",
            cache_key,
            len(others),
            "y" if len(others) == 1 else "ies",
        )
    elif names:
        logger.info("cache_key=%r has an entry that is deleted with its converter; write one that is kept.", cache_key)


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
