"""Several converters as one: `mix` hands out their rows in exact proportions, with all loaders of a converter."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from converter.arguments import check_integer, check_shard
from converter.dataset import DatasetConverter
from converter.holding import Holding
from converter.lineage import remaking
from converter.lineage.recipe import recipe_of_mixture
from converter.loading.forecast import log_uneven_shards
from converter.loading.options import LoaderOptions
from converter.manifest import Manifest
from converter.markup import facts, text
from converter.mixing import BLOCK_ROWS, Mixing, never_come, rows_until
from converter.page import columns_of
from converter.plan import Shuffle
from converter.reading.runs import LENGTH_SUFFIX, NOT_PADDED, VALID_SUFFIX
from converter.reading.source import ELEMENT_VALID_SUFFIX, INNER_LENGTH_SUFFIX, BatchSource
from converter.schema import Field, Schema
from converter.sequences import SEQUENCE_LENGTH

logger = logging.getLogger(__name__)

_MAX_SOURCES = 127
_MOST_BLOCKS = 100_000
"""Of a plan: it holds a number for each."""

_SUFFIXES = (VALID_SUFFIX, ELEMENT_VALID_SUFFIX, LENGTH_SUFFIX, INNER_LENGTH_SUFFIX)


def mix(
    converters: Mapping[str, DatasetConverter],
    weights: Mapping[str, float] | None = None,
    *,
    stop: str | int = "first",
    source: str | None = None,
    seed: int = 0,
) -> MixedConverter:
    """One converter of the rows of several, in exact proportions and random order.

    In every 4,096 elements the proportions are those of the weights, rounded to whole elements. Each source goes
    through its own epochs, also across the epochs of the mixture: each row once in each of them, with `shuffle` in
    another order each time it starts over. Shards, states and `len()` are those of a converter.

    ```python
    both = mix({"web": converter, "books": other}, weights={"web": 0.7, "books": 0.3}, source="from")
    with both.make_torch_dataloader(batch_size=256, shuffle=True) as loader:
        for batch in loader:
            ...
    ```

    Args:
        converters: what is mixed, by name. Batches have the columns that all have; each must have one dtype and shape
            in all.
        weights: how often each source comes; None for as often as it has rows. 0 for never; what is less than one in
            4,096 is refused.
        stop: when an epoch ends: `"first"`: when the first source was gone through once; `"all"`: when all were, the
            smaller ones several times; or the number of rows of an epoch.
        source: add a column of this name with the number of each row's source, in the order of `converters`;
            `schema[source].categories` has their names. The column of `with_row_index` has each row's number in its own
            source.
        seed: the seed of the order of the sources.

    Raises:
        TypeError, ValueError: an argument is wrong, or a column is not the same in all; the message names it.
    """
    if not isinstance(converters, Mapping) or not converters:
        raise TypeError(f"mix needs a dict of name to converter, got {converters!r:.80}.")
    for name, part in converters.items():
        if not isinstance(name, str) or not isinstance(part, DatasetConverter) or isinstance(part, MixedConverter):
            raise TypeError(f"mix needs a dict of name to converter, got {name!r:.80}: {type(part).__name__}.")
    if len(converters) > _MAX_SOURCES:
        raise ValueError(f"mix takes up to {_MAX_SOURCES} converters, got {len(converters)}.")
    names, sizes = tuple(converters), tuple(map(len, converters.values()))
    shares = _check_shares(names, tuple(map(float, sizes)) if weights is None else _check_weights(weights, names))
    if isinstance(stop, str):
        if stop not in ("first", "all"):
            raise ValueError(f"stop must be 'first', 'all' or a number of rows, got {stop!r:.80}.")
        num_rows = rows_until(sizes, shares, is_first=stop == "first")
    else:
        num_rows = check_integer("stop", stop, least=1)
    _log_absent(names, shares, num_rows)
    mixing = Mixing(
        names=names,
        sizes=sizes,
        weights={0: shares},
        num_rows=num_rows,
        seed=check_integer("seed", seed, least=0),
    )
    return MixedConverter(dict(converters), mixing, source)


remaking.openers["mix"] = mix


def _check_weights(weights: Any, names: tuple[str, ...]) -> tuple[float, ...]:
    """The weight of each source, in order."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must be a dict of name to number, got {weights!r:.80}.")
    if set(weights) != set(names):
        odd = min(set(weights) ^ set(names), key=repr)
        place = "weights" if odd in weights else "converters"
        raise ValueError(f"weights must name each converter once; {odd!r} is only among the {place}.")
    for name, weight in weights.items():
        is_number = isinstance(weight, (int, float, np.number)) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < math.inf:
            raise ValueError(f"weights: {name!r} has the weight {weight!r}; it must be a number of at least 0.")
    if not max(weights.values()) > 0:
        raise ValueError("weights: they sum to 0, so no row would come.")
    largest = max(weights.values())
    # So that no sum or quotient of them is infinite, and none is lost.
    return tuple(max(float(weights[name] / largest), sys.float_info.min) if weights[name] else 0.0 for name in names)


