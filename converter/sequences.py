"""What an element is if it is no single row: rows of one key that follow each other in time.

A selection holds the rows with which sequences begin, so a plan counts and permutes sequences as it does rows. The rows
of a sequence are numbered among the live rows of the dataset: one follows the other, except where a key is interrupted
and goes on elsewhere, which `Links` say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from converter.schema import Field
from converter.selection import Selection

Numbers = npt.NDArray[np.int64]

SEQUENCE_LENGTH = "__length"
"""The column that padded sequences add to every batch: how many of its rows a sequence has."""


def _none() -> Numbers:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """Where keys go on that are interrupted; both are numbers among the live rows, ascending by `last`."""

    last: Numbers = field(default_factory=_none)
    """The last row of a stretch of rows."""

    next: Numbers = field(default_factory=_none)
    """The first row of the stretch with which the key goes on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sequences:
    """How sequences are made of rows. `Manifest.selection` says which rows begin one."""

    length: int
    """Rows of each."""

    rows: Selection | None
    """The live rows that they are made of; None for all."""

    steps: Mapping[str, tuple[int, ...] | int] = field(default_factory=dict)
    """Which of a sequence's rows a column is taken from, a single one without an axis; all for columns that are not
    named."""

    is_padded: bool = False
    """Whether a sequence may have fewer rows; then zeros follow."""

    begins: Numbers | None = None
    """The live rows that do not go on from the one before them, ascending; None if no sequence reaches one."""

    links: Links = field(default_factory=Links)

    @property
    def digest(self) -> str:
        """Equal for the same sequences of the same rows."""
        content = hashlib.sha256(repr((self.length, self.is_padded)).encode())
        content.update(b"" if self.rows is None else self.rows.digest.encode())
        for numbers in (_none() if self.begins is None else self.begins, self.links.last, self.links.next):
            content.update(len(numbers).to_bytes(8, "little") + numbers.astype("<i8").tobytes())
        return content.hexdigest()[:32]

    def steps_of(self, name: str) -> tuple[int, ...]:
        """The rows of a sequence that a column is taken from."""
        steps = self.steps.get(name, tuple(range(self.length)))
        return (steps,) if isinstance(steps, int) else steps

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The dimensions that a column has before those of a row."""
        return () if isinstance(self.steps.get(name), int) else (len(self.steps_of(name)),)

    def field_of(self, column: Field) -> Field:
        """A column as batches have it. One whose rows differ in shape stays: it cannot be in a batch."""
        if column.shape is None:
            return column
        return replace(column, shape=(*self.shape_of(column.name), *column.shape))
