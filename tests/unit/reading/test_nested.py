"""Lists of text, structs in lists, maps, dates in lists and intervals, through Parquet, as each framework has them."""

from __future__ import annotations

import datetime as dt
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter import DatasetConverter, NullValueError, ReadError, SourceError, make_parquet_converter
from converter.portable.tensors import encode
from converter.sources.spark.schema import plan_columns
from tests.entries import write_batches
from tests.properties import examples

DAY, TIME = dt.date(2026, 11, 25), dt.datetime(2026, 11, 25, 1, 2, 3, 4)  # noqa: DTZ001 (as NumPy has it)

ROWS = pa.table(
    {
        "id": pa.array(range(5), pa.int64()),
        "tags": pa.array([["a", "ž"], [], ["b"], ["c", "d", "e"], [""]]),
        "raw": pa.array([[b"\x00\xff"], [b""], [], [b"x", b"y"], [b"z"]]),
        "words": pa.array([[["a"], []], [], [["b", "c"]], [["d"], ["e", "f"]], [[]]]),
        "days": pa.array([[DAY], [], [DAY, DAY], [], [DAY]]),
        "times": pa.array([[TIME, TIME]] * 5),
        "items": pa.array(
            [[{"price": 1.5, "sku": "a"}, {"price": 2.5, "sku": "b"}], [], [{"price": 3.5, "sku": "c"}], [], []]
        ),
        "m": pa.array([[("a", 1)], [("b", 2), ("c", 3)], [], [], [("d", 4)]], pa.map_(pa.string(), pa.int32())),
    }
)


def write(folder: Path, table: pa.Table = ROWS, *, row_group_rows: int = 2, **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "x.parquet", row_group_size=row_group_rows, **options)
    return folder


def plain(value: Any) -> Any:
    """Arrays and tensors as nested lists."""
    if hasattr(value, "is_nested") and value.is_nested:
        return [plain(row) for row in value.unbind()]
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [plain(part) for part in value]
    if hasattr(value, "to_list"):
        return plain(value.to_list())
    return value.tolist() if hasattr(value, "tolist") else value.numpy().tolist() if hasattr(value, "numpy") else value


def read(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    """All rows in one batch, as nested lists."""
    with converter.make_batch_reader(**{"batch_size": 1000, "ragged": "nested"} | options) as reader:
        [batch] = list(reader)
    return {name: plain(column) for name, column in batch.items()}


def read_torch(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    with converter.make_torch_dataloader(**{"batch_size": 1000, "ragged": "nested"} | options) as loader:
        [batch] = list(loader)
    return {name: plain(column) for name, column in batch.items()}


def read_tensorflow(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    with converter.make_tf_dataset(**{"batch_size": 1000, "ragged": "nested"} | options) as dataset:
        [batch] = list(dataset)
    return {name: decoded(plain(column)) for name, column in batch.items()}


READERS = [read, read_torch, pytest.param(read_tensorflow, marks=pytest.mark.long("imports TensorFlow"))]


def decoded(value: Any) -> Any:
    """TensorFlow's strings are bytes."""
    if isinstance(value, list):
        return [decoded(part) for part in value]
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value


def test_each_kind_of_column_arrives_in_numpy(tmp_path: Path) -> None:
    converter = make_parquet_converter(write(tmp_path))
    assert converter.columns == (
        "id", "tags", "raw", "words", "days", "times", "items.price", "items.sku", "m.key", "m.value",
    )  # fmt: skip
    assert [converter.schema[name].dtype for name in ("tags", "raw", "items.price", "m.key", "m.value")] == [
        "str", "bytes", "float32", "str", "int32",
    ]  # fmt: skip
    with converter.make_batch_reader(batch_size=5, ragged="nested") as reader:
        [batch] = list(reader)
    assert [row.dtype for row in batch["tags"]] == [object] * 5
    for name in ("tags", "raw", "words"):
        assert plain(batch[name]) == ROWS[name].to_pylist()
    assert plain(batch["items.price"]) == [[1.5, 2.5], [], [3.5], [], []]
    assert plain(batch["items.sku"]) == [["a", "b"], [], ["c"], [], []]
    assert plain(batch["m.key"]) == [["a"], ["b", "c"], [], [], ["d"]]
    assert plain(batch["m.value"]) == [[1], [2, 3], [], [], [4]]
    assert [row.dtype for row in batch["days"]] == [np.dtype("datetime64[D]")] * 5
    assert plain(batch["days"]) == ROWS["days"].to_pylist()
    # All rows have two.
    assert (batch["times"].shape, batch["times"].dtype) == ((5, 2), np.dtype("datetime64[us]"))
    assert batch["times"].tolist() == ROWS["times"].to_pylist()


@pytest.mark.long("imports TensorFlow, which tests/integration/test_nested.py does too")
def test_torch_and_tensorflow_have_the_same_elements(tmp_path: Path) -> None:
    import torch

    converter = make_parquet_converter(write(tmp_path))
    with converter.make_torch_dataloader(
        batch_size=5, ragged="nested", columns=["tags", "raw", "words", "days"]
    ) as loader:
        [batch] = list(loader)
    assert [batch[name] for name in ("tags", "raw", "words")] == [
        ROWS[name].to_pylist() for name in ("tags", "raw", "words")
    ]
    assert batch["days"].dtype == torch.int32
    assert plain(batch["days"])[0] == [(DAY - dt.date(1970, 1, 1)).days]
    names = ["tags", "words", "items.price", "items.sku", "m.key", "m.value", "days", "times"]
    ours, theirs = read_torch(converter, columns=names), read_tensorflow(converter, columns=names)
    assert ours == theirs


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"transform": dict}])
def test_torch_has_lists_of_text_in_every_way(tmp_path: Path, options: Any) -> None:
    converter = make_parquet_converter(write(tmp_path), columns=["tags", "words"])
    with converter.make_torch_dataloader(batch_size=2, **options) as loader:
        batches = list(loader)
    for name in ("tags", "words"):
        assert [row for batch in batches for row in batch[name]] == ROWS[name].to_pylist()


