"""``relight.migrate``: each old checkpoint arrives once and in order, failures are reported, and a migration can be
rolled back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from kills import kill_often
from old_ones import check_arrived, make, state

import relight
from relight.catalog import Run
from relight.cli import cli
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit.chunk_index import IncrementalState
from relight.engines import IN_PROCESS
from relight.errors import CheckpointNotFound, ConfigError, LeaseHeld
from relight.format import encode_tree
from relight.format.records import RetireBody
from relight.keys import write_key_file
from relight.layout import Bytes, Item
from relight.log import Log, fold
from relight.migrate import MigrateReport, execute_migration, plan_migration, roll_back
from relight.migrate.execute import _run
from relight.migrate.journal import MigrationJournal, MigrationState
from relight.migrate.plan import place_of
from relight.migrate.work import MigrationTask, work
from relight.policy.compact import Compact, Experience
from relight.reader import verify_checkpoint
from relight.reclaim import recall
from relight.store import open_bytes
from relight.store.durable import TMP_PREFIX, temporary_of
from relight.transfer.repack import execute_repack, plan_repack
from relight.versions.branching import branch


def migrate(tmp_path: Path, *, check: float = 0.1, **more: Any) -> MigrateReport:
    """Migrate from ``old`` to ``new``."""
    return execute_migration(plan_migration(str(tmp_path / "old"), str(tmp_path / "new"), check=check, **more))


def live(tmp_path: Path, run: str) -> list[int]:
    """Return the steps of a run at the destination."""
    return [checkpoint.step for checkpoint in Run(open_bytes(tmp_path / "new"), run).history().live]


def test_all_arrive_once_in_order_and_a_second_time_nothing_is_done(tmp_path: Path) -> None:
    """Checkpoints in nested folders arrive and are compared with their sources.

    A repeated migration brings only new ones.
    """
    made = make(tmp_path / "old", 7)
    (tmp_path / "old" / "notes.txt").write_text("no checkpoint")
    plan = plan_migration(str(tmp_path / "old"), str(tmp_path / "new"))
    assert [(item.run, item.step) for item in plan.todo] == sorted((run, step) for run, step in made.values())
    assert not (tmp_path / "new").exists()
    report = migrate(tmp_path, check=1.0)
    assert (report.ok, len(report.brought), report.checked, report.wrong) == (True, 7, 7, [])
    check_arrived(tmp_path / "new", made)
    before = sorted(tmp_path.joinpath("new").rglob("*"))
    again = migrate(tmp_path, check=1.0)
    assert (again.ok, again.brought, again.there, again.checked) == (True, [], 7, 0)
    assert sorted(tmp_path.joinpath("new").rglob("*")) == before
    made = make(tmp_path / "old", 9)
    assert len(migrate(tmp_path).brought) == 2
    check_arrived(tmp_path / "new", made)


def test_what_cannot_be_read_is_reported_and_the_rest_arrives(tmp_path: Path) -> None:
    """Truncated files and unsafe pickles are named. A failed conversion does not delay later ones."""
    made = make(tmp_path / "old", 6)
    cut = tmp_path / "old" / "first" / "ckpt_5.pt"
    torch.save(state(5), cut)
    cut.write_bytes(cut.read_bytes()[:-2000])
    (tmp_path / "old" / "second" / "evil_7.pt").write_bytes(b"\x80\x02cos\nsystem\nX\x04\0\0\0trueq\0\x85R.")
    plan = plan_migration(str(tmp_path / "old"), str(tmp_path / "new"), check=1.0)
    assert {"first/ckpt_5.pt"} <= {name for name, _ in plan.unreadable}
    name, (run, _) = next(iter(made.items()))
    shutil.move(tmp_path / "old" / name, tmp_path / "away.pt")
    report = execute_migration(plan)
    assert not report.ok and [failure[0] for failure in report.failed] == [name] and len(report.brought) == 5
    assert live(tmp_path, run) == sorted(step for where, step in made.values() if where == run)[1:]


def test_what_was_brought_is_taken_back_and_nothing_else(tmp_path: Path) -> None:
    """A rollback leaves other saves and tagged checkpoints. A repeated migration brings the others again."""
    made = make(tmp_path / "old", 6)
    with pytest.raises(CheckpointNotFound):
        roll_back(str(tmp_path / "old"), str(tmp_path / "new"))
    migrate(tmp_path)
    relight.save(tmp_path / "new" / "first", {"model": {"w": torch.ones(3)}}, step=1000)
    relight.save(tmp_path / "new" / "mine", {"model": {"w": torch.ones(3)}}, step=1)
    tagged = Run(open_bytes(tmp_path / "new"), "second")
    tagged.tag("good", tagged.history().live[0].id)
    plan = roll_back(str(tmp_path / "old"), str(tmp_path / "new"), dry_run=True)
    assert sum(map(len, plan.gone.values())) == 5 and live(tmp_path, "first") == [0, 30, 1000]
    report = roll_back(str(tmp_path / "old"), str(tmp_path / "new"))
    assert report.gone == plan.gone and [why for _, why in report.kept] == ["tagged good"] and report.left == []
    assert [live(tmp_path, run) for run in ("first", "second", "deep-third", "mine")] == [[1000], [10], [], [1]]
    tagged.tag("good", None)
    roll_back(str(tmp_path / "old"), str(tmp_path / "new"))
    assert live(tmp_path, "second") == []
    assert sorted(path.name for path in (tmp_path / "new" / "second").iterdir()) == ["log"]
    (tmp_path / "new" / "first").rename(tmp_path / "first")
    assert {item.name for item in plan_migration(str(tmp_path / "old"), str(tmp_path / "new")).todo} == set(made)


def test_what_is_on_hold_is_not_taken_back(tmp_path: Path) -> None:
    """Only its release removes a checkpoint on hold. The report names it once, with the reason."""
    make(tmp_path / "old", 3)
    migrate(tmp_path)
    first = Run(open_bytes(tmp_path / "new"), "first")
    kept_id = first.history().live[0].id
    assert (
        CliRunner().invoke(cli, ["tag", f"{tmp_path}/new/first@{kept_id}", "--hold", "--why", "incident 42"]).exit_code
        == 0
    )
    report = roll_back(str(tmp_path / "old"), str(tmp_path / "new"))
    assert [checkpoint_id for checkpoint_id, _ in report.kept] == [kept_id] and "incident 42" in report.kept[0][1]
    assert [checkpoint.id for checkpoint in first.history().live] == [kept_id]


@pytest.mark.parametrize("how", ["live", "retired", "repacked with a branch"])
def test_what_another_checkpoint_needs_is_not_taken_back(tmp_path: Path, how: str) -> None:
    """An imported checkpoint stays while another one needs its bytes, also one that can be undeleted, or that a branch uses."""
    (tmp_path / "old" / "first").mkdir(parents=True)
    weights = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    torch.save({"model": {"w": weights}, "step": 0}, tmp_path / "old" / "first" / "ckpt_0.pt")
    migrate(tmp_path)
    store, old = open_bytes(tmp_path / "new"), str(tmp_path / "old")
    run = Run(store, "first")
    (imported,) = run.history().live
    attempt = Attempt.begin(store, "first")
    frozen = Item("model/w", "float32", weights.shape, "param", Bytes(weights.numpy().tobytes()))
    adapter = Item("adapter", "float32", (4,), "param", Bytes(bytes(16)), trainable=True)
    smaller = IncrementalState(Compact(codecs="never"), Experience(equal=1.0))
    later = attempt.save(
        SaveRequest(SaveInfo(step=1), tree=encode_tree({}), items=[frozen, adapter], smaller=smaller)
    ).id
    assert run.history().live[-1].requires == [imported.id]
    log = Log(store, "first")
    if how == "retired":
        attempt.save(SaveRequest(SaveInfo(step=2), tree=encode_tree({}), items=[adapter]))
        log.read()
        log.append(lambda view: (RetireBody(ids=[later], reason="retention", undo_s=3600.0), fold(view).epoch))
    elif how == "repacked with a branch":
        branch(run, run.history().live[-1], "side")
        execute_repack(plan_repack(run))
        assert run.history().live[-1].requires == []
    report = roll_back(old, str(tmp_path / "new"))
    assert report.kept == [(imported.id, "a later checkpoint needs it")] and not report.gone
    if how == "retired":
        recall(store, "first", [later])
    restored = run.history().find(later)
    assert restored is not None and verify_checkpoint(store, run.view(), restored) == []
    if how == "repacked with a branch":
        side = Run(store, "side")
        assert verify_checkpoint(store, side.view(), side.history().live[-1]) == []


def test_what_was_committed_and_not_written_down_is_taken_back_too(tmp_path: Path) -> None:
    """A checkpoint that was left by a kill between its commit and the journal's entry is recognised by its metadata."""
    make(tmp_path / "old", 3)
    migrate(tmp_path, check=0.0)
    journal = MigrationJournal(open_bytes(tmp_path / "new"), place_of(str(tmp_path / "old")))
    for record in (tmp_path / "new" / journal.prefix).rglob("[0-9].json"):
        record.unlink()
    assert MigrationState(journal).brought == {}
    assert sum(map(len, roll_back(str(tmp_path / "old"), str(tmp_path / "new")).gone.values())) == 3


