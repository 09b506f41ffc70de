"""Batches as a real `tf.data.Dataset`.

TensorFlow calls into Python once for each window's run of batches, not for each
batch: a run arrives as one tensor for each column, without a copy where its memory
is aligned, and TensorFlow slices the batches out of it.

An eager loop over the dataset itself needs nothing of tf.data: its iterator lets
TensorFlow take the same runs apart, one call for many batches of a column. To begin
costs nothing then, where tf.data takes 10 ms for 3 columns and 23 for 41.

An iteration's last batch is handed to TensorFlow by itself: when it is asked for,
all others were used. So an iteration that is left early repeats, a peek included,
and no step pays for being counted.
"""

from __future__ import annotations

import contextlib
import difflib
import gc
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import keras
import numpy as np
import pyarrow as pa
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.eager import context
from tensorflow.python.framework.ops import EagerTensor

from converter.errors import ConverterError
from converter.frameworks.numpy import Batch, Epochs, Iteration, as_generator, numpy_batches, times_as_integers
from converter.plan import EpochPlan
from converter.reading.decode import RaggedRows, new_array, ragged_values
from converter.reading.windows import (
    ELEMENT_VALID_SUFFIX,
    INNER_LENGTH_SUFFIX,
    LENGTH_SUFFIX,
    NOT_PADDED,
    VALID_SUFFIX,
    BatchSource,
    Run,
)
from converter.schema import Field

logger = logging.getLogger(__name__)

Names = str | Sequence[str]

# A forked child has none of TensorFlow's threads. If it collected the garbage that its parent has left, an iterator of
# TensorFlow's, say, it would wait for them for ever.
os.register_at_fork(after_in_child=gc.freeze)

_CLOSE_SECONDS = 60.0
_MAX_ERRORS = 1000
_UNPACKED_BATCHES = 64
"""Batches of which there are tensors at once: of single rows a window has a hundred thousand. 41 columns were read at
6.2, 9.5, 12.4, 15.5, 15.5 and 16.5 M rows/s with 4, 8, 16, 32, 64 and 256."""

_ALIGNMENT_BYTES = 64
"""What TensorFlow asks of memory that it is to use as it lies there (`EIGEN_MAX_ALIGN_BYTES`)."""


