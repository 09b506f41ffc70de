"""Pictures of columns show NumPy's histograms and counts, whatever the names, the nulls and the size of the data."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.patches import Rectangle, StepPatch

from converter import CacheError, DatasetConverter, MissingDependencyError, make_parquet_converter, mix, plot
from converter.plot import distributions
from tests.columns import ALL, ID, Column
from tests.entries import write_converter

NUM_ROWS = 3000


def convert(folder: Path, table: pa.Table, row_group_size: int = 1000, **options: Any) -> DatasetConverter:
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "part.parquet", row_group_size=row_group_size)
    return make_parquet_converter(folder, **options)


def bins_of(axes: Any) -> tuple[np.ndarray, np.ndarray]:
    """The heights and the edges of a histogram, as they are drawn."""
    (patch,) = (patch for patch in axes.patches if isinstance(patch, StepPatch))
    values, edges, _ = patch.get_data()
    return values, edges


def counts_of(axes: Any) -> dict[str, float]:
    """The labels and the lengths of bars."""
    widths = [patch.get_width() for patch in axes.patches if isinstance(patch, Rectangle)]
    return dict(zip([label.get_text() for label in axes.get_yticklabels()], widths, strict=True))


def texts_of(axes: Any) -> str:
    return "\n".join([axes.get_title(), axes.get_xlabel(), *(text.get_text() for text in axes.texts)])


@pytest.fixture(params=["in one reading", "column by column"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small data are read once, larger ones by a pass over each column."""
    if request.param == "column by column":
        monkeypatch.setattr(distributions, "_SAMPLE_ROWS", NUM_ROWS - 1)


@pytest.mark.usefixtures("each_way")
def test_bars_are_numpys_histograms(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    numbers, digits = generator.normal(size=NUM_ROWS), generator.integers(-2, 8, NUM_ROWS)
    days = generator.integers(0, 20_000, NUM_ROWS).astype(np.int32)
    table = pa.table({"x": numbers, "digit": digits, "day": pa.array(days).cast(pa.date32())})
    x, digit, day = plot.columns(convert(tmp_path, table, float_dtype=None))
    counts, edges = np.histogram(numbers, 32)
    np.testing.assert_array_equal(bins_of(x)[0], counts)
    np.testing.assert_allclose(bins_of(x)[1], edges)
    np.testing.assert_array_equal(bins_of(digit)[0], np.bincount(digits + 2))
    np.testing.assert_array_equal(bins_of(digit)[1], np.arange(-2, 9) - 0.5)
    np.testing.assert_array_equal(bins_of(day)[0], np.histogram(days, 32)[0])
    assert x.figure.get_suptitle() == "3,000 rows"
    assert texts_of(x) == "x\nfloat64"


FEW_DAYS = ([20_000, 20_001, 20_001, 20_003], [-5, -4, -4, 2], [7, 7], [-7, -7], [0, 0], [9, 10])


@pytest.mark.usefixtures("each_way")
def test_few_days_and_few_whole_numbers_have_a_bar_each(tmp_path: Path) -> None:
    columns = {f"{days}": np.resize(np.array(days, np.int32), NUM_ROWS) for days in FEW_DAYS}
    dates = {f"days {name}": pa.array(numbers).cast(pa.date32()) for name, numbers in columns.items()}
    converter = convert(tmp_path, pa.table(columns | dates))
    drawn = dict(zip(converter.columns, plot.columns(converter), strict=True))
    for name, numbers in columns.items():
        least, expected = numbers.min(), np.bincount(numbers - numbers.min())
        np.testing.assert_array_equal(bins_of(drawn[name])[0], expected)
        np.testing.assert_array_equal(bins_of(drawn[name])[1], least + np.arange(len(expected) + 1) - 0.5)
        np.testing.assert_array_equal(bins_of(drawn[f"days {name}"])[0], expected)
        # As matplotlib counts days: since 1970.
        np.testing.assert_array_equal(bins_of(drawn[f"days {name}"])[1], least + np.arange(len(expected) + 1))


def test_more_rows_than_the_limit_are_a_sample_and_the_picture_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributions, "_MAX_EXACT_NUMBERS", 2 * NUM_ROWS - 1)
    monkeypatch.setattr(distributions, "_SAMPLE_ROWS", 300)
    converter = convert(tmp_path, pa.table({"x": np.arange(NUM_ROWS), "y": np.arange(NUM_ROWS)}))
    x, _ = plot.columns(converter)
    assert texts_of(x) == "x\nint64\nof 300 rows"
    assert bins_of(x)[0].sum() == 300
    (alone,) = plot.columns(converter, ["x"])
    assert bins_of(alone)[0].sum() == NUM_ROWS


