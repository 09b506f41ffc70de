"""Leaves out the rows that a decoder with `on_error="skip"` cannot decode, while executors write the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from converter.portable.tensors import decode_alone, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converter.portable.records import ColumnSpec, Encoded, Numbers, Skipped


def decode_first(
    batch: pa.RecordBatch, columns: Sequence[ColumnSpec], skipped: dict[str, Skipped], rows_before: int
) -> tuple[pa.RecordBatch, dict[str, Encoded], Numbers]:
    """The batch without such rows, its columns that are decoded by then, and the number of each row in the partition.

    Adds to `skipped`. A row is looked at alone only if its batch cannot be decoded. Whatever else is wrong is a finding
    among the columns.
    """
    skipping = [(index, column) for index, column in enumerate(columns) if column["skips_errors"]]
    encoded = {column["name"]: encode(batch.column(index), column) for index, column in skipping}
    good = np.ones(batch.num_rows, np.bool_)
    for index, column in skipping:
        values = encoded[column["name"]]
        if "finding" not in values or values["finding"]["kind"] != "undecodable":
            continue
        errors = decode_alone(batch.column(index), column)
        is_decoder_wrong = any(text.startswith("WrongDecoderError") for text in errors.values())
        if is_decoder_wrong and len(errors) == batch.num_rows - batch.column(index).null_count:
            continue  # Its rows are not to blame.
        if not errors:
            continue  # Alone, each can be decoded: the finding stands.
        rows = list(errors)
        good[rows] = False
        before = skipped.get(column["name"])
        skipped[column["name"]] = {
            "count": len(rows) + (before["count"] if before else 0),
            "row": before["row"] if before else rows_before + rows[0],
            "found": before["found"] if before else errors[rows[0]],
        }
    numbers = rows_before + np.flatnonzero(good)
    if len(numbers) == batch.num_rows:
        return batch, encoded, numbers
    kept = batch.filter(pa.array(good))
    if not kept.num_rows:
        return kept, {}, numbers
    return kept, {column["name"]: encode(kept.column(index), column) for index, column in skipping}, numbers
