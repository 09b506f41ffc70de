"""The golden tables, made once for all tests: Delta wants a Spark of its own, so it runs in a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.known_rows import finish, start_python
from tests.parity.golden_tables import INDEX, make_tables

MAKE_SECONDS = 900


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is known of the golden tables, and in `root` where they stand.

    CONVERTER_GOLDEN_TABLES names a folder of tables that were made before, by `python -m tests.parity.golden_tables`.
    """
    ready = os.environ.get("CONVERTER_GOLDEN_TABLES")
    root = Path(ready) if ready else tmp_path_factory.mktemp("golden")
    if not ready:
        with start_python(make_tables, str(root)) as process:
            finish(process, seconds=MAKE_SECONDS)
    return json.loads((root / INDEX).read_text()) | {"root": str(root)}