def test_categories_and_texts_are_counted(tmp_path: Path) -> None:
    origins = ["JFK"] * 1500 + ["LGA"] * 1000 + [None] * 500
    flags = np.arange(NUM_ROWS) < 800
    words = [f"word {number % 10 if number < 900 else 10}" for number in range(NUM_ROWS)]
    keys = [f"key {number}" for number in range(NUM_ROWS)]
    table = pa.table({"origin": origins, "word": words, "key": keys, "raw": pa.array(keys, pa.binary()), "is": flags})
    origin, word, key, raw, is_early = plot.columns(convert(tmp_path, table, categories=["origin"]))
    assert counts_of(origin) == {"JFK": 1500, "LGA": 1000}
    assert "500 null" in texts_of(origin)
    assert len(counts_of(word)) == 8
    assert counts_of(word)["word 10"] == 2100
    assert texts_of(word) == "word\nstr\n3 more values"
    assert "each value once" in texts_of(key)
    assert texts_of(raw) == "raw\n\nnot counted\nbytes"
    assert counts_of(is_early) == {"True": 800, "False": 2200}


def test_a_cache_has_statistics_and_arrays_show_their_shape(tmp_path: Path) -> None:
    missing = Column(name="missing", dtype="float32", nullable=True)
    columns = (*ALL, missing)
    with write_converter(tmp_path, columns, [[range(60)], [range(60, 101)]], row_group_bytes=900) as converter:
        shown = dict(zip(converter.columns, plot.columns(converter), strict=True))
        assert [axes.get_title() for axes in shown.values()] == [column.name for column in columns]
        assert texts_of(shown["grid"]) == "grid\n\nshape (2, 3)\nint32"
        assert texts_of(shown["words"]) == "words\n\nshape ragged\nint32"
        num_nulls = int((~missing.valid(range(101))).sum())
        assert texts_of(shown["missing"]) == f"missing\nfloat32, {num_nulls} null"
        assert bins_of(shown["missing"])[0].sum() == 101 - num_nulls
        (ids,) = plot.columns(converter.where([("id", "<", 40)]), ["id"])
        assert bins_of(ids)[0].sum() == 40
        assert ids.figure.get_suptitle() == "40 rows"
    with pytest.raises(CacheError, match="was deleted"):
        plot.columns(converter)


def test_a_vocabulary_of_ten_thousand_values_is_drawn_by_its_most_frequent(tmp_path: Path) -> None:
    values = [f"v{number}" for number in range(10_000)] + ["v7"] * 5
    (axes,) = plot.columns(convert(tmp_path, pa.table({"v": values}), 5000, categories=["v"]))
    assert len(counts_of(axes)) == 8
    assert counts_of(axes)["v7"] == 6
    assert "10,000 categories" in texts_of(axes)


ODD = {
    "nulls": (pa.array([None] * 2, pa.float64()), "nulls only, 2 null", "no finite number, 100.0% null"),
    "no texts": (pa.array([None] * 2, pa.string()), "nulls only, 2 null", "nulls only, 2 null"),
    "no flags": (pa.array([None] * 2, pa.bool_()), "nulls only, 2 null", "nulls only, 100.0% null, of 1 rows"),
    "nan": (pa.array([float("nan")] * 2), *["no finite number"] * 2),
    "infinite": (pa.array([float("inf"), float("nan")]), *["no finite number"] * 2),
    "wide": (pa.array([1e300, -1e300]), *["from -1e+300 to 1e+300"] * 2),
    "constant": (pa.array([1.5, 1.5]), "", ""),
    "tiny": (pa.array([5e-324, 0]), "", ""),
    "large": (pa.array([2**62, 2**62 + 1]), "", ""),
    "years": (pa.array([-(10**17), 10**17], pa.int64()).cast(pa.timestamp("us")), "years", "years"),
}
"""Columns, and what is said of them: in one reading, and column by column with a sample of a single row."""


