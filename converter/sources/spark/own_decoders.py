"""How an entry with a `cache_key` knows a decoder of the user's own: by what it holds, its code, and what that imports.

Executors are sent classes of notebooks and scripts as they are in this process; classes of other modules they import.
So the former are hashed as they are, with the globals that they use, and of the latter the files. Not seen is what a
decoder reads from elsewhere, the code of installed packages, and modules whose names are put together at run time.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import hashlib
import importlib.util
import io
import logging
import os
import pkgutil
import re
import sys
import sysconfig
import time
import types
import uuid
import warnings
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, TypeVar

from converter.cache.leases import process_start
from converter.decoders import is_own
from converter.decoders.decoder import Decoder

logger = logging.getLogger(__name__)

_LIBRARIES = ("converter", "py4j", "pyspark")
_INSTALLED = ("dist-packages", "site-packages")
_MODULE = re.compile(r"\.*[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""A text that may be the name of a module, for importlib."""

_DYNAMIC = (b"__getattr__", b"__import__", b"import_module", b"lazy_loader")
"""In code that may import any module of its package."""

_IMPORTED_AT = time.time()


def hashes_of_own(decoders: Mapping[str, Decoder]) -> dict[str, str]:
    """For each decoder of the user's own, by column, a hash of what it holds and of its code."""
    return {name: _hash_of_own(name, decoder) for name, decoder in decoders.items() if is_own(decoder)}


def _hash_of_own(name: str, decoder: Decoder) -> str:
    pickled, modules = _describe(decoder)
    content, sent_by_spark = hashlib.sha256(pickled), _files_of_spark()
    for module in _modules_of(decoder, modules):
        content.update(f"{module.name}/{len(module.code or b'')}/".encode() + (module.code or b""))
        is_changed = module.changed >= _begun_at() and not (sent_by_spark and module.path.is_relative_to(sent_by_spark))
        if module.code is None or is_changed:
            # It may have been imported before, and executors may have imported either.
            logger.info(
                "What the decoder of column %r makes is written for this call alone: the code of the module %s %s.",
                name,
                module.name,
                "is in no file" if module.code is None else "was changed after this program began",
            )
            content.update(uuid.uuid4().bytes)
    return content.hexdigest()[:32]


def _describe(decoder: Decoder) -> tuple[bytes, set[str]]:
    """A decoder as executors get it, without what differs in each process, and the modules that it is made of.

    Reaches into: pyspark.cloudpickle's numbers of classes and its dictionaries of globals (pyspark 3.5 to 4.3).
    Without it: what a decoder of a script or a notebook has made is found by no other process, and written anew.
    """
    from pyspark import cloudpickle

    modules: set[str] = set()
    numbered: list[Any] = []
    reduce_code: Any = cloudpickle.CloudPickler.dispatch_table[types.CodeType]

    def reduce_without_place(code: types.CodeType) -> Any:
        constants = tuple(map(_in_order, code.co_consts))
        return reduce_code(code.replace(co_filename="", co_firstlineno=1, co_linetable=b"", co_consts=constants))

    class Description(cloudpickle.CloudPickler):
        dispatch_table: Any = ChainMap(  # noqa: RUF012 (as its base's)
            {types.CodeType: reduce_without_place}, cloudpickle.CloudPickler.dispatch_table
        )

        def reducer_override(self, found: Any) -> Any:
            if isinstance(found, types.ModuleType):
                modules.add(found.__name__)
            elif isinstance(found, (type, types.FunctionType)):
                modules.add(found.__module__)
            if isinstance(found, (type, TypeVar)):
                numbered.append(found)
            reduced = super().reducer_override(found)  # type: ignore[no-untyped-call]
            if isinstance(found, types.FunctionType) and isinstance(reduced, tuple):
                modules.update(_imported_in(found.__code__, found.__globals__.get("__package__") or ""))
                used = reduced[2][1]["__globals__"]
                modules.update(_names_in(used.values()))
                used.update({name: _in_order(value) for name, value in used.items()})
            return reduced

    modules.update(_names_in(getattr(decoder, "__dict__", {}).values()))
    into = io.BytesIO()
    pickler: Any = Description(into)  # type: ignore[no-untyped-call]
    # Else the path of a script would be among its globals.
    pickler.globals_ref = {id(vars(sys.modules["__main__"])): {"__name__": "__main__"}}
    pickler.dump(decoder)
    pickled = into.getvalue()
    known: Any = sys.modules.get("pyspark.cloudpickle.cloudpickle")
    # Another thread may pickle as well.
    with getattr(known, "_DYNAMIC_CLASS_TRACKER_LOCK", contextlib.nullcontext()):
        numbers = getattr(known, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})
        found = {numbers.get(one) for one in numbered} - {None}
    for number in found:
        pickled = pickled.replace(str(number).encode(), b"")
    return pickled, modules


def _in_order(value: Any) -> Any:
    """A set of texts and numbers as a list: texts are in another order in each process."""
    is_plain = type(value) in (set, frozenset) and all(type(one) in (str, bytes, int, float) for one in value)
    return sorted(map(repr, value)) if is_plain else value


def _imported_in(code: types.CodeType, package: str) -> set[str]:
    """The modules that a function may import."""
    names = _names_in(code.co_consts)
    imported, level = "", 0
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            imported = _absolute(instruction.argval, level, package)
            names.add(imported)
        elif instruction.opname == "IMPORT_FROM":
            names.add(f"{imported}.{instruction.argval}")
        elif isinstance(instruction.argval, int) and instruction.opname.startswith("LOAD_"):
            # Before the names that are wanted, which are a tuple or None.
            level = instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _imported_in(constant, package)
    return names