class TFDataset(tf.data.Dataset):  # type: ignore[misc]  # TensorFlow has no types.
    """A `tf.data.Dataset` of batches that knows its cardinality, and a context manager that closes it."""

    def __init__(
        self,
        source: BatchSource,
        *,
        num_epochs: int | None,
        features: Names | None,
        labels: Names | None,
        weights: str | None,
        prefetch: int | None,
    ) -> None:
        self._source = source
        self._epochs = Epochs(source, num_epochs)
        # Its cardinality is asserted when it is made.
        self._epochs.settle_shard()
        self._lock = threading.Lock()
        self._begun: Any = None
        """Where that began."""

        self._has_given_all = False
        """Whether an iteration that began where the next one would has come to its end."""

        self._has_just_ended = False
        self._iterators: weakref.WeakSet[_Iterator] = weakref.WeakSet()
        self._last_used: int | None = None
        self._num_asking = 0
        """Iterators over this dataset itself that are being given their first batch."""

        self._is_elsewhere = False
        """Whether TensorFlow began the iteration by itself, so that nobody here counts its batches."""

        self.num_begun = 0
        """Iterations that were begun."""

        self._running: weakref.WeakSet[Generator[Any, None, Any]] = weakref.WeakSet()
        self.read_error: BaseException | None = None
        """What went wrong while reading, if anything did; TensorFlow's error has its text."""

        if source.is_shard_found and source.shard.count > 1 and "TF_CONFIG" in os.environ:
            logger.warning(
                "This dataset has the rows of worker %d of %d, as TF_CONFIG says. Hand it to a strategy by "
                "distribute_datasets_from_function: experimental_distribute_dataset cuts its batches into %d steps "
                "each, which its cardinality does not say. With cur_shard=0, shard_count=1 every worker reads all "
                "rows, TensorFlow divides each batch among them, and the cardinality is right.",
                source.shard.index, source.shard.count, source.shard.count,
            )  # fmt: skip
        self._specs = self._find_specs()
        self.pack = _Packer(list(self._specs), features, labels, weights)
        self.is_prefetched = prefetch is not None
        self._inner = self._build(prefetch)
        options = self.options_alone = tf.data.Options()
        # There is nothing to tune or to rewrite in ours alone; trying cost 8 ms an epoch, and at times 150 at its end.
        # Not so where somebody made another dataset of it: options are for all of that.
        options.autotune.enabled = options.experimental_optimization.apply_default_optimizations = False
        self.alone = self._inner.with_options(options)
        """The same for an iterator over this dataset itself."""

        super().__init__(self._inner._variant_tensor)  # noqa: SLF001 (how a Dataset is made of another one)

    @property
    def element_spec(self) -> Any:
        """The specs of a batch's components."""
        return self._inner.element_spec

    @property
    def names(self) -> list[str]:
        """The components of a batch, before they are features, labels and weights."""
        return list(self._specs)

    def _inputs(self) -> list[Any]:
        return [self._inner]

    def __iter__(self) -> Iterator[Any]:
        return _Iterator(self) if tf.executing_eagerly() else super().__iter__()

    @property
    def remaining(self) -> int:
        """The batches of the next iteration: fewer than the cardinality after `load_state_dict`.

        Raises:
            TypeError: `num_epochs=None`, so there is no last batch.
        """
        num_steps = self.next_begin()[1]
        if num_steps is None:
            raise TypeError("With num_epochs=None there is no last batch.")
        return num_steps

    def __repr__(self) -> str:
        return self._epochs.describe("TFDataset", self.names)

    def __enter__(self) -> TFDataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way, with its threads; the end of a `with` block does it."""
        self._epochs.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for generator in list(self._running):
            while True:
                try:
                    generator.close()
                    break
                except ValueError:
                    # A thread of TensorFlow's is in it, to prefetch; it ends with the window that it reads.
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.005)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin with this epoch."""
        with self._lock:
            self._settle()
            self._begun = self._last_used = None
            self._epochs.set_next(epoch)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where this dataset stands, as a handful of integers: after the last batch that a loop over it was given.

        It is of the same kind as a torch loader's and a NumPy reader's, and can be loaded there.

        Args:
            batches: the state as it will be after so many batches of the iteration. Needed where TensorFlow uses
                them by itself: in `fit` (`DatasetStateCallback` counts them there), in a `tf.function`, and where
                another dataset was made of this one.

        Raises:
            ValueError: nobody knows how many batches were used.
        """
        with self._lock:
            if batches is None:
                self._settle()
                batches = self._num_used()
            return self._epochs.state_dict(batches)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration begin where the state was taken, at the cost of reading one window.

        That iteration has fewer steps than the cardinality says, which stays that of whole epochs.

        Raises:
            StateMismatchError: the state is of other rows or another order; the message says what differs.
        """
        with self._lock:
            self._has_given_all, self._last_used = False, None
            self._epochs.load_state_dict(state_dict)
            begin, num_epochs = self._epochs.next, self._epochs.num_epochs
            if begin.past and not self._source.plan(begin.epoch, begin.past).num_batches:
                # Of an epoch's end, where Keras would be given no batch at all.
                done = begin.epochs_done + 1
                self._epochs.begin_at(begin.epoch + 1, 0 if done == num_epochs else done, ())

    def next_begin(self) -> tuple[Any, int | None]:
        """Where the next iteration begins, and how many batches it has; None where it has no end."""
        with self._lock:
            self._settle()
            return self._epochs.next, self._count_steps(self._epochs.next)

    def state_after(self, begin: Any, batches: int) -> dict[str, Any]:
        """The state of so many batches behind a place that `next_begin` gave."""
        return self._epochs.state_after(begin, batches)

    def start_anew(self, iterator: _Iterator) -> None:
        """Be told of an iterator over this dataset itself."""
        self._has_just_ended = False
        self._iterators.add(iterator)

    @contextlib.contextmanager
    def first_use(self) -> Iterator[None]:
        """While an iterator over this dataset itself is given its first batch: what begins now is counted there."""
        with self._lock:
            self._num_asking += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_asking -= 1

    def note_use(self, batches: int) -> Any:
        """Be told how many batches an iterator over this dataset itself was given; where the last iteration began."""
        self._last_used = batches
        return self._begun

    def _num_used(self) -> int:
        """The batches that were used since the place where the next iteration would begin."""
        if self._begun is not self._epochs.next:
            return 0
        living = [one for one in self._iterators if one.begin is self._epochs.next]
        is_elsewhere = self._is_elsewhere or any(one.is_elsewhere for one in living)
        if is_elsewhere or len(living) > 1 or (not living and self._last_used is None):
            raise ValueError(
                "TensorFlow uses this dataset's batches by itself, or several iterators do, so how many were used is "
                "not known here: say state_dict(batches=…)."
            )
        return living[0].used if living else self._last_used or 0

    def _settle(self) -> None:
        """Move on if all batches of an iteration were asked for."""
        if self._has_given_all:
            self._has_given_all, self._last_used = False, None
            self._epochs.move_on()

    def _begin(self) -> tuple[Any, int | None]:
        """Begin an iteration: where, and how many steps it has; None where it has no end."""
        self._epochs.check_open()
        self._epochs.check_shard()
        with self._lock:
            self._settle()
            begin = self._epochs.next
            self.num_begun += 1
            self._begun, self._last_used, self._is_elsewhere = begin, None, not self._num_asking
            return begin, self._count_steps(begin)

    def _count_steps(self, begin: Any) -> int | None:
        """The batches of an iteration that begins there."""
        if self._epochs.num_epochs is None:
            return None
        first = self._source.plan(begin.epoch, begin.past).num_batches
        num_whole: int = self._epochs.num_epochs - begin.epochs_done - 1
        return first + num_whole * self._source.num_batches()

    def generate(self) -> Iterator[Any]:
        """One iteration, for TensorFlow to run: stretches of batches, with one more dimension in front."""
        generator = self._packed_stretches()
        self._running.add(generator)
        return _UntilError(generator, self._end_next)

    def stretches(self) -> Iterator[tuple[Batch, int]]:
        """One iteration, for a loop in eager mode: stretches of batches, and how many those are."""
        generator = self._elements()
        self._running.add(generator)
        return Iteration(self._epochs, generator)

    def _end_next(self) -> None:
        """Let the next iteration have nothing: TensorFlow's `repeat` asks for it at once."""
        self._has_just_ended = True

    def _packed_stretches(self) -> Generator[Any, None, None]:
        if self._has_just_ended:
            # Behind an iteration that was shorter than a whole one, or behind an error that somebody ignores.
            self._has_just_ended = False
            return
        with self._noted_errors(), contextlib.closing(self._elements()) as elements:
            while True:
                try:
                    batches, _ = next(elements)
                except StopIteration as end:
                    if end.value:
                        self._end_next()
                    return
                yield self.pack(batches)

    def packed_rest(self, stretch: Batch | None, elements: Iterator[tuple[Batch, int]]) -> Iterator[Any]:
        """What is left of an iteration in eager mode, for TensorFlow to run."""
        return _UntilError(self._rest(stretch, elements), lambda: None)

    def _rest(self, stretch: Batch | None, elements: Iterator[tuple[Batch, int]]) -> Iterator[Any]:
        with self._noted_errors():
            if stretch is not None:
                yield self.pack(stretch)
            for batches, _ in elements:
                yield self.pack(batches)

    @contextlib.contextmanager
    def _noted_errors(self) -> Iterator[None]:
        self.read_error = None
        try:
            yield
        except Exception as error:
            self.read_error = error
            raise

    def _elements(self) -> Generator[tuple[Batch, int], None, bool]:
        """Stretches of batches: every component with one more dimension in front. The last batch comes alone.

        Returns whether the iteration has fewer batches than a whole one.
        """
        begin, num_steps = self._begin()
        step = 0
        for _, plan in self._epochs.plans(begin):
            with contextlib.closing(self._stretches(plan)) as stretches:
                for batches, num_batches in stretches:
                    self._epochs.check_open()
                    step += num_batches
                    if step != num_steps:
                        yield batches, num_batches
                        continue
                    # Whoever takes so many and no more leaves no thread behind.
                    stretches.close()
                    if num_batches > 1:
                        yield {name: column[:-1] for name, column in batches.items()}, num_batches - 1
                    with self._lock:
                        self._has_given_all = self._has_given_all or self._epochs.next is begin
                    yield {name: column[-1:] for name, column in batches.items()}, 1
        return num_steps is not None and num_steps < len(self._epochs)

    def _stretches(self, plan: EpochPlan) -> Generator[tuple[Batch, int], None, None]:
        """A plan's batches, as many at once as lie together and are of one size, and how many those are."""
        source, files = self._source, self._epochs.files
        if source.transform is not None:
            with contextlib.closing(as_generator(numpy_batches(source, plan, files))) as transformed:
                for batch in transformed:
                    yield self._check_transformed(batch), 1
            return
        with contextlib.closing(as_generator(source.runs(plan, files))) as runs:
            for run in runs:
                for start, num_batches, num_rows in _stretches_of(run, is_by_batch=self._is_by_batch):
                    rows = slice(start, start + num_batches * num_rows)
                    batches: Batch = {}
                    for name, column in run.columns.items():
                        batches |= _components(source, name, column[rows], num_batches)
                    yield batches, num_batches

    @property
    def _is_by_batch(self) -> bool:
        """Whether each batch has a shape of its own."""
        return any(field.shape is None and not field.is_object for field in self._source.fields)

    def _find_specs(self) -> dict[str, Any]:
        """The specs of a batch's columns, by name."""
        source = self._source
        rows = source.batch_size if source.drop_last else None
        if source.transform is not None:
            plan = source.plan(0)
            if not plan.num_batches:
                raise ValueError("There is no batch to apply transform to, so nobody knows what columns it gives.")
            with contextlib.closing(as_generator(numpy_batches(source, plan, self._epochs.files, range(1)))) as found:
                return {name: _spec_of(name, column, rows, self._is_by_batch) for name, column in next(found).items()}
        stacks = {stack.name: stack for stack in source.stacks}
        specs: dict[str, Any] = {}
        for name in source.names:
            if name in stacks:
                members = stacks[name].columns
                specs[name] = tf.TensorSpec((rows, len(members)), stacks[name].dtype)
                if source.has_mask(members):
                    specs[name + VALID_SUFFIX] = tf.TensorSpec((rows, len(members)), tf.bool)
                continue
            field = source.manifest.schema[name]
            specs |= _specs_of_field(field, rows, source.ragged)
            if source.has_mask([name]):
                specs[name + VALID_SUFFIX] = tf.TensorSpec((rows,), tf.bool)
            if source.has_element_mask(name):
                whole = _specs_of_field(replace(field, dtype="bool"), rows, source.ragged)
                specs[name + ELEMENT_VALID_SUFFIX] = whole[name]
        if source.row_index is not None:
            specs[source.row_index] = tf.TensorSpec((rows,), tf.int64)
        if source.uneven == "pad":
            specs[NOT_PADDED] = tf.TensorSpec((rows,), tf.bool)
        return specs

    def _check_transformed(self, batch: Batch) -> Batch:
        """A transformed batch, with one dimension more, if it is like the first one."""
        if set(batch) != set(self._specs):
            raise ValueError(
                f"transform returned columns {list(batch)} for one batch and {list(self._specs)} for the first one; a "
                "tf.data.Dataset needs the same ones for every batch."
            )
        found: Batch = {}
        for name, spec in self._specs.items():
            column = _as_tensor(batch[name])
            if _dtype_of(name, column) != spec.dtype or not spec.shape.is_compatible_with(column.shape):
                raise TypeError(
                    f"transform returned column {name!r} as {column.dtype} of shape {column.shape}, which is not the "
                    f"{spec.dtype.name} of shape {tuple(spec.shape)} that the first batch made known. Let transform "
                    "give every batch one dtype and one shape of rows."
                )
            found[name] = _owned(column)[np.newaxis]
        return found

    def _build(self, prefetch: int | None) -> Any:
        # TensorFlow keeps the function for ever, and must not keep the data files open with it.
        own = weakref.ref(self)

        def generate() -> Iterator[Any]:
            found = own()
            if found is None:
                raise ConverterError(
                    "This dataset of make_tf_dataset was let go of. Hold it while what was made of it is used."
                )
            return found.generate()

        # Nobody checks the cardinality that `take` states: an iteration that was resumed is shorter.
        dataset = self.sliced(generate).repeat()
        if self._epochs.num_epochs is not None:
            dataset = dataset.take(len(self._epochs))
        if prefetch is not None:
            dataset = dataset.prefetch(prefetch)
        return dataset.with_options(self._made_options())

    def sliced(self, generate: Callable[[], Iterator[Any]]) -> Any:
        """The batches of what generates stretches of them, as TensorFlow slices them."""
        signature = self.pack({name: _stretched(spec) for name, spec in self._specs.items()})

        def slices(*batches: Any) -> Any:
            return tf.data.Dataset.from_tensor_slices(batches if len(batches) > 1 else batches[0])

        dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
        return dataset.flat_map(tf.autograph.experimental.do_not_convert(slices))

    def _made_options(self) -> Any:
        options = tf.data.Options()
        # Shards are made of rows, here; a strategy must not part them once more. Of all rows each of its workers takes
        # a part of every batch.
        policies = tf.data.experimental.AutoShardPolicy
        whole = self._source.shard.count == 1
        options.experimental_distribute.auto_shard_policy = policies.DATA if whole else policies.OFF
        # TensorFlow would add a `prefetch` of its own, and batches would count as used that nobody has seen.
        options.experimental_optimization.inject_prefetch = False
        return options


