"""Parquet files as they stand become a manifest: their footers are read, their rows are not, and nothing is written.

Files may disagree: a column may be missing in some, stand in another place, or be a narrower number. What a folder's
name says (`day=2026-11-21`) is a column like any other, with one value in each file.

What a footer cannot say is found out while reading, and checked there: that all
lists of a column have one length is concluded from how many numbers a row group
has, and a row of another length is an error that names the file.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import fnmatch
import functools
import hashlib
import itertools
import json
import logging
import math
import posixpath
import re
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from converter.errors import SourceError
from converter.footers import END_BYTES, ParsedFooter, parse_end
from converter.manifest import Level, Manifest, SourceColumn, count_leaves
from converter.portable import tasks
from converter.schema import DeclaredShape, Field, Schema, dtype_of, raise_unsupported, split_declared
from converter.statistics import ColumnStatistics
from converter.storage.directory import Storage, StorageOptions, open_storage
from converter.storage.ranges import at_once
from converter.storage.store import shown_url

logger = logging.getLogger(__name__)

DEFAULT_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""How Hive, and Spark, call the folder of rows whose partition column is null."""

_DELTA_LOG = "_delta_log"
_FOOTER_THREADS = 8

_MAX_DIGITS = 38
_ENDINGS = (".parquet", ".parq", ".pq")
_GLOB, _BRACES = re.compile(r"[*?\[{]"), re.compile(r"\{([^{}]*)\}")
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"NaN|[+-]?(Infinity|([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?)")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_SPARK_SCHEMA, _SPARK_TYPE = b"org.apache.spark.sql.parquet.row.metadata", b"converter.spark_type"
_UNEVEN = (0, 0)
_REMEDY = "Make the converter again."

_WIDER = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(), pa.string_view(): pa.string(), pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}  # fmt: skip
"""Types of Arrow that Spark does not have, as what Spark reads them."""

_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """What a file says of itself."""

    name: str
    num_bytes: int
    schema: pa.Schema
    row_group_rows: npt.NDArray[np.int64]
    row_group_bytes: npt.NDArray[np.int64]
    leaf_nulls: npt.NDArray[np.int64]
    """For each column of values how many of them are null; -1 where that is not said."""

    leaf_bytes: npt.NDArray[np.int64]
    list_lengths: dict[int, set[tuple[int, int]]]
    """For each column of values of lists how many of them a row has, and how many are left over, by row group."""

    footer_crc32: int
    stamp: int | None
    """`Storage.look`."""

    digest: str

    @property
    def num_rows(self) -> int:
        """The rows of all row groups."""
        return int(self.row_group_rows.sum())


@dataclass(slots=True, kw_only=True)
class Column:
    """A column as several files hold it."""

    name: str
    source: SourceColumn
    null_count: int | None = None
    """None where that is not known."""

    lengths: set[tuple[int, int]] = field(default_factory=set)
    """As in `Footer.list_lengths`, of all files that were looked at."""

    has_null_elements: bool = False
    """Whether lists may have null elements, by the files that were looked at."""

    list_size: int | None = None
    """The length that the type itself says, in every file alike."""

    said: Mapping[str, str] = field(default_factory=dict)
    """What this package noted beside a column that it packed."""

    num_bytes: int | None = None

    type_name: str = ""
    """What the table calls its type, where Arrow has none."""

    is_twice: bool = False
    """Whether a file has several columns of this name."""

    disagreement: SourceError | None = None
    """What to say of files that hold it as types of which none is wide enough for all."""


def read_footers(
    urls: Sequence[str],
    *,
    columns: Sequence[str] | None,
    float_dtype: str | None,
    shapes: Mapping[str, DeclaredShape],
    storage_options: StorageOptions | None,
    timeout_seconds: float,
) -> tuple[Storage, Manifest]:
    """The folder that holds all of the files, and what they are.

    Raises:
        SourceError: there are no files or no rows, files contradict each other, or it is a Delta table.
        UnsupportedTypeError: columns have no tensor form; all of them are named.
        ValueError: `columns` or `shapes` name a column that does not exist.
    """
    storage, found = _find_files(urls, storage_options, timeout_seconds)
    files = [file for file in look_at(storage, list(found)) if file.num_rows]
    if not files:
        raise SourceError(f"{storage.url} has no rows, so there is nothing to train on.", path=storage.url)
    known = _merge(storage.url, files) | _partition_columns(
        storage.url, {file.name: found[file.name] for file in files}
    )
    wanted = choose_columns(known, columns=columns, shapes=shapes)
    fields = plan_fields(wanted, float_dtype=float_dtype, shapes=shapes)
    content = json.dumps(
        [
            [one.to_json() for one in fields],
            [[file.name, file.digest] for file in files],
            {column.name: column.source.values.to_pylist() for column in wanted if column.source.values is not None},
        ],
        default=str,
    )
    rows = np.concatenate([file.row_group_rows for file in files])
    return storage, Manifest(
        schema=Schema(tuple(fields)),
        file_names=tuple(file.name for file in files),
        file_bytes=np.array([file.num_bytes for file in files], np.int64),
        file_footers=np.array([file.footer_crc32 for file in files], np.int64),
        file_stamps=_stamps_of(files),
        row_group_file=np.repeat(np.arange(len(files)), [len(file.row_group_rows) for file in files]).astype(np.int64),
        row_group_rows=rows,
        row_group_bytes=np.concatenate([file.row_group_bytes for file in files]),
        fingerprint=hashlib.sha256(content.encode()).hexdigest()[:32],
        num_rows=int(rows.sum()),
        float_dtype=float_dtype or "float64",
        statistics=statistics_of(wanted, fields),
        source_columns={column.name: column.source for column in wanted},
        remedy=_REMEDY,
    )


