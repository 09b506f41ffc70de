"""`make_reader` and `make_batch_reader`: rows, types, order, shards, epochs, predicates, transforms and their life."""

from __future__ import annotations

import collections
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from converter import ReadError, SourceChangedError, SourceError
from converter.petastorm import TransformSpec, make_batch_reader, make_reader
from converter.petastorm.errors import DecodeFieldError, NoDataAvailableError
from converter.petastorm.etl.dataset_metadata import PetastormMetadataError, write_metadata
from converter.petastorm.etl.rowgroup_indexers import SingleFieldIndexer
from converter.petastorm.etl.rowgroup_indexing import build_rowgroup_index
from converter.petastorm.ngram import NGram
from converter.petastorm.predicates import PredicateBase, in_lambda, in_negate, in_pseudorandom_split, in_reduce, in_set
from converter.petastorm.reader import Reader
from converter.petastorm.selectors import IntersectIndexSelector, SingleIndexSelector, UnionIndexSelector
from converter.petastorm.unischema import Unischema, UnischemaField
from converter.storage.local import LocalStorage
from tests.unit.petastorm.conftest import GROUP_ROWS, NUM_ROWS, SCHEMA, Stored, row_of
from tests.unit.petastorm.readers import told_when_stopped

Make = Callable[..., Reader]
POOLS = ("dummy", "thread")
"""Processes are tried in tests/integration/test_petastorm_processes.py: each takes half a second to begin."""

BOTH = pytest.mark.parametrize("make", [make_reader, make_batch_reader], ids=["rows", "batches"])


def ids_of(reader: Reader) -> list[int]:
    """The ids in the order in which a reader hands them out."""
    if reader.batched_output:
        return [int(number) for batch in reader for number in batch.id]
    return [int(row.id) for row in reader]


def plain_reader(make: Make, plain: Stored, **options: Any) -> Reader:
    """A reader of plain Parquet; `make_reader` warns that its store has no schema."""
    if make is make_batch_reader:
        return make_batch_reader(plain.url, **options)
    with pytest.warns(UserWarning, match="reading only Petastorm datasets"):
        return make_reader(plain.url, **options)


# Rows and types --------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLS)
def test_each_row_comes_once_as_it_was_given(stored: Stored, pool: str) -> None:
    with make_reader(stored.url, reader_pool_type=pool) as reader:
        rows = sorted(reader, key=lambda row: row.id)
    assert len(rows) == NUM_ROWS
    for row, given in zip(rows, stored.rows, strict=True):
        for name, value in given.items():
            found = getattr(row, name)
            if value is None:
                assert found is None
                continue
            np.testing.assert_array_equal(found, value)
            kind = SCHEMA.fields[name].numpy_dtype
            if isinstance(value, np.ndarray):
                assert (found.dtype, found.shape) == (value.dtype, value.shape)
            elif name != "tags":
                assert isinstance(found, kind)


def test_a_row_is_a_namedtuple_of_the_schemas_fields(stored: Stored) -> None:
    with make_reader(stored.url, schema_fields=["id", "sp.*", SCHEMA.city]) as reader:
        row = next(reader)
        assert set(row._fields) == {"id", "speed", "city"} == set(reader.schema.fields)
        assert not reader.batched_output
        assert not reader.is_batched_reader


def test_a_batch_is_a_row_group_with_partition_columns_first(plain: Stored) -> None:
    with make_batch_reader(plain.url) as reader:
        batches = list(reader)
    assert reader.batched_output
    assert batches[0]._fields == ("city", "group", "id", "speed", "pair")
    assert {len(batch.id) for batch in batches} == {4, 2}
    assert {name: (column.dtype.kind, column.ndim) for name, column in batches[0]._asdict().items()} == {
        "city": ("U", 1), "group": ("i", 1), "id": ("i", 1), "speed": ("f", 1), "pair": ("i", 2),
    }  # fmt: skip
    found = {
        int(i): (s, g, tuple(p)) for b in batches for i, s, g, p in zip(b.id, b.speed, b.group, b.pair, strict=True)
    }
    assert found == {row["id"]: (row["speed"], row["group"], tuple(row["pair"])) for row in plain.rows}


def test_rows_of_plain_parquet_have_their_partition_values(plain: Stored) -> None:
    with plain_reader(make_reader, plain) as reader:
        assert {(int(row.id), str(row.city), int(row.group)) for row in reader} == {
            (row["id"], row["city"], row["group"]) for row in plain.rows
        }


def test_a_store_with_a_schema_warns_a_reader_of_batches_and_hands_out_what_is_stored(stored: Stored) -> None:
    with pytest.warns(UserWarning, match="Please use make_reader"):
        reader = make_batch_reader(stored.url, schema_fields=["id", "matrix"])
    with reader:
        assert isinstance(next(reader).matrix[0], bytes)


def test_a_moved_store_and_doubled_slashes_are_read(stored: Stored, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(stored.path, moved)
    with make_reader(f"file://{str(moved).replace('/', '//')}", schema_fields=["id"]) as reader:
        assert sorted(ids_of(reader)) == list(range(NUM_ROWS))


@BOTH
def test_files_in_a_list_are_read_and_as_often_as_they_are_named(make: Make, plain: Stored) -> None:
    files = sorted(path.as_uri() for path in plain.path.rglob("*.parquet"))
    with plain_reader(make, Stored(files[:2], plain.path, []), schema_fields=["id"]) as reader:  # type: ignore[arg-type]
        once = sorted(ids_of(reader))
    with plain_reader(make, Stored([files[0], *files[:2]], plain.path, []), schema_fields=["id"]) as reader:  # type: ignore[arg-type]
        assert len(ids_of(reader)) == len(once) + 10


def test_a_file_of_another_row_group_size_loses_no_row(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "a.parquet", row_group_size=3)
    pq.write_table(pa.table({"id": range(10, 50)}), tmp_path / "b.parquet", row_group_size=40)
    pq.write_table(pa.table({"id": pa.array([], pa.int64())}), tmp_path / "c.parquet")
    with make_batch_reader(tmp_path.as_uri()) as reader:
        assert sorted(ids_of(reader)) == list(range(50))


def test_a_thousand_columns_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({f"c{number}": [number] * 3 for number in range(1000)}), tmp_path / "a.parquet")
    with make_batch_reader(tmp_path.as_uri()) as reader:
        batch = next(reader)
    assert len(batch._fields) == 1000
    assert batch.c999.tolist() == [999] * 3


# Order, epochs and shards ----------------------------------------------------------


@BOTH
@pytest.mark.parametrize("pool", POOLS)
def test_without_shuffling_the_order_is_the_stores_own(make: Make, pool: str, plain: Stored) -> None:
    with plain_reader(make, plain, shuffle_row_groups=False, reader_pool_type=pool) as reader:
        first = ids_of(reader)
    with plain_reader(make, plain, shuffle_row_groups=False, workers_count=1) as reader:
        assert ids_of(reader) == first
    assert first[:10] == [0, 6, 12, 18, 24, 30, 36, 42, 48, 54]


