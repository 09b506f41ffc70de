"""The progress of a Spark job's tasks, shown in a terminal or a notebook."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.parquet as pq

from converter.bars import NotebookOutput, check_bar, is_in_notebook, is_in_terminal, is_seen
from converter.storage.directory import Storage

_LOOK_SECONDS = 2.0
"""How often the written files are listed: a request to a store each time."""

_SHOW_SECONDS = 0.5
"""How often the tasks are counted: a terminal and a notebook both keep up with that."""


def jobs_of(tracker: Any, group: str) -> list[Any]:
    """Spark's status of a group's jobs."""
    return [info for job in tracker.getJobIdsForGroup(group) if (info := tracker.getJobInfo(job)) is not None]


def stages_of(tracker: Any, group: str) -> list[Any]:
    """Spark's status of the stages of a group's jobs."""
    stages = [tracker.getStageInfo(stage) for job in jobs_of(tracker, group) for stage in job.stageIds]
    return [info for info in stages if info is not None]


def check_progress(progress: bool | None) -> None:
    """Raise MissingDependencyError if a bar is asked for and tqdm is not installed."""
    check_bar(progress, "progress", "spark")


class Written:
    """How much the tasks have written, from the files in the entry's directory: Spark tells the driver only at the end.

    A footer of one file tells how many rows that is, about.
    """

    def __init__(self, directory: Storage) -> None:
        self._directory = directory
        self._begun = time.monotonic()
        self._looked = -_LOOK_SECONDS
        self._rows_per_byte = 0.0
        self._said = ""

    def __call__(self) -> str:
        """What to show; listed anew every two seconds."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            # A store that fails for a moment fails for the tasks, too, which say so.
            with contextlib.suppress(Exception):
                self._said = self._look(now)
            self._looked = now
        return self._said

    def _look(self, now: float) -> str:
        files = [info for info in self._directory.list() if info.name.endswith(".parquet") and info.num_bytes]
        num_bytes = sum(info.num_bytes for info in files)
        if not num_bytes:
            return ""
        if not self._rows_per_byte:
            # The largest is the likeliest to be whole; others have no footer yet.
            largest = max(files, key=lambda info: info.num_bytes)
            with contextlib.suppress(Exception), self._directory.open_parquet(largest.name) as file:
                self._rows_per_byte = pq.read_metadata(file).num_rows / largest.num_bytes
        rate = num_bytes / max(1e-3, now - self._begun)
        rows = f", about {num_bytes * self._rows_per_byte:,.0f} rows" if self._rows_per_byte else ""
        return f", {num_bytes / 1e6:,.0f} MB ({rate / 1e6:,.0f} MB/s){rows}"


@contextlib.contextmanager
def progress_bar(
    session: Any, is_connect: bool, name: str, wanted: bool | None, written: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Show how many tasks of `write_job` are done: a line on stderr, or in a notebook one output that is updated.

    With `wanted=None` this happens only in a terminal or a notebook. It needs tqdm. `written` says what the tasks have
    written, once one of them is done.
    """
    if not is_seen(wanted):
        yield
        return
    from tqdm import tqdm

    is_notebook = is_in_notebook()

    ended, started = threading.Event(), time.monotonic()

    def text(what: str) -> str:
        return f"{what} [{tqdm.format_interval(time.monotonic() - started)}]"

    def watch() -> None:
        shown = None
        while not ended.wait(_SHOW_SECONDS):
            num_done, num_tasks = count()
            # In a log a line is printed only if the counts changed.
            if is_notebook or is_in_terminal() or shown != (num_done, num_tasks):
                shown = num_done, num_tasks
                tasks = f"{num_done:,} of {num_tasks:,} tasks" if num_tasks else "planning"
                show(text(f"Writing the cache: {tasks}{written() if num_done else ''}"))

    with _counted_tasks(session, is_connect, name) as count, _NotebookLine() if is_notebook else _TextLine() as show:
        # In the context of this thread, which tells a notebook the cell that an output belongs to.
        watcher = threading.Thread(
            target=contextvars.copy_context().run, args=(watch,), name="converter-progress", daemon=True
        )
        try:
            watcher.start()
            yield
        finally:
            ended.set()
            # A Ctrl-C in start() may come before it runs.
            if watcher.ident is not None:
                watcher.join()
        show.end(text("Wrote the cache"))


class _TextLine:
    """A line on stderr that is overwritten, and erased at the end."""

    def __init__(self) -> None:
        from tqdm import tqdm

        # Our text instead of tqdm's, which would count tasks before there are any.
        self._bar = tqdm(bar_format="{desc}", leave=False)

    def __call__(self, text: str) -> None:
        self._bar.set_description_str(text)

    def end(self, text: str) -> None:
        """Do nothing: the line is erased when it is closed."""

    def __enter__(self) -> _TextLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


class _NotebookLine:
    """An output of a cell that is changed in place, and stays."""

    def __init__(self) -> None:
        self._output = NotebookOutput()

    def __call__(self, text: str) -> None:
        self._output.write(text)

    def end(self, text: str) -> None:
        """Show the end, if anything was shown before."""
        if self._output.is_begun:
            self(text)

    def __enter__(self) -> _NotebookLine:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def _counted_tasks(session: Any, is_connect: bool, name: str) -> Iterator[Callable[[], tuple[int, int]]]:
    """A function that returns how many tasks of `write_job` are done, of how many; `(0, 0)` until Spark knows."""
    if not is_connect:
        tracker = session.sparkContext.statusTracker()
        most = (0, 0)

        def count() -> tuple[int, int]:
            nonlocal most
            # A stage that an earlier job has already run is listed again, with nothing active and nothing done.
            infos = [info for info in stages_of(tracker, name) if info.numActiveTasks or info.numCompletedTasks]
            done, tasks = sum(info.numCompletedTasks for info in infos), sum(info.numTasks for info in infos)
            # Spark forgets old stages.
            most = max(most[0], done), max(most[1], tasks)
            return most

        yield count
        return
    if not hasattr(session, "registerProgressHandler"):
        # Spark Connect 3.5 reports no progress.
        yield lambda: (0, 0)
        return
    owner, counts = threading.get_ident(), dict[Any, tuple[int, int]]()

    def note(stages: Any, inflight_tasks: int, operation_id: Any, done: bool) -> None:  # noqa: ARG001 (Spark's names)
        # Spark calls this for all jobs of the session, in the thread that runs them.
        if stages and threading.get_ident() == owner:
            counts[operation_id] = (
                sum(stage.num_completed_tasks for stage in stages),
                sum(stage.num_tasks for stage in stages),
            )

    session.registerProgressHandler(note)
    try:
        yield lambda: (sum(done for done, _ in [*counts.values()]), sum(tasks for _, tasks in [*counts.values()]))
    finally:
        session.removeProgressHandler(note)
