"""A function of a test module runs in a Python process of its own, which ends with the test.

For what one process cannot show: a driver that is killed, Spark Connect, a cluster. Arguments, results and errors
travel as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.repository import REPOSITORY


@contextmanager
def start_python(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str | Path] = (sys.executable,),
) -> Iterator[subprocess.Popen[str]]:
    """A Python process that calls a module's `function` with these JSON values; it and its children end with the block.

    The last line of its output is the function's result as JSON. It does not inherit `CONVERTER_CACHE_DIR`; pass that
    in `environment`. `command` names another Python, or begins with a launcher that starts several.
    """
    code = (
        f"import json; from {function.__module__} import {function.__name__} as run; "
        f"result = run(*json.loads({json.dumps(arguments)!r})); print(json.dumps(result))"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "CONVERTER_CACHE_DIR"}
    process = subprocess.Popen(
        [*map(str, command), "-c", code],
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


def run_python(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str | Path] = (sys.executable,),
) -> Any:
    """What `function` returns in a Python process of its own."""
    with start_python(function, *arguments, environment=environment, command=command) as process:
        return finish(process)


def finish(process: subprocess.Popen[str], *, seconds: float = 120) -> Any:
    """Wait for a process of `start_python` to end, and return what its function returned."""
    output, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


def error_of(call: Callable[[], Any]) -> list[str]:
    """The class and the text of the error that `call` raises, as JSON can hold them; two empty strings if none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (whatever it is, the test says what it must be)
        return [type(error).__name__, str(error)]
    return ["", ""]
