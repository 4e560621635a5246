"""Shared behaviour of all plug-ins, with or without any framework."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import relight
from relight.errors import CheckpointNotFound, ConfigError, IncompatibleState
from relight.integrations.dcp import StorageWriter
from relight.integrations.frameworks import (
    checkpointer_options,
    loaders_in,
    needed,
    numbers,
    read_as_file,
    remove_as_file,
    save_options,
    write_as_file,
)
from relight.store import open_bytes

PLUGINS = {
    "lightning": "lightning", "transformers": "transformers", "accelerate": "accelerate", "deepspeed_engine": "deepspeed",
    "megatron": "megatron", "torchtitan": "torchtitan", "ray_train": "ray", "torchft": "torchft",
}  # fmt: skip


def test_a_missing_framework_is_reported() -> None:
    """Raise an error with the package to install if a plug-in's framework cannot be imported."""
    script = (
        "import importlib, sys\n"
        "from relight.errors import ConfigError\n"
        f"for plugin, framework in {PLUGINS!r}.items():\n"
        "    sys.modules[framework] = None\n"
        "    try:\n"
        "        importlib.import_module('relight.integrations.' + plugin)\n"
        "    except ConfigError as error:\n"
        "        print(plugin, error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    hints = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert hints.keys() == PLUGINS.keys() and all("pip install" in hint for hint in hints.values()), done.stdout


def test_needed_gives_the_module() -> None:
    """Import an installed module. Raise ConfigError for a missing one."""
    assert needed("json", "nothing").loads("1") == 1
    with pytest.raises(ConfigError, match="no_such_framework"):
        needed("no_such_framework", "no-such-framework")


def test_only_numbers_are_metrics() -> None:
    """Leave out texts, vectors and names that ``step`` uses itself. Tensors stay unread."""
    loss = torch.tensor(2.5)
    metrics = numbers({"loss": loss, "n": 3, "text": "x", "many": torch.zeros(2), "step": 1, "z": torch.tensor(1j)})
    assert list(metrics) == ["loss", "n"] and metrics["loss"] is loss


def test_a_file_is_written_over(tmp_path) -> None:
    """Overwrite as a file does: only the last written checkpoint remains, whatever its step."""
    for step in (5, 3):
        write_as_file(tmp_path / "last.ckpt", {"w": torch.full((3,), float(step))}, step, {})
        assert read_as_file(tmp_path / "last.ckpt", {})["w"].tolist() == [step] * 3
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "last.ckpt" / "run").checkpoints()] == [3]


@pytest.mark.parametrize("path", ["memory://{name}/ckpts/last.ckpt", "file://{path}/last.ckpt"])
def test_a_file_at_a_url(path, tmp_path) -> None:
    """The URL keeps its slashes: no directory of its name appears in the working directory."""
    url = path.format(name=tmp_path.name, path=tmp_path)
    write_as_file(url, {"w": torch.ones(3)}, 3, {})
    assert read_as_file(url, {})["w"].tolist() == [1.0] * 3 and not Path(url.partition("//")[0]).exists()


def test_a_file_of_others_is_recognised(tmp_path) -> None:
    """Refuse a checkpoint of torch, and a run of another kind. A missing path raises CheckpointNotFound."""
    (tmp_path / "torch.ckpt").write_bytes(b"PK")
    relight.save(tmp_path / "other.ckpt" / "run", {"model": {"w": 1}}, step=1)
    for name, kind in (
        ("torch.ckpt", IncompatibleState),
        ("other.ckpt", IncompatibleState),
        ("none.ckpt", CheckpointNotFound),
    ):
        with pytest.raises(kind):
            read_as_file(tmp_path / name, {})


def test_loaders_are_found_in_containers() -> None:
    """Find loaders in dicts and lists, in order. Ignore values without a position."""
    first, second = (torch.utils.data.DataLoader([1, 2, 3]) for _ in range(2))
    assert loaders_in({"a": first, "b": [second, range(3)]}) == {"data_0": first, "data_1": second}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"save_every": 10}, "save=relight.every(steps=10)"),
        ({"backgroud": False}, "background=?"),
        ({"sate": {"a": 1}}, "state=?"),
    ],
)
def test_a_slip_in_a_plug_ins_options_is_refused(options: dict[str, object], named: str) -> None:
    """Refuse a misspelt option when the plug-in is made, as a Checkpointer would."""
    with pytest.raises(ConfigError) as caught:
        checkpointer_options(options, {})
    assert named in caught.value.hint


def test_a_plug_ins_own_components_and_the_callers_go_together() -> None:
    """Add the caller's ``state=`` to what a plug-in saves, and refuse equal names."""
    given = checkpointer_options({"state": {"epoch": 0}, "signals": False, "extra": torch.ones(1)}, {"model": 1})
    assert given["state"] == {"model": 1, "epoch": 0} and given["signals"] is False and "extra" in given
    for wrong in ({"state": {"model": 2}}, {"state": [1]}):
        with pytest.raises(ConfigError, match=r"saves 'model' itself|state= must be a dict"):
            checkpointer_options(wrong, {"model": 1})


def test_plug_ins_that_save_by_a_function_take_its_options() -> None:
    """Pass ``encrypt=`` to ``relight.save``. Refuse other options at once, not at the first save."""
    assert save_options({"encrypt": "file:x"}) == {"encrypt": "file:x"}
    with pytest.raises(ConfigError, match="'keep' is not an option"):
        save_options({"keep": 3})


def test_dcp_takes_a_step_as_people_have_it(tmp_path: Path) -> None:
    """Accept any kind of integer as a step in ``StorageWriter``, and refuse what no save can record."""
    assert StorageWriter(tmp_path / "run", step=torch.tensor(7)).step == 7  # type: ignore[arg-type]
    for wrong in ({"step": 7.0}, {"step": -1}, {"step": 7, "metrics": {"loss": "x"}}):
        with pytest.raises(ConfigError):
            StorageWriter(tmp_path / "run", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["path", "file", "memory", "stripe"])
def test_a_framework_removes_its_checkpoint_at_a_path_or_a_url(kind, tmp_path) -> None:
    """``remove_as_file`` deletes what ``write_as_file`` wrote, in every kind of store, and leaves anything else."""
    place = {"path": f"{tmp_path}/x", "file": f"file://{tmp_path}/x", "memory": f"memory://{tmp_path.name}-x",
             "stripe": f"stripe:{tmp_path}/x0,{tmp_path}/x1,/x"}[kind]  # fmt: skip
    write_as_file(place, {"a": torch.ones(3)}, 2, {})
    write_as_file(place, {"a": torch.ones(3)}, 4, {})
    os.symlink(tmp_path / "x", tmp_path / "link")
    for link in (tmp_path / "link", f"file://{tmp_path}/link/"):
        with pytest.raises(CheckpointNotFound):
            remove_as_file(link)
    assert read_as_file(place, {})["a"].sum() == 3
    remove_as_file(place)
    assert not list(open_bytes(place).list("")) and not (tmp_path / "x").exists()
    for another in (place, f"{place}-none"):
        with pytest.raises(CheckpointNotFound):
            remove_as_file(another)
    open_bytes(place).put_once("thesis.txt", b"years")
    with pytest.raises(CheckpointNotFound):
        remove_as_file(place)
    relight.save(f"{place}/other", {"a": torch.ones(3)}, step=1)
    with pytest.raises(CheckpointNotFound):
        remove_as_file(place)
    assert open_bytes(place).get("thesis.txt", 9) == b"years" and list(relight.load(f"{place}/other")) == ["a"]
