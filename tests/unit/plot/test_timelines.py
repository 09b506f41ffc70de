"""Timelines have a lane for each kind of work, and layouts a bar for each row group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.collections import PolyCollection

from converter import make_parquet_converter, plot
from converter.dataset import borrow_files


@dataclass(frozen=True)
class Stats:
    """What a loader's `stats()` returns, as far as it is drawn."""

    steps: npt.NDArray[np.float64]
    spans: tuple[tuple[str, float, float], ...] = ()


def lanes_of(axes: plt.Axes) -> dict[str, list[tuple[float, float]]]:
    """The begin and the end of each bar, by lane."""
    names = [label.get_text() for label in axes.get_yticklabels()]
    lanes: dict[str, list[tuple[float, float]]] = {}
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        for path in collection.get_paths():
            low, high = path.vertices.min(axis=0), path.vertices.max(axis=0)
            lanes.setdefault(names[round((low[1] + high[1]) / 2)], []).append((low[0], high[0]))
    return lanes


def test_it_shows_waits_work_and_stages() -> None:
    steps = np.array([[0, 2], [3, 3.5], [5, 5]])
    spans = (("decode", 0, 1.5), ("transform", 1.5, 2), ("decode", 1, 3), ("open", 0, 0.1), ("a new one", 4, 5))
    axes = plot.timeline(Stats(steps, spans))
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "loop waits", "loop works", "open", "decode", "transform", "a new one",
    ]  # fmt: skip
    assert lanes_of(axes) == {
        "loop waits": [(0, 2), (3, 3.5), (5, 5)],
        "loop works": [(2, 3), (3.5, 5)],
        "open": [(0, 0.1)],
        "decode": [(0, 1.5), (1, 3)],
        "transform": [(1.5, 2)],
        "a new one": [(4, 5)],
    }
    assert axes.get_title() == "The last 3 batches: the loop waited 2.5 of 5 s (50%), 2 s at most"
    left, right = axes.get_xlim()
    assert left < 0.1
    assert right > 4.9


def test_hundreds_of_steps_are_a_few_artists() -> None:
    asked = np.arange(512) / 100
    spans = tuple((stage, second, second + 0.3) for second in range(1000) for stage in ("fetch", "copy"))
    axes = plot.timeline(Stats(np.stack([asked, asked + 0.004], axis=1), spans), ax=plt.figure().add_subplot())
    assert len(axes.collections) == 4
    assert len(lanes_of(axes)["loop waits"]) == 512


@pytest.mark.parametrize("spans", [(), (("open", 0.0, 0.2),)])
def test_before_the_first_batch_there_is_little_to_show(spans: tuple[tuple[str, float, float], ...]) -> None:
    axes = plot.timeline(Stats(np.empty((0, 2)), spans))
    assert "no batch was handed over yet" in [axes.get_title(), *(text.get_text() for text in axes.texts)]


def test_one_batch_is_shown() -> None:
    assert (
        plot.timeline(Stats(np.array([[1.0, 1.0]]))).get_title()
        == "The last batch: the loop waited 0 of 0 s, 0 s at most"
    )


@pytest.mark.parametrize("stats", [5, None, Stats([]), Stats(np.empty(3)), Stats(np.empty((3, 2)), [])])  # type: ignore[arg-type]
def test_what_is_no_statistics_is_refused(stats: object) -> None:
    with pytest.raises(TypeError, match=r"stats must be what a loader's stats\(\) returns, got"):
        plot.timeline(stats)  # type: ignore[arg-type]


def test_a_layout_has_a_bar_for_each_row_group(tmp_path: Path) -> None:
    for name, rows, size in (("a", 250, 100), ("b", 80, 80), ("c", 100, 60)):
        pq.write_table(pa.table({"x": np.arange(rows)}), tmp_path / f"{name}.parquet", row_group_size=size)
    converter = make_parquet_converter(tmp_path)
    axes = plot.layout(converter)
    even, odd = (patch.get_data() for patch in axes.patches)
    edges = [0, 100, 200, 250, 330, 390, 430]
    assert even.edges.tolist() == odd.edges.tolist() == edges
    megabytes = converter._manifest.row_group_bytes / 1e6
    assert (even.values + odd.values).tolist() == megabytes.tolist()
    assert (odd.values > 0).tolist() == [False, False, False, True, False, False]
    assert axes.get_title() == "430 rows in 3 files, 6 row groups, median 70 rows"
    part = plot.layout(converter.where([("x", "<", 50)]))
    pale_even, full_even, pale_odd, full_odd = (patch.get_data().values for patch in part.patches)
    np.testing.assert_allclose(pale_even + pale_odd, megabytes)
    live = np.array([50 / 100, 0, 0, 50 / 80, 50 / 60, 0])
    np.testing.assert_allclose(full_even + full_odd, megabytes * live)
    assert part.get_title().startswith("150 rows in 3 files")


def test_a_layout_of_many_row_groups_has_no_edges_and_of_none_no_bars(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": np.arange(500)}), tmp_path / "part.parquet", row_group_size=1)
    converter = make_parquet_converter(tmp_path)
    axes = plot.layout(converter, ax=plt.figure().add_subplot())
    assert not axes.collections
    assert len(axes.patches[0].get_data().values) == 500
    none = np.empty(0, np.int64)
    arrays = {"row_group_rows": none, "row_group_bytes": none, "row_group_file": none}
    empty = borrow_files(converter._storage, replace(converter._manifest, num_rows=0, **arrays))
    assert plot.layout(empty).get_title() == "0 rows in 1 file, 0 row groups"
