"""What surrounds a Spark job: confs, description, progress, the cause of a failure; all of it given back afterwards."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from converter.sources import executor, moments

logger = logging.getLogger(__name__)


@contextmanager
def changed_confs(session: Any, wanted: Mapping[str, str]) -> Iterator[None]:
    """Session confs changed for a while; one that the platform refuses stays as it is."""
    before: dict[str, str | None] = {}
    try:
        for name, value in wanted.items():
            try:
                explicit = session.conf.get(name, None)
                session.conf.set(name, value)
            except Exception as error:  # noqa: BLE001 (each platform refuses with an error of its own)
                logger.debug("Spark keeps %s as it is: %s", name, error)
                continue
            before[name] = explicit
        yield
    finally:
        for name, explicit in before.items():
            if explicit is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, explicit)


def finding_in(error: Exception) -> dict[str, Any] | None:
    """What an executor found in the data, if that is what Spark's error carries."""
    _, marker, rest = str(error).partition(executor.FINDING)
    if not marker:
        return None
    finding: dict[str, Any] = json.JSONDecoder().raw_decode(rest)[0]
    return finding


def short_cause(error: Exception) -> str:
    """The one line of a Spark error that says why; the whole stays reachable as `__cause__`."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    python = [
        line
        for line in lines
        if line.partition(":")[0].endswith(("Error", "Exception")) and " " not in line.partition(":")[0]
    ]
    own = [line for line in python if not line.startswith(("org.apache.spark", "pyspark.errors"))]
    return (own or python or lines or [type(error).__name__])[-1 if own else 0][:500]


_TRAVELLING = (executor, moments)
_by_value_lock = threading.Lock()
_by_value_users = 0


@contextmanager
def travels_by_value() -> Iterator[None]:
    """Let the executor's module be pickled by value, for the time of one call: registering is process-global."""
    global _by_value_users
    from pyspark import cloudpickle as untyped_cloudpickle

    cloudpickle: Any = untyped_cloudpickle

    with _by_value_lock:
        if _by_value_users == 0:
            for module in _TRAVELLING:
                cloudpickle.register_pickle_by_value(module)
        _by_value_users += 1
    try:
        yield
    finally:
        with _by_value_lock:
            _by_value_users -= 1
            if _by_value_users == 0:
                for module in _TRAVELLING:
                    cloudpickle.unregister_pickle_by_value(module)


@contextmanager
def job_description(session: Any, is_connect: bool) -> Iterator[None]:
    """Name the job in Spark's UI, and give the user's own description back afterwards."""
    if is_connect:
        yield
        return
    context = session.sparkContext
    before = context.getLocalProperty("spark.job.description")
    context.setLocalProperty("spark.job.description", "converter: write the cache")
    try:
        yield
    finally:
        context.setLocalProperty("spark.job.description", before)


@contextmanager
def progress_bar(session: Any, is_connect: bool, wanted: bool | None) -> Iterator[None]:
    """A bar of the write's tasks on stderr, where someone looks and tqdm is installed."""
    if wanted is False or is_connect or (wanted is None and not _somebody_looks()):
        yield
        return
    try:
        # tqdm.auto warns in a notebook without ipywidgets.
        from tqdm.notebook import IProgress, tqdm

        if sys.stderr.isatty() or IProgress is None:
            from tqdm import tqdm
    except ImportError:
        yield
        return
    tracker = session.sparkContext.statusTracker()
    before = set(tracker.getJobIdsForGroup())
    done = threading.Event()

    def watch() -> None:
        shown = "{desc}: {n_fmt} of {total_fmt} tasks [{elapsed}]"
        with tqdm(desc="Writing the cache", total=0, bar_format=shown, leave=False) as bar:
            while not done.wait(0.2):
                stages = [
                    tracker.getStageInfo(stage)
                    for job in set(tracker.getJobIdsForGroup()) - before
                    for stage in getattr(tracker.getJobInfo(job), "stageIds", ())
                ]
                # A stage that an earlier job has done already is listed again, with nothing active and nothing done.
                infos = [info for info in stages if info and (info.numActiveTasks or info.numCompletedTasks)]
                bar.total = max(bar.total, sum(info.numTasks for info in infos))
                bar.n = max(bar.n, sum(info.numCompletedTasks for info in infos))
                bar.refresh()

    watcher = threading.Thread(target=watch, name="converter-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _somebody_looks() -> bool:
    if sys.stderr.isatty():
        return True
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"
