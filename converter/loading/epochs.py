"""Which epoch comes next, how many of its batches were handed over, and how that state is saved and loaded.

An iteration that runs to its end moves the loader to the next epoch. One that stops early does not, so ranks cannot
drift apart; `set_epoch` names the epoch outright. A state counts the batches that were handed over, not those that
were read ahead.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from converter.arguments import check_integer
from converter.errors import ConverterError
from converter.exits import end_of_program
from converter.living import Living
from converter.loading.agreement import check_agreement
from converter.loading.forecast import check_steps, log_shards_apart, log_uneven_shards
from converter.loading.steps import Steps
from converter.markup import facts
from converter.plan import EpochPlan
from converter.positions import remaining_positions
from converter.reading.ahead import BEGUN_ELSEWHERE, close_generator
from converter.reading.data_files import DataFiles
from converter.reading.meter import Meter
from converter.reading.source import BatchSource
from converter.reading.windows import open_files
from converter.shards import find_shard, look_for_shard, require_own_shard
from converter.state import MAX_EPOCH, Past, State
from converter.storage.requests import GivenUpError

_MAX_SHOWN = 5

BatchesOf = Callable[[EpochPlan], Iterator[Any]]
"""Yields the batches of a plan in order."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Progress:
    """Where an iteration stands."""

    epoch: int
    past: Past
    epochs_done: int
    num_batches: int = 0
    """Batches of this epoch that the user received."""


