"""Creators, readers, deleters and sweepers on one entry, moved one store call at a time.

Exhaustive where few preemptions are enough (any two programs, each interrupted at each of its calls), generated
where more parties, crashes and suspensions meet.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from converter import cache
from converter.errors import CacheError
from tests.faults import turns
from tests.faults.small_entries import KEY
from tests.faults.turns import Actor, World

Program = Callable[[World, Actor], None]
MakeWorld = Callable[..., World]


@pytest.fixture(scope="module")
def make_world() -> Iterator[MakeWorld]:
    with tempfile.TemporaryDirectory() as directory, turns.worlds(Path(directory)) as make:
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
    return turns.attempt_in(f"{world.root_path}/{KEY}/{cache.MANIFEST}")


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


# Before them somebody committed and still holds, or committed and died.
HELD = (turns.create,)

PAIRS: list[tuple[tuple[Program, ...], Program, Program]] = [
    ((), turns.create, turns.create),
    ((), turns.make, turns.make),
    ((), turns.create, turns.create_and_delete),
    ((), turns.create_and_delete, turns.create_and_delete),
    ((), turns.create, turns.open_and_delete),
    ((), turns.create_and_delete, turns.open_and_hold),
    ((), turns.create, turns.sweep),
    ((), turns.create_and_delete, turns.sweep),
    (HELD, turns.open_and_delete, turns.open_and_hold),
    (HELD, turns.open_and_delete, turns.open_and_let_go),
    (HELD, turns.open_and_delete, turns.open_and_delete),
    (HELD, turns.open_and_delete, turns.create),
    (HELD, turns.open_and_delete, turns.sweep),
    (HELD, turns.open_and_hold, turns.sweep),
    (HELD, turns.sweep, turns.sweep),
]


def _name_of(pair: tuple[tuple[Program, ...], Program, Program]) -> str:
    before, first, second = pair
    return "-".join([*(["held"] if before else []), first.__name__, second.__name__])


@pytest.mark.parametrize("has_died", [False, True], ids=["all-live", "earlier-died"])
@pytest.mark.parametrize("pair", PAIRS, ids=_name_of)
def test_two_programs_keep_the_laws_wherever_each_is_interrupted(
    pair: tuple[tuple[Program, ...], Program, Program], has_died: bool, make_world: MakeWorld
) -> None:
    before, first, second = pair
    lengths = _length(make_world, before, first), _length(make_world, before, second)
    for order in ((0, 1), (1, 0)):
        for start in range(lengths[order[0]] + 1):
            for burst in range(1, lengths[order[1]] + 1):
                world = make_world()
                for index, earlier in enumerate(before):
                    actor = world.actor(f"before-{index}", earlier)
                    world.run(actor, turns.MAX_STEPS)
                    if has_died:
                        world.crash(actor.process)
                actors = [world.actor("first", first), world.actor("second", second)]
                if start:
                    world.run(actors[order[0]], start)
                world.run(actors[order[1]], burst)
                world.run(actors[order[0]], turns.MAX_STEPS)
                world.finish()
                _judge(world)
                world.close()
