"""Spark's job without Spark: a DataFrame of known rows, and tasks that write them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from converter.portable import tasks
from converter.sources.spark import run as spark_run
from converter.storage.directory import Storage
from tests.faults.campaign.store_place import NUM_FILES, Ids

TASK_TRIES = 4
"""How often Spark runs a task that fails (`spark.task.maxFailures`)."""

_SCHEMA = {
    "type": "struct",
    "fields": [
        {"name": "id", "type": "long", "nullable": False, "metadata": {}},
        {"name": "x", "type": "float", "nullable": False, "metadata": {}},
    ],
}


class Frame:
    """What `make_spark_converter` asks of a DataFrame, around its job."""

    isStreaming = False  # noqa: N815 (Spark's name)
    mapInArrow = None  # noqa: N815

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self.sparkSession = SimpleNamespace(conf=SimpleNamespace(get=lambda name, default=None: default))
        self.schema = SimpleNamespace(jsonValue=lambda: _SCHEMA, json=lambda: json.dumps(_SCHEMA))

    def select(self, _: str) -> Frame:
        """All columns."""
        return self


def run_tasks(
    df: Frame, spec: Any, *, directory: Storage, session: Any, writer: str
) -> list[tuple[int, dict[str, Any]]]:
    """What the tasks of the job report: each runs again if it fails, some times."""
    found: list[tuple[int, dict[str, Any]]] = []
    for partition, ids in enumerate(np.array_split(df.ids, NUM_FILES)):
        batch = pa.RecordBatch.from_arrays([pa.array(ids), pa.array(ids.astype(np.float32))], names=["c0", "c1"])
        for attempt in range(TASK_TRIES):
            number = partition * TASK_TRIES + attempt
            try:
                reports = tasks._write(iter([batch]), spec, partition=partition, attempt=number)
            except Exception as error:  # noqa: BLE001 (Spark tries again whatever it was)
                if attempt + 1 < TASK_TRIES:
                    continue
                place = spec["directory"]
                raise spark_run._write_error(error, directory, place, session, writer) from directory.harmless(error)
            found += [(partition, report) for report in json.loads(json.dumps(reports))]
            break
    return found
