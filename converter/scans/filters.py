"""Passes over a dataset's rows that answer a question: which rows a filter leaves, what their statistics are.

They read with the same threads and windows as a loader, but only the columns that
the question needs, and hand back a `Selection` or statistics.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from converter.manifest import Manifest
from converter.scans.values import decimals_of, fitting, is_many, is_nan_value, plain_value, value_of
from converter.schema import Schema
from converter.selection import Mask

Filters: TypeAlias = pc.Expression | Sequence[Any]
"""What `pyarrow.parquet.read_table` takes: tuples `(column, operator, value)`, lists of them, or an expression."""

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le,
    ">=": operator.ge,
}  # fmt: skip
_OPERATORS = (*_COMPARISONS, "in", "not in")
_MAX_LISTED = 100

LEAST, MOST, _MASK = "least", "most", "mask"


def list_values(filters: Filters) -> Filters:
    """The same filters with lists for what `in` and `not in` are given, which may be read once only.

    >>> list_values([("day", "in", iter([1, 2])), ("x", ">", 0)])
    [('day', 'in', [1, 2]), ('x', '>', 0)]
    """
    if not isinstance(filters, (list, tuple)):
        return filters
    found: list[Any] = []
    for one in filters:
        if isinstance(one, (list, tuple)) and one and not isinstance(one[0], str):
            found.append(list_values(one))
        elif isinstance(one, tuple) and len(one) == 3 and one[1] in ("in", "not in") and is_many(one[2]):
            found.append((*one[:2], list(one[2])))
        else:
            found.append(one)
    return found if isinstance(filters, list) else tuple(found)


def say_filters(filters: Any) -> str:
    """Filters as a message shows them."""
    try:
        return str(filters)
    except (UnicodeDecodeError, OverflowError):
        # Arrow cuts long texts within a sign, and knows days beyond Python's.
        return "given"


class Comparison(NamedTuple):
    """A column, an operator and a value, as Arrow is asked for it."""

    name: str
    keeps: pc.Expression
    """Which rows pass."""

    may_keep: pc.Expression | None
    """Whether one of several may, by the least and the largest value of them; None where that does not say it."""


def comparisons_of(filters: Any, manifest: Manifest, arrow_schema: pa.Schema) -> list[list[Comparison]]:
    """The filters, all of a list and any of the lists; every name and operator is checked. Empty: an expression."""
    schema = manifest.schema
    if isinstance(filters, pc.Expression):
        if "FieldPath(" in say_filters(filters) and not any("FieldPath(" in name for name in schema.names):
            raise ValueError(f"filters: {filters} means a column by its place; say its name.")
        return []
    what = "filters must be tuples (column, operator, value) in a list, lists of them, or a pyarrow.compute expression"
    if isinstance(filters, (str, Mapping)) or not isinstance(filters, Sequence) or not filters:
        raise TypeError(f"{what}; got {filters!r}.")
    groups = [filters] if all(isinstance(one, tuple) for one in filters) else list(filters)
    found: list[list[Comparison]] = []
    for group in groups:
        if isinstance(group, (str, tuple)) or not isinstance(group, Sequence) or not group:
            raise TypeError(f"{what}; got {filters!r}.")
        checked: list[Comparison] = []
        for one in group:
            if not isinstance(one, tuple) or len(one) != 3 or not isinstance(one[0], str):
                raise TypeError(f"{what}; got {one!r}.")
            name, sign, value = one
            if name not in schema:
                raise ValueError(f"filters: {schema.explain_missing(name)}")
            if sign not in _OPERATORS:
                raise ValueError(f"filters: {sign!r} is no operator; use one of {', '.join(_OPERATORS)}.")
            if sign in ("in", "not in") and not is_many(value):
                raise TypeError(f"filters: {name!r} {sign} needs a list of values, got {value!r}.")
            if schema[name].shape != ():
                raise ValueError(
                    f"filters: column {name!r} is a tensor; only columns of single values can be compared."
                )
        # NaN that fails one comparison of a column fails the group, so that bounds decide the column's others as well.
        without_nan = {name for name, sign, value in group if not _nan_passes(sign, value)}
        for name, sign, value in group:
            if sign == "not in" and not list(value):
                # As in Spark 4 and in SQL: not even null is in an empty list.
                checked.append(Comparison(name, pc.scalar(True), None))
            elif pa.types.is_floating(arrow_schema.field(name).type):
                may_have_nan = name not in without_nan and _may_have_nan(manifest, name)
                checked.append(_compare_floats(name, sign, value, arrow_schema, may_have_nan=may_have_nan))
            else:
                checked.append(_compare(name, sign, value, arrow_schema))
        found.append(checked)
    return found


def _nan_passes(sign: str, value: Any) -> bool:
    """Whether NaN passes a comparison by Spark's rule."""
    values = list(value) if sign in ("in", "not in") else [value]
    has_nan = any(map(is_nan_value, values))
    if sign == "in":
        return has_nan
    if any(plain_value(one) is None for one in values):
        return False
    return sign in (("=", "==", "<=", ">=") if has_nan else (">", ">=", "!=", "not in"))


