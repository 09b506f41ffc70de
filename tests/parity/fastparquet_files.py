#!/usr/bin/env python3
"""Files that a real fastparquet wrote, and the cells that it reads in them, kept in an archive beside this file.

It is in no environment of the tests. The files were written by

    python tests/parity/fastparquet_files.py        # by the Python of an environment with fastparquet alone

`cells.json` in it holds for each file its columns: a float is its bits, a time a count of microseconds since 1970,
bytes are hexadecimal, and null is null.
"""

from __future__ import annotations

import json
import struct
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VERSION = "2026.9.0"
KEPT = Path(__file__).with_name(f"fastparquet-{VERSION}.tar.xz")
CELLS = "cells.json"

WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "snappy": {"compression": "SNAPPY"},
    "gzip": {"compression": "GZIP"},
    "zstd": {"compression": "ZSTD"},
    "brotli": {"compression": "BROTLI"},
    "lz4": {"compression": "LZ4"},
    "lz4 raw": {"compression": "LZ4_RAW"},
    "INT96": {"times": "int96"},
    "row groups": {"row_group_offsets": 7},
    "no statistics": {"stats": False},
    "all statistics": {"stats": True},
}
"""For each file the options of `fastparquet.write`."""

SECOND_PAGES = ("as it is", "snappy", "row groups", "no statistics")
"""Files that are kept with data pages of the second version too."""


def frame() -> Any:
    """What fastparquet has a type for."""
    import numpy as np
    import pandas as pd

    rows = np.arange(30)
    floats = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.5, 5e-324, 1.7e308])
    times = np.array([0, -1, 1, 1_700_000_000_123_456, -2_208_988_800_000_000])
    texts = ["", "a", "žluťoučký 🐟", "x" * 40, "a\x00b"]
    columns: dict[str, Any] = {"id": rows}
    for bits in (8, 16, 32, 64):
        least, most = np.iinfo(f"i{bits // 8}").min, np.iinfo(f"i{bits // 8}").max
        columns[f"int{bits}"] = np.array([least, most, 0, -1, 7], f"i{bits // 8}")[rows % 5]
    for bits in (8, 16, 32):
        columns[f"uint{bits}"] = np.array([0, np.iinfo(f"u{bits // 8}").max, 7], f"u{bits // 8}")[rows % 3]
    columns["bool"] = rows % 3 == 0
    columns["float32"] = np.array([0.0, -0.0, np.nan, np.inf, 3.4e38, 1e-45], "f4")[rows % 6]
    columns["float64"] = floats[rows % 8]
    columns["time us"] = times[rows % 5].astype("M8[us]")
    columns["time ns"] = (times[rows % 5] * 1000).astype("M8[ns]")
    columns["some time"] = pd.Series(times[rows % 5].astype("M8[us]")).where(rows % 4 > 0)
    columns["zone"] = pd.Series(times[rows % 5].astype("M8[us]")).dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")
    columns["text"] = pd.Series([texts[row % 5] for row in rows], dtype=object)
    columns["some text"] = pd.Series([texts[row % 5] if row % 3 else None for row in rows], dtype=object)
    columns["bytes"] = pd.Series([bytes([row]) * (row % 4) if row % 7 else None for row in rows], dtype=object)
    columns["category"] = pd.Categorical([texts[row % 4] if row % 6 else None for row in rows])
    columns["some int"] = pd.array([int(row) if row % 5 else None for row in rows], "Int64")
    columns["some bool"] = pd.array([bool(row % 2) if row % 5 else None for row in rows], "boolean")
    return pd.DataFrame(columns)


def cells_of(column: Any) -> list[Any]:
    """The cells of a column of pandas, as JSON holds them."""
    import numpy as np
    import pandas as pd

    if isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype(object)
    kind = column.dtype
    if kind.kind == "M":
        whole = column.dt.tz_convert("UTC").dt.tz_localize(None) if getattr(kind, "tz", None) else column
        counts = whole.to_numpy().astype("M8[us]").astype("i8").tolist()
        return [None if is_null else count for count, is_null in zip(counts, column.isna(), strict=True)]
    if isinstance(kind, np.dtype) and kind.kind == "f":
        form = ("<f", "<I") if kind.itemsize == 4 else ("<d", "<Q")
        return [struct.unpack(form[1], struct.pack(form[0], value))[0] for value in column]
    found = []
    for value in column:
        if value is None or value is pd.NA or (isinstance(value, float) and value != value):
            found.append(None)
        elif isinstance(value, bytes):
            found.append(value.hex())
        else:
            found.append(value.item() if hasattr(value, "item") else value)
    return found


def main() -> None:
    """Write the files, and what fastparquet reads of each."""
    import fastparquet
    from fastparquet import ParquetFile, write, writer

    if fastparquet.__version__ != VERSION:
        raise SystemExit(f"This is fastparquet {fastparquet.__version__}; the files are of {VERSION}.")
    known: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:

        def keep(name: str, options: dict[str, Any]) -> None:
            path = f"{folder}/{name}.parquet"
            encodings = {"text": "utf8", "some text": "utf8", "bytes": "bytes"}
            write(path, frame(), object_encoding=encodings, **options)
            read = ParquetFile(path).to_pandas()
            known[name] = {column: cells_of(read[column]) for column in read.columns}

        for name, options in WAYS.items():
            keep(name, options)
        writer.DATAPAGE_VERSION = 2
        for name in SECOND_PAGES:
            keep(f"{name}, second pages", WAYS[name])
        Path(folder, CELLS).write_text(json.dumps(known, separators=(",", ":")))
        with tarfile.open(KEPT, "w:xz") as archive:
            for path in sorted(Path(folder).iterdir()):
                archive.add(path, path.name)


if __name__ == "__main__":
    main()
