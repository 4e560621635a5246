"""Every symptom of docs/troubleshooting.md: the code produces its message, and doctor maps it to that section."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import at_hand
import pytest
import torch
from tests.store.proxy import proxied
from tests.store.servers import Server
from torch import nn
from torch.utils.data import DataLoader

import relight
from relight import errors
from relight.capture.restore_check import Restorable
from relight.catalog.tiers import Further, read_further
from relight.checkpointer.stale_model_check import StaleModelCheck
from relight.cli.doctor import _explain
from relight.comm.base import RankTimeout, late
from relight.commit import Attempt
from relight.commit.attempt import take_over
from relight.commit.multi_rank import OthersFailed
from relight.doctor import explain
from relight.doctor.complaints import PROGRAM_MESSAGES, PROGRAMS, SEEN, USER_DESCRIPTIONS
from relight.doctor.explain import LINES_MAX, SYMPTOMS, read_log
from relight.doctor.judge import all_checks
from relight.errors import ConfigError, CorruptCheckpoint, LeaseHeld, RelightError, SaveFailed
from relight.log import History, Log, fold
from relight.observe import subscribe
from relight.ranks.postponed import postpone
from relight.ranks.replicas import ReplicaDifference
from relight.ranks.several import SeveralRanks
from relight.restore.elastic_state import remap_rank_state
from relight.restore.result import Resumed, report_restored
from relight.save_reason import SaveReason
from relight.store import open_bytes
from relight.store.base import Uncertain
from relight.store.retry import decode_with_reread
from relight.supervise.facts import KINDS

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = [heading.replace('"', "") for heading in re.findall(r"^## (.*)$", PAGE, re.MULTILINE)]
ROWS = re.findall(r"^\| `([a-z_]+)` \|", PAGE, re.MULTILINE)


@contextmanager
def logged_messages() -> Iterator[list[str]]:
    """Collect the messages of events as lines of a job's log."""
    lines: list[str] = []
    end = subscribe(lambda event: lines.append(f"WARNING relight: {event.fields['message']}"))
    try:
        yield lines
    finally:
        end()


def printed(error: BaseException) -> str:
    """Return the traceback that ends a process."""
    return "".join(traceback.format_exception(error))


def closed(tmp_path: Path) -> str:
    ckpt = relight.Checkpointer(tmp_path / "runs" / "demo", state={"x": 1})
    ckpt.close()
    with pytest.raises(ConfigError) as caught:
        ckpt.restore()
    return printed(caught.value)


def second_start(tmp_path: Path) -> str:
    script = "import sys, relight; c = relight.Checkpointer(sys.argv[1], state={'x': 1}); c.save(0); print('saved', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(tmp_path / "runs" / "demo")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"saved\n"
        with pytest.raises(LeaseHeld) as caught:
            relight.Checkpointer(tmp_path / "runs" / "demo", state={"x": 1}).restore()
        first.kill()
    return printed(caught.value)


def another_thread(tmp_path: Path) -> str:
    with logged_messages() as lines:
        thread = threading.Thread(target=relight.Checkpointer(tmp_path / "runs" / "demo", state={"x": 1}).restore)
        thread.start()
        thread.join()
    return "\n".join(lines)


def other_threads(tmp_path: Path) -> str:
    at_hand.fill(tmp_path / "runs")
    with logged_messages() as lines:
        report_restored(
            Resumed(checkpoint=_newest(tmp_path / "runs"), environment={"threads": 8}), 300, {"threads": 2}, part=False
        )
    return "\n".join(lines)


def _newest(path: Path) -> Any:
    return fold(Log(open_bytes(path), "demo").read()).live[-1]


