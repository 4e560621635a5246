"""Restore a stored state into live objects. All of it is checked before a byte is read; bytes go into live memory."""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from relight.capture import rng as generators
from relight.capture.capture import loose_tensors, named_gradients
from relight.capture.classes import class_path, class_paths, is_of, is_torchs, lineage, renamed_classes
from relight.capture.flattened import OUTERMOST, drop_gathered, flattened_state, is_flattened
from relight.capture.kinds import (
    LOADER,
    MODULE,
    OPTIMIZER,
    RNG,
    SCALER,
    SCHEDULER,
    VALUE,
    kind_of,
    named_parameters,
    own_name,
    unwrap,
    wrapped,
)
from relight.capture.load_tree import nothing_fits, thunks
from relight.capture.loaders import loader_unfit, remember_rng, restore_loader
from relight.capture.memory_of_targets import why_no_bytes
from relight.capture.module_state import is_plain, plain_state
from relight.capture.node_loaders import drop_iterator
from relight.capture.objects import flattens, is_mark, unfit
from relight.capture.own_loading import (
    empty_buffer,
    is_lazy,
    is_parameter_attribute,
    makes_room,
    materialise,
    not_taken,
)
from relight.capture.plain_forms import fields_in, takes_back, with_fields
from relight.capture.rebuild import Check, FreshTensors, Thunk, torch_dtype
from relight.capture.refill import (
    refill_array,
    refill_bytes,
    refill_deque,
    refill_dict,
    refill_sequence,
    refill_set,
    refill_tensor,
)
from relight.capture.restore_optimizer import OptimizerPlan, follow_weights
from relight.capture.restore_plan import FIRST, LAST, LOADERS, STATE, Planning, RestorePlan
from relight.capture.sharded import Flat
from relight.capture.targets import dtype_text
from relight.capture.tensor_views import TensorViews
from relight.capture.tensors import without_repeats
from relight.capture.typed_values import like, member
from relight.errors import IncompatibleState, RelightError
from relight.format import Leaf, Tensor, decode_tree
from relight.format.class_names import name_in
from relight.format.tree import join_path
from relight.torch_private.flat_parameters import is_flattened_elsewhere

SAME_SETTINGS = "build the module with the settings it was saved with, and convert it the same way before the restore"
TAKE = "override _load_from_state_dict in its class, or register a load_state_dict pre-hook"
_is_leaf, _grad = attrgetter("is_leaf"), attrgetter("grad")
Rename = Mapping[str, str] | Callable[[str], str] | None


def plan_restore(
    components: Mapping[str, object],
    tensors: Sequence[Tensor],
    tree: bytes | Mapping[Any, Any],
    *,
    only: Sequence[str] | None = None,
    strict: bool = True,
    rename: Rename = None,
    where: str = "",
    check: Check | None = None,
    elsewhere: bool = False,
    classes: Mapping[str, str] | None = None,
    casts: bool = False,
) -> RestorePlan:
    """Plan the restore of a stored state into ``components``.

    Raise ``IncompatibleState`` with all mismatches at once; then nothing has changed. ``tree``: encoded, or decoded.
    ``elsewhere``: stored values without a live place may belong to other ranks, so the caller must ``refuse`` those that
    no rank takes. ``check``: see ``FreshTensors``. ``classes``: of the stored components, from ``recorded_classes``.
    ``casts``: whether floating-point tensors may have another dtype than the stored ones, even if ``strict``.
    """
    planner = _Planner(
        components,
        tensors,
        only,
        strict,
        _renamer(rename) if rename is not None else None,
        FreshTensors(tensors, check),
        where,
        casts,
    )
    if classes:
        planner.classes = renamed_classes(classes, planner.rename) if planner.rename is not None else classes
    try:
        planner.plan(decode_tree(tree, len(tensors), where) if isinstance(tree, bytes) else tree)
        planner.targets.refuse_read_only()
        if planner.idle and not elsewhere and not planner.wrong:
            error = nothing_fits(planner.idle, where)
            if strict or len(planner.idle) == len(set(only or ())):
                raise error
            planner.result.notes.append(error.what)
        if elsewhere:
            planner.result.unused = planner.unused
        else:
            planner.wrong += planner.unused
        planner.result.refuse(planner.wrong)
    except RelightError:
        planner.back()
        raise
    return planner.close()


