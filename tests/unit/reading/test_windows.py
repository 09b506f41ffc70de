"""From files to batches, without Spark: exact rows in the plan's order, whoever reads them and however it ends."""

from __future__ import annotations

import dataclasses
import json
import logging
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from converter import DatasetConverter, open_converter
from converter.cache import roots
from converter.dataset import borrow_files
from converter.errors import (
    CacheCorruptError,
    CacheError,
    ConverterError,
    EmptyShardError,
    NullValueError,
    ReadError,
    SourceChangedError,
    SourceError,
)
from converter.loading.options import LoaderOptions
from converter.scans.passes import scan_statistics
from tests.columns import ALL, ID, SCALARS, TENSORS, Column, assert_batch, assert_column, numbers
from tests.entries import write_batches, write_converter

NUM_ROWS = 1003
PARTITIONS = [[range(400)], [range(400, 401)], [range(401, 700), range(700, NUM_ROWS)]]
PLAIN = (*SCALARS, *TENSORS)
NULLABLE = (ID, *(Column(name=c.name, dtype=c.dtype, shape=c.shape, nullable=True) for c in ALL[1:]))
NUMBERS = ("a_int8", "a_float32", "a_float64", "id")
WINDOW = 150


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Three files of several row groups, without nulls and ragged rows."""
    directory = tmp_path_factory.mktemp("plain")
    with write_converter(directory, PLAIN, PARTITIONS, row_group_bytes=16_000) as found:
        assert found._manifest.num_row_groups > 8
        yield found


@pytest.fixture(scope="module")
def with_nulls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Every column but the id has nulls, and one is ragged."""
    with write_converter(tmp_path_factory.mktemp("nulls"), NULLABLE, PARTITIONS, row_group_bytes=16_000) as found:
        yield found


def data_files(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.rglob("*.parquet"))


def ids_of(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["id"].tolist()]


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("converter-read")]


# Exact rows, in order


@pytest.mark.one_in(5)
@pytest.mark.parametrize("workers_count", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 7, 64, 400, 1003, 5000])
def test_every_batch_has_exactly_its_rows(converter: DatasetConverter, batch_size: int, workers_count: int) -> None:
    names = [column.name for column in PLAIN] if batch_size > 1 else ["id", "text", "vector"]
    columns = [column for column in PLAIN if column.name in names]
    reader = converter.make_batch_reader(
        batch_size=batch_size, columns=names, workers_count=workers_count, shuffle_window_rows=WINDOW
    )
    batches = list(reader)
    assert len(batches) == len(reader) == -(-NUM_ROWS // batch_size)
    for index, batch in enumerate(batches):
        assert_batch(batch, columns, range(index * batch_size, min((index + 1) * batch_size, NUM_ROWS)))


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}, {"shuffle": True, "drop_last": True}], ids=str)
def test_the_order_is_one_for_any_threads_batches_and_columns(converter: DatasetConverter, options: Any) -> None:
    expected = ids_of(converter.make_batch_reader(shuffle_window_rows=WINDOW, batch_size=17, **options))
    if not options.get("drop_last"):
        assert sorted(expected) == list(range(NUM_ROWS))
    assert (expected == sorted(expected)) == (not options)
    for workers_count in (1, 2, 4):
        for batch_size, columns in ((1, ["id"]), (59, ["id", "cube"]), (17, None)):
            reader = converter.make_batch_reader(
                shuffle_window_rows=WINDOW,
                batch_size=batch_size,
                columns=columns,
                workers_count=workers_count,
                **options,
            )
            found = ids_of(reader)
            shared = min(len(found), len(expected))
            assert found[:shared] == expected[:shared]
            assert shared > NUM_ROWS - 59


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_and_numpy_give_the_same_batches(converter: DatasetConverter, num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 100, "shuffle": True, "seed": 5, "shuffle_window_rows": WINDOW}
    with (
        converter.make_torch_dataloader(num_workers=num_workers, **options) as loader,
        converter.make_batch_reader(**options) as reader,
    ):
        assert isinstance(loader, torch.utils.data.DataLoader)
        assert len(loader) == len(reader) == 11
        for epoch in range(2):
            batches, expected = list(loader), list(reader)
            assert len(batches) == 11
            assert sorted(ids_of(batches)) == list(range(NUM_ROWS)), epoch
            for batch, other in zip(batches, expected, strict=True):
                assert_batch(batch, PLAIN, other["id"].tolist())
                assert_batch(other, PLAIN, other["id"].tolist())


