"""A converter that is made again from its recipe has the same rows; or there is an error that says why not."""

from __future__ import annotations

import datetime as dt
import io
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from converter import (
    CacheError,
    DatasetConverter,
    NumPy,
    SourceChangedError,
    SourceError,
    make_delta_converter,
    make_parquet_converter,
    mix,
    open_converter,
)
from converter.lineage.remaking import remake
from converter.lineage.tracking import source_document, source_from
from converter.storage.urls import stored_url
from tests.columns import Column
from tests.entries import write_converter
from tests.rows import assert_same


def table_of(num_rows: int, *, start: int = 0) -> pa.Table:
    ids = np.arange(start, start + num_rows)
    buffers = [io.BytesIO() for _ in ids]
    for buffer, number in zip(buffers, ids, strict=True):
        np.save(buffer, np.full(2, number, "float32"))
    return pa.table(
        {
            "id": ids,
            "x": ids / 7,
            "y": ids % 3,
            "name": [f"n{number % 5}" for number in ids],
            "day": [dt.date(2026, 1, 1) + dt.timedelta(int(number)) for number in ids],
            "pair": pa.array([[float(number), 0.0] for number in ids], pa.list_(pa.float64(), 2)),
            "some": [[1.0] * (int(number) % 3) for number in ids],
            "array": [buffer.getvalue() for buffer in buffers],
        }
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files in two folders, and a Delta table of 3 versions; nothing changes them."""
    folder = tmp_path_factory.mktemp("data")
    for year in (2025, 2026):
        (folder / "rides" / f"year={year}").mkdir(parents=True)
        pq.write_table(table_of(40, start=year), folder / "rides" / f"year={year}" / "a.parquet", row_group_size=16)
    for start in (0, 30, 60):
        write_deltalake(folder / "table", table_of(30, start=start), mode="append")
    return folder


class Doubled:
    """A decoder of a user's own."""

    dtype, shape = "float32", (1,)

    def decode(self, values: pa.LargeBinaryArray, out: Any = None) -> Any:
        lengths = np.asarray(pc.binary_length(values), np.float32).reshape(-1, 1)
        if out is None:
            return lengths * 2
        out[:] = lengths * 2
        return out


def as_logged(converter: DatasetConverter) -> Any:
    """The recipe and the fingerprint as another process reads them."""
    assert converter._manifest.recipe is not None
    _, document = source_document(converter._manifest.recipe, converter.fingerprint)
    return source_from(json.loads(json.dumps(document, allow_nan=False)))


def again(converter: DatasetConverter, **options: Any) -> DatasetConverter:
    recipe, fingerprint = as_logged(converter)
    return remake(recipe, fingerprint=fingerprint, **{"decode": None, "storage_options": None} | options)


def assert_same_rows(one: DatasetConverter, other: DatasetConverter) -> None:
    assert len(one) == len(other)
    assert one.schema == other.schema
    assert (one.fingerprint, one.version) == (other.fingerprint, other.version)
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "seed": 5, "ragged": "nested", "nulls": "mask"}
    with one.make_batch_reader(**options) as first, other.make_batch_reader(**options) as second:
        batches = list(zip(first, second, strict=True))
    assert batches
    for mine, its in batches:
        assert_same(its, mine)


