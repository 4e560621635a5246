"""``relight.Tiers`` in a training loop: near on disk, far in a bucket or another disk."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from tests.scripts import Script, run_script

import relight
from relight.agent import reach
from relight.catalog import Run
from relight.errors import ConfigError, StoreUnavailable
from relight.format.records import CommitBody
from relight.observe import counters
from relight.run_records.incident_sync import DIRECTORY
from relight.store import LocalStore, open_bytes
from relight.testing.store_suite import refuses


def parts(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(16, 16)
    return model, torch.optim.AdamW(model.parameters())


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(tiers: relight.Tiers, until: int, **options: object) -> tuple[list[float], int]:
    """Train. Return the losses of the steps and the first step."""
    model, optimizer = parts()
    losses = []
    with relight.Checkpointer(tiers, model=model, optimizer=optimizer, save=relight.every(steps=2), **options) as ckpt:  # type: ignore[arg-type]
        start = ckpt.restore()
        for step in range(start, until):
            losses.append(float(one_step(model, optimizer)))
            ckpt.step(step)
    return losses, start


def steps(url: str, run: str = "run") -> list[int]:
    return [checkpoint.step for checkpoint in Run(open_bytes(url), run).history().live]


@pytest.fixture(params=["trainer", "agent"])
def background(request: pytest.FixtureRequest) -> bool:
    return request.param == "agent"


def test_a_lost_disk_loses_nothing(s3: str, tmp_path: Path, background: bool) -> None:
    """At the run's end the bucket has all saves. With a wiped disk the run resumes from it bit-exactly.

    The disk then has the run's incidents and accounts again.
    """
    tiers = relight.Tiers(hot=tmp_path / "hot" / "run", cold=f"{s3}/cold/run")
    whole, _ = train(relight.Tiers(hot=tmp_path / "whole" / "run"), 9, background=background)
    incident = f"run/{DIRECTORY}/0000000000001-abc.json"
    LocalStore(tmp_path / "hot").put_once(incident, b"{}")
    first, _ = train(tiers, 5, background=background)
    assert steps(f"{s3}/cold")[-1] == 4
    wait_for_agent(tmp_path / "hot")
    shutil.rmtree(tmp_path / "hot")
    second, start = train(tiers, 9, background=background)
    assert start == 5
    assert first + second == whole
    assert steps(str(tmp_path / "hot"))[-1] == 8 and steps(f"{s3}/cold")[-1] == 8
    wait_for_agent(tmp_path / "hot")
    assert LocalStore(tmp_path / "hot").get(incident, 9) == b"{}"


def test_a_tier_s_relative_path_is_meant_from_where_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """The draining process has another working directory, but copies to the trainer's tiers."""
    monkeypatch.chdir(tmp_path)
    train(relight.Tiers(hot="hot/run", cold="cold/run"), 3, background=background)
    assert steps(str(tmp_path / "cold"))[-1] == 2
    wait_for_agent(tmp_path / "hot")


def wait_for_agent(store: Path) -> None:
    """Wait until the agent has ended, after its last write and drain."""
    ends = time.monotonic() + 30
    while (agent := reach(str(store), "run")) is not None:
        agent.close()
        assert time.monotonic() < ends, "the agent does not end"
        time.sleep(0.3)


def test_a_handle_reports_when_it_is_drained(tmp_path: Path, background: bool) -> None:
    """``wait(until="drained")`` returns when every tier has the save. A save that a newer one overtook reports this."""
    tiers = relight.Tiers(hot=tmp_path / "hot" / "run", warm=tmp_path / "warm" / "run", cold=tmp_path / "cold" / "run")
    model, optimizer = parts()
    with relight.Checkpointer(tiers, save=None, model=model, optimizer=optimizer, background=background) as ckpt:
        assert ckpt.restore() == 0
        one_step(model, optimizer)
        save = ckpt.save(0)
        save.wait(60, until="drained")
        assert save.drained and "state drained" in repr(save)
        assert steps(str(tmp_path / "warm")) == steps(str(tmp_path / "cold")) == [0]


