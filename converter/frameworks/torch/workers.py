"""A worker process of a DataLoader ends when the process that started it does, however it was started."""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import Any

_THREAD = "watch-parent"


def end_with_parent() -> None:
    """Let this worker process end as soon as its trainer is gone, killed trainers included.

    torch's workers look whether their parent process has changed. A worker of a fork server, the default of Python 3.14
    on, is a child of that server, which lives as long as its children do: both would stay for ever.
    """
    trainer = multiprocessing.parent_process()
    if trainer is None or trainer.pid == os.getppid() or any(one.name == _THREAD for one in threading.enumerate()):
        return
    threading.Thread(target=_wait_and_end, args=(trainer,), name=_THREAD, daemon=True).start()


def _wait_and_end(trainer: Any) -> None:
    trainer.join()
    # Nobody is left to whom anything could be said, and the main thread may wait for a store.
    os._exit(1)
