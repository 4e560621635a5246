"""``relight follow``: a command for each new checkpoint, and its results as metrics."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from at_hand import environment, ids, request

from relight.catalog import open_run
from relight.cli.followed import _Over
from relight.commit import Attempt
from relight.monitoring.overview import RunSeen
from relight.run_records.results import EvaluationResult, results_of
from relight.save_reason import END
from relight.store import open_bytes


def script(text: str) -> str:
    """Write a program, and return the beginning of its command."""
    Path("eval.py").write_text(f"import json, os, sys, time\n{text}\n")
    return f"{sys.executable} -S -E eval.py"


def results(name: str | None = None) -> list[EvaluationResult]:
    """Return the results that the log of ``runs/demo`` has."""
    return results_of(open_run(open_bytes("runs"), "demo").history(), name)


def test_results_become_metrics(runs: Path, relight) -> None:
    """The last printed JSON object counts: in ``ls``, in ``best:``, and once."""
    command = script(
        "print('loading'); print(json.dumps({'loss': 1})); print(json.dumps({'accuracy': int(sys.argv[2]) / 1000, 'of': 'x'}))\nprint('done')"
    )
    answer = relight("follow", "runs/demo", "--run", f"{command} {{checkpoint}} {{step}}", "--once", "--all")
    assert answer.code == 0, answer.err
    assert "loading" in answer.out and f"step 99 ({ids(runs)[0]}): accuracy=0.099" in answer.out
    assert [row["metrics"]["accuracy"] for row in relight("ls", "runs/demo", "--json").json] == [
        0.099,
        0.199,
        0.249,
        0.299,
    ]
    assert relight("show", "runs/demo", "best:accuracy", "--json").json["step"] == 299
    assert "accuracy=0.299" in relight("show", "runs/demo").out and "accuracy" in relight("ls", "runs/demo").out
    again = relight("follow", "runs/demo", "--run", f"{command} {{checkpoint}} {{step}}", "--once", "--all")
    assert (again.code, again.out) == (0, "") and len(results()) == 4


def test_the_address_is_what_every_command_takes(runs: Path, relight) -> None:
    """``{checkpoint}`` names one checkpoint, ``{id}``, ``{step}`` and ``{run}`` its parts; other braces stay, and no shell reads them."""
    command = script("open('seen', 'w').write(json.dumps(sys.argv[1:]))")
    words = "{checkpoint} {id} {step} {run} '{\"a\": {step}}' '$HOME; {other}'"
    assert relight("follow", "runs/demo", "--run", f"{command} {words}", "--once").code == 0
    address, *rest = json.loads(Path("seen").read_text())
    newest = ids(runs)[-1]
    assert rest == [newest, "299", "demo", '{"a": 299}', "$HOME; {other}"] and address == f"{runs}/demo@{newest}"
    assert relight("show", address, "--json").json["id"] == newest


def test_a_result_may_be_written_to_a_file(runs: Path, relight) -> None:
    """It counts instead of what is printed. NaN and infinities are numbers, too."""
    command = script(
        "print('{\"loss\": 3}'); open(os.environ['RELIGHT_RESULT'], 'w').write('{\"loss\": NaN, \"f1\": 0.5, \"n\": 7}')"
    )
    answer = relight("follow", "runs/demo", "--run", command, "--once", "--json", "--name", "file")
    (fact,) = map(json.loads, answer.out.splitlines())
    assert fact["metrics"] == {"loss": "nan", "f1": 0.5, "n": 7} and fact["recorded"] and fact["step"] == 299
    assert '{"loss": 3}' in answer.err, "what the command prints is not on stdout"
    assert [(result.by, result.id) for result in results()] == [("file", ids(runs)[-1])]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        (
            "open(os.environ['RELIGHT_RESULT'], 'w').write('accuracy')",
            "its result in RELIGHT_RESULT is not a JSON object",
        ),
        ("os.mkdir(os.environ['RELIGHT_RESULT'])", "its result in RELIGHT_RESULT cannot be read: it is not a regular"),
        ("os.mkfifo(os.environ['RELIGHT_RESULT'])", "its result in RELIGHT_RESULT cannot be read: it is not a regular"),
        (
            "os.symlink('tries', os.environ['RELIGHT_RESULT'])",
            "its result in RELIGHT_RESULT cannot be read: it is a symbolic link",
        ),
        (
            "open(os.environ['RELIGHT_RESULT'], 'w').truncate(1 << 40)",
            "its result in RELIGHT_RESULT is not a JSON object",
        ),
        (
            "open(os.environ['RELIGHT_RESULT'], 'w').write('[' * 100_000)",
            "its result in RELIGHT_RESULT is not a JSON object",
        ),
        (
            "print('{\"a\": 1}'); print(json.dumps({'a': 'x' * (1 << 20)}))",
            "its last printed JSON object is longer than 1048576 bytes",
        ),
        (
            "print(json.dumps({str(n): n for n in range(2000)}))",
            "metrics must be a dict of at most 1000 numbers by name",
        ),
    ],
    ids=["exit code", "signal", "no object", "directory", "fifo", "link", "huge", "nested", "long", "too many"],
)
def test_a_failure_is_recorded_after_the_last_try(text: str, why: str, runs: Path, relight) -> None:
    """It is not tried for ever: a restarted follower does not try it again."""
    command = script(f"open('tries', 'a').write('x')\n{text}")
    answer = relight("follow", "runs/demo", "--run", command, "--once", "--retries", "2")
    assert answer.code == 1 and why in answer.out and len(Path("tries").read_text()) == 3
    (result,) = results()
    assert result.failed.startswith(why) and not result.metrics
    assert relight("follow", "runs/demo", "--run", command, "--once").code == 0


def test_a_later_try_may_succeed(runs: Path, relight) -> None:
    """One result is recorded, that of the try that succeeded."""
    command = script(
        "open('tries', 'a').write('x')\nif len(open('tries').read()) < 2: sys.exit(1)\nprint('{\"a\": 1}')"
    )
    assert relight("follow", "runs/demo", "--run", command, "--once").code == 0
    assert [(result.failed, dict(result.metrics)) for result in results()] == [("", {"a": 1})]


def test_a_command_that_takes_too_long_is_ended(runs: Path, relight) -> None:
    """With what it has started: SIGINT to its group."""
    command = script(
        "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nopen('child', 'w').write(str(child.pid))\nchild.wait()"
    )
    began = time.monotonic()
    answer = relight("follow", "runs/demo", "--run", command, "--once", "--retries", "0", "--timeout", "1s")
    assert answer.code == 1 and "no end within 1 s" in answer.out and time.monotonic() - began < 20
    assert gone(int(Path("child").read_text()))


def gone(pid: int) -> bool:
    """Wait until a process has ended."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_checkpoint_that_is_removed_meanwhile_is_skipped(runs: Path, relight) -> None:
    """The evaluation does not count as failed, and is not tried again."""
    command = script(
        f"import subprocess\nsubprocess.run([{sys.executable!r}, '-m', 'relight', 'prune', 'runs/demo', '--keep-last', '1', '--yes'])\nsys.exit(1)"
    )
    Attempt.begin(open_bytes(runs), "demo", reason="restart")
    answer = relight("follow", "runs/demo", "--run", command, "--once", "--which", "99", "--retries", "5")
    assert answer.code == 0 and "skipped: the checkpoint was removed meanwhile (exit code 1)" in answer.out
    (result,) = results()
    assert result.skipped and not result.failed


