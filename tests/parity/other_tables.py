"""Random Delta tables of delta-rs: a converter, deltalake and Polars read the same cells of each version, bit by bit.

    python -m tests.parity.other_tables --cases 100 --seed 1

A case is a history of a table with or without partitions: appends, overwrites, deletes, updates, merges, columns that
are added, checkpoints, compaction and restored versions. Rows are compared in the order of `id`. deltalake 1.6 writes
neither deletion vectors nor column mapping; the tables that Spark made have those.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake

from converter import ConverterError, NullValueError, make_delta_converter
from tests.parity.other_frames import make_table
from tests.parity.other_program import run_program
from tests.parity.other_readers import Cells, cells_of_table, difference, leaves_of, read_in_order

_LEAVES = ["bool", "int8", "int16", "int32", "int64", "float32", "float64", "string", "binary", "decimal 4",
           "decimal 18", "decimal 38", "date", "time us UTC", "time us None"]  # fmt: skip
_PARTS = [
    "a",
    "a b",
    "x/y",
    "100%",
    "žluť 🐟",
    "a=b",
    ":*?",
    "%2F",
    "1,5",
    "[a]",
    "c'd\"e",
    "tail.",
    "#",
    "+",
    "",
    None,
]
"""Values of a partition by text. Delta keeps an empty one as a null."""

_PART_KINDS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text": (pa.string(), _PARTS),
    "number": (pa.int32(), [0, 1, -1, 2**31 - 1, -(2**31), None]),
    "flag": (pa.bool_(), [True, False, None]),
    "day": (pa.date32(), [0, -719_162, 2_932_896, -1, None]),
    "time": (pa.timestamp("us", "UTC"), [0, 1, -1, 1_700_000_000_123_456, None]),
}


def run_case(seed: int, number: int, folder: Path, done: Counter[str]) -> list[str]:
    """Make the table of a case in a folder, and read each of its versions; what differs, in words."""
    chance = random.Random(f"table {seed} {number}")
    shape = chance.getrandbits(32)
    by = chance.sample(list(_PART_KINDS), chance.choice((0, 0, 1, 1, 2)))
    drawn = chance.sample(_LEAVES, 5)
    next_id = [0]

    def rows(num_rows: int, *, wider: bool = False) -> pa.Table:
        """New rows, of the same columns each time."""
        table = _with_values(shape, chance, drawn, num_rows)
        ids = pa.array(range(next_id[0], next_id[0] + num_rows), pa.int64())
        next_id[0] += num_rows
        table = table.set_column(0, "id", ids)
        for name in by:
            kind, values = _PART_KINDS[name]
            cells = [chance.choice(values) for _ in range(num_rows)]
            table = table.append_column(name, pa.array(cells, pa.int64() if "time" in name else None).cast(kind)
                                        if name != "day" else pa.array(cells, pa.int32()).cast(kind))  # fmt: skip
        return table.append_column("later", pa.array(range(num_rows), pa.int16())) if wider else table

    path = str(folder / "table")
    options: dict[str, Any] = {"partition_by": by} if by else {}
    write_deltalake(path, rows(chance.randint(1, 40)), **options)
    history = ["write"]
    for _ in range(chance.randint(2, 7)):
        step = chance.choice(list(_STEPS))
        _STEPS[step](path, rows, chance, by)
        history.append(step)
    done["tables"] += 1
    found = []
    newest = DeltaTable(path).version()
    for version in range(newest + 1):
        what = _check_version(path, version, done)
        if what:
            found.append(f"version {version} of {newest}: {what} (by {by}, {history})")
    return found


def _with_values(shape: int, chance: random.Random, drawn: list[str], num_rows: int) -> pa.Table:
    """Other rows of the same columns: their types follow from `shape`."""
    same = make_table(random.Random(shape), drawn, num_rows=60)
    order = [chance.randrange(same.num_rows) for _ in range(num_rows)]
    table = same.take(pa.array(order, pa.int64()))
    plain = [index for index, field in enumerate(table.schema) if _has_delta(field.type)]
    return table.select(plain)


def _has_delta(kind: pa.DataType) -> bool:
    """Whether Delta has the type as it is."""
    return not pa.types.is_fixed_size_list(kind) and not pa.types.is_map(kind)


def _append(path: str, rows: Callable[..., pa.Table], chance: random.Random, by: list[str]) -> None:
    has_later = "later" in {field.name for field in DeltaTable(path).schema().fields}
    write_deltalake(path, rows(chance.randint(1, 30), wider=has_later), mode="append")


def _widen(path: str, rows: Callable[..., pa.Table], chance: random.Random, by: list[str]) -> None:
    write_deltalake(path, rows(chance.randint(1, 9), wider=True), mode="append", schema_mode="merge")


def _overwrite(path: str, rows: Callable[..., pa.Table], chance: random.Random, by: list[str]) -> None:
    write_deltalake(path, rows(chance.randint(1, 30)), mode="overwrite", schema_mode="overwrite")


def _delete(path: str, rows: Callable[..., pa.Table], chance: random.Random, by: list[str]) -> None:
    DeltaTable(path).delete(f"id % {chance.randint(2, 5)} = {chance.randint(0, 1)}")


def _update(path: str, rows: Callable[..., pa.Table], chance: random.Random, by: list[str]) -> None:
    updates = {name: "NULL" for name in by if name != "flag"} or {"id": "id + 1000000"}
    DeltaTable(path).update(updates=updates, predicate=f"id % {chance.randint(2, 4)} = 1")


def _merge(path: str, rows: Callable[..., pa.Table], chance: random.Random, by: list[str]) -> None:
    table = DeltaTable(path)
    names = [field.name for field in table.schema().fields]
    source = rows(chance.randint(1, 9), wider="later" in names)
    if chance.random() < 0.5:
        shifted = pa.array([chance.randrange(40) * 1000 + row for row in range(source.num_rows)], pa.int64())
        source = source.set_column(0, "id", shifted)
    merge = table.merge(source, predicate="s.id = t.id", source_alias="s", target_alias="t")
    merge.when_matched_update_all().when_not_matched_insert_all().execute()


def _checkpoint(path: str, rows: Callable[..., pa.Table], chance: random.Random, by: list[str]) -> None:
    DeltaTable(path).create_checkpoint()


def _compact(path: str, rows: Callable[..., pa.Table], chance: random.Random, by: list[str]) -> None:
    DeltaTable(path).optimize.compact(commit_properties=CommitProperties({"by": "test"}))


def _restore(path: str, rows: Callable[..., pa.Table], chance: random.Random, by: list[str]) -> None:
    table = DeltaTable(path)
    if table.version():
        table.restore(chance.randrange(table.version()))


_STEPS: dict[str, Callable[[str, Callable[..., pa.Table], random.Random, list[str]], None]] = {
    "append": _append, "widen": _widen, "overwrite": _overwrite, "delete": _delete, "update": _update,
    "merge": _merge, "checkpoint": _checkpoint, "compact": _compact, "restore": _restore,
}  # fmt: skip


def _check_version(path: str, version: int, done: Counter[str]) -> str | None:
    table = DeltaTable(path, version=version).to_pyarrow_table()
    expected = _in_order(cells_of_table(table))
    done["versions"] += 1
    done["cells"] += sum(map(len, expected.values()))
    polars = _in_order(cells_of_table(pl.scan_delta(path, version=version).collect().to_arrow()))
    if "text" in polars:
        # Polars 2.1.0 has an empty text where Delta's protocol says that a partition is null.
        polars["text"] = [cell or None for cell in polars["text"]]
    if what := difference(polars, expected):
        return f"Polars: {what}"
    leaves = leaves_of(table.schema)
    shapes = {name: None for name, leaf in leaves.items()
              if leaf.depth and not any(kind in str(leaf.type) for kind in ("string", "binary"))}  # fmt: skip
    try:
        with make_delta_converter(path, version=version, float_dtype=None, shapes=shapes) as converter:
            what = difference(_in_order(read_in_order(converter, batch_size=7)), expected)
            return what and f"a converter: {what}"
    except NullValueError as error:
        # Of a table only some footers are read, and null elements of lists are seen there alone.
        done["versions with null elements in other files"] += 1
        return None if "the footers that were read did not show any" in str(error) else repr(error)
    except ConverterError as error:
        is_empty = table.num_rows == 0 and "no rows" in str(error)
        return None if is_empty else f"a converter raises {error!r:.500}"


def _in_order(cells: Cells) -> Cells:
    """The rows in the order of their ids and, of two that are equal, of all cells."""
    names = list(cells)
    order = sorted(range(len(cells["id"])), key=lambda row: (cells["id"][row], repr([cells[n][row] for n in names])))
    return {name: [cells[name][row] for row in order] for name in names}


if __name__ == "__main__":
    run_program("other_tables", __doc__, run_case, num_cases=20)
