"""The ways in which the stores are read: each gives, as JSON, all that Petastorm or `converter.petastorm` hands out.

Both packages run this text. A way that ends in an error gives the error's class. Rows come in the order of the files,
in one thread, unless the way is about another order.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.parity.petastorm_stores import STORES, Package
from tests.parity.petastorm_values import as_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Way = Callable[[Package, str], Any]

IN_ORDER = {"reader_pool_type": "dummy", "shuffle_row_groups": False}


def read(package: Package, way: Way, url: str) -> Any:
    """What a way hands out, as JSON."""
    # Old Petastorms print what they clean up; all of them warn.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return way(package, url)
        except Exception as error:  # noqa: BLE001 - the class of whatever it is, is what is compared.
            return {"error": [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Exception)]}


# --- Ways -------------------------------------------------------------------------------------------------------------


def table_of(items: Iterable[Any], options: dict[str, Any]) -> Any:
    """Rows or batches with the names of their fields said once."""
    rows = list(items)
    if not rows:
        return {"fields": [], "rows": []}
    # Petastorm leaves it to chance in which order fields come that were asked for.
    fields = sorted(rows[0]._fields) if "schema_fields" in options else list(rows[0]._fields)
    return {"fields": fields, "rows": [[as_json(getattr(row, field)) for field in fields] for row in rows]}


def rows(**options: Any) -> Way:
    def way(package: Package, url: str) -> Any:
        with package.top.make_reader(url, **resolved(package, options)) as reader:
            return table_of(reader, options)

    return way


def batches(**options: Any) -> Way:
    def way(package: Package, url: str) -> Any:
        with package.top.make_batch_reader(url, **resolved(package, options)) as reader:
            return table_of(reader, options)

    return way


def resolved(package: Package, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a reader; a function among them makes its value from a package."""
    return {**IN_ORDER, **{name: value(package) if callable(value) else value for name, value in options.items()}}


def ids(make: str = "make_reader", **options: Any) -> Way:
    """The ids only, in order."""

    def way(package: Package, url: str) -> Any:
        with getattr(package.top, make)(url, **resolved(package, options)) as reader:
            found = [np.ravel(row.id).tolist() for row in reader]
        return [item for part in found for item in part]

    return way


def ngrams(fields: dict[int, list[str]], delta: Any, overlap: bool = True, **options: Any) -> Way:
    """Windows of rows: for each offset the names and the values."""

    def way(package: Package, url: str) -> Any:
        ngram = package.module("ngram").NGram(fields, delta, "timestamp", timestamp_overlap=overlap)
        with package.top.make_reader(url, schema_fields=ngram, **resolved(package, options)) as reader:
            # A regular expression leaves the order of its fields to chance.
            return [
                [[offset, sorted(as_json(row)["row"])] for offset, row in sorted(window.items())] for window in reader
            ]

    return way


def torch_batches(loader: str, make: str, loads: dict[str, Any], **options: Any) -> Way:
    def way(package: Package, url: str) -> Any:
        with getattr(package.top, make)(url, **resolved(package, options)) as reader:
            kind = getattr(package.module("pytorch"), loader)
            # Their order is left to chance too.
            return [as_json(dict(sorted(batch.items()))) for batch in kind(reader, **loads)]

    return way


def fields_of(schema: Any) -> Any:
    """The fields of a schema, in order; NumPy 2 calls bool_ bool."""
    return [
        [field.name, field.numpy_dtype.__name__.rstrip("_"), list(field.shape), str(field.codec), bool(field.nullable)]
        for field in schema.fields.values()
    ]


def schema(package: Package, url: str) -> Any:
    """The stored schema."""
    return fields_of(package.module("etl.dataset_metadata").get_schema_from_dataset_url(url))


def inferred(make: str) -> Way:
    """The schema of a reader."""

    def way(package: Package, url: str) -> Any:
        with getattr(package.top, make)(url, **IN_ORDER) as reader:
            return fields_of(reader.schema)

    return way


def predicate(name: str, *arguments: Any, **named: Any) -> Callable[[Package], Any]:
    return lambda package: getattr(package.module("predicates"), name)(*arguments, **named)


def selector(name: str, *arguments: Any) -> Callable[[Package], Any]:
    """A selector of row groups; one of several is given those as tuples."""

    def make(package: Package) -> Any:
        selectors = package.module("selectors")
        if isinstance(arguments[0], tuple):
            return getattr(selectors, name)([selectors.SingleIndexSelector(*one) for one in arguments])
        return getattr(selectors, name)(*arguments)

    return make


def transform(function: Any = None, **named: Any) -> Callable[[Package], Any]:
    return lambda package: package.module("transform").TransformSpec(function, **named)