def test_lists_of_text_arrive_without_a_policy_and_numbers_need_one(tmp_path: Path) -> None:
    converter = make_parquet_converter(write(tmp_path), columns=["tags", "items.sku", "m.value"])
    assert read(converter, ragged="raise", columns=["tags", "items.sku"])["tags"] == ROWS["tags"].to_pylist()
    with pytest.raises(SourceError, match=r"Column 'm\.value' has rows of different lengths"):
        converter.make_batch_reader()


@pytest.mark.parametrize("reader", READERS)
def test_padded_text_has_empty_texts_and_lengths(tmp_path: Path, reader: Any) -> None:
    converter = make_parquet_converter(write(tmp_path), columns=["tags", "words"])
    found = reader(converter, ragged="pad")
    assert found["tags"] == [["a", "ž", ""], ["", "", ""], ["b", "", ""], ["c", "d", "e"], ["", "", ""]]
    assert found["tags__length"] == [2, 0, 1, 3, 1]
    assert found["words"][3] == [["d", ""], ["e", "f"]]
    assert found["words__length"] == [[2, 1], [0, 0], [1, 2], [2, 2], [1, 0]]
    assert found["words__inner_length"] == [[1, 0], [0, 0], [2, 0], [1, 2], [0, 0]]


def test_padded_bytes_are_bytes(tmp_path: Path) -> None:
    converter = make_parquet_converter(write(tmp_path), columns=["raw"])
    assert read(converter, ragged="pad")["raw"][3:] == [[b"x", b"y"], [b"z", b""]]
    assert read(converter, ragged="pad")["raw"][2] == [b"", b""]


NULLS = pa.table(
    {
        "id": pa.array(range(4), pa.int64()),
        "tags": pa.array([["a", None], None, [], [None]]),
        "items": pa.array([[{"n": 1, "s": "x"}, None], None, [{"n": None, "s": None}], []]),
        "m": pa.array([[("a", None), ("b", 2)], None, [], []], pa.map_(pa.string(), pa.int16())),
        "days": pa.array([[DAY, None], None, [], []]),
    }
)