def _check_shares(names: tuple[str, ...], shares: tuple[float, ...]) -> tuple[float, ...]:
    """These shares. Raises ValueError if a source has one, but no row in a block."""
    for name in never_come(names, shares, BLOCK_ROWS):
        raise ValueError(
            f"weights: {name!r} has less than one in {BLOCK_ROWS:,}, so none of its rows would come. Leave it out, or "
            "raise its weight."
        )
    return shares


def _log_absent(names: tuple[str, ...], shares: tuple[float, ...], num_rows: int) -> None:
    absent = never_come(names, shares, num_rows) if num_rows < BLOCK_ROWS else []
    if absent:
        logger.warning(
            "In epochs of %d rows none comes from %s: its weight is too small for one. Raise stop, or the weight.",
            num_rows,
            ", ".join(map(repr, absent)),
        )


class MixedConverter(DatasetConverter):
    """Rows of several converters, read as one; `mix` makes it. Closing it closes and deletes nothing.

    ```python
    both = mix({"web": converter, "books": other})
    print(len(both), both.schema)
    ```
    """

    def __init__(self, converters: Mapping[str, DatasetConverter], mixing: Mixing, source: str | None) -> None:
        self._converters, self._mixing, self._source_name = converters, mixing, source
        opened = {name: self._files_of(part) for name, part in converters.items()}
        manifests = {name: manifest for name, (_, manifest) in opened.items()}
        self._columns = _common_columns(manifests)
        if source is not None and (not isinstance(source, str) or source in self._columns or not source):
            raise ValueError(f"source must be a name that no column has, got {source!r:.80}.")
        super().__init__(
            storage=next(iter(opened.values()))[0],
            manifest=replace(
                _manifest_of(list(manifests.values()), self._columns, mixing),
                recipe=recipe_of_mixture(manifests, mixing, source),
            ),
            holding=Holding(),
            is_owner=False,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (MixedConverter, (dict(self._converters), self._mixing, self._source_name))

    @property
    def schema(self) -> Schema:
        """The columns that all sources have, and the column of the source."""
        schema = self._manifest.element_schema
        return schema if self._source_name is None else Schema((*schema, self._field_of_source()))

    def with_weights(self, weights: Mapping[str, float], *, from_epoch: int) -> MixedConverter:
        """The same mixture with other weights from an epoch on: a curriculum. The length of epochs stays.

        ```python
        both = mix({"easy": converter, "hard": other}, {"easy": 0.9, "hard": 0.1}, stop=10_000)
        both = both.with_weights({"easy": 0.5, "hard": 0.5}, from_epoch=3)
        ```

        Raises:
            TypeError, ValueError: an argument is wrong; the message names it.
        """
        shares = _check_shares(self._mixing.names, _check_weights(weights, self._mixing.names))
        _log_absent(self._mixing.names, shares, self._mixing.num_rows)
        mixing = self._mixing.with_weights(shares, from_epoch=check_integer("from_epoch", from_epoch, least=0))
        return MixedConverter(self._converters, mixing, self._source_name)

    def verify(self, *, every_row: bool = False) -> list[str]:
        """Look for damage in the files of all sources, as their own `verify` does.

        ```python
        assert mix({"web": converter, "books": other}).verify() == []
        ```

        Args:
            every_row: read all rows, too.

        Raises:
            CacheError: a converter was deleted.
        """
        # Views of the same files tell the same.
        found = [line for part in self._converters.values() for line in part.verify(every_row=every_row)]
        return list(dict.fromkeys(found))

    def describe(self) -> dict[str, Any]:
        """What is known of the rows without reading any; `bytes`, `files` and `row_groups` are those of all sources.

        ```python
        print(mix({"web": converter, "books": other}).describe()["bytes"])
        ```
        """
        told = [part.describe() for part in self._converters.values()]
        return super().describe() | {name: sum(one[name] for one in told) for name in ("bytes", "files", "row_groups")}

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}: {len(part):,}" for name, part in self._converters.items())
        return f"MixedConverter({len(self):,} rows of {parts}; {len(self.columns)} columns)"

    def _repr_html_(self) -> str:
        parts = facts((name, f"{len(part):,} rows of {part.url}") for name, part in self._converters.items())
        return f"<p>{text(repr(self))}</p>{parts}{columns_of(self.schema, {})}"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "This is a mixture, which has no statistics and is not filtered, split or sampled: call that on the "
            "converters before you mix them."
        )

    where = split = sequences = balance = sample = quantiles = histogram = to_spark = _refuse

    statistics = property(_refuse)

    def _field_of_source(self) -> Field:
        assert self._source_name is not None
        return Field(name=self._source_name, dtype="int32", categories=self._mixing.names)

    def _columns_of_parts(self, options: LoaderOptions) -> list[str]:
        """What is read of each source: the wanted columns and stacks without the number of the source."""
        if options.columns is None:
            stacked = {name for members in (options.stack or {}).values() for name in members}
            return [*(name for name in self._columns if name not in stacked), *(options.stack or {})]
        wanted = [name for name in options.columns if name != self._source_name]
        if len(wanted) < len(options.columns) - 1:
            raise ValueError(f"columns must name each column once; got {list(options.columns)!r:.80}.")
        if not wanted and options.columns:
            raise ValueError(f"columns: name a column of the sources, too, not {self._source_name!r} alone.")
        return wanted

    def _check_name(self, source_name: str | None, options: LoaderOptions) -> None:
        """Raise ValueError if batches would have another column of the source's name."""
        added = {options.with_row_index, NOT_PADDED, SEQUENCE_LENGTH, *(options.stack or {})}
        added |= {name + suffix for name in self._columns for suffix in _SUFFIXES}
        if source_name is not None and source_name in added:
            raise ValueError(f"source={source_name!r} is the name of a column that is added to batches; take another.")

    def _source(self, options: LoaderOptions, *, runs_filters: bool = True) -> BatchSource:  # noqa: ARG002
        self._check_open()
        if options.bucket_by is not None:
            raise ValueError(
                "bucket_by: rows of a mixture come in its proportions, so not by their lengths. Leave it out."
            )
        if options.filters is not None:
            raise ValueError("filters: choose rows with where() before you mix.")
        # None if the number of the source is not wanted.
        source_name = self._source_name
        if options.columns is not None and source_name not in options.columns:
            source_name = None
        self._check_name(source_name, options)
        own = dataclasses.replace(
            options, batch_size=1, num_epochs=1, columns=self._columns_of_parts(options), transform=None, cur_shard=0,
            shard_count=1, uneven="keep", drop_last=False,
        )  # fmt: skip
        made = []
        for part in self._converters.values():
            storage, manifest = self._files_of(part)
            made.append(own.make_source(storage, _with_nulls(manifest, self._manifest)))
        _check_stacks(dict(zip(self._converters, made, strict=True)))
        first = made[0]
        threads = first.workers_count
        schema, names = first.schema, first.names
        if source_name is not None:
            schema = Schema((*schema, self._field_of_source()))
            place = len(names) if options.columns is None else list(options.columns).index(source_name)
            names = (*names[:place], source_name, *names[place:])
        shuffle = Shuffle(seed=options.seed, fingerprint=self.fingerprint) if options.shuffle else None
        source = replace(
            first,
            manifest=self._manifest,
            schema=schema,
            names=names,
            batch_size=options.batch_size,
            drop_last=options.drop_last,
            shuffle=shuffle,
            shard=check_shard(options.cur_shard, options.shard_count),
            is_shard_found=options.cur_shard is None,
            uneven=options.uneven or ("drop" if options.shuffle else "keep"),
            window_rows=min(sum(part.window_rows for part in made), len(self)),
            window_groups=None,
            transform=options.transform,
            parts=tuple(
                replace(part, workers_count=max(1, round(threads * share)), is_part=True)
                for part, share in zip(made, self._mixing.largest_shares(), strict=True)
            ),
            mixing=self._mixing,
            source_name=source_name,
        )
        log_uneven_shards(source)
        return source


