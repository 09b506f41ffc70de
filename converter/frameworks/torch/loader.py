"""Batches as torch tensors: a real `torch.utils.data.DataLoader`, with or without worker processes.

Reader threads make the batches, so the loader is fast without processes. `num_workers` is for a transform that holds
the GIL: one item of work is then a run of batches, and the order is the same for any number of workers.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from converter.arguments import check_flag, check_integer
from converter.errors import ConverterError
from converter.frameworks.torch.tensors import (
    Batch,
    Placement,
    identity,
    in_few_memories,
    make_tensors,
    split_run,
    torch_batches,
    whole_run,
)
from converter.frameworks.torch.workers import (
    Packed,
    Turns,
    check_pickles,
    check_temp_dir,
    close_at_exit,
    end_begun,
    end_broken,
    end_with_parent,
    end_workers,
    finish_imports,
    is_starting_process,
    kept_from_children,
    one_at_a_time,
    signals_wait,
)
from converter.loading.batches import numpy_batches
from converter.loading.epochs import BatchesOf, Epochs, as_generator
from converter.loading.progress import follow
from converter.loading.stats import LoaderStats, stats_of
from converter.plan import EpochPlan
from converter.reading.bounds import is_plain
from converter.reading.data_files import DataFiles
from converter.reading.decoding import parts_of_run
from converter.reading.source import BatchSource
from converter.reading.windows import open_files, read_runs
from converter.state import Past


class TorchDataLoader(DataLoader[Batch]):
    """A `torch.utils.data.DataLoader` whose batches are `dict[str, torch.Tensor]` of shape `(rows, *field.shape)`.

    `DatasetConverter.make_torch_dataloader` makes one. Dates are int32 days and times int64 microseconds since 1970
    (UTC), strings and bytes are lists. Tensors belong to the caller and are writable. `len()` is the number of batches
    of one iteration, known before the first row is read.

    ```python
    loader = converter.make_torch_dataloader(batch_size=2, columns=["x"], drop_last=True)
    loader.set_epoch(3)
    for batch in loader:
        saved = loader.state_dict()  # JSON or torch.save
        break
    print(loader.stats())  # what limits the loop
    loader.load_state_dict(saved)
    print(loader.remaining, "of", len(loader), "batches of", loader.batch_size, loader.drop_last, loader.pin_memory)
    loader.close()  # or a `with` block
    ```
    """

    def __init__(
        self,
        source: BatchSource,
        *,
        num_epochs: int | None,
        num_workers: int = 0,
        persistent_workers: bool = False,
        multiprocessing_context: Any = None,
        device: Any = None,
        pin_memory: bool | None = None,
        dataset: Any = None,  # noqa: ARG002 (see below)
        sampler: None = None,  # noqa: ARG002
        batch_sampler: None = None,  # noqa: ARG002
    ) -> None:
        num_workers = check_integer("num_workers", num_workers, least=0)
        check_flag("persistent_workers", persistent_workers)
        if persistent_workers and not num_workers:
            raise ValueError("persistent_workers=True needs num_workers above 0.")
        if pin_memory is not None:
            check_flag("pin_memory", pin_memory)
        # Lightning makes a loader again for predictions, from the attributes that have its arguments' names.
        self.source, self.num_epochs, self.device = source, num_epochs, device
        self._turns = Turns(is_one=persistent_workers)
        self._epochs = Epochs(source, num_epochs)
        self._runs = _Runs(self._epochs, is_shared=persistent_workers)
        self._placement = Placement(device, pin_memory)
        if (
            num_workers
            and multiprocessing_context is None
            and not all(storage.survives_fork for storage in source.storages)
        ):
            multiprocessing_context = "spawn"
        if num_workers:
            check_pickles(source, multiprocessing_context)
        super().__init__(
            self._runs,  # type: ignore[arg-type]  # Its items are runs of batches; this class splits them.
            batch_size=None,
            num_workers=num_workers,
            collate_fn=identity,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
        )

    # The base class gets None, so that it does not batch the batches.
    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self._epochs.source.batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """Ignore what the base class assigns."""

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is shorter than the others is left out."""
        return self._epochs.source.drop_last

    @drop_last.setter
    def drop_last(self, value: bool) -> None:
        """Ignore what the base class assigns."""

    # The base class would make one that knows no epochs.
    @property
    def sampler(self) -> Any:
        """An object with `set_epoch`, as Lightning and others look for it here."""
        return _EpochSampler(self._epochs)

    @sampler.setter
    def sampler(self, value: Any) -> None:
        """Ignore what the base class assigns."""

    # The base class must not pin: without worker processes it never sees a batch.
    @property
    def pin_memory(self) -> bool:
        """Whether batches are in page-locked memory, or were copied to their device from it."""
        return self._placement.pins

    @pin_memory.setter
    def pin_memory(self, value: bool) -> None:
        """Ignore what the base class assigns."""

    def __len__(self) -> int:
        self._look_for_shard()
        return len(self._epochs)

    @property
    def remaining(self) -> int:
        """Batches of the next iteration: fewer than `len()` after `load_state_dict`; the `total=` of a tqdm bar.

        Raises:
            TypeError: `num_epochs=None`, so there is no last batch.
        """
        self._look_for_shard()
        return self._epochs.remaining

    def __repr__(self) -> str:
        return self._epochs.describe("TorchDataLoader")

    def _repr_html_(self) -> str:
        return self._epochs.describe_in_html("TorchDataLoader")

    def _look_for_shard(self) -> None:
        self._epochs.look_for_shard()
        self.source = self._runs.source = self._epochs.source

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        self._epochs.check_open()
        self._look_for_shard()
        return self._epochs.iterate(self._batches if self.num_workers == 0 else self._batches_of_workers())

    def __enter__(self) -> TorchDataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every running iteration, its threads and processes. The end of a `with` block calls it."""
        try:
            self._epochs.close()
        finally:
            self._end_workers()

    def stats(self) -> LoaderStats:
        """What the loader did in the iteration that was begun last: printed, it says what limits the loop.

        Call it in the thread of the loop, while it runs or after it has ended.
        """
        return stats_of(self._epochs, num_workers=self.num_workers, has_processes=True)

    def progress(self, description: str | None = None, *, shown: bool | None = None) -> Iterator[Batch]:
        """One iteration with a bar: rows a second, the time left, and which part of its time the loop waited for data.

        ```python
        with converter.make_torch_dataloader(batch_size=2) as loader:
            for batch in loader.progress("train"):
                ...
        ```

        Args:
            description: what stands before the bar; the number of the epoch by default.
            shown: whether the bar is shown; by default in a terminal and in a notebook, if tqdm is installed.

        Raises:
            MissingDependencyError: `shown=True` and tqdm is not installed.
        """
        return follow(self, self._epochs, self.stats, description, shown)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin with this epoch, counted from 0.

        Raises:
            ValueError, TypeError: `epoch` is not a whole number of at least 0.
        """
        self._epochs.set_next(epoch)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position after the last batch that you received, as a few integers that JSON can hold.

        All ranks that take equal steps have the same state, so one of them may save it. Another loader may load it
        with another number of shards, batch size, columns or workers, and continues with the next unread row. Rows,
        seed, shuffle, window and `uneven` must be the same.

        With `uneven="keep"` some ranks may take more batches than others. Then they have the same state only within
        an epoch: pass `num_epochs=1` and iterate once for each epoch, or let each rank save and load its own.

        Args:
            batches: return the state after this many batches of the iteration instead, for code that reads ahead.

        Raises:
            ValueError, TypeError: `batches` is not a whole number, or more than one iteration has.
        """
        return self._epochs.state_dict(batches)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration begin where the state was taken, at the cost of reading one window.

        `len()` does not change, because it counts whole epochs; `remaining` is what is left.

        Raises:
            StateMismatchError: the state is of other rows or another order; the message says what differs.
        """
        self._epochs.load_state_dict(state_dict)

    def _batches(self, plan: EpochPlan) -> Iterator[Batch]:
        source, files, meter = self._epochs.source, self._epochs.files, self._epochs.meter
        if source.transform is not None:
            tensors = (make_tensors(batch) for batch in numpy_batches(source, plan, files))
            yield from self._placement.place(tensors, meter)
            return
        with contextlib.closing(as_generator(read_runs(source, plan, files))) as runs:
            if not self._placement.is_needed:
                for run in runs:
                    yield from torch_batches(source, run)
                return
            # Runs of fixed shapes are copied as a whole, one copy per column; others batch by batch.
            if _has_fixed_shapes(source):
                placed = self._placement.place(((whole_run(run), run) for run in runs), meter)
                for columns, run in placed:
                    yield from split_run(columns, run.batch_size)
                return
            yield from self._placement.place((batch for run in runs for batch in torch_batches(source, run)), meter)

    def _batches_of_workers(self) -> BatchesOf:
        items: Any = None
        turn = epochs_done = 0

        def batches_of(plan: EpochPlan) -> Iterator[Batch]:
            nonlocal items, turn, epochs_done
            if items is None:
                epochs_done = self._epochs.next.epochs_done
                with self._turns.alone():
                    items, turn = self._start_workers(), self._turns.begin()
            left = plan.num_batches
            try:
                while left:
                    with self._epochs.meter.blocking("workers"):
                        parts, worker, work = self._turns.next_of(items, turn)
                    self._epochs.meter.report(worker, work)
                    for columns, batch_size in parts:
                        for batch in split_run(columns, batch_size) if batch_size else (columns,):
                            left -= 1
                            yield batch
                epochs_done += 1
                if epochs_done == self._epochs.num_epochs and not self.persistent_workers:
                    # Where they are freed a Ctrl-C would be lost.
                    self._end_workers(items)
                    items = None
            except BaseException as error:
                # Persistent workers outlive an iteration that stops early. Others end now: a traceback would hold them.
                is_reused = self.persistent_workers and (isinstance(error, GeneratorExit) or self._turns.is_over(turn))
                if not is_reused:
                    self._end_workers(items)
                items = None
                raise

        return lambda plan: self._placement.place(batches_of(plan), self._epochs.meter)

    def _start_workers(self) -> Any:
        with one_at_a_time():
            begin = self._epochs.next
            # Only now is it known for sure: a process may have joined its group after `iter(loader)`.
            self.source = self._runs.source = self._epochs.source
            if self._runs.begin_at(begin.epoch, begin.epochs_done, begin.past):
                # Running workers were started with another position.
                self._end_workers()
            end_broken(self)
            self._runs.is_own = True
            close_at_exit(self)
            check_temp_dir()
            finish_imports()
            try:
                with signals_wait():
                    return kept_from_children(self, super().__iter__())
            except BaseException as error:
                end_begun(error)
                self._end_workers()
                raise
            finally:
                self._runs.is_own = False

    def _end_workers(self, items: Any = None) -> None:
        """End the worker processes of an iteration, or the persistent ones, now.

        Reaches into: DataLoader._iterator (torch 2.4 to 2.15).
        Without it: persistent workers go on until the loader is freed.
        """
        kept = getattr(self, "_iterator", None)
        items = kept if items is None else items
        end_workers(items)
        if items is kept:
            self._iterator = None


