"""What stands in `_common_metadata`: written, read again, preferred, refused."""

from __future__ import annotations

import copy
import decimal
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter.petastorm import stored_schema, summary
from converter.petastorm.codecs import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    DataframeColumnCodec,
    NamedSparkType,
    NdarrayCodec,
    ScalarCodec,
)
from converter.petastorm.etl import metadata_util
from converter.petastorm.etl.dataset_metadata import (
    PetastormMetadataError,
    PetastormMetadataGenerationError,
    get_schema,
    get_schema_from_dataset_url,
    infer_or_load_unischema,
    load_row_groups,
    write_metadata,
)
from converter.petastorm.etl.rowgroup_indexers import FieldNotNullIndexer, SingleFieldIndexer
from converter.petastorm.etl.rowgroup_indexing import build_rowgroup_index, get_row_group_indexes
from converter.petastorm.store import open_store
from converter.petastorm.stored_schema import (
    JSON_SCHEMA_KEY,
    ROW_GROUPS_PER_FILE_KEY,
    ROWGROUPS_INDEX_KEY,
    UNISCHEMA_KEY,
    read_indexes,
    read_schema,
    row_groups_per_file,
    schema_entries,
)
from converter.petastorm.unischema import Unischema, UnischemaField


class RoundedCodec(ScalarCodec):
    """A codec of a user's own, with values of several kinds in it."""

    def __init__(self, digits: int) -> None:
        super().__init__(NamedSparkType("DoubleType"))
        self.digits = digits
        self.options = {"names": ["a", None], "kind": np.float32}

    def encode(self, unischema_field: Any, value: Any) -> Any:
        return round(float(value), self.digits)


class Unstorable(DataframeColumnCodec):
    """A codec that keeps what JSON cannot hold."""

    def __init__(self) -> None:
        self.function = print


SCHEMA = Unischema(
    "All",
    [
        UnischemaField("id", np.int64, ()),
        UnischemaField("price", decimal.Decimal, (), ScalarCodec(NamedSparkType("DecimalType", (10, 2))), True),
        UnischemaField(
            "names", np.str_, (None,), ScalarCodec(NamedSparkType("ArrayType", (NamedSparkType("StringType"), True)))
        ),
        UnischemaField("photo", np.uint8, (None, 4, 3), CompressedImageCodec("jpeg", 55), True),
        UnischemaField("matrix", np.dtype("<f4"), (2, 2), NdarrayCodec()),
        UnischemaField("sparse", np.bool_, (9,), CompressedNdarrayCodec(), None),
        UnischemaField("text", str, (), None, True),
        UnischemaField("day", np.datetime64, (), ScalarCodec(NamedSparkType("DateType"))),
    ],
)


def described(schema: Unischema = SCHEMA) -> dict[str, Any]:
    return json.loads(schema_entries(schema)[JSON_SCHEMA_KEY])


def same(left: Unischema | None, right: Unischema) -> bool:
    return left is not None and str(left) == str(right) and left.fields == right.fields


@pytest.mark.parametrize("keys", [{JSON_SCHEMA_KEY}, {UNISCHEMA_KEY}, {JSON_SCHEMA_KEY, UNISCHEMA_KEY}])
def test_a_schema_is_stored_twice_and_either_is_enough(keys: set[bytes]) -> None:
    entries = {key: value for key, value in schema_entries(SCHEMA).items() if key in keys}
    again = read_schema(entries)
    assert same(again, SCHEMA)
    assert again is not None
    assert again.price.codec.spark_type == NamedSparkType("DecimalType", (10, 2))
    assert again.photo.codec.quality == 55


def test_without_a_schema_there_is_none() -> None:
    assert read_schema({}) is None
    assert row_groups_per_file({}) is None
    assert read_indexes({}) == {}


def test_the_json_is_read_where_the_pickle_is_damaged_or_malicious(caplog: pytest.LogCaptureFixture) -> None:
    entries = schema_entries(SCHEMA) | {UNISCHEMA_KEY: b"cos\nsystem\n(S'true'\ntR."}
    with caplog.at_level(logging.WARNING):
        assert same(read_schema(entries), SCHEMA)
    assert "'os.system'" in caplog.text


