"""What a loader will do, in one report: steps come from `plan`, peak memory from `reading.bounds`; and advice."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np

from converter.markup import facts
from converter.positions import Shard
from converter.reading.bounds import bytes_decoded, memory_bound
from converter.reading.source import BatchSource
from converter.state import Past

logger = logging.getLogger(__name__)

_FEW_ROW_GROUPS = 8
_CLUSTERED_SPAN = 0.25
"""If row groups cover less of a column's range than this, the rows are sorted by it. Mixed rows cover nearly all."""


def check_steps(source: BatchSource, num_epochs: int | None) -> None:
    """Warn if an epoch has no batch.

    Raises:
        ValueError: an epoch has no batch, and `num_epochs=None`: the loader would never end.
    """
    if source.num_batches():
        return
    cause = (
        f"batch_size={source.batch_size} is more than the {source.plan(0).num_rows} rows of this shard, and "
        "drop_last=True leaves them out, so an epoch has no batch"
    )
    if num_epochs is None:
        raise ValueError(f"{cause}, for ever with num_epochs=None. Choose a smaller batch_size.")
    logger.warning("%s. Choose a smaller batch_size.", cause)


def log_uneven_shards(source: BatchSource) -> None:
    """Log what dividing the rows among several shards costs: dropped rows, or unequal numbers of steps."""
    num_rows, count = source.manifest.num_live_rows, source.shard.count
    if count == 1:
        return
    if source.uneven == "drop" and (num_dropped := source.plan(0).num_dropped):
        logger.log(
            logging.WARNING if source.is_shard_found else logging.INFO,
            "Each epoch drops %d of %d rows (different ones each time), so that %d shards take equally many steps.",
            num_dropped, num_rows, count,
        )  # fmt: skip
    if source.uneven != "keep":
        return
    few, many = _batches_of_shards(source)
    if few != many:
        logger.warning(
            "With uneven='keep' some of the %d shards take %d batches and others %d. A training loop that "
            "synchronizes the ranks in each step would hang: pass uneven='pad', or use "
            "torch.distributed.algorithms.join.Join.",
            count, few, many,
        )  # fmt: skip


def log_shards_apart(source: BatchSource, epochs_done: int, num_batches: int) -> bool:
    """Log that another shard is in another epoch after as many steps, so that its state is another one. True if so."""
    few, many = _batches_of_shards(source)
    if few == many or not (epochs_done or num_batches > few):
        return False
    logger.warning(
        "With uneven='keep' some shards take %d batches in an epoch and others %d, so after equal steps they are in "
        "different epochs: this state is right for shard %d of %d alone. Let each rank save and load its own, or pass "
        "num_epochs=1 and iterate once for each epoch.",
        few, many, source.shard.index, source.shard.count,
    )  # fmt: skip
    return True


def is_any_batch_left(source: BatchSource, epoch: int, past: Past) -> bool:
    """Whether any shard has a batch left in an epoch: all of them begin the next one, or none."""
    shards = (Shard(index=index, count=source.shard.count) for index in range(source.shard.count))
    sources = (replace(source, shard=shard) for shard in shards)
    return any(each.plan(epoch, past).num_batches for each in (source, *sources))


