"""Every error and warning that the package makes on purpose, read from its source, and the page that lists them.

    python -m tests.documented_errors

writes converter/messages.md, which the reference shows as `converter.messages`.
"""

from __future__ import annotations

import ast
import builtins
import html
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import converter
from tests.call_graph import PACKAGE, CallGraph, Module, functions_of, modules

PAGE = PACKAGE / "messages.md"

NOT_SHOWN = {
    "converter.portable.packing._packed",
    "AttributeError", "CancelledError", "EOFError", "Exit", "GivenUpError", "OutOfRangeError",
    "StopIteration", "UntilError",
}  # fmt: skip
"""Errors, and functions with one, that are caught by another part of the package, by Python or by a framework."""

PARTS = {
    "converter.parsed_footer", "converter.thrift", "converter.manifest", "converter.statistics", "converter.declared",
    "converter.categories", "converter.schema", "converter.portable", "converter.storage", "converter.decoders",
    "converter.reading", "converter.cache", "converter.sources", "converter.scaling", "converter.petastorm",
    "converter.frameworks.tensorflow", "converter.lineage",
}  # fmt: skip
"""Modules with texts that come only as a part of another message: those that do not end with a full stop."""

OLD_INTERFACES = ("converter.petastorm", "converter.deltatorch")
"""Packages whose texts are those of the libraries that they replace, as far as those had some."""

_MAX_CALLS = 4
_CONVERTER = "converter.dataset.DatasetConverter."
_CALLS = {
    "make_spark_converter": ("converter.make.make_spark_converter",),
    "make_parquet_converter": ("converter.make.make_parquet_converter",),
    "make_delta_converter": ("converter.make.make_delta_converter",),
    "open_converter": ("converter.make.open_converter",),
    "sweep": ("converter.make.sweep",),
    "mix": ("converter.mixed.mix", "converter.mixed.MixedConverter.with_weights"),
    "start_local_spark": ("converter.sources.spark.local.start_local_spark",),
    **{
        name: (f"{_CONVERTER}{name}",)
        for name in (
            "where", "split", "sequences", "balance", "sample", "to_spark", "head", "verify", "quantiles", "histogram",
            "describe", "statistics", "plan", "delete", "mlflow_dataset",
            "make_torch_dataloader", "make_tf_dataset", "make_batch_reader",
        )
    },
    "a loader's batches": tuple(
        f"converter.{name}"
        for name in (
            "frameworks.numpy.BatchReader.__iter__", "frameworks.numpy.BatchReader._batches",
            "frameworks.torch.loader.TorchDataLoader.__iter__", "frameworks.torch.loader.TorchDataLoader._batches",
            "frameworks.torch.loader.TorchDataLoader._batches_of_workers", "frameworks.torch.loader._Runs.__iter__",
            "frameworks.tensorflow.dataset.TFDataset.generate", "frameworks.tensorflow.iterator.EagerIterator.__next__",
            "loading.epochs.Epochs.__iter__", "loading.epochs.Epochs.iterate",
        )
    ),
    "a loader's state": tuple(
        f"converter.{name}"
        for name in (
            "frameworks.numpy.BatchReader.state_dict", "frameworks.numpy.BatchReader.load_state_dict",
            "frameworks.torch.loader.TorchDataLoader.state_dict", "loading.epochs.Epochs.load_state_dict",
            "frameworks.tensorflow.dataset.TFDataset.state_dict", "loading.epochs.Epochs.state_dict",
            "state.check_state", "state.parse_state",
        )
    ),
    "train": ("converter.frameworks.transformers.train",),
}  # fmt: skip
"""What users call, and the functions that this is."""

_GROUPS = {
    "every loader": ("make_torch_dataloader", "make_tf_dataset", "make_batch_reader"),
    "every make_…_converter": ("make_spark_converter", "make_parquet_converter", "make_delta_converter"),
}

_ROOMS = {
    "converter.storage": "any call that reads or writes files",
    "converter.portable": "any call that reads or writes files",
    "converter.cache": "any call that uses a cache",
    "converter.reading": "any call that reads rows",
    "converter.exits": "any call that reads rows",
    "converter.commands": "the command converter",
    "converter.frameworks.lightning": "Trainer of Lightning",
    "converter.frameworks.tensorflow": "make_tf_dataset",
    "converter.frameworks.torch": "make_torch_dataloader",
    "converter.pickled": "unpickling a converter",
    "converter.arguments": "many calls",
    "converter.dataset": "any call of a converter",
    "converter.decoders": "`decode=`",
    "converter.holding": "any call of a converter",
    "converter.loading": "every loader",
    "converter.mixed": "`mix`, a mixture's loaders",
    "converter.parsed_footer": "any call that reads files",
    "converter.places": "any call that reads files",
    "converter.plan": "every loader",
    "converter.positions": "a loader's state",
    "converter.scans": "`where`, `split`, `filters=`",
    "converter.scans.draws": "`where`, `split`, `sequences`, `balance`, `sample`",
    "converter.schema": "many calls",
    "converter.shards": "every loader",
    "converter.state": "a loader's state",
    "converter.thrift": "any call that reads files",
}
"""What is called where the calls are not known, or many."""