def test_a_pickle_that_petastorm_wrote_later_is_newer_than_the_json() -> None:
    newer = Unischema("Newer", [UnischemaField("other", np.int8, ())])
    entries = schema_entries(SCHEMA) | {UNISCHEMA_KEY: schema_entries(newer)[UNISCHEMA_KEY]}
    assert same(read_schema(entries), newer)


def test_a_codec_of_the_users_own_is_found_among_the_classes_at_hand(caplog: pytest.LogCaptureFixture) -> None:
    schema = Unischema("Own", [UnischemaField("x", np.float64, (), RoundedCodec(3))])
    with caplog.at_level(logging.WARNING):
        entries = schema_entries(schema)
    assert UNISCHEMA_KEY not in entries
    assert "Petastorm itself cannot read" in caplog.text
    again = read_schema(entries)
    assert again is not None
    codec = again.x.codec
    assert type(codec) is RoundedCodec
    assert (codec.digits, codec.options) == (3, {"names": ["a", None], "kind": np.float32})
    assert codec.encode(again.x, 1.23456) == 1.235
    assert codec.spark_type == NamedSparkType("DoubleType")


def test_a_codec_whose_class_is_nowhere_is_named() -> None:
    entries = schema_entries(Unischema("Own", [UnischemaField("x", np.float64, (), RoundedCodec(3))]))
    harmed = entries[JSON_SCHEMA_KEY].replace(b"RoundedCodec", b"GoneCodec")
    with pytest.raises(PetastormMetadataError, match=r"GoneCodec.*Import the module"):
        read_schema({JSON_SCHEMA_KEY: harmed})


def test_only_codecs_are_made_of_stored_names() -> None:
    """A class that is imported is no codec for that."""
    changed = described()
    changed["fields"][0]["codec"] = {"name": "pathlib.Path", "state": {"dict": {}}}
    with pytest.raises(PetastormMetadataError, match=r"'pathlib\.Path'"):
        read_schema({JSON_SCHEMA_KEY: json.dumps(changed).encode()})


@pytest.mark.parametrize(
    ("field", "cause"),
    [
        (UnischemaField("x", dict, ()), r"'x' has values of <class 'dict'>"),
        (UnischemaField("x", np.int8, (), Unstorable()), r"'x' cannot be stored.*builtin_function_or_method"),
        (UnischemaField("x", np.int8, (), object()), "not derived from DataframeColumnCodec"),
    ],
)
def test_what_has_no_form_in_json_is_refused_with_the_fields_name(field: UnischemaField, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        schema_entries(Unischema("Bad", [field]))


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(whole: dict[str, Any]) -> None:
        holder: Any = whole
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (_set("version", value=2), "another version"),
        (_set("name", value=None), "no name"),
        (_set("fields", value={}), "no list of fields"),
        (_set("fields", 0, value=5), "a field is no object"),
        (_set("fields", 0, "name", value=5), "a field has no name"),
        (_set("fields", 1, "name", value="id"), "two of its fields have one name"),
        (_set("fields", 0, "shape", value="()"), "'id' has no shape"),
        (_set("fields", 0, "shape", value=[-1]), "no number"),
        (_set("fields", 0, "shape", value=[True]), "no number"),
        (_set("fields", 0, "shape", value=[1] * 65), "no shape"),
        (_set("fields", 0, "nullable", value=1), "neither nullable nor not"),
        (_set("fields", 0, "type", value="os.system"), "type 'os.system'"),
        (_set("fields", 0, "type", value="object"), "type 'object'"),
        (_set("fields", 0, "type", value="M8[parsec]"), "type 'M8"),
        (_set("fields", 0, "type", value=5), "no text"),
        (_set("fields", 0, "codec", value="png"), "codec has no name"),
        (_set("fields", 0, "codec", value={"name": "x" * 999}), "codec 'xxx"),
        (_set("fields", 1, "codec", "spark_type", value=None), "no Spark type"),
        (_set("fields", 1, "codec", "spark_type", "name", value="MapType"), "no type 'MapType'"),
        (_set("fields", 1, "codec", "spark_type", "arguments", value=["1"]), "no numbers"),
        (_set("fields", 1, "codec", "spark_type", "arguments", value=[1, 2, 3]), "with 3 arguments"),
        (_set("fields", 3, "codec", "quality", value=101), "quality"),
        (_set("fields", 3, "codec", "image_codec", value=None), "no format"),
    ],
)
def test_a_json_schema_that_is_none_says_why(change: Callable[[dict[str, Any]], None], cause: str) -> None:
    changed = copy.deepcopy(described())
    change(changed)
    with pytest.raises(PetastormMetadataError, match=cause) as caught:
        read_schema({JSON_SCHEMA_KEY: json.dumps(changed).encode()})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("stored", [b"", b"[]", b"{", b"\xff", b"[" * 200_000, b'{"version": 1' + b"9" * 5000 + b"}"])