def _batches_of_shards(source: BatchSource) -> tuple[int, int]:
    """The fewest and the most batches that a shard takes in an epoch with `uneven="keep"`."""
    num_rows, count = source.manifest.num_live_rows, source.shard.count
    # Shard sizes differ by at most one row.
    few, many = (
        size // source.batch_size if source.drop_last else -(-size // source.batch_size)
        for size in (num_rows // count, -(-num_rows // count))
    )
    return few, many


def suggest_mixing(source: BatchSource) -> bool:
    """Log advice if the rows are sorted by a column that is read: a window mixes only neighbours. True if logged."""
    manifest = source.manifest
    if manifest.num_row_groups < _FEW_ROW_GROUPS or source.window_rows >= manifest.num_live_rows:
        return False
    clustered = []
    for field in source.fields:
        statistics = manifest.statistics.get(field.name)
        if statistics is None or statistics.row_group_span is None or statistics.row_group_span > _CLUSTERED_SPAN:
            continue
        # A row number is no label. Without minimum and maximum an int64 column may be one: then give no advice.
        is_row_number = field.dtype == "int64" and (
            statistics.closed is None or statistics.max - statistics.min + 1 == manifest.num_rows
        )
        if not is_row_number:
            clustered.append(field.name)
    if clustered:
        logger.info(
            "The rows are sorted or clustered by %s, and shuffling mixes windows of %d rows. If the model learns "
            "from it, write with shuffle_rows_seed=….",
            ", ".join(map(repr, clustered[:5])),
            source.window_rows,
        )
    return bool(clustered)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPlan:
    """What a loader does in each epoch; a value is None if it takes a pass over the filtered rows to know it.

    ```python
    plan = converter.plan(batch_size=32, cur_shard=0, shard_count=4)
    print(plan.steps_per_epoch, plan.peak_memory_bytes / 1e6, "MB")
    ```
    """

    num_rows: int | None
    """Rows that this shard yields in an epoch."""

    steps_per_epoch: int | None
    """Batches that this shard yields in an epoch; with `uneven="keep"` another shard may have one less or more."""

    num_epochs: int | None
    """Epochs of one iteration; None for endless."""

    batch_size: int
    """Rows of a batch."""

    cur_shard: int
    """The shard that this plan is for, in `[0, shard_count)`."""

    shard_count: int
    """How many shards the rows are divided among."""

    dropped_rows: int | None
    """Rows that no shard yields: those beyond equal shards (`uneven="drop"`) and of short batches (`drop_last`)."""

    padded_rows: int | None
    """Rows of this shard that another shard reads too (`uneven="pad"`)."""

    window_rows: int
    """Rows that are mixed together."""

    num_windows: int | None
    """Windows that this shard reads in an epoch."""

    bytes_per_epoch: int | None
    """Bytes of the columns that this shard decodes in an epoch. If two shards share a window, both decode it."""

    peak_memory_bytes: int
    """An upper bound on the bytes that reading needs, without memory-mapped files and the batches that you keep.

    With worker processes it is that of each of them. The windows that they hand over lie in shared memory beside it:
    one that is being filled, one in use, and two that wait, of each process.

    Some sizes are not known before the rows are read: what `ragged="pad"` adds to rows that are shorter than the
    longest of their batch; rows whose decoder has no shape, which count as some of a local dataset take, or by their
    bytes in a store; texts of a dictionary whose writer does not tell their size: they count as the first do.
    """

    elements: str = "rows"
    """What is counted: rows, or sequences of rows."""

    def __repr__(self) -> str:
        (_, epochs), *others = self._facts()
        return "\n".join([f"LoaderPlan(epochs {epochs}", *(f"  {name:18}{value}" for name, value in others)]) + ")"

    def _repr_html_(self) -> str:
        return f"<p>LoaderPlan</p>{facts(self._facts())}"

    def _facts(self) -> list[tuple[str, str]]:
        """What it says, by name."""

        def shown(value: int | None) -> str:
            return "unknown (filters)" if value is None else f"{value:,}"

        def size(value: int | None) -> str:
            return "unknown (filters)" if value is None else f"{value / 1e6:,.1f} MB"

        counts = f"{shown(self.num_rows)}, dropped {shown(self.dropped_rows)}, padded {shown(self.padded_rows)}"
        shard = f", shard {self.cur_shard} of {self.shard_count}" if self.shard_count > 1 else ""
        epochs = "endless" if self.num_epochs is None else f"{self.num_epochs}"
        return [
            ("epochs", f"{epochs}{shard}"),
            ("steps per epoch", f"{shown(self.steps_per_epoch)} of {self.batch_size:,} {self.elements}"),
            (f"{self.elements} per epoch", counts),
            ("window", f"{self.window_rows:,} {self.elements}, {shown(self.num_windows)} windows"),
            ("bytes per epoch", size(self.bytes_per_epoch)),
            ("peak memory", size(self.peak_memory_bytes)),
        ]


def describe_plan(source: BatchSource, *, num_epochs: int | None, is_filtered: bool) -> LoaderPlan:
    """The plan of a loader. With `is_filtered`, counts that a filter changes are None."""
    plan = source.plan(0)
    own_rows = plan.num_rows - plan.num_padded
    pieces = list(plan.pieces())
    in_batches = min(plan.num_rows, plan.num_batches * source.batch_size)
    counts = {
        "num_rows": in_batches,
        "steps_per_epoch": plan.num_batches,
        "dropped_rows": _dropped_rows(source),
        "padded_rows": max(0, in_batches - own_rows),
        "num_windows": len({piece.window for piece in pieces}),
        "bytes_per_epoch": bytes_decoded(source, sum(_rows_of(source, piece.row_groups) for piece in pieces)),
    }
    return LoaderPlan(
        **(dict.fromkeys(counts) if is_filtered else counts),
        num_epochs=num_epochs,
        batch_size=source.batch_size,
        cur_shard=source.shard.index,
        shard_count=source.shard.count,
        window_rows=source.window_rows,
        peak_memory_bytes=memory_bound(source, plan),
        elements="rows" if source.sequences is None else "sequences",
    )


def _dropped_rows(source: BatchSource) -> int:
    """Rows that no shard yields. Shards have two sizes, which differ by one row."""
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
