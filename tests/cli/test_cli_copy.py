"""``relight cp`` and the package ``transfer``: identity, provenance, fencing, damage, interruption."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from at_hand import directory, flip, ids, request

from relight.catalog import Run, open_run
from relight.commit import Attempt
from relight.errors import ConfigError, LeaseHeld, NoSpace
from relight.format.root_keys import COPIED_FROM
from relight.layout import Bytes
from relight.reader import read_tensors
from relight.store import LocalStore, open_bytes
from relight.store.disk import Disk
from relight.transfer import execute_copy, plan_copy

PACK = "pack-00000-000.safetensors"


def tensors(path: Path, number: int, run: str = "demo") -> dict[str, bytes]:
    """Read and verify a checkpoint. Return its tensors' bytes."""
    result = open_run(open_bytes(path), run)
    opened = result.open(result.history().live[number])
    part = opened.parts[0]
    buffers = {index: bytearray(tensor.length) for index, tensor in enumerate(part.tensors)}
    read_tensors(opened, part, {index: Bytes(data) for index, data in buffers.items()})
    return {part.tensors[index].name: bytes(data) for index, data in buffers.items()}


def test_a_copy_is_a_checkpoint_of_its_own_with_the_same_bytes(relight, runs: Path) -> None:
    """A copy has the same id, packs and tensors, another store, run and epoch, and its origin.

    The original is unchanged.
    """
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    answer = relight("cp", "runs/demo@latest", "backup/copy")
    assert answer.code == 0
    assert answer.out.startswith("copied 1 checkpoint, ")
    assert answer.out.endswith(" to backup/copy\n")
    assert before == {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    backup = runs.parent / "backup"
    assert ids(backup, "copy") == ids(runs)[-1:]
    assert relight("verify", "backup").code == 0
    assert (directory(runs, -1) / PACK).read_bytes() == (directory(backup, -1, "copy") / PACK).read_bytes()
    assert tensors(runs, -1) == tensors(backup, -1, "copy")
    copy = open_run(open_bytes(backup), "copy")
    root = copy.open(copy.history().live[0]).root
    original = Run(open_bytes(runs), "demo").view()
    assert root.user[COPIED_FROM.name] == {"store": original.store_id, "run": original.run_id, "id": root.id}
    assert (root.store, root.run, root.epoch) == (copy.view().store_id, copy.view().run_id, 0)
    files = [path for path in directory(backup, 0, "copy").iterdir() if path.name != "root.json"]
    assert (
        root.stored_bytes == root.new_bytes == sum(path.stat().st_size for path in files if path.name != "draft.json")
    )
    facts = relight("show", "backup/copy", "--json").json
    assert (facts["step"], facts["metrics"], facts["reason"]) == (299, {"loss": 1.0}, "every 100 steps")


def test_all_are_copied_in_order_and_a_second_time_none(relight, runs: Path) -> None:
    """A repeated ``cp`` copies only missing checkpoints."""
    relight("cp", "runs/demo", "backup/demo", "--which", "99", "--which", "good")
    answer = relight("cp", "runs/demo", "backup/demo", "--json")
    assert [entry["id"] for entry in answer.json["copied"]] == ids(runs)[2:]
    assert [entry["id"] for entry in answer.json["there"]] == ids(runs)[:2]
    assert [row["step"] for row in relight("ls", "backup/demo", "--json").json] == [99, 199, 249, 299]
    assert relight("cp", "runs/demo", "backup/demo").out.startswith("nothing to copy: all 4 are in ")
    assert relight("verify", "backup", "--json").json["ok"] is True


@pytest.mark.parametrize("source", ["runs/demo@good", "runs/demo@199"])
def test_source_may_name_the_checkpoint(relight, runs: Path, source: str) -> None:
    """The source may be ``RUN@WHICH`` or the checkpoint's directory."""
    relight("cp", source, "one/demo")
    relight("cp", directory(runs, 1), "two/demo")
    assert ids(runs.parent / "one") == ids(runs.parent / "two") == ids(runs)[1:2]


def test_a_store_as_destination_takes_the_runs_name(relight, runs: Path) -> None:
    """The destination may be an existing store, or a new one with a slash at its end."""
    assert relight("cp", "runs/demo@latest", "backup/").code == 0
    assert relight("cp", "runs/baseline", "backup").code == 0
    assert [row["run"] for row in relight("ls", "backup", "--json").json] == ["baseline", "demo"]


def test_no_store_is_made_around_what_is_there(relight, runs: Path) -> None:
    """A directory or file that is neither store nor run is refused, and so are names that no run may have."""
    Path("plain").mkdir()
    Path("file").write_text("x")
    for destination in ("plain", "file", "backup/log", "backup/a ", "backup/a\tb", "backup/..x/.y"):
        answer = relight("cp", "runs/demo@latest", destination)
        assert (answer.code, answer.out) == (2, ""), destination
    assert not Path("relight.json").exists()
    assert not Path("backup").exists()


def test_dry_run_makes_nothing(relight, runs: Path) -> None:
    """A dry run does not create the store."""
    answer = relight("cp", "runs/demo", "backup/demo", "--dry-run", "--json")
    assert [entry["step"] for entry in answer.json["copy"]] == [99, 199, 249, 299]
    assert "4 checkpoints, " in relight("cp", "runs/demo", "backup/demo", "--dry-run").out
    assert not Path("backup").exists()


def test_training_at_the_destination_is_not_fenced(relight, runs: Path) -> None:
    """A copy is committed under the attempt in charge, which continues saving."""
    store = open_bytes(runs.parent / "backup")
    attempt = Attempt.begin(store, "demo")
    attempt.save(request(9))
    assert relight("cp", "runs/demo@latest", "backup/demo", "--force").code == 0
    attempt.save(request(500))
    assert [checkpoint.step for checkpoint in open_run(store, "demo").history().live] == [9, 299, 500]
    assert open_run(store, "demo").history().live[1].epoch == attempt.epoch
    assert relight("verify", "backup").code == 0


def test_an_attempt_that_takes_charge_meanwhile_is_not_overtaken(runs: Path) -> None:
    """If a FENCE appears before the commit, nothing is committed or left, and the copy may be retried."""
    store = open_bytes(runs.parent / "backup")
    source = Run(open_bytes(runs), "demo")
    plan = plan_copy(source, source.history().live[-1:], store, "demo")
    begun: list[Attempt] = []

    def fence(count: int) -> None:
        if not begun:
            begun.append(Attempt.begin(store, "demo"))

    with pytest.raises(LeaseHeld) as caught:
        execute_copy(plan, progress=fence)
    assert caught.value.retryable
    assert open_run(store, "demo").history().live == []
    assert [entry.name for entry in store.list("demo")] == ["log"]
    assert len(execute_copy(plan).copied) == 1
    begun[0].save(request(500))


def test_a_copy_does_not_put_a_run_back(relight, runs: Path) -> None:
    """A copy of an older step would become the checkpoint to resume from, so it needs ``--force``."""
    answer = relight("cp", "runs/baseline", "runs/demo")
    assert answer.code == 2
    assert "holds another history" in answer.err and "--force" in answer.err
    assert len(ids(runs)) == 4
    assert relight("cp", "runs/baseline", "runs/demo", "--force").code == 0
    assert relight("show", "runs/demo", "--json").json["step"] == 99


def test_a_copy_of_a_checkpoint_pruned_there_gets_a_new_id_once(relight, runs: Path) -> None:
    """No id is committed twice. A later ``cp`` recognises the copy by its origin."""
    relight("cp", "runs/demo", "backup/demo", "--which", "99", "--which", "299")
    relight("prune", "backup/demo", "--keep-last", 1, "--yes")
    answer = relight("cp", "runs/demo@99", "backup/demo", "--force")
    first = ids(runs)[0]
    assert f"{first} is " in answer.out
    new = ids(runs.parent / "backup")[-1]
    assert new != first
    assert relight("cp", "runs/demo@99", "backup/demo", "--json").json["there"] == [{"id": first, "id_there": new}]
    assert relight("verify", "backup").code == 0


def test_leftovers_of_an_interrupted_copy_are_not_written_into(relight, runs: Path) -> None:
    """A copy does not write into an existing directory."""
    name = f"0000000299-{ids(runs)[-1]}-e0"
    relight("cp", "runs/demo@99", "backup/demo")
    (runs.parent / "backup/demo" / name).mkdir()
    (runs.parent / "backup/demo" / name / PACK).write_bytes(b"half")
    assert relight("cp", "runs/demo@latest", "backup/demo").code == 0
    assert (runs.parent / "backup/demo" / name / PACK).read_bytes() == b"half"
    assert len(ids(runs.parent / "backup")) == 2
    assert relight("cp", "runs/demo@latest", "backup/demo").out.startswith("nothing to copy")
    assert relight("verify", "backup").code == 0


@pytest.mark.parametrize("file", [PACK, "part-00000.msgpack", "root.json"])
def test_damage_is_not_copied_and_does_not_stop_the_others(relight, runs: Path, file: str) -> None:
    """Exit code 1 names the damaged checkpoint. Sound ones are copied, and no partial copy is left."""
    flip(directory(runs, 1) / file)
    answer = relight("cp", "runs/demo", "backup/demo")
    assert answer.code == 1
    assert f"DAMAGED  {ids(runs)[1]} was not copied: " in answer.out
    assert [row["step"] for row in relight("ls", "backup/demo", "--json").json] == [99, 249, 299]
    assert len(list((runs.parent / "backup/demo").iterdir())) == 4
    forced = relight("cp", "runs/demo@good", "backup/demo", "--json", "--force")
    assert (forced.code, [damage["kind"] for damage in forced.json["damaged"]]) == (1, ["corrupt"])


def test_a_missing_or_longer_pack_is_damage(relight, runs: Path) -> None:
    """A missing or longer pack is damage."""
    with (directory(runs, 0) / PACK).open("ab") as pack:
        pack.write(b"x")
    (directory(runs, 1) / PACK).unlink()
    answer = relight("cp", "runs/demo", "backup/demo", "--json")
    assert [damage["id"] for damage in answer.json["damaged"]] == ids(runs)[:2]


class Full(Disk):
    """A disk that is full after ``room`` bytes."""

    room = 9000

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write until the disk is full."""
        self.room -= len(data)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return super().pwrite(fd, data, offset)


def test_a_full_destination_keeps_no_incomplete_checkpoint(runs: Path) -> None:
    """On a full disk committed checkpoints stay and the begun one is removed. The same command continues later."""
    path = runs.parent / "backup"
    source = Run(open_bytes(runs), "demo")
    full = LocalStore(path, disk=Full())
    with pytest.raises(NoSpace):
        execute_copy(plan_copy(source, source.history().live, full, "demo"))
    done = ids(path)
    assert 0 < len(done) < 4
    assert len(list((path / "demo").glob("0*"))) == len(done)
    report = execute_copy(plan_copy(source, source.history().live, open_bytes(path), "demo"))
    assert (len(report.there), len(report.copied)) == (len(done), 4 - len(done))


def test_an_interrupt_after_the_commit_deletes_nothing(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C just after the commit the checkpoint is complete."""
    store = open_bytes(runs.parent / "backup")
    source = Run(open_bytes(runs), "demo")
    plan = plan_copy(source, source.history().live[-1:], store, "demo")
    real = LocalStore.put_once

    def interrupted(self: LocalStore, key: str, data: bytes) -> bool:
        made = real(self, key, data)
        if b'"COMMIT"' in data:
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(LocalStore, "put_once", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute_copy(plan)
    monkeypatch.undo()
    assert len(ids(runs.parent / "backup")) == 1
    assert tensors(runs.parent / "backup", 0) == tensors(runs, -1)


def test_large_packs_and_odd_chunks_arrive_whole(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are right for any ratio of buffer, chunk and sector sizes."""
    source = Run(open_bytes(runs), "demo")
    for buffer in (4096, 8192):
        monkeypatch.setattr("relight.transfer.copying.BUFFER_BYTES", buffer)
        monkeypatch.setattr("relight.store.local.DIRECT_FROM_BYTES", 0)
        path = runs.parent / f"backup{buffer}"
        execute_copy(plan_copy(source, source.history().live[-1:], open_bytes(path), "demo"))
        assert (directory(path, 0) / PACK).read_bytes() == (directory(runs, -1) / PACK).read_bytes()


def test_contradictory_checkpoint_arguments_are_refused(relight, runs: Path) -> None:
    """Contradictory arguments are usage errors. A missing run or checkpoint is exit code 1."""
    assert relight("cp", "runs/demo@good", "backup/demo", "--which", "99").code == 2
    assert relight("cp", "runs", "backup/demo").code == 2
    assert relight("cp", "runs/demo@77", "backup/demo").code == 1
    assert relight("cp", "runs/none", "backup/demo").code == 1
    assert not os.path.exists("backup")


def test_the_run_itself_is_no_destination_for_what_it_has(relight, runs: Path) -> None:
    """A copy onto the same run copies nothing."""
    assert relight("cp", "runs/demo@latest", "runs/demo").out.startswith("nothing to copy: it is in ")
    source = Run(open_bytes(runs), "demo")
    with pytest.raises(ConfigError):
        plan_copy(
            Run(open_bytes(runs), "baseline"), Run(open_bytes(runs), "baseline").history().live, source.store, "demo"
        )


def test_a_checkpoint_pruned_there_is_not_pushed_again(relight, runs: Path) -> None:
    """Checkpoints that the destination pruned are not pushed again, because older ones after its newest would roll it
    back."""
    assert relight("cp", "runs/demo", "backup/demo").code == 0
    assert relight("prune", "backup/demo", "--keep-last", "1", "--yes").code == 0
    store = open_bytes(runs.parent / "backup")
    left = [checkpoint.step for checkpoint in open_run(store, "demo").history().live]
    assert left and left[-1] == 299 and len(left) < 4
    assert relight("cp", "runs/demo", "backup/demo").code == 0
    assert [checkpoint.step for checkpoint in open_run(store, "demo").history().live] == left


def test_a_copy_is_refused_after_a_later_step_was_saved_meanwhile(runs: Path) -> None:
    """If the destination saves a later step after the plan was made, nothing is committed or left."""
    store = open_bytes(runs.parent / "backup")
    first = Run(open_bytes(runs), "demo")
    execute_copy(plan_copy(first, first.history().live[:1], store, "demo"))
    attempt = Attempt.begin(store, "demo")
    source = Run(open_bytes(runs), "demo")
    plan = plan_copy(source, source.history().live[-1:], store, "demo")
    saved: list[int] = []

    def trains(count: int) -> None:
        if not saved:
            saved.append(500)
            attempt.save(request(500))

    with pytest.raises(LeaseHeld, match="changed during the copy"):
        execute_copy(plan, progress=trains)
    assert saved and [checkpoint.step for checkpoint in open_run(store, "demo").history().live] == [99, 500]
    execute_copy(plan_copy(source, source.history().live[-1:], store, "demo", as_newest=True))
    assert [checkpoint.step for checkpoint in open_run(store, "demo").history().live] == [99, 500, 299]


@pytest.mark.parametrize("step", [99, 299, 400])
def test_a_copy_into_another_history_is_refused_whatever_its_step(relight, runs: Path, step: int) -> None:
    """Ids decide whether a copy continues the destination's history: an equal or a later step of another run does
    not."""
    Attempt.begin(open_bytes(runs), "other").save(request(step))
    mine = ids(runs)[-1]
    for command in (
        ("cp", "runs/other", "runs/demo"),
        ("cp", "runs/other", "runs/demo"),
        ("cp", "runs/other", "runs/demo"),
    ):
        answer = relight(*command)
        assert answer.code == 2 and "holds another history" in answer.err and mine in answer.err, answer.err
        assert len(ids(runs)) == 4
    theirs = ids(runs, "other")[0]
    plan = relight("cp", "runs/other", "runs/demo", "--force", "--dry-run", "--json")
    assert plan.json["changes"]["only_there"] == [
        {"id": id_, "step": at_step} for id_, at_step in zip(ids(runs), [99, 199, 249, 299], strict=True)
    ]
    answer = relight("cp", "runs/other", "runs/demo", "--force")
    assert answer.code == 0 and len(ids(runs)) == 5
    assert all(f"({id_}); it stays" in answer.err for id_ in ids(runs)[:4])
    assert f"step 299 ({mine}) → step {step}, a copy of {theirs}" in answer.err


def test_a_later_checkpoint_of_the_same_history_is_copied_at_a_lower_step(relight, runs: Path) -> None:
    """A run that went back to an earlier step continues its own history: its copy follows without --force."""
    assert relight("cp", "runs/demo", "backup/").code == 0
    Attempt.begin(open_bytes(runs), "demo").save(request(250, parents=[ids(runs)[1]]))
    answer = relight("cp", "runs/demo", "backup/demo")
    assert (answer.code, answer.err) == (0, "")
    assert ids(runs.parent / "backup") == ids(runs)


def test_a_copy_follows_the_checkpoint_that_its_run_was_resumed_from(relight, runs: Path) -> None:
    """If a new log's first save has the destination's newest checkpoint as parent, the log continues the destination's
    history."""
    Attempt.begin(open_bytes(runs.parent / "near"), "demo").save(request(300, parents=[ids(runs)[-1]]))
    assert relight("cp", "near/demo", "runs/demo").code == 0
    assert relight("show", "runs/demo", "--json").json["step"] == 300


def test_histories_that_parted_are_not_joined(relight, runs: Path) -> None:
    """If two copies of a run both continued training, neither takes the other's checkpoints without --force."""
    relight("cp", "runs/demo", "backup/")
    Attempt.begin(open_bytes(runs.parent / "backup"), "demo").save(request(399))
    Attempt.begin(open_bytes(runs), "demo").save(request(399))
    for command in (("cp", "runs/demo", "backup/demo"), ("cp", "backup/demo", "runs/demo")):
        answer = relight(*command)
        assert answer.code == 2 and "went its own way" in answer.err
    answer = relight("cp", "runs/demo", "backup/demo", "--force", "--json").json
    assert answer["changes"]["relation"] == "apart" and len(answer["changes"]["only_there"]) == 1
