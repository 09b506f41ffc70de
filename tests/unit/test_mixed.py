"""Mixtures: exact proportions in every block, each source through its own epochs, the same for shards and resumes."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import DatasetConverter, StateMismatchError, make_parquet_converter, mix
from converter.mixing import BLOCK_ROWS, CYCLE_ROWS, Mixing, rows_until, share
from converter.reading import windows
from tests.properties import examples
from tests.waiting import wait_until


def write(folder: Path, num_rows: int, *, first: int = 0, with_nulls: bool = False) -> DatasetConverter:
    folder.mkdir()
    rows = np.arange(first, first + num_rows)
    table = pa.table(
        {
            "n": rows,
            "x": rows.astype(np.float32),
            "pair": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(rows, 2).astype(np.int16)), 2),
            # Wide rows are copied only once.
            "wide": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(rows, 80).astype(np.float32)), 80),
            "word": [f"w{row}" for row in rows.tolist()],
            "odd": pa.array([None if with_nulls and row % 2 else row for row in rows.tolist()], pa.int32()),
            "bag": pa.array([[row] * (row % 4) for row in rows.tolist()], pa.list_(pa.int32())),
        }
    )
    pq.write_table(table, folder / "part.parquet", row_group_size=97)
    return make_parquet_converter(folder)


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, DatasetConverter]:
    return {
        "web": write(tmp_path / "web", 1000),
        "books": write(tmp_path / "books", 300, first=10_000, with_nulls=True),
    }


def read(converter: DatasetConverter, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    defaults: dict[str, Any] = {"batch_size": 50, "shuffle": True, "uneven": "keep", "columns": ["n"]}
    with converter.make_batch_reader(**{**defaults, **options}) as reader:
        batches = list(reader)
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=4),
    st.lists(st.floats(0.01, 1), min_size=4, max_size=4),
    st.booleans(),
    st.integers(0, 3),
)
@examples(60)
def test_positions_are_places_in_each_source(
    sizes: list[int], weights: list[float], is_first: bool, epoch: int
) -> None:
    shares = tuple(weights[: len(sizes)])
    num_rows = rows_until(tuple(sizes), shares, is_first=is_first)
    names = tuple(map(str, range(len(sizes))))
    mixing = Mixing(names=names, sizes=tuple(sizes), weights={0: shares}, num_rows=num_rows, seed=1)
    counts = mixing.counts(0, num_rows)
    assert counts.sum() == num_rows
    if is_first:
        assert (counts <= sizes).all()
        assert (mixing.counts(0, num_rows + 1) > sizes).any() or num_rows % BLOCK_ROWS
    else:
        assert (counts >= sizes).all()
    ids, places = mixing.interleave(epoch, [range(num_rows)])
    assert sorted(places.tolist()) == list(range(num_rows))
    assert np.bincount(ids, minlength=len(sizes)).tolist() == counts.tolist()
    for start in range(0, num_rows - BLOCK_ROWS, BLOCK_ROWS):
        found = np.bincount(ids[start : start + BLOCK_ROWS], minlength=len(sizes))
        assert found.tolist() == share(shares, BLOCK_ROWS).tolist()
    for position in (0, num_rows // 3, num_rows):
        before = np.bincount(ids[:position], minlength=len(sizes)) + epoch * counts
        assert mixing.places(epoch, position) == before.tolist()


@pytest.mark.parametrize("epoch", [2**53 + 1, 2**62 - 1])
def test_in_a_far_epoch_each_source_is_where_it_would_be(tmp_path: Path, epoch: int) -> None:
    """64 bits do not hold how many rows came before."""
    pq.write_table(pa.table({"id": range(1003)}), tmp_path / "a.parquet", row_group_size=100)
    whole = make_parquet_converter(tmp_path)
    both = mix({"a": whole.where([("id", "<", 700)]), "b": whole.where([("id", ">=", 700)])})
    with both.make_batch_reader(batch_size=50, shuffle=True, columns=["id"]) as reader:
        reader.set_epoch(epoch)
        assert sorted(np.concatenate([batch["id"] for batch in reader])) == list(range(1003))


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=4), st.integers(0, 2), st.data())
@examples(40)
def test_the_order_of_any_spans_is_that_of_their_blocks(weights: list[float], epoch: int, data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 5 * BLOCK_ROWS) | st.integers(CYCLE_ROWS, 3 * CYCLE_ROWS))
    names = tuple(map(str, range(len(weights))))
    mixing = Mixing(names=names, sizes=(9,) * len(names), weights={0: tuple(weights)}, num_rows=num_rows, seed=2)
    edges = sorted(data.draw(st.lists(st.integers(0, num_rows), min_size=4, max_size=4)))
    spans = [range(*edges[:2]), range(*edges[2:])]
    if num_rows >= CYCLE_ROWS and data.draw(st.booleans()):
        # The order of whole cycles is remembered.
        size = CYCLE_ROWS * data.draw(st.integers(1, num_rows // CYCLE_ROWS))
        start = data.draw(st.integers(0, num_rows - size))
        spans = [range(start, start + size)]
    blocks = [mixing.block(epoch, number) for number in range(-(-num_rows // BLOCK_ROWS))]
    sources = np.concatenate([block.ids for block in blocks])
    expected = np.concatenate([sources[span.start : span.stop] for span in spans])
    for _ in range(2):
        ids, places = mixing.interleave(epoch, spans)
        np.testing.assert_array_equal(ids, expected)
        # One source after the other, each in order.
        np.testing.assert_array_equal(np.argsort(places), np.argsort(expected, kind="stable"))


def test_each_source_goes_through_its_own_epochs(sources: dict[str, DatasetConverter]) -> None:
    both = mix(sources, {"web": 0.7, "books": 0.3}, stop=500, source="from")
    assert len(both) == 500
    assert both.schema["from"].categories == ("web", "books")
    seen: dict[int, list[int]] = {0: [], 1: []}
    with both.make_batch_reader(batch_size=64, shuffle=True, columns=["n", "from"]) as reader:
        for _ in range(6):
            batches = list(reader)
            ids = np.concatenate([batch["from"] for batch in batches])
            numbers = np.concatenate([batch["n"] for batch in batches])
            assert Counter(ids.tolist()) == {0: 350, 1: 150}
            np.testing.assert_array_equal(ids, numbers >= 10_000)
            for source in (0, 1):
                seen[source] += numbers[ids == source].tolist()
    for source, (size, first) in enumerate(((1000, 0), (300, 10_000))):
        epochs = [seen[source][start : start + size] for start in range(0, len(seen[source]) - size + 1, size)]
        assert len(epochs) == {0: 2, 1: 3}[source]
        assert all(sorted(epoch) == list(range(first, first + size)) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_epochs_end_with_the_first_or_with_all(sources: dict[str, DatasetConverter]) -> None:
    weights = {"web": 0.5, "books": 0.5}
    first, every = mix(sources, weights), mix(sources, weights, stop="all")
    assert (len(first), len(every)) == (601, 1999)
    assert Counter((read(every)["n"] >= 10_000).tolist()) == {False: 1000, True: 999}
    assert sorted(read(mix(sources))["n"].tolist()) == [*range(1000), *range(10_000, 10_300)]
    assert len(mix({"only": sources["web"]})) == 1000
    assert len(mix(sources, {"web": 1, "books": 0})) == 1000


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_all_columns_arrive_in_all_frameworks(sources: dict[str, DatasetConverter], num_workers: int) -> None:
    both = pickle.loads(pickle.dumps(mix(sources, {"web": 2, "books": 1}, source="from")))
    options: dict[str, Any] = {"batch_size": 40, "shuffle": True, "seed": 2, "nulls": "mask", "ragged": "pad"}
    options["stack"] = {"s": ["n", "x"]}
    with both.make_batch_reader(with_row_index="row", **options) as reader:
        expected = list(reader)
    for batch in expected:
        numbers = batch["s"][:, 0].astype(np.int64)
        assert batch["word"].tolist() == [f"w{number}" for number in numbers.tolist()]
        np.testing.assert_array_equal(batch["pair"], np.stack([numbers] * 2, axis=1))
        np.testing.assert_array_equal(batch["wide"], np.repeat(numbers, 80).reshape(-1, 80).astype(np.float32))
        is_null = (numbers >= 10_000) & (numbers % 2 == 1)
        np.testing.assert_array_equal(batch["odd__valid"], ~is_null)
        np.testing.assert_array_equal(batch["odd"], np.where(is_null, 0, numbers))
        np.testing.assert_array_equal(batch["bag__length"], numbers % 4)
        np.testing.assert_array_equal(batch["row"], numbers % 10_000)
        np.testing.assert_array_equal(batch["from"], numbers >= 10_000)
    with both.make_torch_dataloader(num_workers=num_workers, **options) as loader:
        for batch, wanted in zip(loader, expected, strict=True):
            assert batch["word"] == wanted["word"].tolist()
            for name in ("s", "pair", "odd", "odd__valid", "bag", "from"):
                np.testing.assert_array_equal(batch[name].numpy(), wanted[name], strict=True)
    with both.make_tf_dataset(labels="from", **options) as dataset:
        for (features, labels), wanted in zip(dataset, expected, strict=True):
            np.testing.assert_array_equal(labels.numpy(), wanted["from"])
            np.testing.assert_array_equal(features["s"].numpy(), wanted["s"])


def test_shards_and_resumed_epochs_have_the_same_rows(sources: dict[str, DatasetConverter]) -> None:
    both = mix(sources, {"web": 0.6, "books": 0.4}, stop=777)
    options: dict[str, Any] = {"seed": 3, "shuffle_window_rows": 200}
    whole = read(both, **options)["n"]
    parts = [read(both, cur_shard=shard, shard_count=3, **options)["n"] for shard in range(3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    every: dict[str, Any] = {"batch_size": 30, "shuffle": True, "uneven": "keep", "columns": ["n"], **options}
    with both.make_batch_reader(**every) as reader:
        first = [batch["n"] for batch in itertools.islice(reader, 9)]
        state = json.loads(json.dumps(reader.state_dict()))
    rest = []
    for shard in range(2):
        with both.make_batch_reader(cur_shard=shard, shard_count=2, **every) as reader:
            reader.load_state_dict(state)
            rest += [batch["n"] for batch in reader]
    np.testing.assert_array_equal(np.concatenate([*first, *rest]), whole)
    other = mix(sources, {"web": 0.5, "books": 0.5}, stop=777)
    with (
        other.make_batch_reader(**every) as reader,
        pytest.raises(StateMismatchError, match=r"the rows \(fingerprint\)"),
    ):
        reader.load_state_dict(state)
    with both.make_batch_reader(**{**every, "uneven": "pad"}, cur_shard=2, shard_count=4) as reader:
        batches = list(reader)
    assert sum(len(batch["n"]) for batch in batches) == 195
    assert not batches[-1]["__valid"][-1] or all(batch["__valid"].all() for batch in batches)


def test_an_interrupt_while_a_thread_is_started_is_what_ends_the_loop(
    sources: dict[str, DatasetConverter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool does not know the thread then, and does not wait for it."""
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("converter-take"):
            raise KeyboardInterrupt

    def read_slowly(*arguments: Any) -> Iterator[Any]:
        for columns in read_plans(*arguments):
            time.sleep(0.2)
            yield columns

    read_plans = windows.read_plans
    monkeypatch.setattr(windows, "read_plans", read_slowly)
    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with mix(sources).make_batch_reader(batch_size=8, columns=["n"]) as reader, pytest.raises(KeyboardInterrupt):
        next(iter(reader))
    wait_until(lambda: not [thread.name for thread in threading.enumerate() if thread.name.startswith("converter-")])


