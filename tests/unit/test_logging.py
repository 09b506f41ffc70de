"""One logger, `converter`: its children log plain text without secrets, and nothing configures logging for users."""

from __future__ import annotations

import ast
import json
import logging
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import converter
from converter.deltatorch import FieldSpec
from converter.deltatorch.warning import native_line
from converter.petastorm.places import checked_urls

PACKAGE = Path(converter.__file__).parent
LEVELS = {"debug", "info", "warning", "log"}
AS_PETASTORM = {"petastorm/pytorch.py"}
"""Where the text and the level are Petastorm's, which logs an error before it raises it."""


@cache
def calls_in(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if "logging" in path.read_text()]


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_logs_to_a_child_of_the_one_logger(path: Path) -> None:
    for call in calls_in(path):
        if ast.unparse(call.func) == "logging.getLogger":
            (name,) = map(ast.unparse, call.args)
            assert name == "__name__" or ast.literal_eval(name).startswith("converter.")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_line_has_one_of_three_levels_and_its_values_apart(path: Path) -> None:
    """An error is raised and not logged: the program that catches it knows whether it is one."""
    for call in calls_in(path):
        if ast.unparse(call.func).startswith("logger."):
            assert call.func.attr in LEVELS or name_of(path) in AS_PETASTORM  # type: ignore[attr-defined]
            text = call.args[call.func.attr == "log"]  # type: ignore[attr-defined]
            assert isinstance(text, ast.Constant), ast.unparse(call)
            # Attributes of a record beside its text would have to be plain values.
            assert not call.keywords


def test_what_runs_on_executors_logs_nothing() -> None:
    """Their logs are far away: what a task finds it reports to the driver, which logs it."""
    assert [path for path in MODULES if path.parent.name == "portable"] == []


def test_an_import_configures_no_logging_and_hides_no_warning() -> None:
    """There is no NullHandler either: without a configuration Python shows warnings on stderr, and here they must."""
    program = """
import json, logging, warnings
import numpy, pyarrow.parquet, fsspec.asyn  # They add filters of their own.
before = list(warnings.filters)
import converter
loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("converter")]
print(json.dumps([
    len(loggers), [handler for logger in [logging.root, *loggers] for handler in logger.handlers],
    [logger.name for logger in loggers if logger.level or not logger.propagate or logger.disabled],
    warnings.filters == before,
]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    num_loggers, handlers, changed, are_filters_kept = json.loads(done.stdout)
    assert num_loggers > 10
    assert (handlers, changed, are_filters_kept) == ([], [], True)


def test_a_handler_gets_whole_lines_of_plain_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As OpenTelemetry's handler needs them: a text that formats, and no attributes but logging's own."""
    pq.write_table(pa.table({"x": np.arange(100.0)}), tmp_path / "a.parquet")
    (tmp_path / "notes.txt").write_text("no rows")
    with caplog.at_level(logging.DEBUG, "converter"):
        made = converter.make_parquet_converter(str(tmp_path))
        with made.make_batch_reader(batch_size=16, cur_shard=0, shard_count=3, uneven="keep") as reader:
            assert len(list(reader)) > 0
    records = [record for record in caplog.records if record.name.startswith("converter.")]
    assert {record.levelname for record in records} >= {"WARNING"}
    own = vars(logging.makeLogRecord({})).keys() | {"message", "asctime"}
    for record in records:
        assert "%" not in record.getMessage()
        assert vars(record).keys() <= own
        assert json.loads(json.dumps([record.getMessage(), record.levelname, record.name]))


SIGNED = "https://host/table?sv=2024&sig=SECRET"


def test_a_wrong_list_of_urls_does_not_show_the_secrets_of_the_others() -> None:
    with pytest.raises(TypeError, match="a path or URL, or a list of them, got None") as caught:
        converter.make_parquet_converter([SIGNED, None])  # type: ignore[list-item]
    assert "SECRET" not in str(caught.value)
    with pytest.raises(ValueError, match=r"must be a URL, or a list of URLs that is not empty, got \[3\]") as wrong:
        checked_urls([SIGNED, 3])
    assert "SECRET" not in str(wrong.value)
    with pytest.raises(ValueError, match="same scheme and netloc, got s3://bucket/a, s3://other/b") as several:
        checked_urls(["s3://key:SECRET@bucket/a", "s3://key:SECRET@other/b"])
    assert "SECRET" not in str(several.value)


def test_the_native_line_of_an_old_call_shows_no_secret_of_its_url() -> None:
    line = native_line(SIGNED, [FieldSpec("x")], {"storage_options": {"account_key": "SECRET"}})
    assert line.startswith("make_delta_converter('https://host/table', ")
    assert "SECRET" not in line
