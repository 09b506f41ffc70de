"""Which parts of a file are asked for: all that is wanted, in few requests, and little else."""

from __future__ import annotations

import io
import itertools

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.storage.ranges import MAX_REQUEST_BYTES, Fetched, PartialFile, merge_ranges

RANGES = st.lists(
    st.tuples(st.integers(0, 1 << 26), st.integers(1, 1 << 22)).map(lambda one: (one[0], one[0] + one[1])),
    min_size=1,
    max_size=30,
)


@given(RANGES)
def test_all_that_is_wanted_is_asked_for_once(wanted: list[tuple[int, int]]) -> None:
    asked = merge_ranges(wanted)
    assert asked == sorted(asked)
    for (_, end), (start, _) in itertools.pairwise(asked):
        assert end <= start
    assert all(0 < end - start <= MAX_REQUEST_BYTES * 5 // 4 for start, end in asked)
    for start, end in wanted:
        covered = sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in asked)
        assert covered == end - start


@given(RANGES)
def test_little_is_asked_for_that_nobody_wants(wanted: list[tuple[int, int]]) -> None:
    num_bytes = sum(end - start for start, end in merge_ranges(wanted))
    needed = 0
    last = -1
    for start, end in sorted(wanted):
        needed += max(0, end - max(start, last))
        last = max(last, end)
    # A twenty-fifth, or tiny gaps.
    assert num_bytes - needed <= max(0.04 * needed, 0) + len(wanted) * (64 << 10)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([(0, 10), (10, 20)], [(0, 20)]),
        ([(10, 20), (0, 10)], [(0, 20)]),
        ([(0, 100), (50, 60)], [(0, 100)]),
        # A gap that is nothing beside what is wanted.
        ([(0, 1_000_000), (1_010_000, 2_000_000)], [(0, 2_000_000)]),
        # One that is not.
        ([(0, 1000), (1_000_000, 1_001_000)], [(0, 1000), (1_000_000, 1_001_000)]),
        # A thousand narrow columns, every other one wanted: two requests, not five hundred.
        ([(2000 * k, 2000 * k + 1000) for k in range(500)], None),
        # A row group is a little larger than it was to be.
        ([(0, 9 << 20)], [(0, 9 << 20)]),
        ([(0, 24 << 20)], [(0, 8 << 20), (8 << 20, 16 << 20), (16 << 20, 24 << 20)]),
    ],
)
def test_what_is_asked_for(wanted: list[tuple[int, int]], expected: list[tuple[int, int]] | None) -> None:
    found = merge_ranges(wanted)
    if expected is None:
        assert len(found) <= 2
    else:
        assert found == expected


def test_gaps_are_fetched_until_they_are_a_twenty_fifth_of_what_is_wanted() -> None:
    wanted = [(1_100_000 * number, 1_100_000 * number + 1_000_000) for number in range(10)]
    num_bytes = sum(end - start for start, end in merge_ranges(wanted))
    assert num_bytes == 10 * 1_000_000 + 4 * 100_000


def test_fetched_parts_are_sliced_without_a_copy_where_one_request_brought_them() -> None:
    data = bytes(range(100))
    fetched = Fetched([(10, data[:50]), (60, data[50:90]), (200, b"xyz")])
    assert fetched.slice(20, 30).to_pybytes() == data[10:20]
    assert fetched.slice(50, 70).to_pybytes() == data[40:60]
    assert fetched.slice(200, 203).to_pybytes() == b"xyz"
    for start, end in ((0, 5), (95, 105), (203, 204), (199, 201)):
        with pytest.raises(ValueError, match="is not there"):
            fetched.slice(start, end)


def test_a_partial_file_fetches_what_it_lacks_and_the_footer_once() -> None:
    table = pa.table({"a": list(range(20_000)), "b": [f"text {k}" for k in range(20_000)]})
    written = io.BytesIO()
    pq.write_table(table, written, compression="none")
    whole = written.getvalue()
    asked: list[tuple[int, int]] = []

    def fetch(start: int, end: int) -> bytes:
        asked.append((start, end))
        return whole[start:end]

    parquet = pq.ParquetFile(pa.PythonFile(PartialFile(len(whole), fetch), mode="r"))
    assert parquet.metadata.num_rows == 20_000
    assert asked == [(len(whole) - (64 << 10), len(whole))]
    assert parquet.read().equals(table)
