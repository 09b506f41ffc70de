"""Private parts of other libraries are reached in a few named functions, which say what happens without them.

Such a function or class has two lines in its docstring:

    Reaches into: <what, with its dotted name> (<library and the versions it was tried with>).
    Without it: <what breaks, and what happens then>.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import converter

PACKAGE = Path(converter.__file__).parent

REACHES = {
    "frameworks.tensorflow.dataset.TFDataset._inputs": "TensorFlow",
    "frameworks.tensorflow.iterator.EagerIterator": "TensorFlow",
    "frameworks.tensorflow.iterator._find_eager_tensor": "TensorFlow",
    "frameworks.tensorflow.iterator._find_owned_iterator": "TensorFlow",
    "frameworks.tensorflow.saving.DatasetState._copy_trackable_to_cpu": "TensorFlow",
    "frameworks.lightning._end_those_that_had_ended": "Lightning",
    "frameworks.torch.loader.TorchDataLoader._end_workers": "torch",
    "frameworks.transformers._tell_batch_size": "Transformers",
    "frameworks.prompt._eagerly": "TensorFlow",
    "frameworks.torch.workers.is_starting_process": "CPython",
    "frameworks.torch.tensors._memory_of": "torch",
    "frameworks.torch.tensors._shared_memory": "torch",
    "frameworks.torch.workers._forget": "CPython",
    "frameworks.torch.workers._kill": "torch",
    "frameworks.torch.workers._leave_workers_to_parent": "torch",
    "frameworks.torch.workers._temp_dir": "CPython",
    "frameworks.torch.workers.check_temp_dir": "CPython",
    "frameworks.torch.workers._check_workers": "torch",
    "frameworks.torch.workers.end_begun": "torch",
    "frameworks.torch.workers.end_workers": "torch",
    "frameworks.torch.workers.end_broken": "torch",
    "holding.is_in_thread_pool": "CPython",
    "exits.register_before_thread_pools": "CPython",
    "loading.agreement._store_of_ranks": "torch",
    "garbage._freeze_and_collect_again": "CPython",
    "garbage.may_wait": "fsspec",
    "petastorm.etl.dataset_metadata.hadoop_configuration": "pyspark",
    "petastorm.etl.petastorm_generate_metadata._write_summary_of_row_groups": "pyspark",
    "portable.filesystems._keep_whole_paths": "hdfs-native",
    "portable.filesystems.close_filesystems": "CPython",
    "portable.filesystems._name_hadoop_user": "hdfs-native",
    "portable.filesystems._set_azure_retries": "azure-storage-blob",
    "portable.filesystems.mark_closed": "fsspec",
    "portable.filesystems.unsent_bytes": "fsspec",
    "portable.parquet_file._stop_writer": "pyarrow",
    "portable.redaction._held_in": "azure-identity",
    "portable.tasks.freeze_garbage_collector": "CPython",
    "reading.gather._rows_at_every_byte": "NumPy",
    "reading.stored._read_tops": "pyarrow",
    "sources.spark.confs._identity_of": "pyspark",
    "sources.spark.delta_version.find_delta_version": "Spark",
    "sources.spark.identity.gather_evidence": "Spark",
    "sources.spark.identity.inputs_of": "Delta",
    "sources.spark.input_files.listings_of": "Spark",
    "sources.spark.jobs._cancel": "Spark",
    "sources.spark.own_decoders._describe": "pyspark",
    "sources.spark.run._is_stopped": "pyspark",
    "sources.spark.session._is_local_list": "pyspark",
    "sources.spark.session._open_arrow_stream": "pyspark",
    "sources.spark.session.explain": "pyspark",
    "sources.spark.session.java_frame": "pyspark",
    "sources.spark.session.java_packages": "pyspark",
    "sources.spark.session.travels_by_value": "pyspark",
    "storage.azure._default_place_of_spark": "pyspark",
    "storage.store.detach_finalizers": "CPython",
}
"""Every function and class that reaches into another library, and which one. A new reach is entered here."""

UNDOCUMENTED = frozenset(
    {
        "as_strided", "collectAsArrowToPython", "get_spawning_popen", "is_open", "register_pickle_by_value",
        "setAccessible", "unsafeVolatileSnapshot",
    }
)  # fmt: skip
"""Names without an underscore that are no public interface."""

DOTTED = frozenset({"gc.freeze"})
"""What changes the whole process."""

OVERRIDDEN = frozenset({"_copy_trackable_to_cpu", "_element_spec", "_inputs", "_type_spec", "_iterator_resource"})
"""Methods and attributes of ours that another library looks for under a private name."""

DOCUMENTED = frozenset({"_asdict", "_exit", "_fields", "_make", "_replace"})
"""Of named tuples, and of os."""

PRIVATE_MODULES = re.compile(r"^(tensorflow\.python|.*\._)")

_ACCESSORS = frozenset({"getattr", "setattr", "hasattr", "delattr"})


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in DOCUMENTED


def is_registered(node: ast.AST) -> bool:
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return False
    docstring = ast.get_docstring(node) or ""
    return all(re.search(rf"^{line}: \S", docstring, re.MULTILINE) for line in ("Reaches into", "Without it"))


def names_defined(tree: ast.AST) -> Iterator[str]:
    """The private names that a module of ours defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def is_own(value: ast.AST) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


