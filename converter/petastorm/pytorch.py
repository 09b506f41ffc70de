"""Loaders of torch batches over a reader, with Petastorm's names: whole columns are shuffled, cut and handed out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from converter.errors import MissingDependencyError
from converter.loading.epochs import as_generator
from converter.petastorm.reader_impl.batch_runs import (
    blocks_of,
    has_columns,
    native_runs,
    run_of,
    runs_in_order,
    shuffled_runs,
    slice_rows,
)
from converter.petastorm.reader_impl.column_pool import ColumnPool
from converter.petastorm.reader_impl.columns import Columns, join, num_rows_of, row_bytes_of
from converter.petastorm.reader_impl.seeds import generator_of, global_seed
from converter.petastorm.reader_impl.shuffling_buffer import (
    NoopShufflingBuffer,
    RandomShufflingBuffer,
    ShufflingBufferBase,
)
from converter.reading.runs import Run

try:
    import torch
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "converter.petastorm.pytorch needs PyTorch, which is not installed: "
        "pip install 'spark-tensor-converter[torch,petastorm]'."
    ) from error

from converter.petastorm.reader_impl.pytorch_shuffling_buffer import torch_seed
from converter.petastorm.reader_impl.torch_columns import (
    Transform,
    collated,
    decimal_friendly_collate,
    row_dicts,
    sanitize_types,
    sanitized_block,
    sanitized_row,
    tensor_blocks,
    tensor_of_rows,
)

__all__ = ["BatchedDataLoader", "DataLoader", "InMemBatchedDataLoader", "LoaderBase", "decimal_friendly_collate"]

logger = logging.getLogger(__name__)

Batch = Any
"""What `collate_fn` returns; by default a dict of tensors, and of lists for texts and decimals."""

_UNBOUNDED = 1 << 62
_PIECE_BYTES = 8 << 20

_PARALLEL_ITER_ERROR = (
    "You must finish a full pass of Petastorm DataLoader before making another pass from the beginning. If you do need "
    "to terminate early and restart from beginning, please re-create the reader and the data loader."
)

_sanitize_pytorch_types = sanitize_types


class LoaderBase:
    """What the loaders share: passes over a reader, one at a time, and a `with` block that stops the reader."""

    reader: Any
    batch_size: int
    shuffling_queue_capacity: int

    def __init__(self) -> None:
        self._in_iter: bool | None = None
        self._error: BaseException | None = None
        self._num_passes = 0
        self._running: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of a pass. After the first pass the reader is reset.

        Raises:
            RuntimeError: another pass runs, an earlier one failed, or the loader was closed meanwhile.
            NotImplementedError: an earlier pass was left before its end.
        """
        if self._error is not None:
            raise RuntimeError(
                f"Cannot start a new iteration because last time iteration failed with error {self._error!r}."
            )
        if self._in_iter:
            raise RuntimeError(_PARALLEL_ITER_ERROR)
        if self._in_iter is not None:
            self.reader.reset()
            logger.warning("Start a new pass of Petastorm DataLoader, reset underlying Petastorm reader to position 0.")
        self._in_iter = True
        try:
            with contextlib.closing(as_generator(self._iter_impl())) as batches:
                self._running = batches
                yield from batches
                if self._running is None:
                    raise RuntimeError("The loader was closed during this pass: its `with` block has ended.")
        except Exception as error:
            self._error = error
            logger.error("Iteration on Petastorm DataLoader raise error: %r", error)  # noqa: TRY400 (it is raised)
            raise
        finally:
            self._in_iter = False
            self._running = None
            self._num_passes += 1

    def _iter_impl(self) -> Iterator[Batch]:
        """Yield the batches of one pass; a loader implements this."""
        raise NotImplementedError(f"{type(self).__name__} must implement _iter_impl.")

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reader.stop()
        self.reader.join()
        running, self._running = self._running, None
        close = getattr(running, "close", None)
        if close is not None:
            # A pass that was left open would keep its threads. One that another thread runs ends by the reader's stop.
            with contextlib.suppress(ValueError):
                close()

    def _runs(self, blocks: Iterable[Mapping[Any, Any]], generator: np.random.Generator) -> Iterator[Run]:
        """The rows of blocks as runs of batches, shuffled if there is a shuffling queue."""
        capacity = self.shuffling_queue_capacity
        if capacity <= 0:
            return runs_in_order(blocks, self.batch_size)
        return shuffled_runs(blocks, self.batch_size, ColumnPool(generator), min_left=capacity - 1)

    def _native_runs(self, generator: np.random.Generator) -> Iterator[Run] | None:
        """Shuffled runs by the native engine, with torch's types, if it can read the reader's rows."""
        capacity = self.shuffling_queue_capacity
        if capacity <= 0:
            return None
        runs = native_runs(self.reader, batch_size=self.batch_size, capacity=capacity, generator=generator)
        return None if runs is None else _sanitized_runs(runs)