@BOTH
@pytest.mark.parametrize("shuffle_rows", [False, True])
def test_a_seed_decides_the_order_and_zero_is_a_seed(make: Make, shuffle_rows: bool, plain: Stored) -> None:
    def order(seed: int | None) -> list[int]:
        with plain_reader(make, plain, seed=seed, shuffle_rows=shuffle_rows, schema_fields=["id"]) as reader:
            return ids_of(reader)

    assert order(7) == order(7)
    assert order(0) == order(0)
    assert order(7) != order(8)
    assert sorted(order(None)) == list(range(60))


def test_shuffled_rows_stay_in_their_row_group(stored: Stored) -> None:
    with make_reader(stored.url, schema_fields=["id"], shuffle_rows=True, shuffle_row_groups=False, seed=1) as reader:
        ids = ids_of(reader)
    groups = [ids[start : start + GROUP_ROWS] for start in range(0, NUM_ROWS, GROUP_ROWS)]
    assert ids != sorted(ids)
    assert [sorted(group) for group in groups] == [[*range(start, start + 5)] for start in range(0, NUM_ROWS, 5)]
    # Not the same permutation in each of them.
    assert len({tuple(number - min(group) for number in group) for group in groups}) > 1


@pytest.mark.parametrize("num_parts", [2, 5, 8])
@pytest.mark.parametrize("shuffle_rows", [False, True])
def test_row_groups_in_parts_lose_and_repeat_no_row(stored: Stored, num_parts: int, shuffle_rows: bool) -> None:
    with make_reader(
        stored.url, schema_fields=["id"], shuffle_row_drop_partitions=num_parts, shuffle_rows=shuffle_rows
    ) as reader:
        ids = ids_of(reader)
    assert sorted(ids) == list(range(NUM_ROWS))
    jumps = sum(after != before + 1 for before, after in itertools.pairwise(ids))
    assert jumps > NUM_ROWS // GROUP_ROWS


def test_each_epoch_has_all_rows_in_another_order(stored: Stored) -> None:
    with make_reader(stored.url, schema_fields=["id"], num_epochs=3, seed=5) as reader:
        ids = ids_of(reader)
        epochs = [ids[start : start + NUM_ROWS] for start in range(0, 3 * NUM_ROWS, NUM_ROWS)]
        assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) == 3
        assert reader.last_row_consumed
        with pytest.raises(StopIteration):
            next(reader)
        reader.reset()
        assert sorted(ids_of(reader)) == sorted(3 * list(range(NUM_ROWS)))


def test_epochs_without_end_go_on(stored: Stored) -> None:
    with make_reader(stored.url, schema_fields=["id"], num_epochs=None) as reader:
        counts = collections.Counter(int(next(reader).id) for _ in range(3 * NUM_ROWS + 2))
    assert set(counts.values()) <= {3, 4}
    assert len(counts) == NUM_ROWS


def test_a_reader_is_reset_only_at_its_end(stored: Stored) -> None:
    with make_reader(stored.url, schema_fields=["id"]) as reader:
        next(reader)
        with pytest.raises(NotImplementedError, match="after all samples were consumed"):
            reader.reset()


@BOTH
@pytest.mark.parametrize("seed", [None, 0, 3])
def test_shards_are_disjoint_and_together_all_rows(make: Make, seed: int | None, plain: Stored) -> None:
    def shard(number: int) -> list[int]:
        with plain_reader(make, plain, cur_shard=number, shard_count=5, seed=seed, schema_fields=["id"]) as reader:
            return sorted(ids_of(reader))

    shards = [shard(number) for number in range(5)]
    assert sorted(itertools.chain(*shards)) == list(range(60))
    assert all(shards)
    assert shard(2) == shards[2]


def test_a_seed_decides_which_row_groups_a_shard_has(stored: Stored) -> None:
    def shard(seed: int) -> set[int]:
        with make_reader(stored.url, schema_fields=["id"], cur_shard=0, shard_count=4, seed=seed) as reader:
            return set(ids_of(reader))

    assert shard(1) != shard(2)


@BOTH
def test_more_shards_than_row_groups_are_an_error(make: Make, plain: Stored) -> None:
    with pytest.raises(NoDataAvailableError, match="greater or equal to the number of requested shards"):
        plain_reader(make, plain, cur_shard=0, shard_count=1000)
    only_one = in_lambda(["city", "group"], lambda city, group: (city, group) == ("c0", 0))
    with pytest.raises(NoDataAvailableError, match="3 of them chosen, and 4 shards"):
        plain_reader(make, plain, predicate=only_one, cur_shard=0, shard_count=4)


@pytest.mark.parametrize("shard", [(0, 0), (0, None), (None, 2), ("0", "1"), (2, 2), (-1, 2)])
def test_wrong_shards_are_refused(shard: tuple[Any, Any], stored: Stored) -> None:
    with pytest.raises(ValueError, match="must be ints and both specified"):
        make_reader(stored.url, cur_shard=shard[0], shard_count=shard[1])


def test_the_seed_of_shards_is_told_to_be_old(stored: Stored) -> None:
    with pytest.warns(UserWarning, match="shard_seed was deprecated"):
        make_reader(stored.url, cur_shard=0, shard_count=2, shard_seed=3).stop()


# Predicates, filters and selectors -------------------------------------------------


class IsEven(PredicateBase):
    """A predicate of the user's own: of a dict, or of a frame."""

    def get_fields(self) -> set[str]:
        return {"id"}

    def do_include(self, values: Any) -> Any:
        return values["id"] % 2 == 0


@BOTH
@pytest.mark.parametrize(
    ("predicate", "wanted"),
    [
        (in_set({3, 5, 99}, "id"), {3, 5}),
        (in_lambda(["id", "speed"], lambda number, speed: (number > 7) & (speed < 5)), set(range(8, 20))),
        (in_negate(in_set({0}, "group")), {number for number in range(60) if number % 3}),
        (in_reduce([in_set({"c1"}, "city"), in_set({0}, "group")], all), {3, 9, 15, 21, 27, 33, 39, 45, 51, 57}),
        (in_set({"c1"}, "city"), set(range(1, 60, 2))),
        (IsEven(), set(range(0, 60, 2))),
    ],
    ids=["set", "lambda", "negate", "reduce", "partition", "own"],
)
@pytest.mark.parametrize("shuffle_rows", [False, True])
def test_a_predicate_chooses_whole_rows(
    make: Make, predicate: PredicateBase, wanted: set[int], shuffle_rows: bool, plain: Stored
) -> None:
    with plain_reader(make, plain, predicate=predicate, shuffle_rows=shuffle_rows) as reader:
        blocks = []
        while True:
            try:
                blocks.append(reader.next_block())
            except StopIteration:
                break
    found = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    assert set(found["id"].tolist()) == wanted
    assert len(found["id"]) == len(wanted)
    # The columns of a row belong together, and their dtypes stay.
    assert found["id"].dtype == np.int64
    np.testing.assert_array_equal(found["speed"], found["id"] / 4)
    np.testing.assert_array_equal(found["group"], found["id"] % 3)
    np.testing.assert_array_equal(found["pair"][:, 1], -found["id"])


