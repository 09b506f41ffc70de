"""Checks a user's filters against the schema, and turns them into one Arrow expression; opens no file.

Tuples compare as Spark does (NaN equals NaN and is above every number; null passes nothing), Arrow's expressions as
Arrow does.
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
from converter.places import innermost, is_bytes_type, is_list
from converter.scans.values import are_numbers, decimals_of, fitting, is_many, is_nan_value, plain_value, value_of
from converter.schema import Field, Schema
from converter.selection import Mask

Filters: TypeAlias = pc.Expression | Sequence[Any]
"""What `pyarrow.parquet.read_table` takes: tuples `(column, operator, value)`, lists of them, or an expression."""

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "<=": operator.le,
    ">=": operator.ge,
}  # fmt: skip
_MEMBERSHIP = ("in", "not in")
_CONTAINS = {"contains": "==", "contains any": "in"}
"""Operators for columns of lists, and how one of the elements must compare."""

_OPERATORS = (*_COMPARISONS, *_MEMBERSHIP, *_CONTAINS)
_OF_LISTS = (*_MEMBERSHIP, "contains any")
"""Operators whose value is a list."""

_MAX_LISTED = 100
"""Bounds are not compared with the values of a longer `in`."""

_MAX_SHOWN = 200
"""Signs of filters in a message."""

LEAST, MOST, _MASK = "least", "most", "mask"


def list_values(filters: Filters) -> Filters:
    """The same filters with lists for the values of `in`, `not in` and `contains any`, which may be iterators.

    >>> list_values([("day", "in", iter([1, 2])), ("x", ">", 0)])
    [('day', 'in', [1, 2]), ('x', '>', 0)]
    """
    if not isinstance(filters, (list, tuple)):
        return filters
    listed: list[Any] = []
    for item in filters:
        if isinstance(item, (list, tuple)) and item and not isinstance(item[0], str):
            listed.append(list_values(item))
        elif isinstance(item, tuple) and len(item) == 3 and item[1] in _OF_LISTS and is_many(item[2]):
            listed.append((*item[:2], list(item[2])))
        else:
            listed.append(item)
    return listed if isinstance(filters, list) else tuple(listed)


def say_filters(filters: Any) -> str:
    """Filters as messages show them: in one line, which is cut if it is long."""
    text = _text_of(filters)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _text_of(filters: Any) -> str:
    try:
        return str(filters)
    except (UnicodeDecodeError, OverflowError):
        # Arrow cuts long texts within a character, and has days beyond Python's.
        return "given"


class Comparison(NamedTuple):
    """One comparison of a column with a value, as expressions of Arrow's."""

    name: str
    keeps: pc.Expression
    """Which rows pass."""

    may_keep: pc.Expression | None
    """Whether one of several rows may pass, as an expression of `LEAST` and `MOST`; None if these cannot tell."""

    elements: pc.Expression | None = None
    """For lists, which elements pass; `keeps` is then the column `flag_name` of whether one of them does."""

    flag_name: str = ""


def comparisons_of(filters: Any, manifest: Manifest, arrow_schema: pa.Schema) -> list[list[Comparison]]:
    """The filters as checked comparisons: all of an inner list must pass, and any list. Empty for an expression."""
    schema = manifest.value_schema
    if isinstance(filters, pc.Expression):
        if "FieldPath(" in _text_of(filters) and not any("FieldPath(" in name for name in schema.names):
            raise ValueError(f"filters: {filters} names a column by its position; use its name.")
        return []
    what = "filters must be tuples (column, operator, value) in a list, lists of them, or a pyarrow.compute expression"
    if isinstance(filters, (str, Mapping)) or not isinstance(filters, Sequence) or not filters:
        raise TypeError(f"{what}; got {filters!r:.80}.")
    groups = [filters] if all(isinstance(item, tuple) for item in filters) else list(filters)
    comparisons: list[list[Comparison]] = []
    for group in groups:
        if isinstance(group, (str, tuple)) or not isinstance(group, Sequence) or not group:
            raise TypeError(f"{what}; got {filters!r:.80}.")
        checked: list[Comparison] = []
        for item in group:
            if not isinstance(item, tuple) or len(item) != 3 or not isinstance(item[0], str):
                raise TypeError(f"{what}; got {item!r:.80}.")
            name, sign, value = item
            if name not in schema:
                raise ValueError(f"filters: {schema.explain_missing(name)}")
            if sign not in _OPERATORS:
                raise ValueError(f"filters: {sign!r} is no operator; use one of {', '.join(_OPERATORS)}.")
            if sign in _OF_LISTS and not is_many(value):
                raise TypeError(f"filters: {name!r} {sign} needs a list of values, got {value!r:.80}.")
            if sign == "contains" and is_many(value):
                raise TypeError(f"filters: {name!r} contains needs one value, got {value!r:.80}; use 'contains any'.")
            if (schema[name].shape != ()) != (sign in _CONTAINS):
                raise _wrong_operator(name, is_list=schema[name].shape != ())
        # NaN that fails one comparison fails the whole group: then bounds also decide the column's other comparisons.
        without_nan = {name for name, sign, value in group if sign not in _CONTAINS and not _nan_passes(sign, value)}
        for name, sign, value in group:
            if sign in _CONTAINS:
                kind = element_type(schema[name], arrow_schema.field(name).type)
                flag_name = f"\0{len(comparisons)} {len(checked)} {name}"
                checked.append(_contains(name, sign, value, kind, flag_name))
            elif sign == "not in" and not list(value):
                # As in Spark 4 and in SQL, everything passes, null too.
                checked.append(Comparison(name, pc.scalar(True), None))
            elif pa.types.is_floating(arrow_schema.field(name).type):
                may_have_nan = name not in without_nan and _may_have_nan(manifest, name)
                checked.append(_compare_floats(name, sign, value, arrow_schema, may_have_nan=may_have_nan))
            else:
                checked.append(_compare(name, sign, value, arrow_schema))
        comparisons.append(checked)
    return comparisons


