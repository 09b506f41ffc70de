"""What is written beside the files of a store: its schema, its counts of row groups, and indexes of values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


class RowGroupIndexerBase(ABC):
    """What an index of row groups can do: it knows which of them hold a value."""

    @abstractmethod
    def __add__(self, other: Any) -> Any:
        """This index, with what another one of the same column holds."""

    @property
    @abstractmethod
    def index_name(self) -> str:
        """The name by which selectors ask for it."""

    @property
    @abstractmethod
    def column_names(self) -> list[str]:
        """The columns that it is built from."""

    @property
    @abstractmethod
    def indexed_values(self) -> list[Any]:
        """The values that it knows."""

    @abstractmethod
    def get_row_group_indexes(self, value_key: Any) -> set[int]:
        """The numbers of the row groups that hold a value; empty if none does."""

    @abstractmethod
    def build_index(self, decoded_rows: Sequence[Mapping[str, Any]], piece_index: int) -> Any:
        """Add the rows of a row group, each a dict of decoded values."""