@pytest.mark.parametrize("reader", READERS)
def test_masks_say_what_is_null(tmp_path: Path, reader: Any) -> None:
    found = reader(make_parquet_converter(write(tmp_path, NULLS)), nulls="mask")
    assert found["tags"] == [["a", ""], [], [], [""]]
    assert found["tags__valid"] == [True, False, True, True]
    assert found["tags__element_valid"] == [[True, False], [], [], [False]]
    assert found["items.n"] == [[1, 0], [], [0], []]
    assert found["items.s"] == [["x", ""], [], [""], []]
    assert found["items.s__element_valid"] == found["items.n__element_valid"] == [[True, False], [], [False], []]
    assert found["m.key"] == [["a", "b"], [], [], []]
    assert found["m.value"] == [[0, 2], [], [], []]
    assert found["m.value__element_valid"] == [[False, True], [], [], []]
    assert "m.key__element_valid" not in found


def test_nulls_raise_and_fills_fill(tmp_path: Path) -> None:
    converter = make_parquet_converter(write(tmp_path, NULLS), columns=["tags", "items.s"])
    with pytest.raises(NullValueError, match="'tags' holds 1 null, and nulls='raise'"):
        read(converter)
    with pytest.raises(NullValueError, match="'tags' holds 1 null, which no value can fill"):
        read(converter, nulls={"tags": "?"})
    write(tmp_path, NULLS.filter(pa.array([True, False, True, True])))
    converter = make_parquet_converter(tmp_path, columns=["tags", "items.s"])
    with pytest.raises(
        NullValueError, match=r"'tags' has arrays with null elements, and nulls='raise'.*nulls=\{'tags': ''\}"
    ):
        read(converter)
    found = read(converter, nulls={"tags": "?", "items.s": "-"})
    assert (found["tags"], found["items.s"]) == ([["a", "?"], [], ["?"]], [["x", "-"], ["-"], []])


@pytest.mark.parametrize("kind", [pa.list_(pa.list_(pa.string())), pa.list_(pa.struct({"a": pa.list_(pa.string())}))])
def test_inner_lists_that_are_null_are_named(tmp_path: Path, kind: pa.DataType) -> None:
    converter = make_parquet_converter(write(tmp_path, pa.table({"x": pa.array([[None]], kind)})))
    with pytest.raises(NullValueError, match=r"'x(\.a)?' has arrays whose inner arrays are null"):
        read(converter, nulls="mask")


LEAVES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "text": (pa.string(), st.text(st.characters(exclude_categories=["Cs"]), max_size=3)),
    "number": (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    "day": (pa.date32(), st.dates()),
    "flag": (pa.bool_(), st.booleans()),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, int]:
    """Lists of structs, maps and nested lists of each kind of value, with nulls; and rows of a row group."""
    count = draw(st.integers(1, 6))
    columns = {}
    for name, (kind, values) in LEAVES.items():
        element = st.none() | values
        struct = st.none() | st.fixed_dictionaries({"a": element, "b": st.none() | st.text("xy", max_size=2)})
        pairs = st.dictionaries(st.text("kl", max_size=2), element, max_size=3).map(lambda pair: list(pair.items()))
        for form, form_kind, rows in (
            ("list", pa.list_(kind), st.lists(element, max_size=3)),
            ("two", pa.list_(pa.list_(kind)), st.lists(st.lists(element, max_size=2), max_size=2)),
            ("structs", pa.list_(pa.struct({"a": kind, "b": pa.string()})), st.lists(struct, max_size=3)),
            ("map", pa.map_(pa.string(), kind), pairs),
        ):
            drawn = draw(st.lists(st.none() | rows, min_size=count, max_size=count))
            columns[f"{name} {form}"] = pa.array(drawn, form_kind)
    return pa.table(columns), draw(st.integers(1, 4))


def rendered(table: pa.Table) -> dict[str, list[Any]]:
    """The same columns in plain Python: lists for each column of a batch, None for nulls."""
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        rows = table[name].to_pylist()
        if name.endswith("structs"):
            for member in ("a", "b"):
                columns[f"{name}.{member}"] = [
                    None if row is None else [None if part is None else part[member] for part in row] for row in rows
                ]
        elif name.endswith("map"):
            for number, member in enumerate(("key", "value")):
                columns[f"{name}.{member}"] = [None if row is None else [pair[number] for pair in row] for row in rows]
        else:
            columns[name] = rows
    return columns


def zero_of(name: str, member: Any, *, as_numbers: bool) -> Any:
    """What stands for a null element."""
    if name.endswith((".b", ".key")) or name.startswith("text"):
        return ""
    if name.startswith("day"):
        return 0 if as_numbers else dt.date(1970, 1, 1)
    return False if name.startswith("flag") else 0


