"""Putting a stored state into live objects: everything is checked before a byte is read; bytes go straight into live memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from relight.capture import rng as generators
from relight.capture.build import Later, selected, thunks, whole
from relight.capture.captured import loose_tensors, named_gradients
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
from relight.capture.loaders import loader_unfit, remember_rng, restore_loader
from relight.capture.module_state import is_plain, plain_state
from relight.capture.optimizers import is_custom, load_custom, own_parameters, parameter_names, place_like
from relight.capture.rebuild import Check, Memory, Thunk, torch_dtype
from relight.capture.refill import refill_array, refill_dict, refill_sequence, refill_set, refill_tensor, set_group
from relight.capture.targets import Targets, dtype_text
from relight.capture.tensors import touched, without_repeats
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
    tree: bytes | Mapping[Any, Any],
    *,
    only: Sequence[str] | None = None,
    strict: bool = True,
    rename: Rename = None,
    where: str = "",
    check: Check | None = None,
    nowhere: Callable[[Sequence[str]], Sequence[str]] = list,
) -> RestorePlan:
    """Plan how what is stored goes into ``components``. ``IncompatibleState`` lists every mismatch at once; nothing was changed then.

    ``tree``: encoded, or decoded. ``nowhere`` is given sentences about what is in the checkpoint and not here, and gives back those that
    count: what another rank has is not missed. ``check``: see ``Memory``.
    """
    planner = _Planner(components, tensors, only, strict, _renamer(rename) if rename is not None else None, Memory(tensors, check))
    planner.plan(decode_tree(tree, len(tensors), where) if isinstance(tree, bytes) else tree)
    planner.wrong += nowhere(planner.unused)
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
        rename: Callable[[str], str] | None,
        memory: Memory,
    ) -> None:
        self.components, self.tensors, self.only, self.rename, self._memory = components, tensors, only, rename, memory
        self.result = RestorePlan()
        self.wrong: list[str] = []
        self.unused: list[str] = []
        self.targets = Targets(tensors, self.wrong, strict=strict)
        self._resized: set[int] = set()

    def plan(self, root: Any) -> None:
        if not isinstance(root, dict):
            self.wrong.append("the stored state is not a dict of components")
            return
        if self.rename is not None:
            root = _renamed(root, self.rename)
        for name, value in self.components.items():
            if not self._touches(name):
                continue
            if name not in root:
                self.wrong.append(f"{name}: missing in the checkpoint")
                continue
            self._component(name, value, root[name])
        if self.only is None:
            for name in root.keys() - self.components.keys() - {"rng", "grad"}:
                self.unused.append(f"{name}: in the checkpoint, but not given to the Checkpointer")
            self._gradients(root.get("grad"))
        if "rng" in root and self._takes("rng"):
            self._rng(root["rng"])

    def close(self) -> RestorePlan:
        self.result.sinks = self.targets.sinks(self._memory)
        self._do(_FIRST, self.targets.filled)
        return self.result

    # -- components

    def _component(self, name: str, value: Any, node: Any) -> None:
        kind = kind_of(value)
        path = join_path("", name)
        if kind == MODULE:
            self._module(unwrap(value), node, path)
        elif kind == OPTIMIZER:
            self._optimizer(value, node, path)
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

    def _module(self, module: nn.Module, node: Any, path: str) -> None:
        if not isinstance(node, dict):
            self.wrong.append(f"{path}: stored as something other than a module")
            return
        plain = plain_state(module)
        state: dict[str, Any] = module.state_dict(keep_vars=True) if plain is None else plain
        direct = plain is not None or is_plain(module, state)
        wrappers = wrapped(module)
        keys = {own_name(key, wrappers): key for key in state} if wrappers else {}
        live = {key: state[keys[key]] for key in keys} if wrappers else state
        stored: dict[str, Any] = node
        simple = direct and self.only is None
        if simple and stored.keys() == live.keys() and self.targets.all_plainly([stored[key] for key in live], list(live.values())):
            return
        taken: dict[str, Thunk] = {}
        for key, tensor in live.items():
            leaf = stored.get(key)
            if simple and type(leaf) is Leaf and self.targets.plainly(leaf, tensor):
                continue
            at = join_path(path, key)
            if not self._takes(at):
                continue
            if key not in stored:
                self.wrong.append(f"{at}: missing in the checkpoint{_live(tensor)}")
                continue
            if isinstance(tensor, torch.Tensor) and type(leaf) is Leaf and leaf.kind in ("tensor", "expanded"):
                if not self.targets.fits(at, leaf, tensor):
                    self._resized.add(id(tensor))
                    continue
                if direct and self.targets.into(leaf, tensor, at):
                    continue
            taken[keys.get(key, key)] = thunks(leaf, at, self._memory)
        if self.only is None:
            for key in stored.keys() - live.keys():
                self.unused.append(f"{join_path(path, key)}: in the checkpoint{self._stored(stored[key])}, but not in the module")
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

    def _optimizer(self, optimizer: Any, node: Any, path: str) -> None:
        if not _is_optimizers(node):
            self.wrong.append(f"{path}: stored as something other than an optimizer")
            return
        names = parameter_names(optimizer, self.components)
        renamed = self._renamed_parameters(node)
        live = {names.get(id(p), "?") for p in own_parameters(optimizer)}
        saved_groups: list[dict[str, Any]] = node["groups"]
        members = [{renamed[one] for one in group["params"]} for group in saved_groups]
        held = set().union(*members)
        groups = [{names.get(id(p), "?") for p in group["params"]} & held for group in optimizer.param_groups]
        if self.only is None:
            for one in sorted(live - held):
                self.wrong.append(f"{path}: parameter {one} is missing in the checkpoint")
            for one in sorted(held - live):
                self.unused.append(f"{path}: parameter {one} is in the checkpoint, but the optimizer does not hold it")
            if len(saved_groups) != len(groups):
                self.wrong.append(f"{path}: {len(saved_groups)} parameter groups stored, {len(groups)} live")
            else:
                for index, (mine, theirs) in enumerate(zip(groups, members, strict=True)):
                    moved = sorted(mine - theirs)
                    if moved:
                        self.wrong.append(f"{path}: group {index} was another one for {', '.join(moved[:4])}: settings would be mixed up")
        if is_custom(optimizer):
            if self._takes(path):
                make = thunks(node, path, self._memory)
                self._do(_STATE, lambda: self._guarded(path, lambda: load_custom(optimizer, make(), names)))
            return
        state = {renamed[one]: value for one, value in node["state"].items()}
        if not self._in_place(optimizer, names, held, state):
            made: dict[torch.Tensor, dict[Any, Any]] = {}
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names.get(id(parameter), "?")
                    if name in held:
                        self._parameter_state(optimizer, group, parameter, name, state, f"{path}/state", made)
            self._do(_STATE, partial(_set_states, optimizer, made))
        if self._takes(f"{path}/groups"):
            for index, (group, mine) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
                homes = [index] if index < len(members) and mine <= members[index] else (n for n, one in enumerate(members) if mine <= one)
                for home in homes:
                    wanted = {key: value for key, value in saved_groups[home].items() if key != "params"}
                    make = thunks(wanted, f"{path}/groups/{index}", self._memory)
                    self._do(_STATE, partial(set_group, group, make))
                    break
        if self._takes(f"{path}/extra"):
            make_extra = thunks(node["extra"], f"{path}/extra", self._memory)
            self._do(_STATE, lambda: optimizer.state.update(make_extra()))

    def _in_place(self, optimizer: Any, names: Mapping[int, str], held: set[str], state: Mapping[str, Any]) -> bool:
        """Whether all state is there already, and can be read to where it is; done then, else nothing is."""
        if self.only is not None or self._resized:
            return False
        leaves: list[Any] = []
        lives: list[Any] = []
        keys: list[Any] = []
        like: list[Any] = []
        for parameter in own_parameters(optimizer):
            name = names.get(id(parameter), "?")
            if name not in held:
                continue
            saved, current = state.get(name, {}), optimizer.state.get(parameter, {})
            if not isinstance(saved, dict) or len(saved) != len(current) or list(saved) != list(current):
                return False
            if list(saved) != keys:  # nearly all have the same
                keys = list(saved)
                like = [key for key in keys if key in _LIKE_PARAMETER]
            shape = parameter.shape
            for key in like:
                leaf = saved[key]
                if type(leaf) is not Leaf or not leaf.tensors or self.tensors[leaf.tensors[0]].shape != shape:
                    return False
            leaves += saved.values()
            lives += current.values()
        return self.targets.all_plainly(leaves, lives)

    def _parameter_state(
        self,
        optimizer: Any,
        group: Any,
        parameter: torch.Tensor,
        name: str,
        state: Mapping[str, Any],
        path: str,
        all_made: dict[torch.Tensor, dict[Any, Any]],
    ) -> None:
        current = optimizer.state.get(parameter, {})
        saved = state.get(name)
        if name in state and not isinstance(saved, dict):
            self.wrong.append(f"{join_path(path, name)}: stored as something other than a parameter's state")
            return
        if saved is None:
            if current and self._takes(join_path(path, name)):
                self._do(_STATE, lambda: optimizer.state.pop(parameter, None))
            return
        foreign = any(
            key in _LIKE_PARAMETER and type(leaf) is Leaf and leaf.tensors and self.tensors[leaf.tensors[0]].shape != parameter.shape
            for key, leaf in saved.items()
        )
        if foreign or id(parameter) in self._resized:
            # Half a state is worse than none: the optimizer begins this parameter's afresh.
            self.wrong.append(f"{join_path(path, name)}: stored for a parameter of another shape, this one is {list(parameter.shape)}")
            return
        made: dict[Any, Any] = {}
        for key, leaf in saved.items():
            tensor = current.get(key)
            if self.only is None and type(leaf) is Leaf and self.targets.plainly(leaf, tensor):
                made[key] = tensor
                continue
            below = join_path(join_path(path, name), key)
            if not self._takes(below):
                if key in current:
                    made[key] = tensor
                continue
            if type(leaf) is not Leaf or leaf.kind != "tensor":
                made[key] = whole(leaf, below, self._memory)
                continue
            stored = self.tensors[leaf.tensors[0]]
            dtype = torch_dtype(stored)
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != stored.shape or tensor.dtype != dtype:
                tensor = self._memory.make(stored, partial(place_like, parameter, group, str(key), stored.shape, dtype))
            if self.only is not None or not self.targets.plainly(leaf, tensor):
                self.targets.add(leaf.tensors[0], tensor, below)
            made[key] = Later(partial(touched, tensor))
        if len(made) != len(current) or any(current.get(key) is not value for key, value in made.items()):
            all_made[parameter] = made

    def _gradients(self, node: Any) -> None:
        if not isinstance(node, dict) or not node:  # none stored: none is left, or the next step would count a stale one
            pairs = (named_parameters(one) if isinstance(one, nn.Module) else loose_tensors(one, "") for one in self.components.values())
            live = [tensor for each in pairs for _, tensor in each if tensor.requires_grad and tensor.is_leaf]
            self._do(_STATE, partial(_clear_gradients, live))
            return
        for name, parameter in named_gradients(self.components).items():
            if name not in node:
                self._do(_STATE, partial(_clear_gradients, [parameter]))
                continue
            make = thunks(node[name], join_path("grad", name), self._memory)
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
            if not self._takes(path) or not self.targets.fits(path, node, live):
                return None
            if self.targets.into(node, live, path):
                return lambda: live
            if without_repeats(live.detach()).shape != live.shape:
                self.wrong.append(f"{path}: elements of the live tensor share memory")
                return None
            return partial(refill_tensor, live, thunks(node, path, self._memory))
        if isinstance(live, torch.Tensor) and type(node) is Leaf and node.kind.startswith(("sparse", "quantized")) and self._takes(path):
            return partial(refill_tensor, live, thunks(node, path, self._memory))
        if isinstance(live, (list, tuple)) and isinstance(node, (list, tuple)):
            below = [join_path(path, i, sequence=True) for i in range(len(node))]
            items = [self._value(live[i] if i < len(live) else None, one, below[i]) for i, one in enumerate(node)]
            if not self._takes(path) and not all(items):
                return None
            return partial(refill_sequence, live, items, type(node))
        if isinstance(live, dict) and isinstance(node, dict):
            parts = {key: self._value(live.get(key), value, join_path(path, key)) for key, value in node.items()}
            whole = self._takes(path)
            if not whole and not any(parts.values()):
                return None
            return lambda: refill_dict(live, parts, whole)
        if not self._takes(path):
            return None
        make = thunks(node, path, self._memory)
        if isinstance(live, set) and isinstance(node, set):
            return lambda: refill_set(live, make())
        if type(live).__module__ == "numpy" and type(live).__name__ == "ndarray":
            return lambda: refill_array(live, make())
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

    def _guarded(self, path: str, action: Thunk) -> None:
        try:
            action()
        except RelightError:
            raise
        except Exception as error:  # somebody else's load_state_dict: say whose, keep what it said
            raise IncompatibleState(f"{type(error).__name__} while restoring: {error}", where=path) from error

    def _stored(self, node: Any) -> str:
        return f" ({_text(self.tensors[node.tensors[0]])})" if type(node) is Leaf and node.tensors else ""

    def _renamed_parameters(self, node: Mapping[str, Any]) -> dict[str, str]:
        """Live names of the parameters an optimizer's node speaks of."""
        names = _names_in(node)
        if self.rename is None:
            return dict(zip(names, names, strict=True))
        return {name: _renamed_parameter(name, self.components, self.rename) for name in names}