def _stamps_of(files: Sequence[Footer]) -> npt.NDArray[np.int64] | None:
    if all(file.stamp is None for file in files):
        return None
    return np.array([file.stamp or 0 for file in files], np.int64)


def _find_files(
    urls: Sequence[str], storage_options: StorageOptions | None, timeout_seconds: float
) -> tuple[Storage, dict[str, dict[str, str | None]]]:
    """The folder above all files, and their names below it, in the order of the names, each with its partition."""
    places: list[_Place] = []
    looked_at: set[str] = set()
    for url in urls:
        found_there = _files_of(url, storage_options, timeout_seconds, looked_at)
        # Of a choice `{a,b}` one may be missing.
        if not any(place.names for place in found_there):
            folder, is_glob = found_there[0].folder, _GLOB.search(url)
            if not is_glob and not folder.exists:
                raise SourceError(f"{folder.url} does not exist.", path=folder.url)
            nothing = f"{shown_url(url)} matches" if is_glob else f"{folder.url} holds"
            raise SourceError(f"{nothing} no Parquet files (names that end with .parquet).", path=folder.url)
        places += [place for place in found_there if place.names]
    first = places[0].folder
    for folder, _, _ in places:
        if not folder.is_beside(first):
            raise SourceError(
                f"{first.url} and {folder.url} are on two stores. Make a converter of each, or put the files on one.",
                path=folder.url,
            )
    common = posixpath.commonpath([place.folder.path() for place in places])
    found: dict[str, dict[str, str | None]] = {}
    chosen = {key for place in places for key in _partition_of(f"{place.above}/x")}
    for folder, names, above in places:
        # A web server's own folder has no name.
        below = posixpath.relpath(posixpath.join("/", folder.path()), posixpath.join("/", common))
        for name in names:
            full, partition = posixpath.normpath(posixpath.join(below, name)), _partition_of(f"{above}/{name}")
            # Of a file that is named twice the name that says more.
            if len(partition) >= len(found.get(full, {})):
                found[full] = partition
    for key in chosen:
        # Of some files alone, what a choice says is no column of the dataset.
        if any(key not in partition for partition in found.values()):
            found = {name: {k: v for k, v in one.items() if k != key} for name, one in found.items()}
    return first.at(common), found


class _Place(NamedTuple):
    """Where files are."""

    folder: Storage
    names: list[str]
    above: str
    """The last folders of its path, where they were chosen by `{…}`: they may say partitions."""


