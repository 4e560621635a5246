"""Modules in the working directory with names of Relight's imports are not executed by processes that Relight starts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relight.comm.children import child_command, child_environment, enter_script, safe_spawn, script_directory
from relight.drain.process import Drainer
from relight.drill import warden
from relight.engines import Engine, backends
from relight.prove import drive
from relight.serve import tasks_work
from relight.supervise import spare

NAMES = (
    "torch",
    "json",
    "relight",
    "msgspec",
    "multiprocessing",
    "typing",
    "runpy",
    "click",
    "socket",
    "numpy",
    "random",
    "uuid",
)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a working directory full of modules that leave a mark when they are executed. Return the file of marks."""
    directory, marks = tmp_path / "trap", tmp_path / "marks"
    directory.mkdir()
    for name in NAMES:
        package = directory / name
        package.mkdir()
        (package / "__init__.py").write_text(
            f"open({str(marks)!r}, 'a').write(__name__ + '\\n')\nraise SystemExit(86)\n"
        )
    monkeypatch.chdir(directory)
    return marks


def test_the_trap_works(trap: Path) -> None:
    """``python -m`` executes modules in the working directory."""
    assert subprocess.run([sys.executable, "-m", "json"], check=False).returncode == 86 and trap.exists()


def _starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str] | None, Any]]:
    """Record the command, environment and directory of each process that is started, and start none."""
    starts: list[tuple[list[str], dict[str, str] | None, Any]] = []

    def start(
        command: list[str], *_: object, env: dict[str, str] | None = None, cwd: Any = None, **more: object
    ) -> Any:
        starts.append((command, env, cwd))
        raise BlockingIOError("recorded")

    monkeypatch.setattr(subprocess, "Popen", start)
    return starts


def _each_start(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[tuple[list[str], dict[str, str] | None, Any]]:
    """Have each part of Relight that starts a process start one."""
    from relight.agent import launch

    commands = _starts(monkeypatch)
    task: Any = SimpleNamespace(add_line=print, ending=threading.Event(), lines=[])
    guard: Any = None
    drainer = Drainer.__new__(Drainer)
    drainer._changed, drainer._stopped = threading.Condition(), False
    drainer._url, drainer._run, drainer._nice, drainer._guard = "file:///nothing", "run", 0, guard
    drainer._ranks = lambda: ()
    options: Any = SimpleNamespace(lossy=(), script=str(folder / "train.py"), args=(), timeout_s=10)
    starts: list[Any] = [
        lambda: tasks_work.drill(task, "file:///nothing/run"),
        lambda: warden.Warden(),
        lambda: launch._start("relight-none", 0, 1.0, str(folder)),
        lambda: drainer._run_once(),
        lambda: spare.Spares(1, spare.USUAL).fill(),
        lambda: drive._start(options, folder, "straight", record_from=0, stop_after=1, kill=False, run="run"),
    ]
    for start in starts:
        with pytest.raises(BlockingIOError), contextlib.ExitStack() as sockets:
            if "Spares" in start.__code__.co_names:
                pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                monkeypatch.setattr(socket, "socketpair", lambda *_, pair=pair: pair)
                sockets.enter_context(pair[0])
            start()
    monkeypatch.undo()
    assert len(commands) == len(starts)
    return commands


def test_no_process_that_relight_starts_imports_from_the_working_directory(
    trap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agent, drain, warden, spare, the dashboard's drill and a proof's recorder: with each one's own interpreter, environment and directory."""
    (tmp_path / "output").mkdir()
    # "" is the working directory
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.chdir(trap.parent / "trap")
    starts = _each_start(monkeypatch, tmp_path / "output")
    monkeypatch.chdir(trap.parent / "trap")
    for command, environment, directory in starts:
        position = next(index for index, word in enumerate(command) if word.startswith("relight"))
        probe = [*command[:position], "relight.comm.node"]  # imports most of the names, and ends
        done = subprocess.run(probe, env=environment, cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and not trap.exists(), (command, done.stderr)


def test_the_child_is_this_relight_and_leaves_the_path_alone(trap: Path) -> None:
    """The package is loaded from its own place even where another one of its name comes first on the path."""
    environment = child_environment(PYTHONPATH=str(trap.parent / "trap"))
    done = subprocess.run(
        child_command("relight.version"),
        env={**environment, "PYTHONPATH": ""},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not trap.exists(), done.stderr


def test_processes_that_multiprocessing_spawns_are_kept_off_it_too(trap: Path) -> None:
    """``python -c`` would import from the working directory. The variable that prevents this is restored afterwards."""
    before = os.environ.get("PYTHONSAFEPATH")
    with safe_spawn():
        child = multiprocessing.get_context("spawn").Process(target=print)
        child.start()
    child.join()
    assert child.exitcode == 0 and not trap.exists() and os.environ.get("PYTHONSAFEPATH") == before


def test_a_migration_is_not_made_by_modules_of_the_working_directory(
    trap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is set in all of a migration's submits, because its processes are spawned."""
    seen: list[str | None] = []

    class ThreadPool(ProcessPoolExecutor):
        def submit(self, *args: Any, **more: Any) -> Any:
            seen.append(os.environ.get("PYTHONSAFEPATH"))
            raise KeyboardInterrupt

    monkeypatch.setattr(backends, "ProcessPoolExecutor", ThreadPool)
    with pytest.raises(KeyboardInterrupt), Engine("processes", 1) as engine:
        list(engine.run(repr, [object()]))
    assert seen == ["1"]


def test_a_users_script_keeps_pythons_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own directory comes first, links followed, or the working directory for ``-m``. If the user disabled
    it, nothing is added."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "train.py")
    monkeypatch.chdir(tmp_path)
    assert script_directory("link.py", as_module=False) == str(tmp_path / "real")
    assert script_directory("pkg.train", as_module=True) == str(tmp_path)
    monkeypatch.setattr(sys, "path", ["/usr/lib"])
    enter_script("relight.drill.job", as_module=True)
    assert sys.path == ["/usr/lib"]
    enter_script("pkg.train", as_module=True)
    assert sys.path == [str(tmp_path), "/usr/lib"]
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert script_directory("link.py", as_module=False) == ""


def test_python_m_relight_drops_the_working_directory(trap: Path) -> None:
    """Later imports, such as torch or a client of an object store, are not searched for there."""
    (trap.parent / "trap" / "relight" / "__init__.py").unlink()
    (trap.parent / "trap" / "relight").rmdir()
    for name in ("typing", "runpy", "json", "msgspec", "click", "socket", "multiprocessing", "random", "uuid"):
        (trap.parent / "trap" / name / "__init__.py").unlink()  # before Relight's first line runs, Python's rule holds
        (trap.parent / "trap" / name).rmdir()
    done = subprocess.run([sys.executable, "-m", "relight", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not trap.exists(), done.stderr


@pytest.mark.parametrize("name", ["RELIGHT_EVENTS", "RELIGHT_CACHE", "RELIGHT_SETTINGS"])
def test_relative_paths_in_settings_mean_the_same_for_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The agent runs in another directory. A relative path in its environment would be below the root of the file system."""
    monkeypatch.chdir(tmp_path)
    assert child_environment({name: "here"})[name] == str(tmp_path / "here")
    for value in ("0", "~/there", "/absolute", ""):
        assert child_environment({name: value})[name] == value
