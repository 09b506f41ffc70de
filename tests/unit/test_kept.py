"""Entries, states and pickles that releases have kept are read as they were: the promise of COMPATIBILITY.md.

States of TensorFlow's datasets are in tests/integration/test_kept_in_tensorflow.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import converter
from converter import StateMismatchError, pickled
from converter.state import STATE_VERSION
from tests.compat.keep import BATCH_SIZE, BUCKETED, ENTRIES, LOADERS, part_of, read
from tests.compat.kept import RELEASES, Kept, ids_from

releases = pytest.mark.parametrize("release", RELEASES, ids=[each.folder.name for each in RELEASES])
STATES = [name for name in RELEASES[0].index["entries"]["executors"]["states"] if "make_tf" not in name]


def test_this_release_has_kept_its_own() -> None:
    """If it has not: python -m tests.compat.keep."""
    assert converter.__version__ in {each.index["version"] for each in RELEASES}


@releases
@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_has_its_rows_its_types_and_its_fingerprint(release: Kept, name: str, tmp_path: Path) -> None:
    kept = release.index["entries"][name]
    with release.unpack(name, tmp_path) as made:
        assert made.fingerprint == kept["fingerprint"]
        assert made.url.endswith(f"/{kept['key']}")
        assert {field.name: str(field.dtype) for field in made.schema} == kept["dtypes"]
        assert read(made) == {column: release.index["rows"][column] for column in made.schema.names}
        assert made.verify(every_row=True) == []


def options_of(state: str) -> tuple[str, dict[str, Any]]:
    """The loader and the arguments that a state is of."""
    kind, _, name = state.partition(" ")
    return kind, {"batch_size": BATCH_SIZE, "columns": ["id"], **LOADERS[name]}


@releases
@pytest.mark.parametrize("name", STATES)
def test_a_state_is_resumed_at_its_very_row(release: Kept, name: str, tmp_path: Path) -> None:
    kept = release.index["entries"]["executors"]["states"][name]
    with release.unpack("executors", tmp_path) as made:
        if name.startswith("make_"):
            kind, options = options_of(name)
            loader = getattr(made, kind)(**options)
        elif name.startswith("bucketed"):
            loader = made.make_batch_reader(**BUCKETED)
        else:
            part = part_of(made, name.partition(" ")[0])
            loader = part.make_batch_reader(batch_size=BATCH_SIZE, columns=["id"], shuffle=True, seed=5)
        with loader:
            assert ids_from(loader, kept["state"]) == kept["ids"]


@releases
def test_a_state_of_one_loader_is_resumed_by_another_one(release: Kept, tmp_path: Path) -> None:
    states = release.index["entries"]["executors"]["states"]
    with release.unpack("executors", tmp_path) as made:
        for name in LOADERS:
            of_each = [states[f"{kind} {name}"] for kind in ("make_batch_reader", "make_torch_dataloader")]
            _, options = options_of(f"make_batch_reader {name}")
            for kept in [*of_each, states[f"make_tf_dataset {name}"]]:
                with made.make_batch_reader(**options) as reader:
                    assert ids_from(reader, kept["state"]) == kept["ids"]


@releases
def test_a_state_of_other_rows_is_refused(release: Kept, tmp_path: Path) -> None:
    kept = release.index["entries"]["executors"]["states"]["make_batch_reader shuffled"]
    options = {"batch_size": BATCH_SIZE, "columns": ["id"], "shuffle": True, "seed": 7}
    with release.unpack("spark", tmp_path) as made, made.make_batch_reader(**options) as reader:
        with pytest.raises(StateMismatchError, match=r"rows \(fingerprint\) was"):
            reader.load_state_dict(kept["state"])
        with pytest.raises(StateMismatchError, match=f"reads version {STATE_VERSION}"):
            reader.load_state_dict({**kept["state"], "version": STATE_VERSION + 1})


@releases
@pytest.mark.parametrize("name", ["whole", "filtered", "split", "mixed"])
def test_a_pickled_converter_is_read_or_refused_by_name(release: Kept, name: str, tmp_path: Path) -> None:
    """A pickle is for processes of one release; one of the same format is read by others too."""
    with release.unpack("executors", tmp_path) as made:
        if release.index["version"] != converter.__version__ and pickled.FORMAT != 2:
            with pytest.raises(converter.CacheError, match="Install the same version in both environments"):
                release.unpickle(name, tmp_path)
            return
        expected = made if name == "whole" else part_of(made, name)
        found = release.unpickle(name, tmp_path)
        assert len(found) == len(expected)
        options = {"batch_size": BATCH_SIZE, "columns": ["id"], "shuffle": True, "seed": 5}
        with found.make_batch_reader(**options) as one, expected.make_batch_reader(**options) as other:
            assert [batch["id"].tolist() for batch in one] == [batch["id"].tolist() for batch in other]
