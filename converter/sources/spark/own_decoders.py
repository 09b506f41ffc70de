"""What an entry with a `cache_key` knows of a decoder of the user's own: what it holds, and its code.

With a `cache_key` the user promises the rows, whatever query and code made them. A decoder is an option, too, and with
another option an entry is another one. So its pickle counts, as the executors get it: classes of notebooks and scripts
as they are in this process, with the globals that they use. Other classes, functions and modules are named there; the
files of those that are the user's count as well. What these files import is not followed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import os
import pickletools
import sys
import sysconfig
import time
import types
import uuid
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from converter.cache.leases import process_start
from converter.decoders import is_own
from converter.decoders.decoder import Decoder

logger = logging.getLogger(__name__)

_LIBRARIES = frozenset({"__main__", "converter", "py4j", "pyspark", *sys.builtin_module_names})
_INSTALLED = ("dist-packages", "site-packages")
_IMPORTED_AT = time.time()


def hashes_of_own(decoders: Mapping[str, Decoder]) -> dict[str, str]:
    """For each decoder of the user's own, by column, a hash of what it holds and of its code."""
    return {name: _hash_of_own(name, decoder) for name, decoder in decoders.items() if is_own(decoder)}


def _hash_of_own(name: str, decoder: Decoder) -> str:
    pickled, doubts = _describe(decoder)
    content = hashlib.sha256(pickled)
    for module in _modules_of(decoder, pickled):
        content.update(f"{module.name}/{len(module.code or b'')}/".encode() + (module.code or b""))
        if module.doubt is not None:
            doubts.append(f"the code of the module {module.name} {module.doubt}")
    for doubt in doubts:
        logger.info("What the decoder of column %r makes is written for this call alone: %s.", name, doubt)
        content.update(uuid.uuid4().bytes)
    return content.hexdigest()[:32]


def _describe(decoder: Decoder) -> tuple[bytes, list[str]]:
    """A decoder as executors get it, without what differs in each process, and what of it is not in there.

    Reaches into: pyspark.cloudpickle's numbers of classes and its dictionaries of globals (pyspark 3.5 to 4.3).
    Without it: what a decoder of a script or a notebook has made is found by no other process, and written anew.
    """
    from pyspark import cloudpickle

    doubts: list[str] = []
    numbered: set[int] = set()
    reduce_code: Any = cloudpickle.CloudPickler.dispatch_table[types.CodeType]

    def reduce_without_place(code: types.CodeType) -> Any:
        constants = tuple(map(_in_order, code.co_consts))
        return reduce_code(code.replace(co_filename="", co_firstlineno=1, co_linetable=b"", co_consts=constants))

    class Description(cloudpickle.CloudPickler):
        dispatch_table: Any = ChainMap(  # noqa: RUF012 (as its base's)
            {types.CodeType: reduce_without_place}, cloudpickle.CloudPickler.dispatch_table
        )

        def reducer_override(self, found: Any) -> Any:
            if isinstance(found, (type, TypeVar)):
                numbered.add(id(found))
            if type(found).__module__.startswith("pyspark.") and type(found).__name__ == "Broadcast":
                doubts.append("of a broadcast variable only Spark knows the value")
            reduced = super().reducer_override(found)  # type: ignore[no-untyped-call]
            if isinstance(found, types.FunctionType) and isinstance(reduced, tuple):
                used = reduced[2][1]["__globals__"]
                used.update({name: _in_order(value) for name, value in used.items()})
            return reduced

    into = io.BytesIO()
    pickler: Any = Description(into)  # type: ignore[no-untyped-call]
    # Else the path of a script would be among its globals.
    pickler.globals_ref = {id(vars(sys.modules["__main__"])): {"__name__": "__main__"}}
    pickler.dump(decoder)
    pickled = into.getvalue()
    known: Any = sys.modules.get("pyspark.cloudpickle.cloudpickle")
    # Another thread may pickle as well.
    with getattr(known, "_DYNAMIC_CLASS_TRACKER_LOCK", contextlib.nullcontext()):
        numbers = dict(getattr(known, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {}))
    for number in {number for one, number in numbers.items() if id(one) in numbered}:
        pickled = pickled.replace(str(number).encode(), b"0" * len(str(number)))
    return pickled, doubts


