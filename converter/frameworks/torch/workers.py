"""A worker process of a DataLoader ends with the process or the loop that started it, however it was started."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import multiprocessing.process
import multiprocessing.util  # Before our hook at the interpreter's end, so that ours runs first.
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch.multiprocessing
from torch.utils.data import get_worker_info

from converter.errors import ConverterError
from converter.living import Living
from converter.reading.ahead import READER_THREADS
from converter.reading.objects import import_pandas
from converter.reading.source import BatchSource

Iteration = TypeVar("Iteration")

_THREAD = "watch-parent"
_LOOK_SECONDS = 5.0

_SOCKET_BYTES = 107
"""unix(7): `sun_path` has 108 bytes, the last of which is 0. torch shares files by sockets on Linux alone."""

_END_SECONDS = 1.0
"""How long a process that was killed may take from closing its sockets to its end."""

SIGCHLD = {signal.SIGCHLD} if hasattr(signal, "SIGCHLD") else set()
ALL_BUT_SIGCHLD = signal.valid_signals() - SIGCHLD
"""torch sets its handler of SIGCHLD while it starts worker processes."""


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
        arguments = (trainer, is_child, _temp_dir())
        threading.Thread(target=_wait_and_end, args=arguments, name=_THREAD, daemon=True).start()


def _wait_and_end(trainer: Any, is_child: bool, inherited_dir: str | None) -> None:
    # What tells of the trainer's end is held by workers that were forked later, too, so a worker also looks for itself.
    while trainer.is_alive() and not (is_child and trainer.pid != os.getppid()) and _is_there(trainer.pid):
        trainer.join(_LOOK_SECONDS)
    own_dir = _temp_dir()
    if own_dir is not None and own_dir != inherited_dir:
        # With the socket over which batches went; in an orderly end multiprocessing removes it.
        shutil.rmtree(own_dir, ignore_errors=True)
    # Nobody is left to whom anything could be said, and the main thread may wait for a store.
    os._exit(1)


def _temp_dir() -> str | None:
    """Where multiprocessing keeps this process's sockets; None if it has made no folder.

    Reaches into: multiprocessing.process.BaseProcess._config (CPython 3.10 to 3.13).
    Without it: workers of a killed trainer leave an empty folder `pymp-…` with a socket behind.
    """
    folder = getattr(multiprocessing.current_process(), "_config", {}).get("tempdir")
    return None if folder is None else str(folder)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def check_temp_dir() -> None:
    """Raise ConverterError if the names of sockets in the temporary folder would be too long for the system.

    Workers send tensors through such sockets. They would fail to, and the trainer would wait for ever.

    Reaches into: multiprocessing.util._SUN_PATH_MAX (CPython 3.14, which takes another folder then).
    Without it: a temporary folder of a long name is refused there, too.
    """
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if strategy != "file_descriptor" or hasattr(multiprocessing.util, "_SUN_PATH_MAX"):
        return
    folder = _temp_dir() or os.path.join(tempfile.gettempdir(), "pymp-12345678")
    if len(os.fsencode(os.path.join(folder, "listener-12345678"))) > _SOCKET_BYTES:
        raise ConverterError(
            f"The name of the temporary folder {tempfile.gettempdir()!r} is too long: worker processes send batches "
            f"through sockets in it, and the system limits their names to {_SOCKET_BYTES} bytes. Set the environment "
            "variable TMPDIR to a shorter one, such as /tmp, before Python starts, or pass num_workers=0, which reads "
            "in threads."
        )


def finish_imports() -> None:
    """Finish what reader threads import at their first use, before processes are forked.

    A process that is forked while another thread imports a module waits for ever when it imports that, too.
    """
    importlib.import_module("numpy.random")
    is_reading = any(thread.name.startswith(READER_THREADS) for thread in threading.enumerate())
    if is_reading or "pandas" in sys.modules:
        import_pandas()


def is_starting_process() -> bool:
    """Whether an object that is pickled now goes to a process that multiprocessing starts.

    Reaches into: multiprocessing.context.get_spawning_popen, undocumented (CPython 3.10 to 3.13).
    Without it: no credentials go along, and started workers take those of their environment.
    """
    get_spawning_popen = getattr(multiprocessing.context, "get_spawning_popen", lambda: None)
    return get_spawning_popen() is not None


def check_pickles(source: BatchSource, multiprocessing_context: Any) -> None:
    """Raise TypeError if the transform, a decoder or a token provider cannot be sent to worker processes."""
    method = multiprocessing_context
    if method is None:
        # get_start_method() would fix the method for the whole process.
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    elif not isinstance(method, str):
        # torch itself refuses an object that is no context.
        method = method.get_start_method() if hasattr(method, "get_start_method") else "fork"
    if method == "fork":
        return
    options = {
        f"storage_options[{name!r}]": option for storage in source.storages for name, option in storage.options.items()
    }
    decoders = {
        f"decode[{name!r}]": decoder for part in (source, *source.parts) for name, decoder in part.decoders.items()
    }
    for name, value in {"transform": source.transform, **decoders, **options}.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            instead = "" if name == "transform" or name in decoders else ", pass an object of azure-identity"
            raise TypeError(
                f"{name} cannot be sent to worker processes ({method}): {error}. Define it at the top of a "
                f"module{instead}, or pass num_workers=0, which runs it in threads."
            ) from error


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
        _kill(begun, {*getattr(begun, "_workers", ()), seen.get("w")})
        trace = trace.tb_next


class Packed:
    """An item of work in the form in which it travels from a worker process; the trainer receives the item itself.

    Pickled here, where an error is told. torch does it in a thread, prints what fails there, and the trainer waits.

    Raises:
        ConverterError: the item cannot travel.
    """

    def __init__(self, item: Any) -> None:
        try:
            self._content = bytes(ForkingPickler.dumps(item))
        except Exception as error:
            raise ConverterError(
                f"A worker process cannot send its batches: {type(error).__name__}: {error}. If a transform makes "
                "objects, let it make numbers or texts; else raise the number of open files (ulimit -n). Or pass "
                "num_workers=0, which reads in threads."
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        # At once, for memory that is not fetched before its process ends is lost.
        return pickle.loads, (self._content,)


def next_of(items: Any) -> Any:
    """The next item of torch's iterator over worker processes, while items are left.

    Raises:
        ConverterError: the processes have ended without it.
        RuntimeError: a process was killed.
    """
    try:
        return next(items)
    except StopIteration:
        raise ConverterError(
            "Worker processes have ended, but batches are missing; perhaps they have said why on stderr. Pass "
            "num_workers=0, which reads in threads."
        ) from None
    except (OSError, EOFError) as error:
        _check_workers(items, error)
        raise


class Turns:
    """Which iteration of a loader has its worker processes: the last one, if they persist; else each has its own.

    Args:
        is_one: whether the processes persist.
    """

    def __init__(self, *, is_one: bool) -> None:
        self._is_one = is_one
        self._last = 0
        self._lock = (os.getpid(), threading.RLock())

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While no other thread asks the processes, or lets them begin: of what torch waits for, it would take a part.

        That one would wait for ever.
        """
        pid = os.getpid()
        if self._lock[0] != pid:
            # It may be held by a thread of the parent.
            self._lock = (pid, threading.RLock())
        with self._lock[1] if self._is_one else contextlib.nullcontext():
            yield

    def begin(self) -> int:
        """The number of an iteration that begins."""
        self._last += 1
        return self._last

    def is_over(self, turn: int) -> bool:
        """Whether another iteration has the processes by now."""
        return self._is_one and turn != self._last

    def next_of(self, items: Any, turn: int) -> Any:
        """`next_of` in an iteration's turn.

        Raises:
            ConverterError: another iteration has the processes by now.
        """
        with self.alone():
            if not self.is_over(turn):
                return next_of(items)
        raise ConverterError(
            "Another iteration of this loader has taken its persistent workers. Make one loader for each iteration, or "
            "pass persistent_workers=False."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"_is_one": self._is_one, "_last": 0, "_lock": (0, None)}