@pytest.mark.parametrize("shuffle", [False, True])
def test_shards_cover_every_row_once(converter: DatasetConverter, shuffle: bool) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "columns": ["id"], "shuffle_window_rows": WINDOW, "shard_count": 3}
    kept = [ids_of(converter.make_batch_reader(cur_shard=i, uneven="keep", **options)) for i in range(3)]
    assert sorted(kept[0] + kept[1] + kept[2]) == list(range(NUM_ROWS))
    dropped = [ids_of(converter.make_batch_reader(cur_shard=i, uneven="drop", **options)) for i in range(3)]
    assert [len(part) for part in dropped] == [NUM_ROWS // 3] * 3
    assert len(set(dropped[0] + dropped[1] + dropped[2])) == NUM_ROWS // 3 * 3


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_stack_is_its_columns_side_by_side(converter: DatasetConverter, framework: str) -> None:
    make = converter.make_batch_reader if framework == "numpy" else converter.make_torch_dataloader
    by_name = {column.name: column for column in SCALARS}
    options: dict[str, Any] = {"columns": ["id", "x"], "stack": {"x": NUMBERS, "y": ["id", "a_int64"]}}
    for batch in make(batch_size=100, shuffle=True, shuffle_window_rows=WINDOW, **options):
        assert list(batch) == ["id", "x", "y"]
        ids = batch["id"].tolist()
        expected = np.stack([by_name[name].values(ids).astype("f4") for name in NUMBERS], axis=1)
        np.testing.assert_array_equal(np.asarray(batch["x"]), expected, strict=True)
        assert np.asarray(batch["y"]).dtype == np.int64
        np.testing.assert_array_equal(np.asarray(batch["y"])[:, 0], ids)


# A batch belongs to the caller


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_list_of_batches_keeps_every_one_and_none_writes_into_another(
    converter: DatasetConverter, num_workers: int
) -> None:
    columns = [column for column in PLAIN if column.dtype not in ("str", "bytes")]
    names = [column.name for column in columns]
    with converter.make_torch_dataloader(columns=names, batch_size=30, num_workers=num_workers) as loader:
        batches = list(loader)
    for index in range(0, len(batches), 2):
        for tensor in batches[index].values():
            tensor.zero_()
    for index in range(1, len(batches), 2):
        assert_batch(batches[index], columns, range(index * 30, min(index * 30 + 30, NUM_ROWS)))
    assert_batch(next(iter(converter.make_batch_reader(columns=names, batch_size=30))), columns, range(30))


def test_numpy_batches_are_writable_and_apart(converter: DatasetConverter) -> None:
    columns = [column for column in PLAIN if column.dtype not in ("str", "bytes")]
    batches = list(converter.make_batch_reader(columns=[column.name for column in columns], batch_size=30))
    for batch in batches[::2]:
        for array in batch.values():
            array.view("u1")[...] = 0
    for index in range(1, len(batches), 2):
        assert_batch(batches[index], columns, range(index * 30, min(index * 30 + 30, NUM_ROWS)))


def test_a_write_into_a_later_batch_does_not_spoil_the_gradient_of_an_earlier_one(converter: DatasetConverter) -> None:
    with converter.make_torch_dataloader(columns=["vector"], batch_size=10) as loader:
        batches = list(loader)
    weights = torch.ones(3, requires_grad=True)
    loss = ((batches[0]["vector"] * weights) ** 2).sum()
    batches[1]["vector"].add_(1)
    loss.backward()
    assert weights.grad is not None


# However it ends


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_breaking_off_leaves_no_thread(converter: DatasetConverter, framework: str) -> None:
    make = converter.make_batch_reader if framework == "numpy" else converter.make_torch_dataloader
    with make(batch_size=10, shuffle_window_rows=20, workers_count=3) as reader:
        iterator = iter(reader)
        next(iterator)
        assert reader_threads()
        # What `for … break` does with its iterator.
        del iterator
        assert not reader_threads()
        held = iter(reader)
        next(held)
        assert reader_threads()
    assert not reader_threads()
    # To end here would look like a short epoch.
    with pytest.raises(ConverterError, match="This loader was closed"):
        next(held)


def test_an_error_of_the_consumer_leaves_no_thread(converter: DatasetConverter) -> None:
    def consume() -> None:
        with converter.make_batch_reader(batch_size=10, shuffle_window_rows=20) as reader:
            for _ in reader:
                raise KeyError("of the consumer")

    with pytest.raises(KeyError, match="of the consumer"):
        consume()
    assert not reader_threads()


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.long("starts processes"))])
def test_two_iterations_at_once_do_not_disturb_each_other(converter: DatasetConverter, num_workers: int) -> None:
    with converter.make_torch_dataloader(
        batch_size=100, columns=["id", "vector"], num_workers=num_workers, shuffle=True, shuffle_window_rows=WINDOW
    ) as loader:
        pairs = list(zip(loader, loader, strict=True))
    assert len(pairs) == 11
    for one, other in pairs:
        assert torch.equal(one["id"], other["id"])
        assert_batch(one, [ID, TENSORS[0]], other["id"].tolist())
    assert sorted(ids_of(one for one, _ in pairs)) == list(range(NUM_ROWS))


