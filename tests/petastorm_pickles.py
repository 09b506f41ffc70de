"""Pickles of Petastorm's objects in every protocol, by Python's own pickler, of classes that have the real names."""

from __future__ import annotations

import collections
import contextlib
import decimal
import io
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)

Field = collections.namedtuple("Field", ["name", "numpy_dtype", "shape", "codec", "nullable"])  # noqa: PYI024


class _Plain:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Fakes(NamedTuple):
    """Classes by the names that real pickles have."""

    unischema: Any
    field: Any
    codecs: dict[str, Any]
    indexers: dict[str, Any]
    spark_types: dict[str, Any]


def _class(module: str, name: str, *bases: type) -> Any:
    return type(name, bases or (_Plain,), {"__module__": module, "__qualname__": name})


def _fakes() -> Fakes:
    names = {
        "petastorm.codecs": ["ScalarCodec", "NdarrayCodec", "CompressedNdarrayCodec", "CompressedImageCodec"],
        "petastorm.etl.rowgroup_indexers": ["SingleFieldIndexer", "FieldNotNullIndexer"],
        "pyspark.sql.types": ["IntegerType", "LongType", "StringType", "DecimalType", "ArrayType", "TimestampType"],
    }
    made = {module: {name: _class(module, name) for name in each} for module, each in names.items()}
    return Fakes(
        _class("petastorm.unischema", "Unischema"),
        _class("petastorm.unischema", "UnischemaField", Field),
        *made.values(),
    )


FAKES = _fakes()


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """The pickler looks each class up by its name."""
    modules: dict[str, types.ModuleType] = {}
    for kind in (FAKES.unischema, FAKES.field, *(each for group in FAKES[2:] for each in group.values())):
        module = modules.setdefault(kind.__module__, types.ModuleType(kind.__module__))
        setattr(module, kind.__qualname__, kind)
        packages = kind.__module__.split(".")[:-1]
        for end in range(1, len(packages) + 1):
            modules.setdefault(".".join(packages[:end]), types.ModuleType(".".join(packages[:end])))
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def dumps(value: Any, protocol: int, *, in_python: bool = False) -> bytes:
    """The pickle of a value; `in_python` by the slower pickler, which refers back to values that C's does not."""
    with _importable():
        if not in_python:
            return pickle.dumps(value, protocol)
        stream = io.BytesIO()
        pickle._Pickler(stream, protocol).dump(value)
        return stream.getvalue()


def fake_schema() -> Any:
    """A schema with each codec, and with values of each kind."""
    scalar, types_ = FAKES.codecs["ScalarCodec"], FAKES.spark_types
    fields = [
        FAKES.field("id", np.int64, (), scalar(_spark_type=types_["LongType"]()), False),
        FAKES.field("name", np.str_, (), None, True),
        FAKES.field("flag", np.bool_, (), None, np.bool_(True)),
        FAKES.field(
            "price",
            decimal.Decimal,
            (),
            scalar(_spark_type=types_["DecimalType"](precision=12, scale=3, hasPrecisionInfo=True)),
            False,
        ),
        FAKES.field(
            "ragged",
            np.int32,
            (None,),
            scalar(_spark_type=types_["ArrayType"](elementType=types_["IntegerType"](), containsNull=False)),
            True,
        ),
        FAKES.field(
            "photo",
            np.uint8,
            (None, 300, 3),
            FAKES.codecs["CompressedImageCodec"](_image_codec=".jpeg", _quality=90),
            False,
        ),
        FAKES.field("matrix", np.float32, (np.int64(2), 70_000), FAKES.codecs["NdarrayCodec"](), False),
        FAKES.field("small", np.dtype("<f2"), (), FAKES.codecs["CompressedNdarrayCodec"](), False),
        FAKES.field("at", np.datetime64, (), scalar(_spark_type=types_["TimestampType"]()), True),
        FAKES.field("raw", bytes, (), None, True),
    ]
    by_name = collections.OrderedDict((field.name, field) for field in fields)
    return FAKES.unischema(_name="Fake", _fields=by_name, **by_name)


def fake_indexes() -> dict[str, Any]:
    """Indexes of values of each kind, and one of fields that are not null."""
    values: dict[str, list[Any]] = {
        "numbers": [np.int64(3), np.uint8(200), -7, 1 << 40],
        "texts": ["a", np.str_("bü"), np.bytes_(b"c\xff")],
        "reals": [np.float32(2.5), 0.5],
        "exact": [decimal.Decimal("1.50")],
        "days": [np.datetime64("2026-11-25"), np.datetime64("2026-11-25T12:00", "25us")],
        "flags": [np.bool_(True), False],
    }
    indexes = {}
    for name, each in values.items():
        data: Any = collections.defaultdict(set)
        for number, value in enumerate(each):
            data[value] |= {number, 300, 70_000}
        indexes[name] = FAKES.indexers["SingleFieldIndexer"](
            _index_name=name, _column_name=f"{name}_column", _index_data=data
        )
    indexes["filled"] = FAKES.indexers["FieldNotNullIndexer"](
        _index_name="filled", _column_name="x", _index_data={0, 5}
    )
    return indexes
