"""The warning that a program still uses an old interface, with the native line that does the same."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

from converter.errors import ConverterWarning


class PetastormDeprecationWarning(ConverterWarning, DeprecationWarning):
    """Petastorm's interface was used. It works; the message has the native line that does the same."""


_lock = threading.Lock()
_has_warned = False


def warn_once(name: str, native: Callable[[], str], *, stacklevel: int) -> None:
    """Warn the first time in this process that an old name was used; `native` makes the line to write instead."""
    global _has_warned
    with _lock:
        if _has_warned:
            return
        _has_warned = True
    warnings.warn(
        f"{name} is Petastorm's interface. The native form is\n    {native()}",
        PetastormDeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def call(function: str, *arguments: object, **options: object) -> str:
    """A call as a line of Python, without the options that are None.

    >>> call("make_parquet_converter", "file:///data", columns=["x"], filters=None)
    "make_parquet_converter('file:///data', columns=['x'])"
    """
    given = [repr(argument) for argument in arguments]
    given += [f"{name}={value!r}" for name, value in options.items() if value is not None]
    return f"{function}({', '.join(given)})"
