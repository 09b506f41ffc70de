"""What is decoded together, permuted, and cut into exact batches.

Reader threads take the windows of a plan one by one, decode their columns and
gather each column once, in the plan's order; batches are slices of that. So the
work per batch is slicing, and everything else happens outside the GIL, ahead of
use. Threads start and stop here and nowhere else: with the generator that uses
them, however it ends.

A batch that spans two windows is put together from both; every other batch
shares memory with its window, and nobody else writes to that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from converter.errors import NullValueError, ReadError, SourceError
from converter.manifest import Manifest
from converter.memory import SPARE
from converter.plan import EpochPlan, Past, Piece, Shard, Shuffle, State, Uneven, plan_epoch
from converter.reading.ahead import read_ahead
from converter.reading.data_files import DataFiles, FetchedGroup, RowGroup
from converter.reading.gather import WIDE_BYTES, Array, Stack, gather, gather_stack, joined
from converter.reading.local_cache import open_local_cache
from converter.reading.nulls import Nulls
from converter.reading.ragged import Ragged, RaggedRows
from converter.reading.runs import LENGTH_SUFFIX, VALID_SUFFIX, Columns, Run, cut_run, mark_padding
from converter.schema import Field
from converter.storage.at_once import MAX_REQUESTS_AT_ONCE, Turn, result_of
from converter.storage.directory import Storage

logger = logging.getLogger(__name__)
ELEMENT_VALID_SUFFIX = "__element_valid"
INNER_LENGTH_SUFFIX = "__inner_length"

_FIRST_PART = 8
_MAX_FETCHERS = 64
_MAX_REQUESTS = 128
"""At once in one process (both are guesses); what may be on its way is bounded in bytes too, see `stores`."""

_BASE_BYTES = 64 << 20
"""What threads, their allocators and a file's footer take whatever the data are: measured 20 to 45 MB."""

_VARIABLE_COPIES, _PLAIN_COPIES = 3, 2
"""How often the rows of a window exist while it is read, beside the result: strings and ragged rows, and plain numbers.

Windows of 46 MiB of text took 294 MiB of Arrow's pool, with two threads.
"""

_LOOK_BYTES = 8 << 20
"""How much a thread allocates between two looks at the memory; a look takes 10 µs."""

_INDEX_BYTES = 3 * 8
"""Of each row of a window that is permuted: the random number, its place, and the place taken."""