def _wrong_operator(name: str, *, is_list: bool) -> ValueError:
    if is_list:
        return ValueError(
            f"filters: column {name!r} is a tensor; only columns of single values can be compared. For lists there are "
            f"({name!r}, 'contains', value) and ({name!r}, 'contains any', values)."
        )
    return ValueError(f"filters: column {name!r} has single values, and 'contains' is for lists; use '=' or 'in'.")


def element_type(field: Field, kind: pa.DataType) -> pa.DataType:
    """The type of the elements of a column of lists, which a cache may hold as bytes."""
    if is_list(kind):
        return innermost(kind)
    times = {"datetime64[D]": pa.date32(), "datetime64[us]": pa.timestamp("us")}
    return times.get(field.dtype) or pa.from_numpy_dtype(field.stored_dtype)


def _contains(name: str, sign: str, value: Any, kind: pa.DataType, flag_name: str) -> Comparison:
    """Whether one of a list's elements equals a value, or one of several."""
    of_elements = pa.schema([(name, kind)])
    if pa.types.is_floating(kind):
        compared = _compare_floats(name, _CONTAINS[sign], value, of_elements, may_have_nan=True)
    else:
        compared = _compare(name, _CONTAINS[sign], value, of_elements)
    return Comparison(name, pc.field(flag_name), None, compared.keeps, flag_name)


def _nan_passes(sign: str, value: Any) -> bool:
    """Whether NaN passes a comparison by Spark's rule."""
    values = list(value) if sign in _MEMBERSHIP else [value]
    has_nan = any(map(is_nan_value, values))
    if sign == "in":
        return has_nan
    if any(plain_value(member) is None for member in values):
        return False
    return sign in (("=", "==", "<=", ">=") if has_nan else (">", ">=", "!=", "not in"))


def expression_of(filters: Any, comparisons: Sequence[Sequence[Comparison]]) -> pc.Expression:
    """All comparisons as one expression of Arrow's."""
    if not comparisons:
        return filters
    groups = [functools.reduce(operator.and_, [comparison.keeps for comparison in group]) for group in comparisons]
    return functools.reduce(operator.or_, groups)


def _compare(name: str, sign: str, value: Any, arrow_schema: pa.Schema) -> Comparison:
    """One comparison, tried on no rows, so that an error names its column."""
    kind = arrow_schema.field(name).type
    members = value if sign in _MEMBERSHIP else [value]
    if pa.types.is_decimal(kind):
        doubles = [plain_value(member) for member in members]
        if any(isinstance(member, float) and math.isfinite(member) for member in doubles):
            return _compare_doubles(name, sign, doubles, arrow_schema)
    may_keep = None
    try:
        given = [plain_value(member) for member in members]
        has_none = any(member is None for member in given)
        held_sign, values = fitting(sign, kind, [member for member in given if member is not None])
        field, values = _comparable(name, kind, values)
        if held_sign in _MEMBERSHIP:
            plain = [value_of(member) if isinstance(member, pa.Scalar) else member for member in values]
            listed = values[0].type if values and isinstance(values[0], pa.Scalar) else kind
            comparison = field.isin(pa.array(plain, listed))
            # Else null, which is in no list, would pass.
            comparison = comparison if held_sign == "in" else ~comparison & field.is_valid()
            if has_none and held_sign == "not in":
                # As in SQL: every value might equal the unknown one, so none passes.
                comparison = comparison & field.is_null()
        elif has_none:
            comparison = _COMPARISONS[held_sign](field, pa.scalar(None, kind))
        else:
            comparison = _COMPARISONS[held_sign](field, values[0])
        project(comparison, pa.schema([arrow_schema.field(name)]).empty_table())
        if values and not has_none:
            may_keep = _may_keep(held_sign, values, [_comparable(bound, kind, values)[0] for bound in (LEAST, MOST)])
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        # Arrow says which of its functions it has not.
        reason = _values_of(kind) if isinstance(error, pa.ArrowException) else str(error).splitlines()[0]
        raise ValueError(
            f"filters: column {name!r} ({kind}) cannot be compared with {sign} {value!r}: {reason.rstrip('.')}."
        ) from error
    return Comparison(name, comparison, may_keep)