def test_what_is_no_json_is_refused(stored: bytes) -> None:
    with pytest.raises(PetastormMetadataError, match="cannot be understood"):
        read_schema({JSON_SCHEMA_KEY: stored})
    with pytest.raises(PetastormMetadataError, match="cannot be understood"):
        row_groups_per_file({ROW_GROUPS_PER_FILE_KEY: stored or b"0"})


@pytest.mark.parametrize(
    "counts", [{"a": -1}, {"a": "1"}, {"a": True}, {"a": 10**9}, {"a": 30_000_000, "b": 30_000_000}]
)
def test_numbers_of_row_groups_that_are_none_or_endless_are_refused(counts: dict[str, Any]) -> None:
    with pytest.raises(PetastormMetadataError, match="row groups"):
        row_groups_per_file({ROW_GROUPS_PER_FILE_KEY: json.dumps(counts).encode()})


# --- Beside files -----------------------------------------------------------------------------------------------------

RIDES = Unischema(
    "Rides",
    [
        UnischemaField("id", np.int64, ()),
        UnischemaField("city", np.str_, ()),
        UnischemaField("tags", np.str_, (None,), NdarrayCodec(), True),
        UnischemaField("day", np.str_, ()),
    ],
)


@pytest.fixture
def rides(tmp_path: Path) -> Path:
    """Two partitions of one file each, with two row groups of five rows each."""
    for number, day in enumerate(("monday", "tuesday")):
        folder = tmp_path / "rides" / f"day={day}"
        folder.mkdir(parents=True)
        ids = np.arange(10 * number, 10 * number + 10)
        tags = [None if one % 10 < 5 else bytes(NdarrayCodec().encode(RIDES.tags, _tags(one))) for one in ids.tolist()]
        table = pa.table(
            {"id": ids, "city": [f"c{one // 4}" for one in ids.tolist()], "tags": pa.array(tags, pa.binary())}
        )
        pq.write_table(table, folder / "part-0.parquet", row_group_size=5)
    return tmp_path / "rides"


def _tags(number: int) -> np.ndarray[Any, Any]:
    return np.array([f"t{number}", "all"])


def metadata(folder: Path) -> dict[bytes, bytes]:
    return dict(pq.read_metadata(folder / "_common_metadata").metadata)


def test_metadata_are_written_beside_the_files_and_read_in_every_way(rides: Path) -> None:
    write_metadata(rides.as_uri(), RIDES)
    counts = {"day=monday/part-0.parquet": 2, "day=tuesday/part-0.parquet": 2}
    assert row_groups_per_file(metadata(rides)) == counts
    assert pq.read_metadata(rides / "_common_metadata").schema.to_arrow_schema().names == ["id", "city", "tags"]
    store, dataset = open_store([rides.as_uri()]), pq.ParquetDataset(str(rides))
    for found in (get_schema(store), get_schema(dataset), get_schema_from_dataset_url(rides.as_uri())):
        assert same(found, RIDES)
    assert same(infer_or_load_unischema(dataset), RIDES)
    pieces = load_row_groups(store)
    assert pieces == load_row_groups(dataset)
    assert [(Path(piece.path).parent.name, piece.row_group) for piece in pieces] == [
        ("day=monday", 0), ("day=monday", 1), ("day=tuesday", 0), ("day=tuesday", 1)
    ]  # fmt: skip
    assert pieces[3].partition_keys == [("day", "tuesday")]


