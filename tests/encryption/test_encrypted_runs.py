"""Training with encrypted saves: by this process or the agent, in several tiers, by several ranks; and that nothing leaks."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from tests.ranks.job import run as run_ranks
from torch import nn

import relight
from relight.errors import WrongKey
from relight.keys import write_key_file
from relight.keys.files import HEAD
from relight.observe import subscribe
from relight.store.encrypted import is_clear
from relight.testing.store_suite import refuses

MARKER = "a-secret-of-this-run-4f1c"
VALUE = 0.7071067690849304
"""A state of many elements. The tests search files for its bytes."""


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(300, 300)
    with torch.no_grad():
        model.bias.fill_(VALUE)
    model.bias.requires_grad_(False)
    return model, torch.optim.AdamW([model.weight], lr=1e-3)


def train(where: str | relight.Tiers, until: int, **options: object) -> tuple[list[float], int]:
    """Train. Return the losses of the steps, and the first step."""
    model, optimizer = parts()
    losses: list[float] = []
    with relight.Checkpointer(
        where,
        model=model,
        optimizer=optimizer,
        note={"text": MARKER},
        metadata={"owner": MARKER},
        save=relight.every(steps=2),
        **options,
    ) as ckpt:  # type: ignore[arg-type]
        start = ckpt.restore()
        for step in range(start, until):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 300)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            ckpt.step(step, loss=losses[-1])
        assert ckpt["note"] == {"text": MARKER}
    return losses, start


def secrets_of(key_file: str) -> list[bytes]:
    """Return the bytes that must not be in any file: of the state, of the metadata, and of the key in each encoding."""
    text = Path(key_file.removeprefix("file:")).read_text().strip().removeprefix(HEAD)
    key = base64.b64decode(text)
    value = torch.full((4,), VALUE).numpy().tobytes()
    return [MARKER.encode(), value, key, text.encode(), key.hex().encode(), repr(key)[2:-1].encode()]


def found_in(data: bytes, secrets: list[bytes]) -> list[bytes]:
    return [secret for secret in secrets if secret in data]


def files_with(folder: Path, secrets: list[bytes]) -> list[str]:
    """Return the files below the folder that contain one of the secrets."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and found_in(path.read_bytes(), secrets)]


