"""A reader that is killed at any moment goes on from its last saved state: each row as often as without the kill.

The process saves its state and what it has read by one rename, every few batches. What it read since is read again, by
another number of shards, in batches of another size.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, make_parquet_converter, mix

OPTIONS: dict[str, Any] = {
    "shuffle": True, "seed": 4, "shuffle_window_rows": 90, "uneven": "pad", "columns": ["id", "x"],
}  # fmt: skip
NUM_EPOCHS = 4
SAVE_EVERY = 3
MOST_STEPS, AHEAD = 10, 4
"""Of a process that is killed."""

pytestmark = pytest.mark.timeout(150)


def write(folder: Path, name: str, num_rows: int, *, first: int = 0) -> DatasetConverter:
    ids = np.arange(first, first + num_rows)
    columns = {"id": ids, "key": ids // 25, "time": ids % 25, "label": (ids % 10 == 0).astype(np.int32)}
    table = pa.table({**columns, "x": ids.astype(np.float32)})
    pq.write_table(table, folder / f"{name}.parquet", row_group_size=50)
    return make_parquet_converter(folder / f"{name}.parquet")


def view_of(kind: str, folder: Path) -> DatasetConverter:
    rows = write(folder, "rows", 900)
    if kind == "sequences":
        return rows.sequences(4, by="key", order_by="time")
    if kind == "balanced":
        return rows.balance("label")
    both = {"rows": rows, "more": write(folder, "more", 350, first=10_000)}
    return mix(both) if kind == "mixed" else mix(both, {"rows": 0.4, "more": 0.6}, stop=1000)


def epochs_of(view: DatasetConverter) -> list[list[int]]:
    with view.make_batch_reader(batch_size=64, **OPTIONS) as reader:
        return [[row for batch in reader for row in rows_of(batch)] for _ in range(NUM_EPOCHS)]


def rows_of(batch: dict[str, Any]) -> Iterator[int]:
    """The rows of a batch, or the first ones of its sequences, without those that another shard reads too."""
    ids, values = batch["id"], batch["x"]
    np.testing.assert_array_equal(ids.astype(np.float32), values)
    return iter((ids if ids.ndim == 1 else ids[:, 0])[batch["__valid"]].tolist())


def read_on(
    view: DatasetConverter, file: str, batch_size: int, shard_count: int, most_steps: int, told: Connection
) -> None:
    """Read until the epochs are over, all shards side by side, and tell of each step; after `most_steps` be killed."""
    record = json.loads(Path(file).read_text()) if os.path.exists(file) else {"epochs": [[]], "state": None}
    epochs = record["epochs"]
    readers = [
        view.make_batch_reader(batch_size=batch_size, cur_shard=shard, shard_count=shard_count, **OPTIONS)
        for shard in range(shard_count)
    ]
    for reader in readers if record["state"] is not None else ():
        reader.load_state_dict(record["state"])

    def save() -> None:
        record["state"] = readers[0].state_dict()
        Path(f"{file}.new").write_text(json.dumps(record))
        os.replace(f"{file}.new", file)

    steps = 0
    while len(epochs) <= NUM_EPOCHS:
        for number, batches in enumerate(zip(*readers, strict=True), 1):
            epochs[-1] += [row for batch in batches for row in rows_of(batch)]
            told.send_bytes(b".")
            steps += 1
            while steps == most_steps:
                signal.pause()
            if number % SAVE_EVERY == 0:
                save()
        epochs.append([])
        save()


@pytest.mark.parametrize(
    ("kind", "num_kills"), [("mixed", 3), ("mixed again and again", 3), ("sequences", 2), ("balanced", 2)]
)
def test_rows_come_as_often_as_if_nobody_was_killed(kind: str, num_kills: int, tmp_path: Path) -> None:
    view, file, chance = view_of(kind, tmp_path), str(tmp_path / "saved.json"), random.Random(kind)
    expected = epochs_of(view)
    context = multiprocessing.get_context("forkserver")
    for steps in [*(chance.randint(1, MOST_STEPS) for _ in range(num_kills)), None]:
        told, tells = context.Pipe(duplex=False)
        # It may be ahead of what it told, but not at the end.
        most_steps = 0 if steps is None else steps + AHEAD
        arguments = (view, file, chance.choice([7, 16, 33]), chance.choice([1, 2, 3]), most_steps, tells)
        process = context.Process(target=read_on, args=arguments)
        process.start()
        tells.close()
        for _ in range(steps or 0):
            told.recv_bytes()
        if steps is not None:
            process.kill()
        process.join(60)
        assert process.exitcode == (0 if steps is None else -signal.SIGKILL)
        process.close()
        told.close()
    *found, empty = json.loads(Path(file).read_text())["epochs"]
    assert empty == []
    for epoch, (rows, wanted) in enumerate(zip(found, expected, strict=True)):
        assert Counter(rows) == Counter(wanted), f"epoch {epoch}"
    if kind in ("mixed", "sequences"):
        assert all(len(set(rows)) == len(rows) == len(view) for rows in found)
    if kind == "mixed again and again":
        # Each source goes through its own epochs.
        for first, stop in ((0, 900), (10_000, 10_350)):
            counts = Counter(row for rows in found for row in rows if first <= row < stop)
            assert max(counts.values()) - min(counts[row] for row in range(first, stop)) <= 1
