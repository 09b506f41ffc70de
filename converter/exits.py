"""What is called when the interpreter ends, while threads still work."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


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
