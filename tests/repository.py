"""Where this repository lies, and the code that its README shows."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def readme_block(text: str) -> str:
    """The one block of the README's code that has this text in it."""
    blocks = re.findall(
        r"^```(?:python)?\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (found,) = [block for block in blocks if text in block]
    return found
