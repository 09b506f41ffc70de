"""What the stores hold that Petastorm, or `converter.petastorm`, is asked to write: fields, rows and files.

Both packages run this text: `Package` imports either's modules by their names. It runs with the Python and NumPy of any
Petastorm since 0.4.
"""

from __future__ import annotations

import importlib
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Values = list[Any]

OLD, NEW = (0, 4), (0, 13)


class Package:
    """The modules of `petastorm` or of `converter.petastorm`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.top = importlib.import_module(name)

    def module(self, name: str) -> Any:
        """A module by the name that it has in both packages."""
        return importlib.import_module(f"{self.name}.{name}")


class Field(NamedTuple):
    """A field and its values, one of each row."""

    name: str
    dtype: Any
    shape: tuple[int | None, ...]
    codec: str
    """Nothing, `ndarray`, `compressed`, `png`, `jpeg 90` or the text of a Spark type."""

    values: Values
    nullable: bool = False


class Store(NamedTuple):
    """A store that is written by `materialize_dataset`, or by Spark alone where it has a frame."""

    fields: Callable[[], list[Field]]
    since: tuple[int, int] = NEW
    """The first version of Petastorm that is asked to write it."""

    num_files: int = 2
    partition_by: tuple[str, ...] = ()
    row_group_bytes: int | None = None
    indexed: tuple[tuple[str, str, str], ...] = ()
    """Name, class and field of each indexer of row groups."""

    use_summary_metadata: bool = False
    frame: str = ""
    """Spark's statement instead of fields: files that Petastorm knows nothing of."""


# --- Values -----------------------------------------------------------------------------------------------------------

NUM_ROWS = 12


def numbers(dtype: Any, num_rows: int = NUM_ROWS) -> Values:
    """The extremes of a type, what is special about it, and then some others."""
    if dtype is np.bool_:
        return [np.bool_(row % 3 == 0) for row in range(num_rows)]
    if issubclass(dtype, np.integer):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        # Parquet has no uint64, so a long holds one.
        found = [low, min(high, 2**63 - 1), 0, 1, *([-1] if low else []), *range(2, 2 + num_rows)]
    else:
        info = np.finfo(dtype)
        special = [info.min, info.max, 0.0, -0.0, float("nan"), float("inf"), float("-inf"), info.tiny, 1 / 3]
        found = [*special, *(row + 0.5 for row in range(num_rows))]
    return [dtype(value) for value in found[:num_rows]]


def texts(num_rows: int = NUM_ROWS) -> Values:
    special = ["", "a", "žluťoučký kůň", "None", "x" * 40, "two\nlines", "nul\x00inside", " "]
    return [special[row] if row < len(special) else f"text {row}" for row in range(num_rows)]


def arrays(dtype: Any, shape: Sequence[int | None], num_rows: int = NUM_ROWS, seed: int = 0) -> Values:
    """Arrays of one dtype; a dimension without a size has 0, 1, 2, … elements."""
    random = np.random.RandomState(seed)
    found = []
    for row in range(num_rows):
        sizes = [row % 4 if size is None else size for size in shape]
        if np.dtype(dtype).kind in "US":
            cells = np.array([f"{row} {'ab'[i % 2] * i}" for i in range(int(np.prod(sizes)))], dtype)
            found.append(cells.reshape(sizes))
        elif np.dtype(dtype).kind == "M":
            found.append(random.randint(0, 2**40, sizes).astype(dtype))
        elif np.dtype(dtype).kind == "b":
            found.append(random.randint(0, 2, sizes).astype(dtype))
        else:
            found.append((random.standard_normal(sizes) * 50).astype(dtype))
    return found


def pictures(dtype: Any, shape: Sequence[int | None], num_rows: int = NUM_ROWS, seed: int = 0) -> Values:
    """Smooth pictures with a little noise; a dimension without a size differs from row to row."""
    random = np.random.RandomState(seed)
    found = []
    for row in range(num_rows):
        sizes = [8 + row if size is None else size for size in shape]
        ramps = np.add.outer(np.linspace(0, 0.5, sizes[0]), np.linspace(0, 0.3, sizes[1]))
        picture = np.stack([np.roll(ramps, 3 * channel, 0) for channel in range(3)], 2) if len(sizes) == 3 else ramps
        found.append(((picture + random.random_sample(sizes) * 0.2) * np.iinfo(dtype).max).astype(dtype))
    return found


