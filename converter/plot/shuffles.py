"""Where the rows of a batch come from, and how far they are from those of a perfect shuffle.

By arithmetic alone: the order of an epoch is a function of its plan, so nothing is read. A row's place is its number
among the elements of the epoch as they are stored, which is as exact for filtered rows, for sequences and for rows
that come several times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from converter.loading.epochs import Epochs
from converter.plan import EpochPlan, Piece
from converter.plot.figures import axes_of, say_instead
from converter.reading.source import BatchSource

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Places = npt.NDArray[np.int64]

_MAX_BATCHES = 256
"""Batches that are measured, spread over the epoch: the spread of their means is then known to 4 %."""

_MAX_PLACES = 1 << 24
"""Rows that are measured: 128 MB of memory."""

_MAX_DOTS = 64
"""Rows of a batch that are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleQuality:
    """How well an order mixes: 1 is as well as a perfect shuffle."""

    spread: float
    """How far the rows of a batch lie apart: their standard deviation against that of a perfect shuffle's."""

    of_means: float
    """How much the batches differ: the standard deviation of their mean places against that of a perfect shuffle's."""


def shuffle(loader: Any, *, ax: Axes | None = None) -> Axes:
    """Draw where the rows of up to 256 batches of the next epoch are stored. Reads nothing.

    The title compares them with a perfect shuffle, a uniform permutation of all rows: how far the rows of a batch lie
    apart, and how much the batches' means vary. If the stored rows are sorted by what the model learns, gradients vary
    as much more. The band has 95 % of the means of a perfect shuffle.

    ```python
    from converter import plot

    with converter.make_batch_reader(batch_size=64, shuffle=True) as loader:
        ax = plot.shuffle(loader)
    ```

    Args:
        loader: of `make_torch_dataloader`, `make_tf_dataset` or `make_batch_reader`.
        ax: where to draw; None for a new figure.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        TypeError: it is no loader.
        ValueError: the order depends on more than the plan: of a mixture, or with `bucket_by`.
    """
    source, epoch = _checked(loader)
    plan = source.plan(epoch)
    axes = axes_of(ax, 8, 4)
    num_elements = int(source.manifest.elements_of(epoch).sum())
    most = min(plan.num_batches, _MAX_BATCHES, max(2, _MAX_PLACES // source.batch_size))
    numbers = np.linspace(0, plan.num_batches - 1, most).round().astype(np.int64)
    batches = list(places_of_batches(source, plan, numbers.tolist()))
    if not batches:
        say_instead(axes, "an epoch has no batch")
        return axes
    shown = [places[:: -(-len(places) // _MAX_DOTS)] for places in batches]
    dots = np.repeat(numbers, list(map(len, shown)))
    axes.plot(dots, np.concatenate(shown), ".", color="C0", markersize=1.5, markeredgewidth=0, label="a row")
    means = [places.mean() for places in batches]
    half = 1.96 * _std_of_mean(num_elements, source.batch_size)
    middle = (num_elements - 1) / 2
    band = "95 % of the means of a perfect shuffle"
    axes.axhspan(middle - half, middle + half, color="C2", alpha=0.3, linewidth=0, label=band)
    axes.plot(numbers, means, ".", color="C1", markersize=4, label="mean of a batch")
    axes.set_xlim(-0.5, plan.num_batches - 0.5)
    axes.set_ylim(-0.5, num_elements - 0.5)
    axes.set_xlabel(f"batch of epoch {epoch}")
    axes.set_ylabel("place in the stored order")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title(_title(quality_of(batches, num_elements)), fontsize="medium")
    axes.legend(loc="upper right", fontsize="small", markerscale=3)
    return axes


def _checked(loader: Any) -> tuple[BatchSource, int]:
    """What a loader reads, and the epoch that it reads next."""
    epochs = getattr(loader, "_epochs", None)
    if not isinstance(epochs, Epochs):
        raise TypeError(f"Expected a loader, as make_torch_dataloader returns it, got {type(loader).__name__}.")
    source = epochs.source
    if source.parts:
        raise ValueError("This loader reads a mixture: plot loaders of the converters that were mixed.")
    if source.bucket_by is not None:
        raise ValueError(
            f"With bucket_by={source.bucket_by!r} the order depends on lengths that are known only once they are read. "
            "Plot a loader without bucket_by: its batches come from the same windows."
        )
    return source, epochs.next.epoch


def places_of_batches(source: BatchSource, plan: EpochPlan, numbers: list[int]) -> Iterator[Places]:
    """The places of the rows of some batches, which are named in ascending order, in the order of the batch."""
    counts = source.manifest.elements_of(plan.epoch)
    starts = np.cumsum(counts) - counts
    kept: tuple[int, Places] | None = None
    for number in numbers:
        parts = []
        for piece in plan.pieces(number, number + 1):
            if kept is None or kept[0] != piece.window:
                # Neighbours share a window, and the permutation of a large one takes seconds.
                kept = piece.window, _order_of(plan, piece, starts, counts)
            parts += [kept[1][span.start : span.stop] for span in piece.spans]
        yield np.concatenate(parts)


def _order_of(plan: EpochPlan, piece: Piece, starts: Places, counts: Places) -> Places:
    """The places of a window's elements, in the order in which they come."""
    sizes = counts[piece.row_groups]
    first = np.repeat(starts[piece.row_groups] - (np.cumsum(sizes) - sizes), sizes)
    stored: Places = first + np.arange(piece.window_rows)
    if plan.shuffle is None:
        return stored
    return stored[plan.shuffle.permutation(piece.window_rows, epoch=plan.epoch, window=piece.window)]


def quality_of(batches: list[Places], num_elements: int) -> ShuffleQuality:
    """How well some batches are mixed. If nothing can vary, as with a single row, it counts as perfect."""
    whole = (num_elements**2 - 1) / 12
    sizes = np.array([len(places) for places in batches])
    # The expected variance in a batch without replacement, and of its mean.
    within = whole * num_elements / max(1, num_elements - 1) * (1 - 1 / sizes)
    found = np.array([places.var() for places in batches])
    spread = float(np.sqrt(found.sum() / within.sum())) if within.sum() > 0 else 1.0
    expected = np.array([_std_of_mean(num_elements, size) for size in sizes.tolist()])
    is_random = expected > 0
    if not is_random.any():
        return ShuffleQuality(spread=spread, of_means=1.0)
    means = np.array([places.mean() for places in batches])[is_random] - (num_elements - 1) / 2
    return ShuffleQuality(spread=spread, of_means=float(np.sqrt(np.mean((means / expected[is_random]) ** 2))))


def _std_of_mean(num_elements: int, size: int) -> float:
    """The standard deviation of the mean place of `size` elements that are drawn without replacement."""
    if num_elements < 2 or size >= num_elements:
        return 0.0
    return float(np.sqrt((num_elements + 1) * (num_elements - size) / (12 * size)))


def _title(quality: ShuffleQuality) -> str:
    return (
        f"Against a perfect shuffle: the rows of a batch lie {quality.spread:.2f} times as far apart,\n"
        f"and the means of batches vary {quality.of_means:.2f} times as much"
    )
