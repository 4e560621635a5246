"""Generators in dictionaries of ``torch.save`` are recognised by value, restored, and never mistaken for another's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

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
    """Draw one number from each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def states() -> dict[str, Any]:
    """Return the states of all generators, by kind."""
    return {"cpu": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def flat(states: dict[str, Any]) -> dict[str, Any]:
    """Return the states in the form that most scripts write."""
    return {
        "rng_state": states["cpu"],
        "cuda_rng_state": CUDA,
        "numpy_rng_state": states["numpy"],
        "python_rng_state": states["python"],
    }


SHAPES = {
    "flat": flat,
    "other names": lambda saved: {
        "torch_rng_state": saved["cpu"], "cuda_rng_state_all": [CUDA, CUDA], "np_random_state": saved["numpy"], "random_state": saved["python"],
    },
    "nested": lambda saved: {"rng_state": {"torch": saved["cpu"], "cuda": [CUDA], "numpy": saved["numpy"], "python": saved["python"]}},
    "nested twice": lambda saved: {"rng": {"cpu": {"torch": saved["cpu"]}, "np": saved["numpy"], "py": saved["python"], "cuda": None}},
    "plural": lambda saved: {"random_states": {"cpu": saved["cpu"], "cuda_states": [CUDA], "numpy": saved["numpy"], "python": saved["python"]}},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_the_generators_of_a_script_are_restored(tmp_path: Path, shape: str) -> None:
    """Generators in a script's own dictionary continue where they stopped, whatever their keys are."""
    model = torch.nn.Linear(2, 2)
    seed(5)
    draws()
    torch.save({"model": model.state_dict(), "step": 9, **SHAPES[shape](states())}, tmp_path / "old.pt")
    wanted = draws()
    detected = detect(tmp_path / "old.pt")
    assert (
        detected.parts["rng"].startswith("rng")
        and detected.left_out == []
        and detected.kind == "torch"
        and detected.step == 9
    )
    import_checkpoint(detected, open_bytes(str(tmp_path / "runs")), "mine")
    seed(1)
    with relight.Checkpointer(tmp_path / "runs" / "mine", model=model, background=False) as ckpt:
        assert ckpt.restore() == 10
        assert draws() == wanted


def test_a_generator_without_a_state_is_left_alone_and_noted(tmp_path: Path) -> None:
    """Only generators in the file are restored. The missing ones are named in the reasons why a resume is not exact."""
    model = torch.nn.Linear(2, 2)
    seed(5)
    torch.save({"model": model.state_dict(), "rng_state": torch.get_rng_state()}, tmp_path / "old.pt")
    wanted = float(torch.rand(()))
    detected = detect(tmp_path / "old.pt")
    assert any("Python's, numpy's" in note for note in detected.notes)
    import_checkpoint(detected, open_bytes(str(tmp_path / "runs")), "mine")
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
def test_states_of_other_generators_are_kept_as_values(tmp_path: Path, key: str, value: object) -> None:
    """States of several ranks, of a sampler or of another size are kept as values, and replace no generator."""
    torch.save({"model": torch.nn.Linear(2, 2).state_dict(), key: value}, tmp_path / "old.pt")
    detected = detect(tmp_path / "old.pt")
    assert "rng" not in detected.parts and key in detected.parts["imported"]


def test_generators_survive_a_dictionary_within_the_dictionary(tmp_path: Path) -> None:
    """A generator's state next to a nested dictionary of components is not lost."""
    torch.save(
        {"state": {"model": torch.nn.Linear(2, 2).state_dict(), "step": 3}, "rng_state": torch.get_rng_state()},
        tmp_path / "old.pt",
    )
    assert {"model", "rng"} <= detect(tmp_path / "old.pt").parts.keys()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("with_others", [True, False])
def test_the_generators_in_a_dcp_directory_are_restored(tmp_path: Path, with_others: bool) -> None:
    """A dict ``rng`` of tensors is no module, and nothing of it is dropped without a word."""
    model = torch.nn.Linear(2, 2)
    seed(5)
    saved = states()
    rng = {"torch": saved["cpu"], **({"numpy": saved["numpy"], "python": saved["python"]} if with_others else {})}
    dcp.save({"model": model.state_dict(), "rng": rng, "rank": {"of": torch.ones(3)}}, checkpoint_id=tmp_path / "old")
    wanted = draws()
    detected = detect(tmp_path / "old")
    assert detected.parts["rng"].startswith("rng") and "imported" in detected.parts
    import_checkpoint(detected, open_bytes(str(tmp_path / "runs")), "mine", step=9)
    assert torch.equal(relight.load(tmp_path / "runs" / "mine")["imported"]["rank"]["of"], torch.ones(3))
    seed(1)
    with relight.Checkpointer(tmp_path / "runs" / "mine", model=model, background=False) as ckpt:
        ckpt.restore()
        assert draws()[0 if with_others else 2 :] == wanted[0 if with_others else 2 :]
