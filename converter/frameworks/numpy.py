"""Batches as NumPy arrays; no framework needed.

The epochs' rule stands here for every framework: an iteration that runs to its
end moves on to the next epoch, one that is left early does not, so ranks cannot
drift apart; `set_epoch` says it outright.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from converter.columns import ragged_values
from converter.errors import ConverterError
from converter.plan import check_integer
from converter.windows import LENGTH_SUFFIX, BatchSource, Run

Batch = dict[str, npt.NDArray[Any]]


class Epochs:
    """Which epoch comes next, and which iterations are under way."""

    def __init__(self, source: BatchSource, num_epochs: int | None) -> None:
        self.source = source
        self.num_epochs = num_epochs
        self.next_epoch = 0
        self._closed = False
        self._running: weakref.WeakSet[Iteration] = weakref.WeakSet()

    def __len__(self) -> int:
        if self.num_epochs is None:
            raise TypeError("With num_epochs=None there is no last batch, so there is no length.")
        return self.source.num_batches() * self.num_epochs

    def range_from(self, first: int) -> Iterator[int]:
        """The epochs of one iteration that begins with epoch `first`."""
        epoch = first
        while self.num_epochs is None or epoch < first + self.num_epochs:
            yield epoch
            epoch += 1

    def iterate(self, batches: Callable[[int], Iterator[Any]]) -> Iteration:
        """Run one iteration over `batches(first epoch)`; moves on when it ends by itself."""
        self.check_open()
        iteration = Iteration(self, self._iterate(batches, self.next_epoch))
        self._running.add(iteration)
        return iteration

    def _iterate(self, batches: Callable[[int], Iterator[Any]], first: int) -> Generator[Any, None, None]:
        yield from batches(first)
        if self.num_epochs is not None and self.next_epoch == first:
            self.next_epoch = first + self.num_epochs

    def set_next(self, epoch: int) -> None:
        """Let the next iteration begin with `epoch`."""
        self.next_epoch = check_integer("epoch", epoch, least=0)

    def check_open(self) -> None:
        """Raise ConverterError where the loader was closed."""
        if self._closed:
            raise ConverterError(
                "This loader was closed: its `with` block has ended. Make another one from the converter."
            )

    def close(self) -> None:
        """End every iteration under way, with its threads, and refuse new ones."""
        self._closed = True
        for iteration in list(self._running):
            iteration.close()


class Iteration:
    """One pass over a loader. When the loader is closed under it, it says so: it would look like a short epoch."""

    def __init__(self, epochs: Epochs, generator: Generator[Any, None, None]) -> None:
        self._epochs = epochs
        self._generator = generator

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._generator)
        except StopIteration:
            self._epochs.check_open()
            raise

    def close(self) -> None:
        """End it, with its threads."""
        self._generator.close()


class BatchReader:
    """An iterable of `dict[str, numpy.ndarray]` of exactly `batch_size` rows (the last of an epoch may be shorter).

    Arrays have shape `(rows, *field.shape)`, belong to the caller, and are writable. Strings, bytes and,
    with `ragged="nested"`, rows of varying length arrive as object arrays.
    """

    def __init__(self, source: BatchSource, num_epochs: int | None) -> None:
        self._epochs = Epochs(source, num_epochs)

    def __len__(self) -> int:
        return len(self._epochs)

    def __iter__(self) -> Iterator[Batch]:
        return self._epochs.iterate(self._batches)

    def __enter__(self) -> BatchReader:
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
                yield from numpy_batches(source, run)


def numpy_batches(source: BatchSource, run: Run) -> Iterator[Batch]:
    """Cut a run into batches of NumPy arrays."""
    for start in range(0, run.num_rows, run.batch_size):
        stop = min(start + run.batch_size, run.num_rows)
        batch: Batch = {}
        for name, column in run.columns.items():
            batch |= _finish(source, name, column[start:stop])
        yield batch


def _finish(source: BatchSource, name: str, column: Any) -> Batch:
    field = source.manifest.schema.get(name)
    if isinstance(column, pa.Array):
        assert field is not None
        if field.is_object:
            return {name: column.to_numpy(zero_copy_only=False)}
        rows = ragged_values(column, field)
        if source.ragged == "pad":
            padded, lengths = rows.pad()
            return {name: padded, name + LENGTH_SUFFIX: lengths}
        return {name: rows.split()}
    if field is not None and field.dtype.startswith("datetime64"):
        stored = column.view("int64") if field.dtype == "datetime64[us]" else column.astype("int64")
        return {name: stored.view(field.dtype)}
    return {name: column}