def _files_of(
    url: str,
    storage_options: StorageOptions | None,
    timeout_seconds: float,
    looked_at: set[str],
    chosen_in: str | None = None,
) -> list[_Place]:
    """The folders that a URL names, and the names of files below each: several of them for a choice `{a,b}`.

    Of such a choice `chosen_in` is the path of the folder before the first name with a wildcard; `looked_at` are the
    folders that are known to be part of no Delta table.
    """
    is_glob, pattern = _GLOB.search(url) is not None and not url.startswith(("http://", "https://")), ""
    # Whoever named a folder `run[1]` means that one; with a question mark in it not every store would look there.
    if not is_glob or "://" not in url or "?" not in url:
        place = open_storage(url, storage_options, timeout_seconds)
        is_glob = is_glob and not place.is_at_a_file and not place.list()
    if is_glob:
        if braces := _BRACES.search(url):
            before, behind = url[: braces.start()], url[braces.end() :]
            if chosen_in is None:
                # The choice may be of hosts or containers.
                with contextlib.suppress(ValueError):
                    chosen_in = open_storage(_split_glob(url)[0], storage_options, timeout_seconds).path()
            found = [
                _files_of(f"{before}{one}{behind}", storage_options, timeout_seconds, looked_at, chosen_in or "")
                for one in braces[1].split(",")
            ]
            return list(itertools.chain.from_iterable(found))
        fixed, pattern = _split_glob(url)
        place = open_storage(fixed, storage_options, timeout_seconds)
    _refuse_delta(place, looked_at)
    is_below = chosen_in and place.path().startswith(posixpath.join(chosen_in, ""))
    above = posixpath.relpath(place.path(), chosen_in) if is_below else ""
    if place.is_at_a_file:
        folder = place.at(posixpath.dirname(place.path()))
        return [_Place(folder, [posixpath.basename(place.path())], posixpath.dirname(above))]
    if not place.has_folders:
        raise SourceError(
            f"{place.url} is not there, or is a page. A web server has no folders that could be listed: name each "
            "file, in a list.",
            path=place.url,
        )
    walk = _Walk(root=place.real_path(), left_out=set(), looked_at=looked_at)
    names = sorted(set(_walk(place, pattern, walk)))
    if walk.left_out:
        some = sorted(walk.left_out)
        logger.warning(
            "Left out in %s, as the names do not end with .parquet: %s. If they hold rows, name all files in a list.",
            place.url, ", ".join(some[:3]) + (f" and {len(some) - 3:,} more" if len(some) > 3 else ""),
        )  # fmt: skip
    # Whoever named a folder `a?b` means that one as well.
    own = [name for name in names if pattern and (name == pattern or name.startswith(f"{pattern}/"))]
    return [_Place(place, own or names, above)]


def _split_glob(url: str) -> tuple[str, str]:
    """The part of a URL before the first name with a wildcard, and the rest."""
    parts = url.split("/")
    first = next(index for index, part in enumerate(parts) if _GLOB.search(part))
    return "/".join(parts[:first]) or ("/" if url.startswith("/") else "."), "/".join(parts[first:])


class _Walk(NamedTuple):
    """One walk through folders."""

    root: str
    left_out: set[str]
    """The files, by their paths below the first folder, whose names do not end as Parquet's do."""

    looked_at: set[str]
    """As of `_files_of`."""

    def leads_back(self, target: str) -> bool:
        """Whether a link's target is reached without the link."""
        if not target.startswith(posixpath.join(self.root, "")):
            return False
        return not any(part.startswith(("_", ".")) for part in posixpath.relpath(target, self.root).split("/"))


def _walk(
    folder: Storage, pattern: str, walk: _Walk, path: str = "", behind: frozenset[str] = frozenset()
) -> Iterator[str]:
    """The Parquet files below a folder; what begins with `_` or `.` is no data, as Spark sees it.

    A folder that a pattern ends at is taken whole; `**` is any number of folders, none included. Links are followed,
    but not around in a circle, nor to what is taken in any case; `behind` is where those stand that were followed.
    """
    first, _, rest = pattern.partition("/")
    is_any = first == "**"
    if is_any:
        yield from _walk(folder, rest, walk, path, behind)
    for info in folder.list():
        is_folder, below = folder.leads_to_folder(info), posixpath.join(path, info.name)
        if info.name == _DELTA_LOG and is_folder:
            raise _is_delta(folder)
        # A partition column may well begin so.
        is_hidden = info.name.startswith(("_", ".")) and not (is_folder and "=" in info.name)
        if is_hidden or (first and not fnmatch.fnmatchcase(info.name, first)):
            continue
        if is_folder:
            inner, followed = folder.below(info.name), behind
            if info.is_link:
                target, followed = inner.real_path(), behind | {folder.real_path()}
                is_circle = any(posixpath.join(one, "").startswith(posixpath.join(target, "")) for one in followed)
                if is_circle or ((not first or is_any) and walk.leads_back(target)):
                    continue
                _refuse_delta(inner, walk.looked_at)
            yield from _walk(inner, pattern if is_any else rest, walk, below, followed)
        elif not rest and not is_any:
            if info.name.lower().endswith(_ENDINGS):
                yield below
            elif info.num_bytes:
                walk.left_out.add(below)


def _refuse_delta(place: Storage, looked_at: set[str]) -> None:
    """Refuse a Delta table's folder, or one within it: the files alone would bring deleted rows back.

    What was looked at before, with all above it, is not looked at again.
    """
    # A link may lead into a table.
    for start in dict.fromkeys((place.path(), place.real_path())):
        path = start
        while place.has_folders:
            folder = place.at(path)
            if folder.url in looked_at:
                break
            looked_at.add(folder.url)
            # A file may be read where its folder, or one above, may not be listed.
            with contextlib.suppress(PermissionError):
                if any(info.name == _DELTA_LOG and folder.leads_to_folder(info) for info in folder.list()):
                    raise _is_delta(folder)
            if posixpath.dirname(path) in (path, ""):
                break
            path = posixpath.dirname(path)


