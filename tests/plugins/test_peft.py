"""PEFT: an adapter on a frozen model, killed and resumed, and exported. The frozen parts are not stored in each save."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from killing import killed_and_resumed

import relight

pytest.importorskip("peft", reason="peft is not installed: make plugins")

PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "transformers.md"
BASE_BYTES = 4 * (4096 * 256 + 2 * 12 * 256 * 256)
"""Bytes of the frozen matrices of the job's model, at least."""
WAYS = {
    "model": "LoRA, the whole model as component: its frozen base is stored twice, not in each of 12 saves (`compact=True`)",
    "adapter": "LoRA, the adapter alone as component: no save has the frozen base",
    "trainer": "LoRA, with Trainer: the frozen base is stored twice, not in each of 12 saves (`compact=True`)",
}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            way,
            marks=pytest.mark.shows(
                tool="PEFT", package="peft", feature="killed and resumed", outcome="exact", why=what
            ),
        )
        for way, what in WAYS.items()
    ],
)
def test_an_adapter_resumes_to_the_bit(way: str, tmp_path: Path) -> None:
    """Repeat the uninterrupted run's losses after two kills. The frozen base is stored twice, or never with the adapter alone."""
    killed_and_resumed(["-m", "tests.works_with.peft_job", way], [17, 43], tmp_path)
    stored = sum(path.stat().st_size for path in (tmp_path / "straight").rglob("*") if path.is_file())
    bounds = (0, BASE_BYTES // 4) if way == "adapter" else (BASE_BYTES, 3 * BASE_BYTES)
    assert bounds[0] < stored < bounds[1]


def test_an_adapter_on_weights_of_four_bits_resumes_to_the_bit(tmp_path: Path) -> None:
    """QLoRA with the Trainer: the losses after two kills are those of the uninterrupted run."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make plugins")
    killed_and_resumed(["-m", "tests.works_with.peft_job", "qlora"], [17, 43], tmp_path)


def test_the_best_adapter_is_exported_as_a_folder(tmp_path: Path) -> None:
    """The command of the page writes a file with the names that PEFT reads: its folder loads with the checkpoint's weights."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def base() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    model = get_peft_model(base(), LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    relight.save(tmp_path / "runs" / "demo", {"model": model}, step=3)
    folder = tmp_path / "adapter"
    model.peft_config["default"].save_pretrained(folder)
    text = next(line for line in PAGE.read_text().splitlines() if line.startswith("relight export"))
    command = shlex.split(text.replace("store/run@best", "runs/demo@latest"))
    subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, check=True)
    loaded = PeftModel.from_pretrained(base(), folder)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
