"""A real `torch.utils.data.DataLoader` over rows that Spark wrote."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch.utils.data import DataLoader

import converter.frameworks.torch.loader as loader_module
from converter import DatasetConverter, NullValueError, make_spark_converter
from tests.rows import ODD_NAMES, assert_same, known_rows, known_valid, known_values

pytestmark = pytest.mark.short

NUM_ROWS = 700


@pytest.fixture(scope="module")
def converter(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    # Small row groups, so that there are several in each of the files.
    cache_dir = tmp_path_factory.mktemp("cache")
    with make_spark_converter(known_rows(spark, NUM_ROWS), cache_dir=cache_dir, row_group_bytes=20_000) as made:
        yield made


@pytest.fixture(scope="module")
def with_nulls(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    df = known_rows(spark, NUM_ROWS, nulls=True)
    with make_spark_converter(df, cache_dir=tmp_path_factory.mktemp("cache"), row_group_bytes=20_000) as made:
        yield made


def as_numpy(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of tensors as a batch of NumPy arrays; checks that it is one."""
    found: dict[str, Any] = {}
    for name, values in batch.items():
        if isinstance(values, list):
            found[name] = np.empty(len(values), object)
            found[name][:] = values
        elif values.is_nested:
            found[name] = np.empty(len(values), object)
            found[name][:] = [row.numpy() for row in values.unbind()]
        else:
            found[name] = values.numpy()
            assert not values.requires_grad
    return found


def expected_batch(ids: Any, **options: Any) -> dict[str, Any]:
    """What torch gets: it has no dates or times of its own."""
    values = known_values(ids, **options)
    values["date"] = values["date"].astype("i8").astype("i4")
    for name in ("timestamp", "timestamp_ntz"):
        values[name] = values[name].astype("i8")
    return values


def ids_of(loader: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in loader]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_batch_has_exactly_its_rows(converter: DatasetConverter, num_workers: int) -> None:
    with converter.make_torch_dataloader(batch_size=96, ragged="nested", num_workers=num_workers) as loader:
        assert isinstance(loader, DataLoader)
        assert loader.batch_size == 96
        assert loader.num_workers == num_workers
        assert len(loader) == 8
        batches = list(loader)
    assert len(batches) == 8
    for index, batch in enumerate(batches):
        assert_same(as_numpy(batch), expected_batch(range(index * 96, min((index + 1) * 96, NUM_ROWS))))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_masks_arrive_beside_their_columns(with_nulls: DatasetConverter, num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 100, "nulls": "mask", "ragged": "nested", "num_workers": num_workers}
    with with_nulls.make_torch_dataloader(**options) as loader:
        batches = [as_numpy(batch) for batch in loader]
    for index, batch in enumerate(batches):
        ids = np.arange(index * 100, (index + 1) * 100)
        masks = {name: batch.pop(f"{name}__valid") for name in list(batch) if f"{name}__valid" in batch}
        assert_same(batch, expected_batch(ids, nulls=True))
        assert_same(masks, known_valid(ids))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 33, NUM_ROWS, 10_000])
def test_the_length_is_true_for_every_batch_size(
    converter: DatasetConverter, batch_size: int, num_workers: int
) -> None:
    for drop_last in (False, True):
        with converter.make_torch_dataloader(
            batch_size=batch_size, columns=["id"], drop_last=drop_last, num_workers=num_workers, num_epochs=2
        ) as loader:
            found = ids_of(loader)
            assert len(found) == len(loader)
        whole = NUM_ROWS // batch_size * batch_size
        epoch = list(range(whole if drop_last else NUM_ROWS))
        assert [row for batch in found for row in batch] == epoch * 2