def _is_delta(folder: Storage) -> SourceError:
    return SourceError(
        f"{folder.url} is a Delta table: its files also hold rows that were deleted or replaced, which would come "
        "back. Say make_delta_converter(…) of it.",
        path=folder.url,
    )


def _partition_of(name: str) -> dict[str, str | None]:
    """What the folders of a file's name say: `day=2026-11-21/…`, percent-encoded."""
    found: dict[str, str | None] = {}
    for part in name.split("/")[:-1]:
        key, sign, value = part.partition("=")
        if sign and key:
            found[unquote(key)] = None if value == DEFAULT_PARTITION else unquote(value)
    return found


def _partition_columns(url: str, partitions: Mapping[str, Mapping[str, str | None]]) -> dict[str, Column]:
    """The columns that the names of folders say, typed as Spark types them: numbers, dates, else strings."""
    first_name, first = next(iter(partitions.items()))
    for name, partition in partitions.items():
        if list(partition) != list(first):
            raise SourceError(
                f"{url}/{name} is partitioned by {', '.join(partition) or 'nothing'}, and {url}/{first_name} by "
                f"{', '.join(first) or 'nothing'}. Name folders whose files agree.",
                path=f"{url}/{name}",
            )
    found = {}
    for key in first:
        texts = [partition[key] for partition in partitions.values()]
        values = _typed(texts)
        source = SourceColumn(arrow_type=values.type, values=values.dictionary_encode())
        found[key] = Column(name=key, source=source, null_count=1 if None in texts else 0, num_bytes=0)
    return found


def _typed(texts: Sequence[str | None]) -> pa.Array:
    present = {text for text in texts if text is not None}
    if present and all(_WHOLE.fullmatch(text) for text in present):
        numbers = [None if text is None else int(text) for text in texts]
        # What lies below zero reaches further by one.
        bits = max((number if number >= 0 else ~number).bit_length() for number in numbers if number is not None)
        if bits < 64:
            return pa.array(numbers, pa.int32() if bits < 32 else pa.int64())
        if (digits := max(len(str(abs(number))) for number in numbers if number is not None)) <= _MAX_DIGITS:
            exact = [None if number is None else decimal.Decimal(number) for number in numbers]
            return pa.array(exact, pa.decimal128(digits, 0))
    if present and all(_NUMBER.fullmatch(text) for text in present):
        return pa.array([None if text is None else float(text) for text in texts], pa.float64())
    if present and all(_DAY.fullmatch(text) for text in present):
        with contextlib.suppress(ValueError):
            return pa.array([None if text is None else dt.date.fromisoformat(text) for text in texts], pa.date32())
    return pa.array(texts, pa.string())


def look_at(storage: Storage, names: Sequence[str]) -> list[Footer]:
    """The footers of files, in order, read at once."""
    last: list[_Kind] = []
    given_up = threading.Event()
    return at_once(
        functools.partial(_read_footer, storage, last, given_up),
        names,
        threads_count=_FOOTER_THREADS,
        given_up=given_up,
    )


class _Kind(NamedTuple):
    """What files have in common, as most do: told once, and kept once."""

    stored: pq.ParquetSchema
    noted: Mapping[bytes, bytes]
    schema: pa.Schema
    levels: list[tuple[bool, bool]]
    """For each column of values whether it may be null, and whether it is of lists."""


def _kind_of(parquet: pq.ParquetFile, last: list[_Kind]) -> _Kind:
    metadata = parquet.metadata
    stored, noted = metadata.schema, metadata.metadata or {}
    for known in last[-1:]:
        if known.stored.equals(stored) and known.noted == noted:
            return known
    # Without what pandas or Spark noted beside the columns, but with the types that only Spark has.
    types = _spark_types(noted)
    columns = [stored.column(leaf) for leaf in range(metadata.num_columns)]
    schema = pa.schema(
        [
            one.with_nullable(True)
            if one.name not in types
            else pa.field(one.name, one.type, metadata=(one.metadata or {}) | {_SPARK_TYPE: types[one.name].encode()})
            for one in _with_text(parquet.schema_arrow, columns)
        ]
    )
    levels = [(column.max_definition_level > 0, column.max_repetition_level > 0) for column in columns]
    last[:] = [_Kind(stored, noted, schema, levels)]
    return last[0]