# Epochs


@pytest.mark.parametrize(
    "framework", ["numpy", "torch", pytest.param("torch with processes", marks=pytest.mark.long("starts processes"))]
)
def test_an_iteration_that_ends_moves_on_and_one_left_early_does_not(
    converter: DatasetConverter, framework: str
) -> None:
    options: dict[str, Any] = {"batch_size": 200, "columns": ["id"], "shuffle": True, "shuffle_window_rows": WINDOW}
    if framework == "numpy":
        loader: Any = converter.make_batch_reader(**options)
    else:
        loader = converter.make_torch_dataloader(num_workers=2 if "processes" in framework else 0, **options)
    with loader:
        peeked = next(iter(loader))["id"].tolist()
        first, second = ids_of(loader), ids_of(loader)
        assert first[:200] == peeked
        assert first != second
        assert sorted(first) == sorted(second) == list(range(NUM_ROWS))
        loader.set_epoch(0)
        assert ids_of(loader) == first
        assert ids_of(loader) == second
        loader.set_epoch(7)
        seventh = ids_of(loader)
        assert seventh not in (first, second)
        loader.set_epoch(7)
        assert ids_of(loader) == seventh


@pytest.mark.parametrize(("epoch", "kind"), [(-1, ValueError), (1.5, TypeError), (None, TypeError)])
def test_a_bad_epoch_names_itself(converter: DatasetConverter, epoch: Any, kind: Any) -> None:
    for make in (converter.make_batch_reader, converter.make_torch_dataloader):
        with pytest.raises(kind, match="epoch must be"):
            make().set_epoch(epoch)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.long("starts processes"))])
def test_two_epochs_of_one_iteration_are_two_iterations(converter: DatasetConverter, num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 100, "columns": ["id"], "shuffle": True, "shuffle_window_rows": WINDOW}
    with (
        converter.make_torch_dataloader(num_epochs=2, num_workers=num_workers, **options) as both,
        converter.make_batch_reader(**options) as single,
    ):
        assert len(both) == 22
        expected = [ids_of(single) for _ in range(4)]
        assert ids_of(both) == expected[0] + expected[1]
        assert ids_of(both) == expected[2] + expected[3]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_without_a_number_of_epochs_there_is_no_end_and_no_length(converter: DatasetConverter, framework: str) -> None:
    make = converter.make_batch_reader if framework == "numpy" else converter.make_torch_dataloader
    options: dict[str, Any] = {"batch_size": 1000, "columns": ["id"], "shuffle": True, "shuffle_window_rows": WINDOW}
    expected = [ids_of(converter.make_batch_reader(num_epochs=3, **options))]
    with make(num_epochs=None, **options) as loader:
        iterator = iter(loader)
        assert ids_of(next(iterator) for _ in range(6)) == expected[0]
        with pytest.raises(TypeError, match="With num_epochs=None there is no last batch, so there is no length"):
            len(loader)
    assert not reader_threads()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_loader_is_closed_after_its_block(converter: DatasetConverter, framework: str) -> None:
    make = converter.make_batch_reader if framework == "numpy" else converter.make_torch_dataloader
    with make() as loader:
        pass
    with pytest.raises(ConverterError, match="This loader was closed: its `with` block has ended"):
        iter(loader)


