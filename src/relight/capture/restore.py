"""Putting a stored state into live objects: everything is checked before a byte is read; bytes go straight into live memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from relight.capture import rng as generators
from relight.capture.build import selected, thunks
from relight.capture.captured import named_gradients
from relight.capture.kinds import LOADER, MODULE, OPTIMIZER, RNG, SCALER, SCHEDULER, VALUE, kind_of, own_name, unwrap, wrapped
from relight.capture.loaders import loader_unfit, remember_rng, restore_loader
from relight.capture.optimizers import is_custom, load_custom, own_parameters, parameter_names, place_like
from relight.capture.rebuild import Memory, Thunk, torch_dtype
from relight.capture.tensors import FanOut, TensorSink, identity, touched, without_repeats
from relight.errors import IncompatibleState, RelightError
from relight.format import Leaf, Tensor, decode_tree
from relight.format.tree import join_path
from relight.layout import Sink

Rename = Mapping[str, str] | Callable[[str], str] | None
_FIRST, _STATE, _LOADERS, _LAST = range(4)
_LIKE_PARAMETER = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum", "acc_delta", "exp_inf", "prev")
)
"""State that has its parameter's shape in every optimizer that calls it so; other state (Adafactor's factors) need not."""


@dataclass
class RestorePlan:
    """Fill ``sinks``, then call ``finish``. ``values`` are those of components that cannot be changed in place, set by ``finish``."""

    sinks: dict[int, Sink] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _actions: list[tuple[int, Thunk]] = field(default_factory=list)

    def finish(self) -> None:
        """Set what is not tensors: loaders before generators, as making an iterator draws random numbers."""
        with torch.no_grad():
            for _, action in sorted(self._actions, key=lambda pair: pair[0]):
                action()
        self._actions.clear()  # they hold the temporaries, and this plan: a cycle that would keep all of it until some later collection


def plan_restore(
    components: Mapping[str, object],
    tensors: Sequence[Tensor],
    tree: bytes,
    *,
    only: Sequence[str] | None = None,
    strict: bool = True,
    rename: Rename = None,
    where: str = "",
) -> RestorePlan:
    """Plan how what is stored goes into ``components``. ``IncompatibleState`` lists every mismatch at once; nothing was changed then."""
    planner = _Planner(components, tensors, only, strict, _renamer(rename))
    root = decode_tree(tree, len(tensors), lambda leaf, path: leaf, where)
    planner.plan(root)
    if planner.wrong and strict:
        raise IncompatibleState(
            f"the checkpoint does not fit: {len(planner.wrong)} mismatches" if len(planner.wrong) > 1 else "the checkpoint does not fit",
            where=where,
            details=planner.wrong,
            hint="strict=False restores what fits; only=[patterns] restores a part; map={'old/*': 'new/*'} renames",
        )
    planner.result.skipped = planner.wrong
    return planner.close()


class _Planner:
    def __init__(
        self,
        components: Mapping[str, object],
        tensors: Sequence[Tensor],
        only: Sequence[str] | None,
        strict: bool,
        rename: Callable[[str], str],
    ) -> None:
        self.components, self.tensors, self.only, self.strict, self.rename = components, tensors, only, strict, rename
        self.result = RestorePlan()
        self.wrong: list[str] = []
        self._memory = Memory(tensors)
        self._direct: dict[int, list[TensorSink]] = {}
        self._owners: dict[tuple[object, ...], int] = {}
        self._resized: set[int] = set()

    def plan(self, root: Any) -> None:
        if not isinstance(root, dict):
            self.wrong.append("the stored state is not a dict of components")
            return
        root = self._renamed(root)
        for name, value in self.components.items():
            if not self._touches(name):
                continue
            if name not in root:
                self.wrong.append(f"{name}: missing in the checkpoint")
                continue
            self._component(name, value, root[name])
        if self.only is None:
            for name in root.keys() - self.components.keys() - {"rng", "grad"}:
                self.wrong.append(f"{name}: in the checkpoint, but not given to the Checkpointer")
            self._gradients(root.get("grad"))
        if "rng" in root and self._takes("rng"):
            self._rng(root["rng"])

    def close(self) -> RestorePlan:
        sinks = self._memory.sinks
        for index, direct in self._direct.items():
            if index in sinks:  # also wanted as a value
                direct = [*direct, TensorSink(self._memory.get(index))]
            sinks[index] = direct[0] if len(direct) == 1 else FanOut(direct)
        self.result.sinks = sinks
        return self.result

    def _renamed(self, root: dict[Any, Any]) -> dict[Any, Any]:
        """The stored components under live names: entries of dict-like ones one by one, so that they may also change component."""
        out: dict[Any, Any] = {}
        for component, node in root.items():
            if component == "grad" and isinstance(node, dict):
                out[component] = {self.rename(key): value for key, value in node.items()}
            elif component == "rng" or not isinstance(node, dict) or not node or not all(isinstance(key, str) for key in node):
                out[self.rename(component)] = node
            else:
                for key, value in node.items():
                    home, _, entry = self.rename(f"{component}/{key}").partition("/")
                    out.setdefault(home, {})[entry] = value
        return out

    # -- components

    def _component(self, name: str, value: Any, node: Any) -> None:
        kind = kind_of(value)
        path = join_path("", name)
        if kind == MODULE:
            self._module(name, unwrap(value), node, path)
        elif kind == OPTIMIZER:
            self._optimizer(name, value, node, path)
        elif kind == VALUE:
            make = self._value(value, node, path)
            if make is not None:
                self._do(_STATE, partial(self._keep_value, name, make))
        elif not self._takes(path):
            return
        else:
            reason = _unfit(kind, value, node)
            if reason is not None:
                self.wrong.append(f"{path}: {reason}")
                return
            make = thunks(node, path, self._memory)
            if kind == LOADER:
                self._do(_LOADERS, lambda: restore_loader(value, make()))
                self._do(_LAST + 1, lambda: remember_rng(value))
            elif kind == RNG:
                self._do(_LAST, lambda: self._guarded(path, lambda: generators.restore_generator(value, make())))
            else:
                self._do(_STATE, lambda: self._guarded(path, lambda: value.load_state_dict(make())))

    def _module(self, name: str, module: nn.Module, node: Any, path: str) -> None:
        if not isinstance(node, dict):
            self.wrong.append(f"{path}: stored as something other than a module")
            return
        wrappers = wrapped(module)
        keys = {own_name(key, wrappers): key for key in module.state_dict(keep_vars=True)}
        state = module.state_dict(keep_vars=True)
        live = {key: state[keys[key]] for key in keys}
        stored: dict[str, Any] = node
        direct = _is_plain(module)
        taken: dict[str, Thunk] = {}
        for key, tensor in live.items():
            at = join_path(path, key)
            if not self._takes(at):
                continue
            if key not in stored:
                self.wrong.append(f"{at}: missing in the checkpoint{_live(tensor)}")
                continue
            leaf = stored[key]
            if isinstance(tensor, torch.Tensor) and type(leaf) is Leaf and leaf.kind in ("tensor", "expanded"):
                if not self._fits(at, leaf, tensor):
                    self._resized.add(id(tensor))
                    continue
                if direct and self._into(leaf, tensor, at):
                    continue
            taken[keys[key]] = thunks(leaf, at, self._memory)
        if self.only is None:
            for key in stored.keys() - live.keys():
                self.wrong.append(f"{join_path(path, key)}: in the checkpoint{self._stored(stored[key])}, but not in the module")
        if taken:
            self._do(_STATE, lambda: self._load_module(path, module, taken, direct))

    def _load_module(self, path: str, module: nn.Module, taken: dict[str, Thunk], direct: bool) -> None:
        values = {key: make() for key, make in taken.items()}
        if direct:
            extra = {key for key in values if key.endswith("_extra_state")}
            for key in extra:
                owner = module.get_submodule(key.removesuffix("_extra_state").removesuffix("."))
                self._guarded(join_path(path, key), partial(owner.set_extra_state, values[key]))
            live = module.state_dict(keep_vars=True)
            for key in values.keys() - extra:
                self._guarded(join_path(path, key), partial(live[key].detach().copy_, values[key]))
            return
        current = module.state_dict()  # with its metadata: the versions that loading code looks at
        current.update(values)
        self._guarded(path, lambda: module.load_state_dict(current, strict=True))

    def _optimizer(self, name: str, optimizer: Any, node: Any, path: str) -> None:
        if not isinstance(node, dict) or not {"state", "groups", "extra"} <= node.keys():
            self.wrong.append(f"{path}: stored as something other than an optimizer")
            return
        names = parameter_names(optimizer, self.components)
        renamed = {stored: self._renamed_parameter(stored) for stored in _names_in(node)}
        live = [names.get(id(p), "?") for p in own_parameters(optimizer)]
        held = [renamed[one] for group in node["groups"] for one in group["params"]]
        if self.only is None:
            for one in sorted(set(live) - set(held)):
                self.wrong.append(f"{path}: parameter {one} is missing in the checkpoint")
            for one in sorted(set(held) - set(live)):
                self.wrong.append(f"{path}: parameter {one} is in the checkpoint, but the optimizer does not hold it")
            if len(node["groups"]) != len(optimizer.param_groups):
                self.wrong.append(f"{path}: {len(node['groups'])} parameter groups stored, {len(optimizer.param_groups)} live")
            else:
                for index, (group, saved) in enumerate(zip(optimizer.param_groups, node["groups"], strict=True)):
                    mine = {names.get(id(p), "?") for p in group["params"]} & set(held)
                    moved = sorted(mine - {renamed[one] for one in saved["params"]})
                    if moved:
                        self.wrong.append(f"{path}: group {index} was another one for {', '.join(moved[:4])}: settings would be mixed up")
        if is_custom(optimizer):
            if self._takes(path):
                make = thunks(node, path, self._memory)
                self._do(_STATE, lambda: self._guarded(path, lambda: load_custom(optimizer, make(), names)))
            return
        state = {renamed[one]: value for one, value in node["state"].items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter), "?")
                if name in held:
                    self._optimizer_state(optimizer, group, parameter, name, state, path)
        if self._takes(f"{path}/groups"):
            for index, group in enumerate(optimizer.param_groups):
                mine = {names.get(id(p), "?") for p in group["params"]} & set(held)
                homes = [one for one in node["groups"] if mine <= {renamed[name] for name in one["params"]}]
                if not homes:
                    continue
                saved = node["groups"][index] if index < len(node["groups"]) and node["groups"][index] in homes else homes[0]
                wanted = {key: value for key, value in saved.items() if key != "params"}
                make = thunks(wanted, f"{path}/groups/{index}", self._memory)
                self._do(_STATE, partial(_set_group, group, make))
        if self._takes(f"{path}/extra"):
            make_extra = thunks(node["extra"], f"{path}/extra", self._memory)
            self._do(_STATE, lambda: optimizer.state.update(make_extra()))

    def _optimizer_state(
        self, optimizer: Any, group: Any, parameter: torch.Tensor, name: str, state: Mapping[str, Any], path: str
    ) -> None:
        at = join_path(f"{path}/state", name)
        current = optimizer.state.get(parameter, {})
        if name not in state:
            if self._takes(at) and current:
                self._do(_STATE, lambda: optimizer.state.pop(parameter, None))
            return
        made: dict[Any, Thunk] = {}
        shapes = {key: self.tensors[leaf.tensors[0]].shape for key, leaf in state[name].items() if type(leaf) is Leaf and leaf.tensors}
        foreign = [key for key in _LIKE_PARAMETER & shapes.keys() if shapes[key] != tuple(parameter.shape)]
        if foreign or id(parameter) in self._resized:
            # Half a state is worse than none: the optimizer begins this parameter's afresh.
            self.wrong.append(f"{at}: stored for a parameter of another shape, this one is {list(parameter.shape)}")
            return
        for key, leaf in state[name].items():
            below = join_path(at, key)
            if not self._takes(below):
                if key in current:
                    made[key] = partial(current.__getitem__, key)
                continue
            if type(leaf) is not Leaf or leaf.kind != "tensor":
                made[key] = thunks(leaf, below, self._memory)
                continue
            stored = self.tensors[leaf.tensors[0]]
            dtype = torch_dtype(stored)
            tensor = current.get(key)
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != stored.shape or tensor.dtype != dtype:
                tensor = place_like(parameter, group, str(key), stored.shape, dtype)
            self._sink(leaf.tensors[0], tensor, below)
            made[key] = partial(touched, tensor)
        if made:
            self._do(_STATE, lambda: optimizer.state.__setitem__(parameter, {key: make() for key, make in made.items()}))

    def _gradients(self, node: Any) -> None:
        live = named_gradients(self.components)
        stored = node if isinstance(node, dict) else {}  # none stored: none is left, or the next step would count a stale one
        for name, parameter in live.items():
            leaf = stored.get(name)
            if leaf is None:
                self._do(_STATE, partial(setattr, parameter, "grad", None))
                continue
            make = thunks(leaf, join_path("grad", name), self._memory)
            self._do(_STATE, partial(_set_gradient, parameter, make))

    def _rng(self, node: Any) -> None:
        make = thunks(node, "rng", self._memory)

        def apply() -> None:
            state = make()
            self._guarded("rng", lambda: generators.restore_host(state))
            devices = {key: value for key, value in state.items() if key in ("cuda", "xpu", "mps")}
            self.result.notes += generators.restore_devices(devices)

        self._do(_LAST, apply)

    # -- values

    def _value(self, live: Any, node: Any, path: str) -> Thunk | None:
        """What puts a plain component back, in place where that is possible; None if nothing of it is selected."""
        if isinstance(live, torch.Tensor) and type(node) is Leaf and node.kind in ("tensor", "expanded"):
            if not self._takes(path) or not self._fits(path, node, live):
                return None
            if self._into(node, live, path):
                return lambda: live
            if without_repeats(live.detach()).shape != live.shape:
                self.wrong.append(f"{path}: elements of the live tensor share memory")
                return None
            return partial(_refill_tensor, live, thunks(node, path, self._memory))
        if isinstance(live, torch.Tensor) and type(node) is Leaf and node.kind.startswith(("sparse", "quantized")) and self._takes(path):
            return partial(_refill_tensor, live, thunks(node, path, self._memory))
        if isinstance(live, (list, tuple)) and isinstance(node, (list, tuple)):
            below = [join_path(path, i, sequence=True) for i in range(len(node))]
            items = [self._value(live[i] if i < len(live) else None, one, below[i]) for i, one in enumerate(node)]
            if not self._takes(path) and not all(items):
                return None
            return partial(_refill_sequence, live, items, type(node))
        if isinstance(live, dict) and isinstance(node, dict):
            parts = {key: self._value(live.get(key), value, join_path(path, key)) for key, value in node.items()}
            whole = self._takes(path)
            if not whole and not any(parts.values()):
                return None
            return lambda: _refill_dict(live, parts, whole)
        if not self._takes(path):
            return None
        make = thunks(node, path, self._memory)
        if isinstance(live, set) and isinstance(node, set):
            return lambda: _refill_set(live, make())
        if type(live).__module__ == "numpy" and type(live).__name__ == "ndarray":
            return lambda: _refill_array(live, make())
        return make

    # -- tools

    def _keep_value(self, name: str, make: Thunk) -> None:
        self.result.values[name] = make()

    def _do(self, order: int, action: Thunk) -> None:
        self.result._actions.append((order, action))

    def _takes(self, path: str) -> bool:
        return selected(path, self.only)

    def _touches(self, name: str) -> bool:
        if self.only is None:
            return True
        heads = [pattern.split("/", 1)[0] for pattern in self.only]
        return any(selected(name, [head]) for head in heads)

    def _fits(self, path: str, leaf: Leaf, live: torch.Tensor) -> bool:
        stored = self.tensors[leaf.tensors[0]]
        shape = tuple(leaf.meta) if leaf.kind == "expanded" else stored.shape
        if shape != tuple(live.shape) or (torch_dtype(stored) != live.dtype and self.strict):
            self.wrong.append(f"{path}: stored {stored.dtype} {list(shape)}, live {_dtype(live)} {list(live.shape)}")
            return False
        return True

    def _into(self, leaf: Leaf, live: torch.Tensor, path: str) -> bool:
        """Read straight into ``live``, if its layout allows it."""
        if live.layout != torch.strided or live.is_quantized or live.is_meta:
            return False
        target = live.detach()
        if target.is_conj() or target.is_neg():
            return False
        target = without_repeats(target)
        if tuple(target.shape) != self.tensors[leaf.tensors[0]].shape:
            return False
        if not self._sink(leaf.tensors[0], target, path):
            return True  # told; strict or not, nothing goes there
        self._do(_FIRST, lambda: touched(live))
        return True

    def _sink(self, index: int, tensor: torch.Tensor, path: str) -> bool:
        """Read ``index`` into ``tensor`` too. False, and told, if another stored tensor goes to the same memory."""
        owner = self._owners.setdefault(identity(tensor), index) if tensor.numel() else index
        if owner != index:
            other = self.tensors[owner].name
            self.wrong.append(f"{path}: tied to what {other} goes to, and stored apart from it")
            return False
        self._direct.setdefault(index, []).append(TensorSink(tensor, torch_dtype(self.tensors[index])))
        return True

    def _guarded(self, path: str, action: Thunk) -> None:
        try:
            action()
        except RelightError:
            raise
        except Exception as error:  # somebody else's load_state_dict: say whose, keep what it said
            raise IncompatibleState(f"{type(error).__name__} while restoring: {error}", where=path) from error

    def _stored(self, node: Any) -> str:
        return f" ({_text(self.tensors[node.tensors[0]])})" if type(node) is Leaf and node.tensors else ""

    def _renamed_parameter(self, stored: str) -> str:
        for component, value in self.components.items():
            if kind_of(value) == MODULE:
                path = f"{component}/{stored}"
                renamed = self.rename(path)
                if renamed != path:
                    return renamed.split("/", 1)[-1]
        return stored


def _is_plain(module: nn.Module) -> bool:
    """Whether reading into parameters and buffers is all that ``load_state_dict`` would do."""
    for one in module.modules():
        hooks = [getattr(one, name, None) for name in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")]
        own = type(one)._load_from_state_dict
        if any(hooks) or type(one).load_state_dict is not nn.Module.load_state_dict:
            return False
        if not own.__module__.startswith("torch.nn."):
            return False
    live = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}
    return all(
        not isinstance(tensor, torch.Tensor) or tensor is live.get(key) for key, tensor in module.state_dict(keep_vars=True).items()
    )


def _names_in(node: Mapping[str, Any]) -> set[str]:
    return {name for group in node["groups"] for name in group["params"]} | {key for key in node["state"] if isinstance(key, str)}


def _set_gradient(parameter: torch.Tensor, make: Thunk) -> None:
    parameter.grad = make().to(parameter.device)


def _set_group(group: dict[str, Any], make: Thunk) -> None:
    for key, value in make().items():
        current = group.get(key)
        if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor) and current.shape == value.shape:
            current.copy_(value)
        else:
            group[key] = value


def _refill_dict(live: dict[Any, Any], parts: Mapping[Any, Thunk | None], whole: bool) -> dict[Any, Any]:
    values = {key: live.get(key) if make is None else make() for key, make in parts.items() if make is not None or key in live}
    if whole:
        live.clear()
    live.update(values)
    return live


def _refill_sequence(live: list[Any] | tuple[Any, ...], items: Sequence[Thunk | None], kind: type) -> Any:
    values = [live[i] if make is None and i < len(live) else make() if make is not None else None for i, make in enumerate(items)]
    if not isinstance(live, list) or kind is not list:
        return kind(values)
    live[:] = values
    return live


def _refill_tensor(live: torch.Tensor, make: Thunk) -> torch.Tensor:
    """The live tensor with the made one's elements; the made one itself where torch cannot copy between the two."""
    value: torch.Tensor = make()
    if live.layout != value.layout or live.shape != value.shape or live.dtype != value.dtype:
        return value
    try:
        if live.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            live.resize_as_sparse_(value)
        live.copy_(value)  # not detached: a detached sparse tensor has parts of its own
    except RuntimeError:
        return value
    return live


def _unfit(kind: str, value: Any, node: Any) -> str | None:
    """Why a stored state is none of a live object's, as far as can be told without loading it."""
    if kind == LOADER:
        return loader_unfit(value, node)
    if kind == RNG:
        return generators.unfit(value, node)
    if kind == SCALER and node == {} and value.is_enabled():
        return "stored by a disabled scaler, the live one is enabled"
    if kind == SCHEDULER and isinstance(node, dict):
        live = value.state_dict()
        lacking, foreign = live.keys() - node.keys(), node.keys() - live.keys()
        if lacking and foreign:
            has, lacks = (", ".join(sorted(map(str, keys))) for keys in (foreign, lacking))
            return f"stored by another kind of scheduler: it has {has} and lacks {lacks}"
    return None


def _refill_set(live: set[Any], values: set[Any]) -> set[Any]:
    live.clear()
    live.update(values)
    return live


def _refill_array(live: Any, value: Any) -> Any:
    if live.shape == value.shape and live.dtype == value.dtype and live.flags.writeable:
        live[...] = value
        return live
    return value


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


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _live(value: Any) -> str:
    return f" (live {_dtype(value)} {list(value.shape)})" if isinstance(value, torch.Tensor) else ""
