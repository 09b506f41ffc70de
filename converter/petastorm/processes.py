"""A user's function in processes of its own, so that slow Python runs on all cores: `reader_pool_type="process"`.

A process is a fresh interpreter that talks over two pipes. It does not import the user's script, as `multiprocessing`
would, so scripts need no `if __name__ == "__main__"`. It ends when its pipe does, also if this process is killed.
"""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import io
import logging
import os
import pickle
import queue
import select
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0
"""How long a process may take to end when it is told to; a guess."""

_LENGTH = struct.Struct("<Q")
_PICKLERS = ("cloudpickle", "pyspark.cloudpickle", "pickle")


def dump_function(function: Callable[[Any], Any]) -> bytes | None:
    """A function, also one of the user's script, as bytes for another process of ours; None if it cannot travel."""
    for name in _PICKLERS:
        try:
            return bytes(importlib.import_module(name).dumps(function))
        except ImportError:
            continue
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            logger.warning(
                "The function %r cannot be sent to another process (%s), so it runs in threads.", function, error
            )
            return None
    return None


class Processes:
    """Calls a function in several processes; threads share them, and each waits for the answer to its own call."""

    def __init__(self, dumped: bytes, count: int) -> None:
        self._idle: queue.LifoQueue[_Process] = queue.LifoQueue()
        self._all = [_Process(dumped) for _ in range(count)]
        for process in self._all:
            self._idle.put(process)

    def __call__(self, argument: Any) -> Any:
        """The function's result. What it raises is raised here.

        Raises:
            RuntimeError: the process ended, because it was killed or had too little memory.
        """
        process = self._idle.get()
        try:
            return process.ask(argument)
        finally:
            self._idle.put(process)

    def end(self) -> None:
        """End the processes, in the middle of their calls: whoever waits for an answer gets an error."""
        deadline = time.monotonic() + _END_SECONDS
        for process in self._all:
            process.end()
        for process in self._all:
            process.kill_after(deadline)

    def close(self) -> None:
        """End the processes, and wait for them. No thread waits for an answer any more."""
        self.end()
        for process in self._all:
            process.close()


class _Process:
    """One process and the pipes to it and from it; it is started with its first question."""

    def __init__(self, dumped: bytes) -> None:
        self._dumped = dumped
        self._popen: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._pid: int | None = None
        """Whose it is, once it is asked. A forked child has no threads that may hold its lock and its pipes."""

        self._lock = threading.RLock()
        """Keeps `end` from missing a process that is being started; the collector may call that from `_start`."""

        self._to: BinaryIO
        self._back: Any

    def _start(self) -> subprocess.Popen[bytes]:
        read_question, write_question = os.pipe()
        read_answer, write_answer = os.pipe()
        code = f"from converter.petastorm import processes; processes.serve({read_question}, {write_answer})"
        popen = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(read_question, write_answer),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        os.close(read_question)
        os.close(write_answer)
        # Without a buffer, which would hide what has come.
        self._to, self._back = os.fdopen(write_question, "wb"), os.fdopen(read_answer, "rb", buffering=0)
        _send(self._to, self._dumped)
        return popen

    @property
    def _is_anothers(self) -> bool:
        return self._pid not in (None, os.getpid())

    def ask(self, argument: Any) -> Any:
        self._pid = os.getpid()
        with self._lock:
            if self._popen is None and not self._ended.is_set():
                self._popen = self._start()
                if self._ended.is_set():
                    self._popen.terminate()
        if self._popen is None:
            raise RuntimeError("The reader was stopped, so its transform is not called any more.")
        try:
            if self._popen.poll() is not None:
                raise EOFError
            _send(self._to, _pickled(argument))
            answer = _receive(self._back, self._wait_for_answer)
        except (BrokenPipeError, EOFError) as error:
            if self._ended.is_set():
                raise RuntimeError("The reader was stopped while a process of it ran the transform.") from None
            raise RuntimeError(
                f"The process that ran the transform ended (exit status {self._popen.wait()}). Was it killed, or was "
                "there too little memory? Try fewer workers, or reader_pool_type='thread'."
            ) from error
        # What our own process sent; nothing of a store is in it but values.
        is_result, value = pickle.loads(answer)  # noqa: S301 (a process that this one started)  # nosec B301
        if is_result:
            return value
        raise value

    def _wait_for_answer(self) -> None:
        """Wait for bytes of the process; what it has started may keep its pipe open when it has ended itself.

        Raises:
            EOFError: it has ended, and left no bytes.
        """
        assert self._popen is not None
        waiting = select.poll()
        waiting.register(self._back, select.POLLIN)
        while not waiting.poll(1000):
            if self._popen.poll() is not None and not waiting.poll(0):
                raise EOFError

    def end(self) -> None:
        if self._is_anothers:
            return
        with self._lock:
            self._ended.set()
            if self._popen is not None:
                # It may be in the middle of a call.
                self._popen.terminate()

    def kill_after(self, deadline: float) -> None:
        """Wait for the end of the process until then, and kill it if it has not ended."""
        popen = self._popen
        if popen is None or self._is_anothers:
            return
        try:
            popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # For example it was stopped by a signal, or the function handles this one.
            popen.kill()
            popen.wait()

    def close(self) -> None:
        """Close the pipes of a process that has ended."""
        if self._popen is None or self._is_anothers:
            return
        for pipe in (self._to, self._back):
            with contextlib.suppress(OSError):
                pipe.close()
        self._popen = None