# Files that are not what was written


def test_an_error_of_a_worker_process_keeps_its_class(small: DatasetConverter, cache_dir: Path) -> None:
    data_files(cache_dir)[0].unlink()
    with (
        small.make_torch_dataloader(num_workers=1) as loader,
        pytest.raises(SourceChangedError, match="is not there"),
    ):
        list(loader)


# Arguments


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
    ({"batch_size": 1.5}, TypeError, "batch_size must be an integer"),
    ({"batch_size": True}, TypeError, "batch_size must be an integer"),
    ({"num_epochs": 0}, ValueError, "num_epochs must be at least 1"),
    ({"num_epochs": "2"}, TypeError, "num_epochs must be an integer"),
    ({"columns": ["idd"]}, ValueError, r"columns: There is no column 'idd'\. Did you mean 'id'\?"),
    ({"columns": "id"}, TypeError, "columns must be a list of names, got 'id'"),
    ({"columns": []}, ValueError, "columns must name at least one column"),
    ({"columns": ["id", "id"]}, ValueError, "columns must name at least one column, and each once"),
    ({"stack": {"id": ["a_int8"]}}, ValueError, "stack: 'id' is a column already"),
    ({"stack": {"x": []}}, ValueError, "stack: 'x' needs a list of column names"),
    ({"stack": {"x": "id"}}, ValueError, "stack: 'x' needs a list of column names"),
    ({"stack": {"x": ["no"]}}, ValueError, "stack: There is no column 'no'"),
    ({"stack": {"x": ["vector"]}}, ValueError, "stack: column 'vector' of 'x' has dtype float32 and shape"),
    ({"stack": {"x": ["text"]}}, ValueError, "stack: column 'text' of 'x' has dtype str"),
    ({"stack": {"x": ["day"]}}, ValueError, "stack: column 'day' of 'x' has dtype datetime64"),
    ({"seed": -1}, ValueError, "seed must be at least 0"),
    ({"seed": 0.5}, TypeError, "seed must be an integer"),
    ({"shuffle_window_rows": 0}, ValueError, "shuffle_window_rows must be at least 1"),
    ({"cur_shard": 0}, ValueError, "cur_shard and shard_count go together"),
    ({"shard_count": 2}, ValueError, "cur_shard and shard_count go together"),
    ({"cur_shard": 2, "shard_count": 2}, ValueError, "0 <= cur_shard < shard_count, got cur_shard=2 and shard_count=2"),
    ({"cur_shard": -1, "shard_count": 2}, ValueError, "cur_shard must be at least 0"),
    ({"cur_shard": 0, "shard_count": 0}, ValueError, "shard_count must be at least 1"),
    ({"cur_shard": 0, "shard_count": 2000}, EmptyShardError, "1003 rows cannot be divided among 2000 shards"),
    ({"uneven": "all"}, ValueError, "uneven must be 'drop', 'pad', 'keep' or None, got 'all'"),
    ({"shuffle": "yes"}, TypeError, "shuffle must be"),
    ({"drop_last": "no"}, TypeError, "drop_last must be"),
    ({"nulls": "zero"}, ValueError, "nulls must be 'raise', 'mask' or a dict"),
    ({"nulls": {"no": 0}}, ValueError, "nulls: There is no column 'no'"),
    ({"nulls": {"id": "x"}}, ValueError, "nulls: 'x' cannot stand for a null of column 'id'"),
    ({"nulls": None}, TypeError, "nulls must be 'raise', 'mask' or a dict"),
    ({"nulls": 0}, TypeError, "nulls must be 'raise', 'mask' or a dict"),
    ({"columns": [1]}, TypeError, "columns must be a list of names"),
    ({"stack": ["id"]}, TypeError, "stack must be a dict of name to column names"),
    ({"ragged": "cut"}, ValueError, "ragged must be 'raise', 'pad' or 'nested'"),
    ({"workers_count": 0}, ValueError, "workers_count must be at least 1"),
    ({"num_workers": -1}, ValueError, "num_workers must be at least 0"),
]


