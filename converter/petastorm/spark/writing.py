"""A DataFrame becomes plain Parquet under a folder of its own, once for each of its plans and options."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from converter.errors import SourceError
from converter.petastorm.store import open_store
from converter.sources.spark.confs import changed_confs
from converter.sources.spark.identity import gather_evidence, inputs_of
from converter.sources.spark.session import on_its_own

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

logger = logging.getLogger("converter.petastorm.spark.spark_dataset_converter")


# Old dates and times by today's calendar. Quoted names are names, not patterns.
_WRITE_CONFS = {
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    "spark.sql.parser.quotedRegexColumnNames": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a DataFrame is written."""

    row_group_size: int
    codec: str
    dtype: str | None
    parent_url: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Conversion:
    """A DataFrame that this process wrote, to be found again."""

    df: DataFrame
    schema: str
    """With the names of its columns, which Spark's comparison of plans leaves out."""

    options: WriteOptions
    url: str
    evidence: Any
    """What its rows depended on before they were written; None if that could not be told."""

    files: tuple[str, ...]
    """The names of its files: one of them may have been deleted since."""


_conversions: list[_Conversion] = []
_lock = threading.Lock()
_locks: dict[str, threading.Lock] = {}


def write_or_find(df: DataFrame, options: WriteOptions, begin: Callable[[str], object]) -> str:
    """The URL of the DataFrame's files; `begin` is called with it before they are written. Equal ones wait for one."""
    schema = df.schema.json()
    if (varied := next((name for name in _names_in(df.schema) if "${" in name), None)) is not None:
        raise ValueError(
            f"Column {varied!r} has a name in which Spark puts a variable when it writes Parquet. Rename it, "
            "for example by df.withColumnRenamed."
        )
    key = repr((options, schema))
    with _lock:
        own_lock = _locks.setdefault(key, threading.Lock())
    with own_lock:
        with _lock:
            known = [each for each in _conversions if each.options == options]
        # Equal frames may read files that have changed, and a frame may know its files from before.
        evidence: Any = gather_evidence(df)
        if evidence is None:
            # What it computes counts as equal if Spark says so, as in Petastorm.
            evidence = inputs_of(df)
        else:
            evidence = replace(evidence, is_racy=False) if evidence.is_listed else None
        for conversion in known if evidence is not None else ():
            is_same = (conversion.schema, conversion.evidence) == (schema, evidence)
            if is_same and conversion.df.sameSemantics(df):
                if _files_at(conversion.url) == conversion.files:
                    return conversion.url
                logger.warning("Files of %s are gone, so the DataFrame is written anew.", conversion.url)
                forget(conversion.url)
        url = _materialize(df, options, begin)
        with _lock:
            _conversions.append(
                _Conversion(df=df, schema=schema, options=options, url=url, evidence=evidence, files=_files_at(url))
            )
        return url


def _files_at(url: str) -> tuple[str, ...]:
    try:
        return open_store([url]).names
    except SourceError:
        return ()


def forget(url: str) -> None:
    """Write a DataFrame anew next time, because its files are deleted."""
    with _lock:
        _conversions[:] = [kept for kept in _conversions if kept.url != url]


def _materialize(df: DataFrame, options: WriteOptions, begin: Callable[[str], object]) -> str:
    session = df.sparkSession
    try:
        application = session.sparkContext.applicationId
    except Exception:  # noqa: BLE001 (Spark Connect has no context, and several classes of errors that say so)
        application = session.conf.get("spark.app.id", None) or "connect"
    moment = dt.datetime.now().strftime("%Y%m%d%H%M%S")  # noqa: DTZ005 (people look for the folder by their clock)
    url = make_sub_dir_url(options.parent_url, f"{moment}-appid-{application}-{uuid.uuid4()}")
    # Before the write, so that what a failed one leaves is removed as well.
    begin(url)
    with changed_confs(session, _WRITE_CONFS):
        converted = _convert_precision(_convert_vectors(on_its_own(df), options.dtype), options.dtype)
        writer = converted.write.option("compression", options.codec)
        writer.option("parquet.block.size", options.row_group_size).parquet(url)
    logger.info("Materialize dataframe to url %s successfully.", url)
    return url


def make_sub_dir_url(url: str, name: str) -> str:
    """The URL of a folder below another."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def _convert_vectors(df: DataFrame, dtype: str | None) -> DataFrame:
    from pyspark.ml.functions import vector_to_array

    names = [field.name for field in df.schema if type(field.dataType).__name__ == "VectorUDT"]
    return (
        df.withColumns({name: vector_to_array(_quoted(df, name), dtype or "float64") for name in names})
        if names
        else df
    )


def _convert_precision(df: DataFrame, dtype: str | None) -> DataFrame:
    if dtype is None:
        return df
    source, target = ("double", "float") if dtype == "float32" else ("float", "double")
    casts = {}
    for field in df.schema:
        kind = field.dataType.simpleString()
        if kind in (source, f"array<{source}>"):
            casts[field.name] = kind.replace(source, target)
    if not casts:
        return df
    logger.warning("Converting floating-point columns to %s", dtype)
    return df.withColumns({name: _quoted(df, name).cast(kind) for name, kind in casts.items()})


def _quoted(df: DataFrame, name: str) -> Any:
    """A column whose name may have dots."""
    return df["`{}`".format(name.replace("`", "``"))]


def _names_in(kind: Any) -> Iterator[str]:
    """The names of a type's members, at every depth."""
    for field in getattr(kind, "fields", ()):
        yield field.name
        yield from _names_in(field.dataType)
    for part in ("elementType", "keyType", "valueType"):
        if hasattr(kind, part):
            yield from _names_in(getattr(kind, part))