class _UntilError:
    """An iterator whose error comes again: whoever reads ahead asks on behind it, and must not take it for the end.

    `ignore_errors` would ask for ever, so after a thousand times it is the end.
    """

    def __init__(self, elements: Iterator[Any], end: Callable[[], None]) -> None:
        self._elements, self._end = elements, end
        self._error: Exception | None = None
        self._num_errors = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._error is None:
            try:
                return next(self._elements)
            except StopIteration:
                raise
            except Exception as error:
                self._error = error
                raise
        self._num_errors += 1
        if self._num_errors < _MAX_ERRORS:
            raise self._error.with_traceback(None)
        self._end()
        raise StopIteration


class _Iterator(OwnedIterator):  # type: ignore[misc]
    """The batches in eager mode, counted; TensorFlow's own iterator as soon as TensorFlow is to use some by itself."""

    def __init__(self, dataset: TFDataset) -> None:
        # Not TensorFlow's: `_hand_over` does that, where it is needed.
        self._of = dataset
        self._element_spec = dataset.element_spec
        self.used = 0
        self.begin: Any = None
        self.is_elsewhere = False
        """Whether a function of TensorFlow's was given this iterator, and may use batches by itself."""

        self._has_ended = self._is_handed_over = False
        self._in_turn = threading.RLock()
        self._stretches = dataset.stretches()
        self._stretch: Batch | None = None
        self._num_batches = self._num_given = 0
        """Batches of the stretch, and how many of them were given."""

        self._ready: Iterator[Any] = iter(())
        self._pack = _pack_flat(dataset.pack({name: place for place, name in enumerate(dataset.names)}))
        if dataset.is_prefetched:
            self._hand_over()
        dataset.start_anew(self)

    def __getattr__(self, name: str) -> Any:
        if name not in ("_iterator_resource", "_dataset"):
            raise AttributeError(name)
        self.is_elsewhere = True
        self._hand_over()
        return self.__dict__[name]

    def _hand_over(self) -> None:
        """Let TensorFlow's iterator give what comes next."""
        with self._in_turn, tf.init_scope():
            if self._is_handed_over:
                return
            self._is_handed_over = True
            # TensorFlow keeps the function for ever.
            own = weakref.ref(self)
            is_begun = self.used or self._has_ended
            rest = self._of.alone
            if is_begun:
                rest = self._of.sliced(lambda: _rest_of(own())).with_options(self._of.options_alone)
            super().__init__(rest)

    def rest(self) -> Iterator[Any]:
        """What was not given here, for TensorFlow to run."""
        stretch, num_given = self._stretch, self._num_given
        self._stretch, self._ready = None, iter(())
        if stretch is not None and num_given < self._num_batches:
            stretch = {name: column[num_given:] for name, column in stretch.items()}
        else:
            stretch = None
        return self._of.packed_rest(stretch, self._stretches)

    @property
    def _type_spec(self) -> Any:
        self.is_elsewhere = True
        return super()._type_spec

    def get_next_as_optional(self) -> Any:
        """TensorFlow's own, which nobody counts."""
        self.is_elsewhere = True
        self._hand_over()
        return super().get_next_as_optional()

    def __next__(self) -> Any:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def get_next(self) -> Any:
        """The next batch, as `__next__` gives it; raises tf.errors.OutOfRangeError at the end."""
        if not tf.executing_eagerly():
            self.is_elsewhere = True
            self._hand_over()
            return super().get_next()
        with self._in_turn:
            if self.used:
                return self._counted(self._given())
            with self._of.first_use():
                return self._counted(self._given())

    def _counted(self, found: Any) -> Any:
        self.used += 1
        begun = self._of.note_use(self.used)
        if self.used == 1:
            self.begin = begun
        return found

    def _given(self) -> Any:
        if self._has_ended:
            raise tf.errors.OutOfRangeError(None, None, "The iteration has ended.")
        try:
            return self._given_by_tensorflow() if self._is_handed_over else self._given_here()
        except StopIteration:
            self._has_ended = True
            raise tf.errors.OutOfRangeError(None, None, "The iteration has ended.") from None
        except KeyboardInterrupt:
            self._has_ended = True
            raise
        except Exception as error:
            self._has_ended = True
            # One of TensorFlow's own is that already, but not one that stands for the end and came out of a transform.
            if isinstance(error, tf.errors.OpError) and not isinstance(error, tf.errors.OutOfRangeError):
                raise
            kinds = tf.errors.InvalidArgumentError, tf.errors.UnknownError
            kind = kinds[not isinstance(error, (TypeError, ValueError))]
            raise kind(None, None, f"{type(error).__name__}: {error}") from error

    def _given_here(self) -> Any:
        for batch in self._ready:
            self._num_given += 1
            return batch
        if self._num_given == self._num_batches:
            self._stretch = None
            self._stretch, self._num_batches = next(self._stretches)
            self._num_given = 0
        assert self._stretch is not None
        few = slice(self._num_given, min(self._num_given + _UNPACKED_BATCHES, self._num_batches))
        columns = [_unpacked(self._stretch[name], few) for name in self._of.names]
        self._ready = map(self._pack, zip(*columns, strict=True))
        return self._given_here()

    def _given_by_tensorflow(self) -> Any:
        try:
            return super().get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None
        except tf.errors.OpError as error:
            cause = self._of.read_error
            if cause is not None and type(cause).__name__ in str(error):
                raise error from cause
            raise


