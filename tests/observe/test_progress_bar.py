"""The progress bar of commands and library calls: where it is drawn, how often, and that nothing of it is left."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

import relight
from relight.importers.detect import detect
from relight.importers.import_checkpoint import import_checkpoint
from relight.observe import emit, progress_bar
from relight.observe.progress_bar import progress_bar as bar
from relight.store import open_bytes

MIB = 1 << 20


class Terminal(io.StringIO):
    """Standard error as a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal of 80 columns. Bars appear after 20 ms."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress_bar, "DELAY_S", 0.02)
    return Terminal()


def work(stderr: io.StringIO | None, parts: int = 10, part_s: float = 0.01, **options: bool) -> None:
    """Report ``parts`` MiB, one each ``part_s`` seconds."""
    with redirect_stderr(stderr), bar("restoring step 7", parts * MIB, **options) as meter:
        for _ in range(parts):
            time.sleep(part_s)
            meter(MIB)


def screen(written: str, columns: int = 80) -> list[str]:
    """Return the lines that a terminal shows after this output: a carriage return moves to the line's first column."""
    lines = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", written).split("\n"):
        cells = [" "] * columns
        column = 0
        for char in line:
            column = 0 if char == "\r" else column
            if char != "\r":
                assert column < columns, f"the line is longer than {columns} columns: {line!r}"
                cells[column], column = char, column + 1
        lines.append("".join(cells).rstrip())
    return lines


def test_a_bar_on_a_terminal_names_the_work_and_leaves_nothing(terminal: Terminal) -> None:
    """It has label, bytes, rate and time, fits the width, and is removed at the end."""
    work(terminal)
    drawn = terminal.getvalue()
    last = drawn.split("\r")[-3]
    assert "restoring step 7" in last and "MB" in last
    assert screen(drawn) == [""]


def test_short_work_draws_nothing(terminal: Terminal) -> None:
    """Work that ends before the delay shows no bar."""
    work(terminal, 1, 0.0)
    assert terminal.getvalue() == ""
    assert progress_bar.__dict__["REDRAW_S"] == 0.1


