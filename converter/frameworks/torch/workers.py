"""A worker process of a DataLoader ends with the process or the loop that started it, however it was started."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import multiprocessing.util  # Before our hook at the interpreter's end, so that ours runs first.
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import get_worker_info

_THREAD = "watch-parent"
_LOOK_SECONDS = 5.0


def end_with_parent() -> None:
    """Let this process, if it is a worker, end as soon as its trainer is gone, killed trainers included.

    torch's workers look whether their parent process has changed since they looked first, and then end in order. But a
    trainer may be gone by then. A worker of a fork server, the default of Python 3.14 on, is a child of that server,
    which lives as long as its children do. And a worker that waits until its batches are taken cannot end in order.

    Called when a worker makes its dataset's iterator, before it waits for work.
    """
    if get_worker_info() is None:
        return
    trainer = multiprocessing.parent_process()
    if trainer is not None and all(one.name != _THREAD for one in threading.enumerate()):
        is_child = trainer.pid == os.getppid()
        threading.Thread(target=_wait_and_end, args=(trainer, is_child), name=_THREAD, daemon=True).start()


def _wait_and_end(trainer: Any, is_child: bool) -> None:
    # What tells of the trainer's end is held by workers that were forked later, too, so a worker also looks for itself.
    while trainer.is_alive() and not (is_child and trainer.pid != os.getppid()) and _is_there(trainer.pid):
        trainer.join(_LOOK_SECONDS)
    # Nobody is left to whom anything could be said, and the main thread may wait for a store.
    os._exit(1)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def is_starting_process() -> bool:
    """Whether an object that is pickled now goes to a process that multiprocessing starts.

    Reaches into: multiprocessing.context.get_spawning_popen, undocumented (CPython 3.10 to 3.13).
    Without it: no credentials go along, and started workers take those of their environment.
    """
    get_spawning_popen = getattr(multiprocessing.context, "get_spawning_popen", lambda: None)
    return get_spawning_popen() is not None


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


_noting: dict[int, Any] = {}
"""The handlers of signals that wait."""


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Let signals wait for the end of the block, in which processes are forked.

    What a handler raises in the midst of a fork is lost, and leaves the lock of `logging` held: the next thread that
    logs would hang. Python runs handlers in the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread() or _noting:
        yield
        return
    came: list[int] = []
    numbers = signal.valid_signals() - {getattr(signal, "SIGCHLD", None)}
    try:
        _noting.update({number: signal.getsignal(number) for number in numbers if callable(signal.getsignal(number))})
        for number in _noting:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        _restore_handlers()
        with contextlib.ExitStack() as stack:
            for number in came:
                stack.callback(_handle, number)


def _handle(number: int) -> None:
    # Not raised again: whoever waits for signals by `set_wakeup_fd`, such as asyncio, was told of it when it came.
    handler = signal.getsignal(number)
    if callable(handler):
        handler(number, inspect.currentframe())


def _restore_handlers() -> None:
    while _noting:
        signal.signal(*_noting.popitem())


# A child has its own signals.
os.register_at_fork(after_in_child=_restore_handlers)


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