@dataclass(frozen=True, kw_only=True, order=True)
class Message:
    """An error or a warning, as one place in the source makes it."""

    kind: str
    """Its class; empty where it is that of the error behind it, or that of a function which completes the text."""

    text: str
    """What it says; `‹name›` stands for a value."""

    function: str
    """Where it is made, with dots."""

    module: str
    """Its module."""

    @property
    def is_part(self) -> bool:
        """Whether it is only ever shown within another message: it has no sentence that begins or ends as one does."""
        is_known = any(self.function.startswith(f"{name}.") for name in PARTS)
        has_end = re.search(r"\.(?:\s|›*$|‹[A-Z])|‹(?:remedy|explain missing)›$", self.text)
        begins_large = re.match(r"[A-Z][a-z]+ ", self.text)
        return not self.kind or (is_known and not has_end and not begins_large)


@cache
def messages() -> tuple[Message, ...]:
    """All of them, sorted by class and text."""
    parsed = modules()
    kinds = _error_classes(parsed)
    made = {
        message for module in parsed for function, node in functions_of(module)
        for message in _made_in(module, function, node, kinds)
    }  # fmt: skip
    return tuple(sorted(made))


def _error_classes(parsed: Sequence[Module]) -> set[str]:
    """The names of Python's errors and warnings, and of the package's own."""
    kinds = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
    before = -1
    while len(kinds) > before:
        before = len(kinds)
        for module in parsed:
            kinds |= {
                node.name
                for node in ast.walk(module.tree)
                if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in kinds for base in node.bases)
            }
    return kinds


def _made_in(module: Module, function: str, node: ast.AST, kinds: set[str]) -> Iterator[Message]:
    """The messages that a function makes; the module itself makes none."""
    if isinstance(node, ast.Module):
        return
    texts = Texts(module, node)
    raised = {id(part.exc) for part in ast.walk(node) if isinstance(part, ast.Raise)}
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        kind = ast.unparse(call.func).rpartition(".")[2]
        if ast.unparse(call.func) == "warnings.warn":
            kind = ast.unparse(call.args[1]) if len(call.args) > 1 else "UserWarning"
        elif kind not in kinds:
            # A function that completes a text: `raise self.changed("…")`.
            kind = ""
            if id(call) not in raised:
                continue
        given = [text for argument in call.args if (text := texts.of(argument)) is not None]
        # Two words at least: all else is a name or an error's number.
        is_shown = kind not in NOT_SHOWN and function not in NOT_SHOWN
        if is_shown and given and " " in given[-1].strip("‹›"):
            text = re.sub(r"\s+", " ", given[-1]).strip()
            yield Message(kind=kind, text=text, function=function, module=module.name)


class Texts:
    """The texts in a function, with the values of variables that are texts themselves."""

    def __init__(self, module: Module, function: ast.AST) -> None:
        self._values: dict[str, list[ast.expr]] = defaultdict(list)
        for node in [*module.tree.body, *ast.walk(function)]:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._values[node.targets[0].id].append(node.value)
        for name, dotted in module.imports.items():
            # A constant of another module.
            if name.strip("_").isupper() and dotted in _constants():
                self._values[name].append(_constants()[dotted])

    def of(self, node: ast.expr) -> str | None:
        """A text as it is shown; None for what is no text."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.JoinedStr):
            return "".join(self._piece(part) for part in node.values)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.of(node.left), self.of(node.right)
            if left is not None or right is not None:
                return (left or f"‹{_name_of(node.left)}›") + (right or f"‹{_name_of(node.right)}›")
        if isinstance(node, ast.IfExp):
            return self._either([node.body, node.orelse])
        if isinstance(node, ast.Name) and (values := self._values.pop(node.id, None)):
            # Out of the way meanwhile, since a variable may be made of its old value.
            text = self._either(values)
            self._values[node.id] = values
            return text
        return None

    def _either(self, nodes: Sequence[ast.expr]) -> str | None:
        texts = [self.of(node) for node in nodes]
        if not texts or None in texts:
            return None
        different = list(dict.fromkeys(filter(None, texts)))
        if len(different) == 1 and len(texts) == 1:
            return different[0]
        return f"‹{' / '.join(text.strip() for text in different)}›".replace("‹ ", "‹") if different else ""

    def _piece(self, node: ast.expr) -> str:
        if not isinstance(node, ast.FormattedValue):
            return self.of(node) or ""
        number = self._number(node.value)
        if number is not None:
            return format(number, "" if node.format_spec is None else self.of(node.format_spec) or "")
        text = self.of(node.value)
        return f"‹{_name_of(node.value)}›" if text is None else text

    def _number(self, node: ast.expr) -> int | float | None:
        """The value of a constant that is a number."""
        values = self._values.get(node.id, []) if isinstance(node, ast.Name) else []
        value = values[0].value if len(values) == 1 and isinstance(values[0], ast.Constant) else None
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


@cache
def _constants() -> Mapping[str, ast.expr]:
    """The values of constants, by their names with dots."""
    return {
        f"{module.name}.{node.targets[0].id}": node.value
        for module in modules()
        for node in module.tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
    }


def _name_of(node: ast.expr) -> str:
    """A value's name in words."""
    if isinstance(node, ast.Attribute):
        return "class" if node.attr == "__name__" else node.attr.strip("_").replace("_", " ")
    if isinstance(node, ast.Name):
        return node.id.strip("_").replace("_", " ")
    if isinstance(node, ast.Call):
        return _name_of_call(node)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value.replace("_", " ")
    inner = {
        ast.Subscript: "value", ast.GeneratorExp: "elt", ast.ListComp: "elt", ast.IfExp: "body", ast.BinOp: "left",
        ast.Starred: "value", ast.UnaryOp: "operand", ast.JoinedStr: "", ast.NamedExpr: "value",
    }.get(type(node), "")  # fmt: skip
    return _name_of(getattr(node, inner)) if inner else "value"


