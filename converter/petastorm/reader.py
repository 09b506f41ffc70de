"""`make_reader`, `make_batch_reader` and the `Reader` that they return.

Long, because both functions repeat Petastorm's 28 arguments for `help()` and editors.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import random
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from converter.errors import ConverterError, ConverterWarning
from converter.exits import end_of_program
from converter.living import Living
from converter.petastorm import places
from converter.petastorm.codecs import CompressedImageCodec, CompressedNdarrayCodec, NdarrayCodec
from converter.petastorm.elements import NOTHING, Elements, batches, rows, windows
from converter.petastorm.native import Work
from converter.petastorm.ngram import NGram
from converter.petastorm.pickle_records import PetastormMetadataError, UnreadableStoreError
from converter.petastorm.pieces import EachRow, Piece, Recipe
from converter.petastorm.processes import Processes, dump_function
from converter.petastorm.reader_impl.native_order import native_blocks
from converter.petastorm.row_groups import EmptyEpochs, Item, Order, Shares, choose
from converter.petastorm.store import Store, load_schema, open_store
from converter.petastorm.transform import TransformSpec, transform_schema
from converter.petastorm.unischema import Unischema, UnischemaField
from converter.petastorm.warning import call, warn_once
from converter.reading.ahead import READER_THREADS, default_workers_count, read_ahead
from converter.storage.requests import GivenUpError

logger = logging.getLogger(__name__)

_POOLS = ("thread", "process", "dummy")
_CACHES = (None, "null", "local-disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """What `make_reader` and `make_batch_reader` were given, beside the store."""

    schema_fields: Any
    pool: str
    workers_count: int
    seed: int | None
    shuffle_rows: bool
    shuffle_row_groups: bool
    num_parts: int
    predicate: Any
    selector: Any
    num_epochs: int | None
    shares: Shares
    transform: TransformSpec | None
    filters: Any
    cache_dir: places.CacheDir | None

    def __post_init__(self) -> None:
        if self.pool not in _POOLS:
            raise ValueError(f"Unknown reader_pool_type: {self.pool}")
        fields = self.schema_fields
        if not (fields is None or isinstance(fields, (Iterable, NGram))) or isinstance(fields, str):
            raise ValueError(
                "Fields must be either None, an iterable collection of Unischema fields or an NGram object."
            )
        epochs = self.num_epochs
        if epochs is not None and (not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1):
            raise ValueError(f"iterations must be positive integer or None: num_epochs={epochs!r}")
        if not isinstance(self.num_parts, int) or self.num_parts < 1:
            raise ValueError(f"shuffle_row_drop_partitions must be a positive integer, got {self.num_parts!r}")
        if isinstance(fields, NGram) and not fields.timestamp_overlap and self.num_parts > 1:
            raise NotImplementedError(
                "Using timestamp_overlap=False is not implemented with shuffle_options.shuffle_row_drop_partitions > 1"
            )


class Reader:
    """Hands out the rows of a Parquet store: namedtuples of rows, of batches, or windows of rows.

    `make_reader` and `make_batch_reader` make one. Leaving its `with` block ends its threads.
    """

    def __init__(self, store: Store, options: ReaderOptions, *, is_batched: bool) -> None:
        self.is_batched_reader = is_batched
        self.num_epochs = options.num_epochs
        self.last_row_consumed = False
        self.stopped = False
        self.ngram: NGram | None = None
        self._store, self._options = store, options
        stored = load_schema(store)
        fields = options.schema_fields
        if isinstance(fields, NGram):
            self.ngram = fields
            fields.resolve_regex_field_names(stored)
            fields = [*fields.get_field_names_at_all_timesteps()]
            if all(field.name != self.ngram.timestamp_name for field in fields):
                fields.append(stored.fields[self.ngram.timestamp_name])
        wanted = stored.create_schema_view(list(fields)) if fields else stored
        if not wanted.fields:
            raise RuntimeError(
                f"No fields matching the criteria '{fields}' were found in the dataset {store.storage.url}."
            )
        self.schema: Unischema = wanted if options.transform is None else transform_schema(wanted, options.transform)
        if not self.schema.fields:
            raise ValueError(
                f"transform_spec leaves no field of {', '.join(wanted.fields)}, expected one at least. Keep one in "
                "removed_fields or selected_fields."
            )
        choice = choose(
            store, stored, predicate=options.predicate, selector=options.selector, filters=options.filters,
            shares=options.shares,
        )  # fmt: skip
        seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
        self._order = Order(
            row_groups=choice.row_groups,
            num_parts=options.num_parts,
            is_shuffled=options.shuffle_row_groups,
            seed=seed,
        )
        self._recipe = Recipe(
            store=store,
            stored=wanted,
            schema=self.schema,
            is_batched=is_batched,
            ngram=self.ngram,
            predicate=choice.predicate,
            transform=options.transform,
            apply=None,
            filters=options.filters,
            shuffle_rows=options.shuffle_rows,
            seed=seed,
        )
        self._epochs_done = 0
        self._num_pieces = 0
        # Several threads may call next().
        self._lock = threading.RLock()
        self._given_up: threading.Event
        """Cancels the requests to a store."""

        self._pieces = self._read()
        self._at_hand = NOTHING
        self._failure: BaseException | None = None
        self._is_read_elsewhere = False
        self._at_stop: list[Callable[[], None]] = []
        _readers.add(self)

    # Life --------------------------------------------------------------------------

    def reset(self) -> None:
        """Begin again, after all rows were handed out. Does nothing on a reader that was stopped.

        Raises:
            NotImplementedError: rows are left.
        """
        if not self.last_row_consumed:
            raise NotImplementedError(
                "Currently do not support resetting a reader while in the middle of iteration. You can call reset only "
                "after all samples were consumed."
            )
        with self._lock:
            if self.stopped:
                return
            self.last_row_consumed = False
            self._num_pieces = 0
            self._epochs_done += self.num_epochs or 0
            self._pieces = self._read()

    def stop(self) -> None:
        """End the threads; what was read ahead is dropped."""
        self.stopped = True
        # Before the lock: a thread that waits for an answer has it.
        self._given_up.set()
        if isinstance(self._apply, Processes):
            self._apply.end()
        # A transform that stops it runs in a thread for which `next` waits, and which then ends it.
        if not self._lock.acquire(blocking=not threading.current_thread().name.startswith(READER_THREADS)):
            return
        try:
            # So it is with a signal's handler inside of `next`.
            if inspect.getgeneratorstate(self._pieces) != inspect.GEN_RUNNING:
                self._end()
        finally:
            self._lock.release()

    def _end(self) -> None:
        self._pieces.close()
        self._at_hand = NOTHING
        let_go, self._at_stop = self._at_stop, []
        for one in let_go:
            one()

    def at_stop(self, call: Callable[[], None]) -> None:
        """Call this once the reader is stopped, or now if it is."""
        with self._lock:
            if not self.stopped:
                self._at_stop.append(call)
                return
        call()

    def leave_to_parent(self) -> None:
        """In a forked child: what was begun is its parent's, which has the threads and reads the rows."""
        # Another thread of the parent may have held it.
        self._lock = threading.RLock()
        if inspect.getgeneratorstate(self._pieces) != inspect.GEN_CREATED:
            self._at_hand = NOTHING
            self._failure = self._failure or ConverterError(
                "This reader was begun in the process that this one was forked from. Make another one here."
            )

    def join(self) -> None:
        """Wait for the threads; `stop` has done so already."""

    def cleanup_cache(self) -> None:
        """Remove this host's copies of fetched bytes, if there are any; never raises."""
        if self._options.cache_dir is not None:
            self._options.cache_dir.remove()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.join()
        self.cleanup_cache()

    # What it says of itself -----------------------------------------------------------

    @property
    def batched_output(self) -> bool:
        """Whether an element is a batch: columns of a row group."""
        return self.is_batched_reader

    @property
    def diagnostics(self) -> dict[str, Any]:
        """How many pieces of row groups were handed out so far."""
        return {
            "output_queue_size": 0,
            "items_consumed": self._num_pieces,
            "items_produced": self._num_pieces,
            "items_inprocess": 0,
            "zmq_copy_buffers": False,
        }

    @property
    def seed(self) -> int | None:
        """The seed that was given."""
        return self._options.seed

    @property
    def work(self) -> Work:
        """What is read, for loaders that read it in another way."""
        return Work(recipe=self._recipe, order=self._order, num_epochs=self.num_epochs, first_epoch=self._epochs_done)

    @property
    def given_up(self) -> threading.Event:
        """Set once the reader is stopped; ends the requests of loaders that read in a way of their own."""
        return self._given_up

    @property
    def is_fresh(self) -> bool:
        """Whether nothing was handed out since the beginning, or since `reset`."""
        is_begun = self._num_pieces or self._is_read_elsewhere
        return not is_begun and not self.last_row_consumed and not self.stopped

    def begin(self) -> None:
        """Note that a loader hands out the rows in an order of its own, so that nothing else may, too."""
        # Epochs without end have each row again anyway.
        self._is_read_elsewhere = self.num_epochs is not None

    def finish(self) -> None:
        """Note that a loader has handed out all rows in a way of its own, so that `reset` may follow."""
        self.last_row_consumed, self._is_read_elsewhere = True, False

    def leave(self, num_epochs: int) -> None:
        """Note that such a loader was left in the last of so many epochs: epochs without end go on with the next."""
        if self.num_epochs is None and not self.stopped and self.is_fresh:
            self._epochs_done += num_epochs
            self._pieces = self._read()

    # Reading ------------------------------------------------------------------------

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        """The next namedtuple; of a reader with windows `{offset: namedtuple}`.

        Raises:
            RuntimeError: the reader was stopped.
        """
        # Without a lock: a third of a microsecond for each row.
        for element in self._at_hand.elements:
            return element
        with self._lock:
            try:
                while True:
                    # Another thread may have come first.
                    for element in self._at_hand.elements:
                        return element
                    self._at_hand = self._next_piece()
            except BaseException as error:
                self._note_failure(error)
                raise

    next = __next__

    def next_block(self) -> dict[Any, Any]:
        """The next rows as columns, or what `next()` has left of a row group.

        An array has the rows as its first axis. Columns of a reader with windows have the keys `(offset, name)`.

        Raises:
            StopIteration: all rows were handed out.
            RuntimeError: the reader was stopped.
        """
        with self._lock:
            try:
                begun, self._at_hand = self._at_hand, NOTHING
                columns = begun.take_columns()
                while columns is None:
                    piece = self._next_piece()
                    columns = piece.columns() if piece.num_left else None
            except BaseException as error:
                self._note_failure(error)
                raise
            return columns

    def _next_piece(self) -> Elements:
        try:
            piece = self._next_native()
        finally:
            if self.stopped:
                self._end()
        self._num_pieces += 1
        block = piece.block(self.schema)
        if self.is_batched_reader:
            elements = batches(block, self.schema)
        elif self.ngram is None:
            elements = rows(block, self.schema)
        else:
            elements = windows(block, self.schema, self.ngram)
        self._empty.note(elements.num_left)
        # A signal's handler may have stopped it meanwhile.
        self._require_running()
        return elements

    def _next_native(self) -> Any:
        self._require_running()
        if self._is_read_elsewhere:
            raise RuntimeError(
                "A loader with a shuffling queue reads this reader's rows, or was left before the end: other rows than "
                "its own are not known. Finish its pass, or make the reader again."
            )
        if self._failure is not None:
            # What comes after an error is no end: rows are missing.
            raise self._failure
        try:
            return next(self._pieces)
        except StopIteration:
            self.last_row_consumed = True
            raise
        except BaseException as error:
            self._note_failure(error)
            if isinstance(error, (ConverterError, GivenUpError)):
                # Another thread may have stopped it, and so cancelled the requests.
                self._require_running()
            if isinstance(error, RuntimeError) and (ended := end_of_program(error)) is not None:
                raise ended from error
            raise

    def _note_failure(self, error: BaseException) -> None:
        """Raise it from now on: what was being read or made is lost, also if a signal's handler raised."""
        if self._failure is None and not (isinstance(error, StopIteration) or self._is_read_elsewhere):
            interrupted = RuntimeError("The reader was interrupted, so rows are missing. Make it again.")
            self._failure = error if isinstance(error, Exception) else interrupted

    def _require_running(self) -> None:
        if self.stopped:
            raise RuntimeError(STOPPED)

    def _read(self) -> Generator[Piece, None, None]:
        threads = default_workers_count()
        threads = 1 if self._options.pool == "dummy" else max(1, min(self._options.workers_count, threads))
        items = self._order.epochs(self.num_epochs, self._epochs_done)
        num_items = len(self._order.row_groups) * self._order.num_parts
        self._empty = EmptyEpochs(self.num_epochs, num_items)
        self._apply = _function_of(self._recipe, self._options, threads)
        # A function, not a method: a generator that knows its reader would keep it, and its threads, alive.
        self._given_up = threading.Event()
        empty = EmptyEpochs(self.num_epochs, num_items)
        return _read_pieces(self._recipe, self._apply, items, threads, self.work, empty, self._given_up)


