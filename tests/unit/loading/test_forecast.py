"""A plan tells what its loader then does, and costs nothing whatever the size of the data."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import DatasetConverter
from converter.dataset import borrow_files
from converter.errors import CacheError, EmptyShardError, NullValueError
from converter.loading.forecast import LoaderPlan
from converter.manifest import Manifest
from converter.plan import Piece
from converter.portable import moments
from converter.reading.windows import _WindowReader
from converter.schema import Field, Schema
from converter.statistics import ColumnStatistics
from converter.storage.opening import open_storage
from tests.columns import ID, TENSORS, Column
from tests.entries import write_converter
from tests.properties import examples

NUM_ROWS = 101
X = Column(name="x", dtype="int32")
VECTOR = TENSORS[0]


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Two files of uneven row groups, numbers alone."""
    partitions = [[range(60)], [range(60, NUM_ROWS)]]
    with write_converter(tmp_path_factory.mktemp("rows"), (ID, X, VECTOR), partitions, row_group_bytes=170) as found:
        assert found._manifest.num_row_groups > 12
        yield found


@pytest.fixture(scope="module")
def parts(converter: DatasetConverter) -> dict[str, DatasetConverter]:
    return {
        "all": converter,
        "where": converter.where([("id", ">=", 10), ("id", "<", 71)]),
        "split": converter.split({"train": 0.7, "val": 0.3}, seed=3)["train"],
    }


class Looked:
    """What a rank's loader did in one epoch: its batches, and the windows and row groups that were read for them."""

    def __init__(self, converter: DatasetConverter, **arguments: Any) -> None:
        pieces: list[Piece] = []
        read = _WindowReader.read

        def counted(reader: Any, item: Any) -> Any:
            pieces.append(item[0])
            return read(reader, item)

        with (
            mock.patch.object(_WindowReader, "read", counted),
            converter.make_batch_reader(**arguments, with_row_index="the row") as reader,
        ):
            batches = list(reader)
            self.length = len(reader)
        self.steps = len(batches)
        self.rows = [row for batch in batches for row in batch["the row"].tolist()]
        self.padded = sum(int((~batch["__valid"]).sum()) for batch in batches if "__valid" in batch)
        self.windows = {piece.window for piece in pieces}
        groups = converter._manifest.row_group_rows
        # A first window that is read in two parts counts once.
        row_groups = {piece.window: piece.row_groups for piece in pieces}
        self.rows_decoded = sum(int(groups[one].sum()) for one in row_groups.values())


def compare(converter: DatasetConverter, count: int, **arguments: Any) -> None:
    """Every rank's plan with what its loader does."""
    ranks: list[dict[str, Any]] = [{"cur_shard": index, "shard_count": count} for index in range(count)]
    plans = [converter.plan(**arguments, **rank) for rank in ranks]
    found = [Looked(converter, **arguments, **rank) for rank in ranks]
    for plan, looked in zip(plans, found, strict=True):
        assert plan.steps_per_epoch == looked.steps == looked.length
        assert plan.num_rows == len(looked.rows)
        assert plan.padded_rows == looked.padded
    # Dropped are the rows that nobody reads, and each rank's plan says how many.
    read = {row for looked in found for row in looked.rows}
    assert {plan.dropped_rows for plan in plans} == {len(converter) - len(read)}
    assert [plan.num_windows for plan in plans] == [len(looked.windows) for looked in found]


ARGUMENTS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 40) | st.just(1000),
        "uneven": st.sampled_from(["drop", "pad", "keep"]),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 5),
        "shuffle_window_rows": st.sampled_from([1, 20, 55, 1000, "all", None]),
    }
)


@examples(40)
@given(part=st.sampled_from(["all", "where", "split"]), count=st.integers(1, 5), arguments=ARGUMENTS)
def test_a_plan_tells_what_its_loader_does(
    parts: dict[str, DatasetConverter], part: str, count: int, arguments: dict[str, Any]
) -> None:
    compare(parts[part], count, **arguments)


@examples(40)
@given(part=st.sampled_from(["all", "where", "split"]), count=st.integers(1, 5), arguments=ARGUMENTS)
def test_a_plan_tells_what_its_loader_does_where_last_batches_are_dropped(
    parts: dict[str, DatasetConverter], part: str, count: int, arguments: dict[str, Any]
) -> None:
    compare_dropped(parts[part], count, **arguments)


