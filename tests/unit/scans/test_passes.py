"""What a filter or a split leaves is the same on every way to read it; splits are exact, fair and stable."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import DatasetConverter
from converter.dataset import borrow_files
from converter.errors import CacheError, NullValueError, SourceError
from converter.selection import hash_bytes, hash_numbers
from tests.properties import examples
from tests.unit.scans.tables import NAN, NUM_ROWS, UTC, VALUES, rows_of, sorted_rows, write_table

# What a part is


def test_a_part_is_counted_and_a_part_of_it_is_the_part_of_both(numbers: DatasetConverter) -> None:
    both = numbers.where([("id", ">", 30), ("group", "<", 5)])
    nested = numbers.where([("id", ">", 30)]).where(pc.field("group") < 5)
    expected = [row for row in range(31, 100) if row % 10 < 5]
    assert len(both) == len(nested) == len(expected)
    assert rows_of(both) == rows_of(nested) == expected
    assert both.fingerprint == nested.fingerprint != numbers.fingerprint
    assert numbers.where([("id", ">=", 0)]).fingerprint == numbers.where(pc.field("id") < 100).fingerprint
    assert both.fingerprint != numbers.where([("id", ">", 31), ("group", "<", 5)]).fingerprint
    for batch_size in (1, 7, 1000):
        loader = both.make_torch_dataloader(batch_size=batch_size)
        batches = list(loader)
        assert len(loader) == len(batches) == -(-len(expected) // batch_size)
        assert [row for batch in batches for row in batch["id"].tolist()] == expected


FILTER: list[Any] = [("group", "not in", [3, 4]), ("id", "<", 95)]
LEFT = [row for row in range(95) if row % 10 not in (3, 4)]


@pytest.mark.parametrize(
    ("shuffle", "framework"),
    [
        *itertools.product([False, True], ["numpy", "torch"]),
        pytest.param(False, "processes", marks=pytest.mark.long("starts processes; shuffled rows show as much")),
        (True, "processes"),
    ],
)
def test_shards_and_states_of_a_part_are_exact(numbers: DatasetConverter, shuffle: bool, framework: str) -> None:
    part = numbers.where(FILTER)
    options: dict[str, Any] = {"shuffle": shuffle, "shuffle_window_rows": 20, "batch_size": 6, "columns": ["id"]}

    def make(converter: DatasetConverter, **more: Any) -> Any:
        if framework == "numpy":
            return converter.make_batch_reader(**options, **more)
        return converter.make_torch_dataloader(num_workers=2 if framework == "processes" else 0, **options, **more)

    read: list[int] = []
    for index in range(3):
        with make(part, cur_shard=index, shard_count=3, uneven="keep") as loader:
            batches = [batch["id"].tolist() for batch in loader]
        read += itertools.chain(*batches)
        steps = [2] if framework == "processes" else range(len(batches) + 1)
        for step in steps:
            shard: dict[str, Any] = {"cur_shard": index, "shard_count": 3, "uneven": "keep"}
            with make(pickle.loads(pickle.dumps(part)), **shard) as fresh:
                fresh.load_state_dict(json.loads(json.dumps(fresh.state_dict(batches=step))))
                assert [batch["id"].tolist() for batch in fresh] == batches[step:], step
    assert sorted(read) == LEFT
    assert (read == LEFT) == (not shuffle)


@pytest.mark.parametrize("shuffle", [False, True])
def test_filters_of_a_loader_are_those_of_a_part(numbers: DatasetConverter, shuffle: bool) -> None:
    part = numbers.where(FILTER)
    for window in (None, 20, "all"):
        options: dict[str, Any] = {"shuffle": shuffle, "shuffle_window_rows": window, "batch_size": 8, "seed": 2}
        for kind in ("make_batch_reader", "make_torch_dataloader"):
            one, other = getattr(numbers, kind)(filters=FILTER, **options), getattr(part, kind)(**options)
            assert len(one) == len(other) == -(-len(LEFT) // 8)
            assert one.state_dict() == other.state_dict()
            found = [batch["id"].tolist() for batch in one]
            assert found == [batch["id"].tolist() for batch in other]
            assert sorted(itertools.chain(*found)) == LEFT
    # And those of a part's loader are a part's part.
    reader = part.make_batch_reader(filters=[("id", ">", 50)])
    assert [row for batch in reader for row in batch["id"].tolist()] == [row for row in LEFT if row > 50]


def test_a_copy_of_a_part_has_its_counts_without_a_look_at_the_rows(numbers: DatasetConverter) -> None:
    part = numbers.where(FILTER)
    copy = pickle.loads(pickle.dumps(part))
    # Where its files are not, it still knows what is in them.
    elsewhere = borrow_files(copy._storage.below("elsewhere"), copy._manifest)
    for found in (copy, elsewhere):
        assert len(found) == len(LEFT)
        assert found.fingerprint == part.fingerprint
        assert len(found.make_batch_reader(batch_size=10, shuffle=True)) == -(-len(LEFT) // 10)
    assert rows_of(copy, shuffle=True) == rows_of(part, shuffle=True)
    assert rows_of(copy.where([("id", ">", 50)])) == [row for row in LEFT if row > 50]


def test_statistics_of_a_part_are_numpys_of_that_part(known: DatasetConverter) -> None:
    part = known.where([("sorted", ">", 0), ("text", "!=", "a")])
    rows = [row for row in range(NUM_ROWS) if VALUES["sorted"][row] > 0 and VALUES["text"][row] not in ("a", None)]
    assert rows_of(part) == rows
    assert list(part.statistics) == list(VALUES)
    for name, values in VALUES.items():
        found, all_values = part.statistics[name], [values[row] for row in rows]
        present = [value for value in all_values if value is not None]
        assert found.null_count == len(all_values) - len(present), name
        if name in ("text", "raw"):
            continue
        numbers_ = [value for value in present if value == value]
        assert (found.min, found.max) == (min(numbers_), max(numbers_)), name
        assert found.nan_count == len(present) - len(numbers_), name
        if name not in ("day", "at", "x"):
            wide = np.array(numbers_, float)
            np.testing.assert_allclose([found.mean, found.std], [wide.mean(), wide.std()], rtol=1e-9)
    # The whole's are still the whole's.
    assert known.statistics["sorted"].min == -10


@pytest.mark.parametrize("how", ["where", "split", "key", "split of where"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_row_numbers_are_those_of_the_dataset(numbers: DatasetConverter, shuffle: bool, how: str) -> None:
    fractions = {"one": 0.6, "two": 0.4}
    parts = {
        "where": lambda: [numbers.where(FILTER)],
        "split": lambda: numbers.split(fractions).values(),
        "key": lambda: numbers.split(fractions, by="group", seed=1).values(),
        "split of where": lambda: numbers.where(FILTER).split(fractions).values(),
    }[how]()
    for part in parts:
        seen = 0
        options: dict[str, Any] = {"shuffle": shuffle, "shuffle_window_rows": 15, "with_row_index": "row"}
        for batch in part.make_batch_reader(**options, batch_size=9):
            assert list(batch) == ["id", "group", "row"]
            assert batch["row"].dtype == np.int64
            np.testing.assert_array_equal(batch["row"], batch["id"])
            seen += len(batch["row"])
        assert seen == len(part)
        (whole,) = part.make_torch_dataloader(**options, batch_size=1000, columns=["group"])
        assert (whole["row"] % 10 == whole["group"]).all()


def test_masks_of_a_part_say_which_of_its_values_are_present(known: DatasetConverter) -> None:
    part = known.where(pc.field("small").is_null() | (pc.field("id") > 100))
    rows = [row for row in range(NUM_ROWS) if VALUES["small"][row] is None or row > 100]
    for framework in ("make_batch_reader", "make_torch_dataloader"):
        found: list[int] = []
        for batch in getattr(part, framework)(
            columns=["id", "small", "text"], nulls="mask", batch_size=4, shuffle=True, shuffle_window_rows=10
        ):
            assert list(batch) == ["id", "small", "small__valid", "text", "text__valid"]
            for name in ("small", "text"):
                values = [VALUES[name][row] for row in batch["id"].tolist()]
                assert batch[f"{name}__valid"].tolist() == [value is not None for value in values]
                empty = "" if name == "text" else 0
                assert list(batch[name]) == [empty if value is None else value for value in values]
            found += batch["id"].tolist()
        assert sorted(found) == rows


def test_nulls_that_a_filter_left_out_are_not_met(with_gaps: DatasetConverter) -> None:
    part = with_gaps.where(pc.field("n").is_valid())
    for make in (part.make_batch_reader, part.make_torch_dataloader):
        assert [list(map(int, batch["n"])) for batch in make(columns=["n"])] == [[1, 3, 4, 6]]
    (batch,) = with_gaps.make_batch_reader(columns=["n"], filters=[("n", "!=", 3)])
    assert batch["n"].tolist() == [1, 4, 6]
    stacked = next(iter(part.make_batch_reader(columns=["s"], stack={"pair": ["n", "n"]})))
    assert stacked["pair"].tolist() == [[1, 1], [3, 3], [4, 4], [6, 6]]


def test_a_null_among_the_rows_that_are_left_is_an_error(with_gaps: DatasetConverter) -> None:
    part = with_gaps.where(pc.field("n").is_valid())
    with pytest.raises(NullValueError, match=r"'x' holds .*null.*nulls='raise'") as raised:
        list(part.make_batch_reader(columns=["x"]))
    assert raised.value.column == "x"


# Splits by row


@examples(40)
@given(
    hundredths=st.lists(st.integers(3, 60), min_size=1, max_size=5).filter(lambda parts: sum(parts) <= 100),
    seed=st.integers(0, 2**62),
)
def test_parts_are_disjoint_and_as_large_as_was_said_to_a_row(
    numbers: DatasetConverter, hundredths: list[int], seed: int
) -> None:
    fractions = {f"part {index}": one / 100 for index, one in enumerate(hundredths)}
    parts = numbers.split(fractions, seed=seed)
    assert list(parts) == list(fractions)
    rows = [rows_of(part) for part in parts.values()]
    assert [len(part) for part in parts.values()] == [len(found) for found in rows]
    together = list(itertools.chain(*rows))
    assert len(set(together)) == len(together)
    for found, fraction in zip(rows, fractions.values(), strict=True):
        assert abs(len(found) - 100 * fraction) < 1 + 1e-9
    if sum(hundredths) == 100:
        assert sorted(together) == list(range(100))


@pytest.mark.parametrize(
    ("fractions", "sizes"),
    [
        ([0.9, 0.1], [90, 10]),
        ([0.7, 0.2, 0.1], [70, 20, 10]),
        ([0.8, 0.1, 0.1], [80, 10, 10]),
        ([0.29, 0.71], [29, 71]),
        ([0.57, 0.43], [57, 43]),
        ([0.1] * 10, [10] * 10),
        ([0.5], [50]),
        ([1], [100]),
        ([1 / 3, 1 / 3, 1 / 3], None),
        ([1e-2] * 100, [1] * 100),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_fraction_that_is_a_whole_number_of_rows_is_that_number(
    numbers: DatasetConverter, fractions: list[float], sizes: list[int] | None
) -> None:
    found = [len(part) for part in numbers.split({str(index): one for index, one in enumerate(fractions)}).values()]
    assert found == sizes if sizes is not None else sorted(found) == [33, 33, 34]


def test_a_split_is_the_same_on_every_call_and_another_for_another_seed(numbers: DatasetConverter) -> None:
    fractions = {"train": 0.6, "val": 0.3}
    first, again = numbers.split(fractions, seed=5), numbers.split(fractions, seed=5)
    copied = pickle.loads(pickle.dumps(numbers)).split(fractions, seed=5)
    other = numbers.split(fractions, seed=6)
    for name in fractions:
        assert rows_of(first[name]) == rows_of(again[name]) == rows_of(copied[name])
        assert first[name].fingerprint == copied[name].fingerprint
        assert rows_of(first[name]) != rows_of(other[name])
    assert rows_of(numbers.split(fractions)["val"]) == rows_of(numbers.split(fractions, seed=0)["val"])
    assert rows_of(first["train"]) == sorted(rows_of(first["train"]))


def test_every_row_is_as_likely_in_a_part_and_so_is_every_pair(tmp_path: Path) -> None:
    times, pairs, num_splits = np.zeros(100), 0, 300
    with write_table(tmp_path, {"id": ("int64", list(range(100)))}) as converter:
        for seed in range(num_splits):
            selection = converter.split({"train": 0.7, "val": 0.3}, seed=seed)["val"]._manifest.selection
            assert selection is not None
            found = selection.mask(0, 100)
            times += found
            pairs += int((found[1:] & found[:-1]).sum())
    expected = 0.3 * num_splits
    assert ((times - expected) ** 2 / (expected * 0.7)).sum() < 100 + 6 * math.sqrt(200)
    together = num_splits * 99 * 0.3 * 29 / 99
    assert abs(pairs - together) < 5 * math.sqrt(together)


def test_a_split_of_a_part_and_a_part_of_a_split_have_its_rows_alone(numbers: DatasetConverter) -> None:
    part = numbers.where([("group", "<", 6)])
    parts = part.split({"one": 0.5, "two": 0.25, "three": 0.25}, seed=1)
    assert [len(one) for one in parts.values()] == [30, 15, 15]
    rows = [rows_of(one) for one in parts.values()]
    assert sorted(itertools.chain(*rows)) == [row for row in range(100) if row % 10 < 6]
    assert rows_of(parts["one"].where([("id", "<", 40)])) == [row for row in rows[0] if row < 40]
    again = parts["one"].split({"a": 0.5, "b": 0.5}, seed=1)
    assert sorted(rows_of(again["a"]) + rows_of(again["b"])) == rows[0]
    assert len(again["a"]) == 15
    by_key = parts["one"].split({"a": 0.5, "b": 0.5}, by="group", seed=2)
    assert sorted(rows_of(by_key["a"]) + rows_of(by_key["b"])) == rows[0]


# Splits by key

KEYS: dict[str, tuple[str, list[Any]]] = {
    "int64": ("int64", [-(2**63), 2**63 - 1, 0, -1, 1, *range(100, 135)]),
    "int32": ("int32", [-(2**31), 2**31 - 1, *range(38)]),
    "int16": ("int16", [-(2**15), 2**15 - 1, *range(38)]),
    "int8": ("int8", [-128, 127, *range(38)]),
    "text": ("str", ["", "a", "b", "ab", "a" * 8, "a" * 9, "ž" * 20, "🐟", "z" * 5000, "\x00", "\x00\x00",
                     *(f"user-{number}" for number in range(29))]),
    "raw": ("bytes", [b"", b"\x00", b"\x00\x00", b"\xff" * 9, *(bytes([number, 0, 7]) for number in range(36))]),
    "day": ("datetime64[D]", [dt.date(1, 1, 1), dt.date(9999, 12, 31),
            *(dt.date(2024, 1, day) for day in range(1, 32))]),
    "at": ("datetime64[us]", [dt.datetime(2024, 1, 1, microsecond=number, tzinfo=UTC) for number in range(40)]),
    "null": ("int64", [None, *range(39)]),
    "null text": ("str", [None, "", *map(str, range(38))]),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", list(KEYS))
def test_no_key_is_in_two_parts_wherever_its_rows_stand(tmp_path: Path, kind: str) -> None:
    dtype, keys = KEYS[kind]
    fractions = {"train": 0.6, "val": 0.4}
    order = np.random.default_rng(1).permutation(3 * len(keys)).tolist()
    spread = [keys[place % len(keys)] for place in order]
    sides: list[dict[Any, str]] = []
    layouts: list[tuple[list[Any], dict[str, Any]]] = [
        (spread, {"row_group_bytes": 64}), (spread[::-1], {"step": 17}), (sorted(spread, key=str), {}),
    ]  # fmt: skip
    for number, (rows, options) in enumerate(layouts):
        with write_table(tmp_path / str(number), {"key": (dtype, rows)}, **options) as converter:
            parts = converter.split(fractions, by="key", seed=9)
            found = [[rows[row] for row in rows_of(part)] for part in parts.values()]
        assert sorted(map(str, found[0] + found[1])) == sorted(map(str, rows))
        assert not set(found[0]) & set(found[1])
        sides.append({key: name for name, side in zip(fractions, found, strict=True) for key in side})
        assert set(sides[-1].values()) == {"train", "val"}
    assert sides[0] == sides[1] == sides[2]


def test_booleans_are_keys_too(tmp_path: Path) -> None:
    with write_table(tmp_path, {"flag": ("bool", [True, False, None] * 20)}, step=25) as converter:
        for seed in range(8):
            try:
                parts = converter.split({"one": 0.5, "two": 0.5}, by="flag", seed=seed)
            except SourceError:
                continue
            sides = [{row % 3 for row in rows_of(part)} for part in parts.values()]
            assert not sides[0] & sides[1]
            assert sides[0] | sides[1] == {0, 1, 2}
            return
    raise AssertionError("no seed divides them")


def test_a_key_has_one_side_whatever_its_width(tmp_path: Path) -> None:
    keys = list(range(-100, 100))
    sides = []
    for dtype in ("int8", "int16", "int32", "int64"):
        with write_table(tmp_path / dtype, {"key": (dtype, keys)}) as converter:
            sides.append(rows_of(converter.split({"one": 0.5, "two": 0.5}, by="key", seed=3)["one"]))
    assert sides[0] == sides[1] == sides[2] == sides[3]


def test_of_many_keys_each_part_has_about_its_fraction(tmp_path: Path) -> None:
    num_keys = 20_000
    columns: dict[str, tuple[str, list[Any]]] = {
        "number": ("int64", list(range(num_keys))),
        "text": ("str", [f"user-{number:06}" for number in range(num_keys)]),
        "raw": ("bytes", [number.to_bytes(3, "big") for number in range(num_keys)]),
    }
    fractions = {"train": 0.8, "val": 0.15, "test": 0.05}
    with write_table(tmp_path, columns, step=7000) as converter:
        sides = {}
        for name in columns:
            parts = converter.split(fractions, by=name, seed=2)
            assert sum(map(len, parts.values())) == num_keys
            for part, fraction in fractions.items():
                spread = math.sqrt(num_keys * fraction * (1 - fraction))
                assert abs(len(parts[part]) - num_keys * fraction) < 5 * spread, (name, part)
            sides[name] = set(rows_of(parts["train"], batch_size=5000))
        # Another seed, or another key, divides them otherwise: 64 % are on the same side by chance.
        other = set(rows_of(converter.split(fractions, by="number", seed=3)["train"], batch_size=5000))
        for one, another in ((sides["number"], other), (sides["number"], sides["text"]), (sides["raw"], sides["text"])):
            assert abs(len(one & another) - 0.64 * num_keys) < 6 * math.sqrt(num_keys * 0.64 * 0.36)


def splitmix(value: int) -> int:
    """The mixing of splitmix64, as its authors wrote it, on Python's own integers."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5), seed=st.integers(0, 2**63))
