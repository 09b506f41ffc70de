#!/usr/bin/env python3
"""The memory that `plan()` tells, beside what reading reaches, epoch after epoch.

    python tests/bench/memory.py --data DIR                   # 400 epochs of emb and tab, made by read.py where missing
    python tests/bench/memory.py --epochs 30 --parquet DIR    # of a folder of Parquet files

Each line is a process of its own, watched from outside: its anonymous memory beyond what it had when the loader was
made, every 3 ms. A slow consumer sleeps 20 ms at every fiftieth batch. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from read import BATCH_SIZE, apart, make_rows, print_table, slope_of

import converter

MAKERS = {"torch": "make_torch_dataloader", "numpy": "make_batch_reader"}


def read(url: str, kind: str, framework: str, consumer: str, num_epochs: int) -> None:
    """Read, and say on stdout when each epoch is over."""
    os.nice(19)
    opened = converter.open_converter(url) if kind == "cache" else converter.make_parquet_converter(url)
    options = {"batch_size": BATCH_SIZE, "shuffle": True, "ragged": "nested"}
    with opened, getattr(opened, MAKERS[framework])(**options) as loader:
        print(opened.plan(**options).peak_memory_bytes, flush=True)
        sys.stdin.readline()
        for _ in range(num_epochs):
            for number, _batch in enumerate(loader):
                if consumer == "slow" and number % 50 == random.randrange(50):
                    time.sleep(0.02)
            print("over", flush=True)


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file stands behind; 0 once it has ended."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next((int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")), 0)


def watch(*arguments: str) -> dict[str, Any]:
    """What such a reader tells, and the most memory of each of its epochs."""
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        told, before = int(child.stdout.readline()), anonymous_bytes(child.pid)
        peaks, lines, is_over = [0], child.stdout, threading.Event()

        def listen() -> None:
            for _ in lines:
                peaks.append(0)
            is_over.set()

        listener = threading.Thread(target=listen)
        listener.start()
        child.stdin.write("\n")
        child.stdin.flush()
        while not is_over.wait(0.003):
            peaks[-1] = max(peaks[-1], anonymous_bytes(child.pid) - before)
        listener.join()
    if child.returncode:
        raise SystemExit(f"the reader ended with {child.returncode}")
    return {"told": told, "peaks": peaks[:-1]}


def main() -> None:
    """Watch each way to read and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--only", nargs="+", default=["emb", "tab"], help="of read.py's rows (default: emb tab)")
    parser.add_argument("--data", help="where read.py's rows are kept and taken from again (default: nowhere)")
    parser.add_argument("--parquet", nargs="*", default=[], help="folders of Parquet files, instead of emb and tab")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        url, kind, framework, consumer, num_epochs = json.loads(options.child)
        read(url, kind, framework, consumer, int(num_epochs))
        return
    with tempfile.TemporaryDirectory() as temporary:
        wanted = [(folder, folder, "parquet") for folder in options.parquet]
        if not wanted:
            folder = os.path.join(os.path.abspath(options.data or temporary), "scale-1")
            os.makedirs(folder, exist_ok=True)
            rows = apart(make_rows, folder, options.only, 1.0)
            wanted = [(name, rows[name].url, "cache") for name in options.only]
        table = []
        for name, url, kind in wanted:
            for framework, consumer in (("torch", "fast"), ("torch", "slow"), ("numpy", "fast")):
                found = watch(url, kind, framework, consumer, str(options.epochs))
                peaks = [peak / 1e6 for peak in found["peaks"]]
                told, most, median = found["told"] / 1e6, max(peaks), statistics.median(peaks)
                cells = [f"{name}, {framework}, {consumer} consumer", f"{told:.0f}", f"{most:.0f}", f"{median:.0f}"]
                few = peaks[len(peaks) // 4 :]
                table.append([*cells, f"{told / median:.2f}", f"{slope_of(few):+.3f}", "yes" if most <= told else "NO"])
        head = [f"{options.epochs} epochs, shuffled", "told MB", "most MB", "median epoch's most MB", "told / median",
                "MB more each epoch", "kept"]  # fmt: skip
        print_table(head, table)


if __name__ == "__main__":
    main()
