"""What a dataset is on disk: files, row groups, schema, fingerprint.

A manifest says everything that planning and reading need, so that `len`, shards
and the order of an epoch cost no look at the data. It is plain JSON, put last:
a directory without it does not exist for readers.

Why columns of numbers instead of a tree of objects: a table of 100,000 row
groups is opened by every rank and worker, and must cost them nothing.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from converter.errors import CacheCorruptError, CacheError
from converter.places import SourceColumn
from converter.schema import Schema, checked, checked_count
from converter.selection import Selection
from converter.statistics import ColumnStatistics

FORMAT_VERSION = 1

DATA_FILE = re.compile(r"part-[0-9]{5,}-([0-9a-f]{8,}-[0-9]{4,}|[0-9a-f-]{36}-c[0-9]{3,}(\.[0-9a-z_]+)?)\.parquet")
"""How our writer names a data file, and how Spark's does."""

MAX_END_BYTES = 8 << 20
"""Of all files' footers and heads: they are opened with the manifest, by every rank and worker."""

_DATA_DIRECTORY = re.compile(r"data-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """When an entry was written, by which process, and of what. No secret may stand here."""

    cache_key: str | None = None
    """The name that the user gave."""

    created: str
    """The time in UTC, as ISO 8601, by the driver's clock."""

    host: str
    application_id: str
    """Of Spark."""

    user: str
    """As whom the driver ran; empty where that is not known."""

    source: str
    """What was converted: `DataFrame`, or a version of a Delta table."""

    @property
    def summary(self) -> str:
        """Who wrote what, in one line."""
        name = "" if self.cache_key is None else f"cache_key {self.cache_key!r}, "
        user = f"{self.user} on " if self.user else ""
        return f"{name}written {self.created} of {self.source} by {user}{self.host} ({self.application_id})"

    def to_json(self) -> dict[str, Any]:
        """This as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Origin:
        """The inverse of `to_json`; checks what it is given."""
        key = value["cache_key"]
        texts = {name: checked(value[name], str) for name in ("created", "host", "application_id", "user", "source")}
        return cls(cache_key=None if key is None else checked(key, str), **texts)


class FileEnd(NamedTuple):
    """What is known of a remote file, so that its footer need not be fetched."""

    footer: bytes
    """Its bytes from the footer on."""

    heads: bytes
    """The CRC-32 of the head of each column chunk, as little-endian uint32, row group by row group: the head says the
    checksum of what follows, which the footer does not."""

    def heads_of(self, num_row_groups: int, num_columns: int) -> npt.NDArray[np.uint32]:
        """The heads as `(row groups, columns)`. Raises ValueError where they are not as many."""
        return np.frombuffer(self.heads, "<u4").reshape(num_row_groups, num_columns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """A dataset: its files in order, their row groups in order, what a row is.

    Row groups are numbered through the whole dataset. The arrays are not to be changed.
    """

    schema: Schema
    file_names: tuple[str, ...]
    """Names relative to the manifest's own directory."""

    file_bytes: npt.NDArray[np.int64]
    """Size of each file."""

    file_footers: npt.NDArray[np.int64] | None = None
    """CRC-32 of each file's footer, so that another file of the same size is noticed; None where nobody took it."""

    file_ends: tuple[FileEnd, ...] | None = None
    """What is known of each file's footer, so that behind a network nobody asks for it; None where nobody told it, and
    of more than `MAX_END_BYTES`."""

    row_group_file: npt.NDArray[np.int64]
    """For each row group the number of its file; ascending."""

    row_group_rows: npt.NDArray[np.int64]
    """For each row group how many rows it has."""

    row_group_bytes: npt.NDArray[np.int64]
    """For each row group its size in memory, all columns, uncompressed."""

    fingerprint: str
    """A digest of schema and rows in order: equal for the same rows in the same row groups."""

    num_rows: int

    float_dtype: str = "float32"
    """What a mix of numbers becomes when it is stacked."""

    is_kept: bool = False
    """Whether the entry outlives its makers on purpose (`delete_on_exit=False`)."""

    origin: Origin | None = None
    """Who wrote the entry; None for entries of older versions, and for files that are not ours."""

    statistics: Mapping[str, ColumnStatistics]
    """What the writers saw of each column; empty where nobody has looked yet."""

    source_columns: Mapping[str, SourceColumn] | None = None
    """Where somebody else's files hold each column; None where they are ours, and hold the columns in their order."""

    compared_columns: Mapping[str, SourceColumn] = field(default_factory=dict)
    """Columns whose bounds in each file are known: another file in its place has others."""

    file_stamps: npt.NDArray[np.int64] | None = None
    """For each file a number that is another one once it is written again (`Storage.look`); None where nobody asked."""

    row_group_index: npt.NDArray[np.int64] | None = None
    """For each row group its number within its file, or -1 where it is the whole file, whose footer nobody has read;
    None where all row groups of all files are there."""

    version: int | None = None
    """Of the Delta table whose files these are."""

    remedy: str = "Convert again."
    """What to do where a file is no longer what it was."""

    selection: Selection | None = None
    """Which rows are live; None for all. Never stored: an entry holds all of its rows."""

    @property
    def summary(self) -> str:
        """How much there is, in one line."""
        part = "" if self.selection is None else f" of {self.num_rows:,}"
        return (
            f"{self.num_live_rows:,}{part} rows × {len(self.schema)} columns, {self.num_bytes / 1e6:,.1f} MB in "
            f"{len(self.file_names)} files"
        )

    @property
    def live_rows(self) -> npt.NDArray[np.int64]:
        """For each row group how many of its rows are live."""
        return self.row_group_rows if self.selection is None else self.selection.counts

    @property
    def num_live_rows(self) -> int:
        """How many rows are live: the length of the dataset."""
        return self.num_rows if self.selection is None else self.selection.num_rows

    @property
    def live_fingerprint(self) -> str:
        """A digest of the live rows in order."""
        if self.selection is None:
            return self.fingerprint
        return hashlib.sha256(f"{self.fingerprint}/{self.selection.digest}".encode()).hexdigest()[:32]

    @property
    def num_row_groups(self) -> int:
        """How many row groups there are over all files."""
        return len(self.row_group_rows)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return int(self.file_bytes.sum())

    def row_group_in_file(self, row_group: int) -> int:
        """The number of a row group within its own file; -1 where it is all of them."""
        if self.row_group_index is not None:
            return int(self.row_group_index[row_group])
        return row_group - int(np.searchsorted(self.row_group_file, self.row_group_file[row_group]))

    def to_json(self) -> bytes:
        """The manifest as the bytes that are committed."""
        footers = None if self.file_footers is None else self.file_footers.tolist()
        files: dict[str, Any] = {"name": list(self.file_names), "bytes": self.file_bytes.tolist()}
        files["footer_crc32"] = footers
        if self.file_ends is not None:
            files["footers"] = _packed([end.footer for end in self.file_ends])
            files["heads"] = _packed([end.heads for end in self.file_ends])
        row_groups = {
            "file": self.row_group_file.tolist(),
            "rows": self.row_group_rows.tolist(),
            "bytes": self.row_group_bytes.tolist(),
        }
        document = {
            "format_version": FORMAT_VERSION,
            "fingerprint": self.fingerprint,
            "num_rows": self.num_rows,
            "float_dtype": self.float_dtype,
            "is_kept": self.is_kept,
            "schema": self.schema.to_json(),
            "statistics": {name: column.to_json() for name, column in self.statistics.items()},
            "files": files,
            "row_groups": row_groups,
        }
        if self.origin is not None:
            document["origin"] = self.origin.to_json()
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes, *, path: str) -> Manifest:
        """The inverse of `to_json`; nothing is believed unchecked.

        Raises:
            CacheCorruptError: the bytes are no manifest, or one that contradicts itself.
            CacheError: it was written by a newer version of this package.
        """
        try:
            document = json.loads(data, parse_constant=_refuse_constant)
            version = document["format_version"]
            if type(version) is not int or version < 1:
                raise ValueError(f"format_version {version!r} is no version")
            if version > FORMAT_VERSION:
                raise CacheError(
                    f"{path} has format version {version}; this version of the package reads up to {FORMAT_VERSION}. "
                    "Upgrade spark-tensor-converter, or write the cache again.",
                    path=path,
                )
            schema = Schema.from_json(document["schema"])
            statistics = checked(document["statistics"], dict)
            manifest = cls(
                schema=schema,
                statistics={name: ColumnStatistics.from_json(schema[name], statistics[name]) for name in statistics},
                file_names=tuple(checked(name, str) for name in checked(document["files"]["name"], list)),
                file_bytes=_integers(document["files"]["bytes"]),
                file_footers=None if (footers := document["files"]["footer_crc32"]) is None else _integers(footers),
                file_ends=_ends_from(document["files"]),
                row_group_file=_integers(document["row_groups"]["file"]),
                row_group_rows=_integers(document["row_groups"]["rows"]),
                row_group_bytes=_integers(document["row_groups"]["bytes"]),
                fingerprint=checked(document["fingerprint"], str),
                num_rows=checked_count(document["num_rows"]),
                float_dtype=checked(document["float_dtype"], str),
                is_kept=checked(document["is_kept"], bool),
                origin=Origin.from_json(document["origin"]) if "origin" in document else None,
            )
            manifest._check()
        except (
            ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, zlib.error
        ) as error:  # fmt: skip
            raise CacheCorruptError(
                f"{path} is not a manifest that this package wrote ({type(error).__name__}: {error}). "
                "Delete the entry and convert again.",
                path=path,
            ) from error
        return manifest

    def _check(self) -> None:
        num_files, num_row_groups = len(self.file_names), self.num_row_groups
        if len(self.file_bytes) != num_files or len(set(self.file_names)) != num_files or not _add_up(self.file_bytes):
            raise ValueError("files do not agree with their sizes")
        if self.file_footers is not None and (
            len(self.file_footers) != num_files or (self.file_footers < 0).any() or (self.file_footers >> 32).any()
        ):
            raise ValueError("files do not agree with their footers")
        if self.file_ends is not None and (
            self.file_footers is None
            or [zlib.crc32(end.footer) for end in self.file_ends] != self.file_footers.tolist()
        ):
            raise ValueError("footers do not agree with their digests")
        if self.statistics and set(self.statistics) != set(self.schema.names):
            raise ValueError("the statistics are of other columns than the schema")
        if len(set(self.schema.names)) != len(self.schema) or self.float_dtype not in ("float32", "float64"):
            raise ValueError("columns do not have names of their own, or no known dtype")
        if not self.schema:
            raise ValueError("there are no columns")
        for one in self.schema:
            if one.shape != () and (one.is_object or one.dtype.startswith("datetime64")):
                raise ValueError(f"column {one.name!r} of {one.dtype} has the shape {one.shape}")
        if len(self.row_group_file) != num_row_groups or len(self.row_group_bytes) != num_row_groups:
            raise ValueError("row groups do not agree with each other")
        if not _add_up(self.row_group_bytes):
            raise ValueError("row groups do not agree with their sizes")
        if num_row_groups and not (
            (np.diff(self.row_group_file) >= 0).all()
            and self.row_group_file[0] >= 0
            and self.row_group_file[-1] < num_files
        ):
            raise ValueError("row groups are not in file order")
        if not _add_up(self.row_group_rows) or self.num_rows != int(self.row_group_rows.sum()):
            raise ValueError("rows do not add up")
        # Names are joined to a directory and later deleted: only what our writer can have named.
        bad = next((name for name in self.file_names if not _is_data_file(name)), None)
        if bad is not None:
            raise ValueError(f"unexpected file name {bad!r}")


