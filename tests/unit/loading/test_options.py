"""The arguments of loaders stand in one place, and the public signatures are held against it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

from converter import DatasetConverter
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
        ("with_row_index", "", "with_row_index must be the name of a column to add"),
        ("transform", 3, "transform must be a function of a batch"),
    ],
)
def test_an_argument_that_is_wrong_whatever_the_columns_are_is_named(argument: str, value: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        LoaderOptions(**{argument: value})