@pytest.mark.parametrize(("before", "after"), [(500, 1000), (30, None), (15, 25), (None, "all")])
def test_a_state_is_of_the_sources_windows(sources: dict[str, DatasetConverter], before: Any, after: Any) -> None:
    """They may be larger than the mixture, and add up to the same."""
    mixture = mix(sources, stop=40)
    options: dict[str, Any] = {"batch_size": 4, "columns": ["n"], "shuffle": True}
    with (
        mixture.make_batch_reader(shuffle_window_rows=before, **options) as one,
        mixture.make_batch_reader(shuffle_window_rows=after, **options) as other,
        mixture.make_batch_reader(shuffle_window_rows=after, batch_size=4, columns=["n"]) as in_order,
    ):
        next(iter(one))
        state = one.state_dict()
        with pytest.raises(StateMismatchError, match="the windows of the sources"):
            other.load_state_dict(state)
        assert "windows" in state
        # Without a shuffle windows are nothing but memory.
        assert "windows" not in in_order.state_dict()
        older = {name: value for name, value in state.items() if name != "windows"}
        with contextlib.suppress(StateMismatchError):
            other.load_state_dict(older)
        with pytest.raises(StateMismatchError, match="windows=3"):
            one.load_state_dict(state | {"windows": 3})


def test_weights_may_change_with_the_epochs(sources: dict[str, DatasetConverter]) -> None:
    both = mix(sources, {"web": 0.9, "books": 0.1}, stop=200, source="from")
    later = both.with_weights({"web": 0.2, "books": 0.8}, from_epoch=2)
    found, numbers = [], []
    with later.make_batch_reader(batch_size=50, shuffle=True, columns=["n", "from"]) as reader:
        for _ in range(4):
            batches = list(reader)
            found.append(sum(int(batch["from"].sum()) for batch in batches))
            numbers += [number for batch in batches for number in batch["n"].tolist() if number >= 10_000]
    assert found == [20, 20, 160, 160]
    assert sorted(numbers[:300]) == list(range(10_000, 10_300))
    assert later.fingerprint != both.fingerprint


