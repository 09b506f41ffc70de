"""When an entry may be used again: its name is all that decides it, and a session is given back as it was."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converter.sources.spark import confs, identity
from converter.sources.spark.confs import changed_confs, users_confs
from converter.sources.spark.identity import Evidence, entry_key
from converter.sources.spark.input_files import Inputs
from converter.sources.spark.options import WriteOptions
from tests.properties import examples

options = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=5), max_size=4
)
names = st.text(max_size=9)


@examples(50)
@given(names, names, options)
def test_a_key_is_two_halves_of_lower_case_hex(name: str, schema: str, write_options: dict[str, Any]) -> None:
    assert re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{16}", entry_key(name, schema=schema, write_options=write_options))


@examples(100)
@given(st.lists(st.tuples(names, names, options), min_size=2, max_size=2))
def test_keys_are_equal_exactly_where_everything_is(inputs: list[tuple[str, str, dict[str, Any]]]) -> None:
    one, other = (entry_key(name, schema=schema, write_options=found) for name, schema, found in inputs)
    assert (one[:16] == other[:16]) == (inputs[0][0] == inputs[1][0])
    # 1 and True are equal to Python, and two options to us.
    assert (one[17:] == other[17:]) == (repr_of(inputs[0][1:]) == repr_of(inputs[1][1:]))


def repr_of(parts: Any) -> str:
    schema, found = parts
    return repr((schema, sorted(found.items())))


def test_the_order_of_options_does_not_matter() -> None:
    one = entry_key("k", schema="s", write_options={"a": 1, "b": 2})
    assert one == entry_key("k", schema="s", write_options={"b": 2, "a": 1})


def test_schema_and_options_cannot_pass_for_each_other() -> None:
    found = {
        entry_key("k", schema=schema, write_options=given)
        for schema, given in [('s", {', {}), ("s", {"": "{"}), ("", {"s": {}})]
    }
    assert len(found) == 3


@examples(50)
@given(names, options)
def test_nobody_elses_identity_is_never_met_again(schema: str, write_options: dict[str, Any]) -> None:
    keys = [entry_key(None, schema=schema, write_options=write_options) for _ in range(3)]
    assert len({key[:16] for key in keys}) == 3
    assert len({key[16:] for key in keys}) == 1


def test_a_given_key_does_not_change_between_versions() -> None:
    # Another one would never find again what a user kept under a cache_key.
    assert (
        entry_key("key:train", schema="{}", write_options={"float_dtype": "float32"})
        == "b79d3ac4aaf02d6f-681ef491cb2b242f"
    )


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_options_of_a_key_are_those_that_entries_were_written_under(is_kept: bool) -> None:
    chosen = WriteOptions(
        float_dtype=None,
        shapes={"x": (2, 3), "raw": ("float32", (4,)), "ragged": None},
        decode={},
        decode_at="read",
        categories={},
        scales={},
        row_group_bytes=8 << 20,
        compression="auto",
        shuffle_rows_seed=None,
        writer="executors",
    )
    # Under other names or forms nothing that users kept would be found again.
    expected = {
        "float_dtype": None,
        "shapes": {"x": [2, 3], "raw": ["float32", (4,)], "ragged": []},
        "row_group_bytes": 8 << 20,
        "compression": "auto",
        "shuffle_rows_seed": None,
        "writer": "executors",
    }
    assert chosen.for_key(is_kept=is_kept) == expected | ({"is_kept": True} if is_kept else {})


# Confs


class RefusedError(Exception):
    """As each platform has one of its own."""


class Conf:
    """Confs as a Spark session has them: read-only ones can neither be set nor unset."""

    def __init__(self, values: dict[str, str], *, refused: set[str]) -> None:
        self.values, self.refused = dict(values), refused

    def get(self, name: str, default: Any) -> Any:
        return self.values.get(name, default)

    def set(self, name: str, value: str) -> None:
        if name in self.refused:
            raise RefusedError(name)
        self.values[name] = value

    def unset(self, name: str) -> None:
        if name in self.refused:
            raise RefusedError(name)
        self.values.pop(name, None)


class Session:
    def __init__(self, refused: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.conf = Conf({"user": "set", "both": "old"}, refused=set(refused))

    def sql(self, _: str) -> Any:
        return SimpleNamespace(collect=lambda: list(self.conf.values.items()))


WANTED = {"both": "new", "fresh": "1", "user": "other"}


def test_confs_are_changed_inside_and_given_back_after() -> None:
    session = Session()
    with changed_confs(session, WANTED):
        assert session.conf.values == WANTED
    assert session.conf.values == {"user": "set", "both": "old"}


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_confs_are_given_back_when_the_block_fails(kind: type[BaseException]) -> None:
    session = Session()

    def fail() -> None:
        with changed_confs(session, WANTED):
            raise kind("of the block")

    with pytest.raises(kind, match="of the block"):
        fail()
    assert session.conf.values == {"user": "set", "both": "old"}


@pytest.mark.parametrize(
    "refused",
    [set(names) for count in range(4) for names in itertools.combinations(WANTED, count)],
    ids=lambda names: "-".join(sorted(names)),
)
def test_a_conf_that_is_refused_stays_and_the_others_are_given_back(refused: set[str]) -> None:
    session = Session(refused)
    before = dict(session.conf.values)
    with changed_confs(session, WANTED):
        assert session.conf.values == before | {name: value for name, value in WANTED.items() if name not in refused}
    assert session.conf.values == before


def test_a_conf_that_cannot_be_given_back_is_told_and_does_not_keep_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A platform may allow a conf and refuse it later, e.g. because the session was stopped.
    session = Session()
    with changed_confs(session, WANTED):
        session.conf.refused.add("both")
    assert session.conf.values == {"user": "set", "both": "new"}
    assert caplog.text.count("Could not restore the conf both") == 1


class AwayError(Exception):
    """As pyspark's, after it has tried for ten minutes."""

    def __str__(self) -> str:
        return "<_MultiThreadedRendezvous of RPC that terminated with: status = StatusCode.UNAVAILABLE>"