def _with_text(schema: pa.Schema, columns: Sequence[pq.ColumnSchema]) -> Iterator[pa.Field]:
    """The columns of a file, those of ENUM as the text that they are; to Arrow they are bytes."""
    leaves = iter(columns)

    def with_text(one: pa.Field) -> pa.Field:
        if pa.types.is_struct(one.type):
            return one.with_type(pa.struct([with_text(one.type.field(index)) for index in range(one.type.num_fields)]))
        first, *_ = [next(leaves, None) for _ in range(count_leaves(one.type))]
        is_enum = first is not None and first.logical_type.type == "ENUM" and _is_bytes(one.type)
        return one.with_type(pa.string()) if is_enum else one

    yield from map(with_text, schema)


def _read_footer(storage: Storage, last: list[_Kind], given_up: threading.Event, name: str) -> Footer:
    path = f"{storage.url}/{name}"
    try:
        # Before: what is written meanwhile has another one.
        num_bytes, stamp = storage.look(name, given_up)
        with storage.open_parquet(name, num_bytes, given_up) as opened:
            num_bytes = opened.size()
            end = tasks.end_of(opened)
            footer = parse_end(end)
            refuse_encrypted(path, footer)
            parquet = pq.ParquetFile(opened, coerce_int96_timestamp_unit="us")
            # It names every page's place, size and range: other rows give another one.
            digest = hashlib.sha256(end[:-END_BYTES]).hexdigest()
            kind = _kind_of(parquet, last)
            noted = {
                "name": name, "num_bytes": num_bytes, "footer_crc32": zlib.crc32(end), "stamp": stamp, "digest": digest
            }  # fmt: skip
            return _footer_of(footer, kind, **noted)
    except FileNotFoundError as error:
        raise SourceError(f"{path} is not there.", path=path) from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {str(error).rstrip()}.", path=path) from error
    except (pa.ArrowException, ValueError) as error:
        said = str(error).rstrip(". \n")
        raise SourceError(f"{path} is no Parquet file that can be read: {said}.", path=path) from error


def refuse_encrypted(path: str, footer: ParsedFooter) -> None:
    """Raise SourceError if columns are encrypted behind a footer that is not."""
    if footer.is_encrypted:
        raise SourceError(
            f"{path} has encrypted columns, which cannot be read. Read it with Spark, which has the keys, and convert "
            "the DataFrame.",
            path=path,
        )


def _footer_of(footer: ParsedFooter, kind: _Kind, **said: Any) -> Footer:
    num_leaves = len(footer.leaf_types)
    if num_leaves != len(kind.levels):
        raise ValueError(f"its footer describes {num_leaves} columns, and its schema has {len(kind.levels)}")
    nulls = np.zeros(num_leaves, np.int64)
    sizes = np.zeros(num_leaves, np.int64)
    lengths: dict[int, set[tuple[int, int]]] = {}
    for leaf, (is_nullable, is_list) in enumerate(kind.levels):
        counts = footer.counts(leaf)
        sizes[leaf] = sum([raw_bytes for _, raw_bytes, _ in counts])
        if not is_nullable:
            continue
        total, is_known = 0, True
        for num_rows, (num_values, _, absent) in zip(footer.row_group_rows, counts, strict=True):
            is_known = is_known and absent is not None
            total += absent or 0
            if is_list and num_rows:
                # A list that is null or empty counts as a number, and so may row groups of nothing else.
                length = divmod(num_values, num_rows)
                if absent or (absent is None and length == (1, 0)):
                    length = _UNEVEN
                if absent != num_rows:
                    lengths.setdefault(leaf, set()).add(length)
        # Of lists it counts those within them as well.
        nulls[leaf] = total if is_known and not (is_list and total) else -1
    return Footer(
        schema=kind.schema,
        row_group_rows=np.array(footer.row_group_rows, np.int64),
        row_group_bytes=np.array(footer.row_group_bytes, np.int64),
        leaf_nulls=nulls,
        leaf_bytes=sizes,
        list_lengths=lengths,
        **said,
    )


def _spark_types(metadata: Mapping[bytes, bytes]) -> dict[str, str]:
    """The columns that Spark wrote of types which Parquet does not have: what is there is not what they mean."""
    try:
        fields = json.loads(metadata[_SPARK_SCHEMA])["fields"]
        types = {str(one["name"]): one["type"] for one in fields}
    except (KeyError, ValueError, TypeError):
        return {}
    found = {name: kind if isinstance(kind, str) else str(kind.get("class", "")) for name, kind in types.items()}
    return {
        name: kind
        for name, kind in found.items()
        if kind.startswith(("variant", "interval", "geometry", "geography", "org.apache.spark.", "time("))
    }