def test_it_is_redrawn_at_most_ten_times_a_second(terminal: Terminal) -> None:
    """A thousand reports in half a second draw a few lines, from whichever thread they come."""
    with redirect_stderr(terminal), bar("reading", 10_000) as meter:
        threads = [
            threading.Thread(target=lambda: [meter(1) or time.sleep(0.002) for _ in range(200)]) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert 2 <= terminal.getvalue().count("reading") <= 12


@pytest.mark.parametrize("case", ["no terminal", "switched off", "rank 1", "not leading", "nothing to do", "no stderr"])
def test_where_no_bar_is_drawn(case: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs, other ranks and RELIGHT_PROGRESS=0 get no bar, and the work continues."""
    if case == "switched off":
        monkeypatch.setenv("RELIGHT_PROGRESS", "0")
    elif case == "rank 1":
        monkeypatch.setenv("RANK", "1")
    stderr = {"no terminal": io.StringIO(), "no stderr": None}.get(case, terminal)
    work(stderr, 0 if case == "nothing to do" else 8, leads=case != "not leading")
    assert stderr is None or stderr.getvalue() == ""


def test_it_can_be_switched_on_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """RELIGHT_PROGRESS=1 draws at once, also into a file; an invalid value counts as none."""
    for value, is_drawn in (("1", True), ("true", True), ("perhaps", False)):
        monkeypatch.setenv("RELIGHT_PROGRESS", value)
        work(log := io.StringIO(), 2, 0.0)
        assert ("restoring step 7" in log.getvalue()) == is_drawn and "\x1b" not in log.getvalue()


def test_an_inner_bar_is_not_drawn(terminal: Terminal) -> None:
    """There is one line: the work within another bar's work shows none, and the outer bar continues."""
    with redirect_stderr(terminal), bar("outer", 10 * MIB) as meter:
        work(terminal)
        time.sleep(0.03)
        meter(MIB)
    assert "outer" in terminal.getvalue() and "restoring" not in terminal.getvalue()
    work(terminal)
    assert "restoring" in terminal.getvalue()


def test_lines_of_events_do_not_end_up_in_the_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event's line begins at the first column, and the bar is drawn again below it."""
    monkeypatch.setattr("relight.observe.console.applies", lambda logger: True)
    with redirect_stderr(terminal), bar("restoring step 7", 10 * MIB) as meter:
        for turn in range(6):
            time.sleep(0.05)
            meter(MIB)
            if turn == 3:
                emit("restore.skipped", "checkpoint abc is skipped: damage", id="abc", kind="corrupt")
    lines = screen(terminal.getvalue(), 200)
    assert lines == ["relight: checkpoint abc is skipped: damage", ""]


@pytest.mark.parametrize("columns", [10, 24, 40, 300])
def test_it_fits_every_width(columns: int, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow terminal cuts the line; a wide one is not filled."""
    monkeypatch.setenv("COLUMNS", str(columns))
    work(terminal)
    assert screen(terminal.getvalue(), max(columns, progress_bar.WIDTH_MIN)) == [""]
    assert len(screen(terminal.getvalue().split("\r")[-3], 300)[0]) <= progress_bar.WIDTH_MAX


def test_an_interrupt_removes_the_bar(terminal: Terminal) -> None:
    """KeyboardInterrupt during the work leaves an empty line, and later work has a bar."""
    with pytest.raises(KeyboardInterrupt), redirect_stderr(terminal), bar("restoring", 10 * MIB) as meter:
        for _ in range(5):
            time.sleep(0.01)
            meter(MIB)
        raise KeyboardInterrupt
    assert screen(terminal.getvalue()) == [""] and progress_bar._shown == []


def test_a_forked_child_leaves_the_line_to_its_parent(terminal: Terminal) -> None:
    """A child that is forked while a bar is drawn writes nothing to it."""
    with redirect_stderr(terminal), bar("restoring", 10 * MIB) as meter:
        time.sleep(0.03)
        meter(MIB)
        if (child := os.fork()) == 0:
            before = len(terminal.getvalue())
            progress_bar.hide_bar()
            os._exit(len(terminal.getvalue()) != before or len(progress_bar._shown))
        assert os.waitpid(child, 0)[1] == 0


def _state() -> dict[str, torch.Tensor]:
    return {"weights": torch.arange(3 * MIB, dtype=torch.uint8)}


def _checkpointer(path: Path, **options: object) -> relight.Checkpointer:
    return relight.Checkpointer(path, state=_state(), save=None, signals=False, **options)  # type: ignore[arg-type]


def _restore(path: Path) -> None:
    with _checkpointer(path) as ckpt:
        assert ckpt.restore() == 6


def _save(path: Path, background: bool) -> None:
    with _checkpointer(path, background=background) as ckpt:
        ckpt.restore()
        ckpt.save(6)


def _verify(path: Path) -> None:
    assert not any(findings for _, findings in relight.open(path).verify())


CALLS: dict[str, tuple[Callable[[Path], object], str]] = {
    "restore": (_restore, "restoring step 5"),
    "save in this process": (lambda path: _save(path, False), "saving step 6"),
    "relight.save": (lambda path: relight.save(path, {"state": _state()}, step=7), "saving step 7"),
    "relight.load": (relight.load, "loading step 5"),
    "verify": (_verify, "verifying step 5"),
}


@pytest.mark.parametrize("call", CALLS)
def test_library_calls_show_their_bytes(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reports its bytes until all of them are done."""
    relight.save(tmp_path / "run", {"weights": _state()["weights"]}, step=5)
    act, label = CALLS[call]
    monkeypatch.setenv("RELIGHT_PROGRESS", "1")
    monkeypatch.setattr(progress_bar, "REDRAW_S", 0.0)
    with redirect_stderr(io.StringIO()) as log:
        act(tmp_path / "run")
    drawn = [line for line in log.getvalue().split("\r") if label in line]
    assert drawn and re.search(r"3\.[12]/3\.[12] MB", drawn[-1]), drawn[-1:]


def test_an_import_reports_what_it_writes(tmp_path: Path) -> None:
    """The bytes of an import add up to its tensors': the bar of ``relight import`` moves."""
    torch.save({"weights": torch.ones(40 * MIB // 4)}, tmp_path / "weights.pt")
    counts: list[int] = []
    import_checkpoint(
        detect(str(tmp_path / "weights.pt")), open_bytes(tmp_path / "runs"), "imported", step=1, progress=counts.append
    )
    assert 40 * MIB <= sum(counts) <= 41 * MIB and len(counts) > 1


def test_a_background_save_that_is_waited_for_shows_its_progress(tmp_path: Path) -> None:
    """``Save.wait()`` draws the share that the agent has written, and removes the line."""
    script = f"""
import sys, torch, relight
from relight.checkpointer import save_handle
save_handle.POLL_S = 0.01
with relight.Checkpointer({str(tmp_path / "run")!r}, state={{"w": torch.ones(16 << 20)}}, save=None,
                          limits=relight.Limits(bytes_per_second=20e6)) as ckpt:
    ckpt.restore()
    ckpt.save(0, block=False).wait(60)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "RELIGHT_BACKGROUND": "1", "RELIGHT_PROGRESS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    drawn = [
        line for line in done.stderr.splitlines() if "saving step 0" in line
    ]  # the pipe's reader ends lines at \\r
    shares = [float(match[1]) for line in drawn if (match := re.search(r"([\d.]+)/67.1 MB", line))]
    assert len(shares) > 2 and shares == sorted(shares) and shares[-1] > shares[0], done.stderr
