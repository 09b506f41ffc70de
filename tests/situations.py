"""Slow loops whose reason is known: what `loader.stats()` says of them is compared with it."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from converter import make_parquet_converter
from converter.decoders import Image
from converter.loading.stats import LoaderStats
from converter.storage.opening import open_storage
from tests.servers.azurite import SlowAzurite

Situation = Callable[[Path], LoaderStats]
"""Makes its data in a folder, reads them in a slow loop, and returns the loader's record."""

_rng = np.random.default_rng(0)


def _numbers(path: Path, *, rows: int, columns: int, row_group_rows: int, files: int = 1) -> str:
    path.mkdir(parents=True)
    per_file = rows // files
    table = pa.table({f"c{number}": _rng.random(per_file, np.float32) for number in range(columns)})
    for number in range(files):
        pq.write_table(table, path / f"{number:05}.parquet", row_group_size=row_group_rows, use_dictionary=False)
    return path.as_uri()


def _read(
    url: str, step: Callable[[Any], None] = lambda batch: None, *, most_steps: int | None = None, **options: Any
) -> LoaderStats:
    options = {"batch_size": 1024} | options
    with make_parquet_converter(url).make_torch_dataloader(**options) as loader:
        for number, batch in enumerate(loader):
            step(batch)
            if number == most_steps:
                break
        return loader.stats()


def busy(seconds: float) -> None:
    """Compute in Python, which holds its lock."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def slow_model(folder: Path) -> LoaderStats:
    url = _numbers(folder / "rows", rows=200_000, columns=10, row_group_rows=20_000)
    return _read(url, lambda batch: time.sleep(0.004), shuffle=True)


def slow_transform(folder: Path) -> LoaderStats:
    url = _numbers(folder / "rows", rows=200_000, columns=10, row_group_rows=20_000)

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        busy(0.004)
        return batch

    return _read(url, transform=transform)


def sleeping_transform(folder: Path) -> LoaderStats:
    url = _numbers(folder / "rows", rows=200_000, columns=10, row_group_rows=20_000)

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.01)
        return batch

    return _read(url, transform=transform)


def small_row_groups(folder: Path) -> LoaderStats:
    return _read(_numbers(folder / "rows", rows=400_000, columns=10, row_group_rows=200), num_epochs=2)


def small_windows(folder: Path) -> LoaderStats:
    url = _numbers(folder / "rows", rows=1_000_000, columns=10, row_group_rows=1_000)
    return _read(url, shuffle=True, shuffle_window_rows=1_000, num_epochs=2)


def one_core(folder: Path) -> LoaderStats:
    url = _numbers(folder / "rows", rows=2_000_000, columns=20, row_group_rows=100_000)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        return _read(url, shuffle=True, num_epochs=3)
    finally:
        os.sched_setaffinity(0, cores)


def wide_table(folder: Path) -> LoaderStats:
    return _read(_numbers(folder / "rows", rows=20_000, columns=3_000, row_group_rows=2_000), batch_size=256)


def many_small_files(folder: Path) -> LoaderStats:
    return _read(_numbers(folder / "rows", rows=300_000, columns=10, row_group_rows=200, files=1_500))


def python_loop(folder: Path) -> LoaderStats:
    url = _numbers(folder / "rows", rows=400_000, columns=10, row_group_rows=20_000)
    return _read(url, lambda batch: busy(0.003), shuffle=True)


def cold_disk(folder: Path) -> LoaderStats:
    url = _numbers(folder / "rows", rows=4_000_000, columns=20, row_group_rows=100_000)
    for file in (folder / "rows").iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return _read(url)


def images(folder: Path) -> LoaderStats:
    from PIL import Image as Picture

    buffer = io.BytesIO()
    Picture.fromarray(_rng.integers(0, 255, (224, 224, 3), np.uint8)).save(buffer, "JPEG")
    (folder / "rows").mkdir(parents=True)
    pq.write_table(pa.table({"image": pa.array([buffer.getvalue()] * 2_000, pa.binary())}), folder / "rows/0.parquet")
    made = make_parquet_converter((folder / "rows").as_uri(), decode={"image": Image(size=(224, 224))})
    with made.make_torch_dataloader(batch_size=32) as loader:
        for _ in loader:
            pass
        return loader.stats()


def small_batches(folder: Path) -> LoaderStats:
    url = _numbers(folder / "rows", rows=60_000, columns=10, row_group_rows=20_000)
    return _read(url, batch_size=1)


def idle_processes(folder: Path) -> LoaderStats:
    url = _numbers(folder / "rows", rows=2_000_000, columns=20, row_group_rows=100_000)
    return _read(url, num_workers=2, num_epochs=6)


def restarts(folder: Path) -> LoaderStats:
    url = _numbers(folder / "rows", rows=200_000, columns=10, row_group_rows=20_000)
    with make_parquet_converter(url).make_torch_dataloader(batch_size=1024, shuffle=True) as loader:
        for _ in range(10):
            next(iter(loader))
        return loader.stats()


SITUATIONS: dict[str, tuple[Situation, set[str]]] = {
    "slow model": (slow_model, {"model"}),
    "slow transform": (slow_transform, {"transform"}),
    "transform that waits": (sleeping_transform, {"transform"}),
    "small row groups": (small_row_groups, {"row groups"}),
    "too small windows": (small_windows, {"windows"}),
    "one core": (one_core, {"processor"}),
    "wide table": (wide_table, {"columns"}),
    "many small files": (many_small_files, {"files"}),
    "Python's lock is held": (python_loop, {"model", "lock"}),
    "cold page cache": (cold_disk, {"disk"}),
    "images": (images, {"decode"}),
    "batches of one row": (small_batches, {"batches"}),
    "an iteration for each step": (restarts, {"restarts"}),
    "idle worker processes": (idle_processes, {"processes"}),
}
"""Each situation, and the words that name it rightly."""


def slow_store(azurite: SlowAzurite, folder: Path, *, local_cache_dir: Path | None = None) -> LoaderStats:
    """Rows in a blob store that answers after 0.15 seconds; with copies on this host's disk if there is a folder."""
    url = azurite.url(azurite.new_container())
    _numbers(folder / "rows", rows=200_000, columns=10, row_group_rows=10_000, files=4)
    storage = open_storage(f"{url}/rows", {"connection_string": azurite.connection_string})
    for file in (folder / "rows").iterdir():
        storage.put_if_absent(file.name, file.read_bytes())
    made = make_parquet_converter(storage.url, storage_options={"connection_string": azurite.connection_string})
    azurite.proxy.delay_seconds = 0.15
    try:
        with made.make_torch_dataloader(
            batch_size=256, local_cache_dir=local_cache_dir, shuffle=True, shuffle_window_rows=10_000
        ) as loader:
            for _ in loader:
                pass
            return loader.stats()
    finally:
        azurite.proxy.delay_seconds = 0.0
