"""Bytes become tensors: reader threads decode the rows of a few batches at a time, ahead of use.

Windows hold the bytes as the files have them, so they stay small, and rows are decoded after they were shuffled.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from converter.decoders.decoder import Decoder, WrongDecoderError, decode_rows, ndim_of, row_bytes
from converter.errors import MissingDependencyError, ReadError
from converter.manifest import Manifest
from converter.reading.ahead import read_ahead
from converter.reading.checks import place_of_row
from converter.reading.gather import Array, new_array
from converter.reading.meter import Meter
from converter.reading.nulls import check_fill
from converter.reading.ragged import RaggedRows
from converter.reading.runs import Columns, Run
from converter.reading.source import BatchSource
from converter.schema import Field
from converter.storage.directory import Storage
from converter.storage.urls import file_url

ROW_NUMBERS = "\0rows"
"""The column of a window that holds each row's number in the dataset, to name a row that cannot be decoded."""

_PIECE_BYTES = 8 << 20
"""How much is decoded into one array, at least a batch: many small batches share it, as those of a window do."""

_CHUNK_BYTES = 4 << 20
"""How much one thread decodes at a time: several milliseconds of JPEG."""

_PART_BYTES = 64 << 20
"""How much a worker process decodes before it sends it; a guess."""


def decoded_bytes_ahead(source: BatchSource) -> int:
    """Bytes of decoded rows that wait to be used or are being decoded."""
    # Rows that differ in shape are decoded one by one, and then copied into one array.
    num_pieces = 4 if any(decoder.shape is None for decoder in source.decoders.values()) else 2
    rows_ahead = _chunks_ahead(source) * _chunk_rows(source) + num_pieces * _piece_rows(source)
    return source.decoded_row_bytes * rows_ahead


