"""Petastorm's Spark converter under its old names."""

from __future__ import annotations

from converter.petastorm.spark.spark_dataset_converter import (
    SparkDatasetConverter,
    make_spark_converter,
    register_delete_dir_handler,
)

__all__ = ["SparkDatasetConverter", "make_spark_converter", "register_delete_dir_handler"]
