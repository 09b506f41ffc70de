"""What `_common_metadata` says of a store: its schema, the row groups of each file, and indexes of values.

The schema stands there twice: as JSON, which is read here, and as the pickle that Petastorm 0.13 reads. Nothing is ever
unpickled. If Petastorm wrote the pickle anew since the JSON was written, the JSON is old, and the pickle is read, as
data.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from converter.petastorm.codecs import (
    CompressedImageCodec,
    CompressedNdarrayCodec,
    DataframeColumnCodec,
    NamedSparkType,
    NdarrayCodec,
    ScalarCodec,
)
from converter.petastorm.etl import RowGroupIndexerBase
from converter.petastorm.pickle_records import Name, PetastormMetadataError, shown
from converter.petastorm.pickled_schema import (
    NAMES_OF_TYPES,
    VALUE_TYPES,
    indexes_of_pickle,
    pickle_of_indexes,
    pickle_of_schema,
    schema_of_pickle,
)
from converter.petastorm.unischema import Unischema, UnischemaField

logger = logging.getLogger(__name__)

UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"
ROW_GROUPS_PER_FILE_KEY = b"dataset-toolkit.num_row_groups_per_file.v1"
ROWGROUPS_INDEX_KEY = b"dataset-toolkit.rowgroups_index.v1"
JSON_SCHEMA_KEY = b"converter.petastorm.unischema.v1"
INDEXED_FILES_KEY = b"converter.petastorm.indexed_files.v1"
"""Both are ours; the others are Petastorm's. The latter tells of which files the indexes are."""

_MAX_JSON_BYTES = 32 << 20
_MAX_ROW_GROUPS = 50_000_000
_MAX_AXES = 64
_MAX_SIZE = 2**31
_MAX_DEPTH = 8
_DTYPE = re.compile(r"[<>|=]?(?:[iuf][1248]|c8|c16|b1|[SU][0-9]{1,7}|[Mm]8(?:\[[0-9]{0,5}[a-zA-Z]{1,2}\])?)")


def read_schema(metadata: Mapping[bytes, bytes]) -> Unischema | None:
    """The schema in the key-value metadata of `_common_metadata`; None if there is none.

    Raises:
        PetastormMetadataError: it cannot be understood.
    """
    stored, pickled = metadata.get(JSON_SCHEMA_KEY), metadata.get(UNISCHEMA_KEY)
    if stored is None:
        return None if pickled is None else schema_of_pickle(pickled)
    described = _json_object(stored, "schema")
    if pickled is not None and described.get("pickle_sha256") != _digest(pickled):
        # Petastorm keeps our key when it writes its own.
        try:
            return schema_of_pickle(pickled)
        except PetastormMetadataError as error:
            logger.warning("The schema is read from its JSON, as its pickle was changed since: %s", error)
    return schema_of_description(described)


def schema_entries(schema: Unischema) -> dict[bytes, bytes]:
    """The key-value metadata that store a schema.

    Raises:
        ValueError: a field has a type, or a codec a state, that has no form there.
    """
    described: dict[str, Any] = describe_schema(schema)
    entries: dict[bytes, bytes] = {}
    try:
        entries[UNISCHEMA_KEY] = pickle_of_schema(schema)
    except ValueError as error:
        logger.warning("Petastorm itself cannot read the schema of this store: %s", error)
    else:
        described["pickle_sha256"] = _digest(entries[UNISCHEMA_KEY])
    return entries | {JSON_SCHEMA_KEY: json.dumps(described, separators=(",", ":")).encode()}


def row_groups_per_file(metadata: Mapping[bytes, bytes]) -> dict[str, int] | None:
    """The number of row groups of each file, by its path below the store's folder; None if it is not stored.

    Raises:
        PetastormMetadataError: it is stored and cannot be understood.
    """
    stored = metadata.get(ROW_GROUPS_PER_FILE_KEY)
    if stored is None:
        return None
    counts = _json_object(stored, "numbers of row groups")
    if not all(type(count) is int and 0 <= count <= _MAX_ROW_GROUPS for count in counts.values()):
        raise _refusal("numbers of row groups", "a file has no whole number of them")
    if sum(counts.values()) > _MAX_ROW_GROUPS:
        raise _refusal("numbers of row groups", f"there are more than {_MAX_ROW_GROUPS:,}")
    return counts


def row_group_entries(counts: Mapping[str, int]) -> dict[bytes, bytes]:
    """The key-value metadata that store the number of row groups of each file."""
    return {ROW_GROUPS_PER_FILE_KEY: json.dumps(dict(counts)).encode()}


def read_indexes(metadata: Mapping[bytes, bytes]) -> dict[str, RowGroupIndexerBase]:
    """The indexes of row groups by name; empty if there are none.

    Raises:
        PetastormMetadataError: they are stored and cannot be understood.
    """
    stored = metadata.get(ROWGROUPS_INDEX_KEY)
    return {} if stored is None else indexes_of_pickle(stored)


