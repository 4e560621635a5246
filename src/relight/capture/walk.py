"""Build the tree from live values. Every tensor becomes an item. All refusals are collected for one error."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from relight.capture.objects import (
    CLASS,
    FORM,
    PERMUTED,
    flattens,
    form_of,
    is_simple,
    name_of,
    order_of,
    parts_of,
    typed_parts,
)
from relight.capture.plain_forms import PlainForm, plain_form, way_out
from relight.capture.plain_tensors import PlainTensor, plain_tensors
from relight.capture.sharded import Flat, ShardingOf, is_spread, spread_of
from relight.capture.standard_values import Unstorable, standard_leaf
from relight.capture.tensors import TensorSource, dtype_name, identity, resolved, why_not, without_repeats
from relight.capture.typed_values import plain
from relight.errors import IncompatibleState
from relight.format import DTYPES, Leaf
from relight.format.manifest import NAME_BYTES_MAX
from relight.format.tree import DIGITS_MAX, LEVELS_MAX, join_path
from relight.layout import Bytes, Item
from relight.torch_private.tensors import sparse_parts

_SPARSE = {
    torch.sparse_csr: ("sparse_csr", "crow_indices", "col_indices"),
    torch.sparse_csc: ("sparse_csc", "ccol_indices", "row_indices"),
    torch.sparse_bsr: ("sparse_bsr", "crow_indices", "col_indices"),
    torch.sparse_bsc: ("sparse_bsc", "ccol_indices", "row_indices"),
}
_NUMPY_KINDS = "biufcSUMm"
_IN_PLACE = frozenset(("param", "buffer", "optim"))
"""Roles of values that are restored into a live tensor of the same class."""
NO_SUBCLASS = "its class can only be restored inside a module's or an optimizer's state: give the object that holds it"
NO_OBJECT = (
    "give its fields as plain values, or give it as a component of its own with state_dict() and load_state_dict()"
)
NO_OPTIMIZER_OBJECT = (
    "give the optimizer's class a state_dict() that makes tensors and plain values of it, and a load_state_dict()"
)


@dataclass(frozen=True, eq=False)
class WalkedItems:
    """What a walk has found, for the next walk."""

    items: tuple[Item, ...]
    known: Mapping[tuple[object, ...], int]
    names: frozenset[str]
    spreads: Mapping[int, ShardingOf]
    """Sharding of the items that are only partly on this rank, by index."""
    frozen: frozenset[int]
    """Indices of ``items`` that are parameters without gradient and in no optimizer."""


class Walker:
    """Collects items while the tree is built. Tensors with the same memory become one item.

    ``fixed``: the part that need not be walked again; its items come first. ``before``: items of another tree.
    """

    def __init__(self, fixed: WalkedItems | None = None, before: Sequence[Item] = ()) -> None:
        self.items: list[Item] = [*before, *(fixed.items if fixed is not None else ())]
        self.spreads: dict[int, ShardingOf] = dict(fixed.spreads) if fixed is not None else {}
        self.frozen: set[int] = set(fixed.frozen) if fixed is not None else set()
        self.refused: list[str] = []
        self.components: Mapping[str, object] = {}
        self.known: dict[tuple[object, ...], int] = {}
        self.names: set[str] = set()
        self._fixed_known: Mapping[tuple[object, ...], int] = fixed.known if fixed is not None else {}
        self._fixed_names: frozenset[str] = fixed.names if fixed is not None else frozenset()
        self.in_value = False
        """Whether what is walked was given as a plain value: then a configuration object is stored as a plain one."""
        self.plain: list[str] = []
        """For each object that comes back as a plain value: its path, and what is stored."""
        self._inside = ""
        """Name of the configuration object that is being walked."""
        self.find_trained: Callable[[], frozenset[tuple[object, ...]]] = frozenset
        self._alive: list[object] = []
        self._open: set[int] = set()
        self._plain: dict[int, PlainTensor] = {}

    def gather(self, values: Iterable[object]) -> None:
        """Collect facts of the plain tensors among ``values`` at once: ``tensor`` then takes a third of the time for each."""
        self._plain.update(plain_tensors(values))

    def key(self, tensor: torch.Tensor) -> tuple[object, ...] | None:
        """Return the identity of a strided tensor that can be saved; None for others."""
        plain = self._plain.get(id(tensor))
        if plain is not None:
            return plain.key
        return identity(tensor.detach()) if tensor.layout == torch.strided and why_not(tensor) is None else None

    def finish(self) -> None:
        """Raise ``IncompatibleState`` with all refusals, if there are any."""
        if self.refused:
            raise IncompatibleState(
                f"{len(self.refused)} values cannot be saved" if len(self.refused) > 1 else "a value cannot be saved",
                details=self.refused,
                hint="nothing was written; leave them out, or give their state as tensors, arrays and plain values",
            )

    def refuse(self, path: str, reason: str) -> None:
        """Record that the value at ``path`` cannot be saved."""
        self.refused.append(f"{path}: {reason}")

    def value(self, value: Any, path: str, role: str = "value", level: int = 0) -> Any:
        """Return the tree node for any supported value."""
        kind = type(value)
        if value is None or kind in (bool, int, float, complex, str, bytes):
            reason = _unwritable(value)
            if reason is not None:
                self.refuse(path, reason)
            return value
        if isinstance(value, torch.Tensor) or is_spread(value):
            if self._inside:
                self.refuse(path, f"a tensor in a {self._inside}: give it as a component, or in a dict")
                return None
            return self.tensor(value, path, role)
        if level > LEVELS_MAX - 10:
            self.refuse(path, "nested too deeply")
            return None
        if kind in (dict, list, tuple, set, frozenset) or kind in (OrderedDict, defaultdict, Counter):
            if kind in (OrderedDict, defaultdict, Counter) and self.in_value:
                self._note_plain(path, kind.__qualname__, "dict")
            return self._container(value, path, role, level)
        try:
            if (standard := standard_leaf(value)) is not None:
                return standard
            form = plain_form(value) if self.in_value and role == "value" else None
        except Unstorable as error:
            self.refuse(path, str(error))
            return None
        if form is not None:
            if id(value) in self._open:
                self.refuse(path, "an object that contains itself")
                return None
            return self._plain_form(value, form, path, level)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            if type(value) is not numpy.ndarray:
                self.refuse(path, f"a {kind.__module__}.{kind.__qualname__}; pass np.asarray() of it")
                return None
            if self._inside:
                self.refuse(path, f"an array in a {self._inside}: give it as a component, or in a dict")
                return None
            return self._array(value, path, role)
        if numpy is not None and isinstance(value, numpy.generic):
            if value.dtype.kind not in _NUMPY_KINDS:
                self.refuse(path, f"a numpy scalar of dtype {value.dtype}")
                return None
            return Leaf("numpy_scalar", (), (value.dtype.str, value.tobytes()))
        if kind is torch.Size:
            return Leaf("torch_size", (), tuple(value))
        if kind is torch.dtype:
            return Leaf("torch_dtype", (), str(value).removeprefix("torch."))
        if kind is torch.device:
            return Leaf("torch_device", (), str(value))
        typed = typed_parts(value) if role == "optim" else None
        if typed is not None:
            return {
                CLASS: name_of(value),
                **{key: self.value(part, join_path(path, key), role, level + 1) for key, part in typed.items()},
            }
        without_class = plain(value)
        if without_class is not None:
            if self.in_value:
                self._note_plain(path, kind.__qualname__, type(without_class).__name__)
            return self.value(without_class, path, role, level)
        if role == "optim" and is_simple(value):
            return self._object(value, path, level)
        remedy = NO_OPTIMIZER_OBJECT if role == "optim" else way_out(value) or NO_OBJECT
        self.refuse(path, f"a {kind.__module__}.{kind.__qualname__}: {remedy}")
        return None

    def _plain_form(self, value: Any, form: PlainForm, path: str, level: int) -> Any:
        """Return a configuration object as its plain form."""
        self._note_plain(path, form.label, type(form.value).__name__)
        self._open.add(id(value))
        outer, self._inside = self._inside, form.label
        try:
            return self.value(form.value, path, "value", level + 1)
        finally:
            self._open.discard(id(value))
            self._inside = outer

    def _note_plain(self, path: str, label: str, form: str) -> None:
        self.plain.append(f"{path}: {label} is stored as {form}")

    def _object(self, value: Any, path: str, level: int) -> Any:
        """Return a simple object as the dict of its attributes, to be restored into the live object in its place."""
        if id(value) in self._open:
            self.refuse(path, "an object that contains itself")
            return None
        self._open.add(id(value))
        try:
            attributes = {
                key: self.value(attribute, join_path(path, key), "optim", level + 1)
                for key, attribute in vars(value).items()
            }
        finally:
            self._open.discard(id(value))
        return {CLASS: name_of(value), **attributes}

    def _flattened(self, tensor: torch.Tensor, path: str, role: str, trainable: bool) -> Any:
        """Return a tensor of a subclass as the dict of its inner tensors."""
        if role not in _IN_PLACE:
            self.refuse(path, f"a {type(tensor).__module__}.{type(tensor).__qualname__}: {NO_SUBCLASS}")
            return None
        parts = {
            name: self.tensor(part, join_path(path, name), role, trainable=trainable)
            for name, part in parts_of(tensor).items()
        }
        return {CLASS: name_of(tensor), FORM: form_of(tensor), **parts}

    def tensor(self, tensor: torch.Tensor | Flat, path: str, role: str, *, trainable: bool = False) -> Any:
        """Return the leaf for a tensor of any layout."""
        known = self._plain.get(id(tensor))
        if known is not None and len(path) * 4 <= NAME_BYTES_MAX:
            index = self.known.get(known.key, self._fixed_known.get(known.key))
            if index is None:
                index = self._add(known.detached, known.key, path, known.dtype, role, trainable, known.detached.shape)
            return Leaf("tensor", (index,))
        if isinstance(tensor, Flat) or is_spread(tensor):
            return self._spread(tensor, path, role, trainable)
        if flattens(tensor):
            return self._flattened(tensor, path, role, trainable)
        reason = why_not(tensor)
        if reason is not None:
            self.refuse(path, reason)
            return None
        if tensor.layout == torch.sparse_coo:
            indices, values, is_coalesced = sparse_parts(tensor.detach())
            parts = self._parts(path, role, indices=indices, values=values)
            return parts and Leaf("sparse_coo", parts, (tuple(tensor.shape), is_coalesced))
        if tensor.layout in _SPARSE:
            kind, compressed, plain = _SPARSE[tensor.layout]
            detached = tensor.detach()
            pieces = {
                compressed: getattr(detached, compressed)(),
                plain: getattr(detached, plain)(),
                "values": detached.values(),
            }
            parts = self._parts(path, role, **pieces)
            return parts and Leaf(kind, parts, tuple(tensor.shape))
        if tensor.is_quantized:
            return self._quantized(tensor.detach(), path, role)
        live = resolved(tensor)
        if role == "optim" and (order := order_of(live)) is not None:
            return {
                CLASS: PERMUTED,
                "order": order,
                "data": self.tensor(live.permute(order), join_path(path, "data"), role),
            }
        base = without_repeats(live)
        index = self._item(base, path, role, trainable)
        if index is None:
            return None
        return Leaf("tensor", (index,)) if base is live else Leaf("expanded", (index,), tuple(live.shape))

    @cached_property
    def trained(self) -> frozenset[tuple[object, ...]]:
        """Identities of the tensors that optimizers train."""
        return self.find_trained()

    def _parts(self, path: str, role: str, **tensors: torch.Tensor) -> Any:
        indices = [self._item(resolved(tensor), f"{path}/{name}", role, False) for name, tensor in tensors.items()]
        return None if None in indices else tuple(indices)

    def _quantized(self, tensor: torch.Tensor, path: str, role: str) -> Any:
        dtype = str(tensor.dtype).removeprefix("torch.")
        scheme = tensor.qscheme()
        if scheme == torch.per_tensor_affine:
            parts = self._parts(path, role, int_repr=tensor.int_repr())
            return parts and Leaf("quantized_tensor", parts, (dtype, tensor.q_scale(), tensor.q_zero_point()))
        if scheme == torch.per_channel_affine:
            scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
            parts = self._parts(path, role, int_repr=tensor.int_repr(), scales=scales, zero_points=zeros)
            return parts and Leaf("quantized_channel", parts, (dtype, tensor.q_per_channel_axis()))
        self.refuse(path, f"a tensor quantised as {scheme}")
        return None

    def _item(
        self, tensor: torch.Tensor, path: str, role: str, trainable: bool, shape: tuple[int, ...] | None = None
    ) -> int | None:
        """Add an item. ``shape``: the global shape, if ``tensor`` is only this rank's shard."""
        name = dtype_name(tensor.dtype)
        if name is None:
            self.refuse(path, f"dtype {tensor.dtype}, which the format has no name for")
            return None
        if len(path.encode(errors="surrogatepass")) > NAME_BYTES_MAX:
            self.refuse(path[:80] + "…", f"its path is longer than {NAME_BYTES_MAX} bytes")
            return None
        key = identity(tensor)
        index = self.known.get(key, self._fixed_known.get(key)) if tensor.numel() and shape is None else None
        if index is not None:
            return index
        return self._add(tensor, key, path, name, role, trainable, tensor.shape if shape is None else shape)

    def _add(
        self,
        tensor: torch.Tensor,
        key: tuple[object, ...],
        path: str,
        name: str,
        role: str,
        trainable: bool,
        shape: tuple[int, ...],
    ) -> int:
        self._alive.append(tensor)  # addresses stay unique while all of them are alive
        trainable = trainable or key in self.trained
        role = "param" if trainable and role == "value" else role
        self.items.append(Item(self._unique(path), name, tuple(shape), role, TensorSource(tensor), None, trainable))
        self.known[key] = len(self.items) - 1
        return len(self.items) - 1

    def _spread(self, tensor: torch.Tensor | Flat, path: str, role: str, trainable: bool) -> Leaf | None:
        """Return the leaf for a sharded tensor. Its item has the global shape, and this rank's shard as source."""
        spread = spread_of(tensor)
        if isinstance(spread, str):
            self.refuse(path, spread)
            return None
        reason = why_not(spread.local)
        if reason is None and (spread.local.layout != torch.strided or spread.local.is_quantized):
            reason = "spread over ranks, and not a dense tensor"
        if reason is not None:
            self.refuse(path, reason)
            return None
        # not identified by memory: a rank may have none of it, and all ranks must get the same items
        key = tensor.key if isinstance(tensor, Flat) else ("spread", id(tensor))
        known = self.known.get(key, self._fixed_known.get(key))
        if known is not None:
            return Leaf("tensor", (known,))
        index = self._item(spread.local, path, role, trainable, tuple(tensor.shape))
        if index is None:
            return None
        self._alive.append(tensor)
        self.known[key] = index
        self.spreads[index] = spread
        return Leaf("tensor", (index,))

    def _unique(self, path: str) -> str:
        """Return ``path``, or another name if two keys print alike (two NaNs): a part must not have a name twice."""
        while path in self.names or path in self._fixed_names:
            path += "~"
        self.names.add(path)
        return path

    def _array(self, array: Any, path: str, role: str) -> Leaf | None:
        import numpy as np

        if array.dtype.kind not in _NUMPY_KINDS or array.dtype.hasobject or not array.dtype.itemsize:
            instead = ": pass .tolist() of it, if its elements are plain values" if array.dtype.hasobject else ""
            self.refuse(path, f"a numpy array of dtype {array.dtype}{instead}")
            return None
        dtype_text, shape = array.dtype.str, array.shape
        dense = np.ascontiguousarray(array)
        name, dims = dense.dtype.name, tuple(shape)
        if name not in DTYPES or dtype_text[0] == ">":  # the format is little-endian: others are stored as raw bytes
            name, dims = "uint8", (dense.nbytes,)
        self._alive.append(dense)
        data = memoryview(dense.reshape(-1).view(np.uint8).data) if dense.nbytes else memoryview(b"")
        self.items.append(Item(self._unique(path), name, dims, role, Bytes(data)))
        return Leaf("numpy", (len(self.items) - 1,), (dtype_text, tuple(shape)))

    def _container(self, value: Any, path: str, role: str, level: int) -> Any:
        if id(value) in self._open:
            self.refuse(path, "a container that contains itself")
            return None
        self._open.add(id(value))
        try:
            if isinstance(value, Mapping):
                entries: dict[Any, Any] = {}
                for key, item in value.items():
                    plain = self._key(key, path)
                    entries[plain] = self.value(item, join_path(path, plain), role, level + 1)
                return entries
            if isinstance(value, (set, frozenset)):
                return type(value)(self._key(item, path) for item in value)
            items = [
                self.value(item, join_path(path, i, sequence=True), role, level + 1) for i, item in enumerate(value)
            ]
            return items if isinstance(value, list) else tuple(items)
        finally:
            self._open.discard(id(value))

    def _key(self, key: Any, path: str) -> Any:
        if type(key) in (tuple, frozenset):
            return type(key)(self._key(element, path) for element in key)
        if type(key) in (bool, int, float, complex, str, bytes, type(None)):
            reason = _unwritable(key)
            if reason is None:
                return key
        else:
            reason = f"a {type(key).__module__}.{type(key).__qualname__}: pass str() or another plain value of it"
        self.refuse(path, f"a key or member of a set: {reason}")
        return repr(key).encode("ascii", "backslashreplace").decode()


def _unwritable(value: Any) -> str | None:
    """Return why the tree cannot hold a plain value, with ``encode_tree``'s reasons; None if it can."""
    if type(value) is int and value.bit_length() > DIGITS_MAX * 3:
        return f"an integer of {value.bit_length()} bits"
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return "text that is not valid Unicode (a lone surrogate)"
    return None
