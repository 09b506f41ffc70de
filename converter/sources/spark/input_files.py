"""Which files a DataFrame reads, as it noted them when it was made, and as they are now; `identity` compares them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from converter.sources.spark.session import java_frame, listed

IN_PLAN = frozenset({"LocalRelation", "LogicalRDD", "OneRowRelation", "Range"})
"""Leaves of plans that read no files; an RDD may, so local lists are counted."""

_FILE_STATUS = re.compile(r"^\w+\{path=(.*?); isDirectory=false; length=(\d+);", re.MULTILINE)

_FORMATS = frozenset({"CSVFileFormat", "JsonFileFormat", "OrcFileFormat", "ParquetFileFormat", "TextFileFormat"})


class _UnknownInputError(Exception):
    """A frame reads what is not files that Spark listed when the frame was made."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a leaf of a plan knows of its files, from when the frame was made."""

    roots: tuple[str, ...]
    """What the user named: folders, or files."""

    partitions: str
    """The values in the names of folders."""

    files: tuple[tuple[str, int], ...]
    """Paths and lengths. Spark reads each file to that length."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Files as they are now. All times in nanoseconds."""

    files: tuple[tuple[str, int, int, tuple[int, ...]], ...]
    """Path, size and modification time; on local disks change time, device and inode."""

    ways: tuple[tuple[str, tuple[int, ...]], ...]
    """On local disks, what changes if other files take the place of these and give it back: folders and links."""


def listings_of(plan: Any, df: Any) -> list[Listing]:
    """A listing for each leaf of a plan that reads files; raises `_UnknownInputError` if one reads anything else.

    Reaches into: Catalyst's plans, InMemoryFileIndex (Spark 3.5 to 4.3).
    Without it: doubt, so frames without a cache_key are written afresh.
    """
    listings = []
    for leaf in listed(plan.collectLeaves()):
        if leaf.getClass().getSimpleName() in IN_PLAN:
            continue
        relation = leaf.relation()
        location = relation.location()
        kinds = location.getClass().getSimpleName(), relation.fileFormat().getClass().getSimpleName()
        # Partitions of a table in a catalog may be given other values and folders. Metadata are of when a file was
        # listed, which may be before it was written anew. Views of other sessions read with the confs of those.
        is_known = (
            kinds[0] == "InMemoryFileIndex" and kinds[1] in _FORMATS and "_metadata" not in leaf.output().mkString()
        )
        if not is_known or not relation.sparkSession().equals(java_frame(df).sparkSession()):
            raise _UnknownInputError
        if re.search("ignore(Corrupt|Missing)Files", relation.options().mkString(), re.IGNORECASE):
            raise _UnknownInputError
        # As text, in one call.
        files = _FILE_STATUS.findall(location.allFiles().mkString("\n"))
        listings.append(
            Listing(
                roots=tuple(map(_plain, location.rootPaths().mkString("\n").split("\n"))),
                partitions=location.partitionSpec().toString(),
                files=tuple((_plain(path), int(num_bytes)) for path, num_bytes in files),
            )
        )
    return listings


def are_listed(inputs: Inputs, listings: Sequence[Listing]) -> bool:
    """Whether files are as long as a frame noted them when it was made.

    Files change in place: a log grows, a table is written anew under the same names.
    """
    lengths: dict[str, set[int]] = {}
    for path, num_bytes in (file for listing in listings for file in listing.files):
        # Two leaves may know one file from different times.
        lengths.setdefault(path, set()).add(num_bytes)
    return lengths == {_plain(unquote(path)): {num_bytes} for path, num_bytes, _, _ in inputs.files}


def look_at(paths: Iterable[str], roots: Iterable[str], session: Any) -> Inputs:
    """The files of these URLs as they are now. `roots` are those of listings."""
    names = list(paths)
    if all(urlsplit(name).scheme == "file" for name in names):
        local = [unquote(urlsplit(name).path) for name in names]
        return Inputs(
            files=tuple((name, *_on_disk(path)) for name, path in zip(names, local, strict=True)),
            ways=tuple(sorted(_ways_to(local, frozenset(roots)).items())),
        )
    files = session.read.format("binaryFile").load([unquote(name) for name in names])
    rows = files.select("path", "length", "modificationTime").collect()
    found = ((row[0], int(row[1]), int(row[2].timestamp() * 1e9), ()) for row in rows)
    return Inputs(files=tuple(sorted(found)), ways=())


def _on_disk(path: str) -> tuple[int, int, tuple[int, ...]]:
    at = os.stat(path)
    return at.st_size, at.st_mtime_ns, (at.st_ctime_ns, at.st_dev, at.st_ino)


def _ways_to(files: Sequence[str], roots: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Each folder from a file up to its root, and each link on any of its ways, with inode and change time.

    Folders above a root are not looked at: whatever else is made in them changes them, too.
    """
    ways: dict[str, tuple[int, ...]] = {}
    for file in files:
        # A file may be a root itself.
        above = [file]
        while above[-1] not in ways and above[-1] not in roots and above[-1] != os.path.dirname(above[-1]):
            above.append(os.path.dirname(above[-1]))
        is_below = above[-1] in ways or above[-1] in roots
        for folder in above[1:] if is_below else above[1:2]:
            at = os.stat(folder)
            ways[folder] = (at.st_ino, at.st_ctime_ns)
    waiting, seen = list(files), set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        parent, at = os.path.dirname(path), os.lstat(path)
        if stat.S_ISLNK(at.st_mode):
            ways[path] = (*ways.get(path, ()), at.st_ino, at.st_ctime_ns)
            waiting.append(os.path.join(parent, os.readlink(path)))
        waiting.append(parent)
    return ways


def _plain(path: str) -> str:
    return re.sub("^file:/+", "/", path)