def _rest_of(iterator: _Iterator | None) -> Iterator[Any]:
    if iterator is None:
        raise ConverterError("This iterator of make_tf_dataset was let go of. Hold it while TensorFlow uses it.")
    return iterator.rest()


def _unpacked(column: Any, batches: slice) -> Sequence[Any]:
    """A component of a stretch of batches, batch by batch, sharing its memory where that is aligned."""
    if isinstance(column, tf.RaggedTensor):
        # Always of one batch.
        return [column.values]
    # As tf.data does, whatever device is asked for around the loop.
    with tf.device("CPU:0"):
        # tf.constant would copy.
        place = context.context().device_name
        if batches.stop - batches.start == 1:
            return [EagerTensor(np.ascontiguousarray(column[batches.start]), place, None)]
        together = EagerTensor(np.ascontiguousarray(column[batches]), place, None)
        found: Sequence[Any] = tf.raw_ops.Unpack(value=together, num=batches.stop - batches.start, axis=0)
        return found


def _pack_flat(places: Any) -> Callable[[Sequence[Any]], Any]:
    """A function that gives a batch its structure, from its tensors and where in it each has its place."""
    if isinstance(places, int):
        return lambda tensors: tensors[places]
    if isinstance(places, dict):
        return lambda tensors: {name: tensors[place] for name, place in places.items()}
    parts = [_pack_flat(part) for part in places]
    return lambda tensors: tuple(part(tensors) for part in parts)