class _EpochSampler(Sampler[None]):
    """A sampler whose `set_epoch` reaches the loader: Lightning and others call it on `loader.sampler`."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs

    def __iter__(self) -> Iterator[None]:
        # The base class takes one index per item; an iterable dataset ignores it.
        while True:
            yield None

    def set_epoch(self, epoch: int) -> None:
        """Let the loader's next iteration begin with this epoch, unless a state was loaded that is further on.

        Of several loaders at once a short one is in a later epoch than the training, which begins it again and again.
        """
        epochs, training = self._epochs, self._epochs.training_epoch
        is_later = training is not None and epoch > training
        if not epochs.is_resumed or is_later or epoch > epochs.next.epoch:
            epochs.set_next(epoch, anew=is_later)

    def follow(self, epoch: int) -> None:
        """Be told the epoch of a resumed training: a later one that it names begins with its first row."""
        self._epochs.training_epoch = epoch


_Part = tuple[Batch, int]
"""Columns, and how many rows of them are a batch: the trainer splits them. 0 if they are one batch."""


class _Runs(IterableDataset[Packed]):
    """The dataset that worker processes iterate: each yields every `num_workers`-th run of batches.

    An item is the run's parts, the number of the process, and what that has done until then.
    """

    def __init__(self, epochs: Epochs, *, is_shared: bool) -> None:
        self.source = epochs.source
        self._num_epochs = epochs.num_epochs
        self._past: Past = ()
        self._is_shared, self._pid = is_shared, os.getpid()
        self._begin = self._new_begin()
        self.is_own = False
        """Whether our own loader iterates: any other would take runs for rows."""

    def _new_begin(self) -> torch.Tensor | list[int]:
        """An epoch, and how many are done: shared with workers that outlive an iteration, and no others."""
        return torch.zeros(2, dtype=torch.int64).share_memory_() if self._is_shared else [0, 0]  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        # A pickled source has no credentials, but workers need them. They travel only while a process is started:
        # any other pickle may end up anywhere.
        options = [storage.options for storage in self.source.storages] if is_starting_process() else None
        return {**self.__dict__, "storage_options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options = state.pop("storage_options")
        self.__dict__.update(state)
        if options is not None:
            for storage, own in zip(self.source.storages, options, strict=True):
                storage.lend(own)
        if isinstance(self._begin, torch.Tensor):
            self._begin.share_memory_()  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Runs:
        memo[id(self)] = copied = _Runs.__new__(_Runs)
        # A copy stays in this process, so it may keep the credentials.
        options = [storage.options for storage in self.source.storages]
        copied.__setstate__({**copy.deepcopy(self.__dict__, memo), "storage_options": options})
        return copied

    def begin_at(self, epoch: int, epochs_done: int, past: Past) -> bool:
        """Let the next iteration begin there; True if running workers cannot learn of it."""
        if self._pid != os.getpid():
            # Another process was given this loader, and both have workers.
            self._begin, self._pid = self._new_begin(), os.getpid()
        has_other_past, self._past = past != self._past, past
        self._begin[0], self._begin[1] = epoch, epochs_done
        return has_other_past

    def __iter__(self) -> Iterator[Packed]:
        if not self.is_own:
            raise ConverterError(
                "Iterate the loader of make_torch_dataloader itself: another DataLoader around its dataset would batch "
                "and shard a second time. With Accelerate, do not pass it to prepare(): make it with "
                "device=accelerator.device, cur_shard=accelerator.process_index, "
                "shard_count=accelerator.num_processes."
            )
        end_with_parent()
        return self._items()

    def _items(self) -> Iterator[Packed]:
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        epochs = Epochs(self.source, self._num_epochs)
        epoch, epochs_done = map(int, self._begin)
        epochs.begin_at(epoch, epochs_done, self._past)
        item, files = 0, open_files(self.source, count)
        for _, plan in epochs.plans(epochs.next):
            for run in plan.batch_runs():
                for batches in _ranges_of_run(self.source, run):
                    if item % count == index:
                        parts = list(_parts_in(self.source, plan, files, batches))
                        sent = in_few_memories([columns for columns, _ in parts])
                        sizes = [batch_size for _, batch_size in parts]
                        yield Packed((list(zip(sent, sizes, strict=True)), index, files.meter.work))
                    item += 1


_PARTS = 8
"""How often a worker process sends batches of a window."""


def _ranges_of_run(source: BatchSource, run: range) -> Iterator[range]:
    """What a worker process reads, and then sends at once.

    A transform may be slow, so the first batches should not wait for those of a whole window: where pages are plain
    memory, rows are read part by part at the cost of all at once.
    """
    for batches in parts_of_run(source, run):
        step = len(batches)
        if source.transform is not None and not source.parts and source.sequences is None and is_plain(source):
            step = -(-step // _PARTS)
        for start in range(batches.start, batches.stop, step):
            yield range(start, min(start + step, batches.stop))


def _parts_in(source: BatchSource, plan: EpochPlan, files: DataFiles, batches: range) -> Iterator[_Part]:
    if source.transform is not None:
        for batch in numpy_batches(source, plan, files, batches):
            yield make_tensors(batch), 0
        return
    for run in read_runs(source, plan, files, batches):
        if _has_fixed_shapes(source):
            # One tensor of each column costs little to send; one of each batch costs more than to read it.
            yield whole_run(run), run.batch_size
        else:
            for batch in torch_batches(source, run):
                yield batch, 0


def _has_fixed_shapes(source: BatchSource) -> bool:
    return all(not source.is_variable(name) for name in source.names)