def with_nulls(values: Values, every: int) -> Values:
    return [None if row % every == every - 1 else value for row, value in enumerate(values)]


def times(num_rows: int = NUM_ROWS) -> Values:
    """Moments to the microsecond, before and after 1970."""
    return [np.datetime64(int(value), "us").item() for value in (np.arange(num_rows) - 3) * 86_400_000_001 * 997]


def days(num_rows: int = NUM_ROWS) -> Values:
    return [np.datetime64(int(value), "D").item() for value in (np.arange(num_rows) - 3) * 1009]


def decimals(digits: int, num_rows: int = NUM_ROWS) -> Values:
    return [Decimal(row * 7919 - 20_000).scaleb(-digits) for row in range(num_rows)]


# --- Fields -----------------------------------------------------------------------------------------------------------


def count(num_rows: int = NUM_ROWS) -> Field:
    return Field("id", np.int64, (), "LongType()", [np.int64(row) for row in range(num_rows)])


def scalars() -> list[Field]:
    """Scalars whose Spark type is guessed from NumPy's."""
    kinds = (np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64, np.float32, np.float64)
    plain = [Field(f"of_{np.dtype(kind).name}", kind, (), "", numbers(kind)) for kind in kinds]
    return [count(), *plain, Field("of_text", np.str_, (), "", texts())]


def scalars_with_codecs() -> list[Field]:
    kinds = [
        (np.bool_, "BooleanType()"), (np.int8, "ByteType()"), (np.uint8, "ShortType()"), (np.int16, "ShortType()"),
        (np.uint16, "IntegerType()"), (np.int32, "IntegerType()"), (np.uint32, "LongType()"), (np.int64, "LongType()"),
        (np.uint64, "LongType()"), (np.float16, "FloatType()"), (np.float32, "FloatType()"),
        (np.float64, "DoubleType()"),
    ]  # fmt: skip
    fields = [Field(f"of_{np.dtype(kind).name}", kind, (), codec, numbers(kind)) for kind, codec in kinds]
    return [
        count(),
        *fields,
        Field("narrow", np.int32, (), "ShortType()", numbers(np.int16)),
        Field("text", np.str_, (), "StringType()", texts()),
        Field("decimal", Decimal, (), "DecimalType(10, 3)", decimals(3)),
        Field("long_decimal", Decimal, (), "DecimalType(38, 18)", decimals(18)),
        Field("day", np.datetime64, (), "DateType()", days()),
        Field("time", np.datetime64, (), "TimestampType()", times()),
    ]


def arrays_of_every_kind() -> list[Field]:
    kinds = (np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float16,
             np.float32, np.float64, np.complex64)  # fmt: skip
    shape = (2, 3)
    fields = [count()]
    for codec in ("ndarray", "compressed"):
        for seed, kind in enumerate(kinds):
            name = f"{codec}_{np.dtype(kind).name}"
            fields.append(Field(name, kind, shape, codec, arrays(kind, shape, seed=seed)))
        backwards = [array.astype(">f4") for array in arrays(np.float32, shape)]
        columns_first = [np.asfortranarray(array) for array in arrays(np.float64, shape)]
        days_of = arrays("datetime64[s]", shape)
        fields += [
            Field(f"{codec}_text", np.str_, (None,), codec, arrays("U", (None,))),
            Field(f"{codec}_bytes", np.bytes_, (2, None), codec, arrays("S", (2, None))),
            Field(f"{codec}_big_endian", np.float32, shape, codec, backwards),
            Field(f"{codec}_fortran", np.float64, shape, codec, columns_first),
            Field(f"{codec}_time", np.datetime64, shape, codec, days_of),
            Field(f"{codec}_variable", np.float32, (None,), codec, arrays(np.float32, (None,))),
            Field(f"{codec}_points", np.float64, (None, 3), codec, arrays(np.float64, (None, 3))),
            Field(f"{codec}_two_variable", np.int32, (None, None), codec, arrays(np.int32, (None, None))),
            Field(f"{codec}_no_axis", np.int32, (), codec, [np.array(row, np.int32) for row in range(NUM_ROWS)]),
            Field(f"{codec}_none", np.int16, (None,), codec, arrays(np.int16, (0,))),
        ]
    return fields