def _name_of_call(node: ast.Call) -> str:
    """What a call that only forms a value is given, else the name of what it calls."""
    name = ast.unparse(node.func).rpartition(".")[2].strip("_")
    if name in _ONLY_FORM:
        return _name_of(node.args[-1]) if node.args else name
    if name in {"len", "sum", "count_nonzero"}:
        return "number"
    if name in {"isoformat", "strip", "rstrip", "partition", "pop", "geturl", "tolist", "as_py", "decode"}:
        assert isinstance(node.func, ast.Attribute)
        return _name_of(node.func.value)
    return name.replace("_", " ")


_ONLY_FORM = {
    "join", "map", "sorted", "repr", "list", "set", "tuple", "str", "min", "max", "round", "int", "dict", "text",
    "without_secrets", "hide_secrets", "shown_value", "shown_url", "shown", "unquote", "type", "getattr",
}  # fmt: skip
"""Functions that say nothing about a value but form it."""


@cache
def _calls_by_function() -> Mapping[str, tuple[str, ...]]:
    """For each function what users call to reach it."""
    graph = CallGraph(modules())
    calls: dict[str, list[str]] = defaultdict(list)
    for name, roots in _CALLS.items():
        for function in graph.reached_from(*roots):
            calls[function].append(name)
    return {function: tuple(names) for function, names in calls.items()}


def calls_of(message: Message) -> str:
    """What a user called, in a few words."""
    if message.function.startswith(OLD_INTERFACES):
        return f"`{message.module}`"
    room = next(
        (_ROOMS[name] for name in sorted(_ROOMS, reverse=True) if message.function.startswith(f"{name}.")), None
    )
    names = list(_calls_by_function().get(message.function, ()))
    for group, members in _GROUPS.items():
        if set(members) <= set(names):
            names = [group, *(name for name in names if name not in members)]
    if 0 < len(names) <= _MAX_CALLS:
        return ", ".join(name if " " in name else f"`{name}`" for name in names)
    return room or f"`{message.module}`"


def page() -> str:
    """The page, as Markdown."""
    whole = [message for message in messages() if not message.is_part]
    parts = [message for message in messages() if message.is_part]
    lines = [
        "<!-- Written by `python -m tests.documented_errors` from the source; a test compares them. -->",
        "",
        "`‹…›` stands for a value, or for one of several texts with `/` between them. Search this page for some words",
        "of a message that are no values. Texts of libraries, such as pyarrow's, are not here.",
        "",
    ]
    for kind, of_kind in groupby(whole, key=lambda message: message.kind):
        lines += [f"### {kind}", "", *_table(list(of_kind))]
    lines += [
        "### Parts of messages",
        "",
        "These stand within another message, after a colon or in parentheses, and say what is wrong with a file or",
        "a value.",
        "",
        *_table(parts),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[Message]) -> list[str]:
    shown = sorted({(calls_of(message), message.text) for message in rows})
    return ["| message | raised by |", "|---|---|", *(f"| {_cell(text)} | {calls} |" for calls, text in shown), ""]


def _cell(text: str) -> str:
    """A text as Markdown and HTML leave it alone, with as little as that takes: the reference searches it as it is."""
    return re.sub(r"[\\`*|~$]", lambda sign: f"&#{ord(sign[0])};", html.escape(text, quote=False))


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE}: {len(messages())} messages of {converter.__name__}")
