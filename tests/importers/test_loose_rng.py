"""Generators in dictionaries of ``torch.save``: recognised by value, restored, and never mistaken for another's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import relight
from relight.importers import detect, import_checkpoint
from relight.store import open_bytes

CUDA = torch.zeros(16, dtype=torch.uint8)


def seed(number: int) -> None:
    """Seed the three generators of this process."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draws() -> tuple[float, float, float]:
    """One number of each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def states() -> dict[str, Any]:
    """All of them, by the kind."""
    return {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def flat(one: dict[str, Any]) -> dict[str, Any]:
    """As most scripts write them."""
    return {"rng_state": one["cpu"], "cuda_rng_state": CUDA, "numpy_rng_state": one["numpy"], "python_rng_state": one["python"]}


SHAPES = {
    "flat": flat,
    "other names": lambda one: {
        "torch_rng_state": one["cpu"], "cuda_rng_state_all": [CUDA, CUDA], "np_random_state": one["numpy"], "random_state": one["python"],
    },
    "nested": lambda one: {"rng_state": {"torch": one["cpu"], "cuda": [CUDA], "numpy": one["numpy"], "python": one["python"]}},
    "nested twice": lambda one: {"rng": {"cpu": {"torch": one["cpu"]}, "np": one["numpy"], "py": one["python"], "cuda": None}},
    "plural": lambda one: {"random_states": {"cpu": one["cpu"], "cuda_states": [CUDA], "numpy": one["numpy"], "python": one["python"]}},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_the_generators_of_a_script_are_restored(tmp_path: Path, shape: str) -> None:
    """Generators in a script's own dictionary continue where they were, whatever the dictionary calls them."""
    model = torch.nn.Linear(2, 2)
    seed(5)
    draws()
    torch.save({"model": model.state_dict(), "step": 9, **SHAPES[shape](states())}, tmp_path / "old.pt")
    wanted = draws()
    found = detect(tmp_path / "old.pt")
    assert found.parts["rng"].startswith("rng") and found.left_out == [] and found.kind == "torch" and found.step == 9
    import_checkpoint(found, open_bytes(str(tmp_path / "runs")), "mine")
    seed(1)
    with relight.Checkpointer(tmp_path / "runs" / "mine", model=model, background=False) as ckpt:
        assert ckpt.restore() == 10
        assert draws() == wanted


def test_a_generator_without_a_state_is_left_alone_and_noted(tmp_path: Path) -> None:
    """Only what the file has is set; which generators it lacks is in the reasons why a resume is not exact."""
    model = torch.nn.Linear(2, 2)
    seed(5)
    torch.save({"model": model.state_dict(), "rng_state": torch.get_rng_state()}, tmp_path / "old.pt")
    wanted = float(torch.rand(()))
    found = detect(tmp_path / "old.pt")
    assert any("Python's, numpy's" in note for note in found.notes)
    import_checkpoint(found, open_bytes(str(tmp_path / "runs")), "mine")
    seed(1)
    with relight.Checkpointer(tmp_path / "runs" / "mine", model=model, background=False) as ckpt:
        ckpt.restore()
        assert float(torch.rand(())) == wanted
        random.seed(1)
        assert random.random() == random.Random(1).random()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rng_state", torch.zeros(16, dtype=torch.uint8)),
        ("rng_state", torch.zeros(5056)),
        ("rng_states", [torch.get_rng_state(), torch.get_rng_state()]),
        ("sampler_rng_state", torch.get_rng_state()),
        ("generator", torch.get_rng_state()),
        ("seed", 17),
        ("random_state", (3, (1, 2, 3), None)),
    ],
)
def test_what_is_no_state_of_this_process_is_kept(tmp_path: Path, key: str, value: object) -> None:
    """States of several ranks, of a sampler, of another size: kept as values, so that none replaces the process's own."""
    torch.save({"model": torch.nn.Linear(2, 2).state_dict(), key: value}, tmp_path / "old.pt")
    found = detect(tmp_path / "old.pt")
    assert "rng" not in found.parts and key in found.parts["imported"]


def test_generators_survive_a_dictionary_within_the_dictionary(tmp_path: Path) -> None:
    """A state next to a nested dictionary of components is not lost with the outer one."""
    torch.save({"state": {"model": torch.nn.Linear(2, 2).state_dict(), "step": 3}, "rng_state": torch.get_rng_state()}, tmp_path / "old.pt")
    assert {"model", "rng"} <= detect(tmp_path / "old.pt").parts.keys()
