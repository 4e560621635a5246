"""The default lines on stderr: which, when, and that they break nothing."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scripts import run_ranks

from relight.observe import console, emit, events

LOGGER = logging.getLogger("relight")


@pytest.fixture(autouse=True)
def _no_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the root logger, which has pytest's handlers, as in a script that configures no logging."""
    monkeypatch.setattr(LOGGER, "parent", logging.RootLogger(logging.WARNING))
    monkeypatch.setattr(console, "_postponed_s", -1e9)
    monkeypatch.setattr(console, "_postponed", 0)
    monkeypatch.setattr(console, "_in_command", False)
    monkeypatch.setattr(events, "_modest", False)
    monkeypatch.delenv("RELIGHT_LOG", raising=False)
    console._starts.clear()
    _unconfigured()
    yield
    _unconfigured()


def _unconfigured() -> None:
    """Remove what an earlier test of this process may have left."""
    LOGGER.handlers[:] = []
    LOGGER.propagate = True
    LOGGER.disabled = False
    LOGGER.setLevel(logging.NOTSET)
    LOGGER.filters.clear()


def lines_shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines on stderr. Standard output must be empty."""
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def some_events() -> None:
    """Emit three events: one shown by default, one not, and a warning of several lines."""
    emit("restore.fresh", "run 'demo' starts from scratch", run="demo", store="runs")
    emit("prune.done", "one checkpoint was deleted", retired=["a"])
    emit("save.failed", "the save at step 3 failed: no room\n  → make room\n  training continues", step=3, kind="store")


SHOWN = [
    "relight: run 'demo' starts from scratch",
    "relight: the save at step 3 failed: no room → make room training continues",
]


def test_the_few_lines_are_shown_without_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """Without logging configured, the default lines and warnings are on stderr, one line each, with one prefix."""
    some_events()
    assert lines_shown(capsys) == SHOWN


@pytest.mark.parametrize(
    ("value", "lines"),
    [("quiet", 0), ("warnings", 1), ("default", 2), ("info", 3), ("debug", 3), ("QUIET ", 0), ("nonsense", 2)],
)
def test_the_variable_chooses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str, lines: int
) -> None:
    """``RELIGHT_LOG`` chooses how much is shown; an unknown value counts as the default."""
    monkeypatch.setenv("RELIGHT_LOG", value)
    some_events()
    assert len(lines_shown(capsys)) == lines


def test_the_root_s_handler_gets_all_and_stderr_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """With a handler on the root, each event is logged once, without a prefix of Relight's."""
    root = LOGGER.parent
    assert root is not None
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    LOGGER.manager._clear_cache()  # type: ignore[attr-defined] # which levels are on is remembered
    some_events()
    LOGGER.manager._clear_cache()  # type: ignore[attr-defined]
    lines = lines_shown(capsys)
    assert lines[0] == "INFO:relight:run 'demo' starts from scratch"
    assert sum("starts from scratch" in line for line in lines) == 1
    assert not any("relight: " in line for line in lines)


def test_the_logger_s_own_handler_replaces_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A handler of the logger ``relight``, also one that does nothing, ends the default lines."""
    LOGGER.addHandler(logging.NullHandler())
    some_events()
    assert lines_shown(capsys) == []


def test_a_level_of_the_logger_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``setLevel`` on the logger decides what is shown, and beats the variable."""
    monkeypatch.setenv("RELIGHT_LOG", "debug")
    LOGGER.setLevel(logging.ERROR)
    some_events()
    assert lines_shown(capsys) == []
    LOGGER.setLevel(logging.INFO)
    some_events()
    assert len(lines_shown(capsys)) == 3


@pytest.mark.parametrize("off", ["propagate", "disabled", "disable", "filter", "last resort"])
def test_what_switches_the_logger_off_switches_the_lines_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    """Each of logging's own switches counts."""
    if off == "propagate":
        LOGGER.propagate = False
    elif off == "disabled":
        monkeypatch.setattr(LOGGER, "disabled", True)
    elif off == "disable":
        monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    elif off == "filter":
        LOGGER.addFilter(lambda record: False)
    else:
        monkeypatch.setattr(logging, "lastResort", None)
    some_events()
    assert lines_shown(capsys) == []


class Broken:
    """A stream with a closed other end."""

    def write(self, text: str) -> int:
        """Fail as a closed pipe does."""
        raise BrokenPipeError

    def flush(self) -> None:
        """Fail as a closed file does."""
        raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("stream", [None, Broken()])
