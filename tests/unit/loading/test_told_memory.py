"""What a plan tells of memory counts what rows become, not how short a file may store them."""

from __future__ import annotations

import decimal
import io
import time
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import fsspec
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import Image, NumPy, SourceError, make_parquet_converter, mix
from converter.dataset import borrow_files
from converter.loading.options import LoaderOptions
from converter.parsed_footer import parse_end
from converter.plan import DEFAULT_WINDOW_BYTES
from converter.portable.footers import end_of
from converter.reading import decoding, mixing
from converter.sources.parquet import texts
from converter.storage.opening import open_storage

PHRASE = "a phrase that comes again and again, with a number: "
WORDS = [f"{PHRASE}{number % 7}" for number in range(10_000)]
TOKENS = [[f"token {number % 5}"] * (number % 4) for number in range(10_000)]


def decoded_bytes(path: Path, leaf: int = 0, value_bytes: int | None = None) -> int:
    with path.open("rb") as file:
        return sum(parse_end(end_of(file)).decoded_bytes(leaf, value_bytes)[0])


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("has_nulls", [False, True])
def test_texts_of_a_dictionary_count_as_often_as_they_come(tmp_path: Path, version: str, has_nulls: bool) -> None:
    words = [None if has_nulls and number % 3 == 0 else word for number, word in enumerate(WORDS)]
    pq.write_table(pa.table({"x": words}), tmp_path / "a.parquet", data_page_version=version, row_group_size=3000)
    letters = sum(len(word) for word in words if word is not None)
    assert decoded_bytes(tmp_path / "a.parquet") == letters + 4 * len(words)
    assert pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(0).total_uncompressed_size < letters / 50


def test_texts_in_lists_count_as_often_as_they_come(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": TOKENS}), tmp_path / "a.parquet")
    # A list without elements counts as a value.
    num_values = sum(max(1, len(row)) for row in TOKENS)
    assert decoded_bytes(tmp_path / "a.parquet") == sum(len(word) for row in TOKENS for word in row) + 4 * num_values


def test_texts_with_common_beginnings_count_as_they_are(tmp_path: Path) -> None:
    options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}}
    pq.write_table(pa.table({"x": WORDS}), tmp_path / "a.parquet", **options)
    assert decoded_bytes(tmp_path / "a.parquet") == sum(map(len, WORDS)) + 4 * len(WORDS)


def write_without_sizes(writer: str, table: pa.Table, path: Path) -> None:
    if writer == "polars":
        pl.from_arrow(table).write_parquet(path, row_group_size=2_000)  # type: ignore[union-attr]
    else:
        duckdb.from_arrow(table).write_parquet(str(path), row_group_size=2048)


def numbers_of_bytes(url: str) -> dict[str, int]:
    """Those of the columns, and `all` of all."""
    manifest = make_parquet_converter(url)._manifest
    found = {name: one.num_bytes or 0 for name, one in manifest.statistics.items()}
    return found | {"all": int(manifest.row_group_bytes.sum())}


@pytest.mark.parametrize("writer", ["polars", "duckdb"])
@pytest.mark.parametrize("num_letters", [20, 4000])
def test_of_a_writer_that_tells_no_sizes_the_first_rows_say_them(tmp_path: Path, writer: str, num_letters: int) -> None:
    """Bounds of long texts are cut, and most rows may have a short one."""
    words = [str(number % 5) * (num_letters + number % 3) for number in range(6_000)]
    seldom = ["x" * 5 * num_letters + str(number) if number % 50 == 0 else "y" for number in range(6_000)]
    table = pa.table({"x": words, "y": [None, *words[1:]], "z": seldom})
    table = table.append_column("s", pa.array([{"deep": [word, None]} for word in words]))
    for number in range(2):
        write_without_sizes(writer, table, tmp_path / f"{number}.parquet")
    for url in (tmp_path.as_uri(), copied_to_memory(tmp_path)):
        found = numbers_of_bytes(url)
        # A list with a null has two values.
        found["deep"] = found.pop("all") - sum(found[name] for name in "xyz")
        for name, rows in {"x": words, "y": words, "z": seldom, "deep": words}.items():
            letters = 2 * (sum(map(len, rows)) + (4 if name != "deep" else 12) * len(rows))
            assert 0.97 * letters < found[name] < 1.1 * letters + 60_000, name


