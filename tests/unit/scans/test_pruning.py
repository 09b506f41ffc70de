"""Files and row groups that a filter excludes are not read, and no row is lost by it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from converter import DatasetConverter, make_delta_converter, make_parquet_converter
from converter.errors import ReadError, SourceError
from converter.reading.gather import Array
from converter.scans import filters as scans_filters
from converter.scans import passes as scans_passes
from converter.scans import pruning
from converter.sources.delta import files
from tests.unit.scans.tables import (
    _COMPARE,
    INF,
    NAN,
    passes,
    rows_of,
    rows_selected,
    rows_that,
    sorted_rows,
    write_table,
)

# Row groups that are not read


def damage(converter: DatasetConverter, row_groups: Iterable[int]) -> None:
    """Overwrite the pages of some row groups; footers and sizes stay."""
    manifest = converter._manifest
    for row_group in row_groups:
        name = manifest.file_names[int(manifest.row_group_file[row_group])]
        path = Path(f"{converter._storage.url}/{name}".removeprefix("file://"))
        group = pq.read_metadata(path).row_group(manifest.row_group_in_file(row_group))
        data = bytearray(path.read_bytes())
        for index in range(group.num_columns):
            chunk = group.column(index)
            start = chunk.data_page_offset
            if chunk.dictionary_page_offset is not None:
                start = min(start, chunk.dictionary_page_offset)
            data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
        path.write_bytes(data)


@pytest.mark.parametrize(
    "filters",
    [
        [("id", ">=", 70)],
        [("half", ">=", 35.0)],
        [[("id", ">", 75)], [("half", ">=", 36.0), ("id", "<", 80)]],
        [("id", "in", [71, 98])],
        pc.field("id") > 88,
        (pc.field("id") > 20) & (pc.field("half") > 36),
    ],
    ids=str,
)
def test_a_row_group_that_its_footer_rules_out_is_not_read(tmp_path: Path, filters: Any) -> None:
    with sorted_rows(tmp_path) as converter:
        expected = rows_that(converter, filters)
        assert expected
        assert min(expected) >= 70
        damage(converter, range(7))
        with pytest.raises(ReadError, match="cannot be decoded"):
            converter.where([("id", ">=", 60)])
        assert len(converter.where(filters)) == len(expected)


def test_no_row_group_is_read_to_say_that_no_row_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[int] = []
    evaluate = scans_filters.evaluate

    def counted(expression: Any, table: pa.Table) -> Any:
        evaluated.append(table.num_rows)
        return evaluate(expression, table)

    monkeypatch.setattr(scans_passes, "evaluate", counted)
    monkeypatch.setattr(pruning, "evaluate", counted)
    with sorted_rows(tmp_path) as converter:
        with pytest.raises(SourceError, match=r"No row of .* passes the filters"):
            converter.where([("id", ">", 100)])
        assert evaluated == []
        part = converter.where([("id", ">=", 85)])
        assert evaluated == [10, 10]
        # Nor is one that an earlier filter emptied.
        evaluated.clear()
        assert rows_of(part.where([("id", "!=", 97)])) == [row for row in range(85, 100) if row != 97]
        assert evaluated == [10, 10]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_row_group_without_a_live_row_is_not_read_for_a_batch(tmp_path: Path, shuffle: bool) -> None:
    with sorted_rows(tmp_path) as converter:
        part = converter.where([("id", "in", [3, 31, 64, 99])])
        damage(converter, [1, 2, 4, 5, 7, 8])
        for window in (1, 3, "all", None):
            assert sorted(rows_of(part, shuffle=shuffle, shuffle_window_rows=window)) == [3, 31, 64, 99]


def test_nan_and_null_are_in_no_footer_and_yet_are_found(tmp_path: Path) -> None:
    x = [1.0, NAN, 2.0, 5.0, 6.0, 7.0, NAN, NAN, NAN, 8.0, None, 9.0]
    n = [1, 2, 3, None, 5, 6, 7, 8, 9, None, None, None]
    with write_table(tmp_path, {"x": ("float32", x), "n": ("int32", n)}, step=3) as converter:
        assert converter._manifest.num_row_groups == 4
        for threshold in (-1.0, 1.5, 6.0, 100.0):
            nan_too = [row for row, value in enumerate(x) if value is not None and not value <= threshold]
            assert rows_that(converter, ~(pc.field("x") <= threshold)) == nan_too
            other = [row for row, value in enumerate(x) if value is not None and value != threshold]
            assert rows_that(converter, [("x", "!=", threshold)]) == other
        assert rows_that(converter, pc.field("x").is_nan()) == [1, 6, 7, 8]
        # A list holds what is in it.
        assert rows_that(converter, [("x", "in", [NAN])]) == [1, 6, 7, 8]
        assert rows_that(converter, pc.field("n").is_null()) == [3, 9, 10, 11]
        assert rows_that(converter, pc.field("n").is_null() | (pc.field("n") == 8)) == [3, 7, 9, 10, 11]
        assert rows_that(converter, [("n", "!=", 5), ("x", "<", 8.5)]) == [0, 2, 5]
        # A part has no statistics of its own yet, and its footers have no NaN either.
        part = converter.where([("n", ">", 0)])
        assert rows_that(part, ~(pc.field("x") <= 100.0)) == [1, 6, 7, 8]


def test_bounds_still_rule_out_floats_that_are_known_to_hold_no_nan(tmp_path: Path) -> None:
    """A cache counts NaNs when it is written; nothing else says that there are none."""
    x = [float(row) for row in range(12)]
    opened: list[int] = []
    for name, values in (("without", x), ("with", [*x[:-1], NAN])):
        with write_table(tmp_path / name, {"x": ("float32", values)}, step=3) as converter:
            expression = scans_filters.comparisons_of(
                [("x", ">", 8.5)], converter._manifest, pa.schema({"x": pa.float32()})
            )
            opened.append(expression[0][0].may_keep is not None)
            assert rows_that(converter, [("x", ">", 8.5)]) == [9, 10, 11]
    assert opened == [True, False]


# NaN and the statistics of files


def odd_numbers(seed: int) -> dict[str, list[Any]]:
    """Columns in runs of five rows: each of NaN, null, zeros or infinities alone, of one number, or mixed."""
    chance = np.random.default_rng(seed)

    def runs(numbers: Sequence[float]) -> list[Any]:
        few = numbers[: int(chance.integers(1, 4))]
        kinds: list[list[Any]] = [
            [NAN], [None], [0.0, -0.0], [-0.0], [INF], [-INF], [NAN, None], [NAN, INF], [NAN, *few], [None, *few],
            list(few), [few[0]], [*numbers, NAN, None, INF, -0.0],
        ]  # fmt: skip
        chosen = [kinds[number] for number in chance.integers(0, len(kinds), 12)]
        return [kind[number] for kind in chosen for number in chance.integers(0, len(kind), 5)]

    doubles = [*chance.choice([-2.5, -1.0, 0.1, 1 / 3, 1.0, 7.25, 1e300], 4).tolist(), 2.0]
    singles = [*chance.choice([-2.5, -1.0, 0.5, 0.25, 1.0, 7.25, 1e30], 4).astype(np.float32).tolist(), 2.0]
    whole = chance.integers(-3, 4, 60).tolist()
    return {
        "id": list(range(60)),
        "x": runs(doubles),
        "f": runs(singles),
        "n": [None if chance.random() < 0.2 else one for one in whole],
        # One value for each run of five rows: a partition column.
        "p": [one for one in chance.choice(np.array([NAN, 1.0, None, -INF, 2.5, -0.0]), 12) for _ in range(5)],
    }


def random_filters(chance: np.random.Generator, columns: Mapping[str, Sequence[Any]], *, names: str = "xfnp") -> Any:
    """Tuples in a list, or lists of them."""

    def value(name: str) -> Any:
        present = [one for one in columns[name] if one is not None]
        others = [NAN, 0.0, -0.0, INF, -INF, 1.0, 2.25] if name != "n" else [NAN, INF, 0.5, 0, 2, -1.0]
        pool = present if present and chance.random() < 0.5 else others
        return pool[int(chance.integers(len(pool)))]

    def comparison() -> tuple[str, str, Any]:
        name = names[int(chance.integers(len(names)))]
        sign = str(chance.choice(list(_COMPARE)))
        if "in" not in sign:
            return name, sign, value(name)
        some = [value(name) for _ in range(int(chance.integers(0, 4)))]
        return name, sign, [*some, None] if chance.random() < 0.15 else some

    groups = [[comparison() for _ in range(int(chance.integers(1, 4)))] for _ in range(int(chance.integers(1, 4)))]
    return groups[0] if len(groups) == 1 else groups


ODD_TYPES = {"id": pa.int64(), "x": pa.float64(), "f": pa.float32(), "n": pa.int32(), "p": pa.float64()}
AS_ELSEWHERE = pytest.mark.long("other layouts show as much in less time")
ODD_LAYOUTS: dict[str, Callable[[Path, pa.Table], Any]] = {}


def _odd_layout(name: str) -> Callable[[Callable[[Path, pa.Table], Any]], Callable[[Path, pa.Table], Any]]:
    def note(write: Callable[[Path, pa.Table], Any]) -> Callable[[Path, pa.Table], Any]:
        ODD_LAYOUTS[name] = write
        return write

    return note


@_odd_layout("a cache")
def _as_cache(path: Path, table: pa.Table) -> Any:
    dtypes = {"id": "int64", "x": "float64", "f": "float32", "n": "int32", "p": "float64"}
    columns = {name: (dtype, table[name].to_pylist()) for name, dtype in dtypes.items()}
    return write_table(path, columns, step=20, row_group_bytes=5 * 36)


@_odd_layout("Parquet")
def _as_parquet(path: Path, table: pa.Table, **options: Any) -> Any:
    for number in range(2):
        rows = table.slice(30 * number, 30)
        pq.write_table(rows, path / f"{number}.parquet", row_group_size=5, **options)
    return make_parquet_converter(path)


@_odd_layout("Parquet without statistics")
def _as_parquet_without_statistics(path: Path, table: pa.Table) -> Any:
    return _as_parquet(path, table, write_statistics=["x"])


@_odd_layout("folders")
def _as_folders(path: Path, table: pa.Table) -> Any:
    for start in range(0, 60, 5):
        (value,) = set(map(str, table["p"].slice(start, 5).to_pylist()))
        said = {"nan": "NaN", "None": "__HIVE_DEFAULT_PARTITION__", "-inf": "-Infinity"}.get(value, value)
        folder = path / f"p={said}"
        folder.mkdir(exist_ok=True)
        pq.write_table(table.slice(start, 5).drop_columns("p"), folder / f"{start}.parquet", row_group_size=3)
    return make_parquet_converter(path)


@_odd_layout("Delta")
def _as_delta(path: Path, table: pa.Table, *, is_whole: bool = True, **options: Any) -> Any:
    for start in range(0, 60, 10):
        write_deltalake(str(path), table.slice(start, 10), mode="append", **options)
    with pytest.MonkeyPatch.context() as patch:
        if not is_whole:
            patch.setattr(files, "_LARGE_FILE_BYTES", 0)
        return make_delta_converter(path)


@_odd_layout("Delta by row groups")
def _as_delta_by_row_groups(path: Path, table: pa.Table) -> Any:
    return _as_delta(path, table, is_whole=False, partition_by=["p"])


FEW_LAYOUTS = [
    layout if layout in ("a cache", "Parquet", "Delta by row groups") else pytest.param(layout, marks=AS_ELSEWHERE)
    for layout in ODD_LAYOUTS
]


def ids_of(converter: DatasetConverter) -> Array:
    """All ids, in the dataset's order: files of folders and of tables are in an order of their own."""
    return np.concatenate([batch["id"] for batch in converter.make_batch_reader(columns=["id"])])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long("the same with other numbers"))])
