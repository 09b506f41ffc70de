"""Choices of row groups by an index that is stored beside the files: `rowgroup_selector=SingleIndexSelector(…)`."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class RowGroupSelectorBase(metaclass=ABCMeta):
    """A choice of row groups. Derive from it for one of your own."""

    @abstractmethod
    def get_index_names(self) -> list[str]:
        """The names of the indexes that the choice needs."""

    @abstractmethod
    def select_row_groups(self, index_dict: Mapping[str, Any]) -> set[int]:
        """The numbers of the chosen row groups, by indexes of these names."""


class SingleIndexSelector(RowGroupSelectorBase):
    """Row groups that hold at least one of some values.

    Args:
        index_name: the name that the index was built under.
        values_list: the values.
    """

    def __init__(self, index_name: str, values_list: Iterable[Any]) -> None:
        self._index_name = index_name
        self._values_to_select = values_list

    def get_index_names(self) -> list[str]:
        """The name of the index."""
        return [self._index_name]

    def select_row_groups(self, index_dict: Mapping[str, Any]) -> set[int]:
        """The numbers of the row groups that hold one of the values."""
        indexer = index_dict[self._index_name]
        return set().union(*[indexer.get_row_group_indexes(value) for value in self._values_to_select])


class _SeveralIndexesSelector(RowGroupSelectorBase):
    """A choice by the choices of other selectors."""

    def __init__(self, single_index_selectors: Sequence[RowGroupSelectorBase]) -> None:
        self._single_index_selectors = single_index_selectors

    def get_index_names(self) -> list[str]:
        """The names of all selectors' indexes."""
        return [name for selector in self._single_index_selectors for name in selector.get_index_names()]

    def _choices(self, index_dict: Mapping[str, Any]) -> list[set[int]]:
        return [set(selector.select_row_groups(index_dict)) for selector in self._single_index_selectors]


class IntersectIndexSelector(_SeveralIndexesSelector):
    """Row groups that all of some selectors choose.

    Args:
        single_index_selectors: the selectors, at least one.
    """

    def select_row_groups(self, index_dict: Mapping[str, Any]) -> set[int]:
        """The numbers of the row groups that each selector chooses."""
        choices = self._choices(index_dict)
        return choices[0].intersection(*choices)


class UnionIndexSelector(_SeveralIndexesSelector):
    """Row groups that at least one of some selectors chooses.

    Args:
        single_index_selectors: the selectors.
    """

    def select_row_groups(self, index_dict: Mapping[str, Any]) -> set[int]:
        """The numbers of the row groups that a selector chooses."""
        return set().union(*self._choices(index_dict))
