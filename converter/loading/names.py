"""Which keys a batch has: `columns`, `stack`, masks and lengths, checked against the schema before anything is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from converter.errors import SourceError
from converter.manifest import Manifest
from converter.reading.gather import Stack
from converter.reading.nulls import check_fill, has_fill, null_error
from converter.reading.runs import LENGTH_SUFFIX, NOT_PADDED, VALID_SUFFIX
from converter.reading.source import ELEMENT_VALID_SUFFIX, INNER_LENGTH_SUFFIX, BatchSource
from converter.schema import Schema
from converter.sequences import SEQUENCE_LENGTH

logger = logging.getLogger(__name__)


Names = str | Sequence[str]
"""One column's name, or a list of names."""

_SUFFIXES = (ELEMENT_VALID_SUFFIX, VALID_SUFFIX, INNER_LENGTH_SUFFIX, LENGTH_SUFFIX)


def narrow_columns(
    schema: Schema,
    stack: Mapping[str, Sequence[str]] | None,
    requested: Sequence[Names | None],
    added: Sequence[str | None],
) -> dict[str, Any]:
    """The arguments `columns` and `stack` that read only the requested features, labels and weights.

    A mask or a length is read with its column; `added` are names that no column has. An unknown name changes nothing:
    the dataset, which knows all names, raises the error.
    """
    stacks = stack if isinstance(stack, Mapping) else {}
    wanted: dict[str, None] = {}
    for names in requested:
        for name in [names] if isinstance(names, str) else names or ():
            bases = [name, *map(name.removesuffix, _SUFFIXES)] if isinstance(name, str) else []
            base = next((base for base in bases if base in schema or base in stacks), None)
            if base is not None:
                wanted[base] = None
            elif name not in added:
                return {}
    if not wanted:
        return {}
    return {"columns": list(wanted), "stack": {name: stacks[name] for name in stacks if name in wanted} or None}


def resolve_names(
    manifest: Manifest, columns: Sequence[str] | None, stack: Mapping[str, Sequence[str]] | None
) -> tuple[tuple[str, ...], tuple[Stack, ...]]:
    """The keys of a batch in order, and the stacks among them.

    A stack comes where `columns` names it, else last. Its columns also arrive alone only if `columns` names them.

    Raises:
        ValueError: a column does not exist, or cannot be stacked.
    """
    if stack is not None and not isinstance(stack, Mapping):
        raise TypeError(f"stack must be a dict of name to column names, got {stack!r:.80}.")
    schema = manifest.batch_schema
    stacks = tuple(_resolve_stack(manifest, name, members) for name, members in (stack or {}).items())
    stack_names = tuple(stack.name for stack in stacks)
    if columns is None:
        stacked = {column for stack in stacks for column in stack.columns}
        return (*(name for name in schema.names if name not in stacked), *stack_names), stacks
    is_list = isinstance(columns, Sequence) and not isinstance(columns, str)
    if not is_list or not all(isinstance(name, str) for name in columns):
        raise TypeError(f"columns must be a list of names, got {columns!r:.80}.")
    for name in columns:
        if name not in stack_names and name not in schema:
            raise ValueError(f"columns: {schema.explain_missing(name)}")
    if len(set(columns)) != len(columns) or not columns:
        raise ValueError(f"columns must name at least one column, and each once; got {list(columns)!r:.80}.")
    return (*columns, *(name for name in stack_names if name not in columns)), stacks


def _resolve_stack(manifest: Manifest, name: str, members: Sequence[str]) -> Stack:
    schema, float_dtype = manifest.batch_schema, manifest.float_dtype
    if not isinstance(name, str) or not name:
        raise TypeError(f"stack: a stack needs a name, got {name!r:.80}.")
    if name in schema:
        raise ValueError(f"stack: {name!r} is a column already; choose another name for the stack.")
    if isinstance(members, str) or not isinstance(members, Sequence) or not members:
        raise ValueError(f"stack: {name!r} needs a list of column names, got {members!r:.80}.")
    for member in members:
        if not isinstance(member, str):
            raise TypeError(f"stack: {name!r} needs a list of column names, got {members!r:.80}.")
        if member not in schema:
            raise ValueError(f"stack: {schema.explain_missing(member)}")
        if not schema[member].is_scalar_number:
            field = schema[member]
            hint = " Columns that are decoded arrive after stacks are made." if field.decoder else ""
            raise ValueError(
                f"stack: column {member!r} of {name!r} has dtype {field.shown_dtype} and shape {field.shown_shape}; "
                f"only columns of single numbers can be stacked.{hint}"
            )
    dtypes = {schema[member].dtype for member in members}
    if len(dtypes) == 1:
        return Stack(name=name, columns=tuple(members), dtype=dtypes.pop())
    exact = 2 ** (np.finfo(float_dtype).nmant + 1)
    rounded = sorted(member for member in members if not _is_exact(manifest, member, exact))
    if rounded:
        logger.info(
            "Stack %r makes %s of columns whose integers may be beyond %d, and rounds such integers: %s",
            name, float_dtype, exact, ", ".join(rounded),
        )  # fmt: skip
    return Stack(name=name, columns=tuple(members), dtype=float_dtype)


def _is_exact(manifest: Manifest, name: str, exact: int) -> bool:
    """Whether every integer of a column is certain to be at most `exact`, so that a float holds it exactly."""
    dtype = np.dtype(manifest.batch_schema[name].dtype)
    if dtype.kind not in "iu" or np.iinfo(dtype).max <= exact:
        return True
    statistics = manifest.statistics.get(name)
    if statistics is None or statistics.closed is None:
        return False
    return statistics.min is None or (-exact <= statistics.min and statistics.max <= exact)