def test_views_are_mixed(sources: dict[str, DatasetConverter]) -> None:
    some = sources["web"].where([("n", "<", 100)])
    both = mix({"some": some, "books": sources["books"]}, stop="all")
    assert set(read(both)["n"].tolist()) == {*range(100), *range(10_000, 10_300)}
    sequences = {name: part.sequences(4) for name, part in sources.items()}
    both = mix(sequences, {"web": 1, "books": 1}, stop=100)
    assert both.schema["n"].shape == (4,)
    np.testing.assert_array_equal(np.diff(read(both)["n"], axis=1), 1)
    with pytest.raises(ValueError, match=r"differ in sequences\(\)"):
        mix({"a": sequences["web"], "b": sources["books"]})
    assert mix(sources).head(3)["n"].shape == (3,)
    assert mix(sources).plan(batch_size=100, ragged="pad", nulls="mask").steps_per_epoch == 13
    assert "1,300 rows of web: 1,000, books: 300" in repr(mix(sources))


def test_damage_in_any_source_is_told(sources: dict[str, DatasetConverter], tmp_path: Path) -> None:
    both = mix(sources)
    assert both.verify() == both.verify(every_row=True) == []
    told, own = both.describe(), [part.describe() for part in sources.values()]
    for name in ("bytes", "files", "row_groups"):
        assert told[name] == sum(one[name] for one in own)
    (tmp_path / "books" / "part.parquet").write_bytes(b"gone")
    (line,) = both.verify()
    assert "books" in line or "part.parquet" in line


