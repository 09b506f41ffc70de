"""The types of the dicts that travel between the driver and its executors.

Types alone: imported under `TYPE_CHECKING`, so that nothing of this travels. They are dicts because they cross the
border as JSON, or as the arguments of a function that is pickled by value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypedDict, final

import numpy as np
import pyarrow as pa

Numbers: TypeAlias = "np.ndarray[Any, Any]"


class StoreSpec(TypedDict):
    """A filesystem behind a network, as any process can open it: secrets included."""

    protocol: str
    options: dict[str, Any]
    timeout_seconds: float


class CategoriesSpec(TypedDict):
    """How the values of a column become codes."""

    kind: str
    """The dtype of the values."""
    values: list[Any] | None
    """The values that the user gave, in order; None: those that come. Dates are days since 1970."""
    unseen: Literal["raise", "null"]
    """`raise` or `null`: what a value is that was not given."""
    most: int
    """How many values there may be."""


class Vocabulary(TypedDict):
    """The values of a column that a task knows, in the order of their codes."""

    values: pa.Array
    counts: Numbers
    """How many rows have each."""
    is_settled: bool
    """Whether codes keep their meaning from now on: rows were written."""
    is_given: bool
    skips_unseen: bool
    most: int


class CategoriesReport(TypedDict):
    """The values that a task met, and how many rows have each."""

    values: str
    """JSON, compressed, in base64."""
    counts: list[int]


class ColumnSpec(TypedDict):
    """A column of the input, by position."""

    name: str
    kind: str
    """`scalar`, `tensor` (nested lists of numbers), `bytes`, `decoded`, `vector`, `matrix`, or `lists` (stay lists)."""
    dtype: str
    ndim: int
    shape: list[int] | None
    """The declared shape of a row, if there is one."""
    decode: Callable[[Any], tuple[Numbers, Numbers]] | None
    """For a column of bytes whose tensors are written: makes the numbers of rows, and each row's shape."""
    skips_errors: bool
    """Whether rows that `decode` cannot decode are left out."""
    categories: CategoriesSpec | None
    """For a scalar column whose values become codes; `dtype` is then that of the codes."""


class WriteSpec(TypedDict):
    """The instructions for a write task."""

    directory: str
    """A path on the filesystem of `store`."""
    intent: str | None
    """The path of a file that is there as long as the driver waits for the task; None if there is none."""
    store: StoreSpec | None
    """None for local disks."""
    columns: list[ColumnSpec]
    row_group_bytes: int
    file_bytes: int
    compression: str
    """A codec of Parquet, or `auto`: chosen for each column by a sample."""
    end_bytes: int
    """How many bytes of all files' footers and heads may be reported; 0 on local disks, where reading them is free."""


class Finding(TypedDict, total=False):
    """Bad data: a row of the result instead of an error, because Spark would run a failed task again."""

    kind: str
    """`null_element`, `jagged`, `shape`, `matrix`, `text` (no UTF-8), `unseen`, `categories`, `undecodable`,
    `decoder`, `no_library`."""
    column: str
    partition: int
    row: int
    """In the partition."""
    found: str
    expected: str


@final
class FindingReport(TypedDict):
    """The report of a task that wrote no file because of its data."""

    finding: Finding


class Skipped(TypedDict):
    """The rows of a partition that were left out because a column cannot be decoded."""

    count: int
    row: int
    """The first of them."""
    found: str
    """Its error."""


class ClosedMoments(TypedDict):
    """What a column's numbers are like; arrays have one value for each element. The mean is `shift + offset`."""

    count: Numbers
    shift: Numbers
    offset: Numbers
    m2: Numbers
    """Sums of squared deviations from the mean."""
    nans: int
    min: Any
    max: Any


class OpenMoments(TypedDict):
    """Sums of differences to `shift`, while numbers still come."""

    shift: Numbers
    has_shift: Numbers
    count: Numbers
    first: Numbers
    second: Numbers
    nans: int
    min: Any
    max: Any


class Scratch(TypedDict):
    """Memory to work in, used again for each batch."""

    numbers: Numbers
    ones: Numbers


class _WrittenFile(TypedDict):
    name: str
    footer_crc32: int
    bytes: int
    rows: list[int]
    """One value for each row group, as in the next two."""
    row_group_bytes: list[int]
    digests: list[str]
    nulls: dict[str, int]
    spans: dict[str, list[float]]
    column_bytes: dict[str, int]


class FileReport(_WrittenFile, total=False):
    """What a task reports of one file."""

    shapes: dict[str, list[int] | None]
    """The shape of a tensor's rows; None if they differ, absent if all are null."""
    odd_rows: dict[str, int]
    """The first row of the partition whose shape differs from those before it, for each tensor."""
    end: list[str]
    """Footer and heads, compressed, in base64."""
    moments: dict[str, Any]
    """Moments of all files of a task, in its last report; as `to_json` gives them."""
    null_elements: dict[str, int]
    """How many elements of `lists` are null; in the last report."""
    lengths: dict[str, list[int]]
    """The fewest and the most numbers of a row; in the last report."""
    categories: dict[str, CategoriesReport]
    """The values of categories that the task met; in the last report."""


class PackReport(TypedDict):
    """What a task reports whose rows Spark itself writes."""

    partition: int
    rows: int
    nulls: list[int]
    """How many rows are null, for each column."""
    digest: str
    categories: dict[str, CategoriesReport]


@final
class SkippedReport(TypedDict):
    """What a task reports after its files if it left rows out."""

    skipped: dict[str, Skipped]


class OpenFile(TypedDict, total=False):
    """A Parquet file that is being written."""

    name: str
    path: str
    store: StoreSpec | None
    filesystem: Any
    raw: Any
    writer: Any
    footers: list[Any]
    rows: list[int]
    row_group_bytes: list[int]
    digests: list[str]
    nulls: dict[str, int]
    bytes: int
    """How many have passed."""
    crc: int
    """A running CRC-32 of headers and small pages."""
    beginnings: dict[int, bytes] | None
    """The first bytes of each write, by their place."""
    footer: Any
    """Collects the footer, once it is written."""
    is_discarded: bool
    write: Callable[[Any], None]
    """Hands bytes to a remote file."""
    finish: Callable[[], None]
    stop: Callable[[], None]


Shape: TypeAlias = "tuple[int, ...] | Literal['ragged'] | None"
"""How a file stores a tensor: in one shape, or as rows that differ; None while all rows are null."""

Layout: TypeAlias = "dict[str, Shape]"


@final
class EncodedScalar(TypedDict):
    """A batch of a scalar column, ready to store."""

    array: pa.Array


@final
class EncodedLists(TypedDict):
    """A batch of lists that stay lists, ready to store."""

    array: pa.Array
    elements: pa.Array
    """The innermost values."""
    sizes: Numbers
    """How many of them each row has."""
    valid: Numbers | None
    """Which rows are not null; None if all are."""
    empty: bool
    """Whether all rows are null."""


@final
class EncodedTensor(TypedDict):
    """A batch of a tensor column."""

    values: Numbers
    """Flat numbers, row after row, in C order."""
    sizes: Numbers
    """How many numbers each row has."""
    valid: Numbers | None
    """Which rows are not null; None if all are."""
    shape: tuple[int, ...] | None
    """The shape of the rows, if they have one shape."""
    shapes: Numbers | None
    """Each row's shape, if rows of several dimensions differ."""
    empty: bool
    """Whether no row has a shape, because all are null."""


EncodedColumn: TypeAlias = "EncodedScalar | EncodedLists | EncodedTensor"

Encoded: TypeAlias = "EncodedColumn | FindingReport"
