"""The warning of a move comes once, at the user's line, with native lines that run and read the same rows."""

from __future__ import annotations

import ast
import warnings
from typing import Any

import pytest
import torch

from converter import Image, NumPy, make_parquet_converter
from converter.petastorm import PetastormDeprecationWarning, make_batch_reader, make_reader
from converter.petastorm import warning as module
from tests.unit.petastorm.conftest import Stored


@pytest.fixture(autouse=True)
def _nobody_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_warned", False)


def caught_in(make: Any, *arguments: Any, **options: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(*arguments, **options).stop()
    return [each for each in caught if issubclass(each.category, PetastormDeprecationWarning)]


def native_lines(warning: warnings.WarningMessage) -> str:
    return str(warning.message).splitlines()[1].strip()


def test_it_comes_once_and_names_the_users_file(stored: Stored, plain: Stored) -> None:
    (first,) = caught_in(make_reader, stored.url)
    assert first.filename == __file__
    assert str(first.message).startswith("make_reader is Petastorm's interface. The native form is\n")
    assert issubclass(first.category, DeprecationWarning)
    assert caught_in(make_batch_reader, plain.url) == []


def test_the_native_lines_of_rows_decode_what_codecs_stored(stored: Stored) -> None:
    (warning,) = caught_in(
        make_reader, stored.url, schema_fields=["id", "picture", "matrix", "ragged"], num_epochs=2, seed=3,
        cur_shard=0, shard_count=2,
    )  # fmt: skip
    lines = native_lines(warning)
    ast.parse(lines)
    batches: list[Any] = []
    names = {"make_parquet_converter": make_parquet_converter, "Image": Image, "NumPy": NumPy, "batches": batches}
    exec(lines.replace("...", "batches += loader"), names)
    ids = [number for batch in batches for number in batch["id"].tolist()]
    assert len(ids) == 100
    assert batches[0]["picture"].shape[1:] == (4, 6, 3)
    assert batches[0]["matrix"].shape[1:] == (2, 3)
    assert batches[0]["ragged"][0].dtype == torch.int32


def test_the_native_lines_of_batches_have_the_arguments_that_were_given(plain: Stored) -> None:
    (warning,) = caught_in(
        make_batch_reader, plain.url, schema_fields=["id"], num_epochs=None, shuffle_row_groups=False
    )
    assert native_lines(warning) == (
        f"with make_parquet_converter({plain.url!r}, columns=['id']) as converter, "
        "converter.make_torch_dataloader(batch_size=1024, num_epochs=None) as loader: ..."
    )