def compare_dropped(converter: DatasetConverter, count: int, **arguments: Any) -> None:
    """As `compare`, of loaders that drop a last batch: windows that hold nothing else may be told or not."""
    ranks: list[dict[str, Any]] = [{"cur_shard": index, "shard_count": count} for index in range(count)]
    plans = [converter.plan(drop_last=True, **arguments, **rank) for rank in ranks]
    found = [Looked(converter, drop_last=True, **arguments, **rank) for rank in ranks]
    for plan, looked in zip(plans, found, strict=True):
        assert plan.steps_per_epoch == looked.steps == looked.length
        assert plan.num_rows == len(looked.rows) == looked.steps * arguments["batch_size"]
        assert plan.padded_rows == looked.padded
    read = {row for looked in found for row in looked.rows}
    assert {plan.dropped_rows for plan in plans} == {len(converter) - len(read)}


@pytest.mark.parametrize(
    ("arguments", "row_bytes"),
    [
        ({}, 24),
        ({"columns": ["id"]}, 8),
        ({"columns": ["vector", "x"]}, 16),
        ({"columns": ["x"], "stack": {"s": ["id", "x"]}}, 12),
        ({"columns": ["x"], "shuffle": True}, 4),
        ({"columns": ["x"], "shuffle_window_rows": 1}, 4),
        ({"columns": ["x"], "cur_shard": 1, "shard_count": 4, "shuffle": True}, 4),
    ],
    ids=str,
)
def test_the_bytes_are_those_of_the_row_groups_that_are_decoded(
    converter: DatasetConverter, arguments: Any, row_bytes: int
) -> None:
    options: dict[str, Any] = {"batch_size": 10, "shuffle_window_rows": 25} | arguments
    plan = converter.plan(**options)
    assert plan.bytes_per_epoch == Looked(converter, **options).rows_decoded * row_bytes
    more = converter.plan(**options, with_row_index="row")
    assert more.bytes_per_epoch == Looked(converter, **options).rows_decoded * (row_bytes + 8)


@pytest.mark.parametrize(
    "arguments",
    [
        {"columns": ["id"]},
        {"stack": {"s": ["id", "x"]}},
        {"transform": dict},
        {"with_row_index": "row"},
        {"nulls": "mask"},
        {"nulls": {"x": 0}},
        {"ragged": "pad"},
        {"workers_count": 3},
        {"prefetch_batches": 3},
        {"verify_checksums": True},
        {"num_epochs": 3},
        {"num_epochs": None},
        {"seed": 9, "shuffle": True},
        {"shuffle_window_rows": "all"},
        {"cur_shard": 2, "shard_count": 3, "uneven": "pad"},
    ],
    ids=str,
)
def test_a_plan_takes_the_arguments_of_a_loader(converter: DatasetConverter, arguments: Any) -> None:
    plan = converter.plan(batch_size=10, **arguments)
    reader = converter.make_batch_reader(batch_size=10, **{**arguments, "num_epochs": 1})
    assert plan.steps_per_epoch == len(reader) == len(list(reader))
    assert plan.num_epochs == arguments.get("num_epochs", 1)
    assert (plan.cur_shard, plan.shard_count) == (arguments.get("cur_shard", 0), arguments.get("shard_count", 1))
    assert plan.batch_size == 10
    if plan.num_epochs:
        whole = converter.make_torch_dataloader(batch_size=10, **arguments)
        assert plan.steps_per_epoch * plan.num_epochs == len(whole)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"num_epochs": 0}, ValueError, "num_epochs must be at least 1"),
        ({"columns": ["idd"]}, ValueError, "columns: There is no column 'idd'"),
        ({"uneven": "all"}, ValueError, "uneven must be"),
        ({"shuffle_window_rows": "some"}, ValueError, "shuffle_window_rows must be a number of rows, 'all' or None"),
        ({"prefetch_batches": 0}, ValueError, "prefetch_batches must be at least 1"),
        ({"cur_shard": 0, "shard_count": 102}, EmptyShardError, "101 rows cannot be divided among 102 shards"),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_as_a_loader_refuses_it(
    converter: DatasetConverter, arguments: Any, kind: Any, said: str
) -> None:
    for make in (converter.plan, converter.make_batch_reader):
        with pytest.raises(kind, match=said):
            make(**arguments)


