"""DeltaTorch's names give what DeltaTorch gives, on real Delta tables: batches, order, ranks, workers, errors."""

from __future__ import annotations

import datetime as dt
import inspect
import io
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import deltalake
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, default_collate, get_worker_info

import converter.deltatorch.rows
import converter.deltatorch.warning
import converter.plan
from converter.deltatorch import (
    DeltaIterableDataset,
    FieldSpec,
    IDBasedDeltaDataset,
    MovedWarning,
    create_pytorch_dataloader,
)
from converter.errors import ConverterWarning, EmptyShardError, NullValueError, SourceError, UnsupportedTypeError
from tests.unit.sources.delta.known_delta import with_vector

pytestmark = pytest.mark.filterwarnings("ignore::converter.deltatorch.MovedWarning")

NUM_ROWS = 50
DAY, ZONED = dt.date(2020, 1, 1), dt.datetime(2020, 1, 1, 1, 2, 3, 4, tzinfo=dt.timezone.utc)


def png(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 5, 3), number, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def columns(num_rows: int = NUM_ROWS) -> dict[str, Any]:
    numbers = range(num_rows)
    return {
        "id": pa.array(numbers, pa.int64()),
        "small": pa.array([number % 100 for number in numbers], pa.int8()),
        "single": pa.array([number / 3 for number in numbers], pa.float32()),
        "double": pa.array([number / 7 for number in numbers], pa.float64()),
        "flag": pa.array([number % 3 == 0 for number in numbers]),
        "text": pa.array([f"row {number}" for number in numbers]),
        "data": pa.array([bytes([number % 256] * (number % 4)) for number in numbers], pa.binary()),
        "image": pa.array([bytes([number % 256, 1, 2, 3]) for number in numbers], pa.binary()),
        "photo": pa.array([png(number % 256) for number in numbers], pa.binary()),
        "day": pa.array([DAY + dt.timedelta(days=number) for number in numbers]),
        "time": pa.array([ZONED + dt.timedelta(hours=number) for number in numbers], pa.timestamp("us", "UTC")),
        "price": pa.array([Decimal(number) / 4 for number in numbers], pa.decimal128(10, 2)),
        "long": pa.array([Decimal(number) for number in numbers], pa.decimal128(30, 2)),
        "vector": pa.array([[number * 1.0, 2.0] for number in numbers], pa.list_(pa.float32())),
        "matrix": pa.array([[[number, 1], [2, 3], [4, 5]] for number in numbers], pa.list_(pa.list_(pa.int32()))),
        "ragged": pa.array([list(range(number % 3)) for number in numbers], pa.list_(pa.int64())),
        "words": pa.array([["a", f"{number}"] for number in numbers]),
        "holes": pa.array([None if number % 5 == 2 else number for number in numbers], pa.int64()),
        "holed": pa.array([[number, None] for number in numbers], pa.list_(pa.int64())),
    }


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """The rows as Arrow gives them, and DeltaTorch too."""
    return pa.table(columns()).to_pylist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table of five files, whose names have the order of their rows."""
    folder = tmp_path_factory.mktemp("deltatorch") / "table"
    folder.mkdir()
    table = pa.table(columns())
    for number in range(5):
        pq.write_table(table.slice(10 * number, 10), folder / f"part-{number}.parquet", row_group_size=5)
    deltalake.convert_to_deltalake(str(folder))
    return str(folder)


@pytest.fixture(params=["kept", "streamed"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rows are kept in memory between epochs, or read from the files each time."""
    if request.param == "streamed":
        monkeypatch.setattr(converter.deltatorch.rows, "_KEPT_BYTES", 0)
    return str(request.param)


def load(path: Any, fields: Sequence[FieldSpec], **options: Any) -> DataLoader[Any]:
    return create_pytorch_dataloader(str(path), "id", fields, **{"num_workers": 0, "batch_size": 8} | options)


def expected_batches(
    rows: Sequence[dict[str, Any]], make: Callable[[dict[str, Any]], Any], batch_size: int = 8
) -> list[Any]:
    """Batches of torch's default collate of what `make` makes of each row."""
    made = [make(row) for row in rows]
    return [default_collate(made[start : start + batch_size]) for start in range(0, len(made), batch_size)]