def test_stacks_of_other_numbers_in_one_source_are_named(tmp_path: Path) -> None:
    parts = {}
    for name, float_dtype in (("a", "float32"), ("b", "float64")):
        pq.write_table(
            pa.table({"x": pa.array([1, 2], pa.int32()), "y": pa.array([1, 2], pa.float32())}), tmp_path / name
        )
        parts[name] = make_parquet_converter(tmp_path / name, float_dtype=float_dtype)
    said = r"stack: 's' would be float32 in 'a' and float64 in 'b'\. Make these converters with the same float_dtype\."
    with pytest.raises(ValueError, match=said):
        mix(parts).make_batch_reader(stack={"s": ["x", "y"]})


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("first", ["whole", "few"])
def test_wide_rows_of_a_whole_source_and_of_chosen_rows(
    sources: dict[str, DatasetConverter], first: str, *, shuffle: bool
) -> None:
    parts = {"whole": sources["web"], "few": sources["books"].where([("n", ">=", 10_050)])}
    both = mix({name: parts[name] for name in sorted(parts, reverse=first == "whole")}, stop="all")
    found = read(both, columns=["n", "wide", "pair"], shuffle=shuffle, shuffle_window_rows=200)
    assert set(found["n"].tolist()) == {*range(1000), *range(10_050, 10_300)}
    for name, width in (("wide", 80), ("pair", 2)):
        np.testing.assert_array_equal(
            found[name], np.repeat(found["n"], width).reshape(-1, width).astype(found[name].dtype)
        )