class Epochs:
    """The epochs of one loader: the next one, the running iteration, and its state."""

    def __init__(self, source: BatchSource, num_epochs: int | None) -> None:
        self.source = source
        self.num_epochs = num_epochs
        self.next = _Progress(epoch=0, past=(), epochs_done=0)
        """Where the next iteration begins."""

        self.is_resumed = False
        """Whether it begins where a state was taken that was loaded."""

        self.training_epoch: int | None = None
        """The epoch of a resumed training, if somebody has told it: a loader may be in a later one."""

        self._progress: _Progress | None = None
        """Of the iteration that handed out the last batch; None if the state is that of the next one."""

        self._begin: _Progress | None = self.next
        """Where that iteration began; None once another one was asked for, which then begins at `next`."""

        self._set = object()
        """Another one each time that a state is loaded: what the iterations before it still give has none."""

        self._closed = self._is_checked = self._has_warned = False
        self._begun_in: int | None = None
        """The process that has begun an iteration, so that its shard is settled. A forked process begins anew."""

        self._running: Living[Iteration] = Living()
        self._files: tuple[int, DataFiles] | None = None
        self._meter = (os.getpid(), Meter())
        self.steps = Steps(self.meter)
        """Of the iteration that was begun last."""

    @property
    def files(self) -> DataFiles:
        """The data files, which stay open until the loader is closed."""
        self.check_open()
        pid = os.getpid()
        # After a fork, their lock may be held by a thread that exists only in the parent.
        if self._files is None or self._files[0] != pid:
            files = open_files(self.source)
            for part in (files, *files.parts):
                part.meter = self.meter
            self._files = (pid, files)
        return self._files[1]

    @property
    def meter(self) -> Meter:
        """What this process's readers did in the iteration that was begun last."""
        pid = os.getpid()
        # As with the files: its lock may be held by a thread of the parent.
        if self._meter[0] != pid:
            self._meter = (pid, Meter())
        return self._meter[1]

    @property
    def grown_bytes(self) -> int | None:
        """By how much the process has grown since the files were opened; None if unknown."""
        return None if self._files is None else self._files[1].room.grown_bytes

    def __len__(self) -> int:
        if self.num_epochs is None:
            raise TypeError(
                "With num_epochs=None there is no last batch, so there is no length. Pass num_epochs=1 or more for one."
            )
        self.look_for_shard()
        return self.source.num_batches() * self.num_epochs

    def plans(self, begin: _Progress) -> Iterator[tuple[_Progress, EpochPlan]]:
        """Yield the epochs of one iteration; the first may begin in the middle."""
        at = begin
        while self.num_epochs is None or at.epochs_done < self.num_epochs:
            yield at, self.source.plan(at.epoch, at.past)
            at = _Progress(epoch=at.epoch + 1, past=(), epochs_done=at.epochs_done + 1)

    def iterate(self, batches_of: BatchesOf) -> Iteration:
        """Begin one iteration. When it runs to its end, the next one takes the next epoch."""
        self.check_open()
        self._begin, steps = None, Steps(self.meter)
        return self.begun(self._iterate(batches_of, steps), steps)

    def begun(self, generator: Generator[Any, None, Any], steps: Steps | None = None) -> Iteration:
        """An iteration that `close` ends, too."""
        iteration = Iteration(self, generator, steps)
        self._running.add(iteration)
        return iteration

    def begin_steps(self, steps: Steps) -> None:
        """Let `steps` be those of an iteration that begins now."""
        steps.follow(self.steps)
        self.steps = steps

    def _iterate(self, batches_of: BatchesOf, steps: Steps) -> Generator[Any, None, None]:
        self.begin_steps(steps)
        self.look_for_shard()
        self.settle_shard()
        # Read at the first batch: Lightning makes the iterator before it calls `set_epoch`.
        begin, own = self.next, self._set
        self._check_ranks(begin)
        for at, plan in self.plans(begin):
            progress = replace(at)
            if self._set is own:
                self._progress, self._begin = progress, begin
            steps.count(plan, progress)
            try:
                with contextlib.closing(as_generator(batches_of(plan))) as batches:
                    for batch in batches:
                        progress.num_batches += 1
                        if self._set is own:
                            # Again with each batch: another iteration may have begun, or ended, meanwhile.
                            self._progress, self._begin = progress, begin
                        yield batch
            except GeneratorExit:
                steps.end()
                raise
        steps.end()
        if self.next is begin:
            self.move_on()
        elif self._set is own:
            self._progress = None

    def _check_ranks(self, begin: _Progress) -> None:
        """Raise ConverterError, once on all ranks, if they would not read parts of one shuffled epoch."""
        source = self.source
        if self._is_checked or not source.is_shard_found or source.shard.count == 1 or source.shuffle is None:
            return
        self._is_checked = True
        what = {
            "the rows (fingerprint)": source.manifest.live_fingerprint,
            "batch_size": source.batch_size,
            "seed": source.seed,
            "shuffle_window_rows": source.windows or source.window_rows,
            "uneven": source.uneven,
            "drop_last": source.drop_last,
            "bucket_by": source.bucket_order,
            "num_epochs": self.num_epochs,
            "the epoch": begin.epoch,
            "the saved state": begin.past,
        }
        check_agreement(what, source.shard.index, source.shard.count)

    def move_on(self) -> None:
        """Let the next iteration begin after the one that has ended."""
        if self.num_epochs is not None:
            begin = self.next
            self.next = _Progress(epoch=begin.epoch + self.num_epochs - begin.epochs_done, past=(), epochs_done=0)
            self._progress, self.is_resumed = None, False

    def begin_at(self, epoch: int, epochs_done: int, past: Past) -> None:
        """Let the next iteration begin inside an epoch."""
        self._progress, self._set = None, object()
        self.next = self._begin = _Progress(epoch=epoch, past=past, epochs_done=epochs_done)

    def set_next(self, epoch: int, *, anew: bool = False) -> None:
        """Let the next iteration begin with `epoch`: where a loaded state is, if it is in there, unless `anew`."""
        epoch = check_integer("epoch", epoch, least=0)
        if epoch >= MAX_EPOCH:
            raise ValueError(f"epoch must be below 2**62, got {epoch}.")
        self._progress = None
        if anew or epoch != self.next.epoch:
            self.next, self.is_resumed = _Progress(epoch=epoch, past=(), epochs_done=0), False
        else:
            # Another object: the end of an iteration that began there before does not move this one.
            self.next = replace(self.next)
        self._begin = self.next

    def state_after(self, begin: _Progress, batches: int) -> dict[str, Any]:
        """The state `batches` after the place where an iteration began, across as many iterations as needed."""
        at = begin
        while True:
            num_batches = self.source.plan(at.epoch, at.past).num_batches
            is_last = at.epochs_done + 1 == self.num_epochs
            if batches < num_batches or (batches == num_batches and not is_last) or not self.source.num_batches():
                return self._state(at, batches)
            batches -= num_batches
            at = _Progress(epoch=at.epoch + 1, past=(), epochs_done=0 if is_last else at.epochs_done + 1)

    def state_dict(self, batches: int | None = None, begin: _Progress | None = None) -> dict[str, Any]:
        """The state of the running (or stopped) iteration, else of the next one; see `BatchReader`.

        Batches count from `begin`, else from where the iteration began that began last, even if it has ended.
        """
        if self._begun_in != os.getpid():
            self.look_for_shard()
        at = self._progress or self.next
        if batches is None:
            return self._state(at, at.num_batches)
        batches = check_integer("batches", batches, least=0)
        for at, plan in self.plans(begin or self._begin or self.next):
            if batches <= plan.num_batches:
                return self._state(at, batches)
            batches -= plan.num_batches
        raise ValueError(f"batches: one iteration has {len(self)} batches, got {batches} more than that.")

    def _state(self, at: _Progress, num_batches: int) -> dict[str, Any]:
        source = self.source
        if source.uneven == "keep" and self.num_epochs != 1 and not self._has_warned:
            self._has_warned = log_shards_apart(source, at.epochs_done, num_batches)
        begin = replace(source.state(at.epoch), epochs_done=at.epochs_done, past=at.past)
        return begin.after(source.shard.count, num_batches * source.batch_size).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin where `state` was taken."""
        loaded = State.from_dict(state)
        loaded.check(self.source.state(loaded.epoch))
        # Checked here rather than while reading: a state may hold anything.
        num_rows = self.source.manifest.num_live_rows
        remaining_positions(num_rows, loaded.past, epoch=loaded.epoch, uneven=self.source.uneven)
        # A loader with fewer epochs than the saved one still reads the rest of this epoch.
        most = loaded.epochs_done if self.num_epochs is None else self.num_epochs - 1
        self.begin_at(loaded.epoch, min(loaded.epochs_done, most), loaded.past)
        self.is_resumed, self.training_epoch = True, None

    def check_open(self) -> None:
        """Raise ConverterError if the loader was closed."""
        if self._closed:
            raise ConverterError("This loader was closed: its `with` block has ended. Make a new one.")

    def look_for_shard(self) -> None:
        """Look for this process's shard again, unless the user named one or an iteration has begun.

        So a loader may be made before torch.distributed is initialised, as users of Lightning do.
        """
        if self._begun_in == os.getpid():
            self.check_shard()
        elif self.source.is_shard_found and self.source.shard.count == 1 and look_for_shard()[0].count > 1:
            source = replace(self.source, shard=find_shard())
            check_steps(source, self.num_epochs)
            log_uneven_shards(source)
            self.source, self._files = source, None

    def settle_shard(self) -> None:
        """Keep this process's shard from now on."""
        self._begun_in = os.getpid()

    def check_shard(self) -> None:
        """`require_own_shard`, unless the user named the shard."""
        if self.source.is_shard_found:
            require_own_shard(self.source.shard)

    @property
    def remaining(self) -> int:
        """The batches of the next iteration; see `BatchReader.remaining`."""
        num_batches = len(self)
        begin = self.next
        left = self.source.plan(begin.epoch, begin.past).num_batches
        return num_batches - self.source.num_batches() * (begin.epochs_done + 1) + left

    def describe(self, kind: str, names: Sequence[str] | None = None) -> str:
        """A loader's repr: one line, also after it was closed."""
        told = _told(self, names)
        epochs = "" if self.num_epochs == 1 else f" × {told['epochs']} epochs"
        part = f"shard {told['shard']}, " if told["shard"] else ""
        closed = ", closed" if self._closed else ""
        return (
            f"{kind}({told['rows']} rows in {told['batches']}{epochs}, columns {told['columns']}, "
            f"{part}{told['order']}, epoch {self.next.epoch}{closed})"
        )

    def describe_in_html(self, kind: str, names: Sequence[str] | None = None) -> str:
        """The same as a table."""
        state = "closed" if self._closed else f"begins with epoch {self.next.epoch}"
        return f"<p>{kind}</p>{facts([*_told(self, names).items(), ('next iteration', state)])}"

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no running iteration.
        kept = {"source": self.source, "num_epochs": self.num_epochs, "next": self.next}
        kept |= {"is_resumed": self.is_resumed, "training_epoch": self.training_epoch, "_closed": self._closed}
        return {**kept, "_begun_in": None, "_progress": None, "_files": None, "_is_checked": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin, self._set, self._has_warned = self.next, object(), False
        self._running = Living()
        self._meter = (os.getpid(), Meter())
        self.steps = Steps(self.meter)

    def close(self) -> None:
        """End every running iteration and its threads, and refuse new ones.

        Another thread that waits for a batch receives that one first, unless it takes seconds.
        """
        self._closed = True
        for iteration in self._running:
            iteration.close()
        files, self._files = self._files, None
        if files is not None and files[0] == os.getpid():
            files[1].close()

    def give_up(self) -> None:
        """End the requests under way if the loader is closed: who waits for their rows gets an error."""
        # Else other iterations go on, with the same files.
        if self._closed and self._files is not None and self._files[0] == os.getpid():
            self._files[1].give_up()


def _told(epochs: Epochs, names: Sequence[str] | None) -> dict[str, str | None]:
    """What a loader says of itself, by name."""
    source, shard = epochs.source, epochs.source.shard
    shown = list(source.names if names is None else names)
    more = f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    plan = source.plan(epochs.next.epoch)
    order = f"shuffled in windows of {source.window_rows:,} rows, seed {source.seed}"
    return {
        "rows": f"{plan.num_rows:,}",
        "batches": f"{plan.num_batches:,} batches of {source.batch_size:,}",
        "epochs": "∞" if epochs.num_epochs is None else f"{epochs.num_epochs}",
        "columns": ", ".join(shown[:_MAX_SHOWN]) + more,
        "shard": f"{shard.index} of {shard.count}" if shard.count > 1 else None,
        "order": order if source.shuffle else "in order",
    }


def as_generator(batches: Iterator[Any]) -> Generator[Any, None, None]:
    """The same iterator as a generator, so that it can be closed."""
    if isinstance(batches, Generator):
        return batches
    return (batch for batch in batches)


class Iteration:
    """One pass over a loader. If the loader is closed meanwhile, it raises: stopping would look like a short epoch."""

    def __init__(self, epochs: Epochs, generator: Generator[Any, None, Any], steps: Steps | None = None) -> None:
        self._epochs = epochs
        self._generator = generator
        self._steps = steps
        self._pid = os.getpid()
        self._is_closed = False

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        if self._pid != os.getpid():
            # Its reader threads are not in this process, so it would wait for ever.
            raise ConverterError(BEGUN_ELSEWHERE)
        steps = self._steps
        try:
            if steps is None or not steps.every.is_next():
                return next(self._generator)
            asked = steps.ask()
            batch = next(self._generator)
        except (StopIteration, GivenUpError):
            self._epochs.check_open()
            raise
        except RuntimeError as error:
            if (ended := end_of_program(error)) is None:
                raise
            raise ended from error
        except ValueError:
            if not self._is_closed:
                raise
            # Another thread is closing the generator.
            self._epochs.check_open()
            raise StopIteration from None
        steps.receive(asked)
        return batch

    def close(self) -> None:
        """End it and its threads. Another thread that waits for a batch receives that one first."""
        self._is_closed = True
        generator: Any = self._generator
        self._generator = _no_batches()
        if not _is_in(generator):
            close_generator(generator, self._epochs.give_up)


def _no_batches() -> Generator[Any, None, None]:
    yield from ()


def _is_in(generator: Any) -> bool:
    """Whether this thread is running the generator: a signal handler closes it, which then ends with its next step."""
    frame = inspect.currentframe()
    while frame is not None and frame is not generator.gi_frame:
        frame = frame.f_back
    return frame is not None
