"""Signals to a whole process group: data loader workers, other children, and what torch raises about dead workers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.scripts import run_script

import relight
from proofs import endings
from proofs.warm import Warm

HEAD = """
import multiprocessing, os, signal, subprocess, sys, time, torch, relight
from torch.utils.data import DataLoader
torch.set_num_threads(1)
run = sys.argv[1]

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((4,), index / 100_000)

def group(number):
    os.killpg(0, number)

def train(ckpt, batches, at, way):
    step = ckpt.restore()
    for batch in batches:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
        ckpt.step(step)
        os.write(1, f"step {step}\\n".encode())
        if step == at:
            way()
        step += 1

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
"""


def script(
    tmp_path: Path, text: str, timeout: float = 90
) -> tuple[subprocess.CompletedProcess[str], list[tuple[int, str]], int]:
    """Run a script in its own process group. Return its exit, the saved steps with their reasons, and the last finished
    step."""
    path, run = tmp_path / "script.py", tmp_path / "store" / "run"
    path.write_text(HEAD + textwrap.dedent(text))
    done = run_script(path, str(run), timeout_s=timeout, cwd=tmp_path, leads=True)
    saved = (
        [(checkpoint.step, checkpoint.body.reason) for checkpoint in relight.open(str(run)).checkpoints()]
        if (run / "log").exists()
        else []
    )
    steps = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    return done, saved, max(steps, default=-1)


@pytest.mark.parametrize(
    "cell",
    [
        endings.Cell("group", 2, False, False), endings.Cell("SIGHUP", 2, True, False), endings.Cell("timeout", 2, False, False),
        endings.Cell("group", 2, True, True),
    ],
    ids=str,
)  # fmt: skip
def test_a_signal_to_the_group_saves_the_last_finished_step(cell: endings.Cell, tmp_path: Path) -> None:
    """A job with workers that is ended in any usual way saves its last finished step, exits truthfully, and leaves no process."""
    assert endings.trial(cell, tmp_path, random.Random(1)) == ""


def test_trials_in_the_background_of_a_shell_react_to_signals() -> None:
    """``nohup make endings &`` ignores SIGINT and SIGHUP, and its trials inherited that: all with these signals failed."""
    former = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        endings.main(["--only", "no cell has this name"])
        assert not any(signal.getsignal(number) is signal.SIG_IGN for number in former)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_spawned_workers_survive_the_signal(tmp_path: Path, number: str) -> None:
    """Workers that are spawned ignore the signal of their group as forked ones do."""
    done, saved, last = script(
        tmp_path,
        f"""
        if __name__ == "__main__":
            loader = DataLoader(Samples(), batch_size=8, num_workers=1, multiprocessing_context="spawn")
            with relight.Checkpointer(run, model=model, optimizer=optimizer, save=None) as ckpt:
                train(ckpt, loader, 3, lambda: group(signal.{number}))
        """,
    )
    assert done.returncode == -signal.Signals[number], done.stderr
    assert [(last + 1, number)] == saved, done.stderr


@pytest.mark.parametrize("scope", ["with ckpt: ", ""], ids=["with", "bare"])
@pytest.mark.parametrize("number", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_dead_worker_is_part_of_the_ending(tmp_path: Path, scope: str, number: str) -> None:
    """If the job's signal ends a worker, torch's error about it saves the last finished step and ends as the signal
    requires."""
    done, saved, last = script(
        tmp_path,
        f"""
        class Dies:  # what torch does when it waits for data of a dead worker
            def __iter__(self):
                for batch in range(100):
                    if batch == 5:
                        time.sleep(0.3)
                        os.kill(os.getpid(), signal.{number})
                        raise RuntimeError("DataLoader worker (pid 123) is killed by signal: Terminated. ")
                    time.sleep(0.1)
                    yield torch.ones(1, 4)

        ckpt = relight.Checkpointer(run, model=model, optimizer=optimizer, save=None)
        {scope}train(ckpt, Dies(), -1, None)
        """,
    )
    assert done.returncode == -signal.Signals[number], done.stderr
    assert saved == [(last, number)] == [(4, number)], done.stderr
    assert "has ended a data loader worker" in done.stderr


def test_a_dead_worker_without_an_ending_is_a_failure(tmp_path: Path) -> None:
    """A worker that dies while nothing asks the job to end raises torch's own error."""
    done, saved, last = script(
        tmp_path,
        """
        def kill_worker():
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

        with relight.Checkpointer(run, model=model, optimizer=optimizer, save=None) as ckpt:
            train(ckpt, DataLoader(Samples(), batch_size=8, num_workers=1), 3, kill_worker)
        """,
    )
    assert done.returncode == 1 and "DataLoader worker" in done.stderr
    assert [reason for _, reason in saved] in ([], ["exception: RuntimeError"])


def test_a_program_that_a_worker_starts_can_be_terminated(tmp_path: Path) -> None:
    """A program that a worker starts inherits neither ignored nor blocked signals."""
    done, _, _ = script(
        tmp_path,
        """
        class Runs(Samples):
            def __getitem__(self, index):
                program = subprocess.Popen(["sleep", "60"])
                program.terminate()
                return torch.tensor(float(program.wait(20)))

        ckpt = relight.Checkpointer(run, model=model, optimizer=optimizer, save=None)
        ckpt.restore()
        print(set(next(iter(DataLoader(Runs(), batch_size=2, num_workers=1))).tolist()))
        """,
    )
    assert done.stdout == "{-15.0}\n", done.stderr


