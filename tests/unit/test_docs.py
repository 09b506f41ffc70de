"""The reference renders without a warning, and every public name is explained, with an example that runs.

    python -m pdoc --docformat google -o site converter converter.schema converter.decoders converter.statistics \
        converter.loading.forecast converter.loading.stats converter.messages converter.frameworks converter.plot

renders it into `site/`. The examples run as doctests, or in tests/integration/test_documented_code.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pdoc
import pdoc.render
import pytest
from pyspark.sql import types

from tests.documented import PAGES, PublicName, public_names

NAMES = list(public_names())

CALLED_BY_OTHERS = {
    "DatasetState.serialize", "DatasetState.deserialize",
    "DatasetStateCallback.on_train_begin", "DatasetStateCallback.on_epoch_begin",
    "DatasetStateCallback.on_train_batch_end", "DatasetStateCallback.on_epoch_end",
    "DatasetStateCallback.on_test_begin", "DatasetStateCallback.on_test_end",
    "TorchDataLoader.sampler",
}  # fmt: skip
"""What TensorFlow, Keras or Lightning calls, and users do not."""

FOR_ITERATORS = {
    f"TFDataset.{name}"
    for name in (
        "generate", "stretches", "packed_rest", "sliced", "start_anew", "first_use", "note_use", "next_begin",
        "state_after", "new_steps",
    )
}  # fmt: skip
"""What the iterators and the callback of a dataset call, and users do not."""

EXPLAINED_BY_CLASS = {
    "Field", "Schema", "ColumnStatistics", "SweepReport", "Image", "NumPy", "Decoder",
}  # fmt: skip
"""Classes whose members need no example of their own: their fields explain themselves in the class's example."""

SHAPED = {
    "DatasetConverter.head", "DatasetConverter.make_torch_dataloader", "DatasetConverter.make_batch_reader",
    "BatchReader", "TorchDataLoader", "ColumnStatistics.element_mean", "Field.shape",
}  # fmt: skip
"""What hands out arrays, and says their shape."""


def ids(name: PublicName) -> str:
    return name.name


@pytest.mark.long("the integration test renders these pages too")
def test_the_reference_renders_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages but those of torch and TensorFlow, which the integration test renders too."""
    for name in ("torch", "torch.loader", "tensorflow", "tensorflow.dataset", "transformers"):
        module = ModuleType(f"converter.frameworks.{name}")
        module.__dict__.update(TorchDataLoader=int, TFDataset=int)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    pdoc.render.configure(docformat="google")
    left = {f"converter.frameworks.{name}" for name in ("torch", "tensorflow", "transformers")}
    pages = (page for page in PAGES if page not in left)
    pdoc.pdoc(*pages, output_directory=tmp_path)
    page = (tmp_path / "converter.html").read_text()
    for name in ("make_spark_converter", "DatasetConverter.make_torch_dataloader", "sweep", "ReadError"):
        assert f'id="{name}"' in page


@pytest.mark.parametrize("name", NAMES, ids=ids)
def test_a_public_name_says_what_it_does(name: PublicName) -> None:
    assert name.docstring
    assert name.docstring.splitlines()[0].endswith((".", ":"))


@pytest.mark.parametrize("name", NAMES, ids=ids)
def test_a_public_name_has_an_example(name: PublicName) -> None:
    is_internal = name.name in CALLED_BY_OTHERS | FOR_ITERATORS
    is_error = name.name.endswith("Error")
    is_explained = name.owner is not None and name.owner.name in EXPLAINED_BY_CLASS
    assert name.has_example or is_internal or is_error or is_explained


@pytest.mark.parametrize("name", [name for name in NAMES if name.raises], ids=ids)
def test_a_public_name_says_what_it_raises(name: PublicName) -> None:
    assert "Raises:" in name.docstring or name.name in FOR_ITERATORS


def test_what_hands_out_arrays_says_their_shape() -> None:
    by_name = {name.name: name for name in NAMES}
    for name in SHAPED & set(by_name):
        assert "shape" in by_name[name].docstring, name


GUIDE_NAMES = {
    "NullType": "NULL AS", "CharType": "char,", "StringType": "string,", "VarcharType": "varchar",
    "BinaryType": "binary",
    "BooleanType": "boolean", "DateType": "date", "TimeType": "time (", "TimestampType": "timestamp",
    "TimestampNTZType": "timestamp_ntz", "DecimalType": "decimal(", "DoubleType": "double", "FloatType": "float",
    "ByteType": "tinyint", "ShortType": "smallint", "IntegerType": "int", "LongType": "bigint",
    "DayTimeIntervalType": "interval day to second", "YearMonthIntervalType": "interval year to month",
    "CalendarIntervalType": "make_interval", "ArrayType": "array<", "MapType": "map<", "StructType": "struct<",
    "VariantType": "parse_json", "GeometryType": "st_geomfromwkb",
}  # fmt: skip
"""How the guide's table, or its example of what is refused, shows each type."""


def test_the_guide_shows_every_type_of_spark() -> None:
    classes = (getattr(types, name) for name in types.__all__)
    names = {cls.__name__ for cls in classes if isinstance(cls, type) and issubclass(cls, types.DataType)}
    # A geography is refused as a geometry is.
    assert names - {"DataType", "StructField", "GeographyType"} <= GUIDE_NAMES.keys()
    guide = Path(__file__).parents[2] / "notebooks" / "09_types_nulls_shapes_order.ipynb"
    sources = ("".join(cell["source"]) for cell in json.loads(guide.read_text())["cells"])
    table, refused = (source for source in sources if '"boolean": ' in source or "NULL AS" in source)
    assert [name for name, text in GUIDE_NAMES.items() if text not in table + refused] == []
