"""Call elementary functions once in one thread, so that their first results equal all later ones.

torch computes elementary functions of CPU tensors with the processor vendor's vector library, which picks a function's
implementation at its first call. torch uses several threads for all but small tensors. If several threads make the
first call at once, some of them may use another implementation, that one time. This also occurs without Relight: on two
loaded cores the last bits of a process's first ``tanh`` differed in 3 of 1,199 processes. Those of ``exp``, ``erf`` and
``sin`` differed in 1 of 306 each. A restarted run makes every first call again, so a resume would not be bit-exact.
"""

from __future__ import annotations

import contextlib

import torch

_FUNCTIONS = (
    "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "lgamma", "log", "log10",
    "log1p", "log2", "round", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Functions of one argument that torch computes with a vector library, or may."""
_FEW = 64
"""Number of elements: some full vectors, and too few for torch to use several threads."""
_done = False
"""The libraries are initialised once per process."""


def warm_up_vector_math() -> None:
    """Call every elementary function once for ``float32`` and ``float64``, in this thread.

    Random states and settings do not change. Takes about a millisecond, once in a process; later calls do nothing.
    """
    global _done
    if _done:
        return
    _done = True
    with torch.no_grad(), contextlib.suppress(MemoryError, RuntimeError):
        # out of memory: training will make these calls itself, or fail
        for dtype in (torch.float32, torch.float64):
            values = torch.full((_FEW,), 0.5, dtype=dtype, device="cpu")
            for name in _FUNCTIONS:
                getattr(torch, name)(values)
            torch.nn.functional.gelu(values)
            torch.softmax(values, 0)
