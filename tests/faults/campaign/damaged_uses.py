"""What a user does with a data set whose bytes may be damaged, and what must hold then."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import typer

from converter import ConverterError, DatasetConverter, StateMismatchError, sweep
from converter.cache import entries, roots
from converter.commands.app import app
from converter.reading.local_cache import DIRECTORY as LOCAL_DIRECTORY
from converter.sources.spark import write
from tests.entries import KEY
from tests.faults.campaign import damaged_bases, damages
from tests.faults.campaign.cases import Step, require
from tests.faults.campaign.damaged_case import BEGUN, PARTS, REMEDY, Case
from tests.faults.campaign.damaged_reads import Columns, differing, open_of, read
from tests.faults.small_entries import ids_of, write_data

_COMMAND = typer.main.get_command(app)


@contextlib.contextmanager
def _deep_stack() -> Iterator[None]:
    """Let a parser make values of more levels than this process can go down."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


class UsedCase(Case):
    """A data set that is read, looked through, resumed, deleted, swept and written again."""

    def _read(self, step: Step) -> None:
        with self.judged(), self.converter() as converter:
            options: dict[str, Any] = {}
            if self.kind == "away" and step["local"]:
                options["local_cache_dir"] = self.local
                for folder in (self.local, self.local / LOCAL_DIRECTORY):
                    folder.mkdir(parents=True, exist_ok=True)
                if not (self.local / "notes").exists():
                    (self.local / LOCAL_DIRECTORY / ".owner").write_bytes(b"")
                    (self.local / LOCAL_DIRECTORY / "notes").write_bytes(b"not ours")
                    (self.local / "notes").write_bytes(b"not ours")
            found = read(converter, step, **options)
            self._check_rows(converter, found, verifies=step["verifies"], has_all=not step["few"])

    def _check_rows(self, converter: DatasetConverter, found: Columns, *, verifies: bool, has_all: bool) -> None:
        num_rows = len(found["row"])
        self.done["reads"] += 1
        self.done["rows read"] += num_rows
        require(num_rows == len(converter), "as many rows come as len says", f"{num_rows} {len(converter)}")
        require(
            sorted(found["row"].tolist()) == self._row_numbers(num_rows, found),
            "each row comes once",
            f"{sorted(found['row'].tolist())}",
        )
        changed = self.files.changed()
        data = [name for name in changed if PARTS["data"].fullmatch(name) and not name.startswith(BEGUN)]
        if any(self._is_told(name) for name in changed):
            return
        require(num_rows == self.truth.num_rows, "counts that are known are kept", f"{num_rows} rows")
        if self.kind == "entry" and has_all:
            ends = [name for name in data if self.files.has_other_end(name)]
            require(not ends, "another footer is refused", f"{ends}")
        if self.kind == "table" and has_all:
            sizes = {name: (len(self.files.get(name) or b""), len(self.base.files[name])) for name in data}
            other = [name for name in sizes.keys() & self.truth.file_names if sizes[name][0] != sizes[name][1]]
            require(not other, "a file that has another size than the log says is refused", f"{other}")
        is_covered = not data and not self.has_local_damage
        if self.kind in ("entry", "away") and (verifies or not any(map(self.files.has_other_pages, data))):
            is_covered = not self.has_local_damage or verifies
        if self.kind == "files" and self.kept is not None and self.kept_whole:
            is_covered = True
        if is_covered:
            wrong = differing(found, self.truth.columns)
            require(not wrong, "what a checksum covers is right or refused", f"{wrong}")
            self.done["rows compared"] += num_rows

    def _row_numbers(self, num_rows: int, found: Columns) -> list[int]:
        # Rows that are deleted have numbers too.
        return sorted({*found["row"].tolist()}) if self.kind == "table" else list(range(num_rows))

    def _is_told(self, name: str) -> bool:
        """Whether a file says which rows there are, so that others may come if it is damaged."""
        if self.kind in ("entry", "away"):
            return name.endswith("manifest.json")
        if self.kind == "files":
            return self.kept is None or not self.kept_whole
        return name.startswith("_delta_log")

    def _verify(self, step: Step) -> None:
        with self.judged(), self.converter() as converter:
            told = converter.verify(every_row=step["every_row"])
            self.done["verifications"] += 1
            for line in told:
                require(self.folder.name in line, "an error names the file", line)
            if told:
                require(self.may_fail(), "what is not damaged is whole", f"{told}")
                return
            changed = self.files.changed()
            if self.kind == "entry" and not any(map(self._is_told, changed)):
                data = [name for name in changed if PARTS["data"].fullmatch(name) and not name.startswith(BEGUN)]
                ends = [name for name in data if self.files.has_other_end(name)]
                require(not ends, "another footer is told", f"{ends}")
            if step["every_row"]:
                try:
                    found = read(converter, {"verifies": True})
                except ConverterError as error:
                    require(False, "what verify passes can be read", f"{error!r}")
                self._check_rows(converter, found, verifies=True, has_all=True)

    def _choose(self, step: Step) -> None:
        with self.judged(may_lack_path=True), self.converter() as converter:
            integers = [one for one in converter.schema if one.dtype in ("int64", "int32", "int8") and one.shape == ()]
            plain = [one.name for one in integers if one.categories is None and not one.has_nulls]
            numbers = [name for name in plain if name not in converter._manifest.scales]
            what = step["what"]
            if what == "statistics":
                for name in converter.columns:
                    # Of a column that has none, the error says why.
                    require(converter.statistics[name].null_count >= 0, "each column has statistics", name)
            elif what == "plan":
                converter.plan(batch_size=7, shuffle=True, nulls="mask", ragged="pad")
            elif what == "head":
                converter.head(3)
            elif what == "split":
                parts = converter.split({"a": 0.5, "b": 0.5})
                require(sum(map(len, parts.values())) == len(converter), "the parts of a split are all rows", "")
            elif numbers:
                self._choose_by(converter, what, numbers[0])
            self.done["choices"] += 1

    def _choose_by(self, converter: DatasetConverter, what: str, name: str) -> None:
        if what == "where":
            some, others = converter.where([(name, ">", 9)]), converter.where([(name, "<=", 9)])
            if not any(map(self._is_told, self.files.changed())):
                found = len(some) + len(others)
                require(found == self.truth.num_rows or bool(self.files.changed()), "a filter and its opposite leave "
                        "all rows", f"{found}")  # fmt: skip
            require(len(read(some, {})["row"]) == len(some), "as many rows come as len says", what)
        elif what == "split by":
            parts = converter.split({"a": 0.5, "b": 0.5}, by=name)
            require(sum(map(len, parts.values())) == len(converter), "the parts of a split are all rows", what)
        elif what == "sequences":
            read(converter.sequences(2), {}, columns=[name])
        elif what == "balance":
            require(
                len(read(converter.balance(name, num_rows=30), {})["row"]) == 30, "as many rows come as len says", ""
            )
        elif what == "sample":
            read(converter.sample(name, num_rows=30), {})
        elif what == "quantiles":
            converter.quantiles(name)

    def _resume(self, step: Step) -> None:
        with self.judged(), self.converter() as converter:
            options: dict[str, Any] = {"batch_size": 7, "nulls": "mask", "ragged": "nested", "with_row_index": "row",
                                       "shuffle": step["shuffle"], "columns": list(converter.columns)[:1]}  # fmt: skip
            with converter.make_batch_reader(**options) as reader:
                num_batches = min(step["batches"], len(reader) - 1)
                batches = iter(reader)
                first = [row for _ in range(num_batches) for row in next(batches)["row"].tolist()]
                saved = json.dumps(reader.state_dict()).encode()
            harmed = saved
            if step["how"]:
                harmed = damages.damage(saved, step["how"], step["seed"], whole=saved, others=[]) or b"{}"
            try:
                with _deep_stack():
                    state = json.loads(harmed)
            except (ValueError, RecursionError):
                return
            with converter.make_batch_reader(**options) as reader:
                try:
                    reader.load_state_dict(state)
                except StateMismatchError as error:
                    self.done["states refused"] += 1
                    require(bool(REMEDY.search(str(error))), "an error says what to do", f"{error!r}")
                    require(harmed != saved, "a state that is not damaged is taken", f"{error!r}")
                    return
                num_left = reader.remaining
                rest = [row for batch in reader for row in batch["row"].tolist()]
            self.done["states resumed"] += 1
            require(-(-len(rest) // 7) == num_left, "as many batches come as remaining says", f"{len(rest)} {num_left}")
            require(len({*rest}) == len(rest), "a state yields no row twice", f"{rest}")
            if state == json.loads(saved):
                both = sorted([*first, *rest])
                require(len({*both}) == len(both) == len(converter), "a state yields each row once", f"{both}")

    def _command(self, step: Step) -> None:
        words = step["what"].split()
        url = f"{self.files.url}/{damaged_bases.ENTRY}" if self.kind == "entry" else self.files.url
        if words[0] == "ls":
            url = self.files.url
            if self.kind != "entry":
                return
        words.insert(1, url)
        if words[0] == "plan":
            words += ["--seconds", "0.01"]
        with self.judged(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            status = _COMMAND(words, standalone_mode=False)
            require(status in (None, 0, 3), "a command's status is documented", f"{status}")
            require(status != 3 or self.may_fail(), "what is not damaged is whole", f"{words}")
            self.done["commands"] += 1

    def _delete(self, step: Step) -> None:
        self.has_removed = True
        with self.judged(), self.converter() as converter:
            converter.delete()
            self.done["deletions"] += 1
        self._check_held()

    def _sweep(self, step: Step) -> None:
        self.has_removed = True
        before = self.files.everything()
        with self.judged():
            sweep(self.files.url, kept=step["kept"])
            self.done["sweeps"] += 1
        now, changed = self.files.everything(), self.files.changed()
        is_whole = (
            before.get(f"{damaged_bases.ENTRY}/manifest.json")
            == self.base.files[f"{damaged_bases.ENTRY}/manifest.json"]
        )
        if is_whole and "kept" in self.base.name and not step["kept"]:
            gone = {name for name in before.keys() - now.keys() if name.startswith(damaged_bases.ENTRY)}
            require(not gone, "a kept entry stays", f"{sorted(gone)} {sorted(changed)}")
        self._check_held()

    def _check_held(self) -> None:
        """The data of an entry stay while a process holds them."""
        name = f"{damaged_bases.ENTRY}/{damaged_bases.LEASE}"
        if self.files.get(name) == self.base.files.get(name, b""):
            for data in (name for name in self.base.files if PARTS["data"].fullmatch(name)):
                if not data.startswith(BEGUN):
                    require(self.files.get(data) == self.written[data], "what a process holds stays", data)

    def _again(self, step: Step) -> None:
        """What `make_spark_converter` does: use what is whole, write again what is not."""
        self.has_removed = True
        with self.judged():
            root = roots.open_root(self.files.url)
            held, is_new = write._adopt(root, KEY), False
            if held is None:
                attempt = entries.begin(root, KEY, application_id="app-2")
                try:
                    held = entries.commit(root, attempt, write_data(root, attempt, is_kept=True))
                except BaseException:
                    entries.abandon(root, attempt)
                    raise
                is_new = held.manifest.file_names[0][5:37] == attempt.attempt_id
            held.release()
            if is_new:
                with open_of("entry", self.files.url) as converter:
                    require(ids_of(converter) == list(range(len(converter))), "what is written again is read", "")
            self.done["written again"] += is_new
