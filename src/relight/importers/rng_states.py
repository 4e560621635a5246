"""States of random number generators in the form of the component ``rng``."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from relight.importers.pickles import UnpickledObject
from relight.importers.tensors import AssembledTensor, is_tensor
from relight.importers.tree_builder import Numbers, array_of
from relight.layout import Bytes


def host_rng(python: Any, numpy: Any, cpu: Any, devices: Mapping[str, list[Any]]) -> dict[str, Any] | None:
    """Return a process's generators in Relight's form, from the states of Python, numpy and torch.

    Return None if a state is not in the usual form.
    """
    words = python_words(python)
    if words is None or not is_tensor(cpu):
        return None
    legacy = numpy_state(numpy) if numpy is not None else None
    if numpy is not None and legacy is None:
        return None
    return {
        "python": words,
        "numpy": legacy,
        "torch": cpu,
        **{kind: states for kind, states in devices.items() if states},
    }


def python_words(state: Any) -> dict[str, Any] | None:
    """Return the state of Python's generator in a component's form; None for other values."""
    if (
        not isinstance(state, (tuple, list))
        or len(state) != 3
        or type(state[0]) is not int
        or not isinstance(state[1], (tuple, list))
    ):
        return None
    if len(state[1]) != 625 or any(type(word) is not int or not 0 <= word < 2**32 for word in state[1]):
        return None
    data = struct.pack("<625q", *state[1])
    gauss = state[2] if type(state[2]) is float or state[2] is None else None
    return {
        "version": state[0],
        "words": AssembledTensor("int64", (625,), Bytes(data), ("words", data)),
        "gauss": gauss,
    }


def numpy_state(state: Any) -> dict[str, Any] | None:
    """Return the state of numpy's legacy generator in a component's form; None for other values."""
    if isinstance(state, dict) and isinstance(state.get("state"), dict):  # get_state(legacy=False)
        inner = state["state"]
        state = (
            state.get("bit_generator"),
            inner.get("key"),
            inner.get("pos"),
            state.get("has_gauss"),
            state.get("gauss"),
        )
    if (
        not isinstance(state, (tuple, list))
        or len(state) != 5
        or state[0] != "MT19937"
        or not isinstance(state[1], (UnpickledObject, list))
    ):
        return None
    try:
        import numpy as np

        key = np.ascontiguousarray(
            array_of(state[1]) if isinstance(state[1], UnpickledObject) else np.array(state[1], dtype=np.uint32)
        )
    except (TypeError, ValueError, KeyError, OverflowError):
        return None
    if (
        key.dtype != "uint32"
        or key.shape != (624,)
        or type(state[2]) is not int
        or type(state[3]) is not int
        or type(state[4]) is not float
    ):
        return None
    words = Numbers(key.tobytes(), key.dtype.str, key.shape)
    return {
        "bit_generator": "MT19937",
        "state": {"key": words, "pos": state[2]},
        "has_gauss": state[3],
        "gauss": state[4],
    }
