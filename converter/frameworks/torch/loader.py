"""Batches as torch tensors, through a real `torch.utils.data.DataLoader`.

Batches are made by our own threads, so the loader needs no processes to be fast.
`num_workers` is for a transform that holds the GIL: then one item of work is a
run of batches, and the order is the same for any number of workers.

Tensors of a window are split, not sliced, into batches: 2.0 µs a tensor against
3.3, and `unsafe_split`, so that a write into one batch does not count as a write
into the others (they would share a version counter). For the same reason a
window goes to a device as a whole: one copy for each column, not for each batch.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from converter.errors import ConverterError
from converter.frameworks.torch.tensors import (
    Batch,
    Placement,
    identity,
    make_tensors,
    split_run,
    torch_batches,
    whole_run,
)
from converter.loading.batches import numpy_batches
from converter.loading.epochs import BatchesOf, Epochs, as_generator
from converter.plan import EpochPlan
from converter.reading.data_files import DataFiles
from converter.reading.source import BatchSource
from converter.reading.windows import open_files, read_runs
from converter.state import Past


class TorchDataLoader(DataLoader[Batch]):
    """A `DataLoader` whose batches are `dict[str, torch.Tensor]` of shape `(rows, *field.shape)`.

    Dates arrive as int32 days and times as int64 microseconds since 1970 (UTC), strings and bytes as
    lists. Tensors belong to the caller and are writable.

    `len()` is the number of batches of one iteration, known before the first row is read.
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
        # Lightning makes a loader anew for predictions, from attributes of its arguments' names.
        self.source, self.num_epochs, self.device = source, num_epochs, device
        self._turn = 0
        self._epochs = Epochs(source, num_epochs)
        self._runs = _Runs(self._epochs, is_shared=persistent_workers)
        self._placement = Placement(device, pin_memory)
        if num_workers and multiprocessing_context is None and not source.storage.survives_fork:
            multiprocessing_context = "spawn"
        if num_workers:
            _check_travels(source, multiprocessing_context)
        super().__init__(
            self._runs,  # type: ignore[arg-type]  # Its items are runs; this class unrolls them.
            batch_size=None,
            num_workers=num_workers,
            collate_fn=identity,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
        )

    # The base class keeps None here, because it must not batch again what is a batch already.
    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self._epochs.source.batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """Accept what the base class assigns when it is built; the source decides."""

    @property
    def drop_last(self) -> bool:
        """Whether a last batch that is shorter than the others is left out."""
        return self._epochs.source.drop_last

    @drop_last.setter
    def drop_last(self, value: bool) -> None:
        """Accept what the base class assigns when it is built; the source decides."""

    # The base class makes one that knows no epochs.
    @property
    def sampler(self) -> Any:
        """What frameworks look for, to tell it the epoch."""
        return _EpochSampler(self._epochs)

    @sampler.setter
    def sampler(self, value: Any) -> None:
        """Accept what the base class assigns when it is built."""

    # The base class must not pin: where there are no worker processes, it never sees a batch.
    @property
    def pin_memory(self) -> bool:
        """Whether batches stand in page-locked memory (or came from it, where they are on a device)."""
        return self._placement.pins

    @pin_memory.setter
    def pin_memory(self, value: bool) -> None:
        """Accept what the base class assigns."""

    def __len__(self) -> int:
        self._look_for_shard()
        return len(self._epochs)

    @property
    def remaining(self) -> int:
        """The batches of the next iteration: fewer than `len()` after `load_state_dict`.

        `tqdm(loader, total=loader.remaining)` shows a bar that ends where the iteration does.
        """
        self._look_for_shard()
        return self._epochs.remaining

    def __repr__(self) -> str:
        return self._epochs.describe("TorchDataLoader")

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
        """End what is under way, with its threads and processes; the end of a `with` block does it."""
        self._epochs.close()
        self._end_workers(self._iterator)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin with this epoch."""
        self._epochs.set_next(epoch)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where this loader stands, as a handful of integers: after the last batch that was received.

        The same on all ranks that take equal steps, so one of them may save it. It can be loaded where the number of
        shards, the batch size, the columns or the workers are others, and continues with the next row that nobody
        has read; it belongs to these rows, this seed, shuffle, window and `uneven`.

        Args:
            batches: the state as it will be after so many batches of the iteration: for those who read ahead of what
                they use.
        """
        return self._epochs.state_dict(batches)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration begin where the state was taken, at the cost of reading one window.

        `len()` stays that of whole epochs; `remaining` is what is left.

        Raises:
            StateMismatchError: the state is of other rows or another order; the message says what differs.
        """
        self._epochs.load_state_dict(state_dict)

    def _batches(self, plan: EpochPlan) -> Iterator[Batch]:
        source, files = self._epochs.source, self._epochs.files
        if source.transform is not None:
            yield from self._placement.place(make_tensors(batch) for batch in numpy_batches(source, plan, files))
            return
        with contextlib.closing(as_generator(read_runs(source, plan, files))) as runs:
            if not self._placement.is_needed:
                for run in runs:
                    yield from torch_batches(source, run)
                return
            # Runs of fixed shapes are placed as a whole, one copy for each column; the rest batch by batch.
            if all(not source.is_variable(name) for name in source.names):
                placed = self._placement.place((whole_run(run), run) for run in runs)
                for columns, run in placed:
                    yield from split_run(columns, run)
                return
            yield from self._placement.place(batch for run in runs for batch in torch_batches(source, run))

    def _batches_of_workers(self) -> BatchesOf:
        items: Any = None
        turn = 0

        def batches_of(plan: EpochPlan) -> Iterator[Batch]:
            nonlocal items, turn
            if items is None:
                items = self._start_workers()
                turn = self._turn = self._turn + 1
            left = plan.num_batches
            try:
                while left:
                    if self.persistent_workers and turn != self._turn:
                        raise ConverterError(
                            "Another iteration of this loader has taken its persistent workers. Make a loader for "
                            "each of two iterations, or say persistent_workers=False."
                        )
                    batches = next(items)
                    left -= len(batches)
                    yield from batches
            except BaseException as error:
                # An iteration that is left lets persistent workers live; an error's traceback would hold the others.
                is_left = self.persistent_workers and (isinstance(error, GeneratorExit) or turn != self._turn)
                if not is_left:
                    self._end_workers(items)
                items = None
                raise

        return lambda plan: self._placement.place(batches_of(plan))

    def _start_workers(self) -> Any:
        begin = self._epochs.next
        if self._runs.begin_at(begin.epoch, begin.epochs_done, begin.past):
            # Workers that live on have a past of their own.
            self._end_workers(self._iterator)
        self._runs.is_own = True
        try:
            return super().__iter__()
        finally:
            self._runs.is_own = False

    def _end_workers(self, items: Any) -> None:
        """End worker processes now: left to garbage collection, torch waits five seconds for each of them."""
        if hasattr(items, "_shutdown_workers"):
            items._shutdown_workers()  # noqa: SLF001 (torch has no public way)
        if items is self._iterator:
            self._iterator = None


class _EpochSampler(Sampler[None]):
    """What frameworks that know nothing of `loader.set_epoch` call `set_epoch` on (Lightning does)."""

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs

    def __iter__(self) -> Iterator[None]:
        # The base class asks for an index for each item; an iterable dataset needs none.
        while True:
            yield None

    def set_epoch(self, epoch: int) -> None:
        """Let the loader's next iteration begin with this epoch."""
        self._epochs.set_next(epoch)


