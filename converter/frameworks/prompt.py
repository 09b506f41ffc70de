"""Python's function for TensorFlow, which answers within half a second: with an element of no rows if need be.

Whoever frees an iterator that reads ahead waits until TensorFlow's thread has left our function. That may be any thread
in which Python's garbage collector happens to run: also one that the function waits for, such as a reader's or that of
fsspec. Then both would wait for ever.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import tensorflow as tf

from converter.exits import register_before_thread_pools
from converter.garbage import may_wait, watch_collector

_ANSWER_SECONDS = 0.5
"""How long TensorFlow waits for an answer (a guess)."""

_IDLE_SECONDS = 0.02
"""How long a thread waits for the next question: longer than most steps, and short enough for who looks for threads."""


def from_generator(generate: Callable[[], Iterator[Any]], signature: Any, kind: Any = tf.data.Dataset) -> Any:
    """`from_generator` of a class of datasets, with more elements that are to be left out: all zeros, of size 0.

    The first dimension of a spec, if it has one, must be open.
    """
    watch_collector()

    def prompt() -> Prompt:
        # Not before: a graph may be built now, whose tensors are nobody's later.
        return Prompt(generate(), tf.nest.map_structure(_nothing_of, signature))

    return kind.from_generator(prompt, output_signature=signature)


def _eagerly() -> contextlib.AbstractContextManager[None]:
    """Where TensorFlow's functions make values, as in the functions that it calls itself; threads begin without.

    Reaches into: tf.__internal__.eager_context.eager_mode (TensorFlow 2.21).
    Without it: ragged columns fail in programs that have called tf.compat.v1.disable_eager_execution().
    """
    internal = getattr(tf, "__internal__", None)
    eager_mode = getattr(getattr(internal, "eager_context", None), "eager_mode", contextlib.nullcontext)
    mode: contextlib.AbstractContextManager[None] = eager_mode()
    return mode


def _nothing_of(spec: Any) -> Any:
    """A value of no rows, or a zero where the spec leaves that open."""
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = spec.shape[spec.ragged_rank + 1 :]
        values = tf.zeros([0, *(size or 0 for size in inner)], spec.dtype)
        return tf.RaggedTensor.from_nested_row_splits(values, [np.zeros(1, np.int64)] * spec.ragged_rank)
    sizes = () if spec.shape.rank is None else spec.shape
    # NumPy's zero of TensorFlow's texts is a number.
    return np.full([size or 0 for size in sizes], b"" if spec.dtype == tf.string else 0, spec.dtype.as_numpy_dtype)


class Prompt:
    """An iterator whose elements a thread makes, one at a time, and `nothing` whenever that takes long."""

    def __init__(self, elements: Iterator[Any], nothing: Any) -> None:
        self._elements, self._nothing, self._pid = elements, nothing, os.getpid()
        self._maker = _Maker(elements)
        self._coming: Future[Any] | None = None

    def __iter__(self) -> Prompt:
        return self

    def __next__(self) -> Any:
        if self._pid != os.getpid():
            # The thread is the parent's; this raises.
            return next(self._elements)
        if self._coming is None:
            try:
                self._coming = self._maker.ask()
            except RuntimeError:
                # Python's end has begun, and starts no other threads either: this raises, or is the end.
                return next(self._elements)
        wait((self._coming,), _ANSWER_SECONDS)
        if not self._coming.done():
            return self._nothing
        coming, self._coming = self._coming, None
        return coming.result()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self._maker.end()


class _Maker:
    """A thread that takes elements of an iterator; it ends soon if nobody asks, for its user may never come back."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements: Iterator[Any] | None = elements
        self._asked: SimpleQueue[Future[Any] | None] = SimpleQueue()
        # The collector may end this while the lock is held.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def ask(self) -> Future[Any]:
        """The next element. Raises RuntimeError if no thread can be started."""
        coming: Future[Any] = Future()
        with self._lock:
            if self._thread is None:
                # Not a daemon, as threads of TensorFlow's are: the interpreter's end waits for it.
                thread = threading.Thread(target=self._make, name="converter-tensorflow", daemon=False)
                _start(thread)
                self._thread = thread
            self._asked.put(coming)
        return coming

    def _make(self) -> None:
        with _eagerly():
            self._answer()

    def _answer(self) -> None:
        while True:
            try:
                coming = self._asked.get(timeout=_IDLE_SECONDS)
            except Empty:
                with self._lock:
                    if self._asked.empty():
                        self._thread = None
                        return
                continue
            if coming is None:
                # Freed here: that may take until a request is given up.
                self._elements = None
                return
            assert self._elements is not None
            try:
                coming.set_result(next(self._elements))
            except BaseException as error:  # noqa: BLE001 (raised by `result`)
                coming.set_exception(error)
            del coming

    def end(self) -> None:
        """Free the elements, and wait for the thread unless that may wait for this one."""
        with self._lock:
            thread = self._thread
            self._asked.put(None)
        if thread is not None and may_wait() and not sys.is_finalizing():
            thread.join()


_starting = threading.Lock()
_has_end_begun = False


def _start(thread: threading.Thread) -> None:
    """Start a thread. Raises RuntimeError once the interpreter's end has begun: who started it would wait for ever."""
    with _starting:
        if _has_end_begun:
            raise RuntimeError("The interpreter ends, so no thread is started.")
        thread.start()


def _start_no_more() -> None:
    global _has_end_begun
    with _starting:
        _has_end_begun = True


def _renew_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _starting
    _starting = threading.Lock()


register_before_thread_pools(_start_no_more)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
