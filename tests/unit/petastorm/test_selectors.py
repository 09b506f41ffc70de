"""Selectors choose row groups by what indexes say of values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from converter.petastorm.selectors import IntersectIndexSelector, SingleIndexSelector, UnionIndexSelector

CITY, DAY = {"oslo": {0, 1}, "rome": {1, 2}}, {1: {1}, 2: {0, 2}}


def index_of(row_groups: dict[Any, set[int]]) -> Any:
    return SimpleNamespace(get_row_group_indexes=lambda value: row_groups.get(value, set()))


INDEXES = {"city": index_of(CITY), "day": index_of(DAY)}


def city(*values: str) -> SingleIndexSelector:
    return SingleIndexSelector("city", list(values))


def day(*values: int) -> SingleIndexSelector:
    return SingleIndexSelector("day", list(values))


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (city("oslo"), {0, 1}),
        (city("oslo", "rome"), {0, 1, 2}),
        (city("bern"), set()),
        (city(), set()),
        (IntersectIndexSelector([city("oslo"), day(1)]), {1}),
        (IntersectIndexSelector([city("oslo"), day(9)]), set()),
        (IntersectIndexSelector([city("oslo")]), {0, 1}),
        (UnionIndexSelector([city("rome"), day(2)]), {0, 1, 2}),
        (UnionIndexSelector([]), set()),
        (UnionIndexSelector([IntersectIndexSelector([city("oslo"), day(2)]), day(1)]), {0, 1}),
    ],
)
def test_a_selector_chooses_row_groups(selector: Any, expected: set[int]) -> None:
    assert selector.select_row_groups(INDEXES) == expected


def test_indexes_are_not_changed_by_a_choice() -> None:
    IntersectIndexSelector([city("oslo"), day(1)]).select_row_groups(INDEXES)
    assert INDEXES["city"].get_row_group_indexes("oslo") == {0, 1}


def test_a_selector_names_the_indexes_that_it_needs() -> None:
    assert city("oslo").get_index_names() == ["city"]
    nested = UnionIndexSelector([IntersectIndexSelector([city("oslo"), day(1)]), day(2)])
    assert nested.get_index_names() == ["city", "day", "day"]


def test_an_index_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError, match="city"):
        city("oslo").select_row_groups({})