def _sanitized_runs(runs: Iterable[Run]) -> Iterator[Run]:
    with contextlib.closing(as_generator(iter(runs))) as source:
        for run in source:
            yield run_of(sanitized_block(run.columns, is_batched=True), run.batch_size)


class DataLoader(LoaderBase):
    """Batches of a reader as dicts of tensors, or what `collate_fn` makes of lists of rows.

    The last batch of a pass may have fewer rows. With a shuffling queue each batch has random rows of those that wait.
    The native form is `make_torch_dataloader`.

    ```python
    from converter.petastorm import make_batch_reader
    from converter.petastorm.pytorch import DataLoader

    reader = make_batch_reader("file:///data/rides", schema_fields=["distance", "fare"], seed=0)
    with DataLoader(reader, batch_size=512, shuffling_queue_capacity=2000) as batches:
        print(sum(len(batch["fare"]) for batch in batches))
    ```

    Args:
        reader: of `make_reader` or `make_batch_reader`, or an object that hands out rows as they do.
        batch_size: rows of a batch.
        collate_fn: makes a batch of a list of rows, which are dicts. The default does so without making the rows.
        shuffling_queue_capacity: rows that wait to be shuffled; 0 for the reader's order.
    """

    def __init__(
        self,
        reader: Any,
        batch_size: int = 1,
        collate_fn: Callable[[list[Any]], Batch] = decimal_friendly_collate,
        shuffling_queue_capacity: int = 0,
    ) -> None:
        super().__init__()
        self.reader = reader
        self.batch_size = _checked_batch_size(batch_size)
        self.collate_fn = collate_fn
        self.shuffling_queue_capacity = shuffling_queue_capacity

    def _iter_impl(self) -> Iterator[Batch]:
        generator = generator_of(self.reader, self._num_passes, fallback=global_seed)
        if not has_columns(self.reader):
            yield from self._batches_of_rows(generator)
            return
        runs = self._native_runs(generator)
        if runs is None:
            is_batched = bool(getattr(self.reader, "batched_output", False))
            blocks = (sanitized_block(block, is_batched=is_batched) for block in blocks_of(self.reader))
            runs = self._runs(blocks, generator)
        with contextlib.closing(as_generator(runs)) as source:
            for run in source:
                yield from self._collate(run)

    def _collate(self, run: Run) -> Iterator[Batch]:
        if self.collate_fn is decimal_friendly_collate:
            yield from collated(run)
            return
        for start in range(0, run.num_rows, run.batch_size):
            yield self.collate_fn(row_dicts(slice_rows(run.columns, start, start + run.batch_size)))

    def _batches_of_rows(self, generator: np.random.Generator) -> Iterator[Batch]:
        """The batches of a reader that hands out rows only."""
        capacity = self.shuffling_queue_capacity
        buffer: ShufflingBufferBase = NoopShufflingBuffer()
        if capacity > 0:
            buffer = RandomShufflingBuffer(capacity, capacity - 1, _UNBOUNDED, seed=generator)
        batch: list[Any] = []
        for row in _through(buffer, map(sanitized_row, self.reader)):
            batch.append(row)
            if len(batch) == self.batch_size:
                yield self.collate_fn(batch)
                batch = []
        if batch:
            yield self.collate_fn(batch)


def _through(buffer: ShufflingBufferBase, rows: Iterable[Any]) -> Iterator[Any]:
    """The rows in the order in which a buffer hands them out."""
    for row in rows:
        buffer.add_many([row])
        while buffer.can_retrieve():
            yield buffer.retrieve()
    buffer.finish()
    while buffer.can_retrieve():
        yield buffer.retrieve()