def test_a_split_by_predicates_is_disjoint_and_complete(plain: Stored) -> None:
    parts = []
    for part in range(2):
        predicate = in_pseudorandom_split([0.3, 0.7], part, "id")
        with make_batch_reader(plain.url, predicate=predicate) as reader:
            parts.append(set(ids_of(reader)))
    assert parts[0] | parts[1] == set(range(60))
    assert not parts[0] & parts[1]


def test_a_predicate_that_answers_once_for_a_batch_is_named(plain: Stored) -> None:
    with (
        make_batch_reader(plain.url, predicate=in_lambda(["id"], lambda _: True)) as reader,
        pytest.raises(ValueError, match=r"of the fields id gave True, expected a boolean for each of \d rows"),
    ):
        next(reader)


@BOTH
def test_a_field_that_no_function_adds_is_named(make: Make, plain: Stored) -> None:
    spec = TransformSpec(edit_fields=[("new", np.int32, (), False)])
    with (
        plain_reader(make, plain, transform_spec=spec) as reader,
        pytest.raises(ValueError, match="a TransformSpec without func adds no column"),
    ):
        next(reader)


@BOTH
@pytest.mark.filterwarnings("ignore:Currently make_reader")
def test_predicates_of_whole_numbers_are_exact_beside_nulls(make: Make, tmp_path: Path) -> None:
    whole = [*range(50), 2**53, 2**53 + 1]
    pq.write_table(pa.table({"id": whole, "x": whole}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [-1, *whole], "x": [None, *whole]}), tmp_path / "b.parquet")

    def chosen(predicate: PredicateBase) -> list[int]:
        with make(tmp_path.as_uri(), predicate=predicate) as reader:
            return sorted(ids_of(reader))

    parts = [in_pseudorandom_split([0.5, 0.5], part, "x") for part in range(2)]
    first, second = (chosen(part) for part in parts)
    assert not set(first) & set(second)
    assert sorted(first + second) == sorted([-1, *whole, *whole])
    assert [chosen(in_set({number}, "x")) for number in whole[-2:]] == [2 * [number] for number in whole[-2:]]
    assert chosen(in_set({None, 7}, "x")) == [-1, 7, 7]
    # Beside a function of the user's, which gets a frame.
    both = in_reduce([parts[0], in_lambda(["id"], lambda number: number > -9)], all)
    assert chosen(both) == first


@BOTH
def test_a_predicate_that_leaves_nothing_warns(make: Make, plain: Stored) -> None:
    warnings.filterwarnings("ignore", message="Currently make_reader")
    with pytest.warns(UserWarning, match="No matching data is available"):
        reader = make(plain.url, predicate=in_set({"c7"}, "city"))
    assert ids_of(reader) == []


NOTHING_PASSES: dict[str, dict[str, Any]] = {
    "predicate": {"predicate": in_set({-1}, "id")},
    "filters": {"filters": [("id", "<", 0)]},
}


@BOTH
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("options", NOTHING_PASSES.values(), ids=NOTHING_PASSES)
def test_epochs_without_end_that_have_no_row_are_an_error(
    make: Make, pool: str, options: dict[str, Any], plain: Stored
) -> None:
    with plain_reader(make, plain, num_epochs=None, reader_pool_type=pool, **options) as reader:
        for take in (reader.next, reader.next_block):
            with pytest.raises(NoDataAvailableError, match="two epochs gave none: predicate, filters"):
                take()
    with plain_reader(make, plain, num_epochs=2, reader_pool_type=pool, **options) as reader:
        assert ids_of(reader) == []


@pytest.mark.parametrize("pool", POOLS)
def test_epochs_without_end_that_a_transform_leaves_no_row_are_an_error(plain: Stored, pool: str) -> None:
    spec = TransformSpec(lambda frame: frame[:0])
    with (
        make_batch_reader(plain.url, num_epochs=None, reader_pool_type=pool, transform_spec=spec) as reader,
        pytest.raises(NoDataAvailableError, match="two epochs gave none"),
    ):
        next(reader)


@BOTH
@pytest.mark.parametrize("shuffle_row_groups", [False, True])
def test_epochs_without_end_go_on_with_the_rows_of_one_row_group(
    make: Make, shuffle_row_groups: bool, tmp_path: Path
) -> None:
    """It may be the first of an epoch and the last of the next, with nearly all row groups twice in between."""
    pq.write_table(pa.table({"id": range(8)}), tmp_path / "a.parquet", row_group_size=2)
    one = Stored(tmp_path.as_uri(), tmp_path, [])
    for seed in range(5):
        options: dict[str, Any] = {"num_epochs": None, "shuffle_row_groups": shuffle_row_groups, "seed": seed}
        with plain_reader(make, one, predicate=in_set({4, 5}, "id"), **options) as reader:
            ids = list(itertools.chain(*(reader.next_block()["id"].tolist() for _ in range(20))))
        assert ids == 20 * [4, 5]


class PassesNoRow(PredicateBase):
    """A predicate that tells when it was asked for the 500th time."""

    def __init__(self) -> None:
        self.is_asked_often = threading.Event()
        self.calls = itertools.count(1)

    def get_fields(self) -> set[str]:
        return {"id"}

    def do_include(self, values: Any) -> Any:
        if next(self.calls) >= 500:
            self.is_asked_often.set()
        return values["id"] < 0


STOPS_ITSELF = """
import os, signal, sys, threading, warnings
warnings.simplefilter("ignore")
from converter.petastorm import TransformSpec, make_batch_reader

def transform(frame):
    if how == "transform":
        reader.stop()
    elif frame["id"].iloc[0]:
        # The main thread comes to wait for this.
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        may_go.wait(30)
    return frame

def stop(*_):
    reader.stop()
    reader.join()
    may_go.set()

how, may_go = sys.argv[2], threading.Event()
reader = make_batch_reader(sys.argv[1], transform_spec=TransformSpec(transform), workers_count=1, num_epochs=None)
signal.signal(signal.SIGTERM, stop)
try:
    for _ in reader:
        pass
except RuntimeError as error:
    print(str(error).partition(" created")[0])
"""


