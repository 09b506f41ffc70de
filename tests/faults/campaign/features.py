"""Features together, where batches, row groups and files end anywhere: each cell is the one that is known.

Categories, scales, shapes, ragged rows and lists of texts; then filters, splits, shards, resumes and mixtures of that.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from converter import DatasetConverter, mix
from converter.errors import SourceError
from converter.portable import tasks
from tests.faults.campaign.cases import Campaign, Step, require
from tests.faults.campaign.feature_tables import CODED, TYPES, Known, Row, make_known
from tests.faults.campaign.value_cells import cut, is_same, plain_column

_SECOND_ID = 10_000
"""The first id of the second data set."""


def _draw(chance: random.Random) -> list[Step]:
    made = [_draw_made(chance, first_id) for first_id in (0, _SECOND_ID)]
    return made + [_draw_reading(chance) for _ in range(chance.randint(3, 8))]


def _draw_made(chance: random.Random, first_id: int) -> Step:
    return {
        "do": "make",
        "number": chance.randrange(10**9),
        "first_id": first_id,
        "is_given": chance.random() < 0.3,
        "source": chance.choice(("tasks", "files")),
        "row_group_bytes": chance.choice((1, 300, 2000, 1 << 20)),
        "file_bytes": chance.choice((1, 1000, 5000, 1 << 30)),
    }


def _draw_reading(chance: random.Random) -> Step:
    return {
        "do": chance.choice(("read", "read", "mix", "statistics", "sequences")),
        "view": chance.choice((None, None, "where id", "where word", "split", "split by word")),
        "number": chance.randrange(10**9),
        "framework": chance.choice(("numpy", "numpy", "numpy", "torch")),
        "ragged": chance.choice(("pad", "nested")),
        "batch_size": chance.choice((1, 3, 16, 1000)),
        "shuffle": chance.random() < 0.5,
        "window_rows": chance.choice((1, 10, 50, None)),
        "shards": chance.choice((1, 1, 2, 3)),
        "left_out": chance.sample(sorted(set(TYPES) - {"id", "word"}), 3),
        "resumes": chance.random() < 0.4,
    }


def _run(steps: Sequence[Step], _: None, folder: Path) -> Counter[str]:
    done: Counter[str] = Counter()
    made: list[Known] = []
    with contextlib.ExitStack() as until:
        for number, step in enumerate(steps):
            if step["do"] == "make":
                known = make_known(step, folder / str(number), made[0] if made else None)
                if known is not None:
                    until.enter_context(known.converter)
                    made.append(known)
                    done["data sets"] += 1
            elif made and step["do"] == "mix":
                _mix(step, made, done)
            elif made:
                known = made[step["number"] % len(made)]
                {"read": _read, "statistics": _statistics, "sequences": _sequences}[step["do"]](step, known, done)
    return done


def _read(step: Step, known: Known, done: Counter[str]) -> None:
    for converter, ids in _views(step, known):
        _compare(step, converter, known.rows, done, ids=ids, most=1)
    done["reads"] += 1


def _views(step: Step, known: Known) -> Iterator[tuple[DatasetConverter, set[int] | None]]:
    """Parts of a data set and the ids of their rows; None where only all parts together are known."""
    converter, rows, chance = known.converter, known.rows, random.Random(step["number"])
    view = step["view"]
    if view in ("where id", "where word"):
        name = view.removeprefix("where ")
        value = chance.choice([*rows]) if name == "id" else chance.choice(converter.schema["word"].categories or ("",))
        ids = {row_id for row_id, row in rows.items() if (row_id >= value if name == "id" else row["word"] == value)}
        try:
            yield converter.where([(name, ">=" if name == "id" else "=", value)]), ids
        except SourceError as error:
            require(not ids and "passes the filters" in str(error), "a filter leaves its rows", f"{error!r}")
    elif view in ("split", "split by word") and len(rows) > 4:
        by = {"by": "word"} if view.endswith("word") else {}
        try:
            parts = converter.split({"one": 0.5, "other": 0.5}, seed=step["number"] % 100, **by)
        except SourceError as error:
            # Keys are few.
            require(bool(by) and "would be empty" in str(error), "a split has parts", f"{error!r}")
            return
        sizes = [len(part) for part in parts.values()]
        require(sum(sizes) == len(rows), "parts are all rows", f"{sizes} of {len(rows)}")
        found = [_ids_of(part) for part in parts.values()]
        require(not set(found[0]) & set(found[1]), "parts are disjoint", f"{found}")
        yield from ((part, set(ids)) for part, ids in zip(parts.values(), found, strict=True))
    else:
        yield converter, set(rows)


def _ids_of(converter: DatasetConverter) -> list[int]:
    with converter.make_batch_reader(columns=["id"]) as reader:
        return [one for batch in reader for one in batch["id"].tolist()]


def _mix(step: Step, made: Sequence[Known], done: Counter[str]) -> None:
    chance = random.Random(step["number"])
    known = made[0] if len(made) == 1 else made[1]
    names = ["one", "other"] if chance.random() < 0.5 else ["other", "one"]
    rows = made[0].rows | known.rows
    views = {"one": made[0].converter, "other": known.converter}
    if len(made) == 1:
        some = sorted(rows)[len(rows) // 2]
        views["other"] = known.converter.where([("id", ">=", some)])
    try:
        mixture = mix({name: views[name] for name in names}, stop="all", seed=step["number"] % 100)
    except ValueError as error:
        # A column may be ragged in one of them alone.
        require("Make them alike" in str(error), "a mixture is made", f"{error!r}")
        done["mixtures refused"] += 1
        return
    _compare(step | {"resumes": False}, mixture, rows, done, ids=set(rows), most=None)
    done["mixtures"] += 1


def _statistics(step: Step, known: Known, done: Counter[str]) -> None:
    for converter, ids in _views(step | {"view": (None, "where id")[step["number"] % 2]}, known):
        rows = [known.rows[one] for one in ids or ()]
        for name, statistics in converter.statistics.items():
            nulls = sum(row[name] is None for row in rows)
            if name not in CODED:
                told = f"{name}: {statistics.null_count}, {nulls}"
                require(statistics.null_count == nulls, "nulls are counted", told)
        least, most = converter.statistics["id"].min, converter.statistics["id"].max
        require((least, most) == (min(ids or ()), max(ids or ())), "ids have bounds", f"{least} {most}")
    done["statistics"] += 1


def _sequences(step: Step, known: Known, done: Counter[str]) -> None:
    """Rows that follow each other: each sequence has the cells of its rows, and every one that there is comes once."""
    chance = random.Random(step["number"])
    length, stride = chance.randint(1, 4), chance.randint(1, 3)
    for converter, ids in _views(step, known):
        names = [
            field.name for field in converter.schema if field.shape is not None and field.name not in step["left_out"]
        ]
        order = sorted(ids or ())
        expected = {order[at]: order[at : at + length] for at in range(0, len(order) - length + 1, stride)}
        try:
            sequences = converter.sequences(length, order_by="id", stride=stride)
        except SourceError as error:
            require(not expected and "No key has" in str(error), "there are sequences", f"{error!r}")
            continue
        options: dict[str, Any] = {
            "columns": names, "batch_size": step["batch_size"], "shuffle": step["shuffle"], "nulls": "mask",
            "shuffle_window_rows": step["window_rows"],
        }  # fmt: skip
        found: Counter[int] = Counter()
        for batch in _batches(step, sequences, options):
            rows = plain_column(batch["id"])
            for at, its in enumerate(rows):
                found[its[0]] += 1
                require(its == expected.get(its[0]), "a sequence has its rows", f"{its} {expected.get(its[0])}")
                for name in names:
                    one = {key: column[at] for key, column in batch.items()}
                    _compare_column(one, name, its, known.rows, converter.schema[name])
            done["cells compared"] += sum(map(len, rows)) * len(names)
        require(found == Counter(expected.keys()), "each sequence comes once", f"{found} {sorted(expected)}")
    done["sequences"] += 1


def _compare(
    step: Step,
    converter: DatasetConverter,
    rows: dict[int, Row],
    done: Counter[str],
    *,
    ids: set[int] | None,
    most: int | None,
) -> None:
    """Read all rows, and compare each cell; `most` is how often a row may come."""
    schema = converter.schema
    names = [name for name in schema.names if name not in step["left_out"]]
    if step["framework"] == "torch":
        # Ragged tensors of torch have one dimension that varies.
        names = [name for name in names if name != "grid" or step["ragged"] == "pad"]
    options: dict[str, Any] = {
        "columns": names, "batch_size": step["batch_size"], "shuffle": step["shuffle"], "nulls": "mask",
        "ragged": step["ragged"], "uneven": "keep", "shuffle_window_rows": step["window_rows"],
    }  # fmt: skip
    shards = min(step["shards"], len(converter))
    found: Counter[int] = Counter()
    for shard in range(shards):
        for batch in _batches(step, converter, options | {"cur_shard": shard, "shard_count": shards}):
            its = plain_column(batch["id"])
            found.update(its)
            for name in names:
                _compare_column(batch, name, its, rows, schema[name])
            done["cells compared"] += len(its) * len(names)
    expected = set(rows) if ids is None else ids
    told = f"missing {sorted(expected - set(found))[:9]}, others {sorted(set(found) - expected)[:9]}"
    require(set(found) == expected, "each row comes", told)
    if most is not None:
        require(max(found.values()) <= most, "no row comes twice", f"{found.most_common(3)}")


def _batches(step: Step, converter: DatasetConverter, options: dict[str, Any]) -> list[Any]:
    make = converter.make_torch_dataloader if step["framework"] == "torch" else converter.make_batch_reader
    if not step["resumes"]:
        with make(**options) as loader:
            return list(loader)
    batches: list[Any] = []
    with make(**options) as loader:
        steps = math.ceil(len(loader) / 2)
        for batch in loader:
            batches.append(batch)
            if len(batches) == steps:
                break
        state = json.loads(json.dumps(loader.state_dict()))
    with make(**(options | {"batch_size": options["batch_size"] + 1})) as loader:
        loader.load_state_dict(state)
        return batches + list(loader)


def _compare_column(batch: Any, name: str, ids: list[int], rows: dict[int, Row], field: Any) -> None:
    cells = cut(batch, name, plain_column(batch[name]))
    valid = plain_column(batch[f"{name}__valid"]) if f"{name}__valid" in batch else [True] * len(cells)
    flags: list[Any] = [None] * len(cells)
    if f"{name}__element_valid" in batch:
        flags = cut(batch, name, plain_column(batch[f"{name}__element_valid"]))
    for cell, is_valid, flag, number in zip(cells, valid, flags, ids, strict=True):
        expected = rows[number][name]
        told = f"{name} ({field.dtype} {field.shape}) of row {number}: {cell!r} {is_valid} {flag} {expected!r}"
        require(bool(is_valid) == (expected is not None), "a null is where one is", told[:2000])
        if expected is None:
            continue
        if name in CODED:
            same = _named(cell, flag, field.categories) == expected
        else:
            same = is_same(cell, expected, "float32", valid=flag)
        require(same, "a cell is the one that is known", told[:2000])


def _named(codes: Any, valid: Any, categories: Any) -> Any:
    """Values of codes; None for those that are none of them."""
    if not isinstance(codes, list):
        return categories[codes]
    flags = [True] * len(codes) if valid is None else valid
    return [categories[code] if flag else None for code, flag in zip(codes, flags, strict=True)]


@contextlib.contextmanager
def _shared(_: Path) -> Iterator[None]:
    # No batch is small enough to be put together with the next one.
    before, tasks._COALESCE_ROWS = tasks._COALESCE_ROWS, 1
    try:
        yield
    finally:
        tasks._COALESCE_ROWS = before


CAMPAIGN = Campaign(name="features", draw=_draw, run=_run, shared=_shared)
