"""One pass over a column of classes or weights says how often each row comes."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from converter.arguments import check_flag, check_integer
from converter.draws import Classes, Draws, Expected, Numbers
from converter.errors import NullValueError, SourceError
from converter.lineage.recipe import Recipe, viewed
from converter.manifest import Manifest
from converter.mixing import share
from converter.reading.ahead import map_row_groups
from converter.reading.data_files import DataFiles
from converter.reading.decode import decode
from converter.scans.columns import read_live_columns
from converter.storage.directory import Storage

MAX_CLASSES = 100_000


def balance(
    storage: Storage,
    manifest: Manifest,
    by: str,
    *,
    weights: Mapping[Any, float] | None,
    num_rows: int | None,
    seed: int,
) -> Manifest:
    """The manifest whose epochs have the classes of the column `by` equally often, or in proportion to `weights`.

    Raises:
        NullValueError: a row has no class.
        SourceError: there are too many classes.
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    total, seed = _check(manifest, num_rows, seed)
    values, codes = _classes_of(storage, manifest, by)
    shares = np.ones(len(values)) if weights is None else _weights_of(values, weights, by)
    recipe = viewed(manifest.recipe, "balance", by=by, weights=weights, num_rows=num_rows, seed=seed)
    return _with_draws(manifest, _in_classes(codes, shares, total), total, seed, recipe)


def sample(
    storage: Storage,
    manifest: Manifest,
    weights: str | Mapping[Any, float],
    *,
    by: str | None,
    num_rows: int | None,
    replacement: bool,
    seed: int,
) -> Manifest:
    """The manifest whose epochs have each row as often as its weight says.

    Raises:
        NullValueError: a row has no weight or no class.
        ValueError, TypeError: an argument is wrong; the message names it.
    """
    total, seed = _check(manifest, num_rows, seed)
    check_flag("replacement", replacement)
    recipe = viewed(
        manifest.recipe, "sample", weights=weights, by=by, num_rows=num_rows, replacement=replacement, seed=seed
    )
    if isinstance(weights, Mapping):
        if by is None:
            raise ValueError("sample: weights of values need by=, the column that has the values.")
        values, codes = _classes_of(storage, manifest, by)
        of_class = _weights_of(values, weights, by)
        if replacement:
            sizes = np.bincount(codes, minlength=len(values))
            return _with_draws(manifest, _in_classes(codes, of_class * sizes, total), total, seed, recipe)
        numbers = of_class[codes]
    elif not isinstance(weights, str) or by is not None:
        raise TypeError(f"sample: weights must be a column's name, or a dict of values with by=…, got {weights!r:.80}.")
    else:
        numbers = _numbers_of(storage, manifest, weights)
    if not numbers.max(initial=0) > 0:
        raise ValueError("sample: the weights sum to 0, so no row would come. Give some rows a weight above 0.")
    numbers = _scaled(numbers)
    expected = numbers * (total / numbers.sum()) if replacement else _at_most_once(numbers, total)
    return _with_draws(manifest, Expected(numbers=expected, total=total), total, seed, recipe)


def _check(manifest: Manifest, num_rows: Any, seed: Any) -> tuple[int, int]:
    """The number of rows of an epoch, and the seed."""
    seed = check_integer("seed", seed, least=0)
    check_no_draws(manifest)
    return manifest.num_live_rows if num_rows is None else check_integer("num_rows", num_rows, least=1), seed


def check_no_draws(manifest: Manifest) -> None:
    """Raise ValueError if rows were balanced or sampled: what comes after would change their proportions."""
    if manifest.draws is not None:
        raise ValueError(
            "The rows of this converter are balanced or sampled. Choose rows before, e.g. "
            "converter.where(…).balance(…), and also call split() and sequences() before."
        )


def _with_draws(manifest: Manifest, kind: Classes | Expected, total: int, seed: int, recipe: Recipe | None) -> Manifest:
    starts = np.concatenate(([0], np.cumsum(manifest.live_rows)))
    return replace(manifest, draws=Draws(kind=kind, num_rows=total, starts=starts, seed=seed), recipe=recipe)


def _in_classes(codes: npt.NDArray[Any], shares: npt.NDArray[np.float64], total: int) -> Classes:
    """Classes with their parts of an epoch."""
    order = np.argsort(codes, kind="stable")
    return Classes(
        order=order.astype(np.int32) if len(order) < 1 << 31 else order,
        sizes=np.bincount(codes, minlength=len(shares)).astype(np.int64),
        quotas=share(shares, total),
    )


def _at_most_once(weights: npt.NDArray[np.float64], total: int) -> npt.NDArray[np.float64]:
    """The probability of each row, so that `total` rows come and none twice."""
    if total > np.count_nonzero(weights):
        raise ValueError(
            f"sample: without replacement num_rows can be at most the {np.count_nonzero(weights):,} rows that have a "
            f"weight above 0, got {total:,}."
        )
    chances = np.zeros(len(weights))
    is_free = weights > 0
    while is_free.any():
        left = total - np.count_nonzero(chances == 1)
        free = _scaled(weights[is_free])
        trial = np.zeros(len(weights))
        trial[is_free] = free * (left / free.sum())
        is_certain = is_free & (trial >= 1)
        if not is_certain.any():
            chances[is_free] = trial[is_free]
            break
        chances[is_certain] = 1
        is_free &= ~is_certain
    return chances


