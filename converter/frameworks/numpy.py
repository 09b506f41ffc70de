"""Batches as NumPy arrays; no framework needed.

What every framework shares stands here: the epochs' rule, the state of a run, and
the user's transform.

An iteration that runs to its end moves on to the next epoch, one that is left
early does not, so ranks cannot drift apart; `set_epoch` says it outright. A state
counts the batches that were handed over, not those that are read ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from converter.loading.batches import Batch, numpy_batches
from converter.loading.epochs import Epochs
from converter.plan import EpochPlan
from converter.reading.source import BatchSource

logger = logging.getLogger(__name__)


class BatchReader:
    """An iterable of `dict[str, numpy.ndarray]` of exactly `batch_size` rows (the last of an epoch may be shorter).

    Arrays have shape `(rows, *field.shape)`, belong to the caller, and are writable. Strings, bytes and,
    with `ragged="nested"`, rows of varying length arrive as object arrays.
    """

    def __init__(self, source: BatchSource, num_epochs: int | None) -> None:
        self._epochs = Epochs(source, num_epochs)

    def __len__(self) -> int:
        return len(self._epochs)

    @property
    def remaining(self) -> int:
        """The batches of the next iteration: fewer than `len()` after `load_state_dict`.

        `tqdm(reader, total=reader.remaining)` shows a bar that ends where the iteration does.
        """
        return self._epochs.remaining

    def __repr__(self) -> str:
        return self._epochs.describe("BatchReader")

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

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where this reader stands, as a handful of integers: after the last batch that was received.

        The same on all ranks that take equal steps, so one of them may save it. It can be loaded where the number of
        shards, the batch size, the columns or the workers are others, and continues with the next row that nobody
        has read; it belongs to these rows, this seed, shuffle, window and `uneven`.

        Args:
            batches: the state as it will be after so many batches of the iteration: for those who read ahead of what
                they use.
        """
        return self._epochs.state_dict(batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration begin where `state` was taken, at the cost of reading one window.

        `len()` stays that of whole epochs; `remaining` is what is left.

        Raises:
            StateMismatchError: the state is of other rows or another order; the message says what differs.
        """
        self._epochs.load_state_dict(state)

    def _batches(self, plan: EpochPlan) -> Iterator[Batch]:
        return numpy_batches(self._epochs.source, plan, self._epochs.files)