def _merge(url: str, files: Sequence[Footer]) -> dict[str, Column]:
    """The columns of all files: each where the first file with it has it, wide enough for all."""
    kinds = count_kinds(files)
    found: dict[str, Column] = {}
    first_file: dict[str, Footer] = {}
    for those in kinds:
        flat = list(_flatten(those.first.schema))
        counts = Counter(name for name, _, _ in flat)
        for name, path, one in flat:
            spark_type = ((one.metadata or {}).get(_SPARK_TYPE) or b"").decode()
            kind, column = canonical(one.type) if not spark_type else pa.null(), found.get(name)
            said = {key.decode(): value.decode() for key, value in (one.metadata or {}).items()}
            if column is None or _is_untyped(column):
                source, size = SourceColumn(arrow_type=kind, path=path), _list_size(one.type)
                is_twice = counts[name] > 1 or (column is not None and column.is_twice)
                found[name] = Column(
                    name=name, source=source, said=said, list_size=size, is_twice=is_twice, type_name=spark_type
                )
                first_file[name] = those.first
                continue
            column.is_twice = column.is_twice or counts[name] > 1
            if column.is_twice or (pa.types.is_null(kind) and not spark_type):
                continue
            if path != column.source.path:
                one_of, other_of = (".".join(f"[{part}]" for part in each) for each in (path, column.source.path))
                said_there = f"{name!r} is {one_of}, and {other_of} there"
                column.disagreement = column.disagreement or _disagree(
                    url, those.first, first_file[name], name, said_there
                )
                continue
            wider = _wider(column.source.arrow_type, kind)
            here, there = ((spark_type or kind), (column.type_name or column.source.arrow_type))
            if spark_type != column.type_name:
                wider = None
            packed = (said.get(tasks.DTYPE_METADATA), column.said.get(tasks.DTYPE_METADATA))
            if packed[0] != packed[1]:
                wider, (here, there) = None, (f"{here} of {packed[0]}", f"{there} of {packed[1]}")
            if wider is None:
                said_there = f"{name!r} is {here}, and {there} there"
                column.disagreement = column.disagreement or _disagree(
                    url, those.first, first_file[name], name, said_there
                )
                continue
            column.source = SourceColumn(arrow_type=wider, path=path)
            column.list_size = column.list_size if column.list_size == _list_size(one.type) else None
    for those in kinds:
        # A struct in one file, and none in another.
        types = {path: one.type for _, path, one in _flatten(those.first.schema) if not pa.types.is_null(one.type)}
        structs = {path[:depth] for path in types for depth in range(1, len(path))}
        for name, column in list(found.items()):
            path = column.source.path
            if path in structs and _is_untyped(column):
                del found[name]
                continue
            cut = next((path[:depth] for depth in range(1, len(path)) if path[:depth] in types), None)
            if column.disagreement is None and (cut is not None or path in structs):
                here, there = ("struct", column.source.arrow_type) if cut is None else (types[cut], "struct")
                said_there = f"{'.'.join(cut or path)!r} is {here}, and {there} there"
                column.disagreement = _disagree(url, those.first, first_file[name], name, said_there)
    for column in found.values():
        count_in(column, kinds)
    return found


def _is_untyped(column: Column) -> bool:
    """Whether files have no type for it: what pandas gives a column without any value."""
    return pa.types.is_null(column.source.arrow_type) and not column.type_name


def _disagree(url: str, file: Footer, first: Footer, name: str, said: str) -> SourceError:
    return SourceError(
        f"{url}/{file.name} has other columns than {url}/{first.name}: {said}. Give the files that agree, leave it out "
        "with columns=…, or read them with Spark and convert the DataFrame.",
        path=f"{url}/{file.name}",
        column=name,
    )


class Counts(NamedTuple):
    """What the footers of files of one schema say together."""

    first: Footer
    level: Level
    num_rows: int
    leaf_nulls: npt.NDArray[np.int64]
    leaf_bytes: npt.NDArray[np.int64]
    list_lengths: Mapping[int, set[tuple[int, int]]]


def count_kinds(files: Sequence[Footer]) -> list[Counts]:
    """What files say, together for all that have the same schema."""
    kinds: dict[int, list[Footer]] = {}
    for file in files:
        # Most of them hold the very same one: that need not be looked at.
        kinds.setdefault(id(file.schema), []).append(file)
    alike: dict[bytes, list[Footer]] = {}
    for those in kinds.values():
        # With what is noted beside the columns, which schemas do not compare.
        alike.setdefault(those[0].schema.serialize().to_pybytes(), []).extend(those)
    return [_count(those) for those in alike.values()]