def test_the_trainer_can_terminate_its_own_children(tmp_path: Path) -> None:
    """A pool, a process and a stuck worker that the trainer itself terminates end at once, and the exit does not wait for them."""
    began = time.monotonic()
    done, _, _ = script(
        tmp_path,
        """
        class Stuck(Samples):
            def __getitem__(self, index):
                time.sleep(600)

        ckpt = relight.Checkpointer(run, model=model, optimizer=optimizer, save=None)
        ckpt.restore()
        began = time.monotonic()
        with multiprocessing.Pool(2) as pool:
            pool.map(abs, range(4))
        one = multiprocessing.Process(target=time.sleep, args=(600,))
        one.start()
        time.sleep(0.5)
        one.terminate()
        one.join()
        iterator = iter(DataLoader(Stuck(), num_workers=1))
        print(one.exitcode, time.monotonic() - began < 20)
        """,
    )
    assert done.stdout == "-15 True\n", done.stderr
    assert time.monotonic() - began < 60


def test_a_child_terminated_in_its_first_moments_ends(tmp_path: Path) -> None:
    """Python forgets a signal that arrives while the child's interpreter is set up after a fork. On one processor that is nearly each one."""
    done, _, _ = script(
        tmp_path,
        """
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        ckpt = relight.Checkpointer(run, model=model, optimizer=optimizer, save=None)
        ckpt.restore()
        codes = []
        for _ in range(20):
            one = multiprocessing.Process(target=time.sleep, args=(600,))
            one.start()
            one.terminate()
            one.join(40)
            codes.append(one.exitcode)
            if one.exitcode is None:
                one.kill()
                break
        print(set(codes))
        """,
    )
    assert done.stdout == "{-15}\n", done.stderr


def test_other_children_end_after_the_trainer(tmp_path: Path) -> None:
    """A forked child that feeds the trainer outlives the signal of the group until the step is saved, and then ends."""
    done, saved, last = script(
        tmp_path,
        """
        def feed(requests, values):
            while True:
                requests.recv()
                time.sleep(0.2)
                values.send(1.0)

        def batches():
            while True:
                to_child.send(None)
                yield torch.full((1, 4), from_child.recv())

        (requests, to_child), (from_child, values) = multiprocessing.Pipe(False), multiprocessing.Pipe(False)
        with relight.Checkpointer(run, model=model, optimizer=optimizer, save=None) as ckpt:
            ckpt.restore()
            process = multiprocessing.Process(target=feed, args=(requests, values), daemon=True)
            process.start()
            values.close()
            print(process.pid, flush=True)
            train(ckpt, batches(), 5, lambda: group(signal.SIGTERM))
        """,
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert saved == [(last + 1, "SIGTERM")], done.stderr
    assert _gone(int(done.stdout.split()[0]))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_with_a_killed_trainer(tmp_path: Path, persistent: bool) -> None:
    """Workers of a trainer that is killed end by themselves."""
    done, _, _ = script(
        tmp_path,
        f"""
        def die():
            print(*(one.pid for one in multiprocessing.active_children()), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        with relight.Checkpointer(run, model=model, optimizer=optimizer, save=None) as ckpt:
            train(ckpt, DataLoader(Samples(), batch_size=8, num_workers=2, persistent_workers={persistent}), 2, die)
        """,
    )
    assert done.returncode == -signal.SIGKILL
    assert all(_gone(int(pid)) for pid in done.stdout.split("\n")[-2].split())


def test_a_signal_during_step_is_saved_at_the_next_step(tmp_path: Path) -> None:
    """Do not end the process without a save by a signal that arrives after step() checked for signals."""
    done, saved, last = script(
        tmp_path,
        """
        from relight.checkpointer.signals import SignalHandlers
        saved = SignalHandlers.saved
        def late(self):
            if ckpt._progress.step == 2:
                signal.raise_signal(signal.SIGTERM)
            saved(self)
        SignalHandlers.saved = late
        with relight.Checkpointer(run, model=model, optimizer=optimizer, save=None) as ckpt:
            train(ckpt, [torch.ones(1, 4)] * 10, -1, None)
        """,
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert saved == [(3, "SIGTERM")] and last == 2, done.stderr


def test_relight_run_keeps_a_hangup_ignored(tmp_path: Path) -> None:
    """Under nohup, ``relight run`` and its ranks survive the end of the terminal."""
    path, run = tmp_path / "script.py", tmp_path / "store" / "run"
    text = """
    with relight.Checkpointer(run, model=model, optimizer=optimizer, save=None) as ckpt:
        train(ckpt, [torch.ones(1, 4)] * 6, 3, lambda: os.kill(os.getppid(), signal.SIGHUP) or time.sleep(1))
    """
    path.write_text(HEAD + textwrap.dedent(text))
    command = ["nohup", sys.executable, "-m", "relight", "run", str(path), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [checkpoint.step for checkpoint in relight.open(str(run)).checkpoints()] == [5]


def _gone(pid: int) -> bool:
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_a_forked_script_is_a_process_of_its_own(tmp_path: Path) -> None:
    """A script that is forked from a warm process has its own session, arguments and output, and its exit code is reported."""
    (tmp_path / "one.py").write_text(
        "import os, sys, torch\nprint(os.getsid(0) == os.getpid(), sys.argv[1:], __name__)\nsys.exit(int(sys.argv[1]))\n"
    )
    (tmp_path / "two.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with (tmp_path / "out").open("w+b") as out, Warm() as warm:
        first = warm.start([str(tmp_path / "one.py"), "3"], out.fileno(), out.fileno(), leads=True)
        second = warm.start([str(tmp_path / "two.py")], out.fileno(), out.fileno())
        assert (second.wait(60), first.wait(60)) == (-9, 3)
        out.seek(0)
        assert out.read() == b"True ['3'] __main__\n"
