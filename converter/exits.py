"""What is called when the interpreter ends, while threads still work."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from converter.errors import ConverterError


def register_before_thread_pools(close: Callable[[], None]) -> None:
    """Call `close` at the interpreter's end while thread pools still work.

    Reaches into: threading._register_atexit (CPython 3.11).
    Without it: `close` runs as an `atexit` hook, when remote stores cannot be asked: entries there wait for a sweep.
    """
    try:
        register = threading._register_atexit  # type: ignore[attr-defined]  # noqa: SLF001
    except AttributeError:
        register = atexit.register
    register(close)


def end_of_program(error: RuntimeError) -> ConverterError | None:
    """What to raise where Python starts no more threads, because the main thread has ended; None for other errors."""
    text = str(error)
    # A pool that has just seen Python's end speaks of its own.
    is_ending = "interpreter shutdown" in text or ("shutdown" in text and not threading.main_thread().is_alive())
    if not is_ending:
        return None
    # Python waits for the thread that reads, and starts no other for it.
    return ConverterError(
        "The program's main thread has ended, so nothing is read ahead any more. Let it wait for the thread that "
        "iterates, with thread.join()."
    )
