"""What the commands show of caches and data sets, and what they refuse."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from typer.testing import CliRunner, Result

from converter import DatasetConverter, open_converter
from converter.cache import roots
from converter.cache.survey import survey
from converter.commands import app as commands
from converter.commands import doctor
from converter.commands.measuring import Measured
from converter.decoders import Image
from converter.manifest import Origin
from converter.sources.spark.options import DEFAULT_ROW_GROUP_BYTES, WriteOptions
from tests.columns import ID, TENSORS
from tests.entries import write_converter

NUM_ROWS = 1000
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process, on a wide terminal that is none."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv(roots.ENVIRONMENT_VARIABLE, raising=False)

    def run(*arguments: object, status: int = 0, answers: str | None = None) -> Result:
        result = CliRunner().invoke(commands.app, list(map(str, arguments)), input=answers)
        error = result.exception
        if error is not None and not isinstance(error, SystemExit):
            assert status == 1, error
            assert isinstance(error, commands.SHOWN_ERRORS)
        else:
            assert result.exit_code == status, result.output
        return result

    return run


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[tuple[Path, DatasetConverter]]:
    """A cache with one entry, which this process holds."""
    partitions = [[range(400)], [range(400, NUM_ROWS)]]
    columns = (ID, TENSORS[0])
    with write_converter(tmp_path / "cache", columns, partitions, row_group_bytes=4000, delete_on_exit=False) as found:
        yield tmp_path / "cache", found


@pytest.fixture
def rides(tmp_path: Path) -> Path:
    """Parquet files with nulls, texts and a column whose name would turn a terminal red."""
    folder = tmp_path / "rides"
    folder.mkdir()
    for number in range(3):
        rows = np.arange(100) + 100 * number
        maybe = pa.array([None if row % 4 == 0 else row for row in rows.tolist()])
        city = [f"city {row % 3}" for row in rows.tolist()]
        table = pa.table({"id": rows, "fare": rows / 2, "city": city, "maybe": maybe, "[red]\x1b[31m": rows})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=50)
    return folder


def told(result: Result) -> Any:
    return json.loads(result.stdout)


# ls ------------------------------------------------------------------------------------------


def test_ls_tells_of_each_entry_who_holds_it(run: Run, cache: tuple[Path, DatasetConverter]) -> None:
    folder, converter = cache
    (entry,) = told(run("ls", folder, "--json"))
    assert (entry["url"], entry["rows"], entry["is_committed"], entry["is_kept"]) == (
        converter.url, NUM_ROWS, True, False,
    )  # fmt: skip
    assert entry["bytes"] == sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    (holder,) = entry["holders"]
    assert (holder["pid"], holder["is_writing"], holder["is_dead"]) == (os.getpid(), False, False)
    assert abs(holder["since"] - time.time()) < 60
    (line,) = run("ls", folder).stdout.splitlines()
    assert f":{os.getpid()} (reads for " in line
    assert line.split("\t")[:2] == [converter.url, f"{NUM_ROWS:,}"]


def test_ls_lists_the_largest_first_and_what_cannot_be_read(run: Run, cache: tuple[Path, DatasetConverter]) -> None:
    folder, converter = cache
    root = folder / roots.DIRECTORY
    small = root / ("a" * 16 + "-" + "b" * 16)
    small.mkdir()
    (small / "manifest.json").write_text("{")
    unfinished = root / ("c" * 16 + "-" + "d" * 16)
    (unfinished / f"data-{'0' * 32}").mkdir(parents=True)
    first, *others = told(run("ls", folder, "--json"))
    assert first["url"] == converter.url
    assert [one["is_committed"] for one in others] == [False, False]
    assert ["manifest.json" in (one["problem"] or "") for one in others].count(True) == 1
    assert sum("unfinished" in line for line in run("ls", folder).stdout.splitlines()) == 1


def test_ls_of_an_empty_place_says_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"there is no entry in {tmp_path}" in run("ls", tmp_path).stderr
    assert told(run("ls", tmp_path, "--json")) == []
    # The directory of the environment is the default.
    monkeypatch.setenv(roots.ENVIRONMENT_VARIABLE, str(tmp_path / "other"))
    assert f"there is no entry in {tmp_path}/other" in run("ls").stderr
    assert not (tmp_path / "other").exists()


def test_a_survey_tells_a_dead_holder(cache: tuple[Path, DatasetConverter]) -> None:
    folder, converter = cache
    entry = Path(converter.url.removeprefix("file://"))
    (lease,) = entry.glob("lease-*.json")
    sign = json.loads(lease.read_text())
    (entry / f"lease-{'1' * 32}.json").write_text(json.dumps({**sign, "pid": 1 << 22, "process_start": "7"}))
    root = roots.find_root(str(folder))
    assert root is not None
    (found,) = survey(root)
    assert sorted((holder.pid, holder.is_dead) for holder in found.holders) == [(os.getpid(), False), (1 << 22, True)]


# show and head -------------------------------------------------------------------------------


def test_show_tells_what_an_entry_is(run: Run, cache: tuple[Path, DatasetConverter]) -> None:
    _, converter = cache
    shown = told(run("show", converter.url, "--json"))
    assert shown["kind"] == "cache"
    assert (shown["rows"], shown["files"], shown["fingerprint"]) == (NUM_ROWS, 2, converter.fingerprint)
    column, vector = shown["columns"]
    assert (column["name"], column["dtype"], column["shape"]) == ("id", "int64", [])
    assert (column["min"], column["max"], column["mean"]) == (0, NUM_ROWS - 1, (NUM_ROWS - 1) / 2)
    assert vector["shape"] == list(converter.schema[vector["name"]].shape or ())
    layout = shown["layout"]
    assert layout["file_rows"] == {"least": 400, "median": 500, "most": 600}
    groups = [
        pq.ParquetFile(file).metadata.row_group(number).num_rows
        for file in sorted(cache[0].rglob("*.parquet"))
        for number in range(pq.ParquetFile(file).num_row_groups)
    ]
    assert layout["row_group_rows"] == {"least": min(groups), "median": int(np.median(groups)), "most": max(groups)}
    # The footers of a local cache are not read.
    assert (layout["codecs"], layout["encodings"], shown["write_options"]) == (None, None, None)
    lines = [line.split(maxsplit=1) for line in run("show", converter.url).stdout.splitlines() if line]
    assert ["rows", "1,000"] in lines
    assert ["file", "rows        500 (median), from 400 to 600"] in lines
    # Beside `bytes`, which are those of the files.
    (words,) = [words for words in lines if words[-1].startswith("group bytes")]
    assert words[-1].endswith(", uncompressed")


def test_show_tells_with_which_options_an_entry_was_written(run: Run, tmp_path: Path) -> None:
    options = WriteOptions(
        float_dtype=None,
        shapes={"image": (8, 8), "vector": ("float32", (4,))},
        decode={"photo": Image(size=(2, 3))},
        decode_at="write",
        categories={},
        scales={"x": None},
        row_group_bytes=1 << 20,
        compression="auto",
        shuffle_rows_seed=7,
        writer="auto",
    )
    called = options.as_called(compression="none", is_kept=True)
    origin = Origin(
        created="2026", host="h", application_id="a", user="u", source="DataFrame", cache_key="k", options=called
    )
    with write_converter(tmp_path, (ID,), [[range(10)]], origin=origin) as made:
        shown, text = told(run("show", made.url, "--json")), run("show", made.url).stdout
        # The process that wrote it tells the same as one that opened it.
        assert made.describe()["write_options"] == shown["write_options"] == called
    assert called["shapes"] == {"image": [8, 8], "vector": ["float32", [4]]}
    assert (called["compression"], called["shuffle_rows_seed"], called["delete_on_exit"]) == ("none", 7, False)
    assert (called["standardize"], called["decode"]["photo"]["kind"]) == (["x"], "Image")
    (line,) = [line for line in text.splitlines() if line.startswith("write options")]
    assert "float_dtype=None, shapes={'image': [8, 8]" in line
    # Those that are as by default are left out.
    assert line.endswith("row_group_bytes=1048576, compression=none, shuffle_rows_seed=7, delete_on_exit=False")
    assert not any(f"{name}=" in line for name in ("categories", "unseen", "writer"))
    plain = replace(options, float_dtype="float32", shapes={}, decode={}, decode_at="read", scales={})
    plain = replace(plain, row_group_bytes=DEFAULT_ROW_GROUP_BYTES, shuffle_rows_seed=None)
    assert commands._options_in_words(plain.as_called(compression="auto", is_kept=False)) == "the defaults"


def test_show_tells_what_parquet_files_and_versions_of_a_table_are(run: Run, rides: Path, tmp_path: Path) -> None:
    shown = told(run("show", rides, "--json"))
    assert (shown["kind"], shown["rows"], shown["row_groups"]) == ("parquet", 300, 6)
    assert (shown["layout"]["codecs"], shown["write_options"]) == (["SNAPPY"], None)
    assert "row group rows   50 each" in run("show", rides).stdout.splitlines()
    # Signs that steer a terminal are spelled out.
    assert "\x1b" not in run("show", rides).stdout
    table = pq.read_table(rides, columns=["id"])
    for _ in range(2):
        write_deltalake(tmp_path / "table", table, mode="append")
    for options, version, num_rows in ((["--version", 0], 0, 300), ([], 1, 600)):
        shown = told(run("show", tmp_path / "table", "--json", *options))
        assert (shown["kind"], shown["version"], shown["rows"]) == ("delta", version, num_rows)
        assert shown["layout"]["file_rows"] == {"least": 300, "median": 300, "most": 300}
        # The files are so small that the log says enough; a sample of their footers is read.
        assert (shown["layout"]["row_group_rows"], shown["layout"]["codecs"]) == (None, ["SNAPPY"])


def test_head_shows_the_rows_and_columns_that_are_wanted(run: Run, rides: Path) -> None:
    options = ["-n", 3, "--columns", "id, maybe,city", "--filter", "fare >= 24", "--filter", "city != city 1"]
    expected = [{"id": row, "maybe": None if row % 4 == 0 else row, "city": f"city {row % 3}"} for row in (48, 50, 51)]
    assert told(run("head", rides, "--json", *options)) == expected
    lines = run("head", rides, *options).stdout.splitlines()
    assert lines == ["48\tnull\tcity 0", "50\t50\tcity 2", "51\t51\tcity 0"]
    assert len(told(run("head", rides, "-n", 5000, "--json"))) == 300


def test_numbers_that_json_does_not_have_are_texts(run: Run, tmp_path: Path) -> None:
    odd = [1.5, math.nan, math.inf, -math.inf]
    pq.write_table(pa.table({"x": odd, "xs": [[number] for number in odd]}), tmp_path / "a.parquet")
    found = told(run("head", tmp_path, "--json"))
    texts = [1.5, "nan", "inf", "-inf"]
    assert found == [{"x": text, "xs": [text]} for text in texts]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--columns", "fair"], "fare"),
        (["--filter", "fare"], "'fare' is no condition. Write a column, one of"),
        (["--filter", "fair > 2"], "fair"),
        (["--filter", "fare > 1000"], "no row"),
        (["--version", "3"], "is no Delta table"),
    ],
)
def test_head_names_what_is_wrong(run: Run, rides: Path, options: list[str], message: str) -> None:
    result = run("head", rides, *options, status=1)
    assert message.lower() in str(result.exception).lower()


# verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("thorough", [[], ["--rows"]])
def test_verify_finds_nothing_wrong_where_nothing_is(
    run: Run, cache: tuple[Path, DatasetConverter], rides: Path, thorough: list[str]
) -> None:
    _, converter = cache
    for url, num_rows in ((converter.url, NUM_ROWS), (rides, 300)):
        found = told(run("verify", url, "--json", *thorough))
        assert (found["rows"], found["damage"], found["checked_rows"]) == (num_rows, [], bool(thorough))
        assert "no damage" in run("verify", url, *thorough).stdout


def test_verify_names_each_file_that_was_replaced(run: Run, cache: tuple[Path, DatasetConverter]) -> None:
    folder, converter = cache
    files = sorted(folder.rglob("*.parquet"))
    for file in files:
        content = bytearray(file.read_bytes())
        content[-20] ^= 1  # In the footer.
        file.write_bytes(content)
    result = run("verify", converter.url, status=3)
    assert all(file.name in result.stderr for file in files)
    assert f"{len(files)} problems" in result.stdout
    assert len(told(run("verify", converter.url, "--json", status=3))["damage"]) == len(files)


def test_verify_finds_a_flipped_bit_of_a_page_only_by_reading_it(
    run: Run, cache: tuple[Path, DatasetConverter]
) -> None:
    folder, converter = cache
    file = max(folder.rglob("*.parquet"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    assert told(run("verify", converter.url, "--json"))["damage"] == []
    (damage,) = told(run("verify", converter.url, "--rows", "--json", status=3))["damage"]
    assert file.name in damage


def test_verify_of_an_entry_with_a_missing_file_finds_damage(run: Run, cache: tuple[Path, DatasetConverter]) -> None:
    folder, converter = cache
    file = next(folder.rglob("*.parquet"))
    file.unlink()
    (damage,) = told(run("verify", converter.url, "--json", status=3))["damage"]
    assert file.name in damage
    assert "1 problem" in run("verify", converter.url, status=3).stdout


def test_verify_names_each_damaged_file(run: Run, tmp_path: Path) -> None:
    table = pa.table({"x": np.arange(1000.0)})
    for number in range(4):
        pq.write_table(table, tmp_path / f"{number}.parquet", write_page_checksum=True)
    for number in (1, 3):
        file = tmp_path / f"{number}.parquet"
        content = bytearray(file.read_bytes())
        content[200] ^= 1
        file.write_bytes(content)
    found = told(run("verify", tmp_path, "--rows", "--json", status=3))["damage"]
    assert [f"{number}.parquet" in line for number, line in zip((1, 3), found, strict=True)] == [True, True]
    assert "--rows reads the rows" in run("verify", tmp_path).stdout


def test_a_folder_of_entries_is_no_data_set(
    run: Run, cache: tuple[Path, DatasetConverter], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = cache
    for shown in (folder, f"{folder}/converter-v1"):
        result = run("show", shown, status=1)
        assert "is a cache directory with 1 entries" in str(result.exception)
        assert "cache_key=" in str(result.exception)
    assert run("ls", f"{folder}/converter-v1").stdout == run("ls", folder).stdout
    monkeypatch.chdir(folder)
    assert run("ls", "converter-v1/").stdout == run("ls", ".").stdout


def test_a_version_of_a_cache_entry_is_refused(run: Run, cache: tuple[Path, DatasetConverter]) -> None:
    assert "--version is for Delta tables" in str(run("show", cache[1].url, "--version", 3, status=1).exception)


@pytest.mark.parametrize("command", ["ls", "sweep"])
def test_an_empty_argument_is_not_the_default_cache(run: Run, command: str) -> None:
    assert "CACHE_DIR is empty" in str(run(command, "", status=1).exception)


# plan, sweep, delete -------------------------------------------------------------------------


def test_plan_tells_what_a_rank_reads(run: Run, cache: tuple[Path, DatasetConverter]) -> None:
    _, converter = cache
    found = told(run("plan", converter.url, "--batch-size", 100, "--ranks", 3, "--json"))
    assert (found["steps_per_epoch"], found["num_rows"], found["dropped_rows"]) == (4, 333, 1)
    whole = told(run("plan", converter.url, "--batch-size", 100, "--no-shuffle", "--json"))
    assert (whole["steps_per_epoch"], whole["dropped_rows"]) == (10, 0)
    assert "steps per epoch   4 of 100 rows" in run("plan", converter.url, "--batch-size", 100, "--ranks", 3).stdout


def test_sweep_removes_what_nobody_holds_and_asks_before(run: Run, cache: tuple[Path, DatasetConverter]) -> None:
    folder, converter = cache
    assert told(run("sweep", folder, "--yes", "--json"))["num_entries"] == 0  # This process holds it.
    open_converter(converter.url).__exit__(None, None, None)
    converter.__exit__(None, None, None)
    assert "would remove 1 entries" in run("sweep", folder, "--dry-run").stdout
    assert "removed 0" not in run("sweep", folder, answers="n\n", status=1).stdout
    assert list(folder.rglob("*.parquet"))
    assert "removed 0 entries" in run("sweep", folder, "--older-than", "2h").stdout
    assert "removed 1 entries" in run("sweep", folder, answers="y\n").stdout
    assert not list(folder.rglob("*.parquet"))
    result = run("sweep", folder, "--older-than", "soon", status=1)
    assert "--older-than must be a time such as 90, 30min, 12h or 7d" in str(result.exception)


def test_delete_deletes_an_entry_and_nothing_else(run: Run, cache: tuple[Path, DatasetConverter], rides: Path) -> None:
    folder, converter = cache
    converter.__exit__(None, None, None)
    run("delete", converter.url, answers="n\n", status=1)
    assert list(folder.rglob("*.parquet"))
    assert f"deleted {converter.url}" in run("delete", converter.url, "--yes").stdout
    assert not list(folder.rglob("*.parquet"))
    result = run("delete", rides, "--yes", status=1)
    assert "is not a cache entry, and only those can be deleted" in str(result.exception)
    assert "--cache-key" in str(result.exception)
    assert len(list(rides.glob("*.parquet"))) == 3


def test_delete_names_only_processes_that_live(run: Run, cache: tuple[Path, DatasetConverter]) -> None:
    _, converter = cache
    (lease,) = Path(converter.url.removeprefix("file://")).glob("lease-*.json")
    dead = json.dumps({**json.loads(lease.read_text()), "pid": 1 << 22, "process_start": "7"})
    (lease.parent / f"lease-{'1' * 32}.json").write_text(dead)
    shown = run("delete", converter.url, "--yes").stderr
    assert f":{os.getpid()} (reads for" in shown
    assert f":{1 << 22} (" not in shown


def test_sweep_tells_of_entries_that_it_cannot_read(run: Run, cache: tuple[Path, DatasetConverter]) -> None:
    folder, converter = cache
    manifest = Path(converter.url.removeprefix("file://")) / "manifest.json"
    converter.__exit__(None, None, None)
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 99}))
    shown = run("sweep", folder, "--kept", "--yes").stdout
    assert "removed 0 entries" in shown
    assert "1 entries cannot be read and stay; `converter ls` says why" in shown
    assert "format version 99" in run("ls", folder).stdout


def test_plan_and_bench_measure_how_fast_rows_are_read(run: Run, cache: tuple[Path, DatasetConverter]) -> None:
    _, converter = cache
    found = told(run("plan", converter.url, "--seconds", 0.05, "--json"))
    assert found["rows_per_second"] > 0
    # All rows are in the first batch, or they come at the measured speed after it.
    assert found["seconds"] == pytest.approx(found["start_seconds"])
    found = told(run("plan", converter.url, "--seconds", 0.05, "--batch-size", 100, "--json"))
    assert 0 < found["start_seconds"] < found["seconds"]
    expected = found["start_seconds"] + (NUM_ROWS - 100) / found["rows_per_second"]
    assert found["seconds"] == pytest.approx(expected)
    lines = run("plan", converter.url, "--seconds", 0.05).stdout.splitlines()
    assert re.fullmatch(
        r"An epoch of this rank takes \S+ s to read: \S+ s until the first batch, then \S+ rows/s,", lines[-2]
    )
    options = ["--threads", "1,3", "--batch-sizes", "10,5000", "--seconds", 0.05]
    measured = told(run("bench", converter.url, *options, "--json"))
    assert [(one["workers_count"], one["batch_size"]) for one in measured] == [(1, 10), (1, 5000), (3, 10), (3, 5000)]
    for one in measured:
        assert one["rows"] > 0
        assert one["rows_per_second"] == pytest.approx(one["rows"] / one["seconds"])
    lines = run("bench", converter.url, *options).stdout.splitlines()
    assert sum(line.endswith("best") for line in lines) == 2
    told_default = run("bench", converter.url, *options).stderr
    count = commands.default_workers_count()
    if count in (1, 3):
        assert re.search(
            rf"{count} threads here, which is (right|not the best) here: at least \d+% of the best", told_default
        )
    else:
        assert f"{count} threads here, which were not measured" in told_default
    one = Measured(workers_count=count, batch_size=10, rows=95, seconds=1.0, start_seconds=0.0)
    other = Measured(workers_count=count + 1, batch_size=10, rows=100, seconds=1.0, start_seconds=0.0)
    assert "which is right here: at least 95% of the best" in commands._told_default([one, other], {10: other})
    slow = replace(one, rows=50)
    assert "which is not the best here: at least 50%" in commands._told_default([slow, other], {10: other})
    for name, value in (("--threads", "0"), ("--threads", "1;2"), ("--batch-sizes", "many")):
        result = run("bench", converter.url, name, value, status=1)
        assert f"{name} must be whole numbers above 0" in str(result.exception)


# doctor --------------------------------------------------------------------------------------


def test_doctor_tells_what_is_there_and_no_secret(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "hush")
    result = run("doctor", tmp_path / "cache", "--json")
    found = {one["what"]: one for one in told(result)}
    assert found["pyarrow"]["told"] == pa.__version__
    assert found["torch"]["state"] == "good"
    assert "AZURE_CLIENT_SECRET" in found["credentials"]["told"]
    assert "hush" not in result.output
    assert "can be written" in found["cache"]["told"]
    assert [path.name for path in (tmp_path / "cache" / roots.DIRECTORY).iterdir()] == [roots.OWNER_FILE]


def test_doctor_takes_a_cache_as_other_commands_do(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for cache_dir in ("~/cache", (tmp_path / "cache").as_uri()):
        found = {one["what"]: one for one in told(run("doctor", cache_dir, "--json"))}
        assert "GB free" in found["cache"]["told"]


def test_doctor_tells_of_a_spark_that_cannot_start(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PySparkRuntimeError(RuntimeError):
        pass

    def start(name: str) -> None:
        raise PySparkRuntimeError("[JAVA_GATEWAY_EXITED] Java gateway process exited")

    monkeypatch.setattr(doctor, "start_local_spark", start)
    found = {one["what"]: one for one in told(run("doctor", tmp_path / "cache", "--spark", "--json", status=1))}
    assert found["executors"]["state"] == "wrong"
    assert "JAVA_GATEWAY_EXITED" in found["executors"]["told"]


def test_doctor_names_what_is_wrong_and_the_remedy(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(doctor, "_EXTRAS", {"no-such-package": "delta"})
    found = {one["what"]: one for one in told(run("doctor", tmp_path / "file", "--json", status=1))}
    assert (found["cache"]["state"], found["rank"]["state"]) == ("wrong", "wrong")
    assert "is a file" in found["cache"]["told"]
    assert "Pass cur_shard and shard_count" in found["rank"]["told"]
    assert found["no-such-package"]["remedy"] == "pip install 'spark-tensor-converter[delta]'"
    assert any(line.startswith("!!\tcache") for line in run("doctor", tmp_path / "file", status=1).stdout.splitlines())


# Options of stores ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["no JSON: secret", '["secret"]'])
def test_wrong_options_of_stores_are_refused_and_not_shown(
    run: Run, rides: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("CONVERTER_STORAGE_OPTIONS", text)
    result = run("show", rides, status=1)
    assert "CONVERTER_STORAGE_OPTIONS in the environment must be a JSON object" in str(result.exception)
    assert "secret" not in str(result.exception)
