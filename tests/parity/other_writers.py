"""Random Parquet files of other writers: a converter, pyarrow, DuckDB and Polars read the same cells, bit by bit.

    python -m tests.parity.other_writers --cases 500 --seed 1     # one line of a table; before it what differs
    python -m tests.parity.other_writers --case 1:417             # one case again

A case is drawn from its seed and number alone: a table, one of three writers and its options, filters. Each reader has
to give the same cells; a converter also when it shuffles, and those of the rows that DuckDB's WHERE leaves.

What the others do wrongly (pyarrow 26.0.1, DuckDB 2.0.1, Polars 2.1.0) is left out of the comparison, by name:

- Polars reads times of 96 bits as nanoseconds: those before 1677 and after 2262 become the last one it has.
- Polars has no decimals of more than 38 digits, and DuckDB reads them as doubles of its own making.
- DuckDB writes a null ARRAY as several values, which is no Parquet: `write_with_duckdb` makes a list of it.
- pyarrow's pages of a few bytes may begin a row group's lists with an empty page, and then pyarrow reads no other: a
  converter, which reads through pyarrow, misses the rows and refuses the file.
- DuckDB's second version packs deltas of INT32 into more than 32 bits, which is no Parquet: pyarrow refuses them, and
  so does a converter.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from converter import ConverterError, DatasetConverter, ReadError, SourceError, make_parquet_converter
from tests.parity.other_files import WRITERS
from tests.parity.other_filters import ask_duckdb, make_filters
from tests.parity.other_frames import make_table
from tests.parity.other_program import run_program
from tests.parity.other_readers import (
    Cells,
    Leaf,
    cells_of_table,
    difference,
    leaves_of,
    read_in_order,
    read_with_duckdb,
    read_with_polars,
    read_with_pyarrow,
)

_NUM_FILTERS = 4
_MOST_NS = 2**63 // 1000 - 86_400_000_000
"""In microseconds around 1970 what Polars reads of 96 bits, but for the first and the last day."""


def run_case(seed: int, number: int, folder: Path, done: Counter[str]) -> list[str]:
    """Write, read and filter the file of a case in a folder of its own; what differs, in words."""
    chance = random.Random(f"{seed} {number}")
    writer = chance.choice(list(WRITERS))
    write, kinds = WRITERS[writer]
    table = make_table(chance, chance.sample(kinds, 6), num_rows=chance.choice((0, 1, 8, 65, 65, 200)))
    path = folder / "x.parquet"
    options = write(table, path, chance)
    done[f"files of {writer}"] += 1
    about = f"{writer} {options}, {', '.join(f'{field.name!r} {field.type}' for field in table.schema)}"
    return [f"{what} ({about})" for what in check_file(path, chance, done)]


def check_file(path: Path, chance: random.Random, done: Counter[str]) -> list[str]:
    """What differs between the readers of a file."""
    try:
        read = read_with_pyarrow(path)
    except (OSError, pa.ArrowInvalid) as error:
        is_duckdb = "DuckDB" in pq.read_metadata(path).created_by
        if not is_duckdb and "got length 0" not in str(error):
            raise
        done[f"files of {'DuckDB' if is_duckdb else 'pyarrow'} that are refused"] += 1
        return _refused(path, error)
    leaves, expected = leaves_of(read.schema), cells_of_table(read)
    done["cells"] += sum(map(len, expected.values()))
    is_old = "int96" in str(pq.read_metadata(path).schema).lower()
    wide = {leaf.column for leaf in leaves.values() if pa.types.is_decimal256(leaf.type)}
    columns = [name for name in read.column_names if name not in wide]
    narrow = {name: cells for name, cells in expected.items() if leaves[name].column in columns}
    found = [
        _compared("DuckDB", lambda: read_with_duckdb(path, columns), narrow),
        _compared("Polars", lambda: read_with_polars(path, columns), narrow, is_cut=is_old),
    ]
    # Footers do not show whether the lists of a column have one length.
    shapes = {name: None for name, leaf in leaves.items()
              if leaf.depth and not any(kind in str(leaf.type) for kind in ("string", "binary"))}  # fmt: skip
    try:
        with make_parquet_converter(path, float_dtype=None, shapes=shapes) as converter:
            found.append(_prefixed("a converter", difference(_read(converter, chance), expected)))
            found.append(_prefixed("a converter that shuffles", _shuffled(converter, expected, chance)))
            found.extend(_filtered(converter, path, expected, leaves, chance, done))
    except ConverterError as error:
        if read.num_rows or "has no rows" not in str(error):
            found.append(f"a converter raises {error!r:.500}")
    return [what for what in found if what]


def _refused(path: Path, error: Exception) -> list[str]:
    """What is wrong with the error for a file that pyarrow cannot read."""
    try:
        with make_parquet_converter(path, float_dtype=None) as converter:
            read_in_order(converter)
    except ReadError as ours:
        named = str(path) in str(ours) and len(str(ours).splitlines()) <= 3
        return [] if named else [f"a converter raises {ours!r:.500}"]
    return [f"a converter reads what makes pyarrow raise {error!r:.300}"]


def _prefixed(who: str, what: str | None) -> str | None:
    return what and f"{who}: {what}"


def _compared(who: str, read: Callable[[], pa.Table], expected: Cells, *, is_cut: bool = False) -> str | None:
    try:
        table = read()
    except (Exception, pl.exceptions.PanicException) as error:  # noqa: BLE001 (what a reader raises is its difference)
        return f"{who} raises {error!r:.300}"
    cells, leaves = cells_of_table(table), leaves_of(table.schema)
    if is_cut:
        cells, expected = (_within_nanoseconds(each, leaves) for each in (cells, expected))
    return _prefixed(who, difference(cells, expected))


def _within_nanoseconds(cells: Cells, leaves: dict[str, Leaf]) -> Cells:
    """The cells with None for each time that nanoseconds cannot count."""

    def cut(cell: object) -> object:
        if isinstance(cell, list):
            return [cut(inner) for inner in cell]
        return cell if isinstance(cell, int) and abs(cell) < _MOST_NS else None

    return {name: [cut(cell) for cell in column] if pa.types.is_timestamp(leaves[name].type) else column
            for name, column in cells.items()}  # fmt: skip


def _read(converter: DatasetConverter, chance: random.Random) -> Cells:
    return read_in_order(converter, batch_size=chance.choice((1, 7, 1000)))


def _shuffled(converter: DatasetConverter, expected: Cells, chance: random.Random) -> str | None:
    """The rows of an epoch in another order, put back in order."""
    found = read_in_order(
        converter, batch_size=chance.choice((7, 1000)), shuffle=True, seed=chance.randrange(100), with_row_index="row"
    )
    numbers = found.pop("row")
    places = sorted(range(len(numbers)), key=numbers.__getitem__)
    if [numbers[place] for place in places] != list(range(len(numbers))):
        return "its rows are not each row once"
    return difference({name: [cells[place] for place in places] for name, cells in found.items()}, expected)


def _filtered(
    converter: DatasetConverter,
    path: Path,
    expected: Cells,
    leaves: dict[str, Leaf],
    chance: random.Random,
    done: Counter[str],
) -> list[str]:
    filters = make_filters(chance, expected, leaves, _NUM_FILTERS)
    found = []
    for groups, answer in zip(filters, ask_duckdb(path, expected, leaves, filters), strict=True):
        try:
            part = converter.where(groups)
            rows = [row for batch in part.make_batch_reader(columns=["id"]) for row in batch["id"].tolist()]
        except SourceError as error:
            if "passes the filters" not in str(error):
                raise
            rows = []
        done["filters"] += 1
        done["filters that leave some rows"] += 0 < len(answer.of_cells) < len(expected["id"])
        if answer.of_file not in (None, answer.of_cells):
            done["filters of which DuckDB skips rows of the file wrongly"] += 1
        if rows != answer.of_cells:
            found.append(f"{groups} leaves {rows}, and in DuckDB {answer.of_cells}")
    return found


if __name__ == "__main__":
    run_program("other_writers", __doc__, run_case, num_cases=100)
