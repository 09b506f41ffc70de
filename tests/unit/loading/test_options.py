"""The arguments of loaders stand in one place, and the public signatures are held against it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, make_parquet_converter
from converter.loading.options import LoaderOptions

OWN: dict[str, set[str]] = {
    "make_torch_dataloader": {
        "num_workers", "persistent_workers", "multiprocessing_context", "device", "pin_memory",
    },
    "make_tf_dataset": {"features", "labels", "weights", "prefetch"},
    "make_batch_reader": set(),
    "plan": set(),
}  # fmt: skip
"""The arguments that a method has beside those of every loader."""


@pytest.mark.parametrize("name", OWN)
def test_every_loader_takes_the_same_arguments(name: str) -> None:
    signature = inspect.signature(getattr(DatasetConverter, name))
    shared = {key: one for key, one in signature.parameters.items() if key not in OWN[name] and key != "self"}
    options = {field.name: field for field in dataclasses.fields(LoaderOptions)}
    assert list(shared) == list(options)
    assert OWN[name] <= set(signature.parameters)
    for key, one in shared.items():
        assert one.kind is inspect.Parameter.KEYWORD_ONLY
        assert (one.default, one.annotation) == (options[key].default, options[key].type), key


def test_each_argument_is_explained_once() -> None:
    """In the docstring of `make_torch_dataloader`, in the order of the signature."""
    explained = re.findall(r"^ {12}(\w+): ", str(DatasetConverter.make_torch_dataloader.__doc__), re.MULTILINE)
    expected = [field.name for field in dataclasses.fields(LoaderOptions)]
    own = [name for name in explained if name in OWN["make_torch_dataloader"]]
    left_out = [name for name in expected if name not in explained]
    assert left_out == []
    assert [name for name in explained if name not in own and name in expected] == expected
    assert set(own) == OWN["make_torch_dataloader"]


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        ("batch_size", 0, "batch_size must be at least 1"),
        ("batch_size", True, "batch_size must be an integer"),
        ("num_epochs", 0, "num_epochs must be at least 1"),
        ("shuffle", 1, "shuffle must be True or False"),
        ("seed", -1, "seed must be at least 0"),
        ("uneven", "cut", "uneven must be 'drop', 'pad', 'keep' or None"),
        ("workers_count", 0, "workers_count must be at least 1"),
        ("prefetch_batches", 0, "prefetch_batches must be at least 1"),
        ("local_cache_bytes", 0.5, "local_cache_bytes must be an integer"),
        ("local_cache_dir", b"cache", "local_cache_dir must be a path"),
        ("with_row_index", "", "with_row_index must be the name of a column to add"),
        ("transform", 3, "transform must be a function of a batch"),
    ],
)
def test_an_argument_that_is_wrong_whatever_the_columns_are_is_named(argument: str, value: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        LoaderOptions(**{argument: value})


def test_numpys_integers_are_taken_as_pythons() -> None:
    names = ("batch_size", "seed", "num_epochs", "prefetch_batches", "workers_count", "local_cache_bytes")
    options = LoaderOptions(**dict.fromkeys(names, np.uint8(200)))
    assert {name: (getattr(options, name), type(getattr(options, name))) for name in names} == dict.fromkeys(
        names, (200, int)
    )


def test_a_state_made_with_numpys_integers_is_json_and_loads(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "a.parquet")
    converter = make_parquet_converter(tmp_path)
    with converter.make_batch_reader(batch_size=np.int64(4), seed=np.int64(3), shuffle=True) as reader:
        reader.set_epoch(np.uint8(255))
        next(iter(reader))
        state = json.loads(json.dumps(reader.state_dict()))
        assert reader.state_dict(np.int64(2)) == reader.state_dict(2)
    assert state["epoch"] == 255
    with converter.make_batch_reader(batch_size=4, seed=3, shuffle=True) as reader:
        reader.load_state_dict(state)
        rest = [row for batch in reader for row in batch["id"].tolist()]
    with converter.make_batch_reader(batch_size=4, seed=3, shuffle=True) as reader:
        reader.set_epoch(255)
        assert rest == [row for batch in reader for row in batch["id"].tolist()][4:]
        with pytest.raises(ValueError, match=r"epoch must be below 2\*\*62"):
            reader.set_epoch(1 << 62)
