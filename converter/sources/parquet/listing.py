"""URLs, patterns and folders become the names of Parquet files and their partition values."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import fnmatch
import itertools
import logging
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import unquote

import pyarrow as pa

from converter.errors import SourceError
from converter.places import SourceColumn
from converter.sources.parquet.columns import MAX_DIGITS, Column
from converter.storage.directory import Storage, StorageOptions
from converter.storage.opening import open_storage
from converter.storage.urls import shown_url

logger = logging.getLogger(__name__)

DEFAULT_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""The folder, as Hive and Spark name it, of rows whose partition column is null."""

_DELTA_LOG = "_delta_log"

_ENDINGS = (".parquet", ".parq", ".pq")
_IN_ENTRY = re.compile(r"(?:.*/)?([0-9a-f]{16}-[0-9a-f]{16})/data-[0-9a-f]{32}/")
"""A file of a cache entry, below the folder of all entries."""

_GLOB, _BRACES = re.compile(r"[*?\[{]"), re.compile(r"\{([^{}]*)\}")
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"NaN|[+-]?(Infinity|([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?)")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def find_files(
    urls: Sequence[str], storage_options: StorageOptions | None, timeout_seconds: float
) -> tuple[Storage, dict[str, dict[str, str | None]]]:
    """The folder above all files, and their names below it, each with its partition values, in the order of `urls`."""
    listings: list[_Listing] = []
    looked_at: set[str] = set()
    for url in urls:
        listed = _files_of(url, storage_options, timeout_seconds, looked_at)
        # A member of a choice `{a,b}` may be missing, but not all.
        if not any(listing.names for listing in listed):
            folder, is_glob = listed[0].folder, _GLOB.search(url)
            if not is_glob and not folder.exists:
                raise SourceError(
                    f"{folder.url} does not exist. Check the path, and that this machine can see it.", path=folder.url
                )
            subject = f"{shown_url(url)} matches" if is_glob else f"{folder.url} holds"
            raise SourceError(
                f"{subject} no Parquet files (names that end with .parquet). Check the path, or name all files in a "
                "list.",
                path=folder.url,
            )
        listings += [listing for listing in listed if listing.names]
    for folder, names, _ in listings:
        _refuse_cache(folder, names)
    first = listings[0].folder
    for folder, _, _ in listings:
        if not folder.is_beside(first):
            raise SourceError(
                f"{first.url} and {folder.url} are on two stores. Make a converter of each, or put the files on one.",
                path=folder.url,
            )
    common = posixpath.commonpath([listing.folder.path() for listing in listings])
    partitions: dict[str, dict[str, str | None]] = {}
    chosen = {key for listing in listings for key in _partition_of(f"{listing.above}/x")}
    for folder, names, above in listings:
        # The root folder of a web server has an empty path.
        below = posixpath.relpath(posixpath.join("/", folder.path()), posixpath.join("/", common))
        for name in names:
            full, partition = posixpath.normpath(posixpath.join(below, name)), _partition_of(f"{above}/{name}")
            # If a file is named twice, the name with more partition values counts.
            if len(partition) >= len(partitions.get(full, {})):
                partitions[full] = partition
    for key in chosen:
        # A partition column from a choice `{…}` must be known for all files.
        if any(key not in partition for partition in partitions.values()):
            for partition in partitions.values():
                partition.pop(key, None)
    return first.at(common), partitions


def _refuse_cache(folder: Storage, names: Sequence[str]) -> None:
    """Raise SourceError for a folder of cache entries, which are datasets of their own with other columns each."""
    entries = {found[1] for name in names if (found := _IN_ENTRY.match(name)) is not None}
    if entries:
        raise SourceError(
            f"{folder.url} is a cache directory with {len(entries):,} entries, which may have nothing in common. Open "
            "one of them: with open_converter and cache_key=… (in a shell --cache-key), or by its own URL.",
            path=folder.url,
        )


class _Listing(NamedTuple):
    """Files below one folder."""

    folder: Storage
    names: list[str]
    above: str
    """The last folders of its path, if a choice `{…}` named them: they may hold partition values."""


