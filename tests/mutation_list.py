"""The mutations that tests/mutations.py tries: one broken line each, spread over all rooms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One text of one module that is replaced by another."""

    module: str
    """Its path below `converter/`."""

    claim: str
    """What is broken then, in a few words."""

    old: str
    """The text, which stands once in the module."""

    new: str

    tests: tuple[str, ...]
    """The files or folders whose tests are to notice, of either lane."""

    @property
    def label(self) -> str:
        return f"{self.module}: {self.claim}"

    def apply_to(self, root: Path, *, write: bool) -> None:
        """Replace the text in a tree; without `write` only check that it can be.

        Raises:
            ValueError: the text does not stand there exactly once.
        """
        path = root / "converter" / self.module
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.label}: {self.old!r} stands {text.count(self.old)} times in {path}, expected once.")
        if write:
            path.write_text(text.replace(self.old, self.new))