class _Packer:
    """How a batch's columns are handed to a model."""

    def __init__(self, names: Sequence[str], features: Names | None, labels: Names | None, weights: str | None) -> None:
        self._has_labels = labels is not None
        if labels is None and weights is not None:
            raise ValueError(f"weights={weights!r} needs labels: TensorFlow takes (features, labels, weights).")
        taken: dict[str, str] = {}
        if not isinstance(weights, (str, type(None))):
            raise TypeError(f"weights must be the name of one column, got {weights!r}.")
        self._weights = None if weights is None else _check_names("weights", weights, names, taken)
        self._labels = None if labels is None else _check_names("labels", labels, names, taken)
        if features is not None:
            self._features: Names = _check_names("features", features, names, taken)
        else:
            self._features = [name for name in names if name not in taken]
            if not self._features:
                raise ValueError("labels and weights leave no column for the features.")

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        features = _pick(batch, self._features)
        if self._labels is None:
            return features
        labels = _pick(batch, self._labels)
        return (features, labels) if self._weights is None else (features, labels, _pick(batch, self._weights))


def _pick(batch: Mapping[str, Any], names: Names) -> Any:
    return batch[names] if isinstance(names, str) else {name: batch[name] for name in names}


def _check_names(argument: str, given: Any, names: Sequence[str], taken: dict[str, str]) -> Names:
    """The columns that an argument names; each may serve once."""
    is_one = isinstance(given, str)
    listed = [given] if is_one else given
    if not isinstance(listed, (list, tuple)) or not listed or not all(isinstance(name, str) for name in listed):
        raise TypeError(f"{argument} must be a column's name or a list of them, got {given!r}.")
    for name in listed:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{argument}: a batch has no column {name!r}.{hint} It has {', '.join(map(repr, names))}.")
        if name in taken:
            raise ValueError(f"{argument}: column {name!r} is named by {taken[name]} already.")
        taken[name] = argument
    return given if is_one else list(listed)


