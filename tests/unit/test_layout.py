"""What a converter tells of the layout of its files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from converter import make_parquet_converter, mix
from converter.layout import layout_of
from converter.manifest import MAX_END_BYTES
from tests.columns import ID, TENSORS
from tests.entries import write_converter


def test_files_and_row_groups_are_counted_with_the_rows_that_views_leave_out(tmp_path: Path) -> None:
    for number, (rows, codec) in enumerate(((10, "snappy"), (30, "zstd"), (60, "none"))):
        table = pa.table({"x": range(rows)})
        pq.write_table(
            table, tmp_path / f"{number}.parquet", row_group_size=20, compression=codec, use_dictionary=False
        )
    converter = make_parquet_converter(tmp_path)
    layout = converter.describe()["layout"]
    assert layout["file_rows"] == {"least": 10, "median": 30, "most": 60}
    assert layout["row_group_rows"] == {"least": 10, "median": 20, "most": 20}
    # 8 bytes for each row, and the headers of pages.
    assert 8 * 10 < layout["row_group_bytes"]["least"] < layout["row_group_bytes"]["most"] < 16 * 20
    assert layout["codecs"] == ["SNAPPY", "UNCOMPRESSED", "ZSTD"]
    assert layout["encodings"] == ["PLAIN", "RLE"]
    assert converter.where([("x", "<", 3)]).describe()["layout"] == layout
    # The rows of a mixture are those of several datasets.
    assert mix({"a": converter, "b": converter}).describe()["layout"] is None


def test_the_footers_that_a_remote_entry_keeps_tell_how_it_is_stored(tmp_path: Path) -> None:
    options = {"compression": "zstd", "end_bytes": MAX_END_BYTES}
    with write_converter(tmp_path, (ID, TENSORS[0]), [[range(10)], [range(10, 20)]], **options) as converter:
        layout = converter.describe()["layout"]
    assert (layout["codecs"], layout["encodings"]) == (["ZSTD"], ["PLAIN", "RLE"])


def test_a_file_whose_footer_was_not_read_may_have_any_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": range(10)}), tmp_path / "0.parquet")
    manifest = make_parquet_converter(tmp_path)._manifest
    layout = layout_of(dataclasses.replace(manifest, row_group_index=np.array([-1]), formats=None))
    assert layout == {"file_rows": layout_of(manifest)["file_rows"]} | dict.fromkeys(
        ("row_group_rows", "row_group_bytes", "codecs", "encodings")
    )
