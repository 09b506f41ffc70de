"""What Python says of threads at its end is told in the words of who reads."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from converter.exits import end_of_program


@pytest.mark.parametrize(
    ("text", "while_main_lives", "after"),
    [
        # Pools learn of the end before the main thread has ended.
        ("cannot schedule new futures after interpreter shutdown", True, True),
        ("can't start new thread at interpreter shutdown", True, True),
        ("cannot schedule new futures after shutdown", False, True),
        ("generator raised StopIteration", False, False),
    ],
)
def test_the_end_of_the_program_is_told(
    text: str, while_main_lives: bool, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_told() -> bool:
        return "main thread has ended" in str(end_of_program(RuntimeError(text)))

    class Ended:
        def is_alive(self) -> bool:
            return False

    assert is_told() == while_main_lives
    ended: Any = Ended()
    monkeypatch.setattr(threading, "main_thread", lambda: ended)
    assert is_told() == after