def with_zeros(value: Any, zero: Any, *, as_numbers: bool) -> Any:
    if isinstance(value, list):
        return [with_zeros(part, zero, as_numbers=as_numbers) for part in value]
    if as_numbers and isinstance(value, dt.date):
        return (value - dt.date(1970, 1, 1)).days
    return zero if value is None else value


def where_present(value: Any) -> Any:
    return [where_present(part) for part in value] if isinstance(value, list) else value is not None


@pytest.mark.parametrize("reader", READERS)
@given(drawn=tables(), seed=st.none() | st.integers(0, 9))
@examples(25)
def test_any_nested_rows_arrive_as_plain_python_has_them(
    tmp_path_factory: pytest.TempPathFactory, reader: Any, drawn: tuple[pa.Table, int], seed: int | None
) -> None:
    table, row_group_rows = drawn
    folder = write(tmp_path_factory.mktemp("any"), table, row_group_rows=row_group_rows)
    expected = rendered(table)
    # A column whose lists all have one length would be a tensor.
    shapes = {name: None for name in table.column_names if name.split()[0] != "text" and name.endswith(("list", "two"))}
    converter = make_parquet_converter(folder, shapes=shapes)
    names = list(converter.columns)
    if reader is read_torch:
        # Rows of torch's jagged tensors differ in one dimension only.
        names = [name for name in names if not name.endswith("two") or name.startswith("text")]
    found = reader(converter, nulls="mask", columns=names, with_row_index="row",
                   shuffle=seed is not None, seed=seed or 0)  # fmt: skip
    for name in names:
        as_numbers = reader is not read
        rows = [expected[name][row] for row in found["row"]]
        zero = zero_of(name, None, as_numbers=as_numbers)
        assert found[name] == [with_zeros(row or [], zero, as_numbers=as_numbers) for row in rows], name
        if name + "__valid" in found:
            assert found[name + "__valid"] == [row is not None for row in rows]
        else:
            assert None not in rows
        if name + "__element_valid" in found:
            assert found[name + "__element_valid"] == [where_present(row or []) for row in rows]
        else:
            assert "None" not in str([row for row in rows if row is not None])


def test_shards_resume_and_copies_keep_lists_whole(tmp_path: Path) -> None:
    table = pa.table({"id": range(100), "tags": [[f"{row}-{part}" for part in range(row % 4)] for row in range(100)]})
    converter = make_parquet_converter(write(tmp_path, table, row_group_rows=13))
    again = pickle.loads(pickle.dumps(converter))
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 3}
    seen = []
    for shard in range(3):
        with again.make_batch_reader(**options, cur_shard=shard, shard_count=3, uneven="keep") as reader:
            batches = [next(iter(reader))]
            state = reader.state_dict()
        with converter.make_batch_reader(**options, cur_shard=shard, shard_count=3, uneven="keep") as reader:
            reader.load_state_dict(state)
            batches += list(reader)
        for batch in batches:
            seen += list(zip(batch["id"].tolist(), plain(batch["tags"]), strict=True))
    assert sorted(seen) == list(enumerate(table["tags"].to_pylist()))


def test_statistics_of_nested_columns(tmp_path: Path) -> None:
    statistics = make_parquet_converter(write(tmp_path, NULLS)).statistics
    tags, prices = statistics["tags"], statistics["items.n"]
    assert (tags.null_count, tags.shortest, tags.longest, tags.min) == (1, 0, 2, None)
    assert (prices.null_count, prices.shortest, prices.longest, prices.min, prices.max) == (1, 0, 2, 1, 1)
    assert (statistics["days"].min, statistics["days"].longest) == (DAY, 2)


def test_only_the_wanted_members_are_read(tmp_path: Path) -> None:
    """A damaged neighbour is not noticed, because its bytes are not looked at."""
    write(tmp_path, ROWS, compression="none", use_dictionary=False)
    path = tmp_path / "x.parquet"
    metadata = pq.read_metadata(path)
    content = bytearray(path.read_bytes())
    leaf = next(leaf for leaf in range(metadata.num_columns) if metadata.schema.column(leaf).path.endswith("sku"))
    for group in range(metadata.num_row_groups):
        chunk = metadata.row_group(group).column(leaf)
        content[chunk.data_page_offset : chunk.data_page_offset + chunk.total_compressed_size] = b"\xff" * (
            chunk.total_compressed_size
        )
    path.write_bytes(content)
    converter = make_parquet_converter(path)
    assert read(converter, columns=["items.price"])["items.price"][0] == [1.5, 2.5]
    with pytest.raises(ReadError, match=r"x\.parquet"):
        read(converter, columns=["items.sku"])


