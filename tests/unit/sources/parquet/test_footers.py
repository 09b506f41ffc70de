"""Footers: read at once, with the types that only they tell, and refused if they cannot be read."""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from converter import (
    DatasetConverter,
    NullValueError,
    ReadError,
    SourceChangedError,
    SourceError,
    make_parquet_converter,
)
from tests.encrypted import write_encrypted
from tests.faults.bad_parquet import take_apart
from tests.unit.sources.parquet.known_files import (
    put,
    read,
    write,
)


def annotate_as_enum(path: Path, name: str) -> None:
    """Let the footer say ENUM of a column of text: none of the writers here does."""
    raw = path.read_bytes()
    start = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
    at = raw.index(bytes([len(name)]) + name.encode(), start)
    # `ConvertedType` 0 becomes 4, and of the union `LogicalType` the first member the fourth.
    for said, wanted in ((b"\x25\x00", b"\x25\x08"), (b"\x4c\x1c\x00\x00", b"\x4c\x4c\x00\x00")):
        at = raw.index(said, at)
        raw = raw[:at] + wanted + raw[at + len(wanted) :]
    path.write_bytes(raw)


def test_the_annotation_tells_text_from_bytes(tmp_path: Path) -> None:
    inner = pa.array([{"key": "k", "dishes": [{"tags": ["x"], "size": {"value": b"v"}}]}])
    links = pa.array([{"url": "x", "label": "y"}])
    columns = {"menu": inner, "links": links, "currency": ["PLN"], "raw": [b"\xff"], "text": ["t"]}
    json_text = pa.array(['{"a": 1}'], pa.json_())
    for name, store_schema in (("a", False), ("b", True)):
        path = write(tmp_path, f"{name}.parquet", columns | {"json": json_text}, store_schema=store_schema)
        annotate_as_enum(path, "currency")
        annotate_as_enum(path, "label")
        assert pq.read_schema(path).field("currency").type in (pa.binary(), pa.string())
    chosen = ["currency", "links.label", "raw", "text", "json", "menu.key"]
    converter = make_parquet_converter(tmp_path, columns=chosen)
    assert [one.dtype for one in converter.schema] == ["str", "str", "bytes", "str", "str", "str"]
    found = read(converter)
    assert [found[name].tolist() for name in chosen] == [
        ["PLN"] * 2, ["y"] * 2, [b"\xff"] * 2, ["t"] * 2, ['{"a": 1}'] * 2, ["k"] * 2
    ]  # fmt: skip
    assert len(converter.where([("json", "=", '{"a": 1}'), ("currency", "=", "PLN")])) == 2


def test_columns_without_nulls_in_files_that_do_not_count_them_are_read(tmp_path: Path) -> None:
    write(tmp_path, "x.parquet", {"id": [1, 2, 3]}, write_statistics=False)
    assert read(make_parquet_converter(tmp_path))["id"].tolist() == [1, 2, 3]
    write(tmp_path, "y.parquet", {"id": pa.array([None, 2])}, write_statistics=False)
    with pytest.raises(NullValueError, match="Column 'id' holds 1 null"):
        read(make_parquet_converter(tmp_path))


def test_files_that_change_are_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, "x.parquet", {"id": np.arange(100)})
    converter = make_parquet_converter(tmp_path)
    write(tmp_path, "x.parquet", {"id": np.arange(101)})
    with pytest.raises(SourceChangedError, match=r"x\.parquet has .* bytes, expected"):
        read(converter)
    path.unlink()
    with pytest.raises(SourceChangedError, match=r"x\.parquet is not there"):
        read(converter)


def test_a_flipped_bit_is_found_where_checksums_were_written(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2**60, 5000)
    path = write(tmp_path, "x.parquet", {"id": values}, write_page_checksum=True, compression="none",
                 use_dictionary=False)  # fmt: skip
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(bytes(damaged))
    converter = make_parquet_converter(tmp_path)
    assert (read(converter)["id"] != values).sum() == 1
    with pytest.raises(ReadError, match=r"Row group 0 of .*x\.parquet cannot be decoded"):
        read(converter, verify_checksums=True)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_columns_are_refused_by_name(tmp_path: Path, plaintext_footer: bool) -> None:
    write_encrypted(tmp_path / "x.parquet", {"a": [1, 2], "b": [3, 4]}, plaintext_footer=plaintext_footer)
    for columns in (None, ["b"]):
        with pytest.raises(SourceError, match=rf"{tmp_path}/x\.parquet .*encrypted"):
            make_parquet_converter(tmp_path, columns=columns)


