"""Where this repository lies, and the code that its README shows."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def readme_block(text: str) -> str:
    """The one code block of the README that contains this text."""
    blocks = re.findall(
        r"^```(?:python)?\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (block,) = (block for block in blocks if text in block)
    return block
