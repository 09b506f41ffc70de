"""What a reader does to rows before it hands them out: a user's function, and the schema that comes out of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from converter.errors import ConverterWarning
from converter.petastorm.unischema import Unischema, UnischemaField

EditedField = tuple[str, Any, tuple[int | None, ...], bool | None] | UnischemaField


def edit_field(
    name: str,
    numpy_dtype: Any,
    shape: tuple[int | None, ...],
    nullable: bool = False,
) -> EditedField:
    """A field that a transform adds or changes, for `edit_fields` of a `TransformSpec`.

    >>> edit_field("pixels", float, (28, 28))
    ('pixels', <class 'float'>, (28, 28), False)
    """
    return name, numpy_dtype, shape, nullable


class TransformSpec:
    """A function of rows, and how the schema changes by it.

    With `make_reader` the function takes one row as a dict and returns one; with `make_batch_reader` it takes and
    returns a pandas frame of a row group. What it returns must have the fields of the new schema.

    ```python
    from converter.petastorm import TransformSpec

    spec = TransformSpec(lambda row: {**row, "double": 2 * row["id"]}, edit_fields=[("double", int, (), False)])
    ```

    Args:
        func: the function; None if fields are only removed.
        edit_fields: fields that are added or changed, each as `(name, numpy_dtype, shape, nullable)`.
        removed_fields: names of fields that are not handed out.
        selected_fields: names of the fields that are handed out, in this order.

    Raises:
        ValueError: both `removed_fields` and `selected_fields` are given.
    """

    def __init__(
        self,
        func: Callable[[Any], Any] | None = None,
        edit_fields: Sequence[EditedField] | None = None,
        removed_fields: Sequence[str] | None = None,
        selected_fields: Sequence[str] | None = None,
    ) -> None:
        if removed_fields is not None and selected_fields is not None:
            raise ValueError("User can only specify one of removed_fields and selected_fields in TransformSpec.")
        self.func = func
        self.edit_fields = edit_fields or []
        self.removed_fields = removed_fields or []
        self.selected_fields = selected_fields


def transform_schema(schema: Unischema, transform_spec: TransformSpec) -> Unischema:
    """The schema of the rows that a transform makes of rows of `schema`. Names that are no fields are warned of."""
    _warn_of_unknown(transform_spec.removed_fields, schema.fields, "remove_fields")
    edited = [_edited(field) for field in transform_spec.edit_fields]
    gone = {field.name for field in edited} | set(transform_spec.removed_fields)
    fields = {name: field for name, field in schema.fields.items() if name not in gone}
    fields |= {field.name: field for field in edited}
    selected = transform_spec.selected_fields
    if selected is not None:
        _warn_of_unknown(selected, fields, "selected_fields")
        fields = {name: fields[name] for name in selected if name in fields}
    return schema.create_derived_schema("_transformed", fields.values())


def _edited(field: EditedField) -> UnischemaField:
    if isinstance(field, UnischemaField):
        return field._replace(codec=None)
    name, numpy_dtype, shape, nullable = field[:4]
    return UnischemaField(name, numpy_dtype, shape, None, nullable)


def _warn_of_unknown(names: Sequence[str], fields: Any, argument: str) -> None:
    unknown = [name for name in names if name not in fields]
    if unknown:
        warnings.warn(
            f"{argument} specified some field names that are not part of the schema. These field names will be ignored "
            f'"{", ".join(unknown)}".',
            ConverterWarning,
            stacklevel=3,
        )