def test_a_run_with_other_checkpoints_is_refused(tmp_path: Path) -> None:
    """A migration into a run with other checkpoints is refused before any work. Another name helps."""
    make(tmp_path / "old", 1)
    relight.save(tmp_path / "new" / "first", {"model": {"w": torch.ones(3)}}, step=1)
    with pytest.raises(ConfigError, match="not made by this migration"):
        migrate(tmp_path)
    for path in (tmp_path / "old" / "first").iterdir():
        path.rename(tmp_path / "old" / path.name)
    migrate(tmp_path, run="other")
    assert live(tmp_path, "other") == [0]


def test_who_was_superseded_commits_nothing_more(tmp_path: Path) -> None:
    """A superseded session stops at any point. Its successor brings each checkpoint once."""
    made = make(tmp_path / "old", 3)
    plan = plan_migration(str(tmp_path / "old"), str(tmp_path / "new"))
    store = open_bytes(tmp_path / "new")
    journal = MigrationJournal(store, plan.old)
    first = journal.begin({"runs": plan.runs})
    assert journal.begin({"runs": plan.runs}) == first + 1
    item = plan.todo[0]
    late = MigrationTask("bring", plan.url, plan.old, first, 0, item.name, item.path, item.run, item.step, item.bytes)
    assert work(late)["error"] == "lease"
    with pytest.raises(LeaseHeld):
        list(_run(IN_PROCESS, [late]))
    assert journal.read(first, 0) is None
    migrate(tmp_path)
    assert work(late)["ok"]  # the checkpoint exists already
    check_arrived(tmp_path / "new", made)