STOPPED = (
    "Trying to read a sample after a reader created by make_reader/make_batch_reader has stopped. This may happen if "
    "the make_reader/make_batch_reader context manager has exited but you try to fetch a sample from it anyway"
)

_readers: Living[Reader] = Living()


def _leave_readers_to_parent() -> None:
    for reader in _readers:
        reader.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_readers_to_parent)


def _function_of(recipe: Recipe, options: ReaderOptions, threads: int) -> Callable[[Any], Any] | None:
    """What the reader's threads call with rows: the user's function, here or in processes; None if there is none."""
    function = None if options.transform is None else options.transform.func
    if function is None:
        return None
    apply: Callable[[Any], Any] = function if recipe.is_batched else EachRow(function)
    dumped = dump_function(apply) if options.pool == "process" else None
    return apply if dumped is None else Processes(dumped, threads)


def _read_pieces(
    recipe: Recipe,
    apply: Callable[[Any], Any] | None,
    items: Iterator[Item],
    threads: int,
    work: Work,
    empty: EmptyEpochs,
    given_up: threading.Event,
) -> Generator[Piece, None, None]:
    """The pieces of items, in order. Requests end once `given_up` is set."""
    blocks = native_blocks(work, given_up)
    if blocks is not None:
        with contextlib.closing(blocks):
            for columns in blocks:
                yield Piece(columns=columns)
        return
    with contextlib.closing(apply) if isinstance(apply, Processes) else contextlib.nullcontext():
        applied = recipe if apply is None else replace(recipe, apply=apply)
        yield from _pieces_of(applied, items, threads, empty, given_up)


