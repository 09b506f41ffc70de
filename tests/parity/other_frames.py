"""Random tables of all types that have a tensor form, each made from its seed alone.

Half of the values come from a few odd ones of their type: the least and the greatest, NaN of several bits, both zeros,
infinities, empty and long texts, days before 1582. The others are drawn evenly, or ascend, or repeat, so that each
encoding of Parquet meets what it is made for.
"""

from __future__ import annotations

import decimal
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

_YEAR_1, _YEAR_9999 = -62_135_596_800, 253_402_300_799
"""Seconds since 1970."""

_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_FLOATS: dict[pa.DataType, tuple[np.dtype[Any], list[int]]] = {
    # Zeros, infinities, NaN of either sign and with a payload, the least and the greatest numbers.
    pa.float16(): (np.dtype("<u2"), [0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 1, 0x7BFF, 0x3C00]),
    pa.float32(): (
        np.dtype("<u4"),
        [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 1, 0x7F7FFFFF, 0x3F800000],
    ),
    pa.float64(): (
        np.dtype("<u8"),
        [0, 1 << 63, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, (0xFFF8 << 48) + 1, 1, (0x7FF << 52) - 1, 0x3FF << 52],
    ),
}
_TEXTS = ["", "a", "žluťoučký 🐟", "a\x00b", "NaN", "aaaa", "aaab", "aab", "z" * 300, "\uffff", "𐀀"]
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

LEAVES: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    **{name: getattr(pa, name)() for name in _INTEGERS},
    "float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64(),
    "string": pa.string(), "large string": pa.large_string(), "string view": pa.string_view(),
    "binary": pa.binary(), "large binary": pa.large_binary(),
    "decimal 4": pa.decimal128(4, 1), "decimal 9": pa.decimal128(9, 9), "decimal 18": pa.decimal128(18, 0),
    "decimal 38": pa.decimal128(38, 10), "decimal 76": pa.decimal256(60, 20),
    "date": pa.date32(),
    **{f"time {unit} {zone}": pa.timestamp(unit, zone) for unit in _PER_SECOND for zone in (None, "UTC", "Asia/Tokyo")},
    "time of day ms": pa.time32("ms"), "time of day us": pa.time64("us"), "time of day ns": pa.time64("ns"),
    "duration": pa.duration("us"),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "dictionary of numbers": pa.dictionary(pa.int8(), pa.int64()),
}  # fmt: skip
"""The scalar types by name."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How the values of a column are drawn."""

    leaf: str
    null_share: float
    element_null_share: float
    manner: str
    """`odd`, `even`, `ascending` or `repeated`."""


def make_table(chance: random.Random, leaves: list[str], *, num_rows: int) -> pa.Table:
    """A table of a few columns, some of them nested, whose scalars are of the types that are named."""
    columns = {"id": pa.array(range(num_rows), pa.int64())}
    for number in range(chance.randint(3, 7)):
        columns[chance.choice(("c{}", "C.{}", "ž {}")).format(number)] = _make_column(chance, leaves, num_rows)
    return pa.table(columns)


def _make_column(chance: random.Random, leaves: list[str], num_rows: int) -> pa.Array:
    def shape() -> Shape:
        return Shape(
            leaf=chance.choice(leaves),
            null_share=chance.choice((0.0, 0.0, 0.1, 0.5, 0.95, 1.0 if chance.random() < 0.3 else 0.2)),
            element_null_share=chance.choice((0.0, 0.0, 0.2)),
            manner=chance.choice(("odd", "even", "ascending", "repeated")),
        )

    first, second = shape(), shape()
    kind = chance.choices(
        ("scalar", "list", "fixed", "nested", "struct", "map", "structs"), (24, 5, 2, 2, 4, 2, 2)
    )[0]  # fmt: skip
    if kind == "scalar":
        return _leaf(chance, first, num_rows, first.null_share)
    valid = _present(chance, num_rows, first.null_share)
    if kind == "struct":
        inner = pa.StructArray.from_arrays(
            [_leaf(chance, second, num_rows, second.null_share), pa.array(range(num_rows), pa.int32())], ["m", "n.o"]
        )
        members = [_leaf(chance, first, num_rows, first.element_null_share), inner]
        return pa.StructArray.from_arrays(members, ["a", "b"], mask=pa.array(~valid))
    if kind == "fixed":
        size = chance.randint(1, 3)
        flat = _leaf(chance, first, num_rows * size, first.element_null_share)
        return pa.FixedSizeListArray.from_arrays(flat, size, mask=pa.array(~valid))
    longest = chance.choice((1, 3, 3, 9))
    lengths = np.array([chance.randint(0, longest) if there else 0 for there in valid], np.int32)
    total = int(lengths.sum())
    if kind == "nested":
        # Rows of a tensor: the inner lists of a row have one length.
        inner_lengths = np.repeat([chance.randint(1, 3) for _ in range(num_rows)], lengths).astype(np.int32)
        flat = _leaf(chance, first, int(inner_lengths.sum()), first.element_null_share)
        return _listed(_listed(flat, inner_lengths, None), lengths, valid)
    if kind == "map":
        # No key twice in a row: DuckDB refuses such a map, and Polars drops the first of the two.
        keys = pa.array([f"{place % 9}{chance.choice(_TEXTS)}" for place in range(total)], pa.string())
        offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
        listed = pa.MapArray.from_arrays(
            pa.array(offsets, pa.int32()), keys, _leaf(chance, second, total, second.element_null_share)
        )
        return pa.MapArray.from_buffers(
            listed.type, num_rows, [pa.array(valid).buffers()[1], pa.array(offsets).buffers()[1]],
            children=[pa.StructArray.from_arrays([listed.keys, listed.items], fields=[
                listed.type.key_field, listed.type.item_field])],
        )  # fmt: skip
    if kind == "structs":
        parts = [_leaf(chance, shape, total, shape.element_null_share) for shape in (first, second)]
        return _listed(pa.StructArray.from_arrays(parts, ["p", "q"]), lengths, valid)
    return _listed(_leaf(chance, first, total, first.element_null_share), lengths, valid)


