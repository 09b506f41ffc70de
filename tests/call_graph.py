"""Which functions of the package a public one can reach, read from the source without running it.

Names are resolved through imports. A method of an object whose class is not known is that of the one class with such a
method, among the modules that this one imports; if several have it, it is left out. So a few uses are not seen.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import converter

PACKAGE = Path(converter.__file__).parent

_EVERYDAY = {
    "add", "append", "column_names", "columns", "count", "dtype", "encode", "field", "find", "get", "join", "max",
    "mean", "min", "name", "ndim", "num_columns", "num_rows", "put", "real", "remove", "run", "schema", "select",
    "shape", "size", "slice", "split", "statistics", "std", "take", "validate", "values",
}  # fmt: skip
"""Methods that objects of other libraries have too."""


@dataclass(kw_only=True)
class Module:
    """One file of the package."""

    name: str
    tree: ast.Module
    imports: dict[str, str] = field(default_factory=dict)
    """What each imported name stands for, with dots."""


Function = tuple[str, ast.AST]
"""Its name with dots, such as `converter.make.open_converter` or `converter.dataset.DatasetConverter.head`."""


@cache
def modules() -> tuple[Module, ...]:
    """All modules of the package."""
    return tuple(_module_of(path) for path in sorted(PACKAGE.rglob("*.py")))


def _module_of(path: Path) -> Module:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    module = Module(name=name, tree=ast.parse(path.read_text()))
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("converter"):
            for alias in node.names:
                module.imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return module


def functions_of(module: Module) -> Iterator[Function]:
    """The functions and methods of a module; what is defined inside one belongs to it."""
    yield f"{module.name}.<module>", module.tree
    for node in module.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{module.name}.{node.name}", node
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"{module.name}.{node.name}.{part.name}", part


class CallGraph:
    """What each function of the package uses."""

    def __init__(self, parsed: Sequence[Module]) -> None:
        self._modules = {module.name: module for module in parsed}
        self.functions: dict[str, ast.AST] = {}
        self._module_of: dict[str, Module] = {}
        self._owners: Mapping[str, list[str]] = defaultdict(list)
        self._bases: dict[str, list[str]] = {}
        for module in parsed:
            for name, node in functions_of(module):
                self.functions[name] = node
                self._module_of[name] = module
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef):
                    owner = f"{module.name}.{node.name}"
                    self._bases[owner] = [self._resolve(module, ast.unparse(base)) for base in node.bases]
                    for part in node.body:
                        if isinstance(part, ast.FunctionDef):
                            self._owners[part.name].append(owner)
        self._uses: dict[str, set[str]] = {}
        self._near: dict[str, set[str]] = {}

    def reached_from(self, *roots: str) -> set[str]:
        """Every function that these can end up in, and they themselves."""
        reached: set[str] = set()
        waiting = list(roots)
        while waiting:
            name = waiting.pop()
            if name not in reached and name in self.functions:
                reached.add(name)
                waiting += self._used_by(name)
        return reached

    def _used_by(self, name: str) -> set[str]:
        if name not in self._uses:
            module = self._module_of[name]
            owner = name.rpartition(".")[0]
            used: set[str] = set()
            own = _names_within(self.functions[name])
            for node in ast.walk(self.functions[name]):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in own:
                    used |= self._defined(self._resolve(module, node.id))
                elif isinstance(node, ast.Attribute):
                    used |= self._attribute(module, owner, node)
            self._uses[name] = used
        return self._uses[name]

    def _attribute(self, module: Module, owner: str, node: ast.Attribute) -> set[str]:
        if isinstance(node.value, ast.Name):
            if node.value.id in {"self", "cls"}:
                own = self._method(owner, node.attr)
                if own is not None:
                    return {own}
            elif known := self._defined(self._resolve(module, f"{node.value.id}.{node.attr}")):
                return known
        if node.attr in _EVERYDAY or node.attr.startswith("__"):
            return set()
        near = self._imported(module.name)
        owners = [each for each in self._owners.get(node.attr, []) if each.rpartition(".")[0] in near]
        return {f"{owners[0]}.{node.attr}"} if len(owners) == 1 else set()

    def _imported(self, name: str) -> set[str]:
        """The modules of the package that one imports, and those that they import."""
        if name not in self._near:
            near = self._near[name] = {name}
            waiting = [name]
            while waiting:
                for target in self._modules[waiting.pop()].imports.values():
                    found = target if target in self._modules else target.rpartition(".")[0]
                    if found in self._modules and found not in near:
                        near.add(found)
                        waiting.append(found)
        return self._near[name]

    def _method(self, owner: str, name: str) -> str | None:
        """The method that an object of a class has, its own or a base's."""
        if f"{owner}.{name}" in self.functions:
            return f"{owner}.{name}"
        return next((found for base in self._bases.get(owner, []) if (found := self._method(base, name))), None)

    def _resolve(self, module: Module, dotted: str) -> str:
        first, dot, rest = dotted.partition(".")
        return f"{module.imports.get(first, f'{module.name}.{first}')}{dot}{rest}"

    def _defined(self, name: str) -> set[str]:
        """The functions that a name stands for: a class stands for its constructor."""
        if name in self.functions:
            return {name}
        constructor = {made for part in ("__init__", "__post_init__") if (made := self._method(name, part))}
        # A name may be imported from a package that imports it itself.
        owner, _, last = name.rpartition(".")
        again = self._modules[owner].imports.get(last) if owner in self._modules else None
        return constructor or (self._defined(again) if again not in (None, name) else set())


def _names_within(function: ast.AST) -> set[str]:
    """The arguments and variables of a function, which are not the package's functions of these names."""
    if isinstance(function, ast.Module):
        return set()
    stored = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