def _count(files: Sequence[Footer]) -> Counts:
    nulls = np.stack([file.leaf_nulls for file in files])
    lengths: dict[int, set[tuple[int, int]]] = {}
    for file in files:
        for leaf, found in file.list_lengths.items():
            lengths.setdefault(leaf, set()).update(found)
    return Counts(
        first=files[0],
        level=Level(files[0].schema),
        num_rows=sum(file.num_rows for file in files),
        leaf_nulls=np.where((nulls < 0).any(axis=0), -1, nulls.sum(axis=0)),
        leaf_bytes=np.stack([file.leaf_bytes for file in files]).sum(axis=0),
        list_lengths=lengths,
    )


def count_in(column: Column, counts: Sequence[Counts]) -> None:
    """Add what footers say of a column: nulls, bytes, the lengths of lists."""
    nulls: int | None = 0
    num_bytes = 0
    for found in counts:
        place = column.source.find(found.level)
        if place is None:
            nulls = None if nulls is None else nulls + found.num_rows
            continue
        count = int(found.leaf_nulls[place.leaf])
        nulls = None if nulls is None or count < 0 else nulls + count
        column.has_null_elements |= count != 0 and _may_hold_null(place.field.type)
        num_bytes += int(found.leaf_bytes[place.leaves.start : place.leaves.stop].sum())
        column.lengths |= found.list_lengths.get(place.leaf, set())
    column.null_count, column.num_bytes = nulls, num_bytes


def _may_hold_null(kind: pa.DataType) -> bool:
    """Whether a type's lists may have null elements."""
    return is_list(kind) and (kind.value_field.nullable or _may_hold_null(kind.value_type))


def _flatten(schema: pa.Schema) -> Iterator[tuple[str, tuple[str, ...], pa.Field]]:
    """The columns with the members of structs in the struct's place: name, path, field."""

    def below(one: pa.Field, path: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...], pa.Field]]:
        if pa.types.is_struct(one.type) and _SPARK_TYPE not in (one.metadata or {}):
            for index in range(one.type.num_fields):
                member = one.type.field(index)
                yield from below(member, (*path, member.name))
        else:
            yield ".".join(path), path, one

    for one in schema:
        yield from below(one, (one.name,))