def _pieces_of(
    recipe: Recipe, items: Iterator[Item], threads: int, empty: EmptyEpochs, given_up: threading.Event
) -> Generator[Piece, None, None]:
    """The pieces of items, in order: some threads read row groups ahead, others decode them in parts."""
    read = functools.partial(recipe.read, given_up=given_up)
    tables = read_ahead(read, items, workers_count=threads, ahead=threads + 1, given_up=[given_up])
    with contextlib.closing(tables):
        parts = _parts_of(recipe, tables, empty, given_up)
        with contextlib.closing(
            read_ahead(recipe.make, parts, workers_count=threads, ahead=threads + 2, given_up=[given_up])
        ) as pieces:
            yield from pieces


def _parts_of(
    recipe: Recipe, tables: Iterator[pa.Table], empty: EmptyEpochs, given_up: threading.Event
) -> Iterator[pa.Table]:
    for table in tables:
        empty.note(table.num_rows)
        if given_up.is_set():
            # The reader was stopped while row groups without rows went by.
            raise GivenUpError
        yield from recipe.pieces(table)


def make_reader(
    dataset_url: str | Sequence[str],
    schema_fields: Any = None,
    reader_pool_type: str = "thread",
    workers_count: int = 10,
    pyarrow_serialize: bool = False,
    results_queue_size: int = 50,
    seed: int | None = None,
    shuffle_rows: bool = False,
    shuffle_row_groups: bool = True,
    shuffle_row_drop_partitions: int = 1,
    predicate: Any = None,
    rowgroup_selector: Any = None,
    num_epochs: int | None = 1,
    cur_shard: int | None = None,
    shard_count: int | None = None,
    shard_seed: int | None = None,
    cache_type: str | None = "null",
    cache_location: str | None = None,
    cache_size_limit: int | None = None,
    cache_row_size_estimate: int | None = None,
    cache_extra_settings: Mapping[str, Any] | None = None,
    hdfs_driver: str = "libhdfs3",
    transform_spec: TransformSpec | None = None,
    filters: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    zmq_copy_buffers: bool = True,
    filesystem: Any = None,
    convert_early_to_numpy: bool = False,
) -> Reader:
    """A reader of a store that Petastorm wrote: one namedtuple for each row.

    ```python
    from converter.petastorm import make_reader

    with make_reader("file:///data/hello_world", num_epochs=1) as reader:
        for row in reader:
            print(row.id)
    ```

    Arguments are Petastorm's. `pyarrow_serialize`, `hdfs_driver`, `zmq_copy_buffers`, `results_queue_size`,
    `cache_row_size_estimate`, `cache_extra_settings` and `convert_early_to_numpy` are accepted and do nothing.

    Raises:
        ValueError: an argument is wrong.
        NoDataAvailableError: there are fewer row groups than shards.
        RuntimeError: no field matches `schema_fields`, or the stored schema cannot be read.
        SourceError: there are no Parquet files.
    """
    del results_queue_size, cache_row_size_estimate, cache_extra_settings, convert_early_to_numpy, zmq_copy_buffers
    if pyarrow_serialize:
        warnings.warn(
            "pyarrow_serializer was deprecated and will be removed in future versions. The argument no longer has any "
            "effect.",
            ConverterWarning,
            stacklevel=2,
        )
    options = _options_of(locals(), shard_seed)
    places.note_driver(hdfs_driver)
    store = _open(dataset_url, storage_options, filesystem, options)
    try:
        if store.stored_schema() is None:
            warnings.warn(
                "Currently make_reader supports reading only Petastorm datasets. To read from a non-Petastorm Parquet "
                "store use make_batch_reader",
                ConverterWarning,
                stacklevel=2,
            )
        reader = Reader(store, options, is_batched=False)
    except PetastormMetadataError as error:
        raise UnreadableStoreError(
            "make_reader has failed. If you were trying to open a Parquet store that was not created using Petastorm "
            "materialize_dataset and it contains only scalar columns, you may use make_batch_reader to read it.\n"
            f"Inner exception: {error}",
            path=error.path,
        ) from error
    warn_once("make_reader", lambda: _native_line(store, options, reader), stacklevel=2)
    return reader


