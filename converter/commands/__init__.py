"""The command `converter`: caches and data sets seen from a shell."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; what a user can cause ends with one line on stderr and exit status 1."""
    try:
        from converter.commands.app import run
    except KeyboardInterrupt:
        # As `run` ends then: imports take a second.
        sys.exit(130)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(
            f"converter: {error.name} is not installed, which the command needs: "
            "pip install 'spark-tensor-converter[cli]'"
        )
    run()
