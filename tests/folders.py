"""What lies below a folder: sorted paths relative to it, so that two folders, or two moments, compare."""

from __future__ import annotations

from pathlib import Path


def paths_below(directory: str | Path) -> list[str]:
    """Everything: files, folders and links."""
    root = Path(directory)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def files_below(directory: str | Path) -> list[str]:
    """Everything but folders."""
    return [name for name in paths_below(directory) if not Path(directory, name).is_dir()]


def directories_below(directory: str | Path) -> list[str]:
    """Folders alone."""
    return [name for name in paths_below(directory) if Path(directory, name).is_dir()]
