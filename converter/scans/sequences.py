"""One pass over keys and times finds sequences: stretches of rows of one key, without a gap, in order of time."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from converter.arguments import check_integer
from converter.errors import NullValueError, SourceError
from converter.lineage.recipe import viewed
from converter.manifest import Manifest
from converter.reading.ahead import map_row_groups
from converter.reading.checks import place_of_row
from converter.reading.data_files import DataFiles
from converter.scans.columns import read_live_columns
from converter.scans.draws import check_no_draws
from converter.schema import Field
from converter.selection import Mask, select_some
from converter.sequences import Links, Numbers, Sequences
from converter.storage.directory import Storage

Partial = Literal["drop", "pad"]

_MOST_ROWS = 1 << 30
"""Of a sequence, and from one to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What a user asked for, checked."""

    length: int
    by: tuple[str, ...]
    order_by: str | None
    stride: int
    max_gap: Any
    is_padded: bool
    steps: Mapping[str, tuple[int, ...] | int]

    @property
    def names(self) -> list[str]:
        """The columns by which rows are sorted."""
        return [*self.by, *([] if self.order_by is None else [self.order_by])]


@dataclass(slots=True, eq=False)
class _Stretches:
    """Stretches of rows of one key, as the pass finds them; rows are numbers among the live ones."""

    begins: list[Numbers] = field(default_factory=list)
    firsts: list[pa.Table] = field(default_factory=list)
    """The first row of each, its key and time."""

    lasts: list[pa.Table] = field(default_factory=list)


def select_sequences(
    storage: Storage,
    manifest: Manifest,
    length: int,
    *,
    by: str | Sequence[str] | None,
    order_by: str | None,
    stride: int,
    max_gap: Any,
    partial: Partial,
    steps: Mapping[str, Sequence[int] | int] | None,
) -> Manifest:
    """The manifest whose elements are sequences; one pass over the columns `by` and `order_by`.

    Raises:
        NullValueError: a key or a time is null.
        SourceError: rows are not sorted, or no key has enough rows.
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    if partial not in ("drop", "pad"):
        raise ValueError(f"partial must be 'drop' or 'pad', got {partial!r:.80}.")
    given: dict[str, Any] = {
        "length": length, "by": by, "order_by": order_by, "stride": stride, "max_gap": max_gap, "steps": steps or {},
    }  # fmt: skip
    request = _checked(_Request(**given, is_padded=partial == "pad"), manifest)
    live_starts = np.concatenate(([0], np.cumsum(manifest.live_rows)))
    if request.names:
        stretches = _find_stretches(storage, manifest, request, live_starts)
        chains = _join_stretches(storage, manifest, request, stretches, live_starts)
    else:
        chains = _single(np.zeros(1, np.int64))
    recipe = viewed(
        manifest.recipe,
        "sequences",
        length=request.length,
        by=list(request.by) or None,
        order_by=request.order_by,
        stride=request.stride,
        max_gap=request.max_gap,
        partial=partial,
        steps=request.steps or None,
    )
    return replace(_select(manifest, request, chains, live_starts), recipe=recipe)


def _checked(request: _Request, manifest: Manifest) -> _Request:
    """What a user asked for, each argument checked."""
    length = check_integer("length", request.length, least=1)
    check_no_draws(manifest)
    if manifest.sequences is not None:
        raise ValueError("sequences: the elements of this converter are sequences already. Call it once, on its rows.")
    by: Any = request.by
    if by is not None and not isinstance(by, (str, list, tuple)):
        raise TypeError(f"by must be a column's name or a list of them, got {by!r:.80}.")
    keys = (by,) if isinstance(by, str) else tuple(by or ())
    for option, value in (("length", length), ("stride", request.stride)):
        if isinstance(value, int) and value > _MOST_ROWS:
            raise ValueError(f"{option} must be at most {_MOST_ROWS:,}, got {value}.")
    for name in keys:
        _check_column("by", name, manifest)
    if request.order_by is not None:
        _check_column("order_by", request.order_by, manifest)
    if len({*keys, request.order_by}) != len(keys) + 1:
        raise ValueError(f"by and order_by name a column twice: {[*keys, request.order_by]}.")
    if request.max_gap is not None:
        if request.order_by is None:
            raise ValueError("max_gap needs order_by: a gap is between two of its values.")
        _check_gap(request.max_gap, manifest.value_schema[request.order_by])
    return replace(
        request,
        length=length,
        by=keys,
        stride=check_integer("stride", request.stride, least=1),
        steps=_check_steps(manifest, request.steps, length),
    )