class _Runs(IterableDataset[list[Batch]]):
    """What a worker process iterates: every `num_workers`-th run of batches; together they yield them in order."""

    def __init__(self, epochs: Epochs, *, is_shared: bool) -> None:
        self.source = epochs.source
        self._num_epochs = epochs.num_epochs
        self._past: Past = ()
        self._begin = torch.zeros(2, dtype=torch.int64)
        self._is_shared = is_shared
        self._share()
        self.is_own = False
        """Whether it is our own loader that iterates: any other would take runs for rows."""

    def _share(self) -> None:
        # In shared memory where workers outlive an iteration, so that they hear of the next one's epoch.
        if self._is_shared:
            self._begin.share_memory_()  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        # A source leaves the credentials behind, and workers need them. Of what is pickled while no process is being
        # started nobody knows where it goes.
        is_for_worker = multiprocessing.context.get_spawning_popen() is not None
        return {**self.__dict__, "storage_options": self.source.storage.options if is_for_worker else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options = state.pop("storage_options")
        self.__dict__.update(state)
        if options is not None:
            self.source.storage.lend(options)
        self._share()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Runs:
        memo[id(self)] = copied = _Runs.__new__(_Runs)
        # It stays in this process.
        copied.__setstate__({**copy.deepcopy(self.__dict__, memo), "storage_options": self.source.storage.options})
        return copied

    def begin_at(self, epoch: int, epochs_done: int, past: Past) -> bool:
        """Let the next iteration begin there; True where running workers cannot know of it."""
        is_other, self._past = past != self._past, past
        self._begin[0], self._begin[1] = epoch, epochs_done
        return is_other

    def __iter__(self) -> Iterator[list[Batch]]:
        if not self.is_own:
            raise ConverterError(
                "This dataset belongs to the loader of make_torch_dataloader, which makes whole batches and shards "
                "them itself; another DataLoader around it would batch and shard a second time. Iterate the loader "
                "itself. With Accelerate, do not pass it to prepare(): make it with device=accelerator.device and "
                "cur_shard=accelerator.process_index, shard_count=accelerator.num_processes."
            )
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        epochs = Epochs(self.source, self._num_epochs)
        epoch, epochs_done = self._begin.tolist()
        epochs.begin_at(epoch, epochs_done, self._past)
        item, files = 0, open_files(self.source, count)
        for _, plan in epochs.plans(epochs.next):
            for batches in plan.batch_runs():
                if item % count == index:
                    yield list(_batches_in(self.source, plan, files, batches))
                item += 1


def _batches_in(source: BatchSource, plan: EpochPlan, files: DataFiles, batches: range) -> Iterator[Batch]:
    if source.transform is not None:
        return (make_tensors(batch) for batch in numpy_batches(source, plan, files, batches))
    return (batch for run in read_runs(source, plan, files, batches) for batch in torch_batches(source, run))


def _check_travels(source: BatchSource, multiprocessing_context: Any) -> None:
    """Refuse a transform, or a provider of tokens, that worker processes could not be sent."""
    method = multiprocessing_context
    if method is None:
        # Asked otherwise, Python would settle it for good.
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    elif not isinstance(method, str):
        # What is no context torch refuses by that name.
        method = method.get_start_method() if hasattr(method, "get_start_method") else "fork"
    if method == "fork":
        return
    options = {f"storage_options[{name!r}]": option for name, option in source.storage.options.items()}
    for what, one in {"transform": source.transform, **options}.items():
        try:
            pickle.dumps(one)
        except Exception as error:
            instead = "" if what == "transform" else ", give an object of azure-identity"
            raise TypeError(
                f"{what} cannot be sent to worker processes ({method}): {error}. Define it at the top of a "
                f"module{instead}, or say num_workers=0, where it runs in threads."
            ) from error
