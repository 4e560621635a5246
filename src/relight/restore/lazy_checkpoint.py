"""Read single tensors of a checkpoint, or slices of them, as safetensors' ``safe_open`` does."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from relight.capture.accelerator import finish_kernels
from relight.capture.load_tree import nothing_fits, selected
from relight.capture.rebuild import FreshTensors, torch_dtype
from relight.capture.regions import Region, Regions
from relight.capture.tensors import TORCH_DTYPES
from relight.errors import CheckpointNotFound, ConfigError, memory_refusals, shown
from relight.format import DTYPES, Leaf
from relight.layout import Box
from relight.observe.object_view import Facts, ObjectView
from relight.restore.opened_state import CPU, OpenedState, leaves
from relight.settings.short_traceback import short_traceback
from relight.units import size_text

_NO_TENSORS = ("numpy", "numpy_scalar")
_NAMES_SHOWN = 5


class LazyCheckpoint(ObjectView):
    """A checkpoint, open for reading single tensors. ``relight.load(…, lazy=True)`` returns one; use it in a ``with`` block.

    A tensor's name is its path, as in ``only=``: ``model/body.weight``, ``optimizer/state/0/exp_avg``. Only metadata has been read.
    ``get_tensor`` and ``get_slice`` read the chunks that they need, and verify each. No file stays open in between. Thread-safe.
    """

    def __init__(
        self,
        state: OpenedState,
        device: torch.device = CPU,
        only: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._state, self._device, self._dtype = state, device, dtype
        self._leaves: dict[str, Leaf] = {
            path: leaf
            for path, leaf in leaves(state.tree)
            if leaf.tensors and leaf.kind not in _NO_TENSORS and (only is None or selected(path, only))
        }
        if only is not None and not self._leaves:
            raise nothing_fits(only, state.opened.prefix)
        self._is_open = True

    @property
    def step(self) -> int:
        """The step after which the state was saved."""
        return self._state.opened.checkpoint.step

    @property
    def id(self) -> str:
        """The checkpoint's id."""
        return self._state.opened.checkpoint.id

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._leaves)

    @short_traceback
    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, verified.

        Args:
            name: The tensor's name, one of ``keys()``.
        """
        leaf = self._leaf(name)
        with memory_refusals(name, self._state.opened.prefix):
            plan = self._state.plan({name: leaf}, device=self._device, dtype=self._dtype)
            self._state.read(plan.sinks)
            tensor: torch.Tensor = plan.result()[name]
            return tensor

    @short_traceback
    def get_slice(self, name: str) -> TensorSlice:
        """Return a tensor with parts that can be read: ``get_slice(name)[10:20, …, 0]``. It has ``shape`` and ``dtype``.
        Reads nothing.

        Args:
            name: The tensor's name, one of ``keys()``.
        """
        leaf = self._leaf(name)
        if leaf.kind != "tensor":
            raise ConfigError(
                f"{name} is a {leaf.kind}, and such a tensor is only read whole", hint="get_tensor() reads all of it"
            )
        return TensorSlice(self, name, leaf.tensors[0])

    def close(self) -> None:
        """Refuse further reads. Idempotent; no file is open anyway."""
        self._is_open = False

    def __enter__(self) -> LazyCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __contains__(self, name: object) -> bool:
        return name in self._leaves

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def _facts(self) -> Facts:
        size = size_text(sum(self._state.tensors[i].length for leaf in self._leaves.values() for i in leaf.tensors))
        return Facts(
            f"step {self.step}",
            [("id", self.id), ("tensors", len(self)), ("size", size), ("state", "open" if self._is_open else "closed")],
        )

    def _leaf(self, name: str) -> Leaf:
        if not self._is_open:
            raise ConfigError(
                "this checkpoint is closed", where=self._state.opened.prefix, hint="read within the with block"
            )
        leaf = self._leaves.get(name)
        if leaf is None:
            named = ", ".join(list(self._leaves)[:_NAMES_SHOWN])
            more = f" and {len(self) - _NAMES_SHOWN} more: keys() lists them" if len(self) > _NAMES_SHOWN else ""
            raise CheckpointNotFound(
                f"no tensor {shown(name)}", where=self._state.opened.prefix, hint=f"there are {named}{more}"
            )
        return leaf

    def _dtype_of(self, index: int) -> torch.dtype:
        """Return the dtype in which stored tensor ``index`` is read."""
        if self._dtype is not None and index in self._state.castable:
            return self._dtype
        return torch_dtype(self._state.tensors[index])

    def _read_box(self, index: int, box: Box) -> torch.Tensor:
        """Return ``box`` of stored tensor ``index``."""
        state, device, stored = self._state, self._device, self._state.tensors[index]
        with memory_refusals(stored.name, state.opened.prefix):
            memory = FreshTensors(state.tensors, state.check)
            target = memory.make(stored, lambda: torch.empty(box.size, dtype=self._dtype_of(index), device=device))
            if box.elements and stored.length:
                finish_kernels(device)
                state.read({index: Regions(stored.shape, torch_dtype(stored), [Region(box, target)])})
                finish_kernels(device)
            return target


class TensorSlice(ObjectView):
    """A stored tensor with parts that can be read: index it with integers, slices and ``…``. Each indexing reads and verifies."""

    def __init__(self, checkpoint: LazyCheckpoint, name: str, index: int) -> None:
        self._checkpoint, self.name, self._index = checkpoint, name, index
        stored = checkpoint._state.tensors[index]
        self.shape = torch.Size(stored.shape)
        self.dtype = checkpoint._dtype_of(index)

    def get_shape(self) -> list[int]:
        """Return the shape, as safetensors does."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of the dtype, such as ``F32``; the format's name if safetensors has none."""
        name = next(name for name, dtype in TORCH_DTYPES.items() if dtype == self.dtype)
        return DTYPES[name].safetensors or name

    @short_traceback
    def __getitem__(self, key: Any) -> torch.Tensor:
        """Read a part. Slices have positive steps; the rows and columns between the steps of one are read, too."""
        box, then = _box_of(key, self.shape, self.name)
        self._checkpoint._leaf(self.name)  # raises if it was closed
        part = self._checkpoint._read_box(self._index, box)
        return part if all(each == slice(None) for each in then) else part[then].clone()

    def _facts(self) -> Facts:
        return Facts(self.name, [("dtype", str(self.dtype).removeprefix("torch.")), ("shape", list(self.shape))])


