"""Means and standard deviations of columns that are to be standardised."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from converter.errors import SourceError
from converter.manifest import Manifest
from converter.reading.source import BatchSource
from converter.scans.passes import scan_statistics
from converter.schema import Field, Scale
from converter.statistics import ColumnStatistics


def with_scales(manifest: Manifest, source_of: Callable[[Manifest, Sequence[str]], BatchSource]) -> Manifest:
    """The manifest with all of its scales known: those that were not given by the statistics of its live rows.

    `source_of` gives all rows of some columns of a manifest.

    Raises:
        SourceError: a column has no finite mean.
    """
    wanted = [name for name, scale in manifest.scales.items() if scale is None]
    known: Mapping[str, ColumnStatistics] = manifest.statistics if manifest.selection is None else {}
    missing = [name for name in wanted if name not in known or known[name].closed is None]
    found = {**known, **(scan_statistics(source_of(manifest, missing)) if missing else {})}
    settled = {
        name: _scale_of(manifest.schema[name], found[name]) if scale is None else scale
        for name, scale in manifest.scales.items()
    }
    return replace(manifest, scales=settled)


def _scale_of(field: Field, statistics: ColumnStatistics) -> Scale:
    mean, std = statistics.mean, statistics.std
    if mean is None or std is None or not (math.isfinite(mean) and math.isfinite(std)):
        is_finite = mean is not None and math.isfinite(mean)
        what = "holds numbers too large for a variance" if is_finite else "holds numbers that are not finite"
        what = "holds no number" if mean is None else what
        raise SourceError(
            f"standardize: column {field.name!r} {what}, so it has no mean. Replace them with Spark, or give "
            f"standardize={{{field.name!r}: (mean, std)}}.",
            column=field.name,
        )
    # A constant column becomes zeros.
    return Scale(mean, std or 1.0)