@dataclass(frozen=True)
class Walk:
    """What a module reaches into."""

    registered: dict[str, str]
    """Function or class -> what it says that it reaches into."""

    loose: list[str]
    """Reaches outside of such functions: `line: text`."""


def walk(text: str, own: frozenset[str]) -> Walk:
    found = Walk({}, [])
    _walk(ast.parse(text), "", False, own, found)
    lines = text.splitlines()
    spans = [
        range(node.lineno, (node.end_lineno or 0) + 1) for node in ast.walk(ast.parse(text)) if is_registered(node)
    ]
    for number, line in enumerate(lines, 1):
        if "SLF001" in line and not any(number in span for span in spans):
            found.loose.append(f"{number}: {line.strip()}")
    return found


def _walk(node: ast.AST, name: str, is_inside: bool, own: frozenset[str], found: Walk) -> None:
    if is_registered(node):
        assert isinstance(node, (ast.FunctionDef, ast.ClassDef))
        found.registered[name] = ast.get_docstring(node) or ""
        is_inside = True
    if not is_inside and reaches(node, own):
        found.loose.append(f"{getattr(node, 'lineno', 0)}: {ast.unparse(node).splitlines()[0]}")
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, (ast.FunctionDef, ast.ClassDef))
        child_name = f"{name}.{child.name}".lstrip(".") if is_named else name  # type: ignore[attr-defined]
        _walk(child, child_name, is_inside, own, found)


def reaches(node: ast.AST, own: frozenset[str]) -> bool:
    """Whether this node by itself reaches into another library."""
    if isinstance(node, ast.Attribute):
        if ast.unparse(node) in DOTTED or node.attr in UNDOCUMENTED - own or node.attr in OVERRIDDEN:
            return True
        return is_private(node.attr) and node.attr not in own and not is_own(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ACCESSORS:
        target, name = node.args[0], node.args[1]
        if not isinstance(name, ast.Constant) or is_own(target):
            return False
        return str(name.value) in UNDOCUMENTED or (is_private(str(name.value)) and name.value not in own)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        if module.startswith("converter"):
            return False
        names = {alias.name for alias in node.names}
        return bool(PRIVATE_MODULES.match(module) or names & UNDOCUMENTED or any(map(is_private, names)))
    if isinstance(node, ast.Import):
        return any(PRIVATE_MODULES.match(alias.name) for alias in node.names)
    return isinstance(node, ast.FunctionDef) and node.name in OVERRIDDEN


MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
}


@cache
def walked() -> dict[str, Walk]:
    own = frozenset(name for text in MODULES.values() for name in names_defined(ast.parse(text)) if is_private(name))
    return {name: walk(text, own) for name, text in MODULES.items()}


@pytest.mark.parametrize("module", MODULES)
def test_a_private_part_is_reached_in_a_function_that_says_so(module: str) -> None:
    assert not walked()[module].loose


def test_every_reach_is_entered_with_its_library() -> None:
    docstrings = {
        f"{module}.{name}": docstring
        for module, found in walked().items()
        for name, docstring in found.registered.items()
    }
    assert sorted(docstrings) == sorted(REACHES)
    for name, library in REACHES.items():
        line = re.search(r"^Reaches into: (.*?)^Without it: ", docstrings[name], re.MULTILINE | re.DOTALL)
        assert line is not None
        assert re.search(rf"\([^()]*{library} \d[^()]*\)\.$", line[1].strip()), f"{name} needs ({library} <versions>)."


@pytest.mark.parametrize(
    "code",
    [
        "loader._shutdown_workers()",
        "super()._private()",
        "from tensorflow.python.eager import context",
        "import tensorflow.python.eager.context",
        "from pyarrow._fs import FileSystem",
        "from threading import _register_atexit",
        "getattr(threading, '_register_atexit')",
        "hasattr(df, '_jdf')",
        "setattr(stream, '_closed', True)",
        "df._jdf.queryExecution()",
        "field.setAccessible(True)",
        "snapshot = log.unsafeVolatileSnapshot()",
        "np.lib.stride_tricks.as_strided(array, shape)",
        "gc.freeze()",
        "cloudpickle.register_pickle_by_value(module)",
        "writer.is_open = False",
        "class A(B):\n    def _type_spec(self): ...",
        "x = 1  # noqa: SLF001",
    ],
)
def test_a_loose_reach_is_noticed_and_a_named_one_is_not(code: str) -> None:
    assert walk(code, frozenset()).loose
    docstring = '    """Reach.\n\n    Reaches into: a part (library 1).\n    Without it: slower.\n    """\n'
    function = "def reach():\n" + docstring + "\n".join(f"    {line}" for line in code.splitlines())
    assert walk(function, frozenset()) == Walk({"reach": ast.get_docstring(ast.parse(function).body[0])}, [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "code",
    [
        "self._own = 1\nother._own",
        "def _helper(): ...\nmodule._helper()",
        "value.__dict__",
        "getattr(self, '_anything', None)",
        "from converter.plan import _helper",
        "loader.is_opened",
    ],
)
def test_what_is_ours_or_public_is_no_reach(code: str) -> None:
    own = frozenset(names_defined(ast.parse(code)))
    assert not walk(code, own).loose
