"""A version of a Delta table that Spark reads has an entry that other sessions find, if it is provably that version."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.parity import golden_tables
from tests.processes import finish, run_python, start_python

Found = dict[str, Any]


def start_spark(folder: str) -> Any:
    from converter import start_local_spark

    return start_local_spark(
        "keys", master="local[2]", conf=golden_tables.CONF | {"spark.sql.warehouse.dir": f"{folder}/warehouse"}
    )


def convert_in_a_session(folder: str) -> dict[str, Found]:
    """Make the table if it is not there; convert what is read of it in each way, and say which entry that was."""
    from converter import make_spark_converter

    spark = start_spark(folder)
    path = f"{folder}/table"
    if not Path(path).exists():
        other = ["cast(id AS int) AS `a-b`", "named_struct('a-b', cast(99 - id AS int)) AS t"]
        spark.range(0, 100, 1, 2).selectExpr("id", "id * 2 AS y", "cast(id AS string) AS s", *other).write.format(
            "delta"
        ).option("delta.enableDeletionVectors", "true").save(path)
        spark.sql(f"DELETE FROM delta.`{path}` WHERE id = 5")
        spark.sql(f"INSERT INTO delta.`{path}` VALUES (1000, 1, 'one', 1, named_struct('a-b', 1))")

    def version(number: int) -> Any:
        return spark.read.format("delta").option("versionAsOf", number).load(path)

    history = spark.sql(f"DESCRIBE HISTORY delta.`{path}`")
    stamp = history.where("version = 1").selectExpr("cast(timestamp AS string)").first()[0]
    frames = {
        "0": version(0),
        "1": version(1),
        "1 by time": spark.read.format("delta").option("timestampAsOf", stamp).load(path),
        "1 by SQL": spark.sql(f"SELECT * FROM delta.`{path}` VERSION AS OF 1"),
        "2": version(2),
        "newest": spark.read.format("delta").load(path),
        "filtered": version(1).where("id < 50 AND s <> '7'").select("id", "y"),
        "filtered otherwise": version(1).where("id < 50 AND s <> '8'").select("id", "y"),
        "filtered as filtered": version(1).where("id < 50 AND s <> '7'").select("id", "y"),
        "a column": version(1).alias("t").where("t.`a-b` >= 97"),
        "a member": version(1).where("t.`a-b` >= 97"),
        "cast": version(1).selectExpr("id", "cast(array(id, y) AS array<double>)[0] AS y"),
        "time": version(1).where("timestamp'2026-11-01 05:00:00Z' > timestamp_seconds(id)"),
        "sum": version(1).where("id + 1 > 0"),
        "unknown": version(1).selectExpr("id", "hash(s) AS y"),
        "random": version(1).selectExpr("id", "rand(1) AS y"),
        "joined": version(1).join(version(0).select("id"), "id"),
        "blocks": version(1).select("id", "_metadata.file_block_start"),
        "left out": version(1),
    }
    found = {}
    for name, frame in frames.items():
        spark.conf.set("spark.sql.files.ignoreCorruptFiles", str(name == "left out").lower())
        made = make_spark_converter(frame, cache_dir=f"{folder}/cache", delete_on_exit=False, progress=False)
        with made.make_batch_reader(batch_size=1000) as reader:
            ids = sorted(int(one) for batch in reader for one in batch["id"])
        found[name] = {"url": made.url, "ids": ids, "source": made._manifest.origin.source}
    spark.stop()
    return found


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Found]]:
    folder = str(tmp_path_factory.mktemp("keys"))
    return [run_python(convert_in_a_session, folder) for _ in range(2)]


ALL = list(range(100))
DELETED = [one for one in ALL if one != 5]


def test_every_way_has_its_rows(sessions: list[dict[str, Found]]) -> None:
    for found in sessions:
        assert found["0"]["ids"] == ALL
        for name in ("1", "1 by time", "1 by SQL", "random", "unknown", "joined", "blocks", "left out"):
            assert found[name]["ids"] == DELETED, name
        assert found["2"]["ids"] == found["newest"]["ids"] == [*DELETED, 1000]
        assert found["filtered"]["ids"] == [one for one in range(50) if one not in (5, 7)]
        # The two have one text.
        assert found["a column"]["ids"] == [97, 98, 99]
        assert found["a member"]["ids"] == [0, 1, 2]
        assert found["filtered otherwise"]["ids"] == [one for one in range(50) if one not in (5, 8)]


def test_a_version_has_one_entry_in_all_sessions(sessions: list[dict[str, Found]]) -> None:
    first, second = sessions
    for name in ("0", "1", "2", "filtered", "filtered otherwise", "newest", "a column", "a member"):
        assert first[name]["url"] == second[name]["url"], name
    assert first["1"]["url"] == first["1 by time"]["url"] == first["1 by SQL"]["url"]
    assert first["filtered"]["url"] == first["filtered as filtered"]["url"]
    others = [first[name]["url"] for name in ("0", "1", "2", "filtered", "filtered otherwise")]
    assert len(set(others)) == len(others)


def test_an_entry_says_which_version_it_was_written_of(sessions: list[dict[str, Found]]) -> None:
    for found in sessions:
        for name, version in {"0": 0, "1 by time": 1, "2": 2, "newest": 2, "filtered": 1}.items():
            said = rf"version {version} of the Delta table file:/.*/table"
            assert re.fullmatch(said, found[name]["source"]), name
        assert found["random"]["source"] == "DataFrame"


def test_what_may_give_other_rows_is_written_afresh(sessions: list[dict[str, Found]]) -> None:
    first, second = sessions
    for name in ("unknown", "random", "joined", "cast", "time", "sum", "blocks", "left out"):
        assert first[name]["url"] != second[name]["url"], name


SETTINGS = {"spark.sql.session.timeZone": ("UTC", "America/Los_Angeles"), "spark.sql.ansi.enabled": ("true", "false")}


def convert_under_settings(folder: str) -> list[Found]:
    """Frames of one text each, made under one setting of the session and then another, and what Spark reads of them."""
    from converter import make_spark_converter

    spark = start_spark(folder)
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    path = f"{folder}/table"
    spark.range(0, 48, 1, 1).selectExpr(
        "id", "timestamp_seconds(1793491200 + id * 3600) AS t", "cast(id AS string) AS s", "cast(id AS int) AS i",
        "date_add(date'2026-11-01', cast(id / 24 AS int)) AS d", "cast(id / 7 AS decimal(9, 3)) AS n",
    ).write.format("delta").save(path)  # fmt: skip
    texts = ["t > '2026-11-02 05:00:00'", "t >= d", "d = cast(t AS date)", "s > 9", "n = i / 7", "i > 2.5D"]
    frames = []
    for setting, values in SETTINGS.items():
        for value in values:
            spark.conf.set(setting, value)
            frames += [
                (text, spark.read.format("delta").option("versionAsOf", 0).load(path).where(text).select("id"))
                for text in texts
            ]
        spark.conf.set(setting, values[0])
    found = []
    for text, frame in frames:
        expected = sorted(row[0] for row in frame.collect())
        if not expected:
            continue
        made = make_spark_converter(frame, cache_dir=f"{folder}/cache", delete_on_exit=False, progress=False)
        with made.make_batch_reader(batch_size=1000) as reader:
            ids = sorted(int(one) for batch in reader for one in batch["id"])
        found.append({"text": text, "expected": expected, "ids": ids, "url": made.url})
    spark.stop()
    return found


def test_frames_of_one_text_made_under_other_settings_keep_their_rows(programs: dict[str, Any]) -> None:
    found = programs[convert_under_settings.__name__]
    for one in found:
        assert one["ids"] == one["expected"], one["text"]
    # Settings that a text means other rows by, or the test would show nothing.
    rows: dict[str, set[tuple[int, ...]]] = {}
    for one in found:
        rows.setdefault(one["text"], set()).add(tuple(one["expected"]))
    assert sum(len(kinds) > 1 for kinds in rows.values()) >= 3
    # And some whose entry is found again.
    assert len({one["url"] for one in found}) < len(found)


def convert_a_table_that_was_put_back(folder: str) -> list[Found]:
    """Version 1 twice: of the table, and of a copy of its version 0 that went another way in its place."""
    import shutil

    from converter import make_spark_converter

    spark = start_spark(folder)
    path = f"{folder}/table"
    spark.range(0, 10, 1, 1).write.format("delta").save(path)
    shutil.copytree(path, f"{folder}/copy")
    found = []
    for more in (100, 200):
        spark.range(more, more + 1).coalesce(1).write.format("delta").mode("append").save(path)
        frame = spark.read.format("delta").option("versionAsOf", 1).load(path)
        made = make_spark_converter(frame, cache_dir=f"{folder}/cache", delete_on_exit=False, progress=False)
        with made.make_batch_reader(batch_size=1000) as reader:
            found.append({"url": made.url, "ids": sorted(int(one) for batch in reader for one in batch["id"])})
        shutil.rmtree(path)
        shutil.copytree(f"{folder}/copy", path)
        spark.catalog.clearCache()
        spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()
    spark.stop()
    return found


def test_a_version_of_a_table_that_was_put_back_from_a_copy_is_another_one(programs: dict[str, Any]) -> None:
    first, second = programs[convert_a_table_that_was_put_back.__name__]
    assert (first["ids"], second["ids"]) == ([*range(10), 100], [*range(10), 200])
    assert first["url"] != second["url"]


def convert_while_it_changes(folder: str) -> Found:
    """Append to a table after it was planned, and while its rows are being written."""
    from converter import make_spark_converter
    from converter.sources.spark import write

    spark = start_spark(folder)
    path = f"{folder}/table"
    spark.range(0, 100, 1, 2).write.format("delta").save(path)
    early = spark.read.format("delta").load(path)
    spark.range(100, 110).write.format("delta").mode("append").save(path)
    kept: dict[str, Any] = {"cache_dir": f"{folder}/cache", "delete_on_exit": False, "progress": False}
    made = [make_spark_converter(early, **kept)]
    run_write, appended = write.run_write, []

    def run_and_append(*arguments: Any, **options: Any) -> Any:
        reports = run_write(*arguments, **options)
        if not appended:
            appended.append(spark.range(110, 120).write.format("delta").mode("append").save(path))
        return reports

    pytest.MonkeyPatch().setattr(write, "run_write", run_and_append)
    frame = spark.read.format("delta").load(path).where("id >= 0")
    made.append(make_spark_converter(frame, **kept))
    newest = spark.read.format("delta").load(path).where("id >= 0")
    before = spark.read.format("delta").option("versionAsOf", 1).load(path).where("id >= 0")
    made += [make_spark_converter(one, **kept) for one in (newest, frame, before, early)]
    spark.stop()
    folders = [entry.name for entry in (Path(folder) / "cache/converter-v1").glob("*/data-*")]
    return {"rows": [len(one) for one in made], "urls": [one.url for one in made], "folders": len(folders)}


def convert_in_zones_of_the_jvm(folder: str) -> list[Found]:
    """Times of long ago, which Spark reads by the JVM's zone, in two of them; and the first one again."""
    from deltalake import write_deltalake

    from converter import make_spark_converter

    old = dt.datetime(1850, 1, 1, tzinfo=dt.timezone.utc)
    write_deltalake(f"{folder}/table", pa.table({"at": pa.array([old], pa.timestamp("us", "UTC"))}))
    spark = start_spark(folder)
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    spark.conf.set("spark.sql.parquet.datetimeRebaseModeInRead", "LEGACY")
    zones = spark._jvm.java.util.TimeZone
    held, found = zones.getDefault(), []
    for zone in ("UTC", "America/Los_Angeles", "UTC"):
        zones.setDefault(zones.getTimeZone(zone))
        df = spark.read.format("delta").load(f"{folder}/table")
        made = make_spark_converter(df, cache_dir=f"{folder}/cache", delete_on_exit=False, progress=False)
        (batch,) = made.make_batch_reader()
        expected = df.selectExpr("unix_micros(at)").first()[0]
        found.append({"expected": expected, "rows": int(batch["at"].astype("int64")[0]), "url": made.url})
    zones.setDefault(held)
    spark.stop()
    return found


