"""What a dataset is on disk: files, row groups, schema, fingerprint.

A manifest holds everything that planning needs, so `len`, shards and the order of an epoch read no data. It is plain
JSON, and written last: a directory without it does not exist for readers.

Row groups are arrays of numbers, not objects: every rank and worker opens a table of 100,000 of them.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from converter import decoders
from converter.categories import Categories
from converter.declared import check_declared, schema_of_batches, schema_of_values
from converter.decoders.decoder import Decoder
from converter.draws import Draws
from converter.errors import CacheCorruptError, CacheError
from converter.lineage.recipe import Recipe
from converter.parsed_footer import Formats
from converter.places import SourceColumn
from converter.schema import Scale, Schema, checked, checked_count
from converter.selection import Selection
from converter.sequences import Sequences
from converter.statistics import ColumnStatistics

FORMAT_VERSION = 2

DATA_FILE = re.compile(
    r"part-[0-9]{5,}-([0-9a-f]{8,}-[0-9]{4,}"
    r"|(tid-[0-9]+-)?[0-9a-f-]{36}(-[0-9]+)*[-.]c[0-9]{3,}(-[0-9a-z_-]+)?(\.[0-9a-z_]+)?)\.parquet"
)
"""Names of data files: our writer's and Spark's. S3A's staging committers add the job's id, Databricks three others."""

MAX_END_BYTES = 8 << 20
"""Bytes of all footers and heads in a manifest: every rank and worker loads them."""

DATA_DIRECTORY = re.compile(r"data-[0-9a-f]{32}")
"""Names of the folders of attempts, in which they lie."""


def remedy_of(*, is_kept: bool) -> str:
    """What to do if a file of an entry changed. One that is kept would be used again."""
    return "Delete the entry and convert again: while it is kept, it is used as it is." if is_kept else "Convert again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """When and where an entry was written, and from what. Never holds a secret."""

    cache_key: str | None = None
    """The `cache_key` that the user gave."""

    created: str
    """ISO 8601 time in UTC, by the driver's clock."""

    host: str
    application_id: str
    """Spark's id of the application."""

    user: str
    """The user that ran the driver; empty if unknown."""

    source: str
    """What was converted: `DataFrame`, or the version of a Delta table."""

    options: Mapping[str, Any] | None = None
    """What `make_spark_converter` was called with, as JSON; None for entries of versions that did not note it."""

    @property
    def summary(self) -> str:
        """One line for people."""
        name = "" if self.cache_key is None else f"cache_key {self.cache_key!r}, "
        user = f"{self.user} on " if self.user else ""
        return f"{name}written {self.created} of {self.source} by {user}{self.host} ({self.application_id})"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        document = asdict(self)
        if self.options is None:
            del document["options"]
        return document

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Origin:
        """The inverse of `to_json`; checks every value."""
        key = value["cache_key"]
        texts = {name: checked(value[name], str) for name in ("created", "host", "application_id", "user", "source")}
        options = checked(value["options"], dict) if "options" in value else None
        return cls(cache_key=None if key is None else checked(key, str), options=options, **texts)