@pytest.mark.parametrize("is_first", [True, False])
def test_files_of_one_schema_may_differ_in_their_dictionaries(tmp_path: Path, is_first: bool) -> None:
    known = pa.table({"x": WORDS, "y": [None] * len(WORDS), "z": WORDS}, pa.schema(dict.fromkeys("xyz", pa.string())))
    plain = pa.table({"x": [f"{number:050}" for number in range(len(WORDS))], "y": WORDS, "z": WORDS}, known.schema)
    for name, table in zip("ab" if is_first else "ba", (known, plain), strict=True):
        write_without_sizes("polars", table, tmp_path / f"{name}.parquet")
    found = numbers_of_bytes(tmp_path.as_uri())
    letters = sum(map(len, WORDS)) + 4 * len(WORDS)
    assert 1.9 * letters < found["z"] < 2.1 * letters
    assert len(make_parquet_converter(tmp_path)) == 2 * len(WORDS)


def test_what_cannot_be_read_of_a_store_is_an_error_and_no_other_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks would have two windows, and so two orders."""
    write_without_sizes("polars", pa.table({"x": WORDS * 10}), tmp_path / "a.parquet")
    url = copied_to_memory(tmp_path)
    monkeypatch.setattr(texts, "_mean_length", mock.Mock(side_effect=OSError("SlowDown: reduce your request rate")))
    with pytest.raises(SourceError, match=r"a\.parquet cannot be read: .*SlowDown"):
        make_parquet_converter(url)


def test_a_damaged_column_tells_nothing_and_others_are_read(tmp_path: Path) -> None:
    table = pl.DataFrame({"x": ["a" * 1000] * 1000, "id": range(1000)})
    table.write_parquet(tmp_path / "a.parquet", compression="uncompressed")
    data = bytearray((tmp_path / "a.parquet").read_bytes())
    chunk = parse_end(end_of(io.BytesIO(data))).chunk(0, 0)
    assert chunk.dictionary_page_offset is not None
    data[chunk.dictionary_page_offset : chunk.dictionary_page_offset + 8] = b"\xff" * 8
    (tmp_path / "a.parquet").write_bytes(data)
    assert numbers_of_bytes(tmp_path.as_uri())["x"] == chunk.raw_bytes
    assert make_parquet_converter(tmp_path).plan(columns=["id"]).num_rows == 1000
    with make_parquet_converter(tmp_path).make_batch_reader(columns=["id"], batch_size=1000) as reader:
        assert [batch["id"].tolist() for batch in reader] == [list(range(1000))]


def test_numbers_of_a_dictionary_count_as_they_are(tmp_path: Path) -> None:
    few = np.arange(10_000) % 3
    columns = {
        "lists": (pa.array([[1, 2, 3]] * 10_000), 24 + 4),
        "pixels": (pa.array([[1, 2, 3]] * 10_000, pa.list_(pa.uint8())), 3 + 4),
        "double": (pa.array(few, pa.float64()), 8),
        "tiny": (pa.array(few, pa.int8()), 1),
        "half": (pa.array(few, pa.float16()), 2),
        "truth": (pa.array([True] * 10_000), 1),
        "time": (pa.array(few, pa.timestamp("us")), 8),
        "small": (pa.array([decimal.Decimal(1)] * 10_000, pa.decimal128(9, 2)), 16),
        "code": (pa.DictionaryArray.from_arrays(pa.array(few, pa.int8()), pa.array([1, 2, 3], pa.int16())), 2),
    }
    table = pa.table({name: column for name, (column, _) in columns.items()})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5000)
    manifest = make_parquet_converter(tmp_path)._manifest
    assert {name: one.num_bytes for name, one in manifest.statistics.items()} == {
        name: 10_000 * row_bytes for name, (_, row_bytes) in columns.items()
    }
    assert manifest.row_group_bytes.tolist() == [5000 * sum(row_bytes for _, row_bytes in columns.values())] * 2


def test_nulls_and_lists_take_place_though_a_file_has_only_their_levels(tmp_path: Path) -> None:
    columns = {
        "texts": (pa.array(["a", *[None] * 9_999]), 40_000),
        "lists": (pa.array([[], *[None] * 9_999], pa.list_(pa.int8())), 40_000 + 10_000),
        "nested": (pa.array([[[1], [], [2]]] * 10_000, pa.list_(pa.list_(pa.int8()))), 40_000 + 120_000 + 30_000),
    }
    for name, (column, least) in columns.items():
        pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet", use_dictionary=False)
        found = numbers_of_bytes(tmp_path.as_uri())["all"]
        assert least <= found < 1.4 * least + 400, name
        assert found > 0.9 * column.nbytes, name


def test_texts_with_common_beginnings_count_as_they_are_whatever_arrow_tells(tmp_path: Path) -> None:
    options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}}
    pq.write_table(pa.table({"x": sorted(WORDS)}), tmp_path / "a.parquet", **options)
    letters = sum(map(len, WORDS)) + 4 * len(WORDS)
    for url in (tmp_path.as_uri(), copied_to_memory(tmp_path)):
        assert 0.95 * letters < numbers_of_bytes(url)["x"] < 1.1 * letters


def test_few_texts_with_a_long_common_beginning_are_read_at_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small file may stand for much more than memory holds."""
    words = ["x" * 40_000 + str(number) for number in range(1_000)]
    options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}}
    pq.write_table(pa.table({"x": words}), tmp_path / "a.parquet", **options)
    read = mock.Mock(wraps=texts._texts_in)
    monkeypatch.setattr(texts, "_texts_in", read)
    assert 0.95 * 40_000_000 < numbers_of_bytes(tmp_path.as_uri())["x"] < 1.05 * 40_000_000
    assert [len(call.args[0]) for call in read.call_args_list] == [16, pytest.approx(8 * 2**20 / 40_000, abs=2)]


