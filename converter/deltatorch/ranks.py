"""Which rows each rank reads, and in how many steps: all rows once, and equally many steps on every rank."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from converter.arguments import check_integer
from converter.deltatorch.warning import level_of_caller
from converter.errors import ConverterWarning, EmptyShardError
from converter.manifest import Manifest
from converter.selection import Mask, select_some


def find_rank(*, use_fixed_rank: bool, rank: Any, num_ranks: Any) -> tuple[int, int]:
    """This process's rank and their number: as given, else from torch.distributed, else one rank alone.

    >>> find_rank(use_fixed_rank=True, rank=1, num_ranks=4)
    (1, 4)
    """
    if use_fixed_rank:
        if rank is None or num_ranks is None:
            raise ValueError(
                f"use_fixed_rank=True needs rank and num_ranks, got rank={rank} and num_ranks={num_ranks}."
            )
        count, index = check_integer("num_ranks", num_ranks, least=1), check_integer("rank", rank, least=0)
        if index >= count:
            raise ValueError(f"rank must be below num_ranks, got rank={index} and num_ranks={count}.")
        return index, count
    if rank is not None or num_ranks is not None:
        warnings.warn(
            f"rank={rank} and num_ranks={num_ranks} are not used without use_fixed_rank=True. Pass it too, or neither.",
            ConverterWarning,
            stacklevel=level_of_caller(),
        )
    # Not imported means not initialised.
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return int(distributed.get_rank()), int(distributed.get_world_size())


def rows_of_rank(num_rows: int, rank: int, num_ranks: int) -> range:
    """The rows of a rank, by their numbers in the table; the first ranks have one more if they cannot all be equal.

    >>> [rows_of_rank(10, rank, 4) for rank in range(4)]
    [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]

    Raises:
        EmptyShardError: there are fewer rows than ranks.
    """
    if num_rows < num_ranks:
        raise EmptyShardError(
            f"{num_rows} rows cannot be divided among {num_ranks} ranks: at least one would have none. Use fewer ranks."
        )
    size, rest = divmod(num_rows, num_ranks)
    start = size * rank + min(rank, rest)
    return range(start, start + size + (rank < rest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How a rank's rows are cut into batches."""

    num_rows: int
    """Rows that come in batches."""

    batch_size: int
    count: int
    """Batches: the same number on every rank."""

    @property
    def num_batches(self) -> int:
        """Batches before the last one is cut in two."""
        return -(-self.num_rows // self.batch_size)

    def sizes(self, batches: range) -> list[int]:
        """The rows of each of some batches; if a larger rank has one batch more, the very last one is two halves.

        >>> Steps(num_rows=8, batch_size=4, count=3).sizes(range(2))
        [4, 2, 2]
        """
        last = self.num_rows - (self.num_batches - 1) * self.batch_size
        sizes = [last if batch == self.num_batches - 1 else self.batch_size for batch in batches]
        if batches.stop == self.num_batches < self.count and sizes:
            sizes[-1:] = [last - last // 2, last // 2]
        return sizes


def plan_steps(num_rows: int, rank: int, num_ranks: int, *, batch_size: int, drop_last: bool) -> Steps:
    """The batches of a rank. Without `drop_last` no row is left out, with it no batch is short.

    If the larger ranks need one batch more than the smaller ones, a smaller one cuts its last batch in two. With a
    batch size of 1 it cannot, and has one batch less.

    >>> plan_steps(9, 1, 2, batch_size=4, drop_last=False)
    Steps(num_rows=4, batch_size=4, count=2)
    >>> plan_steps(9, 1, 2, batch_size=3, drop_last=True)
    Steps(num_rows=3, batch_size=3, count=1)
    """
    own = len(rows_of_rank(num_rows, rank, num_ranks))
    if drop_last:
        count = num_rows // num_ranks // batch_size
        return Steps(num_rows=count * batch_size, batch_size=batch_size, count=count)
    count = -(-len(rows_of_rank(num_rows, 0, num_ranks)) // batch_size)
    return Steps(num_rows=own, batch_size=batch_size, count=count if batch_size > 1 else own)


def rows_between(manifest: Manifest, rows: range) -> Manifest:
    """The manifest of the live rows numbered `rows`, in the table's order."""
    live = manifest.live_rows
    if len(rows) == int(live.sum()):
        return manifest
    stops = np.cumsum(live)
    starts = stops - live
    counts = np.zeros(len(live), np.int64)
    masks: dict[int, Mask] = {}
    for group in np.flatnonzero((starts < rows.stop) & (stops > rows.start) & (live > 0)).tolist():
        num_rows = int(manifest.row_group_rows[group])
        first, stop = max(rows.start - int(starts[group]), 0), min(rows.stop - int(starts[group]), int(live[group]))
        if stop - first == num_rows:
            counts[group] = num_rows
            continue
        found = None if manifest.selection is None else manifest.selection.live_rows(group)
        masks[group] = np.zeros(num_rows, bool)
        masks[group][(np.arange(num_rows) if found is None else found)[first:stop]] = True
    return replace(manifest, selection=select_some(counts, masks))


def batches_of_worker(runs: Sequence[range], worker: int, num_workers: int, *, most: int, is_free: bool) -> list[range]:
    """The batches of one worker process, in ranges of at most `most`, which it sends one after the other.

    Workers take turns range by range, so that batches arrive in order. If the order is free and there are many runs,
    they take whole runs: then each run is read by one of them only.

    >>> batches_of_worker([range(0, 5)], 1, 2, most=2, is_free=False)
    [range(2, 4)]
    """
    if is_free and len(runs) >= 4 * num_workers:
        return [part for run in runs[worker::num_workers] for part in _cut(run, most)]
    return [part for run in runs for part in _cut(run, most)][worker::num_workers]


def _cut(batches: range, most: int) -> list[range]:
    return [batches[start : start + most] for start in range(0, len(batches), most)]