def _check_workers(iterator: Any, error: Exception) -> None:
    """Raise what torch says of a worker process that has ended, if that is why its batch could not be fetched.

    torch looks at once, when the process that was killed has closed its sockets, but may not have ended yet.

    Reaches into: DataLoader's iterators and their _workers (torch 2.4 to 2.15).
    Without it: of some killed workers, "Connection reset by peer" is told instead.
    """
    if "in DataLoader worker process" in str(error):
        # A worker's own error, which it has sent.
        return
    workers = {worker.sentinel: worker.pid for worker in getattr(iterator, "_workers", ())}
    ended = multiprocessing.connection.wait(list(workers), _END_SECONDS)
    if ended:
        pids = ", ".join(str(workers[sentinel]) for sentinel in workers if sentinel in ended)
        raise RuntimeError(f"DataLoader worker (pid(s) {pids}) exited unexpectedly, or was killed.") from error


def end_broken(loader: Any) -> None:
    """End the persistent worker processes of a DataLoader if one of them was killed, so that it starts new ones.

    Reaches into: DataLoader._iterator and its _workers (torch 2.4 to 2.15).
    Without it: if one was killed between two epochs, the next is an error.
    """
    iterator = getattr(loader, "_iterator", None)
    if any(not worker.is_alive() for worker in getattr(iterator, "_workers", ())):
        end_workers(iterator)
        loader._iterator = None  # noqa: SLF001


