"""The arguments that every loader takes, with their defaults: checked before anything is read, and all in one place."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from converter.arguments import check_epochs, check_flag, check_integer, check_shard, check_window
from converter.loading.batches import takes_generator
from converter.loading.names import Names, check_policies, narrow_columns, resolve_names
from converter.manifest import Manifest
from converter.plan import DEFAULT_WINDOW_GROUPS, Shuffle
from converter.reading.ahead import default_workers_count
from converter.reading.nulls import Nulls
from converter.reading.ragged import Ragged
from converter.reading.runs import NOT_PADDED
from converter.reading.source import BatchSource, Transform
from converter.scans.filters import Filters
from converter.scans.parts import select_rows
from converter.schema import Schema
from converter.sequences import SEQUENCE_LENGTH
from converter.state import UNEVEN, Uneven
from converter.storage.directory import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """The arguments that every loader takes; `DatasetConverter.make_torch_dataloader` explains them.

    The public methods repeat them for `help()` and editors. A test compares their signatures with these fields.

    Raises:
        ValueError, TypeError: an argument is wrong for any dataset; the message names it.
    """

    batch_size: int = 32
    num_epochs: int | None = 1
    columns: Sequence[str] | None = None
    stack: Mapping[str, Sequence[str]] | None = None
    filters: Filters | None = None
    shuffle: bool = False
    seed: int = 0
    shuffle_window_rows: int | Literal["all"] | None = None
    bucket_by: str | None = None
    cur_shard: int | None = None
    shard_count: int | None = None
    uneven: Uneven | None = None
    drop_last: bool = False
    transform: Transform | None = None
    with_row_index: str | None = None
    nulls: Nulls = "raise"
    ragged: Ragged = "raise"
    workers_count: int | None = None
    prefetch_batches: int | None = None
    verify_checksums: bool = False
    local_cache_dir: str | os.PathLike[str] | None = None
    local_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("shuffle", "drop_last", "verify_checksums"):
            check_flag(name, getattr(self, name))
        # Python's integers, because states keep them as JSON, and NumPy's may wrap around.
        integers = {"batch_size": 1, "seed": 0, "prefetch_batches": 1, "local_cache_bytes": 1, "workers_count": 1}
        for name, least in integers.items():
            if name in ("batch_size", "seed") or getattr(self, name) is not None:
                object.__setattr__(self, name, check_integer(name, getattr(self, name), least=least))
        object.__setattr__(self, "num_epochs", check_epochs(self.num_epochs))
        if self.uneven is not None and self.uneven not in UNEVEN:
            raise ValueError(f"uneven must be 'drop', 'pad', 'keep' or None, got {self.uneven!r:.80}.")
        if self.local_cache_dir is not None and not isinstance(self.local_cache_dir, (str, os.PathLike)):
            raise TypeError(f"local_cache_dir must be a path, got {self.local_cache_dir!r:.80}.")
        if self.with_row_index is not None and (not isinstance(self.with_row_index, str) or not self.with_row_index):
            raise TypeError(f"with_row_index must be the name of a column to add, got {self.with_row_index!r:.80}.")
        if self.transform is not None:
            if not callable(self.transform):
                raise TypeError(f"transform must be a function of a batch, got {self.transform!r:.80}.")
            takes_generator(self.transform)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> LoaderOptions:
        """These options among a public method's arguments, passed as its `locals()`."""
        return cls(**{field.name: arguments[field.name] for field in dataclasses.fields(cls)})

    def narrowed_to(
        self, schema: Schema, features: Names | None, labels: Names | None, weights: Names | None
    ) -> LoaderOptions:
        """These options, reading only features, labels and weights, if neither `columns` nor `transform` says more."""
        if features is None or self.columns is not None or self.transform is not None:
            return self
        added = (self.with_row_index, NOT_PADDED, SEQUENCE_LENGTH)
        narrowed = narrow_columns(schema, self.stack, (features, labels, weights), added)
        return dataclasses.replace(self, **narrowed)

    def make_source(self, storage: Storage, manifest: Manifest, *, runs_filters: bool = True) -> BatchSource:
        """What a loader with these options reads. Every argument is checked before the pass of `filters` begins.

        Args:
            storage: where the files are.
            manifest: the rows that there are.
            runs_filters: False leaves the filters out, so that no row is read.

        Raises:
            NullValueError, SourceError: a wanted column has nulls or rows that `nulls` and `ragged` do not cover.
            SourceError: no row passes the filters.
            ValueError, TypeError: an argument does not fit the columns; the message names it.
        """
        shard = check_shard(self.cur_shard, self.shard_count)
        names, stacks = resolve_names(manifest, self.columns, self.stack)
        source = BatchSource(
            storage=storage,
            manifest=manifest,
            schema=manifest.batch_schema,
            names=names,
            stacks=stacks,
            nulls=self.nulls,
            ragged=self.ragged,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            shuffle=None,
            shard=shard,
            # Shuffled reading is training: ranks need equal steps. Ordered reading is evaluation: no row may be lost.
            uneven=self.uneven or ("drop" if self.shuffle else "keep"),
            window_rows=1,
            window_groups=DEFAULT_WINDOW_GROUPS if self.shuffle_window_rows is None else None,
            workers_count=self.workers_count or default_workers_count(),
            is_shard_found=self.cur_shard is None,
            seed=self.seed,
            bucket_by=self.bucket_by,
            row_index=self.with_row_index,
            transform=self.transform,
            prefetch_batches=self.prefetch_batches,
            verify_checksums=self.verify_checksums,
            local_cache_dir=None if self.local_cache_dir is None else os.fspath(self.local_cache_dir),
            local_cache_bytes=self.local_cache_bytes,
        )
        if self.bucket_by is not None and not self.shuffle:
            raise ValueError("bucket_by needs shuffle=True: without it rows come in the dataset's order.")
        check_policies(source, is_filtered=self.filters is not None)
        source = self._of_rows(source, manifest)
        if self.filters is None or not runs_filters:
            return source
        return self._of_rows(source, select_rows(storage, manifest, self.filters))

    def _of_rows(self, source: BatchSource, manifest: Manifest) -> BatchSource:
        """The same for the rows that `manifest` selects: their number decides the window, their digest the order."""
        return dataclasses.replace(
            source,
            manifest=manifest,
            window_rows=check_window(self.shuffle_window_rows, manifest),
            shuffle=Shuffle(seed=self.seed, fingerprint=manifest.live_fingerprint) if self.shuffle else None,
        )


def all_rows(storage: Storage, manifest: Manifest, columns: Sequence[str]) -> BatchSource:
    """Every live row of columns before they are decoded or standardised, whatever shard this process is."""
    options = LoaderOptions(batch_size=1 << 16, columns=columns, nulls="mask", ragged="pad", cur_shard=0, shard_count=1)
    return options.make_source(storage, dataclasses.replace(manifest, decoders={}, scales={}))
