"""How the rows of a dataset lie in files and row groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from converter.dataset import DatasetConverter
from converter.manifest import Manifest
from converter.plot.figures import axes_of, files_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def layout(converter: DatasetConverter, *, ax: Axes | None = None) -> Axes:
    """Draw the row groups in the order of the rows: width is rows, height is bytes. Reads nothing.

    Neighbouring files have different colours. If rows were left out, by `where`, `split` or a Delta table's deletions,
    the upper part of a row group is pale: as much of it as rows were left out there.

    ```python
    from converter import plot

    ax = plot.layout(converter)
    ```

    Args:
        converter: of any source, but no mixture.
        ax: where to draw; None for a new figure.

    Raises:
        CacheError: the converter was deleted.
        MissingDependencyError: matplotlib is not installed.
        TypeError, ValueError: it is no converter, or a mixture.
    """
    _, manifest = files_of(converter)
    axes = axes_of(ax, 8, 3)
    rows = manifest.row_group_rows
    edges = np.concatenate(([0], np.cumsum(rows)))
    megabytes = manifest.row_group_bytes / 1e6
    live = manifest.of_rows.live_rows / np.maximum(rows, 1)
    # A parity of its own for each file that has row groups.
    parity = np.cumsum(np.diff(manifest.row_group_file, prepend=manifest.row_group_file[:1]) != 0) % 2
    for number in (0, 1):
        is_of_it = parity == number
        colour = f"C{number}"
        if (live < 1).any():
            axes.stairs(np.where(is_of_it, megabytes, 0), edges, fill=True, color=colour, alpha=0.3)
        axes.stairs(np.where(is_of_it, megabytes * live, 0), edges, fill=True, color=colour)
    # The edges of row groups, unless they would hide them.
    if len(rows) <= 200:
        axes.vlines(edges[1:-1], 0, megabytes[1:], color="white", linewidth=0.8)
    axes.set_xlim(0, max(1, int(edges[-1])))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows, in the order of the dataset")
    axes.set_ylabel("MB of a row group,\nuncompressed")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title(_title(manifest), fontsize="medium")
    return axes


def _title(manifest: Manifest) -> str:
    elements = "rows" if manifest.sequences is None else "sequences"
    files, row_groups = len(manifest.file_names), manifest.num_row_groups
    median = f", median {int(np.median(manifest.row_group_rows)):,} rows" if row_groups else ""
    counted = f"{files:,} file{'' if files == 1 else 's'}, {row_groups:,} row group{'' if row_groups == 1 else 's'}"
    return f"{manifest.num_live_rows:,} {elements} in {counted}{median}"
