"""An exception that no code catches, outside a ``with`` block."""

from __future__ import annotations

from pathlib import Path

from tests.scripts import run_script

import relight

SCRIPT = """
import sys, torch, relight
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = relight.Checkpointer(sys.argv[1], model=model, optimizer=optimizer, save=relight.every(steps=100))
for step in range(ckpt.restore(), 6):
    if step == 4:
        raise ValueError("a batch is broken")
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    ckpt.step(step)
"""


def test_the_last_step_is_saved_without_a_with_block(tmp_path: Path) -> None:
    """The step before the exception is saved, its traceback is printed, and the script exits with 1."""
    done = run_script(SCRIPT, str(tmp_path / "s" / "run"))
    assert done.returncode == 1 and "ValueError: a batch is broken" in done.stderr
    (saved,) = relight.open(tmp_path / "s" / "run").checkpoints()
    assert saved.step == 3 and saved.body.reason.startswith("exception")
