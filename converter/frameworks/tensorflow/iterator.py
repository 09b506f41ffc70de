"""The iterator of an eager loop: counts the batches used, for `state_dict`, and avoids the cost of tf.data.

To begin a tf.data iterator costs 10 ms with 3 columns and 23 ms with 41. Here TensorFlow only unpacks tensors: one call
for many batches of a column.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import tensorflow as tf

from converter.errors import ConverterError
from converter.frameworks.tensorflow.elements import pack_flat
from converter.loading.batches import Batch
from converter.loading.steps import Steps
from converter.signals import is_of_handler

if TYPE_CHECKING:
    from converter.frameworks.tensorflow.dataset import TFDataset

_MAX_ERRORS = 1000
_UNPACKED_BATCHES = 64
"""Batches that are tensors at once, since a window may have 100,000. 41 columns were read at 6.2, 9.5, 12.4, 15.5, 15.5
and 16.5 M rows/s with 4, 8, 16, 32, 64 and 256."""


def _find_owned_iterator() -> Any:
    """TensorFlow's class of an iterator that owns its resource; None if it has moved.

    Reaches into: tensorflow.python.data.ops.iterator_ops.OwnedIterator (TensorFlow 2.21).
    Without it: loops take tf.data's own iterator (`CountedIterator`), which begins 10 to 23 ms later.
    """
    try:
        from tensorflow.python.data.ops.iterator_ops import OwnedIterator
    except ImportError:
        return None
    return OwnedIterator


@functools.cache
def _find_eager_tensor() -> tuple[Any, Any] | None:
    """TensorFlow's class of an eager tensor, and the function that names its device; None if they have moved.

    Reaches into: tensorflow.python.framework.ops.EagerTensor and tensorflow.python.eager.context (TensorFlow 2.21).
    Without it: tf.constant copies every array.
    """
    try:
        from tensorflow.python.eager import context
        from tensorflow.python.framework.ops import EagerTensor
    except ImportError:
        return None
    return EagerTensor, context.context


_OwnedIterator: Any = _find_owned_iterator()


def begin_loop(dataset: TFDataset) -> Iterator[Any]:
    """The iterator of an eager loop over the dataset itself."""
    dataset.is_asked_for = True
    return CountedIterator(dataset) if _OwnedIterator is None else EagerIterator(dataset)


class UntilError:
    """An iterator that raises its error again and again: code that reads ahead must not take the error for the end.

    `ignore_errors` would ask without end, so after a thousand times it ends.
    """

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements
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
        raise StopIteration


class CountedIterator:
    """tf.data's own iterator, with its batches counted: for a TensorFlow in which `EagerIterator` cannot work."""

    def __init__(self, dataset: TFDataset) -> None:
        self._of = dataset
        self._batches = iter(dataset.alone)
        self.used = 0
        self.has_ended = False
        self.begin: Any = None
        self.number = 0
        self.is_elsewhere = False
        """Whether TensorFlow may use batches that are not counted here."""

        dataset.start_anew(self)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        self.is_elsewhere = True
        return getattr(self._batches, name)

    def __next__(self) -> Any:
        try:
            with contextlib.nullcontext() if self.used else self._of.first_use():
                batch = next(self._batches)
                _count(self, self._of)
        except tf.errors.OpError as error:
            _raise_with_cause(self._of, error)
        except StopIteration:
            self.has_ended = True
            raise
        return batch