def parts_of_run(source: BatchSource, batches: range) -> Iterator[range]:
    """Cut a run of batches so that a worker process does not decode a whole window before it hands out a batch.

    The window's bytes are then read once for each part, which costs little beside decoding.
    """
    step = len(batches)
    if source.decoders and source.sequences is None:
        step = max(1, _PART_BYTES // (source.batch_size * source.decoded_row_bytes))
    for start in range(batches.start, batches.stop, step):
        yield range(start, min(start + step, batches.stop))


def _piece_rows(source: BatchSource) -> int:
    """Rows that are decoded into one array: whole batches."""
    bytes_of_a_batch = source.batch_size * source.decoded_row_bytes
    return source.batch_size * max(1, _PIECE_BYTES // bytes_of_a_batch)


def _chunk_rows(source: BatchSource) -> int:
    return max(1, min(_piece_rows(source), _CHUNK_BYTES // source.decoded_row_bytes))


def _chunks_ahead(source: BatchSource) -> int:
    """Chunks that are decoded ahead of use: two batches, unless the user says how many."""
    batches = source.prefetch_batches or 2
    return max(2 * source.workers_count, math.ceil(batches * source.batch_size / _chunk_rows(source)))


def decode_runs(source: BatchSource, runs: Iterator[Run], meter: Meter) -> Generator[Run, None, None]:
    """Yield the runs with their columns of bytes decoded, cut into runs of a few batches.

    Raises:
        ReadError: a row cannot be decoded; the message names its file, row and column.
    """

    def chunks() -> Iterator[tuple[_Piece, int, int]]:
        rows, step = _piece_rows(source), _chunk_rows(source)
        for run in runs:
            for start in range(0, run.num_rows, rows):
                piece = _Piece(source, run, start, min(start + rows, run.num_rows))
                for first in range(0, piece.num_rows, step):
                    yield piece, first, min(first + step, piece.num_rows)

    def decode(chunk: tuple[_Piece, int, int]) -> _Piece | None:
        piece, first, stop = chunk
        with meter.timed("decode bytes"):
            piece.decode(first, stop)
        return piece if stop == piece.num_rows else None

    # In order: when a piece's last chunk arrives, the others have.
    decoded = read_ahead(
        decode,
        chunks(),
        workers_count=source.workers_count,
        ahead=_chunks_ahead(source),
        meter=meter,
        pool="decode bytes",
    )
    with contextlib.closing(decoded):
        for piece in decoded:
            if piece is not None:
                yield piece.run()


def decode_column(source: BatchSource, name: str, views: Any, numbers: Array, given_up: threading.Event) -> Array:
    """A window's column of bytes decoded at once, for sequences that share its rows.

    Args:
        source: where the column comes from.
        name: the column; its rows have one shape.
        views: its bytes.
        numbers: each row's number in the dataset.
        given_up: set when nobody takes the window any more.

    Raises:
        ReadError: a row cannot be decoded; the message names its file, row and column.
    """
    decoder = source.decoders[name]
    assert decoder.shape is not None
    decoded = new_array((len(views), *decoder.shape), decoder.dtype)
    step = max(1, _CHUNK_BYTES // row_bytes(decoder))
    for first in range(0, len(views), step):
        if given_up.is_set():
            break
        part = slice(first, first + step)
        _decode_rows(source, name, views[part], numbers[part], decoded[part])
    return decoded


class _Piece:
    """Some whole batches of a run; several threads decode parts of it."""

    def __init__(self, source: BatchSource, run: Run, start: int, stop: int) -> None:
        self._source, self._run, self._start = source, run, start
        self.num_rows = stop - start
        self._columns: Columns = {name: column[start:stop] for name, column in run.columns.items()}
        self._numbers = self._columns.get(source.row_index or ROW_NUMBERS)
        self._decoded: dict[str, Array] = {
            name: new_array((self.num_rows, *decoder.shape), decoder.dtype)
            for name, decoder in source.decoders.items()
            if decoder.shape is not None
        }
        self._ragged: dict[str, dict[int, Sequence[Array]]] = {
            name: {} for name, decoder in source.decoders.items() if decoder.shape is None
        }

    def decode(self, first: int, stop: int) -> None:
        """Decode the rows from `first` to `stop`."""
        assert self._numbers is not None
        for name in self._source.decoders:
            views: Any = self._columns[name]
            out = self._decoded[name][first:stop] if name in self._decoded else None
            rows = _decode_rows(self._source, name, views[first:stop], self._numbers[first:stop], out)
            if rows is not None:
                self._ragged[name][first] = rows

    def run(self) -> Run:
        """The decoded batches."""
        columns = dict(self._columns)
        columns.pop(ROW_NUMBERS, None)
        columns |= self._decoded
        for name, parts in self._ragged.items():
            rows = [row for _, part in sorted(parts.items()) for row in part]
            columns[name] = _ragged_rows(rows, self._source.schema[name]).to_arrow(is_jagged=False)
        return Run(
            columns=columns,
            batch_size=self._run.batch_size,
            num_rows=self.num_rows,
            first_batch=self._run.first_batch + self._start // self._run.batch_size,
        )


def _decode_rows(
    source: BatchSource, name: str, views: Any, numbers: Array, out: Array | None
) -> Sequence[Array] | None:
    """Decode rows into `out`, or return them if they differ in shape; `numbers` are theirs in the dataset.

    Raises:
        ReadError: a row cannot be decoded.
    """
    decoder, nulls, values = source.decoders[name], source.nulls, views.cast(pa.large_binary())
    fill = check_fill(source.schema[name], nulls[name]) if not isinstance(nulls, str) and name in nulls else 0
    try:
        return _decode_present(decoder, values, out, fill)
    except ImportError as error:
        raise MissingDependencyError(f"Column {name!r} cannot be decoded: {error}.") from error
    except Exception as error:
        bad = undecodable_rows(decoder, values)
        if isinstance(error, WrongDecoderError) and len(bad) in (0, len(values) - values.null_count):
            raise TypeError(f"decode: {decoder!r} of column {name!r} is no decoder: {error}.") from error
        number = int(numbers[bad[0][0] if bad else 0])
        raise undecodable_error(source.storage, source.manifest, number, error, (name, decoder)) from error


def _decode_present(decoder: Decoder, values: pa.Array, out: Array | None, fill: Any) -> Sequence[Array] | None:
    """Decode the rows that are not null; others become `fill`, or rows without numbers if there is no `out`."""
    if not values.null_count:
        return decode_rows(decoder, values, out)
    valid = np.asarray(values.is_valid())
    present = values.drop_null()
    if out is None:
        rows = iter(decode_rows(decoder, present, None) or ())
        empty = np.empty((0,) * ndim_of(decoder), decoder.dtype)
        return [next(rows) if is_there else empty for is_there in valid.tolist()]
    decoded = np.empty((len(present), *out.shape[1:]), out.dtype)
    decode_rows(decoder, present, decoded)
    out[...] = fill
    out[valid] = decoded
    return None


def _ragged_rows(rows: Sequence[Array], field: Field) -> RaggedRows:
    shapes = np.array([row.shape for row in rows], np.int64).reshape(len(rows), field.ndim)
    values = np.concatenate([row.reshape(-1) for row in rows]) if rows else np.empty(0, field.stored_dtype)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(shapes.prod(axis=1))))
    return RaggedRows(values=values, offsets=offsets, shapes=shapes)


def undecodable_rows(decoder: Decoder, values: pa.Array) -> list[tuple[int, Exception]]:
    """The rows that cannot be decoded, each with its error. Null rows are none of them."""
    bad: list[tuple[int, Exception]] = []
    for row in range(len(values)):
        if not values[row].is_valid:
            continue
        out = None if decoder.shape is None else np.empty((1, *decoder.shape), decoder.dtype)
        try:
            decode_rows(decoder, values[row : row + 1], out)
        except ImportError as error:
            raise MissingDependencyError(f"{type(decoder).__name__} cannot decode: {error}.") from error
        except Exception as error:  # noqa: BLE001  # A decoder may be a user's.
            bad.append((row, error))
    return bad


def undecodable_error(
    storage: Storage, manifest: Manifest, row: int, error: Exception, column: tuple[str, Decoder]
) -> ReadError:
    """The error for a row that cannot be decoded; `row` is its number in the dataset."""
    name, decoder = column
    or_skip = ", or pass on_error='skip' to the decoder" if hasattr(decoder, "on_error") else ""
    row_group = int(np.searchsorted(np.cumsum(manifest.row_group_rows), row, side="right"))
    return ReadError(
        f"Column {name!r} cannot be decoded in {place_of_row(storage, manifest, row)}: {said(error)}. Mend or drop the "
        f"row with Spark, leave the column out with columns=…{or_skip}.",
        path=file_url(storage.url, manifest.file_names[int(manifest.row_group_file[row_group])]),
        row_group=row_group,
    )


def said(error: Exception) -> str:
    """What an error says, without a full stop."""
    return f"{type(error).__name__}: {str(error).rstrip('.')}"
