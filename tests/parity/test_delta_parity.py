"""Delta tables that the real Delta made: whatever its features, each version has the rows that Spark reads of it."""

from __future__ import annotations

import datetime as dt
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from converter import DatasetConverter, SourceError, UnsupportedTypeError, make_delta_converter
from converter.sources.delta import files
from tests.parity.conftest import FRESH, FRESH_SECONDS
from tests.parity.golden_files import KEPT, read_index
from tests.parity.golden_making import expected_rows, folder_of, matching, recipe_of
from tests.parity.golden_tables import PACKAGE, TABLES
from tests.parity.rows import dtype_of, is_decimal
from tests.rows import concatenate

if TYPE_CHECKING:
    from tests.servers.s3 import S3

Rows = Counter[tuple[Any, ...]]

INDEX = read_index(Path(os.environ.get("CONVERTER_GOLDEN_TABLES", KEPT)))
KNOWN = {(name, int(version)): known for name, table in INDEX["tables"].items() for version, known in table.items()}
UNREADABLE = [(name, version) for name, version in KNOWN if version in TABLES[name].unreadable]
READABLE = [pair for pair in KNOWN if pair not in UNREADABLE]
WITH_ROWS = [pair for pair in READABLE if KNOWN[pair]["num_rows"]]
FILTERED = [pair for pair in READABLE if KNOWN[pair]["num_matching"] is not None]
LOST = [(name, version) for name, table in TABLES.items() for version in table.lost]
NEWEST = [(name, version) for name, version in READABLE if version == TABLES[name].versions - 1]
FOUND_BY_TIME = (
    "plain", "times within the commits", "times within later commits", "checkpoints in parts, log cleaned",
)  # fmt: skip

pytestmark = pytest.mark.short


def by_lane(versions: list[tuple[str, int]]) -> list[Any]:
    """These versions; only the last one of each table in the short lane."""
    last = dict(versions)
    older = pytest.mark.long("in the short lane the last version of the table shows the same")
    return [pytest.param(*pair, marks=() if pair in last.items() else older) for pair in versions]


def open_table(path: Any, **arguments: Any) -> DatasetConverter:
    """The converter of a table in its own types."""
    return make_delta_converter(path, float_dtype=None, **arguments)


def assert_same_rows(converter: DatasetConverter, expected: pa.Table) -> None:
    """The same columns in the same order and of the same types, and the same rows in any order."""
    assert list(converter.schema.names) == expected.column_names
    for field in expected.schema:
        assert converter.schema[field.name].dtype == dtype_of(field.type), field.name
    assert len(converter) == expected.num_rows
    batch_size = 7 if expected.num_rows < 1000 else 1009
    with converter.make_batch_reader(
        batch_size=batch_size, nulls="mask", ragged="nested", cur_shard=0, shard_count=1
    ) as reader:
        batch = concatenate(list(reader))
    assert_same_multiset(count_read(batch, expected.schema), count_expected(expected), expected.column_names)


def assert_same_multiset(read: Rows, expected: Rows, columns: list[str]) -> None:
    missing, extra = expected - read, read - expected
    difference = (
        f"{sum(missing.values())} rows are missing, e.g. {list(missing)[:2]}; "
        f"{sum(extra.values())} rows are too many, e.g. {list(extra)[:2]}; columns {columns}"
    )
    assert read == expected, difference


def count_expected(table: pa.Table) -> Rows:
    """Whole rows, each with the number of times that it occurs."""
    columns = []
    for field in table.schema:
        column = table[field.name]
        if pa.types.is_timestamp(field.type):
            column = column.cast(pa.int64())
        elif pa.types.is_date32(field.type):
            column = column.cast(pa.int32())
        decimals = is_decimal(field.type)
        columns.append([plain(value, decimals) for value in column.to_pylist()])
    return Counter(zip(*columns, strict=True))


def count_read(batch: dict[str, Any], schema: pa.Schema) -> Rows:
    columns = []
    for field in schema:
        values = batch[field.name]
        if values.dtype.kind == "M":
            values = values.astype(np.int64)
        valid = batch.get(f"{field.name}__valid", np.ones(len(values), bool)).tolist()
        decimals = is_decimal(field.type)
        cells = (value.tolist() if isinstance(value, np.ndarray) else value for value in values.tolist())
        columns.append([plain(cell, decimals) if there else None for cell, there in zip(cells, valid, strict=True)])
    return Counter(zip(*columns, strict=True))


