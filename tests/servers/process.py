"""Programs that tests talk to: fetched once, started on demand, gone when the tests are.

A server runs in a process group of its own and ends with the test process, however that one ends: a shell beside
it waits on a pipe that only the test process holds open, and kills the group once the pipe breaks.

Why not PR_SET_PDEATHSIG: it looks at the thread that started the child, so that a server which a test's thread has
restarted would die with that thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import platformdirs
import pytest

START_SECONDS = 90
STOP_SECONDS = 20
NUM_TAIL_LINES = 40

# Below the ports that kernels hand to outgoing connections: a server that was stopped finds its own port free.
_PORTS = range(20_000, 30_000)
_given_ports: set[int] = set()

_pids: set[int] = set()

# `exec` keeps the process id. The watcher reads from descriptor 3: what runs in the background gets no other input.
_WATCHED = 'exec 3<&0; (read _ <&3; kill -s KILL -- -$$) & exec "$@" 3<&- </dev/null'


class Server:
    """One program, in a process of its own; `is_ready` says whether it answers."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        is_ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._is_ready = is_ready
        self._environment = os.environ | dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"Server({self.name!r})"

    @property
    def pid(self) -> int:
        """The process of the program itself."""
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it, again if it has been started before, and return once it answers."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start it without waiting; its output goes to the end of `log`."""
        assert not self.is_running, f"{self.name} runs already"
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _WATCHED, "sh", *self._command],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _pids.add(self._process.pid)

    def wait_until_ready(self) -> None:
        """Return once it answers; show the end of its log if it does not."""
        deadline = time.monotonic() + START_SECONDS
        while not (self.is_running and self._is_ready()):
            if not self.is_running or time.monotonic() > deadline:
                what = "ended" if not self.is_running else f"did not answer within {START_SECONDS} s"
                self.kill()
                raise RuntimeError(f"{self.name} {what}. The end of {self.log}:\n{tail(self.log)}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Let it end in order; does nothing where it does not run."""
        if self._process is not None:
            self.resume()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self.kill()

    def kill(self) -> None:
        """End it at once, with its children; does nothing where it does not run."""
        if self._process is not None:
            # Its watcher may outlive it, so the group is there even where the program is not.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
            _pids.discard(self._process.pid)
            self._process = None

    def pause(self) -> None:
        """Let it do nothing, with its connections open, until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)
        # Its threads stop one after another: some may still answer when the signal has been sent.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it go on; does nothing where it was not paused."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """It does nothing in this block, and answers again after it."""
        self.pause()
        try:
            yield
        finally:
            self.resume()
            self.wait_until_ready()

    @contextmanager
    def killed(self) -> Iterator[None]:
        """It was killed before this block, and runs again after it, with its data and on its port."""
        self.kill()
        try:
            yield
        finally:
            self.start()


def server_pids() -> frozenset[int]:
    """The processes of all servers that this test process has started and not ended."""
    return frozenset(_pids)


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-NUM_TAIL_LINES:]) if log.exists() else "(no log)"


def get(port: int, path: str, *, seconds: float = 2) -> bytes | None:
    """What a local HTTP server answers, whatever its status; None where nobody answers.

    Not by `urllib`: a proxy in the environment is not for 127.0.0.1.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return None


def free_port() -> int:
    """A port of 127.0.0.1 that is free, and that no other test process is given as long as this one lives."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        if port in _given_ports:
            continue
        try:
            # One byte of the file stands for each port; the locks end with this process, not with its forks.
            fcntl.lockf(_ports_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        _given_ports.add(port)
        return port


def fetched(name: str, fill: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, which outlives the run: `fill` writes its content where it is not there yet.

    It appears whole or not at all, and processes that want it at the same time fetch it once.
    """
    folder = _cache() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f"{name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            unfinished = folder.with_name(f"{name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            fill(unfinished)
            unfinished.rename(folder)
    return folder


def fetch(command: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a package manager in `folder`, up to three times: registries fail now and then."""
    said = ""
    for _ in range(3):
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=os.environ | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=90,  # Three of them fit into the time of a test.
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            said = str(error)
            continue
        if done.returncode == 0:
            return
        said = done.stdout
    raise RuntimeError(f"`{' '.join(command)}` failed three times:\n{said}")


def require_program(name: str, advice: str) -> str:
    """Where a program is; `is_missing` if there is none."""
    found = shutil.which(name)
    return found if found is not None else is_missing(f"`{name}` is missing: {advice}")


def is_missing(message: str) -> NoReturn:
    """Skip the test; fail it in CI, where nothing may be missing."""
    if os.environ.get("CI"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@functools.cache
def _ports_file() -> int:
    # Never closed: a process that closes a file gives up all its locks of it.
    _cache().mkdir(parents=True, exist_ok=True)
    return os.open(_cache() / "ports.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)


@functools.cache
def _cache() -> Path:
    """Where downloads outlive the run: CONVERTER_TEST_SERVERS, else the user's cache folder."""
    chosen = os.environ.get("CONVERTER_TEST_SERVERS")
    return Path(chosen or platformdirs.user_cache_dir("spark-tensor-converter-tests")).absolute()