def expression_of(filters: Any, comparisons: Sequence[Sequence[Comparison]]) -> pc.Expression:
    """All comparisons as one expression of Arrow's."""
    if not comparisons:
        return filters
    groups = [functools.reduce(operator.and_, [one.keeps for one in group]) for group in comparisons]
    return functools.reduce(operator.or_, groups)


def _compare(name: str, sign: str, value: Any, arrow_schema: pa.Schema) -> Comparison:
    """One comparison, tried on no rows, so that what does not fit is said of its column."""
    kind = arrow_schema.field(name).type
    if pa.types.is_decimal(kind):
        doubles = [plain_value(one) for one in (value if sign in ("in", "not in") else [value])]
        if any(isinstance(one, float) and math.isfinite(one) for one in doubles):
            return _compare_doubles(name, sign, doubles, arrow_schema)
    may_keep = None
    try:
        values = [plain_value(one) for one in (value if sign in ("in", "not in") else [value])]
        has_none = any(one is None for one in values)
        sign, values = fitting(sign, kind, [one for one in values if one is not None])
        field, values = _comparable(name, kind, values)
        if sign in ("in", "not in"):
            plain = [value_of(one) if isinstance(one, pa.Scalar) else one for one in values]
            listed = values[0].type if values and isinstance(values[0], pa.Scalar) else kind
            comparison = field.isin(pa.array(plain, listed))
            # Else null, which is in no list, would pass.
            comparison = comparison if sign == "in" else ~comparison & field.is_valid()
            if has_none and sign == "not in":
                # As in SQL: of no value is it known that it is not what is unknown.
                comparison = comparison & field.is_null()
        elif has_none:
            comparison = _COMPARISONS[sign](field, pa.scalar(None, kind))
        else:
            comparison = _COMPARISONS[sign](field, values[0])
        project(comparison, pa.schema([arrow_schema.field(name)]).empty_table())
        if values and not has_none:
            may_keep = _may_keep(sign, values, [_comparable(bound, kind, values)[0] for bound in (LEAST, MOST)])
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise ValueError(
            f"filters: column {name!r} ({kind}) cannot be compared with {sign} {value!r}: {str(error).splitlines()[0]}"
        ) from error
    return Comparison(name, comparison, may_keep)


def _may_have_nan(manifest: Manifest, name: str) -> bool:
    """Whether a column of floats may hold NaN, which no bounds tell: only a count of them rules it out."""
    known = manifest.statistics.get(name)
    return known is None or known.closed is None or known.nan_count > 0


def _compare_floats(name: str, sign: str, value: Any, arrow_schema: pa.Schema, *, may_have_nan: bool) -> Comparison:
    """A comparison of floats by Spark's rule: NaN equals NaN and is above every other number.

    Where NaN passes, bounds of the other numbers say nothing.
    """
    is_list = sign in ("in", "not in") and is_many(value)
    values = list(value) if is_list else [value]
    numbers = [one for one in values if not is_nan_value(one)]
    has_nan, is_nan = len(numbers) < len(values), pc.field(name).is_nan()
    if not has_nan:
        found = _compare(name, sign, value, arrow_schema)
        if not (may_have_nan and _nan_passes(sign, value)):
            return found
        return Comparison(name, found.keeps | is_nan, None)
    is_value = pc.field(name).is_valid()
    if is_list:
        found = _compare(name, sign, numbers, arrow_schema)
        return Comparison(name, found.keeps | is_nan if sign == "in" else found.keeps & ~is_nan, None)
    keeps = {
        ">": pc.scalar(False), ">=": is_nan, "=": is_nan, "==": is_nan, "!=": ~is_nan, "<": ~is_nan, "<=": is_value,
    }[sign]  # fmt: skip
    return Comparison(name, keeps & is_value, None)


def _compare_doubles(name: str, sign: str, values: Sequence[Any], arrow_schema: pa.Schema) -> Comparison:
    """A comparison of decimals with doubles: those are equal that a batch holds as this double, the nearest to them."""
    scale = arrow_schema.field(name).type.scale
    if sign not in ("in", "not in"):
        least, most = decimals_of(values[0], scale)
        if sign in ("=", "=="):
            return _all_of([_compare(name, ">=", least, arrow_schema), _compare(name, "<=", most, arrow_schema)])
        if sign == "!=":
            return _any_of([_compare(name, "<", least, arrow_schema), _compare(name, ">", most, arrow_schema)])
        return _compare(name, sign, least if sign in ("<", ">=") else most, arrow_schema)
    exact = [one for one in values if not isinstance(one, float)]
    reaches = [decimals_of(one, scale) for one in values if isinstance(one, float) and math.isfinite(one)]
    exact += [least for least, most in reaches if least == most]
    apart = [_compare(name, sign, exact, arrow_schema)]
    for least, most in reaches:
        if least >= most:
            continue
        signs = (">=", "<=") if sign == "in" else ("<", ">")
        ends = [_compare(name, *end, arrow_schema) for end in zip(signs, (least, most), strict=True)]
        apart.append((_all_of if sign == "in" else _any_of)(ends))
    return (_any_of if sign == "in" else _all_of)(apart)


