"""The places that are drawn are those of a loader's rows, and a perfect shuffle counts as 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, make_parquet_converter, mix, plot
from converter.plot import shuffles
from converter.plot.shuffles import places_of_batches, quality_of

NUM_ROWS = 4000


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    """Two files of uneven row groups; `id` is the place in the stored order."""
    folder = tmp_path_factory.mktemp("rows")
    ids = np.arange(NUM_ROWS)
    table = pa.table({"id": ids, "y": ids % 7 == 0, "key": ids // 100})
    pq.write_table(table.slice(0, 1500), folder / "a.parquet", row_group_size=170)
    pq.write_table(table.slice(1500), folder / "b.parquet", row_group_size=300)
    return make_parquet_converter(folder)


def places_of(reader: Any, epoch: int = 0) -> list[np.ndarray]:
    source = reader._epochs.source
    plan = source.plan(epoch)
    return list(places_of_batches(source, plan, list(range(plan.num_batches))))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": True},
        {"shuffle": True, "shuffle_window_rows": 600, "seed": 3},
        {"shuffle": True, "shuffle_window_rows": "all"},
        {"shuffle": True, "shuffle_window_rows": 900, "cur_shard": 1, "shard_count": 3},
        {"shuffle": True, "shuffle_window_rows": 900, "cur_shard": 0, "shard_count": 3, "uneven": "pad"},
        {"shuffle": True, "shuffle_window_rows": 900, "drop_last": True},
    ],
    ids=str,
)
def test_places_are_the_numbers_of_the_rows_that_come(converter: DatasetConverter, options: dict[str, Any]) -> None:
    with converter.make_batch_reader(batch_size=64, columns=["id"], **options) as reader:
        for epoch in range(2):
            places = places_of(reader, epoch)
            batches = [batch["id"] for batch in reader]
            assert len(places) == len(batches)
            for own, ids in zip(places, batches, strict=True):
                np.testing.assert_array_equal(own, ids)


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "shuffle_window_rows": 500}], ids=str)
def test_places_of_filtered_rows_are_their_numbers_among_those_that_are_left(
    converter: DatasetConverter, options: dict[str, Any]
) -> None:
    part = converter.where([("id", "not in", list(range(100, 1300)))]).split({"a": 0.5})["a"]
    with part.make_batch_reader(batch_size=100) as reader:
        stored = np.concatenate([batch["id"] for batch in reader])
    with part.make_batch_reader(batch_size=64, **options) as reader:
        for places, batch in zip(places_of(reader), reader, strict=True):
            np.testing.assert_array_equal(stored[places], batch["id"])


def test_rows_that_come_several_times_and_sequences_have_places_too(converter: DatasetConverter) -> None:
    balanced = converter.balance("y")
    with balanced.make_batch_reader(batch_size=64, shuffle=True, shuffle_window_rows=700) as reader:
        counts = balanced._manifest.draws.of_epoch(0)  # type: ignore[union-attr]
        stored = np.repeat(np.arange(NUM_ROWS), counts)
        for places, batch in zip(places_of(reader), reader, strict=True):
            np.testing.assert_array_equal(stored[places], batch["id"])
    hours = converter.sequences(10, by="key", stride=10)
    with hours.make_batch_reader(batch_size=16, shuffle=True, shuffle_window_rows=50) as reader:
        for places, batch in zip(places_of(reader), reader, strict=True):
            np.testing.assert_array_equal(places * 10, batch["id"][:, 0])


def test_a_perfect_shuffle_is_about_one_and_the_stored_order_is_far_from_it() -> None:
    order = np.random.default_rng(1).permutation(100_000)
    quality = quality_of(np.split(order, 200), 100_000)
    # The deviation of 200 means is known to 5 %, and that of 500 places in each to far less.
    assert 0.8 < quality.of_means < 1.2
    assert 0.99 < quality.spread < 1.01
    stored = quality_of(np.split(np.arange(100_000), 200), 100_000)
    assert stored.spread == pytest.approx(1 / 200, rel=0.01)
    assert stored.of_means == pytest.approx(np.sqrt(500 - 1), rel=0.01)


def test_of_many_perfect_shuffles_both_figures_are_one_on_average() -> None:
    generator = np.random.default_rng(2)
    found = [quality_of(np.split(generator.permutation(60), 6), 60) for _ in range(3000)]
    assert np.mean([one.of_means**2 for one in found]) == pytest.approx(1, abs=0.03)
    assert np.mean([one.spread**2 for one in found]) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(("sizes", "num_elements"), [([1], 1), ([5], 5), ([1, 1], 2), ([3, 2], 5)])
def test_where_nothing_can_vary_it_counts_as_perfect_or_is_a_number(sizes: list[int], num_elements: int) -> None:
    batches = np.split(np.arange(num_elements), np.cumsum(sizes)[:-1])
    quality = quality_of(batches, num_elements)
    assert np.isfinite([quality.spread, quality.of_means]).all()
    if len(sizes) == 1:
        assert (quality.spread, quality.of_means) == (1, 1)


def test_the_picture_shows_rows_and_means_and_says_the_figures(converter: DatasetConverter) -> None:
    with converter.make_torch_dataloader(batch_size=64, shuffle=True, shuffle_window_rows=600) as loader:
        axes = plot.shuffle(loader)
        places = [batch["id"].numpy() for batch in loader]
        later = plot.shuffle(loader)
    rows, means = axes.lines
    assert means.get_ydata().tolist() == pytest.approx([place.mean() for place in places])
    np.testing.assert_array_equal(rows.get_ydata(), np.concatenate(places))
    np.testing.assert_array_equal(rows.get_xdata(), np.repeat(np.arange(len(places)), list(map(len, places))))
    quality = quality_of(places, NUM_ROWS)
    assert f"lie {quality.spread:.2f} times as far apart" in axes.get_title()
    assert f"means of batches vary {quality.of_means:.2f} times as much" in axes.get_title()
    legend = axes.get_legend()
    assert legend is not None
    assert "95 % of the means of a perfect shuffle" in [text.get_text() for text in legend.get_texts()]
    assert (axes.get_xlabel(), later.get_xlabel()) == ("batch of epoch 0", "batch of epoch 1")


def test_of_many_large_batches_some_are_drawn(converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch) -> None:
    with converter.make_batch_reader(batch_size=3, shuffle=True) as reader:
        axes = plot.shuffle(reader, ax=plt.figure().add_subplot())
        assert len(axes.lines[1].get_xdata()) == 256
        assert axes.lines[1].get_xdata()[-1] == len(reader) - 1
    with converter.make_batch_reader(batch_size=1000) as reader:
        assert len(plot.shuffle(reader).lines[0].get_xdata()) == 4 * 63
        monkeypatch.setattr(shuffles, "_MAX_PLACES", 3999)
        assert plot.shuffle(reader).lines[1].get_xdata().tolist() == [0, 2, 3]


def test_a_single_row_and_an_epoch_without_batches_are_drawn(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "part.parquet")
    one = make_parquet_converter(tmp_path)
    with one.make_batch_reader(shuffle=True) as reader, one.make_batch_reader(batch_size=2, drop_last=True) as empty:
        assert "1.00 times as far apart" in plot.shuffle(reader).get_title()
        assert plot.shuffle(empty).texts[0].get_text() == "an epoch has no batch"


def test_what_has_no_order_of_its_own_is_refused(converter: DatasetConverter) -> None:
    both = mix({"a": converter, "b": converter})
    with (
        both.make_batch_reader(shuffle=True) as mixed,
        converter.make_batch_reader(shuffle=True, bucket_by="key") as bucketed,
        converter.make_batch_reader() as reader,
    ):
        with pytest.raises(ValueError, match="reads a mixture: plot loaders of the converters that were mixed"):
            plot.shuffle(mixed)
        with pytest.raises(ValueError, match="With bucket_by='key' the order depends on lengths"):
            plot.shuffle(bucketed)
        with pytest.raises(TypeError, match="Expected a loader, as make_torch_dataloader returns it, got Dataset"):
            plot.shuffle(converter)
        with pytest.raises(TypeError, match="ax must be matplotlib Axes or None, got Figure"):
            plot.shuffle(reader, ax=plt.figure())  # type: ignore[arg-type]
