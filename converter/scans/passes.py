"""One pass over the rows: the selection of a filter or of a split, or statistics."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.errors import SourceError
from converter.manifest import Manifest
from converter.portable import moments
from converter.reading.ahead import map_row_groups
from converter.reading.data_files import DataFiles
from converter.reading.decode import decode
from converter.reading.lists import flatten_lists
from converter.reading.ragged import ragged_values, row_sizes
from converter.reading.runs import LENGTH_SUFFIX, VALID_SUFFIX
from converter.reading.source import ELEMENT_VALID_SUFFIX, INNER_LENGTH_SUFFIX, BatchSource
from converter.reading.windows import open_files, read_runs
from converter.scans.columns import read_columns
from converter.scans.elements import with_flags
from converter.scans.filters import (
    Filters,
    bounded_columns,
    comparisons_of,
    evaluate,
    expression_of,
    list_values,
    named_columns,
    say_filters,
)
from converter.scans.pruning import find_arrow_schema, may_pass_by_footer, rule_in_row_groups, ruled_in_by_log
from converter.schema import Field, Schema
from converter.selection import Mask, Selection, hash_bytes, hash_numbers, select, select_some, share_rows, split_rows
from converter.statistics import ColumnStatistics, StatisticsByColumn
from converter.storage.directory import Storage


def resolve_filters(storage: Storage, manifest: Manifest, filters: Filters) -> Selection:
    """The live rows that pass `filters`, by one pass over the filtered columns.

    Row groups that Parquet statistics exclude are not read. `filters` says what a comparison means.

    Raises:
        ValueError, TypeError: the filters are not understood, name no column, or do not fit its type.
    """
    listed = list_values(filters)
    arrow_schema = find_arrow_schema(storage, manifest)
    comparisons = comparisons_of(listed, manifest, arrow_schema)
    expression = expression_of(listed, comparisons)
    flags = [(item.flag_name, pa.bool_()) for group in comparisons for item in group if item.elements is not None]
    arrow_schema = pa.schema([*arrow_schema, *starmap(pa.field, flags)])
    names = named_columns(expression, comparisons, manifest.value_schema, arrow_schema)
    files = DataFiles(storage, manifest, [manifest.schema[name] for name in names])
    may_pass_footer = None
    may_pass = np.ones(manifest.num_row_groups, np.bool_)
    bounded = bounded_columns(listed, manifest, names)
    if bounded and manifest.source_columns is None:
        may_pass = rule_in_row_groups(expression, files, bounded, arrow_schema)
    elif bounded:
        may_pass = ruled_in_by_log(expression, comparisons, manifest, bounded, arrow_schema)[manifest.row_group_file]
        may_pass_footer = functools.partial(may_pass_by_footer, expression, files, bounded, arrow_schema)

    def mask_row_group(row_group: int, given_up: threading.Event) -> Mask:
        num_rows = int(manifest.row_group_rows[row_group])
        if may_pass_footer is not None and not may_pass_footer(row_group=row_group, given_up=given_up):
            return np.zeros(num_rows, np.bool_)
        table = read_columns(files, row_group, given_up)
        try:
            mask = evaluate(expression, with_flags(table, comparisons, manifest, arrow_schema))
        except pa.ArrowException as error:
            cause = str(error).rstrip(".")
            raise ValueError(f"filters: {say_filters(expression)} fails on row group {row_group}: {cause}.") from error
        return mask if manifest.selection is None else mask & manifest.selection.mask(row_group, num_rows)

    wanted = np.flatnonzero(may_pass & (manifest.live_rows > 0)).tolist()
    masks = dict(zip(wanted, map_row_groups(mask_row_group, wanted), strict=True))
    return select_some(np.zeros(manifest.num_row_groups, np.int64), masks)


def split(
    storage: Storage, manifest: Manifest, bounds: Sequence[float], *, by: str | None, seed: int
) -> list[Selection]:
    """The live rows in parts that end at the fractions `bounds`; with `by`, all rows of a key are in one part.

    Raises:
        ValueError: `by` is no column of keys.
    """
    if by is None:
        return split_by_rows(manifest, bounds, seed=seed)
    field = manifest.value_schema.get(by) if isinstance(by, str) else None
    if field is None:
        raise ValueError(f"by: {manifest.schema.explain_missing(str(by))}")
    if field.shape != () or field.dtype.startswith("float"):
        what = "dtype " if field.shape == () else "rows of several "
        raise ValueError(f"by: column {by!r} has {what}{field.dtype}; a key is a whole number, a time or a text.")
    return split_by_key(storage, manifest, field, bounds, seed=seed)


def split_by_rows(manifest: Manifest, bounds: Sequence[float], *, seed: int) -> list[Selection]:
    """The live rows in parts that end at the fractions `bounds`; sizes are exact to a row."""
    num_rows = manifest.num_live_rows
    ends = [0, *(math.floor(num_rows * bound + 0.5) for bound in bounds), num_rows]
    left: npt.NDArray[np.int64] = np.diff(ends).astype(np.int64)
    parts: list[list[Mask]] = [[] for _ in bounds]
    for row_group, group_rows in enumerate(manifest.row_group_rows.tolist()):
        live = None if manifest.selection is None else manifest.selection.live_rows(row_group)
        live = np.arange(group_rows) if live is None else live
        counts = share_rows(len(live), left) if len(live) else np.zeros_like(left)
        left = left - counts
        numbers = split_rows(counts, seed=f"{manifest.fingerprint}/{seed}/{row_group}".encode())
        for number, masks in enumerate(parts):
            mask = np.zeros(group_rows, np.bool_)
            mask[live[numbers == number]] = True
            masks.append(mask)
    return [select(masks) for masks in parts]


def split_by_key(
    storage: Storage, manifest: Manifest, field: Field, bounds: Sequence[float], *, seed: int
) -> list[Selection]:
    """The live rows, each in the part that the hash of its key falls into."""
    files = DataFiles(storage, manifest, [field])

    def number_row_group(row_group: int, given_up: threading.Event) -> npt.NDArray[np.int64]:
        column = read_columns(files, row_group, given_up).column(0)
        with files.file_of(row_group).named_errors(row_group):
            hashes = _hash_column(column, field, seed)
        # The upper 53 bits, so that as a float they are exact.
        fractions = (hashes >> np.uint64(11)).astype(np.float64) / 2.0**53
        numbers: npt.NDArray[np.int64] = np.searchsorted(bounds, fractions, side="right").astype(np.int64)
        if manifest.selection is not None:
            numbers[~manifest.selection.mask(row_group, len(numbers))] = len(bounds)
        return numbers

    parts: list[list[Mask]] = [[] for _ in bounds]
    for numbers in map_row_groups(number_row_group, range(manifest.num_row_groups)):
        for number, masks in enumerate(parts):
            masks.append(numbers == number)
    return [select(masks) for masks in parts]


def _hash_column(column: pa.ChunkedArray, field: Field, seed: int) -> npt.NDArray[np.uint64]:
    """A hash for each row, the same for the same key on every machine; null is a key of its own."""
    array = column.combine_chunks()
    valid = None if not array.null_count else np.asarray(pc.is_valid(array))
    if field.is_object:
        array = pc.cast(pc.fill_null(array, "" if field.dtype == "str" else b""), pa.large_binary())
        _, offsets_buffer, data = array.buffers()
        offsets = np.frombuffer(offsets_buffer, np.int64, count=len(array) + 1, offset=array.offset * 8)
        raw = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        hashes = hash_bytes(raw[offsets[0] : offsets[-1]], offsets - offsets[0], seed)
    else:
        hashes = hash_numbers(decode(column, field, fill=0).values, seed)
    if valid is not None:
        hashes[~valid] = hash_bytes(np.empty(0, np.uint8), np.zeros(2, np.int64), seed ^ 0x6E756C6C)[0]
    return hashes


def scan_statistics(source: BatchSource) -> dict[str, ColumnStatistics]:
    """Exact statistics of the columns of `source`, by one pass over all rows, for datasets without them."""
    counts: dict[str, npt.NDArray[np.int64]] = {}
    opened: dict[str, Any] = {}
    opened_odd: dict[str, Any] = {}
    lengths: dict[str, tuple[int, int]] = {}
    scratch = moments.new_scratch()
    null_counts = dict.fromkeys((field.name for field in source.fields), 0)
    for run in read_runs(source, source.plan(0), open_files(source)):
        for field in source.fields:
            column = run.columns[field.name]
            # In a column without nulls this name may be a user's column.
            valid = run.columns[field.name + VALID_SUFFIX] if field.has_nulls else None
            if valid is not None:
                null_counts[field.name] += int(len(valid) - valid.sum())
            if field.is_object and field.shape == ():
                continue
            if field.is_object:
                sizes = row_sizes(flatten_lists(column, field)[1])
                sizes, values = (sizes if valid is None else sizes[valid]), None
            elif isinstance(column, pa.Array):
                rows = ragged_values(column, field)
                values, offsets = rows.values, rows.offsets
                sizes = np.diff(offsets) if valid is None else np.diff(offsets)[valid]
            else:
                values = column if valid is None else column[valid]
                sizes = np.full(len(values), math.prod(field.shape or ()))
            if field.shape != () and len(sizes):
                least, most = lengths.get(field.name, (int(sizes.min()), int(sizes.max())))
                lengths[field.name] = (min(least, int(sizes.min())), max(most, int(sizes.max())))
            if values is None:
                continue
            elements = math.prod(field.shape) if field.shape else 1
            width = elements if elements <= moments.MAX_ELEMENTS else 1
            parts = [(opened, width, values)]
            if source.has_element_mask(field.name):
                mask = run.columns[field.name + ELEMENT_VALID_SUFFIX]
                if isinstance(mask, pa.Array):
                    parts = [(opened, width, values[ragged_values(mask, replace(field, dtype="bool")).values])]
                else:
                    mask = (mask if valid is None else mask[valid]).reshape(len(values), elements)
                    is_whole = mask.all(axis=1)
                    # Rows with a null have no complete elements: their numbers are counted alone.
                    odd = values[~is_whole].reshape(-1, mask.shape[1])[mask[~is_whole]]
                    parts = [(opened, width, values[is_whole]), (opened_odd, 1, odd)]
            if field.categories is not None:
                rows_of_each = counts.setdefault(field.name, np.zeros(len(field.categories), np.int64))
                for _, _, part in parts:
                    rows_of_each += np.bincount(part.reshape(-1), minlength=len(rows_of_each))
                continue
            for into, part_width, part in parts:
                numbers = part.view(np.uint8) if part.dtype == np.bool_ else part
                if len(numbers) or into is opened:
                    counted = into.setdefault(field.name, moments.new_moments(part_width))
                    moments.add_values(counted, numbers.reshape(-1, part_width), scratch)
    statistics = {}
    for field in source.fields:
        shortest, longest = lengths.get(field.name, (None, None))
        closed = moments.close_moments(opened[field.name]) if field.name in opened else None
        if closed is not None and field.name in opened_odd:
            odd_closed = moments.close_moments(opened_odd[field.name])
            closed = moments.merge_moments(moments.flatten_moments(closed), odd_closed)
        statistics[field.name] = ColumnStatistics(
            field=field,
            null_count=null_counts[field.name],
            shortest=shortest,
            longest=longest,
            closed=closed,
            counts=counts.get(field.name),
        )
    return statistics


def scan_all_statistics(schema: Schema, source_of: Callable[[Sequence[str]], BatchSource]) -> StatisticsByColumn:
    """Exact statistics of all columns; `source_of` gives all rows of some of them."""
    # A column whose name could be another column's mask or lengths is read in a pass of its own.
    suffixes = (VALID_SUFFIX, ELEMENT_VALID_SUFFIX, LENGTH_SUFFIX, INNER_LENGTH_SUFFIX)
    later = [name for name in schema.names if name.endswith(suffixes)]
    statistics: dict[str, ColumnStatistics] = {}
    unknown: dict[str, SourceError] = {}
    for part in ([name for name in schema.names if name not in later], *([name] for name in later)):
        while part:
            try:
                statistics |= scan_statistics(source_of(part))
            except SourceError as error:
                # Of a column whose values have no tensor form; the others have statistics.
                if error.column not in part:
                    raise
                unknown[error.column] = error
                part.remove(error.column)
            else:
                break
    return StatisticsByColumn({name: statistics[name] for name in schema.names if name not in unknown}, unknown)
