"""The demo as a whole."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relight.demo import DemoOptions, drive, run
from relight.errors import ConfigError


def test_brings_no_torch() -> None:
    """The room that starts and kills the training never imports torch, nor matplotlib before it draws."""
    heavy = ("torch", "numpy", "matplotlib")
    script = f"import sys, relight.demo, relight.demo.view; sys.exit(any(name in sys.modules for name in {heavy}))"
    path = str(Path(drive.__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": path}, check=False).returncode == 0


def test_a_missing_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch the demo names the package to install, before it starts any process."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="relight\\[demo\\]"):
        run(DemoOptions(quick=True))


def test_keeps_nothing_over_what_is_there(tmp_path: Path) -> None:
    """A directory that has something in it is not written to."""
    (tmp_path / "mine").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        run(DemoOptions(quick=True, keep=tmp_path, progress=False))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_removes_all_files_and_processes(tmp_path: Path, number: signal.Signals) -> None:
    """An interrupted demo ends its training processes and removes its temporary directory."""
    pytest.importorskip("torch")
    script = "from relight.demo import DemoOptions, run; run(DemoOptions(quick=True))"
    environment = {**os.environ, "PYTHONPATH": str(Path(drive.__file__).parents[2]), "TMPDIR": str(tmp_path)}
    demo = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list(tmp_path.glob("*/*.out"))) == 2)
    demo.send_signal(number)
    assert demo.wait(30) != 0
    assert list(tmp_path.iterdir()) == []
    assert not any(str(tmp_path).encode() in command for command in commands())


def wait_until(fact: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait, with a deadline."""
    end = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end
        time.sleep(0.05)


def commands() -> Iterator[bytes]:
    """The command lines of all processes, where the system lists them."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


@pytest.mark.slow
def test_quick(tmp_path: Path) -> None:
    """The quick demo is killed five times, twice inside a save, and its results are bit-identical. Its runs and reports
    are kept."""
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    report = run(DemoOptions(quick=True, seed=7, keep=tmp_path / "runs", out=tmp_path / "demo.png", progress=False))
    assert report.ok, report
    assert len(report.kills) >= 5
    assert report.kills_inside_save >= 2
    assert all(kill.back_s is not None for kill in report.kills)
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    assert (tmp_path / "runs" / "report.json").exists()
    assert {path.name for path in (tmp_path / "runs" / "store").iterdir() if path.is_dir()} == {"straight", "killed"}
