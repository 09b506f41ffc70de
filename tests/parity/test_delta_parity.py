"""Delta tables that the real Delta made: whatever its features, each version has the rows that Spark reads of it."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from converter import DatasetConverter, SourceError, UnsupportedTypeError, make_delta_converter
from converter.sources.delta import files
from tests.known_rows import concatenate
from tests.parity.conftest import MAKE_SECONDS
from tests.parity.golden_tables import TABLES, folder_of, rows_of
from tests.parity.rows import rows_by_sparks_rule

if TYPE_CHECKING:
    from tests.servers.s3 import S3

# The first test waits for all tables.
pytestmark = pytest.mark.timeout(MAKE_SECONDS + 60)

VERSIONS = [(name, version) for name, table in TABLES.items() for version in range(table.versions)]
UNREADABLE = [(name, version) for name, version in VERSIONS if version in TABLES[name].unreadable]
KEPT = [(name, version) for name, version in VERSIONS if version not in {*TABLES[name].lost, *TABLES[name].unreadable}]
LOST = [(name, version) for name, version in VERSIONS if version in TABLES[name].lost]

DTYPES = {
    pa.bool_(): "bool",
    pa.int8(): "int8",
    pa.int16(): "int16",
    pa.int32(): "int32",
    pa.int64(): "int64",
    pa.float32(): "float32",
    pa.float64(): "float64",
    pa.date32(): "datetime64[D]",
    pa.string(): "str",
    pa.binary(): "bytes",
}


def path_of(golden: dict[str, Any], name: str) -> Path:
    """Where a table stands; fails where it could not be made."""
    if name in golden["failures"]:
        pytest.fail(f"Delta could not make the table {name!r}: {golden['failures'][name]}", pytrace=False)
    if name not in golden["tables"]:
        pytest.skip(f"{golden['root']} does not hold the table {name!r}")
    return folder_of(golden["root"], name)


def expected_rows(golden: dict[str, Any], name: str, version: int) -> pa.Table:
    """What Spark reads of a version, with a column for each member of a struct."""
    table = pq.read_table(rows_of(golden["root"], name, version))
    while any(pa.types.is_struct(field.type) for field in table.schema):
        table = table.flatten()
    return table


def open_table(path: Any, **arguments: Any) -> DatasetConverter:
    """The converter of a table in its own types."""
    return make_delta_converter(path, float_dtype=None, **arguments)


def kept_columns(golden: dict[str, Any], name: str, version: int) -> dict[str, Any]:
    """The argument `columns` that leaves out what has no tensor form; nothing where all have one."""
    return {"columns": expected_rows(golden, name, version).column_names} if TABLES[name].refused else {}


def assert_same_rows(converter: DatasetConverter, expected: pa.Table) -> None:
    """The same columns in the same order and of the same types, and the same rows in any order."""
    assert list(converter.schema.names) == expected.column_names
    for field in expected.schema:
        assert converter.schema[field.name].dtype == dtype_of(field.type), field.name
    assert len(converter) == expected.num_rows
    with converter.make_batch_reader(batch_size=7, nulls="mask", ragged="nested", cur_shard=0, shard_count=1) as reader:
        found = concatenate(list(reader))
    assert_same_multiset(found, expected)


def assert_same_multiset(found: dict[str, Any], expected: pa.Table) -> None:
    found_rows, expected_rows = count_found(found, expected.schema), count_expected(expected)
    missing, extra = expected_rows - found_rows, found_rows - expected_rows
    said = (
        f"{sum(missing.values())} rows are missing, e.g. {list(missing)[:2]}; "
        f"{sum(extra.values())} rows are too many, e.g. {list(extra)[:2]}; columns {expected.column_names}"
    )
    assert found_rows == expected_rows, said


def dtype_of(kind: pa.DataType) -> str:
    """The dtype in which a column of this type arrives."""
    kind = innermost(kind)
    if pa.types.is_timestamp(kind):
        return "datetime64[us]"
    return "float64" if pa.types.is_decimal(kind) else DTYPES[kind]


def innermost(kind: pa.DataType) -> pa.DataType:
    while pa.types.is_list(kind):
        kind = kind.value_type
    return kind


def count_expected(table: pa.Table) -> Counter[tuple[Any, ...]]:
    """Whole rows, each with the number of times that it occurs."""
    columns = []
    for field in table.schema:
        column = table[field.name]
        if pa.types.is_timestamp(field.type):
            column = column.cast(pa.int64())
        elif pa.types.is_date32(field.type):
            column = column.cast(pa.int32())
        is_decimal = pa.types.is_decimal(innermost(field.type))
        columns.append([plain(value, is_decimal=is_decimal) for value in column.to_pylist()])
    return Counter(zip(*columns, strict=True))


def count_found(batch: dict[str, Any], schema: pa.Schema) -> Counter[tuple[Any, ...]]:
    columns = []
    for field in schema:
        values = batch[field.name]
        if values.dtype.kind == "M":
            values = values.astype(np.int64)
        valid = batch.get(f"{field.name}__valid", np.ones(len(values), bool)).tolist()
        is_decimal = pa.types.is_decimal(innermost(field.type))
        cells = (value.tolist() if isinstance(value, np.ndarray) else value for value in values.tolist())
        columns.append(
            [plain(cell, is_decimal=is_decimal) if there else None for cell, there in zip(cells, valid, strict=True)]
        )
    return Counter(zip(*columns, strict=True))


def plain(value: Any, *, is_decimal: bool) -> Any:
    """A value that is equal to itself, NaN as well, and to no other one, minus zero as well."""
    if isinstance(value, (list, np.ndarray)):
        return tuple(plain(item, is_decimal=is_decimal) for item in value)
    if is_decimal and value is not None:
        # The nearest double, but for its last digit.
        return f"{float(value):.14e}"
    return value.hex() if isinstance(value, float) else value


def matching(table: pa.Table, filters: Sequence[tuple[str, str, Any]]) -> pa.Table | None:
    """The rows for which the filters hold; None where a column of theirs is not there, or of another kind."""
    if not all(name in table.column_names for name, _, _ in filters):
        return None
    with contextlib.suppress(pa.ArrowNotImplementedError):
        return rows_by_sparks_rule(table, filters)
    return None


@pytest.mark.parametrize("name", TABLES)
def test_the_table_was_made(golden: dict[str, Any], name: str) -> None:
    assert (path_of(golden, name) / "_delta_log").is_dir()


@pytest.mark.parametrize(("name", "version"), KEPT)
def test_a_version_has_the_rows_that_spark_reads(golden: dict[str, Any], name: str, version: int) -> None:
    path, expected = path_of(golden, name), expected_rows(golden, name, version)
    arguments = kept_columns(golden, name, version)
    if not expected.num_rows:
        with pytest.raises(SourceError, match="no rows"):
            open_table(path, version=version, **arguments)
        return
    with open_table(path, version=version, **arguments) as converter:
        assert_same_rows(converter, expected)


@pytest.mark.parametrize(("name", "version"), KEPT)
def test_some_columns_of_a_version_are_those_that_spark_reads(golden: dict[str, Any], name: str, version: int) -> None:
    path, expected = path_of(golden, name), expected_rows(golden, name, version)
    if not expected.num_rows:
        pytest.skip("no rows")
    for chosen in (expected.column_names[::-2], expected.column_names[-2::-2]):
        if chosen:
            with open_table(path, version=version, columns=chosen) as converter:
                assert_same_rows(converter, expected.select(chosen))


@pytest.mark.parametrize(("name", "version"), [(name, version) for name, version in KEPT if TABLES[name].filters])
@pytest.mark.parametrize("has_large_files", [False, True])
def test_filters_leave_the_rows_of_a_version_for_which_they_hold(
    golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, version: int, has_large_files: bool
) -> None:
    if has_large_files:
        monkeypatch.setattr(files, "_LARGE_FILE_BYTES", 0)
    path, filters = path_of(golden, name), list(TABLES[name].filters)
    expected = matching(expected_rows(golden, name, version), filters)
    if expected is None:
        pytest.skip("this version has no such column of such a type")
    arguments = kept_columns(golden, name, version)
    if not expected.num_rows:
        with pytest.raises(SourceError, match="row"):
            open_table(path, version=version, filters=filters, **arguments)
        return
    with open_table(path, version=version, filters=filters, **arguments) as converter:
        assert_same_rows(converter, expected)
    with (
        open_table(path, version=version, **arguments) as converter,
        converter.where(filters) as part,
    ):
        assert_same_rows(part, expected)


@pytest.mark.parametrize(("name", "version"), UNREADABLE)
def test_what_cannot_be_read_rightly_is_refused_with_a_remedy(golden: dict[str, Any], name: str, version: int) -> None:
    with pytest.raises(SourceError, match=f"{TABLES[name].unreadable[version]}.*make_spark_converter"):
        open_table(path_of(golden, name), version=version)


@pytest.mark.parametrize(
    "name", [name for name, table in TABLES.items() if table.versions - 1 not in {*table.unreadable}]
)
def test_without_a_version_it_is_the_newest(golden: dict[str, Any], name: str) -> None:
    path, newest = path_of(golden, name), TABLES[name].versions - 1
    expected = expected_rows(golden, name, newest)
    with open_table(path.as_uri(), **kept_columns(golden, name, newest)) as converter:
        assert_same_rows(converter, expected)


@pytest.mark.parametrize(
    "name", ["plain", "times within the commits", "times within later commits", "checkpoints in parts, log cleaned"]
)
def test_a_version_is_found_by_its_time(golden: dict[str, Any], name: str) -> None:
    path = path_of(golden, name)
    for version, milliseconds in golden["tables"][name]["milliseconds"].items():
        if int(version) not in TABLES[name].lost:
            moment = dt.datetime.fromtimestamp(milliseconds / 1000, dt.timezone.utc)
            with open_table(path, timestamp=moment) as converter:
                assert_same_rows(converter, expected_rows(golden, name, int(version)))


@pytest.mark.parametrize(("name", "version"), LOST)
def test_a_version_that_is_lost_is_refused(golden: dict[str, Any], name: str, version: int) -> None:
    path = path_of(golden, name)
    with pytest.raises(SourceError, match=rf"version {version}\b"):
        open_table(path, version=version)


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if table.refused])
def test_columns_without_a_tensor_form_are_named(golden: dict[str, Any], name: str) -> None:
    path = path_of(golden, name)
    with pytest.raises(UnsupportedTypeError) as caught:
        make_delta_converter(path)
    assert all(repr(column) in str(caught.value) for column in TABLES[name].refused)


@pytest.mark.parametrize("name", ["vectors", "vectors of many rows", "mapped, checkpointed, with vectors"])
def test_shuffled_shards_cover_the_rows_once(golden: dict[str, Any], name: str) -> None:
    path, newest = path_of(golden, name), TABLES[name].versions - 1

    def batches(converter: DatasetConverter) -> Iterator[dict[str, Any]]:
        for shard in range(3):
            with converter.make_batch_reader(
                batch_size=1000, nulls="mask", ragged="nested", shuffle=True, seed=5, uneven="keep",
                cur_shard=shard, shard_count=3,
            ) as reader:  # fmt: skip
                yield from reader

    with open_table(path) as converter:
        assert_same_multiset(concatenate(list(batches(converter))), expected_rows(golden, name, newest))


@pytest.mark.parametrize("name", ["vectors", "mapped, checkpointed, with vectors", "times beyond nanoseconds"])
def test_a_table_on_s3_has_the_same_rows(golden: dict[str, Any], s3: S3, name: str) -> None:
    bucket, newest = s3.new_bucket(), TABLES[name].versions - 1
    store = s3fs.S3FileSystem(**s3.options, skip_instance_cache=True)
    store.put(f"{path_of(golden, name)}/", f"{bucket}/deep/table/", recursive=True)
    url, expected = f"s3://{bucket}/deep/table", expected_rows(golden, name, newest)
    with open_table(url, storage_options=s3.options, **kept_columns(golden, name, newest)) as converter:
        assert_same_rows(converter, expected)


def test_a_table_is_never_changed(golden: dict[str, Any]) -> None:
    path = path_of(golden, "vectors")
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    converter = make_delta_converter(path)
    with converter.make_batch_reader(batch_size=10, nulls="mask", ragged="nested") as reader:
        assert list(reader)
    converter.delete()
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