def test_files_that_lack_a_member_have_nulls(tmp_path: Path) -> None:
    write(tmp_path, pa.table({"items": pa.array([[{"a": 1, "b": "x"}]])}))
    pq.write_table(pa.table({"items": pa.array([[{"a": 2}, {"a": 3}]])}), tmp_path / "y.parquet")
    found = read(make_parquet_converter(tmp_path), nulls="mask")
    assert (found["items.a"], found["items.b"]) == ([[1], [2, 3]], [["x"], ["", ""]])
    assert (found["items.b__valid"], found["items.b__element_valid"]) == ([True, True], [[True], [False, False]])


def test_files_with_other_nesting_disagree_by_name(tmp_path: Path) -> None:
    write(tmp_path, pa.table({"items": pa.array([[{"a": 1}]])}))
    pq.write_table(pa.table({"items": pa.array([{"a": 1}])}), tmp_path / "y.parquet")
    with pytest.raises(SourceError, match=r"y\.parquet has other columns.*'items\.a' is int64, and list<"):
        make_parquet_converter(tmp_path)
    pq.write_table(pa.table({"items": pa.array([[1]])}), tmp_path / "y.parquet")
    with pytest.raises(SourceError, match=r"y\.parquet has other columns.*'items' is list<"):
        make_parquet_converter(tmp_path)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
@pytest.mark.parametrize("around", [pa.list_, pa.large_list, pa.list_view, lambda kind: pa.list_(kind, 2)])
def test_every_form_of_list_and_text_is_read(tmp_path: Path, kind: pa.DataType, around: Any) -> None:
    values = pa.array(["a", None, "ž", "d"])
    values = values.dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)
    wanted = around(kind)
    if pa.types.is_fixed_size_list(wanted):
        column = pa.FixedSizeListArray.from_arrays(values, 2)
    elif pa.types.is_list_view(wanted):
        column = pa.ListViewArray.from_arrays([0, 2], [2, 2], values)
    else:
        column = (pa.ListArray if pa.types.is_list(wanted) else pa.LargeListArray).from_arrays([0, 2, 4], values)
    found = read(make_parquet_converter(write(tmp_path, pa.table({"x": column}))), nulls="mask")
    assert found["x"] == [["a", ""], ["ž", "d"]]
    assert found["x__element_valid"] == [[True, False], [True, True]]


def test_texts_that_are_no_utf8_are_an_error_that_names_the_file(tmp_path: Path) -> None:
    values = pa.array([b"\xff"]).view(pa.string())
    converter = make_parquet_converter(write(tmp_path, pa.table({"x": pa.ListArray.from_arrays([0, 1], values)})))
    with pytest.raises(SourceError, match=r"Column 'x' has text that is no UTF-8.*x\.parquet"):
        read(converter)