def not_the_trained_model(tmp_path: Path) -> str:
    model = nn.Linear(2, 2)
    stale = StaleModelCheck({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    with logged_messages() as lines:
        for step in (9, 19):
            stale.compare(SimpleNamespace(step=step, id="a"), 9 if step > 9 else None, b"same", 16)  # type: ignore[arg-type]
    return "\n".join(lines)


def lost_ranks(tmp_path: Path) -> str:
    ranks = SeveralRanks.__new__(SeveralRanks)
    ranks._lost = True
    ranks._per_rank = ()
    with pytest.raises(RankTimeout) as caught:
        ranks.capture({}, Restorable(), micro_step=None, recall=None)
    return printed(caught.value)


def odd_rank(tmp_path: Path) -> str:
    return f"WARNING relight: {ReplicaDifference('model/layer.weight', (3,), (0, 1, 2, 3))}: the checkpoint is suspect"


def other_ranks(tmp_path: Path) -> str:
    loader = DataLoader(list(range(8)), batch_size=2)  # type: ignore[arg-type]
    remapped = remap_rank_state({"loader": {}}, {"loader": loader}, rank=0, world=2, saved=4, key="k", own=[{}] * 4)
    at_hand.fill(tmp_path / "runs")
    with logged_messages() as lines:
        report_restored(Resumed(checkpoint=_newest(tmp_path / "runs"), notes=remapped.notes), 300, {}, part=False)
    return "\n".join(lines)


def damaged_pack(tmp_path: Path) -> str:
    at_hand.fill(tmp_path / "runs")
    (pack,) = at_hand.directory(tmp_path / "runs", 3).glob("pack-*")
    at_hand.flip(pack)
    with logged_messages() as lines:
        relight.load(str(tmp_path / "runs" / "demo"))
    return "\n".join(lines)


def damaged_record(tmp_path: Path) -> str:
    at_hand.fill(tmp_path / "runs")
    at_hand.flip(sorted((tmp_path / "runs" / "demo" / "log").iterdir())[2], 40)
    return at_hand.in_child("ls", tmp_path / "runs" / "demo").err


def nothing_that_counts(folder: Path) -> str:
    """All records of a run's log are damaged."""
    relight.Checkpointer(folder / "run", model=torch.nn.Linear(2, 2)).save(0)
    for path in (folder / "run" / "log").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptCheckpoint) as error:
        relight.Checkpointer(folder / "run", model=torch.nn.Linear(2, 2)).restore()
    with pytest.raises(CorruptCheckpoint) as same:
        relight.load(folder / "run")
    assert printed(same.value).split("\n")[0] == printed(error.value).split("\n")[0]
    return printed(error.value)


def unrestored(folder: Path) -> str:
    """A second script saves into the run without restoring."""
    relight.Checkpointer(folder / "run", model=torch.nn.Linear(2, 2)).save(0)
    with pytest.raises(ConfigError) as error:
        relight.Checkpointer(folder / "run", model=torch.nn.Linear(2, 2)).save(1)
    return printed(error.value)


def lost_log(folder: Path) -> str:
    """The run's log directory was deleted."""
    relight.Checkpointer(folder / "run", model=torch.nn.Linear(2, 2)).save(0)
    for path in (folder / "run" / "log").iterdir():
        path.unlink()
    with pytest.raises(CorruptCheckpoint) as error:
        relight.Checkpointer(folder / "run", model=torch.nn.Linear(2, 2)).restore()
    return printed(error.value)


def silent_tier(tmp_path: Path) -> str:
    (tmp_path / "far" / "demo").mkdir(parents=True)
    (tmp_path / "far" / "demo" / "log").write_text("no directory")
    further: list[Further] = [("cold", open_bytes(tmp_path / "far"), "demo")]
    with pytest.raises(RelightError) as caught:
        read_further(further, History())
    return printed(caught.value)


def other_job(tmp_path: Path) -> str:
    log = Log(open_bytes(tmp_path / "far"), "demo")
    take_over(log, "first")
    take_over(log, "second")
    with pytest.raises(RelightError) as caught:
        take_over(log, "first", earlier=[])
    return printed(caught.value)


def flipped_on_the_way(tmp_path: Path) -> str:
    came = iter([b"x", b"whole"])

    def decode(data: bytes) -> bytes:
        if data != b"whole":
            raise errors.CorruptCheckpoint("is not what was committed")
        return data

    with logged_messages() as lines:
        decode_with_reread(lambda: next(came), decode, "demo/log/00000003.json")
    return "\n".join(lines)


def another_optimizer(tmp_path: Path) -> str:
    model = nn.Linear(2, 2)
    with relight.Checkpointer(
        tmp_path / "run", background=False, model=model, optimizer=torch.optim.AdamW(model.parameters())
    ) as ckpt:
        ckpt.save(0)
    with pytest.raises(RelightError) as caught:
        relight.Checkpointer(
            tmp_path / "run", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
        ).restore()
    return printed(caught.value)


def ungiven_optimizer(tmp_path: Path) -> str:
    model = nn.Linear(2, 2)
    with logged_messages() as lines, relight.Checkpointer(tmp_path / "run", background=False, model=model):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return "\n".join(lines)


def no_free_slot(tmp_path: Path) -> str:
    with logged_messages() as lines:
        postpone(SaveReason("every", "every 400 steps"), 399, "no snapshot slot is free")
    return "\n".join(lines)


MADE: dict[str, Callable[[Path], str]] = {
    "This resume may not be bit-exact": other_threads,
    "stored by AdamW, the live optimizer is SGD": another_optimizer,
    "optimizer … steps … parameters of …, and no checkpoint has its state": ungiven_optimizer,
    "step …: save postponed": no_free_slot,
    "Every trainable tensor equals the one saved before": not_the_trained_model,
    "No more saves are made, the ranks have lost their connection": lost_ranks,
    "… is not what it is on …, a suspect checkpoint": odd_rank,
    "… ranks saved it, and … continue": other_ranks,
    "A checkpoint is skipped": damaged_pack,
    "A log record is ignored": damaged_record,
    "This run has no valid checkpoint: … records of its log are damaged, or signed by a key that is not trusted": nothing_that_counts,
    "This run has checkpoints, … and this process restored none": unrestored,
    "This run's log is missing, and … checkpoint directories are there": lost_log,
    "The nearest tier has no checkpoint, and … may have some, but does not answer": silent_tier,
    "Attempt … was superseded by attempt … there": other_job,
    "This Checkpointer was closed before this call": closed,
    "Process … still trains this run": second_start,
    "SIGTERM: another handler was installed after Relight's, this is not the main thread": another_thread,
    "… was damaged on the first read, and intact on the second": flipped_on_the_way,
}
"""For each heading, a function that produces its message. The missing one needs a server, and has its own test."""
SERVER = "This server ignores 'create if absent'"


@pytest.mark.parametrize("heading", MADE)
def test_a_symptom_is_made_and_known_again(heading: str, tmp_path: Path) -> None:
    """The message leads to its section."""
    text = MADE[heading](tmp_path)
    assert text
    explained = explain(f"step 17 loss 2.31\n{text}\nstep 18 loss 2.30\n")
    assert explained.section == heading
    assert explained.line and explained.means and explained.do


def test_a_server_without_conditions_is_known_again(
    s3_server: Server, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a save to such a server leads to its section."""
    with proxied(s3_server.address, lambda request: "unconditional" if request.conditional else "") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        with pytest.raises(ConfigError) as caught:
            Attempt.begin(open_bytes(f"{s3}/runs"), "demo")
    assert explain(printed(caught.value)).section == SERVER


def test_no_heading_is_without_its_symptom() -> None:
    """Each section has a test here, and the sections of symptoms and checks exist."""
    assert {*MADE, SERVER, PROGRAMS, SEEN} == set(HEADINGS)
    assert {complaint.section for complaint in (*PROGRAM_MESSAGES, *USER_DESCRIPTIONS)} == {PROGRAMS, SEEN}
    assert {symptom.section for symptom in SYMPTOMS} == {*HEADINGS, *ROWS} - {PROGRAMS, SEEN}
    assert {check.section for check in all_checks().values()} - {""} <= {*HEADINGS, *ROWS}


KINDS_OF_ERRORS: dict[str, Exception] = {
    **{
        error.kind: error("something")
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, RelightError)
    },
    "uncertain": Uncertain("something"),
    "late_ranks": RankTimeout("something"),
    "others_failed": OthersFailed("something"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_an_error_is_known_by_its_name(kind: str) -> None:
    """A traceback that ends in one of Relight's errors leads to its row, whatever the message."""
    assert explain(printed(KINDS_OF_ERRORS[kind])).section == kind


@pytest.mark.parametrize(
    ("text", "kind", "section"),
    [
        ("OSError: [Errno 28] No space left on device", "storage", "no_space"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "device memory", ""),
        ("RuntimeError: DataLoader worker (pid(s) 41, 42) exited unexpectedly", "data", ""),
        ("NCCL error: unhandled system error, ncclSystemError", "network", ""),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "hardware", ""),
        ("OSError: [Errno 116] Stale file handle: '/data/runs'", "storage", "store"),
        ("ModuleNotFoundError: No module named 'transformerz'", "user", ""),
        ("relight.errors.Fenced: attempt 1 of this run was superseded by attempt 2", "fenced", "fenced"),
        ("relight: this store is encrypted [/data/runs]", "unknown", "wrong_key"),
        ("ValueError: loss is nan at step 9", "numerical", "diverged"),
    ],
)
def test_others_errors_are_of_the_supervisors_kinds(text: str, kind: str, section: str) -> None:
    """The kind is the one that ``relight run`` assigns."""
    explained = explain(text)
    assert (explained.kind, explained.section, explained.known) == (kind, section, True)
    assert explained.kind_means == KINDS[kind]


@pytest.mark.parametrize(
    ("text", "kind", "section"),
    [
        ("OSError: [Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar: '/d'", "storage", "no_space"),
        ("OSError: [Errno 122] Quota excedida", "storage", "no_space"),
        ("write failed, errno=28", "storage", "no_space"),
        ("Error: io error (os error 28)", "storage", "no_space"),
        ("OSError: [Errno 5] Eingabe-/Ausgabefehler", "storage", "store"),
        ("OSError: [Errno 116] Veralteter Dateizugriff", "storage", "store"),
        ("OSError: [Errno 12] Kein Speicher", "memory", PROGRAMS),
        ("OSError: [Errno 24] Zu viele offene Dateien", "user", PROGRAMS),
        ("ConnectionResetError: [Errno 104] Verbindung zurückgesetzt", "network", PROGRAMS),
        (
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            "storage",
            PROGRAMS,
        ),
        ("Killed", "killed", PROGRAMS),
        ("run.sh: line 3: 4711 Killed                  python train.py", "killed", PROGRAMS),
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed.",
            "memory",
            PROGRAMS,
        ),
        ("[node] NCCL WARN NET/IB: ibv_poll_cq() failed with error", "network", PROGRAMS),
        ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "memory", PROGRAMS),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***", "preemption", PROGRAMS),
        ("RuntimeError: can't start new thread", "user", PROGRAMS),
        ("saving takes too long", "unknown", SEEN),
        ("Checkpoints take 30 minutes and block training", "unknown", SEEN),
        ("parameters are inconsistent across ranks", "unknown", SEEN),
        ("storage costs too much", "unknown", SEEN),
        ("out of memory on load", "unknown", SEEN),
        ("CUDA out of memory when loading the checkpoint", "device memory", SEEN),
        ("restoring is very slow", "unknown", SEEN),
        ("we lost 6 hours of training", "unknown", SEEN),
        ("the loss jumps after resuming", "unknown", SEEN),
        ("training hangs", "unknown", SEEN),
    ],
)
def test_numbers_programs_and_people_are_understood(text: str, kind: str, section: str) -> None:
    """Error numbers in any language, messages of other programs, and users' descriptions are recognised, with a remedy."""
    explained = explain(text)
    assert (explained.kind, explained.section, explained.known) == (kind, section, True)
    assert explained.means and explained.do