@pytest.mark.parametrize("ending", ["", "/", "//"])
def test_a_url_may_have_slashes_too_many(rides: Path, ending: str) -> None:
    write_metadata(rides.as_uri() + ending, RIDES)
    assert same(get_schema_from_dataset_url(rides.as_uri().replace("/rides", "//rides") + ending), RIDES)
    assert same(get_schema_from_dataset_url(f"file:///{rides}{ending}"), RIDES)


def test_what_stands_there_stays_but_sums_of_hadoop_and_old_indexes_do_not(rides: Path) -> None:
    write_metadata(rides.as_uri(), RIDES)
    store = open_store([rides.as_uri()])
    summary.write_summary(
        store.storage, store.arrow_schema, metadata(rides) | {b"mine": b"kept", ROWGROUPS_INDEX_KEY: b"}."}
    )
    (rides / "._common_metadata.crc").write_bytes(b"old")
    write_metadata(rides.as_uri(), RIDES)
    assert metadata(rides)[b"mine"] == b"kept"
    assert ROWGROUPS_INDEX_KEY in metadata(rides)
    assert not (rides / "._common_metadata.crc").exists()
    # Another file: the numbers in the index are those of other row groups now.
    pq.write_table(pq.read_table(rides / "day=monday/part-0.parquet"), rides / "day=monday/part-1.parquet")
    write_metadata(rides.as_uri(), RIDES)
    assert ROWGROUPS_INDEX_KEY not in metadata(rides)
    assert metadata(rides)[b"mine"] == b"kept"


def test_metadata_on_a_store_of_objects_replace_the_old() -> None:
    url = "memory://petastorm-metadata"
    folder = summary.open_folder(url)
    for name in ("a", "b"):
        schema = Unischema(name, [UnischemaField("id", np.int64, ())])
        summary.write_summary(folder, pa.schema([("id", pa.int64())]), schema_entries(schema))
        assert get_schema_from_dataset_url(url).__name__ == name


def test_without_files_the_metadata_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(PetastormMetadataGenerationError, match="does not exist"):
        write_metadata((tmp_path / "nothing").as_uri(), RIDES)
    assert not (tmp_path / "nothing").exists()


def test_what_is_missing_is_named(rides: Path, tmp_path: Path) -> None:
    store, dataset = open_store([rides.as_uri()]), pq.ParquetDataset(str(rides))
    for found in (store, dataset):
        with pytest.raises(PetastormMetadataError, match="Could not find _common_metadata file"):
            get_schema(found)
        with pytest.raises(ValueError, match="Row groups index is not available"):
            get_row_group_indexes(found)
        assert len(load_row_groups(found)) == 4
    with pytest.raises(PetastormMetadataError, match="Could not find _common_metadata file"):
        get_schema_from_dataset_url(rides.as_uri())
    with pytest.raises(FileNotFoundError, match="does not exist"):
        get_schema_from_dataset_url((tmp_path / "gone").as_uri())
    with pytest.raises(ValueError, match="scheme-less"):
        get_schema_from_dataset_url("/a/path")
    assert list(infer_or_load_unischema(store).fields) == ["day", "id", "city", "tags"]

    summary.write_summary(store.storage, store.arrow_schema, {b"of": b"another program"})
    for found in (open_store([rides.as_uri()]), dataset):
        with pytest.raises(PetastormMetadataError, match="Could not find the unischema"):
            get_schema(found)
        with pytest.raises(PetastormMetadataError, match="Could not find row group metadata"):
            load_row_groups(found)