def test_a_run_that_is_removed_during_an_evaluation_is_skipped(runs: Path, relight) -> None:
    """Nothing is recorded. The follower continues with the run that has the name now."""
    text = f"import shutil\nif {ids(runs)[-1]!r} == sys.argv[1]: shutil.rmtree({str(runs / 'demo')!r})\nprint('{{\"a\": 1}}')"
    command = script(text)
    timer = threading.Timer(3.0, lambda: Attempt.begin(open_bytes(runs), "demo").save(request(7, reason=END)))
    timer.start()
    answer = relight("follow", "runs/demo", "--run", f"{command} {{id}}", "--every", "0.1", "--json")
    timer.join()
    facts = [json.loads(line) for line in answer.out.splitlines()]
    assert answer.code == 0, answer.err
    assert [(fact["step"], fact["skipped"], fact["recorded"]) for fact in facts] == [
        (299, "the run was removed meanwhile", False),
        (7, "", True),
    ]
    assert [result.metrics for result in results()] == [{"a": 1}]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--run", ""], "--run"),
        (["--run", "'x"], "--run"),
        (["--run", "no-such-program-here {checkpoint}"], "no shell"),
        (["--run", "true", "--all", "--queue", "2"], "leave one"),
        (["--run", "true", "--which", "best", "--every-nth", "2"], "leave one"),
        (["--run", "true", "--name", ""], "--name"),
        (["--run", "true", "--name", "x" * 201], "--name"),
        (["--run", "true", "--timeout", "soon"], "--timeout"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_refused_before_anything_runs(arguments: list[str], hint: str, runs: Path, relight) -> None:
    """With exit code 2, and what to do."""
    answer = relight("follow", "runs/demo", *arguments, "--once")
    assert answer.code == 2 and hint in answer.err and results() == []


def test_a_process_that_does_not_trust_its_own_records_evaluates_nothing(
    runs: Path, relight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results would have no effect: each checkpoint was evaluated again and again, with a record each time."""
    pytest.importorskip("cryptography")
    keys = [relight("keys", "new", "--signing", f"{name}.key").out for name in ("own", "other")]
    own, other = (re.findall(r"RELIGHT_(?:SIGN|TRUST)=(\S+)", text) for text in keys)
    monkeypatch.setenv("RELIGHT_SIGN", own[0])
    Attempt.begin(open_bytes("signed"), "demo").save(request(1, reason=END))
    monkeypatch.setenv("RELIGHT_TRUST", own[1])
    command = script("open('ran', 'a').write('x'); print('{\"a\": 1}')")
    for sign in ("", other[0]):
        monkeypatch.setenv("RELIGHT_SIGN", sign)
        answer = relight("follow", "signed/demo", "--run", command)
        assert answer.code == 2 and "RELIGHT_SIGN" in answer.err and not Path("ran").exists()
    monkeypatch.setenv("RELIGHT_SIGN", own[0])
    assert relight("follow", "signed/demo", "--run", command).code == 0 and Path("ran").read_text() == "x"


def test_a_command_that_cannot_be_started_is_shown_without_secrets(runs: Path, relight) -> None:
    """Its error goes to the terminal, to logs and to the audit log."""
    Path("broken").write_text("no program")
    Path("broken").chmod(0o755)
    answer = relight("follow", "runs/demo", "--run", "./broken --api-key sk-123 --data x", "--once")
    assert answer.code == 2 and "--data x" in answer.err and "sk-123" not in answer.err


def test_a_run_that_pauses_is_waited_for_as_long_as_idle_states(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events of this machine that are older than a day do not end it earlier. The normal end does, at any age."""
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path / "events"))
    day, now = 86400.0, time.time()
    seen = RunSeen(
        "s", "demo", began_at=now - 3 * day, committed_at=now - 2 * day, last_event_at=now - 2 * day, active=False
    )
    for idle_s, row, is_over in [
        (7 * day, seen, False),
        (1.5 * day, seen, True),
        (7 * day, seen._replace(has_ended=True), True),
        (7 * day, seen._replace(has_ended=True, began_at=now - day), False),  # another machine has it now
    ]:
        over = _Over(str(runs / "demo"), idle_s)
        monkeypatch.setattr(over._watcher, "poll", lambda now, row=row: [row])
        assert over() is is_over, (idle_s, row)


