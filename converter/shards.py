"""Which shard this process reads, if the user does not pass one.

Looked up in this order: an initialised `torch.distributed`; an initialised `jax.distributed`; the environment of
torchrun, Horovod, MPI and Slurm; TF_CONFIG.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from typing import Any

from converter.errors import ConverterError
from converter.positions import Shard

logger = logging.getLogger(__name__)

_warned_in: int | None = None
"""The id of the process that has logged its warning; a forked process logs its own."""

_warned_of_other_in: int | None = None

_ENVIRONMENTS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Horovod", "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPI", "PMI_RANK", "PMI_SIZE"),
    # The step's, not the job's: a script that sbatch runs directly is one process, however many tasks the job has.
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


_PROCESSES_OF_HOST = (
    "LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip
"""Where launchers say how many processes they have started on this host; Slurm as `8(x125)`."""


def count_processes_of_host() -> int | None:
    """How many processes a launcher has started on this host, this one among them; None if none says so."""
    for name in _PROCESSES_OF_HOST:
        found = re.match(r"[1-9]\d*", os.environ.get(name, ""))
        if found:
            return int(found[0])
    return None


def find_shard() -> Shard:
    """This process's shard; all rows if nothing names one.

    A shard is logged, the first time as a warning: an evaluation on one rank alone would miss the others' rows.

    Raises:
        ValueError: the environment names no valid shard.
    """
    global _warned_in
    shard, source = look_for_shard()
    if shard.count > 1:
        logger.log(
            logging.INFO if _warned_in == os.getpid() else logging.WARNING,
            "Reading shard %d of %d, as found in %s. To read all rows here, pass cur_shard=0, shard_count=1.",
            shard.index, shard.count, source,
        )  # fmt: skip
        _warned_in = os.getpid()
    return shard


def warn_of_other_shard(given: Shard) -> None:
    """Warn, once in a process, if a shard that was passed is that of another process of the same training."""
    global _warned_of_other_in
    try:
        found, source = look_for_shard()
    except ValueError:
        return  # Who passes a shard need not have a right environment.
    if 1 < found.count == given.count and found.index != given.index and _warned_of_other_in != os.getpid():
        _warned_of_other_in = os.getpid()
        logger.warning(
            "Reading shard %d of %d, as passed, but this process is %d of %d by %s. Unless another process reads "
            "shard %d, its rows are not read. Without cur_shard and shard_count each process reads its own.",
            given.index, given.count, found.index, found.count, source, found.index,
        )  # fmt: skip


def require_own_shard(shard: Shard) -> None:
    """Raise ConverterError if a loader's shard is not this process's, so that rows would be read twice or never.

    That happens if it was made or used before torch.distributed was initialised, or initialised again.
    """
    if shard.count > 1:
        # Who started the process may call it another one than its group does: a worker process has no group.
        group = look_for_group()
        if group is not None and group[0] != shard:
            now, where = group
            raise ConverterError(
                f"This loader reads shard {shard.index} of {shard.count}, because it was made or used when this "
                f"process was that one; it is {now.index} of {now.count} now ({where}). Make a new loader, and let "
                "it load this one's state, or pass cur_shard and shard_count."
            )
        return
    now, where = look_for_shard()
    if now.count > 1:
        raise ConverterError(
            f"This loader reads all rows, because it was made or used before this process was one of {now.count} "
            f"({where}). Make the loader after that (with Lightning in train_dataloader()), or pass cur_shard "
            "and shard_count."
        )


def look_for_shard() -> tuple[Shard, str]:
    """This process's shard, and where it was found."""
    return look_for_group() or _of_environment() or _of_tensorflow() or (Shard(), "no environment")


def look_for_group() -> tuple[Shard, str] | None:
    """This process's place in a group of processes that is initialised, and by whom."""
    return _of_torch() or _of_jax()


def _of_torch() -> tuple[Shard, str] | None:
    # Not imported means not initialised.
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Shard(index=distributed.get_rank(), count=distributed.get_world_size()), "torch.distributed"


def _of_jax() -> tuple[Shard, str] | None:
    # As with torch, not imported means not initialised. JAX before 0.5.1 cannot be asked without starting its devices,
    # after which `jax.distributed.initialize()` would be an error.
    jax: Any = sys.modules.get("jax")
    is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return Shard(index=jax.process_index(), count=jax.process_count()), "jax.distributed"


def _of_environment() -> tuple[Shard, str] | None:
    found: tuple[Shard, str] | None = None
    for launcher, index_name, count_name in _ENVIRONMENTS:
        index, count = os.environ.get(index_name), os.environ.get(count_name)
        if index is None or count is None:
            continue
        try:
            shard, source = Shard(index=int(index), count=int(count)), f"the environment of {launcher} ({index_name})"
        except ValueError as error:
            if found is not None:
                continue
            raise ValueError(
                f"{index_name}={index!r} and {count_name}={count!r} in the environment name no shard ({error}). Pass "
                "cur_shard and shard_count."
            ) from error
        # One launcher may start another, for example Slurm a torchrun on each machine: the counts then differ.
        if found is not None and shard.count == found[0].count and shard.index != found[0].index:
            raise ValueError(
                f"The environment names two ranks of {shard.count}: {found[0].index} by {found[1]}, and {shard.index} "
                f"by {source}. Remove the wrong variables, or pass cur_shard and shard_count."
            )
        found = found or (shard, source)
    return found


def _of_tensorflow() -> tuple[Shard, str] | None:
    """The shard of a worker of MultiWorkerMirroredStrategy; the chief is the first one."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        return None
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster", {}), config.get("task", {})
        workers = [("chief", index) for index in range(len(cluster.get("chief", [])))]
        workers += [("worker", index) for index in range(len(cluster.get("worker", [])))]
        own = (task.get("type"), int(task.get("index", 0)))
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"TF_CONFIG in the environment names no shard ({error}). Pass cur_shard and shard_count."
        ) from error
    # Evaluators and parameter servers are not listed: they read all rows.
    return (Shard(index=workers.index(own), count=len(workers)), "TF_CONFIG") if own in workers else None