def _check_stacks(parts: Mapping[str, BatchSource]) -> None:
    """Raise ValueError if columns that are stacked become other numbers in one source than in another."""
    (first_name, first), *others = parts.items()
    for other_name, other in others:
        for mine, its in zip(first.stacks, other.stacks, strict=True):
            if mine.dtype != its.dtype:
                raise ValueError(
                    f"stack: {mine.name!r} would be {mine.dtype} in {first_name!r} and {its.dtype} in {other_name!r}. "
                    "Make these converters with the same float_dtype."
                )


def _common_columns(manifests: Mapping[str, Manifest]) -> tuple[str, ...]:
    """The columns that all have.

    Raises:
        ValueError: there is none, or one is not the same in all.
    """
    (first_name, first), *others = manifests.items()
    common = [name for name in first.schema.names if all(name in part.schema for _, part in others)]
    if not common:
        raise ValueError(f"mix: no column is in all of {', '.join(map(repr, manifests))}.")
    elements = first.sequences
    for name, part in others:
        other = part.sequences
        if (elements and (elements.length, elements.steps, elements.is_padded)) != (
            other and (other.length, other.steps, other.is_padded)
        ):
            raise ValueError(
                f"mix: {first_name!r} and {name!r} differ in sequences(): give all the same length and steps."
            )
        for column in common:
            mine, its = first.batch_schema[column], part.batch_schema[column]
            if _kind_of(mine) != _kind_of(its):
                raise ValueError(
                    f"mix: column {column!r} is {mine.shown_dtype} of shape {mine.shown_shape} in {first_name!r} and "
                    f"{its.shown_dtype} of shape {its.shown_shape} in {name!r}. Make them alike, or leave the column "
                    "out of one of them."
                )
    return tuple(common)