def _listed(flat: pa.Array, lengths: np.ndarray, valid: np.ndarray | None) -> pa.Array:
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    mask = None if valid is None else pa.array(~valid)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, mask=mask)


def _present(chance: random.Random, count: int, null_share: float) -> np.ndarray:
    """Which values are not null: by chance, or but for a run at one end."""
    if null_share and chance.random() < 0.3:
        rows = np.arange(count) < int(count * null_share)
        return ~rows if chance.random() < 0.5 else rows
    return np.array([chance.random() >= null_share for _ in range(count)], np.bool_)


def _leaf(chance: random.Random, shape: Shape, count: int, null_share: float) -> pa.Array:
    """Values of a scalar type, some of them null."""
    kind = LEAVES[shape.leaf]
    valid = _present(chance, count, null_share)
    if pa.types.is_dictionary(kind):
        inner = next(name for name, leaf in LEAVES.items() if leaf == kind.value_type)
        repeated = Shape(leaf=inner, null_share=0, element_null_share=0, manner="repeated")
        return _leaf(chance, repeated, count, null_share).dictionary_encode().cast(kind)
    draw = _drawer(chance, kind)
    if shape.manner == "repeated":
        few = [draw() for _ in range(chance.randint(1, 4))]
        values = [few[row * len(few) // max(count, 1)] if chance.random() < 0.9 else chance.choice(few)
                  for row in range(count)]  # fmt: skip
    else:
        values = [draw() for _ in range(count)]
        if shape.manner == "ascending":
            values.sort()
    kept = [value if there else None for value, there in zip(values, valid.tolist(), strict=True)]
    if kind in _FLOATS:
        bits, _ = _FLOATS[kind]
        words = np.array([value or 0 for value in kept], bits)
        array = pa.array(words).view(kind)
        return pa.Array.from_buffers(kind, count, [pa.array(valid).buffers()[1], array.buffers()[1]])
    if pa.types.is_temporal(kind):
        width = pa.int32() if kind.bit_width == 32 else pa.int64()
        return pa.array(kept, width).view(kind)
    return pa.array(kept, kind)


def _drawer(chance: random.Random, kind: pa.DataType) -> Callable[[], Any]:
    """Draws values of a type: floats as their bits, days and times as counts."""
    if pa.types.is_boolean(kind):
        return lambda: chance.random() < 0.5
    if kind in _FLOATS:
        bits, odd_bits = _FLOATS[kind]
        top = np.iinfo(bits).max
        return lambda: chance.choice(odd_bits) if chance.random() < 0.5 else _quiet(chance.randint(0, int(top)), kind)
    if pa.types.is_integer(kind):
        least, most = (int(getattr(np.iinfo(kind.to_pandas_dtype()), name)) for name in ("min", "max"))
        # As in Spark, which has no unsigned numbers.
        most = min(most, 2**63 - 1)
        return _between(chance, least, most)
    if pa.types.is_decimal(kind):
        largest = 10**kind.precision - 1
        draw = _between(chance, -largest, largest)
        # Of a context's own, which rounds to 28 digits otherwise.
        exact = decimal.Context(prec=80)
        return lambda: exact.scaleb(decimal.Decimal(draw()), -kind.scale)
    if pa.types.is_date(kind):
        return _between(chance, _YEAR_1 // 86_400, _YEAR_9999 // 86_400)
    if pa.types.is_timestamp(kind):
        per = _PER_SECOND[kind.unit]
        if kind.unit == "ns":
            return _between(chance, -(2**63) + 1, 2**63 - 1)
        return _between(chance, _YEAR_1 * per, (_YEAR_9999 + 1) * per - 1)
    if pa.types.is_time(kind):
        return _between(chance, 0, 86_400 * _PER_SECOND[kind.unit] - 1)
    if pa.types.is_duration(kind):
        return _between(chance, -(2**62), 2**62)

    def text() -> str:
        if chance.random() < 0.5:
            return chance.choice(_TEXTS)
        return "".join(chance.choice("abž🐟 \n\"'") for _ in range(chance.randrange(8)))

    if "binary" in str(kind):
        return lambda: text().encode() if chance.random() < 0.5 else chance.randbytes(chance.randrange(20))
    return text


def _quiet(bits: int, kind: pa.DataType) -> int:
    """The bits of a float, but no signalling NaN: a processor may make each of them quiet on its way."""
    half, exponent = {16: (1 << 9, 0x7C00), 32: (1 << 22, 0xFF << 23), 64: (1 << 51, 0x7FF << 52)}[kind.bit_width]
    return bits | half if bits & exponent == exponent else bits


def _between(chance: random.Random, least: int, most: int) -> Callable[[], int]:
    """Numbers of either end, around zero, and between."""
    odd = sorted({least, least + 1, most - 1, most, *(one for one in (-1, 0, 1, 7, 1000) if least <= one <= most)})
    return lambda: chance.choice(odd) if chance.random() < 0.5 else chance.randint(least, most)
