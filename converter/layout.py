"""How rows lie in files and row groups, by what a manifest knows.

Nothing is read, and a million row groups take 40 ms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from converter.manifest import Manifest
from converter.parsed_footer import Formats, parse_end


def layout_of(manifest: Manifest) -> dict[str, Any] | None:
    """The layout as values that JSON can hold; `DatasetConverter.describe` says what they are."""
    if manifest.recipe is not None and manifest.recipe.kind == "mix":
        # Its row groups are blocks of rows of several datasets.
        return None
    file_rows = np.bincount(manifest.row_group_file, manifest.row_group_rows, minlength=len(manifest.file_names))
    # A file whose footer was not read is one row group for us, and may have many.
    are_known = manifest.row_group_index is None or bool((manifest.row_group_index >= 0).all())
    formats = _formats_of(manifest)
    return {
        "file_rows": _spread(file_rows),
        "row_group_rows": _spread(manifest.row_group_rows) if are_known else None,
        "row_group_bytes": _spread(manifest.row_group_bytes) if are_known else None,
        "codecs": None if formats is None else sorted(formats.codecs),
        "encodings": None if formats is None else sorted(formats.encodings),
    }


def _spread(counts: npt.NDArray[Any]) -> dict[str, int] | None:
    if not len(counts):
        return None
    return {"least": int(counts.min()), "median": int(np.median(counts)), "most": int(counts.max())}


def _formats_of(manifest: Manifest) -> Formats | None:
    """Those of the footers that were read, or that the manifest of a remote cache entry holds: of its first file."""
    if manifest.formats is not None or not manifest.file_ends:
        return manifest.formats
    try:
        return parse_end(manifest.file_ends[0].footer).formats()
    except ValueError:
        # Reading the file raises an error that names it.
        return None
