"""What a loader reads, as a value: which columns of which rows, in which order, windows and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from converter.decoders.decoder import Decoder, row_bytes
from converter.manifest import Manifest
from converter.mixing import Mixing
from converter.plan import EpochPlan, Shuffle, plan_epoch
from converter.positions import Shard
from converter.reading import buckets
from converter.reading.gather import Array, Stack
from converter.reading.nulls import Nulls
from converter.reading.ragged import Ragged, RaggedRows
from converter.reading.runs import LENGTH_SUFFIX, VALID_SUFFIX
from converter.schema import Field, Scale, Schema
from converter.sequences import Sequences
from converter.state import Past, State, Uneven
from converter.storage.directory import Storage

ELEMENT_VALID_SUFFIX = "__element_valid"
INNER_LENGTH_SUFFIX = "__inner_length"

Transform = Callable[..., Mapping[str, Any]]
"""A user's function of a whole batch, and optionally of a random generator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """Everything that decides a process's batches, in every epoch; travels to worker processes.

    A value: `windows.read_runs` reads what it says.
    """

    storage: Storage
    manifest: Manifest
    schema: Schema
    """The columns as batches have them; if elements are sequences, of one of their rows."""

    names: tuple[str, ...]
    """Keys of a batch, in order: columns and stacks; masks and lengths follow theirs."""

    stacks: tuple[Stack, ...]
    nulls: Nulls
    ragged: Ragged
    batch_size: int
    drop_last: bool
    shuffle: Shuffle | None
    shard: Shard
    uneven: Uneven
    window_rows: int
    window_groups: int | None
    workers_count: int
    is_shard_found: bool = False
    """Whether the shard was detected, not given by the user."""

    seed: int = 0
    bucket_by: str | None = None
    """The column by whose lengths rows come together."""

    row_index: str | None = None
    """The key under which batches hold each row's number in the dataset; None for none."""

    transform: Transform | None = None
    prefetch_batches: int | None = None
    verify_checksums: bool = False
    local_cache_dir: str | None = None
    """Where this host keeps copies of what was fetched."""

    local_cache_bytes: int | None = None

    is_part: bool = False
    """Whether its rows are interleaved with others, so that wide ones need not be copied before."""

    parts: tuple[BatchSource, ...] = ()
    """The sources of a mixture, each in its own order."""

    mixing: Mixing | None = None
    source_name: str | None = None
    """The key under which batches hold the number of each row's source; None for none."""

    @property
    def storages(self) -> tuple[Storage, ...]:
        """Where the files are."""
        return tuple(part.storage for part in self.parts) or (self.storage,)

    @property
    def fields(self) -> tuple[Field, ...]:
        """The columns that are read, each once, as batches have them."""
        stacked = {stack.name: stack.columns for stack in self.stacks}
        wanted = dict.fromkeys(column for name in self.names for column in stacked.get(name, (name,)))
        return tuple(self.schema[name] for name in wanted if name != self.source_name)

    @property
    def stored_fields(self) -> tuple[Field, ...]:
        """The same columns as they are read from the files: bytes and numbers before anything is made of them."""
        return tuple(
            self.manifest.schema[field.name] if field.decoder or field.scale else field for field in self.fields
        )

    @property
    def sequences(self) -> Sequences | None:
        """How elements are made of rows, if they are no single rows."""
        return self.manifest.sequences

    def steps_name(self, name: str) -> str:
        """The column whose steps a batch's column has: a mask those of its column, columns of a stack all the same."""
        if name not in self.names:
            name = name.removesuffix(ELEMENT_VALID_SUFFIX).removesuffix(VALID_SUFFIX)
        return next((stack.columns[0] for stack in self.stacks if stack.name == name), name)

    @property
    def scales(self) -> Mapping[str, Scale]:
        """What columns are standardised by."""
        return {name: scale for name, scale in self.manifest.scales.items() if scale is not None}

    @property
    def decoders(self) -> Mapping[str, Decoder]:
        """What makes tensors of the bytes of columns that are read."""
        return {name: decoder for name, decoder in self.manifest.decoders.items() if name in self.names}

    @property
    def decoded_row_bytes(self) -> int:
        """Bytes of the decoded columns of one row; if rows differ in shape about, and not less than the guess."""
        sizes = self.manifest.decoded_bytes
        return sum(max(sizes.get(name, 0), row_bytes(decoder)) for name, decoder in self.decoders.items())

    def is_variable(self, name: str) -> bool:
        """Whether a column's rows are objects or differ in shape, so that its batch is no array."""
        field = self.schema.get(name)
        return field is not None and (field.is_object or field.shape is None)

    def is_lists_of_objects(self, name: str) -> bool:
        """Whether rows are lists of texts or bytes, or the mask of such lists."""
        field = self.schema.get(name if name in self.names else name.removesuffix(ELEMENT_VALID_SUFFIX))
        return field is not None and field.is_object and field.shape is None

    def has_mask(self, names: Sequence[str]) -> bool:
        """Whether every batch has a mask of these columns: the dataset may have a null in one of them."""
        return self.nulls == "mask" and any(self.schema[name].has_nulls for name in names)

    def has_element_mask(self, name: str) -> bool:
        """Whether every batch has a mask of this column's elements: one of them may be null."""
        field = self.schema.get(name)
        return self.nulls == "mask" and field is not None and field.has_null_elements

    def field_of(self, name: str) -> Field | None:
        """The field of a window's column: one of the schema's, or of the mask of its elements."""
        if name in self.names:
            return self.schema.get(name)
        field = self.schema.get(name.removesuffix(ELEMENT_VALID_SUFFIX))
        if field is None or not name.endswith(ELEMENT_VALID_SUFFIX):
            return None
        return replace(field, name=name, dtype="bool", has_nulls=False, has_null_elements=False)

    def padded(self, name: str, rows: RaggedRows) -> dict[str, Array]:
        """The columns that `ragged="pad"` makes of ragged rows; a mask has no lengths of its own."""
        field = self.field_of(name)
        values, lengths = rows.pad({"str": "", "bytes": b""}.get("" if field is None else field.dtype, 0))
        if name not in self.names:
            return {name: values}
        columns = {name: values, name + LENGTH_SUFFIX: lengths}
        if self.schema[name].is_jagged:
            columns[name + INNER_LENGTH_SUFFIX] = rows.pad_inner_lengths()
        return columns

    def plan(self, epoch: int, past: Past = ()) -> EpochPlan:
        """This process's share of one epoch, or of what `past` has left of it."""
        return plan_epoch(
            self.manifest.elements_of(epoch),
            batch_size=self.batch_size,
            window_rows=self.window_rows,
            epoch=epoch,
            shuffle=self.shuffle,
            shard=self.shard,
            uneven=self.uneven,
            drop_last=self.drop_last,
            past=past,
            window_groups=self.window_groups,
        )

    def num_batches(self) -> int:
        """Batches of one epoch: the same in every epoch."""
        return self.plan(0).num_batches

    def state(self, epoch: int) -> State:
        """The state at the beginning of an epoch."""
        return State(
            fingerprint=self.manifest.live_fingerprint,
            shuffle=self.shuffle is not None,
            seed=0 if self.shuffle is None else self.shuffle.seed,
            window_rows=self.window_rows,
            window_groups=self.window_groups or 0,
            uneven=self.uneven,
            epoch=epoch,
            epochs_done=0,
            past=(),
            bucket_by=self.bucket_order,
            windows=self.windows if self.shuffle is not None else "",
        )

    @property
    def windows(self) -> str:
        """The windows of a mixture's sources, on which its order depends; empty if it is none."""
        groups = {part.window_groups: f" in {part.window_groups} row groups" for part in self.parts}
        groups[None] = ""
        return ", ".join(f"{part.window_rows} rows{groups[part.window_groups]}" for part in self.parts)

    @property
    def bucket_order(self) -> str:
        """What the order depends on besides the plan: the column `bucket_by`, and what stands for its values."""
        return "" if self.bucket_by is None else buckets.order_by(self.schema[self.bucket_by], self.nulls)

    @property
    def windows_ahead(self) -> int:
        """How many windows are being read or wait to be used."""
        if self.prefetch_batches is None:
            return self.workers_count + 1
        return max(1, math.ceil(self.prefetch_batches * self.batch_size / self.window_rows))
