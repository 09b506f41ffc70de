"""Arguments survive JSON with their types, and nothing else comes back from it."""

from __future__ import annotations

import datetime as dt
import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.lineage.values import MAX_VALUES, NotStorableError, from_json, to_json

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.dates()
    | st.datetimes(timezones=st.none() | st.just(dt.timezone.utc)).map(lambda time: time.replace(fold=0))
    | st.timedeltas(min_value=dt.timedelta(days=-1000), max_value=dt.timedelta(days=1000))
    | st.decimals(allow_nan=False)
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_a_value_survives_json_with_its_type(value: Any) -> None:
    # Strict JSON: other programs read it, too.
    again = from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))
    assert again == value
    assert repr(again) == repr(value)


def test_nan_survives() -> None:
    assert math.isnan(from_json(to_json(math.nan)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int32(7), 7),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.longdouble(0.25), 0.25),
        (np.array([1, 2]), [1, 2]),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (pa.scalar(5), 5),
        (pd.Timestamp("2026-01-02 03:04:05.000006Z"), dt.datetime(2026, 1, 2, 3, 4, 5, 6, dt.timezone.utc)),
        (np.datetime64("2026-01-02"), np.datetime64("2026-01-02")),
        (np.datetime64(5, "ns"), np.datetime64(5, "ns")),
    ],
)
def test_values_of_numpy_arrow_and_pandas_become_plain(value: Any, expected: Any) -> None:
    assert from_json(json.loads(json.dumps(to_json(value)))) == expected


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (pc.field("x") > 1, "an expression of pyarrow; tuples"),
        (object(), "a builtins.object"),
        (pd.Timestamp("2026-01-02 03:04:05.000000007"), "Timestamp"),
        (pd.NaT, "NaTType"),
        (np.datetime64("NaT"), "datetime64"),
        (range(3), "a builtins.range"),
        (list(range(MAX_VALUES + 1)), f"a list of {MAX_VALUES + 1:,} values"),
        ([("x", "in", set(range(MAX_VALUES + 1)))], "a list of"),
    ],
)
def test_a_value_without_a_form_is_named(value: Any, named: str) -> None:
    with pytest.raises(NotStorableError, match=named):
        to_json(value)


NESTED: Any = []
for _ in range(30):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"tuple": [], "dict": []},
        {"tuple": {}},
        {"dict": [[1]]},
        {"dict": {"a": 1}},
        {"dict": [[[], 1]]},
        {"float": 1.0},
        {"bytes": "!"},
        {"decimal": "x"},
        {"datetime": "yesterday"},
        {"date": 5},
        {"microseconds": 1 << 70},
        {"datetime64": [1, "[s]"]},
        {"datetime64": ["1", "s"]},
        {"object": "__import__('os')"},
        {"py/reduce": ["os.system", "true"]},
        NESTED,
    ],
)
def test_nothing_else_is_a_value(document: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        from_json(document)
