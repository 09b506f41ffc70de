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
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from types import TracebackType
from typing import Any

import tensorflow as tf

from converter.errors import ConverterError
from converter.frameworks.tensorflow.elements import (
    Names,
    Packer,
    find_specs,
    stretched,
    stretches_in,
)
from converter.frameworks.tensorflow.iterator import EagerIterator, UntilError
from converter.loading.batches import Batch
from converter.loading.epochs import Epochs, Iteration
from converter.reading.source import BatchSource

logger = logging.getLogger(__name__)

# A forked child has none of TensorFlow's threads. If it collected the garbage that its parent has left, an iterator of
# TensorFlow's, say, it would wait for them for ever.
os.register_at_fork(after_in_child=gc.freeze)

_CLOSE_SECONDS = 60.0


def warn_of_cluster(source: BatchSource) -> None:
    """Say what `experimental_distribute_dataset` would make of a shard that TF_CONFIG chose."""
    if source.is_shard_found and source.shard.count > 1 and "TF_CONFIG" in os.environ:
        logger.warning(
            "This dataset has the rows of worker %d of %d, as TF_CONFIG says. Hand it to a strategy by "
            "distribute_datasets_from_function: experimental_distribute_dataset cuts its batches into %d steps "
            "each, which its cardinality does not say. With cur_shard=0, shard_count=1 every worker reads all "
            "rows, TensorFlow divides each batch among them, and the cardinality is right.",
            source.shard.index, source.shard.count, source.shard.count,
        )  # fmt: skip


def slice_stretches(generate: Callable[[], Iterator[Any]], signature: Any) -> Any:
    """The batches of what generates stretches of them, as TensorFlow slices them."""

    def slices(*batches: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(batches if len(batches) > 1 else batches[0])

    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    return dataset.flat_map(tf.autograph.experimental.do_not_convert(slices))


def made_options(source: BatchSource) -> Any:
    """What TensorFlow is not to do with our batches."""
    options = tf.data.Options()
    # Shards are made of rows, here; a strategy must not part them once more. Of all rows each of its workers takes
    # a part of every batch.
    policies = tf.data.experimental.AutoShardPolicy
    whole = source.shard.count == 1
    options.experimental_distribute.auto_shard_policy = policies.DATA if whole else policies.OFF
    # TensorFlow would add a `prefetch` of its own, and batches would count as used that nobody has seen.
    options.experimental_optimization.inject_prefetch = False
    return options


class TFDataset(tf.data.Dataset):  # type: ignore[misc]  # TensorFlow has no types.
    """A `tf.data.Dataset` of batches that knows its cardinality, and a context manager that closes it.

    One class, because what is counted, what was used and where the next iteration begins are one state.
    """

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
        self._iterators: weakref.WeakSet[EagerIterator] = weakref.WeakSet()
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

        warn_of_cluster(source)
        self._specs = find_specs(source, self._epochs.files)
        self.pack = Packer(list(self._specs), features, labels, weights)
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
        return EagerIterator(self) if tf.executing_eagerly() else super().__iter__()

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

    def start_anew(self, iterator: EagerIterator) -> None:
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
        return UntilError(generator, self._end_next)

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
        return UntilError(self._rest(stretch, elements), lambda: None)

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
            with contextlib.closing(stretches_in(self._source, plan, self._epochs.files, self._specs)) as stretches:
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
        return dataset.with_options(made_options(self._source))

    def sliced(self, generate: Callable[[], Iterator[Any]]) -> Any:
        """The batches of what generates stretches of them, as TensorFlow slices them."""
        return slice_stretches(generate, self.pack({name: stretched(spec) for name, spec in self._specs.items()}))
