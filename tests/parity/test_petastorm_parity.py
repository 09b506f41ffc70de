"""Stores that real Petastorms wrote: `converter.petastorm` hands out what Petastorm 0.13.1 does, in every way to read.

Where Petastorm loses or garbles values, `MENDED` says what is handed out instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.petastorm_making import READ_BY, VERSIONS, expected, kept_in, unpack, url_of
from tests.parity.petastorm_reads import WAYS, read
from tests.parity.petastorm_stores import STORES, Package, nulls, nulls_of_times
from tests.parity.petastorm_values import as_json

pytestmark = pytest.mark.short

Known = dict[str, Any]

KEPT = [(version, name) for version in VERSIONS for name in STORES if (kept_in(version) / f"{name}.tar.xz").exists()]
CASES = [(version, name, way) for version, name in KEPT for way in WAYS[name]]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all kept stores."""
    root = tmp_path_factory.mktemp("petastorm")
    for version, name in KEPT:
        unpack(version, name, root)
    return root


@pytest.fixture(scope="module")
def package() -> Package:
    return Package("converter.petastorm")


# --- What is mended ---------------------------------------------------------------------------------------------------


def changed(known: Any, name: str, change: Callable[[Any, int], Any]) -> Any:
    """Rows or batches with one field's values changed; `change` also gets the number of the row or batch."""
    position = known["fields"].index(name)
    table = [list(row) for row in known["rows"]]
    for number, row in enumerate(table):
        row[position] = change(row[position], number)
    return {"fields": known["fields"], "rows": table}


def lists_of_text(known: Known, way: str) -> Any:
    """Petastorm makes one string of a list of strings."""

    def change(value: Any, number: int) -> Any:
        words = re.findall("'(.*?)'", next(iter(value.values())))
        return {"array": "|O", "shape": [len(words)], "values": [{"str": word} for word in words]}

    return changed(known[way], "words", change)


def lists_of_one(known: Known, way: str) -> Any:
    """Petastorm makes a number of a list that holds one."""

    def change(value: Any, number: int) -> Any:
        return value and {"array": "<f8", "shape": [1], "values": list(value.values())}

    return changed(lists_of_text(known, way), "some", change)


def nulls_of_text(is_null: list[bool]) -> Callable[[Known, str], Any]:
    """Petastorm makes the string `None` of a null in a batch."""

    def change(value: Any, number: int) -> Any:
        size = len(value["values"])
        flags = is_null[number * size : (number + 1) * size]
        cells = [None if flag else {"str": cell} for cell, flag in zip(value["values"], flags, strict=True)]
        return {**value, "array": "|O", "values": cells}

    return lambda known, way: changed(known[way], "some_text", change)


def nulls_of_a_store(known: Known, way: str) -> Any:
    """Petastorm also rounds whole numbers beside nulls in a batch."""
    longs = next(field.values for field in nulls() if field.name == "some_long")

    def change(value: Any, number: int) -> Any:
        size = len(value["values"])
        own = [None if each is None else int(each) for each in longs[number * size : (number + 1) * size]]
        if all(each is None or int(float(each)) == each for each in own):
            return value
        return {**value, "array": "|O", "values": [each if each is None else {"int": each} for each in own]}

    return changed(nulls_of_text(is_text_null())(known, way), "some_long", change)


