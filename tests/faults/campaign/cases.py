"""What a campaign is, and one case of it: drawn from its seed and number alone, run in a folder of its own."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import converter

Step = dict[str, Any]
"""One thing that a case does, as values that JSON can hold."""

_IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where the files of cases are: a disk would take longer than most cases."""

_PACKAGE = str(Path(converter.__file__).parent)


class ViolationError(AssertionError):
    """A law that did not hold."""

    def __init__(self, law: str, what: str) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law


def require(holds: bool, law: str, what: str) -> None:
    """Raise a ViolationError unless something holds."""
    if not holds:
        raise ViolationError(law, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A kind of cases."""

    name: str
    draw: Callable[[random.Random], list[Step]]
    """The steps of a case. It must ask nothing but the generator, so that the same number is the same case."""

    run: Callable[[Sequence[Step], Any, Path], Counter[str]]
    """Take steps, with what `shared` gave and in an empty folder, and return what was done, for the table. Whatever it
    raises is a violation. Any of the steps may be missing: a case that fails is made smaller."""

    shared: Callable[[Path], AbstractContextManager[Any]]
    """What all cases of a process have in common, such as a Spark session; the folder is theirs."""

    max_seconds: float = 60.0
    """A case that takes longer hangs."""

    max_memory_bytes: int | None = None
    """A process that asks for more gets a MemoryError (`RLIMIT_AS`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a case."""

    steps: list[Step]
    done: Counter[str] = field(default_factory=Counter)
    kind: str | None = None
    """How it failed, in a few words that stay the same if steps are left out; None if it did not."""

    what: str = ""


def draw(campaign: Campaign, seed: int, number: int) -> list[Step]:
    """All steps of a case."""
    return campaign.draw(random.Random(f"{campaign.name} {seed} {number}"))


def run_case(campaign: Campaign, seed: int, number: int, kept: Sequence[int] | None, shared: Any) -> Outcome:
    """Run a case, or only the steps of it that are named by their numbers."""
    steps = draw(campaign, seed, number)
    if kept is not None:
        steps = [steps[one] for one in kept]
    folder = Path(tempfile.mkdtemp(prefix=f"{campaign.name}-{number}-", dir=_IN_MEMORY))
    try:
        return Outcome(steps=steps, done=campaign.run(steps, shared, folder))
    except Exception as error:  # noqa: BLE001 (all are violations)
        return Outcome(steps=steps, kind=kind_of(error), what=_told(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kind_of(error: BaseException) -> str:
    """How a case failed: the law, or the error and the place in the package that it came from."""
    if isinstance(error, ViolationError):
        return error.law
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_PACKAGE)]
    place = f" in {Path(places[-1].filename).name}:{places[-1].name}" if places else ""
    return f"{type(error).__name__}{place}"


def _told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-6000:]