@pytest.mark.parametrize("way", [0, 1])
def test_odd_columns_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: int) -> None:
    if way == 1:
        monkeypatch.setattr(distributions, "_SAMPLE_ROWS", 1)
    drawn = plot.columns(convert(tmp_path, pa.table({name: odd[0] for name, odd in ODD.items()}), float_dtype=None))
    for axes, (name, odd) in zip(drawn, ODD.items(), strict=True):
        words = ", ".join(text for text in texts_of(axes).split("\n") if text)
        said = re.sub(r"(, )?(float64|str|bool|int64|datetime64\[us\])", "", words)
        assert said.removeprefix(name).strip(", ") == odd[1 + way]


def test_one_row_is_drawn(tmp_path: Path) -> None:
    x, text = plot.columns(convert(tmp_path, pa.table({"x": [1.5], "text": ["a"]})))
    assert bins_of(x)[0].sum() == 1
    assert counts_of(text) == {"a": 1}


def test_names_and_values_are_texts_and_no_formulas(tmp_path: Path) -> None:
    names = ["<script>", "$x_{1}$", r"$\frac{$", "שלום", "مرحبا", "👩‍💻", "漢字", "new\nline", "x" * 10_000]
    table = pa.table({name: [1.0, 2.0] for name in names} | {"text": ["$", r"$\x^{$"]})
    axes = plot.columns(convert(tmp_path, table))
    titles = [one.get_title() for one in axes]
    assert titles[:5] == names[:5]
    assert titles[5:8] == ["??", "??", r"new\nline"]
    assert titles[8] == "x" * 27 + "…"
    assert list(counts_of(axes[-1])) == ["$", r"$\x^{$"]


def test_forty_columns_fit_in_one_figure_and_five_thousand_do_not(tmp_path: Path) -> None:
    table = pa.table({f"x{number}": np.arange(4.0) for number in range(5000)})
    converter = convert(tmp_path, table)
    axes = plot.columns(converter, converter.columns[:40])
    assert axes.shape == (40,)
    assert len({one.figure for one in axes}) == 1
    assert len(axes[0].figure.axes) == 40
    with pytest.raises(ValueError, match=r"There are 5,000 columns, and a figure shows up to 60. Pass columns="):
        plot.columns(converter)


def test_it_draws_on_a_given_figure(tmp_path: Path) -> None:
    converter = convert(tmp_path, pa.table({"x": [1.0, 2.0]}))
    left, right = plt.figure(layout="constrained").subfigures(1, 2)
    (axes,) = plot.columns(converter, figure=right)
    assert axes in right.axes
    assert left.axes == []


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    converter = convert(tmp_path, pa.table({"age": [1.0, 2.0]}))
    for names in ("age", [], 5):
        with pytest.raises(TypeError, match="columns must be a list of names, or None for all, got"):
            plot.columns(converter, names)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"There is no column 'agee'. Did you mean 'age'\?"):
        plot.columns(converter, ["agee"])
    with pytest.raises(TypeError, match="Expected a converter, as make_spark_converter returns it, got int"):
        plot.columns(5)  # type: ignore[arg-type]
    for draw in (plot.columns, plot.layout):
        with pytest.raises(ValueError, match=r"This is a mixture, .* plot the converters that were mixed"):
            draw(mix({"a": converter, "b": converter}))


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with write_converter(tmp_path, (ID,), [[range(5)]]) as converter:
        monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
        monkeypatch.delattr("matplotlib.pyplot")
        for draw in (plot.columns, plot.layout):
            with pytest.raises(MissingDependencyError, match=r"pip install 'spark-tensor-converter\[plot\]'"):
                draw(converter)
        monkeypatch.undo()
