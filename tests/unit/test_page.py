"""Converters, loaders and plans in a notebook: what is shown, that no name becomes markup, and that nothing raises."""

from __future__ import annotations

import pickle
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import DatasetConverter, make_parquet_converter, mix, open_converter
from converter import page as shown_page
from converter.dataset import borrow_files
from converter.markup import bars, facts, text
from converter.page import columns_of
from converter.scans import samples
from converter.scans.samples import Deadline, take_sample
from converter.schema import Field, Schema
from tests.columns import ID, SCALARS, TENSORS
from tests.entries import write_converter

SCRIPT = "<script>alert('x')</script>"
NASTY = (
    SCRIPT,
    '"><img src=x onerror=alert(1)>',
    "a&b",
    "שלום",
    "مرحبا",
    "👩‍💻 🐟",
    "a\u202eb",
    "new\nline",
    "$x_{1}$",
)


def convert(folder: Path, table: pa.Table, row_group_size: int = 1000, **options: Any) -> DatasetConverter:
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / "part.parquet", row_group_size=row_group_size)
    return make_parquet_converter(folder, **options)


class _Page(HTMLParser):
    """The cells of the last table, and the charts with what they say."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and self.tags[-1] != "p":
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        (found,) = (row for row in self.rows if row[0] == name)
        return found


def charts_of(page: str) -> list[ET.Element]:
    """The SVG parts, parsed as XML."""
    return [ET.fromstring(chart) for chart in re.findall(r"<svg.*?</svg>", page)]


def heights_of(chart: ET.Element) -> list[int]:
    path = chart.find("path")
    assert path is not None
    return [int(height) for height in re.findall(r"v-(\d+)", path.attrib["d"])]


def assert_harmless(page: str) -> None:
    """No script, nothing that is loaded or runs, and nothing from elsewhere."""
    assert set(_Page(page).tags) <= {"p", "table", "tr", "th", "td", "bdi", "svg", "title", "path"}
    attributes = {name for tag in re.findall(r"<\w+ [^>]*>", page) for name in re.findall(r'([\w-]+)="', tag)}
    assert attributes <= {"width", "height", "role", "d", "fill", "fill-opacity"}
    assert "http" not in page
    assert "#" not in re.sub(r"&#x?\w+;", "", page)


def test_a_page_says_rows_size_place_and_lifetime(tmp_path: Path) -> None:
    with write_converter(tmp_path, (ID, *TENSORS), [[range(60)], [range(60, 101)]], row_group_bytes=900) as converter:
        page = _Page(converter._repr_html_())
        assert page.row("rows") == ["rows", "101"]
        groups = converter._manifest.num_row_groups
        assert page.row("size")[1].endswith(f"MB in {groups} row groups")
        assert page.row("where") == ["where", converter.url]
        assert page.row("lifetime")[1] == "until the end of its `with` block, delete(), or the end of this process"
        part = _Page(converter.where([("id", "<", 7)])._repr_html_())
        assert part.row("rows")[1] == "7"
        assert "that it is a part of" in part.row("lifetime")[1]
        assert part.row("id")[4::2] == ["0", "6"]
        copy = pickle.loads(pickle.dumps(converter))
        assert _Page(copy._repr_html_()).row("lifetime")[1].startswith("as long as the process that wrote it")
        with open_converter(converter.url) as opened:
            assert _Page(opened._repr_html_()).row("lifetime")[1] == "until its owner deletes it"
    gone = converter._repr_html_()
    assert _Page(gone).row("lifetime")[1] == "deleted"
    assert _Page(gone).row("vector") == ["vector", "float32", "(3,)", "no"]
    assert not charts_of(gone)


def test_the_place_of_one_file_is_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "é #1%20"
    convert(folder, pa.table({"x": range(10)}))
    place = (folder / "part.parquet").as_uri()
    for url in (folder / "part.parquet", place, [place]):
        one = make_parquet_converter(url)
        for shown in (one, one.where([("x", ">", 3)]), pickle.loads(pickle.dumps(one))):
            assert shown.describe()["url"] == place
            assert repr(shown).endswith(f"{place})")
            assert _Page(shown._repr_html_()).row("where") == ["where", place]
            # What errors, keys and digests are made of stays.
            assert shown.url == folder.as_uri()
    assert make_parquet_converter(place).head(1)["x"].tolist() == [0]
    for url in (folder, f"{folder}/*.parquet"):
        several = make_parquet_converter(url)
        assert (several.describe()["url"], several.fingerprint) == (folder.as_uri(), one.fingerprint)


def test_charts_are_numpys_histograms(tmp_path: Path) -> None:
    numbers = np.random.default_rng(5).normal(size=900).astype(np.float32)
    ages = np.array([30, 31, 31, 35] * 225)
    table = pa.table({"x": numbers, "age": ages, "is": ages > 30, "day": pa.array(ages, pa.int32()).cast(pa.date32())})
    page = convert(tmp_path, table, 300)._repr_html_()
    x, age, flags, day = map(heights_of, charts_of(page))
    counts = np.histogram(numbers.astype(np.float64), 16)[0]
    assert x == [-(-18 * count // counts.max()) for count in counts if count]
    assert age == day == [9, 18, 9]
    assert flags == [6, 18]
    shown = _Page(page)
    assert shown.row("age")[4:] == ["30", "from 30 to 35 (900 in the sample)", "35"]
    assert shown.row("is")[4::2] == ["False", "True"]
    assert shown.row("day")[4::2] == ["1970-01-31", "1970-02-05"]
    assert "Charts show a sample" not in page


def test_a_sample_is_the_first_rows_of_four_row_groups(tmp_path: Path) -> None:
    numbers = np.arange(400_000)
    converter = convert(tmp_path, pa.table({"x": numbers}), 40_000)
    sample = take_sample(converter._storage, converter._manifest, ["x"], num_rows=65_536, most_row_groups=4)["x"]
    starts = [0, 120_000, 240_000, 360_000]
    np.testing.assert_array_equal(sample.values, np.concatenate([start + np.arange(16_384) for start in starts]))
    # On a local disk up to a million numbers, here all of them.
    assert "<p>Charts show a sample" not in converter._repr_html_()
    large = convert(tmp_path / "large", pa.table({"x": np.arange(2_000_000)}), 40_000)
    page = large._repr_html_()
    assert "<p>Charts show a sample: 1,048,576 of 2,000,000 rows.</p>" in page
    assert _Page(page).row("x")[4::2] == ["0", "1,992,767"]
    part = converter.where([("x", ">=", 39_000), ("x", "<", 41_000)])
    live = take_sample(part._storage, part._manifest, ["x"], num_rows=1000, most_row_groups=4)["x"].values
    np.testing.assert_array_equal(live, np.r_[39_000:39_500, 40_000:40_500])


def test_the_range_of_a_cache_entry_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_page, "_SAMPLE_ROWS", 40)
    monkeypatch.setattr(shown_page, "_LOCAL_NUMBERS", 1)
    with write_converter(tmp_path, (ID,), [[range(1000)]], row_group_bytes=800) as converter:
        page = converter._repr_html_()
        assert re.search(r"Charts show a sample: \d\d of 1,000 rows", page)
        assert _Page(page).row("id")[4::2] == ["0", "999"]
        # Of fewer rows the range is that of the sample.
        assert _Page(converter.where([("id", ">", 10)])._repr_html_()).row("id")[4] != "0"


def test_categories_come_by_their_frequency(tmp_path: Path) -> None:
    values = ["JFK"] * 60 + ["<b>"] * 30 + [None] * 10
    page = convert(
        tmp_path,
        pa.table({"origin": values}),
        categories=["origin"],
    )._repr_html_()
    assert _Page(page).row("origin")[4::2] == ["", "67% JFK"]
    assert [heights_of(chart) for chart in charts_of(page)] == [[18, 9]]
    many = [f"value {number}" for number in range(10_000)]
    page = convert(tmp_path / "many", pa.table({"key": many}), 10_000, categories=["key"])._repr_html_()
    assert _Page(page).row("key")[5].startswith("different values in the sample: 10,000")
    assert len(heights_of(charts_of(page)[0])) == 16


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        (pa.array([None] * 5, pa.float64()), ["", "nulls only", ""]),
        (pa.array([float("nan")] * 5), ["", "NaN or infinite", ""]),
        (pa.array([float("inf"), None, float("-inf")]), ["", "NaN or infinite", ""]),
        (pa.array([1.5]), ["1.5", "from 1.5 to 1.5 (1 in the sample)", "1.5"]),
        (pa.array([1.7e308, -1.7e308]), ["-1.7e+308", "", "1.7e+308"]),
        (pa.array([2**62, -(2**62)]), ["-4.612e+18", "from -4.612e+18 to 4.612e+18 (2 in the sample)", "4.612e+18"]),
        (pa.array([5e-324, 5e-324]), ["4.941e-324", "from 4.941e-324 to 4.941e-324 (2 in the sample)", "4.941e-324"]),
        (
            pa.array([-719_163, 2_932_897], pa.int32()).cast(pa.date32()),
            ["0000-12-31", "from 0000-12-31 to 10000-01-01 (2 in the sample)", "10000-01-01"],
        ),
        (pa.array(["a", "b"]), ["", "", ""]),
        (pa.array([[1, 2], [3]]), ["", "", ""]),
    ],
)  # fmt: skip
def test_odd_columns_are_shown_too(tmp_path: Path, column: pa.Array, shown: list[str]) -> None:
    page = convert(tmp_path, pa.table({"odd": column, "id": range(len(column))}), float_dtype=None)._repr_html_()
    assert _Page(page).row("odd")[4:] == shown
    assert_harmless(page)


def test_names_and_values_never_become_markup(tmp_path: Path) -> None:
    table = pa.table({name: np.arange(4.0) for name in NASTY} | {"value": [SCRIPT, SCRIPT, '"', "שלום"]})
    converter = convert(tmp_path, table, categories=["value"])
    plan = converter.plan()
    reader = converter.make_batch_reader(columns=list(NASTY))
    for page in (converter._repr_html_(), converter.schema._repr_html_(), reader._repr_html_(), plan._repr_html_()):
        assert_harmless(page)
        assert "<script" not in page
    page = converter._repr_html_()
    assert len(charts_of(page)) == len(NASTY) + 1
    assert "<td>&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;</td>" in page
    assert "<td><bdi>שלום</bdi></td>" in page
    assert "<td>👩‍💻 🐟</td>" in page
    assert r"<td>a\u202eb</td>" in page
    assert r"<td>new\nline</td>" in page


def test_a_page_of_five_thousand_columns_is_small(tmp_path: Path) -> None:
    names = [f"{number} " + "'" * 10_000 for number in range(5000)]
    schema = Schema(tuple(Field(name=name, dtype="float32") for name in names))
    page = columns_of(schema, dict.fromkeys(names, ("-1.234e-05", bars(range(16), "x" * 60), "1.234e-05")))
    assert len(page.encode()) < 90_000
    shown = page.count("<svg")
    assert f"<p>… and {5000 - shown:,} more columns</p>" in page
    assert len(schema._repr_html_().encode()) < 90_000
    wide = pa.table({f"column {number}": np.arange(3.0) for number in range(5000)})
    page = convert(tmp_path, wide)._repr_html_()
    assert len(page.encode()) < 100_000
    assert "<p>… and 4,900 more columns</p>" in page
    assert len(charts_of(page)) == 100


def test_of_files_that_are_gone_or_damaged_the_rest_is_shown(tmp_path: Path) -> None:
    converter = convert(tmp_path, pa.table({"x": np.arange(1000.0)}))
    for damage in (lambda path: path.write_bytes(path.read_bytes()[:-9] + b"123456789"), Path.unlink):
        damage(tmp_path / "part.parquet")
        page = converter._repr_html_()
        assert not charts_of(page)
        assert _Page(page).row("x") == ["x", "float32", "()", "no"]


def test_a_store_that_hangs_is_waited_for_no_longer_than_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    pq.write_table(pa.table({"x": np.arange(100.0)}), tmp_path / "part.parquet")
    memory.pipe("/hanging/part.parquet", (tmp_path / "part.parquet").read_bytes())
    converter = make_parquet_converter("memory://hanging")
    assert len(charts_of(converter._repr_html_())) == 1
    goes_on = threading.Event()
    answer = type(memory).cat_file

    def hang(*arguments: Any, **options: Any) -> Any:
        goes_on.wait()
        return answer(*arguments, **options)

    monkeypatch.setattr(type(memory), "cat_file", hang)
    monkeypatch.setattr("converter.page._SAMPLE_SECONDS", 0.2)
    begun = time.monotonic()
    try:
        page = converter._repr_html_()
        assert time.monotonic() - begun < 30  # The store's own time is 120 seconds.
        assert not charts_of(page)
        assert _Page(page).row("x")[1] == "float32"
    finally:
        goes_on.set()


def test_of_a_remote_store_no_more_than_some_bytes_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    pq.write_table(pa.table({"a": np.arange(100.0), "b": np.arange(100.0)}), tmp_path / "part.parquet")
    fsspec.filesystem("memory").pipe("/large/part.parquet", (tmp_path / "part.parquet").read_bytes())
    converter = make_parquet_converter("memory://large", float_dtype=None)
    for most_bytes, names in ((1600, ["a", "b"]), (1599, ["a"]), (799, [])):
        monkeypatch.setattr(samples, "_MAX_REMOTE_BYTES", most_bytes)
        sample = take_sample(converter._storage, converter._manifest, ["a", "b"], num_rows=10, most_row_groups=4)
        assert list(sample) == names


def test_a_deadline_ends_by_itself_or_is_set() -> None:
    soon, later = Deadline(0.01), Deadline(1000)
    assert not later.wait(0.001)
    assert soon.wait()
    later.set()
    assert later.is_set()
    assert later.wait()


def test_a_loader_and_a_plan_say_the_same_as_their_repr(tmp_path: Path) -> None:
    with write_converter(tmp_path, SCALARS, [[range(60)], [range(60, 101)]], row_group_bytes=900) as converter:
        options: dict[str, Any] = {"batch_size": 9, "shuffle": True, "cur_shard": 1, "shard_count": 3, "num_epochs": 2}
        with converter.make_batch_reader(**options) as reader, converter.make_torch_dataloader(**options) as loader:
            for made in (reader, loader):
                page = _Page(made._repr_html_())
                assert made._repr_html_().startswith(f"<p>{type(made).__name__}</p>")
                assert page.row("rows")[1] == "33"
                assert page.row("batches")[1] == "4 batches of 9"
                assert page.row("epochs")[1] == "2"
                assert page.row("shard")[1] == "1 of 3"
                assert page.row("next iteration")[1] == "begins with epoch 0"
                assert page.row("columns")[1] in repr(made)
                assert page.row("order")[1] in repr(made)
        assert _Page(reader._repr_html_()).row("next iteration")[1] == "closed"
        plan = converter.plan(batch_size=9)
        shown = _Page(plan._repr_html_())
        for name in ("steps per epoch", "rows per epoch", "window", "bytes per epoch", "peak memory"):
            assert re.search(rf"^  {name} +{re.escape(shown.row(name)[1])}\)?$", repr(plan), re.MULTILINE)


def test_a_mixture_shows_its_parts(tmp_path: Path) -> None:
    parts = {
        name: convert(tmp_path / str(number), pa.table({"x": range(9)})) for number, name in enumerate(("<i>", "b"))
    }
    mixture = mix(parts, source="from")
    page = mixture._repr_html_()
    assert_harmless(page)
    assert _Page(page).row("<i>")[1] == f"9 rows of {parts['<i>'].url}"
    assert _Page(page).row("from")[1] == "int32 (2 categories)"


def test_sequences_show_the_rows_that_they_are_made_of(tmp_path: Path) -> None:
    hours = convert(tmp_path, pa.table({"key": [1] * 50, "x": np.arange(50.0)})).sequences(10, by="key")
    page = _Page(hours._repr_html_())
    assert page.row("x") == ["x", "float32", "(10,)", "no", "0", "from 0 to 49 (50 in the sample)", "49"]


@pytest.mark.parametrize("make", [lambda: bars([0, 0], "<&>"), lambda: bars([5], '"'), lambda: bars([3] * 16, "'")])
def test_a_chart_is_valid_xml(make: Callable[[], str]) -> None:
    chart = ET.fromstring(make())
    assert chart.find("title") is not None


def test_a_fact_without_a_value_is_left_out() -> None:
    assert facts([("a", None), ("b", 0)]) == "<table><tr><th>b</th><td>0</td></tr></table>"
    assert text("\ud800") == r"\ud800"


def test_long_names_and_values_are_cut() -> None:
    page = facts([("n" * 10**6, "v" * 10**6)])
    assert page == f"<table><tr><th>{'n' * 79}…</th><td>{'v' * 999}…</td></tr></table>"


def test_a_dataset_without_rows_has_a_page(tmp_path: Path) -> None:
    made = convert(tmp_path, pa.table({"x": [1.0]}))
    none = np.empty(0, np.int64)
    manifest = replace(made._manifest, num_rows=0, row_group_rows=none, row_group_bytes=none, row_group_file=none)
    page = borrow_files(made._storage, manifest)._repr_html_()
    assert _Page(page).row("rows")[1] == "0"
    assert _Page(page).row("x") == ["x", "float32", "()", "no"]
