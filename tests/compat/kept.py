"""What each release has kept with `keep.py`, unpacked for tests."""

from __future__ import annotations

import json
import pickle
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter import open_converter
from tests.compat.keep import FOLDER, PLACE


@dataclass(frozen=True, slots=True)
class Kept:
    """The entries of one release."""

    folder: Path
    index: dict[str, Any]

    def unpack(self, name: str, cache_dir: Path) -> Any:
        """A converter on an entry, unpacked into a cache directory; left alone when it is closed."""
        with tarfile.open(self.folder / f"{name}.tar.xz") as archive:
            # The archives are this repository's own; Python 3.10 and 3.11 before their last releases have no filter.
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(cache_dir, **safely)  # type: ignore[arg-type]
        return open_converter(cache_dir, cache_key=name)

    def unpickle(self, name: str, cache_dir: Path) -> Any:
        """A converter that was pickled, for the cache directory that is unpacked at another place."""
        data = (self.folder / f"{name}.pickle").read_bytes()
        return pickle.loads(data.replace(PLACE.encode(), str(cache_dir).encode()))


RELEASES = [
    Kept(folder, json.loads((folder / "index.json").read_text())) for folder in sorted(FOLDER.glob("kept-*.*.*"))
]
"""All that was kept; never empty."""


def ids_from(loader: Any, state: dict[str, Any]) -> list[int]:
    """The ids that a loader hands out from a kept state on."""
    loader.load_state_dict(state)
    return [int(value) for batch in loader for value in batch["id"]]
