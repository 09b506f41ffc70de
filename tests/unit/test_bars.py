"""Who sees a bar: nobody, where there is nothing to print to."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import make_parquet_converter
from converter.bars import is_in_terminal, is_seen


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_service_without_stderr_reads_without_a_bar(
    is_closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"x": np.arange(10)}), tmp_path / "a.parquet")
    stream = None
    if is_closed:
        stream = io.StringIO()
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert not is_in_terminal()
    assert not is_seen(None)
    assert not is_seen(True)
    with make_parquet_converter(tmp_path) as converter, converter.make_batch_reader() as reader:
        assert sum(len(batch["x"]) for batch in reader.progress()) == 10
