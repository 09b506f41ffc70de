"""The arguments by which a command's user configures Spark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def configure_spark(spark_session_builder: Any, args: argparse.Namespace) -> Any:
    """The builder of a session, with what the command's user asked for.

    Raises:
        RuntimeError: the parser had no such arguments; see `add_configure_spark_arguments`.
        ValueError: one of `--spark-session-config` is no `key=value`.
    """
    if "spark_session_config" not in args or "master" not in args:
        raise RuntimeError(
            "--spark-session-config and/or --master were not found in parsed arguments. Call "
            "add_configure_spark_arguments() to add them."
        )
    for key, value in _pairs(args.spark_session_config or ()).items():
        spark_session_builder.config(key, value)
    if args.master:
        spark_session_builder.master(args.master)
    return spark_session_builder


def add_configure_spark_arguments(argparser: argparse.ArgumentParser) -> None:
    """Add `--master` and `--spark-session-config` to a command's parser."""
    argparser.add_argument(
        "--master", help="Spark's master, e.g. local[10]; by default the one of Spark's configuration"
    )
    argparser.add_argument(
        "--spark-session-config",
        nargs="+",
        help="settings of the session as key=value, e.g. spark.executor.cores=2 spark.executor.memory=10g",
    )


def _pairs(settings: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for setting in settings:
        # A value may have an equals sign in it, as Java's options do.
        key, sign, value = setting.partition("=")
        if not sign or not key:
            raise ValueError(
                f"Elements of spark_session_config list are expected to be in key=value format. Got: {setting}"
            )
        pairs[key] = value
    return pairs