@pytest.mark.parametrize("layout", ODD_LAYOUTS)
def test_filters_leave_the_rows_of_sparks_rule_whatever_statistics_say(tmp_path: Path, layout: str, seed: int) -> None:
    columns = odd_numbers(seed)
    table = pa.table({name: pa.array(columns[name], kind, from_pandas=False) for name, kind in ODD_TYPES.items()})
    chance = np.random.default_rng(seed)
    num_found = 0
    with ODD_LAYOUTS[layout](tmp_path, table) as converter:
        ids = ids_of(converter)
        for _ in range(15):
            filters = random_filters(chance, columns)
            expected = [row for row in range(60) if passes(row, filters, columns)]
            assert sorted(ids[rows_selected(converter, filters)]) == expected, filters
            num_found += 0 < len(expected) < 60
    assert num_found > 4


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_nan_passes_and_fails_every_comparison_as_in_spark(tmp_path: Path, layout: str) -> None:
    columns = odd_numbers(3)
    columns["p"] = [[NAN, 1.0, None, -0.0][row // 5 % 4] for row in range(60)]
    table = pa.table({name: pa.array(columns[name], kind, from_pandas=False) for name, kind in ODD_TYPES.items()})
    with ODD_LAYOUTS[layout](tmp_path, table) as converter:
        ids = ids_of(converter)
        for name, sign in itertools.product("xfnp", _COMPARE):
            for value in ([NAN, 1.0], [1.0]) if "in" in sign else (NAN, 1.0):
                expected = [row for row in range(60) if passes(row, [(name, sign, value)], columns)]
                assert sorted(ids[rows_selected(converter, [(name, sign, value)])]) == expected, (name, sign, value)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", FEW_LAYOUTS)
def test_expressions_leave_the_rows_of_arrows_rule_whatever_statistics_say(tmp_path: Path, layout: str) -> None:
    columns = odd_numbers(5)
    table = pa.table({name: pa.array(columns[name], kind, from_pandas=False) for name, kind in ODD_TYPES.items()})
    chance = np.random.default_rng(5)
    with ODD_LAYOUTS[layout](tmp_path, table) as converter:
        ids = ids_of(converter)
        for _ in range(20):
            # Arrow has no rule for a list of none.
            filters = [group for group in (random_filters(chance, columns) for _ in range(2))
                       if "[]" not in str(group) and "None" not in str(group)]  # fmt: skip
            if not filters:
                continue
            one, *others = map(pq.filters_to_expression, filters)
            expression = functools.reduce(lambda left, right: left & ~right, others, ~one)
            expected = table.filter(expression)["id"].to_pylist()
            assert sorted(ids[rows_selected(converter, expression)]) == expected, expression


@pytest.mark.parametrize("layout", ["a cache", "Parquet"])
def test_row_groups_with_nan_are_skipped_where_nan_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    columns: dict[str, list[Any]] = dict.fromkeys(ODD_TYPES, [0.0] * 60)
    columns |= {"id": list(range(60)), "x": [NAN if row == 22 else row / 4 for row in range(60)]}
    columns["f"] = [row / 4 for row in range(60)]
    table = pa.table({name: pa.array(columns[name]).cast(kind) for name, kind in ODD_TYPES.items()})
    evaluated: list[int] = []
    evaluate = scans_filters.evaluate

    def counted(expression: Any, rows: pa.Table) -> Any:
        evaluated.append(rows.num_rows)
        return evaluate(expression, rows)

    monkeypatch.setattr(scans_passes, "evaluate", counted)
    monkeypatch.setattr(pruning, "evaluate", counted)
    with ODD_LAYOUTS[layout](tmp_path, table) as converter:
        assert converter._manifest.row_group_rows.tolist() == [5] * 12
        for filters, num_read in (
            ([("x", "<", 1.0)], 1),
            ([("x", "=", 3.0)], 1),
            ([("x", "in", [3.0, 7.0])], 2),
            ([("x", ">=", 3.0), ("x", "<", 4.0)], 2),
            ([("x", ">", 13.0), ("x", "<=", INF)], 2),
            ([[("x", ">", 13.0), ("x", "!=", NAN)], [("x", "<", 1.0)]], 3),
            ([("x", ">", 13.0)], 12),
            ([("x", "in", [NAN, 3.0])], 12),
            ([("x", ">", 13.0), ("id", "<", 10)], 2),
            ((pc.field("x") > 13.0) & (pc.field("id") > 50), 2),
            # A cache knows that no row of "f" is NaN; files that others wrote do not say it.
            ([("f", ">", 13.0)], 2 if layout == "a cache" else 12),
            (pc.field("f") > 13.0, 2 if layout == "a cache" else 12),
        ):
            evaluated.clear()
            rows_selected(converter, filters)
            assert len(evaluated) == num_read, filters


def test_zeros_are_found_by_an_expression_in_a_row_group_of_nothing_else(tmp_path: Path) -> None:
    zeros = [0.0, -0.0, 0.0, 1.0, 2.0, 3.0]
    with write_table(tmp_path, {"x": ("float64", zeros)}, step=3) as converter:
        assert rows_that(converter, pc.field("x").isin([0.0])) == [0, 2]
        assert rows_that(converter, pc.field("x").isin([-0.0])) == [1]
        assert rows_that(converter, [("x", "in", [-0.0])]) == [0, 1, 2]
