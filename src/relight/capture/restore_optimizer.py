"""Restore an optimizer: state by the parameter's name, group by group, straight into live memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from itertools import chain, repeat
from operator import eq
from typing import Any

import torch

from relight.capture.flat_params import declared_among, fill
from relight.capture.flattened import Original
from relight.capture.kinds import MODULE, kind_of
from relight.capture.load_tree import Later, thunks, whole
from relight.capture.objects import FORM, first_state, flattens, is_mark, marked, revived, unfit
from relight.capture.optimizers import (
    declared_in,
    flattened_in,
    holder_of,
    is_custom,
    live_custom,
    load_custom,
    names_of,
    own_parameters,
    parameter_names,
    place_like,
    why_not_apart,
)
from relight.capture.other_optimizer import other_optimizer, settings_of_both
from relight.capture.own_state import INNER, OWN, inner_optimizers, own_form_of
from relight.capture.rebuild import Thunk, raise_refusal, torch_dtype
from relight.capture.refill import set_group
from relight.capture.restore_plan import LAST, STATE, Planning
from relight.capture.tensors import touched
from relight.capture.typed_values import like
from relight.errors import REFUSALS
from relight.format import Leaf
from relight.format.tree import join_path
from relight.torch_private.tensors import read_version

_LIKE_PARAMETER = frozenset(
    (
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "sum",
        "acc_delta",
        "exp_inf",
        "prev",
    )
)
"""Names of state that has its parameter's shape in every optimizer; other state (Adafactor's factors) may not."""


ONE_STEP = "run one step of the optimizer before the restore, which makes it"


class OptimizerPlan:
    """The restore of one optimizer, the component at ``path``. ``stored``: the recorded class of the saved optimizer."""

    def __init__(self, planning: Planning, optimizer: Any, path: str, stored: str | None = None) -> None:
        self._planning, self._optimizer, self._path, self._stored = planning, optimizer, path, stored
        self._holder = holder_of(optimizer)
        self._made: dict[torch.Tensor, dict[Any, Any]] = {}
        self._later: list[tuple[Any, str, Any]] = []
        self._made_first: dict[torch.Tensor, dict[Any, Any]] | None = None
        self._by_number = False
        """Whether parameters were matched by position, which only their shapes confirm."""

    def make(self, node: Any) -> None:
        """Plan the restore of ``node`` into this optimizer, then into the optimizers inside it."""
        self._make(node)
        for inner, path, saved in self._later:
            if own_form_of(saved) is not None and not is_custom(inner):
                make = thunks(own_form_of(saved), path, self._planning.memory)
                self._planning.do(STATE, partial(self._planning.guarded, path, partial(_load, inner, make)))
            else:
                OptimizerPlan(self._planning, inner, path).make(saved)

    def _make(self, node: Any) -> None:
        planning, optimizer, path = self._planning, self._optimizer, self._path
        if not _is_optimizers(node):
            planning.wrong.append(f"{path}: stored as something other than an optimizer")
            return
        if why_not_apart(optimizer):
            planning.wrong.append(f"{path}: {why_not_apart(optimizer)}")
            return
        mismatch = other_optimizer(optimizer, node, self._stored, imported=planning.imported)
        if mismatch is not None:
            planning.wrong.append(f"{path}: {mismatch}")
            if not mismatch.fits or planning.result.strict:
                return
            node = {**node, "groups": [settings_of_both(optimizer, group) for group in node["groups"]]}
        else:
            planning.note_class(path, optimizer, self._stored)
        names = parameter_names(optimizer, planning.components)
        self._inner(node)
        if is_custom(optimizer) and own_form_of(node) is not None:
            self._own(node, names)
            return
        flattened = flattened_in(optimizer, planning.components)
        if _is_by_number(node):
            self._by_number = True
            node = self._named(node, names, bool(flattened))
            if node is None:
                return
        saved_groups: list[dict[str, Any]] = node["groups"]
        if not flattened and planning.rename is None and _groups_match(optimizer, names, saved_groups):
            renamed: dict[str, str] = {}
            groups = members = [set(group["params"]) for group in saved_groups]
            stored_names = members[0] if len(members) == 1 else set().union(*members)
        else:
            renamed = _renamed_parameters(node, planning)
            lives = [
                {name for p in group["params"] for name in names_of(p, names, flattened)}
                for group in optimizer.param_groups
            ]
            members = [{renamed[name] for name in group["params"]} for group in saved_groups]
            stored_names = set().union(*members)
            groups = [live & stored_names for live in lives]
            if planning.only is None:
                self._report_difference(set().union(*lives), stored_names, groups, members)
        if is_custom(optimizer):
            if declared_in(optimizer, planning.components):
                planning.wrong.append(
                    f"{path}: it loads its state by its own load_state_dict, and its parameters were flattened"
                )
                return
            self._load_custom(node, names)
            return
        state = {renamed[name]: value for name, value in node["state"].items()} if renamed else node["state"]
        if flattened or not self._in_place(names, stored_names, state):
            stepped = set(map(id, own_parameters(self._holder)))
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = names.get(id(parameter), "?")
                    if id(parameter) not in stepped:
                        continue
                    if id(parameter) in flattened:
                        originals = {original.named(name): original for original in flattened[id(parameter)]}
                        self._flattened(group, parameter, originals, state)
                    elif name in stored_names:
                        self._parameter(group, parameter, name, state)
            planning.do(STATE, self._set_states)
        self._masters(node.get("masters", {}), {new: old for old, new in renamed.items()})
        if planning.takes(f"{path}/groups"):
            for index, mine in enumerate(groups):
                homes = (
                    [index]
                    if index < len(members) and (mine is members[index] or mine <= members[index])
                    else (n for n, theirs in enumerate(members) if mine <= theirs)
                )
                for home in homes:
                    wanted = {key: value for key, value in saved_groups[home].items() if key != "params"}
                    make = thunks(wanted, f"{path}/groups/{index}", planning.memory)
                    planning.do(STATE, partial(self._set_group, index, make))
                    break
        if planning.takes(f"{path}/extra"):
            make_extra = thunks(node["extra"], f"{path}/extra", planning.memory)
            planning.do(STATE, lambda: self._holder.state.update(make_extra()))

    def _own(self, node: Mapping[str, Any], names: Mapping[int, str]) -> None:
        """Restore a state in the optimizer's own form with its ``load_state_dict``.

        Only with the same parameters in the same order.
        """
        planning, optimizer, path = self._planning, self._optimizer, self._path
        lives = [[names.get(id(parameter), "?") for parameter in group["params"]] for group in optimizer.param_groups]
        stored = [
            [
                _renamed_parameter(name, planning.components, planning.rename) if planning.rename is not None else name
                for name in group["params"]
            ]
            for group in node["groups"]
        ]
        if stored and stored != lives:
            here, theirs = set(chain(*lives)), set(chain(*stored))
            self._report_difference(
                here, theirs, [set(group) & theirs for group in lives], [set(group) for group in stored]
            )
            if here == theirs and list(map(set, lives)) == list(map(set, stored)):
                planning.wrong.append(
                    f"{path}: its parameters had another order when it was saved, and its state_dict is not by name"
                )
            return
        self._load_custom(node, names)

    def _load_custom(self, node: Mapping[str, Any], names: Mapping[int, str]) -> None:
        planning, optimizer, path = self._planning, self._optimizer, self._path
        if not planning.takes(path):
            return
        make = thunks(node, path, planning.memory)
        try:
            live = live_custom(optimizer, names)
        except Exception as error:  # noqa: BLE001 - the class's own state_dict
            planning.wrong.append(f"{path}: {type(error).__name__} in its state_dict: {error}")
            return
        if not marked(node):
            planning.do(
                STATE, lambda: planning.guarded(path, lambda: load_custom(optimizer, like(live, make(), path), names))
            )
            return
        if (reason := unfit(node, live)) is not None:
            first = {names.get(id(parameter), "?"): state for parameter, state in self._first(path).items()}
            live = {**live, "state": first}
            if OWN in node or unfit(node, live) is not None:
                planning.wrong.append(f"{path}: {reason}; {ONE_STEP}")
                return
        planning.do(
            STATE,
            lambda: planning.guarded(
                path, lambda: load_custom(optimizer, revived(like(live, make(), path), live), names)
            ),
        )

    def _inner(self, node: Mapping[str, Any]) -> None:
        """Plan optimizers inside this one that its ``state_dict`` leaves out: each as an optimizer, after this one."""
        planning, stored = self._planning, node.get(INNER)
        if not isinstance(stored, dict):
            return
        live = inner_optimizers(self._optimizer)
        for attribute, saved in stored.items():
            below = join_path(f"{self._path}/{INNER}", attribute)
            if attribute not in live or not _is_optimizers(saved):
                planning.wrong.append(f"{below}: an inner optimizer is stored, and the live optimizer has none there")
            elif planning.takes(below):
                self._later.append((live[attribute], below, saved))

    def _report_difference(
        self, live: Set[str], stored: Set[str], groups: Sequence[Set[str]], members: Sequence[Set[str]]
    ) -> None:
        """Report parameters that are on one side only, or in another group.

        ``groups``: live groups, with stored parameters only.
        """
        planning, path = self._planning, self._path
        for name in sorted(live - stored):
            planning.wrong.append(f"{path}: parameter {name} is missing in the checkpoint")
        for name in sorted(stored - live):
            planning.unused.append(f"{path}: parameter {name} is in the checkpoint, but the optimizer does not hold it")
        if len(members) != len(groups):
            planning.wrong.append(
                f"{path}: {len(members)} parameter groups stored, {len(groups)} live; "
                "call add_param_group() before the restore for those that were added later"
            )
            return
        for index, (mine, theirs) in enumerate(zip(groups, members, strict=True)):
            moved = sorted(mine - theirs)
            if moved:
                names_moved = ", ".join(moved[:4])
                planning.wrong.append(
                    f"{path}: group {index} was another one for {names_moved}: settings would be mixed up"
                )

    def _named(self, node: Mapping[str, Any], names: Mapping[int, str], flattened: bool) -> dict[str, Any] | None:
        """Return a node of another framework, with the live parameters' names in place of numbers.

        Numbers are matched group by group, in order. None, with a mismatch, if the groups' sizes differ.
        """
        optimizer, path = self._optimizer, self._path
        lives = [[names.get(id(parameter), "?") for parameter in group["params"]] for group in optimizer.param_groups]
        stored = [group["params"] for group in node["groups"]]
        if flattened:
            self._planning.wrong.append(
                f"{path}: stored by number, and its parameters were flattened: they cannot be matched"
            )
            return None
        if list(map(len, lives)) != list(map(len, stored)):
            saved, here = (" + ".join(str(len(group)) for group in groups) for groups in (stored, lives))
            self._planning.wrong.append(f"{path}: stored by number for {saved} parameters, this optimizer has {here}")
            return None
        names_of = {
            number: name
            for mine, theirs in zip(lives, stored, strict=True)
            for name, number in zip(mine, theirs, strict=True)
        }
        groups = [{**group, "params": mine} for group, mine in zip(node["groups"], lives, strict=True)]
        return {
            **node,
            "state": {names_of.get(key, key): value for key, value in node["state"].items()},
            "groups": groups,
        }

    def _in_place(self, names: Mapping[int, str], stored: set[str], state: Mapping[str, Any]) -> bool:
        """Plan to read all state into live memory if every tensor exists and fits. Return whether this was planned."""
        planning = self._planning
        if planning.only is not None or planning.resized:
            return False
        if not state and not self._holder.state:
            return True
        leaves: list[Any] = []
        lives: list[Any] = []
        keys: list[Any] = []
        tensors_like: list[Any] = []
        for parameter in own_parameters(self._holder):
            name = names.get(id(parameter), "?")
            if name not in stored:
                continue
            saved, current = state.get(name, {}), self._holder.state.get(parameter, {})
            if not isinstance(saved, dict) or len(saved) != len(current) or list(saved) != list(current):
                return False
            if list(saved) != keys:  # nearly all parameters have the same keys
                keys = list(saved)
                tensors_like = [key for key in keys if key in _LIKE_PARAMETER]
            shape = parameter.shape
            for key in tensors_like:
                leaf = saved[key]
                if type(leaf) is not Leaf or not leaf.tensors or planning.tensors[leaf.tensors[0]].shape != shape:
                    return False
            leaves += saved.values()
            lives += current.values()
        return planning.targets.all_plainly(leaves, lives)

    def _parameter(self, group: Any, parameter: torch.Tensor, name: str, state: Mapping[str, Any]) -> None:
        planning, path = self._planning, join_path(f"{self._path}/state", name)
        current = self._holder.state.get(parameter, {})
        saved = state.get(name)
        if name in state and not isinstance(saved, dict):
            planning.wrong.append(f"{path}: stored as something other than a parameter's state")
            return
        if saved is None:
            if current and planning.takes(path):
                planning.do(STATE, lambda: self._holder.state.pop(parameter, None))
            return
        foreign = (self._by_number or not planning.has_shape(name, parameter)) and any(
            key in _LIKE_PARAMETER
            and type(leaf) is Leaf
            and leaf.tensors
            and planning.tensors[leaf.tensors[0]].shape != parameter.shape
            for key, leaf in saved.items()
        )
        if foreign or id(parameter) in planning.resized:
            # Half a state is worse than none: the optimizer starts this parameter's state from scratch.
            planning.wrong.append(
                f"{path}: stored for a parameter of another shape, this one is {list(parameter.shape)}"
            )
            return
        values: dict[Any, Any] = {}
        for key, leaf in saved.items():
            tensor = current.get(key)
            if planning.only is None and type(leaf) is Leaf and planning.targets.plainly(leaf, tensor):
                values[key] = tensor
                continue
            below = join_path(path, key)
            if not planning.takes(below):
                if key in current:
                    values[key] = tensor
                continue
            if marked(leaf):
                values[key] = self._revived(parameter, key, leaf, tensor, below)
                continue
            if flattens(tensor):
                planning.targets.parts(leaf, tensor, below)
                continue
            if type(leaf) is not Leaf or leaf.kind != "tensor":
                values[key] = whole(leaf, below, planning.memory)
                continue
            stored = planning.tensors[leaf.tensors[0]]
            dtype = torch_dtype(stored)
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != stored.shape or tensor.dtype != dtype:
                tensor = planning.memory.make(
                    stored, partial(place_like, parameter, group, str(key), stored.shape, dtype)
                )
            if planning.only is not None or not planning.targets.plainly(leaf, tensor):
                planning.targets.add(leaf.tensors[0], tensor, below)
            values[key] = Later(partial(touched, tensor))
        if len(values) != len(current) or any(current.get(key) is not value for key, value in values.items()):
            self._made[parameter] = values

    def _revived(self, parameter: torch.Tensor, key: Any, node: Any, live: Any, path: str) -> Any:
        """Return state with objects or tensors of a subclass: live ones, or those that a first step would create."""
        planning = self._planning
        reason = unfit(node, live)
        if reason is not None:
            first = self._first(path).get(parameter, {}).get(key)
            reason_again = unfit(node, first)
            if reason_again is not None:
                planning.wrong.append(
                    f"{path}: {reason_again}" if first is not None else f"{path}: {reason}; {ONE_STEP}"
                )
                return None
            live = first
        if is_mark(node) and FORM in node:
            planning.targets.parts(node, live, path)
            return live
        make = thunks(node, path, planning.memory)

        def made() -> Any:
            results: list[Any] = []
            planning.guarded(path, lambda: results.append(revived(make(), live, parameter.device)))
            return results[0]

        return Later(made)

    def _first(self, path: str) -> dict[torch.Tensor, dict[Any, Any]]:
        if self._made_first is None:
            try:
                self._made_first = first_state(self._holder)
            except Exception as error:  # noqa: BLE001 - the optimizer's own code
                self._made_first = {}
                self._planning.result.notes.append(f"{path}: a trial step failed with {type(error).__name__}: {error}")
        return self._made_first

    def _flattened(
        self, group: Any, parameter: torch.Tensor, originals: Mapping[str, Original], state: Mapping[str, Any]
    ) -> None:
        """Plan the state of a flattened parameter: each original parameter in it has its own stored state."""
        planning, path = self._planning, f"{self._path}/state"
        here = {name: original for name, original in originals.items() if original.here}
        saved: dict[str, dict[Any, Any]] = {name: state[name] for name in here if isinstance(state.get(name), dict)}
        if not here:
            return
        leaves = {(name, key): leaf for name, states in saved.items() for key, leaf in states.items()}
        like = {
            (name, key)
            for (name, key), leaf in leaves.items()
            if key != "step" and self._is_like(leaf, here[name], key)
        }
        if id(parameter) in planning.resized or any(
            entry[1] in _LIKE_PARAMETER and entry not in like for entry in leaves
        ):
            # Half a state is worse than none: the optimizer starts from scratch for all parameters of this flat one.
            planning.wrong.append(
                f"{path}: state of {', '.join(here)} is not restored: flattened with a parameter of another shape"
            )
            return
        current = self._holder.state.get(parameter, {})
        if not saved:
            if current and planning.only is None:
                planning.do(STATE, lambda: self._holder.state.pop(parameter, None))
            return
        values: dict[Any, Any] = {} if planning.only is None else dict(current)
        for key in dict.fromkeys(key for _, key in leaves):
            chosen = {name: leaves[name, key] for name in saved if (name, key) in leaves}
            chosen = {
                name: leaf for name, leaf in chosen.items() if planning.takes(join_path(join_path(path, name), key))
            }
            if not chosen:
                continue
            name, leaf = next(iter(chosen.items()))
            below = join_path(join_path(path, name), key)
            if not all(type(saved_leaf) is Leaf and saved_leaf.kind == "tensor" for saved_leaf in chosen.values()):
                values[key] = whole(leaf, below, planning.memory)
                continue
            stored, tensor = planning.tensors[leaf.tensors[0]], current.get(key)
            dtype = torch_dtype(stored)
            if all((taken_name, key) in like for taken_name in chosen):
                if not isinstance(tensor, torch.Tensor) or tensor.shape != parameter.shape or tensor.dtype != dtype:
                    zeros = partial(torch.zeros_like, parameter, dtype=dtype, requires_grad=False)  # padding stays zero
                    try:
                        tensor = zeros()
                    except REFUSALS as error:
                        raise_refusal(stored, error)
                for where, part in chosen.items():
                    planning.targets.into(part, here[where].of(tensor, tensor), join_path(join_path(path, where), key))
            else:  # one value for all: they are stepped together
                if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != stored.shape or tensor.dtype != dtype:
                    tensor = planning.memory.make(
                        stored, partial(place_like, parameter, group, str(key), stored.shape, dtype)
                    )
                planning.targets.into(leaf, tensor, below)
            values[key] = Later(partial(touched, tensor))
        if values:
            self._made[parameter] = values

    def _masters(self, saved: Any, stored_as: Mapping[str, str]) -> None:
        """Plan the stored higher-precision values of flattened parameters; ``follow_weights`` fills the others."""
        planning = self._planning
        declared = declared_in(self._optimizer, planning.components)
        if saved and not declared and planning.only is None:
            planning.unused.append(
                f"{self._path}: values of {len(saved)} parameters in more precision, which this optimizer does not keep"
            )
        for flat in declared_among(own_parameters(self._optimizer)):
            for original, live in zip(*declared[id(flat)]):
                path = join_path(f"{self._path}/masters", original.name)
                leaf = saved.get(stored_as.get(original.name, original.name)) if isinstance(saved, dict) else None
                if not original.here or live.dtype == flat.dtype or not planning.takes(path):
                    continue
                if type(leaf) is Leaf and self._is_like(leaf, original, "exp_avg"):
                    planning.targets.into(leaf, original.of(flat, flat), path)
                    planning.mastered.add((id(flat), original.name))

    def _is_like(self, leaf: Any, original: Original, key: str) -> bool:
        if type(leaf) is not Leaf or leaf.kind != "tensor":
            return False
        shape = self._planning.tensors[leaf.tensors[0]].shape
        return shape == original.shape and bool(shape or key in _LIKE_PARAMETER)

    def _set_group(self, index: int, make: Thunk) -> None:
        set_group(self._optimizer.param_groups[index], make)  # a wrapping optimizer may have replaced its groups since

    def _set_states(self) -> None:
        for parameter, state in self._made.items():
            self._holder.state[parameter] = {
                key: value.make() if type(value) is Later else value for key, value in state.items()
            }


def _load(inner: Any, make: Thunk) -> None:
    inner.load_state_dict(make())


def follow_weights(planning: Planning, optimizer: torch.optim.Optimizer) -> None:
    """Copy restored parameters into the optimizer's flattened copies of them that have no stored values.

    Otherwise the next step would undo the restore. Needed even if nothing else of the optimizer is restored.
    """
    declared = declared_in(optimizer, planning.components)
    for flat in declared_among(own_parameters(optimizer)):
        for original, live in zip(*declared[id(flat)]):
            if original.here and (id(flat), original.name) not in planning.mastered:
                planning.do(LAST, partial(_follow, flat, original, live, _written(live)))


def _written(live: torch.Tensor) -> int:
    return -1 if live.is_inference() else read_version(live)


def _follow(flat: torch.Tensor, original: Original, live: torch.Tensor, before: int) -> None:
    if before < 0 or _written(live) != before:
        fill(flat, original, live)


def _renamed_parameters(node: Mapping[str, Any], planning: Planning) -> dict[str, str]:
    """Return the live name of each parameter in an optimizer's node."""
    names = _names_in(node)
    if planning.rename is None:
        return dict(zip(names, names, strict=True))
    return {name: _renamed_parameter(name, planning.components, planning.rename) for name in names}