def plain(value: Any, decimals: bool) -> Any:
    """A value that is equal to itself, NaN as well, and to no other one, minus zero as well."""
    if isinstance(value, (list, np.ndarray)):
        return tuple(plain(item, decimals) for item in value)
    if decimals and value is not None:
        # The nearest double, but for its last digit.
        return f"{float(value):.14e}"
    return value.hex() if isinstance(value, float) else value


def with_form(expected: pa.Table, name: str) -> dict[str, Any]:
    """The argument `columns` that leaves out what has no tensor form; nothing where all have one."""
    return {"columns": expected.column_names} if TABLES[name].refused else {}


def check_rows(golden: Path, name: str, version: int) -> None:
    """A version has the rows that Spark reads."""
    path, expected = folder_of(golden, name), expected_rows(golden, name, version)
    if expected.num_rows:
        with open_table(path, version=version, **with_form(expected, name)) as converter:
            assert_same_rows(converter, expected)
    else:
        with pytest.raises(SourceError, match="no rows"):
            open_table(path, version=version, **with_form(expected, name))


def check_filters(golden: Path, name: str, version: int) -> None:
    """A filter leaves the rows for which it holds, where the version is opened and afterwards."""
    path, filters, rows = folder_of(golden, name), list(TABLES[name].filters), expected_rows(golden, name, version)
    expected, arguments = matching(rows, filters), with_form(rows, name)
    assert expected is not None
    if not expected.num_rows:
        with pytest.raises(SourceError, match="row"):
            open_table(path, version=version, filters=filters, **arguments)
        return
    with open_table(path, version=version, filters=filters, **arguments) as converter:
        assert_same_rows(converter, expected)
    with open_table(path, version=version, **arguments) as converter, converter.where(filters) as part:
        assert_same_rows(part, expected)


def check_times(golden: Path, name: str) -> None:
    """A version is the one of the moment at which it was committed."""
    for version, known in read_index(golden)["tables"][name].items():
        moment = dt.datetime.fromtimestamp(known["milliseconds"] / 1000, dt.timezone.utc)
        with open_table(folder_of(golden, name), timestamp=moment) as converter:
            assert_same_rows(converter, expected_rows(golden, name, int(version)))


def test_every_table_is_there_with_every_version() -> None:
    assert not INDEX["failures"]
    for name, table in TABLES.items():
        assert {int(version) for version in INDEX["tables"][name]} == {*range(table.versions)} - {*table.lost}, name


def test_the_tables_are_those_that_the_statements_make() -> None:
    assert INDEX["package"] == PACKAGE
    recipes = {name: recipe_of(name) for name in TABLES}
    assert INDEX["recipes"] == recipes, "make the files again: python -m tests.parity.golden_files FOLDER"


@pytest.mark.parametrize(("name", "version"), READABLE)
def test_a_version_has_the_rows_that_spark_reads(golden: Path, name: str, version: int) -> None:
    assert expected_rows(golden, name, version).num_rows == KNOWN[name, version]["num_rows"]
    check_rows(golden, name, version)


@pytest.mark.parametrize(("name", "version"), by_lane(WITH_ROWS))
def test_some_columns_of_a_version_are_those_that_spark_reads(golden: Path, name: str, version: int) -> None:
    path, expected = folder_of(golden, name), expected_rows(golden, name, version)
    for chosen in (expected.column_names[::-2], expected.column_names[-2::-2]):
        if chosen:
            with open_table(path, version=version, columns=chosen) as converter:
                assert_same_rows(converter, expected.select(chosen))


@pytest.mark.parametrize(("name", "version"), by_lane(FILTERED))
def test_filters_leave_the_rows_of_a_version_for_which_they_hold(golden: Path, name: str, version: int) -> None:
    check_filters(golden, name, version)


@pytest.mark.parametrize(("name", "version"), by_lane(FILTERED))
def test_filters_leave_the_same_rows_of_large_files(
    golden: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: int
) -> None:
    monkeypatch.setattr(files, "_LARGE_FILE_BYTES", 0)
    check_filters(golden, name, version)


@pytest.mark.parametrize(("name", "version"), UNREADABLE)
def test_what_cannot_be_read_rightly_is_refused_with_a_remedy(golden: Path, name: str, version: int) -> None:
    with pytest.raises(SourceError, match=f"{TABLES[name].unreadable[version]}.*make_spark_converter"):
        open_table(folder_of(golden, name), version=version)


