"""Batches as torch tensors, through a real `torch.utils.data.DataLoader`.

Batches are made by our own threads, so the loader needs no processes to be fast.
`num_workers` is for a transform that holds the GIL: then one item of work is a
run of batches, and the order is the same for any number of workers.

Tensors of a window are split, not sliced, into batches: 2.0 µs a tensor against
3.3, and `unsafe_split`, so that a write into one batch does not count as a write
into the others (they would share a version counter).
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import numpy as np

from converter.columns import ragged_values
from converter.errors import MissingDependencyError, SourceError
from converter.frameworks.numpy import Epochs
from converter.schema import Field
from converter.windows import LENGTH_SUFFIX, BatchSource, Run

try:
    import torch
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "make_torch_dataloader needs PyTorch, which is not installed: pip install 'spark-tensor-converter[torch]'."
    ) from error

Batch = dict[str, Any]
"""A batch: tensors, and lists for strings and bytes."""


class TorchDataLoader(DataLoader[Batch]):
    """A `DataLoader` whose batches are `dict[str, torch.Tensor]` of shape `(rows, *field.shape)`.

    Dates arrive as int32 days and times as int64 microseconds since 1970 (UTC), strings and bytes as
    lists. Tensors belong to the caller and are writable.

    `len()` is the number of batches of one iteration, known before the first row is read.
    """

    def __init__(self, source: BatchSource, *, num_epochs: int | None, num_workers: int) -> None:
        self._epochs = Epochs(source, num_epochs)
        self._runs = _Runs(self._epochs)
        super().__init__(
            self._runs,  # type: ignore[arg-type]  # Its items are runs; this class unrolls them.
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_identity,
        )

    # The base class keeps None here, because it must not batch again what is a batch already.
    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self._epochs.source.batch_size

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        """Accept what the base class assigns when it is built; the source decides."""

    def __len__(self) -> int:
        return len(self._epochs)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        return self._epochs.iterate(self._batches if self.num_workers == 0 else self._batches_of_workers)

    def __enter__(self) -> TorchDataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._epochs.close()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin with this epoch."""
        self._epochs.set_next(epoch)

    def _batches(self, first: int) -> Iterator[Batch]:
        source = self._epochs.source
        for epoch in self._epochs.range_from(first):
            for run in source.runs(source.plan(epoch)):
                yield from torch_batches(source, run)

    def _batches_of_workers(self, first: int) -> Iterator[Batch]:
        self._runs.first_epoch = first
        items = super().__iter__()
        try:
            for batches in items:
                yield from batches
        finally:
            # Without persistent workers the processes end with their iterator, not with the loader.
            del items


class _Runs(IterableDataset[list[Batch]]):
    """What a worker process iterates: every `num_workers`-th run of batches; together they yield them in order."""

    def __init__(self, epochs: Epochs) -> None:
        self._source = epochs.source
        self._num_epochs = epochs.num_epochs
        self.first_epoch = 0

    def __iter__(self) -> Iterator[list[Batch]]:
        worker = get_worker_info()
        index, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        item = 0
        for epoch in Epochs(self._source, self._num_epochs).range_from(self.first_epoch):
            plan = self._source.plan(epoch)
            for batches in plan.batch_runs():
                if item % count == index:
                    runs = self._source.runs(plan, batches)
                    yield [batch for run in runs for batch in torch_batches(self._source, run)]
                item += 1


def torch_batches(source: BatchSource, run: Run) -> Iterator[Batch]:
    """Cut a run into batches of tensors."""
    columns = [_split(source, name, column, run) for name, column in run.columns.items()]
    names = list(run.columns)
    for parts in zip(*columns, strict=True):
        batch: Batch = {}
        for name, part in zip(names, parts, strict=True):
            if isinstance(part, dict):
                batch |= part
            else:
                batch[name] = part
        yield batch


def _split(source: BatchSource, name: str, column: Any, run: Run) -> Any:
    """A column of a run as one part for each batch: a tensor, a list, or a dict of what it became."""
    if not hasattr(column, "buffers"):
        return torch.unsafe_split(torch.from_numpy(column), run.batch_size)
    field = source.manifest.schema[name]
    slices = (column[start : start + run.batch_size] for start in range(0, run.num_rows, run.batch_size))
    if field.is_object:
        return (part.to_pylist() for part in slices)
    return (_ragged(source, field, part) for part in slices)


def _ragged(source: BatchSource, field: Field, part: Any) -> dict[str, torch.Tensor]:
    rows = ragged_values(part, field)
    if source.ragged == "pad":
        padded, lengths = rows.pad()
        return {field.name: torch.from_numpy(padded), field.name + LENGTH_SUFFIX: torch.from_numpy(lengths)}
    # torch's jagged tensors let the first dimension differ and no other.
    sizes = rows.shapes[np.diff(rows.offsets) > 0, 1:]
    if len(sizes) and (sizes != sizes[0]).any():
        raise SourceError(
            f"Column {field.name!r} has rows that differ in more than their first dimension, which torch's nested "
            f"tensors cannot hold. Say ragged='pad' (adds {field.name + LENGTH_SUFFIX!r}).",
            column=field.name,
        )
    inner = sizes[0].tolist() if len(sizes) else [1] * (field.ndim - 1)
    values = torch.from_numpy(rows.values.reshape(-1, *inner))
    offsets = torch.from_numpy(rows.offsets // int(np.prod(inner, dtype=np.int64)))
    return {field.name: torch.nested.nested_tensor_from_jagged(values, offsets)}


def _identity(item: Any) -> Any:
    return item
