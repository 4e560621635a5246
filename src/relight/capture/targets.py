"""Assign stored tensors to live memory that fits. Each piece of live memory takes one stored tensor only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, eq, is_
from typing import cast

import torch

from relight.capture.accelerator import finish_kernels
from relight.capture.memory_of_targets import read_only, why_no_bytes
from relight.capture.objects import FORM, flattens, is_mark, parts_of, unfit_parts
from relight.capture.rebuild import FreshTensors, torch_dtype
from relight.capture.regions import regions_for
from relight.capture.sharded import Flat, LiveSlice, is_spread, local_of
from relight.capture.tensors import (
    TORCH_DTYPES,
    USUAL,
    FanOut,
    casts_between,
    identity,
    sink_for,
    touch_all,
    without_repeats,
)
from relight.format import Leaf, Tensor
from relight.format.tree import join_path
from relight.layout import Sink
from relight.layout.sources import HostMemorySink

BEFORE = "load it before it is converted"
_shape, _dtype, _layout, _is_cpu, _nbytes, _kind = map(
    attrgetter, ("shape", "dtype", "layout", "is_cpu", "nbytes", "kind")
)


class Targets:
    """Collects reads into live tensors; mismatches are added to ``wrong``. Nothing is written until sinks are filled."""

    def __init__(self, tensors: Sequence[Tensor], wrong: list[str], *, strict: bool, casts: bool = False) -> None:
        """``casts``: whether a live tensor may have another floating-point dtype than the stored one, even if ``strict``."""
        self._tensors, self._wrong, self._strict, self._casts = tensors, wrong, strict, casts
        self._sinks: dict[int, Sink] = {}
        self._several: dict[int, list[Sink]] = {}
        self._first: dict[int, tuple[torch.Tensor, int]] = {}
        self._further: dict[int, dict[tuple[object, ...], int]] = {}
        self._live: list[torch.Tensor] = []

    def plainly(self, leaf: Leaf, live: object) -> bool:
        """Assign ``leaf`` to ``live`` in the simple case, and return True.

        That is contiguous host memory, the same shape and dtype, and neither of the two assigned before. Costs 2 µs.
        Return False if nothing was done: the caller must then use the general path.
        """
        if leaf.kind != "tensor" or type(live) not in USUAL:
            return False
        index = leaf.tensors[0]
        stored = self._tensors[index]
        assert isinstance(live, torch.Tensor)
        if (
            live.shape != stored.shape
            or live.dtype is not TORCH_DTYPES.get(stored.dtype)
            or not live.is_cpu
            or live.layout is not torch.strided
            or not live.is_contiguous()
            or live.is_neg()
            or live.is_conj()
        ):
            return False
        address = live.data_ptr()
        if not address or address in self._first or index in self._sinks:
            return False
        self._first[address] = live, index
        self._sinks[index] = HostMemorySink(address, live.nbytes, live)
        self._live.append(live)
        return True

    def all_plainly(self, leaves: Sequence[object], lives: Sequence[object]) -> bool:
        """Call ``plainly`` for many, all or none of them. Costs 1 µs each: one pass in C for each check."""
        if not {*map(type, leaves)} <= {Leaf} or not {*map(type, lives)} <= USUAL:
            return False
        taken, tensors = cast("Sequence[Leaf]", leaves), cast("Sequence[torch.Tensor]", lives)
        if not set(map(_kind, taken)) <= {"tensor"}:
            return False
        indices = [leaf.tensors[0] for leaf in taken]
        stored = [self._tensors[index] for index in indices]
        if not (
            all(map(eq, map(_shape, tensors), map(_shape, stored)))
            and all(map(is_, map(_dtype, tensors), map(TORCH_DTYPES.get, map(_dtype, stored))))
            and all(map(_is_cpu, tensors))
            and all(map(is_, map(_layout, tensors), repeat(torch.strided)))
            and all(map(torch.Tensor.is_contiguous, tensors))
            and not any(map(torch.Tensor.is_neg, tensors))
            and not any(map(torch.Tensor.is_conj, tensors))
        ):
            return False
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        sinks: dict[int, Sink] = dict(
            zip(indices, map(HostMemorySink, addresses, map(_nbytes, tensors), tensors), strict=True)
        )
        first = dict(zip(addresses, zip(tensors, indices, strict=True), strict=True))
        if len(sinks) < len(taken) or len(first) < len(taken) or 0 in first:
            return False
        if not (self._first.keys().isdisjoint(first) and self._sinks.keys().isdisjoint(sinks)):
            return False
        self._first = self._first | first if self._first else first
        self._sinks = self._sinks | sinks if self._sinks else sinks
        self._live.extend(tensors)
        return True

    def fits(self, path: str, leaf: Leaf, live: torch.Tensor | Flat | LiveSlice) -> bool:
        """Return whether shape and, if strict, dtype fit. A mismatch is added to ``wrong``."""
        stored = self._tensors[leaf.tensors[0]]
        missing = why_no_bytes(live) if isinstance(live, torch.Tensor) else None
        if missing is not None:
            self._wrong.append(f"{path}: {missing}")
            return False
        shape = tuple(leaf.meta) if leaf.kind == "expanded" else stored.shape
        if shape != tuple(live.shape) or not self._takes_dtype(torch_dtype(stored), live):
            self._wrong.append(
                f"{path}: stored {stored.dtype} {list(shape)}, live {dtype_text(live)} {list(live.shape)}"
            )
            return False
        return True

    def _takes_dtype(self, stored: torch.dtype, live: torch.Tensor | Flat | LiveSlice) -> bool:
        if stored == live.dtype or not self._strict:
            return True
        return self._casts and casts_between(stored, live.dtype, local_of(live).device)

    def into(self, leaf: Leaf, live: torch.Tensor | Flat | LiveSlice, path: str) -> bool:
        """Read the leaf straight into ``live``. Return False if the layout does not allow it."""
        if isinstance(live, (Flat, LiveSlice)) or is_spread(live):
            return self._into_spread(leaf, live, path)
        if live.layout != torch.strided or live.is_quantized or live.is_meta:
            return False
        target = live.detach()
        if target.is_conj() or target.is_neg():
            return False
        target = without_repeats(target)
        if tuple(target.shape) != self._tensors[leaf.tensors[0]].shape:
            return False
        # otherwise the mismatch is recorded; strict or not, nothing is read there
        if self.add(leaf.tensors[0], target, path):
            self._live.append(live)
        return True

    def parts(self, node: object, live: torch.Tensor, path: str) -> None:
        """Read the inner tensors of a stored subclass straight into those of ``live``."""
        if type(node) is not dict or FORM not in node:
            stored = "an object" if is_mark(node) else "a plain tensor"
            self._wrong.append(f"{path}: stored as {stored}, the live tensor is a {type(live).__qualname__}: {BEFORE}")
            return
        reason = unfit_parts(node, live)
        if reason is not None:
            self._wrong.append(f"{path}: {reason}")
            return
        for name, part in parts_of(live).items():
            below, leaf = join_path(path, name), node[name]
            if flattens(part):
                self.parts(leaf, part, below)
            elif type(leaf) is not Leaf or leaf.kind not in ("tensor", "expanded"):
                self._wrong.append(f"{below}: stored as something other than a tensor")
            elif self.fits(below, leaf, part) and not self.into(leaf, part, below):
                self._wrong.append(f"{below}: the live tensor's layout takes no bytes")

    def _into_spread(self, leaf: Leaf, live: torch.Tensor | Flat | LiveSlice, path: str) -> bool:
        if leaf.kind != "tensor":
            self._wrong.append(f"{path}: stored with elements that share memory, live spread over ranks")
        elif self.add(leaf.tensors[0], live, path):
            self._live.append(local_of(live))
        return True

    def add(self, index: int, live: torch.Tensor | Flat | LiveSlice, path: str) -> bool:
        """Also read tensor ``index`` into ``live``. Return False, with a mismatch, if another one goes to that memory."""
        tensor = local_of(live)
        missing = why_no_bytes(tensor)
        if missing is not None:
            self._wrong.append(f"{path}: {missing}")
            return False
        owner = self._owner(tensor, index) if tensor.numel() else index
        if owner != index:
            other_name = self._tensors[owner].name
            self._wrong.append(f"{path}: tied to the tensor that takes {other_name}, but stored separately")
            return False
        dtype = torch_dtype(self._tensors[index])
        sink: Sink = sink_for(tensor, dtype) if live is tensor else regions_for(live, dtype)
        if index in self._sinks:
            self._several.setdefault(index, [self._sinks[index]]).append(sink)
        else:
            self._sinks[index] = sink
        return True

    def refuse_read_only(self) -> None:
        """Report live tensors in read-only memory, and read nothing into them."""
        for tensor in read_only(self._first):
            index = self._first[tensor.data_ptr()][1]
            stored = self._tensors[index]
            self._sinks.pop(index, None)
            self._several.pop(index, None)
            self._wrong.append(
                f"{stored.name}: the live tensor is in read-only memory, such as a mapped file: clone() it first"
            )

    def sinks(self, memory: FreshTensors) -> dict[int, Sink]:
        """Return the sinks of all assigned tensors, and of those that ``memory`` allocated."""
        self._finish_kernels()
        sinks = memory.sinks
        if not self._several and sinks.keys().isdisjoint(self._sinks):
            self._sinks.update(sinks)
            return self._sinks
        for index, sink in self._sinks.items():
            into = self._several.get(index, [sink])
            if index in sinks:  # also wanted as a value
                into = [*into, sinks[index]]
            sinks[index] = into[0] if len(into) == 1 else FanOut(into)
        return sinks

    def filled(self) -> None:
        """Wait for copies to accelerators, and increment the version counters of all tensors that were written."""
        self._finish_kernels()
        touch_all(self._live)

    def _finish_kernels(self) -> None:
        """Wait for the accelerators: bytes are copied on other streams than those on which training may have made the tensors."""
        if not all(map(_is_cpu, self._live)):
            for device in {tensor.device for tensor in self._live}:
                finish_kernels(device)

    def _owner(self, tensor: torch.Tensor, index: int) -> int:
        """Return the stored tensor that goes to that memory; ``index`` if it is the first.

        Full identities are only compared if an address repeats.
        """
        address = tensor.data_ptr()
        first = self._first.setdefault(address, (tensor, index))
        if first[0] is tensor:
            return first[1]
        identities = self._further.setdefault(address, {identity(first[0]): first[1]})
        return identities.setdefault(identity(tensor), index)


def dtype_text(tensor: torch.Tensor | Flat | LiveSlice) -> str:
    """Return the format's name of the dtype."""
    return str(tensor.dtype).removeprefix("torch.")
