"""Decoders meet their rows when a converter is made: the first settle them, and undecodable ones are left out."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from converter.decoders.decoder import (
    Decoder,
    NamedDecoder,
    WrongDecoderError,
    check_decoder,
    decode_rows,
    skips_errors,
)
from converter.decoders.image import Image
from converter.decoders.npy import NumPy, is_settled, settled
from converter.errors import ConverterError, ReadError, SourceError
from converter.manifest import Manifest
from converter.reading.ahead import map_row_groups
from converter.reading.checks import place_of_row
from converter.reading.data_files import DataFiles
from converter.reading.decoding import said, undecodable_error, undecodable_rows
from converter.scans.columns import read_columns
from converter.selection import Mask, select_some
from converter.storage.directory import Storage

logger = logging.getLogger(__name__)


_CHUNK_ROWS = 64

_LOOKED_AT_ROWS, _SAMPLE_ROWS, _SAMPLE_SECONDS = 256, 10, 0.2
"""Of a row group, how many rows are looked at and how many are decoded; and for how long, all row groups together."""

_MOST_ROW_BYTES = 128 << 10
"""Of larger rows none is looked at: Arrow decodes a page at least, which may hold a thousand rows."""

_PICTURE_FACTOR = 12
"""A JPEG of ordinary quality has two bits for each pixel of three bytes."""


def with_decoders(storage: Storage, manifest: Manifest, decode: Mapping[str, Decoder]) -> Manifest:
    """The manifest with its columns decoded as the user says, in addition to what an entry's manifest says.

    Rows that decoders with `on_error="skip"` cannot decode are not live.

    Raises:
        ReadError: the first row that settles a decoder is none of its kind.
        SourceError: no row can be decoded.
        ValueError: an entry needs a decoder of the user's own, which was not given.
    """
    decoders = {**manifest.decoders, **decode}
    for name, decoder in decoders.items():
        if isinstance(decoder, NamedDecoder):
            raise ValueError(  # noqa: TRY004  # An argument is missing.
                f"Column {name!r} was declared with a decoder of your own, {decoder.name}, whose code is not stored. "
                f"Pass it again: decode={{{name!r}: …}}."
            )
        if isinstance(decoder, NumPy) and not is_settled(decoder):
            decoders[name] = _settled(storage, manifest, name, decoder)
            check_decoder(name, decoders[name])
    decoded = replace(manifest, decoders=decoders)
    skipping = [name for name, decoder in decoders.items() if skips_errors(decoder)]
    if skipping:
        decoded = _without_undecodable(storage, decoded, skipping)
    ragged = [name for name, decoder in decoders.items() if decoder.shape is None]
    return replace(decoded, decoded_bytes=_decoded_bytes(storage, decoded, ragged)) if ragged else decoded


def _decoded_bytes(storage: Storage, manifest: Manifest, names: Sequence[str]) -> dict[str, int]:
    """`Manifest.decoded_bytes` of columns whose rows differ in shape: from some rows of a local dataset.

    The mean and the standard deviation: a batch of rows is hardly ever larger. On a store, where a look would fetch
    whole columns, and of large rows by the bytes in the files.
    """
    found: dict[str, int] = {}
    for name in names:
        decoder, statistics = manifest.decoders[name], manifest.statistics.get(name)
        sizes = _sampled(storage, manifest, name) if storage.is_local else []
        if sizes:
            found[name] = max(1, int(np.mean(sizes) + np.std(sizes)))
        elif statistics is not None and statistics.num_bytes is not None and manifest.num_rows:
            factor = _PICTURE_FACTOR if isinstance(decoder, Image) else 1
            found[name] = max(1, factor * statistics.num_bytes // manifest.num_rows)
    return found


def _sampled(storage: Storage, manifest: Manifest, name: str) -> list[int]:
    """The sizes of some decoded rows, of the first, a middle and the last row group; empty if none can be decoded.

    Who reads the column gets the errors.
    """
    sizes: list[int] = []
    until = math.inf
    live_groups = np.flatnonzero(manifest.live_rows > 0)
    files = DataFiles(storage, manifest, [manifest.schema[name]])
    statistics = manifest.statistics.get(name)
    if statistics is not None and (statistics.num_bytes or 0) > _MOST_ROW_BYTES * manifest.num_rows:
        return []
    for row_group in sorted({int(group) for group in live_groups[[0, len(live_groups) // 2, -1]]}):
        with contextlib.suppress(ConverterError, OSError, pa.ArrowException):
            live = np.flatnonzero(_live(manifest, row_group)[:_LOOKED_AT_ROWS])
            table = read_columns(files, row_group, most_rows=_LOOKED_AT_ROWS)
            values = pc.cast(table.column(name).combine_chunks(), pa.large_binary()).take(live).drop_null()
            for row in range(0, len(values), -(-len(values) // _SAMPLE_ROWS) or 1):
                if time.monotonic() > until:
                    return sizes
                with contextlib.suppress(Exception):
                    decoded = decode_rows(manifest.decoders[name], values[row : row + 1], None) or ()
                    sizes += [array.nbytes for array in decoded]
                # The first may import a library.
                until = min(until, time.monotonic() + _SAMPLE_SECONDS)
    return sizes


def _settled(storage: Storage, manifest: Manifest, name: str, decoder: NumPy) -> NumPy:
    """The decoder with the dtype and shape of the first live row that it can decode, if it skips others."""
    files = DataFiles(storage, manifest, [manifest.schema[name]])
    first_error: ReadError | None = None
    for row_group in np.flatnonzero(manifest.live_rows > 0).tolist():
        column = read_columns(files, row_group).column(name)
        live = np.flatnonzero(_live(manifest, row_group))
        for row in live[np.asarray(pc.is_valid(column))[live]].tolist():
            try:
                return settled(decoder, column[row].as_buffer())
            except Exception as error:
                number = int(manifest.row_group_rows[:row_group].sum()) + row
                first_error = first_error or undecodable_error(storage, manifest, number, error, (name, decoder))
                if not skips_errors(decoder):
                    raise first_error from error
    if first_error is not None:
        raise _nothing_left([name]) from first_error
    raise SourceError(
        f"decode: all rows of column {name!r} are null, so its dtype and shape are unknown. Pass "
        "NumPy(dtype, shape), e.g. NumPy('float32', (28, 28)).",
        column=name,
    )


def _live(manifest: Manifest, row_group: int) -> Mask:
    num_rows = int(manifest.row_group_rows[row_group])
    return np.ones(num_rows, np.bool_) if manifest.selection is None else manifest.selection.mask(row_group, num_rows)


def _without_undecodable(storage: Storage, manifest: Manifest, names: list[str]) -> Manifest:
    """The manifest whose live rows can all be decoded in the columns `names`, by one pass over them."""
    files = DataFiles(storage, manifest, [manifest.schema[name] for name in names])
    firsts: dict[str, tuple[int, Exception]] = {}
    counts, present = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    lock = threading.Lock()

    def mask_row_group(row_group: int, given_up: threading.Event) -> Mask:
        table, mask = read_columns(files, row_group, given_up), _live(manifest, row_group)
        for name in names:
            values = pc.cast(table.column(name).combine_chunks(), pa.large_binary())
            with lock:
                present[name] += int((mask & np.asarray(pc.is_valid(values))).sum())
            bad = [
                (first + row, error)
                for first in range(0, len(values), _CHUNK_ROWS)
                for row, error in undecodable_rows(manifest.decoders[name], values[first : first + _CHUNK_ROWS])
                if mask[first + row]
            ]
            if bad:
                start = int(manifest.row_group_rows[:row_group].sum())
                with lock:
                    counts[name] += len(bad)
                    firsts[name] = min(firsts.get(name, (1 << 62, bad[0][1])), (start + bad[0][0], bad[0][1]), key=_row)
                mask[[row for row, _ in bad]] = False
        return mask

    wanted = np.flatnonzero(manifest.live_rows > 0).tolist()
    masks = dict(zip(wanted, map_row_groups(mask_row_group, wanted), strict=True))
    for name, (row, error) in firsts.items():
        if isinstance(error, WrongDecoderError) and counts[name] == present[name]:
            raise TypeError(
                f"decode: {manifest.decoders[name]!r} of column {name!r} is no decoder: {error}."
            ) from error
        logger.warning(
            "Column %r: %d of %d rows cannot be decoded and are left out. The first is %s: %s",
            name, counts[name], manifest.num_live_rows, place_of_row(storage, manifest, row), said(error),
        )  # fmt: skip
    if not firsts:
        return manifest
    selection = select_some(np.zeros(manifest.num_row_groups, np.int64), masks)
    if not selection.num_rows:
        raise _nothing_left(list(firsts))
    return replace(manifest, selection=selection)


def _nothing_left(names: list[str]) -> SourceError:
    shown = ", ".join(map(repr, names))
    return SourceError(
        f"No row of {shown} can be decoded, so there is nothing to train on. Check the bytes, or pass another decoder.",
        column=names[0],
    )


def _row(found: tuple[int, Exception]) -> int:
    return found[0]