def make_batch_reader(
    dataset_url_or_urls: str | Sequence[str],
    schema_fields: Any = None,
    reader_pool_type: str = "thread",
    workers_count: int = 10,
    results_queue_size: int = 50,
    seed: int | None = None,
    shuffle_rows: bool = False,
    shuffle_row_groups: bool = True,
    shuffle_row_drop_partitions: int = 1,
    predicate: Any = None,
    rowgroup_selector: Any = None,
    num_epochs: int | None = 1,
    cur_shard: int | None = None,
    shard_count: int | None = None,
    shard_seed: int | None = None,
    cache_type: str | None = "null",
    cache_location: str | None = None,
    cache_size_limit: int | None = None,
    cache_row_size_estimate: int | None = None,
    cache_extra_settings: Mapping[str, Any] | None = None,
    hdfs_driver: str = "libhdfs3",
    transform_spec: TransformSpec | None = None,
    filters: Any = None,
    storage_options: Mapping[str, Any] | None = None,
    zmq_copy_buffers: bool = True,
    filesystem: Any = None,
    convert_early_to_numpy: bool = False,
) -> Reader:
    """A reader of any Parquet store: one namedtuple of arrays for each row group.

    ```python
    from converter.petastorm import make_batch_reader

    with make_batch_reader("file:///data/rides", schema_fields=["fare"]) as reader:
        print(sum(len(batch.fare) for batch in reader))
    ```

    Arguments are Petastorm's; `make_reader` says which do nothing. Raises what it raises.
    """
    del results_queue_size, cache_row_size_estimate, cache_extra_settings, convert_early_to_numpy, zmq_copy_buffers
    if isinstance(schema_fields, NGram):
        raise NotImplementedError("ngrams are not supported by make_batch_reader; use make_reader")
    options = _options_of(locals(), shard_seed)
    places.note_driver(hdfs_driver)
    store = _open(dataset_url_or_urls, storage_options, filesystem, options)
    with contextlib.suppress(PetastormMetadataError):
        if store.stored_schema() is not None:
            warnings.warn(
                "Please use make_reader (instead of 'make_batch_dataset' function to read this dataset. You may get "
                "unexpected results. Currently make_batch_reader supports reading only Parquet stores that contain "
                "standard Parquet data types and do not require petastorm decoding.",
                ConverterWarning,
                stacklevel=2,
            )
    reader = Reader(store, options, is_batched=True)
    warn_once("make_batch_reader", lambda: _native_line(store, options, reader), stacklevel=2)
    return reader


