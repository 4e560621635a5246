"""Record the software and settings under which a state was made, and which differences can break exactness."""

from __future__ import annotations

import os
import platform
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from operator import ne
from typing import Any

import torch

from relight.capture.accelerator import device_names
from relight.capture.revision import code_revision, is_other_code
from relight.comm import new_threads
from relight.observe.masking import mask_arguments
from relight.version import VERSION

_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "PYTHONHASHSEED",
    "CUBLAS_WORKSPACE_CONFIG",
    "ATEN_CPU_CAPABILITY",
)
_EXACT = {
    "torch": "torch's version",
    "numpy": "numpy's version",
    "python": "Python's version",
    "cuda": "CUDA's version",
    "rocm": "ROCm's version",
    "devices": "the devices",
    "machine": "the processor's architecture",
    "cpu_capability": "the processor's instruction set",
    "threads": "the number of threads (sums are split differently)",
    "interop_threads": "the number of interop threads",
    "deterministic_algorithms": "use_deterministic_algorithms",
    "cudnn_deterministic": "cudnn.deterministic",
    "cudnn_benchmark": "cudnn.benchmark",
    "matmul_precision": "the precision of matrix products",
    "tf32": "TF32",
    "default_dtype": "the default dtype",
    "code": "the code's revision",
    "variables": "environment variables that change arithmetic",
}


_CODE_S = 5.0
"""Seconds to wait for git, at most."""


def environment() -> dict[str, Any]:
    """Return versions, devices, determinism flags, thread counts, code revision and arguments: JSON-able. May take
    some ms, for git."""
    return environment_soon()()


def environment_soon() -> Callable[[], dict[str, Any]]:
    """Record the present ``environment``, and return a function that returns it.

    git, which in a large repository takes longer than a restore, runs in a thread meanwhile. The function's first call
    waits for git: ``_CODE_S`` seconds at most. Thread-safe.
    """
    numpy = sys.modules.get("numpy")
    code: Future[dict[str, Any] | None] = Future()
    if not new_threads.start(
        threading.Thread(target=lambda: code.set_result(code_revision()), name="relight-code", daemon=True)
    ):
        code.set_result(None)  # unknown; git itself would need a process
    now: dict[str, Any] = {
        "relight": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": getattr(numpy, "__version__", None),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "devices": device_names(),
        "host": socket.gethostname()[:64],
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
        "default_dtype": str(torch.get_default_dtype()),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "argv": [argument[:1000] for argument in mask_arguments(sys.argv[:100])],
    }

    def complete() -> dict[str, Any]:
        if "code" not in now:
            with suppress(TimeoutError):
                now["code"] = code.result(_CODE_S)
        return {"code": None} | now

    return complete


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a phrase for each difference that can break exactness."""
    phrases = []
    for key, name in _EXACT.items():
        differs = is_other_code if key == "code" else ne
        if key in saved and key in now and differs(saved[key], now[key]):
            phrases.append(f"{name} was {saved[key]}, is {now[key]}")
    return phrases