def test_peoples_words_explain_no_log() -> None:
    """Lines of a log about slow saves are not treated as a user's description."""
    assert explain("\n".join(f"step {n}: saving takes too long" for n in range(50))).section == ""


def test_the_cause_counts_not_its_consequence() -> None:
    """If a full disk failed a save, and another rank then timed out, the cause is the full disk."""
    try:
        try:
            raise errors.NoSpace("making a file failed: ENOSPC")
        except errors.NoSpace as error:
            raise SaveFailed("the save at step 9 failed") from error
    except SaveFailed as error:
        text = printed(error)
    assert explain(f"{text}\n{late([1, 2], 'saving', 3.0)}").section == "no_space"


@pytest.mark.parametrize(
    "cause", ["EROFS, Read-only file system", "EACCES, Permission denied", "EIO, Input/output error"]
)
def test_the_cause_in_the_line_of_a_failed_save_counts(cause: str) -> None:
    """A failed save was explained as "read its cause in the lines that follow", although its own line has the cause."""
    symptom = explain(
        f"relight: the save at step 124 failed: making a directory failed: {cause} [/data/runs/demo]; training continues"
    )
    assert symptom.section == "store"
    assert explain("relight: the save at step 124 failed: something").section == "save_failed"


def test_unknown_words_have_no_explanation() -> None:
    """Unknown text has no explanation."""
    assert not explain("step 17 loss 2.31").known
    assert not explain("").known


