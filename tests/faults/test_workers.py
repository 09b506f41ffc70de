"""What worker processes send: wide tables, little shared memory, batches that are lost, and a Ctrl-C at their end."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from deltalake import write_deltalake

from converter import ConverterError, make_parquet_converter
from converter.deltatorch import FieldSpec, create_pytorch_dataloader
from converter.frameworks.torch.workers import next_of
from tests.processes import run_python

NUM_ROWS = 600
pytestmark = pytest.mark.timeout(100)


def write(folder: Path | str, num_columns: int = 2) -> str:
    columns = {f"c{number}": np.arange(NUM_ROWS, dtype=np.float32) + number for number in range(num_columns)}
    table = pa.table({"id": np.arange(NUM_ROWS), **columns, "list": [[row] * (row % 3) for row in range(NUM_ROWS)]})
    pq.write_table(table, os.path.join(folder, "a.parquet"), row_group_size=100)
    return str(folder)


def same(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


def read_a_wide_table(folder: str, options: dict[str, Any]) -> list[Any]:
    """The ids and a late column, and which values are wrong, with few files that may be open."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    transform = same if options.pop("transform", False) else None
    ids, is_right = [], True
    with make_parquet_converter(folder) as converter:
        options |= {"batch_size": 50, "ragged": "nested", "transform": transform, "num_workers": 2}
        with converter.make_torch_dataloader(**options, shuffle_window_rows=100) as loader:
            for batch in loader:
                ids += batch["id"].tolist()
                for number in range(300):
                    is_right &= bool((batch[f"c{number}"] == batch["id"] + number).all())
                lists = batch["list"] if transform is not None else batch["list"].unbind()
                is_right &= all(
                    row.tolist() == [one] * (one % 3) for row, one in zip(lists, batch["id"].tolist(), strict=True)
                )
                # Workers send ahead meanwhile.
                time.sleep(0.05)
    return [sorted(ids) == list(range(NUM_ROWS)), is_right]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"transform": True}], ids=["plain", "shuffle", "transform"])
def test_workers_send_a_wide_table_though_few_files_may_be_open(tmp_path: Path, options: dict[str, Any]) -> None:
    assert run_python(read_a_wide_table, write(tmp_path, 300), options) == [True, True]


def read_nested_batches(folder: str) -> Any:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    ids, is_right = [], True
    with make_parquet_converter(folder) as converter:
        options: dict[str, Any] = {"columns": ["id", "list"], "ragged": "nested", "num_workers": 1}
        with converter.make_torch_dataloader(batch_size=2, shuffle=True, **options) as loader:
            for batch in loader:
                ids += batch["id"].tolist()
                rows = [row.tolist() for row in batch["list"].unbind()]
                is_right &= rows == [[one] * (one % 3) for one in batch["id"].tolist()]
    return [sorted(ids) == list(range(NUM_ROWS)), is_right]


def test_workers_send_many_nested_batches_though_few_files_may_be_open(tmp_path: Path) -> None:
    # Each of them would be two open files.
    assert run_python(read_nested_batches, write(tmp_path)) == [True, True]


def read_records(folder: str) -> Any:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    fields = [FieldSpec("id", full_record_transform=same), *(FieldSpec(f"c{number}") for number in range(20))]
    ids, is_right = [], True
    for batch in create_pytorch_dataloader(folder, fields=fields, batch_size=8, num_workers=1):
        ids += batch["id"].tolist()
        is_right &= all(bool((batch[f"c{number}"] == batch["id"] + number).all()) for number in range(20))
    return [sorted(ids) == list(range(NUM_ROWS)), is_right]


def test_workers_of_deltatorch_send_many_batches_though_few_files_may_be_open(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "table"), pq.read_table(write(tmp_path, 20)))
    assert run_python(read_records, str(tmp_path / "table")) == [True, True]


def refuse_memory(*_: Any, **__: Any) -> None:
    raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")


def test_too_little_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a container with 64 MB, of which these windows take none: the workers inherit the refusal.
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse_memory)
    with (
        make_parquet_converter(write(tmp_path)) as converter,
        converter.make_torch_dataloader(batch_size=50, num_workers=1, columns=["id"]) as loader,
        pytest.raises(ConverterError, match=r"too little shared memory .*No space left on device.*--shm-size"),
    ):
        list(loader)


TABLE = np.arange(NUM_ROWS * 10_000, dtype=np.float32).reshape(NUM_ROWS, -1)


def look_up(batch: dict[str, Any]) -> dict[str, Any]:
    """Parts of a wide table: some columns of the rows."""
    first = int(batch["id"][0])
    rows = TABLE[first : first + len(batch["id"]), :4]
    return {**batch, "rows": rows, "column": rows[:, 2], "again": rows, "one": np.broadcast_to(rows[:1], rows.shape)}