def test_the_hash_of_a_number_is_splitmix(numbers: list[int], seed: int) -> None:
    expected = [splitmix((number & (2**64 - 1)) ^ splitmix(seed)) for number in numbers]
    assert hash_numbers(np.array(numbers, np.int64), seed).tolist() == expected


@given(texts=st.lists(st.binary(max_size=40), min_size=1, max_size=6), seed=st.integers(0, 2**63))
def test_the_hash_of_bytes_is_splitmix_of_eight_at_a_time(texts: list[bytes], seed: int) -> None:
    expected = []
    for text in texts:
        value = splitmix(len(text) ^ splitmix(seed))
        for start in range(0, len(text), 8):
            value = splitmix(value ^ splitmix(int.from_bytes(text[start : start + 8], "little")))
        expected.append(value)
    offsets = np.cumsum([0, *map(len, texts)])
    data = np.frombuffer(b"".join(texts), np.uint8)
    assert hash_bytes(data, offsets, seed).tolist() == expected


def test_hashes_are_the_ones_that_old_splits_were_made_by() -> None:
    """Written down once: whoever changes these moves keys from training to validation."""
    numbers = np.array([0, 1, -1, 2**63 - 1])
    assert hash_numbers(numbers, 0).tolist() == NUMBERS_0
    assert hash_numbers(numbers, 7).tolist() == NUMBERS_7
    texts = [b"", b"a", b"abcdefgh", b"abcdefghi", "ž🐟".encode()]
    found = hash_bytes(np.frombuffer(b"".join(texts), np.uint8), np.cumsum([0, *map(len, texts)]), 0)
    assert found.tolist() == TEXTS_0