def test_the_near_tier_keeps_what_the_far_one_lacks(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the far tier does not answer, saves continue and the near tier keeps what the far tier lacks, until it answers.

    A run without near checkpoints does not begin from scratch while the far tier may have some.
    """
    alive = os.environ["AWS_ENDPOINT_URL"]
    far = f"{s3}/far/run"
    tiers = relight.Tiers(
        hot=relight.tier(tmp_path / "hot" / "run", keep=relight.keep(last=1)),
        far=relight.tier(far, keep=relight.keep(every=4, last=1)),
    )
    monkeypatch.setenv("RELIGHT_STORE_PATIENCE_S", "0.5")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    model, optimizer = parts()
    before = counters["tier.unreachable"]
    ckpt = relight.Checkpointer(tiers, save=None, model=model, optimizer=optimizer, background=False)
    with pytest.raises(StoreUnavailable, match="may have some"):
        ckpt.restore()
    ckpt.close()
    assert counters["tier.unreachable"] > before
    monkeypatch.setenv("AWS_ENDPOINT_URL", alive)
    limits = relight.Limits(deadline_s=5)  # bounds how long close() waits for the silent tier
    ckpt = relight.Checkpointer(
        tiers, model=model, optimizer=optimizer, save=relight.every(steps=1), background=False, limits=limits
    )
    assert ckpt.restore() == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for step in range(6):
        one_step(model, optimizer)
        ckpt.step(step)
    assert steps(str(tmp_path / "hot")) == [3, 5]
    ckpt.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", alive)
    monkeypatch.setenv("RELIGHT_STORE_PATIENCE_S", "20")
    ckpt = relight.Checkpointer(tiers, save=None, model=model, optimizer=optimizer, background=False)
    assert ckpt.restore() == 6
    ckpt.save(6)
    ckpt.close()
    assert steps(f"{s3}/far") == [3, 6]
    ckpt = relight.Checkpointer(tiers, save=None, model=model, optimizer=optimizer, background=False)
    ckpt.restore()
    ckpt.save(7)
    ckpt.close()
    assert steps(str(tmp_path / "hot")) == [7]


def test_a_damaged_near_copy_is_read_further_out(tmp_path: Path) -> None:
    """The newest checkpoint is restored from a tier that has it undamaged."""
    tiers = relight.Tiers(hot=tmp_path / "hot" / "run", cold=tmp_path / "cold" / "run")
    losses, _ = train(tiers, 5, background=False)
    for pack in (tmp_path / "hot").rglob("pack*"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
    _, start = train(tiers, 5, background=False)
    assert start == 5 and losses


@pytest.mark.parametrize("near", ["damaged", "gone", "shorter"])
def test_damage_in_every_tier_is_survived_chunk_by_chunk(tmp_path: Path, near: str) -> None:
    """If only all tiers together have the checkpoint, it is restored bit-exactly, with a report of the files to
    repair."""
    tiers = relight.Tiers(hot=tmp_path / "hot" / "run", warm=tmp_path / "warm" / "run", cold=tmp_path / "cold" / "run")
    state = {f"t{number}": torch.randn(1 << 20) for number in range(6)}
    ckpt = relight.Checkpointer(tiers, save=None, background=False, **state)
    ckpt.restore()
    ckpt.save(0)
    assert ckpt._hooks.tiers.wait(30)
    ckpt.close()
    (hot,) = (tmp_path / "hot").rglob("pack*")
    if near == "gone":
        hot.unlink()
    elif near == "shorter":
        os.truncate(hot, 1 << 20)
    for name, places in (("hot", (0.1, 0.5)), ("warm", (0.1, 0.7)), ("cold", (0.9,))):
        for pack in (tmp_path / name).rglob("pack*"):
            data = bytearray(pack.read_bytes())
            for place in places:
                data[int(len(data) * place)] ^= 1
            pack.write_bytes(data)
    before = counters["restore.repaired"]
    loaded = {name: torch.zeros(1 << 20) for name in state}
    again = relight.Checkpointer(tiers, background=False, **loaded)
    assert again.restore() == 1
    again.close()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert before < counters["restore.repaired"] <= before + 3


def test_copies_and_how_many_of_them_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three tiers are enough: with one unwritable tier a save counts as drained and is released, with two it
    does not."""
    (tmp_path / "no").write_text("a file where a directory should be")
    cold = relight.tier(
        tmp_path / "a" / "run", tmp_path / "no" / "run", tmp_path / "c" / "run", quorum=2, keep=relight.keep(every=1)
    )
    tiers = relight.Tiers(hot=relight.tier(tmp_path / "hot" / "run", keep=relight.keep(last=1)), cold=cold)
    model, optimizer = parts()
    with relight.Checkpointer(tiers, save=None, model=model, optimizer=optimizer, background=False) as ckpt:
        ckpt.restore()
        for step in range(3):
            assert ckpt.save(step).wait(30, until="drained").drained
        assert steps(str(tmp_path / "hot")) == [2]
    assert ckpt.ended.missing == {} and ckpt.ended.exit_code == 0, "enough places have each checkpoint"
    assert steps(str(tmp_path / "a")) == steps(str(tmp_path / "c")) == [0, 1, 2]
    shutil.rmtree(tmp_path / "c")
    (tmp_path / "c").write_text("and another")
    ckpt = relight.Checkpointer(tiers, save=None, model=model, optimizer=optimizer, background=False)
    assert ckpt.restore() == 3
    save = ckpt.save(3)
    assert not ckpt._hooks.tiers.wait(30) and save.done and not save.drained
    ckpt.save(4)
    assert not ckpt._hooks.tiers.wait(30)
    ckpt._hooks.tiers.wait = lambda timeout: True  # type: ignore[method-assign]
    ended = ckpt.close()  # with the real ``wait`` it would take its whole deadline
    assert set(ended.missing) == {"cold-2", "cold-3"} and ended.exit_code == 1
    assert steps(str(tmp_path / "hot")) == [3, 4]
    shutil.rmtree(tmp_path / "hot")
    assert train(tiers, 5)[1] == 5


def test_a_near_tier_with_an_end_keeps_what_fits(tmp_path: Path) -> None:
    """Without room drained checkpoints are deleted, although the rules keep them. Others stay."""
    hot = relight.tier(tmp_path / "hot" / "run", capacity=9000)
    tiers = relight.Tiers(hot=hot, cold=tmp_path / "cold" / "run")
    model, optimizer = parts()
    with relight.Checkpointer(tiers, save=None, model=model, optimizer=optimizer, background=False) as ckpt:
        ckpt.restore()
        for step in range(6):
            ckpt.save(step)
            assert ckpt._hooks.tiers.wait(30)
    near = Run(LocalStore(tmp_path / "hot"), "run").history().live
    assert steps(str(tmp_path / "cold")) == [0, 1, 2, 3, 4, 5]
    assert 1 <= len(near) < 6 and near[-1].step == 5
    assert sum(checkpoint.body.stored_bytes for checkpoint in near[:-1]) <= 9000


def full(tmp_path: Path, cold: relight.Tier, deadline_s: float) -> tuple[relight.Checkpointer, dict[str, torch.Tensor]]:
    """Run through the agent with a megabyte a save and near room for three."""
    state = {"t": torch.randn(1 << 18)}
    tiers = relight.Tiers(hot=relight.tier(tmp_path / "hot" / "run", capacity="3.5MB"), cold=cold)
    ckpt = relight.Checkpointer(
        tiers,
        background=True,
        limits=relight.Limits(deadline_s=deadline_s, when_busy="queue"),
        save=relight.every(steps=1),
        **state,
    )
    ckpt.restore()
    return ckpt, state


def near_bytes(tmp_path: Path) -> int:
    return sum(checkpoint.body.stored_bytes for checkpoint in Run(LocalStore(tmp_path / "hot"), "run").history().live)


def test_a_save_waits_in_memory_while_the_near_tier_is_full(tmp_path: Path) -> None:
    """With a slow further tier the near tier never exceeds its limit, no save is lost, and waits are reported."""
    before = counters["save.backpressured"], counters["save.failed"]
    cold = relight.tier(tmp_path / "cold" / "run", keep=relight.keep(every=1), bytes_per_second=4e6)
    ckpt, state = full(tmp_path, cold, 60)
    most, saves = 0, []
    for step in range(9):
        state["t"].add_(1)
        saves.append(ckpt.step(step))
        most = max(most, near_bytes(tmp_path))
    assert all(save.wait(60).done for save in saves)
    most = max(most, near_bytes(tmp_path))
    ckpt.close()
    assert steps(str(tmp_path / "cold")) == list(range(9))
    assert 2e6 < most <= 3.5e6
    assert counters["save.backpressured"] > before[0] and counters["save.failed"] == before[1]
    wait_for_agent(tmp_path / "hot")


def test_a_save_waits_no_longer_than_half_its_deadline_for_room(tmp_path: Path) -> None:
    """If the further tier cannot be written, a save waits at most half its deadline for room, and not at the run's end."""
    (tmp_path / "no").write_text("a file where a directory should be")
    before = counters["save.backpressured"]
    ckpt, state = full(tmp_path, relight.tier(tmp_path / "no" / "run", keep=relight.keep(every=1)), 10)
    for step in range(4):
        state["t"].add_(1)
        began = time.monotonic()
        assert ckpt.save(step, block=False).wait(60).done
    assert time.monotonic() - began >= 5 and counters["save.backpressured"] == before + 1
    ckpt.close()
    assert steps(str(tmp_path / "hot")) == list(range(4))
    wait_for_agent(tmp_path / "hot")


@pytest.mark.parametrize("how", ["close", "blocks", "signal", "exception"])
def test_a_save_with_a_waiting_caller_is_not_postponed(tmp_path: Path, how: str) -> None:
    """At the end of a run, a blocking save or a signal, held saves and later ones are written at once."""
    (tmp_path / "no").write_text("a file where a directory should be")
    before = counters["save.backpressured"]
    ckpt, state = full(tmp_path, relight.tier(tmp_path / "no" / "run", keep=relight.keep(every=1)), 200)
    for step in range(4):
        state["t"].add_(1)
        postponed = ckpt.save(step, block=False)
    ends = time.monotonic() + 30
    while counters["save.backpressured"] == before and time.monotonic() < ends:
        time.sleep(0.05)
    assert not postponed.done
    began = time.monotonic()
    if how == "close":
        ckpt._hooks.tiers.wait = lambda timeout: True  # type: ignore[method-assign]
        ckpt.close()
    elif how == "blocks":
        assert ckpt.save(4).done
    elif how == "signal":
        signal.raise_signal(signal.SIGUSR1)
        assert ckpt.step(4).wait(60).done  # type: ignore[union-attr]
    else:
        with pytest.raises(ValueError), ckpt:
            raise ValueError
    assert postponed.done and time.monotonic() - began < 30
    ckpt._hooks.tiers.wait = lambda timeout: True  # type: ignore[method-assign]
    ckpt.close()
    (tmp_path / "no").unlink()
    wait_for_agent(tmp_path / "hot")


def test_room_is_made_for_the_first_save_of_a_life_too(tmp_path: Path) -> None:
    """A run that ended with a full near tier drains it when the further tier answers again."""
    (tmp_path / "no").write_text("a file where a directory should be")
    cold = relight.tier(tmp_path / "no" / "run", keep=relight.keep(every=1))
    ckpt, state = full(tmp_path, cold, 4)
    for step in range(4):
        state["t"].add_(1)
        ckpt.save(step)
    ckpt._hooks.tiers.wait = lambda timeout: True  # type: ignore[method-assign]
    ckpt.close()
    wait_for_agent(tmp_path / "hot")
    (tmp_path / "no").unlink()
    before = counters["save.backpressured"]
    ckpt, state = full(tmp_path, cold, 200)
    began = time.monotonic()
    assert ckpt.save(4, block=False).wait(90).done
    assert time.monotonic() - began < 60
    assert counters["save.backpressured"] == before + 1 and steps(str(tmp_path / "no"))[:2] == [0, 1]
    assert near_bytes(tmp_path) <= 3.5e6
    ckpt.close()
    wait_for_agent(tmp_path / "hot")


def test_two_places_one_run(tmp_path: Path) -> None:
    """After a second node took over the run from the bucket, the first node's drains are refused and reported."""
    cold = tmp_path / "cold" / "run"
    node = lambda name: relight.Tiers(hot=tmp_path / name / "run", cold=cold)  # noqa: E731
    model, optimizer = parts()
    first = relight.Checkpointer(node("one"), model=model, optimizer=optimizer, background=False)
    first.restore()
    first.save(0)
    first._hooks.tiers.wait(30)
    other_model, other_optimizer = parts(1)
    second = relight.Checkpointer(node("two"), model=other_model, optimizer=other_optimizer, background=False)
    assert second.restore() == 1
    second.save(1)
    second.close()
    before = counters["drain.fenced"]
    first.save(1)
    first.close()
    assert counters["drain.fenced"] > before
    assert steps(str(tmp_path / "cold")) == [0, 1]
    assert (
        Run(LocalStore(tmp_path / "cold"), "run").history().live[-1].id
        == Run(LocalStore(tmp_path / "two"), "run").history().live[-1].id
    )


def test_invalid_tiers_are_refused_at_once(tmp_path: Path) -> None:
    """No tier, duplicate places, invalid names, invalid stores and contradictory options are refused."""
    model, optimizer = parts()
    for make in (
        lambda: relight.Tiers(),
        lambda: relight.Tiers(hot="a/run", cold="a/run/"),
        lambda: relight.Tiers(**{"No name": "a/run"}),
        lambda: relight.tier(""),
        lambda: relight.tier("a/run", bytes_per_second=0),
        lambda: relight.Checkpointer(
            relight.Tiers(hot=tmp_path / "run", cold="ftp://host/run"), save=None, model=model
        ),
        lambda: relight.Checkpointer(relight.Tiers(hot=tmp_path / "run"), save=None, run="x", model=model),
    ):
        refuses(ConfigError, make)


TRAIN = """
import sys, time, torch, relight
hot, cold, until = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())
tiers = relight.Tiers(hot=relight.tier(hot, keep=relight.keep(last=2)), cold=relight.tier(cold, keep=relight.keep(last=3, every=10)))
with relight.Checkpointer(tiers, model=model, optimizer=optimizer, save=relight.every(steps=1)) as ckpt:
    for step in range(ckpt.restore(), until):
        loss = model(torch.randn(8, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpt.step(step)
        time.sleep(0.02)
        print(step, flush=True)
"""


def for_good(url: str) -> set[int]:
    """Return the saved steps that the far tier's rules keep for good."""
    records = Run(open_bytes(url), "run").view().records
    return {
        record.body.step
        for record in records
        if isinstance(record.body, CommitBody) and (record.body.step + 1) % 10 == 0
    }


def test_the_agent_drains_what_a_killed_trainer_left(s3: str, tmp_path: Path) -> None:
    """After SIGKILL of the trainer the agent commits the sealed save, drains it, and then ends.

    The next attempt resumes.
    """
    script = (TRAIN, str(tmp_path / "hot" / "run"), f"{s3}/cold/run")
    child = Script(*script, "1000", RELIGHT_BACKGROUND="1")
    for line in child.stdout:
        if (
            int(line) >= 12
            and int(line) % 5 == 0
            and (tmp_path / "hot" / "run" / "log").exists()
            and len(steps(str(tmp_path / "hot"))) >= 2
        ):
            break
    child.send_signal(signal.SIGKILL)
    child.communicate()
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        near, far = steps(str(tmp_path / "hot")), steps(f"{s3}/cold")
        if near[-1:] == far[-1:]:
            break
        time.sleep(0.2)
    assert near[-1] == far[-1] >= 8
    done = run_script(*script, str(near[-1] + 4), timeout_s=120, RELIGHT_BACKGROUND="1")
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == list(range(near[-1] + 1, near[-1] + 4))
    assert steps(f"{s3}/cold")[-1] == near[-1] + 3
    assert for_good(str(tmp_path / "hot")) <= set(steps(f"{s3}/cold")), "what the rules name for good is there"
    wait_for_agent(tmp_path / "hot")