def test_a_checkpoint_is_no_run(runs: Path, relight) -> None:
    """A path with a checkpoint is refused. A store with one run names that run."""
    assert relight("follow", "runs/demo@good", "--run", "true", "--once").code == 2
    assert relight("follow", "runs", "--run", "true", "--once").code == 2
    assert relight("follow", "runs/none", "--run", "true", "--once").code == 1


def test_it_ends_with_the_run(runs: Path, relight) -> None:
    """After the last checkpoint of an attempt that ended normally."""
    attempt = Attempt.begin(open_bytes(runs), "demo", reason="restart")
    attempt.save(request(400, reason=END))
    answer = relight("follow", "runs/demo", "--run", f"{script('')} {{step}}", "--every", "0.1")
    assert answer.code == 0 and "step 400" in answer.out and "no numbers" in answer.out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_follower_ends_its_command(number: int, code: int, runs: Path) -> None:
    """No result is recorded: the next follower evaluates the checkpoint."""
    command = script("open('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)")
    follower = subprocess.Popen(
        [sys.executable, "-m", "relight", "follow", "runs/demo", "--run", command],
        env=environment(),
        stderr=subprocess.PIPE,
    )
    try:
        while not (Path("pid").exists() and Path("pid").read_text()):
            assert follower.poll() is None
            time.sleep(0.05)
        pid = int(Path("pid").read_text())
        follower.send_signal(number)
        assert follower.wait(30) == code
        assert gone(pid) and results() == []
    finally:
        follower.kill()
        follower.communicate()
