"""The eager loop without tf.data's cost."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.eager import context
from tensorflow.python.framework.ops import EagerTensor

from converter.errors import ConverterError
from converter.frameworks.tensorflow.elements import pack_flat
from converter.loading.batches import Batch

if TYPE_CHECKING:
    from converter.frameworks.tensorflow.dataset import TFDataset


_MAX_ERRORS = 1000
_UNPACKED_BATCHES = 64
"""Batches of which there are tensors at once: of single rows a window has a hundred thousand. 41 columns were read at
6.2, 9.5, 12.4, 15.5, 15.5 and 16.5 M rows/s with 4, 8, 16, 32, 64 and 256."""


class UntilError:
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


class EagerIterator(OwnedIterator):  # type: ignore[misc]
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
        self._pack = pack_flat(dataset.pack({name: place for place, name in enumerate(dataset.names)}))
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


def _rest_of(iterator: EagerIterator | None) -> Iterator[Any]:
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