NUMBERS_0 = [12035550249420947055, 627405149472732430, 3303439293501059696, 14389535693014737104]
NUMBERS_7 = [13309476754707697221, 4414019431610648415, 12225420764836534112, 500464802628977885]
TEXTS_0 = [12035550249420947055, 12094075935363807744, 92124989317794733, 7162786010422213892, 9373953331760613812]


def test_parts_are_the_ones_that_old_splits_had(tmp_path: Path) -> None:
    """Written down once, as the hashes; the rows of a split by row depend on the fingerprint as well."""
    keys: list[Any] = [*range(10), None]
    texts = ["", "a", "b", "user-1", "user-2", "user-3", "ž", "long " * 9, "0", "1", None]
    with write_table(tmp_path, {"key": ("int64", keys), "text": ("str", texts)}) as converter:
        fractions = {"train": 0.5, "val": 0.5}
        by_key = {seed: rows_of(converter.split(fractions, by="key", seed=seed)["val"]) for seed in (0, 1)}
        by_text = {seed: rows_of(converter.split(fractions, by="text", seed=seed)["val"]) for seed in (0, 1)}
    assert by_key == BY_KEY
    assert by_text == BY_TEXT


BY_KEY = {0: [0, 2, 3, 8, 9], 1: [1, 2, 3, 4, 5]}
BY_TEXT = {0: [0, 1, 3, 5, 9], 1: [4, 5, 8]}


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({"fractions": {}}, TypeError, "fractions must be a dict"),
        ({"fractions": [0.5, 0.5]}, TypeError, "fractions must be a dict"),
        ({"fractions": {"a": "half"}}, TypeError, "fractions must be a dict"),
        ({"fractions": {"a": True}}, TypeError, "fractions must be a dict"),
        ({"fractions": {"a": 0}}, ValueError, "a number above 0"),
        ({"fractions": {"a": 0.5, "b": -0.1}}, ValueError, "a number above 0"),
        ({"fractions": {"a": NAN}}, ValueError, "a number above 0"),
        ({"fractions": {"a": 0.7, "b": 0.4}}, ValueError, "together at most 1.*together 1.1"),
        ({"fractions": {"a": 0.999, "b": 0.0001}}, SourceError, "The part 'b' of 100 rows would be empty"),
        ({"by": "idd"}, ValueError, r"by: There is no column 'idd'\. Did you mean 'id'\?"),
        ({"by": 3}, ValueError, "by: There is no column '3'"),
        ({"by": ["id"]}, ValueError, "by: There is no column"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"seed": 0.5}, TypeError, "seed must be an integer"),
    ],
    ids=str,
)
def test_a_bad_split_names_itself(numbers: DatasetConverter, arguments: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said):
        numbers.split(**{"fractions": {"a": 0.5, "b": 0.5}} | arguments)