def _renamed_parameter(stored: str, components: Mapping[str, object], rename: Callable[[str], str]) -> str:
    for component, value in components.items():
        if kind_of(value) == MODULE:
            path = f"{component}/{stored}"
            renamed = rename(path)
            if renamed != path:
                return renamed.split("/", 1)[-1]
    return stored


def _is_optimizers(node: Any) -> bool:
    """Return whether a node has the form that ``capture_optimizer`` gives."""
    if not isinstance(node, dict) or not {"state", "groups", "extra"} <= node.keys():
        return False
    groups, state = node["groups"], node["state"]
    return (
        isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), (list, tuple)) for group in groups)
        and isinstance(state, dict)
    )


def _groups_match(optimizer: Any, names: Mapping[int, str], groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the stored groups have the live parameters, in their order; nearly always true."""
    lives = [group["params"] for group in optimizer.param_groups]
    return len(lives) == len(groups) and all(
        len(mine) == len(theirs["params"])
        and all(map(eq, map(names.get, map(id, mine), repeat("?")), theirs["params"]))
        for mine, theirs in zip(lives, groups, strict=True)
    )


def _is_by_number(node: Mapping[str, Any]) -> bool:
    """Return whether the node names parameters by number, as other frameworks do."""
    return any(int in set(map(type, group["params"])) for group in node["groups"])


def _names_in(node: Mapping[str, Any]) -> set[str]:
    return {name for group in node["groups"] for name in group["params"]} | {
        key for key in node["state"] if isinstance(key, str)
    }