def test_strings_and_padded_rows_arrive_as_torch_can_hold_them(converter: DatasetConverter) -> None:
    columns = ["id", "string", "binary", "ragged"]
    with converter.make_torch_dataloader(batch_size=50, columns=columns, ragged="pad") as loader:
        for batch in loader:
            assert list(batch) == ["id", "string", "binary", "ragged", "ragged__length"]
            expected = known_values(batch["id"].numpy())
            assert batch["string"] == expected["string"].tolist()
            assert batch["binary"] == expected["binary"].tolist()
            for row, length, values in zip(batch["ragged"], batch["ragged__length"], expected["ragged"], strict=True):
                assert row[:length].tolist() == values.tolist()
                assert not row[length:].any()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shuffle_differs_by_epoch_and_can_be_repeated(converter: DatasetConverter, num_workers: int) -> None:
    options: dict[str, Any] = {"batch_size": 64, "ragged": "nested", "shuffle": True, "num_workers": num_workers}
    with converter.make_torch_dataloader(seed=7, **options) as loader:
        first, second = [list(map(as_numpy, loader)) for _ in range(2)]
        loader.set_epoch(0)
        again = list(map(as_numpy, loader))
    orders = [[row for batch in epoch for row in batch["id"].tolist()] for epoch in (first, second, again)]
    assert orders[0] == orders[2]
    assert orders[0] != orders[1] != list(range(NUM_ROWS))
    for order in orders:
        assert sorted(order) == list(range(NUM_ROWS))
    for batch in itertools.chain(first, second):
        assert_same(batch, expected_batch(batch["id"]))
    with converter.make_torch_dataloader(seed=7, **options | {"num_workers": 0}) as loader:
        assert [row for batch in ids_of(loader) for row in batch] == orders[0]
    with converter.make_torch_dataloader(seed=8, **options) as loader:
        assert [row for batch in ids_of(loader) for row in batch] != orders[0]


def test_another_converter_on_the_same_rows_shuffles_alike(
    spark: SparkSession, converter: DatasetConverter, cache_dir: Path
) -> None:
    with (
        make_spark_converter(known_rows(spark, NUM_ROWS), cache_dir=cache_dir, row_group_bytes=20_000) as other,
        other.make_torch_dataloader(shuffle=True, columns=["id"]) as one,
        converter.make_torch_dataloader(shuffle=True, columns=["id"]) as two,
    ):
        assert ids_of(one) == ids_of(two)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_three_shards_cover_every_row_once(converter: DatasetConverter, shuffle: bool, num_workers: int) -> None:
    parts = []
    for index in range(3):
        with converter.make_torch_dataloader(
            batch_size=32, cur_shard=index, shard_count=3, uneven="keep", shuffle=shuffle, columns=["id", "long"],
            num_workers=num_workers,
        ) as loader:  # fmt: skip
            batches = list(loader)
            assert len(batches) == len(loader)
        parts.append([row for batch in batches for row in batch["id"].tolist()])
        for batch in batches:
            np.testing.assert_array_equal(batch["long"].numpy(), known_values(batch["id"].numpy())["long"])
    assert sorted(itertools.chain(*parts)) == list(range(NUM_ROWS))
    assert {len(part) for part in parts} == {233, 234}


def test_two_threads_start_their_workers_one_after_the_other(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The epoch, and that our own loader iterates, stand in one object, which is copied for each worker.
    together, most = [0], [0]

    def slow_imports() -> None:
        together[0] += 1
        most[0] = max(most[0], together[0])
        time.sleep(0.2)
        together[0] -= 1

    monkeypatch.setattr(loader_module, "finish_imports", slow_imports)
    with converter.make_torch_dataloader(batch_size=50, columns=["id"], shuffle=True, num_workers=2) as loader:

        def read(_: int) -> list[int]:
            return [number for batch in loader for number in batch["id"].tolist()]

        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(read, range(2)))
    assert most == [1]
    assert [sorted(ids) for ids in found] == [list(range(NUM_ROWS))] * 2


def test_uneven_shards_take_equally_many_steps(converter: DatasetConverter) -> None:
    seen = []
    for index in range(3):
        with converter.make_torch_dataloader(
            batch_size=1, cur_shard=index, shard_count=3, uneven="drop", columns=["id"]
        ) as loader:
            assert len(loader) == 233
            seen += ids_of(loader)
    assert len(seen) == len({row for batch in seen for row in batch}) == 699


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stack_stands_beside_categories(converter: DatasetConverter, num_workers: int) -> None:
    members = [*ODD_NAMES[:4], "byte", "double"]
    columns = ["numbers", "id", "short", "string", "byte"]
    with converter.make_torch_dataloader(
        batch_size=70, columns=columns, stack={"numbers": members}, shuffle=True, num_workers=num_workers
    ) as loader:
        for batch in loader:
            assert list(batch) == columns
            expected = known_values(batch["id"].numpy())
            assert batch["numbers"].dtype == torch.float32
            numbers = np.stack([expected[name].astype("f4") for name in members], axis=1)
            np.testing.assert_array_equal(batch["numbers"].numpy(), numbers)
            np.testing.assert_array_equal(batch["short"].numpy(), expected["short"])
            np.testing.assert_array_equal(batch["byte"].numpy(), expected["byte"])
            assert batch["string"] == expected["string"].tolist()


