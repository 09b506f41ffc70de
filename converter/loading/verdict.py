"""What limits a loop, in one sentence: the largest wait is followed to the stage that causes it, and to its reason.

The figures between the reasons are guesses that are right in the situations of `tests/bench/verdicts.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from converter.loading.steps import Steps
from converter.plan import default_window_rows
from converter.reading.bounds import bytes_decoded, element_bytes
from converter.reading.meter import Work
from converter.reading.source import BatchSource

_LITTLE_WAITING = 0.1
"""A loop that waits for less than this part of its time is limited by itself."""

_FEW_STEPS = 3
_LEAST_SECONDS = 0.05
"""A loop that takes no longer is over before it can be judged: threads and files are opened in some 20 ms."""

_MANY_PEEKS = 3
"""Keras peeks at a batch once or twice before it reads an epoch."""

_SHORT = 0.2
"""If what follows the first step takes no longer than this part of it, the first step is judged, too."""

_SMALL_PIECE_BYTES = 256 << 10
"""To begin another row group or window takes as long as to read about so many bytes."""

_SMALL_CHUNK_BYTES, _MANY_COLUMNS = 64 << 10, 200
_SMALL_BATCH_BYTES = 4 << 10
_WAITING = 0.1
"""A function that works for less than this part of its time waits for something. Two that hold Python's lock by turns
work for half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What limits a loop."""

    limit: str
    """One word for it."""

    sentence: str
    """What, what shows it, and what would help."""


def judge(
    source: BatchSource,
    steps: Steps,
    work: Mapping[str, Work],
    *,
    blocked: Mapping[str, float],
    bytes_from_disk: int,
    bytes_from_copies: int,
    num_workers: int,
    has_processes: bool,
    num_cores: int,
) -> Verdict:
    """The verdict on an iteration.

    Args:
        source: what is read.
        steps: the steps of the loop.
        work: what each stage did, over all threads and processes.
        blocked: seconds that the loop waited for the threads of each stage.
        bytes_from_disk: bytes of local files that were not in memory.
        bytes_from_copies: bytes that came from `local_cache_dir`.
        num_workers: worker processes of the loader.
        has_processes: whether such a loader may have worker processes.
        num_cores: the cores that this process may use.
    """
    case = _Case(
        source=source,
        steps=steps,
        work=work,
        num_workers=num_workers,
        has_processes=has_processes,
        num_cores=num_cores,
    )
    if not steps.batches and not steps.seconds:
        return Verdict(limit="start", sentence="The start: no batch was read yet.")
    if steps.is_peek and steps.num_peeks >= _MANY_PEEKS:
        return case.restarts()
    if steps.batches < _FEW_STEPS or steps.seconds < _LEAST_SECONDS:
        return case.start()
    if case.waited < _LITTLE_WAITING * case.seconds:
        return case.model()
    copying = case.of("copy").seconds
    causes = {**blocked, "copy": copying, "hand over": max(0.0, steps.handing_seconds - copying)}
    cause = max(causes, key=causes.__getitem__)
    if cause == "workers":
        # The largest stage in the processes stands for them.
        stages = {stage: done.seconds for stage, done in work.items()}
        cause = max(stages, key=stages.__getitem__) if stages else "hand over"
        if sum(stages.values()) < 0.5 * num_workers * case.waited:
            return case.processes()
    if cause == "transform":
        return case.transform()
    if cause == "decode bytes":
        return case.decode()
    if cause == "copy":
        return case.copying()
    if cause == "hand over":
        return case.small_pieces() or case.handing()
    return case.reading(bytes_from_disk, bytes_from_copies)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Case:
    """The figures of one iteration, and the sentences that they make."""

    source: BatchSource
    steps: Steps
    work: Mapping[str, Work]
    num_workers: int
    has_processes: bool
    num_cores: int

    @property
    def left_out(self) -> float:
        """Seconds of the first step: to open files and to start threads takes a while, whatever limits the others.

        Unless nearly everything was done in it: worker processes send a whole window at once.
        """
        first = self.steps.first_waited
        return 0.0 if self.steps.seconds - first < _SHORT * first else first

    @property
    def seconds(self) -> float:
        """How long the loop took."""
        return self.steps.seconds - self.left_out

    @property
    def waited(self) -> float:
        """For how long of that it waited."""
        return self.steps.waited_seconds - self.left_out

    def start(self) -> Verdict:
        """The loop has just begun."""
        if self.steps.is_coarse:
            said = (
                f"The start: of what TensorFlow takes only whole windows are seen, and it has used up "
                f"{self.steps.batches:,} batches of them so far: too few to tell what limits the loop."
            )
            return Verdict(limit="start", sentence=said)
        said = (
            f"The start: the first batch came after {self.steps.first_waited:.2g} of {self.steps.seconds:.2g} s, and "
            f"{_counted(self.steps.batches, 'batch is', 'batches are')} too few to tell what limits the others."
        )
        return Verdict(limit="start", sentence=said)

    def restarts(self) -> Verdict:
        """Each step begins an iteration of its own."""
        said = (
            f"Restarts: {self.steps.num_peeks + 1:,} iterations in a row ended after their first batch, which took "
            f"{self.steps.first_waited:.2g} s; next(iter(loader)) begins the epoch anew each time, so make "
            "batches = iter(loader) once and call next(batches)."
        )
        return Verdict(limit="restarts", sentence=said)

    def of(self, stage: str) -> Work:
        """What a stage did."""
        return self.work.get(stage, Work())

    def _waited(self) -> str:
        return f"the loop waited {min(1.0, self.waited / self.seconds):.0%} of the time"

    def model(self) -> Verdict:
        """The loop itself takes the time."""
        part = max(0.0, self.waited) / self.seconds
        figures = f"{max(0.0, self.waited):.2g} of {self.seconds:.2g} s"
        said = f"The model: the loop waited {part:.1%} of the time for data ({figures})."
        return Verdict(limit="model", sentence=said)

    def transform(self) -> Verdict:
        """The user's function takes the time."""
        done = self.of("transform")
        each = done.seconds / max(1, done.count)
        own = max(1e-9, (self.seconds - self.waited) / max(1, self.steps.batches))
        wanted = min(self.num_cores, max(2, math.ceil(each / own)))
        if done.cpu_seconds < _WAITING * done.seconds and not self.num_workers:
            advice = (
                f"it waits rather than computes, so workers_count={4 * self.source.workers_count} would help, unless "
                "all calls wait for one thing"
            )
        elif self.num_workers and done.cpu_seconds < _WAITING * done.seconds:
            advice = "it waits rather than computes, so threads would do: num_workers=0, workers_count=8"
        elif self.num_workers:
            advice = f"num_workers={max(wanted, self.num_workers + 1)} would help if there are cores for them"
        elif self.has_processes:
            advice = f"num_workers={wanted} would run it in processes, which do not share Python's lock"
        else:
            advice = "make it work on whole arrays, or use make_torch_dataloader(num_workers=…), which has processes"
        said = f"Your transform: {self._waited()}, and a call takes {each * 1e3:.3g} ms; {advice}."
        return Verdict(limit="transform", sentence=said)

    def decode(self) -> Verdict:
        """What `decode=` names takes the time."""
        done = self.of("decode bytes")
        rate = self.steps.rows / max(1e-9, done.seconds)
        said = (
            f"decode=: {self._waited()}, and a thread decodes {rate:,.0f} rows/s; decoding once, when the cache is "
            "written (decode_at='write'), or smaller images would help, or more cores."
        )
        return Verdict(limit="decode", sentence=said)

    def copying(self) -> Verdict:
        """The copy to the device takes the time."""
        seconds = self.of("copy").seconds
        said = (
            f"The copy to the device: {self._waited()}, {seconds:.2g} s of it for copies; smaller dtypes, fewer "
            "columns=… or larger batches would help."
        )
        return Verdict(limit="copy", sentence=said)

    def processes(self) -> Verdict:
        """The way from process to process takes the time."""
        said = (
            f"The way from the {self.num_workers} worker processes: {self._waited()}, while they read for "
            f"{sum(done.seconds for done in self.work.values()):.2g} s; num_workers=0 is faster, "
            "as reader threads need no copy between processes."
        )
        return Verdict(limit="processes", sentence=said)

    def handing(self) -> Verdict:
        """The loop's own thread takes the time, to make tensors."""
        names, each = len(self.source.names), self.steps.handing_seconds / max(1, self.steps.batches)
        batch_bytes = self.source.batch_size * element_bytes(self.source)
        if names < _MANY_COLUMNS and batch_bytes < _SMALL_BATCH_BYTES * names:
            said = (
                f"Small batches: {self._waited()}, as each batch of {self.source.batch_size:,} rows takes "
                f"{each * 1e6:.3g} µs to hand over; a larger batch_size would help."
            )
            return Verdict(limit="batches", sentence=said)
        said = (
            f"The columns: {self._waited()}, as to make {names:,} tensors for each batch takes {each * 1e3:.3g} ms; "
            "stack=… makes one tensor of many columns, columns=… reads fewer, a larger batch_size makes fewer batches."
        )
        return Verdict(limit="columns", sentence=said)

    def reading(self, bytes_from_disk: int, bytes_from_copies: int) -> Verdict:
        """The reader threads take the time."""
        seconds = {stage: self.of(stage).seconds for stage in ("open", "fetch", "decode", "gather")}
        total = sum(seconds.values())
        if seconds["fetch"] > 0.5 * total:
            return self._store(bytes_from_copies)
        if seconds["open"] > 0.4 * total:
            return self._files(seconds["open"])
        here = {stage: self.of(stage) for stage in ("open", "decode", "gather")}
        busy = sum(done.seconds for done in here.values())
        worked = sum(done.cpu_seconds for done in here.values()) / max(1e-9, busy)
        num_bytes = self.of("gather").num_bytes
        if bytes_from_disk > 0.2 * num_bytes and worked < 0.8:
            rate = bytes_from_disk / max(1e-9, self.steps.seconds)
            said = (
                f"The disk: {self._waited()}, and {bytes_from_disk / 1e6:,.0f} MB came from it at "
                f"{rate / 1e6:,.0f} MB/s; later epochs come from memory if there is enough, else a faster disk would "
                "help."
            )
            return Verdict(limit="disk", sentence=said)
        small = self.small_pieces()
        if small is not None:
            return small
        own = self.seconds - self.waited
        loop_worked = self.steps.cpu_seconds
        if worked < 0.6 and loop_worked is not None and loop_worked > 0.6 * own > 0.2 * self.seconds:
            return self._lock(worked, busy)
        # As many threads as cores would be busy all the time, if nobody else were.
        at_once = (busy + self.of("transform").seconds) / max(1e-9, self.steps.seconds)
        if worked < 0.6 * min(1.0, self.num_cores / max(1e-9, at_once)):
            return self._crowd(worked, busy)
        cores = self.steps.process_seconds / max(1e-9, self.steps.seconds)
        said = (
            f"Reading: {self._waited()}, and the process used {cores:.1f} of {self.num_cores} cores to read "
            f"{num_bytes / max(1e-9, self.steps.seconds) / 1e6:,.0f} MB/s; fewer columns=…, smaller dtypes or more "
            "cores would help."
        )
        return Verdict(limit="processor", sentence=said)

    def _store(self, bytes_from_copies: int) -> Verdict:
        fetched = self.of("fetch")
        rate = fetched.num_bytes / max(1e-9, self.steps.seconds)
        if self.source.local_cache_dir is not None:
            said = (
                f"The store, as local_cache_dir is being filled: {self._waited()}, and "
                f"{fetched.num_bytes / 1e6:,.0f} MB came at {rate / 1e6:,.3g} MB/s ({bytes_from_copies / 1e6:,.0f} MB "
                "from this host's copies); the next epoch comes from this host's disk."
            )
            return Verdict(limit="cold cache", sentence=said)
        said = (
            f"The store: {self._waited()}, and {fetched.num_bytes / 1e6:,.0f} MB came at {rate / 1e6:,.3g} MB/s; a "
            "local_cache_dir would keep them on this host's disk for later epochs."
        )
        return Verdict(limit="store", sentence=said)

    def _files(self, seconds: float) -> Verdict:
        manifest = self.source.manifest
        rows = manifest.num_rows // max(1, len(manifest.file_names))
        files = _counted(len(manifest.file_names), "file", "files")
        said = (
            f"The files: {self._waited()}, and opening {files} of about {rows:,} rows took "
            f"{seconds:.2g} s; fewer, larger files would help (make_spark_converter, or OPTIMIZE of a Delta table)."
        )
        return Verdict(limit="files", sentence=said)

    def _lock(self, worked: float, busy: float) -> Verdict:
        instead = "num_workers=1 would read in another process" if self.has_processes else "call compiled code instead"
        said = (
            f"Your loop holds Python's lock: {self._waited()}, and the readers worked only {worked:.0%} of their "
            f"{busy:.2g} s; {instead}."
        )
        return Verdict(limit="lock", sentence=said)

    def _crowd(self, worked: float, busy: float) -> Verdict:
        said = (
            f"Other programs on this machine: {self._waited()}, and the readers had a processor for only {worked:.0%} "
            f"of their {busy:.2g} s; fewer programs at once, or more cores, would help."
        )
        return Verdict(limit="other programs", sentence=said)

    def small_pieces(self) -> Verdict | None:
        """Whether the files are cut too small, and where; None if they are not."""
        source, manifest = self.source, self.source.manifest
        if source.parts or not manifest.num_row_groups:
            return None
        num_rows = manifest.num_rows / manifest.num_row_groups
        group_bytes = bytes_decoded(source, int(num_rows))
        num_columns = len(source.stored_fields)
        if num_columns >= _MANY_COLUMNS and group_bytes / num_columns < _SMALL_CHUNK_BYTES:
            said = (
                f"The columns: {self._waited()}, as each row group has {num_columns:,} columns of "
                f"{group_bytes / num_columns / 1e3:.3g} kB; fewer columns=…, one array instead of many columns, or "
                "larger row groups would help."
            )
            return Verdict(limit="columns", sentence=said)
        windows = max(1, self.of("gather").count)
        usual = default_window_rows(manifest.num_rows, int(manifest.row_group_bytes.sum()))
        window_bytes = self.of("gather").num_bytes / windows
        is_chosen = source.window_rows < min(usual, num_rows * 8, manifest.num_live_rows)
        if is_chosen and window_bytes < _SMALL_PIECE_BYTES:
            said = (
                f"The windows: {self._waited()}, as {windows:,} windows of {window_bytes / 1e3:,.3g} kB were read one "
                f"by one; leave shuffle_window_rows={source.window_rows:,} out (then it is {usual:,})."
            )
            return Verdict(limit="windows", sentence=said)
        if group_bytes >= _SMALL_PIECE_BYTES:
            return None
        if len(manifest.file_names) > 0.5 * manifest.num_row_groups:
            return self._files(self.of("open").seconds)
        said = (
            f"The row groups: {self._waited()}, as they have {num_rows:,.0f} rows ({group_bytes / 1e3:,.3g} kB); "
            "larger ones would help (make_spark_converter writes them, or set parquet.block.size in Spark)."
        )
        return Verdict(limit="row groups", sentence=said)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
