"""A crowd on one cache in simulated time: one store call at a time, crashes, suspensions, hours that pass.

The real code of the cache runs (see `tests/faults/turns.py`); heartbeats renew their leases each simulated minute.
After each change of the store: who holds an entry has all its files and its lease, and a manifest names only what is
there. In the end one sweep leaves nothing.
"""

from __future__ import annotations

import contextlib
import logging
import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from converter.cache import leases, roots, sweeps
from converter.errors import CacheError
from tests.faults import turns
from tests.faults.campaign.cases import Campaign, Step, ViolationError, require
from tests.faults.campaign.life_parts import in_memory
from tests.faults.turns import Actor, World

_KEYS = tuple(f"{number:016x}-{number:016x}" for number in range(1, 4))
_MAX_STEPS = 200_000
_SAFE_SECONDS = 100.0
"""A suspension that misses one renewal at most: nothing may be taken from its process. In an operation that stands
still for longer, a file that is not yet, or never, renewed may be taken for a dead process's."""

_ACTS = ("make", "make", "create", "open", "open", "open", "release", "release", "delete", "delete", "sweep", "sweep")


def _draw(chance: random.Random) -> list[Step]:
    num_parties, num_keys = chance.randint(2, 6), chance.choice([1, 1, 2, 3])
    hosts = "".join(chance.choice("12") for _ in range(num_parties))
    world = {"hosts": hosts, "is_fine": chance.random() < 0.3, "has_foreign": chance.random() < 0.3}
    steps: list[Step] = []
    for _ in range(chance.randint(10, 80)):
        party = chance.randrange(num_parties)
        do = chance.choices(["act", "move", "pass", "suspend", "crash"], [50, 30, 10, 5, 5])[0]
        step: Step = {"do": do, "party": party, **world}
        if do == "act":
            step |= {"act": chance.choice(_ACTS), "key": chance.randrange(num_keys), "which": chance.randrange(4)}
        if do in ("act", "move"):
            step["steps"] = chance.choice([1, 1, 2, 3, 5, 8, 13, 21, 1000])
        if do in ("pass", "suspend"):
            step["seconds"] = round(10 ** chance.uniform(0, 4))
        steps.append(step)
    return steps


