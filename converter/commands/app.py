"""The commands, one function each: what it takes, what it shows."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import platformdirs
import typer

from converter import __version__
from converter.cache.roots import DIRECTORY, ENVIRONMENT_VARIABLE, find_root
from converter.cache.survey import Holder, survey
from converter.commands.doctor import examine
from converter.commands.filters import parse_filter
from converter.commands.measuring import Measured, measure, measure_all
from converter.commands.opening import TIMEOUT_SECONDS, kind_of, open_rows, storage_options
from converter.commands.showing import (
    as_age,
    as_seconds,
    as_size,
    as_text,
    complain,
    is_terminal,
    show_facts,
    show_json,
    show_table,
    survive_other_encodings,
)
from converter.errors import CacheCorruptError, CacheNotOwnedError, ConverterError
from converter.make import make_spark_converter, sweep
from converter.reading.ahead import default_workers_count
from converter.schema import Field

app = typer.Typer(
    name="converter",
    help="Look into caches and data sets, check them, and clean up.",
    epilog=(
        "Exit status: 0 if all is well, 1 after an error, 2 for wrong arguments, 3 if `verify` found damage. "
        "Credentials come from the environment, as everywhere; or as JSON in CONVERTER_STORAGE_OPTIONS."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SHOWN_ERRORS = (ConverterError, OSError, ValueError, TypeError)
"""What a user can cause: one line tells it."""

Url = Annotated[str, typer.Argument(help="A cache entry, a folder or files of Parquet, or a Delta table.")]
CacheDir = Annotated[
    str | None,
    typer.Argument(help=f"The directory of the cache. Default: {ENVIRONMENT_VARIABLE}, or the user's cache folder."),
]
Version = Annotated[int | None, typer.Option(help="The version of a Delta table; the latest by default.")]
CacheKey = Annotated[str | None, typer.Option(help="URL is a cache directory; open its entry of this name.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document, for scripts.")]


def run() -> None:
    """Run a command. An error that a user can cause is one line on stderr; exit status 1."""
    survive_other_encodings()
    try:
        app()
    except SHOWN_ERRORS as error:
        if isinstance(error, BrokenPipeError):
            # `| head`: nobody reads on. Python's own flush at exit would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        complain(error)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version of this package.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def ls(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """List the entries of a cache: how large, how old, and which processes hold them."""
    where = _cache_dir(cache_dir)
    root = find_root(where, storage_options(), TIMEOUT_SECONDS)
    found = [] if root is None else survey(root)
    if as_json:
        show_json([_as_json(one) for one in found])
        return
    if not found:
        complain(f"there is no entry in {where}")
        return
    rows = []
    if is_terminal():
        # Whole URLs leave no room for the other columns.
        print(f"entries of {as_text(found[0].url.rpartition('/')[0])}")
    for one in found:
        manifest = one.manifest
        rows.append(
            (
                one.url.rpartition("/")[2] if is_terminal() else one.url,
                "" if manifest is None else f"{manifest.num_rows:,}",
                as_size(one.num_bytes),
                as_age(one.idle_seconds),
                _life_of(one),
                "; ".join(map(_describe, one.holders)) or "nobody",
                "" if manifest is None or manifest.origin is None else manifest.origin.cache_key or "",
            )
        )
    show_table(("entry", "rows", "size", "idle", "life", "held by", "cache_key"), rows, right=(1, 2, 3))


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


@app.command()
def show(url: Url, version: Version = None, cache_key: CacheKey = None, as_json: AsJson = False) -> None:
    """Show what a data set is: where, how large, how it lies in files, how it was written, its columns."""
    with open_rows(url, version=version, cache_key=cache_key) as rows:
        told = {"kind": kind_of(url, version, cache_key), **rows.describe()}
    if as_json:
        show_json(told)
        return
    columns, layout, options = told.pop("columns"), told.pop("layout") or {}, told.pop("write_options")
    told["bytes"] = as_size(told["bytes"])
    shown = {name: f"{value:,}" if type(value) is int and name != "version" else value for name, value in told.items()}
    shown |= {name: _layout_in_words(name, value) for name, value in layout.items()}
    shown["write_options"] = None if options is None else _options_in_words(options)
    show_facts([(name.replace("_", " "), value) for name, value in shown.items() if value not in (None, "")])
    print()
    names = ("name", "dtype", "shape", "nulls", "min", "max", "mean", "categories")
    table = [["" if column.get(name) is None else _short(column[name]) for name in names] for column in columns]
    show_table(names, table, right=(4, 5, 6, 7))


@app.command()
def head(
    url: Url,
    n: Annotated[int, typer.Option("-n", min=1, help="How many rows.")] = 5,
    columns: Annotated[str | None, typer.Option(help="Names, with commas between them.")] = None,
    filters: Annotated[
        list[str] | None, typer.Option("--filter", help="Only rows for which it holds: 'age > 20'. May come again.")
    ] = None,
    version: Version = None,
    cache_key: CacheKey = None,
    as_json: AsJson = False,
) -> None:
    """Show the first rows."""
    with open_rows(url, version=version, cache_key=cache_key) as rows:
        chosen = rows.where(list(map(parse_filter, filters))) if filters else rows
        wanted = None if columns is None else [name.strip() for name in columns.split(",")]
        options: dict[str, Any] = {"nulls": "mask", "ragged": "nested", "cur_shard": 0, "shard_count": 1}
        with chosen.make_batch_reader(batch_size=min(n, len(chosen)), columns=wanted, **options) as reader:
            batch = next(iter(reader))
    names = [name for name in batch if not (name.endswith("__valid") and name.removesuffix("__valid") in batch)]
    fields = {name: chosen.schema.get(name) for name in names}
    table = [[_value(batch, name, row, fields[name]) for name in names] for row in range(len(batch[names[0]]))]
    if as_json:
        show_json([dict(zip(names, row, strict=True)) for row in table])
        return
    show_table(names, [["null" if value is None else value for value in row] for row in table])


@app.command()
def verify(
    url: Url,
    thorough: Annotated[
        bool,
        typer.Option("--rows", help="Read every row too: decode all pages, compare checksums where there are any."),
    ] = False,
    version: Version = None,
    cache_key: CacheKey = None,
    as_json: AsJson = False,
) -> None:
    """Check the files of a data set: sizes and footers, or all their rows. Exit status 3 if one is damaged or gone."""
    begin = time.monotonic()
    told: dict[str, Any] = {"url": url, "rows": 0, "files": 0, "checked_rows": False}
    try:
        with open_rows(url, version=version, cache_key=cache_key) as rows:
            damage, described = rows.verify(every_row=thorough), rows.describe()
            told = {name: described[name] for name in ("url", "rows", "files")} | {"checked_rows": thorough}
    except CacheCorruptError as error:
        # Files are missing or too short: then nothing is opened.
        damage = [str(error)]
    told["damage"] = damage
    if as_json:
        show_json(told)
    else:
        for problem in damage:
            complain(problem)
        checked = "every row" if thorough else "sizes and footers; --rows reads the rows"
        state = f"{len(damage)} problem{'s' * (len(damage) > 1)}" if damage else "no damage"
        files = f"{told['files']:,} file{'s' * (told['files'] != 1)}, {told['rows']:,} rows"
        shown = files if told["files"] else as_text(url)
        print(f"{shown}: {state} ({checked}, {time.monotonic() - begin:.1f} s)")
    if damage:
        raise typer.Exit(3)


@app.command()
def plan(
    url: Url,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch of one rank.")] = 1024,
    ranks: Annotated[int, typer.Option(min=1, help="How many processes train together.")] = 1,
    shuffle: Annotated[bool, typer.Option(help="In random order, or in the order of the files.")] = True,
    seconds: Annotated[float, typer.Option(min=0.01, max=3600, help="How long the speed is measured.")] = 1.0,
    version: Version = None,
    cache_key: CacheKey = None,
    as_json: AsJson = False,
) -> None:
    """Tell what a training would read: steps, dropped rows, memory, bytes of a rank."""
    with open_rows(url, version=version, cache_key=cache_key) as rows:
        told = rows.plan(
            batch_size=batch_size, shuffle=shuffle, cur_shard=0, shard_count=ranks, nulls="mask", ragged="nested"
        )
        speed = measure(rows, batch_size=batch_size, workers_count=None, shuffle=shuffle, seconds=seconds)
    epoch_seconds = speed.seconds_for(told.num_rows or 0)
    if as_json:
        measured = {"rows_per_second": speed.rows_per_second, "start_seconds": speed.start_seconds}
        show_json({**dataclasses.asdict(told), **measured, "seconds": epoch_seconds})
        return
    takes, start = as_seconds(epoch_seconds), as_seconds(speed.start_seconds)
    rate = f"{speed.rows_per_second:,.0f} rows/s"
    print(told)
    print(f"An epoch of this rank takes {takes} to read: {start} until the first batch, then {rate},")
    print(f"measured here for {speed.seconds:.1f} s. Ranks that share this machine or a line share that speed.")


@app.command()
def bench(
    url: Url,
    threads: Annotated[str, typer.Option(help="Numbers of reader threads, with commas.")] = "1,2,4",
    batch_sizes: Annotated[str, typer.Option(help="Rows of a batch, with commas.")] = "64,1024,16384",
    shuffle: Annotated[bool, typer.Option(help="In random order, or in the order of the files.")] = True,
    seconds: Annotated[float, typer.Option(min=0.01, max=3600, help="How long each is measured.")] = 1.0,
    version: Version = None,
    cache_key: CacheKey = None,
    as_json: AsJson = False,
) -> None:
    """Measure how many rows a second this machine reads, for numbers of threads and batch sizes."""
    counts, sizes = (_numbers_of(name, text) for name, text in (("threads", threads), ("batch-sizes", batch_sizes)))
    with open_rows(url, version=version, cache_key=cache_key) as rows:
        found = measure_all(rows, threads=counts, batch_sizes=sizes, shuffle=shuffle, seconds=seconds)
    best = {size: max((one for one in found if one.batch_size == size), key=lambda one: one.rows) for size in sizes}
    if as_json:
        show_json([{**dataclasses.asdict(one), "rows_per_second": one.rows_per_second} for one in found])
        return
    table = [
        (
            one.workers_count,
            f"{one.batch_size:,}",
            f"{one.rows_per_second:,.0f}",
            "best" if one in best.values() else "",
        )
        for one in found
    ]
    show_table(("threads", "batch size", "rows/s", ""), table, right=(0, 1, 2))
    print(f"By default a reader has {_told_default(found, best)}; workers_count= changes that.", file=sys.stderr)


def _told_default(found: Sequence[Measured], best: Mapping[int, Measured]) -> str:
    """How many threads a reader has by default, and how near that comes to the best that was measured."""
    count = default_workers_count()
    own = [one for one in found if one.workers_count == count]
    if not own:
        return f"{count} threads here, which were not measured"
    part = min(one.rows_per_second / best[one.batch_size].rows_per_second for one in own)
    # Two runs differ by some percent.
    fits = "which is right here" if part > 0.9 else "which is not the best here"
    return f"{count} threads here, {fits}: at least {part:.0%} of the best at each batch size"


@app.command()
def doctor(
    cache_dir: CacheDir = None,
    spark: Annotated[bool, typer.Option("--spark", help="Start a local Spark, whose executors write a row.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at what is installed, which credentials there are, and whether the cache can be written."""
    findings = list(examine(_cache_dir(cache_dir), asks_spark=spark))
    if as_json:
        show_json([dataclasses.asdict(finding) for finding in findings])
    else:
        show_table(
            ("", "what", "found", "remedy"),
            [
                ({"good": "ok", "absent": "-", "wrong": "!!"}[one.state], one.what, one.told, one.remedy)
                for one in findings
            ],
        )
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(1)