def test_the_window_is_the_one_that_a_state_names(parts: dict[str, DatasetConverter]) -> None:
    for part in parts.values():
        for window in (None, "all", 7, 10**9):
            plan = part.plan(shuffle=True, shuffle_window_rows=window)
            state = part.make_batch_reader(shuffle=True, shuffle_window_rows=window).state_dict()
            assert plan.window_rows == state["window_rows"] <= len(part)


# What a filter decides


def test_what_a_filter_decides_is_unknown_and_what_where_counted_is_known(converter: DatasetConverter) -> None:
    filters = [("id", ">", 50)]
    options: dict[str, Any] = {"batch_size": 10, "cur_shard": 0, "shard_count": 2}
    plan = converter.plan(filters=filters, **options)
    unknown = ("num_rows", "steps_per_epoch", "dropped_rows", "padded_rows", "num_windows", "bytes_per_epoch")
    assert [getattr(plan, name) for name in unknown] == [None] * 6
    assert (plan.num_epochs, plan.batch_size, plan.cur_shard, plan.shard_count) == (1, 10, 0, 2)
    assert plan.peak_memory_bytes > 0
    shown = repr(plan)
    assert shown.count("unknown (filters)") == 6
    assert "None" not in shown
    known = converter.where(filters).plan(**options)
    assert (known.num_rows, known.steps_per_epoch, known.dropped_rows, known.padded_rows) == (25, 3, 0, 0)
    assert "unknown" not in repr(known)


def test_a_filter_is_not_resolved_for_a_plan(converter: DatasetConverter) -> None:
    elsewhere = borrow_files(converter._storage.below("elsewhere"), converter._manifest)
    assert elsewhere.plan(filters=[("id", ">", 50)]).num_rows is None
    # Nor is a row read: the files need not be there.
    assert elsewhere.plan(batch_size=10).steps_per_epoch == 11


def test_a_plan_with_filters_refuses_nulls_as_little_as_a_loader_does(tmp_path: Any) -> None:
    columns = (ID, Column(name="x", dtype="int32", nullable=True))
    with write_converter(tmp_path, columns, [[range(50)]]) as converter:
        present = [row for row, valid in enumerate(columns[1].valid(range(50))) if valid]
        filters = [("id", "in", present)]
        assert converter.plan(filters=filters).num_rows is None
        with converter.make_batch_reader(filters=filters) as reader:
            assert [row for batch in reader for row in batch["id"].tolist()] == present
        with pytest.raises(NullValueError, match="'x'"):
            converter.plan()


def test_a_plan_of_what_was_deleted_is_refused(tmp_path: Any) -> None:
    with write_converter(tmp_path, (ID,), [[range(10)]]) as converter:
        assert converter.plan().steps_per_epoch == 1
    with pytest.raises(CacheError, match="was deleted, so it has no rows any more"):
        converter.plan()


# How it looks


def test_a_plan_says_it_in_six_lines(converter: DatasetConverter) -> None:
    plan = converter.plan(
        batch_size=10, num_epochs=3, columns=["id"], cur_shard=1, shard_count=4, uneven="pad", shuffle_window_rows=30
    )
    lines = repr(plan).splitlines()
    assert lines[:4] == [
        "LoaderPlan(epochs 3, shard 1 of 4",
        "  steps per epoch   3 of 10 rows",
        "  rows per epoch    26, dropped 0, padded 1",
        f"  window            30 rows, {plan.num_windows} windows",
    ]
    assert lines[4:] == [
        f"  bytes per epoch   {plan.bytes_per_epoch / 1e6:,.1f} MB",
        f"  peak memory       {plan.peak_memory_bytes / 1e6:,.1f} MB)",
    ]
    assert repr(converter.plan(num_epochs=None)).startswith(
        "LoaderPlan(epochs endless\n  steps per epoch   4 of 32 rows\n"
    )
    large = LoaderPlan(
        num_rows=1_234_567, steps_per_epoch=38_581, num_epochs=1, batch_size=1024, cur_shard=0, shard_count=1,
        dropped_rows=5678, padded_rows=0, window_rows=98_765, num_windows=12, bytes_per_epoch=3_400_000_000,
        peak_memory_bytes=98_700_000,
    )  # fmt: skip
    assert "38,581 of 1,024 rows" in repr(large)
    assert "1,234,567, dropped 5,678, padded 0" in repr(large)
    assert "3,400.0 MB" in repr(large)
    assert "98.7 MB)" in repr(large)