@dataclass(slots=True, kw_only=True, eq=False)
class _Party:
    """One process, and what it holds."""

    main: Actor
    heartbeat: Actor
    queue: deque[Step] = field(default_factory=deque)
    holdings: list[turns.Holding] = field(default_factory=list)
    is_busy: bool = False
    busy_since: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Crowd:
    """All processes of a case."""

    world: World
    hosts: str
    done: Counter[str] = field(default_factory=Counter)
    parties: dict[int, _Party] = field(default_factory=dict)
    renewed: float = 0.0
    """When the heartbeats last ran."""

    def take(self, step: Step) -> None:
        """One step of the case."""
        party = self.party(step["party"])
        if step["do"] == "act":
            party.queue.append(step)
        if step["do"] in ("act", "move"):
            self.world.run(party.main, step["steps"])
        elif step["do"] == "crash":
            self.crash(step["party"])
        elif step["do"] == "pass":
            self.let_pass(step["seconds"], None)
        elif step["do"] == "suspend":
            self.done["suspensions"] += 1
            if step["seconds"] > _SAFE_SECONDS:
                party.main.process.was_suspended = True
                for holding in party.holdings:
                    holding.is_void = True
            self.let_pass(step["seconds"], party)
        for content, (path, _) in list(self.world.committed.items()):
            # A manifest that is gone never comes back.
            if turns._read_or_none(path) != content:
                del self.world.committed[content]

    def party(self, number: int) -> _Party:
        """A process that lives; a new one in place of one that crashed."""
        if number not in self.parties:
            process = self.world.process(self.hosts[number])
            name = f"party-{number}"
            main = self.world.actor(name, lambda _, actor: self.live(self.parties[number], actor), process)
            heartbeat = self.world.actor(f"heartbeat-of-{name}", _beat, process)
            self.parties[number] = _Party(main=main, heartbeat=heartbeat)
        return self.parties[number]

    def crash(self, number: int) -> None:
        """A process dies where it stands."""
        self.done["crashes"] += 1
        party = self.parties.pop(number)
        self.done["crashes within an act"] += party.is_busy
        self.world.crash(party.main.process)

    def let_pass(self, seconds: float, suspended: _Party | None) -> None:
        """Time passes, and all heartbeats but one renew their leases each minute."""
        until = self.world.clock + seconds
        self.done["simulated seconds"] += round(seconds)
        while self.world.clock < until:
            self.world.clock = min(until, self.renewed + leases.RENEW_SECONDS)
            if self.world.clock < self.renewed + leases.RENEW_SECONDS:
                self.note_who_stands_still()
                break
            self.renewed = self.world.clock
            self.note_who_stands_still()
            for party in self.parties.values():
                if party is not suspended:
                    self.world.run(party.heartbeat, _MAX_STEPS)

    def note_who_stands_still(self) -> None:
        """The heartbeat does not help in an operation that takes so long."""
        for party in self.parties.values():
            is_slow = party.is_busy and self.world.clock - party.busy_since > _SAFE_SECONDS
            party.main.has_stood_still = party.main.has_stood_still or is_slow

    def live(self, party: _Party, actor: Actor) -> None:
        """What the main thread of a process does."""
        while True:
            while not party.queue:
                self.world.wait()
            step = party.queue.popleft()
            actor.key = _KEYS[step["key"]]
            party.is_busy, party.busy_since, actor.has_stood_still = True, self.world.clock, False
            try:
                self.done[f"{step['act']}: {self.act(party, actor, step)}"] += 1
            except CacheError as error:
                if not actor.process.was_suspended and not actor.has_stood_still:
                    raise ViolationError("no error without a suspension", f"{step}: {error!r}") from error
                self.done["told of a suspension"] += 1
            party.is_busy = False

    def act(self, party: _Party, actor: Actor, step: Step) -> str:
        """One operation of the cache; what came of it."""
        world, act = self.world, step["act"]
        if act == "sweep":
            report = sweeps.sweep_root(world.root, older_than_seconds=0, kept=True)
            return "something" if report.num_files else "nothing"
        if act in ("release", "delete"):
            if not party.holdings:
                return "nothing held"
            holding = party.holdings.pop(step["which"] % len(party.holdings))
            world.holdings.remove(holding)
            (holding.entry.delete if act == "delete" else holding.entry.release)()
            if act == "delete":
                named = turns.attempt_in(f"{world.root_path}/{holding.entry.key}/{roots.MANIFEST}")
                require(named != holding.entry.manifest.fingerprint, "a deleted entry is gone", "its manifest is there")
            return "done"
        programs: dict[str, Callable[[World, Actor], None]]
        programs = {"make": turns.make, "create": turns.create, "open": turns.open_and_hold}
        programs[act](world, actor)
        gained = [one for one in world.holdings if one.process is actor.process and one not in party.holdings]
        party.holdings += gained
        return "held" if gained else "not there"

    def end(self) -> None:
        """Let every process do what it still has to do."""
        for party in self.parties.values():
            while (party.queue or party.is_busy) and not party.main.has_ended:
                self.world.run(party.main, _MAX_STEPS)


def _beat(world: World, actor: Actor) -> None:
    while True:
        actor.process.pulse.renew()
        world.wait()


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[Callable[..., World]]:
    logging.getLogger("converter").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir=in_memory()) as quick, turns.worlds(Path(quick)) as make_world:
        yield make_world


def _run(steps: Sequence[Step], make_world: Callable[..., World], folder: Path) -> Counter[str]:
    first = steps[0]
    world = make_world(is_fine=first["is_fine"], has_foreign=first["has_foreign"])
    world.max_steps = _MAX_STEPS
    crowd = _Crowd(world=world, hosts=first["hosts"], renewed=world.clock)
    try:
        for step in steps:
            crowd.take(step)
            _require_laws(crowd)
        crowd.end()
        _require_laws(crowd)
        crowd.done["store calls"] += world.num_steps
        left = world.left()
        require(not left, "a sweep removes what is left", f"{left} after … {world.trace[-20:]}")
        _require_laws(crowd)
        require(not world.changed_foreign(), "foreign files stay as they are", f"{world.changed_foreign()}")
    finally:
        world.close()
    return crowd.done


def _require_laws(crowd: _Crowd) -> None:
    for actor in crowd.world.actors:
        if actor.error is not None and not isinstance(actor.error, turns.Crash):
            raise actor.error
    if crowd.world.violations:
        what, _, trace = crowd.world.violations[0].partition(" (after ")
        raise ViolationError("who holds an entry has it", f"{what}, after … {trace[-300:]}")


CAMPAIGN = Campaign(name="crowd_in_turns", draw=_draw, run=_run, shared=_shared)