@app.command("sweep")
def sweep_unheld(
    cache_dir: CacheDir = None,
    older_than: Annotated[str, typer.Option(help="Only what was unused for so long: 90, 30min, 12h, 7d.")] = "0",
    kept: Annotated[bool, typer.Option("--kept", help="Entries that were written to be kept, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and remove nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the entries and unfinished writes that no live process holds."""
    where, seconds = _cache_dir(cache_dir), _seconds_of(older_than)
    options: dict[str, Any] = {"older_than": seconds, "kept": kept}
    options |= {"storage_options": storage_options(), "timeout_seconds": TIMEOUT_SECONDS}
    report = sweep(where, dry_run=True, **options)
    if not dry_run and report.num_entries + report.num_attempts + report.num_files:
        if not yes:
            typer.confirm(
                f"Remove {report.num_entries} entries and {report.num_attempts} unfinished writes from {where}?",
                abort=True, err=True,
            )  # fmt: skip
        report = sweep(where, **options)
    if as_json:
        show_json({**dataclasses.asdict(report), "dry_run": dry_run})
        return
    done = "would remove" if dry_run else "removed"
    print(
        f"{done} {report.num_entries} entries and {report.num_attempts} unfinished writes, {report.num_files} files of "
        f"{as_size(report.num_bytes)}"
    )
    if report.num_kept:
        print(f"{report.num_kept} kept entries stay; --kept removes them too")
    root = find_root(where, storage_options(), TIMEOUT_SECONDS)
    unreadable = 0 if root is None else sum(bool(one.problem) for one in survey(root))
    if unreadable and not dry_run:
        print(f"{unreadable} entries cannot be read and stay; `converter ls` says why")


@app.command()
def delete(
    url: Url,
    cache_key: CacheKey = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete one entry of a cache. Files that are not the cache's own are never deleted."""
    if kind_of(url, None, cache_key) != "cache":
        raise CacheNotOwnedError(
            f"{as_text(url)} is not a cache entry, and only those can be deleted. `converter ls` shows them: name one "
            "by its URL, or by its cache directory and --cache-key.",
            path=url,
        )
    rows = open_rows(url, cache_key=cache_key)
    with rows:
        if not yes:
            typer.confirm(f"Delete {rows.url} with {len(rows):,} rows?", abort=True, err=True)
        rows.delete()
    print(f"deleted {rows.url}")
    root = find_root(rows.url.rsplit("/", 2)[0], storage_options(), TIMEOUT_SECONDS)
    left = [one for one in survey(root) if one.url == rows.url] if root is not None else []
    reading = [_describe(holder) for one in left for holder in one.holders if not holder.is_dead]
    if reading:
        complain(f"its files are still read, and are removed when that ends: {'; '.join(reading)}")


# What is shown -------------------------------------------------------------------------------


def _cache_dir(given: str | None) -> str:
    if given is not None and not given.strip():
        raise ValueError("CACHE_DIR is empty, as of a variable that is not set. Leave it out for the default cache.")
    chosen = given or os.environ.get(ENVIRONMENT_VARIABLE) or platformdirs.user_cache_dir("spark-tensor-converter")
    # What `ls` shows as the folder of the entries.
    if chosen.rstrip("/") == DIRECTORY:
        return "."
    return chosen.rstrip("/").removesuffix(f"/{DIRECTORY}") or "/"


def _seconds_of(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|)", text.strip())
    if found is None:
        raise ValueError(f"--older-than must be a time such as 90, 30min, 12h or 7d, got {text!r:.80}.")
    return float(found[1]) * {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}[found[2]]


def _numbers_of(name: str, text: str) -> list[int]:
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(f"--{name} must be whole numbers above 0 with commas between them, got {text!r:.80}.")
    return numbers


def _layout_in_words(name: str, value: Any) -> str:
    """A part of the layout on one line; empty if it is not known."""
    if not isinstance(value, dict):
        return ", ".join(value or ())
    size, kind = (as_size, ", uncompressed") if name.endswith("bytes") else ("{:,}".format, "")
    if value["least"] == value["most"]:
        return f"{size(value['most'])} each{kind}"
    return f"{size(value['median'])} (median), from {size(value['least'])} to {size(value['most'])}{kind}"


def _options_in_words(options: Mapping[str, Any]) -> str:
    """The arguments of a write that are not the defaults: a line has no room for all of them."""
    parameters = inspect.signature(make_spark_converter).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    # An empty dict or list stands for None.
    own = {name: value for name, value in options.items() if value not in ({}, []) and value != defaults.get(name)}
    return ", ".join(f"{name}={value}" for name, value in own.items()) or "the defaults"


def _life_of(one: Any) -> str:
    if one.problem:
        return f"cannot be read: {one.problem}"
    if one.manifest is None:
        return "written or deleted now" if any(not holder.is_dead for holder in one.holders) else "unfinished"
    return "kept" if one.manifest.is_kept else "until its converter ends"


def _describe(holder: Holder) -> str:
    does = "writes" if holder.is_writing else "reads"
    state = "gone" if holder.is_dead else f"{does} for {as_age(time.time() - holder.since)}"
    return f"{holder.host}:{holder.pid} ({state}, last sign {as_age(holder.silent_seconds)} ago)"


def _as_json(one: Any) -> dict[str, Any]:
    manifest = one.manifest
    return {
        "url": one.url,
        "rows": None if manifest is None else manifest.num_rows,
        "bytes": one.num_bytes,
        "idle_seconds": one.idle_seconds,
        "is_committed": manifest is not None,
        "is_kept": manifest is not None and manifest.is_kept,
        "origin": None if manifest is None or manifest.origin is None else manifest.origin.to_json(),
        "problem": one.problem or None,
        "holders": [dataclasses.asdict(holder) for holder in one.holders],
    }


def _value(batch: dict[str, Any], name: str, row: int, field: Field | None) -> Any:
    """A row's value as JSON can hold it, a category as its value; None for a null."""
    is_valid = batch.get(f"{name}__valid")
    if is_valid is not None and not np.all(is_valid[row]):
        return None
    value = batch[name][row]
    if field is not None and field.categories is not None and np.ndim(value) == 0:
        # A value that is none of them has the code -1.
        return field.categories[value] if value >= 0 else None
    if isinstance(value, np.floating):
        # As short as it is exact: a float32 has seven digits, not seventeen.
        return float(str(value))
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
