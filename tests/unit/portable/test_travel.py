"""What runs on an executor needs nothing of ours there: it is pickled by value, and imports NumPy and pyarrow alone."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark.cloudpickle

from converter import NumPy
from converter.portable.packing import make_pack_batches
from converter.portable.tasks import make_probe, make_write_partition
from converter.sources.spark.schema import SparkColumn, decoded_columns
from converter.sources.spark.session import travels_by_value
from tests.columns import ALL, record_batch
from tests.entries import make_spec

EXECUTOR = """
import importlib.util, json, sys, types
from pathlib import Path

import numpy, pyarrow

IS_ALLOWED = {"numpy", "pyarrow", "pyspark", *sys.stdlib_module_names}


class OnlyThese:
    def find_spec(self, name, path=None, target=None):
        first = name.split(".")[0]
        if first not in IS_ALLOWED and not first.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"an executor has no {name}")


sys.meta_path.insert(0, OnlyThese())
program, batches, folder, spark = sys.argv[1:]


class TaskContext:
    @staticmethod
    def get():
        return TaskContext

    partitionId, taskAttemptId = (lambda: 0), (lambda: 1)


# Of Spark only what unpickles functions, and the task's numbers.
package = types.ModuleType("pyspark")
package.__path__, package.TaskContext = [spark], TaskContext
sys.modules["pyspark"] = package
import pyspark.cloudpickle

functions = pyspark.cloudpickle.loads(Path(program).read_bytes())
with pyarrow.OSFile(batches) as file:
    found = list(pyarrow.ipc.open_stream(file))
reports = [json.loads(one) for batch in functions["write"](iter(found)) for one in batch.column(1).to_pylist()]
packed = [batch.num_rows for batch in functions["pack"](iter(found))]
probed = [batch.num_rows for batch in functions["probe"](iter(found))]
ours = sorted(name for name in sys.modules if name.split(".")[0] == "converter")
print(json.dumps({"reports": reports, "packed": packed, "probed": probed, "ours": ours}))
"""


def test_a_fresh_interpreter_runs_it_from_its_bytes(tmp_path: Path) -> None:
    columns = [column.plan() for column in ALL]
    bytes_column = SparkColumn(
        name="array", path=("array",), kind="scalar", dtype="bytes", ndim=0, shape=None, narrowed_from=None
    )
    columns += decoded_columns([bytes_column], {"array": NumPy("float32", (3,))})
    stream = io.BytesIO()
    np.save(stream, np.arange(3, dtype=np.float32))
    spec = make_spec(tmp_path / "out", columns)
    Path(tmp_path / "out").mkdir()
    with travels_by_value():
        functions = {
            "write": make_write_partition(spec),
            "pack": make_pack_batches(spec["columns"]),
            "probe": make_probe(str(tmp_path / "out"), None),
        }
        (tmp_path / "functions").write_bytes(pyspark.cloudpickle.dumps(functions))
    batch = record_batch(ALL, range(100))
    arrays = pa.array([stream.getvalue()] * 100, pa.binary())
    batch = pa.RecordBatch.from_arrays([*batch.columns, arrays], names=[*batch.schema.names, "array"])
    with pa.OSFile(str(tmp_path / "batches"), "wb") as file, pa.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)
    (tmp_path / "executor.py").write_text(EXECUTOR)
    arguments = [tmp_path / "executor.py", tmp_path / "functions", tmp_path / "batches", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-I", *map(str, arguments), str(Path(pyspark.__file__).parent)],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ours"] == []
    assert found["packed"] == [100]
    files = [file["name"] for report in found["reports"] for file in report.get("files", [report]) if "name" in file]
    assert sum(pq.read_metadata(tmp_path / "out" / name).num_rows for name in files) == 100
    written = pq.read_table(tmp_path / "out" / files[0], columns=["array"])["array"]
    assert set(written.to_pylist()) == {np.arange(3, dtype="<f4").tobytes()}
