"""What all pictures need: matplotlib itself, Axes to draw on, and texts that it can show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from converter.dataset import DatasetConverter
from converter.errors import MissingDependencyError
from converter.manifest import Manifest
from converter.markup import shortened
from converter.mixed import MixedConverter
from converter.storage.directory import Storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLAIN: dict[str, Any] = {"parse_math": False, "usetex": False}
"""For texts that come from data: dollars and backslashes are signs of them, not formulas."""

_WITHOUT_A_FORM = dict.fromkeys(map(ord, "\u200c\u200d\ufe0e\ufe0f"))


def pyplot() -> Any:
    """The module `matplotlib.pyplot`.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependencyError(
            "converter.plot needs matplotlib, which is not installed: pip install 'spark-tensor-converter[plot]'."
        ) from error
    return plt


def axes_of(ax: Axes | None, width: float, height: float) -> Axes:
    """The Axes to draw on: the given ones, or those of a new figure of so many inches.

    Raises:
        TypeError: `ax` is something else.
    """
    if ax is None:
        made: Axes = pyplot().subplots(figsize=(width, height), layout="constrained")[1]
        return made
    if not hasattr(ax, "set_title"):
        raise TypeError(f"ax must be matplotlib Axes or None, got {type(ax).__name__}.")
    return ax


def files_of(converter: Any) -> tuple[Storage, Manifest]:
    """Where an open converter's rows lie, and how.

    Raises:
        CacheError: it was deleted.
        TypeError: it is no converter.
        ValueError: it is a mixture.
    """
    # Not among the methods that users see.
    open_files: Callable[[], tuple[Storage, Manifest]] | None = getattr(converter, "_opened_files", None)
    if not isinstance(converter, DatasetConverter) or open_files is None:
        raise TypeError(f"Expected a converter, as make_spark_converter returns it, got {type(converter).__name__}.")
    is_mixture = isinstance(converter, MixedConverter)
    if is_mixture:
        raise ValueError("This is a mixture, whose rows lie in several places: plot the converters that were mixed.")
    return open_files()


def legible(value: object, most: int) -> str:
    """A value as a line of at most `most` signs, with `?` for those that the fonts do not have.

    matplotlib warns of each sign that it cannot draw.
    """
    from matplotlib import font_manager, rcParams

    fonts = [font_manager.findfont(font_manager.FontProperties(family=[family])) for family in rcParams["font.family"]]
    shown = shortened(value, most).translate(_WITHOUT_A_FORM)
    return "".join(sign if any(ord(sign) in _signs_of(font) for font in fonts) else "?" for sign in shown)


@functools.lru_cache(maxsize=16)
def _signs_of(font: str) -> frozenset[int]:
    """The code points that a font has."""
    from matplotlib import font_manager

    return frozenset(font_manager.get_font(font).get_charmap())


def say_instead(ax: Axes, message: str) -> None:
    """Show a text where there is nothing to draw."""
    ax.set_axis_off()
    ax.text(0.5, 0.5, message, ha="center", va="center", wrap=True, transform=ax.transAxes, fontsize="small", **PLAIN)
