"""Tables and small charts as plain HTML and SVG, for notebooks: no script, no style sheet, nothing from elsewhere.

Names and values come from data, so `text` is the one way by which they become HTML. Lines and bars have the colour of
the text around them, so that they are seen on light and on dark pages.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence

MAX_NAME_SIGNS = 80
"""Signs of a column's name that are shown."""

MAX_TEXT_SIGNS = 1000
"""Signs of any other text."""

_WIDTH, _HEIGHT = 96, 18
"""Pixels of a chart."""

_JOINERS = "\u200c\u200d"
"""Signs without a form of their own that are parts of words and of emoji."""

_FROM_THE_RIGHT = frozenset({"R", "AL", "AN"})
"""Classes of signs that are written from right to left."""


def printable(value: object) -> str:
    r"""A value on one line; signs that would steer what shows it are spelled out.

    >>> print(printable("a\nb\u202ec"))
    a\nb\u202ec
    """
    return "".join(sign if sign.isprintable() or sign in _JOINERS else repr(sign)[1:-1] for sign in str(value))


def shortened(value: object, most: int) -> str:
    """A value as one line of at most `most` signs.

    >>> shortened("departure", 6)
    'depar…'
    """
    # Cut first: a name may have a million signs.
    shown = printable(str(value)[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def text(value: object) -> str:
    """A value as HTML. What is written from right to left does not turn the text beside it around.

    >>> text("<b> & c"), text("שלום")
    ('&lt;b&gt; &amp; c', '<bdi>שלום</bdi>')
    """
    shown = printable(value)
    escaped = html.escape(shown)
    is_isolated = not shown.isascii() and not _FROM_THE_RIGHT.isdisjoint(map(unicodedata.bidirectional, shown))
    return f"<bdi>{escaped}</bdi>" if is_isolated else escaped


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts and cells that are HTML already.

    >>> table(["name"], [["x"]])
    '<table><tr><th>name</th></tr><tr><td>x</td></tr></table>'
    """
    lines = [_line("th", headings), *(_line("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """Names and values, a line each; lines without a value are left out.

    >>> facts([("rows", 5), ("epochs", None)])
    '<table><tr><th>rows</th><td>5</td></tr></table>'
    """
    cells = [
        (text(shortened(name, MAX_NAME_SIGNS)), text(shortened(value, MAX_TEXT_SIGNS)))
        for name, value in rows
        if value is not None
    ]
    return f"<table>{''.join(f'<tr><th>{name}</th><td>{value}</td></tr>' for name, value in cells)}</table>"


def bars(counts: Sequence[int], label: str) -> str:
    """Counts as an SVG chart, which shows `label` where the pointer rests.

    >>> bars([1, 2], "two")[:46]
    '<svg width="96" height="18" role="img"><title>'
    """
    width = _WIDTH // len(counts)
    most = max(*counts, 1)
    # A single row among a million is seen, too.
    heights = [-(-_HEIGHT * count // most) for count in counts]
    drawn = "".join(
        f"M{number * width} {_HEIGHT}v-{height}h{width - 1}v{height}z"
        for number, height in enumerate(heights)
        if height
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img"><title>{html.escape(printable(label))}</title>'
        f'<path d="{drawn}" fill="currentColor" fill-opacity="0.6"/></svg>'
    )


def _line(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"
