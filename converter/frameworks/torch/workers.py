"""A worker process of a DataLoader ends when the process that started it does, however it was started."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

_THREAD = "watch-parent"
_LOOK_SECONDS = 5.0


def end_with_parent() -> None:
    """Let this worker process end as soon as its trainer is gone, killed trainers included.

    torch's workers look whether their parent process has changed, and then end in order. But a worker of a fork server,
    the default of Python 3.14 on, is a child of that server, which lives as long as its children do; and one that waits
    until somebody takes its batches cannot end in order.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None and all(one.name != _THREAD for one in threading.enumerate()):
        is_child = trainer.pid == os.getppid()
        threading.Thread(target=_wait_and_end, args=(trainer, is_child), name=_THREAD, daemon=True).start()


def _wait_and_end(trainer: Any, is_child: bool) -> None:
    # What tells of the trainer's end is held by workers that were forked later, too, so a child also looks for itself.
    while trainer.is_alive() and not (is_child and trainer.pid != os.getppid()):
        trainer.join(_LOOK_SECONDS)
    # Nobody is left to whom anything could be said, and the main thread may wait for a store.
    os._exit(1)
