"""Several readers as one: shares by probability, each reader's rows in their order, and an end when one has ended."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.petastorm import make_batch_reader, make_reader
from converter.petastorm.ngram import NGram
from converter.petastorm.pytorch import BatchedDataLoader, DataLoader
from converter.petastorm.weighted_sampling_reader import WeightedSamplingReader
from tests.unit.petastorm.conftest import Stored
from tests.unit.petastorm.readers import KINDS, BlockReader, RowBlockReader, RowReader


def rows(reader: int, count: int) -> list[dict[str, Any]]:
    return [
        {"reader": np.int64(reader), "id": np.int64(number), "name": f"{reader}/{number}"} for number in range(count)
    ]


def readers(kind: Any, *counts: int, **options: Any) -> list[Any]:
    return [kind(rows(number, count), **options) for number, count in enumerate(counts)]


@pytest.mark.parametrize("probabilities", [[0.1, 0.5, 0.4], [10, 50, 40], [0, 1, 0], [0, 0, 0.1]])
@pytest.mark.parametrize("kind", [RowReader, RowBlockReader])
def test_readers_are_drawn_by_their_probabilities(kind: Any, probabilities: Sequence[float]) -> None:
    with WeightedSamplingReader(readers(kind, 5000, 5000, 5000), probabilities) as mixed:
        drawn = [row.reader for row in itertools.islice(mixed, 4000)]
        if kind is RowBlockReader:
            drawn += mixed.next_block()["reader"].tolist()
    shares = np.bincount(drawn, minlength=3) / len(drawn)
    np.testing.assert_allclose(shares, np.array(probabilities) / sum(probabilities), atol=0.04)
    assert (shares == 0).tolist() == [probability == 0 for probability in probabilities]


@given(
    counts=st.lists(st.integers(0, 30), min_size=2, max_size=3),
    probabilities=st.lists(st.floats(0.1, 1), min_size=3, max_size=3),
    steps=st.lists(st.booleans(), max_size=40),
)
def test_each_readers_rows_come_in_their_order_however_they_are_asked_for(
    counts: list[int], probabilities: list[float], steps: list[bool]
) -> None:
    own = [RowBlockReader(rows(number, max(1, count))) for number, count in enumerate(counts)]
    for reader, count in zip(own, counts, strict=True):
        reader.rows = reader.rows[:count]
    mixed = WeightedSamplingReader(own, probabilities[: len(own)])
    seen: list[Any] = []
    for is_block in steps:
        try:
            if is_block:
                block = mixed.next_block()
                seen += zip(block["reader"].tolist(), block["id"].tolist(), block["name"].tolist(), strict=True)
            else:
                row = next(mixed)
                seen.append((int(row.reader), int(row.id), row.name))
        except StopIteration:
            break
    for reader, count in enumerate(counts):
        ids = [number for of, number, _ in seen if of == reader]
        assert ids == list(range(len(ids)))
        assert len(ids) <= count
    assert all(name == f"{reader}/{number}" for reader, number, name in seen)


@pytest.mark.parametrize("kind", [RowReader, RowBlockReader])
def test_it_ends_when_a_reader_that_has_ended_is_drawn(kind: Any) -> None:
    lengths = []
    for _ in range(20):
        mixed = WeightedSamplingReader(readers(kind, 10_000, 100), [0.5, 0.5])
        with DataLoader(mixed, batch_size=1000) as loader:
            ids = [number for batch in loader for number in batch["id"][batch["reader"] == 1].tolist()]
            assert ids == list(range(100))
            assert mixed.last_row_consumed
            lengths.append(mixed._readers[0].num_taken)
    if kind is RowReader:
        assert 70 < np.mean(lengths) < 130


def test_no_row_comes_after_the_end() -> None:
    mixed = WeightedSamplingReader(readers(RowBlockReader, 10_000, 3), [0.5, 0.5])
    block = mixed.next_block()
    assert (block["reader"] == 1).sum() == 3
    with pytest.raises(StopIteration):
        mixed.next_block()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loader", [DataLoader, BatchedDataLoader])
def test_loaders_take_it_as_a_reader(kind: Any, loader: Any) -> None:
    numbers = [kind([{"id": np.int64(number)} for number in range(50)]) for _ in range(2)]
    mixed = WeightedSamplingReader(numbers, [0.3, 0.7])
    assert mixed.batched_output == kind.batched_output
    with loader(mixed, 4, shuffling_queue_capacity=10) as batches:
        sizes = [len(batch["id"]) for batch in batches]
    assert set(sizes[:-1]) == {4}
    assert 50 <= sum(sizes) <= 100
    assert all(reader.calls == ["stop", "join"] for reader in numbers)


def test_batches_are_drawn_whole() -> None:
    mixed = WeightedSamplingReader(readers(BlockReader, 70, 70), [0.5, 0.5])
    for batch in (next(mixed)._asdict(), mixed.next_block()):
        assert len(batch["id"]) == 7
        assert len(set(batch["reader"].tolist())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_fields_come_in_the_first_readers_order(kind: Any) -> None:
    own = readers(kind, 20, 20)
    own.append(kind([dict(reversed(row.items())) for row in rows(2, 20)]))
    mixed = WeightedSamplingReader(own, [0, 0.1, 0.9])
    elements = list(mixed)
    assert {element._fields for element in elements} == {("reader", "id", "name")}
    assert {str(np.ravel(element.name)[0])[0] for element in elements} <= {"1", "2"}
    assert all(str(np.ravel(name)[0])[0] == str(np.ravel(reader)[0]) for reader, _, name in elements)


@pytest.mark.filterwarnings("ignore:Currently make_reader")
def test_windows_have_fields_in_the_first_readers_order(tmp_path: Path) -> None:
    columns = {"a": range(5), "b": range(100, 105)}
    for folder, names in (("ab", "ab"), ("ba", "ba")):
        (tmp_path / folder).mkdir()
        pq.write_table(pa.table({name: columns[name] for name in names}), tmp_path / folder / "a.parquet")
    own = [
        make_reader((tmp_path / folder).as_uri(), schema_fields=NGram({0: ["a", "b"], 1: ["b", "a"]}, 9, "a"))
        for folder in ("ab", "ba")
    ]
    with WeightedSamplingReader(own, [0.01, 0.99]) as mixed:
        for window in mixed:
            assert [(row._fields, int(row.b) - int(row.a)) for row in window.values()] == [(("a", "b"), 100)] * 2


def test_it_has_columns_only_if_all_its_readers_have() -> None:
    assert hasattr(WeightedSamplingReader(readers(RowBlockReader, 3, 3), [1, 1]), "next_block")
    mixed = [RowReader(rows(0, 3)), RowBlockReader(rows(1, 3))]
    assert not hasattr(WeightedSamplingReader(mixed, [1, 1]), "next_block")


def test_draws_repeat_with_the_readers_seeds() -> None:
    def drawn(*seeds: int | None) -> list[int]:
        own = [RowReader(rows(number, 500), seed) for number, seed in enumerate(seeds)]
        mixed = WeightedSamplingReader(own, [0.5, 0.5])
        assert mixed.seed == (None if None in seeds else seeds[0])
        return [int(row.reader) for row in itertools.islice(mixed, 300)]

    assert drawn(1, 2) == drawn(1, 2)
    assert drawn(1, 2) != drawn(1, 3)
    assert drawn(None, 2) != drawn(None, 2)


def test_draws_without_seeds_follow_numpys_generator() -> None:
    def drawn(seed: int) -> list[int]:
        np.random.seed(seed)  # noqa: NPY002 (the generator that users seed)
        return [
            int(row.reader) for row in itertools.islice(WeightedSamplingReader(readers(RowReader, 99, 99), [1, 1]), 40)
        ]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_reset_begins_again_with_the_readers_that_have_ended() -> None:
    own = readers(RowBlockReader, 10_000, 50)
    mixed = WeightedSamplingReader(own, [0.5, 0.5])
    with pytest.raises(NotImplementedError, match="in the middle of iteration"):
        mixed.reset()
    with DataLoader(mixed, batch_size=10) as loader:
        passes = [
            [tuple(row) for batch in loader for row in zip(*map(list, batch.values()), strict=True)] for _ in range(2)
        ]
    first, second = ([int(number) for of, number, _ in rows if of == 1] for rows in passes)
    assert first == second == list(range(50))
    long = [int(number) for rows in passes for of, number, _ in rows if of == 0]
    assert long == list(range(len(long)))


def test_readers_must_be_several_and_have_one_probability_each() -> None:
    with pytest.raises(ValueError, match=r"Two or more readers must be specified\. Got 1"):
        WeightedSamplingReader(readers(RowReader, 3), [1.0])
    with pytest.raises(ValueError, match="lists of the same length, got 2 and 3"):
        WeightedSamplingReader(readers(RowReader, 3, 3), [0.1, 0.2, 0.7])


@pytest.mark.parametrize("probabilities", [[0, 0], [-1, 2], [np.nan, 1], [np.inf, 1]])
def test_probabilities_must_be_ones(probabilities: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 0, and one of them above 0"):
        WeightedSamplingReader(readers(RowReader, 3, 3), probabilities)


def test_readers_must_hand_out_the_same_elements(stored: Stored) -> None:
    with pytest.raises(ValueError, match='same value of "batched_output"'):
        WeightedSamplingReader([RowReader(rows(0, 3)), BlockReader(rows(1, 3))], [1, 1])
    other = RowReader([{"reader": np.int64(0), "id": np.int64(0), "text": "a"}])
    with pytest.raises(ValueError, match=r"should have the same schema\. Only some have the fields name, text"):
        WeightedSamplingReader([RowReader(rows(0, 3)), other], [1, 1])
    offsets = ({-1: ["id"], 0: ["id", "speed"]}, {-1: ["id", "speed"], 0: ["id"]})
    windows = [make_reader(stored.url, schema_fields=NGram(fields, 1, "id")) for fields in offsets]
    with pytest.raises(ValueError, match="same ngram spec"):
        WeightedSamplingReader(windows, [1, 1])
    plain = make_reader(stored.url, schema_fields=["id", "speed"])
    with pytest.raises(ValueError, match="same ngram spec"):
        WeightedSamplingReader([windows[0], plain], [1, 1])
    again = make_reader(stored.url, schema_fields=NGram(offsets[0], 1, "id"))
    with WeightedSamplingReader([windows[0], again], [1, 1]) as mixed:
        assert set(next(mixed)) == {-1, 0}
        assert mixed.ngram is windows[0].ngram


def test_it_has_no_length_but_is_true() -> None:
    mixed = WeightedSamplingReader(readers(RowReader, 3, 3), [1, 1])
    assert mixed
    with pytest.raises(TypeError, match="has no len"):
        len(mixed)  # type: ignore[arg-type]


def test_real_readers_are_mixed_by_columns(plain: Stored) -> None:
    own = [make_batch_reader(plain.url, schema_fields=["id", "speed"], num_epochs=None, seed=seed) for seed in (1, 2)]
    with BatchedDataLoader(WeightedSamplingReader(own, [0.5, 0.5]), 50, shuffling_queue_capacity=100) as loader:
        batch = next(iter(loader))
    assert (batch["speed"] * 4 == batch["id"]).all()


@pytest.mark.parametrize("lengths", [(60, 50), (50, 60), (300, 30)])
def test_rows_that_were_read_ahead_come_after_a_reset(lengths: tuple[int, int]) -> None:
    """Of readers that are short enough to be read whole, only the one that was drawn at its end begins again."""
    mixed = WeightedSamplingReader(readers(RowBlockReader, *lengths), [0.5, 0.5])
    seen: list[list[int]] = [[], []]
    with DataLoader(mixed, batch_size=10) as loader:
        for _ in range(30):
            for batch in loader:
                for of, number in zip(batch["reader"].tolist(), batch["id"].tolist(), strict=True):
                    seen[of].append(number)
    for numbers, length in zip(seen, lengths, strict=True):
        assert len(numbers) > 2 * length
        assert numbers == [place % length for place in range(len(numbers))]


def test_a_pass_that_was_left_early_has_not_ended() -> None:
    mixed = WeightedSamplingReader(readers(RowBlockReader, 50, 50), [0.5, 0.5])
    with DataLoader(mixed, batch_size=10) as loader:
        next(iter(loader))
        assert not mixed.last_row_consumed
        with pytest.raises(NotImplementedError, match="in the middle of iteration"):
            next(iter(loader))


def test_elements_after_blocks_end_a_pass_of_their_own() -> None:
    """Else the next pass would be the end that a block had drawn, and no row."""
    mixed = WeightedSamplingReader(readers(RowBlockReader, 30, 60), [0.5, 0.5])
    first = len(mixed.next_block()["id"])
    assert not mixed.last_row_consumed
    list(mixed)
    assert mixed.last_row_consumed
    mixed.reset()
    assert not mixed.last_row_consumed
    second = len(mixed.next_block()["id"])
    assert 30 <= first < 90
    assert second >= 30


def test_blocks_after_an_element_are_not_ended_by_an_earlier_block() -> None:
    nums_rows = []
    for seed in range(12):
        own = readers(RowBlockReader, 30, 3000)
        for reader in own:
            reader.seed = seed
        mixed = WeightedSamplingReader(own, [0.5, 0.5])
        assert len(mixed.next_block()["id"]) < 300
        with contextlib.suppress(StopIteration):
            next(mixed)
            nums_rows.append(len(mixed.next_block()["id"]))
    # Else the reader that has ended was drawn again, which half of the draws do.
    assert any(nums_rows)
