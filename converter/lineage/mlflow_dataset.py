"""A converter's rows as an MLflow dataset, and the source by which a tracked run leads back to them.

MLflow imports this by the package's entry points when it is imported itself; nothing else imports it before.
"""

# Annotations are evaluated, because MLflow looks at the type that `from_converter` returns.

import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from mlflow.data.dataset import Dataset
from mlflow.data.dataset_source import DatasetSource
from mlflow.data.schema import TensorDatasetSchema
from mlflow.types.schema import Array, ColSpec, DataType, TensorSpec
from mlflow.types.schema import Schema as TrackedSchema

from converter.errors import SourceError
from converter.lineage.recipe import Recipe
from converter.lineage.remaking import remake
from converter.lineage.tracking import MAX_SCHEMA, digest_of, source_document, source_from
from converter.schema import Field, Schema

if TYPE_CHECKING:
    from converter.dataset import DatasetConverter
    from converter.decoders.decoder import Decoder

_TYPES = {
    "bool": DataType.boolean,
    "int8": DataType.integer,
    "uint8": DataType.integer,
    "int16": DataType.integer,
    "uint16": DataType.integer,
    "int32": DataType.integer,
    "int64": DataType.long,
    "float16": DataType.float,
    "float32": DataType.float,
    "float64": DataType.double,
    "datetime64[D]": DataType.datetime,
    "datetime64[us]": DataType.datetime,
    "str": DataType.string,
    "bytes": DataType.binary,
}
"""The type of MLflow's that holds each dtype's values."""


class ConverterSource(DatasetSource):  # type: ignore[misc]
    """Where the rows of a run came from: a cache entry, Parquet files, a version of a Delta table, and views of them.

    ```python
    run = mlflow.get_run(run_id)
    source = mlflow.data.get_source(run.inputs.dataset_inputs[0])
    print(source)  # which rows
    converter = source.load()  # the same rows, or an error
    ```
    """

    def __init__(self, recipe: Recipe, fingerprint: str) -> None:
        self.recipe, self._document = source_document(recipe, fingerprint)
        self.fingerprint = fingerprint

    def __repr__(self) -> str:
        return f"ConverterSource({self.recipe.kind}: {self.recipe.shown_places}, fingerprint {self.fingerprint})"

    @property
    def digest(self) -> str:
        """The fingerprint and four signs of this source: 36 characters, as many as MLflow keeps."""
        return digest_of(self._document, self.fingerprint)

    def load(
        self,
        *,
        decode: "Mapping[str, Decoder] | None" = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> "DatasetConverter":
        """The converter of the same rows again, in any process.

        Its rows are compared with those of the run by their fingerprint, before any is handed out. The end of a `with`
        block removes nothing.

        Args:
            decode: decoders of your own, by column, whose code is not stored.
            storage_options: credentials, as in `make_spark_converter`. Without them the environment's count. They are
                sent to the URL that the tracking store names: look at it first if others can write there.

        Raises:
            CacheError: the cache entry was deleted, or cannot be read.
            SourceChangedError: the data have changed since the run.
            SourceError: the data are gone, or the run's arguments cannot be stored; the message says which.
            ValueError, TypeError: a decoder of your own is missing or another one, or an option is none.
        """
        return remake(self.recipe, fingerprint=self.fingerprint, decode=decode, storage_options=storage_options)

    def to_dict(self) -> dict[str, Any]:
        """The JSON that MLflow keeps; it holds no secret."""
        return dict(self._document)

    @classmethod
    def from_dict(cls, source_dict: Mapping[Any, Any]) -> "ConverterSource":
        """The inverse of `to_dict`; checks every value.

        Raises:
            SourceError: it is not the source of a converter.
        """
        return cls(*source_from(source_dict))

    @classmethod
    def from_json(cls, source_json: str) -> "ConverterSource":
        """The source in a text of JSON; errors are those of `from_dict`."""
        try:
            document = json.loads(source_json)
        except (ValueError, TypeError, RecursionError) as error:
            raise SourceError(f"The source of this dataset in the tracking store is no JSON: {error}.") from error
        return cls.from_dict(document)

    @staticmethod
    def _get_source_type() -> str:
        return "converter"

    @staticmethod
    def _can_resolve(raw_source: Any) -> bool:
        return hasattr(raw_source, "mlflow_dataset")

    @classmethod
    def _resolve(cls, raw_source: Any) -> "ConverterSource":
        source: ConverterSource = raw_source.mlflow_dataset().source
        return source


class ConverterDataset(Dataset):  # type: ignore[misc]
    """What `mlflow.log_input` takes; `DatasetConverter.mlflow_dataset` makes it.

    ```python
    dataset = converter.mlflow_dataset(name="rides")
    print(dataset.name, dataset.digest, dataset.source, dataset.profile)
    ```
    """

    def __init__(
        self, *, source: ConverterSource, columns: Schema, profile: Mapping[str, Any], name: str, digest: str
    ) -> None:
        self._columns = columns
        self._profile = dict(profile)
        super().__init__(source=source, name=name, digest=digest)

    def _compute_digest(self) -> str:
        digest: str = self._source.digest
        return digest

    def with_digest(self, digest: str) -> "ConverterDataset":
        """The same dataset with a digest of the user's."""
        return ConverterDataset(
            source=self._source, columns=self._columns, profile=self._profile, name=self._name, digest=digest
        )

    @property
    def profile(self) -> dict[str, Any]:
        """Rows, bytes, the whole fingerprint, and what `source.load()` will do."""
        return self._profile

    @cached_property
    def schema(self) -> Any:
        """The columns as tensors of batches: the first dimension, and those in which rows differ, are -1."""
        return TensorDatasetSchema(features=TrackedSchema([_tensor_spec(column) for column in self._columns]))

    def to_dict(self) -> dict[str, Any]:
        """What MLflow keeps: name, digest, source, schema and profile, each as text."""
        schema, profile = self._schema_text, dict(self._profile)
        if schema is None:
            profile["schema"] = f"left out: it takes more than the {MAX_SCHEMA:,} characters that MLflow keeps"
        return {**super().to_dict(), "schema": schema, "profile": json.dumps(profile)}

    @cached_property
    def _schema_text(self) -> str | None:
        """The columns in both of MLflow's forms: its pages show only columns, and only tensors have shapes."""
        as_columns = {"mlflow_colspec": TrackedSchema([_column_spec(column) for column in self._columns]).to_dict()}
        for document in (as_columns | self.schema.to_dict(), as_columns):
            text = json.dumps(document)
            if len(text) <= MAX_SCHEMA:
                return text
        return None


def from_converter(converter: Any, name: str | None = None, digest: str | None = None) -> ConverterDataset:
    """The MLflow dataset of a converter; MLflow offers it as `mlflow.data.from_converter`.

    ```python
    mlflow.log_input(mlflow.data.from_converter(converter), context="training")
    ```
    """
    dataset: ConverterDataset = converter.mlflow_dataset(name=name)
    return dataset if digest is None else dataset.with_digest(digest)


def _tensor_spec(column: Field) -> Any:
    shape = (-1,) * column.ndim if column.shape is None else column.shape
    return TensorSpec(np.dtype(column.dtype), (-1, *shape), column.name)


def _column_spec(column: Field) -> Any:
    kind: Any = _TYPES[column.dtype]
    for _ in range(column.ndim):
        kind = Array(kind)
    return ColSpec(kind, column.name, required=not column.has_nulls)