def _box_of(key: Any, shape: Sequence[int], name: str) -> tuple[Box, tuple[Any, ...]]:
    """Return the box that ``key`` needs of a tensor, and the index of the box's tensor that gives the key's result."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if sum(each is Ellipsis for each in keys) > 1 or len([each for each in keys if each is not Ellipsis]) > len(shape):
        raise IndexError(f"{name} has {len(shape)} dimensions: {shown(key)} does not index it")
    place = next((i for i, each in enumerate(keys) if each is Ellipsis), len(keys))
    rest = len(keys) - place - 1 if place < len(keys) else 0
    keys = keys[:place] + [slice(None)] * (len(shape) - place - rest) + keys[place + 1 :]
    start, size, then = [], [], list[Any]()
    for dim, (each, extent) in enumerate(zip(keys, shape, strict=True)):
        if isinstance(each, slice):
            first, last, step = each.indices(extent)
            if step < 1:
                raise IndexError(f"{name}: a slice of dimension {dim} has the step {step}; steps are positive")
            start.append(first)
            size.append(max(0, last - first))
            then.append(slice(None) if step == 1 else slice(None, None, step))
            continue
        try:
            index = operator.index(each)
        except TypeError:
            raise IndexError(
                f"{name}: dimension {dim} is indexed by an integer or a slice, not by {shown(each)}"
            ) from None
        if not -extent <= index < extent:
            raise IndexError(f"{name}: index {index} is outside dimension {dim}, which has {extent} elements")
        start.append(index % extent)
        size.append(1)
        then.append(0)
    return Box(tuple(start), tuple(size)), tuple(then)
