"""A simulated accelerator, ``sim``: a torch back end of two devices, built from ``simulated.cpp`` when it is first used.

``python -m tests.device.simulated ARGUMENTS`` runs Python with it. ``load()`` registers it. Then ``torch.device("sim:1")``, ``torch.sim`` and ``torch.accelerator`` work as for a real one.

What it models, as CUDA behaves:

- Host code that touches device memory outside a copy or kernel ends the process with SIGSEGV.
- Kernels and copies are queued on streams, and run later. ``adversary(seed, mode)`` chooses the order: ``"lazy"`` runs
  only what a call waits for, ``"eager"`` runs everything at once, ``"mixed"`` draws. Equal seeds give equal orders.
- A copy from or to memory that is not page-locked waits for the stream. Page-locked memory is torch's own
  (``pin_memory=True``) or registered (``host_register``). A registration keeps the pages that were there.
- Memory that is freed belongs to its stream at once, and is overwritten.
- ``sleep(device, seconds)`` is a kernel that takes its time.
- ``fail_kernel(n)``, ``fail_allocation(n)``, ``set_memory_limit``, ``set_locked_limit`` and ``lose`` inject failures.
  The error of a kernel is reported by later calls.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "sim"
SOURCE = Path(__file__).with_suffix(".cpp")
ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "device"


def environment() -> dict[str, str]:
    """Return this process's environment for a process in which ``import torch`` registers the device, by torch's entry point."""
    paths = [str(ROOT / "src"), str(ROOT), str(Path(__file__).parent / "site")]
    return {**os.environ, "TESTS_DEVICE": NAME, "PYTHONPATH": os.pathsep.join(paths)}


def why_not() -> str | None:
    """Return why the device cannot be built here; None if it can."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        return "the simulated accelerator needs a C++ compiler (c++ or g++)"
    if shutil.which("ninja") is None:
        return "the simulated accelerator needs ninja"
    return None


@functools.cache
def load() -> Any:
    """Build the extension if its source has changed (about a minute), register the device, and return its module ``torch.sim``."""
    from torch.utils.cpp_extension import load as build

    BUILD.mkdir(parents=True, exist_ok=True)
    native = build(
        "relight_simulated_device",
        [str(SOURCE)],
        build_directory=str(BUILD),
        extra_cflags=["-O1", "-g0", "-Wno-unused-function"],
    )
    torch.utils.rename_privateuse1_backend(NAME)
    module = _device_module(native)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return module


def _index(device: Any) -> int:
    if device is None:
        return int(torch.sim.current_device())  # type: ignore[attr-defined]
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.sim.current_device()) if index is None else index  # type: ignore[attr-defined]


def _device_module(native: Any) -> Any:
    """Return the module ``torch.sim``: the functions that torch expects of a device's module, and those of the simulation."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update({name: function for name, function in vars(native).items() if not name.startswith("_")})

    def is_available() -> bool:
        return True

    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(device: Any = None) -> None:
        native.synchronize(_index(device))

    def manual_seed(seed: int) -> None:
        native.set_rng(native.current_device(), seed % (1 << 64), 0)

    def manual_seed_all(seed: int) -> None:
        for index in range(native.device_count()):
            native.set_rng(index, seed % (1 << 64), 0)

    def get_rng_state(device: Any = None) -> torch.Tensor:
        words = [word - (1 << 64) if word >= 1 << 63 else word for word in native.rng(_index(device))]
        return torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.uint8)

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        native.set_rng(_index(device), *(word % (1 << 64) for word in state.cpu().view(torch.int64).tolist()))

    def get_rng_state_all() -> list[torch.Tensor]:
        return [get_rng_state(index) for index in range(native.device_count())]

    def stream(device: Any = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(device=f"{NAME}:{_index(device)}", priority=priority)

    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(torch.device(NAME, _index(device)))

    def get_device_name(device: Any = None) -> str:
        return f"simulated accelerator {_index(device)}"

    @contextlib.contextmanager
    def use_stream(stream: torch.Stream) -> Iterator[None]:
        with stream:
            yield

    @contextlib.contextmanager
    def use_device(device: Any) -> Iterator[None]:
        before = native.current_device()
        native.set_device(_index(device))
        try:
            yield
        finally:
            native.set_device(before)

    module.is_initialized = module.is_available = is_available
    module._is_in_bad_fork = native.forked
    module._lazy_init = lambda: None
    for function in (
        get_amp_supported_dtype, synchronize, manual_seed, manual_seed_all, get_rng_state, set_rng_state, get_rng_state_all,
        current_stream, get_device_name,
    ):  # fmt: skip
        setattr(module, function.__name__, function)
    module.Stream, module.stream, module.device, module.Event = (
        stream,
        use_stream,
        use_device,
        functools.partial(torch.Event, NAME),
    )
    return module


if __name__ == "__main__":
    if why_not() is not None:
        sys.exit(why_not())
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
