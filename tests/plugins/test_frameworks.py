"""What all plug-ins have in common, with or without any framework."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import relight
from relight.errors import CheckpointNotFound, ConfigError, IncompatibleState
from relight.interop.frameworks import loaders_in, needed, numbers, read_as_file, write_as_file

PLUGINS = {
    "lightning": "lightning", "transformers": "transformers", "accelerate": "accelerate", "deepspeed_engine": "deepspeed",
    "megatron": "megatron", "torchtitan": "torchtitan", "ray_train": "ray", "torchft": "torchft",
}  # fmt: skip


def test_a_framework_that_is_not_there_is_told_of() -> None:
    """Importing a plug-in where its framework cannot be imported says what to install, whatever else is there."""
    script = (
        "import importlib, sys\n"
        "from relight.errors import ConfigError\n"
        f"for plugin, framework in {PLUGINS!r}.items():\n"
        "    sys.modules[framework] = None\n"
        "    try:\n"
        "        importlib.import_module('relight.interop.' + plugin)\n"
        "    except ConfigError as error:\n"
        "        print(plugin, error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    told = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert told.keys() == PLUGINS.keys() and all("pip install" in hint for hint in told.values()), done.stdout


def test_needed_gives_the_module() -> None:
    """What is there is imported; what is not is a ``ConfigError``."""
    assert needed("json", "nothing").loads("1") == 1
    with pytest.raises(ConfigError, match="no_such_framework"):
        needed("no_such_framework", "no-such-framework")


def test_only_numbers_are_metrics() -> None:
    """Texts, vectors and names that ``step`` has for itself are left out; tensors stay unread."""
    loss = torch.tensor(2.5)
    found = numbers({"loss": loss, "n": 3, "text": "x", "many": torch.zeros(2), "step": 1, "z": torch.tensor(1j)})
    assert list(found) == ["loss", "n"] and found["loss"] is loss


def test_a_file_is_written_over(tmp_path) -> None:
    """As with a file, what was written last is there, alone, whatever step it is of."""
    for step in (5, 3):
        write_as_file(tmp_path / "last.ckpt", {"w": torch.full((3,), float(step))}, step, {})
        assert read_as_file(tmp_path / "last.ckpt", {})["w"].tolist() == [step] * 3
    assert [one.step for one in relight.open(tmp_path / "last.ckpt" / "run").checkpoints()] == [3]


def test_a_file_of_others_is_told_apart(tmp_path) -> None:
    """A checkpoint that torch has written, or a run that is something else, is named; one that is not there is not found."""
    (tmp_path / "torch.ckpt").write_bytes(b"PK")
    relight.save(tmp_path / "other.ckpt" / "run", {"model": {"w": 1}}, step=1)
    for name, kind in (("torch.ckpt", IncompatibleState), ("other.ckpt", IncompatibleState), ("none.ckpt", CheckpointNotFound)):
        with pytest.raises(kind):
            read_as_file(tmp_path / name, {})


def test_loaders_are_found_in_containers() -> None:
    """In dicts and lists, in their order; what has no position to tell is left alone."""
    one, two = (torch.utils.data.DataLoader([1, 2, 3]) for _ in range(2))
    assert loaders_in({"a": one, "b": [two, range(3)]}) == {"data_0": one, "data_1": two}
