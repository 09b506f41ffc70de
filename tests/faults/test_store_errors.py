"""Whatever a store answers at whichever call: what was asked for, or an error of ours that names the cache."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from converter import errors, open_converter, sweep
from converter.cache import entries, leases, roots, sweeps
from converter.dataset import DatasetConverter
from converter.errors import ConverterError
from converter.make import hold_entry
from converter.sources.spark import identity
from converter.sources.spark import write as spark_write
from converter.storage import databricks, local
from tests.faults.small_entries import KEY, NUM_ROWS, OTHER_KEY, ids_of, leave_entry, make_old, write_data

ROOT = roots.DIRECTORY
ERRORS: dict[str, Callable[[], OSError]] = {
    "input-output": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "no-directory": lambda: NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)),
    "a-directory": lambda: IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)),
    "refused": lambda: PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    "timeout": lambda: TimeoutError("no answer"),
    "exists": lambda: FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)),
}


class FaultyStore:
    """The local filesystem, of which one call fails, or all from then on."""

    def __init__(self, error: str, *, is_after: bool, is_lasting: bool) -> None:
        self._error, self._is_after, self._is_lasting = ERRORS[error], is_after, is_lasting
        self.at_call = 0
        self.num_calls = 0
        self.failed: list[str] = []
        self._depth = 0

    def call(self, step: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self._depth or not self.at_call:
            return step(*arguments, **options)
        self.num_calls += 1
        fails = self.num_calls == self.at_call or (self._is_lasting and self.num_calls > self.at_call)
        if fails and not self._is_after:
            self.failed.append(step.__name__)
            raise self._error()
        self._depth += 1
        try:
            found = step(*arguments, **options)
        finally:
            self._depth -= 1
        if fails:
            self.failed.append(step.__name__)
            raise self._error()
        return found

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """What happens in this block never fails: it happens elsewhere, or later."""
        at_call, self.at_call = self.at_call, 0
        try:
            yield
        finally:
            self.at_call = at_call

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        def faulty(step: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(step)
            def called(*arguments: Any, **options: Any) -> Any:
                return self.call(step, *arguments, **options)

            return called

        class Os:
            link, unlink = staticmethod(faulty(os.link)), staticmethod(faulty(os.unlink))
            rmdir = staticmethod(faulty(os.rmdir))
            utime, stat = staticmethod(faulty(os.utime)), staticmethod(faulty(os.stat))

            def __getattr__(self, name: str) -> Any:
                return getattr(os, name)

        with pytest.MonkeyPatch.context() as patch:
            for name in ("makedirs", "ls", "info", "cat_file"):
                patch.setattr(LocalFileSystem, name, faulty(getattr(LocalFileSystem, name)))
            patch.setattr(databricks, "os", Os())
            patch.setattr(local, "os", Os())
            patch.setattr(entries.time, "sleep", lambda _: None)
            yield


def write(cache_dir: Path, store: FaultyStore) -> None:
    """What `make_spark_converter` does around the job of the executors, and its `with` block."""
    root = roots.open_root(str(cache_dir))
    adopted = spark_write._adopt(root, KEY)
    if adopted is None:
        spark_write._log_other_entries(root, (KEY, KEY), "a key")
        attempt = entries.begin(root, KEY, application_id="app-1")
        try:
            with store.whole():
                manifest = write_data(root, attempt)
            entries.delete_unlisted(root, attempt, manifest)
            adopted = entries.commit(root, attempt, manifest)
        except BaseException:
            with contextlib.suppress(errors.CacheError):
                entries.abandon(root, attempt)
            raise
    converter = hold_entry(adopted, delete_on_exit=not adopted.manifest.is_kept)
    sweeps.sweep_after_write(root)
    _read_and_close(converter)


def _read_and_close(converter: DatasetConverter) -> None:
    with converter:
        assert ids_of(converter) == list(range(NUM_ROWS))


def read(cache_dir: Path, store: FaultyStore) -> None:
    _read_and_close(open_converter(str(cache_dir / ROOT / KEY)))


def read_by_name(cache_dir: Path, store: FaultyStore) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity, "hash_of_name", lambda _: KEY[:16])
        converter = open_converter(cache_dir, cache_key="flights")
    _read_and_close(converter)


def renew(cache_dir: Path, store: FaultyStore) -> None:
    with open_converter(str(cache_dir / ROOT / KEY)):
        leases.heartbeat.renew()


def delete(cache_dir: Path, store: FaultyStore) -> None:
    open_converter(str(cache_dir / ROOT / KEY)).delete()


def sweep_all(cache_dir: Path, store: FaultyStore) -> None:
    sweep(cache_dir)


PROGRAMS = {
    "write": (False, write),
    "write-again": (True, write),
    "read": (True, read),
    "read-by-name": (True, read_by_name),
    "renew": (True, renew),
    "delete": (True, delete),
    "sweep": (True, sweep_all),
}


def _prepare(cache_dir: Path, *, is_kept: bool) -> None:
    """A kept entry, one that nobody holds, and what a dead writer left."""
    root = roots.open_root(str(cache_dir))
    if is_kept:
        leave_entry(cache_dir, is_kept=True)
    leave_entry(cache_dir, "1" * 16 + "-" + "2" * 16)
    attempt = entries.begin(root, OTHER_KEY, application_id="app-0")
    write_data(root, attempt)
    leases.heartbeat.remove(attempt.intent)
    make_old(cache_dir / ROOT / OTHER_KEY / attempt.intent.name, 4 * leases.RENEW_SECONDS)


@pytest.mark.parametrize(
    ("error", "is_after", "is_lasting"),
    [(error, is_after, False) for error in ERRORS for is_after in (False, True)]
    + [(error, False, True) for error in ("input-output", "refused", "timeout")],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_store_that_fails_at_any_call_is_an_error_by_name_and_takes_nothing_that_is_kept(
    name: str, error: str, is_after: bool, is_lasting: bool, tmp_path: Path
) -> None:
    is_kept, program = PROGRAMS[name]
    odd = []
    sound = tmp_path / "sound"
    _prepare(sound, is_kept=is_kept)
    for at_call in itertools.count(1):
        cache_dir = tmp_path / "cache"
        shutil.copytree(sound, cache_dir, copy_function=shutil.copy2)
        store = FaultyStore(error, is_after=is_after, is_lasting=is_lasting)
        raised: BaseException | None = None
        with store.installed():
            store.at_call = at_call
            try:
                program(cache_dir, store)
            except Exception as caught:  # noqa: BLE001 (judged below)
                raised = caught
            store.at_call = 0
        where = f"call {at_call}, {store.failed[:1]}"
        if raised is not None and not (isinstance(raised, ConverterError) and str(cache_dir) in str(raised)):
            odd.append(f"{where}: {raised!r}")
        for lease in list(leases.heartbeat._leases):
            leases.heartbeat.remove(lease)
        if is_kept and name != "delete":
            try:
                with open_converter(str(cache_dir / ROOT / KEY)) as converter:
                    assert ids_of(converter) == list(range(NUM_ROWS))
            except ConverterError as lost:
                odd.append(f"{where}: lost the kept entry: {lost!r}")
        for path in cache_dir.rglob("*"):
            if path.is_file():
                make_old(path, 4 * leases.RENEW_SECONDS)
        sweep(cache_dir, kept=True)
        left = [str(path.relative_to(cache_dir)) for path in cache_dir.rglob("*")]
        if sorted(left) != [ROOT, f"{ROOT}/.owner"]:
            odd.append(f"{where}: left {left}")
        shutil.rmtree(cache_dir)
        if not store.failed:
            break
    assert not odd, "\n".join(odd)
