"""How much is decoded ahead of use, and how the runs of worker processes are cut."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, make_parquet_converter
from converter.loading.options import LoaderOptions
from converter.reading import decoding

NUM_ROWS = 400


class Wide:
    """Each byte becomes a megabyte; counts how many rows were decoded."""

    dtype, shape = "uint8", (1 << 20,)

    def __init__(self) -> None:
        self.num_rows, self._lock = 0, threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"num_rows": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def decode(self, values: pa.LargeBinaryArray) -> np.ndarray[Any, Any]:
        with self._lock:
            self.num_rows += len(values)
        return np.stack([np.full(1 << 20, value.as_py()[0], np.uint8) for value in values])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [bytes([number % 256]) for number in range(NUM_ROWS)]
    pq.write_table(pa.table({"x": rows, "id": range(NUM_ROWS)}), tmp_path / "part.parquet", row_group_size=50)
    return tmp_path


def options(**given: Any) -> LoaderOptions:
    return LoaderOptions(cur_shard=0, shard_count=1, batch_size=4, workers_count=2, **given)


def source_of(converter: DatasetConverter, **given: Any) -> Any:
    return options(**given).make_source(converter._storage, converter._manifest)


@pytest.mark.parametrize("prefetch_batches", [None, 1, 10])
def test_few_rows_are_decoded_before_they_are_asked_for(folder: Path, prefetch_batches: int | None) -> None:
    decoder = Wide()
    converter = make_parquet_converter(folder, decode={"x": decoder})
    with converter.make_batch_reader(
        batch_size=4, workers_count=2, prefetch_batches=prefetch_batches, shuffle=True
    ) as reader:
        batches = iter(reader)
        next(batches)
        # Two batches in advance, unless the user says how many; and the piece that is being filled.
        assert decoder.num_rows <= 4 * ((prefetch_batches or 2) + 4)
        del batches
    assert decoder.num_rows < NUM_ROWS / 2


def test_the_plan_counts_what_is_decoded_ahead(folder: Path) -> None:
    narrow = make_parquet_converter(folder).plan(batch_size=4).peak_memory_bytes
    converter = make_parquet_converter(folder, decode={"x": Wide()})
    assert converter.plan(batch_size=4).peak_memory_bytes - narrow >= 3 * 4 << 20
    assert converter.plan(batch_size=4, columns=["id"]).peak_memory_bytes <= narrow


def test_small_batches_share_an_array_and_large_ones_are_decoded_in_parts(folder: Path) -> None:
    large = source_of(make_parquet_converter(folder, decode={"x": Wide()}))
    assert (decoding._piece_rows(large), decoding._chunk_rows(large)) == (8, 4)

    class Narrow(Wide):
        shape = (16,)  # type: ignore[assignment]

    small = source_of(make_parquet_converter(folder, decode={"x": Narrow()}))
    assert decoding._piece_rows(small) % 4 == 0
    assert decoding._piece_rows(small) * 16 == pytest.approx(8 << 20, rel=0.01)
    assert decoding._chunk_rows(small) * 16 == 4 << 20


def test_a_run_of_a_worker_process_is_cut_into_parts_that_fit(folder: Path) -> None:
    converter = make_parquet_converter(folder, decode={"x": Wide()})
    parts = list(decoding.parts_of_run(source_of(converter), range(3, 60)))
    assert [number for part in parts for number in part] == list(range(3, 60))
    assert {len(part) for part in parts} == {16, 9}
    # Without decoders a run is one item.
    assert list(decoding.parts_of_run(source_of(converter, columns=["id"]), range(3, 60))) == [range(3, 60)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_give_the_batches_of_threads(folder: Path, num_workers: int) -> None:
    converter = make_parquet_converter(folder, decode={"x": Wide()})
    ids: list[list[list[int]]] = []
    for number in (0, num_workers):
        with converter.make_torch_dataloader(batch_size=8, shuffle=True, num_workers=number) as loader:
            ids.append([])
            for batch in loader:
                assert (batch["x"][:, 0].numpy() == batch["id"].numpy() % 256).all()
                ids[-1].append(batch["id"].tolist())
    assert ids[0] == ids[1]


def test_a_decoder_that_cannot_be_sent_is_refused_by_name(folder: Path) -> None:
    class Local(Wide):
        """Of no module's top level, so that it has no name to be found by."""

    converter = make_parquet_converter(folder, decode={"x": Local()})
    with pytest.raises(TypeError, match=r"decode\['x'\] cannot be sent to worker processes \(spawn\)"):
        converter.make_torch_dataloader(num_workers=1, multiprocessing_context="spawn")
