"""One data set of a case: how it is damaged, which errors are right then, and the laws of the end."""

from __future__ import annotations

import contextlib
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from converter import ConverterError, DatasetConverter, SourceChangedError
from converter.cache import leases, roots
from converter.reading.local_cache import DIRECTORY as LOCAL_DIRECTORY
from tests.faults.campaign import damaged_bases, damages
from tests.faults.campaign.cases import Step, require
from tests.faults.campaign.damaged_files import Files
from tests.faults.campaign.damaged_reads import Bases, open_of

REMEDY = re.compile(
    r"\b(Delete|Convert|Restore|Check|Remove|Choose|Pass|Take|Rename|Upgrade|Write|Install|Make|Call|Open|Wait|Compare|"
    r"Give|Use|Mend|Drop|Leave|Start|Declare|Select|Spark may|Is the|Was the|write|take|keep|call|pass|cast|choose|"
    r"convert|declare|expected)\b"
)
"""What an error says to do has one of these words."""

PARTS: dict[str, re.Pattern[str]] = {
    "manifest": re.compile(r".*manifest\.json"),
    "owner": re.compile(r".*\.owner"),
    "sign": re.compile(r".*(lease-[0-9a-f]+\.json|\.intent)"),
    "commit": re.compile(r"_delta_log/\d{20}\.json"),
    "checkpoint": re.compile(r"_delta_log/(\d{20}\.checkpoint.*|_sidecars/.*)"),
    "hint": re.compile(r"_delta_log/_last_checkpoint"),
    "totals": re.compile(r"_delta_log/\d{20}\.crc"),
    "vector": re.compile(r".*\.bin"),
    "data": re.compile(r"(?!_delta_log)(?!.*notes).*\.parquet"),
}
BEGUN = f"{roots.DIRECTORY}/{damaged_bases.OTHER_KEY}/"


