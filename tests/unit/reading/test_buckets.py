"""Rows of similar length come together: each once, in the same order for any batch size, shards and resumed epoch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, StateMismatchError, make_parquet_converter
from converter.reading import buckets

NUM_ROWS = 6_000


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DatasetConverter:
    monkeypatch.setattr(buckets, "MIN_BUCKET_ROWS", 256)
    random = np.random.default_rng(0)
    lengths = np.exp(random.normal(2.5, 0.7, NUM_ROWS)).astype(np.int64) + 1
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    table = pa.table(
        {
            "id": np.arange(NUM_ROWS),
            "tokens": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(np.arange(offsets[-1]))),
            "text": ["x" * length for length in lengths.tolist()],
            "size": pa.array(lengths, pa.int16()),
            "null": pa.array([None if row % 7 == 0 else [1] * int(lengths[row]) for row in range(NUM_ROWS)]),
            "f": random.random(NUM_ROWS),
        }
    )
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=500)
    return make_parquet_converter(tmp_path)


def read(converter: DatasetConverter, **options: Any) -> list[dict[str, Any]]:
    defaults: dict[str, Any] = {"batch_size": 32, "shuffle": True, "shuffle_window_rows": 3000, "ragged": "pad"}
    with converter.make_batch_reader(
        **{**defaults, "columns": ["id", "tokens"], "uneven": "keep", **options}
    ) as reader:
        return list(reader)


def ids_of(batches: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate([batch["id"] for batch in batches])


def padded_by(batches: list[dict[str, Any]]) -> float:
    return float(
        sum(batch["tokens"].size for batch in batches) / sum(batch["tokens__length"].sum() for batch in batches)
    )


@pytest.mark.parametrize("by", ["tokens", "text", "size"])
def test_batches_pad_less_and_have_each_row_once(converter: DatasetConverter, by: str) -> None:
    plain, bucketed = read(converter), read(converter, bucket_by=by, columns=["id", *{"tokens", by}])
    assert sorted(ids_of(bucketed).tolist()) == list(range(NUM_ROWS))
    assert padded_by(plain) > 2
    assert padded_by(bucketed) < 1.15
    # Buckets come in random order, another one in each epoch.
    means = [batch["tokens__length"].mean() for batch in bucketed]
    assert means != sorted(means)


def test_the_order_is_the_same_for_any_batch_size_shards_and_resumed_epoch(converter: DatasetConverter) -> None:
    whole = ids_of(read(converter, bucket_by="tokens", seed=4))
    np.testing.assert_array_equal(ids_of(read(converter, bucket_by="tokens", seed=4, batch_size=77)), whole)
    parts = [ids_of(read(converter, bucket_by="tokens", seed=4, cur_shard=shard, shard_count=3)) for shard in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    options: dict[str, Any] = {"shuffle": True, "shuffle_window_rows": 3000, "seed": 4, "columns": ["id", "tokens"]}
    options |= {"uneven": "keep", "ragged": "pad"}
    with converter.make_batch_reader(batch_size=100, bucket_by="tokens", **options) as reader:
        first = [batch["id"] for batch in itertools.islice(reader, 13)]
        state = json.loads(json.dumps(reader.state_dict()))
    with converter.make_batch_reader(batch_size=64, bucket_by="tokens", **options) as reader:
        reader.load_state_dict(state)
        rest = [batch["id"] for batch in reader]
    np.testing.assert_array_equal(np.concatenate([*first, *rest]), whole)
    with (
        converter.make_batch_reader(batch_size=64, **options) as reader,
        pytest.raises(StateMismatchError, match="bucket_by was 'tokens' and is ''"),
    ):
        reader.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="bucket_by=3"):
        reader.load_state_dict(state | {"bucket_by": 3})


@pytest.mark.parametrize(
    ("by", "before", "after", "told"),
    [
        ("n", ({}, "mask"), ({}, {"n": 9}), "bucket_by was 'n' and is 'n with nulls as 9'"),
        ("c", ({}, "mask"), ({}, {"c": "éé"}), "bucket_by was 'c' and is 'c with nulls as 4'"),
        ("c", ({}, "mask"), ({"c": ["a", "bb"]}, "mask"), "bucket_by was 'c' and is 'c in 2 categories [0-9a-f]{8}'"),
        ("c", ({"c": ["bb", "a"]}, "mask"), ({"c": ["a", "bb"]}, "mask"), "'c in 2 cat.* and is 'c in 2 categories"),
        ("c", ({"c": ["bb", "a"]}, "mask"), ({"c": ["bb", "a"]}, {"c": 1}), "and is 'c in 2 .* with nulls as 1'"),
        ("n", ({}, "mask"), ({}, {"n": 0}), None),
        ("n", ({}, {"n": 9}), ({}, {"n": np.int16(9)}), None),
        ("c", ({"c": ["bb", "a"]}, "mask"), ({"c": ["bb", "a"]}, "mask"), None),
    ],
)
def test_a_state_is_refused_where_another_order_would_lose_rows(
    by: str, before: tuple[Any, Any], after: tuple[Any, Any], told: str | None, tmp_path: Path
) -> None:
    """Rows were lost and repeated: the order depends on what stands for nulls, and on the codes of categories."""
    numbers = np.random.default_rng(0).integers(0, 30, 9000).tolist()
    table = pa.table(
        {
            "id": np.arange(9000),
            "n": pa.array([None if number > 20 else number for number in numbers]),
            "c": pa.array([None if number > 20 else ("a", "bb")[number % 2] for number in numbers]),
        }
    )
    pq.write_table(table, tmp_path / "part.parquet")
    options: dict[str, Any] = {"batch_size": 100, "shuffle": True, "columns": ["id", by], "bucket_by": by}
    with make_parquet_converter(tmp_path, categories=before[0] or None).make_batch_reader(
        nulls=before[1], **options
    ) as reader:
        rows = [batch["id"] for batch in itertools.islice(reader, 17)]
        state = json.loads(json.dumps(reader.state_dict()))
    with make_parquet_converter(tmp_path, categories=after[0] or None).make_batch_reader(
        nulls=after[1], **options
    ) as reader:
        if told is not None:
            with pytest.raises(StateMismatchError, match=told):
                reader.load_state_dict(state)
        else:
            reader.load_state_dict(state)
            rows += [batch["id"] for batch in reader]
            assert np.sort(np.concatenate(rows)).tolist() == list(range(9000))


def test_torch_views_and_null_rows(converter: DatasetConverter) -> None:
    options: dict[str, Any] = {"bucket_by": "null", "nulls": "mask", "columns": ["id", "null", "tokens"]}
    some = converter.where([("id", "<", 3000)])
    batches = read(some, **options)
    assert sorted(ids_of(batches).tolist()) == list(range(3000))
    loading: dict[str, Any] = {"batch_size": 32, "shuffle": True, "shuffle_window_rows": 3000, "ragged": "pad"}
    with some.make_torch_dataloader(num_workers=2, uneven="keep", **loading, **options) as loader:
        for batch, wanted in zip(loader, batches, strict=True):
            np.testing.assert_array_equal(batch["id"].numpy(), wanted["id"])
            np.testing.assert_array_equal(batch["tokens"].numpy(), wanted["tokens"])
    balanced = some.balance("size", num_rows=900)
    assert padded_by(read(balanced, bucket_by="tokens")) < 1.3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bucket_by": "no"}, "bucket_by: 'no' is none of the columns that are read"),
        ({"bucket_by": "size"}, "bucket_by: 'size' is none of the columns that are read"),
        ({"bucket_by": "f", "columns": ["f"]}, r"column 'f' is float32 of shape \(\); it needs rows of different"),
        ({"bucket_by": "tokens", "shuffle": False}, "bucket_by needs shuffle=True"),
    ],
)
def test_wrong_arguments_are_refused_by_name(converter: DatasetConverter, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(converter, **options)
    with pytest.raises(ValueError, match="sequences all have one length"):
        read(converter.sequences(3), bucket_by="size", columns=["size"])
