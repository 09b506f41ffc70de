"""What a loader would do, told without reading a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from converter.windows import BatchSource

_BASE_BYTES = 64 << 20
"""What threads, their allocators and a file's footer take whatever the data are: measured 20 to 45 MB."""

_INDEX_BYTES = 3 * 8
"""Of each row of a window that is permuted: the random number, its place, and the place taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """What a loader would do in each epoch; None where a filter decides it."""

    num_rows: int | None
    """Rows of this shard's batches in an epoch."""

    steps_per_epoch: int | None
    """Batches of this shard in an epoch; with `uneven="keep"` another shard may have one less or more."""

    num_epochs: int | None
    batch_size: int
    cur_shard: int
    shard_count: int

    dropped_rows: int | None
    """Rows that no shard yields: those that would make steps unequal, and of last batches with `drop_last`."""

    padded_rows: int | None
    """Rows of this shard that another one reads too."""

    window_rows: int
    """Rows that are mixed together."""

    num_windows: int | None
    bytes_per_epoch: int | None
    """Bytes of the wanted columns that this shard decodes in an epoch; windows at a shard's edge are read by both."""

    peak_memory_bytes: int
    """A bound on the memory that reading takes beside mapped files, without the batches that you keep."""

    def __repr__(self) -> str:
        def shown(value: int | None) -> str:
            return "unknown (filters)" if value is None else f"{value:,}"

        def size(value: int | None) -> str:
            return "unknown (filters)" if value is None else f"{value / 1e6:,.1f} MB"

        shard = f", shard {self.cur_shard} of {self.shard_count}" if self.shard_count > 1 else ""
        epochs = "endless" if self.num_epochs is None else f"{self.num_epochs}"
        return "\n".join(
            (
                f"LoaderPlan(epochs {epochs}{shard}",
                f"  steps per epoch   {shown(self.steps_per_epoch)} of {self.batch_size:,} rows",
                f"  rows per epoch    {shown(self.num_rows)}, dropped {shown(self.dropped_rows)}, padded "
                + shown(self.padded_rows),
                f"  window            {self.window_rows:,} rows, {shown(self.num_windows)} windows",
                f"  bytes per epoch   {size(self.bytes_per_epoch)}",
                f"  peak memory       {size(self.peak_memory_bytes)})",
            )
        )


def describe_plan(source: BatchSource, *, num_epochs: int | None, is_filtered: bool) -> LoaderPlan:
    """The plan of a loader; with `is_filtered` only what a filter does not change."""
    manifest = source.manifest
    plan = source.plan(0)
    own_rows = plan.num_rows - plan.num_padded
    in_batches = min(plan.num_rows, plan.num_batches * source.batch_size)
    counted = {
        "num_rows": in_batches,
        "steps_per_epoch": plan.num_batches,
        "dropped_rows": _dropped_rows(source),
        "padded_rows": max(0, in_batches - own_rows),
        "num_windows": len(plan.window_starts) - 1,
        "bytes_per_epoch": _bytes_decoded(source, sum(_rows_of(source, piece.row_groups) for piece in plan.pieces())),
    }
    # Another epoch's windows are cut from another order: they may be larger by a row group.
    order, firsts = manifest.row_group_rows[plan.group_order], plan.window_starts[:-1]
    window_rows = int(np.add.reduceat(order, firsts).max() + order.max())
    window_bytes = _bytes_decoded(source, window_rows)
    if any(source.is_variable(field.name) for field in source.fields):
        # Rows differ in size, and so do row groups.
        sizes = manifest.row_group_bytes[plan.group_order]
        window_bytes = int(np.add.reduceat(sizes, firsts).max() + sizes.max())
        if any(one.shape is None and source.has_element_mask(one.name) for one in source.fields):
            # A mask takes a byte for each element.
            window_bytes *= 2
    num_windows = len(plan.window_starts) - 1
    batch_bytes = math.ceil(window_bytes / window_rows) * source.batch_size
    # Read ahead, and in use; while a window is read its rows are there a second time, of objects a third.
    in_flight = min(source.windows_ahead + 1, num_windows)
    copies = 2 if any(source.is_variable(field.name) for field in source.fields) else 1
    permuted = window_rows * _INDEX_BYTES if source.shuffle is not None else 0
    in_work = min(source.workers_count, num_windows) * (copies * window_bytes + permuted)
    peak = _BASE_BYTES + in_flight * window_bytes + in_work + 2 * copies * batch_bytes
    if not source.storage.is_local:
        # What was fetched, and the client's own copy of it.
        peak += 2 * min(source.workers_count, num_windows) * window_bytes
    if source.transform is not None:
        peak += 2 * (source.prefetch_batches or 2 * source.workers_count) * batch_bytes
    return LoaderPlan(
        **(dict.fromkeys(counted) if is_filtered else counted),
        num_epochs=num_epochs,
        batch_size=source.batch_size,
        cur_shard=source.shard.index,
        shard_count=source.shard.count,
        window_rows=source.window_rows,
        peak_memory_bytes=peak,
    )


def _dropped_rows(source: BatchSource) -> int:
    """Rows that no shard yields: sizes differ by one at most, so shards are of two kinds."""
    num_rows, count = source.manifest.num_live_rows, source.shard.count
    small, num_larger = divmod(num_rows, count)
    yielded = 0
    for own, shards in ((small + 1, num_larger), (small, count - num_larger)):
        size = {"drop": small, "keep": own, "pad": small + 1 if num_larger else small}[source.uneven]
        in_batches = size - size % source.batch_size if source.drop_last else size
        yielded += shards * min(own, in_batches)
    return num_rows - yielded


def _rows_of(source: BatchSource, row_groups: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    return int(source.manifest.row_group_rows[row_groups].sum())


def _bytes_decoded(source: BatchSource, num_rows: int) -> int:
    """Bytes of the wanted columns of so many rows, as the files have them."""
    manifest = source.manifest
    found = 0.0
    for field in source.fields:
        known = manifest.statistics.get(field.name)
        if field.shape is not None and source.has_element_mask(field.name):
            found += num_rows * math.prod(field.shape)
        if field.shape is not None and not field.is_object:
            found += num_rows * field.stored_dtype.itemsize * math.prod(field.shape)
        elif known is not None and known.num_bytes is not None:
            found += known.num_bytes * num_rows / manifest.num_rows
        else:
            found += int(manifest.row_group_bytes.sum()) * num_rows / manifest.num_rows
    if source.row_index is not None:
        found += num_rows * 8
    return int(found)
