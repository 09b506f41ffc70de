"""The `DataLoader` of DeltaTorch's users: batches are made here, many at a time, by threads or worker processes.

Without functions of a user's everything is columns, and reader threads are enough, whatever `num_workers` is. Functions
of rows run in `num_workers` processes, or, with 0, in the thread that iterates.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from converter.deltatorch.batches import Batch, ByColumn, ByRecord, Chunk, cut
from converter.deltatorch.deltadataset import DeltaIterableDataset, draw_epoch
from converter.deltatorch.ranks import Steps, batches_of_worker, plan_steps
from converter.deltatorch.recipes import make_recipe
from converter.deltatorch.rows import Rows, cut_parts
from converter.deltatorch.values import Values
from converter.frameworks.torch.tensors import in_few_memories
from converter.frameworks.torch.workers import (
    Packed,
    end_broken,
    end_with_parent,
    end_workers,
    kept_from_children,
    one_at_a_time,
)

_ITEM_BYTES, _ITEM_ROWS = 1 << 20, 2048
"""The most that a worker process takes to make several batches of before it sends them; a guess."""

_PICTURE_BYTES = 2048
"""Rows of more bytes may be pictures, which functions make many times larger: each batch is sent alone."""

_MOST_BATCHES = 256
"""Batches that are cut at once: thousands of new tensors would start Python's garbage collector."""

_FOR_WORKERS = (
    "multiprocessing_context", "persistent_workers", "pin_memory", "pin_memory_device", "prefetch_factor", "timeout",
    "worker_init_fn", "in_order",
)  # fmt: skip
"""Options of a DataLoader that concern its worker processes."""


class DeltaDataLoader(DataLoader[Batch]):
    """A `torch.utils.data.DataLoader` over a `DeltaIterableDataset`, with the batches of torch's default collate.

    `create_pytorch_dataloader` makes one. `len()` is the number of batches, the same on every rank.
    """

    def __init__(
        self,
        dataset: DeltaIterableDataset,
        batch_size: int | None = 32,
        *,
        num_workers: int = 0,
        drop_last: bool = False,
        # All of DataLoader's, because Lightning makes a loader again from the attributes that have their names.
        **options: Any,
    ) -> None:
        super().__init__(
            dataset,
            batch_size=batch_size,
            num_workers=num_workers,
            drop_last=drop_last,
            **options,
        )
        self._for_workers = {name: value for name, value in options.items() if name in _FOR_WORKERS}
        self._steps = plan_steps(
            dataset.count(), dataset.rank, dataset.num_ranks, batch_size=batch_size or 1, drop_last=drop_last
        )
        make = _make_chunks(dataset, options.get("collate_fn"))
        self._work = _Work(dataset.rows, make, self._steps, is_shared=self.persistent_workers)
        self._workers: DataLoader[list[Chunk]] | None = None

    def __len__(self) -> int:
        return super().__len__() if self.batch_size is None else self._steps.count

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        if self.batch_size is None:
            return super().__iter__()
        epoch = draw_epoch(self.generator)
        return self._of_workers(epoch) if self.num_workers and self._work.make.has_functions else self._here(epoch)

    def _here(self, epoch: int) -> Iterator[Batch]:
        """The batches made in this thread, of rows that threads read."""
        pins = self.pin_memory and torch.cuda.is_available()
        with contextlib.closing(self._work.chunks(epoch)) as chunks:
            for chunk in chunks:
                for batch in cut(chunk):
                    yield _pinned(batch) if pins else batch

    def _of_workers(self, epoch: int) -> Iterator[Batch]:
        """The batches that worker processes make; a short one comes last, whoever made it."""
        short: list[Batch] = []
        items = self._start_workers(epoch)
        try:
            for item in items:
                for chunk, is_last in item:
                    if is_last:
                        short += cut(chunk)
                    else:
                        yield from cut(chunk)
            yield from short
        except BaseException as error:
            # Persistent workers outlive an iteration that stops early. Others end now: a traceback would hold them.
            if not (self.persistent_workers and isinstance(error, GeneratorExit)):
                self._workers = None
                end_workers(items)
            raise

    def _start_workers(self, epoch: int) -> Iterator[Any]:
        with one_at_a_time():
            if self._workers is None:
                if not self._work.survives_fork and self._for_workers.get("multiprocessing_context") is None:
                    self._for_workers["multiprocessing_context"] = "spawn"
                self._workers = DataLoader(
                    self._work,
                    batch_size=None,
                    num_workers=self.num_workers,
                    collate_fn=_identity,
                    # One random number is drawn for each iteration, as by any DataLoader.
                    generator=torch.Generator(),
                    **self._for_workers,
                )
            assert isinstance(self._workers.generator, torch.Generator)
            self._workers.generator.manual_seed(epoch)
            context = self._workers.multiprocessing_context or multiprocessing
            self._work.begin(epoch, is_forked=context.get_start_method() == "fork")
            end_broken(self._workers)
            return kept_from_children(self._workers, iter(self._workers))


def _make_chunks(dataset: DeltaIterableDataset, collate_fn: Callable[[list[Any]], Any] | None) -> ByColumn | ByRecord:
    values, fields = Values(dataset.rows.source), dataset.field_specs
    is_default = collate_fn is None or collate_fn is default_collate
    if is_default and not any(spec.full_record_transform for spec in fields):
        return ByColumn(make_recipe(fields), values)
    return ByRecord(fields, values, collate_fn or default_collate)


