"""Writes Petastorm's metadata beside Parquet files that are there already: a function and a command."""

from __future__ import annotations

import argparse
import contextlib
import pydoc
import sys
from collections.abc import Sequence
from typing import Any

from converter.petastorm import summary
from converter.petastorm.etl.dataset_metadata import (
    PetastormMetadataError,
    classic_context,
    get_schema_from_dataset_url,
    hadoop_configuration,
    place_of,
    write_metadata,
)
from converter.petastorm.places import note_driver
from converter.petastorm.unischema import Unischema

_EXAMPLE = """Example:

python -m converter.petastorm.etl.petastorm_generate_metadata \\
    --dataset_url hdfs:///path/to/my/hello_world_dataset \\
    --unischema_class examples.hello_world.HelloWorldSchema \\
    --master local[*]
"""


def generate_petastorm_metadata(
    spark: Any,
    dataset_url: str,
    unischema_class: str | None = None,
    use_summary_metadata: bool = False,
    hdfs_driver: str = "libhdfs3",
) -> None:
    """Write the schema and the counts of row groups beside a dataset's files; an index of row groups is kept.

    `unischema_class` is where the schema is defined, as `package.module.Name`; without it the stored one is taken.
    `use_summary_metadata` lets Spark's JVM write `_metadata` as well. The session is not stopped.

    Raises:
        ValueError: `unischema_class` names no Unischema, there is none to take, or Spark Connect has no JVM at hand.
    """
    note_driver(hdfs_driver)
    schema = _schema_of(dataset_url, unischema_class)
    context = classic_context(spark)
    url, options = place_of(context, dataset_url, None)
    kept: dict[bytes, bytes] = {}
    if use_summary_metadata:
        # The JVM writes its own _common_metadata in place of what is there.
        with contextlib.suppress(PetastormMetadataError):
            kept = (summary.read_summary(summary.open_folder(url, options)) or (None, {}))[1]
        _write_summary_of_row_groups(context, dataset_url)
    write_metadata(url, schema, options, kept=kept)


def _schema_of(dataset_url: str, unischema_class: str | None) -> Unischema:
    if unischema_class:
        schema = pydoc.locate(unischema_class)
        if not isinstance(schema, Unischema):
            raise ValueError(
                f"The specified class {unischema_class} is not an instance of a Unischema object of "
                "converter.petastorm.unischema."
            )
        return schema
    try:
        return get_schema_from_dataset_url(dataset_url)
    except PetastormMetadataError as error:
        raise ValueError(
            f"Unischema class could not be located in existing dataset, please specify it ({error})"
        ) from error


def _write_summary_of_row_groups(context: Any, dataset_url: str) -> None:
    """Let the JVM read all footers and write them into `_metadata`.

    Reaches into: pyspark.SparkContext._jvm (pyspark 3.5 to 4.2).
    Without it: there is no `_metadata`, which only other programs need.
    """
    java = getattr(context, "_jvm", None)
    if java is None:
        raise ValueError("use_summary_metadata needs classic Spark: Spark Connect has no JVM in this process.")
    java.org.apache.parquet.hadoop.ParquetOutputCommitter.writeMetaDataFile(
        hadoop_configuration(context), java.org.apache.hadoop.fs.Path(dataset_url)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="petastorm_generate_metadata",
        description="Add necessary petastorm metadata to an existing dataset",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dataset_url", required=True, help="the URL of the dataset's folder")
    parser.add_argument(
        "--unischema_class",
        help="where the schema is defined, as package.module.Name; the stored one is taken without it",
    )
    parser.add_argument("--master", help="Spark's master, e.g. local[10]; by default the one of Spark's configuration")
    parser.add_argument("--spark-driver-memory", default="4g", help="the memory of the driver process (4g)")
    parser.add_argument("--use-summary-metadata", action="store_true", help="write Parquet's _metadata as well")
    parser.add_argument("--hdfs-driver", default="libhdfs3", help="accepted, does nothing")
    return parser


def _main(argv: Sequence[str]) -> None:
    from pyspark.sql import SparkSession

    arguments = _parser().parse_args(argv)
    builder = SparkSession.builder.appName("Petastorm Generate Metadata")
    builder = builder.config("spark.driver.memory", arguments.spark_driver_memory)
    if arguments.master:
        builder = builder.master(arguments.master)
    spark = builder.getOrCreate()
    try:
        generate_petastorm_metadata(
            spark,
            arguments.dataset_url,
            arguments.unischema_class,
            arguments.use_summary_metadata,
            hdfs_driver=arguments.hdfs_driver,
        )
    finally:
        spark.stop()


def main() -> None:
    """The command."""
    _main(sys.argv[1:])


if __name__ == "__main__":
    main()
