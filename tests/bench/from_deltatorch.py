#!/usr/bin/env python3
"""How fast a program of DeltaTorch's runs here, beside DeltaTorch itself: its digits, 60,000 rows of 28×28 bytes.

    python tests/bench/from_deltatorch.py            # some minutes on two cores
    python tests/bench/from_deltatorch.py --quick    # small, without DeltaTorch: does it run at all?
    python tests/bench/from_deltatorch.py --only plain --repeats 5

The same program runs with `deltatorch` and with `converter.deltatorch`: `create_pytorch_dataloader` with
`FieldSpec("image", decode_numpy_and_apply_shape=(28, 28), transform=…)` and `FieldSpec("label")`, batches of 64 rows,
`shuffle=True`, in turns (A B A B …), each turn in a fresh process. The first epoch is to be warm; the following five
count, or as many as fit in five seconds. Medians are compared; one element of each tensor is read.

plain: without `transform`. numpy: `transform` makes float32 of a picture and divides it by 255. torch: `transform` does
what torchvision's `ToTensor` and `Normalize` do. The limit is the calls of that function alone, in a loop over pictures
in memory, in one process.

`num_workers` is 0, or 2 with workers that stay, or 2 that are started for each epoch, as is DeltaTorch's default.
deltalake refuses to work in a process that was forked, so DeltaTorch's workers are spawned, as they have to be.

The file is not called deltatorch.py, because programs beside it import DeltaTorch by that name. Prints Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from peers_read import timed_epoch, tree_cpu_seconds

IS_JOB = sys.argv[-1].startswith("{")
if not IS_JOB and __name__ == "__main__":
    # DeltaTorch's environment has none of these.
    import platformdirs
    import pyarrow as pa
    import read
    from read import Goal, Peers, Way, in_turns, print_ratios, print_ways

    import converter

BATCH_SIZE, NUM_ROWS = 64, 60_000
COUNTED_EPOCHS, COUNTED_SECONDS = 5, 5.0
DELTATORCH, OURS, LIMIT = "DeltaTorch", "here", "limit: the calls alone"
ENVIRONMENT = "images_deltatorch"

WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {"num_workers": 0},
    "2 workers that stay": {"num_workers": 2, "persistent_workers": True},
    "2 workers for each epoch": {"num_workers": 2},
}


# --- The program: it runs in a process of its own ---------------------------------------------------------------------


def as_numbers(picture: Any) -> Any:
    """NumPy's part of what users do with a picture."""
    return picture.astype(np.float32) / 255


def as_tensor(picture: Any) -> Any:
    """As torchvision's `ToTensor` and `Normalize` for MNIST."""
    import torch

    return (torch.from_numpy(picture.copy()).unsqueeze(0).float().div(255) - 0.1307) / 0.3081


TRANSFORMS: dict[str, Callable[[Any], Any] | None] = {"plain": None, "numpy": as_numbers, "torch": as_tensor}


def calls_alone(job: Mapping[str, Any]) -> None:
    """Print the epochs of a loop that calls `transform` for pictures in memory, and throws away what it returns."""
    transform = TRANSFORMS[job["transform"]]
    assert transform is not None
    pictures = list(np.random.default_rng(3).integers(0, 256, (NUM_ROWS, 28, 28), np.uint8))
    epochs = []
    for _ in range(COUNTED_EPOCHS + 1):
        begin_cpu, begin = time.process_time(), time.perf_counter()
        for picture in pictures:
            transform(picture)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
        epochs.append({"rows": NUM_ROWS, "seconds": seconds, "cpu_seconds": cpu_seconds})
    print(json.dumps({"epochs": epochs[1:], "versions": f"numpy {np.__version__}"}))


def do_job(job: Mapping[str, Any]) -> None:
    """Print epochs and versions as one line of JSON."""
    if job["who"] == LIMIT:
        calls_alone(job)
        return
    warnings.simplefilter("ignore")
    workers = dict(job["workers"])
    if job["who"] == DELTATORCH:
        from deltatorch import FieldSpec, create_pytorch_dataloader

        workers |= {"multiprocessing_context": "spawn"} if workers["num_workers"] else {}
        packages = ["deltatorch", "deltalake", "pyarrow", "numpy", "torch"]
    else:
        from converter.deltatorch import FieldSpec, create_pytorch_dataloader

        packages = ["deltalake", "pyarrow", "numpy", "torch"]
    loader = create_pytorch_dataloader(
        job["path"],
        id_field="id",
        fields=[
            FieldSpec("image", decode_numpy_and_apply_shape=(28, 28), transform=TRANSFORMS[job["transform"]]),
            FieldSpec("label"),
        ],
        batch_size=BATCH_SIZE,
        shuffle=True,
        **workers,
    )
    # Looking at all processes takes longer than a fast epoch.
    is_alone = not workers["num_workers"] or (job["who"] != DELTATORCH and job["transform"] == "plain")
    cpu_seconds = time.process_time if is_alone else tree_cpu_seconds
    epoch = functools.partial(timed_epoch, lambda: loader, max_seconds=job["max_seconds"], cpu_seconds=cpu_seconds)
    epoch()
    epochs: list[dict[str, Any]] = []
    while len(epochs) < job["epochs"] and (not epochs or sum(one["seconds"] for one in epochs) < COUNTED_SECONDS):
        epochs.append(epoch())
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    print(json.dumps({"epochs": epochs, "versions": f"{versions}, Python {platform.python_version()}"}))


# --- What starts it ---------------------------------------------------------------------------------------------------


