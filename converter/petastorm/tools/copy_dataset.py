"""Copies a dataset that Petastorm wrote: all of it, some columns, or the rows without nulls."""

from __future__ import annotations

import argparse
import functools
import logging
import operator
import sys
from collections.abc import Sequence
from typing import Any

from converter.petastorm.etl.dataset_metadata import get_schema_from_dataset_url, materialize_dataset
from converter.petastorm.spark_utils import AS_TEXTS, stored_frame
from converter.petastorm.tools.spark_session_cli import add_configure_spark_arguments, configure_spark
from converter.petastorm.unischema import Unischema, match_unischema_fields
from converter.sources.spark.confs import changed_confs

_BYTES_OF_A_TASK = "1010612736"
"""Row groups of Petastorm's are few and large: with Spark's own 128 MB there would be many tasks with no rows."""


def copy_dataset(
    spark: Any,
    source_url: str,
    target_url: str,
    field_regex: Sequence[str] | None,
    not_null_fields: Sequence[str] | None,
    overwrite_output: bool,
    partitions_count: int | None,
    row_group_size_mb: int | None,
    hdfs_driver: str = "libhdfs3",
) -> None:
    """Copy a dataset by a Spark job; values stay encoded as they are.

    `field_regex` chooses columns by patterns of their whole names. Rows with a null in one of `not_null_fields` are
    left out. `partitions_count` is the number of files.

    Raises:
        ValueError: no column matches.
        PetastormMetadataError: the source has no schema.
    """
    schema = get_schema_from_dataset_url(source_url, hdfs_driver=hdfs_driver)
    fields = match_unischema_fields(schema, field_regex or [])
    if field_regex and not fields:
        raise ValueError(f"Regular expressions ({field_regex}) do not match any fields ({list(schema.fields)})")
    copied = schema.create_schema_view(fields) if fields else schema
    # To the end of the job: Spark Connect looks at the folders' names when it writes.
    with materialize_dataset(spark, target_url, copied, row_group_size_mb), changed_confs(spark, AS_TEXTS):
        frame = stored_frame(spark, source_url, copied)
        if fields:
            frame = frame.select(*copied.fields)
        frame = frame.select([_as_declared(frame, name, copied) for name in frame.columns])
        if not_null_fields:
            frame = frame.filter(functools.reduce(operator.and_, (frame[name].isNotNull() for name in not_null_fields)))
        if partitions_count:
            frame = frame.repartition(partitions_count)
        mode = "overwrite" if overwrite_output else "error"
        frame.write.mode(mode).option("compression", "none").parquet(target_url)


def _as_declared(frame: Any, name: str, schema: Unischema) -> Any:
    """A column of a frame; one of folders' names, which are texts, with its field's type."""
    field = schema.fields.get(name)
    if field is None or frame.schema[name].dataType.typeName() != "string":
        return frame[name]
    try:
        (declared,) = schema.create_schema_view([field]).as_spark_schema()
    except ValueError:
        # Spark has no type for it, and readers make it of its text.
        return frame[name]
    return frame[name].cast(declared.dataType).alias(name)


def args_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source_url", help="the URL of the dataset to copy")
    parser.add_argument("target_url", help="the URL of the copy")
    parser.add_argument("--overwrite-output", action="store_true", help="replace what is at the target")
    parser.add_argument("--field-regex", nargs="+", help="patterns of the columns to copy; all by default")
    parser.add_argument("--not-null-fields", nargs="+", help="leave out rows with a null in one of these columns")
    parser.add_argument("--partition-count", type=int, help="the number of files of the copy")
    parser.add_argument("--row-group-size-mb", type=int, help="the size of row groups in the copy")
    parser.add_argument("--hdfs-driver", default="libhdfs3", help="accepted, does nothing")
    add_configure_spark_arguments(parser)
    return parser


def _main(argv: Sequence[str]) -> None:
    from pyspark.errors import AnalysisException
    from pyspark.sql import SparkSession

    logging.basicConfig()
    arguments = args_parser().parse_args(argv)
    builder = configure_spark(SparkSession.builder.appName("petastorm-copy"), arguments)
    spark = builder.config("spark.sql.files.maxPartitionBytes", _BYTES_OF_A_TASK).getOrCreate()
    try:
        copy_dataset(
            spark,
            arguments.source_url,
            arguments.target_url,
            arguments.field_regex,
            arguments.not_null_fields,
            arguments.overwrite_output,
            arguments.partition_count,
            arguments.row_group_size_mb,
            hdfs_driver=arguments.hdfs_driver,
        )
    except AnalysisException as error:
        if "PATH_ALREADY_EXISTS" not in str(error):
            raise
        sys.exit(f"{arguments.target_url} exists already. --overwrite-output replaces it.")
    finally:
        spark.stop()


def main() -> None:
    """The command."""
    _main(sys.argv[1:])


if __name__ == "__main__":
    main()