@pytest.mark.parametrize("how", ["handler", "transform"])
def test_a_reader_that_is_stopped_from_within_waits_for_nobody(tmp_path: Path, how: str) -> None:
    pq.write_table(pa.table({"id": range(1000)}), tmp_path / "a.parquet", row_group_size=100)
    done = subprocess.run(
        [sys.executable, "-c", STOPS_ITSELF, f"file://{tmp_path}", how],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "Trying to read a sample after a reader\n", done.stderr


@BOTH
@pytest.mark.parametrize("pool", POOLS)
def test_a_reader_that_finds_no_row_for_many_epochs_is_stopped(make: Make, pool: str, plain: Stored) -> None:
    predicate = PassesNoRow()
    reader = plain_reader(make, plain, num_epochs=10**6, reader_pool_type=pool, predicate=predicate)
    told = told_when_stopped(reader, reader, predicate.is_asked_often)
    assert told == ["Trying to read a sample after a reader"]
    with pytest.raises(RuntimeError, match="Trying to read a sample after"):
        next(reader)


@pytest.mark.parametrize("fields", [["nope"], []])
def test_a_predicate_of_unknown_fields_fails_with_the_first_row(fields: list[str], stored: Stored) -> None:
    with make_reader(stored.url, predicate=in_lambda(fields, lambda *_: True)) as reader, pytest.raises(ValueError):  # noqa: PT011 (two texts)
        next(reader)


def test_what_is_no_predicate_or_selector_is_refused(stored: Stored) -> None:
    with pytest.raises(ValueError, match="derived from PredicateBase"):
        make_reader(stored.url, predicate=lambda row: True)
    with pytest.raises(ValueError, match="derived from RowGroupSelectorBase"):
        make_reader(stored.url, rowgroup_selector="id")


@BOTH
@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ([("city", "=", "c1")], set(range(1, 60, 2))),
        ([("group", "in", [1, 2]), ("id", "<", 10)], {1, 2, 4, 5, 7, 8}),
        ([[("id", "=", 3)], [("city", "=", "c0"), ("speed", ">", 14.0)]], {3, 58}),
        (pc.field("id") > 57, {58, 59}),
    ],
    ids=["partition", "both", "either", "expression"],
)
def test_filters_choose_rows_exactly(make: Make, filters: Any, wanted: set[int], plain: Stored) -> None:
    with plain_reader(make, plain, filters=filters) as reader:
        assert set(ids_of(reader)) == wanted


@BOTH
@pytest.mark.parametrize("filters", [[("ID", ">", 0)], [[("idd", "=", 3)], [("id", "=", 2)]]])
def test_filters_of_no_column_are_refused(make: Make, filters: Any, plain: Stored) -> None:
    with pytest.raises(ValueError, match=r"filters names '(ID|idd)', which no file has as a column.* city, group, id"):
        plain_reader(make, plain, filters=filters)


def test_filters_may_name_a_column_that_only_later_files_have(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [0, 1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [2, 3], "x": [7, 8]}), tmp_path / "b.parquet")
    with make_batch_reader(tmp_path.as_uri(), filters=[("x", "=", 8)]) as reader:
        assert ids_of(reader) == [3]


