"""Arrays of Arrow as NumPy's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import pyarrow as pa
from converter.reading.objects import to_numpy
try:
    to_numpy(pa.nulls(3, pa.string()))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_while_pandas_is_imported_is_not_lost(tmp_path: Path) -> None:
    """Arrow imports pandas before its first array for NumPy, and takes any error of that for its absence."""
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").write_text("raise KeyboardInterrupt\n")
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{_PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "interrupted\n", done.stderr
