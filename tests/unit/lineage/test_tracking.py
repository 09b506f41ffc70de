"""What a tracking store keeps: within its limits, without secrets; and what comes from there is checked."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converter import ConverterError, DatasetConverter, MissingDependencyError, SourceError, make_parquet_converter
from converter.lineage.recipe import Recipe
from converter.lineage.remaking import remake
from converter.lineage.tracking import MAX_SOURCE, digest_of, make_mlflow_dataset, source_document, source_from

TABLE = Recipe(
    kind="delta",
    place={"url": "file:///t", "version": 3},
    options={"float_dtype": "float32", "decode": {"dict": [["a", {"dict": [["kind", "NumPy"]]}]]}},
    fingerprint="0" * 32,
    views=({"name": "where", "arguments": {"filters": [{"tuple": ["x", ">", 1]}]}},),
)
MIXTURE = Recipe(kind="mix", place={"parts": {"a": TABLE}}, options={"stop": 5}, fingerprint="")
FILES = Recipe(kind="parquet", place={"urls": ["/a/1", "/a/2"]}, options={}, fingerprint="1" * 32)
ENTRY = Recipe(
    kind="cache", place={"url": "file:///c/x", "cache_key": "k", "kept": True}, options={}, fingerprint="2" * 32
)
RECIPES = {"delta": TABLE, "mix": MIXTURE, "parquet": FILES, "cache": ENTRY}


@pytest.fixture
def converter(tmp_path: Path) -> DatasetConverter:
    pq.write_table(pa.table({"x": range(10)}), tmp_path / "a.parquet")
    return make_parquet_converter(tmp_path)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_source_survives_json(recipe: Recipe) -> None:
    kept, document = source_document(recipe, "f" * 32)
    assert kept == recipe
    assert source_from(json.loads(json.dumps(document))) == (recipe, "f" * 32)


def test_what_people_look_for_stands_in_the_source_itself() -> None:
    document = source_document(TABLE, "f" * 32)[1]
    assert (document["kind"], document["url"], document["version"]) == ("delta", "file:///t", 3)
    assert document["fingerprint"] == "f" * 32
    assert list(document)[:4] == ["format", "kind", "url", "version"]


def long_recipe(num_urls: int, *, step: int) -> Recipe:
    urls = [f"/data/part-{number * step:08x}.parquet" for number in range(num_urls)]
    return Recipe(kind="parquet", place={"urls": urls}, options={}, fingerprint="1" * 32)


def test_a_long_source_is_compressed() -> None:
    recipe = long_recipe(5000, step=1)
    kept, document = source_document(recipe, "f" * 32)
    assert kept == recipe
    assert len(json.dumps(document)) < MAX_SOURCE < len(json.dumps(recipe.to_json()))
    assert (document["kind"], document["fingerprint"]) == ("parquet", "f" * 32)
    assert source_from(json.loads(json.dumps(document))) == (recipe, "f" * 32)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_source_that_is_too_long_even_so_says_so_when_it_is_loaded(kind: str) -> None:
    # Nothing makes them shorter.
    long = [hashlib.sha256(bytes([number % 256, number // 256])).hexdigest() for number in range(4000)]
    recipe = RECIPES[kind]
    if kind == "parquet":
        recipe = replace(recipe, place={"urls": [f"/data/{name}" for name in long]})
    else:
        recipe = replace(recipe, views=({"name": "where", "arguments": {"filters": [{"tuple": ["x", "in", long]}]}},))
    kept, document = source_document(recipe, "f" * 32)
    assert len(json.dumps(document)) < 1000
    reason = r"cannot be found again by themselves: its arguments take [\d,]+ characters, and MLflow keeps 65,535"
    for again in (kept, source_from(json.loads(json.dumps(document)))[0]):
        assert again.kind == kind
        with pytest.raises(SourceError, match=reason):
            remake(again, fingerprint="f" * 32, decode=None, storage_options=None)
    assert kind != "parquet" or kept.place["urls"] == ["/data/"]


def test_a_digest_begins_with_the_fingerprint_and_tells_sources_apart() -> None:
    digests = {digest_of(source_document(recipe, "f" * 32)[1], "f" * 32) for recipe in RECIPES.values()}
    assert len(digests) == len(RECIPES)
    assert all(re.fullmatch(r"f{32}[a-z2-7]{4}", digest) for digest in digests)


DOCUMENTS = {name: json.loads(json.dumps(source_document(recipe, "f" * 32)[1])) for name, recipe in RECIPES.items()}
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """Each value of a document: what holds it, and under which name or number."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((value, key), *places_of(inner))]


@pytest.mark.parametrize("kind", RECIPES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_source_that_was_changed_is_refused_or_says_what_it_reads(kind: str, data: st.DataObject) -> None:
    document = json.loads(json.dumps(DOCUMENTS[kind]))
    holder, key = data.draw(st.sampled_from(places_of(document)))
    if data.draw(st.booleans()):
        holder[key] = data.draw(JUNK)
    else:
        del holder[key]
    try:
        recipe, _ = source_from(document)
    except SourceError as error:
        assert "does not describe a converter" in str(error)  # noqa: PT017
    else:
        assert isinstance(recipe.shown_places, str)
        assert list(recipe.named_decoders()) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "pickle"},
        {"format": 2},
        {"url": 5},
        {"version": True},
        {"version": -1},
        {"options": {"storage_options": {"dict": []}}},
        {"options": {"spark": None}},
        {"options": {"decode": {"dict": [["a", {"dict": [["kind", "os.system"]]}]]}}},
        {"views": [{"name": "delete", "arguments": {}}]},
        {"views": [{"name": "__init__", "arguments": {}}]},
        {"views": [{"name": "where", "arguments": {"_manifest": 1}}]},
        {"views": [{"name": "split", "arguments": {"fractions": {"dict": [["a", 0.5]]}, "part": "b"}}]},
        {"views": [{"name": "split", "arguments": {"fractions": {"dict": [["a", 0.5]]}}}]},
        {"zlib": "!"},
        {"zlib": base64.b64encode(zlib.compress(b" " * (17 << 20))).decode()},
        {"zlib": base64.b64encode(zlib.compress(b"[" * 100_000)).decode()},
        {"fingerprint": None},
    ],
)
def test_a_source_of_anybodys_making_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match=r"The source of this dataset in the tracking store does not describe"):
        source_from(DOCUMENTS["delta"] | changed)


@pytest.mark.parametrize("document", [None, [], "a", 5, {}])
def test_what_is_no_document_is_refused(document: Any) -> None:
    with pytest.raises(SourceError, match="does not describe a converter"):
        source_from(document)


def test_without_mlflow_the_extra_is_named(converter: DatasetConverter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'spark-tensor-converter\[mlflow\]' to log"):
        converter.mlflow_dataset()


@pytest.mark.parametrize(("name", "kind"), [("", ValueError), ("a" * 501, ValueError), (5, TypeError)])
def test_a_name_that_mlflow_cannot_keep_is_refused(converter: DatasetConverter, name: Any, kind: type) -> None:
    with pytest.raises(kind, match=r"^name must "):
        converter.mlflow_dataset(name=name)


def test_a_converter_that_nothing_made_has_no_source(converter: DatasetConverter) -> None:
    with pytest.raises(ConverterError, match=f"not known how this converter of {converter.url} was made"):
        make_mlflow_dataset(converter.describe(), converter.schema, None, name=None)
