"""Python's function for TensorFlow, which answers within half a second: with an element of no rows if need be.

Whoever frees an iterator that reads ahead waits until TensorFlow's thread has left our function. That may be any thread
in which Python's garbage collector happens to run: also one that the function waits for, such as a reader's or that of
fsspec. Then both would wait for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import tensorflow as tf

from converter.garbage import Threads, is_collecting

_ANSWER_SECONDS = 0.5


def from_generator(generate: Callable[[], Iterator[Any]], signature: Any, kind: Any = tf.data.Dataset) -> Any:
    """`from_generator` of a class of datasets, with more elements that are to be left out: all zeros, of size 0.

    The first dimension of a spec, if it has one, must be open.
    """
    nothing = tf.nest.map_structure(_nothing_of, signature)
    return kind.from_generator(lambda: Prompt(generate(), nothing), output_signature=signature)


def _nothing_of(spec: Any) -> Any:
    """A value of no rows, or a zero where the spec leaves that open."""
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = spec.shape[spec.ragged_rank + 1 :]
        values = tf.zeros([0, *(size or 0 for size in inner)], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, [np.zeros(1, np.int64)] * spec.ragged_rank)
    sizes = () if spec.shape.rank is None else spec.shape
    return np.zeros([size or 0 for size in sizes], spec.dtype.as_numpy_dtype)


class Prompt:
    """An iterator whose elements a thread makes, one at a time, and `nothing` whenever that takes long."""

    def __init__(self, elements: Iterator[Any], nothing: Any) -> None:
        self._elements, self._nothing, self._pid = elements, nothing, os.getpid()
        self._threads = Threads(1, "converter-tensorflow")
        self._coming: Future[Any] | None = None

    def __iter__(self) -> Prompt:
        return self

    def __next__(self) -> Any:
        if self._pid != os.getpid():
            # The thread is the parent's; this raises.
            return next(self._elements)
        if self._coming is None:
            try:
                self._coming = self._threads.submit(next, self._elements)
            except RuntimeError:
                # Python's end has begun, and starts no other threads either: this raises, or is the end.
                return next(self._elements)
        wait((self._coming,), _ANSWER_SECONDS)
        if not self._coming.done():
            return self._nothing
        coming, self._coming = self._coming, None
        return coming.result()

    def __del__(self) -> None:
        # What the thread has begun it ends, and then it frees the elements.
        self._threads.shutdown(wait=self._pid == os.getpid() and not is_collecting(), cancel_futures=True)
