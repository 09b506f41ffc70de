"""What the loaders of every framework must do. A new framework passes these tests, and is complete."""

from __future__ import annotations

import importlib.util
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from converter import (
    CacheError,
    DatasetConverter,
    MissingDependencyError,
    NullValueError,
    make_parquet_converter,
)
from tests.contracts.sources import NUM_ROWS, TABLE

ROWS: dict[str, Any] = {"batch_size": 64, "columns": ["id"], "cur_shard": 0, "shard_count": 1}
"""What most tests here pass to a loader."""


class FrameworkContract:
    """Subclasses define `make`, and where needed `steps`, `array` and `batches`."""

    fails_later = True
    """Whether a transform is called first when a batch is asked for."""

    sees_steps = True
    """Whether each batch is counted when the loop takes it."""

    def make(self, converter: DatasetConverter, **options: Any) -> Any:
        """A loader, which is a context manager."""
        raise NotImplementedError

    def steps(self, loader: Any) -> int:
        """The number of batches that the loader announces."""
        return len(loader)

    def array(self, values: Any) -> np.ndarray[Any, Any]:
        """A column of a batch as a NumPy array."""
        return np.asarray(values)

    @pytest.fixture
    def converter(self, tmp_path: Path) -> DatasetConverter:
        """A thousand rows in ten row groups."""
        pq.write_table(TABLE, tmp_path / "rows.parquet", row_group_size=100)
        return make_parquet_converter(tmp_path / "rows.parquet")

    def batches(self, loader: Any) -> list[list[int]]:
        """The ids of the rows in each batch of an iteration."""
        return [self.array(batch["id"]).tolist() for batch in loader]

    def expected(self, converter: DatasetConverter, **options: Any) -> list[list[int]]:
        """What the NumPy reader yields with the same options."""
        with converter.make_batch_reader(**ROWS | options) as reader:
            return [batch["id"].tolist() for batch in reader]

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"shuffle": True, "seed": 3},
            {"shuffle": True, "drop_last": True},
            {"shuffle": True, "shuffle_window_rows": 150, "num_epochs": 3},
            {"shuffle": True, "cur_shard": 1, "shard_count": 3},
            {"cur_shard": 2, "shard_count": 3, "uneven": "pad"},
            {"filters": [("id", ">=", 500)]},
            {"workers_count": 3, "prefetch_batches": 5},
        ],
        ids=str,
    )
    def test_the_rows_and_their_order_are_those_of_the_numpy_reader(
        self, converter: DatasetConverter, options: dict[str, Any]
    ) -> None:
        with self.make(converter, **ROWS | options) as loader:
            assert self.steps(loader) == len(expected := self.expected(converter, **options))
            assert self.batches(loader) == expected

    def test_every_column_arrives_as_it_is(self, converter: DatasetConverter) -> None:
        options: dict[str, Any] = {"batch_size": NUM_ROWS, "columns": ["x", "vector"], "nulls": "mask"}
        with self.make(converter, **options) as loader, converter.make_batch_reader(**options) as reader:
            [found], [wanted] = list(loader), list(reader)
        assert list(found) == list(wanted) == ["x", "x__valid", "vector"]
        for name in wanted:
            assert self.array(found[name]).dtype == wanted[name].dtype
            np.testing.assert_array_equal(self.array(found[name]), wanted[name])

    def test_a_whole_epoch_is_followed_by_the_next_and_an_interrupted_one_starts_over(
        self, converter: DatasetConverter
    ) -> None:
        options = {"shuffle": True}
        first, second = (batches for batches in self.two_epochs(converter, **options))
        with self.make(converter, **ROWS | options) as loader:
            iterator = iter(loader)
            assert self.array(next(iterator)["id"]).tolist() == first[0]
            del iterator
            assert self.batches(loader) == first
            assert self.batches(loader) == second
            loader.set_epoch(0)
            assert self.batches(loader) == first

    def two_epochs(self, converter: DatasetConverter, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
        """Two epochs of a NumPy reader."""
        with converter.make_batch_reader(**ROWS | options) as reader:
            first, second = ([batch["id"].tolist() for batch in reader] for _ in range(2))
        assert first != second
        return first, second

    @pytest.mark.parametrize("done", [1, 7])
    def test_a_state_continues_with_the_very_next_row(self, converter: DatasetConverter, done: int) -> None:
        options = ROWS | {"shuffle": True}
        with self.make(converter, **options) as loader:
            state = loader.state_dict(done)
        with self.make(converter, **options) as loader:
            loader.load_state_dict(state)
            assert self.batches(loader) == self.expected(converter, shuffle=True)[done:]

    @pytest.mark.parametrize("options", [{}, {"num_epochs": 3}, {"drop_last": True}, {"batch_size": 7}], ids=str)
    def test_the_record_counts_what_the_loop_received(
        self, converter: DatasetConverter, options: dict[str, Any]
    ) -> None:
        with self.make(converter, **ROWS | options) as loader:
            assert loader.stats().batches == loader.stats().rows == 0
            for _ in range(2):
                received = self.batches(loader)
                stats = loader.stats()
                assert (stats.batches, stats.rows) == (len(received), sum(map(len, received)))
                assert 0 < stats.first_batch_seconds <= stats.waited_seconds <= stats.seconds
                assert stats.bytes_decoded >= 8 * stats.rows
                assert {"decode", "gather"} <= stats.stages.keys()
                assert all(done.cpu_seconds >= 0 for done in stats.stages.values())
                assert stats.steps[0, 0] == 0
                assert (np.diff(stats.steps.ravel()) >= 0).all()
                assert stats.steps.max() <= stats.seconds
                assert str(stats).startswith(stats.verdict)
                assert len(stats.verdict) < 240

    def test_a_loop_that_takes_its_time_is_told_that_it_does(self, converter: DatasetConverter) -> None:
        with self.make(converter, **ROWS | {"batch_size": 32}) as loader:
            for batch in loader:
                time.sleep(0.01 if len(batch) else 0)
            stats = loader.stats()
        # An iterator of TensorFlow takes all batches at once, and whoever takes them from it is not seen.
        assert stats.limit in ("model", "start")
        assert "%" in stats.verdict or "too few" in stats.verdict

    def test_a_loop_that_begins_an_iteration_for_each_step_is_told_so(self, converter: DatasetConverter) -> None:
        with self.make(converter, **ROWS) as loader:
            for number in range(6):
                next(iter(loader))
                assert (loader.stats().limit == "restarts") == (self.sees_steps and number >= 3), number
            # Peeks before an epoch are none of it, nor iterations that have a single batch.
            assert len(self.batches(loader)) == 16
            assert loader.stats().limit != "restarts"
            next(iter(loader))
            assert loader.stats().limit == "start"
        with self.make(converter, **ROWS | {"batch_size": len(converter)}) as loader:
            for _ in range(6):
                next(iter(loader))
            assert loader.stats().limit == "start"

    def test_a_bar_follows_the_loop_and_is_closed_with_it(
        self, converter: DatasetConverter, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with self.make(converter, **ROWS) as loader:
            for batch, wanted in zip(loader.progress("train", shown=True), self.expected(converter), strict=True):
                assert self.array(batch["id"]).tolist() == wanted
            bar = capsys.readouterr().err.split("\r")[-1]
            assert bar.startswith("train, waited ")
            assert "100%" in bar
            assert "16/16" in bar
            assert f" rows/s, limit: {loader.stats().limit} " in bar
            for _ in loader.progress(shown=True):
                break
            bar = capsys.readouterr().err.split("\r")[-1]
            assert bar.startswith("epoch 1, ")
            assert "limit: " in bar
            # Nobody looks: the captured output is no terminal.
            assert len(list(loader.progress())) == 16
            assert capsys.readouterr().err == ""

    def test_the_record_of_a_loop_that_failed_or_never_began(self, converter: DatasetConverter) -> None:
        def fail(batch: dict[str, Any]) -> dict[str, Any]:
            raise ZeroDivisionError

        with self.make(converter, **ROWS) as loader:
            assert loader.stats().verdict == "The start: no batch was read yet."
        if not self.fails_later:
            return
        with self.make(converter, **ROWS, transform=fail) as loader:
            with pytest.raises(ZeroDivisionError):
                self.batches(loader)
            stats = loader.stats()
            assert stats.batches == 0
            assert 0 <= stats.seconds < 60
            assert stats.limit == "start"

    def test_a_description_is_one_line(self, converter: DatasetConverter, capsys: pytest.CaptureFixture[str]) -> None:
        with self.make(converter, **ROWS) as loader:
            with pytest.raises(TypeError, match="description must be a str, got 5"):
                next(loader.progress(5))
            list(loader.progress("a\nb\x1b[31m" + "c" * 100, shown=True))
        assert "\x1b[31m" not in (shown := capsys.readouterr().err)
        assert f"a b [31m{'c' * 31}…" in shown

    def test_a_bar_needs_tqdm(self, converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with self.make(converter, **ROWS) as loader:
            with pytest.raises(MissingDependencyError, match=r"shown=True needs tqdm.*\[torch\]"):
                loader.progress(shown=True)
            assert len(list(loader.progress())) == 16

    def test_a_transform_gets_whole_batches(self, converter: DatasetConverter) -> None:
        def add_row(batch: dict[str, Any]) -> dict[str, Any]:
            return {"id": batch["id"], "twice": batch["id"] * 2}

        with self.make(converter, **ROWS, transform=add_row) as loader:
            for batch in loader:
                np.testing.assert_array_equal(self.array(batch["twice"]), self.array(batch["id"]) * 2)

    def test_what_cannot_be_read_raises_our_own_error(self, converter: DatasetConverter) -> None:
        with pytest.raises(NullValueError, match="'x'"), self.make(converter, batch_size=10, columns=["x"]) as loader:
            list(loader)
        with pytest.raises(ValueError, match="nowhere"):
            self.make(converter, columns=["nowhere"])

    def test_no_reader_thread_is_left_after_an_iteration_that_stops_early(self, converter: DatasetConverter) -> None:
        with self.make(converter, **ROWS | {"batch_size": 10}) as loader:
            for _ in loader:
                break
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("converter-read")]

    def test_a_deleted_converter_has_no_loaders(self, converter: DatasetConverter) -> None:
        converter.delete()
        with pytest.raises(CacheError, match="no rows any more"):
            self.make(converter)