def pictures_of_every_kind() -> list[Field]:
    kinds = [
        ("png_grey", np.uint8, (9, 7), "png"), ("png_colour", np.uint8, (9, 7, 3), "png"),
        ("png_deep_grey", np.uint16, (9, 7), "png"), ("png_deep_colour", np.uint16, (9, 7, 3), "png"),
        ("png_variable", np.uint8, (None, None, 3), "png"), ("png_rows", np.uint8, (None, 5), "png"),
        ("jpeg_grey", np.uint8, (24, 17), "jpeg 80"), ("jpeg_colour", np.uint8, (24, 17, 3), "jpeg 95"),
        ("jpeg_variable", np.uint8, (None, None, 3), "jpeg 70"),
    ]  # fmt: skip
    return [count(), *(Field(name, kind, shape, codec, pictures(kind, shape)) for name, kind, shape, codec in kinds)]


def nulls() -> list[Field]:
    """Every kind of field with nulls, one that holds nothing else, and one that could hold them and does not."""
    return [
        count(),
        Field("some_bool", np.bool_, (), "", with_nulls(numbers(np.bool_), 3), nullable=True),
        Field("some_int", np.int32, (), "", with_nulls(numbers(np.int32), 2), nullable=True),
        Field("some_long", np.int64, (), "LongType()", with_nulls(numbers(np.int64), 4), nullable=True),
        Field("some_float", np.float32, (), "FloatType()", with_nulls(numbers(np.float32), 4), nullable=True),
        Field("some_text", np.str_, (), "StringType()", with_nulls(texts(), 3), nullable=True),
        Field("some_decimal", Decimal, (), "DecimalType(10, 3)", with_nulls(decimals(3), 3), nullable=True),
        Field("some_day", np.datetime64, (), "DateType()", with_nulls(days(), 3), nullable=True),
        Field("some_array", np.float32, (2,), "ndarray", with_nulls(arrays(np.float32, (2,)), 3), nullable=True),
        Field("some_variable", np.int16, (None,), "compressed", with_nulls(arrays(np.int16, (None,)), 4), True),
        Field("some_picture", np.uint8, (6, 5, 3), "png", with_nulls(pictures(np.uint8, (6, 5, 3)), 3), True),
        Field("only_nulls", np.int32, (), "IntegerType()", [None] * NUM_ROWS, nullable=True),
        Field("no_nulls", np.int32, (), "IntegerType()", numbers(np.int32), nullable=True),
    ]


def nulls_of_times() -> list[Field]:
    return [count(), Field("some_time", np.datetime64, (), "TimestampType()", with_nulls(times(), 3), nullable=True)]


def keyed() -> list[Field]:
    """Rows with two keys that folders can be named after."""
    fields = [field for field in scalars_with_codecs() if field.name in ("id", "text", "of_float32")]
    keys = ["a", "b c", "d=e", "ž"]
    return [
        *fields,
        Field("array", np.float32, (2, 2), "ndarray", arrays(np.float32, (2, 2))),
        Field("number", np.int32, (), "IntegerType()", [np.int32(row % 3) for row in range(NUM_ROWS)]),
        Field("word", np.str_, (), "StringType()", [keys[row % 4] for row in range(NUM_ROWS)]),
    ]


SEQUENCE_ROWS = 60


def sequences() -> list[Field]:
    """Rows in the order of their times, which have gaps, in several row groups of each file."""
    random = np.random.RandomState(7)
    steps = np.where(random.random_sample(SEQUENCE_ROWS) < 0.15, 50, random.randint(1, 5, SEQUENCE_ROWS))
    spots = arrays(np.float32, (None,), SEQUENCE_ROWS)
    spots[21:50] = [None] * 29
    return [
        count(SEQUENCE_ROWS),
        Field("image", np.uint8, (4, 3, 3), "png", pictures(np.uint8, (4, 3, 3), SEQUENCE_ROWS)),
        Field("label", np.str_, (), "StringType()", [f"label {row // 9}" for row in range(SEQUENCE_ROWS)]),
        Field("maybe", np.int32, (), "IntegerType()",
              with_nulls([np.int32(row) for row in range(SEQUENCE_ROWS)], 5), nullable=True),
        Field("spots", np.float32, (None,), "ndarray", spots, nullable=True),
        Field("timestamp", np.int64, (), "LongType()", [np.int64(time) for time in np.cumsum(steps)]),
        Field("vector", np.float32, (3,), "ndarray", arrays(np.float32, (3,), SEQUENCE_ROWS)),
    ]  # fmt: skip