def _values_of(kind: pa.DataType) -> str:
    """What a column of a type can be compared with, in words."""
    if pa.types.is_boolean(kind):
        return "its values are True and False."
    if pa.types.is_date(kind):
        return "its values are days, such as datetime.date(2026, 1, 31)."
    if pa.types.is_timestamp(kind):
        return "its values are times, such as datetime.datetime(2026, 1, 31, 12)."
    if is_bytes_type(kind):
        return "its values are bytes, also if they are decoded later: rows are chosen before."
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "its values are numbers."
    return "its values are texts."


def _may_have_nan(manifest: Manifest, name: str) -> bool:
    """Whether a column of floats may hold NaN: bounds cannot tell, a count of them can."""
    statistics = manifest.statistics.get(name)
    return statistics is None or statistics.closed is None or statistics.nan_count > 0


def _compare_floats(name: str, sign: str, value: Any, arrow_schema: pa.Schema, *, may_have_nan: bool) -> Comparison:
    """A comparison of floats by Spark's rule: NaN equals NaN and is above every other number.

    If NaN passes, bounds of the other numbers rule nothing out.
    """
    is_list = sign in _MEMBERSHIP
    values = list(value) if is_list else [value]
    numbers = [member for member in values if not is_nan_value(member)]
    is_nan, is_value = pc.field(name).is_nan(), pc.field(name).is_valid()
    if len(numbers) == len(values):
        comparison = _compare(name, sign, value, arrow_schema)
        if not (may_have_nan and _nan_passes(sign, value)):
            return comparison
        return Comparison(name, comparison.keeps | is_nan, None)
    if is_list:
        keeps = _compare(name, sign, numbers, arrow_schema).keeps
        return Comparison(name, keeps | is_nan if sign == "in" else keeps & ~is_nan, None)
    keeps = {
        ">": pc.scalar(False), ">=": is_nan, "=": is_nan, "==": is_nan, "!=": ~is_nan, "<": ~is_nan, "<=": is_value,
    }[sign]  # fmt: skip
    return Comparison(name, keeps & is_value, None)


def _compare_doubles(name: str, sign: str, values: Sequence[Any], arrow_schema: pa.Schema) -> Comparison:
    """A comparison of decimals with doubles: a decimal equals the double nearest to it, which a batch would hold."""
    scale = arrow_schema.field(name).type.scale
    is_within = sign in ("=", "==", "in")
    inner, outer = (operator.and_, operator.or_) if is_within else (operator.or_, operator.and_)
    signs = (">=", "<=") if is_within else ("<", ">")

    def compare_range(least: Decimal, most: Decimal) -> Comparison:
        return _combine(inner, [_compare(name, *end, arrow_schema) for end in zip(signs, (least, most), strict=True)])

    if sign not in _MEMBERSHIP:
        least, most = decimals_of(values[0], scale)
        if sign in ("=", "==", "!="):
            return compare_range(least, most)
        return _compare(name, sign, least if sign in ("<", ">=") else most, arrow_schema)
    exact = [member for member in values if not isinstance(member, float)]
    ranges = [decimals_of(member, scale) for member in values if isinstance(member, float) and math.isfinite(member)]
    exact += [least for least, most in ranges if least == most]
    wide = [compare_range(least, most) for least, most in ranges if least < most]
    return _combine(outer, [_compare(name, sign, exact, arrow_schema), *wide])


def _combine(join: Callable[[Any, Any], Any], comparisons: Sequence[Comparison]) -> Comparison:
    """All comparisons (`operator.and_`) or any of them (`operator.or_`) of one column."""
    bounded = [comparison.may_keep for comparison in comparisons if comparison.may_keep is not None]
    can_tell = bounded and (join is operator.and_ or len(bounded) == len(comparisons))
    keeps = functools.reduce(join, [comparison.keeps for comparison in comparisons])
    return Comparison(comparisons[0].name, keeps, functools.reduce(join, bounded) if can_tell else None)


