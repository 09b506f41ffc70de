"""Columns of Parquet files as tensors: types, shapes, and what has no tensor form."""

from __future__ import annotations

import datetime as dt
import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from converter import (
    DatasetConverter,
    SourceError,
    UnsupportedTypeError,
    make_parquet_converter,
)
from tests.unit.sources.parquet.known_files import (
    read,
    write,
)

TIMES = np.array(["1969-12-31T23:59:59.999999", "2026-11-21T01:02:03", "9999-01-01"], "datetime64[us]").tolist()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("version", ["1.0", "2.6"])
def test_every_type_arrives(tmp_path: Path, compression: str, dictionary: bool, version: str) -> None:
    columns = {
        "bool": pa.array([True, False, True]),
        "byte": pa.array([-128, 0, 127], pa.int8()),
        "short": pa.array([-(2**15), 0, 2**15 - 1], pa.int16()),
        "int": pa.array([-(2**31), 0, 2**31 - 1], pa.int32()),
        "long": pa.array([-(2**63), 0, 2**63 - 1], pa.int64()),
        "float": pa.array([-1.5, np.inf, 3e38], pa.float32()),
        "double": pa.array([0.1, -np.inf, 1e300], pa.float64()),
        "decimal": pa.array([decimal.Decimal("3.00"), decimal.Decimal("-0.25"), decimal.Decimal("1e9")],
                            pa.decimal128(20, 2)),
        "date": pa.array([dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(9999, 12, 31)]),
        "utc": pa.array(TIMES, pa.timestamp("us", tz="UTC")),
        "ms": pa.array([time.replace(microsecond=0) for time in TIMES], pa.timestamp("ms")),
        "text": pa.array(["", "žluťoučký 🐟", "a" * 300]),
        "bytes": pa.array([b"", b"\x00\xff", b"x"]),
        "category": pa.array(["a", "b", "a"]).dictionary_encode(),
        "pair": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int16())),
        "wide": pa.array([[0.1, 2], [3, 4], [5, 6]], pa.large_list(pa.float64())),
        "fixed": pa.array([[1, 2, 3]] * 3, pa.list_(pa.float32(), 3)),
        "flags": pa.array([[True], [False], [True]]),
    }  # fmt: skip
    write(tmp_path, "x.parquet", columns, compression=compression, use_dictionary=dictionary, version=version)
    converter = make_parquet_converter(tmp_path)
    found = read(converter)
    for name in ("bool", "byte", "short", "int", "long", "float"):
        np.testing.assert_array_equal(found[name], columns[name].to_numpy(zero_copy_only=False), strict=True)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found["double"], np.array([0.1, -np.inf, 1e300]).astype("float32"), strict=True)
    np.testing.assert_array_equal(found["decimal"], np.array([3, -0.25, 1e9], "float32"), strict=True)
    np.testing.assert_array_equal(found["date"], np.array(["0001-01-01", "1970-01-01", "9999-12-31"], "datetime64[D]"))
    np.testing.assert_array_equal(found["utc"], np.array(TIMES, "datetime64[us]"), strict=True)
    whole = np.array([time.replace(microsecond=0) for time in TIMES], "datetime64[us]")
    np.testing.assert_array_equal(found["ms"], whole, strict=True)
    assert found["text"].tolist() == ["", "žluťoučký 🐟", "a" * 300]
    assert found["bytes"].tolist() == [b"", b"\x00\xff", b"x"]
    assert found["category"].tolist() == ["a", "b", "a"]
    np.testing.assert_array_equal(found["pair"], np.array([[1, 2], [3, 4], [5, 6]], "int16"), strict=True)
    np.testing.assert_array_equal(found["wide"], np.array([[0.1, 2], [3, 4], [5, 6]], "float32"), strict=True)
    np.testing.assert_array_equal(found["fixed"], np.array([[1, 2, 3]] * 3, "float32"), strict=True)
    np.testing.assert_array_equal(found["flags"], np.array([[True], [False], [True]]), strict=True)
    assert read(make_parquet_converter(tmp_path, float_dtype=None))["double"].tolist() == [0.1, -np.inf, 1e300]


