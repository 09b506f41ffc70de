"""What columns hold: histograms of numbers, counts of categories and texts, nulls and shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.dataset import DatasetConverter
from converter.manifest import Manifest
from converter.plot.figures import PLAIN, files_of, legible, pyplot, say_instead
from converter.scans.samples import SampledColumn, take_sample
from converter.schema import Field, Schema
from converter.statistics import ColumnStatistics
from converter.storage.directory import Storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_MAX_COLUMNS = 60
_MAX_EXACT_NUMBERS = 50_000_000
"""Rows times columns that are counted one by one, by two passes over each column."""

_SAMPLE_ROWS, _SAMPLE_ROW_GROUPS = 262_144, 64
_SAMPLE_TEXTS, _TEXT_ROW_GROUPS = 16_384, 16
_BINS, _MAX_VALUES = 32, 8
_MAX_NAME_SIGNS, _MAX_VALUE_SIGNS = 28, 14
_WIDTH, _HEIGHT = 2.2, 1.7
"""Inches of a column."""

_WIDEST = 1e300
"""Ranges that matplotlib can scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What is drawn of one column."""

    field: Field
    note: str
    """Below it: dtype, nulls, and whether it is a sample."""

    counts: npt.NDArray[np.int64] | None = None
    edges: npt.NDArray[Any] | None = None
    """Of bins; None if `counts` are those of `values`."""

    values: Sequence[Any] = ()
    instead: str = ""
    """What is said if nothing is counted."""


def columns(
    converter: DatasetConverter, columns: Sequence[str] | None = None, *, figure: Figure | SubFigure | None = None
) -> npt.NDArray[Any]:
    """Draw what each column holds, one small picture for each, up to 60 in a figure.

    Numbers, dates and times have a histogram, categories and texts the counts of the most frequent values, arrays their
    shape. Values are those in the files, before they are decoded or standardised.

    Up to 50 million numbers (rows times columns) are counted exactly, by two passes over each column. With more, and
    for texts, booleans and categories without statistics, it is a sample, and the picture says so: 262,144 rows (of
    texts 16,384) from row groups spread over the data. Nulls are exact if they were counted while writing, else those
    of the sample.

    ```python
    from converter import plot

    age, y = plot.columns(converter, ["age", "y"])
    ```

    Args:
        converter: of any source, but no mixture.
        columns: which ones, in this order; None for all.
        figure: where to draw; None for a new figure.

    Returns:
        The Axes of the columns, shape `(columns,)`.

    Raises:
        CacheError: the converter was deleted.
        MissingDependencyError: matplotlib is not installed.
        ReadError: the rows could not be read.
        TypeError, ValueError: it is no converter, or a mixture; a column does not exist; there are more than 60.
    """
    storage, manifest = files_of(converter)
    rows = manifest.of_rows
    fields = _wanted(replace(rows, decoders={}, scales={}).batch_schema, columns)
    plt = pyplot()
    shown = _look(converter, storage, rows, fields)
    num_across = min(len(fields), math.ceil(math.sqrt(1.6 * len(fields))))
    num_down = math.ceil(len(fields) / num_across)
    if figure is None:
        figure = plt.figure(figsize=(_WIDTH * num_across, _HEIGHT * num_down + 0.4), layout="constrained")
    grid = figure.subplots(num_down, num_across, squeeze=False).ravel()
    for axes, column in zip(grid, shown, strict=False):
        _draw(axes, column)
    for axes in grid[len(shown) :]:
        axes.remove()
    figure.suptitle(f"{rows.num_live_rows:,} rows", fontsize="medium")
    drawn: npt.NDArray[Any] = grid[: len(shown)]
    return drawn


def _wanted(schema: Schema, names: Sequence[str] | None) -> list[Field]:
    if names is not None and (isinstance(names, str) or not isinstance(names, Sequence) or not names):
        raise TypeError(f"columns must be a list of names, or None for all, got {names!r:.100}.")
    wanted = list(dict.fromkeys(schema.names if names is None else names))
    missing = [name for name in wanted if name not in schema]
    if missing:
        raise ValueError(schema.explain_missing(str(missing[0])))
    if len(wanted) > _MAX_COLUMNS:
        raise ValueError(
            f"There are {len(wanted):,} columns, and a figure shows up to {_MAX_COLUMNS}. Pass columns=[…] to choose "
            "some of them."
        )
    return [schema[name] for name in wanted]


def _look(converter: DatasetConverter, storage: Storage, rows: Manifest, fields: Sequence[Field]) -> list[_Shown]:
    """What is drawn of each column: everything is read here."""
    has_statistics = "nulls" in converter.describe()["columns"][0]
    known: Mapping[str, ColumnStatistics] = converter.statistics if has_statistics else {}
    # A sample of all rows is as exact, and opens each file once for all columns.
    num_row_groups = int(np.count_nonzero(rows.live_rows))
    is_small = rows.num_live_rows <= _SAMPLE_ROWS and num_row_groups <= _SAMPLE_ROW_GROUPS
    numbers = {field.name for field in fields if _has_histogram(field)}
    counted = numbers if len(numbers) * rows.num_live_rows <= _MAX_EXACT_NUMBERS else set()

    def needs_sample(field: Field) -> bool:
        if field.shape != () or field.is_object or (field.categories is not None and field.name in known):
            return False
        has_nulls_to_count = field.has_nulls and field.name not in known
        return is_small or has_nulls_to_count or field.name not in counted

    sampled = [field.name for field in fields if needs_sample(field)]
    texts = [field.name for field in fields if field.dtype == "str" and field.shape == ()]
    sample = take_sample(storage, rows, sampled, num_rows=_SAMPLE_ROWS, most_row_groups=_SAMPLE_ROW_GROUPS)
    sample |= take_sample(storage, rows, texts, num_rows=_SAMPLE_TEXTS, most_row_groups=_TEXT_ROW_GROUPS)
    shown = []
    for field in fields:
        column, statistics = sample.get(field.name), known.get(field.name)
        is_whole = column is not None and column.num_rows == rows.num_live_rows
        note = f"{field.shown_dtype}{_shown_nulls(field, column, statistics, is_whole=is_whole)}"
        if field.name in counted and not is_whole:
            bins = _of_whole_numbers(field, *converter.histogram(field.name, _BINS))
            shown.append(_of_bins(field, note, bins))
        elif statistics is not None and statistics.counts is not None and field.shape == ():
            shown.append(_of_values(field, note, list(field.categories or ()), statistics.counts))
        elif column is not None:
            noted = note if is_whole else f"{note}\nof {column.num_rows:,} rows"
            shown.append(_of_sample(field, noted, column))
        elif field.shape != ():
            shown.append(_Shown(field=field, note=note, instead=f"shape {field.shown_shape}"))
        else:
            why = "row groups are too large" if field.name in (*sampled, *texts) else "not counted"
            shown.append(_Shown(field=field, note=note, instead=why))
    return shown


def _has_histogram(field: Field) -> bool:
    return field.shape == () and not field.is_object and field.dtype != "bool" and field.categories is None


def _shown_nulls(
    field: Field, column: SampledColumn | None, statistics: ColumnStatistics | None, *, is_whole: bool
) -> str:
    if statistics is not None:
        return f", {statistics.null_count:,} null" if statistics.null_count else ""
    if not field.has_nulls:
        return ""
    if column is None or not column.num_rows:
        return ", nulls"
    return f", {column.null_count:,} null" if is_whole else f", {column.null_count / column.num_rows:.1%} null"


def _of_sample(field: Field, note: str, column: SampledColumn) -> _Shown:
    if not len(column.values):
        return _Shown(field=field, note=note, instead="nulls only" if column.num_rows else "no rows")
    if isinstance(column.values, pa.Array):
        values, counts = column.most_common()
        if len(counts) == len(column.values) and len(counts) > _MAX_VALUES:
            return _Shown(field=field, note=note, instead="each value once")
        return _of_values(field, note, values[:_MAX_VALUES].to_pylist(), counts)
    if field.dtype == "bool":
        found = column.histogram(2)
        return _of_values(field, note, [False, True], np.zeros(2, np.int64) if found is None else found[0])
    return _of_bins(field, note, column.histogram(_BINS))


def _of_bins(field: Field, note: str, found: tuple[npt.NDArray[np.int64], npt.NDArray[Any]] | None) -> _Shown:
    if found is None or not found[0].sum():
        return _Shown(field=field, note=note, instead="no finite number")
    counts, edges = found
    if edges.dtype.kind != "M" and field.dtype.startswith("datetime64"):
        # A day begins where it is counted from.
        edges = np.floor(edges + 0.5).astype(np.int64).astype(field.dtype)
    if edges.dtype.kind == "M" and not (
        np.datetime64("0001-01-01") <= edges[0] <= edges[-1] < np.datetime64("9999-12-31")
    ):
        # Years that calendars of matplotlib do not have.
        edges = 1970 + edges.astype("datetime64[D]").astype(np.float64) / 365.2425
        note += "\nyears"
    if edges.dtype.kind == "f" and not max(abs(edges[0]), abs(edges[-1])) < _WIDEST:
        return _Shown(field=field, note=note, instead=f"from {edges[0]:.3g} to {edges[-1]:.3g}")
    return _Shown(field=field, note=note, counts=counts, edges=edges)


def _of_whole_numbers(
    field: Field, counts: npt.NDArray[np.int64], edges: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """The same with a bin for each whole number or day, if there are fewer of them than bins, which would be a comb."""
    if field.stored_dtype.kind not in "iu" or field.dtype == "datetime64[us]" or not counts.any():
        return counts, edges
    # A day's edges are whole, those of a single number half a number away from it.
    least, most = edges[[0, -1]].astype(np.float64 if edges.dtype.kind == "f" else np.int64).tolist()
    if most - least >= len(counts):
        return counts, edges
    numbers = np.arange(math.ceil(least), math.floor(most) + 1)
    places = np.searchsorted(np.linspace(least, most, len(counts) + 1), numbers, side="right") - 1
    of_each = counts[np.minimum(places, len(counts) - 1)]
    if of_each.sum() != counts.sum():
        # One day: its edges were half a day away, and were cut towards 1970.
        numbers, of_each = np.array([most if most > 0 else least]), counts.sum(keepdims=True)
    return of_each, np.append(numbers, numbers[-1] + 1) - 0.5


def _of_values(field: Field, note: str, values: Sequence[Any], counts: npt.NDArray[np.int64]) -> _Shown:
    """The most frequent values; `values` has at least those, in the order of their counts."""
    order = np.argsort(-counts, kind="stable")[:_MAX_VALUES]
    hidden = len(counts) - len(order)
    noted = f"{note}\n{hidden:,} more values" if hidden and field.categories is None else note
    return _Shown(field=field, note=noted, counts=counts[order], values=[values[number] for number in order.tolist()])


def _draw(axes: Axes, column: _Shown) -> None:
    axes.set_title(legible(column.field.name, _MAX_NAME_SIGNS), fontsize="small", **PLAIN)
    if column.counts is None:
        say_instead(axes, f"{column.instead}\n{column.note}")
        return
    axes.set_xlabel(column.note, fontsize="x-small", **PLAIN)
    axes.tick_params(labelsize="x-small")
    axes.spines[["top", "right"]].set_visible(False)
    if column.edges is None:
        labels = [legible(value, _MAX_VALUE_SIGNS) for value in column.values]
        axes.barh(range(len(labels)), column.counts)
        axes.set_yticks(range(len(labels)), labels, **PLAIN)
        axes.invert_yaxis()
        axes.set_xticks([])
        return
    axes.stairs(column.counts, column.edges, fill=True)
    axes.set_yticks([])
    if column.edges.dtype.kind == "M":
        from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

        locator = AutoDateLocator(minticks=2, maxticks=4)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    else:
        axes.locator_params(axis="x", nbins=3)