class AwayConf(Conf):
    """Confs of a server that ends once `is_away` is set."""

    is_away = False
    num_calls = 0

    def get(self, name: str, default: str | None = None) -> str | None:
        return self._asked() or super().get(name, default)

    def set(self, name: str, value: str) -> None:
        self._asked()
        super().set(name, value)

    def unset(self, name: str) -> None:
        self._asked()
        super().unset(name)

    def _asked(self) -> None:
        if self.is_away:
            self.num_calls += 1
            raise AwayError


def test_a_server_that_is_away_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """Each call to Spark Connect's server would take ten minutes."""
    session = Session()
    conf = session.conf = AwayConf({"user": "set", "both": "old"}, refused=set())
    with changed_confs(session, WANTED):
        conf.is_away = True
    assert conf.num_calls == 1
    assert "these confs were not restored: both, fresh" in caplog.text

    def fail() -> None:
        with changed_confs(session, WANTED):
            conf.is_away = True
            raise AwayError

    conf.is_away, conf.num_calls = False, 0
    with pytest.raises(AwayError):
        fail()
    assert conf.num_calls == 0

    conf.is_away = True
    with pytest.raises(AwayError):
        fail()
    assert conf.num_calls == 1


class Py4JNetworkError(Exception):
    """As py4j's, which is known by its name."""


class BrokenConf(AwayConf):
    """Confs of a JVM whose connection is broken: as after a Ctrl-C for one call, and then refused if it has ended."""

    num_broken = 0

    def _asked(self) -> None:
        if self.num_broken:
            self.num_broken -= 1
            raise Py4JNetworkError("Answer from Java side is empty")
        super()._asked()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Py4JNetworkError])