def test_a_schema_that_cannot_be_understood_is_no_missing_one(rides: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store([rides.as_uri()])
    summary.write_summary(store.storage, store.arrow_schema, {UNISCHEMA_KEY: b"cos\nsystem\n."})
    with pytest.raises(PetastormMetadataError, match=r"'os\.system'"):
        infer_or_load_unischema(open_store([rides.as_uri()]))
    (rides / "_common_metadata").write_bytes(b"PAR1 is not enough PAR1")
    with pytest.raises(PetastormMetadataError, match="no Parquet footer"):
        get_schema_from_dataset_url(rides.as_uri())
    with pytest.raises(PetastormMetadataError, match="no Parquet footer"):
        get_schema(pq.ParquetDataset(str(rides)))
    write_metadata(rides.as_uri(), RIDES)
    assert "The metadata that cannot be read are replaced" in caplog.text
    assert same(get_schema_from_dataset_url(rides.as_uri()), RIDES)


def test_an_index_knows_the_row_groups_of_each_value(rides: Path) -> None:
    write_metadata(rides.as_uri(), RIDES)
    given = [
        SingleFieldIndexer("by id", "id"),
        SingleFieldIndexer("by city", "city"),
        SingleFieldIndexer("by tag", "tags"),
        SingleFieldIndexer("by day", "day"),
        FieldNotNullIndexer("tagged", "tags"),
    ]
    build_rowgroup_index(rides.as_uri(), None, given)
    assert given[0].indexed_values == [], "the caller's own indexer stays empty"
    for dataset in (open_store([rides.as_uri()]), pq.ParquetDataset(str(rides))):
        indexes = get_row_group_indexes(dataset)
        assert indexes["by id"].get_row_group_indexes(np.int64(17)) == {3}
        assert indexes["by id"].get_row_group_indexes(99) == set()
        assert indexes["by city"].get_row_group_indexes("c1") == {0, 1}
        assert indexes["by tag"].get_row_group_indexes("all") == {1, 3}
        assert indexes["by tag"].get_row_group_indexes("t16") == {3}
        assert indexes["by day"].get_row_group_indexes("tuesday") == {2, 3}
        assert indexes["tagged"].get_row_group_indexes(None) == {1, 3}
    assert same(get_schema_from_dataset_url(rides.as_uri()), RIDES)


def test_an_index_that_could_not_be_read_again_is_not_built(rides: Path) -> None:
    class Own(SingleFieldIndexer):
        pass

    with pytest.raises(PetastormMetadataError, match="no stored schema"):
        build_rowgroup_index(rides.as_uri(), None, [SingleFieldIndexer("a", "id")])
    write_metadata(rides.as_uri(), RIDES)
    with pytest.raises(TypeError, match="Own cannot be stored"):
        build_rowgroup_index(rides.as_uri(), None, [Own("a", "id")])
    with pytest.raises(ValueError, match="one name"):
        build_rowgroup_index(rides.as_uri(), None, [SingleFieldIndexer("a", "id"), SingleFieldIndexer("a", "city")])
    with pytest.raises(ValueError, match="no column nowhere"):
        build_rowgroup_index(rides.as_uri(), None, [SingleFieldIndexer("a", "nowhere")])
    assert ROWGROUPS_INDEX_KEY not in metadata(rides)


def test_indexers_can_be_filled_row_by_row_and_added() -> None:
    left, right = SingleFieldIndexer("n", "x"), SingleFieldIndexer("n", "x")
    left.build_index([{"x": "a"}, {"x": None}, {"x": np.array(["b", "a"])}], 0)
    right.build_index([{"x": np.str_("a")}, {"x": np.int32(7)}], 1)
    both = left + right
    assert {value: both.get_row_group_indexes(value) for value in both.indexed_values} == {
        "a": {0, 1},
        "b": {0},
        7: {1},
    }
    filled = FieldNotNullIndexer("f", "x")
    filled.build_index([{"x": None}], 0)
    filled.build_index([{"x": None}, {"x": 0}], 1)
    assert filled.get_row_group_indexes() == {1}
    assert (filled.index_name, filled.column_names, filled.indexed_values) == ("f", ["x"], ["Field is Not Null"])
    with pytest.raises(TypeError, match="same indexer type"):
        left + filled
    with pytest.raises(TypeError, match="same indexer type"):
        filled + left
    with pytest.raises(ValueError, match="same fields"):
        left + SingleFieldIndexer("n", "y")
    with pytest.raises(ValueError, match="empty rows"):
        left.build_index([], 0)
    with pytest.raises(TypeError, match="one axis"):
        left.build_index([{"x": np.zeros((2, 2))}], 0)


def test_the_command_shows_schema_and_indexes(rides: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metadata(rides.as_uri(), RIDES)
    build_rowgroup_index(rides.as_uri(), None, [SingleFieldIndexer("by day", "day"), SingleFieldIndexer("by id", "id")])
    metadata_util._main(["--dataset-url", rides.as_uri(), "--skip-index", "by id", "--print-values"])
    assert capsys.readouterr().out == (
        f"*** Schema from dataset metadata ***\n{RIDES}\n*** Row group indexes from dataset metadata ***\n"
        "Index: by day\n  -- monday(2)\n{0, 1}\n  -- tuesday(2)\n{2, 3}\nIndex: by id\n  (skipped)\n"
    )
    metadata_util._main(["--dataset-url", rides.as_uri(), "--schema"])
    assert capsys.readouterr().out == f"*** Schema from dataset metadata ***\n{RIDES}\n"


def test_the_keys_are_petastorms() -> None:
    assert [UNISCHEMA_KEY, ROW_GROUPS_PER_FILE_KEY, ROWGROUPS_INDEX_KEY] == [
        b"dataset-toolkit.unischema.v1",
        b"dataset-toolkit.num_row_groups_per_file.v1",
        b"dataset-toolkit.rowgroups_index.v1",
    ]
    assert stored_schema.JSON_SCHEMA_KEY == b"converter.petastorm.unischema.v1"


def test_an_index_of_numpys_texts_keeps_zeros_at_their_ends() -> None:
    indexer = SingleFieldIndexer("by_key", "key")
    indexer.add_row_groups(np.str_("a\0"), [0])
    indexer.add_row_groups(np.bytes_(b"a\0"), [1])
    read = stored_schema.read_indexes(stored_schema.index_entries([indexer]))["by_key"]
    assert read.indexed_values == ["a\0", b"a\0"]


def test_a_schema_without_a_pickle_replaces_one_with_a_pickle(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 3]}), tmp_path / "a.parquet")
    write_metadata(tmp_path.as_uri(), Unischema("Old", [UnischemaField("x", np.int64, ())]))
    new = Unischema("New", [UnischemaField("x", np.float64, (), RoundedCodec(3))])
    assert UNISCHEMA_KEY not in schema_entries(new)
    write_metadata(tmp_path.as_uri(), new)
    assert get_schema_from_dataset_url(tmp_path.as_uri()).x.numpy_dtype is np.float64


