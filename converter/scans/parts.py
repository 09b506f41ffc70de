"""Which rows of a dataset a part keeps: those that pass a filter, or those of each part of a split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from converter.arguments import check_fractions, check_integer
from converter.errors import SourceError
from converter.lineage.recipe import viewed
from converter.manifest import Manifest
from converter.scans.draws import check_no_draws
from converter.scans.filters import Filters, list_values, say_filters
from converter.scans.passes import resolve_filters, split
from converter.storage.directory import Storage


def select_rows(storage: Storage, manifest: Manifest, filters: Filters) -> Manifest:
    """The manifest of the rows that pass; one pass over the columns that the filters name.

    Raises:
        SourceError: no row passes.
        ValueError, TypeError: the filters are not understood, or do not fit the columns.
    """
    check_no_draws(manifest)
    # Iterators are read once.
    values = list_values(filters)
    selection = resolve_filters(storage, manifest, values)
    if not selection.num_rows:
        raise SourceError(
            f"No row of {storage.url} passes the filters {say_filters(filters)}. Compare them with "
            "converter.describe()."
        )
    return replace(manifest, selection=selection, recipe=viewed(manifest.recipe, "where", filters=values))


def split_rows(
    storage: Storage, manifest: Manifest, fractions: Mapping[str, float], *, by: str | None, seed: int
) -> dict[str, Manifest]:
    """The manifest of each part; a pass over the column `by`, if there is one.

    Raises:
        SourceError: a part would be empty.
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    check_no_draws(manifest)
    bounds = check_fractions(fractions)
    seed = check_integer("seed", seed, least=0)
    parts = dict(zip(fractions, split(storage, manifest, bounds, by=by, seed=seed), strict=True))
    for name, selection in parts.items():
        if not selection.num_rows:
            raise SourceError(
                f"The part {name!r} of {manifest.num_live_rows} rows would be empty. Give it a larger fraction."
            )
    recipes = {
        name: viewed(manifest.recipe, "split", fractions=fractions, by=by, seed=seed, part=name) for name in fractions
    }
    return {name: replace(manifest, selection=part, recipe=recipes[name]) for name, part in parts.items()}