def _names_in(values: Iterable[Any]) -> set[str]:
    """The texts among values that may be names of modules, also of the form `.name`."""
    return {value for value in values if isinstance(value, str) and _MODULE.fullmatch(value)}


def _absolute(name: str, level: int, package: str) -> str:
    """The module that an import of a level stands for; nothing for one that would fail."""
    try:
        return importlib.util.resolve_name("." * level + name, package)
    except ImportError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """A module with code that Python's own library and Spark do not have."""

    name: str
    path: Path
    code: bytes | None
    """Its file, which may lie in an archive; None if there is none."""

    changed: float
    """When that was changed last, in seconds since 1970."""


def _modules_of(decoder: Decoder, names: set[str]) -> Iterator[_Module]:
    """The modules that make up a decoder's classes, and the user's among `names`; with all of the user's they import.

    The user's are those of the decoder's package, and those that are not installed.
    """
    own_package = type(decoder).__module__.partition(".")[0]
    of_classes = {one.__module__ for one in type(decoder).__mro__}
    found: dict[str, _Module] = {}
    relative = {name for name in names if isinstance(name, str) and name.startswith(".")}
    left, seen = {name for name in of_classes | names if isinstance(name, str)} - relative, {"__main__"}
    while left:
        name = left.pop()
        if name in seen or not name or name.startswith("."):
            continue
        seen.add(name)
        left.add(name.rpartition(".")[0])
        spec = _find(name)
        origin = None if spec is None else spec.origin or getattr(_find(name.partition(".")[0]), "origin", None)
        is_package = spec is not None and spec.submodule_search_locations is not None
        if spec is None or (origin is None and is_package) or _is_standard(name, origin):
            continue
        is_users = name.partition(".")[0] == own_package or not set(_INSTALLED) & set(Path(origin or "").parts)
        if is_users or name in of_classes:
            found[name] = _read(name, spec)
        if is_users:
            package = name if is_package else name.rpartition(".")[0]
            left |= _imports_of(found[name].code or b"", package)
            if is_package:
                left |= {f"{name}.{one.lstrip('.')}" for one in relative}
            places = getattr(_find(package), "submodule_search_locations", None) if package else None
            if places is not None and any(word in (found[name].code or b"") for word in _DYNAMIC):
                left |= {info.name for info in pkgutil.iter_modules(places, f"{package}.")}
    return iter(sorted(found.values(), key=lambda module: module.name))


def _find(name: str) -> Any:
    """The spec of a module, without importing it; None if there is none."""
    module = sys.modules.get(name)
    if module is not None:
        origin = getattr(module, "__file__", None)
        return getattr(module, "__spec__", None) or ModuleSpec(name, getattr(module, "__loader__", None), origin=origin)
    package = name.rpartition(".")[0]
    parent = _find(package) if package else None
    if package and (parent is None or parent.submodule_search_locations is None):
        return None
    for finder in sys.meta_path:
        # As an import does it: packages that are installed in place have finders of their own.
        find_spec: Any = getattr(finder, "find_spec", lambda *_: None)
        with contextlib.suppress(Exception):
            if (spec := find_spec(name, parent and parent.submodule_search_locations)) is not None:
                return spec
    return None


def _is_standard(name: str, origin: str | None) -> bool:
    """Whether a module is of Python's library, of Spark or of this package."""
    if name.partition(".")[0] in _LIBRARIES or origin in ("built-in", "frozen"):
        return True
    path = Path(origin or "")
    is_below = any(path.is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib"))
    return is_below and not set(_INSTALLED) & set(path.parts)


def _read(name: str, spec: ModuleSpec) -> _Module:
    """The file of a module."""
    if spec.origin is None:
        return _Module(name=name, path=Path(), code=None, changed=0)
    get_data: Any = getattr(spec.loader, "get_data", lambda path: Path(path).read_bytes())
    try:
        code = bytes(get_data(spec.origin))
    except (OSError, ImportError):
        code = None
    path = Path(spec.origin)
    # What lies in an archive is changed with it. And a link may lead to another release by now.
    places = [next(one for one in (path, *path.parents) if one.exists()).stat()]
    places += [one.lstat() for one in (path, *path.parents) if one.is_symlink()]
    changed = max(max(times.st_mtime, times.st_ctime) for times in places)
    return _Module(name=name, path=path, code=code, changed=changed)


def _files_of_spark() -> Path | None:
    """The folder into which Spark copies what `addPyFile` and `--py-files` name, and where nobody edits it."""
    from pyspark import SparkFiles

    try:
        return Path(SparkFiles.getRootDirectory())
    except Exception:  # noqa: BLE001 (there is none over Connect)
        return None


def _imports_of(code: bytes, package: str) -> set[str]:
    """The modules that code may import, in functions also; none for what is not Python's source."""
    try:
        with warnings.catch_warnings():
            # What is said of escapes could be an error otherwise.
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node.module or "", node.level, package)
            # What is imported may be a module of a package.
            names.update((module, *(f"{module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.Constant):
            for name in _names_in([node.value]):
                named = name.lstrip(".")
                names.add(_absolute(named, len(name) - len(named), package))
    return names


@functools.cache
def _begun_at() -> float:
    """When this process began, in seconds since 1970, or when it imported this, if its parent did so before a fork."""
    try:
        seconds = int(process_start(os.getpid()) or "") / os.sysconf("SC_CLK_TCK")
        return min(time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - seconds), _IMPORTED_AT)
    except (OSError, AttributeError, ValueError):
        return _IMPORTED_AT
