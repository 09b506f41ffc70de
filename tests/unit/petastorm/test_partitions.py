"""Partition columns: what folders' names say, as values of rows, to predicates and to filters."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from converter.petastorm import make_batch_reader, make_reader
from converter.petastorm.errors import DecodeFieldError
from converter.petastorm.etl.dataset_metadata import write_metadata
from converter.petastorm.predicates import in_set
from converter.petastorm.unischema import Unischema, UnischemaField
from converter.petastorm.utils import decode_row

NOON = dt.datetime(2020, 1, 1, 12)  # noqa: DTZ001 (folders say no zone)


def store_of(path: Path, *folders: str, dtype: Any = None) -> str:
    """A store with a row in each of these folders, numbered; with a schema if the folders' dtype is given."""
    for number, folder in enumerate(folders):
        (path / folder).mkdir(parents=True)
        pq.write_table(pa.table({"id": [number]}), path / folder / "part.parquet")
    if dtype is not None:
        name = folders[0].partition("=")[0]
        write_metadata(
            path.as_uri(), Unischema("S", [UnischemaField("id", np.int64, ()), UnischemaField(name, dtype, ())])
        )
    return path.as_uri()


def ids_of(url: str, make: Any = make_batch_reader, **options: Any) -> list[int]:
    with make(url, schema_fields=["id"], **options) as reader:
        return sorted(int(number) for element in reader for number in np.ravel(element.id))


@pytest.mark.parametrize("dtype", [np.bool_, bool])
def test_false_is_false(tmp_path: Path, dtype: Any) -> None:
    url = store_of(tmp_path, "flag=true", "flag=false", "flag=False", dtype=dtype)
    with make_reader(url) as reader:
        assert sorted((int(row.id), bool(row.flag)) for row in reader) == [(0, True), (1, False), (2, False)]
    assert ids_of(url, make_reader, predicate=in_set({True}, "flag")) == [0]
    assert ids_of(url, make_reader, predicate=in_set({False}, "flag")) == [1, 2]
    assert ids_of(url, make_reader, filters=[("flag", "=", False)]) == [1, 2]
    schema = Unischema("S", [UnischemaField("flag", np.bool_, ())])
    assert decode_row({"flag": "false"}, schema) == {"flag": False}


def test_a_predicate_gets_the_fields_type_also_if_the_field_is_not_read(tmp_path: Path) -> None:
    url = store_of(tmp_path, "year=2020", "year=2021")
    assert ids_of(url, predicate=in_set({2021}, "year")) == [1]


def test_a_folder_that_is_no_value_of_its_field_is_named(tmp_path: Path) -> None:
    url = store_of(tmp_path, "flag=perhaps", dtype=np.bool_)
    with (
        make_reader(url) as reader,
        pytest.raises(DecodeFieldError, match=r"failed: its folder says 'perhaps': .* neither"),
    ):
        next(reader)


def test_an_expression_compares_whole_numbers_or_texts(tmp_path: Path) -> None:
    url = store_of(tmp_path, "year=2020", "year=2021")
    assert ids_of(url, filters=pc.field("year") == 2021) == [1]
    assert ids_of(url, filters=pc.field("year") == "2021") == [1]
    assert ids_of(url, filters=[("year", ">", 2020)]) == [1]


@pytest.mark.parametrize("text", ["²", "٣", "-", "--1"])
def test_signs_that_are_no_digits_of_ascii_are_texts(tmp_path: Path, text: str) -> None:
    with make_batch_reader(store_of(tmp_path, f"sign={text}")) as reader:
        assert next(reader).sign.tolist() == [text]


def test_a_field_may_have_a_dtype_instead_of_a_class(tmp_path: Path) -> None:
    url = store_of(tmp_path, "year=2020", dtype=np.dtype("int32"))
    with make_reader(url) as reader:
        year = next(reader).year
    assert (year, year.dtype) == (2020, np.int32)


def test_filters_compare_a_folders_value_as_their_own_type(tmp_path: Path) -> None:
    url = store_of(tmp_path, "day=2020-01-01", "day=2020-01-02")
    assert ids_of(url, filters=[("day", "=", dt.date(2020, 1, 2))]) == [1]
    assert ids_of(url, filters=[("day", "<", NOON)]) == [0]
    assert ids_of(url, filters=[("day", "in", [dt.date(2020, 1, 1)])]) == [0]
    with pytest.raises(ValueError, match="filters compares the partition column 'day' with 2020, but a folder says"):
        make_batch_reader(url, filters=[("day", "=", 2020)])
