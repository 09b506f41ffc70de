"""A transform's schema has the fields that it declares, in their order."""

from __future__ import annotations

import numpy as np
import pytest

from converter.petastorm.codecs import NdarrayCodec
from converter.petastorm.transform import TransformSpec, edit_field, transform_schema
from converter.petastorm.unischema import Unischema, UnischemaField

TEXT = UnischemaField("text", np.str_, ())
WHOLE = UnischemaField("whole", np.int32, ())
MATRIX = UnischemaField("matrix", np.float64, (2, 2), NdarrayCodec(), True)
SCHEMA = Unischema("S", [TEXT, WHOLE, MATRIX])


def test_a_function_alone_changes_no_field() -> None:
    schema = transform_schema(SCHEMA, TransformSpec(lambda row: row))
    assert list(schema.fields.values()) == [TEXT, WHOLE, MATRIX]
    assert schema.matrix.codec is MATRIX.codec
    assert schema.__name__ == "S_transformed"


def test_edited_fields_stand_behind_the_others_without_a_codec() -> None:
    spec = TransformSpec(edit_fields=[edit_field("matrix", np.int8, (4,)), ("new", np.str_, (), True)])
    schema = transform_schema(SCHEMA, spec)
    assert list(schema.fields.values()) == [
        TEXT,
        WHOLE,
        UnischemaField("matrix", np.int8, (4,), None, False),
        UnischemaField("new", np.str_, (), None, True),
    ]
    assert schema.matrix.codec is None


def test_a_field_can_be_given_as_such() -> None:
    schema = transform_schema(SCHEMA, TransformSpec(edit_fields=[MATRIX._replace(name="other")]))
    assert schema.other == MATRIX._replace(name="other")
    assert schema.other.codec is None


def test_removed_fields_are_gone() -> None:
    assert list(transform_schema(SCHEMA, TransformSpec(removed_fields=["whole", "text"])).fields) == ["matrix"]


@pytest.mark.parametrize("selected", [["matrix", "text", "whole"], ["whole"], ["new", "text"], []])
def test_selected_fields_are_those_that_stay_in_their_order(selected: list[str]) -> None:
    spec = TransformSpec(edit_fields=[("new", np.int8, (), False)], selected_fields=selected)
    assert list(transform_schema(SCHEMA, spec).fields) == selected


def test_names_that_are_no_fields_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="remove_fields specified .* not part of the schema.*other"):
        schema = transform_schema(SCHEMA, TransformSpec(removed_fields=["text", "other"]))
    assert list(schema.fields) == ["whole", "matrix"]
    with pytest.warns(UserWarning, match="selected_fields specified .* not part of the schema.*other"):
        schema = transform_schema(SCHEMA, TransformSpec(selected_fields=["other", "text"]))
    assert list(schema.fields) == ["text"]


def test_fields_are_either_removed_or_selected() -> None:
    with pytest.raises(ValueError, match="only specify one of removed_fields and selected_fields"):
        TransformSpec(removed_fields=[], selected_fields=[])


def test_a_spec_has_empty_lists_for_what_is_not_given() -> None:
    spec = TransformSpec()
    assert (spec.func, spec.edit_fields, spec.removed_fields, spec.selected_fields) == (None, [], [], None)
    assert edit_field("a", np.int8, (2,)) == ("a", np.int8, (2,), False)