@pytest.mark.parametrize("background", [False, True], ids=["trainer", "agent"])
def test_a_run_in_two_tiers(tmp_path: Path, key_file: str, background: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The run resumes to the bit, from either tier.

    No plaintext and no key is in any file, event, log, or list of arguments or environment of a process.
    """
    straight, _ = train(str(tmp_path / "plain" / "run"), 8, background=False)
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = relight.Tiers(hot=relight.tier(str(near / "run")), cold=relight.tier(str(far / "run")))
    events: list[str] = []
    undo = subscribe(lambda event: events.append(repr(event)))
    messages: list[str] = []
    watched = {"agent": 0, "drain": 0}

    def poll_children() -> None:
        for child in psutil.Process().children(recursive=True):
            try:
                messages.append(f"{child.cmdline()} {child.environ()}")
                watched["agent"] += "relight.agent.server" in messages[-1]
                watched["drain"] += "relight.drain" in messages[-1]
            except psutil.Error:
                continue

    model, optimizer = parts()
    losses = []
    with relight.Checkpointer(
        tiers,
        model=model,
        optimizer=optimizer,
        note={"text": MARKER},
        save=relight.every(steps=2),
        background=background,
        limits=relight.Limits(when_busy="queue"),
        encrypt=key_file,
        metadata={"owner": MARKER},
    ) as ckpt:
        for step in range(ckpt.restore(), 4):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 300)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            ckpt.step(step, loss=losses[-1])
            poll_children()
        ckpt.save(3, metrics={"loss": losses[-1]}).wait(60, until="drained")
        poll_children()
    more, start = train(tiers, 6, encrypt=key_file, background=background, limits=relight.Limits(when_busy="queue"))
    assert start == 4
    secrets = secrets_of(key_file)
    assert files_with(tmp_path / "plain", secrets[:2]), "the search finds what is there"
    assert not files_with(near, secrets)
    shutil.rmtree(near)
    last, start = train(tiers, 8, encrypt=[key_file], background=background, limits=relight.Limits(when_busy="queue"))
    assert start == 6 and losses + more + last == straight
    undo()
    assert not files_with(near, secrets) and not files_with(far, secrets)
    assert not found_in("".join(events + messages).encode(), secrets) and not found_in(caplog.text.encode(), secrets)
    assert watched["agent"] or not background
    refuses(WrongKey, lambda: relight.load(far / "run"))
    write_key_file(str(tmp_path / "another"))
    error = refuses(WrongKey, lambda: relight.load(far / "run", encrypt=f"file:{tmp_path / 'another'}"))
    assert not found_in(f"{error!r} {error}".encode(), secrets)
    assert torch.equal(relight.load(far / "run", encrypt=key_file)["model"]["bias"], parts()[0].bias)  # type: ignore[arg-type]


def is_agent(one: psutil.Process) -> bool:
    """Return whether the process is an agent. Other tests' processes may be ending."""
    with contextlib.suppress(psutil.Error):
        return "relight.agent.server" in one.cmdline()
    return False


def test_no_process_can_read_the_memory_of_an_agent_with_keys(tmp_path: Path, key_file: str) -> None:
    """The agent leaves no core dump, and is not dumpable."""
    model, optimizer = parts()
    with relight.Checkpointer(
        str(tmp_path / "s" / "run"),
        model=model,
        optimizer=optimizer,
        save=relight.every(steps=1),
        background=True,
        encrypt=key_file,
    ) as ckpt:
        ckpt.restore()
        ckpt.save(0)
        agents = [child for child in psutil.Process().children(recursive=True) if is_agent(child)]
        assert agents
        assert agents[0].rlimit(psutil.RLIMIT_CORE)[0] in (0, 1)
        owner = os.stat(f"/proc/{agents[0].pid}/environ").st_uid
        assert owner == 0, "only root may read a process that is not dumpable"


def test_save_load_and_open(tmp_path: Path, key_file: str) -> None:
    """``save``, ``load`` and ``open`` work without a loop, with a spec, and with ``RELIGHT_KEY``."""
    relight.save(tmp_path / "run", {"x": torch.arange(1000.0), "y": MARKER}, step=1, encrypt=key_file)
    assert relight.load(tmp_path / "run", encrypt=key_file)["y"] == MARKER
    store = relight.open(tmp_path / "run", encrypt=key_file)
    assert [findings for _, findings in store.verify()] == [[]]
    refuses(WrongKey, lambda: relight.open(tmp_path / "run"))
    assert not files_with(tmp_path / "run", secrets_of(key_file))
    done = subprocess.run(
        [sys.executable, "-m", "relight", "show", str(tmp_path / "run")],
        env={**os.environ, "RELIGHT_KEY": key_file},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "step 1" in done.stdout


@pytest.mark.distributed
def test_ranks(tmp_path: Path, key_file: str) -> None:
    """Three ranks restore what two ranks saved, under another layout. Without the key no process can."""
    import json

    store = tmp_path / "store"
    results = run_ranks("layouts.py", 2, [json.dumps([["save", "fsdp", f"{store}/run", {"encrypt": key_file}]])])
    assert results[0][0]["ids"] == results[1][0]["ids"]
    results = run_ranks("layouts.py", 3, [json.dumps([["restore", "ddp", f"{store}/run", {}]])], RELIGHT_KEY=key_file)
    assert [result[0]["wrong"] for result in results] == [[], [], []]
    refuses(WrongKey, lambda: relight.load(store / "run"))
    sizes = {str(path.relative_to(store)): path.stat().st_size for path in store.rglob("*") if path.is_file()}
    assert all(
        size == 0 or is_clear(name) or b"model/" not in (store / name).read_bytes() for name, size in sizes.items()
    )


def test_smaller_saves_are_encrypted_too(tmp_path: Path, key_file: str) -> None:
    """Chunks that are shared and coded, under ``compact=``, are restored to the bit and retired safely."""
    options = {
        "encrypt": key_file, "compact": relight.Compact(codecs="always", full_every=4), "keep": relight.keep(last=2), "background": False,
        "frozen": torch.arange(500_000.0),
    }  # fmt: skip
    straight, _ = train(str(tmp_path / "plain" / "run"), 12, background=False)
    losses, _ = train(str(tmp_path / "s" / "run"), 7, **options)
    more, start = train(str(tmp_path / "s" / "run"), 12, **options)
    assert start == 7 and losses + more == straight
    opened = relight.open(tmp_path / "s" / "run", encrypt=key_file)
    assert not any(findings for _, findings in opened.verify())
    assert any(checkpoint.requires for checkpoint in opened.checkpoints())
    assert not files_with(tmp_path / "s", secrets_of(key_file))