@BOTH
@pytest.mark.filterwarnings("ignore:Currently make_reader")
@pytest.mark.parametrize("is_same", [False, True])
def test_a_file_that_is_replaced_meanwhile_is_named(make: Make, is_same: bool, tmp_path: Path) -> None:
    plain = {"use_dictionary": False, "compression": "none", "write_statistics": False, "row_group_size": 10}
    columns = {"id": range(100), "other": range(100, 200)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", **plain)
    with make(tmp_path.as_uri(), num_epochs=None, shuffle_rows=True, workers_count=1) as reader:
        next(reader)
        swapped = columns if is_same else {"other": columns["other"], "id": columns["id"]}
        pq.write_table(pa.table(swapped), tmp_path / "new", **plain)
        (tmp_path / "new").rename(tmp_path / "a.parquet")
        if is_same:
            assert all(np.max(element.id) < 100 for element in itertools.islice(reader, 300))
            return
        seen: list[int] = []
        with pytest.raises(SourceChangedError, match=r"a\.parquet was replaced since it was opened"):
            seen.extend(int(np.max(element.id)) for element in reader)
        assert max(seen, default=0) < 100


@BOTH
@pytest.mark.filterwarnings("ignore:Please use make_reader")
@pytest.mark.parametrize("num_rows", [2, 12])
@pytest.mark.parametrize("stored_rows", [0, 8])
def test_a_file_with_other_row_groups_than_were_counted_is_named(
    make: Make, stored_rows: int, num_rows: int, tmp_path: Path
) -> None:
    def write(name: str, count: int) -> None:
        table = pa.table({"id": pa.array(range(count), pa.int64())})
        with pq.ParquetWriter(tmp_path / f"{name}.parquet", table.schema) as writer:
            if count:
                writer.write_table(table, row_group_size=4)

    write("a", 8)
    write("b", stored_rows)
    write_metadata(tmp_path.as_uri(), Unischema("S", [UnischemaField("id", np.int64, ())]))
    write("b", num_rows)
    with make(tmp_path.as_uri()) as reader:
        if not stored_rows:
            # It was never counted on.
            assert len(ids_of(reader)) == 8 + num_rows
            return
        with pytest.raises(SourceChangedError, match=rf"b.parquet has {num_rows // 4 or 1} row groups, expected 2"):
            ids_of(reader)


@BOTH
@pytest.mark.filterwarnings("ignore:Please use make_reader")
@pytest.mark.parametrize("most_kept", [0, 256])
def test_a_file_that_is_replaced_while_the_predicate_runs_is_named(
    make: Make, most_kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other columns would stand beside those of the file before."""
    monkeypatch.setattr("converter.petastorm.store._MAX_KEPT_FOOTERS", most_kept)

    def write(name: str, first: int) -> None:
        ids = np.arange(first, first + 10)
        pq.write_table(pa.table({"id": ids, "label": 2 * ids}), tmp_path / name)

    def keep(ids: Any) -> Any:
        if np.min(ids) == 100:
            write("new", 5000)
            (tmp_path / "new").rename(tmp_path / "1.parquet")
        return ids >= 0

    for number in range(3):
        write(f"{number}.parquet", 100 * number)
    schema = Unischema("S", [UnischemaField(name, np.int64, ()) for name in ("id", "label")])
    write_metadata(tmp_path.as_uri(), schema)
    with (
        make(tmp_path.as_uri(), predicate=in_lambda(["id"], keep), shuffle_row_groups=False) as reader,
        pytest.raises(SourceChangedError, match=r"1\.parquet was replaced since it was opened"),
    ):
        ids_of(reader)


@pytest.mark.filterwarnings("ignore:Currently make_reader")
@pytest.mark.parametrize("most_kept", [0, 256])
def test_a_file_that_is_replaced_while_it_is_read_is_named(
    most_kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns would be read by the footer of the file before."""
    monkeypatch.setattr("converter.petastorm.store._MAX_KEPT_FOOTERS", most_kept)
    plain = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    columns = {"id": range(6), "other": range(10, 16)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", **plain)
    pq.write_table(pa.table(columns), tmp_path / "b.parquet", **plain)
    pq.write_table(pa.table({"other": columns["other"], "id": columns["id"]}), tmp_path / ".new", **plain)
    look = LocalStorage.look

    def look_and_replace(storage: LocalStorage, name: str, *rest: Any) -> Any:
        found = look(storage, name, *rest)
        if name == "a.parquet" and (tmp_path / ".new").exists():
            (tmp_path / ".new").rename(tmp_path / name)
        return found

    with make_reader(tmp_path.as_uri()) as reader:
        monkeypatch.setattr(LocalStorage, "look", look_and_replace)
        with pytest.raises(SourceChangedError, match=r"a\.parquet was replaced since it was opened"):
            ids_of(reader)


@pytest.mark.filterwarnings("ignore:Please use make_reader")
@pytest.mark.parametrize("most_kept", [0, 256])
def test_a_file_that_is_replaced_between_its_row_groups_is_named(
    most_kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that stand in other row groups now would come twice or never."""
    monkeypatch.setattr("converter.petastorm.store._MAX_KEPT_FOOTERS", most_kept)
    ids = np.arange(40)
    pq.write_table(pa.table({"id": ids}), tmp_path / "a.parquet", row_group_size=4)
    write_metadata(tmp_path.as_uri(), Unischema("S", [UnischemaField("id", np.int64, ())]))
    with make_reader(
        tmp_path.as_uri(),
        shuffle_row_groups=False,
        reader_pool_type="dummy",
        predicate=in_lambda(["id"], lambda _: True),
    ) as reader:
        next(reader)
        pq.write_table(pa.table({"id": ids[::-1]}), tmp_path / ".new", row_group_size=4)
        (tmp_path / ".new").rename(tmp_path / "a.parquet")
        with pytest.raises(SourceChangedError, match=r"a\.parquet was replaced since it was opened"):
            ids_of(reader)


def test_an_index_of_bytes_keeps_zeros_at_their_ends(tmp_path: Path) -> None:
    keys = [number.to_bytes(4, "little") for number in (1, 2, 256)]
    for number, key in enumerate(keys):
        pq.write_table(pa.table({"id": [number], "key": [key]}), tmp_path / f"{number}.parquet")
    write_metadata(
        tmp_path.as_uri(), Unischema("S", [UnischemaField("id", np.int64, ()), UnischemaField("key", np.bytes_, ())])
    )
    build_rowgroup_index(tmp_path.as_uri(), None, [SingleFieldIndexer("by key", "key")])
    for number, key in enumerate(keys):
        with make_reader(tmp_path.as_uri(), rowgroup_selector=SingleIndexSelector("by key", [key])) as reader:
            assert ids_of(reader) == [number]
    indexer = SingleFieldIndexer("by key", "key")
    indexer.build_index([{"key": np.bytes_(keys[0])}, {"key": np.str_("a\0")}], 0)
    assert indexer.indexed_values == [keys[0], "a\0"]


def test_selectors_choose_row_groups_by_an_index(stored: Stored, tmp_path: Path) -> None:
    shutil.copytree(stored.path, tmp_path / "indexed")
    url = (tmp_path / "indexed").as_uri()
    build_rowgroup_index(url, None, [SingleFieldIndexer("by id", "id"), SingleFieldIndexer("by city", "city")])

    def chosen(selector: Any) -> set[int]:
        with make_reader(url, schema_fields=["id"], rowgroup_selector=selector) as reader:
            return {number // GROUP_ROWS for number in ids_of(reader)}

    low, high = SingleIndexSelector("by id", [3, 41]), SingleIndexSelector("by id", [44, 99])
    assert chosen(low) == {0, 8}
    assert chosen(IntersectIndexSelector([low, high])) == {8}
    assert chosen(UnionIndexSelector([low, high])) == {0, 8, 19}
    assert chosen(SingleIndexSelector("by city", ["city1"])) == set(range(20))
    with pytest.raises(ValueError, match=r"required indexes \['nope'\] are not available"):
        make_reader(url, rowgroup_selector=SingleIndexSelector("nope", [1]))

    # Files that were removed change no other file's row groups, and those that were added are in no index.
    first, second, *_ = sorted((tmp_path / "indexed").rglob("*.parquet"))
    in_first = {number // GROUP_ROWS for number in pq.read_table(first, columns=["id"])["id"].to_pylist()}
    first.rename(first.with_name("zzz.parquet"))
    with pytest.raises(ValueError, match=r"does not know the file .*zzz\.parquet, which was added later"):
        make_reader(url, rowgroup_selector=low)
    first.with_name("zzz.parquet").rename(tmp_path / "aside")
    assert chosen(UnionIndexSelector([low, high])) == {0, 8, 19} - in_first
    (tmp_path / "aside").rename(first.with_name("zzz.parquet"))
    build_rowgroup_index(url, None, [SingleFieldIndexer("by id", "id")])
    assert chosen(UnionIndexSelector([low, high])) == {0, 8, 19}
    # A list of some files has other numbers than the store.
    wanted = pq.read_table(second, columns=["id"])["id"].to_pylist()[0]
    with pytest.warns(UserWarning, match="Please use make_reader"):
        reader = make_batch_reader(
            [second.as_uri()], schema_fields=["id"], rowgroup_selector=SingleIndexSelector("by id", [wanted])
        )
    with reader:
        assert wanted in next(reader).id.tolist()


# Transforms ------------------------------------------------------------------------


@pytest.mark.parametrize("pool", POOLS)
def test_a_transform_of_rows_may_add_change_and_remove_fields(stored: Stored, pool: str) -> None:
    spec = TransformSpec(
        lambda row: {"id": row["id"], "twice": row["id"] * 2, "matrix": row["matrix"].T, "speed": row["speed"]},
        edit_fields=[("twice", np.int64, (), False), ("matrix", np.float64, (3, 2), False)],
        removed_fields=["speed"],
    )
    with make_reader(
        stored.url, schema_fields=["id", "speed", "matrix"], transform_spec=spec, reader_pool_type=pool,
        predicate=in_lambda(["speed"], lambda speed: speed < 10),
    ) as reader:  # fmt: skip
        rows = list(reader)
        assert set(reader.schema.fields) == {"id", "twice", "matrix"} == set(rows[0]._fields)
    assert sorted(int(row.twice) for row in rows) == list(range(0, 60, 2))
    for row in rows:
        np.testing.assert_array_equal(row.matrix, row_of(int(row.id))["matrix"].T)


@pytest.mark.parametrize("pool", POOLS)
def test_a_transform_of_batches_gets_and_returns_a_frame(plain: Stored, pool: str) -> None:
    def add(frame: pd.DataFrame) -> pd.DataFrame:
        frame["wide"] = [np.full((2, 2), number, np.float32) for number in frame["id"]]
        return frame.drop(columns=["pair"])[frame["id"] < 50]

    spec = TransformSpec(
        add, edit_fields=[("wide", np.float32, (2, 2), False)], removed_fields=["pair", "speed", "city"]
    )
    predicate = in_lambda(["id", "speed"], lambda number, _: number % 2 == 0)
    with make_batch_reader(plain.url, transform_spec=spec, predicate=predicate, reader_pool_type=pool) as reader:
        batches = list(reader)
    assert batches[0]._fields == ("group", "id", "wide")
    assert batches[0].id.dtype == np.int64
    assert sorted(np.concatenate([batch.id for batch in batches])) == list(range(0, 50, 2))
    for batch in batches:
        np.testing.assert_array_equal(batch.wide[:, 1, 0], batch.id)


@BOTH
def test_a_transform_without_a_function_removes_and_orders_fields(make: Make, plain: Stored) -> None:
    with plain_reader(make, plain, transform_spec=TransformSpec(removed_fields=["pair", "city"])) as reader:
        assert next(reader)._fields == ("group", "id", "speed")
    with plain_reader(make, plain, transform_spec=TransformSpec(selected_fields=["speed", "id"])) as reader:
        assert next(reader)._fields == ("speed", "id")


@BOTH
def test_a_transform_that_returns_what_it_did_not_declare_is_named(make: Make, plain: Stored) -> None:
    def add(values: Any) -> Any:
        values["new"] = values["id"]
        return values

    with (
        plain_reader(make, plain, transform_spec=TransformSpec(add)) as reader,
        pytest.raises(ValueError, match="new"),
    ):
        next(reader)


@BOTH
@pytest.mark.parametrize("pool", POOLS)
def test_an_error_of_a_transform_is_raised_by_next_each_time(make: Make, pool: str, plain: Stored) -> None:
    def fail(_: Any) -> Any:
        raise LookupError("my own error")

    with plain_reader(make, plain, transform_spec=TransformSpec(fail), reader_pool_type=pool) as reader:
        for _ in range(2):
            with pytest.raises(LookupError, match="my own error"):
                next(reader)
        assert not reader.last_row_consumed


def test_a_folder_is_found_by_its_name_letter_by_letter(tmp_path: Path) -> None:
    for name, count in (("a%20b", 2), ("a b", 1)):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"id": range(count)}), tmp_path / name / "rows.parquet")
        write_metadata(f"file://{tmp_path}/{name}", Unischema("S", [SCHEMA.id]))
    for name, count in (("a%20b", 2), ("a b", 1)):
        with make_reader(f"file://{tmp_path}/{name}") as reader:
            assert sorted(ids_of(reader)) == list(range(count))
    shutil.rmtree(tmp_path / "a%20b")
    with make_reader(f"file://{tmp_path}/a%20b") as reader:
        assert ids_of(reader) == [0]


# Windows ---------------------------------------------------------------------------


def test_windows_hold_the_fields_of_each_offset_and_stay_in_row_groups(stored: Stored) -> None:
    ngram = NGram({-1: ["id", "matrix"], 1: [SCHEMA.speed]}, delta_threshold=1, timestamp_field=SCHEMA.id)
    with make_reader(stored.url, schema_fields=ngram) as reader:
        windows = list(reader)
        assert reader.ngram is ngram
    assert len(windows) == NUM_ROWS // GROUP_ROWS * (GROUP_ROWS - 2)
    for window in windows:
        assert list(window) == [-1, 0, 1]
        assert (set(window[-1]._fields), window[0], window[1]._fields) == ({"id", "matrix"}, (), ("speed",))
        number = int(window[-1].id)
        assert window[1].speed == row_of(number + 2)["speed"]
        np.testing.assert_array_equal(window[-1].matrix, row_of(number)["matrix"])


@pytest.mark.parametrize("num_parts", [1, 2])
def test_windows_of_row_groups_in_parts_are_the_same(stored: Stored, num_parts: int) -> None:
    ngram = NGram({0: ["id"], 1: ["id"]}, delta_threshold=1, timestamp_field="id")
    with make_reader(stored.url, schema_fields=ngram, shuffle_row_drop_partitions=num_parts) as reader:
        starts = sorted(int(window[0].id) for window in reader)
    assert starts == [number for number in range(NUM_ROWS) if number % GROUP_ROWS < GROUP_ROWS - 1]


def test_windows_without_overlap_hold_each_time_once(stored: Stored) -> None:
    ngram = NGram({0: ["id"], 1: ["id"]}, delta_threshold=1, timestamp_field="id", timestamp_overlap=False)
    with make_reader(stored.url, schema_fields=ngram) as reader:
        times = [int(row.id) for window in reader for row in window.values()]
    assert len(times) == len(set(times)) == NUM_ROWS // GROUP_ROWS * 4
    with pytest.raises(NotImplementedError, match="timestamp_overlap=False"):
        make_reader(stored.url, schema_fields=ngram, shuffle_row_drop_partitions=2)


@pytest.mark.parametrize("pool", POOLS)
def test_epochs_without_end_that_have_no_window_are_an_error(stored: Stored, pool: str) -> None:
    ngram = NGram({0: ["id"], GROUP_ROWS: ["id"]}, delta_threshold=1, timestamp_field="id")
    with (
        make_reader(stored.url, schema_fields=ngram, num_epochs=None, reader_pool_type=pool) as reader,
        pytest.raises(NoDataAvailableError, match="two epochs gave none"),
    ):
        next(reader)


def test_windows_are_of_rows_alone(plain: Stored) -> None:
    with pytest.raises(NotImplementedError, match="use make_reader"):
        make_batch_reader(plain.url, schema_fields=NGram({0: ["id"]}, 1, "id"))


# Blocks for loaders ----------------------------------------------------------------


def test_blocks_have_the_rows_as_their_first_axis(stored: Stored) -> None:
    with make_reader(stored.url, shuffle_row_groups=False) as reader:
        first = next(reader)
        block = reader.next_block()
    assert int(first.id) == 0
    assert block["id"].tolist() == [1, 2, 3, 4]
    assert block["picture"].shape == (4, 4, 6, 3)
    assert block["matrix"].shape == (4, 2, 3)
    assert block["ragged"].dtype == block["note"].dtype == block["maybe"].dtype == object
    assert block["ragged"][2].tolist() == [0, 1, 2]


def test_blocks_of_windows_are_named_by_offset_and_field(stored: Stored) -> None:
    ngram = NGram({0: ["id"], 1: ["id", "picture"]}, delta_threshold=1, timestamp_field="id")
    with make_reader(stored.url, schema_fields=ngram, shuffle_row_groups=False) as reader:
        block = reader.next_block()
    assert {key: column.shape for key, column in block.items()} == {
        (0, "id"): (4,), (1, "id"): (4,), (1, "picture"): (4, 4, 6, 3),
    }  # fmt: skip


@pytest.mark.parametrize("has_windows", [False, True])
def test_the_rows_of_a_block_come_to_nobody_who_takes_rows_meanwhile(stored: Stored, has_windows: bool) -> None:
    ngram = NGram({0: ["id"], 1: ["id"]}, delta_threshold=1, timestamp_field="id")
    fields: Any = ngram if has_windows else ["id"]
    key = (0, "id") if has_windows else "id"

    def id_of(element: Any) -> int:
        return int((element[0] if has_windows else element).id)

    with make_reader(stored.url, schema_fields=fields, shuffle_row_groups=False) as reader:
        ids = [id_of(next(reader))]
        # What another thread holds in the middle of next().
        held = reader._at_hand.elements
        ids += reader.next_block()[key].tolist()
        assert list(held) == []
        ids += map(id_of, reader)
    last = GROUP_ROWS - has_windows
    assert ids == [number for number in range(NUM_ROWS) if number % GROUP_ROWS < last]


# Life and bad input ----------------------------------------------------------------


def test_threads_share_a_reader_and_each_row_comes_once(stored: Stored) -> None:
    def take(_: int) -> list[int]:
        return [int(row.id) for row in reader]

    with make_reader(stored.url, schema_fields=["id"], num_epochs=3) as reader, ThreadPoolExecutor(10) as threads:
        taken = itertools.chain(*threads.map(take, range(10)))
        assert collections.Counter(taken) == dict.fromkeys(range(NUM_ROWS), 3)


def test_a_reader_that_was_stopped_says_so(stored: Stored) -> None:
    with make_reader(stored.url) as reader:
        next(reader)
    assert reader.stopped
    with pytest.raises(RuntimeError, match="Trying to read a sample after"):
        next(reader)
    with pytest.raises(RuntimeError, match="Trying to read a sample after"):
        reader.next_block()
    reader.stop()
    reader.join()


@BOTH
def test_no_thread_is_left_after_a_break_or_a_stop(make: Make, plain: Stored) -> None:
    before = threading.active_count()
    with plain_reader(make, plain, num_epochs=None) as reader:
        next(reader)
        assert threading.active_count() > before
    assert threading.active_count() == before
    reader = plain_reader(make, plain, num_epochs=None)
    next(reader)
    del reader
    assert threading.active_count() == before


def test_what_is_read_ahead_is_bounded(stored: Stored) -> None:
    with make_reader(stored.url, num_epochs=None) as reader:
        for _ in range(GROUP_ROWS * 3):
            next(reader)
        assert reader.diagnostics["items_consumed"] == 3


@pytest.mark.parametrize("url", [None, 123, [], "", "/no/scheme", ["file:///a", "hdfs://b/c"], ["file:///a", None]])
@BOTH
def test_a_url_that_is_none_is_refused(make: Make, url: Any) -> None:
    with pytest.raises(ValueError, match=r"URL|scheme"):
        make(url)


@BOTH
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reader_pool_type": "gpu"}, "Unknown reader_pool_type: gpu"),
        ({"cache_type": "gpu"}, "Unknown cache_type: gpu"),
        ({"cache_type": "local-disk"}, "needs cache_location"),
        ({"num_epochs": -10}, "num_epochs=-10"),
        ({"num_epochs": "abc"}, "num_epochs='abc'"),
        ({"schema_fields": 5}, "Fields must be either None"),
        ({"shuffle_row_drop_partitions": 0}, "must be a positive integer"),
    ],
)
def test_wrong_options_are_named(make: Make, options: dict[str, Any], text: str, stored: Stored) -> None:
    with pytest.raises(ValueError, match=text):
        make(stored.url, **options)


@BOTH
def test_unknown_options_are_named(make: Make, stored: Stored) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'xyz'"):
        make(stored.url, xyz=1)


def test_fields_that_are_not_there_are_named(stored: Stored, plain: Stored) -> None:
    with pytest.raises(ValueError, match=r"'gone'.* does not belong to the schema"):
        make_reader(stored.url, schema_fields=[UnischemaField("gone", np.int32, ())])
    with pytest.raises(RuntimeError, match=r"No fields matching the criteria '\['gone'\]'"):
        make_batch_reader(plain.url, schema_fields=["gone"])
    with make_batch_reader(plain.url, schema_fields=["gone", "id"]) as reader:
        assert next(reader)._fields == ("id",)


def test_a_folder_without_parquet_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no Parquet files"):
        make_batch_reader(tmp_path.as_uri())
    for expected in (SourceError, FileNotFoundError):
        with pytest.raises(expected, match="does not exist"):
            make_batch_reader((tmp_path / "gone").as_uri())


def test_a_schema_that_would_run_code_is_refused_as_petastorm_refuses_it(stored: Stored, tmp_path: Path) -> None:
    shutil.copytree(stored.path, tmp_path / "store")
    summary = tmp_path / "store" / "_common_metadata"
    metadata = {b"dataset-toolkit.unischema.v1": b"cos\nsystem\n(S'true'\ntR."}
    pq.write_metadata(pa.schema([("id", pa.int64())], metadata), summary)
    for expected in (RuntimeError, PetastormMetadataError):
        with pytest.raises(expected, match=r"make_reader has failed(.|\n)*'os\.system'"):
            make_reader((tmp_path / "store").as_uri())


def test_a_filesystem_that_a_user_opened_is_used(plain: Stored) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(plain.path), "/petastorm-filesystem", recursive=True)
    try:
        for filesystem, url in (
            (memory, "memory://petastorm-filesystem"),
            (fsspec.filesystem("file"), plain.url),
            (pafs.LocalFileSystem(), plain.url),
        ):
            with make_batch_reader(url, filesystem=filesystem, schema_fields=["id"]) as reader:
                assert sorted(ids_of(reader)) == list(range(60))
    finally:
        memory.rm("/petastorm-filesystem", recursive=True)
    with pytest.raises(ValueError, match="Pass the dataset's URL with storage_options"):
        make_batch_reader("s3://bucket/store", filesystem=object())


def test_a_value_that_cannot_be_decoded_names_its_field(stored: Stored, tmp_path: Path) -> None:
    rows = [row_of(1)]
    rows[0] |= {"picture": b"no picture", "matrix": b"x", "ragged": b"y", "maybe": None}
    pq.write_table(
        pa.Table.from_pylist(rows, pq.read_schema(next(stored.path.glob("*.parquet")))), tmp_path / "a.parquet"
    )
    write_metadata(tmp_path.as_uri(), SCHEMA)
    with make_reader(tmp_path.as_uri()) as reader, pytest.raises(DecodeFieldError, match="picture"):
        next(reader)


@pytest.mark.filterwarnings("ignore:Currently make_reader")
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize(
    "at", ["converter.petastorm.reader.rows", "converter.petastorm.elements.Elements.take_columns"]
)
def test_a_reader_that_is_interrupted_while_it_makes_elements_has_no_end(
    error: type[BaseException], at: str, plain: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's handler may raise anywhere. The rows that were being made are lost, so that there is no end."""

    def interrupt(*_: Any) -> Any:
        raise error("now")

    with make_reader(plain.url) as reader:
        next(reader)
        monkeypatch.setattr(at, interrupt)
        with pytest.raises(error):
            reader.next_block() if at.endswith("columns") else ids_of(reader)
        monkeypatch.undo()
        for _ in range(2):
            with pytest.raises(
                RuntimeError if error is KeyboardInterrupt else error, match=r"The reader was interrupted|now"
            ):
                ids_of(reader)


def test_a_file_that_goes_or_is_damaged_is_named(tmp_path: Path) -> None:
    for number in range(2):
        pq.write_table(pa.table({"id": range(10)}), tmp_path / f"{number}.parquet")
    with make_batch_reader(tmp_path.as_uri(), shuffle_row_groups=False) as reader:
        (tmp_path / "1.parquet").unlink()
        with pytest.raises(SourceChangedError, match=r"1\.parquet is gone"):
            list(reader)
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "1.parquet", compression="none")
    data = bytearray((tmp_path / "1.parquet").read_bytes())
    data[4:40] = b"\xff" * 36
    with make_batch_reader(tmp_path.as_uri(), shuffle_row_groups=False) as reader:
        (tmp_path / "1.parquet").write_bytes(bytes(data))
        with pytest.raises(ReadError, match=r"(?i)row group 0 of .*1\.parquet cannot be (read|decoded)"):
            list(reader)


def test_a_local_store_needs_no_copies_and_its_folder_of_copies_goes(stored: Stored, tmp_path: Path) -> None:
    location = tmp_path / "copies"
    with make_reader(
        stored.url, schema_fields=["id"], cache_type="local-disk", cache_location=str(location), num_epochs=2,
        predicate=in_set({1, 2}, "id"),
    ) as reader:  # fmt: skip
        assert location.is_dir()
        assert sorted(ids_of(reader)) == [1, 1, 2, 2]
    assert not location.exists()


def test_bytes_of_an_exchanged_file_are_not_kept_as_those_of_the_file_before(tmp_path: Path) -> None:
    """A later reader would be given them once the file is back."""
    memory, ids = fsspec.filesystem("memory"), np.arange(20_000)

    def put(values: np.ndarray[Any, Any]) -> None:
        with memory.open("exchanged/a.parquet", "wb") as file:
            pq.write_table(
                pa.table({"x": values}), file, row_group_size=2_000, use_dictionary=False, compression="none",
                write_statistics=False,
            )  # fmt: skip

    def reader() -> Reader:
        return make_batch_reader(
            "memory://exchanged", cache_type="local-disk", cache_location=str(tmp_path / "copies"), workers_count=1,
            shuffle_row_groups=False,
        )  # fmt: skip

    put(ids)
    try:
        first = memory.info("/exchanged/a.parquet")["created"]
        with reader() as before:
            assert next(before).x.tolist() == ids[:2_000].tolist()
            put(-ids)
            with pytest.raises(SourceChangedError, match="was replaced since it was opened"):
                collections.deque(before, 0)
            put(ids)
            # As a copy that is restored keeps its time.
            memory.store["/exchanged/a.parquet"].created = first
            with reader() as after:
                assert np.concatenate([batch.x for batch in after]).tolist() == ids.tolist()
    finally:
        memory.rm("/exchanged", recursive=True)


def test_a_folder_of_copies_with_other_files_stays(stored: Stored, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with make_reader(stored.url, cache_type="local-disk", cache_location=str(tmp_path)) as reader:
        next(reader)
    assert (tmp_path / "mine").read_text() == "mine"


def said_by_child(call: Callable[[], Any]) -> str:
    """What `call` returns or raises in a forked child."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        said = "ended"
        try:
            said = str(call())
        except BaseException as error:  # noqa: BLE001 (the test says what it must be)
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.long("starts two processes and reads slowly in them")
def test_a_forked_child_that_stops_a_reader_waits_for_no_thread_of_its_parent(plain: Stored) -> None:
    def slow(frame: Any) -> Any:
        time.sleep(0.2)
        return frame

    def stop() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        reader.stop()

    options: dict[str, Any] = {"reader_pool_type": "process", "transform_spec": TransformSpec(slow), "num_epochs": 4}
    with plain_reader(make_batch_reader, plain, **options) as reader:
        first = next(reader)
        # A thread waits for the next rows at a pipe, which it holds.
        assert said_by_child(stop) == "None"
        assert sorted([*first.id.tolist(), *ids_of(reader)]) == sorted([*range(len(plain.rows))] * 4)


@pytest.mark.parametrize("pool", POOLS)
@BOTH
def test_a_forked_child_is_told_that_a_reader_is_its_parents(plain: Stored, make: Make, pool: str) -> None:
    """It would wait for threads that it does not have, after rows that the parent reads, too."""
    with plain_reader(make, plain, reader_pool_type=pool, num_epochs=2) as reader, reader._lock:
        # Begun by nobody: the child may read all of it, whoever held the lock.
        expected = sorted([*range(len(plain.rows))] * 2)
        assert said_by_child(lambda: sorted(ids_of(reader))) == str(expected)
        reader._lock.release()
        first = next(reader)
        reader._lock.acquire()
        for call in (lambda: next(reader), reader.next_block):
            assert said_by_child(call) == (
                "ConverterError: This reader was begun in the process that this one was forked from. Make another one "
                "here."
            )
        reader._lock.release()
        given = first.id.tolist() if reader.batched_output else [int(first.id)]
        assert sorted([*given, *ids_of(reader)]) == expected
        reader._lock.acquire()


@pytest.mark.filterwarnings("ignore:Currently make_reader")
@pytest.mark.parametrize("num_parts", [1, 2, 7, 30])
@pytest.mark.parametrize(
    "chosen",
    [{"predicate": in_lambda(["id"], lambda each: each % 2 == 0)}, {"filters": [("id", "in", range(0, 20, 2))]}],
)
def test_parts_have_all_windows_of_the_rows_that_are_chosen(num_parts: int, chosen: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(20)}), tmp_path / "a.parquet")
    ngram = NGram({offset: ["id"] for offset in range(3)}, 2, "id")
    with make_reader(tmp_path.as_uri(), schema_fields=ngram, shuffle_row_drop_partitions=num_parts, **chosen) as reader:
        assert sorted(window[0].id for window in reader) == [0, 2, 4, 6, 8, 10, 12, 14]


@BOTH
@pytest.mark.filterwarnings("ignore:Currently make_reader", "ignore:selected_fields specified")
@pytest.mark.parametrize("spec", [{"removed_fields": ["id"]}, {"selected_fields": ["nothing"]}])
def test_a_transform_that_leaves_no_field_is_refused(make: Make, spec: dict[str, Any], tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(4)}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="transform_spec leaves no field of id"):
        make(tmp_path.as_uri(), transform_spec=TransformSpec(**spec))


def test_an_empty_folder_of_copies_that_the_user_made_stays(stored: Stored, tmp_path: Path) -> None:
    with make_reader(stored.url, cache_type="local-disk", cache_location=str(tmp_path)) as reader:
        next(reader)
    assert tmp_path.is_dir()


@BOTH
@pytest.mark.filterwarnings("ignore:Currently make_reader")
def test_old_dates_of_sparks_legacy_mode_are_days_of_todays_calendar(make: Make, tmp_path: Path) -> None:
    counted = np.array(["1500-01-10", "2026-01-02"], "M8[D]")
    table = pa.table({"at": pa.array([0, 1]), "day": counted, "days": pa.array([[each] for each in counted.tolist()])})
    noted = table.replace_schema_metadata({"org.apache.spark.legacyDateTime": ""})
    pq.write_table(noted, tmp_path / "a.parquet")
    with make(tmp_path.as_uri()) as reader:
        elements = list(reader)
    days = [np.datetime64(day, "D") for each in elements for day in np.atleast_1d(each.day)]
    assert days == [np.datetime64("1500-01-01"), np.datetime64("2026-01-02")]
    listed = [np.datetime64(day, "D") for each in elements for day in np.ravel(each.days)]
    assert listed == days


@BOTH
@pytest.mark.filterwarnings("ignore:Currently make_reader")
def test_old_times_of_sparks_legacy_mode_are_refused(make: Make, tmp_path: Path) -> None:
    times = pa.array(np.array(["1500-01-10"], "M8[us]")).cast(pa.timestamp("us", "UTC"))
    noted = pa.table({"at": times}).replace_schema_metadata({"org.apache.spark.legacyDateTime": ""})
    pq.write_table(noted, tmp_path / "a.parquet")
    with make(tmp_path.as_uri()) as reader, pytest.raises(SourceError, match="'at' has times before 1900 in the calen"):
        list(reader)
