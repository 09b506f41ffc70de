"""How results look: tables on a terminal, lines with tabs in a pipe, or JSON.

Names and values come from data: they are shown as text, never as markup, and signs that would steer a terminal are
spelled out.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


def as_text(value: Any) -> str:
    r"""A value on one line, without signs that steer a terminal.

    >>> print(as_text("a\x1b[31mb\nc"))
    a\x1b[31mb\nc
    """
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(value))


def as_size(num_bytes: float) -> str:
    """Bytes in the largest unit of which there is one.

    >>> as_size(512), as_size(51_234_567)
    ('512 B', '51.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000 or unit == "TB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"


def as_age(seconds: float) -> str:
    """A time span in the largest unit of which there are two.

    >>> as_age(4), as_age(150), as_age(90_000)
    ('4 s', '2 min', '25 h')
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def as_seconds(seconds: float) -> str:
    """Seconds to a tenth; of less than one to a thousandth.

    >>> as_seconds(0.0213), as_seconds(1234.56)
    ('0.021 s', '1,234.6 s')
    """
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:,.1f} s"


def is_terminal() -> bool:
    """Whether tables are shown, not lines for another program."""
    return Console().is_terminal


def show_json(value: Any) -> None:
    """One JSON document on stdout. Numbers that JSON does not have are texts: `"nan"`, `"inf"` and `"-inf"`."""
    print(json.dumps(_with_finite(value), indent=2, default=str))


def _with_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def show_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], *, right: Sequence[int] = ()) -> None:
    """A table on a terminal; in a pipe a line for each row, with tabs, and no heading.

    On a terminal columns without a value are left out. If it is too narrow for a table, each value has its own line.

    Args:
        headings: of the columns.
        rows: their values.
        right: the numbers of columns that stand at the right.
    """
    console = Console()
    if not console.is_terminal:
        for row in rows:
            print("\t".join(map(as_text, row)))
        return
    used = [number for number in range(len(headings)) if any(row[number] != "" for row in rows)]
    # The headings of `head` are names of columns.
    headings = [as_text(heading) for heading in headings]
    headings, right = [headings[number] for number in used], [used.index(number) for number in right if number in used]
    rows = [[row[number] for number in used] for row in rows]
    table = Table(header_style="" if console.no_color else "bold")
    for number, heading in enumerate(headings):
        table.add_column(Text(heading), justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(as_text(value)) for value in row))
    if Measurement.get(console, console.options.update(max_width=10_000), table).minimum <= console.width:
        console.print(table)
        return
    for row in rows:
        for heading, value in zip(headings, row, strict=True):
            if value != "":
                console.print(Text(f"{heading}: {as_text(value)}"))
        console.print()


def show_facts(facts: Sequence[tuple[str, Any]]) -> None:
    """Names and values, a line each."""
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:{width}}  {as_text(value)}")


def complain(message: object) -> None:
    """One line on stderr."""
    print(f"converter: {as_text(message)}", file=sys.stderr)


def survive_other_encodings() -> None:
    """Spell out signs that this terminal's encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
