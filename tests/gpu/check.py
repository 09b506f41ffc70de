#!/usr/bin/env python3
"""What only a GPU can show: batches arrive on it whole, in order, while it works, and how fast.

    python tests/gpu/check.py [--rows N]

Needs torch with CUDA and a GPU, and neither Spark nor Java. Prints what it checked and measured; exits 1 where a check
failed, and 2, with a line that says so, where there is no GPU.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import converter
from converter import DatasetConverter

BATCH_SIZE = 1024
WIDTH = 512
FLOATS = 40


def write_rows(folder: Path, num_rows: int) -> None:
    """Files as the writers of a cache lay them out: plain pages, one for each column and row group."""
    generator = np.random.default_rng(0)
    pages: Any = {"compression": "none", "use_dictionary": False, "data_page_size": 1 << 30}
    vectors = generator.standard_normal((num_rows, WIDTH), np.float32)
    metadata = {"converter.dtype": "float32", "converter.ndim": "1", "converter.shape": f"[{WIDTH}]"}
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("x", pa.binary(WIDTH * 4), metadata=metadata)])
    packed = pa.Array.from_buffers(pa.binary(WIDTH * 4), num_rows, [None, pa.py_buffer(vectors)])
    for name in ("emb", "tab", "mixed"):
        (folder / name).mkdir()
    pq.write_table(pa.table([np.arange(num_rows), packed], schema=schema), folder / "emb" / "x.parquet",
                   row_group_size=4096, **pages)  # fmt: skip
    columns = {f"f{index}": generator.random(8 * num_rows, np.float32) for index in range(FLOATS)}
    pq.write_table(pa.table({"id": np.arange(8 * num_rows)} | columns), folder / "tab" / "x.parquet",
                   row_group_size=50_000, **pages)  # fmt: skip
    some = min(num_rows, 20_000)
    mixed = {
        "id": np.arange(some),
        "text": [f"row {row}" for row in range(some)],
        "ragged": [list(range(row % 5)) for row in range(some)],
        "flag": np.arange(some) % 3 == 0,
        "day": pa.array(np.arange(some, dtype=np.int32)).cast(pa.date32()),
    }
    pq.write_table(pa.table(mixed), folder / "mixed" / "x.parquet", row_group_size=3000)


def same(one: Any, other: Any) -> bool:
    """Whether two columns of batches hold the same, wherever they stand."""
    if isinstance(one, list):
        return bool(one == other)
    if one.is_nested:
        return same(one.values(), other.values()) and same(one.offsets(), other.offsets())
    return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())


def assert_same_batches(made: DatasetConverter, **options: Any) -> None:
    """Each batch on the device is the one that arrives without a device."""
    extra = {"num_workers": options.pop("num_workers", 0), "pin_memory": options.pop("pin_memory", None)}
    with (
        made.make_torch_dataloader(batch_size=BATCH_SIZE, device="cuda", **options, **extra) as placed,
        made.make_torch_dataloader(batch_size=BATCH_SIZE, **options) as plain,
    ):
        count = 0
        for there, here in zip(placed, plain, strict=True):
            assert list(there) == list(here)
            for name, column in there.items():
                assert isinstance(column, list) or column.device.type == "cuda", name
                assert same(column, here[name]), name
            count += 1
        assert count == len(placed) == len(plain)


def check_every_kind(folder: Path) -> None:
    """Scalars, tensors, text, ragged rows: plain, shuffled, by processes, pinned or not."""
    mixed = converter.make_parquet_converter(folder / "mixed")
    for ragged in ("pad", "nested"):
        for shuffle in (False, True):
            assert_same_batches(mixed, ragged=ragged, shuffle=shuffle)
    for name in ("emb", "tab"):
        made = converter.make_parquet_converter(folder / name)
        for options in ({}, {"shuffle": True}, {"pin_memory": False}, {"transform": _double}):
            assert_same_batches(made, **options)
    assert_same_batches(converter.make_parquet_converter(folder / "emb"), num_workers=2, shuffle=True)


def _double(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: column * 2 for name, column in batch.items()}


def check_a_busy_device(folder: Path) -> None:
    """What a slow consumer sees is right, though the next windows are copied while it works, on any stream."""
    made = converter.make_parquet_converter(folder / "emb")
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with (
            torch.cuda.stream(stream),
            made.make_torch_dataloader(batch_size=BATCH_SIZE, device="cuda", shuffle=True) as loader,
            made.make_batch_reader(batch_size=BATCH_SIZE, shuffle=True) as reader,
        ):
            sums = []
            for batch in loader:
                torch.cuda._sleep(2_000_000)
                sums.append(batch["x"].double().sum(dim=1))
                # Written over and let go of at once: its memory must not be given away while it is read.
                batch["x"].fill_(-1.0)
                del batch
            found = torch.cat(sums).cpu().numpy()
            wanted = np.concatenate([batch["x"].astype(np.float64).sum(axis=1) for batch in reader])
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-6)


def check_ownership(folder: Path) -> None:
    """`list(loader)` keeps every batch; a write into one is seen in no other."""
    made = converter.make_parquet_converter(folder / "tab")
    with made.make_torch_dataloader(batch_size=BATCH_SIZE, device="cuda", columns=["id", "f0"]) as loader:
        batches = list(loader)
        batches[0]["id"].fill_(-1)
        ids = torch.cat([batch["id"] for batch in batches[1:]]).cpu()
        assert torch.equal(ids, torch.arange(BATCH_SIZE, len(made)))


def check_memory(folder: Path) -> None:
    """The device's memory does not grow with epochs."""
    made = converter.make_parquet_converter(folder / "emb")
    used = []
    with made.make_torch_dataloader(batch_size=BATCH_SIZE, device="cuda", shuffle=True) as loader:
        for _ in range(20):
            torch.cuda.reset_peak_memory_stats()
            for batch in loader:
                del batch
            used.append(torch.cuda.max_memory_allocated())
    print(f"  peak of the device in 20 epochs: {min(used) / 1e6:.0f} to {max(used) / 1e6:.0f} MB")
    assert max(used) <= 1.3 * min(used), used


