"""Shows what stands in a store's metadata: its schema and its indexes of row groups. A command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from converter.petastorm import stored_schema, summary
from converter.petastorm.etl.dataset_metadata import get_schema_from_dataset_url
from converter.petastorm.places import note_driver


def describe_schema(dataset_url: str) -> Iterator[str]:
    """The lines that show a dataset's schema."""
    yield "*** Schema from dataset metadata ***"
    yield str(get_schema_from_dataset_url(dataset_url))


def describe_indexes(dataset_url: str, *, skipped: Sequence[str] = (), with_numbers: bool = False) -> Iterator[str]:
    """The lines that show a dataset's indexes: each value with the number of its row groups.

    The values of indexes in `skipped` are left out. `with_numbers` adds which row groups they are.
    """
    found = summary.read_summary(summary.open_folder(dataset_url))
    indexes: Mapping[str, Any] = stored_schema.read_indexes({} if found is None else found[1])
    yield "*** Row group indexes from dataset metadata ***"
    for name, index in indexes.items():
        yield f"Index: {name}"
        if name in skipped:
            yield "  (skipped)"
            continue
        for value in index.indexed_values:
            row_groups = index.get_row_group_indexes(value)
            yield f"  -- {value}({len(row_groups)})"
            if with_numbers:
                yield str(row_groups)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="metadata utility", description="Show parquet dataset metadata")
    parser.add_argument("--dataset-url", required=True, help="the URL of the dataset's folder")
    parser.add_argument("--schema", action="store_true", help="show the schema")
    parser.add_argument("--index", action="store_true", help="show the indexes of row groups")
    parser.add_argument("--print-values", action="store_true", help="show the numbers of the row groups")
    parser.add_argument("--skip-index", nargs="+", default=[], help="indexes whose values are not shown")
    parser.add_argument("--hdfs-driver", default="libhdfs3", help="accepted, does nothing")
    return parser


def _main(argv: Sequence[str]) -> None:
    arguments = _parser().parse_args(argv)
    note_driver(arguments.hdfs_driver)
    shows_all = not arguments.schema and not arguments.index
    if arguments.schema or shows_all:
        _show(describe_schema(arguments.dataset_url))
    if arguments.index or shows_all:
        _show(
            describe_indexes(arguments.dataset_url, skipped=arguments.skip_index, with_numbers=arguments.print_values)
        )


def _show(lines: Iterator[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")


def main() -> None:
    """The command."""
    _main(sys.argv[1:])


if __name__ == "__main__":
    main()