def test_workers_send_parts_of_a_larger_memory_without_the_rest(tmp_path: Path) -> None:
    with (
        make_parquet_converter(write(tmp_path)) as converter,
        converter.make_torch_dataloader(batch_size=50, num_workers=1, columns=["id"], transform=look_up) as loader,
    ):
        for batch in loader:
            rows = torch.from_numpy(TABLE)[batch["id"], :4]
            assert batch["rows"].equal(rows)
            assert batch["again"].equal(rows)
            assert batch["column"].equal(rows[:, 2])
            assert batch["one"].equal(rows[:1].expand(50, 4))
            assert batch["rows"].untyped_storage().nbytes() < 1_000_000


FACTORS = np.ones(4, np.float32)


def give_the_same(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "factors": FACTORS, "again": FACTORS}


def test_an_array_that_a_transform_gives_again_is_one_for_each_batch(tmp_path: Path) -> None:
    with (
        make_parquet_converter(write(tmp_path)) as converter,
        converter.make_torch_dataloader(batch_size=4, num_workers=1, columns=["id"], transform=give_the_same) as loader,
    ):
        for batch in loader:
            assert batch["factors"].tolist() == batch["again"].tolist() == [1.0] * 4
            batch["factors"].zero_()
            assert batch["again"].tolist() == [1.0] * 4
            # torch refuses to save tensors of two dtypes in one memory.
            torch.save(batch, tmp_path / "batch.pt")


def test_batches_of_workers_can_be_changed_one_by_one(tmp_path: Path) -> None:
    # Autograd counts the changes of a tensor and refuses those of a view of what it has kept.
    with (
        make_parquet_converter(write(tmp_path)) as converter,
        converter.make_torch_dataloader(batch_size=50, num_workers=2, columns=["id", "c0", "c1"]) as loader,
    ):
        batches = list(loader)
    # One that is kept does not keep the other columns.
    assert batches[0]["c0"].untyped_storage().nbytes() <= 4 * NUM_ROWS + 64
    weights = torch.ones(50, requires_grad=True)
    losses = [(weights * batch["c0"]).sum() for batch in batches[1:]]
    batches[0]["c0"].zero_()
    batches[1]["c1"].zero_()
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    assert [batch["c0"].tolist() for batch in batches[1:]] == [batch["id"].float().tolist() for batch in batches[1:]]
    assert sorted(int(row) for batch in batches for row in batch["id"]) == list(range(NUM_ROWS))


class Unsendable:
    """An object of a transform that fails when it is pickled, which torch tells on stderr alone."""

    def __reduce__(self) -> Any:
        raise OSError("Too many open files")


def add_what_cannot_be_sent(batch: dict[str, Any]) -> dict[str, Any]:
    objects = np.empty(len(batch["id"]), object)
    objects[:] = [Unsendable() for _ in objects] if 300 in batch["id"] else None
    return {**batch, "object": objects}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_that_workers_cannot_send_are_told(tmp_path: Path, num_workers: int) -> None:
    # With one process more would come from it, and the trainer would wait for the one that is missing.
    options: dict[str, Any] = {"batch_size": 50, "num_workers": num_workers, "transform": add_what_cannot_be_sent}
    with (
        make_parquet_converter(write(tmp_path)) as converter,
        converter.make_torch_dataloader(**options, columns=["id"]) as loader,
        pytest.raises(ConverterError, match=r"cannot send its batches: OSError: Too many open files\. If a transform"),
    ):
        list(loader)


def test_processes_that_end_early_are_told() -> None:
    with pytest.raises(ConverterError, match="Worker processes have ended, but batches are missing"):
        next_of(iter(()))


PYTHONS_OWN = [os.path.dirname(module.__file__) for module in (weakref, multiprocessing)]


def interrupt_after_the_last_batch(folder: str) -> int:
    """How many of ten interrupts in the moment after the last batch are lost, but for what Python itself loses."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    lost_by: list[str] = []
    sys.unraisablehook = lambda lost: lost_by.append(traceback.extract_tb(lost.exc_traceback)[0].filename)
    num_lost = 0
    with make_parquet_converter(folder) as converter:
        for number in range(10):
            with converter.make_torch_dataloader(batch_size=200, num_workers=2, columns=["id"]) as loader:
                iterator = iter(loader)
                for _ in range(len(loader)):
                    next(iterator)
                signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.002 * number)
                try:
                    next(iterator, None)
                    time.sleep(1)
                except KeyboardInterrupt:
                    continue
                # Its finalizers of queues and connections drop one of seventy.
                num_lost += not (lost_by and os.path.dirname(lost_by.pop()) in PYTHONS_OWN)
    return num_lost


def test_an_interrupt_while_workers_end_after_the_last_batch_is_not_lost(tmp_path: Path) -> None:
    assert run_python(interrupt_after_the_last_batch, write(tmp_path)) == 0