FIRST = dt.date(2026, 1, 3)
WEIGHTS = {0: 1.0, 1: 2.0, 2: 0.5}
CONVERTERS: dict[str, Callable[[Path], DatasetConverter]] = {
    "a folder": lambda data: make_parquet_converter(data / "rides"),
    "a pattern": lambda data: make_parquet_converter(f"{data}/rides/year=202?/*.parquet"),
    "a choice": lambda data: make_parquet_converter(f"{data}/rides/year=202{{5,6}}/**"),
    "files in another order": lambda data: make_parquet_converter(
        [data / "rides" / "year=2026" / "a.parquet", data / "rides" / "year=2025" / "a.parquet"]
    ),
    "columns and doubles": lambda data: make_parquet_converter(data / "rides", columns=["y", "x"], float_dtype=None),
    "shapes": lambda data: make_parquet_converter(
        data / "rides", columns=("array", "pair"), shapes={"array": (136,), "pair": None}
    ),
    "decoded": lambda data: make_parquet_converter(data / "rides", decode={"array": NumPy()}),
    "categories of the data": lambda data: make_parquet_converter(data / "rides", categories=["name", "y"]),
    "categories that were given": lambda data: make_parquet_converter(
        data / "rides", categories={"name": ["n4", "n1"], "day": [FIRST]}, unseen="null"
    ),
    "standardized": lambda data: make_parquet_converter(data / "rides", standardize={"x": None, "pair": (1.5, 2.0)}),
    "a version": lambda data: make_delta_converter(data / "table", version=1),
    "the latest version": lambda data: make_delta_converter(data / "table", columns=["id", "name"]),
    "a version with filters": lambda data: make_delta_converter(
        data / "table", version=1, filters=[[("day", "<", FIRST)], [("x", ">", 2), ("x", "<=", float("inf"))]]
    ),
    "where": lambda data: make_delta_converter(data / "table").where([("name", "in", {"n1", "n2"}), ("id", ">", 3)]),
    "where, an iterator": lambda data: make_parquet_converter(data / "rides").where([("y", "in", iter([0, 2]))]),
    "split": lambda data: make_parquet_converter(data / "rides").split({"a": 0.7, "b": 0.2}, seed=3)["b"],
    "split by a key": lambda data: make_parquet_converter(data / "rides").split({"a": 0.7, "b": 0.3}, by="id")["a"],
    "sequences": lambda data: make_delta_converter(data / "table", columns=["id", "x"]).sequences(
        4, order_by="id", stride=np.int64(2), max_gap=1.5, partial="pad", steps={"x": range(2)}
    ),
    "sequences of days": lambda data: make_delta_converter(data / "table", columns=["day", "x"]).sequences(
        3, order_by="day", max_gap=dt.timedelta(days=2)
    ),
    "balance": lambda data: make_parquet_converter(data / "rides").balance("y", weights=WEIGHTS, num_rows=50, seed=2),
    "sample": lambda data: make_parquet_converter(data / "rides").sample("x", num_rows=20, replacement=False),
    "sample of values": lambda data: make_parquet_converter(data / "rides").sample(WEIGHTS, by="y"),
    "views of views": lambda data: (
        make_delta_converter(data / "table", version=1)
        .where([("id", "<", 50)])
        .split({"train": 0.8, "val": 0.2})["train"]
        .balance("y")
    ),
    "a pickled copy of a view": lambda data: pickle.loads(
        pickle.dumps(make_parquet_converter(data / "rides").where([("y", "=", 1)]))
    ),
    "a mixture": lambda data: mix(
        {"rides": make_parquet_converter(data / "rides"), "table": make_delta_converter(data / "table", version=1)},
        source="from",
    ),
    "a mixture of views with a curriculum": lambda data: mix(
        {
            "one": make_parquet_converter(data / "rides").where([("y", "=", 1)]),
            "all": make_delta_converter(data / "table", version=0),
        },
        {"one": 0.3, "all": 0.9},
        stop=100,
        seed=4,
    ).with_weights({"one": 1.0, "all": 0.1}, from_epoch=1),
}


@pytest.mark.parametrize("make", CONVERTERS.values(), ids=CONVERTERS.keys())
def test_the_same_rows_are_made_again(data: Path, make: Callable[[Path], DatasetConverter]) -> None:
    converter = make(data)
    assert_same_rows(converter, again(converter))


