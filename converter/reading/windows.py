"""Windows of row groups are decoded together, permuted, and cut into exact batches.

Reader threads take the windows of a plan one by one, decode their columns and gather each column once, in the plan's
order. Batches are slices of that, so the work per batch is slicing; everything else happens ahead of use, outside the
GIL, in threads that end with the generator.

A batch that spans two windows is joined from both; every other batch shares memory with its window alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from converter.errors import NullValueError, ReadError, SourceError
from converter.manifest import Manifest
from converter.plan import EpochPlan, Piece, Shuffle
from converter.pool import Answer, Threads
from converter.reading.ahead import read_ahead
from converter.reading.bounds import CUT_BYTES, cuts_first_window, element_bytes, memory_bound
from converter.reading.buckets import in_buckets, lengths_of
from converter.reading.data_files import DataFiles
from converter.reading.decoding import ROW_NUMBERS, decode_column, decode_runs
from converter.reading.fetching import fetching
from converter.reading.gather import (
    WIDE_BYTES,
    Array,
    WindowRows,
    gather,
    gather_stack,
    gather_views,
    is_joint,
    take_columns,
)
from converter.reading.local_cache import open_local_cache
from converter.reading.meter import WindowWork
from converter.reading.mixing import mixed_runs
from converter.reading.row_groups import FetchedGroup, RowGroup, gather_wide_pages
from converter.reading.runs import VALID_SUFFIX, Columns, Run, cut_run, cut_sequences, mark_padding
from converter.reading.scaling import standardized
from converter.reading.sequences import Layout, SequencedRows, lay_out, live_starts_of
from converter.reading.source import ELEMENT_VALID_SUFFIX, BatchSource
from converter.sequences import SEQUENCE_LENGTH
from converter.shards import count_processes_of_host
from converter.storage.at_once import LinkedEvent, Turn

logger = logging.getLogger(__name__)

WAIT_SECONDS = 30.0
"""How long a loader waits for data before it says so."""

_FIRST_PART = 8
_LOOK_BYTES = 8 << 20
"""How much a thread allocates between two checks of the memory; a check takes 10 µs."""


def open_files(source: BatchSource, processes_count: int = 1) -> DataFiles:
    """The data files for `read_runs`. Keep them over epochs: mapping them anew is a third of the reading.

    `processes_count` processes read this shard together.
    """
    if source.parts:
        # Each has threads of its own; all share the line of this shard.
        parts = tuple(
            open_files(part, source.shard.count * processes_count * len(source.parts)) for part in source.parts
        )
        for part_files in parts:
            # What one of them takes is no reason for another one to release its memory.
            part_files.room, part_files.meter = parts[0].room, parts[0].meter
        parts[0].parts = parts
        return parts[0]
    source.storage.share_line((count_processes_of_host() or source.shard.count) * processes_count)
    cache, manifest = None, source.manifest
    is_ours_or_of_a_log = manifest.source_columns is None or manifest.version is not None
    if source.local_cache_dir is None or source.storage.is_local:
        pass
    elif is_ours_or_of_a_log or (manifest.file_stamps is not None and manifest.file_stamps.all()):
        # With the URL: datasets in two places may have the same footers.
        content = f"{source.storage.url} {manifest.fingerprint}"
        cache = open_local_cache(source.local_cache_dir, content, source.local_cache_bytes)
    else:
        logger.warning(
            "local_cache_dir is not used: %s does not report when files were written, so copies could be stale.",
            source.storage.url,
        )
    return DataFiles(
        source.storage,
        source.manifest.of_rows,
        source.stored_fields,
        nulls=source.nulls,
        undecoded=source.decoders,
        verify_checksums=source.verify_checksums,
        local_cache=cache,
    )


def read_runs(
    source: BatchSource,
    plan: EpochPlan,
    files: DataFiles,
    batches: range | None = None,
    given_up: threading.Event | None = None,
) -> Iterator[Run]:
    """Yield the plan's batches, or those numbered in `batches`, in order. Requests end once `given_up` is set.

    Raises:
        NullValueError: a column with `nulls="raise"` holds one.
        SourceChangedError: a file is gone, or is not what the manifest says.
        ReadError: a row group cannot be decoded.
    """
    if source.parts:
        yield from mixed_runs(source, plan, files, batches, read_plans)
        return
    wanted = range(plan.num_batches) if batches is None else batches
    num_rows = min(wanted.stop * plan.batch_size, plan.num_rows) - wanted.start * plan.batch_size
    pieces = plan.pieces(wanted.start, wanted.stop)
    pieces = _cut_first(source, plan, pieces) if batches is None else pieces
    reader = _WindowReader(source, plan, files, LinkedEvent(files.given_up if given_up is None else given_up))
    yield from _read_pieces(reader, pieces, num_rows, first_batch=wanted.start)


def read_plans(
    source: BatchSource, plans: Iterator[EpochPlan], num_rows: int, files: DataFiles, given_up: threading.Event
) -> Generator[Columns, None, None]:
    """Yield the `num_rows` rows of some plans as one stream: the first window of a plan is read before it is wanted.

    `given_up` cancels the fetching of remote files.
    """
    first = next(plans)
    pieces = itertools.chain.from_iterable(plan.pieces() for plan in itertools.chain([first], plans))
    reader = _WindowReader(source, first, files, given_up)
    with contextlib.closing(_read_pieces(reader, _cut_first(source, first, pieces), num_rows)) as runs:
        for run in runs:
            yield run.columns


def _cut_first(source: BatchSource, plan: EpochPlan, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The pieces, the first in two parts, so that the first batch is quick."""
    if not cuts_first_window(source):
        return pieces
    # The first part is an eighth of a window: 48 MB take a tenth of a second.
    few = -(-source.window_rows // (_FIRST_PART * source.batch_size)) * source.batch_size
    return plan.first_pieces(pieces, few)


def _read_pieces(
    reader: _WindowReader, pieces: Iterator[Piece], num_rows: int, *, first_batch: int = 0
) -> Generator[Run, None, None]:
    """Yield the first `num_rows` rows of the pieces, cut into runs of whole batches."""
    source, plan = reader.source, reader.plan
    with fetching(reader.fetch, pieces, source, reader.given_up) as items:
        windows = read_ahead(
            reader.read,
            items,
            workers_count=source.workers_count,
            ahead=source.windows_ahead,
            given_up=[reader.given_up],
            waited=reader.say_waiting,
            # The loop's own thread waits for a mixture, whose parts have threads that wait for these.
            meter=None if source.is_part else reader.meter,
            pool="read",
        )
        runs = cut_run(windows, plan.batch_size, num_rows, first_batch=first_batch)
        if source.uneven == "pad":
            runs = (mark_padding(run, plan) for run in runs)
        if source.sequences is not None:
            most = max(1, CUT_BYTES // max(1, element_bytes(source) * plan.batch_size))
            cut = cut_sequences(
                runs,
                batches_at_once=most,
                workers_count=source.workers_count,
                meter=reader.meter,
                is_part=source.is_part,
            )
            with contextlib.closing(windows), contextlib.closing(cut):
                yield from cut
            return
        if not source.decoders:
            yield from runs
            return
        # Closed here: the traceback of an error in a decoder keeps `windows`, and so its threads.
        with contextlib.closing(windows), contextlib.closing(decode_runs(source, runs, reader.meter)) as decoded:
            yield from decoded


class _WindowReader:
    """Reads pieces of plans that differ in their epochs; used by several threads at once."""

    def __init__(self, source: BatchSource, plan: EpochPlan, files: DataFiles, given_up: threading.Event) -> None:
        self.source, self.plan, self._files = source, plan, files
        self.given_up = given_up
        """Set when the fetched bytes are no longer wanted."""

        self.meter = files.meter
        self._cut_order: Array | None = None
        self._cut_lock = threading.Lock()
        self._scales = source.scales
        rows = source.manifest.row_group_rows
        self._first_rows = np.cumsum(rows) - rows
        if files.room.most_bytes is None:
            files.room.most_bytes = memory_bound(source, plan)
        self._live_starts = None if source.sequences is None else live_starts_of(source.manifest)

    def say_waiting(self, seconds: float) -> None:
        """Say, once in the life of a loader, that it waits for the store: other ranks may wait for this one."""
        if seconds < WAIT_SECONDS or self._files.has_said_waiting:
            return
        self._files.has_said_waiting = True
        shard = self.source.shard
        who = f"Shard {shard.index} of {shard.count} has" if shard.count > 1 else "This loader has"
        logger.warning(
            "%s waited for data from %s for %.0f seconds, and waits on. A store that does not answer for its "
            "timeout_seconds is an error; this is said once.",
            who, self.source.storage.url, seconds,
        )  # fmt: skip

    def fetch(self, piece: Piece, turn: Turn, pool: Threads) -> Mapping[int, FetchedGroup]:
        """The bytes of a piece's remote row groups, by their numbers."""
        began = time.perf_counter()
        try:
            layout = self._layout_of(piece)
            numbers = piece.row_groups.tolist() if layout is None else layout.row_groups
            fetched = self._files.fetch(numbers, self.given_up, turn, pool)
        finally:
            turn.end()
        sizes = [(group.is_copy, group.parts.num_bytes) for group in fetched.values()]
        copied = sum(num_bytes for is_copy, num_bytes in sizes if is_copy)
        self.meter.add_fetched(began, sum(num_bytes for _, num_bytes in sizes) - copied, copied)
        return fetched

    def read(self, item: tuple[Piece, Answer[Mapping[int, FetchedGroup]] | None]) -> Columns:
        """The piece's rows, in order, in memory of their own."""
        piece, fetching = item
        if fetching is None:
            return self._read(piece, None)
        # A failed fetch does not mean that this host's copies are damaged.
        began = time.perf_counter()
        fetched = fetching.result()
        self.meter.add_waited("fetch", time.perf_counter() - began)
        try:
            return self._read(piece, fetched)
        except (ReadError, SourceError) as error:
            again = self._fetch_again(fetched, error)
            if again is None:
                raise
        return self._read(piece, again)

    def _fetch_again(
        self, fetched: Mapping[int, FetchedGroup], error: ReadError | SourceError
    ) -> Mapping[int, FetchedGroup] | None:
        """The same with the store's own bytes; None if this host's copies are not to blame, or the store is away."""
        copies = [number for number, group in fetched.items() if group.is_copy]
        is_expected = isinstance(error, NullValueError) and any(
            field.name == error.column and field.has_nulls for field in self.source.fields
        )
        if not copies or is_expected:
            return None
        try:
            return {**fetched, **self._files.fetch(copies, self.given_up, anew=True)}
        except ReadError:
            return None

    def _read(self, piece: Piece, fetched: Mapping[int, FetchedGroup] | None) -> Columns:
        work = WindowWork(self.meter)
        try:
            layout = self._layout_of(piece)
            numbers = piece.row_groups.tolist() if layout is None else layout.row_groups
            groups = self._files.row_groups(numbers, fetched, work)
            try:
                if layout is None:
                    columns = self._gather(numbers, groups, self._rows_of(piece, groups), work)
                else:
                    columns = self._in_sequences(self._gather(numbers, groups, layout.rows, work), layout, work)
            except pa.ArrowException:
                # For example damaged offsets of texts: this names their row group.
                for group in groups:
                    group.validate()
                raise
            self._files.check_mapped(groups)
        finally:
            self._files.room.done()
        work.done(sum(column.nbytes for column in columns.values()))
        return columns

    def _layout_of(self, piece: Piece) -> Layout | None:
        """Which rows are read for the sequences of a piece; None if its elements are rows."""
        if self._live_starts is None:
            return None
        return lay_out(self.source.manifest, piece.row_groups, self._places_of(piece), self._live_starts, piece.epoch)

    def _in_sequences(self, columns: Columns, layout: Layout, work: WindowWork) -> Columns:
        """Columns of the rows of a layout as columns of its sequences."""
        source, sequences = self.source, self.source.sequences
        assert sequences is not None
        row_index = source.row_index
        found: dict[str, Any] = {}
        for name, values in columns.items():
            field = source.field_of(name)
            fill = {"str": "", "bytes": b""}.get("" if field is None else field.dtype, 0)
            column = source.steps_name(name)
            found[name] = SequencedRows(
                values=values,
                offsets=layout.offsets,
                lengths=layout.lengths,
                steps=sequences.steps_of(column),
                shape=sequences.shape_of(column),
                fill=-1 if name == row_index else fill,
            )
        found.pop(ROW_NUMBERS, None)
        for name in source.decoders:
            found[name], rows = found[name].needed(layout.rows)
            views, numbers = gather_views([columns[name]], rows), columns[row_index or ROW_NUMBERS][rows]
            with work.of("decode bytes"):
                found[name] = replace(found[name], values=decode_column(source, name, views, numbers, self.given_up))
        if layout.lengths is not None:
            found[SEQUENCE_LENGTH] = layout.lengths
        return found

    def _gather(self, numbers: Sequence[int], groups: Sequence[RowGroup], rows: Any, work: WindowWork) -> Columns:
        source = self.source
        stacks = {stack.name: stack for stack in source.stacks}
        columns: Columns = {}
        together: dict[str, list[Array]] = {}
        unseen_bytes = 0
        # Column by column: the pages of the next then land in memory that is still in the processor's cache.
        for name in source.names:
            members = stacks[name].columns if name in stacks else (name,)
            unseen_bytes += self._column_bytes(members, groups)
            if unseen_bytes >= _LOOK_BYTES:
                self._files.room.look(unseen_bytes + _LOOK_BYTES)
                unseen_bytes = 0
            has_mask = source.has_mask(members)
            if name in stacks:
                num_rows = sum(group.num_rows for group in groups)
                blocks = (self._stacked(group, members, has_mask, work) for group in groups)
                columns[name] = gather_stack(blocks, num_rows, rows, len(members), stacks[name].dtype)
                if has_mask:
                    masks = ([group.mask(member) for member in members] for group in groups)
                    columns[name + VALID_SUFFIX] = gather_stack(masks, num_rows, rows, len(members), "bool")
                continue
            with work.of("decode"):
                paged = None if source.is_part or name in source.decoders else gather_wide_pages(groups, name, rows)
                parts = [] if paged is not None else [part for group in groups for part in group.parts(name)]
            if paged is None and source.is_part and self._is_plain(name, parts, rows):
                is_mapped = all(group.is_mapped(name) for group in groups)
                later = WindowRows(parts=parts, rows=rows, check=functools.partial(self._files.check_mapped, groups))
                if later.are_wide and (is_mapped or later.are_most):
                    columns[name] = later
                    continue
                if not later.are_wide and is_mapped and all(map(is_joint, parts)):
                    # Its place; the rows follow.
                    columns[name], together[name] = parts[0], parts
                    continue
            if paged is None:
                paged = (gather_views if name in source.decoders else gather)(parts, rows)
            columns[name] = paged
            if has_mask:
                columns[name + VALID_SUFFIX] = gather([group.mask(name) for group in groups], rows)
            if name in self._scales:
                valid = columns[name + VALID_SUFFIX] if has_mask else None
                columns[name] = standardized(columns[name], self._scales[name], source.schema[name].dtype, valid)
            if source.has_element_mask(name):
                element_valid = gather([group.element_mask(name) for group in groups], rows)
                columns[name + ELEMENT_VALID_SUFFIX] = element_valid
                if name in self._scales:
                    # Their zeros were standardised as numbers.
                    columns[name][~element_valid] = 0
        columns |= self._take(together, rows)
        row_numbers = source.row_index or (ROW_NUMBERS if source.decoders else None)
        if row_numbers is not None:
            columns[row_numbers] = gather([self._row_numbers(number) for number in numbers], rows)
        return columns

    def _is_plain(self, name: str, parts: Sequence[Any], rows: Any) -> bool:
        """Whether a column is permuted numbers as they are in the files, so that they can be copied later."""
        source = self.source
        if isinstance(rows, slice) or isinstance(parts[0], pa.Array) or source.sequences is not None:
            return False
        is_masked = source.has_mask([name]) or source.has_element_mask(name)
        return not is_masked and name not in self._scales

    def _take(self, columns: Mapping[str, Sequence[Array]], rows: Any) -> Columns:
        """The wanted rows of narrow columns of numbers."""
        sizes = [sum(part.nbytes for part in parts) for parts in columns.values()]
        if sum(sizes) >= _LOOK_BYTES:
            # One at a time is joined before its rows are taken.
            self._files.room.look(sum(sizes) + max(sizes) + _LOOK_BYTES)
        return {**take_columns(columns, rows)}

    def _stacked(self, group: RowGroup, names: Sequence[str], has_mask: bool, work: WindowWork) -> list[Array]:
        """Columns of a row group on their way into a stack: standardised while they are in the processor's cache."""
        with work.of("decode"):
            columns = group.columns(names)
        for place, name in enumerate(names) if self._scales else ():
            if name in self._scales:
                # What is read may be the mapped file's memory.
                values = columns[place].view()
                values.flags.writeable = False
                valid = group.mask(name) if has_mask else None
                columns[place] = standardized(values, self._scales[name], self.source.schema[name].dtype, valid)
        return columns

    def _column_bytes(self, members: Sequence[str], groups: Sequence[RowGroup]) -> int:
        """Bytes of Arrow's pool that gathering columns takes: twice theirs; four times for strings and ragged rows.

        Wide rows take theirs once, for compressed pages: the result is in `memory.blocks`.
        """
        fields = [self.source.manifest.schema[member] for member in members]
        if any(field.is_object or field.shape is None for field in fields):
            return 4 * int(sum(part.nbytes for group in groups for member in members for part in group.parts(member)))
        row_bytes = sum(field.stored_dtype.itemsize * math.prod(field.shape or ()) for field in fields)
        copies = 1 if len(members) == 1 and row_bytes >= WIDE_BYTES else 2
        return copies * int(row_bytes) * sum(group.num_rows for group in groups)

    def _rows_of(self, piece: Piece, groups: Sequence[RowGroup]) -> Any:
        """The wanted rows, as numbers within the whole row groups of the window, or a slice of them."""
        rows = self._positions_of(piece, groups)
        if isinstance(rows, slice) or self.source.manifest.row_group_rows[piece.row_groups].sum() >= 1 << 31:
            return rows
        # At half the size they leave more of the processor's cache to the columns.
        return rows.astype(np.int32)

    def _places_of(self, piece: Piece, lengths: Array | None = None) -> Any:
        """The wanted elements, as numbers among the live ones of the window, or a slice of them.

        With `lengths`, of all live elements, those of similar length come together.
        """
        shuffle = self.plan.shuffle
        places: Any = slice(piece.spans[0].start, piece.spans[0].stop)
        if len(piece.spans) > 1:
            places = np.concatenate([np.arange(span.start, span.stop) for span in piece.spans])
        if shuffle is None:
            return places
        order = self._order_of(piece, shuffle)
        if lengths is not None:
            order = in_buckets(order, lengths, shuffle, epoch=piece.epoch, window=piece.window)
        return order[places]

    def _order_of(self, piece: Piece, shuffle: Shuffle) -> Array:
        """The permutation of a piece's window; both parts of the first window share it."""
        draw = functools.partial(shuffle.permutation, piece.window_rows, epoch=piece.epoch, window=piece.window)
        if not piece.is_cut:
            return draw()
        with self._cut_lock:
            order, self._cut_order = self._cut_order, None
            if order is None:
                order = self._cut_order = draw()
            return order

    def _positions_of(self, piece: Piece, groups: Sequence[RowGroup]) -> Any:
        elements = _elements_of(self.source.manifest, piece)
        if self.source.bucket_by is None:
            places = self._places_of(piece)
        else:
            name = self.source.bucket_by
            field = self.source.manifest.batch_schema[name]
            lengths = lengths_of([part for group in groups for part in group.parts(name)], field)
            places = self._places_of(piece, lengths if elements is None else lengths[elements])
        return places if elements is None else elements[places]

    def _row_numbers(self, row_group: int) -> Array:
        start = int(self._first_rows[row_group])
        return np.arange(start, start + int(self.source.manifest.row_group_rows[row_group]))


def _elements_of(manifest: Manifest, piece: Piece) -> Array | None:
    """The live rows of a window, as numbers within its whole row groups; None if all are live, each once."""
    if manifest.draws is not None:
        return _drawn(manifest, piece)
    sizes = manifest.row_group_rows[piece.row_groups]
    if manifest.selection is None or int(sizes.sum()) == piece.window_rows:
        return None
    live = []
    for row_group, start in zip(piece.row_groups.tolist(), (np.cumsum(sizes) - sizes).tolist(), strict=True):
        rows_left = manifest.selection.live_rows(row_group)
        live.append(start + (np.arange(manifest.row_group_rows[row_group]) if rows_left is None else rows_left))
    return np.concatenate(live)


def _drawn(manifest: Manifest, piece: Piece) -> Array:
    """The live rows of a window as often as they come, as numbers within its whole row groups."""
    assert manifest.draws is not None
    drawn, start = [], 0
    for row_group in piece.row_groups.tolist():
        live = None if manifest.selection is None else manifest.selection.live_rows(row_group)
        rows = np.arange(manifest.row_group_rows[row_group]) if live is None else live
        drawn.append(start + np.repeat(rows, manifest.draws.repeats(row_group, piece.epoch)))
        start += int(manifest.row_group_rows[row_group])
    return np.concatenate(drawn)
