"""The public names of the package, with their docstrings and examples, read from its source without importing it."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import converter

PACKAGE = Path(converter.__file__).parent

PAGES = {
    "converter": (),
    "converter.schema": ("Field", "Schema"),
    "converter.decoders": ("Decoder",),
    "converter.statistics": ("ColumnStatistics",),
    "converter.loading.forecast": ("LoaderPlan",),
    "converter.loading.stats": ("LoaderStats", "StageStats"),
    "converter.messages": (),
    "converter.frameworks.numpy": ("BatchReader",),
    "converter.frameworks.torch": ("TorchDataLoader",),
    "converter.frameworks.tensorflow": ("DatasetState", "DatasetStateCallback", "TFDataset"),
    "converter.frameworks.transformers": ("train",),
    "converter.plot": ("columns", "layout", "shuffle", "timeline"),
}
"""The pages of the reference, and the names on them beside `converter.__all__`: what public methods return."""

_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class PublicName:
    """A public function, class, method or property."""

    name: str
    docstring: str
    node: ast.FunctionDef | ast.ClassDef
    owner: PublicName | None = None

    @property
    def raises(self) -> bool:
        """Whether its own body has a `raise` with an error."""
        return isinstance(self.node, ast.FunctionDef) and any(
            isinstance(part, ast.Raise) and part.exc is not None for part in ast.walk(self.node)
        )

    @property
    def has_example(self) -> bool:
        """Whether its docstring has an example, or that of its class has one that uses it."""
        if ">>>" in self.docstring or python_blocks(self.docstring):
            return True
        examples = "" if self.owner is None else examples_of(self.owner.docstring)
        return re.search(rf"\.{self.name.rpartition('.')[2]}\b", examples) is not None


def examples_of(docstring: str) -> str:
    """The code in a docstring."""
    doctests = "\n".join(line for line in docstring.splitlines() if line.lstrip().startswith((">>>", "...")))
    return "\n".join([*python_blocks(docstring), doctests])


def python_blocks(text: str) -> list[str]:
    """The ```python blocks of a docstring or of a Markdown file."""
    return [textwrap.dedent(block) for _, block in _BLOCK.findall(text)]


def docstring_of(node: ast.FunctionDef | ast.ClassDef | ast.Module) -> str:
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")


def public_names() -> Iterator[PublicName]:
    """Every public function and class, and the public methods and properties of the classes."""
    wanted = {name for name in converter.__all__ if name != "__version__"}.union(*PAGES.values())
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in wanted:
                wanted.remove(node.name)
                owner = PublicName(name=node.name, docstring=docstring_of(node), node=node)
                yield owner
                if isinstance(node, ast.ClassDef):
                    yield from _members(node, owner)
    assert not wanted, f"not defined in converter: {sorted(wanted)}"


def _members(node: ast.ClassDef, owner: PublicName) -> Iterator[PublicName]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
            decorators = [ast.unparse(decorator) for decorator in part.decorator_list]
            if not any(decorator.endswith(".setter") for decorator in decorators):
                yield PublicName(name=f"{node.name}.{part.name}", docstring=docstring_of(part), node=part, owner=owner)
