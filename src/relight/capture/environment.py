"""Under what software and settings a state was made, and which differences can break exactness."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch

from relight.format import hexdigest
from relight.observe.masking import mask_arguments
from relight.version import VERSION

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "ATEN_CPU_CAPABILITY")
_EXACT = {
    "torch": "torch's version",
    "numpy": "numpy's version",
    "python": "Python's version",
    "cuda": "CUDA's version",
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


_GIT_S = 2.0


def environment() -> dict[str, Any]:
    """Versions, devices, determinism flags, thread counts, code revision, arguments: JSON-able. May take some ms, for git."""
    return environment_soon()()


def environment_soon() -> Callable[[], dict[str, Any]]:
    """``environment`` as it is now; git, which in a large repository takes longer than a restore, answers in a thread meanwhile. Calling
    what is returned gives it, the first time once git has answered: some seconds at most. Any thread."""
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.is_available()
    code: Future[dict[str, Any] | None] = Future()
    threading.Thread(target=lambda: code.set_result(_code()), name="relight-code", daemon=True).start()
    now: dict[str, Any] = {
        "relight": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": getattr(numpy, "__version__", None),
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
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
                now["code"] = code.result(2 * _GIT_S + 1)
        return {"code": None} | now

    return complete


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A phrase for each difference that can break exactness."""
    found = []
    for key, name in _EXACT.items():
        if key in saved and key in now and saved[key] != now[key]:
            found.append(f"{name} was {saved[key]}, is {now[key]}")
    return found


def _code() -> dict[str, Any] | None:
    """The commit of the script's repository and a digest of what was changed since; None outside one."""
    folder = os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv and sys.argv[0] else os.getcwd()

    def git(*arguments: str) -> bytes | None:
        try:
            done = subprocess.run(
                ["git", "-C", folder, *arguments], capture_output=True, timeout=_GIT_S, check=False, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if not commit:
        return None
    changes = git("diff", "HEAD")
    return {"commit": commit.decode(errors="replace").strip(), "changes": hexdigest(changes)[:16] if changes else None}
