"""A file that is not what the manifest says is an error that names it."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from converter import DatasetConverter
from converter.dataset import borrow_files
from converter.errors import (
    ReadError,
    SourceChangedError,
)
from converter.schema import Schema


def data_files(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.rglob("*.parquet"))


def first_batch(converter: DatasetConverter) -> Any:
    return next(iter(converter.make_batch_reader(batch_size=200)))


def test_a_file_that_is_gone_is_named(small: DatasetConverter, cache_dir: Path) -> None:
    path = data_files(cache_dir)[1]
    path.unlink()
    with pytest.raises(SourceChangedError, match=rf"{path.name} is not there\. Was the converter deleted") as raised:
        first_batch(small)
    assert raised.value.path == f"file://{path}"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("converter-read")]


@pytest.mark.parametrize("keep", [-1, 100, 0])
def test_a_file_that_was_cut_is_named(small: DatasetConverter, cache_dir: Path, keep: int) -> None:
    path = data_files(cache_dir)[0]
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    said = rf"{path.name} has {len(data[:keep])} bytes, expected {len(data)}: it was changed or cut"
    with pytest.raises(SourceChangedError, match=said) as raised:
        first_batch(small)
    assert raised.value.path == f"file://{path}"


def test_a_file_with_a_damaged_footer_is_named(small: DatasetConverter, cache_dir: Path) -> None:
    path = data_files(cache_dir)[1]
    data = path.read_bytes()
    path.write_bytes(data[:-60] + bytes(byte ^ 0xFF for byte in data[-60:-8]) + data[-8:])
    with pytest.raises(SourceChangedError, match=rf"{path.name} has another footer than it was written with") as raised:
        first_batch(small)
    assert raised.value.path == f"file://{path}"


def test_a_footer_with_a_damaged_name_is_named(small: DatasetConverter, cache_dir: Path) -> None:
    path = data_files(cache_dir)[0]
    data = path.read_bytes()
    path.write_bytes(data.replace(b"vector", b"\x89ector"))
    with pytest.raises(SourceChangedError, match=rf"{path.name} has another footer than it was written with"):
        first_batch(small)


def test_a_footer_that_cannot_be_decoded_is_named(small: DatasetConverter, cache_dir: Path) -> None:
    # As it is where nobody took the footer's digest.
    path = data_files(cache_dir)[1]
    data = path.read_bytes()
    path.write_bytes(data[:-60] + bytes(byte ^ 0xFF for byte in data[-60:-8]) + data[-8:])
    bare = borrow_files(small._storage, dataclasses.replace(small._manifest, file_footers=None))
    with pytest.raises(ReadError, match=rf"Row group 0 of .*{path.name} cannot be decoded: ") as raised:
        first_batch(bare)
    assert raised.value.path == f"file://{path}"
    assert raised.value.row_group == 0


@pytest.mark.parametrize("shape", [(2,), (4,)])
def test_rows_of_another_shape_than_the_manifest_says_cannot_be_decoded(
    small: DatasetConverter, shape: tuple[int, ...]
) -> None:
    fields = (small.schema["id"], dataclasses.replace(small.schema["vector"], shape=shape))
    manifest = dataclasses.replace(small._manifest, schema=Schema(fields))
    other = borrow_files(small._storage, manifest)
    with pytest.raises(ReadError, match=r"Row group 0 of .* cannot be decoded: "):
        first_batch(other)
