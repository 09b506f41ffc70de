"""Modules and classes stay small enough to be read at once, and every room says its law."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import converter
from tests.mutation_list import MUTATIONS

PACKAGE = Path(converter.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULE_LINES, MAX_CLASS_LINES = 500, 300
REASON = ", because"
"""What a longer one says in its docstring."""


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_is_short_or_says_why_not(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree) or ""
    assert docstring
    assert len(text.splitlines()) <= MAX_MODULE_LINES or REASON in docstring
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
            is_short = node.end_lineno - node.lineno < MAX_CLASS_LINES
            assert is_short or REASON in docstring or REASON in (ast.get_docstring(node) or ""), node.name


def test_most_modules_are_read_in_one_go() -> None:
    sizes = [len(path.read_text().splitlines()) for path in MODULES]
    assert sorted(sizes)[len(sizes) * 2 // 3] <= 250


def test_each_mutation_breaks_a_line_that_is_there() -> None:
    for mutation in MUTATIONS:
        mutation.apply_to(PACKAGE.parent, write=False)
        assert [test for test in mutation.tests if not (PACKAGE.parent / test).exists()] == [], mutation.label
