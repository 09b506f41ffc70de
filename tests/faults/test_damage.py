"""Broken files, a full disk, a store that fails: an error by name or success, and never half an entry that opens."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from converter import open_converter, sweep
from converter.cache import entries, leases, roots, sweeps
from converter.dataset import DatasetConverter
from converter.errors import CacheCorruptError, CacheError, ConverterError, SourceChangedError
from converter.make import hold_entry
from converter.manifest import Manifest
from converter.sources.spark import write
from converter.storage import opening
from converter.storage.directory import FileInfo, Storage
from converter.storage.local import LocalStorage
from tests.faults.small_entries import (
    KEY,
    OTHER_KEY,
    commit_entry,
    ids_of,
    leave_entry,
    make_converter,
    make_old,
    tree,
    write_data,
)
from tests.processes import run_python, start_python

ROOT = roots.DIRECTORY
HEX = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def entry(cache_dir: Path) -> Path:
    """A committed entry that nobody holds."""
    leave_entry(cache_dir)
    return cache_dir / ROOT / KEY


def _assert_no_lease_is_left(entry: Path) -> None:
    assert not list(entry.glob("lease-*")), "a lease of a failed open is left"
    assert not leases.heartbeat._leases


def _assert_one_sweep_removes_all(cache_dir: Path) -> None:
    for path in cache_dir.rglob("*"):
        if path.is_file():
            make_old(path, 4 * leases.RENEW_SECONDS)
    sweep(cache_dir, kept=True)
    assert set(tree(cache_dir)) == {ROOT, f"{ROOT}/.owner"}


def _assert_can_be_made_again(cache_dir: Path) -> None:
    """What `make_spark_converter(cache_key=…)` does: use what is whole, write again what is not."""
    root = roots.open_root(str(cache_dir))
    adopted = write._adopt(root, KEY)
    if adopted is None:
        attempt = entries.begin(root, KEY, application_id="app-2")
        adopted = entries.commit(root, attempt, write_data(root, attempt, is_kept=True))
    adopted.release()
    with open_converter(str(cache_dir / ROOT / KEY)) as converter:
        assert ids_of(converter) == list(range(len(converter)))


# The manifest ----------------------------------------------------------------------


def _set(*keys: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        part: Any = document
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = to

    return change


def _drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        part: Any = document
        for key in keys[:-1]:
            part = part[key]
        del part[keys[-1]]

    return change


TORN: dict[str, bytes | Callable[[bytes], bytes]] = {
    "empty": b"",
    "cut": lambda data: data[: len(data) // 2],
    "cut-at-the-last-byte": lambda data: data[:-1],
    "zeros": bytes(1000),
    "no-text": lambda data: b"\xff\xfe\x00" + data,
    "pickle": b"\x80\x04\x95.",
    "null": b"null",
    "list": b"[]",
    "number": b"1",
    "empty-object": b"{}",
    "doubled": lambda data: data + data,
    "deep": b"[" * 200_000,
    "not-a-number": lambda data: data.replace(b'"num_rows":24', b'"num_rows":NaN'),
    "infinity": lambda data: data.replace(b'"num_rows":24', b'"num_rows":1e999'),
}

CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "rows": _set("num_rows", to=25),
    "negative-rows": _set("row_groups", "rows", to=[25, -1]),
    "rows-are-text": _set("row_groups", "rows", to=["12", "twelve"]),
    "rows-are-huge": _set("row_groups", "rows", to=[2**70, 0]),
    "rows-are-nested": _set("row_groups", "rows", to=[[12], [12]]),
    "rows-are-ragged": _set("row_groups", "rows", to=[[12], 12]),
    "rows-are-fractions": _set("row_groups", "rows", to=[12.5, 11.5]),
    "one-row-group-more": _set("row_groups", "file", to=[0, 0, 1]),
    "row-group-of-no-file": _set("row_groups", "file", to=[0, 2]),
    "row-groups-out-of-order": _set("row_groups", "file", to=[1, 0]),
    "no-files": _set("files", to={"name": [], "bytes": []}),
    "nothing-at-all": lambda document: document.update(
        num_rows=0, files={"name": [], "bytes": []}, row_groups={"file": [], "rows": [], "bytes": []}
    ),
    "one-size-more": _set("files", "bytes", to=[1, 2, 3]),
    "same-file-twice": lambda document: document["files"].update(name=[document["files"]["name"][0]] * 2),
    "files-of-two-attempts": _set("files", "name", 0, to=f"data-{HEX}/part-00000-00000000-0000.parquet"),
    "names-are-numbers": _set("files", "name", to=[1, 2]),
    "names-are-null": _set("files", "name", to=None),
    "no-schema": _drop("schema"),
    "no-fingerprint": _drop("fingerprint"),
    "no-version": _drop("format_version"),
    "version-is-text": _set("format_version", to="2"),
    "version-is-null": _set("format_version", to=None),
    "version-zero": _set("format_version", to=0),
    "dtype-unknown": lambda document: _fields(document)[0].update(dtype="float33"),
    "dtype-object": lambda document: _fields(document)[0].update(dtype="object"),
    "shape-negative": lambda document: _fields(document)[0].update(shape=[-1]),
    "shape-is-text": lambda document: _fields(document)[0].update(shape="x"),
    "float-dtype-unknown": _set("float_dtype", to="float33"),
    "column-twice": lambda document: _fields(document)[1].update(name="id"),
    "statistics-of-no-column": lambda document: document["statistics"].update(y=document["statistics"]["x"]),
    "statistics-miss-a-column": lambda document: document["statistics"].pop("x"),
    "statistics-are-text": _set("statistics", "x", to="x"),
}


def _fields(document: dict[str, Any]) -> list[dict[str, Any]]:
    schema = document["schema"]
    found = schema["fields"] if isinstance(schema, dict) else schema
    assert isinstance(found, list)
    return found


def _assert_is_corrupt(entry: Path) -> None:
    with pytest.raises(CacheCorruptError, match=r"is not a manifest that this package|several writes") as caught:
        open_converter(str(entry))
    assert str(caught.value.path).endswith(f"{KEY}/manifest.json")
    _assert_no_lease_is_left(entry)


@pytest.mark.parametrize("damage", TORN.values(), ids=TORN.keys())
def test_a_torn_manifest_is_said_to_be_corrupt_and_goes(
    damage: bytes | Callable[[bytes], bytes], entry: Path, cache_dir: Path
) -> None:
    manifest = entry / "manifest.json"
    before = manifest.read_bytes()
    manifest.write_bytes(damage if isinstance(damage, bytes) else damage(before))
    assert manifest.read_bytes() != before
    _assert_is_corrupt(entry)
    _assert_one_sweep_removes_all(cache_dir)
    _assert_can_be_made_again(cache_dir)


@pytest.mark.parametrize("damage", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_manifest_that_contradicts_itself_is_said_to_be_corrupt(
    damage: Callable[[dict[str, Any]], None], entry: Path, cache_dir: Path
) -> None:
    document = json.loads((entry / "manifest.json").read_bytes())
    damage(document)
    (entry / "manifest.json").write_text(json.dumps(document))
    _assert_is_corrupt(entry)
    _assert_can_be_made_again(cache_dir)


def test_a_corrupt_manifest_does_not_keep_the_key_from_being_written(entry: Path, cache_dir: Path) -> None:
    (entry / "manifest.json").write_bytes(b"{")
    _assert_can_be_made_again(cache_dir)


def test_a_manifest_that_tears_while_another_is_written_costs_neither_the_lease_nor_the_thread(
    entry: Path, cache_dir: Path
) -> None:
    root = roots.open_root(str(cache_dir))
    attempt = entries.begin(root, KEY, application_id="app-1")
    manifest = write_data(root, attempt)
    (entry / "manifest.json").write_bytes(b"{")
    with contextlib.suppress(CacheCorruptError):
        entries.commit(root, attempt, manifest).release()
    entries.abandon(root, attempt)
    _assert_no_lease_is_left(entry)


def test_an_entry_whose_manifest_tore_can_be_deleted_by_who_holds_it(cache_dir: Path) -> None:
    converter = make_converter(str(cache_dir))
    entry = cache_dir / ROOT / KEY
    (entry / "manifest.json").write_bytes(b"{")
    with contextlib.suppress(CacheCorruptError):
        converter.delete()
    _assert_no_lease_is_left(entry)
    _assert_one_sweep_removes_all(cache_dir)


@pytest.mark.parametrize("has_other_contents", [False, True])
def test_a_newer_version_is_named_and_left_alone(has_other_contents: bool, entry: Path, cache_dir: Path) -> None:
    document = json.loads((entry / "manifest.json").read_bytes())
    document["format_version"] = 3
    (entry / "manifest.json").write_text(json.dumps({"format_version": 3} if has_other_contents else document))
    before = tree(cache_dir)
    with pytest.raises(CacheError, match="has format version 3; this version of the package reads up to 2") as caught:
        open_converter(str(entry))
    assert not isinstance(caught.value, CacheCorruptError)
    sweep(cache_dir)
    assert tree(cache_dir) == before


# The data --------------------------------------------------------------------------


DATA_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: path.unlink(), "is not there"),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 1), r"has \d+ bytes instead of \d+"),
    "empty": (lambda path: os.truncate(path, 0), "has 0 bytes instead of"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"has \d+ bytes instead of \d+"),
    "a-folder": (lambda path: (path.unlink(), path.mkdir()), "bytes instead of|is not there"),
}


@pytest.mark.parametrize(("damage", "message"), DATA_DAMAGES.values(), ids=DATA_DAMAGES.keys())
def test_a_damaged_data_file_is_named_and_written_again(
    damage: Callable[[Path], object], message: str, entry: Path, cache_dir: Path
) -> None:
    path = sorted(entry.glob("data-*/*.parquet"))[1]
    damage(path)
    with pytest.raises(CacheCorruptError, match=message) as caught:
        open_converter(str(entry))
    assert path.name in str(caught.value.path)
    _assert_no_lease_is_left(entry)
    _assert_can_be_made_again(cache_dir)


def test_a_damaged_entry_does_not_blame_an_unshared_disk(entry: Path) -> None:
    next(entry.glob("data-*/*.parquet")).unlink()
    with pytest.raises(CacheCorruptError, match="is damaged: ") as caught:
        open_converter(str(entry))
    assert "as seen by the driver" not in str(caught.value), "nobody writes here, there is no driver and no executor"


def test_garbage_of_the_right_size_is_a_named_error_of_the_reader(entry: Path) -> None:
    path = next(entry.glob("data-*/*.parquet"))
    path.write_bytes(bytes(path.stat().st_size))
    with open_converter(str(entry)) as converter, pytest.raises(SourceChangedError, match=path.name):
        ids_of(converter)


def test_an_entry_without_a_manifest_does_not_exist(entry: Path, cache_dir: Path) -> None:
    (entry / "manifest.json").unlink()
    with pytest.raises(CacheError, match="There is no committed cache entry"):
        open_converter(str(entry))
    _assert_one_sweep_removes_all(cache_dir)


# Signs of life ------------------------------------------------------------------------


GARBAGE = [
    b"",
    b"{",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"{}",
    b'{"host": null, "pid": "x"}',
    b'{"attempt": {}, "host": [], "pid": -1}',
    b'{"attempt": 1, "pid": 99999999999999999999}',
    b"[" * 200_000,
]


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize("name", [f"lease-{HEX}.json", f"data-{HEX}.intent"])
def test_garbage_among_the_signs_of_life_stops_nobody_and_goes_when_it_is_old(
    name: str, content: bytes, entry: Path, cache_dir: Path
) -> None:
    (entry / name).write_bytes(content)
    with open_converter(str(entry)) as converter:
        assert ids_of(converter) == list(range(len(converter)))
    sweep(cache_dir)
    with contextlib.suppress(FileNotFoundError):
        make_old(entry / name, 4 * leases.RENEW_SECONDS)
    sweep(cache_dir)
    assert set(tree(cache_dir)) == {ROOT, f"{ROOT}/.owner"}


@pytest.mark.parametrize("pid", [2**63, -1, 0, 2**22 + 1, True, 1.5, "1", None])
def test_an_impossible_process_number_on_this_host_is_a_dead_one(pid: object, entry: Path, cache_dir: Path) -> None:
    attempt_id = json.loads((entry / "manifest.json").read_bytes())["files"]["name"][0][5:37]
    sign = {"attempt": attempt_id, "host": leases.this_host(), "pid": pid, "process_start": "1"}
    (entry / f"lease-{HEX}.json").write_text(json.dumps(sign))
    sweep(cache_dir)
    assert set(tree(cache_dir)) == {ROOT, f"{ROOT}/.owner"}


# A full disk -----------------------------------------------------------------------------


def write_until_the_disk_is_full(cache_dir: str, num_bytes: int) -> str:
    """Write an entry where no file may grow beyond `num_bytes`; the outcome."""
    root = roots.open_root(cache_dir)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    try:
        attempt = entries.begin(root, KEY, application_id="app-1")
        try:
            held = entries.commit(root, attempt, write_data(root, attempt, is_kept=True))
        except BaseException:
            entries.abandon(root, attempt)
            raise
    except (OSError, ConverterError) as error:
        return type(error).__name__
    held.release()
    return "written"


@pytest.mark.parametrize("num_bytes", [0, 64, 100, 500, 900, 1500, 2000, 100_000])
def test_a_disk_that_is_full_at_any_point_leaves_nothing_behind(num_bytes: int, cache_dir: Path) -> None:
    outcome = run_python(write_until_the_disk_is_full, str(cache_dir), num_bytes)
    left = {name for name, content in tree(cache_dir).items() if content is not None}
    if outcome == "written":
        with open_converter(str(cache_dir / ROOT / KEY)) as converter:
            assert ids_of(converter) == list(range(len(converter)))
    else:
        assert left == {f"{ROOT}/.owner"}
        with pytest.raises(ConverterError, match="There is no committed cache entry"):
            open_converter(str(cache_dir / ROOT / KEY))
    _assert_one_sweep_removes_all(cache_dir)


# A store that fails -------------------------------------------------------------------------


@dataclass
class Fault:
    """What fails at the n-th call, and whether the calls after it fail too."""

    at_call: int = -1
    kind: str = "once"
    num_calls: int = 0
    names: list[str] = field(default_factory=list)

    def call(self, name: str) -> None:
        self.num_calls += 1
        if self.num_calls == self.at_call or (self.kind == "for-ever" and self.num_calls > self.at_call > 0):
            self.names.append(name)
            raise KeyboardInterrupt if self.kind == "interrupt" else OSError(errno.EIO, os.strerror(errno.EIO))


class FailingStorage(LocalStorage):
    """A real directory on a disk that fails."""

    fault = Fault()

    def below(self, *names: str) -> Storage:
        return type(self)(self.path(*names), self._filesystem)

    def make_directory(self) -> None:
        self.fault.call("make_directory")
        super().make_directory()

    def list(self) -> list[FileInfo]:
        self.fault.call("list")
        return super().list()

    def size(self, name: str) -> int | None:
        self.fault.call("size")
        return super().size(name)

    def read(self, name: str) -> bytes:
        self.fault.call("read")
        return super().read(name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self.fault.call("put_if_absent")
        return super().put_if_absent(name, data)

    def delete_file(self, name: str) -> None:
        self.fault.call("delete_file")
        super().delete_file(name)

    def delete_directory_if_empty(self) -> None:
        self.fault.call("delete_directory_if_empty")
        super().delete_directory_if_empty()


def _failing_root(cache_dir: Path, fault: Fault) -> Storage:
    path = roots.open_root(str(cache_dir)).path()
    here = type("FailingStorageHere", (FailingStorage,), {"fault": fault})
    return here(path)


def _write(root: Storage, cache_dir: Path) -> None:
    """As `write_dataframe` does; what is made is released."""
    attempt = entries.begin(root, KEY, application_id="app-1")
    try:
        manifest = write_data(root, attempt, is_kept=True)
        entries.delete_unlisted(root, attempt, manifest)
        adopted = entries.commit(root, attempt, manifest)
    except BaseException:
        entries.abandon(root, attempt)
        raise
    adopted.release()


def _open(root: Storage, cache_dir: Path) -> None:
    adopted = entries.adopt(root, KEY)
    if adopted is not None:
        adopted.release()


def _delete(root: Storage, cache_dir: Path) -> None:
    adopted = entries.adopt(roots.open_root(str(cache_dir)), KEY)
    assert adopted is not None
    adopted.lease.entry = root.below(KEY)
    dataclasses.replace(adopted, root=root).delete()


def _sweep(root: Storage, cache_dir: Path) -> None:
    sweeps.sweep_root(root, older_than_seconds=0, kept=True)


def _prepare_nothing(cache_dir: Path) -> None:
    roots.open_root(str(cache_dir))


def _prepare_entries(cache_dir: Path) -> None:
    """A committed entry that nobody holds, and an attempt that a dead host left."""
    leave_entry(cache_dir)
    root = roots.open_root(str(cache_dir))
    attempt = entries.begin(root, OTHER_KEY, application_id="app-0")
    write_data(root, attempt)
    leases.heartbeat.remove(attempt.intent)
    make_old(cache_dir / ROOT / OTHER_KEY / attempt.intent.name, 4 * leases.RENEW_SECONDS)


Operation = Callable[[Storage, Path], None]
OPERATIONS: dict[str, tuple[Callable[[Path], None], Operation]] = {
    "write": (_prepare_nothing, _write),
    "write-after-another": (_prepare_entries, _write),
    "open": (_prepare_entries, _open),
    "delete": (_prepare_entries, _delete),
    "sweep": (_prepare_entries, _sweep),
}


def _die() -> None:
    """What the death of this process does to its leases: they stay, and nobody renews them."""
    for lease in list(leases.heartbeat._leases):
        leases.heartbeat.remove(lease)


def _failures(tmp_path: Path, name: str, *, kind: str) -> Iterator[tuple[Path, Fault, BaseException | None]]:
    """The operation with its first call failing, its second, …, until none does."""
    prepare, operation = OPERATIONS[name]
    at_call = 0
    while True:
        at_call += 1
        cache_dir = tmp_path / f"{at_call}"
        prepare(cache_dir)
        fault = Fault(at_call=at_call, kind=kind)
        error: BaseException | None = None
        try:
            operation(_failing_root(cache_dir, fault), cache_dir)
        except BaseException as caught:  # noqa: BLE001 (judged by the test)
            error = caught
        yield cache_dir, fault, error
        _die()
        if not fault.names:
            return


@pytest.mark.parametrize("kind", ["once", "for-ever", "interrupt"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_store_that_fails_at_any_call_leaves_a_whole_entry_or_none_and_one_sweep_cleans_up(
    name: str, kind: str, tmp_path: Path
) -> None:
    for cache_dir, fault, error in _failures(tmp_path, name, kind=kind):
        where = f"{fault.names[:1]}, call {fault.at_call}"
        assert error is None or isinstance(error, (OSError, ConverterError, KeyboardInterrupt)), (where, error)
        try:
            with open_converter(str(cache_dir / ROOT / KEY)) as converter:
                assert ids_of(converter) == list(range(len(converter))), where
        except CacheError as refusal:
            assert "There is no committed cache entry" in str(refusal), (where, refusal)  # noqa: PT017
        _die()
        _assert_one_sweep_removes_all(cache_dir)


# Who opens looks at the store's own error, and reads without a lease where none can be written.
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "open"])
def test_what_fails_at_the_store_is_an_error_by_name(name: str, tmp_path: Path) -> None:
    unnamed = {
        f"{fault.names[0]} (call {fault.at_call}): {error!r}"
        for _, fault, error in _failures(tmp_path, name, kind="once")
        if error is not None and not isinstance(error, CacheError)
    }
    assert not unnamed, "\n".join(sorted(unnamed))


@pytest.mark.parametrize("name", ["write", "write-after-another", "open", "delete"])
def test_what_fails_at_the_store_leaves_no_lease_with_its_heartbeat(name: str, tmp_path: Path) -> None:
    left = {
        f"{fault.names[0]} (call {fault.at_call}): {[lease.name[:5] for lease in leases.heartbeat._leases]}"
        for _, fault, error in _failures(tmp_path, name, kind="once")
        if error is not None and leases.heartbeat._leases
    }
    assert not left, "\n".join(sorted(left))


# A second try -------------------------------------------------------------------------------


def _failing_converter(cache_dir: Path, fault: Fault, *, is_opened: bool = False) -> DatasetConverter:
    """Of a store that was whole while the entry was written, or opened, and fails from now on."""
    root = roots.open_root(str(cache_dir))
    if is_opened:
        leave_entry(cache_dir)
        held = entries.adopt(root, KEY)
    else:
        held = commit_entry(root)
    assert held is not None
    assert held.lease is not None
    root = _failing_root(cache_dir, fault)
    held.lease.entry = root.below(KEY)
    return hold_entry(dataclasses.replace(held, root=root), delete_on_exit=not is_opened)


@pytest.mark.parametrize("kind", ["once", "for-ever", "interrupt"])
@pytest.mark.parametrize("is_opened", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_delete_that_failed_at_any_call_can_be_repeated(
    kind: str, is_opened: bool, is_shared: bool, tmp_path: Path
) -> None:
    for at_call in itertools.count(1):
        cache_dir = tmp_path / f"{at_call}"
        fault = Fault(at_call=at_call, kind=kind)
        converter = _failing_converter(cache_dir, fault, is_opened=is_opened)
        with contextlib.ExitStack() as stack:
            if is_shared:
                other = stack.enter_context(open_converter(str(cache_dir / ROOT / KEY)))
            is_failed = False
            for _ in range(2 if kind == "for-ever" else 1):
                try:
                    converter.delete()
                except (CacheError, KeyboardInterrupt):
                    is_failed = True
                    assert ", closed)" in repr(converter)
                    with pytest.raises(CacheError, match="was closed, so it has no rows any more"):
                        converter.make_batch_reader()
            assert is_failed == bool(fault.names), fault.names
            fault.at_call = -1
            converter.delete()
            assert ", deleted)" in repr(converter)
            where = f"{fault.names[:1]}, call {at_call}"
            if is_shared:
                assert ids_of(other) == list(range(len(other))), where
        # The file that asks the store's time stays where just its removal failed, for a later sweep.
        left = [name for name, content in tree(cache_dir).items() if content]
        assert left == [f"{ROOT}/.owner"], where
        _assert_one_sweep_removes_all(cache_dir)
        # And what another writes then is not the converter's.
        leave_entry(cache_dir)
        before = tree(cache_dir)
        converter.delete()
        assert tree(cache_dir) == before
        if not fault.names:
            return


def test_what_could_not_be_deleted_is_at_the_end_of_the_block(cache_dir: Path) -> None:
    fault = Fault(at_call=1)
    with _failing_converter(cache_dir, fault, is_opened=True) as converter, contextlib.suppress(CacheError):
        converter.delete()
    assert fault.names
    assert set(tree(cache_dir)) == {ROOT, f"{ROOT}/.owner"}


def test_a_release_can_be_repeated_too_and_deletes_nothing(cache_dir: Path) -> None:
    fault = Fault(at_call=1)
    converter = _failing_converter(cache_dir, fault, is_opened=True)
    with pytest.raises(CacheError, match="failed to release"):
        converter.__exit__(None, None, None)
    assert list((cache_dir / ROOT / KEY).glob("lease-*"))
    converter.__exit__(None, None, None)
    assert not list((cache_dir / ROOT / KEY).glob("lease-*"))
    with open_converter(converter.url) as again:
        assert ids_of(again) == list(range(len(again)))


def test_what_was_swept_after_a_failed_delete_is_no_error(cache_dir: Path) -> None:
    fault = Fault(at_call=1, kind="for-ever")
    converter = _failing_converter(cache_dir, fault)
    with pytest.raises(CacheError, match="failed to delete"):
        converter.delete()
    fault.at_call = -1
    _assert_one_sweep_removes_all(cache_dir)
    converter.delete()
    assert set(tree(cache_dir)) == {ROOT, f"{ROOT}/.owner"}


def fail_and_end(cache_dir: str, kind: str) -> str:
    """A program whose delete fails, and that ends then."""
    converter = _failing_converter(Path(cache_dir), Fault(at_call=1, kind=kind))
    try:
        converter.delete()
    except CacheError as error:
        return str(error)
    return "deleted"


@pytest.mark.parametrize("kind", ["once", "for-ever"])
def test_the_interpreters_end_tries_again_once(kind: str, cache_dir: Path) -> None:
    with start_python(fail_and_end, str(cache_dir), kind) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "failed to delete" in output
    if kind == "once":
        assert not errors
        assert set(tree(cache_dir)) == {ROOT, f"{ROOT}/.owner"}
    else:
        [line] = errors.splitlines()
        assert line.startswith("Could not close file://"), line
        _assert_one_sweep_removes_all(cache_dir)


def test_an_interrupted_commit_does_not_take_the_data_from_who_opened_it_meanwhile(cache_dir: Path) -> None:
    """Ctrl-C, or an error of the store, right after the manifest appeared."""
    root = _failing_root(cache_dir, Fault())
    opened = []

    def open_then_interrupt(self: FailingStorage, name: str) -> int | None:
        found = Storage.size(self, name)
        if name.endswith(".intent") and Storage.size(self, "manifest.json") is not None:
            opened.append(open_converter(str(cache_dir / ROOT / KEY)))
            raise KeyboardInterrupt
        return found

    type(root).size = open_then_interrupt  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):
        _write(root, cache_dir)
    for converter in opened:
        assert ids_of(converter) == list(range(len(converter)))
        converter.delete()


def test_the_sweep_of_one_entry_that_fails_does_not_keep_the_others(cache_dir: Path) -> None:
    _prepare_entries(cache_dir)
    fault = Fault()
    root = _failing_root(cache_dir, fault)
    real = type(root).delete_file

    def refuse_one(self: Storage, name: str) -> None:
        if KEY in self.url:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        real(self, name)

    type(root).delete_file = refuse_one  # type: ignore[method-assign]
    with contextlib.suppress(OSError, CacheError):
        _sweep(root, cache_dir)
    assert not (cache_dir / ROOT / OTHER_KEY).exists()


def test_a_file_that_vanishes_while_a_folder_is_listed_hides_no_other(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewed lease is written aside and renamed: every listing may meet such a file, and must not miss the lease."""
    cache_dir.mkdir()
    for name in ("a.tmp", "lease"):
        (cache_dir / name).write_bytes(b"x")
    real = LocalFileSystem.info

    def info(self: LocalFileSystem, path: Any, **options: Any) -> Any:
        if os.path.basename(getattr(path, "path", "")) == "a.tmp":
            (cache_dir / "a.tmp").unlink()
        return real(self, path, **options)

    monkeypatch.setattr(LocalFileSystem, "info", info)
    assert [found.name for found in opening.open_storage(str(cache_dir)).list()] in (
        ["lease"],
        ["a.tmp", "lease"],
    )


def test_a_commit_whose_files_are_gone_refuses_and_leaves_no_manifest(cache_dir: Path) -> None:
    root = roots.open_root(str(cache_dir))
    attempt = entries.begin(root, KEY, application_id="app-1")
    manifest: Manifest = write_data(root, attempt)
    next((cache_dir / ROOT / KEY / attempt.data_directory).iterdir()).unlink()
    with pytest.raises(CacheError, match="is not there"):
        entries.commit(root, attempt, manifest)
    entries.abandon(root, attempt)
    assert set(tree(cache_dir)) == {ROOT, f"{ROOT}/.owner"}