def _is_data_file(name: str) -> bool:
    directory, _, file = name.partition("/")
    return bool(_DATA_DIRECTORY.fullmatch(directory) and DATA_FILE.fullmatch(file))


def _add_up(counts: npt.NDArray[np.int64]) -> bool:
    """Whether these are counts whose sum is one."""
    return not (counts < 0).any() and float(counts.sum(dtype=np.float64)) < 2**62


def _refuse_constant(name: str) -> None:
    """JSON has no NaN and no infinities; Python's reader takes them."""
    raise ValueError(f"{name} is no number of JSON")


def _ends_from(files: Mapping[str, Any]) -> tuple[FileEnd, ...] | None:
    """What was kept of the files' ends, which older versions did not do."""
    if "footers" not in files:
        return None
    return tuple(itertools.starmap(FileEnd, zip(_unpacked(files["footers"]), _unpacked(files["heads"]), strict=True)))


def _packed(parts: Sequence[bytes]) -> dict[str, Any]:
    """Together: those of one dataset resemble each other."""
    return {"bytes": list(map(len, parts)), "zlib": base64.b64encode(zlib.compress(b"".join(parts))).decode()}


def _unpacked(packed: Mapping[str, Any]) -> list[bytes]:
    sizes = _integers(packed["bytes"])
    if (sizes < 0).any() or (sizes > MAX_END_BYTES).any() or sizes.sum() > MAX_END_BYTES:
        raise ValueError("footers are larger than any that are kept")
    edges = [0, *np.cumsum(sizes).tolist()]
    # Never more than is announced, whatever it was compressed from.
    parts = zlib.decompressobj().decompress(base64.b64decode(packed["zlib"], validate=True), edges[-1] + 1)
    if len(parts) != edges[-1]:
        raise ValueError("footers do not have their sizes")
    return [parts[start:end] for start, end in itertools.pairwise(edges)]


def _integers(values: Sequence[Any]) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind != "i"):
        raise ValueError("expected a list of integers")
    return array.astype(np.int64)


def fingerprint_of(schema: Schema, rows: Sequence[Sequence[int]], digests: Sequence[Sequence[str]]) -> str:
    """The digest of a dataset from what its writers saw: per file its row groups' rows and digests."""
    content = json.dumps([schema.to_json(), [list(file) for file in rows], [list(file) for file in digests]])
    return hashlib.sha256(content.encode()).hexdigest()[:32]