def _options_of(arguments: Mapping[str, Any], shard_seed: int | None) -> ReaderOptions:
    """The options of a reader out of the arguments of one of the two functions."""
    given = dict(arguments)
    if given["cache_type"] not in _CACHES:
        raise ValueError(f"Unknown cache_type: {given['cache_type']}")
    if shard_seed:
        warnings.warn(
            "shard_seed was deprecated and will be removed in future versions. Use seed to apply randomization effects "
            "on sharding row groups.",
            ConverterWarning,
            stacklevel=3,
        )
    cache_dir = None
    if given["cache_type"] == "local-disk":
        cache_dir = places.CacheDir(given["cache_location"], given["cache_size_limit"])
    return ReaderOptions(
        schema_fields=given["schema_fields"],
        pool=given["reader_pool_type"],
        workers_count=given["workers_count"],
        seed=given["seed"],
        shuffle_rows=given["shuffle_rows"],
        shuffle_row_groups=given["shuffle_row_groups"],
        num_parts=given["shuffle_row_drop_partitions"],
        predicate=given["predicate"],
        selector=given["rowgroup_selector"],
        num_epochs=given["num_epochs"],
        shares=Shares(cur_shard=given["cur_shard"], shard_count=given["shard_count"], seed=shard_seed or given["seed"]),
        transform=given["transform_spec"],
        filters=given["filters"] if isinstance(given["filters"], pc.Expression) else given["filters"] or None,
        cache_dir=cache_dir,
    )


