"""Rows whose every value is a function of (row id, column name).

So a wrong row, a swapped column or a buffer that two batches share shows in the values. Both sides stand here: the
Spark expression that makes a column, and the NumPy values that a reader must find.

Both begin with `_key`: an integer that no two ids share, and other ones for another column.

What one process cannot show (a driver that is killed, Spark Connect, a cluster) is run as a function of a test
module in a Python of its own: `start_python`, `run_python`.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]

REPOSITORY = Path(__file__).resolve().parents[1]

_PRIME = 2**31 - 1
_DAY_MICROSECONDS = 86_400_000_000
ODD_NAMES = (
    "with space", "dot.ted.name", 'double"quote', "single'quote", "back`tick", "a=b", "comma, semicolon;", "<b>",
    "curly{brace}", "per%cent", "žluťoučký 🐟", "select",
)  # fmt: skip
VECTOR_SIZE = 6


def known_rows(spark: SparkSession, num_rows: int, *, nulls: bool = False, partitions: int = 3) -> DataFrame:
    """The rows of ids `0 … num_rows - 1`, in their order, in `partitions` partitions."""
    columns = (_null_where(name, column, nulls).alias(name) for name, column in _spark_columns())
    return spark.range(0, num_rows, 1, partitions).select("id", *columns)


def known_values(ids: Sequence[int] | Ids, *, nulls: bool = False, float_dtype: str = "float32") -> dict[str, Array]:
    """What a reader finds for these ids: a zero, an empty string or an empty row where `known_valid` is False."""
    rows = np.asarray(ids, np.int64)
    values = {"id": rows} | {name: make(rows, float_dtype) for name, make in _numpy_columns().items()}
    if nulls:
        for name, valid in known_valid(rows).items():
            if values[name].dtype == object:
                empty = np.empty(1, object)
                empty[0] = type(values[name][0])() if name != "ragged" else np.empty(0, np.int64)
                values[name] = np.where(valid, values[name], empty)
            else:
                values[name] = values[name].copy()
                values[name][~valid] = np.zeros((), values[name].dtype)
    return values


def known_valid(ids: Sequence[int] | Ids) -> dict[str, npt.NDArray[np.bool_]]:
    """Where the values of `known_rows(nulls=True)` are present; `id` always is."""
    rows = np.asarray(ids, np.int64)
    valid = {}
    for name in _numpy_columns():
        # A member of a struct is missing together with it.
        column = "struct" if name.startswith("struct.") else name
        valid[name] = _key(rows, column + "?") % 5 != 2
    return valid


def assert_same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    """The same columns in the same order, with the same dtypes, shapes and values."""
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name].dtype == values.dtype, name
        assert found[name].shape == values.shape, name
        if values.dtype == object and len(values) and isinstance(values[0], np.ndarray):
            for found_row, row in zip(found[name], values, strict=True):
                np.testing.assert_array_equal(found_row, row, err_msg=name, strict=True)
        else:
            np.testing.assert_array_equal(found[name], values, err_msg=name, strict=True)


def concatenate(batches: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """All rows of a reader, column by column."""
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


@contextmanager
def start_python(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A Python that calls `function`, of a module's top, with these JSON values, and ends with the block.

    So do its children. The last line of its output is what the function returned, as JSON. Of where the cache goes
    it knows only what `environment` says.
    """
    code = (
        f"import json; from {function.__module__} import {function.__name__} as run; "
        f"result = run(*json.loads({json.dumps(arguments)!r})); print(json.dumps(result))"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "CONVERTER_CACHE_DIR"}
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=inherited | dict(environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run_python(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """What `function` returns in a Python of its own."""
    with start_python(function, *arguments, environment=environment) as process:
        return finish(process)


@contextmanager
def only_connect_server() -> Iterator[None]:
    """The block in which a local server of Spark Connect may run: all of them listen on port 15002 of this machine."""
    with open(Path(tempfile.gettempdir()) / "spark-tensor-converter-tests-connect.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def finish(process: subprocess.Popen[str], *, seconds: float = 120) -> Any:
    """Wait for a process of `start_python`: what its function returned."""
    output, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


def wait_until(claim: Callable[[], Any], *, seconds: float = 240) -> None:
    """Return once `claim` holds; fail if it does not in time."""
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, f"not within {seconds} s: {claim}"
        time.sleep(0.05)


def error_of(call: Callable[[], Any]) -> list[str]:
    """The class and the text of what `call` raises, to be told to another process; two empty strings if nothing."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (whatever it is, the test says what it must be)
        return [type(error).__name__, str(error)]
    return ["", ""]


def slow_rows(spark: SparkSession, release: str | Path, *, partitions: int = 2) -> DataFrame:
    """Partitions that give rows enough for data files, and the rest of them once `release` exists (or never)."""
    path = str(release)
    first = 25_000  # Two batches that Spark hands on, and a part of the third.

    def rows(batches: Any) -> Any:
        import pyarrow as pa

        for _ in batches:
            yield pa.record_batch([pa.array(range(first))], names=["id"])
        deadline = time.monotonic() + 60
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield pa.record_batch([pa.array(range(first))], names=["id"])

    return spark.range(0, partitions, 1, partitions).mapInArrow(rows, "id long")


def files_below(directory: str | Path) -> list[str]:
    """All files there, by their paths below it."""
    root = Path(directory)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())


def _salt(name: str) -> int:
    return zlib.crc32(name.encode())


def _key(ids: Ids, name: str) -> Ids:
    """An integer in `[0, 2**31 - 1)`, another one for each id."""
    return (ids * 1_000_003 + _salt(name)) % _PRIME


def _spark_key(name: str) -> Column:
    from pyspark.sql import functions as F

    return F.pmod(F.col("id") * 1_000_003 + F.lit(_salt(name)), F.lit(_PRIME))


def _null_where(name: str, column: Column, nulls: bool) -> Column:
    from pyspark.sql import functions as F

    return F.when(F.pmod(_spark_key(name + "?"), F.lit(5)) != 2, column) if nulls else column


def _spark_columns() -> list[tuple[str, Column]]:
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import functions as F

    key = _spark_key

    def numbers(name: str, count: int, spark_type: str, divisor: int) -> list[Column]:
        return [(F.pmod(key(name) + 7919 * index, F.lit(2**20)) / divisor).cast(spark_type) for index in range(count)]

    def sparse(row: Any, values: Any) -> Any:
        # The places that are left out count as zeros.
        return Vectors.sparse(VECTOR_SIZE, {index: value for index, value in enumerate(values) if (row >> index) & 2})

    # No annotations: PySpark would look for a kind of pandas UDF in them, and warn.
    vector = F.udf(lambda row, values: Vectors.dense(values) if row % 2 else sparse(row, values), VectorUDT())
    days = key("date") % 3_652_059 - 719_162
    micros = key("timestamp_ntz") * 2_999_999 - 2**51
    day = F.floor(micros / _DAY_MICROSECONDS).cast("int")
    second = ((micros - day.cast("long") * _DAY_MICROSECONDS).cast("decimal(18,0)") / 1_000_000).cast("decimal(18,6)")
    words = F.concat(F.lit("žluťoučký 🐟\n"), key("string").cast("string"))
    nested = numbers("nested", 6, "int", 1)
    return [
        ("boolean", key("boolean") % 2 == 0),
        ("byte", (key("byte") % 256 - 128).cast("byte")),
        ("short", (key("short") % 65536 - 32768).cast("short")),
        ("int", (key("int") * 2 - 2**31).cast("int")),
        ("long", key("long") * 4_294_967_291 - 2**62),
        ("float", ((key("float") % 2**24) / 256 - 32768).cast("float")),
        ("double", key("double") / 1024 - 1_000_000),
        ("decimal", ((key("decimal") % 2**24 - 2**23).cast("decimal(18,0)") / 4).cast("decimal(20,2)")),
        ("date", F.date_add(F.lit("1970-01-01").cast("date"), days.cast("int"))),
        ("timestamp", F.timestamp_micros(key("timestamp") * 2_999_999 - 2**51)),
        ("timestamp_ntz", F.expr("timestamp_ntz'1970-01-01 00:00:00'") + F.make_dt_interval(day, secs=second)),
        ("string", F.when(key("string") % 7 == 0, "").otherwise(words)),
        (
            "binary",
            F.unhex(F.call_function("repeat", F.lpad(F.hex(key("binary")), 8, "0"), (key("binary") % 3).cast("int"))),
        ),
        ("array<float>", F.array(*numbers("array<float>", 8, "float", 16))),
        ("array<double>", F.array(*numbers("array<double>", 3, "double", 1000))),
        ("nested", F.array(F.array(*nested[:3]), F.array(*nested[3:]))),
        ("flags", F.array(*(F.pmod(key("flags") + index, F.lit(3)) == 0 for index in range(5)))),
        ("ragged", F.slice(F.array(*numbers("ragged", 4, "long", 1)), 1, (key("ragged") % 5).cast("int"))),
        ("vector", vector(F.col("id"), F.array(*numbers("vector", VECTOR_SIZE, "double", 16)))),
        (
            "struct",
            F.struct(
                (key("struct.dot.ted") / 1024).alias("dot.ted"),
                F.array(*numbers("struct.array", 2, "float", 16)).alias("array"),
                F.struct(key("struct.inner.long").alias("long")).alias("inner"),
            ),
        ),
        *((name, key(name)) for name in ODD_NAMES),
    ]


def _numpy_columns() -> dict[str, Callable[[Ids, str], Array]]:
    def numbers(name: str, count: int, divisor: int) -> Callable[[Ids], Array]:
        return lambda ids: ((_key(ids, name)[:, None] + 7919 * np.arange(count)) % 2**20) / divisor

    def string(ids: Ids, _: str) -> Array:
        return _objects("" if key % 7 == 0 else f"žluťoučký 🐟\n{key}" for key in _key(ids, "string").tolist())

    def binary(ids: Ids, _: str) -> Array:
        return _objects(key.to_bytes(4, "big") * (key % 3) for key in _key(ids, "binary").tolist())

    def ragged(ids: Ids, _: str) -> Array:
        rows = numbers("ragged", 4, 1)(ids).astype("i8")
        return _objects(row[: key % 5] for row, key in zip(rows, _key(ids, "ragged").tolist(), strict=True))

    def vector(ids: Ids, dtype: str) -> Array:
        present = (ids[:, None] % 2 == 1) | ((ids[:, None] >> np.arange(VECTOR_SIZE)) & 2 > 0)
        return np.where(present, numbers("vector", VECTOR_SIZE, 16)(ids), 0).astype(dtype)

    def micros(name: str) -> Callable[[Ids, str], Array]:
        return lambda ids, _: (_key(ids, name) * 2_999_999 - 2**51).view("M8[us]")

    return {
        "boolean": lambda ids, _: _key(ids, "boolean") % 2 == 0,
        "byte": lambda ids, _: (_key(ids, "byte") % 256 - 128).astype("i1"),
        "short": lambda ids, _: (_key(ids, "short") % 65536 - 32768).astype("i2"),
        "int": lambda ids, _: (_key(ids, "int") * 2 - 2**31).astype("i4"),
        "long": lambda ids, _: _key(ids, "long") * 4_294_967_291 - 2**62,
        "float": lambda ids, _: ((_key(ids, "float") % 2**24) / 256 - 32768).astype("f4"),
        "double": lambda ids, dtype: (_key(ids, "double") / 1024 - 1_000_000).astype(dtype),
        "decimal": lambda ids, dtype: ((_key(ids, "decimal") % 2**24 - 2**23) / 4).astype(dtype),
        "date": lambda ids, _: (_key(ids, "date") % 3_652_059 - 719_162).view("M8[D]"),
        "timestamp": micros("timestamp"),
        "timestamp_ntz": micros("timestamp_ntz"),
        "string": string,
        "binary": binary,
        "array<float>": lambda ids, _: numbers("array<float>", 8, 16)(ids).astype("f4"),
        "array<double>": lambda ids, dtype: numbers("array<double>", 3, 1000)(ids).astype(dtype),
        "nested": lambda ids, _: numbers("nested", 6, 1)(ids).astype("i4").reshape(-1, 2, 3),
        "flags": lambda ids, _: (_key(ids, "flags")[:, None] + np.arange(5)) % 3 == 0,
        "ragged": ragged,
        "vector": vector,
        "struct.dot.ted": lambda ids, dtype: (_key(ids, "struct.dot.ted") / 1024).astype(dtype),
        "struct.array": lambda ids, _: numbers("struct.array", 2, 16)(ids).astype("f4"),
        "struct.inner.long": lambda ids, _: _key(ids, "struct.inner.long"),
        **{name: _odd_name(name) for name in ODD_NAMES},
    }


def _odd_name(name: str) -> Callable[[Ids, str], Array]:
    return lambda ids, _: _key(ids, name)


def _objects(values: Any) -> Array:
    rows = list(values)
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


def readme_block(text: str) -> str:
    """The one block of the README's code that has this text in it."""
    blocks = re.findall(
        r"^```(?:python)?\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (found,) = [block for block in blocks if text in block]
    return found


class ReadStderr(io.StringIO):
    """A stderr that makes a file once it shows a count of tasks: `rows_that_wait` go on then."""

    def __init__(self, flag: str | Path) -> None:
        super().__init__()
        self.flag = Path(flag)

    def write(self, text: str) -> int:
        # What an executor was asked before may be counted too.
        if re.search(" of [2-9] tasks", text):
            self.flag.touch()
        return super().write(text)


def rows_that_wait(spark: SparkSession, flag: str | Path) -> DataFrame:
    """Six rows in two tasks, which do not end before the file is there."""
    path = str(flag)

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        import time

        deadline = time.monotonic() + 60
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield from batches

    return spark.range(0, 6, 1, 2).mapInArrow(wait, "id long")