def are_equal(left: Any, right: Any) -> bool:
    """Whether batches have the same types, keys in their order, dtypes, shapes and values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(are_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(are_equal, left, right))
    return bool(left == right)


def ids_of(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def numbers_of(value: bytes) -> Any:
    return np.frombuffer(value, np.uint8).reshape(2, 2).copy()


def halved(numbers: Any) -> Any:
    """A function that travels to a process that is spawned."""
    return torch.from_numpy(numbers).float() / 2


# --- Batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_plain_columns_are_what_the_default_collate_makes_of_rows(
    path: str, rows: list[dict[str, Any]], memory: str, num_workers: int
) -> None:
    names = ["text", "id", "small", "single", "double", "flag", "data", "vector", "matrix", "words"]
    loader = load(path, [FieldSpec(name) for name in names], num_workers=num_workers)
    assert are_equal(list(loader), expected_batches(rows, lambda row: {name: row[name] for name in names}))
    assert len(loader) == 7
    assert loader.num_workers == num_workers


def _begin_late(worker: int) -> None:
    time.sleep(1.5 * worker)


def test_workers_that_begin_late_read_the_epoch_of_their_own_iteration(tmp_path: Path) -> None:
    num_rows = 20_000
    deltalake.write_deltalake(tmp_path, pa.table({"id": range(num_rows)}))
    fields = [FieldSpec("id", transform=lambda value: value)]
    loader = load(tmp_path, fields, num_workers=2, batch_size=50, shuffle=True, worker_init_fn=_begin_late)
    pairs = [(one["id"].tolist(), other["id"].tolist()) for one, other in zip(loader, loader, strict=True)]
    for epoch in zip(*pairs, strict=True):
        assert sorted(number for batch in epoch for number in batch) == list(range(num_rows))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bytes_become_numbers_of_a_shape(path: str, rows: list[dict[str, Any]], memory: str, num_workers: int) -> None:
    fields = [FieldSpec("image", (2, 2)), FieldSpec("id")]
    loader = load(path, fields, num_workers=num_workers)
    assert are_equal(
        list(loader), expected_batches(rows, lambda row: {"image": numbers_of(row["image"]), "id": row["id"]})
    )


@pytest.mark.parametrize("shape", [4, (-1,), (2, -1), [1, 4]])
def test_a_shape_may_be_a_number_a_list_or_have_one_size_that_is_found(
    path: str, rows: list[dict[str, Any]], shape: Any
) -> None:
    batches = list(load(path, [FieldSpec("image", shape)]))
    expected = expected_batches(
        rows, lambda row: {"image": np.frombuffer(row["image"], np.uint8).reshape(shape).copy()}
    )
    assert are_equal(batches, expected)


def test_with_a_size_that_differs_a_function_can_make_rows_alike(path: str, rows: list[dict[str, Any]]) -> None:
    batches = list(load(path, [FieldSpec("data", (-1,), transform=len)]))
    assert are_equal(batches, expected_batches(rows, lambda row: {"data": len(row["data"])}))


def test_a_target_name_is_added_and_the_plain_value_stays(path: str, rows: list[dict[str, Any]], memory: str) -> None:
    fields = [FieldSpec("image", (2, 2), target_name="x"), FieldSpec("small", target_name="y")]
    expected = expected_batches(
        rows,
        lambda row: {
            "image": row["image"], "small": row["small"], "x": numbers_of(row["image"]), "y": row["small"],
        },
    )  # fmt: skip
    assert are_equal(list(load(path, fields)), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "transform",
    [
        lambda numbers: torch.from_numpy(numbers.copy()).float(),
        lambda numbers: numbers / 255,
        lambda numbers: numbers[:, 0].astype(np.float16),
        lambda numbers: (numbers * 2, int(numbers[0, 0]), "text"),
        lambda numbers: {"numbers": numbers, "list": [1.5, 2]},
        lambda numbers: float(numbers[0, 0]),
        lambda numbers: numbers.mean(dtype=np.float32),
        lambda numbers: bool(numbers[0, 0] % 2),
        str,
        lambda numbers: numbers.tobytes(),
        lambda numbers: np.array(numbers[0, 0]),
        lambda numbers: np.zeros((0, 2)),
        # Alike in a batch, not among batches.
        lambda numbers: np.zeros(1 + numbers[0, 0] // 8),
        lambda numbers: np.zeros((1 + numbers[0, 0] // 8, 2)),
        lambda numbers: torch.zeros(1 + numbers[0, 0] // 8),
        lambda numbers: torch.zeros(1, dtype=torch.float64 if numbers[0, 0] < 8 else torch.float32),
        lambda numbers: 1 if numbers[0, 0] < 8 else 1.0,
    ],
)
def test_what_a_function_returns_is_collated_as_by_torch(
    path: str, rows: list[dict[str, Any]], transform: Callable[[Any], Any], num_workers: int
) -> None:
    fields = [FieldSpec("image", (2, 2), transform=transform), FieldSpec("id")]
    expected = expected_batches(rows, lambda row: {"image": transform(numbers_of(row["image"])), "id": row["id"]})
    assert are_equal(list(load(path, fields, num_workers=num_workers)), expected)


@pytest.mark.parametrize(
    "name",
    ["id", "small", "single", "double", "flag", "text", "data", "image", "day", "time", "price", "vector", "matrix",
     "ragged", "words", "holes", "holed"],
)  # fmt: skip
def test_functions_get_the_values_that_arrow_gives(
    path: str, rows: list[dict[str, Any]], memory: str, name: str
) -> None:
    seen: list[Any] = []
    list(load(path, [FieldSpec(name, transform=lambda value: seen.append(value) or 0)]))
    assert seen == [row[name] for row in rows]
    assert [type(value) for value in seen] == [type(row[name]) for row in rows]


def test_functions_are_called_row_by_row(path: str) -> None:
    calls: list[Any] = []
    fields = [
        FieldSpec("id", transform=lambda value: calls.append(("id", value)) or value),
        FieldSpec("small", transform=lambda value: calls.append(("small", value)) or value),
        FieldSpec("id", transform=lambda value: calls.append(("again", value)) or -value, target_name="negative"),
    ]
    batches = iter(load(path, fields, batch_size=2))
    assert next(batches)["negative"].tolist() == [0, -1]
    # No row is transformed before its batch is wanted.
    assert calls == [(name, number) for number in (0, 1) for name in ("id", "small", "again")]


def test_a_function_gets_the_picture_that_pillow_opens(path: str, rows: list[dict[str, Any]]) -> None:
    seen: list[Any] = []

    def transform(picture: Any) -> Any:
        seen.append((picture.format, picture.mode, picture.size))
        return np.array(picture)

    batches = list(load(path, [FieldSpec("photo", load_image_using_pil=True, transform=transform)]))
    assert set(seen) == {("PNG", "RGB", (5, 4))}
    expected = expected_batches(rows, lambda row: {"photo": np.array(Image.open(io.BytesIO(row["photo"])))})
    assert are_equal(batches, expected)
    # Without a function it is an error in DeltaTorch.
    assert are_equal(list(load(path, [FieldSpec("photo", load_image_using_pil=True)])), expected)


def test_a_function_gets_the_bytes_as_a_file(path: str, rows: list[dict[str, Any]]) -> None:
    batches = list(load(path, [FieldSpec("data", load_using_io=True, transform=lambda file: file.read())]))
    assert are_equal(batches, expected_batches(rows, lambda row: {"data": row["data"]}))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_function_of_the_whole_row_makes_the_batch(path: str, rows: list[dict[str, Any]], num_workers: int) -> None:
    def whole(row: dict[str, Any]) -> dict[str, Any]:
        return {"sum": row["id"] + row["small"], "numbers": row["image"]}

    fields = [FieldSpec("id", full_record_transform=whole), FieldSpec("small"), FieldSpec("image", (2, 2))]
    expected = expected_batches(
        rows, lambda row: {"sum": row["id"] + row["small"], "numbers": numbers_of(row["image"])}
    )
    assert are_equal(list(load(path, fields, num_workers=num_workers)), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_function_gets_the_rows_as_dicts(path: str, rows: list[dict[str, Any]], num_workers: int) -> None:
    fields = [FieldSpec("text"), FieldSpec("image", (2, 2)), FieldSpec("photo", load_image_using_pil=True)]

    def collate(found: list[dict[str, Any]]) -> Any:
        return [(row["text"], row["image"].tolist(), row["photo"].size) for row in found]

    batches = list(load(path, fields, num_workers=num_workers, collate_fn=collate))
    made = [(row["text"], numbers_of(row["image"]).tolist(), (5, 4)) for row in rows]
    assert batches == [made[start : start + 8] for start in range(0, NUM_ROWS, 8)]


def test_without_a_batch_size_rows_come_one_by_one(path: str) -> None:
    loader = load(path, [FieldSpec("image", (2, 2)), FieldSpec("id")], batch_size=None)
    assert len(loader) == NUM_ROWS
    assert [row["id"] for row in loader] == list(range(NUM_ROWS))
    assert next(iter(loader))["image"].shape == (2, 2)


def test_dates_and_times_are_whole_numbers(path: str) -> None:
    batch = next(iter(load(path, [FieldSpec("day"), FieldSpec("time"), FieldSpec("price")], batch_size=2)))
    assert batch["day"].tolist() == [18262, 18263]
    assert batch["time"].tolist() == [1577840523000004, 1577844123000004]
    assert batch["price"].tolist() == [0.0, 0.25]


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_belong_to_their_receiver(path: str, memory: str, shuffle: bool) -> None:
    fields = [
        FieldSpec("id", target_name="same"),
        FieldSpec("image", (2, 2)),
        FieldSpec("image", 4, target_name="flat"),
    ]
    loader = load(path, [FieldSpec("image"), *fields], shuffle=shuffle)
    for _ in range(2):
        for batch in loader:
            before = {key: value.clone() for key, value in batch.items() if key != "image"}
            assert (before["same"] == batch["id"]).all()
            assert (before["flat"][:, 1:] == torch.tensor([1, 2, 3])).all()
            batch["id"].zero_()
            batch["image"] *= 0
            assert torch.equal(batch["same"], before["same"])
            assert torch.equal(batch["flat"], before["flat"])


# --- Order, ranks, versions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [None, int])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_iteration_has_each_row_once_in_an_order_of_its_own(
    path: str, memory: str, num_workers: int, transform: Any
) -> None:
    loader = load(path, [FieldSpec("id", transform=transform)], shuffle=True, num_workers=num_workers)
    torch.manual_seed(5)
    epochs = [ids_of(loader) for _ in range(3)]
    assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
    assert all(left != right for left, right in pairwise([list(range(NUM_ROWS)), *epochs]))
    torch.manual_seed(5)
    assert ids_of(loader) == epochs[0]


def test_an_order_mixes_the_files(path: str) -> None:
    (first, *_) = load(path, [FieldSpec("id")], shuffle=True, batch_size=10)
    assert len({number // 10 for number in first["id"].tolist()}) > 1


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_without_shuffle_the_order_is_the_tables_for_any_number_of_workers(
    path: str, memory: str, num_workers: int
) -> None:
    loader = load(path, [FieldSpec("id", transform=int)], num_workers=num_workers, batch_size=3)
    batches = list(loader)
    assert ids_of(batches) == list(range(NUM_ROWS))
    assert [len(batch["id"]) for batch in batches] == [3] * 16 + [2]
    assert len(loader) == 17


def test_of_many_windows_each_worker_reads_whole_ones_and_the_short_batch_comes_last(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converter.deltatorch.rows, "_KEPT_BYTES", 0)
    monkeypatch.setattr(converter.plan, "DEFAULT_WINDOW_BYTES", 1)
    fields = [FieldSpec("id", transform=lambda number: (number, get_worker_info().id))]
    loader = load(path, fields, num_workers=2, shuffle=True, batch_size=4)
    batches = list(loader)
    ids = [number for batch in batches for number in batch["id"][0].tolist()]
    assert sorted(ids) == list(range(NUM_ROWS))
    assert [len(batch["id"][0]) for batch in batches] == [4] * 12 + [2]
    assert {worker for batch in batches for worker in batch["id"][1].tolist()} == {0, 1}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("transform", [None, int])
def test_ranks_read_each_row_once_in_equally_many_batches(
    path: str, memory: str, shuffle: bool, transform: Any
) -> None:
    loaders = [
        load(
            path, [FieldSpec("id", transform=transform)], use_fixed_rank=True, rank=rank, num_ranks=3, shuffle=shuffle,
            batch_size=8, num_workers=rank,
        )
        for rank in range(3)
    ]  # fmt: skip
    epochs = [[batch["id"].tolist() for batch in loader] for loader in loaders]
    # 17, 17 and 16 rows: the last rank cuts its last batch in two.
    assert [[len(batch) for batch in batches] for batches in epochs] == [[8, 8, 1], [8, 8, 1], [8, 4, 4]]
    assert [len(loader) for loader in loaders] == [3, 3, 3]
    assert [len(loader.dataset) for loader in loaders] == [17, 17, 16]  # type: ignore[arg-type]
    parts = [[number for batch in batches for number in batch] for batches in epochs]
    assert sorted(number for part in parts for number in part) == list(range(NUM_ROWS))
    assert [sorted(part) for part in parts] == [[*range(17)], [*range(17, 34)], [*range(34, 50)]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_with_drop_last_all_batches_are_whole_on_all_ranks(path: str, memory: str, num_workers: int) -> None:
    for rank in range(3):
        options = {"use_fixed_rank": True, "rank": rank, "num_ranks": 3, "drop_last": True, "num_workers": num_workers}
        loader = load(path, [FieldSpec("id", transform=int)], shuffle=True, batch_size=5, **options)
        assert [len(batch["id"]) for batch in loader] == [5, 5, 5]
        assert len(loader) == 3


def test_with_drop_last_too_few_rows_make_no_batch(path: str, memory: str) -> None:
    loader = load(path, [FieldSpec("id")], batch_size=64, drop_last=True)
    assert len(loader) == 0
    assert list(loader) == []


def test_ranks_are_found_in_torch_distributed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    loader = load(path, [FieldSpec("id")])
    assert ids_of(loader) == list(range(25, 50))
    assert (loader.dataset.rank, loader.dataset.num_ranks) == (1, 2)  # type: ignore[attr-defined]


def test_the_version_is_fixed_when_the_loader_is_made(tmp_path: Path, memory: str) -> None:
    def write(*numbers: int) -> None:
        deltalake.write_deltalake(str(tmp_path), pa.table({"id": pa.array(numbers, pa.int64())}), mode="append")

    write(1, 2)
    loader = load(tmp_path, [FieldSpec("id")])
    write(3)
    assert sorted(ids_of(loader)) == [1, 2]
    assert loader.dataset.version == 0  # type: ignore[attr-defined]
    assert sorted(ids_of(load(tmp_path, [FieldSpec("id")]))) == [1, 2, 3]
    assert sorted(ids_of(load(tmp_path, [FieldSpec("id")], version=0))) == [1, 2]


@pytest.mark.parametrize("id_field", [None, "no such column", "text"])
def test_the_ids_are_not_needed(path: str, id_field: str | None) -> None:
    loader = create_pytorch_dataloader(path, id_field, [FieldSpec("id")], num_workers=0)
    assert ids_of(loader) == list(range(NUM_ROWS))
    assert ids_of(create_pytorch_dataloader(path, fields=[FieldSpec("id")], num_workers=0)) == list(range(NUM_ROWS))


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (("even", "=", "true"), lambda number: number % 2 == 0),
        (("even", "!=", "true"), lambda number: number % 2),
        (("third", "in", ["0", "2"]), lambda number: number % 3 != 1),
        (("third", ">", 0), lambda number: number % 3 > 0),
        (("id", "<", "7"), lambda number: number < 7),
    ],
)
def test_rows_are_filtered_by_partitions_and_other_columns(tmp_path: Path, condition: Any, expected: Any) -> None:
    numbers = np.arange(20)
    table = pa.table({"id": numbers, "even": numbers % 2 == 0, "third": numbers % 3})
    deltalake.write_deltalake(str(tmp_path), table, partition_by=["even", "third"])
    loader = load(tmp_path, [FieldSpec("id")], partition_filter=[condition])
    wanted = [number for number in range(20) if expected(number)]
    assert sorted(ids_of(loader)) == wanted
    assert len(loader.dataset) == len(wanted)  # type: ignore[arg-type]
    assert set(next(iter(loader))) == {"id"}


def test_deleted_rows_belong_to_no_rank(tmp_path: Path) -> None:
    table = with_vector(tmp_path / "table", [2, 3, 7])
    parts = [ids_of(load(table, [FieldSpec("id")], use_fixed_rank=True, rank=rank, num_ranks=2)) for rank in range(2)]
    assert parts == [[0, 1, 4, 5], [6, 8, 9]]


# --- Processes and threads --------------------------------------------------------------------------------------------


def test_functions_run_in_worker_processes_or_in_this_thread(path: str) -> None:
    fields = [FieldSpec("id", transform=lambda number: (os.getpid(), threading.get_ident()))]
    (here,) = load(path, fields, batch_size=NUM_ROWS)
    assert here["id"][0].unique().tolist() == [os.getpid()]
    assert here["id"][1].unique().tolist() == [threading.get_ident()]
    there = torch.cat([batch["id"][0] for batch in load(path, fields, num_workers=2)])
    assert len(set(there.tolist()) - {os.getpid()}) == 2


def test_without_functions_no_process_is_started(path: str) -> None:
    batches = iter(load(path, [FieldSpec("id"), FieldSpec("image", (2, 2))], num_workers=2))
    next(batches)
    assert multiprocessing.active_children() == []


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("converter-read")]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("transform", [None, int])
def test_nothing_is_left_of_an_iteration_that_stops_early(
    path: str, memory: str, num_workers: int, transform: Any
) -> None:
    loader = load(path, [FieldSpec("id", transform=transform)], batch_size=2, num_workers=num_workers)
    for _ in loader:
        break
    assert multiprocessing.active_children() == []
    assert readers() == []
    assert ids_of(loader) == list(range(NUM_ROWS))


def test_persistent_workers_stay_and_read_another_order(path: str, memory: str) -> None:
    fields = [FieldSpec("id"), FieldSpec("small", transform=lambda _: os.getpid(), target_name="process")]
    loader = load(path, fields, num_workers=2, persistent_workers=True, shuffle=True)
    next(iter(loader))
    first, second = list(loader), list(loader)
    assert ids_of(first) != ids_of(second)
    assert sorted(ids_of(first)) == sorted(ids_of(second)) == list(range(NUM_ROWS))
    pids = [{pid for batch in epoch for pid in batch["process"].tolist()} for epoch in (first, second)]
    assert pids[0] == pids[1]
    del loader
    assert multiprocessing.active_children() == []


def test_workers_may_be_spawned(path: str, rows: list[dict[str, Any]]) -> None:
    fields = [FieldSpec("image", (2, 2), transform=halved)]
    loader = load(path, fields, num_workers=1, multiprocessing_context="spawn")
    assert are_equal(list(loader), expected_batches(rows, lambda row: {"image": halved(numbers_of(row["image"]))}))


def test_other_options_reach_the_dataloader(path: str) -> None:
    started = multiprocessing.get_context("fork").Queue()
    loader = load(
        path, [FieldSpec("id", transform=int)], num_workers=2, worker_init_fn=started.put, timeout=60, prefetch_factor=3
    )
    assert ids_of(loader) == list(range(NUM_ROWS))
    assert sorted(started.get(timeout=30) for _ in range(2)) == [0, 1]
    assert (loader.batch_size, loader.timeout, loader.prefetch_factor) == (8, 60, 3)
    with pytest.raises(TypeError, match="queue_size"):
        load(path, [FieldSpec("id")], queue_size=1000)


# --- The datasets -----------------------------------------------------------------------------------------------------


def test_a_dataset_gives_rows_and_its_length(path: str, rows: list[dict[str, Any]], memory: str) -> None:
    dataset = IDBasedDeltaDataset(path, "id", [FieldSpec("text"), FieldSpec("image", (2, 2), target_name="x")])
    found = list(dataset)
    assert len(dataset) == dataset.count() == len(found) == NUM_ROWS
    assert [row["text"] for row in found] == [row["text"] for row in rows]
    assert all((row["x"] == numbers_of(row["image"])).all() for row in found)
    part = DeltaIterableDataset(path, [FieldSpec("id")], use_fixed_rank=True, rank=1, num_ranks=4)
    assert [row["id"] for row in part] == list(range(13, 26))
    assert (part.start, part.end, len(part)) == (13, 26, 13)


@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_of_another_dataloader_share_the_rows(path: str, memory: str, shuffle: bool) -> None:
    dataset = DeltaIterableDataset(path, [FieldSpec("id")], batch_size=8, shuffle=shuffle)
    loader = DataLoader(dataset, batch_size=8, num_workers=2)
    epochs = [ids_of(loader) for _ in range(2)]
    assert all(sorted(epoch) == list(range(NUM_ROWS)) for epoch in epochs)
    assert (epochs[0] == epochs[1] == list(range(NUM_ROWS))) is not shuffle
    assert len(loader) == 7


# --- Errors and the warning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("transform", [None, len])
def test_bytes_that_do_not_fit_the_shape_are_named(path: str, num_workers: int, transform: Any) -> None:
    loader = load(path, [FieldSpec("data", (2, 2), transform=transform)], num_workers=num_workers)
    message = r"Column 'data' has a row of 0 bytes, which does not fit decode_numpy_and_apply_shape=\(2, 2\)"
    # DeltaTorch's is a ValueError.
    with pytest.raises(ValueError, match=message) as caught:
        list(loader)
    assert isinstance(caught.value, SourceError)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_transform_that_writes_into_its_array_changes_that_field_alone(tmp_path: Path, num_workers: int) -> None:
    deltalake.write_deltalake(str(tmp_path), pa.table({"image": pa.array([bytes([1, 2]), bytes([3, 4])])}))
    fields = [
        FieldSpec("image", (2,), transform=doubled_in_place, target_name="doubled"),
        FieldSpec("image", (2,), transform=np.asarray, target_name="same"),
        FieldSpec("image", (2,), target_name="plain"),
    ]
    (batch,) = load(tmp_path, fields, num_workers=num_workers)
    assert batch["image"] == [bytes([1, 2]), bytes([3, 4])]
    assert batch["doubled"].tolist() == [[2, 4], [6, 8]]
    assert batch["same"].tolist() == batch["plain"].tolist() == [[1, 2], [3, 4]]


def doubled_in_place(image: Any) -> Any:
    image *= 2
    return image


def test_rows_of_different_lengths_make_no_tensor(path: str) -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        list(load(path, [FieldSpec("data", (-1,))]))
    with pytest.raises(RuntimeError, match="equal size"):
        list(load(path, [FieldSpec("ragged")]))


@pytest.mark.parametrize("fields", [[FieldSpec("holes")], [FieldSpec("holed")]])
def test_a_null_without_a_function_is_an_error(path: str, fields: list[FieldSpec]) -> None:
    with pytest.raises((NullValueError, TypeError, RuntimeError), match=r"'holes' has a null|NoneType"):
        list(load(path, fields))


def test_a_null_has_no_numbers(tmp_path: Path) -> None:
    deltalake.write_deltalake(str(tmp_path), pa.table({"image": pa.array([bytes(4), None])}))
    with pytest.raises(NullValueError, match="Column 'image' has a null"):
        list(load(tmp_path, [FieldSpec("image", (2, 2), transform=len)]))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (FieldSpec("id", (8,)), "needs a column of bytes; 'id' holds int64"),
        (FieldSpec("text", (8,)), "needs a column of bytes; 'text' holds str"),
        (FieldSpec("vector", (8,)), "needs a column of bytes; 'vector' holds float32"),
        (FieldSpec("long", transform=int), r"'long' is decimal128\(30, 2\), whose numbers are too long"),
    ],
)
def test_columns_that_cannot_be_given_are_named(path: str, field: FieldSpec, message: str) -> None:
    with pytest.raises(UnsupportedTypeError, match=message):
        list(load(path, [field]))


def test_columns_that_do_not_exist_are_named(path: str) -> None:
    with pytest.raises(ValueError, match=r"no column 'nope'.*'id', 'small'"):
        load(path, [FieldSpec("id"), FieldSpec("nope")])
    with pytest.raises(ValueError, match="no column 'nope'"):
        load(path, [FieldSpec("id")], partition_filter=[("nope", "=", "1")])
    with pytest.raises(ValueError, match="'x' is no value of the column 'id', which holds int64"):
        load(path, [FieldSpec("id")], partition_filter=[("id", "=", "x")])
    with pytest.raises(TypeError, match="partition_filter must be a list of tuples"):
        load(path, [FieldSpec("id")], partition_filter="id=1")


def test_a_path_without_a_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        load(tmp_path / "nothing", [FieldSpec("id")])
    with pytest.raises(SourceError, match="is no Delta table"):
        load(tmp_path, [FieldSpec("id")])


def test_wrong_ranks_are_errors(path: str) -> None:
    with pytest.raises(ValueError, match="rank must be below num_ranks"):
        load(path, [FieldSpec("id")], use_fixed_rank=True, rank=2, num_ranks=2)
    with pytest.raises(EmptyShardError, match="50 rows cannot be divided among 51 ranks"):
        load(path, [FieldSpec("id")], use_fixed_rank=True, rank=0, num_ranks=51)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_function_is_raised_as_it_is(path: str, num_workers: int) -> None:
    def fail(value: int) -> int:
        raise KeyError(f"no {value}")

    with pytest.raises(KeyError, match="no 0"):
        list(load(path, [FieldSpec("id", transform=fail)], num_workers=num_workers))


@pytest.fixture
def _unwarned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(converter.deltatorch.warning, "_has_warned", False)
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("_unwarned")
@pytest.mark.parametrize(
    "use",
    [
        lambda path: create_pytorch_dataloader(path, "id", [FieldSpec("image", (2, 2))], shuffle=True),
        lambda path: IDBasedDeltaDataset(path, "id", [FieldSpec("image", (2, 2))], shuffle=True),
        lambda path: DeltaIterableDataset(path, [FieldSpec("image", (2, 2))], shuffle=True),
    ],
)
def test_the_first_use_warns_with_the_native_line(path: str, use: Callable[[str], Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use(path)
        use(path)
    (warning,) = [found for found in caught if issubclass(found.category, MovedWarning)]
    assert issubclass(warning.category, DeprecationWarning)
    line = f"make_delta_converter({path!r}, columns=['image'], shapes={{'image': (2, 2)}}, float_dtype=None)"
    assert f"{line}.make_torch_dataloader(batch_size=32, shuffle=True)" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(
    "use",
    [
        lambda path: create_pytorch_dataloader(path, "id", [FieldSpec("id")], rank=1, num_ranks=2),
        lambda path: IDBasedDeltaDataset(path, "id", [FieldSpec("id")], rank=1, num_ranks=2),
        lambda path: DeltaIterableDataset(path, [FieldSpec("id")], rank=1, num_ranks=2),
    ],
)
def test_ranks_that_are_not_used_warn_at_the_line_of_the_program(path: str, use: Callable[[str], Any]) -> None:
    with pytest.warns(ConverterWarning, match="are not used without use_fixed_rank=True") as caught:
        use(path)
    assert [warning.filename for warning in caught if warning.category is ConverterWarning] == [__file__]


def test_the_native_line_gives_the_same_rows(path: str) -> None:
    native = converter.make_delta_converter(path, columns=["image"], shapes={"image": (2, 2)}, float_dtype=None)
    with native.make_torch_dataloader(batch_size=32) as loader:
        assert are_equal(list(loader), list(load(path, [FieldSpec("image", (2, 2))], batch_size=32)))


def test_arguments_have_the_order_of_deltatorch() -> None:
    assert list(inspect.signature(create_pytorch_dataloader).parameters)[:13] == [
        "path", "id_field", "fields", "partition_filter", "version", "batch_size", "use_fixed_rank", "rank",
        "num_ranks", "num_workers", "shuffle", "drop_last", "storage_options",
    ]  # fmt: skip
    assert list(inspect.signature(IDBasedDeltaDataset).parameters)[:5] == [
        "path", "id_field", "fields", "version", "partition_filter",
    ]  # fmt: skip
    assert list(inspect.signature(DeltaIterableDataset).parameters)[:4] == [
        "path", "fields", "partition_filter", "version",
    ]  # fmt: skip
