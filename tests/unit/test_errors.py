"""The tree of errors: built from a message alone, and the same on the other side of a process."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

import converter
from converter import errors
from converter.deltatorch import MovedWarning
from converter.petastorm import PetastormDeprecationWarning

CLASSES = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.ConverterError)
]
TREE = {
    errors.ConverterError: (Exception,),
    errors.SourceError: (errors.ConverterError,),
    errors.UnsupportedTypeError: (errors.SourceError, TypeError),
    errors.NullValueError: (errors.SourceError, ValueError),
    errors.SourceChangedError: (errors.SourceError,),
    errors.CacheError: (errors.ConverterError,),
    errors.CacheNotConfiguredError: (errors.CacheError, ValueError),
    errors.CacheNotOwnedError: (errors.CacheError,),
    errors.CacheCorruptError: (errors.CacheError,),
    errors.ReadError: (errors.ConverterError,),
    errors.EmptyShardError: (errors.ConverterError,),
    errors.StateMismatchError: (errors.ConverterError, ValueError),
    errors.MissingDependencyError: (errors.ConverterError, ImportError),
}
ATTRIBUTES = {
    errors.SourceError: ("column", "path"),
    errors.UnsupportedTypeError: ("column", "path"),
    errors.NullValueError: ("column", "path"),
    errors.SourceChangedError: ("column", "path"),
    errors.CacheError: ("path",),
    errors.CacheNotConfiguredError: ("path",),
    errors.CacheNotOwnedError: ("path",),
    errors.CacheCorruptError: ("path",),
    errors.ReadError: ("path", "row_group"),
}


def test_the_tree_is_the_one_that_is_drawn() -> None:
    assert set(CLASSES) == set(TREE)
    for kind, parents in TREE.items():
        assert set(kind.__bases__) == set(parents), kind


def test_the_drawing_names_every_class() -> None:
    for kind in CLASSES:
        assert kind.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_is_public(kind: type[errors.ConverterError]) -> None:
    assert getattr(converter, kind.__name__) is kind
    assert kind.__name__ in converter.__all__


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_can_be_built_from_its_message_alone(kind: type[errors.ConverterError]) -> None:
    error = kind("what happened")
    assert str(error) == "what happened"
    assert error.args == ("what happened",)
    assert all(getattr(error, name) is None for name in ATTRIBUTES.get(kind, ()))
    with pytest.raises(errors.ConverterError, match=r"^what happened$"):
        raise error


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_pickles_with_its_attributes(kind: type[errors.ConverterError]) -> None:
    values = {name: 7 if name == "row_group" else f"the {name}" for name in ATTRIBUTES.get(kind, ())}
    error = pickle.loads(pickle.dumps(kind("what happened", **values)))
    assert type(error) is kind
    assert str(error) == "what happened"
    assert {name: getattr(error, name) for name in values} == values


def test_the_warnings_of_old_interfaces_are_ours_and_answer_to_old_filters() -> None:
    assert issubclass(errors.ConverterWarning, UserWarning)
    assert converter.ConverterWarning is errors.ConverterWarning
    for kind in (PetastormDeprecationWarning, MovedWarning):
        assert issubclass(kind, errors.ConverterWarning)
        assert issubclass(kind, DeprecationWarning)


WARNINGS = [
    (path, call)
    for path in sorted(Path(converter.__file__).parent.rglob("*.py"))
    for call in ast.walk(ast.parse(path.read_text()))
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "warnings.warn"
]


@pytest.mark.parametrize(("path", "call"), WARNINGS, ids=lambda part: getattr(part, "name", ""))
def test_every_warning_names_its_class(path: Path, call: ast.Call) -> None:
    """The class is a subclass of ConverterWarning that is defined in the package, so one filter holds for all."""
    category = ast.unparse(call.args[1])
    ours = {"ConverterWarning", "PetastormDeprecationWarning", "MovedWarning", "TextAsBytesWarning"}
    assert category in ours
    assert any(keyword.arg == "stacklevel" for keyword in call.keywords)
