"""Creators, readers, deleters and sweepers on one entry, moved one store call at a time.

Exhaustive where few preemptions are enough (any two programs, each interrupted at each of its calls), generated
where more parties, crashes and suspensions meet.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converter.cache import roots
from converter.errors import CacheError
from tests.faults import turns
from tests.faults.small_entries import KEY
from tests.faults.turns import Actor, World

Program = Callable[[World, Actor], None]
MakeWorld = Callable[..., World]


@pytest.fixture(scope="module")
def make_world() -> Iterator[MakeWorld]:
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=in_memory) as directory, turns.worlds(Path(directory)) as make:
        yield make


def _judge(world: World) -> None:
    """What must hold at the end, whatever the turns were."""
    for actor in world.actors:
        assert actor.error is None or _is_permitted(actor), (actor.name, actor.error, world.trace)
        if isinstance(actor.error, CacheError) and actor.attempt_id:
            assert _committed(world) != actor.attempt_id, "a failed creator left its manifest"
    assert not world.violations, world.violations[0]
    assert not world.left(), (world.left(), world.trace)
    assert not world.violations, world.violations[0]
    assert not world.changed_foreign()


def _is_permitted(actor: Actor) -> bool:
    """A dead process says nothing; one that was suspended may say by name that it was swept; no other may fail."""
    if isinstance(actor.error, turns.Crash):
        return not actor.process.is_alive
    return actor.process.was_suspended and isinstance(actor.error, CacheError)


def _committed(world: World) -> str:
    return turns.attempt_in(f"{world.root_path}/{KEY}/{roots.MANIFEST}")


def _length(make_world: MakeWorld, before: Sequence[Program], program: Program) -> int:
    """How many steps a program takes alone."""
    world = make_world()
    for index, earlier in enumerate(before):
        world.run(world.actor(f"before-{index}", earlier), turns.MAX_STEPS)
    num_steps = world.num_steps
    actor = world.actor("alone", program)
    world.run(actor, turns.MAX_STEPS)
    assert actor.error is None
    length = world.num_steps - num_steps
    world.close()
    return length


# Before them somebody committed and still holds it.
HELD = (turns.create,)

PAIRS: list[tuple[tuple[Program, ...], Program, Program]] = [
    ((), turns.create, turns.create_and_delete),
    ((), turns.create_and_delete, turns.create_and_delete),
    ((), turns.create, turns.open_and_delete),
    ((), turns.create_and_delete, turns.open_and_hold),
    ((), turns.create, turns.sweep),
    ((), turns.create_and_delete, turns.sweep),
    (HELD, turns.open_and_delete, turns.open_and_hold),
    (HELD, turns.open_and_delete, turns.open_and_let_go),
    (HELD, turns.open_and_delete, turns.open_and_delete),
    (HELD, turns.open_and_delete, turns.make),
    (HELD, turns.open_and_delete, turns.sweep),
    (HELD, turns.open_and_hold, turns.sweep),
    (HELD, turns.make, turns.sweep),
    (HELD, turns.sweep, turns.sweep),
]


def _interruptions(
    make_world: MakeWorld, before: Sequence[Program], first: Program, second: Program
) -> Iterator[World]:
    """A world for each way in which one of two programs stops once, and the other runs for a while."""
    programs = (first, second)
    lengths = [_length(make_world, before, program) for program in programs]
    # Of two equal programs it does not matter which one is interrupted.
    for one, other in ((0, 1), (1, 0)) if first is not second else ((0, 1),):
        for start in range(lengths[one] + 1):
            for burst in range(1, lengths[other] + 1):
                world = make_world()
                for index, earlier in enumerate(before):
                    world.run(world.actor(f"before-{index}", earlier), turns.MAX_STEPS)
                actors = [world.actor(f"{program.__name__}-{index}", program) for index, program in enumerate(programs)]
                world.turns = [(actors[one], start), (actors[other], burst), (actors[one], turns.MAX_STEPS)]
                yield world
                world.close()


def _name_of(case: tuple[tuple[Program, ...], Program, Program]) -> str:
    before, first, second = case
    return "-".join([*(["held"] if before else []), first.__name__, second.__name__])


@pytest.mark.parametrize("case", PAIRS, ids=_name_of)
def test_two_programs_keep_the_laws_wherever_each_is_interrupted(
    case: tuple[tuple[Program, ...], Program, Program], make_world: MakeWorld
) -> None:
    for world in _interruptions(make_world, *case):
        world.finish()
        if not any(holding.process.is_alive for holding in world.holdings):
            assert _committed(world) or not world.data_folders(), ("nobody removed the data", world.trace)
        _judge(world)


@pytest.mark.parametrize("program", [turns.open_and_hold, turns.open_and_delete, turns.make, turns.sweep])
def test_what_a_dead_owner_left_is_used_or_removed_wherever_one_is_interrupted(
    program: Program, make_world: MakeWorld
) -> None:
    for world in _interruptions(make_world, HELD, program, turns.sweep):
        world.crash(world.actors[0].process)
        world.finish()
        _judge(world)


@pytest.mark.parametrize("program", [turns.create, turns.make])
def test_of_two_creators_exactly_one_wins_and_both_get_its_manifest(program: Program, make_world: MakeWorld) -> None:
    for world in _interruptions(make_world, (), program, program):
        world.finish()
        outcomes = {actor.outcome for actor in world.actors}
        assert len(world.committed) == 1, world.trace
        assert outcomes == {_committed(world)}, world.trace
        assert world.data_folders() == [f"data-{_committed(world)}"], world.trace
        _judge(world)


def test_two_processes_may_make_the_root_at_the_same_time(make_world: MakeWorld) -> None:
    for start in range(12):
        for burst in range(1, 12):
            world = make_world(is_fine=True, has_root=False)
            first, second = (world.actor(f"open-root-{index}", turns.open_root) for index in range(2))
            world.turns = [(first, start), (second, burst), (first, turns.MAX_STEPS)]
            world.finish()
            _judge(world)
            world.close()


def test_a_root_whose_maker_died_can_be_made_by_the_next(make_world: MakeWorld) -> None:
    for start in range(12):
        world = make_world(is_fine=True, has_root=False)
        first, _ = (world.actor(f"open-root-{index}", turns.open_root) for index in range(2))
        world.run(first, start)
        world.crash(first.process)
        world.finish()
        _judge(world)
        world.close()


EVERY_PROGRAM = [
    turns.create, turns.create_and_delete, turns.make, turns.open_and_let_go, turns.open_and_delete, turns.sweep,
]  # fmt: skip


@pytest.mark.parametrize("before", [(), HELD], ids=["empty", "held"])
@pytest.mark.parametrize("program", EVERY_PROGRAM)
def test_a_crash_at_any_call_leaves_nothing_that_one_sweep_does_not_remove(
    program: Program, before: tuple[Program, ...], make_world: MakeWorld
) -> None:
    length = None
    start = 0
    while length is None or start <= length:
        world = make_world(is_fine=True)
        for earlier in before:
            world.run(world.actor("before", earlier), turns.MAX_STEPS)
        begun = world.num_steps
        victim = world.actor("victim", program)
        world.run(victim, start)
        if victim.has_ended:
            length = world.num_steps - begun
        world.crash(victim.process)
        # The next one finds the key usable.
        world.actor("next", turns.make)
        world.finish()
        _judge(world)
        world.close()
        start += 1


@pytest.mark.parametrize("follower", [turns.open_and_hold, turns.open_and_let_go, turns.make])
@pytest.mark.parametrize("program", [turns.create, turns.create_and_let_go])
def test_a_creator_that_slept_and_was_swept_says_so_and_misleads_nobody(
    program: Program, follower: Program, make_world: MakeWorld
) -> None:
    """It sleeps between its last file and the commit; the sweeper, then a reader, come at each of its calls after."""
    for swept in range(1, 15):
        for woken in [*range(12), turns.MAX_STEPS]:
            world = make_world()
            creator = world.actor("creator", program)
            while not _has_written(world):
                world.run(creator, 1)
            world.suspend(creator.process)
            sweeper = world.actor("sweeper", turns.sweep)
            reader = world.actor("reader", follower)
            world.turns = [(sweeper, swept), (creator, woken), (reader, turns.MAX_STEPS), (sweeper, turns.MAX_STEPS)]
            world.finish()
            _judge(world)
            world.close()


@pytest.mark.parametrize("program", [turns.create, turns.create_and_let_go, turns.create_and_delete, turns.make])
@pytest.mark.parametrize("has_foreign", [False, True], ids=["ours-alone", "with-foreign"])
def test_a_creator_may_sleep_through_a_sweep_at_any_call(
    has_foreign: bool, program: Program, make_world: MakeWorld
) -> None:
    """With something foreign in it the folder stays, so that its absence does not warn the creator."""
    length = _length(make_world, (), program)
    for start in range(1, length + 1):
        world = make_world(has_foreign=has_foreign)
        creator = world.actor("creator", program)
        world.run(creator, start)
        world.suspend(creator.process)
        sweeper = world.actor("sweeper", turns.sweep)
        reader = world.actor("reader", turns.open_and_hold)
        world.turns = [(sweeper, turns.MAX_STEPS), (creator, turns.MAX_STEPS), (reader, turns.MAX_STEPS)]
        world.finish()
        _judge(world)
        world.close()


def test_a_heartbeat_that_wakes_up_does_not_revive_what_was_swept(make_world: MakeWorld) -> None:
    """Its process slept between its last file and the commit."""
    for beaten in range(1, 8):
        for swept in range(1, 15):
            world = make_world()
            creator = world.actor("creator", turns.create)
            while not _has_written(world):
                world.run(creator, 1)
            world.suspend(creator.process)
            heartbeat = world.actor("heartbeat", turns.renew, creator.process)
            sweeper = world.actor("sweeper", turns.sweep)
            world.turns = [(heartbeat, beaten), (sweeper, swept), (heartbeat, 1), (creator, turns.MAX_STEPS)]
            world.finish()
            _judge(world)
            world.close()


def test_a_lease_may_be_given_back_at_any_call_of_its_renewal(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """By the process that renews it: nothing comes back, and nobody hears that it was swept."""
    length = _length(make_world, (), turns.create_and_delete)
    for start in range(length + 1):
        for beaten in range(1, 8):
            world = make_world()
            creator = world.actor("creator", turns.create_and_delete)
            heartbeat = world.actor("heartbeat", turns.renew, creator.process)
            world.turns = [(creator, start), (heartbeat, beaten), (creator, turns.MAX_STEPS)]
            world.finish()
            assert os.listdir(world.root_path) == [roots.OWNER_FILE], world.trace
            _judge(world)
            world.close()
    assert "taken for dead" not in caplog.text


def _has_written(world: World) -> bool:
    folders = [f"{world.root_path}/{KEY}/{name}" for name in world.data_folders()]
    return any(len(os.listdir(folder)) == turns.NUM_FILES for folder in folders)


# Generated ----------------------------------------------------------------------

PROGRAMS = st.sampled_from(
    [
        turns.create, turns.create_and_let_go, turns.create_and_delete, turns.make, turns.open_and_hold,
        turns.open_and_let_go, turns.open_and_delete, turns.open_and_delete, turns.sweep, turns.sweep,
    ]
)  # fmt: skip
EVENTS = st.sampled_from(["", "", "", "", "", "stop"])
TURNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20), EVENTS), min_size=4, max_size=14)


@settings(derandomize=True, max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    is_held=st.booleans(),
    has_foreign=st.booleans(),
    is_fine=st.booleans(),
    programs=st.lists(PROGRAMS, min_size=2, max_size=4),
    hosts=st.lists(st.sampled_from(["one", "two"]), min_size=4, max_size=4),
    schedule=TURNS,
    stop=st.sampled_from(["crash", "suspend"]),
)
def test_any_parties_keep_the_laws_under_any_turns(
    make_world: MakeWorld,
    is_held: bool,
    has_foreign: bool,
    is_fine: bool,
    programs: list[Program],
    hosts: list[str],
    schedule: list[tuple[int, int, str]],
    stop: str,
) -> None:
    world = make_world(is_fine=is_fine, has_foreign=has_foreign)
    try:
        if is_held:
            world.run(world.actor("holder", turns.create), turns.MAX_STEPS)
        actors = [
            world.actor(f"{program.__name__}-{index}", program, world.process(hosts[index]))
            for index, program in enumerate(programs)
        ]
        heartbeats = [world.actor(f"heartbeat-{actor.name}", turns.renew, actor.process) for actor in actors[:2]]
        for who, num_steps, event in schedule:
            actor = actors[who % len(actors)]
            if not event:
                world.run(actor, num_steps)
            elif stop == "crash":
                world.crash(actor.process)
            else:
                world.suspend(actor.process)
                if who < len(heartbeats):
                    world.run(heartbeats[who], num_steps)
        world.finish()
        _judge(world)
    finally:
        world.close()
