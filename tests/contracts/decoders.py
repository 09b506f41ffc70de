"""What every decoder must do. A new one passes these tests with rows of its own, and is complete."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, NullValueError, ReadError, SourceError, make_parquet_converter
from converter.decoders import from_json, to_json
from converter.decoders.decoder import Decoder, ndim_of

NUM_ROWS, NULL_ROW, BAD_ROW = 60, 7, 23


class DecoderContract:
    """Subclasses define a decoder, its rows and what they become."""

    skips: Decoder | None = None
    """The same decoder with `on_error="skip"`, if it has that."""

    bad: bytes = b"no such thing"
    """Bytes that it cannot decode."""

    def decoder(self) -> Decoder:
        """A decoder of which dtype and shape are known."""
        raise NotImplementedError

    def row(self, number: int) -> bytes:
        """The bytes of a row."""
        raise NotImplementedError

    def expected(self, number: int) -> np.ndarray[Any, Any]:
        """The tensor of a row."""
        raise NotImplementedError

    def write(self, folder: Path, *, null: bool = False, bad: bool = False) -> Path:
        """Files with the rows, two files of several row groups."""
        rows: list[bytes | None] = [self.row(number) for number in range(NUM_ROWS)]
        if null:
            rows[NULL_ROW] = None
        if bad:
            rows[BAD_ROW] = self.bad
        table = pa.table({"id": range(NUM_ROWS), "x": pa.array(rows, pa.binary())})
        folder.mkdir(exist_ok=True)
        for part in range(2):
            half = table.slice(part * NUM_ROWS // 2, NUM_ROWS // 2)
            pq.write_table(half, folder / f"part-{part}.parquet", row_group_size=9)
        return folder

    def convert(self, folder: Path, decoder: Decoder | None = None) -> DatasetConverter:
        return make_parquet_converter(folder, decode={"x": decoder or self.decoder()})

    def read(self, converter: DatasetConverter, **options: Any) -> dict[int, np.ndarray[Any, Any]]:
        """The rows by their id."""
        ragged = "nested" if converter.schema["x"].shape is None else "raise"
        arguments = {"batch_size": 8, "cur_shard": 0, "shard_count": 1, "ragged": ragged} | options
        with converter.make_batch_reader(**arguments) as reader:
            return {int(id_): row for batch in reader for id_, row in zip(batch["id"], batch["x"], strict=True)}

    def check(self, rows: dict[int, np.ndarray[Any, Any]], but: tuple[int, ...] = ()) -> None:
        assert sorted(rows) == [number for number in range(NUM_ROWS) if number not in but or number in rows]
        for number, row in rows.items():
            if number not in but:
                assert row.dtype == self.expected(number).dtype
                np.testing.assert_array_equal(row, self.expected(number))

    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("batch_size", [1, 8, 100])
    def test_every_row_is_decoded_and_stays_with_its_row(self, tmp_path: Path, shuffle: bool, batch_size: int) -> None:
        converter = self.convert(self.write(tmp_path))
        self.check(self.read(converter, shuffle=shuffle, batch_size=batch_size))

    def test_the_schema_says_what_arrives(self, tmp_path: Path) -> None:
        converter, decoder = self.convert(self.write(tmp_path)), self.decoder()
        field = converter.schema["x"]
        assert (field.dtype, field.shape, field.ndim) == (decoder.dtype, decoder.shape, ndim_of(decoder))
        assert field.decoder == type(decoder).__name__
        assert field.decoder in repr(converter.schema)

    def test_batches_are_the_callers_own(self, tmp_path: Path) -> None:
        converter = self.convert(self.write(tmp_path))
        if converter.schema["x"].shape is None:
            return
        with converter.make_batch_reader(batch_size=8) as reader:
            for batch in reader:
                batch["x"][...] = 0
            kept = list(reader)
        assert (
            self.check(dict(zip(range(NUM_ROWS), np.concatenate([batch["x"] for batch in kept]), strict=True))) is None
        )

    @pytest.mark.long("two processes for each decoder; test_decoding.py has them in the short lane")
    def test_the_rows_are_the_same_in_torch_and_its_processes(self, tmp_path: Path) -> None:
        converter = self.convert(self.write(tmp_path))
        is_ragged = converter.schema["x"].shape is None
        for num_workers in (0, 2):
            rows = {}
            with converter.make_torch_dataloader(
                batch_size=8, shuffle=True, ragged="pad" if is_ragged else "raise", num_workers=num_workers
            ) as loader:
                for batch in loader:
                    for index, id_ in enumerate(batch["id"].tolist()):
                        row = batch["x"][index].numpy()
                        if is_ragged:
                            sizes = np.atleast_1d(batch["x__length"][index].numpy())
                            row = row[tuple(map(slice, sizes))]
                        rows[id_] = row
            self.check(rows)

    @pytest.mark.parametrize("workers_count", [1, 3])
    def test_a_state_resumes_with_the_next_row(self, tmp_path: Path, workers_count: int) -> None:
        converter = self.convert(self.write(tmp_path))
        ragged = "nested" if converter.schema["x"].shape is None else "raise"
        options: Any = {"batch_size": 7, "shuffle": True, "ragged": ragged, "cur_shard": 0, "shard_count": 1}
        with converter.make_batch_reader(workers_count=workers_count, **options) as reader:
            whole = [batch["id"].tolist() for batch in reader]
            reader.set_epoch(0)
            batches = iter(reader)
            for _ in range(3):
                next(batches)
            state = reader.state_dict()
        with converter.make_batch_reader(**options) as reader:
            reader.load_state_dict(state)
            assert [batch["id"].tolist() for batch in reader] == whole[3:]

    def test_nulls_are_refused_masked_or_filled(self, tmp_path: Path) -> None:
        converter = self.convert(self.write(tmp_path, null=True))
        with pytest.raises(NullValueError, match="'x' holds"):
            self.read(converter)
        self.check(self.read(converter, nulls="mask"), but=(NULL_ROW,))
        assert not self.read(converter, nulls="mask")[NULL_ROW].any()
        if converter.schema["x"].shape is not None:
            self.check(self.read(converter, nulls={"x": 1}), but=(NULL_ROW,))
            assert (self.read(converter, nulls={"x": 1})[NULL_ROW] == 1).all()

    def test_a_part_of_the_rows_and_a_pickled_copy_are_decoded_too(self, tmp_path: Path) -> None:
        converter = self.convert(self.write(tmp_path))
        part = pickle.loads(pickle.dumps(converter.where([("id", ">=", 40)])))
        rows = self.read(part, shuffle=True)
        assert sorted(rows) == list(range(40, NUM_ROWS))
        np.testing.assert_array_equal(rows[50], self.expected(50))

    def test_a_row_that_cannot_be_decoded_is_named(self, tmp_path: Path) -> None:
        converter = self.convert(self.write(tmp_path, bad=True))
        with pytest.raises(ReadError, match=rf"'x' cannot be decoded in row {BAD_ROW} .*part-0\.parquet") as raised:
            self.read(converter, shuffle=True)
        assert raised.value.path is not None
        assert raised.value.row_group == BAD_ROW // 9

    def test_rows_that_cannot_be_decoded_are_left_out(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        if self.skips is None:
            return
        converter = self.convert(self.write(tmp_path, bad=True, null=True), self.skips)
        assert len(converter) == NUM_ROWS - 1
        assert f"1 of {NUM_ROWS} rows cannot be decoded and are left out. The first is row {BAD_ROW} " in caplog.text
        rows = self.read(converter, nulls="mask", shuffle=True)
        assert sorted({*range(NUM_ROWS)} - {*rows}) == [BAD_ROW]
        whole = self.convert(self.write(tmp_path / "whole"), self.skips)
        assert len(whole) == NUM_ROWS

    def test_no_row_that_can_be_decoded_is_an_error(self, tmp_path: Path) -> None:
        if self.skips is None:
            return
        table = pa.table({"id": [1, 2], "x": pa.array([self.bad] * 2, pa.binary())})
        pq.write_table(table, tmp_path / "part.parquet")
        with pytest.raises(SourceError, match="No row of 'x' can be decoded"):
            self.convert(tmp_path, self.skips)

    def test_json_tells_it(self) -> None:
        decoder = self.decoder()
        again = from_json(to_json(decoder))
        assert (again.dtype, again.shape) == (decoder.dtype, decoder.shape)
        assert to_json(again) == to_json(decoder)
