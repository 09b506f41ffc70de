"""Batches as a real `tf.data.Dataset` that knows its cardinality, its epoch and its state.

TensorFlow calls Python once per run of batches, not per batch: a run arrives as one tensor per column (without a copy
if its memory is aligned), and TensorFlow slices the batches. An eager loop over the dataset itself does without tf.data
(`iterator.py`).

An iteration's last batch is handed to TensorFlow alone. When TensorFlow asks for it, all others were used: so an
iteration that stops early starts over, and counting costs nothing per step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf

from converter.arguments import check_integer
from converter.errors import ConverterError
from converter.frameworks.prompt import from_generator
from converter.frameworks.tensorflow.elements import Packer, find_specs, stretched, stretches_in
from converter.frameworks.tensorflow.iterator import CountedIterator, EagerIterator, UntilError, begin_loop
from converter.garbage import keep_garbage_of_parents
from converter.living import Living
from converter.loading.batches import Batch
from converter.loading.epochs import Epochs
from converter.loading.forecast import is_any_batch_left
from converter.loading.names import Names
from converter.loading.progress import follow
from converter.loading.stats import LoaderStats, stats_of
from converter.loading.steps import Steps
from converter.reading.source import BatchSource
from converter.shards import look_for_shard

logger = logging.getLogger(__name__)


# A child that collects an iterator of tf.data waits for threads that only its parent has.
keep_garbage_of_parents()


def _warn_of_cluster(source: BatchSource) -> None:
    """Warn that `experimental_distribute_dataset` would cut the batches of a shard that TF_CONFIG chose."""
    if source.is_shard_found and source.shard.count > 1 and "TF_CONFIG" in os.environ:
        logger.warning(
            "This dataset has the rows of worker %d of %d, from TF_CONFIG. Pass it to a strategy with "
            "distribute_datasets_from_function: experimental_distribute_dataset cuts each batch into %d steps, which "
            "the cardinality does not show. Or pass cur_shard=0, shard_count=1: every worker reads all rows, and "
            "TensorFlow divides each batch among them.",
            source.shard.index, source.shard.count, source.shard.count,
        )  # fmt: skip


def _warn_of_keras(source: BatchSource) -> None:
    """Warn that Keras on JAX would divide once more the rows of a shard that JAX chose."""
    keras: Any = sys.modules.get("keras")
    if keras is None or not source.is_shard_found or look_for_shard()[1] != "jax.distributed":
        return
    distribution = keras.distribution.distribution()
    if source.shard.count > 1 and getattr(distribution, "auto_shard_dataset", True):
        logger.warning(
            "This dataset has the rows of process %d of %d, from jax.distributed. Pass auto_shard_dataset=False to "
            "keras.distribution.DataParallel: by default Keras divides them once more and leaves rows out. Or pass "
            "cur_shard=0, shard_count=1, drop_last=True: every process reads all rows, and Keras divides each batch.",
            source.shard.index, source.shard.count,
        )  # fmt: skip


def _slice_stretches(generate: Callable[[], Iterator[Any]], signature: Any) -> Any:
    """A dataset of batches, which TensorFlow slices from the stretches of batches that `generate` yields."""

    def slices(*batches: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(batches if len(batches) > 1 else batches[0])

    return from_generator(generate, signature).flat_map(tf.autograph.experimental.do_not_convert(slices))


def _dataset_options(source: BatchSource) -> Any:
    """Options that keep TensorFlow from sharding and prefetching our batches again."""
    options = tf.data.Options()
    # A shard must not be sharded again. If this process reads all rows, each worker takes its part of each batch.
    policies = tf.data.experimental.AutoShardPolicy
    has_all_rows = source.shard.count == 1
    options.experimental_distribute.auto_shard_policy = policies.DATA if has_all_rows else policies.OFF
    # A `prefetch` of TensorFlow's own would count batches as used that no loop has received.
    options.experimental_optimization.inject_prefetch = False
    return options


class TFDataset(tf.data.Dataset):  # type: ignore[misc]  # TensorFlow has no types.
    """A `tf.data.Dataset` of batches that knows its cardinality, and a context manager that closes it.

    `DatasetConverter.make_tf_dataset` makes one.

    ```python
    dataset = converter.make_tf_dataset(batch_size=2, features="x", labels="y")
    dataset.set_epoch(3)
    for features, labels in dataset:
        saved = dataset.state_dict()  # JSON
        break
    dataset.load_state_dict(saved)
    for features, labels in dataset.progress("train"):
        ...
    print(dataset.stats())  # what limits the loop
    print(dataset.remaining, "of", len(dataset), dataset.element_spec, dataset.names)
    dataset.close()  # or a `with` block
    ```

    The methods from `generate` to `note_use` are for its iterators, not for users. They stand here, because they share
    the state that counts batches.
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
        prefetch = None if prefetch is None else check_integer("prefetch", prefetch, least=1)
        self._source = source
        self._epochs = Epochs(source, num_epochs)
        # The cardinality cannot change later.
        self._epochs.settle_shard()
        self._lock = threading.RLock()  # A signal's handler may ask for the state while this thread holds it.
        self._begun: Any = None
        self._passed: Any = None  # The place that was loaded, if no row of its epoch was left.
        """Where the last iteration began."""

        self.is_asked_for = False
        """Whether a loop over this dataset itself waits for the first batch of an iteration after that one."""

        self._has_given_all = False
        """Whether an iteration that began where the next one would has given all batches."""

        self._iterators: Living[EagerIterator | CountedIterator] = Living()
        self._last_used: int | None = None
        self._num_asking = 0
        """Eager loops that wait for their first batch."""

        self._is_elsewhere = False
        """Whether TensorFlow began the iteration, so that its batches are not counted here."""

        self.num_begun = 0
        """Iterations that have begun."""

        self.read_error: BaseException | None = None
        """The error that reading raised; TensorFlow's own error has only its text."""

        _warn_of_cluster(source)
        _warn_of_keras(source)
        self._specs = find_specs(source, self._epochs.files)
        self.pack = Packer(list(self._specs), features, labels, weights)
        self.is_prefetched = prefetch is not None
        self._inner = self._build(prefetch)
        options = self.options_alone = tf.data.Options()
        # There is nothing to tune or rewrite, and trying costs 8 ms per epoch, at times 150. A dataset made from this
        # one may need both, so only our own loop has these options.
        options.autotune.enabled = options.experimental_optimization.apply_default_optimizations = False
        self.alone = self._inner.with_options(options)
        """The same batches for a loop over this dataset itself."""

        super().__init__(tf.data.experimental.to_variant(self._inner))

    @property
    def element_spec(self) -> Any:
        """The specs of a batch's components."""
        return self._inner.element_spec

    @property
    def names(self) -> list[str]:
        """The components of a batch, before they are features, labels and weights."""
        return list(self._specs)

    def _inputs(self) -> list[Any]:
        """The dataset that this one is made from.

        Reaches into: tf.data.Dataset._inputs, an abstract method (TensorFlow 2.21).
        Without it: nothing calls this method.
        """
        return [self._inner]

    def __iter__(self) -> Iterator[Any]:
        return begin_loop(self) if tf.executing_eagerly() else super().__iter__()

    @property
    def remaining(self) -> int:
        """Batches of the next iteration: fewer than the cardinality after `load_state_dict`.

        Raises:
            TypeError: `num_epochs=None`, so there is no last batch.
        """
        num_steps = self.next_begin()[1]
        if num_steps is None:
            raise TypeError(
                "With num_epochs=None there is no last batch, so none is counted. Pass num_epochs=1 or more."
            )
        return num_steps

    def __repr__(self) -> str:
        return self._epochs.describe("TFDataset", self.names)

    def _repr_html_(self) -> str:
        return self._epochs.describe_in_html("TFDataset", self.names)

    def __enter__(self) -> TFDataset:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every running iteration and its threads. The end of a `with` block calls it."""
        self._epochs.close()

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin with this epoch, counted from 0; where a loaded state is, if it is in there.

        Raises:
            ValueError, TypeError: `epoch` is not a whole number of at least 0.
        """
        with self._lock:
            passed = self._passed if self._begun is None else None
            self._settle()
            if passed is not None and (epoch, self._epochs.next.epoch) == (passed.epoch, passed.epoch + 1):
                self._epochs.begin_at(passed.epoch, passed.epochs_done, passed.past)
            self._begun = self._last_used = self._passed = None
            self._iterators = Living(iterator for iterator in self._iterators if not iterator.used)
            self._epochs.set_next(epoch)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """The position after the last batch that a loop over this dataset received, as a few integers for JSON.

        A torch loader or a NumPy reader can load it too. Rows, seed, shuffle, window and `uneven` must be the same.
        With `uneven="keep"` and several epochs each rank loads its own, as `BatchReader.state_dict` says.

        Args:
            batches: return the state after this many batches of the iteration that began last. Needed if TensorFlow
                takes the batches itself: in `fit` (`DatasetStateCallback` counts them), in a `tf.function`, and in a
                dataset made from this one.

        Raises:
            ValueError, TypeError: `batches` is needed, or is not a number of batches of one iteration.
        """
        with self._lock:
            if batches is None:
                self._settle()
                return self._epochs.state_dict(self._num_used(), self._epochs.next)
            # Of the iteration that began last, even if TensorFlow has asked for all of its batches.
            if self.is_asked_for or self._begun is None:
                self._settle()
                return self._epochs.state_dict(batches, self._epochs.next)
            return self._epochs.state_dict(batches, self._begun)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration begin where the state was taken, at the cost of reading one window.

        That iteration has `remaining` steps; the cardinality does not change, because it counts whole epochs. If no
        rank has a batch left in that epoch, the next one begins, because Keras fails on an empty iteration.

        Raises:
            StateMismatchError: the state is of other rows or another order; the message says what differs.
        """
        with self._lock:
            self._has_given_all, self._begun, self._last_used, self._passed = False, None, None, None
            self._iterators = Living(iterator for iterator in self._iterators if not iterator.used)
            self._epochs.load_state_dict(state_dict)
            begin, num_epochs = self._epochs.next, self._epochs.num_epochs
            if begin.past and not is_any_batch_left(self._source, begin.epoch, begin.past):
                done = begin.epochs_done + 1
                self._epochs.begin_at(begin.epoch + 1, 0 if done == num_epochs else done, ())
                self._passed = begin

    def next_begin(self) -> tuple[Any, int | None]:
        """Where the next iteration begins, and how many batches it has (None if it is endless)."""
        with self._lock:
            self._settle()
            return self._epochs.next, self._count_steps(self._epochs.next)

    def state_after(self, begin: Any, batches: int) -> dict[str, Any]:
        """The state `batches` after a place that `next_begin` returned."""
        return self._epochs.state_after(begin, batches)

    def start_anew(self, iterator: EagerIterator | CountedIterator) -> None:
        """Register the iterator of a loop over this dataset itself."""
        self._iterators.add(iterator)

    def new_steps(self) -> Steps:
        """The steps of a loop over this dataset itself, which begins now."""
        self._epochs.begin_steps(Steps(self._epochs.meter))
        return self._epochs.steps

    @contextlib.contextmanager
    def first_use(self) -> Iterator[None]:
        """Around the first batch of a loop over this dataset itself: the loop counts the iteration that begins now."""
        with self._lock:
            self._num_asking += 1
        try:
            yield
        except BaseException:
            # It has received none. So a state can be saved after a Ctrl-C here.
            self._last_used = self._last_used or 0
            raise
        finally:
            with self._lock:
                self._num_asking -= 1

    def note_use(self, iterator: EagerIterator | CountedIterator) -> None:
        """Note that a loop over this dataset itself has received a batch."""
        if iterator.used == 1:
            iterator.number = self.num_begun
            iterator.begin = self._begun
        # Those from before a load_state_dict or set_epoch count no more.
        if iterator in self._iterators:
            self._last_used = iterator.used

    def _num_used(self) -> int:
        """Batches that were used since the place where the next iteration would begin."""
        # A loop in which another one has read all: its own place may be wanted, or the next iteration's.
        is_behind = any(map(self._is_behind, self._iterators))
        if self._begun is not self._epochs.next and not is_behind:
            return 0
        living = [iterator for iterator in self._iterators if iterator.begin is self._epochs.next]
        is_elsewhere = self._is_elsewhere or any(iterator.is_elsewhere for iterator in living)
        is_unknown = not living and self._last_used is None and not self._num_asking
        if is_elsewhere or len(living) > 1 or is_unknown or is_behind:
            raise ValueError(
                "TensorFlow itself, or more than one iterator, uses this dataset's batches, so they are not counted. "
                "Pass how many were used: state_dict(batches=…)."
            )
        return living[0].used if living else self._last_used or 0

    def _is_behind(self, iterator: EagerIterator | CountedIterator) -> bool:
        """Whether an iterator has batches left of an iteration that counts as read, by one that began later."""
        # None while the first batch is being counted.
        is_running = not iterator.has_ended and iterator.begin not in (None, self._epochs.next)
        is_passed = is_running and iterator.number != self.num_begun
        return is_passed and iterator.used != self._count_steps(iterator.begin)

    def _settle(self) -> None:
        """Move on to the next epoch if all batches of an iteration were asked for."""
        if self._has_given_all:
            self._has_given_all = False  # In this order a signal's handler finds a right state between any two.
            self._epochs.move_on()
            self._last_used = None

    def _begin(self) -> tuple[Any, int | None]:
        """Begin an iteration; returns where, and how many steps it has (None if it is endless)."""
        self._epochs.check_open()
        self._epochs.check_shard()
        with self._lock:
            self._settle()
            begin = self._epochs.next
            self.num_begun += 1
            self._begun, self._last_used, self._is_elsewhere = begin, None, not self._num_asking
            self.is_asked_for = False
            return begin, self._count_steps(begin)

    def _count_steps(self, begin: Any) -> int | None:
        """Batches of an iteration that begins there; None if it is endless."""
        if self._epochs.num_epochs is None:
            return None
        first = self._source.plan(begin.epoch, begin.past).num_batches
        num_whole: int = self._epochs.num_epochs - begin.epochs_done - 1
        return first + num_whole * self._source.num_batches()

    def generate(self) -> Iterator[Any]:
        """One iteration for tf.data: stretches of batches, with one more dimension in front."""
        return UntilError(self._epochs.begun(self._packed_stretches()))

    def stats(self) -> LoaderStats:
        """What the dataset did in the iteration that was begun last: printed, it says what limits the loop.

        In a loop over the dataset itself the loop's waits are counted. If TensorFlow takes the batches (in `fit`, in a
        `tf.function`, in a dataset made from this one), those of TensorFlow's own thread, which reads ahead, are.
        """
        return stats_of(self._epochs)

    def progress(self, description: str | None = None, *, shown: bool | None = None) -> Iterator[Any]:
        """One iteration with a bar: rows a second, the time left, and which part of its time the loop waited for data.

        Keras' `fit` has a bar of its own.

        Args:
            description: what stands before the bar; the number of the epoch by default.
            shown: whether the bar is shown; by default in a terminal and in a notebook, if tqdm is installed.

        Raises:
            MissingDependencyError: `shown=True` and tqdm is not installed.
        """
        # An iteration that TensorFlow has ended is settled by this.
        self.next_begin()
        return follow(self, self._epochs, self.stats, description, shown)

    def stretches(self) -> Iterator[tuple[Batch, int]]:
        """One iteration for an eager loop: stretches of batches, each with its number of batches."""
        return self._epochs.begun(self._elements(is_counted=False))

    def _packed_stretches(self) -> Generator[Any, None, None]:
        with self._noted_errors(), contextlib.closing(self._elements(is_counted=True)) as elements:
            steps = Steps(self._epochs.meter, is_coarse=True)
            while True:
                asked = steps.ask()
                self._epochs.steps = steps
                try:
                    batches, _ = next(elements)
                    steps.receive(asked)
                except StopIteration:
                    steps.end()
                    return
                yield self.pack(batches)

    def packed_rest(self, stretch: Batch | None, elements: Iterator[tuple[Batch, int]]) -> Iterator[Any]:
        """What is left of an eager loop's iteration, for tf.data."""
        return UntilError(self._rest(stretch, elements))

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

    def _note_given_all(self, begin: Any) -> None:
        with self._lock:
            self._has_given_all = self._has_given_all or self._epochs.next is begin

    def _elements(self, *, is_counted: bool) -> Generator[tuple[Batch, int], None, None]:
        """Yield stretches of batches and their number; components have one more dimension in front.

        The last batch comes alone. With `is_counted` the batches of a stretch count once the next one is asked for, and
        the last batch at once.
        """
        begin, num_steps = self._begin()
        if num_steps == 0:
            # A state left rows for other ranks alone.
            self._note_given_all(begin)
        step = 0
        for at, plan in self._epochs.plans(begin):
            progress = replace(at)
            self._epochs.steps.count(plan, progress)
            with contextlib.closing(stretches_in(self._source, plan, self._epochs.files, self._specs)) as stretches:
                for batches, num_batches in stretches:
                    self._epochs.check_open()
                    step += num_batches
                    if step != num_steps:
                        yield batches, num_batches
                        progress.num_batches += num_batches * is_counted
                        continue
                    # Closed before the last batch: a loop that stops there leaves no thread.
                    stretches.close()
                    if num_batches > 1:
                        yield {name: column[:-1] for name, column in batches.items()}, num_batches - 1
                    self._note_given_all(begin)
                    progress.num_batches += num_batches * is_counted
                    yield {name: column[-1:] for name, column in batches.items()}, 1

    def _build(self, prefetch: int | None) -> Any:
        # TensorFlow never releases the function, and must not keep the data files open with it.
        own = weakref.ref(self)

        def generate() -> Iterator[Any]:
            dataset = own()
            if dataset is None:
                raise ConverterError(
                    "This dataset of make_tf_dataset was deleted. Keep a reference while others made from it are used."
                )
            return dataset.generate()

        # `take` gives the cardinality, which TensorFlow does not check: a resumed iteration is shorter. What it takes
        # from must be endless for TensorFlow, as is anything repeated, even nothing.
        dataset = self.sliced(generate).concatenate(self.sliced(lambda: iter(())).repeat())
        if self._epochs.num_epochs is not None:
            dataset = dataset.take(len(self._epochs))
        if prefetch is not None:
            dataset = dataset.prefetch(prefetch)
        return dataset.with_options(_dataset_options(self._source))

    def sliced(self, generate: Callable[[], Iterator[Any]]) -> Any:
        """A dataset of batches, which TensorFlow slices from the stretches of batches that `generate` yields."""
        return _slice_stretches(generate, self.pack({name: stretched(spec) for name, spec in self._specs.items()}))