def test_a_version_that_is_read_in_another_zone_of_the_jvm_is_another_one(programs: dict[str, Any]) -> None:
    one, other, again = programs[convert_in_zones_of_the_jvm.__name__]
    for each in (one, other, again):
        assert each["rows"] == each["expected"]
    assert one["expected"] != other["expected"]
    assert one["url"] == again["url"] != other["url"]


def run_programs(folder: str) -> dict[str, Any]:
    """What each of the programs found: one Java for all, which starts a Spark for each."""
    programs = (
        convert_under_settings,
        convert_a_table_that_was_put_back,
        convert_while_it_changes,
        convert_in_zones_of_the_jvm,
    )
    return {program.__name__: program(f"{folder}/{program.__name__}") for program in programs}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with start_python(run_programs, str(tmp_path_factory.mktemp("programs"))) as process:
        found: dict[str, Any] = finish(process, seconds=270)
    return found


def test_a_table_that_changes_while_it_is_written_is_not_taken_for_its_version(programs: dict[str, Any]) -> None:
    found = programs[convert_while_it_changes.__name__]
    assert found["rows"] == [110, 120, 120, 120, 110, 120]
    by_chance, newest, again, before, early = found["urls"][1:]
    assert newest == again
    assert len({by_chance, newest, before, early}) == 4
    assert found["folders"] == len(set(found["urls"]))