class FileEnd(NamedTuple):
    """A remote file's footer, kept so that it need not be fetched."""

    footer: bytes
    """The file's bytes from the footer on."""

    heads: bytes
    """CRC-32 of each column chunk's first page header, as little-endian uint32, row group by row group. Unlike the
    footer, that header holds the checksum of its page."""

    def heads_of(self, num_row_groups: int, num_columns: int) -> npt.NDArray[np.uint32]:
        """The heads, of shape `(num_row_groups, num_columns)`; raises ValueError if their number differs."""
        return np.frombuffer(self.heads, "<u4").reshape(num_row_groups, num_columns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """A dataset: its files and row groups in order, and its columns.

    Row groups are numbered through the whole dataset. Do not change the arrays.
    """

    schema: Schema
    file_names: tuple[str, ...]
    """Names relative to the manifest's directory."""

    file_bytes: npt.NDArray[np.int64]
    """Bytes of each file."""

    file_footers: npt.NDArray[np.int64] | None = None
    """CRC-32 of each file's footer, to notice a replaced file of the same size; None if not taken."""

    file_ends: tuple[FileEnd, ...] | None = None
    """Each file's footer; None on local disks, and if all together exceed `MAX_END_BYTES`."""

    row_group_file: npt.NDArray[np.int64]
    """File number of each row group; ascending."""

    row_group_rows: npt.NDArray[np.int64]
    """Rows of each row group."""

    row_group_bytes: npt.NDArray[np.int64]
    """Bytes of each row group in memory, all columns."""

    fingerprint: str
    """A digest of the schema and the rows in order: equal for the same rows in the same row groups."""

    num_rows: int

    float_dtype: str = "float32"
    """The dtype of a stack of columns of different dtypes."""

    is_kept: bool = False
    """Whether the entry was written with `delete_on_exit=False`."""

    origin: Origin | None = None
    """None for entries of older versions, and for files that are not ours."""

    statistics: Mapping[str, ColumnStatistics]
    """Statistics of each column; empty if not taken yet."""

    source_columns: Mapping[str, SourceColumn] | None = None
    """Where the user's own files hold each column; None for our files, which hold the columns in order."""

    compared_columns: Mapping[str, SourceColumn] = field(default_factory=dict)
    """Columns whose bounds in each file are known, to notice a replaced file."""

    file_stamps: npt.NDArray[np.int64] | None = None
    """A number for each file that changes when the file is written again (`Storage.look`); None if not asked."""

    row_group_index: npt.NDArray[np.int64] | None = None
    """Each row group's number in its file; -1: a whole file whose footer was not read; None: all those of the files."""

    version: int | None = None
    """The version of the Delta table, if it is one."""

    decoders: Mapping[str, Decoder] = field(default_factory=dict)
    """What makes tensors of the bytes of columns."""

    decoded_bytes: Mapping[str, int] = field(default_factory=dict)
    """What a decoded row of columns takes whose rows differ in shape, by some that were looked at. Never stored."""

    categories: Mapping[str, Categories] = field(default_factory=dict)
    """The values of columns that arrive as codes."""

    scales: Mapping[str, Scale | None] = field(default_factory=dict)
    """Columns that arrive standardised; None: by the mean and the standard deviation of the data, once known."""

    formats: Formats | None = None
    """How the files whose footers were read are stored, by their first row groups; None if none was. Never stored."""

    remedy: str = remedy_of(is_kept=False)
    """What to do if a file changed, for errors."""

    selection: Selection | None = None
    """Which rows are live; None for all. Never stored."""

    sequences: Sequences | None = None
    """How elements are made of rows, if they are no single rows; `selection` has those that begin one. Never stored."""

    draws: Draws | None = None
    """How often each live element comes, if not once. Never stored."""

    recipe: Recipe | None = None
    """How the converter was made; None for what no function of `make` made. Never stored."""

    @property
    def batch_schema(self) -> Schema:
        """The columns as batches have them: decoded, as codes, or standardised."""
        return schema_of_batches(self.schema, self.decoders, self.categories, self.scales, self.float_dtype)

    @property
    def element_schema(self) -> Schema:
        """The columns of an element: those of a row, or of a sequence of rows."""
        if self.sequences is None:
            return self.batch_schema
        return Schema(tuple(map(self.sequences.field_of, self.batch_schema)))

    @property
    def of_rows(self) -> Manifest:
        """The same rows as elements of their own."""
        selection = self.selection if self.sequences is None else self.sequences.rows
        return replace(self, selection=selection, sequences=None, draws=None)

    @property
    def value_schema(self) -> Schema:
        """The columns as they are compared, in filters and in `split`: codes as the values that they stand for."""
        return schema_of_values(self.schema, self.categories)

    @property
    def summary(self) -> str:
        """Elements, columns, size and files, in one line."""
        size = f"{self.num_bytes / 1e6:,.1f} MB in {len(self.file_names)} files"
        return f"{_elements(self)} × {len(self.schema)} columns, {size}"

    @property
    def live_rows(self) -> npt.NDArray[np.int64]:
        """Live rows of each row group."""
        return self.row_group_rows if self.selection is None else self.selection.counts

    def elements_of(self, epoch: int) -> npt.NDArray[np.int64]:
        """How many elements an epoch has of each row group."""
        return self.live_rows if self.draws is None else self.draws.row_group_counts(epoch)

    @property
    def num_live_rows(self) -> int:
        """The length of the dataset: elements of an epoch."""
        if self.draws is not None:
            return self.draws.num_rows
        return self.num_rows if self.selection is None else self.selection.num_rows

    @property
    def live_fingerprint(self) -> str:
        """A digest of the live elements in order."""
        digests = [part.digest for part in (self.selection, self.sequences, self.draws) if part is not None]
        if not digests:
            return self.fingerprint
        return hashlib.sha256("/".join((self.fingerprint, *digests)).encode()).hexdigest()[:32]

    @property
    def _format_version(self) -> int:
        """The oldest version of the format that says all of it: older packages would read codes as plain numbers."""
        has_lists = any(column.is_object and column.shape is None for column in self.schema)
        return 2 if self.decoders or self.categories or self.scales or has_lists else 1

    @property
    def num_row_groups(self) -> int:
        """Row groups of all files."""
        return len(self.row_group_rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return int(self.file_bytes.sum())

    def row_group_in_file(self, row_group: int) -> int:
        """The number of a row group within its own file; -1 for the whole file."""
        if self.row_group_index is not None:
            return int(self.row_group_index[row_group])
        return row_group - int(np.searchsorted(self.row_group_file, self.row_group_file[row_group]))

    def to_json(self) -> bytes:
        """The bytes that are committed."""
        files: dict[str, Any] = {
            "name": list(self.file_names),
            "bytes": self.file_bytes.tolist(),
            "footer_crc32": None if self.file_footers is None else self.file_footers.tolist(),
        }
        if self.file_ends is not None:
            files["footers"] = _packed([end.footer for end in self.file_ends])
            files["heads"] = _packed([end.heads for end in self.file_ends])
        arrays = {"file": self.row_group_file, "rows": self.row_group_rows, "bytes": self.row_group_bytes}
        row_groups: dict[str, Any] = {name: numbers.tolist() for name, numbers in arrays.items()}
        document = {
            "format_version": self._format_version,
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
        if self.decoders:
            document["decoders"] = {name: decoders.to_json(decoder) for name, decoder in self.decoders.items()}
        if self.categories:
            document["categories"] = {name: values.to_json() for name, values in self.categories.items()}
        if self.scales:
            document["scales"] = dict(self.scales)
        return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes, *, path: str) -> Manifest:
        """The inverse of `to_json`; checks every value.

        Raises:
            CacheCorruptError: the bytes are no manifest, or contradict themselves.
            CacheError: a newer version of this package wrote them.
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
                remedy=remedy_of(is_kept=document["is_kept"]),
                origin=Origin.from_json(document["origin"]) if "origin" in document else None,
                decoders={
                    checked(name, str): decoders.from_json(decoder)
                    for name, decoder in checked(document.get("decoders", {}), dict).items()
                },
                categories={
                    checked(name, str): Categories.from_json(name, values, len(document["files"]["name"]))
                    for name, values in checked(document.get("categories", {}), dict).items()
                },
                scales={
                    name: None if scale is None else Scale(*(checked(number, float) for number in checked(scale, list)))
                    for name, scale in checked(document.get("scales", {}), dict).items()
                },
            )
            manifest._check()
        except (
            ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, zlib.error
        ) as error:  # fmt: skip
            raise CacheCorruptError(
                f"{path} is not a manifest that this package wrote ({type(error).__name__}: {error!s:.200}). "
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
            raise ValueError("columns share a name, or float_dtype is unknown")
        if not self.schema:
            raise ValueError("there are no columns")
        check_declared(self.schema, self.decoders, self.categories, self.scales)
        for column in self.schema:
            if column.is_object and (column.shape or (column.shape is None and column.is_jagged != (column.ndim > 1))):
                raise ValueError(f"column {column.name!r} of {column.dtype} has the shape {column.shown_shape}")
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
        # Names are joined to a directory and later deleted: only names that our writer or Spark's gives.
        unexpected = next((name for name in self.file_names if not _is_data_file(name)), None)
        if unexpected is not None:
            raise ValueError(f"unexpected file name {unexpected!r}")


def _is_data_file(name: str) -> bool:
    directory, _, file = name.partition("/")
    return bool(DATA_DIRECTORY.fullmatch(directory) and DATA_FILE.fullmatch(file))


def _add_up(counts: npt.NDArray[np.int64]) -> bool:
    """Whether none is negative and their sum fits an int64."""
    return not (counts < 0).any() and float(counts.sum(dtype=np.float64)) < 2**62


def _refuse_constant(name: str) -> None:
    """Refuse NaN and infinities, which Python's reader accepts and JSON does not have."""
    raise ValueError(f"{name} is not valid JSON")


def _ends_from(files: Mapping[str, Any]) -> tuple[FileEnd, ...] | None:
    if "footers" not in files:
        return None
    return tuple(itertools.starmap(FileEnd, zip(_unpacked(files["footers"]), _unpacked(files["heads"]), strict=True)))


def _packed(parts: Sequence[bytes]) -> dict[str, Any]:
    """Compressed together, because files of one dataset have similar footers."""
    return {"bytes": list(map(len, parts)), "zlib": base64.b64encode(zlib.compress(b"".join(parts))).decode()}


def _unpacked(packed: Mapping[str, Any]) -> list[bytes]:
    sizes = _integers(packed["bytes"])
    if (sizes < 0).any() or (sizes > MAX_END_BYTES).any() or sizes.sum() > MAX_END_BYTES:
        raise ValueError(f"footer sizes are not between 0 and {MAX_END_BYTES} bytes")
    edges = [0, *np.cumsum(sizes).tolist()]
    # At most one byte more than announced, however large the content is.
    parts = zlib.decompressobj().decompress(base64.b64decode(packed["zlib"], validate=True), edges[-1] + 1)
    if len(parts) != edges[-1]:
        raise ValueError("footers do not have their sizes")
    return [parts[start:end] for start, end in itertools.pairwise(edges)]


def _integers(values: Sequence[Any]) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind != "i"):
        raise ValueError("expected a list of integers")
    return array.astype(np.int64)


def fingerprint_of(
    schema: Schema,
    rows: Sequence[Sequence[int]],
    digests: Sequence[Sequence[str]],
    categories: Mapping[str, Categories] | None = None,
) -> str:
    """A dataset's digest, from the rows and the digests of each file's row groups, and the values of categories."""
    described: list[Any] = [schema.to_json(), [list(file) for file in rows], [list(file) for file in digests]]
    if categories:
        described.append({name: values.to_json() for name, values in categories.items()})
    content = json.dumps(described)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _elements(manifest: Manifest) -> str:
    """How many elements there are, and of what, in words."""
    of = ""
    if manifest.draws is not None:
        of = f" of {int(manifest.draws.starts[-1]):,}"
    elif manifest.selection is not None and manifest.sequences is None:
        of = f" of {manifest.num_rows:,}"
    if manifest.sequences is not None:
        of += f" sequences of {manifest.sequences.length:,} of {manifest.of_rows.num_live_rows:,}"
    return f"{manifest.num_live_rows:,}{of} rows"
