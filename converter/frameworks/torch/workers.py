"""A worker process of a DataLoader ends with the process or the loop that started it, however it was started."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.process
import multiprocessing.util  # Before our hook at the interpreter's end, so that ours runs first.
import os
import threading
import weakref
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


def end_begun(error: BaseException) -> None:
    """End the worker processes that torch had started when an error, such as an interrupt, kept it from the others.

    Nobody else knows of them, and they would wait for work until the program ends.

    Reaches into: DataLoader's iterators, their _workers and _shutdown, and the last process w (torch 2.4 to 2.15).
    Without it: idle processes stay after a Ctrl-C at that moment, as with torch's own loaders.
    """
    trace = error.__traceback__
    while trace is not None:
        seen = trace.tb_frame.f_locals
        begun: Any = seen.get("self")
        if hasattr(begun, "_workers"):
            # Half made, it could not end its processes, and would print an error when it is freed.
            begun._shutdown = True  # noqa: SLF001
        for process in {*getattr(begun, "_workers", ()), seen.get("w")}:
            if isinstance(process, multiprocessing.process.BaseProcess) and process.pid is not None:
                process.kill()
                process.join()
        trace = trace.tb_next


_with_workers: weakref.WeakSet[Any] = weakref.WeakSet()
"""The loaders of this process that have started worker processes."""


def close_at_exit(loader: Any) -> None:
    """Close a loader with worker processes at the interpreter's end, if it is open then.

    Else multiprocessing kills them there, and the sockets by which they send tensors stay in the temporary folder.
    """
    _with_workers.add(loader)


@atexit.register
def _close_all() -> None:
    for loader in list(_with_workers):
        loader.close()


# The workers are the parent's.
os.register_at_fork(after_in_child=_with_workers.clear)