def _check_column(option: str, name: Any, manifest: Manifest) -> None:
    column = manifest.value_schema.get(name) if isinstance(name, str) else None
    if column is None:
        raise ValueError(f"{option}: {manifest.value_schema.explain_missing(str(name))}")
    kinds = "a whole number, a date, a time or a text" if option == "by" else "a number, a date or a time"
    refused = ("bytes", "bool", "float32", "float64") if option == "by" else ("bytes", "bool", "str")
    if column.shape != () or column.dtype in refused:
        raise ValueError(
            f"{option}: column {name!r} is {column.shown_dtype} of shape {column.shown_shape}; it needs {kinds}."
        )


def _check_gap(max_gap: Any, column: Field) -> None:
    is_time = column.dtype.startswith("datetime64")
    is_number = isinstance(max_gap, (int, float, np.number)) and not isinstance(max_gap, (bool, np.timedelta64))
    if not (isinstance(max_gap, dt.timedelta) if is_time else is_number):
        kind = "a datetime.timedelta" if is_time else "a number"
        raise TypeError(f"max_gap must be {kind}, as order_by={column.name!r} is {column.dtype}, got {max_gap!r:.80}.")
    if not max_gap >= type(max_gap)(0):
        raise ValueError(f"max_gap must be at least 0, got {max_gap!r:.80}.")


def _check_steps(manifest: Manifest, steps: Any, length: int) -> dict[str, tuple[int, ...] | int]:
    if not isinstance(steps, Mapping):
        raise TypeError(
            f"steps must be a dict of column name to numbers of rows, e.g. {{'x': range(12)}}, got {steps!r:.80}."
        )
    checked: dict[str, tuple[int, ...] | int] = {}
    for name, numbers in steps.items():
        if name not in manifest.schema:
            raise ValueError(f"steps: {manifest.schema.explain_missing(str(name))}")
        is_single = isinstance(numbers, (int, np.integer)) and not isinstance(numbers, bool)
        listed = list(numbers) if isinstance(numbers, (Sequence, range, np.ndarray)) else [numbers] * is_single
        are_rows = all(isinstance(row, (int, np.integer)) and 0 <= row < length for row in listed)
        if not listed or not are_rows or isinstance(numbers, str):
            raise ValueError(f"steps: {name!r} needs a list of numbers from 0 to {length - 1}, got {numbers!r:.80}.")
        checked[str(name)] = int(numbers) if is_single else tuple(map(int, listed))
    return checked