def test_a_stack_of_one_dtype_keeps_it_and_has_a_mask(with_nulls: DatasetConverter) -> None:
    with with_nulls.make_torch_dataloader(
        columns=["id"], stack={"odd": ODD_NAMES}, nulls="mask", batch_size=NUM_ROWS
    ) as loader:
        (batch,) = list(loader)
    ids = batch["id"].numpy()
    values, valid = known_values(ids, nulls=True), known_valid(ids)
    assert list(batch) == ["id", "odd", "odd__valid"]
    assert batch["odd"].dtype == torch.int64
    np.testing.assert_array_equal(batch["odd"].numpy(), np.stack([values[name] for name in ODD_NAMES], 1))
    np.testing.assert_array_equal(batch["odd__valid"].numpy(), np.stack([valid[name] for name in ODD_NAMES], 1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_belongs_to_the_caller(converter: DatasetConverter, num_workers: int) -> None:
    with converter.make_torch_dataloader(batch_size=50, ragged="pad", num_workers=num_workers, num_epochs=2) as loader:
        batches = []
        for batch in loader:
            kept = {name: values if isinstance(values, list) else values.clone() for name, values in batch.items()}
            batches.append((batch, kept))
            for values in batch.values():
                if isinstance(values, torch.Tensor):
                    values.zero_()
    for index, (batch, kept) in enumerate(batches):
        start = index % 14 * 50
        assert kept["id"].tolist() == list(range(start, start + 50))
        np.testing.assert_array_equal(kept["nested"].numpy(), known_values(kept["id"].numpy())["nested"])
        assert all(not values.any() for values in batch.values() if isinstance(values, torch.Tensor))


def test_leaving_early_stays_in_the_epoch(converter: DatasetConverter) -> None:
    with converter.make_torch_dataloader(batch_size=10, shuffle=True, columns=["id"]) as loader:
        peeked = next(iter(loader))["id"].tolist()
        for batch in loader:
            assert batch["id"].tolist() == peeked
            break
        assert ids_of(loader)[0] == peeked
        assert ids_of(loader)[0] != peeked


def test_nulls_are_refused_when_the_loader_is_made(with_nulls: DatasetConverter) -> None:
    with pytest.raises(NullValueError, match=r"Column 'int' holds nulls, and nulls='raise'.*'int__valid'") as raised:
        with_nulls.make_torch_dataloader(columns=["id", "int"])
    assert raised.value.column == "int"
    with with_nulls.make_torch_dataloader(columns=["id"]) as loader:
        assert len(list(loader)) == len(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_small_model_learns(spark: SparkSession, cache_dir: Path, num_workers: int) -> None:
    torch.manual_seed(0)
    a, b = F.rand(1), F.rand(2)
    df = spark.range(0, 2000, 1, 2).select(
        "id", (F.col("id") % 3).cast("int").alias("kind"), a.alias("a"), b.alias("b")
    )
    df = df.withColumn("label", 3 * F.col("a") - 2 * F.col("b") + F.col("kind"))
    embedding, linear = torch.nn.Embedding(3, 1), torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam([*embedding.parameters(), *linear.parameters()], lr=0.05)
    losses = []
    with (
        make_spark_converter(df, cache_dir=cache_dir, row_group_bytes=8192) as converter,
        converter.make_torch_dataloader(
            batch_size=100, columns=["kind", "label"], stack={"x": ["a", "b"]}, shuffle=True, num_workers=num_workers
        ) as loader,
    ):
        for _ in range(12):
            summed = 0.0
            for batch in loader:
                found = (linear(batch["x"]) + embedding(batch["kind"])).squeeze(1)
                loss = torch.nn.functional.mse_loss(found, batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                summed += loss.item()
            losses.append(summed / len(loader))
    assert losses[-1] < 0.01 < losses[0] / 10
    np.testing.assert_allclose(linear.weight.detach().numpy(), [[3, -2]], atol=0.1)
