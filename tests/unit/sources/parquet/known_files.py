"""Parquet files for tests, on disk and in memory, and a store whose requests hang."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import (
    DatasetConverter,
)
from converter.storage.store import Store
from tests.rows import concatenate


def write(folder: Path, name: str, columns: dict[str, Any], **options: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / name, **options)
    return folder / name


def read(converter: DatasetConverter, **options: Any) -> dict[str, Any]:
    with converter.make_batch_reader(**{"batch_size": 7} | options) as reader:
        return concatenate(list(reader))


def put(url: str, ids: list[int]) -> None:
    """A file of plain pages: others of as many numbers have the same size and the same footer."""
    content = io.BytesIO()
    pq.write_table(pa.table({"id": ids}), content, compression="none", use_dictionary=False, write_statistics=False)
    fsspec.filesystem("memory").pipe_file(url.removeprefix("memory:/"), content.getvalue())


class Hanging:
    """Requests of Parquet's data that hang from some moment on, and whose they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.is_over = threading.Event(), threading.Event()
        self.asked: list[tuple[str, int]] = []
        read_range = Store.read_range

        def read(store: Store, path: str, start: int, end: int, given_up: threading.Event | None = None) -> Any:
            self.asked.append((path, start))
            if self.has_begun.is_set():
                store.ask(lambda _: self.is_over.wait(60), path=path, given_up=given_up)
            return read_range(store, path, start, end, given_up)

        monkeypatch.setattr(Store, "read_range", read)
