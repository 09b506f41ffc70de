"""A dataset's decoded rows as an RDD."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from converter.petastorm import summary
from converter.petastorm.etl.dataset_metadata import get_schema_from_dataset_url
from converter.petastorm.unischema import Unischema
from converter.petastorm.utils import decode_row
from converter.sources.spark.confs import changed_confs

AS_TEXTS = {"spark.sql.sources.partitionColumnTypeInference.enabled": "false"}
"""The schema says what partition values are; Spark would make a number of `007`."""


def dataset_as_rdd(
    dataset_url: str,
    spark_session: Any,
    schema_fields: Sequence[Any] | None = None,
    hdfs_driver: str = "libhdfs3",
) -> Any:
    """An RDD of namedtuples, one for each row, decoded on the executors, which must be able to import this package.

    Needs classic Spark. `schema_fields` chooses columns: fields of the schema, or patterns of their whole names.

    Raises:
        PetastormMetadataError: the dataset has no schema, or one that cannot be understood.
        ValueError: a field is none of the schema's.
    """
    schema = get_schema_from_dataset_url(dataset_url, hdfs_driver=hdfs_driver)
    if schema_fields is not None:
        schema = schema.create_schema_view(schema_fields)
    with changed_confs(spark_session, AS_TEXTS):
        frame = stored_frame(spark_session, summary.open_folder(dataset_url).spark_url, schema)
    if schema_fields is not None:
        frame = frame.select(*schema.fields)

    moments = [field.name for field in frame.schema if field.dataType.typeName() == "timestamp"]

    def decode(row: Any) -> Any:
        return _namedtuple_of(_in_utc(row.asDict(), moments), schema)

    return frame.rdd.map(decode)


def stored_frame(spark_session: Any, url: str, schema: Unischema) -> Any:
    """The stored columns of a dataset as a DataFrame, those that later files added among them."""
    frame = spark_session.read.parquet(url)
    if set(schema.fields) <= set(frame.columns):
        return frame
    # Spark takes the columns of `_common_metadata`, which Petastorm's appends leave as they were.
    return spark_session.read.option("mergeSchema", "true").parquet(url)


def _in_utc(values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The values of a row with times of UTC, as readers have them; Spark's Python has those of this process's zone."""
    for name in names:
        if values[name] is not None:
            values[name] = values[name].astimezone(dt.timezone.utc).replace(tzinfo=None)
    return values


def _namedtuple_of(row: Mapping[str, Any], schema: Unischema) -> Any:
    return schema.make_namedtuple(**decode_row(row, schema))
