"""A version of a Delta table is read the same whatever a real Spark does to the table, until VACUUM removes its files.

Delta wants a Spark of its own, so it runs in a process of its own, which executes the statements that it is sent.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converter import (
    DatasetConverter,
    ReadError,
    SourceChangedError,
    SourceError,
    StateMismatchError,
    make_delta_converter,
)
from tests.parity import golden_tables
from tests.processes import error_of, finish, run_python, start_python
from tests.waiting import wait_until

START_SECONDS = 240
NUM_ROWS = 600
PINNED = 2
DELETED = {3, 77, 200, 599}
UPDATED = 10
MIXED: dict[str, Any] = {"batch_size": 50, "shuffle": True, "seed": 7, "shuffle_window_rows": 150}

Session = Callable[[str], list[list[Any]]]
"""Sends a statement, and returns the rows of its result."""

SETUP = (
    (
        "CREATE TABLE $table USING delta PARTITIONED BY (p) TBLPROPERTIES (delta.enableDeletionVectors = true) AS "
        "SELECT id, id * 10 AS x, concat('row ', id) AS s, CAST(id % 3 AS INT) AS p FROM range(0, 600, 1, 2)"
    ),
    "DELETE FROM $table WHERE id IN (3, 77, 200, 599)",
    "UPDATE $table SET x = -x WHERE id < 10",
)
CHANGES = (
    "INSERT INTO $table SELECT id, 0L, 'new', CAST(id % 4 AS INT) FROM range(600, 700, 1, 1)",
    "DELETE FROM $table WHERE id % 7 = 0",
    "UPDATE $table SET x = 0, s = 'changed' WHERE id % 5 = 1",
    (
        "MERGE INTO $table AS old USING (SELECT id * 4 AS id FROM range(200)) AS new ON old.id = new.id "
        "WHEN MATCHED AND new.id % 8 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET x = 1 "
        "WHEN NOT MATCHED THEN INSERT (id, x, s, p) VALUES (new.id, 2, 'merged', 0)"
    ),
    "OPTIMIZE $table ZORDER BY (x)",
    "ALTER TABLE $table ADD COLUMNS (later DOUBLE)",
    "INSERT OVERWRITE $table SELECT id, 5L, 'other', 1, 0.5D FROM range(0, 20, 1, 1)",
    "RESTORE TABLE $table TO VERSION AS OF 1",
)


def serve_spark(folder: str) -> int:
    """Execute what comes through a socket until it is closed; returns how many statements there were."""
    from converter import start_local_spark

    conf = golden_tables.CONF | {"spark.sql.warehouse.dir": f"{folder}/warehouse"}
    spark = start_local_spark("isolation", master="local[2]", conf=conf)
    calls = {"statement": run_statement, "name": open_by_name}
    count = 0
    with Listener(f"{folder}/socket") as listener, listener.accept() as client:
        while True:
            try:
                call, argument = json.loads(client.recv_bytes())
            except EOFError:
                break
            count += 1
            try:
                answer = calls[call](spark, argument)
            except Exception as error:  # noqa: BLE001 (it is told to the test)
                answer = {"error": str(error)[:3000]}
            client.send_bytes(json.dumps(answer).encode())
    spark.stop()
    return count


def run_statement(spark: Any, statement: str) -> list[list[str]]:
    return [[str(value) for value in row] for row in spark.sql(statement).collect()]


def open_by_name(spark: Any, name: str) -> dict[str, Any]:
    """What the table of a catalog is, and what is said of one that is not there."""
    with make_delta_converter(name, spark=spark, version=0) as converter:
        rows = rows_of(converter)
        found = {"url": converter.url, "rows": len(converter), "fingerprint": converter.fingerprint, "ids": rows["id"]}
    found["detail"] = spark.sql(f"DESCRIBE DETAIL {name}").first()["location"]
    found["quoted"] = len(make_delta_converter(f"`{name.replace('.', '`.`')}`", spark=spark, version=0))
    found["by path"] = error_of(lambda: make_delta_converter(name))
    found["missing"] = error_of(lambda: make_delta_converter(f"{name}_gone", spark=spark))
    spark.range(5).write.mode("overwrite").format("parquet").saveAsTable("no_delta")
    found["no delta"] = error_of(lambda: make_delta_converter("no_delta", spark=spark))
    return found


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Any]]:
    """Calls a function of the process with Spark."""
    folder = tmp_path_factory.mktemp("spark")
    with start_python(serve_spark, str(folder)) as process:

        def is_ready() -> bool:
            assert process.poll() is None, process.communicate()[1]
            return (folder / "socket").exists()

        wait_until(is_ready, seconds=START_SECONDS)
        with Client(str(folder / "socket")) as server:

            def ask(name: str, argument: str) -> Any:
                server.send_bytes(json.dumps([name, argument]).encode())
                answer = json.loads(server.recv_bytes())
                assert "error" not in answer, answer["error"]
                return answer

            yield ask
        assert finish(process) > 0


@pytest.fixture
def table(call: Callable[[str, str], Any], tmp_path: Path) -> tuple[Path, Session]:
    """A table whose newest version has deleted and updated rows, and who changes it."""
    path = tmp_path / "table"

    def run(statement: str) -> list[list[Any]]:
        return call("statement", statement.replace("$table", f"delta.`{path}`"))

    for statement in SETUP:
        run(statement)
    return path, run


def rows_of(converter: DatasetConverter, **options: Any) -> dict[str, list[Any]]:
    with converter.make_batch_reader(**{"batch_size": 100, "cur_shard": 0, "shard_count": 1} | options) as reader:
        return joined(list(reader))


def joined(batches: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row for batch in batches for row in plain(batch[name])] for name in batches[0]} if batches else {}


def plain(column: Any) -> list[Any]:
    return list(column) if isinstance(column, list) else column.tolist()


def assert_pinned(rows: dict[str, list[Any]]) -> None:
    """Every row of the pinned version, once, and no other."""
    assert sorted(rows["id"]) == [number for number in range(NUM_ROWS) if number not in DELETED]
    for number, x, s, p in zip(rows["id"], rows["x"], rows["s"], rows["p"], strict=True):
        assert (x, s, p) == ((-10 if number < UPDATED else 10) * number, f"row {number}", number % 3)


def read_copy(path: str, shard_count: int, num_workers: int) -> list[dict[str, list[Any]]]:
    """What each shard reads of a pickled converter, in a process that has seen nothing else."""
    converter = pickle.loads(Path(path).read_bytes())
    found = []
    for shard in range(shard_count):
        with converter.make_torch_dataloader(
            cur_shard=shard, shard_count=shard_count, uneven="keep", num_workers=num_workers, **MIXED
        ) as loader:
            found.append(joined(list(loader)))
    return found


def test_epochs_stay_the_same_while_the_table_changes(table: tuple[Path, Session], tmp_path: Path) -> None:
    path, run = table
    with make_delta_converter(path, version=PINNED) as converter:
        assert_pinned(rows_of(converter))
        num_epochs = len(CHANGES)
        with converter.make_batch_reader(num_epochs=num_epochs, cur_shard=0, shard_count=1, **MIXED) as reader:
            batches = list(reader)
        steps = len(batches) // num_epochs
        expected = [joined(batches[epoch * steps : (epoch + 1) * steps]) for epoch in range(num_epochs)]
        assert expected[0] != expected[1]
        copy = tmp_path / "copy.pickle"
        copy.write_bytes(pickle.dumps(converter))
        before = run_python(read_copy, str(copy), 2, 0)
        statistics = {name: vars_of(one) for name, one in converter.statistics.items()}

        with (
            converter.make_torch_dataloader(cur_shard=0, shard_count=1, **MIXED) as loader,
            converter.make_torch_dataloader(cur_shard=0, shard_count=1, num_workers=2, **MIXED) as with_workers,
        ):
            for change, wanted in zip(CHANGES, expected, strict=True):
                begun = [(iterator := iter(one), [next(iterator)]) for one in (loader, with_workers)]
                run(change)
                for iterator, first in begun:
                    assert joined([*first, *iterator]) == wanted, change
        newest = int(run("DESCRIBE HISTORY $table LIMIT 1")[0][0])
        assert newest == PINNED + len(CHANGES)

        assert run_python(read_copy, str(copy), 2, 2) == before
        assert_pinned({name: before[0][name] + before[1][name] for name in before[0]})
        with make_delta_converter(path, version=PINNED) as again:
            assert again.fingerprint == converter.fingerprint
            assert rows_of(again, **MIXED) == expected[0]
            assert {name: vars_of(one) for name, one in again.statistics.items()} == statistics
    with make_delta_converter(path) as changed:
        assert changed.fingerprint != converter.fingerprint
        assert len(changed) == NUM_ROWS - len(DELETED)
        assert sorted(rows_of(changed, columns=["x"])["x"]) != sorted(expected[0]["x"])


def vars_of(one: Any) -> list[Any]:
    return [one.null_count, *(getattr(one, name, None) for name in ("min", "max", "mean"))]


def test_a_run_goes_on_where_it_was_after_the_table_has_changed(table: tuple[Path, Session]) -> None:
    path, run = table
    with make_delta_converter(path, version=PINNED) as converter:
        whole = rows_of(converter, **MIXED)
        states = []
        for shard in range(2):
            with converter.make_torch_dataloader(cur_shard=shard, shard_count=2, uneven="keep", **MIXED) as loader:
                seen = [batch for _, batch in zip(range(3), loader, strict=False)]
                states.append((json.dumps(loader.state_dict(batches=3)), joined(seen)["id"]))
    assert states[0][0] == states[1][0]
    for change in (CHANGES[1], CHANGES[4], CHANGES[5], CHANGES[6]):
        run(change)
    with make_delta_converter(path, version=PINNED) as converter:
        for shard_count in (1, 3):
            rest: list[int] = []
            for shard in range(shard_count):
                with converter.make_torch_dataloader(
                    cur_shard=shard, shard_count=shard_count, uneven="keep", **MIXED
                ) as loader:
                    loader.load_state_dict(json.loads(states[0][0]))
                    rest += joined(list(loader))["id"]
            assert sorted([*states[0][1], *states[1][1], *rest]) == sorted(whole["id"])
    with (
        make_delta_converter(path) as changed,
        changed.make_torch_dataloader(cur_shard=0, shard_count=1, nulls="mask", **MIXED) as loader,
        pytest.raises(StateMismatchError, match=r"other|another"),
    ):
        loader.load_state_dict(json.loads(states[0][0]))


def test_what_vacuum_removed_is_named_with_its_version_and_a_remedy(table: tuple[Path, Session]) -> None:
    path, run = table
    before = {str(file.relative_to(path)) for file in path.rglob("*.parquet")}
    said = re.compile(
        rf"file://{re.escape(str(path))}/(?P<file>\S+\.parquet) is not there\. It belongs to version {PINNED} of the "
        rf"Delta table file://{re.escape(str(path))}\. VACUUM removes .*: take a newer version, or keep these rows "
        rf"with make_spark_converter\(.*versionAsOf', {PINNED}\)"
    )

    def assert_said(read: Callable[[], Any]) -> None:
        with pytest.raises(SourceChangedError) as caught:
            read()
        found = said.search(str(caught.value))
        assert found is not None, caught.value
        assert found["file"] in gone
        # What comes from a worker process has its class and its text.
        if "worker process" not in str(caught.value):
            assert caught.value.path == f"file://{path}/{found['file']}"

    with make_delta_converter(path, version=PINNED) as converter:
        whole = rows_of(converter, **MIXED)
        copy = pickle.dumps(converter)
        with (
            converter.make_torch_dataloader(cur_shard=0, shard_count=1, **MIXED) as loader,
            converter.make_torch_dataloader(cur_shard=0, shard_count=1, num_workers=2, **MIXED) as with_workers,
            converter.make_batch_reader(cur_shard=0, shard_count=1, **MIXED) as reader,
        ):
            assert joined(list(loader)) == whole
            run("INSERT OVERWRITE $table SELECT id, 1L, 'new', 1 FROM range(0, 20, 1, 1)")
            run("VACUUM $table RETAIN 0 HOURS")
            gone = before - {str(file.relative_to(path)) for file in path.rglob("*.parquet")}
            assert gone
            # An epoch that was read once, one that was not begun, and one in processes.
            for one in (loader, reader, with_workers):
                assert_said(lambda one=one: list(one))
        assert_said(lambda: rows_of(pickle.loads(copy)))
        assert_said(lambda: converter.where([("x", ">", 100)]))
        assert_said(lambda: converter.split({"a": 0.5, "b": 0.5}, by="id"))
        assert_said(lambda: converter.statistics)
    assert_said(lambda: make_delta_converter(path, version=PINNED))
    assert issubclass(SourceChangedError, SourceError)
    assert not issubclass(SourceChangedError, ReadError)
    with make_delta_converter(path) as newest:
        assert sorted(rows_of(newest)["id"]) == list(range(20))


def test_a_table_of_a_catalog_is_found_by_its_name(call: Callable[[str, str], Any]) -> None:
    call("statement", "CREATE TABLE named USING delta AS SELECT id FROM range(0, 9, 1, 2)")
    call("statement", "DELETE FROM named WHERE id < 5")
    found = call("name", "spark_catalog.default.named")
    assert sorted(found["ids"]) == list(range(9))
    assert found["rows"] == found["quoted"] == 9
    assert found["url"].removeprefix("file://") == re.sub("^file:/+", "/", found["detail"])
    assert found["by path"][0] == "SourceError"
    assert found["by path"][1].endswith("Check the path, and that this machine can see it.")
    assert "spark_catalog.default.named does not exist." in found["by path"][1]
    for one in ("missing", "no delta"):
        assert found[one][0] == "SourceError", found[one]
        assert re.search("(?s)catalog does not say where|no Delta table", found[one][1]), found[one]
    with make_delta_converter(found["url"], version=0) as converter:
        assert converter.fingerprint == found["fingerprint"]
    assert np.isin(rows_of(make_delta_converter(found["url"]))["id"], [5, 6, 7, 8]).all()
