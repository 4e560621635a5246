"""Exports to the Hugging Face Hub and imports from its cache, with the real library and a stand-in for its server."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hub_server import HubState, hub
from safetensors.torch import load

import relight
from relight.errors import CheckpointNotFound, ConfigError
from relight.importers.hub import from_hub, hub_address

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None,
    reason="huggingface_hub is not installed: pip install 'relight[hub]'",
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[HubState, dict[str, str]]]:
    """A hub, and the environment of commands that use it."""
    with hub() as (state, url):
        yield state, {
            **os.environ, "HF_ENDPOINT": url, "HF_TOKEN": state.token, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip


def run(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    return subprocess.run(
        [sys.executable, "-m", "relight", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=120,
    )


def saved(path: Path, steps: int = 2) -> torch.nn.Module:
    """Train a little, and save each step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    with relight.Checkpointer(path, model=model) as ckpt:
        ckpt.restore()
        for step in range(steps):
            with torch.no_grad():
                model.weight.add_(0.5)
            ckpt.save(step, metrics={"accuracy": 0.5 + step})
    return model


@pytest.mark.parametrize("address", ["hf://name", "hf://a/b/c", "hf:///b", "hf://a/"])
def test_an_address_of_another_form_is_refused(address: str) -> None:
    """The error shows the form."""
    with pytest.raises(ConfigError) as raised:
        hub_address(address)
    assert "hf://ORG/NAME" in raised.value.hint
    assert hub_address("hf://a/b@v1") == ("a/b", "v1") and hub_address("hf://a/b/") == ("a/b", None)


def test_without_the_library_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is exported first."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="huggingface_hub"):
        from_hub("hf://a/b")


@needs_library
@pytest.mark.shows(
    tool="Hugging Face Hub",
    package="huggingface_hub",
    feature="export and import",
    outcome="exact",
    why="to a stand-in for its server, with the real library",
)
def test_a_model_goes_to_the_hub_and_comes_back(served: tuple[HubState, dict[str, str]], tmp_path: Path) -> None:
    """A new repository is private and has the weights, their lineage and a model card. An import gives the same weights, also
    without a network. Other weights replace them only with --overwrite, and a model card stays."""
    state, environment = served
    model = saved(tmp_path / "runs" / "demo")
    source = str(tmp_path / "runs" / "demo")
    planned = run("export", source, "hf://org/tiny", "--dry-run", environment=environment)
    assert planned.returncode == 0 and not state.repos, planned.stderr
    done = run("export", source, "hf://org/tiny", environment=environment)
    assert done.returncode == 0 and "/org/tiny/commit/" in done.stdout, done.stderr
    files = state.files("org/tiny")
    assert state.repos["org/tiny"]["private"] and sorted(files) == ["README.md", "model.safetensors", "relight.json"]
    assert torch.equal(load(files["model.safetensors"])["weight"], model.weight)
    facts = json.loads(files["relight.json"])
    assert facts["step"] == 1 and facts["metrics"]["accuracy"] == 1.5 and facts["files"].keys() == {"model.safetensors"}
    assert facts["checkpoint"] in files["README.md"].decode()

    refused = run("export", f"{source}@0", "hf://org/tiny", environment=environment)
    assert refused.returncode == 2 and "--overwrite" in refused.stderr
    state.repos["org/tiny"]["commits"][state.repos["org/tiny"]["branches"]["main"]]["README.md"] = b"written by hand"
    replaced = run("export", f"{source}@0", "hf://org/tiny", "--overwrite", environment=environment)
    assert replaced.returncode == 0, replaced.stderr
    assert state.files("org/tiny")["README.md"] == b"written by hand"

    brought = run("import", "hf://org/tiny", str(tmp_path / "runs" / "back"), environment=environment)
    assert brought.returncode == 0, brought.stderr
    assert torch.allclose(relight.load(tmp_path / "runs" / "back")["model"]["weight"], model.weight - 0.5)
    offline = run(
        "import", "hf://org/tiny", str(tmp_path / "runs" / "again"), environment={**environment, "HF_HUB_OFFLINE": "1"}
    )
    assert offline.returncode == 0, offline.stderr


@needs_library
def test_the_hub_gets_a_commit_for_each_new_checkpoint(served: tuple[HubState, dict[str, str]], tmp_path: Path) -> None:
    """``export --follow`` replaces the weights, until the run is finished."""
    state, environment = served
    model, source = torch.nn.Linear(3, 1), tmp_path / "runs" / "demo"
    with relight.Checkpointer(source, model=model, background=False, save=relight.every(steps=2)) as ckpt:
        for step in range(3):
            ckpt.step(step)
        command = [
            sys.executable,
            "-m",
            "relight",
            "export",
            "--follow",
            str(source),
            "hf://org/tiny",
            "--every",
            "0.1",
        ]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as follower:
            ends = time.monotonic() + 60
            while "org/tiny" not in state.repos or "relight.json" not in state.files("org/tiny"):
                assert follower.poll() is None and time.monotonic() < ends
                time.sleep(0.05)
            assert json.loads(state.files("org/tiny")["relight.json"])["step"] == 1
            ckpt.close()
            assert follower.wait(60) == 0, follower.communicate()
    assert json.loads(state.files("org/tiny")["relight.json"])["step"] == 2
    assert torch.equal(load(state.files("org/tiny")["model.safetensors"])["weight"], model.weight)


@needs_library
def test_what_the_hub_refuses_or_changes_is_reported(served: tuple[HubState, dict[str, str]], tmp_path: Path) -> None:
    """A repository that does not exist, a token that may not write, and a file that arrives with other bytes."""
    state, environment = served
    saved(tmp_path / "runs" / "demo", steps=1)
    source = str(tmp_path / "runs" / "demo")
    missing = run("import", "hf://org/none", str(tmp_path / "runs" / "back"), environment=environment)
    assert missing.returncode and "no such repository" in missing.stderr, missing.stderr
    state.refuses_uploads = True
    refused = run("export", source, "hf://org/tiny", environment=environment)
    assert refused.returncode and "refused the request (403)" in refused.stderr and "HF_TOKEN" in refused.stderr, (
        refused.stderr
    )
    state.refuses_uploads, state.flips = False, True
    changed = run("export", source, "hf://org/tiny", environment=environment)
    assert changed.returncode and "differs from what was uploaded" in changed.stderr, changed.stderr


@needs_library
def test_without_a_network_and_a_copy_the_error_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the cache, which lacks it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointNotFound, match="cache"):
        from_hub("hf://org/none")