def test_text_has_no_declared_shape(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shapes: the lists of 'tags' are str, and lists of text have no one shape"):
        make_parquet_converter(write(tmp_path), shapes={"tags": (2,)})


def test_members_get_a_declared_shape(tmp_path: Path) -> None:
    write(tmp_path, pa.table({"items": pa.array([[{"a": 1}, {"a": 2}], [{"a": 3}, {"a": 4}]])}))
    assert make_parquet_converter(tmp_path).schema["items.a"].shape is None
    assert read(make_parquet_converter(tmp_path, shapes={"items.a": (2,)}))["items.a"] == [[1, 2], [3, 4]]


def test_times_of_day_and_durations_are_microseconds(tmp_path: Path) -> None:
    hour = 3_600_000_000
    table = pa.table(
        {
            "seconds": pa.array([1, -1, None], pa.duration("s")),
            "nanos": pa.array([1500, -1, None], pa.duration("ns")),
            "ms": pa.array([3_600_000, 0, None], pa.time32("ms")),
            "us": pa.array([hour, 0, None], pa.time64("us")),
            "list": pa.array([[hour, None], [], None], pa.list_(pa.time64("us"))),
        }
    )
    converter = make_parquet_converter(write(tmp_path, table))
    found = read(converter, nulls="mask")
    assert found["seconds"] == [1_000_000, -1_000_000, 0]
    assert found["nanos"] == [1, -1, 0]
    assert found["ms"] == found["us"] == [hour, 0, 0]
    assert (found["list"], found["list__element_valid"]) == ([[hour, 0], [], []], [[True, False], [], []])
    assert "seconds  int64 (µs)  ()" in repr(converter.schema)
    assert read(converter.where([("us", ">", 5)]), nulls="mask")["us"] == [hour]
    assert converter.statistics["seconds"].max == 1_000_000
    pq.write_table(table.select(["us"]).cast(pa.schema({"us": pa.int64()})), tmp_path / "y.parquet")
    with pytest.raises(SourceError, match="'us' is int64, and time there"):
        make_parquet_converter(tmp_path, columns=["us"])


def test_old_days_in_lists_are_counted_by_todays_calendar(tmp_path: Path) -> None:
    """As Spark's LEGACY mode writes them: by the Julian calendar before 1582-10-15."""
    table = pa.table(
        {"x": pa.array([[dt.date(1582, 10, 14), None], [DAY]]), "y": pa.array([[dt.date(1000, 1, 6)]] * 2)}
    )
    write(tmp_path, table.replace_schema_metadata({"org.apache.spark.legacyDateTime": ""}))
    found = read(make_parquet_converter(tmp_path), nulls="mask")
    assert found["x"] == [[dt.date(1582, 10, 4), dt.date(1970, 1, 1)], [DAY]]
    assert found["y"] == [[dt.date(1000, 1, 1)]] * 2


@pytest.mark.parametrize(
    ("version", "is_julian"), [("2.4.5", True), ("3.0.3", True), ("3.1.0", False), ("4.0.0", False)]
)
def test_spark_counts_its_96_bits_by_todays_calendar_from_3_1_on(tmp_path: Path, version: str, is_julian: bool) -> None:
    """`DataSourceUtils.int96RebaseSpec`; dates have done so from 3.0 on."""
    times = pa.array([dt.datetime(1500, 1, 1)])  # noqa: DTZ001
    table = pa.table({"t": times, "d": pa.array([dt.date(1000, 1, 6)])})
    noted = table.replace_schema_metadata({"org.apache.spark.version": version})
    pq.write_table(noted, tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    opened = make_parquet_converter(tmp_path)
    if is_julian:
        with pytest.raises(SourceError, match=r"Column 't' has times before 1900 .* LEGACY mode"):
            read(opened, columns=["t"])
    else:
        assert read(opened, columns=["t"])["t"] == times.to_pylist()
    day = dt.date(1000, 1, 1) if version.startswith("2.") else dt.date(1000, 1, 6)
    assert read(opened, columns=["d"])["d"] == [day]


@pytest.mark.parametrize("options", [{}, {"row_group_bytes": 64}])
def test_a_cache_holds_lists_with_their_nulls(tmp_path: Path, options: Any) -> None:
    """As the executors write them, without Spark."""
    kinds: dict[str, Any] = {"tags": "string", "days": "date", "texts": "binary"}
    fields: list[Any] = [{"name": name, "type": {"type": "array", "elementType": kind}} for name, kind in kinds.items()]
    fields.append({"name": "m", "type": {"type": "map", "keyType": "string", "valueType": "short"}})
    plans = plan_columns({"fields": fields}, float_dtype="float32", shapes={})
    values = {
        "tags": pa.array([["a", None], None, [], ["ž"]]),
        "days": pa.array([[DAY], [DAY], [dt.date(1, 1, 1)], None]),
        "texts": pa.array([[b"\xff"], [], [None], None], pa.list_(pa.binary())),
        "m.key": pa.array([["k"], None, [], ["l", "m"]]),
        "m.value": pa.array([[None], None, [], [1, -2]], pa.list_(pa.int16())),
    }
    batch = pa.RecordBatch.from_arrays(list(values.values()), names=[f"c{index}" for index in range(len(values))])
    with write_batches(tmp_path, plans, [[batch.slice(0, 1), batch.slice(1)], [batch]], **options) as converter:
        found = read(converter, nulls="mask")
        twice = [0, *range(1, 4), *range(4)]
        assert found["tags"] == [[["a", ""], [], [], ["ž"]][row] for row in twice]
        assert found["tags__element_valid"] == [[[True, False], [], [], [True]][row] for row in twice]
        assert converter.schema["days"].shape == (1,)
        assert found["days"][:3] == [[DAY], [DAY], [dt.date(1, 1, 1)]]
        assert found["days__valid"] == [row < 3 for row in twice]
        assert found["texts"] == [[[b"\xff"], [], [b""], []][row] for row in twice]
        assert found["m.value"] == [[[0], [], [], [1, -2]][row] for row in twice]
        assert found["m.key"] == [[["k"], [], [], ["l", "m"]][row] for row in twice]
        statistics = converter.statistics["m.value"]
        assert (statistics.min, statistics.max, statistics.shortest, statistics.null_count) == (-2, 1, 0, 2)
        assert converter.statistics["tags"].longest == 2
        assert converter.statistics["days"].min == dt.date(1, 1, 1)
        again = pickle.loads(pickle.dumps(converter))
        assert read(again, nulls="mask") == found


def test_a_null_inner_list_is_a_finding(tmp_path: Path) -> None:
    nested = {"type": "array", "elementType": {"type": "array", "elementType": "string"}}
    [plan] = plan_columns({"fields": [{"name": "x", "type": nested}]}, float_dtype=None, shapes={})
    found = encode(pa.array([[["a"], None]], pa.list_(pa.list_(pa.string()))), plan.spec())
    assert found == {"finding": {"kind": "null_element"}}


EMPTY_INSIDE = [
    [[[], []], [[]], []],
    [[[], [], []], [[], []]],
    [[[[], []]], [[[], []], [[], []]], []],
]
"""Rows of lists that are empty inside, but not themselves."""


@pytest.mark.parametrize("rows", EMPTY_INSIDE)
@pytest.mark.parametrize("reads", READERS)
def test_rows_whose_inner_lists_are_empty_keep_their_sizes(tmp_path: Path, reads: Any, rows: list[Any]) -> None:
    kind = pa.list_(pa.list_(pa.int32())) if rows is not EMPTY_INSIDE[2] else pa.list_(pa.list_(pa.list_(pa.int32())))
    converter = make_parquet_converter(write(tmp_path, pa.table({"x": pa.array(rows, kind)})), shapes={"x": None})
    assert reads(converter)["x"] == rows


def test_empty_inner_lists_beside_full_ones_are_no_tensor_of_torch(tmp_path: Path) -> None:
    rows = pa.array([[[1, 2]], [[], [], []]], pa.list_(pa.list_(pa.int32())))
    converter = make_parquet_converter(write(tmp_path, pa.table({"x": rows})), shapes={"x": None})
    with pytest.raises(SourceError, match="'x' has rows that differ in more than their first dimension"):
        read_torch(converter)
    assert read(converter)["x"] == rows.to_pylist()


@pytest.mark.parametrize("first", [0, 1])
def test_jagged_numbers_are_arrays_for_a_transform_whatever_row_comes_first(tmp_path: Path, first: int) -> None:
    rows = [[[1], [2, 3]], [[4, 5]]]
    table = pa.table({"x": pa.array([rows[first], rows[1 - first]], pa.list_(pa.list_(pa.int32())))})
    converter = make_parquet_converter(write(tmp_path, table), shapes={"x": None})
    with converter.make_torch_dataloader(batch_size=2, ragged="nested", transform=lambda batch: batch) as loader:
        [batch] = list(loader)
    assert {type(row) for row in batch["x"]} == {np.ndarray}
    assert plain(batch["x"][first]) == rows[0]


def test_what_a_transform_makes_in_the_other_byte_order_becomes_tensors(tmp_path: Path) -> None:
    converter = make_parquet_converter(write(tmp_path, pa.table({"x": [1.5, 2.5]})))
    with converter.make_torch_dataloader(batch_size=2, transform=lambda batch: {"x": batch["x"].astype(">f8")}) as one:
        assert [batch["x"].tolist() for batch in one] == [[1.5, 2.5]]
    with (
        converter.make_torch_dataloader(batch_size=2, transform=lambda batch: {"y": batch["x"].astype("g")}) as one,
        pytest.raises(TypeError, match=r"Column 'y' of the transform's batch has the dtype .*torch's tensors lack"),
    ):
        list(one)
