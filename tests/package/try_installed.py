"""Run by ``make package`` in a venv that has only torch, the built wheel and what that asks for: does it work as installed?"""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.metadata import entry_points, metadata
from importlib.resources import files
from pathlib import Path

JOB = """
import os, signal, sys, torch, relight
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = relight.Checkpointer("runs/" + sys.argv[1], model=model, optimizer=optimizer, save=relight.every(steps=2))
for step in range(ckpt.restore(), 12):
    loss = (model(torch.randn(4, 8)) - 1).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    ckpt.step(step, loss=loss)
    if step == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
ckpt.close()
print(sum(p.double().sum().item() for p in model.parameters()).hex())
"""


def command(venv: Path, *arguments: str, code: int = 0) -> str:
    """Run ``relight``, check its exit code, and return its output."""
    done = subprocess.run(
        [venv / "bin" / "relight", *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout


def job(run: str, killed_at: int) -> subprocess.CompletedProcess[str]:
    """A training that may be killed after a step."""
    return subprocess.run(
        [sys.executable, "-I", "-c", JOB, run, str(killed_at)], capture_output=True, text=True, check=False, timeout=300
    )


def main() -> None:
    """Check each public name, the entry point, a killed run that ends with the same bits, and commands on that run."""
    import relight

    assert "site-packages" in relight.__file__, f"not the wheel: {relight.__file__}"
    assert files("relight").joinpath("py.typed").is_file()
    for name in relight.__all__:
        getattr(relight, name)
    assert [entry.value for entry in entry_points(group="console_scripts", name="relight")] == ["relight.cli:main"]
    headers = metadata("relight")
    assert (headers["License-Expression"], headers["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    venv = Path(sys.argv[1])
    assert (
        command(venv, "--version").splitlines()[0]
        == f"relight {relight.__version__}"
        == f"relight {headers['Version']}"
    )
    print(f"all {len(relight.__all__)} public names, relight --version, the licence as metadata")
    whole, killed = job("whole", -1), job("killed", 6)
    assert whole.returncode == 0, whole.stderr
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = job("killed", -1)
    assert (again.returncode, again.stdout) == (0, whole.stdout), (again.stdout, again.stderr, whole.stdout)
    assert "killed" in command(venv, "ls", "runs")
    command(venv, "verify", "runs/killed")
    command(venv, "config", "completion", "bash")
    print("a run killed with SIGKILL ends with the bits of one that was not; ls, verify and completion work")
    done = subprocess.run(
        [venv / "bin" / "relight", "doctor", "runs"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    print(f"relight doctor: {done.stdout.strip().splitlines()[-1]}")


main()
