"""What is freed in a thread that must not wait: where the garbage collector runs, in fsspec's, in forked children."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
from typing import Any

_forking: set[int] = set()
"""Threads that fork just now: several may at once."""

_turned_off: list[None] = []
"""Whether one of them has turned the collector off, which was on."""

_phases: dict[str, Any] = {"stop": None}
"""What the collector has told, "start" and "stop", the last one last."""


@functools.cache
def watch_collector() -> None:
    """Note from now on when the collector runs."""
    # Both together move a phase to the end. No functions of Python's: in one a signal may be handled, and the collector
    # drops what its handler raises, such as the interrupt of a Ctrl-C.
    # At once: with the first alone, a collection would leave no phase.
    gc.callbacks.extend((_phases.pop, _phases.__setitem__))
    if hasattr(os, "register_at_fork"):
        # Its end in another thread of the parent is nobody's in a child.
        os.register_at_fork(after_in_child=functools.partial(_phases.pop, "start", None))


def may_wait() -> bool:
    """Whether this thread may wait for others of ours: not while the collector runs, and never if it is fsspec's.

    If the collector runs in another thread, that may wait for this one: TensorFlow frees an iterator in threads of its
    own. And what reads from a web server or a store waits for fsspec's thread.

    Reaches into: fsspec.asyn.iothread (fsspec 2025.2 to 2026.9).
    Without it: a reader whose last reference fsspec's thread drops stands still until its requests are given up.
    """
    if list(_phases)[-1:] == ["start"]:
        return False
    threads = getattr(sys.modules.get("fsspec.asyn"), "iothread", ())
    return threading.current_thread() not in threads


@functools.cache
def keep_garbage_of_parents() -> None:
    """Let forked children never collect this process's garbage: some clients wait for threads that it alone has."""
    if hasattr(os, "register_at_fork"):
        # Off from before the fork: the hooks of other libraries run in the child before ours.
        os.register_at_fork(
            before=_stop_collecting, after_in_parent=_collect_again, after_in_child=_freeze_and_collect_again
        )
        # Once more: the interrupt of a Ctrl-C that came while the process was copied ends the first one at its start.
        os.register_at_fork(after_in_parent=_collect_again)


def _stop_collecting() -> None:
    _forking.add(threading.get_ident())
    # Whoever turns it off notes so. What a thread finds off may be what another turned off, and is about to turn on.
    if gc.isenabled():
        _turned_off.append(None)
        gc.disable()


def _collect_again() -> None:
    _forking.discard(threading.get_ident())
    # Threads may fork at once; until the last one has, no garbage is collected.
    if not _forking and _turned_off:
        _turned_off.clear()
        gc.enable()


def _freeze_and_collect_again() -> None:
    """Keep what the parent has left, in a child.

    Reaches into: gc.freeze, for the whole process (CPython 3.10 to 3.13).
    Without it: a child that collects a parent's reader of hdfs-native, or iterator of tf.data, hangs.
    """
    gc.freeze()
    _forking.clear()
    if _turned_off:
        _turned_off.clear()
        gc.enable()