def test_a_source_that_changed_is_found_by_the_comparison(tmp_path: Path) -> None:
    """A comparison fails for bytes that differ from the source, and for a missing source."""
    made = make(tmp_path / "old", 3)
    plan = plan_migration(str(tmp_path / "old"), str(tmp_path / "new"), check=0.0)
    execute_migration(plan)
    first, second, third = made
    changed = state(made[first][1])
    changed["model"]["w"][3, 3] += 1
    torch.save(changed, tmp_path / "old" / first)
    (tmp_path / "old" / second).write_bytes(b"x")
    report = execute_migration(plan_migration(str(tmp_path / "old"), str(tmp_path / "new"), check=1.0))
    assert [entry[0] for entry in report.wrong] == [first] and "model/w" in report.wrong[0][2]
    # a damaged file with a checkpoint's name is reported
    assert [name for name, _ in report.unreadable] == [second] and report.checked == 2
    assert third not in {entry[0] for entry in report.wrong}


def test_an_encrypted_destination_gets_it_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes read the key from the settings, and no plain bytes of a source are stored."""
    made = make(tmp_path / "old", 3)
    write_key_file(str(tmp_path / "key"))
    monkeypatch.setenv("RELIGHT_KEY", f"file:{tmp_path / 'key'}")
    assert migrate(tmp_path, check=1.0).ok
    check_arrived(tmp_path / "new", made)
    needle = state(0)["model"]["w"].numpy().tobytes()[:64]
    assert not any(needle in path.read_bytes() for path in (tmp_path / "new").rglob("*") if path.is_file())


def test_it_is_stored_coded_if_that_is_wanted(tmp_path: Path) -> None:
    """With compression the result is smaller and bit-exact, and no checkpoint needs another one."""
    (tmp_path / "old").mkdir()
    torch.save({"model": {"w": torch.arange(300_000).float()}}, tmp_path / "old" / "a_1.pt")
    assert migrate(tmp_path, check=1.0, compress=True).ok
    (checkpoint,) = Run(open_bytes(tmp_path / "new"), "old").history().live
    assert checkpoint.body.stored_bytes < checkpoint.body.logical_bytes / 2 and checkpoint.requires == []
    assert torch.equal(relight.load(tmp_path / "new" / "old")["model"]["w"], torch.arange(300_000).float())


def test_where_from_and_where_to(tmp_path: Path) -> None:
    """A missing source, an unknown kind of place and an invalid share are refused.

    A store below the source is not migrated.
    """
    for old in (str(tmp_path / "nothing"), "ftp://host/old"):
        with pytest.raises(CheckpointNotFound):
            plan_migration(old, str(tmp_path / "new"))
    made = make(tmp_path / "old", 2)
    inside = tmp_path / "old" / "new"
    execute_migration(plan_migration(str(tmp_path / "old"), str(inside)))
    assert {item.name for item in plan_migration(str(tmp_path / "old"), str(inside)).there} == set(made)
    assert len(plan_migration(str(tmp_path / "old"), str(tmp_path / "other")).todo) == 2
    with pytest.raises(ConfigError):
        plan_migration(str(tmp_path / "old"), str(tmp_path / "new"), check=2)


def test_the_command_reports_what_it_does(tmp_path: Path) -> None:
    """The command shows a plan, migrates, then reports that all are there.

    It has JSON, and exit code 1 for unreadable sources.
    """
    make(tmp_path / "old", 4)

    def call(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "relight", "import", "--all", "old", "new", *more]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=dict(os.environ))

    assert "4 checkpoints, " in call("--dry-run").stdout and not (tmp_path / "new").exists()
    done = json.loads(call("--json", "--check", "full").stdout)
    assert done["ok"] and len(done["brought"]) == 4 and done["checked"] == 4
    (tmp_path / "old" / "cut.pt").write_bytes((tmp_path / "old" / "first" / "ckpt_0.pt").read_bytes()[:5000])
    again = call()
    assert again.returncode == 1 and "UNREADABLE  cut.pt" in again.stdout and "4 were there already" in again.stdout
    assert call("--check", "many").returncode == 2
    assert "4 checkpoints taken back" in call("--roll-back").stdout
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "thing").write_text("x")
    refused = subprocess.run(
        [sys.executable, "-m", "relight", "import", "--all", "old", "some"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2 and "not a store" in refused.stderr


def test_a_migration_that_died_at_its_start_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is a store before anything else is in it. Otherwise the command would refuse the next start."""
    make(tmp_path / "old", 2)

    def dies(*_: object, **__: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched, pytest.raises(InterruptedError):
        patched.setattr("relight.migrate.execute.Attempt.begin", dies)
        execute_migration(plan_migration(str(tmp_path / "old"), str(tmp_path / "new")))
    assert [entry.name for entry in (tmp_path / "new").iterdir() if entry.name == "relight.json"]
    command = [sys.executable, "-m", "relight", "import", "--all", "old", "new", "--jobs", "1"]
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and "2 checkpoints" in again.stdout, again.stderr


def test_a_store_whose_creation_was_interrupted_is_accepted(tmp_path: Path) -> None:
    """A kill while relight.json is created leaves only its temporary name."""
    make(tmp_path / "old", 1)
    (tmp_path / "new").mkdir()
    temporary = f"{TMP_PREFIX}relight.json-0123456789abcdef"
    (tmp_path / "new" / temporary).write_bytes(b"")
    assert temporary_of(temporary) == "relight.json"
    command = [sys.executable, "-m", "relight", "import", "--all", "old", "new", "--jobs", "1"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.crash
def test_killed_again_and_again_all_arrive_once(tmp_path: Path) -> None:
    """SIGKILL at random moments loses and repeats no checkpoint. ``make migrations`` runs more seeds."""
    left = kill_often(tmp_path, count=24, kills=4, seed=3, engine="processes", begin_s=2.0, work_s=0.3)
    assert len(left) == 5


NOT_READABLE = {
    "first/ckpt_5.pt": (b"", "an empty file"),
    "first/ckpt_6.pth": (b"short", "5 bytes"),
    "first/ckpt_7.ckpt": (bytes(range(1, 200)) * 40, "of no known format"),
    "first/model.safetensors": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    "first/ckpt_8.pt.gz": (b"\x1f\x8b\x08" + bytes(40), "gzip"),
    "first/ckpt_9.pt.tmp": (bytes(4096), "zeros"),
    "first/pytorch_model.bin": (b"<html>404</html>" * 9, "of no known format"),
    "first/checkpoint_10": (b"x" * 99, "of no known format"),
    "weights/__0_0.distcp": (b"x" * 99, "of no known format"),
}


@pytest.mark.parametrize("name", NOT_READABLE)
def test_what_is_called_a_checkpoint_and_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    """A file that looks like a checkpoint by its name and cannot be read is named with the reason, and the answer is
    not ok."""
    make(tmp_path / "old", 1)
    data, why = NOT_READABLE[name]
    (tmp_path / "old" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "old" / name).write_bytes(data)
    for other in ("notes.txt", "README", "train.bin", "events.out.tfevents.1", "config.json", "vocab.model.json"):
        (tmp_path / "old" / other).write_bytes(b"x" * 99)
    ((path, reason),) = plan_migration(str(tmp_path / "old"), str(tmp_path / "new")).unreadable
    assert path == name and why in reason
    plan = plan_migration(str(tmp_path / "old"), str(tmp_path / "new"), exclude=[name.rpartition("/")[2]])
    assert plan.unreadable == [] and len(plan.todo) == 1


def test_folders_and_links_that_are_called_checkpoints_are_named(tmp_path: Path) -> None:
    """An empty checkpoint folder, a link that leads elsewhere and a broken checkpoint's folder are named; a link to a
    neighbour is not."""
    make(tmp_path / "old", 1)
    (tmp_path / "old" / "checkpoint-500").mkdir()
    (tmp_path / "old" / "logs").mkdir()
    torch.save(state(3), tmp_path / "away.pt")
    os.symlink(tmp_path / "away.pt", tmp_path / "old" / "away.pt")
    os.symlink("ckpt_0.pt", tmp_path / "old" / "first" / "latest.pt")
    broken = tmp_path / "old" / "hub"
    broken.mkdir()
    torch.save(state(4)["model"], broken / "pytorch_model-00001-of-00002.bin")
    places = {"w": "pytorch_model-00001-of-00002.bin", "n": "pytorch_model-00002-of-00002.bin"}
    (broken / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    plan = plan_migration(str(tmp_path / "old"), str(tmp_path / "new"))
    assert {name for name, _ in plan.unreadable} == {"checkpoint-500", "away.pt", "hub"}
    assert [item.name for item in plan.todo] == ["first/ckpt_0.pt"]


def test_a_place_without_checkpoints_is_no_success(tmp_path: Path) -> None:
    """A source without checkpoints is an error."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("nothing")
    with pytest.raises(CheckpointNotFound, match="no checkpoint was found"):
        plan_migration(str(tmp_path / "old"), str(tmp_path / "new"))


ODD = os.fsdecode(b"\xff")
"""A byte that no UTF-8 text has, as Python represents it in a file name."""


def test_names_that_are_not_utf_8_are_reported(tmp_path: Path) -> None:
    """Other checkpoints arrive. The import names those that it could not record, and exits with 1."""
    step_1 = tmp_path / "old" / "run" / "step-1.pt"
    step_1.parent.mkdir(parents=True)
    torch.save({"model": {"w": torch.ones(3)}}, step_1)
    for name in (f"run/step-2{ODD}.pt", f"r{ODD}/step-3.pt"):
        (tmp_path / "old" / name).parent.mkdir(exist_ok=True)
        shutil.copy(step_1, tmp_path / "old" / name)
    (tmp_path / "old" / "run" / f"notes{ODD}.bin").write_text("no checkpoint")
    answer = in_process("--all", "old", "new", "--json", at=tmp_path)
    assert answer.returncode == 1, answer.stderr
    report = json.loads(answer.stdout)
    assert [item["source"] for item in report["brought"]] == ["run/step-1.pt"] and not report["failed"]
    assert [item["source"] for item in report["unreadable"]] == ["r\\udcff/step-3.pt", "run/step-2\\udcff.pt"]
    for text in (answer.stdout, in_process("--all", "old", "new", at=tmp_path).stdout):
        assert "not UTF-8" in text
    single = in_process(f"old/run/step-2{ODD}.pt", "new/other", at=tmp_path)
    assert single.returncode == 2 and "its name is not UTF-8" in single.stderr and "rename it" in single.stderr
    assert not (tmp_path / "new" / "other").exists()


def test_a_place_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """The journal is found by the place's path."""
    os.mkdir(tmp_path / f"old{ODD}")
    answer = in_process("--all", f"old{ODD}", "new", at=tmp_path)
    assert answer.returncode == 2 and "this path is not UTF-8" in answer.stderr and "bug" not in answer.stderr
    assert not (tmp_path / "new").exists()


def test_an_error_with_such_a_name_is_recorded(tmp_path: Path) -> None:
    """The error of a file that is gone names its path."""
    url = str(tmp_path / "new")
    path = str(tmp_path / f"gone{ODD}.pt")
    result = work(MigrationTask("bring", url, "old", 0, 0, "gone.pt", path, "run", 1, 9))
    assert not result["ok"] and result["where"].endswith("gone\\udcff.pt")
    assert MigrationJournal(open_bytes(url), "old").read(0, 0) == result


@pytest.mark.parametrize("name", ["²", "³.json"])
def test_superscript_digits(tmp_path: Path, name: str) -> None:
    """Superscript digits in a name are no session and no task."""
    journal = MigrationJournal(open_bytes(tmp_path / "new"), "old")
    session = journal.begin({})
    journal.write(session, 0, {"kind": "bring"})
    home = tmp_path / "new" / journal.prefix
    (home / name).mkdir() if name == "²" else (home / "000000" / name).write_text("{}")
    assert journal.sessions() == [session]
    assert list(journal.records()) == [{"kind": "bring"}]


def in_process(*arguments: str, at: Path) -> subprocess.CompletedProcess[str]:
    """Run ``relight import`` in a process."""
    return subprocess.run(
        [sys.executable, "-m", "relight", "import", *arguments], cwd=at, capture_output=True, text=True, check=False
    )