def _find_stretches(storage: Storage, manifest: Manifest, request: _Request, live_starts: Numbers) -> _Stretches:
    """Where stretches begin, in each file on its own; rows out of order are an error."""
    files = DataFiles(storage, manifest, [manifest.schema[name] for name in request.names])
    wanted = np.flatnonzero(manifest.live_rows > 0).tolist()

    def read(row_group: int, given_up: threading.Event) -> pa.Table:
        return read_live_columns(files, row_group, given_up).combine_chunks()

    stretches = _Stretches()
    last: tuple[int, pa.Table] | None = None
    tables: Any = map_row_groups(read, wanted)
    with contextlib.closing(tables):
        for row_group, table in zip(wanted, tables, strict=True):
            first, file = int(live_starts[row_group]), int(manifest.row_group_file[row_group])
            _check_nulls(storage, manifest, table, first)
            is_same_file = last is not None and last[0] == file
            # With the last row before it, if that is in the same file.
            whole = pa.concat_tables([last[1], table]).combine_chunks() if last and is_same_file else table
            num_before = whole.num_rows - table.num_rows
            is_new, is_gap = _changes(storage, manifest, request, whole, first - num_before)
            if not is_same_file:
                is_new, is_gap = np.append(True, is_new), np.append(False, is_gap)
            places = np.flatnonzero(is_new | is_gap)
            stretches.begins.append(first + places)
            stretches.firsts.append(table.take(pa.array(places)))
            # The row before each beginning ends a stretch.
            ends = places + num_before - 1
            if last is not None and not is_same_file:
                stretches.lasts.append(last[1])
            stretches.lasts.append(whole.take(pa.array(ends if is_same_file else ends[1:])))
            # Taken, because a slice keeps the whole row group.
            last = (file, table.take(pa.array([table.num_rows - 1])).combine_chunks())
    assert last is not None
    stretches.lasts.append(last[1])
    return stretches


def _check_nulls(storage: Storage, manifest: Manifest, table: pa.Table, first: int) -> None:
    """Raise NullValueError if a key or a time is null; `first` is the number of the first row."""
    for name in table.column_names:
        if table.column(name).null_count:
            row = first + pc.index(pc.is_null(table.column(name)), True).as_py()
            raise NullValueError(
                f"Column {name!r} is null in {_place(storage, manifest, row)}, and a key or a time of sequences must "
                "not be. Leave such rows out with where(), or fill them with Spark.",
                column=name,
            )


def _changes(storage: Storage, manifest: Manifest, request: _Request, table: pa.Table, first: int) -> tuple[Mask, Mask]:
    """For each row but the first: whether its key is another one, and whether a gap is before it.

    Raises:
        SourceError: it should stand before the row before it.
    """
    num = max(table.num_rows - 1, 0)
    is_new = np.zeros(num, np.bool_)
    is_wrong = np.zeros(num, np.bool_)
    for name in request.by:
        low, high = table.column(name).slice(0, num), table.column(name).slice(1)
        # Only among equal keys so far does the next part of a key decide.
        is_wrong |= ~is_new & _flags(pc.greater(low, high))
        is_new |= _flags(pc.not_equal(low, high))
    is_gap = np.zeros(num, np.bool_)
    if request.order_by is not None:
        low, high = table.column(request.order_by).slice(0, num), table.column(request.order_by).slice(1)
        is_wrong |= ~is_new & ~_flags(pc.less_equal(low, high))
        if request.max_gap is not None:
            is_gap = ~is_new & _is_far(low, high, request.max_gap)
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        names = request.names
        shown = [tuple(table.column(name)[row + number].as_py() for name in names) for number in (0, 1)]
        raise SourceError(
            f"The rows are not sorted by {', '.join(map(repr, names))}: {_place(storage, manifest, first + row + 1)} "
            f"has {shown[1]} after {shown[0]}. Sort them before they are written: {_sorting(request)}."
        )
    return is_new, is_gap


def _flags(array: Any) -> Mask:
    flags: Mask = np.asarray(array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array)
    return flags


def _is_far(low: Any, high: Any, max_gap: Any) -> Mask:
    """Whether two times or numbers are more than `max_gap` apart; `low` is not above `high`."""
    gap = max_gap
    if gap == math.inf:
        return np.zeros(len(low), np.bool_)
    if pa.types.is_decimal(low.type):
        exact, unit = pa.decimal256(_DECIMAL_DIGITS, low.type.scale), decimal.Decimal(1).scaleb(-low.type.scale)
        with decimal.localcontext(_EXACT):
            most = decimal.Decimal(str(max_gap)).quantize(unit)
        if most.adjusted() + low.type.scale >= _DECIMAL_DIGITS:
            # More than there are digits.
            return np.zeros(len(low), np.bool_)
        return _flags(pc.greater(pc.subtract(high.cast(exact), low.cast(exact)), pa.scalar(most, exact)))
    if isinstance(max_gap, dt.timedelta) and pa.types.is_date32(low.type):
        gap = max_gap // dt.timedelta(days=1)
    elif isinstance(max_gap, dt.timedelta):
        kind, gap = pa.timestamp("us"), max_gap // dt.timedelta(microseconds=1)
        low, high = low.cast(kind, safe=False), high.cast(kind, safe=False)
    earlier, later = _numbers(low), _numbers(high)
    if earlier.dtype.kind == "f":
        return np.asarray(later - earlier > gap)
    # Without a sign no difference is too large.
    return np.asarray(later.view(np.uint64) - earlier.view(np.uint64) > np.uint64(min(int(gap), 2**64 - 1)))