def test_a_relative_path_is_found_from_another_folder(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(data)
    converters = [make_parquet_converter("rides/*"), make_delta_converter("table", version=2)]
    monkeypatch.chdir(tmp_path)
    for converter in converters:
        assert_same_rows(converter, again(converter))


def test_a_version_is_made_again_when_there_are_newer_ones(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "table", table_of(10))
    converter = make_delta_converter(tmp_path / "table")
    write_deltalake(tmp_path / "table", table_of(5), mode="overwrite")
    assert_same_rows(converter, again(converter))
    assert again(converter).version == 0


def test_an_entry_is_opened_again_until_it_is_deleted(tmp_path: Path) -> None:
    columns = [Column(name="a", dtype="float32"), Column(name="b", dtype="int32")]
    written = write_converter(tmp_path, columns, [[range(20)], [range(20, 50)]], delete_on_exit=False)
    view = written.where([("b", ">", -1)])
    with open_converter(written.url) as opened:
        for converter in (written, view, opened):
            # The end of the block releases the entry, also that of a view: no thread renews a lease any more.
            with again(converter) as copy:
                assert_same_rows(converter, copy)
    written.delete()
    with pytest.raises(CacheError, match="There is no committed cache entry"):
        again(written)


def test_after_an_error_no_entry_is_held(tmp_path: Path) -> None:
    written = write_converter(tmp_path, [Column(name="a", dtype="float32")], [[range(20)]], delete_on_exit=False)
    recipe, fingerprint = as_logged(written.where([("a", "<", 1e9)]))
    for changed in (replace(recipe, fingerprint="0" * 32), recipe):
        # A heartbeat that were left behind would fail the test.
        with pytest.raises(SourceChangedError, match="has changed"):
            remake(changed, fingerprint=fingerprint[::-1], decode=None, storage_options=None)
    written.delete()


def test_an_error_lists_few_of_many_files(tmp_path: Path) -> None:
    pq.write_table(table_of(3), tmp_path / "a.parquet")
    recipe, _ = as_logged(make_parquet_converter([tmp_path / "a.parquet"] * 9))
    assert recipe.shown_places.endswith("a.parquet and 6 more")


def test_changed_files_are_an_error_that_says_so(tmp_path: Path) -> None:
    pq.write_table(table_of(30), tmp_path / "a.parquet")
    converter = make_parquet_converter(tmp_path).where([("y", "=", 1)])
    pq.write_table(table_of(30, start=1), tmp_path / "a.parquet")
    with pytest.raises(SourceChangedError, match=rf"{tmp_path} has changed: its rows had the fingerprint .*Restore"):
        again(converter)
    pq.write_table(table_of(30).drop_columns(["x"]), tmp_path / "a.parquet")
    narrow = make_parquet_converter(tmp_path, columns=["y"])
    pq.write_table(table_of(30).drop_columns(["y"]), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"cannot be read as it was: columns: There is no column 'y'"):
        again(narrow)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(SourceError, match="holds no Parquet files"):
        again(converter)


def test_a_new_file_is_a_change_too(tmp_path: Path) -> None:
    pq.write_table(table_of(30), tmp_path / "a.parquet")
    converter = make_parquet_converter(f"{tmp_path}/*.parquet")
    pq.write_table(table_of(5), tmp_path / "b.parquet")
    with pytest.raises(SourceChangedError, match="has changed"):
        again(converter)


def test_another_table_in_the_place_is_a_change_too(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "table", table_of(10))
    converter = make_delta_converter(tmp_path / "table")
    shutil.rmtree(tmp_path / "table")
    write_deltalake(tmp_path / "table", table_of(10))
    with pytest.raises(SourceChangedError, match=r"table, version 0 has changed"):
        again(converter)


def test_a_decoder_of_the_users_own_is_asked_for(data: Path) -> None:
    converter = make_parquet_converter(data / "rides", decode={"array": Doubled()})
    with pytest.raises(ValueError, match=r"Column 'array' was read with a decoder of your own.*load\(decode="):
        again(converter)
    assert_same_rows(converter, again(converter, decode={"array": Doubled()}))
    with pytest.raises(ValueError, match=r"decoded to float32 of shape \(1,\), and NumPy\(.*Pass the decoder of that"):
        again(converter, decode={"array": NumPy("float32", (2,))})
    with pytest.raises(ValueError, match=r"names the column 'x', which was not read with a decoder of your own"):
        again(converter, decode={"array": Doubled(), "x": Doubled()})
    assert "Doubled" in json.dumps(source_document(as_logged(converter)[0], "")[1])


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        (pc.field("y") > 0, r"where\(\): filters= has an expression of pyarrow; tuples"),
        ([("id", "in", np.arange(200_000))], r"where\(\): filters= has a list of 200,000 values"),
    ],
)
def test_a_view_that_cannot_be_stored_is_refused_with_the_reason(data: Path, filters: Any, reason: str) -> None:
    view = make_parquet_converter(data / "rides").where(filters)
    mixture = mix({"all": make_parquet_converter(data / "rides"), "some": view})
    for converter in (view, view.split({"a": 0.5})["a"], pickle.loads(pickle.dumps(view)), mixture):
        with pytest.raises(SourceError, match=rf"cannot be found again by themselves: .*{reason}"):
            again(converter)


def test_filters_of_a_table_that_cannot_be_stored_are_refused(data: Path) -> None:
    with pytest.raises(SourceError, match="filters= has an expression of pyarrow"):
        again(make_delta_converter(data / "table", filters=pc.field("y") > 0))


def test_no_secret_and_no_user_is_in_a_url() -> None:
    assert stored_url("s3://key:secret@bucket/a/*.parquet") == "s3://bucket/a/*.parquet"
    assert stored_url("s3://bucket/day=?/x=1/*") == "s3://bucket/day=?/x=1/*"
    assert stored_url("https://host/a.parquet?sig=secret") == "https://host/a.parquet"
    assert stored_url("abfss://box@lake.dfs.core.windows.net/a") == "abfss://box@lake.dfs.core.windows.net/a"
    assert stored_url("hdfs://me@host/a") == "hdfs://host/a"
    assert stored_url("hdfs:/a") == "hdfs:/a"
    assert stored_url("~/a?") == str(Path("~/a?").expanduser())


def test_files_of_a_store_are_found_again_and_its_secret_is_kept_nowhere() -> None:
    filesystem = fsspec.filesystem("memory")
    for year in (2025, 2026):
        with filesystem.open(f"/lineage/year={year}/a.parquet", "wb") as file:
            pq.write_table(table_of(20, start=year), file)
    options = {"account_key": "planted"}
    converter = make_parquet_converter("memory://lineage/year=202?/*.parquet", storage_options=options)
    assert len(converter) == 40
    recipe, fingerprint = as_logged(converter)
    assert "planted" not in json.dumps(source_document(recipe, fingerprint)[1])
    assert_same_rows(converter, again(converter, storage_options=options))
    filesystem.rm("/lineage", recursive=True)


def test_storage_options_are_in_no_recipe(tmp_path: Path) -> None:
    pq.write_table(table_of(30), tmp_path / "a.parquet")
    converter = make_parquet_converter(tmp_path, storage_options={"account_key": "planted"})
    recipe, fingerprint = as_logged(converter)
    assert "planted" not in json.dumps(source_document(recipe, fingerprint)[1])
    assert b"planted" not in pickle.dumps(converter)
    assert_same_rows(converter, again(converter, storage_options={"account_key": "planted"}))