@pytest.mark.parametrize(("name", "newest"), NEWEST)
def test_without_a_version_it_is_the_newest(golden: Path, name: str, newest: int) -> None:
    expected = expected_rows(golden, name, newest)
    with open_table(folder_of(golden, name).as_uri(), **with_form(expected, name)) as converter:
        assert_same_rows(converter, expected)


@pytest.mark.parametrize("name", FOUND_BY_TIME)
def test_a_version_is_found_by_its_time(golden: Path, name: str) -> None:
    check_times(golden, name)


@pytest.mark.parametrize(("name", "version"), LOST)
def test_a_version_that_is_lost_is_refused(golden: Path, name: str, version: int) -> None:
    with pytest.raises(SourceError, match=rf"version {version}\b"):
        open_table(folder_of(golden, name), version=version)


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if table.refused and name != "maps"])
def test_columns_without_a_tensor_form_are_named(golden: Path, name: str) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        make_delta_converter(folder_of(golden, name))
    assert all(repr(column) in str(caught.value) for column in TABLES[name].refused)


def test_maps_and_arrays_of_structs_are_their_members(golden: Path) -> None:
    """Their rows are not kept beside the table, so they are said here."""
    with make_delta_converter(folder_of(golden, "maps")) as converter:
        assert converter.columns == ("id", "m.key", "m.value", "people.a", "x")
        rows = converter.head(5)
    assert [list(keys) for keys in rows["m.key"]] == [["k"]] * 5
    for name in ("m.value", "people.a"):
        assert [values.tolist() for values in rows[name]] == [[id_] for id_ in rows["id"].tolist()]


@pytest.mark.parametrize("name", ["vectors", "vectors of many rows", "mapped, checkpointed, with vectors"])
def test_shuffled_shards_cover_the_rows_once(golden: Path, name: str) -> None:
    expected = expected_rows(golden, name, TABLES[name].versions - 1)

    def batches(converter: DatasetConverter) -> Iterator[dict[str, Any]]:
        for shard in range(3):
            with converter.make_batch_reader(
                batch_size=1000, nulls="mask", ragged="nested", shuffle=True, seed=5, uneven="keep",
                cur_shard=shard, shard_count=3,
            ) as reader:  # fmt: skip
                yield from reader

    with open_table(folder_of(golden, name)) as converter:
        rows = count_read(concatenate(list(batches(converter))), expected.schema)
    assert_same_multiset(rows, count_expected(expected), expected.column_names)


@pytest.mark.parametrize("name", ["vectors", "mapped, checkpointed, with vectors", "times beyond nanoseconds"])
def test_a_table_on_s3_has_the_same_rows(golden: Path, s3: S3, name: str) -> None:
    import s3fs

    bucket, expected = s3.new_bucket(), expected_rows(golden, name, TABLES[name].versions - 1)
    store = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True)
    store.put(f"{folder_of(golden, name)}/", f"{bucket}/deep/table/", recursive=True)
    url = f"s3://{bucket}/deep/table"
    with open_table(url, storage_options=s3.options, **with_form(expected, name)) as converter:
        assert_same_rows(converter, expected)


def test_a_table_is_never_changed(golden: Path) -> None:
    path = folder_of(golden, "vectors")
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    converter = make_delta_converter(path)
    with converter.make_batch_reader(batch_size=10, nulls="mask", ragged="nested") as reader:
        assert list(reader)
    converter.delete()
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


@pytest.mark.long("Spark makes the tables, with Delta's jars from Maven")
@pytest.mark.timeout(FRESH_SECONDS + 60)
@pytest.mark.parametrize("name", FRESH)
def test_a_table_made_afresh_has_the_same_rows(golden: Path, fresh_golden: Path, name: str) -> None:
    index = read_index(fresh_golden)
    assert name in index["tables"], index["failures"].get(name)
    assert index["tables"][name].keys() == INDEX["tables"][name].keys()
    for version in map(int, index["tables"][name]):
        fresh, kept = (expected_rows(folder, name, version) for folder in (fresh_golden, golden))
        assert fresh.schema == kept.schema
        assert_same_multiset(count_expected(fresh), count_expected(kept), kept.column_names)
        if (name, version) in READABLE:
            check_rows(fresh_golden, name, version)
        if (name, version) in FILTERED:
            check_filters(fresh_golden, name, version)
    if name in FOUND_BY_TIME:
        check_times(fresh_golden, name)
