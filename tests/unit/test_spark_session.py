"""What is told of a Spark error: its own reason, not its hundreds of lines."""

from __future__ import annotations

from typing import Any

import pytest

from converter.sources import spark as spark_source
from converter.sources.spark_session import finding_in, short_cause
from converter.storage import open_storage

STACK = "".join(f"\tat org.apache.spark.Some.method{number}(Some.scala:{number})\n" for number in range(200))
TRACEBACK = """Traceback (most recent call last):
  File "/x/job.py", line 3, in fail
    raise ValueError(f"no value for {number}")
ValueError: no value for 777
"""


FAILED_WRITE = "org.apache.spark.SparkException: [TASK_WRITE_FAILED] Task failed while writing rows to file:/x."
ANCIENT = "org.apache.spark.SparkUpgradeException: [INCONSISTENT.WRITE_ANCIENT_DATETIME] Writing dates before 1582."


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"An error occurred while calling o1.collect.\n: {TRACEBACK}{STACK}", "ValueError: no value for 777"),
        # Spark Connect 4.2 begins the traceback in the middle of a line.
        (f"[PYTHON_EXCEPTION] The Python worker said: {TRACEBACK}{STACK}", "ValueError: no value for 777"),
        (f"An error occurred while calling o1.x.\n: {FAILED_WRITE}\n{STACK}Caused by: {ANCIENT}\n{STACK}", ANCIENT),
        (
            f"Job aborted.\n{STACK}Caused by: java.io.IOException: Disk is full\n{STACK}",
            "java.io.IOException: Disk is full",
        ),
        (
            f"{FAILED_WRITE}\n{STACK}Caused by: {FAILED_WRITE}\n{STACK}Caused by: java.io.IOException: Mkdirs\n{STACK}",
            "java.io.IOException: Mkdirs",
        ),
        (f"{FAILED_WRITE}\n{STACK}", FAILED_WRITE),
        ("plain\nwords", "plain"),
        ("", "Exception"),
    ],
    ids=["traceback", "in a line", "task write failed", "java", "both", "task alone", "plain", "nothing"],
)
def test_the_cause_of_a_spark_error_is_one_line(text: str, cause: str) -> None:
    assert short_cause(Exception(text)) == cause


def test_a_cause_that_the_text_leaves_out_is_looked_for_behind_the_error() -> None:
    class CapturedError(Exception):
        def __init__(self, text: str, cause: Exception | None = None) -> None:
            super().__init__(text)
            self.cause = cause

    behind = CapturedError(FAILED_WRITE, CapturedError(f"java.io.IOException: Mkdirs failed\n{STACK}"))
    assert short_cause(CapturedError(f"{FAILED_WRITE}\n{STACK}", behind)) == "java.io.IOException: Mkdirs failed"


def test_what_an_executor_found_is_read_from_the_text() -> None:
    text = f'[X] boom: ValueError: converter finding: {{"kind": "jagged", "column": "a \\"b"}}\n{STACK}'
    assert finding_in(Exception(text)) == {"kind": "jagged", "column": 'a "b'}
    assert finding_in(Exception("something else")) is None


class Session:
    """Of Spark's, what tells one from another."""

    def __init__(self, application: str) -> None:
        self.conf = {"spark.app.id": application}


def test_executors_are_asked_again_where_something_else_is_to_be_tried() -> None:
    session: Any = Session("app-1")
    url = "abfss://data@lake.dfs.core.windows.net/cache/converter-v1/key/1"

    def place(options: dict[str, Any], session: Any = session, url: str = url) -> tuple[str, ...]:
        return spark_source._place_of(open_storage(url, options), session)

    wrong = place({"account_key": "d3Jvbmc="})
    assert place({"account_key": "d3Jvbmc="}) == wrong
    assert place({"account_key": "cmlnaHQ="}) != wrong
    assert place({"account_key": "d3Jvbmc="}, url=url.replace("/key/1", "/other/2")) == wrong
    assert place({"account_key": "d3Jvbmc="}, Session("app-2")) != wrong
    assert place({"credential": open_storage}) == place({"credential": open_storage})
    assert "d3Jvbmc" not in str(wrong)