def doubled_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "doubled": 2 * row["vector"].astype(np.float64), "label": row["label"].upper()}


def doubled_frame(frame: Any) -> Any:
    frame = frame[frame["id"] % 2 == 0].copy()
    frame["doubled"] = frame["f64"] * 2
    frame["matrix"] = [np.full((2, 3), value, np.float32) for value in frame["f32"]]
    return frame[["id", "doubled", "matrix", "text"]]


DOUBLED = [("doubled", np.float64, (3,), False)]
DOUBLED_FRAME = [("doubled", np.float64, (), False), ("matrix", np.float32, (2, 3), False)]
EVEN = predicate("in_lambda", ["id"], lambda row: row % 2 == 0)
LARGE = predicate("in_lambda", ["f64"], lambda f64: f64 > 1.5)


def is_late(word: str, row: int) -> bool:
    return word > "a" and row > 5


def plain_loader(*fields: str) -> Way:
    return torch_batches("DataLoader", "make_batch_reader", {"batch_size": 7}, schema_fields=list(fields))


# --- Which store is read in which ways --------------------------------------------------------------------------------

PETASTORM: dict[str, Way] = {"schema": schema, "rows": rows(), "batches": batches()}
PLAIN: dict[str, Way] = {
    "inferred": inferred("make_batch_reader"),
    "rows": rows(),
    "batches": batches(),
    "batches, converted early": batches(convert_early_to_numpy=True),
}
KEYED: dict[str, Way] = {
    **PETASTORM,
    "a field that is a key": rows(schema_fields=["word"]),
    "no field that is a key": rows(schema_fields=["id"]),
    "a key in a set": ids(predicate=predicate("in_set", ["a", "ž"], "word")),
    "a key and a field": ids(predicate=predicate("in_lambda", ["word", "id"], is_late)),
    "filters": ids(filters=[("word", "=", "b c")]),
    "filters of batches": ids("make_batch_reader", filters=[("word", "in", ["a", "d=e"])]),
}
NUMBERED: dict[str, Way] = {
    **PETASTORM,
    "a key in a set": ids(predicate=predicate("in_set", [1, 2], "number")),
    "filters": ids(filters=[("number", ">", 0)]),
}
SEQUENCES: dict[str, Way] = {
    **PETASTORM,
    **{f"shard {shard} of 3": ids(cur_shard=shard, shard_count=3) for shard in range(3)},
    "more shards than row groups": ids(cur_shard=0, shard_count=1000),
    "two epochs": ids(num_epochs=2),
    "row groups in parts": ids(shuffle_row_drop_partitions=3),
    "threads": ids(reader_pool_type="thread", workers_count=3),
    "regular expressions": ids(schema_fields=["i.", "lab.*"]),
    "no such field": ids(schema_fields=["nothing"]),
    "a set": ids(predicate=predicate("in_set", ["label 2", "label 5"], "label")),
    "a function": ids(predicate=predicate("in_lambda", ["id", "maybe"], lambda row, maybe: maybe is None)),
    "a function with state": ids(
        predicate=predicate("in_lambda", ["id"], lambda row, state: row in state, {3, 30, 59})
    ),
    "negated": ids(
        predicate=lambda package: package.module("predicates").in_negate(
            package.module("predicates").in_set([f"label {label}" for label in range(6)], "label")
        )
    ),
    "reduced": ids(
        predicate=lambda package: package.module("predicates").in_reduce(
            [
                package.module("predicates").in_set(["label 1", "label 2"], "label"),
                package.module("predicates").in_lambda(["id"], lambda row: row < 20),
            ],
            all,
        )
    ),
    "split by a string": ids(predicate=predicate("in_pseudorandom_split", [0.3, 0.5, 0.2], 1, "label")),
    "split by an integer": ids(predicate=predicate("in_pseudorandom_split", [0.3, 0.5, 0.2], 0, "id")),
    "an unknown field": ids(predicate=predicate("in_set", [1], "nothing")),
    "transformed": rows(
        transform_spec=transform(doubled_row, edit_fields=DOUBLED, selected_fields=["id", "doubled", "label"])
    ),
    "field removed": rows(transform_spec=transform(removed_fields=["image", "vector"])),
    "transformed after a predicate": ids(
        predicate=predicate("in_lambda", ["maybe"], lambda maybe: maybe is not None),
        transform_spec=transform(removed_fields=["maybe", "image"]),
    ),
    "pairs": ngrams({0: ["id", "timestamp"], 1: ["id", "vector", "image"]}, 4),
    "pairs, any gap": ngrams({0: ["id", "timestamp"], 1: ["id", "timestamp"]}, 10**6),
    "around": ngrams({-1: ["id", "timestamp"], 0: ["label", "maybe"], 1: ["id"]}, 4),
    "with a gap": ngrams({-1: ["id", "timestamp"], 1: ["id", "label"]}, 4),
    "regular expressions of a window": ngrams({0: ["i.*", "time.*"], 1: ["id"]}, 4),
    "without overlap": ngrams({0: ["id", "timestamp"], 1: ["id"], 2: ["id"]}, 4, overlap=False),
    "windows of parts": ngrams({0: ["id", "timestamp"], 1: ["id"]}, 4, shuffle_row_drop_partitions=2),
    "windows with a predicate": ngrams({0: ["id", "timestamp"], 1: ["id", "timestamp"]}, 8, predicate=EVEN),
    "DataLoader": torch_batches(
        "DataLoader", "make_reader", {"batch_size": 7}, schema_fields=["id", "image", "label", "vector"]
    ),
    "BatchedDataLoader": torch_batches(
        "BatchedDataLoader", "make_reader", {"batch_size": 7}, schema_fields=["id", "image", "vector"]
    ),
}
INDEXED: dict[str, Way] = {
    "rows": rows(),
    "one value": ids(rowgroup_selector=selector("SingleIndexSelector", "labels", ["label 3"])),
    "some ids": ids(rowgroup_selector=selector("SingleIndexSelector", "ids", [0, 40])),
    "no such value": ids(rowgroup_selector=selector("SingleIndexSelector", "ids", [1000])),
    "not null": ids(rowgroup_selector=selector("SingleIndexSelector", "not null", ["any"])),
    "both": ids(rowgroup_selector=selector("IntersectIndexSelector", ("ids", [1, 2, 50]), ("labels", ["label 2"]))),
    "either": ids(rowgroup_selector=selector("UnionIndexSelector", ("ids", [1]), ("ids", [50]))),
    "no such index": ids(rowgroup_selector=selector("SingleIndexSelector", "nothing", [0])),
}
NUMBERS_OF_PLAIN = ["id", "flag", "i8", "i16", "i32", "f32", "f64", "some_float", "floats", "longs"]
PLAIN_ROWS: dict[str, Way] = {
    **PLAIN,
    "some fields": batches(schema_fields=["id", "text"]),
    "a regular expression and no such field": ids("make_batch_reader", schema_fields=["id", "nothing"]),
    "no such field": batches(schema_fields=["nothing"]),
    "shard 1 of 2": ids("make_batch_reader", cur_shard=1, shard_count=2),
    "row groups in parts": ids("make_batch_reader", shuffle_row_drop_partitions=3),
    "filters": ids("make_batch_reader", filters=[("id", "<", 12)]),
    "a function": ids(
        "make_batch_reader", schema_fields=["id", "f64"], predicate=LARGE, transform_spec=transform(lambda frame: frame)
    ),
    "transformed": batches(
        transform_spec=transform(
            doubled_frame, edit_fields=DOUBLED_FRAME, selected_fields=["id", "doubled", "matrix", "text"]
        )
    ),
    "fields removed": batches(transform_spec=transform(removed_fields=["bytes", "dec", "words", "longs", "floats"])),
    "DataLoader": plain_loader(*NUMBERS_OF_PLAIN),
    "DataLoader of text": plain_loader("id", "text"),
    "DataLoader of times": plain_loader("id", "time"),
    "DataLoader of decimals": plain_loader("id", "dec"),
    "BatchedDataLoader": torch_batches(
        "BatchedDataLoader", "make_batch_reader", {"batch_size": 7}, schema_fields=NUMBERS_OF_PLAIN
    ),
    "InMemBatchedDataLoader": torch_batches(
        "InMemBatchedDataLoader",
        "make_batch_reader",
        {"batch_size": 7, "num_epochs": 2, "rows_capacity": 100},
        schema_fields=NUMBERS_OF_PLAIN,
    ),
}

WAYS: dict[str, dict[str, Way]] = {
    **{name: PLAIN if store.frame else PETASTORM for name, store in STORES.items()},
    "partitioned by a string": KEYED,
    "partitioned by an integer": NUMBERED,
    "sequences": SEQUENCES,
    "indexed": INDEXED,
    "old": {
        "schema": schema,
        "rows": rows(),
        "indexed": ids(rowgroup_selector=selector("SingleIndexSelector", "narrow", [0, -32768])),
        "a key in a set": ids(predicate=predicate("in_set", ["a", "z"], "word")),
    },
    "old sequences": {
        **PETASTORM,
        "pairs": SEQUENCES["pairs"],
        "one value": INDEXED["one value"],
        "not null": INDEXED["not null"],
    },
    "plain": PLAIN_ROWS,
    "plain, nulls": {**PLAIN, "rows without times": rows(schema_fields=["id", "some_(?!time).*"])},
}