def _files_of(
    url: str,
    storage_options: StorageOptions | None,
    timeout_seconds: float,
    looked_at: set[str],
    chosen_in: str | None = None,
) -> list[_Listing]:
    """The folders that a URL names, several for a choice `{a,b}`, and the names of the files below each.

    `chosen_in` is the path before the first wildcard of a URL with a choice. `looked_at` holds the folders that are
    known to be part of no Delta table.
    """
    is_glob, pattern = _GLOB.search(url) is not None and not url.startswith(("http://", "https://")), ""
    # A folder that is really called `run[1]` is meant itself. A question mark in a URL some stores take for a query.
    if not is_glob or "://" not in url or "?" not in url:
        folder = open_storage(url, storage_options, timeout_seconds)
        is_glob = is_glob and not folder.is_at_a_file and not folder.list()
    if is_glob:
        if braces := _BRACES.search(url):
            before, after = url[: braces.start()], url[braces.end() :]
            if chosen_in is None:
                # The choice may be of hosts or containers.
                with contextlib.suppress(ValueError):
                    chosen_in = open_storage(_split_glob(url)[0], storage_options, timeout_seconds).path()
            members = [
                _files_of(f"{before}{member}{after}", storage_options, timeout_seconds, looked_at, chosen_in or "")
                for member in braces[1].split(",")
            ]
            return list(itertools.chain.from_iterable(members))
        fixed, pattern = _split_glob(url)
        folder = open_storage(fixed, storage_options, timeout_seconds)
    is_at_a_file = folder.is_at_a_file
    _refuse_delta(folder, looked_at, is_walked=not is_at_a_file)
    is_below = chosen_in and folder.path().startswith(posixpath.join(chosen_in, ""))
    above = posixpath.relpath(folder.path(), chosen_in) if is_below else ""
    if is_at_a_file:
        parent = folder.at(posixpath.dirname(folder.path()))
        return [_Listing(parent, [posixpath.basename(folder.path())], posixpath.dirname(above))]
    if not folder.has_folders:
        raise SourceError(
            f"{folder.url} is not there, or is a page. A web server cannot list folders: name each file, in a list.",
            path=folder.url,
        )
    walk = _Walk(root=folder.real_path(), left_out=set(), looked_at=looked_at)
    names = sorted(set(_walk(folder, pattern, walk)))
    if walk.left_out:
        others = sorted(walk.left_out)
        logger.warning(
            "Left out in %s, as the names do not end with .parquet: %s. If they hold rows, name all files in a list.",
            folder.url, ", ".join(others[:3]) + (f" and {len(others) - 3:,} more" if len(others) > 3 else ""),
        )  # fmt: skip
    # A folder that is really called `a?b` is meant itself.
    own = [name for name in names if pattern and (name == pattern or name.startswith(f"{pattern}/"))]
    return [_Listing(folder, own or names, above)]


def _split_glob(url: str) -> tuple[str, str]:
    """The part of a URL before the first name with a wildcard, and the rest."""
    parts = url.split("/")
    first = next(index for index, part in enumerate(parts) if _GLOB.search(part))
    return "/".join(parts[:first]) or ("/" if url.startswith("/") else "."), "/".join(parts[first:])


class _Walk(NamedTuple):
    """One walk through folders."""

    root: str
    left_out: set[str]
    """Files, by their paths below the root, whose names do not end with .parquet."""

    looked_at: set[str]
    """See `_files_of`."""

    def leads_back(self, target: str) -> bool:
        """Whether a link's target is reached without the link."""
        if not target.startswith(posixpath.join(self.root, "")):
            return False
        return not any(part.startswith(("_", ".")) for part in posixpath.relpath(target, self.root).split("/"))


def _walk(
    folder: Storage, pattern: str, walk: _Walk, path: str = "", links_in: frozenset[str] = frozenset()
) -> Iterator[str]:
    """The Parquet files below a folder. Names that begin with `_` or `.` are no data, as for Spark.

    A folder at the end of a pattern is taken whole; `**` is any number of folders, or none. Links are followed, but
    not in a circle, nor to files that are taken without the link. `links_in` are the folders of the followed links.
    """
    first, _, rest = pattern.partition("/")
    is_any = first == "**"
    if is_any:
        yield from _walk(folder, rest, walk, path, links_in)
    for info in folder.list():
        is_folder, below = folder.leads_to_folder(info), posixpath.join(path, info.name)
        if info.name == _DELTA_LOG and is_folder:
            raise _is_delta(folder)
        # The name of a partition column may begin with `_`.
        is_hidden = info.name.startswith(".") or (info.name.startswith("_") and not (is_folder and "=" in info.name))
        if is_hidden or (first and not fnmatch.fnmatchcase(info.name, first)):
            continue
        if is_folder:
            inner, followed = folder.below(info.name), links_in
            if info.is_link:
                target, followed = inner.real_path(), links_in | {folder.real_path()}
                is_circle = any(
                    posixpath.join(passed, "").startswith(posixpath.join(target, "")) for passed in followed
                )
                if is_circle or ((not first or is_any) and walk.leads_back(target)):
                    continue
                _refuse_delta(inner, walk.looked_at)
            yield from _walk(inner, pattern if is_any else rest, walk, below, followed)
        elif not rest and not is_any:
            if info.name.lower().endswith(_ENDINGS):
                yield below
            elif info.num_bytes:
                walk.left_out.add(below)