def check_pinning(folder: Path) -> None:
    """Without a device batches stand in page-locked memory where that is asked for."""
    made = converter.make_parquet_converter(folder / "emb")
    with made.make_torch_dataloader(batch_size=BATCH_SIZE, pin_memory=True) as loader:
        assert loader.pin_memory
        assert all(batch["x"].is_pinned() for batch in loader)


def rate(batches: Callable[[], Iterator[Any]], num_rows: int) -> float:
    """Rows a second of the best of three epochs, the device waited for."""
    best = 0.0
    for _ in range(4):
        start = time.perf_counter()
        for batch in batches():
            del batch
        torch.cuda.synchronize()
        best = max(best, num_rows / (time.perf_counter() - start))
    return best


def measure(folder: Path) -> None:
    """Rows a second onto the device, beside the same without one and beside a copy of each batch by hand."""
    print("\n| rows | arrives | M rows/s | GB/s |\n| --- | --- | --- | --- |")
    for name, row_bytes in (("emb", 8 + 4 * WIDTH), ("tab", 8 + 4 * FLOATS)):
        made = converter.make_parquet_converter(folder / name)
        options: Any = {"batch_size": BATCH_SIZE, "shuffle": True}
        with (
            made.make_torch_dataloader(**options) as host,
            made.make_torch_dataloader(**options, device="cuda") as device,
            made.make_torch_dataloader(**options, device="cuda", pin_memory=False) as unpinned,
        ):
            ways: dict[str, Callable[[], Iterator[Any]]] = {
                "in memory": lambda loader=host: iter(loader),  # type: ignore[misc]
                "on the device": lambda loader=device: iter(loader),  # type: ignore[misc]
                "on the device, not pinned": lambda loader=unpinned: iter(loader),  # type: ignore[misc]
                "copied by hand, batch by batch": lambda loader=host: (  # type: ignore[misc]
                    {key: column.to("cuda") for key, column in batch.items()} for batch in loader
                ),
            }
            for way, batches in ways.items():
                found = rate(batches, len(made))
                print(f"| {name} | {way} | {found / 1e6:.2f} | {found * row_bytes / 1e9:.1f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of 512 floats (default: %(default)s)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU that torch can use on this machine: nothing was checked.")
        return 2
    print(f"{datetime.now(tz=timezone.utc).date()}, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
          f"pyarrow {pa.__version__}, Python {platform.python_version()}\n")  # fmt: skip
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, arguments.rows)
        for check in (check_every_kind, check_a_busy_device, check_ownership, check_memory, check_pinning):
            try:
                check(folder)
                print(f"passed: {check.__doc__.splitlines()[0] if check.__doc__ else check.__name__}")
            except Exception as error:  # noqa: BLE001 (the others are still to be tried)
                failed += 1
                print(f"FAILED: {check.__name__}: {type(error).__name__}: {error}")
        measure(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