def end_workers(iterator: Any) -> None:
    """End the worker processes of one of torch's iterators now.

    Reaches into: DataLoader's iterators, their _workers and _shutdown_workers (torch 2.4 to 2.15).
    Without it: garbage collection ends the processes, and torch waits up to five seconds for each of them.
    """
    # torch's handler of SIGCHLD tells of a worker that was killed at any moment, also in here.
    with contextlib.suppress(RuntimeError):
        getattr(iterator, "_shutdown_workers", lambda: None)()
    if hasattr(iterator, "_workers"):
        _kill(iterator, iterator._workers)  # noqa: SLF001


def _kill(iterator: Any, processes: Iterable[Any]) -> None:
    """End worker processes at once, and let torch forget them.

    Reaches into: torch.utils.data._utils.signal_handling._remove_worker_pids (torch 2.4 to 2.15).
    Without it: a later loader is refused if its iterator has this one's place in memory.
    """
    begun = [one for one in processes if isinstance(one, multiprocessing.process.BaseProcess) and one.pid is not None]
    if not begun:
        return
    # Nothing waits in here but for processes that were killed.
    with signals_wait(SIGCHLD):
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            from torch.utils.data._utils import signal_handling

            signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]  # noqa: SLF001
        for process in begun:
            process.kill()
            process.join()


_noting: dict[int, Any] = {}
"""The handlers of signals that wait."""


@contextlib.contextmanager
def signals_wait(numbers: AbstractSet[int] = ALL_BUT_SIGCHLD) -> Iterator[None]:
    """Let signals wait for the end of the block, in which processes are forked, or ended.

    What a handler raises in the midst of a fork is lost, and leaves the lock of `logging` held: the next thread that
    logs would hang. Python runs handlers in the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread() or _noting:
        yield
        return
    came: list[int] = []
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


_starting = threading.RLock()


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let one thread of this process start workers: an epoch stands in the object that is copied for them."""
    with _starting:
        yield


def _renew_lock() -> None:
    """In a forked child: a thread that only the parent has may hold the lock."""
    global _starting
    _starting = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


_with_workers: Living[Any] = Living()
"""The loaders of this process that have started worker processes."""

_loaders: Living[Any] = Living()
"""The same as DataLoaders of torch, of which DeltaTorch's have one inside."""

_iterators: Living[Any] = Living()
"""torch's iterators of these loaders."""


def close_at_exit(loader: Any) -> None:
    """Close a loader with worker processes at the interpreter's end, if it is open then.

    Else multiprocessing kills them there, and the sockets by which they send tensors stay in the temporary folder.
    """
    _with_workers.add(loader)


@atexit.register
def _close_all() -> None:
    for loader in _with_workers:
        loader.close()


def kept_from_children(loader: Any, iterator: Iteration) -> Iteration:
    """The same iterator of a DataLoader; its worker processes are none of the business of children of this process."""
    _loaders.add(loader)
    _iterators.add(iterator)
    return iterator


def _leave_workers_to_parent() -> None:
    """In a forked child: forget the worker processes, which are the parent's.

    torch would end them where their iterator is freed or closed, or the child ends: all processes share an event.

    Reaches into: DataLoader._iterator, its _workers and _shutdown (torch 2.4 to 2.15).
    Without it: the parent waits for ever for a batch of such a worker, as with torch's own loaders.
    """
    for iterator in _iterators:
        _forget(iterator._workers)  # noqa: SLF001
        iterator._shutdown, iterator._workers = True, []  # noqa: SLF001
    for loader in _loaders:
        loader._iterator = None  # noqa: SLF001
    for known in (_iterators, _loaders, _with_workers):
        known.clear()


def _forget(workers: Iterable[Any]) -> None:
    """In a forked child: keep multiprocessing from ending the parent's workers when this process ends.

    Reaches into: multiprocessing.process._children (CPython 3.10 to 3.13).
    Without it: a child of os.fork() that ends by sys.exit() ends them, as with torch's own loaders.
    """
    getattr(multiprocessing.process, "_children", set()).difference_update(workers)


os.register_at_fork(after_in_child=_leave_workers_to_parent)
