"""What Python's garbage collector frees: in whatever thread it runs, and in forked children."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_collected_before: list[bool] = []
"""Whether garbage was collected before each fork that is under way."""

_MOMENT_SECONDS = 1.0

_phases = ["stop"]
"""What the collector told last: "start" or "stop"."""


class Threads(ThreadPoolExecutor):
    """Threads that end with their `with` block, which waits for them, but not long if the garbage collector ends it.

    The collector runs in any thread: in one of these, which cannot wait for itself, or in one that they wait for. For
    the main thread they may wait only if the collector came while it held a lock: there they get a moment.
    """

    def __init__(self, most: int, name: str) -> None:
        started: list[threading.Thread] = []
        super().__init__(most, thread_name_prefix=name, initializer=lambda: started.append(threading.current_thread()))
        self._started = started
        watch_collector()

    def __exit__(self, *error: object) -> None:
        if not is_collecting():
            self.shutdown()
            return
        self.shutdown(wait=False)
        if threading.get_ident() == threading.main_thread().ident:
            end = time.monotonic() + _MOMENT_SECONDS
            for thread in self._started:
                thread.join(max(0.0, end - time.monotonic()))


@functools.cache
def watch_collector() -> None:
    """Note from now on when the collector runs."""
    gc.callbacks.append(_note)


def _note(phase: str, _: Any) -> None:
    _phases[0] = phase


def is_collecting() -> bool:
    """Whether the garbage collector runs, in this thread or in another one.

    In another one it may wait for this thread: TensorFlow frees an iterator in threads of its own.
    """
    return _phases[0] == "start"


@functools.cache
def keep_garbage_of_parents() -> None:
    """Let forked children never collect this process's garbage: some clients wait for threads that it alone has."""
    if hasattr(os, "register_at_fork"):
        # Off from before the fork: the hooks of other libraries run in the child before ours.
        os.register_at_fork(
            before=_stop_collecting, after_in_parent=_collect_again, after_in_child=_freeze_and_collect_again
        )


def _stop_collecting() -> None:
    _collected_before.append(gc.isenabled())
    gc.disable()


def _collect_again() -> None:
    if _collected_before.pop():
        gc.enable()


def _freeze_and_collect_again() -> None:
    """Keep what the parent has left, in a child.

    Reaches into: gc.freeze, for the whole process (CPython 3.10 to 3.13).
    Without it: a child that collects a parent's reader of hdfs-native, or iterator of tf.data, hangs.
    """
    gc.freeze()
    _collect_again()