def test_confs_are_given_back_over_a_new_connection_if_an_interrupt_broke_the_other(kind: type[BaseException]) -> None:
    session = Session()
    conf = session.conf = BrokenConf({"user": "set", "both": "old"}, refused=set())

    def fail() -> None:
        with changed_confs(session, WANTED):
            conf.num_broken = 1
            raise kind("of the block")

    with pytest.raises(kind, match="of the block"):
        fail()
    assert conf.values == {"user": "set", "both": "old"}


def test_a_jvm_that_has_ended_is_not_asked_for_each_conf(caplog: pytest.LogCaptureFixture) -> None:
    session = Session()
    conf = session.conf = BrokenConf({"user": "set", "both": "old"}, refused=set())
    with changed_confs(session, WANTED):
        conf.num_broken, conf.is_away = 1, True
    assert caplog.text.count("Could not restore the conf") == 1
    assert "these confs were not restored: both, fresh" in caplog.text


def test_what_a_signal_handler_raises_is_raised_and_all_confs_are_restored() -> None:
    """Setting and restoring a conf are requests to a server, in which most of the time of a short write passes."""

    class OfTheUserError(Exception):
        pass

    def handle(*_: object) -> None:
        raise OfTheUserError

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        for when in range(2 * len(WANTED) + 2):
            session, calls = Session(), itertools.count()

            def set_or_raise(
                name: str, value: str, session: Session = session, calls: Iterator[int] = calls, when: int = when
            ) -> None:
                Conf.set(session.conf, name, value)
                if next(calls) == when:
                    signal.raise_signal(signal.SIGUSR1)

            values = dict(session.conf.values)
            session.conf.set = set_or_raise  # type: ignore[method-assign]
            with contextlib.suppress(OfTheUserError), changed_confs(session, WANTED):
                pass
            assert session.conf.values == values
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_block_in_a_block_gives_back_what_the_outer_one_set() -> None:
    session = Session()
    with changed_confs(session, {"both": "outer"}):
        with changed_confs(session, {"both": "inner"}):
            assert session.conf.values["both"] == "inner"
        assert session.conf.values["both"] == "outer"
    assert session.conf.values["both"] == "old"


def test_blocks_of_several_threads_give_back_what_the_user_had_set_in_whatever_order_they_end() -> None:
    for ends in itertools.permutations(range(3)):
        session = Session()
        blocks = [contextlib.ExitStack() for _ in range(3)]
        for number, block in enumerate(blocks):
            block.enter_context(changed_confs(session, {"both": f"of {number}", "fresh": str(100 * (1 + number % 2))}))
            # Numbers bound memory.
            assert session.conf.values == {"user": "set", "both": f"of {number}", "fresh": "100"}
        for count, number in enumerate(ends, 1):
            assert session.conf.values["both"] == f"of {max(set(range(3)) - {*ends[: count - 1]})}"
            assert users_confs(session) == {"user": "set", "both": "old"}
            blocks[number].close()
        assert session.conf.values == {"user": "set", "both": "old"}
        assert not confs._changes


def test_a_block_whose_conf_is_refused_leaves_those_of_others() -> None:
    session = Session()
    with changed_confs(session, {"both": "mine"}):
        session.conf.refused.add("both")
        with changed_confs(session, {"both": "other"}):
            assert session.conf.values["both"] == "mine"
        session.conf.refused.clear()
    assert session.conf.values["both"] == "old"
    assert not confs._changes


# What is remembered


class Frame:
    """A DataFrame that depends on what it says, and is the same as another of its name."""

    sparkSession = None  # noqa: N815 (Spark's name)
    _jdf = "a classic one's"

    def __init__(self, name: str) -> None:
        self.name = name

    def sameSemantics(self, other: Frame) -> bool:  # noqa: N802 (Spark's name)
        return self.name == other.name


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> Evidence:
    found = Evidence(
        plan="plan",
        semantic_hash=1,
        confs=(),
        inputs=Inputs(files=(("a", 1, 2, (3,)),), ways=()),
        paths=("a",),
        roots=("a",),
        is_racy=False,
        is_listed=True,
    )
    monkeypatch.setattr(identity, "_proofs", {})
    monkeypatch.setattr(identity, "look_at", lambda paths, *_: found.inputs if paths == ("a",) else Inputs((), ()))
    monkeypatch.setattr(identity, "_confs_of", lambda _: found.confs)
    return found