def test_old_spark_times_arrive(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet", {"t": pa.array(TIMES, pa.timestamp("us"))}, use_deprecated_int96_timestamps=True)
    np.testing.assert_array_equal(read(make_parquet_converter(tmp_path))["t"], np.array(TIMES, "datetime64[us]"))


def test_lists_of_several_lengths_are_ragged(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet", {"x": [[1, 2], [3], [4, 5, 6, 7]]})
    converter = make_parquet_converter(tmp_path)
    assert converter.schema["x"].shape is None
    with pytest.raises(SourceError, match="Column 'x' has rows of different lengths"):
        converter.make_batch_reader()
    found = read(converter, ragged="pad")
    assert found["x"].tolist() == [[1, 2, 0, 0], [3, 0, 0, 0], [4, 5, 6, 7]]
    assert found["x__length"].tolist() == [2, 1, 4]


def test_lists_that_only_seem_to_have_one_length_are_an_error_whose_remedy_works(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet", {"x": [[1, 2], [3], [4, 5, 6]]})
    converter = make_parquet_converter(tmp_path)
    with pytest.raises(SourceError, match=r"'x' has a row of [13] values, expected 2. Pass shapes=\{'x': None"):
        read(converter)
    remedied = make_parquet_converter(tmp_path, shapes={"x": None})
    assert [row.tolist() for row in read(remedied, ragged="nested")["x"]] == [[1, 2], [3], [4, 5, 6]]


def test_declared_shapes_are_given_and_checked(tmp_path: Path) -> None:
    nested = pa.array([[[1, 2, 3], [4, 5, 6]]] * 2, pa.list_(pa.list_(pa.int32())))
    write(tmp_path, "x.parquet", {"flat": [[1.0, 2, 3, 4]] * 2, "nested": nested})
    found = read(make_parquet_converter(tmp_path, shapes={"flat": (2, 2), "nested": (2, 3)}))
    assert found["flat"].tolist() == [[[1, 2], [3, 4]]] * 2
    assert found["nested"].tolist() == [[[1, 2, 3], [4, 5, 6]]] * 2
    for shapes in ({"flat": (5,)}, {"nested": (3, 2)}):
        with pytest.raises(SourceError, match=r"values, expected ."):
            read(make_parquet_converter(tmp_path, shapes=shapes, columns=list(shapes)))
    undeclared = read(make_parquet_converter(tmp_path, columns=["nested"]), ragged="pad")
    assert undeclared["nested"].tolist() == [[[1, 2, 3], [4, 5, 6]]] * 2


@pytest.mark.parametrize("way", ["column", "list", "filter", "dictionary"])
def test_unsigned_numbers_of_64_bits_are_int64_where_they_fit(tmp_path: Path, way: str) -> None:
    def put(values: list[int]) -> DatasetConverter:
        column = pa.array(
            [[one, 0] for one in values] if way == "list" else values, pa.list_(kind) if way == "list" else kind
        )
        column = column.dictionary_encode() if way == "dictionary" else column
        write(tmp_path, "x.parquet", {"id": np.arange(len(values)), "u": column})
        return make_parquet_converter(tmp_path)

    kind, most = pa.uint64(), 2**63 - 1
    converter = put([0, most, 5])
    assert converter.schema["u"].dtype == "int64"
    found = read(converter)["u"]
    assert found.dtype == np.int64
    assert found.tolist() == ([[0, 0], [most, 0], [5, 0]] if way == "list" else [0, most, 5])
    if way != "list":
        # Its bounds in the footer are unsigned numbers.
        assert read(converter.where([("u", ">", 5)]))["id"].tolist() == [1]
        assert read(converter.where(pc.field("u") >= most))["id"].tolist() == [1]
        assert (converter.statistics["u"].min, converter.statistics["u"].max) == (0, most)
    converter = put([0, 2**64 - 1, 5])
    with pytest.raises(
        SourceError, match=r"Column 'u' has the unsigned number 18446744073709551615.*x\.parquet"
    ) as caught:
        read(converter.where([("u", "<", 5)]) if way == "filter" else converter)
    assert caught.value.column == "u"
    assert str(caught.value.path).endswith("x.parquet")


def test_columns_are_chosen_beside_ones_that_have_no_tensor_form(tmp_path: Path) -> None:
    struct = pa.array([{"a": 1, "b": [1, 2]}] * 2)
    fixed = pa.array([b"ab", b"cd"], pa.binary(2))
    write(tmp_path, "x.parquet", {"s": struct, "id": [1, 2], "m": fixed, "t.a": [3, 4], "u": pa.nulls(2)})
    with pytest.raises(UnsupportedTypeError, match="2 columns cannot become tensors") as raised:
        make_parquet_converter(tmp_path)
    assert all(f"'{name}' has type" in str(raised.value) for name in ("m", "u"))
    found = read(make_parquet_converter(tmp_path, columns=["t.a", "s.b", "s.a"]))
    expected = {"t.a": [3, 4], "s.b": [[1, 2], [1, 2]], "s.a": [1, 1]}
    assert {name: column.tolist() for name, column in found.items()} == expected
    write(tmp_path, "x.parquet", {"s": struct, "s.a": [3, 4]})
    with pytest.raises(SourceError, match=r"several columns called 's\.a'"):
        make_parquet_converter(tmp_path)


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"columns": ["idd"]}, ValueError, r"columns: There is no column 'idd'\. Did you mean 'id'\?"),
        ({"columns": "id"}, TypeError, "columns must be a list of names, got 'id'"),
        ({"columns": []}, TypeError, "columns must be a list of names"),
        ({"shapes": {"no": (2,)}}, ValueError, "shapes: There is no column 'no'"),
        ({"shapes": {"id": (2,)}}, ValueError, "shapes names the column 'id', which is no array"),
        ({"shapes": {"id": (-2,)}}, ValueError, r"shapes\['id'\] must be a tuple of sizes above 0"),
        ({"float_dtype": "float16"}, ValueError, "float_dtype must be"),
        ({"storage_options": [1]}, TypeError, "storage_options must be a dict"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: Any, kind: Any, match: str) -> None:
    write(tmp_path, "x.parquet", {"id": [1, 2]})
    with pytest.raises(kind, match=match):
        make_parquet_converter(tmp_path, **options)


def test_the_fingerprint_is_of_the_files_and_the_columns(tmp_path: Path) -> None:
    write(tmp_path / "a", "x.parquet", {"id": [1, 2], "x": [1.0, 2.0]})
    write(tmp_path / "b", "x.parquet", {"id": [1, 2], "x": [1.0, 2.0]})
    write(tmp_path / "c", "x.parquet", {"id": [1, 3], "x": [1.0, 2.0]})
    one, two, three = (make_parquet_converter(tmp_path / name) for name in "abc")
    assert one.fingerprint == two.fingerprint != three.fingerprint
    assert make_parquet_converter(tmp_path / "a", columns=["id"]).fingerprint != one.fingerprint


def test_times_that_microseconds_cannot_count_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a.parquet", {"t": pa.array([0, 2**62, None], pa.timestamp("ms"))})
    converter = make_parquet_converter(tmp_path)
    with pytest.raises(SourceError, match="Column 't' has times that microseconds cannot hold"):
        read(converter, nulls="mask")


@pytest.mark.parametrize("kind", [pa.duration("ms"), pa.duration("s"), pa.timestamp("ms")], ids=str)
@pytest.mark.parametrize(
    "use",
    [
        lambda rows: rows.where([("t", ">=", np.zeros(1, rows.schema["t"].dtype)[0])]),
        lambda rows: rows.split({"a": 0.5}, by="t"),
        lambda rows: rows.sequences(1, order_by="t"),
    ],
)
def test_times_that_microseconds_cannot_count_are_no_damage(tmp_path: Path, kind: pa.DataType, use: Any) -> None:
    write(tmp_path, "a.parquet", {"t": pa.array([0, 2**62], pa.int64()).cast(kind)})
    with pytest.raises(SourceError, match=r"has times that microseconds cannot hold.*Leave (it|them) out") as raised:
        use(make_parquet_converter(tmp_path))
    assert "a.parquet" in str(raised.value)
    assert "damaged" not in str(raised.value)


def test_a_member_without_tensor_form_says_how_its_values_are_kept(tmp_path: Path) -> None:
    path = write(
        tmp_path, "x.parquet", {"items": pa.array([[{"hash": b"ab"}]], pa.list_(pa.struct({"hash": pa.binary(2)})))}
    )
    remedy = r"leave it out with columns=…, or read it with Spark and call make_spark_converter, whose error gives"
    with pytest.raises(UnsupportedTypeError, match=rf"(?s)'items\.hash' has type list<.*{remedy} the expressions"):
        make_parquet_converter(path)


def test_the_columns_are_named_in_order(tmp_path: Path) -> None:
    converter = make_parquet_converter(write(tmp_path, "x.parquet", {"b": [1], "a": [2]}))
    assert converter.columns == ("b", "a")