class _Work(IterableDataset[Any]):
    """The batches of an epoch as chunks: of all, or a worker process's part of them."""

    def __init__(self, rows: Rows, make: ByColumn | ByRecord, steps: Steps, *, is_shared: bool) -> None:
        self.make = make
        self._rows, self._steps = rows, steps
        self._is_shared = is_shared
        self._epoch, self._pid = self._new_epoch(), os.getpid()

    def _new_epoch(self) -> torch.Tensor | list[int]:
        """An epoch's number.

        Workers that outlive an iteration read the next one's from shared memory. Others must not: they may begin after
        another iteration has. A tensor that is sent to a process is moved there, so theirs is in a list.
        """
        return torch.zeros(1, dtype=torch.int64).share_memory_() if self._is_shared else [0]  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        # A pickled source has no credentials, but workers need them. Nothing else pickles this object.
        return {**self.__dict__, "storage_options": [dict(part.options) for part in self._rows.source.storages]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options = state.pop("storage_options")
        self.__dict__.update(state)
        for storage, own in zip(self._rows.source.storages, options, strict=True):
            storage.lend(own)
        if isinstance(self._epoch, torch.Tensor):
            self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def survives_fork(self) -> bool:
        """Whether the store can be read in a process that was forked."""
        return all(storage.survives_fork for storage in self._rows.source.storages)

    def begin(self, epoch: int, *, is_forked: bool) -> None:
        """Let worker processes begin this epoch; what is kept in memory is read before they are forked."""
        if self._pid != os.getpid():
            # Another process was given this loader, and both have workers.
            self._epoch, self._pid = self._new_epoch(), os.getpid()
        self._epoch[0] = epoch
        if is_forked:
            self._rows.keep()

    def chunks(self, epoch: int) -> Generator[Chunk, None, None]:
        """Yield the chunks of all batches; with functions of rows, batch by batch, so that none is called too early."""
        batches, size = range(self._steps.num_batches), self._steps.batch_size
        with contextlib.closing(self._rows.parts(epoch, [batches])) as parts:
            ranges = _cut(batches, 1 if self.make.has_functions else _MOST_BATCHES)
            for part, numbers, _ in cut_parts(parts, ranges, size):
                yield self.make.chunk(part, self._steps.sizes(numbers))

    def __iter__(self) -> Iterator[Any]:
        """Yield a worker's items: each is a list of chunks, and whether a chunk is the epoch's last."""
        end_with_parent()
        return self._items()

    def _items(self) -> Iterator[Any]:
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self._rows.num_processes = count
        ranges = self._ranges(index, count)
        item: list[tuple[Chunk, bool]] = []
        with contextlib.closing(self._rows.parts(int(self._epoch[0]), ranges)) as parts:
            for part, numbers, is_whole in cut_parts(parts, ranges, self._steps.batch_size):
                item += self._chunks_of(part, numbers)
                if is_whole:
                    yield _sent(item)
                    item = []

    def _ranges(self, worker: int, num_workers: int) -> Sequence[range]:
        source, size = self._rows.source, self._steps.batch_size
        manifest = source.manifest
        row_bytes = max(1, int(manifest.row_group_bytes.sum()) // max(1, manifest.num_rows))
        num_rows = 1 if row_bytes > _PICTURE_BYTES else min(_ITEM_ROWS, _ITEM_BYTES // row_bytes)
        most = max(1, num_rows // size)
        every = range(self._steps.num_batches)
        runs = [every[run.start : run.stop] for run in self._rows.plan(int(self._epoch[0])).batch_runs()]
        is_free = source.shuffle is not None
        return batches_of_worker([run for run in runs if run], worker, num_workers, most=most, is_free=is_free)

    def _chunks_of(self, part: Any, numbers: range) -> Iterator[tuple[Chunk, bool]]:
        """The chunks of some batches; what the epoch ends with has its own, if it is short."""
        size, is_end = self._steps.batch_size, numbers.stop == self._steps.num_batches
        sizes = self._steps.sizes(numbers)
        num_whole = sum(found == size for found in sizes)
        if not is_end or num_whole == len(sizes):
            yield self.make.chunk(part, sizes), False
            return
        if num_whole:
            yield self.make.chunk(part[: num_whole * size], sizes[:num_whole]), False
        yield self.make.chunk(part[num_whole * size :], sizes[num_whole:]), True


def _cut(batches: range, most: int) -> Iterator[range]:
    return (batches[start : start + most] for start in range(0, len(batches), most))


def _identity(item: Any) -> Any:
    return item


def _sent(item: Any) -> Packed:
    """An item on its way to the trainer, its tensors in few memories: each of these is an open file."""
    found: list[torch.Tensor] = []
    _with_tensors(item, found.append)
    moved = iter(in_few_memories([{str(number): tensor} for number, tensor in enumerate(found)]))
    return Packed(_with_tensors(item, lambda _: next(iter(next(moved).values()))))


def _with_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same with other plain tensors; those that are more than numbers in memory stay as they are."""
    if type(value) is torch.Tensor and value.layout == torch.strided and value.device.type == "cpu":
        if value.is_nested or value.is_quantized or value.requires_grad:
            return value
        # A conjugate is a view that is computed when it is read.
        return change(value.resolve_conj().resolve_neg())
    if type(value) is dict:
        return {name: _with_tensors(part, change) for name, part in value.items()}
    if type(value) is tuple:
        return tuple(_with_tensors(part, change) for part in value)
    # Long lists are of texts, or numbers.
    if type(value) is list and not (value and isinstance(value[0], str | bytes | int | float)):
        return [_with_tensors(part, change) for part in value]
    return value


def _pinned(value: Any) -> Any:
    """The same with its tensors in page-locked memory."""
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if hasattr(value, "pin_memory"):
        return value.pin_memory()
    if isinstance(value, Mapping):
        return {name: _pinned(part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_pinned(part) for part in value)
    return value
