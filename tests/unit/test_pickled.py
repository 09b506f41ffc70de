"""A converter that another version pickled is refused by name, before anything else of it is read."""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
import socket
from pathlib import Path

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from converter import (
    CacheError,
    DatasetConverter,
    draws,
    make_parquet_converter,
    manifest,
    mix,
    pickled,
    schema,
    selection,
    sequences,
    statistics,
)
from converter.cache import leases
from converter.lineage import recipe

_SHAPES = {2: "60c2ea102f", 3: "9b07d62047", 4: "a02fe18ff5", 5: "4f43fd4061"}
"""What the classes of a pickled converter look like, by format."""


@pytest.fixture
def converter(tmp_path: Path) -> DatasetConverter:
    pq.write_table(pa.table({"x": range(10)}), tmp_path / "a.parquet")
    return make_parquet_converter(tmp_path)


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
@pytest.mark.parametrize("is_newer", [True, False])
@pytest.mark.parametrize("is_mixed", [True, False])
def test_another_versions_converter_is_refused_by_name(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch, dumps: object, is_newer: bool, is_mixed: bool
) -> None:
    own = pickled.FORMAT
    monkeypatch.setattr(pickled, "FORMAT", own + 1 if is_newer else own - 1)
    monkeypatch.setattr(pickled, "own_version", lambda: "7.8.9")
    data = dumps(mix({"a": converter, "b": converter}) if is_mixed else converter)  # type: ignore[operator]
    monkeypatch.undo()
    # The rest may name classes that this version does not have.
    broken = data.replace(b"converter.manifest", b"converter.manifesX")
    assert broken != data
    with pytest.raises(CacheError, match=r"pickled by spark-tensor-converter 7\.8\.9 \(format \d\).*same version"):
        pickle.loads(broken)


def test_the_same_versions_is_read(converter: DatasetConverter) -> None:
    assert pickle.loads(pickle.dumps(converter)).head(3)["x"].tolist() == [0, 1, 2]


def test_the_format_counts_up_with_the_classes() -> None:
    modules = (manifest, schema, selection, sequences, statistics, draws, recipe)
    fields = [
        (module.__name__, name, tuple(field.name for field in dataclasses.fields(kind)))
        for module in modules
        for name, kind in sorted(vars(module).items())
        if dataclasses.is_dataclass(kind) and kind.__module__ == module.__name__
    ]
    assert hashlib.sha256(repr(fields).encode()).hexdigest()[:10] == _SHAPES[pickled.FORMAT], (
        "A class of pickled converters has other fields than before: count pickled.FORMAT up, and note its shape here."
    )


def test_a_folder_of_another_machine_is_named(
    converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = leases.this_host()
    monkeypatch.setattr(leases, "this_host", lambda: "driver-7/boot/pid")
    data = pickle.dumps(converter)
    monkeypatch.setattr(leases, "this_host", lambda: here)
    copy = pickle.loads(data)
    # A network folder.
    assert copy.where([("x", ">", 5)]).head(1)["x"].tolist() == [6]
    tmp_path.rename(f"{tmp_path}-elsewhere")
    for view in (copy, pickle.loads(pickle.dumps(copy))):
        with pytest.raises(CacheError, match=f"is not on this machine .{socket.gethostname()}.: .* made on driver-7,"):
            view.make_batch_reader(batch_size=2)
