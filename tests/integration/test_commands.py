"""The command in processes of its own: on a terminal, in pipes, without the packages that it needs."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fcntl import ioctl
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from converter import DatasetConverter
from tests.columns import ID
from tests.entries import write_converter
from tests.repository import REPOSITORY
from tests.waiting import wait_until

SCRIPT = Path(sys.executable).with_name("converter")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DatasetConverter]:
    with write_converter(tmp_path_factory.mktemp("cache"), (ID,), [[range(100)]], delete_on_exit=False) as found:
        yield found


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with 60 columns, of which some have names and values that a terminal must not take for its own."""
    names = [
        "[bold]markup[/bold]",
        "[/]",
        "<script>",
        "\x1b]0;title\x07",
        "עברית \u202e🎈",
        *(f"column {n}" for n in range(55)),
    ]
    values = [["[red]x", "\x1b[2J"] for _ in names]
    path = tmp_path_factory.mktemp("strange") / "rows.parquet"
    pq.write_table(pa.table(values, names=names), path)
    return path


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("CONVERTER_CACHE_DIR", "COLUMNS")}
    return kept | variables


def run(*arguments: object, status: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "converter", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(**variables), capture_output=True, text=True, check=False,
        encoding="utf-8", errors="replace",
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


def on_terminal(columns: int, *arguments: object, **variables: str) -> str:
    """What a command shows on a terminal of so many columns."""
    controller, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    command = [sys.executable, "-m", "converter", *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment(TERM="xterm", **variables), stdin=terminal, stdout=terminal,
        stderr=terminal,
    ) as process:  # fmt: skip
        os.close(terminal)
        shown = b""
        while True:
            try:
                part = os.read(controller, 1 << 16)
            except OSError:  # So Linux tells that the other end is closed.
                break
            if not part:
                break
            shown += part
    os.close(controller)
    assert process.returncode == 0, shown
    return shown.decode()


def test_the_script_and_the_module_are_the_same_command() -> None:
    shown = subprocess.run([SCRIPT, "--help"], env=environment(), capture_output=True, text=True, check=True).stdout
    assert shown == run("--help").stdout.replace("python -m converter", "converter")
    for name in (
        "ls",
        "show",
        "head",
        "verify",
        "plan",
        "bench",
        "sweep",
        "delete",
        "doctor",
        "Exit status: 0 if all is well, 1 after",
    ):
        assert name in shown
    for name in ("ls", "show", "head", "verify", "plan", "bench", "sweep", "delete", "doctor"):
        assert "Usage: " in run(name, "--help").stdout


def test_errors_are_one_line_and_have_their_status(cache: DatasetConverter, tmp_path: Path) -> None:
    assert run("show", tmp_path / "nowhere", status=1).stderr.count("\n") == 1
    assert run("show", tmp_path / "nowhere", status=1).stderr.startswith("converter: ")
    assert "Usage: " in run("show", status=2).stderr
    assert "No such command" in run("shaw", status=2).stderr
    assert "No such option" in run("ls", "--jason", status=2).stderr
    assert json.loads(run("show", cache.url, "--json").stdout)["rows"] == 100


def test_a_pipe_that_is_closed_is_no_error(cache: DatasetConverter, strange: Path) -> None:
    for arguments in (f"ls {cache.url.rpartition('/converter-v1')[0]}", f"head {strange}", f"show {strange} --json"):
        script = f"{sys.executable} -m converter {arguments} | head -c 1"
        done = subprocess.run(["bash", "-c", script], env=environment(), capture_output=True, check=True)
        assert done.stderr == b""


def test_a_terminal_shows_names_of_entries_and_a_pipe_their_urls(cache: DatasetConverter) -> None:
    root, _, name = cache.url.rpartition("/")
    folder = root.removesuffix("/converter-v1")
    shown = on_terminal(160, "ls", folder, NO_COLOR="1")
    assert f"entries of {root}" in shown
    assert re.search(rf"│ {name} +│ +100 │", shown)
    assert run("ls", folder).stdout.startswith(f"{cache.url}\t100\t")


@pytest.mark.parametrize("columns", [40, 200])
def test_tables_fit_the_terminal_and_keep_strange_names_harmless(strange: Path, columns: int) -> None:
    shown = on_terminal(columns, "show", strange, NO_COLOR="1")
    table = re.sub(r"\x1b\[[0-9;]*m", "", shown.partition("encodings")[2]).splitlines()[1:]
    assert max(map(cell_len, table)) <= columns
    # Where a table has no room, each value has a line.
    assert ("name: column 54" in table) == (columns == 40)
    assert "\x1b]0;" not in shown
    assert "\x07" not in shown
    whole = run("show", strange).stdout
    assert "[bold]markup[/bold]\t" in whole
    assert "\\x1b]0;title\\x07\t" in whole
    assert "עברית \\u202e🎈\t" in whole
    assert "\x1b" not in run("head", strange).stdout


@pytest.mark.parametrize("columns", [40, 2000])
def test_names_of_columns_are_harmless_headings(strange: Path, columns: int) -> None:
    shown = on_terminal(columns, "head", strange, NO_COLOR="1")
    table = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    for name in ("[bold]markup[/bold]", "[/]", "<script>", r"\x1b]0;title\x07", r"עברית \u202e🎈"):
        assert name in table
    assert ("[bold]markup[/bold]: [red]x" in table) == (columns == 40)
    assert "\x1b" not in table
    assert "\x07" not in table
    assert "\u202e" not in table


def test_a_terminal_without_utf_8_gets_what_it_can_show(strange: Path) -> None:
    done = run("show", strange, PYTHONIOENCODING="ascii", LC_ALL="C")
    assert "\\u05e2\\u05d1" in done.stdout
    assert "column 54" in on_terminal(80, "show", strange, PYTHONIOENCODING="ascii", LC_ALL="C")


def test_without_its_packages_the_command_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('gone', name='typer')")
    done = run("ls", status=1, PYTHONPATH=os.pathsep.join([str(tmp_path), str(REPOSITORY)]))
    assert done.stderr == (
        "converter: typer is not installed, which the command needs: pip install 'spark-tensor-converter[cli]'\n"
    )


def test_doctor_lets_executors_write(tmp_path: Path) -> None:
    found = {one["what"]: one for one in json.loads(run("doctor", tmp_path, "--spark", "--json").stdout)}
    assert found["executors"]["state"] == "good", found["executors"]
    assert "has written a row" in found["executors"]["told"]
    assert not list(tmp_path.rglob("*.parquet"))


def test_ctrl_c_ends_a_command_at_once(cache: DatasetConverter) -> None:
    """While it asks: nothing is deleted."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "converter", "delete", cache.url]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment(), stdin=terminal, stdout=terminal, stderr=terminal
    ) as process:
        os.close(terminal)
        shown = b""
        while b"[y/N]" not in shown:
            shown += os.read(controller, 1 << 16)
        # Python misses a signal that comes between the prompt and its wait for the answer.
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: process.poll() is not None, seconds=20)
    os.close(controller)
    assert process.returncode in (1, 130)
    assert json.loads(run("verify", cache.url, "--json").stdout)["damage"] == []


def test_secrets_of_the_environment_are_not_shown(tmp_path: Path) -> None:
    options = json.dumps({"connection_string": "AccountName=a;AccountKey=c2VjcmV0;BlobEndpoint=http://127.0.0.1:1/a"})
    commands = [("ls", "az://container/cache"), ("show", "az://container/rows")]
    with ThreadPoolExecutor() as both:
        # Each tries for 20 s to reach the store.
        for done in both.map(
            lambda arguments: run(
                *arguments, status=1, CONVERTER_STORAGE_OPTIONS=options, CONVERTER_CACHE_DIR=str(tmp_path)
            ),
            commands,
        ):
            assert "c2VjcmV0" not in done.stdout + done.stderr