def _in_order(value: Any) -> Any:
    """A set of texts and numbers as what makes it: texts are in another order in each process."""
    is_plain = type(value) in (set, frozenset) and all(type(one) in (str, bytes, int, float) for one in value)
    return (type(value), sorted(map(repr, value))) if is_plain else value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """A module with code of the user's."""

    name: str
    code: bytes | None
    """Its file; None if there is none."""

    doubt: str | None
    """Why the executors may have other code."""


def _modules_of(decoder: Decoder, pickled: bytes) -> Iterator[_Module]:
    """The modules of a decoder's classes, and those of the user's that its pickle names.

    The user's are those of the decoder's package, and those that are not installed.
    """
    of_classes = {one.__module__ for one in type(decoder).__mro__}
    own_package = type(decoder).__module__.partition(".")[0]
    # The modules of functions and classes are among the texts.
    texts = {text for _, text, _ in pickletools.genops(pickled) if isinstance(text, str)}
    for name in sorted((texts & sys.modules.keys()) | of_classes):
        package, file = name.partition(".")[0], _file_of(name)
        is_namespace = file is None and "__path__" in _known_of(name)
        if is_namespace or package in _LIBRARIES or _is_standard(file):
            continue
        is_installed = set(_INSTALLED) & set((file or _file_of(package) or Path()).parts)
        if not is_installed or name in of_classes or package == own_package:
            yield _read(name, file)


def _known_of(name: str) -> Mapping[str, Any]:
    """What a module has; of its own, because lazy ones would import more if they were asked."""
    return getattr(sys.modules.get(name), "__dict__", {})


def _file_of(name: str) -> Path | None:
    """The file of a module, which may lie in an archive; None if it has none."""
    known = _known_of(name)
    for origin in (getattr(known.get("__spec__"), "origin", None), known.get("__file__")):
        if isinstance(origin, str) and os.path.isabs(origin):
            return Path(origin)
    return None


def _is_standard(file: Path | None) -> bool:
    """Whether a module is of Python's library."""
    if file is None or set(_INSTALLED) & set(file.parts):
        return False
    return any(file.is_relative_to(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib"))


def _read(name: str, file: Path | None) -> _Module:
    """The code of a module, and whether this process or the executors may have imported other code."""
    if file is None:
        return _Module(name=name, code=None, doubt="is in no file")
    loader: Any = _known_of(name).get("__loader__")
    try:
        code = bytes(loader.get_data(str(file)) if hasattr(loader, "get_data") else file.read_bytes())
        # What lies in an archive is changed with it. And a link may lead to another release by now.
        places = [next(one for one in (file, *file.parents) if one.exists()).stat()]
        places += [one.lstat() for one in (file, *file.parents) if one.is_symlink()]
    except Exception as error:  # noqa: BLE001 (those of archives have errors of their own)
        return _Module(name=name, code=None, doubt=f"cannot be read: {type(error).__name__}: {error}")
    sent_by_spark = _files_of_spark()
    is_sent = sent_by_spark is not None and file.is_relative_to(sent_by_spark)
    is_changed = max(max(times.st_mtime, times.st_ctime) for times in places) >= _begun_at() and not is_sent
    return _Module(name=name, code=code, doubt="was changed after this program began" if is_changed else None)


def _files_of_spark() -> Path | None:
    """The folder into which Spark copies what `addPyFile` and `--py-files` name, and where nobody edits it."""
    from pyspark import SparkFiles

    try:
        return Path(SparkFiles.getRootDirectory())
    except Exception:  # noqa: BLE001 (there is none over Connect)
        return None


@functools.cache
def _begun_at() -> float:
    """When this process began, in seconds since 1970, or when it imported this, if its parent did so before a fork."""
    try:
        seconds = int(process_start(os.getpid()) or "") / os.sysconf("SC_CLK_TCK")
        return min(time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - seconds), _IMPORTED_AT)
    except (OSError, AttributeError, ValueError):
        return _IMPORTED_AT