class BatchedDataLoader(LoaderBase):
    """Batches of a reader as dicts of tensors, by a function of whole columns. Text and decimals are refused.

    The last batch of a pass may have fewer rows. With a shuffling queue each batch has random rows of those that wait,
    of however many row groups. The native form is `make_torch_dataloader`.

    ```python
    from functools import partial

    import torch

    from converter.petastorm import make_batch_reader
    from converter.petastorm.pytorch import BatchedDataLoader

    to_device = partial(torch.as_tensor, device="cpu")  # or "cuda"
    reader = make_batch_reader("file:///data/rides", schema_fields=["distance", "fare"], seed=0)
    with BatchedDataLoader(reader, batch_size=512, transform_fn=to_device) as batches:
        print(sum(len(batch["fare"]) for batch in batches))
    ```

    Args:
        reader: of `make_reader` or `make_batch_reader`, or an object that hands out rows as they do.
        batch_size: rows of a batch.
        transform_fn: makes a tensor of a column of a row group, or of a list of one value if `reader` hands out rows;
            None for `torch.as_tensor`.
        shuffling_queue_capacity: rows that wait to be shuffled; 0 for the reader's order.
    """

    def __init__(
        self,
        reader: Any,
        batch_size: int = 1,
        transform_fn: Transform | None = None,
        shuffling_queue_capacity: int = 0,
    ) -> None:
        super().__init__()
        self.reader = reader
        self.batch_size = _checked_batch_size(batch_size)
        self.transform_fn: Transform = transform_fn or torch.as_tensor
        self.shuffling_queue_capacity = shuffling_queue_capacity

    def _iter_impl(self) -> Iterator[Batch]:
        generator = generator_of(self.reader, self._num_passes, fallback=torch_seed)
        runs = self._native_runs(generator) if self.transform_fn is torch.as_tensor else None
        if runs is None:
            blocks = tensor_blocks(self.reader, self.transform_fn, self.batch_size)
            runs = self._runs(blocks, generator)
        with contextlib.closing(as_generator(runs)) as source:
            for run in source:
                yield from collated(run)


def _load_rows_into_mem(reader: Any, transform_fn: Transform, rows_capacity: int) -> tuple[list[Any], list[Any]]:
    """The first rows of a reader: the names of the columns, and the columns as tensors. The reader is stopped."""
    parts: list[Columns] = []
    left = rows_capacity
    with contextlib.closing(as_generator(tensor_blocks(reader, transform_fn, max(1, rows_capacity)))) as blocks:
        for block in blocks:
            parts.append(slice_rows(block, 0, left))
            left -= num_rows_of(block)
            if left <= 0:
                break
    # An endless reader must not be read to its end.
    reader.stop()
    reader.join()
    names = list(parts[0]) if parts else []
    return names, [tensor_of_rows(name, join([part[name] for part in parts], name)) for name in names]


class InMemBatchedDataLoader:
    """Batches of the first rows of a reader, which stay in memory, as dicts of tensors, for some epochs.

    The reader is stopped once the rows are in memory. The native form is `make_torch_dataloader`, which reads from
    files that the system keeps in memory.

    ```python
    from converter.petastorm import make_batch_reader
    from converter.petastorm.pytorch import InMemBatchedDataLoader

    reader = make_batch_reader("file:///data/rides", schema_fields=["distance", "fare"])
    with InMemBatchedDataLoader(reader, batch_size=512, num_epochs=3, rows_capacity=1000, shuffle=True) as batches:
        print(sum(len(batch["fare"]) for batch in batches))
    ```

    Args:
        reader: of `make_reader` or `make_batch_reader`, or an object that hands out rows as they do.
        batch_size: rows of a batch; the last one of an epoch may have fewer.
        transform_fn: as in `BatchedDataLoader`.
        num_epochs: passes over the rows.
        seed: with the number of the epoch it decides the order.
        rows_capacity: rows that are loaded at most.
        shuffle: whether each epoch has an order of its own.
    """

    def __init__(
        self,
        reader: Any,
        batch_size: int = 1,
        transform_fn: Transform | None = None,
        num_epochs: int = 1,
        seed: int = 0,
        rows_capacity: int = 1024,
        shuffle: bool = False,
    ) -> None:
        self._batch_size = _checked_batch_size(batch_size)
        self._num_epochs = num_epochs
        self._seed = seed
        self._shuffle = shuffle
        self._in_iter = False
        self._keys, self._buffer = _load_rows_into_mem(reader, transform_fn or torch.as_tensor, rows_capacity)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of all epochs.

        Raises:
            RuntimeError: this is not the first iteration.
        """
        if self._in_iter:
            raise RuntimeError(
                "InMemBatchedDataLoader couldn't be used multiple times, please specify total number of epochs using "
                "num_epochs in constructor."
            )
        self._in_iter = True
        columns = dict(zip(self._keys, self._buffer, strict=True))
        num_rows = num_rows_of(columns)
        step = self._batch_size * max(1, _PIECE_BYTES // (row_bytes_of(columns) * self._batch_size))
        for epoch in range(self._num_epochs):
            order = torch.arange(num_rows)
            if self._shuffle:
                order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(self._seed + epoch))
            for start in range(0, num_rows, step):
                # Copies, so that a batch that is written into does not change the next epoch.
                rows = order[start : start + step]
                drawn = {name: column.index_select(0, rows.to(column.device)) for name, column in columns.items()}
                yield from collated(run_of(drawn, self._batch_size))

    def __enter__(self) -> InMemBatchedDataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: the reader was stopped when the rows were loaded."""


def _checked_batch_size(batch_size: int) -> int:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size!r}.")
    return batch_size
