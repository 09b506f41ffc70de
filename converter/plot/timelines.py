"""What a loop and the reader's threads did, over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from converter.plot.figures import PLAIN, axes_of, legible, say_instead

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STAGES = ("open", "fetch", "decode", "gather", "decode bytes", "transform", "copy")
"""The order of the lanes."""

_MAX_STAGE_SIGNS = 20


class Stats(Protocol):
    """What `timeline` draws of a loader's statistics: its last batches, and the last pieces of its work."""

    @property
    def steps(self) -> npt.NDArray[np.float64]:
        """Shape `(batches, 2)`: when the loop asked for a batch and when it received it, in seconds."""

    @property
    def spans(self) -> tuple[tuple[str, float, float], ...]:
        """The stage, the begin and the end of each piece of work, in the same seconds."""


def timeline(stats: Stats, *, ax: Axes | None = None) -> Axes:
    """Draw when a loop waited for batches, and what the reader's threads did meanwhile: a lane for each kind of work.

    In a lane darker parts are those of several threads. If the loop waits, the busiest lane says for what.

    ```python
    from converter import plot

    with converter.make_torch_dataloader(batch_size=2) as loader:
        for batch in loader:
            ...
    ax = plot.timeline(loader.stats())
    ```

    Args:
        stats: what a loader's `stats()` returns.
        ax: where to draw; None for a new figure.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        TypeError: `stats` is something else.
    """
    steps, spans = _checked(stats)
    named = {name for name, _, _ in spans}
    stages = [name for name in _STAGES if name in named] + sorted(named - set(_STAGES))
    lanes = ["loop waits", "loop works", *stages]
    axes = axes_of(ax, 8, 1.2 + 0.32 * len(lanes))
    if not len(steps) and not spans:
        say_instead(axes, "no batch was handed over yet")
        return axes
    asked, received = steps[:, 0], steps[:, 1]
    _draw_lane(axes, 0, asked, received - asked, "C3", alpha=1)
    _draw_lane(axes, 1, received[:-1], np.maximum(asked[1:] - received[:-1], 0), "C2", alpha=1)
    for number, stage in enumerate(stages, start=2):
        times = np.array([(begin, end) for name, begin, end in spans if name == stage])
        _draw_lane(axes, number, times[:, 0], times[:, 1] - times[:, 0], "C0", alpha=0.5)
    axes.set_yticks(range(len(lanes)), [legible(lane, _MAX_STAGE_SIGNS) for lane in lanes], **PLAIN)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlabel("seconds since the iteration began")
    axes.set_title(_title(asked, received), fontsize="medium")
    axes.margins(x=0.01)
    axes.autoscale_view(scaley=False)
    return axes


def _checked(stats: Any) -> tuple[npt.NDArray[np.float64], tuple[tuple[str, float, float], ...]]:
    steps, spans = getattr(stats, "steps", None), getattr(stats, "spans", None)
    if not isinstance(steps, np.ndarray) or steps.ndim != 2 or steps.shape[1] != 2 or not isinstance(spans, tuple):
        raise TypeError(f"stats must be what a loader's stats() returns, got {type(stats).__name__}.")
    return steps.astype(np.float64), spans


def _draw_lane(axes: Axes, lane: int, begins: Any, seconds: Any, colour: str, *, alpha: float) -> None:
    if len(begins):
        bars = np.column_stack([begins, seconds])
        axes.broken_barh(bars, (lane - 0.4, 0.8), facecolor=colour, edgecolor="none", alpha=alpha)  # type: ignore[arg-type]


def _title(asked: npt.NDArray[np.float64], received: npt.NDArray[np.float64]) -> str:
    if not len(asked):
        return "no batch was handed over yet"
    waited, whole = received - asked, received[-1] - asked[0]
    share = f" ({waited.sum() / whole:.0%})" if whole > 0 else ""
    batches = "batch" if len(asked) == 1 else f"{len(asked):,} batches"
    return (
        f"The last {batches}: the loop waited {waited.sum():.3g} of {whole:.3g} s{share}, {waited.max():.3g} s at most"
    )