def _kind_of(field: Field) -> Field:
    """A field without what may differ among sources."""
    return replace(field, has_nulls=False, has_null_elements=False, is_jagged=False)


def _with_nulls(manifest: Manifest, mixture: Manifest) -> Manifest:
    """The manifest whose columns may have nulls if those of the mixture may: all batches have the same masks."""
    fields = []
    for field in manifest.schema:
        its = mixture.schema.get(field.name) or field
        fields.append(
            replace(field, has_nulls=its.has_nulls, has_null_elements=its.has_null_elements, is_jagged=its.is_jagged)
        )
    return replace(manifest, schema=Schema(tuple(fields)))


def _manifest_of(manifests: list[Manifest], columns: tuple[str, ...], mixing: Mixing) -> Manifest:
    """What plans and states need to know of a mixture: its rows in blocks, its columns, its fingerprint."""
    fields = []
    for name in columns:
        # As in batches: what is none of the categories that were given to one source is null there, and in no file.
        own = [manifest.batch_schema[name] for manifest in manifests]
        fields.append(
            replace(
                manifests[0].schema[name],
                has_nulls=any(field.has_nulls for field in own),
                has_null_elements=any(field.has_null_elements for field in own),
                is_jagged=any(field.is_jagged for field in own),
            )
        )
    content = [manifest.live_fingerprint for manifest in manifests]
    content += [repr((mixing.names, sorted(mixing.weights.items()), mixing.num_rows, mixing.seed))]
    size = BLOCK_ROWS * max(1, mixing.num_rows // (_MOST_BLOCKS * BLOCK_ROWS))
    rows = np.full(-(-mixing.num_rows // size), size, np.int64)
    rows[-1] = mixing.num_rows - size * (len(rows) - 1)
    row_bytes = sum(manifest.num_bytes for manifest in manifests) / max(sum(m.num_rows for m in manifests), 1)
    first = manifests[0]
    return replace(
        first,
        schema=Schema(tuple(fields)),
        fingerprint=hashlib.sha256("/".join(content).encode()).hexdigest()[:32],
        num_rows=mixing.num_rows,
        row_group_rows=rows,
        row_group_bytes=(rows * row_bytes).astype(np.int64),
        row_group_file=np.zeros(len(rows), np.int64),
        statistics={},
        selection=None,
        draws=None,
        file_ends=None,
        formats=None,
        version=None,
        origin=None,
    )
