"""Signals in scripts with their own handlers, under nohup and in notebooks, and what a closed Checkpointer reports."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.scripts import run_script

import relight
from relight.checkpointer.signals import SignalHandlers
from relight.errors import ConfigError
from relight.observe import subscribe

HEAD = """
import os, signal, sys, time, relight
run = sys.argv[1]
def kill(number): os.kill(os.getpid(), number)
"""


def script(run: str, text: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a script for the run. With ``options``, it has its own interpreter."""
    if not options:
        return run_script(HEAD + textwrap.dedent(text), run)
    command = [sys.executable, "-c", HEAD + textwrap.dedent(text), run]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


def steps(run: str) -> list[tuple[int, str]]:
    return [(checkpoint.step, checkpoint.body.reason) for checkpoint in relight.open(run).checkpoints()]


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "store" / "run")


@pytest.fixture
def events() -> Iterator[list[str]]:
    lines: list[str] = []
    undo = subscribe(lambda event: lines.append(f"{event.name}: {event.fields.get('message', '')}"))
    yield lines
    undo()


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_an_ignored_signal_stays_ignored(run: str, number: str) -> None:
    """A signal that nohup or a shell's & lets the process ignore does not end it. The whole loop is trained."""
    ignored = textwrap.dedent(
        f"""
        with relight.Checkpointer(run, state=dict(x=1), save=None) as ckpt:
            for step in range(ckpt.restore(), 4):
                if step == 1: kill(signal.{number})
                ckpt.step(step)
        assert signal.getsignal(signal.{number}) is signal.SIG_IGN
        print("trained")
        """
    )
    done = script(run, ignored, preexec_fn=lambda: signal.signal(getattr(signal, number), signal.SIG_IGN))
    assert done.stdout == "trained\n", done.stderr
    assert [step for step, _ in steps(run)] == [3]


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_handler_that_sets_a_flag_is_called_at_the_signal_and_decides(run: str, number: str) -> None:
    """The script sees its flag in the step of the signal, trains two more steps, and ends by itself. Each stage is
    saved."""
    done = script(
        run,
        f"""
        stop = []
        signal.signal(signal.{number}, lambda *got: stop.append(got))
        with relight.Checkpointer(run, state=dict(x=1), save=None) as ckpt:
            for step in range(ckpt.restore(), 100):
                if step == 2:
                    kill(signal.{number})
                    assert len(stop) == 1 and stop[0][1] is not None, stop
                ckpt.step(step)
                if stop and step == 4: break
        assert len(stop) == 1
        print("ended by itself")
        """,
    )
    assert done.stdout == "ended by itself\n" and done.returncode == 0, done.stderr
    assert "the script's own handler decides what follows" in done.stderr
    assert steps(run) == [(2, number), (4, "end")]