@pytest.mark.parametrize(("options", "kind", "said"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_argument_names_itself(converter: DatasetConverter, options: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        converter.make_torch_dataloader(**options)
    if "num_workers" not in options:
        with pytest.raises(kind, match=said):
            converter.make_batch_reader(**options)


# Nulls and ragged rows


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_masks_say_which_values_are_present(with_nulls: DatasetConverter, framework: str) -> None:
    make = with_nulls.make_batch_reader if framework == "numpy" else with_nulls.make_torch_dataloader
    columns = [column for column in NULLABLE if column.name != "words"]
    rows = 0
    for batch in make(nulls="mask", columns=[c.name for c in columns], batch_size=90, shuffle_window_rows=WINDOW):
        ids = batch["id"].tolist()
        rows += len(ids)
        assert [name for name in batch if not name.endswith("__valid")] == [column.name for column in columns]
        assert [name for name in batch if name.endswith("__valid")] == [f"{c.name}__valid" for c in columns[1:]]
        for column in columns:
            assert_column(batch[column.name], column, ids)
        for column in columns[1:]:
            np.testing.assert_array_equal(np.asarray(batch[f"{column.name}__valid"]), column.valid(ids), strict=True)
    assert rows == NUM_ROWS


def test_keys_do_not_depend_on_the_batch_or_the_row_group(cache_dir: Path) -> None:
    column = Column(name="x", dtype="int32", nullable=True)
    ids = np.arange(500)
    present = ids[column.valid(ids)].tolist()
    absent = ids[~column.valid(ids)].tolist()
    with write_converter(cache_dir, (ID, column), [[present], [absent]], row_group_bytes=800) as converter:
        for batch in converter.make_batch_reader(nulls="mask", batch_size=10, stack={"s": ["id", "x"]}):
            assert list(batch) == ["s", "s__valid"]
            np.testing.assert_array_equal(batch["s__valid"][:, 1], column.valid(batch["s"][:, 0].astype(int)))
            assert batch["s__valid"][:, 0].all()


def test_nulls_are_filled_by_column(with_nulls: DatasetConverter) -> None:
    fills: dict[str, Any] = {"a_int8": 7, "a_float64": -0.5, "text": "none", "raw": b"none", "vector": [1, 2, 3]}
    by_name = {column.name: column for column in NULLABLE}
    for batch in with_nulls.make_batch_reader(nulls=fills, columns=["id", *fills], batch_size=64):
        ids = batch["id"].tolist()
        for name, fill in fills.items():
            assert_column(batch[name], by_name[name], ids, fill=fill)


def test_nulls_of_a_stack_are_filled(with_nulls: DatasetConverter) -> None:
    by_name = {column.name: column for column in NULLABLE}
    names = ("a_int8", "a_float32")
    options: dict[str, Any] = {"nulls": {"a_int8": 3, "a_float32": -1}, "stack": {"x": names}, "columns": ["id", "x"]}
    for batch in with_nulls.make_batch_reader(shuffle=True, **options):
        ids = batch["id"].tolist()
        expected = [
            by_name[name].values(ids, fill=fill).astype("f4") for name, fill in zip(names, (3, -1), strict=True)
        ]
        np.testing.assert_array_equal(batch["x"], np.stack(expected, axis=1), strict=True)


def test_nulls_are_refused_before_anything_is_read(with_nulls: DatasetConverter) -> None:
    with pytest.raises(NullValueError, match=r"'a_int8' holds nulls, and nulls='raise'") as raised:
        with_nulls.make_torch_dataloader(columns=["id", "a_int8"])
    assert raised.value.column == "a_int8"
    with pytest.raises(NullValueError, match="'a_float32' holds nulls"):
        with_nulls.make_torch_dataloader(stack={"x": ["id", "a_float32"]}, columns=["id"])
    with pytest.raises(NullValueError, match="'a_int16' holds nulls"):
        with_nulls.make_torch_dataloader(columns=["a_int16", "a_int8"], nulls={"a_int8": 0})
    assert ids_of(with_nulls.make_batch_reader(columns=["id"])) == list(range(NUM_ROWS))


@pytest.mark.parametrize("nullable", [False, True])
def test_ragged_rows_arrive_padded_nested_or_not_at_all(cache_dir: Path, nullable: bool) -> None:
    column = Column(name="words", dtype="int32", shape=None, nullable=nullable)
    options: dict[str, Any] = {"batch_size": 70, "shuffle": True, "nulls": "mask"}
    with write_converter(cache_dir, (ID, column), PARTITIONS, row_group_bytes=2000) as converter:
        for batch in converter.make_batch_reader(ragged="nested", **options):
            ids = batch["id"].tolist()
            assert_column(list(batch["words"]), column, ids)
        for batch in converter.make_torch_dataloader(ragged="nested", **options):
            assert_column(list(batch["words"].unbind()), column, batch["id"].tolist())
        for make in (converter.make_batch_reader, converter.make_torch_dataloader):
            for batch in make(ragged="pad", **options):
                rows = column.values(batch["id"].tolist())
                padded, lengths = np.asarray(batch["words"]), np.asarray(batch["words__length"])
                assert lengths.tolist() == [len(row) for row in rows]
                assert padded.shape == (len(rows), max(map(len, rows)))
                for found, row in zip(padded, rows, strict=True):
                    assert found.tolist() == [*row.tolist(), *[0] * (len(found) - len(row))]
                assert ("words__valid" in batch) == nullable
        with pytest.raises(SourceError, match=r"'words' has rows of different lengths, .*ragged='pad'") as raised:
            converter.make_torch_dataloader(nulls="mask")
        assert raised.value.column == "words"


def test_partitions_that_each_have_one_length_are_ragged_together(cache_dir: Path) -> None:
    column = Column(name="words", dtype="int64", shape=None)
    partitions = [[[row for row in range(40) if numbers("words", [row])[0] % 4 == length]] for length in (1, 2)]
    with write_converter(cache_dir, (ID, column), partitions) as converter:
        assert {field.name: field.shape for field in converter.schema} == {"id": (), "words": None}
        with converter.make_batch_reader(ragged="pad") as reader:
            batches = list(reader)
    ids, lengths = (np.concatenate([batch[name] for batch in batches]).tolist() for name in ("id", "words__length"))
    expected = [(row, length) for length, (rows,) in zip((1, 2), partitions, strict=True) for row in rows]
    assert list(zip(ids, lengths, strict=True)) == expected


# Life and death


def test_a_deleted_converter_says_so(small: DatasetConverter, cache_dir: Path) -> None:
    small.delete()
    assert not data_files(cache_dir)
    for use in (small.make_torch_dataloader, small.make_batch_reader):
        with pytest.raises(CacheError, match=r"was deleted, so it has no rows any more\. Convert again"):
            use()
    assert ", deleted)" in repr(small)
    small.delete()
    assert [path.name for path in (cache_dir / roots.DIRECTORY).iterdir()] == [".owner"]


def test_an_entry_that_a_block_has_kept_is_deleted_after_it(cache_dir: Path) -> None:
    with write_converter(cache_dir, (ID,), [[range(9)]], delete_on_exit=False) as kept:
        assert data_files(cache_dir)
    assert data_files(cache_dir)
    assert ", closed)" in repr(kept)
    kept.delete()
    assert [path.name for path in (cache_dir / roots.DIRECTORY).iterdir()] == [".owner"]
    kept.delete()
    assert ", deleted)" in repr(kept)


def test_an_entry_that_was_kept_is_deleted_once_the_last_one_closes_it(cache_dir: Path) -> None:
    with write_converter(cache_dir, (ID,), [[range(9)]], delete_on_exit=False) as kept:
        pass
    with open_converter(kept.url) as other:
        kept.delete()
        assert ids_of(other.make_batch_reader()) == list(range(9))
    assert [path.name for path in (cache_dir / roots.DIRECTORY).iterdir()] == [".owner"]


def test_a_copy_reads_and_deletes_nothing(small: DatasetConverter, cache_dir: Path) -> None:
    copy = pickle.loads(pickle.dumps(small))
    assert (len(copy), copy.url, copy.fingerprint, copy.schema) == (200, small.url, small.fingerprint, small.schema)
    assert ids_of(copy.make_batch_reader()) == list(range(200))
    copy.delete()
    assert len(data_files(cache_dir)) == 2
    with pytest.raises(CacheError, match="so it has no rows any more"):
        copy.make_batch_reader()
    assert ids_of(small.make_batch_reader()) == list(range(200))


def test_a_manifest_without_statistics_is_read_and_counted_at_first_use(small: DatasetConverter) -> None:
    manifest = dataclasses.replace(small._manifest, statistics={})
    bare = borrow_files(small._storage, manifest)
    assert ids_of(bare.make_batch_reader()) == list(range(200))
    assert bare.statistics["id"].max == 199


def test_an_entry_whose_file_is_gone_is_not_opened(small: DatasetConverter, cache_dir: Path) -> None:
    data_files(cache_dir)[0].unlink()
    with pytest.raises(CacheCorruptError, match=r"is damaged: .*is not there"):
        open_converter(small.url)


# Statistics


@pytest.mark.parametrize("kind", ["plain", "nulls"])
def test_statistics_are_numpys(converter: DatasetConverter, with_nulls: DatasetConverter, kind: str) -> None:
    columns, found = (PLAIN, converter) if kind == "plain" else (NULLABLE, with_nulls)
    ids = list(range(NUM_ROWS))
    assert list(found.statistics) == [column.name for column in columns]
    for column in columns:
        statistics, valid = found.statistics[column.name], column.valid(ids)
        assert statistics.null_count == NUM_ROWS - valid.sum()
        if column.dtype in ("str", "bytes"):
            assert (statistics.min, statistics.max, statistics.mean) == (None, None, None)
            continue
        values = column.values(ids)
        present = np.concatenate(values) if column.shape is None else values[valid]
        if column.dtype.startswith("datetime64"):
            assert np.datetime64(statistics.min.replace(tzinfo=None) if column.name == "at" else statistics.min) == (
                present.min()
            )
            assert (statistics.mean, statistics.std) == (None, None)
            continue
        assert (statistics.min, statistics.max) == (present.min(), present.max())
        wide = present.astype(float)
        np.testing.assert_allclose([statistics.mean, statistics.std], [wide.mean(), wide.std()], rtol=1e-9)
        if column.shape:
            assert (statistics.shortest, statistics.longest) == (int(np.prod(column.shape)),) * 2
            np.testing.assert_allclose(statistics.element_mean, wide.mean(axis=0), rtol=1e-9)
            np.testing.assert_allclose(statistics.element_std, wide.std(axis=0), rtol=1e-9, atol=1e-12)
        if column.shape is None:
            lengths = [len(row) for row, ok in zip(values, valid, strict=True) if ok]
            assert (statistics.shortest, statistics.longest) == (min(lengths), max(lengths))
            assert statistics.element_mean is None


@pytest.mark.parametrize("kind", ["plain", "nulls"])
def test_a_scan_finds_what_the_writers_took(
    converter: DatasetConverter, with_nulls: DatasetConverter, kind: str
) -> None:
    known = converter if kind == "plain" else with_nulls
    found = scan_statistics(known._source(LoaderOptions(batch_size=100, nulls="mask", ragged="pad")))
    assert list(found) == list(known.statistics)
    for name, taken in known.statistics.items():
        scanned = found[name]
        for exact in ("field", "null_count", "nan_count", "min", "max", "shortest", "longest"):
            assert getattr(scanned, exact) == getattr(taken, exact), (name, exact)
        for near in ("mean", "std", "element_mean", "element_std"):
            one, other = getattr(scanned, near), getattr(taken, near)
            assert (one is None) == (other is None), (name, near)
            if one is not None:
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_nans_are_counted_and_left_out(cache_dir: Path) -> None:
    values = np.array([1.0, np.nan, 3.0, np.nan])
    batch = pa.RecordBatch.from_arrays([pa.array(values)], names=["c0"])
    with write_batches(cache_dir, [Column(name="x", dtype="float64").plan()], [[batch]]) as converter:
        statistics = converter.statistics["x"]
    assert (statistics.nan_count, statistics.null_count) == (2, 0)
    assert (statistics.min, statistics.max, statistics.mean, statistics.std) == (1.0, 3.0, 2.0, 1.0)


# Sorted rows


def clustered(cache_dir: Path, *, is_sorted: bool) -> DatasetConverter:
    """Rows whose column `label` grows with the row, or does not."""
    column = Column(name="label", dtype="int32")
    ids = np.arange(4000)
    order = np.argsort(column.values(ids), kind="stable") if is_sorted else ids
    return write_converter(cache_dir, (ID, column), [[order.tolist()]], row_group_bytes=2000)


def test_a_shuffle_of_sorted_rows_suggests_mixing_once(cache_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        clustered(cache_dir, is_sorted=True) as converter,
        caplog.at_level(logging.INFO, logger="converter.loading.forecast"),
    ):
        converter.make_batch_reader(shuffle_window_rows=300)
        assert "sorted or clustered" not in caplog.text
        for _ in range(3):
            converter.make_batch_reader(shuffle=True, shuffle_window_rows=300)
    assert caplog.text.count("sorted or clustered by 'label', and shuffling mixes windows of 300 rows") == 1
    assert caplog.text.count("shuffle_rows_seed=…") == 1


@pytest.mark.parametrize("case", ["mixed rows", "one window", "another column"])
def test_where_there_is_nothing_to_mix_nothing_is_suggested(
    cache_dir: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    with (
        clustered(cache_dir, is_sorted=case != "mixed rows") as converter,
        caplog.at_level(logging.INFO, logger="converter.loading.forecast"),
    ):
        converter.make_batch_reader(
            shuffle=True,
            shuffle_window_rows=4000 if case == "one window" else 300,
            columns=["id"] if case == "another column" else ["label", "id"],
        )
    assert "sorted or clustered" not in caplog.text


def read_again(url: str, **options: Any) -> None:
    with open_converter(url) as converter, converter.make_batch_reader(**options) as reader:
        list(reader)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("options", [{"nulls": "mask", "ragged": "pad"}, {"nulls": {}, "ragged": "nested"}])
@pytest.mark.parametrize("name", ["id", "flag", "text", "day", "vector", "words"])
def test_a_column_of_another_type_than_the_manifest_says_is_named(tmp_path: Path, name: str, options: Any) -> None:
    kinds = {"flag": "bool", "text": "str", "day": "datetime64[D]"}
    known = [Column(name=key, dtype=dtype) for key, dtype in kinds.items()]
    known += [Column(name="vector", dtype="float32", shape=(2, 2)), Column(name="words", dtype="int16", shape=None)]
    with write_converter(tmp_path, (ID, *known), [[range(20)]]) as converter:
        path, url = Path(converter._storage.path(), roots.MANIFEST), converter.url
        document = json.loads(path.read_bytes())
        number = converter.schema.names.index(name)
        before = document["schema"][number]
        for dtype in ("bool", "int16", "float32", "datetime64[us]", "str"):
            for shape, ndim in (([], 1), ([2, 2], 1), ([0], 1), (None, 1), (None, 2)):
                # Of one kind of number Spark widens another; a day may be part of a time.
                is_like = shape == [] and (name, dtype) in (
                    ("id", "int16"),
                    ("id", "float32"),
                    ("day", "datetime64[us]"),
                )
                # Rows of one shape may stand beside others.
                is_right = dtype == before["dtype"] and (shape is None or shape == before["shape"] or name == "words")
                if is_like or is_right:
                    continue
                said = {"name": name, "dtype": dtype, "shape": shape, "has_nulls": False, "ragged_ndim": ndim}
                document["schema"][number] = said
                path.write_text(json.dumps(document))
                with pytest.raises((ReadError, CacheCorruptError), match=f"'{name}'|is not a manifest") as caught:
                    read_again(url, columns=[name], **options)
                assert str(caught.value.path).endswith((".parquet", roots.MANIFEST))
        document["schema"][number] = before
        path.write_text(json.dumps(document))
