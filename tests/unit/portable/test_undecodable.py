"""Rows that a decoder skips are not written; whatever else is wrong is still a finding."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from converter import NumPy
from converter.sources.spark.schema import decoded_columns
from tests.entries import write
from tests.unit.portable.one_column import finding_of, plan, read_all

SKIPS = NumPy("float32", (2,), on_error="skip")


def npy(number: float) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.full(2, number, np.float32))
    return stream.getvalue()


def write_decoded(folder: Path, *batches: dict[str, list[bytes | None]], **decoders: Any) -> list[dict[str, Any]]:
    columns = decoded_columns([plan("scalar", "bytes", 0, name=name) for name in decoders], decoders)
    arrays = [[pa.array(batch[name], pa.binary()) for name in decoders] for batch in batches]
    return write([pa.RecordBatch.from_arrays(one, names=list(decoders)) for one in arrays], folder, columns)


def values(folder: Path, reports: list[dict[str, Any]], name: str) -> list[Any]:
    rows = read_all(folder, reports, plan("tensor", name=name))
    return [None if row is None else row[0] for row in rows]


def test_such_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    good = {"x": [npy(1), None, npy(2)]}
    *files, last = write_decoded(tmp_path, good, {"x": [npy(3), b"a", None, b"b"]}, {"x": [b"c"]}, x=SKIPS)
    assert values(tmp_path, files, "x") == [1, None, 2, 3, None]
    found = last["skipped"]["x"]
    assert (found["count"], found["row"]) == (3, 4)
    assert found["found"].startswith("ValueError: ")


def test_a_row_is_left_out_of_all_columns(tmp_path: Path) -> None:
    batch = {"x": [npy(1), b"no", npy(3), npy(4)], "y": [npy(5), npy(6), b"no", npy(8)]}
    *files, last = write_decoded(tmp_path, batch, x=SKIPS, y=SKIPS)
    assert values(tmp_path, files, "x") == [1, 4]
    assert values(tmp_path, files, "y") == [5, 8]
    assert {name: (rows["count"], rows["row"]) for name, rows in last["skipped"].items()} == {"x": (1, 1), "y": (1, 2)}


def test_a_partition_of_nothing_else_writes_no_file(tmp_path: Path) -> None:
    (report,) = write_decoded(tmp_path, {"x": [b"no", b"neither"]}, x=SKIPS)
    assert report["skipped"]["x"]["count"] == 2
    assert list(tmp_path.iterdir()) == []


def test_a_column_that_does_not_skip_still_fails(tmp_path: Path) -> None:
    batch = {"x": [b"no", npy(1), npy(2)], "y": [npy(1), b"no", npy(2)]}
    finding = finding_of(write_decoded(tmp_path, batch, x=SKIPS, y=NumPy("float32", (2,))))
    assert (finding["kind"], finding["column"]) == ("undecodable", "y")


def test_a_wrong_decoder_is_no_reason_to_leave_rows_out(tmp_path: Path) -> None:
    class Wrong:
        dtype, shape, on_error = "float32", (2,), "skip"

        def decode(self, values: pa.LargeBinaryArray) -> Any:
            return np.zeros((len(values), 3), np.float32)

    finding = finding_of(write_decoded(tmp_path, {"x": [npy(1), None]}, x=Wrong()))
    assert finding["kind"] == "decoder"
    assert "expected float32 of shape" in finding["found"]


def test_rows_that_fail_only_together_are_not_left_out(tmp_path: Path) -> None:
    class OneByOne:
        dtype, shape, on_error = "float32", (2,), "skip"

        def decode(self, values: pa.LargeBinaryArray) -> Any:
            if len(values) > 1:
                raise ValueError("too many")
            return np.zeros((len(values), 2), np.float32)

    finding = finding_of(write_decoded(tmp_path, {"x": [npy(1), None, npy(2)]}, x=OneByOne()))
    assert (finding["kind"], finding["row"]) == ("undecodable", 0)
    assert "too many" in finding["found"]
