"""A bar for a loop over a loader: how far it is, how fast, and which part of its time it waits for data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from converter.bars import NotebookOutput, check_bar, is_in_notebook, is_seen
from converter.loading.epochs import Epochs
from converter.loading.stats import LoaderStats


def follow(
    batches: Iterable[Any],
    epochs: Epochs,
    stats: Callable[[], LoaderStats],
    description: str | None,
    shown: bool | None,
) -> Iterator[Any]:
    """One iteration over a loader's batches, with a bar if `shown`; None shows it where somebody may look.

    Raises:
        MissingDependencyError: a bar is asked for and tqdm is not installed.
    """
    check_bar(shown, "shown", "torch")
    return _followed(batches, epochs, stats, description) if is_seen(shown) else iter(batches)


def _followed(
    batches: Iterable[Any], epochs: Epochs, stats: Callable[[], LoaderStats], description: str | None
) -> Iterator[Any]:
    from tqdm import tqdm

    bar = tqdm(
        total=None if epochs.num_epochs is None else epochs.remaining,
        desc=f"epoch {epochs.next.epoch}" if description is None else description,
        unit=" batches",
        file=NotebookOutput() if is_in_notebook() else sys.stderr,
        dynamic_ncols=not is_in_notebook(),
    )
    steps = epochs.steps
    with bar:
        for batch in batches:
            steps = epochs.steps
            yield batch
            # True about ten times a second, when the bar was drawn; what is said here stands in the next one.
            if bar.update():
                bar.set_postfix_str(_said(steps.rows, steps.seconds, steps.waited_seconds), refresh=False)
        record = stats()
        text = _said(record.rows, record.seconds, record.waited_seconds)
        bar.set_postfix_str(f"{text} (limit: {record.limit})")


def _said(rows: int, seconds: float, waited: float) -> str:
    if not seconds:
        return ""
    return f"{rows / seconds:,.0f} rows/s, waited {waited / seconds:.0%}"