@pytest.mark.parametrize("is_away", [False, True])
def test_a_damaged_footer_is_called_so_with_what_to_do(is_away: bool, tmp_path: Path) -> None:
    """Arrow raises the same error for some of them as a store that fails: `--case 1:70` of `damaged_bytes`."""
    content = io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2, 3], "text": ["a", "b", "c"]}), content)
    whole = content.getvalue()
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    damaged, others = [], []
    for place in range(start, start + 300, 2):
        harmed = whole[:place] + bytes([whole[place] ^ 8]) + whole[place + 1 :]
        url = f"memory://{uuid.uuid4().hex}" if is_away else str(tmp_path)
        if is_away:
            MemoryFileSystem().pipe_file(f"{url.removeprefix('memory:/')}/x.parquet", harmed)
        else:
            (tmp_path / "x.parquet").write_bytes(harmed)
        try:
            make_parquet_converter(url)
        except SourceError as error:
            (damaged if "is no Parquet file that can be read: " in str(error) else others).append(str(error))
    assert [text for text in others if "x.parquet cannot be read" in text] == []
    assert [text for text in damaged if "thrift" in text] != []
    remedy = ". Restore the file from a copy, or name the other files instead."
    assert [text for text in damaged if not text.endswith(remedy)] == []


def test_a_store_that_is_away_is_not_the_files_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    put("memory://away/f0.parquet", [1])

    def hang(*_: Any, **__: Any) -> Any:
        raise TimeoutError("no answer")

    monkeypatch.setattr(MemoryFileSystem, "cat_file", hang)
    with pytest.raises(
        SourceError, match=r"f0\.parquet cannot be read: .*could not be reached for 0\.3 seconds"
    ) as caught:
        make_parquet_converter("memory://away", timeout_seconds=0.3)
    assert "no Parquet file" not in str(caught.value)


def test_names_in_a_footer_that_are_no_utf8_are_named_with_their_file(tmp_path: Path) -> None:
    """First seen in `python -m tests.faults.campaign damaged_bytes --case 42:32837 --steps 1,2`."""
    times = pa.array([0], pa.timestamp("us", "Europe/Paris"))
    path = write(tmp_path, "a.parquet", {"time": times})
    schema = pq.read_metadata(path).metadata[b"ARROW:schema"]
    damaged = base64.b64encode(base64.b64decode(schema).replace(b"Europe/Paris", b"\xbdurope/Paris"))
    path.write_bytes(path.read_bytes().replace(schema, damaged))
    with pytest.raises(SourceError, match=r"a\.parquet is no Parquet file that can be read: .*Restore the file"):
        make_parquet_converter(tmp_path)


def test_types_of_spark_that_are_none_are_no_types(tmp_path: Path) -> None:
    """First seen in `python -m tests.faults.campaign damaged_bytes --case 42:6143 --steps 2,5`."""
    metadata = {"org.apache.spark.sql.parquet.row.metadata": '{"fields": [{"name": "a", "type": 7}]}'}
    pq.write_table(pa.table({"a": [1, 2]}).replace_schema_metadata(metadata), tmp_path / "a.parquet")
    with make_parquet_converter(tmp_path) as converter:
        assert converter.head(2)["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    "use",
    [lambda rows: rows.where([("a", ">", 5)]), lambda rows: rows.statistics, lambda rows: rows.head()],
    ids=["where", "statistics", "head"],
)
def test_a_page_that_holds_fewer_values_than_the_footer_says_is_damaged(
    tmp_path: Path, use: Callable[[DatasetConverter], Any]
) -> None:
    """First seen in `python -m tests.faults.campaign damaged_bytes --case 42:27672 --steps 2,5`."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [5, 6]}), path, use_dictionary=False, compression="none", write_statistics=False)
    raw = path.read_bytes()
    assert raw.index(b"\x2c\x15\x04") < 30
    path.write_bytes(raw.replace(b"\x2c\x15\x04", b"\x2c\x15\x00", 1))
    with (
        make_parquet_converter(tmp_path) as converter,
        pytest.raises(ReadError, match=r"Row group 0 of .*a\.parquet cannot be decoded: .*The file is damaged"),
    ):
        use(converter)


@pytest.mark.parametrize("num_rows", [0, 1, 49, 51])
def test_a_row_group_of_other_rows_than_the_file_has_is_refused(tmp_path: Path, num_rows: int) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": [[row] for row in range(50)]}), path)
    whole = take_apart(path.read_bytes())
    whole.row_group[3][1] = num_rows
    path.write_bytes(whole.join({}))
    text = (
        rf"x\.parquet is no Parquet file that can be read: .* describes 50 rows, and its row groups have {num_rows}\."
    )
    with pytest.raises(SourceError, match=text):
        make_parquet_converter(path)