@pytest.mark.parametrize("names", [["known", "new"], ["new", "known"]])
def test_what_is_unseen_in_one_source_is_null_in_a_mixture(tmp_path: Path, names: list[str]) -> None:
    words = {"known": ["a", "b"], "new": ["b", "unseen"]}
    for name, pair in words.items():
        lists = pa.array([[pair[0]], pair], pa.list_(pa.string()))
        table = pa.table({"n": [0, 1], "word": pair, "bag": lists})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    known = make_parquet_converter(tmp_path / "known.parquet", categories=["word", "bag"])
    values = {name: known.schema[name].categories for name in ("word", "bag")}
    new = make_parquet_converter(tmp_path / "new.parquet", categories=values, unseen="null")
    parts = {"known": known, "new": new}
    both = mix({name: parts[name] for name in names}, source="from")
    assert both.schema["word"].has_nulls
    assert both.schema["bag"].has_null_elements
    found = read(both, columns=None, nulls="mask", ragged="nested")
    for row in range(4):
        expected = words[names[found["from"][row]]][: found["n"][row] + 1]
        assert (values["word"][found["word"][row]] if found["word__valid"][row] else "unseen") == expected[-1]
        codes = zip(found["bag"][row], found["bag__element_valid"][row], strict=True)
        assert [values["bag"][code] if is_known else "unseen" for code, is_known in codes] == expected


def test_sequences_with_texts_and_the_number_of_their_source(sources: dict[str, DatasetConverter]) -> None:
    sequences = {name: part.sequences(3, partial="pad") for name, part in sources.items()}
    both = mix(sequences, {"web": 1, "books": 1}, stop=90, source="from")
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "columns": ["from", "n", "word"]}
    with both.make_batch_reader(**options) as reader:
        expected = list(reader)
    assert list(expected[0])[:3] == ["from", "n", "word"]
    for batch in expected:
        np.testing.assert_array_equal(batch["from"], batch["n"][:, 0] >= 10_000)
        words = [[f"w{number}" if number or word else "" for number, word in zip(*rows, strict=True)]
                 for rows in zip(batch["n"].tolist(), batch["word"].tolist(), strict=True)]  # fmt: skip
        assert batch["word"].tolist() == words
    with both.make_tf_dataset(**options) as dataset:
        assert dataset.element_spec["from"].shape.as_list() == [None]
        assert len(list(dataset.unbatch())) == 90
    with both.make_torch_dataloader(**options) as loader:
        for batch, wanted in zip(loader, expected, strict=True):
            assert batch["word"] == wanted["word"].tolist()


@pytest.mark.parametrize("name", ["row", "__valid", "__length", "odd__valid", "s"])
def test_the_name_of_the_source_is_none_that_is_added(sources: dict[str, DatasetConverter], name: str) -> None:
    options: dict[str, Any] = {"with_row_index": "row", "stack": {"s": ["n"]}, "nulls": "mask", "ragged": "pad"}
    with pytest.raises(ValueError, match=f"source='{name}' is the name of a column that is added to batches"):
        mix(sources, source=name).make_batch_reader(**options)


def test_one_stack_of_all_columns(sources: dict[str, DatasetConverter], tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, 2, 3], "x": [1.5, 2.5, 3.5]}), tmp_path / "few.parquet")
    few = make_parquet_converter(tmp_path / "few.parquet")
    both = mix({"few": few, "again": few})
    found = read(both, columns=None, stack={"s": ["n", "x"]})
    assert list(found) == ["s"]
    assert sorted(found["s"][:, 0].tolist()) == [1, 1, 2, 2, 3, 3]