def _all_of(comparisons: Sequence[Comparison]) -> Comparison:
    known = [one.may_keep for one in comparisons if one.may_keep is not None]
    keeps = functools.reduce(operator.and_, [one.keeps for one in comparisons])
    return Comparison(comparisons[0].name, keeps, functools.reduce(operator.and_, known) if known else None)


def _any_of(comparisons: Sequence[Comparison]) -> Comparison:
    known = [one.may_keep for one in comparisons if one.may_keep is not None]
    keeps = functools.reduce(operator.or_, [one.keeps for one in comparisons])
    is_known = len(known) == len(comparisons)
    return Comparison(comparisons[0].name, keeps, functools.reduce(operator.or_, known) if is_known else None)


def _may_keep(sign: str, values: Sequence[Any], bounds: Sequence[pc.Expression]) -> pc.Expression | None:
    """Whether a value between bounds may compare so; None where they do not say it."""
    least, most = bounds
    if sign in ("<", "<="):
        return _COMPARISONS[sign](least, values[0])
    if sign in (">", ">="):
        return _COMPARISONS[sign](most, values[0])
    if sign == "!=":
        return (least != values[0]) | (most != values[0])
    if sign == "not in" or len(values) > _MAX_LISTED:
        return None
    return functools.reduce(operator.or_, [(least <= one) & (most >= one) for one in values])


def _comparable(name: str, kind: pa.DataType, values: list[Any]) -> tuple[pc.Expression, list[Any]]:
    """A column and values of one type, so that Arrow need not find one (it narrows floats where it thinks it can).

    A float is rounded as the column was: what was a double equals the double that it was made from.
    """
    field = pc.field(name)
    are_numbers = all(isinstance(one, (int, float, Decimal)) and not isinstance(one, bool) for one in values)
    if pa.types.is_floating(kind) and are_numbers:
        numbers = [float(one) for one in values]
        # Behind the others, for lists: both zeros are equal, but to a list not the same.
        zeros = [0.0, -0.0] if 0.0 in numbers else []
        return field, [pa.scalar(one, kind) for one in (*numbers, *zeros)]
    if pa.types.is_uint64(kind) and all(type(one) is int and 0 <= one < 2**64 for one in values):
        # Elsewhere Arrow finds a type that holds both.
        return field, [pa.scalar(one, kind) for one in values]
    return field, values


def named_columns(
    expression: pc.Expression,
    comparisons: Sequence[Sequence[Comparison]],
    schema: Schema,
    arrow_schema: pa.Schema,
) -> list[str]:
    """The columns that filters need; those of an expression are found by leaving out one after the other.

    Raises:
        ValueError, TypeError: it does not fit the columns.
    """
    if comparisons:
        return list(dict.fromkeys(one.name for group in comparisons for one in group))
    empty = arrow_schema.empty_table()
    try:
        result = project(expression, empty).type
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowKeyError) as error:
        missing = re.search(r"No match for FieldRef\.Name\((.*?)\) in", str(error))
        said = schema.explain_missing(missing[1]) if missing else str(error).splitlines()[0]
        raise ValueError(f"filters: {said}") from error
    if result != pa.bool_():
        raise TypeError(f"filters must say yes or no of each row; {say_filters(expression)} gives {result}.")
    names = list(schema.names)
    with contextlib.suppress(UnicodeDecodeError):
        # What a name's text does not even stand in is not meant; the rest is tried.
        text = str(expression)
        names = [name for name in names if name in text]
    for name in list(names):
        fewer = [one for one in names if one != name]
        try:
            project(expression, empty.select(fewer))
        except pa.ArrowInvalid:
            continue
        names = fewer
    for name in names:
        if schema[name].shape != ():
            raise ValueError(f"filters: column {name!r} is a tensor; only columns of single values can be compared.")
    return names or [schema.names[0]]


def project(expression: pc.Expression, table: pa.Table) -> pa.ChunkedArray:
    """What an expression gives for the rows of a table."""
    from pyarrow import acero

    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    project = acero.Declaration("project", acero.ProjectNodeOptions([expression], [_MASK]), inputs=[source])
    return project.to_table(use_threads=False).column(_MASK)


def evaluate(expression: pc.Expression, table: pa.Table) -> Mask:
    """Which rows of a table an expression keeps; null keeps none."""
    return np.asarray(pc.fill_null(project(expression, table), False)).astype(np.bool_, copy=False)


def bounded_columns(filters: Any, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """The columns whose least and largest values may rule out rows: NaN is in no range.

    Comparisons say themselves where it passes; what an expression does with it is not known.
    """
    if not isinstance(filters, pc.Expression):
        return list(names)
    constant = {name for name, column in (manifest.source_columns or {}).items() if column.values is not None}
    floats = {name for name in names if manifest.schema[name].dtype.startswith("float")} - constant
    return [name for name in names if name not in floats or not _may_have_nan(manifest, name)]
