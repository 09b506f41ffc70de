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
        TypeError: the description is no text.
    """
    check_bar(shown, "shown", "torch")
    if not isinstance(description, str | None):
        raise TypeError(f"description must be a str, got {description!r:.80}.")
    return _followed(batches, epochs, stats, description) if is_seen(shown) else iter(batches)


def _followed(
    batches: Iterable[Any], epochs: Epochs, stats: Callable[[], LoaderStats], description: str | None
) -> Iterator[Any]:
    from tqdm import tqdm

    total = None if epochs.num_epochs is None else epochs.remaining
    bar = tqdm(
        total=total,
        desc=f"epoch {epochs.next.epoch}" if description is None else _one_line(description),
        # What the loop waits for comes first: a narrow terminal cuts the end.
        bar_format="{desc}{postfix} " + (_ENDLESS if total is None else _BAR),
        postfix="",
        file=NotebookOutput() if is_in_notebook() else sys.stderr,
        dynamic_ncols=not is_in_notebook(),
    )
    with bar:
        try:
            for batch in batches:
                yield batch
                # True about ten times a second, when the bar was drawn; what is said here stands in the next one.
                if bar.update():
                    steps = epochs.steps
                    bar.set_postfix_str(_said(steps.rows, steps.seconds, steps.waited_seconds), refresh=False)
        finally:
            # After `break` and errors, too.
            record = stats()
            bar.set_postfix_str(f"{_said(record.rows, record.seconds, record.waited_seconds)}, limit: {record.limit}")


_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
_ENDLESS = "{n_fmt} batches [{elapsed}]"
_MAX_DESCRIPTION = 40


def _one_line(description: str) -> str:
    """A description without signs that would break the line."""
    text = "".join(sign if sign.isprintable() else " " for sign in description)
    return text if len(text) <= _MAX_DESCRIPTION else f"{text[: _MAX_DESCRIPTION - 1]}…"


def _said(rows: int, seconds: float, waited: float) -> str:
    if not seconds:
        return "no batch yet"
    return f"waited {waited / seconds:.0%}, {rows / seconds:,.0f} rows/s"