def test_a_codec_of_another_module_is_not_taken_for_the_stored_one() -> None:
    described = stored_schema.describe_schema(Unischema("S", [UnischemaField("x", np.float64, (), RoundedCodec(3))]))
    (field,) = described["fields"]
    field["codec"]["name"] = "team_a.codecs.RoundedCodec"
    with pytest.raises(PetastormMetadataError, match=r"codec 'team_a\.codecs\.RoundedCodec', which is no codec"):
        stored_schema.schema_of_description(described)
    # A program's own module has this name while it runs as one.
    field["codec"]["name"] = "__main__.RoundedCodec"
    assert type(stored_schema.schema_of_description(described).x.codec) is RoundedCodec


def test_a_codec_keeps_its_tuples() -> None:
    codec = RoundedCodec(3)
    codec.extra = ((2, 3), [4])  # type: ignore[attr-defined]
    described = json.loads(
        json.dumps(stored_schema.describe_schema(Unischema("S", [UnischemaField("x", np.float64, (), codec)])))
    )
    assert stored_schema.schema_of_description(described).x.codec.extra == ((2, 3), [4])


@pytest.mark.parametrize("dtype", [np.dtype("O"), np.dtype([("a", "i4")]), np.dtype("longdouble")], ids=str)
def test_a_type_that_cannot_be_read_again_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"Field 'x' has values of .*, which cannot be stored"):
        stored_schema.describe_schema(Unischema("S", [UnischemaField("x", dtype, ())]))


def test_an_index_of_other_files_of_the_same_names_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    schema = Unischema("S", [UnischemaField("id", np.int64, ())])

    def write(ids: list[int]) -> None:
        pq.write_table(pa.table({"id": ids}), tmp_path / "a.parquet", row_group_size=2)
        write_metadata(tmp_path.as_uri(), schema)

    write([1, 1, 2, 2])
    build_rowgroup_index(tmp_path.as_uri(), None, [SingleFieldIndexer("by_id", "id")])
    write_metadata(tmp_path.as_uri(), schema)
    assert list(get_row_group_indexes(open_store([tmp_path.as_uri()]))) == ["by_id"]
    write([2, 2, 1, 1])
    assert "The index of row groups of" in caplog.text
    with pytest.raises(ValueError, match="Row groups index is not available"):
        get_row_group_indexes(open_store([tmp_path.as_uri()]))
