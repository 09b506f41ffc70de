"""What a Spark task runs before Spark's own Parquet writer: tensors become bytes, and categories codes of this task.

The task's report stands in a column of its own, in the last row: Spark collects it while it writes, and leaves the
column out of the files. So a batch is held back until the next one comes.

Why codes, if text with a dictionary needs no Python: in every epoch Arrow decodes indices of a dictionary at 2.2 ns
each. Plain codes are not decoded at all; they are copied at 0.1 ns in order, and gathered at 1.4.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa

from converter.portable.categories import new_vocabulary, report_of, settle
from converter.portable.digests import add_rows, digest_of
from converter.portable.tasks import FINDING, coalesce, freeze_garbage_collector, placed
from converter.portable.tensors import as_binary, encode
from converter.portable.undecodable import decode_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from converter.portable.records import ColumnSpec, PackReport, Vocabulary

REPORT_COLUMN = "report"

_FIRST_BYTES = 16 << 20
"""How much is collected until the values of categories are sorted, half of the executors' first row group.

Spark writes nothing meanwhile. Values that come later need a translation in each epoch, which then gives 0.7 of the
rows; 2 M rows of eight columns take equally long to write at 1, 4, 8 and 16 MB.
"""


def make_pack_batches(columns: list[ColumnSpec]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for `DataFrame.mapInArrow` that packs columns for Spark's own writer.

    A finding can only be raised here: `FINDING` marks it in the text.
    """

    def pack_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        freeze_garbage_collector()
        context = TaskContext.get()
        partition = 0 if context is None else context.partitionId()
        vocabularies = {
            index: new_vocabulary(column) for index, column in enumerate(columns) if column["categories"] is not None
        }
        sums: dict[str, int] = {}
        report: PackReport = {
            "partition": partition,
            "rows": 0,
            "nulls": [0] * len(columns),
            "digest": "",
            "categories": {},
        }

        def finish(packed: list[pa.Array], *, is_last: bool) -> pa.RecordBatch:
            num_rows = len(packed[0])
            for index, array in enumerate(packed):
                report["nulls"][index] += array.null_count
                add_rows(sums, str(index), array)
            report["rows"] += num_rows
            texts = pa.nulls(num_rows, pa.string())
            if is_last:
                report["digest"] = digest_of(sums)
                report["categories"] = {
                    columns[index]["name"]: report_of(vocabulary) for index, vocabulary in vocabularies.items()
                }
                texts = pa.concat_arrays([texts[1:], pa.array([json.dumps(report)], pa.string())])
            names = [*(f"c{index}" for index in range(len(columns))), REPORT_COLUMN]
            return pa.RecordBatch.from_arrays([*packed, texts], names=names)

        held: list[list[pa.Array]] = []
        num_bytes = 0
        for packed in _packed(batches, columns, vocabularies, partition):
            held.append(packed)
            num_bytes += sum(array.nbytes for array in packed)
            if all(vocabulary["is_settled"] for vocabulary in vocabularies.values()) or num_bytes >= _FIRST_BYTES:
                held = _settled(held, vocabularies)
                for earlier in held[:-1]:
                    yield finish(earlier, is_last=False)
                held = held[-1:]
        held = _settled(held, vocabularies)
        for packed in held[:-1]:
            yield finish(packed, is_last=False)
        if held:
            yield finish(held[-1], is_last=True)

    return pack_batches


def _packed(
    batches: Iterator[pa.RecordBatch],
    columns: list[ColumnSpec],
    vocabularies: dict[int, Vocabulary],
    partition: int,
) -> Iterator[list[pa.Array]]:
    """The columns of each batch as they are stored, without rows that cannot be decoded."""
    rows_seen = 0
    for whole in coalesce(batches):
        batch, decoded, row_numbers = decode_first(whole, columns, {}, rows_seen)
        rows_seen += whole.num_rows
        if not batch.num_rows:
            continue
        packed = []
        for index, (column, array) in enumerate(zip(columns, batch.columns, strict=True)):
            values = decoded.get(column["name"]) or encode(array, column, vocabularies.get(index))
            if "finding" in values:
                found = placed(values["finding"], column["name"], row_numbers, partition)
                raise ValueError(FINDING + json.dumps(found))
            packed.append(values["array"] if "array" in values else as_binary(values, fixed=None))
        yield packed


def _settled(held: list[list[pa.Array]], vocabularies: dict[int, Vocabulary]) -> list[list[pa.Array]]:
    """The batches with codes in the order of the values, which are sorted once."""
    for index, vocabulary in vocabularies.items():
        codes = settle(vocabulary)
        if codes is not None:
            for packed in held:
                packed[index] = codes.take(packed[index])
    return held