def test_a_log_of_any_size_is_read_at_its_end(tmp_path: Path) -> None:
    """Reading is bounded for logs of gigabytes, of one line, and of invalid text."""
    path = tmp_path / "train.log"
    with path.open("wb") as file:
        file.truncate(3 << 30)
        file.seek(0, 2)
        file.write(b"\n\xff\xfe OSError: [Errno 28] No space left on device\n")
    assert explain(read_log(str(path))).section == "no_space"
    assert explain("No space left on device\n" * (3 * LINES_MAX)).section == "no_space"
    for wrong in (tmp_path, tmp_path / "none.log"):
        with pytest.raises(ConfigError):
            read_log(str(wrong))


def test_the_command_explains(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``--error``, ``--log``, an unknown text, and both options at once."""
    answer = at_hand.in_process(monkeypatch, capfd, ["doctor", "--error", "No space left on device"])
    assert answer.code == 0 and "storage" in answer.out and "troubleshooting.md: no_space" in answer.out
    (tmp_path / "train.log").write_text("\n".join(["step 1", "torch.OutOfMemoryError: CUDA out of memory", "bye"]))
    answer = at_hand.in_process(monkeypatch, capfd, ["doctor", "--log", str(tmp_path / "train.log"), "--json"])
    assert answer.code == 0 and answer.json["kind"] == "device memory" and "CUDA out of memory" in answer.json["line"]
    assert at_hand.in_process(monkeypatch, capfd, ["doctor", "--error", "hello"]).code == 1
    assert at_hand.in_process(monkeypatch, capfd, ["doctor", "--error", "x", "--log", "y"]).code == 2


def test_a_symptom_is_not_called_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """An explained description is not labelled as unknown."""
    assert _explain(explain("saving takes too long"), as_json=False) == 0
    shown = capsys.readouterr().out
    assert "unknown" not in shown and "waits for a save" in shown
    assert _explain(explain("[Errno 28] No space left on device"), as_json=False) == 0
    assert capsys.readouterr().out.startswith("storage: ")
