"""One cache, two tables and a user's files on a store that goes wrong: what programs do."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from converter import make_delta_converter, make_parquet_converter, make_spark_converter, open_converter, sweep
from converter.cache import leases, roots
from converter.dataset import DatasetConverter
from converter.errors import ConverterError
from converter.holding import holdings
from converter.reading import fetching
from converter.sources.parquet import footers
from converter.sources.spark import write as spark_write
from converter.storage import at_once
from converter.storage.directory import Storage
from converter.storage.remote import RemoteStorage
from tests.faults.campaign.cases import Step, ViolationError
from tests.faults.campaign.store_disk import LocalPast
from tests.faults.campaign.store_faults import SECRET, CrashError, Fault, Faults, clock
from tests.faults.campaign.store_job import TASK_TRIES, Frame, run_tasks
from tests.faults.campaign.store_laws import CACHE, ROOT, Held, Laws, Written, folders_of
from tests.faults.campaign.store_memory import Current
from tests.faults.campaign.store_place import NUM_ROWS, ROWS_OF_FILE, Ids, Place, Tables

NAMES = ("rides", "flights")
TIMEOUT_SECONDS = 20.0
_OLD_SECONDS = 4 * leases.RENEW_SECONDS
_HURRIES_SECONDS = 4 * leases.HURRY_SECONDS
_WRITE_SECONDS = (TASK_TRIES + 1) * TIMEOUT_SECONDS + _HURRIES_SECONDS
_MOST_SECONDS = 2 * TIMEOUT_SECONDS + 2 * leases.HURRY_SECONDS
"""Of a step that asks a store which does not answer: the request, another one if the first was for a lease that is not
needed, and hurried ones that clean up."""


class World(Laws):
    """The store of one case."""

    def __init__(self, store: str, folder: Path, tables: Tables, *, threads: int) -> None:
        place = Place(store)
        rivals = {"commit": self._commit_as_rival, "delete": self._delete_as_rival, "sweep": self._sweep_as_rival}
        rivals = {name: functools.partial(self._as_rival, do) for name, do in rivals.items()}
        super().__init__(place, Faults(store, rivals), folder / "local")
        self.tables, self.threads, self.url = tables, threads, f"{place.url}/{CACHE}"
        self.options: dict[str, Any] = {}
        if not place.is_local:
            secret = "account_key" if store == "azure" else "key"
            self.options = {"storage_options": {secret: SECRET}, "timeout_seconds": TIMEOUT_SECONDS}
        self._at_work = (0, False)
        """The name that a write is of, and whether the entry is kept."""

        self._has_staging = False
        """Whether the write's job has files in a staging folder while it runs, as the committer of Spark's writer."""

        self._loses_file = False
        """Whether the driver does not see a file that the job has written."""

        self._num_writes = 0
        self._rival_violation: ViolationError | None = None
        self._stack = contextlib.ExitStack()
        self._actions: dict[str, Callable[..., None]] = {
            "write": self._write, "open": self._open, "table": self._table, "read": self._read, "close": self._close,
            "delete": self._delete, "sweep": self._sweep, "renew": self._renew, "kill": self._kill,
            "rewrite": self._rewrite, "user": self._user, "spoil": self._spoil,
        }  # fmt: skip

    # The case itself -----------------------------------------------------------------------------

    def __enter__(self) -> World:
        Current.disk, Current.faults, LocalPast.answers = self.place.disk, self.faults, None
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(spark_write, "run_write", self._run_job)
        if not self.place.is_local:
            # deltalake has a client of its own, which meets no fault here.
            patch.setattr(RemoteStorage, "delta_place", lambda _: (str(self.tables.folder / "delta"), {}))
        # With one thread the n-th call is the same one each time.
        for module, name in ((fetching, "_MAX_FETCHERS"), (fetching, "_MAX_REQUESTS"), (footers, "_FOOTER_THREADS")):
            patch.setattr(module, name, self.threads)
        defaults = {**at_once.at_once.__kwdefaults__, "threads_count": self.threads}
        patch.setattr(at_once.at_once, "__kwdefaults__", defaults)
        for name, data in self.users.items():
            self.place.put(name, data)
        return self

    def __exit__(self, *raised: object) -> None:
        with self.faults.off():
            self.faults.end_step()
        for held in self.held:
            holdings.discard(held.converter._holding)
        for lease in list(leases.heartbeat._leases):
            leases.heartbeat.remove(lease)
        self._stack.close()
        self.place.close()

    def arm(self, fault: dict[str, Any]) -> None:
        """Let a later call go wrong."""
        armed = Fault(**fault)
        if armed.is_lie and any(other.is_lie for other in (*self.faults.armed, *self.faults.fired)):
            return
        if self.place.is_local and armed.kind == "stale":
            LocalPast.note(self.place.root)
        self.faults.armed.append(armed)

    def take(self, step: Step) -> None:
        """Take a step, and look at all that must hold after it."""
        self.keep_leases_young()
        begun, num_told, num_calls = clock.monotonic(), len(self.faults.told), self.faults.num_calls
        options = {name: value for name, value in step.items() if name != "do"}
        try:
            self._actions[step["do"]](**options)
        except ViolationError:
            raise
        except CrashError:
            self.faults.end_step()
            self._kill()
            begun = clock.monotonic()
        except Exception as error:  # noqa: BLE001 (judged)
            is_allowed = len(self.faults.told) > num_told or step.get("loses", False)
            self.judge(error, is_allowed=is_allowed, step=step)
        if self._rival_violation is not None:
            raise self._rival_violation
        seconds = clock.monotonic() - begun
        self.done["faults"] += len(self.faults.told) - num_told
        self.done["steps"] += 1
        self.done[f"steps of {step['do']}"] += 1
        self.done["calls of the store"] += self.faults.num_calls - num_calls
        self.faults.end_step()
        self.check(step)
        most = {"write": _WRITE_SECONDS, "renew": leases.RENEW_SECONDS + _MOST_SECONDS}.get(step["do"], _MOST_SECONDS)
        is_in_time = step["do"] == "kill" or seconds <= most
        self.require(is_in_time, "no step waits longer than its timeouts", f"{step} took {seconds:.0f} seconds")

    def end(self) -> None:
        """With all faults gone everything can be closed, written again and removed."""
        self.faults.armed.clear()
        self.faults.end_step()
        with self.faults.off():
            for held in list(self.held):
                self._close_held(held)
            self.check({"do": "close all"})
            for written in list(self.written.values()):
                if written.is_promised and written.is_kept:
                    with open_converter(f"{self.url}/{roots.DIRECTORY}/{written.key}", **self.options) as kept:
                        self._compare(written.ids, self._ids_of(kept, {}))
            # Whatever is left there, the same name can be written and read.
            again = self._make(self._at_work[0], kept=False)
            self._compare(again.ids, self._ids_of(again.converter, {}))
            self._close_held(again)
            self.check({"do": "write again"})
            for written in self.written.values():
                written.is_promised = False
            self.place.age(_OLD_SECONDS)
            sweep(self.url, kept=True, **self.options)
            left = sorted(self.place.files(CACHE).keys() - self.users.keys() - {f"{ROOT}/{roots.OWNER_FILE}"})
            folders = {name for path in (*self.users, f"{ROOT}/x") for name in folders_of(path)}
            left += sorted(set(self.place.folders(CACHE)) - folders)
            self.require(not left, "one sweep of old leases leaves the marker alone", f"left {left}")
            # Errors hold the frames of what failed.
            gc.collect()
            sweep(self.local_dir)
            copies = [path.name for path in self.local_dir.rglob("*") if path.is_file()]
            # A disk that failed for good may have kept a marker from being put, and its temporary file from removal.
            lasts = any(fault.lasts for fault in self.faults.fired)
            copies = [name for name in copies if name not in (".owner", ".used") and not (lasts and ".owner." in name)]
            self.require(not copies, "one sweep removes all local copies", f"left {copies}")
        self.check({"do": "sweep all"})
        self.check_open_files()

    # Steps ---------------------------------------------------------------------------------------

    def _write(self, name: int, kept: bool, then: str, staging: bool = False, loses: bool = False) -> None:
        self._has_staging, self._loses_file = staging, loses
        try:
            held = self._make(name, kept=kept)
        finally:
            self._loses_file = False
        if then == "close":
            self._close_held(held)

    def _make(self, name: int, *, kept: bool) -> Held:
        self._at_work = name, kept
        self._num_writes += 1
        ids = np.arange(NUM_ROWS) + 10_000 * (name + 1) + 100 * self._num_writes
        converter = make_spark_converter(
            Frame(ids),  # type: ignore[arg-type]
            cache_dir=self.url,
            cache_key=NAMES[name],
            delete_on_exit=not kept,
            writer="executors",
            row_group_bytes=1024,
            **self.options,
        )
        self.done["entries written or reused"] += 1
        held = self._hold(converter)
        is_there = self.has_manifest(held.attempt)
        is_deleted = any(fault.rival == "delete" and fault.kind == "rival" for fault in self.faults.fired)
        self.require(is_there or is_deleted, "what was written is committed", converter.url)
        self.written[held.attempt].is_promised = is_there and not self.written[held.attempt].is_spoiled
        return held

    def _hold(self, converter: DatasetConverter) -> Held:
        manifest = converter._manifest
        attempt = manifest.file_names[0].partition("/")[0].removeprefix("data-")
        written = self.written.get(attempt)
        held = Held(converter=converter, ids=np.empty(0, np.int64) if written is None else written.ids, attempt=attempt)
        self.held.append(held)
        self.require(written is not None, "an entry is one that was written", f"{converter.url} of {attempt}")
        assert written is not None
        is_hidden = bool(self.faults.told)
        self.require(is_hidden or not written.is_spoiled, "a damaged entry is not used", converter.url)
        written.files = dict(zip(manifest.file_names, manifest.file_bytes.tolist(), strict=True))
        return held

    def _open(self, name: int, by: str) -> None:
        writes = {attempt: written for attempt, written in self.written.items() if written.name == name}
        promised = [
            attempt for attempt, written in writes.items() if written.is_promised and self.has_manifest(attempt)
        ]
        attempt = next(reversed(promised or list(writes)), None)
        if by == "key":
            opened = functools.partial(open_converter, self.url, cache_key=NAMES[name], **self.options)
        elif attempt is not None:
            opened = functools.partial(
                open_converter, f"{self.url}/{roots.DIRECTORY}/{writes[attempt].key}", **self.options
            )
        else:
            return
        try:
            self._hold(opened())
        except ConverterError as error:
            self.judge(error, is_allowed=not promised or bool(self.faults.told), step={"do": "open"})
            return
        self.done["opened"] += 1

    def _table(self, table: str) -> None:
        if self.is_rewritten:
            return
        for name, data in self.tables.files[table].items():
            if name not in self.users:
                self.place.put(name, data)
                self.users[name] = data
        # A folder of Parquet files is what its listing says.
        self.place.disk.forget_past()
        make: Any = make_parquet_converter if table == "parquet" else make_delta_converter
        converter = make(f"{self.place.url}/{table}", **self.options)
        self.held.append(Held(converter=converter, ids=self.tables.ids[table], table=table))
        self.done["tables opened"] += 1

    def _read(self, which: int, stop: int | None, copy: bool, chosen: bool, **options: Any) -> None:
        if not self.held:
            return
        held = self.held[which % len(self.held)]
        converter, ids = held.converter, held.ids
        if not self.is_whole(held):
            # Its files may be gone, or others: never rows of others.
            try:
                self._compare(ids, self._ids_of(converter, options))
            except ConverterError as error:
                self.judge(error, is_allowed=True, step={"do": "read what may be gone"})
            return
        if copy:
            converter = pickle.loads(pickle.dumps(converter))
        if chosen:
            least, stop = np.sort(ids)[[7, -9]]
            converter = converter.where([("x", ">=", float(least)), ("id", "<", int(stop))])
            ids = ids[(ids >= least) & (ids < stop)]
        self.require(len(converter) == len(ids), "a converter knows how many rows it has", f"{len(converter)}")
        count, parts = options["shards"], []
        for index in range(count):
            part = self._ids_of(converter, {**options, "index": index}, stop=stop)
            expected = ids[len(ids) * index // count : len(ids) * (index + 1) // count]
            in_order = options["shuffle"] or np.array_equal(part, expected)
            self.require(in_order, "a shard has its rows in order", f"{part}, expected {expected}")
            parts.append(part)
        self._compare(ids, np.concatenate(parts))

    def _ids_of(self, converter: DatasetConverter, options: dict[str, Any], *, stop: int | None = None) -> Ids:
        """The rows of one shard. A reader that stops, or fails where it must not, goes on in another one."""
        make = functools.partial(
            converter.make_batch_reader,
            batch_size=options.get("batch_size", 16),
            shuffle=options.get("shuffle", False),
            seed=3,
            shuffle_window_rows=ROWS_OF_FILE if options.get("shuffle") else None,
            cur_shard=options.get("index", 0),
            shard_count=options.get("shards", 1),
            uneven="keep",
            verify_checksums=options.get("verify", False),
            local_cache_dir=self.local_dir if options.get("local") else None,
            workers_count=self.threads,
        )
        received: list[Ids] = []
        num_told = len(self.faults.told)
        reader = make()
        state = reader.state_dict()
        failed: Exception | None = None
        try:
            with reader:
                for number, batch in enumerate(reader):
                    received.append(self._checked(batch))
                    state = reader.state_dict()
                    if number == stop:
                        break
        except ConverterError as error:
            if len(self.faults.told) == num_told:
                raise
            failed = error
        if failed is not None:
            self.judge(failed, is_allowed=True, step={"do": "read"})
            self.faults.end_step()
        if failed is not None or stop is not None:
            with self.faults.off() if failed is not None else contextlib.nullcontext():
                received += self._rest_of(make(), state)
                self.done["resumed"] += 1
            if options.get("shuffle"):
                with self.faults.off():
                    whole = np.concatenate(self._rest_of(make(), None))
                ids = np.concatenate(received)
                self.require(np.array_equal(whole, ids), "resume goes on in the same order", f"{ids} of {whole}")
        self.done["reads"] += 1
        return np.concatenate(received) if received else np.empty(0, np.int64)

    def _rest_of(self, reader: Any, state: Any) -> list[Ids]:
        with reader:
            if state is not None:
                reader.load_state_dict(json.loads(json.dumps(state)))
            return [self._checked(batch) for batch in reader]

    def _checked(self, batch: dict[str, Any]) -> Ids:
        ids: Ids = np.array(batch["id"])
        is_same = np.array_equal(batch["x"], ids.astype(np.float32))
        self.require(is_same, "the columns are of the same rows", f"{batch}")
        return ids

    def _compare(self, expected: Ids, found: Ids) -> None:
        self.done["rows compared"] += len(found)
        what = f"{len(found)} rows, {np.sort(found)[:3]}…, expected {len(expected)}, {expected[:3]}…"
        self.require(np.array_equal(np.sort(found), np.sort(expected)), "each row comes once", what)

    def _close(self) -> None:
        if self.held:
            self._close_held(self.held[-1])

    def _close_held(self, held: Held) -> None:
        holding = held.converter._holding
        if held.attempt and holding.delete_on_exit:
            self.written[held.attempt].is_promised = False
        self.held.remove(held)
        try:
            with held.converter:
                pass
        finally:
            # Else the end of the process would try it again.
            holdings.discard(holding)

    def _delete(self, name: int) -> None:
        mine = [held for held in self.held if held.attempt and self.written[held.attempt].name == name]
        if not mine:
            return
        held = mine[-1]
        self.written[held.attempt].is_promised = False
        self.held.remove(held)
        try:
            held.converter.delete()
        finally:
            holdings.discard(held.converter._holding)

    def _sweep(self, kept: bool, older: int, only: int | None, dry: bool) -> None:
        takes = functools.partial(self.withdraw, takes_kept=kept or only is not None, older=older, only=only)
        key = None if only is None else NAMES[only]
        try:
            if not dry:
                takes()
            sweep(self.url, kept=kept, older_than=older, cache_key=key, dry_run=dry, **self.options)
        finally:
            if not dry:
                takes()  # also what a rival has committed meanwhile

    def _renew(self) -> None:
        """What the heartbeat does each minute."""
        num_told = len(self.faults.told)
        held = {held.lease for held in self.held if held.lease is not None and not held.lease.lost}
        names = {lease.name for lease in held}
        paths = {f"{self.place.root}/{name}" for name in self.place.files(ROOT) if name.rpartition("/")[2] in names}
        # The user's files must not seem to be written again.
        self.place.age(leases.RENEW_SECONDS, paths)
        leases.heartbeat.renew()
        old = sorted(path for path in paths if self.place.idle_seconds(path) > leases.RENEW_SECONDS / 2)
        self.require(not old or len(self.faults.told) > num_told, "each lease is renewed", f"{old}")

    def _kill(self) -> None:
        """The process that holds all of them dies, and time passes."""
        self.is_killed = True
        for held in self.held:
            holdings.discard(held.converter._holding)
            if held.attempt and not self.written[held.attempt].is_kept:
                self.written[held.attempt].is_promised = False
        self.held.clear()
        for lease in list(leases.heartbeat._leases):
            leases.heartbeat.remove(lease)
        self.place.age(_OLD_SECONDS)

    def _rewrite(self) -> None:
        """The user writes a Parquet file again."""
        name = "parquet/part-0.parquet"
        if name in self.users:
            self.is_rewritten, self.users[name] = True, self.tables.rewritten
            self.place.put(name, self.tables.rewritten)

    def _spoil(self, which: int, cut: bool) -> None:
        """A data file of an entry that is not in use loses its end, or is lost."""
        in_use = {held.attempt for held in self.held}
        unused = [
            attempt
            for attempt, written in self.written.items()
            if written.files and self.has_manifest(attempt) and attempt not in in_use
        ]
        if unused:
            written = self.written[unused[-1]]
            written.is_promised, written.is_spoiled = False, True
            name = f"{ROOT}/{written.key}/{sorted(written.files)[which]}"
            data = self.place.read(name) or b""
            self.place.put(name, data[:-1]) if cut else self.place.remove(name)
            self.done["entries damaged"] += 1

    def _user(self) -> None:
        """The user puts files beside and inside what is ours."""
        if self.place.read(f"{ROOT}/{roots.OWNER_FILE}") is not None:
            folders = {folder for path in self.place.files(ROOT) for folder in folders_of(path)}
            for folder in sorted(folders | {CACHE}):
                self.users[f"{folder}/mine.csv"] = b"mine"
                self.place.put(f"{folder}/mine.csv", b"mine")

    # Other processes -----------------------------------------------------------------------------

    def _as_rival(self, do: Callable[[], None]) -> None:
        # Raised here, it would be an answer of the store to the process whose call is under way.
        try:
            do()
        except ViolationError as error:
            self._rival_violation = error
        except Exception as error:  # noqa: BLE001 (judged)
            try:
                self.judge(error, is_allowed=True, step={"do": "rival"})
            except ViolationError as violation:
                self._rival_violation = violation

    def _commit_as_rival(self) -> None:
        promised = {attempt: written.is_promised for attempt, written in self.written.items()}
        held = self._make(self._at_work[0], kept=self._at_work[1])
        self.held.remove(held)
        entry = held.converter._holding.entry
        assert entry is not None
        holdings.discard(held.converter._holding)
        entry.release()
        # One that it reuses may be about to be deleted.
        self.written[held.attempt].is_promised = promised.get(held.attempt, self.written[held.attempt].is_kept)

    def _delete_as_rival(self) -> None:
        for written in self.written.values():
            if written.name == self._at_work[0]:
                written.is_promised = False
        open_converter(self.url, cache_key=NAMES[self._at_work[0]], **self.options).delete()

    def _sweep_as_rival(self) -> None:
        sweep(self.url, **self.options)

    def _run_job(
        self, df: Frame, columns: Any, spec: Any, *, directory: Storage, session: Any, writer: str, **options: Any
    ) -> list[tuple[int, dict[str, Any]]]:
        *_, key, data = spec["directory"].split("/")
        name, is_kept = self._at_work
        self.written[data.removeprefix("data-")] = Written(
            key=key, name=name, ids=df.ids, is_kept=is_kept, begun=self.place.now()
        )
        staging = f"{ROOT}/{key}/{data}/_temporary"
        if self._has_staging:
            with self.faults.off():
                self.place.put(f"{staging}/0/_temporary/attempt_0/part-00000.parquet", b"half")
        found = run_tasks(df, spec, directory=directory, session=session, writer=writer)
        if self._has_staging:
            with self.faults.off():
                directory.below("_temporary").delete_tree()
        if self._loses_file:
            self.written[data.removeprefix("data-")].is_spoiled = True
            self.place.remove(f"{ROOT}/{key}/{data}/{found[0][1]['name']}")
            self.done["files lost"] += 1
        return found
