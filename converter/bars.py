"""Lines that change in place, in a terminal or a notebook, while something takes long."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from converter.errors import MissingDependencyError


def is_in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


def is_in_terminal() -> bool:
    """Whether somebody may see at once what is printed to stderr, which a service may not have."""
    return _has_stderr() and sys.stderr.isatty()


def _has_stderr() -> bool:
    return sys.stderr is not None and not getattr(sys.stderr, "closed", False)


def is_seen(wanted: bool | None) -> bool:
    """Whether a bar is shown: with None, only if somebody may look at it and tqdm is installed."""
    is_shown = (is_in_notebook() or is_in_terminal()) if wanted is None else wanted
    has_place = is_in_notebook() or _has_stderr()
    return is_shown and has_place and importlib.util.find_spec("tqdm") is not None


def check_bar(wanted: bool | None, argument: str, extra: str) -> None:
    """Raise MissingDependencyError if a bar is asked for with `argument`, and tqdm is not installed."""
    if wanted and importlib.util.find_spec("tqdm") is None:
        raise MissingDependencyError(
            f"{argument}=True needs tqdm, which is not installed: pip install tqdm, or "
            f"'spark-tensor-converter[{extra}]'."
        )


class NotebookOutput:
    """One output of a cell, changed in place: tqdm without ipywidgets would add an output for each change.

    It is a file, as tqdm wants one.
    """

    def __init__(self) -> None:
        self._handle: Any = None

    def write(self, text: str) -> None:
        """Show this text instead of the one before; spaces, which would erase a line, change nothing."""
        text = text.strip("\r\n ")
        if not text:
            return
        from IPython import display as untyped_display

        display: Any = untyped_display
        if self._handle is None:
            self._handle = display.display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)

    @property
    def is_begun(self) -> bool:
        """Whether anything was shown."""
        return self._handle is not None

    def flush(self) -> None:
        """Do nothing: what is written is shown."""
