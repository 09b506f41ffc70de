"""The options of a write: checked before Spark is used, and part of the cache key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from converter.decoders import to_json
from converter.decoders.decoder import Decoder
from converter.schema import DeclaredShape, Scale, split_declared

if TYPE_CHECKING:
    from converter.portable.records import CategoriesSpec

DEFAULT_ROW_GROUP_BYTES = 8 << 20
"""Small enough that a window of some 48 MB mixes several places of the dataset, large enough that decoding takes longer
than opening: a guess, not measured."""

WRITERS = ("auto", "executors", "spark")
COMPRESSIONS = ("auto", "none", "lz4", "zstd", "snappy")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The options that enter the cache key, under the names of the fields: a new or renamed field makes other keys."""

    float_dtype: str | None
    shapes: Mapping[str, DeclaredShape]
    decode: Mapping[str, Decoder]
    decode_at: str
    categories: Mapping[str, CategoriesSpec]
    scales: Mapping[str, Scale | None]
    row_group_bytes: int
    compression: str
    shuffle_rows_seed: int | None
    writer: str
    own_decoders: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the user's own decoders of the executors: a manifest names them, but not their parameters."""

    def for_key(self, *, is_kept: bool) -> dict[str, Any]:
        """The options as plain values. Entries that are kept have keys of their own."""
        shapes = {name: list(shape or ()) for name, shape in self.shapes.items()}
        plain = {each.name: getattr(self, each.name) for each in fields(self)} | {"shapes": shapes}
        decode_at = plain.pop("decode_at")
        added = {
            "decode_at": decode_at if self.decode and decode_at == "write" else None,
            "decode": {name: to_json(decoder) for name, decoder in plain.pop("decode").items()},
            "own_decoders": plain.pop("own_decoders"),
            "categories": plain.pop("categories"),
            "scales": plain.pop("scales"),
            "is_kept": is_kept,
        }
        # Without them, so that entries from before there was such an option are found again.
        return plain | {name: value for name, value in added.items() if value}

    def as_called(self, *, compression: str, is_kept: bool) -> dict[str, Any]:
        """The arguments of `make_spark_converter`, as JSON; of categories and scales only the columns.

        Their values stand elsewhere in the manifest. `compression` is what `"auto"` became, if that is known.
        """
        plain = self.for_key(is_kept=is_kept)
        unseen = {spec["unseen"] for spec in self.categories.values()}
        told = {
            "float_dtype": plain["float_dtype"],
            "shapes": plain["shapes"],
            "decode": plain.get("decode", {}),
            "decode_at": self.decode_at,
            "categories": list(self.categories),
            "unseen": min(unseen, default="raise"),
            "standardize": list(self.scales),
            "row_group_bytes": self.row_group_bytes,
            "compression": compression,
            "shuffle_rows_seed": self.shuffle_rows_seed,
            "writer": self.writer,
            "delete_on_exit": not is_kept,
        }
        called: dict[str, Any] = json.loads(json.dumps(told))
        return called


def check_write_options(
    *, float_dtype: Any, row_group_bytes: Any, compression: Any, writer: Any, shapes: Any, may_differ: bool = False
) -> None:
    """Refuse option values before any work is done, naming the option. `may_differ`: a shape may be None."""
    if shapes is not None and not isinstance(shapes, Mapping):
        raise TypeError(
            f"shapes must be a dict of column name to shape, e.g. {{'image': (3, 32, 32)}}, got {shapes!r:.80}."
        )
    for name, declared in (shapes or {}).items():
        # What is no shape is refused below.
        is_split = may_differ or isinstance(declared, (list, tuple))
        shape: Any = split_declared(name, declared)[1] if is_split else declared
        if shape is None and may_differ:
            continue
        is_shape = isinstance(shape, Sequence) and not isinstance(shape, str) and len(shape) > 0
        if not is_shape or not all(type(size) is int and size > 0 for size in shape):
            raise ValueError(f"shapes[{name!r}] must be a tuple of sizes above 0, e.g. (3, 32, 32), got {shape!r:.80}.")
    if float_dtype not in ("float32", "float64", None):
        raise ValueError(f"float_dtype must be 'float32', 'float64' or None, got {float_dtype!r:.80}.")
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression must be one of {', '.join(COMPRESSIONS)}, got {compression!r:.80}.")
    if writer not in WRITERS:
        raise ValueError(f"writer must be one of {', '.join(WRITERS)}, got {writer!r:.80}.")
    if isinstance(row_group_bytes, bool) or not isinstance(row_group_bytes, int):
        raise TypeError(f"row_group_bytes must be an integer, got {row_group_bytes!r:.80}.")
    if row_group_bytes < 1024:
        raise ValueError(f"row_group_bytes must be at least 1024, got {row_group_bytes}.")