def _specs_of_field(field: Field, rows: int | None, ragged: str) -> dict[str, Any]:
    if field.is_object:
        return {field.name: tf.TensorSpec((rows,), tf.string)}
    if field.shape is not None:
        return {field.name: tf.TensorSpec((rows, *field.shape), field.stored_dtype)}
    inner = (None,) * field.ndim
    if ragged == "pad":
        sizes = (rows,) if field.ndim == 1 else (rows, field.ndim)
        specs = {
            field.name: tf.TensorSpec((rows, *inner), field.stored_dtype),
            field.name + LENGTH_SUFFIX: tf.TensorSpec(sizes, tf.int64),
        }
        if field.is_jagged:
            specs[field.name + INNER_LENGTH_SUFFIX] = tf.TensorSpec((rows, *inner[1:]), tf.int64)
        return specs
    return {field.name: tf.RaggedTensorSpec((None, *inner), field.stored_dtype, ragged_rank=field.ndim)}


def _spec_of(name: str, column: Any, rows: int | None, is_by_batch: bool) -> Any:
    """The spec of a transform's column, from the first batch; where rows differ in shape batches may, too."""
    column = _as_tensor(column)
    inner = (None,) * (column.ndim - 1) if is_by_batch else column.shape[1:]
    return tf.TensorSpec((rows, *inner), _dtype_of(name, column))


