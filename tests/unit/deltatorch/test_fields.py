"""What fields say, how they are followed, and which of them are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from converter.deltatorch import FieldSpec
from converter.deltatorch.fields import check_fields, decode_and_transform_record
from converter.deltatorch.recipes import make_recipe
from converter.deltatorch.storage_options import fsspec_options
from converter.deltatorch.warning import native_line


def test_importing_the_package_loads_no_torch() -> None:
    program = "import json, sys, converter.deltatorch; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "PIL", "deltalake", "pandas", "pyspark", "tensorflow"} & set(json.loads(done.stdout))


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ([], TypeError, "fields must be a list of FieldSpec"),
        (FieldSpec("x"), TypeError, "fields must be a list of FieldSpec"),
        ("x", TypeError, "fields must be a list of FieldSpec"),
        (["x"], TypeError, "one is 'x'"),
        ([FieldSpec("")], TypeError, "needs the name of a column"),
        ([FieldSpec("x", transform=3)], TypeError, r"FieldSpec\('x'\): transform must be a function, got 3"),  # type: ignore[arg-type]
        ([FieldSpec("x", (2, 0))], ValueError, r"must be a shape such as \(28, 28\).* got \(2, 0\)"),
        ([FieldSpec("x", (-1, -1))], ValueError, "in which one size may be -1"),
        ([FieldSpec("x", load_image_using_pil=True, load_using_io=True)], ValueError, "exclude each other"),
    ],
)
def test_wrong_fields_are_named(fields: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        check_fields(fields)


def test_the_positional_order_of_a_field_is_that_of_deltatorch() -> None:
    spec = FieldSpec("x", (2, 2), True, len, "y")
    assert (spec.name, spec.decode_numpy_and_apply_shape, spec.load_image_using_pil) == ("x", (2, 2), True)
    assert (spec.transform, spec.target_name) == (len, "y")


def test_a_field_reads_what_an_earlier_one_of_its_name_has_made() -> None:
    fields = [FieldSpec("x", (2, 2)), FieldSpec("x", transform=lambda x: x.shape, target_name="shape")]
    assert decode_and_transform_record({"x": bytes(4)}, fields)["shape"] == (2, 2)
    recipe = make_recipe(fields)
    assert recipe.nodes[recipe.nodes[recipe.keys["shape"]].parent].shape == (2, 2)


def test_functions_of_whole_records_run_last() -> None:
    fields = [
        FieldSpec("x", full_record_transform=lambda row: {**row, "sum": row["x"] + row["y"]}),
        FieldSpec("y", transform=lambda y: -y),
    ]
    assert decode_and_transform_record({"x": 3, "y": 1}, fields) == {"x": 3, "y": -1, "sum": 2}


def test_the_native_line_has_the_given_arguments() -> None:
    fields = [FieldSpec("image", (28, 28), transform=len), FieldSpec("photo", load_image_using_pil=True)]
    options = {
        "version": 3, "batch_size": 64, "num_workers": 2, "use_fixed_rank": True, "rank": 0, "num_ranks": 4,
        "drop_last": True, "storage_options": {"secret": "hidden"}, "partition_filter": [("day", "=", "1")],
    }  # fmt: skip
    assert native_line("/data/t", fields, options) == (
        "make_delta_converter('/data/t', version=3, columns=['image', 'photo'], filters=[('day', '=', '1')], "
        "shapes={'image': (28, 28)}, decode={'photo': Image()}, float_dtype=None, storage_options=...)"
        ".make_torch_dataloader(batch_size=64, cur_shard=0, shard_count=4, drop_last=True, transform=..., "
        "num_workers=2)"
    )


@pytest.mark.parametrize(
    ("path", "given", "expected"),
    [
        (
            "s3://b/t",
            {"AWS_ACCESS_KEY_ID": "k", "aws_secret_access_key": "s", "region": "r", "AWS_ALLOW_HTTP": "true",
             "AWS_ENDPOINT_URL": "http://e"},
            {"key": "k", "secret": "s", "client_kwargs": {"region_name": "r"}, "endpoint_url": "http://e"},
        ),
        ("s3://b/t", {"key": "k", "secret": "s"}, {"key": "k", "secret": "s"}),
        ("s3a://b/t", {"AWS_SKIP_SIGNATURE": "true"}, {"anon": True}),
        (
            "abfss://c@a.dfs.core.windows.net/t",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "k", "azure_tenant_id": "t"},
            {"account_name": "a", "account_key": "k", "tenant_id": "t"},
        ),
        ("gs://b/t", {"GOOGLE_SERVICE_ACCOUNT": "f.json"}, {"token": "f.json"}),
        ("/data/t", {"aws_region": "r"}, {"aws_region": "r"}),
        ("s3://b/t", None, None),
    ],
)  # fmt: skip
def test_options_of_a_store_may_have_deltalakes_names(path: str, given: Any, expected: Any) -> None:
    assert fsspec_options(path, given) == expected
