"""Standardised columns: by the statistics of the rows or by given numbers, alone or in a stack, nulls at the mean."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from converter import DatasetConverter, SourceError, make_delta_converter, make_parquet_converter, open_converter
from tests.entries import write_batches

NUM_ROWS = 500
RNG = np.random.default_rng(0)
DELAY = RNG.normal(12, 40, NUM_ROWS).astype(np.float32)
SEATS = RNG.integers(2, 400, NUM_ROWS).astype(np.int16)
WEIGHT = RNG.normal(1e6, 3, NUM_ROWS)
VECTOR = RNG.normal(5, 2, (NUM_ROWS, 3)).astype(np.float32)
IS_NULL = RNG.random(NUM_ROWS) < 0.2
TABLE = pa.table(
    {
        "id": pa.array(range(NUM_ROWS), pa.int64()),
        "delay": pa.array(DELAY, pa.float32(), mask=IS_NULL),
        "seats": pa.array(SEATS),
        "weight": pa.array(WEIGHT),
        "vector": pa.array(VECTOR.tolist(), pa.list_(pa.float32())),
        "constant": pa.array([7.5] * NUM_ROWS, pa.float32()),
        "text": ["a"] * NUM_ROWS,
    }
)
NAMES = ["delay", "seats", "weight", "vector", "constant"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in range(2):
        half = TABLE.slice(part * 250, 250)
        pq.write_table(half, tmp_path / f"part-{part}.parquet", row_group_size=60)
    return tmp_path


@pytest.fixture(params=["parquet", "delta"])
def converter(request: pytest.FixtureRequest, folder: Path) -> Iterator[DatasetConverter]:
    if request.param == "parquet":
        yield make_parquet_converter(folder, standardize=NAMES, float_dtype=None)
        return
    write_deltalake(folder / "table", TABLE)
    yield make_delta_converter(folder / "table", standardize=NAMES, float_dtype=None)


def expected(name: str) -> np.ndarray[Any, Any]:
    """What a column's rows become, computed at once in double precision."""
    values = {"delay": DELAY, "seats": SEATS, "weight": WEIGHT, "vector": VECTOR, "constant": np.full(NUM_ROWS, 7.5)}[
        name
    ]
    present = values.astype(np.float64)[~IS_NULL] if name == "delay" else values.astype(np.float64)
    whole = (values - present.mean()) / (present.std() or 1.0)
    return np.where(IS_NULL, 0, whole) if name == "delay" else whole


def check(batches: list[dict[str, Any]]) -> None:
    rows = {name: np.concatenate([np.asarray(batch[name]) for batch in batches]) for name in batches[0]}
    order = np.argsort(rows["id"])
    assert rows["id"][order].tolist() == list(range(NUM_ROWS))
    for name in NAMES:
        assert rows[name].dtype == ("float64" if name in ("weight", "seats") else "float32")
        np.testing.assert_allclose(rows[name][order], expected(name), atol=2e-5)


@pytest.mark.parametrize("shuffle", [False, True])
def test_columns_arrive_with_mean_0_and_deviation_1(converter: DatasetConverter, shuffle: bool) -> None:
    for copy in (converter, pickle.loads(pickle.dumps(converter))):
        with copy.make_batch_reader(batch_size=64, shuffle=shuffle, nulls="mask") as reader:
            check(list(reader))
    for num_workers in (0, 2):
        with converter.make_torch_dataloader(
            batch_size=64, shuffle=shuffle, nulls="mask", num_workers=num_workers
        ) as loader:
            check(list(loader))


def test_the_schema_has_the_numbers(converter: DatasetConverter) -> None:
    field = converter.schema["seats"]
    assert field.scale == pytest.approx((SEATS.mean(), SEATS.std()))
    assert field.dtype == "float64"
    assert "float32 (standardized)" in repr(converter.schema)
    assert converter.schema["constant"].scale == (7.5, 1.0)
    # Statistics and filters know the numbers as they are in the files.
    assert converter.statistics["seats"].mean == pytest.approx(SEATS.mean())
    assert len(converter.where([("seats", ">", 200)])) == (SEATS > 200).sum()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stack_of_them_is_the_same(converter: DatasetConverter, shuffle: bool) -> None:
    names = ["delay", "constant", "seats"]
    with converter.make_batch_reader(
        batch_size=64, shuffle=shuffle, nulls="mask", stack={"x": names}, columns=["id", "x"]
    ) as reader:
        batches = list(reader)
    order = np.argsort(np.concatenate([batch["id"] for batch in batches]))
    stack = np.concatenate([batch["x"] for batch in batches])[order]
    # Of columns of both widths.
    assert stack.dtype == np.float64
    np.testing.assert_allclose(stack, np.stack([expected(name) for name in names], axis=1), atol=2e-5)


def test_a_fill_value_is_meant_as_the_column_is_stored(converter: DatasetConverter) -> None:
    scale = converter.schema["delay"].scale
    assert scale is not None
    with converter.make_batch_reader(batch_size=NUM_ROWS, nulls={"delay": scale.mean + scale.std}) as reader:
        [batch] = list(reader)
    np.testing.assert_allclose(batch["delay"][IS_NULL[batch["id"]]], 1, atol=1e-5)


def test_given_numbers_are_those_of_another_converter(folder: Path, converter: DatasetConverter) -> None:
    part = make_parquet_converter(
        folder / "part-1.parquet", float_dtype=None, standardize={name: converter.schema[name].scale for name in NAMES}
    )
    with part.make_batch_reader(batch_size=NUM_ROWS, nulls="mask") as reader:
        [batch] = list(reader)
    for name in NAMES:
        np.testing.assert_allclose(batch[name], expected(name)[250:], atol=2e-5)


