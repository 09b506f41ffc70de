"""What lies below a folder, as sorted paths relative to it."""

from __future__ import annotations

from pathlib import Path


def files_below(directory: str | Path) -> list[str]:
    """All files there, by their paths below it."""
    root = Path(directory)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())
