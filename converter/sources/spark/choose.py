"""Chooses which writer can write into the cache directory: the executors, or Spark's own."""

from __future__ import annotations

import hashlib
import json
import logging
import posixpath
import sys
from typing import Any, Literal

from converter.cache import entries
from converter.errors import CacheError
from converter.portable.tasks import PROBE_NAME, REPORT_SCHEMA, ask_python, make_probe
from converter.sources.spark.jobs import short_cause
from converter.sources.spark.session import ends_all, java_packages
from converter.storage.directory import Storage

logger = logging.getLogger(__name__)

LEAST_PYARROW = 13
"""The oldest pyarrow that executors may have: it is the first that can write page checksums."""

Writer = Literal["executors", "spark", "lists"]
"""`lists` is Spark's own writer without Python on the way, so that arrays stay lists."""

_PICKLING_ERRORS = ("PicklingError", "PySparkPicklingError")
"""What pyspark raises, classic and Connect."""

probed: dict[tuple[str, str, str], tuple[Writer, str]] = {}
"""By `place_of`, what a probe chose, and why not the executors."""

pythons: dict[str, str] = {}
"""By application, why its executors cannot run Python; empty if they can."""


def choose_writer(wanted: str, *, directory: Storage, session: Any, is_connect: bool) -> Writer:
    """Which writer writes the rows. `auto` asks an executor, once for each application and cache directory."""
    if wanted != "auto":
        return "spark" if wanted == "spark" else "executors"
    if not is_connect and _executors_are_this_process(session):
        return "executors"
    place = place_of(directory, session)
    if place not in probed:
        probed[place] = _probe(directory, session)
    writer, reason = probed[place]
    if writer != "executors":
        jvm_user = find_other_user(directory, session)
        if jvm_user is not None:
            raise CacheError(
                f"Neither writer can write to {directory.url} as {directory.user!r}, the user in cache_dir or "
                f"storage_options: {reason}, and Spark's own writer writes as {jvm_user!r}, the user of its JVM. Set "
                f"HADOOP_USER_NAME={directory.user} before Spark starts, or let the executors write.",
                path=directory.url,
            )
        logger.info("Using Spark's own Parquet writer: %s", reason)
    return writer


def has_python(session: Any, *, is_connect: bool) -> bool:
    """Whether executors have a Python with pyarrow. One of them is asked, once for each application."""
    if not is_connect and _executors_are_this_process(session):
        return True
    application = _application_of(session)
    if application not in pythons:
        try:
            [row] = session.range(0, 1, 1, 1).mapInArrow(ask_python, REPORT_SCHEMA).collect()
            pythons[application] = _too_old(json.loads(row["report"])["pyarrow"])
        except Exception as error:
            if ends_all(error):
                raise
            # Executors that fail here for any reason would fail later.
            pythons[application] = f"the executors cannot run Python ({short_cause(error)})"
    if pythons[application]:
        logger.info("Spark writes the values of categories, not their codes: %s", pythons[application])
    return not pythons[application]


def find_other_user(directory: Storage, session: Any) -> str | None:
    """The user that Spark's own writer writes as, if cache_dir or storage_options name another one; else None.

    The driver commits and deletes as the user who is named there, and HDFS lets it delete nothing in another user's
    folder.
    """
    if directory.user is None:
        return None
    try:
        # Spark Connect has no JVM here, and a shared cluster of Databricks refuses: HDFS will then report a difference.
        users = java_packages(session).org.apache.hadoop.security.UserGroupInformation
        # With Kerberos, the ticket alone decides the user of both.
        jvm_user = directory.user if users.isSecurityEnabled() else str(users.getCurrentUser().getShortUserName())
    except Exception as error:  # noqa: BLE001 (each platform refuses with an error of its own)
        logger.debug("Could not ask Spark's JVM for its user: %s", error)
        return None
    return None if jvm_user == directory.user else jvm_user


def place_of(directory: Storage, session: Any) -> tuple[str, str, str]:
    """An application, a cache directory, and a digest of its options: other credentials are probed again."""
    options = json.dumps(directory.options, sort_keys=True, default=id)
    digest = hashlib.sha256(options.encode()).hexdigest()
    return _application_of(session), posixpath.dirname(posixpath.dirname(directory.url)), digest


def _application_of(session: Any) -> str:
    return str(session.conf.get("spark.app.id", None) or id(session))


def _too_old(version: str) -> str:
    """What is wrong with a version of pyarrow on executors; nothing, if it is new enough."""
    is_old = int(version.partition(".")[0]) < LEAST_PYARROW
    return f"the executors have pyarrow {version}, and {LEAST_PYARROW} is needed" if is_old else ""


def _executors_are_this_process(session: Any) -> bool:
    """Whether Spark runs in local mode with this Python: executors can then import and reach what the driver can."""
    context = session.sparkContext
    is_local = context.master == "local" or context.master.startswith("local[")
    return bool(is_local and context.pythonExec == sys.executable)


def _probe(directory: Storage, session: Any) -> tuple[Writer, str]:
    """Let an executor write one small file, and see whether the driver finds it."""
    probe = make_probe(directory.path(), directory.store)
    try:
        # In one partition: Azure refuses one of two that write the same blob at the same time.
        rows = session.range(0, 1, 1, 1).mapInArrow(probe, REPORT_SCHEMA).collect()
    except Exception as error:
        if ends_all(error):
            raise
        # Executors that fail here for any reason would fail later.
        if type(error).__name__ in _PICKLING_ERRORS:
            # For example Databricks' own token providers, which stay in the notebook.
            cause = directory.without_secrets(short_cause(error))
            return "spark", f"storage_options cannot be handed to the executors ({cause})"
        return "lists", f"the executors cannot run what writes there ({directory.without_secrets(short_cause(error))})"
    [row] = rows
    answer = json.loads(row["report"])
    pythons[_application_of(session)] = reason = _too_old(answer["pyarrow"])
    if reason:
        return "lists", reason
    if "error" in answer:
        return "spark", f"the executors cannot write to {directory.url} ({directory.without_secrets(answer['error'])})"
    if directory.size(PROBE_NAME) is None:
        raise entries.not_shared(directory.url, "the file of an executor is not there")
    directory.delete_file(PROBE_NAME)
    return "executors", ""