def test_a_broken_stderr_hurts_nothing(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    """A closed or missing stderr costs the line, not the training."""
    monkeypatch.setattr(sys, "stderr", stream)
    some_events()


def test_the_first_save_of_each_start_is_shown_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    """The first durable save after a start has a line with its step and place; later ones have none."""
    for _ in range(2):
        emit("attempt.started", "attempt 1", run="demo", store="/data/runs", epoch=1)
        for step in (2, 5):
            emit("save.durable", "saved", step=step, id="x", reason="asked", bytes=18_200, seconds=0.05, blocked_s=0.0)
    assert lines_shown(capsys) == ["relight: first save: step 2 in /data/runs/demo (18.2 kB, 50 ms)"] * 2


def test_the_place_is_left_out_where_it_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    """With two runs in one process the line has no place, because it would be a guess."""
    emit("attempt.started", "attempt 1", run="a", store="/data/runs", epoch=1)
    emit("attempt.started", "attempt 1", run="b", store="/data/runs", epoch=1)
    emit("save.durable", "saved", step=2, id="x", reason="asked", bytes=18_200, seconds=0.05, blocked_s=0.0)
    assert lines_shown(capsys) == ["relight: first save: step 2 (18.2 kB, 50 ms)"]


def test_postponed_saves_have_a_line_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many postponed saves make one line a minute, which counts the others."""
    for step in range(9):
        emit("save.coalesced", f"step {step}: save postponed", step=step)
    assert lines_shown(capsys) == ["relight: step 0: save postponed"]
    monkeypatch.setattr(console, "_postponed_s", -1e9)
    emit("save.coalesced", "step 9: save postponed", step=9)
    assert lines_shown(capsys) == ["relight: step 9: save postponed (9 postponed since the last such line)"]


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """A stored name cannot move the cursor or begin a line."""
    emit("restore.fresh", "run '\x1b[31mred\r' starts", run="x", store="runs")
    assert lines_shown(capsys) == ["relight: run '\\x1b[31mred ' starts"]


def test_commands_show_warnings_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """In a command only warnings add lines to its own output."""
    console.be_command()
    some_events()
    assert lines_shown(capsys) == SHOWN[1:]


def test_a_restore_states_what_it_took_and_what_it_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of a resume names run, step, store and the damaged checkpoint that was skipped."""
    import torch

    from relight import Checkpointer, every

    monkeypatch.setenv("RELIGHT_BACKGROUND", "0")
    model = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path / "demo", model=model, save=every(steps=1), signals=False) as ckpt:
        for step in range(ckpt.restore(), 3):
            with torch.no_grad():
                model.weight += 1
            ckpt.step(step)
    first = lines_shown(capsys)
    assert first[0] == f"relight: run 'demo' starts from scratch: it has no checkpoint yet (store {tmp_path})"
    assert first[1].startswith(f"relight: first save: step 0 in {tmp_path}/demo (")
    assert len(first) == 2
    [pack] = tmp_path.glob("demo/0000000002-*/pack-*")
    pack.write_bytes(pack.read_bytes()[:-1] + b"\x7f")
    with Checkpointer(tmp_path / "demo", model=model, signals=False) as ckpt:
        assert ckpt.restore() == 2
    lines = [line for line in lines_shown(capsys) if line.startswith("relight: resumed")]
    assert len(lines) == 1
    assert lines[0].startswith(f"relight: resumed run 'demo' from step 1 (store {tmp_path}, ")
    assert lines[0].endswith("; continuing with step 2; skipped step 2: damaged")


TRAINING = """
import sys
import torch
import relight

torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
for _ in range(2):
    with relight.Checkpointer(sys.argv[1], model=model, save=relight.every(steps=2), background=False) as ckpt:
        for step in range(ckpt.restore(), 4):
            ckpt.step(step)
torch.distributed.destroy_process_group()
"""


def test_one_rank_of_a_job_writes_the_lines(tmp_path: Path) -> None:
    """Rank 0 reports the fresh start, the first save and the resumed run; rank 1 writes no line below warnings."""
    ranks = run_ranks(TRAINING, 2, str(tmp_path / "runs" / "demo"), RELIGHT_LOG="default")
    assert [rank.returncode for rank in ranks] == [0, 0], ranks[0].stderr + ranks[1].stderr
    first, second = ([line for line in rank.stderr.splitlines() if "relight: " in line] for rank in ranks)
    for text in ("starts from scratch", "first save: step", "resumed"):
        assert sum(text in line for line in first) == 1, first
        assert not any(text in line for line in second), second
