"""What a batch's keys are made of: columns of the table, their bytes as numbers, and functions of single values.

Fields are followed one after the other, as a row would be: a field reads what an earlier one of the same name has made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from converter.deltatorch.fields import FieldSpec, as_numbers, functions_of, shape_of

Function = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Values of all rows: a column of the table, or what functions make of another node's values."""

    column: str = ""
    """The column; empty if another node's values are taken."""

    shape: tuple[int, ...] | None = None
    """The shape of a row whose bytes are uint8 numbers; None if they are taken as they are."""

    parent: int = -1
    functions: tuple[Function, ...] = ()
    """Called for each value, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a batch is made."""

    columns: tuple[str, ...]
    """The columns that are read, each once."""

    nodes: tuple[Node, ...]
    """In the order in which a row is computed; parents come first."""

    keys: dict[str, int]
    """The node of each key of a batch, in order."""

    @property
    def has_functions(self) -> bool:
        """Whether something is called for each row."""
        return any(node.functions for node in self.nodes)


def make_recipe(fields: Sequence[FieldSpec]) -> Recipe:
    """The recipe of batches of fields.

    >>> recipe = make_recipe([FieldSpec("image", (28, 28), target_name="x"), FieldSpec("label")])
    >>> recipe.columns, recipe.keys, recipe.has_functions
    (('image', 'label'), {'image': 0, 'label': 1, 'x': 2}, False)
    """
    columns = tuple(dict.fromkeys(spec.name for spec in fields))
    nodes = [Node(column=name) for name in columns]
    keys = {name: number for number, name in enumerate(columns)}
    for spec in fields:
        number, functions = keys[spec.name], _functions_of(spec)
        shape, is_column = shape_of(spec), not nodes[number].functions and nodes[number].shape is None
        if shape is not None and is_column:
            nodes.append(Node(column=nodes[number].column, shape=shape))
            number = len(nodes) - 1
        elif shape is not None:
            functions = (_Numbers(shape), *functions)
        if functions:
            nodes.append(Node(parent=number, functions=functions))
            number = len(nodes) - 1
        keys[spec.target_name or spec.name] = number
    return Recipe(columns=columns, nodes=tuple(nodes), keys=keys)


def _functions_of(spec: FieldSpec) -> tuple[Function, ...]:
    functions = functions_of(spec)
    # A picture has no tensor form of its own.
    return (*functions, np.asarray) if spec.load_image_using_pil and spec.transform is None else functions


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Makes an array of the bytes that an earlier field returned."""

    shape: tuple[int, ...]

    def __call__(self, value: Any) -> Any:
        return as_numbers(value, self.shape)