def test_what_was_remembered_is_recalled_newest_first_until_it_is_forgotten(evidence: Evidence) -> None:
    for key in ("one", "two"):
        identity.remember("bucket", Frame("a"), evidence, key)
    assert identity.recall("bucket", Frame("a"), evidence) == ["two", "one"]
    assert identity.recall("other bucket", Frame("a"), evidence) == []
    assert identity.recall("bucket", Frame("b"), evidence) == []
    identity.forget("two")
    assert identity.recall("bucket", Frame("a"), evidence) == ["one"]


def test_any_doubt_is_not_remembered(evidence: Evidence) -> None:
    changed = replace(evidence, inputs=replace(evidence.inputs, files=(("a", 1, 2, (4,)),)))
    both = replace(evidence.inputs, files=(("a", 1, 2, (3,)), ("b", 1, 2, (3,))))
    vanished = replace(evidence, inputs=both, paths=("a", "b"))
    other_confs = replace(evidence, confs=(("spark.sql.ansi.enabled", "true"),))
    racy = replace(evidence, is_racy=True)
    unlisted = replace(evidence, is_listed=False)
    for before in (None, changed, vanished, other_confs, racy, unlisted):
        identity.remember("bucket", Frame("a"), before, "key")
    assert identity.recall("bucket", Frame("a"), evidence) == []
    identity.remember("bucket", Frame("a"), evidence, "key")
    assert identity.recall("bucket", Frame("a"), changed) == []
    assert identity.recall("bucket", Frame("a"), unlisted) == []
    assert identity.recall("bucket", Frame("a"), None) == []


def test_a_probe_that_fails_is_a_doubt_and_no_error(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity.gather_evidence(object()) is None

    def fail(paths: list[str], *_: object) -> None:
        raise FileNotFoundError(paths[0])

    with monkeypatch.context() as patched:
        patched.setattr(identity, "look_at", fail)
        identity.remember("bucket", Frame("a"), evidence, "key")
    assert identity.recall("bucket", Frame("a"), evidence) == []


def test_only_so_many_frames_are_held(evidence: Evidence) -> None:
    for number in range(identity._MAX_PROOFS + 5):
        identity.remember("bucket", Frame("a"), evidence, str(number))
    found = identity.recall("bucket", Frame("a"), evidence)
    assert found == [str(number) for number in range(identity._MAX_PROOFS + 4, 4, -1)]


@pytest.mark.parametrize(
    ("ids", "others", "is_same"),
    [
        ([12, 7, 12], [99, 3, 99], True),
        ([12, 7, 12], [12, 7, 7], False),
    ],
)
def test_plans_are_compared_without_their_running_numbers(ids: list[int], others: list[int], is_same: bool) -> None:
    one, other = (
        identity._renumbered(json.dumps([{"exprId": {"id": i, "jvmId": "J"}} for i in numbers], separators=(",", ":")))
        for numbers in (ids, others)
    )
    assert (one == other) == is_same


@pytest.mark.parametrize("name", ["a", 'a"b', "a\\", 'x,"id":7,"jvmId"'])
def test_plans_are_compared_without_names_of_tables(name: str) -> None:
    def plan(qualifier: Any, value: str) -> str:
        return identity._renumbered(
            json.dumps([{"name": "x", "qualifier": qualifier, "v": value}], separators=(",", ":"))
        )

    assert plan([], name) == plan("[t]", name) == plan(f"[{name}]", name) != plan([], f"{name}!")