def _numbers(column: Any) -> np.ndarray[Any, Any]:
    """Times, days and numbers as int64 or float64."""
    if pa.types.is_date32(column.type):
        column = column.cast(pa.int32())
    is_whole = pa.types.is_temporal(column.type) or pa.types.is_integer(column.type)
    return np.asarray(column.cast(pa.int64() if is_whole else pa.float64()))


_DECIMAL_DIGITS = 75
"""A digit less than Arrow's 256 bits hold, for a difference."""

_EXACT = decimal.Context(prec=1000, rounding=decimal.ROUND_FLOOR)
"""Doubles have up to 309 digits before the point."""


def _sorting(request: _Request) -> str:
    """The line of Spark that sorts."""
    keys = ", ".join(map(repr, request.by))
    order = ", ".join(map(repr, request.names))
    return f"df.repartition({keys}).sortWithinPartitions({order})" if keys else f"df.sort({order})"


def _place(storage: Storage, manifest: Manifest, number: int) -> str:
    """Where a live row is, in words."""
    starts = np.cumsum(manifest.live_rows)
    row_group = int(np.searchsorted(starts, number, side="right"))
    row = number - int(starts[row_group] - manifest.live_rows[row_group])
    live = None if manifest.selection is None else manifest.selection.live_rows(row_group)
    row = row if live is None else int(live[row])
    return place_of_row(storage, manifest, int(manifest.row_group_rows[:row_group].sum()) + row)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chains:
    """Stretches that go on from one another, in other files: together they are the rows of one key."""

    begins: Numbers
    """Where each stretch begins."""

    order: Numbers
    """The stretches chain by chain."""

    goes_on: Mask
    """For each stretch of `order` but the first, whether it goes on from the one before it."""


def _join_stretches(
    storage: Storage, manifest: Manifest, request: _Request, stretches: _Stretches, live_starts: Numbers
) -> _Chains:
    """Which stretches go on from others: those of a key, in the order of the files."""
    begins = np.concatenate(stretches.begins)
    files = manifest.row_group_file[np.searchsorted(live_starts, begins, side="right") - 1]
    if files[0] == files[-1]:
        return _single(begins)
    firsts, lasts = pa.concat_tables(stretches.firsts), pa.concat_tables(stretches.lasts)
    codes = np.zeros(len(begins), np.int64)
    for name in request.by:
        _, before_it = np.unique(codes, return_inverse=True)
        values = firsts.column(name).combine_chunks().dictionary_encode()
        codes = before_it * len(values.dictionary) + np.asarray(values.indices)
    # Those of a key one after the other in time; without times, in the order of the files.
    order = np.arange(len(begins))
    if request.order_by is not None:
        # Of those that begin at one time, one that also ends then comes first.
        ends, starts = (pc.rank(each.column(request.order_by), tiebreaker="dense") for each in (lasts, firsts))
        order = np.lexsort((np.asarray(ends), np.asarray(starts)))
    order = order[np.argsort(codes[order], kind="stable")]
    earlier, later = order[:-1], order[1:]
    goes_on = codes[later] == codes[earlier]
    pairs = np.flatnonzero(goes_on)
    if request.order_by is not None and len(pairs):
        low = lasts.column(request.order_by).take(pa.array(earlier[pairs]))
        high = firsts.column(request.order_by).take(pa.array(later[pairs]))
        is_wrong = ~_flags(pc.less_equal(low, high))
        if is_wrong.any():
            wrong = int(np.argmax(is_wrong))
            stretch = int(later[pairs[wrong]])
            key = " and ".join(f"{name}={firsts.column(name)[stretch].as_py()!r}" for name in request.by)
            raise SourceError(
                f"The rows{f' of {key}' if key else ''} go on in {_place(storage, manifest, int(begins[stretch]))} "
                f"with {request.order_by}={high[wrong].as_py()!r}, within the times of another file, which end with "
                f"{low[wrong].as_py()!r}. Write the rows of a key into one file: {_sorting(request)}."
            )
        if request.max_gap is not None:
            goes_on[pairs[_is_far(low, high, request.max_gap)]] = False
    return _Chains(begins=begins, order=order, goes_on=goes_on)