class Case:
    """One data set that is damaged; a subclass says how it is used."""

    def __init__(self, bases: Bases, folder: Path, kind: str, name: str) -> None:
        self.kind, self.folder = kind, folder
        self.base, self.truth = bases.base(kind, name), bases.truth(kind, name)
        self.files = Files(self.base, folder, is_away=kind == "away")
        self.local = folder / "local"
        self.written: dict[str, bytes | None] = dict(self.base.files)
        """What each file was made, or damaged to."""

        self.done: Counter[str] = Counter()
        self.kept: DatasetConverter | None = None
        self.kept_whole = False
        """Whether nothing was damaged when it was opened."""

        self.has_removed = self.has_local_damage = False
        """Whether something of an entry may be gone: deleted, swept, written again."""

        self.has_new_times = False
        """Whether files were written again after a converter was kept, maybe with the bytes that they had."""

    def take(self, step: Step) -> None:
        """Take a step; counts it."""
        self.done[{"damage": "damages", "agree": "agreements", "keep": "converters kept"}.get(step["do"], "uses")] += 1
        getattr(self, f"_{step['do']}")(step)

    def close(self) -> None:
        """Close what is open; nothing of the case is left."""
        if self.kept is not None:
            with contextlib.suppress(ConverterError):
                self.kept.__exit__(None, None, None)
        self.files.close()

    def check_what_is_left(self) -> None:
        """The laws of the end."""
        if self.kept is not None:
            with self.judged():
                self.kept.__exit__(None, None, None)
        left = sorted(lease.name for lease in leases.heartbeat._leases)
        require(not left, "no lease is left", f"{left}")
        now = self.files.everything()
        for name in self.base.foreign:
            require(now.get(name) == self.written[name], "only our own files are deleted", name)
        if self.kept is not None and self.written.get(f"{damaged_bases.ENTRY}/manifest.json", b"") is None:
            # As after a deletion by another process: the last one that releases the entry removes its data.
            self.has_removed = True
        if self.kind in ("files", "table") or not self.has_removed:
            other = {name for name in now.keys() | self.written.keys() if now.get(name) != self.written.get(name)}
            require(not other, "reading changes no file", f"{sorted(other)}")
        if self.files.get(f"{BEGUN}data-{damaged_bases.OTHER_ATTEMPT}.intent") == self.base.files.get(
            f"{BEGUN}data-{damaged_bases.OTHER_ATTEMPT}.intent", b""
        ):
            name = next(name for name in self.base.files if name.startswith(BEGUN) and name.endswith("parquet"))
            require(now.get(name) == self.written[name], "a writer that lives keeps its files", name)
        for name in (self.local / LOCAL_DIRECTORY / "notes", self.local / "notes"):
            require(name.exists() == self.local.exists(), "only our own files are deleted", str(name))

    # What is done to it ------------------------------------------------------------------

    def _damage(self, step: Step) -> None:
        chance = random.Random(step["seed"])
        if step["part"] == "local":
            self._damage_local(step, chance)
            return
        names = sorted(name for name in self.base.files if PARTS[step["part"]].fullmatch(name))
        names = names or sorted(name for name in self.base.files if PARTS["data"].fullmatch(name))
        # Of a log the newest files are read, and few others.
        name = names[-1] if step["part"] in ("commit", "totals") and chance.random() < 0.5 else chance.choice(names)
        data, whole = self.files.get(name), self.base.files[name]
        if data is None:
            return
        others = [self.base.files[other] for other in names if other != name]
        harmed = damages.damage(data, step["how"], step["seed"], whole=whole, others=others)
        if harmed != data:
            self.files.put(name, harmed)
            self.written[name] = harmed
            self.has_new_times |= self.kept is not None
            self.done["files damaged"] += 1

    def _damage_local(self, step: Step, chance: random.Random) -> None:
        root = self.local / LOCAL_DIRECTORY
        names = sorted(path for path in root.rglob("*") if path.is_file() and path.name != "notes")
        pieces = [path for path in names if not path.name.startswith(".")]
        if not names:
            return
        path = chance.choice(pieces if pieces and chance.random() < 0.8 else names)
        others = [other.read_bytes() for other in pieces if other != path]
        data = path.read_bytes()
        harmed = damages.damage(data, step["how"], step["seed"], whole=data, others=others)
        if harmed is None:
            path.unlink()
        else:
            path.write_bytes(harmed)
        self.has_local_damage = True
        self.done["files damaged"] += harmed != data

    def _agree(self, step: Step) -> None:
        """As if the damaged data had been written so: sizes and sums of footers in the manifest are those of now."""
        manifest = self.files.get(f"{damaged_bases.ENTRY}/manifest.json") or b""
        data = {name.removeprefix(f"{damaged_bases.ENTRY}/"): self.files.get(name) for name in self.base.files}
        with contextlib.suppress(ConverterError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            agreeing = damaged_bases.agreeing(manifest, {name: some for name, some in data.items() if some is not None})
            name = f"{damaged_bases.ENTRY}/manifest.json"
            self.files.put(name, agreeing)
            self.written[name] = agreeing

    def _keep(self, step: Step) -> None:
        with self.judged():
            if self.kept is None:
                self.kept_whole = not self.files.changed()
                self.kept = self._open()

    @contextlib.contextmanager
    def converter(self) -> Iterator[DatasetConverter]:
        if self.kept is not None:
            yield self.kept
            return
        with self._open() as converter:
            yield converter

    def _open(self) -> DatasetConverter:
        converter = open_of(self.kind, self.files.url)
        changed = self.files.changed()
        if self.kind in ("entry", "away") and f"{damaged_bases.ENTRY}/manifest.json" not in changed:
            data = [name for name in changed if PARTS["data"].fullmatch(name) and not name.startswith(BEGUN)]
            other = [name for name in data if len(self.files.get(name) or b"") != len(self.base.files[name])]
            require(not other, "an entry with a file of another size is not opened", f"{other}")
        elif self.kind in ("entry", "away"):
            odd = damaged_bases.contradictions(self.files.get(f"{damaged_bases.ENTRY}/manifest.json") or b"")
            require(not odd, "a manifest that contradicts itself is refused", f"{odd}")
        return converter

    @contextlib.contextmanager
    def judged(self, *, may_lack_path: bool = False) -> Iterator[None]:
        """An error is one of the package's, names a file of the data set, and says what to do."""
        try:
            yield
        except ConverterError as error:
            text = str(error)
            self.done["errors by name"] += 1
            names_file = self.folder.name in text or may_lack_path
            require(names_file, "an error names the file", f"{error!r}")
            require(bool(REMEDY.search(text)), "an error says what to do", f"{error!r}")
            # A damaged log may name a path of any length.
            said = text.replace(getattr(error, "path", None) or "\n\n\n", "")
            require(said.count("\n") <= 2 and len(said) < 2000, "an error has at most three lines", f"{error!r}")
            is_of_new_time = self.has_new_times and isinstance(error, SourceChangedError)
            if not is_of_new_time and not self.may_fail():
                raise

    def may_fail(self) -> bool:
        """Whether an error is right: something that is needed is damaged or gone."""
        if self.has_removed or (self.has_local_damage and not self.local.exists()):
            return True
        if self.has_local_damage and not (self.local / LOCAL_DIRECTORY / ".owner").exists():
            return True
        return any(not PARTS["sign"].fullmatch(name) for name in self.files.changed())
