"""A restore, a load and an import that have no memory raise ``NoMemory``, which names the tensor and its bytes.

It began with torch's own error, "DefaultCPUAllocator: can't allocate memory", out of ``restore()``: it named no tensor. The address space is
limited in processes of their own.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import relight
from relight.capture.rebuild import build
from relight.doctor.explain import explain
from relight.errors import NoMemory, UnsafeContent, is_no_memory, memory_refusals, no_memory
from relight.format import Leaf
from relight.store import open_bytes
from relight.supervise.classify import classify
from relight.supervise.facts import FailureEvidence, Worker

REFUSED = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 536870912 bytes. "
    "Error code 12 (Cannot allocate memory)"
)
MIB = 1 << 20
LIMITED = """
import resource, sys, torch, relight
from torch import nn

def limit(mib):
    '''Leave that many MiB of address space.'''
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + mib * 2**20,) * 2)

def model(): return nn.ModuleDict({"large": nn.Linear(4096, 8192, bias=False), "small": nn.Linear(8, 8)})
"""
SAVED = (
    LIMITED
    + """
m = model(); o = torch.optim.Adam(m.parameters())
m["large"].weight.grad = torch.ones_like(m["large"].weight); o.step(); o.zero_grad()
with relight.Checkpointer(sys.argv[1] + "/run", model=m, optimizer=o, background=False, save=relight.every(steps=1)) as ckpt:
    ckpt.restore(); ckpt.step(0)
torch.save({"large": m["large"].weight.detach()}, sys.argv[1] + ".pt")
"""
)
WAYS = {
    "load": 'relight.load(sys.argv[1] + "/run")',
    "restore": """
m = model(); o = torch.optim.Adam(m.parameters()); ckpt = relight.Checkpointer(sys.argv[1] + "/run", model=m, optimizer=o, background=False)
ckpt._ensure_started(); limit(100); ckpt.restore()
""",
    "buffers": """
m = model(); ckpt = relight.Checkpointer(sys.argv[1] + "/run", model=m, background=False)
ckpt._ensure_started(); limit(12); ckpt.restore(only=["model/*"], strict=False)
""",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store with one checkpoint: a weight of 128 MiB, and as much for each of Adam's two moments."""
    place = str(tmp_path_factory.mktemp("memory") / "store")
    done = _in_a_process(SAVED, place)
    assert done.returncode == 0, done.stderr
    return place


def _in_a_process(code: str, place: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), place], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("way", WAYS)
def test_lack_of_memory_has_an_error_that_names_what_needs_it(store: str, way: str) -> None:
    """The error has the tensor, its bytes and a way out, and the supervisor takes it for lack of memory."""
    limit = "import relight.api\nlimit(100)\n" if way == "load" else ""
    done = _in_a_process(f"{LIMITED}{limit}{WAYS[way]}", store)
    words = done.stderr.splitlines()
    error = next((line for line in words if line.startswith("relight.errors.NoMemory: ")), "")
    assert error, done.stderr[-3000:]
    assert ("a buffer of" if way == "buffers" else "a tensor of 134 MB") in error, error
    assert any(name in error for name in ("model/large.weight", "exp_avg")), error
    assert any("only=[" in line and "mmap=True" in line for line in words[-3:])
    failure = classify(FailureEvidence((Worker(0, 1, died_at=1.0, tail=tuple(words)),)))
    assert failure.kind == "memory" and "has no memory for what it reads" in str(explain(error))


def test_a_mapped_load_needs_no_memory_for_the_tensors(store: str) -> None:
    """What the hint promises: a file is mapped, so that only address space is needed."""
    done = _in_a_process(
        f'{LIMITED}import relight.api\nlimit(600)\nassert relight.load(sys.argv[1] + "/run", mmap=True)["model"]', store
    )
    assert done.returncode == 0, done.stderr


def test_a_device_s_refusal_is_still_known_as_such() -> None:
    """Its own words follow, so that the supervisor may split micro-batches."""
    made = no_memory(
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"),
        "a tensor of 2,147,483,648 bytes",
        "a/b",
    )
    message = f"relight.errors.NoMemory: {made}"
    assert classify(FailureEvidence((Worker(0, 1, died_at=1.0, error=message),))).kind == "device memory"
    assert message.splitlines()[0].endswith("CUDA out of memory. Tried to allocate 2.00 GiB [a/b]")


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (REFUSED, True), (MemoryError(), True), (OSError(12, "Cannot allocate memory"), True), (OSError(28, "No space left on device"), False),
        (RuntimeError("could not create a primitive"), True), (RuntimeError("shape mismatch"), False), (ValueError("out of memory"), False),
    ],
)  # fmt: skip
def test_which_errors_are_refusals_of_memory(error: Exception, refused: bool) -> None:
    """By type, number or words. Other errors pass unchanged."""
    assert is_no_memory(error) is refused
    with pytest.raises(NoMemory if refused else type(error)) as raised, memory_refusals("reading", "x"):
        raise error
    assert not refused or (raised.value.__cause__ is error and "reading" in str(raised.value))


def test_an_intact_value_is_not_damaged_because_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore of ``latest`` would otherwise skip the checkpoint and resume from an older one."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise REFUSED

    memory: Any = type("Memory", (), {"get": lambda self, index: torch.zeros(2)})()
    thunk = build(Leaf("expanded", (0,), (2, 2)), memory, "model/w")
    with pytest.raises(UnsafeContent):
        thunk()
    monkeypatch.setattr("relight.capture.rebuild._value", refuse)
    with pytest.raises(NoMemory, match="no memory for a value of kind expanded") as raised:
        thunk()
    assert raised.value.where == "model/w" and "DefaultCPUAllocator" in str(raised.value)


def test_an_import_without_memory_names_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of the import are refused."""
    module = importlib.import_module("relight.importers.import_checkpoint")

    def refuse(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(module, "plant", refuse)
    source: Any = SimpleNamespace(path="old.pt", step=1, content=None, files=SimpleNamespace(name="old.pt"))
    with pytest.raises(NoMemory, match=r"the import of old\.pt"):
        module.import_checkpoint(source, open_bytes(tmp_path / "store"), "run")


def test_the_error_is_public() -> None:
    """Scripts can catch it."""
    assert relight.NoMemory is NoMemory