def _as_tensor(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers that TensorFlow knows, for dates and times; text as objects."""
    if column.dtype.kind == "M":
        return times_as_integers(column)
    return column.astype(object) if column.dtype.kind in "SUT" else column


def _dtype_of(name: str, column: np.ndarray[Any, Any]) -> Any:
    try:
        if column.dtype == object and not pa.array(column.reshape(-1), pa.large_binary()).null_count:
            return tf.string
        return tf.as_dtype(column.dtype if column.dtype != object else "?")
    except (TypeError, pa.ArrowException) as error:
        raise TypeError(
            f"transform returned column {name!r} as {column.dtype}, which TensorFlow has no tensors for."
        ) from error


def _stretched(spec: Any) -> Any:
    """The spec of a stretch of batches."""
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec((None, *spec.shape), spec.dtype, ragged_rank=spec.ragged_rank + 1)
    return tf.TensorSpec((None, *spec.shape), spec.dtype)


def _stretches_of(run: Run, *, is_by_batch: bool) -> Iterator[tuple[int, int, int]]:
    """Where a run's batches of one size begin, how many those are, and of how many rows."""
    size = run.batch_size
    whole, rest = divmod(run.num_rows, size)
    if is_by_batch:
        yield from ((number * size, 1, size) for number in range(whole))
    elif whole:
        yield 0, whole, size
    if rest:
        yield whole * size, 1, rest


def _components(source: BatchSource, name: str, column: Any, num_batches: int) -> Batch:
    """A column of batches as what TensorFlow takes, with the batches in front."""
    field = source.field_of(name)
    if isinstance(column, np.ndarray):
        return {name: _aligned(column).reshape(num_batches, -1, *column.shape[1:])}
    assert field is not None
    if field.is_object:
        return {name: column.to_numpy(zero_copy_only=False).reshape(num_batches, -1)}
    rows = ragged_values(column, field)
    if source.ragged == "pad":
        return {key: padded[np.newaxis] for key, padded in source.padded(name, rows).items()}
    return {name: _ragged(rows)}


def _owned(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A transform's column in memory that nobody else has.

    TensorFlow computes in place where it thinks that nobody looks: in a table that the transform hands out parts of,
    in a column that it gives by two names, and in a mapped file, which ends the process.
    """
    if column.dtype.isbuiltin != 1 or column.dtype == object:
        return np.array(column, order="C")
    owned = new_array(column.shape, column.dtype)
    owned[...] = column
    return owned


def _aligned(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers that TensorFlow need not copy: it would do that under the GIL, into memory that is mapped anew."""
    if not column.ctypes.data % _ALIGNMENT_BYTES:
        return column
    aligned = new_array(column.shape, column.dtype)
    aligned[...] = column
    return aligned


def _ragged(rows: RaggedRows) -> Any:
    """Rows as a RaggedTensor of one batch."""
    splits = [np.array([0, len(rows.shapes)])]
    splits += [np.concatenate(([0], np.cumsum(lengths))) for lengths in rows.level_lengths()]
    return tf.RaggedTensor.from_nested_row_splits(rows.values, splits, validate=False)


class DatasetState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """A dataset's state as a part of a `tf.train.Checkpoint`.

    For a loop over the dataset itself. Where a strategy or a `tf.function` uses the batches, nobody here counts them:
    there save `dataset.state_dict(batches=…)` beside the checkpoint.

    ```python
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, data=DatasetState(dataset))
    ```
    """

    def __init__(self, dataset: TFDataset) -> None:
        self._dataset = dataset

    def serialize(self) -> str:
        """The state as text; TensorFlow calls this when a checkpoint is written."""
        return json.dumps(self._dataset.state_dict())

    def deserialize(self, string_value: str) -> None:
        """Load the state; TensorFlow calls this when a checkpoint is restored."""
        self._dataset.load_state_dict(json.loads(string_value))

    def _copy_trackable_to_cpu(self, object_map: dict[Any, Any]) -> None:
        """Let an asynchronous checkpoint hold the state of the moment at which it is asked for."""
        copied = object_map.setdefault(self, _CopiedState())
        copied.text = self.serialize()


class _CopiedState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """A state that a checkpoint writes later."""

    text = ""

    def serialize(self) -> str:
        return self.text

    def deserialize(self, string_value: str) -> None:
        self.text = string_value


class DatasetStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes a dataset's state to a file while `fit` runs, at the steps at which `ModelCheckpoint` writes the model.

    Steps are counted here, so batches that a strategy has prefetched are not taken for used ones. To go on, load the
    model's weights and `dataset.load_state_dict(json.load(open(filepath)))` before `fit`; Keras then warns that the
    first epoch has fewer steps than the others.

    Args:
        dataset: the one that `fit` is given, or that what it is given was made of, batch for batch: what `unbatch`,
            `rebatch` or `cache` give is not counted rightly.
        filepath: where the state stands, as JSON; replaced as a whole.
        save_freq: `"epoch"`, or after how many batches.
    """

    def __init__(self, dataset: TFDataset, filepath: str | os.PathLike[str], *, save_freq: str | int = "epoch") -> None:
        super().__init__()
        if save_freq != "epoch" and (isinstance(save_freq, (str, bool)) or save_freq < 1):
            raise ValueError(f"save_freq must be 'epoch' or a number of batches above 0, got {save_freq!r}.")
        self._dataset, self._filepath, self._save_freq = dataset, os.fspath(filepath), save_freq
        self._begin: Any = None
        # Not counted anew in a second `fit`, as ModelCheckpoint does not.
        self._unsaved = 0
        self._steps = 0
        self._end: int | None = None
        self._num_begun: int | None = None
        """As the dataset counted it when the iteration had begun that is under way."""

        self._last_batch = -1

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Count from where the dataset stands: what others do with it meanwhile changes nothing."""
        self._begin, self._end = self._dataset.next_begin()
        self._steps, self._num_begun = 0, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Count this epoch's batches from 0."""
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Count the batches, and save where it is time."""
        self._steps += batch - self._last_batch
        self._unsaved += batch - self._last_batch
        self._last_batch = batch
        num_begun = self._dataset.num_begun
        self._num_begun = self._num_begun or num_begun
        if self._end is not None and self._steps >= self._end:
            if num_begun == self._num_begun:
                # Of a last execution of several steps Keras tells the number that was planned.
                self._steps, self._num_begun = self._end, None
            else:
                self._num_begun = num_begun
            self._end += len(self._dataset)
        if not isinstance(self._save_freq, str) and self._unsaved >= self._save_freq:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Save, if that is asked for."""
        if self._save_freq == "epoch":
            self._save()

    def _save(self) -> None:
        self._unsaved = 0
        state = self._dataset.state_after(self._begin, self._steps)
        partial = f"{self._filepath}.partial"
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(state, file)
        os.replace(partial, self._filepath)