def test_a_handler_that_exits_does_so_after_the_save(run: str) -> None:
    """sys.exit() in the script's handler is carried out at the end of the step, when its state is saved."""
    done = script(
        run,
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        with relight.Checkpointer(run, state=dict(x=1), save=None) as ckpt:
            for step in range(ckpt.restore(), 100):
                if step == 2: kill(signal.SIGTERM)
                ckpt.step(step)
        """,
    )
    assert done.returncode == 7, done.stderr
    assert steps(run) == [(2, "SIGTERM")]


def test_a_handler_that_uses_the_checkpointer_does_not_enter_it_twice(run: str) -> None:
    """A signal during a save has the script's handler wait for the end of the step."""
    done = script(
        run,
        """
        seen = []
        def save(*_):
            seen.append(ckpt.save(ckpt_step, tag="on-signal").done)
        signal.signal(signal.SIGTERM, save)
        class Component:
            def state_dict(self):
                if ckpt_step == 1 and not seen and armed: armed.clear(); kill(signal.SIGTERM)
                return {"x": 1}
            def load_state_dict(self, state): pass
        armed, ckpt_step = [1], 0
        with relight.Checkpointer(run, c=Component(), save=relight.every(steps=1), background=False) as ckpt:
            for ckpt_step in range(4):
                ckpt.step(ckpt_step)
        print(seen)
        """,
    )
    assert done.stdout == "[True]\n", done.stderr


def test_a_later_handler_is_reported_once(run: str, events: list[str]) -> None:
    """A handler that takes the place of Relight's is left alone, and reported once."""
    former = signal.getsignal(signal.SIGTERM)
    try:
        with relight.Checkpointer(run, state={"x": 1}, save=None) as ckpt:
            ckpt.step(0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for step in range(1, 4):
                ckpt.step(step)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        warnings_ = [line for line in events if line.startswith("signal.unhandled")]
        assert len(warnings_) == 1 and "SIGTERM: another handler was installed after Relight's" in warnings_[0]
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_later_handler_that_calls_the_former_one_decides(run: str) -> None:
    """The script's own handler decides: the step is saved, and the process does not end."""
    done = script(
        run,
        """
        stop = []
        with relight.Checkpointer(run, state=dict(x=1), save=None) as ckpt:
            ckpt.restore()
            former = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *got: (stop.append(1), former(*got)))
            for step in range(100):
                if step == 2: kill(signal.SIGTERM)
                ckpt.step(step)
                if stop and step == 3: break
        print("ended by itself")
        """,
    )
    assert done.stdout == "ended by itself\n", done.stderr
    assert steps(run) == [(2, "SIGTERM"), (3, "end")]


def test_two_runs_in_one_script_with_its_own_handler(tmp_path: Path) -> None:
    """Two Checkpointers of different runs both save. The script's handler is called once."""
    done = script(
        str(tmp_path / "store"),
        """
        stop = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        with relight.Checkpointer(run + "/a", state=dict(x=1), save=None) as a, relight.Checkpointer(run + "/b", state={"x": 1}, save=None) as b:
            for step in range(100):
                if step == 2: kill(signal.SIGTERM)
                a.step(step), b.step(step)
                if stop and step == 3: break
        print(stop)
        """,
    )
    assert done.stdout == "[1]\n", done.stderr
    for name in "ab":
        assert steps(str(tmp_path / "store" / name)) == [(2, "SIGTERM"), (3, "end")]


def test_outside_the_main_thread_signals_are_reported_once(run: str, events: list[str]) -> None:
    """Install no handlers outside the main thread, because Python cannot. One line is logged, and training
    continues."""

    def train() -> None:
        with relight.Checkpointer(run, state={"x": 1}, save=None) as ckpt:
            for step in range(ckpt.restore(), 3):
                ckpt.step(step)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    warnings_ = [line for line in events if line.startswith("signal.unhandled")]
    assert len(warnings_) == 1 and "not the main thread" in warnings_[0] and "signals=False" in warnings_[0]
    assert [step for step, _ in steps(run)] == [2]


def test_a_signal_during_a_save_is_for_the_next_step() -> None:
    """Keep a signal that arrives after the loop checked for signals."""
    signals = SignalHandlers(lambda name: None)
    signals.adopt("SIGUSR1")
    assert signals.pending == "SIGUSR1"
    signals.saved()
    assert signals.pending is None
    signals.adopt("SIGUSR1")
    signals.saved()
    assert signals.pending == "SIGUSR1"


@pytest.mark.parametrize("how", ["close", "with", "error", "signal"])
def test_the_error_of_a_closed_checkpointer_states_why_it_is_closed(run: str, how: str) -> None:
    """Report what closed it, after which step, when, and what to do."""
    ckpt = relight.Checkpointer(run, state={"x": 1}, save=None, background=False)
    if how == "close":
        ckpt.step(3)
        ckpt.close()
    elif how == "with":
        with ckpt:
            ckpt.step(3)
    elif how == "error":
        with pytest.raises(ValueError), ckpt:  # noqa: PT011
            ckpt.step(3)
            raise ValueError
    else:
        ckpt.restore()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            ckpt.step(3)
    why = {
        "close": "close() was called",
        "with": "its with block ended",
        "error": "ValueError ended its with block",
        "signal": "SIGINT ended the run",
    }[how]
    for call in (lambda: ckpt.step(4), lambda: ckpt.save(4), ckpt.restore):
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.what == f"this Checkpointer was closed before this call: {why} after step 3, just now"
        assert "make a new Checkpointer" in caught.value.hint and "restore()" in caught.value.hint


NOTEBOOK = """
import code, os, signal, sys, threading, time, torch, relight
shell = code.InteractiveConsole({"run": sys.argv[1], "relight": relight, "torch": torch, "time": time})
def interrupt():
    while shell.locals["ticks"] < 5: time.sleep(0.01)
    signal.raise_signal(signal.SIGINT)
def cell(text, interrupted=False):
    # like ipykernel: Python's own handler during each cell, the former one between cells
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    shell.locals["ticks"] = 0
    if interrupted:
        threading.Thread(target=interrupt).start()
    try:
        exec(compile(text, "<cell>", "exec"), shell.locals)
        return None
    except KeyboardInterrupt:
        sys.last_traceback = sys.exc_info()[2]  # a shell keeps the traceback, and with it the cell's frames
        return "interrupted"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGINT, before)
CELL = '''
model = torch.nn.Linear(2, 2)
ckpt = relight.Checkpointer(run, model=model, save=relight.every(steps=1))
start = ckpt.restore()
for step in range(start, start + 500):
    time.sleep(0.02)
    ckpt.step(step)
    last = step
    ticks += 1
'''
"""


@pytest.mark.parametrize("background", ["0", "1"])
@pytest.mark.parametrize("how", ["handled", "outside"])
def test_a_notebook_cell_is_interrupted_and_run_again(run: str, how: str, background: str) -> None:
    """For three times, the interrupt ends the cell, the cell continues at the next step, and Ctrl-C works
    afterwards."""
    text = NOTEBOOK + textwrap.dedent(
        f"""
        text = CELL if {how!r} == "handled" else CELL.replace("save=", "signals=False, save=").replace("step(step)", "save(step, block=False)")
        starts = []
        for _ in range(3):
            assert cell(text, True) == "interrupted"
            starts.append((shell.locals["start"], shell.locals["last"]))
        for (_, last), (start, _) in zip(starts, starts[1:]):
            # with our handler the step of the interrupt is saved, else the last begun save
            assert start in ((last + 1, last + 2) if {how!r} == "handled" else (last - 1, last, last + 1, last + 2)), starts
        assert cell("while ticks < 500: time.sleep(0.01); ticks += 1", True) == "interrupted"
        found = cell("ckpt.step(last + 1)")
        assert ({how!r} != "handled" and found is None) or "SIGINT ended the run" in found, found
        assert cell("ckpt.close()") is None
        print("fine")
        """
    )
    done = run_script(text, run, timeout_s=120, RELIGHT_BACKGROUND=background)
    assert done.stdout == "fine\n", done.stderr
    assert "LeaseHeld" not in done.stderr


def test_an_open_checkpointer_of_an_earlier_cell_does_not_swallow_interrupts(run: str) -> None:
    """The first cell's Checkpointer was never closed: the second one takes over, and its interrupt ends the second cell."""
    text = NOTEBOOK + textwrap.dedent(
        """
        assert cell("first = relight.Checkpointer(run, state=dict(x=1), save=None); first.restore(); first.save(0)") is None
        assert cell('''
        second = relight.Checkpointer(run, state=dict(x=1), save=None)
        assert second.restore() == 1
        for step in range(1, 1000):
            time.sleep(0.01)
            second.step(step)
            ticks += 1
        ''', True) == "interrupted"
        assert "Fenced: this Checkpointer was closed before this call: another Checkpointer of this process took the run over" in cell("first.step(1)")
        assert cell("while ticks < 500: time.sleep(0.01); ticks += 1", True) == "interrupted"
        print("fine")
        """
    )
    done = run_script(text, run, timeout_s=120)
    assert done.stdout == "fine\n", done.stderr


def test_cells_of_ipykernel_keep_relights_handler(run: str) -> None:
    """ipykernel puts Python's own handler in place for each cell: Relight takes SIGINT back, so an interrupt saves the step first."""
    text = NOTEBOOK + textwrap.dedent(
        """
        sys.modules["ipykernel"] = sys
        assert cell("ckpt = relight.Checkpointer(run, state=dict(x=1), save=None); ckpt.restore(); ckpt.step(0)") is None
        assert cell('''
        for step in range(1, 1000):
            time.sleep(0.02)
            ckpt.step(step)
            ticks += 1
        ''', True) == "interrupted"
        print(relight.open(sys.argv[1]).checkpoints()[-1].body.reason)
        """
    )
    done = run_script(text, run)
    assert done.stdout == "SIGINT\n", done.stderr