def _may_keep(sign: str, values: Sequence[Any], bounds: Sequence[pc.Expression]) -> pc.Expression | None:
    """Whether a value between bounds may pass a comparison; None if they cannot tell."""
    least, most = bounds
    if sign in ("<", "<="):
        return _COMPARISONS[sign](least, values[0])
    if sign in (">", ">="):
        return _COMPARISONS[sign](most, values[0])
    if sign == "!=":
        return (least != values[0]) | (most != values[0])
    if sign == "not in" or len(values) > _MAX_LISTED:
        return None
    return functools.reduce(operator.or_, [(least <= value) & (most >= value) for value in values])


def _comparable(name: str, kind: pa.DataType, values: list[Any]) -> tuple[pc.Expression, list[Any]]:
    """A column and values of one type, because Arrow's own choice may narrow floats.

    A float is rounded like the column was, so a double equals the float that was made from it.
    """
    field = pc.field(name)
    if pa.types.is_floating(kind) and are_numbers(values):
        numbers = [float(value) for value in values]
        # For lists, behind the others: Arrow's `isin` tells the two zeros apart.
        zeros = [0.0, -0.0] if 0.0 in numbers else []
        return field, [pa.scalar(number, kind) for number in (*numbers, *zeros)]
    if pa.types.is_uint64(kind) and all(type(value) is int and 0 <= value < 2**64 for value in values):
        # For all other integers Arrow finds a type that holds both.
        return field, [pa.scalar(value, kind) for value in values]
    return field, values


def named_columns(
    expression: pc.Expression,
    comparisons: Sequence[Sequence[Comparison]],
    schema: Schema,
    arrow_schema: pa.Schema,
) -> list[str]:
    """The columns that filters need; for an expression, those without which it fails.

    Raises:
        ValueError, TypeError: it does not fit the columns.
    """
    if comparisons:
        return list(dict.fromkeys(comparison.name for group in comparisons for comparison in group))
    empty = arrow_schema.empty_table()
    try:
        result = project(expression, empty).type
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowKeyError) as error:
        missing = re.search(r"No match for FieldRef\.Name\((.*?)\) in", str(error))
        why = schema.explain_missing(missing[1]) if missing else str(error).splitlines()[0]
        raise ValueError(f"filters: {why.rstrip('.')}.") from error
    if result != pa.bool_():
        raise TypeError(f"filters must give true or false for each row; {say_filters(expression)} gives {result}.")
    names = list(schema.names)
    with contextlib.suppress(UnicodeDecodeError):
        # A column whose name is not in the text is not used; the others are tried.
        text = str(expression)
        names = [name for name in names if name in text]
    for name in list(names):
        fewer = [other for other in names if other != name]
        try:
            project(expression, empty.select(fewer))
        except pa.ArrowInvalid:
            continue
        names = fewer
    for name in names:
        if schema[name].shape != ():
            raise _wrong_operator(name, is_list=True)
    return names or [schema.names[0]]


def project(expression: pc.Expression, table: pa.Table) -> pa.ChunkedArray:
    """The values of an expression for the rows of a table."""
    from pyarrow import acero

    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    project = acero.Declaration("project", acero.ProjectNodeOptions([expression], [_MASK]), inputs=[source])
    return project.to_table(use_threads=False).column(_MASK)


def evaluate(expression: pc.Expression, table: pa.Table) -> Mask:
    """Which rows of a table an expression keeps; null keeps none."""
    return np.asarray(pc.fill_null(project(expression, table), False)).astype(np.bool_, copy=False)


def bounded_columns(filters: Any, manifest: Manifest, names: Sequence[str]) -> list[str]:
    """The columns whose least and largest values may rule out rows.

    In an expression, floats that may hold NaN are left out: NaN is outside all bounds. Comparisons handle it.
    """
    # The bounds in the files are those of codes.
    names = [name for name in names if name not in manifest.categories or not manifest.categories[name].are_coded]
    # Those of lists are of their elements, null lists aside.
    names = [name for name in names if manifest.schema[name].shape == ()]
    if not isinstance(filters, pc.Expression):
        return names
    constant = {name for name, column in (manifest.source_columns or {}).items() if column.values is not None}
    floats = {name for name in names if manifest.schema[name].dtype.startswith("float")} - constant
    return [name for name in names if name not in floats or not _may_have_nan(manifest, name)]