def null_times(known: Known, way: str) -> Any:
    """Petastorm fails at a row without a time."""
    rows, times = known["rows without times"], known["batches"]
    values = times["rows"][0][times["fields"].index("some_time")]["values"]
    # Nanoseconds; the smallest of integers is no time.
    cells = [None if value == -(2**63) else {"numpy <M8[us]": value // 1000} for value in values]
    position = times["fields"].index("some_time")
    order = [*times["fields"][:position], *times["fields"][position + 1 :]]
    table = [[row[rows["fields"].index(name)] for name in order] for row in rows["rows"]]
    return {
        "fields": times["fields"],
        "rows": [[*row[:position], cell, *row[position:]] for row, cell in zip(table, cells, strict=True)],
    }


def null_times_of_a_store(known: Known, way: str) -> Any:
    counts, times = nulls_of_times()
    import numpy as np

    cells = [None if time is None else as_json(np.datetime64(time)) for time in times.values]
    return {
        "fields": [counts.name, times.name],
        "rows": [[as_json(count), cell] for count, cell in zip(counts.values, cells, strict=True)],
    }


def is_text_null() -> list[bool]:
    return [value is None for field in nulls() if field.name == "some_text" for value in field.values]


MENDED: dict[tuple[str, str], Callable[[Known, str], Any]] = {
    ("plain", "rows"): lists_of_text,
    ("plain, ragged", "rows"): lists_of_one,
    ("nulls", "batches"): nulls_of_a_store,
    ("plain, nulls", "batches"): nulls_of_text([row % 4 == 0 for row in range(12)]),
    ("plain, nulls", "batches, converted early"): nulls_of_text([row % 4 == 0 for row in range(12)]),
    ("plain, nulls", "rows"): null_times,
    ("nulls of times", "rows"): null_times_of_a_store,
    # Petastorm filters by the keys of folders only, and compares them as they are escaped.
    ("plain", "filters"): lambda known, way: known[way][:12],
    ("partitioned by a string", "filters of batches"): lambda known, way: [0, 4, 8, 2, 6, 10],
    # Petastorm makes floats of the integers that a predicate left.
    ("plain", "a function"): lambda known, way: [int(number) for number in known[way]],
    # Under Python 3 Petastorm fails at the index that it wrote under Python 2.
    ("old", "indexed"): lambda known, way: expected(READ_BY, "old")[way],
}


def unescaped(known: Any) -> Any:
    """Petastorm leaves the names of folders escaped; and bytes of numbers the wrong way round."""
    if isinstance(known, list):
        return [unescaped(item) for item in known]
    if not isinstance(known, dict):
        return known
    if known.get("numpy <U5") == "d%3De":
        return {"numpy <U3": "d=e"}
    if known.get("array") == "<U5" and set(known["values"]) == {"d%3De"}:
        return {**known, "array": "<U3", "values": ["d=e"] * len(known["values"])}
    if known.get("array", "").startswith(">"):
        return {**known, "array": f"<{known['array'][1:]}"}
    return {key: unescaped(item) for key, item in known.items()}


# --- Tests ------------------------------------------------------------------------------------------------------------


def difference(found: Any, wanted: Any, place: str = "") -> str:
    """Where two JSON values differ first, and how; nothing where they are equal."""
    if isinstance(wanted, dict) and isinstance(found, dict) and found.keys() == wanted.keys():
        pairs = [(key, found[key], wanted[key]) for key in wanted]
    elif isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        pairs = [(index, *pair) for index, pair in enumerate(zip(found, wanted, strict=True))]
    elif type(found) is type(wanted) and found == wanted:
        return ""
    else:
        return f"at {place or 'the top'}: {found!r:.300} instead of {wanted!r:.300}"
    return next(filter(None, (difference(one, other, f"{place}/{key}") for key, one, other in pairs)), "")


def outcome_difference(found: Any, wanted: Any) -> str:
    """How what was handed out differs from what is wanted; an error may be a subclass of the wanted one."""
    if isinstance(wanted, dict) and "error" in wanted:
        is_same = isinstance(found, dict) and wanted["error"][0] in found.get("error", ())
        return "" if is_same else f"{found!r:.300} instead of a {wanted['error'][0]}"
    return difference(found, wanted)


def wanted_of(version: str, name: str, way: str) -> Any:
    known = expected(version, name)
    mend = MENDED.get((name, way))
    return unescaped(mend(known, way) if mend else known[way])


@pytest.mark.parametrize(("version", "name", "way"), CASES)
def test_a_store_is_read_as_petastorm_reads_it(
    stores: Path, package: Package, version: str, name: str, way: str
) -> None:
    found = read(package, WAYS[name][way], url_of(stores / version / name))
    assert not outcome_difference(found, wanted_of(version, name, way))


def test_every_store_is_kept_and_was_read_in_every_way() -> None:
    assert [name for version, name in KEPT if version == READ_BY] == list(STORES)
    assert {version for version, _ in KEPT} == set(VERSIONS)
    for version, name in KEPT:
        assert expected(version, name).keys() == WAYS[name].keys(), (version, name)
