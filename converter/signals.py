"""What a signal handler raises: it comes wherever the main thread is, and is no error of what runs there."""

from __future__ import annotations

import functools
import signal
import traceback
from typing import Any


def is_of_handler(error: BaseException) -> bool:
    """Whether a function that handles a signal in this process has raised it, or is in its traceback."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {_code_of(handler) for handler in handlers if callable(handler)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _code_of(handler: Any) -> Any:
    """The code of a function, a method, or an object that can be called; None for those that C has."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None)
    return getattr(type(handler).__call__, "__code__", None) if code is None else code
