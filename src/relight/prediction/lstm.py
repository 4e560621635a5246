"""A small recurrent network with attention over the last eight minutes. It predicts a failure within the horizon, by kind.

It is trained with torch (``lstm_train``) and evaluated with numpy, so the supervisor of a job does not need torch.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from relight.errors import CorruptCheckpoint
from relight.prediction.detect import RULES, DetectionRules, Risk
from relight.prediction.features import FeatureWindow, Scale, columns
from relight.prediction.sealed_file import Arrays
from relight.units import percent_text

Array = np.ndarray[Any, Any]
CLASSES: tuple[str, ...] = ("healthy", "memory", "storage", "hardware", "hang")
_RISKS = {"memory": "memory", "storage": "store", "hardware": "hardware", "hang": "link"}
_LATELY = columns("mean30", "slope300")
INPUTS = len(_LATELY) + len(RULES)
STEPS, STRIDE = 32, 3
"""Windows of the network's input, every third one: the last eight minutes."""
NAMES = ("weight_in", "weight_on", "bias", "attend", "attend_bias", "attend_to", "head", "head_bias")


class Lstm:
    """The trained network. It keeps the last windows of one run."""

    name = "lstm"

    def __init__(self, scale: Scale, arrays: Arrays) -> None:
        """``arrays``: the weights ``NAMES``, as ``lstm_train`` returns them."""
        size = arrays["weight_on"].shape[-1] if "weight_on" in arrays else 0
        shapes = (
            (4 * size, INPUTS), (4 * size, size), (4 * size,), (size, size), (size,), (size,), (len(CLASSES), 2 * size), (len(CLASSES),),
        )  # fmt: skip
        if not 0 < size <= 1024 or any(
            name not in arrays or arrays[name].shape != shape for name, shape in zip(NAMES, shapes)
        ):
            raise CorruptCheckpoint("a network with invalid weights")
        self.scale, self.arrays, self._size = scale, arrays, size
        self._weights = {name: np.ascontiguousarray(arrays[name].T) for name in NAMES}
        self._inputs: deque[Array] = deque(maxlen=(STEPS - 1) * STRIDE + 1)

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum(self.arrays[name].size for name in NAMES)

    def update(self, window: FeatureWindow) -> Risk:
        """See ``Detector``."""
        self._inputs.append(inputs_of(window.values[None], self.scale)[0])
        inputs = np.zeros((1, STEPS, INPUTS), np.float32)
        lately = list(self._inputs)[::-1][::STRIDE][::-1]
        inputs[0, STEPS - len(lately) :] = lately
        chances = self.chances(inputs)[0]
        best = 1 + int(np.argmax(chances[1:]))
        likely = f"most like a {CLASSES[best]} failure ({percent_text(chances[best])})"
        why = f"the last eight minutes are like those before a failure, {likely}"
        return Risk(float(1 - chances[0]), why, _RISKS[CLASSES[best]])

    def follow(self, features: Array) -> Array:
        """See ``Detector``."""
        windows = windows_of(inputs_of(features, self.scale))
        parts = [1 - self.chances(windows[start : start + 512])[:, 0] for start in range(0, len(windows), 512)]
        return np.concatenate(parts) if parts else np.empty(0)

    def fresh(self) -> Lstm:
        """See ``Detector``."""
        return Lstm(self.scale, self.arrays)

    def chances(self, windows: Array) -> Array:
        """Return the probability of each class. ``windows``: ``STEPS`` scaled inputs each."""
        weights, size = self._weights, self._size
        drive = windows @ weights["weight_in"] + weights["bias"]
        hidden = cell = np.zeros((len(windows), size), np.float32)
        states = np.empty((len(windows), STEPS, size), np.float32)
        for step in range(STEPS):
            gates = drive[:, step] + hidden @ weights["weight_on"]
            squashed = 1 / (1 + np.exp(-gates))
            cell = squashed[:, size : 2 * size] * cell + squashed[:, :size] * np.tanh(gates[:, 2 * size : 3 * size])
            hidden = squashed[:, 3 * size :] * np.tanh(cell)
            states[:, step] = hidden
        attention = _softmax(np.tanh(states @ weights["attend"] + weights["attend_bias"]) @ weights["attend_to"])
        context = np.einsum("ns,nsh->nh", attention, states)
        return _softmax(np.concatenate([context, hidden], axis=1) @ weights["head"] + weights["head_bias"])


def inputs_of(features: Array, scale: Scale) -> Array:
    """Return the network's inputs: recent features of the signals, and the rules' scores."""
    return np.concatenate([scale(features)[:, _LATELY], DetectionRules().scores(features)], axis=1, dtype=np.float32)


def windows_of(inputs: Array, rows: Array | None = None) -> Array:
    """Return the windows that end at these rows (default: all) of a run's inputs.

    Inputs before the run are zeros, the usual values.
    """
    used = np.concatenate([np.zeros(((STEPS - 1) * STRIDE, INPUTS), np.float32), inputs])
    ends = np.arange(len(inputs)) if rows is None else rows
    return used[ends[:, None] + STRIDE * np.arange(STEPS)]


def _softmax(values: Array) -> Array:
    raised = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))