# Memory


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"workers_count": 1}, {"workers_count": 4}),
        ({"columns": ["x"]}, {}),
        ({"shuffle_window_rows": 10}, {"shuffle_window_rows": "all"}),
        ({"prefetch_batches": 1}, {"prefetch_batches": 100}),
        ({}, {"transform": dict}),
        ({"batch_size": 1}, {"batch_size": 50}),
        ({}, {"shuffle": True}),
    ],
    ids=str,
)
def test_what_reads_more_at_once_is_said_to_take_more(converter: DatasetConverter, less: Any, more: Any) -> None:
    options: dict[str, Any] = {"shuffle_window_rows": 20, "batch_size": 10, "workers_count": 2}
    one, other = converter.plan(**options | less), converter.plan(**options | more)
    assert one.peak_memory_bytes < other.peak_memory_bytes


NUM_GROUPS = 5_000
GROUP_ROWS = 2_000_011


@pytest.fixture(scope="module")
def huge(converter: DatasetConverter) -> DatasetConverter:
    """Ten thousand million rows that are nowhere."""
    fields = [Field(name=f"f{index}", dtype="float32") for index in range(40)]
    counted = moments.new_moments(1)
    moments.add_values(counted, np.random.default_rng(0).random((1000, 1)), moments.new_scratch())
    closed = moments.close_moments(counted)
    manifest = Manifest(
        schema=Schema(tuple(fields)),
        file_names=tuple(f"data-{'0' * 32}/part-{file:05d}-{file:08x}-0000.parquet" for file in range(500)),
        file_bytes=np.full(500, 3_200_001_234),
        row_group_file=np.repeat(np.arange(500), 10),
        row_group_rows=np.full(NUM_GROUPS, GROUP_ROWS),
        row_group_bytes=np.full(NUM_GROUPS, GROUP_ROWS * 160),
        fingerprint="0" * 32,
        num_rows=NUM_GROUPS * GROUP_ROWS,
        statistics={field.name: ColumnStatistics(field=field, null_count=0, closed=closed) for field in fields},
    )
    return borrow_files(converter._storage, manifest)


@pytest.mark.one_in(3)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "arguments",
    [
        {"cur_shard": 0, "shard_count": 1},
        {"cur_shard": 6, "shard_count": 64},
        {"cur_shard": 0, "shard_count": 1, "shuffle_window_rows": "all"},
    ],
    ids=str,
)
def test_a_plan_of_ten_thousand_million_rows_costs_memory_by_row_group(huge: DatasetConverter, arguments: Any) -> None:
    assert len(huge) == NUM_GROUPS * GROUP_ROWS > 10**10
    tracemalloc.start()
    try:
        plan = huge.plan(batch_size=1024, shuffle=True, **arguments)
        reader = huge.make_batch_reader(batch_size=1024, shuffle=True, num_epochs=None, **arguments)
        state = reader.state_dict(batches=plan.steps_per_epoch + 5_000)
        reader.load_state_dict(state)
        again = reader.state_dict(batches=123)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A few hundred bytes for each row group; one bit for each row would be 1.2 GB.
    assert peak < 10e6
    assert plan.num_rows == len(huge) // arguments["shard_count"]
    assert plan.steps_per_epoch == -(-plan.num_rows // 1024)
    assert len(json.dumps(state)) < 1000
    assert (state["epoch"], state["past"]) == (1, [[arguments["shard_count"], 5_000 * 1024]])
    assert again["past"] == [[arguments["shard_count"], 5_123 * 1024]]


def test_a_shard_counts_its_own_windows(converter: DatasetConverter) -> None:
    plans = [
        converter.plan(shuffle=True, shuffle_window_rows=12, cur_shard=shard, shard_count=4, uneven="keep")
        for shard in range(4)
    ]
    whole = converter.plan(shuffle=True, shuffle_window_rows=12).num_windows
    numbers = [plan.num_windows for plan in plans if plan.num_windows is not None]
    assert whole is not None
    # Two shards may share one.
    assert whole <= sum(numbers) <= whole + 3


def test_what_is_fetched_over_a_network_is_counted(converter: DatasetConverter) -> None:
    here = converter.plan(batch_size=16)
    there = borrow_files(open_storage("memory://place"), converter._manifest).plan(batch_size=16)
    assert there.peak_memory_bytes > here.peak_memory_bytes
    assert there.bytes_per_epoch == here.bytes_per_epoch