def planned_mismatches(
    components: Mapping[str, object], tensors: Sequence[Tensor], tree: Mapping[Any, Any], memory: FreshTensors
) -> list[str]:
    """Return the mismatches that would make a strict restore of ``tree`` into ``components`` fail. Change nothing."""
    planner = _Planner(components, tensors, None, True, None, memory, "")
    planner.classes = class_paths(components)
    try:
        planner.plan(tree)
    finally:
        planner.back()
    return planner.wrong + planner.unused


class _Planner(Planning):
    def plan(self, root: Any) -> None:
        if not isinstance(root, dict):
            self.wrong.append("the stored state is not a dict of components")
            return
        self.imported = "imported" in root
        if self.rename is not None:
            root = _renamed(root, self.rename)
        # optimizers check which parameters fit
        modules_first = sorted(self.components.items(), key=lambda pair: kind_of(pair[1]) != MODULE)
        for name, value in modules_first:
            if not self.touches(name):
                continue
            if name not in root:
                self.wrong.append(f"{name}: missing in the checkpoint")
                continue
            self._component(name, value, root[name])
        if self.only is None:
            for name in root.keys() - self.components.keys() - {"rng", "grad", "imported"}:
                self.unused.append(f"{name}: in the checkpoint, but not given to the Checkpointer")
            self._gradients(root.get("grad"))
        if "rng" in root and self.takes("rng"):
            self._rng(root["rng"])

    def close(self) -> RestorePlan:
        for value in self.components.values():
            if isinstance(value, torch.optim.Optimizer):
                follow_weights(self, value)
        self.result.sinks = self.targets.sinks(self.memory)
        self.result.fresh = self.memory.indices
        self.do(FIRST, self.targets.filled)
        return self.result

    # -- components

    def _component(self, name: str, value: Any, node: Any) -> None:
        kind = kind_of(value)
        path = join_path("", name)
        stored = self.classes.get(name)
        if isinstance(value, TensorViews):
            value.plan(self, node, path)
        elif kind == MODULE:
            self.note_class(path, value, stored)
            self._module(value if is_flattened(value) else unwrap(value), node, path)
        elif kind == OPTIMIZER:
            OptimizerPlan(self, value, path, stored).make(node)
        elif kind == VALUE:
            make = self._value(value, node, path)
            if make is not None:
                self.do(STATE, partial(self._keep_value, name, make))
        elif not self.takes(path):
            return
        else:
            reason = _unfit(kind, value, node, stored)
            if reason is not None:
                self.wrong.append(f"{path}: {reason}")
                return
            self.note_class(path, value, stored)
            if kind == SCALER and node and not value.is_enabled():
                self.result.notes.append(
                    f"{path}: stored by an enabled scaler, the live one is disabled, so its scale is dropped"
                )
            make = thunks(node, path, self.memory)
            if kind == LOADER:
                self.do(LOADERS, lambda: restore_loader(value, make(), strict=self.result.strict))
                self.do(LAST + 1, lambda: remember_rng(value))
            elif kind == RNG:
                self.do(LAST, lambda: self.guarded(path, lambda: generators.restore_generator(value, make())))
            else:
                self.do(STATE, lambda: self.guarded(path, lambda: _load(value, make(), path)))

    def _module(self, module: nn.Module, node: Any, path: str) -> None:
        if not isinstance(node, dict):
            self.wrong.append(f"{path}: stored as something other than a module")
            return
        flattened = is_flattened(module)
        if flattened:
            self.do(FIRST, partial(drop_gathered, module))
        plain = flattened_state(module) if flattened else plain_state(module)
        state: dict[str, Any] = module.state_dict(keep_vars=True) if plain is None else plain
        direct = plain is not None or is_plain(module, state)
        if not direct:
            self._materialise(state, node, path)
        wrappers = wrapped(module)
        keys = {own_name(key, wrappers): key for key in state} if wrappers else {}
        live = {key: state[keys[key]] for key in keys} if wrappers else state
        stored: dict[str, Any] = node
        simple = direct and self.only is None
        if (
            simple
            and stored.keys() == live.keys()
            and self.targets.all_plainly(_in_order_of(live, stored), list(live.values()))
        ):
            return
        taken: dict[str, Thunk] = {}
        inside: set[str] = set()
        stored_ids: set[int] | None = None
        for key, tensor in live.items():
            leaf = stored.get(key)
            if simple and type(leaf) is Leaf and self.targets.plainly(leaf, tensor):
                continue
            below = join_path(path, key)
            if not self.takes(below):
                continue
            if key not in stored:
                stored_ids = (
                    {id(value) for name, value in live.items() if name in stored} if stored_ids is None else stored_ids
                )
                if id(tensor) in stored_ids:
                    continue  # tied to a stored tensor: other formats keep a shared tensor under one of its names
                self.wrong.append(f"{below}: missing in the checkpoint{_live(tensor)}")
                continue
            if not flattened and is_flattened_elsewhere(tensor):
                self.wrong.append(f"{below}: flattened by a wrapper around the module that was given: {OUTERMOST}")
                continue
            if (
                not direct
                and type(leaf) is Leaf
                and leaf.kind == "tensor"
                and not_taken(module, keys.get(key, key), self._shapes(stored))
            ):
                if is_parameter_attribute(module, keys.get(key, key)):
                    self._plan_attribute(module, keys.get(key, key), leaf, tensor, below)
                    inside.add(keys.get(key, key))
                    continue
                self.wrong.append(
                    f"{below}: the module's state_dict gives it, and its load_state_dict does not take it: {TAKE}"
                )
                continue
            if is_mark(leaf) or flattens(tensor):
                if flattens(tensor):
                    self.targets.parts(leaf, tensor, below)
                else:
                    self.wrong.append(f"{below}: {unfit(leaf, tensor)}")
                continue
            if isinstance(tensor, (torch.Tensor, Flat)) and type(leaf) is Leaf and leaf.kind in ("tensor", "expanded"):
                if not direct and self._makes_room(module, keys.get(key, key), leaf, tensor, stored):
                    taken[keys.get(key, key)] = thunks(leaf, below, self.memory)
                    continue
                if not self.targets.fits(below, leaf, tensor):
                    if isinstance(tensor, Flat) or why_no_bytes(tensor) is None:
                        self.resized.add(id(tensor.owner if isinstance(tensor, Flat) else tensor))
                    continue
                if direct and self.targets.into(leaf, tensor, below):
                    continue
            taken[keys.get(key, key)] = thunks(leaf, below, self.memory)
        if self.only is None:
            for key in stored.keys() - live.keys():
                if self._gained(module, key, stored, join_path(path, key), taken, direct):
                    continue
                self.unused.append(
                    f"{join_path(path, key)}: in the checkpoint{self._stored(stored[key])}, but not in the module"
                )
        if taken:
            self.do(STATE, lambda: self._load_module(path, module, taken, direct, inside))

    def _materialise(self, state: Mapping[str, Any], stored: Mapping[str, Any], path: str) -> None:
        """Give lazy parameters and buffers the stored shapes. If the restore is refused, ``undo`` makes them lazy again."""
        for key, tensor in state.items():
            leaf, below = stored.get(key), join_path(path, key)
            if is_lazy(tensor) and self.takes(below) and type(leaf) is Leaf and leaf.kind == "tensor":
                kept = self.tensors[leaf.tensors[0]]
                self.memory.make(kept, partial(self._make_real, tensor, kept.shape))

    def _make_real(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        self.undo.append(materialise(tensor, shape))
        return tensor

    def _makes_room(
        self, module: nn.Module, key: str, leaf: Leaf, live: torch.Tensor | Flat, stored: Mapping[str, Any]
    ) -> bool:
        """Return whether the module's own loading code takes a tensor of another shape than the live one."""
        shape = self.tensors[leaf.tensors[0]].shape
        return leaf.kind == "tensor" and shape != tuple(live.shape) and makes_room(module, key, self._shapes(stored))

    def _plan_attribute(self, module: nn.Module, key: str, leaf: Leaf, live: Any, path: str) -> None:
        """Plan a tensor that is an attribute of a parameter of a subclass.

        It is read into live memory. If ``state_dict`` computes it each time, it is only compared.
        """
        second = module.state_dict(keep_vars=True)[key]
        if second.data_ptr() == live.data_ptr():
            if self.targets.fits(path, leaf, live) and not self.targets.into(leaf, live, path):
                self.wrong.append(f"{path}: the live tensor's layout takes no bytes")
            return
        make = thunks(leaf, path, self.memory)

        def compare() -> None:
            if not torch.equal(module.state_dict()[key].cpu(), make()):
                raise IncompatibleState(
                    "the live module has other settings than the stored one", where=path, hint=SAME_SETTINGS
                )

        self.do(LAST, compare)

    def _gained(
        self, module: nn.Module, key: str, stored: Mapping[str, Any], path: str, taken: dict[str, Thunk], direct: bool
    ) -> bool:
        """Plan a stored tensor that the module only has as an empty buffer, or that its loading code adds.

        Return False for others.
        """
        leaf = stored[key]
        if type(leaf) is not Leaf or leaf.kind != "tensor":
            return False
        if (empty := empty_buffer(module, key)) is not None:
            owner, name = empty
            make = thunks(leaf, path, self.memory)
            device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
            self.do(STATE, lambda: setattr(owner, name, make().to(device)))
            return True
        if not direct and makes_room(module, key, self._shapes(stored)):
            taken[key] = thunks(leaf, path, self.memory)
            return True
        return False

    def _shapes(self, stored: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        leaves = {
            key: self.tensors[entry.tensors[0]]
            for key, entry in stored.items()
            if type(entry) is Leaf and entry.kind == "tensor"
        }
        return {key: (entry.shape, torch_dtype(entry)) for key, entry in leaves.items()}

    def _load_module(
        self, path: str, module: nn.Module, taken: dict[str, Thunk], direct: bool, attributes: Set[str] = frozenset()
    ) -> None:
        values = {key: make() for key, make in taken.items()}
        if direct:
            extra = {key for key in values if key.endswith("_extra_state")}
            for key in extra:
                owner = module.get_submodule(key.removesuffix("_extra_state").removesuffix("."))
                self.guarded(join_path(path, key), partial(owner.set_extra_state, values[key]))
            live = flattened_state(module) if is_flattened(module) else module.state_dict(keep_vars=True)
            for key in values.keys() - extra:
                self.guarded(join_path(path, key), partial(_copy_into, live[key], values[key]))
            return
        current = module.state_dict()  # with its metadata: loading code checks the versions there
        for key in attributes:
            current.pop(key, None)
        current.update(values)
        self.guarded(path, lambda: module.load_state_dict(current, strict=True))

    def _gradients(self, node: Any) -> None:
        # none stored: clear all, or the next step would add to a stale gradient
        if not isinstance(node, dict) or not node:
            pairs = (
                named_parameters(component) if isinstance(component, nn.Module) else loose_tensors(component, "")
                for component in self.components.values()
            )
            live = [tensor for each in pairs for _, tensor in each]
            self.do(STATE, partial(_clear_gradients, live))
            return
        for name, parameter in named_gradients(self.components).items():
            if name not in node:
                self.do(STATE, partial(_clear_gradients, [parameter]))
                continue
            make = thunks(node[name], join_path("grad", name), self.memory)
            self.do(STATE, partial(_set_gradient, parameter, make))

    def _rng(self, node: Any) -> None:
        make = thunks(node, "rng", self.memory)

        def apply() -> None:
            state = make()
            self.guarded("rng", lambda: generators.restore_host(state))
            self.result.notes += generators.restore_devices(generators.of_devices(state))

        self.do(LAST, apply)

    # -- values

    def _value(self, live: Any, node: Any, path: str) -> Thunk | None:
        """Return a function that restores a plain component, in place if possible; None if nothing of it is selected."""
        if isinstance(live, torch.Tensor) and type(node) is Leaf and node.kind in ("tensor", "expanded"):
            if not self.takes(path) or not self.targets.fits(path, node, live):
                return None
            if self.targets.into(node, live, path):
                return lambda: live
            if without_repeats(live.detach()).shape != live.shape:
                self.wrong.append(f"{path}: elements of the live tensor share memory")
                return None
            return partial(refill_tensor, live, thunks(node, path, self.memory))
        if (
            isinstance(live, torch.Tensor)
            and type(node) is Leaf
            and node.kind.startswith(("sparse", "quantized"))
            and self.takes(path)
        ):
            return partial(refill_tensor, live, thunks(node, path, self.memory))
        if isinstance(live, (list, tuple, deque)) and isinstance(node, (list, tuple)):
            below = [join_path(path, i, sequence=True) for i in range(len(node))]
            items = [self._value(live[i] if i < len(live) else None, item, below[i]) for i, item in enumerate(node)]
            if not self.takes(path) and not all(items):
                return None
            if isinstance(live, deque):
                return partial(refill_deque, live, items)
            return partial(refill_sequence, live, items, type(node))
        if isinstance(node, dict) and takes_back(live):
            return self._fields(live, node, path)
        if isinstance(live, dict) and isinstance(node, dict):
            parts = {key: self._value(live.get(key), value, join_path(path, key)) for key, value in node.items()}
            whole = self.takes(path)
            if not whole and not any(parts.values()):
                return None
            return lambda: refill_dict(live, parts, whole)
        if not self.takes(path):
            return None
        make = thunks(node, path, self.memory)
        if isinstance(live, set) and isinstance(node, set):
            return lambda: refill_set(live, make())
        if type(live).__module__ == "numpy" and type(live).__name__ == "ndarray":
            return lambda: refill_array(live, make())
        if isinstance(live, Enum):
            return lambda: member(live, make(), path)
        if type(live) is bytearray:
            return lambda: refill_bytes(live, make())
        return make

    def _fields(self, live: Any, node: dict[Any, Any], path: str) -> Thunk | None:
        """Return a function that puts stored fields into a live Namespace or dataclass."""
        fields, whole = fields_in(live), self.takes(path)
        if not isinstance(live, (Namespace, SimpleNamespace)) and whole:
            for key in [key for key in node if key not in fields]:
                self.result.notes.append(
                    f"{join_path(path, key)}: stored, and {type(live).__qualname__} has no such field"
                )
        parts = {
            key: self._value(fields.get(key), value, join_path(path, key))
            for key, value in node.items()
            if key in fields or isinstance(live, (Namespace, SimpleNamespace))
        }
        if not whole and not any(parts.values()):
            return None

        def fill() -> Any:
            values = {key: make() for key, make in parts.items() if make is not None}
            return with_fields(live, values if whole else {**fields_in(live), **values})

        return fill

    # -- tools

    def _keep_value(self, name: str, make: Thunk) -> None:
        self.result.values[name] = make()

    def _stored(self, node: Any) -> str:
        return f" ({_text(self.tensors[node.tensors[0]])})" if type(node) is Leaf and node.tensors else ""


def _renamed(root: dict[Any, Any], rename: Callable[[str], str]) -> dict[Any, Any]:
    """Return the stored components under live names.

    Entries of dicts are renamed one by one, so that they may move to another component.
    """
    out: dict[Any, Any] = {}
    for component, node in root.items():
        if component == "grad" and isinstance(node, dict):
            out[component] = {rename(key): value for key, value in node.items()}
        elif (
            component == "rng"
            or not isinstance(node, dict)
            or not node
            or not all(isinstance(key, str) for key in node)
        ):
            out[rename(component)] = node
        else:
            for key, value in node.items():
                home, _, entry = rename(f"{component}/{key}").partition("/")
                out.setdefault(home, {})[entry] = value
    return out


def _in_order_of(live: Mapping[str, Any], stored: Mapping[str, Any]) -> list[Any]:
    """Return the stored values in the order of the live keys; nearly always they are in that order."""
    return list(stored.values()) if list(stored) == list(live) else [stored[key] for key in live]


def _clear_gradients(tensors: Sequence[torch.Tensor]) -> None:
    leaves = tensors if all(map(_is_leaf, tensors)) else [tensor for tensor in tensors if tensor.is_leaf]
    gradients = list(map(_grad, leaves))
    if gradients.count(None) < len(gradients):
        for tensor, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None and tensor.requires_grad:
                tensor.grad = None


def _set_gradient(parameter: torch.Tensor, make: Thunk) -> None:
    parameter.grad = make().to(parameter.device)


def _unfit(kind: str, value: Any, node: Any, stored: str | None) -> str | None:
    """Return why a stored state does not fit a live object, as far as known without loading it.

    ``stored``: the recorded class.
    """
    if kind == LOADER:
        return loader_unfit(value, node)
    if kind == RNG:
        return generators.unfit(value, node)
    if kind == SCALER and node == {} and value.is_enabled():
        return "stored by a disabled scaler, the live one is enabled"
    if kind == SCHEDULER and isinstance(node, dict):
        if (
            stored is not None
            and not is_of(value, stored)
            and is_torchs(stored)
            and any(map(is_torchs, lineage(value)))
        ):
            return f"stored by {name_in(stored)}, the live scheduler is {name_in(class_path(value))}"
        live = value.state_dict()
        lacking, foreign = live.keys() - node.keys(), node.keys() - live.keys()
        if lacking and foreign:
            has, lacks = (", ".join(sorted(map(str, keys))) for keys in (foreign, lacking))
            return f"stored by another kind of scheduler: it has {has} and lacks {lacks}"
    return None


def _load(value: Any, stored: Any, path: str) -> None:
    """Load a component's state, with the classes that its live state has."""
    state = like(value.state_dict(), stored, path)
    value.load_state_dict(state)
    drop_iterator(value)


def _renamer(rename: Rename) -> Callable[[str], str]:
    if rename is None:
        return lambda path: path
    if callable(rename):
        return rename
    table = dict(rename)

    def apply(path: str) -> str:
        for old, new in table.items():
            if old == path:
                return new
            if old.endswith("*") and path.startswith(old[:-1]):
                return (new[:-1] if new.endswith("*") else new) + path[len(old) - 1 :]
        return path

    return apply


def _text(stored: Tensor) -> str:
    return f"{stored.dtype} {list(stored.shape)}"


def _live(value: Any) -> str:
    if is_lazy(value):
        return ": the live one is not initialised yet, run a forward pass before the restore"
    return f" (live {dtype_text(value)} {list(value.shape)})" if isinstance(value, torch.Tensor) else ""


def _copy_into(live: torch.Tensor, value: torch.Tensor) -> None:
    """Copy elements into a parameter or buffer. A sparse one is not detached: a detached sparse tensor has other parts."""
    (live.detach() if live.layout is torch.strided else live).copy_(value)