def test_an_entry_knows_them_from_its_statistics(tmp_path: Path) -> None:
    from converter.sources.spark.schema import plan_columns

    fields = [
        {"name": "id", "type": "long", "nullable": True, "metadata": {}},
        {"name": "seats", "type": "short", "nullable": True, "metadata": {}},
    ]
    plans = plan_columns({"type": "struct", "fields": fields}, float_dtype="float32", shapes={})
    batches = [TABLE.select(["id", "seats"]).to_batches(max_chunksize=100)]
    with (
        write_batches(tmp_path, plans, batches, scales={"seats": None}) as converter,
        open_converter(converter.url) as opened,
    ):
        assert opened.schema["seats"].scale == pytest.approx((SEATS.mean(), SEATS.std()))
        np.testing.assert_allclose(opened.head(NUM_ROWS)["seats"], expected("seats"), atol=2e-5)


@pytest.mark.parametrize(
    ("standardize", "said"),
    [
        ("seats", "standardize must be a list of names, or a dict of name to"),
        (["seat"], "There is no column 'seat'. Did you mean 'seats'"),
        (["text"], r"column 'text' is str of shape \(\); only numbers of one shape"),
        ({"seats": 3}, r"'seats' needs \(mean, std\) or None, got 3"),
        ({"seats": (1, 0)}, "'seats' needs a finite mean and a std above 0"),
        ({"seats": (float("nan"), 1)}, "'seats' needs a finite mean and a std above 0"),
        ({"seats": (1e300, 1)}, "needs a finite mean and a std above 0 that float32 holds"),
        ({"seats": (0, 1e-300)}, "needs a finite mean and a std above 0 that float32 holds"),
        ({"seats": ("1", "2")}, r"'seats' needs \(mean, std\) or None, got \('1', '2'\)"),
        ({"seats": (True, 1)}, r"'seats' needs \(mean, std\) or None"),
        ({"seats": (1, 2, 3)}, r"'seats' needs \(mean, std\) or None"),
    ],
)
def test_wrong_arguments_are_refused_by_name(folder: Path, standardize: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make_parquet_converter(folder, standardize=standardize)


def test_categories_and_ragged_rows_are_not_standardised(tmp_path: Path) -> None:
    pq.write_table(pa.table({"k": [1, 2], "r": [[1.0], [1.0, 2.0]]}), tmp_path / "part.parquet")
    for name in ("k", "r"):
        with pytest.raises(ValueError, match=rf"column '{name}' is .*; only numbers of one shape"):
            make_parquet_converter(tmp_path, standardize=[name], categories=["k"])


@pytest.mark.parametrize(("values", "said"), [([None, None], "holds no number"), ([1.0, float("inf")], "not finite")])
def test_a_column_without_a_mean_is_named(tmp_path: Path, values: list[Any], said: str) -> None:
    pq.write_table(pa.table({"x": pa.array(values, pa.float64())}), tmp_path / "part.parquet")
    with pytest.raises(SourceError, match=rf"column 'x' .*{said}.*standardize=\{{'x': \(mean, std\)\}}"):
        make_parquet_converter(tmp_path, standardize=["x"])


def test_null_elements_are_the_mean_if_they_are_masked(tmp_path: Path) -> None:
    pairs = pa.array([[1.0, 2.0], [None, 4.0], [3.0, 8.0], None])
    pq.write_table(pa.table({"x": pairs}), tmp_path / "part.parquet")
    converter = make_parquet_converter(tmp_path, shapes={"x": (2,)}, standardize={"x": (1, 2)})
    rows = converter.head()
    assert rows["x"].tolist() == [[0, 0.5], [0, 1.5], [1, 3.5], [0, 0]]
    assert rows["x__element_valid"].tolist() == [[True, True], [False, True], [True, True], [False, False]]


def test_very_large_doubles_have_a_scale_if_it_is_given(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1e200, -1e200, 3.0]}), tmp_path / "part.parquet")
    with pytest.raises(SourceError, match="column 'x' holds numbers too large for a variance"):
        make_parquet_converter(tmp_path, standardize=["x"], float_dtype="float64")
    converter = make_parquet_converter(tmp_path, standardize={"x": (0, 1e200)}, float_dtype="float64")
    assert converter.head()["x"].tolist() == pytest.approx([1, -1, 0])


@pytest.mark.parametrize("float_dtype", ["float32", "float64"])
def test_large_whole_numbers_keep_their_differences(tmp_path: Path, float_dtype: Any) -> None:
    seconds = 1_600_000_000 + np.arange(10)
    pq.write_table(pa.table({"t": seconds, "u": seconds}), tmp_path / "part.parquet")
    converter = make_parquet_converter(tmp_path, standardize=["t", "u"], float_dtype=float_dtype)
    expected_rows = (seconds - seconds.mean()) / seconds.std()
    assert converter.schema["t"].dtype == float_dtype
    np.testing.assert_allclose(converter.head(10)["t"], expected_rows, atol=1e-6)
    with converter.make_batch_reader(batch_size=10, stack={"x": ["t", "u"]}, shuffle=True) as reader:
        [batch] = list(reader)
    np.testing.assert_allclose(np.sort(batch["x"][:, 1]), expected_rows, atol=1e-6)
