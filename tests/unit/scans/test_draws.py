"""Balanced and sampled rows: exact counts in each epoch, each row in its turn, in every shard and after a resume."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import DatasetConverter, NullValueError, draws, make_parquet_converter
from tests.properties import examples
from tests.waiting import held_elsewhere

LABELS = ["cat"] * 70 + ["dog"] * 25 + ["eel"] * 5


@pytest.fixture
def converter(tmp_path: Path) -> DatasetConverter:
    order = np.random.default_rng(0).permutation(len(LABELS))
    table = pa.table(
        {
            "n": pa.array(np.arange(len(LABELS))),
            "label": [LABELS[place] for place in order],
            "w": pa.array((np.arange(len(LABELS)) % 4).astype(np.float64)),
            "d": pa.array([0.5] * len(LABELS)),
        }
    )
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=9)
    return make_parquet_converter(tmp_path)


def epochs_of(converter: DatasetConverter, num_epochs: int, **options: Any) -> list[dict[str, np.ndarray[Any, Any]]]:
    found = []
    with converter.make_batch_reader(batch_size=8, **{"shuffle": True, "uneven": "keep"} | options) as reader:
        for _ in range(num_epochs):
            batches = list(reader)
            found.append({name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]})
    return found


def test_each_class_comes_equally_often_and_each_row_in_its_turn(converter: DatasetConverter) -> None:
    balanced = converter.balance("label", num_rows=60)
    assert len(balanced) == 60
    seen: dict[str, Counter[int]] = {"cat": Counter(), "dog": Counter(), "eel": Counter()}
    epochs = epochs_of(balanced, 12)
    for epoch in epochs:
        assert Counter(epoch["label"].tolist()) == {"cat": 20, "dog": 20, "eel": 20}
        for label, counter in seen.items():
            counter.update(epoch["n"][epoch["label"] == label].tolist())
            # No row comes twice more often than another of its class.
            times = [counter[row] for row in counter]
            assert max(times) - (min(times) if len(counter) == LABELS.count(label) else 0) <= 1
    assert sorted(epochs[0]["n"].tolist()) != sorted(epochs[1]["n"].tolist())
    assert {len(counter) for counter in seen.values()} == {70, 25, 5}
    for one, two in zip(epochs, epochs_of(pickle.loads(pickle.dumps(balanced)), 12), strict=True):
        np.testing.assert_array_equal(one["n"], two["n"])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(1, 90), st.integers(0, 5), st.integers(1, 9))
@examples(60)
def test_counts_are_exact(
    tmp_path_factory: pytest.TempPathFactory, labels: list[int], num_rows: int, epoch: int, row_group_size: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    table = pa.table({"label": pa.array(labels, pa.int8()), "n": pa.array(range(len(labels)), pa.int32())})
    pq.write_table(table, folder / "part.parquet", row_group_size=row_group_size)
    balanced = make_parquet_converter(folder).balance("label", num_rows=num_rows)
    with balanced.make_batch_reader(batch_size=7, shuffle=True, shuffle_window_rows=5, uneven="keep") as reader:
        reader.set_epoch(epoch)
        rows = np.concatenate([batch["n"] for batch in reader]).tolist()
    counts = Counter(labels[row] for row in rows)
    assert len(rows) == num_rows
    assert max(counts.values()) - min(counts.get(label, 0) for label in set(labels)) <= 1
    for label in set(labels):
        times = [rows.count(row) for row, of in enumerate(labels) if of == label]
        # Two rounds may meet in an epoch.
        assert max(times) - min(times) <= 2


def test_classes_may_have_shares(converter: DatasetConverter) -> None:
    (epoch,) = epochs_of(converter.balance("label", weights={"cat": 1, "dog": 3, "eel": 0}), 1)
    assert Counter(epoch["label"].tolist()) == {"cat": 25, "dog": 75}
    # 40.4, 40.4 and 20.2 of 101: the row that is left goes where most is owed.
    (epoch,) = epochs_of(converter.balance("label", weights={"cat": 1, "dog": 1, "eel": 0.5}, num_rows=101), 1)
    assert Counter(epoch["label"].tolist()) == {"cat": 41, "dog": 40, "eel": 20}


def test_weights_may_be_very_large_or_small(converter: DatasetConverter) -> None:
    for size in (1e308, 1e-320):
        (epoch,) = epochs_of(converter.balance("label", weights={"cat": size, "dog": size, "eel": 0}), 1)
        assert Counter(epoch["label"].tolist()) == {"cat": 50, "dog": 50}


def test_a_row_comes_as_often_as_its_weight_says(converter: DatasetConverter) -> None:
    sampled = converter.sample("w", num_rows=100)
    expected = (np.arange(100) % 4) / 150 * 100
    total = np.zeros(100)
    for epoch in epochs_of(sampled, 40):
        counts = np.bincount(epoch["n"], minlength=100)
        assert counts.sum() == 100
        assert ((counts == np.floor(expected)) | (counts == np.ceil(expected))).all()
        total += counts
    # 0.67, 1.33 and 2 times an epoch.
    assert np.abs(total / 40 - expected).max() < 0.35
    of_values = converter.sample({"cat": 1, "dog": 2, "eel": 10}, by="label", num_rows=170)
    (epoch,) = epochs_of(of_values, 1)
    assert Counter(epoch["label"].tolist()) == {"cat": 70, "dog": 50, "eel": 50}


@pytest.mark.parametrize("weights", ["w", {"cat": 1, "dog": 5, "eel": 0}])
def test_without_replacement_no_row_comes_twice(converter: DatasetConverter, weights: Any) -> None:
    by = None if isinstance(weights, str) else "label"
    for epoch in epochs_of(converter.sample(weights, by=by, num_rows=60, replacement=False), 5):
        assert len(set(epoch["n"].tolist())) == 60
        assert "w" not in weights or 0 not in (epoch["n"] % 4).tolist()
        assert "eel" not in epoch["label"].tolist() or by is None
    with pytest.raises(
        ValueError, match=r"num_rows can be at most the (75|95) rows that have a weight above 0, got 99"
    ):
        converter.sample(weights, by=by, num_rows=99, replacement=False)


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("scale", [1e308, 1e-300, 5e-324])
def test_weights_of_any_size_draw_as_many_rows_as_were_asked_for(
    scale: float, replacement: bool, tmp_path: Path
) -> None:
    table = pa.table({"n": np.arange(90), "w": np.full(90, scale)})
    pq.write_table(table, tmp_path / "part.parquet", row_group_size=9)
    converter = make_parquet_converter(tmp_path, float_dtype=None)
    for epoch in epochs_of(converter.sample("w", num_rows=60, replacement=replacement), 2):
        assert len(epoch["n"]) == len(set(epoch["n"].tolist())) == 60


def test_shards_and_resumed_epochs_have_the_same_rows(converter: DatasetConverter) -> None:
    balanced = converter.balance("label", num_rows=77)
    options: dict[str, Any] = {"seed": 3, "shuffle_window_rows": 20}
    (whole,) = epochs_of(balanced, 1, **options)
    parts = [epochs_of(balanced, 1, cur_shard=shard, shard_count=3, **options)[0]["n"] for shard in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole["n"])
    every: dict[str, Any] = {"batch_size": 6, "shuffle": True, "uneven": "keep", "columns": ["n"], **options}
    with balanced.make_batch_reader(**every) as reader:
        first = [batch["n"] for batch in itertools.islice(reader, 4)]
        state = json.loads(json.dumps(reader.state_dict()))
    rest = []
    for shard in range(2):
        with balanced.make_batch_reader(cur_shard=shard, shard_count=2, **every) as reader:
            reader.load_state_dict(state)
            rest += [batch["n"] for batch in reader]
    np.testing.assert_array_equal(np.concatenate([*first, *rest]), whole["n"])


def test_torch_tensorflow_and_views_before(converter: DatasetConverter) -> None:
    some = converter.where([("n", "<", 80)]).sequences(3, stride=2).balance("label", num_rows=30)
    assert repr(some).startswith("DatasetConverter(30 of 39 sequences of 3 of 80 rows ×")
    options: dict[str, Any] = {"batch_size": 10, "shuffle": True, "seed": 1, "columns": ["n", "label"]}
    with some.make_batch_reader(**options) as reader:
        expected = [batch["n"] for batch in reader]
    assert {len(batch) for batch in expected} == {10}
    with some.make_torch_dataloader(num_workers=2, **options) as loader:
        np.testing.assert_array_equal([batch["n"].numpy() for batch in loader], expected)
    with some.make_tf_dataset(**options) as dataset:
        np.testing.assert_array_equal([batch["n"].numpy() for batch in dataset], expected)
    first = [label for batch in expected for label in np.asarray(converter.head(100)["label"])[batch[:, 0]]]
    assert max(Counter(first).values()) - min(Counter(first).values()) <= 1
    assert some.statistics["n"].max == 79
    assert some.plan(batch_size=10).steps_per_epoch == 3
    for call in (lambda: some.where([("n", "<", 5)]), lambda: some.split({"a": 0.5}), lambda: some.balance("label")):
        with pytest.raises(ValueError, match=r"are balanced or sampled\. Choose rows before"):
            call()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda rows: rows.balance("no"), "by: There is no column 'no'"),
        (lambda rows: rows.balance("d"), r"by: column 'd' is float32 of shape \(\); classes are whole numbers"),
        (lambda rows: rows.balance("label", num_rows=0), "num_rows must be at least 1"),
        (lambda rows: rows.balance("label", weights={"cat": 1, "dog": 1}), "value 'eel' has no weight"),
        (lambda rows: rows.balance("label", weights={"cat": 1, "dog": 1, "eel": 1, "cow": 1}), "'cow' is no value of"),
        (lambda rows: rows.balance("label", weights={"cat": -1, "dog": 1, "eel": 1}), "'cat' has the weight -1"),
        (lambda rows: rows.balance("label", weights={"cat": 0, "dog": 0, "eel": 0}), "they sum to 0"),
        (lambda rows: rows.balance("label", weights=[1, 2]), "weights must be a dict of the values of 'label'"),
        (lambda rows: rows.sample("no"), "weights: There is no column 'no'"),
        (lambda rows: rows.sample("label"), "weights: column 'label' is str"),
        (lambda rows: rows.sample({"cat": 1}), "weights of values need by="),
        (lambda rows: rows.sample("w", by="label"), "weights must be a column's name, or a dict of values with by="),
        (lambda rows: rows.where([("w", "=", 0)]).sample("w"), "the weights sum to 0"),
        (lambda rows: rows.sample("w", replacement=1), "replacement must be True or False"),
    ],
)
def test_wrong_arguments_are_refused_by_name(converter: DatasetConverter, call: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call(converter)


def test_bad_weights_and_nulls_are_named(tmp_path: Path) -> None:
    table = pa.table({"w": [1.0, -2.0], "k": ["a", None], "v": [1.0, None]})
    pq.write_table(table, tmp_path / "part.parquet")
    rows = make_parquet_converter(tmp_path)
    with pytest.raises(ValueError, match=r"column 'w' has the weight -2\.0"):
        rows.sample("w")
    for call in (lambda: rows.balance("k"), lambda: rows.sample("v")):
        with pytest.raises(NullValueError, match=r"Column '[kv]' has 1 nulls in a row group"):
            call()


def test_a_forked_child_does_not_wait_for_counts_that_a_thread_of_its_parent_makes(converter: DatasetConverter) -> None:
    counted = converter.balance("label", num_rows=30)._manifest.draws
    assert counted is not None
    with held_elsewhere(draws._counting):
        if not (pid := os.fork()):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            os._exit(0 if counted.of_epoch(3).sum() == 30 else 1)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_signals_handler_may_ask_for_the_counts_that_it_interrupts(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = converter.balance("label", num_rows=30)._manifest.draws
    assert counted is not None
    count, asked = draws.Classes.counts, []

    def counts(self: draws.Classes, name: str, epoch: int) -> Any:
        if not asked:
            # As a handler that saves the loader's state.
            asked.append(epoch)
            asked.append(counted.row_group_counts(epoch).sum())
        return count(self, name, epoch)

    monkeypatch.setattr(draws.Classes, "counts", counts)
    found: list[int] = []
    asking = threading.Thread(target=lambda: found.append(counted.of_epoch(3).sum()), daemon=True)
    asking.start()
    asking.join(20)
    assert found == [30]
    assert asked == [3, 30]