def _single(begins: Numbers) -> _Chains:
    """Stretches that do not go on."""
    return _Chains(begins=begins, order=np.arange(len(begins)), goes_on=np.zeros(len(begins) - 1, np.bool_))


def _select(manifest: Manifest, request: _Request, chains: _Chains, live_starts: Numbers) -> Manifest:
    """The manifest with the rows that begin a sequence."""
    begins, order, num_rows = chains.begins, chains.order, int(live_starts[-1])
    sizes = np.diff(np.append(begins, num_rows))
    # Rows before each stretch in its chain, and of the whole chain.
    ordered = sizes[order]
    heads = np.flatnonzero(np.append(True, ~chains.goes_on))
    chain = np.repeat(np.arange(len(heads)), np.diff(np.append(heads, len(order))))
    before = np.cumsum(ordered) - ordered
    ahead, total = np.empty_like(sizes), np.empty_like(sizes)
    ahead[order] = before - before[heads][chain]
    total[order] = np.add.reduceat(ordered, heads)[chain]
    masks: dict[int, Mask] = {}
    for row_group in np.flatnonzero(manifest.live_rows > 0).tolist():
        first, stop = int(live_starts[row_group]), int(live_starts[row_group + 1])
        low = int(np.searchsorted(begins, first, side="right")) - 1
        high = int(np.searchsorted(begins, stop, side="left"))
        edges = np.clip(np.append(begins[low:high], stop), first, stop)
        stretch = np.repeat(np.arange(low, high), np.diff(edges))
        place = np.arange(first, stop) - begins[stretch] + ahead[stretch]
        is_start = place % request.stride == 0
        if not request.is_padded:
            is_start &= place + request.length <= total[stretch]
        live = None if manifest.selection is None else manifest.selection.live_rows(row_group)
        mask = np.zeros(int(manifest.row_group_rows[row_group]), np.bool_)
        mask[slice(None) if live is None else live] = is_start
        masks[row_group] = mask
    selection = select_some(np.zeros(manifest.num_row_groups, np.int64), masks)
    if not selection.num_rows:
        raise SourceError(
            f"No key has {request.length} rows in a row: the longest has {int(total.max())}. Pass a smaller length, a "
            "larger max_gap, or partial='pad'."
        )
    earlier, later = order[:-1][chains.goes_on], order[1:][chains.goes_on]
    # One that goes on with the very next row is no stretch of its own.
    is_apart = later != earlier + 1
    is_begin = np.ones(len(begins), np.bool_)
    is_begin[later[~is_apart]] = False
    last, following = (begins + sizes - 1)[earlier[is_apart]], begins[later[is_apart]]
    by_last = np.argsort(last)
    return replace(
        manifest,
        selection=selection,
        sequences=Sequences(
            length=request.length,
            rows=manifest.selection,
            steps=request.steps,
            is_padded=request.is_padded,
            begins=begins[is_begin] if request.is_padded or len(last) else None,
            links=Links(last=last[by_last], next=following[by_last]),
        ),
    )