def index_entries(indexers: Sequence[RowGroupIndexerBase]) -> dict[bytes, bytes]:
    """The key-value metadata that store indexes of row groups."""
    return {ROWGROUPS_INDEX_KEY: pickle_of_indexes(indexers)}


def describe_schema(schema: Unischema) -> dict[str, Any]:
    """A schema as values that JSON has.

    Raises:
        ValueError: a field has a type, or a codec a state, that has no form there.
    """
    return {"version": 1, "name": schema.__name__, "fields": [_describe_field(each) for each in schema.fields.values()]}


def schema_of_description(described: Any) -> Unischema:
    """The schema that values from JSON describe. A codec of the user's own is found among the classes at hand.

    Raises:
        PetastormMetadataError: they describe none, or a codec whose class is not imported.
    """
    _check(isinstance(described, dict) and described.get("version") == 1, "it is of another version")
    name, fields = described.get("name"), described.get("fields")
    _check(isinstance(name, str), "it has no name")
    _check(isinstance(fields, list), "it has no list of fields")
    made = [_field_of(field) for field in fields]
    _check(len({field.name for field in made}) == len(made), "two of its fields have one name")
    return Unischema(name, made)


def _describe_field(field: UnischemaField) -> dict[str, Any]:
    kind = field.numpy_dtype
    is_known = _DTYPE.fullmatch(kind.str) if isinstance(kind, np.dtype) else kind is None or kind in NAMES_OF_TYPES
    if not is_known:
        raise ValueError(
            f"Field {field.name!r} has values of {kind!r}, which cannot be stored. Use a class of NumPy's."
        )
    try:
        codec = _describe_codec(field.codec)
    except ValueError as error:
        raise ValueError(f"The codec of field {field.name!r} cannot be stored: {error}") from error
    return {
        "name": field.name,
        "type": _describe_type(kind),
        "shape": [None if size is None else int(size) for size in field.shape],
        "codec": codec,
        "nullable": None if field.nullable is None else bool(field.nullable),
    }


def _field_of(described: Any) -> UnischemaField:
    _check(isinstance(described, dict), "a field is no object")
    name, shape, nullable = described.get("name"), described.get("shape"), described.get("nullable")
    _check(isinstance(name, str), "a field has no name")
    _check(isinstance(shape, list) and len(shape) <= _MAX_AXES, f"field {shown(name)} has no shape")
    _check(
        all(size is None or (type(size) is int and 0 <= size < _MAX_SIZE) for size in shape),
        f"field {shown(name)} has a shape with a size that is no number",
    )
    _check(nullable is None or isinstance(nullable, bool), f"field {shown(name)} is neither nullable nor not")
    return UnischemaField(
        name, _type_of(described.get("type")), tuple(shape), _codec_of(described.get("codec")), nullable
    )


def _describe_type(kind: Any) -> str | None:
    if isinstance(kind, np.dtype):
        return str(kind.str)
    return None if kind is None else ".".join(NAMES_OF_TYPES[kind])


def _type_of(described: Any) -> Any:
    if described is None:
        return None
    _check(isinstance(described, str), "a field's type is no text")
    module, _, name = described.rpartition(".")
    if (kind := VALUE_TYPES.get(Name(module, name))) is not None:
        return kind
    _check(_DTYPE.fullmatch(described) is not None, f"a field has the type {shown(described)}")
    try:
        return np.dtype(described)
    except (TypeError, ValueError):
        raise _refusal("schema", f"a field has the type {shown(described)}") from None


def _describe_codec(codec: Any) -> dict[str, Any] | None:
    if codec is None:
        return None
    if type(codec) is ScalarCodec:
        return {"name": "ScalarCodec", "spark_type": _describe_spark_type(codec.spark_type)}
    if type(codec) is CompressedImageCodec:
        return {"name": "CompressedImageCodec", "image_codec": codec.image_codec, "quality": codec.quality}
    if type(codec) in (NdarrayCodec, CompressedNdarrayCodec):
        return {"name": type(codec).__name__}
    if not isinstance(codec, DataframeColumnCodec):
        raise ValueError(f"{type(codec).__name__} is not derived from DataframeColumnCodec.")
    kind = type(codec)
    return {"name": f"{kind.__module__}.{kind.__qualname__}", "state": _describe_state(vars(codec), 0)}


def _codec_of(described: Any) -> Any:
    if described is None:
        return None
    _check(isinstance(described, dict) and isinstance(described.get("name"), str), "a field's codec has no name")
    name = described["name"]
    if name == "ScalarCodec":
        return ScalarCodec(_spark_type_of(described.get("spark_type")))
    if name == "CompressedImageCodec":
        image_codec, quality = described.get("image_codec"), described.get("quality")
        _check(isinstance(image_codec, str), "a picture has no format")
        _check(type(quality) is int and 0 <= quality <= 100, "a picture's quality is no number up to 100")
        return CompressedImageCodec(image_codec, quality)
    if name in ("NdarrayCodec", "CompressedNdarrayCodec"):
        return NdarrayCodec() if name == "NdarrayCodec" else CompressedNdarrayCodec()
    return _users_codec(name, described.get("state"))