def _renamed(root: dict[Any, Any], rename: Callable[[str], str]) -> dict[Any, Any]:
    """The stored components under live names: entries of dict-like ones one by one, so that they may also change component."""
    out: dict[Any, Any] = {}
    for component, node in root.items():
        if component == "grad" and isinstance(node, dict):
            out[component] = {rename(key): value for key, value in node.items()}
        elif component == "rng" or not isinstance(node, dict) or not node or not all(isinstance(key, str) for key in node):
            out[rename(component)] = node
        else:
            for key, value in node.items():
                home, _, entry = rename(f"{component}/{key}").partition("/")
                out.setdefault(home, {})[entry] = value
    return out


def _renamed_parameter(stored: str, components: Mapping[str, object], rename: Callable[[str], str]) -> str:
    for component, value in components.items():
        if kind_of(value) == MODULE:
            path = f"{component}/{stored}"
            renamed = rename(path)
            if renamed != path:
                return renamed.split("/", 1)[-1]
    return stored


def _is_optimizers(node: Any) -> bool:
    """Whether a node is built as ``capture_optimizer`` builds one."""
    if not isinstance(node, dict) or not {"state", "groups", "extra"} <= node.keys():
        return False
    groups, state = node["groups"], node["state"]
    return (
        isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), (list, tuple)) for group in groups)
        and isinstance(state, dict)
    )


def _names_in(node: Mapping[str, Any]) -> set[str]:
    return {name for group in node["groups"] for name in group["params"]} | {key for key in node["state"] if isinstance(key, str)}


def _set_states(optimizer: Any, made: dict[torch.Tensor, dict[Any, Any]]) -> None:
    for parameter, state in made.items():
        optimizer.state[parameter] = {key: value.make() if type(value) is Later else value for key, value in state.items()}


def _clear_gradients(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.grad is not None:
            tensor.grad = None


def _set_gradient(parameter: torch.Tensor, make: Thunk) -> None:
    parameter.grad = make().to(parameter.device)


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
    return f" (live {dtype_text(value)} {list(value.shape)})" if isinstance(value, torch.Tensor) else ""