@pytest.mark.parametrize("by", ["x", "y"])
def test_a_number_with_a_point_is_no_key(known: DatasetConverter, by: str) -> None:
    with pytest.raises(
        ValueError, match=f"by: column '{by}' has dtype float.*a key is a whole number, a time or a text"
    ):
        known.split({"a": 0.5}, by=by)


def test_a_tensor_is_no_key(odd_kinds: DatasetConverter) -> None:
    for by in ("vector", "words"):
        with pytest.raises(ValueError, match=f"by: column '{by}' has rows of several "):
            odd_kinds.split({"a": 0.5}, by=by)


@pytest.mark.parametrize("by", [None, "id", "text"])
def test_any_seed_that_a_loader_takes_is_one_for_a_split(odd_kinds: DatasetConverter, by: str | None) -> None:
    seed = 2**70
    assert len(list(odd_kinds.make_batch_reader(columns=["id"], shuffle=True, seed=seed))) == 1
    parts = odd_kinds.split({"a": 0.5, "b": 0.5}, by=by, seed=seed)
    assert sum(map(len, parts.values())) == 30


# How long a part lives


def test_a_part_that_is_closed_leaves_the_files(tmp_path: Path) -> None:
    with sorted_rows(tmp_path) as converter:
        with converter.where([("id", "<", 20)]) as part:
            assert len(part) == 20
        with pytest.raises(CacheError, match="was closed, so it has no rows any more"):
            part.make_batch_reader()
        other = converter.split({"a": 0.5, "b": 0.5})["a"]
        other.delete()
        for use in (other.make_batch_reader, lambda: other.where([("id", "<", 20)]), lambda: other.split({"a": 1})):
            with pytest.raises(CacheError, match="so it has no rows any more"):
                use()
        del part
        assert len(list(tmp_path.rglob("*.parquet"))) == 2
        assert rows_of(converter) == list(range(100))
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_part_of_what_was_deleted_says_so(tmp_path: Path) -> None:
    with sorted_rows(tmp_path) as converter:
        part = converter.where([("id", "<", 20)])
        nested = part.split({"a": 0.5, "b": 0.5})["a"]
    for one in (part, nested):
        for use in (
            one.make_batch_reader,
            one.make_torch_dataloader,
            one.plan,
            lambda one=one: one.where([("id", "<", 3)]),
            lambda one=one: one.split({"a": 1.0}),
        ):
            with pytest.raises(CacheError, match="was deleted, so it has no rows any more"):
                use()
        assert "deleted" in repr(one)


def test_a_part_says_how_many_rows_of_how_many(numbers: DatasetConverter) -> None:
    assert repr(numbers).startswith("DatasetConverter(100 rows × 2 columns, ")
    part = numbers.where([("id", "<", 20)])
    assert repr(part).startswith("DatasetConverter(20 of 100 rows × 2 columns, ")
    assert repr(part.where([("id", "<", 3)])).startswith("DatasetConverter(3 of 100 rows × 2 columns, ")
    assert "<p>DatasetConverter(20 of 100 rows" in part._repr_html_()


def test_a_part_of_a_manifest_without_statistics_is_the_same(numbers: DatasetConverter) -> None:
    bare = borrow_files(numbers._storage, dataclasses.replace(numbers._manifest, statistics={}))
    assert rows_of(bare.where(FILTER)) == LEFT
    assert bare.where(FILTER).statistics["id"].max == max(LEFT)
