"""Rows are decoded as their schema says, and random rows fit it."""

from __future__ import annotations

import datetime as dt
import os
import time
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from converter.errors import ReadError
from converter.petastorm.codecs import NdarrayCodec
from converter.petastorm.errors import NoDataAvailableError
from converter.petastorm.generator import LIST_SIZE, generate_datapoint
from converter.petastorm.spark_utils import _in_utc
from converter.petastorm.unischema import Unischema, UnischemaField
from converter.petastorm.utils import DecodeFieldError, decode_row, run_in_subprocess

MATRIX = UnischemaField("matrix", np.float64, (2, 2), NdarrayCodec(), True)
SCHEMA = Unischema("S", [MATRIX, UnischemaField("id", np.int32, ()), UnischemaField("price", Decimal, ())])


def test_a_row_is_decoded_by_codecs_and_dtypes() -> None:
    matrix = np.arange(4.0).reshape(2, 2)
    row = decode_row({"id": 5, "matrix": NdarrayCodec().encode(MATRIX, matrix), "price": "1.5", "other": 3}, SCHEMA)
    assert list(row) == ["id", "matrix", "price"]
    assert type(row["id"]) is np.int32
    assert row["price"] == Decimal("1.5")
    np.testing.assert_array_equal(row["matrix"], matrix)


def test_times_of_an_rdd_are_those_of_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        # As Spark's Python makes them; the clock shows this hour twice.
        noon, twice = (dt.datetime.fromtimestamp(seconds) for seconds in (1_593_604_800, 1_604_212_200))  # noqa: DTZ006
        assert _in_utc({"at": noon, "again": twice, "none": None, "id": 7}, ["at", "again", "none"]) == {
            "at": dt.datetime.fromtimestamp(1_593_604_800, dt.timezone.utc).replace(tzinfo=None),
            "again": dt.datetime.fromtimestamp(1_604_212_200, dt.timezone.utc).replace(tzinfo=None),
            "none": None,
            "id": 7,
        }
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_null_is_none_and_an_unknown_dtype_changes_nothing() -> None:
    assert decode_row({"matrix": None, "id": None}, SCHEMA) == {"matrix": None, "id": None}
    assert decode_row({"x": [4, 2]}, Unischema("S", [UnischemaField("x", None, ())])) == {"x": [4, 2]}


@pytest.mark.parametrize(
    ("name", "value"), [("matrix", "bogus"), ("matrix", b"bogus"), ("id", "a"), ("price", object())]
)
def test_what_cannot_be_decoded_is_named_by_its_field(name: str, value: Any) -> None:
    with pytest.raises(DecodeFieldError, match=f'Decoding field "{name}" failed') as caught:
        decode_row({name: value}, SCHEMA)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ReadError)
    assert caught.value.__cause__ is not None


def test_errors_are_made_of_a_text() -> None:
    assert str(NoDataAvailableError("a")) == str(DecodeFieldError("a")) == "a"


def test_a_function_runs_in_a_process_of_its_own() -> None:
    assert run_in_subprocess(os.getpid) != os.getpid()
    assert run_in_subprocess(divmod, 7, 2) == (3, 1)


def test_a_random_row_fits_its_schema_and_numpys_seed() -> None:
    kinds = [np.int8, np.uint64, np.int64, np.float32, np.bool_, np.str_, np.datetime64]
    schema = Unischema("S", [UnischemaField(kind.__name__, kind, (None, 3)) for kind in kinds])
    rows = []
    for _ in range(2):
        np.random.seed(5)  # noqa: NPY002 (what it is about)
        rows.append(generate_datapoint(schema))
    for kind in kinds:
        column = rows[0][kind.__name__]
        assert column.shape == (LIST_SIZE, 3)
        assert issubclass(column.dtype.type, kind)
        assert len(np.unique(column)) > 1
        np.testing.assert_array_equal(column, rows[1][kind.__name__])
    assert generate_datapoint(Unischema("S", [UnischemaField("x", np.int16, ())]))["x"].shape == ()
