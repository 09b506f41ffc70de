"""A task's digest is of its rows in their order, not of the batches that they came in."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.portable.digests import add_rows, digest_of

KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int32": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "float32": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "bool": (pa.bool_(), st.booleans()),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us"), st.datetimes()),
    "text": (pa.string(), st.text(max_size=4)),
    "large text": (pa.large_string(), st.text(max_size=4)),
    "bytes": (pa.binary(), st.binary(max_size=4)),
    "lists": (
        pa.list_(pa.list_(pa.string())),
        st.lists(st.lists(st.none() | st.text(max_size=2), max_size=2), max_size=2),
    ),
}


def digest(batches: list[pa.Array]) -> str:
    sums: dict[str, int] = {}
    for batch in batches:
        add_rows(sums, "0", batch)
    return digest_of(sums)


@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_the_digest_does_not_depend_on_batches(kind: str, data: st.DataObject) -> None:
    arrow_type, values = KINDS[kind]
    rows = data.draw(st.lists(st.none() | values, min_size=1, max_size=20))
    whole = pa.array(rows, arrow_type)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    parts = [whole[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    assert digest(parts) == digest([whole])


@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_have_another_digest(kind: str, data: st.DataObject) -> None:
    arrow_type, values = KINDS[kind]
    lists = st.lists(st.none() | values, min_size=1, max_size=6)
    one, other = (pa.array(data.draw(lists), arrow_type) for _ in range(2))
    # Zeros of two signs are equal, and differ in their bytes.
    if one.to_pylist() != other.to_pylist():
        assert digest([one]) != digest([other])


def test_what_lies_below_a_null_does_not_count() -> None:
    validity = pa.array([1, None, 1]).buffers()[0]
    one, other = (
        pa.Array.from_buffers(pa.int32(), 3, [validity, pa.array(numbers, pa.int32()).buffers()[1]])
        for numbers in ([1, 2, 3], [1, 7, 3])
    )
    assert one.to_pylist() == other.to_pylist() == [1, None, 3]
    assert digest([one]) == digest([other])


def test_empty_batches_count_for_nothing() -> None:
    assert digest([pa.array([], pa.string()), pa.array(["a"]), pa.array([], pa.string())]) == digest([pa.array(["a"])])