@pytest.mark.parametrize("kind", ["VARCHAR", "JSON"])
@pytest.mark.parametrize("version", ["V1", "V2"])
def test_texts_of_duckdb_count_as_they_are(tmp_path: Path, version: str, kind: str) -> None:
    """V2 stores lengths apart from the texts, of which Arrow makes no dictionary; JSON is a type of its own."""
    with duckdb.connect() as connection:
        query = f"SELECT ('[\"' || repeat(x::VARCHAR, 30) || '\"]')::{kind} AS x FROM (SELECT unnest($words) AS x)"
        connection.execute(f"CREATE TABLE words AS {query}", {"words": WORDS})
        connection.execute(f"COPY words TO '{tmp_path}/a.parquet' (FORMAT parquet, PARQUET_VERSION {version})")
    letters = sum(len(word) * 30 + 4 for word in WORDS) + 4 * len(WORDS)
    for url in (tmp_path.as_uri(), copied_to_memory(tmp_path)):
        assert 0.95 * letters < numbers_of_bytes(url)["x"] < 1.1 * letters
        with make_parquet_converter(url).make_batch_reader(batch_size=5) as reader:
            assert next(iter(reader))["x"].tolist() == [f'["{word * 30}"]' for word in WORDS[:5]]


def test_of_a_large_part_of_a_column_the_first_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary may have made it so small: what is stored does not tell."""
    monkeypatch.setattr(texts, "_BUFFER_BYTES", 1 << 10)
    monkeypatch.setattr(texts, "_MOST_BYTES", 1 << 14)
    words = [f"{number % 900:04}" * 25 for number in range(40_000)]
    write_without_sizes("polars", pa.table({"x": words}), tmp_path / "a.parquet")
    assert pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(0).total_compressed_size < 1 << 20
    assert 0.95 * 104 * len(words) < numbers_of_bytes(tmp_path.as_uri())["x"] < 1.1 * 104 * len(words)


@pytest.mark.parametrize("kind", ["texts", "lists"])
def test_a_default_window_is_as_large_as_it_says(tmp_path: Path, kind: str) -> None:
    rows = pa.array([word * 40 for word in WORDS] * 6) if kind == "texts" else pa.array([[1] * 1000] * 16_000)
    pq.write_table(pa.table({"x": rows}), tmp_path / "a.parquet", row_group_size=500)
    converter = make_parquet_converter(tmp_path)
    plan = converter.plan(shuffle=True, ragged="nested")
    window_bytes = plan.window_rows * rows.nbytes / len(rows)
    assert 0.8 * DEFAULT_WINDOW_BYTES < window_bytes < 1.2 * DEFAULT_WINDOW_BYTES
    whole = converter.plan(shuffle=True, ragged="nested", shuffle_window_rows="all")
    assert whole.peak_memory_bytes > 2 * rows.nbytes


def test_a_stack_counts_in_its_own_dtype_beside_texts_too(tmp_path: Path) -> None:
    columns: dict[str, Any] = {f"x{number}": np.zeros(20_000, np.int8) for number in range(50)}
    pq.write_table(
        pa.table({**columns, "y": np.zeros(20_000, np.float32), "text": ["a"] * 20_000}), tmp_path / "a.parquet"
    )
    options: dict[str, Any] = {"stack": {"z": [*columns, "y"]}, "shuffle": True, "shuffle_window_rows": 20_000}
    converter = make_parquet_converter(tmp_path)
    alone = converter.plan(columns=[*columns, "y"], **options).peak_memory_bytes
    assert converter.plan(**options).peak_memory_bytes > alone


def test_what_is_wider_while_it_is_decoded_counts(tmp_path: Path) -> None:
    """Pixels are 32 bits, and texts of categories are texts where Arrow makes no dictionary of them."""
    rows = 5_000
    pixels = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows * 784, np.uint8)), 784)
    pq.write_table(pa.table({"x": pixels}), tmp_path / "pixels.parquet")
    plan = make_parquet_converter(tmp_path / "pixels.parquet").plan(batch_size=10, workers_count=2)
    assert plan.peak_memory_bytes > 2 * rows * 784 * 8
    told = []
    for encoding in ("PLAIN", "DELTA_LENGTH_BYTE_ARRAY"):
        options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {"x": encoding}}
        pq.write_table(pa.table({"x": WORDS}), tmp_path / "texts.parquet", **options)
        plan = make_parquet_converter(tmp_path / "texts.parquet", categories=["x"]).plan(batch_size=10, workers_count=2)
        told.append(plan.peak_memory_bytes)
    assert told[1] - told[0] > 2 * sum(map(len, WORDS))


def copied_to_memory(folder: Path) -> str:
    url = f"memory://{uuid.uuid4().hex}"
    for path in folder.iterdir():
        with fsspec.open(f"{url}/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    return url


def pictures(sides: list[int]) -> list[bytes]:
    from PIL import Image as Pillow

    encoded = []
    for side in sides:
        file = io.BytesIO()
        Pillow.new("RGB", (side, side)).save(file, "JPEG")
        encoded.append(file.getvalue())
    return encoded


def test_rows_whose_decoder_has_no_shape_count_as_some_of_them(tmp_path: Path) -> None:
    sides = [8] * 20 + [600, 800, 1000, 1200] * 5
    pq.write_table(pa.table({"x": pictures(sides), "id": range(40)}), tmp_path / "a.parquet", row_group_size=20)
    converter = make_parquet_converter(tmp_path, decode={"x": Image()})
    sizes = [3 * side**2 for side in sides]
    found = converter._manifest.decoded_bytes["x"]
    assert np.mean(sizes) < found < max(sizes)
    with_pictures, without = (
        converter.plan(batch_size=8, columns=names, ragged="nested") for names in (["id", "x"], ["id"])
    )
    assert with_pictures.peak_memory_bytes - without.peak_memory_bytes > 4 * 8 * np.mean(sizes)
    # A view has the sizes, too.
    assert converter.where([("id", ">", 3)])._manifest.decoded_bytes == {"x": found}


def test_in_a_store_they_count_by_their_bytes(tmp_path: Path) -> None:
    encoded = pictures([600] * 10)
    pq.write_table(pa.table({"x": encoded}), tmp_path / "a.parquet", use_dictionary=False)
    url = copied_to_memory(tmp_path)
    row_bytes = len(encoded[0]) + 4
    for decoder, factor in ((Image(), 12), (NumPy("uint8", None), 1)):
        found = make_parquet_converter(url, decode={"x": decoder})._manifest.decoded_bytes["x"]
        assert factor * row_bytes <= found < factor * (row_bytes + 20)


def test_of_large_rows_none_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"x": [bytes(200_000)] * 4}), tmp_path / "a.parquet", use_dictionary=False)
    monkeypatch.setattr("converter.scans.undecodable.read_columns", None)
    found = make_parquet_converter(tmp_path, decode={"x": Image()})._manifest.decoded_bytes["x"]
    assert 12 * 200_000 < found < 12 * 201_000


def test_rows_that_cannot_be_decoded_tell_no_size(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [b"no picture", None, *pictures([64])]}), tmp_path / "a.parquet")
    assert make_parquet_converter(tmp_path, decode={"x": Image()})._manifest.decoded_bytes == {"x": 3 * 64**2}
    pq.write_table(pa.table({"x": pa.array([b"no array", None])}), tmp_path / "a.parquet")
    decoder = NumPy("float32", None)
    assert make_parquet_converter(tmp_path, decode={"x": decoder})._manifest.decoded_bytes["x"] < 100


def test_a_slow_decoder_is_not_waited_for_when_a_converter_is_made(tmp_path: Path) -> None:
    decoded = []

    class Slow:
        dtype, shape = "uint8", None

        def decode(self, values: pa.LargeBinaryArray) -> list[np.ndarray[Any, Any]]:
            decoded.append(len(values))
            time.sleep(0.25)
            return [np.zeros(1000, np.uint8) for _ in values]

    pq.write_table(pa.table({"x": [b"row"] * 100}), tmp_path / "a.parquet", row_group_size=10)
    assert make_parquet_converter(tmp_path, decode={"x": Slow()})._manifest.decoded_bytes == {"x": 1000}
    assert decoded == [1, 1]


def test_small_rows_at_the_beginning_make_no_large_pieces(tmp_path: Path) -> None:
    """Later ones may be large."""
    pq.write_table(pa.table({"x": pictures([2] * 100)}), tmp_path / "a.parquet")
    converter = make_parquet_converter(tmp_path, decode={"x": Image()})
    asked = LoaderOptions(batch_size=32, ragged="nested", cur_shard=0, shard_count=1)
    source = asked.make_source(converter._storage, converter._manifest)
    assert source.manifest.decoded_bytes == {"x": 12}
    assert decoding._piece_rows(source) == 128
    assert decoding._chunk_rows(source) == 64


def test_a_mask_is_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([1.0, None] * 50_000)}), tmp_path / "a.parquet")
    converter = make_parquet_converter(tmp_path)
    masked, filled = (converter.plan(nulls=policy).bytes_per_epoch for policy in ("mask", {"x": 0.0}))
    assert masked is not None
    assert filled is not None
    assert masked - filled == 100_000


def test_what_lies_between_columns_is_counted_where_it_is_fetched(tmp_path: Path) -> None:
    columns = {f"x{number}": np.random.default_rng(number).random(20_000) for number in range(40)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=1000, use_dictionary=False)
    here = make_parquet_converter(tmp_path, float_dtype="float64")
    there = borrow_files(open_storage("memory://place"), here._manifest)
    few = {"columns": ["x0", "x20"]}
    # Parts of 8 kB, some 150 kB apart: a gap of 64 kB beside each may be fetched with them.
    gaps = 2 * (there.plan(**few).peak_memory_bytes - here.plan(**few).peak_memory_bytes)
    assert gaps > 20 * 2 * (64 << 10)


@pytest.mark.parametrize("more", [{"transform": dict, "prefetch_batches": 50}, {}], ids=["transform", "texts"])
def test_a_mixture_counts_what_it_interleaves(tmp_path: Path, more: Any) -> None:
    words = pa.array([word * 100 for word in WORDS])
    pq.write_table(pa.table({"x": words}), tmp_path / "a.parquet", use_dictionary=False)
    converter = make_parquet_converter(tmp_path)
    both = mix({"one": converter, "other": converter})
    asked: dict[str, Any] = {"batch_size": 4096, "workers_count": 1}
    own = 2 * converter.plan(batch_size=1, workers_count=1).peak_memory_bytes
    batch_bytes = 4096 * words.nbytes / len(words)
    told = both.plan(**asked).peak_memory_bytes
    # Batches that are interleaved, wait, or are in use: two at a time.
    assert told > own + 5 * 2 * batch_bytes
    if more:
        assert both.plan(**asked, **more).peak_memory_bytes - told > 50 * batch_bytes


def test_a_mixture_interleaves_few_wide_texts_together(tmp_path: Path) -> None:
    """An element's own bytes are few, its text is not."""
    words = pa.array(["x" * 10_000] * 20_000)
    pq.write_table(pa.table({"x": words}), tmp_path / "a.parquet", use_dictionary=False, row_group_size=1000)
    converter = make_parquet_converter(tmp_path)
    both = mix({"one": converter, "other": converter})
    source = both._source(LoaderOptions(batch_size=10, cur_shard=0, shard_count=1))
    assert max(map(len, mixing._cut(range(40_000), source))) <= (16 << 20) / 10_000