Transform = Callable[..., Mapping[str, Any]]
"""A user's function of a whole batch, and if it takes a second argument, of a random generator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """Everything that decides a process's batches, in every epoch; travels to worker processes.

    Reads nothing until `runs` is iterated.
    """

    storage: Storage
    manifest: Manifest
    names: tuple[str, ...]
    """Keys of a batch, in order: columns and stacks; masks and lengths follow theirs."""

    stacks: tuple[Stack, ...]
    nulls: Nulls
    ragged: Ragged
    batch_size: int
    drop_last: bool
    shuffle: Shuffle | None
    shard: Shard
    uneven: Uneven
    window_rows: int
    window_groups: int | None
    workers_count: int
    is_shard_found: bool = False
    """Whether the user did not say which shard this is."""

    seed: int = 0
    row_index: str | None = None
    """The key of each row's number in the dataset, if that is wanted."""

    transform: Transform | None = None
    prefetch_batches: int | None = None
    verify_checksums: bool = False
    local_cache_dir: str | None = None
    """Where what was fetched is kept on this host."""

    local_cache_bytes: int | None = None

    @property
    def fields(self) -> tuple[Field, ...]:
        """The columns that are read from the files, each once."""
        stacked = {stack.name: stack.columns for stack in self.stacks}
        wanted = dict.fromkeys(column for name in self.names for column in stacked.get(name, (name,)))
        return tuple(self.manifest.schema[name] for name in wanted)

    def is_variable(self, name: str) -> bool:
        """Whether a column's rows are objects or differ in shape, so that its window is no array."""
        field = self.manifest.schema.get(name)
        return field is not None and (field.is_object or field.shape is None)

    def has_mask(self, names: Sequence[str]) -> bool:
        """Whether every batch has a mask of these columns: where the dataset may have a null in one of them."""
        return self.nulls == "mask" and any(self.manifest.schema[name].has_nulls for name in names)

    def has_element_mask(self, name: str) -> bool:
        """Whether every batch has a mask of this column's elements: where one of them may be null."""
        field = self.manifest.schema.get(name)
        return self.nulls == "mask" and field is not None and field.has_null_elements

    def field_of(self, name: str) -> Field | None:
        """The field of a window's column: one of the schema's, or of the mask of its elements."""
        if name in self.names:
            return self.manifest.schema.get(name)
        field = self.manifest.schema.get(name.removesuffix(ELEMENT_VALID_SUFFIX))
        if field is None or not name.endswith(ELEMENT_VALID_SUFFIX):
            return None
        return replace(field, name=name, dtype="bool", has_nulls=False, has_null_elements=False)

    def padded(self, name: str, rows: RaggedRows) -> dict[str, Array]:
        """What `ragged="pad"` makes of rows, by the names of a batch; of a mask nothing else is said."""
        values, lengths = rows.pad()
        if name not in self.names:
            return {name: values}
        found = {name: values, name + LENGTH_SUFFIX: lengths}
        if self.manifest.schema[name].is_jagged:
            found[name + INNER_LENGTH_SUFFIX] = rows.pad_inner_lengths()
        return found

    def plan(self, epoch: int, past: Past = ()) -> EpochPlan:
        """This process's share of one epoch, or of what `past` has left of it."""
        return plan_epoch(
            self.manifest.live_rows,
            batch_size=self.batch_size,
            window_rows=self.window_rows,
            epoch=epoch,
            shuffle=self.shuffle,
            shard=self.shard,
            uneven=self.uneven,
            drop_last=self.drop_last,
            past=past,
            window_groups=self.window_groups,
        )

    def num_batches(self) -> int:
        """Batches of one epoch: the same in every epoch."""
        return self.plan(0).num_batches

    def state(self, epoch: int) -> State:
        """The state of a run that has done nothing of an epoch."""
        return State(
            fingerprint=self.manifest.live_fingerprint,
            shuffle=self.shuffle is not None,
            seed=0 if self.shuffle is None else self.shuffle.seed,
            window_rows=self.window_rows,
            window_groups=self.window_groups or 0,
            uneven=self.uneven,
            epoch=epoch,
            epochs_done=0,
            past=(),
        )

    def open_files(self, processes_count: int = 1) -> DataFiles:
        """The data files for `runs`: what keeps them over epochs need not map them anew, a third of the reading.

        `processes_count` are those that read this shard together.
        """
        self.storage.share_line(self.shard.count * processes_count)
        cache, manifest = None, self.manifest
        is_ours_or_of_a_log = manifest.source_columns is None or manifest.version is not None
        if self.local_cache_dir is None or self.storage.is_local:
            pass
        elif is_ours_or_of_a_log or (manifest.file_stamps is not None and manifest.file_stamps.all()):
            # With the place: what is known of files, their footers, may be the same in two.
            content = f"{self.storage.url} {manifest.fingerprint}"
            cache = open_local_cache(self.local_cache_dir, content, self.local_cache_bytes)
        else:
            logger.warning(
                "%s does not say when its files were written, so that what is kept could be of older ones: "
                "local_cache_dir is not used.",
                self.storage.url,
            )
        return DataFiles(
            self.storage,
            self.manifest,
            self.fields,
            nulls=self.nulls,
            verify_checksums=self.verify_checksums,
            local_cache=cache,
        )

    def runs(self, plan: EpochPlan, files: DataFiles, batches: range | None = None) -> Iterator[Run]:
        """Yield the plan's batches, or those numbered in `batches`, in order.

        Raises:
            NullValueError: a column with `nulls="raise"` holds one.
            SourceChangedError: a file is gone, or is another one than it was.
            ReadError: a row group cannot be decoded.
        """
        wanted = range(plan.num_batches) if batches is None else batches
        reader = _WindowReader(self, plan, files)
        pieces = plan.pieces(wanted.start, wanted.stop)
        if batches is None and self.storage.is_local:
            # Whole batches of about an eighth of a window: some 6 MB are there at once, 48 MB take a tenth of a second.
            # Behind a network the window's row groups would be fetched twice for it.
            few = -(-self.window_rows // (_FIRST_PART * self.batch_size)) * self.batch_size
            pieces = plan.first_pieces(pieces, few)
        num_rows = min(wanted.stop * plan.batch_size, plan.num_rows) - wanted.start * plan.batch_size
        with _fetching(reader, pieces, self) as items:
            windows = read_ahead(
                reader.read,
                items,
                workers_count=self.workers_count,
                ahead=self.windows_ahead,
                given_up=reader.given_up,
            )
            for run in cut_run(windows, plan.batch_size, num_rows, first_batch=wanted.start):
                yield mark_padding(run, plan) if self.uneven == "pad" else run

    def bytes_decoded(self, num_rows: int) -> int:
        """Bytes of the wanted columns of so many rows, as the files have them."""
        manifest = self.manifest
        found = 0.0
        for field in self.fields:
            known = manifest.statistics.get(field.name)
            if field.shape is not None and self.has_element_mask(field.name):
                found += num_rows * math.prod(field.shape)
            if field.shape is not None and not field.is_object:
                found += num_rows * field.stored_dtype.itemsize * math.prod(field.shape)
            elif known is not None and known.num_bytes is not None:
                found += known.num_bytes * num_rows / manifest.num_rows
            else:
                found += int(manifest.row_group_bytes.sum()) * num_rows / manifest.num_rows
        if self.row_index is not None:
            found += num_rows * 8
        return int(found)

    def memory_bound(self, plan: EpochPlan) -> int:
        """The most bytes that reading takes in any epoch, without mapped files and batches that the caller keeps.

        `plan` is the plan of any epoch. `memory.Room` makes readers keep to the bound.
        """
        is_variable = any(self.is_variable(field.name) for field in self.fields)
        window_rows = self._most_in_a_window(self.manifest.row_group_rows, plan)
        window_bytes = self.bytes_decoded(window_rows)
        file_bytes = self._most_in_a_window(self.manifest.row_group_bytes, plan)
        if is_variable:
            # Rows differ in size, and so do row groups; a mask takes a byte for each element.
            has_mask = any(field.shape is None and self.has_element_mask(field.name) for field in self.fields)
            window_bytes = file_bytes * (2 if has_mask else 1)
        batch_bytes = math.ceil(window_bytes / window_rows) * self.batch_size
        num_windows = len(plan.window_starts) - 1
        workers_count = min(self.workers_count, num_windows)
        # Those read ahead and the one in use, which at first is the last one of the previous epoch.
        in_flight = min(self.windows_ahead, num_windows) + 1
        if is_variable:
            in_work = _VARIABLE_COPIES * window_bytes
        elif self._is_plain:
            in_work = self._most_gathered(window_rows)
        else:
            # As Arrow decodes them (a float32 may be a double in the file), and one row group's pages.
            in_work = max(window_bytes, min(file_bytes, 2 * window_bytes))
            in_work += min(int(self.manifest.row_group_bytes.max()), 2 * window_bytes)
        if self.shuffle is not None:
            in_work += window_rows * _INDEX_BYTES
        peak = _BASE_BYTES + in_flight * window_bytes + workers_count * in_work
        peak += int((SPARE - 1) * in_flight * window_bytes) + (4 if is_variable else 2) * batch_bytes
        if not self.storage.is_local:
            # What was fetched, and the client's own copy of it.
            peak += 2 * workers_count * window_bytes
        if self.transform is not None:
            peak += 2 * (self.prefetch_batches or 2 * self.workers_count) * batch_bytes
        return peak

    @property
    def _is_plain(self) -> bool:
        """Whether the wanted columns lie in mapped files as they are: ours, not compressed, without nulls."""
        manifest = self.manifest
        return (
            self.storage.is_local
            and manifest.source_columns is None
            and int(manifest.file_bytes.sum()) >= int(manifest.row_group_bytes.sum())
            and not any(field.has_nulls or field.dtype == "bool" for field in self.fields)
        )

    def _most_gathered(self, window_rows: int) -> int:
        """Bytes that are joined before rows are gathered from them: the largest narrow column or stack."""
        schema, stacks = self.manifest.schema, {stack.name: stack.columns for stack in self.stacks}
        most = 0
        for name in self.names:
            fields = [schema[member] for member in stacks.get(name, (name,))]
            row_bytes = sum(field.stored_dtype.itemsize * math.prod(field.shape or ()) for field in fields)
            most = max(most, row_bytes if name in stacks or row_bytes < WIDE_BYTES else 0)
        return int(_PLAIN_COPIES * window_rows * most)

    def _most_in_a_window(self, amounts: npt.NDArray[np.int64], plan: EpochPlan) -> int:
        """The most of something, given for each row group, that a window has in any epoch."""
        order = plan.group_order
        if self.shuffle is None:
            return int(np.add.reduceat(amounts[order], plan.window_starts[:-1]).max())
        # Each epoch cuts its windows from another order. At worst a window has the row groups with most for each row,
        # lacks one row to be full, and then gets the row group with most of all.
        amounts, rows = amounts[order], self.manifest.live_rows[order]
        densest = np.argsort(-amounts / rows, kind="stable")
        before = np.cumsum(rows[densest]) - rows[densest]
        share = np.clip((self.window_rows - 1 - before) / rows[densest], 0, 1)
        most = int((amounts[densest] * share).sum()) + int(amounts.max())
        if self.window_groups is not None:
            most = min(most, int(np.sort(amounts)[-self.window_groups :].sum()))
        return min(most, int(amounts.sum()))

    @property
    def windows_ahead(self) -> int:
        """Windows that are being read or wait to be used."""
        if self.prefetch_batches is None:
            return self.workers_count + 1
        return max(1, math.ceil(self.prefetch_batches * self.batch_size / self.window_rows))


class _WindowReader:
    """Reads pieces of one plan; used by several threads at once."""

    def __init__(self, source: BatchSource, plan: EpochPlan, files: DataFiles) -> None:
        self._source, self._plan, self._files = source, plan, files
        self.given_up = threading.Event()
        """Nobody waits for what is being fetched."""

        rows = source.manifest.row_group_rows
        self._first_rows = np.cumsum(rows) - rows
        if files.room.most_bytes is None:
            files.room.most_bytes = source.memory_bound(plan)

    def fetch(
        self, piece: Piece, turn: Turn | None = None, pool: ThreadPoolExecutor | None = None
    ) -> Mapping[int, FetchedGroup]:
        """What lies behind a network of a piece's row groups."""
        try:
            return self._files.fetch(piece.row_groups.tolist(), self.given_up, turn, pool)
        finally:
            if turn is not None:
                turn.end()

    def read(self, item: tuple[Piece, Future[Mapping[int, FetchedGroup]] | None]) -> Columns:
        """The piece's rows, in order, in memory of their own."""
        piece, fetching = item
        if fetching is None:
            return self._read(piece, None)
        # What could not be fetched says nothing of this host's copies.
        fetched = result_of(fetching)
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
        """The same with the store's own bytes, where this host's copies may be to blame and the store is there."""
        copies = [number for number, group in fetched.items() if group.is_copy]
        is_expected = isinstance(error, NullValueError) and any(
            field.name == error.column and field.has_nulls for field in self._source.fields
        )
        if not copies or is_expected:
            return None
        try:
            return {**fetched, **self._files.fetch(copies, self.given_up, anew=True)}
        except ReadError:
            return None

    def _read(self, piece: Piece, fetched: Mapping[int, FetchedGroup] | None) -> Columns:
        try:
            groups = self._files.row_groups(piece.row_groups.tolist(), fetched)
            try:
                columns = self._gather(piece, groups)
            except pa.ArrowException:
                # Offsets of texts that a flipped bit has spoiled, say: whose they are is looked for now.
                for group in groups:
                    group.validate()
                raise
            self._files.check_mapped(groups)
            return columns
        finally:
            self._files.room.done()

    def _gather(self, piece: Piece, groups: Sequence[RowGroup]) -> Columns:
        source = self._source
        rows = self._rows_of(piece)
        stacks = {stack.name: stack for stack in source.stacks}
        columns: Columns = {}
        unseen_bytes = 0
        # Column by column: what is undone for one is let go of before the next, and stays in the cache meanwhile.
        for name in source.names:
            members = stacks[name].columns if name in stacks else (name,)
            unseen_bytes += self._column_bytes(members, groups)
            if unseen_bytes >= _LOOK_BYTES:
                self._files.room.look(unseen_bytes + _LOOK_BYTES)
                unseen_bytes = 0
            has_mask = source.has_mask(members)
            if name in stacks:
                num_rows = sum(group.num_rows for group in groups)
                numbers = ([joined(group.parts(member)) for member in members] for group in groups)
                columns[name] = gather_stack(numbers, num_rows, rows, len(members), stacks[name].dtype)
                if has_mask:
                    masks = ([group.mask(member) for member in members] for group in groups)
                    columns[name + VALID_SUFFIX] = gather_stack(masks, num_rows, rows, len(members), "bool")
                continue
            columns[name] = gather([part for group in groups for part in group.parts(name)], rows)
            if has_mask:
                columns[name + VALID_SUFFIX] = gather([group.mask(name) for group in groups], rows)
            if source.has_element_mask(name):
                columns[name + ELEMENT_VALID_SUFFIX] = gather([group.element_mask(name) for group in groups], rows)
        if source.row_index is not None:
            columns[source.row_index] = gather([self._row_numbers(int(one)) for one in piece.row_groups], rows)
        return columns

    def _column_bytes(self, members: Sequence[str], groups: Sequence[RowGroup]) -> int:
        """What gathering columns takes of Arrow's pool: twice their bytes; four times for strings and ragged rows.

        Wide rows take it once, for pages that were compressed: the result is of `memory.blocks`.
        """
        fields = [self._source.manifest.schema[member] for member in members]
        if any(self._source.is_variable(member) for member in members):
            return 4 * int(sum(part.nbytes for group in groups for member in members for part in group.parts(member)))
        row_bytes = sum(field.stored_dtype.itemsize * math.prod(field.shape or ()) for field in fields)
        copies = 1 if len(members) == 1 and row_bytes >= WIDE_BYTES else 2
        return copies * int(row_bytes) * sum(group.num_rows for group in groups)

    def _rows_of(self, piece: Piece) -> Any:
        """The wanted rows, as numbers within the whole row groups of the window, or a slice of them."""
        rows = self._positions_of(piece)
        if isinstance(rows, slice) or self._source.manifest.row_group_rows[piece.row_groups].sum() >= 1 << 31:
            return rows
        # At half the size they leave more of the cache to the columns.
        return rows.astype(np.int32)

    def _positions_of(self, piece: Piece) -> Any:
        manifest = self._source.manifest
        rows: Any = slice(piece.spans[0].start, piece.spans[0].stop)
        if len(piece.spans) > 1:
            rows = np.concatenate([np.arange(span.start, span.stop) for span in piece.spans])
        if self._plan.shuffle is not None:
            permutation = self._plan.shuffle.permutation(piece.window_rows, epoch=self._plan.epoch, window=piece.window)
            rows = permutation[rows]
        if manifest.selection is None:
            return rows
        sizes = manifest.row_group_rows[piece.row_groups]
        if int(sizes.sum()) == piece.window_rows:
            return rows
        live = []
        for row_group, start in zip(piece.row_groups.tolist(), (np.cumsum(sizes) - sizes).tolist(), strict=True):
            found = manifest.selection.live_rows(row_group)
            live.append(start + (np.arange(manifest.row_group_rows[row_group]) if found is None else found))
        return np.concatenate(live)[rows]

    def _row_numbers(self, row_group: int) -> Array:
        start = int(self._first_rows[row_group])
        return np.arange(start, start + int(self._source.manifest.row_group_rows[row_group]))


@contextlib.contextmanager
def _fetching(
    reader: _WindowReader, pieces: Iterator[Piece], source: BatchSource
) -> Iterator[Iterator[tuple[Piece, Future[Mapping[int, FetchedGroup]] | None]]]:
    """The pieces, each with what is being fetched of it, where the files lie behind a network.

    In threads of its own, so that the network is busy while the workers decode. Pieces ask in their order: what is
    wanted first need not wait where a line takes no more.
    """
    if source.storage.is_local:
        yield ((piece, None) for piece in pieces)
        return
    # What is further ahead waits in line: a thousand small windows need not be a thousand threads.
    fetchers_count = min(source.windows_ahead, _MAX_FETCHERS)
    requests_count = min(source.windows_ahead * MAX_REQUESTS_AT_ONCE, _MAX_REQUESTS)
    with (
        ThreadPoolExecutor(fetchers_count, thread_name_prefix="converter-fetch") as fetchers,
        ThreadPoolExecutor(requests_count, thread_name_prefix="converter-fetch") as requests,
    ):
        _given_up.add(reader.given_up)
        try:
            yield _submitted(fetchers, requests, reader, pieces)
        finally:
            reader.given_up.set()
            for pool in (fetchers, requests):
                pool.shutdown(wait=False, cancel_futures=True)


def _submitted(
    fetchers: ThreadPoolExecutor, requests: ThreadPoolExecutor, reader: _WindowReader, pieces: Iterator[Piece]
) -> Iterator[tuple[Piece, Future[Mapping[int, FetchedGroup]]]]:
    turn = None
    for piece in pieces:
        turn = Turn(turn)
        yield piece, fetchers.submit(reader.fetch, piece, turn, requests)


_given_up: weakref.WeakSet[threading.Event] = weakref.WeakSet()
"""Of all who fetch in this process."""


def give_up_fetching() -> None:
    """Wait for no store any more, whoever has left an iterator unfinished: for the interpreter's end."""
    for given_up in list(_given_up):
        given_up.set()
