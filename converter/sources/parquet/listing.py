"""URLs, patterns and folders become file names and partition values."""

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
from converter.sources.parquet.columns import Column
from converter.storage.directory import Storage, StorageOptions
from converter.storage.opening import open_storage
from converter.storage.urls import shown_url

logger = logging.getLogger(__name__)

DEFAULT_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""How Hive, and Spark, call the folder of rows whose partition column is null."""

_DELTA_LOG = "_delta_log"

_MAX_DIGITS = 38
_ENDINGS = (".parquet", ".parq", ".pq")
_GLOB, _BRACES = re.compile(r"[*?\[{]"), re.compile(r"\{([^{}]*)\}")
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"NaN|[+-]?(Infinity|([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?)")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def find_files(
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


def partition_columns(url: str, partitions: Mapping[str, Mapping[str, str | None]]) -> dict[str, Column]:
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