def _users_codec(name: str, state: Any) -> DataframeColumnCodec:
    """A codec of a class that the program has imported. None of the class's code runs, and nothing is imported."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _derived(DataframeColumnCodec)}
    # A program's own module is `__main__` while it runs as one. Other modules' classes may mean other values.
    alike = [
        kind
        for kind in kinds.values()
        if name.endswith(f".{kind.__qualname__}")
        and "__main__" in (kind.__module__, name.removesuffix(f".{kind.__qualname__}"))
    ]
    kind = kinds.get(name) or (alike[0] if len(alike) == 1 else None)
    if kind is None:
        raise PetastormMetadataError(
            f"The stored schema has a field with the codec {shown(name)}, which is no codec of this package, and no "
            "class of this name is imported. Import the module that defines it before you open the store."
        )
    codec: DataframeColumnCodec = object.__new__(kind)
    values = _state_of(state, 0)
    _check(isinstance(values, dict), f"the codec {shown(name)} has no state")
    vars(codec).update(values)
    return codec


def _derived(kind: type[Any]) -> list[type[Any]]:
    return [each for derived in kind.__subclasses__() for each in (derived, *_derived(derived))]


def _describe_spark_type(kind: NamedSparkType) -> dict[str, Any]:
    arguments = [_describe_spark_type(each) if isinstance(each, NamedSparkType) else each for each in kind.arguments]
    return {"name": kind.name, "arguments": arguments}


def _spark_type_of(described: Any, depth: int = 0) -> NamedSparkType:
    _check(isinstance(described, dict) and depth <= _MAX_DEPTH, "a codec has no Spark type")
    name, arguments = described.get("name"), described.get("arguments")
    _check(isinstance(name, str) and isinstance(arguments, list), "a codec has no Spark type")
    _check(
        all(isinstance(each, dict) or (isinstance(each, int) and 0 <= each < _MAX_SIZE) for each in arguments),
        f"the Spark type {shown(name)} has arguments that are no numbers",
    )
    made = tuple(_spark_type_of(each, depth + 1) if isinstance(each, dict) else each for each in arguments)
    try:
        return NamedSparkType(name, made)
    except (ValueError, TypeError):
        raise _refusal("schema", f"Spark has no type {shown(name)} with {len(made)} arguments") from None


def _describe_state(value: Any, depth: int) -> Any:
    """An attribute of a user's codec as JSON has it: plain values, lists, dictionaries, classes of NumPy's values."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth < _MAX_DEPTH and type(value) in (list, tuple):
        items = [_describe_state(each, depth + 1) for each in value]
        return items if type(value) is list else {"tuple": items}
    if depth < _MAX_DEPTH and type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _describe_state(each, depth + 1) for key, each in value.items()}}
    if isinstance(value, np.dtype) or (isinstance(value, type) and value in NAMES_OF_TYPES):
        return {"type": _describe_type(value)}
    try:
        return {"spark_type": _describe_spark_type(ScalarCodec(value).spark_type)}
    except (ValueError, AttributeError):
        raise ValueError(f"it keeps a {type(value).__name__}, which is no plain value.") from None


def _state_of(described: Any, depth: int) -> Any:
    if described is None or isinstance(described, (bool, int, float, str)):
        return described
    _check(depth <= _MAX_DEPTH, "a codec's state is too deep")
    if isinstance(described, list):
        return [_state_of(each, depth + 1) for each in described]
    if set(described) == {"dict"} and isinstance(described["dict"], dict):
        return {key: _state_of(each, depth + 1) for key, each in described["dict"].items()}
    if set(described) == {"tuple"} and isinstance(described["tuple"], list):
        return tuple(_state_of(each, depth + 1) for each in described["tuple"])
    if set(described) == {"type"}:
        return _type_of(described["type"])
    _check(set(described) == {"spark_type"}, "a codec's state is none")
    return _spark_type_of(described["spark_type"])


def _json_object(stored: bytes, subject: str) -> dict[str, Any]:
    if len(stored) > _MAX_JSON_BYTES:
        raise _refusal(subject, f"they have {len(stored):,} bytes, and {_MAX_JSON_BYTES:,} are the most that is read")
    try:
        described = json.loads(stored.decode())
    # Very many brackets end the parser by a RecursionError.
    except (ValueError, RecursionError):
        raise _refusal(subject, "they are no JSON") from None
    if not isinstance(described, dict):
        raise _refusal(subject, "they are no object of JSON")
    return described


def _check(is_right: bool, cause: str) -> None:
    if not is_right:
        raise _refusal("schema", cause)


def _refusal(subject: str, cause: str) -> PetastormMetadataError:
    return PetastormMetadataError(
        f"The stored {subject} cannot be understood: {cause}. Write the metadata again with "
        "converter.petastorm.etl.petastorm_generate_metadata."
    )


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
