"""Every error and warning is on the page of the reference, and is a message that its reader can act on.

The rules hold for the package's own texts. `converter.petastorm` says what Petastorm said, because programs may look
for it.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from converter import messages as reference
from tests.call_graph import PACKAGE
from tests.documented_errors import PAGE, Message, messages, page


@cache
def whole() -> list[Message]:
    """The package's own messages, without the parts of others; read when a test asks, not when tests are collected."""
    return [each for each in messages() if not each.is_part and not each.module.startswith("converter.petastorm")]


ENDS_AS_A_SENTENCE = re.compile(r"(?:\.|‹(?:damaged in|explain missing|lines|native line|remedy)›)[)›]*$")
"""A full stop, or one of the values that are sentences themselves."""

MOST_SIGNS = 3 * 120
VALUE = "x" * 30
"""What stands for a value when a message is measured: the names and paths of most users are shorter."""

BANNED = {
    # Words for parts of the package that no user sees.
    "attempt", "attempts", "digest", "epoch plan", "holding", "leaf", "opcode", "span", "stamp", "stretch", "stretches",
    "thrift",
    # Words for a process or a value that make a reader look twice.
    "anybody", "nobody", "somebody", "somehow", "something", "whoever", "let go", "the other one",
    # Words that say nothing, or blame.
    "bad", "illegal", "invalid", "obviously", "oops", "please", "sorry",
}  # fmt: skip

SECRETS = {
    "account key",
    "conf",
    "credential",
    "environ",
    "options",
    "password",
    "sas token",
    "storage options",
    "token",
}
"""Values that are never part of a message; their names may be."""


def words_of(text: str) -> str:
    """A text without its values, and without code."""
    return re.sub(r"‹[^‹›]*›|\S*[=_(\[]\S*", " ", text).lower()


def length_of(text: str) -> int:
    """How long a message is, with its values; of several texts in one place the longest counts."""
    while values := re.findall(r"‹([^‹›]*)›", text):
        for value in values:
            text = text.replace(f"‹{value}›", max([*value.split(" / "), VALUE], key=len))
    return len(text)


def test_the_page_is_that_of_the_code() -> None:
    """If it is not: python -m tests.documented_errors."""
    assert PAGE.read_text() == page(), "run: python -m tests.documented_errors"


def test_the_reference_shows_the_page_with_every_text() -> None:
    import pdoc.docstrings

    shown = pdoc.docstrings.convert(reference.__doc__ or "", "google", Path(str(reference.__file__)))
    assert shown.count("\n| ") > 700
    assert all(f"### {message.kind}\n" in shown for message in messages() if not message.is_part)


@pytest.mark.parametrize(
    ("kind", "beginning"),
    [
        ("EmptyShardError", "‹num rows› rows cannot be divided among ‹count› shards: "),
        ("StateMismatchError", "The state is of another run: ‹differs›. "),
        ("ConverterWarning", "rank=‹rank› and num_ranks=‹num ranks› are not used without use_fixed_rank=True. "),
        ("MissingDependencyError", "Reading a Delta table needs deltalake: pip install "),
        ("NullValueError", "Column ‹name› holds ‹nulls held›, "),
        ("CacheNotConfiguredError", "No cache directory is configured, and Spark runs on "),
    ],
)
def test_the_page_has_what_is_raised_or_returned_or_warned(kind: str, beginning: str) -> None:
    assert any(message.kind == kind and message.text.startswith(beginning) for message in messages())


def test_a_message_ends_as_a_sentence() -> None:
    assert len(whole()) > 300
    assert [message.text for message in whole() if not ENDS_AS_A_SENTENCE.search(message.text)] == []


def test_a_message_fits_in_three_lines() -> None:
    assert [message.text for message in whole() if length_of(message.text) > MOST_SIGNS] == []


def test_no_message_uses_a_word_of_the_inside_or_one_that_says_nothing() -> None:
    used = [
        (word, message.text)
        for message in whole()
        for word in BANNED
        if re.search(rf"\b{word}\b", words_of(message.text))
    ]
    assert used == []


def test_no_message_holds_a_value_that_may_be_secret() -> None:
    shown = [
        message.text for message in messages() for value in re.findall(r"‹([^‹›]*)›", message.text) if value in SECRETS
    ]
    assert shown == []


def test_a_value_that_a_message_got_is_cut() -> None:
    """A DataFrame or a list of 10,000 names in the place of an option must not fill the screen."""
    uncut = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] == "petastorm":
            continue
        for text in ast.walk(ast.parse(path.read_text())):
            if isinstance(text, ast.JoinedStr):
                for before, value in zip(text.values, text.values[1:], strict=False):
                    if isinstance(before, ast.Constant) and isinstance(value, ast.FormattedValue):
                        is_whole = value.conversion == ord("r") and value.format_spec is None
                        if is_whole and str(before.value).endswith((" got ", ",got ")):
                            uncut.append(f"{path.name}: {ast.unparse(text)}")
    assert uncut == []