def test_mixtures_of_any_size_and_weights(sources: dict[str, DatasetConverter]) -> None:
    assert mix(sources, stop=10**15).plan(ragged="pad", nulls="mask", batch_size=10**6).steps_per_epoch == 10**9
    even = mix(sources, {"web": 5e-324, "books": 5e-324}, stop=100, source="from")
    assert Counter(read(even, columns=["from", "n"])["from"].tolist()) == {0: 50, 1: 50}
    assert len(mix(sources, {"web": 1e308, "books": 1e308}, stop=100)) == 100


def test_a_source_of_which_an_epoch_has_no_row_is_told(
    sources: dict[str, DatasetConverter], caplog: pytest.LogCaptureFixture
) -> None:
    few = mix(sources, {"web": 1, "books": 0.001}, stop=100)
    assert caplog.messages == [
        "In epochs of 100 rows none comes from 'books': its weight is too small for one. Raise stop, or the weight."
    ]
    caplog.clear()
    mix(sources, {"web": 1, "books": 0}, stop=100).with_weights({"web": 1, "books": 0.1}, from_epoch=2)
    assert not caplog.messages
    few.with_weights({"web": 0.001, "books": 1}, from_epoch=2)
    assert "none comes from 'web'" in caplog.text


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda a, b: mix([a, b]), "mix needs a dict of name to converter"),
        (lambda a, b: mix({"a": 1}), "mix needs a dict of name to converter, got 'a': int"),
        (
            lambda a, b: mix({"a": a, "b": b}, {"a": 1}),
            "weights must name each converter once; 'b' is only among the converters",
        ),
        (lambda a, b: mix({"a": a, "b": b}, {"a": 1, "b": -1}), "'b' has the weight -1"),
        (lambda a, b: mix({"a": a, "b": b}, {"a": 0, "b": 0}), "they sum to 0"),
        (lambda a, b: mix({"a": a, "b": b}, {"a": 1, "b": 1e-9}), "'b' has less than one in 4,096"),
        (lambda a, b: mix({"a": a, "b": b}, {"a": 1, "b": 1e-4}, stop=10**6), "'b' has less than one in 4,096"),
        (lambda a, b: mix({"a": a, "b": b}, {"a": 1e300, "b": 1e-300}), "'b' has less than one in 4,096"),
        (
            lambda a, b: mix({"a": a, "b": b}).with_weights({"a": 1e-4, "b": 1}, from_epoch=1),
            "'a' has less than one in 4,096",
        ),
        (lambda a, b: mix({"a": a, "b": b}, stop="never"), "stop must be 'first', 'all' or a number"),
        (lambda a, b: mix({"a": a, "b": b}, stop=0), "stop must be at least 1"),
        (lambda a, b: mix({"a": a, "b": b}, source="n"), "source must be a name that no column has"),
        (lambda a, b: mix({"a": a, "b": b}).where([("n", "<", 3)]), "call that on the converters before you mix"),
        (lambda a, b: mix({"a": a, "b": b}).statistics, "call that on the converters before you mix"),
        (lambda a, b: mix({"a": a, "b": b}).make_batch_reader(filters=[("n", "<", 3)]), r"choose rows with where\(\)"),
        (
            lambda a, b: mix({"a": a, "b": b}, source="from").make_batch_reader(columns=["from"]),
            "name a column of the sources, too, not 'from' alone",
        ),
        (lambda a, b: mix({"a": a, "b": b}).make_batch_reader(bucket_by="n"), "bucket_by: rows of a mixture"),
        (lambda a, b: mix({"a": a, "b": mix({"c": b})}), "mix needs a dict of name to converter, got 'b': Mixed"),
    ],
)
def test_wrong_arguments_are_refused_by_name(sources: dict[str, DatasetConverter], call: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call(sources["web"], sources["books"])


def test_columns_that_differ_are_named(sources: dict[str, DatasetConverter], tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array([1], pa.int32()), "z": [1]}), tmp_path / "other.parquet")
    other = make_parquet_converter(tmp_path / "other.parquet")
    with pytest.raises(
        ValueError, match=r"column 'n' is int64 of shape \(\) in 'web' and int32 of shape \(\) in 'other'"
    ):
        mix({"web": sources["web"], "other": other})
    pq.write_table(pa.table({"z": [1]}), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="no column is in all of 'web', 'none'"):
        mix({"web": sources["web"], "none": make_parquet_converter(tmp_path / "none.parquet")})