def canonical(kind: pa.DataType) -> pa.DataType:
    """A type as Spark has it, whatever physical form a writer chose."""
    if pa.types.is_dictionary(kind):
        return canonical(kind.value_type)
    if is_list(kind):
        return pa.list_(canonical(kind.value_type))
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz and "UTC")
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json":
        return canonical(kind.storage_type)
    # What somebody registered with Arrow need not have a hash.
    return kind if isinstance(kind, pa.BaseExtensionType) else _WIDER.get(kind, kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether it is a list in any of its forms."""
    types = pa.types
    return bool(
        types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        or types.is_list_view(kind) or types.is_large_list_view(kind)
    )  # fmt: skip


def _list_size(kind: pa.DataType) -> int | None:
    return kind.list_size if pa.types.is_fixed_size_list(kind) else None


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the numbers of both exactly; None where there is none."""
    if one == other or pa.types.is_null(other):  # Of lists none of which holds anything.
        return one
    if pa.types.is_null(one):
        return other
    if is_list(one) and is_list(other):
        inner = _wider(one.value_type, other.value_type)
        return None if inner is None else pa.list_(inner)
    numbers = {one, other}
    if numbers <= set(_INTEGERS):
        return max(numbers, key=_INTEGERS.index)
    if numbers <= {*_INTEGERS[:3], pa.float32(), pa.float64()}:
        small = numbers - {pa.float32(), pa.float64()}
        return pa.float64() if pa.float64() in numbers or pa.int32() in small else pa.float32()
    return None


def choose_columns(
    known: Mapping[str, Column], *, columns: Sequence[str] | None, shapes: Mapping[str, DeclaredShape]
) -> list[Column]:
    """The wanted ones.

    Raises:
        ValueError: one does not exist.
    """
    schema = Schema(tuple(Field(name=name, dtype="bool") for name in known))
    wanted = list(known if columns is None else columns)
    for option, names in (("columns", wanted), ("shapes", shapes)):
        for name in names:
            if name not in known:
                raise ValueError(f"{option}: {schema.explain_missing(name)}")
            if known[name].is_twice:
                raise SourceError(f"There are several columns called {name!r}; rename them with Spark.", column=name)
    for name in wanted:
        if (disagreement := known[name].disagreement) is not None:
            raise disagreement
    return [known[name] for name in dict.fromkeys(wanted)]


def plan_fields(
    columns: Sequence[Column], *, float_dtype: str | None, shapes: Mapping[str, DeclaredShape]
) -> list[Field]:
    """The columns as tensors.

    Raises:
        UnsupportedTypeError: some have no tensor form; all of them are named.
        ValueError: `shapes` names a column that is no array.
    """
    fields, unsupported = [], {}
    for column in columns:
        found = _plan_field(column, float_dtype, shapes)
        if isinstance(found, Field):
            fields.append(found)
        else:
            unsupported[column.name] = found
    raise_unsupported(unsupported)
    return fields


def _plan_field(
    column: Column, float_dtype: str | None, shapes: Mapping[str, DeclaredShape]
) -> Field | tuple[str, str]:
    """The column as a tensor, or its type's name and what to do instead."""
    kind, ndim, said = column.source.arrow_type, 0, column.said
    while is_list(kind):
        kind, ndim = kind.value_type, ndim + 1
    dtype = dtype_of(kind)
    is_bytes = _is_bytes(column.source.arrow_type) and tasks.DTYPE_METADATA not in said
    if is_bytes and column.name in shapes:
        return _plan_bytes(column, shapes[column.name])
    if tasks.DTYPE_METADATA in said:
        # Packed by this package, in a cache whose manifest is elsewhere.
        dtype, ndim = said[tasks.DTYPE_METADATA], int(said[tasks.NDIM_METADATA])
    elif dtype is None or (ndim and (dtype in ("str", "bytes") or dtype.startswith("datetime64"))):
        remedy = (
            "leave it out with columns=…, or read it with Spark and call make_spark_converter, whose error gives the "
            "expressions that keep its values"
        )
        if pa.types.is_fixed_size_binary(kind) and not ndim:
            remedy = (
                f"say with shapes={{{column.name!r}: ({kind.byte_width},)}} that its bytes are numbers, or {remedy}"
            )
        return str(column.type_name or column.source.arrow_type), remedy
    elif float_dtype is not None and (pa.types.is_float64(kind) or pa.types.is_decimal(kind)):
        dtype = float_dtype
    shape: tuple[int, ...] | None = ()
    if ndim:
        shape = _shape_of(column, ndim)
        if column.name in shapes:
            declared_dtype, declared = split_declared(column.name, shapes[column.name])
            if declared_dtype is not None:
                raise ValueError(f"shapes: the lists of {column.name!r} are {dtype}; say their shape alone.")
            shape = None if declared is None else tuple(declared)
    elif column.name in shapes:
        raise ValueError(f"shapes names the column {column.name!r}, which is no array.")
    return Field(
        name=column.name,
        dtype=dtype,
        shape=shape,
        has_nulls=column.null_count != 0,
        ragged_ndim=ndim if shape is None else 1,
        has_null_elements=ndim > 0 and column.has_null_elements,
        is_jagged=ndim > 1 and shape is None and tasks.DTYPE_METADATA not in said,
    )


def _is_bytes(kind: pa.DataType) -> bool:
    variable = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return bool(variable or pa.types.is_fixed_size_binary(kind))


def _plan_bytes(column: Column, declared: DeclaredShape) -> Field:
    """A binary column as the numbers that its bytes are."""
    dtype, shape = split_declared(column.name, declared)
    if shape is None or not len(shape):
        raise ValueError(f"shapes: the bytes of {column.name!r} need a shape, e.g. (28, 28), or ('float32', (512,)).")
    kind, row_bytes = column.source.arrow_type, math.prod(shape) * np.dtype(dtype or "uint8").itemsize
    if pa.types.is_fixed_size_binary(kind) and kind.byte_width != row_bytes:
        raise ValueError(
            f"shapes: rows of {column.name!r} have {kind.byte_width} bytes, and {dtype or 'uint8'} of shape "
            f"{tuple(shape)} takes {row_bytes}."
        )
    return Field(name=column.name, dtype=dtype or "uint8", shape=tuple(shape), has_nulls=column.null_count != 0)


def _shape_of(column: Column, ndim: int) -> tuple[int, ...] | None:
    """The one length that all lists of a column can have, by how many numbers each row group has of it."""
    if tasks.DTYPE_METADATA in column.said:
        shape = column.said.get(tasks.SHAPE_METADATA)
        return None if shape is None else tuple(json.loads(shape))
    if ndim == 1 and column.list_size is not None:
        return (column.list_size,)
    if ndim > 1 or len(column.lengths) != 1:
        return None
    ((length, rest),) = column.lengths
    return None if rest or not length else (length,)


def statistics_of(columns: Sequence[Column], fields: Sequence[Field]) -> dict[str, ColumnStatistics]:
    """What footers, or a log, say of the columns: nulls, where they are counted, and sizes."""
    return {
        column.name: ColumnStatistics(field=one, null_count=column.null_count, num_bytes=column.num_bytes)
        for column, one in zip(columns, fields, strict=True)
        if column.null_count is not None
    }