def _scaled(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The weights times a power of two, so that no sum or quotient of them is infinite, and none is rounded."""
    return np.asarray(np.ldexp(weights, -np.frexp(weights.max())[1]))


def _weights_of(values: pa.Array, weights: Any, by: str) -> npt.NDArray[np.float64]:
    """The weight of each value.

    Raises:
        TypeError, ValueError: a weight is no number of at least 0, or of no value; a value has none; or all are 0.
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a dict of the values of {by!r} to numbers, got {weights!r:.80}.")
    known = values.to_pylist()
    for value, weight in weights.items():
        is_number = isinstance(weight, (int, float, np.number)) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < math.inf:
            raise ValueError(f"weights: {value!r} has the weight {weight!r}; it must be a number of at least 0.")
    values_known = set(known)
    unknown = [value for value in weights if value not in values_known]
    missing = [value for value in known if value not in weights]
    if unknown or missing:
        problem = f"{unknown[0]!r} is no value of column {by!r}" if unknown else f"value {missing[0]!r} has no weight"
        raise ValueError(f"weights: {problem}. Its values are {', '.join(map(repr, known[:20]))}.")
    found = np.array([float(weights[value]) for value in known])
    if not found.max() > 0:
        raise ValueError("weights: they sum to 0, so no row would come.")
    # So that no sum or quotient of them is infinite.
    shares: npt.NDArray[np.float64] = found / found.max()
    return shares


def _classes_of(storage: Storage, manifest: Manifest, by: Any) -> tuple[pa.Array, npt.NDArray[Any]]:
    """The values of a column in the live rows, sorted, and which of them each row has."""
    field = manifest.value_schema.get(by) if isinstance(by, str) else None
    if field is None:
        raise ValueError(f"by: {manifest.value_schema.explain_missing(str(by))}")
    if field.shape != () or field.dtype.startswith("float"):
        raise ValueError(
            f"by: column {by!r} is {field.shown_dtype} of shape {field.shown_shape}; classes are whole numbers, "
            "booleans, dates, times or texts."
        )
    values: pa.Array | None = None
    parts: list[Numbers] = []
    for column in _live_columns(storage, manifest, by):
        encoded = column.combine_chunks().dictionary_encode()
        known = encoded.dictionary if values is None else values
        new = encoded.dictionary.filter(pc.invert(pc.is_in(encoded.dictionary, known)))
        values = pa.concat_arrays([known, new])
        if len(values) > MAX_CLASSES:
            raise SourceError(
                f"Column {by!r} has more than {MAX_CLASSES:,} different values, too many for classes. Is it a key? "
                "Pass by= another column.",
                column=by,
            )
        local = np.asarray(pc.index_in(encoded.dictionary, values))
        parts.append(local[np.asarray(encoded.indices)])
    assert values is not None
    order = np.asarray(pc.array_sort_indices(values))
    places = np.empty(len(order), np.min_scalar_type(max(len(order) - 1, 0)))
    places[order] = np.arange(len(order))
    return values.take(pa.array(order)), places[np.concatenate(parts)]


def _numbers_of(storage: Storage, manifest: Manifest, name: str) -> npt.NDArray[np.float64]:
    """The numbers of a column of weights in the live rows."""
    field = manifest.value_schema.get(name)
    if field is None:
        raise ValueError(f"weights: {manifest.value_schema.explain_missing(name)}")
    if field.shape != () or not field.dtype.startswith(("int", "uint", "float")):
        raise ValueError(f"weights: column {name!r} is {field.shown_dtype} of shape {field.shown_shape}, not a number.")
    parts = [
        np.asarray(decode(column, field, fill=0).values, np.float64)
        for column in _live_columns(storage, manifest, name)
    ]
    numbers = np.concatenate(parts)
    if not (np.isfinite(numbers) & (numbers >= 0)).all():
        bad = numbers[np.argmin(np.isfinite(numbers) & (numbers >= 0))]
        raise ValueError(f"weights: column {name!r} has the weight {bad}; weights are finite and at least 0.")
    return numbers


def _live_columns(storage: Storage, manifest: Manifest, name: str) -> Any:
    """Yield a column of the live rows, a row group at a time."""
    files = DataFiles(storage, manifest, [manifest.schema[name]])
    wanted = np.flatnonzero(manifest.live_rows > 0).tolist()

    def read(row_group: int, given_up: threading.Event) -> pa.ChunkedArray:
        return read_live_columns(files, row_group, given_up).column(0)

    columns: Any = map_row_groups(read, wanted)
    with contextlib.closing(columns):
        for column in columns:
            if column.null_count:
                raise NullValueError(
                    f"Column {name!r} has {column.null_count} nulls in a row group; a class or a weight must not be "
                    "null. Leave such rows out with where(), or fill them with Spark.",
                    column=name,
                )
            yield column