def _refuse_delta(start: Storage, looked_at: set[str], *, is_walked: bool = False) -> None:
    """Refuse a folder of a Delta table or below one: its files alone would bring deleted rows back.

    Folders in `looked_at` are not looked at again, nor those above them; nor is `start` if it is about to be walked.
    """
    # A link may lead into a table.
    for first_path in dict.fromkeys((start.path(), start.real_path())):
        path = first_path
        while start.has_folders:
            folder = start.at(path)
            if folder.url in looked_at:
                break
            looked_at.add(folder.url)
            # A file may be read where its folder, or one above, may not be listed.
            listed_later = is_walked and path == start.path()
            with contextlib.suppress(PermissionError):
                if not listed_later and folder.has_folder(_DELTA_LOG):
                    raise _is_delta(folder)
            if posixpath.dirname(path) in (path, ""):
                break
            path = posixpath.dirname(path)


def _is_delta(folder: Storage) -> SourceError:
    return SourceError(
        f"{folder.url} is a Delta table: its files also hold rows that were deleted or replaced. Call "
        "make_delta_converter(…) instead.",
        path=folder.url,
    )


def _partition_of(name: str) -> dict[str, str | None]:
    """The partition values in the folders of a file's name, such as `day=2026-11-21/…`, percent-encoded."""
    partition: dict[str, str | None] = {}
    for part in name.split("/")[:-1]:
        key, sign, value = part.partition("=")
        if sign and key:
            partition[unquote(key)] = None if value == DEFAULT_PARTITION else unquote(value)
    return partition


def partition_columns(
    url: str, partitions: Mapping[str, Mapping[str, str | None]], num_rows: Mapping[str, int]
) -> dict[str, Column]:
    """Partition values as columns, typed as Spark types them: numbers, dates, else strings. Both by files' names."""
    first_name, first = next(iter(partitions.items()))
    for name, partition in partitions.items():
        if list(partition) != list(first):
            raise SourceError(
                f"{url}/{name} is partitioned by {', '.join(partition) or 'nothing'}, and {url}/{first_name} by "
                f"{', '.join(first) or 'nothing'}. Name folders whose files agree.",
                path=f"{url}/{name}",
            )
    columns = {}
    for key in first:
        texts = [partition[key] for partition in partitions.values()]
        values = _typed(texts)
        source = SourceColumn(arrow_type=values.type, values=values.dictionary_encode())
        null_count = sum(num_rows[name] for name, partition in partitions.items() if partition[key] is None)
        columns[key] = Column(name=key, source=source, null_count=null_count, num_bytes=0)
    return columns


def _typed(texts: Sequence[str | None]) -> pa.Array:
    present = {text for text in texts if text is not None}
    if present and all(_WHOLE.fullmatch(text) for text in present):
        numbers = [None if text is None else int(text) for text in texts]
        # Below zero there is one number more.
        bits = max((number if number >= 0 else ~number).bit_length() for number in numbers if number is not None)
        if bits < 64:
            return pa.array(numbers, pa.int32() if bits < 32 else pa.int64())
        if (digits := max(len(str(abs(number))) for number in numbers if number is not None)) <= MAX_DIGITS:
            exact = [None if number is None else decimal.Decimal(number) for number in numbers]
            return pa.array(exact, pa.decimal128(digits, 0))
    if present and all(_NUMBER.fullmatch(text) for text in present):
        return pa.array([None if text is None else float(text) for text in texts], pa.float64())
    if present and all(_DAY.fullmatch(text) for text in present):
        with contextlib.suppress(ValueError):
            return pa.array([None if text is None else dt.date.fromisoformat(text) for text in texts], pa.date32())
    return pa.array(texts, pa.string())
