"""Batches as `dict[str, numpy.ndarray]`; no framework needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from converter.loading.batches import Batch, numpy_batches
from converter.loading.epochs import Epochs
from converter.loading.progress import follow
from converter.loading.stats import LoaderStats, stats_of
from converter.plan import EpochPlan
from converter.reading.source import BatchSource

__all__ = ["BatchReader"]


class BatchReader:
    """An iterable of `dict[str, numpy.ndarray]`, each of `batch_size` rows (the last of an epoch may have fewer).

    `DatasetConverter.make_batch_reader` makes one. Arrays have shape `(rows, *field.shape)`, belong to the caller, and
    are writable. Strings, bytes and, with `ragged="nested"`, rows of different lengths are object arrays.

    ```python
    with converter.make_batch_reader(batch_size=2, columns=["x"]) as reader:
        reader.set_epoch(3)
        for batch in reader:
            saved = reader.state_dict()  # JSON
            break
        reader.load_state_dict(saved)
        print(reader.remaining, "of", len(reader))
        for batch in reader.progress("predict"):
            ...
        print(reader.stats())  # what limits the loop
    ```
    """

    def __init__(self, source: BatchSource, num_epochs: int | None) -> None:
        self._epochs = Epochs(source, num_epochs)

    def __len__(self) -> int:
        return len(self._epochs)

    @property
    def remaining(self) -> int:
        """Batches of the next iteration: fewer than `len()` after `load_state_dict`; the `total=` of a tqdm bar.

        Raises:
            TypeError: `num_epochs=None`, so there is no last batch.
        """
        return self._epochs.remaining

    def __repr__(self) -> str:
        return self._epochs.describe("BatchReader")

    def _repr_html_(self) -> str:
        return self._epochs.describe_in_html("BatchReader")

    def __iter__(self) -> Iterator[Batch]:
        return self._epochs.iterate(self._batches)

    def __enter__(self) -> BatchReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._epochs.close()

    def stats(self) -> LoaderStats:
        """What the reader did in the iteration that was begun last: printed, it says what limits the loop.

        Call it in the thread of the loop, while it runs or after it has ended.
        """
        return stats_of(self._epochs)

    def progress(self, description: str | None = None, *, shown: bool | None = None) -> Iterator[Batch]:
        """One iteration with a bar: rows a second, the time left, and which part of its time the loop waited for data.

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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin where `state` was taken, at the cost of reading one window.

        `len()` does not change, because it counts whole epochs; `remaining` is what is left.

        Raises:
            StateMismatchError: the state is of other rows or another order; the message says what differs.
        """
        self._epochs.load_state_dict(state)

    def _batches(self, plan: EpochPlan) -> Iterator[Batch]:
        return numpy_batches(self._epochs.source, plan, self._epochs.files)