def serve(question_fd: int, answer_fd: int) -> None:
    """Answer questions until the pipe ends: what a process of `Processes` runs."""
    for fd in (question_fd, answer_fd):
        # Or a program that the function starts would keep the pipes open.
        os.set_inheritable(fd, False)
    questions, answers = os.fdopen(question_fd, "rb"), os.fdopen(answer_fd, "wb")
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt), questions, answers:
        function = pickle.loads(_receive(questions))  # noqa: S301 (the parent's function)  # nosec B301
        while True:
            argument = pickle.loads(_receive(questions))  # noqa: S301 (the parent's rows)  # nosec B301
            _send(answers, _answer(function, argument))


def _answer(function: Callable[[Any], Any], argument: Any) -> bytes:
    try:
        return _pickled((True, function(argument)))
    except Exception as error:  # noqa: BLE001 (a user's function may raise anything, and the parent raises it)
        try:
            pickled = pickle.dumps((False, error), protocol=5)
            pickle.loads(pickled)  # noqa: S301 (made here: some errors cannot be made again)  # nosec B301
        except Exception:  # noqa: BLE001 (their own code runs)
            text = "".join(traceback.format_exception(error))
            return pickle.dumps((False, RuntimeError(f"The transform failed in its process:\n{text}")), protocol=5)
        return pickled


def _pickled(value: Any) -> bytes:
    """A value in bytes; NumPy itself would leave out the zeros at the end of its texts and bytes."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = {
        **copyreg.dispatch_table,
        np.bytes_: lambda value: (np.bytes_, (value[:],)),
        np.str_: lambda value: (np.str_, (value[:],)),
    }
    pickler.dump(value)
    return buffer.getvalue()


def _send(pipe: BinaryIO, content: bytes) -> None:
    pipe.write(_LENGTH.pack(len(content)))
    pipe.write(content)
    pipe.flush()


def _receive(pipe: Any, wait: Callable[[], None] = lambda: None) -> memoryview:
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size, wait))
    return _read(pipe, length, wait)


def _read(pipe: Any, length: int, wait: Callable[[], None]) -> memoryview:
    content = memoryview(bytearray(length))
    start = 0
    while start < length:
        wait()
        count = pipe.readinto(content[start:])
        if not count:
            raise EOFError
        start += count
    return content