def check_policies(source: BatchSource, *, is_filtered: bool) -> None:
    """Raise now what reading would raise later: nulls and ragged rows that `nulls` and `ragged` do not cover.

    Raises:
        NullValueError: a column holds nulls, and `nulls` does not cover it.
        SourceError: a column's rows have different lengths, and `ragged="raise"`.
        ValueError, TypeError: `nulls` or `ragged` has a value that it cannot have.
    """
    if isinstance(source.nulls, str):
        if source.nulls not in ("raise", "mask"):
            raise ValueError(f"nulls must be 'raise', 'mask' or a dict of fill values, got {source.nulls!r:.80}.")
    elif not isinstance(source.nulls, Mapping):
        raise TypeError(f"nulls must be 'raise', 'mask' or a dict of fill values, got {source.nulls!r:.80}.")
    else:
        for name, value in source.nulls.items():
            if name not in source.schema:
                raise ValueError(f"nulls: {source.schema.explain_missing(name)}")
            check_fill(source.schema[name], value)
    if source.ragged not in ("raise", "pad", "nested"):
        raise ValueError(f"ragged must be 'raise', 'pad' or 'nested', got {source.ragged!r:.80}.")
    _check_added_names(source)
    if source.bucket_by is not None:
        _check_bucket(source)
    if source.sequences is not None:
        _check_sequences(source)
    for field in source.fields:
        # A selection or a filter may leave the nulls out: then only reading can tell.
        statistics = source.manifest.statistics.get(field.name)
        has_nulls = statistics is not None and statistics.null_count > 0
        is_certain = has_nulls and source.manifest.selection is None and not is_filtered
        if is_certain and source.nulls != "mask" and not has_fill(source.nulls, field):
            raise null_error(field, nulls=source.nulls)
        # Texts are objects in any case, so they arrive as lists.
        if field.shape is None and not field.is_object and source.ragged == "raise":
            what = "rows of different shapes (give its decoder one)" if field.decoder else "rows of different lengths"
            raise SourceError(
                f"Column {field.name!r} has {what}, which make no tensor. Pass ragged='pad' "
                f"(adds {field.name + LENGTH_SUFFIX!r}) or ragged='nested', or leave the column out with columns=….",
                column=field.name,
            )


def _check_bucket(source: BatchSource) -> None:
    """Raise ValueError if rows cannot come together by the lengths of a column."""
    field = next((field for field in source.fields if field.name == source.bucket_by), None)
    if field is None:
        raise ValueError(f"bucket_by: {source.bucket_by!r} is none of the columns that are read. Add it to columns=….")
    has_length = field.shape is None or field.is_object or field.dtype.startswith(("int", "uint"))
    if not has_length or (field.shape is not None and field.shape != ()) or field.decoder or field.scale:
        raise ValueError(
            f"bucket_by: column {field.name!r} is {field.shown_dtype} of shape {field.shown_shape}; it needs rows of "
            "different lengths, texts, or whole numbers as they are in the files."
        )
    if source.sequences is not None:
        raise ValueError("bucket_by: sequences all have one length, so there is nothing to sort by. Leave it out.")


def _check_sequences(source: BatchSource) -> None:
    """Raise an error if a column cannot be in a sequence, or a stack has no steps of its own."""
    assert source.sequences is not None
    for stack in source.stacks:
        given = {name: source.sequences.steps.get(name) for name in stack.columns}
        odd = next((name for name in given if given[name] != given[stack.columns[0]]), None)
        if odd is not None:
            raise ValueError(
                f"stack: columns {stack.columns[0]!r} and {odd!r} of {stack.name!r} have different steps in "
                "sequences(); give all of a stack the same."
            )
    for field in source.fields:
        if field.shape is None:
            what, remedy = "lengths", "its rows one shape with Spark"
            if field.decoder:
                what, remedy = "shapes", "its decoder a shape"
            raise SourceError(
                f"Column {field.name!r} has rows of different {what}, so it cannot be in a sequence. Leave it out with "
                f"columns=…, or give {remedy}.",
                column=field.name,
            )


def _check_added_names(source: BatchSource) -> None:
    """Raise ValueError if a mask, a length or the row index would have the name of another key."""
    schema = source.schema
    stacked = {stack.name: stack.columns for stack in source.stacks}
    added: dict[str, str] = {}
    for name in source.names:
        if source.has_element_mask(name):
            added[name + ELEMENT_VALID_SUFFIX] = f"for {name!r}"
        if source.has_mask(stacked.get(name, (name,))):
            added[name + VALID_SUFFIX] = f"for {name!r}"
        if source.ragged == "pad" and name not in stacked and schema[name].shape is None:
            added[name + LENGTH_SUFFIX] = f"for {name!r}"
            if schema[name].is_jagged:
                added[name + INNER_LENGTH_SUFFIX] = f"for {name!r}"
    if source.sequences is not None and source.sequences.is_padded:
        added[SEQUENCE_LENGTH] = "by sequences(partial='pad')"
    if source.uneven == "pad":
        added[NOT_PADDED] = "by uneven='pad'"
    for name, cause in added.items():
        if name in source.names:
            raise ValueError(
                f"{name!r} is a column already, and would be added {cause}. Rename it in Spark, or leave one of the "
                "two out with columns=…."
            )
    if source.row_index is not None and source.row_index in {*schema.names, *stacked, *added}:
        raise ValueError(f"with_row_index: {source.row_index!r} is a column already; choose another name.")
