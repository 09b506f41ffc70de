"""A condition such as `age > 20`, written in a shell, as a filter of `where`."""

from __future__ import annotations

import ast
import contextlib
import re
from typing import Any

_CONDITION = re.compile(
    r"\s*(?P<name>.+?)\s*(?P<sign>==|!=|<=|>=|=|<|>|\bnot in\b|\bin\b)\s*(?P<value>.+?)\s*", re.DOTALL
)


def parse_filter(text: str) -> tuple[str, str, Any]:
    """The column, the sign and the value of one condition. A value that is no Python literal is a text.

    >>> parse_filter("age > 20"), parse_filter("city = Oslo"), parse_filter("kind in ['a', 'b']")
    (('age', '>', 20), ('city', '=', 'Oslo'), ('kind', 'in', ['a', 'b']))

    Raises:
        ValueError: there is no sign in it.
    """
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} is no condition. Write a column, one of = != < <= > >= in, and a value: 'age > 20'."
        )
    value: Any = found["value"]
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        value = ast.literal_eval(value)
    return found["name"], found["sign"], value