def _open(url: Any, storage_options: Mapping[str, Any] | None, filesystem: Any, options: ReaderOptions) -> Store:
    urls = places.checked_urls(url)
    if filesystem is not None:
        urls, storage_options = places.on_filesystem(urls, filesystem)
    cache_dir = options.cache_dir
    if cache_dir is None:
        return open_store(urls, storage_options=storage_options)
    return open_store(urls, storage_options=storage_options, open_cache=cache_dir.open)


def _native_line(store: Store, options: ReaderOptions, reader: Reader) -> str:
    """The native lines that read the same rows."""
    columns = None if options.schema_fields is None else list(reader.schema.fields)
    opened = call("make_parquet_converter", store.storage.url, columns=columns)
    fields = () if reader.is_batched_reader else reader.schema.fields.values()
    decoders = [decoder for field in fields if (decoder := _native_decoder(field)) is not None]
    if decoders:
        opened = f"{opened[:-1]}, decode={{{', '.join(decoders)}}})"
    loader = call(
        "converter.make_torch_dataloader",
        batch_size=1024,
        shuffle=options.shuffle_row_groups or None,
        seed=options.seed,
        num_epochs=options.num_epochs if options.num_epochs != 1 else None,
        filters=options.filters,
        cur_shard=options.shares.cur_shard,
        shard_count=options.shares.shard_count,
        nulls="mask" if any(field.nullable for field in fields) else None,
        ragged="nested" if any(None in field.shape for field in fields) else None,
    )
    if options.num_epochs is None:
        loader = f"{loader[:-1]}, num_epochs=None)"
    return f"with {opened} as converter, {loader} as loader: ..."


def _native_decoder(field: UnischemaField) -> str | None:
    """The native decoder of a field's codec, as it is written in a program; None for fields without one."""
    shape = None if None in field.shape else tuple(field.shape)
    if isinstance(field.codec, CompressedImageCodec):
        mode = "RGB" if len(field.shape) == 3 else "L"
        size = "" if shape is None else f", size={shape[:2]}"
        return f"{field.name!r}: Image(mode={mode!r}{size})"
    if isinstance(field.codec, (NdarrayCodec, CompressedNdarrayCodec)):
        ndim = f", {len(field.shape)}" if shape is None else ""
        key = ", key='arr'" if isinstance(field.codec, CompressedNdarrayCodec) else ""
        return f"{field.name!r}: NumPy({np.dtype(field.numpy_dtype).name!r}, {shape}{ndim}{key})"
    return None