def wide() -> list[Field]:
    return [
        count(),
        *(
            Field(f"field_{number:03}", np.int32, (), "IntegerType()", [np.int32(number + row) for row in range(3)] * 4)
            for number in range(299)
        ),
    ]


def old() -> list[Field]:
    """What every version of Petastorm could write: their fields are sorted by name, and each has a codec."""
    taken = [
        *(field for field in scalars_with_codecs() if field.name not in ("of_float16", "long_decimal", "of_uint64")),
        *(field for field in arrays_of_every_kind() if field.name in ("ndarray_float32", "ndarray_variable",
          "ndarray_text", "ndarray_uint16", "compressed_float64", "compressed_two_variable")),
        *(field for field in pictures_of_every_kind() if field.name in ("png_colour", "png_deep_grey", "jpeg_grey")),
        *(field for field in nulls() if field.name.startswith("some_") and field.name != "some_bool" and field.codec),
        *(field for field in keyed() if field.name == "number"),
        # Petastorm under Python 2 failed at folders with other letters.
        Field("word", np.str_, (), "StringType()", ["a", "b c", "d=e", "z"] * (NUM_ROWS // 4)),
    ]  # fmt: skip
    # Petastorm 0.4 handed floats and bools of NumPy on to Spark, which refuses them.
    plain = [field if field.shape else field._replace(values=list(map(python_value, field.values))) for field in taken]
    return sorted(plain, key=lambda field: field.name)


def python_value(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


PLAIN = """
    SELECT id, id % 2 = 0 AS flag, CAST(id - 6 AS BYTE) i8, CAST(id * 1000 - 20000 AS SHORT) i16, CAST(id AS INT) i32,
      CAST(id / 7 AS FLOAT) f32, id / 7 AS f64, CAST(id / 7 AS DECIMAL(9, 3)) AS dec,
      date_add(DATE'1960-01-01', CAST(id * 1000 AS INT)) AS day, timestamp_micros((id - 3) * 86400000001) AS time,
      concat('text ', repeat('ž', CAST(id AS INT))) AS text, CAST(concat('bytes ', id) AS BINARY) AS bytes,
      CASE WHEN id % 4 > 0 THEN CAST(id AS INT) END AS some_int, CASE WHEN id % 3 > 0 THEN id / 2 END AS some_float,
      array(CAST(id AS FLOAT), 1f, 2f) AS floats, array(id, id + 1) AS longs, array(string(id), 'x') AS words
    FROM range(0, 24, 1, 2)
"""
RAGGED = """
    SELECT id, sequence(0L, id % 3) AS longs, transform(sequence(0, CAST(id % 4 AS INT)), i -> string(i)) AS words,
      CASE WHEN id % 4 > 0 THEN array(CAST(id AS DOUBLE)) END AS some, named_struct('a', id) AS struct,
      array(array(id)) AS nested
    FROM range(0, 12, 1, 1)
"""
PLAIN_NULLS = """
    SELECT id, CASE WHEN id % 4 > 0 THEN concat('text ', id) END AS some_text,
      CASE WHEN id % 4 > 0 THEN id % 2 = 0 END AS some_bool,
      CASE WHEN id % 4 > 0 THEN CAST(id AS BYTE) END AS some_byte,
      CASE WHEN id % 4 > 0 THEN date_add(DATE'1960-01-01', CAST(id * 1000 AS INT)) END AS some_day,
      CASE WHEN id % 4 > 0 THEN timestamp_micros(id * 86400000001) END AS some_time,
      CASE WHEN id % 4 > 0 THEN CAST(id / 7 AS DECIMAL(9, 3)) END AS some_decimal
    FROM range(0, 12, 1, 1)
"""
PLAIN_KEYED = """
    SELECT id, CAST(id / 7 AS FLOAT) AS f32, CASE id % 3 WHEN 0 THEN 'a' WHEN 1 THEN 'b c' ELSE 'ž' END AS word,
      CAST(id % 2 + 1 AS INT) AS number
    FROM range(0, 12, 1, 1)
"""

STORES: dict[str, Store] = {
    "scalars": Store(scalars),
    "scalars with codecs": Store(scalars_with_codecs),
    "arrays": Store(arrays_of_every_kind),
    "pictures": Store(pictures_of_every_kind),
    "nulls": Store(nulls),
    "nulls of times": Store(nulls_of_times),
    "partitioned by a string": Store(keyed, partition_by=("word",), num_files=1),
    "partitioned by an integer": Store(keyed, partition_by=("number",), num_files=1),
    "partitioned by both": Store(keyed, partition_by=("word", "number"), num_files=1),
    "sequences": Store(sequences, row_group_bytes=3000),
    "indexed": Store(
        sequences,
        row_group_bytes=3000,
        indexed=(
            ("labels", "SingleFieldIndexer", "label"),
            ("ids", "SingleFieldIndexer", "id"),
            ("not null", "FieldNotNullIndexer", "spots"),
        ),
    ),
    "summary metadata": Store(sequences, use_summary_metadata=True),
    "wide": Store(wide, num_files=1),
    "old": Store(old, since=OLD, partition_by=("word",), num_files=1, indexed=(
        ("narrow", "SingleFieldIndexer", "narrow"), ("not null", "FieldNotNullIndexer", "some_array"))),
    "old sequences": Store(sequences, since=OLD, row_group_bytes=3000, indexed=(
        ("labels", "SingleFieldIndexer", "label"), ("not null", "FieldNotNullIndexer", "spots"))),
    "plain": Store(list, frame=PLAIN),
    "plain, ragged": Store(list, frame=RAGGED),
    "plain, nulls": Store(list, frame=PLAIN_NULLS),
    "plain, partitioned": Store(list, frame=PLAIN_KEYED, partition_by=("word", "number")),
}  # fmt: skip


# --- Writing ----------------------------------------------------------------------------------------------------------


def codec_of(package: Package, field: Field) -> Any:
    codecs = package.module("codecs")
    if not field.codec:
        return None
    if field.codec == "ndarray":
        return codecs.NdarrayCodec()
    if field.codec == "compressed":
        return codecs.CompressedNdarrayCodec()
    kind, _, quality = field.codec.partition(" ")
    if kind in ("png", "jpeg"):
        return codecs.CompressedImageCodec(kind, **({"quality": int(quality)} if quality else {}))
    from pyspark.sql import types

    name, _, arguments = field.codec.partition("(")
    numbers_in = [int(number) for number in arguments.rstrip(")").split(",") if number]
    return codecs.ScalarCodec(getattr(types, name)(*numbers_in))


def schema_of(package: Package, fields: Sequence[Field]) -> Any:
    unischema = package.module("unischema")
    own = [
        unischema.UnischemaField(field.name, field.dtype, field.shape, codec_of(package, field), field.nullable)
        for field in fields
    ]
    return unischema.Unischema("StoreSchema", own)


def write_store(package: Package, spark: Any, name: str, url: str) -> None:
    """Write a store with a package; `spark` is a session in UTC."""
    store = STORES[name]
    if store.frame:
        write_files(spark.sql(store.frame), store, url)
        return
    fields = store.fields()
    schema = schema_of(package, fields)
    encode = package.module("unischema").dict_to_spark_row
    metadata = package.module("etl.dataset_metadata")
    rows = [encode(schema, {field.name: field.values[row] for field in fields}) for row in range(len(fields[0].values))]
    with metadata.materialize_dataset(spark, url, schema, use_summary_metadata=store.use_summary_metadata):
        frame = spark.createDataFrame(spark.sparkContext.parallelize(rows, store.num_files), schema.as_spark_schema())
        write_files(frame, store, url)
    if store.indexed:
        indexers = package.module("etl.rowgroup_indexers")
        made = [getattr(indexers, kind)(index, field) for index, kind, field in store.indexed]
        package.module("etl.rowgroup_indexing").build_rowgroup_index(url, spark.sparkContext, made)


def write_files(frame: Any, store: Store, url: str) -> None:
    writer = frame.write
    if store.row_group_bytes:
        # Parquet looks at the size of a row group only every 100 rows otherwise.
        writer = writer.option("parquet.block.size", store.row_group_bytes)
        writer = writer.option("parquet.page.size", 100).option("parquet.page.size.row.check.min", 3)
    if store.partition_by:
        writer = writer.partitionBy(*store.partition_by)
    writer.parquet(url)
