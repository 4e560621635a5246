"""``tests/children/sitecustomize.py``: what it changes in the interpreters that tests start, and what it must not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.children import sitecustomize

HERE = str(Path(sitecustomize.__file__).parent)
TRAINING = """
import gc, json, sys
import torch
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
losses = []
for kind in (torch.optim.SGD, torch.optim.AdamW):
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
before = "torch._dynamo" in sys.modules
compiled = torch.compile(model, backend="eager")
losses.append(compiled(torch.ones(2, 3)).sum().item())
optimizer.zero_grad()
compiled(torch.ones(2, 3)).sum().backward()
optimizer.step()
print(json.dumps({
    "dynamo": [before, "torch._dynamo" in sys.modules], "losses": losses, "weights": model.weight.tolist(),
    "collects": gc.isenabled(), "grad": torch.is_grad_enabled(), "loader": type(torch.__spec__.loader).__name__,
    "step": [torch.optim.AdamW.step.__qualname__, torch.optim.Optimizer.zero_grad.__name__],
}))
"""


def child(*flags: str, source: str = TRAINING, **environment: str) -> str:
    """Run ``source`` in a new interpreter, and return its output."""
    command = [sys.executable, *flags, "-c", source]
    changed = {**os.environ, "TESTS_PLAIN_TORCH": "", **environment}
    return subprocess.run(command, env=changed, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_child_trains_alike_and_imports_dynamo_only_to_compile() -> None:
    """Losses, weights, names and modes equal those of a plain interpreter. Only that one trains with torch._dynamo.

    If a release of torch imports torch._dynamo elsewhere, this test fails: ``tests/children`` has lost its use.
    """
    changed, plain = json.loads(child()), json.loads(child(TESTS_PLAIN_TORCH="1"))
    assert changed.pop("dynamo") == [False, True]
    assert plain.pop("dynamo") == [True, True], "torch is cheaper by itself now: remove tests/children"
    assert changed == plain


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_step_that_fails_restores_the_grad_mode(differentiable: bool) -> None:
    """A step runs in the grad mode that its optimizer has. After an error, the former mode is back."""
    source = f"""
import sys
import torch
from torch.optim.optimizer import _use_grad_for_differentiable
class Failing(torch.optim.SGD):
    @_use_grad_for_differentiable
    def step(self):
        assert torch.is_grad_enabled() is {differentiable}
        raise ValueError
optimizer = Failing([torch.nn.Parameter(torch.zeros(1))], 0.1, differentiable={differentiable})
for mode in (False, True):
    torch.set_grad_enabled(mode)
    try:
        optimizer.step()
    except ValueError:
        print(torch.is_grad_enabled() is mode, "torch._dynamo" in sys.modules)
"""
    assert child(source=source).split() == ["True", "False"] * 2


def test_the_next_sitecustomize_runs_too(tmp_path: Path) -> None:
    """A ``sitecustomize`` of the machine, such as one for coverage, runs in each child as without this one."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.next_one = __file__\n")
    path = os.pathsep.join([HERE, str(tmp_path)])
    output = child(source="import sys; print(sys.next_one, sys.meta_path[0].__name__)", PYTHONPATH=path)
    assert output.split()[0].startswith(str(tmp_path)) or "TorchFinder" in output, output
    assert output.split() == [str(tmp_path / "sitecustomize.py"), "TorchFinder"]


def test_an_isolated_child_starts_as_a_users_process_does() -> None:
    """An interpreter that ignores the environment has none of the changes; each other has them once."""
    source = "import sys; print(sum(getattr(one, '__name__', '') == 'TorchFinder' for one in sys.meta_path))"
    assert [child(*flags, source=source).strip() for flags in ([], ["-P"], ["-E"], ["-I"])] == ["1", "1", "0", "0"]