class EagerIterator(_OwnedIterator or object):  # type: ignore[misc]
    """The batches of an eager loop, counted. It turns into TensorFlow's iterator once TensorFlow needs one.

    Reaches into: OwnedIterator's attributes _iterator_resource, _dataset, _element_spec, _type_spec (TensorFlow 2.21).
    Without it: `begin_loop` takes `CountedIterator`.
    """

    def __init__(self, dataset: TFDataset) -> None:
        # The base class is initialised by `_hand_over`, if at all.
        self._of = dataset
        self._element_spec = dataset.element_spec
        self.used = 0
        self.begin: Any = None
        self.number = 0
        """The dataset's count of iterations when this one had begun."""
        self.is_elsewhere = False
        """Whether a TensorFlow function was given this iterator, and may use batches that are not counted here."""

        self.has_ended = self._is_handed_over = False
        self._in_turn = threading.RLock()
        self._stretches = dataset.stretches()
        self._stretch: Batch | None = None
        self._num_batches = self._num_given = 0
        """Batches of the stretch, and how many of them were given."""

        self._steps: Steps | None = None
        self._ready: Iterator[Any] = iter(())
        self._pack = pack_flat(dataset.pack({name: number for number, name in enumerate(dataset.names)}))
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
        """Let TensorFlow's iterator give the batches that are left."""
        with self._in_turn, tf.init_scope():
            if self._is_handed_over:
                return
            self._is_handed_over = True
            # TensorFlow never releases the function.
            own = weakref.ref(self)
            is_begun = self.used or self.has_ended
            rest = self._of.alone
            if is_begun:
                rest = self._of.sliced(lambda: _rest_of(own())).with_options(self._of.options_alone)
            super().__init__(rest)

    def rest(self) -> Iterator[Any]:
        """The batches that are left, as stretches for TensorFlow to slice."""
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
        """TensorFlow's own method, whose batches are not counted."""
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
                batch = self._timed()
                _count(self, self._of)
            else:
                if not self._is_handed_over:
                    self._steps = self._of.new_steps()
                with self._of.first_use():
                    batch = self._timed()
                    # Counted in here, so that a signal's handler finds it asked for, or counted.
                    _count(self, self._of)
            if self._steps is not None:
                self._steps.note_batch()
            return batch

    def _timed(self) -> Any:
        steps = self._steps
        if steps is None or not steps.every.is_next():
            return self._given()
        asked = steps.ask()
        try:
            batch = self._given()
        except tf.errors.OutOfRangeError:
            steps.end()
            raise
        steps.receive(asked)
        return batch

    def _given(self) -> Any:
        if self.has_ended:
            raise tf.errors.OutOfRangeError(None, None, "The iteration has ended.")
        try:
            return self._given_by_tensorflow() if self._is_handed_over else self._given_here()
        except StopIteration:
            self.has_ended = True
            raise tf.errors.OutOfRangeError(None, None, "The iteration has ended.") from None
        except KeyboardInterrupt:
            self.has_ended = True
            raise
        except Exception as error:
            self.has_ended = True
            # TensorFlow's own errors pass, but not an OutOfRangeError of a transform: it would look like the end.
            if isinstance(error, tf.errors.OpError) and not isinstance(error, tf.errors.OutOfRangeError):
                raise
            if is_of_handler(error):
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
            _raise_with_cause(self._of, error)


def _count(iterator: EagerIterator | CountedIterator, dataset: TFDataset) -> None:
    iterator.used += 1
    dataset.note_use(iterator)


def _raise_with_cause(dataset: TFDataset, error: Exception) -> NoReturn:
    """Raise TensorFlow's error, from the error that reading raised if that is its cause."""
    cause = dataset.read_error
    if cause is not None and type(cause).__name__ in str(error):
        raise error from cause
    raise error


def _rest_of(iterator: EagerIterator | None) -> Iterator[Any]:
    if iterator is None:
        raise ConverterError("This iterator of make_tf_dataset was deleted. Keep a reference while TensorFlow uses it.")
    return iterator.rest()


def _unpacked(column: Any, batches: slice) -> Sequence[Any]:
    """Batch by batch, a component of a stretch of batches; it shares the stretch's memory if that is aligned."""
    if isinstance(column, tf.RaggedTensor):
        # Always of one batch.
        return [column.values]
    # On the CPU, as tf.data does, whatever device the loop asks for.
    with tf.device("CPU:0"):
        if batches.stop - batches.start == 1:
            return [_as_tensor(column[batches.start])]
        together = _as_tensor(column[batches])
        unpacked: Sequence[Any] = tf.raw_ops.Unpack(value=together, num=batches.stop - batches.start, axis=0)
        return unpacked


def _as_tensor(column: np.ndarray[Any, Any]) -> Any:
    """An array as a tensor on its memory, which tf.constant would copy."""
    parts = _find_eager_tensor()
    if parts is None:
        return tf.constant(column)
    eager_tensor, context = parts
    return eager_tensor(np.ascontiguousarray(column), context().device_name, None)
