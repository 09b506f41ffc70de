"""States of TensorFlow's datasets that releases have kept are resumed at their very row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.keep import BATCH_SIZE, LOADERS
from tests.compat.kept import RELEASES, Kept, ids_from


@pytest.mark.parametrize("release", RELEASES, ids=[each.folder.name for each in RELEASES])
@pytest.mark.parametrize("name", LOADERS)
def test_a_kept_state_is_resumed(release: Kept, name: str, tmp_path: Path) -> None:
    states = release.index["entries"]["executors"]["states"]
    options = {"batch_size": BATCH_SIZE, "columns": ["id"], **LOADERS[name]}
    with release.unpack("executors", tmp_path) as made:
        for kind in ("make_tf_dataset", "make_torch_dataloader"):
            with made.make_tf_dataset(**options) as dataset:
                kept = states[f"{kind} {name}"]
                assert ids_from(dataset, kept["state"]) == kept["ids"]