class Bench:
    """What every section needs."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.options, self.path = options, f"{folder}/digits"
        self.num_rows = NUM_ROWS if not options.quick else NUM_ROWS // 40
        self.versions: dict[str, str] = {}
        self._peers = Peers(options)
        write_digits(self.path, self.num_rows)

    def way(self, who: str, transform: str, workers: Mapping[str, Any]) -> Way:
        """One of the two with a transform and workers."""
        job = {
            "path": self.path,
            "transform": transform,
            "workers": dict(workers),
            "who": who,
            "max_seconds": self.options.peer_seconds,
            "epochs": COUNTED_EPOCHS,
        }

        def run() -> list[dict[str, Any]]:
            python = self._peers._python(ENVIRONMENT) if who == DELTATORCH else sys.executable
            root = os.path.dirname(os.path.dirname(os.path.abspath(converter.__file__)))
            variables = {"PYTHONPATH": root} if who == OURS else {}
            found = self._peers._run(python, job, script=Path(__file__), variables=variables)
            self.versions[who] = found["versions"]
            epochs: list[dict[str, Any]] = found["epochs"]
            return epochs

        num_rows = NUM_ROWS if who == LIMIT else self.num_rows
        return Way(run=run, num_rows=num_rows, warms_itself=True)


def write_digits(path: str, num_rows: int) -> None:
    """A Delta table of one file: pictures that are mostly black and compress well, as digits do, a label and an id."""
    import deltalake

    if os.path.exists(f"{path}/_delta_log"):
        return
    generator = np.random.default_rng(3)
    strokes = generator.integers(0, 256, (num_rows, 7, 7), np.uint8) * (generator.random((num_rows, 7, 7)) < 0.25)
    pictures = strokes.astype(np.uint8).repeat(4, axis=1).repeat(4, axis=2)
    fixed = pa.Array.from_buffers(pa.binary(784), num_rows, [None, pa.py_buffer(np.ascontiguousarray(pictures))])
    labels = pa.array(generator.integers(0, 10, num_rows))
    ids = pa.array(np.arange(num_rows))
    deltalake.write_deltalake(path, pa.table({"image": fixed.cast(pa.binary()), "label": labels, "id": ids}))


def section(bench: Bench, transform: str, least: float) -> None:
    """Both with each kind of workers; each of ours beside the same of DeltaTorch's, and the best beside the best."""
    ways = {
        f"{who}, {workers}": bench.way(who, transform, options)
        for workers, options in WORKERS.items()
        for who in (OURS, DELTATORCH)
    }
    if TRANSFORMS[transform] is not None:
        ways[LIMIT] = bench.way(LIMIT, transform, {})
    in_turns(ways, bench.options.repeats)
    print_ways(ways)
    goals = [Goal(f"{OURS}, {workers}", f"{DELTATORCH}, {workers}", least) for workers in WORKERS]
    best = [
        max(names, key=lambda name: ways[name].rate)
        for names in (
            [name for name in ways if name.startswith(who) and ways[name].epochs] for who in (OURS, DELTATORCH)
        )
        if names
    ]
    if len(best) == 2 and Goal(*best, least) not in goals:
        goals.append(Goal(*best))
    if LIMIT in ways:
        goals.append(Goal(f"{OURS}, {next(iter(WORKERS))}", LIMIT))
    print_ratios(ways, goals)


SECTIONS: dict[str, tuple[str, float]] = {
    "plain": ("without transform", 50),
    "numpy": ("transform with NumPy", 5),
    "torch": ("transform with torch", 5),
}


def main(arguments: Any = None) -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=SECTIONS, metavar="NAME", help=f"of {', '.join(SECTIONS)} (default: all)")
    add("--repeats", type=int, help="turns of each way (default: 3)")
    add("--data", help="where the rows are kept and taken from again (default: nowhere)")
    add("--quick", action="store_true", help="a fortieth of the rows, one turn, without DeltaTorch")
    add("--peers", help="where DeltaTorch's environment is (default: in the user's cache folder)")
    add("--without-peers", action="store_true", help="leave DeltaTorch out")
    add("--peer-seconds", type=float, default=60.0, help="most seconds of an epoch (default: %(default)s)")
    add("--petastorm-python", help=argparse.SUPPRESS)
    add("--ray-python", default=sys.executable, help="a Python for DeltaTorch's environment (default: this one)")
    add("--verbose", action="store_true", help="show all that a failed job said")
    options = parser.parse_args(arguments)
    options.repeats = options.repeats or (1 if options.quick else 3)
    options.without_peers = options.without_peers or options.quick
    options.peers = options.peers or platformdirs.user_cache_path("spark-tensor-converter-bench")
    read.TITLES[ENVIRONMENT] = DELTATORCH
    read.REQUIREMENTS[ENVIRONMENT] = [*read.REQUIREMENTS["deltatorch"], "pillow==13.0.0"]
    print(f"{read.machine()}, {options.repeats} turns{', a fortieth of the rows' * options.quick}\n", flush=True)
    with contextlib.ExitStack() as stack:
        folder = options.data or stack.enter_context(tempfile.TemporaryDirectory())
        folder = os.path.join(os.path.abspath(folder), "quick" if options.quick else "whole")
        os.makedirs(folder, exist_ok=True)
        bench = Bench(options, folder)
        for name in options.only or SECTIONS:
            title, least = SECTIONS[name]
            before = os.getloadavg()[0]
            print(f"### {name}: {NUM_ROWS:,} rows of 28×28 bytes, {title}, shuffled\n", flush=True)
            section(bench, name, least)
            print(f"Load of the machine: {before:.1f} before, {os.getloadavg()[0]:.1f} after.\n", flush=True)
    bench.versions.pop(LIMIT, None)
    for who, versions in bench.versions.items():
        print(f"{'DeltaTorch' if who == DELTATORCH else 'Ours'} ran with {versions}.")


if __name__ == "__main__":
    if IS_JOB:
        do_job(json.loads(sys.argv[-1]))
    else:
        main()
