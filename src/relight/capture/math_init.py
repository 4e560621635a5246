"""The first call of a function is made by one thread, so that its result is that of every later one.

torch computes elementary functions of CPU tensors by the processor vendor's vector library, which picks a function's implementation when
it is first called. If that is by several threads at once, which is how torch computes on anything but small tensors, some of them may
compute their share by another implementation, that one time: on two loaded cores the last bits of a process's first ``tanh`` came out
otherwise in 3 of 1,199 processes, those of ``exp``, ``erf`` and ``sin`` in 1 of 306 each, with nothing of ours in the process. A restarted
run makes every first call again, so a resume would not be to the bit.
"""

from __future__ import annotations

import contextlib

import torch

_FUNCTIONS = (
    "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "lgamma", "log", "log10",
    "log1p", "log2", "round", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Those of one argument that torch hands to a vector library, or may."""
_FEW = 64
"""Elements: some full vectors, and too few for torch to spread over threads."""
_done = False


def warm_up_vector_math() -> None:
    """Call every elementary function once for ``float32`` and ``float64``, in this thread. Random states and settings are left alone.
    Takes about a millisecond, once in a process; later calls do nothing."""
    global _done
    if _done:
        return
    _done = True
    with torch.no_grad(), contextlib.suppress(MemoryError, RuntimeError):  # no memory for them: training makes these calls, or ends by them
        for dtype in (torch.float32, torch.float64):
            some = torch.full((_FEW,), 0.5, dtype=dtype, device="cpu")
            for name in _FUNCTIONS:
                getattr(torch, name)(some)
            torch.nn.functional.gelu(some)
            torch.softmax(some, 0)
