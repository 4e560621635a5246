"""Runs the script and writes the trace: ``python -m relight.prove.recorder CONFIG SCRIPT ARGS…``, started by ``relight drill --prove``."""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from relight.capture import capture, observe_batches
from relight.checkpointer import Checkpointer, observers
from relight.comm.children import enter_script
from relight.decode import from_json_bytes
from relight.format import Digest, Leaf, hexdigest
from relight.format.tree import join_path
from relight.layout import Item
from relight.prove.recorder_config import RecorderConfig
from relight.prove.trace import StepTrace, TraceEntry, hexed

SLICE_BYTES = 8 << 20


class StepRecorder:
    """Observer that records the script's first Checkpointer."""

    def __init__(self, config: RecorderConfig) -> None:
        self._config = config
        self._trace = StepTrace(config.trace)
        self._batches: list[str] = []
        self._watched: Checkpointer | None = None

    def place(self, url: str, run: str) -> tuple[str, str]:
        """Replace the script's store and run by those of the proof, so that the script's own store is not touched."""
        return self._config.store, self._config.run

    def on_start(self, ckpt: Checkpointer) -> None:
        """Record the batches that the loaders deliver."""
        if self._watched is None:
            self._watched = ckpt
            observe_batches(ckpt.components, lambda batch: self._batches.append(_digest_any(batch)))

    def on_restore(self, ckpt: Checkpointer, step: int, checkpoint_id: str | None) -> None:
        """Record the restored state."""
        if ckpt is self._watched and checkpoint_id is not None:
            self._trace.write(TraceEntry(kind="restored", step=step - 1, state=digest_state(ckpt.components)))

    def on_end(self, ckpt: Checkpointer) -> None:
        """Do nothing: the end of a run is not compared."""

    def on_step(self, ckpt: Checkpointer, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """Record the step. After the last step, end the process."""
        if ckpt is not self._watched:
            return
        batches, self._batches[:] = list(self._batches), []
        if step >= self._config.record_from:
            self._trace.write(
                TraceEntry(
                    kind="step",
                    step=step,
                    metrics={name: hexed(value) for name, value in metrics.items()},
                    samples=None if samples is None else _digest_any(samples),
                    batches=batches,
                    state=digest_state(ckpt.components),
                )
            )
        if step < self._config.stop_after:
            return
        Path(self._config.kinds).write_bytes(msgspec.json.encode(capture(ckpt.components).kinds))
        if self._config.kill:
            ckpt.save(step, reason="prove").wait()
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def digest_state(components: Mapping[str, object]) -> dict[str, str]:
    """Return a digest of every tensor and value of the state, by path."""
    state = capture(components)
    digests = {item.name: f"{item.dtype}{list(item.shape)}:{_digest_item(item)}" for item in state.items}
    _values(state.tree, "", digests)
    return digests


def _digest_item(item: Item) -> str:
    view = item.source.view()
    if view is not None:
        return hexdigest(view)[:32]
    hasher = Digest()
    for start in range(0, item.source.length, SLICE_BYTES):
        piece = memoryview(bytearray(min(SLICE_BYTES, item.source.length - start)))
        item.source.fill(start, piece)
        hasher.update(piece)
    return hasher.hexdigest()[:32]


def _values(node: Any, path: str, values: dict[str, str]) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            _values(value, join_path(path, key), values)
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            _values(value, join_path(path, index, sequence=True), values)
    elif type(node) is not Leaf:
        values[path] = hexed(node) if isinstance(node, float) else repr(node)
    elif not node.tensors:
        values[path] = repr(node.meta)


def _digest_any(value: Any) -> str:
    """Return a digest of a batch or of sample ids, made of tensors, arrays and plain values."""
    hasher = Digest()

    def walk(node: Any) -> None:
        if isinstance(node, Mapping):
            for key in node:
                hasher.update(repr(key).encode())
                walk(node[key])
        elif isinstance(node, (list, tuple, set, frozenset)):
            hasher.update(f"{type(node).__name__}{len(node)}".encode())
            for member in sorted(node, key=repr) if isinstance(node, (set, frozenset)) else node:
                walk(member)
        elif hasattr(node, "detach") and hasattr(node, "cpu"):
            state = capture({"batch": node}, rng=False)
            for item in state.items:
                hasher.update(f"{item.dtype}{list(item.shape)}{_digest_item(item)}".encode())
        elif hasattr(node, "tobytes"):
            hasher.update(node.tobytes())
        else:
            hasher.update(repr(node).encode())

    walk(value)
    return hasher.hexdigest()[:32]


def main() -> None:
    """Run the script as ``python SCRIPT ARGS…`` would, with the recorder in place."""
    config = from_json_bytes(sys.argv[1], RecorderConfig)
    script = sys.argv[2]
    sys.argv = sys.argv[2:]
    enter_script(script, as_module=False)
    random.seed(config.seed)
    np.random.seed(config.seed)
    torch.manual_seed(config.seed)
    observers.append(StepRecorder(config))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
